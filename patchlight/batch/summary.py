"""What a run came to: the files that are written when all photos have their rows."""

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from patchlight.batch.formats import Format, export, file_of
from patchlight.batch.inputs import Input, Inputs
from patchlight.batch.overlay import draw_overlay, overlay_mark, overlay_name
from patchlight.batch.pipeline import Steps, result_of
from patchlight.batch.pool import Pool
from patchlight.batch.report import mark_of, thumbnail_name, write_report
from patchlight.batch.results import Journal, ResultFolder, digest, read_json, size_of
from patchlight.batch.rows import Row
from patchlight.batch.work import make_thumbnail, stamp_of
from patchlight.config import PreprocessConfig
from patchlight.files import writing
from patchlight.localizing.detector import Detector
from patchlight.weights.load import Loaded


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a call is to write, besides rows and crops."""

    formats: tuple[str, ...] = ()
    report: bool = True
    overlay: bool = False


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run came to."""

    folder: Path
    photos: int
    computed: int
    """By this call; the others were there."""
    failed: int
    decisions: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    crops: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    """Files in the folders that are no photos, by their endings, see `Inputs`."""
    crops_of_others: int = 0
    """Crops of earlier runs, still there, whose photos are no longer among the inputs or cannot be reached."""
    encoded: int | None = None
    """Of a lossless run: crops of JPEGs that were encoded anew all the same."""
    bursts: dict[str, int] | None = None
    """Of camera traps: how many bursts there are, how many of them are `empty`, how many `empty_frames`, and how many
    frames are `untimed`: neither EXIF nor the name has a time that can be, and the file's own was taken."""
    groups: dict[str, int] | None = None
    """How many photos with a find show what, by a model whose classes have groups; "unknown" are those of none."""
    labels: dict[str, int] | None = None
    """The same by a model whose classes have names alone, the commonest first; photos of no name are left out."""
    seconds: float = 0.0
    rate: float = 0.0
    report: Path | None = None
    exports: tuple[Path, ...] = ()
    nothing_to_do: bool = False
    """All of it was there, and nothing was written."""

    @property
    def exit_code(self) -> int:
        return 3 if self.failed else 0


def _summary(folder: ResultFolder, values: dict[str, Any], wanted: Wanted, **more: Any) -> Summary:
    """By what summary.json holds."""
    names = (
        "photos",
        "decisions",
        "reasons",
        "crops",
        "skipped",
        "crops_of_others",
        "encoded",
        "bursts",
        "groups",
        "labels",
    )
    counts: dict[str, Any] = {name: values[name] for name in names if name in values}
    return Summary(
        folder=folder.path,
        failed=values["status"]["error"],
        **counts,
        report=folder.path / "report.html" if wanted.report else None,
        exports=tuple(folder.path / file_of(each) for each in wanted.formats),
        **more,
    )


def earlier_summary(folder: ResultFolder, inputs: Inputs, journal: Journal, wanted: Wanted) -> Summary | None:
    """The summary of a run that has written everything that is wanted; None if something is to be written.

    What was changed or lost since is to be written again: files are known by their stamps, pictures by their sizes.
    """
    summary = read_json(folder.summary)
    finished = read_json(folder.finished)
    if summary is None or finished is None or finished.get("inputs_sha256") != digest(inputs.photos, journal):
        return None
    stamps = finished.get("files", {})
    if not {*_files(folder, wanted, wanted.formats)} <= stamps.keys():
        return None
    if any(stamps[name] != _stamp(folder.path / name) for name in stamps):
        return None
    if wanted.report and finished.get("thumbs") != _sizes_sha256(folder.thumbs, inputs.photos, thumbnail_name):
        return None
    if wanted.overlay and finished.get("overlays") != _sizes_sha256(folder.overlays, inputs.photos, overlay_name):
        return None
    left = {"skipped": inputs.skipped, "crops_of_others": folder.crops_of_others(inputs.photos, journal)}
    if any(summary.get(name) != value for name, value in left.items()):
        return None
    return _summary(folder, summary, wanted, computed=0, nothing_to_do=True)


def finish(
    folder: ResultFolder,
    inputs: Inputs,
    journal: Journal,
    detector: Detector,
    made_with: dict[str, Any],
    wanted: Wanted,
    computed: int,
    seconds: float,
    pool: Pool,
    steps: Steps,
) -> Summary:
    photos, loaded = inputs.photos, detector.loaded

    def rows() -> Iterator[Row]:
        return steps.through((journal.row(photo) for photo in photos), len(photos), "write")

    counts = _Counts()
    folder.write_rows(map(counts.add, rows()), bursts=made_with["burst"])
    # What an earlier call wrote is kept up to date; results.csv is, anyway.
    kept = {each for each in get_args(Format) if each != "csv" and (folder.path / file_of(each)).exists()}
    formats = [each for each in get_args(Format) if each in {*wanted.formats, *kept}]
    for each in formats:
        export(
            folder.path,
            each,
            rows,
            base=inputs.base,
            detector=loaded.provenance.source,
            calibration=detector.calibration,
        )
    if wanted.report:
        thumbs = _draw_thumbnails(folder, photos, journal, loaded.preprocess.config, pool, steps)
        names = [thumbnail_name(photo.place) for photo in photos]
        write_report(folder.path, rows(), [name if name in thumbs else "" for name in names])
    _draw_overlays(folder, photos, journal, rows, pool, steps, draw=wanted.overlay)
    failed = sum(counts.reasons.values())
    rate = computed / seconds if computed and seconds > 0 else 0.0
    values = {
        "version": 1,
        "photos": len(photos),
        "status": {"ok": len(photos) - failed, "error": failed},
        "decisions": dict(counts.decisions),
        "reasons": dict(sorted(counts.reasons.items())),
        "crops": counts.crops,
        "crops_of_others": folder.crops_of_others(photos, journal),
        "skipped": inputs.skipped,
        **({"encoded": sum(journal.entries[photo.file].encoded for photo in photos)} if made_with["lossless"] else {}),
        **({"bursts": counts.of_bursts()} if made_with["burst"] else {}),
        **counts.of_names(loaded),
        "calibrated": detector.is_calibrated,
        "settings": {name: value for name, value in made_with.items() if not name.startswith("model")},
        "model": {
            "source": loaded.provenance.source,
            "origin": loaded.provenance.origin,
            "sha256": loaded.provenance.sha256,
            "licence": loaded.provenance.licence,
        },
        "base": inputs.base,
        "exports": formats,
    }
    folder.write_json(folder.summary, values)
    # Last: it says that all the others are there. What differs from run to run is here, and nowhere else.
    finished = {
        "inputs_sha256": digest(photos, journal),
        "files": {name: _stamp(folder.path / name) for name in _files(folder, wanted, formats)},
        "thumbs": _sizes_sha256(folder.thumbs, photos, thumbnail_name) if wanted.report else None,
        "overlays": _sizes_sha256(folder.overlays, photos, overlay_name) if wanted.overlay else None,
        "computed": computed,
        "seconds": round(seconds, 2),
        "photos_per_second": round(rate, 2),
    }
    folder.write_json(folder.finished, finished)
    folder.anew.unlink(missing_ok=True)
    return _summary(folder, values, wanted, computed=computed, seconds=seconds, rate=rate)


def _files(folder: ResultFolder, wanted: Wanted, formats: Sequence[str]) -> list[str]:
    """The names of what is written, but for pictures and crops."""
    own = [folder.results.name, folder.table.name, folder.summary.name, *(["report.html"] if wanted.report else [])]
    return [*own, *(file_of(each) for each in formats)]


def _stamp(path: Path) -> list[int] | None:
    """As JSON has it."""
    stamp = stamp_of(str(path))
    return None if stamp is None else list(stamp)


# Pictures


def _sizes_sha256(folder: Path, photos: Sequence[Input], name_of: Callable[[str], str]) -> str:
    """Of the sizes that the pictures of these photos have: another where one was lost, cut off, or drawn otherwise."""
    sizes = hashlib.sha256()
    for photo in photos:
        sizes.update(f"{size_of(folder / name_of(photo.place))} ".encode())
    return sizes.hexdigest()


def _draw_thumbnails(
    folder: ResultFolder,
    photos: Sequence[Input],
    journal: Journal,
    config: PreprocessConfig,
    pool: Pool,
    steps: Steps,
) -> set[str]:
    """The names of those that are there, once the missing ones were made."""
    shown = {thumbnail_name(photo.place): photo for photo in photos if journal.entries[photo.file].reason is None}
    stamps = {name: journal.entries[photo.file].stamp for name, photo in shown.items()}
    there = folder.current_thumbs({name: mark_of(stamp) for name, stamp in stamps.items()}, journal)
    missing = [name for name in shown if name not in there]
    with writing(folder.thumbs):
        folder.thumbs.mkdir(exist_ok=True)
    made = (
        (name, pool.submit(make_thumbnail, shown[name].file, stamps[name], config, folder.thumbs / name))
        for name in missing
    )
    return there | _made(made, len(missing), pool, steps)


def _draw_overlays(
    folder: ResultFolder,
    photos: Sequence[Input],
    journal: Journal,
    rows: Callable[[], Iterator[Row]],
    pool: Pool,
    steps: Steps,
    *,
    draw: bool,
) -> None:
    """The same of pictures with what was found; without `draw`, those that show what is no longer so go away."""
    if not draw and not folder.overlays.exists():
        return
    shown, marks = {}, {}
    for photo, row in zip(photos, rows(), strict=True):
        if row["status"] == "ok":
            shown[name := overlay_name(photo.place)] = photo
            marks[name] = overlay_mark(journal.entries[photo.file].stamp, row)
    there = folder.current_overlays(marks, journal)
    missing = [name for name in shown if name not in there] if draw else []

    def drawn() -> Iterator[tuple[str, "Future[bool]"]]:
        for name in missing:
            photo = shown[name]
            stamp, row = journal.entries[photo.file].stamp, journal.row(photo)
            yield name, pool.submit(draw_overlay, photo.file, stamp, row, folder.overlays / name)

    _made(drawn(), len(missing), pool, steps)


def _made(pictures: Iterator[tuple[str, "Future[bool]"]], count: int, pool: Pool, steps: Steps) -> set[str]:
    """The names of those that could be made; a few are waited for at a time, whatever their number."""
    made: set[str] = set()
    waiting: deque[tuple[str, Future[bool]]] = deque()

    def take(most: int) -> None:
        while len(waiting) > most:
            name, future = waiting.popleft()
            if result_of(future) is True:
                made.add(name)

    for each in steps.through(pictures, count, "draw"):
        waiting.append(each)
        take(2 * pool.workers)
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
    untimed: int = 0
    """Frames whose time is their file's own."""
    empty: dict[str, bool] = field(default_factory=dict)
    """Whether each burst is."""

    def add(self, row: Row) -> Row:
        """The same row."""
        self.crops += len(row["crops"])
        if row["status"] != "ok":
            self.reasons[row["reason"]] += 1
            return row
        self.decisions[row["decision"]] += 1
        if row["decision"] != "none":  # of an empty scene nobody wants to know what it resembles
            self.groups[row["group"]] += 1
            self.labels[row["label"]] += 1
        if burst := row.get("burst"):
            self.untimed += burst["clock"] == "file"
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
            "untimed": self.untimed,
        }
