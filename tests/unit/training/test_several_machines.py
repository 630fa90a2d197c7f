"""Two machines, each with its torchrun, here on loopback: one is lost, and the run goes on with fewer processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coloured_photos import write_coloured_photos
from patchlight.config import PreprocessConfig, ViTConfig
from patchlight.errors import PatchlightError
from patchlight.images.augment import AugmentConfig
from patchlight.training import loop
from patchlight.training.checkpoint import write_checkpoint
from patchlight.training.config import DataConfig, OptimConfig, TrainConfig
from patchlight.training.data import PhotoOrder, places
from patchlight.training.loop import train
from patchlight.training.run_folder import RunFolder
from patchlight.weights.load import load

STEPS = 30

SCRIPT = """
import json, os, sys, time, torch
torch.set_num_threads(1)
from pathlib import Path
from patchlight import cli
from patchlight.training import loop
from patchlight.training.objective import Classification

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
log = open(f"seen-{world}-{rank}.jsonl", "a", buffering=1)
prepare, seed_of, now = Classification.prepare, loop._step_seed, 0

def step_seed(seed, step, rank):
    global now
    now = step
    return seed_of(seed, step, rank)

def recorded(self, batch, *, cropped):
    log.write(json.dumps([now, batch.samples_B.tolist(), batch.epochs_B.tolist()]) + "\\n")
    time.sleep(0.1 if world == 4 else 0)
    return prepare(self, batch, cropped=cropped)

loop._step_seed, Classification.prepare = step_seed, recorded
sys.argv = ["patchlight", "train", "recipe.py", "--out", "run", "--resume", "--device", "cpu"]
cli.main()
"""


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_coloured_photos(tmp_path_factory.mktemp("photos"), 24, 20)


def settings(photos: Path, **changes: Any) -> TrainConfig:
    config = TrainConfig(
        model=ViTConfig(image_size=16, patch_size=8, width=16, depth=2, num_heads=2, num_classes=3),
        data=DataConfig(train=str(photos), workers=0, validation_share=0.25),
        preprocess=PreprocessConfig(image_size=16),
        augment=AugmentConfig(crop="resized", area=(0.5, 1.0), colour=0.2, mix=0.5, mixup=0.5, erase=0.2),
        optim=OptimConfig(lr=1e-3),
        epochs=STEPS * 24 / 27,
        batch_size=24,
        evaluate_every=1000.0,
        checkpoint_every=5,
        log_every=1,
    )
    return config.changed(changes)


class Machines:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, processes: int) -> subprocess.Popen[bytes]:
        """A machine with so many processes, as torchrun is called on it."""
        where = [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{self.port}",
            "--rdzv-id=run",
            "--local-addr=127.0.0.1",
        ]
        words = ["--nnodes=1:2", f"--nproc-per-node={processes}", "--max-restarts=3", *where, "script.py"]
        with (self.folder / f"machine-{len(self.started)}.log").open("wb") as log:
            machine = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *words],
                cwd=self.folder,
                stdout=log,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
                start_new_session=True,
            )
        self.started.append(machine)
        return machine

    def wait_for_first(self) -> None:
        """On which they meet, so that it is not the one to be lost."""
        for _ in range(3000):
            with socket.socket() as tried:
                if not tried.connect_ex(("127.0.0.1", self.port)):
                    return
            time.sleep(0.1)
        raise AssertionError(self.said())

    def lose(self, machine: subprocess.Popen[bytes]) -> None:
        """All its processes at once, without a word: torchrun's are in sessions of their own."""
        children = Path(f"/proc/{machine.pid}/task/{machine.pid}/children").read_text().split()
        for process in [machine.pid, *map(int, children)]:
            os.kill(process, signal.SIGKILL)
        machine.wait()

    def said(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("machine-*.log")))


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    found = Machines(tmp_path)
    yield found
    for machine in found.started:
        if machine.poll() is None:
            found.lose(machine)


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_machine_is_lost_and_the_run_goes_on_with_fewer_processes(
    photos: Path, tmp_path: Path, machines: Machines
) -> None:
    config = settings(photos, sharded=True)  # the harder way; copies (DDP) go on with fewer in test_loop.py
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "recipe.py").write_text(
        "from patchlight.training.config import TrainConfig\n\n\n"
        f"def config():\n    return TrainConfig.from_json({config.to_json()!r})\n"
    )
    first = machines.start(2)
    machines.wait_for_first()
    second = machines.start(2)
    index, deadline = tmp_path / "run" / "checkpoints" / "checkpoints.json", time.monotonic() + 600
    while '"step": 10' not in (index.read_text() if index.exists() else ""):
        assert time.monotonic() < deadline, machines.said()
        assert first.poll() is None, machines.said()
        time.sleep(0.05)
    machines.lose(second)
    third = machines.start(1)
    assert (first.wait(600), third.wait(600)) == (0, 0), machines.said()
    assert "another process of the run is out of reach" in machines.said()
    assert "continuing after step" in machines.said()

    # Which photos are in which step, and how each is varied, does not hang on the number of processes.
    seen: dict[int, dict[int, list[list[int]]]] = {4: {}, 3: {}}
    for world, steps in seen.items():
        for rank in range(world):
            for line in (tmp_path / f"seen-{world}-{rank}.jsonl").read_text().splitlines():
                step, samples, epochs = json.loads(line)
                both = steps.setdefault(step, [[], []])
                both[0] += samples
                both[1] += epochs
    order = PhotoOrder(seed=0, batch_size=24, steps=STEPS)
    alone = {step: places_3B.tolist() for step, places_3B in enumerate(places(27, order))}
    begun = min(seen[3])
    assert begun in (10, 15, 20, 25)
    assert sorted(seen[3]) == list(range(begun, STEPS))
    assert sorted(seen[4])[:begun] == list(range(begun))
    for steps in seen.values():
        for step, (samples, epochs) in steps.items():
            if len(samples) == 24:  # else it was under way when the machine was lost
                assert (epochs, samples) == (alone[step][0], alone[step][1])

    train(config, tmp_path / "one", device="cpu")
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(tmp_path / "one"), atol=1e-5)
    for ours, theirs in zip(*(load(tmp_path / name).model.parameters() for name in ("run", "one")), strict=True):
        np.testing.assert_allclose(ours.detach(), theirs.detach(), atol=1e-3)


def test_nothing_begins_anew_on_a_disk_that_is_not_shared(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoints", 5, {})
    loop._check_same_folder(RunFolder(tmp_path), 5)
    loop._check_same_folder(
        RunFolder(tmp_path), 10
    )  # a network's disk may show this machine what was there a moment ago
    with pytest.raises(PatchlightError, match="step 5 was saved, but the first process finds no checkpoint; name a fo"):
        loop._check_same_folder(RunFolder(tmp_path), -1)
