"""What fuzzing has found, each as small as it came down to: refused in one line, or read as if nothing were amiss."""

import io
import json
import shutil
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzzing import limited
from PIL import Image

from crop_runs import make_photos, rows_of, run_crop, save_model
from patchlight.batch.blocks import Said, write_part
from patchlight.batch.inputs import Input
from patchlight.batch.merge import _lines_by_photo
from patchlight.batch.overrides import read_boxes, read_corrections
from patchlight.batch.results import Journal
from patchlight.batch.rows import error_row, read_rows
from patchlight.config import PreprocessConfig, ViTConfig
from patchlight.deploy.engines import load_engine
from patchlight.errors import PatchlightError
from patchlight.families import config_from_json
from patchlight.geometry import Box
from patchlight.images import containers
from patchlight.images.containers import members, read_elsewhere
from patchlight.images.crop import Cut, _xmp_of_crop, cut_out
from patchlight.images.keywords import with_keywords
from patchlight.training.checkpoint import _read_index
from patchlight.training.config import TrainConfig
from patchlight.training.run_folder import RunFolder
from patchlight.training.sources import open_dataset
from patchlight.weights.groups import Groups
from patchlight.weights.save import save

DEEP = '{"version": 5, "path": ' + "[" * 20_000 + "]" * 20_000 + "}"
"""Within a RecursionError of being JSON."""


# JSON that is too deep


@pytest.mark.parametrize(
    "read",
    [
        lambda path: list(read_rows(path)),
        lambda path: read_corrections(path.parent),
        lambda path: read_boxes(str(path), "/", None),
        lambda path: _read_index(path.parent),
        lambda path: load_engine(path.parent),
        lambda path: TrainConfig.from_json(path.read_text()),
        lambda path: config_from_json(path.read_text()),
        lambda path: PreprocessConfig.from_json(path.read_text()),
    ],
)
def test_json_that_is_too_deep_is_refused(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    for name in ("corrections.jsonl", "checkpoints.json", "engine.json"):
        (tmp_path / name).write_text(DEEP + "\n")
    with pytest.raises(PatchlightError) as refused:
        read(tmp_path / "corrections.jsonl")
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 1000


def test_lines_that_are_too_deep_are_no_lines(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(DEEP + '\n{"step": 1}\n')
    assert RunFolder(tmp_path).rows() == [{"step": 1}]
    (tmp_path / "journal").write_text(DEEP + "\n")
    journal = Journal(tmp_path / "journal")
    journal.close()
    assert journal.entries == {}


# Rows, the journal and what a run notes down


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], Path, Path]:
    folder = tmp_path_factory.mktemp("finished")
    photos, model = make_photos(folder / "photos", 2), save_model(folder / "model")
    run_crop(photos, folder / "run", model=model, workers=0, report=False)
    return photos, model, folder / "run"


def changed(line: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return line | {"row": line["row"] | {name: value for name, value in changes.items() if name in line["row"]}}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("crops", 7),
        ("crops", ["../../photos/000.jpg"]),
        ("crops", ["/etc/passwd"]),
        ("boxes", [{"xyxy": "abcd", "score": 1, "confidence": 1, "cut_off": []}]),
        ("boxes", [{"xyxy": [1, 2, 3, 4], "score": 1, "confidence": 1, "cut_off": 0.5}]),
        ("size", [0, 7]),
        ("heat", {"size": [300] * 65, "levels": ""}),
        ("heat", {"size": [4], "levels": "aaaa"}),
        ("confidence", float("nan")),
        ("subjects", None),
        ("decision", ["none"]),
    ],
)
def test_a_row_of_other_types_is_refused_and_made_again(
    finished: tuple[list[Path], Path, Path], tmp_path: Path, name: str, value: Any
) -> None:
    photos, model, whole = finished
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    before = rows_of(run)
    journal = run / ".run" / "journal.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    journal.write_text("".join(json.dumps(changed(line, **{name: value})) + "\n" for line in lines))
    (run / "results.jsonl").write_text(json.dumps(before[0] | {name: value}) + "\n")
    if name != "crops" or value == 7:
        with pytest.raises(PatchlightError, match="line 1 is not a result"):
            list(read_rows(run / "results.jsonl"))
    run_crop(photos, run, model=model, workers=0, report=False, prune=True)
    assert rows_of(run) == before


def test_a_journal_that_names_files_elsewhere_removes_none(
    finished: tuple[list[Path], Path, Path], tmp_path: Path
) -> None:
    photos, model, whole = finished
    run, mine = tmp_path / "run", tmp_path / "mine.txt"
    shutil.copytree(whole, run)
    mine.write_text("mine")
    lines = []
    for crop in ("../mine.txt", str(mine), "crops/../../mine.txt"):
        row = error_row("/nowhere.jpg", "gone", "it is no longer there") | {"crops": [crop]}
        lines.append(json.dumps({"file": "/nowhere.jpg", "stamp": None, "place": "nowhere.jpg", "row": row}))
    with (run / ".run" / "journal.jsonl").open("a") as journal:
        journal.write("\n".join(lines) + "\n")
    run_crop(photos, run, model=model, workers=0, report=False, prune=True)
    run_crop(photos, run, model=model, workers=0, report=False, overwrite=True)
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("value", [{"files": 7, "inputs_sha256": None}, {"files": {"results.jsonl": {}}}, {}])
def test_notes_of_other_types_are_written_again(
    finished: tuple[list[Path], Path, Path], tmp_path: Path, value: Any
) -> None:
    photos, model, whole = finished
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    before = rows_of(run)
    noted = json.loads((run / ".run" / "finished.json").read_text())
    (run / ".run" / "finished.json").write_text(json.dumps(noted | value))
    (run / "summary.json").write_text(json.dumps(dict.fromkeys(json.loads((run / "summary.json").read_text()), 7)))
    run_crop(photos, run, model=model, workers=0, report=False)
    assert rows_of(run) == before


def test_a_correction_that_was_cut_off_does_not_stop_a_merge(tmp_path: Path) -> None:
    line = json.dumps({"file": "/a.jpg", "decision": "none", "boxes": []})
    (tmp_path / "corrections.jsonl").write_text(line + '\n{"file": "/b')
    assert list(_lines_by_photo(tmp_path / "corrections.jsonl")) == ["/a.jpg"]


@pytest.mark.parametrize("confidence", [10**400, [0.5], None, "high"])
def test_boxes_of_no_confidence(tmp_path: Path, confidence: Any) -> None:
    detection = {"category": "1", "conf": confidence, "bbox": [0, 0, 1, 1]}
    boxes = {"images": [{"file": "a.jpg", "detections": [detection]}], "detection_categories": {"1": "animal"}}
    (tmp_path / "boxes.json").write_text(json.dumps(boxes))
    with pytest.raises(PatchlightError, match="is not MegaDetector's JSON"):
        read_boxes(str(tmp_path / "boxes.json"), "/", None)


# Exported models and configs


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("size", [1, 2, 3]), ("size", [0, 32]), ("step", []), ("step", [16]), ("outputs", "logits"), ("outputs", [])),
        *(
            ("outputs", [""]),
            ("outputs", ["subject"]),
            ("outputs", ["attention", "attention"]),
            ("precision", "float7"),
        ),
        *(("model", 7), ("model", {"patchlight": 7}), ("format", ["onnx"]), ("channels", 0), ("with_preprocess", None)),
    ],
)
def test_an_exported_model_with_a_damaged_manifest(tmp_path: Path, name: str, value: Any) -> None:
    from models_at_random import tiny_vit

    folder = save(tiny_vit(num_classes=2), tmp_path / "m", labels=["a", "b"], groups=Groups(("a", "b"), ("x", "y")))
    own = json.loads((folder / "config.json").read_text())["patchlight"]
    about = {"origin": "patchlight", "sha256": "0" * 64, "patchlight": own}
    manifest: dict[str, Any] = {"version": 1, "format": "safetensors", "precision": "float32", "outputs": ["logits"]}
    manifest |= {"channels": 3, "size": None, "step": [8, 8], "with_preprocess": False, "source": "x", "model": about}
    (folder / "engine.json").write_text(json.dumps(manifest))
    assert load_engine(folder).loaded.labels == ("a", "b")
    (folder / "engine.json").write_text(json.dumps(manifest | {name: value}))
    with pytest.raises(PatchlightError) as refused:
        load_engine(folder).loaded  # noqa: B018
    assert "\n" not in str(refused.value)


def test_settings_that_lack_one() -> None:
    with pytest.raises(PatchlightError, match="needs 'model'"):
        TrainConfig.from_json("{}")
    whole = {"model": {}, "data": {"train": "x"}, "preprocess": {}}
    for wrong in ({"distill": 7}, {"data": 7}, {"data": {}}, {"model": []}):
        with pytest.raises(PatchlightError):
            TrainConfig.from_json(json.dumps(whole | wrong))


def test_numbers_and_names_without_end() -> None:
    with pytest.raises(PatchlightError, match="crop_pct"):
        PreprocessConfig.from_json('{"crop_pct": 1' + "0" * 400 + "}")
    with pytest.raises(PatchlightError) as refused:
        ViTConfig.from_json(json.dumps({"position": "x" * 50_000}))
    assert len(str(refused.value)) < 1000
    with pytest.raises(PatchlightError) as refused:
        config_from_json(json.dumps({"architecture": "x" * 50_000}))
    assert len(str(refused.value)) < 1000


# Shards, tables, CSV


def header(name: bytes, size: bytes) -> bytes:
    block = bytearray(512)
    block[: len(name)], block[100:108], block[124:136], block[156:157] = name, b"0000644\0", size, b"0"
    block[257:265], block[148:156] = b"ustar\x0000", b" " * 8
    block[148:155] = b"%06o\0" % sum(block)
    return bytes(block)


@pytest.mark.parametrize("size", [b"\xff" * 4 + struct.pack(">q", -512), b"\xff" * 12])
def test_a_shard_that_leads_back_to_itself(tmp_path: Path, size: bytes) -> None:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.jpg"), io.BytesIO())
    path = tmp_path / "x.tar"
    path.write_bytes(whole.getvalue()[:512] + header(b"b.jpg", size) + bytes(1024))
    with limited(), pytest.raises(PatchlightError, match="is not a whole, uncompressed tar file"):
        open_dataset(path, labelled=False)
    with limited(), pytest.raises(PatchlightError, match="is not an uncompressed tar file"):
        list(members(str(path), "x.tar"))


def test_a_table_with_a_false_offset(tmp_path: Path) -> None:
    """Arrow reads where it says, and the process ends."""
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"image": [b"x" * 400, b"y"]})
    with pa.ipc.new_file(str(tmp_path / "x.arrow"), table.schema) as writer:
        writer.write_table(table)
    content = (tmp_path / "x.arrow").read_bytes()
    assert content.count(struct.pack("<iii", 0, 400, 401)) == 1
    (tmp_path / "x.arrow").write_bytes(content.replace(struct.pack("<ii", 0, 400), struct.pack("<ii", 0, 2**31 - 1)))
    with pytest.raises(PatchlightError, match="is not a table that can be read"):
        list(members(str(tmp_path / "x.arrow"), "x.arrow"))
    with pytest.raises(Exception, match="offset"):
        read_elsewhere(f"{tmp_path}/x.arrow::0")


def test_a_damaged_table_on_a_disk_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.setattr(containers, "tried", None)  # which waits, as for a network
    (tmp_path / "x.parquet").write_bytes(b"PAR1" + b"\xff" * 60 + struct.pack("<I", 40) + b"PAR1")
    with pytest.raises(PatchlightError, match="is not a table that can be read"):
        list(members(str(tmp_path / "x.parquet"), "x.parquet"))


def test_an_arrow_file_whose_labels_have_false_offsets(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    labels = ["ab", "cdef"]
    table = pa.table({"image": [b"x" * 40, b"y" * 40], "label": labels})
    with pa.ipc.new_file(str(tmp_path / "x.arrow"), table.schema) as writer:
        writer.write_table(table)
    content = (tmp_path / "x.arrow").read_bytes()
    false = content.replace(struct.pack("<iii", 0, 2, 6), struct.pack("<iii", 0, 2**30, 2**31 - 1))
    assert false != content
    (tmp_path / "x.arrow").write_bytes(false)
    with pytest.raises(PatchlightError, match="is not a table that can be read"):
        open_dataset(tmp_path / "x.arrow")


def test_damaged_labels_on_a_disk_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.setattr(containers, "tried", None)
    (tmp_path / "x.parquet").write_bytes(b"PAR1" + b"\xff" * 60 + struct.pack("<I", 40) + b"PAR1")
    with pytest.raises(PatchlightError, match="is not a table that can be read"):
        containers.labels_of(str(tmp_path / "x.parquet"), "x.parquet", None, needed=True)


def test_a_damaged_part_of_a_run_is_no_obstacle(tmp_path: Path) -> None:
    """Parts are what machines of a cluster leave; the photos of one that is damaged are looked at anew."""
    pytest.importorskip("pyarrow")
    make_photos(tmp_path / "photos", 2)
    model = save_model(tmp_path / "model")
    parts = tmp_path / "out" / ".run" / "parts"
    run_crop(tmp_path / "photos", tmp_path / "out", model=model, workers=0)
    right = (tmp_path / "out" / "results.jsonl").read_bytes()
    (tmp_path / "victim.txt").write_text("kept")
    outside = error_row("000.jpg", "corrupt", "?") | {"crops": ["crops/../../victim.txt"]}
    file = str(tmp_path / "photos" / "000.jpg")
    for number, row in enumerate([outside, []]):
        parts.mkdir(exist_ok=True)
        write_part(parts / f"{number}.parquet", [Said(Input("000.jpg", file, "000.jpg"), None, outside)])
        if not row:
            (parts / f"{number}.parquet").write_bytes(b"PAR1 junk")
        run_crop(tmp_path / "photos", tmp_path / "out", model=model, workers=0)
        assert not parts.exists()
        assert (tmp_path / "out" / "results.jsonl").read_bytes() == right
        assert (tmp_path / "victim.txt").read_text() == "kept"


def test_labels_of_more_digits_than_python_counts(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    long = "9" * 5000
    labels = [long, "10", "9", "010", long[:-1] + "8"]
    (tmp_path / "x.csv").write_text("file,label\n" + "".join(f"a.png,{label}\n" for label in labels))
    assert open_dataset(tmp_path / "x.csv").classes == ("9", "010", "10", long[:-1] + "8", long)


# What photos say of themselves


@pytest.mark.parametrize("kind", ["WEBP", "PNG", "TIFF"])
def test_a_crop_with_keywords_is_not_turned_by_its_xmp(kind: str) -> None:
    """Its pixels are upright; the photo's XMP said that they were not."""
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF><rdf:Description tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>'
    file, options = io.BytesIO(), {"xmp": xmp}
    if kind == "PNG":
        from PIL import PngImagePlugin

        chunks = PngImagePlugin.PngInfo()
        chunks.add_itxt("XML:com.adobe.xmp", xmp.decode())
        options = {"pnginfo": chunks}
    if kind == "TIFF":
        options = {"tiffinfo": {700: xmp}}
    Image.fromarray(np.arange(6 * 9 * 3, dtype=np.uint8).reshape(6, 9, 3)).save(file, kind, **options)
    (crop,) = cut_out(file.getvalue(), [Box(0, 0, 4, 3)], Cut(keywords=("word",)))
    with Image.open(io.BytesIO(crop.content)) as written:
        assert written.getexif().get(0x112, 1) == 1
        assert written.size == crop.size
        said = str(written.info.get("xmp") or written.info.get("XML:com.adobe.xmp"))
        assert "word" in said
        assert 'Orientation="6"' not in said


@pytest.mark.parametrize(
    "tag", ["<dc:subject ", "<dc:subject><rdf:Bag>", "<dc:subject>" + " " * 50, "<xmp:Thumbnails "]
)
def test_xmp_of_openings_alone_is_read_at_once(tag: str) -> None:
    """A megabyte of it lies in a PNG of a kilobyte."""
    xmp = (tag * (1_000_000 // len(tag)) + "</rdf:RDF>").encode()
    with limited():
        assert b"<rdf:li>word</rdf:li>" in with_keywords(xmp, ["word"])
        assert _xmp_of_crop({"xmp": xmp}, (1, 1), 1, []) == xmp


def test_thumbnails_go_from_the_xmp_of_a_crop() -> None:
    xmp = b"a<xmp:Thumbnails>x<xap:Thumbnails>y</xmp:Thumbnails>b<xap:Thumbnails/>c</xap:Thumbnails>d"
    assert _xmp_of_crop({"xmp": xmp}, (1, 1), 1, []) == b"abd"
