"""Features judged by k-NN and probes, against references that are written another way."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import patchlight as pl
from models_at_random import tiny_vit
from patchlight.config import PreprocessConfig, ViTConfig
from patchlight.errors import PatchlightError
from patchlight.models.vit import ViT
from patchlight.reporting import Progress, Reporter
from patchlight.training import features
from patchlight.training.config import DataConfig, TrainConfig
from patchlight.training.data import Dataset, Names, evaluation_batches
from patchlight.training.evaluate import evaluate
from patchlight.training.features import (
    ATTENTIVE,
    LINEAR,
    AttentiveHead,
    FeatureEvaluation,
    Features,
    attentive_probe,
    evaluate_features,
    features_of,
    knn_accuracy,
    knn_of,
    linear_probe,
    patch_tokens_of,
)
from patchlight.weights.save import save


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "FEWEST_STEPS", 60)


def clouds(photos: int, classes: int = 8, width: int = 12, spread: float = 1.0, seed: int = 0) -> Features:
    """Points about one centre a class; the centres are the same for every seed."""
    centres = np.random.default_rng(100).normal(size=(classes, width))
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes, photos)
    points = centres[labels] + spread * random.normal(size=(photos, width))
    return Features(torch.tensor(points, dtype=torch.float32), torch.tensor(labels))


def naive_knn(
    train: np.ndarray, labels: np.ndarray, test: np.ndarray, truth: np.ndarray, k: int, temperature: float
) -> tuple[float, float]:
    """One pair of photos after another."""
    right = among_five = 0
    for photo, label in zip(test.astype(np.float64), truth.tolist(), strict=True):
        cosines = [float(photo @ other / math.sqrt((photo @ photo) * (other @ other))) for other in train.astype(float)]
        nearest = sorted(range(len(train)), key=lambda place: -cosines[place])[:k]
        votes: dict[int, float] = {}
        for place in nearest:
            votes[int(labels[place])] = votes.get(int(labels[place]), 0.0) + math.exp(cosines[place] / temperature)
        order = sorted(votes, key=lambda each: (-votes[each], each))
        right += order[0] == label
        among_five += label in order[:5]
    return right / len(test), among_five / len(test)


@pytest.mark.parametrize(("k", "temperature"), [(20, 0.07), (1, 0.07), (7, 0.5), (500, 1.0)])
def test_knn_is_what_a_plain_loop_gives(k: int, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    train = clouds(150, spread=1.5)
    test = clouds(80, spread=1.5, seed=1)
    expected = naive_knn(*(each.numpy() for each in (*train, *test)), k, temperature)
    assert 0.3 < expected[0] < 0.99
    for rows in (2**16, 64, 7):  # in one part or in many, also parts smaller than k
        monkeypatch.setattr(features, "TRAIN_ROWS", rows)
        monkeypatch.setattr(features, "TEST_ROWS", rows)
        found = knn_accuracy(train, test, k=k, temperature=temperature)
        assert (found.accuracy, found.top5_accuracy) == expected
    assert (found.method, found.photos, found.details["train_photos"]) == ("knn", 80, 150)


def test_knn_looks_at_directions_and_not_at_lengths() -> None:
    train = clouds(100)
    test = clouds(50, seed=1)
    longer_ND = train.features * torch.linspace(0.1, 10, 100)[:, None]
    assert knn_accuracy(Features(longer_ND, train.labels_N), test).accuracy == knn_accuracy(train, test).accuracy


def test_a_low_temperature_leaves_the_nearest_neighbour_alone_to_vote() -> None:
    train = clouds(100, spread=1.5)
    test = clouds(60, spread=1.5, seed=1)
    sharp = knn_accuracy(train, test, temperature=1e-6)
    one = knn_accuracy(train, test, k=1)
    assert sharp.accuracy == one.accuracy


def test_a_class_without_votes_is_not_among_five() -> None:
    """All neighbours are of class 0; classes 1 to 5 tie at nothing."""
    train_ND, train_labels_N = torch.eye(6), torch.tensor([0, 0, 0, 0, 0, 6])
    test_MD = torch.tensor([[1.0, 1, 0, 0, 0, 0]])
    found = knn_accuracy(Features(train_ND, train_labels_N), Features(test_MD, torch.tensor([1])), k=2)
    assert (found.accuracy, found.top5_accuracy) == (0.0, 0.0)


def test_top5_is_none_with_five_classes() -> None:
    known = clouds(30, classes=5)
    assert knn_accuracy(known, known).top5_accuracy is None


def test_linear_probe_separates_what_a_plane_separates() -> None:
    """k-NN is lost in three loud numbers that mean nothing; a plane is not, and the rate is found."""
    train = clouds(600, classes=6, spread=0.3)
    test = clouds(200, classes=6, spread=0.3, seed=1)
    noise = torch.Generator().manual_seed(0)
    train = train._replace(features=torch.cat([train.features, 100 * torch.randn(600, 3, generator=noise)], 1))
    test = test._replace(features=torch.cat([test.features, 100 * torch.randn(200, 3, generator=noise)], 1))
    found = linear_probe(train, test, replace(LINEAR, epochs=10))
    assert found.accuracy > 0.98
    assert knn_accuracy(train, test).accuracy < 0.6
    assert found.details["rate"] in LINEAR.rates
    assert found.method == "linear"


def test_linear_probe_reaches_the_best_linear_classifier() -> None:
    """Two overlapping clouds: the best plane is known, and so is its accuracy."""
    random = torch.Generator().manual_seed(0)
    labels_N = torch.arange(3000) % 2
    points_ND = torch.randn(3000, 5, generator=random)
    points_ND[:, 0] += 2.0 * labels_N
    train, test = (Features(points_ND[part], labels_N[part]) for part in (slice(2000), slice(2000, None)))
    found = linear_probe(train, test, replace(LINEAR, epochs=10))
    best = ((points_ND[2000:, 0] > 1.0).long() == labels_N[2000:]).double().mean().item()
    assert best > 0.8
    assert found.accuracy == pytest.approx(best, abs=0.02)


@pytest.mark.usefixtures("few_steps")
def test_the_rate_is_chosen_without_a_look_at_the_test_photos() -> None:
    train = clouds(200)
    test = clouds(50, seed=1)
    quick = replace(LINEAR, epochs=1)
    found = linear_probe(train, test, quick)
    shuffled = linear_probe(train, test._replace(labels_N=test.labels_N.flip(0)), quick)
    assert found.details == shuffled.details
    assert max(found.details["rates"].values()) == found.details["rates"][f"{found.details['rate']:g}"]


@pytest.mark.usefixtures("few_steps")
def test_probes_of_one_seed_are_equal_and_leave_the_generator_alone() -> None:
    known, asked = clouds(120), clouds(40, seed=1)
    train, test = (each._replace(features=each.features.unflatten(1, (3, 4))) for each in (known, asked))
    before = torch.get_rng_state()
    one = attentive_probe(train, test, replace(ATTENTIVE, epochs=1))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    two = attentive_probe(train, test, replace(ATTENTIVE, epochs=1))
    assert one == two


def test_attentive_probe_finds_the_patch_that_matters() -> None:
    """One patch of nine, marked by a number, tells the class; the mean over patches drowns it."""
    random = np.random.default_rng(0)
    tokens = random.normal(size=(900, 9, 6)).astype(np.float32)
    labels = random.integers(0, 3, 900)
    for photo, place in enumerate(random.integers(0, 9, 900)):
        tokens[photo, :, :3] = 0
        tokens[photo, :, 4] = random.permutation(9) - 4  # of any order, so that the mean says nothing
        tokens[photo, place, 4] = 8
        tokens[photo, :, 5] = random.choice([-1, 0, 1], 9)
        tokens[photo, place, 5] = labels[photo] - 1
    tokens_NPD, labels_N = torch.tensor(tokens).half(), torch.tensor(labels)
    train, test = Features(tokens_NPD[:700], labels_N[:700]), Features(tokens_NPD[700:], labels_N[700:])
    found = attentive_probe(train, test, replace(ATTENTIVE, epochs=30), num_heads=2)
    assert found.accuracy > 0.9
    train, test = (each._replace(features=each.features.float().mean(1)) for each in (train, test))
    means = linear_probe(train, test, replace(LINEAR, epochs=10))
    assert means.accuracy < 0.7


def test_an_attentive_head_pools_by_softmax_of_its_queries() -> None:
    torch.manual_seed(1)
    head = AttentiveHead(6, 2, 4)
    tokens_BPD = torch.randn(3, 5, 6)
    pooled = np.zeros((3, 6))
    tokens = tokens_BPD.numpy()
    key, value = ((layer.weight.detach().numpy(), layer.bias.detach().numpy()) for layer in (head.key, head.value))
    for image in range(3):
        for each in range(2):
            part = slice(3 * each, 3 * each + 3)
            keys = tokens[image] @ key[0].T[:, part] + key[1][part]
            values = tokens[image] @ value[0].T[:, part] + value[1][part]
            scores = np.exp(keys @ head.query_AE[each].detach().numpy() / math.sqrt(3))
            pooled[image, part] = scores @ values / scores.sum()
    seen: list[Tensor] = []
    head.norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    assert head(tokens_BPD).shape == (3, 4)
    np.testing.assert_allclose(seen[0].detach().numpy(), pooled, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"test": torch.zeros(3, 5)}, "differ in shape"),
        ({"train": torch.full((4, 2), torch.nan)}, "features of 4 of 4 photos are not numbers"),
        ({"labels": torch.tensor([0, 1])}, "4 features with 2 labels"),
        ({"labels": torch.tensor([0, 1, -1, 0])}, "label -1"),
        ({"train": torch.zeros(0, 2), "labels": torch.zeros(0, dtype=torch.int64)}, "0 features"),
    ],
)
@pytest.mark.parametrize("judge", [knn_accuracy, linear_probe])
def test_features_that_cannot_be_judged_are_refused(judge: Any, change: dict[str, Tensor], message: str) -> None:
    parts = {"train": torch.randn(4, 2), "labels": torch.tensor([0, 1, 0, 1]), "test": torch.randn(3, 2)} | change
    with pytest.raises(PatchlightError, match=message):
        judge(Features(parts["train"], parts["labels"]), Features(parts["test"], torch.tensor([0, 1, 1])))


def images_in_memory(photos: int = 40, classes: int = 2, seed: int = 0) -> Dataset:
    """Noise, with a colour for each class."""
    random = np.random.default_rng(seed)
    labels = np.arange(photos) % classes
    images = random.integers(0, 120, (photos, 3, 32, 32))
    images[np.arange(photos), labels % 3] += 100
    return Dataset(
        [f"class {k}" for k in range(classes)],
        torch.tensor(labels),
        Names(f"{index}.png" for index in range(photos)),
        images_NCHW=torch.tensor(images.astype(np.uint8)),
    )


def batches_of(dataset: Dataset, batch_size: int = 16) -> Any:
    preprocess = PreprocessConfig(image_size=32)
    return evaluation_batches(dataset, batch_size=batch_size, preprocess=preprocess, workers=0, device="cpu")


def test_features_are_the_models_own_before_the_head() -> None:
    model, dataset = tiny_vit(num_registers=2).train(), images_in_memory()
    model.blocks[0].eval()
    features_ND, labels_N = features_of(model, batches_of(dataset))
    assert model.training
    assert not model.blocks[0].training
    images = torch.cat([images_BCHW for images_BCHW, _, _ in batches_of(dataset)])
    with torch.no_grad():
        x_BND = model.eval().tokens(images)
    torch.testing.assert_close(features_ND, x_BND[:, 0], atol=1e-5, rtol=0)
    assert torch.equal(labels_N, dataset.labels_N)
    means_ND, _ = features_of(model, batches_of(dataset), pooling="mean")
    torch.testing.assert_close(means_ND, x_BND[:, 3:].mean(1), atol=1e-5, rtol=0)
    tokens_NPD, _ = patch_tokens_of(model, batches_of(dataset))
    torch.testing.assert_close(tokens_NPD.float(), x_BND[:, 3:], atol=2e-2, rtol=2e-3)
    with pytest.raises(PatchlightError, match="no photos"):
        features_of(model, [])


def test_the_interval_and_summary_are_as_of_an_evaluation() -> None:
    class Answers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, images: Tensor) -> Tensor:
            return images[:, :, 0, 0] * self.scale

    logits, labels = torch.eye(4)[[0, 1, 2, 3, 0, 0]], torch.tensor([0, 1, 2, 3, 1, 2])
    other = evaluate(Answers(), [(logits[:, :, None, None], labels, torch.arange(6))], "abcd")
    ours = FeatureEvaluation("knn", 6, 4 / 6, None, {"k": 20})
    assert ours.accuracy_interval == other.accuracy_interval
    summary = ours.summary()
    shared = ("photos", "accuracy", "accuracy_interval", "top5_accuracy")
    assert {name: summary[name] for name in shared} == {name: other.summary()[name] for name in shared}
    assert (summary["method"], summary["k"]) == ("knn", 20)
    json.dumps(summary)


def settings(**changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "model": ViTConfig(image_size=32, patch_size=8, width=24, depth=3, num_heads=2, num_classes=2),
        "data": DataConfig(train="none", workers=0),
        "preprocess": PreprocessConfig(image_size=32),
    }
    return TrainConfig(**{**values, **changes})


def test_knn_in_the_course_of_a_run() -> None:
    model, training, validation = tiny_vit(), images_in_memory(60), images_in_memory(30, seed=1)
    found = knn_of(model, training, validation, settings(), "cpu")
    features_ND, labels_N = features_of(model, batches_of(training))
    judged_MD, judged_labels_M = features_of(model, batches_of(validation))
    assert found == knn_accuracy(Features(features_ND, labels_N), Features(judged_MD, judged_labels_M))
    assert found.accuracy > 0.7
    few = knn_of(model, training, validation, settings(), "cpu", most=20)
    assert (few.photos, few.details["train_photos"]) == (20, 20)
    assert few == knn_of(model, training, validation, settings(), "cpu", most=20)
    with pytest.raises(PatchlightError, match="two classes"):
        knn_of(model, images_in_memory(classes=1), validation, settings(), "cpu")
    half = knn_of(model, training, validation, settings(precision="bfloat16"), "cpu")
    assert half.accuracy == pytest.approx(found.accuracy, abs=0.15)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model: ViT = tiny_vit(num_classes=0)
    save(model, tmp_path / "model", preprocess=PreprocessConfig(image_size=32))
    return tmp_path / "model"


def save_photos(folder: Path, photos: int, seed: int = 0) -> Path:
    dataset = images_in_memory(photos, seed=seed)
    assert dataset.images_NCHW is not None
    for index, (image, label) in enumerate(zip(dataset.images_NCHW, dataset.labels_N.tolist(), strict=True)):
        path = folder / ("red", "green")[label] / f"{index:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    return folder


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("method", ["knn", "linear", "attentive"])
def test_photos_in_a_folder(method: Any, saved: Path, tmp_path: Path) -> None:
    photos = save_photos(tmp_path / "photos", 60)
    (photos / "red" / "broken.png").write_bytes(b"not a photo")
    told: list[Progress] = []
    found = evaluate_features(saved, photos, method=method, workers=0, reporter=Reporter(progress=told.append))
    assert (found.method, found.photos, found.details["train_photos"]) == (method, 12, 48)
    assert found.accuracy > 0.7
    assert found.left_out == ("red/broken.png",)
    assert any("broken.png" in line for line in found.problems)
    assert found.details["classes"] == 2
    assert told
    json.dumps(found.summary())
    assert found == evaluate_features(pl.load(saved), str(photos), method=method, workers=0)


def test_parts_of_a_set_are_kept_apart(saved: Path, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    save_photos(photos / "train", 40)
    save_photos(photos / "val", 10, seed=1)
    found = evaluate_features(saved, photos, workers=0)
    assert (found.photos, found.details["train_photos"]) == (10, 40)
    others = save_photos(tmp_path / "others", 30, seed=2)
    found = evaluate_features(saved, photos, train=others, workers=0)
    assert (found.photos, found.details["train_photos"]) == (10, 30)


@pytest.mark.usefixtures("few_steps")
def test_an_attentive_probe_uses_as_many_photos_as_fit(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = save_photos(tmp_path / "photos", 60)
    monkeypatch.setattr(features, "MOST_TOKEN_BYTES", 30 * 16 * 24 * 2)  # 30 photos of 16 patches
    found = evaluate_features(saved, photos, method="attentive", workers=0)
    assert (found.photos, found.details["train_photos"]) == (6, 24)
    assert any("50.0% of the photos" in line for line in found.problems)


def test_sets_that_cannot_judge_are_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(PatchlightError, match="method='knearest'"):
        evaluate_features(saved, tmp_path, method="knearest")  # type: ignore[arg-type]
    photos = save_photos(tmp_path / "photos", 2)
    with pytest.raises(PatchlightError, match="none to hold out"):
        evaluate_features(saved, photos, workers=0)
    (photos / "green" / "001.png").unlink()
    with pytest.raises(PatchlightError, match="one class"):
        evaluate_features(saved, photos, workers=0)
