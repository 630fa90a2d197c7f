"""The model_args of timm's config.json: what a model was made with beyond what its architecture's name says.

Most of them the tensors tell as well, or they matter in training alone. The others are followed, or refused: none that
changes the computation is passed over.
"""

from collections.abc import Mapping
from typing import Any

from patchlight.errors import PatchlightError

# Arguments that the tensors tell as well; that matter in training alone, or for what sizes are taken; and those that
# are read elsewhere. Names with spaces between.
_IN_SHAPES = (
    "patch_size in_chans num_classes embed_dim depth depths dims mlp_ratio qkv_bias qkv_fused qk_norm init_values "
    "ls_init_value class_token reg_tokens num_reg_tokens pre_norm fc_norm use_fc_norm scale_attn_norm "
    "scale_mlp_norm scale_mlp scale_attn_inner proj_bias swiglu_mlp swiglu_align_to use_abs_pos_emb "
    "use_rel_pos_bias use_shared_rel_pos_bias rel_pos_dim shared_rel_pos use_pre_transformer_norm "
    "use_post_transformer_norm kernel_sizes use_grn conv_mlp conv_bias attn_type attn_pool_mlp_ratio head_dim "
)
_IN_TRAINING = (
    "drop_rate pos_drop_rate patch_drop_rate proj_drop_rate attn_drop_rate drop_path_rate head_init_scale "
    "weight_init fix_init dynamic_img_size dynamic_img_pad strict_img_size rope_shift_coords rope_jitter_coords "
    "rope_rescale_coords "
)
_ELSEWHERE = "img_size window_size pretrained_window_sizes num_heads norm_eps act_layer global_pool no_embed_class"
HARMLESS = frozenset(f"{_IN_SHAPES} {_IN_TRAINING} {_ELSEWHERE}".split())

# The one value, beside none at all, that says nothing new.
USUAL: dict[str, tuple[Any, ...]] = {
    "output_stride": (32,),
    "stem_type": ("patch",),
    "head_norm_first": (False,),
    "head_hidden_size": (),
    "always_partition": (False,),
    "final_norm": (True,),
    "norm_layer": ("layernorm", "LayerNorm"),
    "rel_pos_type": ("mlp", "bias"),
    "pool_include_prefix": (False,),
    "attn_only_layer_scale": (False,),
    "rope_grid_offset": (0,),
    "out_indices": (),
    "features_only": (False,),
}


def check_arguments(arguments: Mapping[str, Any], followed: tuple[str, ...] = ()) -> None:
    """Refuse an argument that changes the computation, unless it is among those that the caller follows."""
    for name, value in arguments.items():
        if value is None or name in HARMLESS or name in followed or value in USUAL.get(name, ()):
            continue
        raise PatchlightError(
            f"config.json says {name}={value!r} in model_args, which we do not have; if it makes no difference to the "
            "model, take it out"
        )


# What these arguments of timm's ViTs say, and no tensor does.
FOLLOWED = (
    "pos_embed",
    "use_rot_pos_emb",
    "rope_type",
    "rope_temperature",
    "rope_grid_indexing",
    "rope_rotate_half",
    "ref_feat_shape",
    "use_post_norm",
    "pool_include_prefix",
    "attn_pool_num_heads",
    "num_kv_heads",
)


def vit_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a `ViTConfig` that the arguments say beyond the tensors."""
    check_arguments(arguments, FOLLOWED)
    told: dict[str, Any] = {}
    for name in ("attn_pool_num_heads", "num_kv_heads"):
        if arguments.get(name) not in (None, arguments.get("num_heads")):
            check_arguments({name: arguments[name]})
    if arguments.get("norm_layer"):
        told["norm_eps"] = 1e-6  # timm's own default
    if arguments.get("no_embed_class") is not None:
        told["prefix_positions"] = "none" if arguments["no_embed_class"] else "all"
    if arguments.get("use_post_norm") is not None:
        told["block_norm"] = "after" if arguments["use_post_norm"] else "before"
    if arguments.get("pos_embed") in ("none", "") or _false(arguments, "use_abs_pos_emb", "use_rot_pos_emb"):
        told["position"] = "none"
    elif _false(arguments, "use_rot_pos_emb"):
        told["position"] = "learned"
    return told | _rope(arguments)


def _false(arguments: Mapping[str, Any], *names: str) -> bool:
    return all(arguments.get(name) is False for name in names)


def _rope(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The rotations; a kind that is turned otherwise than every published model of it is refused."""
    told: dict[str, Any] = {}
    kind, grid = arguments.get("rope_type"), arguments.get("ref_feat_shape")
    if arguments.get("use_rot_pos_emb") and kind in ("cat", "dinov3"):
        told["position"] = "rope2d"
        told["rope_coordinates"] = "centred" if kind == "dinov3" else "index"
    if kind not in (None, "", "cat", "dinov3", "mixed"):
        check_arguments({"rope_type": kind})
    if grid:
        told["rope_grid"] = (grid, grid) if isinstance(grid, int) else tuple(grid)
    elif "ref_feat_shape" in arguments:
        told["rope_grid"] = None
    if arguments.get("rope_temperature"):
        told["rope_base"] = float(arguments["rope_temperature"])
    half = kind == "dinov3"
    indexing = "ij" if half or grid else "xy"
    if kind and arguments.get("rope_grid_indexing") not in (None, indexing):
        check_arguments({"rope_grid_indexing": arguments["rope_grid_indexing"]})
    if kind and arguments.get("rope_rotate_half") not in (None, half):
        check_arguments({"rope_rotate_half": arguments["rope_rotate_half"]})
    return told
