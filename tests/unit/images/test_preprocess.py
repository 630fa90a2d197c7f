"""What the settings mean, and that the view says where every pixel came from."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from patchlight.config import PreprocessConfig, ViTConfig
from patchlight.errors import PatchlightError
from patchlight.geometry import Box
from patchlight.images.decode import ImageError, decode
from patchlight.images.preprocess import Preprocess
from patchlight.weights.preprocessing import from_timm, from_transformers

IDENTITY = {"mean": (0, 0, 0), "std": (1, 1, 1)}


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def smooth(height: int, width: int) -> Image.Image:
    coarse = Image.fromarray(noise(max(2, height // 40), max(2, width // 40)))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


# The config


def test_config_goes_through_json() -> None:
    config = PreprocessConfig(image_size=(96, 64), resize="border", crop_pct=0.9, mean=(0.5, 0.5, 0.5))
    again = PreprocessConfig.from_json(config.to_json())
    assert again == config
    assert again.fingerprint() == config.fingerprint()
    assert PreprocessConfig.from_dict({"image_size": 96, "std": [1, 1, 1]}).image_size == (96, 96)
    assert ViTConfig.from_json(ViTConfig().to_json()) == ViTConfig()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"crop_percent": 0.9}, "unknown setting 'crop_percent' for PreprocessConfig; did you mean 'crop_pct'?"),
        ({"architecture": "vit"}, "unknown setting 'architecture'"),
        ({"interpolation": "cubic"}, "interpolation='cubic' should be one of 'nearest', 'bilinear'"),
        ({"mean": [0.5, 0.5]}, r"mean=\(0.5, 0.5\) should be three numbers"),
        ({"mean": 0.5}, "mean=0.5 should be three numbers"),
        ({"std": [1, 0, 1]}, "must be more than 0"),
        ({"image_size": 0}, "must be more than 0"),
        ({"resize_size": [256, -1]}, "must be more than 0"),
        ({"resize_size": "256"}, "resize_size='256' should be a whole number, or two of them .* or None"),
        ({"crop_pct": 0}, "crop_pct=0.0 must be more than 0"),
        ({"crop_pct": float("nan")}, "crop_pct=nan should be a number"),
        ({"crop_pct": 0.9, "resize_size": 256}, "both say the size before the crop; leave one of them out"),
        ({"resize": "none", "crop_pct": 0.9}, "resize='none' needs a crop"),
        ({"resize": "none", "crop": "none"}, "resize='none' needs a crop"),
        ({"resize": "border", "crop": "none"}, "crop='none' goes with"),
        ({"crop": "none", "resize_size": 256}, "crop='none' goes with"),
    ],
)
def test_contradictions_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(PatchlightError, match=message):
        PreprocessConfig.from_dict(values)


def test_fingerprints_are_of_the_effect() -> None:
    by_share, by_size = PreprocessConfig(crop_pct=0.875), PreprocessConfig(resize_size=256)
    assert by_share.scaled_size == by_size.scaled_size == (256, 256)
    assert by_share.fingerprint() == by_size.fingerprint()
    assert by_share.differences(by_size) == []
    squashed = PreprocessConfig(resize="squash", crop="round"), PreprocessConfig(resize="squash", crop="none")
    assert squashed[0].fingerprint() == squashed[1].fingerprint()
    assert PreprocessConfig(crop_pct=1).fingerprint() == PreprocessConfig(crop_pct=1.0).fingerprint()


def test_fingerprints_stay_the_same_from_version_to_version() -> None:
    """They are stored beside models. If this fails, `PreprocessConfig._effect` has changed what was promised."""
    assert PreprocessConfig().fingerprint() == "d18b747a9398"
    assert PreprocessConfig(crop_pct=0.9, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)).fingerprint() == "afb9bd468405"


@pytest.mark.parametrize(
    "change",
    [
        {"image_size": 256},
        {"resize": "squash"},
        {"crop_pct": 0.9},
        {"resize_size": 256},
        {"interpolation": "bilinear"},
        {"resize_in": "floats"},
        {"crop": "floor"},
        {"mean": (0.5, 0.5, 0.5)},
        {"std": (0.5, 0.5, 0.5)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_difference_is_named(change: dict[str, Any]) -> None:
    (name,) = change
    changed = PreprocessConfig(**change)
    assert changed.fingerprint() != PreprocessConfig().fingerprint()
    (line,) = PreprocessConfig().differences(changed)
    assert line.startswith(f"{name} is {getattr(PreprocessConfig(), name)!r} here and {getattr(changed, name)!r} there")
    assert PreprocessConfig().differences(PreprocessConfig()) == []


# The images


def test_values_are_normalised_and_of_the_asked_shape() -> None:
    config = PreprocessConfig(image_size=(32, 48), mean=(0.1, 0.2, 0.3), std=(0.5, 1, 2))
    image_CHW, view = Preprocess(config)(Image.new("RGB", (96, 64), (255, 0, 51)))
    assert (image_CHW.dtype, tuple(image_CHW.shape), image_CHW.is_contiguous()) == (torch.float32, (3, 32, 48), True)
    torch.testing.assert_close(image_CHW[:, 5, 7], torch.tensor([1.8, -0.2, -0.05]))
    assert (view.source_size, view.model_size, view.scale) == ((64, 96), (32, 48), (0.5, 0.5))


@pytest.mark.parametrize("resize_in", ["bytes", "floats"])
def test_a_batch_is_the_same_to_the_bit(resize_in: str) -> None:
    preprocess = Preprocess(PreprocessConfig(image_size=(32, 40), resize_in=resize_in))
    photos = [decode(Image.fromarray(noise(50 + number, 70))) for number in range(3)]
    images_BCHW = preprocess.batch([preprocess.levels(photo)[0] for photo in photos], torch.device("cpu"))
    assert images_BCHW.is_contiguous()
    assert torch.equal(images_BCHW, torch.stack([preprocess(photo)[0] for photo in photos]))


def test_arrays_images_and_decoded_are_the_same() -> None:
    array_HWC = noise(50, 70)
    preprocess = Preprocess(PreprocessConfig(image_size=32))
    png = io.BytesIO()
    Image.fromarray(array_HWC).save(png, "PNG")
    expected, view = preprocess(array_HWC)
    for photo in (Image.fromarray(array_HWC), decode(png.getvalue())):
        image_CHW, other_view = preprocess(photo)
        assert torch.equal(image_CHW, expected)
        assert other_view == view


@pytest.mark.parametrize(
    "photo",
    [
        np.zeros((4, 4), np.uint8),
        np.zeros((4, 4, 4), np.uint8),
        np.zeros((0, 4, 3), np.uint8),
        np.zeros((4, 4, 3), np.float32),
        None,
    ],
    ids=["grey", "rgba", "empty", "float", "none"],
)
def test_other_things_are_refused(photo: Any) -> None:
    with pytest.raises(PatchlightError, match="photo is"):
        Preprocess(PreprocessConfig())(photo)


def test_the_array_is_not_changed() -> None:
    array_HWC = noise(32, 32)
    before = array_HWC.copy()
    image_CHW, _ = Preprocess(PreprocessConfig(image_size=32))(array_HWC)
    image_CHW.zero_()
    np.testing.assert_array_equal(array_HWC, before)


def test_border_is_filled_with_the_mean_colour() -> None:
    config = PreprocessConfig(image_size=40, resize="border", mean=(0.2, 0.4, 0.6), std=(1, 1, 1))
    image_CHW, view = Preprocess(config)(np.full((10, 20, 3), 255, np.uint8))
    assert view.to_model(Box(0, 0, 20, 10)) == Box(0, 10, 40, 30)
    assert image_CHW[:, :10].abs().max() < 1e-6
    assert image_CHW[:, 30:].abs().max() < 1e-6
    torch.testing.assert_close(image_CHW[:, 10:30], (1 - torch.tensor(config.mean))[:, None, None].expand(3, 20, 40))


def test_without_a_crop_the_size_follows_the_photo() -> None:
    image_CHW, view = Preprocess(PreprocessConfig(image_size=20, crop="none"))(noise(40, 90))
    assert tuple(image_CHW.shape) == (3, 20, 45)
    assert view.seen == Box(0, 0, 90, 40)


def test_without_a_resize_the_middle_is_cut_out() -> None:
    array_HWC = noise(40, 90)
    config = PreprocessConfig(image_size=20, resize="none", **IDENTITY)
    image_CHW, view = Preprocess(config)(array_HWC)
    np.testing.assert_array_equal((255 * image_CHW).round().byte().permute(1, 2, 0), array_HWC[10:30, 35:55])
    assert view.seen == Box(35, 10, 55, 30)


@pytest.mark.parametrize("size", [(1, 1), (1, 20000), (20000, 1), (3, 5000)])
@pytest.mark.parametrize("resize", ["shortest", "squash", "border"])
def test_extreme_shapes(size: tuple[int, int], resize: Any) -> None:
    """Covered by its shortest side, a row of 20,000 pixels would have a billion of them."""
    image_CHW, view = Preprocess(PreprocessConfig(image_size=224, resize=resize, **IDENTITY))(
        np.full((*size, 3), 51, np.uint8)
    )
    assert tuple(image_CHW.shape) == (3, 224, 224)
    torch.testing.assert_close(image_CHW.amax((1, 2)), torch.full((3,), 0.2))
    assert view.seen.area > 0


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos"])
def test_the_way_for_long_strips_is_the_same(interpolation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    preprocess = Preprocess(
        PreprocessConfig(image_size=(40, 24), crop_pct=0.9, interpolation=interpolation, **IDENTITY)
    )
    for size in ((33, 91), (120, 50), (60, 61)):
        expected, _ = preprocess(noise(*size))
        with monkeypatch.context() as patch:
            patch.setattr("patchlight.images.preprocess._MAX_RESIZED_PIXELS", 0)
            image_CHW, _ = preprocess(noise(*size))
        assert (image_CHW - expected).abs().max() < 1.5 / 255  # a level that lies between two may fall either way
        assert (image_CHW != expected).float().mean() < 0.05


@pytest.mark.parametrize("resize_in", ["bytes", "floats"])
def test_levels_and_parts_are_not_normalised(resize_in: Any) -> None:
    config = PreprocessConfig(image_size=(40, 24), crop_pct=0.9, resize_in=resize_in)
    photo = decode(smooth(120, 90))
    level_HWC, view = Preprocess(config).levels(photo)
    image_CHW, expected_view = Preprocess(config)(photo)
    assert view == expected_view
    mean_C, std_C = torch.tensor(config.mean), torch.tensor(config.std)
    normalised_HWC = (torch.from_numpy(level_HWC.copy()).float() / 255 - mean_C) / std_C
    torch.testing.assert_close(normalised_HWC.permute(2, 0, 1), image_CHW)
    part_HWC = Preprocess(config).part(photo, Box(10.5, 20, 70, 99.25))
    expected_HWC = np.asarray(photo.image.resize((24, 40), Image.Resampling.BICUBIC, (10.5, 20, 70, 99.25)))
    assert part_HWC.dtype == level_HWC.dtype == (np.uint8 if resize_in == "bytes" else np.float32)
    assert np.abs(part_HWC.clip(0, 255) - expected_HWC.astype(np.float32)).max() <= (0 if resize_in == "bytes" else 1)


CONFIGS = st.builds(
    PreprocessConfig,
    image_size=st.tuples(st.integers(24, 64), st.integers(24, 64)),
    resize=st.sampled_from(["shortest", "squash", "border"]),
    crop_pct=st.sampled_from([0.8, 0.875, 1.0]),
    interpolation=st.just("bilinear"),
    crop=st.sampled_from(["round", "floor"]),
    mean=st.just((0.0, 0.0, 0.0)),
    std=st.just((1.0, 1.0, 1.0)),
)


@settings(max_examples=60)
@given(CONFIGS, st.integers(60, 300), st.integers(60, 300), st.integers(1, 8), st.floats(0.3, 0.7), st.floats(0.3, 0.7))
def test_the_view_finds_a_mark(
    config: PreprocessConfig, height: int, width: int, orientation: int, across: float, down: float
) -> None:
    """A white square is painted into a black photo; the model's image has its centre of mass where the view says."""
    side = min(height, width) // 6
    x, y = round(across * (width - side)), round(down * (height - side))
    array_HWC = np.zeros((height, width, 3), np.uint8)
    array_HWC[y : y + side, x : x + side] = 255
    photo = Image.fromarray(array_HWC)
    turn = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}.get(orientation)  # how a camera stores it
    photo = photo if turn is None else photo.transpose(Image.Transpose(turn))
    photo.getexif()[274] = orientation
    image_CHW, view = Preprocess(config)(photo)
    assert (view.source_size, view.orientation) == ((height, width), orientation)
    mark = view.to_model(Box(x, y, x + side, y + side))
    rows, columns = config.image_size
    if mark.clip(view.model_size) != mark:
        return  # the crop has cut it
    level_HW = image_CHW[0].double()
    centre_x = (level_HW.sum(0) * (torch.arange(columns) + 0.5)).sum() / level_HW.sum()
    centre_y = (level_HW.sum(1) * (torch.arange(rows) + 0.5)).sum() / level_HW.sum()
    assert float(centre_x) == pytest.approx((mark.left + mark.right) / 2, abs=0.35)
    assert float(centre_y) == pytest.approx((mark.top + mark.bottom) / 2, abs=0.35)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [(1200, 1600), (1203, 1609), (1607, 901)])
def test_fast_decoding_is_within_two_grey_levels_and_has_the_same_view(size: tuple[int, int], orientation: int) -> None:
    jpeg, exif = io.BytesIO(), Image.Exif()
    exif[274] = orientation
    smooth(*size).save(jpeg, "JPEG", quality=92, exif=exif)
    config = PreprocessConfig(image_size=112, crop_pct=0.875, **IDENTITY)
    exact = decode(jpeg.getvalue())
    fast = decode(jpeg.getvalue(), fast_size=config.scaled_size)
    assert fast.image.width < exact.image.width
    (exact_CHW, exact_view), (fast_CHW, fast_view) = Preprocess(config)(exact), Preprocess(config)(fast)
    assert fast_view == exact_view
    assert 255 * (fast_CHW - exact_CHW).abs().mean() < 2


# Other people's settings


def test_timm_settings() -> None:
    config = from_timm(
        {"input_size": [3, 384, 384], "crop_pct": 1.0, "crop_mode": "squash", "url": "x", "classifier": "head"}
    )
    assert config == PreprocessConfig(image_size=384, resize="squash")
    assert from_timm({}) == PreprocessConfig(crop_pct=0.875)
    assert from_timm({"input_size": (3, 224, 224), "interpolation": "bicubic"}).interpolation == "bicubic"
    assert (
        from_timm({"input_size": (3, 224, 320), "interpolation": "bicubic"}).interpolation == "bilinear"
    )  # as timm does


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"input_size": [224, 224]}, "input_size"),
        ({"interpolation": "random"}, "interpolation"),
        ({"crop_mode": "corner"}, "crop_mode"),
        ({"crop_border_pixels": 4}, "crop_border_pixels"),
        ({"mean": [0.5]}, "mean"),
        ({"std": ["a", "b", "c"]}, "std"),
        ({"crop_pct": "1"}, "crop_pct"),
    ],
)
def test_timm_settings_that_cannot_be_followed(values: dict[str, Any], field: str) -> None:
    with pytest.raises(PatchlightError, match=field):
        from_timm(values)


HALF = (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("values", "config"),
    [
        (  # google/vit-base-patch16-224, from before the files named their class
            {"do_normalize": True, "do_resize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": 224},
            {"resize": "squash", "interpolation": "bilinear", "crop": "none", "mean": HALF, "std": HALF},
        ),
        (
            {"feature_extractor_type": "ViTFeatureExtractor", "size": 384, "resample": 3},
            {"image_size": 384, "resize": "squash", "crop": "none", "mean": HALF, "std": HALF},
        ),
        (
            {
                "image_processor_type": "ViTImageProcessorFast",
                "size": {"height": 96, "width": 64},
                "do_normalize": False,
            },
            {"image_size": (96, 64), "resize": "squash", "interpolation": "bilinear", "crop": "none"} | IDENTITY,
        ),
        (  # facebook/dinov2-base
            {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 256}, "crop_size": 224}
            | {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]},
            {"resize_size": 256, "crop": "floor"},
        ),
        (
            {"feature_extractor_type": "CLIPFeatureExtractor", "size": 336, "crop_size": 336, "resample": 3}
            | {"image_mean": HALF, "image_std": HALF},
            {"image_size": 336, "resize_size": 336, "crop": "floor", "mean": HALF, "std": HALF},
        ),
        (
            {"image_processor_type": "CLIPImageProcessor", "do_resize": False, "crop_size": {"height": 9, "width": 8}}
            | {"image_mean": HALF, "image_std": HALF},
            {"image_size": (9, 8), "resize": "none", "crop": "floor", "mean": HALF, "std": HALF},
        ),
        (
            {
                "image_processor_type": "BitImageProcessor",
                "do_center_crop": False,
                "image_mean": HALF,
                "image_std": HALF,
            },
            {"crop": "none", "mean": HALF, "std": HALF},
        ),
        (
            {"image_processor_type": "DINOv3ViTImageProcessorFast", "default_to_square": True, "crop_size": None}
            | {"do_center_crop": None, "do_pad": None, "device": None, "data_format": "channels_first"},
            {"resize": "squash", "interpolation": "bilinear", "resize_in": "floats", "crop": "none"},
        ),
        (
            {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 224}, "crop_pct": 0.875},
            {"resize_size": 256, "crop": "floor", "mean": HALF, "std": HALF},
        ),
        (
            {"image_processor_type": "ConvNextImageProcessor"},
            {"image_size": 384, "resize": "squash", "crop": "none", "mean": HALF, "std": HALF},
        ),
        (
            {"image_processor_type": "ViTImageProcessor", "do_rescale": False, "image_mean": [127.5] * 3}
            | {"image_std": [127.5] * 3},
            {"resize": "squash", "interpolation": "bilinear", "crop": "none", "mean": HALF, "std": HALF},
        ),
    ],
    ids=lambda value: str(value.get("image_processor_type", value.get("feature_extractor_type", "")))[:20],
)
def test_transformers_settings(values: dict[str, Any], config: dict[str, Any]) -> None:
    assert from_transformers(json.loads(json.dumps(values))) == PreprocessConfig(**config)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"image_processor_type": "SamImageProcessor"}, "image_processor_type='SamImageProcessor'"),
        ({"size": {"shortest_edge": 224}}, "image_processor_type"),
        ({"size": {"longest_edge": 224}}, "size"),
        ({"size": {"height": 224}}, "size"),
        ({"size": "224"}, "size"),
        ({"size": 0}, "size"),
        ({"size": 224.5}, "size"),
        ({"resample": 5}, "resample=5"),
        ({"resample": "bicubic"}, "resample"),
        ({"do_resize": "yes"}, "do_resize"),
        ({"do_resize": False}, "do_resize"),
        ({"do_pad": True}, "do_pad"),
        ({"rescale_factor": 0}, "rescale_factor"),
        ({"image_mean": [0.5, 0.5]}, "image_mean"),
        ({"image_std": [0.5, 0.5, 0]}, "std"),
        ({"image_processor_type": "ViTImageProcessor", "do_center_crop": True}, "crop_size"),
        ({"image_processor_type": "CLIPImageProcessor", "crop_size": {"shortest_edge": 224}}, "crop_size"),
        ({"image_processor_type": "ConvNextImageProcessor", "crop_pct": 0}, "crop_pct"),
    ],
)
def test_transformers_settings_that_cannot_be_followed(values: dict[str, Any], field: str) -> None:
    with pytest.raises(PatchlightError, match=field):
        from_transformers(values)


def test_a_path_is_read_upright(tmp_path: Path) -> None:
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 50, 3), dtype=np.uint8))
    exif = photo.getexif()
    exif[0x0112] = 6
    photo.save(tmp_path / "turned.png", exif=exif)
    preprocess = Preprocess(PreprocessConfig(image_size=16))
    image, view = preprocess(tmp_path / "turned.png")
    assert view.source_size == (50, 30)
    assert torch.equal(image, preprocess(str(tmp_path / "turned.png"))[0])
    assert torch.equal(image, preprocess(photo.transpose(Image.Transpose.ROTATE_270))[0])
    with pytest.raises(ImageError, match="missing"):
        preprocess("a.jpg")
