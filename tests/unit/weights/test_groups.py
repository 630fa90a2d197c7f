"""Groups against sums that are written out, their table, and their way through a saved model."""

import json
import math
from pathlib import Path

import pytest
import torch

import patchlight as pl
from models_at_random import tiny_vit
from patchlight.errors import PatchlightError
from patchlight.weights.groups import Groups, Named, gaps_of, groups_by_name, read_groups
from patchlight.weights.save import save

LABELS = ("crow", "jay", "cat", "car", "mixed")
GROUPS = Groups(LABELS, ("animal/bird", "animal/bird", "animal", "vehicle", "unknown"))
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("probabilities", "expected"),
    [
        ((0.60, 0.10, 0.10, 0.10, 0.10), Named("animal", 0.8, "crow", 0.6)),
        ((0.40, 0.30, 0.10, 0.10, 0.10), Named("animal", 0.8, "bird", 0.7)),
        ((0.30, 0.10, 0.30, 0.20, 0.10), Named("animal", 0.7, None, None)),
        ((0.10, 0.10, 0.10, 0.60, 0.10), Named("vehicle", 0.6, "car", 0.6)),
        ((0.15, 0.15, 0.15, 0.40, 0.15), Named("unknown", None, None, None)),
        ((0.10, 0.10, 0.05, 0.05, 0.70), Named("unknown", None, "mixed", 0.7)),
    ],
)
def test_a_photo_is_called_what_is_sure(probabilities: tuple[float, ...], expected: Named) -> None:
    assert math.isclose(sum(probabilities), 1)
    (named,) = GROUPS.named(torch.tensor([probabilities]).log() + 3)
    assert (named.group, named.label) == (expected.group, expected.label)
    assert named.group_confidence == pytest.approx(expected.group_confidence)
    assert named.label_confidence == pytest.approx(expected.label_confidence)


@pytest.mark.parametrize(
    ("probabilities", "expected"),
    [
        ((0.6, 0.1, 0.1, 0.1, 0.1), Named(None, None, "crow", 0.6)),
        ((0.4, 0.3, 0.1, 0.1, 0.1), Named(None, None, None, None)),
    ],
)
def test_classes_without_groups_name_a_photo_all_the_same(
    probabilities: tuple[float, ...], expected: Named, tmp_path: Path
) -> None:
    save(tiny_vit(), tmp_path / "model", labels=LABELS)
    loaded = pl.load(tmp_path / "model")
    assert loaded.naming is not None
    assert loaded.groups is None
    (named,) = loaded.naming.named(torch.tensor([probabilities]).log())
    assert (named.group, named.group_confidence, named.label) == (None, None, expected.label)
    assert named.label_confidence == pytest.approx(expected.label_confidence)


def test_without_groups_labels_stay_as_they_are(tmp_path: Path) -> None:
    labels = ("deer/red_deer", "boar/1.wild", "unknown", "x", "y")
    save(tiny_vit(), tmp_path / "model", labels=labels)
    naming = pl.load(tmp_path / "model").naming
    assert naming is not None
    assert [each.label for each in naming.named(20 * torch.eye(5))] == list(labels)


def test_numbers_alone_name_nothing(tmp_path: Path) -> None:
    save(tiny_vit(), tmp_path / "model")
    assert pl.load(tmp_path / "model").naming is None
    save(tiny_vit(), tmp_path / "named", labels=LABELS)
    assert pl.load(tmp_path / "named", num_classes=3).naming is None


def test_measured_probabilities_say_from_when_on_a_photo_is_called_something(tmp_path: Path) -> None:
    labels, paths = ("pets/pug", "pets/collie", "pets/car"), ("animal/dog", "animal/dog", "vehicle")
    groups = Groups(labels, paths, group_from=0.7, label_from=0.9)
    logits_BK = torch.tensor([[0.95, 0.04, 0.01], [0.6, 0.32, 0.08], [0.5, 0.25, 0.25], [0.4, 0.25, 0.35]]).log()
    said = [(named.group, named.label) for named in groups.named(logits_BK)]
    assert said == [("animal", "pug (dog)"), ("animal", "dog"), ("animal", None), ("unknown", None)]
    assert groups.fingerprint() != Groups(labels, paths).fingerprint()
    model = tiny_vit(num_classes=3)
    for given in (groups, Groups(labels, paths)):
        pl.save(model, tmp_path / "model", labels=labels, groups=given, overwrite=True)
        assert pl.load(tmp_path / "model").groups == given
    for wrong in ((0.4, 0.9), (0.9, 0.7), (0.7, 1.1)):
        with pytest.raises(PatchlightError, match="probabilities"):
            Groups(labels, paths, *wrong)


@pytest.mark.parametrize("said_from", [7, {"group": "0.7"}, {"group": 0.2}])
def test_damaged_probabilities_are_named(tmp_path: Path, said_from: object) -> None:
    groups = Groups(("a/pug", "a/car"), ("animal", "vehicle"))
    pl.save(tiny_vit(num_classes=2), tmp_path / "model", labels=groups.labels, groups=groups)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["patchlight"]["groups_said_from"] = said_from
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(PatchlightError, match="probabilities"):
        pl.load(tmp_path / "model")


def test_a_class_that_is_a_whole_group_is_no_name_of_its_own() -> None:
    groups = Groups(("object/person", "object/cat"), ("person", "animal/cat"))
    person, cat = groups.named(torch.tensor([[0.9, 0.1], [0.1, 0.9]]).log())
    assert (person.group, person.label, person.label_confidence) == ("person", None, None)
    assert (cat.group, cat.label) == ("animal", "cat")


def test_sums_are_those_of_the_classes() -> None:
    logits = torch.randn(7, 5, dtype=torch.bfloat16)
    shares = logits.double().softmax(1)
    assert GROUPS.nodes == ("animal", "animal/bird", "vehicle")
    assert GROUPS.names == ("animal", "vehicle")
    expected = [shares[:, :3].sum(1), shares[:, :2].sum(1), shares[:, 3]]
    torch.testing.assert_close(GROUPS.sums(logits), torch.stack(expected, 1).float())


def test_the_table_of_groups(tmp_path: Path) -> None:
    table = tmp_path / "groups.csv"
    table.write_text("label,about,group\nbird/*,,animal/bird\n*,,thing\nbird/plastic,a toy,thing/toy\n\nx,,unknown\n")
    groups = read_groups(table, ["bird/crow", "bird/plastic", "x", "cup"])
    assert groups.paths == ("animal/bird", "thing/toy", "unknown", "thing")
    table.write_text("label,group\nbird/*,animal\n")
    assert read_groups(table, ["bird/crow", "cup"]).paths == ("animal", "unknown")


def test_what_of_a_table_does_not_fit(tmp_path: Path) -> None:
    table = tmp_path / "groups.csv"
    table.write_text("label,group\nbird/*,animal\nbrid/*,animal\n[x],thing\n")
    assert gaps_of(table, ["bird/crow", "[x]"]) == [f"{table}: no class is called 'brid/*', so these rows do nothing"]
    lines = gaps_of(table, ["brid/a", "bird/b", "[x]", *"efghi"])
    assert lines == [f"{table}: no row fits 'e', 'f', 'g' and 2 more of the 8 classes, so they are unknown"]


def test_a_table_is_taken_by_save(tmp_path: Path) -> None:
    table = tmp_path / "groups.csv"
    table.write_text("label,group\n*,thing\n")
    save(tiny_vit(), tmp_path / "model", labels=LABELS, groups=str(table))
    groups = pl.load(tmp_path / "model").groups
    assert groups == Groups(tuple(LABELS), ("thing",) * len(LABELS))
    save(pl.load(tmp_path / "model"), tmp_path / "again", groups=table)
    assert pl.load(tmp_path / "again").groups == groups
    with pytest.raises(PatchlightError, match="groups= needs labels="):
        save(tiny_vit(), tmp_path / "none", groups=table)
    with pytest.raises(PatchlightError, match=r"path of a CSV .label,group., not a list"):
        save(tiny_vit(), tmp_path / "none", labels=LABELS, groups=["thing"] * len(LABELS))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file,label\na,b\n", "must name the columns label,group"),
        ("", "must name the columns label,group"),
        ("label,group\ncup,\n", "the row of 'cup' has the group ''"),
        ("label,group\ncup,thing/\n", "the row of 'cup' has the group 'thing/'"),
        ("label,group\ncup,animal/unknown\n", "animal/unknown"),
        ("label,group\ncup,Unknown\n", "Unknown"),
        ("label,group\ncup,thing\n", "no row fits any of the 2 classes, such as 'crow'"),
        ("label,group\n\xff", "is not UTF-8"),
    ],
)
def test_a_table_that_is_none(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "groups.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(PatchlightError, match=message):
        read_groups(tmp_path / "groups.csv", ["crow", "jay"])
    with pytest.raises(PatchlightError, match="cannot be read"):
        read_groups(tmp_path / "absent.csv", ["crow"])


def test_groups_go_with_the_model(tmp_path: Path) -> None:
    save(tiny_vit(), tmp_path / "model", labels=LABELS, groups=GROUPS)
    loaded = pl.load(tmp_path / "model")
    assert loaded.groups == GROUPS
    save(loaded, tmp_path / "again")
    assert pl.load(tmp_path / "again").groups == GROUPS
    save(loaded, tmp_path / "renamed", labels=[f"{label}2" for label in LABELS])
    assert pl.load(tmp_path / "renamed").groups is None
    assert pl.load(tmp_path / "model", num_classes=3).groups is None
    with pytest.raises(PatchlightError, match="other labels"):
        save(tiny_vit(), tmp_path / "wrong", labels=LABELS[::-1], groups=GROUPS)
    save(tiny_vit(), tmp_path / "none", labels=LABELS)
    assert pl.load(tmp_path / "none").groups is None


@pytest.mark.parametrize("groups", [["animal"], ["animal"] * 4 + [7], ["animal"] * 4 + [""], 5])
def test_damaged_groups_are_named(tmp_path: Path, groups: object) -> None:
    save(tiny_vit(), tmp_path / "model", labels=LABELS, groups=GROUPS)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["patchlight"]["groups"] = groups
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(PatchlightError, match="model"):
        pl.load(tmp_path / "model")


def test_the_recipes_table_groups_every_class_of_the_default_model() -> None:
    loaded = pl.load("default")
    assert loaded.labels is not None
    assert loaded.groups is not None
    table = ROOT / "recipes" / "default_groups.csv"
    assert not [line for line in gaps_of(table, loaded.labels) if line.endswith("so they are unknown")]
    groups = read_groups(table, loaded.labels)
    assert loaded.groups.paths == groups.paths
    assert set(groups.names) > {"animal", "person", "vehicle", "food", "plant", "household", "building", "thing"}


def test_a_cat_is_an_animal_and_an_astronaut_a_person() -> None:
    loaded = pl.load("default")
    for photo, group in (("chelsea.png", "animal"), ("astronaut.png", "person")):
        said = pl.classify(ROOT / "demo" / photo, loaded)
        assert said.named is not None
        assert said.named.group == group
        assert said.to_dict()["group"] == group
        found = pl.localize(ROOT / "demo" / photo, loaded)
        assert found.named is not None
        assert found.named.group == group
        assert found.named.group_confidence == pytest.approx(said.named.group_confidence, abs=0.02)


def test_tables_of_spreadsheets_and_labels_with_brackets(tmp_path: Path):
    table = tmp_path / "groups.csv"
    table.write_text("label;group\r\nfox1;animal\r\n")  # as spreadsheets write it in half of the world
    assert read_groups(table, ["fox1"]).paths == ("animal",)
    table.write_text("label,group\n[wild]/f*,animal\nfox?,thing\n")
    assert read_groups(table, ["[wild]/fox", "w/fox", "fox1"]).paths == ("animal", "unknown", "thing")


@pytest.mark.parametrize(
    ("labels", "paths"),
    [
        (("animal", "empty", "person", "vehicle"), ("animal", "empty", "person", "vehicle")),
        (("Animal", "Empty"), ("animal", "empty")),
        (("deer", "empty", "fox"), ("unknown", "empty", "unknown")),
        (("deer", "fox"), None),
        (("person", "dog"), None),
        (("animal", "Animal"), None),
    ],
)
def test_classes_that_are_called_like_groups(labels: tuple[str, ...], paths: tuple[str, ...] | None) -> None:
    groups = groups_by_name(labels)
    assert (None if groups is None else groups.paths) == paths
