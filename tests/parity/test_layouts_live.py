"""What `save` writes in timm's and transformers' layouts, read by those libraries and run beside the original."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import oracles
from models_at_random import tiny_vit
from patchlight.config import PreprocessConfig, ViTConfig
from patchlight.errors import PatchlightError
from patchlight.models.vit import ViT
from patchlight.weights.load import load
from patchlight.weights.save import save

OBLONG = {"image_size": (24, 40)}
MEAN = {"class_token": False, "pooling": "mean"}
EVA02 = {"position": "rope2d", "add_learned_table": True, "rope_grid": (16, 16), "rope_base": 1e4, "mlp": "swiglu"}
DINOV3 = {"position": "rope2d", "rope_coordinates": "centred", "num_registers": 4, "layer_scale": 1e-5}

FOR_TIMM: dict[str, dict[str, Any]] = {
    "plain": {},
    "oblong": OBLONG,
    "an MLP whose ratio is no short number": {"mlp_dim": 49, "width": 28, "num_heads": 7},
    "registers, scales": {"num_registers": 2, "layer_scale": 0.1, "qk_norm": True, "mlp": "quick_gelu"},
    "DINOv2 with registers": {"num_registers": 2, "layer_scale": 0.1, "prefix_positions": "class", **OBLONG},
    "DINOv2 giant": {"layer_scale": 0.1, "mlp": "swiglu", "mlp_dim": 56, "patch_size": (8, 4)},
    "mean": MEAN | {"final_norm": "pooled", "prefix_positions": "none"},
    "CLIP": {"embed_norm": True, "patch_bias": False, "norm_eps": 1e-5, "in_channels": 1},
    "a norm with another eps": {"norm_eps": 1e-5},
    "no head": {"num_classes": 0},
    "no patch bias": {"patch_bias": False},
    "no positions": {"position": "none", **OBLONG},
    "sines and cosines": {"position": "sincos2d", **OBLONG},
    "inner norms": {"inner_norm": "both"},
    "inner norm": {"inner_norm": "mlp", "mlp": "swiglu"},
    "SigLIP": {"class_token": False, "pooling": "attention", "mlp": "gelu_tanh", **OBLONG},
    "SigLIP with a class token": {"pooling": "attention"},
    "DeiT, distilled": {"distill_token": True, **OBLONG},
    "DeiT III": {"layer_scale": 1e-5, "prefix_positions": "none"},
    "post-norm": {"block_norm": "after", **MEAN, "qkv_bias": False},
    "R26": {"resnet": (2, 2, 2, 2), "patch_size": 32, "image_size": (64, 96)},
    "R50, S16": {"resnet": (3, 4, 9), "patch_size": (16, 32), "image_size": (32, 64), "in_channels": 1},
    "R, S16, P8": {"resnet": (), "patch_size": 8, "image_size": (24, 40)},
    "BEiT": {"position": "relative_bias", "pooling": "mean", "final_norm": "pooled", "layer_scale": 0.1},
    "relative bias": {"position": "relative_bias", **OBLONG},
    "relative MLP": {"position": "relative_mlp", "relative_hidden": 20, **MEAN, **OBLONG, "qk_norm": True},
    "relative MLP, post-norm": {"position": "relative_mlp", "block_norm": "after", **MEAN},
    "relative MLP, class token": {"position": "relative_mlp", "final_norm": "pooled", "pooling": "mean"},
    "RoPE": {"position": "rope2d", "layer_scale": 1e-5, **OBLONG, "patch_size": (8, 4)},
    "RoPE, query and key norms, registers": {"position": "rope2d", "qk_norm": True, "num_registers": 2, **OBLONG},
    "RoPE, mixed": {"position": "rope_mixed", "layer_scale": 1e-5, "rope_base": 10.0, **OBLONG},
    "RoPE, mixed, table": {"position": "rope_mixed", "add_learned_table": True, "prefix_positions": "none", **OBLONG},
    "RoPE, table for prefix tokens": {"position": "rope2d", "add_learned_table": True, "num_registers": 1, **OBLONG},
    "RoPE, no class token": {"position": "rope2d", **MEAN, "num_registers": 1, "rope_grid": (16, 16), **OBLONG},
    "RoPE, post-norm": {"position": "rope2d", "block_norm": "after", **OBLONG},
    "RoPE, attention pooling": {"position": "rope2d", "pooling": "attention", **OBLONG},
    "RoPE, embedding norm": {"position": "rope2d", "embed_norm": True, "patch_bias": False, **OBLONG},
    "EVA-02, tiny": EVA02 | OBLONG | {"pooling": "mean", "final_norm": "pooled"},
    "EVA-02, base": EVA02 | OBLONG | {"inner_norm": "mlp", "pooling": "mean", "final_norm": "pooled", "mlp_dim": 65},
    "EVA-02, CLIP": EVA02 | OBLONG | {"inner_norm": "both"},
    "EVA with an inner norm and no gate": {"position": "rope2d", "inner_norm": "mlp"},
    "DINOv3": DINOV3 | OBLONG | {"norm_eps": 1e-5, "qkv_bias": False, "pooling": "mean"},
    "DINOv3, gated": DINOV3 | {"norm_eps": 1e-5, "mlp": "swiglu", "num_classes": 0},
    "DINOv3, another eps": DINOV3 | OBLONG,
}


def picture(model: ViT, size: tuple[int, int] | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(2, model.config.in_channels, *(size or model.config.image_size), generator=generator)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """To float32's last digits: an eps of 1e-6 in place of 1e-5 would show."""
    torch.testing.assert_close(ours, theirs, atol=2e-6 * max(1.0, theirs.abs().max().item()), rtol=2e-6)


def norms_eps(module: torch.nn.Module) -> set[float]:
    return {part.eps for part in module.modules() if isinstance(part, torch.nn.LayerNorm)}


@pytest.mark.parametrize("name", FOR_TIMM)
@torch.no_grad()
def test_timm_reads_it(name: str, tmp_path: Path) -> None:
    timm = oracles.timm()
    model = tiny_vit(**FOR_TIMM[name])
    save(model, tmp_path / "m", layout="timm")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'm'}", pretrained=True).eval()  # which refuses other names
    image = picture(model)
    close(theirs(image), model(image))
    if not model.config.distill_token:
        close(theirs.forward_features(image), model.tokens(image))
    assert norms_eps(theirs) == norms_eps(model)
    again = load(tmp_path / "m")
    close(again.model(image), model(image))
    close(again.model.tokens(image), model.tokens(image))


@pytest.mark.parametrize("name", FOR_TIMM)
@torch.no_grad()
def test_we_read_it_as_timms_own(name: str, tmp_path: Path) -> None:
    """Without our part of config.json: as if timm had written it with these arguments."""
    model = tiny_vit(**FOR_TIMM[name])
    save(model, tmp_path / "m", layout="timm")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    written = config.pop("patchlight")["model"]
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    loaded = load(tmp_path / "m", preprocess=PreprocessConfig(image_size=model.config.image_size))
    irrelevant: dict[str, Any] = {"layer_scale": loaded.config.layer_scale}
    if loaded.config.position == "rope_mixed":  # where it was what the frequencies started from
        irrelevant["rope_base"] = loaded.config.rope_base
    if not loaded.config.num_prefix:
        irrelevant["prefix_positions"] = loaded.config.prefix_positions
    assert loaded.config == dataclasses.replace(ViTConfig.from_dict(written), **irrelevant)
    close(loaded.model(picture(model)), model(picture(model)))


SIGLIP = {"class_token": False, "pooling": "attention", "num_classes": 0, "mlp": "gelu_tanh"}

FOR_TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": ("ViTForImageClassification", {"mlp": "gelu_tanh", "norm_eps": 1e-5, **OBLONG}),
    "ViT, no head": ("ViTModel", {"num_classes": 0, "qkv_bias": False}),
    "ViT, no row for its class token": ("ViTForImageClassification", {"prefix_positions": "none"}),
    "ViT, sines and cosines": ("ViTForImageClassification", {"position": "sincos2d"}),
    "I-JEPA": ("IJepaForImageClassification", MEAN | OBLONG),
    "I-JEPA, no head": ("IJepaModel", MEAN | {"num_classes": 0}),
    "DeiT, distilled": ("DeiTForImageClassificationWithTeacher", {"distill_token": True, **OBLONG}),
    "DeiT, distilled, no head": ("DeiTModel", {"distill_token": True, "num_classes": 0}),
    "DINOv2": ("Dinov2Model", {"layer_scale": 0.1, "num_classes": 0}),
    "DINOv2, its classifier": ("Dinov2ForImageClassification", {"layer_scale": 0.1, "pooling": "cls_mean"}),
    "DINOv2, another classifier": ("Dinov2ForImageClassification", {"layer_scale": 0.1}),
    "DINOv2, giant": ("Dinov2Model", {"layer_scale": 0.1, "num_classes": 0, "mlp": "swiglu", "mlp_dim": 64}),
    "DINOv2 without scales": ("Dinov2ForImageClassification", {"pooling": "cls_mean", "prefix_positions": "none"}),
    "DINOv2 with registers": (
        "Dinov2WithRegistersForImageClassification",
        {"num_registers": 3, "layer_scale": 0.1, "prefix_positions": "class", "pooling": "cls_mean"},
    ),
    "registers with rows": ("Dinov2WithRegistersModel", {"num_registers": 3, "num_classes": 0, "mlp_dim": 48}),
    "DINOv3": ("DINOv3ViTModel", DINOV3 | OBLONG | {"num_classes": 0, "norm_eps": 1e-5}),
    "DINOv3, gated": (
        "DINOv3ViTModel",
        DINOV3 | {"num_classes": 0, "mlp": "swiglu", "num_registers": 0, "layer_scale": None, "qkv_bias": False},
    ),
    "BEiT": (
        "BeitForImageClassification",
        {"position": "relative_bias", "pooling": "mean", "final_norm": "pooled", "layer_scale": 0.1},
    ),
    "BEiT, no scales, no head": ("BeitModel", {"position": "relative_bias", "num_classes": 0, "qkv_bias": False}),
    "CLIP": ("CLIPVisionModel", {"embed_norm": True, "patch_bias": False, "num_classes": 0, "mlp": "quick_gelu"}),
    "SigLIP": ("SiglipVisionModel", SIGLIP),
}


@pytest.mark.parametrize("name", FOR_TRANSFORMERS)
@torch.no_grad()
def test_transformers_reads_it(name: str, tmp_path: Path) -> None:
    transformers = oracles.transformers()
    kind, changes = FOR_TRANSFORMERS[name]
    model = tiny_vit(**changes)
    save(model, tmp_path / "m", layout="transformers")
    theirs, told = getattr(transformers, kind).from_pretrained(tmp_path / "m", output_loading_info=True)
    fresh = {key for key in told["missing_keys"] if "pooler.dense" not in key}  # which no head reads
    assert not fresh
    assert not told["unexpected_keys"]
    assert not told["mismatched_keys"]
    image = picture(model)
    answer = theirs.eval()(image)
    if model.config.num_classes:
        close(answer.logits, model(image))
    elif kind == "ViTModel" or kind in ("IJepaModel", "DeiTModel", "Dinov2Model", "Dinov2WithRegistersModel"):
        close(answer.last_hidden_state, model.tokens(image))
    else:
        close(answer.pooler_output, model(image))
    automatic = transformers.AutoModelForImageClassification if model.config.num_classes else transformers.AutoModel
    assert isinstance(automatic.from_pretrained(tmp_path / "m"), type(theirs))
    again = load(tmp_path / "m")
    close(again.model(image), model(image))


@pytest.mark.parametrize("name", FOR_TRANSFORMERS)
@torch.no_grad()
def test_we_read_it_as_transformers_own(name: str, tmp_path: Path) -> None:
    """Without our part of config.json."""
    model = tiny_vit(**FOR_TRANSFORMERS[name][1])
    save(model, tmp_path / "m", layout="transformers")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    del config["patchlight"]
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    loaded = load(tmp_path / "m")
    close(loaded.model(picture(model)), model(picture(model)))
    assert loaded.config.norm_eps == model.config.norm_eps


@torch.no_grad()
def test_a_clip_projection_is_written_for_transformers(tmp_path: Path) -> None:
    transformers = oracles.transformers()
    model = tiny_vit(embed_norm=True, patch_bias=False, num_classes=7)
    with pytest.raises(PatchlightError, match="a head of 7 classes with embed_norm=True cannot be written"):
        save(model, tmp_path / "m", layout="transformers")
    assert model.head is not None
    model.head.out.bias.zero_()
    save(model, tmp_path / "m", layout="transformers")
    theirs = transformers.CLIPVisionModelWithProjection.from_pretrained(tmp_path / "m").eval()
    close(theirs(picture(model)).image_embeds, model(picture(model)))
    close(load(tmp_path / "m").model(picture(model)), model(picture(model)))


@torch.no_grad()
def test_a_model_of_other_patches_is_written_for_timm(tmp_path: Path) -> None:
    """As FlexiViT: loaded with other patches, saved, and the same in timm."""
    timm = oracles.timm()
    model = load(save(tiny_vit(), tmp_path / "own"), patch_size=16, image_size=(48, 64)).model
    save(model, tmp_path / "m", layout="timm")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'm'}", pretrained=True).eval()
    close(theirs(picture(model)), model(picture(model)))


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("timm", {"norm_eps": 1e-3}, "norm_eps=0.001 cannot be written with layout='timm', which has no such"),
        ("timm", {"resnet": (1,), "patch_size": 8}, r"resnet=\(1,\) cannot be written with layout='timm'"),
        ("timm", {"block_norm": "after", "mlp": "swiglu"}, "block_norm='after' with mlp='swiglu' cannot be written"),
        ("timm", {"block_norm": "after", "layer_scale": 0.1}, "layer_scale=0.1 with block_norm='after' cannot be"),
        ("timm", {"stem": "convolutions"}, "stem='convolutions' cannot be written with layout='timm', whose model has"),
        ("timm", {"head_hidden": 7}, "head_hidden=7 cannot be written"),
        ("timm", {"pooling": "cls_mean"}, "pooling='cls_mean' cannot be written"),
        ("timm", {"embed_norm": True}, "patch_bias=True cannot be written"),
        ("timm", {"distill_token": True, "num_classes": 0}, "num_classes=0 with distill_token=True cannot be written"),
        ("timm", {"distill_token": True, "num_registers": 1}, "num_registers=1 with distill_token=True cannot"),
        ("timm", {"position": "rope2d", "mlp": "gelu_tanh"}, "mlp='gelu_tanh' with position='rope2d' cannot"),
        ("timm", {"position": "relative_bias", "mlp": "swiglu"}, "mlp='swiglu' with position='relative_bias' cannot"),
        ("timm", {"position": "relative_bias", "norm_eps": 1e-12}, "norm_eps=1e-12 with position='relative_bias'"),
        ("timm", {"pooling": "attention", "mlp": "swiglu"}, "mlp='swiglu' with pooling='attention' cannot be"),
        ("timm", {"pooling": "attention", "inner_norm": "mlp"}, "inner_norm='mlp' with pooling='attention' cannot be"),
        ("transformers", {"inner_norm": "mlp"}, "inner_norm='mlp' with vit cannot be written"),
        ("transformers", {"position": "rope2d"}, "rope_coordinates='index' with position='rope2d' cannot"),
        ("transformers", {"position": "rope_mixed"}, "position='rope_mixed' with position='rope_mixed' cannot"),
        ("transformers", {"pooling": "cls_mean", "num_classes": 0}, "pooling='cls_mean' with dinov2 cannot be written"),
        ("transformers", {"position": "none"}, "position='none' with vit cannot be written"),
        ("transformers", DINOV3, "num_classes=5 with position='rope2d' cannot be written"),
        (
            "transformers",
            {"layer_scale": 0.1, "mlp_dim": 50},
            "mlp_dim=50 cannot be written with layout='transformers'",
        ),
        ("transformers", {"layer_scale": 0.1, **OBLONG}, r"image_size=\(24, 40\) with dinov2 cannot be written"),
        ("transformers", SIGLIP | {"num_classes": 3}, "num_classes=3 with pooling='attention' cannot be written"),
        ("transformers", {"position": "relative_mlp"}, "position='relative_mlp' with vit cannot be written"),
    ],
)
def test_what_another_library_does_not_have_raises(
    layout: Any, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(PatchlightError, match=message) as caught:
        save(tiny_vit(**changes), tmp_path / "m", layout=layout)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "m").exists()
