"""Where subjects are: the parts that are cut, what they cover, and a model that learns to look there."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from patchlight.config import PreprocessConfig, ViTConfig
from patchlight.errors import PatchlightError
from patchlight.images.augment import cut_parts
from patchlight.images.draws import Draws
from patchlight.signals import Stopped
from patchlight.training.config import DataConfig, OptimConfig, SubjectConfig, TrainConfig
from patchlight.training.loop import train
from patchlight.training.sources import open_dataset
from patchlight.training.subject import box_within, choose_parts, coverage, on_canvases, place_loss
from patchlight.weights.load import load

SIDE = 48


def draws_for(count: int) -> Draws:
    samples = torch.arange(count)
    return Draws(7, torch.zeros_like(samples), samples)


def some_boxes(count: int) -> tuple[Tensor, Tensor]:
    """Photos of many shapes on canvases of 48 x 48, and a box in each."""
    generator = torch.Generator().manual_seed(0)
    extents_B2 = torch.randint(16, SIDE + 1, (count, 2), generator=generator).float()
    ends = torch.rand(count, 2, 2, generator=generator).sort(dim=1).values
    boxes_B4 = (ends * extents_B2.flip(1)[:, None]).flatten(1)
    boxes_B4[:, 2:] = torch.minimum(boxes_B4[:, 2:] + 2, extents_B2.flip(1))
    return boxes_B4, extents_B2


def test_coverage_is_the_share_of_each_patch() -> None:
    box_B4 = torch.tensor([[0.1, 0.26, 0.83, 0.5], [-0.5, 0.2, 0.3, 1.7], [0.4, 0.4, 0.45, 0.45], [0.0, 0.0, 0.0, 0.0]])
    fine = 200  # points a patch, counted one by one
    at = (torch.arange(4 * fine) + 0.5) / (4 * fine)
    for box, covered_hw in zip(box_B4, coverage(box_B4, (4, 4)), strict=True):
        x0, y0, x1, y1 = box
        inside = ((at >= y0) & (at < y1))[:, None] & ((at >= x0) & (at < x1))
        counted = inside.float().view(4, fine, 4, fine).mean((1, 3))
        torch.testing.assert_close(covered_hw, counted, atol=0.01, rtol=0)


def test_parts_lie_in_the_photo_and_hold_the_subject_when_asked_to() -> None:
    boxes_B4, extents_B2 = some_boxes(2000)
    wide_high = extents_B2.flip(1)
    for whole in (0.0, 1.0):
        part_B4 = choose_parts(boxes_B4, extents_B2, draws_for(2000), SubjectConfig(whole=whole))
        assert (part_B4[:, :2] >= -1e-4).all()
        assert (part_B4[:, 2:] <= wide_high + 1e-4).all()
        assert (part_B4[:, 2:] - part_B4[:, :2] > 0.5).all()
        holds_B = ((part_B4[:, :2] <= boxes_B4[:, :2] + 1e-4) & (part_B4[:, 2:] >= boxes_B4[:, 2:] - 1e-4)).all(1)
        assert holds_B.all() if whole else 0.05 < holds_B.float().mean() < 0.6


def test_subjects_come_to_lie_anywhere() -> None:
    """A subject in the middle of its photo is in each third of the parts, across and down, about as often."""
    boxes_B4 = torch.tensor([[20.0, 20.0, 28.0, 28.0]]).expand(5000, -1)
    extents_B2 = torch.full((5000, 2), 48.0)
    part_B4 = choose_parts(boxes_B4, extents_B2, draws_for(5000), SubjectConfig(whole=1.0))
    within_B4 = box_within(boxes_B4, part_B4, torch.zeros(5000, dtype=torch.bool))
    middle_B2 = (within_B4[:, :2] + within_B4[:, 2:]) / 2
    shares = torch.stack([(middle_B2 < 1 / 3).float().mean(0), (middle_B2 > 2 / 3).float().mean(0)])
    assert (shares > 0.15).all()
    touches = (within_B4[:, :2] < 0.04).any(1) | (within_B4[:, 2:] > 0.96).any(1)
    assert touches.float().mean() > 0.3


def test_photos_without_a_box_get_any_part() -> None:
    boxes_B4, extents_B2 = torch.full((500, 4), torch.nan), torch.full((500, 2), 40.0)
    part_B4 = choose_parts(boxes_B4, extents_B2, draws_for(500), SubjectConfig(whole=1.0, area=(0.25, 1.0)))
    area_B = (part_B4[:, 2:] - part_B4[:, :2]).prod(1) / 1600
    assert part_B4.isfinite().all()
    assert 0.1 < area_B.min() < 0.4
    assert area_B.max() > 0.9


def test_what_is_covered_is_what_is_seen() -> None:
    """White boxes on black photos: the part's bright pixels are where the coverage says, mirrored parts included."""
    boxes_B4, extents_B2 = some_boxes(64)
    boxes_B4 = boxes_B4.round()
    images = torch.zeros(64, 3, SIDE, SIDE, dtype=torch.uint8)
    for image, (x0, y0, x1, y1) in zip(images, boxes_B4.int().tolist(), strict=True):
        image[:, y0:y1, x0:x1] = 255
    draws = draws_for(64)
    part_B4 = choose_parts(boxes_B4, extents_B2, draws, SubjectConfig(whole=0.7))
    flip_B = draws.chance("flip", 0.5)
    seen = cut_parts(images, part_B4, flip_B, (64, 64)).mean(1)
    covered = coverage(box_within(boxes_B4, part_B4, flip_B), (64, 64))
    assert flip_B.any()
    assert not flip_B.all()
    assert (seen - covered).abs().mean() < 0.03  # edges are interpolated
    assert (((seen > 0.5) != (covered > 0.5)).float().mean((1, 2)) < 0.08).all()


def test_the_place_loss_prefers_the_place() -> None:
    covered = coverage(torch.tensor([[0.25, 0.25, 0.75, 0.75]]), (8, 8))
    right, wrong, nothing = 6 * (2 * covered - 1), 6 * (1 - 2 * covered), torch.full_like(covered, -6.0)
    losses = [place_loss(heat, covered).item() for heat in (right, nothing, wrong)]
    assert losses[0] < 0.05 < losses[1] < losses[2]
    empty = torch.zeros_like(covered)
    assert place_loss(nothing, empty) < 0.2 < place_loss(right, empty)


@pytest.fixture(scope="module")
def boxed_photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Red or blue squares anywhere on noise, every third photo without a box."""
    folder = tmp_path_factory.mktemp("boxed")
    generator = np.random.default_rng(0)
    rows = []
    for index in range(160):
        height, width = generator.integers(28, 60, 2)
        pixels = generator.integers(0, 90, (height, width, 3), dtype=np.uint8)
        size = int(generator.integers(10, 22))
        x, y = int(generator.integers(0, width - size + 1)), int(generator.integers(0, height - size + 1))
        pixels[y : y + size, x : x + size, 0 if index % 2 else 2] = 250
        Image.fromarray(pixels).save(folder / f"{index}.png")
        box = ["", "", "", ""] if index % 3 == 0 else [x, y, x + size, y + size]
        rows.append([f"{index}.png", "red" if index % 2 else "blue", *box])
    with (folder / "photos.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["file", "label", "x0", "y0", "x1", "y1"], *rows])
    return folder / "photos.csv"


def settings(photos: Path) -> TrainConfig:
    return TrainConfig(
        model=ViTConfig(image_size=32, patch_size=4, width=32, depth=2, num_heads=2, num_registers=1, num_classes=2),
        data=DataConfig(train=str(photos), workers=0, validation_share=0.2),
        preprocess=PreprocessConfig(image_size=32, resize="squash", crop_pct=1.0),
        subject=SubjectConfig(canvas=48),
        optim=OptimConfig(name="muon", lr=3e-3, muon_lr=0.02),
        epochs=20.0,
        batch_size=32,
        ema=0.9,
        checkpoint_every=10,
        log_every=5,
    )


def test_canvases_keep_photos_and_scale_boxes(boxed_photos: Path) -> None:
    photos = open_dataset(boxed_photos)
    kept = on_canvases(photos, 48, workers=0)
    assert kept.images_NCHW is not None
    assert kept.marks is not None
    assert kept.extents_N2 is not None
    assert photos.marks is not None
    assert kept.images_NCHW.shape == (160, 3, 48, 48)
    large = small = 0
    for index in range(160):
        with Image.open(boxed_photos.parent / photos.names[index]) as image:
            scale = min(1.0, 48 / max(image.size))
            height, width = kept.extents_N2[index].tolist()
            assert (width, height) == pytest.approx((image.width * scale, image.height * scale), abs=0.5)
            if scale == 1:
                expected = torch.from_numpy(np.array(image)).permute(2, 0, 1)
                assert torch.equal(kept.images_NCHW[index][:, : image.height, : image.width], expected)
            large, small = large + (scale < 1), small + (scale == 1)
        torch.testing.assert_close(kept.marks.boxes_NM4[index], photos.marks.boxes_NM4[index] * scale, equal_nan=True)
    assert large
    assert small


def test_it_learns_to_look_at_the_subject_and_resumes_exactly(
    boxed_photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = train(settings(boxed_photos), tmp_path / "whole")
    summary = result.summary()
    assert summary["accuracy"] > 0.9
    assert summary["subject_found"] > 0.6  # a box in the middle finds 8 %, the whole photo none
    loaded = load(tmp_path / "whole")
    assert loaded.subject is not None
    assert loaded.subject.scale > 0
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["found"] == summary["subject_found"]

    import os
    import signal

    from patchlight.training.subject import FindSubject

    prepare, calls = FindSubject.prepare, [0]

    def interrupted(self: FindSubject, *arguments: object, **named: object) -> tuple[Tensor, ...]:
        calls[0] += 1
        if calls[0] == 33:
            os.kill(os.getpid(), signal.SIGINT)
        return prepare(self, *arguments, **named)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(FindSubject, "prepare", interrupted)
        with pytest.raises(Stopped):
            train(settings(boxed_photos), tmp_path / "parts")
    train(settings(boxed_photos), tmp_path / "parts", resume=True)
    for name, weight in load(tmp_path / "parts").model.state_dict().items():
        assert torch.equal(weight, loaded.model.state_dict()[name])
    assert load(tmp_path / "parts").subject == loaded.subject


def test_photos_without_boxes_are_refused(tmp_path: Path) -> None:
    for index in range(6):
        Image.new("RGB", (20, 20), (40 * index, 0, 0)).save(tmp_path / f"{index}.png")
    lines = "".join(f"{index}.png,{'ab'[index % 2]}\n" for index in range(6))
    (tmp_path / "photos.csv").write_text("file,label\n" + lines)
    with pytest.raises(PatchlightError, match="has no boxes; give a CSV with the columns file,label,x0,y0,x1,y1"):
        train(settings(tmp_path / "photos.csv"), tmp_path / "run")
