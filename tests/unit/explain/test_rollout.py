"""Rollout and attribution against short references that write every matrix out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models_at_random import tiny_vit
from patchlight.errors import PatchlightError
from patchlight.explain import rollout as module
from patchlight.explain.attention import attention
from patchlight.explain.rollout import attribution, rollout
from patchlight.models.vit import ViT
from patchlight.weights.load import load
from patchlight.weights.save import save


def rollout_by_hand(model: ViT, image: Tensor, fusion: str, discard: float) -> Tensor:
    joint = torch.eye(model.tokens(image).shape[1])
    for matrix_AN in attention(model, image, "all", "all").weights[:, 0]:
        fused = {"mean": matrix_AN.mean(0), "max": matrix_AN.max(0).values, "min": matrix_AN.min(0).values}[fusion]
        dropped = fused.flatten().argsort()[: int(discard * fused.numel())]
        fused = fused.flatten().index_fill(0, dropped, 0).reshape(fused.shape)
        passed = fused + torch.eye(len(fused))
        joint = passed / passed.sum(1, keepdim=True) @ joint
    return joint


@pytest.mark.parametrize("fusion", ["mean", "max", "min"])
@pytest.mark.parametrize("discard", [0.0, 0.3, 0.9])
def test_rollout_is_the_product_of_the_layers(fusion: Any, discard: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUERIES_AT_ONCE", 7)
    model, image = tiny_vit(num_registers=1), torch.randn(2, 3, 24, 40)
    heat = rollout(model, image, fusion=fusion, discard=discard)
    for index in range(2):
        expected = rollout_by_hand(model, image[index : index + 1], fusion, discard)[0, 2:].reshape(3, 5)
        torch.testing.assert_close(heat[index], expected, atol=1e-6, rtol=1e-4)


def test_rollout_starts_where_the_answer_is_read() -> None:
    image = torch.randn(1, 3, 24, 40)
    mean = tiny_vit(class_token=False, pooling="mean")
    expected = rollout_by_hand(mean, image, "mean", 0).mean(0).reshape(3, 5)
    torch.testing.assert_close(rollout(mean, image)[0], expected, atol=1e-6, rtol=1e-4)
    distilled = tiny_vit(distill_token=True)
    expected = rollout_by_hand(distilled, image, "mean", 0)[:2, 2:].mean(0).reshape(3, 5)
    torch.testing.assert_close(rollout(distilled, image)[0], expected, atol=1e-6, rtol=1e-4)


def test_class_token_and_patches_both_answer_in_cls_mean() -> None:
    image = torch.randn(1, 3, 24, 40)
    model = tiny_vit(pooling="cls_mean", num_registers=1)
    joint = rollout_by_hand(model, image, "mean", 0)
    expected = (joint[0, 2:] + joint[2:, 2:].mean(0)).reshape(3, 5) / 2
    torch.testing.assert_close(rollout(model, image)[0], expected, atol=1e-6, rtol=1e-4)
    mean = tiny_vit(pooling="mean", num_registers=1)
    expected = rollout_by_hand(mean, image, "mean", 0)[2:, 2:].mean(0).reshape(3, 5)
    torch.testing.assert_close(rollout(mean, image)[0], expected, atol=1e-6, rtol=1e-4)
    headless = tiny_vit(distill_token=True, num_classes=0)  # pools the class token alone
    expected = rollout_by_hand(headless, image, "mean", 0)[0, 2:].reshape(3, 5)
    torch.testing.assert_close(rollout(headless, image)[0], expected, atol=1e-6, rtol=1e-4)


def test_equal_weights_stay_together() -> None:
    model = tiny_vit(depth=1)
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight.zero_()
        model.blocks[0].attn.qkv.bias.zero_()
    image = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(rollout(model, image, discard=0.5), rollout(model, image))


def test_gradients_are_found_in_inference_mode_too() -> None:
    model, image = tiny_vit(), torch.randn(1, 3, 32, 32)
    expected = attribution(model, image)
    with torch.inference_mode():
        torch.testing.assert_close(attribution(model, image.clone()), expected)


def test_padding_has_no_part_in_it() -> None:
    image, sizes = torch.randn(2, 3, 32, 32), [(32, 32), (16, 24)]
    together = rollout(tiny_vit(), image, sizes=sizes, discard=0.5)
    alone = rollout(tiny_vit(), image[1:, :, :16, :24], discard=0.5)
    torch.testing.assert_close(together[1, :2, :3], alone[0], atol=1e-5, rtol=1e-4)
    for changes in ({}, {"class_token": False, "pooling": "mean"}):
        model = tiny_vit(**changes)
        for function in (rollout, attribution):
            together, alone = function(model, image, sizes=sizes), function(model, image[1:, :, :16, :24])
            torch.testing.assert_close(together[1, :2, :3], alone[0], atol=1e-5, rtol=1e-4)
            assert together[1, 2:].abs().sum() == 0


def attribution_by_hand(model: ViT, image: Tensor, chosen: int) -> Tensor:
    """The same forward with the softmax in the graph, and autograd's own gradient with respect to it."""
    x, geometry = model.embed(image)
    matrices = []
    for block in model.blocks:
        q, k, v = block.attn.project(block.norm1(x), geometry)
        matrix = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).softmax(-1)
        matrices.append(matrix)
        x = block.residual1(x, block.attn.out((matrix @ v).transpose(1, 2).flatten(2)))
        x = block.residual2(x, block.mlp(block.norm2(x)))
    logits = model.read(model.norm(x), geometry)
    gradients = torch.autograd.grad(logits[0, chosen], matrices)
    joint = torch.eye(matrices[0].shape[-1])
    for matrix, gradient in zip(matrices, gradients, strict=True):
        joint = joint + (matrix * gradient).clamp(min=0).mean(1)[0] @ joint
    return joint.detach()


@pytest.mark.parametrize("frozen", [False, True])
def test_attribution_is_attention_times_its_gradient(frozen: bool) -> None:
    model, image = tiny_vit(num_registers=1), torch.randn(2, 3, 24, 40)
    by_hand = [attribution_by_hand(model, image[i : i + 1], c)[0, 2:].reshape(3, 5) for i, c in enumerate([3, 1])]
    model.requires_grad_(not frozen)
    with torch.no_grad():  # gradients are taken all the same
        heat = attribution(model, image, [3, 1])
    torch.testing.assert_close(heat, torch.stack(by_hand), atol=1e-6, rtol=1e-3)
    assert all(parameter.grad is None for parameter in model.parameters())
    likeliest = model(image).argmax(1)
    assert torch.equal(attribution(model, image), attribution(model, image, likeliest))
    assert torch.equal(attribution(model, image, 2), attribution(model, image, [2, 2]))


def test_what_makes_no_sense_is_refused() -> None:
    image = torch.randn(1, 3, 32, 32)
    with pytest.raises(PatchlightError, match="'mean', 'max' or 'min'"):
        rollout(tiny_vit(), image, fusion="median")  # type: ignore[arg-type]
    with pytest.raises(PatchlightError, match="discard=1"):
        rollout(tiny_vit(), image, discard=1)
    with pytest.raises(PatchlightError, match="needs a model with a head"):
        attribution(tiny_vit(num_classes=0), image)
    for classes in (5, -1, [0, 1], [0.5], {0}):
        with pytest.raises(PatchlightError, match="from 0 to 4"):
            attribution(tiny_vit(), image, classes)  # type: ignore[arg-type]


def test_classes_may_be_named_where_the_checkpoint_has_labels(tmp_path: Path) -> None:
    model, image = tiny_vit(), torch.randn(2, 3, 32, 32)
    loaded = load(save(model, tmp_path / "model", labels=["ant", "bee", "cat", "dog", "elk"]))
    assert torch.equal(attribution(loaded, image, "cat"), attribution(model, image, 2))
    assert torch.equal(attribution(loaded, image, ["elk", "ant"]), attribution(model, image, [4, 0]))
    with pytest.raises(PatchlightError, match="did you mean 'cat'"):
        attribution(loaded, image, "cats")
    with pytest.raises(PatchlightError, match="no labels; give the number"):
        attribution(model, image, "cat")
