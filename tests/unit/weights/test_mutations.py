"""Checkpoint files with bytes flipped, cut, put in or repeated: they load, finite, or are refused; nothing else."""

import functools
import io
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from models_at_random import tiny_vit
from patchlight.weights.load import load
from patchlight.weights.read import CheckpointError, read_checkpoint

KINDS = ("safetensors", "pt", "legacy.pt", "npz")


@functools.cache
def whole_file(kind: str) -> bytes:
    """A model as small as they come, so that most bytes mean something."""
    model = tiny_vit(width=4, depth=1, num_heads=1, patch_size=16, mlp_dim=4, num_classes=2)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    buffer = io.BytesIO()
    if kind == "safetensors":
        return save(state)
    if kind == "npz":
        np.savez(buffer, allow_pickle=False, **{key: value.numpy() for key, value in state.items()})
    else:
        torch.save({"model": state, "epoch": 1}, buffer, _use_new_zipfile_serialization=kind == "pt")
    return buffer.getvalue()


@st.composite
def mutations(draw: st.DrawFn) -> list[tuple[str, float, bytes, int]]:
    """What to do, where (as a part of the length), with which bytes, and to how many."""
    places = st.one_of(st.floats(0, 1), st.floats(0, 0.02), st.floats(0.9, 1))  # headers stand first, directories last
    step = st.tuples(
        st.sampled_from(("flip", "cut", "insert", "repeat", "overwrite", "end")),
        places,
        st.one_of(
            st.binary(min_size=1, max_size=9), st.sampled_from((b"\xff" * 8, b"\0" * 8, b"\xff" * 4, b"9999999"))
        ),
        st.one_of(st.integers(1, 16), st.integers(1, 5000)),
    )
    return draw(st.lists(step, min_size=1, max_size=4))


def mutate(content: bytes, steps: list[tuple[str, float, bytes, int]]) -> bytes:
    for what, place, other, count in steps:
        at = int(place * len(content))
        before, after = content[:at], content[at:]
        if what == "flip":
            content = before + bytes(byte ^ other[0] for byte in after[:1]) + after[1:]
        elif what == "cut":
            content = before + after[count:]
        elif what == "insert":
            content = before + other + after
        elif what == "repeat":
            content = before + after[:count] + after
        elif what == "overwrite":
            content = before + other + after[len(other) :]
        else:
            content = before
    return content


@pytest.mark.parametrize("kind", KINDS)
def test_whole_file_loads(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"x.{kind}"
    path.write_bytes(whole_file(kind))
    if kind == "npz":  # an archive of arrays in our own names
        assert read_checkpoint(path).keys() == tiny_vit(depth=1).state_dict().keys()
    assert load(path, num_heads=1).config.depth == 1


@pytest.mark.parametrize("kind", KINDS)
def test_mutated_file_loads_finite_or_is_refused(kind: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"x.{kind}"

        @settings(max_examples=200, suppress_health_check=list(HealthCheck), database=None)
        @given(mutations())
        def check(steps: list[tuple[str, float, bytes, int]]) -> None:
            path.write_bytes(mutate(whole_file(kind), steps))
            message = None
            try:
                model = load(path, num_heads=1).model
            except CheckpointError as error:
                message = str(error)
            if message is None:
                assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
            else:
                assert message.startswith(str(path))
                assert "\n" not in message

        check()
