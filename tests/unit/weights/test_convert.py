import pytest
import torch

from patchlight.config import variant
from patchlight.errors import PatchlightError
from patchlight.weights.convert import from_timm, from_transformers


def test_unknown_keys_are_kept_so_that_loading_names_them() -> None:
    converted = from_timm({"decoder.weight": torch.zeros(1)}, variant("Ti/16"))
    assert list(converted) == ["decoder.weight"]


def test_two_tensors_for_one_name_raise() -> None:
    state = {"norm.weight": torch.zeros(1), "fc_norm.weight": torch.zeros(1)}
    with pytest.raises(PatchlightError, match=r"two tensors for 'norm.weight'; the second is 'fc_norm.weight'"):
        from_timm(state, variant("Ti/16"))


def test_queries_keys_and_values_are_stacked_in_this_order() -> None:
    state = {f"vit.layers.0.attention.{part}_proj.weight": torch.full((2, 2), i) for i, part in enumerate("qkv")}
    converted = from_transformers(state)
    assert list(converted) == ["blocks.0.attn.qkv.weight"]
    assert converted["blocks.0.attn.qkv.weight"][:, 0].tolist() == [0, 0, 1, 1, 2, 2]
