"""One checkpoint of every origin, written by that origin's own code or read by timm's own converters, not by ours."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import oracles
from models_at_random import randomize, tiny_vit
from patchlight.weights.load import load
from patchlight.weights.read import CheckpointError

TINY = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 32, "patch_size": 8}


def image(height: int = 32, width: int = 32) -> torch.Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1))


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=2e-5 * max(1.0, theirs.abs().max().item()), rtol=1e-4)


@torch.no_grad()
def test_beit_in_the_naming_of_transformers_4(tmp_path: Path) -> None:
    made = tiny_vit(
        position="relative_bias", pooling="mean", final_norm="pooled", layer_scale=0.1, norm_eps=1e-12, depth=1
    )
    block = made.blocks[0]
    q, k, v = block.attn.qkv.weight.chunk(3)
    block.attn.qkv.bias[24:48] = 0  # keys have no bias
    q_bias, _, v_bias = block.attn.qkv.bias.chunk(3)
    attention, inside = (
        "attention.attention",
        {
            "layernorm_before": block.norm1,
            "layernorm_after": block.norm2,
            "attention.output.dense": block.attn.out,
            "intermediate.dense": block.mlp.up,
            "output.dense": block.mlp.down,
        },
    )
    layer = {f"{name}.{part}": getattr(module, part) for name, module in inside.items() for part in ("weight", "bias")}
    layer |= {"lambda_1": block.residual1.scale, "lambda_2": block.residual2.scale}
    layer |= {f"{attention}.query.weight": q, f"{attention}.key.weight": k, f"{attention}.value.weight": v}
    layer |= {f"{attention}.query.bias": q_bias, f"{attention}.value.bias": v_bias}
    bias = f"{attention}.relative_position_bias"
    layer[f"{bias}.relative_position_bias_table"] = block.attn.relative_bias.table
    layer[f"{bias}.relative_position_index"] = torch.zeros(17, 17, dtype=torch.int64)
    state = {f"beit.encoder.layer.0.{key}": value for key, value in layer.items()}
    state |= {
        "beit.embeddings.cls_token": made.class_token[None],
        "beit.embeddings.patch_embeddings.projection.weight": made.patch_embed.proj.weight,
        "beit.embeddings.patch_embeddings.projection.bias": made.patch_embed.proj.bias,
        "beit.pooler.layernorm.weight": made.norm.weight,
        "beit.pooler.layernorm.bias": made.norm.bias,
        "classifier.weight": made.head.out.weight,
        "classifier.bias": made.head.out.bias,
    }
    save_file({key: value.detach().clone().contiguous() for key, value in state.items()}, tmp_path / "x.safetensors")
    close(load(tmp_path / "x.safetensors").model(image()), made(image()))


@torch.no_grad()
def test_siglip_with_its_text_tower(tmp_path: Path) -> None:
    transformers = oracles.transformers()
    text = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 3, "vocab_size": 50}
    made = transformers.SiglipModel(transformers.SiglipConfig(text_config=text, vision_config=TINY)).eval()
    randomize(made)
    made.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    close(loaded.model(image()), made.vision_model(image()).pooler_output)
    assert any("beside the encoder" in note for note in loaded.notes)


@torch.no_grad()
def test_siglip_in_jax(tmp_path: Path) -> None:
    """big_vision's names, read by timm's loader and by ours."""
    made = timm_vit(num_classes=0, depth=1, class_token=False, global_pool="map")
    rng, width = np.random.default_rng(0), 48
    block = {
        "MlpBlock_0/Dense_0/kernel": (width, 4 * width),
        "MlpBlock_0/Dense_0/bias": (4 * width,),
        "MlpBlock_0/Dense_1/kernel": (4 * width, width),
        "MlpBlock_0/Dense_1/bias": (width,),
        "LayerNorm_0/scale": (width,),
        "LayerNorm_0/bias": (width,),
        "MultiHeadDotProductAttention_0/out/kernel": (3, 16, width),
        "MultiHeadDotProductAttention_0/out/bias": (width,),
    }
    for part in ("query", "key", "value"):
        block |= {f"MultiHeadDotProductAttention_0/{part}/kernel": (width, 3, 16)}
        block |= {f"MultiHeadDotProductAttention_0/{part}/bias": (3, 16)}
    shapes = {
        "embedding/kernel": (8, 8, 3, width),
        "embedding/bias": (width,),
        "pos_embedding": (1, 16, width),
        "Transformer/encoder_norm/scale": (width,),
        "Transformer/encoder_norm/bias": (width,),
        "Transformer/encoderblock_0/LayerNorm_1/scale": (width,),
        "Transformer/encoderblock_0/LayerNorm_1/bias": (width,),
        "MAPHead_0/probe": (1, 1, width),
        **{f"Transformer/encoderblock_0/{key}": shape for key, shape in block.items()},
        **{f"MAPHead_0/{key}": shape for key, shape in block.items()},
    }
    arrays = {f"params/img/{key}": rng.normal(size=shape).astype(np.float32) * 0.2 for key, shape in shapes.items()}
    np.savez(tmp_path / "siglip.npz", **arrays)
    made.load_pretrained(str(tmp_path / "siglip.npz"))
    loaded = load(tmp_path / "siglip.npz", mlp="gelu")
    assert loaded.config.pooling == "attention"
    close(loaded.model(image()), made(image()))


@torch.no_grad()
def test_transformers_4_naming(tmp_path: Path) -> None:
    """The names that most files on the hub have."""
    made = tiny_vit()
    renamed = {}
    for key, value in made.state_dict().items():
        if ".attn.qkv." in key:
            block, kind = key.split(".")[1], key.split(".")[-1]
            for part, piece in zip(("query", "key", "value"), value.chunk(3), strict=True):
                renamed[f"vit.encoder.layer.{block}.attention.attention.{part}.{kind}"] = piece.contiguous()
            continue
        for ours, theirs in (
            ("head.out.", "classifier."),
            ("class_token", "vit.embeddings.cls_token"),
            ("positions.table", "vit.embeddings.position_embeddings"),
            ("patch_embed.proj.", "vit.embeddings.patch_embeddings.projection."),
            (".attn.out.", ".attention.output.dense."),
            (".mlp.up.", ".intermediate.dense."),
            (".mlp.down.", ".output.dense."),
            (".norm1.", ".layernorm_before."),
            (".norm2.", ".layernorm_after."),
            ("blocks.", "vit.encoder.layer."),
        ):
            key = key.replace(ours, theirs)
        key = key.replace("norm.", "vit.layernorm.") if key.startswith("norm.") else key
        renamed[key] = value[None] if key.endswith(("cls_token", "position_embeddings")) else value
    renamed["vit.pooler.dense.weight"] = torch.zeros(24, 24)
    save_file(renamed, tmp_path / "x.safetensors")
    loaded = load(tmp_path / "x.safetensors", num_heads=2, norm_eps=1e-6)
    assert torch.equal(loaded.model(image()), made(image()))
    assert any("pooler" in note for note in loaded.notes)


@torch.no_grad()
def test_torchvision(tmp_path: Path) -> None:
    oracles.timm()  # makes torchvision importable
    from torchvision.models.vision_transformer import VisionTransformer

    made = VisionTransformer(
        image_size=32,
        patch_size=8,
        num_layers=2,
        num_heads=3,
        hidden_dim=48,
        mlp_dim=96,
        num_classes=7,
        representation_size=20,
    ).eval()
    randomize(made)
    torch.save(made.state_dict(), tmp_path / "vit.pth")
    close(load(tmp_path / "vit.pth", num_heads=3).model(image()), made(image()))


def timm_vit(**changes: Any) -> torch.nn.Module:
    settings = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 4, "num_heads": 3, "num_classes": 0}
    made = oracles.timm().create_model(changes.pop("name", "vit_tiny_patch16_224"), **settings | changes).eval()
    randomize(made)
    return made


@torch.no_grad()
def test_dino_v1_takes_the_teacher_and_drops_the_projection_head(tmp_path: Path) -> None:
    teacher, student = timm_vit(), timm_vit()
    randomize(student, seed=5)
    checkpoint: dict[str, Any] = {"epoch": 3, "optimizer": {"state": {0: {"exp_avg": torch.zeros(2)}}}}
    for name, made, wrapper in (("student", student, "module.backbone."), ("teacher", teacher, "backbone.")):
        checkpoint[name] = {wrapper + key: value for key, value in made.state_dict().items()}
        checkpoint[name] |= {wrapper.replace("backbone", "head") + "mlp.0.weight": torch.zeros(4, 48)}
    torch.save(checkpoint, tmp_path / "checkpoint.pth")
    loaded = load(tmp_path / "checkpoint.pth", num_heads=3)
    close(loaded.model.tokens(image()), teacher.forward_features(image()))
    assert "took the encoder below 'teacher.backbone.'" in loaded.notes
    assert any("head.mlp" in note or "beside the encoder" in note for note in loaded.notes)


@pytest.mark.parametrize("registers", [0, 4])
@torch.no_grad()
def test_dinov2_in_chunks(registers: int, tmp_path: Path) -> None:
    """As published: blocks in chunks, a mask token, and positions for the class token but not for registers."""
    generator = torch.Generator().manual_seed(0)
    made = timm_vit(
        name="vit_small_patch14_reg4_dinov2", reg_tokens=registers, mlp_ratio=4, no_embed_class=registers > 0
    )
    state = {key: value.clone() for key, value in made.state_dict().items()}
    chunked = {}
    for key, value in state.items():
        if key.startswith("blocks."):
            block, rest = key.removeprefix("blocks.").split(".", 1)
            key = f"blocks.{int(block) // 2}.{block}.{rest}"
        chunked[key] = value
    chunked["mask_token"] = torch.zeros(1, 48)
    if registers:
        chunked["register_tokens"] = chunked.pop("reg_token")
        row = torch.randn(1, 1, 48, generator=generator)
        chunked["pos_embed"] = torch.cat([row, chunked["pos_embed"]], 1)
        chunked["cls_token"] = chunked["cls_token"] - row
    torch.save(chunked, tmp_path / "dinov2.pth")
    loaded = load(tmp_path / "dinov2.pth", num_heads=3)
    assert loaded.config.prefix_positions == ("class" if registers else "all")
    close(loaded.model.tokens(image()), made.forward_features(image()))


@torch.no_grad()
def test_dinov3_as_published(tmp_path: Path) -> None:
    """The golden of transformers under the original's names: storage tokens, RoPE periods, a masked key bias."""
    golden = load_file(Path(__file__).parent.parent / "golden" / "hf_dinov3.safetensors")
    theirs = {key.removeprefix("weights/"): value for key, value in golden.items() if key.startswith("weights/")}
    state = {
        "cls_token": theirs["embeddings.cls_token"],
        "storage_tokens": theirs["embeddings.register_tokens"],
        "mask_token": torch.zeros(1, 48),
        "rope_embed.periods": torch.zeros(4),
        "patch_embed.proj.weight": theirs["embeddings.patch_embeddings.weight"],
        "patch_embed.proj.bias": theirs["embeddings.patch_embeddings.bias"],
        "norm.weight": theirs["norm.weight"],
        "norm.bias": theirs["norm.bias"],
    }
    for block in range(2):
        inside = {key.removeprefix(f"model.layer.{block}."): v for key, v in theirs.items() if f".{block}." in key}
        q, k, v = (inside[f"attention.{part}_proj.weight"] for part in "qkv")
        q_bias, v_bias = inside["attention.q_proj.bias"], inside["attention.v_proj.bias"]
        state[f"blocks.{block}.attn.qkv.weight"] = torch.cat([q, k, v])
        state[f"blocks.{block}.attn.qkv.bias"] = torch.cat([q_bias, torch.ones(48), v_bias])
        state[f"blocks.{block}.attn.qkv.bias_mask"] = torch.cat([torch.ones(48), torch.zeros(48), torch.ones(48)])
        for ours, name in (("attn.proj", "attention.o_proj"), ("mlp.fc1", "mlp.up_proj"), ("mlp.fc2", "mlp.down_proj")):
            for part in ("weight", "bias"):
                state[f"blocks.{block}.{ours}.{part}"] = inside[f"{name}.{part}"]
        for index in (1, 2):
            state[f"blocks.{block}.ls{index}.gamma"] = inside[f"layer_scale{index}.lambda1"]
            for part in ("weight", "bias"):
                state[f"blocks.{block}.norm{index}.{part}"] = inside[f"norm{index}.{part}"]
    torch.save(state, tmp_path / "dinov3.pth")
    loaded = load(tmp_path / "dinov3.pth")
    assert (loaded.config.num_heads, loaded.why["num_heads"]) == (3, "shapes")
    close(loaded.model.tokens(golden["input"]), golden["features"])


@torch.no_grad()
def test_mae_drops_its_decoder_and_says_so(tmp_path: Path) -> None:
    made = timm_vit()
    state = made.state_dict() | {"mask_token": torch.zeros(1, 1, 8), "decoder_pos_embed": torch.zeros(1, 17, 8)}
    state |= {"decoder_blocks.0.norm1.weight": torch.zeros(8), "decoder_pred.weight": torch.zeros(3, 8)}
    torch.save({"model": state}, tmp_path / "mae.pth")
    loaded = load(tmp_path / "mae.pth", num_heads=3)
    close(loaded.model.tokens(image()), made.forward_features(image()))
    assert any("the decoder of pre-training (3 tensors" in note for note in loaded.notes)


@torch.no_grad()
def test_open_clip_visual_tower(tmp_path: Path) -> None:
    """Random tensors under OpenCLIP's names, read by timm's converter and by ours."""
    from importlib import import_module

    made = timm_vit(name="vit_base_patch32_clip_quickgelu_224", num_classes=20, depth=2)
    generator = torch.Generator().manual_seed(3)
    width, state = 48, {}
    shapes = {
        "class_embedding": (width,),
        "positional_embedding": (17, width),
        "conv1.weight": (width, 3, 8, 8),
        "proj": (width, 20),
        **{f"{norm}.{part}": (width,) for norm in ("ln_pre", "ln_post") for part in ("weight", "bias")},
    }
    for block in range(2):
        inside = {
            "attn.in_proj_weight": (3 * width, width),
            "attn.in_proj_bias": (3 * width,),
            "attn.out_proj.weight": (width, width),
            "attn.out_proj.bias": (width,),
            "mlp.c_fc.weight": (4 * width, width),
            "mlp.c_fc.bias": (4 * width,),
            "mlp.c_proj.weight": (width, 4 * width),
            "mlp.c_proj.bias": (width,),
            **{f"{norm}.{part}": (width,) for norm in ("ln_1", "ln_2") for part in ("weight", "bias")},
        }
        shapes |= {f"transformer.resblocks.{block}.{key}": shape for key, shape in inside.items()}
    state = {f"visual.{key}": torch.randn(shape, generator=generator) * 0.2 for key, shape in shapes.items()}
    state["token_embedding.weight"] = torch.zeros(5, 5)  # of the text tower
    oracles.timm()
    converter = import_module("timm.models.vision_transformer")._convert_openai_clip
    made.load_state_dict(converter(state, made))
    save_file(state, tmp_path / "open_clip.safetensors")
    loaded = load(tmp_path / "open_clip.safetensors", num_heads=3, mlp="quick_gelu")
    close(loaded.model(image()), made(image()))
    assert any("token_embedding.weight" in note for note in loaded.notes)


@pytest.mark.parametrize("prefix", ["", "opt/target/", "params/img/"])
@torch.no_grad()
def test_jax(prefix: str, tmp_path: Path) -> None:
    """Random arrays under the original's names, read by timm's loader and by ours."""
    made = timm_vit(num_classes=7, depth=2)
    rng, width = np.random.default_rng(0), 48
    shapes: dict[str, tuple[int, ...]] = {
        "cls": (1, 1, width),
        "embedding/kernel": (8, 8, 3, width),
        "embedding/bias": (width,),
        "head/kernel": (width, 7),
        "head/bias": (7,),
        "Transformer/encoder_norm/scale": (width,),
        "Transformer/encoder_norm/bias": (width,),
    }
    big_vision = prefix.startswith("params")
    shapes["pos_embedding" if big_vision else "Transformer/posembed_input/pos_embedding"] = (1, 17, width)
    attention, mlp, norm2 = (0, 0, 1) if big_vision else (1, 3, 2)
    for block in range(2):
        inside: dict[str, tuple[int, ...]] = {
            f"MultiHeadDotProductAttention_{attention}/out/kernel": (3, 16, width),
            f"MultiHeadDotProductAttention_{attention}/out/bias": (width,),
            f"MlpBlock_{mlp}/Dense_0/kernel": (width, 4 * width),
            f"MlpBlock_{mlp}/Dense_0/bias": (4 * width,),
            f"MlpBlock_{mlp}/Dense_1/kernel": (4 * width, width),
            f"MlpBlock_{mlp}/Dense_1/bias": (width,),
            **{f"LayerNorm_{norm}/{part}": (width,) for norm in (0, norm2) for part in ("scale", "bias")},
        }
        for part in ("query", "key", "value"):
            inside[f"MultiHeadDotProductAttention_{attention}/{part}/kernel"] = (width, 3, 16)
            inside[f"MultiHeadDotProductAttention_{attention}/{part}/bias"] = (3, 16)
        shapes |= {f"Transformer/encoderblock_{block}/{key}": shape for key, shape in inside.items()}
    arrays = {prefix + key: rng.normal(size=shape).astype(np.float32) * 0.2 for key, shape in shapes.items()}
    np.savez(tmp_path / "vit.npz", **arrays)
    made.load_pretrained(str(tmp_path / "vit.npz"))
    assert load(tmp_path / "vit.npz").config.mlp == "gelu_tanh"  # which timm takes for the exact one
    loaded = load(tmp_path / "vit.npz", mlp="gelu")
    assert (loaded.config.num_heads, loaded.why["num_heads"]) == (3, "shapes")
    close(loaded.model(image()), made(image()))
    if big_vision:
        stacked = {key: value for key, value in arrays.items() if "encoderblock_" not in key}
        for key in [key for key in arrays if "encoderblock_0" in key]:
            both = [arrays[key], arrays[key.replace("encoderblock_0", "encoderblock_1")]]
            stacked[key.replace("encoderblock_0", "encoderblock")] = np.stack(both)
        np.savez(tmp_path / "stacked.npz", **stacked)
        again = load(tmp_path / "stacked.npz", num_heads=3, mlp="gelu")
        assert again.config.depth == 2
        assert torch.equal(again.model(image()), loaded.model(image()))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("vit_tiny_patch16_224", {}),
        ("deit_tiny_distilled_patch16_224", {}),
        ("vit_small_patch14_reg4_dinov2", {"image_size": 518}),
        ("vit_giant_patch14_dinov2", {"img_size": 70, "depth": 1}),
        ("vit_base_patch16_clip_quickgelu_224", {}),
        ("vit_small_patch16_rope_224", {}),
        ("vit_small_patch16_dinov3", {"image_size": 256}),
        ("vit_small_plus_patch16_dinov3", {"image_size": 256}),
        ("vit_medium_patch16_gap_240", {"image_size": 240}),
        ("deit3_small_patch16_224", {}),
        ("vit_base_patch16_rpn_224", {}),
        ("vit_relpos_small_patch16_224", {}),
        ("vit_relpos_small_patch16_rpn_224", {}),
        ("vit_relpos_medium_patch16_cls_224", {}),
        ("vit_srelpos_small_patch16_224", {}),
        ("vit_small_patch16_rope_mixed_224", {}),
        ("vit_small_patch16_rope_ape_224", {}),
        ("vit_small_patch16_rope_mixed_ape_224", {}),
        ("vit_medium_patch16_rope_reg1_gap_256", {"image_size": 256}),
        ("vit_mediumd_patch16_rope_reg1_gap_256", {"image_size": 256}),
        ("eva02_tiny_patch14_224", {}),
        ("eva02_small_patch14_336", {"image_size": 336}),
        ("eva02_base_patch14_224", {}),
        ("eva02_base_patch16_clip_224", {}),
        ("eva_giant_patch14_224", {"depth": 1}),
        ("beit_base_patch16_224", {}),
        ("beitv2_base_patch16_224", {}),
        ("vit_base_patch16_siglip_224", {}),
        ("vit_base_patch32_siglip_256", {"image_size": 256}),
        ("vit_base_patch16_siglip_gap_224", {}),
        ("vit_tiny_r_s16_p8_224", {}),
        ("vit_small_r26_s32_224", {}),
        ("vit_base_r50_s16_224", {}),
    ],
)
@torch.no_grad()
def test_timm_hub_folder(name: str, told: dict[str, int], tmp_path: Path) -> None:
    """timm's own layout: config.json with architecture, model_args and pretrained_cfg; the real widths, two blocks."""
    timm = oracles.timm()
    arguments = {"depth": 2} | {key: told[key] for key in ("depth", "img_size") if key in told}
    made = timm.create_model(name, **arguments, num_classes=5).eval()
    randomize(made)
    from timm.models import save_for_hf

    save_for_hf(made, tmp_path, model_args=arguments, safe_serialization=True)
    loaded = load(tmp_path)
    size = told.get("img_size", told.get("image_size", 224))
    assert loaded.config.num_classes == 5
    prepared = (size, size) if "img_size" in told else made.pretrained_cfg["input_size"][1:]
    assert loaded.preprocess.config.image_size == prepared
    small = min(size, 64 if "patch16" in name else 56)
    if name.startswith(("vit_small_patch16_rope_224", "vit_small_patch16_dinov3", "vit_small_plus")):
        picture = image(small, small)
        made.set_input_size(img_size=(small, small)) if hasattr(made, "set_input_size") else None
    else:
        picture = image(size, size)
    features = made.forward_features(picture)
    close(loaded.model.tokens(picture), features)
    close(loaded.model(picture), made.forward_head(features))


OTHERS = ["vit_pe_core_tiny_patch16_384", "vit_pe_spatial_tiny_patch16_512"]


@pytest.mark.parametrize("name", OTHERS)
def test_timm_architectures_of_the_same_names_and_another_computation_are_refused(name: str, tmp_path: Path) -> None:
    made = oracles.timm().create_model(name, depth=1, num_classes=0)
    from timm.models import save_for_hf

    save_for_hf(made, tmp_path, safe_serialization=True)
    with pytest.raises(CheckpointError, match=f"{tmp_path}: by config.json it is timm's {name}, which is not supp"):
        load(tmp_path)
