"""Recipes: Python modules with `config() -> TrainConfig`, and where they distil from a teacher of their own,
`teacher(out, device, config) -> Callable`, which gives logits_BK for images_BCHW with values from 0 to 1."""

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from patchlight.errors import PatchlightError
from patchlight.train.config import TrainConfig
from patchlight.train.objective import Teacher


def read_recipe(path: str) -> ModuleType:
    """The module at `path`; running it is the point, so take recipes from people you trust."""
    file = Path(path)
    if not file.is_file():
        raise PatchlightError(f"{path}: there is no such recipe; name a Python file such as recipes/cifar10.py")
    spec = importlib.util.spec_from_file_location(f"recipe_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise PatchlightError(f"{path}: is no Python file; a recipe is a module with config() -> TrainConfig")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    if str(file.parent.absolute()) not in sys.path:  # as when Python runs it: recipes may import their neighbours
        sys.path.append(str(file.parent.absolute()))
    try:
        spec.loader.exec_module(module)
    except PatchlightError:
        raise
    except Exception as error:
        raise PatchlightError(f"{path}: cannot be run ({_what(error, spec.origin)})") from None
    if not callable(getattr(module, "config", None)):
        raise PatchlightError(f"{path}: has no function config() that returns a TrainConfig")
    return module


def recipe_config(module: ModuleType, changes: dict[str, Any]) -> TrainConfig:
    try:
        config = module.config()
    except PatchlightError:
        raise
    except Exception as error:
        raise PatchlightError(f"{module.__file__}: its config() failed ({_what(error, module.__file__)})") from None
    if not isinstance(config, TrainConfig):
        raise PatchlightError(f"{module.__file__}: config() gave {config!r:.60}, not a TrainConfig")
    return config.changed(changes)


def recipe_teacher(module: ModuleType, out: str | Path, config: TrainConfig, device: str) -> Teacher:
    """The teacher of a recipe that has one of its own."""
    try:
        teacher = module.teacher(out, device, config)
    except PatchlightError:
        raise
    except Exception as error:
        raise PatchlightError(f"{module.__file__}: its teacher() failed ({_what(error, module.__file__)})") from None
    if not callable(teacher):
        raise PatchlightError(
            f"{module.__file__}: teacher() gave {teacher!r:.60}, which cannot be called; give logits_BK for images_BCHW"
        )
    return teacher


def _what(error: Exception, recipe: str | None) -> str:
    """With the recipe's own line, the last that it ran, whichever library it was in afterwards."""
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == recipe]
    where = f", line {lines[-1]}" if lines and not isinstance(error, SyntaxError) else ""
    return f"{type(error).__name__}: {error}{where}"
