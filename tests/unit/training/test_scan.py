"""Everything wrong with the data is found at once, and what cannot be read is left out, never replaced."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from patchlight.errors import PatchlightError
from patchlight.images.decode import PHOTO_SUFFIXES, ImageError, decode
from patchlight.reporting import Reporter
from patchlight.training.data import Dataset, Names, split
from patchlight.training.scan import SHOWN, scan
from patchlight.training.sources import open_dataset

BAD_IMAGES = Path("/work/shared/data/bad-images")


def save_photo(path: Path, seed: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)
    Image.fromarray(noise).save(path)
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three photos of each of two classes."""
    for index in range(6):
        save_photo(tmp_path / "photos" / "ab"[index % 2] / f"{index}.png", index)
    return tmp_path / "photos"


def test_good_data_have_no_problems(photos: Path) -> None:
    heard: list[tuple[int, int]] = []
    dataset = open_dataset(photos)
    found = scan(dataset, reporter=Reporter(progress=lambda now: heard.append((now.done, now.total))))
    assert (found.problems, found.fatal, found.unreadable) == ([], [], [])
    assert list(found.clean(dataset).names) == list(dataset.names)
    assert heard[-1] == (6, 6)


def test_unreadable_files_are_named_with_their_reason_and_left_out(photos: Path) -> None:
    whole = (photos / "a" / "0.png").read_bytes()
    (photos / "a" / "empty.png").write_bytes(b"")
    (photos / "a" / "cut.png").write_bytes(whole[: len(whole) // 2])
    (photos / "b" / "page.jpg").write_text("<html>")
    (photos / "b" / "lost.png").symlink_to(photos / "nowhere")
    os.mkfifo(photos / "b" / "pipe.png")
    dataset = open_dataset(photos)
    found = scan(dataset)
    assert found.fatal == []
    assert found.problems == [
        "left out, a/cut.png: truncated (image file is truncated)",
        "left out, a/empty.png: empty (the file has no bytes)",
        "left out, b/lost.png: unreadable (its symbolic link is broken)",
        "left out, b/page.jpg: not-an-image (this is an HTML page)",
        "left out, b/pipe.png: unreadable (this is a named pipe, not a file)",
    ]
    assert [dataset.names[index] for index in found.unreadable] == [
        "a/cut.png", "a/empty.png", "b/lost.png", "b/page.jpg", "b/pipe.png",
    ]  # fmt: skip
    clean = found.clean(dataset)
    assert list(clean.names) == ["a/0.png", "a/2.png", "a/4.png", "b/1.png", "b/3.png", "b/5.png"]
    assert clean.labels_N.tolist() == [0, 0, 0, 1, 1, 1]
    for index in range(6):
        assert clean.read(index).source_size == (8, 8)


def test_leakage_and_contradicting_labels_are_found_by_content(photos: Path, tmp_path: Path) -> None:
    shutil.copy(photos / "a" / "0.png", photos / "b" / "other name.png")
    held_out = tmp_path / "held out"
    save_photo(held_out / "a" / "new.png", 100)
    (held_out / "b").mkdir()
    shutil.copy(photos / "b" / "3.png", held_out / "b" / "old.png")
    found = scan(open_dataset(photos), open_dataset(held_out))
    assert found.fatal == []
    assert found.problems == [
        "the same photo has two labels: a/0.png is 'a' and b/other name.png is 'b'",
        "the same photo is in training and in validation: b/3.png and b/old.png",
    ]
    assert found.in_both == 1


def test_a_split_of_scanned_data_does_not_leak(photos: Path) -> None:
    for index in range(6):
        shutil.copy(photos / "ab"[index % 2] / f"{index}.png", photos / "ab"[index % 2] / f"copy of {index}.png")
    dataset = open_dataset(photos)
    training, validation = split(scan(dataset).clean(dataset), 0.3)
    assert len(validation) == 4
    assert scan(training, validation).problems == []
    assert len(split(dataset, 0.3)[1]) == 4
    assert list(split(dataset, 0.3)[1].names) == list(validation.names)  # whether the hashes are known or not


def test_classes_without_photos_and_classes_spelt_alike(photos: Path) -> None:
    (photos / "empty").mkdir()
    (photos / "broken").mkdir()
    (photos / "broken" / "1.png").write_bytes(b"")
    save_photo(photos / "A" / "1.png", 50)
    save_photo(photos / "loose.png", 51)
    assert scan(open_dataset(photos)).problems == [
        "1 photos lie beside the class folders and have no class: left out",
        "empty/ has no photos: ignored, and not counted as a class",
        "class 'broken' has no photos that can be read",
        "left out, broken/1.png: empty (the file has no bytes)",
        "classes 'A' and 'a' are spelt almost alike: one class?",
    ]


def test_bad_rows_of_a_csv(photos: Path) -> None:
    csv = photos / "labels.csv"
    csv.write_text("file,label\na/0.png,x\nb/1.png,y\nlost.png,x\na/2.png,\na/0.png,y\n")
    dataset = open_dataset(csv)
    found = scan(dataset)
    assert found.problems == [
        "labels.csv line 4: lost.png is missing: left out",
        "labels.csv line 5: a/2.png has no label: left out",
        "the same photo has two labels: a/0.png is 'x' and a/0.png is 'y'",
    ]
    assert len(found.clean(dataset)) == 3
    assert found.left_out == ["lost.png"]


def test_photos_with_several_rows_are_counted_in_one_line(photos: Path) -> None:
    csv = photos / "labels.csv"
    csv.write_text("file,label\na/0.png,x\nb/1.png,y\na/0.png,x\n")
    dataset = open_dataset(csv)
    assert scan(dataset).problems == [
        "labels.csv: photos with more than one row, which count as often: 1, such as a/0.png"
    ]
    assert len(dataset) == 3, "so that a photo may count for more"
    csv.write_text("file,label\n" + "a/0.png,x\nb/1.png,y\n" * 3)
    assert scan(open_dataset(csv)).problems == [
        "labels.csv: photos with more than one row, which count as often: 2, such as a/0.png"
    ]


@pytest.mark.parametrize(
    "rows",
    [
        'a/0.png,x\n"b/1.png,y\na/2.png,x\nb/3.png,y\n',
        'a/0.png,x\nb/1.png,"y\na/2.png,x\nb/3.png,y\n',
        'a/0.png,x\nb/1.png,"y\na/2.png,"x"\n',
        'a/0.png,x\n"b/1.png,y\n',
        'a/0.png,x\n"b/1.png,y\n' + "a/2.png,x\n" * 20_000,
    ],
)
def test_a_quote_that_is_not_closed_is_refused(rows: str, photos: Path) -> None:
    (photos / "labels.csv").write_text(f"file,label\n{rows}")
    with pytest.raises(PatchlightError, match=r"labels\.csv: the quote in line 3 is not closed, so .{10,60} close it$"):
        open_dataset(photos / "labels.csv")


def test_a_quote_that_is_not_closed_elsewhere_is_said(photos: Path) -> None:
    (photos / "labels.csv").write_text('file,label,remark\na/0.png,x,\nb/1.png,y,"here\na/2.png,x,\nb/3.png,y,\n')
    assert scan(open_dataset(photos / "labels.csv")).problems == [
        "labels.csv: lines 3 to 5 are one row, by a quote that is closed late or not at all"
    ]


def test_what_stops_a_run(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "none" / "a").mkdir(parents=True)
    assert scan(open_dataset(tmp_path / "none")).fatal == ["there are no photos to train on"]
    (tmp_path / "none" / "a" / "1.png").write_bytes(b"")
    assert scan(open_dataset(tmp_path / "none")).fatal == ["there are no photos to train on: none of the 1 can be read"]
    save_photo(tmp_path / "none" / "a" / "2.png", 1)
    assert scan(open_dataset(tmp_path / "none")).fatal == [
        "all photos to train on are of one class, 'a'; at least two are needed"
    ]
    save_photo(tmp_path / "other" / "b" / "1.png", 60)
    save_photo(tmp_path / "other" / "c" / "1.png", 61)
    found = scan(open_dataset(photos), open_dataset(tmp_path / "other"))
    assert found.fatal == ["class 'c' of the validation photos has none to train on"]


def test_validation_gets_the_labels_of_training(photos: Path, tmp_path: Path) -> None:
    save_photo(tmp_path / "held out" / "b" / "1.png", 70)
    (tmp_path / "held out" / "b" / "2.png").write_bytes(b"")
    validation = open_dataset(tmp_path / "held out")
    found = scan(open_dataset(photos), validation)
    assert found.unreadable == []
    clean = found.clean_validation(validation)
    assert clean.classes == ("a", "b")
    assert (list(clean.names), clean.labels_N.tolist()) == (["b/1.png"], [1])


def test_many_problems_are_counted_and_workers_find_the_same(photos: Path) -> None:
    for index in range(70):
        (photos / "a" / f"x{index:02}.png").write_bytes(b"")
    dataset = open_dataset(photos)
    found = scan(dataset, workers=2)
    assert len(found.problems) == SHOWN + 1
    assert found.problems[-1] == "... and 50 more of the kind: unreadable photo"
    assert len(found.unreadable) == 70
    assert found == scan(dataset, workers=0)


def test_a_set_in_memory_is_not_read() -> None:
    images_NCHW = torch.zeros(4, 3, 8, 8, dtype=torch.uint8)  # all alike, which is not looked at
    dataset = Dataset("ab", torch.tensor([0, 1, 0, 1]), Names("1234"), images_NCHW=images_NCHW)
    found = scan(dataset, dataset)
    assert (found.problems, found.fatal) == ([], [])
    assert found.clean(dataset) is dataset
    assert len(scan(dataset.select([0, 2])).fatal) == 1


@pytest.mark.skipif(not BAD_IMAGES.is_dir(), reason="the broken images are not here")
def test_broken_images_are_judged_as_by_decoding_them_whole(tmp_path: Path) -> None:
    for place, path in enumerate(sorted(BAD_IMAGES.iterdir())):
        folder = tmp_path / "ab"[place % 2]
        folder.mkdir(exist_ok=True)
        shutil.copy(path, folder)
    photo = tmp_path / "good.jpg"
    noise = np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8)
    for progressive in (False, True):
        Image.fromarray(noise).resize((400, 300)).save(photo, quality=90, progressive=progressive)
        content = photo.read_bytes()
        for cut in range(100, len(content), len(content) // 15):
            (tmp_path / "a" / f"cut {progressive} {cut}.jpg").write_bytes(content[:cut])
    photo.unlink()
    dataset = open_dataset(tmp_path)
    expected = []
    for name in dataset.names:
        assert Path(name).suffix.lower() in PHOTO_SUFFIXES
        try:
            decode(tmp_path / name)
        except ImageError:
            expected.append(name)
    found = scan(dataset, workers=2)
    assert 40 < len(expected) < len(dataset) - 20
    assert [dataset.names[index] for index in found.unreadable] == expected
    assert all("\n" not in problem for problem in found.problems)
