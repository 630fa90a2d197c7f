"""Every function that takes photos takes them in every form, alone or in a list, and refuses all else in one line."""

import inspect
import io
import tempfile
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import patchlight as pl
from models_at_random import tiny_vit
from patchlight.config import PreprocessConfig
from patchlight.images.decode import Photo
from patchlight.looking.look import look
from patchlight.weights.save import save

PHOTO = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
FORMS = ("path", "text", "bytes", "pillow", "array", "decoded")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> pl.Loaded:
    preprocess = PreprocessConfig(image_size=32, crop_pct=0.875)
    return pl.load(save(tiny_vit(num_classes=5), tmp_path_factory.mktemp("model"), preprocess=preprocess))


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path, content = tmp_path_factory.mktemp("photos") / "photo.png", io.BytesIO()
    Image.fromarray(PHOTO).save(path)
    Image.fromarray(PHOTO).save(content, "PNG")
    pillow = Image.fromarray(PHOTO)
    given = (path, str(path), content.getvalue(), pillow, PHOTO, pl.decode(pillow))
    return dict(zip(FORMS, given, strict=True))


def of_one(name: str, photo: Any, loaded: pl.Loaded) -> torch.Tensor:
    """What the function makes of a photo, as numbers."""
    match name:
        case "decode":
            return torch.from_numpy(np.array(pl.decode(photo).image))
        case "preprocess":
            return loaded.preprocess(photo)[0]
        case "classify":
            return torch.tensor(pl.classify(photo, loaded).probabilities)
        case "localize":
            return pl.localize(photo, loaded).heat_hw
        case "predict":
            return loaded.predict(photo)
        case "embed":
            return torch.from_numpy(pl.embed(photo, loaded))
        case "transform":
            return loaded.transform(photo)
        case "look":
            return torch.tensor(len(look(photo, loaded).pictures))
        case "export":  # by whose photos the exported model is proven
            with tempfile.TemporaryDirectory() as folder:
                made = pl.export(loaded, Path(folder) / "out", to="safetensors", precision="float16", photos=photo)
            return torch.tensor([each.mean for each in made.proof.outputs.values()])
    raise AssertionError(name)


OF_SEVERAL: dict[str, Callable[[Any, pl.Loaded], list[Any]]] = {
    "classify": lambda photos, loaded: [torch.tensor(one.probabilities) for one in pl.classify(photos, loaded)],
    "predict": lambda photos, loaded: list(loaded.predict(photos)),
    "embed": lambda photos, loaded: [torch.from_numpy(one) for one in pl.embed(photos, loaded)],
    "localize": lambda photos, loaded: [one.heat_hw for one in pl.localize(photos, loaded)],
}
ALL = ("decode", "preprocess", "transform", "predict", "classify", "embed", "localize", "export")


def test_every_public_function_that_takes_photos_is_among_them() -> None:
    public = {name: getattr(pl, name) for name in pl.__all__}
    public |= {name: method for name, method in vars(pl.Loaded).items() if not name.startswith("_")}
    taking = {
        name
        for name, function in public.items()
        if inspect.isfunction(function) and Photo in possible_types(typing.get_type_hints(function).values())
    }
    assert taking | {"preprocess", "transform"} == set(ALL)


def possible_types(hints: Iterable[Any]) -> list[Any]:
    """The hints, and what the unions and collections among them are made of."""
    found: list[Any] = []
    for hint in hints:
        parts = hint if isinstance(hint, list) else typing.get_args(hint)  # a Callable's arguments are a list
        found += [hint, *possible_types(parts)]
        if all(form in parts for form in typing.get_args(Photo)):
            found.append(Photo)
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ALL)
def test_every_form_of_a_photo_gives_the_same(name: str, form: str, forms: dict[str, Any], loaded: pl.Loaded) -> None:
    assert torch.equal(of_one(name, forms[form], loaded), of_one(name, PHOTO, loaded))


@pytest.mark.parametrize("name", OF_SEVERAL)
def test_several_photos_give_a_list(name: str, forms: dict[str, Any], loaded: pl.Loaded) -> None:
    expected = of_one(name, PHOTO, loaded)
    for several in (list(forms.values()), tuple(forms.values()), iter(forms.values())):
        found = OF_SEVERAL[name](several, loaded)
        assert len(found) == len(forms)
        for each in found:
            torch.testing.assert_close(each, expected)


def test_a_page_is_made_of_every_form(
    forms: dict[str, Any], loaded: pl.Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("patchlight.looking.look._draw", lambda loaded, scene, blocks: iter(()))
    facts = [[fact for fact in look(photo, loaded).facts if fact[0] != "time"] for photo in forms.values()]
    assert all(each == facts[0] for each in facts)


NO_PHOTOS: list[tuple[Any, str]] = [
    (np.zeros((4, 4), np.uint8), r"\(height, width, 3\) uint8, not \(4, 4\) uint8"),
    (np.zeros((4, 4, 4), np.uint8), r"not \(4, 4, 4\) uint8"),
    (np.zeros((0, 4, 3), np.uint8), r"not \(0, 4, 3\) uint8"),
    (np.zeros((4, 4, 3), np.float32), "float32; convert it"),
    (np.zeros((3, 4, 5), np.uint8), r"transpose\(1, 2, 0\)"),
    (np.zeros((2, 4, 5, 3), np.uint8), r"list\(array\)"),
    (torch.zeros(3, 4, 4), "a photo is a path.* not Tensor"),
    (None, "a photo is a path.* not NoneType"),
    (3, "a photo is a path.* not int"),
    (io.BytesIO(b"GIF89a"), "a photo is a path.* not BytesIO"),
    ({"photo": PHOTO}, "a photo is a path.* not dict"),
]


@pytest.mark.parametrize("name", [*ALL, "look"])
def test_what_is_no_photo_is_refused(name: str, loaded: pl.Loaded) -> None:
    for photo, message in NO_PHOTOS:
        with pytest.raises(pl.PatchlightError, match=message) as raised:
            of_one(name, photo, loaded)
        assert "\n" not in str(raised.value)
    for photos in ([], [PHOTO, None]):
        with pytest.raises(pl.PatchlightError, match="photo"):
            of_one(name, photos, loaded)


def test_the_remedies_help(loaded: pl.Loaded) -> None:
    assert torch.equal(
        of_one("preprocess", PHOTO.transpose(2, 0, 1).transpose(1, 2, 0), loaded),
        of_one("preprocess", PHOTO, loaded),
    )
    assert len(pl.classify(list(np.stack([PHOTO, PHOTO])), loaded)) == 2


def test_photos_come_first(tmp_path: Path, loaded: pl.Loaded) -> None:
    for function in (pl.classify, pl.localize):
        with pytest.raises(pl.PatchlightError, match="photos come first, and then the model"):
            function(loaded, PHOTO)  # type: ignore[call-overload]
    with pytest.raises(pl.PatchlightError, match="model is a name, a path, or what load gave, not int"):
        pl.classify(PHOTO, 3)  # type: ignore[call-overload]
    save(loaded, tmp_path / "model")
    assert pl.classify(PHOTO, tmp_path / "model") == pl.classify(PHOTO, loaded)
