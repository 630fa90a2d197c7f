"""The model against timm and transformers themselves, run side by side on random configurations."""

import dataclasses
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import oracles
from models_at_random import randomize
from patchlight.config import ViTConfig
from patchlight.explain.attention import attention
from patchlight.models.vit import ViT
from patchlight.weights.load import load

SEEDS = st.integers(0, 2**16)


@st.composite
def tiny_settings(draw: st.DrawFn) -> dict[str, Any]:
    patch = draw(st.tuples(st.integers(2, 8), st.integers(2, 8)))
    grid = draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    heads = draw(st.integers(1, 4))
    return {
        "image_size": (patch[0] * grid[0], patch[1] * grid[1]),
        "patch_size": patch,
        "in_channels": draw(st.sampled_from([1, 3, 4])),
        "width": heads * 4 * draw(st.integers(1, 4)),
        "num_heads": heads,
        "depth": draw(st.integers(1, 3)),
        "num_classes": draw(st.sampled_from([0, 5])),
    }


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Random weights make activations of any size, so that the tolerance is relative to the largest."""
    torch.testing.assert_close(ours, theirs, atol=1e-5 * max(1.0, theirs.abs().max().item()), rtol=1e-5)


def load_copy(theirs: torch.nn.Module, config: ViTConfig, **told: Any) -> ViT:
    """Their weights, saved under their own names, and loaded; what shapes cannot tell is told."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        save_file({key: value.contiguous() for key, value in theirs.state_dict().items()}, path)
        told = {"num_heads": config.num_heads, "image_size": config.image_size, "block_norm": config.block_norm} | told
        loaded = load(path, **told)
    irrelevant = {"layer_scale": config.layer_scale, "position_resampling": config.position_resampling}
    assert dataclasses.replace(loaded.config, **irrelevant) == config
    return loaded.model


def image_for(config: ViTConfig, seed: int, size: tuple[int, int] | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, config.in_channels, *(size or config.image_size), generator=generator)


def timm_twin(config: ViTConfig, **arguments: Any) -> torch.nn.Module:
    """timm's model for a config; `dynamic_img_size` lets it take other sizes, with the positions resampled."""
    vision_transformer = oracles.timm().models.vision_transformer
    return vision_transformer.VisionTransformer(
        img_size=config.image_size,
        patch_size=config.patch_size,
        in_chans=config.in_channels,
        num_classes=config.num_classes,
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.num_heads,
        mlp_ratio=config.mlp_width / config.width * (2 if config.mlp == "swiglu" else 1),
        dynamic_img_size=True,
        norm_layer=partial(torch.nn.LayerNorm, eps=config.norm_eps),
        **arguments,
    ).eval()


@given(data=st.data(), base=tiny_settings(), seed=SEEDS)
@settings(max_examples=60)
@torch.no_grad()
def test_timm(data: st.DataObject, base: dict[str, Any], seed: int) -> None:
    class_token = data.draw(st.booleans())
    pooling = data.draw(st.sampled_from(["cls", "mean"])) if class_token else "mean"
    prefix_positions = data.draw(st.sampled_from(["all", "none"]))
    choices = {name: data.draw(st.booleans()) for name in ("qkv_bias", "qk_norm", "embed_norm")}
    layer_scale = data.draw(st.sampled_from([None, 0.1]))
    final_norm = data.draw(st.sampled_from(["tokens", "pooled"]))
    mlp = data.draw(st.sampled_from(["gelu", "gelu_tanh", "quick_gelu", "swiglu"]))
    registers = data.draw(st.integers(0, 3))
    config = ViTConfig(
        **base,
        **choices,
        class_token=class_token,
        num_registers=registers,
        pooling=pooling,
        prefix_positions=prefix_positions,
        layer_scale=layer_scale,
        final_norm=final_norm,
        mlp=mlp,
        patch_bias=not choices["embed_norm"],  # timm ties the two
    )
    new_grid = data.draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    # torch's own antialiased resize, which timm uses, is wrong from one column to one column.
    assume(config.grid[1] > 1 or new_grid[1] > 1 or config.grid == new_grid)
    size = (new_grid[0] * config.patch_size[0], new_grid[1] * config.patch_size[1])
    layers = oracles.timm().layers
    activation = {"gelu_tanh": layers.GELUTanh, "quick_gelu": layers.QuickGELU}.get(mlp, torch.nn.GELU)
    theirs = timm_twin(
        config,
        global_pool={"cls": "token", "mean": "avg"}[pooling],
        class_token=class_token,
        reg_tokens=registers,
        no_embed_class=prefix_positions == "none",
        init_values=layer_scale,
        pre_norm=choices["embed_norm"],
        fc_norm=final_norm == "pooled",
        qkv_bias=choices["qkv_bias"],
        qk_norm=choices["qk_norm"],
        **(
            {"mlp_layer": layers.SwiGLUPacked, "act_layer": torch.nn.SiLU}
            if mlp == "swiglu"
            else {"act_layer": activation}
        ),
    )
    randomize(theirs, seed)
    told = {"pooling": pooling} | ({} if mlp == "swiglu" else {"mlp": mlp})
    ours = load_copy(theirs, config, **told, prefix_positions=prefix_positions)
    for image in (image_for(config, seed), image_for(config, seed, size)):
        assert_same(ours.tokens(image), theirs.forward_features(image))
        assert_same(ours(image), theirs(image))


@given(base=tiny_settings(), seed=SEEDS)
@settings(max_examples=20)
@torch.no_grad()
def test_timm_attention(base: dict[str, Any], seed: int) -> None:
    config = ViTConfig(**base)
    theirs = timm_twin(config)
    randomize(theirs, seed)
    ours = load_copy(theirs, config)
    seen: list[torch.Tensor] = []
    theirs.blocks[0].attn.fused_attn = False
    theirs.blocks[0].attn.attn_drop.register_forward_hook(lambda module, inputs, output: seen.append(output))
    image = image_for(config, seed)
    theirs(image)
    assert_same(attention(ours, image, layers=0, queries="all").weights[0], seen[0])


@given(base=tiny_settings(), seed=SEEDS, registers=st.integers(0, 2))
@settings(max_examples=20)
@torch.no_grad()
def test_timm_rope(base: dict[str, Any], seed: int, registers: int) -> None:
    oracles.timm()
    from timm.models.eva import Eva

    config = ViTConfig(**base | {"num_classes": 5}, position="rope2d", num_registers=registers)
    theirs = Eva(
        img_size=config.image_size,
        patch_size=config.patch_size,
        in_chans=config.in_channels,
        num_classes=5,
        global_pool="token",
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.num_heads,
        num_reg_tokens=registers,
        attn_type="rope",
        use_abs_pos_emb=False,
        use_rot_pos_emb=True,
        rope_grid_indexing="xy",
        rope_temperature=100.0,
    ).eval()
    randomize(theirs, seed)
    ours = load_copy(theirs, config, position="rope2d", rope_coordinates="index", norm_eps=1e-6)
    image = image_for(config, seed)
    assert_same(ours.tokens(image), theirs.forward_features(image))
    assert_same(ours(image), theirs(image))


@given(base=tiny_settings(), seed=SEEDS)
@settings(max_examples=20)
@torch.no_grad()
def test_timm_relative_bias(base: dict[str, Any], seed: int) -> None:
    oracles.timm()
    from timm.models.vision_transformer_relpos import VisionTransformerRelPos

    class_token = bool(seed % 2)
    config = ViTConfig(
        **base | {"num_classes": 5},
        position="relative_bias",
        class_token=class_token,
        pooling="cls" if class_token else "mean",
    )
    theirs = VisionTransformerRelPos(
        img_size=config.image_size,
        patch_size=config.patch_size,
        in_chans=config.in_channels,
        num_classes=5,
        global_pool="token" if class_token else "avg",
        class_token=class_token,
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.num_heads,
        rel_pos_type="bias",
        fc_norm=False,
        init_values=None,
    ).eval()
    randomize(theirs, seed)
    ours = load_copy(theirs, config)
    image = image_for(config, seed)
    assert_same(ours.tokens(image), theirs.forward_features(image))
    assert_same(ours(image), theirs(image))


@given(base=tiny_settings(), seed=SEEDS, qkv_bias=st.booleans())
@settings(max_examples=20)
@torch.no_grad()
def test_transformers(base: dict[str, Any], seed: int, qkv_bias: bool) -> None:
    transformers = oracles.transformers()
    assume(base["num_classes"] > 0)
    config = ViTConfig(**base, norm_eps=1e-12, qkv_bias=qkv_bias)
    theirs = transformers.ViTForImageClassification(
        transformers.ViTConfig(
            image_size=config.image_size,
            patch_size=config.patch_size,
            num_channels=config.in_channels,
            hidden_size=config.width,
            num_hidden_layers=config.depth,
            num_attention_heads=config.num_heads,
            intermediate_size=config.mlp_width,
            num_labels=config.num_classes,
            qkv_bias=qkv_bias,
        )
    ).eval()
    randomize(theirs, seed)
    ours = load_copy(theirs, config)
    image = image_for(config, seed)
    assert_same(ours.tokens(image), theirs.vit(image).last_hidden_state)
    assert_same(ours(image), theirs(image).logits)
