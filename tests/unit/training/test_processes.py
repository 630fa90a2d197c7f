"""One process or many: what fails in one ends them all, and is said once."""

from pathlib import Path

import pytest
import torch

from patchlight.devices import resolve_device
from patchlight.errors import PatchlightError
from patchlight.training.processes import Processes, find_processes, rank_and_world
from warm_python import run_two

SCRIPT = """
import sys
from patchlight.errors import PatchlightError
from patchlight.training.processes import FailedElsewhereError, find_processes
failing = [int(rank) for rank in sys.argv[1:]]
with find_processes("cpu") as processes:
    with processes.together():
        pass
    try:
        with processes.together():
            if processes.rank in failing:
                raise PatchlightError("a mistake")
        found = "nothing"
    except FailedElsewhereError:
        found = "quiet"
    except PatchlightError as error:
        found = error
    print(f"{processes.rank} {found}\\n", end="", flush=True)
"""


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ([], {"0 nothing", "1 nothing"}),
        (["0"], {"0 a mistake", "1 quiet"}),
        (["1"], {"0 quiet", "1 a mistake"}),
        (["0", "1"], {"0 a mistake", "1 quiet"}),
    ],
)
def test_the_first_that_fails_says_why_and_all_end(failing: list[str], expected: set[str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run_two(["script.py", *failing], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == expected


def test_alone_an_error_is_an_error() -> None:
    with pytest.raises(KeyError), Processes(0, 1, torch.device("cpu")).together():
        raise KeyError


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "x"}, r"RANK='x' and WORLD_SIZE='1' in the environment are not those of a process; unset both"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK='2' and WORLD_SIZE='2'"),
        ({"WORLD_SIZE": ""}, "RANK='0' and WORLD_SIZE=''"),
    ],
)
def test_an_environment_that_is_not_torchruns_is_refused(
    environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PatchlightError, match=message):
        rank_and_world()


def test_processes_that_cannot_find_one_another_are_told_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        PatchlightError, match=r"cannot be joined \(.*\); start them with torchrun, or unset WORLD_SIZE"
    ):
        find_processes("cpu").__enter__()


def test_a_device_that_holds_nothing_is_refused() -> None:
    with pytest.raises(PatchlightError, match="device='meta' does not compute here"):
        resolve_device("meta")
