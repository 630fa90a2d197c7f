"""Which model is in a checkpoint: whose naming it has, and where in it the encoder lies; or another architecture, which
is refused by name before its tensors are taken for a ViT's."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from patchlight.weights.families import all_origins, names_of_families
from patchlight.weights.family import Recognised
from patchlight.weights.read import CheckpointError

# Where a checkpoint holds several encoders, the one that its authors say is better comes first.
PREFERENCE = ("teacher", "ema", "target_encoder", "model", "backbone", "student")

# What stands around weights that are a moving average of those that were trained: model_ema, teacher.backbone, ...
AVERAGED = re.compile(r"(?<![a-z])(teacher|ema|target|momentum|averaged|swa)(?![a-z])")

# Classifiers that stand beside the encoder, not in it.
OUTSIDE_HEADS = ("classifier.", "cls_classifier.", "distillation_classifier.", "visual_projection.")


def recognise(tensors: Mapping[str, Tensor], source: str, weights: str | None = None) -> Recognised:
    """Find the encoder, whatever wrappers (DDP, compile, Lightning, EMA, teacher and student) stand around it.

    Of trained weights ("model") and their moving average ("ema") `weights` says which to take; None takes the average
    where there is one.
    """
    for family, origin in all_origins():
        first = origin.marks[0]
        prefixes = [key.removesuffix(first) for key in tensors if key.endswith(first)]
        prefixes = [prefix for prefix in prefixes if all(prefix + mark in tensors for mark in origin.marks)]
        prefixes = [prefix for prefix in prefixes if prefix == "" or prefix[-1] in "./"]
        if not prefixes:
            continue
        prefix, choice = _choose(prefixes, weights, source)
        state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        parent = prefix.removesuffix(prefix.split(".")[-2] + ".") if prefix.count(".") else ""
        outside = [key for key in tensors if not key.startswith(prefix)]
        elsewhere = OUTSIDE_HEADS + (() if origin.outside is None else origin.outside(state))
        heads = [key for key in outside if key.startswith(tuple(parent + part for part in elsewhere))]
        state |= {key.removeprefix(parent): tensors[key] for key in heads}
        beside = [key for key in outside if key not in heads]
        shapes = {key: tuple(value.shape) for key, value in state.items()}
        return Recognised(family, origin, prefix, state, shapes, beside, choice)
    known = ", ".join(dict.fromkeys(origin.name for _, origin in all_origins()))
    names = ", ".join(sorted(tensors)[:3]) + (", ..." if len(tensors) > 3 else "")
    raise CheckpointError(
        f"{source}: no {names_of_families('or')} that we know is in it (tensors: {names or 'none'}; known: those of "
        f"{known})"
    )


def _choose(prefixes: list[str], weights: str | None, source: str) -> tuple[str, str | None]:
    """The prefix of the encoder to take, and a note if the file has both trained and averaged weights."""
    of_kind: dict[str, list[str]] = {"model": [], "ema": []}
    for prefix in sorted(prefixes, key=_rank):
        of_kind["ema" if AVERAGED.search(prefix.lower()) else "model"].append(prefix)
    if weights is not None and not of_kind[weights]:
        lies = f"below {min(prefixes, key=_rank)!r}" if min(prefixes, key=_rank) else "at its top"
        missing = "no averaged weights are" if weights == "ema" else "nothing but averaged weights is"
        raise CheckpointError(f"{source}: weights={weights!r}: {missing} in it ({lies}); leave weights= out")
    best = min(of_kind[weights] if weights else prefixes, key=_rank)
    if not (of_kind["model"] and of_kind["ema"]):
        return best, None
    taken, other = ("ema", "model") if best in of_kind["ema"] else ("model", "ema")
    called = {"ema": "averaged (EMA)", "model": "trained"}
    return best, f"took the {called[taken]} weights; weights={other!r} takes the {called[other]} ones beside them"


def _rank(prefix: str) -> tuple[int, int]:
    wrappers = prefix.lower()
    found = [rank for rank, word in enumerate(PREFERENCE) if word in wrappers]
    return (min(found, default=len(PREFERENCE)) if wrappers else len(PREFERENCE)), len(prefix)


class Other(NamedTuple):
    """An architecture that is not supported."""

    name: str
    names: str
    """Pattern: how timm's or transformers' names for it begin."""
    mark: str | None = None
    """Pattern that matches some tensor's name in it, and no tensor's name in a supported model."""


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
    """The unsupported architecture of this name, or None."""
    return next((other for other in OTHERS if re.match(other.names, called)), None)


def refuse_others(keys: Iterable[str], config: Mapping[str, Any], source: str) -> None:
    """Raise if config.json or the tensors' names belong to an unsupported architecture."""
    called = name_in(config)
    text = "\n".join(keys)
    for other in OTHERS:
        named = called and re.match(other.names, called)
        if named or (other.mark and re.search(other.mark, text, re.MULTILINE)):
            which = f" (config.json says {called!r})" if called else ""
            raise CheckpointError(
                f"{source}: it is {other.name}{which}, which is not supported; {names_of_families('and')} are"
            )


def name_in(config: Mapping[str, Any]) -> str:
    """The architecture's name in timm's or transformers' config.json; "" if there is none, or we wrote the file."""
    return "" if "patchlight" in config else str(config.get("architecture") or config.get("model_type") or "")
