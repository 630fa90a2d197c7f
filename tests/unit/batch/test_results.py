"""The journal, the table that spreadsheets open, and the files for other programs."""

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchlight.batch.formats import export
from patchlight.batch.inputs import Input
from patchlight.batch.results import COLUMNS, Journal, ResultFolder, csv_line
from patchlight.batch.rows import error_row
from patchlight.config import Calibration
from patchlight.errors import PatchlightError


def ok_row(path: str, **changes: Any) -> dict[str, Any]:
    boxes = [
        {"xyxy": [10.0, 20.0, 110.0, 70.0], "score": 0.8, "confidence": 0.9, "cut_off": []},
        {"xyxy": [150.0, 0.0, 200.0, 25.5], "score": 0.7, "confidence": 0.0005, "cut_off": ["top", "right"]},
    ]
    row = {"version": 5, "path": path, "status": "ok", "reason": None, "detail": None, "size": [200, 100]}
    row |= {"decision": "several", "confidence": 0.9, "method": "subject", "subjects": 2, "boxes": boxes}
    row |= {"group": "animal", "group_confidence": 0.95, "label": None, "label_confidence": None}
    return row | {"crops": ["crops/a.jpg", "crops/a.crop2.jpg"], "cuts": [], "heat": None} | changes


# The journal


def test_the_last_row_of_a_file_counts(tmp_path: Path) -> None:
    one, other = Input("one.jpg", "/one.jpg", "one.jpg"), Input("\udcff.jpg", "/\udcff.jpg", "\udcff.jpg")
    journal = Journal(tmp_path / "journal")
    journal.append(one, (1, 2), error_row("one.jpg", "empty", "no bytes"))
    journal.append(other, (3, 4), ok_row("\udcff.jpg"))
    journal.append(one, (5, 6), ok_row("one.jpg"))
    for again in (journal, Journal(tmp_path / "journal")):
        assert again.entries["/one.jpg"].stamp == (5, 6)
        assert again.entries["/one.jpg"].reason is None
        assert again.entries["/one.jpg"].crops == ("crops/a.jpg", "crops/a.crop2.jpg")
        assert again.row(other) == ok_row("\udcff.jpg")
        assert again.row(Input("else/where.jpg", "/one.jpg")) == ok_row("else/where.jpg")
        again.append(other, (7, 8), ok_row("\udcff.jpg", confidence=0.5))
        assert again.row(other)["confidence"] == 0.5
        again.close()


@given(st.data())
def test_a_journal_cut_anywhere_holds_what_was_whole(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal"
    journal = Journal(path)
    photos = [Input(f"{number}\n.jpg", f"/{number}\n.jpg") for number in range(4)]
    ends = [0]
    for photo in photos:
        journal.append(photo, (1, 2), ok_row(photo.path))
        ends.append(journal.length)
    journal.close()
    cut = data.draw(st.integers(0, ends[-1]))
    rubbish = data.draw(st.binary(max_size=30))
    path.write_bytes(path.read_bytes()[:cut] + rubbish)
    journal = Journal(path)
    whole = sum(end <= cut for end in ends[1:])
    assert list(journal.entries)[:whole] == [photo.file for photo in photos[:whole]]
    journal.append(photos[3], (9, 9), ok_row("x"))
    journal.close()
    again = Journal(path)
    assert again.entries["/3\n.jpg"].stamp == (9, 9)
    assert again.length == path.stat().st_size
    again.close()


# The table


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n", " =", "  @"])
def test_no_cell_is_a_formula(start: str) -> None:
    (cells,) = csv.reader(io.StringIO(csv_line([start + "cmd|calc", 3.5]).decode(), newline=""))
    assert cells == ["'" + start + "cmd|calc", "3.5"]


@given(st.text(), st.text())
def test_cells_survive_whatever_is_in_them(one: str, other: str) -> None:
    line = csv_line([one, 1, other, None])
    cells = next(csv.reader(io.StringIO(line.decode("utf-8"), newline="")))
    assert len(cells) == 4
    for cell, text in ((cells[0], one), (cells[2], other)):
        assert cell.removeprefix("'") == text.removeprefix("'")
        assert not cell.lstrip(" ").startswith(("=", "+", "-", "@", "\t", "\r"))


def test_the_table(tmp_path: Path) -> None:
    rows = [ok_row("a,b\n.jpg"), error_row("=bad.jpg", "empty", "no bytes"), ok_row("\udcff.jpg", boxes=[], crops=[])]
    folder = ResultFolder(tmp_path)
    folder.write_rows(rows)
    with folder.table.open(newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert tuple(table[0]) == COLUMNS
    assert table[0]["path"] == "a,b\n.jpg"
    assert (table[0]["x0"], table[0]["y1"], table[0]["score"], table[0]["subjects"]) == ("10.0", "70.0", "0.8", "2")
    assert table[0]["crops"] == "crops/a.jpg;crops/a.crop2.jpg"
    assert (table[0]["group"], table[0]["group_confidence"], table[0]["label"]) == ("animal", "0.95", "")
    assert (table[1]["path"], table[1]["reason"], table[1]["x0"]) == ("'=bad.jpg", "empty", "")
    assert table[2]["path"] == "\\udcff.jpg"
    lines = [json.loads(line) for line in folder.results.read_text(encoding="ascii").splitlines()]
    assert lines == rows
    assert os.fsencode(lines[2]["path"]) == b"\xff.jpg"


# Other programs


def exported(tmp_path: Path, name: str, rows: list[dict[str, Any]]) -> Any:
    calibration = Calibration(bias=0.0, sure=0.7, nothing=0.2)
    made = export(tmp_path, name, lambda: iter(rows), base="/photos", detector="tiny", calibration=calibration)
    return json.loads(made.read_text())


ROWS = [
    ok_row("/photos/cam1/a.jpg"),
    error_row("/photos/bad.jpg", "truncated", "it ends too early"),
    ok_row("/photos/empty.jpg", decision="none", confidence=0.01),
    ok_row("/photos/\udcff.jpg", boxes=[]),
]


def test_json_is_one_list(tmp_path: Path) -> None:
    assert exported(tmp_path, "json", ROWS) == ROWS
    assert exported(tmp_path, "json", []) == []


def test_megadetector(tmp_path: Path) -> None:
    made = exported(tmp_path, "megadetector", ROWS)
    assert set(made) == {"info", "detection_categories", "images"}
    assert made["info"]["format_version"] == "1.4"
    thresholds = {"typical_detection_threshold": 0.2, "conservative_detection_threshold": 0.025}
    assert made["info"]["detector_metadata"] == thresholds
    assert made["detection_categories"]["1"] == "animal"
    first, bad, empty, _ = made["images"]
    assert first["file"] == "cam1/a.jpg"
    assert first["detections"] == [
        {"category": "1", "conf": 0.9, "bbox": [0.05, 0.2, 0.5, 0.5]},
        {"category": "1", "conf": 0.0005, "bbox": [0.75, 0.0, 0.25, 0.255]},
    ]
    assert bad == {"file": "bad.jpg", "failure": "truncated: it ends too early", "detections": None}
    assert [each["conf"] for each in empty["detections"]] == [0.1999, 0.0005], "below the threshold, whatever they were"
    assert {each["category"] for each in empty["detections"]} == {"1"}


def test_what_is_unsure_by_its_name_alone_is_not_hidden(tmp_path: Path) -> None:
    faint = [{"xyxy": [10.0, 20.0, 110.0, 70.0], "score": 0.1, "confidence": 0.01}]
    rows = [
        ok_row("/photos/a.jpg", decision="unsure", boxes=faint),
        ok_row("/photos/b.jpg", decision="none", boxes=faint),
    ]
    unsure, none = (image["detections"] for image in exported(tmp_path, "megadetector", rows)["images"])
    assert ([each["conf"] for each in unsure], [each["conf"] for each in none]) == ([0.2], [0.01])


def test_megadetector_has_what_is_known_of_the_photos(tmp_path: Path) -> None:
    said = [
        ("animal", "bird"),
        ("person", None),
        ("vehicle", "car"),
        ("thing", "bird"),
        ("unknown", None),
        (None, None),
    ]
    rows = [
        ok_row(f"/photos/{number}.jpg", group=group, label=label, label_confidence=None if label is None else 0.7)
        for number, (group, label) in enumerate(said)
    ]
    made = exported(tmp_path, "megadetector", [*rows, ok_row("/photos/empty.jpg", decision="none", group="sky")])
    assert made["detection_categories"] == {"1": "animal", "2": "person", "3": "vehicle", "4": "thing"}
    assert made["classification_categories"] == {"0": "bird", "1": "car"}
    detections = [image["detections"] for image in made["images"][:-1]]
    assert [[each["category"] for each in several] for several in detections] == [[n, n] for n in "123411"]
    named = [several[0].get("classifications") for several in detections]
    assert named == [[["0", 0.7]], None, [["1", 0.7]], [["0", 0.7]], None, None]
    assert not any("classifications" in several[1] for several in detections)


def test_coco(tmp_path: Path) -> None:
    made = exported(tmp_path, "coco", ROWS)
    assert [image["file_name"] for image in made["images"]] == ["cam1/a.jpg", "empty.jpg", "\udcff.jpg"]
    assert made["images"][0] == {"id": 1, "file_name": "cam1/a.jpg", "width": 200, "height": 100}
    assert [category["id"] for category in made["categories"]] == [1]
    first, second = made["annotations"]
    assert (first["id"], first["image_id"], first["bbox"], first["area"]) == (1, 1, [10.0, 20.0, 100.0, 50.0], 5000.0)
    assert (second["bbox"], second["iscrowd"], second["category_id"]) == ([150.0, 0.0, 50.0, 25.5], 0, 1)
    assert (first["score"], second["score"]) == (0.9, 0.0005)
    assert {each["image_id"] for each in made["annotations"]} <= {image["id"] for image in made["images"]}


def test_an_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(PatchlightError, match="megadetector"):
        export(tmp_path, "xml", lambda: iter([]), base="/")
