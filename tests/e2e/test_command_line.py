"""The command as a user runs it: in a folder of their own, rightly and wrongly."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from patchlight import __version__, variant


def patchlight(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "patchlight", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_help_answers_at_once(tmp_path: Path) -> None:
    patchlight("--help", cwd=tmp_path)  # byte-compiles
    start = time.perf_counter()
    answer = patchlight("--help", cwd=tmp_path)
    assert time.perf_counter() - start < 1
    assert answer.returncode == 0
    assert "costs" in answer.stdout
    assert patchlight(cwd=tmp_path).stdout == answer.stdout


def test_version(tmp_path: Path) -> None:
    assert patchlight("--version", cwd=tmp_path).stdout == f"patchlight {__version__}\n"


def test_costs_table(tmp_path: Path) -> None:
    answer = patchlight("costs", "B/16", "B/8", "B/32", "--image-size", "224", cwd=tmp_path)
    assert (answer.returncode, answer.stderr) == (0, "")
    rows = [line.split() for line in answer.stdout.splitlines()]
    assert ["B/16", "224x224", "197", "86.6", "17.56", "36%", "64%", "5.6", "113"] in rows
    assert [row[0] for row in rows if row and "/" in row[0]] == ["B/16", "B/8", "B/32"]
    assert "…" not in answer.stdout, "the table does not fit 80 columns"


def test_timed_costs_table_fits_80_columns(tmp_path: Path) -> None:
    answer = patchlight("costs", "Ti/16", "mu/4", "--image-size", "32x64", "--time", cwd=tmp_path)
    assert answer.returncode == 0
    assert "…" not in answer.stdout
    assert "float32 on cpu" in " ".join(answer.stdout.split())


def test_costs_json(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(variant("Ti/8", image_size=64).to_json())
    answer = patchlight("costs", "mine.json", "--set", "num_registers=4", "--set", "mlp=swiglu", "--json", cwd=tmp_path)
    (row,) = json.loads(answer.stdout)
    assert (row["model"], row["tokens"], row["image_size"]) == ("mine.json", 69, [64, 64])
    assert "latency" not in row
    timed = patchlight("costs", "mu/16", "--image-size", "32", "--json", "--time", "--batch", "2", cwd=tmp_path)
    assert json.loads(timed.stdout)[0]["latency"]["batch"] == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["--nonsense"], "No such option: --nonsense"),
        (["costs"], "Missing argument 'MODEL'"),
        (["costs", "X/16"], "unknown variant 'X/16'"),
        (["costs", "B/16", "--image-size", "225"], "224x224 would do"),
        (["costs", "B/16", "--image-size", "big"], "image size 'big' is not a size"),
        (["costs", "B/16", "--image-size", "-3"], "image size '-3' is not a size"),
        (["costs", "B/16", "--image-size", "2x"], "'2x' is not a size"),
        (["costs", "B/16", "--set", "widht=3"], "did you mean 'width'?"),
        (["costs", "B/16", "--set", "width"], "write NAME=VALUE"),
        (["costs", "B/16", "--set", "image_size=[1,2,3]"], "image_size=(1, 2, 3) should be"),
        (["costs", "B/16", "--time", "--device", "nonsense"], "device='nonsense'"),
        (["costs", "B/16", "--batch", "0"], "--batch"),
        (["costs", "absent.json"], "absent.json: cannot be read"),
        (["costs", "broken.json"], "broken.json: the config is not valid JSON"),
        (["costs", "folder.json"], "folder.json: cannot be read"),
        (["costs", "binary.json"], "binary.json: cannot be read"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], says: str, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text('{"width": ')
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.json").mkdir()
    answer = patchlight(*arguments, cwd=tmp_path)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.count("\n") == 1
    assert answer.stderr.startswith("patchlight: ")
    assert says in answer.stderr
