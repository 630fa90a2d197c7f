"""What README.md and the docs tell people to type works; docs/architecture.md names every file."""

import re
import shlex
from pathlib import Path

import pytest

from command_line import patchlight

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [
    README,
    *((ROOT / "docs" / f"{name}.md").read_text() for name in ("attention", "deploy", "loading", "models", "tokens")),
]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
PYTHON_BLOCKS = [block for page in PAGES for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)]
COMMANDS = [command for page in PAGES for command in re.findall(r"^    (patchlight .*)$", page, re.MULTILINE)]
TREE = re.search(r"```text\n(.*?)```", ARCHITECTURE, re.DOTALL)


def test_readme_has_examples() -> None:
    assert PYTHON_BLOCKS
    assert COMMANDS
    assert TREE


@pytest.mark.parametrize("code", PYTHON_BLOCKS)
def test_python_example_runs_and_prints_what_it_says(
    code: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    promised = re.findall(r"print\(.*\)  # (.*)$", code, re.MULTILINE)
    assert promised
    assert capsys.readouterr().out.splitlines() == promised


@pytest.mark.parametrize("command", COMMANDS)
def test_command_runs(command: str, tmp_path: Path) -> None:
    run = patchlight(*shlex.split(command, comments=True)[1:], cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout


def test_tree_names_files_that_exist() -> None:
    assert TREE is not None
    paths, parents = [], []
    for line in TREE[1].splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        parents = [*parents[:depth], name]
        paths.append("".join(parents))
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert missing == []
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "patchlight").rglob("*.py")} - {
        str(path.relative_to(ROOT)) for path in (ROOT / "patchlight").rglob("__*__.py")
    }
    assert modules <= set(paths), "the tree in docs/architecture.md leaves a module out"
