"""Files that tables are written to: a row a photo, in the order of the inputs, whole or not at all.

| ends in | what it is |
|---|---|
| .parquet | a Parquet file; numbers are a list of fixed length in the column `features` (pyarrow) |
| .npz | an array a column (numpy) |
| .zarr | a Zarr group, an array a column, numbers in chunks of rows |
| .lance | a Lance dataset, with the columns of the Parquet file |
| .csv, .jsonl | text, for what has no arrays |

A path that is not UTF-8 stands in a table with backslashes for the bytes that are not.
"""

import contextlib
import importlib
import io
import json
import math
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from patchlight.batch.results import csv_line
from patchlight.errors import PatchlightError
from patchlight.files import replacing, writing
from patchlight.remote import on_disk

ROWS_AT_ONCE = 1024
"""That are in memory together, fewer where a row is long."""

_BYTES_AT_ONCE = 64 * 2**20

ARRAY = "features"
"""The column of numbers."""

_NEEDS = {".parquet": "pyarrow", ".lance": "lance", ".zarr": "zarr"}
_TEXT = (".csv", ".jsonl")
KINDS = (".parquet", ".npz", ".zarr", ".lance", *_TEXT)

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of a table."""

    columns: dict[str, str]
    """Name to kind: text, whole, number, texts (a list), numbers (a list)."""
    shape: tuple[int, ...] | None = None
    """Of each row's array, if rows have one."""
    dtype: str = "float32"
    about: dict[str, Any] | None = None
    """What else the file says of itself: model, settings."""

    @property
    def length(self) -> int:
        """Numbers in a row's array."""
        return math.prod(self.shape or (0,))


def kind_of(path: Path, *, arrays: bool) -> str:
    """The ending by which a table is written; refused where it cannot be."""
    kind = path.suffix.lower()
    able = [each for each in KINDS if not (arrays and each in _TEXT)]
    if kind not in able:
        raise PatchlightError(f"{path}: a table ends in {', '.join(able[:-1])} or {able[-1]}; name it so")
    _library(kind)
    return kind


def _library(kind: str) -> Any:
    """The library behind a kind of table."""
    name = _NEEDS.get(kind)
    if name is None:
        return None
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        how = {"lance": "pip install pylance", "zarr": "pip install zarr"}.get(name, "pip install 'patchlight[tables]'")
        raise PatchlightError(f"{kind} tables need {name}; {how}, or name a table that ends in .npz") from None


def write_table(
    path: Path, layout: Layout, count: int, records: Callable[[], Iterator[tuple[Record, npt.NDArray[Any] | None]]]
) -> None:
    """`records` gives each row's values by column, and its array (None of a photo that failed), `count` of them."""
    kind = kind_of(path, arrays=layout.shape is not None)
    at_once = min(ROWS_AT_ONCE, max(1, _BYTES_AT_ONCE // max(1, 4 * layout.length)))
    with writing(path):
        if kind in (".zarr", ".lance"):
            with _replacing_folder(path) as temporary:
                {".zarr": _write_zarr, ".lance": _write_lance}[kind](temporary, layout, count, records, at_once)
        else:
            write = {".parquet": _write_parquet, ".npz": _write_npz, ".csv": _write_csv, ".jsonl": _write_jsonl}[kind]
            with replacing(path) as temporary:
                write(temporary, layout, count, records, at_once)


@contextlib.contextmanager
def _replacing_folder(path: Path) -> Iterator[Path]:
    """As `replacing`, for tables that are folders: what was there stays until the new one is whole."""
    temporary, before = (path.with_name(f".{path.name}.{os.getpid()}.{end}") for end in ("tmp", "old"))
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        yield temporary
        if path.exists():
            path.rename(before)
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(before, ignore_errors=True)


def _parts(
    records: Callable[[], Iterator[tuple[Record, npt.NDArray[Any] | None]]], at_once: int
) -> Iterator[list[tuple[Record, npt.NDArray[Any] | None]]]:
    part: list[tuple[Record, npt.NDArray[Any] | None]] = []
    for each in records():
        part.append(each)
        if len(part) == at_once:
            yield part
            part = []
    if part:
        yield part


def _text(value: Any) -> Any:
    return value if value is None else str(value).encode("utf-8", "backslashreplace").decode()


# Parquet and Lance, by way of Arrow


def _arrow(layout: Layout) -> Any:
    """The schema."""
    pa = importlib.import_module("pyarrow")
    kinds = {
        "text": pa.string(),
        "whole": pa.int32(),
        "number": pa.float32(),
        "texts": pa.list_(pa.string()),
        "numbers": pa.list_(pa.float32()),
    }
    fields = [pa.field(name, kinds[kind]) for name, kind in layout.columns.items()]
    if layout.shape is not None:
        number = pa.float16() if layout.dtype == "float16" else pa.float32()
        fields.append(pa.field(ARRAY, pa.list_(number, layout.length)))
    return pa.schema(fields, metadata={"patchlight": _about(layout)})


def _about(layout: Layout) -> str:
    return json.dumps((layout.about or {}) | {"shape": layout.shape}, sort_keys=True)


def _batches(layout: Layout, records: Any, at_once: int) -> Iterator[Any]:
    pa = importlib.import_module("pyarrow")
    schema = _arrow(layout)
    for part in _parts(records, at_once):
        columns = []
        for name, kind in layout.columns.items():
            values: list[Any] = [record.get(name) for record, _ in part]
            if kind == "text":
                values = [_text(value) for value in values]
            elif kind == "texts":
                values = [None if value is None else [_text(each) for each in value] for value in values]
            columns.append(pa.array(values, schema.field(name).type))
        if layout.shape is not None:
            filled = np.zeros((len(part), layout.length), layout.dtype)
            for row, (_, array) in zip(filled, part, strict=True):
                if array is not None:
                    row[:] = array.reshape(-1)
            missing = pa.array([array is None for _, array in part])
            flat = pa.array(filled.reshape(-1), schema.field(ARRAY).type.value_type)
            columns.append(pa.FixedSizeListArray.from_arrays(flat, layout.length, mask=missing))
        yield pa.record_batch(columns, schema=schema)


def _write_parquet(path: Path, layout: Layout, count: int, records: Any, at_once: int) -> None:
    parquet = importlib.import_module("pyarrow.parquet")
    with parquet.ParquetWriter(path, _arrow(layout), compression="zstd", use_dictionary=False) as writer:
        for batch in _batches(layout, records, at_once):
            writer.write_batch(batch)


def _write_lance(path: Path, layout: Layout, count: int, records: Any, at_once: int) -> None:
    pa = importlib.import_module("pyarrow")
    batches = pa.RecordBatchReader.from_batches(_arrow(layout), _batches(layout, records, at_once))
    _library(".lance").write_dataset(batches, str(path))


# NumPy and Zarr


def _columns(layout: Layout, records: Any) -> dict[str, npt.NDArray[Any]]:
    """Everything but the arrays. What is not there is "", -1 or NaN; lists are texts in JSON."""
    values: dict[str, list[Any]] = {name: [] for name in layout.columns}
    for record, _ in records():
        for name, kind in layout.columns.items():
            value = record.get(name)
            if kind == "text":
                value = _text(value) or ""
            elif kind == "whole":
                value = -1 if value is None else value
            elif kind == "number":
                value = math.nan if value is None else value
            else:
                value = "" if value is None else json.dumps(value)
            values[name].append(value)
    kinds: dict[str, Any] = {"whole": np.int32, "number": np.float32}
    return {name: np.array(values[name], kinds.get(kind, np.str_)) for name, kind in layout.columns.items()}


def _rows(layout: Layout, records: Any, at_once: int) -> Iterator[npt.NDArray[Any]]:
    """Arrays of several rows, NaN where there is none."""
    for part in _parts(records, at_once):
        block = np.full((len(part), *(layout.shape or ())), np.nan, layout.dtype)
        for row, (_, array) in zip(block, part, strict=True):
            if array is not None:
                row[...] = array.reshape(row.shape)
        yield block


def _write_npz(path: Path, layout: Layout, count: int, records: Any, at_once: int) -> None:
    columns = _columns(layout, records) | {"about": np.array(_about(layout))}
    with zipfile.ZipFile(path, "w") as archive:  # whose members have no time of their own
        for name, column in columns.items():
            file = io.BytesIO()
            np.lib.format.write_array(file, column, allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), file.getvalue())
        if layout.shape is not None:
            about = {"descr": np.lib.format.dtype_to_descr(np.dtype(layout.dtype)), "fortran_order": False}
            with archive.open(zipfile.ZipInfo(f"{ARRAY}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(member, about | {"shape": (count, *layout.shape)})
                for block in _rows(layout, records, at_once):
                    member.write(block.tobytes())


def _write_zarr(path: Path, layout: Layout, count: int, records: Any, at_once: int) -> None:
    zarr = _library(".zarr")
    group = zarr.open_group(str(path), mode="w", attributes=(layout.about or {}) | {"shape": layout.shape})
    for name, column in _columns(layout, records).items():
        if column.dtype.kind == "U":  # Zarr's texts of fixed length are no part of its standard yet
            letters = zarr.core.dtype.VariableLengthUTF8() if hasattr(zarr.core, "dtype") else str
            group.create_array(name, shape=column.shape, dtype=letters)[...] = column.astype(object)
        else:
            group.create_array(name, data=column)
    if layout.shape is not None:
        shape = (count, *layout.shape)
        chunks = (min(at_once, max(1, count)), *layout.shape)
        array = group.create_array(ARRAY, shape=shape, dtype=layout.dtype, chunks=chunks)
        start = 0
        for block in _rows(layout, records, at_once):
            array[start : start + len(block)] = block
            start += len(block)


# Text


def _write_csv(path: Path, layout: Layout, count: int, records: Any, at_once: int) -> None:
    with path.open("wb") as file:
        file.write(csv_line(list(layout.columns)))
        for record, _ in records():
            file.write(csv_line([_cell(record.get(name)) for name in layout.columns]))


def _cell(value: Any) -> Any:
    return ";".join(map(str, value)) if isinstance(value, list | tuple) else value


def _write_jsonl(path: Path, layout: Layout, count: int, records: Any, at_once: int) -> None:
    with path.open("w", encoding="ascii") as file:
        for record, _ in records():
            file.write(json.dumps({name: record.get(name) for name in layout.columns}) + "\n")


# Reading


@dataclass(frozen=True, slots=True)
class Features:
    """The rows of a table that have features."""

    paths: list[str]
    features_ND: npt.NDArray[Any]
    about: dict[str, Any]
    failed: int = 0
    """Rows without."""


def read_features(path: str | os.PathLike[str]) -> Features:
    """What `embed` wrote, of vectors: paths and features_ND of the photos that could be used."""
    table = on_disk(path)
    if not table.exists():
        raise PatchlightError(f"{table}: there is no such table; `patchlight embed PHOTOS --out {table}` writes one")
    kind = kind_of(table, arrays=True)
    try:
        names, statuses, features, about = _READERS[kind](table)
        features = np.asarray(features)  # NumPy gives the bytes of a damaged array
        if features.ndim not in (0, 2):
            raise PatchlightError("holds dense features; neighbours need a vector a photo (pooled or cls)")
        good = np.array([status == "ok" for status in statuses], bool)
        paths = [name for name, usable in zip(names, good, strict=True) if usable]
        kept_ND = features[good]
    except PatchlightError as error:
        raise PatchlightError(f"{table}: {error}") from None
    except Exception as error:  # whatever a damaged file leads the libraries into
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise PatchlightError(f"{table}: is no table of features that can be read ({reason}); write it again") from None
    if not paths:
        raise PatchlightError(f"{table}: holds no photo with features")
    return Features(paths, kept_ND, about, int(len(good) - good.sum()))


def _read_arrow(table: Any) -> tuple[Sequence[str], Sequence[str], npt.NDArray[Any], dict[str, Any]]:
    for name in ("path", "status", ARRAY):
        if name not in table.column_names:
            raise PatchlightError(f"is no table of features (it has no column {name!r}); `patchlight embed` writes one")
    table.select(["path", "status", ARRAY]).validate(full=True)  # a false offset would end the process
    about = json.loads((table.schema.metadata or {}).get(b"patchlight", b"{}"))
    column = table.column(ARRAY).combine_chunks()
    column = column.combine_chunks() if hasattr(column, "combine_chunks") else column
    length = column.type.list_size
    values = column.fill_null([0.0] * length) if column.null_count else column
    shape = about.get("shape") or [length]
    flat = values.flatten().to_numpy(zero_copy_only=False)
    return table.column("path").to_pylist(), table.column("status").to_pylist(), flat.reshape(-1, *shape), about


def _read_parquet(path: Path) -> Any:
    return _read_arrow(importlib.import_module("pyarrow.parquet").read_table(path))


def _read_lance(path: Path) -> Any:
    return _read_arrow(_library(".lance").dataset(str(path)).to_table())


def _read_npz(path: Path) -> Any:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        return arrays["path"].tolist(), arrays["status"].tolist(), arrays[ARRAY], json.loads(str(arrays["about"]))


def _read_zarr(path: Path) -> Any:
    group = _library(".zarr").open_group(str(path), mode="r")
    return list(group["path"][:]), list(group["status"][:]), group[ARRAY][:], dict(group.attrs)


_READERS: dict[str, Callable[[Path], Any]] = {
    ".parquet": _read_parquet,
    ".lance": _read_lance,
    ".npz": _read_npz,
    ".zarr": _read_zarr,
}
