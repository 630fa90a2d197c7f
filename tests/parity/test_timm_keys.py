"""timm's models with every argument of their constructors turned to another value: the same answers as timm, or a
refusal that names the argument.

Arguments and models are those of the installed timm, so that what a later version adds is tried here without anyone
having heard of it.
"""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oracles
from models_at_random import distance, redraw, some_image
from patchlight.errors import PatchlightError
from patchlight.other_names import OTHER_NAMES
from patchlight.weights.load import load

PLAIN = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}
WINDOWS = {"img_size": 64, "embed_dim": 24, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 4, 4], "num_classes": 5}
STAGES = {"depths": [1, 1, 1, 1], "dims": [8, 12, 16, 20], "num_classes": 5}

# One architecture for each of timm's constructors, and for each kind of model that it makes.
REFERENCES: dict[str, dict[str, Any]] = {
    "vit_base_patch16_224": PLAIN,
    "vit_base_patch16_clip_quickgelu_224": PLAIN,
    "vit_base_patch16_siglip_224": PLAIN,
    "vit_small_patch14_reg4_dinov2": PLAIN,
    "vit_giant_patch14_dinov2": PLAIN,
    "vit_base_patch16_rpn_224": PLAIN,
    "deit_tiny_distilled_patch16_224": PLAIN,
    "vit_relpos_base_patch16_224": PLAIN,
    "vit_relpos_base_patch16_rpn_224": PLAIN,
    "beit_base_patch16_224": PLAIN,
    "eva02_base_patch14_224": PLAIN,
    "beit3_base_patch16_224": PLAIN,
    "vit_base_patch16_rope_224": PLAIN,
    "vit_base_patch16_rope_mixed_ape_224": PLAIN,
    "vit_small_patch16_dinov3": PLAIN,
    "vit_small_plus_patch16_dinov3_qkvb": PLAIN,
    "swin_tiny_patch4_window7_224": WINDOWS | {"window_size": 4},
    "swinv2_tiny_window8_256": WINDOWS | {"window_size": 4},
    "convnext_tiny": STAGES,
    "convnextv2_tiny": STAGES,
}

VALUES: dict[str, list[Any]] = {
    "global_pool": ["token", "avg", "map", "max", "avgmax", ""],
    "act_layer": ["gelu", "gelu_tanh", "quick_gelu", "relu", "silu"],
    "norm_layer": ["layernorm", "layernorm2d", "rmsnorm", "rmsnorm2d", "simplenorm", "batchnorm2d"],
    "embed_norm_layer": ["layernorm", "rmsnorm"],
    "mlp_layer": ["swiglu", "glumlp"],
    "attn_layer": ["diff"],
    "pos_embed": ["", "none", "learn"],
    "weight_init": ["skip", "jax", "moco"],
    "img_size": [48, [32, 64]],
    "patch_size": [2, 4, 16],
    "num_heads": [1, 2, 4, 6, [1, 2, 2, 4]],
    "num_kv_heads": [1],
    "attn_pool_num_heads": [1, 2],
    "attn_pool_mlp_ratio": [2.0],
    "head_dim": [8, 12],
    "mlp_ratio": [2.0, 3.5],
    "depths": [[1, 2, 1, 1], [1, 1, 3, 1]],
    "dims": [[8, 16, 24, 32]],
    "embed_dim": [24, 96],
    "window_size": [2, 8, [2, 4]],
    "pretrained_window_sizes": [[2, 2, 2, 1], [4, 4, 2, 0]],
    "kernel_sizes": [3, 5, [7, 5, 5, 3]],
    "in_chans": [1, 4],
    "init_values": [1e-5, 0.1],
    "ls_init_value": [None, 0.1],
    "reg_tokens": [2],
    "num_reg_tokens": [2],
    "rel_pos_type": ["mlp", "bias", "mlp_swin", "bias_gather"],
    "rel_pos_dim": [16],
    "rope_type": ["cat", "mixed", "dinov3", "1d"],
    "rope_grid_indexing": ["ij", "xy"],
    "rope_grid_offset": [1.0],
    "rope_temperature": [10.0, 5000.0],
    "ref_feat_shape": [7, [5, 9]],
    "attn_type": ["eva", "rope"],
    "output_stride": [8, 16],
    "stem_type": ["overlap", "overlap_tiered", "overlap_act"],
    "head_hidden_size": [10],
    "norm_eps": [1e-3, 1e-5],
    "swiglu_align_to": [16],
    "drop_path_rate": [0.3],
    "device": ["cpu"],
}

# Arguments of which timm takes no value that JSON can hold in any of these architectures, or none without another.
UNTRIED = {"mlp_layer", "embed_norm_layer", "attn_layer", "num_kv_heads"}

# Those that no JSON can hold; classes are given by name where timm takes one.
CLASSES = ("self", "args", "kwargs", "embed_layer", "block_fn", "dtype")


NOT_MADE = "timm does not make it"


def parameters(name: str) -> dict[str, Any]:
    """The constructor's arguments and their defaults."""
    kind = type(made(name, REFERENCES[name]))
    found: dict[str, Any] = {}
    for each in (each for each in kind.__mro__ if each.__module__.startswith("timm.")):
        for parameter in inspect.signature(each.__init__).parameters.values():
            if parameter.name not in CLASSES:
                found.setdefault(parameter.name, parameter.default)
    return found


def other_values(key: str, value: Any) -> list[Any]:
    if key in VALUES:
        return [other for other in VALUES[key] if other != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value]
    if isinstance(value, float):
        return [0.3]
    if value is None:
        return [True, False, 2, 0.5]
    return []


def made(name: str, arguments: dict[str, Any]) -> nn.Module:
    return oracles.timm().create_model(name, **arguments).eval()


@torch.no_grad()
def answers(model: Any, size: tuple[int, ...]) -> Tensor:
    return model(some_image(size))


def size_of(model: Any, arguments: dict[str, Any]) -> tuple[int, int, int]:
    sides = arguments.get("img_size", 128)
    sides = (sides, sides) if isinstance(sides, int) else tuple(sides)
    return arguments.get("in_chans", 3), *sides


def judged(name: str, arguments: dict[str, Any], key: str, folder: Path) -> str | None:
    """What is wrong with a model that has this argument; None if nothing is, or if timm cannot make it."""
    oracles.timm()
    from timm.models import save_for_hf

    try:
        model = made(name, arguments)
        redraw(model)
        size = size_of(model, arguments)
        expected = answers(model, size)
        assert expected.isfinite().all()
        save_for_hf(model, folder, model_args=arguments, safe_serialization=True)
    except Exception as error:
        return f"{NOT_MADE}: {error}"
    named = {key} | {ours for theirs, _, ours, _ in OTHER_NAMES if theirs == key}
    try:
        loaded = load(folder)
    except PatchlightError as error:
        right = any(word in str(error) for word in named) and "\n" not in str(error)
        return None if right else f"refused otherwise: {error}"
    with torch.no_grad():
        own = loaded.model(some_image(size))
    if own.shape != expected.shape:
        return f"gives {tuple(own.shape)}, not {tuple(expected.shape)}"
    apart = distance(own, expected)
    return None if apart < 1e-4 else f"differs by {apart:.2g}"


TRIED: dict[str, bool] = {}
"""Every argument that was met, and whether timm made a model with another value of it."""


@pytest.mark.parametrize("name", REFERENCES)
def test_each_argument_at_another_value(name: str, tmp_path: Path) -> None:
    oracles.timm()
    assert judged(name, REFERENCES[name], "", tmp_path / "as it is") is None
    wrong = []
    for key, value in parameters(name).items():
        TRIED.setdefault(key, False)
        for number, other in enumerate(other_values(key, value)):
            said = judged(name, REFERENCES[name] | {key: other}, key, tmp_path / f"{key}{number}")
            TRIED[key] |= said is None or not said.startswith(NOT_MADE)
            if said is not None and not said.startswith(NOT_MADE):
                wrong.append(f"{key}={other!r}: {said}")
    assert not wrong, "\n".join(wrong)


def test_every_argument_was_tried() -> None:
    if len(TRIED) < 60:
        pytest.skip("the tests above were not all run")
    assert {key for key, tried in TRIED.items() if not tried} <= UNTRIED


def test_an_argument_that_nobody_knows_is_a_note(tmp_path: Path) -> None:
    oracles.timm()
    from timm.models import save_for_hf

    name = "vit_base_patch16_224"
    save_for_hf(made(name, PLAIN), tmp_path, model_args=PLAIN | {"frobnicate": 3}, safe_serialization=True)
    assert "model_args in config.json that we do not know, taken to change nothing: frobnicate" in load(tmp_path).notes
