"""Photos that come with the subject's box: in a CSV, in a set, and gathered from the sheets and zip files."""

import csv
import dataclasses
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

from patchlight.training.data import Dataset, Names, split, subset
from patchlight.training.marks import MASK_SIDE, Marks, boxes_around
from patchlight.training.scan import scan
from patchlight.training.sources import open_dataset

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


def rows_of(dataset: Dataset) -> list[list[float] | None]:
    """Each photo's one box."""
    return [boxes[0] if boxes else None for boxes in all_boxes_of(dataset)]


def all_boxes_of(dataset: Dataset) -> list[list[list[float]]]:
    assert dataset.marks is not None
    rows = dataset.marks.boxes_NM4.tolist()
    return [[box for box in boxes if not any(math.isnan(corner) for corner in box)] for boxes in rows]


def test_csv_gives_boxes(tmp_path: Path) -> None:
    text = "label,x0,file,y0,X1,y1\na,1,0.png,2,3.5,4\nb,,1.png,,,\na,0,2.png,0,12,10\n"
    dataset = open_dataset(write_csv(tmp_path, text))
    assert rows_of(dataset) == [[1, 2, 3.5, 4], None, [0, 0, 12, 10]]
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
    assert rows_of(dataset) == [None, [1, 2, 3, 4]]
    (note,) = dataset.notes
    assert note.kind == "box"
    assert "line 2" in note.line
    assert "0.png" in note.line


def test_rows_that_are_left_out_do_not_shift_the_boxes(tmp_path: Path) -> None:
    text = "file,label,x0,y0,x1,y1\nnone.png,a,9,9,10,10\n0.png,,8,8,9,9\n\n1.png,a,1,2,3,4\n"
    dataset = open_dataset(write_csv(tmp_path, text))
    assert list(dataset.names) == ["1.png"]
    assert rows_of(dataset) == [[1, 2, 3, 4]]


def test_csv_without_the_columns_has_no_boxes(tmp_path: Path) -> None:
    dataset = open_dataset(write_csv(tmp_path, "file,label,weight\n0.png,a,1\n"))
    assert dataset.marks is None
    assert dataset.notes == ()
    some_columns = open_dataset(write_csv(tmp_path, "file,label,x0,y0\n0.png,a,1,2\n"))
    assert some_columns.marks is None
    assert [note.kind for note in some_columns.notes] == ["box"]


def boxed(count: int) -> Dataset:
    """In memory; photo i has the box (i, i + 1, i + 2, i + 3), every third has none; every fifth has a mask of level i,
    every seventh shows nothing, but for those."""
    boxes_N4 = torch.arange(count)[:, None] + torch.arange(4.0)
    boxes_N4[::3] = math.nan
    images_NCHW = torch.arange(count, dtype=torch.uint8).reshape(-1, 1, 1, 1).expand(-1, 3, 4, 4).contiguous()
    names = Names(str(index) for index in range(count))
    place = torch.arange(count)
    masks_SGG = place[::5].to(torch.uint8)[:, None, None].expand(-1, MASK_SIDE, MASK_SIDE).contiguous()
    marks = Marks(
        boxes_NM4=torch.stack((boxes_N4, torch.full_like(boxes_N4, math.nan)), 1),
        nothing_N=(place % 7 == 0) & (place % 5 != 0),
        mask_N=torch.where(place % 5 == 0, place // 5, -1),
        masks_SGG=masks_SGG,
    )
    return Dataset("ab", place % 2, names, images_NCHW=images_NCHW, marks=marks)


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
def test_a_photo_keeps_its_marks(change: Callable[[Dataset], Dataset]) -> None:
    changed = change(boxed(20))
    expected = [None if int(name) % 3 == 0 else [int(name) + k for k in range(4)] for name in changed.names]
    assert len(changed) > 0
    assert rows_of(changed) == expected
    assert changed.marks is not None
    numbers = [int(name) for name in changed.names]
    assert changed.marks.nothing_N.tolist() == [n % 7 == 0 and n % 5 != 0 for n in numbers]
    levels = [None if place < 0 else int(changed.marks.masks_SGG[place].max()) for place in changed.marks.mask_N]
    assert levels == [n if n % 5 == 0 else None for n in numbers]


def test_fingerprint_knows_the_marks() -> None:
    whole = boxed(20)

    def changed(**parts: Callable[[torch.Tensor], torch.Tensor]) -> str:
        assert whole.marks is not None
        of_parts = {name: change(getattr(whole.marks, name).clone()) for name, change in parts.items()}
        marks = dataclasses.replace(whole.marks, **of_parts)
        return Dataset(
            whole.classes, whole.labels_N, whole.names, images_NCHW=whole.images_NCHW, marks=marks
        ).fingerprint()

    def at(index: tuple[int, ...], value: float | bool) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda tensor: tensor.index_put(
            tuple(torch.tensor(place) for place in index), torch.tensor(value).to(tensor.dtype)
        )

    without = Dataset(whole.classes, whole.labels_N, whole.names, images_NCHW=whole.images_NCHW)
    assert changed(boxes_NM4=lambda boxes: torch.where(boxes.isnan(), -boxes, boxes)) == whole.fingerprint()
    # Kept in another order, the masks are the same.
    assert (
        changed(masks_SGG=lambda masks: masks.flip(0), mask_N=lambda mask: torch.where(mask < 0, mask, 3 - mask))
        == whole.fingerprint()
    )
    others = [
        changed(boxes_NM4=at((1, 0, 2), 9.0)),
        changed(boxes_NM4=at((1, 1), 9.0)),
        changed(nothing_N=at((2,), True)),
        changed(mask_N=at((5,), -1)),
        changed(masks_SGG=at((1, 7, 7), 200)),
    ]
    assert len({whole.fingerprint(), without.fingerprint(), *others}) == 7


def write_masks(folder: Path) -> None:
    """half.png: the right half of a photo; odd.png: 100 x 70 with soft edges; black.png; broken.png; clear.png."""
    half = np.zeros((48, 48), np.uint8)
    half[:, 24:] = 255
    Image.fromarray(half).save(folder / "half.png")
    odd = np.zeros((70, 100), np.uint8)
    odd[10:40, 20:70] = 127
    odd[12:38, 22:68] = 128
    Image.fromarray(odd).save(folder / "odd.png")
    Image.new("1", (5, 5)).save(folder / "black.png")
    (folder / "broken.png").write_bytes((folder / "odd.png").read_bytes()[:50])
    clear = Image.new("LA", (48, 48), (255, 0))  # what is transparent is not the subject
    clear.paste((255, 255), (0, 0, 24, 48))
    clear.save(folder / "clear.png")


def test_csv_gives_all_objects_and_that_there_is_nothing(tmp_path: Path) -> None:
    text = (
        "file,label,x0,y0,x1,y1,boxes\n"
        '0.png,a,,,,,"[[1, 2, 3, 4], [0, 0, 12, 10]]"\n'
        "1.png,a,,,,,[]\n"
        "2.png,a,,,,,\n"
        "3.png,a,5,6,7,8,\n"
        '4.png,a,5,6,7,8,"[[1, 2, 3, 4]]"\n'
    )
    dataset = open_dataset(write_csv(tmp_path, text))
    assert all_boxes_of(dataset) == [[[1, 2, 3, 4], [0, 0, 12, 10]], [], [], [[5, 6, 7, 8]], [[1, 2, 3, 4]]]
    assert dataset.marks is not None
    assert dataset.marks.nothing_N.tolist() == [False, True, False, False, False]
    assert dataset.notes == ()


def test_of_many_objects_the_main_one_and_the_largest_stay(tmp_path: Path) -> None:
    boxes = [[0, 0, 1, 1], *([0, 0, side, side] for side in range(2, 30))]
    path = write_csv(tmp_path, f'file,label,boxes\n0.png,a,"{json.dumps(boxes)}"\n')
    (found,) = all_boxes_of(open_dataset(path))
    assert found == [[0, 0, 1, 1], *([0, 0, side, side] for side in range(15, 30))]


@pytest.mark.parametrize(
    "cell",
    ["[[1,2,3]]", "[1,2,3,4]", "[[1,2,1,4]]", "[[1,2,3,4],[3,2,1,4]]", "{}", "[", "none", '[[1,2,3,""x""]]', "[[]]",
     "[[1,2,3,null]]", "[[1,2,3,1e400]]", "[" * 20_000, f"[[1,2,3,1{'0' * 400}]]"],
)  # fmt: skip
def test_bad_boxes_are_noted_and_their_photo_kept(tmp_path: Path, cell: str) -> None:
    dataset = open_dataset(write_csv(tmp_path, f'file,label,boxes\n0.png,a,"{cell}"\n1.png,a,[]\n'))
    assert all_boxes_of(dataset) == [[], []]
    assert dataset.marks is not None
    assert dataset.marks.nothing_N.tolist() == [False, True]
    (note,) = dataset.notes
    assert note.kind == "boxes"
    assert "photos.csv line 2: 0.png has the boxes" in note.line
    assert len(note.line) < 250


def test_what_shows_nothing_has_no_box_and_no_mask(tmp_path: Path) -> None:
    write_masks(tmp_path)
    text = "file,label,x0,y0,x1,y1,boxes,mask\n0.png,a,1,2,3,4,[],\n1.png,a,,,,,[],half.png\n"
    dataset = open_dataset(write_csv(tmp_path, text))
    assert rows_of(dataset) == [[1, 2, 3, 4], None]
    assert dataset.marks is not None
    assert dataset.marks.nothing_N.tolist() == [False, False]
    assert dataset.marks.mask_N.tolist() == [-1, 0]
    assert [note.kind for note in dataset.notes] == ["boxes", "boxes"]


def test_csv_gives_masks(tmp_path: Path) -> None:
    write_masks(tmp_path)
    text = "file,label,mask\n0.png,a,half.png\n1.png,a,\n2.png,a,odd.png\n0.png,a,half.png\n3.png,a,clear.png\n"
    dataset = open_dataset(write_csv(tmp_path, text))
    assert dataset.marks is not None
    assert dataset.marks.mask_N.tolist() == [0, -1, 1, 0, 2]
    half, odd, clear = dataset.marks.masks_SGG
    assert half[:, :24].eq(0).all()
    assert half[:, 24:].eq(255).all()
    assert torch.equal(clear, half.flip(1))
    assert odd.float().mean() / 255 == pytest.approx(26 * 46 / 7000, abs=0.002)  # 127 is not the subject, 128 is
    around = boxes_around(dataset.marks.masks_SGG)
    torch.testing.assert_close(around[0], torch.tensor([0.5, 0, 1, 1]))
    torch.testing.assert_close(around[1], torch.tensor([0.22, 12 / 70, 0.68, 38 / 70]), atol=0.006, rtol=0)
    assert [note.kind for note in dataset.notes] == ["repeated row"]


@pytest.mark.parametrize(
    ("mask", "said"), [("black.png", "128 or more"), ("broken.png", "truncated"), ("no.png", "missing")]
)
def test_bad_mask_is_noted_and_its_photo_kept(tmp_path: Path, mask: str, said: str) -> None:
    write_masks(tmp_path)
    dataset = open_dataset(write_csv(tmp_path, f"file,label,mask\n0.png,a,{mask}\n1.png,a,half.png\n"))
    assert dataset.marks is not None
    assert dataset.marks.mask_N.tolist() == [-1, 0]
    (note,) = dataset.notes
    assert note.kind == "mask"
    assert f"photos.csv line 2: 0.png has the mask {mask}" in note.line
    assert said in note.line
    if mask == "black.png":  # the remedy that it names
        remedied = open_dataset(write_csv(tmp_path, "file,label,boxes,mask\n0.png,a,[],\n1.png,a,,half.png\n"))
        assert remedied.notes == ()
        assert remedied.marks is not None
        assert remedied.marks.nothing_N.tolist() == [True, False]


def test_photos_without_a_label_stay_where_that_is_asked_for(tmp_path: Path) -> None:
    path = write_csv(tmp_path, "file,label,x0,y0,x1,y1\n0.png,b,,,,\n1.png,,1,2,3,4\n2.png,a,1,2,3,5\n")
    named = open_dataset(path)
    assert list(named.names) == ["0.png", "2.png"]
    assert [note.kind for note in named.notes] == ["row without a label"]
    every = open_dataset(path, unnamed=True)
    assert every.classes == ("a", "b")
    assert every.labels_N.tolist() == [1, -1, 0]
    assert rows_of(every) == [None, [1, 2, 3, 4], [1, 2, 3, 5]]
    assert every.notes == ()
    assert every.with_classes("xab").labels_N.tolist() == [2, -1, 1]
    found = scan(every, every.select([0, 1]), workers=0)
    assert not found.fatal
    assert scan(every.select([1]), workers=0).fatal == [
        "none of the photos to train on has a label; name some of them, of two classes or more"
    ]
    assert scan(every.select([1, 2]), workers=0).fatal == [
        "all photos to train on are of one class, 'a'; at least two are needed"
    ]


THINGS = 1_603  # a sheet and three tiles
BROKEN_BOX = 1_601


def colour(thing: int) -> tuple[int, int, int]:
    return thing % 256, thing // 256, 77


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five photos in two zip files, four of subjects (the last is held out), and things of one colour each."""
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
    (folder / "subjects").mkdir()
    with zipfile.ZipFile(folder / "subjects" / "subjects-00.zip", "w") as archive:
        for key in (5, 6, 7, 16):
            archive.writestr(f"{key:06}.webp", photo_file(key))
    objects = {
        # The smaller cat is no reason to call the photo otherwise, and the dog as large as the cat is.
        "000005": {"set": "voc", "boxes": [[0, 0, 80, 80], [90, 0, 100, 10]], "labels": ["cat", "sofa"]},
        "000006": {"set": "voc", "boxes": [[0, 0, 80, 80], [80, 0, 160, 80]], "labels": ["cat", "dog"]},
        "000007": {"set": "duts", "boxes": [[20, 16, 90, 36]], "labels": ["salient"]},
        "000016": {"set": "duts", "boxes": [[20, 16, 90, 36]], "labels": ["salient"]},
    }
    (folder / "subjects" / "boxes.json").write_text(json.dumps(objects))
    mask_48x48 = np.zeros((48, 48), np.uint8)
    mask_48x48[6:12, 6:24] = 1
    bits = np.packbits(mask_48x48.reshape(1, -1), axis=1)
    np.savez(folder / "subjects" / "masks.npz", ids=np.array([7], np.int32), bits_48x48=bits)
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
    assert rows[0] == ["file", "label", "boxes", "mask"]
    photos = [
        ["photos/000000.webp", "imagenette/English_springer", "", ""],
        # The mask's box, over 160 x 128 pixels.
        ["photos/000001.webp", "pet/Sphynx", "[[80.0, 16.0, 150.0, 36.0]]", "masks/photos/000001.png"],
        ["photos/000002.webp", "bird/073.Blue_Jay", "[[45.9, 10.2, 97.9, 96.8]]", ""],
        ["photos/000003.webp", "pet/beagle", "[[1, 2, 3, 4]]", "masks/photos/000003.png"],
        ["photos/000004.webp", "car/car", "", ""],
    ]
    subjects = [
        ["subjects/voc/000005.webp", "object/cat", "[[0, 0, 80, 80], [90, 0, 100, 10]]", ""],
        ["subjects/voc/000006.webp", "", "[[0, 0, 80, 80], [80, 0, 160, 80]]", ""],
        ["subjects/duts/000007.webp", "", "[[20, 16, 90, 36]]", "masks/subjects/duts/000007.png"],
    ]
    twice, thrice = ([row for row in own for _ in range(times)] for own, times in ((photos, 2), (subjects, 3)))
    assert rows[1:-THINGS] == twice + thrice
    assert (
        out / "held_out.csv"
    ).read_text() == 'file,label,boxes,mask\nsubjects/duts/000016.webp,,"[[20, 16, 90, 36]]",\n'
    for key in range(5):
        assert (out / f"photos/{key:06}.webp").read_bytes() == photo_file(key)
    for key, name in ((5, "voc"), (6, "voc"), (7, "duts")):
        assert (out / f"subjects/{name}/{key:06}.webp").read_bytes() == photo_file(key)
    with Image.open(out / "masks/subjects/duts/000007.png") as mask:
        assert mask.size == (48, 48)
        assert mask.getbbox() == (6, 6, 24, 12)
    dataset = open_dataset(out / "photos.csv", unnamed=True)
    assert [note.kind for note in dataset.notes] == ["repeated row"]
    named = 2 * 5 + 3 * 3
    assert len(dataset) == named + THINGS
    for thing in (0, 1, 39, 40, 1599, 1600, 1602):
        name, label = dataset.names[named + thing], dataset.classes[int(dataset.labels_N[named + thing])]
        assert label == ("thing/sea_slug", "thing/trilobite")[thing % 2]
        with Image.open(out / name) as image:
            assert image.size == (64, 64)
            assert image.getcolors() == [(64 * 64, colour(thing))]
    found = rows_of(dataset)[named:]
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
