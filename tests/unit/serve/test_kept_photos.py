import pytest

from patchlight.serve.limits import Limits
from patchlight.serve.photos import Photo, Photos, UnknownPhotoError, crop_stem, plain_name
from served import serving  # noqa: F401  (skips where the extra is missing)


def photo(length: int = 10) -> Photo:
    return Photo(content=bytes(length), name="a.jpg", size=(4, 4), format="JPEG")


def test_those_used_least_lately_make_room() -> None:
    photos = Photos(Limits(photos=3, photo_bytes=100))
    a, b, c, d = (photo() for _ in range(4))
    assert [photos.add(each) for each in (a, b, c)] == [[], [], []]
    photos.get(a.id)
    assert photos.add(d) == [b.id]
    large = photo(85)
    assert photos.add(large) == [c.id, a.id]
    assert len(photos) == 2
    with pytest.raises(UnknownPhotoError, match="send it again"):
        photos.get(c.id)
    photos.remove(large.id)
    assert photos.add(photo(90)) == []


def test_ids_are_long_and_differ() -> None:
    ids = {photo().id for _ in range(200)}
    assert len(ids) == 200
    assert min(map(len, ids)) >= 20


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("cat.jpg", "cat.jpg"),
        ("../../etc/passwd", "passwd"),
        ("C:\\photos\\cat.jpg", "cat.jpg"),
        ("two\nlines.jpg", "two_lines.jpg"),
        ("..", "photo"),
        (None, "photo"),
        ("\u202egpj.exe", "_gpj.exe"),
        ("x" * 200 + "y" * 100 + "1.jpg", "x" * 79 + "…" + "y" * 35 + "1.jpg"),
    ],
)
def test_names_are_one_short_line(given: str | None, name: str) -> None:
    assert plain_name(given) == name


def test_a_crop_is_called_like_its_photo() -> None:
    assert crop_stem("cat.JPG") == "cat"
    assert crop_stem('a<b>:"c".png') == "a_b___c_"
    assert crop_stem("no ending") == "no ending"
