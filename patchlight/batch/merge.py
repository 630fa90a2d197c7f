"""The parts of a run joined, as if one machine had done it all: the same rows, crops, table and report."""

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from patchlight.batch.inputs import CORRECTIONS, Input, Inputs
from patchlight.batch.overlay import overlay_name
from patchlight.batch.overrides import correction_lines
from patchlight.batch.parts import joined
from patchlight.batch.pipeline import CropRun, Stage
from patchlight.batch.pool import Pool
from patchlight.batch.readers import about_table
from patchlight.batch.report import thumbnail_name
from patchlight.batch.results import MODEL_SOURCE, Entry, Journal, ResultFolder, read_json
from patchlight.batch.settings import CropRunSettings, CropSettings
from patchlight.batch.summary import CropSummary, finish
from patchlight.batch.table_run import TableFolder, TableJournal, TableSummary, finish_table
from patchlight.batch.tables import Layout, kind_of
from patchlight.errors import PatchlightError
from patchlight.files import printable, replacing, writing
from patchlight.localizing.detector import Detector
from patchlight.reporting import Reporter, on_terminal
from patchlight.signals import asked_to_stop
from patchlight.weights.load import load

Folder = TypeVar("Folder", bound=ResultFolder)
Step = TypeVar("Step")


def merge(
    parts: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    model: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    reporter: Reporter | None = None,
) -> CropSummary | TableSummary:
    """Join what `crop`, `embed` or `classify` made of all parts (`--part 1/3` and so on) into `out`, which looks as if
    one machine had done it, and which the same command without a part goes on with. The parts stay as they are.

    `model` is where the model lies, if it was moved since; tables need none.
    """
    paths = [Path(part) for part in parts]
    if not paths:
        raise PatchlightError("no parts were given; name the folders or tables that runs with --part made")
    for path in paths:
        if os.path.realpath(path) == os.path.realpath(out):
            raise PatchlightError(f"out={os.fspath(out)!r} is one of the parts; name another folder or table")
    with on_terminal() if reporter is None else contextlib.nullcontext(reporter) as heard:
        if all(path.name and TableFolder(path).is_begun for path in paths):
            return _merge_tables([TableFolder(path) for path in paths], Path(out), overwrite=overwrite)
        return _merge_crops([ResultFolder(path) for path in paths], Path(out), model, heard, overwrite=overwrite)


def _read(folders: Sequence[Folder], names: Sequence[Path]) -> tuple[Inputs, list[int], dict[str, Any]]:
    """All photos, which of the folders each is in, and what the rows of all were made with."""
    notes = []
    for folder, name in zip(folders, names, strict=True):
        if not folder.is_begun:
            raise PatchlightError(f"{name}: holds no run of crop, embed or classify; name what these wrote")
        note = read_json(folder.part)
        if note is None:
            raise PatchlightError(f"{name}: is a whole run, and not a part of one (it was made without --part)")
        if read_json(folder.finished) is None:
            raise PatchlightError(f"{name}: has not finished; run its command again, and then join the parts")
        notes.append((str(name), note))
    first = folders[0].made_with
    for folder, name in zip(folders[1:], names[1:], strict=True):
        other = folder.made_with
        for key in sorted({*first, *other} - {"part", MODEL_SOURCE}):
            if first.get(key) != other.get(key):
                raise PatchlightError(
                    f"{name}: was made with {key}={other.get(key)!r:.60}, and {names[0]} with {first.get(key)!r:.60}; "
                    "join parts of one command"
                )
    try:
        inputs, where = joined(notes)
    except PatchlightError:
        raise
    except (LookupError, TypeError, ValueError):  # no note of ours
        damaged = f"{folders[0].part.name} of one of these parts is damaged"
        raise PatchlightError(f"{names[0]}: {damaged}; run the parts' commands again, --overwrite") from None
    return inputs, where, first | {"part": None}


def _joined_journal(
    inputs: Inputs, where: Sequence[int], journals: Sequence[Journal]
) -> Iterator[tuple[Input, int, Entry, dict[str, Any]]]:
    """Every photo with its place, which part it is in, and what that says of it."""
    for photo, index in zip(inputs.photos, where, strict=True):
        entry = journals[index].entries.get(photo.file)
        if entry is None:
            said = f"has lost the row of {printable(photo.path)}"
            raise PatchlightError(
                f"{journals[index].path}: {said}; run this part's command again, and then join the parts"
            )
        yield replace(photo, place=entry.place), index, entry, journals[index].row(photo)


def _merge_crops(
    folders: Sequence[ResultFolder],
    out: Path,
    model: str | os.PathLike[str] | None,
    reporter: Reporter,
    *,
    overwrite: bool,
) -> CropSummary:
    inputs, where, made_with = _read(folders, [folder.path for folder in folders])
    try:
        settings, source, fingerprint = CropSettings.of_run(made_with), made_with[MODEL_SOURCE], made_with["model"]
    except KeyError:
        raise PatchlightError(
            f"{folders[0].path}: was written by another version of this program; run `patchlight crop` anew"
        ) from None
    loaded = load(os.fspath(model or source))
    if loaded.provenance.sha256 != fingerprint:
        raise PatchlightError(
            f"{loaded.provenance.source}: is another model than the parts were made with ({source}); "
            "name that one with --model"
        )
    summaries = [read_json(folder.summary) or {} for folder in folders]
    how = CropRunSettings(
        workers=0,
        formats=sorted({name for summary in summaries for name in summary.get("exports", ())}),
        report=any((folder.path / "report.html").exists() for folder in folders),
        thumbs=any(folder.thumbs.exists() for folder in folders),
        overlay=any(folder.overlays.exists() for folder in folders),
    )
    folder = ResultFolder(out)
    with folder.held(), asked_to_stop() as asked, Pool(0) as pool, contextlib.ExitStack() as stack:
        folder.check(made_with, overwrite=overwrite)
        journal = folder.begin(made_with, overwrite=overwrite)
        journals = [each.open_journal() for each in folders]
        for each in (journal, *journals):
            stack.callback(each.close)
        folder.note_named(inputs.named)
        if (given := read_json(folders[0].given)) is not None:  # by which corrections of the whole are followed
            folder.write_json(folder.given, given)
        detector = Detector.of(loaded, settings.method, settings.detector_options)
        run = CropRun(folder, journal, inputs, settings, how, detector, pool, asked, reporter)
        photos, added = [], 0
        rows = _joined_journal(inputs, where, journals)
        for photo, index, entry, row in run.each(rows, len(where), "row"):
            photos.append(photo)
            before = journal.entries.get(photo.file)
            said = journals[index].noted(entry)
            if (
                before is not None
                and before.stamp == entry.stamp
                and journal.row(photo) == row
                and journal.noted(before) == said
                and folder.has_crops(before)
            ):
                continue
            for name in entry.crops:
                _link(folders[index].path / name, folder.path / name)
            own = folders[index]
            for source, target, name in (
                (own.thumbs, folder.thumbs, thumbnail_name(photo.place)),
                (own.overlays, folder.overlays, overlay_name(photo.place)),
            ):
                if (source / name).exists():
                    _link(source / name, target / name)
            journal.append(photo, entry.stamp, row, sizes=folder.sizes(row["crops"]), **said)
            added += 1
        journal.sync()
        _join_corrections(folders, folder)
        return finish(replace(run, inputs=replace(inputs, photos=tuple(photos))), made_with, added, 0.0)


def _join_corrections(parts: Sequence[ResultFolder], folder: ResultFolder) -> None:
    """Add what people said of the parts' photos to what was said of them in the whole, which counts more."""
    target = folder.path / CORRECTIONS
    said = _lines_by_photo(target)
    for part in parts:
        for file, lines in _lines_by_photo(part.path / CORRECTIONS).items():
            known = said.get(file, [])
            if lines[: len(known)] == known:
                said[file] = lines
    if said:
        folder.replace(target, b"".join(line + b"\n" for lines in said.values() for line in lines))


def _lines_by_photo(path: Path) -> dict[str, list[bytes]]:
    """The corrections of each photo, in their order."""
    said: dict[str, list[bytes]] = {}
    for line, file, _ in correction_lines(path):
        said.setdefault(file, []).append(line)
    return said


def _link(source: Path, target: Path) -> None:
    """The same file under another name, or a copy where the disk is another."""
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target, durable=False) as temporary:
            try:
                os.link(source, temporary)
            except FileNotFoundError:
                raise PatchlightError(f"{source}: is gone; run the command of its part again, and then join") from None
            except OSError:
                shutil.copy2(source, temporary)


def _merge_tables(folders: Sequence[TableFolder], out: Path, *, overwrite: bool) -> TableSummary:
    inputs, where, made_with = _read(folders, [folder.target for folder in folders])
    about = about_table(made_with.get("features"), made_with[MODEL_SOURCE], made_with["model"])
    shape = made_with["shape"]
    dtype = made_with.get("dtype", "float32")
    layout = Layout(made_with["columns"], None if shape is None else tuple(shape), dtype, about)
    kind_of(out, arrays=shape is not None)
    folder = TableFolder(out)
    with folder.held(), asked_to_stop(), contextlib.ExitStack() as stack:
        journal = folder.started(made_with, layout, overwrite=overwrite)
        stack.callback(journal.close)
        stack.callback(folder.values.close)
        folder.note_named(inputs.named)
        journals: list[TableJournal] = []
        for each in folders:
            own = each.open_journal()
            assert isinstance(own, TableJournal)
            journals.append(own)
            stack.callback(own.close)
            each.open_values(layout)
            stack.callback(each.values.close)
        added = 0
        for photo, index, entry, row in _joined_journal(inputs, where, journals):
            before = journal.entries.get(photo.file)
            if (
                before is not None
                and before.stamp == entry.stamp
                and (journal.at[photo.file] or 0) < folder.values.count
            ):
                continue
            at = row["at"]
            row["at"] = None if at is None else folder.values.append(folders[index].values[at])
            journal.append(photo, entry.stamp, row)
            added += 1
        folder.values.sync()
        journal.sync()

        def each_of(photos: Iterable[Input], count: int, stage: Stage) -> Iterator[Input]:
            yield from photos

        return finish_table(folder, journal, inputs, layout, each_of, added, 0.0)
