import pytest
import torch

from models_at_random import TINY, tiny_vit
from patchlight.config import ViTConfig
from patchlight.costing import costs, measure_latency
from patchlight.errors import PatchlightError
from patchlight.families import variant


@pytest.mark.parametrize(("name", "gmacs"), [("S/16", 4.60), ("B/16", 17.56), ("B/32", 4.41)])
def test_macs_are_the_published_ones(name: str, gmacs: float) -> None:
    assert costs(variant(name)).macs / 1e9 == pytest.approx(gmacs, abs=0.006)


def test_counts_agree_with_the_formulas_of_the_paper() -> None:
    config = variant("S/16", num_registers=3, image_size=(224, 112))
    counted = costs(config)
    tokens, width = 14 * 7 + 4, 384
    assert counted.tokens == tokens
    assert counted.grid == (14, 7)
    assert counted.attention_entries == 12 * 6 * tokens**2
    assert counted.mlp_macs == 12 * tokens * 2 * width * 4 * width
    assert counted.attention_macs == 12 * (tokens * 4 * width**2 + 2 * tokens**2 * width)
    patches, head = 98 * 768 * width, width * 1000
    assert counted.macs == counted.attention_macs + counted.mlp_macs + patches + head


def test_the_largest_models_cost_nothing_to_ask() -> None:
    assert costs(variant("G/14")).parameters == 1_844_440_680


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({}, 0.01),
        ({"mlp": "swiglu", "layer_scale": 0.1}, 0.01),
        ({"position": "rope2d"}, 0.01),
        ({"qk_norm": True}, 0.05),  # a kernel may copy a strided input
        ({"position": "relative_bias"}, 0.1),  # a bias that learns takes the CPU off its fused kernel
    ],
)
def test_memory_kept_is_what_training_keeps(changes: dict[str, object], tolerance: float) -> None:
    """Counted on the meta device, and weighed in a real forward pass."""
    model = tiny_vit(**changes)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        output = model(torch.randn(1, 3, 32, 32))
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    weighed = sum(size for pointer, size in storages.items() if pointer not in parameters)
    assert output.requires_grad
    assert costs(ViTConfig(**TINY, **changes)).activation_bytes == pytest.approx(weighed, rel=tolerance)


def test_costs_do_not_depend_on_the_mode_of_the_moment() -> None:
    expected = costs(ViTConfig(**TINY))
    with torch.inference_mode():
        assert costs(ViTConfig(**TINY)) == expected
    with pytest.raises(PatchlightError, match="too large to count"):
        costs(variant("B/16", image_size=16_000_000))


def test_latency_is_measured() -> None:
    latency = measure_latency(ViTConfig(**TINY), batch=3, seconds=0.01)
    assert latency.runs >= 3
    assert latency.images_per_second == pytest.approx(3000 / latency.median_ms)


@pytest.mark.parametrize("device", ["nonsense", "cuda:99"])
def test_a_device_that_is_not_there_is_named(device: str) -> None:
    with pytest.raises(PatchlightError, match=f"device='{device}'"):
        measure_latency(ViTConfig(**TINY), device=device)
