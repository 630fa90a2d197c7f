"""State dicts of other libraries in our names, and ours in theirs: one table of names an origin, as data.

A row pairs their name with ours; `{}` is a block's number, and a row that ends in a dot stands for everything below it.
The first row that matches a key renames it. Read from right to left, the same table writes their names.
Names of ours that end in `attn.q`, `attn.k` and `attn.v` are the three parts of `attn.qkv`.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from patchlight.config import ViTConfig
from patchlight.errors import PatchlightError

State = dict[str, Tensor]
Names = tuple[tuple[str, str], ...]


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
    prepare: Callable[[State], State] | None = None
    """What a table of names cannot say, done before renaming."""


OURS: Names = (
    ("patch_embed.", "patch_embed."),
    ("class_token", "class_token"),
    ("distill_token", "distill_token"),
    ("registers", "registers"),
    ("positions.", "positions."),
    ("embed_norm.", "embed_norm."),
    ("blocks.", "blocks."),
    ("norm.", "norm."),
    ("head.", "head."),
    ("distill_head.", "distill_head."),
)

TIMM: Names = (
    ("cls_token", "class_token"),
    ("dist_token", "distill_token"),
    ("reg_token", "registers"),
    ("register_tokens", "registers"),  # DINOv2
    ("storage_tokens", "registers"),  # DINOv3
    ("pos_embed", "positions.table"),
    ("patch_embed.proj.", "patch_embed.proj."),
    ("norm_pre.", "embed_norm."),
    ("norm.", "norm."),
    ("fc_norm.", "norm."),
    ("pre_logits.fc.", "head.hidden."),
    ("head.fc1.", "head.hidden."),
    ("head.", "head.out."),
    ("head_dist.", "distill_head.out."),
    ("blocks.{}.attn.proj.", "blocks.{}.attn.out."),
    ("blocks.{}.attn.qkv.", "blocks.{}.attn.qkv."),
    ("blocks.{}.attn.q_norm.", "blocks.{}.attn.q_norm."),
    ("blocks.{}.attn.k_norm.", "blocks.{}.attn.k_norm."),
    ("blocks.{}.attn.rel_pos.relative_position_bias_table", "blocks.{}.attn.relative_bias.table"),
    ("blocks.{}.attn.relative_position_bias_table", "blocks.{}.attn.relative_bias.table"),  # BEiT
    ("blocks.{}.ls1.gamma", "blocks.{}.residual1.scale"),
    ("blocks.{}.ls2.gamma", "blocks.{}.residual2.scale"),
    ("blocks.{}.gamma_1", "blocks.{}.residual1.scale"),
    ("blocks.{}.gamma_2", "blocks.{}.residual2.scale"),
    ("blocks.{}.norm1.", "blocks.{}.norm1."),
    ("blocks.{}.norm2.", "blocks.{}.norm2."),
    ("blocks.{}.mlp.fc1.", "blocks.{}.mlp.up."),
    ("blocks.{}.mlp.fc2.", "blocks.{}.mlp.down."),
    ("blocks.{}.mlp.w12.", "blocks.{}.mlp.gate_and_up."),  # DINOv2's gated MLP
    ("blocks.{}.mlp.w1.", "blocks.{}.mlp.gate."),  # DINOv3's gated MLP
    ("blocks.{}.mlp.w2.", "blocks.{}.mlp.up."),
    ("blocks.{}.mlp.w3.", "blocks.{}.mlp.down."),
    ("blocks.{}.mlp.fc1_g.", "blocks.{}.mlp.gate."),
    ("blocks.{}.mlp.fc1_x.", "blocks.{}.mlp.up."),
)

TRANSFORMERS: Names = (
    ("embeddings.cls_token", "class_token"),
    ("embeddings.distillation_token", "distill_token"),
    ("embeddings.register_tokens", "registers"),
    ("embeddings.position_embeddings", "positions.table"),
    ("embeddings.patch_embeddings.projection.", "patch_embed.proj."),
    ("embeddings.patch_embeddings.", "patch_embed.proj."),  # DINOv3
    ("layernorm.", "norm."),
    ("norm.", "norm."),  # DINOv3
    ("classifier.", "head.out."),
    ("cls_classifier.", "head.out."),
    ("distillation_classifier.", "distill_head.out."),
    ("layers.{}.layernorm_before.", "blocks.{}.norm1."),
    ("layers.{}.layernorm_after.", "blocks.{}.norm2."),
    ("layers.{}.norm1.", "blocks.{}.norm1."),
    ("layers.{}.norm2.", "blocks.{}.norm2."),
    ("layers.{}.attention.q_proj.", "blocks.{}.attn.q."),
    ("layers.{}.attention.k_proj.", "blocks.{}.attn.k."),
    ("layers.{}.attention.v_proj.", "blocks.{}.attn.v."),
    ("layers.{}.attention.o_proj.", "blocks.{}.attn.out."),
    ("layers.{}.attention.attention.query.", "blocks.{}.attn.q."),  # before transformers 5
    ("layers.{}.attention.attention.key.", "blocks.{}.attn.k."),
    ("layers.{}.attention.attention.value.", "blocks.{}.attn.v."),
    ("layers.{}.attention.output.dense.", "blocks.{}.attn.out."),
    ("layers.{}.layer_scale1.lambda1", "blocks.{}.residual1.scale"),
    ("layers.{}.layer_scale2.lambda1", "blocks.{}.residual2.scale"),
    ("layers.{}.mlp.fc1.", "blocks.{}.mlp.up."),
    ("layers.{}.mlp.fc2.", "blocks.{}.mlp.down."),
    ("layers.{}.intermediate.dense.", "blocks.{}.mlp.up."),  # before transformers 5
    ("layers.{}.output.dense.", "blocks.{}.mlp.down."),
    ("layers.{}.mlp.weights_in.", "blocks.{}.mlp.gate_and_up."),
    ("layers.{}.mlp.weights_out.", "blocks.{}.mlp.down."),
    ("layers.{}.mlp.gate_proj.", "blocks.{}.mlp.gate."),
    ("layers.{}.mlp.up_proj.", "blocks.{}.mlp.up."),
    ("layers.{}.mlp.down_proj.", "blocks.{}.mlp.down."),
)

# The naming of transformers 4, which 5 reads as well; what we write.
TRANSFORMERS_OLD: Names = tuple(
    (theirs.replace("layers.{}.", "encoder.layer.{}."), ours)
    for theirs, ours in TRANSFORMERS
    if not re.search(r"_proj\.|\.mlp\.|\.norm\d|^norm|patch_embeddings\.$", theirs)
)

TRANSFORMERS_CLIP: Names = (
    ("embeddings.class_embedding", "class_token"),
    ("embeddings.position_embedding.weight", "positions.table"),
    ("embeddings.patch_embedding.", "patch_embed.proj."),
    ("pre_layrnorm.", "embed_norm."),
    ("post_layernorm.", "norm."),
    ("visual_projection.", "head.out."),
    ("encoder.layers.{}.layer_norm1.", "blocks.{}.norm1."),
    ("encoder.layers.{}.layer_norm2.", "blocks.{}.norm2."),
    ("encoder.layers.{}.self_attn.q_proj.", "blocks.{}.attn.q."),
    ("encoder.layers.{}.self_attn.k_proj.", "blocks.{}.attn.k."),
    ("encoder.layers.{}.self_attn.v_proj.", "blocks.{}.attn.v."),
    ("encoder.layers.{}.self_attn.out_proj.", "blocks.{}.attn.out."),
    ("encoder.layers.{}.mlp.fc1.", "blocks.{}.mlp.up."),
    ("encoder.layers.{}.mlp.fc2.", "blocks.{}.mlp.down."),
)

OPEN_CLIP: Names = (
    ("class_embedding", "class_token"),
    ("positional_embedding", "positions.table"),
    ("conv1.", "patch_embed.proj."),
    ("ln_pre.", "embed_norm."),
    ("ln_post.", "norm."),
    ("proj.", "head.out."),
    ("transformer.resblocks.{}.ln_1.", "blocks.{}.norm1."),
    ("transformer.resblocks.{}.ln_2.", "blocks.{}.norm2."),
    ("transformer.resblocks.{}.ls_1.gamma", "blocks.{}.residual1.scale"),
    ("transformer.resblocks.{}.ls_2.gamma", "blocks.{}.residual2.scale"),
    ("transformer.resblocks.{}.attn.in_proj_weight", "blocks.{}.attn.qkv.weight"),
    ("transformer.resblocks.{}.attn.in_proj_bias", "blocks.{}.attn.qkv.bias"),
    ("transformer.resblocks.{}.attn.out_proj.", "blocks.{}.attn.out."),
    ("transformer.resblocks.{}.mlp.c_fc.", "blocks.{}.mlp.up."),
    ("transformer.resblocks.{}.mlp.c_proj.", "blocks.{}.mlp.down."),
)

TORCHVISION: Names = (
    ("class_token", "class_token"),
    ("conv_proj.", "patch_embed.proj."),
    ("encoder.pos_embedding", "positions.table"),
    ("encoder.ln.", "norm."),
    ("heads.pre_logits.", "head.hidden."),
    ("heads.head.", "head.out."),
    ("encoder.layers.encoder_layer_{}.ln_1.", "blocks.{}.norm1."),
    ("encoder.layers.encoder_layer_{}.ln_2.", "blocks.{}.norm2."),
    ("encoder.layers.encoder_layer_{}.self_attention.in_proj_weight", "blocks.{}.attn.qkv.weight"),
    ("encoder.layers.encoder_layer_{}.self_attention.in_proj_bias", "blocks.{}.attn.qkv.bias"),
    ("encoder.layers.encoder_layer_{}.self_attention.out_proj.", "blocks.{}.attn.out."),
    ("encoder.layers.encoder_layer_{}.mlp.0.", "blocks.{}.mlp.up."),
    ("encoder.layers.encoder_layer_{}.mlp.3.", "blocks.{}.mlp.down."),
    ("encoder.layers.encoder_layer_{}.mlp.linear_1.", "blocks.{}.mlp.up."),
    ("encoder.layers.encoder_layer_{}.mlp.linear_2.", "blocks.{}.mlp.down."),
)

JAX: Names = (
    ("cls", "class_token"),
    ("embedding.", "patch_embed.proj."),
    ("Transformer.posembed_input.pos_embedding", "positions.table"),
    ("pos_embedding", "positions.table"),
    ("Transformer.encoder_norm.", "norm."),
    ("pre_logits.", "head.hidden."),
    ("head.", "head.out."),
    ("Transformer.encoderblock_{}.LayerNorm_0.", "blocks.{}.norm1."),
    ("Transformer.encoderblock_{}.LayerNorm_1.", "blocks.{}.norm2."),
    ("Transformer.encoderblock_{}.LayerNorm_2.", "blocks.{}.norm2."),
    ("Transformer.encoderblock_{}.MultiHeadDotProductAttention_0.query.", "blocks.{}.attn.q."),
    ("Transformer.encoderblock_{}.MultiHeadDotProductAttention_0.key.", "blocks.{}.attn.k."),
    ("Transformer.encoderblock_{}.MultiHeadDotProductAttention_0.value.", "blocks.{}.attn.v."),
    ("Transformer.encoderblock_{}.MultiHeadDotProductAttention_0.out.", "blocks.{}.attn.out."),
    ("Transformer.encoderblock_{}.MultiHeadDotProductAttention_1.query.", "blocks.{}.attn.q."),
    ("Transformer.encoderblock_{}.MultiHeadDotProductAttention_1.key.", "blocks.{}.attn.k."),
    ("Transformer.encoderblock_{}.MultiHeadDotProductAttention_1.value.", "blocks.{}.attn.v."),
    ("Transformer.encoderblock_{}.MultiHeadDotProductAttention_1.out.", "blocks.{}.attn.out."),
    ("Transformer.encoderblock_{}.MlpBlock_0.Dense_0.", "blocks.{}.mlp.up."),
    ("Transformer.encoderblock_{}.MlpBlock_0.Dense_1.", "blocks.{}.mlp.down."),
    ("Transformer.encoderblock_{}.MlpBlock_3.Dense_0.", "blocks.{}.mlp.up."),
    ("Transformer.encoderblock_{}.MlpBlock_3.Dense_1.", "blocks.{}.mlp.down."),
)


def _prepare_timm(state: State) -> State:
    """DINOv2's chunked blocks, DINOv3's masked key bias, and biases kept apart (BEiT, EVA)."""
    prepared: State = {}
    for key, value in state.items():
        # DINOv2 groups blocks into chunks: blocks.2.17.norm1 is block 17.
        prepared[re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", key)] = value
    for key in [key for key in prepared if key.endswith(".attn.qkv.bias_mask")]:
        mask, bias = prepared.pop(key), key.removesuffix("_mask")
        # The mask is zero (or, before it was set, NaN) for keys, which are used without a bias.
        prepared[bias] = torch.where(mask == 1, prepared[bias], torch.zeros_like(prepared[bias]))
    for key in [key for key in prepared if key.endswith(".attn.q_bias")]:
        q_bias, v_bias = prepared.pop(key), prepared.pop(key.replace("q_bias", "v_bias"))
        prepared[key.replace("q_bias", "qkv.bias")] = torch.cat([q_bias, torch.zeros_like(q_bias), v_bias])
    return prepared


def _prepare_transformers(state: State) -> State:
    """Blocks lay below `encoder.layer.` before transformers 5; DINOv3 has them below `layer.` or `model.layer.`."""
    return {re.sub(r"^(encoder\.|model\.)?layers?\.", "layers.", key): value for key, value in state.items()}


def _prepare_clip(state: State) -> State:
    """CLIP's projection into the space shared with text is a head without a bias, and what its model gives."""
    prepared = dict(state)
    if "proj" in prepared:  # OpenCLIP keeps the bare matrix, input first
        prepared["proj.weight"] = prepared.pop("proj").T
    for name in ("proj", "visual_projection"):
        if f"{name}.weight" in prepared:
            weight = prepared[f"{name}.weight"]
            prepared[f"{name}.bias"] = weight.new_zeros(len(weight))
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
    names=TIMM,
    left_out=(
        _MASK_TOKEN,
        (r"^attn_pool\.", "attention pooling: the pooled output is another's, the tokens are exact"),
        (r"^decoder_|^decoder\.", "the decoder of pre-training"),
        (r"^head\.(mlp|last_layer)", "the projection head of self-supervision"),
        (r"relative_position_index$|^rope_embed\.periods$", "a table that is computed"),
        (r"^local_cls_norm\.", "the norm that DINOv3 trains with"),
    ),
    prepare=_prepare_timm,
)

ORIGINS: tuple[Origin, ...] = (
    Origin(name="patchlight", marks=("patch_embed.proj.weight", "blocks.0.attn.out.weight"), names=OURS),
    _TIMM,
    replace(_TIMM, name="DINOv2", marks=("patch_embed.proj.weight", "blocks.0.0.norm1.weight")),  # blocks in chunks
    Origin(
        name="transformers",
        marks=("embeddings.patch_embeddings.projection.weight",),
        names=TRANSFORMERS,
        left_out=(_MASK_TOKEN, (r"^pooler\.", "the pooler, which no head of these models reads")),
        conventions={"norm_eps": 1e-12},
        prepare=_prepare_transformers,
    ),
    Origin(
        name="transformers DINOv3",
        marks=("embeddings.patch_embeddings.weight", "embeddings.cls_token"),
        names=TRANSFORMERS,
        left_out=(_MASK_TOKEN, (r"^rope_embeddings\.", "a table that is computed")),
        conventions={"norm_eps": 1e-5, "position": "rope2d", "rope_coordinates": "centred"},
        prepare=_prepare_transformers,
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
        name="OpenCLIP",
        marks=("conv1.weight", "class_embedding", "transformer.resblocks.0.ln_1.weight"),
        names=OPEN_CLIP,
        conventions={"norm_eps": 1e-5},
        prepare=_prepare_clip,
    ),
    Origin(name="torchvision", marks=("conv_proj.weight", "encoder.pos_embedding"), names=TORCHVISION),
    Origin(
        name="JAX",
        left_out=((r"^MAPHead_0\.", "attention pooling: the pooled output is another's, the tokens are exact"),),
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
    for key in ("class_token", "distill_token", "registers", "positions.table"):
        if key in ours:
            ours[key] = ours[key].reshape(-1, ours[key].shape[-1])  # without the batch axis that others keep
    if "registers" in ours and len(ours["registers"]) == 0:  # transformers keeps an empty table where there are none
        del ours["registers"]
    return ours, left_out


def convert_to(state: Mapping[str, Tensor], names: Names) -> State:
    """Our state in another origin's names, the inverse of `convert`."""
    split = any(".attn.q." in ours for _, ours in names)
    parts: State = {}
    for key, value in state.items():
        if split and ".attn.qkv." in key:
            parts |= {
                key.replace(".qkv.", f".{part}."): piece for part, piece in zip("qkv", value.chunk(3), strict=True)
            }
        else:
            parts[key] = value
    return _rename(parts, [(ours, theirs) for theirs, ours in names])


def reorder_rope(state: State, config: ViTConfig) -> State:
    """timm's axial RoPE turns neighbouring numbers, by columns first; ours turns halves, by rows first.

    Which pair of a head's numbers is turned by which angle is a matter of order alone, and the products of queries
    and keys do not change when both are reordered alike: so the weights are reordered, not the model.
    """
    pairs = torch.arange(config.head_width).view(2, config.head_width // 4, 2)  # axis, frequency, member of the pair
    order = pairs.flip(0).permute(2, 0, 1).flatten()

    def reorder(qkv: Tensor) -> Tensor:
        q, k, v = qkv.unflatten(0, (3, config.num_heads, config.head_width)).unbind(0)
        return torch.stack([q[:, order], k[:, order], v]).flatten(0, 2)

    return {key: reorder(value) if ".attn.qkv." in key else value for key, value in state.items()}


def _rename(state: State, names: Iterable[tuple[str, str]]) -> State:
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
            name = key
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
