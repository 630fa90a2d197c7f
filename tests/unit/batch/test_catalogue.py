"""Crops for a catalogue: exact sizes, masks, folders, and what becomes of all that when photos or boxes change."""

import csv
import io
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image, ImageDraw, IptcImagePlugin

import patchlight as pl
from crop_runs import everything_in, make_photos, photo, rows_of, run_crop, save_model
from patchlight.batch import pipeline, results
from patchlight.batch.overrides import add_correction, check_correction, read_corrections, write_labels
from patchlight.batch.settings import CropSettings
from patchlight.cli import main
from patchlight.errors import PatchlightError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pl.Loaded:
    groups = ["animal/bird", "vehicle", "thing", "animal", "person"]
    return pl.load(save_model(tmp_path_factory.mktemp("model") / "tiny", groups=groups))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    make_photos(tmp_path / "photos", 4)
    return tmp_path / "photos"


def crop(photos: Any, out: Path, model: Any, settings: CropSettings | None = None, **how: Any) -> Any:
    return run_crop(photos, out, settings, model=model, workers=0, device="cpu", **how)


def crops_in(out: Path) -> dict[str, Image.Image]:
    crops = out / "crops"
    files = (path for path in sorted(crops.rglob("*")) if path.is_file())
    return {str(path.relative_to(crops)): Image.open(io.BytesIO(path.read_bytes())) for path in files}


def changed_since(out: Path, before: dict[str, bytes]) -> set[str]:
    return {name for name, content in everything_in(out).items() if before.get(name) != content}


# Sizes


@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize("scale", ["each", "same"])
def test_every_crop_has_the_exact_size_and_its_whole_subject(
    photos: Path, tmp_path: Path, model: pl.Loaded, fill: bool, scale: Any
) -> None:
    Image.open(photos / "000.jpg").resize((64, 48)).save(photos / "small.png")
    out, settings = tmp_path / "out", CropSettings(size="90x70", fill=fill, scale=scale, pad="white", margin=0.1)
    crop(photos, out, model, settings)
    assert {image.size for image in crops_in(out).values()} == {(90, 70)}
    scales = set()
    for row in rows_of(out):
        (cut,) = row["cuts"]
        left, top, right, bottom = cut["region"]
        x0, y0, x1, y1 = row["boxes"][0]["xyxy"]
        assert left <= x0 + 0.1
        assert top <= y0 + 0.1
        assert right >= x1 - 0.1
        assert bottom >= y1 - 0.1
        assert cut["size"] == [90, 70]
        assert cut["margin"] >= 0.1 - 0.02
        scales.add(round(90 / (right - left), 2))
        assert fill or right - left >= 90
    assert (len(scales) == 1) == (scale == "same")


def test_one_scale_follows_the_largest_subject(photos: Path, tmp_path: Path, model: pl.Loaded) -> None:
    out, settings = tmp_path / "out", CropSettings(size="64x64", scale="same")
    crop(photos, out, model, settings)
    before = everything_in(out)
    photo(9, 320, 240).save(photos / "large.jpg")
    summary = crop(photos, out, model, settings)
    assert summary.changes == {"new": 1, "changed": 0, "gone": 0, "as_before": 4}
    assert {f"crops/00{number}.jpg" for number in range(4)} <= changed_since(out, before)
    crop(photos, tmp_path / "whole", model, settings)
    assert everything_in(out) == everything_in(tmp_path / "whole")
    assert crop(photos, out, model, settings).nothing_to_do


def test_a_margin_that_the_photo_has_no_room_for_is_said(tmp_path: Path, model: pl.Loaded) -> None:
    make_photos(tmp_path / "photos", 3)
    crop(tmp_path / "photos", tmp_path / "out", model, CropSettings(margin=2))
    for row in rows_of(tmp_path / "out"):
        assert row["cuts"][0]["region"] == [0, 0, 160, 120]
        assert row["cuts"][0]["margin"] < 2
    crop(tmp_path / "photos", tmp_path / "padded", model, CropSettings(margin=2, pad="edge"))
    for row in rows_of(tmp_path / "padded"):
        assert row["cuts"][0]["margin"] >= 1.99


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"size": "0x10"}, "size="),
        ({"size": "10x"}, "size="),
        ({"size": "99999x99999"}, "size="),
        ({"size": "10x10", "aspect": "1:1"}, "aspect="),
        ({"fill": True}, "fill=True needs an exact size"),
        ({"scale": "same", "size": 30}, "scale='same' needs an exact size"),
        ({"scale": "other"}, "scale="),
        ({"pad": "nocolour"}, "pad="),
        ({"background": "nocolour"}, "background="),
        ({"lossless": True, "cutout": True}, "lossless=True does not go with cutout=True"),
        ({"lossless": True, "pad": "white"}, "lossless=True does not go with pad="),
        ({"sort": "colour"}, "sort="),
        ({"burst": True, "scale": "same", "size": "9x9"}, "burst=True"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(PatchlightError, match=said):
        CropSettings(**settings)


# Masks


def cup(path: Path, **saved: Any) -> None:
    """A disc on nothing."""
    image = Image.new("RGBA", (120, 100))
    ImageDraw.Draw(image).ellipse((30, 20, 79, 69), (200, 40, 30, 255))
    image.save(path, **saved)


@pytest.mark.parametrize("suffix", ["png", "webp"])
def test_transparency_is_the_box_and_the_mask(tmp_path: Path, model: pl.Loaded, suffix: str) -> None:
    (tmp_path / "photos").mkdir()
    cup(tmp_path / "photos" / f"cup.{suffix}", lossless=True)
    crop(tmp_path / "photos", tmp_path / "out", model, CropSettings(cutout=True, margin=0))
    (row,) = rows_of(tmp_path / "out")
    assert (row["decision"], row["method"], row["confidence"], row["subjects"]) == ("subject", "alpha", 1.0, 1)
    assert row["boxes"][0]["xyxy"] == [30, 20, 80, 70]
    (made,) = crops_in(tmp_path / "out").values()
    assert made.size == (50, 50)
    assert made.getpixel((25, 25))[3] == 255
    assert made.getpixel((0, 0))[3] == 0
    found = pl.localize(tmp_path / "photos" / f"cup.{suffix}", model)
    assert found.method == "alpha"
    assert found.subjects[0].box == pl.Box(30, 20, 80, 70)
    assert pl.localize(tmp_path / "photos" / f"cup.{suffix}", model, "subject").method == "subject"


def test_an_opaque_alpha_is_no_mask(tmp_path: Path, model: pl.Loaded) -> None:
    rounded = photo(0).convert("RGBA")
    rounded.putpixel((0, 0), (0, 0, 0, 0))
    assert pl.localize(rounded, model).method == "subject"
    assert pl.localize(Image.new("RGBA", (60, 60)), model).method == "subject"


@pytest.mark.parametrize(
    ("suffix", "background", "made_as"),
    [
        ("jpg", None, "WEBP"),
        ("png", None, "PNG"),
        ("webp", None, "WEBP"),
        ("tif", None, "PNG"),
        ("jpg", "white", "JPEG"),
    ],
)
def test_cutouts_are_files_that_can_hold_them(
    tmp_path: Path, model: pl.Loaded, suffix: str, background: str | None, made_as: str
) -> None:
    (tmp_path / "photos").mkdir()
    photo(1).save(tmp_path / "photos" / f"a.{suffix}")
    photo(1).convert("L").save(tmp_path / "photos" / f"grey.{suffix}")
    settings = CropSettings(cutout=True, background=background, size="80x80", pad="blur", margin=0.5)
    assert crop(tmp_path / "photos", tmp_path / "out", model, settings).failed == 0
    for made in crops_in(tmp_path / "out").values():
        assert made.format == made_as
        assert made.size == (80, 80)
        assert made.mode == ("RGBA" if background is None else "RGB")


# Rows and names


def test_crops_have_numbers_where_all_are_asked_for(photos: Path, tmp_path: Path, model: pl.Loaded) -> None:
    summary = crop(photos, tmp_path / "out", model, CropSettings(subjects=None))
    rows = rows_of(tmp_path / "out")
    for row in rows:
        stem = Path(row["path"]).stem
        assert row["crops"] == [f"crops/{stem}.crop{number}.jpg" for number in range(1, len(row["cuts"]) + 1)]
        assert len(row["crops"]) == row["subjects"] >= 1
    assert summary.subjects == sum(row["subjects"] for row in rows)


def test_what_the_photo_cuts_off_is_said(tmp_path: Path, model: pl.Loaded) -> None:
    (tmp_path / "photos").mkdir()
    for name, spot in (("inside", (60, 40, 100, 80)), ("left", (0, 40, 60, 80))):
        photo(0).save(tmp_path / "photos" / f"{name}.png")
        add_correction(tmp_path, str(tmp_path / "photos" / f"{name}.png"), said(boxes=[list(spot)]))
    (tmp_path / "out").mkdir()
    (tmp_path / "corrections.jsonl").rename(tmp_path / "out" / "corrections.jsonl")
    summary = crop(tmp_path / "photos", tmp_path / "out", model)
    assert [row["boxes"][0]["cut_off"] for row in rows_of(tmp_path / "out")] == [[], ["left"]]
    assert summary.cut_off == 1
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["cut_off"] == 1


@pytest.mark.parametrize("by", ["decision", "group", "label"])
def test_crops_are_sorted_into_folders(photos: Path, tmp_path: Path, model: pl.Loaded, by: Any) -> None:
    crop(photos, tmp_path / "out", model, CropSettings(sort=by))
    for row in rows_of(tmp_path / "out"):
        folder = row[by] or ("unnamed" if by == "label" else "unknown")
        assert row["crops"] == [f"crops/{folder}/{Path(row['path']).name}"]
        assert (tmp_path / "out" / row["crops"][0]).is_file()


def test_without_crops_links_are_sorted(photos: Path, tmp_path: Path, model: pl.Loaded) -> None:
    settings = CropSettings(sort="decision", boxes_only=True)
    out = tmp_path / "out"
    crop(photos, out, model, settings)
    links = {row["path"]: out / "sorted" / row["decision"] / Path(row["path"]).name for row in rows_of(out)}
    assert all(link.is_symlink() and link.samefile(path) for path, link in links.items())
    first = next(iter(links.values()))
    first.unlink()
    (out / "sorted" / "mine.txt").write_text("kept")
    crop(photos, out, model, settings)
    assert first.is_symlink()
    (photos / "001.jpg").unlink()
    crop(photos, out, model, settings)
    assert sum(each.is_symlink() for each in (out / "sorted").rglob("*")) == 3
    assert (out / "sorted" / "mine.txt").exists()


# A second run


def test_what_differs_from_the_run_before_is_counted(photos: Path, tmp_path: Path, model: pl.Loaded) -> None:
    out = tmp_path / "out"
    assert crop(photos, out, model).changes is None
    assert crop(photos, out, model).changes == {"new": 0, "changed": 0, "gone": 0, "as_before": 4}
    photo(20).save(photos / "new.jpg")
    photo(21).save(photos / "001.jpg")
    (photos / "002.jpg").unlink()
    summary = crop(photos, out, model)
    assert summary.changes == {"new": 1, "changed": 1, "gone": 1, "as_before": 2}
    assert (summary.crops_of_others, summary.pruned) == (1, 0)
    summary = crop(photos, out, model)
    assert summary.nothing_to_do
    assert summary.changes == {"new": 0, "changed": 0, "gone": 0, "as_before": 4}
    summary = crop(photos, out, model, prune=True)
    assert (summary.pruned, summary.crops_of_others) == (1, 0)
    assert not (out / "crops" / "002.jpg").exists()
    photo(2).save(photos / "002.jpg", quality=90)
    assert crop(photos, out, model).changes == {"new": 1, "changed": 0, "gone": 0, "as_before": 4}
    crop(photos, tmp_path / "whole", model)
    assert everything_in(out) == everything_in(tmp_path / "whole")


def test_prune_keeps_the_crops_of_photos_that_are_there(photos: Path, tmp_path: Path, model: pl.Loaded) -> None:
    out = tmp_path / "out"
    crop(photos, out, model)
    summary = crop([photos / "000.jpg"], out, model, prune=True)
    assert (summary.pruned, summary.crops_of_others) == (0, 3)


def test_what_could_not_be_read_is_tried_again_once_it_can(
    photos: Path, tmp_path: Path, model: pl.Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    pillow_heif = pytest.importorskip("pillow_heif")
    pillow_heif.from_pillow(photo(5)).save(photos / "phone.heic")
    out = tmp_path / "out"
    with monkeypatch.context() as without:
        for module in (pipeline, results):
            without.setattr(module, "readers", lambda: "without")
        without.setitem(__import__("sys").modules, "pillow_heif", None)
        assert crop(photos, out, model).reasons == {"unsupported": 1}
        assert crop(photos, out, model).nothing_to_do
    summary = crop(photos, out, model)
    assert (summary.computed, summary.failed) == (1, 0)


# What is said instead of what was found


def said(**changes: Any) -> dict[str, Any]:
    return {"decision": "subject", "boxes": [[10, 20, 60, 70]], "group": None, "label": "Fox"} | changes


@pytest.mark.parametrize("settings", [CropSettings(), CropSettings(size="64x64", scale="same", sort="label")])
def test_everything_follows_a_correction(
    photos: Path, tmp_path: Path, model: pl.Loaded, settings: CropSettings
) -> None:
    out, formats = tmp_path / "out", ["megadetector", "coco"]
    crop(photos, out, model, settings, formats=formats)
    before = everything_in(out)
    add_correction(out, str(photos / "001.jpg"), said())
    add_correction(out, str(photos / "002.jpg"), said(decision="none", boxes=[]))
    summary = crop(photos, out, model, settings)
    assert settings.scale == "same" or summary.computed == 2
    rows = rows_of(out)
    assert (rows[1]["decision"], rows[1]["method"], rows[1]["label"]) == ("subject", "corrected", "Fox")
    assert rows[1]["boxes"][0]["xyxy"] == [10, 20, 60, 70]
    assert crops_in(out)[rows[1]["crops"][0][len("crops/") :]].size == ((54, 54) if settings.size is None else (64, 64))
    assert (rows[2]["decision"], rows[2]["crops"]) == ("none", [])
    assert len(list((out / "crops").rglob("*.jpg"))) == 3
    images = json.loads((out / "megadetector.json").read_text())["images"]
    assert images[1]["detections"][0]["conf"] == 1.0
    assert images[2]["detections"] == []
    assert [10, 20, 50, 50] in [each["bbox"] for each in json.loads((out / "coco.json").read_text())["annotations"]]
    corrected = {name: content for name, content in everything_in(out).items() if name != "corrections.jsonl"}
    crop(photos, out, model, settings, formats=formats, overwrite=True)
    again = {name: content for name, content in everything_in(out).items() if name != "corrections.jsonl"}
    assert again == corrected, "corrections outlive --overwrite"
    for name in ("001.jpg", "002.jpg"):
        add_correction(out, str(photos / name), {"undone": True})
    crop(photos, out, model, settings)
    (out / "corrections.jsonl").unlink()
    assert everything_in(out) == before


def test_corrections_are_labels_to_learn_from(tmp_path: Path) -> None:
    with pytest.raises(PatchlightError, match="no corrections to learn from"):
        write_labels(tmp_path)
    add_correction(tmp_path, "/a,b.jpg", said())
    add_correction(tmp_path, "/c.jpg", said(label=None, group="animal", boxes=[]))
    add_correction(tmp_path, "/d.jpg", said(decision="none", boxes=[]))
    add_correction(tmp_path, "/e.jpg", said())
    add_correction(tmp_path, "/e.jpg", {"undone": True})
    with write_labels(tmp_path).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["file"], row["label"], row["boxes"]) for row in rows] == [
        ("/a,b.jpg", "Fox", "[[10.0, 20.0, 60.0, 70.0]]"),
        ("/c.jpg", "animal", ""),
        ("/d.jpg", "empty", "[]"),
    ]


def test_a_table_of_the_users_is_not_overwritten(tmp_path: Path) -> None:
    add_correction(tmp_path, "/a.jpg", said())
    path = write_labels(tmp_path)
    add_correction(tmp_path, "/b.jpg", said())
    assert "/b.jpg" in write_labels(tmp_path).read_text()
    path.write_text("my own table\n")
    with pytest.raises(PatchlightError, match=r"labels\.csv: is not as .* wrote it"):
        write_labels(tmp_path)
    assert path.read_text() == "my own table\n"
    path.unlink()
    assert "/b.jpg" in write_labels(tmp_path).read_text()


@pytest.mark.parametrize(("end", "read"), [("", True), ("\n", True), (None, False)])
def test_a_last_line_without_its_end(tmp_path: Path, end: str | None, read: bool) -> None:
    lines = [json.dumps({"file": f"/{name}.jpg"} | said()) for name in "ab"]
    file = tmp_path / "corrections.jsonl"
    file.write_text("\n".join(lines) + end if end is not None else "\n".join(lines)[:-5])
    assert ("/b.jpg" in read_corrections(tmp_path)) == read
    add_correction(tmp_path, "/c.jpg", said())
    assert list(read_corrections(tmp_path)) == ["/a.jpg", *(["/b.jpg"] if read else []), "/c.jpg"]
    assert file.read_text().startswith(lines[0] + "\n" + (lines[1] + "\n" if read else ""))


def test_what_a_corrected_row_says(photos: Path, tmp_path: Path, model: pl.Loaded) -> None:
    crop(photos, tmp_path / "out", model)
    row = rows_of(tmp_path / "out")[0] | {"group": "animal", "group_confidence": 0.9}
    override = check_correction(said(decision="several", label=None))
    assert override is not None
    corrected = override.applied(row)
    assert (corrected["group"], corrected["group_confidence"]) == ("unknown", None)
    assert (corrected["subjects"], len(corrected["boxes"])) == (2, 1)


def test_a_model_learns_from_corrections(tmp_path: Path, model: pl.Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    make_photos(tmp_path / "photos", 12)
    out = tmp_path / "out"
    crop(tmp_path / "photos", out, model)
    for number in range(12):
        changes: dict[str, Any] = {} if number % 2 else {"decision": "none", "boxes": []}
        add_correction(out, str(tmp_path / "photos" / f"{number:03}.jpg"), said(**changes))
    start = save_model(tmp_path / "start")
    asked = ["finetune", "--from", str(out), "--out", str(tmp_path / "mine"), "--model", str(start)]
    for more in (["--set", "epochs=1"], ["--set", "data.workers=0"], ["--device", "cpu"]):
        asked += more
    monkeypatch.setattr("sys.argv", ["patchlight", *asked])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert pl.load(tmp_path / "mine").labels == ("Fox", "empty")


def test_corrections_that_were_cut_off_or_are_none(tmp_path: Path) -> None:
    add_correction(tmp_path, "/a.jpg", said())
    path = tmp_path / "corrections.jsonl"
    path.write_bytes(path.read_bytes() + b'{"file": "/b.jpg", "dec')
    assert set(read_corrections(tmp_path)) == {"/a.jpg"}
    add_correction(tmp_path, "/c.jpg", said())
    assert set(read_corrections(tmp_path)) == {"/a.jpg", "/c.jpg"}
    path.write_text('{"file": "/a.jpg", "decision": "maybe", "boxes": []}\n')
    with pytest.raises(PatchlightError, match=r"line 1 is not a correction \(decision is one of"):
        read_corrections(tmp_path)


def megadetector(**changes: Any) -> dict[str, Any]:
    found = [{"category": "1", "conf": 0.9, "bbox": [0.25, 0.25, 0.5, 0.5]}]
    return {
        "info": {"format_version": "1.4"},
        "detection_categories": {"1": "animal", "2": "person", "3": "vehicle"},
        "images": [
            {"file": "000.jpg", "detections": found},
            {"file": "001.jpg", "detections": []},
            {"file": "002.jpg", "detections": [found[0] | {"conf": 0.15, "category": "3"}]},
        ],
    } | changes


def test_boxes_of_megadetector_are_a_start(photos: Path, tmp_path: Path, model: pl.Loaded) -> None:
    path, out = tmp_path / "md.json", tmp_path / "out"
    path.write_text(json.dumps(megadetector()))
    settings = CropSettings(boxes=str(path))
    crop(photos, out, model, settings)
    rows = rows_of(out)
    assert [row["decision"] for row in rows[:3]] == ["subject", "none", "unsure"]
    assert [row["method"] for row in rows] == ["boxes"] * 3 + ["subject"]
    assert rows[0]["boxes"][0]["xyxy"] == [40, 30, 120, 90]
    assert (rows[0]["group"], rows[0]["confidence"], rows[2]["group"]) == ("animal", 0.9, "vehicle")
    assert len(list((out / "crops").iterdir())) == 3
    add_correction(out, str(photos / "000.jpg"), said())
    crop(photos, out, model, settings)
    assert rows_of(out)[0]["method"] == "corrected"


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"images": 3}', json.dumps(megadetector(images=[{"file": "other.jpg", "detections": []}]))],
)
def test_a_file_that_is_not_megadetectors_is_refused(
    photos: Path, tmp_path: Path, model: pl.Loaded, content: str
) -> None:
    path = tmp_path / "md.json"
    path.write_text(content)
    with pytest.raises(PatchlightError, match=r"md.json: "):
        crop(photos, tmp_path / "out", model, CropSettings(boxes=str(path)))
    assert not (tmp_path / "out").exists()


def test_workers_give_the_same_bytes(photos: Path, tmp_path: Path, model: pl.Loaded) -> None:
    settings = CropSettings(size="64x64", scale="same", cutout=True, sort="group", subjects=2)
    crop(photos, tmp_path / "here", model, settings)
    run_crop(photos, tmp_path / "there", settings, model=model, workers=2, device="cpu")
    assert everything_in(tmp_path / "here") == everything_in(tmp_path / "there")
    assert os.listdir(tmp_path / "here" / "crops")
    assert np.asarray(next(iter(crops_in(tmp_path / "here").values()))).shape == (64, 64, 4)


# Keywords


XMP = (
    b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    b'<rdf:Description rdf:about="" xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:subject><rdf:Bag>'
    b"<rdf:li>garden</rdf:li></rdf:Bag></dc:subject></rdf:Description></rdf:RDF></x:xmpmeta>"
)


def keywords_in(image: Image.Image) -> list[str]:
    xmp = image.info.get("xmp") or image.info.get("XML:com.adobe.xmp") or image.tag_v2[700]  # type: ignore[attr-defined]
    root = ElementTree.fromstring(xmp if isinstance(xmp, bytes) else xmp.encode())
    return [each.text or "" for each in root.iter("{http://www.w3.org/1999/02/22-rdf-syntax-ns#}li")]


def named_photos(folder: Path, out: Path) -> None:
    folder.mkdir()
    out.mkdir()
    names = ["plain.jpg", "noted.jpg", "a.png", "a.webp", "a.tif"]
    for number, name in enumerate(names):
        more = {"xmp": XMP} if name == "noted.jpg" else {}
        photo(number).save(folder / name, **more)
        add_correction(out, str(folder / name), said(group="animal", label="Füchse & <Co>"))


@pytest.mark.parametrize("more", [{}, {"cutout": True}])
def test_group_and_label_become_keywords(tmp_path: Path, model: pl.Loaded, more: dict[str, Any]) -> None:
    out = tmp_path / "out"
    named_photos(tmp_path / "photos", out)
    assert crop(tmp_path / "photos", out, model, CropSettings(keywords=True, **more)).failed == 0
    for name, image in crops_in(out).items():
        before = ["garden"] if name.startswith("noted") else []
        assert keywords_in(image) == [*before, "animal", "Füchse & <Co>"], name
        if image.format == "JPEG":
            iptc = IptcImagePlugin.getiptcinfo(image)
            assert iptc is not None
            assert iptc[2, 25] == [b"animal", "Füchse & <Co>".encode()]


def test_exiftool_reads_the_keywords(tmp_path: Path, model: pl.Loaded) -> None:
    exiftool = shutil.which("exiftool")
    if exiftool is None:
        pytest.skip("exiftool is not installed")
    out = tmp_path / "out"
    named_photos(tmp_path / "photos", out)
    crop(tmp_path / "photos", out, model, CropSettings(keywords=True))
    asked = [
        exiftool,
        "-j",
        "-charset",
        "iptc=utf8",
        "-XMP-dc:Subject",
        "-IPTC:Keywords",
        "-Warning",
        str(out / "crops"),
    ]
    done = subprocess.run(asked, capture_output=True, check=True)
    read = {Path(each["SourceFile"]).name: each for each in json.loads(done.stdout)}
    assert len(read) == 5
    for name, each in read.items():
        before = ["garden"] if name == "noted.jpg" else []
        assert each["Subject"] == [*before, "animal", "Füchse & <Co>"], name
        assert "Warning" not in each
        if name.endswith(".jpg"):
            assert each["Keywords"] == ["animal", "Füchse & <Co>"]
