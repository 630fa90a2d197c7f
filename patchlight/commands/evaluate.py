"""How good a model is, or its features."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchlight.commands.options import AsJson, Device
from patchlight.commands.tables import print_rows
from patchlight.errors import PatchlightError
from patchlight.files import printable
from patchlight.reporting import Progress, Reporter, on_terminal
from patchlight.signals import asked_to_stop

if TYPE_CHECKING:
    from patchlight.training.evaluate import Evaluation
    from patchlight.weights.load import Loaded


def evaluate(
    model: Annotated[str, typer.Argument(help="A model, as for `inspect`; a run's folder will do.")],
    photos: Annotated[str, typer.Argument(help="Labelled photos, as `finetune` takes them.")],
    knn: Annotated[bool, typer.Option("--knn", help="Judge the features by the 20 nearest labelled photos.")] = False,
    linear: Annotated[bool, typer.Option("--linear", help="Judge the features by a linear head on them.")] = False,
    attentive: Annotated[
        bool, typer.Option("--attentive", help="Judge the features by a head that attends to the patches.")
    ] = False,
    known: Annotated[
        str | None, typer.Option(help="Labelled photos for --knn and the heads to learn from; else 4/5 of PHOTOS.")
    ] = None,
    label_column: Annotated[
        str | None, typer.Option(metavar="NAME", help="The column of labels of a CSV or a table, if not called so.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the numbers and pictures here too.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images in a forward pass.")] = 64,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read photos.")] = 2,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """How good a model is on labelled photos: accuracy, what it confuses, and whether its confidence holds.

    With --knn, --linear or --attentive: how good its features are, whatever it was trained for.
    """
    methods = [name for name, asked in (("knn", knn), ("linear", linear), ("attentive", attentive)) if asked]
    if methods:
        if out is not None:
            raise PatchlightError("--out is for the model's own answers; use --json for the features")
        _evaluate_features(model, photos, methods, known, label_column, batch, workers, device, as_json)
        return
    if known is not None:
        raise PatchlightError("--known goes with --knn, --linear or --attentive")
    from patchlight.training.evaluate import evaluate_photos
    from patchlight.training.evaluation_folder import check_folder, write_report

    if out is not None:
        check_folder(out)
    with _showing(model) as reporter:
        report = evaluate_photos(
            _load(model, device),
            photos,
            label_column=label_column,
            batch_size=batch,
            workers=workers,
            reporter=reporter,
        )
    for line in report.problems:
        typer.echo(f"patchlight: {line}", err=True)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        _print_evaluation(report.evaluation)
    for line in [] if out is None else write_report(report, out):
        typer.echo(f"patchlight: {line}", err=True)
    if report.left_out:
        typer.echo(f"patchlight: photos that cannot be read and were left out: {len(report.left_out):,}", err=True)
        raise typer.Exit(3)


@contextlib.contextmanager
def _showing(model: str) -> Iterator[Reporter]:
    """What is going on; a stop ends it in a line, and the processes that read in order."""
    with (
        asked_to_stop() as asked,
        asked.at_once(f"{model}: stopped before there was a result"),
        on_terminal() as reporter,
    ):
        reporter.progress(Progress(what=f"loading {model}"))
        yield reporter


def _load(model: str, device: str | None) -> "Loaded":
    from patchlight.devices import resolve_device
    from patchlight.weights.load import load

    return load(model, device=resolve_device(device))


def _evaluate_features(
    model: str,
    photos: str,
    methods: list[Any],
    known: str | None,
    label_column: str | None,
    batch: int,
    workers: int,
    device: str | None,
    as_json: bool,
) -> None:
    from patchlight.training.features import evaluate_features

    with _showing(model) as reporter:
        loaded = _load(model, device)
        found = [
            evaluate_features(
                loaded,
                photos,
                method=method,
                train=known,
                label_column=label_column,
                batch_size=batch,
                workers=workers,
                reporter=reporter,
            )
            for method in methods
        ]
    for line in found[0].problems:
        typer.echo(f"patchlight: {line}", err=True)
    if as_json:
        typer.echo(json.dumps([each.summary() for each in found], indent=2))
    else:
        for each in found:
            low, high = each.accuracy_interval
            typer.echo(f"{each.method:10} {each.accuracy:.2%} of {each.photos:,} photos ({low:.1%} to {high:.1%})")
    if found[0].left_out:
        typer.echo(f"patchlight: photos that cannot be read and were left out: {len(found[0].left_out):,}", err=True)
        raise typer.Exit(3)


def _print_evaluation(result: "Evaluation", most: int = 30) -> None:
    low, high = result.accuracy_interval
    seen = [one for one in result.per_class if one.photos]
    typer.echo(
        f"accuracy           {result.accuracy:.2%} of {result.photos:,} photos (95% interval {low:.1%} to {high:.1%})"
    )
    if result.top5_accuracy is not None:
        typer.echo(f"top-5 accuracy     {result.top5_accuracy:.2%}")
    fitted = f"{result.calibrated.error:.2%} with temperature {result.temperature:.3g}, the best on these photos"
    if result.accuracy == 1:
        fitted = "all answers are right, so there is no temperature to fit"
    typer.echo(f"calibration error  {result.calibration.error:.2%}; {fitted}")
    seen.sort(key=lambda one: (one.recall or 0.0, -one.photos))
    rows = [
        (
            printable(one.name),
            f"{one.photos:,}",
            f"{one.recall or 0:.1%}",
            "" if one.precision is None else f"{one.precision:.1%}",
            "" if one.confused_with is None else f"{printable(one.confused_with)} ({one.confused:,})",
        )
        for one in seen[:most]
    ]
    print_rows(rows, ["class", "photos", "recall", "precision", "most confused with"])
    if len(seen) > most:
        typer.echo(f"and {len(seen) - most:,} classes that do better; --json or --out shows all")
