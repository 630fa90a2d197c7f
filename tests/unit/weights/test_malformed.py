"""Checkpoints that are damaged, hostile or not checkpoints: each is refused in one line that names it.

Every case is made here, from a tiny model, and loaded by a child process of its own, under a limit on memory and on
time: whatever ends the child other than a `CheckpointError` fails that case. To import torch once and not a hundred
times, the children are forked from one process, which is this file run as a program (see the end).
"""

import functools
import gzip
import io
import json
import os
import pickle
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file
from torch import Tensor

from models_at_random import tiny_vit
from patchlight.weights.convert import convert_to
from patchlight.weights.vit.names import TIMM

SECONDS = 5
SPARE_BYTES = 512 << 20  # on top of a process that has imported torch


@dataclass(frozen=True)
class Case:
    """A maker of a bad checkpoint in a folder, words of the message that it must give, and settings to load it with."""

    make: Callable[[Path], Path]
    words: str
    overrides: dict[str, Any] = field(default_factory=dict)


CASES: dict[str, Case] = {}


def case(words: str, **overrides: Any) -> Callable[[Callable[[Path], Path]], Callable[[Path], Path]]:
    """Enter a maker into CASES."""

    def enter(make: Callable[[Path], Path]) -> Callable[[Path], Path]:
        CASES[make.__name__] = Case(make, words, overrides)
        return make

    return enter


def timm_state() -> dict[str, Tensor]:
    state = convert_to(tiny_vit().state_dict(), TIMM)
    for key in ("cls_token", "pos_embed"):
        state[key] = state[key].unsqueeze(0)
    return {key: value.clone() for key, value in state.items()}


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def safetensors_with(folder: Path, **changes: Tensor | None) -> Path:
    """A timm checkpoint with other tensors in place of some of its own; None takes one away."""
    state = timm_state() | changes
    save_file({key: value for key, value in state.items() if value is not None}, folder / "x.safetensors")
    return folder / "x.safetensors"


def safetensors_of(folder: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return written(folder / "x.safetensors", struct.pack("<Q", len(text)) + text + data)


def safetensors_edited(folder: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """A timm checkpoint whose header was tampered with."""
    content = save(timm_state())
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    edit(header)
    return safetensors_of(folder, header, content[8 + length :])


def torch_with(folder: Path, content: Any, **options: Any) -> Path:
    torch.save(content, folder / "x.pt", **options)
    return folder / "x.pt"


def model_folder(folder: Path, config: bytes | dict[str, Any]) -> Path:
    save_file(timm_state(), folder / "model.safetensors")
    written(folder / "config.json", config if isinstance(config, bytes) else json.dumps(config).encode())
    return folder


# Not a file, or another kind of file.


@case("empty")
def no_bytes(folder: Path) -> Path:
    return written(folder / "x.safetensors", b"")


@case("no such file")
def no_file(folder: Path) -> Path:
    return folder / "x.safetensors"


@case("no such file")
def no_torch_file(folder: Path) -> Path:
    return folder / "x.pt"


@case("found none")
def a_folder_named_like_a_file(folder: Path) -> Path:
    (folder / "x.safetensors").mkdir()
    return folder / "x.safetensors"


@case("not a regular file")
def a_pipe(folder: Path) -> Path:
    os.mkfifo(folder / "x.pt")
    return folder / "x.pt"


@case("not a regular file")
def a_pipe_in_a_folder(folder: Path) -> Path:
    os.mkfifo(folder / "model.safetensors")
    return folder


@case("no such file")
def a_dangling_link(folder: Path) -> Path:
    (folder / "x.safetensors").symlink_to(folder / "nowhere")
    return folder / "x.safetensors"


@case("symbolic links")
def a_link_to_itself(folder: Path) -> Path:
    (folder / "x.safetensors").symlink_to(folder / "x.safetensors")
    return folder / "x.safetensors"


@case("name")
def a_name_too_long(folder: Path) -> Path:
    return folder / ("x" * 5000 + ".safetensors")


@case("no such file")
def a_name_with_a_zero(folder: Path) -> Path:
    return folder / "x\0.safetensors"


HTML = b"\n<!DOCTYPE html><html><head><title>Sign in</title></head></html>" + b" " * 600
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1\nsize 12345\n"


@case("HTML")
def html_for_safetensors(folder: Path) -> Path:
    return written(folder / "x.safetensors", HTML)


@case("HTML")
def html_for_torch(folder: Path) -> Path:
    return written(folder / "x.pt", HTML)


@case("HTML")
def html_for_npz(folder: Path) -> Path:
    return written(folder / "x.npz", HTML)


@case("Git-LFS")
def lfs_pointer_for_safetensors(folder: Path) -> Path:
    return written(folder / "x.safetensors", LFS)


@case("Git-LFS")
def lfs_pointer_in_a_folder(folder: Path) -> Path:
    written(folder / "pytorch_model.bin", LFS)
    return folder


@case("picture")
def jpeg(folder: Path) -> Path:
    return written(folder / "x.pth", b"\xff\xd8\xff\xe0\0\x10JFIF" + bytes(1000))


@case("compressed")
def gzipped(folder: Path) -> Path:
    return written(folder / "x.safetensors", gzip.compress(save(timm_state())))


@case("JSON")
def json_for_torch(folder: Path) -> Path:
    return written(folder / "x.pt", b'{"error": "not found"}')


@case("neither")
def zeros(folder: Path) -> Path:
    return written(folder / "x.pt", bytes(4096))


@case("zip archive")
def torch_named_safetensors(folder: Path) -> Path:
    return torch_with(folder, timm_state()).rename(folder / "x.safetensors")


# safetensors.


@case("not a whole")
def safetensors_cut_in_its_length(folder: Path) -> Path:
    return written(folder / "x.safetensors", save(timm_state())[:5])


@case("not a whole")
def safetensors_cut_in_its_header(folder: Path) -> Path:
    return written(folder / "x.safetensors", save(timm_state())[:300])


@case("not a whole")
def safetensors_cut_in_its_data(folder: Path) -> Path:
    return written(folder / "x.safetensors", save(timm_state())[:-1000])


@case("not a whole")
def safetensors_with_more_at_the_end(folder: Path) -> Path:
    return written(folder / "x.safetensors", save(timm_state()) + bytes(8))


@case("header")
def safetensors_of_a_huge_header(folder: Path) -> Path:
    return written(folder / "x.safetensors", struct.pack("<Q", 1 << 40) + save(timm_state())[8:])


@case("header")
def safetensors_of_a_negative_header(folder: Path) -> Path:
    return written(folder / "x.safetensors", b"\xff" * 8 + save(timm_state())[8:])


@case("header")
def safetensors_of_a_header_too_long_to_be_one(folder: Path) -> Path:
    return safetensors_of(folder, b'{"__metadata__":{"x":"' + b"x" * 60_000_000 + b'"}}')


@case("not a whole")
def safetensors_whose_header_is_not_json(folder: Path) -> Path:
    return safetensors_of(folder, b"{not json at all}       ")


@case("not a whole")
def safetensors_whose_header_is_a_list(folder: Path) -> Path:
    return safetensors_of(folder, [1, 2, 3])


@case("not a whole")
def safetensors_whose_header_nests_deeply(folder: Path) -> Path:
    return safetensors_of(folder, b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}")


ENTRY = b'"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


@case("twice|not a whole")
def safetensors_with_a_name_twice(folder: Path) -> Path:
    return safetensors_of(folder, b"{" + ENTRY + b"," + ENTRY + b"}", bytes(4))


@case("twice|not a whole")
def safetensors_with_a_field_twice(folder: Path) -> Path:
    entry = b'{"x":{"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]}}'
    return safetensors_of(folder, entry, bytes(4))


@case("not a whole")
def safetensors_that_overlap(folder: Path) -> Path:
    def edit(header: dict[str, Any]) -> None:
        header["norm.bias"]["data_offsets"] = header["norm.weight"]["data_offsets"]

    return safetensors_edited(folder, edit)


@case("not a whole")
def safetensors_beyond_the_file(folder: Path) -> Path:
    def edit(header: dict[str, Any]) -> None:
        header["norm.bias"]["data_offsets"] = [1 << 40, (1 << 40) + 96]

    return safetensors_edited(folder, edit)


@case("not a whole")
def safetensors_back_to_front(folder: Path) -> Path:
    def edit(header: dict[str, Any]) -> None:
        header["norm.bias"]["data_offsets"].reverse()

    return safetensors_edited(folder, edit)


@case("not a whole")
def safetensors_of_an_unknown_type(folder: Path) -> Path:
    def edit(header: dict[str, Any]) -> None:
        header["norm.bias"]["dtype"] = "F31"

    return safetensors_edited(folder, edit)


@case("not a whole")
def safetensors_of_a_negative_shape(folder: Path) -> Path:
    def edit(header: dict[str, Any]) -> None:
        header["norm.bias"]["shape"] = [-24]

    return safetensors_edited(folder, edit)


@case("not a whole")
def safetensors_whose_shape_overflows(folder: Path) -> Path:
    def edit(header: dict[str, Any]) -> None:
        header["norm.bias"]["shape"] = [1 << 32, 1 << 32]

    return safetensors_edited(folder, edit)


@case("'x'")
def safetensors_of_nothing_many_times(folder: Path) -> Path:
    """No bytes, so the library has no complaint; but torch cannot count so far."""
    return safetensors_of(folder, {"x": {"dtype": "F32", "shape": [0, 1 << 63], "data_offsets": [0, 0]}})


@case("no ViT, Swin or ConvNeXt that we know")
def safetensors_of_nothing_too_many_times(folder: Path) -> Path:
    return safetensors_of(folder, {"x": {"dtype": "F32", "shape": [0, 1 << 62, 1 << 62], "data_offsets": [0, 0]}})


@case("it wants to call bytearray")
def pickle_that_takes_memory(folder: Path) -> Path:
    """A few bytes of pickle that torch allows, and that ask for gigabytes."""
    path = folder / "x.pt"
    path.write_bytes(b"\x80\x02c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R.")
    return path


@case("it wants to call _codecs.encode")
def pickle_that_takes_time(folder: Path) -> Path:
    text = ("\u4e00" * 60_000).encode()
    path = folder / "x.pt"
    path.write_bytes(
        b"\x80\x02c_codecs\nencode\nX" + struct.pack("<I", len(text)) + text + b"X\x08\0\0\0punycode\x86R."
    )
    return path


@case("float8|F8_E4M3")
def float8(folder: Path) -> Path:
    return safetensors_with(folder, **{"norm.bias": torch.zeros(24).to(torch.float8_e4m3fn)})


@case("C64")
def complex_numbers(folder: Path) -> Path:
    return safetensors_with(folder, **{"norm.bias": torch.zeros(24, dtype=torch.complex64)})


@case("name")
def safetensors_with_a_name_of_two_lines(folder: Path) -> Path:
    return safetensors_with(folder, **{"norm\nbias": torch.zeros(24)})


@case("name")
def safetensors_with_an_endless_name(folder: Path) -> Path:
    return safetensors_with(folder, **{"x" * 100_000: torch.zeros(24)})


@case("memory|not a whole")
def safetensors_of_a_hundred_gigabytes(folder: Path) -> Path:
    """A file with a hole in it, as a disk gives to whoever seeks: it is as large as it says."""
    size = 100 << 30
    path = safetensors_of(folder, {"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}})
    os.truncate(path, path.stat().st_size + size)
    return path


# torch.


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


@case(r"refused, it wants to call (posix|os)\.system")
def torch_that_runs_a_command(folder: Path) -> Path:
    return torch_with(folder, timm_state() | {"x": Call(os.system, f"touch {folder}/ran")})


@case(r"refused, it wants to call (posix|os)\.system")
def torch_that_runs_a_command_the_old_way(folder: Path) -> Path:
    content = timm_state() | {"x": Call(os.system, f"touch {folder}/ran")}
    return torch_with(folder, content, _use_new_zipfile_serialization=False)


@case("refused, it wants to call eval")
def torch_that_evaluates(folder: Path) -> Path:
    return torch_with(folder, {"x": Call(eval, f"open({str(folder / 'ran')!r}, 'w')")})


@case(r"refused, it wants to call (posix|os)\.system")
def plain_pickle_that_runs_a_command(folder: Path) -> Path:
    return written(folder / "x.pt", pickle.dumps(Call(os.system, f"touch {folder}/ran"), protocol=2))


@case("refused")
def plain_pickle_of_another_protocol(folder: Path) -> Path:
    return written(folder / "x.pt", pickle.dumps(Call(os.system, f"touch {folder}/ran"), protocol=4))


@case("not a whole torch file")
def plain_pickle(folder: Path) -> Path:
    return written(folder / "x.pt", pickle.dumps({"x": [1, 2, 3]}, protocol=2))


@case("refused, it wants to call pathlib")
def torch_with_a_class(folder: Path) -> Path:
    return torch_with(folder, timm_state() | {"path": folder})


@case("refused, it wants to call torch.nn.modules.linear.Linear")
def torch_with_a_whole_module(folder: Path) -> Path:
    return torch_with(folder, torch.nn.Linear(2, 2))


@case("TorchScript")
def torchscript(folder: Path) -> Path:
    """By hand, since torch deprecates writing it: what tells it is an entry of this name."""
    torch_with(folder, timm_state())
    with zipfile.ZipFile(folder / "x.pt", "a") as archive:
        archive.writestr("x/constants.pkl", pickle.dumps(()))
    return folder / "x.pt"


@case("cut short")
def torch_cut_short(folder: Path) -> Path:
    path = torch_with(folder, timm_state())
    return written(path, path.read_bytes()[:-5000])


@case("damaged|cut short|not a whole")
def torch_with_a_hole(folder: Path) -> Path:
    path = torch_with(folder, timm_state())
    content = path.read_bytes()
    return written(path, content[:20_000] + content[40_000:])


@case("not a whole torch file")
def legacy_torch_cut_short(folder: Path) -> Path:
    path = torch_with(folder, timm_state(), _use_new_zipfile_serialization=False)
    return written(path, path.read_bytes()[:-5000])


def sparse(index: int) -> Tensor:
    with torch.sparse.check_sparse_tensor_invariants(False):
        return torch.sparse_coo_tensor(torch.tensor([[index]]), torch.ones(1), (24,), check_invariants=False)


@case("not a plain dense tensor|not a whole")
def torch_with_sparse_tensors_of_false_indices(folder: Path) -> Path:
    return torch_with(folder, timm_state() | {"norm.bias": sparse(1 << 40)})


@case("not a plain dense tensor|not a whole")
def torch_with_sparse_tensors_the_old_way(folder: Path) -> Path:
    content = timm_state() | {"norm.bias": sparse(-(1 << 40))}
    return torch_with(folder, content, _use_new_zipfile_serialization=False)


@case("norm.bias.*claims 1,000,000,000,000")
def torch_of_a_stride_of_nothing(folder: Path) -> Path:
    return torch_with(folder, timm_state() | {"norm.bias": torch.zeros(1).expand(10**12)})


@case("norm.bias.*claims")
def legacy_torch_of_a_stride_of_nothing(folder: Path) -> Path:
    content = timm_state() | {"norm.bias": torch.zeros(1).expand(10**12)}
    return torch_with(folder, content, _use_new_zipfile_serialization=False)


@case("not a plain dense tensor|not a whole")
def torch_on_no_device(folder: Path) -> Path:
    return torch_with(folder, timm_state() | {"norm.bias": torch.zeros(24, device="meta")})


@case("complex64")
def torch_of_complex_numbers(folder: Path) -> Path:
    return torch_with(folder, timm_state() | {"norm.bias": torch.zeros(24, dtype=torch.complex64)})


@case("float8")
def torch_of_float8(folder: Path) -> Path:
    return torch_with(folder, timm_state() | {"norm.bias": torch.zeros(24).to(torch.float8_e5m2)})


def edited_pickle(path: Path, old: bytes, new: bytes) -> Path:
    """The same archive, with something else in its pickle."""
    rewritten = io.BytesIO()
    with zipfile.ZipFile(path) as before, zipfile.ZipFile(rewritten, "w") as after:
        for entry in before.infolist():
            content = before.read(entry)
            if entry.filename.endswith("data.pkl"):
                assert old in content
                content = content.replace(old, new)
            after.writestr(entry.filename, content)
    return written(path, rewritten.getvalue())


@case("not a whole|claims|fewer")
def torch_that_claims_more_numbers_than_its_storage(folder: Path) -> Path:
    """A storage of 1,001 numbers is said to be of 100,000,001: reading it would run off its end."""
    path = torch_with(folder, {"x": torch.zeros(1001)})
    more = b"J" + struct.pack("<i", 100_000_001)
    return edited_pickle(path, b"M" + struct.pack("<H", 1001), more)


@case("not a whole|claims|fewer")
def torch_that_claims_a_larger_shape_than_its_storage(folder: Path) -> Path:
    """Its storage is true and its shape is not: [77] numbers of a storage of 1,001 becomes [100,000,001]."""
    path = torch_with(folder, {"x": torch.zeros(1001)[:77]})
    return edited_pickle(path, b"K\x4d", b"J" + struct.pack("<i", 100_000_001))


@case("claim")
def torch_that_repeats_one_tensor(folder: Path) -> Path:
    """Ten thousand names for one matrix, turned over, so that each would be copied: 40 GB from 4 MB."""
    matrix = torch.zeros(1024, 1024).T
    return torch_with(folder, {f"x{number}": matrix for number in range(10_000)})


@case("refused|not a whole|claim")
def torch_that_asks_for_memory(folder: Path) -> Path:
    """Calls that torch lets through, since they run no code of the author's."""
    return torch_with(folder, timm_state() | {"x": Call(bytearray, 10**13)})


@case("refused|not a whole|claim")
def torch_that_asks_for_an_unwritten_tensor(folder: Path) -> Path:
    return torch_with(folder, timm_state() | {"x": Call(torch.Tensor, 10**8)})


@case("too many|nested")
def torch_that_repeats_one_dictionary(folder: Path) -> Path:
    """A small pickle with 64 ** 6 paths through it."""
    content: dict[str, Any] = {"x": torch.zeros(1)}
    for _ in range(6):
        content = {f"k{number}": content for number in range(64)}
    return torch_with(folder, content)


@case("nested too deeply")
def torch_that_holds_itself(folder: Path) -> Path:
    content: dict[str, Any] = timm_state()
    content["state_dict"] = content
    return torch_with(folder, content)


@case("nested too deeply")
def torch_nested_deeply(folder: Path) -> Path:
    content: dict[str, Any] = timm_state()
    for _ in range(100):
        content = {"model": content}
    return torch_with(folder, content)


@case("twice")
def torch_with_a_name_twice(folder: Path) -> Path:
    return torch_with(folder, {"norm.bias": torch.zeros(24), "norm": {"bias": torch.zeros(24)}})


@case("name")
def torch_with_a_name_of_two_lines(folder: Path) -> Path:
    return torch_with(folder, timm_state() | {"norm\nbias": torch.zeros(24)})


@case("no ViT")
def torch_tensor_alone(folder: Path) -> Path:
    return torch_with(folder, torch.zeros(3))


@case("no ViT")
def torch_list(folder: Path) -> Path:
    return torch_with(folder, [torch.zeros(3), torch.zeros(3)])


@case("no ViT")
def torch_string(folder: Path) -> Path:
    return torch_with(folder, "https://example.org/vit.pt")


def bomb(path: Path, name: str, head: bytes = b"") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open(name, "w") as entry:
        entry.write(head)
        for _ in range(256):
            entry.write(bytes(1 << 20))
    assert path.stat().st_size < 300_000
    return path


@case("compressed")
def torch_zip_bomb(folder: Path) -> Path:
    return bomb(folder / "x.pt", "x/data.pkl")


@case("damaged")
def torch_on_several_disks(folder: Path) -> Path:
    """The end of the archive says that the rest is elsewhere."""
    path = torch_with(folder, timm_state())
    content = path.read_bytes()
    at = content.index(b"PK\x06\x07")
    return written(path, content[: at + 16] + struct.pack("<L", 7) + content[at + 20 :])


@case("two entries")
def torch_with_an_entry_twice(folder: Path) -> Path:
    path = torch_with(folder, timm_state())
    # The two names are of one length, so that no offset changes.
    return written(path, path.read_bytes().replace(b"x/data/1", b"x/data/2"))


# npz.


def npy_head(shape: str, descr: str = "'<f4'") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def npz_of(folder: Path, **entries: bytes) -> Path:
    with zipfile.ZipFile(folder / "x.npz", "w") as archive:
        for name, content in entries.items():
            archive.writestr(f"{name}.npy", content)
    return folder / "x.npz"


@case("would unpack to")
def npz_bomb(folder: Path) -> Path:
    return bomb(folder / "x.npz", "x.npy", npy_head(f"({256 << 18},)"))


@case("pickle|Object arrays")
def npz_of_objects(folder: Path) -> Path:
    np.savez(folder / "x.npz", x=np.array([Call(os.system, f"touch {folder}/ran")], dtype=object))
    return folder / "x.npz"


@case("not a whole npz")
def npz_that_claims_more_than_it_holds(folder: Path) -> Path:
    return npz_of(folder, x=npy_head("(1000000000000,)") + bytes(400))


@case("not a whole npz")
def npz_whose_shape_overflows(folder: Path) -> Path:
    return npz_of(folder, x=npy_head("(4294967296, 4294967296)") + bytes(400))


@case("not a whole npz")
def npz_of_a_negative_shape(folder: Path) -> Path:
    return npz_of(folder, x=npy_head("(-4,)") + bytes(400))


@case("not a whole npz")
def npz_whose_header_nests_deeply(folder: Path) -> Path:
    return npz_of(folder, x=npy_head("(" * 4000 + ")" * 4000))


@case("not a whole npz")
def npz_with_another_file_in_it(folder: Path) -> Path:
    return npz_of(folder, x=b"hello")


@case("two entries|twice")
def npz_with_a_name_twice(folder: Path) -> Path:
    path = npz_of(folder, x=npy_head("(1,)") + bytes(4))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("x", npy_head("(1,)") + bytes(4))  # NumPy reads it under the same name
    return path


@case("not numbers")
def npz_of_text(folder: Path) -> Path:
    np.savez(folder / "x.npz", x=np.array(["a", "b"]))
    return folder / "x.npz"


@case("not a whole npz|damaged")
def npz_cut_short(folder: Path) -> Path:
    np.savez(folder / "x.npz", x=np.zeros(1000))
    return written(folder / "x.npz", (folder / "x.npz").read_bytes()[:-100])


@case("not a whole npz")
def npz_with_a_flipped_byte(folder: Path) -> Path:
    np.savez(folder / "x.npz", x=np.zeros(1000))
    content = bytearray((folder / "x.npz").read_bytes())
    content[1000] ^= 1
    return written(folder / "x.npz", bytes(content))


# Whole files, wrong tensors.


@case("'blocks.1.mlp.fc1.weight' holds NaN")
def nan(folder: Path) -> Path:
    weight = timm_state()["blocks.1.mlp.fc1.weight"]
    weight[3, 4] = float("nan")
    return safetensors_with(folder, **{"blocks.1.mlp.fc1.weight": weight})


@case("'norm.bias' holds NaN or infinity")
def infinity(folder: Path) -> Path:
    return torch_with(folder, timm_state() | {"norm.bias": torch.full((24,), -float("inf"))})


@case("'norm.bias' holds NaN or infinity")
def both_infinities(folder: Path) -> Path:
    bias = torch.zeros(24, dtype=torch.float16)
    bias[:2] = torch.tensor([float("inf"), -float("inf")])
    return torch_with(folder, timm_state() | {"norm.bias": bias})


@case("'norm.bias' holds")
def numbers_too_large_for_float32(folder: Path) -> Path:
    return safetensors_with(folder, **{"norm.bias": torch.full((24,), 1e300, dtype=torch.float64)})


@case("missing: blocks.0.norm1.bias, norm.weight")
def missing_keys(folder: Path) -> Path:
    return safetensors_with(folder, **{"norm.weight": None, "blocks.0.norm1.bias": None})


@case("it has no norm after its last block")
def no_last_norm(folder: Path) -> Path:
    return safetensors_with(folder, **{"norm.bias": None, "norm.weight": None})


@case("unexpected: blocks.1.adapter.weight")
def unexpected_keys(folder: Path) -> Path:
    return safetensors_with(folder, **{"blocks.1.adapter.weight": torch.zeros(24)})


@case("of another shape: blocks.1.attn.qkv.weight")
def block_of_another_width(folder: Path) -> Path:
    return safetensors_with(folder, **{"blocks.1.attn.qkv.weight": torch.zeros(96, 32)})


@case("blocks.0.mlp")
def matrix_of_three_axes(folder: Path) -> Path:
    return safetensors_with(folder, **{"blocks.0.mlp.fc1.weight": torch.zeros(96, 24, 1)})


@case("promises")
def number_for_a_token(folder: Path) -> Path:
    return safetensors_with(folder, cls_token=torch.tensor(1.0))


@case("19 positions are not a square")
def positions_not_a_square(folder: Path) -> Path:
    return safetensors_with(folder, pos_embed=torch.zeros(1, 19, 24))


@case("'pos_embed' is empty")
def positions_of_no_rows(folder: Path) -> Path:
    return safetensors_with(folder, pos_embed=torch.zeros(1, 0, 24))


@case("'patch_embed.proj.weight' is empty")
def patches_of_no_pixels(folder: Path) -> Path:
    return safetensors_with(folder, **{"patch_embed.proj.weight": torch.zeros(24, 3, 0, 0)})


@case("is empty", strict=False)
def tensors_of_no_size(folder: Path) -> Path:
    """Nothing times a great deal: a model of this width is never to be made."""
    return safetensors_with(folder, **{"blocks.0.mlp.fc1.weight": torch.zeros(1 << 40, 0)})


@case("num_heads", num_heads=5)
def heads_that_do_not_divide(folder: Path) -> Path:
    return safetensors_with(folder)


@case("num_heads", num_heads=0)
def no_heads(folder: Path) -> Path:
    return safetensors_with(folder)


@case("width=48 was asked for", width=48)
def another_width_asked_for(folder: Path) -> Path:
    return safetensors_with(folder)


@case("block")
def blocks_with_a_gap(folder: Path) -> Path:
    return safetensors_with(folder, **{key: None for key in timm_state() if key.startswith("blocks.1.")})


@case("block")
def block_of_a_huge_number(folder: Path) -> Path:
    return safetensors_with(folder, **{"blocks.99999999999.norm1.weight": torch.zeros(24)})


@case("block")
def block_of_a_number_that_is_none(folder: Path) -> Path:
    return safetensors_with(folder, **{"blocks.\N{SUPERSCRIPT TWO}.norm1.weight": torch.zeros(24)})


@case("head.out.bias")
def head_without_its_bias(folder: Path) -> Path:
    return safetensors_with(folder, **{"head.bias": None})


@case("int32")
def whole_numbers_for_weights(folder: Path) -> Path:
    return safetensors_with(folder, **{"norm.bias": torch.zeros(24, dtype=torch.int32)})


@case("bool")
def yes_and_no_for_weights(folder: Path) -> Path:
    return safetensors_with(folder, **{"norm.bias": torch.zeros(24, dtype=torch.bool)})


@case("it is ResNet, which is not supported; ViT, Swin and ConvNeXt are")
def resnet(folder: Path) -> Path:
    state = {"conv1.weight": torch.zeros(8, 3, 7, 7), "layer1.0.conv1.weight": torch.zeros(8, 8, 3, 3)}
    return torch_with(folder, {"state_dict": state | {"fc.weight": torch.zeros(5, 8)}})


@case("no ViT")
def no_tensors(folder: Path) -> Path:
    return safetensors_of(folder, {})


@case("bias")
def queries_without_values(folder: Path) -> Path:
    """BEiT keeps the biases of queries and values apart; one of them alone is of no use."""
    return safetensors_with(folder, **{"blocks.0.attn.qkv.bias": None, "blocks.0.attn.q_bias": torch.zeros(24)})


@case("bias")
def mask_without_its_bias(folder: Path) -> Path:
    changes = {"blocks.0.attn.qkv.bias": None, "blocks.0.attn.qkv.bias_mask": torch.ones(72)}
    return safetensors_with(folder, **changes)


@case("fc_norm|norm.weight")
def two_tensors_for_one(folder: Path) -> Path:
    return safetensors_with(folder, **{"fc_norm.weight": torch.zeros(24)})


@case("promises")
def jax_kernel_of_one_axis(folder: Path) -> Path:
    np.savez(
        folder / "x.npz",
        **{"embedding/kernel": np.zeros(8, "f4"), "Transformer/encoder_norm/scale": np.zeros(8, "f4")},
    )
    return folder / "x.npz"


@case("gate|up|mlp")
def half_a_gated_mlp(folder: Path) -> Path:
    changes = {"blocks.0.mlp.fc1.weight": None, "blocks.0.mlp.w1.weight": torch.zeros(96, 24)}
    return safetensors_with(folder, **changes)


# Folders.


@case("found none")
def empty_folder(folder: Path) -> Path:
    return folder


@case(r"several \(a.safetensors, b.pt\)")
def two_files_in_a_folder(folder: Path) -> Path:
    save_file(timm_state(), folder / "a.safetensors")
    torch.save(timm_state(), folder / "b.pt")
    return folder


@case("config.json: not valid JSON")
def config_that_is_not_json(folder: Path) -> Path:
    return model_folder(folder, b"hidden_size: 24\n")


@case("config.json: not valid JSON")
def config_of_bytes(folder: Path) -> Path:
    return model_folder(folder, b"\xff\xfe\x00\xd8")


@case("config.json: not valid JSON")
def config_nested_deeply(folder: Path) -> Path:
    return model_folder(folder, b'{"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}")


@case("config.json: expected a JSON object, found list")
def config_that_is_a_list(folder: Path) -> Path:
    return model_folder(folder, b"[1, 2]")


@case("config.json: .* too much")
def config_of_sixty_megabytes(folder: Path) -> Path:
    return model_folder(folder, b'{"x": [' + b"[]," * 20_000_000 + b"0]}")


@case("config.json: the file is empty")
def config_of_no_bytes(folder: Path) -> Path:
    return model_folder(folder, b"")


@case("config.json: not a regular file")
def config_that_is_a_folder(folder: Path) -> Path:
    save_file(timm_state(), folder / "model.safetensors")
    (folder / "config.json").mkdir()
    return folder


@case("config.json says width=32, but its tensors have 24")
def config_of_another_width(folder: Path) -> Path:
    return model_folder(folder, {"model_type": "vit", "hidden_size": 32, "num_attention_heads": 2})


@case("config.json says depth=12, but its tensors have 3")
def config_of_another_depth(folder: Path) -> Path:
    return model_folder(folder, {"model_type": "vit", "num_hidden_layers": 12, "num_attention_heads": 2})


@case("hidden_act")
def config_of_an_unknown_activation(folder: Path) -> Path:
    return model_folder(folder, {"model_type": "vit", "hidden_act": "relu6", "num_attention_heads": 2})


def odd_configs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Values of types that their names do not promise, one at a time."""
    for name in ("hidden_size", "num_attention_heads", "image_size", "patch_size", "layer_norm_eps", "vision_config"):
        for kind, value in {"text": "many", "list": [1, 2, 3], "number": -7, "object": {"a": 1}}.items():
            # A vision_config with nothing known in it contradicts nothing; nor does a size that the table overrules.
            if (name, kind) not in (("vision_config", "object"), ("image_size", "number")):
                yield f"{name}_{kind}", {"model_type": "vit", name: value}
    for name in ("model_args", "pretrained_cfg"):
        for kind, value in {"text": "many", "list": [1, 2], "number": 7}.items():
            yield f"{name}_{kind}", {"architecture": "vit_tiny", name: value}
    yield "img_size", {"architecture": "vit_tiny", "model_args": {"img_size": "large"}}
    yield "input_size", {"architecture": "vit_tiny", "pretrained_cfg": {"input_size": 224}}
    yield "mean", {"architecture": "vit_tiny", "pretrained_cfg": {"input_size": [3, 32, 32], "mean": "grey"}}
    yield "ours", {"patchlight": 1}
    own: dict[str, Any] = {
        "empty": {},
        "lists": {"model": [], "preprocess": []},
        "unknown": {"model": {"colour": "red"}, "preprocess": {}},
        "wrong": {"model": {"width": "wide"}, "preprocess": {}},
        "crop": {"model": tiny_vit().config.to_dict(), "preprocess": {"crop_pct": "most"}},
    }
    for name in ("width", "depth", "num_heads", "mlp_dim", "num_registers", "patch_size", "image_size"):
        # A model of such a size must not be begun.
        own[f"huge_{name}"] = {"model": tiny_vit().config.to_dict() | {name: 8 * 10**9}, "preprocess": {}}
    for name, parts in own.items():
        yield f"ours_{name}", {"patchlight": {"version": 1} | parts}


for _name, _config in odd_configs():
    CASES[f"config_with_odd_{_name}"] = Case(functools.partial(model_folder, config=_config), ".")


def shards(folder: Path, *names: str) -> Path:
    """A folder with a model in two shards, and an index that names these files."""
    state = timm_state()
    half = len(state) // 2
    parts = [dict(list(state.items())[:half]), dict(list(state.items())[half:])]
    for number, part in enumerate(parts):
        save_file(part, folder / f"{number}.safetensors")
    weight_map = {key: name for part, name in zip(parts, names, strict=True) for key in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@case("names the shard '../1.safetensors'")
def shard_in_another_folder(folder: Path) -> Path:
    return shards(folder, "0.safetensors", "../1.safetensors")


@case("names the shard '/etc/1.safetensors'")
def shard_of_an_absolute_path(folder: Path) -> Path:
    return shards(folder, "0.safetensors", "/etc/1.safetensors")


@case("names the shard")
def shard_with_a_zero_in_its_name(folder: Path) -> Path:
    return shards(folder, "0.safetensors", "1\0.safetensors")


@case("names the shard")
def shard_with_half_a_character_in_its_name(folder: Path) -> Path:
    return shards(folder, "0.safetensors", "1\ud800.safetensors")


@case("names the shard 'x.pt'")
def shard_of_another_kind(folder: Path) -> Path:
    torch.save(timm_state(), folder / "x.pt")
    return shards(folder, "0.safetensors", "x.pt")


@case("2.safetensors: no such file")
def shard_missing(folder: Path) -> Path:
    return shards(folder, "0.safetensors", "2.safetensors")


@case("lack")
def shard_without_its_tensors(folder: Path) -> Path:
    return shards(folder, "0.safetensors", "0.safetensors")


@case("in two shards")
def key_in_two_shards(folder: Path) -> Path:
    shards(folder, "0.safetensors", "1.safetensors")
    save_file(timm_state(), folder / "1.safetensors")
    return folder


@case("no weight_map")
def index_without_a_map(folder: Path) -> Path:
    (folder / "model.safetensors.index.json").write_text("{}")
    return folder


@case("no weight_map")
def index_of_numbers(folder: Path) -> Path:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": 1}}')
    return folder


@case("no weight_map")
def index_of_nothing(folder: Path) -> Path:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    return folder


class Loader:
    """The process that forks a child for every checkpoint."""

    def __init__(self) -> None:
        here = Path(__file__)
        paths = [str(here.parents[3]), str(here.parents[2])]
        self.process = subprocess.Popen(
            [sys.executable, str(here)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        )

    def load(self, source: Path | None = None, *, probe: str = "", **overrides: Any) -> dict[str, Any]:
        """How the child ended: its signal (0 for none), and the error's type, message and kin, or the loaded notes."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        job = {"source": str(source), "probe": probe, "overrides": overrides}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@pytest.fixture(scope="module")
def loader() -> Iterator[Loader]:
    loader = Loader()
    yield loader
    loader.process.communicate()


@pytest.mark.parametrize("name", CASES)
def test_malformed_checkpoint_is_refused_in_one_line(name: str, loader: Loader, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    source = CASES[name].make(folder)
    result = loader.load(source, **CASES[name].overrides)
    assert result["signal"] == 0, f"the process ended by signal {result['signal']}"
    assert result["error"] == "CheckpointError", result
    message = result["message"]
    assert "\n" not in message
    assert len(message) < 1000 + len(str(source))
    assert message.startswith(str(source))
    assert re.search(CASES[name].words, message.removeprefix(str(source))), message
    assert "weights_only" not in message
    assert "safe_globals" not in message
    assert not (folder / "ran").exists()


def test_there_are_many_cases() -> None:
    assert len(CASES) >= 100


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_whole_checkpoint_loads_under_the_same_limits(suffix: str, loader: Loader, tmp_path: Path) -> None:
    path = safetensors_with(tmp_path) if suffix == "safetensors" else torch_with(tmp_path, timm_state())
    result = loader.load(path, num_heads=2)
    assert (result["signal"], result["error"]) == (0, None), result


@pytest.mark.parametrize(
    ("probe", "signal", "error"), [("memory", 0, "MemoryError"), ("crash", 11, None), ("hang", 14, None)]
)
def test_crash_hang_and_greed_would_be_seen(probe: str, signal: int, error: str | None, loader: Loader) -> None:
    result = loader.load(probe=probe)
    assert (result["signal"], result["error"]) == (signal, error)


def test_not_strict_says_what_is_missing(loader: Loader, tmp_path: Path) -> None:
    path = safetensors_with(tmp_path, **{"norm.bias": None, "blocks.1.attn.qkv.weight": torch.zeros(96, 32)})
    result = loader.load(path, strict=False, num_heads=2)
    assert "missing: norm.bias" in result["notes"]
    assert "of another shape: blocks.1.attn.qkv.weight" in result["notes"]


def run_jobs() -> None:
    """One job a line on standard input, one result a line on standard output."""
    import resource
    import signal
    import time
    import warnings

    from patchlight.weights.load import load

    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".*nothing says which architecture it is")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:  # what torch imports at its first use is imported before the forks
        load(safetensors_with(Path(folder)), num_heads=2)
    probes = {
        "memory": lambda: bytearray(2 * SPARE_BYTES),
        "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
        "hang": lambda: time.sleep(10 * SECONDS),
    }

    def child(job: dict[str, Any]) -> dict[str, Any]:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + SPARE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        if job["probe"]:
            signal.alarm(1)
        else:  # of the processor's time, which other tests share
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            if job["probe"]:
                probes[job["probe"]]()
            loaded = load(job["source"], **job["overrides"])
        except BaseException as error:
            return {"error": type(error).__name__, "message": str(error)[:20_000]}
        return {"error": None, "notes": loaded.notes}

    for line in sys.stdin:
        reading, writing = os.pipe()
        number = os.fork()
        if number == 0:
            result = child(json.loads(line))
            os.write(writing, json.dumps(result).encode())
            os._exit(0)
        os.close(writing)
        with open(reading, "rb") as pipe:
            result = json.loads(pipe.read() or b'{"error": null}')
        _, status = os.waitpid(number, 0)
        sys.stdout.write(json.dumps(result | {"signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    run_jobs()
