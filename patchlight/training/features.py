"""How good a model's features are, without training it further: by the nearest labelled photos, or by a small head.

A model that learned without labels has no head to judge. Its features are good where photos of one class lie close
together (k-NN), or can be told apart by a plane (linear probe), or by a plane after looking at the right patches
(attentive probe).

Shapes: N photos with known labels, M photos to be judged on, D numbers in a feature, P patches, K classes.
"""

import copy
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchlight.errors import PatchlightError
from patchlight.models.attention import attend
from patchlight.models.families import Model
from patchlight.models.vit import Pooling
from patchlight.reporting import SILENT, Progress, Reporter
from patchlight.training.config import TrainConfig
from patchlight.training.data import Dataset, evaluation_batches, split, subset
from patchlight.training.evaluate import Batch, NoNumbersError, evaluating, interval_of, ranks_of
from patchlight.training.optim import FUSED_DEVICES
from patchlight.training.own_dataset import name_of
from patchlight.training.scan import scan
from patchlight.training.sources import open_dataset, require_photos
from patchlight.training.trained_on import warnings_of
from patchlight.weights.load import Loaded, load

Method = Literal["knn", "linear", "attentive"]


class Features(NamedTuple):
    """Features of labelled photos; both tensors may be on the CPU."""

    features: Tensor
    """One vector a photo, features_ND, or its patches' tokens, tokens_NPD."""
    labels_N: Tensor
    """int64, from 0."""


@dataclass(frozen=True, kw_only=True)
class ProbeTraining:
    """How a probe is trained: once for each learning rate, of which the best is kept."""

    rates: tuple[float, ...]
    epochs: float
    batch_size: int
    seed: int = 0


LINEAR = ProbeTraining(rates=(1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1), epochs=50.0, batch_size=256)
ATTENTIVE = ProbeTraining(rates=(3e-4, 1e-3, 3e-3, 1e-2), epochs=20.0, batch_size=64)

FEWEST_STEPS = 500
"""That a probe is trained for, however few photos there are."""

HELD_OUT = 0.1
"""Of the photos with known labels, for choosing the rate."""

TEST_ROWS, TRAIN_ROWS = 512, 2**16
"""Photos that are compared at once, which takes 128 MB."""

MOST_TOKEN_BYTES = 8 * 2**30
"""For all patches of all photos, which an attentive probe goes through many times."""


@dataclass(frozen=True)
class FeatureEvaluation:
    """How often photos were named right from their features."""

    method: Method
    photos: int
    accuracy: float
    top5_accuracy: float | None
    """The share of photos whose class was among the five likeliest; None where there are five classes or fewer."""
    details: Mapping[str, Any]
    """The method's settings, what it chose, and how many photos it learned from; plain values for JSON."""
    left_out: tuple[str, ...] = ()
    """The names of photos that cannot be read, or are not where a CSV says."""
    problems: tuple[str, ...] = field(default=(), repr=False)
    """What is wrong with the photos, a line each; of many of one kind the first."""

    @property
    def accuracy_interval(self) -> tuple[float, float]:
        return interval_of(self.accuracy, self.photos)

    def course(self) -> dict[str, float]:
        return {"accuracy": self.accuracy}

    def summary(self) -> dict[str, Any]:
        """The figures that stand for the rest, in plain values for JSON."""
        return {
            "method": self.method,
            "photos": self.photos,
            "accuracy": self.accuracy,
            "accuracy_interval": list(self.accuracy_interval),
            "top5_accuracy": self.top5_accuracy,
        } | dict(self.details)


# Features


def features_of(
    model: Model, batches: Iterable[Batch], *, pooling: Pooling | None = None, reporter: Reporter = SILENT
) -> Features:
    """One vector a photo, pooled as the config says or as asked, before any head: features_ND float32, on the CPU.

    `batches` is as for `evaluate`: images as the model takes them, labels, indices.
    """
    return _collect(model, batches, lambda images_BCHW: model.features(images_BCHW, pooling=pooling).float(), reporter)


def patch_tokens_of(model: Model, batches: Iterable[Batch], *, reporter: Reporter = SILENT) -> Features:
    """The patches' last tokens, tokens_NPD, float16 to save memory, on the CPU."""
    prefix = model.config.num_prefix
    return _collect(model, batches, lambda images_BCHW: model.tokens(images_BCHW)[:, prefix:].half(), reporter)


@torch.no_grad()
def _collect(model: Model, batches: Iterable[Batch], look: Callable[[Tensor], Tensor], reporter: Reporter) -> Features:
    weight = model.norm.weight
    found, labels = [], []
    photos = 0
    with evaluating(model):
        for images_BCHW, labels_B, _ in batches:
            # Copied, for what was pooled may be a view that holds on to every token.
            found.append(look(images_BCHW.to(weight.device, weight.dtype)).cpu().clone())
            labels.append(labels_B.long().cpu())
            photos += len(labels_B)
            reporter.progress(Progress(what="looking at photo", done=photos))
    if not photos:
        raise PatchlightError("there are no photos to look at; name a folder or file that has some")
    return Features(torch.cat(found), torch.cat(labels))


# Nearest neighbours


@torch.no_grad()
def knn_accuracy(
    train: Features,
    test: Features,
    *,
    k: int = 20,
    temperature: float = 0.07,
    device: torch.device | str | None = None,
) -> FeatureEvaluation:
    """Let each photo's `k` nearest neighbours, by the cosine, vote for its class with exp(cosine / temperature).

    As in DINO, but that a class without a vote is never among the five likeliest. The features go to `device` (else
    where those of `test` are) in parts, each of `train` once.
    """
    _check(train, test)
    (train_ND, train_labels_N), (test_MD, test_labels_M) = train, test
    if k < 1 or temperature <= 0:
        raise PatchlightError(f"k={k} and temperature={temperature} must be more than 0")
    chosen = torch.device(device) if device is not None else test_MD.device
    cosines_Mk, labels_Mk = _nearest(train_ND, train_labels_N, test_MD, min(k, len(train_ND)), chosen)
    num_classes = _num_classes(train_labels_N, test_labels_M)

    def votes(rows: slice) -> Tensor:
        # Relative to the nearest one, so that no temperature is too low; in float64 and in order, on the CPU, since
        # GPUs add up in any order.
        cosines_Bk = cosines_Mk[rows].double()
        votes_Bk = ((cosines_Bk - cosines_Bk[:, :1]) / temperature).exp()
        votes_BK = torch.zeros(len(votes_Bk), num_classes, dtype=torch.float64)
        return votes_BK.scatter_add_(1, labels_Mk[rows], votes_Bk)

    ranks_M = torch.cat([ranks_of(votes(rows), test_labels_M.cpu()[rows]) for rows in _parts(len(test_MD), 4096)])
    voted_M = (labels_Mk == test_labels_M.cpu()[:, None]).any(1)
    ranks_M[~voted_M] = num_classes
    details = {
        "k": k,
        "temperature": temperature,
        "train_photos": len(train_ND),
        "classes": num_classes,
        "commonest": int(test_labels_M.bincount().max()) / len(test_labels_M),  # its share of the photos
    }
    return _result("knn", ranks_M, num_classes, details)


def _nearest(
    train_ND: Tensor, train_labels_N: Tensor, test_MD: Tensor, k: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and labels (M, k) of the nearest neighbours, the nearest first, on the CPU."""
    best_Mk = torch.full((len(test_MD), k), -torch.inf, device=device)
    place_Mk = torch.zeros(len(test_MD), k, dtype=torch.int64, device=device)
    for train_rows in _parts(len(train_ND), TRAIN_ROWS):
        known_ND = F.normalize(train_ND[train_rows].to(device).float(), dim=1)
        for test_rows in _parts(len(test_MD), TEST_ROWS):
            asked_BD = F.normalize(test_MD[test_rows].to(device).float(), dim=1)
            cosines_BN = asked_BD @ known_ND.T
            near_Bk, where_Bk = cosines_BN.topk(min(k, len(known_ND)), dim=1)
            both = torch.cat([best_Mk[test_rows], near_Bk], 1)
            places = torch.cat([place_Mk[test_rows], where_Bk + train_rows.start], 1)
            best_Mk[test_rows], chosen_Bk = both.topk(k, dim=1)
            place_Mk[test_rows] = places.gather(1, chosen_Bk)
    return best_Mk.cpu(), train_labels_N.cpu()[place_Mk.cpu()]


# Probes


def linear_probe(
    train: Features,
    test: Features,
    training: ProbeTraining = LINEAR,
    *,
    device: torch.device | str | None = None,
    reporter: Reporter = SILENT,
) -> FeatureEvaluation:
    """A linear classifier on features that stay as they are: one for each learning rate, all trained in one pass.

    Features are brought to mean 0 and deviation 1. The rate is chosen on a tenth of the training features, which no
    classifier learned from; the accuracy is that of the chosen one on the test features. The same seed gives the same.
    """
    _check(train, test)

    def make_head() -> nn.Module:
        head = nn.Linear(train.features.shape[1], _num_classes(train.labels_N, test.labels_N))
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        return head

    return _probe("linear", make_head, train, test, training, device, reporter)


def attentive_probe(
    train: Features,
    test: Features,
    training: ProbeTraining = ATTENTIVE,
    *,
    num_heads: int = 1,
    device: torch.device | str | None = None,
    reporter: Reporter = SILENT,
) -> FeatureEvaluation:
    """As `linear_probe`, on patch tokens that a learned query pools by attention: see `AttentiveHead`."""
    _check(train, test)
    num_classes, width = _num_classes(train.labels_N, test.labels_N), train.features.shape[2]
    if width % num_heads:
        raise PatchlightError(f"num_heads={num_heads} does not divide the tokens' {width} numbers")
    make_head = functools.partial(AttentiveHead, width, num_heads, num_classes)
    return _probe("attentive", make_head, train, test, training, device, reporter)


class AttentiveHead(nn.Module):
    """tokens_BPD -> logits_BK: each head's learned query gathers from the patches what a linear layer then reads."""

    def __init__(self, width: int, num_heads: int, num_classes: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query_AE = nn.Parameter(torch.randn(num_heads, width // num_heads) * 0.02)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, num_classes)
        nn.init.zeros_(self.out.weight)

    def forward(self, tokens_BPD: Tensor) -> Tensor:
        k_BAPE, v_BAPE = (
            layer(tokens_BPD).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for layer in (self.key, self.value)
        )
        q_BA1E = self.query_AE[None, :, None].expand(len(tokens_BPD), -1, -1, -1)
        pooled_BD = attend(q_BA1E, k_BAPE, v_BAPE).flatten(1)
        return self.out(self.norm(pooled_BD))


def _probe(
    method: Method,
    make_head: Callable[[], nn.Module],
    train_set: Features,
    test_set: Features,
    training: ProbeTraining,
    device: torch.device | str | None,
    reporter: Reporter,
) -> FeatureEvaluation:
    (train, train_labels_N), (test, test_labels_M) = train_set, test_set
    train_labels_N, test_labels_M = train_labels_N.cpu(), test_labels_M.cpu()
    rates, batch_size = training.rates, training.batch_size
    chosen = torch.device(device) if device is not None else train.device
    if len(train) < 2:
        raise PatchlightError("a probe needs at least two photos to learn from, one of them to choose its rate by")
    generator = torch.Generator().manual_seed(training.seed)
    order_N = torch.randperm(len(train), generator=generator)
    held_out, learning = order_N.tensor_split([max(1, round(HELD_OUT * len(train)))])
    mean_D, deviation_D = _mean_and_deviation(train, learning, chosen)

    def inputs(features: Tensor, rows_B: Tensor) -> Tensor:
        return (features[rows_B].to(chosen).float() - mean_D) / deviation_D

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(training.seed)
        first = make_head().to(chosen)
    heads = [copy.deepcopy(first) for _ in rates]
    groups = [{"params": list(head.parameters()), "lr": rate} for head, rate in zip(heads, rates, strict=True)]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0, fused=chosen.type in FUSED_DEVICES)
    steps = max(FEWEST_STEPS, math.ceil(training.epochs * len(learning) / batch_size))
    with torch.enable_grad():
        for step, rows_B in zip(range(steps), _endless(learning, batch_size, generator), strict=False):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * (1 + math.cos(math.pi * step / steps)) / 2
            images, labels_B = inputs(train, rows_B), train_labels_N[rows_B].to(chosen)
            # Nothing joins the heads, so that each gets the gradient of its own part of the sum.
            loss = torch.stack([F.cross_entropy(head(images), labels_B) for head in heads]).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 50 == 0:
                reporter.progress(Progress(what="probe: step", done=step, total=steps))

    @torch.no_grad()
    def ranks(head: nn.Module, features: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        parts = (rows[part] for part in _parts(len(rows), batch_size))
        return torch.cat([ranks_of(head(inputs(features, part)).cpu(), labels[part]) for part in parts])

    scores = [float((ranks(head, train, train_labels_N, held_out) == 0).double().mean()) for head in heads]
    best = max(range(len(rates)), key=lambda index: scores[index])  # the lowest of equally good rates
    num_classes = _num_classes(train_labels_N, test_labels_M)
    details = {
        "rate": rates[best],
        "rates": {f"{rate:g}": score for rate, score in zip(rates, scores, strict=True)},
        "steps": steps,
        "train_photos": len(train),
        "classes": num_classes,
    }
    return _result(method, ranks(heads[best], test, test_labels_M, torch.arange(len(test))), num_classes, details)


def _endless(rows_N: Tensor, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Batches of these rows, in a new order each time round."""
    left = rows_N[:0]
    while True:
        while len(left) < batch_size:
            left = torch.cat([left, rows_N[torch.randperm(len(rows_N), generator=generator)]])
        batch, left = left.tensor_split([batch_size])
        yield batch


def _mean_and_deviation(features: Tensor, rows_N: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of each of the D numbers, over photos and patches; a number that never changes keeps its size."""
    total_D = square_D = torch.zeros(features.shape[-1], dtype=torch.float64)
    count = 0
    for part in _parts(len(rows_N), 1024):
        here = features[rows_N[part]].flatten(0, -2).cpu().double()
        total_D, square_D, count = total_D + here.sum(0), square_D + here.square().sum(0), count + len(here)
    mean_D = total_D / count
    deviation_D = (square_D / count - mean_D.square()).clamp(min=0).sqrt()
    deviation_D = torch.where(deviation_D > 1e-6, deviation_D, 1.0)
    return mean_D.float().to(device), deviation_D.float().to(device)


# What they share


def _parts(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _num_classes(*labels: Tensor) -> int:
    return 1 + max(int(each.max()) for each in labels)


def _result(method: Method, ranks_M: Tensor, num_classes: int, details: Mapping[str, Any]) -> FeatureEvaluation:
    return FeatureEvaluation(
        method=method,
        photos=len(ranks_M),
        accuracy=int((ranks_M < 1).sum()) / len(ranks_M),
        top5_accuracy=int((ranks_M < 5).sum()) / len(ranks_M) if num_classes > 5 else None,
        details=details,
    )


def _check(train: Features, test: Features) -> None:
    for name, (features, labels) in (("train", train), ("test", test)):
        if not len(features) or len(features) != len(labels):
            raise PatchlightError(f"{name}: {len(features)} features with {len(labels)} labels; give as many, and some")
        if int(labels.min()) < 0:
            raise PatchlightError(f"{name}: label {int(labels.min())} is not a class; they count from 0")
        bad = sum(int((~features[part].isfinite()).flatten(1).any(1).sum()) for part in _parts(len(features), 1024))
        if bad:
            raise NoNumbersError(
                f"{name}: the features of {bad:,} of {len(features):,} photos are not numbers; use float32, or an "
                "earlier checkpoint, if training went wrong"
            )
    shapes = [list(each.features.shape) for each in (train, test)]
    if shapes[0][1:] != shapes[1][1:]:
        raise PatchlightError(f"train and test features differ in shape: {shapes[0]}, {shapes[1]}")


# On photos where they lie


def evaluate_features(
    model: Loaded | str | os.PathLike[str],
    photos: str | os.PathLike[str],
    *,
    method: Method = "knn",
    train: str | os.PathLike[str] | None = None,
    label_column: str | None = None,
    batch_size: int = 64,
    workers: int = 2,
    device: str | torch.device | None = None,
    seed: int = 0,
    reporter: Reporter = SILENT,
) -> FeatureEvaluation:
    """Judge a model, or what `load` takes, by its features of the labelled photos that `open_dataset` finds.

    The photos are compared with those of `train`; without it with the training part of `photos`, or, where they have
    no parts, a fifth of them, chosen by content, with the rest. Photos that cannot be read are left out.
    """
    if method not in get_args(Method):
        raise PatchlightError(f"method={method!r} should be one of {', '.join(get_args(Method))}")
    if not isinstance(model, Loaded):
        model = load(Path(model) if isinstance(model, os.PathLike) else model, device=device or "cpu")
    model.preprocess.check_channels()
    vit = model.model if device is None else model.model.to(device)
    where = vit.norm.weight.device
    reporter.progress(Progress(what="opening the photos"))
    known, asked, left_out, problems = _open_sets(photos, train, label_column, workers, reporter)
    problems = [*warnings_of(model.provenance.path.parent, asked), *problems]
    if method == "attentive":
        patches = math.prod(vit.config.grid_for(model.preprocess.config.image_size))
        needed = (len(known) + len(asked)) * patches * vit.config.token_width * 2
        share = MOST_TOKEN_BYTES / needed
        if share < 1:
            problems.append(f"all patches would take {needed / 2**30:.0f} GiB: {share:.1%} of the photos are used")
            known, asked = subset(known, share, seed), subset(asked, share, seed)

    def batches(dataset: Dataset) -> Iterator[Batch]:
        return evaluation_batches(
            dataset,
            batch_size=batch_size,
            preprocess=model.preprocess.config,
            workers=workers,
            device=where,
        )

    if method == "attentive":
        train_set, test_set = (patch_tokens_of(vit, batches(each), reporter=reporter) for each in (known, asked))
        training, heads = replace(ATTENTIVE, seed=seed), vit.config.probe_heads
        result = attentive_probe(train_set, test_set, training, num_heads=heads, device=where, reporter=reporter)
    else:
        train_set, test_set = (features_of(vit, batches(each), reporter=reporter) for each in (known, asked))
        if method == "knn":
            result = knn_accuracy(train_set, test_set, device=where)
        else:
            result = linear_probe(train_set, test_set, replace(LINEAR, seed=seed), device=where, reporter=reporter)
    source = {"model": model.provenance.source, "source": name_of(photos)}
    return replace(result, details=source | dict(result.details), left_out=tuple(left_out), problems=tuple(problems))


def _open_sets(
    photos: str | os.PathLike[str],
    train: str | os.PathLike[str] | None,
    label_column: str | None,
    workers: int,
    reporter: Reporter,
) -> tuple[Dataset, Dataset, list[str], list[str]]:
    """The photos with known labels, those to be judged on, the names of those left out, and what is wrong."""
    asked: Dataset | None = open_dataset(photos, "test", label_column=label_column)
    assert asked is not None
    known = open_dataset(photos if train is None else train, "train", label_column=label_column)
    require_photos(known, name_of(photos if train is None else train))
    require_photos(asked, name_of(photos))
    if train is None and known.fingerprint() == asked.fingerprint():
        asked = None  # there are no parts
    found = scan(known, asked, workers=workers, reporter=reporter)
    if found.fatal:
        named = name_of(photos) if train is None else f"{name_of(photos)}, known by {name_of(train)}"
        raise PatchlightError(f"{named}: {'; '.join([*found.fatal, *found.problems[:1]])}")
    readable = found.clean(known)
    if asked is None:
        readable, judged = split(readable, 0.2)
    else:
        judged = found.clean_validation(asked)
    if not len(judged):
        raise PatchlightError(f"{name_of(photos)}: has one photo a class, and none to hold out; add photos")
    return readable, judged, found.left_out, list(found.problems)


def knn_of(
    model: Model,
    training: Dataset,
    validation: Dataset,
    config: TrainConfig,
    device: torch.device | str,
    *,
    most: int = 5000,
) -> FeatureEvaluation:
    """How good the features are in the course of a run: k-NN from at most `most` photos of each set.

    The sets have labels, of two classes or more; which photos are taken is the same every time.
    """
    if len(training.labels_N.unique()) < 2:
        raise PatchlightError("k-NN accuracy needs labelled photos of two classes or more; there is one")
    where = torch.device(device)
    found = []
    for dataset in (training, validation):
        if len(dataset) > most:
            dataset = subset(dataset, most / len(dataset), config.seed)
        batches = evaluation_batches(
            dataset,
            batch_size=min(1000, config.batch_size),
            preprocess=config.preprocess,
            workers=config.data.workers,
            device=where,
        )
        with torch.autocast(where.type, torch.bfloat16, enabled=config.precision == "bfloat16"):
            found.append(features_of(model, batches))
    return knn_accuracy(*found, device=where)


@dataclass(frozen=True)
class Unjudged:
    """Features that nothing can be compared with: the photos have no labels."""

    photos: int
    accuracy: None = None

    def course(self) -> dict[str, float]:
        return {}

    def summary(self) -> dict[str, Any]:
        return {"photos": self.photos}


def judge_features(
    model: Model, training: Dataset, validation: Dataset, config: TrainConfig, device: torch.device
) -> FeatureEvaluation | Unjudged:
    """By the nearest neighbours where photos have classes, which learning without labels did not use."""
    if len(set(training.labels_N.tolist()) & set(validation.labels_N.tolist())) < 2:
        return Unjudged(len(validation))
    return knn_of(model, training, validation, config, device)
