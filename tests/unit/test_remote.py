"""Photos in a bucket: a real S3 server on this machine, that refuses, throttles and dawdles when it is told to."""

import http.server
import io
import json
import os
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command_line import patchlight
from crop_runs import make_photos, photo, rows_of, run_crop, save_model
from patchlight import remote
from patchlight.batch import runner
from patchlight.batch.again import FinishedRun
from patchlight.batch.inputs import find_photos
from patchlight.batch.merge import merge
from patchlight.batch.settings import CropRunSettings, CropSettings
from patchlight.batch.table_run import embed_photos
from patchlight.batch.tables import read_features
from patchlight.errors import PatchlightError
from patchlight.images import containers
from patchlight.images.decode import ImageError, decode
from patchlight.reporting import SILENT
from s3_server import Bucket, fresh, serving, used


@pytest.fixture(scope="module")
def server() -> Iterator[Bucket]:
    with serving() as server:
        yield server


@pytest.fixture
def bucket(server: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with used(server, monkeypatch):
        for number in range(4):
            server.put(f"day/{number:03}.jpg", jpeg(number))
        server.put("day/notes.txt.gz", b"notes")
        server.put("day/.hidden/x.jpg", b"x")
        yield server


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


def crop(paths: Any, out: Path, model: Path, **more: Any) -> Any:
    return run_crop(paths, out, model=model, device="cpu", **({"workers": 0} | more))


def test_photos_of_a_bucket_are_reviewed(
    bucket: Bucket, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    review = pytest.importorskip("patchlight.serve.review", reason="the extra `serve` is not installed")
    monkeypatch.chdir(tmp_path)  # and back, as the run's folder is entered
    crop("s3://photos/day", tmp_path / "out", model)
    reviewed = review.Review(FinishedRun(tmp_path / "out"))
    reviewed.correct(0, {"decision": "none", "boxes": []})
    reviewed.follower.close()
    assert reviewed.follower.trouble is None
    assert (tmp_path / "out" / "corrections.jsonl").read_text().startswith('{"file": "s3://photos/day/000.jpg"')
    assert [row["method"] for row in rows_of(tmp_path / "out")] == ["corrected", "subject", "subject", "subject"]
    assert reviewed.shown[0]["corrected"]
    assert review._preview(reviewed.files[0], 64)


def test_a_bucket_is_a_folder(bucket: Bucket, tmp_path: Path, model: Path) -> None:
    make_photos(tmp_path / "day", 4)
    here = crop(tmp_path / "day", tmp_path / "here", model)
    there = crop("s3://photos/day", tmp_path / "there", model, workers=1)
    assert (there.photos, there.failed, there.crops) == (4, 0, here.crops)
    assert there.skipped == {".gz": 1}
    ours, theirs = rows_of(tmp_path / "here"), rows_of(tmp_path / "there")
    assert [row["path"] for row in theirs] == [f"s3://photos/day/{number:03}.jpg" for number in range(4)]
    different = {"path"}
    assert [{k: v for k, v in row.items() if k not in different} for row in ours] == [
        {k: v for k, v in row.items() if k not in different} for row in theirs
    ]
    for row in ours:
        for name in row["crops"]:
            assert (tmp_path / "there" / name).read_bytes() == (tmp_path / "here" / name).read_bytes()
    bucket.asked.clear()
    assert crop("s3://photos/day", tmp_path / "there", model).nothing_to_do
    assert not [line for line in bucket.asked if line.endswith(".jpg")]  # listed, and nothing read
    file = io.BytesIO()
    photo(9).save(file, "JPEG")
    bucket.put("day/002.jpg", file.getvalue())
    bucket.put("day/009.jpg", file.getvalue())
    again = crop("s3://photos/day", tmp_path / "there", model)
    assert (again.photos, again.computed) == (5, 2)


def test_patterns_names_and_python(bucket: Bucket, tmp_path: Path, model: Path) -> None:
    def names(*paths: str) -> list[str]:
        return [each.path.removeprefix("s3://photos/day/") for each in find_photos(paths).photos]

    assert names("s3://photos/day/00[12].jpg") == ["001.jpg", "002.jpg"]
    assert names("s3://photos/**/*.jpg") == names("s3://photos") == names("s3://photos/")
    assert names("s3://photos/day/003.jpg", "s3://photos/day") == ["003.jpg", "000.jpg", "001.jpg", "002.jpg"]
    assert len(find_photos([Path("s3://photos/day")]).photos) == 4
    assert decode("s3://photos/day/001.jpg").source_size == (120, 160)
    with pytest.raises(ImageError, match="missing"):
        decode("s3://photos/day/none.jpg")
    embed_photos(["s3://photos/day"], tmp_path / "f.npz", model=model, how=None, reporter=SILENT)
    assert len(read_features(tmp_path / "f.npz").paths) == 4
    bucket.put("lists/all.txt", b"# two of them\ns3://photos/day/001.jpg\n\ns3://photos/day/003.jpg\n")
    assert names("s3://photos/lists/all.txt") == ["001.jpg", "003.jpg"]
    run = patchlight("classify", "s3://photos/day/00[01].jpg", "--model", str(model), cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert [line.partition(": ")[0] for line in run.stdout.splitlines()] == [
        "s3://photos/day/000.jpg",
        "s3://photos/day/001.jpg",
    ]


def test_parts_of_a_bucket(bucket: Bucket, tmp_path: Path, model: Path) -> None:
    whole = crop("s3://photos", tmp_path / "one", model, formats=["coco"])
    parts = [tmp_path / "1", tmp_path / "2"]
    for number, part in enumerate(parts, 1):
        crop("s3://photos", part, model, part=f"{number}/2", formats=["coco"])
    assert merge(parts, tmp_path / "all", reporter=SILENT).photos == whole.photos == 4
    for name in ("results.jsonl", "coco.json", "report.html"):
        assert (tmp_path / "all" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
    assert json.loads((tmp_path / "one" / "coco.json").read_text())["images"][0]["file_name"] == "day/000.jpg"


def test_throttled_it_tries_again_and_loses_nothing(bucket: Bucket, tmp_path: Path, model: Path) -> None:
    bucket.throttled |= {"000.jpg": 2, "002.jpg": 3, "/photos": 2}
    bucket.slow |= {"001.jpg": 0.3}
    summary = crop("s3://photos/day", tmp_path / "out", model)
    assert (summary.photos, summary.failed) == (4, 0)
    assert set(bucket.throttled.values()) == {0}


def test_what_stays_unreachable_is_a_row_and_is_tried_by_the_next_run(
    bucket: Bucket, tmp_path: Path, model: Path
) -> None:
    bucket.throttled |= {"001.jpg": 1000}
    for out, run in (("out", crop), ("f.npz", None)):
        if run is None:
            how = CropRunSettings(device="cpu", workers=0)
            summary: Any = embed_photos("s3://photos/day", tmp_path / out, None, how, model=model, reporter=SILENT)
        else:
            summary = run("s3://photos/day", tmp_path / out, model)
        assert (summary.photos, summary.failed, summary.exit_code) == (4, 1, 3)
        assert summary.reasons == {"unreadable": 1}
    (bad,) = [row for row in rows_of(tmp_path / "out") if row["status"] == "error"]
    assert bad["path"] == "s3://photos/day/001.jpg"
    assert "after 5 tries" in bad["detail"]
    bucket.throttled.clear()
    again = crop("s3://photos/day", tmp_path / "out", model)
    assert (again.computed, again.failed) == (1, 0)


def test_a_server_that_never_answers_costs_its_photo_alone(
    bucket: Bucket, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "READ_SECONDS", 2)
    monkeypatch.setattr(remote, "TRIES", 1)
    fresh()
    bucket.slow |= {"003.jpg": 5}
    summary = crop("s3://photos/day", tmp_path / "out", model)
    assert (summary.photos, summary.reasons) == (4, {"unreadable": 1})


def test_a_photo_that_goes_meanwhile(
    bucket: Bucket, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("day/001.jpg", b"no photo")
    real = runner.loaded_on

    def loaded_once_listed(*given: Any) -> Any:
        bucket.client().delete_object(Bucket="photos", Key="day/003.jpg")
        return real(*given)

    monkeypatch.setattr(runner, "loaded_on", loaded_once_listed)
    summary = crop("s3://photos/day", tmp_path / "out", model)
    reasons = {row["path"][-7:]: row["reason"] for row in rows_of(tmp_path / "out")}
    assert reasons == {"000.jpg": None, "001.jpg": "not-an-image", "002.jpg": None, "003.jpg": "gone"}
    assert summary.exit_code == 3


def test_mistakes_are_one_line_and_leave_nothing(
    bucket: Bucket, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def complaint(*paths: str) -> str:
        for words in (("crop", *paths, "--out", "out"), ("embed", *paths, "--out", "f.npz")):
            run = patchlight(*words, "--model", str(model), cwd=tmp_path)
            assert run.returncode == 2, run.stderr
            assert run.stderr.count("\n") == 1, run.stderr
            assert list(tmp_path.iterdir()) == []
        return run.stderr.removeprefix("patchlight: ")

    assert complaint("ftp://host/a").startswith("ftp:// is not supported; use s3, gs")
    assert complaint("s3://none").startswith("s3://none: there is no such bucket, folder or file")
    assert complaint("s3://photos/none").startswith("s3://photos/none: there is no such bucket, folder or file")
    assert "holds no photos" in complaint("s3://photos/day/*.gz")
    monkeypatch.setitem(remote._LIBRARIES, "gs", "nothing_of_the_kind")
    assert complaint("gs://b").strip() == ("gs:// needs nothing_of_the_kind; pip install 'patchlight[remote]'")
    monkeypatch.setattr(remote, "TRIES", 2)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    fresh()
    assert "s3://photos: cannot be reached" in complaint("s3://photos")
    for words in (("crop", "a.jpg", "--out", "s3://b/x"), ("embed", "a.jpg", "--out", "s3://b/x.npz")):
        run = patchlight(*words, cwd=tmp_path)
        assert run.returncode == 2
        assert "has to be on a disk of this machine" in run.stderr
        assert list(tmp_path.iterdir()) == []


def test_wrong_and_missing_credentials(
    bucket: Bucket, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import http.client

    def reset(count: bytes) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", bucket.port, timeout=10)
        connection.request("POST", "/moto-api/reset-auth", count)
        assert connection.getresponse().status == 200
        connection.close()

    reset(b"0")  # from now on keys are looked at, and there is nobody with this one
    try:
        run = patchlight("crop", "s3://photos", "--out", "out", "--model", str(model), cwd=tmp_path)
        assert run.returncode == 2
        assert "s3://photos: may not be read" in run.stderr
        assert "check AWS_ACCESS_KEY_ID" in run.stderr
        assert run.stderr.count("\n") == 1
    finally:
        reset(b"inf")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    fresh()
    run = patchlight("crop", "s3://photos", "--out", "out", "--model", str(model), cwd=tmp_path)
    assert "check AWS_ACCESS_KEY_ID" in run.stderr
    assert list(tmp_path.iterdir()) == []


def test_names_that_lead_elsewhere_stay_in_the_folder(bucket: Bucket, tmp_path: Path, model: Path) -> None:
    bucket.put("day/x/../../../../up.jpg", jpeg(1))
    bucket.put("day//double.jpg", jpeg(2))
    bucket.put(f"day/{'long' * 80}/a.jpg", jpeg(3))
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in ("../../evil.jpg", "/etc/evil.jpg", "./plain.jpg"):
            about = tarfile.TarInfo(name)
            about.size = len(jpeg(4))
            archive.addfile(about, io.BytesIO(jpeg(4)))
    summary = crop(["s3://photos/day", tmp_path / "a.tar"], tmp_path / "out" / "deep", model)
    assert (summary.photos, summary.failed) == (10, 0)
    made = [path for path in tmp_path.rglob("*.jpg") if path.is_file() and "thumbs" not in path.parts]
    assert len(made) == summary.crops > 0
    crops = tmp_path / "out" / "deep" / "crops"
    assert all(path.resolve().is_relative_to(crops) for path in made)


# The web


def test_addresses_and_lists_on_the_web(bucket: Bucket, tmp_path: Path, model: Path) -> None:
    pytest.importorskip("aiohttp")
    bucket.put("day/list.txt", b"000.jpg\n003.jpg\n# no more\n")
    client = bucket.client()
    client.put_bucket_acl(Bucket="photos", ACL="public-read")
    for key in ("day/list.txt", "day/000.jpg", "day/003.jpg"):
        client.put_object_acl(Bucket="photos", Key=key, ACL="public-read")
    url = f"{bucket.url}/photos/day"
    summary = crop(f"{url}/list.txt", tmp_path / "out", model)
    assert (summary.photos, summary.failed) == (2, 0)
    assert [row["path"] for row in rows_of(tmp_path / "out")] == [f"{url}/000.jpg", f"{url}/003.jpg"]
    assert crop(f"{url}/list.txt", tmp_path / "out", model).nothing_to_do
    with pytest.raises(PatchlightError, match="there is no such page or file"):
        find_photos([f"{url}/none.jpg"])


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (403, r"may not be read \(403 Forbidden\); check the address"),
        (404, "there is no such page or file; correct it"),
        (410, "there is no such page or file; correct it"),
        (500, r"cannot be reached \(500 Internal Server Error, after 2 tries\)"),
    ],
)
def test_what_a_web_server_answers_is_said(status: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(remote, "TRIES", 2)
    monkeypatch.setattr(remote, "WAIT", 0.01)

    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(status)

        do_HEAD = do_GET

        def log_message(self, *said: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            with pytest.raises(PatchlightError, match=f"/a.jpg: {said}"):
                find_photos([f"http://127.0.0.1:{server.server_port}/a.jpg"])
        finally:
            server.shutdown()


# Shards and tables


def shard(path: Path, count: int = 3, first: int = 0) -> Path:
    with tarfile.open(path, "w") as archive:
        for number in range(first, first + count):
            for name, content in ((f"{number:03}.jpg", jpeg(number)), (f"{number:03}.json", b"{}")):
                about = tarfile.TarInfo(name)
                about.size = len(content)
                archive.addfile(about, io.BytesIO(content))
    return path


def jpeg(number: int) -> bytes:
    file = io.BytesIO()
    photo(number).save(file, "JPEG", quality=90)
    return file.getvalue()


def test_tar_shards_here_and_in_a_bucket(bucket: Bucket, tmp_path: Path, model: Path) -> None:
    (tmp_path / "shards").mkdir()
    shard(tmp_path / "shards" / "a.tar")
    shard(tmp_path / "shards" / "b.tar", 2, first=3)
    make_photos(tmp_path / "plain", 5)
    crop(tmp_path / "plain", tmp_path / "one", model)
    crop(tmp_path / "shards", tmp_path / "two", model, workers=1)
    ours, theirs = rows_of(tmp_path / "one"), rows_of(tmp_path / "two")
    assert [row["boxes"] for row in ours] == [row["boxes"] for row in theirs]
    assert theirs[3]["path"] == f"{tmp_path}/shards/b.tar::003.jpg"
    assert crop(tmp_path / "shards", tmp_path / "two", model).nothing_to_do
    for name in ("a.tar", "b.tar"):
        bucket.put(f"shards/{name}", (tmp_path / "shards" / name).read_bytes())
    crop("s3://photos/shards", tmp_path / "three", model)
    assert [row["boxes"] for row in rows_of(tmp_path / "three")] == [row["boxes"] for row in ours]
    bucket.throttled |= {"a.tar": 3}
    crop("s3://photos/shards", tmp_path / "four", model)
    assert [row["boxes"] for row in rows_of(tmp_path / "four")] == [row["boxes"] for row in ours]
    assert bucket.throttled == {"a.tar": 0}
    bucket.throttled |= {"b.tar": 1000}
    with pytest.raises(PatchlightError, match=r"s3://photos/shards/b\.tar: cannot be reached"):
        find_photos(["s3://photos/shards/b.tar"])
    (tmp_path / "bad.tar").write_bytes(b"no shard" * 100)
    with pytest.raises(PatchlightError, match=r"bad.tar: is not an uncompressed tar file"):
        find_photos([str(tmp_path / "bad.tar")])


def test_what_is_no_file_is_not_linked_to(tmp_path: Path, model: Path) -> None:
    shard(tmp_path / "000.tar")
    (own,) = make_photos(tmp_path / "own", 1)
    settings = CropSettings(boxes_only=True, sort="decision")
    how: dict[str, Any] = {"device": "cpu", "workers": 0}
    assert run_crop([tmp_path / "000.tar", own], tmp_path / "out", settings, model=model, **how).photos == 4
    (link,) = (path for path in (tmp_path / "out" / "sorted").rglob("*") if path.is_symlink())
    assert link.samefile(own)
    assert run_crop([tmp_path / "000.tar", own], tmp_path / "out", settings, model=model, **how).nothing_to_do


def test_tables_with_a_column_of_images(bucket: Bucket, tmp_path: Path, model: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    images = [jpeg(number) for number in range(5)]
    structs = [{"bytes": image, "path": None} for image in images]
    parquet.write_table(pa.table({"label": [0] * 5, "image": structs}), tmp_path / "hf.parquet", row_group_size=2)
    with pa.ipc.new_stream(tmp_path / "saved.arrow", pa.schema([("jpg", pa.binary())])) as writer:
        writer.write_table(pa.table({"jpg": [*images[:4], None]}))
    make_photos(tmp_path / "plain", 5)
    how = CropRunSettings(device="cpu", workers=0)

    def embedded(source: Any, name: str) -> Any:
        embed_photos(source, tmp_path / name, None, how, model=model, reporter=SILENT)
        return read_features(tmp_path / name)

    plain = embedded(tmp_path / "plain", "plain.npz")
    table = embedded(tmp_path / "hf.parquet", "table.npz")
    assert np.array_equal(table.features_ND, plain.features_ND)
    assert table.paths[3] == f"{tmp_path}/hf.parquet::3"
    saved = embedded(tmp_path / "saved.arrow", "saved.npz")
    assert np.array_equal(saved.features_ND, plain.features_ND[:4])
    assert saved.failed == 1
    bucket.put("tables/hf.parquet", (tmp_path / "hf.parquet").read_bytes())
    bucket.throttled |= {"hf.parquet": 3}
    assert np.array_equal(embedded("s3://photos/tables", "there.npz").features_ND, plain.features_ND)
    assert bucket.throttled == {"hf.parquet": 0}
    parquet.write_table(pa.table({"label": [0, 1], "name": ["a", "b"]}), tmp_path / "none.parquet")
    run = patchlight("crop", "none.parquet", "--out", "out", "--model", str(model), cwd=tmp_path)
    assert run.returncode == 2
    assert run.stderr == (
        "patchlight: none.parquet: has no column of images (bytes, or a struct with bytes); "
        "its columns are label, name\n"
    )
    assert not (tmp_path / "out").exists()


def test_a_table_names_what_lies_below_its_folder_alone(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (private,) = make_photos(tmp_path / "private", 1)
    (own,) = make_photos(tmp_path / "set" / "images", 1)
    bucket.put("other.jpg", jpeg(0))
    bucket.put("set/images/000.jpg", jpeg(0))
    below = ["images/000.jpg", "./images/000.jpg"]
    beside = [
        str(private),
        "../private/000.jpg",
        "images/../../private/000.jpg",
        "s3://photos/other.jpg",
        "../other.jpg",
    ]
    structs = [{"bytes": None, "path": path} for path in (*below, *beside, str(own), "t.parquet::8")]
    parquet.write_table(pa.table({"image": structs}), tmp_path / "set" / "t.parquet")
    bucket.put("set/t.parquet", (tmp_path / "set" / "t.parquet").read_bytes())
    monkeypatch.chdir(tmp_path / "set")
    for table in (f"{tmp_path}/set/t.parquet", "t.parquet", "s3://photos/set/t.parquet"):
        for row in range(2):
            assert decode(f"{table}::{row}").source_size
        for row in range(2, 7):
            with pytest.raises(ImageError, match="which is not below the folder of the table") as refused:
                decode(f"{table}::{row}")
            assert refused.value.reason == "unreadable"
    assert decode("t.parquet::7").source_size  # absolute, and below
    with pytest.raises(ImageError, match="which is not below the folder of the table"):
        decode("s3://photos/set/t.parquet::7")
    with pytest.raises(ImageError, match="its row names a row of a table"):
        decode("t.parquet::8")


def test_a_dataset_of_hugging_face(tmp_path: Path, model: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    make_photos(tmp_path / "plain", 3)
    files = [str(path) for path in sorted((tmp_path / "plain").iterdir())]
    made = datasets.Dataset.from_dict({"image": files}).cast_column("image", datasets.Image())
    made.save_to_disk(str(tmp_path / "saved"))
    made.to_parquet(str(tmp_path / "made.parquet"))
    how = CropRunSettings(device="cpu", workers=0)
    for source, name in (
        (tmp_path / "saved", "a.npz"),
        (tmp_path / "made.parquet", "b.npz"),
        (tmp_path / "plain", "c.npz"),
    ):
        embed_photos(source, tmp_path / name, None, how, model=model, reporter=SILENT)
    one, two, three = (read_features(tmp_path / f"{name}.npz").features_ND for name in "abc")
    assert np.array_equal(one, three)
    assert np.array_equal(two, three)
    assert os.path.exists(tmp_path / "saved" / "dataset_info.json")


def test_a_server_that_is_not_there_is_not_a_file_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "WAIT", 0.001)
    with pytest.raises(PatchlightError, match=r"https://localhost:1/x\.jpg: cannot be reached .* check the address"):
        remote.listed("https://localhost:1/x.jpg")


def test_credentials_that_expire_lose_no_photo() -> None:
    """They were good before, so that nothing is known of the photo; a run that leaves it out would learn from fewer."""
    for error in (PermissionError("The provided token has expired."), OSError("ExpiredToken: renew it")):

        def call(error: Exception = error) -> None:
            raise error

        with pytest.raises(remote.Unreachable, match="renew the credentials") as caught:
            remote.tried(call)
        assert caught.value.momentary


def test_threads_read_rows_of_one_table(tmp_path: Path) -> None:
    """In groups of rows that drive each other out of what is kept."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [np.random.default_rng(n).integers(0, 256, 40_000, np.uint8).tobytes() for n in range(48)]
    parquet.write_table(pa.table({"image": rows}), tmp_path / "a.parquet", row_group_size=4)
    kept, containers._GROUP_BYTES = containers._GROUP_BYTES, 300_000
    try:
        with ThreadPoolExecutor(6) as threads:
            order = [number * 7 % 48 for number in range(480)]
            found = list(threads.map(lambda n: containers.read_elsewhere(f"{tmp_path}/a.parquet::{n}"), order))
    finally:
        containers._GROUP_BYTES = kept
    assert [rows[number] == content for number, content in zip(order, found, strict=True)] == [True] * 480
