"""Counts of Swin and ConvNeXt: the published ones, those of torch's counter on real tensors, and by hand."""

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import oracles
from patchlight.costing import costs, measure_latency
from patchlight.families import ConvNeXtConfig, SwinConfig, variant
from patchlight.models.families import make_model
from staged_models import TINY_CONVNEXT, TINY_SWIN


@pytest.mark.parametrize(
    ("name", "gmacs", "parameters"),
    [
        *[("swin-T", 4.49, 28_288_354), ("swin-B", 15.44, 87_768_224), ("convnext-T", 4.46, 28_589_128)],
        *[("swinv2-T", 5.9, 28.35e6), ("swinv2-S", 11.5, 49.73e6), ("swinv2-B", 20.3, 87.92e6)],
    ],
)
def test_counts_are_the_published_ones(name: str, gmacs: float, parameters: float) -> None:
    counted = costs(variant(name))
    assert counted.parameters == (parameters if isinstance(parameters, int) else pytest.approx(parameters, rel=3e-4))
    assert counted.macs / 1e9 == pytest.approx(gmacs, rel=0.01)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        *[("swin_tiny_patch4_window7_224", "swin-T"), ("convnext_tiny", "convnext-T")],
        *[("convnextv2_tiny", "convnextv2-T"), ("convnextv2_base", "convnextv2-B")],
        *[(f"swinv2_{size}_window8_256", f"swinv2-{size[0].upper()}") for size in ("tiny", "small", "base")],
    ],
)
def test_counts_are_those_of_timms_model(name: str, ours: str) -> None:
    timm = oracles.timm()
    timm.layers.set_fused_attn(False)
    try:
        with torch.device("meta"):
            theirs = timm.create_model(name).eval()
    finally:
        timm.layers.set_fused_attn(True)
    with FlopCounterMode(display=False) as counter:
        side = 256 if "256" in name else 224
        theirs(torch.empty(1, 3, side, side, device="meta"))
    counted = costs(variant(ours))
    assert counted.macs == counter.get_total_flops() // 2
    # The biases of Swin V2's keys, which change nothing, are weights here and a constant there.
    constant = sum(buffer.numel() for key, buffer in theirs.named_buffers() if key.endswith("k_bias"))
    assert counted.parameters == sum(parameter.numel() for parameter in theirs.parameters()) + constant


@torch.no_grad()
@pytest.mark.parametrize("size", [(48, 48), (37, 61)])
@pytest.mark.parametrize("config", [SwinConfig(**TINY_SWIN), ConvNeXtConfig(**TINY_CONVNEXT)])
def test_macs_are_those_of_a_real_pass(config: Any, size: tuple[int, int]) -> None:
    config = type(config).from_dict(config.to_dict() | {"image_size": size})
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        make_model(config)(torch.randn(1, 3, *size))
    assert costs(config).macs == counter.get_total_flops() // 2


def test_swin_by_hand() -> None:
    config = SwinConfig(**TINY_SWIN | {"image_size": (37, 61), "depths": (1, 1)})
    counted = costs(config)
    # 10 x 16 patches in 3 x 4 windows of 16, then 5 x 8 in 2 x 2.
    tokens, widths, padded = (160, 40), (12, 24), (192, 64)
    assert (counted.tokens, counted.grid) == (160, (10, 16))
    assert counted.mlp_macs == sum(t * 8 * w**2 for t, w in zip(tokens, widths, strict=True))
    assert counted.attention_macs == sum(p * 4 * w**2 + 2 * p * 16 * w for p, w in zip(padded, widths, strict=True))
    assert counted.attention_entries == 2 * 192 * 16 + 3 * 64 * 16
    assert counted.attention_entries_by_block == (2 * 192 * 16, 3 * 64 * 16)
    embedding, merging, head = 160 * 48 * 12, 40 * 48 * 24, 24 * 5
    assert counted.macs == counted.attention_macs + counted.mlp_macs + embedding + merging + head


def test_swin_grows_linearly_and_a_vit_does_not() -> None:
    def growth(name: str) -> float:
        small, large = (costs(variant(name, image_size=size)) for size in (448, 896))
        return (large.macs - large.mlp_macs) / (small.macs - small.mlp_macs)

    assert growth("swin-T") == pytest.approx(4, rel=0.03)
    assert growth("convnext-T") == pytest.approx(4, rel=0.03)
    assert growth("S/16") > 8
    assert costs(variant("convnext-T")).attention_entries == 0
    assert costs(variant("Ti/16")).attention_entries_by_block == (3 * 197**2,) * 12


def test_memory_kept_is_what_training_keeps() -> None:
    for config in (SwinConfig(**TINY_SWIN), ConvNeXtConfig(**TINY_CONVNEXT)):
        model = make_model(config).eval()
        kept: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            output = model(torch.randn(1, 3, 48, 48))
        parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
        weighed = sum(size for pointer, size in storages.items() if pointer not in parameters)
        assert output.requires_grad
        tolerance = 0.4 if config.architecture == "swin" else 0.05  # a bias that learns takes the CPU off its kernel
        assert costs(config).activation_bytes == pytest.approx(weighed, rel=tolerance)


def test_latency_is_measured() -> None:
    for config in (SwinConfig(**TINY_SWIN), ConvNeXtConfig(**TINY_CONVNEXT)):
        assert measure_latency(config, seconds=0.01).median_ms > 0
