"""Labels of data sets, as people say them."""

from dataclasses import replace

import pytest
import torch

import patchlight as pl
from patchlight.classification import Prediction, likeliest
from patchlight.weights.groups import in_words


@pytest.mark.parametrize(
    ("label", "group", "words"),
    [
        ("bird/199.Winter_Wren", "animal/bird", "Winter Wren (bird)"),
        ("pet/Abyssinian", "animal/cat", "Abyssinian (cat)"),
        ("pet/american_bulldog", "animal/dog", "american bulldog"),
        ("imagenette/French_horn", "thing", "French horn"),
        ("catdog/cat", "animal/cat", "cat"),
        ("flower/18", "thing/flower", "flower 18"),
        ("wild/other", "unknown", "wild other"),
        ("tench, Tinca tinca", "animal/fish", "tench, Tinca tinca"),
        ("n01440764", "unknown", "n01440764"),
        ("snake_case", "unknown", "snake_case"),
        ("20 km/h", "thing/sign", "20 km/h"),
        ("n/a", "unknown", "n/a"),
        ("<i>c</i>", "unknown", "<i>c</i>"),
        ("a/b/c", "unknown", "a/b/c"),
    ],
)
def test_a_label_in_words(label: str, group: str, words: str) -> None:
    assert in_words([label], [group]) == (words,)


def test_no_two_classes_get_the_same_words() -> None:
    labels = ["male/adult", "female/adult", "male/calf"]
    assert in_words(labels, ["animal"] * 3) == ("male/adult", "female/adult", "calf")
    loaded = pl.load("default")
    assert loaded.labels is not None
    assert loaded.groups is not None
    words = in_words(loaded.labels, loaded.groups.paths)
    assert len(set(words)) == len(words) == loaded.config.num_classes
    assert not any("/" in each or "_" in each for each in words)


def test_people_read_words_and_programs_labels() -> None:
    loaded = pl.load("default")
    assert loaded.labels is not None
    logits_K = torch.zeros(len(loaded.labels))
    logits_K[loaded.labels.index("pet/Abyssinian")] = 40
    said = likeliest(loaded, logits_K, 1)
    assert said.words() == "animal 100.0%, Abyssinian (cat) 100.0%; likeliest: Abyssinian (cat) 100.0%"
    assert said.to_dict()["label"] == "Abyssinian (cat)"
    assert said.to_dict()["classes"] == [{"label": "pet/Abyssinian", "name": "Abyssinian (cat)", "probability": 1.0}]
    assert likeliest(replace(loaded, labels=None, groups=None), logits_K, 1).words().endswith(" 100.0%")


def test_without_words_labels_are_what_is_said() -> None:
    said = Prediction(labels=("wren", "crow"), probabilities=(0.75, 0.25), preprocess_fingerprint="")
    assert said.words() == "wren 75.0%, crow 25.0%"
    assert [each["name"] for each in said.to_dict()["classes"]] == ["wren", "crow"]
