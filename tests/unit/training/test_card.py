"""The card of a trained model: what it must say, and what must not get out of hand in it."""

import html
import re
from typing import Any

import pytest

from patchlight.config import PreprocessConfig
from patchlight.families import variant
from patchlight.training.card import escaped, training_card
from patchlight.training.config import DataConfig, DistillConfig, OptimConfig, TrainConfig

SUMMARY = {
    "photos": 1234,
    "validation_photos": 100,
    "accuracy": 0.9456,
    "accuracy_interval": [0.9, 0.97],
    "top5_accuracy": None,
    "loss": 0.25,
    "calibration_error": 0.0214,
    "temperature": 1.25,
}


def config(**changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "model": variant("Ti/4", image_size=32, num_classes=3),
        "data": DataConfig(train="/home/someone/secret/my photos"),
        "preprocess": PreprocessConfig(image_size=32),
    }
    return TrainConfig(**settings | changes)


def card(classes: list[str] | None = None, notes: tuple[str, ...] = (), **changes: Any) -> str:
    return training_card(config(**changes), classes or ["cat", "dog", "elk"], SUMMARY, 3725.0, "NVIDIA H200", notes)


def test_it_says_what_it_is_and_how_good() -> None:
    text = card(epochs=20, optim=OptimConfig(lr=2e-3))
    for expected in (
        "# A Vision Transformer for 3 classes",
        "images of 32 x 32 pixels in patches of 4 x 4: 12 blocks, 192 wide, 3 heads",
        "Trained from scratch",
        "my photos: 1,234 photos of 3 classes.",
        "Classes: cat, dog, elk.",
        "20 epochs in 1 h 2 min on NVIDIA H200.",
        "On 100 photos held out from the same source",
        "| accuracy | 94.56% |",
        "| accuracy, 95 % interval | 90.00% to 97.00% |",
        "| cross-entropy (nats) | 0.25 |",
        "| expected calibration error | 2.14% |",
        "Its confidence is off by 2.1% on average",
        'pl.load("FOLDER")',
    ):
        assert expected in text, expected
    assert "top-5" not in text
    assert "## Notes" not in text
    assert text.endswith("\n")


def test_only_settings_that_differ_are_listed() -> None:
    rows = re.findall(r"^\| `(.+?)` \| (.*) \| (.*) \|$", card(epochs=20, optim=OptimConfig(lr=2e-3)), re.MULTILINE)
    assert rows == [
        ("model.image_size", "32, 32", "224, 224"),
        ("model.patch_size", "4, 4", "16, 16"),
        ("model.width", "192", "768"),
        ("model.num_heads", "3", "12"),
        ("optim.lr", "0.002", "0.001"),
        ("epochs", "20", "100"),
    ]


def test_paths_of_the_machine_stay_out() -> None:
    changes = {
        "data": DataConfig(train="/home/someone/secret/photos/", validation="/home/someone/secret/others.csv"),
        "model": variant("Ti/4", image_size=32, num_classes=3, distill_token=True),
        "distill": DistillConfig(teacher="/home/someone/secret/teacher.pt"),
        "start": "/home/someone/secret/start.pt",
        "trainable_blocks": 2,
    }
    text = card(**changes)
    assert "someone" not in text
    assert "secret" not in text
    for expected in (
        "Trained from start\\.pt",
        "hard distillation from teacher\\.pt",
        "On 100 photos of others\\.csv:",
    ):
        assert expected in text, expected
    assert "only its last 2 blocks and its head learned" in text
    assert "only its head learned" in card(**changes | {"trainable_blocks": 0})
    assert "hf\\:timm\\/vit" in card(start="hf:timm/vit")


NASTY = [
    "cat|dog",
    "<img src=x onerror=alert(1)>",
    "[here](http://example.com)",
    "**bold** _it_ `code`",
    "line\n# heading",
    "&lt;",
    "www.example.com",
    "\u202egnp.exe",
    "\udcff",
]


@pytest.mark.parametrize("name", NASTY)
def test_a_label_is_shown_as_it_is(name: str) -> None:
    """By the rules of Markdown, a backslash before a sign and an entity stand for the sign alone."""
    text = escaped(name)
    assert not re.search(r"(?<!\\)[*_`\[\]<>|#:.]", re.sub(r"&#?\w+;", "", text))
    assert text.isprintable()
    assert "\n" not in text
    shown = html.unescape(re.sub(r"\\(?=_|[^\w\s])", "", text))
    assert shown == " ".join(name.replace("\u202e", "\ufffd").replace("\udcff", "?").split())


def test_names_cannot_break_the_card() -> None:
    text = card(classes=NASTY, notes=("left out: a|b\n\n# c",), data=DataConfig(train="/x/<b>photos|*"))
    assert "<img" not in text
    assert "<b>" not in text
    assert "](http" not in text
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        "# A Vision Transformer for 9 classes",
        *(f"## {part}" for part in ("Trained on", "How", "Results", "Limits", "Notes", "Use")),
    ]
    text.encode()


def test_many_classes_and_little_known() -> None:
    classes = [f"class {k}" for k in range(250)]
    text = training_card(config(), classes, {"accuracy": 0.5}, 12.0, "cpu", [])
    assert "class 99, and 150 more (all are in config.json)." in text
    assert "class 100," not in text
    assert "in 12 s on cpu" in text
    assert "Its confidence was not compared" in text
    assert "None" not in text
