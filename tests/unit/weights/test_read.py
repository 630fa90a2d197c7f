"""Whole checkpoints in every wrapping that training scripts and libraries put around them: equal to the clean load."""

import argparse
import io
import json
import re
import struct
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from models_at_random import randomize, tiny_vit
from patchlight.weights.convert import convert_to
from patchlight.weights.load import Loaded, load
from patchlight.weights.read import CheckpointError, _only_spells_bytes, check_finite, read_checkpoint, read_json
from patchlight.weights.save import save
from patchlight.weights.vit.names import TIMM

State = dict[str, Tensor]


def timm_state(seed: int = 0) -> State:
    model = tiny_vit()
    randomize(model, seed)
    state = convert_to(model.state_dict(), TIMM)
    return {key: value.unsqueeze(0) if key in ("cls_token", "pos_embed") else value for key, value in state.items()}


def prefixed(prefix: str, state: State) -> State:
    return {prefix + key: value for key, value in state.items()}


def without_head(state: State) -> State:
    return {key: value for key, value in state.items() if not key.startswith("head.")}


def optimizer_state() -> dict[str, Any]:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


def assert_equal_to_the_clean_load(loaded: Loaded, *, head: bool = True) -> None:
    expected = {key: value for key, value in tiny_vit().state_dict().items() if head or not key.startswith("head.")}
    state = loaded.model.state_dict()
    assert state.keys() == expected.keys()
    for key, value in state.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, expected[key]), key
    assert not loaded.model.training


WRAPPINGS: dict[str, Callable[[State], Any]] = {
    "plain": lambda state: state,
    "ordered": OrderedDict,
    "parameters": lambda state: {key: nn.Parameter(value) for key, value in state.items()},
    "module.": lambda state: prefixed("module.", state),
    "_orig_mod.": lambda state: prefixed("_orig_mod.", state),
    "module._orig_mod.": lambda state: prefixed("module._orig_mod.", state),
    "backbone.": lambda state: prefixed("backbone.", state),
    "model.": lambda state: prefixed("model.", state),
    "encoder.": lambda state: prefixed("encoder.", state),
    "state_dict": lambda state: {"state_dict": state, "epoch": 3, "arch": "vit"},
    "state_dict of module.": lambda state: {"state_dict": prefixed("module.", state)},
    "model": lambda state: {"model": state, "epoch": 300},
    "teacher": lambda state: {"teacher": prefixed("backbone.", state), "epoch": 100},
    "Lightning": lambda state: {
        "epoch": 1,
        "global_step": 100,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": prefixed("model.", state),
        "hyper_parameters": {"lr": 1e-3, "layers": [1, 2]},
        "loops": {"fit_loop": {"state_dict": {}}},
        "optimizer_states": [optimizer_state()],
        "lr_schedulers": [{"last_epoch": 1}],
    },
    "optimizer": lambda state: {"model": state, "optimizer": optimizer_state(), "scaler": {"scale": 65536.0}},
    "namespace": lambda state: {"model": state, "args": argparse.Namespace(lr=1e-3, model="vit", amp=True)},
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_wrapping_is_seen_through(wrapping: str, tmp_path: Path) -> None:
    torch.save(WRAPPINGS[wrapping](timm_state()), tmp_path / "x.pt")
    assert_equal_to_the_clean_load(load(tmp_path / "x.pt", num_heads=2))


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "backbone.", "model."])
def test_prefix_is_seen_through_in_safetensors(prefix: str, tmp_path: Path) -> None:
    save_file(prefixed(prefix, timm_state()), tmp_path / "x.safetensors")
    loaded = load(tmp_path / "x.safetensors", num_heads=2)
    assert_equal_to_the_clean_load(loaded)
    assert any(repr(prefix) in note for note in loaded.notes) == bool(prefix)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
def test_our_own_naming_in_wrappers(prefix: str, tmp_path: Path) -> None:
    torch.save({"state_dict": prefixed(prefix, tiny_vit().state_dict())}, tmp_path / "x.pt")
    assert_equal_to_the_clean_load(load(tmp_path / "x.pt", num_heads=2))


@pytest.mark.parametrize("other", ["model", "state_dict", "student"])
@pytest.mark.parametrize("better", ["model_ema", "state_dict_ema", "teacher", "ema"])
@pytest.mark.parametrize("first", [True, False])
def test_average_is_taken_before_the_raw_model_and_said(better: str, other: str, first: bool, tmp_path: Path) -> None:
    content = {better: timm_state(), other: timm_state(seed=1)}
    torch.save(content if first else dict(reversed(content.items())), tmp_path / "x.pt")
    loaded = load(tmp_path / "x.pt", num_heads=2)
    assert_equal_to_the_clean_load(loaded)
    notes = " ".join(loaded.notes)
    assert f"'{better}.'" in notes
    assert f"{other}." in notes  # and what was left out
    assert "took the averaged (EMA) weights; weights='model' takes the trained ones beside them" in loaded.notes
    assert_equal_to_the_clean_load(load(tmp_path / "x.pt", num_heads=2, weights="ema"))
    trained = load(tmp_path / "x.pt", num_heads=2, weights="model")
    assert "took the trained weights; weights='ema' takes the averaged (EMA) ones beside them" in trained.notes
    torch.save(timm_state(seed=1), tmp_path / "trained.pt")
    expected = load(tmp_path / "trained.pt", num_heads=2).model.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in trained.model.state_dict().items())


@pytest.mark.parametrize(
    ("trained", "averaged", "usual"),
    [  # I-JEPA's authors go on with the average, MoCo v3's with what was trained
        ("encoder.module.", "target_encoder.module.", "averaged"),
        ("module.base_encoder.", "module.momentum_encoder.", "trained"),
    ],
)
def test_encoders_with_an_average_of_other_names(trained: str, averaged: str, usual: str, tmp_path: Path) -> None:
    content = prefixed(trained, timm_state(seed=0)) | prefixed(averaged, timm_state(seed=1))
    torch.save(content, tmp_path / "x.pt")
    by_choice = {
        which: load(tmp_path / "x.pt", num_heads=2, weights=weights)
        for which, weights in (("trained", "model"), ("averaged", "ema"), ("usual", None))
    }
    assert_equal_to_the_clean_load(by_choice["trained"])
    same = by_choice[usual].model.state_dict()
    assert all(torch.equal(value, same[key]) for key, value in by_choice["usual"].model.state_dict().items())
    different = by_choice["averaged"].model.state_dict()["norm.weight"]
    assert not torch.equal(different, by_choice["trained"].model.state_dict()["norm.weight"])
    assert [note for note in by_choice["usual"].notes if "beside them" in note]


@pytest.mark.parametrize(
    ("wrapper", "weights", "said"),
    [
        ("", "ema", "no averaged weights are in it (at its top); leave weights= out"),
        ("model.", "ema", "no averaged weights are in it (below 'model.')"),
        ("schema.", "ema", "no averaged weights are in it (below 'schema.')"),
        ("model_ema.", "model", "nothing but averaged weights is in it (below 'model_ema.')"),
        ("model.", "raw", "weights='raw' should be 'model' (as trained) or 'ema'"),
    ],
)
def test_weights_that_are_not_there(wrapper: str, weights: Any, said: str, tmp_path: Path) -> None:
    torch.save(prefixed(wrapper, timm_state()), tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=re.escape(said)):
        load(tmp_path / "x.pt", num_heads=2, weights=weights)
    assert not [note for note in load(tmp_path / "x.pt", num_heads=2).notes if "weights=" in note]


def test_dino_checkpoint_gives_its_teacher_without_the_projection(tmp_path: Path) -> None:
    def network(seed: int) -> State:
        head = {"head.mlp.0.weight": torch.zeros(8, 24), "head.last_layer.weight_v": torch.zeros(16, 8)}
        return prefixed("module.", prefixed("backbone.", without_head(timm_state(seed))) | head)

    content = {"student": network(1), "teacher": network(0), "optimizer": optimizer_state(), "epoch": 100}
    torch.save(content | {"args": argparse.Namespace(arch="vit_small")}, tmp_path / "x.pth")
    loaded = load(tmp_path / "x.pth", num_heads=2)
    assert_equal_to_the_clean_load(loaded, head=False)
    assert "teacher" in " ".join(loaded.notes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_other_precisions_become_float32(dtype: torch.dtype, suffix: str, tmp_path: Path) -> None:
    state = {key: value.to(dtype) for key, value in timm_state().items()}
    path = tmp_path / f"x.{suffix}"
    save_file(state, path) if suffix == "safetensors" else torch.save(state, path)
    model = load(path, num_heads=2).model
    for key, value in tiny_vit().state_dict().items():
        assert torch.equal(model.state_dict()[key], value.to(dtype).float()), key


@pytest.mark.parametrize("name", ["x.pt", "x.pth", "x.bin", "x.ckpt", "x"])
@pytest.mark.parametrize("as_zip", [True, False])
def test_torch_file_of_any_name_and_age(name: str, as_zip: bool, tmp_path: Path) -> None:
    torch.save(timm_state(), tmp_path / name, _use_new_zipfile_serialization=as_zip)
    assert_equal_to_the_clean_load(load(tmp_path / name, num_heads=2))


def test_folder_with_pytorch_model_bin(tmp_path: Path) -> None:
    torch.save(timm_state(), tmp_path / "pytorch_model.bin")
    assert_equal_to_the_clean_load(load(tmp_path, num_heads=2))


@pytest.mark.parametrize("as_folder", [True, False])
def test_shards(as_folder: bool, tmp_path: Path) -> None:
    state = timm_state()
    weight_map = {key: f"model-{number % 3}.safetensors" for number, key in enumerate(state)}
    for name in set(weight_map.values()):
        save_file({key: state[key] for key in state if weight_map[key] == name}, tmp_path / name)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    assert_equal_to_the_clean_load(load(tmp_path if as_folder else index, num_heads=2))


def test_views_and_shared_and_turned_tensors_are_read_as_they_look(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(4, 6)
    content = {"whole": whole, "row": whole[1], "column": whole[:, 2], "turned": whole.T, "again": whole}
    torch.save(content, tmp_path / "x.pt")
    tensors = read_checkpoint(tmp_path / "x.pt")
    for name, expected in content.items():
        assert torch.equal(tensors[name], expected)
        assert tensors[name].is_contiguous()


def test_mapped_tensors_outlive_a_file_that_is_replaced_or_deleted(tmp_path: Path) -> None:
    path, weight = tmp_path / "x.safetensors", torch.full((1 << 20,), 2.0)
    save_file({"weight": weight}, path)
    tensors = read_checkpoint(path)
    save_file({"weight": weight * 3}, tmp_path / "new.safetensors")
    (tmp_path / "new.safetensors").replace(path)
    assert torch.equal(tensors["weight"], weight)
    path.unlink()
    assert torch.equal(tensors["weight"], weight)


@pytest.mark.parametrize("suffix", ["pt", "npz"])
def test_model_stays_as_it_is_when_its_file_is_written_anew(suffix: str, tmp_path: Path) -> None:
    path, weight = tmp_path / f"x.{suffix}", torch.full((1 << 20,), 2.0)
    if suffix == "npz":
        np.savez(path, weight=weight.numpy())
    else:
        torch.save({"weight": weight}, path)
    tensors = read_checkpoint(path)
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
        file.truncate(100)
    assert torch.equal(tensors["weight"], weight)  # a mapped file would end the process here


def test_numpy_arrays_of_every_kind(tmp_path: Path) -> None:
    numbers = np.arange(6.0).reshape(2, 3)
    arrays = {
        "float64": numbers,
        "float32": numbers.astype("f4"),
        "float16": numbers.astype("f2"),
        "swapped": numbers.astype(">f4"),
        "fortran": np.asfortranarray(numbers),
        "int64": numbers.astype("i8"),
        "number": np.array(3.0),
        # NumPy has no bfloat16: big_vision's files hold its bytes.
        "bfloat16": torch.from_numpy(numbers).to(torch.bfloat16).view(torch.int16).numpy().view("V2"),
    }
    for save_npz in (np.savez, np.savez_compressed):
        save_npz(tmp_path / "x.npz", **arrays)
        tensors = read_checkpoint(tmp_path / "x.npz")
        assert tensors["bfloat16"].dtype == torch.bfloat16
        assert tensors["number"].item() == 3
        for name in set(arrays) - {"number"}:
            assert torch.equal(tensors[name].double(), torch.from_numpy(numbers)), name


def test_safetensors_of_every_kind(tmp_path: Path) -> None:
    types = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
    content = {name: torch.tensor([[0, 1], [1, 0]]).to(getattr(torch, name)) for name in types}
    content |= {"number": torch.tensor(3.0), "nothing": torch.zeros(0, 4)}
    save_file(content, tmp_path / "x.safetensors", {"format": "pt"})
    tensors = read_checkpoint(tmp_path / "x.safetensors")
    assert tensors.keys() == content.keys()
    for name, expected in content.items():
        assert tensors[name].dtype == expected.dtype
        assert torch.equal(tensors[name], expected)


def test_tensors_of_the_gpu_come_to_the_cpu(tmp_path: Path) -> None:
    """A file that says cuda, as written on another machine: its pickle is edited, since this one has no GPU."""
    buffer = io.BytesIO()
    torch.save({"x": torch.ones(3)}, buffer, _use_new_zipfile_serialization=False)
    content = buffer.getvalue()
    old, new = b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0"
    assert old in content
    (tmp_path / "x.pt").write_bytes(content.replace(old, new))
    assert read_checkpoint(tmp_path / "x.pt")["x"].device.type == "cpu"


def test_not_strict_loads_the_rest_and_says_what_is_missing(tmp_path: Path) -> None:
    state = timm_state()
    del state["blocks.1.attn.qkv.bias"], state["norm.weight"]
    save_file(state | {"norm.bias": torch.zeros(7), "adapter": torch.zeros(2)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="strict=False"):
        load(tmp_path / "x.safetensors", num_heads=2)
    loaded = load(tmp_path / "x.safetensors", num_heads=2, strict=False)
    assert "missing: blocks.1.attn.qkv.bias, norm.weight" in loaded.notes
    assert "unexpected: adapter" in loaded.notes
    assert "of another shape: norm.bias" in loaded.notes
    ours = tiny_vit().state_dict()
    for key, value in loaded.model.state_dict().items():
        assert torch.isfinite(value).all()
        if key not in ("blocks.1.attn.qkv.bias", "norm.weight", "norm.bias"):
            assert torch.equal(value, ours[key])


def test_largest_finite_numbers_are_no_infinities() -> None:
    check_finite({"x": torch.full((1000,), torch.finfo(torch.float32).max)}, "x")
    check_finite({"x": torch.full((1000,), torch.finfo(torch.float16).max, dtype=torch.float16)}, "x")
    check_finite({"mask": torch.tensor([True, False]), "index": torch.arange(3)}, "x")


def test_json_is_an_object(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": [1]}')
    assert read_json(tmp_path / "x.json") == {"a": [1]}
    (tmp_path / "x.json").write_text("3")
    with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path}/x.json: expected a JSON object, found int")):
        read_json(tmp_path / "x.json")


@pytest.mark.parametrize("as_zip", [True, False])
def test_numpys_numbers_and_arrays_beside_the_weights_are_passed_over(as_zip: bool, tmp_path: Path) -> None:
    numbers = {"best": np.float64(81.2), "half": np.float16(1), "sure": [np.bool_(True), np.bool_(True)]}
    numbers |= {"epoch": np.int64(3), "name": np.str_("vit"), "type": np.dtype("float32"), "raw": b"ab"}
    numbers |= {"losses": np.arange(300) / 7, "confusion": np.eye(3, dtype=bool), "names": np.array(["a", None])}
    args = argparse.Namespace(lr=np.float32(1e-3))
    content = {"model": timm_state(), "args": args} | numbers
    torch.save(content, tmp_path / "x.pth", _use_new_zipfile_serialization=as_zip)
    assert_equal_to_the_clean_load(load(tmp_path / "x.pth", num_heads=2))


def test_an_array_of_numpy_among_the_tensors_is_named_whatever_it_is(tmp_path: Path) -> None:
    state: dict[str, Any] = timm_state()
    state["blocks.0.ls1.gamma"] = np.ones(24, np.float32)
    for content, name in ((state, "blocks.0.ls1.gamma"), ({"model": state, "epoch": 3}, "model.blocks.0.ls1.gamma")):
        torch.save(content, tmp_path / "x.pth")
        with pytest.raises(CheckpointError, match=f"'{name}' is of NumPy; save it anew with torch.from_numpy"):
            read_checkpoint(tmp_path / "x.pth")


def test_a_dictionary_that_brings_methods_of_its_own_is_read_as_a_dictionary(tmp_path: Path) -> None:
    content: Any = OrderedDict(timm_state(), arch="vit_tiny_patch16_224")
    content.get = 5
    torch.save(content, tmp_path / "x.pth")
    assert read_checkpoint(tmp_path / "x.pth").timm["architecture"] == "vit_tiny_patch16_224"


def test_weights_that_are_arrays_of_numpy_are_named(tmp_path: Path) -> None:
    torch.save({"model": {key: value.numpy() for key, value in timm_state().items()}}, tmp_path / "x.pth")
    with pytest.raises(CheckpointError, match=r"x\.pth: 'model\..*(weight|bias)' is of NumPy; save it anew"):
        load(tmp_path / "x.pth")
    arrays = {key: value.numpy() for key, value in timm_state().items()}
    torch.save({key: torch.from_numpy(value) for key, value in arrays.items()}, tmp_path / "x.pth")  # the remedy
    assert_equal_to_the_clean_load(load(tmp_path / "x.pth", num_heads=2))


def text_op(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text.encode())) + text.encode()


ENCODE, LONG = b"c_codecs\nencode\n", "a" * 1000


@pytest.mark.parametrize(
    ("pickled", "allowed"),
    [
        (ENCODE + text_op(LONG) + text_op("latin1") + b"\x86R", True),
        (ENCODE + b"q\0" + text_op("a") + b"q\1" + text_op("latin1") + b"q\2\x86R0h\0h\1h\2\x86q\3R", True),
        (ENCODE + text_op(LONG) + text_op("hex") + b"\x86R", False),
        (ENCODE + b"q\0" + text_op(LONG) + b"q\1" + text_op("latin1") + b"q\2\x86R0h\0h\1h\2\x86R", False),
        (text_op("hex") + b"q\0" + ENCODE + text_op(LONG) + b"h\0\x86R", False),
        (ENCODE + b"q\0" + text_op(LONG) + text_op("latin1") + b"\x86R0](h\0e", False),
        (b"](" + ENCODE + b"e", False),
        (ENCODE, False),
        (text_op("x") + b"q\0" + ENCODE + b"q\0" + text_op(LONG) + text_op("latin1") + b"\x86R0h\0" + ENCODE, False),
    ],
)
def test_bytes_are_spelt_in_one_way_only(pickled: bytes, allowed: bool) -> None:
    assert _only_spells_bytes(b"\x80\x02" + pickled + b".", 1) is allowed
    assert _only_spells_bytes(b"\x80\x02K\1." + b"\x80\x02" + pickled + b".", 5) is allowed


def test_a_bare_file_is_what_a_folder_of_ours_is(tmp_path: Path) -> None:
    model = tiny_vit(num_heads=4, norm_eps=1e-3)
    folder = save(model, tmp_path / "mine")
    (tmp_path / "x.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    loaded = load(tmp_path / "x.safetensors", like=str(folder))
    assert loaded.config == model.config
    image = torch.randn(1, 3, *model.config.image_size)
    torch.testing.assert_close(loaded.model(image), model(image))
