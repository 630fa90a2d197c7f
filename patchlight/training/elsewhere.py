"""Sets of photos that are no files of this machine: in buckets, on the web, in rows of tables.

A listing is made into folders that are used like pathlib's, and a photo is read at its address when it is asked for,
in the way that every photo of a bucket or a table is read (remote.py, images/containers.py).
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from patchlight.errors import PatchlightError
from patchlight.files import printable
from patchlight.images.containers import is_elsewhere, labels_of, members, read_elsewhere
from patchlight.images.decode import ImageError
from patchlight.remote import Listing, Unreachable, as_path, listed, name_in
from patchlight.training.data import UNLABELLED, Dataset, Names, Note, in_order


class Listed:
    """A file or a folder of a listing, with as much of `pathlib.Path` as opening a set takes."""

    def __init__(self, address: str, name: str, size: int = -1, inside: dict[str, "Listed"] | None = None) -> None:
        self.address, self.name, self.size = address, name, size
        self.inside = inside
        """What a folder holds; None of a file."""

    @property
    def suffix(self) -> str:
        return os.path.splitext(self.name)[1]

    def is_dir(self) -> bool:
        return self.inside is not None

    def is_file(self) -> bool:
        return self.inside is None

    def iterdir(self) -> Iterator["Listed"]:
        return iter((self.inside or {}).values())

    def __truediv__(self, name: str) -> "Listed":
        assert self.inside is not None
        return self.inside[name] if name else self

    def __lt__(self, other: "Listed") -> bool:
        return self.name < other.name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Listed) and self.address == other.address

    def __hash__(self) -> int:
        return hash(self.address)

    def __str__(self) -> str:
        return self.address


def listed_folder(url: str) -> Listed:
    """What a URL stands for: the one file that it names, or a folder of all that it, a pattern or a list stands for."""
    found: Listing = listed(url)
    if found.by_name:
        address, stamp = found.files[0]
        return Listed(address, name_in(address).rpartition("/")[2], -1 if stamp is None else stamp[0])
    top = Listed(url, found.root.rpartition("/")[2], inside={})
    for address, stamp in found.files:
        named = address.partition("?")[0] if name_in(address) != address else address
        *folders, name = as_path(named)[len(found.root) :].strip("/").split("/")
        place = top
        for folder in folders:
            assert place.inside is not None
            below = place.inside.get(folder)
            if below is None or below.inside is None:  # a bucket may have a file of the name, too
                below = place.inside[folder] = Listed(f"{place.address.rstrip('/')}/{folder}", folder, inside={})
            place = below
        assert place.inside is not None
        while name in place.inside:  # URLs may differ behind their "?" alone
            name = f"~{name}"
        if name:
            place.inside[name] = Listed(address, name, -1 if stamp is None else stamp[0])
    return top


class Addressed:
    """Photos that are each read at an address: a URL, or a row of a table."""

    def __init__(self, addresses: Names, sizes_N: npt.NDArray[np.int64]) -> None:
        self.addresses = addresses
        self.sizes_N = sizes_N  # in bytes; -1 where that is not known

    def select(self, indices: npt.NDArray[np.int64]) -> "Addressed":
        return Addressed(Names(self.addresses[int(index)] for index in indices), self.sizes_N[indices])

    def source(self, index: int, name: str) -> str | bytes:
        """What `decode` takes."""
        address = self.addresses[index]
        if not is_elsewhere(address):
            return address
        try:
            return read_elsewhere(address)
        except Unreachable as error:
            raise out_of_reach(address, error) from None


def out_of_reach(name: str, error: Unreachable) -> PatchlightError:
    """What to raise for a photo that cannot be read.

    One that may be there later is no `ImageError`, which it would be left out for: a run that goes on later would find
    that it has begun with others.
    """
    if error.momentary:
        return PatchlightError(
            f"{printable(name)}: cannot be reached ({error.detail}); once it can, run the same command again, or go on "
            "with resume=True"
        )
    return ImageError(printable(name), "missing" if error.missing else "unreadable", error.detail)


# Tables


def open_tables(paths: Sequence[Path | Listed], column: str | None, *, labelled: bool, unnamed: bool) -> Dataset:
    """Parquet and Arrow tables, each row a photo with its label, see `labels_of`. Names are "table.parquet::17"."""
    rows: list[tuple[str, str, str | None]] = []  # the address, the name and the label of each
    known: list[list[str] | None] = []
    alike = len({path.name for path in paths}) < len(paths)
    for path in paths:
        file = str(path)
        found, class_names = labels_of(file, printable(file), column, needed=labelled)
        known.append(class_names)
        for label, (member, _) in zip(found, members(file, file), strict=True):
            name = f"{file if alike else path.name}{member}"
            rows.append((f"{file}{member}", name, _class_of(label, class_names, name)))
    notes: list[Note] = []
    if any(label is None for *_, label in rows):
        if not labelled:  # of some is of none
            rows = [(address, name, UNLABELLED) for address, name, _ in rows]
        elif not unnamed:
            notes = [
                Note("row without a label", f"{name}: has no label: left out") for _, name, label in rows if not label
            ]
            rows = [row for row in rows if row[2] is not None]
    labels = [label for *_, label in rows]
    classes = known[0]
    if classes is None or any(each != classes for each in known) or UNLABELLED in labels:
        classes = in_order(label for label in labels if label is not None)
    place: dict[str | None, int] = {label: number for number, label in enumerate(classes)} | {None: -1}
    labels_N = torch.tensor([place[label] for label in labels], dtype=torch.int64)
    files = Addressed(Names(address for address, *_ in rows), np.full(len(rows), -1, np.int64))
    return Dataset(classes, labels_N, Names(name for _, name, _ in rows), files=files, notes=notes)


def _class_of(label: str | int | None, class_names: list[str] | None, name: str) -> str | None:
    if isinstance(label, str):
        return label.strip() or None
    if label is None or (class_names is not None and label == -1):  # as `datasets` marks rows without one
        return None
    if class_names is None:
        return str(label)
    if not 0 <= label < len(class_names):
        raise PatchlightError(f"{name}: has the label {label}, and the table names {len(class_names)} classes")
    return class_names[label]
