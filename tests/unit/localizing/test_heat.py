"""Heat maps against computations that are written out: by hand, by a dense solver, by loops, by `explain`."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from models_at_random import tiny_vit
from patchlight.config import SubjectHeat
from patchlight.errors import PatchlightError
from patchlight.explain.attention import attention
from patchlight.explain.rollout import rollout
from patchlight.localizing import heat as module
from patchlight.localizing.heat import HeatPass, Method, heat_maps, last_heads, lost, second_eigenvector, tokencut
from patchlight.models.vit import Heads, ViT


def loaded(model: ViT, subject: SubjectHeat | None = None) -> Any:
    return SimpleNamespace(model=model, subject=subject, engine=None)


def two_groups(grid: tuple[int, int], box: tuple[int, int, int, int], noise: float, seed: int = 0) -> Tensor:
    """Keys (1, P, 16): one direction inside the box (rows and columns), the opposite one outside, and noise."""
    generator = torch.Generator().manual_seed(seed)
    keys_hwD = noise * torch.randn(*grid, 16, generator=generator)
    keys_hwD[..., 0] -= 1
    top, left, bottom, right = box
    keys_hwD[top:bottom, left:right, 0] += 2
    return keys_hwD.flatten(0, 1)[None]


def inside(grid: tuple[int, int], box: tuple[int, int, int, int]) -> Tensor:
    mask_hw = torch.zeros(grid, dtype=torch.bool)
    mask_hw[box[0] : box[2], box[1] : box[3]] = True
    return mask_hw


@pytest.mark.parametrize("position", ["learned", "rope2d"])
def test_subject_heat_is_the_class_tokens_score(position: str) -> None:
    model, image = tiny_vit(num_registers=2, position=position), torch.randn(2, 3, 24, 40)
    heat = heat_maps(loaded(model, SubjectHeat(scale=0.7, bias=-0.4)), image, "subject")
    weights = attention(model, image, layers=-1, queries="cls").weights[0, :, :, 0]
    before_softmax = weights.log()  # the score, but for the same number at every token
    assert heat.shape == (2, 3, 5)
    score = torch.logit(heat.double()).add(0.4).div(0.7).flatten(1)
    differences = before_softmax[..., 3:].mean(1)
    torch.testing.assert_close(score - score[:, :1], (differences - differences[:, :1]).double(), atol=1e-3, rtol=1e-3)


def test_subject_heat_by_hand() -> None:
    model, image = tiny_vit(num_registers=1), torch.randn(1, 3, 16, 24)
    model.requires_grad_(False)
    (before,) = model.intermediates(image, [1])
    block: Any = model.blocks[2]
    qkv = (block.norm1(before) @ block.attn.qkv.weight.T + block.attn.qkv.bias)[0]
    expected = []
    for token in range(2, 8):
        scores = []
        for head in range(2):
            q = qkv[0, 12 * head : 12 * head + 12]
            k = qkv[token, 24 + 12 * head : 24 + 12 * head + 12]
            scores.append(float(q @ k) / math.sqrt(12))
        expected.append(1 / (1 + math.exp(-(0.7 * sum(scores) / 2 - 0.4))))
    heat = heat_maps(loaded(model, SubjectHeat(scale=0.7, bias=-0.4)), image, "auto")
    torch.testing.assert_close(heat, torch.tensor(expected).reshape(1, 2, 3), atol=1e-5, rtol=1e-4)


def test_class_attention_is_the_models_own() -> None:
    model, image = tiny_vit(num_registers=1), torch.randn(2, 3, 24, 40)
    expected = attention(model, image, layers=-1, queries="cls", heads="mean").heat()[0, :, 0, 0]
    heat = heat_maps(loaded(model), image, "cls")
    torch.testing.assert_close(heat, expected / expected.amax((1, 2), keepdim=True))


@pytest.mark.parametrize(
    "settings",
    [
        {"num_registers": 2},
        {"pooling": "mean", "class_token": False},
        {"pooling": "cls_mean"},
        {"distill_token": True},
        {"distill_token": True, "num_classes": 0},
    ],
)
def test_rollout_is_that_of_explain(settings: dict[str, Any]) -> None:
    model, image = tiny_vit(**settings), torch.randn(2, 3, 24, 40)
    expected = rollout(model, image)
    heat = heat_maps(loaded(model), image, "rollout")
    torch.testing.assert_close(heat, expected / expected.amax((1, 2), keepdim=True), atol=1e-5, rtol=1e-4)


def test_one_pass_serves_all_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    model, image = tiny_vit(), torch.randn(2, 3, 32, 32)
    known = loaded(model, SubjectHeat(scale=1.0, bias=0.0))
    methods: list[Method] = ["subject", "cls", "rollout", "lost", "tokencut"]
    alone = {method: heat_maps(known, image, method) for method in methods}
    passes, embed = [], model.embed
    monkeypatch.setattr(model, "embed", lambda *args, **settings: passes.append(1) or embed(*args, **settings))
    looks = HeatPass(known, image, methods)
    for method in methods:
        heat = looks.heat(method)
        torch.testing.assert_close(heat, alone[method])
        assert heat.dtype == torch.float32
        assert 0 <= heat.min() <= heat.max() <= 1
    assert len(passes) == 2  # rollout's own, and one for the rest
    torch.testing.assert_close(heat_maps(known, image, "auto"), alone["subject"])


@pytest.mark.parametrize(
    "settings",
    [
        {"num_registers": 2, "layer_scale": 0.3},
        {"distill_token": True},
        {"pooling": "mean", "final_norm": "pooled"},
        {"pooling": "cls_mean"},
        {"block_norm": "after", "position": "relative_bias"},
        {"class_token": False, "pooling": "attention"},
    ],
)
def test_the_head_reads_the_same_pass(settings: dict[str, Any]) -> None:
    model, image = tiny_vit(**settings), torch.randn(2, 3, 32, 32)
    known = loaded(model, SubjectHeat(scale=0.7, bias=-0.4))
    passes: list[HeatPass] = [HeatPass(known, image, [method]) for method in ("tokencut", "features", "rollout")]
    passes.append(HeatPass(known, image, ["lost"], visit=lambda index, heads, x_BND: None))
    for looks in passes:
        torch.testing.assert_close(looks.logits(), model(image))


@pytest.mark.parametrize(
    "settings", [{}, {"position": "rope2d"}, {"position": "relative_bias"}, {"block_norm": "after"}], ids=str
)
def test_the_last_heads_are_those_of_the_whole_pass(settings: dict[str, Any]) -> None:
    model, image = tiny_vit(**settings), torch.randn(2, 3, 24, 40)
    seen: list[Heads] = []
    _, geometry = model.encode(image, visit=lambda index, heads, x_BND: seen.append(heads))
    heads, _, same = last_heads(model, image)
    assert same.grid == geometry.grid
    assert heads.out_BANE.numel() == 0
    for part, expected in zip(heads[:-1], seen[-1][:-1], strict=True):
        if expected is None:
            assert part is None
        else:
            assert torch.equal(part, expected)


@pytest.mark.parametrize("method", ["subject", "cls", "lost", "tokencut"])
def test_what_is_left_out_of_the_last_block_changes_no_bit_of_a_map(method: str) -> None:
    known, image = loaded(tiny_vit(), SubjectHeat(scale=0.7, bias=-0.4)), torch.randn(2, 3, 24, 40)
    whole = HeatPass(known, image, [method], visit=lambda index, heads, x_BND: None)
    assert torch.equal(heat_maps(known, image, method), whole.heat(method))


def dense_cut(keys_PD: Tensor) -> Tensor:
    """The second smallest generalised eigenvector, by a dense solver in float64."""
    unit = keys_PD.double() / keys_PD.double().norm(dim=1, keepdim=True)
    affinity = torch.where(unit @ unit.T > 0.2, 1.0, 1e-5).double()
    degree = affinity.sum(1)
    laplacian = torch.diag(degree) - affinity
    scaled = laplacian / degree.sqrt()[:, None] / degree.sqrt()
    return torch.linalg.eigh(scaled).eigenvectors[:, 1] / degree.sqrt()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("grid", [(5, 7), (12, 16)])
@pytest.mark.parametrize("side", ["border", "seed"])
def test_tokencut_is_the_dense_solvers_partition(grid: tuple[int, int], seed: int, side: Any) -> None:
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(1, 24, 3, 3, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=grid, mode="bilinear")
    keys_PD = smooth.flatten(2)[0].T + 0.2 * torch.randn(grid[0] * grid[1], 24, generator=generator)
    vector = dense_cut(keys_PD)
    above = (vector > vector.mean()).reshape(grid)
    if side == "seed":
        subject = above if above.flatten()[vector.abs().argmax()] else ~above
    else:
        edge = torch.cat([above[0], above[-1], above[1:-1, 0], above[1:-1, -1]]).float().mean()
        assert edge != 0.5
        subject = above if edge < 0.5 else ~above
    heat = tokencut(keys_PD[None], grid, side).reshape(grid)
    assert ((heat > 0.5) == subject).all()


def test_the_eigenvector_is_one() -> None:
    generator = torch.Generator().manual_seed(0)
    affinity = torch.rand(3, 40, 40, generator=generator) ** 4
    affinity = affinity + affinity.mT
    vector = second_eigenvector(affinity).double()
    for own, each in zip(affinity.double(), vector, strict=True):
        degree = own.sum(1)
        laplacian = torch.diag(degree) - own
        root = degree.sqrt()
        values = torch.linalg.eigvalsh(laplacian / root[:, None] / root)
        torch.testing.assert_close(laplacian @ each, values[1] * degree * each, atol=2e-3, rtol=0)
        assert each.norm() > 0.01


def test_an_image_gets_the_same_whatever_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = torch.randn(5, 36, 12, generator=torch.Generator().manual_seed(1))
    together = tokencut(keys, (6, 6))
    monkeypatch.setattr(module, "BYTES_AT_ONCE", 4 * 36**2 * 2)
    for one, alone in enumerate(keys):
        torch.testing.assert_close(tokencut(alone[None], (6, 6))[0], together[one], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(lost(alone[None])[0], lost(keys)[one], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(tokencut(keys, (6, 6)), together, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("box", [(2, 3, 7, 8), (0, 0, 5, 6), (6, 5, 10, 12)])
def test_both_cuts_find_what_is_unlike_the_rest(box: tuple[int, int, int, int]) -> None:
    grid = (10, 12)
    keys = two_groups(grid, box, 0.15)
    assert ((tokencut(keys, grid).reshape(grid) > 0.5) == inside(grid, box)).all()
    assert ((lost(keys).reshape(grid) > 0.5) == inside(grid, box)).all()


def test_the_border_decides_where_the_background_is_the_more_decided() -> None:
    # A subject in the middle that takes most of the photo: what is left around it is the odd one out.
    grid, box = (10, 10), (1, 1, 10, 9)
    keys = two_groups(grid, box, 0.1)
    assert ((tokencut(keys, grid, "border").reshape(grid) > 0.5) == inside(grid, box)).all()
    assert ((tokencut(keys, grid, "seed").reshape(grid) > 0.5) == ~inside(grid, box)).all()


def test_lost_step_by_step() -> None:
    keys = torch.randn(42, 6, generator=torch.Generator().manual_seed(3))
    keys[:, 0] += 1.0
    likeness = [[float(one @ other) for other in keys] for one in keys]
    degrees = [sum(value > 0 for value in row) for row in likeness]
    by_degree = sorted(range(42), key=lambda patch: (degrees[patch], patch))
    seed = by_degree[0]
    expanded = [patch for patch in by_degree[: round(42 / 7)] if patch == seed or likeness[seed][patch] > 0]
    expected = [sum(likeness[patch][other] for other in expanded) > 0 for patch in range(42)]
    assert len(expanded) > 1
    assert (lost(keys[None])[0] > 0.5).tolist() == expected


def test_nothing_stands_out_of_an_even_photo() -> None:
    keys = torch.ones(1, 36, 8)
    assert (tokencut(keys, (6, 6)) == 0).all()
    assert (lost(keys) == 0).all()
    assert (tokencut(torch.ones(1, 1, 8), (1, 1)) == 0).all()


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        ("subject", {}, "not taught"),
        ("cls", {"class_token": False, "pooling": "mean"}, "no class token"),
        ("dino", {}, "method='dino' is not known"),
    ],
)
def test_what_a_model_cannot_do_is_said(method: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(PatchlightError, match=words):
        heat_maps(loaded(tiny_vit(**settings)), torch.randn(1, 3, 32, 32), method)


def test_a_half_precision_model_gives_float32() -> None:
    model = tiny_vit().to(torch.bfloat16)
    for method in ("cls", "rollout", "lost", "tokencut", "subject"):
        known = loaded(model, SubjectHeat(scale=1.0, bias=0.0))
        assert heat_maps(known, torch.randn(1, 3, 32, 32), method).dtype == torch.float32
