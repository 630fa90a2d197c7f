"""What machines of a cluster do with blocks of photos, and the parts in which they leave them.

A block goes through three hands, see on_ray.py: its photos are read, looked at, and cut. Then all that is said of them
is in a part, a Parquet file in the folder of the run, from which it goes into the journal. A part is written whole or
not at all, so that whatever dies on the way costs the blocks that it was at. What reads and cuts does without torch.
"""

import importlib
import json
import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from patchlight import __version__
from patchlight.batch.inputs import Input
from patchlight.batch.pool import Pool
from patchlight.batch.report import thumbnail_name
from patchlight.batch.rows import Row, error_row
from patchlight.batch.work import Crops, Failed, Seen, Stamp, cut_photo, read_photo, result_of
from patchlight.config import PreprocessConfig
from patchlight.errors import PatchlightError
from patchlight.files import replacing, writing

Block = dict[str, Any]
"""`part`, the name of its part; `photos`, pickled: what is known of them so far; `error`, where nothing can be done."""

SIGN = "here"
"""A file in the folder of parts, by which a machine sees that it is the same folder."""

MOST_DEATHS = 2
"""Of those that look, at the same photo, before it is the photo that is left out."""

_COLUMNS = ("path", "status", "reason", "record")


@dataclass(slots=True)
class Said:
    """What is said of a photo: all that the journal is to hold."""

    input: Input
    stamp: Stamp | None
    row: Row
    array: npt.NDArray[Any] | None = None
    found: Row | None = None
    mark: str | None = None
    encoded: int = 0
    crop: dict[str, Any] | None = None
    """What `cut_photo` is to be called with, where there is something to cut."""


def block(part: str, photos: Sequence[Any], error: str = "") -> Block:
    return {"part": part, "photos": pickle.dumps(photos, pickle.HIGHEST_PROTOCOL), "error": error}


@dataclass(frozen=True, slots=True)
class Place:
    """What every machine has to see, by paths that are the same on all."""

    parts: Path
    base: str | None
    """The folder of the photos, if it is one of a file system."""
    version: str = __version__

    def check(self) -> None:
        machine = os.uname().nodename
        if self.version != __version__:
            raise PatchlightError(
                f"{machine}: has Patchlight {__version__}, and the run was started by {self.version}; install the same"
            )
        if not (self.parts / SIGN).exists():
            raise PatchlightError(
                f"{machine}: does not see {self.parts}; name a folder with --out that all machines of the cluster share"
            )
        if self.base is not None and not os.path.isdir(self.base):
            raise PatchlightError(
                f"{machine}: does not see {self.base}; the photos must lie where all machines of the cluster see them"
            )


class Hand:
    """One that a block goes through. What is wrong is handed on to the machine that was asked, in our own words: Ray
    would wrap it in others, and try again."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.has_begun = False

    def begin(self) -> None:
        """Before the first block."""

    def work(self, part: str, photos: Any) -> Sequence[Any]:
        raise NotImplementedError

    def __call__(self, given: Block) -> Block:
        if given["error"]:
            return given
        try:
            if not self.has_begun:
                self.place.check()
                self.begin()
                self.has_begun = True
            return block(given["part"], self.work(given["part"], pickle.loads(given["photos"])))
        except PatchlightError as error:
            return block(given["part"], (), str(error))


class Reads(Hand):
    """Reads the photos of blocks, in processes of its own, which may die of one."""

    def __init__(self, place: Place, workers: int, config: PreprocessConfig, thumbs: Path | None, whole: bool) -> None:
        super().__init__(place)
        self.workers, self.config, self.thumbs, self.whole = workers, config, thumbs, whole

    def begin(self) -> None:
        self.pool = Pool(self.workers)

    def work(self, part: str, photos: Any) -> Sequence[Any]:
        """Inputs, and what is said of them instead; then also what was read of each."""
        reading = [None if photo.trouble is not None else self._read(photo) for photo, _ in photos]
        seen = [None if each is None else result_of(each) for each in reading]
        return [(*photo, each) for photo, each in zip(photos, seen, strict=True)]

    def _read(self, photo: Input) -> Any:
        thumb = None if self.thumbs is None else self.thumbs / thumbnail_name(photo.place)
        return self.pool.submit(read_photo, photo.file, self.config, thumb, False, self.whole)


class Deaths:
    """At which photos of a block the processes died that looked at it: notes beside its part, as long as there is none.

    The first to look has the photos in batches. Whoever comes after it takes them one by one, and notes each before it
    is looked at.
    """

    def __init__(self, parts: Path, part: str) -> None:
        self.path = parts / f"{part}.tries"
        try:
            tries = self.path.read_text().split("\n")
        except FileNotFoundError:
            tries = []
        self.before = len(tries)
        ends = Counter(each.split()[-1] for each in tries if each)
        self.guilty = {int(number) for number, count in ends.items() if count >= MOST_DEATHS}
        self._add("\n" if tries else "")

    def note(self, number: int) -> None:
        self._add(f"{number} ")

    def forget(self) -> None:
        self.path.unlink(missing_ok=True)

    def _add(self, text: str) -> None:
        with writing(self.path), self.path.open("a") as file:
            file.write(text)


class Cuts(Hand):
    """Cuts the crops of blocks, and writes their parts."""

    def __init__(self, place: Place, workers: int) -> None:
        super().__init__(place)
        self.workers = workers
        self.pool: Pool | None = None

    def work(self, part: str, photos: Any) -> Sequence[Any]:
        """What is said of each; then there is the part, and nothing more to say."""
        if self.pool is None and any(each.crop for each in photos):
            self.pool = Pool(self.workers)
        cutting = [(each, self.pool.submit(cut_photo, **each.crop)) for each in photos if each.crop and self.pool]
        for each, future in cutting:
            _take_crops(each, result_of(future))
        write_part(self.place.parts / part, photos)
        return ()


def _take_crops(said: Said, cut: Crops | Failed) -> None:
    if isinstance(cut, Failed):
        reason = "gone" if cut.reason == "missing" and said.input.found else cut.reason
        said.row, said.stamp = error_row(said.input.path, reason, cut.detail), cut.stamp
        said.found = said.mark = None
        return
    said.row["crops"] = [f"crops/{name}" for name in cut.names]
    said.row["cuts"] = [box | shown for box, shown in zip(said.row["cuts"], cut.cuts, strict=True)]
    said.encoded *= cut.encoded


def write_part(path: Path, said: Sequence[Said]) -> None:
    """A row a photo: `path` (as in tables), `status`, `reason`; `record`, which is all of it, in JSON; and `array`, of
    tables the bytes of its numbers."""
    pa, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    records = [
        {
            "path": each.input.path,
            "file": each.input.file,
            "place": each.input.place,
            "stamp": each.stamp,
            "row": each.row,
            "found": each.found,
            "cut": each.mark,
            "encoded": each.encoded,
        }
        for each in said
    ]
    columns = {
        "path": [each.input.path.encode("utf-8", "backslashreplace").decode() for each in said],
        "status": [each.row["status"] for each in said],
        "reason": [each.row["reason"] for each in said],
        "record": [json.dumps(record) for record in records],
        "array": [None if each.array is None else np.ascontiguousarray(each.array).tobytes() for each in said],
    }
    kinds = [(name, pa.string()) for name in _COLUMNS] + [("array", pa.binary())]
    with writing(path), replacing(path) as temporary:
        parquet.write_table(pa.table(columns, schema=pa.schema(kinds)), temporary, compression="zstd")


def read_part(path: Path) -> Iterator[tuple[Input, Mapping[str, Any], bytes | None]]:
    """The photos of a part, their records, and the bytes of their arrays."""
    parquet = importlib.import_module("pyarrow.parquet")
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=256, columns=["record", "array"]):
            for text, array in zip(*(batch.column(index).to_pylist() for index in range(2)), strict=True):
                record = json.loads(text)
                yield Input(record["path"], record["file"], record["place"]), record, array


class HandedOn(Pool):
    """Stands for the processes where a block is looked at: what they would have read was read, and what they are to cut
    is cut later."""

    def __init__(self) -> None:
        super().__init__(0)
        self.seen: dict[str, Seen | Failed] = {}
        self.crops: dict[str, dict[str, Any]] = {}

    def submit(self, function: Callable[..., Any], /, *given: Any, **named: Any) -> Any:
        if function is cut_photo:
            names = ("file", "stamp", "boxes", "how", "folder", "place")
            call = dict(zip(names, given, strict=True)) | named
            self.crops[call["file"]] = call
            return super().submit(Crops, (), tuple({} for _ in call["boxes"]), 1)
        assert function is read_photo
        return super().submit(self.seen.__getitem__, given[0])
