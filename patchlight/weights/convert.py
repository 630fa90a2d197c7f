"""State dicts of other libraries in our names, and ours in theirs, by tables of names.

A row of a table pairs their name with ours; `{}` is a block's number, and a row that ends in a dot stands for all names
below it. The first row that matches a key renames it. Read from right to left, the same table writes their names.
Names of ours that end in `attn.q`, `attn.k` and `attn.v` are the three parts of `attn.qkv`.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from patchlight.errors import PatchlightError

State = dict[str, Tensor]
Names = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A way to name tensors that some library or paper uses, and the settings that its authors take for granted."""

    name: str
    marks: tuple[str, ...]
    """Keys, relative to the encoder's prefix, that every checkpoint of this origin has."""
    names: Names
    left_out: tuple[tuple[str, str], ...] = ()
    """Pattern and meaning of tensors that are not part of the encoder."""
    conventions: Mapping[str, Any] = field(default_factory=dict)
    """Settings that no shape can tell."""
    settled: bool = False
    """Whether all models in this naming follow the conventions, so that none of them is a guess."""
    prepare: Callable[[State], State] | None = None
    """Changes made before renaming that a table of names cannot express."""
    outside: Callable[[State], tuple[str, ...]] | None = None
    """Given the tensors below the prefix: prefixes of parts of the encoder that are stored outside it."""


def join_biases(state: State) -> None:
    """Join separate q_bias and v_bias (BEiT, EVA; keys have none) into one bias for queries, keys and values."""
    for key in [key for key in state if key.endswith(".attn.q_bias")]:
        q_bias, v_bias = state.pop(key), state.pop(key.replace("q_bias", "v_bias"))
        state[key.replace("q_bias", "qkv.bias")] = torch.cat([q_bias, torch.zeros_like(q_bias), v_bias])


def convert(state: State, origin: Origin) -> tuple[State, dict[str, list[str]]]:
    """The state in our names, and what was left out of it: meaning -> keys. Unknown keys keep their names.

    The tensors are taken out of `state`, so that what is joined can be freed at once.
    """
    prepared = dict(state) if origin.prepare is None else origin.prepare(dict(state))
    state.clear()
    left_out: dict[str, list[str]] = {}
    for key in list(prepared):
        for pattern, meaning in origin.left_out:
            if re.search(pattern, key):
                left_out.setdefault(meaning, []).append(key)
                del prepared[key]
                break
    ours = _rename(prepared, origin.names)
    prepared.clear()
    _join(ours)
    for key in ("class_token", "distill_token", "registers", "positions.table", "attention_pool.query"):
        if key in ours:
            ours[key] = ours[key].reshape(-1, ours[key].shape[-1])  # without the batch axis that others keep
    if "registers" in ours and len(ours["registers"]) == 0:  # transformers keeps an empty table where there are none
        del ours["registers"]
    return ours, left_out


def convert_to(state: Mapping[str, Tensor], names: Names) -> State:
    """Our state in another origin's names, the inverse of `convert`; a tensor that it has no name for is refused."""
    named = {ours for _, ours in names}
    joined = {".qkv.": ("q", "k", "v"), ".gate_and_up.": ("gate", "up")}
    splits = {whole: parts for whole, parts in joined.items() if not any(whole in ours for ours in named)}
    parts: State = {}
    for key, value in state.items():
        whole = next((whole for whole in splits if whole in key), None)
        if whole is None:
            parts[key] = value
        else:
            pieces = zip(splits[whole], value.chunk(len(splits[whole])), strict=True)
            parts |= {key.replace(whole, f".{part}."): piece for part, piece in pieces}
    return _rename(parts, [(ours, theirs) for theirs, ours in names], _no_name)


def refuse(layout: str, config: Any, because: str = "", **needed: Any) -> None:
    """Raise if the config has a setting that the other library's model cannot express."""
    for name, value in needed.items():
        if getattr(config, name) != value:
            raise PatchlightError(
                f"{name}={getattr(config, name)!r}{because and ' with ' + because} cannot be written with "
                f"layout={layout!r}, whose model has {value!r}; use layout='patchlight'"
            )


def shortest_ratio(widths: list[int], hidden: list[int]) -> float:
    """The shortest decimal r for which int(width * r) is the hidden width at every width."""
    least = max(map(Fraction, hidden, widths))
    for digits in range(16):
        ratio = math.ceil(least * 10**digits) / 10**digits
        if [int(width * ratio) for width in widths] == hidden:
            return ratio
    raise ValueError(f"no one ratio gives MLPs of {hidden} at widths of {widths}")


def _no_name(key: str) -> str:
    raise PatchlightError(f"{key!r} has no name in the other library's model; use layout='patchlight'")


def _rename(state: State, names: Iterable[tuple[str, str]], otherwise: Callable[[str], str] = str) -> State:
    """Rename each key by the first row that matches it; `otherwise` gives the name of a key that no row matches."""
    rows = [
        (re.compile(re.escape(old).replace(r"\{\}", r"(\d+)") + ("" if old.endswith(".") else "$")), new)
        for old, new in names
    ]
    renamed: State = {}
    for key, value in state.items():
        for pattern, new in rows:
            match = pattern.match(key)
            if match:
                name = new.format(*match.groups()) + key[match.end() :]
                break
        else:
            name = otherwise(key)
        if name in renamed:
            raise PatchlightError(f"the checkpoint has two tensors for {name!r}; the second is {key!r}")
        renamed[name] = value
    return renamed


def _join(state: State) -> None:
    """Put queries, keys and values into one matrix, and a gated MLP's two inputs into one; in place, to save memory."""
    parts: dict[str, list[Tensor]] = {}
    for key in [key for key in state if re.search(r"\.attn\.q\.(weight|bias)$", key)]:
        names = [key.replace(".attn.q.", f".attn.{part}.") for part in "qkv"]
        if key.endswith(".bias"):  # keys may go without: DINOv3 has a bias on queries and values alone
            state.setdefault(names[1], torch.zeros_like(state[key]))
        missing = [name for name in names if name not in state]
        if missing:
            raise PatchlightError(f"the checkpoint has {key!r} and lacks {missing[0]!r}")
        parts[key.replace(".attn.q.", ".attn.qkv.")] = [state.pop(name) for name in names]
    with ThreadPoolExecutor() as pool:  # most of the time goes into getting the memory, which each core can do
        state.update(zip(parts, pool.map(torch.cat, parts.values()), strict=True))
    for key in [key for key in state if key.startswith("attention_pool.k.")]:
        k, v = state.pop(key), state.pop(key.replace(".k.", ".v."))
        state[key.replace(".k.", ".kv.")] = torch.cat([k, v])
    for key in [key for key in state if ".mlp.gate." in key]:
        up = key.replace(".gate.", ".up.")
        state[key.replace(".gate.", ".gate_and_up.")] = torch.cat([state.pop(key), state.pop(up)])
    for key in [key for key in state if key.endswith(".mlp.up.weight")]:
        down = state.get(key.replace(".up.", ".down."))
        if down is not None and state[key].ndim == down.ndim == 2 and state[key].shape[0] == 2 * down.shape[1]:
            for part in ("weight", "bias"):
                name = key.removesuffix("weight") + part
                if name in state:
                    state[name.replace(".up.", ".gate_and_up.")] = state.pop(name)
