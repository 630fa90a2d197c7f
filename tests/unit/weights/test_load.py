"""What `load` makes of a checkpoint beyond its numbers: settings, where they came from, what it says."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from models_at_random import tiny_vit
from patchlight.config import PreprocessConfig
from patchlight.errors import PatchlightError, PatchlightWarning
from patchlight.models.vit import ViT
from patchlight.weights.catalog import CATALOGUE, ENTRIES
from patchlight.weights.convert import convert_to
from patchlight.weights.load import load
from patchlight.weights.read import CheckpointError
from patchlight.weights.save import save
from patchlight.weights.vit.names import TIMM

IMAGE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def write_timm(model: ViT, path: Path) -> Path:
    names = [row for row in TIMM if row[0] != "fc_norm."]
    save_file({key: value.contiguous() for key, value in convert_to(model.state_dict(), tuple(names)).items()}, path)
    return path


def test_settings_say_where_they_came_from(tmp_path: Path) -> None:
    model = tiny_vit(num_registers=2, layer_scale=0.1, qk_norm=True)
    loaded = load(write_timm(model, tmp_path / "x.safetensors"), mlp="gelu_tanh")
    assert loaded.why["width"] == loaded.why["num_registers"] == loaded.why["num_heads"] == "shapes"
    assert loaded.why["mlp"] == "you"
    assert loaded.why["norm_eps"] == "convention of timm"
    assert loaded.config.num_heads == 2
    assert loaded.config.mlp == "gelu_tanh"


def test_what_is_guessed_is_a_warning_and_a_note(tmp_path: Path) -> None:
    file = write_timm(tiny_vit(width=128), tmp_path / "x.safetensors")
    with pytest.warns(PatchlightWarning, match="leave open num_heads=2, mlp='gelu', norm_eps=1e-06, pooling='cls'"):
        loaded = load(file)
    assert loaded.config.num_heads == 2
    assert any("leave open num_heads=2, mlp='gelu'" in note for note in loaded.notes)
    with pytest.warns(PatchlightWarning, match="leave open mlp='gelu', norm_eps=1e-06: these"):
        load(file, num_heads=2, pooling="cls")
    sure = load(file, num_heads=2, mlp="gelu", norm_eps=1e-6, pooling="cls")
    assert not any("leave open" in note for note in sure.notes)


@pytest.mark.parametrize(
    ("mlp", "activation", "words"),
    [
        ("gelu", "relu", "act_layer='relu', which is not supported"),
        ("gelu", "silu", "act_layer='silu' in an MLP without a gate, which is not supported"),
        ("swiglu", "silu", None),
        ("gelu_tanh", "gelu_tanh", None),
    ],
)
def test_an_activation_of_timms_that_we_do_not_have_is_named(
    mlp: Any, activation: str, words: str | None, tmp_path: Path
) -> None:
    write_timm(tiny_vit(mlp=mlp), tmp_path / "model.safetensors")
    named = {
        "architecture": "vit_tiny_patch16_224",
        "model_args": {"act_layer": activation, "num_heads": 2, "depth": 3},
    }
    (tmp_path / "config.json").write_text(json.dumps(named))
    if words is None:
        assert load(tmp_path, image_size=32).config.mlp == mlp
        return
    with pytest.raises(CheckpointError, match=f"config.json says {words}$"):
        load(tmp_path, image_size=32)


def test_the_model_is_ready_to_use(tmp_path: Path) -> None:
    loaded = load(write_timm(tiny_vit(), tmp_path / "x.safetensors"), num_heads=2)
    assert not loaded.model.training
    assert all(p.dtype == torch.float32 and p.requires_grad for p in loaded.model.parameters())
    assert torch.equal(loaded.model(IMAGE), tiny_vit()(IMAGE))
    loaded.model(IMAGE).sum().backward()
    half = load(tmp_path / "x.safetensors", num_heads=2, dtype=torch.bfloat16).model
    assert half(IMAGE).dtype == torch.bfloat16


def test_training_a_loaded_model_does_not_reach_the_file(tmp_path: Path) -> None:
    path = write_timm(tiny_vit(), tmp_path / "x.safetensors")
    before = path.read_bytes()
    model = load(path, num_heads=2).model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert path.read_bytes() == before
    path.unlink()
    torch.testing.assert_close(model.class_token, tiny_vit().class_token + 1.0)


def test_another_number_of_classes_is_a_fresh_head_and_said(tmp_path: Path) -> None:
    path = write_timm(tiny_vit(), tmp_path / "x.safetensors")
    loaded = load(path, num_heads=2, num_classes=3)
    assert loaded.model(IMAGE).shape == (2, 3)
    assert "a fresh head of 3 classes in place of its 5 classes" in loaded.notes
    assert torch.equal(loaded.model.tokens(IMAGE), tiny_vit().tokens(IMAGE))
    save(tiny_vit(head_hidden=9), tmp_path / "hidden")
    assert load(tmp_path / "hidden", num_classes=0).model(IMAGE).shape == (2, 24)
    headless = load(path, num_heads=2, num_classes=0)
    assert "no head in place of its 5 classes" in headless.notes
    assert torch.equal(headless.model(IMAGE), tiny_vit().features(IMAGE))


def test_what_tensors_leave_open_is_asked_for(tmp_path: Path) -> None:
    """timm's residual post-norm has the names and shapes of its ordinary ViT."""
    changes = {"class_token": False, "pooling": "mean", "qkv_bias": False}
    after = tiny_vit(**changes, block_norm="after")
    path = write_timm(after, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="do not tell whether blocks normalise before or after each branch; say"):
        load(path, num_heads=2)
    told = {"num_heads": 2, "prefix_positions": "none"}
    assert torch.equal(load(path, **told, block_norm="after").model(IMAGE), after(IMAGE))
    before = load(path, **told, block_norm="before")
    assert not torch.allclose(before.model(IMAGE), after(IMAGE), atol=1e-2)


def test_attention_pooling_can_be_done_without(tmp_path: Path) -> None:
    model = tiny_vit(class_token=False, pooling="attention", num_classes=0)
    path = write_timm(model, tmp_path / "x.safetensors")
    assert load(path, num_heads=2).config.pooling == "attention"
    loaded = load(path, num_heads=2, pooling="mean")
    assert "left out its attention pooling, which is not read with pooling='mean'" in loaded.notes
    torch.testing.assert_close(loaded.model(IMAGE), model.features(IMAGE, pooling="mean"))


def test_a_loaded_model_moves_and_trains_with_stochastic_depth(tmp_path: Path) -> None:
    path = write_timm(tiny_vit(), tmp_path / "x.safetensors")
    model = load(path, num_heads=2, drop_path=0.5).model.to("cpu", torch.float64).train()
    assert [block.residual1.drop_path.item() for block in model.blocks] == pytest.approx([0, 0.25, 0.5])
    model(IMAGE.double()).sum().backward()


@pytest.mark.parametrize("position", ["learned", "relative_bias"])
def test_another_image_size_resamples_for_good_and_is_said(position: str, tmp_path: Path) -> None:
    model = tiny_vit(position=position)
    path = write_timm(model, tmp_path / "x.safetensors")
    loaded = load(path, num_heads=2, image_size=(48, 40), block_norm="before")
    assert "resampled positions from 32x32 to 48x40" in loaded.notes
    image = torch.randn(1, 3, 48, 40)
    torch.testing.assert_close(loaded.model(image), model(image), atol=1e-5, rtol=1e-5)
    assert loaded.config.grid == (6, 5)


def test_an_image_size_that_fits_the_table_is_its_shape_unless_a_config_says_otherwise(tmp_path: Path) -> None:
    oblong = tiny_vit(image_size=(16, 64))
    path = write_timm(oblong, tmp_path / "x.safetensors")
    loaded = load(path, num_heads=2, image_size=(16, 64))
    assert torch.equal(loaded.model.positions.table, oblong.positions.table)
    assert loaded.config.grid == (2, 8)
    save(tiny_vit(), tmp_path / "square", layout="transformers")
    config = json.loads((tmp_path / "square" / "config.json").read_text())
    del config["patchlight"]
    (tmp_path / "square" / "config.json").write_text(json.dumps(config))
    loaded = load(tmp_path / "square", image_size=(16, 64))
    assert "resampled positions from 32x32 to 16x64" in loaded.notes
    assert not torch.equal(loaded.model.positions.table, tiny_vit().positions.table)


def test_preprocessing_follows_the_image_size(tmp_path: Path) -> None:
    save(tiny_vit(), tmp_path / "m", preprocess=PreprocessConfig(image_size=(32, 32), resize_size=(40, 40)))
    loaded = load(tmp_path / "m", image_size=64)
    assert loaded.preprocess.config == PreprocessConfig(image_size=(64, 64), resize_size=(80, 80))
    assert "photos are prepared for 64x64 instead of 32x32" in loaded.notes


def test_a_checkpoint_without_positions_needs_a_word(tmp_path: Path) -> None:
    path = write_timm(tiny_vit(position="none"), tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="no positions are in it; if it has none, pass position='none'"):
        load(path, num_heads=2)
    assert torch.equal(load(path, num_heads=2, position="none").model(IMAGE), tiny_vit(position="none")(IMAGE))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "float16"}, "dtype='float16' is not a floating-point type"),
        ({"dtype": torch.int64}, "is not a floating-point type"),
        ({"device": "nowhere"}, "device='nowhere' does not compute here"),
        ({"preprocess": {}}, "preprocess is a dict; give a PreprocessConfig"),
    ],
)
def test_mistakes_in_the_call_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PatchlightError, match=message):
        load("anything", **arguments)
    for nothing in ("", None, 5):
        with pytest.raises(PatchlightError, match="is not a source"):
            load(nothing)


def test_partial_loads_are_never_silent(tmp_path: Path) -> None:
    state = convert_to(tiny_vit().state_dict(), tuple(row for row in TIMM if row[0] != "fc_norm."))
    del state["blocks.1.mlp.fc2.bias"]
    state["surprise"] = torch.zeros(2)
    state["blocks.2.norm1.weight"] = torch.zeros(7)
    save_file({key: value.contiguous() for key, value in state.items()}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError) as raised:
        load(tmp_path / "x.safetensors", num_heads=2)
    for part in ("missing: blocks.1.mlp.down.bias", "unexpected: surprise", "of another shape: blocks.2.norm1.weight"):
        assert part in str(raised.value)
    loaded = load(tmp_path / "x.safetensors", num_heads=2, strict=False)
    assert "missing: blocks.1.mlp.down.bias" in loaded.notes
    assert (loaded.model.blocks[1].mlp.down.bias == 0).all()
    assert torch.isfinite(loaded.model(IMAGE)).all()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_heads": 5}, "not divisible by num_heads=5"),
        ({"width": 48}, "width=48 was asked for, but its tensors have 24"),
        ({"num_head": 2}, "did you mean 'num_heads'"),
        ({"num_heads": 2, "mlp": "relu"}, "mlp='relu' should be one of"),
        ({"num_heads": 2, "image_size": 33}, "do not divide"),
    ],
)
def test_overrides_that_cannot_be_are_named(overrides: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_timm(tiny_vit(), tmp_path / "x.safetensors")
    with pytest.raises(PatchlightError, match=message):
        load(path, **overrides)


def test_another_preprocessing_than_its_own_is_named(tmp_path: Path) -> None:
    own = PreprocessConfig(image_size=(32, 32), crop_pct=0.9, interpolation="bicubic")
    save(tiny_vit(), tmp_path / "m", preprocess=own)
    assert load(tmp_path / "m").preprocess.config == own
    other = PreprocessConfig(image_size=(32, 32), crop_pct=0.9, interpolation="bilinear")
    loaded = load(tmp_path / "m", preprocess=other)
    assert loaded.preprocess.config == other
    (note,) = loaded.notes
    assert "interpolation is 'bilinear' here and 'bicubic' there" in note


def test_unknown_preprocessing_is_said_to_be_assumed(tmp_path: Path) -> None:
    loaded = load(write_timm(tiny_vit(), tmp_path / "x.safetensors"), num_heads=2)
    assert any("preprocessing is not known" in note for note in loaded.notes)
    assert loaded.preprocess.config.image_size == (32, 32)


def test_transformers_labels_and_preprocessing(tmp_path: Path) -> None:
    save(tiny_vit(num_classes=2), tmp_path, layout="transformers", labels=["cat", "dog"])
    config = json.loads((tmp_path / "config.json").read_text())
    del config["patchlight"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load(tmp_path)
    assert loaded.labels == ("cat", "dog")
    assert torch.equal(loaded.model(IMAGE), tiny_vit(num_classes=2)(IMAGE))
    assert loaded.why["num_heads"] == "config.json"


def test_repeating_what_the_checkpoint_has_changes_nothing(tmp_path: Path) -> None:
    save(tiny_vit(num_classes=2), tmp_path / "m", labels=["cat", "dog"])
    assert load(tmp_path / "m", num_classes=2).labels == ("cat", "dog")
    assert load(tmp_path / "m", num_classes=3).labels is None
    path = write_timm(tiny_vit(), tmp_path / "x.safetensors")
    assert load(path, num_heads=2, patch_size=8).config == load(path, num_heads=2).config
    with pytest.raises(CheckpointError, match=r"x.safetensors: width=32 was asked for"):
        load(path, num_heads=2, width=32)
    with pytest.raises(CheckpointError, match=f"{tmp_path / 'm'}: width=24 is not divisible by num_heads=5"):
        load(tmp_path / "m", num_heads=5)


def test_provenance(tmp_path: Path) -> None:
    path = write_timm(tiny_vit(), tmp_path / "x.safetensors")
    provenance = load(path, num_heads=2).provenance
    assert provenance.origin == "timm"
    import hashlib

    assert provenance.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("dino-vit16", "did you mean 'dino-vits16'"),
        ("nonsense/really", "`patchlight models` lists the names"),
        ("hf:not a name", "not a name on the hub; write hf:owner/name"),
    ],
)
def test_sources_that_are_not_there(source: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(source)


def test_the_default_model_is_inside_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchlight.weights.find.fetch", lambda *_: pytest.fail("no network is needed"))
    began = time.perf_counter()
    loaded = load("default")
    assert time.perf_counter() - began < 1
    assert loaded.subject is not None
    assert loaded.labels is not None
    assert loaded.config.num_classes == len(loaded.labels)
    assert loaded.provenance.path.stat().st_size < 16_000_000
    assert loaded.provenance.path.stat().st_mode & 0o444 == 0o444


def test_without_a_network_the_hub_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="hf:owner/name: not in the cache, and the hub cannot be reached"):
        load("hf:owner/name")


def test_what_is_in_the_hub_cache_loads_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commit = "0" * 40
    repo = tmp_path / "models--facebook--dino-vits16"
    save(tiny_vit(num_classes=0), repo / "snapshots" / commit, layout="transformers")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    for source in ("hf:facebook/dino-vits16", "dino-vits16"):
        loaded = load(source)
        assert torch.equal(loaded.model(IMAGE), tiny_vit(num_classes=0)(IMAGE))


def test_catalogue_rows_are_whole() -> None:
    assert len(CATALOGUE) == len(ENTRIES) >= 40
    for entry in ENTRIES:
        assert entry.hub.count("/") == 1
        assert entry.licence
        assert entry.about
        tiny_vit(**entry.settings)  # settings that exist
