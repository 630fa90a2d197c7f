"""State dicts of other libraries, in our names and shapes: one table of key patterns an origin.

Tables are read from top to bottom and every pattern that matches a key rewrites it, so that a row can build on the
one above. A key that no row knows keeps its name, and `load_state_dict` then names it as unexpected.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from patchlight.config import ViTConfig
from patchlight.errors import PatchlightError

KeyMap = tuple[tuple[str, str], ...]

TIMM: KeyMap = (
    (r"^cls_token$", "class_token"),
    (r"^dist_token$", "distill_token"),
    (r"^reg_token$", "registers"),
    (r"^pos_embed$", "positions.table"),
    (r"^norm_pre\.", "embed_norm."),
    (r"^fc_norm\.", "norm."),
    (r"^head\.", "head.out."),
    (r"^head_dist\.", "distill_head.out."),
    (r"\.attn\.proj\.", ".attn.out."),
    (r"\.attn\.rel_pos\.relative_position_bias_table$", ".attn.relative_bias.table"),
    (r"\.ls([12])\.gamma$", r".residual\1.scale"),
    (r"\.gamma_([12])$", r".residual\1.scale"),
    (r"\.mlp\.fc1\.", ".mlp.up."),
    (r"\.mlp\.fc2\.", ".mlp.down."),
)

TRANSFORMERS: KeyMap = (
    (r"^(vit|deit)\.", ""),
    (r"^embeddings\.cls_token$", "class_token"),
    (r"^embeddings\.distillation_token$", "distill_token"),
    (r"^embeddings\.position_embeddings$", "positions.table"),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^layernorm\.", "norm."),
    (r"^(cls_)?classifier\.", "head.out."),
    (r"^distillation_classifier\.", "distill_head.out."),
    (r"^layers\.", "blocks."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.attention\.([qkv])_proj\.", r".attn.\1."),
    (r"\.attention\.o_proj\.", ".attn.out."),
    (r"\.mlp\.fc1\.", ".mlp.up."),
    (r"\.mlp\.fc2\.", ".mlp.down."),
)


def from_timm(state: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """A timm ViT's state dict for our `ViT(config)`."""
    ours = _without_batch_axis(_rename(state, TIMM))
    if config.mlp == "swiglu":  # timm packs gate and value into fc1, in our order
        ours = {key.replace(".mlp.up.", ".mlp.gate_and_up."): value for key, value in ours.items()}
    if config.position == "rope2d" and config.rope_coordinates == "index":
        ours = {key: _reorder_rope(value, config) if ".attn.qkv." in key else value for key, value in ours.items()}
    return ours


def from_transformers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A transformers ViT's or DeiT's state dict for our `ViT`: queries, keys and values become one matrix."""
    ours = _without_batch_axis(_rename(state, TRANSFORMERS))
    for key in [key for key in ours if ".attn.q." in key]:
        parts = [ours.pop(key.replace(".attn.q.", f".attn.{part}.")) for part in "qkv"]
        ours[key.replace(".attn.q.", ".attn.qkv.")] = torch.cat(parts)
    return ours


def _rename(state: Mapping[str, Tensor], table: KeyMap) -> dict[str, Tensor]:
    renamed: dict[str, Tensor] = {}
    for key, value in state.items():
        name = key
        for pattern, replacement in table:
            name = re.sub(pattern, replacement, name)
        if name in renamed:
            raise PatchlightError(f"the checkpoint has two tensors for {name!r}; the second is {key!r}")
        renamed[name] = value
    return renamed


def _without_batch_axis(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tokens and position tables carry a batch axis of one elsewhere."""
    tables = ("class_token", "distill_token", "registers", "positions.table")
    return {key: value.squeeze(0) if key in tables and value.ndim == 3 else value for key, value in state.items()}


def _reorder_rope(qkv: Tensor, config: ViTConfig) -> Tensor:
    """timm's axial RoPE turns neighbouring numbers, by columns first; ours turns halves, by rows first.

    Which pair of a head's numbers is turned by which angle is a matter of order alone, and the products of queries
    and keys do not change when both are reordered alike: so the weights are reordered, not the model.
    """
    pairs = torch.arange(config.head_width).view(2, config.head_width // 4, 2)  # axis, frequency, member of the pair
    order = pairs.flip(0).permute(2, 0, 1).flatten()
    q, k, v = qkv.unflatten(0, (3, config.num_heads, config.head_width)).unbind(0)
    return torch.stack([q[:, order], k[:, order], v]).flatten(0, 2)
