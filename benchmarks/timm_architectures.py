"""What timm's architectures are, from timm itself: the table that `load` reads where tensors leave something open.

    python benchmarks/timm_architectures.py            # is the table that of the installed timm?
    python benchmarks/timm_architectures.py --write    # make it so

Each architecture of the families that we have is made without memory for its weights. Its tensors are read as `load`
reads them; what they leave open (heads, activation, pooling, norms' eps, rotations, windows) is looked up in timm's
modules. The table keeps what differs from the defaults of our configs; of an architecture that we cannot compute, the
reason.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import oracles
from patchlight.errors import PatchlightError
from patchlight.families import CONFIGS
from patchlight.weights.convert import convert
from patchlight.weights.family import Shapes, settings_from_shapes
from patchlight.weights.recognise import other_named, recognise
from patchlight.weights.timm_configs import FILE, architectures, layer_scale_name

MODULES = (
    "vision_transformer",
    "vision_transformer_hybrid",
    "vision_transformer_relpos",
    "deit",
    "beit",
    "eva",
    "swin_transformer",
    "swin_transformer_v2",
    "convnext",
)

ACTIVATIONS = {"GELU": "gelu", "GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu"}
GATED = ("SwiGLU", "GluMlp", "SwiGLUPacked")
POOLINGS = {"token": "cls", "avg": "mean", "map": "attention"}
NORMS = ("LayerNorm", "LayerNorm2d", "GlobalResponseNorm")
BLOCKS = {
    "Block": "before",
    "EvaBlock": "before",
    "RelPosBlock": "before",
    "ResPostBlock": "after",
    "EvaBlockPostNorm": "after",
    "ResPostRelPosBlock": "after",
}

NO_LAST_NORM = "it has no norm after its last block"


def names() -> list[str]:
    """Of the families that we have, without those that are refused by their name anyway."""
    oracles.timm()
    from timm.models import _registry

    entries = _registry._model_entrypoints
    ours = [name for name in oracles.timm().list_models() if entries[name].__module__.rpartition(".")[2] in MODULES]
    return sorted(name for name in ours if other_named(name) is None)


def row(name: str) -> dict[str, Any]:
    """What an architecture is, in our settings; of one that we do not compute the reason, and what its tensors tell."""
    with torch.device("meta"):
        model = oracles.timm().create_model(name).eval()
    reason = why_not(model)
    try:
        found = recognise(model.state_dict(), name)
        family = found.family.architecture
        state, _ = convert(found.state, found.origin)
        settings = settings_from_shapes(Shapes(state, found, name))
    except PatchlightError as error:
        return {"refused": reason or str(error).removeprefix(f"{name}: ")}
    if not reason:
        settings |= vit_settings(model) if family == "vit" else staged_settings(model)
        if family == "vit":
            settings["image_size"] = whole_patches(settings["image_size"], settings["patch_size"])
            if "positions.table" in state:
                settings["prefix_positions"] = "none" if getattr(model, "no_embed_class", False) else "all"
                settings["add_learned_table"] = settings["position"].startswith("rope")
        settings = CONFIGS[family](**settings).to_dict()
    if settings.get("layer_scale") and family == "vit":  # its first value is of no use here, its name is
        settings["layer_scale"] = layer_scale_name(found.shapes)
    if reason == NO_LAST_NORM:  # which its tensors tell
        return {"refused": reason}
    named = {"refused": reason, "architecture": family} if reason else {"architecture": family}
    return (named if reason or family != "vit" else {}) | beyond_usual(family, settings)


def whole_patches(size: tuple[int, int], patch: tuple[int, int]) -> tuple[int, int]:
    """timm passes over the pixels that are left where a patch does not divide the image."""
    return size[0] // patch[0] * patch[0], size[1] // patch[1] * patch[1]


def beyond_usual(family: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Without what is the default of our config, or for a head of some size to say."""
    usual = CONFIGS[family]().to_dict()
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
    return {name: value for name, value in plain.items() if value != usual[name] and name != "num_classes"}


def why_not(model: nn.Module) -> str:
    """Why we do not compute a model: a part of it that none of ours has; "" where there is none."""
    parts = [module for name, module in model.named_modules() if not name.startswith("patch_embed.backbone.")]
    leaves = {type(part).__name__ for part in parts if not list(part.children())}
    norms = sorted(kind for kind in leaves if "Norm" in kind and kind not in NORMS)
    if norms:
        return f"its norms are {' and '.join(norms)}, not LayerNorm"
    pooling = getattr(model, "global_pool", "avg")
    if pooling not in POOLINGS:
        return f"global_pool={pooling!r}"
    in_front = type(getattr(getattr(model, "patch_embed", None), "backbone", None)).__name__
    if in_front not in ("NoneType", "ResNetV2", "Sequential"):  # that is a ResNet's first convolution alone
        return f"its patches come through a {in_front}"
    if getattr(model, "attn_pool", None) is not None and model.num_prefix_tokens and not pools_prefix(model):
        return "its pooling by attention leaves out the tokens in front of the patches"
    last = [getattr(model, name, None) for name in ("norm", "fc_norm")]
    if hasattr(model, "blocks") and not any(isinstance(norm, nn.LayerNorm) for norm in last):
        return NO_LAST_NORM
    if isinstance(getattr(model, "norm_pre", None), nn.LayerNorm) and hasattr(model, "stages"):
        return "it normalises before it pools"
    if hasattr(model, "stages") and not isinstance(getattr(model.head, "pre_logits", nn.Identity()), nn.Identity):
        return "its head has a hidden layer"
    if hasattr(model, "stem") and not isinstance(model.stem[1], nn.LayerNorm):
        return "its stem is of two convolutions that overlap"
    blocks = [part for part in parts if hasattr(part, "attn") or hasattr(part, "conv_dw")]
    unknown = {type(block.mlp.act).__name__ for block in blocks if activation(block.mlp) is None}
    if unknown:
        return f"its activation is {' and '.join(sorted(unknown))}"
    kinds = {type(block).__name__ for block in getattr(model, "blocks", [])} - set(BLOCKS)
    return f"its blocks are {' and '.join(sorted(kinds))}" if kinds else why_not_rotations(getattr(model, "rope", None))


def why_not_rotations(rope: nn.Module | None) -> str:
    if rope is None:
        return ""
    if getattr(rope, "grid_offset", 0):
        return f"its rotations count patches from {rope.grid_offset:g}, not 0"
    kind, grid = type(rope).__name__, getattr(rope, "ref_feat_shape", None)
    centred = kind == "RotaryEmbeddingDinoV3"
    if kind != "RotaryEmbeddingMixed" and rope.grid_indexing != ("ij" if centred or grid else "xy"):
        return f"rope_grid_indexing={rope.grid_indexing!r}"
    return "" if getattr(rope, "rotate_half", False) == centred else f"rope_rotate_half={not centred}"


def pools_prefix(model: nn.Module) -> bool:
    return bool(getattr(model, "pool_include_prefix", type(model).__name__ == "Eva"))


def vit_settings(model: nn.Module) -> dict[str, Any]:
    block = model.blocks[0]
    told: dict[str, Any] = {
        "num_heads": block.attn.num_heads,
        "mlp": activation(block.mlp),
        "norm_eps": block.norm1.eps,
        "pooling": POOLINGS[model.global_pool],
        "block_norm": BLOCKS[type(block).__name__],
        "image_size": tuple(model.patch_embed.img_size or model.pretrained_cfg["input_size"][1:]),
    }
    rope = getattr(model, "rope", None)
    if rope is not None:
        told["rope_base"] = rope.temperature
        told["position"] = "rope_mixed" if type(rope).__name__ == "RotaryEmbeddingMixed" else "rope2d"
        if type(rope).__name__ == "RotaryEmbeddingDinoV3":
            told["rope_coordinates"] = "centred"
        told["rope_grid"] = getattr(rope, "ref_feat_shape", None)
    elif getattr(model, "pos_embed", None) is not None:
        told["position"] = "learned"
    return told


def activation(mlp: nn.Module) -> str | None:
    """In our words; None for one that we do not have."""
    kind = type(mlp.act).__name__
    if type(mlp).__name__ in GATED:
        return "swiglu" if kind == "SiLU" else None
    return "gelu_tanh" if getattr(mlp.act, "approximate", "none") == "tanh" else ACTIVATIONS.get(kind)


def staged_settings(model: nn.Module) -> dict[str, Any]:
    size = tuple(model.pretrained_cfg["input_size"][1:])
    if hasattr(model, "stages"):
        block = model.stages[0].blocks[0]
        return {
            "depths": tuple(len(stage.blocks) for stage in model.stages),
            "mlp": activation(block.mlp),
            "norm_eps": block.norm.eps,
            "final_norm_eps": model.head.norm.eps,
            "image_size": size,
        }
    told: dict[str, Any] = {"image_size": tuple(model.patch_embed.img_size or size), "norm_eps": model.norm.eps}
    told["window_size"] = max(tuple(stage.blocks[0].window_size) for stage in model.layers)
    sizes = [tuple(getattr(stage.blocks[0].attn, "pretrained_window_size", (0, 0))) for stage in model.layers]
    if all(all(size) for size in sizes):
        told["measuring_windows"] = tuple(size[0] for size in sizes)
    return told


def table() -> dict[str, Any]:
    return {"timm": oracles.timm().__version__, "architectures": {name: row(name) for name in names()}}


def as_text(made: dict[str, Any]) -> str:
    """One line for each architecture."""
    lines = [f"  {json.dumps(name)}: {json.dumps(settings)}" for name, settings in made["architectures"].items()]
    return f'{{"timm": {json.dumps(made["timm"])}, "architectures": {{\n' + ",\n".join(lines) + "\n}}\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare the table of timm's architectures with the installed timm.")
    parser.add_argument("--write", action="store_true", help="write the table")
    asked = parser.parse_args(arguments)
    made = json.loads(as_text(table()))
    if asked.write:
        FILE.write_text(as_text(made))
        print(f"{len(made['architectures'])} architectures of timm {made['timm']}")
        return 0
    kept, fresh = architectures(), made["architectures"]
    differing = [name for name in sorted({*kept, *fresh}) if kept.get(name) != fresh.get(name)]
    for name in differing:
        print(f"{name}: the table has {kept.get(name)}, timm {fresh.get(name)}")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
