"""The API's answers are the library's, number by number."""

import io
import json
import threading
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from PIL import Image

import patchlight as pl
from patchlight.explain.probes import patch_similarity, position_similarity
from patchlight.explain.rollout import rollout
from patchlight.explain.shuffling import shuffled_order
from served import Served

DEMO = Path(__file__).parents[3] / "demo"
PHOTOS = sorted(path for path in DEMO.iterdir() if path.suffix in (".jpg", ".png"))


@pytest.fixture(scope="module")
def loaded() -> pl.Loaded:
    return pl.load("default")


@pytest.fixture(scope="module")
def coffee(served: Served) -> str:
    return served.photo((DEMO / "coffee.png").read_bytes(), "coffee.png")


def jpeg(size: tuple[int, int] = (64, 48), **settings: Any) -> bytes:
    noise = np.random.default_rng(size[0]).integers(0, 255, (size[1], size[0], 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "JPEG", **settings)
    return file.getvalue()


def test_models_are_listed_without_their_paths(served: Served, tiny_folder: Path) -> None:
    answer = served.json("/models")
    assert answer["ready"] is True
    assert [model["name"] for model in answer["models"]] == ["default", "tiny", "headless"]
    first = answer["models"][0]
    assert (first["grid"], first["tokens"], first["registers"], first["taught"]) == ([16, 16], 261, 4, True)
    assert answer["models"][2]["classes"] == 0
    assert first["latency_ms"] > 0
    assert str(tiny_folder.parent) not in json.dumps(answer)


def check_equal(answer: Any, found: pl.Localization) -> None:
    assert answer["decision"] == found.decision
    assert answer["confidence"] == found.confidence
    assert answer["method"] == found.method
    boxes = [[each.box.left, each.box.top, each.box.right, each.box.bottom] for each in found.subjects]
    assert [subject["box"] for subject in answer["subjects"]] == boxes
    assert [subject["score"] for subject in answer["subjects"]] == [each.score for each in found.subjects]
    assert [subject["confidence"] for subject in answer["subjects"]] == [each.confidence for each in found.subjects]
    # The server passes the last block whole, to show it, and sums up what the head reads in another order.
    assert answer["named"] == (None if found.named is None else pytest.approx(asdict(found.named), abs=1e-5))
    assert answer["heat"]["values"] == found.heat_hw.flatten().tolist()
    assert answer["mask"] == found.mask_hw.int().flatten().tolist()


@pytest.mark.parametrize("path", PHOTOS, ids=lambda path: path.stem)
def test_localize_is_the_librarys_exactly(served: Served, loaded: pl.Loaded, path: Path) -> None:
    photo = served.photo(path.read_bytes())
    check_equal(served.json(f"/photos/{photo}/localize"), pl.localize(path, loaded))
    for method in ("cls", "rollout", "tokencut"):
        check_equal(served.json(f"/photos/{photo}/localize", method=method), pl.localize(path, loaded, method))
    check_equal(served.json(f"/photos/{photo}/localize", subjects=0), pl.localize(path, loaded, subjects="all"))


def test_answers_do_not_hang_on_the_photos_beside(served: Served, loaded: pl.Loaded) -> None:
    contents = [path.read_bytes() for path in PHOTOS] + [jpeg((97 + i, 61)) for i in range(7)]
    photos = [served.photo(content) for content in contents]
    answers: list[Any] = [None] * len(photos)

    def ask(number: int) -> None:
        answers[number] = served.json(f"/photos/{photos[number]}/localize")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(photos))]
    with served.batches() as sizes:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert max(sizes) > 1, "nothing was batched, so that nothing was shown"
    for content, answer in zip(contents, answers, strict=True):
        check_equal(answer, pl.localize(content, loaded))


@pytest.mark.parametrize("model", [0, 1])
@pytest.mark.parametrize("query", ["cls", "registers", "3,2"])
def test_attention_is_the_librarys(served: Served, coffee: str, tiny_folder: Path, model: int, query: str) -> None:
    own = pl.load("default" if model == 0 else tiny_folder)
    image_CHW, _ = own.preprocess(pl.decode(DEMO / "coffee.png"))
    asked: Any = (3, 2) if query == "3,2" else query
    for layer in (0, -1):
        maps = pl.attention(own, image_CHW[None], layer, asked)
        answer = served.json(f"/photos/{coffee}/attention", model=model, layer=layer, query=query)
        assert answer["queries"] == list(maps.queries)
        np.testing.assert_allclose(answer["weights"], maps.weights[0, 0].numpy(), atol=2e-6)
        mean = served.json(f"/photos/{coffee}/attention", model=model, layer=layer, query=query, heads="mean")
        np.testing.assert_allclose(mean["weights"][0], maps.weights[0, 0].mean(0).numpy(), atol=2e-6)


@pytest.mark.parametrize("model", [0, 1, 2])
def test_queries_and_keys_give_the_same_rows(
    served: Served, coffee: str, tiny_folder: Path, headless_folder: Path, model: int
) -> None:
    """The formula that the page computes, in numpy."""
    own = pl.load(["default", tiny_folder, headless_folder][model])
    image_CHW, _ = own.preprocess(pl.decode(DEMO / "coffee.png"))
    maps = pl.attention(own, image_CHW[None], 1, "all")
    parts = safetensors.numpy.load(served.get(f"/photos/{coffee}/heads", model=model, layer=1).body)
    assert ("bias" in parts) == (model == 1)
    scores = parts["q"] @ parts["k"].transpose(0, 2, 1) / np.sqrt(parts["q"].shape[2]) + parts.get("bias", 0)
    powers = np.exp(scores - scores.max(2, keepdims=True))
    np.testing.assert_allclose(powers / powers.sum(2, keepdims=True), maps.weights[0, 0].numpy(), atol=2e-6)
    features = safetensors.numpy.load(served.get(f"/photos/{coffee}/features", model=model).body)["patches"]
    cosines = patch_similarity(maps.tokens, maps.grid, (1, 2))[0].flatten()
    np.testing.assert_allclose(features @ features[maps.grid[1] + 2], cosines, atol=2e-5)
    answer = served.json(f"/photos/{coffee}/rollout", model=model)
    np.testing.assert_allclose(answer["values"], rollout(own, image_CHW[None])[0].flatten(), rtol=1e-5)


def test_positions(served: Served, loaded: pl.Loaded) -> None:
    found = safetensors.numpy.load(served.get("/models/0/positions").body)["similarity"]
    np.testing.assert_allclose(found, position_similarity(loaded).numpy(), atol=1e-6)


def test_classes(served: Served, coffee: str, loaded: pl.Loaded, tiny_folder: Path) -> None:
    said = pl.classify(DEMO / "coffee.png", loaded, 3)
    answer = served.json(f"/photos/{coffee}/classify", top=3)
    assert [share["label"] for share in answer["classes"]] == list(said.labels)
    assert [share["probability"] for share in answer["classes"]] == pytest.approx(said.probabilities, abs=1e-6)
    assert said.named is not None
    assert (answer["group"], answer["label"]) == (said.named.group, said.named.label)
    assert answer["group_confidence"] == pytest.approx(said.named.group_confidence, abs=1e-4)
    assert len(served.json(f"/photos/{coffee}/classify", model=1, top=50)["classes"]) == 5
    assert served.json(f"/photos/{coffee}/classify", model=1)["group"] is None
    refused = served.get(f"/photos/{coffee}/classify", model=2)
    assert (refused.status, refused.reason) == (422, "value")
    assert "no head" in refused.json()["error"]["message"]


def test_costs(served: Served, loaded: pl.Loaded) -> None:
    answer = served.json("/costs", patch_size=14, image_size=100)
    config = pl.ViTConfig.from_dict(loaded.config.to_dict() | {"patch_size": 14, "image_size": 98})
    counted = pl.costs(config)
    assert (answer["image_size"], answer["grid"], answer["tokens"]) == (98, [7, 7], 54)
    assert (answer["macs"], answer["attention_entries"]) == (counted.macs, counted.attention_entries)
    assert answer["latency_ms"] is None
    timed = served.json("/costs", model=1, patch_size=8, image_size=32, timed="true")
    assert 0 < timed["latency_ms"] < 5000


def test_shuffling(served: Served, coffee: str) -> None:
    answer = served.json(f"/photos/{coffee}/shuffle", seed=3)
    assert sorted(answer["order"]) == list(range(256))
    assert answer["order"] != list(range(256))
    assert answer["likeness_without_positions"] == pytest.approx(1, abs=1e-4)
    assert answer["likeness_with_positions"] < 0.99
    assert served.json(f"/photos/{coffee}/shuffle", seed=3) == answer
    said = served.json(f"/photos/{coffee}/classify", top=3)["classes"]
    assert [share["label"] for share in answer["with_positions"]] == [share["label"] for share in said]
    assert served.json(f"/photos/{coffee}/shuffle", model=2)["with_positions"] == []


def test_tokens_of_any_size_and_order(served: Served, coffee: str, loaded: pl.Loaded) -> None:
    image_BCHW = loaded.preprocess(pl.decode(DEMO / "coffee.png"))[0][None]
    content = served.get(f"/photos/{coffee}/tokens", layer=3, shuffle=5).body
    found, said = safetensors.numpy.load(content), _about(content)
    shuffled_BCHW = pl.shuffle_patches(image_BCHW, 8, seed=5)
    with torch.inference_mode():
        tokens_BND, logits_BK = loaded.model.embed(shuffled_BCHW)[0], loaded.model(shuffled_BCHW)
    np.testing.assert_allclose(found["prefix"], tokens_BND[0, :5], atol=1e-6)
    np.testing.assert_allclose(found["patches"] + found["positions"], tokens_BND[0, 5:], atol=1e-5)
    np.testing.assert_allclose(found["output"], logits_BK[0], atol=1e-3)
    scores = torch.from_numpy(found["q"]) @ torch.from_numpy(found["k"]).mT / 8
    wanted = pl.attention(loaded, shuffled_BCHW, 3, "cls").weights[0, 0, :, 0]
    np.testing.assert_allclose(scores.softmax(-1)[:, 0], wanted, atol=1e-6)
    assert found["tints"].shape == (256, 3)
    assert (found["tints"].min(), found["tints"].max()) == (0, 1)
    assert (said["layer"], said["grid"], said["order"]) == (3, [16, 16], shuffled_order(256, 5).tolist())

    other = pl.load("default", patch_size=16, image_size=224)
    content = served.get(f"/photos/{coffee}/tokens", patch_size=16, image_size=220).body
    assert _about(content)["image_size"] == [224, 224]
    predicted = other.predict(DEMO / "coffee.png")
    # The file has half precision, which `load` resizes in; the server resizes what it has in memory.
    np.testing.assert_allclose(safetensors.numpy.load(content)["output"], predicted, atol=0.01)

    blind = [served.get(f"/photos/{coffee}/tokens", positions="false", **kw).body for kw in ({}, {"shuffle": 1})]
    ordered, apart = (safetensors.numpy.load(each) for each in blind)
    assert "positions" not in ordered
    np.testing.assert_allclose(ordered["output"], apart["output"], atol=1e-3)
    assert not np.allclose(ordered["output"], loaded.predict(DEMO / "coffee.png"), atol=0.1)


@pytest.mark.parametrize("model", [1, 2])
def test_tokens_of_other_positions(served: Served, coffee: str, model: int) -> None:
    found = safetensors.numpy.load(served.get(f"/photos/{coffee}/tokens", model=model).body)
    assert ("bias" in found, "positions" in found) == (model == 1, False)
    larger = served.get(f"/photos/{coffee}/tokens", model=model, patch_size=4, image_size=48)
    assert len(safetensors.numpy.load(larger.body)["patches"]) == 144


def test_tokens_that_would_take_too_long_are_refused(served: Served, coffee: str) -> None:
    refused = served.get(f"/photos/{coffee}/tokens", patch_size=4, image_size=1024)
    assert (refused.status, refused.reason) == (422, "value")
    assert "65,536 patches" in refused.json()["error"]["message"]


def test_shuffling_patches_of_another_size(served: Served, coffee: str) -> None:
    answer = served.json(f"/photos/{coffee}/shuffle", patch_size=32, image_size=224)
    assert (answer["grid"], sorted(answer["order"])) == ([7, 7], list(range(49)))
    assert answer["likeness_without_positions"] == pytest.approx(1, abs=1e-4)


def _about(content: bytes) -> Any:
    length = int.from_bytes(content[:8], "little")
    return json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["about"])


def test_crops_are_cut_from_the_original(served: Served) -> None:
    exif = Image.Exif()
    exif[0x112], exif[0x10F] = 6, "Camera"
    photo = served.photo(jpeg((800, 600), exif=exif), "turned.jpg")
    info = served.json(f"/photos/{photo}")
    assert (info["width"], info["height"], info["format"], info["name"]) == (600, 800, "JPEG", "turned.jpg")
    box = {"left": 100, "top": 200, "right": 300, "bottom": 500}
    where = served.json(f"/photos/{photo}/region", **box, margin=0.1)
    assert where == {"region": [80, 170, 320, 530], "width": 240, "height": 360}
    answer = served.get(f"/photos/{photo}/crop", **box, margin=0.1)
    assert answer.headers["content-type"] == "image/jpeg"
    assert 'filename="turned-crop.jpg"' in answer.headers["content-disposition"]
    with Image.open(io.BytesIO(answer.body)) as crop:
        assert crop.size == (240, 360)
        assert crop.getexif()[0x10F] == "Camera"
        assert crop.getexif()[0x112] == 1
    square = served.get(f"/photos/{photo}/crop", **box, margin=0, aspect="1:1")
    with Image.open(io.BytesIO(square.body)) as crop:
        assert crop.size == (300, 300)
    preview = served.get(f"/photos/{photo}/preview", side=200)
    with Image.open(io.BytesIO(preview.body)) as small:
        assert small.size == (150, 200)


def test_an_archive_of_crops(served: Served) -> None:
    photos = [served.photo(jpeg((100 + i, 80)), "../evil/cat.jpg") for i in range(2)]
    png = io.BytesIO()
    Image.new("RGBA", (50, 40), (255, 0, 0, 128)).save(png, "PNG")
    photos.append(served.photo(png.getvalue(), "caf\u00e9.png"))
    orders = {"crops": [{"photo": photo, "box": [10, 10, 30, 25], "margin": 0} for photo in photos]}
    answer = served.ask("POST", "/api/v1/crops", json.dumps(orders).encode(), Content_Type="application/json")
    assert answer.status == 200
    with zipfile.ZipFile(io.BytesIO(answer.body)) as archive:
        assert archive.namelist() == ["cat.jpg", "cat-2.jpg", "caf\u00e9.png"]
        for name in archive.namelist():
            with Image.open(archive.open(name)) as crop:
                assert crop.size == (20, 15)


def test_a_photo_can_be_forgotten(served: Served) -> None:
    photo = served.photo(jpeg())
    served.json(f"/photos/{photo}/localize")
    assert served.engine.known(photo, 0) is not None
    assert served.ask("DELETE", f"/api/v1/photos/{photo}").status == 204
    assert served.engine.known(photo, 0) is None
    gone = served.get(f"/photos/{photo}/localize")
    assert (gone.status, gone.reason) == (404, "unknown-photo")


def test_one_forward_pass_serves_them_all(served: Served) -> None:
    photo = served.photo(jpeg((120, 90)))
    with served.batches() as sizes:
        served.json(f"/photos/{photo}/localize")
        served.json(f"/photos/{photo}/attention", query="1,1")
        for layer in range(served.engine.models[0].loaded.config.depth):
            assert served.get(f"/photos/{photo}/heads", layer=layer).status == 200
        served.get(f"/photos/{photo}/features")
        served.json(f"/photos/{photo}/classify")
    assert sizes == [1]


def test_what_was_seen_is_kept_within_bounds(served: Served) -> None:
    engine = served.engine
    photo = served.photo(jpeg((130, 90)))
    served.json(f"/photos/{photo}/localize")
    seen = engine.known(photo, 0)
    assert seen is not None
    config = engine.models[0].loaded.config
    keys = config.depth * 2 * 261 * config.width  # and queries
    # The last tokens, the logits, one map, and the box of each of its patches with how well that fits.
    assert seen.nbytes == 4 * (keys + 261 * config.width + seen.output_K.numel() + 256 + 256 * 5)
    assert torch.equal(seen.layers[0].q_BANE, seen.layers[0].q_BANE.contiguous())
    assert seen.layers[0].q_BANE.untyped_storage().nbytes() == seen.layers[0].q_BANE.nbytes


def test_accelerators_get_batches_of_one_size(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filled up, so that a photo's answer does not hang on how many came with it; here on the CPU."""
    monkeypatch.setattr(type(served.engine.models[0]), "on_cpu", False)
    engine, model = served.engine, served.engine.models[0]
    items = [model.loaded.preprocess(pl.decode(path)) for path in PHOTOS]
    together = engine._look(model, "subject", items, whole=True)
    assert len(together) == len(items)
    for item, seen in zip(items, together, strict=True):
        (alone,) = engine._look(model, "subject", [item], whole=True)
        assert torch.equal(alone.heat["subject"], seen.heat["subject"])
        assert seen.layers[3].k_BANE.shape == (1, model.loaded.config.num_heads, 261, 64)
