import dataclasses
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchlight.config import ViTConfig
from patchlight.errors import PatchlightError
from patchlight.families import VIT_SIZES, ConvNeXtConfig, SwinConfig, variant
from patchlight.json_config import field_names, parse_values
from patchlight.other_names import OTHER_NAMES


def test_variant_decodes_size_and_patch() -> None:
    config = variant("B/32")
    assert (config.width, config.depth, config.num_heads, config.mlp_width) == (768, 12, 12, 3072)
    assert config.patch_size == (32, 32)
    assert config.grid == (7, 7)


def test_variant_takes_changes_and_the_mlp_follows_the_width() -> None:
    config = variant("Ti/16", image_size=(64, 96), width=96, num_classes=0)
    assert (config.image_size, config.grid, config.mlp_width, config.num_classes) == ((64, 96), (4, 6), 384, 0)
    assert variant("g/14").mlp_width == 6144
    assert dataclasses.replace(variant("B/16"), width=384, num_heads=6).mlp_width == 1536


@pytest.mark.parametrize(
    "name", ["", "B", "B16", "B/", "/16", "X/16", "B/x", "B/0", "B/-1", "b/16", "B/16/16", "B/\u00b2"]
)
def test_unknown_variant_names_the_known_ones(name: str) -> None:
    with pytest.raises(PatchlightError, match=r"unknown variant .* one of mu, Ti, S"):
        variant(name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 100, "num_heads": 12}, "width=100 is not divisible by num_heads=12; num_heads=10 would do"),
        ({"image_size": 225}, "patches of 16x16 do not divide an image of 225x225; 224x224 would do"),
        ({"image_size": (224, 100)}, "an image of 224x100; 224x96 would do"),
        ({"class_token": False}, "pooling='cls' needs class_token=True"),
        ({"distill_token": True, "pooling": "mean"}, "distill_token=True goes with"),
        ({"head_hidden": 64, "num_classes": 0}, "head_hidden=64 needs a head"),
        (
            {"class_token": False, "pooling": "mean", "prefix_positions": "class"},
            "prefix_positions='class' needs class_token=True",
        ),
        ({"position": "sincos2d", "width": 6, "num_heads": 1}, "width divisible by 4"),
        ({"position": "rope2d", "width": 12, "num_heads": 2}, "heads of a width divisible by 4, not 12/2 = 6"),
        ({"rope_base": 10.0}, "rope_base=10.0 has no effect with position='learned'"),
        ({"position": "none", "prefix_positions": "none"}, "has no effect with position='none'"),
        ({"depth": 0}, "depth=0 must be more than 0"),
        ({"num_registers": -1}, "num_registers=-1 must be 0 or more"),
        ({"drop_path": 1.0}, "drop_path=1.0 must lie in [0, 1)"),
        ({"norm_eps": float("nan")}, "norm_eps=nan should be a number"),
        ({"width": "768"}, "width='768' should be a whole number"),
        ({"width": None}, "width=None should be a whole number"),
        ({"depth": True}, "depth=True should be a whole number"),
        ({"class_token": 1}, "class_token=1 should be True or False"),
        ({"layer_scale": "x"}, "layer_scale='x' should be a number or None"),
        ({"pooling": "max"}, "pooling='max' should be one of 'cls', 'mean'"),
        ({"image_size": (224, 224, 3)}, "image_size=(224, 224, 3) should be a whole number, or two of them"),
        ({"image_size": 0}, "image_size=(0, 0) must be more than 0"),
    ],
)
def test_bad_settings_raise_with_the_remedy(settings: dict[str, object], message: str) -> None:
    with pytest.raises(PatchlightError, match=re.escape(message)):
        ViTConfig(**settings)


def test_unknown_settings_suggest_the_nearest() -> None:
    with pytest.raises(PatchlightError, match="unknown setting 'num_head' for ViTConfig; did you mean 'num_heads'"):
        variant("B/16", num_head=3)
    with pytest.raises(PatchlightError, match="unknown setting 'zzz'"):
        ViTConfig.from_dict({"zzz": 1})
    with pytest.raises(PatchlightError, match="did you mean 'num_registers'"):
        ViTConfig(num_register=4)


def test_a_patch_size_that_contradicts_the_name_raises() -> None:
    assert variant("B/16", patch_size=16) == variant("B/16", patch_size=[16, 16]) == variant("B/16")
    with pytest.raises(PatchlightError, match=r"'B/16' has patch_size=16, but patch_size=8"):
        variant("B/16", patch_size=8)


@given(
    name=st.sampled_from([f"{size}/{patch}" for size in VIT_SIZES for patch in (7, 8, 14, 16)]),
    registers=st.integers(0, 8),
    layer_scale=st.none() | st.floats(1e-6, 1),
    grid=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    mlp=st.sampled_from(["gelu", "gelu_tanh", "quick_gelu", "swiglu"]),
    uneven=st.sampled_from(["error", "pad", "resize"]),
)
def test_json_round_trip(
    name: str, registers: int, layer_scale: float | None, grid: tuple[int, int], mlp: str, uneven: str
) -> None:
    patch = int(name.split("/")[1])
    config = variant(
        name,
        num_registers=registers,
        layer_scale=layer_scale,
        image_size=(grid[0] * patch, grid[1] * patch),
        mlp=mlp,
        uneven_size=uneven,
    )
    assert ViTConfig.from_json(config.to_json()) == config
    assert json.loads(config.to_json())["architecture"] == "vit"
    assert hash(config) == hash(ViTConfig.from_dict(config.to_dict()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "must be a JSON object, not list"),
        ('{"architecture": "swin"}', "architecture='swin' is not 'vit', which ViTConfig holds"),
        ('{"width": 8, "num_heads": 3}', "not divisible"),
    ],
)
def test_bad_json_raises(text: str, message: str) -> None:
    with pytest.raises(PatchlightError, match=message):
        ViTConfig.from_json(text)


@pytest.mark.parametrize(
    ("uneven", "size", "grid"),
    [
        ("error", (32, 48), (2, 3)),
        ("pad", (33, 47), (3, 3)),
        ("pad", (1, 1), (1, 1)),
        ("resize", (39, 41), (2, 3)),
        ("resize", (1, 16), (1, 1)),
    ],
)
def test_grid_for_any_size(uneven: str, size: tuple[int, int], grid: tuple[int, int]) -> None:
    assert variant("Ti/16", uneven_size=uneven).grid_for(size) == grid


def test_prefix_tokens_and_their_position_rows() -> None:
    assert variant("Ti/16", num_registers=4).num_prefix == 5
    assert variant("Ti/16", num_registers=4).num_prefix_positions == 5
    assert variant("Ti/16", num_registers=4, prefix_positions="class").num_prefix_positions == 1
    assert variant("Ti/16", num_registers=4, prefix_positions="none").num_prefix_positions == 0
    assert variant("Ti/16", distill_token=True).num_prefix == 2


def test_settings_on_the_command_line() -> None:
    assert parse_values(["model.width=64", "optim.name=adamw", "ema=null", "augment.flip=false", "compile=True"]) == {
        "model.width": 64,
        "optim.name": "adamw",
        "ema": None,
        "augment.flip": False,
        "compile": True,
    }
    with pytest.raises(PatchlightError, match="write NAME=VALUE"):
        parse_values(["model.width"])


@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_names_of_other_libraries_are_answered_with_ours_as_the_docs_list_them(library: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / f"coming-from-{library}.md").read_text().partition("## Settings")[2]
    listed = re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE)
    rows = [(theirs, written) for whose, theirs, _, written in OTHER_NAMES if whose == library]
    assert [(theirs, written.strip("`")) for theirs, written in listed] == rows
    for theirs, written in rows:
        answers = []
        for config in (ViTConfig, SwinConfig, ConvNeXtConfig):
            with pytest.raises(PatchlightError) as refused:
                config(**{theirs: -1})  # a name of both is refused for its value
            answers.append(str(refused.value))
        assert any(f"{theirs} is {written} here" in answer for answer in answers), answers


def test_every_setting_that_a_name_of_another_library_leads_to_is_there() -> None:
    ours = {name for config in (ViTConfig, SwinConfig, ConvNeXtConfig) for name in field_names(config)}
    assert {setting for _, _, setting, _ in OTHER_NAMES} <= ours
