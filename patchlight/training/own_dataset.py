"""A Dataset of one's own, such as PyTorch's and torchvision's, as a set of labelled photos.

All of it is read once when it is opened, for its labels and for what cannot be read, and then by index as often as the
run needs it. So each index has to give the same photo every time: photos are varied by the settings of the run.
"""

import operator
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Subset

from patchlight.errors import PatchlightError
from patchlight.images.decode import ImageError, Photo, decode
from patchlight.reporting import Progress, Reporter
from patchlight.training.data import UNLABELLED, Dataset, Names, Note, hash_of
from patchlight.training.workers import can_be_sent, in_workers

_CHUNK = 16
"""Photos that a process reads before it reports."""


def name_of(photos: Any) -> str:
    """What a run calls its photos: their path, or the kind of Dataset that they come from."""
    return os.fspath(photos) if isinstance(photos, str | os.PathLike) else f"{type(photos).__name__} in Python"


def open_own(dataset: Any, *, labelled: bool, workers: int, reporter: Reporter) -> Dataset:
    """The photos and labels that dataset[0], dataset[1], ... give, without those that cannot be read.

    A label is a name, or the number of a class, whose names are in `dataset.classes`, if it has them. Without
    `labelled`, an item may be a photo alone.
    """
    kind = type(dataset).__name__
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise PatchlightError(
            f"{kind} is no set of photos; give a path, or a Dataset with a length, whose items are pairs (photo, label)"
        )
    labels: list[str | int] = []
    hashes: list[bytes] = []
    kept: list[int] = []
    notes: list[Note] = []
    if workers and not can_be_sent(dataset):
        line = f"{kind}: cannot be sent to other processes, so that this one reads its photos"
        notes.append(Note("dataset", f"{line}; where its class stands in a module of its own, {workers} read them"))
    chunks = [range(start, min(start + _CHUNK, len(dataset))) for start in range(0, len(dataset), _CHUNK)]
    read = in_workers(_ReadItems(dataset, labelled=labelled), chunks, workers)
    for chunk, found in zip(chunks, read, strict=True):
        for index, (label, content, failure) in zip(chunk, found, strict=True):
            if failure is not None:
                notes.append(Note("unreadable photo", f"left out, {failure}", f"{kind}[{index}]"))
                continue
            kept.append(index)
            labels.append(label)
            hashes.append(content)
        reporter.progress(Progress(what="checking photo", done=chunk.stop, total=len(dataset)))
    if UNLABELLED in labels:  # of some is of none
        labels = [UNLABELLED] * len(labels)
    classes, numbers = _numbered(dataset, labels)
    files = _OwnPhotos(dataset, np.array(kept, np.int64))
    names = Names(f"{kind}[{index}]" for index in kept)
    found_set = Dataset(classes, torch.tensor(numbers, dtype=torch.int64), names, files=files, notes=notes)
    return found_set.with_hashes(hashes)


class _OwnPhotos:
    """Adapter for a user's Dataset."""

    def __init__(self, dataset: Any, index_N: npt.NDArray[np.int64]) -> None:
        self.dataset, self.index_N = dataset, index_N
        self.sizes_N = np.full(len(index_N), -1, np.int64)

    def select(self, indices: npt.NDArray[np.int64]) -> "_OwnPhotos":
        return _OwnPhotos(self.dataset, self.index_N[indices])

    def source(self, index: int, name: str) -> Photo:
        """What `decode` takes."""
        return _item(self.dataset, int(self.index_N[index]), labelled=False)[0]


class _ReadItems:
    """Reads some photos: the label and the content hash of each, and if it cannot be read the reason."""

    def __init__(self, dataset: Any, *, labelled: bool) -> None:
        self.dataset, self.labelled = dataset, labelled

    def __call__(self, indices: Sequence[int]) -> list[tuple[str | int, bytes, str | None]]:
        found: list[tuple[str | int, bytes, str | None]] = []
        for index in indices:
            name = f"{type(self.dataset).__name__}[{index}]"
            photo, label = _item(self.dataset, index, labelled=self.labelled)
            try:
                decode(photo, fast_size=(32, 32))  # all of a file is read at any size
            except ImageError as error:
                found.append((UNLABELLED, b"", f"{name}: {error.reason} ({error.detail})"))
            except PatchlightError as error:
                raise PatchlightError(
                    f"{name}: {error}; leave ToTensor and the like out, runs prepare photos"
                ) from None
            else:
                found.append((label, hash_of(photo), None))
        return found


def _item(dataset: Any, index: int, *, labelled: bool) -> tuple[Any, str | int]:
    """The photo, and its label as a name or a number."""
    name = f"{type(dataset).__name__}[{index}]"
    try:
        item = dataset[index]
    except Exception as error:
        raise PatchlightError(f"{name}: cannot be read ({type(error).__name__}: {error})") from error
    if not (isinstance(item, tuple | list) and len(item) == 2):
        if labelled:
            raise PatchlightError(f"{name}: is {_in_words(item)}, not a pair (photo, label)")
        return item, UNLABELLED
    photo, label = item
    if isinstance(label, str):
        return photo, label
    try:
        return photo, operator.index(label)
    except TypeError:
        if not labelled:
            return photo, UNLABELLED
        raise PatchlightError(f"{name}: has the label {label!r:.40}; give the name of a class, or its number") from None


def _in_words(item: Any) -> str:
    return f"{len(item)} things" if isinstance(item, tuple | list) else f"a {type(item).__name__}"


def _numbered(dataset: Any, labels: Sequence[str | int]) -> tuple[Sequence[str], list[int]]:
    """The names of the classes, and each label as the number of its class."""
    kind = type(dataset).__name__
    while isinstance(dataset, Subset):  # as random_split makes them
        dataset = dataset.dataset
    own = getattr(dataset, "classes", None)
    # Of ImageNet, torchvision gives all words for a class.
    known = [", ".join(each) if isinstance(each, tuple) else str(each) for each in own] if own is not None else None
    named = {label for label in labels if isinstance(label, str)}
    numbered = {label for label in labels if not isinstance(label, str)}
    if named and numbered:
        raise PatchlightError(f"{kind}: some labels are names, others numbers ({min(numbered)}); give one or the other")
    if numbered:
        classes = [str(number) for number in range(max(numbered) + 1)] if known is None else known
        for number in (min(numbered), max(numbered)):
            if not 0 <= number < len(classes):
                beyond = "" if number < 0 else f", but {len(classes)} classes"
                raise PatchlightError(f"{kind}: label {number}{beyond}; labels count the classes from 0")
        return classes, [int(label) for label in labels]
    in_order = known if known is not None and named <= set(known) else sorted(named)
    place = {name: number for number, name in enumerate(in_order)}
    return in_order, [place[str(label)] for label in labels]
