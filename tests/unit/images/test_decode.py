"""Every kind of file becomes an upright RGB image or one `ImageError`: good ones, odd ones, and hostile ones."""

import contextlib
import io
import json
import os
import pickle
import re
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
import typing
import warnings
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import GifImagePlugin, Image, ImageFile

from patchlight.errors import PatchlightError
from patchlight.images import decode as decode_module
from patchlight.images.decode import Decoded, ImageError, Reason, decode

BAD_IMAGES = Path(__file__).parents[4] / "shared" / "data" / "bad-images"
REASONS = typing.get_args(Reason)

# How an upright image is stored for each EXIF orientation.
STORED_AS = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def photo(height: int = 48, width: int = 64) -> Image.Image:
    """A smooth image whose four corners differ."""
    y_HW, x_HW = np.mgrid[0:height, 0:width] / max(height, width)
    channels = (255 * x_HW, 255 * y_HW, 127 * (1 + np.sin(9 * x_HW + 5 * y_HW)))
    return Image.fromarray(np.stack(channels, axis=-1).astype(np.uint8))


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def stored(image: Image.Image, orientation: int) -> tuple[Image.Image, Image.Exif]:
    """The image as a camera that was held so stores it, and the EXIF that says so."""
    exif = Image.Exif()
    exif[274] = orientation
    turn = STORED_AS[orientation]
    return (image if turn is None else image.transpose(turn)), exif


def pixels(decoded: Decoded) -> np.ndarray:
    return np.asarray(decoded.image)


def refusal(source: Any, **options: Any) -> ImageError:
    with pytest.raises(ImageError) as caught:
        decode(source, **options)
    assert caught.value.reason in REASONS
    assert f": {caught.value.reason} (" in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


def png(width: int, height: int, data: bytes, *, kind: int = 0, depth: int = 1, chunks: Sequence[bytes] = ()) -> bytes:
    """A PNG by hand: `kind` is its colour type, `data` its compressed rows, `chunks` stand before them."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + png_chunk(b"IDAT", data) + png_chunk(b"IEND", b"")


def png_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def black_png(width: int, height: int) -> bytes:
    """A black 1-bit PNG: a thousand times smaller than its rows."""
    row, deflate = bytes(1 + (width + 7) // 8), zlib.compressobj(9)
    return png(width, height, b"".join(deflate.compress(row) for _ in range(height)) + deflate.flush())


# Colours


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM"])
def test_lossless_formats_come_back_bit_for_bit(kind: str) -> None:
    decoded = decode(encoded(photo(), kind))
    assert (decoded.source_size, decoded.orientation, decoded.format) == ((48, 64), 1, kind)
    assert decoded.image.mode == "RGB"
    np.testing.assert_array_equal(pixels(decoded), np.asarray(photo()))


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "AVIF", "JPEG2000"])
def test_lossy_formats_come_back_nearly(kind: str) -> None:
    if kind not in decode_module._formats():
        pytest.skip(f"this Pillow has no {kind}")
    decoded = decode(encoded(photo(), kind))
    assert (decoded.source_size, decoded.format) == ((48, 64), kind)
    assert np.abs(pixels(decoded).astype(int) - np.asarray(photo())).mean() < 6


def test_a_path_a_string_bytes_and_an_image_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encoded(photo(), "PNG"))
    for source in (path, str(path), path.read_bytes(), photo()):
        np.testing.assert_array_equal(pixels(decode(source)), np.asarray(photo()))
    assert decode(photo()).format is None


def test_the_content_decides_and_not_the_name(tmp_path: Path) -> None:
    path = tmp_path / "really-a-png.jpg"
    path.write_bytes(encoded(photo(), "PNG"))
    assert decode(path).format == "PNG"


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_16_bit_greys_are_scaled_and_not_clipped(kind: str) -> None:
    grey_HW = np.linspace(0, 65535, 48 * 64).reshape(48, 64).astype(np.uint16)
    level_HW = pixels(decode(encoded(Image.fromarray(grey_HW), kind)))[..., 0]
    np.testing.assert_array_equal(level_HW, np.rint(grey_HW / 257))


def test_big_endian_16_bit_greys() -> None:
    grey = Image.frombytes("I;16B", (3, 1), struct.pack(">HHH", 0, 0x8080, 65535))
    assert pixels(decode(encoded(grey, "TIFF")))[0, :, 1].tolist() == [0, 128, 255]


@pytest.mark.parametrize(
    ("values", "levels"),
    [
        ([0, 32896, 65535], [0, 128, 255]),  # 16 bits in a wider container
        ([-1000, 0, 1000], [0, 128, 255]),  # stretched
        ([0, 2**30, 2**31 - 1], [0, 128, 255]),
        ([-5, -5, -5], [0, 0, 0]),
    ],
)
def test_32_bit_greys(values: list[int], levels: list[int]) -> None:
    grey = Image.fromarray(np.array([values], np.int32))
    for source in (grey, encoded(grey, "TIFF")):
        assert pixels(decode(source))[0, :, 0].tolist() == levels


@pytest.mark.parametrize(
    ("values", "levels"),
    [
        ([0, 0.5, 1], [0, 128, 255]),
        ([0, 100, 200], [0, 100, 200]),
        ([-1, 0, 1], [0, 128, 255]),
        ([1000, 1500, 2000], [0, 128, 255]),
        ([np.nan, 0.5, 1], [0, 128, 255]),
        ([-np.inf, 0.5, np.inf], [0, 128, 255]),
        ([np.nan, np.nan, np.nan], [0, 0, 0]),
        ([-3e38, 0, 3e38], [0, 128, 255]),
    ],
)
def test_float_greys_with_holes(values: list[float], levels: list[int]) -> None:
    grey = Image.fromarray(np.array([values], np.float32))
    assert pixels(decode(encoded(grey, "TIFF")))[0, :, 2].tolist() == levels


def test_cmyk_and_inverted_adobe_jpeg() -> None:
    red = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    jpeg = encoded(red, "JPEG", quality=95)
    start = jpeg.index(b"Adobe") - 4
    bare = jpeg[:start] + jpeg[start + 2 + struct.unpack(">H", jpeg[start + 2 : start + 4])[0] :]
    assert b"Adobe" not in bare
    for source in (
        red,
        encoded(red, "TIFF"),
        jpeg,
        bare,
    ):  # without a marker they are taken as inverted, as browsers do
        assert np.abs(pixels(decode(source)).astype(int) - (255, 0, 0)).max() <= 4


def transparent_images() -> dict[str, bytes]:
    """Two pixels: the left one opaque black, the right one transparent."""
    rgba = Image.fromarray(np.array([[[0, 0, 0, 255], [90, 90, 90, 0]]], np.uint8))
    palette = Image.fromarray(np.array([[0, 1]], np.uint8))
    palette.putpalette([0, 0, 0, 90, 90, 90])
    grey = Image.fromarray(np.array([[0, 90]], np.uint8))
    deep = zlib.compress(b"\0" + struct.pack(">HH", 0, 300))
    return {
        "RGBA": encoded(rgba, "PNG"),
        "LA": encoded(rgba.convert("LA"), "PNG"),
        "palette PNG": encoded(palette, "PNG", transparency=1),
        "palette GIF": encoded(palette, "GIF", transparency=1),
        "palette alphas": encoded(palette, "PNG", transparency=bytes([255, 0])),
        "grey tRNS": encoded(grey, "PNG", transparency=90),
        "RGB tRNS": encoded(grey.convert("RGB"), "PNG", transparency=(90, 90, 90)),
        "16-bit grey tRNS": png(2, 1, deep, depth=16, chunks=[png_chunk(b"tRNS", struct.pack(">H", 300))]),
        "WebP": encoded(rgba, "WEBP", lossless=True),
        "TIFF": encoded(rgba, "TIFF"),
    }


@pytest.mark.parametrize("name", transparent_images())
def test_transparency_shows_the_background(name: str) -> None:
    source = transparent_images()[name]
    assert pixels(decode(source)).tolist() == [[[0, 0, 0], [255, 255, 255]]]
    assert pixels(decode(source, background=(9, 8, 7))).tolist() == [[[0, 0, 0], [9, 8, 7]]]


def test_half_transparency_is_mixed() -> None:
    half = Image.new("RGBA", (1, 1), (0, 0, 0, 128))
    assert pixels(decode(half))[0, 0].tolist() == [127, 127, 127]


def test_16_bit_colours_with_a_key_colour() -> None:
    row = zlib.compress(b"\0" + struct.pack(">6H", 65535, 0, 0, 300, 300, 300))
    key = png_chunk(b"tRNS", struct.pack(">3H", 300, 300, 300))
    assert pixels(decode(png(2, 1, row, kind=2, depth=16, chunks=[key]))).tolist() == [[[255, 0, 0], [1, 1, 1]]]


@pytest.mark.parametrize("mode", ["1", "L", "P", "YCbCr", "HSV", "RGBX", "PA"])
def test_other_modes(mode: str) -> None:
    decoded = decode(photo().convert("P" if mode == "PA" else mode).convert(mode))
    assert (decoded.image.mode, decoded.image.size) == ("RGB", (64, 48))


# Orientation and metadata


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP", "PIL"])
def test_all_orientations_look_the_same(kind: str, orientation: int) -> None:
    image, exif = stored(photo(), orientation)
    if kind == "PIL":
        source: Any = Image.open(io.BytesIO(encoded(image, "PNG", exif=exif)))
    else:
        source = encoded(image, kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))
    decoded = decode(source)
    assert (decoded.source_size, decoded.orientation) == ((48, 64), orientation)
    np.testing.assert_array_equal(pixels(decoded), np.asarray(photo()))
    again = decode(decoded.image)
    assert again.orientation == 1
    np.testing.assert_array_equal(pixels(again), np.asarray(photo()))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_jpeg_orientations_exact_and_fast(orientation: int) -> None:
    image, exif = stored(photo(240, 640), orientation)
    jpeg = encoded(image, "JPEG", exif=exif, quality=95)
    exact, fast = decode(jpeg), decode(jpeg, fast_size=(30, 40))
    assert exact.source_size == fast.source_size == (240, 640)
    assert exact.orientation == fast.orientation == orientation
    assert (exact.image.size, fast.image.size) == ((640, 240), (160, 60))
    for decoded in (exact, fast):
        upright = photo(240, 640).resize(decoded.image.size, Image.Resampling.BOX)
        assert np.abs(pixels(decoded).astype(int) - np.asarray(upright)).mean() < 2


@pytest.mark.parametrize("exif", [b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0", b"junk"])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_corrupt_exif_is_ignored(kind: str, exif: bytes) -> None:
    decoded = decode(encoded(photo(), kind, exif=exif))
    assert (decoded.orientation, decoded.source_size) == (1, (48, 64))


@pytest.mark.parametrize("value", [0, 9, 99, 65535])
def test_impossible_orientations_are_ignored(value: int) -> None:
    exif = Image.Exif()
    exif[274] = value
    for kind in ("JPEG", "PNG", "TIFF"):
        assert decode(encoded(photo(), kind, exif=exif)).orientation == 1


def test_corrupt_colour_profiles_are_ignored() -> None:
    for kind in ("JPEG", "PNG", "WEBP", "TIFF"):
        assert decode(encoded(photo(), kind, icc_profile=b"junk" * 9)).source_size == (48, 64)
    broken = png_chunk(b"iCCP", b"name\0\0not deflated")
    assert decode(png(8, 1, zlib.compress(b"\0\0"), chunks=[broken])).source_size == (1, 8)


# Animations


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_the_first_frame_of_an_animation(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "green", "blue")]
    options = {"lossless": True} if kind == "WEBP" else {}
    decoded = decode(encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options))
    np.testing.assert_array_equal(pixels(decoded), np.asarray(frames[0]))


def test_a_camera_file_with_a_second_picture_is_a_jpeg() -> None:
    mpo = encoded(photo(480, 640), "MPO", save_all=True, append_images=[Image.new("RGB", (640, 480))])
    with Image.open(io.BytesIO(mpo)) as image:
        assert image.format == "MPO"
    exact, fast = decode(mpo), decode(mpo, fast_size=(48, 64))
    assert exact.format == fast.format == "JPEG"
    assert (exact.image.size, fast.image.size) == ((640, 480), (160, 120))
    assert np.abs(pixels(exact).astype(int) - np.asarray(photo(480, 640))).mean() < 6


def test_ten_thousand_frames_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    gif = encoded(Image.new("P", (64, 64)), "GIF")
    frame = gif[gif.index(b",") : -1]
    gif = gif[:-1] + frame * 9_999 + b";"
    assert Image.open(io.BytesIO(gif)).n_frames == 10_000

    def count(self: GifImagePlugin.GifImageFile) -> int:
        raise AssertionError("the frames were counted")

    monkeypatch.setattr(GifImagePlugin.GifImageFile, "n_frames", property(count))
    start = time.perf_counter()
    assert decode(gif).source_size == (64, 64)
    assert time.perf_counter() - start < 0.5


# What is refused


def texts() -> dict[str, tuple[bytes, str, str]]:
    jpeg, whole = encoded(photo(), "JPEG"), encoded(photo(), "PNG")
    lfs = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    return {
        "empty": (b"", "empty", "no bytes"),
        "cut JPEG": (jpeg[: len(jpeg) // 2], "truncated", "truncated"),
        "cut PNG": (whole[: len(whole) // 2], "truncated", "truncated"),
        "JPEG without end": (jpeg[:-2], "truncated", "truncated"),
        "start of a JPEG": (jpeg[:5], "corrupt", "JPEG"),
        "start of a PNG": (whole[:12], "corrupt", "PNG"),
        "HTML": (b"\n<!DOCTYPE html><html><body>404</body></html>", "not-an-image", "HTML"),
        "PDF": (b"%PDF-1.7\n%\xe2\xe3", "unsupported", "PDF"),
        "EPS": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "unsupported", "EPS"),
        "SVG": (b'<?xml version="1.0"?>\n<svg xmlns="x"></svg>', "unsupported", "SVG"),
        "Git-LFS": (lfs, "not-an-image", "git lfs pull"),
        "text": ("Bäume\n".encode() * 400, "not-an-image", "text"),
        "noise": (bytes(range(128, 256)) * 9, "not-an-image", "not in an image format"),
        "zip": (b"PK\x03\x04" + bytes(60), "not-an-image", "archive"),
        "video": (b"\0\0\0\x18ftypisom" + bytes(60), "not-an-image", "video"),
    }


@pytest.mark.parametrize("name", texts())
def test_what_it_really_is(name: str, tmp_path: Path) -> None:
    content, reason, words = texts()[name]
    path = tmp_path / "photo.jpg"
    path.write_bytes(content)
    for source, named in ((content, "image"), (path, str(path))):
        error = refusal(source)
        assert error.reason == reason
        assert words in str(error)
        assert str(error).startswith(named + ": ")


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "WEBP", "BMP", "PPM", "AVIF", "JPEG2000"])
def test_half_a_file_is_refused(kind: str) -> None:
    if kind not in decode_module._formats():
        pytest.skip(f"this Pillow has no {kind}")
    content = encoded(photo(), kind)
    assert refusal(content[: len(content) // 2]).reason in ("truncated", "corrupt")


def test_no_ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that says when it is called stands in Ghostscript's place, and a real EPS is given another name."""
    for name in ("gs", "gswin64c"):
        (tmp_path / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/called\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    path = tmp_path / "eps.png"
    path.write_bytes(encoded(photo(), "EPS"))
    error = refusal(path)
    assert error.reason == "unsupported"
    assert "EPS" in str(error)
    assert not (tmp_path / "called").exists()


def test_heic_without_its_decoder_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    error = refusal(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(64))
    assert error.reason == "unsupported"
    assert "pip install 'patchlight[heic]'" in str(error)


def test_heic_where_its_decoder_is_installed() -> None:
    pillow_heif = pytest.importorskip("pillow_heif", reason="the extra patchlight[heic] is not installed")
    file = io.BytesIO()
    pillow_heif.from_pillow(photo()).save(file, quality=95)
    decoded = decode(file.getvalue())
    assert (decoded.source_size, decoded.format, decoded.image.mode) == ((48, 64), "HEIF", "RGB")
    assert np.abs(pixels(decoded).astype(int) - np.asarray(photo())).mean() < 6
    assert refusal(file.getvalue()[:100]).reason == "corrupt"
    assert "HEIF" not in Image.OPEN


def test_files_that_are_none(tmp_path: Path) -> None:
    folder, pipe, loop, nowhere = (tmp_path / name for name in ("folder.jpg", "pipe.jpg", "loop.jpg", "nowhere.jpg"))
    folder.mkdir()
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    nowhere.symlink_to(tmp_path / "absent")
    for path, reason, words in [
        (tmp_path / "absent.jpg", "missing", "no such file"),
        (nowhere, "unreadable", "is broken"),
        (tmp_path / "zero\0byte", "missing", "no such file"),
        (folder, "unreadable", "a folder"),
        (pipe, "unreadable", "a named pipe"),
        (loop, "unreadable", "form a loop"),
        (Path("/dev/zero"), "unreadable", "a device"),
        (tmp_path / ("x" * 300), "unreadable", "too long"),
    ]:
        error = refusal(path)
        assert error.reason == reason
        assert words in str(error)


def test_a_pipe_that_takes_a_file_s_place_does_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, regular = tmp_path / "pipe.jpg", os.stat(__file__)
    os.mkfifo(pipe)

    def too_late(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, too_late)
    monkeypatch.setattr(os, "stat", lambda *_, **__: regular)
    signal.alarm(5)
    try:
        assert "a named pipe" in str(refusal(str(pipe)))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as server:
        server.bind("s.jpg")
        assert stat.S_ISSOCK(os.stat("s.jpg").st_mode)
        assert "a socket" in str(refusal("s.jpg"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(tmp_path: Path) -> None:
    path = tmp_path / "secret.png"
    path.write_bytes(encoded(photo(), "PNG"))
    path.chmod(0)
    error = refusal(path)
    assert error.reason == "unreadable"
    assert "no permission" in str(error)


def test_permission_denied_by_the_system_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret.png"
    path.write_bytes(encoded(photo(), "PNG"))

    def deny(*_: Any) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", deny)
    error = refusal(path)
    assert (error.reason, error.detail) == ("unreadable", "no permission to read it")


@pytest.mark.parametrize("name", ["new\nline.jpg", "'quotes\".jpg", "<img onerror=x>.jpg", "=cmd|.jpg", "-x.jpg"])
def test_odd_names_stay_in_one_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(encoded(photo(), "PNG"))
    assert decode(path).source_size == (48, 64)
    path.write_bytes(b"no image")
    assert name.replace("\n", "\\n") in str(refusal(path))


def test_a_name_that_is_not_utf_8(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff.jpg"
    Path(os.fsdecode(path)).write_bytes(b"no image")
    message = str(refusal(os.fsdecode(path)))
    assert message.encode("utf-8").isascii()
    assert "ff.jpg" in message


def test_errors_are_of_one_kind_and_travel_between_processes() -> None:
    error = refusal(b"no image")
    assert isinstance(error, PatchlightError)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.reason) == (str(error), error.reason)


@pytest.mark.parametrize(
    "raised",
    [
        OSError("x"), ValueError("x"), SyntaxError("x"), EOFError(), struct.error("x"), zlib.error("x"), MemoryError(),
        OverflowError("x"), TypeError("x"), KeyError("x"), IndexError("x"), RuntimeError("x\ny"), AssertionError(),
        NotImplementedError("x"), RecursionError("x"), Image.DecompressionBombError("x"), OSError(5, "Input/output"),
    ],
    ids=repr,
)  # fmt: skip
def test_whatever_pillow_raises(raised: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: ImageFile.ImageFile) -> None:
        raise raised

    content = encoded(photo(), "BMP")
    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    refusal(content)


# Sizes


@pytest.mark.parametrize("size", [(1, 1), (1, 20000), (20000, 1)])
def test_extreme_shapes(size: tuple[int, int]) -> None:
    for kind in ("PNG", "JPEG"):
        decoded = decode(encoded(Image.new("L", size, 77), kind), fast_size=(224, 224))
        assert decoded.image.size == size
        assert pixels(decoded)[0, 0].tolist() == [77, 77, 77]


def test_the_limit_can_be_set_and_is_named() -> None:
    content = encoded(photo(), "PNG")
    assert decode(content, max_pixels=48 * 64).source_size == (48, 64)
    error = refusal(content, max_pixels=48 * 64 - 1)
    assert error.reason == "too-large"
    assert "64x48" in str(error)
    assert "max_pixels" in str(error)
    assert refusal(photo(), max_pixels=9).reason == "too-large"


def test_the_largest_cameras_stay_under_the_limit() -> None:
    assert 14204 * 10652 < decode_module.MAX_PIXELS < 178_000_000 < Image.MAX_IMAGE_PIXELS * 2


def test_warnings_are_silent_and_the_filters_are_restored() -> None:
    """Pillow warns of 100 megapixels when it opens them; pytest would make an error of that."""
    content = black_png(10_000, 10_000)
    with pytest.warns(Image.DecompressionBombWarning):
        Image.open(io.BytesIO(content)).close()
    before = list(warnings.filters)
    barrier = threading.Barrier(4)
    failures: list[BaseException] = []

    def work() -> None:
        barrier.wait()
        for _ in range(50):
            try:
                decode(content, max_pixels=10**6)
            except ImageError:
                pass
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert list(warnings.filters) == before
    assert decode_module._inside == 0


def test_pillow_itself_is_left_as_it_was() -> None:
    before = (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, Image.WARN_POSSIBLE_FORMATS)
    for content in (encoded(photo(), "JPEG"), b"no image", encoded(photo(), "JPEG")[:300]):
        with contextlib.suppress(ImageError):
            decode(content, fast_size=(9, 9))
    assert before == (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, Image.WARN_POSSIBLE_FORMATS)


@given(st.integers(16, 900), st.integers(16, 900), st.integers(1, 300), st.integers(1, 300), st.integers(1, 8))
@settings(max_examples=40)
def test_fast_decoding_keeps_twice_the_size(height: int, width: int, rows: int, columns: int, orientation: int) -> None:
    image, exif = stored(Image.new("RGB", (width, height)), orientation)
    decoded = decode(encoded(image, "JPEG", exif=exif), fast_size=(rows, columns))
    assert decoded.source_size == (height, width)
    assert decoded.image.height >= min(height, 2 * rows)
    assert decoded.image.width >= min(width, 2 * columns)
    assert width / decoded.region.width == height / decoded.region.height
    assert width / decoded.region.width in (1, 2, 4, 8)
    assert 0 <= decoded.image.width - decoded.region.width < 1
    assert 0 <= decoded.image.height - decoded.region.height < 1


def test_a_fast_size_of_nothing_is_refused() -> None:
    with pytest.raises(PatchlightError, match="fast_size"):
        decode(encoded(photo(), "JPEG"), fast_size=(0, 4))


# In a process of its own, with little memory

WORKER = """
import json, resource, signal, sys, time
from patchlight.images.decode import ImageError, decode
assert "torch" not in sys.modules
decode(bytes.fromhex(sys.argv[1]))  # the first image loads Pillow's formats
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = taken + (int(sys.argv[2]) << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for path in sys.argv[3:]:
    signal.alarm(5)  # kills the process
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, busy = time.perf_counter(), time.process_time()
    try:
        image = decode(path).image
        outcome = {"size": image.size, "mode": image.mode}
    except ImageError as error:
        outcome = {"message": str(error), "reason": error.reason}
    outcome["seconds"] = time.perf_counter() - start
    outcome["busy"] = time.process_time() - busy
    outcome["megabytes"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024
    signal.alarm(0)
    print(json.dumps(outcome), flush=True)
"""


def decode_apart(paths: Sequence[Path], megabytes: int = 1800) -> list[dict[str, Any]]:
    """One outcome a file, with that much memory for it.

    Where the process dies, the file it was at gets the blame and the next process goes on.
    """
    outcomes: list[dict[str, Any]] = []
    tiny = encoded(Image.new("L", (1, 1)), "PNG").hex()
    while len(outcomes) < len(paths):
        rest = [str(path) for path in paths[len(outcomes) :]]
        command = [sys.executable, "-c", WORKER, tiny, str(megabytes), *rest]
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # each of its threads reserves memory
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
        found = [json.loads(line) for line in done.stdout.splitlines()]
        outcomes += found
        if len(found) < len(rest):
            died = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit {done.returncode}"
            outcomes.append({"died": died, "stderr": done.stderr[-2000:]})
    return outcomes


@pytest.fixture(scope="module")
def bad_outcomes() -> dict[str, dict[str, Any]]:
    if not BAD_IMAGES.is_dir():
        pytest.skip("../shared/data/bad-images is not here")
    paths = sorted(path for path in BAD_IMAGES.iterdir() if path.name != "EXPECTED.tsv")
    assert len(paths) >= 64
    return dict(zip([path.name for path in paths], decode_apart(paths), strict=True))


def expected() -> list[tuple[str, str]]:
    table = BAD_IMAGES / "EXPECTED.tsv"
    lines = table.read_text().splitlines()[1:] if table.exists() else ["(absent)\t"]
    return [tuple(line.split("\t")) for line in lines]


@pytest.mark.parametrize(("name", "pillow"), expected())
def test_bad_images(name: str, pillow: str, bad_outcomes: dict[str, dict[str, Any]]) -> None:
    """What Pillow decodes is decoded, to the same size; what it does not, is refused with the file and the reason.

    There is no file on which we differ. The two TGA files are refused because of their format, which is not read here,
    where Pillow finds them damaged.
    """
    outcome = bad_outcomes[name]
    assert "died" not in outcome, outcome
    assert outcome["seconds"] < 5
    if ok := re.match(r"OK (\d+)x(\d+) ", pillow):
        assert outcome.get("size") == [int(ok[1]), int(ok[2])], outcome
        assert outcome["mode"] == "RGB"
    else:
        assert outcome["reason"] in REASONS
        assert outcome["message"].startswith(f"{BAD_IMAGES / name}: {outcome['reason']} (")


def test_a_death_is_blamed_on_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the worker killed, the test above would see it."""
    good = tmp_path / "good.png"
    good.write_bytes(encoded(photo(), "PNG"))
    killed = WORKER.replace("    try:", "    'kill' in path and signal.raise_signal(signal.SIGSEGV)\n    try:", 1)
    monkeypatch.setitem(globals(), "WORKER", killed)
    outcomes = decode_apart([good, tmp_path / "kill", good])
    assert [outcome.get("died") for outcome in outcomes] == [None, "SIGSEGV", None]


def bombs(folder: Path) -> list[Path]:
    jpeg = encoded(photo(), "JPEG")
    start = jpeg.index(b"\xff\xc0") + 5
    gif = encoded(photo(), "GIF")
    webp = encoded(photo(), "WEBP", lossless=True)
    bits = (16383 << 14 | 16383).to_bytes(4, "little")
    for name, content in {
        "178-megapixels.png": black_png(13_000, 13_700),
        "400-megapixels.png": black_png(20_000, 20_000),
        "4-gigapixels.jpg": jpeg[:start] + b"\xff\xdc\xff\xdc" + jpeg[start + 4 :],
        "4-gigapixels.gif": gif[:6] + b"\xff\xff\xff\xff" + gif[10:],
        "268-megapixels.webp": webp[:21] + bits + webp[25:],
    }.items():
        (folder / name).write_bytes(content)
    assert (folder / "178-megapixels.png").stat().st_size < 30_000
    return sorted(folder.iterdir())


def test_bombs_are_refused_before_they_are_decoded(tmp_path: Path) -> None:
    paths = bombs(tmp_path)
    for path, outcome in zip(paths, decode_apart(paths), strict=True):
        # An older libwebp refuses to look at such a file at all.
        reasons = ("too-large", "corrupt") if path.suffix == ".webp" else ("too-large",)
        assert outcome.get("reason") in reasons, (path, outcome)
        assert path.name.split("-")[0] in outcome["message"] or "gigapixels" in path.name
        assert "megapixels" in outcome["message"]
        assert outcome["busy"] < 0.05, (path, outcome)  # of the processor, which other tests share
        assert outcome["megabytes"] < 50, (path, outcome)


def test_huge_text_chunks(tmp_path: Path) -> None:
    """200 MB of text, as they are and compressed to 200 kB, in front of a picture of eight pixels."""
    length, pixel_row = 200_000_000, zlib.compress(b"\0\0")
    whole = png(8, 1, pixel_row)
    plain, squeezed = tmp_path / "plain.png", tmp_path / "squeezed.png"
    with plain.open("wb") as file:  # with a hole in the middle, which takes no room on the disk
        file.write(whole[:33] + struct.pack(">I", length) + b"tEXtkey\0")
        file.seek(33 + 8 + length)
        file.write(struct.pack(">I", zlib.crc32(bytes(length - 4), zlib.crc32(b"tEXtkey\0"))) + whole[33:])
    text = b"key\0\0" + zlib.compress(bytes(length), 1)
    squeezed.write_bytes(png(8, 1, pixel_row, chunks=[png_chunk(b"zTXt", text)]))
    behind = tmp_path / "behind.png"
    with behind.open("wb") as file:
        file.write(whole[:-12] + struct.pack(">I", length) + b"iTXt")
        file.truncate(len(whole) + length)
    plain_outcome, squeezed_outcome, behind_outcome = decode_apart([plain, squeezed, behind])
    assert squeezed_outcome.get("size") == [8, 1] or squeezed_outcome.get("reason") == "too-large"
    for outcome, kind in ((plain_outcome, "tEXt"), (behind_outcome, "iTXt")):
        assert outcome.get("reason") == "too-large", outcome
        assert f"200 MB besides its pixels, in a chunk {kind}" in outcome["message"]
        assert outcome["megabytes"] < 20, outcome
        assert outcome["busy"] < 0.05, outcome


def test_a_damaged_length_is_not_taken_for_a_large_chunk() -> None:
    content = png(8, 1, zlib.compress(b"\0\0"), chunks=[png_chunk(b"tEXt", b"key\0text")])
    place = content.index(b"tEXt") - 4
    assert refusal(content[:place] + b"\x7f\xff\xff\xff" + content[place + 4 :]).reason != "too-large"


def test_a_tiff_directory_that_loops(tmp_path: Path) -> None:
    tiff = bytearray(encoded(photo(), "TIFF"))
    (first,) = struct.unpack("<I", tiff[4:8])
    (entries,) = struct.unpack("<H", tiff[first : first + 2])
    after = first + 2 + 12 * entries
    tiff[after : after + 4] = struct.pack("<I", first)
    path = tmp_path / "loop.tif"
    path.write_bytes(tiff)
    (outcome,) = decode_apart([path])
    assert outcome.get("size") == [64, 48], outcome


def broken_fax() -> bytes:
    """A TIFF of which libtiff has a line to say for most of its rows."""
    noise_HW = np.random.default_rng(0).integers(0, 256, (100, 100), np.uint8)
    tiff = bytearray(encoded(Image.fromarray(noise_HW).convert("1"), "TIFF", compression="group4"))
    for place in range(100, 600, 50):
        tiff[place] ^= 255
    return bytes(tiff)


def test_libtiff_prints_nothing_and_gives_its_reason(capfd: pytest.CaptureFixture[str]) -> None:
    zipped = bytearray(encoded(photo(), "TIFF", compression="tiff_adobe_deflate"))
    zipped[20:30] = b"\xff" * 10
    broken, loud = bytes(zipped), broken_fax()

    def read(_: int) -> str:
        with contextlib.suppress(ImageError):
            decode(loud)
        return str(refusal(broken))

    with ThreadPoolExecutor(4) as threads:
        messages = set(threads.map(read, range(8)))
    assert len(messages) == 1
    assert re.fullmatch(r"image: corrupt \(ZIPDecode: Decoding error at scanline 0, .*[^.]\)", messages.pop())
    assert capfd.readouterr() == ("", "")
    with contextlib.suppress(OSError), Image.open(io.BytesIO(broken)) as image:  # another user of Pillow hears it
        image.load()
    assert "ZIPDecode" in capfd.readouterr().err


def test_too_little_memory_is_a_reason(tmp_path: Path) -> None:
    """16 megapixels with alpha need 64 MB to be read, as much for the background, and once more for the mixture."""
    path = tmp_path / "many.png"
    path.write_bytes(png(4000, 4000, zlib.compress(bytes((1 + 4000 * 4) * 4000), 1), kind=6, depth=8))
    (outcome,) = decode_apart([path])
    assert outcome.get("size") == [4000, 4000], outcome
    (outcome,) = decode_apart([path], megabytes=100)
    assert outcome.get("reason") == "too-large", outcome
    assert "memory" in outcome["message"]


# Mutations


def seeds() -> list[bytes]:
    small = photo(12, 16)
    exif = Image.Exif()
    exif[274] = 6
    return [
        encoded(small, "JPEG", exif=exif),
        encoded(small, "JPEG", progressive=True),
        encoded(small, "PNG", exif=exif, icc_profile=b"profile"),
        encoded(small.convert("P"), "PNG", transparency=3),
        encoded(small, "GIF"),
        encoded(small, "TIFF", exif=exif),
        encoded(small, "TIFF", compression="tiff_lzw"),
        encoded(small, "WEBP", exif=exif),
        encoded(small, "BMP"),
        encoded(small.convert("P"), "BMP"),
        encoded(Image.fromarray(np.zeros((4, 4), np.float32)), "TIFF"),
    ]


SEEDS = seeds()


@st.composite
def mutants(draw: st.DrawFn) -> bytes:
    content = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(1, 6))):
        # Most of what can go wrong stands in the header.
        place = draw(st.one_of(st.integers(0, min(200, len(content))), st.integers(0, len(content))))
        match draw(st.sampled_from(["flip", "cut", "insert", "set"])):
            case "flip" if place < len(content):
                content[place] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del content[place : place + draw(st.integers(1, 64))]
            case "insert":
                content[place:place] = draw(st.binary(min_size=1, max_size=8))
            case "set":
                content[place : place + 4] = draw(
                    st.sampled_from([b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff"])
                )
    return bytes(content)


@settings(max_examples=1500, suppress_health_check=list(HealthCheck), database=None)
@given(mutants())
def test_mutants_are_decoded_or_refused(content: bytes) -> None:
    with contextlib.suppress(ImageError):
        assert decode(content, max_pixels=10**6, fast_size=(4, 4)).image.convert("RGB").getpixel((0, 0))
