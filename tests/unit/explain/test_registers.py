from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

import patchlight as pl
from models_at_random import POSITIONS, tiny_vit
from patchlight.errors import PatchlightError
from patchlight.explain.artifacts import artifact_patches
from patchlight.explain.attention import attention
from patchlight.explain.probes import token_norms
from patchlight.explain.registers import (
    RegisterBlock,
    add_registers,
    find_register_neurons,
    hidden_units,
    register_neurons,
)
from patchlight.models.token_geometry import lay_tokens
from patchlight.models.vit import ViT

BRIGHT = [(0, 5), (1, 10), (1, 3)]
"""(image, patch) in a batch of two images of 4x4 patches."""

MLPS = ("gelu", "gelu_tanh", "quick_gelu", "swiglu")


def bright_patches(size: tuple[int, int] = (32, 32), places: list[tuple[int, int]] = BRIGHT) -> torch.Tensor:
    image_BCHW = 0.1 * torch.randn(2, 3, *size)
    across = size[1] // 8
    for image, patch in places:
        row, column = 8 * (patch // across), 8 * (patch % across)
        image_BCHW[image, :, row : row + 8, column : column + 8] += 3
    return image_BCHW


def planted(neurons: tuple[tuple[int, int], ...] = ((1, 7),), sign: float = 1.0, **changes: Any) -> ViT:
    """A model with hidden neurons that fire hard on bright patches alone, and write a long vector when they do."""
    vit = tiny_vit(**changes)
    with torch.no_grad():
        for name, parameter in vit.named_parameters():
            if not name.startswith("head"):
                parameter.mul_(0.3)
            if "norm" in name and name.endswith("weight"):
                parameter.fill_(1)
        # Brightness is the first number of a patch's token, and little beside the others, which do not see it.
        vit.patch_embed.proj.weight.sub_(vit.patch_embed.proj.weight.mean((1, 2, 3), keepdim=True))
        vit.patch_embed.proj.weight[0] = 10 / (3 * 3 * 64)
        vit.patch_embed.proj.bias.copy_(2 * (-1.0) ** torch.arange(24))
        vit.patch_embed.proj.bias[0] = 0
        for layer, index in neurons:
            mlp: Any = vit.blocks[layer].mlp
            first = mlp.gate_and_up if vit.config.mlp == "swiglu" else mlp.up
            # Normed, the first number of a bright patch is above 3, of a dark one near 0.
            first.weight[index] = 0
            first.weight[index, 0] = 20
            first.bias[index] = -40
            if vit.config.mlp == "swiglu":
                first.weight[index + vit.config.mlp_width] = 0
                first.bias[index + vit.config.mlp_width] = sign
            mlp.down.weight[:, index] = torch.randn(24)
    return vit


def outliers(vit: ViT, image_BCHW: torch.Tensor) -> list[tuple[int, int]]:
    found = artifact_patches(token_norms(vit, image_BCHW), vit.config.num_prefix)
    return [(image, patch) for image, patch in found.nonzero().tolist()]


@pytest.mark.parametrize("mlp", MLPS)
def test_the_planted_neuron_is_found_and_its_length_moves_to_the_register(mlp: Any) -> None:
    vit, image_BCHW = planted(mlp=mlp), bright_patches()
    assert outliers(vit, image_BCHW) == sorted(BRIGHT)
    before = {name: value.clone() for name, value in vit.state_dict().items()}

    assert find_register_neurons(vit, image_BCHW, 1) == [(1, 7)]
    new = add_registers(vit, image_BCHW)
    assert register_neurons(new) == ((1, 7),)
    assert new.config.num_registers == 1
    assert outliers(new, image_BCHW) == []
    old_norms, new_norms = token_norms(vit, image_BCHW)[-1], token_norms(new, image_BCHW)[-1]
    longest = old_norms[:, 1:].amax(1)
    assert (new_norms[:, 1] > 0.5 * longest).all()
    assert (new_norms[:, 2:].amax(1) < 0.2 * longest).all()

    assert not register_neurons(vit)
    assert outliers(vit, image_BCHW) == sorted(BRIGHT)
    assert list(before) == list(vit.state_dict())
    for name, value in vit.state_dict().items():
        assert torch.equal(value, before[name])
    addresses = {parameter.data_ptr() for parameter in vit.parameters()}
    assert not addresses & {parameter.data_ptr() for parameter in new.parameters()}


@pytest.mark.parametrize("mlp", MLPS)
def test_without_attention_the_patches_are_as_if_the_neuron_were_cut(mlp: Any) -> None:
    """Tokens that do not see each other show what the change does to each alone."""
    vit, image_BCHW = planted(mlp=mlp), bright_patches()
    with torch.no_grad():
        for block in vit.blocks:
            block.attn.out.weight.zero_()
    new = add_registers(vit, image_BCHW)
    got = new.tokens(image_BCHW)
    whole = vit.tokens(image_BCHW)
    dark = torch.ones(2, 16, dtype=torch.bool)
    dark[tuple(zip(*BRIGHT, strict=True))] = False
    torch.testing.assert_close(got[:, 0], whole[:, 0])
    torch.testing.assert_close(got[:, 2:][dark], whole[:, 1:][dark], rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        vit.blocks[1].mlp.down.weight[:, 7] = 0
    torch.testing.assert_close(got[:, 2:], vit.tokens(image_BCHW)[:, 1:], rtol=1e-4, atol=1e-4)


def test_a_gated_neuron_that_fires_in_the_negative_keeps_its_sign() -> None:
    vit, image_BCHW = planted(mlp="swiglu", sign=-1.0), bright_patches()
    new = add_registers(vit, image_BCHW, neurons=1)
    assert register_neurons(new) == ((1, 7),)
    # What the neuron writes outweighs all else in the register.
    written = -vit.blocks[1].mlp.down.weight[:, 7]
    register_D = new.intermediates(image_BCHW, blocks=1)[0][0, 1]
    assert torch.cosine_similarity(register_D, written, dim=0) > 0.9


@pytest.mark.parametrize("mlp", MLPS)
def test_hidden_units_are_what_the_mlp_reads(mlp: Any) -> None:
    block = tiny_vit(mlp=mlp).blocks[0]
    x_BND = torch.randn(2, 5, 24)
    torch.testing.assert_close(block.mlp.down(hidden_units(block.mlp, x_BND)), block.mlp(x_BND))


@pytest.mark.parametrize("count", [1, 3, 8])
def test_the_largest_activations_move_in_order(count: int) -> None:
    vit = tiny_vit(num_registers=2)
    new = add_registers(vit, None, count, neurons=[(0, 4), (0, 90), (2, 1)])
    assert [isinstance(block, RegisterBlock) for block in new.blocks] == [True, False, True]
    prefix = 3 + count
    geometry = lay_tokens((2, 3), [(2, 3), (1, 2)], prefix, torch.device("cpu"))
    hidden_BNF = torch.randn(2, prefix + 6, 96)
    got = new.blocks[0].move(hidden_BNF.clone(), geometry).numpy()
    expected = hidden_BNF.numpy().copy()
    for image, own in enumerate([[0, 1, 2, 3, 4, 5], [0, 1]]):  # the second image has two patches and padding
        for neuron in (4, 90):
            fired = [float(expected[image, prefix + patch, neuron]) for patch in own]
            fired = sorted(fired, key=abs, reverse=True)
            for register in range(count):
                expected[image, 3 + register, neuron] = fired[register] if register < len(fired) else 0
            expected[image, prefix:, neuron] = 0
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize(
    "prefix",
    [
        {},
        {"num_registers": 2},
        {"distill_token": True},
        {"class_token": False, "pooling": "mean"},
        {"class_token": False, "pooling": "mean", "num_registers": 1},
    ],
    ids=str,
)
def test_the_new_tokens_start_at_zero_and_the_others_as_before(position: Any, prefix: dict[str, Any]) -> None:
    vit = tiny_vit(position=position, **prefix)
    new = add_registers(vit, None, 2, neurons=[(0, 0)])
    for size in [(32, 32), (24, 40)]:
        image_BCHW = torch.randn(2, 3, *size)
        old_BND, new_BND = vit.embed(image_BCHW)[0], new.embed(image_BCHW)[0]
        first = vit.config.num_prefix
        assert torch.equal(new_BND[:, :first], old_BND[:, :first])
        assert torch.equal(new_BND[:, first : first + 2], torch.zeros(2, 2, 24))
        assert torch.equal(new_BND[:, first + 2 :], old_BND[:, first:])
        assert new(image_BCHW).shape == (2, 5)
        assert (
            attention(new, image_BCHW, queries="registers", layers="all").weights.shape[3] == new.config.num_registers
        )


@pytest.mark.parametrize("prefix_positions", ["all", "class", "none"])
def test_learned_rows_of_the_prefix_stay_in_their_places(prefix_positions: Any) -> None:
    vit = tiny_vit(prefix_positions=prefix_positions, num_registers=1)
    new = add_registers(vit, None, 1, neurons=[(0, 0)])
    image_BCHW = torch.randn(1, 3, 32, 32)
    old_BND, new_BND = vit.embed(image_BCHW)[0], new.embed(image_BCHW)[0]
    assert torch.equal(new_BND[:, [0, 1, *range(3, 19)]], old_BND)


@pytest.mark.parametrize("position", POSITIONS)
def test_padded_images_are_treated_as_if_alone(position: Any) -> None:
    vit = planted(position=position)
    new = add_registers(vit, None, 2, neurons=[(1, 7), (0, 3)])
    image_BCHW = bright_patches((32, 48), [(0, 0), (1, 1)])
    sizes = [(32, 24), (16, 48)]
    padded = new(image_BCHW, sizes)
    for i, (h, w) in enumerate(sizes):
        alone = new(image_BCHW[i : i + 1, :, :h, :w])
        torch.testing.assert_close(padded[i : i + 1], alone, rtol=1e-4, atol=1e-4)


def test_the_fewest_neurons_that_suffice_are_taken() -> None:
    vit, image_BCHW = planted(((1, 7), (1, 20), (1, 50))), bright_patches()
    assert set(find_register_neurons(vit, image_BCHW, 3)) <= {(1, 7), (1, 20), (1, 50)}
    one = add_registers(vit, image_BCHW, neurons=1)
    assert outliers(one, image_BCHW) != []  # so that one is not enough
    new = add_registers(vit, image_BCHW)
    assert outliers(new, image_BCHW) == []
    assert 2 <= len(register_neurons(new)) <= 4


def test_later_blocks_are_not_blamed() -> None:
    """A neuron of the last block that fires on what is long already is no cause."""
    vit, image_BCHW = planted(), bright_patches()
    with torch.no_grad():
        long_D = vit.blocks[1].mlp.down.weight[:, 7]
        vit.blocks[2].mlp.up.weight[9] = 100 * long_D
        vit.blocks[2].mlp.down.weight[:, 9] = 1
    assert all(layer < 2 for layer, _ in find_register_neurons(vit, image_BCHW, 10))


def test_compiles_whole_and_shows_its_attention() -> None:
    vit, image_BCHW = planted(), bright_patches()
    new = add_registers(vit, image_BCHW)
    torch._dynamo.reset()
    compiled = torch.compile(new, fullgraph=True, backend="aot_eager", dynamic=False)
    for size in [(32, 32), (24, 56)]:
        image = torch.randn(2, 3, *size)
        torch.testing.assert_close(compiled(image), new(image), rtol=1e-5, atol=1e-5)
    maps = attention(new, image_BCHW, layers="all")
    assert maps.num_prefix == 2
    assert maps.heat().shape == (3, 2, 2, 1, 4, 4)


def test_other_ways_of_running_it() -> None:
    vit, image_BCHW = planted(), bright_patches()
    for parameter in vit.blocks[0].parameters():
        parameter.requires_grad_(False)
    new = add_registers(vit.bfloat16().train(), image_BCHW)
    assert new.training
    assert new(image_BCHW).dtype == torch.bfloat16
    assert not new.blocks[0].mlp.up.weight.requires_grad
    new.float()(image_BCHW).sum().backward()
    assert new.registers is not None
    assert new.registers.grad is not None


def test_saving_it_does_not_pass_for_the_model(tmp_path: Path) -> None:
    new = add_registers(planted(), bright_patches())
    pl.save(new, tmp_path / "model")
    with pytest.raises(PatchlightError, match="moved"):
        pl.load(tmp_path / "model")
    layouts: tuple[Literal["timm", "transformers"], ...] = ("timm", "transformers")
    for layout in layouts:
        with pytest.raises(PatchlightError, match=r"'blocks\.\d+\..*moved' has no name in the other library"):
            pl.save(new, tmp_path / layout, layout=layout)
        assert not (tmp_path / layout).exists()


def test_the_neurons_make_it_again() -> None:
    vit, image_BCHW = planted(), bright_patches()
    new = add_registers(vit, image_BCHW, 2)
    again = add_registers(vit, None, 2, neurons=register_neurons(new))
    assert torch.equal(again(image_BCHW), new(image_BCHW))


def test_no_outliers_are_said_so() -> None:
    with pytest.raises(
        PatchlightError, match=r"no outlier patches after the last two blocks in 2 images of 16 patches.*1\.\d"
    ):
        add_registers(planted(), 0.1 * torch.randn(2, 3, 32, 32))


def test_outliers_that_no_neuron_makes_are_said_so() -> None:
    vit = tiny_vit()
    with torch.no_grad():
        vit.patch_embed.proj.weight[0] = 30  # bright patches are long before the first block
    with pytest.raises(PatchlightError, match=r"leaves 3 of 3 outlier patches"):
        add_registers(vit, bright_patches())


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"count": 0}, "count=0"),
        ({"neurons": 0}, "0 neurons"),
        ({"neurons": []}, "one neuron or more"),
        ({"neurons": [(0, 1), (0, 1)]}, "each once"),
        ({"neurons": [(3, 1)]}, r"neuron \(3, 1\) does not exist: the model has 3 blocks of 96"),
        ({"neurons": [1, 2]}, "pairs"),
    ],
)
def test_mistakes_are_named(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(PatchlightError, match=match):
        add_registers(planted(), bright_patches(), **settings)


def test_registers_are_added_once_and_need_images_or_neurons() -> None:
    new = add_registers(planted(), bright_patches())
    with pytest.raises(PatchlightError, match="already"):
        add_registers(new, bright_patches())
    with pytest.raises(PatchlightError, match="without images"):
        add_registers(planted(), None)


def test_a_neuron_that_writes_nothing_is_not_blamed() -> None:
    """It fires as hard as the others, but its output weights, or the learned scale behind them, are zero."""
    vit, image_BCHW = planted(((1, 7), (1, 20), (1, 50)), layer_scale=1.0), bright_patches()
    with torch.no_grad():
        vit.blocks[1].residual2.scale.fill_(1)
        vit.blocks[1].residual2.scale[5] = 0
        vit.blocks[1].mlp.down.weight[:, 20] = 0
        vit.blocks[1].mlp.down.weight[:, 50] = 0
        vit.blocks[1].mlp.down.weight[5, 50] = 30
    found = find_register_neurons(vit, image_BCHW, 20)
    assert found[0] == (1, 7)
    assert not {(1, 20), (1, 50)} & set(found)
