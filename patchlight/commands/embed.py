"""Folders of photos to tables of features, and what is asked of these."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from patchlight.commands.crop import print_summary, with_flags
from patchlight.commands.options import AsJson, Batch, Device, Fast, On, Overwrite, Part, Workers, parse_share
from patchlight.errors import PatchlightError
from patchlight.files import printable

if TYPE_CHECKING:
    from patchlight.batch.table_run import TableSummary


def embed(
    paths: Annotated[list[str], typer.Argument(metavar="PATH", help="Photos, folders of photos, or patterns.")],
    out: Annotated[
        Path, typer.Option(metavar="TABLE", help="A .parquet, .npz, .zarr or .lance to write; run again to resume.")
    ],
    model: Annotated[str, typer.Option(help="What `inspect` takes.")] = "default",
    features: Annotated[
        Literal["pooled", "cls", "dense"], typer.Option(help="One vector a photo, the class token, or every patch.")
    ] = "pooled",
    dtype: Annotated[Literal["float32", "float16"], typer.Option(help="Of the numbers.")] = "float32",
    fast_decode: Fast = False,
    index: Annotated[bool, typer.Option("--index", help="Also write an index of nearest neighbours.")] = False,
    part: Part = None,
    on: On = None,
    overwrite: Overwrite = False,
    workers: Workers = 2,
    batch: Batch = 32,
    device: Device = None,
) -> None:
    """Features of any number of photos, into a table with a row a photo."""
    if index and features == "dense":
        raise PatchlightError("--index needs a vector a photo, not --features dense; leave one of them out")

    from patchlight.batch.neighbours import faiss, write_index
    from patchlight.batch.readers import EmbedSettings
    from patchlight.batch.settings import CropRunSettings
    from patchlight.batch.table_run import embed_photos

    try:
        settings = EmbedSettings(features=features, dtype=dtype, fast_decode=fast_decode)
        how = CropRunSettings(device=device, workers=workers, batch_size=batch, overwrite=overwrite, part=part, on=on)
        if index:
            faiss()
        summary = embed_photos(paths, out, settings, how, model=model)
    except PatchlightError as error:
        raise PatchlightError(with_flags(str(error))) from None
    print_table_summary(summary)
    if index and summary.failed < summary.photos:
        typer.echo(write_index(out))
    if summary.exit_code:
        raise typer.Exit(summary.exit_code)


def print_table_summary(summary: "TableSummary") -> None:
    photos = "1 photo" if summary.photos == 1 else f"{summary.photos:,} photos"
    if summary.nothing_to_do:
        typer.echo("Up to date.")
    failed = f"; {summary.failed:,} failed" if summary.failed else ""
    rate = f", {summary.rate:.1f} a second" if summary.rate else ""
    typer.echo(f"{photos}{failed}{rate}")
    if summary.skipped:
        count = sum(summary.skipped.values())
        typer.echo(f"{'1 file' if count == 1 else f'{count:,} files'} skipped: not photos")
    if summary.left_out:
        which = (
            "1 photo of earlier runs is"
            if summary.left_out == 1
            else f"{summary.left_out:,} photos of earlier runs are"
        )
        typer.echo(f"{which} not among these: no longer in the table")
    if summary.reasons:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in summary.reasons.items())
        typer.echo(f"failed: {reasons}; the rows of {summary.table} say why", err=True)
    typer.echo(summary.table)


Table = Annotated[Path, typer.Option("--in", metavar="TABLE", help="What `embed` wrote.")]


def similar(
    query: Annotated[str, typer.Argument(metavar="PHOTO", help="A photo, in the table or not.")],
    table: Table,
    count: Annotated[int, typer.Option(min=1, max=1000, help="How many photos to name.")] = 12,
    model: Annotated[str | None, typer.Option(help="Where the table's model lies, if it was moved.")] = None,
    sheet: Annotated[
        Path | None, typer.Option(metavar="JPG", help="The picture to write; by default similar-PHOTO.jpg.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The photos of a table that are most like one, with a contact sheet to look at."""
    from patchlight.batch.neighbours import similar as similar_photos
    from patchlight.batch.neighbours import write_sheet

    target = Path(f"similar-{Path(query).stem}.jpg") if sheet is None else sheet
    found = similar_photos(query, table, count, model=model)
    shown = [(query, "asked about")] + [(each.path, f"{each.likeness:.3f}  {Path(each.path).name}") for each in found]
    write_sheet(target, shown)
    for each in found:
        typer.echo(
            json.dumps({"path": each.path, "likeness": round(each.likeness, 6)})
            if as_json
            else f"{each.likeness:.3f}  {printable(each.path)}"
        )
    if not as_json:
        typer.echo(target)


def dedupe(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="What `embed` wrote.")],
    least: Annotated[
        float | None, typer.Option(parser=parse_share, help="How alike near-duplicates are, 0 to 1. [default: 0.92]")
    ] = None,
    sheet: Annotated[
        Path | None, typer.Option(metavar="JPG", help="Also write a picture with a row for each of the first groups.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Near-duplicates among the photos of a table: groups, the first of each to keep. Nothing is removed."""
    from patchlight.batch.neighbours import ALIKE, Neighbours, write_sheet

    wanted = ALIKE if least is None else least
    if not 0 < wanted <= 1:
        raise PatchlightError(f"--least {wanted}: give a number from 0 to 1, such as {ALIKE}")
    known = Neighbours.of(table)
    groups = [[known.features.paths[row] for row in group] for group in known.duplicates(wanted)]
    for group in groups:
        if as_json:
            typer.echo(json.dumps(group))
        else:
            typer.echo("\n  ".join(printable(path) for path in group))
    if sheet is not None and groups:
        columns = min(6, max(map(len, groups)))
        tiles = []
        for group in groups[:30]:
            own = [(path, Path(path).name) for path in group[:columns]]
            tiles += own + [("", "")] * (columns - len(own))
        write_sheet(sheet, tiles, columns)
    if not as_json:
        spare = sum(map(len, groups)) - len(groups)
        typer.echo(
            f"{len(groups):,} groups of near-duplicates; {spare:,} of {len(known.features.paths):,} photos to spare"
        )


def merge(
    parts: Annotated[list[str], typer.Argument(metavar="OUT", help="What runs with --part 1/3, 2/3, ... wrote.")],
    out: Annotated[Path, typer.Option(metavar="ALL", help="The folder, or the table, to write.")],
    model: Annotated[str | None, typer.Option(help="Where the model lies, if it was moved.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Join the parts of a run of crop, embed or classify, as if one machine had done it all."""
    from patchlight.batch.merge import merge as merge_parts
    from patchlight.batch.summary import CropSummary

    try:
        summary = merge_parts(parts, out, model=model, overwrite=overwrite)
    except PatchlightError as error:
        raise PatchlightError(with_flags(str(error))) from None
    if isinstance(summary, CropSummary):
        print_summary(summary, out)
    else:
        print_table_summary(summary)
    if summary.exit_code:
        raise typer.Exit(summary.exit_code)
