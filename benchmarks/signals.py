"""SIGINT and SIGTERM at random moments of every command: a table of exit codes, and of what is left afterwards.

    python benchmarks/signals.py --tries 100
    python benchmarks/signals.py --tries 30 --commands crop "crop --burst" train --seed 1 --jobs 2

Each try starts the command in an empty place and sends it one of the two signals once its main thread has computed for
a share of what an undisturbed run computes, drawn evenly from 0 to 1.02 (0.0 is the start of Python itself): so a busy
machine changes no moment. A command that goes on where it was is then run again, and has to end with the bytes of a run
that nobody disturbed. Photos and models are tiny; no network is used. `serve` has tests of its own.

Codes are those of a shell, where 130 and 143 also stand for a process that the signal itself has ended. `own` are
the command's own for these inputs, which are 0 alone. `aloud` are tries with a Python traceback, a warning of Python's
or "terminate called"; `torn` are tries after which the command, run again, failed or ended with other bytes, or left a
temporary file; `orphans` are processes that were still there three seconds after the command.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import patchlight as pl
from patchlight.config import Calibration, PreprocessConfig, SubjectHeat

START = [sys.executable, "-m", "patchlight"]
LOUD = re.compile(r"Traceback|terminate called|Warning:|Exception ignored|Fatal Python|core dumped")
PATIENCE = 300
"""Seconds until a try counts as hung."""

RECIPE = """
from patchlight.config import PreprocessConfig, ViTConfig
from patchlight.images.augment import AugmentConfig
from patchlight.training.config import DataConfig, OptimConfig, TrainConfig


def config():
    return TrainConfig(
        model=ViTConfig(image_size=16, patch_size=8, width=16, depth=2, num_heads=2, num_classes=3),
        data=DataConfig(train="labelled", workers=WORKERS, validation_share=0.25),
        preprocess=PreprocessConfig(image_size=16),
        augment=AugmentConfig(crop="resized", area=(0.5, 1.0)),
        optim=OptimConfig(lr=1e-2),
        epochs=8.0,
        batch_size=8,
        checkpoint_every=5,
        log_every=5,
    )
"""


@dataclass(frozen=True)
class Command:
    words: str
    """With {out} for what it writes."""
    again: str | None = None
    """What makes it go on, added to the words; None where it only begins anew."""
    same: tuple[str, ...] = ()
    """Files in {out}, or {out} itself (""), that have to end with the bytes of an undisturbed run."""
    until: str | None = None
    """It runs until it is stopped: what it prints once it is ready."""


CROPPED = ("results.jsonl", "results.csv", "crops")
COMMANDS = {
    "crop": Command("crop photos --out {out} --model model --workers 0", "", CROPPED),
    "crop, 2 processes": Command("crop photos --out {out} --model model --workers 2", "", CROPPED),
    "crop --burst": Command("crop traps --out {out} --model model --burst --workers 0", "", CROPPED),
    "crop --engine": Command("crop photos --out {out} --engine exported --workers 0", "", CROPPED),
    "embed": Command("embed photos --out {out}.npz --model model --workers 0", "", (".npz",)),
    "classify --out": Command("classify photos --out {out}.csv --model model --workers 0", "", (".csv",)),
    "classify": Command("classify photos --model model"),
    "look": Command("look photos/000.jpg --model model --out {out}"),
    "train": Command("train recipe.py --out {out}", "--resume", ("model.safetensors",)),
    "train, 2 processes": Command("train workers.py --out {out}", "--resume", ("model.safetensors",)),
    "finetune": Command(
        "finetune labelled --model model --out {out} --set epochs=4 --set data.workers=0",
        "--resume",
        ("model.safetensors",),
    ),
    "evaluate": Command("evaluate trained labelled --out {out}"),
    "export": Command("export model --to onnx --out {out}"),
    "bench": Command("bench exported photos/000.jpg --rounds 3"),
    "inspect": Command("inspect model"),
    "models": Command("models dinov2"),
    "costs": Command("costs Ti/16"),
    "recipes": Command("recipes --copy {out}"),
    "merge": Command("merge part1 part2 --out {out} --model model", "--overwrite", CROPPED),
    "similar": Command("similar photos/000.jpg --in table.npz --model model --sheet {out}.jpg"),
    "dedupe": Command("dedupe table.npz --sheet {out}.jpg"),
    "review": Command("review cropped --no-open --port 0", until="http://"),
}


@dataclass
class Outcome:
    codes: Counter[str] = field(default_factory=Counter)
    aloud: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)


# What the commands work with


def make_place(folder: Path, words: str) -> None:
    """Photos, a model, and those of the folders and tables that these words name."""
    folder.mkdir(parents=True)
    for number in range(8):
        save_photo(folder / f"photos/{number:03}.jpg", number)
        save_photo(folder / f"traps/camera/IMG_20240501_1200{number:02}.jpg", number // 4)
    for label, colour in (("red", (200, 40, 40)), ("green", (40, 200, 40)), ("blue", (40, 40, 200))):
        for number in range(8):
            save_photo(folder / f"labelled/{label}/{number}.png", number, (24, 24), colour)
    torch.manual_seed(0)
    model = pl.ViT(pl.ViTConfig(width=32, depth=2, num_heads=2, patch_size=8, image_size=32, num_classes=3)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    pl.save(
        model,
        folder / "model",
        preprocess=PreprocessConfig(image_size=32, resize="squash", crop_pct=1.0),
        labels=["blue", "green", "red"],
        subject=SubjectHeat(scale=1.0, bias=0.0, calibration=Calibration(bias=2.0)),
    )
    (folder / "recipe.py").write_text(RECIPE.replace("WORKERS", "0"))
    (folder / "workers.py").write_text(RECIPE.replace("WORKERS", "2"))
    for made in (
        "crop photos --out cropped --model model --workers 0",
        "embed photos --out table.npz --model model --workers 0",
        "crop photos --out part1 --part 1/2 --model model --workers 0",
        "crop photos --out part2 --part 2/2 --model model --workers 0",
        "train recipe.py --out trained",
        "export model --to onnx --out exported",
    ):
        if made.partition("--out ")[2].split()[0] in words.split():
            run(made, folder)


def save_photo(path: Path, seed: int, size: tuple[int, int] = (160, 120), colour: Sequence[int] = (0, 0, 0)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise_HWC = np.random.default_rng(seed).integers(0, 50, (6, 8, 3), np.uint8) + np.array(colour, np.uint8)
    image = Image.fromarray(noise_HWC.astype(np.uint8)).resize(size, Image.Resampling.BICUBIC)
    image.paste((250, 240, 200), (size[0] // 4, size[1] // 4, size[0] // 2, size[1] // 2))
    image.save(path)


def run(words: str, folder: Path) -> None:
    done = subprocess.run([*START, *words.split()], cwd=folder, capture_output=True, text=True, env=environment())
    if done.returncode:
        raise SystemExit(f"patchlight {words}: exit code {done.returncode}\n{done.stderr}")


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PATCHLIGHT_CACHE": ""}


# One try


def computed(pid: int) -> float | None:
    """Seconds for which the main thread of a process has computed; None once it is gone."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


@contextlib.contextmanager
def started(words: str, folder: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as said:
        process = subprocess.Popen(
            [*START, *words.split()], cwd=folder, stdout=said, stderr=said, env=environment(), start_new_session=True
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def undisturbed(command: Command, folder: Path, out: str) -> float:
    """For how long its main thread computes."""
    log, seconds = folder / f"{out}.log", 0.0
    with started(command.words.format(out=out), folder, log) as process:
        while process.poll() is None:
            seconds = computed(process.pid) or seconds
            if command.until and command.until in log.read_text(errors="replace"):
                return seconds + 0.2
            time.sleep(0.002)
    if process.returncode:
        raise SystemExit(f"{command.words}: exit code {process.returncode}\n{log.read_text()}")
    return seconds


def disturbed(command: Command, folder: Path, out: str, moment: float, number: int) -> tuple[int, str, list[str]]:
    """Its exit code as a shell has it, what it said, and the processes that it left."""
    log = folder / f"{out}.log"
    with started(command.words.format(out=out), folder, log) as process:
        begun, ready = time.monotonic(), None
        while process.poll() is None and (computed(process.pid) or 0.0) < moment:
            if command.until and ready is None and command.until in log.read_text(errors="replace"):
                ready = time.monotonic()  # it computes no more
            if (ready and time.monotonic() - ready > 0.5) or time.monotonic() - begun > PATIENCE:
                break
            time.sleep(0.001)
        if process.poll() is None:
            process.send_signal(number)
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return -1, "hung", []
        left = orphans(process.pid)
    code = process.returncode
    return (128 - code if code < 0 else code), log.read_text(errors="replace"), left


def orphans(session: int) -> list[str]:
    """Processes of a session that do not end within three seconds."""
    for _ in range(30):
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                if entry.name.isdigit():
                    state, _, _, belongs = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                    if int(belongs) == session and state != "Z":
                        found.append((entry / "cmdline").read_text().replace("\0", " ")[:80])
        if not found:
            break
        time.sleep(0.1)
    return found


def contents(folder: Path, out: str, same: Sequence[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name in same:
        root = folder / f"{out}{name}" if name.startswith(".") else folder / out / name
        for path in [root] if root.is_file() else sorted(each for each in root.rglob("*") if each.is_file()):
            found[str(path.relative_to(root.parent)).replace(out, "out")] = path.read_bytes()
    return found


def torn(command: Command, folder: Path, out: str, wanted: dict[str, bytes]) -> str | None:
    """What is wrong once the command is run again."""
    words = command.words.format(out=out)
    if command.again is not None:
        words = f"{words} {command.again}"
    elif "{out}" in command.words:
        made = {path for path in folder.rglob("*") if out in str(path.relative_to(folder)) and path.suffix != ".log"}
        names = {str(path.relative_to(folder)).replace(out, "whole") for path in made}
        whole = {str(path.relative_to(folder)) for path in folder.rglob("*") if "whole" in str(path)}
        if names and names != whole - {"whole.log"}:
            return f"half of it: {sorted(names ^ (whole - {'whole.log'}))[:5]}"
        forget(folder, out)
    else:
        return None  # it writes nothing
    done = subprocess.run([*START, *words.split()], cwd=folder, capture_output=True, text=True, env=environment())
    if done.returncode:
        return f"again: exit code {done.returncode}: {done.stderr.strip()[-200:]}"
    found = contents(folder, out, command.same)
    if found != wanted:
        names = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
        return f"other bytes: {', '.join(names[:3])}"
    left = [*folder.glob(f"{out}*/**/*.tmp"), *folder.glob(f".{out}*"), *folder.glob(".look-*")]
    return f"left: {left[0]}" if left else None


def forget(folder: Path, out: str) -> None:
    for path in folder.glob(f"{out}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def attack(name: str, folder: Path, tries: int, seed: int, jobs: int) -> tuple[float, Outcome]:
    command, outcome = COMMANDS[name], Outcome()
    whole = undisturbed(command, folder, "whole")
    wanted = contents(folder, "whole", command.same)
    draws = random.Random(f"{seed} {name}")
    moments = [(draws.random() * 1.02 * whole, draws.choice((signal.SIGINT, signal.SIGTERM))) for _ in range(tries)]

    def one(job: int) -> None:
        moment, number = moments[job]
        out = f"try{job}"
        code, said, left = disturbed(command, folder, out, moment, number)
        where = f"try {job}, {number.name} after {moment:.3f} of {whole:.3f} s: exit code {code}"
        outcome.codes["own" if code == 0 else str(code)] += 1
        if LOUD.search(said) or code not in (0, 130, 143):
            outcome.aloud.append(f"{where}\n{said.strip()[-1500:]}")
        if left:
            outcome.orphans.append(f"{where}: {left}")
        if command.until is None and (wrong := torn(command, folder, out, wanted)):
            outcome.torn.append(f"{where}: {wrong}")
        forget(folder, out)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, range(tries)))
    forget(folder, "whole")
    return whole, outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=100, help="of each command")
    parser.add_argument("--commands", nargs="+", choices=list(COMMANDS), default=list(COMMANDS), metavar="NAME")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="tries side by side")
    parser.add_argument("--out", type=Path, help="a JSON file of all that happened")
    options = parser.parse_args()
    told, bad = {}, 0
    with tempfile.TemporaryDirectory(prefix="signals-") as temporary:
        folder = Path(temporary) / "place"
        make_place(folder, " ".join(COMMANDS[name].words for name in options.commands))
        columns = ("own", "130", "143", "other", "aloud", "torn", "orphans")
        print(f"{'command':20} {'CPU s':>6} {'tries':>6}" + "".join(f"{name:>8}" for name in columns))
        for name in options.commands:
            whole, outcome = attack(name, folder, options.tries, options.seed, options.jobs)
            counts = [outcome.codes[each] for each in ("own", "130", "143")]
            counts += [options.tries - sum(counts), *map(len, (outcome.aloud, outcome.torn, outcome.orphans))]
            print(f"{name:20} {whole:6.2f} {options.tries:6}" + "".join(f"{n:8}" for n in counts), flush=True)
            bad += sum(counts[3:])
            told[name] = vars(outcome) | {"seconds": whole, "tries": options.tries, "seed": options.seed}
            for line in (*outcome.aloud, *outcome.torn, *outcome.orphans):
                print(f"    {line}", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(told, indent=2) + "\n")
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
