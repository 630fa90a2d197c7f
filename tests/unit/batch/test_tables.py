"""Tables of features and classes: what `predict` says, a row a photo, and the same bytes after any stop."""

import csv
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import patchlight as pl
from command_line import patchlight
from crop_runs import make_photos, photo, save_model
from patchlight.batch import table_run
from patchlight.batch.readers import ClassifySettings, EmbedSettings
from patchlight.batch.settings import CropRunSettings
from patchlight.batch.table_run import TableSummary, classify_photos, embed_photos
from patchlight.batch.tables import read_features
from patchlight.errors import PatchlightError
from patchlight.reporting import SILENT
from patchlight.signals import Stopped
from patchlight.weights.load import load
from warm_python import WarmPython

parquet = pytest.importorskip("pyarrow.parquet", reason="the extra `tables` is not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    groups = ("animal", "animal", "thing", "vehicle", "thing")
    return save_model(tmp_path_factory.mktemp("model") / "tiny", groups=groups)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    make_photos(tmp_path / "photos", 6)
    (tmp_path / "photos" / "002b.jpg").write_bytes(b"no photo")
    return tmp_path / "photos"


def embed(photos: Any, out: Path, model: Any, *, workers: int = 0, how: Any = None, **settings: Any) -> TableSummary:
    run = CropRunSettings(device="cpu", workers=workers, **(how or {}))
    return embed_photos(photos, out, EmbedSettings(**settings), run, model=model, reporter=SILENT)


def good(photos: Path) -> list[Path]:
    return [path for path in sorted(photos.iterdir()) if path.name != "002b.jpg"]


def test_a_parquet_table_holds_what_predict_gives(photos: Path, tmp_path: Path, model: Path) -> None:
    summary = embed(photos, tmp_path / "f.parquet", model, workers=1)
    assert (summary.photos, summary.computed, summary.failed, summary.exit_code) == (7, 7, 1, 3)
    assert summary.reasons == {"not-an-image": 1}
    table = parquet.read_table(tmp_path / "f.parquet")
    assert table.column_names == ["path", "status", "reason", "detail", "width", "height", "features"]
    rows = table.to_pylist()
    assert [row["path"] for row in rows] == [str(path) for path in sorted(photos.iterdir())]
    bad = rows.pop(3)
    assert bad["status"] == "error"
    assert bad["detail"] == "this is a text file"
    assert bad["features"] is bad["width"] is None
    assert {(row["status"], row["width"], row["height"]) for row in rows} == {("ok", 160, 120)}
    loaded = load(model)
    wanted = loaded.predict(good(photos), "features").numpy()
    assert np.array_equal(np.array([row["features"] for row in rows], np.float32), wanted)
    assert np.array_equal(pl.embed(good(photos), loaded), wanted)
    assert np.array_equal(pl.embed(good(photos)[0], loaded), wanted[0])
    read = read_features(tmp_path / "f.parquet")
    assert np.array_equal(read.features_ND, wanted)
    assert read.failed == 1
    assert read.about["sha256"] == loaded.provenance.sha256


def test_float16_class_token_and_dense(photos: Path, tmp_path: Path, model: Path) -> None:
    loaded = load(model)
    images = torch.stack([loaded.preprocess(path)[0] for path in good(photos)])
    assert isinstance(loaded.model, pl.ViT)
    with torch.inference_mode():
        tokens = torch.cat([loaded.model.tokens(image[None]) for image in images])
    embed(photos, tmp_path / "cls.parquet", model, features="cls", dtype="float16")
    half = read_features(tmp_path / "cls.parquet").features_ND
    assert half.dtype == np.float16
    assert np.array_equal(half, tokens[:, 0].numpy().astype(np.float16))
    assert np.array_equal(pl.embed(good(photos), loaded, features="cls", dtype="float16"), half)
    embed(photos, tmp_path / "dense.npz", model, features="dense")
    with np.load(tmp_path / "dense.npz") as arrays:
        assert arrays["features"].shape == (7, 4, 4, 24)
        assert np.isnan(arrays["features"][3]).all()
        assert arrays["status"].tolist() == ["ok"] * 3 + ["error"] + ["ok"] * 3
        ours = np.delete(arrays["features"], 3, 0)
    assert np.array_equal(ours, tokens[:, 1:].unflatten(1, (4, 4)).numpy())
    assert np.array_equal(pl.embed(good(photos), loaded, features="dense"), ours)
    with pytest.raises(PatchlightError, match="holds dense features"):
        read_features(tmp_path / "dense.npz")


@pytest.mark.parametrize("kind", ["npz", "zarr", "lance"])
def test_other_kinds_say_the_same(kind: str, photos: Path, tmp_path: Path, model: Path) -> None:
    if kind != "npz":
        pytest.importorskip(kind, reason=f"{kind} is not installed")
    embed(photos, tmp_path / "f.parquet", model)
    embed(photos, tmp_path / f"f.{kind}", model)
    one, other = (read_features(tmp_path / f"f.{each}") for each in ("parquet", kind))
    assert one.paths == other.paths
    assert np.array_equal(one.features_ND, other.features_ND)
    assert one.failed == other.failed == 1
    make_photos(photos, 1, first=7)
    assert embed(photos, tmp_path / f"f.{kind}", model).computed == 1  # written over what was there
    assert len(read_features(tmp_path / f"f.{kind}").paths) == 7
    left = [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert left == []


def test_again_does_what_is_new_or_changed_or_lost(photos: Path, tmp_path: Path, model: Path) -> None:
    out = tmp_path / "f.parquet"
    embed(photos, out, model)
    before = out.read_bytes()
    again = embed(photos, out, model)
    assert again.nothing_to_do
    assert again.computed == 0
    out.unlink()
    lost = embed(photos, out, model)
    assert (lost.computed, lost.nothing_to_do) == (0, False)
    assert out.read_bytes() == before
    photo(99).save(photos / "001.jpg")
    make_photos(photos, 1, first=8)
    assert embed(photos, out, model).computed == 2
    embed(photos, tmp_path / "anew.parquet", model)
    assert out.read_bytes() == (tmp_path / "anew.parquet").read_bytes()


def test_stopped_and_cut_off_it_ends_with_the_same_bytes(
    photos: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed(photos, tmp_path / "whole.parquet", model)
    real = table_run.TablePipeline._leave

    def stopping(self: table_run.TablePipeline) -> Any:
        gone = real(self)
        if self.written:
            self.run.asked.signal = signal.SIGTERM
        return gone

    out = tmp_path / "f.parquet"
    monkeypatch.setattr(table_run.TablePipeline, "_leave", stopping)
    with pytest.raises(Stopped, match="run the same command again to continue"):
        embed(photos, out, model)
    monkeypatch.undo()
    assert not out.exists()
    # As a kill leaves it: half an array, half a row.
    with (tmp_path / "f.parquet.run" / "values.bin").open("ab") as file:
        file.write(b"\0" * 7)
    with (tmp_path / "f.parquet.run" / "journal.jsonl").open("ab") as file:
        file.write(b'{"file": "')
    assert 0 < embed(photos, out, model).computed < 7
    assert out.read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    # A loss of power may keep rows and lose their arrays.
    out.unlink()
    os.truncate(tmp_path / "f.parquet.run" / "values.bin", 3 * 24 * 4)
    assert embed(photos, out, model).computed == 3
    assert out.read_bytes() == (tmp_path / "whole.parquet").read_bytes()


def test_kill_9_and_again_gives_the_same_bytes(tmp_path: Path, model: Path) -> None:
    make_photos(tmp_path / "photos", 40)
    embed(tmp_path / "photos", tmp_path / "whole.parquet", model)
    out, journal = tmp_path / "f.parquet", tmp_path / "f.parquet.run" / "journal.jsonl"
    words = ["embed", "photos", "--out", "f.parquet", "--model", str(model), "--workers", "1", "--device", "cpu"]
    code = (
        "import time; from patchlight.batch import table_run as t; real = t.TablePipeline._leave\n"
        "def slow(self):\n    time.sleep(0.02)\n    return real(self)\n"
        "t.TablePipeline._leave = slow; from patchlight.cli import main; main()"
    )
    run = WarmPython(["-c", code, *words], cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not (journal.exists() and journal.stat().st_size > 1000) and time.monotonic() < deadline:
        assert run.poll() is None
        time.sleep(0.01)
    run.kill()
    run.communicate()
    assert not out.exists()
    done = len(journal.read_bytes().splitlines())
    assert 0 < done < 40
    again = patchlight(*words, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    rows = parquet.read_table(out)
    assert rows.column("features").equals(parquet.read_table(tmp_path / "whole.parquet").column("features"))
    embed(tmp_path / "photos", tmp_path / "g.parquet", model)
    assert (tmp_path / "g.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()


def test_every_family(tmp_path: Path, photos: Path) -> None:
    from patchlight.weights.save import save

    torch.manual_seed(0)
    swin = pl.Swin(pl.SwinConfig(image_size=64, width=24, depths=(1, 1), num_heads=(1, 2), window_size=4)).eval()
    convnext = pl.ConvNeXt(pl.ConvNeXtConfig(image_size=64, widths=(16, 24), depths=(1, 1))).eval()
    for name, made, grid in (("swin", swin, (8, 8, 48)), ("convnext", convnext, (8, 8, 24))):
        source = save(made, tmp_path / name)
        embed(photos, tmp_path / f"{name}.npz", source)
        wanted = load(source).predict(good(photos), "features").numpy()
        assert np.array_equal(read_features(tmp_path / f"{name}.npz").features_ND, wanted)
        assert pl.embed(good(photos)[0], load(source), features="dense").shape == grid
        with pytest.raises(PatchlightError, match="needs a class token"):
            embed(photos, tmp_path / "cls.npz", source, features="cls")
        assert not (tmp_path / "cls.npz.run").exists()


def test_mistakes_are_one_line_and_leave_nothing(photos: Path, tmp_path: Path, model: Path) -> None:
    def complaint(*words: str, code: int = 2) -> str:
        run = patchlight("embed", "photos", "--model", str(model), "--device", "cpu", *words, cwd=tmp_path)
        assert run.returncode == code, run.stderr
        assert run.stderr.count("\n") == 1, run.stderr
        return run.stderr

    assert "a table ends in .parquet, .npz, .zarr or .lance" in complaint("--out", "f.csv")
    with pytest.raises(PatchlightError, match="features='all'"):
        EmbedSettings(features="all")  # type: ignore[arg-type]
    with pytest.raises(PatchlightError, match="part 'x' is not valid"):
        CropRunSettings(part="x")
    assert "part 4/3 does not exist" in complaint("--out", "f.npz", "--part", "4/3")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos"]
    embed(photos, tmp_path / "f.npz", model)
    assert 'was started with features="pooled", not "cls"' in complaint("--out", "f.npz", "--features", "cls")
    shutil.rmtree(tmp_path / "f.npz.run")
    assert "is there already" in complaint("--out", "f.npz")
    assert not (tmp_path / "f.npz.run").exists()
    (tmp_path / "g.npz").write_bytes(b"PK\3\4")
    with pytest.raises(PatchlightError, match="no table of features that can be read"):
        read_features(tmp_path / "g.npz")


def test_overwrite_begins_anew(photos: Path, tmp_path: Path, model: Path) -> None:
    embed(photos, tmp_path / "f.npz", model)
    embed(photos, tmp_path / "wanted.npz", model, features="cls", dtype="float16")
    done = embed(photos, tmp_path / "f.npz", model, features="cls", dtype="float16", how={"overwrite": True})
    assert done.computed == 7
    assert (tmp_path / "f.npz").read_bytes() == (tmp_path / "wanted.npz").read_bytes()
    shutil.rmtree(tmp_path / "f.npz.run")
    assert embed(photos, tmp_path / "f.npz", model, how={"overwrite": True}).computed == 7


def test_a_table_of_other_photos_is_not_replaced_in_silence(tmp_path: Path, model: Path) -> None:
    a, b = make_photos(tmp_path / "a", 2), make_photos(tmp_path / "b", 1, first=2)

    def run(*words: str) -> Any:
        return patchlight("embed", *words, "--out", "f.npz", "--model", str(model), "--workers", "0", cwd=tmp_path)

    assert run("a").returncode == 0
    before = (tmp_path / "f.npz").read_bytes()
    refused = run("b")
    assert refused.returncode == 2
    assert refused.stderr == (
        f"patchlight: f.npz: holds other photos (2, such as {a[0]}) and none of these; name another table, or use "
        "--overwrite to write it anew\n"
    )
    assert (tmp_path / "f.npz").read_bytes() == before
    assert "1 photo of earlier runs is not among these: no longer in the table" in run(str(a[0]), "b").stdout
    assert "no longer in the table" not in run(str(a[0]), "b").stdout  # nothing was done
    assert read_features(tmp_path / "f.npz").paths == [str(a[0]), "b/002.jpg"]
    assert run("b", "--overwrite").returncode == 0
    assert read_features(tmp_path / "f.npz").paths == ["b/002.jpg"]
    assert b[0].exists()


def test_without_pyarrow_it_says_so(photos: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(PatchlightError, match=r"pip install 'patchlight\[tables\]'"):
        embed(photos, tmp_path / "f.parquet", model)
    assert embed(photos, tmp_path / "f.npz", model).photos == 7


def test_any_name_can_stand_in_a_table(tmp_path: Path, model: Path) -> None:
    make_photos(tmp_path / "photos", 1)
    odd = os.fsdecode(bytes(tmp_path / "photos") + b"/\xff\n.jpg")
    (tmp_path / "photos" / "000.jpg").rename(odd)
    for kind in ("parquet", "npz"):
        embed(tmp_path / "photos", tmp_path / f"f.{kind}", model)
        (name,) = read_features(tmp_path / f"f.{kind}").paths
        assert name.endswith("/\\udcff\n.jpg")


# Classes


def test_classes_of_folders(photos: Path, tmp_path: Path, model: Path) -> None:
    how = CropRunSettings(device="cpu", workers=0)
    summary = classify_photos(
        photos, tmp_path / "c.parquet", ClassifySettings(top=2), how, model=model, reporter=SILENT
    )
    assert (summary.photos, summary.failed) == (7, 1)
    rows = parquet.read_table(tmp_path / "c.parquet").to_pylist()
    assert rows.pop(3)["reason"] == "not-an-image"
    for row, said in zip(rows, pl.classify(good(photos), load(model), top=2), strict=True):
        assert (row["labels"], row["names"]) == (list(said.labels), list(said.names))
        assert row["probabilities"] == pytest.approx(said.probabilities, abs=1e-6)
        assert (row["name"], row["group"]) == (said.names[0], said.named.group if said.named else None)
    for kind in ("csv", "jsonl"):
        run = patchlight("classify", "photos", "--out", f"c.{kind}", "--model", str(model), "--top", "2", cwd=tmp_path)
        assert run.returncode == 3, run.stderr
    table = list(csv.DictReader((tmp_path / "c.csv").read_text().splitlines()))
    lines = [json.loads(line) for line in (tmp_path / "c.jsonl").read_text().splitlines()]
    assert [row["status"] for row in table] == [row["status"] for row in lines]
    assert table[0]["labels"].split(";") == lines[0]["labels"] == rows[0]["labels"]


def test_a_folder_is_classified_photo_by_photo_too(photos: Path, tmp_path: Path, model: Path) -> None:
    run = patchlight("classify", "photos", "--model", str(model), "--json", cwd=tmp_path)
    assert run.returncode == 3
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert [row["status"] for row in rows] == ["ok"] * 3 + ["error"] + ["ok"] * 3
    said = pl.classify(good(photos)[0], load(model))
    assert [each["name"] for each in rows[0]["classes"]] == list(said.names)
