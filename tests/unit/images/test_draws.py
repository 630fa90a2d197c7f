"""Numbers that belong to a sample: spread evenly, unrelated to each other, and the same wherever they are asked for."""

import numpy as np
import pytest
import torch
from torch import Tensor

from patchlight.images.draws import Draws, epoch_order


def draws(count: int = 20_000, seed: int = 0, epoch: int = 0, repeat: int | None = None) -> Draws:
    samples_B = torch.arange(count)
    repeats_B = None if repeat is None else torch.full((count,), repeat)
    return Draws(seed, torch.full((count,), epoch), samples_B, repeats_B)


def splitmix64(x: int) -> int:
    """The published generator's step and finaliser, in Python's own whole numbers."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def test_the_reference_is_the_published_generator() -> None:
    assert splitmix64(0) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("seed", [0, 7, -1, 2**63 - 1])
def test_numbers_are_those_of_whole_number_arithmetic(seed: int) -> None:
    epochs, samples, repeats = [0, 3, 3, 1000], [0, 0, 2**40, 49_999], [0, 1, 2, 15]
    drawn_B = Draws(seed, *map(torch.tensor, (epochs, samples, repeats))).uniform("foobar")
    for place, parts in enumerate(zip(epochs, samples, repeats, strict=True)):
        state = splitmix64(seed % 2**64)
        for part in parts:
            state = splitmix64(state ^ part)
        bits = splitmix64(state ^ 0xBF9CF968)  # the published FNV-1a hash of "foobar"
        assert drawn_B[place].item() == (bits >> 11) % 2**24 / 2**24


def test_numbers_stay_those_of_earlier_versions() -> None:
    # A run that is resumed by a newer version has to go on with the same photos: never change these.
    assert draws(3, seed=5, epoch=2, repeat=1).uniform("flip").tolist() == [
        0.75520920753479,
        0.379300594329834,
        0.7258629202842712,
    ]
    assert draws(1, seed=5).uniforms("part area", 3)[0].tolist() == [
        0.875268280506134,
        0.6980389952659607,
        0.4937439560890198,
    ]
    assert epoch_order(5, 2, 8).tolist() == [5, 3, 6, 1, 0, 2, 4, 7]


def chi_squared(values_B: Tensor, bins: int) -> float:
    """How far the counts in even bins are from even, in standard deviations."""
    counts = np.bincount((values_B.numpy() * bins).astype(int), minlength=bins)
    expected = len(values_B) / bins
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float((statistic - (bins - 1)) / (2 * (bins - 1)) ** 0.5)


def test_numbers_are_uniform() -> None:
    for name in ("flip", "a", ""):
        values_B = draws().uniform(name)
        assert values_B.dtype == torch.float32
        assert 0 <= values_B.min() < 1e-3
        assert 1 - 1e-3 < values_B.max() < 1
        assert chi_squared(values_B, 100) < 4
    values_BT = draws(5000).uniforms("many", 10)
    assert values_BT.shape == (5000, 10)
    assert chi_squared(values_BT.flatten(), 100) < 4
    one_sample_B = Draws(0, torch.arange(5000), torch.zeros(5000).long())
    assert chi_squared(one_sample_B.uniform("flip"), 100) < 4


def test_everything_that_tells_draws_apart_gives_unrelated_numbers() -> None:
    first_B = draws(repeat=0).uniform("flip")
    others = {
        "name": draws(repeat=0).uniform("erase"),
        "seed": draws(repeat=0, seed=1).uniform("flip"),
        "epoch": draws(repeat=0, epoch=1).uniform("flip"),
        "repeat": draws(repeat=1).uniform("flip"),
        "next sample": first_B.roll(1),
        "epoch and sample exchanged": Draws(
            0, torch.arange(20_000), torch.zeros(20_000).long(), torch.zeros(20_000).long()
        ).uniform("flip"),
        "first of many": draws(repeat=0).uniforms("flip", 2)[:, 0],
        "second of many": draws(repeat=0).uniforms("flip", 2)[:, 1],
    }
    for what, other_B in others.items():
        assert (first_B == other_B).float().mean() < 1e-3, what
        correlation = torch.corrcoef(torch.stack((first_B, other_B)))[0, 1]
        assert correlation.abs() < 4 / 20_000**0.5, what
        # Together they fill the square evenly, which numbers that merely do not correlate need not.
        cell_B = (first_B * 10).floor() + (other_B * 10).floor() * 10
        assert chi_squared((cell_B + 0.5) / 100, 100) < 4, what


def test_numbers_do_not_depend_on_the_batch() -> None:
    samples_B = torch.tensor([9, 4, 4, 123_456])
    epochs_B, repeats_B = torch.tensor([1, 1, 2, 0]), torch.tensor([0, 1, 0, 3])
    together = Draws(3, epochs_B, samples_B, repeats_B)
    for place in range(4):
        alone = Draws(3, *(part_B[place : place + 1] for part_B in (epochs_B, samples_B, repeats_B)))
        assert torch.equal(alone.uniform("x", -2, 5), together.uniform("x", -2, 5)[place : place + 1])
        assert torch.equal(alone.uniforms("x", 4), together.uniforms("x", 4)[place : place + 1])
    assert torch.equal(together.uniforms("x", 2), together.uniforms("x", 4)[:, :2])
    assert torch.equal(together.uniform("x"), together.uniform("x"))


def test_ranges_chances_and_choices() -> None:
    values_B = draws().uniform("x", -2, 5)
    assert values_B.min() >= -2
    assert values_B.max() <= 5
    assert values_B.mean().item() == pytest.approx(1.5, abs=0.05)
    assert draws().chance("x", 0.3).float().mean().item() == pytest.approx(0.3, abs=0.01)
    assert not draws().chance("x", 0.0).any()
    assert draws().chance("x", 1.0).all()
    chosen_B = draws().choice("x", 14)
    assert chosen_B.dtype == torch.int64
    assert chi_squared((chosen_B + 0.5) / 14, 14) < 4
    assert chosen_B.unique().tolist() == list(range(14))
    assert draws().choice("x", 1).max() == 0


@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_an_epoch_visits_every_sample_once(count: int) -> None:
    order = epoch_order(0, 3, count)
    assert order.dtype == torch.int64
    assert sorted(order.tolist()) == list(range(count))


def test_orders_differ_by_epoch_and_seed_and_are_not_the_draws() -> None:
    count = 20_000
    orders = [epoch_order(0, 0, count), epoch_order(0, 1, count), epoch_order(1, 0, count), torch.arange(count)]
    orders.append(draws(count).uniform("flip").argsort())
    for i, one in enumerate(orders):
        for another in orders[:i]:
            correlation = torch.corrcoef(torch.stack((one, another)).float())[0, 1]
            assert correlation.abs() < 4 / count**0.5
            assert (one == another).sum() < 10
    assert torch.equal(epoch_order(0, 0, count), epoch_order(0, 0, count))


def test_every_order_is_as_likely() -> None:
    orders = [tuple(epoch_order(0, epoch, 3).tolist()) for epoch in range(600)]
    counts = np.array([orders.count(order) for order in sorted(set(orders))])
    assert len(counts) == 6
    assert ((counts - 100) ** 2 / 100).sum() < 20.5  # chi squared, 5 degrees: one in a thousand
