"""The reference implementations, where they can be imported; a test that needs an absent one says so and skips."""

import sys
from types import ModuleType

import pytest
import torch

Absent = pytest.skip.Exception

_libraries = []  # torch drops an operator when the library that defined it is collected


def timm() -> ModuleType:
    if not _torchvision_imports():
        pytest.skip("torchvision, which timm needs, is not installed; `make test` installs it")
    return pytest.importorskip("timm", reason="timm is not installed; `make test` installs it")


def transformers() -> ModuleType:
    _torchvision_imports()  # transformers imports it where it is installed
    return pytest.importorskip("transformers", reason="transformers is not installed; `make test` installs it")


def _torchvision_imports() -> bool:
    """torchvision's binary does not load beside another build of torch; two operators, never called, let it import."""
    try:
        import torchvision  # noqa: F401
    except ModuleNotFoundError:
        return False
    except (RuntimeError, OSError):
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        _libraries.append(library)
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return True
