"""Training, by a recipe or on one's own photos."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchlight.commands.options import Device
from patchlight.errors import PatchlightError
from patchlight.json_config import parse_values
from patchlight.signals import Stopped

if TYPE_CHECKING:
    from patchlight.training.api import Trained

Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Such as optim.lr=1e-3; repeatable.")
]
Out = Annotated[Path, typer.Option(help="The folder of the run; `patchlight.load` takes it afterwards.")]
Resume = Annotated[bool, typer.Option("--resume", help="Resume the run in the folder.")]


def train(
    recipe: Annotated[str, typer.Argument(help="A recipe: a Python file with config() -> TrainConfig.")],
    out: Out,
    settings: Settings = None,
    resume: Resume = False,
    device: Device = None,
) -> None:
    """Train a model as a recipe says; stopped anywhere, `--resume` goes on exactly."""
    changes = parse_values(settings or [])

    from patchlight.training import api

    _say(lambda: api.train(recipe, out, settings=changes, resume=resume, device=device))


def finetune(
    out: Out,
    photos: Annotated[
        str | None,
        typer.Argument(help="A folder of class folders, a CSV (file,label), tar shards or tables: a path or a URL."),
    ] = None,
    corrected: Annotated[
        Path | None,
        typer.Option("--from", metavar="DIR", help="Instead: what was corrected in `crop`'s DIR."),
    ] = None,
    model: Annotated[str, typer.Option(help="The checkpoint to start from: what `inspect` takes.")] = "default",
    validation: Annotated[str | None, typer.Option(help="Photos to judge by; else some are held out.")] = None,
    settings: Settings = None,
    resume: Resume = False,
    device: Device = None,
) -> None:
    """Teach a checkpoint the classes of your own photos; how much of it learns is chosen by how many there are."""
    changes = parse_values(settings or [])
    if (photos is None) == (corrected is None):
        raise PatchlightError("name photos to learn from, or --from DIR, the folder of a run that was corrected")
    if corrected is not None:
        from patchlight.batch.overrides import write_labels

        photos = str(write_labels(corrected))
    learnt_from = photos or ""

    from patchlight.training import api

    _say(
        lambda: api.finetune(
            learnt_from, out, model=model, validation=validation, settings=changes, resume=resume, device=device
        )
    )


def _say(run: "Callable[[], Trained]") -> None:
    """Of several processes the first alone says what came of the run."""
    from patchlight.training.processes import FailedElsewhereError, rank_and_world

    first = rank_and_world()[0] == 0
    try:
        trained = run()
    except Stopped as stopped:
        if first:
            raise
        raise typer.Exit(128 + stopped.signal) from None
    except FailedElsewhereError:
        raise typer.Exit(2) from None
    if not first:
        return
    if trained.accuracy is None:
        judged = _learnt_without_labels(trained)
    elif trained.config.labelled:
        judged = f"accuracy {trained.accuracy:.2%} on {trained.photos:,} photos"
    else:
        judged = f"by its features, {trained.accuracy:.2%} of {trained.photos:,} photos have neighbours of their folder"
    typer.echo(f"{trained.folder}: {judged}; patchlight.load({str(trained.folder)!r})")


def _learnt_without_labels(trained: "Trained") -> str:
    """What there is to say of a run whose photos have no classes to judge by."""
    last = {name: value for row in trained.course() for name, value in row.items() if value is not None}
    words = [f"loss {last['loss']:.3f}"] if "loss" in last else []
    if "feature_rank" in last:
        words.append(f"features in {last['feature_rank']:.0f} directions")
    if "explained" in last:
        words.append(f"{last['explained']:.1%} of what was hidden explained")
    judge = f"patchlight evaluate {shlex.quote(str(trained.folder))} LABELLED --knn"
    return f"{', '.join(words)}; `{judge}` judges its features by photos with labels"
