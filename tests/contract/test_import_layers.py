"""Imports point downward only, and heavy or networked libraries stay behind their walls."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "patchlight"

PAGE = PACKAGE.parent / "docs" / "architecture.md"

# From the top down; a module may import from layers below its own, and from its own package.
LAYERS = [
    {"__main__"},
    *(
        set(line.partition("  ")[0].split(" | "))
        for line in PAGE.read_text().partition("```layers\n")[2].partition("```")[0].splitlines()
    ),
]

# library: the one place, or the two, that may import it
WALLS: dict[str, str | tuple[str, ...]] = {
    "matplotlib": ("explain/plot.py", "training/charts.py"),
    "huggingface_hub": "weights/hub.py",
    "requests": "weights/hub.py",
    "urllib": ("weights/hub.py", "remote.py"),
    "fsspec": "remote.py",
    "httpx": "weights/hub.py",
    "fastapi": "serve/",
    "starlette": "serve/",
    "uvicorn": "serve/",
    "pydantic": "serve/",
    "prometheus_client": "serve/",
    "opentelemetry": "serve/telemetry.py",
    "python_multipart": "serve/",
    "onnx": "deploy/",
    "onnxruntime": "deploy/",
    "openvino": "deploy/",
    "nncf": "deploy/",
    "ray": "batch/on_ray.py",
    "typer": ("cli.py", "commands/"),
    "timm": "(nowhere)",
    "transformers": "(nowhere)",
    "torchvision": "(nowhere)",
}

MODULES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


def imported_by(tree: ast.AST) -> list[str]:
    """Every module that the source names in an import, wherever it stands."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def layer_of(part: str) -> int:
    found = [index for index, layer in enumerate(LAYERS) if part in layer]
    assert found, f"patchlight/{part} is in no layer; give it one in docs/architecture.md"
    return found[0]


@pytest.mark.parametrize("module", [module for module in MODULES if module != "__init__.py"])
def test_imports_point_downward(module: str) -> None:
    own = module.split("/")[0].removesuffix(".py")
    for name in imported_by(ast.parse((PACKAGE / module).read_text())):
        package, *rest = name.split(".")
        if package != "patchlight" or rest[0] in (own, "__version__"):
            continue
        assert layer_of(rest[0]) > layer_of(own), f"{module} imports {name}, which is not below it"


@pytest.mark.parametrize("module", MODULES)
def test_walls(module: str) -> None:
    for name in imported_by(ast.parse((PACKAGE / module).read_text())):
        place = WALLS.get(name.split(".")[0])
        assert place is None or module.startswith(place), f"{module} imports {name}, which belongs in {place}"


def test_the_checks_see_what_they_forbid() -> None:
    tree = ast.parse("def f():\n    from patchlight.cli import main\nimport matplotlib.pyplot as plt")
    assert imported_by(tree) == ["matplotlib.pyplot", "patchlight.cli.main"]
    assert layer_of("cli") < layer_of("models") < layer_of("config")
