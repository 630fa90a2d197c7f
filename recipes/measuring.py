"""What the measuring recipes share: rows that are measured one by one, kept as they finish, and shown as a table.

OUT/results.jsonl has a line for each row and seed. A second start measures only what is missing, so that a run may be
cut anywhere; OUT/runs holds what is being trained, and nothing afterwards.
"""

import argparse
import functools
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchlight.errors import PatchlightError
from patchlight.files import replacing
from patchlight.models.vit import ViT
from patchlight.signals import Stopped
from patchlight.training.config import TrainConfig
from patchlight.training.data import Dataset
from patchlight.training.loop import train
from patchlight.training.sources import Part, open_dataset
from patchlight.weights.load import load

Teacher = Callable[[Tensor], Tensor]
"""Images (B, 3, H, W) with values from 0 to 1 -> logits_BK."""

Result = dict[str, Any]
"""A line of results.jsonl: row, seed, the budget's values, jobs, and what was measured, accuracies from 0 to 1."""


@dataclass(frozen=True)
class Task:
    """One row with one seed."""

    row: str
    seed: int
    budget: dict[str, Any]
    """What has to be the same for all rows, or they could not be compared."""


class Cut(Exception):  # noqa: N818
    """The run was asked to stop; what is finished is kept."""


def measure_all(
    out: Path,
    tasks: Sequence[Task],
    measure: Callable[[Task], Result],
    *,
    jobs: int = 1,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Result]:
    """Measure what is not yet in the results, `jobs` rows at once in processes of their own; all results.

    `measure` and its results are sent between processes. A row that fails stops the run when the rows that are under
    way have finished.
    """
    out.mkdir(parents=True, exist_ok=True)
    file, done = out / "results.jsonl", read_results(out)
    with replacing(file) as temporary:  # without what a kill may have left of a line
        temporary.write_text("".join(json.dumps(result) + "\n" for result in done))
    known = {(result["row"], result["seed"]): result for result in done}
    for task in tasks:
        _check_same_budget(file, task, known.get((task.row, task.seed), {}))
    waiting = [task for task in tasks if (task.row, task.seed) not in known]
    if len(waiting) < len(tasks):
        tell(f"{len(tasks) - len(waiting)} of {len(tasks)} rows are measured already")

    def keep(task: Task, measured: Result) -> None:
        result = {"row": task.row, "seed": task.seed, **task.budget, "jobs": jobs, **measured}
        with file.open("a") as lines:
            lines.write(json.dumps(result) + "\n")
        done.append(result)
        tell(f"{task.row}, seed {task.seed}: {measured['accuracy']:.2%} in {measured['seconds']:.1f} s")

    if jobs == 1:
        for task in waiting:
            keep(task, measure(task))
        return done
    context = multiprocessing.get_context("spawn")  # a forked process could not use the GPU
    failure: Exception | None = None
    with ProcessPoolExecutor(jobs, context, _start_worker, (jobs,)) as pool:
        futures = {pool.submit(measure, task): task for task in waiting}
        for future in as_completed(futures):
            if future.cancelled():
                continue
            error = future.exception()
            if error is None:
                keep(futures[future], future.result())
            elif failure is None:
                assert isinstance(error, Exception)
                failure = error
                pool.shutdown(wait=False, cancel_futures=True)
    if failure is not None:
        raise failure
    return done


def read_results(out: Path) -> list[Result]:
    """The lines that are whole."""
    file = out / "results.jsonl"
    if not file.exists():
        return []
    results = []
    for line in file.read_text().splitlines():
        try:
            results.append(json.loads(line))
        except ValueError:
            break  # cut off by a kill, so the last
    return results


def _check_same_budget(file: Path, task: Task, result: Result) -> None:
    for name, value in task.budget.items():
        if result and result.get(name) != value:
            raise PatchlightError(
                f"{file}: {task.row} was measured with {name}={result.get(name)!r}, not {value!r}; use the same, or "
                "name another folder"
            )


def _start_worker(jobs: int) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Or a killed run would go on without anybody who keeps its results."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def train_vit(
    config: TrainConfig, run: Path, *, device: str | None, teacher: Teacher | None = None
) -> tuple[ViT, Result]:
    """The trained model on the device, and its accuracy, seconds and parameters; the folder `run` is gone afterwards.

    A run that was cut goes on where it was saved.
    """
    began = time.perf_counter()
    try:
        result = train(config, run, resume=True, device=device, teacher=teacher)
    except Stopped:
        raise Cut from None
    seconds = time.perf_counter() - began
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    vit = load(run, device=device).model
    shutil.rmtree(run)
    parameters = sum(parameter.numel() for parameter in vit.parameters())
    return vit, {"accuracy": result.accuracy, "seconds": round(seconds, 2), "parameters": parameters}


@functools.cache
def photos(data: str, part: Part) -> Dataset:
    """Opened once in a process."""
    return open_dataset(data, part)


def precision_for(device: str | None) -> str:
    """bfloat16 where it is fast."""
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return "bfloat16" if kind.startswith("cuda") else "float32"


def percent(shares: Iterable[float]) -> str:
    """Mean and, of several, standard deviation over the seeds, in percent."""
    values = [100 * share for share in shares]
    if not values:
        return ""
    mean = f"{statistics.fmean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.2f}"


def accuracies_of(results: Sequence[Result]) -> str:
    """The line above a table that says what its accuracies are."""
    seeds = {row: sum(each["row"] == row for each in results) for row in {result["row"] for result in results}}
    fewest, most = min(seeds.values()), max(seeds.values())
    if most == 1:
        return "Accuracy in percent, one seed.\n\n"
    where = "" if fewest == most else ", or of one seed where no deviation stands"
    return f"Accuracy in percent, mean ± standard deviation of {most} seeds{where}.\n\n"


def seconds_of(results: Sequence[Result]) -> str:
    return f"{statistics.fmean(result['seconds'] for result in results):.0f}" if results else ""


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# The command line


def arguments_parser(description: str) -> argparse.ArgumentParser:
    """With what all measuring recipes take."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("out", type=Path, help="the folder of the results; what is in it already is not measured again")
    parser.add_argument("--data", default="data/cifar10", help="CIFAR-10; recipes/fetch_cifar10.py fetches it")
    parser.add_argument("--device", help="cpu, cuda; the GPU where there is one")
    parser.add_argument("--jobs", type=counting, default=1, help="rows at once, each in a process of its own")
    parser.add_argument("--table", action="store_true", help="measure nothing, only show what is there")
    parser.add_argument(
        "--set", dest="changes", action="append", default=[], metavar="NAME=VALUE", help="such as model.width=64"
    )
    return parser


def counting(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be 1 or more")
    return value


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def exit_code(work: Callable[[], None]) -> int:
    """Of a recipe that is run as a command; a user's mistake is one line."""
    try:
        work()
    except PatchlightError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except (Cut, KeyboardInterrupt):
        sys.stderr.write("stopped; run the same command again to continue\n")
        return 130
    return 0


def save_picture(path: Path, draw: Callable[[], Any]) -> None:
    """`draw` gives a figure; where matplotlib is missing, that is said, and --table draws it elsewhere."""
    from patchlight.explain.plot import to_png

    try:
        picture = to_png(draw())
    except PatchlightError as error:
        say(f"not drawn: {error}; then run this again with --table")
        return
    with replacing(path) as temporary:
        temporary.write_bytes(picture)
    say(f"{path}")


INK, PALE = "#333333", "#999999"


def finish_axis(ax: Any, along: str, up: str = "") -> None:
    """Labels, and pale lines where the numbers are read: across for a course, else down."""
    ax.set_xlabel(along, fontsize=8.5, color=INK)
    ax.set_ylabel(up, fontsize=8.5, color=INK)
    ax.tick_params(labelsize=8.5, colors=INK, length=2)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y" if up else "x", color="#eeeeee")
    ax.set_axisbelow(True)
