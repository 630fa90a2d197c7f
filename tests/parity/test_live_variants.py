"""The variants of the ViT (BEiT, relative and rotary positions, EVA-02, DINOv3, SigLIP, hybrids) against timm and
transformers themselves, on random tiny configurations, square or not."""

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_live import SEEDS, assert_same, image_for, load_copy, tiny_settings

import oracles
from models_at_random import randomize
from patchlight.config import ViTConfig
from patchlight.explain.attention import attention
from patchlight.models.vit import ViT

SETTINGS = settings(max_examples=12, deadline=None)


def timm_settings(config: ViTConfig) -> dict[str, Any]:
    return {
        "img_size": config.image_size,
        "patch_size": config.patch_size,
        "in_chans": config.in_channels,
        "num_classes": config.num_classes,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.num_heads,
    }


def assert_same_as_timm(ours: ViT, theirs: torch.nn.Module, image: torch.Tensor, *, weights: bool = True) -> None:
    """Tokens, answers and the first block's attention."""
    assert_same(ours.tokens(image), theirs.forward_features(image))
    assert_same(ours(image), theirs(image))
    if weights:
        seen: list[torch.Tensor] = []
        theirs.blocks[0].attn.fused_attn = False
        theirs.blocks[0].attn.attn_drop.register_forward_hook(lambda module, inputs, output: seen.append(output))
        theirs(image)
        assert_same(attention(ours, image, layers=0, queries="all").weights[0], seen[0])


@given(base=tiny_settings(), seed=SEEDS, shared=st.booleans(), scale=st.booleans())
@SETTINGS
@torch.no_grad()
def test_timm_beit(base: dict[str, Any], seed: int, shared: bool, scale: bool) -> None:
    oracles.timm()
    from timm.models.beit import Beit

    config = ViTConfig(
        **base,
        position="relative_bias",
        pooling="mean",
        final_norm="pooled",
        layer_scale=1e-5 if scale else None,
    )
    theirs = Beit(
        **timm_settings(config),
        init_values=0.1 if scale else None,
        use_abs_pos_emb=False,
        use_rel_pos_bias=not shared,
        use_shared_rel_pos_bias=shared,
    ).eval()
    randomize(theirs, seed)
    assert_same_as_timm(load_copy(theirs, config), theirs, image_for(config, seed))


@given(base=tiny_settings(), seed=SEEDS, mean=st.booleans(), shared=st.booleans(), data=st.data())
@SETTINGS
@torch.no_grad()
def test_transformers_beit(base: dict[str, Any], seed: int, mean: bool, shared: bool, data: st.DataObject) -> None:
    transformers = oracles.transformers()
    patch, side = base["patch_size"][0], data.draw(st.integers(1, 5))
    base |= {"num_classes": 5, "patch_size": (patch, patch), "image_size": (patch * side, patch * side)}
    config = ViTConfig(
        **base,
        position="relative_bias",
        pooling="mean" if mean else "cls",
        final_norm="pooled" if mean else "tokens",
        norm_eps=1e-12,
    )
    theirs = transformers.BeitForImageClassification(
        transformers.BeitConfig(
            image_size=patch * side,
            patch_size=patch,
            num_channels=config.in_channels,
            hidden_size=config.width,
            num_hidden_layers=config.depth,
            num_attention_heads=config.num_heads,
            intermediate_size=config.mlp_width,
            num_labels=5,
            use_mean_pooling=mean,
            use_relative_position_bias=not shared,
            use_shared_relative_position_bias=shared,
        )
    ).eval()
    randomize(theirs, seed)
    ours = load_copy(theirs, config, pooling=config.pooling)
    assert ours.config.position_resampling == "linear"
    rows, columns = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    for image in (image_for(config, seed), image_for(config, seed, (patch * rows, patch * columns))):
        assert_same(ours.tokens(image), theirs.beit(image).last_hidden_state)
        assert_same(ours(image), theirs(image).logits)


@given(base=tiny_settings(), seed=SEEDS, class_token=st.booleans(), shared=st.booleans(), after=st.booleans())
@SETTINGS
@torch.no_grad()
def test_timm_relative_mlp(base: dict[str, Any], seed: int, class_token: bool, shared: bool, after: bool) -> None:
    oracles.timm()
    from timm.models.vision_transformer_relpos import RelPosBlock, ResPostRelPosBlock, VisionTransformerRelPos

    config = ViTConfig(
        **base,
        position="relative_mlp",
        relative_hidden=24,
        class_token=class_token,
        pooling="cls" if class_token else "mean",
        block_norm="after" if after else "before",
    )
    theirs = VisionTransformerRelPos(
        **timm_settings(config),
        global_pool="token" if class_token else "avg",
        class_token=class_token,
        rel_pos_type="mlp",
        rel_pos_dim=24,
        shared_rel_pos=shared,
        fc_norm=False,
        init_values=None,
        block_fn=ResPostRelPosBlock if after else RelPosBlock,
    ).eval()
    randomize(theirs, seed)
    assert_same_as_timm(load_copy(theirs, config), theirs, image_for(config, seed), weights=not shared)


@given(base=tiny_settings(), seed=SEEDS, class_token=st.booleans())
@SETTINGS
@torch.no_grad()
def test_timm_norm_after(base: dict[str, Any], seed: int, class_token: bool) -> None:
    timm = oracles.timm()
    vision_transformer = timm.models.vision_transformer
    config = ViTConfig(
        **base, class_token=class_token, pooling="cls" if class_token else "mean", block_norm="after", norm_eps=1e-6
    )
    theirs = vision_transformer.VisionTransformer(
        **timm_settings(config),
        class_token=class_token,
        global_pool="token" if class_token else "avg",
        fc_norm=False,
        block_fn=vision_transformer.ResPostBlock,
    ).eval()
    randomize(theirs, seed)
    assert_same_as_timm(load_copy(theirs, config), theirs, image_for(config, seed))


@given(base=tiny_settings(), seed=SEEDS, mixed=st.booleans(), table=st.booleans(), qk_norm=st.booleans())
@SETTINGS
@torch.no_grad()
def test_timm_rope_vit(base: dict[str, Any], seed: int, mixed: bool, table: bool, qk_norm: bool) -> None:
    oracles.timm()
    from timm.models.eva import Eva

    registers = seed % 3
    config = ViTConfig(
        **base,
        position="rope_mixed" if mixed else "rope2d",
        add_learned_table=table,
        prefix_positions="none" if table else "all",
        layer_scale=1e-5,
        num_registers=registers,
        qk_norm=qk_norm,
    )
    theirs = Eva(
        **timm_settings(config),
        global_pool="token",
        num_reg_tokens=registers,
        attn_type="rope",
        qk_norm=qk_norm,
        init_values=0.1,
        use_abs_pos_emb=table,
        no_embed_class=True,
        use_rot_pos_emb=True,
        rope_type="mixed" if mixed else "cat",
        rope_grid_indexing="xy",
        rope_temperature=10.0 if mixed else 100.0,
    ).eval()
    randomize(theirs, seed)
    told = {"norm_eps": 1e-6} | ({"prefix_positions": "none"} if table else {})
    told |= {} if mixed else {"position": "rope2d", "rope_coordinates": "index"}
    ours = load_copy(theirs, config, **told)
    assert_same_as_timm(ours, theirs, image_for(config, seed))


@given(base=tiny_settings(), seed=SEEDS, fused=st.booleans(), inner=st.sampled_from(["none", "mlp", "both"]))
@SETTINGS
@torch.no_grad()
def test_timm_eva02(base: dict[str, Any], seed: int, fused: bool, inner: str) -> None:
    oracles.timm()
    from timm.models.eva import Eva

    config = ViTConfig(
        **base,
        mlp_dim=2 * base["width"],
        mlp="swiglu",
        inner_norm=inner,
        position="rope2d",
        rope_base=10_000.0,
        rope_grid=(16, 16),
        add_learned_table=True,
        pooling="mean",
        final_norm="pooled",
    )
    theirs = Eva(
        **timm_settings(config),
        qkv_fused=fused,
        mlp_ratio=2,
        swiglu_mlp=True,
        scale_mlp=inner != "none",
        scale_attn_inner=inner == "both",
        use_rot_pos_emb=True,
        ref_feat_shape=(16, 16),
        dynamic_img_size=True,
    ).eval()
    randomize(theirs, seed)
    ours = load_copy(theirs, config)  # an EVA-02 is known by its tensors
    assert_same_as_timm(ours, theirs, image_for(config, seed))
    down, across = config.patch_size
    other = image_for(config, seed, (3 * down, 5 * across))
    if config.grid[1] > 1:  # torch's own antialiased resize is wrong from one column
        assert_same(ours(other), theirs(other))


@given(base=tiny_settings(), seed=SEEDS, gated=st.booleans(), bias=st.booleans())
@SETTINGS
@torch.no_grad()
def test_timm_dinov3(base: dict[str, Any], seed: int, gated: bool, bias: bool) -> None:
    oracles.timm()
    from timm.models.eva import Eva

    config = ViTConfig(
        **base,
        mlp="swiglu" if gated else "gelu",
        qkv_bias=bias,
        position="rope2d",
        rope_coordinates="centred",
        num_registers=4,
        layer_scale=1e-5,
        norm_eps=1e-5,
        pooling="mean",
    )
    theirs = Eva(
        **timm_settings(config),
        qkv_bias=bias,
        mlp_ratio=3 if gated else 4,
        swiglu_mlp=gated,
        swiglu_align_to=8 if gated else 0,
        init_values=1.0,
        rope_type="dinov3",
        rope_temperature=100,
        rope_rotate_half=True,
        use_rot_pos_emb=True,
        use_abs_pos_emb=False,
        num_reg_tokens=4,
        use_fc_norm=False,
        dynamic_img_size=True,
        norm_layer=partial(torch.nn.LayerNorm, eps=1e-5),
    ).eval()
    randomize(theirs, seed)
    hidden = theirs.blocks[0].mlp.fc2.in_features  # timm rounds it up
    config = dataclasses.replace(config, mlp_dim=None if hidden == 4 * config.width else hidden)
    # Without a bias it can be no other, and is known to be pooled by its mean.
    ours = load_copy(theirs, config, **({"pooling": "mean"} if bias else {}))
    assert_same_as_timm(ours, theirs, image_for(config, seed))
    down, across = config.patch_size
    other = image_for(config, seed, (3 * down, 5 * across))
    assert_same(ours(other), theirs(other))


@given(base=tiny_settings(), seed=SEEDS, gated=st.booleans())
@SETTINGS
@torch.no_grad()
def test_transformers_dinov3(base: dict[str, Any], seed: int, gated: bool) -> None:
    transformers = oracles.transformers()
    patch = base["patch_size"][0]
    config = ViTConfig(
        **base | {"num_classes": 0, "patch_size": (patch, patch), "image_size": (3 * patch, 4 * patch)},
        mlp="swiglu" if gated else "gelu",
        position="rope2d",
        rope_coordinates="centred",
        num_registers=2,
        layer_scale=1e-5,
        norm_eps=1e-5,
    )
    theirs = transformers.DINOv3ViTModel(
        transformers.DINOv3ViTConfig(
            patch_size=patch,
            num_channels=config.in_channels,
            hidden_size=config.width,
            num_hidden_layers=config.depth,
            num_attention_heads=config.num_heads,
            intermediate_size=config.mlp_width,
            use_gated_mlp=gated,
            hidden_act="silu" if gated else "gelu",
            num_register_tokens=2,
        )
    ).eval()
    randomize(theirs, seed)
    ours = load_copy(theirs, config)
    image = image_for(config, seed)
    theirs_out = theirs(image)
    assert_same(ours.tokens(image), theirs_out.last_hidden_state)
    assert_same(ours(image), theirs_out.pooler_output)


@given(base=tiny_settings(), seed=SEEDS)
@SETTINGS
@torch.no_grad()
def test_timm_siglip(base: dict[str, Any], seed: int) -> None:
    vision_transformer = oracles.timm().models.vision_transformer
    config = ViTConfig(**base, class_token=False, pooling="attention")
    theirs = vision_transformer.VisionTransformer(
        **timm_settings(config), class_token=False, global_pool="map", dynamic_img_size=True
    ).eval()
    randomize(theirs, seed)
    ours = load_copy(theirs, config)
    assert_same_as_timm(ours, theirs, image_for(config, seed))


@given(base=tiny_settings(), seed=SEEDS, head=st.booleans(), side=st.integers(1, 5))
@SETTINGS
@torch.no_grad()
def test_transformers_siglip(base: dict[str, Any], seed: int, head: bool, side: int) -> None:
    transformers = oracles.transformers()
    patch = base["patch_size"][0]
    base |= {"num_classes": 0, "patch_size": (patch, patch), "image_size": (patch * side, patch * side)}
    pooling = "attention" if head else "mean"
    config = ViTConfig(**base, class_token=False, pooling=pooling, mlp="gelu_tanh", prefix_positions="all")
    theirs = transformers.SiglipVisionModel(
        transformers.SiglipVisionConfig(
            image_size=patch * side,
            patch_size=patch,
            num_channels=config.in_channels,
            hidden_size=config.width,
            num_hidden_layers=config.depth,
            num_attention_heads=config.num_heads,
            intermediate_size=config.mlp_width,
            vision_use_head=head,
        )
    ).eval()
    randomize(theirs, seed)
    ours = load_copy(theirs, config)
    image = image_for(config, seed)
    assert_same(ours.tokens(image), theirs(image).last_hidden_state)
    if head:
        assert_same(ours(image), theirs(image).pooler_output)
    other = image_for(config, seed, (2 * patch, 3 * patch))
    theirs_other = theirs(other, interpolate_pos_encoding=True)
    assert_same(ours.tokens(other), theirs_other.last_hidden_state)


@pytest.mark.parametrize("depths", [(), (1,), (2, 1), (1, 1, 2)])
@torch.no_grad()
def test_timm_hybrid(depths: tuple[int, ...]) -> None:
    oracles.timm()
    from timm.layers import HybridEmbed
    from timm.models.vision_transformer import VisionTransformer
    from timm.models.vision_transformer_hybrid import _resnetv2

    stride = 4 * 2 ** max(0, len(depths) - 1)
    patch = (2 * stride, stride)
    config = ViTConfig(
        image_size=(2 * patch[0], 3 * patch[1]),
        patch_size=patch,
        resnet=depths,
        width=24,
        num_heads=2,
        depth=1,
        num_classes=5,
    )
    theirs = VisionTransformer(
        **timm_settings(config) | {"patch_size": (2, 1)},
        embed_layer=partial(HybridEmbed, backbone=_resnetv2(depths)),
    ).eval()
    randomize(theirs, 3)
    assert_same_as_timm(load_copy(theirs, config), theirs, image_for(config, 3))
