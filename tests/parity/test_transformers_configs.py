"""transformers' models as they are, and with every key of their config files turned to another value: the same answers,
or a refusal that names the key.

Keys, values and models are those of the installed transformers, so that what a later version adds is tried here without
anyone having heard of it.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import oracles
from models_at_random import distance, redraw, some_image
from patchlight.errors import PatchlightError
from patchlight.other_names import OTHER_NAMES
from patchlight.weights.families import FAMILIES, all_model_types
from patchlight.weights.load import load
from transformers_models import CLAIMED, Made, image_size, make, ours, theirs

# Said by transformers of itself, or what the weights are kept in: no settings of a model.
ABOUT_THE_FILE = ("model_type", "architectures", "transformers_version", "dtype", "_name_or_path", "stage_names")

# Where half or twice as much is not possible, or says nothing new.
VALUES: dict[str, list[Any]] = {
    "image_size": [48, 64, 96, [32, 64]],
    "patch_size": [2, 4, 16, [8, 16]],
    "pooler_act": ["relu"],
    "hidden_act": ["gelu", "gelu_new", "gelu_10", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu"],
    "window_size": [2, 3],
    "depths": [[1, 1], [2, 3], [2, 1, 1], [1, 2, 1, 1]],
    "num_heads": [[3, 2], [4, 6]],
    "hidden_sizes": [[8, 12, 16, 24], [4, 12, 12, 12]],
    "pretrained_window_sizes": [[3, 2], [0, 2], [4, 4]],
    "num_attention_heads": [1, 2, 4, 6],
    "id2label": [{0: "a", 1: "b", 2: "c"}],
    "label2id": [{"a": 0, "b": 1, "c": 2}],
    "out_indices": [[1]],
    "out_features": [["stem"], ["stage1"]],
}

# Keys that transformers' models read though their config classes do not list them.
UNLISTED: dict[str, list[Any]] = {
    "head_dim": [8, 16],
    "per_layer_config": [{"0": {"hidden_act": "relu"}}, {"1": {"layer_norm_eps": 0.1}}],
    "vision_use_head": [False],
    "embedding_size": [12],
}


# Settings of which transformers can make no other here, in some of its classes.
UNTRIED = {
    *UNLISTED,
    "output_attentions",  # with fused attention
    "add_fpn",  # without four layers to take it from
    "use_absolute_embeddings",  # of Swin V2, where it fails
    "num_stages",  # without as many widths
}


def other_values(key: str, value: Any) -> list[Any]:
    if key in VALUES:
        return [other for other in VALUES[key] if other != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value]
    if isinstance(value, float):
        return [0.0, value + 0.05, 2 * value + 1]
    if isinstance(value, list | tuple):
        return [[2 * each for each in value], list(value)[::-1]]
    return [True, 1, 0.3, "regression"]


def settings_of(made: Made) -> dict[str, Any]:
    config = make(made).config.to_dict()
    config = config.get("vision_config", config)
    return {key: value for key, value in config.items() if key not in ABOUT_THE_FILE}


def judged(model: Any, answers: dict[str, Tensor], source: Path, key: str) -> str | None:
    """What is wrong with what `load` makes of a folder whose model transformers made; None if nothing is."""
    named = {key or "nothing is to be refused"} | {ours for _, theirs, ours, _ in OTHER_NAMES if theirs == key}
    try:
        loaded = load(source)
    except PatchlightError as error:
        right = any(name in str(error) for name in named) and "\n" not in str(error)
        return None if right else f"refused otherwise: {error}"
    own = ours(model, loaded, some_image(image_size(model)))
    apart = max(distance(own[name], answers[name]) for name in answers)
    return None if apart < 1e-4 else f"differs by {apart:.2g}"


def kind_of(made: Made) -> str:
    return str(made).replace(made.name, made.config)


# One of each kind: the one with a classifier, where there is one.
KINDS = {kind_of(made): made for made in reversed(CLAIMED) if "Backbone" not in made.name}
KINDS |= {kind_of(made): made for made in CLAIMED if made.name.endswith("ForImageClassification")}


def wrongs(made: Made, asked: list[tuple[str, Any]], place: Path) -> list[str]:
    """What is wrong with models that have these settings; those that transformers cannot make are passed over."""
    wrong, tried = [], set()
    for number, (key, value) in enumerate(asked):
        folder = place / str(number)
        try:
            model = make(made, **{key: value})
            redraw(model)
            model.save_pretrained(folder)
            answers = theirs(model, some_image(image_size(model)))
        except Exception:
            continue
        tried.add(key)
        if (said := judged(model, answers, folder, key)) is not None:
            wrong.append(f"{key}={value!r}: {said}")
    wrong += [f"{key}: no value tried" for key in sorted({key for key, _ in asked} - tried - UNTRIED)]
    return wrong


SAVED_WITHOUT_THEIR_LAST_NORM = ("SwinBackbone", "Swinv2Backbone", "ConvNextBackbone", "ConvNextV2Backbone")


@pytest.mark.parametrize("made", CLAIMED, ids=str)
def test_each_class(made: Made, tmp_path: Path) -> None:
    model = make(made)
    redraw(model)
    model.save_pretrained(tmp_path)
    if made.name in SAVED_WITHOUT_THEIR_LAST_NORM:
        with pytest.raises(
            PatchlightError, match="the norm after the last stage is not in it, as in what transformers"
        ):
            load(tmp_path)
        return
    assert judged(model, theirs(model, some_image(image_size(model))), tmp_path, "") is None
    notes = load(tmp_path).notes
    assert not [note for note in notes if "convention" in note or "do not know" in note]


@pytest.mark.parametrize("kind", KINDS)
def test_each_key_at_another_value(kind: str, tmp_path: Path) -> None:
    made = KINDS[kind]
    asked = [(key, other) for key, value in settings_of(made).items() for other in other_values(key, value)]
    wrong = wrongs(made, asked + [(key, other) for key, values in UNLISTED.items() for other in values], tmp_path)
    assert not wrong, "\n".join(wrong)


def test_each_activation(tmp_path: Path) -> None:
    names = oracles.transformers().activations.ACT2FN
    wrong = wrongs(KINDS["ViTConfig"], [("hidden_act", name) for name in names], tmp_path)
    assert not wrong, "\n".join(wrong)


def saved(made: Made, folder: Path, **config: Any) -> Any:
    """A model in a folder, and other words in its config.json."""
    model = make(made)
    redraw(model)
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(written))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_that_is_left_out_is_what_transformers_takes_for_it(kind: str, tmp_path: Path) -> None:
    """As in old files, and in files written by hand; of the keys that are followed."""
    made, wrong = KINDS[kind], []
    model = saved(made, tmp_path)
    whole = json.loads((tmp_path / "config.json").read_text())
    inside = whole.get("vision_config", whole)
    for key in all_model_types()[inside["model_type"]].defaults:
        less = {name: value for name, value in inside.items() if name != key}
        (tmp_path / "config.json").write_text(json.dumps(whole | {"vision_config": less} if made.has_text else less))
        try:
            other, told = type(model).from_pretrained(tmp_path, output_loading_info=True)
        except RuntimeError:  # where it takes tensors of another shape
            continue
        if any(told.values()):
            continue
        answers = theirs(other.eval(), some_image(image_size(other)))
        if (said := judged(other, answers, tmp_path, key)) is not None:
            wrong.append(f"{key}: {said}")
    assert not wrong, "\n".join(wrong)


def test_a_key_that_nobody_knows_is_noted(tmp_path: Path) -> None:
    saved(KINDS["ViTConfig"], tmp_path, made_on="Sunday", colour=3)
    known = "settings in config.json that we do not know, taken to change nothing: colour, made_on"
    assert known in load(tmp_path).notes


def test_a_model_type_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    saved(KINDS["ViTConfig"], tmp_path, model_type="vit_with_a_twist")
    with pytest.raises(
        PatchlightError, match="model_type='vit_with_a_twist', and transformers' models of that type are"
    ):
        load(tmp_path)


def test_a_model_without_its_last_norm_can_be_had_without(tmp_path: Path) -> None:
    """By its tensors alone nobody can tell it from one that lost some."""
    made = next(made for made in CLAIMED if made.name == "Data2VecVisionModel")
    model = saved(made, tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(PatchlightError, match="final_norm='none' does without its last norm"):
        load(tmp_path)
    image = some_image(image_size(model))
    own = ours(model, load(tmp_path, final_norm="none", num_heads=3), image)
    assert distance(own["tokens"], theirs(model, image)["tokens"]) < 1e-5


def test_dinov2_without_its_config_has_its_own_eps(tmp_path: Path) -> None:
    model = saved(KINDS["Dinov2Config"], tmp_path)
    (tmp_path / "config.json").unlink()
    image = some_image(image_size(model))
    own = ours(model, load(tmp_path, num_heads=3), image)
    assert distance(own["answers"], theirs(model, image)["answers"]) < 1e-5


AT_OTHER_SIZES = [made for made in CLAIMED if made.name.endswith(("ForImageClassification", "WithTeacher"))]
AT_OTHER_SIZES += [made for made in CLAIMED if made.name in ("DINOv3ViTModel", "CLIPVisionModel", "BeitModel")]


@pytest.mark.parametrize("made", AT_OTHER_SIZES, ids=str)
@torch.no_grad()
def test_at_another_size(made: Made, tmp_path: Path) -> None:
    """Positions are resampled as transformers does it, if it is asked to or does it by itself."""
    model = saved(made, tmp_path)
    image = some_image((3, 48, 80))
    try:
        output = model(image)
    except (ValueError, RuntimeError):
        output = model(image, interpolate_pos_encoding=True)
    answers = output.logits if hasattr(output, "logits") else output.pooler_output
    assert distance(load(tmp_path).model(image), answers) < 1e-5


@pytest.mark.parametrize(
    ("key", "value", "setting"), [("hidden_act", "quick_gelu", "mlp"), ("layer_norm_eps", 1e-5, "norm_eps")]
)
def test_a_key_that_is_passed_over_is_found(
    key: str, value: Any, setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where it makes as little difference as these do."""
    family = FAMILIES["vit"]

    def forgetful(*arguments: Any, **more: Any) -> dict[str, Any]:
        return {name: told for name, told in family.transformers_hints(*arguments, **more).items() if name != setting}

    made = KINDS["ViTConfig"]
    assert not wrongs(made, [(key, value)], tmp_path / "right")
    monkeypatch.setitem(FAMILIES, "vit", dataclasses.replace(family, transformers_hints=forgetful))
    [said] = wrongs(made, [(key, value)], tmp_path / "wrong")
    assert said.startswith(f"{key}={value!r}: differs by")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("Swin")])
def test_a_key_that_the_tensors_contradict(kind: str, tmp_path: Path) -> None:
    """Turned in the file alone: transformers leaves tensors over, or draws others, and so no other model is loaded."""
    made, wrong = KINDS[kind], []
    model = saved(made, tmp_path)
    whole = json.loads((tmp_path / "config.json").read_text())
    inside = whole.get("vision_config", whole)
    for key in [key for key, value in inside.items() if isinstance(value, bool)]:
        other = inside | {key: not inside[key]}
        (tmp_path / "config.json").write_text(json.dumps(whole | {"vision_config": other} if made.has_text else other))
        try:
            read = type(model).from_pretrained(tmp_path).eval()
            answers = theirs(read, some_image(image_size(read)))
        except (RuntimeError, ValueError):
            continue
        if (said := judged(read, answers, tmp_path, key)) is not None:
            wrong.append(f"{key}={other[key]}: {said}")
    assert not wrong, "\n".join(wrong)
