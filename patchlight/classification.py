"""What is in a photo, by a model with a head."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, overload

from torch import Tensor

from patchlight.errors import PatchlightError
from patchlight.images.decode import Photo, listed
from patchlight.weights.groups import Named
from patchlight.weights.load import Loaded, Runs, load_or_given


@dataclass(frozen=True)
class Prediction:
    """The likeliest classes of a photo, best first."""

    labels: tuple[str, ...]
    """Names, or numbers where the checkpoint has no names."""
    probabilities: tuple[float, ...]
    preprocess_fingerprint: str
    """Of the preprocessing that the photo went through."""
    named: Named | None = None
    """What it is called by as much as is sure, where the model's classes have groups."""
    names: tuple[str, ...] = ()
    """The labels in people's words; the labels themselves, if none are given."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", self.names or self.labels)

    def words(self) -> str:
        """For people: "animal 97.1%, pug (dog) 95.0%; likeliest: pug (dog) 95.0%, ..."."""
        pairs = zip(self.names, self.probabilities, strict=True)
        classes = ", ".join(f"{name} {probability:.1%}" for name, probability in pairs)
        if self.named is None:
            return classes
        return " ".join([*self.named.words(), "likeliest:", classes])

    def to_dict(self) -> dict[str, Any]:
        each = zip(self.labels, self.names, self.probabilities, strict=True)
        return ({} if self.named is None else self.named.to_dict()) | {
            "classes": [
                {"label": label, "name": name, "probability": round(probability, 6)}
                for label, name, probability in each
            ],
            "preprocess_fingerprint": self.preprocess_fingerprint,
        }


@overload  # a path is a sequence, too, of letters: the first that fits is taken
def classify(  # type: ignore[overload-overlap]
    photos: Photo, model: str | os.PathLike[str] | Loaded | Runs = ..., top: int = ...
) -> Prediction: ...


@overload
def classify(
    photos: Iterable[Photo], model: str | os.PathLike[str] | Loaded | Runs = ..., top: int = ...
) -> list[Prediction]: ...


def classify(
    photos: Photo | Iterable[Photo], model: str | os.PathLike[str] | Loaded | Runs = "default", top: int = 5
) -> Prediction | list[Prediction]:
    """The `top` likeliest classes of a photo (a path, a file's bytes, a Pillow image, an array HWC uint8, or what
    `decode` gave); of several a list, in their order. `model` is what `load` takes, or gave, or what `load_engine`
    gave."""
    several, one = listed(photos)
    loaded = load_or_given(model)
    loaded.check_names_classes()
    loaded.check_outputs("logits")
    if top < 1:
        raise PatchlightError(f"top={top} must be 1 or more")
    found = [likeliest(loaded, logits_K, top) for logits_K in loaded.predict(several)]
    return found[0] if one else found


def likeliest(loaded: Loaded, logits_K: Tensor, top: int = 5) -> Prediction:
    """What these logits of the model say of a photo."""
    loaded.check_names_classes()
    logits_K = logits_K.float()
    probabilities, indices = logits_K.softmax(0).topk(min(top, len(logits_K)))
    chosen = indices.tolist()
    labels, names = (
        tuple(str(i) if every is None else every[i] for i in chosen) for every in (loaded.labels, loaded.names)
    )
    return Prediction(
        labels=labels,
        probabilities=tuple(probabilities.tolist()),
        preprocess_fingerprint=loaded.preprocess.config.fingerprint(),
        named=None if loaded.groups is None else loaded.groups.named(logits_K[None])[0],
        names=names,
    )
