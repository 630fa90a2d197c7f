"""What is in a photo, by a model with a head."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from patchlight.errors import PatchlightError
from patchlight.images.decode import decode
from patchlight.weights.convert import PROJECTIONS
from patchlight.weights.groups import Named
from patchlight.weights.load import Loaded


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
    """The labels in people's words, see `in_words`."""

    def words(self) -> str:
        """For people: "animal 97.1%, pug (dog) 95.0%; likeliest: pug (dog) 95.0%, ..."."""
        pairs = zip(self.names, self.probabilities, strict=True)
        classes = ", ".join(f"{name} {probability:.1%}" for name, probability in pairs)
        if self.named is None:
            return classes
        sure = self.named.label == self.labels[0]  # else it is a part of the group, which has people's words
        named = replace(self.named, label=self.names[0]) if sure else self.named
        return " ".join([*named.words(), "likeliest:", classes])

    def to_dict(self) -> dict[str, Any]:
        each = zip(self.labels, self.names, self.probabilities, strict=True)
        return ({} if self.named is None else self.named.to_dict()) | {
            "classes": [
                {"label": label, "name": name, "probability": round(probability, 6)}
                for label, name, probability in each
            ],
            "preprocess_fingerprint": self.preprocess_fingerprint,
        }


def check_names_classes(loaded: Loaded) -> None:
    """Refuse a model that has no classes to name."""
    if not loaded.config.num_classes:
        raise PatchlightError(
            f"{loaded.provenance.source}: has no head to classify with; load one that has, or train one"
        )
    if loaded.provenance.origin in PROJECTIONS:
        raise PatchlightError(f"{loaded.provenance.source}: its head gives an embedding, not classes")


def classify(loaded: Loaded, photo: str | Path | bytes | Image.Image, top: int = 5) -> Prediction:
    """The `top` likeliest classes of a photo: a path, the bytes of a file, or a Pillow image."""
    check_names_classes(loaded)
    if top < 1:
        raise PatchlightError(f"top={top} must be 1 or more")
    image_CHW, _ = loaded.preprocess(decode(photo))
    weight = loaded.model.norm.weight
    with torch.inference_mode():
        return likeliest(loaded, loaded.model(image_CHW[None].to(weight.device, weight.dtype))[0], top)


def likeliest(loaded: Loaded, logits_K: Tensor, top: int = 5) -> Prediction:
    """What these logits of the model say of a photo."""
    check_names_classes(loaded)
    logits_K = logits_K.float()
    probabilities, indices = logits_K.softmax(0).topk(min(top, len(logits_K)))
    chosen = indices.tolist()
    labels = tuple(str(i) if loaded.labels is None else loaded.labels[i] for i in chosen)
    names = labels
    if loaded.labels is not None:
        every = in_words(loaded.labels, None if loaded.groups is None else loaded.groups.paths)
        names = tuple(every[i] for i in chosen)
    return Prediction(
        labels=labels,
        probabilities=tuple(probabilities.tolist()),
        preprocess_fingerprint=loaded.preprocess.config.fingerprint(),
        named=None if loaded.groups is None else loaded.groups.named(logits_K[None])[0],
        names=names,
    )


def in_words(labels: Sequence[str], groups: Sequence[str] | None = None) -> list[str]:
    """Labels such as "bird/199.Winter_Wren", of a data set and its class, as people say them: "Winter Wren (bird)".

    In brackets is the finest part of the class's group ("animal/bird"), where the name does not have it. Labels without
    a slash stay as they are, and so do those that two classes would share the words of.
    """
    words = [_in_words(label, groups[index] if groups else "") for index, label in enumerate(labels)]
    count = Counter(words)
    return [each if count[each] == 1 else label for each, label in zip(words, labels, strict=True)]


def _in_words(label: str, group: str) -> str:
    data_set, slash, own = label.rpartition("/")
    if not slash:
        return label
    name = re.sub(r"^\d+\.(?=[^\W\d_])", "", own).replace("_", " ").strip()
    if not re.search(r"[^\W\d_]", name) or name.lower() == "other":  # says nothing without its set
        name = f"{data_set} {name}".replace("/", " ").replace("_", " ").strip()
    part = group.rpartition("/")[2] if "/" in group else ""
    return name if part.lower() in name.lower() else f"{name} ({part})"
