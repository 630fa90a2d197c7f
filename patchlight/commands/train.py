"""Training, by a recipe or on one's own photos, and what is made of the result."""

import os
import shlex
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from patchlight.config import parse_values
from patchlight.errors import PatchlightError
from patchlight.signals import Stopped

SECONDS_BETWEEN_LINES = 30.0
"""Of progress, where there is no terminal for a bar."""


def train(
    recipe: Annotated[str, typer.Argument(help="A recipe: a Python file with config() -> TrainConfig.")],
    out: Annotated[Path, typer.Option(help="The folder of the run; `patchlight.load` takes it afterwards.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Such as optim.lr=1e-3; repeatable.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in the folder.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; by default a GPU if there is one.")] = None,
) -> None:
    """Train a model as a recipe says; stopped anywhere, `--resume` goes on exactly."""
    changes = parse_values(settings or [])

    from patchlight.training.recipe import read_recipe, recipe_config, recipe_teacher

    module = read_recipe(recipe)
    config = recipe_config(module, changes)
    make_teacher = None
    if hasattr(module, "teacher") and not changes.keys() & {"distill", "distill.teacher"}:
        if config.distill is None:
            raise PatchlightError(f"{recipe}: has a teacher, but its config has no `distill`")
        make_teacher = partial(recipe_teacher, module, out, config)
    _run_training(config, out, resume=resume, device=device, make_teacher=make_teacher)


def finetune(
    photos: Annotated[str, typer.Argument(help="A folder of class folders, a CSV (file,label), or tar shards.")],
    out: Annotated[Path, typer.Option(help="The folder of the run; `patchlight.load` takes it afterwards.")],
    model: Annotated[str, typer.Option(help="The checkpoint to start from: what `inspect` takes.")] = "default",
    validation: Annotated[str | None, typer.Option(help="Photos to judge by; else some are held out.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Such as epochs=5; repeatable.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in the folder.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; by default a GPU if there is one.")] = None,
) -> None:
    """Teach a checkpoint the classes of your own photos; how much of it learns is chosen by how many there are."""
    changes = parse_values(settings or [])

    from patchlight.training.data import CLASS_WITHOUT_PHOTOS
    from patchlight.training.finetune import choose_recipe, in_words, resumed_recipe
    from patchlight.training.processes import rank_and_world
    from patchlight.training.run_folder import RunFolder
    from patchlight.training.sources import open_dataset, require_photos
    from patchlight.weights.load import load

    run, training = RunFolder(out), open_dataset(photos)
    require_photos(training, photos)
    if len(training.classes) == 1:
        lost = next((f" ({note.line})" for note in training.notes if note.kind == CLASS_WITHOUT_PHOTOS), "")
        raise PatchlightError(
            f"{photos}: all photos are of one class, {training.classes[0]!r}{lost}; add photos of another class"
        )
    if resume and run.settings.exists():
        config = resumed_recipe(run.config(), model, photos, validation=validation, changes=changes)
    else:
        config = choose_recipe(load(model), photos, training, validation=validation, changes=changes)
    if rank_and_world()[0] == 0:
        typer.echo(in_words(config, training))
    _run_training(config, out, resume=resume, device=device)


def _run_training(config: Any, out: Path, *, resume: bool, device: str | None, make_teacher: Any = None) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars
    from rich.table import Column

    from patchlight.training.loop import Progress
    from patchlight.training.loop import train as run_training
    from patchlight.training.processes import FailedElsewhereError, rank_and_world

    # On a narrow terminal what may be wrapped gets shorter: the bar alone.
    left = TimeRemainingColumn(table_column=Column(no_wrap=True))
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[how]}"), left)
    first = rank_and_world()[0] == 0
    on_terminal = sys.stderr.isatty()
    if first and resume and not out.exists():
        typer.echo(f"patchlight: {out}: there is no run to resume; starting one", err=True)
    said = time.monotonic()
    with Bars(*columns, console=Console(stderr=True), disable=not (first and on_terminal)) as bars:
        bar = bars.add_task("starting", how="", total=None)

        def show(what: str, done: int, total: int, how: str, line: str) -> None:
            """On the bar, or now and then as a line."""
            nonlocal said
            bars.update(bar, description=what, completed=done, total=total, how=how)
            if first and not on_terminal and time.monotonic() - said > SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                typer.echo(line, err=True)

        def checked(done: int, total: int) -> None:
            show("checking photos", done, total, f"{done:,} of {total:,}", f"checked {done:,} of {total:,} photos")

        def watch(now: Progress) -> None:
            how = f"loss {now.loss:.3f}  lr {now.lr:.2g}  {now.images_per_second:,.0f} images/s"
            if now.accuracy is not None:
                how += f"  accuracy {now.accuracy:.2%}"
            line = f"epoch {now.epoch:.1f}, step {now.step:,} of {now.steps:,}: {how}"
            show(f"epoch {now.epoch:.1f}", now.step, now.steps, how, line)

        def tell(line: str) -> None:
            bars.console.print(line, markup=False, highlight=False, soft_wrap=True)

        def stopping() -> None:
            if first:  # in the midst of anything, so past whatever else is being written
                os.write(2, b"\npatchlight: stopping as soon as all is saved; a second time stops at once\n")

        try:
            result = run_training(
                config,
                out,
                resume=resume,
                device=device,
                make_teacher=make_teacher,
                watch=watch,
                checked=checked,
                tell=tell,
                stopping=stopping,
            )
        except Stopped as stopped:
            if first:
                raise
            raise typer.Exit(128 + stopped.signal) from None
        except FailedElsewhereError:
            raise typer.Exit(2) from None
    if first:
        if result.accuracy is None:
            judged = _learnt_without_labels(out)
        elif config.labelled:
            judged = f"accuracy {result.accuracy:.2%} on {result.photos:,} photos"
        else:
            judged = (
                f"by its features, {result.accuracy:.2%} of {result.photos:,} photos have neighbours of their folder"
            )
        typer.echo(f"{out}: {judged}; patchlight.load({str(out)!r})")


def _learnt_without_labels(out: Path) -> str:
    """What there is to say of a run whose photos have no classes to judge by."""
    from patchlight.training.run_folder import RunFolder

    last = {name: value for row in RunFolder(out).rows() for name, value in row.items() if value is not None}
    words = [f"loss {last['loss']:.3f}"] if "loss" in last else []
    if "feature_rank" in last:
        words.append(f"features in {last['feature_rank']:.0f} directions")
    if "explained" in last:
        words.append(f"{last['explained']:.1%} of what was hidden explained")
    judge = f"patchlight evaluate {shlex.quote(str(out))} LABELLED --knn"
    return f"{', '.join(words)}; `{judge}` judges its features by photos with labels"
