"""Every key of others' preprocessing settings, given other values: the same pixels as theirs, or a refusal by name.

The references say which keys there are: the arguments of transformers' image processors, and the fields of timm's
PretrainedCfg. A key that they get in a later version is tried, too.
"""

import dataclasses
import inspect
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import oracles
from models_at_random import tiny_vit
from patchlight.errors import PatchlightError
from patchlight.images.preprocess import Preprocess
from patchlight.weights.load import load
from patchlight.weights.preprocessing import (
    PROCESSORS,
    TIMM_FOLLOWED,
    TIMM_HARMLESS,
    TIMM_REFUSED,
    TRANSFORMERS_HARMLESS,
    TRANSFORMERS_REFUSED,
    from_timm,
    from_transformers,
    unknown_to_timm,
    unknown_to_transformers,
)
from patchlight.weights.save import save
from transformers_models import CLAIMED

PHOTOS = [
    Image.fromarray(np.random.default_rng(7).integers(0, 256, (*size, 3), dtype=np.uint8))
    for size in ((61, 40), (33, 90))
]

SIZES: list[Any] = [24, [24, 36], [24], {"height": 24, "width": 36}, {"shortest_edge": 24}, {"longest_edge": 24}]
SIZES += [{"shortest_edge": 24, "longest_edge": 40}, {"max_height": 24, "max_width": 30}, {"height": 24}, 400]
COLOURS: list[Any] = [0, 0.0, 0.25, 3, [], [0.5], [0.1, 0.2, 0.3], [0.1, 0.2], [0.1, 0.2, 0.3, 0.4], "0.5"]
STEPS = ("do_resize", "do_center_crop", "do_rescale", "do_normalize")
ANY: list[Any] = [None, True, False, 0, 5, 0.5, "x", [5, 6], {"a": 1}]
VALUES: dict[str, list[Any]] = {
    "size": SIZES,
    "crop_size": SIZES,
    "pad_size": SIZES,
    "resample": [0, 1, 2, 3, 4, 5, 6, "bicubic"],
    "image_mean": COLOURS,
    "image_std": COLOURS,
    "rescale_factor": [0, 1, 1 / 127.5, 0.5, -1.0],
    "crop_pct": [0, 0.5, 0.875, 0.95, 1, 1.3],
    "input_size": [[3, 24, 36], [1, 24, 24], [3, 48, 48], 24, [24, 24]],
    "interpolation": ["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming", "random", "", "cubic"],
    "crop_mode": ["center", "squash", "border", "", "other"],
    "mean": COLOURS,
    "std": COLOURS,
    "device": ["cpu"],
}


def flips(values: dict[str, Any], keys: set[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The settings as they are, with each key left out, and with each other value of it."""
    yield "", values
    for key in sorted(keys):
        yield key, {name: value for name, value in values.items() if name != key}
        for value in [*VALUES.get(key, []), *([] if key == "device" else ANY)]:
            yield key, values | {key: value}


def expected_of(make_reference: Callable[[], Any]) -> list[torch.Tensor] | None:
    """What theirs makes of the photos; None where it fails, or gives no images of three channels."""
    try:
        reference = make_reference()
        images = [reference(photo) for photo in PHOTOS]
    except Exception:  # whatever a setting that cannot be makes it trip over
        return None
    fits = all(image.ndim == 3 and image.shape[0] == 3 and image.double().isfinite().all() for image in images)
    return [image.double() for image in images] if fits else None


def outcome_of(
    key: str, values: dict[str, Any], expected_CHWs: list[torch.Tensor], config_of: Any, unknown: Any
) -> str:
    """What became of settings that theirs takes: "equal" or "refused"; anything else fails."""
    try:
        prepare = Preprocess(config_of(values))
    except PatchlightError as error:
        said = str(error)
    else:
        said = ""
    if said:
        assert any(f"{name}=" in said for name in values), (values, said)
        assert "\n" not in said
        return "refused"
    for photo, expected_CHW in zip(PHOTOS, expected_CHWs, strict=True):
        image_CHW, _ = prepare(photo)
        assert image_CHW.shape == expected_CHW.shape, (key, values)
        largest = max(1.0, expected_CHW.abs().max().item())
        assert (image_CHW - expected_CHW).abs().max() <= 2e-5 * largest, (key, values)
    assert (key in unknown(values)) is (key == FUTURE and values.get(FUTURE) is not None), key
    return "equal"


FOLLOWED: dict[str, list[Any]] = {
    "size": SIZES[:2] + SIZES[3:5],
    "crop_size": [24, [24, 36], {"height": 24, "width": 36}],
    "resample": [0, 1, 2, 3],
    "image_mean": [0, 0.25, [0.1, 0.2, 0.3]],
    "image_std": [0.25, [0.1, 0.2, 0.3]],
    "rescale_factor": [1, 1 / 127.5],
    "do_rescale": [True, False],
    "do_normalize": [True, False],
    "default_to_square": [True, False],
}
"""What must not be refused."""

FUTURE = "a_key_of_the_future"


def reference_class(kind: str) -> Any:
    oracles.timm()  # which makes torchvision importable
    transformers = oracles.transformers()
    transformers.logging.set_verbosity_error()
    return getattr(transformers, f"{kind}ImageProcessorPil", None) or getattr(transformers, f"{kind}ImageProcessor")


def check_transformers(kind: str, key: str, values: dict[str, Any]) -> str:
    processor, values = reference_class(kind), json.loads(json.dumps(values))
    given = {name: value for name, value in values.items() if name != "image_processor_type"}

    def make_reference() -> Any:
        theirs = processor(**given)
        return lambda photo: theirs(photo, return_tensors="pt")["pixel_values"][0]

    expected = expected_of(make_reference)
    if expected is None:
        return "not theirs"
    return outcome_of(key, values, expected, from_transformers, unknown_to_transformers)


def usual(kind: str) -> dict[str, Any]:
    """What the image processor writes to a file, and a small size."""
    values = reference_class(kind)().to_dict()
    values |= {"size": {"shortest_edge": 32} if "shortest_edge" in values["size"] else {"height": 28, "width": 32}}
    return values | {"image_processor_type": f"{kind}ImageProcessor"}


def test_the_processors_of_all_models_that_we_claim_are_among_them() -> None:
    library = oracles.transformers()
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES as OF_MODELS

    checked = set()
    for config in {made.config for made in CLAIMED}:
        model_type = re.sub("_vision(_model)?$", "", getattr(library, config).model_type)
        for processor in OF_MODELS.get(model_type, {}).values():
            kind = processor.removesuffix("Pil").removesuffix("ImageProcessor")
            assert kind in PROCESSORS, f"{config}: {processor}"
            checked.add(kind)
    assert checked == set(PROCESSORS)


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("crop", [False, True], ids=["as it comes", "cropping"])
@pytest.mark.parametrize("kind", PROCESSORS)
def test_every_key_of_transformers(kind: str, crop: bool) -> None:
    values = usual(kind) | ({"do_center_crop": True, "crop_size": 24} if crop and kind != "ConvNext" else {})
    keys = {*reference_class(kind).valid_kwargs.__annotations__, *values, FUTURE}
    keys |= set(re.findall(r'"(\w+)" in kwargs', inspect.getsource(reference_class(kind))))
    keys |= TRANSFORMERS_REFUSED | TRANSFORMERS_HARMLESS | set(PROCESSORS[kind])
    outcomes = {"equal": set[str](), "refused": set[str](), "not theirs": set[str]()}
    for key, flipped in flips(values, keys - {"image_processor_type"}):
        became = check_transformers(kind, key, flipped)
        outcomes[became].add(key)
        if kind not in ("ConvNext", "DINOv3ViT") and repr(flipped.get(key)) in map(repr, FOLLOWED.get(key, [])):
            assert became == "equal", (key, flipped[key])
    assert keys - outcomes["equal"] <= {"image_processor_type"}
    assert outcomes["refused"] <= TRANSFORMERS_REFUSED | set(PROCESSORS[kind])


def test_an_image_processor_inside_the_file_of_a_processor_comes_first(tmp_path: Path) -> None:
    """As transformers 5 writes it for models of images and texts."""
    oracles.timm()  # which makes torchvision importable
    library = oracles.transformers()
    folder = save(tiny_vit(), tmp_path / "model", layout="transformers")
    config = json.loads((folder / "config.json").read_text())
    del config["patchlight"]
    (folder / "config.json").write_text(json.dumps(config))
    inside = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 40}, "crop_size": 32}
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": inside}))
    theirs = library.AutoImageProcessor.from_pretrained(folder, backend="pil")
    loaded = load(folder)
    for photo in PHOTOS:
        (expected_CHW,) = theirs(photo, return_tensors="pt")["pixel_values"]
        torch.testing.assert_close(loaded.transform(photo), expected_CHW, atol=1e-5, rtol=0)
    assert not [note for note in loaded.notes if "prepar" in note]
    save(loaded, folder, layout="transformers", overwrite=True)
    assert not (folder / "processor_config.json").exists()


@pytest.mark.parametrize("kind", PROCESSORS)
def test_every_mixture_of_steps_of_transformers(kind: str) -> None:
    equal = 0
    for chosen in itertools.product([True, False], repeat=len(STEPS)):
        values = usual(kind) | {"crop_size": 24} | dict(zip(STEPS, chosen, strict=True))
        equal += check_transformers(kind, "", values) == "equal"
    assert equal >= 4


@pytest.mark.parametrize("mode", ["center", "squash", "border"])
@pytest.mark.parametrize("size", [(3, 24, 24), (3, 24, 36)])
def test_every_key_of_timm(mode: str, size: tuple[int, int, int]) -> None:
    oracles.timm()
    from timm.data import create_transform, resolve_data_config
    from timm.models import PretrainedCfg

    values = PretrainedCfg(input_size=size, crop_mode=mode, crop_pct=0.9).to_dict(remove_null=False)
    keys = {*(field.name for field in dataclasses.fields(PretrainedCfg)), FUTURE}
    outcomes = {"equal": set[str](), "refused": set[str](), "not theirs": set[str]()}
    for key, flipped in flips(values, keys | TIMM_FOLLOWED | TIMM_REFUSED | TIMM_HARMLESS):
        given = json.loads(json.dumps(flipped))
        expected = expected_of(lambda given=given: create_transform(**resolve_data_config(pretrained_cfg=given)))
        if expected is None:
            outcomes["not theirs"].add(key)
        else:
            outcomes[outcome_of(key, given, expected, from_timm, unknown_to_timm)].add(key)
    assert outcomes["equal"] >= keys
    assert outcomes["refused"] <= TIMM_FOLLOWED | TIMM_REFUSED
