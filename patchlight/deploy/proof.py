"""How nearly an exported model gives what the model gives, and how fast."""

import math
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from patchlight.deploy.engines import Engine
from patchlight.deploy.graph import Graph
from patchlight.geometry import Box, View
from patchlight.images.decode import Photo, decode, listed
from patchlight.images.preprocess import Preprocess
from patchlight.localizing.detector import Detector, regions_by
from patchlight.weights.load import Loaded

INPUTS = 32
BATCHES = (1, 2, 3, 5)
TIMED = 9
"""How often each is timed, in turns; the least counts, which other work on the machine disturbs least."""


@dataclass(frozen=True)
class Limits:
    """What a precision has to hold."""

    largest: float
    """Of all differences, as a share of the largest number."""
    cosine: float
    """Between the outputs of one input: the least."""
    same_class: float
    """Share of the images whose first class is the same."""
    same_box: float
    """Overlap of the boxes around the subject, in the mean."""


LIMITS = {
    "float32": Limits(largest=1e-4, cosine=0.99999, same_class=0.99, same_box=0.99),
    "float16": Limits(largest=0.05, cosine=0.9999, same_class=0.97, same_box=0.97),
    "bfloat16": Limits(largest=0.2, cosine=0.995, same_class=0.95, same_box=0.95),
    "int8": Limits(largest=0.5, cosine=0.98, same_class=0.9, same_box=0.9),
}


@dataclass(frozen=True)
class Agreement:
    """How nearly one output is the same over all inputs."""

    largest: float
    """Of all differences, as a share of the largest number."""
    mean: float
    """Of all differences, as a share of the mean number's size."""
    cosine: float
    """Between the outputs of one input: the least."""


@dataclass(frozen=True)
class Proof:
    """What was compared, and how it came out."""

    inputs: int
    sizes: tuple[tuple[int, ...], ...]
    """Of the inputs, each once."""
    outputs: dict[str, Agreement]
    same_class: float | None
    same_box: float | None
    same_decision: float | None
    """Share of the images of the model's own size that get the same decision."""
    seconds: dict[str, float]
    """For one image, at best: of the exported model, and of the model in torch."""
    limits: Limits
    versions: dict[str, str]
    failure: str | None

    @property
    def holds(self) -> bool:
        return self.failure is None

    def to_dict(self) -> dict[str, Any]:
        return {"holds": self.holds, **asdict(self)}

    def lines(self) -> list[str]:
        """For people."""
        limits = self.limits
        found = [f"{self.inputs} inputs of {len(self.sizes)} shapes, against torch in float32"]
        found += [
            f"{name}: differs by {each.largest:.2g} of the largest (limit {limits.largest:g}), {each.mean:.2g} in the "
            f"mean; cosine {each.cosine:.6f} (limit {limits.cosine:g})"
            for name, each in self.outputs.items()
        ]
        if self.same_class is not None:
            found.append(f"same first class: {self.same_class:.1%} (limit {limits.same_class:.0%})")
        if self.same_box is not None:
            found.append(f"same box: overlap {self.same_box:.3f} (limit {limits.same_box:g})")
        if self.same_decision is not None:
            found.append(f"same decision: {self.same_decision:.1%}")
        mine, theirs = self.seconds["exported"], self.seconds["torch"]
        found.append(
            f"{1000 * mine:.1f} ms for one image at best, torch {1000 * theirs:.1f} ms (`patchlight bench` compares)"
        )
        return found


def some_photos(photos: Photo | Iterable[Photo]) -> list[Any]:
    """Those that were given, or the few inside the package."""
    if not (isinstance(photos, tuple) and not photos):
        return list(listed(photos)[0])
    inside = sorted(files("patchlight").joinpath("serve/web/photos").iterdir(), key=lambda each: each.name)
    return [each.read_bytes() for each in inside if each.name.endswith(".jpg")]


def preparation_at(size: tuple[int, int] | None, loaded: Loaded) -> Preprocess:
    """How photos are prepared for an exported model of this size, None for the usual."""
    own = loaded.preprocess
    return own if size is None else Preprocess(own.config.for_size(size), own.channels)


def prove(engine: Engine, graph: Graph, loaded: Loaded, photos: Sequence[Photo]) -> Proof:
    """Compare the exported model with the graph in torch, on inputs of several sizes and batch sizes."""
    precision = engine.manifest["precision"]
    limits = LIMITS[precision]
    inputs = _inputs(engine, loaded, list(photos))
    pairs: dict[str, list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]] = {name: [] for name in engine.outputs}
    for each in inputs:
        expected, found = _expected(graph, loaded, each), engine(each)
        for name, value in zip(engine.outputs, expected, strict=True):
            pairs[name].append((value, found[name]))
    agreements = {name: _agreement(each) for name, each in pairs.items()}
    same_class = _same_class(pairs["logits"]) if "logits" in pairs else None
    same_box = _same_box(pairs["subject"], pairs.get("boxes")) if "subject" in pairs else None
    one = inputs[0]  # one image of the usual size
    return Proof(
        inputs=len(inputs),
        sizes=tuple(dict.fromkeys(each.shape for each in inputs)),
        outputs=agreements,
        same_class=same_class,
        same_box=same_box,
        same_decision=_same_decision(loaded, pairs, one.shape[-2:]) if "subject" in pairs else None,
        seconds=_least({"exported": lambda: engine(one), "torch": lambda: _expected(graph, loaded, one)}),
        limits=limits,
        versions=_versions(),
        failure=_failure(agreements, same_class, same_box, limits),
    )


def _inputs(engine: Engine, loaded: Loaded, photos: list[Any]) -> list[npt.NDArray[Any]]:
    """Parts of the photos, of all sizes that the model takes."""
    draw = np.random.default_rng(0)
    if engine.takes_photos:
        return [part_of(decode(photos[number % len(photos)]).image, draw) for number in range(INPUTS)]
    down, across = engine.manifest["step"]
    rows, columns = (max(2, side // step) for side, step in zip(loaded.config.image_size, (down, across), strict=True))
    grids = [(rows, columns), (rows, columns), (rows, 2 * columns), (rows + 1, max(2, columns - 1)), (2, 3)]
    inputs = []
    for number in range(INPUTS):
        grid, batch = grids[number % len(grids)], BATCHES[number % len(BATCHES)]
        size = tuple(engine.manifest["size"] or (grid[0] * down, grid[1] * across))
        inputs.append(_images(loaded, photos, number, batch, size, draw))
    return inputs


def _images(
    loaded: Loaded, photos: list[Any], number: int, batch: int, size: tuple[int, ...], draw: np.random.Generator
) -> npt.NDArray[np.float32]:
    """Photos scaled to this size and normalised, in as many channels as the model takes."""
    config = loaded.preprocess.config
    images = []
    for place in range(batch):
        image = decode(photos[(number + place) % len(photos)]).image.resize((size[1], size[0]))
        levels_HWC = np.asarray(image, np.float32) / 255 + draw.normal(0, 0.02, (*size, 3))
        images.append(((levels_HWC - config.mean) / config.std).transpose(2, 0, 1))
    images_BCHW = np.stack(images).astype(np.float32)
    channels = loaded.config.in_channels
    return np.ascontiguousarray(np.take(images_BCHW, range(channels), axis=1, mode="wrap"))


def part_of(image: Any, draw: np.random.Generator) -> npt.NDArray[np.uint8]:
    """A part of a photo, of any size, wide or high."""
    width = max(1, int(draw.integers(image.width // 3, image.width + 1)))
    height = min(image.height, max(1, int(width * draw.uniform(0.4, 4))))
    left, top = draw.integers(0, image.width - width + 1), draw.integers(0, image.height - height + 1)
    return np.asarray(image.crop((left, top, left + width, top + height)))


def _expected(graph: Graph, loaded: Loaded, images: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """What the model says; of photos as `loaded.preprocess` prepares them."""
    with torch.inference_mode():
        if graph.prepare is not None:
            return [each.numpy() for each in graph.of_images(loaded.preprocess(images)[0][None])]
        return [each.numpy() for each in graph(torch.from_numpy(images.copy()))]  # which may not be written to


def _agreement(pairs: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]) -> Agreement:
    largest = max(float(np.abs(expected).max()) for expected, _ in pairs)
    mean = float(np.mean([np.abs(expected).mean() for expected, _ in pairs]))
    if not all(np.isfinite(value).all() for pair in pairs for value in pair):
        return Agreement(largest=math.inf, mean=math.inf, cosine=-1.0)
    differences = [np.abs(expected - found) for expected, found in pairs]
    cosines = []
    for expected, found in pairs:
        for one, other in zip(expected.reshape(len(expected), -1), found.reshape(len(found), -1), strict=True):
            lengths = np.linalg.norm(one) * np.linalg.norm(other)
            cosines.append(float(one @ other / lengths) if lengths else float(np.array_equal(one, other)))
    return Agreement(
        largest=max(float(each.max()) for each in differences) / max(largest, 1e-12),
        mean=float(np.mean([each.mean() for each in differences])) / max(mean, 1e-12),
        cosine=min(cosines),
    )


def _same_class(pairs: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]) -> float:
    return float(np.mean(np.concatenate([expected.argmax(1) == found.argmax(1) for expected, found in pairs])))


def _same_box(
    heats: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]],
    boxes: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]] | None,
) -> float:
    """Overlap of the first boxes, found as `localize` finds them; 1 where both find none."""
    found: list[list[Box | None]] = [[], []]
    for number, pair in enumerate(heats):
        for each, heat_Bhw in enumerate(pair):
            for place, heat_hw in enumerate(heat_Bhw):
                said_hw5 = None if boxes is None else boxes[number][each][place]
                regions, _ = regions_by("subject", heat_hw, patches_hw5=said_hw5)
                found[each].append(Box(*regions[0].box) if regions else None)
    overlaps = [
        float(mine is theirs) if mine is None or theirs is None else mine.iou(theirs)
        for mine, theirs in zip(*found, strict=True)
    ]
    return float(np.mean(overlaps))


def _same_decision(
    loaded: Loaded, pairs: dict[str, list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]], size: tuple[int, ...]
) -> float | None:
    """Of the images of the size that photos are prepared at: those of others are no photos that one would ask about."""
    detector = Detector.of(loaded, "subject")
    height, width = size
    view = View(source_size=(height, width), model_size=(height, width))
    said: list[list[str]] = [[], []]
    grid = loaded.config.grid_for((height, width))
    for number, heats in enumerate(pairs["subject"]):
        if heats[0].shape[1:] != grid:
            continue
        for each in (0, 1):
            heat_Bhw, *rest = (
                torch.from_numpy(pairs[name][number][each]) if name in pairs else None
                for name in ("subject", "logits", "boxes")
            )
            assert heat_Bhw is not None
            said[each] += [found.decision for found in detector.judge(heat_Bhw, [view] * len(heat_Bhw), *rest)]
    return float(np.mean([mine == theirs for mine, theirs in zip(*said, strict=True)])) if said[0] else None


def _least(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(TIMED + 1):  # the first warms up
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: min(each[1:]) for name, each in times.items()}


def _failure(
    agreements: dict[str, Agreement], same_class: float | None, same_box: float | None, limits: Limits
) -> str | None:
    """The first that does not hold, in words."""
    for name, each in agreements.items():
        if math.isinf(each.largest):
            return f"{name} is not finite for every input"
        if not each.largest <= limits.largest:
            return f"{name} differs by {each.largest:.2g} of its largest value, more than {limits.largest:g}"
        if not each.cosine >= limits.cosine:
            return f"{name} has a cosine of {each.cosine:.5f}, less than {limits.cosine:g}"
    if same_class is not None and same_class < limits.same_class:
        return f"the first class is the same for {same_class:.1%} of the images, less than {limits.same_class:.0%}"
    if same_box is not None and same_box < limits.same_box:
        return f"boxes overlap by {same_box:.3f}, less than {limits.same_box:g}"
    return None


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in ("patchlight", "torch", "onnx", "onnxruntime", "openvino", "nncf"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
