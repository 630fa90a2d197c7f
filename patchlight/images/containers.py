"""Photos in files of many: tar shards (webdataset), Parquet and Arrow tables with a column of images.

A photo in one is named by the file, "::" and its name there, or the number of its row: shards/000.tar::a/b.jpg,
photos.parquet::17. Columns are as Hugging Face's `datasets` writes them (a struct with `bytes`), or plain bytes.
"""

import bisect
import functools
import json
import os
import tarfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from patchlight.errors import PatchlightError
from patchlight.files import printable
from patchlight.remote import Stamp, Unreachable, as_path, below_folders, fetch, is_remote, opened, tried
from patchlight.remote import stamp as remote_stamp

T = TypeVar("T")

_TAR = (".tar",)
TABLES = (".parquet", ".arrow", ".feather")
_BETWEEN = "::"
_STAMP_SECONDS = 30
_GROUP_BYTES = 2**26
"""Of a table's groups of rows, kept for the photos that come from them next: small tables are read once."""

IMAGE_NAMES = ("image", "img", "photo", "picture", "jpg", "jpeg", "png", "webp", "bytes", "content")
"""Of columns, those that are more likely to be the images first."""

LABEL_NAMES = ("label", "labels", "class", "category", "target", "cls")
"""Of columns of labels, the likelier ones first."""

NAME_LABELS = "name the one of labels with data.label_column (`evaluate` takes --label-column)"


def holds_photos(path: object) -> bool:
    """Whether a file's name says that it is a shard or a table."""
    return isinstance(path, str) and path.lower().endswith((*_TAR, *TABLES)) and not os.path.isdir(path)


def _parted(path: str) -> tuple[str, str] | None:
    """The file, and the photo in it."""
    file, between, member = path.partition(_BETWEEN)
    return (file, member) if between and member and holds_photos(file) else None


def is_elsewhere(path: object) -> bool:
    """Whether this names no file of the system: a photo at a URL, in a shard or in a table."""
    return isinstance(path, str) and (is_remote(path) or (_parted(path) is not None and not os.path.lexists(path)))


def place_of(path: str) -> str:
    """A photo's absolute path, also of one elsewhere, for which there is none: it leads down from where that lies."""
    parted = _parted(path) if is_elsewhere(path) else None
    if parted is None:
        return as_path(path) if is_remote(path) else os.path.abspath(path)
    return f"{place_of(parted[0])}{_BETWEEN}{below_folders(parted[1])}"


def read_elsewhere(path: str) -> bytes:
    """The bytes of a photo; raises `Unreachable`."""
    parted = _parted(path)
    if parted is None:
        return fetch(path)
    file, member = parted
    try:
        return _tried(file, lambda: _read_member(file, member))
    except (OSError, LookupError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError | LookupError)
        raise Unreachable(" ".join(f"{printable(file)}: {error}".split())[:200], missing=missing) from None


def _read_member(file: str, member: str) -> bytes:
    if not file.lower().endswith(_TAR):
        content = _table(file, stamp_of_file(file)).image(int(member))
        if content is None:
            raise Unreachable("its row holds no image")
        return content
    places = _places(file, stamp_of_file(file))
    if member not in places:
        raise Unreachable("the shard holds no such photo", missing=True)
    return read_part(file, *places[member])


def read_part(file: str, start: int, size: int) -> bytes:
    """So many bytes of a file, wherever it lies; raises `Unreachable` or OSError."""
    if is_remote(file):
        return fetch(file, start, start + size)
    with open(file, "rb") as content:
        content.seek(start)
        return content.read(size)


def stamp_elsewhere(path: str) -> Stamp | None:
    """What a photo is known by: the stamp of the file that it lies in."""
    parted = _parted(path)
    return remote_stamp(path) if parted is None else stamp_of_file(parted[0])


def stamp_of_file(file: str) -> Stamp | None:
    if is_remote(file):
        return _lately(file, int(time.monotonic() // _STAMP_SECONDS))
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


@functools.lru_cache(64)
def _lately(file: str, when: int) -> Stamp | None:
    """Asked for once in a while, and not for every photo of a shard."""
    return remote_stamp(file)


def members(file: str, name: str) -> Iterator[tuple[str, Stamp | None]]:
    """Each photo in a shard or table, as what follows the file's name, and what it is known by; raises PatchlightError
    in a line, which calls the file by the name that it was given."""
    stamp, shown = stamp_of_file(file), printable(name)
    with explained(file, shown):
        if file.lower().endswith(_TAR):
            names: Any = _tried(file, lambda: _places(file, stamp))
        else:
            names = range(_tried(file, lambda: _table(file, stamp).rows))
    if not len(names):
        raise PatchlightError(f"{shown}: holds no photos; leave it out")
    for name in names:
        yield f"{_BETWEEN}{name}", stamp


@contextmanager
def explained(file: str, shown: str) -> Iterator[None]:
    """Turn whatever reading a shard or a table raises into PatchlightError, a line that calls the file as `shown`."""
    try:
        yield
    except PatchlightError as error:
        raise PatchlightError(f"{shown}: {error}") from None
    except Unreachable as error:
        raise PatchlightError(f"{shown}: cannot be read ({error.detail}); correct it or leave it out") from None
    except FileNotFoundError:
        raise PatchlightError(f"{shown}: there is no such file; correct the path or leave it out") from None
    except Exception as error:  # whatever a damaged file leads the libraries into
        reason = " ".join(str(error).split())[:160].rstrip(".")
        kind = "an uncompressed tar file" if file.lower().endswith(_TAR) else "a table"
        raise PatchlightError(f"{shown}: is not {kind} that can be read ({reason}); make or fetch it again") from None


def _tried(file: str, call: Callable[[], T]) -> T:
    """Tried again where the network may be what failed; a damaged file on a disk, which libraries may call an OSError,
    stays damaged."""
    return tried(call) if is_remote(file) else call()


def open_anywhere(file: str) -> IO[bytes]:
    return opened(file) if is_remote(file) else open(file, "rb")


# Shards

_SUFFIXES = (
    ".jpg",
    ".jpeg",
    ".png",
    ".webp",
    ".bmp",
    ".gif",
    ".tif",
    ".tiff",
    ".avif",
    ".heic",
    ".heif",
    ".jp2",
    ".ppm",
)


@functools.lru_cache(32)
def _places(file: str, stamp: Stamp | None) -> dict[str, tuple[int, int]]:
    """(start, bytes) of each photo in a shard, by its headers alone."""
    try:
        with open_anywhere(file) as content, tarfile.open(fileobj=content, mode="r:") as archive:
            return {
                member.name: (member.offset_data, member.size)
                for member in tar_members(archive)
                if member.isreg() and member.name.lower().endswith(_SUFFIXES)
            }
    except (tarfile.TarError, EOFError, LookupError) as error:
        raise ValueError(str(error)) from None  # which no second try would change


def tar_members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The members in their order; raises ReadError where a false size leads back: Python followed that for ever
    until the summer of 2025."""
    place = -1
    for member in archive:
        if member.size < 0 or member.offset <= place:
            raise tarfile.ReadError(f"a header at byte {member.offset:,} leads back")
        place = member.offset
        yield member


# Tables


class _Table:
    """A Parquet or Arrow file, read a group of rows at a time."""

    def __init__(self, file: str) -> None:
        self.file = file
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ModuleNotFoundError:
            raise PatchlightError("tables need pyarrow; pip install 'patchlight[tables]'") from None
        self._kept = ExitStack()
        source = self._kept.enter_context(open_anywhere(file)) if is_remote(file) else pa.memory_map(file)
        self._parquet = self._arrow = None
        if file.lower().endswith(".parquet"):
            self._parquet = pq.ParquetFile(source)
            schema = self._parquet.schema_arrow
            groups = [self._parquet.metadata.row_group(n).num_rows for n in range(self._parquet.num_row_groups)]
        else:
            self._arrow = _read_arrow(source)
            schema, groups = self._arrow.schema, [self._arrow.num_rows]
        self.schema = schema
        self.column = _image_column(schema)
        if self._arrow is not None:
            # Arrow believes the offsets in a file, and a false one ends the process.
            self._arrow.select([self.column]).validate(full=True)
        self._starts = [0]
        for rows in groups:
            self._starts.append(self._starts[-1] + rows)
        self.rows = self._starts[-1]
        self._groups: OrderedDict[int, Any] = OrderedDict()  # the ones used last come last
        self._lock = threading.Lock()  # pyarrow reads a file in one thread at a time

    def values(self, column: str) -> list[Any]:
        """Of a column of few bytes, such as labels."""
        with self._lock:
            table = self._arrow if self._parquet is None else self._parquet.read(columns=[column])
        assert table is not None
        table.select([column]).validate(full=True)
        found: list[Any] = table.column(column).to_pylist()
        return found

    def image(self, row: int) -> bytes | None:
        if not 0 <= row < self.rows:
            raise LookupError(f"row {row} does not exist: the table has {self.rows:,} rows")
        if self._arrow is not None:
            value = self._arrow.column(self.column)[row]
        else:
            group = bisect.bisect_right(self._starts, row) - 1
            with self._lock:
                rows = self._read_group(group)
            value = rows[row - self._starts[group]]
        found = value.as_py()
        if isinstance(found, dict):
            content, path = found.get("bytes"), found.get("path")
            if content is None and path:  # a dataset that was saved without its images
                content = _read_beside(self.file, path)
            found = content
        return found

    def _read_group(self, group: int) -> Any:
        if group not in self._groups:
            assert self._parquet is not None
            rows = self._parquet.read_row_group(group, columns=[self.column]).column(self.column)
            rows.validate(full=True)
            self._groups[group] = rows
            while len(self._groups) > 1 and sum(each.nbytes for each in self._groups.values()) > _GROUP_BYTES:
                self._groups.popitem(last=False)
        self._groups.move_to_end(group)
        return self._groups[group]


def _read_beside(file: str, path: str) -> bytes:
    """The image that a table's row names. The table may be anyone's, and what it names must not be any file that this
    machine can read, nor an address: only what lies below the table's own folder."""
    folder = os.path.dirname(file)
    named = path
    if not is_remote(file) and os.path.isabs(path):
        named = os.path.relpath(os.path.normpath(path), os.path.abspath(folder))
    if is_remote(named) or os.path.isabs(named) or ".." in named.split("/"):
        raise Unreachable(f"its row names {printable(path)}, which is not below the folder of the table"[:200])
    place = os.path.join(folder, os.path.normpath(named))
    if (parted := _parted(place)) is not None and not parted[0].lower().endswith(_TAR):
        raise Unreachable(f"its row names a row of a table, {printable(path)}"[:200])  # perhaps itself
    return read_elsewhere(place) if is_elsewhere(place) else Path(place).read_bytes()


def _read_arrow(source: Any) -> Any:
    import pyarrow as pa

    try:
        return pa.ipc.open_file(source).read_all()
    except pa.ArrowInvalid:  # as `datasets` saves them
        source.seek(0)
        return pa.ipc.open_stream(source).read_all()


def _image_column(schema: Any) -> str:
    import pyarrow as pa

    def holds_bytes(kind: Any) -> bool:
        return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))

    fits = [
        field.name
        for field in schema
        if holds_bytes(field.type)
        or (pa.types.is_struct(field.type) and any(part.name == "bytes" for part in field.type))
    ]
    if not fits:
        names = ", ".join(schema.names[:8])
        raise PatchlightError(f"has no column of images (bytes, or a struct with bytes); its columns are {names}")
    return str(
        min(fits, key=lambda name: IMAGE_NAMES.index(name.lower()) if name.lower() in IMAGE_NAMES else len(IMAGE_NAMES))
    )


def labels_of(file: str, shown: str, column: str | None, *, needed: bool) -> tuple[list[Any], list[str] | None]:
    """The label of each row of a table, None where it has none, and the names of the classes that numbers stand for,
    where the table has them; raises PatchlightError in a line, which calls the file as `shown`.

    `column` is the one of labels; None takes the one that is called so. One that is not `needed` may be missing.
    """
    with explained(file, shown):
        return _tried(file, lambda: _labels(_table(file, stamp_of_file(file)), column, needed))


def _labels(table: _Table, column: str | None, needed: bool) -> tuple[list[Any], list[str] | None]:
    column = _label_column(table.schema, column, needed)
    if column is None:
        return [None] * table.rows, None
    return table.values(column), _class_names(table.schema).get(column)


def _label_column(schema: Any, asked: str | None, needed: bool) -> str | None:
    import pyarrow as pa

    def fits(kind: Any) -> bool:
        plain = kind.value_type if pa.types.is_dictionary(kind) else kind
        return bool(pa.types.is_integer(plain) or pa.types.is_string(plain) or pa.types.is_large_string(plain))

    fitting = [field.name for field in schema if fits(field.type)]
    if asked is not None:
        if asked in fitting:
            return asked
        what = "is not one of texts or whole numbers" if asked in schema.names else "is not there"
        raise PatchlightError(f"its column {asked!r} {what}; its columns are {', '.join(schema.names[:8])}")
    named = {name.lower(): name for name in fitting}
    known = list(_class_names(schema))
    found = next((named[name] for name in LABEL_NAMES if name in named), known[0] if len(known) == 1 else None)
    if found is None and needed:
        raise PatchlightError(
            f"has no column called {', '.join(LABEL_NAMES[:3])} or the like; its columns are "
            f"{', '.join(schema.names[:8])}: {NAME_LABELS}"
        )
    return found


def _class_names(schema: Any) -> dict[str, list[str]]:
    """By column, as `datasets` writes them beside a table."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (LookupError, ValueError, TypeError):
        return {}
    return {
        name: [str(each) for each in feature["names"]]
        for name, feature in (features.items() if isinstance(features, dict) else ())
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and isinstance(feature.get("names"), list)
    }


@functools.lru_cache(8)
def _table(file: str, stamp: Stamp | None) -> _Table:
    return _Table(file)
