"""Patchlight: a Vision Transformer toolkit on PyTorch. The public names, and nothing else.

Names are imported when they are first used, so that `import patchlight` does not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from patchlight.batch.readers import ClassifySettings as ClassifySettings
    from patchlight.batch.readers import EmbedSettings as EmbedSettings
    from patchlight.batch.runner import crop_photos as crop_photos
    from patchlight.batch.settings import CropRunSettings as CropRunSettings
    from patchlight.batch.settings import CropSettings as CropSettings
    from patchlight.batch.summary import CropSummary as CropSummary
    from patchlight.batch.table_run import TableSummary as TableSummary
    from patchlight.batch.table_run import classify_photos as classify_photos
    from patchlight.batch.table_run import embed as embed
    from patchlight.batch.table_run import embed_photos as embed_photos
    from patchlight.classification import Prediction as Prediction
    from patchlight.classification import classify as classify
    from patchlight.config import PreprocessConfig as PreprocessConfig
    from patchlight.config import ViTConfig as ViTConfig
    from patchlight.costing import Costs as Costs
    from patchlight.costing import costs as costs
    from patchlight.deploy.engines import Engine as Engine
    from patchlight.deploy.engines import load_engine as load_engine
    from patchlight.deploy.export import Exported as Exported
    from patchlight.deploy.export import export as export
    from patchlight.errors import PatchlightError as PatchlightError
    from patchlight.errors import PatchlightWarning as PatchlightWarning
    from patchlight.explain.attention import AttentionMaps as AttentionMaps
    from patchlight.explain.attention import attention as attention
    from patchlight.explain.shuffling import shuffle_patches as shuffle_patches
    from patchlight.families import ConvNeXtConfig as ConvNeXtConfig
    from patchlight.families import SwinConfig as SwinConfig
    from patchlight.families import variant as variant
    from patchlight.geometry import Box as Box
    from patchlight.geometry import View as View
    from patchlight.images.decode import ImageError as ImageError
    from patchlight.images.decode import decode as decode
    from patchlight.localizing.detector import Localization as Localization
    from patchlight.localizing.detector import Subject as Subject
    from patchlight.localizing.detector import localize as localize
    from patchlight.models.convnext import ConvNeXt as ConvNeXt
    from patchlight.models.positions import sincos_2d as sincos_2d
    from patchlight.models.resampling import resample_positions as resample_positions
    from patchlight.models.swin import Swin as Swin
    from patchlight.models.vit import ViT as ViT
    from patchlight.reporting import Progress as Progress
    from patchlight.reporting import Reporter as Reporter
    from patchlight.training.api import Trained as Trained
    from patchlight.training.api import finetune as finetune
    from patchlight.training.api import train as train
    from patchlight.weights.load import Loaded as Loaded
    from patchlight.weights.load import load as load
    from patchlight.weights.save import save as save

_HOMES = {
    "AttentionMaps": "patchlight.explain.attention",
    "Box": "patchlight.geometry",
    "ClassifySettings": "patchlight.batch.readers",
    "ConvNeXt": "patchlight.models.convnext",
    "ConvNeXtConfig": "patchlight.families",
    "Costs": "patchlight.costing",
    "CropRunSettings": "patchlight.batch.settings",
    "CropSettings": "patchlight.batch.settings",
    "CropSummary": "patchlight.batch.summary",
    "EmbedSettings": "patchlight.batch.readers",
    "Engine": "patchlight.deploy.engines",
    "Exported": "patchlight.deploy.export",
    "ImageError": "patchlight.images.decode",
    "Loaded": "patchlight.weights.load",
    "Localization": "patchlight.localizing.detector",
    "PatchlightError": "patchlight.errors",
    "PatchlightWarning": "patchlight.errors",
    "Prediction": "patchlight.classification",
    "PreprocessConfig": "patchlight.config",
    "Progress": "patchlight.reporting",
    "Reporter": "patchlight.reporting",
    "Subject": "patchlight.localizing.detector",
    "Swin": "patchlight.models.swin",
    "SwinConfig": "patchlight.families",
    "TableSummary": "patchlight.batch.table_run",
    "Trained": "patchlight.training.api",
    "ViT": "patchlight.models.vit",
    "ViTConfig": "patchlight.config",
    "View": "patchlight.geometry",
    "attention": "patchlight.explain.attention",
    "classify": "patchlight.classification",
    "classify_photos": "patchlight.batch.table_run",
    "costs": "patchlight.costing",
    "crop_photos": "patchlight.batch.runner",
    "decode": "patchlight.images.decode",
    "embed": "patchlight.batch.table_run",
    "embed_photos": "patchlight.batch.table_run",
    "export": "patchlight.deploy.export",
    "finetune": "patchlight.training.api",
    "load": "patchlight.weights.load",
    "load_engine": "patchlight.deploy.engines",
    "localize": "patchlight.localizing.detector",
    "resample_positions": "patchlight.models.resampling",
    "save": "patchlight.weights.save",
    "shuffle_patches": "patchlight.explain.shuffling",
    "sincos_2d": "patchlight.models.positions",
    "train": "patchlight.training.api",
    "variant": "patchlight.families",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'patchlight' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
