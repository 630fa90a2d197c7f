"""Models for other engines: `export`, `bench`."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from patchlight.commands.options import AsJson, Settings, parse_settings, parse_size
from patchlight.errors import PatchlightError
from patchlight.reporting import on_terminal


def export(
    model: Annotated[str, typer.Argument(help="What `inspect` takes.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    to: Annotated[
        Literal["onnx", "openvino", "torch", "safetensors", "triton"], typer.Option(help="What is to run it.")
    ] = "onnx",
    int8: Annotated[bool, typer.Option("--int8", help="Whole numbers of 8 bits, ranges learnt from --photos.")] = False,
    fp16: Annotated[bool, typer.Option("--fp16", help="Floats of 16 bits.")] = False,
    bf16: Annotated[bool, typer.Option("--bf16", help="Floats of 16 bits with the range of 32.")] = False,
    size: Annotated[
        str, typer.Option(help="Pixels of its images: dynamic, 224, or 224x336 (height x width).")
    ] = "dynamic",
    outputs: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Of logits, features, dense, attention, subject.")
    ] = None,
    with_preprocess: Annotated[
        bool, typer.Option("--with-preprocess", help="Take a photo of any size, as bytes, and prepare it, too.")
    ] = False,
    photos: Annotated[
        list[str] | None, typer.Option(help="Photos or folders to learn ranges from and prove with; repeatable.")
    ] = None,
    settings: Settings = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the folder if it is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a model for another engine, with the proof that it gives the same there."""
    chosen = [name for name, asked in (("int8", int8), ("float16", fp16), ("bfloat16", bf16)) if asked]
    if len(chosen) > 1:
        raise PatchlightError("--int8, --fp16 and --bf16 exclude one another; take one")
    fixed = None if size == "dynamic" else parse_size(size)
    changes = parse_settings(settings or [])

    from patchlight.deploy.export import export as export_model
    from patchlight.weights.load import load

    exported = export_model(
        load(model, **changes),
        out,
        to=to,
        precision=chosen[0] if chosen else "float32",  # type: ignore[arg-type]
        size=fixed,
        outputs=tuple(each.strip() for each in outputs.split(",")) if outputs else (),
        with_preprocess=with_preprocess,
        photos=_photos(photos),
        overwrite=overwrite,
    )
    if as_json:
        typer.echo(json.dumps(exported.proof.to_dict()))
        return
    for line in exported.proof.lines():
        typer.echo(line)
    typer.echo(exported.folder)


def bench(
    target: Annotated[str, typer.Argument(help="A model, or the folder of an exported one.")],
    photos: Annotated[
        list[str] | None, typer.Argument(help="Photos or folders; by default those in the package.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images in a forward pass.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="How often each engine is timed.")] = 15,
    as_json: AsJson = False,
) -> None:
    """How fast a model runs here, by every engine that is installed."""
    from patchlight.commands.tables import print_rows
    from patchlight.deploy.bench import bench as time_engines

    with on_terminal() as heard:
        preparing, timings = time_engines(target, _photos(photos), batch=batch, rounds=rounds, reporter=heard)
    if as_json:
        found = [vars(each) for each in timings]
        typer.echo(json.dumps({"prepare_seconds": preparing, "engines": found}))
        return
    rows = []
    for each in timings:
        if each.seconds is None:
            rows.append((each.engine, each.precision, "-", "-", each.said))
        else:
            rate = f"{each.batch / each.seconds:.1f}"
            rows.append((each.engine, each.precision, f"{1000 * each.seconds:.1f}", rate, ""))
    print_rows(rows, ("engine", "precision", f"ms for {batch}", "images/s", ""))
    typer.echo(f"Preparing a photo takes {1000 * preparing:.1f} ms beside that.")


def _photos(named: list[str] | None) -> tuple[str, ...]:
    """The photos that are named, and those in the folders that are."""
    from patchlight.batch.inputs import find_photos

    return tuple(photo.path for photo in find_photos(named).photos) if named else ()
