"""Patchlight: a Vision Transformer toolkit on PyTorch. The public names, and nothing else.

Names are imported when they are first used, so that `import patchlight` does not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from patchlight.config import ViTConfig as ViTConfig
    from patchlight.config import variant as variant
    from patchlight.costing import Costs as Costs
    from patchlight.costing import costs as costs
    from patchlight.errors import PatchlightError as PatchlightError
    from patchlight.models.vit import ViT as ViT

_HOMES = {
    "Costs": "patchlight.costing",
    "PatchlightError": "patchlight.errors",
    "ViT": "patchlight.models.vit",
    "ViTConfig": "patchlight.config",
    "costs": "patchlight.costing",
    "variant": "patchlight.config",
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
