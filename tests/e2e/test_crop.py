"""The crop job as its users meet it: a process that is killed, stopped, started twice, and started again."""

import contextlib
import json
import os
import pty
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from camera_traps import Walk, save_bright, write_frames
from command_line import patchlight
from crop_runs import everything_in, make_photos, rows_of, save_model
from patchlight import reporting
from patchlight.batch.overrides import add_correction
from patchlight.commands.crop import with_flags
from patchlight.reporting import Progress
from warm_python import WarmPython, run_warm

PROGRAM = """
import json, sys, time
import patchlight as pl
from patchlight.signals import Stopped

def main():
    photos, out, model, workers, pause, settings = sys.argv[1:]
    def progress(now):
        print(now.done, flush=True)
        time.sleep(float(pause))
    try:
        settings = pl.CropSettings(**json.loads(settings))
        how = pl.CropRunSettings(device="cpu", workers=int(workers))
        summary = pl.crop_photos(photos, out, settings, how, model=model, reporter=pl.Reporter(progress=progress))
    except pl.PatchlightError as error:
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
    tmp_path: Path, model: Path, out: Path, *, workers: int = 2, pause: float = 0.0, **settings: Any
) -> WarmPython:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [program, tmp_path / "photos", out, model, workers, pause, json.dumps(settings)]
    return WarmPython(command, start_new_session=True)


def finish(process: WarmPython) -> tuple[int, str, str]:
    said, complained = process.communicate(timeout=120)
    return process.returncode, said, complained


def wait_for(process: WarmPython, done: int) -> None:
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


def test_kill_a_run_whose_crops_wait_for_one_scale(tmp_path: Path, photos: Path, model: Path) -> None:
    """While it looks, while it cuts, and with corrections that come in between."""
    asked = {"size": "60x60", "scale": "same", "cutout": True, "sort": "decision", "subjects": None}
    whole, out = tmp_path / "whole", tmp_path / "out"
    for folder in (whole, out):
        folder.mkdir()
        spot = {"decision": "subject", "boxes": [[5, 5, 155, 115]], "label": "Fox"}
        add_correction(folder, str(photos / "003.jpg"), spot)
        add_correction(folder, str(photos / "004.jpg"), {"decision": "none", "boxes": []})
    assert finish(start(tmp_path, model, whole, **asked))[0] == 3
    lines = []
    for more in (8, 30):
        process = start(tmp_path, model, out, pause=0.1, **asked)
        kept = out / ".run" / "journal.jsonl"
        before = kept.read_bytes().count(b"\n") if kept.exists() else 0
        deadline = time.monotonic() + 60
        while not kept.exists() or kept.read_bytes().count(b"\n") < before + more:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        finish(process)
        assert_all_end(process.pid)
        lines.append(kept.read_bytes().count(b"\n"))
    assert lines[0] < 31 < lines[1] < 31 + 31, "once while it looked, and once while it cut"
    assert finish(start(tmp_path, model, out, **asked))[0] == 3
    assert everything_in(out) == everything_in(whole)
    assert finish(start(tmp_path, model, out, **asked))[1].split()[-2:] == ["computed", "0"]


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


SLOW = """
import sys, time
from patchlight.batch import results, summary
from patchlight.cli import main

def slowly(function):
    def slow(*given):
        time.sleep(2)
        return function(*given)
    return slow

where = sys.argv.pop(1)
if where == "rows":
    results.Journal.row = slowly(results.Journal.row)
if where == "overlays":
    summary.draw_overlay = slowly(summary.draw_overlay)
if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(("where", "number"), [("rows", signal.SIGTERM), ("overlays", signal.SIGINT)])
def test_a_signal_while_results_are_written(
    tmp_path: Path, photos: Path, model: Path, where: str, number: signal.Signals
) -> None:
    """All photos have their rows, and there is much to write yet; another process keeps away until that is done."""
    (tmp_path / "program.py").write_text(SLOW)
    out = tmp_path / "out"

    def begin(where: str) -> WarmPython:
        options = ["--out", str(out), "--model", str(model), "--device", "cpu", "--workers", "0", "--overlay"]
        return WarmPython([tmp_path / "program.py", where, "crop", photos, *options])

    process = begin(where)
    deadline = time.monotonic() + 60
    while not list(out.glob({"rows": ".results.jsonl.*.tmp", "overlays": "overlays/*.jpg"}[where])):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    other, _, complained = finish(begin("nowhere"))
    assert (other, process.poll()) == (2, None)
    assert "another process is working there" in complained
    process.send_signal(number)
    begun = time.monotonic()
    code, said, complained = finish(process)
    assert time.monotonic() - begun < 10, "all of it would take a minute"
    assert (code, said) == (128 + number, "")
    assert complained == (
        f"patchlight: {out}: stopped while the results were written; run the same command again to continue\n"
    )
    assert not (out / "summary.json").exists()
    drawn = {path: path.stat().st_mtime_ns for path in out.glob("overlays/*.jpg")}
    assert len(drawn) < 30
    assert finish(begin("nowhere"))[0] == 3
    assert len(rows_of(out)) == 31
    assert len(list(out.glob("overlays/*.jpg"))) == 30
    assert {path: path.stat().st_mtime_ns for path in drawn} == drawn, "what was drawn is not drawn again"
    assert not list(out.rglob("*.tmp"))
    code, said, _ = finish(begin("rows"))
    assert (code, said.splitlines()[0]) == (3, "Up to date.")


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
        command = ["-m", "patchlight", "crop", *paths, "--out", "found", "--model", model]
        return run_warm([*command, "--device", "cpu"], cwd=tmp_path)

    mistaken = crop("photos", "typo.jpg")
    assert (mistaken.returncode, mistaken.stdout) == (2, "")
    assert (
        mistaken.stderr == "patchlight: typo.jpg: there is no such file or folder; correct the path or leave it out\n"
    )
    assert not (tmp_path / "found").exists()
    done = crop("photos")
    assert (done.returncode, done.stderr) == (0, "")
    assert "4 files skipped: not photos (.txt 2, no ending 1, .mov 1)\n" in done.stdout
    assert "not among these" not in done.stdout
    (tmp_path / "photos" / "001.jpg").unlink()
    said = "1 crop kept, whose photo is not among these or cannot be reached\n"
    again = crop("photos").stdout
    assert again.startswith("1 gone, 2 as before\n2 photos")
    assert said in again
    assert crop("photos/notes.txt").stdout.startswith("1 new\n1 photo: nothing; 1 failed; 0 crops in found\n")


@pytest.mark.parametrize(
    ("said", "in_flags"),
    [
        ("margin=nan is a share", "--margin nan is a share"),
        ("min_area=3.0 is a share", "--min-area 3.0 is a share"),
        ("batch_size=0 must be 1 or more", "--batch 0 must be 1 or more"),
        ("out='' is not a folder", "--out '' is not a folder"),
        ("empty_below=1.5 is a confidence", "--empty-below 1.5 is a confidence"),
        ("o: was started with margin=0.03, not 0.1; use", "o: was started with --margin 0.03, not 0.1; use"),
        ('o: was started with aspect="free", not "1:1"; use', 'o: was started with --aspect "free", not "1:1"; use'),
        ("o: was started with subjects=null, not 1; use", "o: was started with --subjects all, not 1; use"),
        ("o: was started with subjects=2, not null; use", "o: was started with --subjects 2, not all; use"),
        ("o: was started with boxes_only=false, not true; use", "o: was started without --boxes-only; use"),
        ("o: was started with boxes_only=true, not false; use", "o: was started with --boxes-only, not without; use"),
        ("o: was started with size=null, not 100; use", "o: was started without --size, not with 100; use"),
        ("o: was started with size=100, not null; use", "o: was started with --size 100, not without; use"),
        ('o: was started with model="0f", not "1f"; use', 'o: was started with model="0f", not "1f"; use'),
        ("photos/size=3/a.jpg: there is no such file", "photos/size=3/a.jpg: there is no such file"),
        ("size=3/a.jpg: there is no such file", "size=3/a.jpg: there is no such file"),
        ("size=3: holds no photos", "size=3: holds no photos"),
    ],
)
def test_messages_name_flags(said: str, in_flags: str) -> None:
    assert with_flags(said) == in_flags


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--out", "o", "--margin", "abc"], ("--margin", "abc")),
        (["--out", "o", "--size", "abc"], ("--size", "abc")),
        (["--out", "o", "--margin", "nan"], ("--margin nan", "give a number from 0 to 10")),
        (["--out", "o", "--workers", "-1"], ("--workers -1 must be 0 or more",)),
        (["--out", "o", "--device", "meta"], ("--device 'meta' does not compute here", "use cpu")),
        (["--out", ""], ("--out '' is not a folder; name one",)),
    ],
)
def test_mistakes_on_the_command_line(tmp_path: Path, model: Path, options: list[str], words: tuple[str, ...]) -> None:
    make_photos(tmp_path / "photos", 1)
    done = patchlight("crop", "photos", "--model", str(model), *options, cwd=tmp_path)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert all(each in done.stderr for each in words), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


def test_without_a_terminal_there_are_lines(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(reporting, "SECONDS_BETWEEN_LINES", 0.0)
    looking = Progress(
        what="looking at photo", done=1_200, total=40_000, how="9.5 photos/s, 2 failed", seconds_left=4084.2
    )
    with reporting.on_terminal() as reporter:
        reporter.progress(looking)
        reporter.progress(Progress(what="row", done=30_000, total=40_000, how="20,000/s", seconds_left=0.4))
        monkeypatch.setattr(reporting, "SECONDS_BETWEEN_LINES", 30.0)
        reporter.progress(Progress(what="row", done=40_000, total=40_000))
    assert capfd.readouterr().err.splitlines() == [
        "looking at photo 1,200 of 40,000: 9.5 photos/s, 2 failed, 1:08:04 left",
        "row 30,000 of 40,000: 20,000/s, 0:00:00 left",
    ]


@pytest.mark.parametrize("width", [60, 200])
def test_on_a_narrow_terminal_the_bar_gets_shorter(width: int) -> None:
    program = """
import sys
from patchlight.reporting import Progress, on_terminal
with on_terminal() as reporter:
    reporter.progress(Progress(what="photo", done=1_200, total=40_000, how="9.5 photos/s, 12 failed"))
"""
    ours, theirs = pty.openpty()
    environment = os.environ | {"COLUMNS": str(width), "TERM": "xterm", "NO_COLOR": "1"}
    process = subprocess.Popen([sys.executable, "-c", program], stderr=theirs, env=environment)
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):  # the end, as Linux tells it
        while part := os.read(ours, 4096):
            said += part
    os.close(ours)
    assert process.wait() == 0
    # At the end the bar is taken away, with the line that it was in.
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said.decode()).splitlines()
    last = [line for line in shown if "photo" in line][-1]
    assert re.search(r"photo 1,200 of 40,000 .*9.5 photos/s, 12 failed", last), last
    assert last.count("\u2501") + last.count("\u2578") + last.count("\u257a") <= 40


def test_camera_traps_on_the_command_line(tmp_path: Path) -> None:
    write_frames(tmp_path / "traps")
    model = save_bright(tmp_path / "model")
    command = ["crop", "traps", "--out", "found", "--burst", "--boxes-only", "--format", "megadetector"]
    done = run_warm(["-m", "patchlight", *command, "--model", model, "--device", "cpu"], cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1), done.stderr
    assert "its confidence by the method 'subject' is uncalibrated" in done.stderr
    assert "5 none" in done.stdout
    assert "8 bursts, 5 of them empty; 5 empty frames" in done.stdout
    assert "no valid time" not in done.stdout
    assert "times: 8 by EXIF" in done.stdout
    written = json.loads((tmp_path / "found" / "megadetector.json").read_text())
    least = written["info"]["detector_metadata"]["typical_detection_threshold"]
    shown = [image["file"] for image in written["images"] if max(each["conf"] for each in image["detections"]) >= least]
    assert shown == ["A1_001.jpg", "A1_003.jpg", "A1_006.jpg"]
