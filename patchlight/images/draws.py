"""Random numbers that belong to a sample, not to a moment: a function of (seed, epoch, sample, repeat) and a name.

Whatever the batch, the number of workers or processes, and wherever a run was stopped and taken up again, a sample is
cropped, turned and coloured the same in the same epoch. Integer arithmetic makes them equal on every device.
"""

import copy
import typing

import torch
from torch import Tensor


class Draws:
    """Uniform numbers for each of a batch of samples."""

    def __init__(self, seed: int, epochs_B: Tensor, samples_B: Tensor, repeats_B: Tensor | None = None) -> None:
        # Filled on the device: a copy from the host could not be part of a CUDA graph.
        state_B = _scramble(torch.full_like(samples_B, seed, dtype=torch.int64))
        for part_B in (epochs_B, samples_B, repeats_B):
            if part_B is not None:
                state_B = _scramble(state_B ^ part_B.long())
        self.state_B = state_B

    def uniform(self, name: str, low: float = 0.0, high: float = 1.0) -> Tensor:
        """(B,) float32 numbers from `low` to `high`; another name gives others, the same name the same.

        From 0 to 1 they stay under 1; other ends may be reached by rounding.
        """
        return low + (high - low) * _share(self._bits(name))

    def uniforms(self, name: str, count: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """(B, count) numbers as from `uniform`."""
        places = torch.arange(count, device=self.state_B.device)
        return low + (high - low) * _share(_scramble(self._bits(name)[:, None] ^ places))

    def chance(self, name: str, probability: float) -> Tensor:
        """(B,) bool, True with this probability."""
        return self.uniform(name) < probability

    def choice(self, name: str, count: int) -> Tensor:
        """(B,) whole numbers from 0 to count - 1."""
        return (self.uniform(name) * count).long().clamp(max=count - 1)

    def part(self, name: str) -> typing.Self:
        """Draws of their own for the same samples, such as those for one of several views of a photo."""
        other = copy.copy(self)
        other.state_B = self._bits(f"part of the draws: {name}")
        return other

    def _bits(self, name: str) -> Tensor:
        return _scramble(self.state_B ^ _name_bits(name))


def epoch_order(seed: int, epoch: int, count: int) -> Tensor:
    """The order in which an epoch visits its samples: a permutation (count,) of int64."""
    samples = torch.arange(count)
    state = Draws(seed, torch.full_like(samples, epoch), samples).state_B
    return _scramble(state ^ 0x6F72646572).argsort(stable=True)


def _name_bits(name: str) -> int:
    """The FNV-1a hash of a name, in Python, since torch.compile does not follow into zlib or hashlib."""
    bits = 0x811C9DC5
    for byte in name.encode():
        bits = (bits ^ byte) * 0x01000193 % 2**32
    return bits


def _share(bits: Tensor) -> Tensor:
    """24 of the bits as a number from 0 to just under 1, exact in float32."""
    return ((bits >> 11) & (2**24 - 1)).float() / 2**24


def _scramble(x: Tensor) -> Tensor:
    """splitmix64's finaliser: every bit of the input moves half the bits of the output. int64 overflow wraps."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Zeros come in from the left, as in unsigned numbers, which torch has no shifts for."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
