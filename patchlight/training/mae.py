"""Masked autoencoders (He et al. 2021, arXiv:2111.06377): see a quarter of the patches, draw the rest.

The encoder is the ViT that is wanted in the end, and only the visible patches go through its blocks; a small decoder,
dropped after training, gets its tokens, a mask token for every hidden patch, and the positions of all, and predicts the
hidden patches' pixels.

Shapes: V visible patches, T prefix tokens, X numbers in a patch, in the order of `patchify`.
"""

import dataclasses
import io
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from patchlight.config import Size, ViTConfig
from patchlight.errors import PatchlightError
from patchlight.images.augment import augment, normalise
from patchlight.images.draws import Draws
from patchlight.json_config import require
from patchlight.models.positions import sincos_2d
from patchlight.models.stems import patchify
from patchlight.models.token_geometry import TokenGeometry, lay_tokens
from patchlight.models.vit import Block, ViT
from patchlight.training.config import MaeConfig, TrainConfig
from patchlight.training.data import Batch, Dataset, evaluation_batches
from patchlight.training.evaluate import evaluating
from patchlight.training.learner import Learner
from patchlight.weights.convert import convert
from patchlight.weights.vit.names import ORIGINS


class Reconstruction(NamedTuple):
    """Pictures (B, 3, H, W) from 0 to 1."""

    original: Tensor
    masked: Tensor
    """Hidden patches are grey."""
    reconstructed: Tensor
    """Hidden patches as the model draws them. Where it learned normalised pixels, it knows each patch's pattern alone;
    brightness and contrast are then the original's."""


class Mae(Learner):
    """Learning to see by drawing what is hidden."""

    vit: ViT
    explained: Tensor
    moves: Tensor

    def __init__(self, vit: ViT, config: TrainConfig) -> None:
        super().__init__()
        if config.mae is None:
            raise PatchlightError("a masked autoencoder needs the settings `mae`: TrainConfig(mae=MaeConfig(), ...)")
        _check_encoder(vit.config)
        self.vit, self.config, self.mae = vit, config, config.mae
        self.decoder = Decoder(vit.config, self.mae)
        self.num_patches = math.prod(vit.config.grid)
        # The reference cuts off what is left of a patch; the small number keeps 10 * (1 - 0.9) at 1.
        self.num_visible = math.floor(self.num_patches * (1 - self.mae.mask_share) + 1e-9)
        if not 0 < self.num_visible < self.num_patches:
            raise PatchlightError(
                f"mae.mask_share={self.mae.mask_share} of {self.num_patches} patches leaves {self.num_visible} "
                "to see; make patches smaller, or change the share"
            )
        # Of the last batch; kept with the weights, so that a resumed run knows it too.
        self.register_buffer("explained", torch.zeros(()))
        self.register_buffer("moves", torch.zeros((), dtype=torch.int64))

    def prepare(self, batch: Batch, *, cropped: bool) -> tuple[Tensor, ...]:
        """The photos varied and normalised, and noise_BP, which says what is hidden: the patches with the most."""
        config = self.config
        draws = Draws(config.seed, batch.epochs_B, batch.samples_B, batch.repeats_B)
        images_BCHW = augment(batch.images_BCHW, draws, config.augment, cropped=cropped)
        return normalise(images_BCHW, config.preprocess), draws.uniforms("hidden patches", self.num_patches)

    @torch.no_grad()
    def pictures(self, validation: Dataset, device: torch.device) -> dict[str, bytes]:
        """What the model draws where patches are hidden, beside the photos."""
        preprocess = self.config.preprocess
        batches = evaluation_batches(validation, batch_size=8, preprocess=preprocess, workers=0, device=device)
        images_BCHW, _, _ = next(batches)
        return {"reconstructions.png": reconstruction_png(self.reconstruct(images_BCHW))}

    def forward(self, *inputs: Tensor) -> Tensor:
        """The squared error of the hidden patches' pixels, in the mean, from images_BCHW and noise_BP."""
        images_BCHW, noise_BP = inputs
        target_BPX = pixel_targets(images_BCHW, self.vit.config.patch_size, normalised=self.mae.normalised_pixels)
        pixels_BPX, hidden_BP = self.draw(images_BCHW, noise_BP)
        error_BP = (pixels_BPX.float() - target_BPX).square().mean(2)
        loss = (error_BP * hidden_BP).sum() / (len(error_BP) * (self.num_patches - self.num_visible))
        if self.training:
            with torch.no_grad():
                explained = 1 - loss / target_BPX.var()
                self.explained.copy_(torch.where(explained.isfinite(), explained, self.explained))
        return loss

    def draw(self, images_BCHW: Tensor, noise_BP: Tensor) -> tuple[Tensor, Tensor]:
        """All patches as the decoder predicts them, pixels_BPX, and which were hidden, bool_BP."""
        x_BND, geometry = self.vit.embed(images_BCHW)
        order_BP = noise_BP.argsort(dim=1, stable=True)
        back_BP = order_BP.argsort(1)
        prefix_BTD, patches_BPD = x_BND.split([geometry.num_prefix, self.num_patches], 1)
        visible_BV = order_BP[:, : self.num_visible]
        visible_BVD = patches_BPD.take_along_dim(visible_BV[:, :, None], 1)
        x_BND = torch.cat([prefix_BTD, visible_BVD], 1)
        geometry = _only_visible(geometry, visible_BV)
        for block in self.vit.blocks:
            x_BND = block(x_BND, geometry)
        return self.decoder(self.vit.norm(x_BND), back_BP), back_BP >= self.num_visible

    def after_move(self) -> None:
        self.moves.add_(1)

    def measures(self) -> dict[str, float]:
        """The share of the pixels' variance that the predictions explain: 0 for a plain grey, 1 for the truth."""
        return {"explained": self.explained.item()}

    def check(self) -> None:
        explained, moves = self.explained.item(), int(self.moves.item())
        if moves >= self.mae.patience and explained < 0.01:
            raise PatchlightError(
                f"after {moves:,} steps the hidden patches are predicted no better than as plain grey (variance "
                f"explained {explained:.1%}); lower optim.lr or lengthen optim.warmup, or lower mae.mask_share; "
                "for slow starts raise mae.patience"
            )

    @torch.no_grad()
    def reconstruct(self, images_BCHW: Tensor, noise_BP: Tensor | None = None, seed: int = 0) -> Reconstruction:
        """How photos, normalised as the model takes them, look masked and redrawn; the same for the same seed."""
        batch, device = len(images_BCHW), images_BCHW.device
        if noise_BP is None:
            places_B = torch.arange(batch, device=device)
            noise_BP = Draws(seed, torch.zeros_like(places_B), places_B).uniforms("hidden patches", self.num_patches)
        with evaluating(self):
            drawn_BPX, hidden_BP = self.draw(images_BCHW, noise_BP)
        patch_size, grid = self.vit.config.patch_size, self.vit.config.grid
        patches_BPX, drawn_BPX = patchify(images_BCHW, patch_size).float(), drawn_BPX.float()
        if self.mae.normalised_pixels:
            mean_BP1, deviation_BP1 = _level_and_spread(patches_BPX)
            drawn_BPX = drawn_BPX * deviation_BP1 + mean_BP1
        mean_C11, std_C11 = (
            torch.tensor(colour, device=device).view(3, 1, 1)
            for colour in (self.config.preprocess.mean, self.config.preprocess.std)
        )

        def picture(patches_BPX: Tensor) -> Tensor:
            return (unpatchify(patches_BPX, grid, patch_size) * std_C11 + mean_C11).clamp(0, 1)

        hidden_BP1 = hidden_BP[:, :, None]
        grey_BPX = patchify(((0.5 - mean_C11) / std_C11).expand_as(images_BCHW), patch_size)
        return Reconstruction(
            original=picture(patches_BPX),
            masked=picture(torch.where(hidden_BP1, grey_BPX, patches_BPX)),
            reconstructed=picture(torch.where(hidden_BP1, drawn_BPX, patches_BPX)),
        )


class Decoder(nn.Module):
    """The visible tokens, and where they were, to the pixels of all patches."""

    positions_ND: Tensor

    def __init__(self, encoder: ViTConfig, config: MaeConfig) -> None:
        super().__init__()
        own = _decoder_config(encoder, config)
        self.grid, self.num_prefix, self.num_patches = encoder.grid, encoder.num_prefix, math.prod(encoder.grid)
        self.embed = nn.Linear(encoder.width, own.width)
        self.mask_token = nn.Parameter(torch.empty(own.width))
        self.blocks = nn.ModuleList(Block(own, 0.0) for _ in range(own.depth))
        self.norm = nn.LayerNorm(own.width, own.norm_eps)
        self.pixels = nn.Linear(own.width, encoder.in_channels * math.prod(encoder.patch_size))
        # A buffer, so that tables of other makers can be loaded. The prefix tokens lie nowhere.
        positions_PD = sincos_2d(encoder.grid, own.width)
        self.register_buffer(
            "positions_ND", torch.cat([positions_PD.new_zeros(self.num_prefix, own.width), positions_PD])
        )
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.normal_(self.mask_token, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x_BND: Tensor, back_BP: Tensor) -> Tensor:
        """The prefix and visible tokens to pixels_BPX; `back_BP` says where each patch is among visible, then hidden
        ones."""
        x_BND = self.embed(x_BND).to(self.mask_token.dtype)
        prefix_BTD, visible_BVD = x_BND.tensor_split([self.num_prefix], 1)
        hidden = self.num_patches - visible_BVD.shape[1]
        shuffled_BPD = torch.cat([visible_BVD, self.mask_token.expand(len(x_BND), hidden, -1)], 1)
        patches_BPD = shuffled_BPD.take_along_dim(back_BP[:, :, None], 1)
        x_BND = torch.cat([prefix_BTD, patches_BPD], 1) + self.positions_ND
        geometry = lay_tokens(self.grid, [self.grid], self.num_prefix, x_BND.device)
        for block in self.blocks:
            x_BND = block(x_BND, geometry)
        return self.pixels(self.norm(x_BND)[:, self.num_prefix :])


def _decoder_config(encoder: ViTConfig, config: MaeConfig) -> ViTConfig:
    """What its blocks are made of: as the encoder's, of another size."""
    return ViTConfig(
        image_size=encoder.image_size,
        patch_size=encoder.patch_size,
        uneven_size=encoder.uneven_size,
        width=config.decoder_width,
        depth=config.decoder_depth,
        num_heads=config.decoder_heads,
        mlp=encoder.mlp,
        qkv_bias=encoder.qkv_bias,
        qk_norm=encoder.qk_norm,
        norm_eps=encoder.norm_eps,
        position="sincos2d",
        num_classes=0,
    )


def _check_encoder(config: ViTConfig) -> None:
    (height, width), (down, across) = config.image_size, config.patch_size
    require(config.num_classes == 0, f"model.num_classes={config.num_classes}: MAE learns no classes; set it to 0")
    require(config.in_channels == 3, f"model.in_channels={config.in_channels}: MAE draws photos, which have 3")
    require(config.stem == "patchify", f"model.stem={config.stem!r} would see hidden patches; use stem='patchify'")
    require(
        config.position not in ("relative_bias", "relative_mlp", "rope_mixed"),
        f"model.position={config.position!r} needs the patches in their places; use 'sincos2d', 'learned' or 'rope2d'",
    )
    require(config.resnet is None, f"model.resnet={config.resnet} would see what MAE hides; leave it out")
    require(
        height % down == 0 and width % across == 0,
        f"MAE draws whole patches, and {down}x{across} do not divide {height}x{width}; change model.image_size",
    )


def _only_visible(geometry: TokenGeometry, visible_BV: Tensor) -> TokenGeometry:
    """What the blocks are told of the tokens that are left: rotations are each patch's own."""
    if geometry.rope is None:
        return geometry

    def visible(table_11NE: Tensor) -> Tensor:
        prefix_TE, patches_PE = table_11NE[0, 0].tensor_split([geometry.num_prefix])
        return torch.cat([prefix_TE.expand(len(visible_BV), -1, -1), patches_PE[visible_BV]], 1)[:, None]

    cos, sin = geometry.rope
    return dataclasses.replace(geometry, rope=(visible(cos), visible(sin)))


def pixel_targets(images_BCHW: Tensor, patch_size: Size, *, normalised: bool) -> Tensor:
    """What is to be predicted, target_BPX float32: each patch's pixels, or their differences from its mean, in
    deviations."""
    patches_BPX = patchify(images_BCHW, patch_size).float()
    if not normalised:
        return patches_BPX
    mean_BP1, deviation_BP1 = _level_and_spread(patches_BPX)
    return (patches_BPX - mean_BP1) / deviation_BP1


def _level_and_spread(patches_BPX: Tensor) -> tuple[Tensor, Tensor]:
    # The small number leaves a patch of one colour at zero.
    return patches_BPX.mean(2, keepdim=True), (patches_BPX.var(2, keepdim=True) + 1e-6).sqrt()


def unpatchify(patches_BPX: Tensor, grid: Size, patch_size: Size) -> Tensor:
    """The inverse of `patchify`, for RGB: image_BCHW."""
    (rows, columns), (down, across) = grid, patch_size
    parts = patches_BPX.reshape(len(patches_BPX), rows, columns, 3, down, across)
    return parts.permute(0, 3, 1, 4, 2, 5).reshape(len(patches_BPX), 3, rows * down, columns * across)


def reconstruction_png(pictures: Reconstruction, *, gap: int = 4) -> bytes:
    """A PNG with a row for each photo: original | masked | reconstructed. The same bytes for the same pictures."""
    batch, _, height, width = pictures.original.shape
    sheet = np.full((batch * (height + gap) - gap, 3 * (width + gap) - gap, 3), 255, np.uint8)
    for column, images_BCHW in enumerate(pictures):
        levels_BHWC = (images_BCHW * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
        left = column * (width + gap)
        for row, levels_HWC in enumerate(levels_BHWC):
            top = row * (height + gap)
            sheet[top : top + height, left : left + width] = levels_HWC
    file = io.BytesIO()
    Image.fromarray(sheet).save(file, "PNG")
    return file.getvalue()


def load_hf_mae(mae: Mae, state: Mapping[str, Tensor]) -> None:
    """Take over encoder and decoder from the state of transformers' ViTMAEForPreTraining.

    Its encoder has a table of positions: make the ViT with position="learned" and norm_eps=1e-12.
    """
    names = ("decoder.mask_token", "decoder.decoder_pos_embed", "decoder.decoder_pred.weight")
    for name in names:
        if name not in state:
            raise PatchlightError(f"the state has no {name!r}; it is not one of ViTMAEForPreTraining, with its decoder")
    theirs = {
        key.removeprefix("decoder.").removeprefix("decoder_"): value
        for key, value in state.items()
        if key.startswith("decoder.")
    }
    mask_token, positions = theirs.pop("mask_token"), theirs.pop("pos_embed")
    origin = next(origin for origin in ORIGINS if origin.name == "transformers")
    encoder, _ = convert({key[4:]: value for key, value in state.items() if key.startswith("vit.")}, origin)
    decoder, _ = convert(theirs, origin)
    decoder |= {"mask_token": mask_token.flatten(), "positions_ND": positions[0]}
    for part in ("weight", "bias"):
        rows = decoder.pop(f"pred.{part}")
        try:  # theirs are pixels of three colours, ours colours of so many pixels
            decoder[f"pixels.{part}"] = rows.unflatten(0, (*mae.vit.config.patch_size, 3)).movedim(2, 0).flatten(0, 2)
        except RuntimeError:
            raise PatchlightError(
                f"the checkpoint draws {len(rows)} numbers a patch, which patches of {mae.vit.config.patch_size} "
                "do not have; change model.patch_size"
            ) from None
    for module, converted in ((mae.vit, encoder), (mae.decoder, decoder)):
        try:
            module.load_state_dict(converted)
        except RuntimeError as error:
            raise PatchlightError(
                f"the checkpoint does not fit the settings ({str(error).splitlines()[-1].strip()})"
            ) from None
