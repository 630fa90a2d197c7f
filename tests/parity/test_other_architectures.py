"""Architectures that are often met and are not ours: one line that names them, whatever came with the tensors."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import oracles
from patchlight.errors import PatchlightError
from patchlight.weights.load import load

TIMM = {
    "xcit_nano_12_p16_224": "XCiT",
    "maxvit_rmlp_pico_rw_256": "MaxViT or CoAtNet",
    "coatnet_nano_rw_224": "MaxViT or CoAtNet",
    "pvt_v2_b0": "PVT",
    "mobilevit_xxs": "MobileViT",
    "mobilevitv2_050": "MobileViT",
    "efficientformer_l1": "EfficientFormer",
    "efficientformerv2_s0": "EfficientFormer",
    "hiera_tiny_224": "Hiera",
    "cait_xxs24_224": "CaiT",
    "convit_tiny": "ConViT",
    "levit_128s": "LeViT",
    "crossvit_tiny_240": "CrossViT",
    "tnt_s_patch16_224": "TNT",
    "twins_svt_small": "Twins",
    "pit_ti_224": "PiT",
    "davit_tiny": "DaViT",
    "edgenext_xx_small": "EdgeNeXt",
    "mvitv2_tiny": "MViT",
    "tiny_vit_5m_224": "TinyViT",
    "efficientvit_b0": "EfficientViT",
    "fastvit_t8": "FastViT",
    "swinv2_cr_tiny_ns_224": "Swin V2-CR",
    "vit_dwee_patch16_reg1_gap_256": "a ViT with differential attention",
    "vit_pwee_patch16_reg1_gap_256": "a ViT with parallel branches",
    "vit_small_patch16_18x2_224": "a ViT with parallel branches",
    "vit_small_resnet26d_224": "a hybrid on a ResNet of another kind",
    "mixer_s32_224": "MLP-Mixer",
    "resnet18": "ResNet",
    "efficientnet_b0": "EfficientNet or MobileNet",
}


@pytest.mark.parametrize("name", TIMM)
def test_by_timms_tensors_alone_or_by_its_config(name: str, tmp_path: Path) -> None:
    timm = oracles.timm()
    with torch.device("meta"):
        made = timm.create_model(name)
    state = {key: torch.zeros(value.shape, dtype=torch.float16) for key, value in made.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(PatchlightError) as bare:
        load(tmp_path / "model.safetensors")
    remedy = "which is not supported; ViT, Swin and ConvNeXt are"
    assert str(bare.value) == f"{tmp_path / 'model.safetensors'}: it is {TIMM[name]}, {remedy}"
    (tmp_path / "config.json").write_text(json.dumps({"architecture": name}))
    with pytest.raises(PatchlightError) as named:
        load(tmp_path)
    assert str(named.value) == f"{tmp_path}: it is {TIMM[name]} (config.json says {name!r}), {remedy}"


@pytest.mark.parametrize(
    ("kind", "settings", "name"),
    [
        ("Hiera", {"embed_dim": 8, "depths": [1, 1, 1, 1]}, "Hiera"),
        ("PvtV2", {"hidden_sizes": [8, 16, 20, 32], "depths": [1, 1, 1, 1]}, "PVT"),
        ("MobileViT", {"neck_hidden_sizes": [8] * 7, "hidden_sizes": [16, 16, 16]}, "MobileViT"),
        ("Segformer", {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}, "SegFormer"),
        ("Yolos", {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}, "YOLOS"),
        ("BlipVision", {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}, "BLIP"),
        ("Blip2Vision", {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}, "BLIP"),
        ("OwlViTVision", {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}, "OWL-ViT"),
        ("MLCDVision", {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}, "MLCD"),
        ("Timesformer", {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}, "TimeSformer"),
        ("XCLIPVision", {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}, "X-CLIP"),
    ],
)
def test_by_what_transformers_writes(kind: str, settings: dict[str, object], name: str, tmp_path: Path) -> None:
    transformers = oracles.transformers()
    classified = getattr(transformers, f"{kind}ForImageClassification", None)
    made = (classified or getattr(transformers, f"{kind}Model"))(getattr(transformers, f"{kind}Config")(**settings))
    made.save_pretrained(tmp_path)
    for source in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(PatchlightError, match=f": it is {name}.*, which is not supported"):
            load(source)
    (tmp_path / "config.json").unlink()
    with pytest.raises(PatchlightError, match=f": it is {name}, which is not supported"):
        load(tmp_path)


def test_one_that_nobody_thought_of_is_named_by_its_config(tmp_path: Path) -> None:
    save_file({"some.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "nextvit_small"}))
    with pytest.raises(
        PatchlightError, match=r"no ViT, Swin or ConvNeXt that we know is in it.*; config\.json says 'nextvit_small'$"
    ):
        load(tmp_path)
