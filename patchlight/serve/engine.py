"""The models, loaded once, and what one forward pass of theirs showed of a photo."""

import dataclasses
import functools
import statistics
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from patchlight.config import Size, ViTConfig
from patchlight.costing import Costs, Latency, costs, measure_latency
from patchlight.errors import PatchlightError
from patchlight.explain.attention import patch_pixels
from patchlight.explain.rollout import rollout
from patchlight.explain.shuffling import shuffle_patches, without_positions
from patchlight.geometry import Box, View
from patchlight.localizing.detector import Detector, DetectorOptions
from patchlight.localizing.heat import HeatPass, Method
from patchlight.models.attention import Heads
from patchlight.models.vit import ViT
from patchlight.serve.limits import Limits
from patchlight.serve.queues import Batches, BusyError
from patchlight.weights.load import Loaded, load


class UnknownModelError(PatchlightError):
    """There is no model of this number."""


@dataclass(frozen=True, eq=False)
class Served:
    """A model that is ready."""

    number: int
    name: str
    loaded: Loaded
    macs: int
    took: deque[float]
    """Seconds of the latest forward passes of one photo on this machine; the first were to warm up."""

    @property
    def latency_ms(self) -> float:
        return 1000 * statistics.median(self.took)

    @property
    def vit(self) -> ViT:
        assert isinstance(self.loaded.model, ViT)
        return self.loaded.model

    @property
    def config(self) -> ViTConfig:
        return self.vit.config

    def detector(self, method: str = "auto", options: DetectorOptions | None = None) -> Detector:
        return Detector.of(self.loaded, method, options)

    @property
    def names_classes(self) -> bool:
        try:
            self.loaded.check_names_classes()
        except PatchlightError:
            return False
        return True

    @property
    def on_cpu(self) -> bool:
        return self.vit.norm.weight.device.type == "cpu"


@dataclass(frozen=True, eq=False)
class Seen:
    """What one pass over one photo showed, on the CPU; nothing in it hangs on the photos beside it."""

    view: View
    grid: Size
    num_prefix: int
    patch_size: tuple[float, float]
    layers: tuple[Heads, ...]
    """The queries and keys of every block, a batch of one; values and outputs are not kept."""
    tokens_ND: Tensor
    output_K: Tensor
    """Logits, or features of a model without classes."""
    heat: dict[Method, Tensor] = field(default_factory=dict)
    """By method: heat_hw."""

    @functools.cached_property
    def nbytes(self) -> int:
        heads = (tensor for layer in self.layers for tensor in (layer.q_BANE, layer.k_BANE, layer.mask))
        tensors = [*(each for each in heads if each is not None), self.tokens_ND, self.output_K, *self.heat.values()]
        return sum(tensor.nbytes for tensor in tensors)

    @property
    def frame(self) -> Box:
        """Where the patches lie, in the photo's pixels; outside of it where the photo was padded."""
        (h, w), (down, across) = self.grid, self.patch_size
        return self.view.around_source(Box(0, 0, w * across, h * down))


@dataclass(frozen=True, slots=True)
class _Look:
    model: int
    method: Method
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Other:
    """Something else that the model's thread does, one item after the other."""

    what: Literal["rollout", "shuffle", "costs", "latency"]
    model: int = 0


class Engine:
    """Loads in the background, and then answers one batch after the other."""

    def __init__(self, sources: Sequence[str], *, device: str = "cpu", limits: Limits | None = None) -> None:
        self.sources = tuple(sources)
        self.limits = limits or Limits()
        self.device = device
        self.models: tuple[Served, ...] = ()
        self.failure: Exception | None = None
        self.batches = Batches(self._run, most=self.limits.batch, limit=self.limits.queue)
        self._seen: OrderedDict[tuple[str, int], Seen] = OrderedDict()
        self._loaded = threading.Event()
        self._closing = False
        self._loader = threading.Thread(target=self._load, name="loading", daemon=True)

    @property
    def ready(self) -> bool:
        return len(self.models) == len(self.sources)

    def start(self) -> None:
        self._loader.start()

    def _load(self) -> None:
        try:
            for number, source in enumerate(self.sources):
                if self._closing:
                    return
                loaded = load(source, device=self.device)
                if not isinstance(loaded.model, ViT):
                    kind = type(loaded.model).__name__
                    raise PatchlightError(f"{source}: is a {kind}, and the page shows ViTs; `patchlight crop` takes it")
                loaded.preprocess.check_channels()
                macs = _counted(loaded.config).macs
                took = deque(_warm_up(loaded), maxlen=31)
                name = Path(source).name if Path(source).exists() else source  # a path is nobody's business
                self.models = (*self.models, Served(number, name, loaded, macs, took))
        except Exception as error:  # told by whoever waits
            self.failure = error
        finally:
            self._loaded.set()

    def wait(self, timeout: float | None = None) -> None:
        """Until the models are loaded, or one could not be."""
        self._loaded.wait(timeout)
        if self.failure is not None:
            raise self.failure

    def close(self, timeout: float = 5.0) -> bool:
        """Take nothing more and end; whether both threads, the one that loads and the model's, did within the time."""
        self._closing = True
        ended = self.batches.close(timeout)
        if self._loader.is_alive():
            self._loader.join(timeout)
        return ended and not self._loader.is_alive()

    def model(self, number: int) -> Served:
        if not self.ready:
            raise BusyError("the model is being loaded; try again in a moment")
        if not 0 <= number < len(self.models):
            raise UnknownModelError(f"there is no model {number}; /api/v1/models lists those that are served")
        return self.models[number]

    # What is kept

    def known(self, photo: str, model: int) -> Seen | None:
        seen = self._seen.get((photo, model))
        if seen is not None:
            self._seen.move_to_end((photo, model))
        return seen

    def keep(self, photo: str, model: int, seen: Seen) -> Seen:
        """Keep it as long as there is room, with the maps that other passes gave; what is kept."""
        before = self._seen.pop((photo, model), None)
        if before is not None:
            seen = dataclasses.replace(before, heat=before.heat | seen.heat)
        self._seen[photo, model] = seen
        total = sum(each.nbytes for each in self._seen.values())
        while len(self._seen) > 1 and total > self.limits.seen_bytes:
            total -= self._seen.popitem(last=False)[1].nbytes
        return seen

    def forget(self, photo: str) -> None:
        for key in [key for key in self._seen if key[0] == photo]:
            del self._seen[key]

    # What is asked of the model's thread

    def look(self, served: Served, image_CHW: Tensor, view: View, method: Method) -> "Future[Seen]":
        """A future `Seen` with the heat of this method."""
        return self.batches.submit(_Look(served.number, method, tuple(image_CHW.shape)), (image_CHW, view))

    def rollout(self, served: Served, image_CHW: Tensor) -> "Future[Tensor]":
        """A future heat_hw."""
        return self.batches.submit(_Other("rollout", served.number), image_CHW)

    def shuffle(self, served: Served, image_CHW: Tensor, order_P: Tensor) -> "Future[Tensor]":
        """Future logits (4, K): as it is, shuffled, and both without positions."""
        return self.batches.submit(_Other("shuffle", served.number), (image_CHW, order_P))

    def costs(self, config: ViTConfig) -> "Future[Costs]":
        """Counted by the model's thread, since the counter listens to all modules of the process."""
        return self.batches.submit(_Other("costs"), config)

    def latency(self, config: ViTConfig) -> "Future[Latency]":
        """A future `Latency` of a fresh model of this config."""
        return self.batches.submit(_Other("latency"), config)

    def _run(self, key: Hashable, items: Sequence[Any]) -> Sequence[Any]:
        if isinstance(key, _Look):
            return self._look(self.models[key.model], key.method, items)
        assert isinstance(key, _Other)
        match key.what:
            case "rollout":
                model = self.models[key.model].loaded.model
                return [rollout(model, image_CHW[None])[0].float().cpu() for image_CHW in items]
            case "shuffle":
                return [_shuffled(self.models[key.model].vit, *item) for item in items]
            case "costs":
                return [_counted(config) for config in items]
            case "latency":
                return [measure_latency(config, device=self.device, seconds=0.25) for config in items]

    def _look(self, served: Served, method: Method, items: Sequence[tuple[Tensor, View]]) -> list[Seen]:
        if served.on_cpu:
            # One after the other is no slower on a CPU, and every photo gets the answer that it gets alone, bit by bit.
            return [self._alone(served, method, item) for item in items]
        # An accelerator takes the same time for a full batch, and with one size for all there is one kernel for all.
        filled = [*items, *([items[0]] * (self.limits.batch - len(items)))]
        return _pass(served, method, filled)[: len(items)]

    def _alone(self, served: Served, method: Method, item: tuple[Tensor, View]) -> Seen:
        start = time.perf_counter()
        (seen,) = _pass(served, method, [item])
        served.took.append(time.perf_counter() - start)
        return seen


@torch.inference_mode()
def _pass(served: Served, method: Method, items: Sequence[tuple[Tensor, View]]) -> list[Seen]:
    """One forward pass, from which everything that the page shows at once is taken."""
    layers: list[tuple[Tensor, Tensor, Tensor | None]] = []

    def keep(index: int, heads: Heads, x_BND: Tensor) -> None:
        mask = None if heads.mask is None else heads.mask.float().cpu()
        layers.append((heads.q_BANE.float().cpu(), heads.k_BANE.float().cpu(), mask))

    looks = HeatPass(served.loaded, torch.stack([image_CHW for image_CHW, _ in items]), [method], keep)
    heat_Bhw = looks.heat(method).float().cpu()
    output_BK = looks.logits().float().cpu()
    assert looks.tokens_BND is not None
    tokens_BND = looks.tokens_BND.float().cpu()
    nothing = torch.empty(0)
    return [
        Seen(
            view=view,
            grid=looks.geometry.grid,
            num_prefix=looks.geometry.num_prefix,
            patch_size=patch_pixels(served.config, view.model_size),
            # Copies, or the whole batch would stay as long as one photo of it.
            layers=tuple(
                Heads(
                    q_BANE[index : index + 1].clone(memory_format=torch.contiguous_format),
                    k_BANE[index : index + 1].clone(memory_format=torch.contiguous_format),
                    nothing,
                    mask,
                    nothing,
                )
                for q_BANE, k_BANE, mask in layers
            ),
            tokens_ND=tokens_BND[index].clone(),
            output_K=output_BK[index].clone(),
            heat={method: heat_Bhw[index].clone()},
        )
        for index, (_, view) in enumerate(items)
    ]


@functools.lru_cache(256)
def _counted(config: ViTConfig) -> Costs:
    return costs(config)


@torch.inference_mode()
def _shuffled(vit: ViT, image_CHW: Tensor, order_P: Tensor) -> Tensor:
    weight = vit.norm.weight
    image_BCHW = image_CHW[None].to(weight.device, weight.dtype)
    images = [image_BCHW, shuffle_patches(image_BCHW, vit.config.patch_size, order_P.to(weight.device))]
    models = [vit, vit if vit.config.position == "none" else without_positions(vit)]
    return torch.cat([model(image) for model in models for image in images]).float().cpu()


def _warm_up(loaded: Loaded, times: int = 5) -> list[float]:
    """Seconds of a few forward passes of one photo; the first of all, which takes longer, is left out."""
    weight, took = loaded.model.norm.weight, []
    image_1CHW = torch.zeros(
        1, loaded.config.in_channels, *loaded.preprocess.config.image_size, device=weight.device, dtype=weight.dtype
    )
    with torch.inference_mode():
        for _ in range(times + 1):
            start = time.perf_counter()
            loaded.model(image_1CHW)[0].sum().item()
            took.append(time.perf_counter() - start)
    return took[1:]
