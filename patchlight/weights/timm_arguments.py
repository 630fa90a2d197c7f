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
    "rope_rescale_coords device dtype "
)
_ELSEWHERE = "img_size window_size pretrained_window_sizes num_heads norm_eps act_layer global_pool no_embed_class"
HARMLESS = frozenset(f"{_IN_SHAPES} {_IN_TRAINING} {_ELSEWHERE}".split())

# Of those that change what is computed, the values beside none at all that say nothing new; others are refused.
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
    "embed_norm_layer": (),
    "attn_layer": (),
    "block_fn": (),
    "embed_layer": (),
    "mlp_layer": (),
}


def refuse(said: str) -> PatchlightError:
    return PatchlightError(
        f"config.json says {said} in model_args, which we do not have; if it makes no difference to the model, take it "
        "out"
    )


def check_arguments(arguments: Mapping[str, Any], followed: tuple[str, ...] = ()) -> None:
    """Refuse an argument that changes the computation, unless it is among those that the caller follows."""
    for name, value in arguments.items():
        if name == "global_pool" and value == "":
            raise refuse("global_pool=''")
        if name in USUAL and name not in followed and value is not None and value not in USUAL[name]:
            raise refuse(f"{name}={value!r}")


def note_unknown_arguments(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """What is to be said of arguments that no table here lists, and that are passed over."""
    unknown = sorted(set(arguments) - HARMLESS - set(USUAL) - set(FOLLOWED))
    if not unknown:
        return ()
    return (f"model_args in config.json that we do not know, taken to change nothing: {', '.join(unknown)}",)


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


def vit_settings(arguments: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a `ViTConfig` that the arguments say beyond the tensors; `usual`: the architecture's own."""
    check_arguments(arguments, FOLLOWED)
    told: dict[str, Any] = {}
    for name in ("attn_pool_num_heads", "num_kv_heads"):
        if arguments.get(name) not in (None, arguments.get("num_heads", usual.get("num_heads"))):
            raise refuse(f"{name}={arguments[name]!r}")
    if usual.get("distill_token") and arguments.get("fc_norm"):  # which timm makes, and never calls
        raise refuse(f"fc_norm={arguments['fc_norm']!r} with a distillation token")
    pooling = {"cls": "token", "mean": "avg", "attention": "map"}.get(usual.get("pooling", ""))
    if arguments.get("pool_include_prefix") and arguments.get("global_pool", pooling) == "avg":
        raise refuse("pool_include_prefix=True with global_pool='avg'")
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
    return told | _rope(arguments, usual)


def _false(arguments: Mapping[str, Any], *names: str) -> bool:
    return all(arguments.get(name) is False for name in names)


def _rope(arguments: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """The rotations; a kind that is turned otherwise than every published model of it is refused."""
    given = {name: value for name, value in arguments.items() if name in _ROPE}
    position = str(usual.get("position", ""))
    rotates = arguments.get("use_rot_pos_emb", position.startswith("rope"))
    if not rotates or not (given or "use_rot_pos_emb" in arguments):
        return {}
    centred, grid = usual.get("rope_coordinates") == "centred", usual.get("rope_grid")
    values: dict[str, Any] = {
        "rope_type": "dinov3" if centred else "mixed" if position == "rope_mixed" else "cat",
        "rope_grid_indexing": "ij" if centred or grid or not position.startswith("rope") else "xy",
        "rope_rotate_half": centred,
        "ref_feat_shape": grid,
        "rope_temperature": usual.get("rope_base") if position.startswith("rope") else 10_000.0,
    } | given
    kind, grid = values["rope_type"], values["ref_feat_shape"]
    ours = {
        "cat": ("ij" if grid else "xy", False),
        "mixed": ("xy", False),
        "dinov3": ("ij", True),
    }
    if ours.get(kind) != (values["rope_grid_indexing"], bool(values["rope_rotate_half"])):
        raise refuse(" with ".join(f"{name}={values[name]!r}" for name in _ROPE if name in values))
    told: dict[str, Any] = {}
    if kind in ("cat", "dinov3"):
        told["position"] = "rope2d"
        told["rope_coordinates"] = "centred" if kind == "dinov3" else "index"
        told["rope_grid"] = (
            None if not grid or kind == "dinov3" else (grid, grid) if isinstance(grid, int) else tuple(grid)
        )
    if values.get("rope_temperature"):
        told["rope_base"] = float(values["rope_temperature"])
    return told


_ROPE = ("rope_type", "rope_grid_indexing", "rope_rotate_half", "ref_feat_shape", "rope_temperature")
