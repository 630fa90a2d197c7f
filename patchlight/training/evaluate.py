"""How good a model is on labelled photos: how often right, what it confuses, and whether to believe its confidence.

All numbers are computed in float64 from the logits of all photos together, so that the size of the batches is not in
them.
"""

import contextlib
import difflib
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from patchlight.errors import PatchlightError, and_more
from patchlight.reporting import SILENT, Progress, Reporter
from patchlight.training.data import evaluation_batches
from patchlight.training.own_dataset import name_of
from patchlight.training.scan import scan
from patchlight.training.sources import Photos, open_dataset, require_photos
from patchlight.training.trained_on import warnings_of
from patchlight.weights.load import Loaded
from patchlight.weights.vit.names import PROJECTIONS

BINS = 15
"""Of the confidence, from 0 to 1, all of one width."""

MOST_MISTAKES = 100

TEMPERATURES = (0.01, 100.0)
"""Range that is searched for the best temperature."""

Batch = tuple[Tensor, Tensor, Tensor]
"""images_BCHW as the model takes them, labels_B of its classes, and indices_B that say which photos they are."""


class NoNumbersError(PatchlightError):
    """The model's output contains NaN or infinity."""


@dataclass(frozen=True)
class ClassResult:
    """Results for one class."""

    name: str
    photos: int
    """Photos of this class."""
    predicted: int
    """Photos that the model assigned to this class."""
    recall: float | None
    """The share of the class's photos that were recognised; None without photos."""
    precision: float | None
    """The share that was right when the model said this class; None where it never did."""
    confused_with: str | None
    """What photos of this class were most often taken for, wrongly."""
    confused: int
    """Number of photos with that mistake."""


@dataclass(frozen=True)
class Bin:
    """The photos whose answers had a confidence above `low` and up to `high`; means are None where there are none."""

    low: float
    high: float
    photos: int
    confidence: float | None
    accuracy: float | None


@dataclass(frozen=True)
class Calibration:
    """Whether answers with a confidence of 80 % are right 80 % of the time."""

    error: float
    """Expected calibration error: |accuracy - confidence| of the bins, in the mean over photos."""
    loss: float
    """Cross-entropy in nats, in the mean over photos."""
    bins: tuple[Bin, ...]


@dataclass(frozen=True)
class Mistake:
    """A photo that was taken for another class."""

    index: int
    label: str
    predicted: str
    confidence: float


def interval_of(accuracy: float, photos: int) -> tuple[float, float]:
    """Where the accuracy on many more such photos would lie, with 95 % certainty (Wilson's interval)."""
    z, n, p = 1.959964, photos, accuracy
    middle, reach = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    low, high = ((middle + side * reach) / (1 + z**2 / n) for side in (-1, 1))
    return max(0.0, low), min(1.0, high)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What `evaluate` found."""

    classes: tuple[str, ...]
    photos: int
    accuracy: float
    top5_accuracy: float | None
    """The share of photos whose class was among the five likeliest; None where there are five classes or fewer."""
    loss: float
    per_class: tuple[ClassResult, ...]
    """In the order of `classes`."""
    calibration: Calibration
    temperature: float
    """What the logits are best divided by; more than 1 where the model is too sure. Fitted on these very photos."""
    calibrated: Calibration
    """With that temperature: how good it could be, which other photos will not quite give."""
    mistakes: tuple[Mistake, ...]
    """Mistakes, the most confident first; at most a hundred."""
    labels_N: Tensor
    predicted_N: Tensor

    @functools.cached_property
    def confusion_KK(self) -> Tensor:
        """How many photos of each class (rows) were taken for each class (columns), int64."""
        count = len(self.classes)
        return torch.bincount(self.labels_N * count + self.predicted_N, minlength=count**2).view(count, count)

    @property
    def accuracy_interval(self) -> tuple[float, float]:
        return interval_of(self.accuracy, self.photos)

    def course(self) -> dict[str, float]:
        return {"accuracy": self.accuracy}

    def summary(self) -> dict[str, Any]:
        """The figures that stand for the rest."""
        return {
            "photos": self.photos,
            "accuracy": self.accuracy,
            "accuracy_interval": list(self.accuracy_interval),
            "top5_accuracy": self.top5_accuracy,
            "loss": self.loss,
            "calibration_error": self.calibration.error,
            "temperature": self.temperature,
            "calibration_error_with_temperature": self.calibrated.error,
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything, in plain values for JSON.

        `confusion` lists [class, taken for, photos] for the pairs that occur, by the numbers of the classes: a whole
        matrix of a thousand classes would be mostly zeros.
        """
        pairs_M2, photos_M = torch.stack([self.labels_N, self.predicted_N], 1).unique(dim=0, return_counts=True)
        return self.summary() | {
            "classes": list(self.classes),
            "per_class": [asdict(result) for result in self.per_class],
            "calibration": asdict(self.calibration),
            "calibration_with_temperature": asdict(self.calibrated) | {"fitted_on": "the same photos"},
            "mistakes": [asdict(mistake) for mistake in self.mistakes],
            "confusion": torch.cat([pairs_M2, photos_M[:, None]], 1).tolist(),
        }


def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    classes: Sequence[str],
    *,
    device: str | torch.device | None = None,
    reporter: Reporter = SILENT,
) -> Evaluation:
    """Let a model classify photos whose classes are known.

    `batches` gives images (B, C, H, W) float, normalised, labels (B,) and the indices of the photos (B,); `classes`
    names the model's K outputs. The model is moved to `device`, where one is given, and is in the mode afterwards that
    it was in before.
    """
    if device is not None:
        model = model.to(device)
    logits_NK, labels_N, indices_N = _collect(model, batches, reporter)
    _check(logits_NK, labels_N, indices_N, classes)
    photos, num_classes = logits_NK.shape
    predicted_N = logits_NK.argmax(1)  # the first of several that are equal, which in bfloat16 is not rare
    right_N = predicted_N == labels_N
    confidence_N, loss_N = _confidence_and_loss(logits_NK, labels_N, predicted_N)
    temperature = _fit_temperature(logits_NK, labels_N)
    calibration = _calibrate(confidence_N, loss_N, right_N)
    return Evaluation(
        classes=tuple(classes),
        photos=photos,
        accuracy=int(right_N.sum()) / photos,
        top5_accuracy=_top_accuracy(logits_NK, labels_N, 5) if num_classes > 5 else None,
        loss=calibration.loss,
        per_class=_per_class(labels_N, predicted_N, classes),
        calibration=calibration,
        temperature=temperature,
        calibrated=_calibrate(*_confidence_and_loss(logits_NK, labels_N, predicted_N, temperature), right_N),
        mistakes=_mistakes(labels_N, predicted_N, confidence_N, indices_N, classes),
        labels_N=labels_N,
        predicted_N=predicted_N,
    )


@dataclass(frozen=True)
class Report:
    """The evaluation of a model on photos in files."""

    model: str
    photos: str
    """Path of the photos."""
    preprocess_fingerprint: str
    evaluation: Evaluation
    names: Sequence[str]
    """Of the photos, by their indices."""
    left_out: tuple[str, ...]
    """The names of those that cannot be read, or are not where a CSV says."""
    problems: tuple[str, ...]
    """What is wrong with the photos, a line each; of many of one kind the first."""

    def to_dict(self) -> dict[str, Any]:
        values = self.evaluation.to_dict()
        mistakes = [{"file": self.names[mistake["index"]]} | mistake for mistake in values["mistakes"]]
        source = {"model": self.model, "source": self.photos, "preprocess_fingerprint": self.preprocess_fingerprint}
        return source | values | {"mistakes": mistakes, "left_out": list(self.left_out)}


def evaluate_photos(
    loaded: Loaded,
    photos: Photos,
    *,
    label_column: str | None = None,
    batch_size: int = 64,
    workers: int = 2,
    reporter: Reporter = SILENT,
) -> Report:
    """Evaluate a model on the photos that `open_dataset` finds: the test or validation part, where there is one.

    Their classes are matched with the model's by name. Photos that cannot be read are left out.
    """
    config, source, labels = loaded.config, name_of(photos), loaded.labels
    if not config.num_classes or loaded.provenance.origin in PROJECTIONS:
        raise PatchlightError(
            f"{loaded.provenance.source}: has no head that gives classes; judge its features (knn, linear or attentive)"
        )
    loaded.preprocess.check_channels()
    reporter.progress(Progress(what="opening the photos"))
    dataset = open_dataset(photos, "test", label_column=label_column, workers=workers, reporter=reporter)
    require_photos(dataset, source)
    # A class that no photo has may be unknown to the model.
    numbers = dataset.labels_N.unique().tolist() if labels is not None else range(len(dataset.classes))
    try:
        outputs = match_classes([dataset.classes[number] for number in numbers], labels, config.num_classes)
    except PatchlightError as error:
        raise PatchlightError(f"{source}: {error}") from None
    output_of = torch.full((len(dataset.classes),), -1)
    output_of[list(numbers)] = torch.tensor(outputs, dtype=torch.int64)

    found = scan(dataset, workers=workers, reporter=reporter)
    readable = found.clean(dataset)
    if not len(readable):
        raise PatchlightError(
            f"{source}: none of its {len(dataset):,} photos can be read; {'; '.join(found.problems[:1])}"
        )
    problems = [*warnings_of(loaded.provenance.path.parent, readable), *found.problems]
    device = loaded.model.norm.weight.device
    batches = evaluation_batches(
        readable, batch_size=batch_size, preprocess=loaded.preprocess.config, workers=workers, device=device
    )
    matched = ((images_BCHW, output_of[labels_B.cpu()], indices_B) for images_BCHW, labels_B, indices_B in batches)
    return Report(
        model=loaded.provenance.source,
        photos=source,
        preprocess_fingerprint=loaded.preprocess.config.fingerprint(),
        evaluation=evaluate(loaded.model, matched, dataset.classes if labels is None else labels, reporter=reporter),
        names=readable.names,
        left_out=tuple(found.left_out),
        problems=tuple(problems),
    )


def match_classes(classes: Sequence[str], labels: Sequence[str] | None, num_outputs: int) -> list[int]:
    """The number of the model's output for each of the data's `classes`.

    Names are matched with the model's `labels`. A model without any takes the data's classes by their order, if there
    are as many as it has outputs.
    """
    if labels is None:
        if len(classes) != num_outputs:
            raise PatchlightError(
                f"the photos have {len(classes)} classes, and the model has {num_outputs} without names; save it with "
                "names (patchlight.save(..., labels=[...])), or give photos of all its classes"
            )
        return list(range(num_outputs))
    outputs: dict[str, list[int]] = {}
    for output, label in enumerate(labels):
        outputs.setdefault(label, []).append(output)
    unknown = [name for name in classes if name not in outputs]
    if unknown:
        raise PatchlightError(
            f"the model has no class {_with_nearest(unknown, labels)}; rename them as the model does, or leave their "
            f"photos out; it knows {_some([repr(label) for label in labels])}"
        )
    for name in classes:
        if len(outputs[name]) > 1:
            raise PatchlightError(
                f"the model has {len(outputs[name])} classes named {name!r}; save it with names that differ "
                "(patchlight.save(..., labels=[...]))"
            )
    return [outputs[name][0] for name in classes]


def _with_nearest(unknown: Sequence[str], labels: Sequence[str]) -> str:
    nearest = [difflib.get_close_matches(name, labels, n=1) for name in unknown[:5]]
    named = [f"{name!r} ({near[0]!r}?)" if near else repr(name) for name, near in zip(unknown, nearest, strict=False)]
    return _some(named + [""] * (len(unknown) - len(named)))


def _some(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + and_more(len(names), most)


@torch.inference_mode()
def _collect(model: nn.Module, batches: Iterable[Batch], reporter: Reporter) -> tuple[Tensor, Tensor, Tensor]:
    """The model's answers, float32 on the CPU: logits (N, K), and with them labels and indices, int64 (N,)."""
    weight = next(model.parameters())
    logits, labels, indices = [], [], []
    photos = 0
    with evaluating(model):
        for images_BCHW, labels_B, indices_B in batches:
            logits_BK = model(images_BCHW.to(weight.device, weight.dtype))
            logits.append(logits_BK.float().cpu())
            labels.append(labels_B.long().cpu())
            indices.append(indices_B.long().cpu())
            photos += len(labels_B)
            reporter.progress(Progress(what="evaluating photo", done=photos))
    if not photos:
        raise PatchlightError("there are no photos to evaluate the model on; name a folder or file that has some")
    return torch.cat(logits), torch.cat(labels), torch.cat(indices)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every part of the model in evaluation mode for a while; a frozen part may have been so before."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _check(logits_NK: Tensor, labels_N: Tensor, indices_N: Tensor, classes: Sequence[str]) -> None:
    num_classes = logits_NK.shape[1]
    if len(classes) != num_classes:
        raise PatchlightError(f"{len(classes)} classes are named, but the model has {num_classes}; name each of them")
    low, high = int(labels_N.min()), int(labels_N.max())
    if low < 0 or high >= num_classes:
        wrong = low if low < 0 else high
        raise PatchlightError(f"label {wrong} is not one of the model's {num_classes} classes; they count from 0")
    odd_N = ~logits_NK.isfinite().all(1)
    if odd_N.any():
        raise NoNumbersError(
            f"the model's answer is not a number for {int(odd_N.sum()):,} of {len(odd_N):,} photos (the first has "
            f"index {int(indices_N[odd_N][0])}); use float32, or an earlier checkpoint, if training went wrong"
        )


def _chunks(logits_NK: Tensor) -> Iterator[slice]:
    """Rows that are worked on together: float64 copies of all would take too much memory with many classes."""
    step = max(1, 2**22 // logits_NK.shape[1])
    return (slice(start, start + step) for start in range(0, len(logits_NK), step))


def _confidence_and_loss(
    logits_NK: Tensor, labels_N: Tensor, predicted_N: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Of each photo the probability of the answer, and the cross-entropy of its label, float64."""
    confidence, loss = [], []
    for rows in _chunks(logits_NK):
        log_BK = (logits_NK[rows].double() / temperature).log_softmax(1)
        confidence.append(log_BK.gather(1, predicted_N[rows, None])[:, 0].exp())
        loss.append(-log_BK.gather(1, labels_N[rows, None])[:, 0])
    return torch.cat(confidence), torch.cat(loss)


def _top_accuracy(logits_NK: Tensor, labels_N: Tensor, top: int) -> float:
    right = sum(int((ranks_of(logits_NK[rows], labels_N[rows]) < top).sum()) for rows in _chunks(logits_NK))
    return right / len(labels_N)


def ranks_of(scores_BK: Tensor, labels_B: Tensor) -> Tensor:
    """How many classes come before the right one; among equal scores the first class does, as in argmax."""
    own_B1 = scores_BK.gather(1, labels_B[:, None])
    before_BK = torch.arange(scores_BK.shape[1]) < labels_B[:, None]
    return ((scores_BK > own_B1) | ((scores_BK == own_B1) & before_BK)).sum(1)


def _fit_temperature(logits_NK: Tensor, labels_N: Tensor) -> float:
    """The temperature whose cross-entropy is the lowest, within `TEMPERATURES`.

    In 1 / temperature the loss is convex, so that Newton's steps find the lowest point; halving the interval, in
    logarithms, takes over where a step leaves it.
    """

    def slope_and_curve(inverse: float) -> tuple[float, float]:
        slope = curve = 0.0
        for rows in _chunks(logits_NK):
            logits_BK = logits_NK[rows].double()
            shares_BK = (logits_BK * inverse).softmax(1)
            mean_B1 = (shares_BK * logits_BK).sum(1, keepdim=True)
            slope += float((mean_B1 - logits_BK.gather(1, labels_N[rows, None])).sum())
            curve += float((shares_BK * (logits_BK - mean_B1).square()).sum())
        return slope, curve

    if (logits_NK == logits_NK[:, :1]).all():
        return 1.0  # a fresh head: nothing to scale
    if (logits_NK.argmax(1) == labels_N).all():
        return 1.0  # no mistake to go by: the lower the better, which says nothing of other photos
    low, high = 1 / TEMPERATURES[1], 1 / TEMPERATURES[0]
    if slope_and_curve(low)[0] >= 0:
        return TEMPERATURES[1]
    if slope_and_curve(high)[0] <= 0:
        return TEMPERATURES[0]
    inverse = 1.0
    for _ in range(100):
        slope, curve = slope_and_curve(inverse)
        low, high = (low, inverse) if slope > 0 else (inverse, high)
        step = inverse - slope / curve if curve > 0 else 0.0
        previous, inverse = inverse, step if low < step < high else math.sqrt(low * high)
        if abs(inverse - previous) <= 1e-9 * inverse:
            break
    return 1 / inverse


def _calibrate(confidence_N: Tensor, loss_N: Tensor, right_N: Tensor) -> Calibration:
    edges = [number / BINS for number in range(BINS + 1)]
    inner = torch.tensor(edges[1:-1], dtype=torch.float64)
    bin_N = torch.bucketize(confidence_N, inner)  # a confidence on an edge is in the bin below it
    photos = bin_N.bincount(minlength=BINS).tolist()
    right = right_N.double().new_zeros(BINS).index_add_(0, bin_N, right_N.double()).tolist()
    sure = confidence_N.new_zeros(BINS).index_add_(0, bin_N, confidence_N).tolist()
    bins = tuple(
        Bin(low, high, count, total / count if count else None, hits / count if count else None)
        for low, high, count, total, hits in zip(edges, edges[1:], photos, sure, right, strict=False)
    )
    gap = math.fsum(abs(hits - total) for hits, total in zip(right, sure, strict=True))
    return Calibration(error=gap / len(right_N), loss=float(loss_N.mean()), bins=bins)


def _per_class(labels_N: Tensor, predicted_N: Tensor, classes: Sequence[str]) -> tuple[ClassResult, ...]:
    num_classes, right_N = len(classes), labels_N == predicted_N
    photos_K = labels_N.bincount(minlength=num_classes).tolist()
    predicted_K = predicted_N.bincount(minlength=num_classes).tolist()
    right_K = labels_N[right_N].bincount(minlength=num_classes).tolist()
    worst: dict[int, tuple[int, int]] = {}  # of each class: how many were taken for which other
    pairs_M2 = torch.stack([labels_N, predicted_N], 1)[~right_N]
    for (label, other), photos in zip(*map(Tensor.tolist, pairs_M2.unique(dim=0, return_counts=True)), strict=True):
        if photos > worst.get(label, (0, 0))[0]:
            worst[label] = photos, other
    return tuple(
        ClassResult(
            name=name,
            photos=photos_K[k],
            predicted=predicted_K[k],
            recall=right_K[k] / photos_K[k] if photos_K[k] else None,
            precision=right_K[k] / predicted_K[k] if predicted_K[k] else None,
            confused_with=classes[worst[k][1]] if k in worst else None,
            confused=worst[k][0] if k in worst else 0,
        )
        for k, name in enumerate(classes)
    )


def _mistakes(
    labels_N: Tensor, predicted_N: Tensor, confidence_N: Tensor, indices_N: Tensor, classes: Sequence[str]
) -> tuple[Mistake, ...]:
    wrong_M = (labels_N != predicted_N).nonzero()[:, 0]
    wrong_M = wrong_M[indices_N[wrong_M].argsort(stable=True)]  # equally sure ones come in the order of the photos
    wrong_M = wrong_M[confidence_N[wrong_M].argsort(descending=True, stable=True)][:MOST_MISTAKES]
    columns = (each_N[wrong_M].tolist() for each_N in (indices_N, labels_N, predicted_N, confidence_N))
    return tuple(
        Mistake(index, classes[label], classes[predicted], confidence)
        for index, label, predicted, confidence in zip(*columns, strict=True)
    )
