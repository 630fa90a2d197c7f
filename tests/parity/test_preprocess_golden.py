"""Preprocessing against stored outputs of timm and transformers, and against both run live on random sizes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors import safe_open

import oracles
from patchlight.images.preprocess import Preprocess
from patchlight.weights.preprocessing import from_timm, from_transformers

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("preprocess_*.safetensors"))
NAMES = ["timm0", "timm1", "timm2", "timm3", "timm4", "hf_vit", "hf_dinov2"]

SIDES = st.integers(1, 200)
MODEL_SIDES = st.integers(2, 64)


def photo(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * 1000 + width).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_all_goldens_are_here() -> None:
    assert [path.stem for path in GOLDEN] == ["preprocess_0", "preprocess_1", "preprocess_2"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden(path: Path, name: str) -> None:
    with safe_open(path, "pt") as file:
        meta = json.loads(file.metadata()["meta"])
        image_HWC, expected_CHW = file.get_tensor("image").numpy(), file.get_tensor(name)
    assert sorted(meta) == sorted(NAMES)
    values = {key: value for key, value in meta[name].items() if key != "source"}
    config = from_timm(values) if name.startswith("timm") else from_transformers(values)
    image_CHW, view = Preprocess(config)(image_HWC)
    torch.testing.assert_close(image_CHW, expected_CHW, rtol=0, atol=1e-6)
    assert view.source_size == image_HWC.shape[:2]
    assert view.model_size == tuple(expected_CHW.shape[1:])


TIMM = st.fixed_dictionaries(
    {
        "input_size": st.one_of(
            MODEL_SIDES.map(lambda side: (3, side, side)), st.tuples(st.just(3), MODEL_SIDES, MODEL_SIDES)
        ),
        "interpolation": st.sampled_from(["nearest", "bilinear", "bicubic", "lanczos"]),
        "crop_pct": st.sampled_from([0.5, 0.875, 0.9, 0.95, 1.0, 1.2]),
        "crop_mode": st.sampled_from(["center", "squash", "border"]),
        "mean": st.sampled_from([(0.5, 0.5, 0.5), (0.485, 0.456, 0.406)]),
        "std": st.sampled_from([(0.5, 0.5, 0.5), (0.229, 0.224, 0.225)]),
    }
)


@settings(max_examples=150)
@given(TIMM, SIDES, SIDES)
def test_timm(values: dict[str, Any], height: int, width: int) -> None:
    config = from_timm(values)
    image_HWC = photo(height, width)
    transform = oracles.timm().data.create_transform(**values)
    try:
        expected_CHW = transform(Image.fromarray(image_HWC))
    except ValueError as error:
        if "> 0" in str(error):
            return  # timm rounds a thin photo's side to 0, where we keep one row
        raise
    image_CHW, _ = Preprocess(config)(image_HWC)
    torch.testing.assert_close(image_CHW, expected_CHW, rtol=0, atol=1e-6)


SQUASHED = st.fixed_dictionaries({"height": MODEL_SIDES, "width": MODEL_SIDES})
SHORTEST = st.fixed_dictionaries({"shortest_edge": MODEL_SIDES})
FLAGS = {
    "resample": st.sampled_from([0, 1, 2, 3]),
    "do_rescale": st.booleans(),
    "do_normalize": st.booleans(),
    "image_mean": st.just([0.485, 0.456, 0.406]),
    "image_std": st.just([0.229, 0.224, 0.225]),
}


def assert_like_transformers(
    kind: str, values: dict[str, Any], height: int, width: int, tolerance: float = 1e-6
) -> None:
    image_HWC = photo(height, width)
    processor = getattr(oracles.transformers(), kind)(**values)
    (expected,) = processor(Image.fromarray(image_HWC), return_tensors="pt")["pixel_values"]
    config = from_transformers({"image_processor_type": kind} | values)
    image_CHW, _ = Preprocess(config)(image_HWC)
    whole = 1 if values.get("do_rescale", True) else 255  # the tolerance is for channels from 0 to 1
    torch.testing.assert_close(image_CHW, expected.float(), rtol=0, atol=tolerance * whole / 0.22)


@settings(max_examples=80)
@given(st.fixed_dictionaries(FLAGS | {"size": st.one_of(SQUASHED, SHORTEST)}), st.integers(4, 200), st.integers(4, 200))
def test_vit_image_processor(values: dict[str, Any], height: int, width: int) -> None:
    assert_like_transformers("ViTImageProcessorPil", values, height, width)


@settings(max_examples=80)
@given(
    st.sampled_from(["BitImageProcessorPil", "CLIPImageProcessorPil", "DeiTImageProcessorPil"]),
    st.fixed_dictionaries(
        FLAGS | {"size": st.one_of(SQUASHED, SHORTEST), "crop_size": SQUASHED, "do_resize": st.booleans()}
    ),
    st.integers(4, 200),
    st.integers(4, 200),
)
def test_cropping_image_processors(kind: str, values: dict[str, Any], height: int, width: int) -> None:
    assert_like_transformers(kind, values, height, width)


@settings(max_examples=30)
@given(st.sampled_from([32, 57, 384]), st.floats(0.5, 1), st.integers(4, 200), st.integers(4, 200))
def test_convnext_image_processor(edge: int, crop_pct: float, height: int, width: int) -> None:
    values = {"size": {"shortest_edge": edge}, "crop_pct": crop_pct}
    assert_like_transformers("ConvNextImageProcessorPil", values, height, width)


@settings(max_examples=40)
@given(
    st.fixed_dictionaries({"size": SQUASHED, "resample": st.sampled_from([2, 3])}),
    st.integers(4, 200),
    st.integers(4, 200),
)
def test_dinov3_image_processor(values: dict[str, Any], height: int, width: int) -> None:
    """It resizes floats with torch, whose filter weights are of single precision (and wrong for a width of 1)."""
    oracles.timm()  # which makes torchvision importable
    assert_like_transformers("DINOv3ViTImageProcessor", values, height, width, tolerance=5e-6)
