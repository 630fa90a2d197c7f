"""A photo in patches of any size: what each becomes on its way into the model, and what the model then says."""

import dataclasses
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from patchlight.config import Size, ViTConfig
from patchlight.explain.shuffling import shuffle_patches, without_positions
from patchlight.models.attention import Heads
from patchlight.models.stems import fit_to_patches
from patchlight.models.vit import ViT
from patchlight.weights.families import family_of
from patchlight.weights.load import Loaded


@dataclass(frozen=True, eq=False)
class Diced:
    """What one pass showed, in float32 on the CPU; places are those of the patches as they lay, row by row."""

    grid: Size
    patches_PD: Tensor
    """What the patch embedding makes of each patch."""
    positions_PD: Tensor | None
    """What is added to them; None where nothing is."""
    prefix_TD: Tensor
    """Class token, distillation token and registers, as they enter the first block."""
    heads: Heads
    """Queries and keys of the block that was asked for, a batch of one."""
    output_K: Tensor
    """Logits, or features of a model without classes."""


def config_for(loaded: Loaded, patch_size: int | None, image_size: int | None) -> ViTConfig:
    """The config for other patches, and for images whose side is the nearest multiple of them; None keeps what is."""
    assert isinstance(loaded.config, ViTConfig)
    down, across = (patch_size, patch_size) if patch_size else loaded.config.patch_size
    height, width = (image_size, image_size) if image_size else loaded.preprocess.config.image_size
    sides = down * max(1, round(height / down)), across * max(1, round(width / across))
    return dataclasses.replace(loaded.config, patch_size=(down, across), image_size=sides)


def resized(loaded: Loaded, config: ViTConfig) -> Loaded:
    """The model for other patches or images, exactly as `load` gives it with `patch_size=` and `image_size=`. All
    weights that stay the same are shared."""
    assert isinstance(loaded.model, ViT)
    own = loaded.config
    assert isinstance(own, ViTConfig)
    if (config.patch_size, config.image_size) == (own.patch_size, loaded.preprocess.config.image_size):
        return loaded
    family = family_of(config)
    family.change_sizes(own, config, [])  # refuses what cannot be
    ours = next(origin for origin in family.origins if origin.name == "patchlight")
    state = family.fit(dict(loaded.model.state_dict()), own, config, ours, [], loaded.provenance.source)
    with torch.device("meta"):
        model = ViT(config)
    model.load_state_dict(state, assign=True)
    model.to(loaded.device).eval()
    prepare = type(loaded.preprocess)(loaded.preprocess.config.for_size(config.image_size))
    return dataclasses.replace(loaded, model=model, config=config, preprocess=prepare)


@torch.inference_mode()
def dice(vit: ViT, image_CHW: Tensor, layer: int, order_P: Tensor | None = None, *, positions: bool = True) -> Diced:
    """One pass over a photo, its patches in this order, with or without `positions`."""
    weight = vit.norm.weight
    image_BCHW, grids = fit_to_patches(image_CHW[None].to(weight.device, weight.dtype), vit.config)
    if order_P is not None:
        image_BCHW = shuffle_patches(image_BCHW, vit.config.patch_size, order_P.to(weight.device))
    if not positions and vit.config.position != "none":
        vit = without_positions(vit)
    kept: list[Heads] = []

    def visit(index: int, heads: Heads, x_BND: Tensor) -> None:
        if index == layer:
            kept.append(heads)

    patches_BPD = vit.patch_embed(image_BCHW, grids)
    x_BND, geometry = vit.embed(image_BCHW)
    added = vit.positions(geometry) if positions and vit.positions is not None else None
    output_BK = vit.read(vit.run_blocks(x_BND, geometry, visit), geometry)
    (heads,), nothing = kept, torch.empty(0)
    mask = None if heads.mask is None else heads.mask.float().cpu()
    return Diced(
        grid=geometry.grid,
        patches_PD=patches_BPD[0].float().cpu(),
        positions_PD=None if added is None else added[0].float().cpu(),
        prefix_TD=x_BND[0, : geometry.num_prefix].float().cpu(),
        heads=Heads(heads.q_BANE.float().cpu(), heads.k_BANE.float().cpu(), nothing, mask, nothing),
        output_K=output_BK[0].float().cpu(),
    )


def tints(rows_PD: Tensor) -> Tensor:
    """A colour for each row (P, 3), 0 to 1: like colours for like rows, by their first three principal components."""
    centred_PD = rows_PD.double() - rows_PD.double().mean(0)
    directions_PX = torch.linalg.svd(centred_PD, full_matrices=False)[0][:, :3]
    least, most = directions_PX.amin(0), directions_PX.amax(0)
    colours_PX = (directions_PX - least) / (most - least).clamp_min(1e-12)
    return F.pad(colours_PX, (0, 3 - colours_PX.shape[1])).float().contiguous()
