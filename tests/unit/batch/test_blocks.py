"""Blocks of photos, as the machines of a cluster have them: here in one process, with Ray played by a few lines."""

import contextlib
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from crop_runs import everything_in, make_photos, run_crop, save_model
from patchlight.batch import on_ray
from patchlight.batch.blocks import SIGN, Cuts, Place, Reads
from patchlight.batch.finder import Finder
from patchlight.batch.on_ray import Cluster, Looks
from patchlight.batch.readers import ClassifySettings
from patchlight.batch.settings import CropRunSettings, CropSettings
from patchlight.batch.table_run import classify_photos
from patchlight.errors import PatchlightError
from patchlight.reporting import Reporter


class Lost(Exception):  # noqa: N818
    """For Ray's own errors."""


class Death(BaseException):
    """Of the process of an actor."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny", groups=("animal", "thing", "thing", "thing", "thing"))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    make_photos(tmp_path / "photos", 7)
    (tmp_path / "photos" / "bad.jpg").write_bytes(b"none")
    return tmp_path / "photos"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """One whose actors are called here: `on` is called before each is, with its name and the number of the block."""
    about: dict[str, Any] = {"deaths": 0, "on": lambda hand, number: None, "rounds": 0}
    ray = SimpleNamespace(
        put=pickle.dumps, get=pickle.loads, exceptions=SimpleNamespace(RayError=Lost), shutdown=lambda: None
    )

    opened: list[Looks] = []

    def dataset(self: Cluster, blocks: Any, pipeline: Any, place: Any, job: Any) -> Any:
        config = pipeline.finder.detector.loaded.preprocess.config
        thumbs = pipeline.folder.thumbs.absolute() if pipeline.thumbs else None
        about["rounds"] += 1
        hands: tuple[Any, ...] = (
            Reads(place, 0, config, thumbs, pipeline.whole),
            Looks(place, partial(pickle.loads, job)),
            Cuts(place, 0),
        )
        opened.append(hands[1])

        def rows() -> Iterator[Any]:
            for number, block in enumerate(blocks):
                for hand in hands:
                    while True:
                        about["on"](type(hand).__name__, number)
                        try:
                            block = hand(block)
                            break
                        except Death:
                            about["deaths"] += 1
                yield block

        return SimpleNamespace(iter_rows=rows)

    monkeypatch.setattr(Cluster, "_dataset", dataset)
    played: Any = ray
    monkeypatch.setattr(on_ray, "connected", lambda how: contextlib.nullcontext(Cluster(played, "ray", 1, 0, "cpu")))
    yield about
    for each in opened:
        if each.has_begun:
            each.journal.close()


def both(photos: Path, tmp_path: Path, model: Path, settings: CropSettings | None = None, **how: Any) -> None:
    """Crops of one machine, and those of a cluster, are the same."""
    run_crop(photos, tmp_path / "one", settings, model=model, workers=0, **how | {"formats": ["coco", "parquet"]})
    run_crop(photos, tmp_path / "two", settings, model=model, workers=0, on="ray", **how | {"formats": ["coco"]})
    assert everything_in(tmp_path / "two") == everything_in(tmp_path / "one")


@pytest.mark.parametrize(
    "settings",
    [
        CropSettings(),
        CropSettings(subjects=None, cutout=True, keywords=True, sort="group", second_look=True),
        CropSettings(boxes_only=True, sort="decision"),
        CropSettings(lossless=True, engine="none"),
    ],
)
def test_crops_are_those_of_one_machine(
    photos: Path, tmp_path: Path, model: Path, cluster: Any, settings: CropSettings
) -> None:
    both(photos, tmp_path, model, settings, overlay=True)


def test_what_ray_loses_is_handed_out_again(photos: Path, tmp_path: Path, model: Path, cluster: Any) -> None:
    def lose(hand: str, number: int) -> None:
        if hand == "Looks" and number == 1 and cluster["rounds"] < 3:
            raise Lost("a node went away")

    cluster["on"] = lose
    both(photos, tmp_path, model)
    assert cluster["rounds"] == 3


def test_a_cluster_that_loses_everything(photos: Path, tmp_path: Path, model: Path, cluster: Any) -> None:
    def lose(hand: str, number: int) -> None:
        if number == 1 or cluster["rounds"] > 1:
            raise Lost("a node went away")

    cluster["on"] = lose
    with pytest.raises(PatchlightError, match=r"^ray: \d blocks were lost 3 times; see to the cluster"):
        run_crop(photos, tmp_path / "two", model=model, workers=0, on="ray")
    cluster["on"] = lambda hand, number: None
    assert 0 < run_crop(photos, tmp_path / "two", model=model, workers=0).computed < 8  # goes on, here


def test_what_is_wrong_on_another_machine_is_said_here(
    photos: Path, tmp_path: Path, model: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = on_ray._made_ready
    monkeypatch.setattr(on_ray, "_made_ready", lambda *given: replace(ready(*given), base=str(tmp_path / "elsewhere")))
    with pytest.raises(PatchlightError, match=r"does not see .*elsewhere; the photos must lie"):
        run_crop(photos, tmp_path / "two", model=model, workers=0, on="ray")
    assert not list((tmp_path / "two" / ".run" / "parts").glob("*.parquet"))


def looking(monkeypatch: pytest.MonkeyPatch, at: str, does: Callable[[], None]) -> None:
    """Have the model do this at the photo with this name, or at more photos than it."""
    look = Looks._look

    def instead(self: Looks, photos: Any) -> Any:
        if any(each[0].file.endswith(at) and not hasattr(each[2], "reason") for _, each in photos):
            does()
        return look(self, photos)

    monkeypatch.setattr(Looks, "_look", instead)


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return {os.path.basename(row["path"]): row for row in rows}


def test_a_photo_that_kills_who_looks_at_it_is_a_row(
    photos: Path, tmp_path: Path, model: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_crop(photos, tmp_path / "one", model=model, workers=0)

    def die() -> None:
        raise Death

    looking(monkeypatch, "003.jpg", die)
    monkeypatch.setattr(on_ray, "_PER_CPU", 1)  # one block
    summary = run_crop(photos, tmp_path / "two", model=model, workers=0, on="ray")
    assert cluster["deaths"] == 3  # of all together, and twice alone
    assert summary.reasons == {"crashed": 1, "not-an-image": 1}
    one, two = rows_of(tmp_path / "one"), rows_of(tmp_path / "two")
    assert "the processes that looked at it died" in two.pop("003.jpg")["detail"]
    assert one.pop("003.jpg")["status"] == "ok"
    assert one == two


def test_a_photo_that_needs_too_much_memory_is_a_row(
    photos: Path, tmp_path: Path, model: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_crop(photos, tmp_path / "one", model=model, workers=0)
    monkeypatch.setattr(on_ray, "_PER_CPU", 1)
    look, bright = Finder._look, []

    def short_of_memory(self: Finder, images_BCHW: torch.Tensor, seen: Any) -> Any:
        bright.append(float(images_BCHW.sum()))
        if bright[-1] == bright[2]:  # the third photo, whenever it comes
            raise torch.OutOfMemoryError("CUDA out of memory")
        return look(self, images_BCHW, seen)

    bright += [0.0, 0.0]
    monkeypatch.setattr(Finder, "_look", short_of_memory)
    summary = run_crop(photos, tmp_path / "two", model=model, workers=0, on="ray")
    assert summary.reasons == {"crashed": 1, "not-an-image": 1}
    one, two = rows_of(tmp_path / "one"), rows_of(tmp_path / "two")
    (failed,) = (name for name in two if two[name]["reason"] == "crashed")
    assert "not enough memory for a single photo" in two[failed]["detail"]
    assert {name: row for name, row in two.items() if name != failed} == {
        name: row for name, row in one.items() if name != failed
    }


def test_tables_are_those_of_one_machine(photos: Path, tmp_path: Path, model: Path, cluster: Any) -> None:
    for name, on in (("one", None), ("two", "ray")):
        how = CropRunSettings(workers=0, on=on)
        classify_photos(
            photos, tmp_path / f"{name}.jsonl", ClassifySettings(top=2), how, model=model, reporter=Reporter()
        )
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()


def test_ten_thousand_photos_have_a_report_and_more_have_none(
    photos: Path, tmp_path: Path, model: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(on_ray, "MOST_PHOTOS", 7)
    summary = run_crop(photos, tmp_path / "two", model=model, workers=0, on="ray", tell=told.append)
    assert summary.report is None
    assert not (tmp_path / "two" / "thumbs").exists()
    assert any("no report" in line for line in told)


def test_a_machine_that_does_not_see_the_folders(tmp_path: Path) -> None:
    with pytest.raises(PatchlightError, match=r"does not see .*; name a folder with --out"):
        Place(tmp_path, None).check()
    (tmp_path / SIGN).touch()
    Place(tmp_path, str(tmp_path)).check()
    with pytest.raises(PatchlightError, match=r"does not see .*gone; the photos must lie"):
        Place(tmp_path, str(tmp_path / "gone")).check()
    with pytest.raises(PatchlightError, match=r"has Patchlight .*, and the run was started by 0\.0; install the same"):
        Place(tmp_path, None, "0.0").check()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"on": "spark"}, "on='spark' is not known; it is ray, or ray:HOST:PORT"),
        ({"on": "ray:host"}, "on='ray:host' is not known"),
        ({"on": "ray", "part": "1/2"}, "part='1/2' does not go with on='ray'"),
        ({"on": "ray", "settings": CropSettings(burst=True)}, "burst=True does not go with on='ray'"),
        ({"on": "ray", "settings": CropSettings(video=1.0)}, "video=1.0 does not go with on='ray'"),
        ({"on": "ray", "settings": CropSettings(size="9x9", scale="same")}, "scale='same' does not go with on='ray'"),
        ({"on": "ray", "device": "cuda:1"}, "device='cuda:1' does not go with on='ray'"),
        ({"on": "ray:127.0.0.1:1"}, "on='ray:127.0.0.1:1' does not answer (Connection refused)"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mistakes_are_one_line_and_leave_nothing(
    photos: Path, tmp_path: Path, model: Path, given: dict[str, Any], said: str
) -> None:
    if given["on"].startswith("ray:1"):
        pytest.importorskip("ray")
    with pytest.raises(PatchlightError) as caught:
        run_crop(photos, tmp_path / "two", model=model, workers=0, **given)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "two").exists()


def test_without_ray(photos: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        PatchlightError, match=r"^on='ray' needs ray, which is missing; pip install 'patchlight\[ray\]'"
    ):
        run_crop(photos, tmp_path / "two", model=model, workers=0, on="ray")
    assert not (tmp_path / "two").exists()
