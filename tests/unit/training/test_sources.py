"""Photos of every layout are found with their labels, and what is no set of photos is refused in one line."""

import importlib.util
import io
import json
import shutil
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import patchlight.training.sources as sources
from labelled_photos import everything, save_photo
from patchlight.errors import PatchlightError
from patchlight.training.sources import open_dataset

# Layouts


def test_a_folder_of_class_folders(tmp_path: Path) -> None:
    for name in ("b/1.png", "b/deep/er/2.JPG", "a/3.webp", "a/.hidden.png", ".git/4.png", "__MACOSX/5.png"):
        save_photo(tmp_path / name, 0)
    (tmp_path / "a" / "notes.txt").write_text("not a photo")
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "list.txt").write_text("no photo")
    (tmp_path / "b" / "deep" / "loop").symlink_to(tmp_path / "b")
    dataset = open_dataset(tmp_path)
    assert dataset.classes == ("a", "b")
    assert [note.line for note in dataset.notes] == ["ab/ has no photos: ignored, and not counted as a class"]
    assert everything(dataset) == [("a/3.webp", "a"), ("b/1.png", "b"), ("b/deep/er/2.JPG", "b")]
    assert dataset.labels_N.dtype == torch.int64
    assert dataset.images_NCHW is None
    photo = dataset.read(1)
    assert np.array_equal(np.asarray(photo.image), np.asarray(Image.open(tmp_path / "b" / "1.png")))


@pytest.mark.parametrize("held_out", ["val", "validation", "test", "Val"])
def test_train_and_validation_folders_are_the_two_parts(tmp_path: Path, held_out: str) -> None:
    save_photo(tmp_path / "train" / "a" / "1.png", 1)
    save_photo(tmp_path / held_out / "a" / "2.png", 2)
    (tmp_path / "annotations").mkdir()
    assert everything(open_dataset(tmp_path)) == [("a/1.png", "a")]
    assert everything(open_dataset(tmp_path, "validation")) == [("a/2.png", "a")]
    assert everything(open_dataset(tmp_path, "test")) == [("a/2.png", "a")]


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    for kind in ("train", "car"):
        save_photo(tmp_path / kind / "1.png", 1)
    assert open_dataset(tmp_path).classes == ("car", "train")


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    save_photo(tmp_path / "train" / "a" / "1.png", 1)
    assert len(open_dataset(tmp_path)) == 1
    with pytest.raises(PatchlightError, match="no validation part"):
        open_dataset(tmp_path, "validation")


def test_folders_that_are_no_set(tmp_path: Path) -> None:
    with pytest.raises(PatchlightError, match="no such file or folder"):
        open_dataset(tmp_path / "nowhere")
    with pytest.raises(PatchlightError, match="it holds no folders"):
        open_dataset(tmp_path)
    photo = save_photo(tmp_path / "1.png", 1)
    with pytest.raises(PatchlightError, match="1 photos lie in it directly"):
        open_dataset(tmp_path)
    with pytest.raises(PatchlightError, match="not a set of photos"):
        open_dataset(photo)
    with pytest.raises(PatchlightError, match="part='dev'"):
        open_dataset(tmp_path, "dev")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("file,label\na.png,cat\nb.png,dog\n", {"a.png": "cat", "b.png": "dog"}),
        ('\ufeffLabel;File;note\r\ncat;a.png;\r\n"dog" ; sub/c.png;x\r\n\r\n', {"a.png": "cat", "sub/c.png": "dog"}),
        ("file\tlabel\na.png\t10\nb.png\t9\n", {"a.png": "10", "b.png": "9"}),
    ],
)
def test_a_csv(tmp_path: Path, text: str, expected: dict[str, str]) -> None:
    for number, name in enumerate(("a.png", "b.png", "sub/c.png")):
        save_photo(tmp_path / name, number)
    path = tmp_path / "labels.csv"
    path.write_bytes(text.encode())
    dataset = open_dataset(path)
    assert dict(everything(dataset)) == expected
    assert dataset.notes == ()
    if "10" in expected.values():
        assert dataset.classes == ("9", "10")


def test_bad_rows_of_a_csv_are_noted_by_line(tmp_path: Path) -> None:
    save_photo(tmp_path / "a.png", 0)
    path = tmp_path / "labels.csv"
    path.write_text("file,label\na.png,cat\nlost.png,cat\na.png,\na.png\n,cat\n")
    dataset = open_dataset(path)
    assert everything(dataset) == [("a.png", "cat")]
    assert [note.line for note in dataset.notes] == [
        "labels.csv line 3: lost.png is missing: left out",
        "labels.csv line 4: a.png has no label: left out",
        "labels.csv line 5: a.png has no label: left out",
        "labels.csv line 6: names no file: left out",
    ]


def test_a_class_of_a_csv_that_has_lost_its_photos_is_noted(tmp_path: Path) -> None:
    save_photo(tmp_path / "a.png", 0)
    path = tmp_path / "labels.csv"
    path.write_text("file,label\na.png,cat\nb.png,cat\nc.png,dog\nd.png,dog\ne.png,\n")
    dataset = open_dataset(path)
    assert dataset.classes == ("cat",)
    lost = [note.line for note in dataset.notes if note.kind == "class without photos"]
    assert lost == ["labels.csv: no photo of the class 'dog' is there (2 rows): left out altogether"]


def test_a_csv_without_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    for content in (b"name,class\na.png,cat\n", b"", b"\xff\xfe\x00"):
        path.write_bytes(content)
        with pytest.raises(PatchlightError, match=r"must name the columns file,label|not UTF-8") as caught:
            open_dataset(path)
        assert "\n" not in str(caught.value)


def write_shard(path: Path, members: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def test_tar_shards(tmp_path: Path) -> None:
    content = {seed: save_photo(tmp_path / "source" / f"{seed}.png", seed).read_bytes() for seed in range(6)}
    shards = tmp_path / "shards"
    write_shard(
        shards / "0.tar",
        {
            "000.cls": b"2\n",
            "000.png": content[0],
            "long/" + "x" * 150 + ".png": content[1],  # a name that needs a second header
            "long/" + "x" * 150 + ".json": b'{"label": 10, "by": "me"}',
            "003.png": content[2],
            "004.seg.png": content[2],
        },
    )
    write_shard(shards / "1.tar", {"000.png": content[3], "000.json": b'{"cls": "2"}', "001.cls": b"2"})
    dataset = open_dataset(shards)
    assert dataset.classes == ("2", "10")
    assert everything(dataset) == [
        ("0.tar/000.png", "2"),
        (f"0.tar/long/{'x' * 150}.png", "10"),
        ("1.tar/000.png", "2"),
    ]
    for index, seed in enumerate((0, 1, 3)):
        expected = np.asarray(Image.open(io.BytesIO(content[seed])))
        assert np.array_equal(np.asarray(dataset.read(index).image), expected)
    assert [note.line for note in dataset.notes] == [
        "0.tar/003.png: no .cls or .json beside it gives a label: left out"
    ]
    assert len(open_dataset(shards / "1.tar")) == 1


def test_shards_named_by_their_part(tmp_path: Path) -> None:
    photo = save_photo(tmp_path / "1.png", 1).read_bytes()
    for name in ("train-0.tar", "train-1.tar", "val_0.tar"):
        write_shard(tmp_path / "shards" / name, {"0.png": photo, "0.cls": b"a"})
    assert list(open_dataset(tmp_path / "shards").names) == ["train-0.tar/0.png", "train-1.tar/0.png"]
    assert list(open_dataset(tmp_path / "shards", "validation").names) == ["val_0.tar/0.png"]


def test_a_cut_or_compressed_shard_is_refused(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.tar", {"0.png": bytes(5000), "0.cls": b"a"})
    whole = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(whole[:3000])
    with pytest.raises(PatchlightError, match=r"a\.tar: is not a whole"):
        open_dataset(tmp_path / "a.tar")
    with tarfile.open(tmp_path / "b.tar", "w:gz") as archive:
        archive.add(tmp_path / "a.tar")
    with pytest.raises(PatchlightError, match=r"b\.tar: is not a whole"):
        open_dataset(tmp_path / "b.tar")


# CIFAR-10


@pytest.fixture
def small_cifar10(monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, list[int]]:
    """60 images of CIFAR-10's colours, 10 to a file, which is then all that is asked for."""
    monkeypatch.setattr(sources, "_CIFAR10_IMAGES", 10)
    generator = np.random.default_rng(0)
    images_NHWC = np.empty((60, 32, 32, 3))
    for images, means in ((slice(0, 50), (0.4914, 0.4822, 0.4465)), (slice(50, 60), (0.4942, 0.4851, 0.4504))):
        noise = generator.uniform(-60, 60, images_NHWC[images].shape)
        images_NHWC[images] = noise - noise.mean((0, 1, 2)) + 255 * np.array(means)
    labels = [label for _ in range(6) for label in generator.permutation(10).tolist()]
    return images_NHWC.round().astype(np.uint8), labels


def write_cifar10_pngs(folder: Path, images_NHWC: np.ndarray, labels: list[int]) -> None:
    folder.mkdir(parents=True)
    for index, name in enumerate([*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]):
        Image.fromarray(images_NHWC[10 * index : 10 * index + 10].reshape(10, 1024, 3)).save(folder / f"{name}.png")
    (folder / "train_lables.json").write_text(json.dumps(labels[:50]))
    (folder / "test_lables.json").write_text(json.dumps(labels[50:]))


def write_cifar10_binary(folder: Path, images_NHWC: np.ndarray, labels: list[int]) -> None:
    folder.mkdir(parents=True)
    for index, name in enumerate([*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]):
        records = b""
        for place in range(10 * index, 10 * index + 10):
            records += bytes([labels[place]]) + b"".join(images_NHWC[place, :, :, c].tobytes() for c in range(3))
        (folder / f"{name}.bin").write_bytes(records)


@pytest.mark.parametrize("inside", [".", "package", "a/cifar-10-batches-bin"])
@pytest.mark.parametrize("write", [write_cifar10_pngs, write_cifar10_binary])
def test_cifar10(tmp_path: Path, small_cifar10: tuple[np.ndarray, list[int]], inside: str, write: Any) -> None:
    images_NHWC, labels = small_cifar10
    write(tmp_path / "c" / inside, images_NHWC, labels)
    for part, places_here in (("train", slice(0, 50)), ("test", slice(50, 60)), ("validation", slice(50, 60))):
        dataset = open_dataset(tmp_path / "c", part)  # type: ignore[arg-type]
        assert dataset.images_NCHW is not None
        assert np.array_equal(dataset.images_NCHW.numpy(), images_NHWC[places_here].transpose(0, 3, 1, 2))
        assert dataset.labels_N.tolist() == labels[places_here]
        assert dataset.classes[6] == "frog"
        assert np.array_equal(np.asarray(dataset.read(3).image), images_NHWC[places_here][3])


@pytest.mark.parametrize("damage", ["file", "labels", "colours", "size", "json", "pickled"])
def test_what_is_not_cifar10_is_refused(
    tmp_path: Path, small_cifar10: tuple[np.ndarray, list[int]], damage: str
) -> None:
    images_NHWC, labels = small_cifar10
    if damage == "colours":
        images_NHWC = images_NHWC + np.uint8(1)
    write_cifar10_pngs(tmp_path / "c", images_NHWC, [0, *labels[:-1]] if damage == "labels" else labels)
    if damage == "file":
        (tmp_path / "c" / "data_batch_4.png").unlink()
    if damage == "size":
        save_photo(tmp_path / "c" / "data_batch_2.png", 0)
    if damage == "json":
        (tmp_path / "c" / "train_lables.json").write_text("[1, 2")
    if damage == "pickled":
        shutil.rmtree(tmp_path / "c")
        (tmp_path / "c").mkdir()
        for name in ("data_batch_1", "batches.meta"):
            (tmp_path / "c" / name).write_bytes(b"\x80")
    with pytest.raises(PatchlightError, match=r"missing; fetch|is not CIFAR-10|pickled") as caught:
        open_dataset(tmp_path / "c")
    assert "\n" not in str(caught.value)


def fetch_script() -> ModuleType:
    path = Path(__file__).parents[3] / "recipes" / "fetch_cifar10.py"
    spec = importlib.util.spec_from_file_location("fetch_cifar10", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("write", [write_cifar10_pngs, write_cifar10_binary])
def test_fetching_unpacks_only_what_is_needed(
    tmp_path: Path,
    small_cifar10: tuple[np.ndarray, list[int]],
    write: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(tmp_path / "package", *small_cifar10)
    (tmp_path / "package" / "index.js").write_text("evil()")
    with tarfile.open(tmp_path / "c.tgz", "w:gz") as archive:
        for path in sorted((tmp_path / "package").iterdir()):
            archive.add(path, f"../../{path.name}" if path.name.startswith("test_batch") else f"package/{path.name}")
    target = tmp_path / "sets" / "cifar10"
    arguments = [str(target), "--from", str(tmp_path / "c.tgz")]
    assert fetch_script().main(arguments) == 0
    assert "50 and 10 photos" in capsys.readouterr().out
    expected = {path.name for path in (tmp_path / "package").iterdir()} - {"index.js"}
    assert {path.name for path in target.iterdir()} == expected
    assert [path.name for path in target.parent.iterdir()] == ["cifar10"]  # nothing temporary is left
    assert fetch_script().main(arguments) == 0
    assert "there already" in capsys.readouterr().out


def test_fetching_fails_in_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = fetch_script()
    (tmp_path / "page.tgz").write_text("<html>")
    (tmp_path / "full").mkdir()
    save_photo(tmp_path / "full" / "a" / "1.png", 1)
    target = str(tmp_path / "sets" / "cifar10")
    monkeypatch.setattr(script.shutil, "which", lambda name: None)
    for arguments in (
        [target],
        [target, "--from", str(tmp_path / "page.tgz")],
        [target, "--from", "nowhere.tgz"],
        [str(tmp_path / "full")],
    ):
        assert script.main(arguments) == 2
        message = capsys.readouterr().err
        assert message.count("\n") == 1
        assert "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz" in message or "something else" in message
    assert not any((tmp_path / "sets").iterdir())


@pytest.mark.parametrize("path", ["~nobody-of-that-name/photos", "x" * 300, "a\0b"])
def test_paths_that_cannot_be_are_not_there(path: str) -> None:
    with pytest.raises(PatchlightError, match="there is no such file or folder; give the path of your photos"):
        open_dataset(path)
