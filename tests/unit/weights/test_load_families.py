"""Swin and ConvNeXt through `load` and `save`: our own layout, the authors' names, other sizes, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models_at_random import tiny_vit
from patchlight.config import PreprocessConfig
from patchlight.errors import PatchlightError, PatchlightWarning
from patchlight.models.positions import relative_index
from patchlight.weights.catalog import ENTRIES
from patchlight.weights.load import load
from patchlight.weights.save import save
from staged_models import tiny_convnext, tiny_swin

MODELS = {
    "swin": tiny_swin(),
    "swin-oblong": tiny_swin(window_size=(3, 5), image_size=(40, 72), num_classes=0, qkv_bias=False),
    "swin-oblong-grid": tiny_swin(image_size=(32, 16)),
    "swin-odd-grid": tiny_swin(image_size=28),
    "swin-2": tiny_swin(v2=True),
    "convnext": tiny_convnext(),
    "convnext-2": tiny_convnext(grn=True, layer_scale=None, widths=(8, 8), num_classes=0),
}


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_our_layout_reloads_bit_for_bit(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    labels = ["a", "b", "c", "d", "e"][: model.config.num_classes] or None
    loaded = load(save(model, tmp_path / "x", labels=labels, licence="MIT"))
    assert loaded.config == model.config
    image_BCHW = torch.randn(2, 3, 37, 45)
    assert torch.equal(loaded.model(image_BCHW), model(image_BCHW))
    assert (loaded.provenance.origin, loaded.provenance.licence, loaded.notes) == ("patchlight", "MIT", ())
    assert loaded.labels == (None if labels is None else tuple(labels))
    again = load(save(loaded, tmp_path / "y"))
    assert torch.equal(again.model(image_BCHW), model(image_BCHW))
    assert (tmp_path / "x" / "README.md").read_text().count("Swin" if "swin" in name else "ConvNeXt") >= 2


def authors_swin(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Microsoft's names: as timm's once were, with buffers, and the merging after a stage."""
    named = {}
    for key, value in state.items():
        if match := re.match(r"blocks\.(\d)\.", key):
            key = f"layers.{int(match[1]) // 2}.blocks.{int(match[1]) % 2}.{key[match.end() :]}"
        key = key.replace("attn.out.", "attn.proj.").replace("mlp.up.", "mlp.fc1.").replace("mlp.down.", "mlp.fc2.")
        key = key.replace("relative_bias.table", "relative_position_bias_table").replace(
            "merges.0", "layers.0.downsample"
        )
        named[key] = value
    named["layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(16, 16, dtype=torch.int64)
    named["layers.0.blocks.1.attn_mask"] = torch.zeros(9, 16, 16)
    return named


def authors_convnext(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Facebook's names: blocks right below their stage, and the stem as the first downsampling."""
    named = {}
    for key, value in state.items():
        if match := re.match(r"blocks\.(\d)\.", key):
            stage, block = ((0, 0), (1, 0), (1, 1))[int(match[1])]
            key = f"stages.{stage}.{block}.{key[match.end() :]}"
        for ours, theirs in (
            ("stem.conv.", "downsample_layers.0.0."),
            ("stem.norm.", "downsample_layers.0.1."),
            ("merges.0.norm.", "downsample_layers.1.0."),
            ("merges.0.conv.", "downsample_layers.1.1."),
            (".conv.", ".dwconv."),
            ("mlp.up.", "pwconv1."),
            ("mlp.down.", "pwconv2."),
            ("mlp.grn.weight", "grn.gamma"),
            ("mlp.grn.bias", "grn.beta"),
            ("residual.scale", "gamma"),
        ):
            key = key.replace(ours, theirs)
        named[key] = value.view(1, 1, 1, -1) if ".grn." in key else value
    return named


@torch.no_grad()
@pytest.mark.parametrize("grn", [False, True])
def test_the_authors_files(grn: bool, tmp_path: Path) -> None:
    for model, rename in ((tiny_swin(), authors_swin), (tiny_convnext(grn=grn), authors_convnext)):
        torch.save({"model": rename(model.state_dict()), "epoch": 300}, tmp_path / "checkpoint.pth")
        loaded = load(tmp_path / "checkpoint.pth", image_size=48)
        assert loaded.config == model.config
        image_BCHW = torch.randn(2, 3, 48, 48)
        assert torch.equal(loaded.model(image_BCHW), model(image_BCHW))


@torch.no_grad()
def test_another_window_resamples_the_table_smoothly(tmp_path: Path) -> None:
    model = tiny_swin()
    table = model.blocks[0].attn.relative_bias.table
    rows = torch.arange(49) // 7 - 3  # the bias is how far above the other patch lies
    table.copy_(rows[:, None].expand(-1, 2).float())
    loaded = load(save(model, tmp_path / "x"), window_size=8, image_size=96)
    resampled = loaded.model.blocks[0].attn.relative_bias.table.unflatten(0, (15, 15))
    assert (resampled.diff(dim=0) >= -1e-4).all()
    torch.testing.assert_close(resampled[7, 7], torch.zeros(2), atol=1e-5, rtol=0)
    assert loaded.config.window_size == (8, 8)
    assert "resampled relative positions from windows of 4x4 to 8x8" in loaded.notes
    assert loaded.preprocess.config.image_size == (96, 96)
    assert loaded.model(torch.randn(1, 3, 96, 96)).shape == (1, 5)


@torch.no_grad()
def test_a_swin_v2_with_another_window_keeps_its_measure(tmp_path: Path) -> None:
    """Its MLP knows every window; the offsets that both windows have get the same bias."""
    model = tiny_swin(v2=True)
    loaded = load(save(model, tmp_path / "x"), window_size=6, image_size=96)
    assert (loaded.config.window_size, loaded.config.measuring_windows) == ((6, 6), (4, 4))
    bias, wider = (
        each.blocks[0].attn.relative_bias(relative_index((2, 2), 0, largest=each.config.window_size))
        for each in (model, loaded.model)
    )
    torch.testing.assert_close(bias, wider)
    assert load(tmp_path / "x", image_size=96).config.measuring_windows is None  # the windows stay what they are
    assert loaded.model(torch.randn(1, 3, 96, 96)).shape == (1, 5)


def test_a_fresh_head_and_other_overrides(tmp_path: Path) -> None:
    for name in ("swin", "convnext"):
        folder = save(MODELS[name], tmp_path / name)
        assert load(folder, num_classes=3).model(torch.randn(1, 3, 48, 48)).shape == (1, 3)
        assert (
            load(folder, num_classes=0).model(torch.randn(1, 3, 48, 48)).shape[1] == MODELS[name].config.feature_width
        )
        with pytest.raises(PatchlightError, match="unknown setting 'num_registers' for"):
            load(folder, num_registers=4)
        with pytest.raises(PatchlightError, match="unknown setting 'nonsense' for ViTConfig"):
            load(folder, nonsense=4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architecture": "vit"}, "config.json says architecture='vit', but its tensors have the names of a Swin"),
        ({"width": 24, "num_heads": [2, 4]}, "config.json says num_heads=(2, 4), but its tensors have (2, 3)"),
        ({"depths": [2, 3]}, "config.json says depths=(2, 3), but its tensors have (2, 2)"),
        ({"window_size": [5, 5]}, "has 49 rows, where windows of 5x5 have 81"),
        ({"windows": 3}, "unknown setting 'windows' for SwinConfig"),
    ],
)
def test_a_config_that_lies_is_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    save(MODELS["swin"], tmp_path / "x")
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    config["patchlight"]["model"] |= change
    (tmp_path / "x" / "config.json").write_text(json.dumps(config))
    with pytest.raises(PatchlightError, match=re.escape(words)) as caught:
        load(tmp_path / "x")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "key", "words"),
    [
        ("swin", "blocks.1.attn.relative_bias.table", "tensor for 'blocks.1.attn.relative_bias.table' is missing"),
        ("swin", "blocks.1.mlp.up.bias", "missing: blocks.1.mlp.up.bias"),
        ("convnext", "stem.norm.weight", "missing: stem.norm.weight"),
        ("convnext", "blocks.0.norm.weight", "depths=(0, 0) should be"),
    ],
)
def test_a_missing_tensor_is_named(name: str, key: str, words: str, tmp_path: Path) -> None:
    state = dict(MODELS[name].state_dict())
    del state[key]
    save_file(state, tmp_path / "x.safetensors")
    with pytest.raises(PatchlightError, match=re.escape(words)) as caught:
        load(tmp_path / "x.safetensors")
    assert "\n" not in str(caught.value)


def test_another_architectures_config_is_refused(tmp_path: Path) -> None:
    save_file(authors_swin(MODELS["swin"].state_dict()), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "swinv2_tiny_window8_256"}))
    with pytest.raises(PatchlightError, match=r"config\.json says v2=True, but its tensors have False"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "xswin_tiny"}))
    with pytest.raises(PatchlightError, match=r"config\.json says 'xswin_tiny', but its tensors have the names"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "swin", "use_absolute_embeddings": True}))
    with pytest.raises(
        PatchlightError, match="use_absolute_embeddings=True; transformers' swin is supported with False only"
    ):
        load(tmp_path)


def saved_for_timm(model: Any, folder: Path, **named: Any) -> Path:
    """As timm would have saved it, with what only its config.json says."""
    save(model, folder, layout="timm")
    config = json.loads((folder / "config.json").read_text())
    del config["patchlight"]
    config["model_args"] = {"depths": list(model.config.depths)}
    (folder / "config.json").write_text(json.dumps(config | named))
    return folder


FOUR_STAGES: dict[str, Any] = {"widths": (6, 8, 10, 12), "depths": (1, 1, 1, 1)}


@pytest.mark.parametrize("activation", ["relu", "silu", "quick_gelu"])
def test_an_activation_that_we_do_not_have_is_named(activation: str, tmp_path: Path) -> None:
    folder = saved_for_timm(tiny_convnext(**FOUR_STAGES), tmp_path / "x", model_args={"act_layer": activation})
    with pytest.raises(PatchlightError, match=f"x: config.json says act_layer='{activation}', which is not supported$"):
        load(folder)


def test_an_eps_that_no_file_tells_is_timms_or_noted(tmp_path: Path) -> None:
    model = tiny_convnext(**FOUR_STAGES)
    known = load(saved_for_timm(model, tmp_path / "known", architecture="convnext_xxlarge"))
    assert (known.config.norm_eps, known.config.final_norm_eps, known.why["norm_eps"]) == (1e-5, 1e-5, "config.json")
    assert not any("norm_eps" in note for note in known.notes)
    told = saved_for_timm(
        model, tmp_path / "told", architecture="convnext_xxlarge", model_args={"norm_eps": 1e-3, "depths": [1, 1, 1, 1]}
    )
    assert load(told).config.final_norm_eps == 1e-3
    usual = load(saved_for_timm(model, tmp_path / "usual"))
    assert (usual.config.norm_eps, usual.config.final_norm_eps) == (1e-6, 1e-6)
    assert not any("norm_eps" in note for note in usual.notes)
    unknown = saved_for_timm(model, tmp_path / "unknown", architecture="convnext_of_tomorrow")
    with pytest.warns(PatchlightWarning, match="leave open mlp='gelu', norm_eps=1e-06, final_norm_eps=1e-06: these"):
        load(unknown)


def test_mlps_without_one_ratio_are_refused(tmp_path: Path) -> None:
    model = MODELS["swin"]
    state = dict(model.state_dict())
    for key in ("blocks.0.mlp.up.weight", "blocks.1.mlp.up.weight"):
        state[key] = state[key][:40]
    save_file({key: value.contiguous() for key, value in state.items()}, tmp_path / "x.safetensors")
    with pytest.raises(PatchlightError, match=r"no one ratio gives MLPs of \[40, 96\] at widths of \[12, 24\]"):
        load(tmp_path / "x.safetensors")


def test_a_ratio_that_no_stage_alone_tells(tmp_path: Path) -> None:
    """As timm's Swin-T with mlp_ratio=2.7, whose widths of 96 to 768 are times 2.7 and rounded down."""
    model = tiny_swin(width=96, depths=(1, 1, 1, 1), num_heads=(2, 2, 2, 2), mlp_ratio=2.7)
    assert [block.mlp.up.out_features for block in model.blocks] == [259, 518, 1036, 2073]
    save_file(dict(model.state_dict()), tmp_path / "x.safetensors")
    assert load(tmp_path / "x.safetensors").config.mlp_ratio == 2.7


@pytest.mark.parametrize(
    ("name", "layout", "words"),
    [
        ("swin-odd-grid", "transformers", "uneven_windows='masked' cannot be written with layout='transformers'"),
        ("convnext", "timm", "cannot be written with layout='timm', which has 4 stages"),
        ("swin-oblong", "transformers", "image_size=(40, 72) cannot be written"),
        ("swin-oblong", "timm", "window_size=(3, 5) cannot be written with layout='timm', whose model has (3, 3)"),
        ("swin-oblong-grid", "timm", "windows of stage 2 are 4x2 there, timm's 4x2, and square ones alone are read"),
        ("swin-2", "timm", "a Swin V2 whose keys have a bias (blocks.0.attn.qkv.bias) cannot be written with"),
        ("swin-odd-grid", "timm", "windows of stage 2 are 4x4 there, timm's 3x3, and square ones alone are read"),
    ],
)
def test_what_another_library_does_not_have_is_not_written(name: str, layout: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(PatchlightError, match=re.escape(words)):
        save(MODELS[name], tmp_path / "x", layout=layout)
    assert not (tmp_path / "x").exists()


def test_the_catalogue_has_the_usual_ones() -> None:
    names = {entry.hub: entry for entry in ENTRIES}
    for size in ("tiny", "small", "base"):
        assert names[f"microsoft/swin-{size}-patch4-window7-224"].preprocess.resize == "squash"
        assert names[f"timm/swin_{size}_patch4_window7_224.ms_in1k"].preprocess.crop_pct == 0.9
        assert names[f"facebook/convnext-{size}-224"].preprocess.scaled_size == (256, 256)
        assert names[f"timm/convnext_{size}.fb_in1k"].preprocess == PreprocessConfig(crop_pct=0.875)


def test_tensors_are_written_under_our_names(tmp_path: Path) -> None:
    save(MODELS["swin"], tmp_path / "x")
    assert load_file(tmp_path / "x" / "model.safetensors").keys() == MODELS["swin"].state_dict().keys()


@pytest.mark.parametrize("model", [tiny_vit(drop_path=0.3), tiny_swin(drop_path=0.3), tiny_convnext(drop_path=0.3)])
def test_what_was_loaded_can_be_moved_and_trained(model: Any, tmp_path: Path) -> None:
    loaded = load(save(model, tmp_path / "x")).model
    assert not any(tensor.is_meta for tensor in (*loaded.parameters(), *loaded.buffers()))
    loaded.to("cpu", torch.float64).float().train()(torch.randn(2, 3, *model.config.image_size)).sum().backward()
    rates = [buffer.item() for name, buffer in loaded.named_buffers() if name.endswith("drop_path")]
    assert max(rates) == pytest.approx(0.3)
