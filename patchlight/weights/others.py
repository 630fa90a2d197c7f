"""Architectures that people meet and that are not ours: refused by name, before their tensors are taken for a ViT's."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from patchlight.weights.read import CheckpointError


class Other(NamedTuple):
    """An architecture that we do not have."""

    name: str
    names: str
    """What timm's or transformers' names of it begin with: a pattern."""
    mark: str | None = None
    """A pattern that the name of some tensor of it has, and none of a model that we have."""


OTHERS: tuple[Other, ...] = (
    Other("XCiT", "xcit_", r"\bcls_attn_blocks\.|\bblocks\.\d+\.local_mp\."),
    Other(
        "MaxViT or CoAtNet", "maxvit|maxxvit|coatnet|coatnext", r"\.attn_grid\.|\bstages\.\d+\.blocks\.\d+\.conv1_1x1\."
    ),
    Other("EfficientFormer", "efficientformer", r"\.token_mixer\.(attention_biases|k\.conv\.)"),
    Other("MobileViT", "mobilevit", r"\bstages\.\d+\.\d+\.transformer\.\d+\.|\bmobilevit\."),
    Other("PVT", "pvt", r"\bstages\.\d+\.blocks\.\d+\.(attn\.sr|mlp\.dwconv)\.|\bpvt(_v2)?\."),
    Other("SegFormer", "segformer", r"\bsegformer\."),
    Other("CaiT", "cait_", r"\bblocks_token_only\."),
    Other("ConViT", "convit_", r"\.attn\.gating_param$"),
    Other("LeViT", "levit", r"\.attn\.qkv\.(linear|c|bn)\.|\blevit\."),
    Other("CrossViT", "crossvit_", r"\brevert_projs\."),
    Other("TNT", "tnt_", r"\bpixel_embed\."),
    Other("Hiera", "hiera|sam2_hiera", r"\bblocks\.\d+\.proj\.weight$|\bpos_embed_win$|\bhiera\."),
    Other("Twins", "twins_", r"\bpos_block\.\d+\."),
    Other("PiT", "pit_", r"\btransformers\.\d+\.blocks\.\d+\."),
    Other("DaViT", "davit", r"\.cpe1\.proj\."),
    Other("EdgeNeXt", "edgenext_", r"\.xca\."),
    Other("MViT", "mvit", r"\.attn\.pool_[qkv]\."),
    Other("TinyViT", "tiny_vit_", r"\.local_conv\."),
    Other("EfficientViT", "efficientvit", r"\.context_module\.|\.cascaded_group_attn\.|\btoken_mixer\.m\.attn\."),
    Other("FastViT", "fastvit|mci", r"\.token_mixer\.mixer\."),
    Other(
        "the image encoder of SAM",
        "samvit_|sam(_|$)",
        r"\bblocks\.\d+\.attn\.rel_pos_[hw]$|\.layers\.\d+\.attn\.rel_pos_[hw]$",
    ),
    Other("NaFlexViT", "naflexvit|siglip2_vision_model", r"\bembeds\.(proj\.|pos_embed)"),
    Other("Swin V2-CR", "swinv2_cr_", r"\.attn\.meta_mlp\."),
    Other("Swin S3", "swin_s3_"),
    Other("VOLO", "volo_", r"\bpost_network\."),
    Other("CoaT", "coat_", r"\bserial_blocks\d\."),
    Other("MLP-Mixer", "mixer_", r"\.mlp_tokens\."),
    Other("a ViT with differential attention", "vit_d(wee|pwee|little)", r"\.attn\.lambda_q1$"),
    Other("a ViT with parallel branches", "vit_.*_18x2_|vit_pwee", r"\bblocks\.\d+\.attns\.\d+\.|\.attn_out_proj\."),
    Other("a hybrid on a ResNet of another kind", r"vit_\w+_resnet\d+d", r"\bpatch_embed\.backbone\.layer1\."),
    Other("YOLOS", "yolos", r"\bembeddings\.detection_tokens$"),
    Other("X-CLIP", "xclip", r"\.message_attn\."),
    Other("OWL-ViT", "owlvit|owlv2", r"\bpre_layernorm\."),
    Other("MLCD", "mlcd", r"\bclass_pos_emb$"),
    Other("RF-DETR", "rf_detr"),
    Other("TimeSformer", "timesformer", r"\bembeddings\.time_embeddings$"),
    Other("PaddleOCR-VL", "paddleocr"),
    Other("BLIP", "blip|instructblip", r"\bself_attn\.qkv\.weight$"),
    Other("AIMv2", "aimv2"),
    Other("Sapiens2", ".*sapiens2"),
    Other("DINOv3's ConvNeXt", "dinov3_convnext"),
    Other("V-JEPA", "vjepa"),
    Other("ResNet", "resnet|resnext|resnetv2|seresnet", r"(^|\.)layer1\.0\.(conv1|bn1)\.weight$"),
    Other(
        "EfficientNet or MobileNet",
        "efficientnet|tf_efficientnet|mobilenet",
        r"\bblocks\.\d+\.\d+\.conv_dw\.|\bconv_stem\.",
    ),
)


def other_named(called: str) -> Other | None:
    """The architecture that we do not have and that goes by this name."""
    return next((other for other in OTHERS if re.match(other.names, called)), None)


def refuse_others(keys: Iterable[str], config: Mapping[str, Any], source: str) -> None:
    """Raise where a config.json or the tensors' names are those of an architecture that we do not have."""
    called = name_in(config)
    text = "\n".join(keys)
    for other in OTHERS:
        named = called and re.match(other.names, called)
        if named or (other.mark and re.search(other.mark, text, re.MULTILINE)):
            which = f" (config.json says {called!r})" if called else ""
            raise CheckpointError(
                f"{source}: it is {other.name}{which}, which is not supported; ViTs, Swin and ConvNeXt are"
            )


def name_in(config: Mapping[str, Any]) -> str:
    """What timm or transformers call the architecture in their config.json; "" where we wrote it, or nobody."""
    return "" if "patchlight" in config else str(config.get("architecture") or config.get("model_type") or "")
