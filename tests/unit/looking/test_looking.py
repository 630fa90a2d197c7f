"""`look`: the figures show what the model did, computed here in another way."""

import dataclasses
import io
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from PIL import Image

from models_at_random import tiny_vit
from patchlight.config import PreprocessConfig
from patchlight.errors import PatchlightError
from patchlight.explain import plot, probes
from patchlight.explain.attention import attention, heat_on_photo
from patchlight.explain.rollout import attribution, rollout
from patchlight.images.decode import ImageError
from patchlight.looking import look as looking
from patchlight.looking.look import look
from patchlight.looking.page import TEXTS
from patchlight.reporting import Progress, Reporter
from patchlight.weights.load import Loaded, load
from patchlight.weights.save import save

RANDOM = np.random.default_rng(0)
PHOTO = Image.fromarray(RANDOM.integers(0, 256, (40, 60, 3), dtype=np.uint8))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The figures by name, kept instead of rendered, which takes most of the time."""
    file = io.BytesIO()
    Image.new("RGB", (3, 2)).save(file, "PNG")
    figures: list[Any] = []
    by_name: dict[str, Any] = {}

    def keep(figure: Any) -> bytes:
        figures.append(figure)
        return file.getvalue()

    def looked(*arguments: Any, **settings: Any) -> looking.Look:
        figures.clear()
        result = look(*arguments, **settings)
        by_name.update(zip([picture.name for picture in result.pictures], figures, strict=True))
        return result

    monkeypatch.setattr(plot, "to_png", keep)
    by_name["look"] = looked
    return by_name


def loaded(folder: Path, labels: list[str] | None = None, **settings: Any) -> Loaded:
    preprocess = settings.pop("preprocess", PreprocessConfig(image_size=settings.get("image_size", 32), crop_pct=0.875))
    return load(save(tiny_vit(**settings), folder, labels=labels, preprocess=preprocess, overwrite=True))


def maps(figure: Any) -> list[np.ndarray]:
    """The maps of a figure, in order, without the colour bar."""
    axes = [ax for ax in figure.axes if len(ax.images) > 1]
    return [np.ma.getdata(ax.images[1].get_array()) for ax in axes]


def titles(figure: Any) -> list[str]:
    return [ax.get_title() for ax in figure.axes if ax.get_title()]


def test_the_figures_show_the_models_attention_on_the_photo(tmp_path: Path, drawn: dict[str, Any]) -> None:
    model = loaded(tmp_path, num_registers=2)
    result = drawn["look"](PHOTO, model, layers=[2, 0], patch=(1, 3))
    assert [picture.name for picture in result.pictures] == list(TEXTS)
    image_CHW, view = model.preprocess(PHOTO)

    maps_of = attention(model, image_CHW[None], layers="all")
    heads_Ahw = heat_on_photo(maps_of.heat()[-1, 0, :, 0], view, maps_of.patch_size).numpy()
    first, *named = titles(drawn["heads"])
    assert first == "photo"
    order = [int(title.split()[1]) for title in named]
    assert sorted(order) == [0, 1]
    np.testing.assert_allclose(maps(drawn["heads"]), heads_Ahw[order], atol=1e-6)
    assert np.isnan(heads_Ahw[0][:, 0]).all(), "the photo is cropped left and right"

    for shown, layer in zip(maps(drawn["layers"]), (2, 0), strict=True):
        expected = heat_on_photo(maps_of.heat()[layer, 0, :, 0].mean(0), view, maps_of.patch_size)
        np.testing.assert_allclose(shown, expected, atol=1e-6)
    assert titles(drawn["layers"]) == ["photo", "block 2", "block 0"]

    patch = attention(model, image_CHW[None], queries=(1, 3), heads="mean").heat()[0, 0, 0, 0]
    (shown,) = maps(drawn["patch-attention"])
    np.testing.assert_allclose(shown, heat_on_photo(patch, view, maps_of.patch_size), atol=1e-6)

    tokens_ND = model.model.tokens(image_CHW[None])[0].detach().numpy()
    chosen = tokens_ND[3 + 1 * 4 + 3]
    cosines = [token @ chosen / np.linalg.norm(token) / np.linalg.norm(chosen) for token in tokens_ND[3:]]
    expected = heat_on_photo(torch.tensor(cosines).reshape(4, 4), view, maps_of.patch_size)
    np.testing.assert_allclose(maps(drawn["patch-similarity"])[0], expected, atol=1e-5)


def test_patches_are_drawn_where_the_view_says(tmp_path: Path, drawn: dict[str, Any]) -> None:
    preprocess = PreprocessConfig(image_size=32, resize="shortest", resize_size=(40, 40))
    drawn["look"](PHOTO, loaded(tmp_path, preprocess=preprocess), patch=(1, 3))
    # 40 x 60 stays as it is; 32 x 32 are cut from its middle, so patches of 8 begin at (4, 14).
    (ax,) = drawn["patches"].axes
    down, across = (collection.get_segments() for collection in ax.collections)
    np.testing.assert_allclose([segment[0, 0] + 0.5 for segment in down], [14, 22, 30, 38, 46])
    np.testing.assert_allclose([segment[0, 1] + 0.5 for segment in across], [4, 12, 20, 28, 36])
    frame = ax.patches[0]
    place = (frame.get_x() + 0.5, frame.get_y() + 0.5, frame.get_width(), frame.get_height())
    assert place == pytest.approx((14 + 3 * 8, 4 + 8, 8, 8))
    assert "#e0245e" in [to_hex(frame.get_edgecolor()) for frame in ax.patches], "not white among white lines"


def test_what_the_model_never_saw_is_said_where_there_is_any(tmp_path: Path, drawn: dict[str, Any]) -> None:
    for photo, pale in ((PHOTO, True), (PHOTO.resize((40, 40)), False)):
        preprocess = PreprocessConfig(image_size=32, resize="shortest")
        result = drawn["look"](photo, loaded(tmp_path, preprocess=preprocess))
        assert ("never saw what is pale" in result.pictures[0].caption) == pale
        assert not any("squashed" in note for note in result.notes)


def test_a_squashed_photo_is_said_to_be(tmp_path: Path, drawn: dict[str, Any]) -> None:
    model = loaded(tmp_path, preprocess=PreprocessConfig(image_size=32, resize="squash"))
    result = drawn["look"](PHOTO, model)
    assert any("squashed into the model's image of 32 x 32 pixels" in note for note in result.notes)
    assert "pale" not in result.pictures[0].caption
    assert not any("squashed" in note for note in drawn["look"](PHOTO.resize((40, 40)), model).notes)


def test_even_attention_is_marked_where_shares_are_shown(tmp_path: Path, drawn: dict[str, Any]) -> None:
    model = loaded(tmp_path, num_registers=2)  # 1 class token, 2 registers and 16 patches
    with torch.no_grad():
        for block in model.model.blocks:
            block.attn.qkv.weight.zero_()
            block.attn.qkv.bias.zero_()
    drawn["look"](PHOTO, model)
    for name in ("heads", "layers", "rollout", "patch-attention", "attribution", "patch-similarity"):
        (bar,) = (ax for ax in drawn[name].axes if ax.get_label() == "<colorbar>")
        marked = [tick for other in bar.child_axes for tick in other.get_xticks()]
        assert marked == ([] if name in ("attribution", "patch-similarity") else [1 / 19])
    for name in ("heads", "layers", "rollout", "patch-attention"):
        limits = {ax.images[1].get_clim() for ax in drawn[name].axes if len(ax.images) > 1}
        assert limits == {(0, 2 / 19)}, "half-lit"

    # Heads that attend to all alike lie on the line.
    distance = drawn["attention-distance"].axes[0]
    (line,) = (line for line in distance.lines if line.get_label() == "even attention")
    places = [(8 * row, 8 * column) for row in range(4) for column in range(4)]
    expected = np.mean([math.dist(one, other) for one in places for other in places])
    np.testing.assert_allclose(line.get_ydata(), expected)
    np.testing.assert_allclose(distance.collections[0].get_offsets()[:, 1], expected, rtol=1e-5)


def test_the_mean_distance_of_an_oblong_grid() -> None:
    places = [(7.5 * row, 4.0 * column) for row in range(3) for column in range(5)]
    expected = np.mean([math.dist(one, other) for one in places for other in places])
    assert looking._even_distance((3, 5), (7.5, 4.0)) == pytest.approx(expected)


def test_without_a_class_token_each_patch_gets_its_mean_share(tmp_path: Path, drawn: dict[str, Any]) -> None:
    model = loaded(tmp_path, class_token=False, pooling="mean", num_registers=2, num_classes=0, image_size=(32, 48))
    result = drawn["look"](PHOTO, model, layers=-1)
    image_CHW, view = model.preprocess(PHOTO)
    everything = attention(model, image_CHW[None], queries="all")
    rows_AQN = everything.weights[0, 0].numpy()
    mean_hw = np.zeros(4 * 6)
    for head in rows_AQN:
        for query in head[2:]:
            mean_hw += query[2:] / 24 / 2
    expected = heat_on_photo(torch.tensor(mean_hw).reshape(4, 6), view, everything.patch_size)
    np.testing.assert_allclose(maps(drawn["layers"])[0], expected, atol=1e-6)
    assert "attribution" not in [picture.name for picture in result.pictures]
    row, column = divmod(int(mean_hw.argmax()), 6)
    notes = " ".join(result.notes)
    assert "no class token" in notes
    assert f"row {row}, column {column} (counted from 0), gets the most attention" in notes
    assert "This model has no head" in notes
    heights = {bar.get_height() for bar in drawn["attention-shares"].axes[0].patches}
    registers = sum(head[2:, :2].sum(1).mean() for head in rows_AQN) / 2
    assert min(abs(height - registers) for height in heights) < 1e-6


def test_a_head_that_embeds_names_no_classes(tmp_path: Path, drawn: dict[str, Any]) -> None:
    model = loaded(tmp_path)
    provenance = dataclasses.replace(model.provenance, origin="OpenCLIP")
    result = drawn["look"](PHOTO, dataclasses.replace(model, provenance=provenance), patch=(0, 0))
    assert result.notes == (
        "This model's head gives an embedding and no classes, so there is no map of what spoke for one.",
    )
    assert "answers" not in dict(result.facts)


def test_a_patch_that_was_asked_for_is_not_excused(tmp_path: Path, drawn: dict[str, Any]) -> None:
    result = drawn["look"](PHOTO, loaded(tmp_path), patch=(0, 0))
    assert result.notes == ()
    captions = {picture.name: picture.caption for picture in result.pictures}
    assert "row 0, column 0" in captions["patch-attention"]


def test_the_likeliest_classes_are_named(tmp_path: Path, drawn: dict[str, Any]) -> None:
    model = loaded(tmp_path, labels=["ant", "bee", "cat", "{dog}", "emu", "fox", "gnu"], num_classes=7)
    result = drawn["look"](PHOTO, model)
    image_CHW, _ = model.preprocess(PHOTO)
    probabilities = model.model(image_CHW[None])[0].detach().softmax(0).tolist()
    order = sorted(range(7), key=lambda number: -probabilities[number])
    lines = [f"{model.labels[number]} at {probabilities[number]:.1%}" for number in order[:5]]
    assert dict(result.facts)["answers"].split("\n") == lines
    best, words = order[0], lines[0]
    assert words in {picture.name: picture.caption for picture in result.pictures}["attribution"]
    assert titles(drawn["attribution"]) == ["photo", f"for {words}"]
    drawn["look"](PHOTO, loaded(tmp_path, labels=list("鳥犬猫馬魚虎象"), num_classes=7))
    assert titles(drawn["attribution"]) == ["photo", f"for class {best}"], "no letters that the font lacks"


@pytest.mark.parametrize("position", ["learned", "rope2d", "relative_bias", "none"])
def test_positions_are_shown_where_there_are_any(tmp_path: Path, drawn: dict[str, Any], position: str) -> None:
    result = drawn["look"](PHOTO, loaded(tmp_path, position=position))
    names = [picture.name for picture in result.pictures]
    assert ("position-similarity" in names) == (position != "none")
    assert any("no positions to compare" in note for note in result.notes) == (position == "none")
    if position != "none":
        label = drawn["position-similarity"].axes[-1].get_ylabel()
        assert label == ("bias" if position == "relative_bias" else "cosine similarity")


def test_outliers_are_framed_and_counted(
    tmp_path: Path, drawn: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def corners(norms_LBN: torch.Tensor, num_prefix: int) -> torch.Tensor:
        return torch.arange(norms_LBN.shape[2] - num_prefix)[None] % 15 == 0

    monkeypatch.setattr(looking, "artifact_patches", corners)
    result = drawn["look"](PHOTO, loaded(tmp_path))
    captions = {picture.name: picture.caption for picture in result.pictures}
    norms = drawn["token-norms"].axes[1]
    assert len(norms.patches) == 2 * 2, "two lines a frame"
    image_CHW, _ = loaded(tmp_path).preprocess(PHOTO)
    (tokens_BND,) = loaded(tmp_path).model.intermediates(image_CHW[None], -1)
    expected = np.linalg.norm(tokens_BND[0, 1:].detach().numpy(), axis=1).reshape(4, 4)
    np.testing.assert_allclose(np.ma.getdata(norms.collections[0].get_array()), expected, rtol=1e-5)
    middle = sorted(expected.ravel())[7]  # as torch takes the median of 16: the lower one in the middle
    assert "2 stand out (framed): after the last block or the one before" in captions["token-norms"]
    assert f"longer than 2 times the median (here {middle:.3g}) and 8 robust deviations" in captions["token-norms"]
    (bar,) = (ax for ax in drawn["token-norms"].axes if ax.get_label() == "<colorbar>")
    (other,) = bar.child_axes
    assert [text.get_text() for text in other.get_xticklabels()] == [f"smallest {expected.min():.3g}"]
    np.testing.assert_allclose(other.get_xticks(), expected.min(), rtol=1e-5)


def test_a_large_photo_is_drawn_small_and_a_small_one_as_it_is(tmp_path: Path, drawn: dict[str, Any]) -> None:
    model = loaded(tmp_path)
    drawn["look"](Image.new("RGB", (3000, 1500)), model)
    assert drawn["patches"].axes[0].images[0].get_array().shape == (500, 1000, 3)
    assert maps(drawn["heads"])[0].shape == (250, 500)
    drawn["look"](PHOTO, model)
    assert drawn["patches"].axes[0].images[0].get_array().shape == (40, 60, 3)


def test_every_figure_has_a_caption_without_gaps(tmp_path: Path, drawn: dict[str, Any]) -> None:
    result = drawn["look"](PHOTO, loaded(tmp_path))
    for picture in result.pictures:
        assert picture.title
        assert not set("{}") & set(picture.caption)
    assert dict(result.facts)["tokens"] == "17 (1 class, 16 patches)"
    assert set(dict(result.facts)) >= {"model", "size", "photo", "model's image", "time"}


def test_what_came_with_the_model_is_said(tmp_path: Path, drawn: dict[str, Any]) -> None:
    save(tiny_vit(), tmp_path)
    result = drawn["look"](PHOTO, load(tmp_path, num_classes=3), patch=(0, 0))
    assert result.notes == ("a fresh head of 3 classes in place of its 5 classes",)


def test_the_page_is_written_where_asked(tmp_path: Path, drawn: dict[str, Any]) -> None:
    name = "<img src=x onerror=alert(1)>.png"
    PHOTO.save(tmp_path / name)
    heard: list[Progress] = []
    result = drawn["look"](
        tmp_path / name, loaded(tmp_path / "model"), out=tmp_path / "out", reporter=Reporter(progress=heard.append)
    )
    assert result.page == tmp_path / "out" / "index.html"
    page = result.page.read_text()
    assert "&lt;img src=x onerror=alert(1)&gt;.png" in page
    assert "<img src=x" not in page
    assert heard[-1].line() == "drew attention-shares"


def test_mistakes_are_named_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, out = loaded(tmp_path / "model"), tmp_path / "out"
    with pytest.raises(PatchlightError, match=r"patch \(4, 0\) lies outside the grid of 4 rows and 4 columns"):
        look(PHOTO, model, patch=(4, 0), out=out)
    with pytest.raises(PatchlightError, match="does not fit a model of 3 blocks"):
        look(PHOTO, model, layers=3, out=out)
    with pytest.raises(ImageError, match="missing"):
        look(tmp_path / "absent.jpg", model, out=out)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PatchlightError, match="pictures need matplotlib"):
        look(PHOTO, model, out=out)
    assert not out.exists()


def test_every_other_figure_draws_its_function(tmp_path: Path, drawn: dict[str, Any]) -> None:
    model = loaded(tmp_path, num_registers=2)
    drawn["look"](PHOTO, model)
    image_CHW, view = model.preprocess(PHOTO)
    image_BCHW, patch_size = image_CHW[None], (8.0, 8.0)
    likeliest = int(model.model(image_BCHW).argmax())
    for name, heat_hw in {
        "rollout": rollout(model, image_BCHW)[0],
        "attribution": attribution(model, image_BCHW, likeliest)[0],
    }.items():
        (shown,) = maps(drawn[name])
        np.testing.assert_allclose(shown, heat_on_photo(heat_hw, view, patch_size), atol=1e-6)
    dots = drawn["attention-distance"].axes[0].collections[0].get_offsets()
    np.testing.assert_allclose(dots[:, 1], probes.attention_distance(model, image_BCHW).flatten(), rtol=1e-5)
    montage = np.ma.getdata(drawn["position-similarity"].axes[0].images[0].get_array())
    similarity_hwhw = probes.position_similarity(model)
    np.testing.assert_allclose(montage[:4, :4], similarity_hwhw[0, 0], atol=1e-6)
    np.testing.assert_allclose(montage[-4:, -4:], similarity_hwhw[3, 3], atol=1e-6)
    heights = [bar.get_height() for bar in drawn["attention-shares"].axes[0].patches]
    shares = probes.attention_shares(model, image_BCHW)
    np.testing.assert_allclose(heights, torch.cat([share for share in shares.values() if share.any()]), atol=1e-6)


def test_the_grid_lies_on_a_large_photo_as_on_a_small_one(tmp_path: Path, drawn: dict[str, Any]) -> None:
    model, lines = loaded(tmp_path), []
    for scale in (10, 100):  # the larger one is drawn at a thousand pixels
        drawn["look"](PHOTO.resize((60 * scale, 40 * scale)), model)
        across, _ = drawn["patches"].axes[0].collections[:2]
        width = drawn["patches"].axes[0].images[0].get_array().shape[1]
        lines.append([(segment[0, 0] + 0.5) / width for segment in across.get_segments()])
    assert len(lines[0]) == 5
    np.testing.assert_allclose(lines[0], lines[1], atol=0.002)
    assert lines[0][0] == pytest.approx(11 / 54)  # 36 x 54 pixels, cropped about the centre to 32 x 32
