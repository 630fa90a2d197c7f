"""Crops: where they are cut, and that the file they come from is still to be recognised in them."""

import io
import os
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import ExifTags, Image, ImageCms, JpegImagePlugin, PngImagePlugin

from patchlight.errors import PatchlightError
from patchlight.geometry import Box
from patchlight.images import crop as crop_module
from patchlight.images.crop import Cut, cut_out, exif_of_crop, parse_aspect, region_around, write_crop
from patchlight.images.decode import ImageError
from patchlight.images.pad import check_pad

DEMO = Path(__file__).parents[4] / "shared" / "data" / "demo"
PROFILE = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def picture(width: int = 96, height: int = 64) -> Image.Image:
    """Smooth, and nowhere alike, so that a crop of another place is another picture."""
    y_HW, x_HW = np.mgrid[0:height, 0:width]
    level_HWC = np.stack([255 * x_HW / width, 255 * y_HW / height, 128 + 100 * np.sin((x_HW + y_HW) / 9)], -1)
    return Image.fromarray(level_HWC.astype(np.uint8))


def open_crop(content: bytes) -> Any:
    image = Image.open(io.BytesIO(content))
    image.load()
    return image


def difference(one: Image.Image, other: Image.Image) -> float:
    assert one.size == other.size
    return float(np.abs(np.asarray(one.convert("RGB"), float) - np.asarray(other.convert("RGB"), float)).mean())


def upright_of(path: Path) -> Image.Image:
    from PIL import ImageOps

    with Image.open(path) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


# Where


def test_margin_is_a_share_of_the_box() -> None:
    assert region_around(Box(20, 30, 40, 40), (100, 100), margin=0.1) == (18, 29, 42, 41)


@given(
    st.tuples(st.integers(1, 300), st.integers(1, 300)),
    st.lists(st.floats(-20, 320), min_size=4, max_size=4),
    st.floats(0, 2),
    st.sampled_from(["free", "1:1", "4:3", "3:4", "1:9"]),
    st.booleans(),
)
def test_a_region_holds_the_box_and_leaves_the_photo_only_where_it_must(
    size: tuple[int, int], ends: list[float], margin: float, aspect: str, keep_margin: bool
) -> None:
    height, width = size
    x0, x1, y0, y1 = sorted(ends[:2]) + sorted(ends[2:])
    box = Box(x0, y0, x1, y1).clip(size)
    left, top, right, bottom = region_around(
        box, size, margin=margin, aspect=parse_aspect(aspect), keep_margin=keep_margin
    )
    assert left < right
    assert top < bottom
    kept = box.expanded(margin) if keep_margin else box
    assert left <= kept.left + 1e-5 or left == width - 1
    assert top <= kept.top + 1e-5 or top == height - 1
    assert right >= kept.right - 1e-5
    assert bottom >= kept.bottom - 1e-5
    if not keep_margin and aspect == "free":
        assert left >= 0
        assert top >= 0
        assert right <= width
        assert bottom <= height
    if not keep_margin and right - left <= width:
        assert left >= 0
        assert right <= width
    if not keep_margin and bottom - top <= height:
        assert top >= 0
        assert bottom <= height


@given(st.integers(50, 400), st.integers(50, 400), st.sampled_from([(1, 1), (4, 3), (3, 4), (16, 9)]), st.data())
def test_aspect_is_kept_to_the_pixel(height: int, width: int, aspect: tuple[int, int], data: st.DataObject) -> None:
    x0, y0 = data.draw(st.integers(0, width - 20)), data.draw(st.integers(0, height - 20))
    x1, y1 = data.draw(st.integers(x0 + 10, width)), data.draw(st.integers(y0 + 10, height))
    left, top, right, bottom = region_around(Box(x0, y0, x1, y1), (height, width), aspect=aspect)
    assert abs((right - left) * aspect[1] / aspect[0] - (bottom - top)) <= 1


def test_aspect_moves_into_the_photo_before_it_leaves_it() -> None:
    assert region_around(Box(0, 40, 10, 80), (100, 100), aspect=(1, 1)) == (0, 40, 40, 80)
    # Nothing of a subject as wide as the photo is cut off: there is to be padded above and below.
    assert region_around(Box(0, 0, 200, 50), (50, 200), aspect=(1, 1)) == (0, -75, 200, 125)
    # The margin gives way first, unless it is to be kept.
    assert region_around(Box(10, 10, 90, 90), (100, 100), margin=0.5, aspect=(1, 1)) == (0, 0, 100, 100)
    kept = region_around(Box(10, 10, 90, 90), (100, 100), margin=0.5, aspect=(1, 1), keep_margin=True)
    assert kept == (-30, -30, 130, 130)


def exact_region(size: tuple[int, int], how: Cut) -> tuple[int, int, int, int]:
    return how.region(Box(40, 40, 60, 50), size)


def test_an_exact_size_shows_more_rather_than_enlarge() -> None:
    assert exact_region((100, 100), Cut(exact=(80, 40))) == (10, 25, 90, 65)
    assert exact_region((100, 100), Cut(exact=(80, 40), fill=True)) == (40, 40, 60, 50)
    assert exact_region((100, 100), Cut(exact=(200, 200))) == (-50, -55, 150, 145)
    # At a scale of its own, whatever the subject would need.
    assert exact_region((100, 100), Cut(exact=(10, 10), scale=0.25)) == (30, 25, 70, 65)


# Padding


PADDED = ["jpg", "png", "webp", "tif"]


@pytest.mark.parametrize("suffix", PADDED)
@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "CMYK", "I;16", "1"])
@pytest.mark.parametrize("kind", ["blur", "edge", "#204060"])
def test_every_kind_of_photo_is_padded_to_the_exact_size(tmp_path: Path, suffix: str, mode: str, kind: str) -> None:
    path = tmp_path / f"a.{suffix}"
    stored = picture().convert("L") if mode in ("I;16", "1") else picture()
    stored = stored.convert("I").point(lambda level: level * 257).convert("I;16") if mode == "I;16" else stored
    try:
        stored.convert(mode).save(path)
    except (OSError, ValueError, KeyError):
        pytest.skip(f"Pillow writes no {mode} as {suffix}")
    box = Box(0, 16, 90, 64)
    (crop,) = cut_out(path, [box], Cut(exact=(120, 120), pad=kind, margin=0.1))
    made = open_crop(crop.content)
    assert made.size == crop.size == (120, 120)
    assert crop.region[0] < 0
    assert crop.region[3] > 64
    # What the photo shows is in its place, and a colour is the one that was asked for.
    assert difference(
        made.crop((-crop.region[0], -crop.region[1], 96 - crop.region[0], 64 - crop.region[1])),
        open_crop(path.read_bytes()),
    ) < (12 if suffix in ("jpg", "webp") else 0.6)
    if kind.startswith("#"):
        corner = made.convert("RGB").getpixel((0, 0))
        grey = open_crop(path.read_bytes()).mode in ("L", "1")
        wanted = Image.new("RGB", (1, 1), kind).convert("L" if grey else "RGB").convert("RGB")
        if mode != "I;16":  # which to_rgb and not Pillow shows rightly
            assert np.abs(np.subtract(corner, wanted.getpixel((0, 0)))).max() <= 8


@pytest.mark.parametrize("orientation", range(1, 9))
def test_padding_is_on_the_right_side_of_a_turned_photo(tmp_path: Path, orientation: int) -> None:
    path = tmp_path / "a.jpg"
    picture().save(path, exif=with_exif(orientation, (96, 64)), quality=95, subsampling=0)
    upright = upright_of(path)
    (crop,) = cut_out(path, [Box(0, 0, 20, 20)], Cut(exact=(40, 40), pad="white", margin=0.5, fill=True))
    made = open_crop(crop.content)
    assert crop.region == (-10, -10, 30, 30)
    assert difference(made.crop((0, 0, 9, 40)), Image.new("RGB", (9, 40), "white")) < 4
    assert difference(made.crop((12, 12, 40, 40)), upright.crop((2, 2, 30, 30))) < 4


def test_a_small_subject_is_enlarged_to_fill(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    picture().save(path)
    (crop,) = cut_out(path, [Box(40, 20, 60, 40)], Cut(exact=(200, 200), fill=True))
    wanted = picture().crop((40, 20, 60, 40)).resize((200, 200), Image.Resampling.BICUBIC)
    assert difference(open_crop(crop.content), wanted) < 3


def test_a_blurred_border_goes_on_where_the_photo_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    image = Image.new("RGB", (60, 60), (200, 180, 160))
    image.paste((10, 20, 30), (20, 20, 40, 40))
    image.save(path)
    (crop,) = cut_out(path, [Box(0, 10, 60, 50)], Cut(exact=(60, 100), pad="blur"))
    made = open_crop(crop.content)
    assert np.abs(np.asarray(made.crop((0, 0, 60, 12)), int) - (200, 180, 160)).max() <= 40
    assert np.abs(np.asarray(made.crop((0, 15, 60, 25)), int) - (200, 180, 160)).max() <= 40


def test_a_crop_that_would_need_all_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    picture().save(path)
    with pytest.raises(ImageError, match="megapixels"):
        cut_out(path, [Box(0, 0, 96, 64)], Cut(aspect=(9999, 1), margin=10, pad="edge"))


@pytest.mark.parametrize("text", ["", "nocolour", "#12", "rgb(1,2,3)", "blurry", "#12345678"])
def test_a_padding_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(PatchlightError, match="pad="):
        check_pad(text)


@pytest.mark.parametrize("text", ["", "1", "0:1", "a:b", "1:1:1", "-1:2", "1.5:1"])
def test_an_aspect_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(PatchlightError, match="aspect="):
        parse_aspect(text)


# JPEG


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("quality", [40, 75, 95])
def test_jpeg_keeps_tables_subsampling_profile_and_pixels(tmp_path: Path, subsampling: int, quality: int) -> None:
    path = tmp_path / "a.jpg"
    picture().save(path, quality=quality, subsampling=subsampling, icc_profile=PROFILE, dpi=(240, 240), comment=b"trap")
    (crop,) = cut_out(path, [Box(16, 16, 64, 48)], Cut())
    with Image.open(path) as source, open_crop(crop.content) as made:
        assert made.format == crop.format == "JPEG"
        assert crop.region == (16, 16, 64, 48)
        assert made.quantization == source.quantization
        assert JpegImagePlugin.get_sampling(made) == subsampling
        assert made.info["icc_profile"] == PROFILE
        assert made.info["dpi"] == (240, 240)
        assert made.info["comment"] == b"trap"
        wanted = source.convert("RGB").crop((16, 16, 64, 48))
        # Aligned blocks with the same tables give almost the same numbers back.
        assert difference(made, wanted) < 1.0


def test_a_jpeg_keeps_more_of_itself_than_through_rgb(tmp_path: Path) -> None:
    """The reason for staying in the file's own colours: against the way through RGB, with the same tables."""
    path = tmp_path / "a.jpg"
    picture(160, 160).save(path, quality=90, subsampling=2)
    with Image.open(path) as source:
        tables, wanted = source.quantization, source.convert("RGB").crop((16, 16, 144, 144))
        through_rgb = io.BytesIO()
        wanted.save(through_rgb, "JPEG", qtables=tables, subsampling=2)
    (crop,) = cut_out(path, [Box(16, 16, 144, 144)], Cut())
    assert difference(open_crop(crop.content), wanted) <= difference(open_crop(through_rgb.getvalue()), wanted)


def with_exif(orientation: int, size: tuple[int, int]) -> Image.Exif:
    exif = Image.Exif()
    exif[ExifTags.Base.Make] = "Reconyx"
    exif[ExifTags.Base.Orientation] = orientation
    exif[ExifTags.Base.ImageWidth], exif[ExifTags.Base.ImageLength] = size
    inner = exif.get_ifd(ExifTags.IFD.Exif)
    inner[ExifTags.Base.DateTimeOriginal] = "2024:05:01 06:07:08"
    inner[ExifTags.Base.ExifImageWidth], inner[ExifTags.Base.ExifImageHeight] = size
    exif.get_ifd(ExifTags.IFD.GPSInfo)[1] = "N"
    return exif


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_gives_the_upright_crop(tmp_path: Path, orientation: int, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    stored = picture()
    options: dict[str, Any] = {"jpg": {"quality": 95, "subsampling": 0}, "png": {}, "webp": {"lossless": True}}[suffix]
    stored.save(path, exif=with_exif(orientation, stored.size), **options)
    upright = upright_of(path)
    region = (11, 7, 43, 37)
    (crop,) = cut_out(path, [Box(*region)], Cut())
    made = open_crop(crop.content)
    assert difference(made, upright.crop(region)) < (2.0 if suffix == "jpg" else 0.01)
    exif = made.getexif()
    assert exif[ExifTags.Base.Orientation] == 1
    assert exif[ExifTags.Base.Make] == "Reconyx"
    assert (exif[ExifTags.Base.ImageWidth], exif[ExifTags.Base.ImageLength]) == made.size == (32, 30)
    inner = exif.get_ifd(ExifTags.IFD.Exif)
    assert inner[ExifTags.Base.DateTimeOriginal] == "2024:05:01 06:07:08"
    assert (inner[ExifTags.Base.ExifImageWidth], inner[ExifTags.Base.ExifImageHeight]) == made.size
    assert exif.get_ifd(ExifTags.IFD.GPSInfo)[1] == "N"


def raw_exif(order: str, thumbnail: bytes, behind: bytes = b"") -> bytes:
    """Two directories, the second with a thumbnail, written by hand."""
    magic = {"<": b"II*\0", ">": b"MM\0*"}[order]
    first, second = 8, 8 + 2 + 12 + 4
    start = second + 2 + 24 + 4
    body = magic + struct.pack(order + "I", first)
    body += struct.pack(order + "HHHIHHI", 1, 0x112, 3, 1, 6, 0, second)
    body += struct.pack(order + "HHHIIHHII", 2, 0x201, 4, 1, start, 0x202, 4, 1, len(thumbnail))
    body += struct.pack(order + "I", 0)
    return b"Exif\0\0" + body + thumbnail + behind


@pytest.mark.parametrize("order", ["<", ">"])
def test_the_thumbnail_of_the_whole_photo_goes(order: str) -> None:
    thumbnail = b"\xff\xd8 a small picture of everything \xff\xd9"
    last = exif_of_crop(raw_exif(order, thumbnail), (10, 20), 1)
    assert last is not None
    assert thumbnail not in last
    assert len(last) == len(raw_exif(order, b""))
    followed = exif_of_crop(raw_exif(order, thumbnail, b"notes"), (10, 20), 1)
    assert followed is not None
    assert thumbnail not in followed
    assert followed.endswith(b"notes")  # where it was, since notes hold offsets
    assert len(followed) == len(raw_exif(order, thumbnail, b"notes"))
    exif = Image.Exif()
    exif.load(followed)
    assert exif[0x112] == 1
    assert not exif.get_ifd(ExifTags.IFD.IFD1)


@given(st.binary(max_size=200), st.integers(0, 90))
def test_no_exif_breaks_anything(noise: bytes, place: int) -> None:
    whole = raw_exif("<", b"thumbnail")
    damaged = whole[:place] + noise + whole[place + len(noise) :]
    for exif in (noise, b"Exif\0\0II*\0" + noise, damaged):
        made = exif_of_crop(exif, (10, 20), 1)
        assert made is None or len(made) <= len(exif) + len(b"Exif\0\0")  # changed in place, never grown


def test_a_corrupt_exif_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    picture().save(path, exif=b"Exif\0\0II*\0\xff\xff\xff\xff" + b"x" * 40)
    (crop,) = cut_out(path, [Box(0, 0, 20, 20)], Cut())
    assert "exif" not in open_crop(crop.content).info


THUMBNAIL = b"a thumbnail of the whole photo"


def segment(marker: int, body: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body


@pytest.mark.parametrize("lossless", [False, True])
def test_xmp_and_iptc_stay(tmp_path: Path, lossless: bool, request: pytest.FixtureRequest) -> None:
    """And tell of the crop; what shows the whole photo does not."""
    how = Cut(jpegtran=request.getfixturevalue("jpegtran")) if lossless else Cut()
    path = tmp_path / "a.jpg"
    about = (
        b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description dc:rights="J. Doe" tiff:Orientation="%d" '
        b'tiff:ImageLength="%d"><exif:PixelXDimension>%d</exif:PixelXDimension>%s</rdf:Description></x:xmpmeta>'
    )
    xmp = about % (6, 64, 96, b"<xmp:Thumbnails><rdf:Alt>" + THUMBNAIL + b"</rdf:Alt></xmp:Thumbnails>")
    iptc = b"\x1c\x02\x74\x00\x05J.Doe"  # the copyright notice
    blocks = b"".join(
        b"8BIM" + struct.pack(">HHI", number, 0, len(body)) + body + b"\0" * (len(body) % 2)
        for number, body in ((0x0404, iptc), (0x040C, THUMBNAIL))
    )
    extra = segment(0xED, b"Photoshop 3.0\0" + blocks) + segment(0xE0, b"JFXX\0\x10" + THUMBNAIL)
    extra += segment(0xE1, b"http://ns.adobe.com/xmp/extension/\0" + THUMBNAIL)
    picture().save(path, exif=with_exif(6, (64, 96)), xmp=xmp, extra=extra)
    assert path.read_bytes().count(THUMBNAIL) == 4
    for crop in cut_out(path, [Box(0, 0, 20, 30), Box(10, 10, 60, 50)], how):
        made = open_crop(crop.content)
        assert crop.encoded is not lossless
        orientation = 6 if lossless else 1  # a lossless one stays turned
        assert made.info["xmp"] == about % (orientation, made.height, made.width, b"")
        assert made.info["photoshop"] == {0x0404: iptc}
        assert made.getexif()[ExifTags.Base.Orientation] == orientation
        assert THUMBNAIL not in crop.content
    room = b" " * 65_000
    picture().save(path, xmp=about % (1, 64, 96, b"") + room)
    (crop,) = cut_out(path, [Box(0, 0, 20, 30)], how)
    made = open_crop(crop.content)
    assert made.info["xmp"] == about % (1, made.height, made.width, b"") + room


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_grey_and_cmyk_stay(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "a.jpg"
    picture().convert(mode).save(path, quality=90)
    (crop,) = cut_out(path, [Box(16, 16, 64, 48)], Cut())
    made = open_crop(crop.content)
    assert made.mode == mode
    with Image.open(path) as source:
        assert difference(made, source.crop((16, 16, 64, 48))) < 2


def test_a_jpeg_coded_in_rgb_stays_so(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    picture().save(path, quality=95, keep_rgb=True)
    (crop,) = cut_out(path, [Box(16, 16, 64, 48)], Cut())
    made = open_crop(crop.content)
    assert [layer[0] for layer in made.layer] == [ord(letter) for letter in "RGB"]
    with Image.open(path) as source:
        assert difference(made, source.crop((16, 16, 64, 48))) < 2


def test_progressive_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    picture().save(path, progressive=True)
    (crop,) = cut_out(path, [Box(0, 0, 20, 20)], Cut())
    assert open_crop(crop.content).info["progressive"]


@pytest.mark.parametrize("orientation", [1, 6])
def test_longest_side(tmp_path: Path, orientation: int) -> None:
    path = tmp_path / "a.jpg"
    stored = picture(1600, 1200)
    stored.save(path, quality=95, subsampling=0, exif=with_exif(orientation, stored.size))
    upright = upright_of(path)
    region = (100, 200, 1100, 700)
    (crop,) = cut_out(path, [Box(*region)], Cut(longest=100))
    made = open_crop(crop.content)
    assert made.size == (100, 50)
    assert difference(made, upright.resize((100, 50), Image.Resampling.LANCZOS, region)) < 3
    (small,) = cut_out(path, [Box(0, 0, 60, 30)], Cut(longest=100))
    assert open_crop(small.content).size == (60, 30), "a small one is not blown up"


def test_several_crops_of_one_photo(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    picture().save(path)
    crops = cut_out(path, [Box(0, 0, 8, 8), Box(50, 30, 80, 60)], Cut())
    with Image.open(path) as source:
        for crop in crops:
            assert difference(open_crop(crop.content), source.crop(crop.region)) == 0


# Lossless


@pytest.fixture
def jpegtran() -> str:
    found = shutil.which("jpegtran") or os.environ.get("PATCHLIGHT_JPEGTRAN")
    if not found:
        pytest.skip("jpegtran is not installed (Debian: libjpeg-turbo-progs)")
    return found


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
@pytest.mark.parametrize("subsampling", [0, 2])
def test_lossless_pixels_are_the_files_own(tmp_path: Path, jpegtran: str, orientation: int, subsampling: int) -> None:
    path = tmp_path / "a.jpg"
    stored = picture(200, 160)
    stored.save(path, quality=80, subsampling=subsampling, exif=with_exif(orientation, stored.size))
    upright = upright_of(path)
    (crop,) = cut_out(path, [Box(37, 41, 99, 120)], Cut(jpegtran=jpegtran))
    left, top, right, bottom = crop.region
    assert left <= 37 < 99 <= right
    assert top <= 41 < 120 <= bottom
    assert (right - left, bottom - top) != (62, 79), "it begins where a block does"
    assert not crop.encoded
    (tmp_path / "crop.jpg").write_bytes(crop.content)
    made = upright_of(tmp_path / "crop.jpg")
    inner = (16, 16, made.width - 16, made.height - 16)  # chroma is smoothed across the cut
    assert difference(made.crop(inner), upright.crop(crop.region).crop(inner)) == 0
    with Image.open(io.BytesIO(crop.content)) as file:
        exif = file.getexif()
        assert exif.get(ExifTags.Base.Orientation) == orientation
        inner_exif = exif.get_ifd(ExifTags.IFD.Exif)
        assert (inner_exif[ExifTags.Base.ExifImageWidth], inner_exif[ExifTags.Base.ExifImageHeight]) == file.size


def test_a_jpegtran_that_fails_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    picture().save(path)
    for program in (sys.executable, str(tmp_path / "nothing"), "/bin/true"):
        (crop,) = cut_out(path, [Box(3, 5, 40, 40)], Cut(jpegtran=program))
        assert crop.region == (3, 5, 40, 40)
        assert crop.encoded
        assert open_crop(crop.content).size == (37, 35)


def test_the_segments_of_a_jpeg_are_kept_but_for_the_index_of_others() -> None:
    file = io.BytesIO()
    picture().save(file, "JPEG", icc_profile=PROFILE, extra=b"\xff\xe2\x00\x0aMPF\0abcd", comment=b"hello")
    assert b"MPF\0" in file.getvalue()
    changed = crop_module._as_a_crop(file.getvalue(), (64, 96), 1, {})
    assert b"MPF\0" not in changed
    made = open_crop(changed)
    assert made.info["icc_profile"] == PROFILE
    assert made.info["comment"] == b"hello"


# Other formats


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_png_keeps_its_mode_and_pixels(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "a.png"
    if mode == "I;16":
        image = Image.fromarray((np.arange(96 * 64) * 10).reshape(64, 96).astype(np.uint16))
    else:
        image = picture().convert(mode)
    image.save(path, icc_profile=PROFILE, dpi=(300, 300))
    (crop,) = cut_out(path, [Box(10, 12, 30, 40)], Cut())
    made = open_crop(crop.content)
    assert (made.format, made.mode) == ("PNG", mode)
    assert made.info["icc_profile"] == PROFILE
    with Image.open(path) as source:
        np.testing.assert_array_equal(np.asarray(made), np.asarray(source.crop((10, 12, 30, 40))))
    (small,) = cut_out(path, [Box(0, 0, 64, 64)], Cut(longest=16))
    assert open_crop(small.content).size == (16, 16)


def chunks_of(png: bytes) -> dict[bytes, bytes]:
    chunks, place = {}, 8
    while place < len(png):
        length, kind = struct.unpack_from(">I4s", png, place)
        chunks[kind] = png[place + 8 : place + 8 + length]
        place += 12 + length
    return chunks


def test_png_keeps_what_it_says_of_its_colours(tmp_path: Path) -> None:
    about = {
        b"gAMA": struct.pack(">I", 55_555),
        b"cHRM": struct.pack(">8I", 31_270, 32_900, 64_000, 33_000, 30_001, 60_000, 15_000, 6_000),
        b"sRGB": b"\1",
    }
    path, info = tmp_path / "a.png", PngImagePlugin.PngInfo()
    for kind, content in about.items():
        info.add(kind, content)
    picture().save(path, pnginfo=info)
    (crop,) = cut_out(path, [Box(10, 12, 30, 40)], Cut())
    assert {kind: chunks_of(crop.content).get(kind) for kind in about} == about
    picture().save(path)
    (crop,) = cut_out(path, [Box(10, 12, 30, 40)], Cut())
    assert not chunks_of(crop.content).keys() & about.keys()


def test_transparent_palettes_and_colours_stay_transparent(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    palette = picture().convert("P")
    palette.save(path, transparency=palette.getpixel((20, 20)))
    (crop,) = cut_out(path, [Box(10, 12, 30, 40)], Cut())
    with Image.open(path) as source:
        wanted = np.asarray(source.convert("RGBA").crop((10, 12, 30, 40)))
    np.testing.assert_array_equal(np.asarray(open_crop(crop.content).convert("RGBA")), wanted)


@pytest.mark.parametrize("lossless", [True, False])
def test_webp(tmp_path: Path, lossless: bool) -> None:
    path = tmp_path / "a.webp"
    picture().save(path, lossless=lossless, quality=90, icc_profile=PROFILE)
    (crop,) = cut_out(path, [Box(10, 12, 50, 60)], Cut())
    made = open_crop(crop.content)
    assert made.format == "WEBP"
    assert made.info["icc_profile"] == PROFILE
    with Image.open(path) as source:
        loss = difference(made, source.crop((10, 12, 50, 60)))
    assert loss == 0 if lossless else loss < 4


@pytest.mark.parametrize("compression", ["raw", "tiff_lzw", "tiff_adobe_deflate", "jpeg"])
def test_tiff(tmp_path: Path, compression: str) -> None:
    path = tmp_path / "a.tif"
    exif = with_exif(1, (96, 64)).tobytes() if compression == "raw" else make_alone()  # as far as Pillow writes them
    picture().save(path, compression=compression, icc_profile=PROFILE, exif=exif, dpi=(300, 300))
    (crop,) = cut_out(path, [Box(10, 12, 50, 60)], Cut())
    made = open_crop(crop.content)
    assert made.format == "TIFF"
    assert made.info["compression"] == ("tiff_adobe_deflate" if compression == "jpeg" else compression)
    assert made.info["icc_profile"] == PROFILE
    assert made.info["dpi"] == (300, 300)
    found = made.getexif()
    assert found[ExifTags.Base.Make] == "Reconyx"
    if compression == "raw":
        assert found.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.DateTimeOriginal] == "2024:05:01 06:07:08"
        assert found.get_ifd(ExifTags.IFD.GPSInfo)[1] == "N"
    with Image.open(path) as source:
        assert difference(made, source.convert("RGB").crop((10, 12, 50, 60))) == 0


def make_alone() -> bytes:
    exif = Image.Exif()
    exif[ExifTags.Base.Make] = "Reconyx"
    return exif.tobytes()


def test_a_tiff_that_is_turned(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    picture().save(path, exif=with_exif(6, (96, 64)).tobytes())
    upright = upright_of(path)
    (crop,) = cut_out(path, [Box(10, 12, 50, 60)], Cut())
    assert difference(open_crop(crop.content), upright.crop((10, 12, 50, 60))) == 0
    assert open_crop(crop.content).getexif().get(ExifTags.Base.Orientation, 1) == 1


def test_float_tiff_stays_float(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    level_HW = np.linspace(-1, 1, 96 * 64, dtype=np.float32).reshape(64, 96)
    level_HW[5, 5] = np.nan
    Image.fromarray(level_HW).save(path)
    (crop,) = cut_out(path, [Box(0, 0, 20, 20)], Cut())
    np.testing.assert_array_equal(np.asarray(open_crop(crop.content)), level_HW[:20, :20])


@pytest.mark.parametrize("suffix", ["gif", "bmp", "ppm"])
def test_others_become_png(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    picture().save(path)
    (crop,) = cut_out(path, [Box(10, 12, 50, 60)], Cut())
    made = open_crop(crop.content)
    assert made.format == crop.format == "PNG"
    with Image.open(path) as source:
        assert difference(made, source.convert("RGB").crop((10, 12, 50, 60))) == 0


def test_heic_becomes_jpeg(tmp_path: Path) -> None:
    pillow_heif = pytest.importorskip("pillow_heif")
    path = tmp_path / "a.heic"
    pillow_heif.from_pillow(picture()).save(path, quality=90)
    (crop,) = cut_out(path, [Box(10, 12, 50, 60)], Cut())
    assert open_crop(crop.content).format == crop.format == "JPEG"


def test_what_a_file_is_counts_and_not_its_name(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    picture().save(path, "PNG")
    (crop,) = cut_out(path, [Box(10, 12, 50, 60)], Cut())
    assert crop.format == "PNG"


# Failures


def test_a_cut_off_photo_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    picture(400, 300).save(path)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(ImageError) as caught:
        cut_out(path, [Box(0, 0, 10, 10)], Cut())
    assert caught.value.reason == "truncated"
    with pytest.raises(ImageError, match="missing"):
        cut_out(tmp_path / "none.jpg", [Box(0, 0, 10, 10)], Cut())
    picture().save(path)
    with pytest.raises(ImageError, match="too-large"):
        cut_out(path, [Box(0, 0, 10, 10)], Cut(), max_pixels=100)


def test_crops_are_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "er" / "a.jpg"
    write_crop(path, b"first")

    def fail(self: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="space"):
        write_crop(path, b"second")
    assert path.read_bytes() == b"first"
    assert [each.name for each in path.parent.iterdir()] == ["a.jpg"]


@pytest.mark.skipif(not DEMO.exists(), reason="no ../shared")
def test_the_demo_photos(tmp_path: Path) -> None:
    for path in (DEMO / "dragonfly.jpg", DEMO / "rocket.jpg"):
        (crop,) = cut_out(path, [Box(64, 64, 320, 320)], Cut())
        with Image.open(path) as source:
            made = open_crop(crop.content)
            assert made.quantization == source.quantization
            assert difference(made, source.convert("RGB").crop((64, 64, 320, 320))) < 1.5
