"""Photos like another one: exactly what a plain search finds, near-duplicates, and a sheet that shows them."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageEnhance

import patchlight as pl
from command_line import patchlight
from crop_runs import make_photos, photo, save_model
from patchlight.batch.neighbours import Neighbours, contact_sheet, similar, write_index
from patchlight.batch.readers import EmbedSettings
from patchlight.batch.settings import CropRunSettings
from patchlight.batch.table_run import embed_photos
from patchlight.errors import PatchlightError
from patchlight.reporting import SILENT

pytest.importorskip("pyarrow", reason="the extra `tables` is not installed")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos, two of them again in another form, and their table."""
    folder = tmp_path_factory.mktemp("made")
    model = save_model(folder / "tiny")
    make_photos(folder / "photos", 12)
    with Image.open(folder / "photos" / "003.jpg") as image:
        ImageEnhance.Brightness(image).enhance(1.02).save(folder / "photos" / "003-again.jpg", quality=70)
    photo(7).resize((320, 240)).save(folder / "photos" / "007-large.jpg")
    (folder / "photos" / "bad.jpg").write_bytes(b"")
    how = CropRunSettings(device="cpu", workers=0)
    embed_photos(folder / "photos", folder / "f.parquet", EmbedSettings(), how, model=model, reporter=SILENT)
    return folder


def test_similar_is_the_cosine_of_centred_features(made: Path) -> None:
    known = Neighbours.of(made / "f.parquet")
    features = known.features.features_ND.astype(np.float64)
    centred = features - features.mean(0)
    unit = centred / np.linalg.norm(centred, axis=1, keepdims=True)
    asked = str(made / "photos" / "003.jpg")
    row = known.features.paths.index(asked)
    near = unit @ unit[row]
    order = [n for n in np.argsort(-near) if n != row]
    found = similar(asked, made / "f.parquet", 5)
    assert [match.path for match in found] == [known.features.paths[n] for n in order[:5]]
    assert [match.likeness for match in found] == pytest.approx(near[order[:5]], abs=1e-5)
    assert Path(found[0].path).name == "003-again.jpg"
    with contextlib.chdir(made):  # by another name for the same file
        assert similar(Path("photos") / ".." / "photos" / "003.jpg", "f.parquet", 5) == found
    assert len(similar(asked, made / "f.parquet", 99)) == 13  # all others that could be used


def test_a_photo_that_is_not_in_the_table(made: Path) -> None:
    found = similar(photo(7), made / "f.parquet", 2)
    assert {Path(match.path).name for match in found} == {"007.jpg", "007-large.jpg"}
    assert found[0].likeness > 0.99


def test_the_index_finds_the_same_and_is_known_to_be_of_another_table(made: Path, tmp_path: Path) -> None:
    pytest.importorskip("faiss", reason="faiss is not installed")
    table = tmp_path / "f.parquet"
    table.write_bytes((made / "f.parquet").read_bytes())
    plain, index = Neighbours.of(table), write_index(table)
    content = index.read_bytes()
    indexed = Neighbours.of(table)
    assert plain.index is None
    assert indexed.index is not None
    queries = plain.features.features_ND[:5]
    assert [[row for row, _ in each] for each in indexed.nearest(queries, 4)] == [
        [row for row, _ in each] for each in plain.nearest(queries, 4)
    ]
    assert indexed.duplicates() == plain.duplicates()
    index.unlink()
    assert write_index(table).read_bytes() == content
    index.write_bytes(b"nothing")
    with pytest.raises(PatchlightError, match="is no index that can be read"):
        Neighbours.of(table)
    table.write_bytes(table.read_bytes())  # another one, as far as anybody knows
    assert Neighbours.of(table).index is None


def test_an_index_that_nothing_can_read_here_is_left_alone(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("faiss", reason="faiss is not installed")
    table = tmp_path / "f.parquet"
    table.write_bytes((made / "f.parquet").read_bytes())
    write_index(table)
    expected = [match.path for match in similar(photo(7), table, 2)]
    monkeypatch.setitem(sys.modules, "faiss", None)
    assert [match.path for match in similar(photo(7), table, 2)] == expected
    with pytest.raises(PatchlightError, match="an index needs faiss"):
        write_index(table)


def test_many_vectors_by_the_index_and_without(tmp_path: Path) -> None:
    pytest.importorskip("faiss", reason="faiss is not installed")
    random = np.random.default_rng(0)
    features = random.standard_normal((3000, 24)).astype(np.float32)
    features[1000:1005] = features[0] + 0.01 * random.standard_normal((5, 24))
    features[2999] = features[42]
    names = np.array([f"{number}.jpg" for number in range(3000)])
    about = np.array(json.dumps({"features": "pooled"}))
    np.savez(tmp_path / "f.npz", path=names, status=np.array(["ok"] * 3000), features=features, about=about)
    plain = Neighbours.of(tmp_path / "f.npz")
    assert plain.duplicates(0.95) == [[0, 1000, 1001, 1002, 1003, 1004], [42, 2999]]
    write_index(tmp_path / "f.npz")
    indexed = Neighbours.of(tmp_path / "f.npz")
    assert indexed.duplicates(0.95) == plain.duplicates(0.95)
    found, truth = (each.nearest(features[:200], 10) for each in (indexed, plain))
    hits = [len({row for row, _ in a} & {row for row, _ in b}) for a, b in zip(found, truth, strict=True)]
    assert np.mean(hits) > 9.5


def test_commands(made: Path, tmp_path: Path) -> None:
    asked, table = str(made / "photos" / "007.jpg"), str(made / "f.parquet")
    run = patchlight("similar", asked, "--in", table, "--count", "3", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    first, *_, last = run.stdout.splitlines()
    assert first.endswith("007-large.jpg")
    assert last == "similar-007.jpg"
    with Image.open(tmp_path / "similar-007.jpg") as sheet:
        assert sheet.width > 800
    rows = patchlight("similar", asked, "--in", table, "--json", "--sheet", "s.jpg", cwd=tmp_path).stdout.splitlines()
    assert len(rows) == 12
    assert json.loads(rows[0])["path"].endswith("007-large.jpg")
    run = patchlight("dedupe", table, "--least", "99%", "--sheet", "d.jpg", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    groups = [[Path(name).name for name in line.split()] for line in run.stdout.splitlines()]
    assert ["007-large.jpg"] in groups
    assert (tmp_path / "d.jpg").exists()
    assert "photos to spare" in run.stdout


def test_an_index_with_embed(made: Path, tmp_path: Path) -> None:
    pytest.importorskip("faiss", reason="faiss is not installed")
    words = ("embed", str(made / "photos"), "--model", str(made / "tiny"), "--out", "g.npz", "--index")
    run = patchlight(*words, cwd=tmp_path)
    assert run.returncode == 3, run.stderr
    assert (tmp_path / "g.npz.index").exists()
    assert Neighbours.of(tmp_path / "g.npz").index is not None
    run = patchlight(*words, "--features", "dense", cwd=tmp_path)
    assert run.stderr == "patchlight: --index needs a vector a photo, not --features dense; leave one of them out\n"


def test_mistakes(made: Path, tmp_path: Path) -> None:
    def complaint(*words: str) -> str:
        run = patchlight(*words, cwd=tmp_path)
        assert run.returncode == 2
        assert run.stderr.count("\n") == 1
        return run.stderr

    table = str(made / "f.parquet")
    assert "there is no such table" in complaint("similar", "a.jpg", "--in", "none.parquet")
    assert "missing" in complaint("similar", "a.jpg", "--in", table)
    assert "--least 2.0" in complaint("dedupe", table, "--least", "2")
    other = save_model(tmp_path / "other", seed=1)
    (tmp_path / "a.jpg").write_bytes((made / "photos" / "001.jpg").read_bytes())
    assert "was made with another model" in complaint("similar", "a.jpg", "--in", table, "--model", str(other))
    assert not list(tmp_path.glob("similar-*"))


def test_a_sheet_says_what_cannot_be_shown(tmp_path: Path) -> None:
    photo(1).save(tmp_path / "a.jpg")
    shown: list[Any] = [(str(tmp_path / "a.jpg"), "0.9  " + "long" * 30), ("gone.jpg", "gone"), ("", "")]
    sheet = np.asarray(contact_sheet(shown, columns=2))
    assert sheet.shape == (2 * 226 + 8, 2 * 208 + 8, 3)
    assert sheet[:208, :208].std() > 20
    assert sheet[100, 216] == pytest.approx(221)  # grey, for the one that is gone
    assert (sheet[-200:] == 255).all()


def test_what_has_no_features_is_refused(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "f.npz", path=np.array(["a"]), status=np.array(["error"]), features=np.zeros((1, 3)), about="{}"
    )
    with pytest.raises(PatchlightError, match="holds no photo with features"):
        Neighbours.of(tmp_path / "f.npz")
    assert pl.EmbedSettings().features == "pooled"
