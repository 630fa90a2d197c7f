"""Photos like another one, by the features of a table: found by an index where there is one, and exactly where not.

How alike two photos are is the cosine between their features, once the table's mean was taken off: what all photos have
in common says nothing, and without it unlike photos lie around 0 whatever the model.

TABLE.index         a graph of nearest neighbours (faiss, HNSW), which holds the vectors once more
TABLE.index.json    the table that it was made of
"""

import importlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from patchlight.batch.results import read_json
from patchlight.batch.table_run import embed
from patchlight.batch.tables import Features, read_features
from patchlight.batch.work import stamp_of
from patchlight.errors import PatchlightError
from patchlight.files import printable, replacing, writing
from patchlight.geometry import fit_inside
from patchlight.images.containers import place_of
from patchlight.images.decode import ImageError, Photo, decode
from patchlight.remote import on_disk
from patchlight.weights.load import Loaded, load_or_given

ALIKE = 0.92
"""From here on two photos are near-duplicates; docs/embed.md has what was measured."""

_LINKS, _BUILD, _SEARCH = 16, 128, 128
_NEAR = 32
"""Neighbours of each photo that `dedupe` asks an index for."""

_NUMBERS_AT_ONCE = 2**25


@dataclass(frozen=True, slots=True)
class Match:
    """A photo, and how alike it is to the one asked about, -1 to 1."""

    path: str
    likeness: float


@dataclass(frozen=True, eq=False)
class Neighbours:
    """The photos of a table, ready to be asked."""

    table: Path
    features: Features
    mean_D: npt.NDArray[np.float32]
    vectors_ND: npt.NDArray[np.float32]
    """Centred, of length one."""
    index: Any = None

    @classmethod
    def of(cls, table: str | os.PathLike[str], *, indexed: bool = True) -> "Neighbours":
        """With the index, if there is one of the table as it is."""
        path = Path(table)
        features = read_features(path)
        values_ND = features.features_ND.astype(np.float32)
        mean_D = values_ND.mean(0, dtype=np.float64).astype(np.float32)
        return cls(path, features, mean_D, _unit(values_ND - mean_D), _read_index(path) if indexed else None)

    def nearest(self, queries_QD: npt.NDArray[Any], count: int) -> list[list[tuple[int, float]]]:
        """(row, likeness) of the `count` nearest of each query, the most alike first."""
        vectors_QD = _unit(queries_QD.astype(np.float32) - self.mean_D)
        return self._nearest(vectors_QD, min(count, len(self.vectors_ND)))

    def _nearest(self, vectors_QD: npt.NDArray[np.float32], count: int) -> list[list[tuple[int, float]]]:
        if self.index is not None:
            self.index.hnsw.efSearch = max(_SEARCH, 2 * count)
            rows_QN = self.index.search(vectors_QD, count)[1]
            found = []
            for vector_D, rows in zip(vectors_QD, rows_QN, strict=True):
                own = rows[rows >= 0]
                found.append((own, self.vectors_ND[own] @ vector_D))
        else:
            found = []
            for likeness_QN in _likeness(vectors_QD, self.vectors_ND):
                for row_N in likeness_QN:
                    best = np.argpartition(-row_N, count - 1)[:count]
                    found.append((best, row_N[best]))
        ordered = [sorted(zip(rows.tolist(), near.tolist(), strict=True), key=_by_likeness) for rows, near in found]
        return [[(row, min(1.0, max(-1.0, near))) for row, near in each] for each in ordered]

    def like(self, query_D: npt.NDArray[Any], count: int, *, but: int | None = None) -> list[Match]:
        """The photos most like a vector of features, without the one in this row."""
        (rows,) = self.nearest(query_D[None], count + (but is not None))
        return [Match(self.features.paths[row], near) for row, near in rows if row != but][:count]

    def duplicates(self, least: float = ALIKE) -> list[list[int]]:
        """Rows of photos that are alike, directly or by way of others, in the order of the table."""
        leader = list(range(len(self.vectors_ND)))

        def first(row: int) -> int:
            while leader[row] != row:
                leader[row] = row = leader[leader[row]]
            return row

        for one, other in self._pairs(least):
            low, high = sorted((first(one), first(other)))
            leader[high] = low
        groups: dict[int, list[int]] = {}
        for row in range(len(leader)):
            groups.setdefault(first(row), []).append(row)
        return [group for group in groups.values() if len(group) > 1]

    def _pairs(self, least: float) -> Iterator[tuple[int, int]]:
        if self.index is not None:
            count = min(_NEAR, len(self.vectors_ND))
            for start in range(0, len(self.vectors_ND), 1024):
                part_QD = self.vectors_ND[start : start + 1024]
                for row, near in enumerate(self._nearest(part_QD, count), start):
                    yield from ((row, other) for other, likeness in near if likeness >= least and other != row)
            return
        start = 0
        for likeness_QN in _likeness(self.vectors_ND, self.vectors_ND):
            for row, other in np.argwhere(likeness_QN >= least).tolist():
                if start + row < other:
                    yield start + row, other
            start += len(likeness_QN)


def similar(
    query: Photo,
    table: str | os.PathLike[str],
    count: int = 12,
    *,
    model: str | os.PathLike[str] | Loaded | None = None,
) -> list[Match]:
    """The photos of a table most like a photo, the most alike first, by the table's index if it has one.

    A path that the table has is answered by its row. Else the photo is embedded by the model that the table was made
    with, or by `model`, where that lies elsewhere now; another one is refused.
    """
    if count < 1:
        raise PatchlightError(f"count={count} must be 1 or more")
    known = Neighbours.of(table)
    row = _row_of(query, known.features.paths)
    if row is not None:
        return known.like(known.features.features_ND[row], count, but=row)
    about = known.features.about
    if "model" not in about:
        raise PatchlightError(f"{table}: does not say which model made it; write it again with `patchlight embed`")
    loaded = load_or_given(about["model"] if model is None else model)
    if loaded.provenance.sha256 != about.get("sha256"):
        raise PatchlightError(
            f"{table}: was made with another model than {loaded.provenance.source}; name that one ({about['model']}), "
            "or write the table again"
        )
    return known.like(embed(query, loaded, features=about["features"]), count)


def _row_of(query: Photo, paths: Sequence[str]) -> int | None:
    """Of a photo that is given by a path which the table has, however it is written."""
    if not isinstance(query, str | os.PathLike):
        return None
    place = place_of(os.fspath(query))
    return next((row for row, path in enumerate(paths) if place_of(path) == place), None)


def _by_likeness(each: tuple[int, float]) -> tuple[float, int]:
    return -each[1], each[0]


def _unit(values_ND: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return values_ND / np.maximum(np.linalg.norm(values_ND, axis=1, keepdims=True), 1e-12)


def _likeness(
    vectors_QD: npt.NDArray[np.float32], vectors_ND: npt.NDArray[np.float32]
) -> Iterator[npt.NDArray[np.float32]]:
    """Several rows at a time, so that any table fits."""
    rows = max(1, _NUMBERS_AT_ONCE // max(1, len(vectors_ND)))
    for start in range(0, len(vectors_QD), rows):
        yield vectors_QD[start : start + rows] @ vectors_ND.T


# The index


def faiss() -> Any:
    try:
        return importlib.import_module("faiss")
    except ModuleNotFoundError:
        raise PatchlightError(
            "an index needs faiss; pip install 'patchlight[tables]', or leave out --index: tables are searched without"
        ) from None


def _files(table: Path) -> tuple[Path, Path]:
    return table.with_name(f"{table.name}.index"), table.with_name(f"{table.name}.index.json")


def _as_it_is(table: Path) -> dict[str, Any]:
    return {"table": table.name, "stamp": list(stamp_of(str(table)) or ())}


def write_index(table: str | os.PathLike[str]) -> Path:
    """An index of a table beside it, unless there is one; the same table gives the same bytes."""
    path = Path(table)
    index_path, about = _files(path)
    library = faiss()
    if index_path.exists() and read_json(about) == _as_it_is(path):
        return index_path
    known = Neighbours.of(path, indexed=False)
    index = library.IndexHNSWFlat(known.vectors_ND.shape[1], _LINKS, library.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = _BUILD
    threads = library.omp_get_max_threads()
    library.omp_set_num_threads(1)  # several would link in an order of their own
    try:
        index.add(known.vectors_ND)
    finally:
        library.omp_set_num_threads(threads)
    with writing(index_path):
        about.unlink(missing_ok=True)
        with replacing(index_path) as temporary:
            library.write_index(index, str(temporary))
        with replacing(about) as temporary:
            temporary.write_text(json.dumps(_as_it_is(path)) + "\n")
    return index_path


def _read_index(table: Path) -> Any:
    """None where there is none of the table as it is."""
    index, about = _files(table)
    if not index.exists() or read_json(about) != _as_it_is(table):
        return None
    try:
        library = faiss()
    except PatchlightError:
        return None  # then every vector is compared, which finds the same, and takes longer
    try:
        return library.read_index(str(index))
    except RuntimeError:
        raise PatchlightError(f"{index}: is no index that can be read; remove it, or write it again") from None


# To look at

_TILE, _GAP, _LINE = 200, 8, 18


def contact_sheet(photos: Sequence[tuple[str, str]], columns: int = 6) -> Image.Image:
    """Photos (paths; "" for an empty place) with a line below each, row by row."""
    columns = max(1, min(columns, len(photos)))
    rows = -(-len(photos) // columns)
    wide, high = _TILE + _GAP, _TILE + _LINE + _GAP
    sheet = Image.new("RGB", (columns * wide + _GAP, rows * high + _GAP), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for place, (path, line) in enumerate(photos):
        if not path:
            continue
        left, top = _GAP + place % columns * wide, _GAP + place // columns * high
        try:
            image = decode(path, fast_size=(_TILE, _TILE)).image
            image = image.resize(fit_inside(image.size, _TILE), Image.Resampling.BICUBIC, reducing_gap=2.0)
        except ImageError as error:
            image = Image.new("RGB", (_TILE, _TILE), "#ddd")
            ImageDraw.Draw(image).text((8, _TILE // 2 - 8), error.reason, "#555", font)
        sheet.paste(image, (left + (_TILE - image.width) // 2, top + (_TILE - image.height) // 2))
        draw.text((left, top + _TILE + 1), _fitting(line, draw, font), "#222", font)
    return sheet


def write_sheet(path: Path, photos: Sequence[tuple[str, str]], columns: int = 6) -> None:
    on_disk(path)
    sheet = contact_sheet(photos, columns)
    with writing(path), replacing(path) as temporary:
        sheet.save(temporary, "JPEG", quality=85)


def _fitting(line: str, draw: ImageDraw.ImageDraw, font: Any) -> str:
    line = printable(line)
    if draw.textlength(line, font) <= _TILE:
        return line
    head, _, tail = line.partition("  ")
    while tail and draw.textlength(f"{head}  ...{tail}", font) > _TILE:
        tail = tail[1:]
    return f"{head}  ...{tail}"
