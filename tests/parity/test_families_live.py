"""Swin and ConvNeXt against timm and transformers themselves, run side by side on random configurations.

timm shifts a grid before it pads it, so that at sizes which its windows do not fill it lets patches from opposite edges
attend to each other; there is nothing to agree with, and those sizes are held to the slow reference in
tests/unit/models/test_swin.py. transformers takes any size whose grids are no smaller than a window.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import oracles
from models_at_random import randomize
from patchlight.errors import PatchlightError
from patchlight.explain.attention import attention
from patchlight.families import ConvNeXtConfig, SwinConfig
from patchlight.models.swin import Swin
from patchlight.weights.load import Loaded, load
from patchlight.weights.save import save
from staged_models import tiny_convnext, tiny_swin

# (window, depths, image in patches down and across)
SWINS = [
    (4, (2, 2), (16, 8)),
    (3, (3, 1, 2), (12, 24)),
    (2, (2, 2, 2), (8, 8)),
    (5, (2,), (5, 15)),
    (4, (1, 4), (8, 24)),
]

# A ratio whose MLPs are rounded down to 32, 64 and 129, so that no stage alone tells it.
ODD_RATIO = {"mlp_ratio": 2.7}


def swin_config(window: int, depths: tuple[int, ...], grid: tuple[int, int], **changes: Any) -> SwinConfig:
    settings: dict[str, Any] = {
        "image_size": (4 * grid[0], 4 * grid[1]),
        "width": 12,
        "depths": depths,
        "num_heads": (2, 3, 4)[: len(depths)],
        "window_size": window,
        "num_classes": 5,
    }
    return SwinConfig(**settings | changes)


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-5 * max(1.0, theirs.abs().max().item()), rtol=1e-5)


def load_copy(theirs: torch.nn.Module, folder: Path, config: dict[str, Any] | None = None, **told: Any) -> Loaded:
    """Their weights, saved under their own names, and loaded."""
    save_file({key: value.contiguous() for key, value in theirs.state_dict().items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return load(folder, **told)


def timm_arguments(config: SwinConfig) -> dict[str, Any]:
    """What timm's Swin and Swin V2 are both made with."""
    return {
        "img_size": config.image_size,
        "patch_size": config.patch_size[0],
        "in_chans": config.in_channels,
        "num_classes": config.num_classes,
        "embed_dim": config.width,
        "depths": config.depths,
        "num_heads": config.num_heads,
        "window_size": config.window_size,
        "mlp_ratio": config.mlp_ratio,
        "qkv_bias": config.qkv_bias,
    }


def timm_swin(config: SwinConfig, **arguments: Any) -> torch.nn.Module:
    model = (
        oracles.timm()
        .models.swin_transformer.SwinTransformer(
            **timm_arguments(config),
            **arguments,
        )
        .eval()
    )
    randomize(model)
    return model


@torch.no_grad()
@pytest.mark.parametrize(("window", "depths", "grid"), SWINS)
@pytest.mark.parametrize(
    "changes", [{}, {"mlp_ratio": 2.0, "qkv_bias": False, "in_channels": 1, "num_classes": 0}, ODD_RATIO]
)
def test_swin_is_timms(
    window: int, depths: tuple[int, ...], grid: tuple[int, int], changes: dict[str, Any], tmp_path: Path
) -> None:
    config = swin_config(window, depths, grid, **changes)
    theirs = timm_swin(config)
    loaded = load_copy(theirs, tmp_path, image_size=config.image_size)
    assert loaded.config == config
    image_BCHW = torch.randn(2, config.in_channels, *config.image_size)
    assert_same(loaded.model(image_BCHW), theirs(image_BCHW))
    assert_same(loaded.model.encode(image_BCHW), theirs.forward_features(image_BCHW))


@torch.no_grad()
@pytest.mark.parametrize(("across", "rows", "window"), [(6, 5 * 5, "3x3"), (12, 5 * 11, "3x6")])
def test_a_stage_of_timms_with_a_smaller_table_is_the_same(across: int, rows: int, window: str, tmp_path: Path) -> None:
    """timm's windows are no larger than the grid that a stage has at its image size, nor are their tables."""
    config = swin_config(6, (2, 2), (6, across))  # 3 rows of patches in the second stage
    theirs = timm_swin(config)
    assert len(theirs.layers[1].blocks[0].attn.relative_position_bias_table) == rows
    arguments = {"img_size": list(config.image_size), "depths": list(config.depths)}
    named = {"architecture": "swin_tiny_patch4_window7_224", "model_args": arguments}
    loaded = load_copy(theirs, tmp_path, named)
    assert loaded.config == config
    assert any(f"was for windows of {window}" in note for note in loaded.notes)
    image_BCHW = torch.randn(2, 3, *config.image_size)
    assert_same(loaded.model(image_BCHW), theirs(image_BCHW))


def transformers_swin(config: SwinConfig) -> torch.nn.Module:
    library = oracles.transformers()
    kind = "Swinv2" if config.v2 else "Swin"
    settings = getattr(library, f"{kind}Config")(
        image_size=config.image_size[0],
        patch_size=config.patch_size[0],
        num_channels=config.in_channels,
        embed_dim=config.width,
        depths=list(config.depths),
        num_heads=list(config.num_heads),
        window_size=config.window_size[0],
        num_labels=config.num_classes,
        **(
            {"pretrained_window_sizes": list(config.measuring_windows or [0] * len(config.depths))}
            if config.v2
            else {"attn_implementation": "eager"}
        ),
    )
    model = getattr(library, f"{kind}ForImageClassification")(settings).eval()
    randomize(model)
    return model


@torch.no_grad()
@pytest.mark.parametrize(("window", "depths", "grid"), SWINS)
@pytest.mark.parametrize("more", [(0, 0), (1, 0), (9, 22), (3, 41)])
def test_swin_is_transformers_at_odd_sizes_too(
    window: int, depths: tuple[int, ...], grid: tuple[int, int], more: tuple[int, int], tmp_path: Path
) -> None:
    config = swin_config(window, depths, grid, uneven_windows="plain", image_size=4 * grid[0])
    theirs = transformers_swin(config)
    loaded = load_copy(theirs, tmp_path, theirs.config.to_dict())
    assert loaded.config == config
    image_BCHW = torch.randn(2, 3, 4 * grid[0] + more[0], 4 * grid[1] + more[1])
    output = theirs(image_BCHW, output_attentions=True)
    assert_same(loaded.model(image_BCHW), output.logits)
    assert_same(loaded.model.tokens(image_BCHW), theirs.swin(image_BCHW).last_hidden_state)


@torch.no_grad()
@pytest.mark.parametrize("v2", [False, True])
def test_maps_are_the_weights_that_transformers_shows(v2: bool, tmp_path: Path) -> None:
    """One window over the whole image, so that their windows are the image."""
    config = swin_config(4, (2, 1), (8, 8), uneven_windows="plain", image_size=32, v2=v2)
    theirs = transformers_swin(config)
    loaded = load_copy(theirs, tmp_path, theirs.config.to_dict())
    image_BCHW = torch.randn(2, 3, 32, 32)
    maps = attention(loaded, image_BCHW, queries="all")
    expected = theirs(image_BCHW, output_attentions=True).attentions[-1]
    assert_same(maps.weights[0], expected)


CONVNEXTS: list[dict[str, Any]] = [
    {"widths": (6, 8, 10, 12), "depths": (1, 1, 2, 1)},
    {"widths": (12, 10, 8, 6), "depths": (2, 1, 1, 1), "grn": True, "layer_scale": None},
]


@torch.no_grad()
@pytest.mark.parametrize("changes", CONVNEXTS)
@pytest.mark.parametrize("size", [(64, 64), (32, 96), (45, 67)])
@pytest.mark.parametrize("conv_mlp", [False, True])
def test_convnext_is_timms(changes: dict[str, Any], size: tuple[int, int], conv_mlp: bool, tmp_path: Path) -> None:
    config = ConvNeXtConfig(image_size=size, num_classes=5, **changes)
    theirs = oracles.timm().models.convnext.ConvNeXt(
        num_classes=5,
        depths=config.depths,
        dims=config.widths,
        use_grn=config.grn,
        ls_init_value=config.layer_scale,
        conv_mlp=conv_mlp,
    )
    randomize(theirs.eval())
    loaded = load_copy(theirs, tmp_path, image_size=size)
    assert loaded.config == config
    image_BCHW = torch.randn(2, 3, *size)
    assert_same(loaded.model(image_BCHW), theirs(image_BCHW))


@torch.no_grad()
@pytest.mark.parametrize("changes", CONVNEXTS)
@pytest.mark.parametrize("size", [(64, 64), (45, 67)])
def test_convnext_is_transformers(changes: dict[str, Any], size: tuple[int, int], tmp_path: Path) -> None:
    library = oracles.transformers()
    config = ConvNeXtConfig(image_size=64, num_classes=5, final_norm_eps=1e-12, **changes)
    settings: dict[str, Any] = {
        "image_size": 64,
        "hidden_sizes": list(config.widths),
        "depths": list(config.depths),
        "num_stages": len(config.depths),
        "num_labels": 5,
    }
    if config.grn:
        theirs = library.ConvNextV2ForImageClassification(library.ConvNextV2Config(**settings))
    else:
        theirs = library.ConvNextForImageClassification(library.ConvNextConfig(**settings))
    randomize(theirs.eval())
    loaded = load_copy(theirs, tmp_path, theirs.config.to_dict())
    assert loaded.config == config
    image_BCHW = torch.randn(2, 3, *size)
    assert_same(loaded.model(image_BCHW), theirs(image_BCHW).logits)


@torch.no_grad()
def keys_without_bias(model: Swin) -> Swin:
    """As every Swin V2 has them."""
    for block in model.blocks:
        block.attn.qkv.bias.chunk(3)[1].zero_()
    return model


STAGES = {"depths": (2, 2, 1), "num_heads": (2, 3, 4)}


@torch.no_grad()
@pytest.mark.parametrize(
    "model",
    [
        tiny_swin(image_size=64),
        tiny_swin(image_size=64, window_size=8, **STAGES),  # grids of 16, 8 and 4
        tiny_swin(image_size=64, window_size=7, patch_size=16),  # of 4 and 2
        tiny_swin(image_size=64, **ODD_RATIO, **STAGES),
        keys_without_bias(tiny_swin(image_size=64, v2=True)),
        keys_without_bias(
            tiny_swin(image_size=(64, 32), v2=True, window_size=8, measuring_windows=(4, 5, 6), **STAGES)
        ),
        *(tiny_convnext(**changes) for changes in CONVNEXTS),
    ],
)
def test_timm_reads_what_we_save_for_it(model: Any, tmp_path: Path) -> None:
    timm = oracles.timm()
    save(model, tmp_path / "model", layout="timm")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True).eval()
    image_BCHW = torch.randn(2, 3, *model.config.image_size)
    assert_same(model(image_BCHW), theirs(image_BCHW))
    assert_same(load(tmp_path / "model").model(image_BCHW), model(image_BCHW))


@torch.no_grad()
@pytest.mark.parametrize("window", [7, 8])
def test_timm_reads_our_tables_unchanged(window: int, tmp_path: Path) -> None:
    """Windows of 7 do not fill grids of 16 and 8, where timm computes otherwise; its tables are ours nevertheless."""
    model = tiny_swin(image_size=64, window_size=window, **STAGES)
    save(model, tmp_path / "model", layout="timm")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = oracles.timm().create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True).eval()
    blocks = [block for stage in theirs.layers for block in stage.blocks]
    for ours, block, side in zip(model.blocks, blocks, (window, window, window, window, 4), strict=True):
        offsets = slice(window - side, window + side - 1)
        table = ours.attn.relative_bias.table.unflatten(0, (2 * window - 1, 2 * window - 1))[offsets, offsets]
        assert torch.equal(block.attn.relative_position_bias_table, table.flatten(0, 1))


@torch.no_grad()
@pytest.mark.parametrize(
    "model",
    [
        tiny_swin(uneven_windows="plain"),
        keys_without_bias(tiny_swin(uneven_windows="plain", v2=True, measuring_windows=(5, 4))),
        *(tiny_convnext(**changes) for changes in CONVNEXTS),
    ],
)
def test_transformers_reads_what_we_save_for_it(model: Any, tmp_path: Path) -> None:
    library = oracles.transformers()
    save(model, tmp_path / "model", layout="transformers")
    theirs = library.AutoModelForImageClassification.from_pretrained(tmp_path / "model").eval()
    image_BCHW = torch.randn(2, 3, 45, 67)
    assert_same(theirs(image_BCHW).logits, model(image_BCHW))
    assert_same(load(tmp_path / "model").model(image_BCHW), model(image_BCHW))


@torch.no_grad()
@pytest.mark.parametrize("v2", [False, True])
def test_transformers_reads_windows_that_are_all_full_whatever_is_done_with_others(v2: bool, tmp_path: Path) -> None:
    told = swin_config(4, (2, 1), (16, 16), image_size=64, v2=v2)
    model = Swin(told).eval()
    randomize(model)
    model = keys_without_bias(model) if v2 else model
    assert told.uneven_windows == "masked"
    save(model, tmp_path / "model", layout="transformers")
    theirs = oracles.transformers().AutoModelForImageClassification.from_pretrained(tmp_path / "model").eval()
    image_BCHW = torch.randn(2, 3, 64, 64)
    assert_same(theirs(image_BCHW).logits, model(image_BCHW))


# (window, depths, image in patches down and across): stages whose grids are smaller than a window, too.
SWINS_V2 = [
    (4, (2, 2), (16, 8)),
    (3, (3, 1, 2), (12, 24)),
    (8, (1, 2, 2), (16, 16)),
    (6, (2, 2), (6, 12)),
]


def timm_swin_v2(config: SwinConfig) -> torch.nn.Module:
    model = oracles.timm().models.swin_transformer_v2.SwinTransformerV2(
        **timm_arguments(config),
        pretrained_window_sizes=config.measuring_windows or (0,) * len(config.depths),
    )
    randomize(model.eval())
    for name, parameter in model.named_parameters():
        if name.endswith("logit_scale"):  # up to beyond its limit
            parameter.data.uniform_(1.0, 6.0, generator=torch.Generator().manual_seed(len(name)))
    return model


@torch.no_grad()
@pytest.mark.parametrize(("window", "depths", "grid"), SWINS_V2)
@pytest.mark.parametrize("changes", [{}, {"qkv_bias": False, "in_channels": 1, "num_classes": 0}, ODD_RATIO])
@pytest.mark.parametrize("measured", [False, True])
def test_swin_v2_is_timms(
    window: int, depths: tuple[int, ...], grid: tuple[int, int], changes: dict[str, Any], measured: bool, tmp_path: Path
) -> None:
    told = {"measuring_windows": (5, 4, 3)[: len(depths)]} if measured else {}
    config = swin_config(window, depths, grid, v2=True, **changes, **told)
    theirs = timm_swin_v2(config)
    with pytest.raises(PatchlightError, match="the tensors of a Swin V2 do not tell its windows; pass those"):
        load_copy(theirs, tmp_path)
    loaded = load_copy(theirs, tmp_path, image_size=config.image_size, window_size=window, **told)
    assert loaded.config == config
    image_BCHW = torch.randn(2, config.in_channels, *config.image_size)
    assert_same(loaded.model(image_BCHW), theirs(image_BCHW))
    assert_same(loaded.model.encode(image_BCHW), theirs.forward_features(image_BCHW))


@torch.no_grad()
def test_a_swin_v2_of_timm_as_it_is_published(tmp_path: Path) -> None:
    timm = oracles.timm()
    from timm.models import save_for_hf

    theirs = timm.create_model("swinv2_tiny_window16_256", depths=(1, 1, 2, 1), num_classes=5).eval()
    randomize(theirs)
    save_for_hf(theirs, tmp_path, model_args={"depths": (1, 1, 2, 1)}, safe_serialization=True)
    loaded = load(tmp_path)
    image_BCHW = torch.randn(1, 3, 256, 256)
    assert_same(loaded.model(image_BCHW), theirs(image_BCHW))


@torch.no_grad()
@pytest.mark.parametrize(("window", "depths", "side"), [(4, (2, 2), 16), (3, (3, 1, 2), 24), (8, (1, 2, 2), 16)])
@pytest.mark.parametrize("more", [(0, 0), (16, 0), (9, 22)])
@pytest.mark.parametrize("measured", [False, True])
def test_swin_v2_is_transformers(
    window: int, depths: tuple[int, ...], side: int, more: tuple[int, int], measured: bool, tmp_path: Path
) -> None:
    told = {"measuring_windows": (5, 4, 3)[: len(depths)]} if measured else {}
    config = swin_config(window, depths, (side, side), uneven_windows="plain", v2=True, **told)
    theirs = transformers_swin(config)
    loaded = load_copy(theirs, tmp_path, theirs.config.to_dict())
    assert loaded.config == config
    if window == 8 and any(more):  # their windows stay as small as the grids at the size that they were made for
        return
    image_BCHW = torch.randn(2, 3, 4 * side + more[0], 4 * side + more[1])
    assert_same(loaded.model(image_BCHW), theirs(image_BCHW).logits)
    assert_same(loaded.model.tokens(image_BCHW), theirs.swinv2(image_BCHW).last_hidden_state)
