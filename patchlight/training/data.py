"""Labelled photos: hold a part of them out, and feed them in an order that depends on nothing else.

Samples come in one endless stream. Place p of it belongs to epoch p // (n * repeats) of a set of n photos; place q of
the epoch is the photo epoch_order(seed, epoch, n)[q // repeats], for the (q % repeats)-th time. Step s takes the places
from s * batch_size on, and of these rank r of a world of W processes the r-th W-th. So the position of a run is its
step number, whatever the number of workers and processes. How a photo is varied derives from its epoch, or from
epoch % variations, where the variations come again.
"""

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, overload

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from patchlight.config import PreprocessConfig
from patchlight.errors import PatchlightError
from patchlight.files import printable
from patchlight.geometry import Box, Size
from patchlight.images import augment as augmentation
from patchlight.images.augment import AugmentConfig
from patchlight.images.containers import is_elsewhere
from patchlight.images.decode import Decoded, ImageError, Photo, decode, open_file
from patchlight.images.draws import Draws, epoch_order
from patchlight.images.preprocess import Preprocess
from patchlight.training.marks import Marks
from patchlight.training.workers import in_workers

UNLABELLED = "photos"
"""The class of photos that have none."""

CLASS_WITHOUT_PHOTOS = "class without photos"
"""A kind of note."""


class Note(NamedTuple):
    """Something wrong that was found when a set was opened; `kind` is what notes of the same sort share."""

    kind: str
    line: str
    missing: str | None = None
    """The name of a photo that ought to be there."""


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


def in_order(labels: Iterable[str]) -> list[str]:
    """Each once: by number if all are numbers, else by name."""
    distinct = set(labels)
    if not all(label.isascii() and label.isdecimal() for label in distinct):
        return sorted(distinct)
    # By their digits, of which there may be more than Python makes a number of.
    return sorted(distinct, key=lambda label: (len(label.lstrip("0")), label.lstrip("0"), label))


class Stored(Protocol):
    """Photos that lie outside memory, each read when it is asked for."""

    sizes_N: npt.NDArray[np.int64]  # in bytes; -1 where there is no file

    def select(self, indices: npt.NDArray[np.int64]) -> "Stored": ...

    def source(self, index: int, name: str) -> Photo:
        """The photo, in a form that `decode` takes."""


class Dataset:
    """Photos with one label each, and perhaps marks of where their subjects are. What it holds of photos in files is
    their names; it is cheap to pickle, without the marks."""

    def __init__(
        self,
        classes: Iterable[str],
        labels_N: Tensor,
        names: Names,
        *,
        images_NCHW: Tensor | None = None,
        image_N: Tensor | None = None,
        files: Stored | None = None,
        marks: Marks | None = None,
        notes: Iterable[Note] = (),
    ) -> None:
        assert (images_NCHW is None) != (files is None)
        assert len(labels_N) == len(names)
        assert image_N is None or len(image_N) == len(names)
        assert marks is None or len(marks) == len(names)
        self.classes = tuple(classes)
        self.labels_N = labels_N  # int64; -1 where a photo has none
        self.names = names
        self.images_NCHW = images_NCHW  # uint8, if the whole set is in memory
        self.image_N = image_N  # int64, which of these images each photo is, where some have more than one row; or None
        self.marks = marks
        self.extents_N2: Tensor | None = None  # (height, width) of photos that fill a part of their images
        self.notes = tuple(notes)
        self._files = files
        self._hashes: list[bytes] | None = None
        self._fingerprint = ""
        self._prepared: tuple[Any, Tensor] | None = None

    def __len__(self) -> int:
        return len(self.names)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {
            "_hashes": None,
            "_prepared": None,
            "marks": None,
        }  # worker processes have no use for them

    def read(self, index: int, fast_size: Size | None = None) -> Decoded:
        """The photo, see `decode`; raises `ImageError`, which names it."""
        if self._files is None:
            assert self.images_NCHW is not None
            return decode(Image.fromarray(self.images_NCHW[self._image(index)].permute(1, 2, 0).contiguous().numpy()))
        name = self.names[index]
        try:
            return decode(self._files.source(index, name), fast_size=fast_size)
        except ImageError as error:
            raise ImageError(printable(name), error.reason, error.detail) from None

    def _image(self, index: int) -> int:
        return index if self.image_N is None else int(self.image_N[index])

    def content_hash(self, index: int) -> bytes:
        """The sha256 of the photo's file, the same for every copy of it; of its name, if it cannot be read."""
        if self._hashes is not None:
            return self._hashes[index]
        if self._files is None:
            assert self.images_NCHW is not None
            return hashlib.sha256(self.images_NCHW[self._image(index)].contiguous().numpy().tobytes()).digest()
        name, source = self.names[index], None
        with contextlib.suppress(ImageError):
            source = self._files.source(index, name)
        return _hash_or_name(source, name)

    def look(self, index: int) -> tuple[bytes, str | None]:
        """The `content_hash` of a photo that lies outside memory, and why it cannot be used, if so; it is fetched
        once."""
        assert self._files is not None
        name, source, failure = self.names[index], None, None
        try:
            source = self._files.source(index, name)
            decode(source, fast_size=(32, 32))  # all of the file is read at any size
        except ImageError as error:
            failure = str(ImageError(printable(name), error.reason, error.detail))
        return _hash_or_name(source, name), failure

    @property
    def hashes(self) -> list[bytes] | None:
        """The `content_hash` of every photo, where all were read already."""
        return self._hashes

    def with_hashes(self, hashes: list[bytes]) -> "Dataset":
        """The same set, with the `content_hash` of every photo known already."""
        assert len(hashes) == len(self)
        dataset = self.select(range(len(self)))
        dataset._hashes = hashes
        return dataset

    def fingerprint(self) -> str:
        """A sha256 that differs for other classes, labels, marks, names, order or sizes of files, or pixels in memory.

        Files are told apart by content, too: all of them where their hashes are known, as in a set that was scanned,
        else 64 of them. Times of change would differ after a mere copy.
        """
        if not self._fingerprint:
            self._fingerprint = self._compute_fingerprint()
        return self._fingerprint

    def _compute_fingerprint(self) -> str:
        digest = hashlib.sha256(json.dumps(self.classes).encode())
        digest.update(self.labels_N.numpy().tobytes())
        if self.marks is not None:
            self.marks.digest_into(digest)
        if self.images_NCHW is not None:
            digest.update(self.images_NCHW.contiguous().numpy().tobytes())
            if self.image_N is not None:
                digest.update(self.image_N.numpy().tobytes())
            return digest.hexdigest()
        assert self._files is not None
        for name in self.names:
            digest.update(os.fsencode(name) + b"\0")
        digest.update(self._files.sizes_N.astype("<i8").tobytes())
        apart = 1 if self._hashes is not None else max(1, math.ceil(len(self) / 64))
        for index in range(0, len(self), apart):
            digest.update(self.content_hash(index))
        return digest.hexdigest()

    def select(self, indices: Iterable[int] | Tensor) -> "Dataset":
        """These photos, in this order, with the same classes."""
        chosen = torch.as_tensor(indices if isinstance(indices, Tensor) else list(indices), dtype=torch.int64)
        places, shared = chosen.numpy(), self.image_N is not None
        dataset = Dataset(
            self.classes,
            self.labels_N[chosen],
            Names(self.names[i] for i in places),
            images_NCHW=self.images_NCHW if self.images_NCHW is None or shared else self.images_NCHW[chosen],
            image_N=None if self.image_N is None else self.image_N[chosen],
            files=None if self._files is None else self._files.select(places),
            marks=None if self.marks is None else self.marks.select(chosen),
            notes=self.notes,
        )
        if self.extents_N2 is not None:
            dataset.extents_N2 = self.extents_N2[chosen]
        if self._hashes is not None:
            dataset._hashes = [self._hashes[i] for i in places]
        return dataset

    def with_classes(self, classes: Sequence[str]) -> "Dataset":
        """The same photos, labelled by their place among these classes: those of the training set, or of a model."""
        place = {name: index for index, name in enumerate(classes)}
        has_photos = set(self.labels_N.tolist())
        unknown = [name for k, name in enumerate(self.classes) if name not in place and k in has_photos]
        if unknown:
            raise PatchlightError(f"class {unknown[0]!r} is not among the {len(classes)} known; known: {_few(classes)}")
        dataset = self.select(range(len(self)))
        dataset.classes = tuple(classes)
        places = [place.get(name, -1) for name in self.classes]
        # The last place is that of -1.
        dataset.labels_N = torch.tensor([*places, -1], dtype=torch.int64)[self.labels_N]
        return dataset

    def prepared(self, config: PreprocessConfig, device: torch.device | str) -> Tensor:
        """The images in memory as `config` resizes and crops them, on this device: (N, C, H, W) uint8. Kept.

        With `image_N` these are fewer than the photos.
        """
        assert self.images_NCHW is not None
        key = (config, torch.device(device))
        if self._prepared is None or self._prepared[0] != key:
            with torch.inference_mode(False):  # what is kept may be trained on later
                images_NCHW, size = self.images_NCHW, tuple(self.images_NCHW.shape[2:])
                if not config.image_size == config.scaled_size == size:
                    preprocess = Preprocess(config)
                    each = (Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()) for image in images_NCHW)
                    images_NCHW = torch.stack([_as_bytes(_levels(preprocess, decode(image))) for image in each])
                self._prepared = key, images_NCHW.to(device)
        return self._prepared[1]


def _hash_or_name(source: Photo | None, name: str) -> bytes:
    if source is not None:
        with contextlib.suppress(OSError, ValueError):
            return hash_of(source)
    return hashlib.sha256(b"unreadable:" + os.fsencode(name)).digest()


def hash_of(photo: Photo) -> bytes:
    """The sha256 of a photo's file, the same for every copy of it; of its pixels, if it comes from none."""
    if isinstance(photo, str | os.PathLike) and is_elsewhere(os.fspath(photo)):
        with open_file(photo, printable(os.fspath(photo))) as content:
            photo = content.read()
    if isinstance(photo, bytes):
        return hashlib.sha256(photo).digest()
    if isinstance(photo, str | os.PathLike):
        if not os.path.isfile(photo):  # opening a pipe would wait for ever
            raise OSError(f"{photo}: is no file")
        with open(photo, "rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    image = decode(photo).image
    return hashlib.sha256(repr(image.size).encode() + image.tobytes()).digest()


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

    images_BCHW: Tensor  # uint8; where the head alone learns, what the model makes of them, features_BD float32
    labels_B: Tensor  # int64, as all of the following
    epochs_B: Tensor  # modulo the variations, where these come again
    samples_B: Tensor  # the photo's index in the dataset
    repeats_B: Tensor


@dataclass(frozen=True, kw_only=True)
class PhotoOrder:
    """Which photos come in which step, and to which process."""

    seed: int
    batch_size: int
    """Of all processes together."""
    steps: int
    start_step: int = 0
    repeats: int = 1
    rank: int = 0
    world: int = 1


def places(count: int, order: PhotoOrder, variations: int | None = None) -> Iterator[Tensor]:
    """This rank's part of each step's places in the stream: (3, B) int64, which are epochs (modulo the variations),
    samples and repeats."""
    repeats, part = order.repeats, order.batch_size // order.world
    a_epoch, epoch_of_samples, in_epoch = count * repeats, -1, torch.empty(0)
    for step in range(order.start_step, order.start_step + order.steps):
        start = step * order.batch_size + order.rank * part
        place_B = torch.arange(start, start + part)
        epochs_B, within_B = place_B // a_epoch, place_B % a_epoch
        samples_B = torch.empty_like(place_B)
        for epoch in range(int(epochs_B[0]), int(epochs_B[-1]) + 1):
            if epoch != epoch_of_samples:
                epoch_of_samples, in_epoch = epoch, epoch_order(order.seed, epoch, count)
            here_B = epochs_B == epoch
            samples_B[here_B] = in_epoch[within_B[here_B] // repeats]
        if variations is not None:
            epochs_B = epochs_B % variations
        yield torch.stack([epochs_B, samples_B, within_B % repeats])


def batches(
    dataset: Dataset,
    order: PhotoOrder,
    *,
    image_size: Size,
    augment: AugmentConfig,
    preprocess: PreprocessConfig,
    workers: int,
    device: torch.device | str,
) -> Generator[Batch, None, None]:
    """This rank's part of the steps, on `device`.

    Photos from files are cut already: with augment.crop="resized" a random part of the whole photo, else as in
    evaluation. A set in memory gives whole images, resized to `image_size`: their crop is made on the device.
    """
    if not len(dataset):
        raise PatchlightError("there are no photos to train on")
    if order.batch_size % order.world:
        raise PatchlightError(f"batch_size={order.batch_size} is not divisible by the {order.world} processes")
    config = _of_one_size(preprocess, image_size)
    device = torch.device(device)
    stream = places(len(dataset), order, augment.variations)
    if dataset.images_NCHW is not None:
        image_N = None if dataset.image_N is None else dataset.image_N.to(device)
        return _from_memory(dataset.prepared(config, device), image_N, dataset.labels_N.to(device), stream)
    task = _CutPhotos(dataset, order.seed, augment, config)
    read = in_workers(task, (places_3B.tolist() for places_3B in stream), workers, pin=device.type == "cuda")
    return (Batch(*(part.to(device, non_blocking=True) for part in batch)) for batch in read)


def _from_memory(
    images_NCHW: Tensor, image_N: Tensor | None, labels_N: Tensor, stream: Iterator[Tensor]
) -> Generator[Batch, None, None]:
    for places_3B in stream:
        epochs_B, samples_B, repeats_B = places_3B.to(images_NCHW.device, non_blocking=True)
        image_B = samples_B if image_N is None else image_N[samples_B]
        yield Batch(images_NCHW[image_B], labels_N[samples_B], epochs_B, samples_B, repeats_B)


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
        return _as_bytes(_channels_first(preprocess.part(photo, box)))


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
        image_N = torch.arange(len(dataset)) if dataset.image_N is None else dataset.image_N
        levels = (images_NCHW[image_N[chunk].to(device)] for chunk in chunks)
    else:
        levels = in_workers(_PreparePhotos(dataset, config), chunks, workers, pin=device.type == "cuda")
    for chunk, levels_BCHW in zip(chunks, levels, strict=True):
        images_BCHW = (levels_BCHW.to(device, non_blocking=True).float() / 255 - mean_C11) / std_C11
        indices_B = torch.tensor(chunk)
        yield images_BCHW, dataset.labels_N[indices_B].to(device), indices_B.to(device)


class _PreparePhotos:
    """Worker: reads photos as for classification, resized and cropped but not normalised."""

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
    """Read a photo again that was readable when the set was scanned."""
    try:
        return dataset.read(index, fast_size)
    except ImageError as error:
        raise PatchlightError(
            f"{error}; restore the photo, or start a new run so that the data is scanned again"
        ) from None


def _levels(preprocess: Preprocess, photo: Decoded) -> Tensor:
    """(C, H, W) as the model sees it, from 0 to 255: uint8, or float32 with `resize_in="floats"`."""
    return _channels_first(preprocess.levels(photo)[0])


def _as_bytes(levels: Tensor) -> Tensor:
    return levels if levels.dtype == torch.uint8 else levels.round().clamp(0, 255).to(torch.uint8)


def _channels_first(level_HWC: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.array(level_HWC.transpose(2, 0, 1), order="C"))


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
