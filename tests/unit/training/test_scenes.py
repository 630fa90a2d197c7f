"""Photos with masks, several objects or nothing, and scenes that small subjects are pasted into."""

import csv
import dataclasses
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from patchlight.config import PreprocessConfig, SubjectHeat, ViTConfig
from patchlight.errors import PatchlightError
from patchlight.images.augment import cut_parts
from patchlight.images.draws import Draws
from patchlight.localizing.boxes import regions_of
from patchlight.models.vit import ViT
from patchlight.signals import Stopped
from patchlight.training import subject as subject_module
from patchlight.training.config import DataConfig, OptimConfig, TrainConfig
from patchlight.training.data import Batch
from patchlight.training.loop import train
from patchlight.training.marks import MASK_SIDE
from patchlight.training.scenes import NAMED_FROM, WIDTHS, paste_subjects
from patchlight.training.sources import open_dataset
from patchlight.training.subject import (
    FindSubject,
    SubjectConfig,
    choose_objects,
    coverage,
    evaluate_subjects,
    mask_coverage,
    mixed_coverage,
    on_canvases,
)
from patchlight.weights.load import load


def draws_for(count: int) -> Draws:
    samples = torch.arange(count)
    return Draws(7, torch.zeros_like(samples), samples)


KINDS = ("box", "class alone", "nothing", "mask", "several")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 photos in the five ways in turn: red or blue boxes on dark noise, half of them not named, or noise alone."""
    folder = tmp_path_factory.mktemp("kinds")
    generator = np.random.default_rng(0)
    rows = []
    for index in range(100):
        kind = KINDS[index % 5]
        height, width = (int(side) for side in generator.integers(40, 60, 2))
        pixels = generator.integers(0, 60, (height, width, 3), dtype=np.uint8)
        boxes = []
        for _ in range({"nothing": 0, "several": 2}.get(kind, 1)):
            x, y = int(generator.integers(2, width - 22)), int(generator.integers(2, height - 22))
            boxes.append([x, y, x + 20, y + 16])
            pixels[y : y + 16, x : x + 20, 0 if index % 2 else 2] = 250
        Image.fromarray(pixels).save(folder / f"{index}.png")
        mask = ""
        if kind == "mask":
            levels = np.zeros((height, width), np.uint8)
            ((x0, y0, x1, y1),) = boxes
            levels[y0:y1, x0:x1] = 255
            Image.fromarray(levels).save(folder / f"mask{index}.png")
            mask = f"mask{index}.png"
        label = "" if index % 20 >= 10 or kind == "nothing" else ("red" if index % 2 else "blue")
        given = json.dumps(boxes) if kind in ("box", "nothing", "several") else ""
        rows.append([f"{index}.png", label, given, mask])
    with (folder / "photos.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["file", "label", "boxes", "mask"], *rows])
    return folder / "photos.csv"


def settings(photos: Path, **subject: float) -> TrainConfig:
    return TrainConfig(
        model=ViTConfig(image_size=32, patch_size=4, width=32, depth=2, num_heads=2, num_registers=1, num_classes=2),
        data=DataConfig(train=str(photos), workers=0, validation_share=0.2),
        preprocess=PreprocessConfig(image_size=32, resize="squash", crop_pct=1.0),
        subject=SubjectConfig(canvas=64, **subject),
        optim=OptimConfig(name="muon", lr=3e-3, muon_lr=0.02),
        epochs=6.0,
        batch_size=16,
        ema=0.9,
        checkpoint_every=7,
        log_every=5,
    )


def learner_for(photos: Path, **subject: float) -> tuple[FindSubject, Batch]:
    """A fresh learner, and a batch of all photos."""
    kept = on_canvases(open_dataset(photos, unnamed=True), 64, workers=0)
    config = settings(photos, **subject)
    assert isinstance(config.model, ViTConfig)
    place_B = torch.arange(len(kept))
    assert kept.images_NCHW is not None
    batch = Batch(kept.images_NCHW, kept.labels_N, torch.zeros_like(place_B), place_B, torch.zeros_like(place_B))
    return FindSubject(ViT(config.model), config, kept), batch


# Masks


def test_a_mask_covers_what_is_seen_of_it() -> None:
    """A mask is painted white on a photo of its own size; the part's brightness is the coverage, mirrored or not."""
    count, extent = 64, 40
    noise = torch.rand(count, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    masks_BGG = torch.nn.functional.interpolate(noise, (MASK_SIDE, MASK_SIDE), mode="nearest")[:, 0].round()
    extents_B2 = torch.tensor([[48.0, extent]]).expand(count, -1)
    images = torch.zeros(count, 3, 48, 48, dtype=torch.uint8)
    shrunk = torch.nn.functional.interpolate(masks_BGG[:, None], (48, extent), mode="area")
    images[:, :, :, :extent] = (shrunk * 255).to(torch.uint8)
    images[:, :, :, extent:] = images[:, :, :, extent - 1 : extent]
    draws = draws_for(count)
    x0_B, y0_B = draws.uniform("x", 0, 20), draws.uniform("y", 0, 20)
    part_B4 = torch.stack((x0_B, y0_B, x0_B + draws.uniform("w", 8, 20), y0_B + draws.uniform("h", 8, 28)), 1)
    flip_B = draws.chance("flip", 0.5)
    seen_Bhw = torch.nn.functional.avg_pool2d(cut_parts(images, part_B4, flip_B, (64, 64)).mean(1), 8)
    covered_Bhw = mask_coverage(masks_BGG, part_B4, flip_B, extents_B2, (8, 8))
    assert flip_B.any()
    assert (covered_Bhw - seen_Bhw).abs().mean() < 0.02
    assert (mask_coverage(masks_BGG, part_B4, ~flip_B, extents_B2, (8, 8)) - seen_Bhw).abs().mean() > 0.2


def animals(count: int) -> list[np.ndarray]:
    """Bodies with thin legs and a neck, of many sizes, anywhere: bool masks of 160 x 160."""
    generator, found = np.random.default_rng(0), []
    y, x = np.mgrid[:160, :160] / 160
    for _ in range(count):
        size = generator.uniform(0.2, 0.9)
        u, v = (
            (x - generator.uniform(size / 2, 1 - size / 2)) / size,
            (y - generator.uniform(size / 2, 1 - size / 2)) / size,
        )
        mask = (u / 0.4) ** 2 + ((v + 0.05) / 0.2) ** 2 < 1
        for leg in generator.uniform(-0.32, 0.32, 4):
            mask |= (abs(u - leg) < 0.02) & (v > 0) & (v < 0.45)
        mask |= (abs(u - 0.36) < 0.05) & (v > -0.45) & (v < 0)
        found.append(mask)
    return found


def test_boxes_read_from_what_masks_teach_enclose_thin_parts() -> None:
    masks = animals(60)
    rows = [(np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))) for mask in masks]
    true_B4 = torch.tensor([[c[0], r[0], c[-1] + 1, r[-1] + 1] for r, c in rows]) / 160
    by_mask_Bhw = torch.from_numpy(np.stack(masks)).float().unflatten(1, (16, 10)).unflatten(3, (16, 10)).mean((2, 4))

    def overlap_of(heat_Bhw: Tensor) -> float:
        boxes = [regions_of(heat_hw, threshold=0.5)[0].box for heat_hw in heat_Bhw]
        return float(subject_module.overlap(torch.tensor(boxes) / 16, true_B4).mean())

    mixed_Bhw = mixed_coverage(by_mask_Bhw, coverage(true_B4, (16, 16)), SubjectConfig().mask_share)
    assert overlap_of(mixed_Bhw) > 0.9
    assert overlap_of(by_mask_Bhw) < 0.85  # which is why they are mixed


def test_masks_alone_are_enough(photos: Path, tmp_path: Path) -> None:
    """As the refusal of photos without boxes says."""
    with photos.open(newline="") as file:
        rows = [row for row in csv.reader(file) if row[3]]
    table = tmp_path / "photos.csv"
    for columns, given in (("boxes,mask", ['"[]"', ""]), ("mask", [""])):
        lines = [",".join([str(photos.parent / row[0]), row[1], *given]) for row in rows[1:]]
        table.write_text("\n".join([f"file,label,{columns}", *lines]) + "\n")
        with pytest.raises(PatchlightError, match=r"has no boxes; give a CSV .* or file,label,mask"):
            learner_for(table)
    lines = [f"{photos.parent / row[0]},{row[1]},{photos.parent / row[3]}" for row in rows[1:]]
    table.write_text("\n".join(["file,label,mask", *lines]) + "\n")
    learner, batch = learner_for(table)
    for box, row in zip(learner.boxes_NM4[:, 0], rows[1:], strict=True):
        with Image.open(photos.parent / row[3]) as mask:
            true_box = mask.getbbox()
            assert true_box is not None
            torch.testing.assert_close(box, torch.tensor(true_box).float(), atol=0.5, rtol=0)
    assert learner.prepare(batch, cropped=False)[4].float().mean() > 0.7


# Several objects, and photos of which less is known


def test_parts_are_for_all_objects_or_for_one() -> None:
    boxes_BM4 = torch.full((3000, 3, 4), torch.nan)
    boxes_BM4[:, 0] = torch.tensor([10.0, 10, 20, 20])
    boxes_BM4[:, 1] = torch.tensor([30.0, 5, 40, 12])
    boxes_BM4[2000:, 1] = torch.nan  # these have one
    chosen_B4 = choose_objects(boxes_BM4, draws_for(3000), SubjectConfig(together=0.4))

    def share(box: list[float]) -> float:
        return (chosen_B4[:2000] == torch.tensor(box)).all(1).float().mean().item()

    assert share([10, 5, 40, 20]) == pytest.approx(0.4, abs=0.04)
    assert share([10, 10, 20, 20]) == pytest.approx(0.6 * 0.85, abs=0.04)
    assert share([30, 5, 40, 12]) == pytest.approx(0.6 * 0.15, abs=0.03)
    assert (chosen_B4[2000:] == torch.tensor([10.0, 10, 20, 20])).all()


def test_what_counts_is_what_is_known(photos: Path) -> None:
    learner, batch = learner_for(photos)
    _, labels_B, covered_Bhw, named_B, placed_B, *_ = learner.prepare(batch, cropped=False)
    kind_B = batch.samples_B % 5
    box, class_alone, nothing, mask, several = (kind_B == number for number in range(5))
    assert placed_B[nothing].all()
    assert (covered_Bhw[nothing] == 0).all()
    assert not named_B[nothing].any()  # these have no label
    assert not placed_B[class_alone].any()
    assert torch.equal(named_B[class_alone], labels_B[class_alone] >= 0)
    for kind in (box, mask, several):
        assert placed_B[kind].float().mean() > 0.7
        assert (covered_Bhw[kind & placed_B].amax((1, 2)) > 0.3).float().mean() > 0.8
        assert 0.2 < named_B[kind].float().mean() < 0.6
    assert not named_B[batch.labels_B < 0].any()


def test_two_objects_cover_two_places(photos: Path) -> None:
    """Whole photos: bright pixels of a photo's colour are where its coverage is."""
    learner, batch = learner_for(photos, whole=0.0, area=(1.0, 1.0), aspect=(1.0, 1.0), colour=0.0, grey=0.0)
    images_BCHW, _, covered_Bhw, _, placed_B, *_ = learner.prepare(batch, cropped=False)
    preprocess = learner.config.preprocess
    mean, std = torch.tensor(preprocess.mean)[:, None, None], torch.tensor(preprocess.std)[:, None, None]
    bright_BHW = ((images_BCHW * std + mean).amax(1) > 0.5).float()
    bright_Bhw = torch.nn.functional.avg_pool2d(bright_BHW, 4)
    for kind in ("box", "several", "mask"):
        rows = (batch.samples_B % 5 == KINDS.index(kind)) & placed_B
        assert rows.sum() >= 15
        apart_Bhw = ((bright_Bhw > 0.5) != (covered_Bhw > 0.5))[rows]
        assert apart_Bhw.float().mean() < (0.1 if kind == "mask" else 0.04)  # a mask counts where it begins


def test_labels_that_are_not_there_teach_nothing(photos: Path) -> None:
    learner, batch = learner_for(photos)
    inputs = learner.prepare(batch, cropped=False)
    without = list(inputs)
    without[3] = torch.zeros_like(inputs[3])
    unnamed = list(inputs)
    unnamed[1], unnamed[3] = torch.full_like(inputs[1], -1), torch.zeros_like(inputs[3])
    losses = [learner(*values).item() for values in (inputs, without, unnamed)]
    assert all(np.isfinite(losses))
    assert losses[1] == losses[2] < losses[0]


# Scenes


def test_pasted_subjects_are_where_the_coverage_says(photos: Path) -> None:
    learner, batch = learner_for(photos, paste=1.0, colour=0.0, grey=0.0)
    images_BCHW, labels_B, covered_Bhw, named_B, placed_B, *_ = learner.prepare(batch, cropped=False)
    assert placed_B.all()
    peak_B = covered_Bhw.amax((1, 2))
    assert ((peak_B == 0) | (peak_B >= 0.6 - 1e-4)).all()
    assert 0.2 < (peak_B == 0).float().mean() < 0.75  # of a frame of 32 pixels many subjects are less than one
    assert named_B.any()
    assert (labels_B[named_B] >= 0).all()
    preprocess = learner.config.preprocess
    mean, std = torch.tensor(preprocess.mean)[:, None, None], torch.tensor(preprocess.std)[:, None, None]
    brightest_Bhw = torch.nn.functional.max_pool2d((images_BCHW * std + mean).amax(1), 4)
    where_B = brightest_Bhw.flatten(1).argmax(1)
    large_B = named_B
    assert (covered_Bhw.flatten(1).gather(1, where_B[:, None])[large_B] > 0.2).float().mean() > 0.85
    # The same again, and none without it.
    assert torch.equal(learner.prepare(batch, cropped=False)[0], images_BCHW)
    assert not torch.equal(learner_for(photos)[0].prepare(batch, cropped=False)[0], images_BCHW)


def test_a_share_of_the_photos_becomes_scenes(photos: Path) -> None:
    plain, batch = learner_for(photos)
    some, _ = learner_for(photos, paste=0.3)
    pairs = zip(plain.prepare(batch, cropped=False)[0], some.prepare(batch, cropped=False)[0], strict=True)
    changed = [not torch.allclose(one, other, atol=1e-5) for one, other in pairs]
    assert 0.15 < np.mean(changed) < 0.45


def test_pasted_subjects_have_the_sizes_and_the_shape_that_they_should() -> None:
    """White rectangles on black, 30 wide and 20 high, are pasted grey-free onto black: what is bright is measured."""
    count = 200
    masks_BGG = torch.zeros(count, MASK_SIDE, MASK_SIDE)
    masks_BGG[:, 12:28, 9:39] = 1
    around_B4 = torch.tensor([[9 / 48, 12 / 48, 39 / 48, 28 / 48]]).expand(count, -1)
    donors = torch.full((count, 3, 96, 96), 255, dtype=torch.uint8)
    extents_B2 = torch.full((count, 2), 96.0)
    frames = torch.zeros(count, 3, 128, 128)
    aspect_B = torch.full((count,), 2.0)  # wide parts, squeezed into a square frame
    colours, opacity_BHW, box_B4 = paste_subjects(
        frames, aspect_B, donors, masks_BGG, around_B4, extents_B2, draws_for(count)
    )
    wide_B, high_B = box_B4[:, 2] - box_B4[:, 0], box_B4[:, 3] - box_B4[:, 1]
    assert wide_B.min() >= WIDTHS[0] * 0.99
    assert wide_B.max() <= WIDTHS[1] * 1.01
    assert 0.2 < (wide_B < NAMED_FROM / 2).float().mean() < 0.5  # as many from 2.5 to 5 % as from 5 to 10 %
    whole_B = (high_B / wide_B - 16 / 30 * 2).abs() < 1e-3  # of the others grass hides the feet
    assert 0.6 < whole_B.float().mean() < 0.9
    assert (high_B[~whole_B] < wide_B[~whole_B] * 16 / 30 * 2).all()
    area_B = opacity_BHW.mean((1, 2)) / (wide_B * high_B)
    large_B = whole_B & (wide_B > 0.1)
    assert area_B[large_B].min() > 0.85
    assert area_B[large_B].max() < 1.05
    at = (torch.arange(128) + 0.5) / 128
    x_B = (opacity_BHW.sum(1) * at).sum(1) / opacity_BHW.sum((1, 2))
    torch.testing.assert_close(x_B, (box_B4[:, 0] + box_B4[:, 2]) / 2, atol=0.005, rtol=0)
    assert (colours <= opacity_BHW[:, None] + 1e-5).all()
    assert (colours.amax((1, 2, 3)) > 0.3).all()


def test_nothing_in_it_depends_on_values(photos: Path) -> None:
    """What a CUDA graph could not record raises where tensors have no values."""
    learner, batch = learner_for(photos, paste=0.5)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = Batch(*(mode.from_tensor(value) for value in batch))
        images_BCHW, *_ = learner.prepare(fake, cropped=False)
        assert images_BCHW.shape == (100, 3, 32, 32)
        with pytest.raises(RuntimeError):  # such as this
            bool(images_BCHW.sum() > 0)


def without_rows(photos: Path, out: Path, dropped: str) -> Path:
    """The table without photos of one kind."""
    with photos.open(newline="") as file:
        rows = list(csv.reader(file))
    kept = [rows[0]] + [
        [str(photos.parent / row[0]), row[1], row[2], row[3] and str(photos.parent / row[3])]
        for place, row in enumerate(rows[1:])
        if KINDS[place % 5] != dropped
    ]
    with out.open("w", newline="") as file:
        csv.writer(file).writerows(kept)
    return out


@pytest.mark.parametrize("dropped", ["nothing", "mask"])
def test_pasting_needs_masks_and_empty_scenes(photos: Path, tmp_path: Path, dropped: str) -> None:
    table = without_rows(photos, tmp_path / "photos.csv", dropped)
    said = r"subject\.paste=0\.5 needs photos that show nothing \(boxes \[\]\) and masks of whole subjects"
    with pytest.raises(PatchlightError, match=said):
        learner_for(table, paste=0.5)
    learner_for(table, paste=0.0)  # both remedies
    learner_for(photos, paste=0.5)


# In a run


def test_several_objects_and_nothing_are_judged(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps that light up the second object of the photos with two, and something in half of the empty ones."""
    kept = on_canvases(open_dataset(photos, unnamed=True), 64, workers=0)
    config = settings(photos)
    assert isinstance(config.model, ViTConfig)
    marks, extents_N2 = kept.marks, kept.extents_N2
    assert marks is not None
    assert extents_N2 is not None
    shown_N4 = torch.where(
        marks.boxes_NM4[:, -1].isfinite().all(1, keepdim=True), marks.boxes_NM4[:, -1], marks.boxes_NM4[:, 0]
    ) / extents_N2.flip(1).repeat(1, 2)
    score_Nhw = 20 * coverage(shown_N4.nan_to_num(0), (8, 8)) - 8
    score_Nhw[2::10] = 9.0  # every second of those with nothing
    logits_NK = torch.nn.functional.one_hot(kept.labels_N.clamp(min=0), 2).float()
    monkeypatch.setattr(subject_module, "look", lambda vit, images: (logits_NK, score_Nhw, None))
    heat = SubjectHeat(scale=1.0, bias=0.0)
    result = evaluate_subjects(ViT(config.model), heat, kept, config, torch.device("cpu"))
    assert (result.photos, result.boxed) == (100, 60)
    assert result.accuracy == 1.0
    assert result.found == 1.0
    assert result.nothing == 0.5
    first = dataclasses.replace(marks, boxes_NM4=marks.boxes_NM4[:, :1])
    kept.marks = first
    apart = evaluate_subjects(ViT(config.model), heat, kept, config, torch.device("cpu"))
    assert apart.found is not None
    assert apart.found < 0.9  # of the main object alone
    kept.labels_N = torch.full_like(kept.labels_N, -1)
    assert evaluate_subjects(ViT(config.model), heat, kept, config, torch.device("cpu")).accuracy is None


def test_a_run_of_all_kinds_learns_and_resumes_exactly(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(photos, paste=0.3)
    summary = train(config, tmp_path / "whole").summary()
    assert 0 <= summary["nothing_found_where_there_is_none"] <= 1
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]
    prepare, calls = FindSubject.prepare, [0]

    def interrupted(self: FindSubject, batch: Batch, *, cropped: bool) -> tuple[Tensor, ...]:
        calls[0] += 1
        if calls[0] == 12:
            os.kill(os.getpid(), signal.SIGINT)
        return prepare(self, batch, cropped=cropped)

    with monkeypatch.context() as patch:
        patch.setattr(FindSubject, "prepare", interrupted)
        with pytest.raises(Stopped):
            train(config, tmp_path / "parts")
    train(config, tmp_path / "parts", resume=True)
    whole = load(tmp_path / "whole").model.state_dict()
    for name, weight in load(tmp_path / "parts").model.state_dict().items():
        assert torch.equal(weight, whole[name])
