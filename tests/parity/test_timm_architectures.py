"""What timm's checkpoints leave open, and who settles it: a name, or else an error or a warning."""

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import oracles
from command_line import patchlight
from models_at_random import randomize
from patchlight.errors import PatchlightError, PatchlightWarning
from patchlight.weights.load import load
from patchlight.weights.timm_configs import architectures

_FILE = Path(__file__).parents[2] / "benchmarks" / "timm_architectures.py"


def test_the_table_is_that_of_the_installed_timm() -> None:
    oracles.timm()
    spec = importlib.util.spec_from_file_location("making_of_the_table", _FILE)
    assert spec is not None
    assert spec.loader is not None
    making = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(making)
    assert making.names() == list(architectures())
    some = making.names()[::4]  # the script, which takes a minute, compares them all
    assert {name: architectures()[name] for name in some} == {name: making.row(name) for name in some}


def bare(name: str, folder: Path, **arguments: Any) -> tuple[torch.nn.Module, Path]:
    """A model of timm, and a file of its tensors that does not say its name."""
    model = oracles.timm().create_model(name, **({"depth": 2, "num_classes": 5} | arguments)).eval()
    randomize(model)
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, folder / "x.safetensors")
    return model, folder / "x.safetensors"


def image_for(model: Any) -> torch.Tensor:
    return torch.randn(2, 3, *model.patch_embed.img_size, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def same(loaded: Any, model: torch.nn.Module) -> None:
    expected = model(image_for(model))
    largest = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(loaded.model(image_for(model)), expected, atol=1e-5 * largest, rtol=1e-4)


# Tensors that two of timm's architectures have, and what else they may be.
AMBIGUOUS = [
    ("vit_small_patch16_rope_ape_224", "deit3_small_patch16_224", "position='rope2d'"),  # as DeiT III's authors name it
    ("vit_base_patch32_clip_quickgelu_224", "vit_base_patch32_clip_224", "mlp='quick_gelu'"),
    ("vit_small_patch16_dinov3_qkvb", "vit_small_patch16_lingbot", "pooling='mean'"),
    ("vit_base_patch16_gap_224", "vit_base_patch16_siglip_gap_224", "num_heads=16"),
]


@pytest.mark.parametrize(("name", "other", "setting"), AMBIGUOUS)
def test_tensors_of_several_architectures_are_refused_until_it_is_said_which(
    name: str, other: str, setting: str, tmp_path: Path
) -> None:
    model, file = bare(name, tmp_path)
    with pytest.raises(PatchlightError, match="its tensors fit several of timm's architectures") as caught:
        load(file)
    assert f"like={name!r} ({setting})" in str(caught.value)
    assert f"like={other!r}" in str(caught.value)
    same(load(file, like=name, depth=2), model)
    key, _, value = setting.partition("=")
    same(load(file, depth=2, **{key: int(value) if value.isdecimal() else value.strip("'")}), model)


@pytest.mark.parametrize("like", ["{}", "timm/{}.some_tag", "hf:timm/{}.some_tag"])
def test_a_name_settles_it_with_or_without_owner_and_tag(like: str, tmp_path: Path) -> None:
    name = "vit_small_patch16_dinov3_qkvb"
    model, file = bare(name, tmp_path)
    loaded = load(file, like=like.format(name), depth=2)
    same(loaded, model)
    assert loaded.why["pooling"] == f"like={like.format(name)!r}"


@pytest.mark.parametrize("suffix", [".safetensors", ".xyz_in1k.safetensors", "-0a1b2c3d.safetensors"])
def test_the_name_of_the_file_settles_it(suffix: str, tmp_path: Path) -> None:
    name = "vit_base_patch32_clip_quickgelu_224"
    model, file = bare(name, tmp_path)
    loaded = load(file.rename(tmp_path / f"{name}{suffix}"), depth=2)
    same(loaded, model)
    assert loaded.why["mlp"] == "the name of its file"


def test_what_timms_training_script_writes_settles_it(tmp_path: Path) -> None:
    name = "vit_small_patch16_dinov3_qkvb"
    model, _ = bare(name, tmp_path, global_pool="token")
    arguments = argparse.Namespace(model=name, model_kwargs={"depth": 2}, gp="token", img_size=None, num_classes=5)
    torch.save({"arch": name, "args": arguments, "epoch": 3, "state_dict": model.state_dict()}, tmp_path / "last.pth")
    loaded = load(tmp_path / "last.pth")
    same(loaded, model)
    assert loaded.why["pooling"] == loaded.why["norm_eps"] == "its entry 'arch'"


@pytest.mark.parametrize(
    "name",
    ["vit_small_patch16_rope_224", "vit_tiny_patch16_224", "beit3_base_patch16_224", "test_vit", "test_vit2"],
)
def test_tensors_of_one_architecture_alone_are_known_and_nothing_is_guessed(name: str, tmp_path: Path) -> None:
    model, file = bare(name, tmp_path)
    loaded = load(file, depth=2)
    same(loaded, model)
    assert loaded.notes == (
        "its preprocessing is not known: ImageNet's usual settings are assumed; pass preprocess= to change it",
    )
    assert loaded.why["mlp"].startswith("timm's ")


def test_a_missing_block_is_noticed(tmp_path: Path) -> None:
    name = "vit_tiny_patch16_224"
    model, file = bare(name, tmp_path, depth=11)
    with pytest.warns(PatchlightWarning, match=r"it has depth=11, and timm's \w+, whose tensors are like its, 12"):
        load(file)
    for said in ({"like": name}, {}):
        where = f"like={name!r}" if said else "the name of its file"
        file = file if said else file.rename(tmp_path / f"{name}.safetensors")
        with pytest.raises(PatchlightError, match=f"{where} says {name}, with depth=12, but its tensors have 11"):
            load(file, **said)
        same(load(file, depth=11, **said), model)


def test_a_name_that_the_tensors_contradict(tmp_path: Path) -> None:
    model, file = bare("vit_tiny_patch16_224", tmp_path)
    with pytest.raises(
        PatchlightError, match="like='vit_small_patch16_224' says vit_small_patch16_224, with width=384"
    ):
        load(file, like="vit_small_patch16_224")
    with pytest.raises(
        PatchlightError, match=r"like='vit_tinny_patch16_224' is not an architecture.*'vit_tiny_patch16_224'"
    ):
        load(file, like="vit_tinny_patch16_224")
    with pytest.raises(PatchlightError, match="it is timm's convnext_atto_ols, which is not supported"):
        load(file, like="convnext_atto_ols")
    misnamed = file.rename(tmp_path / "vit_small_patch16_224.safetensors")
    with pytest.warns(PatchlightWarning, match="named after timm's vit_small_patch16_224, which has width=384"):
        same(load(misnamed, depth=2), model)


def test_a_checkpoint_on_the_hub_can_say_what_a_file_is_like(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its config files alone, which is all that is fetched."""
    model, file = bare("vit_base_patch32_clip_quickgelu_224", tmp_path)
    folder = tmp_path / "on the hub"
    folder.mkdir()
    (folder / "config.json").write_text('{"architecture": "vit_base_patch32_clip_quickgelu_224"}')
    asked: list[Any] = []
    monkeypatch.setattr("patchlight.weights.find.fetch", lambda *args, **more: (asked.append((args, more)), folder)[1])
    same(load(file, like="hf:somebody/something", depth=2), model)
    assert asked == [(("somebody/something",), {"configs_only": True})]


def test_the_command_line_takes_a_name_and_says_its_warnings_in_one_line(tmp_path: Path) -> None:
    name = "vit_tiny_patch16_224"
    _, file = bare(name, tmp_path, depth=11)
    warned = patchlight("inspect", str(file), cwd=tmp_path)
    assert warned.returncode == 0
    assert warned.stderr.startswith(f"patchlight: warning: {file}: it has depth=11, and timm's ")
    assert warned.stderr.count("\n") == 1
    refused = patchlight("inspect", str(file), "--like", name, cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith(f"patchlight: {file}: --like {name} says {name}, with depth=12")
    said = patchlight("inspect", str(file), "--like", name, "--set", "depth=11", cwd=tmp_path)
    assert (said.returncode, said.stderr) == (0, "")


def test_a_folders_config_can_say_what_a_file_is_like(tmp_path: Path) -> None:
    from timm.models import save_for_hf

    name = "vit_base_patch32_clip_quickgelu_224"
    model, file = bare(name, tmp_path)
    save_for_hf(model, tmp_path / "folder", model_args={"depth": 2}, safe_serialization=True)
    loaded = load(file, like=str(tmp_path / "folder"))
    same(loaded, model)
    assert loaded.preprocess.config.mean == pytest.approx(model.pretrained_cfg["mean"])
