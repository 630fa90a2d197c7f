"""The arguments and the architectures' names in timm's config.json, against the models that timm makes of them."""

from pathlib import Path
from typing import Any

import pytest
import torch

import oracles
from models_at_random import randomize
from patchlight.errors import PatchlightError
from patchlight.weights.load import load

SMALL = {"img_size": 32, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}
STAGES = {"depths": (1, 1, 1, 1), "dims": (8, 12, 16, 20), "num_classes": 5}


def made_by_timm(name: str, arguments: dict[str, Any], folder: Path) -> torch.nn.Module:
    timm = oracles.timm()
    from timm.models import save_for_hf

    model = timm.create_model(name, **arguments).eval()
    randomize(model)
    save_for_hf(model, folder, model_args=arguments, safe_serialization=True)
    return model


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("vit_base_patch16_224", SMALL | {"patch_size": 8, "norm_layer": "layernorm"}),
        ("vit_base_patch16_clip_224", SMALL | {"patch_size": 8}),
        ("vit_base_patch16_clip_224", SMALL | {"patch_size": 8, "norm_layer": "layernorm"}),
        ("vit_base_patch16_224", SMALL | {"pos_embed": "none", "drop_path_rate": 0.1, "weight_init": "skip"}),
        ("beit3_base_patch16_224", SMALL),
        ("vit_small_patch16_lingbot", SMALL),
        ("vit_base_patch16_rope_224", SMALL | {"patch_size": 8, "rope_temperature": 20.0}),
        ("vit_base_patch16_rope_224", SMALL | {"patch_size": 8, "rope_type": "cat", "ref_feat_shape": None}),
        ("vit_base_patch16_rope_mixed_224", SMALL | {"patch_size": 8, "no_embed_class": True}),
        ("eva02_base_patch14_224", SMALL | {"patch_size": 8, "ref_feat_shape": (7, 9), "rope_temperature": 50.0}),
        ("eva02_base_patch14_224", SMALL | {"patch_size": 8, "use_rot_pos_emb": False}),
        ("eva02_base_patch14_224", SMALL | {"patch_size": 8, "global_pool": "token"}),
        ("vit_small_patch16_dinov3", SMALL | {"patch_size": 8, "global_pool": "token", "rope_temperature": 7.0}),
        ("test_vit", {}),  # from here on heads, and what is pooled, are known by the name alone
        ("test_vit2", {}),
        ("test_vit3", {}),
        ("vit_base_patch16_gap_224", {"depth": 1, "img_size": 32, "num_classes": 5}),
        ("convnext_tiny", STAGES | {"output_stride": 32, "stem_type": "patch"}),
        ("convnext_tiny", STAGES | {"norm_eps": 1e-3, "act_layer": "gelu_tanh", "use_grn": True}),
    ],
    ids=str,
)
@torch.no_grad()
def test_what_the_arguments_say_is_followed(name: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    theirs = made_by_timm(name, arguments, tmp_path)
    loaded = load(tmp_path)
    size = (64, 64) if name.startswith("convnext") else loaded.config.image_size
    image_BCHW = torch.randn(2, 3, *size)
    expected = theirs(image_BCHW)
    largest = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(loaded.model(image_BCHW), expected, atol=3e-6 * largest, rtol=3e-6)
    norms = [each for each in theirs.modules() if isinstance(each, torch.nn.LayerNorm)]
    assert {each.eps for each in norms} == {loaded.config.norm_eps}


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("convnext_tiny", STAGES | {"output_stride": 16}, "output_stride=16 in model_args, which is not supported"),
        ("convnext_tiny", STAGES | {"head_norm_first": True}, "it is a ConvNeXt that normalises before it pools"),
        (
            "vit_base_patch16_rope_224",
            SMALL | {"rope_type": "cat", "rope_grid_indexing": "ij"},
            "rope_grid_indexing='ij'",
        ),
        ("vit_base_patch16_224", SMALL | {"pool_include_prefix": True}, None),
        (
            "vit_base_patch16_224",
            SMALL | {"global_pool": "map"},
            "it pools by attention, with 1 tokens in front of its patches; timm leaves them out",
        ),
        ("vit_relpos_base_patch16_224", SMALL | {"rel_pos_type": "mlp_swin"}, "rel_pos_type='mlp_swin' in model_args"),
        (
            "convnext_tiny",
            STAGES | {"global_pool": "max"},
            "config.json says global_pool='max', which is not supported",
        ),
        ("swin_tiny_patch4_window7_224", {"always_partition": True, "depths": (1, 1, 1, 1)}, "always_partition=True"),
    ],
)
def test_what_we_do_not_have_is_refused(name: str, arguments: dict[str, Any], said: str | None, tmp_path: Path) -> None:
    made_by_timm(name, arguments, tmp_path)
    if said is None:  # which says nothing where nothing is pooled by attention
        load(tmp_path)
        return
    with pytest.raises(PatchlightError) as caught:
        load(tmp_path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
