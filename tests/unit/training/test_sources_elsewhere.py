"""Labelled photos in a bucket, at URLs and in tables: they teach what the same files on this machine do."""

import io
import json
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coloured_photos import write_coloured_photos
from command_line import patchlight
from labelled_photos import everything
from models_at_random import tiny_vit
from patchlight import remote
from patchlight.config import PreprocessConfig, ViTConfig
from patchlight.errors import PatchlightError
from patchlight.images.decode import decode
from patchlight.reporting import Reporter
from patchlight.training.api import finetune
from patchlight.training.checkpoint import fingerprint, newest_step
from patchlight.training.config import DataConfig, TrainConfig
from patchlight.training.data import Dataset
from patchlight.training.evaluate import evaluate_photos
from patchlight.training.loop import train
from patchlight.training.objective import Classification
from patchlight.training.scan import scan
from patchlight.training.sources import open_dataset
from patchlight.weights.load import load
from patchlight.weights.save import save

pytest.importorskip("moto", reason="moto is not installed")
pytest.importorskip("s3fs", reason="the extra `remote` is not installed")
pa = pytest.importorskip("pyarrow", reason="the extra `tables` is not installed")

import pyarrow.parquet as pq  # noqa: E402

from s3_server import Bucket, fresh, serving, used  # noqa: E402

COLOURS = ("blue", "green", "red")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_coloured_photos(tmp_path_factory.mktemp("photos"), 24, 20)


@pytest.fixture(scope="module")
def server() -> Iterator[Bucket]:
    with serving() as server:
        yield server


@pytest.fixture
def bucket(server: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with used(server, monkeypatch):
        yield server


def upload(bucket: Bucket, folder: Path, prefix: str) -> str:
    client = bucket.client()
    for path in folder.rglob("*"):
        if path.is_file():
            key = f"{prefix}/{path.relative_to(folder)}"
            client.put_object(Bucket="photos", Key=key, Body=path.read_bytes())
    return f"s3://photos/{prefix}"


def shard(path: Path, files: Sequence[Path]) -> Path:
    with tarfile.open(path, "w") as archive:
        for number, file in enumerate(files):
            for suffix, content in (("png", file.read_bytes()), ("cls", file.parent.name.encode())):
                about = tarfile.TarInfo(f"{number:03}.{suffix}")
                about.size = len(content)
                archive.addfile(about, io.BytesIO(content))
    return path


def table(files: Sequence[Path], *, named: bool = True) -> Any:
    """As `datasets` writes it, with the names of the classes beside it, or plain bytes and texts."""
    images = [{"bytes": file.read_bytes(), "path": file.name} for file in files]
    if not named:
        return pa.table({"jpg": [each["bytes"] for each in images], "breed": [file.parent.name for file in files]})
    features = {"image": {"_type": "Image"}, "label": {"names": list(COLOURS), "_type": "ClassLabel"}}
    schema = pa.schema(
        [("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])), ("label", pa.int64())],
        {"huggingface": json.dumps({"info": {"features": features}})},
    )
    labels = [COLOURS.index(file.parent.name) for file in files]
    return pa.table({"image": images, "label": labels}, schema=schema)


def files_of(photos: Path) -> list[Path]:
    return sorted(photos.rglob("*.png"))


def hashed(dataset: Dataset) -> Dataset:
    return scan(dataset, workers=0).clean(dataset)


def contents(dataset: Dataset) -> list[tuple[bytes, str]]:
    """What there is to learn, whatever it is called."""
    return sorted((dataset.content_hash(i), dataset.classes[int(dataset.labels_N[i])]) for i in range(len(dataset)))


def settings(photos: Path | str, **changes: Any) -> TrainConfig:
    config = TrainConfig(
        model=ViTConfig(image_size=16, patch_size=8, width=16, depth=1, num_heads=2, num_classes=3),
        data=DataConfig(train=str(photos), workers=0, validation_share=0.25),
        preprocess=PreprocessConfig(image_size=16),
        epochs=6 * 8 / 27,
        batch_size=8,
        checkpoint_every=100,
        log_every=1,
    )
    return config.changed(changes)


def weights(folder: Path) -> str:
    return fingerprint(load(folder).model.state_dict())


# What there is


def test_a_folder_of_a_bucket_is_a_folder(bucket: Bucket, photos: Path) -> None:
    bucket.put("set/", b"")  # as consoles make folders
    there = hashed(open_dataset(upload(bucket, photos, "set")))
    here = hashed(open_dataset(photos))
    assert everything(there) == everything(here)
    assert there.fingerprint() == here.fingerprint()
    assert contents(open_dataset("s3://photos/set/*/*.png")) == contents(here)
    assert contents(open_dataset(Path("s3://photos/set"))) == contents(here)
    assert [path for path in bucket.asked if path.startswith("PUT")] == []

    client = bucket.client()
    for part, names in (("train", ["red/0.png", "blue/0.png"]), ("val", ["red/1.png"])):
        for name in names:
            client.put_object(Bucket="photos", Key=f"parts/{part}/{name}", Body=(photos / name).read_bytes())
    assert everything(open_dataset("s3://photos/parts")) == [("blue/0.png", "blue"), ("red/0.png", "red")]
    assert everything(open_dataset("s3://photos/parts", "validation")) == [("red/1.png", "red")]
    web = [f"http://127.0.0.1/{name}" for name in ("a/render.png?id=1", "a/render.png?id=2", "b/1.png")]
    bucket.put("lists/web.txt", "\n".join(web).encode())
    assert everything(open_dataset("s3://photos/lists/web.txt")) == [
        ("a/render.png", "a"),
        ("a/~render.png", "a"),
        ("b/1.png", "b"),
    ]
    bucket.put("lists/all.txt", b"s3://photos/set/red/3.png\ns3://photos/set/blue/4.png\n")
    assert everything(open_dataset("s3://photos/lists/all.txt")) == [("blue/4.png", "blue"), ("red/3.png", "red")]


def test_each_photo_is_fetched_once_to_be_checked(bucket: Bucket, photos: Path) -> None:
    url = upload(bucket, photos, "set")
    bucket.asked.clear()
    bucket.throttled |= {"red/3.png": 2}
    assert scan(open_dataset(url), workers=0).unreadable == []
    fetched = [line for line in bucket.asked if line.startswith("GET") and line.endswith(".png")]
    assert len(fetched) == len(set(fetched)) == 36


def test_shards_in_a_bucket(bucket: Bucket, photos: Path, tmp_path: Path) -> None:
    files = files_of(photos)
    shard(tmp_path / "train-000.tar", files[::2])
    shard(tmp_path / "train-001.tar", files[1::2])
    shard(tmp_path / "test-000.tar", files[:5])
    url = upload(bucket, tmp_path, "shards")
    for part in ("train", "test"):
        here, there = open_dataset(tmp_path, part), open_dataset(url, part)  # type: ignore[arg-type]
        assert everything(there) == everything(here)
        assert hashed(there).fingerprint() == hashed(here).fingerprint()
    bucket.throttled |= {"train-001.tar": 3}
    assert contents(open_dataset(f"{url}/train-*.tar")) == contents(open_dataset(photos))
    assert bucket.throttled == {"train-001.tar": 0}
    bucket.put("shards/train-001.tar", b"no shard" * 100)
    with pytest.raises(PatchlightError, match=r"train-001.tar: is not an uncompressed tar file that can be read"):
        open_dataset(url)


def test_tables_and_what_datasets_saves(bucket: Bucket, photos: Path, tmp_path: Path) -> None:
    files = files_of(photos)
    pq.write_table(table(files), tmp_path / "photos.parquet", row_group_size=7)
    expected = contents(open_dataset(photos))
    found = open_dataset(tmp_path / "photos.parquet")
    assert found.classes == COLOURS
    assert found.names[3] == "photos.parquet::3"
    assert contents(found) == expected
    assert not scan(found, workers=0).problems
    bucket.put("tables/photos.parquet", (tmp_path / "photos.parquet").read_bytes())
    bucket.throttled |= {"photos.parquet": 2}
    assert contents(open_dataset("s3://photos/tables/photos.parquet")) == expected

    saved = tmp_path / "saved"  # as save_to_disk lays a DatasetDict out
    for part, chosen in (("train", files[:30]), ("test", files[30:])):
        (saved / part).mkdir(parents=True)
        for name in ("data-00000-of-00001.arrow", "cache-1234.arrow"):
            with pa.ipc.new_stream(saved / part / name, table(chosen).schema) as writer:
                writer.write_table(table(chosen))
    assert contents(open_dataset(saved)) == contents(open_dataset(photos).select(range(30)))
    assert len(open_dataset(saved, "test")) == 6
    hub = tmp_path / "hub" / "data"  # as a repository of the hub lies
    hub.mkdir(parents=True)
    pq.write_table(table(files[:30]), hub / "train-00000-of-00001.parquet")
    pq.write_table(table(files[30:]), hub / "test-00000-of-00001.parquet")
    upload(bucket, tmp_path / "hub", "hub")
    (tmp_path / "two" / "b").mkdir(parents=True)
    (tmp_path / "two" / "a").mkdir()
    pq.write_table(table(files[:30]), tmp_path / "two" / "a" / "x.parquet")
    pq.write_table(table(files[30:]), tmp_path / "two" / "b" / "x.parquet")
    assert contents(hashed(open_dataset(tmp_path / "two"))) == expected
    for place in (tmp_path / "hub", "s3://photos/hub"):
        assert (len(open_dataset(place)), len(open_dataset(place, "test"))) == (30, 6)


def test_columns_of_labels(photos: Path, tmp_path: Path) -> None:
    files = files_of(photos)
    pq.write_table(table(files, named=False), tmp_path / "own.parquet")
    assert contents(open_dataset(tmp_path / "own.parquet", label_column="breed")) == contents(open_dataset(photos))
    with pytest.raises(PatchlightError, match=r"own.parquet: has no column called label, labels, class or the like"):
        open_dataset(tmp_path / "own.parquet")
    with pytest.raises(PatchlightError, match=r"its column 'jpg' is not one of texts or whole numbers"):
        open_dataset(tmp_path / "own.parquet", label_column="jpg")
    alone = open_dataset(tmp_path / "own.parquet", labelled=False)
    assert (alone.classes, len(alone)) == (("photos",), 36)
    some = table(files[:4]).set_column(1, "label", pa.array([0, None, 2, 9]))
    pq.write_table(some.slice(0, 3), tmp_path / "some.parquet")
    found = open_dataset(tmp_path / "some.parquet")
    assert (found.labels_N.tolist(), len(found.notes)) == ([0, 2], 1)
    assert open_dataset(tmp_path / "some.parquet", unnamed=True).labels_N.tolist() == [0, -1, 2]
    (tmp_path / "own.csv").write_text(f"file,breed\n{files[0]},cat\n{files[-1]},dog\n")
    assert open_dataset(tmp_path / "own.csv", label_column="Breed").classes == ("cat", "dog")


def test_a_csv_at_a_url_names_files_beside_it(bucket: Bucket, photos: Path, tmp_path: Path) -> None:
    url = upload(bucket, photos, "set")
    rows = [f"../set/{file.relative_to(photos)},{file.parent.name}" for file in files_of(photos)]
    bucket.put("tables/labels.csv", "\n".join(["file,label", *rows]).encode())
    found = hashed(open_dataset("s3://photos/tables/labels.csv"))
    assert contents(found) == contents(open_dataset(photos))
    secret = tmp_path / "secret.png"
    secret.write_bytes((photos / "red" / "0.png").read_bytes())
    bucket.put("tables/labels.csv", f"file,label\n{secret},mine\n{url}/red/1.png,red\n".encode())
    found = open_dataset("s3://photos/tables/labels.csv")
    assert scan(found, workers=0).left_out == [str(secret)]  # the bucket has none, and this machine is not asked
    (tmp_path / "here.csv").write_text(f"file,label\nsecret.png,mine\n{url}/red/1.png,red\n")
    assert scan(open_dataset(tmp_path / "here.csv"), workers=0).unreadable == []

    pytest.importorskip("aiohttp")
    client = bucket.client()
    client.put_bucket_acl(Bucket="photos", ACL="public-read")
    bucket.put("set/labels.csv", b"file,label,mask\nred/1.png,red,blue/2.png\nblue/2.png,blue,\nblue/none.png,blue,\n")
    for key in ("set/labels.csv", "set/red/1.png", "set/blue/2.png"):
        client.put_object_acl(Bucket="photos", Key=key, ACL="public-read")
    web = open_dataset(f"{bucket.url}/photos/set/labels.csv")
    assert web.marks is not None
    checked = scan(web, workers=0)
    assert checked.left_out == ["blue/none.png"]
    assert contents(checked.clean(web)) == contents(open_dataset(photos).select([2 + 2, 24 + 1]))


# Learning from it


def test_a_run_on_a_bucket_is_the_run_on_the_same_files(bucket: Bucket, photos: Path, tmp_path: Path) -> None:
    model = tiny_vit(image_size=16)
    start = save(model, tmp_path / "start", preprocess=PreprocessConfig(image_size=16))
    url = upload(bucket, photos, "set")
    shard(tmp_path / "a.tar", files_of(photos))
    pq.write_table(table(files_of(photos)), tmp_path / "a.parquet")
    for name in ("a.tar", "a.parquet"):
        bucket.put(f"{name}s/{name}", (tmp_path / name).read_bytes())
    how = {"epochs": 1, "augment.variations": 1, "data.workers": 0}

    def tuned(photos: Any, name: str) -> str:
        finetune(photos, tmp_path / name, model=start, settings=how, device="cpu", reporter=Reporter())
        return weights(tmp_path / name)

    here = tuned(photos, "here")
    bucket.throttled |= {"red/3.png": 3, "green/7.png": 1}
    assert tuned(url, "there") == here
    assert set(bucket.throttled.values()) == {0}
    # A set's order, and so what a run draws, goes by names.
    assert tuned("s3://photos/a.tars", "shards") == tuned(tmp_path / "a.tar", "shards here")
    assert tuned("s3://photos/a.parquets", "table") == tuned(tmp_path / "a.parquet", "table here")
    one, two = (evaluate_photos(load(tmp_path / "here"), each, workers=0) for each in (photos, url))
    assert one.evaluation.to_dict() == two.evaluation.to_dict()


def test_a_photo_that_goes_out_of_reach_stops_the_run_which_goes_on_exactly(
    bucket: Bucket, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = upload(bucket, photos, "set")
    whole = train(settings(url), tmp_path / "whole")
    prepare, calls = Classification.prepare, 0

    def runs_dry(after: int, trouble: Any) -> None:
        nonlocal calls
        calls = 0

        def otherwise(self: Classification, *arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == after:
                trouble()
            return prepare(self, *arguments, **named)

        monkeypatch.setattr(Classification, "prepare", otherwise)

    client = bucket.client()
    gone = {path: path.read_bytes() for path in files_of(photos)}

    def remove() -> None:
        for path in gone:
            client.delete_object(Bucket="photos", Key=f"set/{path.relative_to(photos)}")

    runs_dry(3, remove)
    with pytest.raises(PatchlightError, match=r"png: missing \(there is no such file\); restore the photo"):
        train(settings(url), tmp_path / "run")
    assert newest_step(tmp_path / "run" / "checkpoints") == 3  # nothing that was learnt is lost
    upload(bucket, photos, "set")
    runs_dry(2, lambda: bucket.throttled.update({".png": 1000}))
    with pytest.raises(
        PatchlightError, match=r"s3://photos/set/.*: cannot be reached \(.*after 5 tries\); once it can"
    ):
        train(settings(url), tmp_path / "run", resume=True)
    assert newest_step(tmp_path / "run" / "checkpoints") == 5
    # Nor may it be left out: the run would begin with others than it goes on with.
    with pytest.raises(PatchlightError, match="once it can, run the same command again"):
        train(settings(url), tmp_path / "new")
    assert not (tmp_path / "new").exists()
    bucket.throttled.clear()
    monkeypatch.setattr(Classification, "prepare", prepare)
    assert train(settings(url), tmp_path / "run", resume=True).accuracy == whole.accuracy
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


class Rows:
    """As a Dataset of `datasets` gives its rows."""

    def __init__(self, files: list[Path], *, decoded: bool) -> None:
        self.files, self.decoded = files, decoded
        self.features = {"image": None, "label": SimpleNamespace(names=list(COLOURS))}

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        file = self.files[index]
        image = decode(file).image if self.decoded else {"bytes": file.read_bytes(), "path": None}
        return {"image": image, "label": COLOURS.index(file.parent.name), "id": index}


def test_rows_with_names_are_a_dataset(photos: Path) -> None:
    for decoded in (True, False):
        found = open_dataset(Rows(files_of(photos), decoded=decoded), workers=0)
        assert found.classes == COLOURS
        assert found.names[0] == "Rows[0]"
        assert found.labels_N.tolist() == open_dataset(photos).labels_N.tolist()
    assert contents(found) == contents(open_dataset(photos))
    numbered = open_dataset(Rows(files_of(photos)[:3], decoded=False), label_column="id", workers=0)
    assert numbered.classes == ("0", "1", "2")
    with pytest.raises(PatchlightError, match="Rows: its items have no breed, but image, label, id: name the one of"):
        open_dataset(Rows(files_of(photos), decoded=False), label_column="breed", workers=0)
    with pytest.raises(PatchlightError, match="dict has the parts train, test; give one of them"):
        open_dataset({"train": [], "test": []}, workers=0)  # type: ignore[arg-type]


def test_datasets_of_hugging_face(photos: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    photos = Path(shutil.copytree(photos, tmp_path / "photos"))  # a table names only what lies below its own folder
    files = files_of(photos)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(COLOURS))})
    columns = {"image": list(map(str, files)), "label": [file.parent.name for file in files]}
    made = datasets.Dataset.from_dict(columns, features=features)
    parts = made.train_test_split(6, seed=0)
    parts.save_to_disk(str(tmp_path / "saved"))
    made.to_parquet(str(tmp_path / "made.parquet"))
    expected = contents(open_dataset(photos))
    assert contents(open_dataset(tmp_path / "made.parquet")) == expected
    assert sorted(contents(open_dataset(tmp_path / "saved")) + contents(open_dataset(tmp_path / "saved", "test"))) == (
        expected
    )
    assert contents(open_dataset(made.cast_column("image", datasets.Image(decode=False)), workers=0)) == expected
    assert open_dataset(made, workers=1).classes == COLOURS


# Mistakes


def test_mistakes_are_one_line_and_leave_nothing(
    bucket: Bucket, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tiny_vit(image_size=16), tmp_path / "start", preprocess=PreprocessConfig(image_size=16))
    (tmp_path / "recipe.py").write_text(
        "from pathlib import Path\nfrom patchlight.training.config import TrainConfig\n\n\n"
        f"def config():\n    return TrainConfig.from_json({settings('x').to_json()!r})\n"
    )
    pq.write_table(pa.table({"label": [0, 1], "name": ["a", "b"]}), tmp_path / "none.parquet")
    pq.write_table(table(files_of(photos), named=False), tmp_path / "own.parquet")
    before = sorted(tmp_path.iterdir())

    def complaint(path: str, *more: str) -> str:
        lines = set()
        for words in (
            ("finetune", path, "--model", "start", "--out", "run"),
            ("train", "recipe.py", "--set", f"data.train={path}", "--out", "run"),
            ("evaluate", "start", path, "--knn"),
        ):
            run = patchlight(*words, *more, cwd=tmp_path)
            assert run.returncode == 2, run.stderr
            assert run.stderr.count("\n") == 1, run.stderr
            assert sorted(tmp_path.iterdir()) == before
            lines.add(
                run.stderr.removeprefix("patchlight: ")
                .strip()
                .removesuffix("; set data.train to the photos to learn from")
            )
        (line,) = lines
        return line

    assert complaint("ftp://host/a").startswith("ftp:// is not supported; use s3, gs")
    assert complaint("s3://none").startswith("s3://none: there is no such bucket, folder or file")
    assert complaint("s3://photos/none").startswith("s3://photos/none: there is no such bucket, folder or file")
    bucket.put("day/a.jpg", b"x")
    assert complaint("s3://photos/day").startswith("s3://photos/day: 1 photos lie in it directly; put the photos into")
    assert complaint("s3://photos/day/a.jpg").startswith("s3://photos/day/a.jpg: not a set of photos; a set is")
    assert complaint("none.parquet").startswith("none.parquet: has no column of images (bytes, or a struct")
    assert "own.parquet: has no column called label, labels, class or the like; its columns are jpg, breed: name" in (
        complaint("own.parquet")
    )
    monkeypatch.setitem(remote._LIBRARIES, "gs", "nothing_of_the_kind")
    assert complaint("gs://b") == "gs:// needs nothing_of_the_kind; pip install 'patchlight[remote]'"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    fresh()
    line = complaint("s3://photos")
    assert line.startswith("s3://photos: may not be read")
    assert "check AWS_ACCESS_KEY_ID" in line
