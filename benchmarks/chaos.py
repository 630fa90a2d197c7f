"""What becomes of runs to which the worst happens: a table of tries and failures.

    python benchmarks/chaos.py                              # on Linux; as root the full disk is a real one
    python benchmarks/chaos.py --only kill disk --kills 50 --fills 20 --seed 1

kill     kill -9 at up to three random moments of one run, which is then run to its end.
disk     a disk that is full after a random number of bytes (a small tmpfs; without root a limit of every file's size):
         one line and exit code 2. With room again, the same command goes on.
clock    a wall clock that jumps by days at every look (a preloaded library, so that everything sees it), and a kill.
folder   photos that come, go and change while a run reads them; once it is quiet, the run is done again.
reads    one of twenty reads fails, at random; then the run is done again without that.

After each, every file has to have the bytes of a run to which nothing happened. Moments are drawn as shares of what the
main thread computes, as in signals.py. Runs are forked from this process, which has imported everything: so a try costs
what the run itself does.
"""

import argparse
import contextlib
import ctypes
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from signals import COMMANDS, Command, computed, contents, make_place, save_photo

import patchlight.batch.burst
import patchlight.batch.runner
import patchlight.batch.table_run
import patchlight.training.api  # noqa: F401, as are the others: imported before runs are forked
from patchlight.cli import main as command_line
from patchlight.images import decode

PATIENCE = 300
"""Seconds in which a run neither computes nor waits for a core, until it counts as hung."""

RUNS = ("crop", "crop --burst", "embed", "crop, 2 processes", "train", "train, 2 processes", "train, torchrun")
HERE = ("crop", "crop --burst", "embed", "train")
"""Those in one process, for what is done to the process itself."""

NO_WARNING = Command("train recipe.py --out {out}", "--resume", ("model.safetensors",))

CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
static long jump(void) { return (random() % 20 - 10) * 86400; }
int clock_gettime(clockid_t which, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(which, at);
    if (!failed && which == CLOCK_REALTIME) at->tv_sec += jump();
    return failed;
}
int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec, at->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""


@dataclass
class Tally:
    tries: int = 0
    hit: int = 0
    """Tries in which it happened before the run was over."""
    failures: list[str] = field(default_factory=list)


def busy(pid: int) -> float:
    """Seconds for which the main thread of a process has computed, or waited for a core."""
    with contextlib.suppress(OSError, ValueError):
        computing, waiting, _ = map(int, Path(f"/proc/{pid}/schedstat").read_text().split())
        return (computing + waiting) / 1e9
    return 0.0


class Run:
    """A command in a process of its own, or in two."""

    def __init__(self, name: str, folder: Path, out: str, *, again: bool = False, before: Callable[[], None] = int):
        command = NO_WARNING if name == "train, torchrun" else COMMANDS[name]
        words = command.words.format(out=out).split()
        words += (command.again or "").split() if again and name.startswith("train") else []
        self.log = folder / f"{Path(out).name}.log"
        self.log.write_bytes(b"")
        world = 2 if name == "train, torchrun" else 1
        port = str(random.SystemRandom().randrange(20_000, 60_000))
        self.pids = []
        for rank in range(world):
            more = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"} if world > 1 else {}
            more |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if world > 1 else {}
            pid = os.fork()
            if not pid:
                self._work(words, folder, more, before)
            self.pids.append(pid)
        self.start = computed(self.pids[0]) or 0.0
        self.codes: list[int] = []

    def _work(self, words: list[str], folder: Path, more: dict[str, str], before: Callable[[], None]) -> None:
        code: object = 1
        try:
            os.setsid()
            said = os.open(self.log, os.O_WRONLY | os.O_APPEND)
            os.dup2(said, 1)
            os.dup2(said, 2)
            os.chdir(folder)
            os.environ |= more
            sys.argv = ["patchlight", *words]
            before()
            command_line()
        except SystemExit as ended:
            code = ended.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 1)

    def seconds(self) -> float:
        return (computed(self.pids[0]) or self.start) - self.start

    def over(self) -> bool:
        while self.pids:
            pid, status = os.waitpid(self.pids[0], os.WNOHANG)
            if not pid:
                return False
            self.codes.append(os.waitstatus_to_exitcode(status))
            self.pids.pop(0)
        return True

    def kill(self) -> None:
        """All of it at once, as the power does; but for the processes that read photos, which end by themselves."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait(self, until: float | None = None) -> bool:
        """Whether it was over before its main thread had computed for so many seconds."""
        began = time.monotonic()
        while not self.over():
            if until is not None and self.seconds() >= until:
                return False
            if time.monotonic() - began - busy(self.pids[0]) > PATIENCE:
                self.kill()
                raise RuntimeError(f"hung: {self.said()[-300:]}")
            time.sleep(0.001)
        return True

    def said(self) -> str:
        return self.log.read_text(errors="replace")


def whole(name: str, folder: Path) -> tuple[float, dict[str, bytes]]:
    """What an undisturbed run computes, and writes."""
    run, seconds = Run(name, folder, "whole"), 0.0
    while not run.over():
        seconds = max(seconds, run.seconds())
        time.sleep(0.001)
    if set(run.codes) != {0}:
        raise SystemExit(f"{name}: {run.codes}\n{run.said()}")
    wanted = written(name, folder, "whole")
    forget(folder, "whole")
    return seconds, wanted


def written(name: str, folder: Path, out: str) -> dict[str, bytes]:
    same = NO_WARNING.same if name == "train, torchrun" else COMMANDS[name].same
    return contents(folder, out, same)


def forget(folder: Path, out: str) -> None:
    for path in folder.glob(f"{out}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def finish(name: str, folder: Path, out: str, wanted: dict[str, bytes], tally: Tally, where: str) -> None:
    """Run it to its end, and compare."""
    run = Run(name, folder, out, again=True)
    run.wait()
    if set(run.codes) != {0}:
        tally.failures.append(f"{where}: again: exit code {run.codes}: {run.said()[-600:]}")
        return
    found = written(name, folder, out)
    if found != wanted:
        names = sorted(each for each in {*found, *wanted} if found.get(each) != wanted.get(each))
        tally.failures.append(f"{where}: other bytes: {', '.join(names[:4])}")
    left = [str(path) for path in (folder / out).parent.glob(f"{Path(out).name}*/**/*.tmp")]
    if left:
        tally.failures.append(f"{where}: left {left[0]}")


# What happens


def kill(name: str, folder: Path, tries: int, draws: random.Random) -> Tally:
    seconds, wanted = whole(name, folder)
    tally = Tally()
    for number in range(tries):
        moments = [draws.random() * seconds for _ in range(draws.choice((1, 1, 2, 3)))]
        over = False
        for moment in moments:
            run = Run(name, folder, "out", again=True)
            if over := run.wait(moment):
                break
            run.kill()
            run.wait()
        tally.tries, tally.hit = tally.tries + 1, tally.hit + (not over)
        where = f"try {number}, after {', '.join(f'{each:.3f}' for each in moments)} of {seconds:.3f} s"
        finish(name, folder, "out", wanted, tally, where)
        forget(folder, "out")
    return tally


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Whether what lies in this new folder lies on a disk of its own."""
    folder.mkdir()
    mounted = not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], capture_output=True
    ).returncode
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
        shutil.rmtree(folder, ignore_errors=True)


def resize(disk: Path, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)


def disk(name: str, folder: Path, tries: int, draws: random.Random) -> Tally:
    _, wanted = whole(name, folder)
    tally = Tally()
    with small_disk(folder / "disk") as mounted:
        place = folder / "disk"
        Run(name, folder, "disk/out").wait()
        files = [path for path in place.rglob("*") if path.is_file()]
        page = os.sysconf("SC_PAGESIZE")
        total = sum(-(-path.stat().st_size // page) * page for path in files)
        largest = max(path.stat().st_size for path in files)
        forget(place, "out")
        for number in range(tries):
            size = draws.randrange(page, total) if mounted else draws.randrange(1, largest)

            def limit(size: int = size) -> None:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

            if mounted:
                resize(place, size)
            run = Run(name, folder, "disk/out", before=int if mounted else limit)
            run.wait()
            said, code = run.said(), run.codes[0]
            if mounted:
                resize(place, 2**26)
            tally.tries, tally.hit = tally.tries + 1, tally.hit + (code != 0)
            where = f"try {number}, full after {size:,} of {total if mounted else largest:,} bytes"
            complaint = [line for line in said.splitlines() if line.startswith("patchlight: ")]
            if code not in (0, 2) or "Traceback" in said or (code == 2 and len(complaint) != 1):
                tally.failures.append(f"{where}: exit code {code}: {said[-800:]}")
            finish(name, folder, "disk/out", wanted, tally, where)
            forget(place, "out")
    return tally


def clock(name: str, folder: Path, tries: int, draws: random.Random) -> Tally:
    return kill(name, folder, tries, draws)  # in a process that has the other clock, see `with_other_clock`


def with_other_clock(folder: Path) -> dict[str, str]:
    """The environment in which the wall clock jumps."""
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return os.environ | {"LD_PRELOAD": str(library)}


def folder_that_changes(name: str, folder: Path, tries: int, draws: random.Random) -> Tally:
    _, _ = whole(name, folder)
    photos, tally = folder / ("traps" if "burst" in name else "photos"), Tally()
    kept = folder / "kept"
    shutil.copytree(photos, kept)
    for number in range(tries):
        stop, seed = threading.Event(), draws.random()

        def change(stop: threading.Event = stop, seed: float = seed) -> None:
            own = random.Random(seed)
            while not stop.wait(own.random() * 0.02):
                there = sorted(path for path in photos.rglob("*") if path.is_file())
                path = own.choice(there) if there else photos / "new.jpg"
                match own.choice(("remove", "add", "write", "cut", "move")):
                    case "remove" if len(there) > 3:
                        path.unlink()
                    case "add":
                        save_photo(path.with_name(f"{own.randrange(10**6)}.jpg"), own.randrange(100))
                    case "write":
                        save_photo(path, own.randrange(100))
                    case "cut":
                        path.write_bytes(path.read_bytes()[:-50])
                    case "move":
                        path.rename(path.with_name(f"{own.randrange(10**6)}.jpg"))

        run = Run(name, folder, "out")
        changing = threading.Thread(target=change)
        changing.start()
        try:
            run.wait()
        finally:
            stop.set()
            changing.join()
        tally.tries, tally.hit = tally.tries + 1, tally.hit + 1
        if run.codes[0] not in (0, 3) or "Traceback" in run.said():
            tally.failures.append(f"try {number}: exit code {run.codes}: {run.said()[-800:]}")
        fresh = Run(name, folder, "fresh")
        fresh.wait()
        again = Run(name, folder, "out", again=True)
        again.wait()
        if again.codes != fresh.codes:
            tally.failures.append(f"try {number}: exit codes {again.codes}, {fresh.codes}: {again.said()[-800:]}")
        ours, theirs = written(name, folder, "out"), written(name, folder, "fresh")
        # Crops of photos that went are kept.
        wrong = [each for each in theirs if ours.get(each.replace("fresh", "out")) != theirs[each]]
        if wrong:
            tally.failures.append(f"try {number}: other bytes: {', '.join(sorted(wrong)[:4])}")
        forget(folder, "out")
        forget(folder, "fresh")
        shutil.rmtree(photos)
        shutil.copytree(kept, photos)
    shutil.rmtree(kept)
    return tally


def reads(name: str, folder: Path, tries: int, draws: random.Random) -> Tally:
    _, wanted = whole(name, folder)
    tally = Tally()
    for number in range(tries):
        own = random.Random(draws.random())
        failed = folder / "failed"

        def fail(own: random.Random = own, failed: Path = failed) -> None:
            opened = decode.open_file

            def open_sometimes(*given: object) -> object:
                if own.random() < 0.05:
                    failed.touch()
                    raise decode.ImageError(str(given[1]), "unreadable", "Input/output error")
                return opened(*given)  # type: ignore[arg-type]

            for module in list(sys.modules.values()):
                if getattr(module, "open_file", None) is opened:
                    module.open_file = open_sometimes  # type: ignore[attr-defined]

        run = Run(name, folder, "out", before=fail)
        run.wait()
        tally.tries, tally.hit = tally.tries + 1, tally.hit + failed.exists()
        failed.unlink(missing_ok=True)
        if run.codes[0] not in (0, 3) or "Traceback" in run.said():
            tally.failures.append(f"try {number}: exit code {run.codes}: {run.said()[-800:]}")
        if not name.startswith("train"):
            finish(name, folder, "out", wanted, tally, f"try {number}")
        forget(folder, "out")
    return tally


def main() -> None:
    happenings: dict[str, tuple[Callable[[str, Path, int, random.Random], Tally], str, tuple[str, ...]]] = {
        "kill": (kill, "kills", RUNS),
        "disk": (disk, "fills", HERE),
        "clock": (clock, "others", HERE),
        "folder": (folder_that_changes, "others", ("crop", "crop --burst", "embed")),
        "reads": (reads, "others", HERE),
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(happenings), default=list(happenings))
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=RUNS, metavar="NAME")
    parser.add_argument("--kills", type=int, default=50, help="tries of each run")
    parser.add_argument("--fills", type=int, default=20)
    parser.add_argument("--others", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ctypes.CDLL(None)  # which decoding needs, too
    bad = 0
    if options.only != ["clock"]:
        print(f"{'happening':10} {'run':20} {'tries':>6} {'hit':>5} {'failures':>9}", flush=True)
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        folder = Path(temporary) / "place"
        make_place(folder, "")
        for happening in options.only:
            happen, count, names = happenings[happening]
            if happening == "clock" and "LD_PRELOAD" not in os.environ:
                wanted = [sys.executable, __file__, "--only", "clock", "--runs", *options.runs]
                wanted += ["--others", str(options.others), "--seed", str(options.seed)]
                bad += subprocess.run(wanted, env=with_other_clock(Path(temporary))).returncode
                continue
            for name in (each for each in names if each in options.runs):
                draws = random.Random(f"{options.seed} {happening} {name}")
                tally = happen(name, folder, getattr(options, count), draws)
                counts = f"{tally.tries:6} {tally.hit:5} {len(tally.failures):9}"
                print(f"{happening:10} {name:20} {counts}", flush=True)
                bad += len(tally.failures)
                for line in tally.failures:
                    print(f"    {line}", flush=True)
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
