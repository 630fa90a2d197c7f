"""Registers for a model that was trained without: its high-norm artifacts, moved out of the picture at test time.

Jiang et al. 2025 ("Vision Transformers Don't Need Trained Registers", arXiv:2506.08010) found that a few hidden neurons
of the MLPs make the artifacts: they fire on few patches, and hard. Where such a neuron's activation is taken from the
patches and given to an additional token, that token becomes the long one, and the patches' maps are clean.
"""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchlight.config import ViTConfig
from patchlight.errors import PatchlightError
from patchlight.explain.artifacts import artifact_patches, outlier_tokens
from patchlight.explain.attention import image_for, plain_vit
from patchlight.explain.probes import token_norms
from patchlight.models.attention import Heads
from patchlight.models.mlp import MLP, SwiGLU
from patchlight.models.token_geometry import TokenGeometry
from patchlight.models.vit import Block, ViT

Neuron = tuple[int, int]
"""A hidden unit of an MLP: (block, index)."""

NUMBERS_TO_TRY = (1, 2, 4, 8, 16, 32, 64, 128)
"""How many neurons are moved, where nobody says: the authors take 10 for OpenCLIP B/16 and 50 for DINOv2 L/14."""

LEFT_OVER = 0.1
"""Of NUMBERS_TO_TRY the first is taken that leaves at most this share of the outliers."""

IMAGES_AT_ONCE = 8


def add_registers(
    model: Any, image_BCHW: Tensor | None, count: int = 1, *, neurons: int | Sequence[Neuron] | None = None
) -> ViT:
    """A new model with `count` more registers that take the artifacts from the patches; the given one is untouched.

    `image_BCHW` are a few images to find the responsible neurons on: about ten that show artifacts do. `neurons` says
    how many to move; or which ones, as (block, index) pairs, and then no images are needed. None takes the fewest that
    remove nine in ten of the outliers on these images, and raises where even 128 do not remove half.

    In each forward pass the largest activations of such a neuron over the image's patches go to the new registers (the
    largest to the first, the next to the second), and it is set to zero on all patches. The new tokens start at zero,
    without positions. They stand last in the prefix; `config.num_registers` counts them.

    The neurons are no part of the config, so `save` and `load` do not restore such a model: `load` refuses what `save`
    wrote, for its tensors `blocks.*.moved`. Keep the original and `register_neurons(new)`, and make it again with
    `add_registers(original, None, count, neurons=those)`.
    """
    vit = plain_vit(model)
    if vit.config.block_norm != "before" or vit.config.inner_norm != "none":
        raise PatchlightError("registers are added to models that normalise before each branch and not inside it")
    if not isinstance(count, int) or count < 1:
        raise PatchlightError(f"count={count!r} must be 1 or more registers")
    if register_neurons(vit):
        raise PatchlightError("this model has test-time registers already; add them to the original")
    if neurons is not None and not isinstance(neurons, int):
        return _moving(vit, _checked(neurons, vit), count)
    if image_BCHW is None:
        raise PatchlightError("without images give the neurons to move, as register_neurons lists them")
    if neurons is not None:
        return _moving(vit, find_register_neurons(vit, image_BCHW, neurons), count)
    return _moving_enough(vit, image_BCHW, count)


def register_neurons(model: Any) -> tuple[Neuron, ...]:
    """The (block, index) pairs that a model from `add_registers` moves; none for any other model."""
    return tuple(
        (layer, index)
        for layer, block in enumerate(plain_vit(model).blocks)
        if isinstance(block, RegisterBlock)
        for index in block.moved.tolist()
    )


@torch.no_grad()
def find_register_neurons(model: Any, image_BCHW: Tensor, number: int) -> list[Neuron]:
    """The (block, index) of the hidden neurons that do most to make outlier patches, the strongest first.

    A neuron's strength is how much more it writes into outliers (`artifact_patches`) than into other patches: the
    difference of its activations' mean sizes, times the length of its column of the output matrix. Looked at are the
    blocks up to the one after which half of the outliers are there; later neurons only react to them.
    """
    vit = plain_vit(model)
    if not isinstance(number, int) or number < 1:
        raise PatchlightError(f"{number!r} neurons were asked for; give 1 or more, or (block, index) pairs")
    image_BCHW = image_for(vit, image_BCHW)
    num_prefix = vit.config.num_prefix
    norms_LBN = _norms(vit, image_BCHW)
    outliers_BP = artifact_patches(norms_LBN, num_prefix)
    if not outliers_BP.any():
        patches_LBP = norms_LBN[-2:, :, num_prefix:]
        ratio = (patches_LBP.amax(2) / patches_LBP.median(2).values).max()
        raise PatchlightError(
            f"no outlier patches after the last two blocks in {len(image_BCHW)} images of {patches_LBP.shape[2]} "
            f"patches (the longest has {ratio:.1f} times its image's median); give images with artifacts, or neurons"
        )
    present_L = torch.stack([(outlier_tokens(norms, num_prefix) & outliers_BP).sum() for norms in norms_LBN])
    blocks = [_block(vit, layer) for layer in range(int((2 * present_L >= outliers_BP.sum()).nonzero()[0]) + 1)]

    excess_LF = torch.zeros(len(blocks), vit.config.mlp_width, device=image_BCHW.device)
    for images, outliers in zip(image_BCHW.split(IMAGES_AT_ONCE), outliers_BP.split(IMAGES_AT_ONCE), strict=True):
        x_BND, geometry = vit.embed(images)
        for layer, block in enumerate(blocks):
            x_BND = block.residual1(x_BND, block.attn(block.norm1(x_BND), geometry))
            hidden_BNF = hidden_units(block.mlp, block.norm2(x_BND))
            size_BPF = hidden_BNF[:, num_prefix:].float().abs()
            excess_LF[layer] += size_BPF[outliers].sum(0) / outliers_BP.sum()
            excess_LF[layer] -= size_BPF[~outliers].sum(0) / (~outliers_BP).sum()
            x_BND = block.residual2(x_BND, block.mlp.down(hidden_BNF))
    written_LF = excess_LF * torch.stack([_written(block) for block in blocks])
    strongest = written_LF.flatten().argsort(descending=True, stable=True)[:number].tolist()
    return [divmod(place, vit.config.mlp_width) for place in strongest]


def hidden_units(mlp: nn.Module, x_BND: Tensor) -> Tensor:
    """The MLP's hidden activations (B, N, F), which its `down` layer reads."""
    if isinstance(mlp, SwiGLU):
        gate_BNF, up_BNF = mlp.gate_and_up(x_BND).chunk(2, -1)
        return F.silu(gate_BNF) * up_BNF
    assert isinstance(mlp, MLP)
    return mlp.activation(mlp.up(x_BND))


def _written(block: Block) -> Tensor:
    """Norm of each hidden neuron's output weights, LayerScale included: (F,)."""
    columns_DF = block.mlp.down.weight.float()
    if block.residual2.scale is not None:
        columns_DF = columns_DF * block.residual2.scale[:, None].float()
    return columns_DF.norm(dim=0)


class RegisterBlock(Block):
    """A block whose MLP gives the largest activations of some neurons to the last `count` prefix tokens."""

    moved: Tensor

    def __init__(self, config: ViTConfig, drop_path: float, count: int, moved: Tensor) -> None:
        super().__init__(config, drop_path)
        self.count = count
        self.register_buffer("moved", moved)

    def forward(self, x_BND: Tensor, geometry: TokenGeometry, heads: list[Heads] | None = None) -> Tensor:
        x_BND = self.residual1(x_BND, self.attn(self.norm1(x_BND), geometry, heads))
        hidden_BNF = self.move(hidden_units(self.mlp, self.norm2(x_BND)), geometry)
        return self.residual2(x_BND, self.mlp.down(hidden_BNF))

    def move(self, hidden_BNF: Tensor, geometry: TokenGeometry) -> Tensor:
        """The activations with those of the moved neurons on the registers, and zero on the patches."""
        prefix, patches = hidden_BNF[:, :, self.moved].tensor_split([geometry.num_prefix], 1)
        if geometry.valid_BN is not None:
            patches = patches.where(geometry.valid_BN[:, geometry.num_prefix :, None], 0)
        # The largest by size: a gated neuron fires hard in the negative as well.
        places = patches.abs().topk(min(self.count, patches.shape[1]), 1).indices
        largest = F.pad(patches.gather(1, places), (0, 0, 0, self.count - places.shape[1]))
        new = torch.cat([prefix[:, : geometry.num_prefix - self.count], largest, torch.zeros_like(patches)], 1)
        return hidden_BNF.index_copy(2, self.moved, new)


def _moving(vit: ViT, neurons: Sequence[Neuron], count: int) -> ViT:
    """The model with registers to which these neurons' activations are moved, in memory of its own."""
    old = vit.config
    config = dataclasses.replace(old, num_registers=old.num_registers + count)
    state = {name: value.clone() for name, value in vit.state_dict().items()}
    zeros_TD = vit.norm.weight.new_zeros(count, old.width)
    state["registers"] = torch.cat([state["registers"], zeros_TD]) if old.num_registers else zeros_TD
    if old.has_position_table and config.num_prefix_positions > old.num_prefix_positions:
        first_TD, patches_PD = state["positions.table"].tensor_split([old.num_prefix_positions])
        state["positions.table"] = torch.cat([first_TD, zeros_TD.to(first_TD.dtype), patches_PD])
    if old.position == "relative_bias" and not old.num_prefix:
        for name in state:
            if name.endswith("relative_bias.table"):
                state[name] = F.pad(state[name], (0, 0, 0, 3))  # for prefix tokens, of which there were none

    with torch.device("meta"):
        new = ViT(config)
        for layer in sorted({layer for layer, _ in neurons}):
            moved = torch.tensor([index for block, index in neurons if block == layer], device=zeros_TD.device)
            rate = _block(vit, layer).residual1.drop_path.item()
            new.blocks[layer] = RegisterBlock(config, rate, count, moved)
            state[f"blocks.{layer}.moved"] = moved
    new.load_state_dict(state, assign=True)
    frozen = {name for name, parameter in vit.named_parameters() if not parameter.requires_grad}
    for name, parameter in new.named_parameters():
        parameter.requires_grad_(name not in frozen)
    new.checkpoint_blocks = vit.checkpoint_blocks
    return new.to(zeros_TD.device).train(vit.training)


def _moving_enough(vit: ViT, image_BCHW: Tensor, count: int) -> ViT:
    """The model in which the fewest neurons are moved that remove the outliers on these images."""
    ranked = find_register_neurons(vit, image_BCHW, NUMBERS_TO_TRY[-1])
    before = _count_outliers(vit, image_BCHW)
    fewest_left, best = before + 1, vit
    for number in NUMBERS_TO_TRY:
        candidate = _moving(vit, ranked[:number], count)
        left = _count_outliers(candidate, image_BCHW)
        if left < fewest_left:
            fewest_left, best = left, candidate
        if left <= LEFT_OVER * before:
            return candidate
    if 2 * fewest_left > before:
        raise PatchlightError(
            f"moving up to {NUMBERS_TO_TRY[-1]} neurons leaves {fewest_left} of {before} outlier patches, so these are "
            "not made by a few neurons; neurons=10 moves ten of them all the same"
        )
    return best


def _count_outliers(vit: ViT, image_BCHW: Tensor) -> int:
    return int(artifact_patches(_norms(vit, image_BCHW), vit.config.num_prefix).sum())


def _norms(vit: ViT, image_BCHW: Tensor) -> Tensor:
    return torch.cat([token_norms(vit, images) for images in image_BCHW.split(IMAGES_AT_ONCE)], 1)


def _block(vit: ViT, layer: int) -> Block:
    block = vit.blocks[layer]
    assert isinstance(block, Block)
    return block


def _checked(neurons: Sequence[Neuron], vit: ViT) -> list[Neuron]:
    """The pairs as plain numbers, each within the model, none twice."""
    depth, hidden = vit.config.depth, vit.config.mlp_width
    try:
        pairs = [(operator.index(layer), operator.index(index)) for layer, index in neurons]
    except (TypeError, ValueError):
        raise PatchlightError(f"neurons={neurons!r:.80} should be a number, or (block, index) pairs") from None
    if not pairs or len(set(pairs)) < len(pairs):
        raise PatchlightError(f"neurons={neurons!r:.80} should name one neuron or more, each once")
    for layer, index in pairs:
        if not (0 <= layer < depth and 0 <= index < hidden):
            raise PatchlightError(
                f"neuron {(layer, index)} does not exist: the model has {depth} blocks of {hidden} hidden neurons"
            )
    return pairs
