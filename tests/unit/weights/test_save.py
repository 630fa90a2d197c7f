import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import oracles
from models_at_random import POSITIONS, tiny_vit
from patchlight.config import PreprocessConfig
from patchlight.errors import PatchlightError
from patchlight.families import ConvNeXtConfig, SwinConfig
from patchlight.models.convnext import ConvNeXt
from patchlight.models.families import Model
from patchlight.models.swin import Swin
from patchlight.models.vit import ViT
from patchlight.weights.load import load
from patchlight.weights.save import save
from staged_models import TINY_CONVNEXT, TINY_SWIN

IMAGE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def last_digits(model: ViT) -> float:
    """The product of the pooling's one query and a matrix depends, in the last digits, on where the matrix lies."""
    return 1e-5 if model.config.pooling == "attention" else 0.0


@pytest.mark.parametrize(
    "changes",
    [
        *({"position": position} for position in POSITIONS),
        {"num_registers": 3, "layer_scale": 0.1, "mlp": "swiglu", "qk_norm": True, "prefix_positions": "class"},
        {"distill_token": True},
        {"head_hidden": 9, "embed_norm": True, "patch_bias": False},
        {"pooling": "cls_mean"},
        {"num_classes": 0, "class_token": False, "pooling": "mean", "final_norm": "pooled"},
        {"class_token": False, "pooling": "attention", "block_norm": "after", "inner_norm": "both"},
        {"position": "rope2d", "add_learned_table": True, "rope_grid": (16, 16), "rope_base": 1e4, "inner_norm": "mlp"},
        {"position": "relative_mlp", "relative_hidden": 5, "num_registers": 1},
        {"resnet": (1, 2), "patch_size": (16, 8)},
    ],
    ids=str,
)
def test_a_saved_model_reloads_bit_for_bit(changes: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_vit(**changes)
    preprocess = PreprocessConfig(image_size=(32, 32), crop_pct=0.8)
    save(model, tmp_path / "m", preprocess=preprocess, licence="MIT")
    loaded = load(tmp_path / "m")
    assert loaded.config == model.config
    assert loaded.preprocess.config == preprocess
    assert loaded.provenance.licence == "MIT"
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in loaded.model.state_dict().items())
    torch.testing.assert_close(loaded.model(IMAGE), model(IMAGE), rtol=0, atol=last_digits(model))
    again = save(loaded, tmp_path / "again")
    assert (again / "model.safetensors").read_bytes() == (tmp_path / "m" / "model.safetensors").read_bytes()
    assert (again / "config.json").read_text() == (tmp_path / "m" / "config.json").read_text()


def test_labels_go_into_the_file_that_transformers_reads(tmp_path: Path) -> None:
    transformers = oracles.transformers()
    save(tiny_vit(), tmp_path / "m", layout="transformers", labels=list("abcde"))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path / "m")
    assert theirs.id2label[2] == "c"
    assert load(tmp_path / "m").labels == tuple("abcde")


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    save(tiny_vit(), tmp_path / "m")
    with pytest.raises(PatchlightError, match="is not empty"):
        save(tiny_vit(), tmp_path / "m")
    save(tiny_vit(num_classes=3), tmp_path / "m", overwrite=True)
    assert load(tmp_path / "m").config.num_classes == 3
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == ["README.md", "config.json", "model.safetensors"]
    with pytest.raises(PatchlightError, match="2 labels were given for 5 classes"):
        save(tiny_vit(), tmp_path / "n", labels=["a", "b"])
    (tmp_path / "file").write_text("x")
    with pytest.raises(PatchlightError, match="is a file"):
        save(tiny_vit(), tmp_path / "file")


@pytest.mark.parametrize(
    "model", [tiny_vit(), Swin(SwinConfig(**TINY_SWIN)), ConvNeXt(ConvNeXtConfig(**TINY_CONVNEXT))]
)
def test_the_bare_module_of_a_loaded_model_keeps_its_preprocessing(model: Model, tmp_path: Path) -> None:
    size = model.config.image_size
    own = PreprocessConfig(image_size=size, resize="squash", crop_pct=1.0, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    save(model, tmp_path / "m", preprocess=own)
    loaded = load(tmp_path / "m")
    assert load(save(loaded.model, tmp_path / "bare")).preprocess.config == own
    assert load(save(copy.deepcopy(loaded.model), tmp_path / "copied")).preprocess.config == own
    other = PreprocessConfig(image_size=size, crop_pct=0.5)
    assert load(save(loaded.model, tmp_path / "asked", preprocess=other)).preprocess.config == other
    asked = load(tmp_path / "m", preprocess=other).model
    assert load(save(asked, tmp_path / "asked before")).preprocess.config == other
    usual = load(save(model, tmp_path / "never loaded")).preprocess.config
    assert usual == PreprocessConfig(image_size=size, crop_pct=0.875)
