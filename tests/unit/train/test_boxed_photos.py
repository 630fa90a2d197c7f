"""Photos that come with the subject's box: in a CSV, in a set, and gathered from the sheets and zip files."""

import csv
import importlib
import io
import json
import math
import random
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

from patchlight.train.data import Dataset, Names, split, subset
from patchlight.train.sources import open_dataset

RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """The modules of recipes/, as they are when one of them is run."""
    monkeypatch.syspath_prepend(RECIPES)
    return importlib.import_module


def write_csv(folder: Path, text: str) -> Path:
    """A CSV beside the photos 0.png to 7.png."""
    for number in range(8):
        Image.new("RGB", (12, 10), (number, 0, 0)).save(folder / f"{number}.png")
    path = folder / "photos.csv"
    path.write_text(text, "utf-8")
    return path


def rows_of(boxes_N4: torch.Tensor | None) -> list[list[float] | None]:
    assert boxes_N4 is not None
    return [None if all(math.isnan(corner) for corner in row) else row for row in boxes_N4.tolist()]


def test_csv_gives_boxes(tmp_path: Path) -> None:
    text = "label,x0,file,y0,X1,y1\na,1,0.png,2,3.5,4\nb,,1.png,,,\na,0,2.png,0,12,10\n"
    dataset = open_dataset(write_csv(tmp_path, text))
    assert dataset.boxes_N4 is not None
    assert dataset.boxes_N4.dtype == torch.float32
    assert rows_of(dataset.boxes_N4) == [[1, 2, 3.5, 4], None, [0, 0, 12, 10]]
    assert dataset.notes == ()


@pytest.mark.parametrize(
    "cells",
    [
        "1,2,3,",
        ",,,4",
        "1,2,1,4",
        "3,2,1,4",
        "1,4,3,4",
        "-1,2,3,4",
        "1,-2,3,4",
        "a,2,3,4",
        "nan,2,3,4",
        "1,2,inf,4",
        "1,2,1e39,4",
        "16777216,2,16777217,4",
        "1,2",
    ],
)
def test_bad_box_is_noted_and_its_photo_kept(tmp_path: Path, cells: str) -> None:
    text = f"file,label,x0,y0,x1,y1\n0.png,a,{cells}\n1.png,a,1,2,3,4\n"
    dataset = open_dataset(write_csv(tmp_path, text))
    assert rows_of(dataset.boxes_N4) == [None, [1, 2, 3, 4]]
    (note,) = dataset.notes
    assert note.kind == "box"
    assert "line 2" in note.line
    assert "0.png" in note.line


def test_rows_that_are_left_out_do_not_shift_the_boxes(tmp_path: Path) -> None:
    text = "file,label,x0,y0,x1,y1\nnone.png,a,9,9,10,10\n0.png,,8,8,9,9\n\n1.png,a,1,2,3,4\n"
    dataset = open_dataset(write_csv(tmp_path, text))
    assert list(dataset.names) == ["1.png"]
    assert rows_of(dataset.boxes_N4) == [[1, 2, 3, 4]]


def test_csv_without_the_columns_has_no_boxes(tmp_path: Path) -> None:
    dataset = open_dataset(write_csv(tmp_path, "file,label,weight\n0.png,a,1\n"))
    assert dataset.boxes_N4 is None
    assert dataset.notes == ()
    some_columns = open_dataset(write_csv(tmp_path, "file,label,x0,y0\n0.png,a,1,2\n"))
    assert some_columns.boxes_N4 is None
    assert [note.kind for note in some_columns.notes] == ["box"]


def boxed(count: int) -> Dataset:
    """In memory; photo i has the box (i, i + 1, i + 2, i + 3), every third has none."""
    boxes_N4 = torch.arange(count)[:, None] + torch.arange(4.0)
    boxes_N4[::3] = math.nan
    images_NCHW = torch.arange(count, dtype=torch.uint8).reshape(-1, 1, 1, 1).expand(-1, 3, 4, 4).contiguous()
    names = Names(str(index) for index in range(count))
    return Dataset("ab", torch.arange(count) % 2, names, images_NCHW=images_NCHW, boxes_N4=boxes_N4)


@pytest.mark.parametrize(
    "change",
    [
        lambda dataset: dataset.select([5, 3, 3, 1]),
        lambda dataset: dataset.with_hashes([bytes([index]) for index in range(len(dataset))]),
        lambda dataset: dataset.with_classes("xba"),
        lambda dataset: split(dataset, 0.3)[0],
        lambda dataset: split(dataset, 0.3)[1],
        lambda dataset: subset(dataset, 0.5),
    ],
)
def test_a_photo_keeps_its_box(change: Callable[[Dataset], Dataset]) -> None:
    changed = change(boxed(20))
    expected = [None if int(name) % 3 == 0 else [int(name) + k for k in range(4)] for name in changed.names]
    assert len(changed) > 0
    assert rows_of(changed.boxes_N4) == expected


def test_fingerprint_knows_the_boxes() -> None:
    whole = boxed(20)
    without = Dataset(whole.classes, whole.labels_N, whole.names, images_NCHW=whole.images_NCHW)
    assert whole.boxes_N4 is not None
    other_nan, moved = whole.select(range(20)), whole.select(range(20))
    assert other_nan.boxes_N4 is not None
    assert moved.boxes_N4 is not None
    other_nan.boxes_N4[0] = -other_nan.boxes_N4[0]  # a NaN with another sign
    moved.boxes_N4[1, 2] += 1
    assert whole.fingerprint() == other_nan.fingerprint()
    assert len({whole.fingerprint(), without.fingerprint(), moved.fingerprint()}) == 3


THINGS = 1_603  # a sheet and three tiles
BROKEN_BOX = 1_601


def colour(thing: int) -> tuple[int, int, int]:
    return thing % 256, thing // 256, 77


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five photos in two zip files, and things that are each of one colour."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "photos").mkdir()
    labels = ("imagenette/n02102040", "pet/Sphynx", "bird/073.Blue_Jay", "pet/beagle", "car/car")
    for number, keys in enumerate([(0, 1, 2), (3, 4)]):
        with zipfile.ZipFile(folder / "photos" / f"photos-{number:02}.zip", "w") as archive:
            for key in keys:
                archive.writestr(f"{key:06}.webp", photo_file(key))
    (folder / "photos" / "labels.json").write_text(json.dumps({f"{k:06}": label for k, label in enumerate(labels)}))
    (folder / "photos" / "boxes.json").write_text(
        json.dumps({"000002": [45.9, 10.2, 97.9, 96.8], "000003": [1, 2, 3, 4]})
    )
    masks_232x32 = np.zeros((2, 32, 32), np.uint8)
    masks_232x32[:, 4:9, 16:30] = 1
    bits = np.packbits(masks_232x32.reshape(2, -1), axis=1)
    np.savez(folder / "photos" / "masks.npz", ids=np.array([3, 1], np.int32), bits_32x32=bits)
    (folder / "things").mkdir()
    for number in range(2):
        sheet = Image.new("RGB", (2560, 2560))
        for place in range(min(1600, THINGS - number * 1600)):
            sheet.paste(
                colour(number * 1600 + place),
                (place % 40 * 64, place // 40 * 64, place % 40 * 64 + 64, place // 40 * 64 + 64),
            )
        sheet.save(folder / "things" / f"things-{number:02}.webp", lossless=True, quality=0)
    boxes = np.tile(np.array([0, 5, 62, 63], np.int16), (THINGS, 1))
    boxes[BROKEN_BOX] = 7, 0, 7, 63
    np.savez(folder / "things" / "things.npz", label=(np.arange(THINGS) % 2).astype(np.int16), box=boxes)
    (folder / "things" / "classes.json").write_text(json.dumps(["sea slug, nudibranch", "trilobite"]))
    return folder


def photo_file(key: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (160, 128), (40 * key, 0, 0)).save(file, "WEBP")
    return file.getvalue()


def test_gathers_photos_and_things(recipe: Callable[[str], ModuleType], shared: Path, tmp_path: Path) -> None:
    out = tmp_path / "gathered"
    arguments = [str(out), "--shared", str(shared), "--workers", "2", "--photos-times", "2", "--held-out", "0"]
    assert recipe("gather_default_photos").main(arguments) == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["gathered"]
    with open(out / "photos.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["file", "label", "x0", "y0", "x1", "y1"]
    assert rows[1:6] == [
        ["photos/000000.webp", "imagenette/English_springer", "", "", "", ""],
        ["photos/000001.webp", "pet/Sphynx", "80.0", "16.0", "150.0", "36.0"],  # the mask's, over 160 x 128 pixels
        ["photos/000002.webp", "bird/073.Blue_Jay", "45.9", "10.2", "97.9", "96.8"],
        ["photos/000003.webp", "pet/beagle", "1", "2", "3", "4"],
        ["photos/000004.webp", "car/car", "", "", "", ""],
    ]
    assert rows[6:11] == rows[1:6]
    for key in range(5):
        assert (out / f"photos/{key:06}.webp").read_bytes() == photo_file(key)
    dataset = open_dataset(out / "photos.csv")
    assert [note.kind for note in dataset.notes] == ["repeated row"]
    assert len(dataset) == 2 * 5 + THINGS
    for thing in (0, 1, 39, 40, 1599, 1600, 1602):
        name, label = dataset.names[10 + thing], dataset.classes[int(dataset.labels_N[10 + thing])]
        assert label == ("thing/sea_slug", "thing/trilobite")[thing % 2]
        with Image.open(out / name) as image:
            assert image.size == (64, 64)
            assert image.getcolors() == [(64 * 64, colour(thing))]
    found = rows_of(dataset.boxes_N4)[10:]
    assert found.pop(BROKEN_BOX) is None
    assert found == [[0, 5, 63, 64]] * (THINGS - 1)


def test_holds_photos_out_to_judge_by(
    recipe: Callable[[str], ModuleType], shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(tmp_path / "out"), "--shared", str(shared), "--workers", "1", "--held-out", "2"]
    assert recipe("gather_default_photos").main(arguments) == 0
    learnt, held_out = (
        set(re.findall("^photos/[0-9]+.webp", (tmp_path / "out" / name).read_text(), re.MULTILINE))
        for name in ("photos.csv", "held_out.csv")
    )
    assert len(learnt) == 3
    assert len(held_out) == 2
    assert not learnt & held_out
    # The very photos that the benchmark holds out, drawn by their ids.
    ids = [f"{key:06}" for key in range(5)]
    random.Random(0).shuffle(ids)
    assert held_out == {f"photos/{key}.webp" for key in ids[:2]}


def test_gathers_all_or_nothing(
    recipe: Callable[[str], ModuleType], shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gather = recipe("gather_default_photos").main
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("mine")
    assert gather([str(full), "--shared", str(shared)]) == 2
    assert [entry.name for entry in full.iterdir()] == ["mine.txt"]
    sheets = tmp_path / "sheets"
    sheets.mkdir()
    for name in ("things.npz", "classes.json", "things-00.webp"):
        (sheets / name).write_bytes((shared / "things" / name).read_bytes())
    (sheets / "things-01.webp").write_bytes(b"no sheet")
    arguments = [str(tmp_path / "out"), "--shared", str(shared), "--sheets", str(sheets), "--workers", "1"]
    assert gather(arguments) == 2
    assert "things-01.webp" in capsys.readouterr().err
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["full", "sheets"]


def test_packs_tiny_imagenet(recipe: Callable[[str], ModuleType], tmp_path: Path) -> None:
    """What is packed comes out again, in sheets that `gather_default_photos` reads."""
    folder, out = tmp_path / "tiny", tmp_path / "sheets"
    wnids = {"n02": (200, 0, 0), "n01": (0, 0, 200)}
    for wnid, level in wnids.items():
        images = folder / "train" / wnid / "images"
        images.mkdir(parents=True)
        for number in range(30):
            Image.new("RGB", (64, 64), level).save(images / f"{wnid}_{number}.JPEG")
        lines = [f"{wnid}_{number}.JPEG\t{number}\t1\t63\t{number + 2}\n" for number in range(28)]
        lines += [f"{wnid}_28.JPEG\t5\t1\t5\t9\n", f"{wnid}_29.JPEG\t9\t1\t5\t9\n"]
        (folder / "train" / wnid / f"{wnid}_boxes.txt").write_text("".join(lines))
    (folder / "words.txt").write_text("n00\tentity\nn01\tsea slug, nudibranch\nn02\ttrilobite\n")
    assert recipe("pack_tiny_imagenet").main([str(folder), str(out), "--workers", "1", "--megabytes", "0.02"]) == 0
    assert (out / "things-00.webp").stat().st_size <= 20_000
    assert json.loads((out / "classes.json").read_text()) == ["sea slug, nudibranch", "trilobite"]
    things = np.load(out / "things.npz")
    assert np.bincount(things["label"]).tolist() == [28, 28]
    assert sorted(things["box"].tolist()) == sorted([n, 1, 63, n + 2] for n in range(28) for _ in wnids)
    assert 0 < things["label"][:28].sum() < 28  # mixed
    rows, _ = recipe("gather_default_photos").plan_things(out)
    assert len(rows) == 56
    with Image.open(out / "things-00.webp") as sheet:
        for place, label in enumerate(things["label"]):
            red, _, blue = sheet.convert("RGB").getpixel((place % 40 * 64 + 32, place // 40 * 64 + 32))  # type: ignore[misc]
            assert (red > blue) == (label == 1)
