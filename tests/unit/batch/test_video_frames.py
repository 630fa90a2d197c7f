"""Videos in the folder runner: frames at so many a second, with the time in their rows."""

import contextlib
import csv
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from camera_traps import ANIMAL, save_bright, scene
from crop_runs import everything_in, rows_of, run_crop
from patchlight.batch.settings import CropSettings
from patchlight.errors import PatchlightError
from patchlight.geometry import Box
from patchlight.reporting import Progress
from patchlight.weights.load import Loaded, load

av = pytest.importorskip("av")

CODECS = {"mp4": "mpeg4", "mov": "mpeg4", "avi": "mjpeg"}


def write_video(path: Path, seconds: int = 4, rate: int = 5) -> Path:
    """An animal that walks to the right, 20 pixels a second."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as video:
        codec = CODECS[path.suffix[1:]]
        stream = video.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = 160, 120, "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.bit_rate = 4_000_000
        for number in range(seconds * rate):
            image = scene(stump=False)
            image.paste((255, 240, 230), place(number / rate).to_ints())
            for packet in stream.encode(av.VideoFrame.from_image(image)):
                video.mux(packet)
        for packet in stream.encode():
            video.mux(packet)
    os.utime(path, (1_715_668_200, 1_715_668_200))
    return path


def place(seconds: float) -> Box:
    left = 10 + round(20 * seconds)
    return Box(left, 40, left + ANIMAL[0], 40 + ANIMAL[1])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load(save_bright(tmp_path_factory.mktemp("model") / "bright"))


def crop(clips: Path, out: Path, model: Loaded, *, video: float | None = 1, burst: bool = False, **more: Any) -> Any:
    settings = CropSettings(video=video, burst=burst)
    return run_crop([clips], out, settings, model=model, device=None, workers=0, **more)


@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("burst", [False, True])
def test_so_many_frames_a_second_get_rows(tmp_path: Path, model: Loaded, kind: str, burst: bool) -> None:
    write_video(tmp_path / "clips" / f"a.{kind}")
    Image.fromarray(np.asarray(scene())).save(tmp_path / "clips" / "b.jpg")
    crop(tmp_path / "clips", tmp_path / "out", model, burst=burst)
    *frames, photo = rows_of(tmp_path / "out")
    assert [frame["video"] for frame in frames] == [{"file": f"a.{kind}", "seconds": float(s)} for s in range(4)]
    assert photo["video"] is None
    for number, frame in enumerate(frames):
        assert Path(frame["path"]).name == f"{number:06}.000.jpg"
        assert Box(*frame["boxes"][0]["xyxy"]).iou(place(number)) > 0.6
        assert frame["crops"] == [f"crops/a.{kind}/{number:06}.000.jpg"]
        assert (tmp_path / "out" / frame["crops"][0]).is_file()
    if burst:
        assert len({frame["burst"]["id"] for frame in frames}) == 1
        assert [frame["burst"]["frame"] for frame in frames] == [1, 2, 3, 4]
    with (tmp_path / "out" / "results.csv").open(newline="") as file:
        assert [line["seconds"] for line in csv.DictReader(file)] == ["0.0", "1.0", "2.0", "3.0", ""]


def test_other_rates(tmp_path: Path, model: Loaded) -> None:
    write_video(tmp_path / "clips" / "a.mp4")
    for rate, count in ((0.5, 2), (2.0, 8), (100.0, 20)):
        crop(tmp_path / "clips", tmp_path / f"out{rate}", model, video=rate)
        assert len(rows_of(tmp_path / f"out{rate}")) == count
    with pytest.raises(PatchlightError, match="video=0"):
        CropSettings(video=0)
    with pytest.raises(PatchlightError, match="holds no photos"):
        crop(tmp_path / "clips", tmp_path / "none", model, video=None)


def test_broken_videos_are_rows_with_a_reason(tmp_path: Path, model: Loaded) -> None:
    whole = write_video(tmp_path / "clips" / "good.mp4").read_bytes()
    (tmp_path / "clips" / "a-broken.mp4").write_bytes(whole[: len(whole) // 3])
    (tmp_path / "clips" / "b-empty.mov").write_bytes(b"")
    (tmp_path / "clips" / "c-page.avi").write_bytes(b"<html></html>")
    summary = crop(tmp_path / "clips", tmp_path / "out", model)
    assert summary.failed == 3
    rows = rows_of(tmp_path / "out")
    assert [row["status"] for row in rows] == ["error"] * 3 + ["ok"] * 4
    assert all(row["detail"].startswith("this video cannot be read (") for row in rows[:3])


def test_it_goes_on_where_it_was_and_does_nothing_twice(tmp_path: Path, model: Loaded) -> None:
    write_video(tmp_path / "clips" / "a.mp4")
    write_video(tmp_path / "clips" / "b.mp4")
    crop(tmp_path / "clips", tmp_path / "whole", model)

    class Cut(Exception):  # noqa: N818
        pass

    for what, count in (("frame", 2), ("photo", 3)):

        def stop(progress: Progress, what: str = what, count: int = count) -> None:
            if progress.what == what and progress.done >= count:
                raise Cut

        out = tmp_path / what
        with pytest.raises(Cut):
            crop(tmp_path / "clips", out, model, progress=stop)
        crop(tmp_path / "clips", out, model)
        again, whole = everything_in(out), everything_in(tmp_path / "whole")
        rows = [
            [row | {"path": ""} for row in map(json.loads, each.pop("results.jsonl").splitlines())]
            for each in (again, whole)
        ]
        assert rows[0] == rows[1]
        assert {name: content for name, content in again.items() if name.startswith(("crops", "frames"))} == {
            name: content for name, content in whole.items() if name.startswith(("crops", "frames"))
        }
        assert crop(tmp_path / "clips", out, model).nothing_to_do
    crop(tmp_path / "clips", tmp_path / "whole", model, overwrite=True)
    assert len(rows_of(tmp_path / "whole")) == 8


@pytest.mark.parametrize("stopped", [False, True])
def test_overwrite_removes_the_frames_of_runs_alone(tmp_path: Path, model: Loaded, stopped: bool) -> None:
    def stop(progress: Progress) -> None:
        if stopped and progress.what == "frame" and progress.done >= 2:
            raise KeyboardInterrupt

    write_video(tmp_path / "clips" / "day" / "a.mp4")
    Image.fromarray(np.asarray(scene())).save(tmp_path / "clips" / "b.jpg")
    out = tmp_path / "out"
    with contextlib.suppress(KeyboardInterrupt):
        crop(tmp_path / "clips", out, model, progress=stop)
    assert any(out.glob("frames/day/a.mp4/*.jpg"))
    (out / "frames" / "mine").mkdir()
    mine = {out / "frames" / "mine" / name for name in ("video.json", "000001.000.jpg")}
    for path in mine:
        path.write_bytes(b"mine")
    crop(tmp_path / "clips", out, model, video=None, overwrite=True)
    assert {path for path in (out / "frames").rglob("*") if path.is_file()} == mine
    assert not (out / "frames" / "day").exists()


def test_what_reads_videos_is_asked_for_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    (tmp_path / "clip.mp4").write_bytes(b"")
    with pytest.raises(PatchlightError, match="video"):
        run_crop(tmp_path, tmp_path / "out", CropSettings(video=1.0), model="default", workers=0)
    assert not (tmp_path / "out").exists()
