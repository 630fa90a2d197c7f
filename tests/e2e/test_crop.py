"""The crop job as its users meet it: a process that is killed, stopped, started twice, and started again."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from camera_traps import Walk, save_bright, write_frames
from crop_runs import everything_in, make_photos, rows_of, save_model

PROGRAM = """
import sys, time
from patchlight.batch.line import Stopped
from patchlight.batch.runner import crop_photos
from patchlight.batch.settings import CropSettings
from patchlight.errors import PatchlightError

def main():
    photos, out, model, workers, pause, burst = sys.argv[1:]
    def watch(progress):
        print(progress.done, flush=True)
        time.sleep(float(pause))
    try:
        settings = CropSettings(burst=bool(int(burst)))
        summary = crop_photos([photos], out, settings, model=model, device="cpu", workers=int(workers), watch=watch)
    except PatchlightError as error:
        sys.exit(print(error, file=sys.stderr) or 2)
    except Stopped as stopped:
        sys.exit(print(stopped, file=sys.stderr) or 128 + stopped.signal)
    print("computed", summary.computed)
    sys.exit(summary.exit_code)

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    make_photos(tmp_path / "photos", 30)
    (tmp_path / "photos" / "0005.jpg").write_bytes(b"no photo")
    return tmp_path / "photos"


def start(
    tmp_path: Path, model: Path, out: Path, *, workers: int = 2, pause: float = 0.0, burst: bool = False
) -> "subprocess.Popen[str]":
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    return subprocess.Popen(
        [sys.executable, program, tmp_path / "photos", out, model, str(workers), str(pause), str(int(burst))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    said, complained = process.communicate(timeout=120)
    return process.returncode, said, complained


def wait_for(process: "subprocess.Popen[str]", done: int) -> None:
    assert process.stdout is not None
    while int(process.stdout.readline()) < done:
        pass


def left_of(session: int) -> list[str]:
    """Processes of a session that are still there, and no zombies."""
    found = []
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            try:
                fields = (each / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] != "Z":
                    found.append((each / "cmdline").read_text())
            except OSError:
                continue
    return found


def assert_all_end(session: int) -> None:
    deadline = time.monotonic() + 15
    while (left := left_of(session)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def test_kill_at_any_point(tmp_path: Path, photos: Path, model: Path) -> None:
    make_photos(photos, 90)
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert finish(start(tmp_path, model, whole))[0] == 3
    journals = [0]
    waits = random.Random(0)
    for _ in range(3):
        process = start(tmp_path, model, out, pause=0.2)
        wait_for(process, journals[-1] + 1)  # it has begun; what it is at by now is left to chance
        time.sleep(waits.uniform(0, 0.3))
        os.kill(process.pid, signal.SIGKILL)
        finish(process)
        assert_all_end(process.pid)
        journals.append((out / ".run" / "journal.jsonl").read_bytes().count(b"\n"))
        for path in (out / "crops").rglob("*.jpg"):
            if not path.name.startswith("."):
                assert path.read_bytes() == (whole / path.relative_to(out)).read_bytes(), "what is there is whole"
    code, said, complained = finish(start(tmp_path, model, out))
    assert (code, complained) == (3, "")
    assert 0 < journals[1] < journals[2] < journals[3] < 91
    assert int(said.split()[-1]) == 91 - journals[3], "what was finished is not done again"
    assert everything_in(out) == everything_in(whole)


def test_kill_a_run_of_camera_traps(tmp_path: Path) -> None:
    """While it looks, and while it cuts."""
    for number in range(4):
        walk: Walk = [(10 * frame, 10) if frame % 3 == number % 3 else None for frame in range(10)]
        write_frames(tmp_path / "photos", walk, serial=f"C{number}", seed=number)
    (tmp_path / "photos" / "C0_0005.jpg").write_bytes(b"no photo")
    model = save_bright(tmp_path / "model")
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert finish(start(tmp_path, model, whole, burst=True))[0] == 3
    lines = []
    for file in ("looks.jsonl", "looks.jsonl", "journal.jsonl", "journal.jsonl"):
        process = start(tmp_path, model, out, pause=0.1, burst=True)
        kept = out / ".run" / file
        before = kept.read_bytes().count(b"\n") if kept.exists() else 0
        deadline = time.monotonic() + 60
        while not kept.exists() or kept.read_bytes().count(b"\n") < before + 3:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        finish(process)
        assert_all_end(process.pid)
        lines.append([(out / ".run" / each).read_bytes().count(b"\n") for each in ("looks.jsonl", "journal.jsonl")])
    assert 0 < lines[0][0] < lines[1][0] < 40, lines
    assert lines[2][1] < lines[3][1] < 41, lines
    assert finish(start(tmp_path, model, out, burst=True))[0] == 3
    assert everything_in(out) == everything_in(whole)
    assert finish(start(tmp_path, model, out, burst=True))[1].split() == ["computed", "0"]


@pytest.mark.parametrize(
    ("number", "code", "whom"),
    [(signal.SIGINT, 130, "group"), (signal.SIGTERM, 143, "process"), (signal.SIGTERM, 143, "group")],
)
def test_a_signal_stops_cleanly(
    tmp_path: Path, photos: Path, model: Path, number: signal.Signals, code: int, whom: str
) -> None:
    out = tmp_path / "out"
    process = start(tmp_path, model, out, pause=0.1)
    wait_for(process, 3)
    if whom == "group":  # as Ctrl-C and `timeout` do
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    got, _, complained = finish(process)
    assert got == code
    assert len(complained.splitlines()) == 1, complained
    assert "run the same command again" in complained
    assert_all_end(process.pid)
    assert finish(start(tmp_path, model, out))[0] == 3
    assert len(rows_of(out)) == 31
    assert not [name for name in everything_in(out) if name.endswith(".tmp")]


def test_the_second_of_two_ends(tmp_path: Path, photos: Path, model: Path) -> None:
    out = tmp_path / "out"
    first = start(tmp_path, model, out, pause=2)
    wait_for(first, 1)
    code, _, complained = finish(start(tmp_path, model, out, workers=0))
    assert code == 2
    assert len(complained.splitlines()) == 1
    assert "another process" in complained
    first.send_signal(signal.SIGTERM)
    assert finish(first)[0] == 143
    assert finish(start(tmp_path, model, out))[0] == 3
    code, said, _ = finish(start(tmp_path, model, out))
    assert (code, said.split()) == (3, ["computed", "0"])
    assert_all_end(first.pid)


def test_a_disk_that_is_full(tmp_path: Path, photos: Path, model: Path) -> None:
    """A real one, where a small file system may be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "none", disk], capture_output=True).returncode:
        pytest.skip("no file system may be mounted here")
    try:
        code, _, complained = finish(start(tmp_path, model, disk / "out"))
        assert code == 2
        assert "the disk is full" in complained
        journal = [json.loads(line) for line in (disk / "out" / ".run" / "journal.jsonl").read_text().splitlines()[:-1]]
        assert journal, "it got somewhere"
        assert all((disk / "out" / name).stat().st_size for record in journal for name in record["row"]["crops"])
        assert not list((disk / "out").rglob("*.tmp"))
        subprocess.run(["mount", "-o", "remount,size=20m", disk], check=True)
        assert finish(start(tmp_path, model, disk / "out"))[0] == 3
        assert finish(start(tmp_path, model, tmp_path / "whole"))[0] == 3
        got, wanted = everything_in(disk / "out"), everything_in(tmp_path / "whole")
        assert got.pop("report.html")  # its links are relative to where it is
        assert wanted.pop("report.html")
        assert got == wanted
    finally:
        subprocess.run(["umount", disk], check=True)


def test_what_is_said_at_the_end(tmp_path: Path, model: Path) -> None:
    make_photos(tmp_path / "photos", 3)
    for name in ("notes.txt", "more.txt", "clip.mov", "README"):
        (tmp_path / "photos" / name).write_bytes(b"x")

    def crop(*paths: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "patchlight", "crop", *paths, "--out", "found", "--model", str(model)]
        return subprocess.run([*command, "--device", "cpu"], cwd=tmp_path, capture_output=True, text=True)

    mistaken = crop("photos", "typo.jpg")
    assert (mistaken.returncode, mistaken.stdout) == (2, "")
    assert mistaken.stderr == "patchlight: typo.jpg: there is no such file or folder; mend the path or leave it out\n"
    assert not (tmp_path / "found").exists()
    done = crop("photos")
    assert (done.returncode, done.stderr) == (0, "")
    assert "4 files skipped: not photos (.txt 2, no ending 1, .mov 1)\n" in done.stdout
    assert "not among these" not in done.stdout
    (tmp_path / "photos" / "001.jpg").unlink()
    assert "1 crop is of a photo that is not among these any more, and left as it was\n" in crop("photos").stdout
    assert crop("photos/notes.txt").stdout.startswith("1 photo: nothing; 1 failed; 0 crops in found\n")


def test_camera_traps_on_the_command_line(tmp_path: Path) -> None:
    write_frames(tmp_path / "traps")
    model = save_bright(tmp_path / "model")
    command = ["crop", "traps", "--out", "found", "--burst", "--boxes-only", "--format", "megadetector"]
    done = subprocess.run(
        [sys.executable, "-m", "patchlight", *command, "--model", model, "--device", "cpu"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "5 none" in done.stdout
    assert "8 bursts, 5 of them empty; 5 empty frames" in done.stdout
    assert "no valid time" not in done.stdout
    images = json.loads((tmp_path / "found" / "megadetector.json").read_text())["images"]
    assert [image["file"] for image in images if image["detections"]] == ["A1_001.jpg", "A1_003.jpg", "A1_006.jpg"]
