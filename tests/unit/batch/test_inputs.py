"""Which files a run is about, and names of crops that no two photos share."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchlight.batch.inputs import Inputs, crop_name, find_photos, with_places
from patchlight.errors import PatchlightError


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def names(inputs: Inputs, base: Path) -> list[str]:
    return [os.path.relpath(photo.file, base) for photo in inputs.photos]


def places(inputs: Inputs) -> list[str]:
    return [photo.place for photo in with_places(inputs, {})]


def test_folders_are_read_in_depth_and_by_name(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    touch(photos / "b.jpg", photos / "a" / "z.JPG", photos / "a" / "deep" / "er.tiff", photos / "c.png")
    touch(photos / "notes.txt", photos / "Thumbs.db", photos / ".hidden.jpg", photos / ".trash" / "d.jpg")
    found = find_photos([photos], tmp_path / "out")
    assert names(found, photos) == ["a/deep/er.tiff", "a/z.JPG", "b.jpg", "c.png"]
    assert places(found) == ["a/deep/er.tiff", "a/z.JPG", "b.jpg", "c.png"]
    assert found.base == str(photos)


def test_paths_stay_as_they_were_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path / "photos" / "a.jpg", tmp_path / "-b.jpg")
    monkeypatch.chdir(tmp_path)
    found = find_photos(["./photos", "-b.jpg"], Path("out"))
    assert [photo.path for photo in found.photos] == ["./photos/a.jpg", "-b.jpg"]


def test_what_is_named_is_taken_whatever_it_is_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path / "notes.txt", tmp_path / "a.jpg", tmp_path / ".hidden.jpg")
    monkeypatch.chdir(tmp_path)
    found = find_photos(["notes.txt", "a.jpg", ".", "./a.jpg", ".hidden.jpg"], Path("out"))
    assert names(found, tmp_path) == ["notes.txt", "a.jpg", ".hidden.jpg"]
    assert found.named == tuple(str(tmp_path / name) for name in ("notes.txt", "a.jpg", ".hidden.jpg"))
    assert all(photo.found for photo in found.photos)
    assert found.skipped == {}, "the text was named, and is taken"


def test_what_is_named_and_not_there_is_a_mistake_unless_it_was_there_before(tmp_path: Path) -> None:
    touch(tmp_path / "a.jpg")
    named = [tmp_path / "a.jpg", tmp_path / "gone.jpg"]
    with pytest.raises(PatchlightError, match=r"gone\.jpg: there is no such file or folder; correct the path"):
        find_photos(named, tmp_path / "out")
    with pytest.raises(PatchlightError, match=r"gone\.jpg"):
        find_photos(named, tmp_path / "out", lambda: [str(tmp_path / "a.jpg")])
    found = find_photos(named, tmp_path / "out", lambda: [str(tmp_path / "gone.jpg")])
    assert [photo.found for photo in found.photos] == [True, False]


def test_what_lies_in_a_folder_that_may_not_be_entered_gets_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.lstat

    def refuse(path: Any, *rest: Any, **named: Any) -> os.stat_result:
        if "closed" in str(path):
            raise PermissionError(13, "Permission denied")
        return real(path, *rest, **named)

    monkeypatch.setattr(os, "lstat", refuse)  # root may enter everything
    (photo,) = find_photos([tmp_path / "closed" / "a.jpg"], tmp_path / "out").photos
    assert photo.found


def test_what_is_skipped_is_counted_by_its_ending(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    touch(photos / "a.jpg", photos / "notes.txt", photos / "deep" / "more.TXT", photos / "clip.mov", photos / "README")
    touch(photos / ".DS_Store", photos / ".cache" / "b.txt")
    assert find_photos([photos], tmp_path / "out").skipped == {".txt": 2, ".mov": 1, "": 1}
    assert find_photos([photos, photos / "deep", photos], tmp_path / "out").skipped[".txt"] == 2, "each once"
    # What a run has written is none of the user's files.
    touch(photos / "out" / ".run" / "run.json", photos / "out" / "summary.json", photos / "out" / "report.html")
    assert find_photos([photos], photos / "out").skipped == {".txt": 2, ".mov": 1, "": 1}


def test_patterns_that_the_shell_left(tmp_path: Path) -> None:
    touch(tmp_path / "a.jpg", tmp_path / "b.jpg", tmp_path / "deep" / "c.jpg", tmp_path / "odd[1].jpg")
    assert names(find_photos([str(tmp_path / "?.jpg")], tmp_path / "o"), tmp_path) == ["a.jpg", "b.jpg"]
    assert names(find_photos([str(tmp_path / "**" / "c.jpg")], tmp_path / "o"), tmp_path) == ["deep/c.jpg"]
    assert names(find_photos([str(tmp_path / "odd[1].jpg")], tmp_path / "o"), tmp_path) == ["odd[1].jpg"]
    with pytest.raises(PatchlightError, match="nothing matches"):
        find_photos([str(tmp_path / "*.png")], tmp_path / "o")


@pytest.mark.parametrize("what", ["empty", "missing", "nothing", "no name", "zero byte"])
def test_nothing_to_do_is_said_in_one_line(tmp_path: Path, what: str) -> None:
    (tmp_path / "empty").mkdir()
    given = {"empty": [tmp_path / "empty"], "missing": [tmp_path / "typo"], "nothing": [], "no name": [""]}
    with pytest.raises(PatchlightError) as caught:
        find_photos(given.get(what, ["a\0b.jpg"]), tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_what_a_run_wrote_is_not_its_input(tmp_path: Path) -> None:
    touch(tmp_path / "a.jpg", tmp_path / "out" / "crops" / "a.jpg", tmp_path / "out" / "thumbs" / "0.jpg")
    touch(tmp_path / "crops" / "mine.jpg")
    assert names(find_photos([tmp_path], tmp_path / "out"), tmp_path) == ["a.jpg", "crops/mine.jpg"]
    assert names(find_photos([tmp_path], tmp_path), tmp_path) == ["a.jpg", "out/crops/a.jpg", "out/thumbs/0.jpg"]


def test_links(tmp_path: Path) -> None:
    photos, elsewhere = tmp_path / "photos", tmp_path / "elsewhere"
    touch(photos / "sub" / "a.jpg", elsewhere / "b.jpg")
    (photos / "loop").symlink_to(photos)
    (photos / "sub" / "up").symlink_to("..")
    (photos / "again").symlink_to(photos / "sub")
    (photos / "out").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(photos)
    (photos / "self.jpg").symlink_to("self.jpg")
    (photos / "dangling.jpg").symlink_to("nowhere")
    (photos / "link.jpg").symlink_to("sub/a.jpg")
    found = find_photos([photos], tmp_path / "o")
    assert names(found, photos) == ["dangling.jpg", "link.jpg", "out/b.jpg", "self.jpg", "sub/a.jpg"]


def test_what_is_no_file_gets_its_row_and_a_folder_is_entered(tmp_path: Path) -> None:
    touch(tmp_path / "folder.jpg" / "inside.jpg")
    os.mkfifo(tmp_path / "pipe.jpg")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket.jpg"))
        found = find_photos([tmp_path], tmp_path / "o")
    assert names(found, tmp_path) == ["folder.jpg/inside.jpg", "pipe.jpg", "socket.jpg"]


def test_a_folder_that_cannot_be_listed_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path / "a.jpg", tmp_path / "locked" / "b.jpg")
    scandir = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    found = find_photos([tmp_path], tmp_path / "o")
    assert names(found, tmp_path) == ["a.jpg", "locked"]
    assert found.photos[1].trouble is not None
    assert "Permission denied" in found.photos[1].trouble


def test_a_very_deep_folder(tmp_path: Path) -> None:
    folder = tmp_path
    for _ in range(300):
        folder = folder / "d"
    touch(folder / "a.jpg")
    assert len(find_photos([tmp_path], tmp_path / "o").photos) == 1


def test_names_of_every_kind(tmp_path: Path) -> None:
    odd = [b"new\nline.jpg", b"quo'\"te.jpg", b"<img onerror=x>.jpg", b"=cmd|calc.jpg", b"\xff\xfe.jpg", b"-rf.jpg"]
    for name in odd:
        touch(tmp_path / os.fsdecode(name))
    found = find_photos([tmp_path], tmp_path / "o")
    assert sorted(os.fsencode(os.path.basename(photo.path)) for photo in found.photos) == sorted(odd)


# Places


def test_places_keep_the_folders_below_what_is_shared(tmp_path: Path) -> None:
    touch(tmp_path / "x" / "one" / "a.jpg", tmp_path / "x" / "two" / "a.jpg")
    several = find_photos([tmp_path / "x" / "one", tmp_path / "x" / "two" / "a.jpg"], tmp_path / "o")
    assert places(several) == ["one/a.jpg", "two/a.jpg"]
    assert several.base == str(tmp_path / "x")


def test_places_that_differ_in_case_alone_are_told_apart(tmp_path: Path) -> None:
    touch(tmp_path / "a.jpg", tmp_path / "A.JPG", tmp_path / "a.png", tmp_path / "A.jpg")
    found = places(find_photos([tmp_path], tmp_path / "o"))
    assert found[0] == "A.JPG"
    assert "a.png" in found
    assert len({place.casefold() for place in found}) == 4


def test_a_photo_keeps_its_place_and_no_other_takes_it(tmp_path: Path) -> None:
    touch(tmp_path / "photos" / "more" / "y.jpg", tmp_path / "more" / "y.jpg")
    first = find_photos([tmp_path / "photos"], tmp_path / "o")
    kept = {photo.file: photo.place for photo in with_places(first, {})}
    assert list(kept.values()) == ["more/y.jpg"]
    both = with_places(find_photos([tmp_path / "photos", tmp_path / "more"], tmp_path / "o"), kept)
    assert both[0].place == "more/y.jpg"
    assert both[1].place != "more/y.jpg"
    assert both[1].place.startswith("more/y~")


def test_long_names_are_shortened_and_stay_apart(tmp_path: Path) -> None:
    long = ["ä" * 120 + end for end in ("1.jpg", "2.jpg", "." + "x" * 12)]
    touch(*(tmp_path / name for name in long))
    found = places(find_photos([tmp_path / name for name in long], tmp_path / "o"))
    assert len(set(found)) == 3
    assert found[0].endswith("ä1.jpg"), "names differ at their ends"
    assert found[1].endswith("ä2.jpg")
    for place in found:
        name = crop_name(place, 12, "JPEG")
        assert len(os.fsencode(name)) < 235
        touch(tmp_path / f".{name}.1234567.tmp")


@pytest.mark.parametrize(
    ("place", "number", "file_format", "name"),
    [
        ("d/a.jpg", 1, "JPEG", "d/a.jpg"),
        ("a.JPEG", 1, "JPEG", "a.JPEG"),
        ("a.jpg", 2, "JPEG", "a.crop2.jpg"),
        ("a.jpg", 1, "PNG", "a.jpg.crop1.png"),
        ("x.bmp", 1, "PNG", "x.bmp.crop1.png"),
        ("x.bmp.png", 1, "PNG", "x.bmp.png"),
        ("x.bmp.png", 2, "PNG", "x.bmp.png.crop2.png"),
        ("a.crop2.jpg", 1, "JPEG", "a.crop2.crop1.jpg"),
        ("scan", 1, "JPEG", "scan.photo.crop1.jpg"),
    ],
)
def test_names_of_crops(place: str, number: int, file_format: str, name: str) -> None:
    assert crop_name(place, number, file_format) == name


parts = st.sampled_from(["a", "b", ".jpg", ".JPG", ".png", ".bmp", ".photo", ".crop1", ".crop2", ".tif", ".x"])
photos = st.tuples(
    st.lists(parts, min_size=1, max_size=5).map("".join),
    st.integers(1, 3),
    st.sampled_from(["JPEG", "PNG", "TIFF", "WEBP"]),
)


@given(st.lists(photos, min_size=2, max_size=30, unique_by=lambda each: (each[0].casefold(), each[1])))
def test_no_two_photos_share_a_crops_name(several: list[tuple[str, int, str]]) -> None:
    formats = {}  # a photo has one
    made = [crop_name(place, number, formats.setdefault(place, kind)).casefold() for place, number, kind in several]
    assert len(set(made)) == len(made)


def test_what_another_run_wrote_is_no_photo(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    touch(photos / "a.jpg", photos / "crops" / "a.jpg", photos / "thumbs" / "0.jpg", photos / ".run" / "run.json")
    touch(photos / "camera" / "crops" / "of-wheat.jpg")  # a folder of this name that no run has written
    found = find_photos([photos], tmp_path / "elsewhere")
    assert names(found, photos) == ["a.jpg", "camera/crops/of-wheat.jpg"]
