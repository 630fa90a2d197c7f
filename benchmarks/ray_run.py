"""A run on a Ray cluster beside the same run by the local runner, on the same cores: efficiency, memory, and failures.

    python benchmarks/ray_run.py                     # 20,000 small photos, a bad one among every 64
    python benchmarks/ray_run.py --photos 1000 --no-kill
    python benchmarks/ray_run.py --engine none       # torch instead of the engine that crop takes by itself

The cluster is three nodes on this machine, processes of `ray.cluster_utils.Cluster`: one that coordinates, without
CPUs, and two with one CPU each, for two cores. Every node's object store has 100 MiB. The same photos are cropped by
the local runner (two processes that read and cut, two threads that look), by the cluster, and by the cluster while one
actor is killed at a quarter and one node at the half; all three folders have to be the same, byte for byte.

Efficiency is work done per CPU second, ours on Ray by the local runner's: CPU seconds of all processes that a run has
(Ray's own among them), from the first rows that are there to the last, so without start-up, which is given beside it.
It takes thousands of photos to mean much: when the first rows are there, Ray has some blocks of 64 half done already.
Rates by the clock are given, too, and mean something on a quiet machine only; the load is printed.
"""

import argparse
import contextlib
import importlib
import os
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import patchlight as pl

DEMO = Path(__file__).parents[1] / "demo"
STORE = 100 * 2**20
FLOOR = 0.8
MARK = "PATCHLIGHT_RAY_RUN"


def make_photos(folder: Path, count: int) -> None:
    """Links to 40 photos of 640 x 480, and a bad file among every 64."""
    sources = sorted([*DEMO.glob("*.jpg"), *DEMO.glob("*.png")])
    random = np.random.default_rng(0)
    folder.mkdir()
    first = []
    for number in range(40):
        with Image.open(sources[number % len(sources)]) as source:
            level_HWC = np.asarray(source.convert("RGB").resize((640, 480)), np.int16)
        level_HWC = level_HWC + random.normal(0, 5, (480, 640, 1)).astype(np.int16)
        first.append(folder.with_name(f"{number}.jpg"))
        Image.fromarray(level_HWC.clip(0, 255).astype(np.uint8)).save(first[-1], quality=88)
    for number in range(count):
        path = folder / f"{number:06}.jpg"
        if number % 64 == 63:
            path.write_bytes(b"not a photo")
        else:
            os.link(first[number % 40], path)


class Cpu:
    """CPU seconds of this process and of all that have come of it, also of those that are gone."""

    def __init__(self) -> None:
        os.environ[MARK] = self.mark = os.urandom(8).hex()
        self.of: dict[str, float] = {}
        self.watching = 0.0
        """Seconds that this itself has taken."""
        threading.Thread(target=self._watch, daemon=True).start()

    def processes(self) -> Iterator[Path]:
        for process in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if process.name.isdecimal() and self.mark.encode() in (process / "environ").read_bytes():
                    yield process

    def _watch(self) -> None:
        while True:
            self._look()
            time.sleep(0.5)

    def _look(self) -> None:
        begun = time.thread_time()
        for process in self.processes():
            with contextlib.suppress(OSError):
                ticks = (process / "stat").read_text().rpartition(")")[2].split()
                self.of[process.name] = (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK")
        self.watching += time.thread_time() - begun

    def seconds(self) -> float:
        self._look()
        own = resource.getrusage(resource.RUSAGE_SELF)
        return sum(self.of.values()) + own.ru_utime + own.ru_stime - self.watching


@dataclass
class Run:
    """When how many rows were there, and what it had taken by then."""

    cpu: Cpu
    begun: tuple[float, float] = (0.0, 0.0)
    seen: list[tuple[int, float, float]] = field(default_factory=list)
    ended: tuple[float, float] = (0.0, 0.0)

    def __call__(self, now: pl.Progress) -> None:
        if now.what != "photo":
            return
        if not self.seen or now.done >= self.seen[-1][0] + 32 or now.done == now.total:
            self.seen.append((now.done, time.monotonic(), self.cpu.seconds()))

    def crop(self, photos: Path, out: Path, engine: str, heard: Callable[[pl.Progress], None], **how: Any) -> None:
        def progress(now: pl.Progress) -> None:
            self(now)
            heard(now)

        self.begun = time.monotonic(), self.cpu.seconds()
        reporter = pl.Reporter(progress=progress, tell=lambda line: print("   ", line))
        settings = pl.CropRunSettings(device="cpu", workers=2 if "on" not in how else 1, formats=["parquet"], **how)
        pl.crop_photos(photos, out, pl.CropSettings(engine=engine), settings, reporter=reporter)
        self.ended = time.monotonic(), self.cpu.seconds()

    @property
    def per_cpu_second(self) -> float:
        (first, _, before), (last, _, after) = self.seen[0], self.seen[-1]
        return (last - first) / (after - before)

    def show(self, name: str) -> None:
        (first, begun, _), (last, ended, _) = self.seen[0], self.seen[-1]
        whole, cpu = (after - before for before, after in zip(self.begun, self.ended, strict=True))
        print(
            f"{name}: {self.per_cpu_second:.1f} photos a CPU second, {(last - first) / (ended - begun):.1f} a second "
            f"by the clock; with start-up and report {cpu:.1f} CPU seconds, {whole:.1f} by the clock"
        )


class Store:
    """The most that the object stores of all nodes have held at a time, and what was spilled to disks."""

    def __init__(self) -> None:
        self.most = self.spilled = 0

    def __call__(self, now: pl.Progress) -> None:
        ray = importlib.import_module("ray")
        node_stats = importlib.import_module("ray._private.internal_api").node_stats
        used = spilled = 0
        for node in ray.nodes():
            if node["Alive"]:
                with contextlib.suppress(Exception):  # it is about to be killed
                    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], False).store_stats
                    used += stats.object_store_bytes_used
                    spilled += stats.spilled_bytes_total
        self.most, self.spilled = max(self.most, used), max(self.spilled, spilled)


def everything_in(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and ".run" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=int, default=20_000)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--no-kill", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(2)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    for name in ("raylet_start_wait_time_s", "py_gcs_connect_timeout_s", "gcs_server_request_timeout_seconds"):
        os.environ.setdefault(f"RAY_{name}", "300")  # on a busy machine
    cpu = Cpu()
    with tempfile.TemporaryDirectory(prefix="ray-run-") as name:
        root = Path(name)
        make_photos(root / "photos", given.photos)
        print(f"{given.photos:,} photos; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        alone = Run(cpu)
        alone.crop(root / "photos", root / "alone", given.engine, lambda now: None)
        alone.show("local runner")

        made = importlib.import_module("ray.cluster_utils").Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "object_store_memory": STORE, "include_dashboard": False},
        )
        nodes = [made.add_node(num_cpus=1, object_store_memory=STORE) for _ in range(2)]
        on = f"ray:{made.address}"
        together, store = Run(cpu), Store()
        together.crop(root / "photos", root / "together", given.engine, store, on=on)
        together.show("Ray, 3 nodes")
        efficiency = together.per_cpu_second / alone.per_cpu_second
        print(
            f"object stores: {store.most / 2**20:.1f} MiB at most, of {3 * STORE / 2**20:.0f}; "
            f"{store.spilled / 2**20:.1f} MiB spilled"
        )
        assert everything_in(root / "together") == everything_in(root / "alone")
        if not given.no_kill:
            killing, done = Run(cpu), set()

            def kill(now: pl.Progress) -> None:
                if now.what == "photo" and now.done >= given.photos / 4 and "actor" not in done:
                    done.add("actor")
                    looking = (each for each in cpu.processes() if "Map(Looks)" in (each / "cmdline").read_text())
                    os.kill(int(next(looking).name), signal.SIGKILL)
                if now.what == "photo" and now.done >= given.photos / 2 and "node" not in done:
                    done.add("node")
                    threading.Thread(target=made.remove_node, args=(nodes[0], False)).start()

            killing.crop(root / "photos", root / "killing", given.engine, kill, on=on)
            killing.show(f"Ray, killed: {', '.join(sorted(done))}")
            assert everything_in(root / "killing") == everything_in(root / "alone")
        print("all folders are the same, byte for byte")
        print(f"efficiency {efficiency:.2f}, floor {FLOOR}: {'held' if efficiency >= FLOOR else 'MISSED'}")
        made.shutdown()


if __name__ == "__main__":
    main()
