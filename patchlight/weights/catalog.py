"""The checkpoints that people use, by name: where each lies on the hub, what it is, how photos are prepared for it.

A new checkpoint is a row here, not code. Licences are those that the authors state; where a row says "see the page",
they set terms of their own.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from patchlight.config import PreprocessConfig

IMAGENET = PreprocessConfig(crop_pct=0.875)
IMAGENET_CROP_90 = PreprocessConfig(crop_pct=0.9)
IMAGENET_CROP_95 = PreprocessConfig(crop_pct=0.95)
INCEPTION_CROP_90 = PreprocessConfig(crop_pct=0.9, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
INCEPTION_SQUASH = PreprocessConfig(
    resize="squash", interpolation="bilinear", mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)
)
DINO = PreprocessConfig(resize_size=(256, 256), crop="floor")
DINO_256 = PreprocessConfig(image_size=(256, 256))
DINO_518 = PreprocessConfig(image_size=(518, 518))
DINO3 = PreprocessConfig(resize="squash", interpolation="bilinear", resize_in="floats")
IMAGENET_CROP_95 = PreprocessConfig(crop_pct=0.95)
IMAGENET_SQUASH = PreprocessConfig(resize="squash", crop="none")  # as transformers prepares photos for Swin
IMAGENET_FLOOR = PreprocessConfig(resize_size=(256, 256), crop="floor")  # and for ConvNeXt
CLIP_90 = PreprocessConfig(
    crop_pct=0.9, mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711)
)
CLIP = PreprocessConfig(mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711))
INCEPTION_SQUASH_BICUBIC = dataclasses.replace(INCEPTION_SQUASH, interpolation="bicubic")
CLIP_SQUASH = dataclasses.replace(CLIP, resize="squash")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One checkpoint on the hub."""

    name: str
    hub: str
    preprocess: PreprocessConfig
    licence: str
    about: str
    settings: dict[str, Any] = field(default_factory=dict)
    """What the shapes of its tensors cannot tell, beyond the convention of its origin."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"preprocess": self.preprocess.to_dict()}


def _timm(arch: str, tag: str, preprocess: PreprocessConfig, licence: str, about: str, **settings: Any) -> Entry:
    name = f"{arch}.{tag}"
    return Entry(name=name, hub=f"timm/{name}", preprocess=preprocess, licence=licence, about=about, settings=settings)


def _hub(hub: str, preprocess: PreprocessConfig, licence: str, about: str, **settings: Any) -> Entry:
    name = hub.split("/")[1]
    return Entry(name=name, hub=hub, preprocess=preprocess, licence=licence, about=about, settings=settings)


_AUGREG = "ImageNet-21k, then ImageNet-1k"
_DINO = "DINO, self-supervised on ImageNet-1k"
_DINO2 = "DINOv2, self-supervised on 142 M images"
_DINO2_HEAD = "DINOv2 with a linear ImageNet-1k classifier"
_DINO2_REG = "DINOv2 with 4 registers"
_DINO3 = "DINOv3, self-supervised on 1.7 G images"
_OPENAI = "CLIP image tower, by OpenAI"
_SIGLIP = "SigLIP image tower"
_BEIT = "BEiT, ImageNet-22k, then ImageNet-1k"
_ROPE = "RoPE-ViT, ImageNet-1k"
_HYBRID = "ResNet and ViT, ImageNet-21k, then ImageNet-1k"
_SWIN, _SWIN_22K = "Swin, ImageNet-1k", "Swin, ImageNet-22k, then ImageNet-1k"
_CONVNEXT, _CONVNEXT_22K = "ConvNeXt, ImageNet-1k", "ConvNeXt, ImageNet-22k, then ImageNet-1k"
_CONVNEXT2 = "ConvNeXt V2, masked autoencoder, then ImageNet-1k"

ENTRIES: tuple[Entry, ...] = (
    _hub("facebook/dino-vits16", DINO, "Apache-2.0", _DINO),
    _hub("facebook/dino-vits8", DINO, "Apache-2.0", _DINO),
    _hub("facebook/dino-vitb16", DINO, "Apache-2.0", _DINO),
    _hub("facebook/dino-vitb8", DINO, "Apache-2.0", _DINO),
    _hub("facebook/dinov2-small", DINO, "Apache-2.0", _DINO2, norm_eps=1e-6),
    _hub("facebook/dinov2-base", DINO, "Apache-2.0", _DINO2, norm_eps=1e-6),
    _hub("facebook/dinov2-large", DINO, "Apache-2.0", _DINO2, norm_eps=1e-6),
    _hub("facebook/dinov2-giant", DINO, "Apache-2.0", _DINO2, norm_eps=1e-6),
    _hub("facebook/dinov2-small-imagenet1k-1-layer", DINO, "Apache-2.0", _DINO2_HEAD, norm_eps=1e-6),
    _hub("facebook/dinov2-base-imagenet1k-1-layer", DINO, "Apache-2.0", _DINO2_HEAD, norm_eps=1e-6),
    _hub("facebook/dinov2-with-registers-small", DINO, "Apache-2.0", _DINO2_REG, norm_eps=1e-6),
    _hub("facebook/dinov2-with-registers-base", DINO, "Apache-2.0", _DINO2_REG, norm_eps=1e-6),
    _hub("facebook/dinov2-with-registers-large", DINO, "Apache-2.0", _DINO2_REG, norm_eps=1e-6),
    _hub("facebook/dinov2-with-registers-giant", DINO, "Apache-2.0", _DINO2_REG, norm_eps=1e-6),
    _hub("facebook/vit-mae-base", IMAGENET_CROP_90, "Apache-2.0", "masked autoencoder, ImageNet-1k"),
    _hub("facebook/vit-mae-large", IMAGENET_CROP_90, "Apache-2.0", "masked autoencoder, ImageNet-1k"),
    _hub("facebook/deit-tiny-patch16-224", IMAGENET, "Apache-2.0", "DeiT, ImageNet-1k"),
    _hub("facebook/deit-small-patch16-224", IMAGENET, "Apache-2.0", "DeiT, ImageNet-1k"),
    _hub("facebook/deit-base-patch16-224", IMAGENET, "Apache-2.0", "DeiT, ImageNet-1k"),
    _hub("facebook/deit-base-distilled-patch16-224", IMAGENET, "Apache-2.0", "DeiT, distilled, ImageNet-1k"),
    _hub("google/vit-base-patch16-224", INCEPTION_SQUASH, "Apache-2.0", _AUGREG),
    _hub("google/vit-base-patch16-224-in21k", INCEPTION_SQUASH, "Apache-2.0", "ImageNet-21k"),
    _hub("google/vit-large-patch16-224", INCEPTION_SQUASH, "Apache-2.0", _AUGREG),
    _hub("google/vit-large-patch16-224-in21k", INCEPTION_SQUASH, "Apache-2.0", "ImageNet-21k"),
    _hub("google/vit-base-patch16-384", INCEPTION_SQUASH.for_size((384, 384)), "Apache-2.0", _AUGREG),
    _hub("google/vit-base-patch32-384", INCEPTION_SQUASH.for_size((384, 384)), "Apache-2.0", _AUGREG),
    _hub("google/vit-large-patch16-384", INCEPTION_SQUASH.for_size((384, 384)), "Apache-2.0", _AUGREG),
    _hub("google/vit-large-patch32-384", INCEPTION_SQUASH.for_size((384, 384)), "Apache-2.0", _AUGREG),
    _hub("google/vit-base-patch32-224-in21k", INCEPTION_SQUASH, "Apache-2.0", "ImageNet-21k"),
    _hub("google/vit-huge-patch14-224-in21k", INCEPTION_SQUASH, "Apache-2.0", "ImageNet-21k"),
    _hub("openai/clip-vit-base-patch32", CLIP, "MIT", _OPENAI, mlp="quick_gelu"),
    _hub("openai/clip-vit-base-patch16", CLIP, "MIT", _OPENAI, mlp="quick_gelu"),
    _hub("openai/clip-vit-large-patch14", CLIP, "MIT", _OPENAI, mlp="quick_gelu"),
    _hub("openai/clip-vit-large-patch14-336", CLIP.for_size((336, 336)), "MIT", _OPENAI, mlp="quick_gelu"),
    _timm("vit_tiny_patch16_224", "augreg_in21k_ft_in1k", INCEPTION_CROP_90, "Apache-2.0", _AUGREG),
    _timm("vit_small_patch16_224", "augreg_in21k_ft_in1k", INCEPTION_CROP_90, "Apache-2.0", _AUGREG),
    _timm("vit_small_patch32_224", "augreg_in21k_ft_in1k", INCEPTION_CROP_90, "Apache-2.0", _AUGREG),
    _timm("vit_base_patch16_224", "augreg2_in21k_ft_in1k", INCEPTION_CROP_90, "Apache-2.0", _AUGREG),
    _timm("vit_base_patch16_224", "augreg_in21k", INCEPTION_CROP_90, "Apache-2.0", "ImageNet-21k"),
    _timm("vit_base_patch32_224", "augreg_in21k_ft_in1k", INCEPTION_CROP_90, "Apache-2.0", _AUGREG),
    _timm("vit_base_patch8_224", "augreg_in21k_ft_in1k", INCEPTION_CROP_90, "Apache-2.0", _AUGREG),
    _timm("vit_large_patch16_224", "augreg_in21k_ft_in1k", INCEPTION_CROP_90, "Apache-2.0", _AUGREG),
    _timm("deit_tiny_patch16_224", "fb_in1k", IMAGENET_CROP_90, "Apache-2.0", "DeiT, ImageNet-1k"),
    _timm("deit_small_patch16_224", "fb_in1k", IMAGENET_CROP_90, "Apache-2.0", "DeiT, ImageNet-1k"),
    _timm("deit_base_patch16_224", "fb_in1k", IMAGENET_CROP_90, "Apache-2.0", "DeiT, ImageNet-1k"),
    _timm("deit_tiny_distilled_patch16_224", "fb_in1k", IMAGENET_CROP_90, "Apache-2.0", "DeiT, distilled"),
    _timm("deit_small_distilled_patch16_224", "fb_in1k", IMAGENET_CROP_90, "Apache-2.0", "DeiT, distilled"),
    _timm("deit_base_distilled_patch16_224", "fb_in1k", IMAGENET_CROP_90, "Apache-2.0", "DeiT, distilled"),
    _timm("deit3_small_patch16_224", "fb_in22k_ft_in1k", PreprocessConfig(), "Apache-2.0", "DeiT III"),
    _timm("deit3_base_patch16_224", "fb_in22k_ft_in1k", PreprocessConfig(), "Apache-2.0", "DeiT III"),
    _timm("vit_small_patch16_224", "dino", IMAGENET_CROP_90, "Apache-2.0", _DINO),
    _timm("vit_small_patch8_224", "dino", IMAGENET_CROP_90, "Apache-2.0", _DINO),
    _timm("vit_base_patch16_224", "dino", IMAGENET_CROP_90, "Apache-2.0", _DINO),
    _timm("vit_base_patch8_224", "dino", IMAGENET_CROP_90, "Apache-2.0", _DINO),
    _timm("vit_base_patch16_224", "mae", IMAGENET_CROP_90, "CC-BY-NC-4.0", "masked autoencoder, ImageNet-1k"),
    _timm("vit_large_patch16_224", "mae", IMAGENET_CROP_90, "CC-BY-NC-4.0", "masked autoencoder, ImageNet-1k"),
    _timm("vit_small_patch14_dinov2", "lvd142m", DINO_518, "Apache-2.0", _DINO2),
    _timm("vit_base_patch14_dinov2", "lvd142m", DINO_518, "Apache-2.0", _DINO2),
    _timm("vit_large_patch14_dinov2", "lvd142m", DINO_518, "Apache-2.0", _DINO2),
    _timm("vit_giant_patch14_dinov2", "lvd142m", DINO_518, "Apache-2.0", _DINO2),
    _timm("vit_small_patch14_reg4_dinov2", "lvd142m", DINO_518, "Apache-2.0", _DINO2_REG),
    _timm("vit_base_patch14_reg4_dinov2", "lvd142m", DINO_518, "Apache-2.0", _DINO2_REG),
    _timm("vit_large_patch14_reg4_dinov2", "lvd142m", DINO_518, "Apache-2.0", _DINO2_REG),
    _timm("vit_giant_patch14_reg4_dinov2", "lvd142m", DINO_518, "Apache-2.0", _DINO2_REG),
    _timm("vit_small_patch16_dinov3", "lvd1689m", DINO_256, "see the page", _DINO3),
    _timm("vit_small_plus_patch16_dinov3", "lvd1689m", DINO_256, "see the page", _DINO3),
    _timm("vit_base_patch16_dinov3", "lvd1689m", DINO_256, "see the page", _DINO3),
    _timm("vit_large_patch16_dinov3", "lvd1689m", DINO_256, "see the page", _DINO3),
    _timm("vit_huge_plus_patch16_dinov3", "lvd1689m", DINO_256, "see the page", _DINO3),
    _timm("vit_7b_patch16_dinov3", "lvd1689m", DINO_256, "see the page", _DINO3),
    _hub("facebook/dinov3-vits16-pretrain-lvd1689m", DINO3, "see the page", _DINO3),
    _hub("facebook/dinov3-vits16plus-pretrain-lvd1689m", DINO3, "see the page", _DINO3),
    _hub("facebook/dinov3-vitb16-pretrain-lvd1689m", DINO3, "see the page", _DINO3),
    _hub("facebook/dinov3-vitl16-pretrain-lvd1689m", DINO3, "see the page", _DINO3),
    _hub("facebook/dinov3-vith16plus-pretrain-lvd1689m", DINO3, "see the page", _DINO3),
    _hub("facebook/dinov3-vit7b16-pretrain-lvd1689m", DINO3, "see the page", _DINO3),
    _timm("beit_base_patch16_224", "in22k_ft_in22k_in1k", INCEPTION_CROP_90, "Apache-2.0", _BEIT),
    _timm("beit_large_patch16_224", "in22k_ft_in22k_in1k", INCEPTION_CROP_90, "Apache-2.0", _BEIT),
    _timm("beitv2_base_patch16_224", "in1k_ft_in22k_in1k", IMAGENET_CROP_90, "Apache-2.0", "BEiT v2"),
    _timm("beitv2_large_patch16_224", "in1k_ft_in22k_in1k", IMAGENET_CROP_95, "Apache-2.0", "BEiT v2"),
    _hub("microsoft/beit-base-patch16-224", INCEPTION_SQUASH, "Apache-2.0", _BEIT),
    _hub("microsoft/beit-large-patch16-224", INCEPTION_SQUASH, "Apache-2.0", _BEIT),
    _timm("eva02_tiny_patch14_336", "mim_in22k_ft_in1k", CLIP.for_size((336, 336)), "MIT", "EVA-02"),
    _timm("eva02_small_patch14_336", "mim_in22k_ft_in1k", CLIP.for_size((336, 336)), "MIT", "EVA-02"),
    _timm("eva02_base_patch14_448", "mim_in22k_ft_in22k_in1k", CLIP_SQUASH.for_size((448, 448)), "MIT", "EVA-02"),
    _timm("eva02_large_patch14_448", "mim_m38m_ft_in22k_in1k", CLIP_SQUASH.for_size((448, 448)), "MIT", "EVA-02"),
    _timm("vit_small_patch16_rope_224", "naver_in1k", IMAGENET_CROP_90, "Apache-2.0", _ROPE),
    _timm("vit_base_patch16_rope_224", "naver_in1k", IMAGENET_CROP_90, "Apache-2.0", _ROPE),
    _timm("vit_small_patch16_rope_mixed_224", "naver_in1k", IMAGENET_CROP_90, "Apache-2.0", _ROPE),
    _timm("vit_base_patch16_rope_mixed_224", "naver_in1k", IMAGENET_CROP_90, "Apache-2.0", _ROPE),
    _timm("vit_tiny_r_s16_p8_224", "augreg_in21k_ft_in1k", INCEPTION_CROP_90, "Apache-2.0", _HYBRID),
    _timm("vit_small_r26_s32_224", "augreg_in21k_ft_in1k", INCEPTION_CROP_90, "Apache-2.0", _HYBRID),
    _timm("vit_large_r50_s32_224", "augreg_in21k_ft_in1k", INCEPTION_CROP_90, "Apache-2.0", _HYBRID),
    _timm("vit_base_patch32_clip_224", "openai", CLIP_90, "Apache-2.0", _OPENAI, mlp="quick_gelu", norm_eps=1e-5),
    _timm("vit_base_patch16_clip_224", "openai", CLIP_90, "Apache-2.0", _OPENAI, mlp="quick_gelu", norm_eps=1e-5),
    _timm("vit_large_patch14_clip_224", "openai", CLIP, "Apache-2.0", _OPENAI, mlp="quick_gelu", norm_eps=1e-5),
    _timm("vit_base_patch16_clip_224", "laion2b", CLIP, "Apache-2.0", "CLIP image tower, LAION-2B", norm_eps=1e-5),
    _timm("vit_base_patch16_siglip_224", "webli", INCEPTION_CROP_90, "Apache-2.0", _SIGLIP),
    _hub("google/siglip-base-patch16-224", INCEPTION_SQUASH_BICUBIC, "Apache-2.0", _SIGLIP),
    _hub("google/siglip-so400m-patch14-384", INCEPTION_SQUASH_BICUBIC.for_size((384, 384)), "Apache-2.0", _SIGLIP),
    _hub("google/siglip2-base-patch16-224", INCEPTION_SQUASH, "Apache-2.0", "SigLIP 2 image tower"),
    _hub("microsoft/swin-tiny-patch4-window7-224", IMAGENET_SQUASH, "Apache-2.0", _SWIN),
    _hub("microsoft/swin-small-patch4-window7-224", IMAGENET_SQUASH, "Apache-2.0", _SWIN),
    _hub("microsoft/swin-base-patch4-window7-224", IMAGENET_SQUASH, "Apache-2.0", _SWIN),
    _hub("microsoft/swin-base-patch4-window7-224-in22k", IMAGENET_SQUASH, "Apache-2.0", "Swin, ImageNet-22k"),
    _hub("microsoft/swin-base-patch4-window12-384", IMAGENET_SQUASH.for_size((384, 384)), "Apache-2.0", _SWIN),
    _hub("microsoft/swin-large-patch4-window7-224", IMAGENET_SQUASH, "Apache-2.0", _SWIN_22K),
    _hub("facebook/convnext-tiny-224", IMAGENET_FLOOR, "Apache-2.0", _CONVNEXT),
    _hub("facebook/convnext-small-224", IMAGENET_FLOOR, "Apache-2.0", _CONVNEXT),
    _hub("facebook/convnext-base-224", IMAGENET_FLOOR, "Apache-2.0", _CONVNEXT),
    _hub("facebook/convnext-large-224", IMAGENET_FLOOR, "Apache-2.0", _CONVNEXT),
    _hub("facebook/convnextv2-tiny-1k-224", IMAGENET_FLOOR, "Apache-2.0", _CONVNEXT2),
    _hub("facebook/convnextv2-base-1k-224", IMAGENET_FLOOR, "Apache-2.0", _CONVNEXT2),
    _timm("swin_tiny_patch4_window7_224", "ms_in1k", IMAGENET_CROP_90, "MIT", _SWIN),
    _timm("swin_small_patch4_window7_224", "ms_in1k", IMAGENET_CROP_90, "MIT", _SWIN),
    _timm("swin_base_patch4_window7_224", "ms_in1k", IMAGENET_CROP_90, "MIT", _SWIN),
    _timm("swin_tiny_patch4_window7_224", "ms_in22k_ft_in1k", IMAGENET_CROP_90, "MIT", _SWIN_22K),
    _timm("swin_small_patch4_window7_224", "ms_in22k_ft_in1k", IMAGENET_CROP_90, "MIT", _SWIN_22K),
    _timm("swin_base_patch4_window7_224", "ms_in22k_ft_in1k", IMAGENET_CROP_90, "MIT", _SWIN_22K),
    _timm(
        "swin_base_patch4_window12_384",
        "ms_in22k_ft_in1k",
        PreprocessConfig(image_size=(384, 384)),
        "MIT",
        _SWIN_22K,
    ),
    _timm("convnext_tiny", "fb_in1k", IMAGENET, "Apache-2.0", _CONVNEXT),
    _timm("convnext_small", "fb_in1k", IMAGENET, "Apache-2.0", _CONVNEXT),
    _timm("convnext_base", "fb_in1k", IMAGENET, "Apache-2.0", _CONVNEXT),
    _timm("convnext_tiny", "fb_in22k_ft_in1k", IMAGENET, "Apache-2.0", _CONVNEXT_22K),
    _timm("convnext_small", "fb_in22k_ft_in1k", IMAGENET, "Apache-2.0", _CONVNEXT_22K),
    _timm("convnext_base", "fb_in22k_ft_in1k", IMAGENET, "Apache-2.0", _CONVNEXT_22K),
    _timm("convnext_tiny", "in12k_ft_in1k", IMAGENET_CROP_95, "Apache-2.0", "ConvNeXt, ImageNet-12k, then 1k"),
    _timm("convnextv2_tiny", "fcmae_ft_in1k", IMAGENET, "CC-BY-NC-4.0", _CONVNEXT2),
    _timm("convnextv2_base", "fcmae_ft_in1k", IMAGENET, "CC-BY-NC-4.0", _CONVNEXT2),
)

CATALOGUE: dict[str, Entry] = {entry.name: entry for entry in ENTRIES}


def find_by_hub(hub: str) -> Entry | None:
    """The row of a repository on the hub, if it has one."""
    return next((entry for entry in ENTRIES if entry.hub.lower() == hub.lower()), None)
