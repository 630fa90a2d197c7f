"""A folder of photos to a table, on the way that crops are made: any number of photos, to be stopped at any moment.

TABLE        the table, see tables.py, written when all photos have their rows
TABLE.run/   what a run goes on with: run.json, named.json, part.json, journal.jsonl, finished.json and lock as of crops
             (see results.py), and values.bin, the arrays as they came. Without it the next run begins anew.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from patchlight.batch.inputs import Input, Inputs, find_photos
from patchlight.batch.parts import take_part
from patchlight.batch.pipeline import CropPipeline, CropRun, Stage, _Photo
from patchlight.batch.pool import Pool
from patchlight.batch.readers import (
    Answer,
    ClassifySettings,
    ClassReader,
    EmbedSettings,
    FeatureReader,
    TableReader,
    as_type,
    features_of,
)
from patchlight.batch.results import TRANSIENT, Journal, ResultFolder, as_stamp, digest, read_json
from patchlight.batch.rows import VERSION, Row
from patchlight.batch.runner import cluster_of, device_here, loaded_on, made_with_of
from patchlight.batch.settings import CropRunSettings, CropSettings
from patchlight.batch.tables import Layout, kind_of, write_table
from patchlight.batch.work import is_unchanged, stamp_of
from patchlight.errors import PatchlightError
from patchlight.files import printable, writing
from patchlight.images.crop import Cut
from patchlight.images.decode import Photo, listed
from patchlight.remote import as_given, is_remote, on_disk
from patchlight.reporting import Progress, Reporter, on_terminal
from patchlight.signals import asked_to_stop
from patchlight.weights.load import Loaded, Runs, load_or_given

_NO_CUT = Cut()


@dataclass(frozen=True, slots=True)
class TableSummary:
    """What a run came to."""

    table: Path
    photos: int
    """All that have rows."""
    computed: int
    """By this call; the others were there."""
    failed: int
    """Photos that could not be used; their rows say why."""
    reasons: dict[str, int] = field(default_factory=dict)
    """How many photos failed for which reason."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Files in the folders that are no photos, by their endings, see `Inputs`."""
    seconds: float = 0.0
    rate: float = 0.0
    """Photos a second, of those that were computed."""
    left_out: int = 0
    """Photos of earlier runs that are not among these: the table, which was written again, has them no more."""
    nothing_to_do: bool = False
    """All of it was there, and nothing was written."""

    @property
    def exit_code(self) -> int:
        """Of the command line: 3 where photos failed."""
        return 3 if self.failed else 0


def embed(
    photos: Photo | Iterable[Photo],
    model: str | os.PathLike[str] | Loaded | Runs = "default",
    *,
    features: str = "pooled",
    dtype: str = "float32",
    batch_size: int = 32,
) -> npt.NDArray[Any]:
    """Features of a photo (a path, a file's bytes, a Pillow image, an array HWC uint8, or what `decode` gave): an array
    (D,), or (h, w, D) of "dense" ones; of several photos (N, D) or (N, h, w, D), in their order.

    `features`: "pooled" as the model pools before its head, "cls" of the class token, "dense" of every patch. `model`
    is what `load` takes, or gave, or what `load_engine` gave. On a CPU each photo goes through the model alone, as in
    `loaded.predict`. For tens of thousands of photos there is `embed_photos`, which writes a table and can be stopped.
    """
    several, one = listed(photos)
    settings = EmbedSettings(features=features, dtype=dtype)  # type: ignore[arg-type]
    if batch_size < 1:
        raise PatchlightError(f"batch_size={batch_size} must be 1 or more")
    loaded = load_or_given(model)
    at_once, found = 1 if loaded.device.type == "cpu" else batch_size, []
    with torch.inference_mode():
        for start in range(0, len(several), at_once):
            images = [loaded.preprocess(photo)[0] for photo in several[start : start + at_once]]
            together = (
                [torch.stack(images)] if len({image.shape for image in images}) == 1 else [i[None] for i in images]
            )
            for image_BCHW in together:
                moved_BCHW = image_BCHW.to(loaded.device, loaded.model.norm.weight.dtype)
                found.append(features_of(loaded, moved_BCHW, settings.features).float().cpu().numpy())
    if len({each.shape[1:] for each in found}) > 1:
        raise PatchlightError(
            "photos of different sizes give dense features of different shapes; embed them one by one"
        )
    array = as_type(np.concatenate(found), settings.dtype)
    return array[0] if one else array


def embed_photos(
    photos: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    settings: EmbedSettings | None = None,
    how: CropRunSettings | None = None,
    *,
    model: str | os.PathLike[str] | Loaded | Runs = "default",
    reporter: Reporter | None = None,
) -> TableSummary:
    """Features of a folder of photos into a table, a row a photo; what `patchlight embed` does.

    `out` ends in .parquet, .npz, .zarr or .lance. All else is as of `crop_photos`: called again it goes on where it was
    stopped, or does what is new.
    """
    return _to_table(FeatureReader, photos, out, settings or EmbedSettings(), how, model, reporter)


def classify_photos(
    photos: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    settings: ClassifySettings | None = None,
    how: CropRunSettings | None = None,
    *,
    model: str | os.PathLike[str] | Loaded | Runs = "default",
    reporter: Reporter | None = None,
) -> TableSummary:
    """The likeliest classes of a folder of photos into a table, which may end in .csv or .jsonl, too."""
    return _to_table(ClassReader, photos, out, settings or ClassifySettings(), how, model, reporter)


def _to_table(
    reader_type: type[FeatureReader] | type[ClassReader],
    photos: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    settings: EmbedSettings | ClassifySettings,
    how: CropRunSettings | None,
    model: str | os.PathLike[str] | Loaded | Runs,
    reporter: Reporter | None,
) -> TableSummary:
    paths = [photos] if isinstance(photos, str | os.PathLike) else list(photos)
    how = replace(how or CropRunSettings(), report=False)
    with on_terminal() if reporter is None else contextlib.nullcontext(reporter) as heard:
        kind_of(Path(out), arrays=reader_type is FeatureReader)
        device = device_here(how, model)
        folder = TableFolder(Path(out))
        if any(is_remote(as_given(path)) for path in paths):
            heard.progress(Progress(what="listing photos"))
        inputs = find_photos(paths, folder.path, folder.known_files)
        with folder.held(), asked_to_stop() as asked, Pool(how.workers) as pool, contextlib.ExitStack() as stack:
            cluster = stack.enter_context(cluster_of(how))
            loaded = loaded_on(model, device)
            for note in loaded.notes:
                heard.tell(f"{loaded.provenance.source}: {note}")
            reader: TableReader = reader_type(loaded, settings, how.batch_size, heard)  # type: ignore[arg-type]
            journal = folder.started(made_with_of(settings, how.part, loaded), reader.layout, overwrite=how.overwrite)
            stack.callback(journal.close)
            stack.callback(folder.values.close)
            folder.take_parts(journal)
            folder.check_photos(inputs.photos, journal)
            folder.note_named(inputs.named)
            inputs, part = take_part(inputs, how.part)
            if part is not None:
                folder.write_json(folder.part, part)
            run = CropRun(
                folder, journal, inputs, CropSettings(boxes_only=True), how, reader.detector, pool, asked, heard
            )
            pipeline = TablePipeline(run, reader, folder, journal, whole=not settings.fast_decode)
            computed = pipeline.work(None if cluster is None else partial(cluster.work, pipeline))
            return finish_table(folder, journal, inputs, reader.layout, run.each, computed, pipeline.seconds)


class TableJournal(Journal):
    """Rows as they came, and where their arrays are."""

    def __init__(self, path: Path) -> None:
        self.at: dict[str, int | None] = {}
        super().__init__(path)

    def _check(self, row: Any) -> None:
        at = row["at"]
        if not isinstance(row["path"], str) or not (at is None or (type(at) is int and at >= 0)):
            raise ValueError("it is no row of a table")
        if not isinstance(row["crops"], list) or any(not isinstance(each, str) for each in row["crops"]):
            raise ValueError("crops are no list of texts")

    def _index(self, record: Any, start: int) -> None:
        super()._index(record, start)
        self.at[record["file"]] = record["row"]["at"]


class Values:
    """A file of arrays of one size, that is only added to; what a kill has cut off at its end is dropped."""

    def __init__(self, path: Path, layout: Layout) -> None:
        self.path, self.dtype = path, np.dtype(layout.dtype).newbyteorder("<")
        self.shape = layout.shape or (0,)
        self._bytes = self.dtype.itemsize * layout.length
        with writing(path):
            self._file = path.open("a+b")
            size = self._file.seek(0, os.SEEK_END)
            self.count = size // self._bytes if self._bytes else 0
            self._file.truncate(self.count * self._bytes)

    def append(self, array: npt.NDArray[Any]) -> int:
        """Its number."""
        with writing(self.path):
            self._file.write(np.ascontiguousarray(array, self.dtype).tobytes())
            self._file.flush()
        self.count += 1
        return self.count - 1

    def __getitem__(self, number: int) -> npt.NDArray[Any]:
        data = os.pread(self._file.fileno(), self._bytes, number * self._bytes)
        return np.frombuffer(data, self.dtype).reshape(self.shape)

    def sync(self) -> None:
        with writing(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


class TableFolder(ResultFolder):
    """TABLE.run of the layout above, and the table."""

    journal_type = TableJournal

    def __init__(self, table: Path) -> None:
        self.target = on_disk(table)
        super().__init__(table.with_name(f"{table.name}.run"), notes=".")
        self._values = self.path / "values.bin"
        self.values: Values

    def started(self, made_with: dict[str, Any], layout: Layout, *, overwrite: bool) -> TableJournal:
        """Checked and begun, as of crops."""
        if self.target.exists() and not self.is_begun and not overwrite:
            raise PatchlightError(
                f"{self.target}: is there already, and no run to go on with ({self.path.name}); use --overwrite to "
                "write it anew, or name another"
            )
        about = made_with | {"shape": layout.shape, "columns": layout.columns}
        self.check(about, overwrite=overwrite)
        journal = self.begin(about, overwrite=overwrite)
        assert isinstance(journal, TableJournal)
        self.open_values(layout)
        return journal

    def check_photos(self, photos: Sequence[Input], journal: Journal) -> None:
        """Refuse to put other photos in the place of all that a table has."""
        entries = journal.entries
        if entries and self.target.exists() and not any(photo.file in entries for photo in photos):
            raise PatchlightError(
                f"{self.target}: holds other photos ({len(entries):,}, such as {printable(next(iter(entries)))}) and "
                "none of these; name another table, or use overwrite=True to write it anew"
            )

    def open_values(self, layout: Layout) -> None:
        self.values = Values(self._values, layout)

    def _check_said(self, journal: Journal, photo: Input, row: Row) -> None:
        super()._check_said(journal, photo, row | {"at": None})  # which it has once its array is here

    def _take(self, journal: Journal, photo: Input, record: Mapping[str, Any], array: bytes | None) -> None:
        values = self.values
        numbers = None if array is None else np.frombuffer(array, values.dtype).reshape(values.shape)
        at = None if numbers is None else values.append(numbers)
        journal.append(photo, as_stamp(record["stamp"]), record["row"] | {"at": at})

    def _sync(self, journal: Journal) -> None:
        self.values.sync()  # before the rows that rest on them
        super()._sync(journal)

    def _forget(self) -> None:
        super()._forget()
        self._values.unlink(missing_ok=True)


class TablePipeline(CropPipeline):
    """Photos that are read and looked at, and leave the line with a row and an array."""

    def __init__(
        self, run: CropRun, reader: TableReader, folder: TableFolder, journal: TableJournal, *, whole: bool
    ) -> None:
        super().__init__(run, reader, _NO_CUT, None)
        self.whole, self.at, self.values = whole, journal.at, folder.values

    def _is_done(self, photo: Input, group: str | None = None) -> bool:
        entry = self.journal.entries.get(photo.file)
        if entry is None or entry.reason in TRANSIENT or photo.trouble is not None:
            return False
        at = self.at[photo.file]
        return is_unchanged(photo, entry.stamp) and (at is None or at < self.values.count)

    def _cut(self, photo: _Photo, found: Any) -> None:
        assert isinstance(found, Answer)
        height, width = found.view.source_size
        about = {"version": VERSION, "path": photo.input.path, "status": "ok", "reason": None, "detail": None}
        photo.row = about | {"width": width, "height": height, "crops": []} | found.columns | {"array": found.array}
        photo.done = True

    def _write(self, photo: _Photo) -> None:
        row, array = row_and_array(photo)
        row["at"] = None if array is None else self.values.append(array)
        self.journal.append(photo.input, photo.stamp, row)

    def _sync(self) -> None:
        self.values.sync()  # before the rows that rest on them
        super()._sync()


def row_and_array(photo: _Photo) -> tuple[Row, npt.NDArray[Any] | None]:
    """What a photo that leaves the line says in a table."""
    assert photo.row is not None
    if photo.row["status"] == "ok":
        return photo.row, photo.row.pop("array")
    names = ("version", "path", "status", "reason", "detail")
    return {name: photo.row[name] for name in names} | {"crops": []}, None


def finish_table(
    folder: TableFolder,
    journal: TableJournal,
    inputs: Inputs,
    layout: Layout,
    each: Callable[[Iterable[Input], int, Stage], Iterator[Input]],
    computed: int,
    seconds: float,
) -> TableSummary:
    """Write the table, unless it is there and says just this; `each` passes photos on, and says how far it is."""
    photos = inputs.photos
    reasons = Counter(reason for photo in photos if (reason := journal.entries[photo.file].reason) is not None)
    of = digest(photos, journal)
    finished = read_json(folder.finished) or {}
    stamp = stamp_of(str(folder.target))
    fresh = finished.get("inputs_sha256") == of and stamp is not None and finished.get("table") == list(stamp)

    def records() -> Iterator[tuple[Row, npt.NDArray[Any] | None]]:
        for photo in each(photos, len(photos), "row"):
            row, at = journal.row(photo), journal.at[photo.file]
            yield row, None if at is None else folder.values[at]

    if not fresh:
        write_table(folder.target, layout, len(photos), records)
        stamp = stamp_of(str(folder.target))
        assert stamp is not None
        folder.write_json(folder.finished, {"inputs_sha256": of, "table": list(stamp), "seconds": round(seconds, 2)})
        folder.anew.unlink(missing_ok=True)
    return TableSummary(
        table=folder.target,
        photos=len(photos),
        computed=computed,
        failed=sum(reasons.values()),
        reasons=dict(sorted(reasons.items())),
        skipped=inputs.skipped,
        seconds=seconds,
        rate=computed / seconds if computed and seconds > 0 else 0.0,
        left_out=0 if fresh else len(journal.entries) - len(photos),
        nothing_to_do=fresh,
    )
