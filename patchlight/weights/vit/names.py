"""What others call the parts of a ViT: a table of names for each origin, and what no table can say."""

import re
from dataclasses import replace

import torch
from torch import Tensor

from patchlight.config import ViTConfig
from patchlight.weights.convert import Names, Origin, State, join_biases

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
    ("attention_pool.", "attention_pool."),
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
    ("blocks.{}.attn.norm.", "blocks.{}.attn.norm."),
    ("blocks.{}.attn.rel_pos.relative_position_bias_table", "blocks.{}.attn.relative_bias.table"),
    ("blocks.{}.attn.relative_position_bias_table", "blocks.{}.attn.relative_bias.table"),  # BEiT
    ("blocks.{}.attn.rel_pos.mlp.fc1.", "blocks.{}.attn.relative_bias.hidden."),
    ("blocks.{}.attn.rel_pos.mlp.fc2.", "blocks.{}.attn.relative_bias.out."),
    ("blocks.{}.attn.rope.frequencies", "blocks.{}.attn.rope.frequencies"),
    ("blocks.{}.ls1.gamma", "blocks.{}.residual1.scale"),
    ("blocks.{}.ls2.gamma", "blocks.{}.residual2.scale"),
    ("blocks.{}.gamma_1", "blocks.{}.residual1.scale"),
    ("blocks.{}.gamma_2", "blocks.{}.residual2.scale"),
    ("blocks.{}.norm1.", "blocks.{}.norm1."),
    ("blocks.{}.norm2.", "blocks.{}.norm2."),
    ("blocks.{}.mlp.fc1.", "blocks.{}.mlp.up."),
    ("blocks.{}.mlp.fc2.", "blocks.{}.mlp.down."),
    ("blocks.{}.mlp.norm.", "blocks.{}.mlp.norm."),
    ("blocks.{}.mlp.w12.", "blocks.{}.mlp.gate_and_up."),  # DINOv2's gated MLP
    ("blocks.{}.mlp.w1.", "blocks.{}.mlp.gate."),  # DINOv3's gated MLP
    ("blocks.{}.mlp.w2.", "blocks.{}.mlp.up."),
    ("blocks.{}.mlp.w3.", "blocks.{}.mlp.down."),
    ("blocks.{}.mlp.fc1_g.", "blocks.{}.mlp.gate."),
    ("blocks.{}.mlp.fc1_x.", "blocks.{}.mlp.up."),
    ("attn_pool.latent", "attention_pool.query"),
    ("attn_pool.q.", "attention_pool.q."),
    ("attn_pool.kv.", "attention_pool.kv."),
    ("attn_pool.proj.", "attention_pool.out."),
    ("attn_pool.norm.", "attention_pool.norm."),
    ("attn_pool.mlp.fc1.", "attention_pool.mlp.up."),
    ("attn_pool.mlp.fc2.", "attention_pool.mlp.down."),
)

# What the EVA models have beyond TIMM; apart from it, since we write queries, keys and values as one matrix.
EVA: Names = (
    ("blocks.{}.attn.q_proj.", "blocks.{}.attn.q."),
    ("blocks.{}.attn.k_proj.", "blocks.{}.attn.k."),
    ("blocks.{}.attn.v_proj.", "blocks.{}.attn.v."),
)

# The ResNet in front of timm's hybrids; with no stages it has no stem, but is one.
HYBRID: Names = (
    ("patch_embed.backbone.conv.", "patch_embed.resnet.conv."),
    ("patch_embed.backbone.norm.", "patch_embed.resnet.norm."),
    ("patch_embed.backbone.stem.conv.", "patch_embed.resnet.conv."),
    ("patch_embed.backbone.stem.norm.", "patch_embed.resnet.norm."),
    (
        "patch_embed.backbone.stages.{}.blocks.{}.downsample.conv.",
        "patch_embed.resnet.stages.{}.{}.shortcut_conv.",
    ),
    (
        "patch_embed.backbone.stages.{}.blocks.{}.downsample.norm.",
        "patch_embed.resnet.stages.{}.{}.shortcut_norm.",
    ),
    ("patch_embed.backbone.stages.{}.blocks.{}.", "patch_embed.resnet.stages.{}.{}."),
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

# What BEiT has beyond TRANSFORMERS.
BEIT: Names = (
    ("pooler.layernorm.", "norm."),
    ("layers.{}.lambda_1", "blocks.{}.residual1.scale"),
    ("layers.{}.lambda_2", "blocks.{}.residual2.scale"),
    (
        "layers.{}.relative_position_bias.relative_position_bias_table",
        "blocks.{}.attn.relative_bias.table",
    ),
    (
        "layers.{}.attention.attention.relative_position_bias.relative_position_bias_table",  # before transformers 5
        "blocks.{}.attn.relative_bias.table",
    ),
)

TRANSFORMERS_CLIP: Names = (
    ("embeddings.class_embedding", "class_token"),
    ("embeddings.position_embedding.weight", "positions.table"),
    ("embeddings.patch_embedding.", "patch_embed.proj."),
    ("pre_layrnorm.", "embed_norm."),
    ("post_layernorm.", "norm."),
    ("visual_projection.", "head.out."),
    ("classifier.", "head.out."),
    ("encoder.layers.{}.layer_norm1.", "blocks.{}.norm1."),
    ("encoder.layers.{}.layer_norm2.", "blocks.{}.norm2."),
    ("encoder.layers.{}.self_attn.q_proj.", "blocks.{}.attn.q."),
    ("encoder.layers.{}.self_attn.k_proj.", "blocks.{}.attn.k."),
    ("encoder.layers.{}.self_attn.v_proj.", "blocks.{}.attn.v."),
    ("encoder.layers.{}.self_attn.out_proj.", "blocks.{}.attn.out."),
    ("encoder.layers.{}.mlp.fc1.", "blocks.{}.mlp.up."),
    ("encoder.layers.{}.mlp.fc2.", "blocks.{}.mlp.down."),
)

TRANSFORMERS_SIGLIP: Names = (
    *TRANSFORMERS_CLIP,
    ("head.probe", "attention_pool.query"),
    ("head.q.", "attention_pool.q."),
    ("head.kv.", "attention_pool.kv."),
    ("head.attention.out_proj.", "attention_pool.out."),
    ("head.layernorm.", "attention_pool.norm."),
    ("head.mlp.fc1.", "attention_pool.mlp.up."),
    ("head.mlp.fc2.", "attention_pool.mlp.down."),
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
    ("MAPHead_0.probe", "attention_pool.query"),
    ("MAPHead_0.MultiHeadDotProductAttention_0.query.", "attention_pool.q."),
    ("MAPHead_0.MultiHeadDotProductAttention_0.key.", "attention_pool.k."),
    ("MAPHead_0.MultiHeadDotProductAttention_0.value.", "attention_pool.v."),
    ("MAPHead_0.MultiHeadDotProductAttention_0.out.", "attention_pool.out."),
    ("MAPHead_0.LayerNorm_0.", "attention_pool.norm."),
    ("MAPHead_0.MlpBlock_0.Dense_0.", "attention_pool.mlp.up."),
    ("MAPHead_0.MlpBlock_0.Dense_1.", "attention_pool.mlp.down."),
)


def _prepare_timm(state: State) -> State:
    """Undo DINOv2's chunks, DINOv3's masked key bias, split biases (BEiT, EVA) and tensors that blocks share."""
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


def _give_to_blocks(state: State, shared: str, name: str) -> None:
    """Copy relative positions that all blocks share into each block, adding them to the block's own if it has some."""
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
    """Add zero biases where config.json turned biases off."""
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
    """CLIP's projection into the space shared with text becomes a head, with a zero bias."""
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


def _outside_transformers(state: State) -> tuple[str, ...]:
    """The blocks of ViT-MSN and the last norm of BEiT."""
    blocks = any(re.match(r"(encoder\.)?layers?\.", key) for key in state)
    norm = "layernorm.weight" in state or "pooler.layernorm.weight" in state
    return ("layernorm.",) * (not norm) + ("encoder.layer.",) * (not blocks)


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
        outside=_outside_transformers,
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


def without_patch_boxes(config: ViTConfig, state: State) -> tuple[ViTConfig, State]:
    """Others have no such part, and nothing that they compute depends on it."""
    kept = {key: value for key, value in state.items() if not key.startswith("patch_boxes.")}
    return replace(config, patch_boxes=False), kept
