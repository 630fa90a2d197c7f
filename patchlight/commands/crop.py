"""Folders of photos to folders of crops."""

import re
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchlight.commands.options import On, check_engine_alone, parse_share
from patchlight.errors import PatchlightError, and_more
from patchlight.files import printable

MOST_NAMES = 10
"""Of what photos show, that are printed."""

if TYPE_CHECKING:
    from patchlight.batch.summary import CropSummary
    from patchlight.deploy.engines import Engine


def crop(
    paths: Annotated[list[str], typer.Argument(metavar="PATH", help="Photos, folders of photos, or patterns.")],
    out: Annotated[
        str, typer.Option(metavar="DIR", help="The folder for crops, results and report; run again to resume.")
    ],
    model: Annotated[str, typer.Option(help="What `inspect` takes.")] = "default",
    method: Annotated[str, typer.Option(help="auto, subject, cls, rollout, lost, tokencut or features.")] = "auto",
    subjects: Annotated[str, typer.Option(metavar="N|all", help="The most subjects to crop from one photo.")] = "1",
    margin: Annotated[
        float, typer.Option(parser=parse_share, help="Margin around the box, as a share of its sides: 0.1, or 10%.")
    ] = 0.03,
    aspect: Annotated[str, typer.Option(help="free, or width:height such as 1:1 or 4:3.")] = "free",
    size: Annotated[
        str | None, typer.Option(metavar="N|WxH", help="Pixels: of the longer side at most, or 800x600 exactly.")
    ] = None,
    pad: Annotated[
        str | None,
        typer.Option(metavar="blur|edge|COLOUR", help="Keep the whole margin, with this where the photo ends."),
    ] = None,
    fill: Annotated[bool, typer.Option("--fill", help="Enlarge small subjects to fill --size WxH.")] = False,
    scale: Annotated[
        str, typer.Option(metavar="each|same", help="same: one scale for all crops of --size WxH, by the largest.")
    ] = "each",
    cutout: Annotated[bool, typer.Option("--cutout", help="Make what is not the subject transparent.")] = False,
    background: Annotated[
        str | None, typer.Option(metavar="COLOUR", help="Make what is not the subject white, #f0f0f0, ...")
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option(
            metavar="decision|group|label", help="A folder for each; with --boxes-only of links to the photos."
        ),
    ] = None,
    boxes: Annotated[
        str | None, typer.Option(metavar="JSON", help="Take the boxes of MegaDetector's file instead of the model's.")
    ] = None,
    keywords: Annotated[
        bool, typer.Option("--keywords", help="Write group and label into the crops, as XMP and IPTC keywords.")
    ] = False,
    prune: Annotated[bool, typer.Option("--prune", help="Remove the crops of photos that are gone.")] = False,
    min_area: Annotated[
        float, typer.Option(parser=parse_share, help="The smallest share of the photo that counts as a subject.")
    ] = 0.0,
    second_look: Annotated[
        bool, typer.Option("--second-look", help="Look a second time, closer, at what was found.")
    ] = False,
    tiles: Annotated[
        int | None,
        typer.Option(parser=int, help="Also look at square tiles, N along the shorter side, for small subjects."),
    ] = None,
    burst: Annotated[
        bool, typer.Option("--burst", help="Camera traps: compare each frame with other times of its camera.")
    ] = False,
    video: Annotated[
        float | None, typer.Option(parser=float, metavar="RATE", help="Also take videos, so many frames a second.")
    ] = None,
    empty_below: Annotated[
        float | None,
        typer.Option(
            parser=parse_share, help="Confidence below which a photo is called empty: 0.05; by default the model's own."
        ),
    ] = None,
    boxes_only: Annotated[bool, typer.Option("--boxes-only", help="Find subjects, but write no crops.")] = False,
    overlay: Annotated[bool, typer.Option("--overlay", help="Also draw heat and boxes over each photo.")] = False,
    no_report: Annotated[bool, typer.Option("--no-report", help="Write no report.html and no thumbnails.")] = False,
    no_thumbs: Annotated[bool, typer.Option("--no-thumbs", help="Write the report without pictures.")] = False,
    part: Annotated[
        str | None, typer.Option(metavar="3/64", help="A fixed share of the photos, the third of 64; see merge.")
    ] = None,
    on: On = None,
    lossless: Annotated[
        bool, typer.Option("--lossless", help="Cut JPEGs at block edges, without re-encoding.")
    ] = False,
    formats: Annotated[
        list[str] | None,
        typer.Option("--format", help="Also write json, csv, parquet, megadetector or coco; repeatable."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start over in a folder whose run has other settings.")
    ] = False,
    workers: Annotated[int, typer.Option(parser=int, help="Processes that read photos and write crops.")] = 2,
    batch: Annotated[int, typer.Option(parser=int, help="Photos in one batch on a GPU.")] = 32,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; by default a GPU if there is one.")] = None,
    engine: Annotated[
        str,
        typer.Option(
            metavar="auto|none|bfloat16|DIR",
            help="What computes: the fastest that gives the same, torch, OpenVINO in half the bits, or a folder that "
            "`export` wrote.",
        ),
    ] = "auto",
) -> None:
    """Find the subject of every photo and cut it out of the original: no labels, any number of photos."""
    if subjects != "all" and not (subjects.isascii() and subjects.isdecimal() and int(subjects) > 0):
        raise PatchlightError(f"--subjects {subjects}: give a number of 1 or more, or all")

    from patchlight.batch.runner import crop_photos
    from patchlight.batch.settings import ENGINES, CropRunSettings, CropSettings

    computing: str | Engine = model
    if exported := engine not in ENGINES:
        from patchlight.deploy.engines import load_engine

        check_engine_alone({"--model": model != "default"})
        computing = load_engine(engine)
    try:
        settings = CropSettings(
            method=method,
            subjects=None if subjects == "all" else int(subjects),
            margin=margin,
            aspect=aspect,
            size=int(size) if size is not None and size.isascii() and size.isdecimal() else size,
            pad=pad,
            fill=fill,
            scale=scale,  # type: ignore[arg-type]
            cutout=cutout,
            background=background,
            sort=sort,  # type: ignore[arg-type]
            keywords=keywords,
            boxes=boxes,
            min_area=min_area,
            second_look=second_look,
            tiles=tiles,
            engine="auto" if exported else engine,
            burst=burst,
            empty_below=empty_below,
            video=video,
            boxes_only=boxes_only,
            lossless=lossless,
        )
        how = CropRunSettings(
            device=device,
            workers=workers,
            batch_size=batch,
            overwrite=overwrite,
            formats=formats or (),
            overlay=overlay,
            report=not no_report,
            thumbs=not no_thumbs,
            part=part,
            on=on,
            prune=prune,
        )
        summary = crop_photos(paths, out, settings, how, model=computing)
    except PatchlightError as error:
        raise PatchlightError(with_flags(str(error))) from None
    print_summary(summary, Path(out))
    if summary.exit_code:
        raise typer.Exit(summary.exit_code)


_FLAGS = {
    name: f"--{name.replace('_', '-')}"
    for name in (
        *("out", "method", "subjects", "margin", "aspect", "size", "min_area", "second_look", "tiles", "burst"),
        *(
            "boxes_only",
            "lossless",
            "format",
            "workers",
            "device",
            "part",
            "on",
            "engine",
            "pad",
            "fill",
            "scale",
            "cutout",
        ),
        *("background", "sort", "boxes", "empty_below", "video"),
    )
} | {"batch_size": "--batch"}


def with_flags(message: str) -> str:
    """A message about settings in the words of the command line: --margin -1 for margin=-1, --burst for burst=True."""
    value = r"(\"[^\"]*\"|'[^']*'|[^\s,;:/]+)(?![^\s,;])"  # and not a path that begins alike

    def named(found: re.Match[str]) -> str:
        with_, name, begun, asked = found.groups()
        flag = _FLAGS[name]
        if name == "subjects":
            begun, asked = ("all" if each == "null" else each for each in (begun, asked))
        if begun in ("null", "false"):
            return f"without {flag}" + ("" if asked in (None, "true") else f", not with {asked}")
        said = flag if begun in ("True", "true") else f"{flag} {begun}"
        other = "without" if asked in ("null", "false") else asked
        return with_ + said + ("" if other is None else f", not {other}")

    return re.sub(rf"(^|with )({'|'.join(_FLAGS)})={value}(?:, not {value})?", named, message)


def print_summary(summary: "CropSummary", out: Path) -> None:
    from patchlight.batch.rows import read_rows

    found = ", ".join(f"{count:,} {decision}" for decision, count in summary.decisions.items() if count)
    failed = f"; {summary.failed:,} failed" if summary.failed else ""
    crops = "1 crop" if summary.crops == 1 else f"{summary.crops:,} crops"
    photos = "1 photo" if summary.photos == 1 else f"{summary.photos:,} photos"
    if summary.nothing_to_do:
        typer.echo("Up to date.")
    elif summary.changes is not None:
        counts = [f"{count:,} {each.replace('_', ' ')}" for each, count in summary.changes.items() if count]
        typer.echo(", ".join(counts))
    typer.echo(f"{photos}: {found or 'nothing'}{failed}; {crops} in {out}")
    if summary.cut_off:
        which = "1 photo ends" if summary.cut_off == 1 else f"{summary.cut_off:,} photos end"
        typer.echo(f"{which} within the subject (cut_off in the rows)")
    if summary.pruned:
        which = "1 crop was" if summary.pruned == 1 else f"{summary.pruned:,} crops were"
        typer.echo(f"{which} removed, as the photos are gone")
    if summary.encoded:
        crops = "1 crop was" if summary.encoded == 1 else f"{summary.encoded:,} crops were"
        typer.echo(f"{crops} re-encoded: jpegtran, which cuts without that, is not installed or failed")
    if named := summary.groups or summary.labels:
        shown = [f"{count:,} {printable(name)}" for name, count in named.items()]
        if rest := sum(list(named.values())[MOST_NAMES:]):
            shown[MOST_NAMES:] = [f"{rest:,} of {len(named) - MOST_NAMES:,} more"]
        if unnamed := sum(summary.decisions.values()) - summary.decisions["none"] - sum(named.values()):
            shown.append(f"{unnamed:,} without a name")
        typer.echo("shown: " + ", ".join(shown))
    if summary.skipped:
        count = sum(summary.skipped.values())
        kinds = [f"{ascii(each)[1:-1] or 'no ending'} {number:,}" for each, number in summary.skipped.items()]
        files, more = ("1 file" if count == 1 else f"{count:,} files"), ", ..." if len(kinds) > 5 else ""
        typer.echo(f"{files} skipped: not photos ({', '.join(kinds[:5])}{more})")
    if summary.crops_of_others:
        one = "1 crop kept, whose photo is not among these or cannot be reached"
        many = "crops kept, whose photos are not among these or cannot be reached"
        typer.echo(one if summary.crops_of_others == 1 else f"{summary.crops_of_others:,} {many}")
    if summary.bursts is not None:
        bursts, empty, frames = (summary.bursts[name] for name in ("count", "empty", "empty_frames"))
        plural = "" if bursts == 1 else "s", "" if frames == 1 else "s"
        typer.echo(f"{bursts:,} burst{plural[0]}, {empty:,} of them empty; {frames:,} empty frame{plural[1]}")
        clocks = {"EXIF": summary.bursts["by_exif"], "name": summary.bursts["by_name"]}
        if said := [f"{count:,} by {clock}" for clock, count in clocks.items() if count]:
            typer.echo(f"times: {', '.join(said)}")
        if untimed := summary.bursts["untimed"]:
            which = "1 frame has" if untimed == 1 else f"{untimed:,} frames have"
            typer.echo(
                f"{which} no valid time in EXIF or name: grouped apart from the others, by the file's modification time"
            )
    if summary.failed:
        wrong = (row for row in read_rows(out / "results.jsonl") if row["status"] == "error")
        bad = ", ".join(f"{row['path']!a} ({row['reason']})" for row in islice(wrong, 3))
        typer.echo(f"failed: {bad}{and_more(summary.failed, 3)}; the reasons are in {out / 'results.csv'}", err=True)
    if summary.report is not None:
        typer.echo(summary.report)
