"""Builds the site into site/: python docs/make_site.py [--lessons FOLDER]

Its pages are docs/, the lessons (made by `python -m lessons`), the command line's own help, every documented function,
and the files that the docs point to. They are gathered in out/site/, and MkDocs makes the site of them, strictly: a
link that leads nowhere fails. The pages fetch nothing from elsewhere, and the search works from a folder on disk.
"""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "out" / "site"
EXPLAIN = ("rollout", "probes", "artifacts", "registers", "faithfulness", "receptive_field", "shuffling", "plot")


def gather_docs():
    """docs/ as it is, but for links that leave it: those lead to a page that shows the file."""
    for path in sorted((ROOT / "docs").rglob("*")):
        target = PAGES / path.relative_to(ROOT / "docs")
        if path.suffix in (".png", ".jpg"):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        elif path.suffix == ".md":
            target.write_text(with_links(path.read_text(), "docs"))
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        target = PAGES / {"README.md": "index.md"}.get(name, name.lower())
        target.write_text(with_links((ROOT / name).read_text(), ""))


def with_links(text, folder):
    """The page with its links put right; `folder` is where it lies in the repository."""

    def put_right(match):
        link, _, place = match[1].partition("#")
        if not link or ":" in link:
            return match[0]
        file = Path(os.path.normpath(ROOT / folder / link))
        if not file.exists():
            raise SystemExit(f"{folder or '.'}: the link {link} leads nowhere")
        if file.is_relative_to(ROOT / "docs"):
            to = str(file.relative_to(ROOT / "docs"))
        elif file.name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md") and file.parent == ROOT:
            to = {"README.md": "index.md"}.get(file.name, file.name.lower())
        elif file.is_relative_to(ROOT / "lessons") and file.name == "README.md":
            to = "lessons/index.md"
        else:
            to = show_file(file)
        return f"]({to}{'#' + place if place else ''})"

    return re.sub(r"\]\(([^)\s]+)\)", put_right, text)


def show_file(file):
    """A page that shows a file of the repository; its address."""
    name = file.relative_to(ROOT)
    target = PAGES / "files" / f"{name}.md"
    target.parent.mkdir(parents=True, exist_ok=True)
    body = file.read_text()
    language = {".py": "python", ".csv": "csv", ".jsonl": "json"}.get(file.suffix, "text")
    shown = body[:60_000]
    more = f"\n\nOnly the first {len(shown):,} of {len(body):,} characters are shown." if len(body) > len(shown) else ""
    target.write_text(f"# {name}\n\n````{language}\n{shown}\n````{more}\n")
    return str(target.relative_to(PAGES))


def command_line():
    """The help of every command, as typer knows it."""
    import typer.main
    from typer.cli import get_docs_for_click

    from patchlight.cli import app

    command = typer.main.get_command(app)
    with command.make_context("patchlight", [], resilient_parsing=True) as context:
        text = get_docs_for_click(obj=command, ctx=context, name="patchlight", title="The command line")
    (PAGES / "cli.md").write_text(text)


def functions():
    """Every public name, and what `patchlight.explain` has beside them, by mkdocstrings."""
    import patchlight

    names = "\n\n".join(f"::: {patchlight._HOMES[name]}.{name}" for name in patchlight.__all__)
    (PAGES / "api.md").write_text(f"# Python\n\nWhat `import patchlight as pl` offers.\n\n{names}\n")
    parts = ["# What a model saw\n\nThe parts of `patchlight.explain`."]
    for module in EXPLAIN:
        tree = ast.parse((ROOT / "patchlight" / "explain" / f"{module}.py").read_text())
        own = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        public = [node.name for node in own if ast.get_docstring(node) and not node.name.startswith("_")]
        listed = "\n\n".join(f"::: patchlight.explain.{module}.{name}" for name in public)
        parts.append(f"## patchlight.explain.{module}\n\n{ast.get_docstring(tree)}\n\n{listed}")
    (PAGES / "api-explain.md").write_text("\n\n".join(parts) + "\n")


def checkpoints():
    """The catalogue of checkpoints, as `patchlight models` lists it."""
    from patchlight.weights.catalog import ENTRIES

    rows = "\n".join(f"| `{entry.name}` | {entry.about} | {entry.licence} |" for entry in ENTRIES)
    text = "Load any of them by name: `pl.load(NAME)`.\n\n| name | what | licence |\n|---|---|---|\n"
    (PAGES / "checkpoints.md").write_text(f"# Checkpoints\n\n{text}{rows}\n")


def recipes():
    """What each recipe says of itself, and its file."""
    parts = ["# Recipes\n\nHow to train, and what was measured. Results are in [Train](training.md)."]
    for path in sorted((ROOT / "recipes").glob("*.py")):
        words = ast.get_docstring(ast.parse(path.read_text()))
        if words:
            parts.append(f"## {path.stem}\n\n{words}\n\n[recipes/{path.name}]({show_file(path)})")
    (PAGES / "recipes.md").write_text("\n\n".join(parts) + "\n")


def stand_alone(site):
    """Put our own script where the theme would fetch one that lets the search work from a folder."""
    fetched = "https://unpkg.com/iframe-worker/shim"
    shutil.copyfile(ROOT / "docs" / "search_from_a_folder.js", site / "search" / "from_a_folder.js")
    for page in site.rglob("*.html"):
        up = "../" * (len(page.relative_to(site).parts) - 1)
        page.write_text(page.read_text().replace(fetched, f"{up}search/from_a_folder.js"))
    elsewhere = re.compile(r"<(script|link|img)[^>]*https?://")
    left = [page.name for page in site.rglob("*.html") if elsewhere.search(page.read_text())]
    if left:
        sys.exit(f"these pages fetch something from elsewhere: {', '.join(left)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lessons", type=Path, help="where `python -m lessons` wrote them; made anew if not given")
    parser.add_argument("--site", type=Path, default=ROOT / "site", help="where the site goes")
    arguments = parser.parse_args()
    shutil.rmtree(PAGES, ignore_errors=True)
    (PAGES / "lessons").mkdir(parents=True)
    if arguments.lessons is None:
        made = subprocess.run([sys.executable, "-m", "lessons", "--out", str(PAGES / "lessons")], cwd=ROOT, check=False)
        if made.returncode:
            sys.exit("a lesson failed; see above")
    else:
        shutil.copytree(arguments.lessons, PAGES / "lessons", dirs_exist_ok=True)
    gather_docs()
    command_line()
    functions()
    checkpoints()
    recipes()
    # Not --quiet: MkDocs counts only the warnings that it prints, and would call a site with dead links whole.
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(arguments.site.resolve())]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    made = subprocess.run(build, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)
    if made.returncode:
        told = [line for line in made.stderr.splitlines() if not line.startswith("INFO")]
        sys.exit("\n".join([*told, "the site was not built"]))
    stand_alone(arguments.site)
    print(f"the site is in {arguments.site}; open {arguments.site / 'index.html'}")


if __name__ == "__main__":
    main()
