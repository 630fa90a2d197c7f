"""Every relative of the ViT learns with both optimizers: a handful of images by heart."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from patchlight.config import ViTConfig
from patchlight.models.vit import ViT
from patchlight.training.config import OptimConfig
from patchlight.training.optim import make_optimizer

VARIANTS: list[dict[str, Any]] = [
    {"position": "relative_bias", "pooling": "mean", "final_norm": "pooled", "layer_scale": 0.1},
    {"position": "relative_mlp", "pooling": "mean", "block_norm": "after"},
    {"position": "rope_mixed", "add_learned_table": True, "rope_base": 10.0},
    {"position": "rope2d", "rope_grid": (16, 16), "add_learned_table": True, "mlp": "swiglu", "inner_norm": "both"},
    {"position": "rope2d", "rope_coordinates": "centred", "num_registers": 2, "mlp": "swiglu", "drop_path": 0.1},
    {"class_token": False, "pooling": "attention"},
    {"resnet": (1,)},
]


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_a_few_images_are_learnt_by_heart(changes: dict[str, Any], name: str) -> None:
    torch.manual_seed(0)
    model = ViT(
        ViTConfig(image_size=16, patch_size=8, width=24, depth=2, num_heads=2, num_classes=4, **changes)
    ).train()
    optimizer = make_optimizer(model, OptimConfig(name=name, lr=3e-3, muon_lr=0.02, weight_decay=0.01))
    optimizer.set_lr(1.0)
    images, labels = torch.randn(8, 3, 16, 16), torch.arange(8) % 4
    losses = []
    for _ in range(40):
        loss = F.cross_entropy(model(images), labels)
        model.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 1
    assert losses[-1] < 0.5 * losses[0]
