"""A ViT as timm has it: which of its classes and architectures computes the same, with which arguments, and our state
in its names.

timm makes a model from an architecture's name and plain arguments. What no plain argument can say there (the kind of
block, of MLP, of stem, the norms' eps) is chosen by the name; everything else is written out in full.
"""

import dataclasses
from typing import Any

import torch

from patchlight.config import ViTConfig
from patchlight.errors import PatchlightError
from patchlight.models.positions import sincos_2d
from patchlight.weights.convert import Names, State, convert_to, refuse, shortest_ratio
from patchlight.weights.family import InTimm
from patchlight.weights.vit.names import HYBRID, TIMM, reorder_rope, without_patch_boxes

RESNETS = {
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}

POOLINGS = {"cls": "token", "mean": "avg", "attention": "map"}


def to_timm(config: ViTConfig, state: State) -> InTimm:
    config, state = _in_timms_form(*without_patch_boxes(config, state))
    refuse("timm", config, stem="patchify", head_hidden=0)
    if config.pooling not in POOLINGS:
        refuse("timm", config, pooling="cls")
    if config.patch_bias == config.embed_norm:  # timm ties the two
        refuse("timm", config, patch_bias=not config.embed_norm)
    if config.pooling == "attention":
        refuse("timm", config, "pooling='attention'", inner_norm="none")
        if config.mlp == "swiglu":
            refuse("timm", config, "pooling='attention'", mlp="gelu")
    if config.final_norm == "none":
        refuse("timm", config, final_norm="tokens")
    frequencies: State = {}
    if config.position in ("relative_bias", "relative_mlp"):
        architecture, arguments = _relative(config)
    elif config.is_rotary:
        architecture, arguments = _eva(config)
        state, frequencies = _rope_as_timm(config, state)
    else:
        architecture, arguments = _plain(config)
    theirs = convert_to(state, _names(config)) | frequencies
    batched = ("cls_token", "dist_token", "reg_token", "pos_embed", "attn_pool.latent")
    theirs = {key: value[None] if key in batched else value for key, value in theirs.items()}
    return InTimm(
        config,
        theirs,
        architecture,
        _shared(config) | arguments,
        first_conv=f"patch_embed.backbone.{'stem.' if config.resnet else ''}conv"
        if config.resnet is not None
        else "patch_embed.proj",
        classifier=["head", "head_dist"] if config.distill_token else "head",
    )


def _in_timms_form(config: ViTConfig, state: State) -> tuple[ViTConfig, State]:
    """The same computation where timm's form of it is another: what is computed becomes a table, and zeros a bias."""
    if config.position == "sincos2d":
        state["positions.table"] = sincos_2d(config.grid, config.width).to(state["norm.weight"])
        config = dataclasses.replace(config, position="learned", prefix_positions="none")
    if config.has_position_table and config.prefix_positions == "class" and config.num_prefix > 1:
        own, state["positions.table"] = state["positions.table"].split([1, len(state["positions.table"]) - 1])
        state["class_token"] = state["class_token"] + own
        config = dataclasses.replace(config, prefix_positions="none")
    if not config.patch_bias and not config.embed_norm:
        state["patch_embed.proj.bias"] = torch.zeros_like(state["norm.bias"])
        config = dataclasses.replace(config, patch_bias=True)
    return config, state


def _shared(config: ViTConfig) -> dict[str, Any]:
    """The arguments that all of timm's classes take."""
    return {
        "img_size": list(config.image_size),
        "patch_size": [side // config.resnet_stride for side in config.patch_size],
        "in_chans": config.in_channels,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.num_heads,
        "mlp_ratio": shortest_ratio([config.width], [config.mlp_width]),
        "qkv_bias": config.qkv_bias,
        "qk_norm": config.qk_norm,
        "init_values": None if config.layer_scale is None else config.layer_scale or 1e-5,  # where 0 is none
        "class_token": config.class_token,
        "global_pool": POOLINGS[config.pooling],
    }


def _plain(config: ViTConfig) -> tuple[str, dict[str, Any]]:
    """timm's VisionTransformer, and the form of it that has a distillation token."""
    after, gated = config.block_norm == "after", config.mlp == "swiglu"
    special = {
        f"block_norm={config.block_norm!r}": after and "vit_base_patch16_rpn_224",
        f"mlp={config.mlp!r}": gated and "vit_giant_patch14_dinov2",
        f"resnet={config.resnet}": config.resnet is not None and RESNETS.get(config.resnet, ""),
        "distill_token=True": config.distill_token and "deit_base_distilled_patch16_224",
        f"norm_eps={config.norm_eps}": config.norm_eps != 1e-6
        and {1e-5: "vit_base_patch16_clip_224"}.get(config.norm_eps, ""),
    }
    chosen = {what: name for what, name in special.items() if name is not False}
    if len(chosen) > 1 or "" in chosen.values():
        raise PatchlightError(
            f"{' with '.join(chosen)} cannot be written with layout='timm', which has no such architecture; use "
            "layout='patchlight'"
        )
    if after:
        refuse("timm", config, "block_norm='after'", layer_scale=None, inner_norm="none")
    if config.distill_token:
        refuse("timm", config, "distill_token=True", num_registers=0, prefix_positions="all", final_norm="tokens")
        refuse("timm", config, "distill_token=True", position="learned")
        if not config.num_classes:
            raise PatchlightError(
                "num_classes=0 with distill_token=True cannot be written with layout='timm', whose features are the "
                "mean of both tokens; use layout='patchlight'"
            )
    arguments: dict[str, Any] = {
        "pos_embed": "none" if config.position == "none" else "learn",
        "reg_tokens": config.num_registers,
        "no_embed_class": config.prefix_positions == "none",
        "pre_norm": config.embed_norm,
        "fc_norm": config.final_norm == "pooled",
        "scale_attn_norm": config.inner_norm == "both",
        "scale_mlp_norm": config.inner_norm != "none",
    }
    if config.pooling == "attention" and config.num_prefix:
        arguments["pool_include_prefix"] = True
    if gated:
        arguments["mlp_ratio"] = shortest_ratio([config.width], [2 * config.mlp_width])  # of both halves
    else:
        arguments["act_layer"] = config.mlp  # timm's names for these are ours
    return next(iter(chosen.values()), "vit_base_patch16_224") or "", arguments


def _relative(config: ViTConfig) -> tuple[str, dict[str, Any]]:
    """timm's VisionTransformerRelPos; it computes what its Beit does, and takes oblong tables as they are."""
    refuse("timm", config, f"position={config.position!r}", mlp="gelu", norm_eps=1e-6, num_registers=0, resnet=None)
    refuse("timm", config, f"position={config.position!r}", embed_norm=False, inner_norm="none", distill_token=False)
    if config.pooling == "attention":
        refuse("timm", config, f"position={config.position!r}", pooling="mean")
    if config.block_norm == "after":
        refuse("timm", config, "block_norm='after'", layer_scale=None)
    arguments: dict[str, Any] = {
        "fc_norm": config.final_norm == "pooled",
        "rel_pos_type": "bias" if config.position == "relative_bias" else "mlp",
        "rel_pos_dim": config.relative_hidden,
        "shared_rel_pos": False,
    }
    return f"vit_relpos_base_patch16_{'rpn_' if config.block_norm == 'after' else ''}224", arguments


def _eva(config: ViTConfig) -> tuple[str, dict[str, Any]]:
    """timm's Eva: EVA-02, DINOv3 and all others whose positions are rotations."""
    refuse("timm", config, f"position={config.position!r}", resnet=None, distill_token=False)
    if config.mlp != "swiglu":
        refuse("timm", config, f"position={config.position!r}", mlp="gelu")
    if config.norm_eps != 1e-5:
        refuse("timm", config, f"position={config.position!r}", norm_eps=1e-6)
    if config.block_norm == "after":
        refuse("timm", config, "block_norm='after'", layer_scale=None, qk_norm=False)
    centred = config.rope_coordinates == "centred"
    if config.norm_eps == 1e-5:
        architecture = "vit_base_patch16_dinov3"
    elif config.position == "rope_mixed":
        architecture = "vit_base_patch16_rope_mixed_224"
    else:
        architecture = "vit_base_patch16_rope_224" if config.rope_grid is None else "eva02_base_patch14_224"
    return architecture, {
        "attn_type": "rope",
        "qkv_fused": True,
        "swiglu_mlp": config.mlp == "swiglu",
        "swiglu_align_to": 0,
        "scale_mlp": config.inner_norm != "none",
        "scale_attn_inner": config.inner_norm == "both",
        "num_reg_tokens": config.num_registers,
        "use_abs_pos_emb": config.add_learned_table,
        "no_embed_class": config.prefix_positions == "none",
        "use_rot_pos_emb": True,
        "rope_type": "mixed" if config.position == "rope_mixed" else "dinov3" if centred else "cat",
        "rope_grid_indexing": "ij" if centred or config.rope_grid is not None else "xy",
        "rope_temperature": config.rope_base,
        "rope_rotate_half": centred,
        "ref_feat_shape": None if config.rope_grid is None else list(config.rope_grid),
        "use_post_norm": config.block_norm == "after",
        "use_pre_transformer_norm": config.embed_norm,
        "use_post_transformer_norm": config.final_norm == "tokens",
        "use_fc_norm": config.final_norm == "pooled",
        "dynamic_img_size": True,
    }


def _rope_as_timm(config: ViTConfig, state: State) -> tuple[State, State]:
    """Heads in the order of timm's pairs; and, by timm's name, the learned frequencies of all blocks in one tensor."""
    if config.rope_coordinates == "index":
        state = reorder_rope(state, config, back=True)
    if config.position != "rope_mixed":
        return state, {}
    frequencies = [state.pop(f"blocks.{index}.attn.rope.frequencies").flip(0) for index in range(config.depth)]
    return state, {"rope.freqs": torch.stack(frequencies, 1)}


def _names(config: ViTConfig) -> Names:
    """timm's names; where several stand for one of ours, the first is that of the class that is written."""
    table = [row for row in TIMM if row[0] != ("norm." if config.final_norm == "pooled" else "fc_norm.")]
    first: list[tuple[str, str]] = []
    if config.is_rotary:
        first += [(f"blocks.{{}}.gamma_{branch}", f"blocks.{{}}.residual{branch}.scale") for branch in (1, 2)]
    if config.is_rotary and config.inner_norm != "none" and config.mlp == "swiglu":  # gate and what it scales, apart
        first += [("blocks.{}.mlp.fc1_g.", "blocks.{}.mlp.gate."), ("blocks.{}.mlp.fc1_x.", "blocks.{}.mlp.up.")]
        table = [row for row in table if not row[1].endswith(".gate_and_up.")]
    else:
        first += [("blocks.{}.mlp.fc1.", "blocks.{}.mlp.gate_and_up.")]
    if config.resnet:
        first += [row for row in HYBRID if ".backbone.stem." in row[0]]
    return (*first, *table, *HYBRID)
