"""Training, by a recipe or on one's own photos, and what is made of the result."""

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from patchlight.config import parse_values
from patchlight.errors import PatchlightError

SECONDS_BETWEEN_LINES = 30.0
"""Of progress, where there is no terminal for a bar."""


def train(
    recipe: Annotated[str, typer.Argument(help="A recipe: a Python file with config() -> TrainConfig.")],
    out: Annotated[Path, typer.Option(help="The folder of the run; `patchlight.load` takes it afterwards.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Such as optim.lr=1e-3; repeatable.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; the GPU where there is one.")] = None,
) -> None:
    """Train a model as a recipe says; stopped anywhere, `--resume` goes on exactly."""
    changes = parse_values(settings or [])

    from patchlight.train.recipe import read_recipe, recipe_config

    module = read_recipe(recipe)
    config = recipe_config(module, changes)
    teacher = None
    if config.distill is None and hasattr(module, "teacher"):
        raise PatchlightError(f"{recipe}: has a teacher, but its config has no `distill`")
    if hasattr(module, "teacher"):
        teacher = module.teacher(out, device, config)
    _run_training(config, out, resume=resume, device=device, teacher=teacher)


def finetune(
    photos: Annotated[str, typer.Argument(help="A folder of class folders, a CSV (file,label), or tar shards.")],
    out: Annotated[Path, typer.Option(help="The folder of the run; `patchlight.load` takes it afterwards.")],
    model: Annotated[str, typer.Option(help="The checkpoint to start from: what `inspect` takes.")] = "default",
    validation: Annotated[str | None, typer.Option(help="Photos to judge by; else some are held out.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Such as epochs=5; repeatable.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; the GPU where there is one.")] = None,
) -> None:
    """Teach a checkpoint the classes of your own photos; how much of it learns is chosen by how many there are."""
    changes = parse_values(settings or [])

    from patchlight.train.finetune import choose_recipe
    from patchlight.train.sources import open_dataset
    from patchlight.weights.load import load

    choice = choose_recipe(load(model), photos, open_dataset(photos), validation=validation)
    config = choice.config.changed(changes)
    epochs = "1 epoch" if config.epochs == 1 else f"{config.epochs:g} epochs"
    typer.echo(f"{choice.why}; {epochs}, batches of {config.batch_size}")
    _run_training(config, out, resume=resume, device=device)


def _run_training(config: Any, out: Path, *, resume: bool, device: str | None, teacher: Any = None) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    from patchlight.train.loop import Progress, Stopped
    from patchlight.train.loop import train as run_training

    columns = (
        TextColumn("epoch {task.fields[epoch]:.1f}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f}%  {task.fields[how]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    first = os.environ.get("RANK", "0") == "0"
    on_terminal = sys.stderr.isatty()
    if first and resume and not out.exists():
        typer.echo(f"patchlight: {out}: there is no run to resume; beginning one", err=True)
    said = time.monotonic()
    with Bars(*columns, console=Console(stderr=True), disable=not (first and on_terminal)) as bars:
        bar = bars.add_task("training", epoch=0.0, how="starting", total=None)

        def watch(now: Progress) -> None:
            nonlocal said
            how = f"loss {now.loss:.3f}  {now.images_per_second:,.0f} images/s"
            if now.accuracy is not None:
                how += f"  accuracy {now.accuracy:.2%}"
            bars.update(bar, completed=now.step, total=now.steps, epoch=now.epoch, how=how)
            if not on_terminal and time.monotonic() - said > SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                typer.echo(f"epoch {now.epoch:.1f}, step {now.step:,} of {now.steps:,}: {how}", err=True)

        def tell(line: str) -> None:
            bars.console.print(line, markup=False, highlight=False, soft_wrap=True)

        stopped_at = None
        try:
            result = run_training(config, out, resume=resume, device=device, teacher=teacher, watch=watch, tell=tell)
        except Stopped as stopped:
            stopped_at = stopped
    if stopped_at is not None:
        typer.echo(f"patchlight: {stopped_at}", err=True)
        raise typer.Exit(128 + stopped_at.signal)
    if first:
        judged = "" if result.accuracy is None else f"accuracy {result.accuracy:.2%} on {result.photos:,} photos; "
        typer.echo(f"{out}: {judged}patchlight.load({str(out)!r})")


def publish(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    name: Annotated[str, typer.Option("--as", help="What `load` is to call it; `default` is the package's own.")],
    groups: Annotated[Path | None, typer.Option(help="A CSV (label,group), in place of the run's data.groups.")] = None,
) -> None:
    """Make a run's model the one inside the package, which every command uses where none is named."""
    from patchlight.train.publish import put_into_package

    if name != "default":
        raise PatchlightError(f"--as {name}: the package holds one model, `default`; others are loaded by their folder")
    folder = put_into_package(run, groups=groups, tell=lambda line: typer.echo(f"patchlight: {line}", err=True))
    typer.echo(folder)
    typer.echo(
        "patchlight: its confidence is not calibrated yet; python benchmarks/localize.py default --calibrate --write",
        err=True,
    )
