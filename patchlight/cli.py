"""The command line: one subcommand, one function call. torch is imported by the commands that need it alone."""

import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from patchlight import __version__
from patchlight.errors import PatchlightError
from patchlight.families import ModelConfig, check_names_of_any, config_from_dict, config_from_json, variant

if TYPE_CHECKING:
    from patchlight.costing import Costs, Latency
    from patchlight.train.evaluate import Evaluation

Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change a setting of the model; repeatable.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]

Command = TypeVar("Command", bound=Callable[..., Any])


class _Plain:
    """Flags take no value, so that help names none for them."""

    def get_params(self, context: Any) -> list[Any]:
        params: list[Any] = super().get_params(context)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class _Command(_Plain, TyperCommand):
    pass


class _Commands(_Plain, TyperGroup):
    pass


class _App(typer.Typer):
    def command(self, *names: Any, **settings: Any) -> Callable[[Command], Command]:
        return super().command(*names, **{"cls": _Command} | settings)


app = _App(cls=_Commands, add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.callback(invoke_without_command=True)
def patchlight(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Vision Transformers: short enough to read, exact enough to trust."""
    if version:
        typer.echo(f"patchlight {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def costs(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL", help="B/16, swin-T, convnext-T, ..., or config files (.json).")
    ],
    image_size: Annotated[str | None, typer.Option(help="Pixels: 224, or 224x336 (height x width).")] = None,
    settings: Settings = None,
    timed: Annotated[bool, typer.Option("--time", help="Measure the latency too.")] = False,
    batch: Annotated[int, typer.Option(min=1, help="With --time: images in a forward pass.")] = 1,
    device: Annotated[str, typer.Option(help="With --time: cpu, cuda, cuda:1, mps.")] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Tokens, parameters, multiply-adds and memory of models, side by side; no weights are needed."""
    changes = _parse_settings(settings or [])
    if image_size is not None:
        changes["image_size"] = _parse_size(image_size)
    configs = [_read_config(model, changes) for model in models]

    from rich.console import Console
    from rich.text import Text

    from patchlight.costing import costs as count_costs
    from patchlight.costing import measure_latency

    counted, latencies = [], []
    with Console(stderr=True).status("") as status:  # shows on a terminal only
        for model, config in zip(models, configs, strict=True):
            status.update(Text(f"counting {model}"))
            counted.append(count_costs(config))
            if timed:
                status.update(Text(f"timing {model}"))
            latencies.append(measure_latency(config, batch=batch, device=device) if timed else None)
    if as_json:
        typer.echo(json.dumps([_costs_row(*row) for row in zip(models, counted, latencies, strict=True)], indent=2))
    else:
        _print_costs(models, counted, latencies)


@app.command()
def inspect(
    source: Annotated[str, typer.Argument(help="A file, a folder, a catalogue name, or hf:owner/name.")],
    settings: Settings = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None,
    as_json: AsJson = False,
) -> None:
    """What a checkpoint is: its settings and where each was read, its preprocessing, what was left out."""
    changes = _parse_settings(settings or [])

    from patchlight.weights.load import load

    loaded = load(source, revision=revision, **changes)
    parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
    facts = {
        "source": source,
        "origin": loaded.provenance.origin,
        "licence": loaded.provenance.licence,
        "sha256": loaded.provenance.sha256,
        "parameters": parameters,
        "labels": None if loaded.labels is None else len(loaded.labels),
        "groups": None if loaded.groups is None else ", ".join(loaded.groups.nodes),
    }
    config, preprocess = loaded.config.to_dict(), loaded.preprocess.config.to_dict()
    if as_json:
        notes = list(loaded.notes)
        values = {"config": config, "why": dict(loaded.why), "preprocess": preprocess, "notes": notes}
        typer.echo(json.dumps(facts | values, indent=2))
        return
    _print_rows([(name, _plain(value)) for name, value in facts.items() if value is not None])
    rows = [(name, _plain(value), loaded.why.get(name, "default")) for name, value in config.items()]
    _print_rows([row for row in rows if row[0] != "architecture"], ["setting", "value", "from"])
    _print_rows([(name, _plain(value)) for name, value in preprocess.items()], ["preprocessing", ""])
    for note in loaded.notes:
        typer.echo(f"note: {note}")


@app.command()
def models(
    words: Annotated[list[str] | None, typer.Argument(metavar="FILTER", help="Words that a row must contain.")] = None,
    as_json: AsJson = False,
) -> None:
    """The checkpoints that can be loaded by name."""
    from patchlight.weights.catalog import ENTRIES

    default = ("default", "inside the package: what every command takes where none is named", "see its card")
    rows = [default, *((entry.name, entry.about, entry.licence) for entry in ENTRIES)]
    rows = [row for row in rows if all(word.lower() in " ".join(row).lower() for word in words or [])]
    if not rows:
        raise PatchlightError(f"no checkpoint matches {' '.join(words or [])!r}; `patchlight models` lists them all")
    if as_json:
        entries = {entry.name: entry.to_dict() for entry in ENTRIES}
        found = [entries.get(name, {"name": name, "about": about, "licence": terms}) for name, about, terms in rows]
        typer.echo(json.dumps(found, indent=2))
    else:
        _print_rows(rows, ["name", "what", "licence"])


@app.command()
def classify(
    photos: Annotated[list[str], typer.Argument(metavar="PHOTO", help="Image files.")],
    model: Annotated[str, typer.Option(help="What `inspect` takes.")] = "default",
    top: Annotated[int, typer.Option(min=1, help="How many classes to name.")] = 5,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """What photos show, by a checkpoint with a head: group and name, where they are sure, and the likeliest classes."""
    changes = _parse_settings(settings or [])

    from patchlight.classification import classify as classify_photo
    from patchlight.images.decode import ImageError
    from patchlight.weights.load import load

    loaded = load(model, **changes)
    failed = 0
    for photo in photos:
        try:
            prediction = classify_photo(loaded, photo, top)
        except ImageError as error:
            if len(photos) == 1:
                raise
            failed += 1
            typer.echo(f"patchlight: {error}", err=True)
            if as_json:
                typer.echo(json.dumps({"path": photo, "status": "error", "reason": error.reason}))
            continue
        if as_json:
            typer.echo(json.dumps({"path": photo, "status": "ok"} | prediction.to_dict()))
        else:
            said = [] if prediction.named is None else [*prediction.named.words(), "likeliest:"]
            pairs = zip(prediction.labels, prediction.probabilities, strict=True)
            classes = ", ".join(f"{label} {probability:.1%}" for label, probability in pairs)
            typer.echo(" ".join([f"{photo}:", *said, classes]))
    if failed:
        raise typer.Exit(3)


@app.command()
def crop(
    paths: Annotated[list[str], typer.Argument(metavar="PATH", help="Photos, folders of photos, or patterns.")],
    out: Annotated[Path, typer.Option(help="The folder for crops, results and report; run again to go on.")],
    model: Annotated[str, typer.Option(help="What `inspect` takes.")] = "default",
    method: Annotated[str, typer.Option(help="auto, subject, cls, rollout, lost, tokencut or features.")] = "auto",
    subjects: Annotated[str, typer.Option(metavar="N|all", help="How many subjects of a photo, at most.")] = "1",
    margin: Annotated[float, typer.Option(help="Around the box, as a share of its sides.")] = 0.03,
    aspect: Annotated[str, typer.Option(help="free, or width:height such as 1:1 or 4:3.")] = "free",
    size: Annotated[int | None, typer.Option(help="Pixels of a crop's longer side; larger ones are scaled.")] = None,
    min_area: Annotated[float, typer.Option(help="The least share of the photo that a subject fills.")] = 0.0,
    second_look: Annotated[
        bool, typer.Option("--second-look", help="Look at what was found once more, closer.")
    ] = False,
    tiles: Annotated[int | None, typer.Option(help="Look at N x N overlapping parts: small subjects.")] = None,
    burst: Annotated[
        bool, typer.Option("--burst", help="Camera traps: what is there in every frame is no animal.")
    ] = False,
    boxes_only: Annotated[bool, typer.Option("--boxes-only", help="Find, and cut nothing.")] = False,
    overlay: Annotated[bool, typer.Option("--overlay", help="Also draw heat and boxes over each photo.")] = False,
    lossless: Annotated[bool, typer.Option("--lossless", help="Cut JPEGs at their blocks, without encoding.")] = False,
    formats: Annotated[
        list[str] | None, typer.Option("--format", help="Also write json, csv, megadetector or coco; repeatable.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin anew in a folder with other settings.")] = False,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read and cut.")] = 2,
    batch: Annotated[int, typer.Option(min=1, help="Photos that a GPU looks at at once.")] = 32,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; the GPU where there is one.")] = None,
) -> None:
    """Find the subject of every photo and cut it out of the original: no labels, any number of photos."""
    if subjects != "all" and not (subjects.isascii() and subjects.isdecimal() and int(subjects) > 0):
        raise PatchlightError(f"--subjects {subjects}: give a number of 1 or more, or all")

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    from patchlight.batch.line import Progress, Stopped
    from patchlight.batch.overlay import write_overlays
    from patchlight.batch.rows import read_rows
    from patchlight.batch.runner import crop_photos
    from patchlight.batch.settings import CropSettings

    settings = CropSettings(
        method=method,
        subjects=None if subjects == "all" else int(subjects),
        margin=margin,
        aspect=aspect,
        size=size,
        min_area=min_area,
        second_look=second_look,
        tiles=tiles,
        burst=burst,
        boxes_only=boxes_only,
        lossless=lossless,
    )
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    with Bars(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bars:
        bar = bars.add_task("cropping", total=None, rate="")

        def watch(now: Progress) -> None:
            failed = f", {now.failed:,} failed" if now.failed else ""
            stage = "looking, " if now.stage == "look" else ""
            bars.update(bar, completed=now.done, total=now.total, rate=f"{stage}{now.rate:.1f} photos/s{failed}")

        try:
            summary = crop_photos(
                paths,
                out,
                settings,
                model=model,
                device=device,
                workers=workers,
                batch_size=batch,
                overwrite=overwrite,
                formats=formats or (),
                watch=watch,
                tell=lambda line: bars.console.print(line, markup=False, highlight=False, soft_wrap=True),
            )
        except Stopped as stopped:
            bars.stop()
            typer.echo(f"patchlight: {stopped}", err=True)
            raise typer.Exit(128 + stopped.signal) from None
        if overlay:
            bars.reset(bar, total=summary.photos, rate="pictures")
            for _ in write_overlays(out, lambda done: bars.update(bar, completed=done)):
                pass
    found = ", ".join(f"{count:,} {decision}" for decision, count in summary.decisions.items() if count)
    failed = f"; {summary.failed:,} failed" if summary.failed else ""
    crops = "1 crop" if summary.crops == 1 else f"{summary.crops:,} crops"
    photos = "1 photo" if summary.photos == 1 else f"{summary.photos:,} photos"
    typer.echo(f"{photos}: {found or 'nothing'}{failed}; {crops} in {out}")
    if summary.groups:
        typer.echo("shown: " + ", ".join(f"{count:,} {group}" for group, count in summary.groups.items()))
    if summary.skipped:
        count = sum(summary.skipped.values())
        kinds = [f"{ascii(each)[1:-1] or 'no ending'} {number:,}" for each, number in summary.skipped.items()]
        files, more = ("1 file" if count == 1 else f"{count:,} files"), ", ..." if len(kinds) > 5 else ""
        typer.echo(f"{files} skipped: not photos ({', '.join(kinds[:5])}{more})")
    if summary.crops_of_others:
        one = "1 crop is of a photo that is not among these any more, and left as it was"
        many = "crops are of photos that are not among these any more, and left as they were"
        typer.echo(one if summary.crops_of_others == 1 else f"{summary.crops_of_others:,} {many}")
    if summary.bursts is not None:
        bursts, empty, frames = (summary.bursts[name] for name in ("count", "empty", "empty_frames"))
        typer.echo(f"{bursts:,} bursts, {empty:,} of them empty; {frames:,} empty frames")
    if summary.failed:
        wrong = (row for row in read_rows(out / "results.jsonl") if row["status"] == "error")
        named = ", ".join(f"{row['path']!a} ({row['reason']})" for row in islice(wrong, 3))
        more = f" and {summary.failed - 3:,} more" if summary.failed > 3 else ""
        typer.echo(f"failed: {named}{more}; why is in {out / 'results.csv'}", err=True)
    if summary.report is not None:
        typer.echo(summary.report)
    if summary.exit_code:
        raise typer.Exit(summary.exit_code)


@app.command()
def serve(
    model: Annotated[
        list[str] | None, typer.Option(help="What `inspect` takes; repeat it to compare models. [default: default]")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any that is free.")] = 8000,
    host: Annotated[
        str, typer.Option(help="The address to listen on; others than this machine's need the next two.")
    ] = ("127.0.0.1"),
    allow_remote: Annotated[bool, typer.Option("--allow-remote", help="Let other machines in, who know the token.")] = (
        False
    ),
    token: Annotated[
        str | None, typer.Option(envvar="PATCHLIGHT_TOKEN", help="For the API; drawn anew at each start if left out.")
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(help="With --allow-remote: a name by which others call this machine; repeatable."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; the GPU where there is one.")] = None,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = True,
) -> None:
    """A local page: drop a photo, see what the model sees, take the crop."""
    try:
        from patchlight.serve.running import Address
        from patchlight.serve.running import serve as serve_page
    except ModuleNotFoundError as error:
        raise PatchlightError(f"the page needs {error.name}; pip install 'patchlight[serve]'") from None
    address = Address(host=host, port=port, remote=allow_remote, token=token, names=tuple(name or ()))
    device = _usual_device() if device is None else device
    serve_page(model or ["default"], address, device=device, open_page=open_page, tell=typer.echo)


@app.command()
def look(
    photo: Annotated[str, typer.Argument(metavar="PHOTO", help="An image file.")],
    model: Annotated[str, typer.Option(help="What `inspect` takes.")] = "default",
    layers: Annotated[str, typer.Option(help="Blocks to sweep over: all, -1, or 0,3,11.")] = "all",
    patch: Annotated[str | None, typer.Option(metavar="ROW,COL", help="The patch to follow, counted from 0.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to; look-PHOTO in this folder if left out.")
    ] = None,
    image_size: Annotated[str | None, typer.Option(help="Pixels: 224, or 224x336 (height x width).")] = None,
    settings: Settings = None,
) -> None:
    """One page with pictures of what a model did with a photo: its attention, features and positions."""
    changes = _parse_settings(settings or [])
    if image_size is not None:
        changes["image_size"] = _parse_size(image_size)
    blocks = None if layers == "all" else _parse_numbers("--layers", layers, "all, -1, or blocks such as 0,3,11")
    place = None if patch is None else _parse_numbers("--patch", patch, "a row and a column, such as 3,5", count=2)

    from rich.console import Console
    from rich.text import Text

    from patchlight.looking import look as look_at
    from patchlight.weights.load import load

    with Console(stderr=True).status(Text(f"loading {model}")) as status:  # shows on a terminal only
        loaded = load(model, **changes)
        folder = Path(f"look-{Path(photo).stem}") if out is None else out
        look_at(
            loaded,
            photo,
            layers="all" if blocks is None else blocks,
            patch=None if place is None else (place[0], place[1]),
            out=folder,
            tell=lambda progress: status.update(Text(progress)),
        )
    typer.echo(folder / "index.html")


@app.command()
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
    changes = _parse_values(settings or [])

    from patchlight.train.recipe import read_recipe, recipe_config

    module = read_recipe(recipe)
    config = recipe_config(module, changes)
    teacher = None
    if config.distill is None and hasattr(module, "teacher"):
        raise PatchlightError(f"{recipe}: has a teacher, but its config has no `distill`")
    if hasattr(module, "teacher"):
        teacher = module.teacher(out, device, config)
    _run_training(config, out, resume=resume, device=device, teacher=teacher)


@app.command()
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
    changes = _parse_values(settings or [])

    from patchlight.train.finetune import choose_recipe
    from patchlight.train.sources import open_dataset
    from patchlight.weights.load import load

    choice = choose_recipe(load(model), photos, open_dataset(photos), validation=validation)
    config = choice.config.changed(changes)
    epochs = "1 epoch" if config.epochs == 1 else f"{config.epochs:g} epochs"
    typer.echo(f"{choice.why}; {epochs}, batches of {config.batch_size}")
    _run_training(config, out, resume=resume, device=device)


def _run_training(config: Any, out: Path, *, resume: bool, device: str | None, teacher: Any = None) -> None:
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    from patchlight.train.loop import Progress, Stopped
    from patchlight.train.loop import train as run_training

    columns = (
        TextColumn("epoch {task.fields[epoch]:.1f}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f}%  loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} images/s"),
        TextColumn("{task.fields[accuracy]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    first = os.environ.get("RANK", "0") == "0"
    from rich.console import Console

    with Bars(*columns, console=Console(stderr=True), disable=not (first and sys.stderr.isatty())) as bars:
        bar = bars.add_task("training", epoch=0.0, loss=float("nan"), rate=0.0, accuracy="", total=None)

        def watch(now: Progress) -> None:
            accuracy = "" if now.accuracy is None else f"accuracy {now.accuracy:.2%}"
            bars.update(
                bar,
                completed=now.step,
                total=now.steps,
                epoch=now.epoch,
                loss=now.loss,
                rate=now.images_per_second,
                accuracy=accuracy,
            )

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


@app.command()
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


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(help="What `inspect` takes; the folder of a run is fine.")],
    photos: Annotated[str, typer.Argument(help="A folder of class folders, a CSV (file,label), or tar shards.")],
    knn: Annotated[bool, typer.Option("--knn", help="Judge the features: by the 20 nearest labelled photos.")] = False,
    linear: Annotated[bool, typer.Option("--linear", help="Judge the features: by a linear head on them.")] = False,
    attentive: Annotated[
        bool, typer.Option("--attentive", help="Judge the features: by a head that looks at the patches.")
    ] = False,
    known: Annotated[
        str | None, typer.Option(help="Labelled photos for --knn and the heads to learn from; else 4/5 of PHOTOS.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the numbers and pictures here too.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images in a forward pass.")] = 64,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read photos.")] = 2,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; the GPU where there is one.")] = None,
    as_json: AsJson = False,
) -> None:
    """How good a model is on labelled photos: accuracy, what it confuses, and whether its confidence holds.

    With --knn, --linear or --attentive: how good its features are, whatever it was trained for.
    """
    methods = [name for name, asked in (("knn", knn), ("linear", linear), ("attentive", attentive)) if asked]
    if methods:
        if out is not None:
            raise PatchlightError(
                "--out goes with the model's own answers; --json prints what is found of the features"
            )
        _evaluate_features(model, photos, methods, known, batch, workers, device, as_json)
        return
    if known is not None:
        raise PatchlightError("--known goes with --knn, --linear or --attentive")
    from rich.console import Console
    from rich.text import Text

    from patchlight.train.evaluate import check_folder, evaluate_photos, write_report
    from patchlight.weights.load import load

    if out is not None:
        check_folder(out)
    with Console(stderr=True).status(Text(f"loading {model}")) as status:  # shows on a terminal only
        loaded = load(model, device=_usual_device() if device is None else device)
        report = evaluate_photos(
            loaded, photos, batch_size=batch, workers=workers, tell=lambda progress: status.update(Text(progress))
        )
        failures = [] if out is None else write_report(report, out)
    for line in (*report.problems, *failures):
        typer.echo(f"patchlight: {line}", err=True)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        _print_evaluation(report.evaluation)
    if report.left_out:
        typer.echo(f"patchlight: photos that cannot be read and were left out: {len(report.left_out):,}", err=True)
        raise typer.Exit(3)


def _evaluate_features(
    model: str,
    photos: str,
    methods: list[Any],
    known: str | None,
    batch: int,
    workers: int,
    device: str | None,
    as_json: bool,
) -> None:
    from rich.console import Console
    from rich.text import Text

    from patchlight.train.features import evaluate_features
    from patchlight.weights.load import load

    with Console(stderr=True).status(Text(f"loading {model}")) as status:  # shows on a terminal only
        loaded = load(model, device=_usual_device() if device is None else device)
        found = [
            evaluate_features(
                loaded,
                photos,
                method=method,
                train=known,
                batch_size=batch,
                workers=workers,
                tell=lambda progress: status.update(Text(progress)),
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


def _usual_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _print_evaluation(result: "Evaluation", most: int = 30) -> None:
    from patchlight.train.data import printable

    low, high = result.accuracy_interval
    seen = [one for one in result.per_class if one.photos]
    typer.echo(
        f"accuracy           {result.accuracy:.2%} of {result.photos:,} photos (95% interval {low:.1%} to {high:.1%})"
    )
    if result.top5_accuracy is not None:
        typer.echo(f"top-5 accuracy     {result.top5_accuracy:.2%}")
    typer.echo(
        f"calibration error  {result.calibration.error:.2%}; {result.calibrated.error:.2%} with temperature "
        f"{result.temperature:.3g}, fitted on these photos"
    )
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
    _print_rows(rows, ["class", "photos", "recall", "precision", "most confused with"])
    if len(seen) > most:
        typer.echo(f"and {len(seen) - most:,} classes that do better; --json or --out shows all")


def _plain(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, list) and len(value) == 2 else str(value)


def _print_rows(
    rows: Sequence[tuple[str, ...]], headings: Sequence[str] = (), justify: Literal["left", "right"] = "left"
) -> None:
    """A table as wide as it needs to be: a narrow terminal wraps its lines, and no number is cut off."""
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_header=bool(headings), padding=(0, 1, 0, 0))
    for index, heading in enumerate(headings or rows[0]):
        table.add_column(heading, justify=justify if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))  # a name in brackets is a name, not markup
    console = Console()
    needed = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    Console(width=max(console.width, needed)).print(table)


def _costs_row(model: str, counted: "Costs", latency: "Latency | None") -> dict[str, Any]:
    row = {"model": model} | counted.to_dict()
    return row if latency is None else row | {"latency": latency.to_dict()}


def _print_costs(models: list[str], counted: "list[Costs]", latencies: "list[Latency | None]") -> None:
    headings = ["image", "tokens", "params\nM", "\nGMACs", "in\nattn", "in\nMLP", "matrix\nM", "kept\nMiB"]
    caption = (
        "GMACs: billions of multiply-adds for one image, and the shares of attention and MLP. matrix: attention "
        "entries over all blocks and heads. kept: what one image leaves in memory for the backward pass, in float32."
    )
    timed = [latency for latency in latencies if latency is not None]
    if timed:
        headings += ["ms", "images\nper s"]
        threads = f" ({timed[0].threads} threads)" if timed[0].device == "cpu" else ""
        caption += f" ms: one forward of {timed[0].batch} in float32 on {timed[0].device}{threads}, median."
    rows = [
        (
            model,
            f"{cost.image_size[0]}x{cost.image_size[1]}",
            f"{cost.tokens:,}",
            f"{cost.parameters / 1e6:,.1f}",
            f"{cost.macs / 1e9:,.2f}",
            f"{cost.attention_macs / cost.macs:.0%}",
            f"{cost.mlp_macs / cost.macs:.0%}",
            f"{cost.attention_entries / 1e6:,.1f}",
            f"{cost.activation_bytes / 2**20:,.0f}",
            *(() if latency is None else (_short(latency.median_ms), _short(latency.images_per_second))),
        )
        for model, cost, latency in zip(models, counted, latencies, strict=True)
    ]
    _print_rows(rows, ["model", *headings], justify="right")
    typer.echo(textwrap.fill(caption, 80))


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2g}"


def _read_config(model: str, changes: dict[str, Any]) -> ModelConfig:
    if not model.endswith(".json"):
        return variant(model, **changes)
    try:
        text = Path(model).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise PatchlightError(f"{model}: cannot be read ({reason})") from None
    try:
        return config_from_dict(config_from_json(text).to_dict() | changes)
    except PatchlightError as error:
        raise PatchlightError(f"{model}: {error}") from None


def _parse_size(text: str) -> tuple[int, int]:
    size = re.fullmatch(r"([0-9]+)(?:[xX]([0-9]+))?", text)
    if size is None:
        raise PatchlightError(f"image size {text!r} is not a size; write 224, or 224x336 (height x width)")
    return int(size[1]), int(size[2] or size[1])


def _parse_numbers(option: str, text: str, remedy: str, count: int | None = None) -> list[int]:
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or count not in (None, len(numbers)):
        raise PatchlightError(f"{option} {text}: write {remedy}")
    return numbers


def _parse_settings(settings: list[str]) -> dict[str, Any]:
    """NAME=VALUE pairs of settings that a model has."""
    changes = _parse_values(settings)
    check_names_of_any(changes)
    return changes


def _parse_values(settings: list[str]) -> dict[str, Any]:
    """NAME=VALUE pairs; a value is JSON (4, 0.1, true, null, [224, 336]), or Python's True, False, None, or a word."""
    changes: dict[str, Any] = {}
    python = {"True": True, "False": False, "None": None}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise PatchlightError(f"--set {setting}: write NAME=VALUE, such as num_registers=4")
        try:
            changes[name] = json.loads(value)
        except ValueError:
            changes[name] = python.get(value, value)
    return changes


def main() -> None:
    """Run the command line; a user's mistake is one line on standard error and exit code 2."""
    try:
        sys.exit(app(prog_name="patchlight", standalone_mode=False))
    except PatchlightError as error:
        message = str(error)
    except Exception as error:
        # typer's usage errors, wherever its versions keep their class, know their own one-line message.
        if not hasattr(error, "format_message"):
            raise
        command = getattr(getattr(error, "ctx", None), "command_path", "patchlight")
        message = f"{error.format_message().rstrip('.?')}. Try '{command} --help'."
    typer.echo(f"patchlight: {' '.join(message.split())}", err=True)
    sys.exit(2)
