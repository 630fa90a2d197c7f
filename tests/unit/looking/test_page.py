"""The page of `patchlight look`: whole in itself, escaped, and written all or nothing."""

import base64
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from patchlight.errors import PatchlightError
from patchlight.looking.page import TEXTS, Look, Picture, check_folder, write


def png(shade: int = 0, size: tuple[int, int] = (30, 20)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (shade,) * 3).save(file, "PNG")
    return file.getvalue()


def a_look(*names: str, photo: str = "cat.jpg", shade: int = 0) -> Look:
    pictures = [Picture(name, f"title of {name}", "a caption", png(shade)) for name in names or TEXTS]
    return Look(photo, (("model", "mine"),), ("a note",), tuple(pictures))


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.values: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.values += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_holds_every_picture_and_asks_for_nothing() -> None:
    page = a_look().html()
    tags = Tags(page)
    assert tags.names.count("figure") == tags.names.count("img") == len(TEXTS)
    sources = [value or "" for name, value in tags.values if name in ("src", "href", "srcset")]
    for source in sources:
        kind, content = re.fullmatch(r"data:image/(png|jpeg);base64,(.*)", source).groups()
        assert Image.open(io.BytesIO(base64.b64decode(content, validate=True))).format == kind.upper()
    assert len(sources) == len(TEXTS)
    assert not re.search(r"https?:|url\(|@import|<script|<link|<iframe", page)
    assert "Attention is a hint and not an explanation." in tags.text
    assert "a note" in tags.text


def test_lines_of_a_fact_stay_lines() -> None:
    page = Look("x", (("answers", "cat at 90%\ndog at 5%"),), (), ()).html()
    assert "<dd>cat at 90%\ndog at 5%</dd>" in page
    assert re.search(r"\bdd \{[^}]*white-space: pre-line", page)


def test_pictures_are_dimmed_in_the_dark() -> None:
    (dark,) = re.findall(r"@media \(prefers-color-scheme: dark\) \{(.*?)\n\}", a_look().html(), re.DOTALL)
    assert ".picture { filter: brightness(.88); }" in dark


def test_a_photograph_is_packed_smaller_and_looks_the_same() -> None:
    noise = Image.effect_noise((200, 200), 60).convert("RGB")
    file = io.BytesIO()
    noise.save(file, "PNG")
    page = Look("x", (), (), (Picture("heads", "t", "c", file.getvalue()),)).html()
    (content,) = re.findall(r"data:image/jpeg;base64,([^\"]*)", page)
    packed = Image.open(io.BytesIO(base64.b64decode(content)))
    assert len(content) < len(file.getvalue())
    difference = [abs(a - b) for a, b in zip(packed.tobytes(), noise.tobytes(), strict=True)]
    assert sum(difference) / len(difference) < 5


@pytest.mark.parametrize(
    "name", ["<img src=x onerror=alert(1)>.jpg", "\"><script>alert('x')</script>", "a&amp;b $photo.png", "\udcff.jpg"]
)
def test_names_are_text_wherever_they_stand(name: str) -> None:
    harmless = Tags(a_look().html())
    picture = Picture("heads", name, name, png())
    look = Look(name, ((name, name),), (name,), (picture,) * len(TEXTS))
    tags = Tags(look.files()["index.html"].decode())
    assert tags.names == harmless.names
    assert tags.text.count(name.replace("\udcff", "?")) >= 2 * len(TEXTS) + 4


def test_a_new_folder_gets_the_page_and_its_pictures(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "look"
    write(a_look(), folder)
    assert {path.name for path in folder.iterdir()} == {"index.html", *(f"{name}.png" for name in TEXTS)}
    assert (folder / "heads.png").read_bytes() == png()
    assert [path.name for path in folder.parent.iterdir()] == ["look"], "nothing temporary stays"
    assert folder.stat().st_mode & 0o777 == (tmp_path / "deep").stat().st_mode & 0o777


def test_a_look_is_replaced_and_other_files_stay(tmp_path: Path) -> None:
    write(a_look(), tmp_path)
    (tmp_path / "mine.txt").write_text("mine")
    write(a_look("heads", "layers", shade=9), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"index.html", "heads.png", "layers.png", "mine.txt"}
    assert (tmp_path / "heads.png").read_bytes() == png(9)


@pytest.mark.parametrize("name", ["index.html", "heads.png"])
def test_somebody_elses_file_is_not_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    for attempt in (lambda: check_folder(tmp_path), lambda: write(a_look(), tmp_path)):
        with pytest.raises(PatchlightError, match=f"holds {name}, which is not from a look; name another folder"):
            attempt()
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(PatchlightError, match="is a file; name a folder"):
        check_folder(tmp_path / "file")
    with pytest.raises(PatchlightError, match=r"cannot be written \(.+\)$"):
        write(a_look(), tmp_path / "file" / "below")


@pytest.mark.parametrize("earlier", [False, True])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: bool) -> None:
    folder = tmp_path / "look"
    if earlier:
        write(a_look(shade=1), folder)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    written: list[Path] = []

    def full(path: Path, content: bytes) -> int:
        written.append(path)
        if len(written) == 5:
            raise OSError(28, "No space left on device")
        with path.open("wb") as file:
            return file.write(content)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(PatchlightError, match=r"look: cannot be written \(No space left on device\)"):
        write(a_look(shade=2), folder)
    assert len(written) == 5
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before
    assert folder.exists() == earlier
