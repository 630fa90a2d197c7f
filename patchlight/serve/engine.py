"""The models, loaded once, and what one forward pass of theirs showed of a photo."""

import dataclasses
import functools
import statistics
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from patchlight.config import Size, ViTConfig
from patchlight.costing import Costs, Latency, costs, measure_latency
from patchlight.deploy.engines import load_engine
from patchlight.errors import PatchlightError
from patchlight.explain.rollout import rollout
from patchlight.explain.shuffling import shuffle_patches, without_positions
from patchlight.geometry import Box, View
from patchlight.localizing.detector import Detector, DetectorOptions
from patchlight.localizing.heat import EXPORTED, HeatPass, Method, can_do
from patchlight.models.attention import Heads
from patchlight.models.vit import ViT
from patchlight.serve.diced import Diced, dice
from patchlight.serve.limits import Limits
from patchlight.serve.queues import Batches, BusyError
from patchlight.weights.load import Loaded, load

Outputs = Literal["boxes", "classes", "features"]


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
    exported: Loaded | None = None
    """Its exported form, which then says what photos show and where; what happens inside, the model does."""

    @property
    def latency_ms(self) -> float:
        return 1000 * statistics.median(self.took)

    @property
    def vit(self) -> ViT:
        """For what the page shows; refused where it is of another family."""
        if not isinstance(self.loaded.model, ViT):
            raise PatchlightError(
                f"{self.name} is a {type(self.loaded.model).__name__}, and this is of ViTs; /api/v1/predict takes all"
            )
        return self.loaded.model

    @property
    def is_shown(self) -> bool:
        """Whether the page takes it."""
        return isinstance(self.loaded.model, ViT)

    @property
    def config(self) -> ViTConfig:
        return self.vit.config

    def detector(self, method: str = "auto", options: DetectorOptions | None = None) -> Detector:
        return Detector.of(self.loaded, method, options)

    def answering(self, method: Method) -> Loaded:
        """The form of it that answers by this method."""
        return self.loaded if self.exported is None or not can_do(self.exported, method) else self.exported

    def giving(self, output: str | None, shape: Sequence[int]) -> Loaded:
        """The form of it that gives this of images of a shape; one that a client chose may not have been exported."""
        engine = None if self.exported is None else self.exported.engine
        if self.exported is None or engine is None or output not in engine.outputs or not engine.accepts(shape):
            return self.loaded
        return self.exported

    @property
    def names_classes(self) -> bool:
        try:
            self.loaded.check_names_classes()
        except PatchlightError:
            return False
        return True

    @property
    def on_cpu(self) -> bool:
        return self.loaded.device.type == "cpu"


@dataclass(frozen=True, eq=False)
class Seen:
    """What one pass over one photo showed, on the CPU; nothing in it hangs on the photos beside it."""

    view: View
    grid: Size
    num_prefix: int
    patch_size: tuple[float, float]
    layers: tuple[Heads, ...]
    """The queries and keys of every block, a batch of one; values and outputs are not kept. None of an answer by its
    exported form alone, see `Seen.whole`."""
    tokens_ND: Tensor
    output_K: Tensor
    """Logits, or features of a model without classes."""
    heat: dict[Method, Tensor] = field(default_factory=dict)
    """By method: heat_hw."""
    patches: dict[Method, Tensor] = field(default_factory=dict)
    """By method: what the patches say of their objects, patches_hw5, where they do (see `HeatPass.patch_boxes`)."""

    @property
    def whole(self) -> bool:
        """Whether what happened inside the model was looked at, too."""
        return bool(self.layers)

    @functools.cached_property
    def nbytes(self) -> int:
        heads = (tensor for layer in self.layers for tensor in (layer.q_BANE, layer.k_BANE, layer.mask))
        tensors = [*(each for each in heads if each is not None), self.tokens_ND, self.output_K, *self.heat.values()]
        tensors += self.patches.values()
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
    whole: bool


@dataclass(frozen=True, slots=True)
class _Prediction:
    model: int
    outputs: Outputs | Literal["logits"]
    shape: tuple[int, ...]
    subjects: int


@dataclass(frozen=True, slots=True)
class _Other:
    """Something else that the model's thread does, one item after the other."""

    what: Literal["rollout", "shuffle", "dice", "costs", "latency"]
    model: int = 0


class Engine:
    """Loads in the background, and then answers one batch after the other."""

    def __init__(
        self,
        sources: Sequence[str],
        *,
        exported: Sequence[str | Path] = (),
        device: str = "cpu",
        limits: Limits | None = None,
        loaded: Sequence[Loaded] = (),
    ) -> None:
        """`exported`: folders of the exported forms of some of these models. `loaded`: the models, if that was done."""
        self.sources = tuple(sources)
        self.exported = tuple(exported)
        self._given = tuple(loaded)
        self.limits = limits or Limits()
        self.device = device
        self.models: tuple[Served, ...] = ()
        self.failure: Exception | None = None
        self.told: Callable[[str, int, float], None] = lambda name, photos, seconds: None
        """Hears of each batch of photos: the model, how many photos, and the seconds that it took."""
        self.batches = Batches(self._run, most=self.limits.batch, limit=self.limits.queue, told=self._ran)
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
            exported = [load_engine(folder).loaded for folder in self.exported]
            for number, source in enumerate(self.sources):
                if self._closing:
                    return
                loaded = self._given[number] if self._given else load(source, device=self.device)
                loaded.preprocess.check_channels()
                macs = _counted(loaded.config).macs
                own = next((each for each in exported if _is_of(each, loaded)), None)
                if own is not None:
                    exported.remove(own)
                    _check_exported(own, loaded)
                if number == len(self.sources) - 1:
                    _refuse_others(exported)
                took = deque(_warm_up(loaded, own), maxlen=31)
                name = Path(source).name if Path(source).exists() else source  # a path is nobody's business
                self.models = (*self.models, Served(number, name, loaded, macs, took, own))
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
        """Take nothing more, and do what waits; whether both threads, the model's and the one that loads, have ended.

        The one that loads is not waited for: nobody needs it any more.
        """
        self._closing = True
        return self.batches.close(timeout) and not self._loader.is_alive()

    def model(self, number: int) -> Served:
        if not self.ready:
            raise BusyError("the model is being loaded; try again in a moment")
        if not 0 <= number < len(self.models):
            raise UnknownModelError(f"there is no model {number}; /api/v1/models lists those that are served")
        return self.models[number]

    def named(self, text: str) -> Served:
        """By its number or name."""
        if text.isascii() and text.isdecimal():
            return self.model(int(text[:9]))
        self.model(0)  # says so while it is being loaded
        for served in self.models:
            if served.name == text:
                return served
        names = ", ".join(served.name for served in self.models)
        raise UnknownModelError(f"there is no model {text!r:.60}; {names} is served")

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
            heat, patches = before.heat | seen.heat, before.patches | seen.patches
            seen = dataclasses.replace(before if before.whole else seen, heat=heat, patches=patches)
        self._seen[photo, model] = seen
        total = sum(each.nbytes for each in self._seen.values())
        while len(self._seen) > 1 and total > self.limits.seen_bytes:
            total -= self._seen.popitem(last=False)[1].nbytes
        return seen

    def forget(self, photo: str) -> None:
        for key in [key for key in self._seen if key[0] == photo]:
            del self._seen[key]

    # What is asked of the model's thread

    def look(
        self, served: Served, image_CHW: Tensor, view: View, method: Method, *, whole: bool = True
    ) -> "Future[Seen]":
        """A future `Seen` with the heat of this method, and if `whole` what happened inside the model."""
        return self.batches.submit(_Look(served.number, method, tuple(image_CHW.shape), whole), (image_CHW, view))

    def predict(
        self,
        served: Served,
        outputs: Outputs | Literal["logits"],
        image_CHW: Tensor,
        view: View | None = None,
        subjects: int = 1,
    ) -> "Future[Any]":
        """A future `Localization`, with a view; logits_K; or features_D."""
        wanted: Outputs | Literal["logits"] = "logits" if outputs == "classes" else outputs
        key = _Prediction(served.number, wanted, tuple(image_CHW.shape), subjects if wanted == "boxes" else 0)
        return self.batches.submit(key, (image_CHW, view))

    def rollout(self, served: Served, image_CHW: Tensor) -> "Future[Tensor]":
        """A future heat_hw."""
        return self.batches.submit(_Other("rollout", served.number), image_CHW)

    def shuffle(self, vit: ViT, image_CHW: Tensor, order_P: Tensor) -> "Future[Tensor]":
        """Future logits (4, K): as it is, shuffled, and both without positions."""
        return self.batches.submit(_Other("shuffle"), (vit, image_CHW, order_P))

    def dice(
        self, vit: ViT, image_CHW: Tensor, layer: int, order_P: Tensor | None, *, positions: bool
    ) -> "Future[Diced]":
        return self.batches.submit(_Other("dice"), (vit, image_CHW, layer, order_P, positions))

    def costs(self, config: ViTConfig) -> "Future[Costs]":
        """Counted by the model's thread, since the counter listens to all modules of the process."""
        return self.batches.submit(_Other("costs"), config)

    def latency(self, config: ViTConfig) -> "Future[Latency]":
        """A future `Latency` of a fresh model of this config."""
        return self.batches.submit(_Other("latency"), config)

    def _ran(self, key: Hashable, count: int, seconds: float) -> None:
        if isinstance(key, _Look | _Prediction):
            self.told(self.models[key.model].name, count, seconds)

    def _run(self, key: Hashable, items: Sequence[Any]) -> Sequence[Any]:
        if isinstance(key, _Look):
            return self._look(self.models[key.model], key.method, items, whole=key.whole)
        if isinstance(key, _Prediction):
            return self._predict(self.models[key.model], key, items)
        assert isinstance(key, _Other)
        match key.what:
            case "rollout":
                model = self.models[key.model].loaded.model
                return [rollout(model, image_CHW[None])[0].float().cpu() for image_CHW in items]
            case "shuffle":
                return [_shuffled(*item) for item in items]
            case "dice":
                return [dice(*item, positions=positions) for *item, positions in items]
            case "costs":
                return [_counted(config) for config in items]
            case "latency":
                return [measure_latency(config, device=self.device, seconds=0.25) for config in items]

    def _look(
        self, served: Served, method: Method, items: Sequence[tuple[Tensor, View]], *, whole: bool = True
    ) -> list[Seen]:
        if served.on_cpu:
            # One after the other is no slower on a CPU, and every photo gets the answer that it gets alone, bit by bit.
            return [self._alone(served, method, item, whole=whole) for item in items]
        # An accelerator takes the same time for a full batch, and with one size for all there is one kernel for all.
        filled = [*items, *([items[0]] * (self.limits.batch - len(items)))]
        return _pass(served, method, filled)[: len(items)]

    def _predict(self, served: Served, key: _Prediction, items: Sequence[tuple[Tensor, View | None]]) -> list[Any]:
        """In batches as `_look`."""
        if served.on_cpu:
            return [_predicted_alone(served, key, item) for item in items]
        filled = [*items, *([items[0]] * (self.limits.batch - len(items)))]
        return _predicted(served, key, filled)[: len(items)]

    def _alone(self, served: Served, method: Method, item: tuple[Tensor, View], *, whole: bool) -> Seen:
        start = time.perf_counter()
        if served.answering(method).engine is not None:
            answer = _answer(served, method, *item)
            if not whole:
                served.took.append(time.perf_counter() - start)
                return answer
            (inside,) = _pass(served, method, [item])
            return dataclasses.replace(inside, output_K=answer.output_K, heat=answer.heat, patches=answer.patches)
        (seen,) = _pass(served, method, [item])
        served.took.append(time.perf_counter() - start)
        return seen


def _is_of(exported: Loaded, loaded: Loaded) -> bool:
    """Whether this is the exported form of that model."""
    return exported.provenance.sha256 == loaded.provenance.sha256 and exported.config == loaded.config


def _check_exported(exported: Loaded, loaded: Loaded) -> None:
    """Refuse what cannot answer in the model's stead."""
    assert exported.engine is not None
    if loaded.device.type != "cpu":
        raise PatchlightError(f"{exported.engine.folder}: exported models run on the CPU; add --device cpu")
    Detector.of(exported)
    if loaded.config.num_classes:
        exported.check_outputs("logits")


def _refuse_others(exported: Sequence[Loaded]) -> None:
    """What is no form of any model that is served."""
    for each in exported:
        assert each.engine is not None
        raise PatchlightError(
            f"{each.engine.folder}: was exported from {each.provenance.source}, and from no model that is served (or "
            "twice); add that as --model, or leave this --engine out"
        )


def _answer(served: Served, method: Method, image_CHW: Tensor, view: View) -> Seen:
    """What the exported form of a model says of a photo."""
    loaded = served.answering(method)
    seen = HeatPass(loaded, image_CHW[None], [method])
    heat_hw, patches_Bhw5 = seen.heat(method)[0], seen.patch_boxes(method)
    given = {} if loaded.engine is None else loaded.engine.outputs
    output_BK = seen.logits() if "logits" in given else torch.empty(1, 0)
    return Seen(
        view=view,
        grid=(heat_hw.shape[0], heat_hw.shape[1]),
        num_prefix=served.config.num_prefix,
        patch_size=served.config.patch_pixels(view.model_size),
        layers=(),
        tokens_ND=torch.empty(0),
        output_K=output_BK[0],
        heat={method: heat_hw},
        patches={} if patches_Bhw5 is None else {method: patches_Bhw5[0]},
    )


@torch.inference_mode()
def _pass(served: Served, method: Method, items: Sequence[tuple[Tensor, View]]) -> list[Seen]:
    """One forward pass, from which everything that the page shows at once is taken."""
    layers: list[tuple[Tensor, Tensor, Tensor | None]] = []

    def keep(index: int, heads: Heads, x_BND: Tensor) -> None:
        mask = None if heads.mask is None else heads.mask.float().cpu()
        layers.append((heads.q_BANE.float().cpu(), heads.k_BANE.float().cpu(), mask))

    looks = HeatPass(served.loaded, torch.stack([image_CHW for image_CHW, _ in items]), [method], keep)
    heat_Bhw = looks.heat(method).float().cpu()
    patches_Bhw5 = looks.patch_boxes(method)
    patches_Bhw5 = None if patches_Bhw5 is None else patches_Bhw5.float().cpu()
    output_BK = looks.logits().float().cpu()
    assert looks.tokens_BND is not None
    tokens_BND = looks.tokens_BND.float().cpu()
    nothing = torch.empty(0)
    return [
        Seen(
            view=view,
            grid=looks.geometry.grid,
            num_prefix=looks.geometry.num_prefix,
            patch_size=served.config.patch_pixels(view.model_size),
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
            patches={} if patches_Bhw5 is None else {method: patches_Bhw5[index].clone()},
        )
        for index, (_, view) in enumerate(items)
    ]


@torch.inference_mode()
def _predicted(served: Served, key: _Prediction, items: Sequence[tuple[Tensor, View | None]]) -> list[Any]:
    image_BCHW = torch.stack([image_CHW for image_CHW, _ in items])
    if key.outputs == "boxes":
        detector = served.detector(options=DetectorOptions(subjects=key.subjects or None))
        detector = dataclasses.replace(detector, loaded=served.giving(EXPORTED.get(detector.method), image_BCHW.shape))
        return detector.look(image_BCHW, [view for _, view in items if view is not None])
    output: Literal["logits", "features"] = "features" if key.outputs == "features" else "logits"
    return list(served.giving(output, image_BCHW.shape).answer(image_BCHW, output))


def _predicted_alone(served: Served, key: _Prediction, item: tuple[Tensor, View | None]) -> Any:
    start = time.perf_counter()
    (said,) = _predicted(served, key, [item])
    served.took.append(time.perf_counter() - start)
    return said


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


def _warm_up(loaded: Loaded, exported: Loaded | None, times: int = 5) -> list[float]:
    """Seconds of a few forward passes of one photo; the first of all, which takes longer, is left out."""
    weight, took = loaded.model.norm.weight, []
    image_1CHW = torch.zeros(
        1, loaded.config.in_channels, *loaded.preprocess.config.image_size, device=weight.device, dtype=weight.dtype
    )
    with torch.inference_mode():
        for _ in range(times + 1):
            start = time.perf_counter()
            if exported is not None and exported.engine is not None:
                exported.engine(image_1CHW.numpy())
            else:
                loaded.model(image_1CHW)[0].sum().item()
            took.append(time.perf_counter() - start)
    return took[1:]
