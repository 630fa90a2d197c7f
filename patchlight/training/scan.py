"""Read every photo once before the first step, and say at once everything that is wrong with the data."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from patchlight.errors import and_more
from patchlight.files import printable
from patchlight.reporting import SILENT, Progress, Reporter
from patchlight.training.data import CLASS_WITHOUT_PHOTOS, Dataset, Note
from patchlight.training.workers import in_workers

CHECKING = "checking photo"

SHOWN = 20
"""Lines of one kind that are written out; the rest are counted."""

_CHUNK = 16  # photos that a process reads before it reports


@dataclass(frozen=True)
class Scan:
    """What is wrong with the data."""

    problems: list[str] = field(default_factory=list)
    """One line each; training goes on without the photos that they name as left out."""
    fatal: list[str] = field(default_factory=list)
    """One line each; training makes no sense until they are put right."""
    classes: tuple[str, ...] = ()
    """Of the training set."""
    unreadable: list[int] = field(default_factory=list)
    """Indices in the training set."""
    unreadable_validation: list[int] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """The names of all photos of both sets that cannot be read, or are not where a table says."""
    in_both: int = 0
    """Photos of the validation set that are in the training set, too."""
    hashes: list[bytes] | None = None
    """The `content_hash` of every photo of the training set; None for a set in memory."""

    def clean(self, train: Dataset) -> Dataset:
        """The training set that was scanned, without the photos that cannot be read."""
        if self.hashes is not None:
            train = train.with_hashes(self.hashes)
        return _without(train, self.unreadable)

    def clean_validation(self, validation: Dataset) -> Dataset:
        """The validation set that was scanned, without the photos that cannot be read, by the training set's labels."""
        return _without(validation, self.unreadable_validation).with_classes(self.classes)


def scan(
    train: Dataset,
    validation: Dataset | None = None,
    workers: int = 2,
    reporter: Reporter = SILENT,
    *,
    labelled: bool = True,
) -> Scan:
    """Read every file of both sets, in `workers` processes.

    Classes do not matter unless `labelled`. Sets that were read when they were opened are not read again.
    """
    total = sum(len(dataset) for dataset in (train, validation) if dataset is not None)
    training = _read_all(train, workers, reporter, 0, total)
    held_out = _Contents([], []) if validation is None else _read_all(validation, workers, reporter, len(train), total)
    notes = [*train.notes, *training.notes]
    notes += _classes_without_photos(train, training) + _classes_alike(train)
    if training.hashes is not None:
        notes += _two_labels(train, training)
    in_both: list[Note] = []
    fatal = []
    with_photos = _labels_with_photos(train, training)
    if len(training.unreadable) == len(train):
        fatal.append(
            "there are no photos to train on" + (f": none of the {len(train):,} can be read" if len(train) else "")
        )
    elif labelled and not with_photos:
        fatal.append("none of the photos to train on has a label; name some of them, of two classes or more")
    elif labelled and len(with_photos) < 2:
        only = train.classes[with_photos.pop()]
        fatal.append(f"all photos to train on are of one class, {only!r}; at least two are needed")
    if validation is not None:
        notes += [*validation.notes, *held_out.notes]
        if training.hashes is not None and held_out.hashes is not None:
            in_both = _in_both(train, training, validation, held_out)
            notes += in_both
        if len(validation) == len(held_out.unreadable):
            fatal.append(
                "there are no photos to judge by"
                + (f": none of the {len(validation):,} can be read" if len(validation) else "")
            )
        judged = {validation.classes[label] for label in validation.labels_N.unique().tolist() if label >= 0}
        unknown = [name for name in validation.classes if name in judged - set(train.classes)]
        fatal += _bounded(
            [Note("", f"class {name!r} of the validation photos has none to train on") for name in unknown]
        )
    return Scan(
        problems=_bounded(notes),
        fatal=fatal,
        classes=train.classes,
        unreadable=training.unreadable,
        unreadable_validation=held_out.unreadable,
        left_out=_left_out(train, training) + ([] if validation is None else _left_out(validation, held_out)),
        in_both=len(in_both),
        hashes=training.hashes,
    )


@dataclass
class _Contents:
    """What came of reading a set."""

    unreadable: list[int]
    notes: list[Note]
    hashes: list[bytes] | None = None  # None for a set in memory


class _ReadPhotos:
    """Decodes some photos, and gives their content hashes and, for those that cannot be read, the reason."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __call__(self, indices: Sequence[int]) -> list[tuple[bytes, str | None]]:
        return [self.dataset.look(index) for index in indices]


def _read_all(dataset: Dataset, workers: int, reporter: Reporter, done: int, total: int) -> _Contents:
    if dataset.images_NCHW is not None or dataset.hashes is not None:
        reporter.progress(Progress(what=CHECKING, done=done + len(dataset), total=total))
        return _Contents([], [], dataset.hashes)
    rows: dict[str, list[int]] = {}  # photos with more than one row are read once
    for index, name in enumerate(dataset.names):
        rows.setdefault(name, []).append(index)
    of_each, read = list(rows.values()), 0
    hashes = [b""] * len(dataset)
    contents = _Contents([], [], hashes)
    chunks = [[same[0] for same in of_each[i : i + _CHUNK]] for i in range(0, len(of_each), _CHUNK)]
    # A process is slower to start than a few photos are to read.
    for found in in_workers(_ReadPhotos(dataset), chunks, workers if len(dataset) > 4 * _CHUNK else 0):
        for content, failure in found:
            if failure is not None:
                contents.unreadable += of_each[read]
                contents.notes.append(Note("unreadable photo", f"left out, {failure}"))
            for index in of_each[read]:
                hashes[index] = content
            done, read = done + len(of_each[read]), read + 1
        reporter.progress(Progress(what=CHECKING, done=done, total=total))
    contents.unreadable.sort()
    return contents


def _without(dataset: Dataset, unreadable: Sequence[int]) -> Dataset:
    left_out = set(unreadable)
    return dataset.select(index for index in range(len(dataset)) if index not in left_out) if left_out else dataset


def _left_out(dataset: Dataset, contents: _Contents) -> list[str]:
    missing = [note.missing for note in dataset.notes if note.missing is not None]
    return missing + [dataset.names[index] for index in contents.unreadable]


def _labels_with_photos(dataset: Dataset, contents: _Contents) -> set[int]:
    left_out = set(contents.unreadable)
    return {label for index, label in enumerate(dataset.labels_N.tolist()) if label >= 0 and index not in left_out}


def _classes_without_photos(dataset: Dataset, contents: _Contents) -> list[Note]:
    labels = _labels_with_photos(dataset, contents)
    return [
        Note(CLASS_WITHOUT_PHOTOS, f"class {name!r} has no photos that can be read")
        for label, name in enumerate(dataset.classes)
        if label not in labels
    ]


def _classes_alike(dataset: Dataset) -> list[Note]:
    """Labels such as "Cat" and "cat", which a typing mistake makes two classes."""
    spelt: dict[str, str] = {}
    notes = []
    for name in dataset.classes:
        other = spelt.setdefault(" ".join(name.casefold().replace("_", " ").split()), name)
        if other != name:
            notes.append(Note("pair of classes", f"classes {other!r} and {name!r} are spelt almost alike: one class?"))
    return notes


def _two_labels(dataset: Dataset, contents: _Contents) -> list[Note]:
    first: dict[bytes, int] = {}
    labels, notes = dataset.labels_N.tolist(), []
    for index, content in _readable(contents):
        if labels[index] < 0:
            continue
        other = first.setdefault(content, index)
        if labels[index] != labels[other]:
            these = [f"{printable(dataset.names[i])} is {dataset.classes[labels[i]]!r}" for i in (other, index)]
            notes.append(Note("photo with two labels", f"the same photo has two labels: {' and '.join(these)}"))
    return notes


def _in_both(train: Dataset, training: _Contents, validation: Dataset, held_out: _Contents) -> list[Note]:
    first = {content: index for index, content in reversed(_readable(training))}
    return [
        Note(
            "photo in both sets",
            f"the same photo is in training and in validation: {printable(train.names[first[content]])} "
            f"and {printable(validation.names[index])}",
        )
        for index, content in _readable(held_out)
        if content in first
    ]


def _readable(contents: _Contents) -> list[tuple[int, bytes]]:
    unreadable = set(contents.unreadable)
    return [(index, content) for index, content in enumerate(contents.hashes or ()) if index not in unreadable]


def _bounded(notes: Sequence[Note]) -> list[str]:
    """The first of each kind, and how many more there are."""
    lines = []
    for kind in dict.fromkeys(note.kind for note in notes):
        same = [note.line for note in notes if note.kind == kind]
        lines += same[:SHOWN]
        if more := and_more(len(same), SHOWN):
            lines.append(f"...{more} of the kind: {kind}")
    return lines
