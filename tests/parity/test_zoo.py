"""benchmarks/zoo.py, which loads every model of other libraries: that it sees what is wrong."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import oracles

_SPEC = importlib.util.spec_from_file_location("zoo", Path(__file__).parents[2] / "benchmarks" / "zoo.py")
assert _SPEC is not None
assert _SPEC.loader is not None
zoo = importlib.util.module_from_spec(_SPEC)
sys.modules["zoo"] = zoo  # where its dataclasses look for themselves
_SPEC.loader.exec_module(zoo)


def test_each_family_is_equal_and_others_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    oracles.timm()
    names = ["vit_tiny_patch16_224", "xcit_nano_12_p16_224", "resnet18"]
    assert zoo.main(["--only", *names, "--origin", "timm-folder", "timm-file"]) == 0
    table = capsys.readouterr().out
    assert "timm-folder   ViT                                1         0         0         0         0" in table
    assert "timm-file     others                             0         2         0         0         0" in table


AS_REFUSED_OR_EQUAL = {
    "vit_small_patch16_rope_ape_224": "its tensors fit several of timm's architectures",
    "vit_base_patch32_clip_quickgelu_224": "its tensors fit several of timm's architectures",
    "swinv2_tiny_window8_256": "its tensors fit several of timm's architectures",
    "convnext_atto_ols": "whose stem is two convolutions that overlap",
    "convnext_atto_rms": "its norms have no bias",
    "convnext_tiny_hnf": "that normalises before it pools",
    "test_vit4": "its norms have no bias",
    "vit_pe_spatial_tiny_patch16_512": "it has no norm after its last block",
    "test_vit": None,
    "test_vit2": None,
    "beit3_base_patch16_224": None,
}


@pytest.mark.parametrize("name", AS_REFUSED_OR_EQUAL)
def test_those_that_were_wrong_once(name: str) -> None:
    oracles.timm()
    reason = AS_REFUSED_OR_EQUAL[name]
    for outcome in zoo.try_timm(name, ["timm-file", "timm-named"], zoo.Options()):
        asked_which = reason is not None and "several" in reason and outcome.origin == "timm-named"
        assert outcome.result == ("equal" if reason is None or asked_which else "refused"), outcome
        assert outcome.result == "equal" or (reason or "") in outcome.said or "which is not supported" in outcome.said


def test_models_of_transformers_too(capsys: pytest.CaptureFixture[str]) -> None:
    oracles.transformers()
    assert zoo.main(["--only", "DeiTForImageClassification", "YolosModel", "--origin", "transformers", "--rows"]) == 0
    said = capsys.readouterr().out
    assert "equal    transformers DeiTForImageClassification" in said
    assert "it is YOLOS (config.json says 'yolos')" in said


@pytest.mark.parametrize(
    "changes",
    [{"norm_eps": 1e-5}, {"mlp": "quick_gelu"}, {"mlp": "gelu_tanh"}, {"num_heads": 6}, {"pooling": "mean"}],
    ids=str,
)
def test_what_is_computed_otherwise_is_seen(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    oracles.timm()
    real = zoo.pl.load
    monkeypatch.setattr(zoo.pl, "load", lambda source, **more: real(source, **more | changes))
    [outcome] = zoo.try_timm("vit_tiny_patch16_224", ["timm-folder"], zoo.Options())
    assert (outcome.result, outcome.difference > zoo.TOLERANCE) == ("wrong", True), outcome
    assert "differ by" in outcome.said


def test_no_parameter_keeps_its_first_value() -> None:
    model = oracles.timm().create_model("convnextv2_atto", depths=(1, 1, 1, 1))
    zoo.redraw(model)
    constant = [name for name, value in model.named_parameters() if value.numel() > 1 and value.std() < 1e-3]
    assert not constant
    assert all(torch.isfinite(value).all() for value in model.parameters())
