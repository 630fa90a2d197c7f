"""An exported model gives what the model gives, at every size that it takes, and says what it takes."""

import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import patchlight as pl
from command_line import patchlight
from models_at_random import redraw
from patchlight.config import PreprocessConfig
from patchlight.deploy import bench as benching
from patchlight.deploy import export as exporting
from patchlight.deploy import proof as proving
from patchlight.deploy.graph import Preparation
from patchlight.images.preprocess import Preprocess

pytest.importorskip("onnx", reason="needs the extra export")
pytest.importorskip("onnxruntime", reason="needs the extra export")
pytest.importorskip("onnxscript", reason="needs the extra export")

DEMO = Path(__file__).parents[3] / "demo"

TINY: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "width": 24,
    "depth": 2,
    "num_heads": 2,
    "num_classes": 5,
}
MODELS: dict[str, Any] = {
    "learned, registers": pl.ViTConfig(**TINY, num_registers=2),
    "sines, convolutions": pl.ViTConfig(**TINY, position="sincos2d", pooling="mean", stem="convolutions"),
    "rotary, distilled, gated": pl.ViTConfig(
        **TINY, position="rope2d", rope_coordinates="centred", distill_token=True, mlp="swiglu", layer_scale=0.1
    ),
    "mixed rotary": pl.ViTConfig(**TINY, position="rope_mixed"),
    "relative table": pl.ViTConfig(**TINY, position="relative_bias"),
    "relative MLP": pl.ViTConfig(**TINY, position="relative_mlp"),
    "pooled by attention": pl.ViTConfig(**TINY, pooling="attention", class_token=False),
    "hybrid": pl.ViTConfig(**TINY, resnet=(1,)),
    "Swin": pl.SwinConfig(image_size=32, width=12, depths=(2, 2), num_heads=(2, 3), window_size=4, num_classes=5),
    "Swin V2": pl.SwinConfig(
        image_size=32, width=12, depths=(2, 2), num_heads=(2, 3), window_size=4, num_classes=5, v2=True
    ),
    "ConvNeXt": pl.ConvNeXtConfig(image_size=32, widths=(8, 12), depths=(1, 2), num_classes=5, grn=True),
}

ALIKE = ("sines, convolutions", "mixed rotary", "relative table", "relative MLP", "pooled by attention", "hybrid")
"""What differs in these lies in one block or around it, so that one block of them tells what an exporter makes of it:
each takes seconds."""


def loaded_of(config: Any, tmp_path: Path) -> pl.Loaded:
    model = {pl.ViTConfig: pl.ViT, pl.SwinConfig: pl.Swin, pl.ConvNeXtConfig: pl.ConvNeXt}[type(config)](config).eval()
    redraw(model)
    names = [f"class {number}" for number in range(config.num_classes)]
    return pl.load(pl.save(model, tmp_path / "model", labels=names))


@pytest.fixture
def tiny(tmp_path: Path) -> pl.Loaded:
    return loaded_of(MODELS["learned, registers"], tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_onnx_gives_the_same_at_every_size(name: str, tmp_path: Path) -> None:
    config = dataclasses.replace(MODELS[name], depth=1) if name in ALIKE else MODELS[name]
    loaded = loaded_of(config, tmp_path)
    asked = ["logits", "features", "dense"] + ["attention"] * (name == "learned, registers")
    made = pl.export(loaded, tmp_path / "out", outputs=asked)
    assert made.proof.holds
    batches, sizes = {shape[0] for shape in made.proof.sizes}, {shape[2:] for shape in made.proof.sizes}
    assert batches == {1, 2, 3, 5}
    assert (32, 32) in sizes, "the model's own"
    assert len(sizes) == (1 if name.startswith("Swin") else 4)
    engine = pl.load_engine(made.folder)
    image = torch.randn(4, 3, 32, 32)
    found = engine(image.numpy())
    assert list(found) == asked
    for output, expected in {
        "logits": loaded.model(image),
        "features": loaded.model.features(image),
        "dense": loaded.model.intermediates(image, -1, dense=True)[0],
    }.items():
        if output == "dense" and not isinstance(loaded.model, pl.ConvNeXt):
            expected = loaded.model.tokens(image)[:, getattr(loaded.config, "num_prefix", 0) :].mT.reshape(
                expected.shape
            )
        np.testing.assert_allclose(found[output], expected.detach().numpy(), atol=1e-5)
    if "attention" in asked:
        rows_BAN = pl.attention(loaded.model, image, layers=-1, queries="cls").weights[0, :, :, 0]
        patches_BAhw = rows_BAN[:, :, loaded.config.num_prefix :].unflatten(2, (4, 4))
        np.testing.assert_allclose(found["attention"], patches_BAhw.detach().numpy(), atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_what_is_left_out_of_the_last_block_changes_nothing(name: str, tmp_path: Path) -> None:
    """Without "dense" a class token's row of it is all that is computed."""
    loaded, image = loaded_of(MODELS[name], tmp_path), torch.randn(2, 3, 32, 32)
    for output, expected in (("logits", loaded.model(image)), ("features", loaded.model.features(image))):
        (found,) = exporting.Graph(loaded, (output,)).eval()(image)  # type: ignore[arg-type]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("to", "precision"),
    [
        *(("torch", "float32"), ("torch", "bfloat16"), ("safetensors", "float16"), ("triton", "float32")),
        *(("onnx", "float16"), ("onnx", "int8"), ("openvino", "bfloat16"), ("openvino", "int8")),
    ],
)
def test_every_form_and_precision(to: Any, precision: Any, tiny: pl.Loaded, tmp_path: Path) -> None:
    if to == "openvino":
        pytest.importorskip("openvino", reason="needs the extra openvino")
        if precision == "int8":
            pytest.importorskip("nncf", reason="needs the extra openvino")
    made = pl.export(tiny, tmp_path / "out", to=to, precision=precision, outputs=["features"])
    proof = json.loads((made.folder / "proof.json").read_text())
    assert proof["holds"]
    assert proof["inputs"] == 32
    assert proof["versions"]["torch"] == torch.__version__
    assert 0 < proof["outputs"]["features"]["largest"] < 0.5 or precision == "float32"
    assert proof["seconds"].keys() == {"exported", "torch"}
    assert tiny.model.norm.weight.dtype == torch.float32, "the model itself stays what it was"
    names = {path.name for path in made.folder.iterdir()}
    assert {"engine.json", "preprocess.json", "labels.json", "proof.json", "README.md"} <= names
    if to == "triton":
        assert "dims: [ 3, -1, -1 ]" in (made.folder / "config.pbtxt").read_text()


def bare_environment(folder: Path) -> Path:
    """The Python of a virtual environment that has the engines and what they need, and nothing else of ours."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in ENGINES:
        here = importlib.util.find_spec(name)
        if here is not None and here.submodule_search_locations is not None:
            own = Path(next(iter(here.submodule_search_locations)))
            libraries = own.with_name(f"{ {'PIL': 'pillow'}.get(name, name) }.libs")
            for path in (own, *([libraries] if libraries.exists() else [])):
                (site / path.name).symlink_to(path)
    return folder / "bin" / "python"


ENGINES = (
    *("numpy", "PIL", "onnxruntime", "flatbuffers", "google", "packaging", "sympy"),
    *("openvino", "openvino_telemetry"),
)


def test_the_readme_runs_in_a_bare_environment(tiny: pl.Loaded, tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="needs the extra openvino")
    python = bare_environment(tmp_path / "bare")
    for name in ("torch", "patchlight"):
        barred = subprocess.run([python, "-c", f"import {name}"], cwd=tmp_path, capture_output=True, check=False)
        assert barred.returncode == 1, "it is not bare"
    sideways = Image.new("RGB", (90, 60), "red")
    exif = sideways.getexif()
    exif[0x0112] = 6
    for to, photos in (("onnx", True), ("openvino", False)):
        folder = pl.export(tiny, tmp_path / to, to=to, with_preprocess=photos).folder
        sideways.save(folder / "photo.jpg", exif=exif)
        code = (folder / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
        run = [python, "-c", code + "print(found[0].tolist())"]
        ended = subprocess.run(run, cwd=folder, capture_output=True, text=True, check=False)
        shapes, numbers = ended.stdout.splitlines() or [ended.stderr, "[]"]
        assert shapes == "{'logits': (1, 5)}"
        image = tiny.preprocess(folder / "photo.jpg")[0][None] if photos else torch.zeros(1, 3, 32, 32)
        np.testing.assert_allclose(json.loads(numbers), tiny.model(image).detach().numpy(), atol=1e-5)


def test_what_tritons_server_is_told_is_what_it_asks_for() -> None:
    """By the schema of its own client, of which everything but this one file needs a server."""
    client = importlib.util.find_spec("tritonclient")
    if client is None or client.submodule_search_locations is None:
        pytest.skip("tritonclient is not installed")
    from google.protobuf import text_format

    path = Path(next(iter(client.submodule_search_locations))) / "grpc" / "model_config_pb2.py"
    spec = importlib.util.spec_from_file_location("model_config_pb2", path)
    assert spec is not None
    assert spec.loader is not None
    schema = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(schema)
    for size, prepare, takes, heat in (
        (None, None, [3, -1, -1], [-1, -1]),
        ([32, 32], None, [3, 32, 32], [-1, -1]),
        ([32, 32], "photos", [-1, -1, 3], [1, -1, -1]),
    ):
        graph: Any = SimpleNamespace(prepare=prepare, outputs=("subject", "boxes"))
        text = exporting._triton_config("mine", graph, {"size": size, "channels": 3})
        config = text_format.Parse(text, schema.ModelConfig())
        assert (config.name, config.backend) == ("mine", "onnxruntime")
        assert [(each.name, list(each.dims)) for each in config.input] == [("image", takes)]
        assert config.input[0].data_type == (schema.TYPE_FP32 if prepare is None else schema.TYPE_UINT8)
        assert [each.name for each in config.output] == ["subject", "boxes"]
        assert list(config.output[0].dims) == heat
        assert config.HasField("dynamic_batching") == (config.max_batch_size > 0) == (prepare is None)


def test_photos_are_prepared_by_the_same_numbers() -> None:
    draw = np.random.default_rng(0)
    for settings in (
        {},
        {"crop_pct": 0.875, "interpolation": "bilinear"},
        {"interpolation": "lanczos", "crop": "floor", "resize_size": (80, 80)},
        {"resize": "squash"},
        {"image_size": (48, 80)},
        {"resize_in": "floats"},
    ):
        config = PreprocessConfig(**{"image_size": (64, 64), **settings})
        ours, theirs = Preparation(config), Preprocess(config)
        for size in [(100, 130), (130, 101), (64, 64), (40, 50), (90, 400), (400, 90), (300, 100), (2, 3)]:
            photo = draw.integers(0, 256, (*size, 3), dtype=np.uint8)
            expected = theirs(photo)[0]
            torch.testing.assert_close(ours(torch.from_numpy(photo))[0], expected, atol=2e-6, rtol=0)


def test_an_exported_model_takes_photos(tiny: pl.Loaded, tmp_path: Path) -> None:
    made = pl.export(tiny, tmp_path / "out", with_preprocess=True)
    engine = pl.load_engine(made.folder)
    photo = np.random.default_rng(0).integers(0, 256, (70, 90, 3), dtype=np.uint8)
    expected = tiny.model(tiny.preprocess(photo)[0][None]).detach().numpy()
    np.testing.assert_allclose(engine(photo)["logits"], expected, atol=1e-5)
    with pytest.raises(pl.PatchlightError, match=r"takes one photo \(H, W, 3\) uint8, not \(1, 3, 32, 32\) float32"):
        engine(np.zeros((1, 3, 32, 32), np.float32))


def test_the_subject_is_found_in_the_same_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = pl.export("default", tmp_path / "out", outputs=["subject", "logits"], size=128)
    assert set(made.proof.outputs) == {"subject", "logits", "boxes"}, "a subject's box rests on what its patches say"
    assert made.proof.same_box == pytest.approx(1, abs=1e-3)
    assert made.proof.same_class == 1
    # The lines of its README find the box that `localize` finds.
    photo = pl.decode(DEMO / "rocket.jpg")
    right = pl.localize(photo)
    image_CHW, _ = pl.load("default").preprocess(photo)
    blocks = re.findall("```python\n(.*?)```", (made.folder / "README.md").read_text(), re.DOTALL)
    code = "".join(blocks).replace("image = np.zeros((1, 3, 128, 128), np.float32)", "image = given_image")
    monkeypatch.chdir(made.folder)
    found: dict[str, Any] = {"given_image": image_CHW[None].numpy()}
    exec(compile(code, "README.md", "exec"), found)
    x0, y0, x1, y1 = 128 * (found["own"] @ found["boxes"] / found["own"].sum())
    assert right.view.to_source(pl.Box(x0, y0, x1, y1)).iou(right.subjects[0].box) > 0.999
    with pytest.raises(pl.PatchlightError, match=r"takes images \(B, 3, 128, 128\), not \(1, 3, 256, 256\)"):
        pl.load_engine(made.folder)(np.zeros((1, 3, 256, 256), np.float32))


def test_where_the_proof_fails_nothing_is_written(
    tiny: pl.Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    impossible = proving.Limits(largest=-1, cosine=1, same_class=1, same_box=1)
    monkeypatch.setitem(proving.LIMITS, "float32", impossible)
    with pytest.raises(
        pl.PatchlightError, match=r"out: not written, for its proof fails: logits differs by .* than -1"
    ):
        pl.export(tiny, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_a_wrong_model_fails_its_proof(tiny: pl.Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if an engine got one matrix wrong."""
    save = exporting._save_onnx

    def spoilt(program: Any, graph: Any, path: Path) -> None:
        save(program, graph, path)
        import onnx
        from onnx import numpy_helper

        model = onnx.load(path)
        matrix = next(each for each in model.graph.initializer if len(each.dims) == 2)
        matrix.CopyFrom(numpy_helper.from_array(1.01 * numpy_helper.to_array(matrix), matrix.name))
        onnx.save(model, path)

    monkeypatch.setattr(exporting, "_save_onnx", spoilt)
    with pytest.raises(pl.PatchlightError, match="its proof fails"):
        pl.export(tiny, tmp_path / "out")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"outputs": ["heat"]}, "outputs='heat' is not known; the outputs are logits, features"),
        ({"outputs": ["logits", "logits"]}, "names one twice"),
        ({"outputs": ["subject"]}, "was not trained to find subjects; leave subject out"),
        ({"to": "tflite"}, "to='tflite' is not known; it is one of onnx, openvino, torch"),
        ({"precision": "int4"}, "precision='int4' is not known"),
        ({"precision": "bfloat16"}, "onnxruntime does not compute bfloat16"),
        ({"to": "torch", "precision": "int8"}, "int8 is for onnx, openvino and triton"),
        ({"size": 33}, "patches of 8x8 do not divide"),
        ({"size": 0}, "size=0 should be a whole number above 0, or two of them"),
        ({"size": (32,)}, "size=(32,) should be a whole number above 0, or two of them"),
        ({"size": "32"}, "size='32' should be a whole number above 0"),
        ({"size": 64, "to": "safetensors"}, "keeps the model's size; load the model with image_size=(64, 64)"),
        ({"size": 64, "with_preprocess": True}, "photos are prepared at 32x32; load the model with image_size"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    settings: dict[str, Any], says: str, tiny: pl.Loaded, tmp_path: Path
) -> None:
    with pytest.raises(pl.PatchlightError, match=re.escape(says)):
        pl.export(tiny, tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


def test_a_folder_is_written_over_only_if_asked(tiny: pl.Loaded, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(pl.PatchlightError, match="out: holds something else than an exported model; name another"):
            pl.export(tiny, out, to="torch", overwrite=overwrite)
    with pytest.raises(pl.PatchlightError, match="model: holds something else than an exported model"):
        pl.export(tiny, tmp_path / "model", to="torch", overwrite=True)
    (tmp_path / "link").symlink_to(out)
    for name, kind in (("out/mine.txt", "file"), ("link", "link")):
        with pytest.raises(pl.PatchlightError, match=f"{name}: is a {kind}; name a folder"):
            pl.export(tiny, tmp_path / name, to="torch", overwrite=True)
    assert [(path.name, path.read_text()) for path in out.iterdir()] == [("mine.txt", "mine")]
    with pytest.raises(pl.PatchlightError, match="holds no exported model; make one with `patchlight export`"):
        pl.load_engine(out)


def test_an_exported_model_is_replaced_whole(tiny: pl.Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = pl.export(tiny, tmp_path / "out", to="safetensors", outputs=["features"]).folder
    before = (out / "proof.json").read_text()
    with pytest.raises(pl.PatchlightError, match="out: is there already; name another folder, or use overwrite=True"):
        pl.export(tiny, out, to="safetensors")
    pl.export(tiny, out, to="safetensors", outputs=["dense"], overwrite=True)
    assert pl.load_engine(out).outputs == ("dense",)
    after = (out / "proof.json").read_text()
    assert after != before
    replace = Path.replace

    def full(self: Path, target: Path) -> Path:
        if target == out and "old" not in self.name:
            raise OSError(28, "No space left on device")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(pl.PatchlightError, match=r"out: cannot be written \(No space left on device\)"):
        pl.export(tiny, out, to="safetensors", overwrite=True)
    assert (out / "proof.json").read_text() == after
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
    monkeypatch.chdir(out)
    with pytest.raises(pl.PatchlightError, match="is the folder that you are in; leave it first"):
        pl.export(tiny, ".", to="safetensors", overwrite=True)


def test_numbers_that_are_none_fail_the_proof(tiny: pl.Loaded, tmp_path: Path) -> None:
    """Wherever they come: a maximum takes no notice of a NaN behind it."""
    engine = pl.load_engine(pl.export(tiny, tmp_path / "out", to="safetensors").folder)
    run, calls = engine._run, iter(range(1000))
    engine._run = lambda images: [each * (np.nan if next(calls) == 7 else 1) for each in run(images)]
    graph = exporting.Graph(tiny, ("logits",)).eval()
    proof = proving.prove(engine, graph, tiny, proving.some_photos(()))
    assert proof.failure == "logits is not finite for every input"


def test_the_model_stays_as_it_was(tiny: pl.Loaded, tmp_path: Path) -> None:
    tiny.model.train()
    before = {name: value.clone() for name, value in tiny.model.state_dict().items()}
    pl.export(tiny, tmp_path / "out", to="torch", precision="bfloat16")
    assert tiny.model.training
    assert all(torch.equal(value, before[name]) for name, value in tiny.model.state_dict().items())


def test_a_missing_engine_is_one_line(tiny: pl.Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(pl.PatchlightError, match=r"needs onnxscript; pip install 'patchlight\[export\]'"):
        pl.export(tiny, tmp_path / "out")


def test_damage_is_one_line(tiny: pl.Loaded, tmp_path: Path) -> None:
    folder = pl.export(tiny, tmp_path / "out").folder
    (folder / "model.onnx").write_bytes(b"no model")
    with pytest.raises(pl.PatchlightError, match=r"model\.onnx: cannot be loaded \(.*\); export the model again"):
        pl.load_engine(folder)
    (folder / "model.onnx").unlink()
    with pytest.raises(pl.PatchlightError, match=r"model\.onnx: is missing"):
        pl.load_engine(folder)


def test_from_the_command_line(tiny: pl.Loaded, tmp_path: Path) -> None:
    Image.new("RGB", (60, 50), "red").save(tmp_path / "red.png")
    ended = patchlight("export", "model", "--out", "out", "--outputs", "features", "--photos", "red.png", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "32 inputs of" in ended.stdout
    assert ended.stdout.endswith("out\n")
    timed = patchlight("bench", "out", "red.png", "--rounds", "2", "--json", cwd=tmp_path)
    assert [each["engine"] for each in json.loads(timed.stdout)["engines"]] == ["onnx"], timed.stderr
    again = patchlight("export", "model", "--out", "out", cwd=tmp_path)
    assert again.returncode == 2
    assert again.stderr.endswith("patchlight: out: is there already; name another folder, or use --overwrite\n")
    both = patchlight("export", "model", "--out", "new", "--int8", "--fp16", cwd=tmp_path)
    assert (both.returncode, both.stderr) == (
        2,
        "patchlight: --int8, --fp16 and --bf16 exclude one another; take one\n",
    )


def test_bench_times_what_is_installed(tiny: pl.Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    forms = [("onnxruntime", "onnx", "float32"), ("onnxruntime", "onnx", "bfloat16"), ("nowhere", "onnx", "int8")]
    monkeypatch.setattr(benching, "FORMS", forms)
    preparing, timings = benching.bench(tiny, rounds=2)
    assert preparing > 0
    assert [(each.engine, each.precision, each.seconds is not None, each.said) for each in timings] == [
        ("torch", "float32", True, ""),
        ("onnxruntime", "float32", True, ""),
        ("onnxruntime", "bfloat16", False, timings[2].said),
        ("nowhere", "int8", False, "not installed"),
    ]
    assert "does not compute bfloat16" in timings[2].said
