from collections.abc import Iterator
from pathlib import Path

import pytest

from models_at_random import tiny_vit
from patchlight.weights.save import save
from served import Served, serving


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with positions as a bias, registers and labels."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    labels = ["ant", "bee", "cow", "<b>dog</b>", "eel"]
    save(tiny_vit(num_registers=2, position="relative_bias"), folder, labels=labels)
    return folder


@pytest.fixture(scope="session")
def headless_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "headless"
    save(tiny_vit(num_classes=0, position="rope2d", class_token=False, pooling="mean"), folder)
    return folder


@pytest.fixture(scope="session")
def served(tiny_folder: Path, headless_folder: Path) -> Iterator[Served]:
    """The default model, and two others."""
    with serving("default", str(tiny_folder), str(headless_folder)) as running:
        yield running
