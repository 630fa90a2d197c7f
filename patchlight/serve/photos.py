"""The photos that clients sent, in memory, as many as there is room for."""

import re
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field

from torch import Tensor

from patchlight.errors import PatchlightError
from patchlight.geometry import Size, View
from patchlight.images.decode import Alpha
from patchlight.serve.limits import Limits


class UnknownPhotoError(PatchlightError):
    """There is no such photo, or there is no longer."""


@dataclass(eq=False)
class Photo:
    """A file as it was sent."""

    content: bytes
    name: str
    """As the client called it, without folders: a text to show, never a path."""
    size: Size
    """(height, width), upright."""
    format: str
    alpha: Alpha | None = None
    """Of one with a transparent background."""
    id: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    """Nobody guesses it, and no photo can be asked for without."""
    prepared: dict[int, tuple[Tensor, View]] = field(default_factory=dict)
    """By model: image_CHW as it takes it, and its view, until the model has taken it."""

    @property
    def nbytes(self) -> int:
        return len(self.content) + sum(image_CHW.nbytes for image_CHW, _ in self.prepared.values())


class Photos:
    """Those used least lately go first where there is no more room."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._photos: OrderedDict[str, Photo] = OrderedDict()
        self._sizes: dict[str, int] = {}

    def add(self, photo: Photo) -> list[str]:
        """Keep a photo; those that had to go for it."""
        self._photos[photo.id] = photo
        self._sizes[photo.id] = photo.nbytes
        gone = []
        while len(self._photos) > 1 and (
            len(self._photos) > self._limits.photos or sum(self._sizes.values()) > self._limits.photo_bytes
        ):
            gone.append(next(iter(self._photos)))
            self.remove(gone[-1])
        return gone

    def get(self, name: str) -> Photo:
        if name not in self._photos:
            raise UnknownPhotoError(
                "there is no photo with this id, or it was dropped to make room for others; send it again"
            )
        self._photos.move_to_end(name)
        return self._photos[name]

    def remove(self, name: str) -> None:
        self.get(name)
        del self._photos[name], self._sizes[name]

    def __len__(self) -> int:
        return len(self._photos)


def plain_name(given: str | None) -> str:
    """What a client calls a file, as one short line without folders."""
    name = re.split(r"[/\\]", given or "")[-1]
    name = "".join(letter if letter.isprintable() else "_" for letter in name).strip(" .")
    return (name if len(name) <= 120 else f"{name[:79]}…{name[-40:]}") or "photo"


def crop_stem(name: str) -> str:
    """The name of a photo's crop, without its ending, for an archive or a download."""
    stem = re.sub(r"\.[A-Za-z0-9]{1,5}$", "", name)
    return re.sub(r'[<>:"|?*%]', "_", stem).strip(" .") or "photo"
