"""Photos: what they show, what a model did with one, and the page to look at them."""

import json
from pathlib import Path
from typing import Annotated

import typer

from patchlight.commands.crop import with_flags
from patchlight.commands.embed import print_table_summary
from patchlight.commands.options import (
    AsJson,
    Device,
    EngineFolder,
    Like,
    On,
    Overwrite,
    Part,
    Settings,
    Weights,
    Workers,
    check_engine_alone,
    parse_numbers,
    parse_settings,
    parse_size,
)
from patchlight.errors import PatchlightError
from patchlight.reporting import Progress, on_terminal


def classify(
    photos: Annotated[list[str], typer.Argument(metavar="PHOTO", help="Photos, folders of photos, or patterns.")],
    model: Annotated[str, typer.Option(help="What `inspect` takes.")] = "default",
    top: Annotated[int, typer.Option(min=1, help="How many classes to name.")] = 5,
    out: Annotated[
        Path | None,
        typer.Option(metavar="TABLE", help="A .parquet, .csv, .jsonl, ... to write instead; run again to resume."),
    ] = None,
    part: Part = None,
    on: On = None,
    overwrite: Overwrite = False,
    workers: Workers = 2,
    settings: Settings = None,
    weights: Weights = None,
    like: Like = None,
    device: Device = None,
    engine: EngineFolder = None,
    as_json: AsJson = False,
) -> None:
    """What photos show, by a checkpoint with a head: group and name, where they are sure, and the likeliest classes."""
    changes = parse_settings(settings or [])
    if out is None and (part is not None or on is not None or overwrite):
        raise PatchlightError("--part, --on and --overwrite are of tables; name one with --out")

    from patchlight.batch.inputs import find_photos, stands_for_several
    from patchlight.classification import classify as classify_photo
    from patchlight.devices import resolve_device
    from patchlight.images.decode import ImageError
    from patchlight.weights.load import load, load_or_given

    if engine is None:
        here = resolve_device(device) if on is None else "cpu"
        loaded = load(model, weights=weights, like=like, device=here, **changes)
    else:
        from patchlight.deploy.engines import load_engine

        check_engine_alone({"--model": model != "default", "--set": changes, "--weights": weights, "--like": like})
        loaded = load_or_given(load_engine(engine), device)
    if out is not None:
        from patchlight.batch.readers import ClassifySettings
        from patchlight.batch.settings import CropRunSettings
        from patchlight.batch.table_run import classify_photos

        try:
            there = None if on is None else device
            how = CropRunSettings(device=there, part=part, on=on, overwrite=overwrite, workers=workers)
            summary = classify_photos(photos, out, ClassifySettings(top=top), how, model=loaded)
        except PatchlightError as error:
            raise PatchlightError(with_flags(str(error))) from None
        print_table_summary(summary)
        if summary.exit_code:
            raise typer.Exit(summary.exit_code)
        return
    failed = 0
    if any(map(stands_for_several, photos)):
        photos = [photo.path for photo in find_photos(photos).photos]
    for photo in photos:
        try:
            prediction = classify_photo(photo, loaded, top)
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
            typer.echo(f"{photo}: {prediction.words()}")
    if failed:
        raise typer.Exit(3)


def look(
    photo: Annotated[str, typer.Argument(metavar="PHOTO", help="An image file.")],
    model: Annotated[str, typer.Option(help="What `inspect` takes.")] = "default",
    layers: Annotated[str, typer.Option(help="Blocks to sweep over: all, -1, or 0,3,11.")] = "all",
    patch: Annotated[str | None, typer.Option(metavar="ROW,COL", help="The patch to follow, counted from 0.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder to write; by default look-PHOTO or look-PHOTO-MODEL.")
    ] = None,
    image_size: Annotated[str | None, typer.Option(help="Pixels: 224, or 224x336 (height x width).")] = None,
    settings: Settings = None,
    weights: Weights = None,
    like: Like = None,
    device: Device = None,
) -> None:
    """One page with pictures of what a model did with a photo: its attention, features and positions."""
    changes = parse_settings(settings or [])
    if image_size is not None:
        changes["image_size"] = parse_size(image_size)
    blocks = None if layers == "all" else parse_numbers("--layers", layers, "all, -1, or blocks such as 0,3,11")
    place = None if patch is None else parse_numbers("--patch", patch, "a row and a column, such as 3,5", count=2)

    from patchlight.devices import resolve_device
    from patchlight.looking.look import look as look_at
    from patchlight.weights.load import load

    with on_terminal() as reporter:
        reporter.progress(Progress(what=f"loading {model}"))
        loaded = load(model, weights=weights, like=like, device=resolve_device(device), **changes)
        folder = Path(f"look-{Path(photo).stem}{_by(model)}") if out is None else out
        look_at(
            photo,
            loaded,
            layers="all" if blocks is None else blocks,
            patch=None if place is None else (place[0], place[1]),
            out=folder,
            reporter=reporter,
        )
    typer.echo(folder / "index.html")


def _by(model: str) -> str:
    """What tells the page of one model from that of another."""
    if model == "default":
        return ""
    place = Path(model)
    if not place.exists():
        return f"-{place.name}"
    place = place.resolve()
    return f"-{place.parent.name}-{place.stem}" if place.is_file() else f"-{place.name}"


def review(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder that `crop` wrote.")],
    model: Annotated[str | None, typer.Option(help="Where the run's model, or its --engine, lies now.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any that is free.")] = 8000,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = True,
) -> None:
    """A local page to correct what `crop` found: drag boxes, set decisions and labels by keys."""
    try:
        from patchlight.serve.running import Address
        from patchlight.serve.running import review as review_page
    except ModuleNotFoundError as error:
        raise PatchlightError(f"the page needs {error.name}; pip install 'patchlight[serve]'") from None
    review_page(folder, Address(port=port), model=model, open_page=open_page, tell=typer.echo)


def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(help="A model, as for `inspect`; repeat it to compare models. [default: default]"),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any that is free.")] = 8000,
    host: Annotated[str, typer.Option(help="The address to listen on; any but this machine's needs the next two.")] = (
        "127.0.0.1"
    ),
    allow_remote: Annotated[bool, typer.Option("--allow-remote", help="Let in other machines that know the token.")] = (
        False
    ),
    token: Annotated[
        str | None,
        typer.Option(envvar="PATCHLIGHT_TOKEN", help="Token for the API; by default a new one at each start."),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(help="With --allow-remote: a name by which others call this machine; repeatable."),
    ] = None,
    device: Device = None,
    engine: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="The exported form of a --model, to answer in its stead; repeatable."),
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, max=64, help="Processes that answer; with more than one the API without the page.")
    ] = 1,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = True,
) -> None:
    """A local page: drop a photo, see what the model sees, take the crop."""
    try:
        from patchlight.devices import resolve_device
        from patchlight.serve.running import Address, serve_by_workers
        from patchlight.serve.running import serve as serve_page
    except ModuleNotFoundError as error:
        raise PatchlightError(f"the page needs {error.name}; pip install 'patchlight[serve]'") from None
    address = Address(host=host, port=port, remote=allow_remote, token=token, names=tuple(name or ()))
    models, exported, on = model or ["default"], engine or (), str(resolve_device(device))
    if workers > 1:
        serve_by_workers(workers, models, address, exported=exported, device=on, tell=typer.echo)
    else:
        serve_page(models, address, exported=exported, device=on, open_page=open_page, tell=typer.echo)
