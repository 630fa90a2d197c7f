"""The names that users may rely on. Change this list on purpose, with a line in CHANGELOG.md."""

import subprocess
import sys

import pytest

import patchlight

PUBLIC = [
    *(
        "AttentionMaps",
        "Box",
        "ClassifySettings",
        "ConvNeXt",
        "ConvNeXtConfig",
        "Costs",
        "CropRunSettings",
        "CropSettings",
    ),
    *(
        "CropSummary",
        "EmbedSettings",
        "Engine",
        "Exported",
        "ImageError",
        "Loaded",
        "Localization",
        "PatchlightError",
        "PatchlightWarning",
        "Prediction",
    ),
    *("PreprocessConfig", "Progress", "Reporter", "Subject", "Swin", "SwinConfig", "TableSummary", "Trained", "ViT"),
    *(
        "ViTConfig",
        "View",
        "attention",
        "classify",
        "classify_photos",
        "costs",
        "crop_photos",
        "decode",
        "embed",
        "embed_photos",
        "export",
        "finetune",
        "load",
    ),
    *("load_engine", "localize", "resample_positions", "save", "shuffle_patches", "sincos_2d", "train", "variant"),
]


def test_the_public_names_are_these() -> None:
    assert patchlight.__all__ == PUBLIC
    assert [name for name in dir(patchlight) if not name.startswith("_")] == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    assert getattr(patchlight, name).__doc__


def test_unknown_names_raise() -> None:
    with pytest.raises(AttributeError, match="module 'patchlight' has no attribute 'nothing'"):
        patchlight.nothing  # noqa: B018


def test_importing_patchlight_does_not_import_torch() -> None:
    code = "import sys, patchlight, patchlight.cli; patchlight.variant('B/16'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
