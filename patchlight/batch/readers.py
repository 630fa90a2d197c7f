"""What a model says of photos for a table: features, or classes.

A table holds what `loaded.predict` gives, bit for bit, so photos are decoded whole (unless told otherwise) and the
model computes as it was loaded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from patchlight.batch.finder import Finder
from patchlight.batch.tables import Layout
from patchlight.batch.work import Seen
from patchlight.classification import likeliest
from patchlight.errors import PatchlightError
from patchlight.geometry import View
from patchlight.json_config import JsonConfig, check_types, require
from patchlight.localizing.decide import GENERIC
from patchlight.localizing.detector import Detector
from patchlight.models.vit import ViT
from patchlight.reporting import Reporter
from patchlight.weights.load import Loaded, Runs

FeatureKind = Literal["pooled", "cls", "dense"]
FeatureType = Literal["float32", "float16"]

ABOUT = {"path": "text", "status": "text", "reason": "text", "detail": "text", "width": "whole", "height": "whole"}
"""The columns that every table begins with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbedSettings(JsonConfig):
    """What features a table holds: all that its rows depend on, besides the photos and the model."""

    features: FeatureKind = "pooled"  # before the head; the class token; or every patch, (h, w, D)
    dtype: FeatureType = "float32"
    fast_decode: bool = False  # JPEGs at a half, a quarter or an eighth of their size where that is enough

    def __post_init__(self) -> None:
        check_types(self)
        for name, values in (("features", get_args(FeatureKind)), ("dtype", get_args(FeatureType))):
            value = getattr(self, name)
            require(value in values, f"{name}={value!r} is not one of {', '.join(values)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassifySettings(JsonConfig):
    """What classes a table holds."""

    top: int = 5
    fast_decode: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        require(self.top >= 1, f"top={self.top} must be 1 or more")


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one photo."""

    view: View
    columns: dict[str, Any]
    array: npt.NDArray[Any] | None = None


class TableReader(Finder):
    """A model on its device that fills a table's columns; its methods may be called in `threads` threads at a time."""

    layout: Layout

    def __init__(self, loaded: Loaded, batch_size: int, reporter: Reporter) -> None:
        loaded.preprocess.check_channels()
        # No table asks for a map, so the method is any; an exported model may have none.
        super().__init__(Detector(loaded, "features", GENERIC["features"]), batch_size, reporter)
        self.loaded = loaded

    def get_ready(self) -> None:
        """The model stays as it is: packed weights would change the last digits."""

    @torch.inference_mode()
    def _look(self, images_BCHW: Tensor, photos: Sequence[Seen]) -> list[Any]:
        return self.answers(images_BCHW.to(self.loaded.model.norm.weight.dtype), [photo.view for photo in photos])

    def answers(self, images_BCHW: Tensor, views: Sequence[View]) -> list[Answer]:
        raise NotImplementedError


class FeatureReader(TableReader):
    """Features of one shape for all photos."""

    def __init__(self, loaded: Loaded, settings: EmbedSettings, batch_size: int, reporter: Reporter) -> None:
        super().__init__(loaded, batch_size, reporter)
        self.settings = settings
        dtype, size = loaded.model.norm.weight.dtype, loaded.preprocess.config.image_size
        with torch.inference_mode():
            blank_1CHW = torch.zeros(1, loaded.config.in_channels, *size, dtype=dtype, device=loaded.device)
            shape = tuple(features_of(loaded, blank_1CHW, settings.features).shape[1:])
        self.layout = Layout(
            dict(ABOUT),
            shape,
            settings.dtype,
            about_table(settings.features, loaded.provenance.source, loaded.provenance.sha256),
        )

    def answers(self, images_BCHW: Tensor, views: Sequence[View]) -> list[Answer]:
        features = features_of(self.loaded, images_BCHW, self.settings.features).float().cpu().numpy()
        if features.shape[1:] != self.layout.shape:
            here, there = ("x".join(map(str, shape[:2])) for shape in (features.shape[1:], self.layout.shape or ()))
            raise PatchlightError(f"it has {here} patches and the table's rows {there}; leave out dense features")
        return [Answer(view, {}, own) for view, own in zip(views, as_type(features, self.settings.dtype), strict=True)]


class ClassReader(TableReader):
    """The likeliest classes."""

    def __init__(self, loaded: Loaded, settings: ClassifySettings, batch_size: int, reporter: Reporter) -> None:
        loaded.check_names_classes()
        loaded.check_outputs("logits")
        super().__init__(loaded, batch_size, reporter)
        self.settings = settings
        named = {"group": "text", "group_confidence": "number", "label": "text", "label_confidence": "number"}
        classes = {"name": "text", "probability": "number", "labels": "texts", "names": "texts"}
        columns = ABOUT | ({} if loaded.groups is None else named) | classes | {"probabilities": "numbers"}
        self.layout = Layout(columns, about=about_table(None, loaded.provenance.source, loaded.provenance.sha256))

    def answers(self, images_BCHW: Tensor, views: Sequence[View]) -> list[Answer]:
        logits_BK = self.loaded.answer(images_BCHW, "logits")
        return [Answer(view, self._columns(logits_K)) for view, logits_K in zip(views, logits_BK, strict=True)]

    def _columns(self, logits_K: Tensor) -> dict[str, Any]:
        said = likeliest(self.loaded, logits_K, self.settings.top)
        return ({} if said.named is None else said.named.to_dict()) | {
            "name": said.names[0],
            "probability": round(said.probabilities[0], 6),
            "labels": list(said.labels),
            "names": list(said.names),
            "probabilities": [round(probability, 6) for probability in said.probabilities],
        }


def about_table(features: str | None, source: str, sha256: str) -> dict[str, Any]:
    """What a table says of its features and model."""
    return ({} if features is None else {"features": features}) | {"model": source, "sha256": sha256}


def features_of(loaded: Loaded, images_BCHW: Tensor, kind: FeatureKind) -> Tensor:
    """features_BD, pooled as the model does it or of the class token; or dense ones, as patches lie: (B, h, w, D)."""
    model = loaded.model
    if loaded.engine is not None:
        return _features_of_engine(loaded, loaded.engine, images_BCHW, kind)
    if kind == "pooled":
        return model.features(images_BCHW)
    if kind == "cls":
        return model.features(images_BCHW, pooling="cls")
    if isinstance(model, ViT):
        x_BND, geometry = model.encode(images_BCHW)
        return geometry.picture_BDhw(x_BND).permute(0, 2, 3, 1).contiguous()
    return model.encode(images_BCHW)


def _features_of_engine(loaded: Loaded, engine: Runs, images_BCHW: Tensor, kind: FeatureKind) -> Tensor:
    """What an exported model gives of them; of the class token alone none gives any."""
    if kind == "cls":
        loaded.check_has_weights("features='cls'")
    output = "dense" if kind == "dense" else "features"
    loaded.check_outputs(output)
    given = torch.from_numpy(engine(images_BCHW.numpy())[output])
    return given.permute(0, 2, 3, 1).contiguous() if kind == "dense" else given


def as_type(features: npt.NDArray[Any], dtype: FeatureType) -> npt.NDArray[Any]:
    """In the type of a table; a number that is too large for float16 becomes the largest that it has."""
    if dtype == "float32":
        return features
    largest = np.finfo(np.float16).max
    return features.clip(-largest, largest).astype(np.float16)
