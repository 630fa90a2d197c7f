"""Recipes: Python modules with `config() -> TrainConfig`, and where they distil from a teacher of their own,
`teacher(out, device, config) -> Callable`, which gives logits_BK for images_BCHW with values from 0 to 1."""

import ast
import importlib.util
import os
import re
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from patchlight.errors import PatchlightError
from patchlight.training.config import TrainConfig
from patchlight.training.objective import Teacher


@dataclass(frozen=True)
class BundledFile:
    """One of the Python files that come with Patchlight in recipes/."""

    path: Path
    summary: str
    """The first sentence of what it says about itself."""
    is_recipe: bool
    """It has config(), so that `patchlight train NAME` runs it; the others are scripts of their own."""


def recipes_folder() -> Path:
    """Where the recipes lie: inside an installed package, or beside the package in a clone."""
    package = Path(__file__).parents[1]
    return package / "recipes" if (package / "recipes").is_dir() else package.parent / "recipes"


def bundled_recipes() -> list[BundledFile]:
    """The recipes and scripts in `recipes_folder`, by name; modules that they merely import are left out."""
    found = []
    for path in sorted(recipes_folder().glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        is_recipe = any(
            isinstance(node, ast.FunctionDef)
            and node.name == "config"
            and len(node.args.args) == len(node.args.defaults)
            for node in tree.body
        )
        is_script = any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in tree.body)
        if is_recipe or is_script:
            paragraph = (ast.get_docstring(tree) or "").partition("\n\n")[0]
            summary = re.split(r"\. (?=[A-Z])", " ".join(paragraph.split()))[0].rstrip(".")
            found.append(BundledFile(path, summary, is_recipe))
    return found


def find_recipe(name: str) -> Path:
    """A Python file, or the name of a recipe that comes with Patchlight."""
    file = Path(name)
    if file.is_file():
        return file
    bundled = {each.path.stem: each.path for each in bundled_recipes() if each.is_recipe}
    if name in bundled:
        return bundled[name]
    raise PatchlightError(
        f"{name}: there is no such recipe; give a Python file, or one of {', '.join(bundled)} (patchlight recipes)"
    )


def read_recipe(path: str | os.PathLike[str]) -> ModuleType:
    """The module at `path`, or of this name; running it is the point, so take recipes from people you trust."""
    file = find_recipe(os.fspath(path))
    spec = importlib.util.spec_from_file_location(f"recipe_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise PatchlightError(f"{path}: is not a Python file; a recipe is a module with config() -> TrainConfig")
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


def recipe_teacher(module: ModuleType, out: str | os.PathLike[str], config: TrainConfig, device: str) -> Teacher:
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
