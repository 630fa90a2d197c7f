"""Parts of a run on several machines, joined: what one machine would have made, byte for byte."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from crop_runs import everything_in, make_photos, photo, rows_of, run_crop, save_model
from patchlight.batch.inputs import find_photos
from patchlight.batch.merge import merge
from patchlight.batch.overrides import add_correction, read_corrections
from patchlight.batch.parts import Part, take_part
from patchlight.batch.readers import EmbedSettings
from patchlight.batch.settings import CropRunSettings, CropSettings
from patchlight.batch.summary import CropSummary
from patchlight.batch.table_run import embed_photos
from patchlight.errors import PatchlightError
from patchlight.reporting import SILENT


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    make_photos(tmp_path / "photos" / "a", 8)
    make_photos(tmp_path / "photos" / "b", 8, first=4)
    photo(50).save(tmp_path / "photos" / "a" / "A.JPG", "JPEG")
    (tmp_path / "photos" / "b" / "bad.jpg").write_bytes(b"none")
    (tmp_path / "photos" / "notes.txt").write_text("")
    return tmp_path / "photos"


def crop_parts(photos: Path, out: Path, model: Path, parts: Sequence[int] = (1, 2, 3), **more: Any) -> list[Path]:
    made = [out / f"part-{number}" for number in parts]
    for number, folder in zip(parts, made, strict=True):
        settings = more.get("settings")
        run_crop(
            photos,
            folder,
            settings,
            model=model,
            device="cpu",
            workers=0,
            part=f"{number}/3",
            formats=["coco"],
            overlay=more.get("overlay", False),
        )
    return made


def joined(parts: Sequence[Path], out: Path, **more: Any) -> Any:
    return merge(parts, out, reporter=SILENT, **more)


def test_parts_of_another_version_or_damaged_are_refused_in_a_line(tmp_path: Path, model: Path) -> None:
    make_photos(tmp_path / "photos", 3)
    for part in (1, 2):
        run_crop(tmp_path / "photos", tmp_path / f"{part}", model=model, workers=0, part=f"{part}/2")
        about = tmp_path / f"{part}" / ".run" / "run.json"
        about.write_text(
            json.dumps({name: value for name, value in json.loads(about.read_text()).items() if name != "margin"})
        )
    parts = [tmp_path / "1", tmp_path / "2"]
    with pytest.raises(PatchlightError, match="1: was written by another version of this program; run"):
        merge(parts, tmp_path / "all")
    note = tmp_path / "1" / ".run" / "part.json"
    note.write_text(note.read_text().replace('"files"', '"file"'))
    with pytest.raises(PatchlightError, match=r"1: part.json of one of these parts is damaged; run"):
        merge(parts, tmp_path / "all")


def test_shares_are_fixed_whole_and_apart(photos: Path) -> None:
    inputs = find_photos([str(photos)])
    shares = [take_part(inputs, f"{number}/3")[0].photos for number in (1, 2, 3)]
    assert sorted(each.file for share in shares for each in share) == sorted(each.file for each in inputs.photos)
    assert min(map(len, shares)) > 0
    (photos / "new.jpg").write_bytes(b"")
    again = find_photos([str(photos)])
    for number, share in enumerate(shares, 1):
        assert set(share) <= set(take_part(again, f"{number}/3")[0].photos)  # one more moves none of the others
    # Wherever the folder lies, and for ever: the shares of two machines must not overlap.
    numbers = [next(n for n in (1, 2, 3) if Part(n, 3).holds(name)) for name in ("a/000.jpg", "a/001.jpg", "b/004.jpg")]
    assert numbers == [3, 3, 3]
    counts = [sum(Part(number, 64).holds(f"{name}.jpg") for name in range(6400)) for number in range(1, 65)]
    assert 60 < min(counts) <= max(counts) < 140


@pytest.mark.parametrize("settings", [CropSettings(subjects=None, aspect="1:1"), CropSettings(burst=True)])
def test_crops_of_parts_are_those_of_one_run(photos: Path, tmp_path: Path, model: Path, settings: CropSettings) -> None:
    how = {"device": "cpu", "workers": 0, "formats": ["coco"], "overlay": True}
    run_crop(photos, tmp_path / "one", settings, model=model, **how)
    parts = crop_parts(photos, tmp_path, model, settings=settings, parts=(1, 2, 3), overlay=True)
    summary = joined([parts[2], parts[0], parts[1]], tmp_path / "all")
    assert isinstance(summary, CropSummary)
    assert (summary.photos, summary.failed, summary.exit_code) == (18, 1, 3)
    one, other = everything_in(tmp_path / "one"), everything_in(tmp_path / "all")
    assert one.keys() == other.keys()
    assert [name for name in one if one[name] != other[name]] == []
    assert len(rows_of(tmp_path / "all")) == 18
    if not settings.burst:  # it goes on as if it had done it all itself
        photo(60).save(photos / "c.jpg")
        more = run_crop(photos, tmp_path / "all", settings, model=model, device="cpu", workers=0, formats=["coco"])
        assert (more.photos, more.computed) == (19, 1)


def test_joining_twice_and_parts_that_went_on(photos: Path, tmp_path: Path, model: Path) -> None:
    parts = crop_parts(photos, tmp_path, model)
    joined(parts, tmp_path / "all")
    before = everything_in(tmp_path / "all")
    joined(parts, tmp_path / "all")
    assert everything_in(tmp_path / "all") == before
    photo(70).save(photos / "a" / "001.jpg")
    crop_parts(photos, tmp_path, model)
    joined(parts, tmp_path / "all")
    run_crop(photos, tmp_path / "one", model=model, device="cpu", workers=0, formats=["coco"])
    assert everything_in(tmp_path / "all") == everything_in(tmp_path / "one")


def test_tables_of_parts_are_those_of_one_run(photos: Path, tmp_path: Path, model: Path) -> None:
    def embed(name: str, part: str | None, **settings: Any) -> Path:
        how = CropRunSettings(device="cpu", workers=0, part=part)
        embed_photos(photos, tmp_path / name, EmbedSettings(**settings), how, model=model, reporter=SILENT)
        return tmp_path / name

    one = embed("one.npz", None, dtype="float16")
    parts = [embed(f"{number}.npz", f"{number}/2", dtype="float16") for number in (1, 2)]
    summary = joined(parts, tmp_path / "all.npz")
    assert (summary.photos, summary.failed) == (18, 1)
    assert (tmp_path / "all.npz").read_bytes() == one.read_bytes()
    assert joined(parts, tmp_path / "all.npz").nothing_to_do
    with pytest.raises(PatchlightError, match=r'was started with part="1/2", not with "2/2"|part="1/2", not "2/2"'):
        embed("1.npz", "2/2", dtype="float16")
    other = embed("other.npz", "2/2")
    with pytest.raises(PatchlightError, match="was made with dtype='float32', and"):
        joined([parts[0], other], tmp_path / "wrong.npz")
    assert not list(tmp_path.glob("wrong*"))


def test_what_does_not_fit_together_is_refused(photos: Path, tmp_path: Path, model: Path) -> None:
    parts = crop_parts(photos, tmp_path, model)
    whole = tmp_path / "whole"
    run_crop(photos, whole, model=model, device="cpu", workers=0)
    for given, complaint in (
        (parts[:2], r"are in parts that were not named \(3/3\); name them, too"),
        ([*parts, parts[0]], "part 1/3 was named twice"),
        ([whole], "is a whole run, and not a part of one"),
        ([*parts[:2], tmp_path / "none"], "holds no run of crop, embed or classify"),
        ([], "no parts were given"),
    ):
        with pytest.raises(PatchlightError, match=complaint):
            joined(given, tmp_path / "all")
    with pytest.raises(PatchlightError, match="is another model"):
        joined(parts, tmp_path / "all", model=save_model(tmp_path / "other", seed=3))
    (parts[1] / ".run" / "finished.json").unlink()
    with pytest.raises(PatchlightError, match="has not finished"):
        joined(parts, tmp_path / "all")
    assert not (tmp_path / "all").exists()


def test_a_part_without_photos_is_one_too(tmp_path: Path, model: Path) -> None:
    (one,) = make_photos(tmp_path / "photos", 1)
    for number in (1, 2):
        how = CropRunSettings(device="cpu", workers=0, part=f"{number}/2")
        embed_photos(one, tmp_path / f"{number}.npz", None, how, model=model, reporter=SILENT)
        run_crop(one, tmp_path / f"{number}", model=model, workers=0, device="cpu", part=f"{number}/2")
    assert sorted(len(rows_of(tmp_path / f"{number}")) for number in (1, 2)) == [0, 1]
    assert joined([tmp_path / "1.npz", tmp_path / "2.npz"], tmp_path / "all.npz").photos == 1
    assert joined([tmp_path / "1", tmp_path / "2"], tmp_path / "all").photos == 1


def test_crops_are_not_the_parts_own_files_to_change(photos: Path, tmp_path: Path, model: Path) -> None:
    parts = crop_parts(photos, tmp_path, model)
    joined(parts, tmp_path / "all")
    for part in parts:
        shutil.rmtree(part)
    crops = [path for path in (tmp_path / "all" / "crops").rglob("*") if path.is_file()]
    assert len(crops) == 17
    with Image.open(crops[0]) as image:
        image.load()


def test_a_report_without_pictures_and_none(photos: Path, tmp_path: Path, model: Path) -> None:
    run_crop(photos, tmp_path / "plain", model=model, device="cpu", workers=0, thumbs=False)
    assert (tmp_path / "plain" / "report.html").exists()
    assert not (tmp_path / "plain" / "thumbs").exists()
    again = run_crop(photos, tmp_path / "plain", model=model, device="cpu", workers=0, thumbs=False)
    assert again.nothing_to_do
    run_crop(photos, tmp_path / "bare", model=model, device="cpu", workers=0, report=False)
    assert not (tmp_path / "bare" / "report.html").exists()
    assert not (tmp_path / "bare" / "thumbs").exists()


def test_what_people_said_of_parts_is_joined_and_goes_on(photos: Path, tmp_path: Path, model: Path) -> None:
    parts = crop_parts(photos, tmp_path, model)
    joined(parts, tmp_path / "all")
    with_rows = next(part for part in parts if rows_of(part))
    file = rows_of(with_rows)[0]["path"]
    add_correction(with_rows, file, {"decision": "none", "boxes": []})
    crop_parts(photos, tmp_path, model)
    joined(parts, tmp_path / "all")
    row = next(row for row in rows_of(tmp_path / "all") if row["path"] == file)
    assert (row["decision"], row["method"]) == ("none", "corrected")
    assert read_corrections(tmp_path / "all").keys() == {file}
    # What is said in the whole counts more, and what the model had found is still known.
    add_correction(tmp_path / "all", file, {"undone": True})
    joined(parts, tmp_path / "all")
    assert read_corrections(tmp_path / "all") == {}


def test_parts_are_refused_where_they_would_not_be_those_of_one_run(photos: Path, tmp_path: Path, model: Path) -> None:
    for settings, said in (
        (CropSettings(video=1.0), "some of the videos"),
        (CropSettings(size="64x64", scale="same"), "looking at all photos"),
    ):
        with pytest.raises(PatchlightError, match=said):
            run_crop(photos, tmp_path / "part", settings=settings, model=model, device="cpu", workers=0, part="1/3")
        assert not (tmp_path / "part").exists()


def test_a_part_counts_its_own_changes(photos: Path, tmp_path: Path, model: Path) -> None:
    (part,) = crop_parts(photos, tmp_path, model, [1])
    again = run_crop(photos, part, model=model, device="cpu", workers=0, part="1/3")
    assert again.changes == {"new": 0, "changed": 0, "gone": 0, "as_before": again.photos}


def test_a_part_is_never_replaced_by_the_whole(photos: Path, tmp_path: Path, model: Path) -> None:
    parts = crop_parts(photos, tmp_path, model)
    before = everything_in(parts[0])
    with pytest.raises(PatchlightError, match="is one of the parts"):
        joined(parts, tmp_path / "part-2" / ".." / "part-1", overwrite=True)
    assert everything_in(parts[0]) == before
