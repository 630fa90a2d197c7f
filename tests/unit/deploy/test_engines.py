"""Exported models in the stead of models: the same answers, and one line where they cannot be had."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import patchlight as pl
from command_line import patchlight
from crop_runs import make_photos, rows_of, run_crop, save_model
from models_at_random import randomize, tiny_vit
from patchlight.config import Calibration, PreprocessConfig, SubjectHeat
from patchlight.deploy import proof as proving
from patchlight.looking.look import look
from patchlight.reporting import SILENT
from patchlight.weights.groups import Groups
from patchlight.weights.save import save
from warm_python import run_warm

LABELS = ("ant", "bee", "cow", "dog", "eel")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(autouse=True, scope="module")
def short_proofs() -> Iterator[None]:
    """test_export.py has longer ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proving, "INPUTS", 2)
        yield


@pytest.fixture(scope="module")
def taught(folder: Path) -> Path:
    """A tiny model that finds subjects, by boxes that patches agree on, and names classes."""
    vit = tiny_vit(patch_boxes=True)
    randomize(vit, 0)
    return save(
        vit,
        folder / "taught",
        preprocess=PreprocessConfig(image_size=(32, 32), resize="squash", crop_pct=1.0),
        labels=LABELS,
        groups=Groups(LABELS, ("animal/insect", "animal/insect", "animal", "animal", "animal")),
        subject=SubjectHeat(scale=1.0, bias=0.0, calibration=Calibration(bias=2.0)),
    )


@pytest.fixture(scope="module")
def exported(folder: Path, taught: Path) -> Path:
    outputs = ["subject", "logits", "attention", "dense", "features"]
    return pl.export(taught, folder / "exported", outputs=outputs, reporter=pl.Reporter()).folder


@pytest.fixture(scope="module")
def photos(folder: Path) -> list[Path]:
    return make_photos(folder / "photos", 4)


def export_for_torch(model: Any, out: Path, **settings: Any) -> Path:
    """The form that is made soonest."""
    return pl.export(model, out, to="safetensors", reporter=pl.Reporter(), **settings).folder


def check_alike(found: pl.Localization, right: pl.Localization) -> None:
    assert (found.decision, found.method) == (right.decision, right.method)
    assert found.confidence == pytest.approx(right.confidence, abs=1e-4)
    torch.testing.assert_close(found.heat_hw, right.heat_hw, atol=1e-4, rtol=0)
    assert len(found.subjects) == len(right.subjects)
    assert all(a.box.iou(b.box) > 0.999 for a, b in zip(found.subjects, right.subjects, strict=True))


@pytest.mark.parametrize(
    "settings", [{}, {"method": "cls"}, {"method": "features"}, {"second_look": True}, {"tiles": 2}]
)
def test_subjects_are_found_in_the_same_place(
    taught: Path, exported: Path, photos: list[Path], settings: dict[str, Any]
) -> None:
    engine, loaded = pl.load_engine(exported), pl.load(taught)
    assert engine.outputs == ("subject", "logits", "attention", "dense", "features", "boxes")
    for found, right in zip(
        pl.localize(photos, engine, **settings), pl.localize(photos, loaded, **settings), strict=True
    ):
        check_alike(found, right)
        assert found.named is not None
        assert right.named is not None
        assert (found.named.group, found.named.label) == (right.named.group, right.named.label)


def test_classes_and_features_are_the_same(taught: Path, exported: Path, photos: list[Path]) -> None:
    engine, loaded = pl.load_engine(exported), pl.load(taught)
    for found, right in zip(pl.classify(photos, engine), pl.classify(photos, loaded), strict=True):
        assert (found.labels, found.preprocess_fingerprint) == (right.labels, right.preprocess_fingerprint)
        np.testing.assert_allclose(found.probabilities, right.probabilities, atol=1e-5)
    for outputs in ("logits", "features"):
        given = engine.loaded.predict(photos, outputs)
        torch.testing.assert_close(given, loaded.predict(photos, outputs), atol=1e-4, rtol=1e-4)


def test_tables_by_an_exported_model(taught: Path, exported: Path, photos: list[Path], tmp_path: Path) -> None:
    for name, model in (("ours", pl.load_engine(exported)), ("theirs", pl.load(taught))):
        how = pl.CropRunSettings(workers=0)
        pl.classify_photos(photos, tmp_path / f"{name}.jsonl", how=how, model=model, reporter=SILENT)
        for kind in ("pooled", "dense"):
            to = tmp_path / f"{name}-{kind}.npz"
            pl.embed_photos(photos, to, pl.EmbedSettings(features=kind), how, model=model, reporter=SILENT)
            np.testing.assert_array_equal(np.load(to)["features"], pl.embed(photos, model, features=kind))
    for kind in ("pooled", "dense"):
        found, right = (np.load(tmp_path / f"{name}-{kind}.npz")["features"] for name in ("ours", "theirs"))
        np.testing.assert_allclose(found, right, atol=1e-4, rtol=1e-4)
    ours, theirs = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("ours", "theirs")
    )
    for row, right in zip(ours, theirs, strict=True):
        assert (row["group"], row["labels"]) == (right["group"], right["labels"])
        assert row["probabilities"] == pytest.approx(right["probabilities"], abs=1e-5)


def test_a_folder_of_photos_by_an_exported_model(
    taught: Path, exported: Path, photos: list[Path], tmp_path: Path
) -> None:
    told: list[str] = []
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    run_crop(photos, ours, model=pl.load_engine(exported), tell=told.append, workers=1)
    run_crop(photos, theirs, model=taught, workers=1)
    assert f"{taught}: computed by onnxruntime in float32" in told
    for row, right in zip(rows_of(ours), rows_of(theirs), strict=True):
        assert (row["decision"], row["label"]) == (right["decision"], right["label"])
        assert row["boxes"][0]["xyxy"] == pytest.approx(right["boxes"][0]["xyxy"], abs=0.11)
    summary = json.loads((ours / "summary.json").read_text())
    assert re.fullmatch("onnxruntime in float32, [0-9a-f]{16}", summary["settings"]["engine"])
    assert run_crop(photos, ours, model=pl.load_engine(exported)).nothing_to_do
    with pytest.raises(
        pl.PatchlightError, match=r"was started with onnxruntime in float32, \w+, not torch; take the --engine of then"
    ):
        run_crop(photos, ours, model=taught)
    with pytest.raises(pl.PatchlightError, match="was started with torch, not onnxruntime in float32"):
        run_crop(photos, theirs, model=pl.load_engine(exported))


def test_from_the_command_line(exported: Path, taught: Path, photos: list[Path], tmp_path: Path) -> None:
    given = ["--engine", str(exported), "--out", "out", "--workers", "0"]
    ended = patchlight("crop", str(photos[0]), *given, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    ended = patchlight("crop", str(photos[0]), "--model", str(taught), "--out", "out", cwd=tmp_path)
    assert ended.returncode == 2
    assert re.search(r"out: was started with onnxruntime in float32, \w+, not torch; take the --eng", ended.stderr)
    ended = patchlight("classify", str(photos[0]), "--engine", str(exported), "--json", cwd=tmp_path)
    assert json.loads(ended.stdout)["status"] == "ok", ended.stderr
    ended = patchlight("classify", str(photos[0]), "--engine", str(exported), "--out", "t.csv", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    subject = export_for_torch(taught, tmp_path / "subject", outputs=["subject"])
    ended = patchlight("classify", str(photos[0]), "--engine", str(subject), "--out", "u.csv", cwd=tmp_path)
    assert ended.returncode == 2
    assert re.fullmatch("patchlight: .*subject: was exported without logits; export it again with .*\n", ended.stderr)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("crop --engine photos", "photos: holds no exported model; make one with `patchlight export`"),
        ("classify --engine nowhere", "nowhere: holds no exported model; make one with `patchlight export`"),
        ("crop --engine exported --model x", "--engine says which model, as it was exported; leave --model out"),
        ("crop --engine exported --device cuda", "exported is an exported model, which runs on the CPU"),
        ("classify --model exported", "exported: holds an exported model; give it to crop, classify or serve as --eng"),
    ],
)
def test_mistakes_are_one_line(exported: Path, photos: list[Path], given: str, says: str) -> None:
    out = ["--out", "new"] if given.startswith("crop") else []
    ended = patchlight(*given.split(), str(photos[0]), *out, cwd=exported.parent)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert says in ended.stderr
    assert not (exported.parent / "new").exists()


def test_what_was_not_exported_is_asked_for(taught: Path, exported: Path, photos: list[Path], tmp_path: Path) -> None:
    features = pl.load_engine(export_for_torch(taught, tmp_path / "features", outputs=["features"]))
    with pytest.raises(pl.PatchlightError, match="features: was exported without subject; export it again with --out"):
        pl.localize(photos[0], features)
    with pytest.raises(pl.PatchlightError, match="without logits; export it again with --outputs features,logits"):
        pl.classify(photos[0], features)
    subject = pl.load_engine(export_for_torch(taught, tmp_path / "subject", outputs=["subject"]))
    with pytest.raises(pl.PatchlightError, match="without logits; export it again with --outputs subject,boxes,logits"):
        pl.localize(photos[0], subject)
    with pytest.raises(pl.PatchlightError, match="method='tokencut' reads what no exported model gives; use subject"):
        pl.localize(photos[0], pl.load_engine(exported), "tokencut")
    with pytest.raises(pl.PatchlightError, match="subject: was exported without features; export it again with --out"):
        pl.embed(photos[0], subject)
    with pytest.raises(pl.PatchlightError, match="subject: was exported without dense; export it again with --out"):
        pl.embed(photos[0], subject, features="dense")
    with pytest.raises(pl.PatchlightError, match="features='cls' needs the model itself; load that, from"):
        pl.embed(photos[0], subject, features="cls")
    how = pl.CropRunSettings(workers=0)
    pl.embed_photos(photos[:1], tmp_path / "features.npz", None, how, model=features, reporter=SILENT)
    with pytest.raises(pl.PatchlightError, match="was exported without logits; export it again with --out"):
        pl.classify_photos(photos, tmp_path / "none.csv", how=how, model=features, reporter=SILENT)
    with pytest.raises(pl.PatchlightError, match="is an exported model, and look needs the model itself; load that"):
        look(photos[0], pl.load_engine(exported).loaded)


def test_a_model_that_was_not_taught_has_other_methods(folder: Path, photos: list[Path], tmp_path: Path) -> None:
    vit = tiny_vit()
    randomize(vit, 1)
    model = pl.load(save(vit, tmp_path / "model"))
    engine = pl.load_engine(export_for_torch(model, tmp_path / "out", outputs=["attention"]))
    check_alike(pl.localize(photos[0], engine), pl.localize(photos[0], model, "cls"))
    logits = pl.load_engine(export_for_torch(model, tmp_path / "logits"))
    with pytest.raises(pl.PatchlightError, match="was not taught to find subjects; export it with --outputs attention"):
        pl.localize(photos[0], logits)


def test_a_model_of_a_fixed_size_is_given_photos_of_that(taught: Path, photos: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="needs the extra openvino")
    outputs = ["subject", "logits"]
    made = pl.export(taught, tmp_path / "out", to="openvino", size=48, outputs=outputs, reporter=pl.Reporter())
    found = pl.localize(photos[0], pl.load_engine(made.folder))
    check_alike(found, pl.localize(photos[0], pl.load(taught, image_size=48)))


def test_a_model_that_takes_photos_is_refused(taught: Path, photos: list[Path], tmp_path: Path) -> None:
    made = pl.export(taught, tmp_path / "out", to="torch", with_preprocess=True, reporter=pl.Reporter())
    with pytest.raises(pl.PatchlightError, match="out: prepares photos itself, which is done here already; export it"):
        pl.classify(photos[0], pl.load_engine(made.folder))


def test_a_missing_runtime_is_one_line(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(pl.PatchlightError, match=r"this needs onnxruntime; pip install 'patchlight\[export\]'"):
        pl.load_engine(exported)


def test_a_damaged_note_is_one_line(exported: Path, photos: list[Path], tmp_path: Path) -> None:
    for path in exported.iterdir():
        (tmp_path / path.name).symlink_to(path)
    manifest = json.loads((exported / "engine.json").read_text())
    del manifest["model"]["patchlight"]["preprocess"]
    (tmp_path / "engine.json").unlink()
    (tmp_path / "engine.json").write_text(json.dumps(manifest))
    with pytest.raises(pl.PatchlightError, match=r"engine\.json: is damaged .*; export the model again"):
        pl.localize(photos[0], pl.load_engine(tmp_path))


def test_the_server_answers_by_the_exported_form(
    taught: Path, exported: Path, photos: list[Path], tmp_path: Path
) -> None:
    served = pytest.importorskip("served")
    with served.serving(str(taught), exported=[exported]) as running:
        photo = running.photo(photos[0].read_bytes(), "photo.jpg")
        answer = running.json(f"/photos/{photo}/localize")
        (seen,) = running.engine._seen.values()
        assert not seen.whole, "the exported form gave it, and nothing else was computed"
        right = pl.localize(photos[0], pl.load(taught))
        assert answer["decision"] == right.decision
        assert answer["confidence"] == pytest.approx(right.confidence, abs=1e-4)
        assert running.json(f"/photos/{photo}/attention")["layer"] == 2
        (seen,) = running.engine._seen.values()
        assert seen.whole
        assert running.json(f"/photos/{photo}/localize") == answer
        assert running.json(f"/photos/{photo}/localize?method=tokencut")["method"] == "tokencut"


def test_the_server_predicts_by_the_exported_form(
    taught: Path, exported: Path, photos: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    from patchlight.serve.engine import Engine as Server
    from patchlight.serve.predict_routes import prepared

    loaded, content = pl.load(taught), photos[0].read_bytes()
    server = Server([str(taught)], exported=[exported])
    server.start()
    server.wait()
    served, run = server.model(0), pl.Engine.__call__
    calls: list[int] = []
    monkeypatch.setattr(pl.Engine, "__call__", lambda self, images: calls.append(1) or run(self, images))
    before = list(served.took)
    try:
        image_CHW, view, _ = prepared(served.loaded, "boxes", content, 10**8)
        found = server.predict(served, "boxes", image_CHW, view).result()
        assert len(calls) == 1
        check_alike(found, pl.localize(content, loaded))
        image_CHW, _, _ = prepared(served.loaded, "classes", content, 10**8)
        logits_K = server.predict(served, "classes", image_CHW).result()
        torch.testing.assert_close(logits_K, loaded.predict(content), atol=1e-4, rtol=1e-4)
        features_D = server.predict(served, "features", image_CHW).result()
        torch.testing.assert_close(features_D, loaded.predict(content, "features"), atol=1e-4, rtol=1e-4)
        assert len(calls) == 3
        assert len(served.took) == len(before) + 3
        # Of a size that the engine does not take, the model itself says it.
        assert server.predict(served, "features", torch.zeros(3, 8, 48)).result().shape == features_D.shape
        assert len(calls) == 3
    finally:
        server.close()


def test_an_exported_form_of_no_served_model_is_refused(exported: Path, tmp_path: Path) -> None:
    served = pytest.importorskip("served")
    other = save_model(tmp_path / "other", seed=3)
    with (
        pytest.raises(pl.PatchlightError, match=r"was exported from .*taught, and from no model that is served"),
        served.serving(str(other), exported=[exported]),
    ):
        pass


def test_a_stop_is_heard_after_engines_have_gone(taught: Path, tmp_path: Path) -> None:
    """Of two cores of OpenVINO's, the second to go left the process a stack for signals that was freed."""
    pytest.importorskip("openvino", reason="needs the extra openvino")
    made = pl.export(taught, tmp_path / "made", to="openvino", outputs=["subject"], reporter=pl.Reporter()).folder
    script = (
        "import gc, signal, sys, patchlight as pl\n"
        "from patchlight.signals import asked_to_stop\n"
        "one, other = (pl.load_engine(sys.argv[1]) for _ in range(2))\n"
        "del one; gc.collect(); del other; gc.collect()\n"
        "with asked_to_stop() as asked: signal.raise_signal(signal.SIGINT)\n"
        "print(asked.signal)\n"
    )
    done = run_warm(["-c", script, made])
    assert (done.returncode, done.stdout) == (0, "2\n")
