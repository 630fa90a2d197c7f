"""The folder runner: rows for whatever comes, and nothing done twice."""

import base64
import io
import json
import os
import re
import shutil
import struct
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from crop_runs import everything_in, make_photos, photo, rows_of, run_crop, save_model
from patchlight.batch import finder, pipeline, results, work
from patchlight.batch import summary as summary_module
from patchlight.batch.runner import crop_photos
from patchlight.batch.settings import CropSettings
from patchlight.batch.summary import CropSummary
from patchlight.errors import PatchlightError
from patchlight.geometry import Box
from patchlight.images.crop import region_around
from patchlight.images.preprocess import Preprocess
from patchlight.localizing.detector import Detector, localize
from patchlight.reporting import SILENT, Progress
from patchlight.weights.load import load

BAD_IMAGES = Path(__file__).parents[4] / "shared" / "data" / "bad-images"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    make_photos(tmp_path / "photos", 6)
    return tmp_path / "photos"


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many photos the model was shown, call by call."""
    calls: list[int] = []
    real = Detector.look

    def counting(self: Detector, images_BCHW: torch.Tensor, views: Any) -> Any:
        calls.append(len(images_BCHW))
        return real(self, images_BCHW, views)

    monkeypatch.setattr(Detector, "look", counting)
    return calls


def crop(
    paths: Any, out: Path, model: Any, settings: CropSettings | None = None, *, workers: int = 0, **more: Any
) -> CropSummary:
    paths = paths if isinstance(paths, list) else [paths]
    return run_crop(paths, out, settings, model=model, device="cpu", workers=workers, **more)


# What comes out


def test_rows_are_what_localize_finds(photos: Path, tmp_path: Path, model: Path) -> None:
    summary = crop(photos, tmp_path / "out", model, CropSettings(subjects=None))
    found = localize(sorted(photos.iterdir()), load(model), subjects="all")
    rows = rows_of(tmp_path / "out")
    assert len(rows) == len(found) == summary.photos == 6
    for row, each, path in zip(rows, found, sorted(photos.iterdir()), strict=True):
        assert row["version"] == 5
        assert (row["path"], row["status"], row["reason"], row["detail"]) == (str(path), "ok", None, None)
        assert row["size"] == [160, 120]
        assert (row["decision"], row["method"]) == (each.decision, each.method)
        assert row["confidence"] == pytest.approx(each.confidence, abs=1e-4)
        assert len(row["boxes"]) == len(each.subjects) > 0
        for box, subject in zip(row["boxes"], each.subjects, strict=True):
            ends = [subject.box.left, subject.box.top, subject.box.right, subject.box.bottom]
            assert box["xyxy"] == pytest.approx(ends, abs=0.051)
            assert box["score"] == pytest.approx(subject.score, abs=1e-4)
            assert box["confidence"] == pytest.approx(subject.confidence, abs=1e-4)
        assert row["boxes"][0]["confidence"] == row["confidence"]
        levels = np.frombuffer(base64.b64decode(row["heat"]["levels"]), np.uint8).reshape(row["heat"]["size"])
        np.testing.assert_allclose(levels / 255, each.heat_hw.numpy(), atol=0.003)


def test_crops_are_cut_from_the_original(photos: Path, tmp_path: Path, model: Path) -> None:
    settings = CropSettings(margin=0.1, aspect="1:1")
    crop(photos, tmp_path / "out", model, settings)
    for row in rows_of(tmp_path / "out"):
        (name,) = row["crops"]
        region = region_around(Box(*row["boxes"][0]["xyxy"]), (120, 160), margin=0.1, aspect=(1, 1))
        with Image.open(tmp_path / "out" / name) as made, Image.open(row["path"]) as source:
            wanted = np.asarray(source.convert("RGB").crop(region), float)
            assert np.abs(np.asarray(made.convert("RGB"), float) - wanted).mean() < 3


def test_the_folder(photos: Path, tmp_path: Path, model: Path) -> None:
    summary = crop(photos, tmp_path / "out", model, formats=("json", "megadetector", "coco", "csv"))
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    files = ["coco.json", "megadetector.json", "report.html", "results.csv", "results.json", "results.jsonl"]
    assert names == [".run", *files[:1], "crops", *files[1:], "summary.json", "thumbs"]
    values = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert values["photos"] == values["status"]["ok"] == summary.computed == 6
    assert sum(values["decisions"].values()) == 6
    assert values["crops"] == summary.crops == len(list((tmp_path / "out" / "crops").iterdir()))
    assert values["settings"]["margin"] == 0.03
    assert values["model"]["sha256"] == load(model).provenance.sha256
    assert summary.seconds > 0
    assert summary.rate > 0
    assert summary.exit_code == 0
    assert len(list((tmp_path / "out" / "thumbs").iterdir())) == 6


def test_boxes_only(photos: Path, tmp_path: Path, model: Path) -> None:
    crop(photos, tmp_path / "out", model, CropSettings(boxes_only=True))
    assert not (tmp_path / "out" / "crops").exists()
    assert all(row["boxes"] and not row["crops"] for row in rows_of(tmp_path / "out"))


def test_where_it_is_unsure_a_crop_can_be_left_out(photos: Path, tmp_path: Path, model: Path, monkeypatch: Any) -> None:
    real = Detector.look
    decisions = iter(["subject", "several", "unsure", "none", "unsure", "subject"])

    def deciding(*given: Any, **named: Any) -> Any:
        return [replace(found, decision=next(decisions)) for found in real(*given, **named)]

    monkeypatch.setattr(Detector, "look", deciding)
    summary = crop(photos, tmp_path / "out", model, CropSettings(crop_unsure=False))
    assert [len(row["crops"]) for row in rows_of(tmp_path / "out")] == [1, 1, 0, 0, 0, 1]
    assert summary.decisions == {"subject": 2, "several": 1, "unsure": 2, "none": 1}


def test_progress(photos: Path, tmp_path: Path, model: Path) -> None:
    seen: list[Progress] = []
    (photos / "bad.jpg").write_bytes(b"")
    crop(photos, tmp_path / "out", model, progress=seen.append)
    assert [each.done for each in seen] == sorted(each.done for each in seen)
    last = seen[-1]
    assert (last.what, last.done, last.total, last.seconds_left) == ("photo", 7, 7, 0)
    assert last.how.endswith(" photos/s, 1 failed")


def test_progress_of_what_is_written_at_the_end(
    photos: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Progress] = []
    crop(photos, tmp_path / "quick", model, progress=seen.append, overlay=True)
    assert {each.what for each in seen} == {"photo"}, "what takes no time goes without saying"
    monkeypatch.setattr(pipeline, "_PROGRESS_SECONDS", 0.0)
    crop(photos, tmp_path / "slow", model, progress=seen.append, overlay=True)
    for what in ("row", "picture"):
        assert [each.done for each in seen if each.what == what][:5] == [1, 2, 3, 4, 5]
        assert all(each.total == 6 and each.how.endswith("/s") for each in seen if each.what == what)


def test_a_second_look_and_tiles_are_those_of_localize(photos: Path, tmp_path: Path, model: Path) -> None:
    settings = CropSettings(second_look=True, tiles=2, subjects=3)
    crop(photos, tmp_path / "out", model, settings)
    found = localize(sorted(photos.iterdir()), load(model), second_look=True, tiles=2, subjects=3, batch_size=1)
    for row, each in zip(rows_of(tmp_path / "out"), found, strict=True):
        box = each.subjects[0].box
        assert row["boxes"][0]["xyxy"] == pytest.approx([box.left, box.top, box.right, box.bottom], abs=0.051)
        sure = [subject.confidence for subject in each.subjects]
        assert [box["confidence"] for box in row["boxes"]] == pytest.approx(sure, abs=1e-4)


def test_lossless_says_once_what_it_lacks(photos: Path, tmp_path: Path, model: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PATH", "")
    lines: list[str] = []
    crop(photos, tmp_path / "out", model, CropSettings(lossless=True), tell=lines.append)
    assert len(lines) == 1
    assert "apt install libjpeg-turbo-progs" in lines[0]
    assert all(row["crops"] for row in rows_of(tmp_path / "out"))


def test_crops_that_a_lossless_run_had_to_encode_are_counted(
    photos: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photo(50).save(photos / "a.png")
    photo(51).save(photos / "b.jp2")
    plain = crop(photos, tmp_path / "plain", model)
    assert (plain.encoded, plain.crops) == (None, 8)
    assert (tmp_path / "plain" / "crops" / "b.jp2.crop1.jpg").is_file()
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "jpegtran"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    out, settings = tmp_path / "out", CropSettings(lossless=True)
    with pytest.raises(Cut):
        crop(photos, out, model, settings, progress=stop_after(3))
    assert crop(photos, out, model, settings).encoded == 6, "neither the PNG nor the JPEG 2000 is a JPEG"
    assert crop(photos, out, model, settings).encoded == 6
    assert json.loads((out / "summary.json").read_text())["encoded"] == 6


@pytest.mark.skipif(shutil.which("jpegtran") is None, reason="jpegtran is not installed")
def test_lossless(photos: Path, tmp_path: Path, model: Path) -> None:
    lines: list[str] = []
    assert crop(photos, tmp_path / "out", model, CropSettings(lossless=True), tell=lines.append).encoded == 0
    assert lines == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"margin": -1.0},
        {"aspect": "wide"},
        {"size": 0},
        {"subjects": 0},
        {"min_area": 2.0},
        {"lossless": True, "size": 100},
        {"tiles": 0},
        {"marign": 0.1},
    ],
)
def test_settings_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(PatchlightError) as caught:
        CropSettings(**wrong)
    assert "\n" not in str(caught.value)


def test_mistakes_leave_no_folder_behind(
    photos: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with pytest.raises(PatchlightError, match="typo"):
        crop(tmp_path / "typo", out, model)
    with pytest.raises(PatchlightError, match=r"typo\.jpg: there is no such file"):
        crop([photos, photos / "typo.jpg"], out, model)
    with pytest.raises(PatchlightError, match="nowhere"):
        crop(photos, out, tmp_path / "nowhere")
    with pytest.raises(PatchlightError, match="method"):
        crop(photos, out, model, CropSettings(method="magic"))
    with pytest.raises(PatchlightError, match="format"):
        crop(photos, out, model, formats=["xml"])
    with pytest.raises(PatchlightError, match="workers"):
        crop(photos, out, model, workers=-1)
    for device in ("meta", "nonsense", "cuda:77"):
        with pytest.raises(PatchlightError, match=f"^device='{device}' does not compute here"):
            run_crop([photos], out, model=model, device=device)
    for given, says in (
        (([photo(1)], out), "photos are paths of files or folders, not Image; `localize` takes images"),
        (([photos], out, {"aspect": "1:1"}), "settings is a pl.CropSettings, not dict"),
        (([photos], out, None, CropSettings()), "how is a pl.CropRunSettings, not CropSettings"),
    ):
        with pytest.raises(PatchlightError, match=f"^{re.escape(says)}$"):
            crop_photos(*given, model=model)  # type: ignore[arg-type]
    assert not out.exists()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PatchlightError, match=r"^out='' is not a folder; name one"):
        run_crop([photos], "", model=model)
    assert not (tmp_path / ".run").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(PatchlightError, match="cannot be written"):
        crop(photos, tmp_path / "file", model)


# Independence of the batch


def test_a_row_does_not_depend_on_its_neighbours(photos: Path, tmp_path: Path, model: Path) -> None:
    crop(photos, tmp_path / "all", model)
    together = rows_of(tmp_path / "all")
    for number, path in enumerate(sorted(photos.iterdir())):
        crop(path, tmp_path / str(number), model)
        assert rows_of(tmp_path / str(number)) == [together[number]]
    crop(photos, tmp_path / "other", model, batch_size=2)
    assert rows_of(tmp_path / "other") == together
    crop(photos, tmp_path / "processes", model, workers=2)
    assert everything_in(tmp_path / "processes") == everything_in(tmp_path / "all")


def with_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr(finder, "images_at_once", lambda device, batch_size: batch_size)


def test_batches_are_full_whatever_is_left(
    photos: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, looked_at: list[int]
) -> None:
    with_batches(monkeypatch)
    crop(photos, tmp_path / "out", model, batch_size=4)
    assert looked_at == [4, 4]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no"), RuntimeError("CUDA out of memory")])
def test_out_of_memory_halves_the_batch(
    photos: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    with_batches(monkeypatch)
    crop(photos, tmp_path / "at 3", model, batch_size=3)
    real, lines = Detector.look, []

    def small(self: Detector, images_BCHW: torch.Tensor, views: Any) -> Any:
        if len(images_BCHW) > 3:
            raise error
        return real(self, images_BCHW, views)

    monkeypatch.setattr(Detector, "look", small)
    crop(photos, tmp_path / "at 12", model, batch_size=12, tell=lines.append)
    assert everything_in(tmp_path / "at 12") == everything_in(tmp_path / "at 3")
    assert len(lines) == 2


def test_a_model_that_is_too_large_is_said(photos: Path, tmp_path: Path, model: Path, monkeypatch: Any) -> None:
    def never(*given: Any, **named: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Detector, "look", never)
    with pytest.raises(PatchlightError, match="not enough memory"):
        crop(photos, tmp_path / "out", model)


def test_a_gpu_that_fails_is_one_line(photos: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")

    def broken(*given: Any, **named: Any) -> Any:
        raise error

    monkeypatch.setattr(Detector, "look", broken)
    loaded = load(model)
    seen = work.read_photo(str(photos / "000.jpg"), loaded.preprocess.config, None)
    assert isinstance(seen, work.Seen)
    one = finder.Finder(Detector.of(loaded), 1, SILENT)
    monkeypatch.setattr(Preprocess, "batch", lambda *given: torch.zeros(1, 3, 32, 32))
    for look in (lambda: one.look_at([seen]), lambda: one.look_closely([str(photos / "000.jpg")])):
        one.device = torch.device("cuda")
        with pytest.raises(PatchlightError, match=r"^cuda failed \(CUDA error: an illegal .* with device='cpu'$"):
            look()
        one.device = torch.device("cpu")
        with pytest.raises(RuntimeError, match="illegal"):
            look()


def test_photos_of_different_sizes(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", resize="shortest", crop="none")
    photos = tmp_path / "photos"
    photos.mkdir()
    for number, size in enumerate([(64, 32), (32, 32), (64, 32), (53, 33), (32, 32)]):
        photo(number, *size).save(photos / f"{number}.png")
    crop(photos, tmp_path / "out", model)
    rows = rows_of(tmp_path / "out")
    assert [row["status"] for row in rows] == ["ok", "ok", "ok", "error", "ok"], "51 is no multiple of a patch"
    assert rows[3]["reason"] == "unsupported"
    assert rows[0]["heat"]["size"] == [4, 8]


# Once more


def test_a_second_run_does_nothing(photos: Path, tmp_path: Path, model: Path, looked_at: list[int]) -> None:
    (photos / "bad.jpg").write_bytes(b"no photo")
    first = crop(photos, tmp_path / "out", model)
    assert looked_at == [1] * 6
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.name != "lock"}
    again = crop(photos, tmp_path / "out", model)
    assert len(looked_at) == 6
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.name != "lock"}
    assert after == before
    assert (again.computed, again.photos, again.failed) == (0, 7, 1)
    assert (again.decisions, again.reasons, again.crops) == (first.decisions, first.reasons, first.crops)
    assert again.exit_code == 3


def test_the_model_is_packed_once_and_only_for_photos_that_have_no_row(
    photos: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    real = Detector.look

    def keeping(self: Detector, *given: Any) -> Any:
        shown.append(self.loaded.model)
        return real(self, *given)

    packed = finder.prepack_linears
    calls: list[Any] = []
    monkeypatch.setattr(Detector, "look", keeping)
    monkeypatch.setattr(finder, "prepack_linears", lambda vit: calls.append(packed(vit)) or calls[-1])
    for _ in range(2):
        crop(photos, tmp_path / "out", model)
        assert len(calls) == 1
    assert len(shown) == 6
    assert all(each is calls[0] for each in shown)


@pytest.mark.parametrize("how", ["lost", "changed"])
def test_what_was_lost_or_changed_at_the_end_is_written_again(
    photos: Path, tmp_path: Path, model: Path, looked_at: list[int], how: str
) -> None:
    out = tmp_path / "out"
    crop(photos, out, model, formats=["coco"])
    whole = everything_in(out)
    (thumb, *_) = (name for name in whole if name.startswith("thumbs"))
    own = ("results.jsonl", "results.csv", "report.html", "summary.json", "coco.json", ".run/finished.json")
    for name in (*own, *([thumb] if how == "lost" else [])):
        if how == "lost":
            (out / name).unlink()
        else:
            (out / name).write_text("x\n")
        assert not crop(photos, out, model, formats=["coco"]).nothing_to_do
        assert everything_in(out) == whole, name
        assert crop(photos, out, model).nothing_to_do
    assert len(looked_at) == 6


def test_a_photo_keeps_its_thumbnail(
    photos: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def counting(file: str, *rest: Any) -> bool:
        made.append(file)
        return work.make_thumbnail(file, *rest)

    monkeypatch.setattr(summary_module, "make_thumbnail", counting)
    out = tmp_path / "out"
    crop(photos, out, model)
    before = {path: path.stat().st_mtime_ns for path in (out / "thumbs").iterdir()}
    photo(20).save(photos / "0.jpg")
    crop(photos, out, model)
    after = {path: path.stat().st_mtime_ns for path in (out / "thumbs").iterdir()}
    assert (len(after), {path: after[path] for path in before}) == (7, before)
    (photos / "0.jpg").unlink()
    crop(photos, out, model)
    assert set((out / "thumbs").iterdir()) == set(before), "those of nobody go"
    assert made == []
    # One that shows what the photo was, as after a run without a report.
    photo(21).save(photos / "000.jpg")
    crop(photos, out, model, report=False)
    crop(photos, out, model)
    assert made == [str(photos / "000.jpg")]


def test_photos_that_were_moved_are_new(photos: Path, tmp_path: Path, model: Path) -> None:
    out, moved = tmp_path / "out", tmp_path / "moved"
    crop(photos, out, model)
    crops = {path: path.read_bytes() for path in (out / "crops").iterdir()}
    photos.rename(moved)
    summary = crop(moved, out, model)
    assert (summary.computed, summary.crops, summary.crops_of_others) == (6, 6, 6)
    assert all(path.read_bytes() == content for path, content in crops.items()), "those of before stay"
    assert crop(moved, out, model, overwrite=True).crops_of_others == 0
    crop(moved, tmp_path / "fresh", model)
    assert everything_in(out) == everything_in(tmp_path / "fresh")


def test_another_photo_of_the_same_name_size_and_time_is_another(
    tmp_path: Path, model: Path, looked_at: list[int]
) -> None:
    """As cameras that number their pictures write them, on a card whose clock stands still."""
    out = tmp_path / "out"
    for seed, folder in enumerate(("cam1", "cam2")):
        (tmp_path / folder).mkdir()
        photo(seed, 640, 480).save(tmp_path / folder / "IMG_0001.bmp")
        # One that differs in its middle alone.
        strip = Image.new("RGB", (640, 480))
        strip.paste((255, 250 - seed, 0), (200, 200, 400, 280))
        strip.save(tmp_path / folder / "IMG_0002.bmp")
        for path in (tmp_path / folder).iterdir():
            os.utime(path, ns=(10**18, 10**18))
    crop(tmp_path / "cam1", out, model)
    shutil.rmtree(tmp_path / "cam1")
    lines: list[str] = []
    summary = crop(tmp_path / "cam2", out, model, tell=lines.append)
    assert (summary.computed, summary.crops_of_others, lines) == (2, 2, [])
    crop(tmp_path / "cam2", tmp_path / "fresh", model)
    for row, fresh in zip(rows_of(out), rows_of(tmp_path / "fresh"), strict=True):
        assert row | {"crops": 0} == fresh | {"crops": 0}
        assert (out / row["crops"][0]).read_bytes() == (tmp_path / "fresh" / fresh["crops"][0]).read_bytes()


def test_new_changed_and_removed_photos(photos: Path, tmp_path: Path, model: Path, looked_at: list[int]) -> None:
    out = tmp_path / "out"
    crop(photos, out, model)
    looked_at.clear()
    photo(100).save(photos / "002.jpg", quality=90)
    photo(101).save(photos / "0025.jpg", quality=90)
    (photos / "004.jpg").unlink()
    os.utime(photos / "001.jpg", ns=(1, 1))
    summary = crop(photos, out, model)
    assert len(looked_at) == summary.computed == 3
    assert summary.crops_of_others == 1
    crop(photos, tmp_path / "fresh", model)
    got, wanted = everything_in(out), everything_in(tmp_path / "fresh")
    # The original may have been moved away because there is a crop of it, so that stays, and is counted.
    assert got.pop("crops/004.jpg")
    counts = [json.loads(each.pop("summary.json"))["crops_of_others"] for each in (got, wanted)]
    assert counts == [1, 0]
    assert got == wanted


def test_crops_of_photos_that_were_removed_are_said_and_left(photos: Path, tmp_path: Path, model: Path) -> None:
    out = tmp_path / "out"
    assert crop(photos, out, model).crops_of_others == 0
    for name in ("001.jpg", "004.jpg"):
        (photos / name).unlink()
    (out / "crops" / "mine.jpg").write_bytes(b"somebody else's")
    assert crop(photos, out, model).crops_of_others == 2
    assert crop(photos, out, model).crops_of_others == 2, "also where there is nothing to do"
    (out / "crops" / "001.jpg").unlink()
    summary = crop(photos, out, model)
    assert (summary.computed, summary.crops_of_others) == (0, 1)
    assert json.loads((out / "summary.json").read_text())["crops_of_others"] == 1
    assert (out / "crops" / "004.jpg").exists()
    # Beginning anew takes away what runs wrote, and nothing else.
    left = sorted(path.name for path in photos.iterdir())
    assert crop(photos, out, model, overwrite=True).crops_of_others == 0
    assert sorted(path.name for path in (out / "crops").iterdir()) == [*left, "mine.jpg"]


def test_a_named_photo_that_has_gone_since_gets_a_row_when_the_run_goes_on(tmp_path: Path, model: Path) -> None:
    paths: list[Any] = make_photos(tmp_path / "photos", 3)
    crop(paths, tmp_path / "out", model)
    paths[1].unlink()
    summary = crop(paths, tmp_path / "out", model)
    assert (summary.photos, summary.reasons, summary.exit_code) == (3, {"missing": 1}, 3)
    assert [row["status"] for row in rows_of(tmp_path / "out")] == ["ok", "error", "ok"]


def test_a_named_photo_that_goes_before_it_has_a_row_gets_one_when_the_run_goes_on(tmp_path: Path, model: Path) -> None:
    out = tmp_path / "out"
    paths: list[Any] = make_photos(tmp_path / "photos", 40)
    with pytest.raises(Cut):
        crop(paths, out, model, progress=stop_after(1))
    assert rows_in_journal(out) < 40
    paths[-1].unlink()
    with pytest.raises(PatchlightError, match=r"typo\.jpg: there is no such file"):
        crop([*paths, tmp_path / "photos" / "typo.jpg"], out, model)
    summary = crop(paths, out, model)
    assert (summary.photos, summary.reasons) == (40, {"missing": 1})
    assert crop(paths[:2], out, model).failed == 0
    assert crop(paths, out, model).reasons == {"missing": 1}, "other inputs meanwhile change nothing"


def test_crops_of_photos_that_cannot_be_reached_wait_for_them(
    photos: Path, tmp_path: Path, model: Path, looked_at: list[int]
) -> None:
    """As those behind links to a disk that is not mounted."""
    out, links, away = tmp_path / "out", tmp_path / "links", tmp_path / "not mounted"
    links.mkdir()
    for path in [*photos.iterdir()]:
        (links / path.name).symlink_to(path)
    crop(links, out, model)
    whole = everything_in(out)
    crops = {name: content for name, content in whole.items() if name.startswith("crops")}
    assert len(crops) == 6
    photos.rename(away)
    for _ in range(2):
        summary = crop(links, out, model)
        assert (summary.failed, summary.crops, summary.crops_of_others) == (6, 0, 6)
        assert [row["crops"] for row in rows_of(out)] == [[]] * 6
        assert {name: content for name, content in everything_in(out).items() if name.startswith("crops")} == crops
    away.rename(photos)
    summary = crop(links, out, model)
    assert (summary.computed, summary.failed, summary.crops_of_others) == (6, 0, 0)
    assert everything_in(out) == whole
    assert crop(links, out, model).nothing_to_do


def test_crops_that_wait_for_a_photo_go_when_it_comes_back_as_another(tmp_path: Path, model: Path) -> None:
    out = tmp_path / "out"
    paths: list[Any] = make_photos(tmp_path / "photos", 4)
    stamps = [path.stat() for path in paths]
    crop(paths, out, model)
    for path in paths:
        path.unlink()
    assert crop(paths, out, model).reasons == {"missing": 4}
    assert len(list((out / "crops").iterdir())) == 4
    photo(50).save(paths[0])
    paths[1].write_bytes(b"no photo any more")
    shutil.copy(make_photos(tmp_path / "same", 4)[2], paths[2])
    os.utime(paths[2], ns=(stamps[2].st_atime_ns, stamps[2].st_mtime_ns))
    (out / "crops" / "002.jpg").unlink()
    crop(paths, out, model)
    assert [row["crops"] for row in rows_of(out)] == [["crops/000.jpg"], [], ["crops/002.jpg"], []]
    assert sorted(path.name for path in (out / "crops").iterdir()) == ["000.jpg", "002.jpg", "003.jpg"]
    paths.pop()
    crop(paths, tmp_path / "fresh", model)
    for name in ("000.jpg", "002.jpg"):
        assert (out / "crops" / name).read_bytes() == (tmp_path / "fresh" / "crops" / name).read_bytes()
    assert crop(paths, out, model, overwrite=True).crops_of_others == 0
    assert sorted(path.name for path in (out / "crops").iterdir()) == ["000.jpg", "002.jpg"]


def test_files_that_are_no_photos_are_counted(photos: Path, tmp_path: Path, model: Path) -> None:
    for name in ("notes.txt", "more.txt", "clip.mov"):
        (photos / name).write_bytes(b"x")
    assert crop(photos, tmp_path / "out", model).skipped == {".txt": 2, ".mov": 1}
    summary = crop(photos, tmp_path / "out", model)
    assert (summary.computed, summary.skipped) == (0, {".txt": 2, ".mov": 1})
    (photos / "another.txt").write_bytes(b"x")
    assert crop(photos, tmp_path / "out", model).computed == 0
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["skipped"] == {".txt": 3, ".mov": 1}


def test_a_changed_photo_takes_its_old_crops_with_it(
    photos: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    crop(photos, out, model)
    (photos / "000.jpg").write_bytes(b"no photo any more")
    summary = crop(photos, out, model)
    assert summary.reasons == {"not-an-image": 1}
    assert not (out / "crops" / "000.jpg").exists()


def test_a_crop_that_was_deleted_is_made_again(photos: Path, tmp_path: Path, model: Path, looked_at: list[int]) -> None:
    crop(photos, tmp_path / "out", model)
    whole = everything_in(tmp_path / "out")
    (tmp_path / "out" / "crops" / "003.jpg").unlink()
    assert crop(photos, tmp_path / "out", model).computed == 1
    assert everything_in(tmp_path / "out") == whole


@pytest.mark.parametrize("length", [0, 300, -1])
def test_crops_and_pictures_that_were_damaged_are_made_again(
    photos: Path, tmp_path: Path, model: Path, length: int
) -> None:
    out = tmp_path / "out"
    crop(photos, out, model, overlay=True)
    whole = everything_in(out)
    thumb = sorted(name for name in whole if name.startswith("thumbs"))[2]
    for name, computed in (("crops/003.jpg", 1), (thumb, 0), ("overlays/004.jpg.jpg", 0)):
        (out / name).write_bytes(whole[name][:length])
        again = crop(photos, out, model, overlay=True)
        assert (again.nothing_to_do, again.computed) == (False, computed), name
        assert everything_in(out) == whole
        assert crop(photos, out, model, overlay=True).nothing_to_do


def test_other_spelling_of_the_same_photos(
    photos: Path, tmp_path: Path, model: Path, looked_at: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    crop(photos, tmp_path / "out", model)
    monkeypatch.chdir(photos)
    crop(".", tmp_path / "out", model)
    assert len(looked_at) == 6
    assert rows_of(tmp_path / "out")[0]["path"] == "./000.jpg"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"margin": 0.1}, "margin=0.03, not 0.1"),
        ({"aspect": "1:1"}, 'aspect="free", not "1:1"'),
        ({"subjects": None}, "subjects=1, not null"),
        ({"boxes_only": True}, "boxes_only=false, not true"),
    ],
)
def test_other_settings_are_refused(photos: Path, tmp_path: Path, model: Path, change: Any, named: str) -> None:
    out = tmp_path / "out"
    crop(photos, out, model)
    whole = everything_in(out)
    with pytest.raises(PatchlightError) as caught:
        crop(photos, out, model, CropSettings(**change))
    assert named in str(caught.value)
    assert "overwrite=True" in str(caught.value)
    assert everything_in(out) == whole
    crop(photos, out, model, CropSettings(**change), overwrite=True)
    crop(photos, tmp_path / "fresh", model, CropSettings(**change))
    assert everything_in(out) == everything_in(tmp_path / "fresh")


def test_a_folder_of_another_version_is_refused_as_that(photos: Path, tmp_path: Path, model: Path) -> None:
    out = tmp_path / "out"
    crop(photos, out, model)
    settings = json.loads((out / ".run" / "run.json").read_text())
    settings["version"] = 3  # when boxes had no confidence
    (out / ".run" / "run.json").write_text(json.dumps(settings))
    with pytest.raises(PatchlightError, match="was started by another version of this program"):
        crop(photos, out, model)


def test_another_model_is_refused(photos: Path, tmp_path: Path, model: Path) -> None:
    crop(photos, tmp_path / "out", model)
    other = save_model(tmp_path / "other", seed=1)
    with pytest.raises(PatchlightError, match=f"out: was started with {model}, not {other}; use overwrite=True"):
        crop(photos, tmp_path / "out", other)
    shutil.copytree(model, tmp_path / "trained further")
    crop(photos, tmp_path / "out2", tmp_path / "trained further")
    shutil.copytree(other, tmp_path / "trained further", dirs_exist_ok=True)
    with pytest.raises(PatchlightError, match=r"was started with .*trained further as it was then; use overwrite=True"):
        crop(photos, tmp_path / "out2", tmp_path / "trained further")
    shutil.copytree(model, tmp_path / "same")
    assert crop(photos, tmp_path / "out", tmp_path / "same").computed == 0
    config = json.loads((tmp_path / "same" / "config.json").read_text())
    config["patchlight"]["subject"]["bias"] = 0.5
    (tmp_path / "same" / "config.json").write_text(json.dumps(config))
    with pytest.raises(PatchlightError, match=r"model\.subject="):
        crop(photos, tmp_path / "out", tmp_path / "same")


def test_somebody_elses_folder_is_refused(photos: Path, tmp_path: Path, model: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.jsonl").write_text("mine")
    with pytest.raises(PatchlightError, match=r"holds results\.jsonl"):
        crop(photos, tmp_path / "out", model)
    assert (tmp_path / "out" / "results.jsonl").read_text() == "mine"
    assert not (tmp_path / "out" / ".run").exists()


# Stops


class Cut(Exception):  # noqa: N818
    pass


def stop_after(count: int) -> Callable[[Progress], None]:
    def watch(progress: Progress) -> None:
        if progress.done >= count:
            raise Cut

    return watch


@pytest.mark.parametrize("count", [1, 3, 5])
def test_it_goes_on_where_it_was(photos: Path, tmp_path: Path, model: Path, looked_at: list[int], count: int) -> None:
    (photos / "0005.jpg").write_bytes(b"")
    crop(photos, tmp_path / "whole", model)
    looked_at.clear()
    with pytest.raises(Cut):
        crop(photos, tmp_path / "out", model, progress=stop_after(count))
    finished = rows_in_journal(tmp_path / "out")
    assert finished >= count
    looked_at.clear()
    summary = crop(photos, tmp_path / "out", model)
    assert summary.computed == 7 - finished
    assert everything_in(tmp_path / "out") == everything_in(tmp_path / "whole")
    journals = [(tmp_path / each / ".run" / "journal.jsonl").read_bytes() for each in ("out", "whole")]
    assert journals[0] == journals[1]


def rows_in_journal(out: Path) -> int:
    return len((out / ".run" / "journal.jsonl").read_bytes().splitlines())


@pytest.mark.parametrize("in_a_new_folder", [False, True])
def test_a_run_that_overwrites_goes_on_where_it_was_and_begins_anew_once_it_has_finished(
    photos: Path, tmp_path: Path, model: Path, looked_at: list[int], in_a_new_folder: bool
) -> None:
    out, wide = tmp_path / "out", CropSettings(margin=0.2)
    crop(photos, tmp_path / "whole", model, wide)
    if not in_a_new_folder:
        crop(photos, out, model)
    lines: list[str] = []
    with pytest.raises(Cut):
        crop(photos, out, model, wide, overwrite=True, progress=stop_after(3), tell=lines.append)
    assert lines == []
    finished = rows_in_journal(out)
    looked_at.clear()
    assert crop(photos, out, model, wide, overwrite=True, tell=lines.append).computed == 6 - finished < 6
    assert lines == [f"{out}: was started over with these settings and interrupted; continuing"]
    assert everything_in(out) == everything_in(tmp_path / "whole")
    assert crop(photos, out, model, wide, overwrite=True).computed == 6, "that one had finished"
    assert crop(photos, out, model, wide).nothing_to_do


def test_a_run_that_overwrites_leaves_no_empty_folders_but_what_is_not_its_own(
    photos: Path, tmp_path: Path, model: Path
) -> None:
    out = tmp_path / "out"
    crop(photos, out, model, overlay=True)
    (out / "overlays" / "mine").mkdir()
    (out / "overlays" / "mine" / "note.txt").write_text("kept")
    crop(photos, out, model, CropSettings(boxes_only=True), overwrite=True)
    assert not (out / "crops").exists()
    assert [each.name for each in (out / "overlays").rglob("*")] == ["mine", "note.txt"]
    (out / "overlays" / "mine" / "note.txt").unlink()
    crop(photos, out, model, overwrite=True)
    assert not (out / "overlays").exists()


def test_a_run_that_overwrites_begins_anew_after_others(photos: Path, tmp_path: Path, model: Path) -> None:
    out, wide = tmp_path / "out", CropSettings(margin=0.2)
    lines: list[str] = []
    with pytest.raises(Cut):
        crop(photos, out, model, progress=stop_after(3))
    with pytest.raises(Cut):
        crop(photos, out, model, overwrite=True, progress=stop_after(1), tell=lines.append)
    assert lines == [], "the first had not been told to"
    assert crop(photos, out, model, wide, overwrite=True).computed == 6, "with other settings it is another"
    with pytest.raises(Cut):
        crop(photos, out, model, overwrite=True, progress=stop_after(1))
    assert crop(photos, out, model).computed < 6, "without being told again, too, it goes on"
    assert crop(photos, out, model, overwrite=True).computed == 6


@pytest.mark.parametrize("left", [0, 1, 50, 900, -1])
def test_a_line_that_was_cut_off_is_done_again(photos: Path, tmp_path: Path, model: Path, left: int) -> None:
    crop(photos, tmp_path / "whole", model)
    shutil.copytree(tmp_path / "whole", tmp_path / "out")
    journal = tmp_path / "out" / ".run" / "journal.jsonl"
    content = journal.read_bytes()
    journal.write_bytes(content[:left])
    (tmp_path / "out" / "crops" / f".000.jpg.{os.getpid()}.tmp").write_bytes(b"half of a cr")
    crop(photos, tmp_path / "out", model)
    assert everything_in(tmp_path / "out") == everything_in(tmp_path / "whole")
    assert journal.read_bytes() == content


def test_two_processes_on_one_output(photos: Path, tmp_path: Path, model: Path) -> None:
    out = tmp_path / "out"
    inside, leave = threading.Event(), threading.Event()

    def watch(progress: Progress) -> None:
        inside.set()
        leave.wait(30)

    one = threading.Thread(target=lambda: crop(photos, out, model, progress=watch))
    one.start()
    inside.wait(30)
    try:
        with pytest.raises(PatchlightError, match="another process is working there"):
            crop(photos, out, model)
    finally:
        leave.set()
        one.join()
    assert len(rows_of(out)) == 6


@pytest.mark.parametrize("where", ["crops", "thumbs", "journal.jsonl", "results.jsonl"])
def test_a_full_disk(photos: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    out = tmp_path / "out"
    make_photos(photos, 12)
    crop(photos, tmp_path / "whole", model)
    with pytest.raises(Cut):
        crop(photos, out, model, progress=stop_after(2))
    before = everything_in(out)

    def full(path: Path) -> bool:
        return where in os.path.relpath(path, out)

    with monkeypatch.context() as patch:
        _fill_disk(patch, full)
        with pytest.raises(PatchlightError) as caught:
            crop(photos, out, model)
        assert "full" in str(caught.value)
        assert "\n" not in str(caught.value)
    after = everything_in(out)
    assert {name: after[name] for name in before} == before
    assert not [name for name in after if name.endswith(".tmp")]
    crop(photos, out, model)
    assert everything_in(out) == everything_in(tmp_path / "whole")


def _fill_disk(patch: pytest.MonkeyPatch, full: Callable[[Path], bool]) -> None:
    write_bytes, open_file, append = Path.write_bytes, Path.open, results.Journal.append

    def no_bytes(path: Path, content: Any) -> int:
        if full(path):
            open_file(path, "wb").close()
            raise OSError(28, "No space left on device")
        return write_bytes(path, content)

    def no_open(path: Path, mode: str = "r", *rest: Any, **named: Any) -> Any:
        if "w" in mode and full(path) and path.name != "lock":
            raise OSError(28, "No space left on device")
        return open_file(path, mode, *rest, **named)

    def no_append(journal: Any, *given: Any, **named: Any) -> None:
        if full(journal.path):

            class Full:
                def write(self, line: bytes) -> None:
                    raise OSError(28, "No space left on device")

                def close(self) -> None:
                    pass

            journal._file.close()
            journal._file = Full()
        append(journal, *given, **named)

    patch.setattr(Path, "write_bytes", no_bytes)
    patch.setattr(Path, "open", no_open)
    patch.setattr(results.Journal, "append", no_append)


# Photos of every kind


def test_one_bad_file_shifts_nothing(photos: Path, tmp_path: Path, model: Path) -> None:
    crop(photos, tmp_path / "good", model)
    good = {row["path"]: row for row in rows_of(tmp_path / "good")}
    whole = (photos / "000.jpg").read_bytes()
    bad = {
        "000a.jpg": (b"", "empty"),
        "001a.jpg": (whole[: len(whole) // 2], "truncated"),
        "003a.jpg": (whole[:-2], "truncated"),
        "001b.jpg": (b"<!DOCTYPE html><html></html>", "not-an-image"),
        "002a.png": (b"%!PS-Adobe-3.0 EPSF-3.0\n", "unsupported"),
        "002b.png": (b"%PDF-1.4\n", "unsupported"),
        "005a.png": (b"\x89PNG\r\n\x1a\nrubbish", "corrupt"),
    }
    for name, (content, _) in bad.items():
        (photos / name).write_bytes(content)
    photo(7).save(photos / "004a.jpg", "PNG")
    summary = crop(photos, tmp_path / "out", model)
    rows = {row["path"]: row for row in rows_of(tmp_path / "out")}
    assert list(rows) == sorted(rows)
    assert len(rows) == 14
    for path, row in good.items():
        assert rows[path] == row
    for name, (_, reason) in bad.items():
        row = rows[str(photos / name)]
        assert (row["status"], row["reason"]) == ("error", reason), name
        assert (row["decision"], row["boxes"], row["crops"], row["heat"]) == (None, [], [], None)
        assert row["detail"]
    assert rows[str(photos / "004a.jpg")]["crops"] == ["crops/004a.jpg.crop1.png"]
    assert summary.failed == 7
    assert summary.exit_code == 3


def test_files_that_are_no_files_and_names_of_every_kind(tmp_path: Path, model: Path) -> None:
    photos = tmp_path / "photos"
    make_photos(photos / "folder.jpg", 1)
    odd = [b"new\nline.jpg", b"quo'\"te.jpg", b"<img onerror=x>.jpg", b"=cmd|calc.jpg", b"\xff\xfe.jpg", b"-rf.jpg"]
    for name in odd:
        shutil.copy(photos / "folder.jpg" / "000.jpg", photos / os.fsdecode(name))
    os.mkfifo(photos / "pipe.jpg")
    (photos / "self.jpg").symlink_to("self.jpg")
    summary = crop(photos, tmp_path / "out", model, formats=("json", "megadetector", "coco"))
    rows = rows_of(tmp_path / "out")
    assert summary.reasons == {"unreadable": 2}
    by_name = {os.fsencode(os.path.basename(row["path"])): row for row in rows}
    assert set(by_name) == {*odd, b"000.jpg", b"pipe.jpg", b"self.jpg"}
    for name in odd:
        (crop_name,) = by_name[name]["crops"]
        assert os.fsencode(crop_name) == b"crops/" + name
        assert (tmp_path / "out" / crop_name).is_file()
    assert b"\n=cmd" not in (tmp_path / "out" / "results.csv").read_bytes()
    (tmp_path / "out" / "results.csv").read_text(encoding="utf-8")
    for each in ("results.json", "megadetector.json", "coco.json"):
        json.loads((tmp_path / "out" / each).read_text())


def test_same_names_and_cases_do_not_collide(tmp_path: Path, model: Path) -> None:
    photos = tmp_path / "photos"
    for number, name in enumerate(["a.jpg", "a.png", "A.JPG", "a.bmp", "a.bmp.png", "x/a.jpg", "y/a.jpg"]):
        (photos / name).parent.mkdir(parents=True, exist_ok=True)
        photo(number).save(photos / name)
    crop(photos, tmp_path / "out", model)
    rows = rows_of(tmp_path / "out")
    crops = [name for row in rows for name in row["crops"]]
    assert len(crops) == len({name.casefold() for name in crops}) == 7
    assert {"crops/x/a.jpg", "crops/y/a.jpg", "crops/a.png", "crops/a.bmp.crop1.png"} < set(crops)
    for row in rows:
        region = region_around(Box(*row["boxes"][0]["xyxy"]), (120, 160), margin=0.03)
        with Image.open(tmp_path / "out" / row["crops"][0]) as made, Image.open(row["path"]) as source:
            wanted = np.asarray(source.convert("RGB").crop(region), float)
            assert np.abs(np.asarray(made.convert("RGB"), float) - wanted).mean() < 3


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientations_give_identical_rows(tmp_path: Path, model: Path, orientation: int) -> None:
    upright = photo(3)
    turns = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # how the pixels of a photo are stored under each orientation
    stored = upright if orientation == 1 else upright.transpose(Image.Transpose(turns[orientation]))
    exif = Image.Exif()
    exif[0x112] = orientation
    for name, image, options in (("one", upright, {}), ("turned", stored, {"exif": exif})):
        (tmp_path / name).mkdir()
        image.save(tmp_path / name / "a.png", **options)
        crop(tmp_path / name, tmp_path / f"{name} out", model)
    (one,), (turned,) = rows_of(tmp_path / "one out"), rows_of(tmp_path / "turned out")
    assert turned | {"path": one["path"]} == one
    crops = [np.asarray(Image.open(tmp_path / f"{each} out" / "crops" / "a.png")) for each in ("one", "turned")]
    np.testing.assert_array_equal(*crops)


def test_shapes_and_kinds_at_the_edge(tmp_path: Path, model: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    Image.new("RGB", (1, 1)).save(photos / "1x1.png")
    photo(1, 1, 20000).save(photos / "1x20000.png")
    photo(2, 20000, 1).save(photos / "20000x1.jpg")
    Image.fromarray((np.arange(4096) * 16).astype(np.uint16).reshape(64, 64)).save(photos / "grey16.png")
    photo(3).convert("CMYK").save(photos / "cmyk.jpg")
    photo(4).convert("RGBA").save(photos / "rgba.png")
    photo(5).convert("P").save(photos / "palette.gif")
    level_HW = np.linspace(0, 1, 4096, dtype=np.float32).reshape(64, 64)
    level_HW[3, 3] = np.nan
    Image.fromarray(level_HW).save(photos / "float.tif")
    photo(6).save(photos / "corrupt-exif.jpg", exif=b"Exif\0\0II*\0\xff\xff\xff\xff" + b"x" * 40)
    photo(7).save(photos / "corrupt-icc.jpg", icc_profile=b"no profile")
    summary = crop(photos, tmp_path / "out", model)
    assert summary.failed == 0
    for row in rows_of(tmp_path / "out"):
        width, height = row["size"]
        for box in row["boxes"]:
            x0, y0, x1, y1 = box["xyxy"]
            assert 0 <= x0 <= x1 <= width
            assert 0 <= y0 <= y1 <= height
        for name in row["crops"]:
            with Image.open(tmp_path / "out" / name) as made:
                made.load()


def test_bombs_are_refused_before_they_are_decoded(tmp_path: Path, model: Path, monkeypatch: Any) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    for name, side in (("a.png", 13_400), ("b.png", 20_000)):
        Image.new("1", (side, side)).save(photos / name)
    monkeypatch.undo()
    summary = crop(photos, tmp_path / "out", model)
    assert summary.reasons == {"too-large": 2}


def endless_tiff() -> bytes:
    """A directory whose next one is itself."""
    file = io.BytesIO()
    photo(1).save(file, "TIFF")
    content = bytearray(file.getvalue())
    (first,) = struct.unpack_from("<I", content, 4)
    (count,) = struct.unpack_from("<H", content, first)
    struct.pack_into("<I", content, first + 2 + 12 * count, first)
    return bytes(content)


def long_gif(frames: int) -> bytes:
    file = io.BytesIO()
    photo(2).convert("P").save(file, "GIF")
    content = file.getvalue()
    begin = 13 + 3 * 2 ** ((content[10] & 7) + 1)  # behind the header and the palette
    return content[:begin] + content[begin:-1] * frames + b";"


def large_text_png() -> bytes:
    file = io.BytesIO()
    photo(3).save(file, "PNG")
    text = b"Comment\0\0" + zlib.compress(bytes(200_000_000), 9)
    chunk = struct.pack(">I", len(text)) + b"zTXt" + text + struct.pack(">I", zlib.crc32(b"zTXt" + text))
    return file.getvalue()[:33] + chunk + file.getvalue()[33:]


def test_files_made_to_be_slow_or_endless(tmp_path: Path, model: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "endless.tif").write_bytes(endless_tiff())
    (photos / "long.gif").write_bytes(long_gif(10_000))
    (photos / "text.png").write_bytes(large_text_png())
    begun = time.monotonic()
    summary = crop(photos, tmp_path / "out", model)
    assert time.monotonic() - begun < 15
    rows = {os.path.basename(row["path"]): row for row in rows_of(tmp_path / "out")}
    assert rows["endless.tif"]["status"] == rows["long.gif"]["status"] == "ok"
    assert summary.photos == 3
    if rows["text.png"]["status"] == "ok":
        assert (tmp_path / "out" / rows["text.png"]["crops"][0]).stat().st_size < 1_000_000
    with Image.open(tmp_path / "out" / rows["long.gif"]["crops"][0]) as made:
        assert getattr(made, "n_frames", 1) == 1


@pytest.mark.skipif(not BAD_IMAGES.exists(), reason="no ../shared/data/bad-images")
def test_bad_images(tmp_path: Path, model: Path) -> None:
    summary = crop(BAD_IMAGES, tmp_path / "out", model, workers=2)
    rows = {os.path.basename(row["path"]): row for row in rows_of(tmp_path / "out")}
    assert summary.photos == len(rows) >= 60
    for line in (BAD_IMAGES / "EXPECTED.tsv").read_text().splitlines()[1:]:
        name, said = line.split("\t")
        if name in rows and said.startswith("OK"):
            assert rows[name]["status"] == "ok", (name, rows[name])
        elif name in rows:
            assert rows[name]["status"] == "error", (name, said)
            assert rows[name]["reason"] != "crashed"


# Changes in mid-run


def test_deleted_before_it_is_read(photos: Path, tmp_path: Path, model: Path) -> None:
    # The line is shorter than the folder, so that the last is not read yet when the first is done.
    make_photos(photos, 30, first=6)
    (photos / "005.jpg").rename(photos / "zzz.jpg")

    def watch(progress: Progress) -> None:
        (photos / "zzz.jpg").unlink(missing_ok=True)

    summary = crop(photos, tmp_path / "out", model, progress=watch)
    assert summary.reasons == {"gone": 1}
    row = rows_of(tmp_path / "out")[-1]
    assert (row["status"], row["reason"]) == ("error", "gone")
    assert crop(photos, tmp_path / "out", model).failed == 0, "it is no input any more"


@pytest.mark.parametrize("how", ["deleted", "changed"])
def test_deleted_or_changed_before_it_is_cut(
    photos: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    real = Detector.look
    looks = 0

    def meanwhile(*given: Any, **named: Any) -> Any:
        nonlocal looks
        looks += 1
        if looks == 3:
            if how == "deleted":
                (photos / "002.jpg").unlink()
            else:
                photo(77, 200, 100).save(photos / "002.jpg")
        return real(*given, **named)

    monkeypatch.setattr(Detector, "look", meanwhile)
    summary = crop(photos, tmp_path / "out", model)
    assert summary.reasons == {"gone" if how == "deleted" else "changed": 1}
    assert crop(photos, tmp_path / "out", model).failed == 0
    if how == "changed":
        assert rows_of(tmp_path / "out")[2]["size"] == [200, 100]


def crash_on_three(file: str, *rest: Any) -> Any:
    if file.endswith("003.jpg"):
        os.kill(os.getpid(), 9)
    return work.read_photo(file, *rest)


def test_a_decoder_that_crashes_costs_its_own_row(
    photos: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "read_photo", crash_on_three)
    summary = crop(photos, tmp_path / "out", model, workers=2)
    assert summary.reasons == {"crashed": 1}
    assert [row["status"] for row in rows_of(tmp_path / "out")] == ["ok"] * 3 + ["error"] + ["ok"] * 2


def test_no_permission(photos: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        real = os.open

        def refuse(path: Any, *rest: Any, **named: Any) -> int:
            if str(path).endswith("001.jpg") and "photos" in str(path):
                raise PermissionError(13, "Permission denied")
            return real(path, *rest, **named)

        monkeypatch.setattr(os, "open", refuse)
    else:
        (photos / "001.jpg").chmod(0)
    summary = crop(photos, tmp_path / "out", model)
    assert summary.reasons == {"unreadable": 1}
    monkeypatch.undo()
    (photos / "001.jpg").chmod(0o644)
    assert crop(photos, tmp_path / "out", model).failed == 0, "what may have passed is tried again"


def test_memory_is_bounded_by_the_line(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos = tmp_path / "photos"
    make_photos(photos, 1)
    for number in range(1, 120):
        os.link(photos / "000.jpg", photos / f"{number:03}.jpg")
    longest = 0
    real = pipeline.CropPipeline._move

    def measured(self: Any, each: Any) -> bool:
        nonlocal longest
        longest = max(longest, len(self.line))
        return real(self, each)

    monkeypatch.setattr(pipeline.CropPipeline, "_move", measured)
    crop(photos, tmp_path / "out", model, CropSettings(boxes_only=True), report=False)
    assert 1 <= longest <= 10
    assert len(rows_of(tmp_path / "out")) == 120
