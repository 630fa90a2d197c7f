import pytest
import torch

from patchlight.errors import PatchlightError
from patchlight.weights.convert import convert, convert_to
from patchlight.weights.vit.names import ORIGINS

BY_NAME = {origin.name: origin for origin in ORIGINS}


def test_unknown_keys_are_kept_so_that_loading_names_them() -> None:
    ours, left_out = convert({"surprise.weight": torch.zeros(1)}, BY_NAME["timm"])
    assert (list(ours), left_out) == (["surprise.weight"], {})


def test_two_tensors_for_one_name_raise() -> None:
    state = {"norm.weight": torch.zeros(1), "fc_norm.weight": torch.zeros(1)}
    with pytest.raises(PatchlightError, match=r"two tensors for 'norm.weight'; the second is 'fc_norm.weight'"):
        convert(state, BY_NAME["timm"])


def test_queries_keys_and_values_are_stacked_in_this_order_and_a_missing_key_bias_is_zero() -> None:
    state = {f"layers.0.attention.{part}_proj.weight": torch.full((2, 2), 1.0 + i) for i, part in enumerate("qkv")}
    state |= {f"layers.0.attention.{part}_proj.bias": torch.ones(2) for part in "qv"}
    ours, _ = convert(state, BY_NAME["transformers"])
    assert sorted(ours) == ["blocks.0.attn.qkv.bias", "blocks.0.attn.qkv.weight"]
    assert ours["blocks.0.attn.qkv.weight"][:, 0].tolist() == [1, 1, 2, 2, 3, 3]
    assert ours["blocks.0.attn.qkv.bias"].tolist() == [1, 1, 0, 0, 1, 1]


@pytest.mark.parametrize("part", "kv")
def test_a_missing_key_or_value_matrix_is_not_made_up(part: str) -> None:
    state = {f"layers.0.attention.{name}_proj.weight": torch.ones(2, 2) for name in "qkv" if name != part}
    with pytest.raises(PatchlightError, match=rf"has 'blocks.0.attn.q.weight' and lacks 'blocks.0.attn.{part}.weight'"):
        convert(state, BY_NAME["transformers"])


def test_what_is_no_part_of_the_encoder_is_left_out_by_name() -> None:
    state = {"mask_token": torch.zeros(1), "head.mlp.0.weight": torch.zeros(1), "decoder_embed.weight": torch.zeros(1)}
    ours, left_out = convert(state, BY_NAME["timm"])
    assert ours == {}
    assert list(left_out.values()) == [["mask_token"], ["head.mlp.0.weight"], ["decoder_embed.weight"]]


@pytest.mark.parametrize("origin", ORIGINS, ids=lambda origin: origin.name)
def test_a_table_of_names_read_backwards_gives_names_that_read_forwards(origin) -> None:
    ours = {new.format(7, 7) + ("weight" if new.endswith(".") else ""): torch.zeros(3, 4) for _, new in origin.names}
    ours = {
        key: value
        for key, value in ours.items()
        if not any(part in key for part in (".attn.q.", ".attn.k.", ".attn.v."))
    }
    ours = {key: value for key, value in ours.items() if ".mlp.gate." not in key and ".mlp.up." not in key}
    theirs = convert_to(ours, origin.names)
    assert set(theirs) != set(ours) or origin.name == "patchlight"
    again, _ = convert(theirs, BY_NAME[origin.name]) if origin.prepare is None else (ours, {})
    assert set(again) == set(ours)
