import base64
import io
import json
import os
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from patchlight.batch import report
from patchlight.batch.report import current_pictures, mark_of, thumbnail, write_report
from patchlight.batch.rows import NAMED, error_row, read_rows
from patchlight.errors import PatchlightError
from patchlight.images.decode import decode

HOSTILE = [
    "</script><script>alert(1)</script>.jpg",
    '"><img src=x onerror=alert(1)>.jpg',
    "two\nlines.jpg",
    "caf\udce9 \udcff.jpg",
    "<!--<script>.jpg",
    "]]>\u2028&amp;.jpg",
    "/*{data}*/ /*{policy}*/.jpg",
]


def ok_row(path: str, **changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "version": 5, "path": path, "status": "ok", "reason": None, "detail": None, "size": [40, 30],
        "decision": "subject", "confidence": 0.5, "method": "subject", "boxes": [], "crops": [], "heat": None,
    }  # fmt: skip
    return row | changes


def written(folder: Path, *rows: dict[str, Any], thumbs: Sequence[str] = (), **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    return write_report(folder, rows, thumbs or [""] * len(rows), **more)


class _Elements(HTMLParser):
    """The page as a browser reads it: its tags, and the text of the data element."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.policy = self.data = ""
        self._in_data = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.tags.append(tag)
        self._in_data = named.get("id") == "data"
        if named.get("http-equiv") == "Content-Security-Policy":
            self.policy = str(named["content"])

    def handle_endtag(self, tag: str) -> None:
        self._in_data = False

    def handle_data(self, data: str) -> None:
        self.data += data if self._in_data else ""


def page_of(folder: Path) -> _Elements:
    return _Elements((folder / "report.html").read_text())


def rows_of(folder: Path) -> list[list[Any]]:
    rows: list[list[Any]] = json.loads(page_of(folder).data)["rows"]
    return rows


def test_no_name_breaks_out_of_the_page(tmp_path: Path) -> None:
    plain, hostile = tmp_path / "plain", tmp_path / "hostile"
    written(plain, *(ok_row("a.jpg") for _ in HOSTILE), title=HOSTILE[0], root=tmp_path)
    written(
        hostile,
        *(ok_row(name, method=name, decision=name, crops=[name]) for name in HOSTILE[:-1]),
        ok_row(HOSTILE[-1], status="error", reason=HOSTILE[0], detail=HOSTILE[1]),
        title=HOSTILE[0],
        root=tmp_path,
    )
    assert page_of(hostile).tags == page_of(plain).tags
    assert [row[0] for row in rows_of(hostile)] == HOSTILE
    data = page_of(hostile).data
    assert data.isascii()
    assert not set(data) & set("<>&")


def test_the_policy_lets_only_the_pages_own_script_run(tmp_path: Path) -> None:
    written(tmp_path / "run", ok_row("a.jpg"))
    page = page_of(tmp_path / "run")
    assert "default-src 'none'" in page.policy
    assert "unsafe" not in page.policy
    assert page.tags.count("script") == 2  # the data and the script
    text = (tmp_path / "run" / "report.html").read_text()
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert not re.search(r"\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval)\b", text)
    assert not re.search(r"<[^>]*\s(style|on\w+)=", text.split("<script>")[0])


def test_rows_have_their_thumbnails(tmp_path: Path) -> None:
    rows = [ok_row("a.jpg"), ok_row("gone.jpg"), ok_row("bad.jpg", status="error")]
    written(tmp_path / "run", *rows, thumbs=["0123.jpg", "", ""])
    assert [row[7] for row in rows_of(tmp_path / "run")[:2]] == ["0123.jpg", ""]


def test_pictures_are_known_by_their_marks(tmp_path: Path) -> None:
    blue = Image.new("RGB", (80, 60), (0, 0, 255))
    names = ["now.jpg", "then.jpg", "bare.jpg", "lost.jpg", "short.jpg", "empty.jpg"]
    wanted = {name: mark_of(number) for number, name in enumerate(names)}
    contents = {
        "now.jpg": thumbnail(blue, mark=mark_of(0)),
        "then.jpg": thumbnail(blue, mark=mark_of(77)),
        "bare.jpg": thumbnail(blue),
        "short.jpg": thumbnail(blue, mark=mark_of(4))[:-2],
        "empty.jpg": b"",
        "nobody.jpg": thumbnail(blue, mark=mark_of(4)),
        "mine.jpg": thumbnail(blue, mark=mark_of(0)),
    }
    assert current_pictures(tmp_path / "thumbs", wanted) == set()
    (tmp_path / "thumbs").mkdir()
    for name, content in contents.items():
        (tmp_path / "thumbs" / name).write_bytes(content)
    assert current_pictures(tmp_path / "thumbs", wanted, ["nobody.jpg"]) == {"now.jpg"}
    assert {path.name for path in (tmp_path / "thumbs").iterdir()} == {"now.jpg", "mine.jpg"}


def test_thumbnail_has_the_photos_shape(tmp_path: Path) -> None:
    for size, expected in (((4000, 1000), (240, 60)), ((30, 40), (30, 40)), ((1, 5000), (1, 240))):
        with Image.open(io.BytesIO(thumbnail(Image.new("RGB", size)))) as image:
            assert image.size == expected
            assert image.format == "JPEG"


def test_thumbnail_of_a_fast_decoded_photo_leaves_out_what_is_not_the_photos(tmp_path: Path) -> None:
    """1001 pixels are 125.125 of an eighth's: the 126th holds the source's last column, and beside it nothing."""
    ramp = np.tile(np.linspace(0, 255, 1001).astype(np.uint8), (1501, 1))
    Image.fromarray(ramp).convert("RGB").save(tmp_path / "ramp.jpg", quality=95)
    fast = decode(tmp_path / "ramp.jpg", fast_size=(60, 40))
    assert fast.image.width < 200
    with (
        Image.open(io.BytesIO(thumbnail(fast))) as small,
        Image.open(io.BytesIO(thumbnail(decode(tmp_path / "ramp.jpg")))) as true,
    ):
        assert small.size == true.size == (160, 240)
        np.testing.assert_allclose(np.asarray(small, float), np.asarray(true, float), atol=6)


def test_heat_of_many_photos_is_made_coarser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    levels_hw = np.zeros((56, 28), np.uint8)
    levels_hw[:28] = 200
    heat = {"size": [56, 28], "levels": base64.b64encode(levels_hw.tobytes()).decode(), "region": [0, 0, 20, 30]}
    for large, side in ((10, 32), (0, 16)):
        monkeypatch.setattr(report, "_LARGE", large)
        written(tmp_path / "run", ok_row("a.jpg", heat=heat))
        height, width, text, region = rows_of(tmp_path / "run")[0][6]
        assert (height, width) == (side, side // 2)
        small_hw = np.frombuffer(base64.b64decode(text), np.uint8).reshape(height, width)
        assert (small_hw[: side // 2] == 200).all()
        assert (small_hw[side // 2 :] == 0).all()
        assert region == [0, 0, 20, 30]


@pytest.mark.parametrize("levels", ["", "!", base64.b64encode(b"abc").decode()])
def test_a_broken_heat_map_is_left_out(tmp_path: Path, levels: str) -> None:
    written(tmp_path / "run", ok_row("a.jpg", heat={"size": [2, 2], "levels": levels}))
    assert rows_of(tmp_path / "run")[0][6] is None


def test_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    box = {"xyxy": [1, 2.25, float("inf"), 4], "score": 0.12345, "confidence": 0.00051}
    written(tmp_path / "run", ok_row("a.jpg", confidence=float("nan"), boxes=[box]))
    packed = rows_of(tmp_path / "run")[0]
    assert packed[2] == 0
    assert packed[4] == [[1, 2.2, 0, 4, 0.123, 0.0005]]


def test_names_of_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    """Written as they are, or as JSON's escapes, they come to the page the same."""
    unnamed = dict.fromkeys(("reason", "detail", *NAMED))
    row = unnamed | ok_row(os.fsdecode(b"caf\xe9.jpg"), method="subject", cuts=[], subjects=1)
    (tmp_path / "results.jsonl").write_bytes(
        json.dumps(row).encode() + b"\n" + json.dumps(row, ensure_ascii=False).encode(errors="surrogateescape") + b"\n"
    )
    written(tmp_path, *read_rows(tmp_path / "results.jsonl"))
    assert [packed[0] for packed in rows_of(tmp_path)] == ["caf\udce9.jpg"] * 2


def test_the_same_results_give_the_same_bytes(tmp_path: Path) -> None:
    pages = {written(tmp_path / "run", ok_row("a.jpg"), ok_row("b.jpg")).read_bytes() for _ in range(2)}
    assert len(pages) == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file"),
        (json.dumps(error_row("a.jpg", "empty", "no bytes")) + '\n{"vers', "line 2 is not a result"),
        ('{"version": 5, "path": "a.jpg", "status": "ok"}\n', "line 1 is not a result .it lacks 'reason'"),
        ("[]\n", "line 1 is not a result"),
        ('{"version": 3, "path": "a.jpg", "status": "ok"}\n', "version 3"),
    ],
)
def test_results_that_cannot_be_read(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "results.jsonl").write_text(content)
    with pytest.raises(PatchlightError, match=words):
        list(read_rows(tmp_path / "results.jsonl"))


def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any, **named: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(
        PatchlightError, match=r"report\.html: the disk is full; free some space and run .* again to continue"
    ):
        written(tmp_path, ok_row("a.jpg"))


def test_an_empty_run_has_a_page(tmp_path: Path) -> None:
    written(tmp_path / "run")
    assert rows_of(tmp_path / "run") == []
