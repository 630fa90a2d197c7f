"""Masks: that they follow the subject's border at the photo's resolution, and never lose it."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from patchlight.geometry import Box
from patchlight.images import crop as crop_module
from patchlight.images.crop import Cut, cut_out
from patchlight.images.cutout import HeatMap

BOX = Box(200, 160, 600, 480)


def disc(size: tuple[int, int] = (800, 640)) -> tuple[Image.Image, Image.Image]:
    """A photo and the true mask of what is on it."""
    random = np.random.default_rng(0)
    level_HWC = random.integers(60, 110, (size[1] // 8, size[0] // 8, 3), dtype=np.uint8)
    image = Image.fromarray(level_HWC).resize(size, Image.Resampling.BICUBIC)
    mask = Image.new("L", size)
    ends = (BOX.left, BOX.top, BOX.right - 1, BOX.bottom - 1)
    ImageDraw.Draw(mask).ellipse(ends, 255)
    image.paste((210, 160, 40), mask=mask)
    return image, mask


def coarse_heat(mask: Image.Image) -> HeatMap:
    """As a model sees it: 16 x 16 patches."""
    return HeatMap(np.asarray(mask.resize((16, 16), Image.Resampling.BOX)), Box(0, 0, *mask.size))


def alpha_of(content: bytes) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    with Image.open(io.BytesIO(content)) as made:
        return np.asarray(made.getchannel("A"))


def overlap(one: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]", other: Image.Image) -> float:
    first, second = one >= 128, np.asarray(other) >= 128
    return float((first & second).sum() / (first | second).sum())


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_the_mask_follows_the_border_that_the_heat_is_too_coarse_for(tmp_path: Path, suffix: str) -> None:
    image, mask = disc()
    image.save(tmp_path / f"a.{suffix}")
    heat = coarse_heat(mask)
    (crop,) = cut_out(tmp_path / f"a.{suffix}", [BOX], Cut(cutout=True, margin=0.1), heat=heat)
    wanted = mask.crop(crop.region)
    by_heat = Image.fromarray(heat.levels_hw).resize(mask.size, Image.Resampling.BICUBIC).crop(crop.region)
    fits = overlap(alpha_of(crop.content), wanted)
    assert fits > 0.995
    assert overlap(np.asarray(by_heat), wanted) < 0.985
    # The border is as sharp as the photo's: hardly any pixel is neither.
    assert ((alpha_of(crop.content) > 20) & (alpha_of(crop.content) < 235)).mean() < 0.03


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_the_mask_of_a_turned_photo_lies_where_the_subject_does(tmp_path: Path, orientation: int) -> None:
    image, mask = disc()
    turn = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
    stored = image.transpose(turn[orientation]) if orientation in turn else image
    exif = Image.Exif()
    exif[0x112] = orientation
    stored.save(tmp_path / "a.jpg", exif=exif, quality=95)
    (crop,) = cut_out(
        tmp_path / "a.jpg", [BOX], Cut(cutout=True, exact=(300, 300), margin=0.1, fill=True), heat=coarse_heat(mask)
    )
    left, top, right, bottom = crop.region
    wanted = mask.crop(crop.region).resize((300, 300), Image.Resampling.BOX)
    assert (right - left, bottom - top) == (480, 480)
    assert overlap(alpha_of(crop.content), wanted) > 0.98


def test_where_the_photo_ends_the_crop_is_transparent(tmp_path: Path) -> None:
    image, mask = disc()
    image.crop((300, 0, 800, 640)).save(tmp_path / "a.png")
    box, heat = Box(0, 160, 300, 480), coarse_heat(mask.crop((300, 0, 800, 640)))
    (crop,) = cut_out(tmp_path / "a.png", [box], Cut(cutout=True, pad="white", margin=0.2), heat=heat)
    assert crop.region[0] == -60
    assert alpha_of(crop.content)[:, :60].max() == 0
    assert alpha_of(crop.content)[160, 70] > 200


def test_a_background_takes_the_place_of_the_others(tmp_path: Path) -> None:
    image, mask = disc()
    image.save(tmp_path / "a.png")
    how = Cut(cutout=True, background="#10c020", margin=0.1)
    (crop,) = cut_out(tmp_path / "a.png", [BOX], how, heat=coarse_heat(mask))
    with Image.open(io.BytesIO(crop.content)) as made:
        assert made.mode == "RGB"
        assert made.getpixel((2, 2)) == (0x10, 0xC0, 0x20)
        assert made.getpixel((made.width // 2, made.height // 2)) == (210, 160, 40)


def test_a_mask_that_would_lose_its_subject_is_the_box(tmp_path: Path) -> None:
    Image.new("RGB", (200, 200), (90, 90, 90)).save(tmp_path / "a.png")
    heat = HeatMap(np.zeros((16, 16), np.uint8), Box(0, 0, 200, 200))
    (crop,) = cut_out(tmp_path / "a.png", [Box(50, 50, 150, 150)], Cut(cutout=True), heat=heat)
    assert (alpha_of(crop.content) > 128).mean() > 0.9


def test_the_same_photo_gives_the_same_bytes(tmp_path: Path) -> None:
    image, mask = disc()
    image.save(tmp_path / "a.jpg")
    (one,), (other,) = (cut_out(tmp_path / "a.jpg", [BOX], Cut(cutout=True), heat=coarse_heat(mask)) for _ in range(2))
    assert one.content == other.content


def test_a_crop_that_is_too_rich_for_a_lossy_webp_is_written_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """From some 16 megapixels on what WebP writes first may exceed the 512 KB that it has for it."""
    part, settings = Image.effect_noise((4096, 4096), 12).convert("RGB"), crop_module._FAST_WEBP
    content = crop_module._encoded(part, "WEBP", None, None, settings)
    assert b"VP8 " in content[:64]
    monkeypatch.setattr(crop_module, "_RICHER_WEBP", crop_module._RICHER_WEBP[1:])
    assert b"VP8L" in crop_module._encoded(part, "WEBP", None, None, settings)[:64], "without loss there is no limit"
    monkeypatch.setattr(crop_module, "_RICHER_WEBP", ())
    with pytest.raises(ValueError, match=crop_module._TOO_RICH):
        crop_module._encoded(part, "WEBP", None, None, settings)
