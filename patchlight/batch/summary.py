"""What a run came to: the files that are written when all photos have their rows."""

import hashlib
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from patchlight.batch.formats import Format, export, file_of
from patchlight.batch.inputs import Input
from patchlight.batch.overlay import draw_overlay, overlay_mark, overlay_name
from patchlight.batch.pipeline import CropRun, sorted_into
from patchlight.batch.report import mark_of, thumbnail_name, write_report
from patchlight.batch.results import digest, links_in, read_json, remove_empty, set_links, size_of
from patchlight.batch.rows import Row
from patchlight.batch.work import make_thumbnail, result_of, stamp_of
from patchlight.files import writing
from patchlight.images.containers import is_elsewhere
from patchlight.weights.load import Loaded


@dataclass(frozen=True, slots=True)
class CropSummary:
    """What a run came to."""

    folder: Path
    photos: int
    """All that have rows."""
    computed: int
    """By this call; the others were there."""
    failed: int
    """Photos that could not be used; their rows say why."""
    decisions: dict[str, int] = field(default_factory=dict)
    """How many photos got which decision."""
    reasons: dict[str, int] = field(default_factory=dict)
    """How many photos failed for which reason."""
    crops: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    """Files in the folders that are no photos, by their endings, see `Inputs`."""
    crops_of_others: int = 0
    """Crops of earlier runs, still there, whose photos are no longer among the inputs or cannot be reached."""
    subjects: int = 0
    """In all photos; of `several` more than were cut, unless all were asked for."""
    cut_off: int = 0
    """Photos whose subject goes on where the photo ends, as far as its box says so."""
    changes: dict[str, int] | None = None
    """Where there was a run before: how many photos are `new`, `changed`, `gone` and `as_before`."""
    pruned: int = 0
    """Crops of photos that are gone, which this call has removed."""
    encoded: int | None = None
    """Of a lossless run: crops of JPEGs that were encoded anew all the same."""
    bursts: dict[str, int] | None = None
    """Of camera traps: how many bursts there are, how many of them are `empty`, how many `empty_frames`, and how many
    frames have their time `by_exif`, `by_name`, or are `untimed`: neither has one that can be, and the file's own was
    taken."""
    groups: dict[str, int] | None = None
    """How many photos with a find show what, by a model whose classes have groups; "unknown" are those of none."""
    labels: dict[str, int] | None = None
    """The same by a model whose classes have names alone, the commonest first; photos of no name are left out."""
    seconds: float = 0.0
    rate: float = 0.0
    """Photos a second, of those that were computed."""
    report: Path | None = None
    exports: tuple[Path, ...] = ()
    """The files of `formats`."""
    nothing_to_do: bool = False
    """All of it was there, and nothing was written."""

    @property
    def exit_code(self) -> int:
        """Of the command line: 3 where photos failed."""
        return 3 if self.failed else 0


def _summary(run: CropRun, values: dict[str, Any], **more: Any) -> CropSummary:
    """By what summary.json holds."""
    names = (
        "photos",
        "decisions",
        "reasons",
        "crops",
        "subjects",
        "cut_off",
        "skipped",
        "crops_of_others",
        "encoded",
        "bursts",
        "groups",
        "labels",
    )
    counts: dict[str, Any] = {name: values[name] for name in names if name in values}
    return CropSummary(
        folder=run.folder.path,
        failed=values["status"]["error"],
        **counts,
        report=run.folder.path / "report.html" if run.how.report else None,
        exports=tuple(run.folder.path / file_of(each) for each in run.how.formats),
        **more,
    )


def earlier_summary(run: CropRun) -> CropSummary | None:
    """The summary of a run that has written everything that is wanted; None if something is to be written.

    What was changed or lost since is to be written again: files are known by their stamps, pictures by their sizes.
    """
    try:
        return _earlier_summary(run)
    except (LookupError, TypeError, AttributeError):  # notes that somebody has changed are written again, too
        return None


def _earlier_summary(run: CropRun) -> CropSummary | None:
    folder, photos = run.folder, run.inputs.photos
    summary = read_json(folder.summary)
    finished = read_json(folder.finished)
    if summary is None or finished is None or finished.get("inputs_sha256") != digest(photos, run.journal):
        return None
    stamps = finished.get("files", {})
    if not isinstance(stamps, dict) or not {*_files(run, run.how.formats)} <= stamps.keys():
        return None
    if any(stamps[name] != _stamp(folder.path / name) for name in stamps):
        return None
    if (
        run.how.report
        and run.how.thumbs
        and finished.get("thumbs") != _sizes_sha256(folder.thumbs, photos, thumbnail_name)
    ):
        return None
    if finished.get("links", 0) != len(links_in(folder.sorted)):
        return None
    if run.how.overlay and finished.get("overlays") != _sizes_sha256(folder.overlays, photos, overlay_name):
        return None
    left = {"skipped": run.inputs.skipped, "crops_of_others": folder.crops_of_others(photos, run.journal)}
    if any(summary.get(name) != value for name, value in left.items()):
        return None
    return _summary(run, summary, computed=0, nothing_to_do=True)


def finish(run: CropRun, made_with: Mapping[str, Any], computed: int, seconds: float) -> CropSummary:
    """Write everything that is said of the rows; `computed` of them took so many `seconds`."""
    folder, journal, photos, detector = run.folder, run.journal, run.inputs.photos, run.detector
    loaded = detector.loaded

    def rows() -> Iterator[Row]:
        return run.each((journal.row(photo) for photo in photos), len(photos), "row")

    counts = _Counts()
    folder.write_rows(map(counts.add, rows()), bursts=run.settings.burst, videos=run.settings.video is not None)
    # What an earlier call wrote is kept up to date; results.csv is, anyway.
    kept = {each for each in get_args(Format) if each != "csv" and (folder.path / file_of(each)).exists()}
    formats = [each for each in get_args(Format) if each in {*run.how.formats, *kept}]
    for each in formats:
        export(
            folder.path,
            each,
            rows,
            base=run.inputs.base,
            detector=loaded.provenance.source,
            calibration=detector.calibration,
        )
    if run.how.report:
        thumbs = _draw_thumbnails(run) if run.how.thumbs else set()
        names = [thumbnail_name(photo.place) for photo in photos]
        write_report(folder.path, rows(), [name if name in thumbs else "" for name in names])
    _draw_overlays(run, rows)
    links = _link_photos(run, rows)
    if run.settings.sort is not None:
        remove_empty(folder.crops)
    failed = sum(counts.reasons.values())
    rate = computed / seconds if computed and seconds > 0 else 0.0
    values = {
        "version": 1,
        "photos": len(photos),
        "status": {"ok": len(photos) - failed, "error": failed},
        "decisions": dict(counts.decisions),
        "reasons": dict(sorted(counts.reasons.items())),
        "crops": counts.crops,
        "subjects": counts.subjects,
        "cut_off": counts.cut_off,
        "crops_of_others": folder.crops_of_others(photos, journal),
        "skipped": run.inputs.skipped,
        **({"encoded": sum(journal.entries[photo.file].encoded for photo in photos)} if run.settings.lossless else {}),
        **({"bursts": counts.of_bursts()} if run.settings.burst else {}),
        **counts.of_names(loaded),
        "calibrated": detector.is_calibrated,
        "settings": {name: value for name, value in made_with.items() if not name.startswith("model")},
        "model": {
            "source": loaded.provenance.source,
            "origin": loaded.provenance.origin,
            "sha256": loaded.provenance.sha256,
            "licence": loaded.provenance.licence,
        },
        "base": run.inputs.base,
        "exports": formats,
    }
    folder.write_json(folder.summary, values)
    # Last: it says that all the others are there. What differs from run to run is here, and nowhere else.
    finished = {
        "inputs_sha256": digest(photos, journal),
        "files": {name: _stamp(folder.path / name) for name in _files(run, formats)},
        "thumbs": _sizes_sha256(folder.thumbs, photos, thumbnail_name) if run.how.report and run.how.thumbs else None,
        "overlays": _sizes_sha256(folder.overlays, photos, overlay_name) if run.how.overlay else None,
        "links": links,
        "computed": computed,
        "seconds": round(seconds, 2),
        "photos_per_second": round(rate, 2),
    }
    folder.write_json(folder.finished, finished)
    folder.anew.unlink(missing_ok=True)
    return _summary(run, values, computed=computed, seconds=seconds, rate=rate)


def _files(run: CropRun, formats: Sequence[str]) -> list[str]:
    """The names of what is written, but for pictures and crops."""
    folder = run.folder
    own = [folder.results.name, folder.table.name, folder.summary.name, *(["report.html"] if run.how.report else [])]
    return [*own, *(file_of(each) for each in formats)]


def _stamp(path: Path) -> list[int] | None:
    """As JSON has it."""
    stamp = stamp_of(str(path))
    return None if stamp is None else list(stamp)


def _link_photos(run: CropRun, rows: Callable[[], Iterator[Row]]) -> int:
    """Where boxes alone are found, sorted photos are links; how many there are. To what is no file of its own, in a
    shard or at a URL, none can lead."""
    folder, by = run.folder, run.settings.sort
    if by is None or not run.settings.boxes_only:
        return 0
    links = {
        os.path.join(sorted_into(row, by), photo.place): photo.file
        for photo, row in zip(run.inputs.photos, rows(), strict=True)
        if row["status"] == "ok" and not is_elsewhere(photo.file)
    }
    set_links(folder.sorted, links)
    return len(links)


# Pictures


def _sizes_sha256(folder: Path, photos: Sequence[Input], name_of: Callable[[str], str]) -> str:
    """Of the sizes that the pictures of these photos have: another where one was lost, cut off, or drawn otherwise."""
    sizes = hashlib.sha256()
    for photo in photos:
        sizes.update(f"{size_of(folder / name_of(photo.place))} ".encode())
    return sizes.hexdigest()


def _draw_thumbnails(run: CropRun) -> set[str]:
    """The names of those that are there, once the missing ones were made."""
    folder, journal, photos = run.folder, run.journal, run.inputs.photos
    config = run.detector.loaded.preprocess.config
    shown = {thumbnail_name(photo.place): photo for photo in photos if journal.entries[photo.file].reason is None}
    stamps = {name: journal.entries[photo.file].stamp for name, photo in shown.items()}
    there = folder.current_thumbs({name: mark_of(stamp) for name, stamp in stamps.items()}, journal)
    missing = [name for name in shown if name not in there]
    with writing(folder.thumbs):
        folder.thumbs.mkdir(exist_ok=True)
    made = (
        (name, run.pool.submit(make_thumbnail, shown[name].file, stamps[name], config, folder.thumbs / name))
        for name in missing
    )
    return there | _made(run, made, len(missing))


def _draw_overlays(run: CropRun, rows: Callable[[], Iterator[Row]]) -> None:
    """The same of pictures with what was found; where none are wanted, those that show what is no longer so go away."""
    folder, journal, photos = run.folder, run.journal, run.inputs.photos
    if not run.how.overlay and not folder.overlays.exists():
        return
    shown, marks = {}, {}
    for photo, row in zip(photos, rows(), strict=True):
        if row["status"] == "ok":
            shown[name := overlay_name(photo.place)] = photo
            marks[name] = overlay_mark(journal.entries[photo.file].stamp, row)
    there = folder.current_overlays(marks, journal)
    missing = [name for name in shown if name not in there] if run.how.overlay else []

    def drawn() -> Iterator[tuple[str, "Future[bool]"]]:
        for name in missing:
            photo = shown[name]
            stamp, row = journal.entries[photo.file].stamp, journal.row(photo)
            yield name, run.pool.submit(draw_overlay, photo.file, stamp, row, folder.overlays / name)

    _made(run, drawn(), len(missing))


def _made(run: CropRun, pictures: Iterator[tuple[str, "Future[bool]"]], count: int) -> set[str]:
    """The names of those that could be made; a few are waited for at a time, whatever their number."""
    made: set[str] = set()
    waiting: deque[tuple[str, Future[bool]]] = deque()

    def take(most: int) -> None:
        while len(waiting) > most:
            name, future = waiting.popleft()
            if result_of(future) is True:
                made.add(name)

    for each in run.each(pictures, count, "picture"):
        waiting.append(each)
        take(2 * run.pool.workers)
    take(0)
    return made


# Counts


@dataclass
class _Counts:
    """What the rows say, counted."""

    decisions: Counter[str] = field(
        default_factory=lambda: Counter(dict.fromkeys(("subject", "several", "unsure", "none"), 0))
    )
    reasons: Counter[str] = field(default_factory=Counter)
    groups: Counter[str] = field(default_factory=Counter)
    labels: Counter[str | None] = field(default_factory=Counter)
    crops: int = 0
    subjects: int = 0
    cut_off: int = 0
    clocks: Counter[str] = field(default_factory=Counter)
    """What the times of frames were read from."""
    empty: dict[str, bool] = field(default_factory=dict)
    """Whether each burst is."""

    def add(self, row: Row) -> Row:
        """The same row."""
        self.crops += len(row["crops"])
        if row["status"] != "ok":
            self.reasons[row["reason"]] += 1
            return row
        self.decisions[row["decision"]] += 1
        self.subjects += row["subjects"]
        if row["decision"] != "none":  # of an empty scene nobody wants to know what it resembles
            self.cut_off += any(box["cut_off"] for box in row["boxes"])
            self.groups[row["group"]] += 1
            self.labels[row["label"]] += 1
        if burst := row.get("burst"):
            self.clocks[burst["clock"]] += 1
            self.empty[burst["id"]] = self.empty.get(burst["id"], True) and row["decision"] == "none"
        return row

    def of_names(self, loaded: Loaded) -> dict[str, dict[str, int]]:
        if loaded.groups is not None:
            return {"groups": dict(sorted(self.groups.items()))}
        if loaded.naming is not None:
            named = [(name, count) for name, count in self.labels.items() if name is not None]
            return {"labels": dict(sorted(named, key=lambda each: (-each[1], each[0])))}
        return {}

    def of_bursts(self) -> dict[str, int]:
        return {
            "count": len(self.empty),
            "empty": sum(self.empty.values()),
            "empty_frames": self.decisions["none"],
            "by_exif": self.clocks["exif"],
            "by_name": self.clocks["name"],
            "untimed": self.clocks["file"],
        }
