"""From a file or bytes to an upright RGB image, or one sentence that says why not.

A photo looks here as a viewer shows it: turned as its EXIF orientation says, 16-bit greys scaled to 8 bits,
transparent pixels over a background (white unless told), the first frame of an animation. Colour profiles are not
applied, as in the libraries that the models were trained with. Nothing here imports torch.
"""

import codecs
import contextlib
import errno
import importlib
import io
import os
import re
import stat
import struct
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, UnidentifiedImageError

from patchlight.errors import PatchlightError
from patchlight.files import printable
from patchlight.geometry import Box, Size, fit_inside, upright
from patchlight.images import libtiff
from patchlight.images.containers import is_elsewhere, read_elsewhere
from patchlight.remote import Unreachable

Reason = Literal[
    "missing",  # there is no such file
    "unreadable",  # not a file, or one that may not or cannot be read
    "empty",  # no bytes
    "not-an-image",  # something else: a web page, a text, a Git-LFS pointer
    "unsupported",  # an image or document of a kind that is not read here
    "truncated",  # the data ends before the picture does
    "corrupt",  # damaged in another way
    "too-large",  # more pixels or memory than allowed
]

PHOTO_SUFFIXES = frozenset(
    f".{suffix}"
    for suffix in (
        *("jpg", "jpeg", "jpe", "jfif", "mpo", "png", "webp", "bmp", "gif", "tif", "tiff"),
        *("ppm", "pgm", "pbm", "pnm", "jp2", "j2k", "avif", "heic", "heif"),
    )
)
"""Of the files in folders that are taken for photos."""

MAX_PIXELS = 160_000_000
"""More than any one-shot camera's 150 megapixels. Pillow's own limit of 179 million stays in force above it."""

# Formats that start with a signature and are decoded in this process: no EPS or PDF, which start Ghostscript, and no
# TGA, which any bytes may look like. MPO is a camera's JPEG with more pictures behind it.
_PLUGINS = {
    "JPEG": "JpegImagePlugin",
    "MPO": "MpoImagePlugin",
    "PNG": "PngImagePlugin",
    "WEBP": "WebPImagePlugin",
    "TIFF": "TiffImagePlugin",
    "GIF": "GifImagePlugin",
    "BMP": "BmpImagePlugin",
    "PPM": "PpmImagePlugin",
    "JPEG2000": "Jpeg2KImagePlugin",
    "AVIF": "AvifImagePlugin",
}

TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""How an image that is stored with an EXIF orientation is put upright."""

_PNG = b"\x89PNG\r\n\x1a\n"

_VISIBLE = 26
"""Of 255: what is more transparent is no part of the subject; a soft shadow is one."""

_LEAST_TRANSPARENT = 0.05
"""The share of a photo that is transparent where that is its background, and not rounded corners."""

_ALPHA_SIDE = 512
"""Pixels of the longer side at which transparency is kept beside a photo."""

LONGEST_CHUNK = 32_000_000
"""Bytes of what a PNG holds besides pixels, in one piece: profiles and XMP have far less, and Pillow reads it whole."""

Colour8 = tuple[int, int, int]
"""(red, green, blue), 0 to 255."""


class ImageError(PatchlightError):
    """An image that cannot be used. `reason` is one of the few words in `Reason`; the message names the file too."""

    def __init__(self, name: str, reason: Reason, detail: str) -> None:
        super().__init__(f"{name}: {reason} ({detail})")
        self.name = name
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.reason, self.detail)  # it comes back whole from a pool's worker


@dataclass(frozen=True, slots=True, eq=False)
class Alpha:
    """Where a photo is not transparent."""

    box: Box
    """Around all that can be seen, in pixels of the upright photo."""
    levels: Image.Image
    """L, 255 where it is opaque; it covers the whole upright photo, and is smaller."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """An upright RGB image and where it came from."""

    image: Image.Image  # RGB, upright; smaller than the source if it was decoded fast
    source_size: Size  # (height, width) of the whole upright image
    orientation: int  # the EXIF orientation that was applied, 1 to 8
    format: str | None  # "JPEG", "PNG", ...; None for an image that came from no file
    # The part of `image` that holds the source: all of it, except that a photo whose sides do not divide by 8 ends
    # inside the last pixels when it is decoded fast.
    region: Box
    alpha: Alpha | None = None  # of a photo whose background is transparent


Photo = str | os.PathLike[str] | bytes | Image.Image | npt.NDArray[np.uint8] | Decoded
"""What every function takes for a photo: a path, the bytes of a file, a Pillow image, an array HWC uint8 of RGB, or
what `decode` gave."""


def listed(photos: Photo | Iterable[Photo]) -> tuple[list[Photo], bool]:
    """One photo or many as a list, and whether it was one; no photo is opened."""
    if isinstance(photos, str | os.PathLike | bytes | Image.Image | np.ndarray | Decoded):
        return [photos], True
    if hasattr(photos, "preprocess"):
        raise PatchlightError("photos come first, and then the model")
    if not isinstance(photos, Iterable) or isinstance(photos, Mapping | io.IOBase):
        raise PatchlightError(_no_photo(photos))
    several = list(photos)
    if not several:
        raise PatchlightError("the list of photos is empty; give one or more")
    return several, False


def _no_photo(given: object) -> str:
    kind = "a list of several" if isinstance(given, Sequence) else type(given).__name__
    forms = "a path, the bytes of a file, a Pillow image, an array HWC uint8, or what pl.decode gave"
    return f"a photo is {forms}, not {kind}"


def _from_array(array: npt.NDArray[Any]) -> Image.Image:
    if array.dtype == np.uint8 and array.ndim == 3 and array.shape[2] == 3 and 0 not in array.shape:
        return Image.fromarray(array)
    remedy = "convert it, or pass a Pillow image"
    if array.dtype == np.uint8 and array.ndim == 4 and array.shape[3] == 3:
        remedy = "pass list(array) for several photos"
    elif array.ndim == 3 and array.shape[0] == 3 and array.shape[2] != 3:
        remedy = "transpose it with array.transpose(1, 2, 0)" + ("" if array.dtype == np.uint8 else ", and convert it")
    raise PatchlightError(
        f"an array of a photo is (height, width, 3) uint8, not {tuple(array.shape)} {array.dtype}; {remedy}"
    )


def decode(
    source: Photo,
    *,
    fast_size: Size | None = None,
    max_pixels: int = MAX_PIXELS,
    background: Colour8 = (255, 255, 255),
) -> Decoded:
    """Decode a photo, see `Photo`; raises `ImageError` for one that cannot be used. What is decoded already stays as it
    is.

    `fast_size` is the (height, width) that the image will be scaled to. A JPEG is then decoded at a half, a quarter or
    an eighth of its size, which is several times faster (twice, if it is progressive), and stays at least twice as
    large as `fast_size`. Other formats, and PIL images, are decoded whole.
    """
    if isinstance(source, Decoded):
        return source
    if isinstance(source, np.ndarray):
        source = _from_array(source)
    if not isinstance(source, str | os.PathLike | bytes | Image.Image):
        raise PatchlightError(_no_photo(source))
    name = "image" if isinstance(source, bytes | Image.Image) else printable(os.fspath(source))
    if fast_size is not None and min(fast_size) < 1:
        raise PatchlightError(f"fast_size={fast_size} must be more than 0; it is the (height, width) to scale to")
    with contextlib.ExitStack() as stack:
        said = stack.enter_context(quiet())
        try:
            if isinstance(source, Image.Image):
                return _decode_open(source, name, None, max_pixels, background)
            file = stack.enter_context(io.BytesIO(source) if isinstance(source, bytes) else open_file(source, name))
            image = stack.enter_context(open_image(file, name))
            return _decode_open(image, name, fast_size, max_pixels, background)
        except ImageError:
            raise
        except Exception as error:  # Pillow's parsers raise whatever a broken file leads them into
            raise explain(error, name, said) from None


def _decode_open(
    image: Image.Image, name: str, fast_size: Size | None, max_pixels: int, background: Colour8
) -> Decoded:
    """Decode what Pillow has identified and not yet read."""
    check_size(image.size, name, max_pixels)
    orientation = 1
    if image.format in ("JPEG", "MPO", "TIFF"):  # a PNG's may stand behind its pixels
        orientation = orientation_of(image)
    full_size, drafted = (image.height, image.width), None
    if fast_size is not None and image.format in ("JPEG", "MPO"):
        height, width = fast_size
        drafted = image.draft(None, (2 * height, 2 * width) if orientation >= 5 else (2 * width, 2 * height))
    image.load()
    turn = orientation_of(image)  # Pillow has turned a TIFF already, and says 1
    orientation = turn if turn != 1 else orientation
    stored_region = Box(*drafted[1]) if drafted else Box(0, 0, image.width, image.height)
    region = upright(stored_region, (image.height, image.width), turn)
    rgb = to_rgb(image, background)
    if turn in TURNS:
        rgb = rgb.transpose(TURNS[turn])
    elif rgb is image:
        rgb = image.copy()
    rgb.info = {}  # or the next reader of its EXIF would turn it once more
    source_size = (rgb.height, rgb.width)
    if drafted:
        source_size = full_size[::-1] if turn >= 5 else full_size
    file_format = "JPEG" if image.format == "MPO" else image.format
    return Decoded(
        image=rgb,
        source_size=source_size,
        orientation=orientation,
        format=file_format,
        region=region,
        alpha=_alpha_of(image, turn),
    )


def _alpha_of(image: Image.Image, turn: int) -> Alpha | None:
    """None where nothing is transparent, or so little that it is no background, or all of it."""
    if not image.has_transparency_data or image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return None
    key = image.info.get("transparency")
    if image.mode == "RGB" and isinstance(key, tuple) and max(key, default=0) > 255:
        return None  # see to_rgb
    alpha = image.convert("RGBA").getchannel("A")
    if turn in TURNS:
        alpha = alpha.transpose(TURNS[turn])
    level_HW = np.asarray(alpha)
    seen_HW = level_HW >= _VISIBLE
    if (level_HW < 128).mean() < _LEAST_TRANSPARENT or not (level_HW >= 128).any():
        return None
    across, down = np.flatnonzero(seen_HW.any(0)), np.flatnonzero(seen_HW.any(1))
    box = Box(int(across[0]), int(down[0]), int(across[-1]) + 1, int(down[-1]) + 1)
    height, width = fit_inside((alpha.height, alpha.width), _ALPHA_SIDE)
    return Alpha(box, alpha.resize((width, height), Image.Resampling.BOX))


# Opening


def open_file(path: str | os.PathLike[str], name: str) -> IO[bytes]:
    """Open a regular file and nothing else: a pipe would wait for ever, a device may never end. What lies elsewhere
    (s3://, ...) or in a shard is read whole."""
    if is_elsewhere(path):
        try:
            return io.BytesIO(read_elsewhere(os.fspath(path)))
        except Unreachable as error:
            raise ImageError(name, "missing" if error.missing else "unreadable", error.detail) from None
    try:
        _check_regular(os.stat(path), name)
        # What is there now may not be what was there a moment ago.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        file = os.fdopen(os.open(path, flags), "rb")
        try:
            _check_regular(os.fstat(file.fileno()), name)
        except BaseException:
            file.close()
            raise
        return file
    except ImageError:
        raise
    except FileNotFoundError:
        if os.path.islink(path):
            raise ImageError(name, "unreadable", "its symbolic link is broken") from None
        raise ImageError(name, "missing", "there is no such file") from None
    except ValueError:  # the path holds a zero byte
        raise ImageError(name, "missing", "there is no such file") from None
    except OSError as error:
        detail = {
            errno.EACCES: "no permission to read it",
            errno.EPERM: "no permission to read it",
            errno.ELOOP: "its symbolic links form a loop",
            errno.ENOTDIR: "part of its path is not a folder",
        }.get(error.errno or 0, str(error.strerror))
        raise ImageError(name, "missing" if error.errno == errno.ENOTDIR else "unreadable", detail) from None


def _check_regular(status: os.stat_result, name: str) -> None:
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a named pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        raise ImageError(name, "unreadable", f"this is {kinds.get(kind, 'something else')}, not a file")
    if status.st_size == 0:
        raise ImageError(name, "empty", "the file has no bytes")


@cache
def _formats() -> tuple[str, ...]:
    """The formats that this Pillow has."""
    for plugin in _PLUGINS.values():
        with contextlib.suppress(ImportError):
            importlib.import_module(f"PIL.{plugin}")
    return tuple(name for name in _PLUGINS if name in Image.OPEN)


def open_image(file: IO[bytes], name: str) -> Image.Image:
    """Identify an image by its first bytes, whatever its name says; its pixels are not read yet."""
    head = file.read(1024)
    if not head:
        raise ImageError(name, "empty", "there are no bytes")
    file.seek(0)
    # "mif1" alone may be HEIC or AVIF.
    if re.match(rb"....ftyp(hei[cxms]|hevc|m[is]f1)", head, re.DOTALL) and b"avi" not in head[:32]:
        return _open_heic(file, name)
    if head.startswith(_PNG):
        _check_chunks(file, name)
    try:
        return Image.open(file, formats=_formats())
    except UnidentifiedImageError:
        raise _identify(head, name) from None


def _check_chunks(file: IO[bytes], name: str) -> None:
    """Refuse a PNG that Pillow would fill the memory with, before it does: by the lengths of its chunks alone."""
    end = file.seek(0, os.SEEK_END)
    place, kind = len(_PNG), b""
    while place + 8 <= end and kind != b"IEND":
        file.seek(place)
        length, kind = struct.unpack(">I4s", file.read(8))
        held = min(length, end - place)  # a length that is damaged says more
        if held > LONGEST_CHUNK and kind not in (b"IDAT", b"fdAT"):  # of pixels there are as many as the size says
            raise ImageError(
                name,
                "too-large",
                f"it holds {held / 1e6:.0f} MB besides its pixels, in a chunk {ascii(kind)[2:-1]}, and the limit is "
                f"{LONGEST_CHUNK / 1e6:.0f}; save it again without that",
            )
        place += 8 + length + 4
    file.seek(0)


def _open_heic(file: IO[bytes], name: str) -> Image.Image:
    try:
        pillow_heif = importlib.import_module("pillow_heif")
    except ImportError:
        raise ImageError(
            name, "unsupported", "this is a HEIC image; pip install 'patchlight[heic]' to read it"
        ) from None
    # Its image class is enough; registering it would change Pillow for the whole process.
    image: Image.Image = pillow_heif.HeifImageFile(file)
    return image


def check_size(size: tuple[int, int], name: str, max_pixels: int) -> None:
    """Refuse a (width, height) of more pixels than allowed."""
    width, height = size
    if width * height > max_pixels:
        raise ImageError(
            name,
            "too-large",
            f"{width}x{height} is {width * height / 1e6:.0f} megapixels and the limit (max_pixels) "
            f"{max_pixels / 1e6:.0f}; scale it down",
        )


def orientation_of(image: Image.Image) -> int:
    """The EXIF orientation, 1 where there is none or where the EXIF cannot be read."""
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # a broken EXIF breaks in many ways, and the picture does not need it
        return 1
    return value if type(value) is int and 1 <= value <= 8 else 1


# Colours


def to_rgb(image: Image.Image, background: Colour8) -> Image.Image:
    """Convert an image of any mode to RGB, as a viewer shows it; an RGB image is returned as it is."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _deep_grey_to_rgb(image, background)
    key = image.info.get("transparency")
    if image.mode == "RGB" and isinstance(key, tuple) and max(key, default=0) > 255:
        image = image.copy()
        del image.info["transparency"]  # it names a 16-bit colour, and Pillow has reduced the pixels to 8 bits
    if image.has_transparency_data:
        backdrop = Image.new("RGBA", image.size, (*background, 255))
        return Image.alpha_composite(backdrop, image.convert("RGBA")).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _deep_grey_to_rgb(image: Image.Image, background: Colour8) -> Image.Image:
    """Greys of more than 8 bits: 0 to 65535 becomes 0 to 255; what leaves that range is stretched from end to end.

    Floats from 0 to 1 are shares of white, those from 0 to 255 are 8-bit levels; NaN becomes black.
    """
    grey_HW = np.asarray(image)
    low, high = 0.0, 65535.0
    if image.mode in ("I", "F"):
        finite_HW = np.isfinite(grey_HW)
        ends = (0.0, 1.0)
        if finite_HW.any():
            least, most = (np.inf, -np.inf) if image.mode == "F" else (2**31 - 1, -(2**31))
            ends = (
                float(grey_HW.min(where=finite_HW, initial=least)),
                float(grey_HW.max(where=finite_HW, initial=most)),
            )
        if image.mode == "F" and ends[0] >= 0 and ends[1] <= 255:
            low, high = 0.0, 1.0 if ends[1] <= 1 else 255.0
        elif image.mode == "F" or not (ends[0] >= 0 and ends[1] <= 65535):
            low, high = ends
    scale = 255 / (high - low) if high > low else 0.0
    precision = np.float32 if image.mode.startswith("I;16") else np.float64  # 32-bit values need the larger
    level_HW = np.empty(grey_HW.shape, np.uint8)
    rows = max(1, 4_000_000 // max(1, grey_HW.shape[1]))  # at a time: a large photo takes little more than itself
    for top in range(0, len(grey_HW), rows):
        with np.errstate(all="ignore"):
            level = np.subtract(grey_HW[top : top + rows], low, dtype=precision) * precision(scale)
        level = np.nan_to_num(level, nan=0.0, posinf=255.0, neginf=0.0)
        level_HW[top : top + rows] = np.rint(level).clip(0, 255)
    rgb = Image.fromarray(level_HW).convert("RGB")
    key = image.info.get("transparency")
    if isinstance(key, int):
        rgb.paste(background, mask=Image.fromarray(np.where(grey_HW == key, 255, 0).astype(np.uint8)))
    return rgb


# Failures


def explain(error: Exception, name: str, said: Sequence[str] = ()) -> ImageError:
    """The `Reason` for an error that Pillow raised; what libtiff said is plainer than its "decoder error -2"."""
    text = " ".join(str(error).split())[:200] or type(error).__name__
    if isinstance(error, Image.DecompressionBombError):
        found = re.search(r"\((\d+) pixels\)", text)
        pixels = f"{int(found[1]) / 1e6:.0f} megapixels" if found else "too many pixels"
        return ImageError(name, "too-large", f"{pixels}, more than Pillow decodes; scale it down")
    if isinstance(error, MemoryError):
        return ImageError(name, "too-large", "there is not enough memory to decode it")
    if isinstance(error, OSError) and error.errno is not None:
        return ImageError(name, "unreadable", error.strerror or text)
    if "truncated" in text.lower() or isinstance(error, EOFError):
        return ImageError(name, "truncated", text)
    if "too large" in text or "Too much memory" in text:
        return ImageError(name, "too-large", text)
    if isinstance(error, NotImplementedError) or re.search("unsupported|not supported|not available", text.lower()):
        return ImageError(name, "unsupported", text)
    return ImageError(name, "corrupt", said[0] if said else text)


_SIGNATURES: list[tuple[bytes, Reason, str]] = [
    (rb"version https://git-lfs\.github\.com/spec/", "not-an-image", "this is a Git-LFS pointer; run `git lfs pull`"),
    (rb"(?i:\s*(<!doctype html|<html|<head|<body))", "not-an-image", "this is an HTML page"),
    (
        rb"(?i:\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)?(<!doctype svg[^>]*>\s*)?<svg)",
        "unsupported",
        "this is an SVG drawing",
    ),
    (rb"%PDF-", "unsupported", "this is a PDF document"),
    (rb"%!PS|\xc5\xd0\xd3\xc6", "unsupported", "this is an EPS or PostScript document"),
    (rb"8BPS", "unsupported", "this is a Photoshop document"),
    (rb"\x00\x00[\x01\x02]\x00", "unsupported", "this is an icon or a TGA image"),
    (rb"....ftypavi[fs]", "corrupt", "this AVIF image is damaged, or this Pillow does not read AVIF"),
    (rb"\xff\x0a|\x00\x00\x00\x0cJXL ", "unsupported", "this is a JPEG XL image"),
    (rb"....ftyp|RIFF....AVI |\x1a\x45\xdf\xa3|\x00\x00\x01\xba", "not-an-image", "this is a video"),
    (rb"PK\x03\x04|\x1f\x8b|Rar!|7z\xbc\xaf", "not-an-image", "this is an archive"),
    (rb"\x7fELF|MZ.\x00", "not-an-image", "this is a program"),
    (rb"\xff\xd8\xff", "corrupt", "the header of this JPEG is damaged"),
    (rb"\x89PNG", "corrupt", "the header of this PNG is damaged"),
    (rb"GIF8[79]a", "corrupt", "the header of this GIF is damaged"),
    (rb"RIFF....WEBP", "corrupt", "the header of this WebP is damaged"),
    (rb"II[*+]\x00|MM\x00[*+]", "corrupt", "the header of this TIFF is damaged"),
    (rb"BM.{4}\x00", "corrupt", "the header of this BMP is damaged"),
]
"""What a file is that Pillow does not identify, by its first bytes."""


def _identify(head: bytes, name: str) -> ImageError:
    for pattern, reason, detail in _SIGNATURES:
        if re.match(pattern, head, re.DOTALL):
            return ImageError(name, reason, detail)
    with contextlib.suppress(UnicodeDecodeError):
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # which lets the last character be cut
        if all(character.isprintable() or character.isspace() for character in text):
            return ImageError(name, "not-an-image", "this is a text file")
    return ImageError(name, "not-an-image", "it is not in an image format that Patchlight reads")


# Warnings

_lock = threading.Lock()
_inside = 0
_filters = warnings.catch_warnings()


@contextlib.contextmanager
def quiet() -> Iterator[list[str]]:
    """Keep Pillow's warnings from being printed or raised: a photo is used or refused, with nothing in between.

    It gives what libtiff had to say, for `explain`.

    Python's filters belong to the whole process, so that threads which decode side by side must change them once, when
    the first of them enters, and restore them when the last has left.
    """
    global _inside, _filters
    with _lock:
        if _inside == 0:
            _filters = warnings.catch_warnings()
            _filters.__enter__()
            warnings.filterwarnings("ignore", module=r"PIL\.|pillow_heif|patchlight\.images\.decode")
        _inside += 1
    try:
        with libtiff.heard() as said:
            yield said
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _filters.__exit__(None, None, None)
