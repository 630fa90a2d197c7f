"""Swin and ConvNeXt in the training loop: they learn, resume exactly, and each weight moves at its layer's rate."""

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from coloured_photos import write_coloured_photos
from patchlight.config import PreprocessConfig, ViTConfig
from patchlight.errors import PatchlightError
from patchlight.families import ConvNeXtConfig, SwinConfig
from patchlight.images.augment import AugmentConfig
from patchlight.models.families import make_model
from patchlight.reporting import Reporter
from patchlight.signals import Stopped
from patchlight.training.checkpoint import fingerprint
from patchlight.training.config import (
    DataConfig,
    DinoConfig,
    DistillConfig,
    MaeConfig,
    OptimConfig,
    SubjectConfig,
    TrainConfig,
)
from patchlight.training.features import evaluate_features
from patchlight.training.finetune import choose_recipe, in_words
from patchlight.training.loop import StepProgress, train
from patchlight.training.objective import Classification
from patchlight.training.optim import make_optimizer
from patchlight.training.processes import find_processes
from patchlight.training.sources import open_dataset
from patchlight.weights.load import load
from staged_models import TINY_CONVNEXT, TINY_SWIN, tiny_convnext, tiny_swin

MODELS: dict[str, Any] = {
    "swin": SwinConfig(**TINY_SWIN | {"image_size": 24, "num_classes": 3, "drop_path": 0.2}),
    "convnext": ConvNeXtConfig(**TINY_CONVNEXT | {"image_size": 24, "num_classes": 3, "drop_path": 0.2}),
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_coloured_photos(tmp_path_factory.mktemp("photos"), 28, 26)


def settings(photos: Path, model: str, **changes: Any) -> TrainConfig:
    config = TrainConfig(
        model=MODELS[model],
        data=DataConfig(train=str(photos), workers=0, validation_share=0.25),
        preprocess=PreprocessConfig(image_size=24),
        augment=AugmentConfig(mix=0.5, mixup=0.5),
        optim=OptimConfig(name="muon", lr=5e-3, layer_decay=0.9),
        epochs=6.0,
        batch_size=8,
        ema=0.9,
        log_every=1,
    )
    return config.changed(changes)


@pytest.mark.parametrize("model", MODELS)
def test_a_stopped_run_ends_with_the_same_weights(model: str, photos: Path, tmp_path: Path) -> None:
    config = settings(photos, model)
    whole = train(config, tmp_path / "whole")
    assert whole.accuracy is not None

    def watch(now: Any) -> None:
        if isinstance(now, StepProgress) and now.done == 9:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped):
        train(config, tmp_path / "stopped", reporter=Reporter(progress=watch))
    train(config, tmp_path / "stopped", resume=True)
    ended = [load(tmp_path / name) for name in ("whole", "stopped")]
    assert fingerprint(ended[0].model.state_dict()) == fingerprint(ended[1].model.state_dict())
    assert ended[0].config == config.model
    card = (tmp_path / "whole" / "README.md").read_text()
    assert {"swin": "A Swin Transformer for images of 24 x 24", "convnext": "A ConvNeXt for images"}[model] in card


@pytest.mark.parametrize("model", MODELS)
def test_it_learns_and_its_features_do(model: str, photos: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"epochs": 25.0, "ema": None, "augment.mix": 0.0, "model.drop_path": 0.0}
    result = train(settings(photos, model, **changes), tmp_path / "run")
    assert result.accuracy is not None
    assert result.accuracy >= 0.9
    for method in ("knn", "attentive"):
        assert evaluate_features(tmp_path / "run", photos, method=method, workers=0).accuracy >= 0.6  # type: ignore[arg-type]


@pytest.mark.parametrize("model", MODELS)
def test_finetuning_starts_from_it(model: str, photos: Path, tmp_path: Path) -> None:
    train(settings(photos, model), tmp_path / "start")
    training = open_dataset(str(photos))
    chosen = choose_recipe(load(tmp_path / "start"), str(photos), training)
    assert "the head alone learns" in in_words(chosen, training)
    config = chosen.changed({"epochs": 2.0, "trainable_blocks": 2, "data.workers": 0})
    train(config, tmp_path / "tuned")
    before, after = (load(tmp_path / name).model.state_dict() for name in ("start", "tuned"))
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    last = {key for key in moved if key.startswith("blocks.")}
    assert moved - last <= {"norm.weight", "norm.bias", "head.weight", "head.bias"}
    depth = MODELS[model].depth
    assert {key.split(".")[1] for key in last} == {str(depth - 2), str(depth - 1)}


def test_rates_fall_from_layer_to_layer_and_muon_turns_matrices() -> None:
    config = OptimConfig(name="muon", lr=1.0, muon_lr=1.0, layer_decay=0.5)
    for model in (tiny_swin(), tiny_convnext()):
        depth = model.config.depth
        optimizer = make_optimizer(model, config)
        names = {id(weight): name for name, weight in model.named_parameters()}
        rates, by_muon = {}, set()
        for each in optimizer.optimizers:
            for group in each.param_groups:
                for weight in group["params"]:
                    rates[names[id(weight)]] = group["lr"]
                    if type(each).__name__ == "Muon":
                        by_muon.add(names[id(weight)])
        first = "patch_embed.proj.weight" if "patch_embed.proj.weight" in rates else "stem.conv.weight"
        assert rates[first] == 0.5 ** (depth + 1)
        assert rates["blocks.0.mlp.up.weight"] == 0.5**depth
        second_stage = model.config.stage_starts[1]
        assert (
            rates["merges.0.norm.weight"]
            == rates[f"blocks.{second_stage}.mlp.up.bias"]
            == 0.5 ** (depth - second_stage)
        )
        assert rates["norm.weight"] == rates["head.weight"] == 1
        assert "blocks.1.mlp.down.weight" in by_muon
        assert not any("table" in name or "conv" in name or "merges" in name for name in by_muon)


def test_settings_of_a_run_know_the_architecture(photos: Path) -> None:
    config = settings(photos, "swin")
    assert TrainConfig.from_json(config.to_json()) == config
    assert config.changed({"model.window_size": 3}).model.window_size == (3, 3)
    with pytest.raises(PatchlightError, match="unknown setting 'num_registers' for SwinConfig"):
        config.changed({"model.num_registers": 4})
    with pytest.raises(PatchlightError, match="architecture='resnet' is not known; it is one of vit, swin, convnext"):
        TrainConfig.from_dict(config.to_dict() | {"model": {"architecture": "resnet"}})


@pytest.mark.parametrize(
    ("way", "value"),
    [
        ("dino", DinoConfig()),
        ("mae", MaeConfig()),
        ("subject", SubjectConfig()),
        ("distill", DistillConfig(teacher="default")),
    ],
)
def test_what_teaches_a_vit_alone_says_so(way: str, value: Any, photos: Path) -> None:
    classes = 0 if way in ("dino", "mae") else 3
    values = settings(photos, "convnext", ema=None).to_dict() | {way: value.to_dict()}
    values["model"] |= {"num_classes": classes}
    with pytest.raises(PatchlightError, match=f"{way} teaches a ViT; a convnext learns from labels"):
        TrainConfig.from_dict(values)


def test_a_convnext_teaches_a_vit(photos: Path, tmp_path: Path) -> None:
    train(settings(photos, "convnext"), tmp_path / "teacher")
    vit = ViTConfig(image_size=24, patch_size=8, width=16, depth=1, num_heads=2, num_classes=3, distill_token=True)
    config = settings(photos, "convnext", epochs=2.0).to_dict()
    config |= {"model": vit.to_dict(), "distill": {"teacher": str(tmp_path / "teacher")}}
    assert train(TrainConfig.from_dict(config), tmp_path / "student").accuracy is not None


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler looks at it
@pytest.mark.parametrize(
    ("config", "most"),
    [
        (ViTConfig(image_size=24, patch_size=8, width=12, depth=12, num_heads=2, num_classes=3, drop_path=0.3), 1),
        (dataclasses.replace(MODELS["convnext"], depths=(5, 6)), 2),  # one form a stage
        (dataclasses.replace(MODELS["swin"], depths=(6, 6), image_size=48), 4),  # and shifted windows another
    ],
)
def test_compiled_blocks_share_their_form_whatever_their_rates(
    config: Any, most: int, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = []

    def keep(graph: Any, inputs: Any) -> Any:
        programs.append(graph)
        return graph.forward

    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: compile_module(self, **how, backend=keep))
    torch._dynamo.reset()
    run = settings(photos, "swin", ema=None).to_dict()
    run |= {"model": config.to_dict(), "compile": True}
    run["preprocess"] |= {"image_size": list(config.image_size)}
    run_config = TrainConfig.from_dict(run)
    learner = Classification(make_model(config).train(), run_config)
    with find_processes("cpu") as processes:
        processes.spread(learner, run_config)
    for _ in range(2):
        learner.vit(torch.randn(2, 3, *config.image_size)).sum().backward()
    assert len(programs) == most
    torch._dynamo.reset()
