"""Files that are written whole or not at all, whatever happens to the process or the machine meanwhile, and folders
that one process writes to at a time. And tables, as people have them."""

import contextlib
import csv
import errno
import fcntl
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from patchlight.errors import PatchlightError


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """A temporary file to write to, which then takes the place of `path`: a reader, or a crash, finds the old or the
    new content. Where writing fails, the old stays and the temporary file goes.

    What is not `durable` is safe from the end of the process alone: for files that are easily made again, it spares the
    wait for the disk.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        if durable:
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if durable:
        sync_folder(path.parent)


class Unwritable(PatchlightError):  # noqa: N818
    """A file cannot be written, and neither could the ones that follow (disk full, no permission)."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the system's error on writing this file into `Unwritable`, whose message says what to do."""
    try:
        yield
    except OSError as error:
        name = printable(str(path))
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise Unwritable(
                f"{name}: the disk is full; free some space and run the same command again to continue"
            ) from None
        raise Unwritable(
            f"{name}: cannot be written ({error.strerror or error}); fix that and run it again to continue"
        ) from None


def printable(name: str) -> str:
    """A file's name as one printable line, whatever bytes are in it."""
    return name if name.isprintable() else ascii(name)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def held_alone(folder: Path, lock: Path, *, begun: Path) -> Iterator[None]:
    """One process works in a folder at a time. The lock, a file in it, goes with its process, however that ends.

    A folder that was made for work which never began (the file `begun` is not there) goes away again.
    """
    made = [each for each in dict.fromkeys((lock.parent, folder)) if not each.exists()]
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    except OSError as error:
        raise PatchlightError(f"{folder}: cannot be written ({error.strerror}); name another folder") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise PatchlightError(
                f"{folder}: another process is working there; wait for it, or name another folder"
            ) from None
        try:
            yield
        finally:
            if made and not begun.exists():
                lock.unlink()
                for each in made:
                    with contextlib.suppress(OSError):
                        each.rmdir()


def open_table(path: Path | str, content: bytes | None = None) -> tuple[str, Any]:
    """The first line of a CSV, and a `csv.reader` of all its rows; they may be parted by semicolons or tabs, too.

    `content` is what the file holds, where it was read already."""
    try:
        text = (Path(path).read_bytes() if content is None else content).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise PatchlightError(f"{path}: is not UTF-8 text; save it as a CSV in UTF-8") from None
    except OSError as error:
        raise PatchlightError(f"{path}: cannot be read ({error.strerror})") from None
    head = text.partition("\n")[0]
    return head, csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=head.count))
