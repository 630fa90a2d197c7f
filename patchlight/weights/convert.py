"""State dicts of other libraries in our names, and ours in theirs, by the tables of `names.py`."""

import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from patchlight.config import ViTConfig
from patchlight.errors import PatchlightError
from patchlight.weights.names import (
    BEIT,
    EVA,
    HYBRID,
    JAX,
    OPEN_CLIP,
    OURS,
    TIMM,
    TORCHVISION,
    TRANSFORMERS,
    TRANSFORMERS_CLIP,
    TRANSFORMERS_SIGLIP,
    Names,
)

State = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A naming that checkpoints come in, and what its authors take for granted."""

    name: str
    marks: tuple[str, ...]
    """Keys that are all there in a checkpoint of this origin, seen from where the encoder starts."""
    names: Names
    left_out: tuple[tuple[str, str], ...] = ()
    """Pattern and meaning of tensors that are not part of the encoder."""
    conventions: Mapping[str, Any] = field(default_factory=dict)
    """Settings that no shape can tell."""
    settled: bool = False
    """Whether all models in this naming follow the conventions, so that none of them is a guess."""
    prepare: Callable[[State], State] | None = None
    """What a table of names cannot say, done before renaming."""
    architecture: str = "vit"
    """Which of `families.CONFIGS` its models have."""


def _prepare_timm(state: State) -> State:
    """DINOv2's chunked blocks, DINOv3's masked key bias, biases kept apart (BEiT, EVA), and what blocks share."""
    prepared: State = {}
    for key, value in state.items():
        # DINOv2 groups blocks into chunks: blocks.2.17.norm1 is block 17.
        prepared[re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", key)] = value
    for key in [key for key in prepared if key.endswith(".attn.qkv.bias_mask")]:
        mask, bias = prepared.pop(key), key.removesuffix("_mask")
        # The mask is zero (or, before it was set, NaN) for keys, which are used without a bias.
        prepared[bias] = torch.where(mask == 1, prepared[bias], torch.zeros_like(prepared[bias]))
    join_biases(prepared)
    if "rope.freqs" in prepared:  # the columns' and the rows' frequencies of all blocks
        for number, across_down in enumerate(prepared.pop("rope.freqs").unbind(1)):
            prepared[f"blocks.{number}.attn.rope.frequencies"] = across_down.flip(0).contiguous()
    for shared in ("rel_pos_bias.", "shared_rel_pos."):
        _give_to_blocks(prepared, shared, "blocks.{}.attn.rel_pos.")
    return prepared


def join_biases(state: State) -> None:
    """One bias for all three, where those of queries and values are kept apart and keys have none (BEiT, EVA)."""
    for key in [key for key in state if key.endswith(".attn.q_bias")]:
        q_bias, v_bias = state.pop(key), state.pop(key.replace("q_bias", "v_bias"))
        state[key.replace("q_bias", "qkv.bias")] = torch.cat([q_bias, torch.zeros_like(q_bias), v_bias])


def _give_to_blocks(state: State, shared: str, name: str) -> None:
    """Relative positions that all blocks share become each block's own; where it has some already, they add up."""
    blocks = sorted({match[1] for key in state if (match := re.match(r"(?:blocks|layers)\.(\d+)\.", key))})
    for key in [key for key in state if key.startswith(shared)]:
        value, part = state.pop(key), key.removeprefix(shared)
        for block in blocks:
            own = name.format(block) + part
            state[own] = state[own] + value if own in state else value.clone()


def _prepare_transformers(state: State) -> State:
    """Blocks lay below `encoder.layer.` before transformers 5; DINOv3 has them below `layer.` or `model.layer.`."""
    prepared: State = {}
    for key, value in state.items():
        key = re.sub(r"^(encoder\.|model\.)?layers?\.", "layers.", key)
        prepared[key.replace(".attention.attention.relative_position_bias.", ".relative_position_bias.")] = value
    for shared in ("shared_position_bias.", "encoder.relative_position_bias."):  # BEiT
        _give_to_blocks(prepared, shared, "layers.{}.relative_position_bias.")
    if "classifier.weight" in prepared and "embeddings.distillation_token" in prepared:
        # A DeiT whose classifier reads the class token alone: then the other is a token like any register.
        prepared["embeddings.register_tokens"] = prepared.pop("embeddings.distillation_token")
    return prepared


def _prepare_dinov3(state: State) -> State:
    """Where config.json leaves biases out, no block has one: zeros are the same."""
    prepared = _prepare_transformers(state)
    has = {match[1] for key in prepared if (match := re.search(r"\.(\w+_proj)\.bias$", key))}
    wanted = {"o_proj", "gate_proj", "up_proj", "down_proj"}
    if has & {"q_proj", "k_proj", "v_proj"}:
        wanted |= {"q_proj", "v_proj"}  # those of keys may be absent, anyway
    for key in list(prepared):
        match = re.search(r"\.(\w+_proj)\.weight$", key)
        if match and match[1] in wanted - has:
            prepared[key.removesuffix("weight") + "bias"] = prepared[key].new_zeros(len(prepared[key]))
    return prepared


def _prepare_clip(state: State) -> State:
    """CLIP's projection into the space shared with text is a head without a bias, and what its model gives."""
    # AltCLIP's blocks are saved under another name by transformers 5.
    prepared = {re.sub(r"^encoder\.layer\.", "encoder.layers.", key): value for key, value in state.items()}
    if "proj" in prepared:  # OpenCLIP keeps the bare matrix, input first
        prepared["proj.weight"] = prepared.pop("proj").T
    for name in ("proj", "visual_projection"):
        if f"{name}.weight" in prepared:
            weight = prepared[f"{name}.weight"]
            prepared[f"{name}.bias"] = weight.new_zeros(len(weight))
    return prepared


def _prepare_siglip(state: State) -> State:
    """The pooling's query has a matrix of its own, beside one for keys and values."""
    prepared = dict(state)
    for part in ("weight", "bias"):
        if f"head.attention.in_proj_{part}" in prepared:
            q, k, v = prepared.pop(f"head.attention.in_proj_{part}").chunk(3)
            prepared |= {f"head.q.{part}": q.clone(), f"head.kv.{part}": torch.cat([k, v])}
    return prepared


def _prepare_jax(state: State) -> State:
    """Flax keeps kernels input first, and heads as an axis of their own; big_vision may stack all blocks."""
    prepared: State = {}
    unstacked: State = {}
    for key, value in state.items():
        name = key.replace("/", ".")
        if name.startswith("Transformer.encoderblock."):
            inside = name.removeprefix("Transformer.encoderblock.")
            unstacked |= {f"Transformer.encoderblock_{i}.{inside}": part for i, part in enumerate(value)}
        else:
            unstacked[name] = value
    for name, value in unstacked.items():
        if name.endswith(".kernel"):
            name = name.removesuffix("kernel") + "weight"
            if name.startswith("embedding."):
                value = value.permute(3, 2, 0, 1)  # height, width, in, out
            elif name.endswith((".query.weight", ".key.weight", ".value.weight")):
                value = value.flatten(1).T  # in, heads, each head's width
            elif name.endswith(".out.weight"):
                value = value.flatten(0, 1).T  # heads, each head's width, out
            else:
                value = value.T
        elif name.endswith(".scale"):
            name = name.removesuffix("scale") + "weight"
        elif name.endswith((".query.bias", ".key.bias", ".value.bias")):
            value = value.flatten()
        prepared[name] = value
    return prepared


# Origins whose head is a projection into another space, not a classifier.
PROJECTIONS = ("OpenCLIP", "transformers CLIP")

_MASK_TOKEN = (r"^(embeddings\.)?mask_token$", "the mask token of pre-training")

_TIMM = Origin(
    name="timm",
    marks=("patch_embed.proj.weight", "blocks.0.norm1.weight"),
    names=TIMM + EVA + HYBRID,
    left_out=(
        _MASK_TOKEN,
        (r"^decoder_|^decoder\.", "the decoder of pre-training"),
        (r"^head\.(mlp|last_layer)", "the projection head of self-supervision"),
        (r"relative_position_index$|^rope_embed\.periods$|rope\.freqs_(cos|sin)$", "a table that is computed"),
        (r"^local_cls_norm\.", "the norm that DINOv3 trains with"),
    ),
    prepare=_prepare_timm,
)

ORIGINS: tuple[Origin, ...] = (
    Origin(name="patchlight", marks=("patch_embed.proj.weight", "blocks.0.attn.out.weight"), names=OURS),
    Origin(name="patchlight", marks=("patch_embed.convs.0.weight", "blocks.0.attn.out.weight"), names=OURS),
    _TIMM,
    # DINOv2 as published, whose blocks come in chunks.
    replace(_TIMM, name="DINOv2", settled=True, marks=("patch_embed.proj.weight", "blocks.0.0.norm1.weight")),
    Origin(
        name="transformers",
        marks=("embeddings.patch_embeddings.projection.weight",),
        names=TRANSFORMERS + BEIT,
        left_out=(
            _MASK_TOKEN,
            (r"^pooler\.dense\.", "the pooler, which no head of these models reads"),
            (r"relative_position_index$", "a table that is computed"),
        ),
        conventions={"norm_eps": 1e-12},
        prepare=_prepare_transformers,
    ),
    Origin(
        name="transformers DINOv3",
        marks=("embeddings.patch_embeddings.weight", "embeddings.cls_token"),
        names=TRANSFORMERS,
        left_out=(_MASK_TOKEN, (r"^rope_embeddings\.", "a table that is computed")),
        conventions={"norm_eps": 1e-5, "position": "rope2d", "rope_coordinates": "centred"},
        prepare=_prepare_dinov3,
    ),
    Origin(
        name="transformers CLIP",
        marks=("embeddings.patch_embedding.weight", "embeddings.class_embedding"),
        names=TRANSFORMERS_CLIP,
        left_out=((r"position_ids$", "a table that is computed"),),
        conventions={"norm_eps": 1e-5, "mlp": "quick_gelu"},
        prepare=_prepare_clip,
    ),
    Origin(
        name="transformers SigLIP",
        marks=("embeddings.patch_embedding.weight", "embeddings.position_embedding.weight", "post_layernorm.weight"),
        names=TRANSFORMERS_SIGLIP,
        left_out=((r"position_ids$", "a table that is computed"),),
        conventions={"mlp": "gelu_tanh"},
        prepare=_prepare_siglip,
    ),
    Origin(
        name="OpenCLIP",
        marks=("conv1.weight", "class_embedding", "transformer.resblocks.0.ln_1.weight"),
        names=OPEN_CLIP,
        conventions={"norm_eps": 1e-5},
        prepare=_prepare_clip,
    ),
    Origin(name="torchvision", settled=True, marks=("conv_proj.weight", "encoder.pos_embedding"), names=TORCHVISION),
    Origin(
        name="JAX",
        settled=True,
        conventions={"mlp": "gelu_tanh"},  # what flax calls gelu
        marks=("embedding/kernel", "Transformer/encoder_norm/scale"),
        names=JAX,
        prepare=_prepare_jax,
    ),
)


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
    """Raise where the config has something that the other library's model has not."""
    for name, value in needed.items():
        if getattr(config, name) != value:
            raise PatchlightError(
                f"{name}={getattr(config, name)!r}{because and ' with ' + because} cannot be written with "
                f"layout={layout!r}, whose model has {value!r}; use layout='patchlight'"
            )


def reorder_rope(state: State, config: ViTConfig, *, back: bool = False) -> State:
    """timm's RoPE turns neighbouring numbers, ours turns halves; and it may turn by columns first, ours by rows.

    Which pair of a head's numbers is turned by which angle is a matter of order alone, and the products of queries
    and keys do not change when both are reordered alike: so the weights are reordered, not the model. `back` puts our
    order into theirs.
    """
    pairs = torch.arange(config.head_width).view(2, config.head_width // 4, 2)  # axis, frequency, member of the pair
    if config.position == "rope2d" and config.rope_grid is None:  # with it (EVA-02), rows come first there too
        pairs = pairs.flip(0)
    order = pairs.permute(2, 0, 1).flatten()
    order = order.argsort() if back else order

    def reorder(qkv: Tensor) -> Tensor:
        q, k, v = qkv.unflatten(0, (3, config.num_heads, config.head_width)).unbind(0)
        return torch.stack([q[:, order], k[:, order], v]).flatten(0, 2)

    reordered = {key: reorder(value) if ".attn.qkv." in key else value for key, value in state.items()}
    norms = [key for key in state if ".attn.q_norm." in key or ".attn.k_norm." in key]
    return reordered | {key: state[key][order] for key in norms}


def _no_name(key: str) -> str:
    raise PatchlightError(f"{key!r} has no name in the other library's model; use layout='patchlight'")


def _rename(state: State, names: Iterable[tuple[str, str]], otherwise: Callable[[str], str] = str) -> State:
    """By the first row that fits a key; `otherwise` says what becomes of one that none fits."""
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
