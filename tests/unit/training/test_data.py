"""A set is known by its content, parts of it are even, and the stream of samples is the same however it is read."""

import os
import pickle
import shutil
import signal
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import patchlight.training.sources as sources
from labelled_photos import everything, save_photo
from patchlight.config import PreprocessConfig
from patchlight.errors import PatchlightError
from patchlight.images.augment import AugmentConfig, random_part
from patchlight.images.decode import decode
from patchlight.images.draws import Draws, epoch_order
from patchlight.images.preprocess import Preprocess
from patchlight.training.data import (
    Batch,
    Dataset,
    Names,
    PhotoOrder,
    batches,
    evaluation_batches,
    places,
    split,
    subset,
)
from patchlight.training.sources import open_dataset
from patchlight.training.workers import in_workers
from warm_python import WarmPython

SIZE = (12, 16)
CONFIG = PreprocessConfig(image_size=SIZE)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Eleven photos of different sizes in three classes."""
    for index in range(11):
        kind = ("ant", "bee", "cow")[index % 3]
        save_photo(tmp_path / "photos" / kind / f"{index:02}.png", index, (20 + index, 40 - 2 * index))
    return tmp_path / "photos"


# The set


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"))))
def test_names_are_kept_exactly(names: list[str]) -> None:
    kept = Names(names)
    assert list(kept) == names
    assert kept[-1:] == names[-1:]
    assert list(pickle.loads(pickle.dumps(kept))) == names


def test_a_name_need_not_be_text(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff\n.png")
    try:
        save_photo(tmp_path / "a" / name, 1)
    except OSError:
        pytest.skip("this file system takes text only")
    dataset = open_dataset(tmp_path)
    assert list(dataset.names) == [f"a/{name}"]
    assert dataset.read(0).source_size == (20, 30)
    (tmp_path / "a" / name).unlink()
    with pytest.raises(PatchlightError) as caught:
        dataset.read(0)
    assert str(caught.value) == r"'a/\udcff\n.png': missing (there is no such file)"


def test_a_million_photos_are_cheap_to_send() -> None:
    count = 100_000
    names = Names(f"class/photo_{index}.jpg" for index in range(count))
    files = sources._Files("/photos", np.zeros(count, np.int64))
    dataset = Dataset(["class"], torch.zeros(count, dtype=torch.int64), names, files=files)
    dataset = dataset.with_hashes([bytes(32)] * count)
    assert len(pickle.dumps(dataset)) < 60 * count


def test_the_fingerprint_knows_other_data(photos: Path, tmp_path: Path) -> None:
    dataset = open_dataset(photos)
    first = dataset.fingerprint()
    shutil.copytree(photos, tmp_path / "copy", copy_function=shutil.copyfile)  # with new times
    assert open_dataset(tmp_path / "copy").fingerprint() == first
    assert dataset.select(range(11)).fingerprint() == first
    assert dataset.select([1, 0, *range(2, 11)]).fingerprint() != first
    assert dataset.with_classes([*dataset.classes, "dog"]).fingerprint() != first
    photo = photos / "bee" / "04.png"
    original = photo.read_bytes()
    photo.write_bytes(original[:-1] + b"x")  # the same size
    assert open_dataset(photos).fingerprint() != first
    photo.write_bytes(original)
    photo.rename(photos / "bee" / "4.png")
    assert open_dataset(photos).fingerprint() != first
    (photos / "bee" / "4.png").rename(photos / "cow" / "04.png")
    assert open_dataset(photos).fingerprint() != first


def test_the_fingerprint_of_many_photos_that_were_scanned_knows_each(tmp_path: Path) -> None:
    for index in range(130):
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / f"{index:03}.png").write_bytes(b"%03d" % index)
    dataset = open_dataset(tmp_path)

    def fingerprint() -> str:
        return dataset.with_hashes([dataset.content_hash(index) for index in range(len(dataset))]).fingerprint()

    first = fingerprint()
    for index in range(130):
        path = tmp_path / "a" / f"{index:03}.png"
        path.write_bytes(b"xxx")
        assert fingerprint() != first
        path.write_bytes(b"%03d" % index)
    assert fingerprint() == first


def test_other_classes_move_the_labels(photos: Path) -> None:
    dataset = open_dataset(photos)
    moved = dataset.with_classes(["cow", "dog", "bee", "ant"])
    assert everything(moved) == everything(dataset)
    with pytest.raises(PatchlightError, match="'ant' is not among the 2 known"):
        dataset.with_classes(["bee", "cow"])


# Parts


def test_split_holds_out_each_class_and_keeps_copies_together(tmp_path: Path) -> None:
    for index in range(40):
        save_photo(tmp_path / ("a" if index < 30 else "b") / f"{index}.png", index)
    for index in range(0, 40, 2):
        kind = "b" if index in (4, 8) else "a" if index < 30 else "b"  # some copies have another label
        shutil.copy(tmp_path / ("a" if index < 30 else "b") / f"{index}.png", tmp_path / kind / f"copy {index}.png")
    save_photo(tmp_path / "single" / "1.png", 100)
    for copy in range(3):
        save_photo(tmp_path / "same" / f"{copy}.png", 101)
    dataset = open_dataset(tmp_path)
    for seed in range(5):
        training, validation = split(dataset, 0.2, seed=seed)
        sides = [{(tmp_path / name).read_bytes() for name in part.names} for part in (training, validation)]
        assert sides[0].isdisjoint(sides[1])
        assert sorted([*training.names, *validation.names]) == sorted(dataset.names)
        assert training.classes == validation.classes == dataset.classes
        held_out = [label for _, label in everything(validation)]
        assert set(held_out) == {"a", "b"}
        assert 8 <= held_out.count("a") <= 12  # of 43, in ones and twos
        assert list(split(dataset, 0.2, seed=seed)[1].names) == list(validation.names)
    assert list(split(dataset, 0.2, seed=1)[1].names) != list(split(dataset, 0.2, seed=0)[1].names)


def test_split_leaves_one_on_each_side_of_a_class_of_two(tmp_path: Path) -> None:
    for index in range(2):
        save_photo(tmp_path / "a" / f"{index}.png", index)
    dataset = open_dataset(tmp_path)
    for share in (0.01, 0.9):
        assert [len(part) for part in split(dataset, share)] == [1, 1]
    assert [len(part) for part in split(dataset, 0)] == [2, 0]


def test_split_follows_content_not_names(photos: Path) -> None:
    held_out = {(photos / name).read_bytes() for name in split(open_dataset(photos), 0.3)[1].names}
    for index, path in enumerate(sorted(photos.rglob("*.png"), key=lambda path: path.name)):
        path.rename(path.with_name(f"renamed {100 - index}.png"))
    assert {(photos / name).read_bytes() for name in split(open_dataset(photos), 0.3)[1].names} == held_out


def test_subsets_are_even_and_nested() -> None:
    labels_N = torch.arange(300) % 3
    images_NCHW = torch.zeros(300, 3, 4, 4, dtype=torch.uint8)
    dataset = Dataset("abc", labels_N, Names(f"{index}" for index in range(300)), images_NCHW=images_NCHW)
    inner: set[str] = set()
    for share in (0.001, 0.05, 0.1, 0.25, 0.5, 1.0):
        part = subset(dataset, share)
        assert part.labels_N.bincount().tolist() == [max(1, round(100 * share))] * 3
        assert inner <= set(part.names)
        assert list(part.names) == sorted(part.names, key=int)
        inner = set(part.names)
    with pytest.raises(PatchlightError, match="share=0 "):
        subset(dataset, 0)


# The stream


def reference_stream(count: int, seed: int, repeats: int, length: int) -> list[tuple[int, int, int]]:
    """(epoch, sample, repeat), one after the other, as the definition says it in words."""
    stream: list[tuple[int, int, int]] = []
    epoch = 0
    while len(stream) < length:
        for sample in epoch_order(seed, epoch, count).tolist():
            stream += [(epoch, sample, repeat) for repeat in range(repeats)]
        epoch += 1
    return stream[:length]


@given(
    count=st.integers(1, 9),
    seed=st.integers(0, 2**31),
    repeats=st.integers(1, 3),
    world=st.sampled_from([1, 2, 4]),
    part=st.integers(1, 5),
    start_step=st.integers(0, 5),
)
def test_places_follow_the_stream(count: int, seed: int, repeats: int, world: int, part: int, start_step: int) -> None:
    batch_size, steps = world * part, 3
    expected = reference_stream(count, seed, repeats, (start_step + steps) * batch_size)
    ranks = [
        list(
            places(
                count,
                PhotoOrder(
                    seed=seed,
                    batch_size=batch_size,
                    steps=steps,
                    start_step=start_step,
                    repeats=repeats,
                    rank=rank,
                    world=world,
                ),
            )
        )
        for rank in range(world)
    ]
    found = [tuple(place) for step in range(steps) for rank in range(world) for place in ranks[rank][step].T.tolist()]
    assert found == expected[start_step * batch_size :]


def test_variations_come_again_while_the_order_goes_on() -> None:
    given: dict[str, Any] = {"seed": 3, "batch_size": 4, "steps": 9}
    plain, again = list(places(7, PhotoOrder(**given))), list(places(7, PhotoOrder(**given), 2))
    for plain_3B, again_3B in zip(plain, again, strict=True):
        assert torch.equal(again_3B[0], plain_3B[0] % 2)
        assert torch.equal(again_3B[1:], plain_3B[1:])
    assert int(max(step_3B[0].max() for step_3B in plain)) == 5


def stream_of(dataset: Dataset, **changes: Any) -> list[Batch]:
    settings: dict[str, Any] = {
        "seed": 7,
        "batch_size": 4,
        "repeats": 2,
        "start_step": 0,
        "steps": 8,
        "image_size": SIZE,
        "augment": AugmentConfig(crop="resized"),
        "preprocess": CONFIG,
        "workers": 0,
        "device": "cpu",
    }
    given = settings | changes
    schedule = PhotoOrder(**{field.name: given.pop(field.name) for field in fields(PhotoOrder) if field.name in given})
    return list(batches(dataset, schedule, **given))


def assert_same(found: list[Batch], expected: list[Batch]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for name, value, wanted in zip(Batch._fields, one, other, strict=True):
            assert value.dtype == wanted.dtype, name
            assert torch.equal(value, wanted), name


def test_random_parts_are_cut_from_the_photo_by_pillow(photos: Path) -> None:
    dataset, augment = open_dataset(photos), AugmentConfig(crop="resized", area=(0.2, 0.6))
    expected = reference_stream(11, 7, 2, 32)
    for step, batch in enumerate(stream_of(dataset, augment=augment)):
        assert batch.images_BCHW.dtype == torch.uint8
        for place, (epoch, sample, repeat) in enumerate(expected[4 * step : 4 * step + 4]):
            assert (int(batch.epochs_B[place]), int(batch.repeats_B[place])) == (epoch, repeat)
            assert int(batch.samples_B[place]) == sample
            name = dataset.names[sample]
            assert dataset.classes[int(batch.labels_B[place])] == name.split("/")[0]
            photo = Image.open(photos / name)
            draws = Draws(7, *(torch.tensor([number]) for number in (epoch, sample, repeat)))
            box = random_part(draws, (photo.height, photo.width), augment)[0].tolist()
            part = np.asarray(photo.resize(SIZE[::-1], Image.Resampling.BICUBIC, box=tuple(box)))
            assert np.array_equal(batch.images_BCHW[place].permute(1, 2, 0).numpy(), part)


@pytest.mark.parametrize("crop", ["none", "pad"])
@pytest.mark.parametrize("resize_in", ["bytes", "floats"])
def test_other_photos_are_prepared_as_in_evaluation(photos: Path, crop: Any, resize_in: Any) -> None:
    dataset = open_dataset(photos)
    config = PreprocessConfig(image_size=SIZE, crop_pct=0.8, resize_in=resize_in, mean=(0, 0, 0), std=(1, 1, 1))
    for batch in stream_of(dataset, preprocess=config, augment=AugmentConfig(crop=crop), steps=2):
        for image_CHW, sample in zip(batch.images_BCHW, batch.samples_B.tolist(), strict=True):
            expected_CHW, _ = Preprocess(config)(decode(photos / dataset.names[sample]))
            assert torch.equal(image_CHW, (255 * expected_CHW).round().clamp(0, 255).byte())


def test_a_large_jpeg_is_decoded_fast_and_cut_in_the_same_place(tmp_path: Path) -> None:
    """A photo that is a slope from left to right and from top to bottom tells by its levels where it was cut."""
    height, width = 1001, 1403
    slope_HWC = np.zeros((height, width, 3), np.uint8)
    slope_HWC[..., 0] = np.linspace(0, 255, width)[None]
    slope_HWC[..., 1] = np.linspace(0, 255, height)[:, None]
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "a").mkdir()
    Image.fromarray(slope_HWC).rotate(90, expand=True).save(tmp_path / "a" / "1.jpg", quality=95, exif=exif)
    augment = AugmentConfig(crop="resized", area=(0.3, 0.8))
    dataset = open_dataset(tmp_path)
    assert dataset.read(0, (24, 32)).image.width < width / 4
    for batch in stream_of(dataset, augment=augment, steps=3):
        for image_CHW, epoch, repeat in zip(batch.images_BCHW, batch.epochs_B, batch.repeats_B, strict=True):
            draws = Draws(7, epoch[None], torch.tensor([0]), repeat[None])
            left, top, right, bottom = random_part(draws, (height, width), augment)[0].tolist()
            across = (left + (right - left) * (torch.arange(SIZE[1]) + 0.5) / SIZE[1]) / width * 255
            down = (top + (bottom - top) * (torch.arange(SIZE[0]) + 0.5) / SIZE[0]) / height * 255
            assert (image_CHW[0].float().mean(0) - across).abs().max() < 2
            assert (image_CHW[1].float().mean(1) - down).abs().max() < 2


@pytest.mark.parametrize("workers", [1, 2])
def test_the_number_of_workers_changes_nothing(photos: Path, workers: int) -> None:
    dataset, before = open_dataset(photos), torch.get_rng_state()
    assert_same(stream_of(dataset, workers=workers), stream_of(dataset))
    assert torch.equal(torch.get_rng_state(), before)  # which dropout draws from


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_any_start_and_any_number_of_processes_give_the_same_stream(photos: Path, memory: bool, world: int) -> None:
    dataset = in_memory(open_dataset(photos)) if memory else open_dataset(photos)
    whole = stream_of(dataset, batch_size=8)
    for start_step in range(8):
        ranks = [
            stream_of(dataset, batch_size=8, start_step=start_step, steps=8 - start_step, rank=rank, world=world)
            for rank in range(world)
        ]
        together = [Batch(*map(torch.cat, zip(*parts, strict=True))) for parts in zip(*ranks, strict=True)]
        assert_same(together, whole[start_step:])


def in_memory(dataset: Dataset) -> Dataset:
    images = [np.asarray(dataset.read(index).image.resize((16, 12))) for index in range(len(dataset))]
    images_NCHW = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()
    return Dataset(dataset.classes, dataset.labels_N, dataset.names, images_NCHW=images_NCHW)


def test_a_set_in_memory_is_indexed_and_resized_once(photos: Path) -> None:
    dataset = in_memory(open_dataset(photos))
    assert dataset.images_NCHW is not None
    for batch in stream_of(dataset, steps=3):
        assert torch.equal(batch.images_BCHW, dataset.images_NCHW[batch.samples_B])
        assert torch.equal(batch.labels_B, dataset.labels_N[batch.samples_B])
    for batch in stream_of(dataset, image_size=(24, 24), steps=3):
        for image_CHW, sample in zip(batch.images_BCHW, batch.samples_B, strict=True):
            photo = Image.fromarray(dataset.images_NCHW[sample].permute(1, 2, 0).contiguous().numpy())
            expected_HWC = np.asarray(photo.resize((32, 24), Image.Resampling.BICUBIC))[:, 4:28]
            assert np.array_equal(image_CHW.permute(1, 2, 0).numpy(), expected_HWC)
    with torch.inference_mode():
        larger_NCHW = dataset.prepared(CONFIG.for_size((36, 36)), "cpu")
        assert dataset.prepared(CONFIG.for_size((36, 36)), "cpu") is larger_NCHW
    assert not larger_NCHW.is_inference()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("crop", ["resized", "none"])
def test_a_photo_that_is_gone_is_named(photos: Path, workers: int, crop: Any) -> None:
    dataset = open_dataset(photos)
    (photos / "bee" / "04.png").unlink()
    with pytest.raises(PatchlightError, match=r"^bee/04\.png: missing .*; restore the photo") as caught:
        stream_of(dataset, workers=workers, augment=AugmentConfig(crop=crop))
    assert "\n" not in str(caught.value)


def test_streams_that_cannot_be(photos: Path) -> None:
    dataset = open_dataset(photos)
    with pytest.raises(PatchlightError, match="no photos to train on"):
        stream_of(dataset.select([]))
    with pytest.raises(PatchlightError, match="batch_size=4 is not divisible by the 3 processes"):
        stream_of(dataset, world=3)
    with pytest.raises(PatchlightError, match="crop='none'"):
        stream_of(dataset, preprocess=PreprocessConfig(image_size=SIZE, crop="none"))


# Evaluation


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("resize_in", ["bytes", "floats"])
def test_evaluation_sees_what_preprocess_makes(photos: Path, workers: int, resize_in: Any) -> None:
    dataset, config = open_dataset(photos), PreprocessConfig(image_size=SIZE, crop_pct=0.9, resize_in=resize_in)
    found = list(evaluation_batches(dataset, batch_size=4, preprocess=config, workers=workers, device="cpu"))
    assert [len(labels_B) for _, labels_B, _ in found] == [4, 4, 3]
    assert torch.cat([indices_B for _, _, indices_B in found]).tolist() == list(range(11))
    assert torch.equal(torch.cat([labels_B for _, labels_B, _ in found]), dataset.labels_N)
    images_NCHW = torch.cat([images_BCHW for images_BCHW, _, _ in found])
    for index, image_CHW in enumerate(images_NCHW):
        assert torch.equal(image_CHW, Preprocess(config)(decode(photos / dataset.names[index]))[0])


@pytest.mark.parametrize("size", [SIZE, (16, 16)])
def test_evaluation_of_a_set_in_memory(photos: Path, size: tuple[int, int]) -> None:
    dataset, config = in_memory(open_dataset(photos)), PreprocessConfig(image_size=size)
    found = list(evaluation_batches(dataset, batch_size=5, preprocess=config, workers=2, device="cpu"))
    images_NCHW = torch.cat([images_BCHW for images_BCHW, _, _ in found])
    assert dataset.images_NCHW is not None
    for image_CHW, stored_CHW in zip(images_NCHW, dataset.images_NCHW, strict=True):
        assert torch.equal(image_CHW, Preprocess(config)(stored_CHW.permute(1, 2, 0).numpy())[0])


# Worker processes


def _after_interrupting_itself(item: int) -> int:
    os.kill(os.getpid(), signal.SIGINT)
    return item


def test_workers_survive_ctrl_c_and_a_dead_one_is_said() -> None:
    assert list(in_workers(_after_interrupting_itself, range(5), 1)) == [0, 1, 2, 3, 4]
    with pytest.raises(PatchlightError, match="a process that reads photos has died") as caught:
        list(in_workers(os._exit, [3], 1))
    assert "\n" not in str(caught.value)


SLOW = """
import os, time

def pid(item):
    time.sleep(0.01)
    return os.getpid()
"""
KILLED = """
from patchlight.training.workers import in_workers
from slow import pid

for found in in_workers(pid, iter(range(10**9)), 2):
    print(found, flush=True)
"""


def test_a_killed_process_leaves_no_workers_behind(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "killed.py").write_text(KILLED)
    with WarmPython([tmp_path / "killed.py"]) as process:
        workers = {int(process.stdout.readline()) for _ in range(4)}
        process.kill()
    assert len(workers) == 2
    for _ in range(200):
        if not any(is_running(worker) for worker in workers):
            return
        time.sleep(0.05)
    raise AssertionError("a worker is still there")


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
