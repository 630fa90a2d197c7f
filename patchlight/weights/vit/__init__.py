"""The record of the ViT."""

from patchlight.config import ViTConfig
from patchlight.models.vit import ViT
from patchlight.weights.family import Family
from patchlight.weights.vit import reading
from patchlight.weights.vit.names import ORIGINS
from patchlight.weights.vit.to_timm import to_timm
from patchlight.weights.vit.to_transformers import to_transformers

FAMILY = Family(
    config=ViTConfig,
    model=ViT,
    origins=ORIGINS,
    from_shapes=reading.from_shapes,
    read=reading.read,
    fixed_by_tensors=reading.FIXED_BY_TENSORS,
    left_open=reading.LEFT_OPEN,
    change_sizes=reading.change_sizes,
    fit=reading.fit,
    not_read=reading.not_read,
    timm_arguments=reading.TIMM_ARGUMENTS,
    timm_hints=reading.timm_hints,
    model_types=reading.MODEL_TYPES,
    transformers_hints=reading.transformers_hints,
    to_timm=to_timm,
    to_transformers=to_transformers,
)
