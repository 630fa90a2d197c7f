"""Folders of photos to folders of crops."""

import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchlight.errors import PatchlightError

if TYPE_CHECKING:
    from patchlight.batch.summary import Summary


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
    _print_summary(summary, out)
    if summary.exit_code:
        raise typer.Exit(summary.exit_code)


def _print_summary(summary: "Summary", out: Path) -> None:
    from patchlight.batch.rows import read_rows

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
        plural = "" if bursts == 1 else "s", "" if frames == 1 else "s"
        typer.echo(f"{bursts:,} burst{plural[0]}, {empty:,} of them empty; {frames:,} empty frame{plural[1]}")
        if untimed := summary.bursts["untimed"]:
            which = "1 frame has" if untimed == 1 else f"{untimed:,} frames have"
            typer.echo(f"{which} no valid time in EXIF or name: parted from the others, by the file's own time")
    if summary.failed:
        wrong = (row for row in read_rows(out / "results.jsonl") if row["status"] == "error")
        named = ", ".join(f"{row['path']!a} ({row['reason']})" for row in islice(wrong, 3))
        more = f" and {summary.failed - 3:,} more" if summary.failed > 3 else ""
        typer.echo(f"failed: {named}{more}; why is in {out / 'results.csv'}", err=True)
    if summary.report is not None:
        typer.echo(summary.report)
