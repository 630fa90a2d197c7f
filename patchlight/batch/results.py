"""The folder of a run: its rows, kept so that a stop of any kind costs nothing that was finished.

DIR/results.jsonl   a row for each input, in their order, see rows.py
DIR/results.csv     the same with the best box alone, for a spreadsheet
DIR/results.parquet    and with types, where it is asked for (and the other files of formats.py)
DIR/summary.json    counts, settings and model
DIR/crops/          the crops, in the folders of their photos
DIR/sorted/         links to the photos, where boxes alone were found and were to be sorted
DIR/corrections.jsonl   what a person said instead, see overrides.py; the user's own
DIR/thumbs/, report.html    the page that shows them
DIR/overlays/       what was found, drawn over the photos
DIR/.run/           run.json (what the rows were made with), given.json (which photos, as they were asked
                    for), anew (while a run that was told to overwrite has not
                    finished), named.json (the files that were given by name), part.json (which share of the photos it
                    is, see parts.py), parts/ (rows of blocks that are not in the journal yet, see
                    blocks.py), journal.jsonl (the rows as they came,
                    with what their files and crops are known by), looks.jsonl (of camera traps: what the model saw, see
                    sequences.py), finished.json (of what the results are, the stamps of what was written, and how long
                    it took), lock
"""

import contextlib
import csv
import hashlib
import io
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchlight.batch.blocks import read_part
from patchlight.batch.inputs import WRITTEN_FILES, WRITTEN_FOLDERS, Input
from patchlight.batch.overlay import overlay_name
from patchlight.batch.report import current_pictures, thumbnail_name
from patchlight.batch.rows import NAMED, Row, check_row, error_row
from patchlight.batch.video import forget_frames
from patchlight.batch.work import Stamp, readers, stamp_of
from patchlight.errors import PatchlightError
from patchlight.files import Unwritable, held_alone, replacing, writing
from patchlight.images.containers import is_elsewhere
from patchlight.json_config import parse_json
from patchlight.remote import on_disk

TRANSIENT = ("missing", "unreadable", "gone", "changed", "crashed")
"""Reasons that may have gone when the run is started again, though the file's stamp is the same."""

UNREACHABLE = ("missing", "unreadable", "gone")
"""Those that say nothing of the photo itself: a disk that is not mounted, a link to nothing."""

COLUMNS = (
    *("path", "status", "reason", "detail", "width", "height", "decision", "confidence", "method"),
    *("subjects", "x0", "y0", "x1", "y1", "score", "cut_off", "crops", *NAMED),
)
"""Of results.csv; the box is the best one, and several crops are parted by semicolons."""

VIDEO_COLUMNS = ("video", "seconds")
"""Further ones, with frames of videos."""

BURST_COLUMNS = ("burst", "frame", "frames", "time", "clock")
"""Further ones, of camera traps."""

WRITTEN = (*(name for name in WRITTEN_FOLDERS if name != ".run"), *WRITTEN_FILES)
"""All that a run may write into its folder, besides its own notes."""


@dataclass(slots=True)
class Entry:
    """What the journal holds of a file, and where."""

    start: int
    stamp: Stamp | None
    place: str
    reason: str | None
    crops: tuple[str, ...]
    """Those that the row lists, or, of a photo that cannot be reached, those that wait for it."""
    group: str | None
    encoded: int
    """Crops that were encoded anew, where they should not have been."""
    sizes: tuple[int | None, ...]
    """Bytes of the crops as they were written."""
    cut: str | None
    """What the crops rest on besides the photo: a correction, a scale that all have."""
    readers: str | None
    """Of a photo that is not supported: what could be read then."""


class Lines:
    """A file of JSON objects, one a line, that is only added to; what a kill has cut off at its end is dropped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with writing(path):
            self._file = path.open("a+b")
            self._file.seek(0)
            start = 0
            for line in self._file:
                if not self._indexed(line, start):
                    break  # cut off by a kill; what follows a cut cannot be there
                start += len(line)
            if self._file.seek(0, os.SEEK_END) > start:
                self._file.truncate(start)
                self._file.seek(start)
        self._end = start

    def _index(self, record: Any, start: int) -> None:
        """Take note of a record and of where it begins; raises ValueError, LookupError or TypeError if it is none."""
        raise NotImplementedError

    def _indexed(self, line: bytes, start: int) -> bool:
        if not line.endswith(b"\n"):
            return False
        try:
            self._index(parse_json(line), start)
        except (ValueError, LookupError, TypeError):
            return False
        return True

    def _add(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(record).encode() + b"\n"
        with writing(self.path):
            self._file.write(line)
            self._file.flush()
        self._indexed(line, self._end)
        self._end += len(line)

    def _at(self, start: int) -> Any:
        self._file.seek(start)
        record = json.loads(self._file.readline())
        self._file.seek(0, os.SEEK_END)
        return record

    def sync(self) -> None:
        with writing(self.path):
            os.fsync(self._file.fileno())

    @property
    def length(self) -> int:
        """In bytes."""
        return self._end

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what could not be written was said then, and is not in the file
            self._file.close()


class Journal(Lines):
    """Rows in the order in which they were finished; of a file's rows the last one counts."""

    def __init__(self, path: Path) -> None:
        self.entries: dict[str, Entry] = {}
        super().__init__(path)

    def _check(self, row: Any) -> None:
        """Raise for what is no row, see `_index`."""
        check_row(row)

    def check(self, file: Any, place: Any, row: Any) -> None:
        """Raise for what does not say of a photo what a row has to."""
        self._check(row)
        _check_names(file, place, row["crops"])

    def _index(self, record: Any, start: int) -> None:
        row = record["row"]
        self.check(record["file"], record["place"], row)
        before = self.entries.get(record["file"]) if row["reason"] in UNREACHABLE else None
        self.entries[record["file"]] = Entry(
            start,
            as_stamp(record["stamp"]),
            record["place"],
            row["reason"],
            tuple(row["crops"]) if before is None else before.crops,
            _as_text(record.get("group")),
            _as_size(record.get("encoded", 0)) or 0,
            tuple(map(_as_size, record.get("sizes", ()))),
            _as_text(record.get("cut")),
            _as_text(record.get("readers")),
        )

    def append(
        self,
        photo: Input,
        stamp: Stamp | None,
        row: Row,
        *,
        group: str | None = None,
        encoded: int = 0,
        sizes: Sequence[int | None] = (),
        found: Row | None = None,
        cut: str | None = None,
        readers: str | None = None,
    ) -> None:
        """`group` says of which frames the row was made, where it is not of its photo alone, `found` is the row by the
        model, where it was corrected; the others, see Entry."""
        record = {"file": photo.file, "stamp": stamp, "place": photo.place, "row": row}
        further: dict[str, Any] = {"group": group, "encoded": encoded or None, "sizes": sizes or None}
        further |= {"found": found, "cut": cut, "readers": readers}
        self._add(record | {name: value for name, value in further.items() if value is not None})

    def noted(self, entry: Entry) -> dict[str, Any]:
        """What `append` was given of a photo besides its row."""
        record = self._at(entry.start)
        return {name: record[name] for name in ("group", "encoded", "found", "cut", "readers") if name in record}

    def row(self, photo: Input) -> Row:
        """The row of a photo, under the path that it has now."""
        row: Row = self._at(self.entries[photo.file].start)["row"]
        return row | {"path": photo.path}

    def found(self, photo: Input) -> Row:
        """The row as it was before it was corrected; without crops."""
        record = self._at(self.entries[photo.file].start)
        row: Row = record.get("found") or record["row"]
        return row | {"path": photo.path, "crops": [], "cuts": []}


def as_stamp(values: Any) -> Stamp | None:
    """As JSON gives it back."""
    if values is None:
        return None
    size, time = values
    if type(size) is not int or type(time) is not int:
        raise ValueError("a stamp is two whole numbers")
    return size, time


def _as_size(value: Any) -> int | None:
    if value is not None and type(value) is not int:
        raise ValueError("a size is a whole number")
    return value


def _as_text(value: Any) -> str | None:
    if not isinstance(value, str | None):
        raise ValueError("a mark is a text")
    return value


def _check_names(file: Any, place: Any, crops: Sequence[str]) -> None:
    """The folder of a run may come from anywhere, and what it calls its crops is overwritten and removed."""
    texts = isinstance(file, str) and isinstance(place, str) and "\0" not in file + place
    if not texts or os.path.isabs(place) or ".." in place.split("/"):
        raise ValueError("these are no names of a photo")
    for crop in crops:
        if not crop.startswith("crops/") or ".." in crop.split("/") or "\0" in crop:
            raise ValueError(f"{crop} is no crop of this folder")


MODEL_SOURCE = "model.source"
"""What a run's settings call the place that its model was loaded from, for people to know it by."""


class ResultFolder:
    """DIR of the layout above."""

    journal_type = Journal

    def __init__(self, path: str | os.PathLike[str], notes: str = ".run") -> None:
        """`notes` is the folder of the run's own notes, in it."""
        self.path = on_disk(path)
        self.crops = self.path / "crops"
        self.thumbs = self.path / "thumbs"
        self.overlays = self.path / "overlays"
        self.sorted = self.path / "sorted"
        self.given = self.path / ".run" / "given.json"
        self.frames = self.path / "frames"
        """Of videos."""
        self.results = self.path / "results.jsonl"
        self.table = self.path / "results.csv"
        self.summary = self.path / "summary.json"
        self._own = self.path / notes
        self.settings = self._own / "run.json"
        self._named = self._own / "named.json"
        self._journal = self._own / "journal.jsonl"
        self.looks = self._own / "looks.jsonl"
        self.finished = self._own / "finished.json"
        self.anew = self._own / "anew"
        self.part = self._own / "part.json"
        self.parts = self._own / "parts"

    @property
    def is_begun(self) -> bool:
        return self.settings.exists()

    @property
    def made_with(self) -> dict[str, Any]:
        """What its rows were made with; empty before it was begun."""
        return read_json(self.settings) or {}

    def open_journal(self) -> Journal:
        """The rows of a run that was begun, as they came."""
        return self.journal_type(self._journal)

    def held(self) -> contextlib.AbstractContextManager[None]:
        """For this process alone."""
        return held_alone(self.path, self._own / "lock", begun=self.settings)

    def known_files(self) -> set[str]:
        """Absolute paths of the files that earlier runs were given by name or have rows of; nothing is written or held
        for it."""
        files = self._named_before()
        with contextlib.suppress(OSError), self._journal.open("rb") as journal:
            for line in journal:
                with contextlib.suppress(ValueError, LookupError, TypeError):  # what a kill has cut off
                    files.add(parse_json(line)["file"])
        return files

    def note_named(self, files: Iterable[str]) -> None:
        """That these, by absolute path, were there when a run began: one that goes before it has a row gets one."""
        before = self._named_before()
        if not before.issuperset(files):
            self.write_json(self._named, {"files": sorted(before.union(files))})

    def _named_before(self) -> set[str]:
        files = (read_json(self._named) or {}).get("files")
        return {each for each in files if isinstance(each, str)} if isinstance(files, list) else set()

    def current_thumbs(self, wanted: Mapping[str, bytes], journal: Journal) -> set[str]:
        """The names of the thumbnails that have the mark which is wanted of them; other ones of runs go away."""
        return current_pictures(self.thumbs, wanted, (thumbnail_name(each.place) for each in journal.entries.values()))

    def current_overlays(self, wanted: Mapping[str, bytes], journal: Journal) -> set[str]:
        """The same of overlays."""
        return current_pictures(self.overlays, wanted, (overlay_name(each.place) for each in journal.entries.values()))

    def crops_of_others(self, photos: Iterable[Input], journal: Journal) -> int:
        """Crops that earlier runs wrote of photos that are not among these or cannot be reached, and that are still
        there."""
        listed = {photo.file for photo in photos}
        others = (entry for file, entry in journal.entries.items() if file not in listed or entry.reason in UNREACHABLE)
        return sum((self.path / crop).is_file() for entry in others for crop in entry.crops)

    def changes(self, photos: Sequence[Input], journal: Journal) -> dict[str, int] | None:
        """How the photos differ from those of the run before; None where there was none."""
        if not journal.entries:
            return None
        counts = dict.fromkeys(("new", "changed", "gone", "as_before"), 0)
        for photo in photos:
            entry = journal.entries.get(photo.file)
            if entry is None:
                counts["new"] += 1
                continue
            stamp = stamp_of(photo.file) if not is_elsewhere(photo.file) else photo.stamp or entry.stamp  # as listed
            if stamp is None and entry.reason not in UNREACHABLE:
                counts["gone"] += 1
            else:
                # One that is back is a new one, unless it is what it was before it went away.
                counts["as_before" if entry.stamp == stamp else "new" if entry.stamp is None else "changed"] += 1
        counts["gone"] += len(_gone(photos, journal))
        return counts

    def note_gone(self, photos: Sequence[Input], journal: Journal) -> int:
        """Write down which photos of earlier runs are no longer there, so that it is said once; how many these are."""
        gone = _gone(photos, journal)
        for file in gone:
            photo = Input(file, file, journal.entries[file].place)
            journal.append(photo, None, error_row(file, "gone", "it is no longer there"))
        return len(gone)

    def prune(self, journal: Journal) -> int:
        """Remove the crops of photos that are gone; how many these were."""
        gone = [entry for entry in journal.entries.values() if entry.reason in ("gone", "missing")]
        crops = [crop for entry in gone for crop in entry.crops if (self.path / crop).is_file()]
        with writing(self.crops):
            self.remove_crops(crops)
        remove_empty(self.crops)
        return len(crops)

    def check(self, made_with: Mapping[str, Any], *, overwrite: bool) -> None:
        """Refuse a folder whose rows were made in another way, or that holds somebody else's."""
        if overwrite and self.settings.exists():
            return
        if not self.settings.exists():
            others = [each for each in (self.path / name for name in WRITTEN) if each.exists()]
            if others:
                raise PatchlightError(
                    f"{self.path}: holds {others[0].name}, but no run of this command; name another folder"
                )
            return
        begun = read_json(self.settings)
        if begun is None:
            raise PatchlightError(f"{self.settings}: cannot be read; use overwrite=True, or name another folder")
        asked = _as_read(made_with)
        if begun.get("version") != asked["version"]:
            raise PatchlightError(
                f"{self.path}: was started by another version of this program, whose rows differ; use overwrite=True "
                "to start over, or name another folder"
            )
        changed = _differing(begun, asked)
        if "model" in changed and all(name.startswith("model") for name in changed):
            before, now = begun.get(MODEL_SOURCE, "another model"), asked[MODEL_SOURCE]
            which = f"{before}, not {now}" if before != now else f"{now} as it was then"
            raise PatchlightError(
                f"{self.path}: was started with {which}; use overwrite=True to start over, or name another folder"
            )
        if changed == ["engine"] or ("engine" in changed and asked["engine"] is None):
            before, now = (each.get("engine") or "torch" for each in (begun, asked))
            raise PatchlightError(
                f"{self.path}: was started with {before}, not {now}; take the --engine of then, use --overwrite to "
                "start over, or name another folder"
            )
        if changed:
            # A setting that somebody chose says more than what follows from it.
            name = min(changed, key=lambda each: (each.startswith("model"), each))
            raise PatchlightError(
                f"{self.path}: was started with {name}={_short(begun.get(name))}, not {_short(asked.get(name))}; "
                "use overwrite=True to start over, or name another folder"
            )

    def engine_of_before(self) -> tuple[bool, str | None]:
        """Whether a run has begun here, and what computed its model: None for torch."""
        begun = read_json(self.settings)
        return begun is not None, None if begun is None else begun.get("engine")

    def is_begun_anew(self, made_with: Mapping[str, Any]) -> bool:
        """Whether a run in this way was told to overwrite, has done so, and was stopped before it had finished: the
        same command is to go on with it."""
        under_way = self.anew.exists() and not self.finished.exists()
        begun = read_json(self.settings)
        return under_way and begun is not None and not _differing(begun, _as_read(made_with))

    def begin(self, made_with: Mapping[str, Any], *, overwrite: bool) -> Journal:
        """From here on the folder is this run's. What a killed process left half-written goes away."""
        anew = overwrite and not self.is_begun_anew(made_with)
        if anew and self.settings.exists():
            self._forget()
        self.clean()
        if anew or not self.settings.exists():
            self.write_json(self.settings, made_with)
        if anew:
            self.replace(self.anew, b"")
        return self.open_journal()

    def _forget(self) -> None:
        """Remove what earlier runs wrote, and nothing else; a kill meanwhile leaves a folder that is still a run's."""
        self.anew.unlink(missing_ok=True)
        if self._journal.exists():
            journal = Journal(self._journal)
            journal.close()
            for entry in journal.entries.values():
                self.remove_crops(entry.crops)
            self.current_thumbs({}, journal)
            self.current_overlays({}, journal)
        set_links(self.sorted, {})
        forget_frames(self.frames)
        for folder in (self.crops, self.thumbs, self.overlays, self.sorted):
            for root, _, _ in os.walk(folder, topdown=False):
                with contextlib.suppress(OSError):  # somebody's own file is in it
                    os.rmdir(root)
        for name in WRITTEN:
            if (self.path / name).is_file():
                (self.path / name).unlink()
        for each in (self._named, self._journal, self.looks, self.part, self.finished):
            each.unlink(missing_ok=True)
        shutil.rmtree(self.parts, ignore_errors=True)

    def note_row(self, journal: Journal, photo: Input, stamp: Stamp | None, row: Row, **said: Any) -> None:
        """Write a row into the journal, and remove the crops of the row before that are not its own; `said` is what
        `Journal.append` takes."""
        entry = journal.entries.get(photo.file)
        if entry is not None and row["reason"] not in UNREACHABLE:  # else they may be all that is left of it
            self.remove_crops(set(entry.crops) - set(row["crops"]))
        able = readers() if row["reason"] == "unsupported" else None
        journal.append(photo, stamp, row, sizes=self.sizes(row["crops"]), readers=able, **said)

    def take_part(self, path: Path, journal: Journal) -> int:
        """Move the rows of a part, see blocks.py, into the journal; how many these are."""
        said = list(read_part(path))
        for photo, record, _ in said:
            self._check_said(journal, photo, record["row"])
        for photo, record, array in said:
            self._take(journal, photo, record, array)
        self._sync(journal)
        path.unlink()
        return len(said)

    def take_parts(self, journal: Journal) -> int:
        """Those that were written after the run that is responsible for them had come to an end. The photos of one
        that is damaged are looked at anew. How many rows there were."""
        count = 0
        for path in sorted(self.parts.glob("*.parquet")):
            try:
                count += self.take_part(path, journal)
            except Unwritable:
                raise
            except Exception:  # whatever a damaged file leads the libraries into
                continue
        shutil.rmtree(self.parts, ignore_errors=True)
        return count

    def _check_said(self, journal: Journal, photo: Input, row: Row) -> None:
        journal.check(photo.file, photo.place, row)

    def _take(self, journal: Journal, photo: Input, record: Mapping[str, Any], array: bytes | None) -> None:
        said = {name: record[name] for name in ("found", "cut", "encoded")}
        self.note_row(journal, photo, as_stamp(record["stamp"]), record["row"], **said)

    def _sync(self, journal: Journal) -> None:
        journal.sync()

    def remove_crops(self, crops: Iterable[str]) -> None:
        for crop in crops:
            (self.path / crop).unlink(missing_ok=True)

    def clean(self) -> None:
        for folder in (self.crops, self.thumbs, self.overlays, self.frames, self._own):
            for root, _, names in os.walk(folder):
                for name in names:
                    if re.fullmatch(r"\.?.*\.\d+\.tmp", name, re.DOTALL):
                        (Path(root) / name).unlink(missing_ok=True)
        for name in WRITTEN:
            for left in self.path.glob(f".{name}.*.tmp"):
                left.unlink(missing_ok=True)

    def has_crops(self, entry: Entry) -> bool:
        """Whether they are there, and as long as they were when they were written."""
        sizes = self.sizes(entry.crops)
        return None not in sizes and entry.sizes == sizes

    def sizes(self, crops: Iterable[str]) -> tuple[int | None, ...]:
        """In bytes; None of one that is not there."""
        return tuple(size_of(self.path / crop) for crop in crops)

    def replace(self, path: Path, content: bytes) -> None:
        with writing(path), replacing(path) as temporary:
            temporary.write_bytes(content)

    def write_json(self, path: Path, values: Mapping[str, Any]) -> None:
        self.replace(path, json.dumps(dict(values), indent=2).encode() + b"\n")

    def write_rows(self, rows: Iterable[Row], *, bursts: bool = False, videos: bool = False) -> None:
        """results.jsonl and results.csv, row by row, so that they need no memory; `bursts` and `videos` say that rows
        have them."""
        with (
            writing(self.results),
            replacing(self.results) as results,
            results.open("w", encoding="ascii") as file,
            writing(self.table),
            replacing(self.table) as cells,
            cells.open("wb") as table,
        ):
            further = (*(VIDEO_COLUMNS if videos else ()), *(BURST_COLUMNS if bursts else ()))
            table.write(csv_line([*COLUMNS, *further]))
            for row in rows:
                file.write(json.dumps(row) + "\n")
                more = [*(_video_cells(row) if videos else ()), *(_burst_cells(row) if bursts else ())]
                table.write(csv_line([*cells_of(row), *more]))


def _gone(photos: Iterable[Input], journal: Journal) -> list[str]:
    """Files of earlier runs that were there, are not among these photos, and are no longer there."""
    listed = {photo.file for photo in photos}
    before = (file for file, entry in journal.entries.items() if file not in listed and entry.reason not in UNREACHABLE)
    # What lies elsewhere may only be out of reach.
    return [file for file in before if not is_elsewhere(file) and stamp_of(file) is None]


def links_in(folder: Path) -> dict[str, str]:
    """Where links below a folder lead, by their paths in it."""
    return {
        os.path.relpath(os.path.join(root, name), folder): os.readlink(os.path.join(root, name))
        for root, folders, names in os.walk(folder)
        for name in [*names, *folders]
        if os.path.islink(os.path.join(root, name))
    }


def set_links(folder: Path, wanted: Mapping[str, str]) -> None:
    """Have these links in a folder, and no others; what is no link stays."""
    there = links_in(folder)
    with writing(folder):
        for name in there.keys() - {name for name in wanted if there.get(name) == wanted[name]}:
            (folder / name).unlink(missing_ok=True)
        for name, file in wanted.items():
            if there.get(name) != file:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).symlink_to(file)
    remove_empty(folder)


def remove_empty(folder: Path) -> None:
    """The empty folders in a folder, and itself."""
    for root, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):  # something is in it
            os.rmdir(root)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file; None if there is none, or something else."""
    try:
        values = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def size_of(path: Path) -> int | None:
    """In bytes; None if it is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _differing(begun: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """The names of the settings that are others; a model that lies elsewhere is the same."""
    return [name for name in {*begun, *asked} - {MODEL_SOURCE} if begun.get(name) != asked.get(name)]


def _as_read(values: Mapping[str, Any]) -> Any:
    """As JSON gives it back."""
    return json.loads(json.dumps(dict(values)))


def digest(photos: Iterable[Input], journal: Journal) -> str:
    """Of which photos the results are, and of which state of the journal."""
    digest = hashlib.sha256(str(journal.length).encode())
    for photo in photos:
        digest.update(b"\0" + os.fsencode(photo.path) + b"\0" + os.fsencode(photo.file))
    return digest.hexdigest()


def csv_line(cells: Sequence[Any]) -> bytes:
    """Text in quotes, and in front of what a spreadsheet would take for a formula an apostrophe."""
    text = io.StringIO()
    csv.writer(text, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n").writerow([_neutral(cell) for cell in cells])
    return text.getvalue().encode("utf-8", "backslashreplace")


def _neutral(cell: Any) -> Any:
    if cell is None:
        return ""
    if isinstance(cell, str) and cell.lstrip(" ").startswith(("=", "+", "-", "@", "\t", "\r", "\n")):
        return "'" + cell
    return cell


def cells_of(row: Row) -> list[Any]:
    """As COLUMNS names them."""
    best: Row = row["boxes"][0] if row["boxes"] else {"xyxy": [None] * 4, "score": None, "cut_off": ()}
    width, height = row["size"] or (None, None)
    about = [row[name] for name in ("path", "status", "reason", "detail")]
    found = [width, height, row["decision"], row["confidence"], row["method"], row["subjects"] or 0]
    named = [row[name] for name in NAMED]
    return [*about, *found, *best["xyxy"], best["score"], ";".join(best["cut_off"]), ";".join(row["crops"]), *named]


def _video_cells(row: Row) -> list[Any]:
    video = row.get("video") or {}
    return [video.get("file"), video.get("seconds")]


def _burst_cells(row: Row) -> list[Any]:
    names = ("id", *BURST_COLUMNS[1:])
    burst = row["burst"] or dict.fromkeys(names)
    return [burst[name] for name in names]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
