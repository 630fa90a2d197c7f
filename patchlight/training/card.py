"""The card of a trained model, in Markdown: what it is, how it was made, how good it is, and what it is not."""

import dataclasses
import math
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from patchlight.errors import and_more
from patchlight.json_config import JsonConfig
from patchlight.training.config import TrainConfig

MOST_CLASSES = 100
"""How many are named."""

_RESULTS = {
    "accuracy": "accuracy",
    "accuracy_interval": "accuracy, 95 % interval",
    "top5_accuracy": "top-5 accuracy",
    "loss": "cross-entropy (nats)",
    "calibration_error": "expected calibration error",
    "temperature": "temperature of the least loss (fitted on the same photos)",
    "calibration_error_with_temperature": "calibration error with it",
    "subject_found": "subjects found (overlap of the boxes at least one half)",
    "overlap": "overlap of the boxes found and true, in the mean",
    "explained": "share of the hidden pixels' variance that its reconstructions explain",
    "feature_rank": "directions that its features use",
}
_IN_PERCENT = {name for name in _RESULTS if "accuracy" in name or "error" in name or "found" in name}

# What stands elsewhere in the card, or would tell of the machine that it was made on.
_NOT_SETTINGS = ("data.train", "data.validation", "data.workers", "model.num_classes", "preprocess.image_size")


def training_card(
    config: TrainConfig,
    classes: Sequence[str],
    evaluation_summary: Mapping[str, Any],
    seconds: float,
    hardware: str,
    notes: Sequence[str],
) -> str:
    """The README.md of a run.

    `evaluation_summary` is what `Evaluation.summary()` gives, with `photos` the number of training photos and
    `validation_photos` that of the others, where known; `notes` are sentences for whoever uses the model.
    """
    parts = [
        f"---\ntags: [vision-transformer, {'image-classification' if config.labelled else 'self-supervised'}]\n---",
        f"# A Vision Transformer for {_counted(len(classes), 'class', 'classes')}"
        if config.labelled
        else "# A Vision Transformer that learned without labels",
        _what(config),
        "## Trained on",
        _photos(config, classes, evaluation_summary),
        "## How",
        f"{config.epochs:g} epochs in {_duration(seconds)} on {escaped(hardware)}. "
        "Settings that are not at their defaults; all of them are in run.json:",
        _table(("setting", "value", "default"), _changed(config)),
        "## Results",
        _measured_on(config, evaluation_summary),
        *([_table(("measure", "value"), results)] if (results := list(_results(evaluation_summary))) else []),
        "The course of the run is in metrics.jsonl, and in curves.png where matplotlib was installed.",
        "## Limits",
        _limits(config, classes, evaluation_summary),
        *(["## Notes", "\n".join(f"- {escaped(note)}" for note in notes)] if notes else []),
        "## Use",
        '```python\nimport patchlight as pl\n\nloaded = pl.load("FOLDER")  # the folder that this file is in\n'
        + (
            'print(pl.classify("photo.jpg", loaded))\n```'
            if config.labelled
            else 'image, view = loaded.preprocess("photo.jpg")\nprint(loaded.model.features(image[None]))\n```'
        ),
    ]
    return "\n\n".join(parts) + "\n"


def escaped(text: str) -> str:
    """Text in Markdown as it is read, on one line, whatever is in it: pipes, stars, tags, links."""
    line = " ".join(text.encode(errors="replace").decode().split())
    entities = {"<": "&lt;", ">": "&gt;", "&": "&amp;", "|": "&#124;"}  # which also hold where backslashes do not
    plain = set(string.punctuation) - set(",;'%")
    return "".join(
        entities.get(letter) or (f"\\{letter}" if letter in plain else letter if letter.isprintable() else "\ufffd")
        for letter in line
    )


def _what(config: TrainConfig) -> str:
    model = config.model
    (height, width), (down, across) = model.image_size, model.patch_size
    start = "from scratch" if config.start is None else f"from {escaped(_name(config.start))}"
    text = (
        f"A {model.title} for images of {height} x {width} pixels in patches of {down} x {across}: "
        f"{model.encoder_in_words}. Trained {start} with Patchlight"
    )
    if config.trainable_blocks is not None:
        learnt = (
            f"its last {_counted(config.trainable_blocks, 'block', 'blocks')} and " if config.trainable_blocks else ""
        )
        text += f"; only {learnt}its head learned"
    if config.distill is not None:
        text += f"; {config.distill.kind} distillation from {escaped(_name(config.distill.teacher))}"
    if config.dino is not None:
        text += "; without labels (DINO: all views of a photo should get the same answer)"
    if config.mae is not None:
        text += "; without labels (MAE: hidden patches are to be reconstructed)"
    if config.subject is not None:
        text += "; its last block's class token was taught by boxes to look at the subject"
    return text + "."


def _photos(config: TrainConfig, classes: Sequence[str], summary: Mapping[str, Any]) -> str:
    count = summary.get("photos")
    photos = "photos" if count is None else _counted(count, "photo", "photos")
    if not config.labelled:
        return f"{escaped(_name(config.data.train))}: {photos}. Labels, if there were any, were not used."
    named = ", ".join(map(escaped, classes[:MOST_CLASSES]))
    more = and_more(len(classes), MOST_CLASSES)
    more = f",{more} (all are in config.json)" if more else ""
    return (
        f"{escaped(_name(config.data.train))}: {photos} of {_counted(len(classes), 'class', 'classes')}.\n\n"
        f"Classes: {named}{more}."
    )


def _measured_on(config: TrainConfig, summary: Mapping[str, Any]) -> str:
    count = summary.get("validation_photos")
    photos = "photos" if count is None else _counted(count, "photo", "photos")
    if not config.labelled and summary.get("accuracy") is None:
        return "Its photos have no labels to judge the features by. At the end of the training:"
    if not config.labelled:
        photos = f"the nearest neighbours of {photos}"
    if config.data.validation is None:
        return f"On {photos} held out from the same source (chosen by content, so that copies stay on one side):"
    return f"On {photos} of {escaped(_name(config.data.validation))}:"


def _results(summary: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, title in _RESULTS.items():
        value = summary.get(name)
        # The neighbours vote with a temperature that is given, and not found.
        if value is not None and (name != "temperature" or "calibration_error" in summary):
            values = value if isinstance(value, list | tuple) else [value]
            form = "{:.2%}" if name in _IN_PERCENT else "{:.4g}"
            yield title, " to ".join(form.format(each) for each in values)


def _limits(config: TrainConfig, classes: Sequence[str], summary: Mapping[str, Any]) -> str:
    if not config.labelled:
        return (
            "- It names nothing: it gives features. How good they are on photos of your own, `patchlight evaluate "
            "FOLDER LABELLED_PHOTOS/ --knn` tells."
        )
    lines = [
        f"It knows {_counted(len(classes), 'class', 'classes')} and answers with one of them whatever the photo shows.",
        "Photos from another camera, place or season than those above can be recognised far less often; evaluate it on "
        "some of your own first: `patchlight evaluate FOLDER PHOTOS/`.",
    ]
    error = summary.get("calibration_error")
    if error is None:
        lines.append("Its confidence was not compared with how often it is right.")
    else:
        lines.append(f"Its confidence is off by {error:.1%} on average; check it before you read it as a probability.")
    lines.append("If settings were chosen by the figures above, these look a little better than they are.")
    return "\n".join(f"- {line}" for line in lines)


def _changed(config: TrainConfig) -> Iterator[tuple[str, ...]]:
    """The settings that were given another value than the default, or that have none."""
    for name, value, default in _settings(config, ""):
        if name not in _NOT_SETTINGS and value != default:
            shown = _name(value) if name in ("start", "distill.teacher", "data.groups") and value else value
            yield f"`{name}`", _plain(shown), "" if default is dataclasses.MISSING else _plain(default)


def _settings(config: JsonConfig, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if isinstance(value, JsonConfig):
            yield from _settings(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value, field.default


def _plain(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_plain, value))
    return f"{value:g}" if isinstance(value, float) else escaped(str(value))


def _name(path: str) -> str:
    """The last part of a path: the rest is about somebody's disk. A name on the hub is whole."""
    return path if path.startswith("hf:") else PurePath(path).name or path


def _table(headings: Sequence[str], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _counted(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds) or seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
