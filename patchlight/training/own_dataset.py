"""A Dataset of one's own, such as PyTorch's and torchvision's, as a set of labelled photos.

All of it is read once when it is opened, for its labels and for what cannot be read, and then by index as often as the
run needs it. So each index has to give the same photo every time: photos are varied by the settings of the run.
"""

import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Subset

from patchlight.errors import PatchlightError
from patchlight.images.containers import IMAGE_NAMES, LABEL_NAMES, NAME_LABELS
from patchlight.images.decode import ImageError, Photo, decode
from patchlight.remote import as_given
from patchlight.reporting import Progress, Reporter
from patchlight.training.data import UNLABELLED, Dataset, Names, Note, hash_of
from patchlight.training.workers import can_be_sent, in_workers

_CHUNK = 16
"""Photos that a process reads before it reports."""


def name_of(photos: Any) -> str:
    """What a run calls its photos: their path, or the kind of Dataset that they come from."""
    return as_given(photos) if isinstance(photos, str | os.PathLike) else f"{type(photos).__name__} in Python"


def open_own(
    dataset: Any, *, labelled: bool, label_column: str | None = None, workers: int, reporter: Reporter
) -> Dataset:
    """The photos and labels that dataset[0], dataset[1], ... give, without those that cannot be read.

    A label is a name, or the number of a class, whose names are in `dataset.classes`, if it has them. Without
    `labelled`, an item may be a photo alone. Items that are dicts, as those of Hugging Face's `datasets`, have their
    photo and label by name, see `label_column` of `open_dataset`.
    """
    kind = type(dataset).__name__
    if isinstance(dataset, Mapping):
        raise PatchlightError(f"{kind} has the parts {', '.join(map(str, list(dataset)[:5]))}; give one of them")
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
    if len(dataset) and isinstance(_get(dataset, 0), Mapping):
        dataset = _Columns(dataset, label_column, labelled=labelled)
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
            name = f"{_kind(self.dataset)}[{index}]"
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
    name, item = f"{_kind(dataset)}[{index}]", _get(dataset, index)
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


def _get(dataset: Any, index: int) -> Any:
    try:
        return dataset[index]
    except PatchlightError:
        raise
    except Exception as error:
        raise PatchlightError(f"{_kind(dataset)}[{index}]: cannot be read ({type(error).__name__}: {error})") from error


def _kind(dataset: Any) -> str:
    return type(dataset.dataset if isinstance(dataset, _Columns) else dataset).__name__


class _Columns:
    """Pairs of a photo and its label, from items that have more by name: {"image": ..., "label": ...}."""

    def __init__(self, dataset: Any, label_column: str | None, *, labelled: bool) -> None:
        names = [str(name) for name in _get(dataset, 0)]
        self.dataset, self.label = dataset, label_column
        self.image = _first_of(IMAGE_NAMES, names)
        if self.label is None:
            self.label = _first_of(LABEL_NAMES, names)
        kind, columns = type(dataset).__name__, ", ".join(names[:8])
        if self.image is None:
            raise PatchlightError(
                f"{kind}: its items have no {IMAGE_NAMES[0]}, but {columns}; rename the one of photos"
            )
        if labelled and self.label not in names:
            wanted = LABEL_NAMES[0] if self.label is None else self.label
            raise PatchlightError(f"{kind}: its items have no {wanted}, but {columns}: {NAME_LABELS}")
        feature = (getattr(dataset, "features", None) or {}).get(self.label)
        if isinstance(known := getattr(feature, "names", None), list):  # else there are none, or numbers are the names
            self.classes = known

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        item = self.dataset[index]
        photo, label = item[self.image], item.get(self.label)
        if isinstance(photo, Mapping):  # as `datasets` gives images that it does not decode
            photo = photo["path"] if photo.get("bytes") is None else photo["bytes"]
        return photo if label is None else (photo, label)


def _first_of(likely: Sequence[str], names: Sequence[str]) -> str | None:
    by_lower = {name.lower(): name for name in names}
    return next((by_lower[name] for name in likely if name in by_lower), None)


def _in_words(item: Any) -> str:
    return f"{len(item)} things" if isinstance(item, tuple | list) else f"a {type(item).__name__}"


def _numbered(dataset: Any, labels: Sequence[str | int]) -> tuple[Sequence[str], list[int]]:
    """The names of the classes, and each label as the number of its class."""
    kind = _kind(dataset)
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
