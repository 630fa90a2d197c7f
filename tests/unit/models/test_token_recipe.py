"""The hybrid recipe is what it says, and the merging benchmark reads the subject as the product does."""

import importlib.util
from pathlib import Path

import pytest
import torch

import patchlight as pl
from patchlight.localizing.heat import heat_maps
from patchlight.training.recipe import read_recipe, recipe_config

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("patch", "tokens"), [(2, 256), (4, 64)])
def test_the_hybrid_recipe_learns_on_overlapping_tokens(patch: int, tokens: int) -> None:
    recipe = read_recipe(str(ROOT / "recipes" / "cifar10_hybrid.py"))
    config = recipe_config(recipe, {"model.patch_size": patch, "model.depth": 1})
    assert (config.model.stem, config.model.width) == ("convolutions", 256)
    vit = pl.ViT(config.model)
    assert vit.tokens(torch.randn(1, 3, 32, 32)).shape == (1, tokens, 256)
    vit(torch.randn(2, 3, 32, 32)).logsumexp(1).sum().backward()
    assert all(parameter.grad is not None for parameter in vit.patch_embed.parameters())


def test_the_benchmark_of_merging_reads_the_subject_and_the_labels() -> None:
    spec = importlib.util.spec_from_file_location("token_merging", ROOT / "benchmarks" / "token_merging.py")
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    loaded = pl.load("default")
    images = torch.rand(2, 3, 128, 128)
    logits_BK, features_BD, heat_Bhw, tokens = benchmark.answers(loaded, 0, images)
    torch.testing.assert_close(heat_Bhw, heat_maps(loaded, images, "subject"), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(logits_BK, loaded.model(images), atol=1e-4, rtol=1e-4)
    assert (features_BD.shape, tokens) == ((2, loaded.config.width), 261)
    assert benchmark.answers(loaded, 20, images)[3] == 261 - 20 * (loaded.config.depth - 1)
    labels = loaded.labels or ()
    for source, label in (
        ("pets/american_pit_bull_terrier_28.jpg", "pet/american_pit_bull_terrier"),
        ("cub/Common_Raven_0043_101901.jpg", "bird/107.Common_Raven"),
        ("deer/Deer_Train1255.jpg", "wild/deer"),
    ):
        assert labels[benchmark.label_of(source, labels)] == label
    assert benchmark.label_of("cub/Dodo_0001_1.jpg", labels) is None
