"""Checkpoint files to plain tensors, and nothing else: no code is run, no odd tensor comes through.

Formats: safetensors (one file, or shards with an index), torch's zip and legacy files (`weights_only=True`, always),
and NumPy's npz (the original JAX checkpoints). Whatever is wrong with a file is one line that names it.
"""

import argparse
import io
import json
import math
import pickle
import pickletools
import re
import stat
import sys
import warnings
import zipfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from patchlight.errors import PatchlightError, and_more

MAX_TENSORS = 100_000
MAX_NAME = 500
MAX_JSON_BYTES = 10_000_000  # a shard index of the largest models is a few megabytes; in memory it is 20 times that

# What a ViT may be kept in, and safetensors' names for it.
TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


# Queries, keys and values, and the inputs of a gated MLP, under the names of those who keep them apart.
JOINED_PARTS = re.compile(r"\.(query|key|value|[qkv]_proj|gate_proj|up_proj|w1|w2)\.(weight|bias)$")


class _NotWeights:
    """Placeholder for any object of a pickle that is not a tensor: accepts all arguments and runs no code."""

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class _NumpyArray(_NotWeights):
    """Placeholder for a NumPy array, which may be a weight."""


# What training scripts put beside the weights: their command line, and NumPy's numbers and arrays, by what makes them.
_BESIDE_WEIGHTS: list[Any] = [
    argparse.Namespace,
    *((_NotWeights, f"numpy.{name}") for name in ("dtype", "ndarray")),
    *(
        (stand_in, f"numpy.{core}.multiarray.{name}")
        for core in ("core", "_core")
        for name, stand_in in (("scalar", _NotWeights), ("_reconstruct", _NumpyArray))
    ),
]


class CheckpointError(PatchlightError):
    """A checkpoint that cannot be used; the message names the file and the reason."""


class Tensors(dict[str, Tensor]):
    """Tensors by name, and what the file says of the model beside them."""

    timm: Mapping[str, Any]
    """What timm's training script writes down, in the form of timm's config.json; {} where it is not one of its."""

    def __init__(self, tensors: Mapping[str, Tensor], timm: Mapping[str, Any] | None = None) -> None:
        super().__init__(tensors)
        self.timm = timm or {}


def read_checkpoint(path: Path) -> Tensors:
    """Every tensor of a checkpoint file under its own name, on the CPU; nested folders of a .pt become dotted names."""
    check_is_file(path)
    if path.suffix == ".json":
        return Tensors(read_shards(path))
    if path.suffix == ".npz":
        return Tensors(_read_npz(path))
    if path.suffix == ".safetensors":
        return Tensors(read_safetensors(path))
    return _read_torch(path)


def check_is_file(path: Path) -> None:
    """Refuse what is not a plain file with something in it, without opening it (a pipe would wait for ever)."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:  # a name with a zero in it is a ValueError
        raise CheckpointError(f"{path}: {(getattr(error, 'strerror', None) or 'cannot be read').lower()}") from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: not a regular file")
    if status.st_size == 0:
        raise CheckpointError(f"{path}: the file is empty; fetch it again")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, from a file of limited size."""
    check_is_file(path)
    if path.stat().st_size > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: {path.stat().st_size:,} bytes is too much for a JSON file")
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({_one_line(error)})") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(values).__name__}")
    return values


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of the file, mapped: pages are read when they are used, and writing to a tensor does not reach the
    file. (Like every mapped file, it may be deleted or replaced, but not written over, while the tensors live.)

    Parts that `convert` will join have a mapping of their own, so that its pages go when they are joined.
    """
    check_is_file(path)
    start = _first_bytes(path)
    length = int.from_bytes(start[:8], "little")
    if length > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{path}: {_what_it_is(start) or f'not a whole safetensors file (a header of {length:,} bytes)'}"
        )
    tensors: dict[str, Tensor] = {}
    try:
        # The library checks the header when it opens the file: sizes, offsets, overlaps, types.
        with (
            safe_open(path, framework="pt") as mapped,
            safe_open(path, framework="pt") as parts,
            path.open("rb") as file,
        ):
            file.seek(8)
            header = json.loads(file.read(length), object_pairs_hook=lambda pairs: _without_repeats(pairs, path))
            header.pop("__metadata__", None)
            _check_names(header, path)
            for name, entry in header.items():
                if entry["dtype"] not in TYPES:
                    kind = entry["dtype"]
                    raise CheckpointError(
                        f"{path}: tensor {name!r} is of type {kind}, which no supported model's weights have"
                    )
                try:
                    tensors[name] = (parts if JOINED_PARTS.search(name) else mapped).get_tensor(name)
                except (RuntimeError, TypeError, OverflowError, MemoryError):  # more than torch can count, or hold
                    shape = _shape(entry["shape"])
                    raise CheckpointError(f"{path}: no memory for tensor {name!r} of shape {shape}") from None
    except CheckpointError:
        raise
    except (SafetensorError, OSError, ValueError, RuntimeError, TypeError, OverflowError, MemoryError) as error:
        what = _what_it_is(start) or f"not a whole safetensors file ({_one_line(error)})"
        raise CheckpointError(f"{path}: {what}") from None
    return tensors


def read_shards(index: Path) -> dict[str, Tensor]:
    """All the safetensors files that a `*.safetensors.index.json` names, which must lie beside it."""
    weight_map = read_json(index).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(name, str) for name in weight_map.values())
    ):
        raise CheckpointError(f"{index}: no weight_map of names to files")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name or not name.endswith(".safetensors") or not name.isprintable():
            raise CheckpointError(f"{index}: names the shard {name!r}; shards are .safetensors files beside the index")
        shard = read_safetensors(index.parent / name)
        twice = sorted(set(shard) & set(tensors))
        if twice:
            raise CheckpointError(f"{index}: tensor {twice[0]!r} is in two shards")
        tensors |= shard
    missing = sorted(set(weight_map) - set(tensors))
    if missing:
        raise CheckpointError(f"{index}: the shards lack {missing[0]!r}" + and_more(len(missing), 1))
    return tensors


def _read_torch(path: Path) -> Tensors:
    start = _first_bytes(path)
    is_zip = _is_zip(path)
    if is_zip:
        _check_zip(path, stored_only=True)
    elif start.startswith(b"PK"):
        raise CheckpointError(f"{path}: the archive is cut short or damaged; fetch it again")
    elif not start.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        raise CheckpointError(f"{path}: {_what_it_is(start) or 'neither safetensors, nor torch, nor npz'}")
    _check_calls(path, is_zip)
    try:
        # Mapped, a storage can never be longer than the file; read, it is as long as the pickle says, memory or not.
        with torch.serialization.safe_globals(_BESIDE_WEIGHTS), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch has to say about old files and other pickles is not our advice
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"it wants to call {wanted[1]}" if wanted else "it is damaged or holds more than tensors"
        raise CheckpointError(f"{path}: refused, {what}; ask its author for a safetensors file") from None
    except Exception as error:  # torch's reader raises whatever its parts raise
        raise CheckpointError(f"{path}: not a whole torch file ({_one_line(error)}); fetch it again") from None
    found = _flatten(content, path)
    _check_names(found, path)
    for name, tensor in found.items():
        _check_plain(name, tensor, path)
    claimed, size = sum(tensor.numel() * tensor.element_size() for tensor in found.values()), path.stat().st_size
    # Some tensors are there under two names, and are stored once; a thousand names are a trick.
    if claimed > 4 * size + 1_000_000:
        raise CheckpointError(f"{path}: its tensors claim {claimed:,} bytes, and the file has {size:,}; refused")
    # Memory of our own: a mapped tensor would change, or end the process, when the file is written anew.
    own = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in found.items()}
    return Tensors(own, _timm_config(content))


def _timm_config(content: Any) -> dict[str, Any]:
    """The architecture that timm's training script names beside the weights, and what its command line changed."""
    # By dict's own methods: an OrderedDict of a pickle may bring others.
    architecture = dict.get(content, "arch") if isinstance(content, dict) else None
    if not isinstance(architecture, str):
        return {}
    arguments = dict.get(content, "args")
    given = dict(vars(arguments)) if isinstance(arguments, argparse.Namespace) else {}
    changed = given.get("model_kwargs")
    settings = {
        "img_size": given.get("img_size"),
        "global_pool": given.get("gp"),
        **(dict.copy(changed) if isinstance(changed, dict) else {}),
    }
    return {
        "architecture": architecture,
        "model_args": {name: value for name, value in settings.items() if value is not None},
    }


def _check_calls(path: Path, is_zip: bool) -> None:
    """Refuse the two calls that torch allows a pickle and that can take any memory or time."""
    if is_zip:
        try:
            with zipfile.ZipFile(path) as archive:
                pickles = [entry for entry in archive.infolist() if entry.filename.endswith("data.pkl")]
                if sum(entry.file_size for entry in pickles) > MAX_JSON_BYTES:
                    raise CheckpointError(f"{path}: its pickle is too long for a checkpoint; refused")
                contents = [archive.read(entry) for entry in pickles]
        except CheckpointError:
            raise
        except Exception as error:  # zipfile raises whatever its parts raise
            raise CheckpointError(f"{path}: a damaged archive ({_one_line(error)}); fetch it again") from None
    else:  # the pickles come first, and are short beside the storages
        with path.open("rb") as file:
            contents = [file.read(MAX_JSON_BYTES)]
    for content in contents:
        for call in ("bytearray", "_codecs.encode"):
            if call.replace(".", "\n").encode() + b"\n" not in content:
                continue
            if call == "bytearray" or not _only_spells_bytes(content, 1 if is_zip else _PICKLES_OF_OLD_FILES):
                raise CheckpointError(
                    f"{path}: refused, it wants to call {call}; ask its author for a safetensors file"
                )


_PICKLES_OF_OLD_FILES = 5  # a magic number, a version, the machine, the content, the storages' names


def _only_spells_bytes(content: bytes, pickles: int) -> bool:
    """Whether `_codecs.encode` is only there as pickle writes bytes: called at once, with a text that stands right
    there (or one letter from further up) and 'latin1'. So it makes no more bytes than the file has.
    """
    texts: dict[Any, str] = {}  # by their numbers in the pickle's memory
    encode: set[Any] = set()  # the numbers under which the pickle remembers it
    expected: list[str] = []  # what has to follow a call that has begun
    begins, text = False, None  # whether the last thing on the stack is `encode`, or a text
    for name, argument in _operations(content, pickles):
        if name in ("BINPUT", "LONG_BINPUT"):
            encode.discard(argument)
            texts.pop(argument, None)
            if begins:
                encode.add(argument)
            elif text is not None:
                texts[argument] = text
            continue
        begins = (name, argument) == ("GLOBAL", "_codecs encode")
        text = argument if name == "BINUNICODE" else None
        if name in ("BINGET", "LONG_BINGET"):
            begins, text = argument in encode, texts.get(argument)
        wanted, *expected = expected or [""]
        fits = {
            "": True,
            "a text": text is not None and (name == "BINUNICODE" or len(text) <= 1),
            "latin1": text == "latin1",
        }
        if not fits.get(wanted, name == wanted):
            return False
        if begins:
            expected = ["a text", "latin1", "TUPLE2", "REDUCE"]
    return not expected


def _operations(content: bytes, pickles: int) -> Iterator[tuple[str, Any]]:
    stream = io.BytesIO(content)
    for _ in range(pickles):
        try:
            for operation, argument, _ in pickletools.genops(stream):
                yield operation.name, argument
        except ValueError:  # it is damaged, as torch's reader will say
            return


def _flatten(content: Any, path: Path) -> dict[str, Tensor]:
    """The tensors in nested dictionaries, under dotted names; optimizer states and other values are passed over."""
    tensors: dict[str, Tensor] = {}
    seen = 0

    def visit(value: Any, name: str, depth: int, *, among_tensors: bool = False) -> None:
        nonlocal seen
        seen += 1
        if seen > 10 * MAX_TENSORS:  # one dictionary in many places makes any number of paths
            raise CheckpointError(f"{path}: its dictionaries hold too many values for a checkpoint")
        if depth > 8:
            raise CheckpointError(f"{path}: dictionaries are nested too deeply for a checkpoint")
        if isinstance(value, Tensor):
            if name in tensors:
                raise CheckpointError(f"{path}: tensor {name!r} is there twice")
            tensors[name] = value
        elif isinstance(value, _NumpyArray) and (among_tensors or name.endswith((".weight", ".bias"))):
            raise CheckpointError(f"{path}: {name!r} is of NumPy; save it anew with torch.from_numpy of each array")
        elif isinstance(value, Mapping):
            items = list(dict.items(value) if isinstance(value, dict) else value.items())  # a pickle may hide its own
            among_tensors = any(isinstance(inner, Tensor) for _, inner in items)
            for key, inner in items:
                if isinstance(key, str) and not (depth == 0 and "optimizer" in key):
                    visit(inner, f"{name}.{key}" if name else key, depth + 1, among_tensors=among_tensors)

    visit(content, "", 0)
    return tensors


def _check_plain(name: str, tensor: Tensor, path: Path) -> None:
    """Only dense tensors whose memory is all there; a false index or stride is found before anything is computed."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu" or tensor.is_nested:
        raise CheckpointError(f"{path}: tensor {name!r} is not a plain dense tensor")
    if tensor.dtype not in TYPES.values():
        raise CheckpointError(
            f"{path}: tensor {name!r} is of type {tensor.dtype}, which no supported model's weights have"
        )
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise CheckpointError(
            f"{path}: tensor {name!r} claims {tensor.numel():,} numbers and the file holds fewer; fetch it again"
        )


def _read_npz(path: Path) -> dict[str, Tensor]:
    if not _is_zip(path):
        start = _first_bytes(path)
        what = None if start.startswith(b"PK") else _what_it_is(start)
        raise CheckpointError(f"{path}: {what or 'not a whole npz file; fetch it again'}")
    _check_zip(path, stored_only=False)
    tensors: dict[str, Tensor] = {}
    try:
        with np.load(path, allow_pickle=False) as arrays:
            _check_names(arrays.files, path)
            for name in arrays.files:
                if name in tensors:
                    raise CheckpointError(f"{path}: array {name!r} is there twice")
                array = arrays[name]
                is_bfloat16 = array.dtype == np.dtype("V2")  # NumPy has none of its own: big_vision's files
                if array.dtype.kind not in "fiub" and not is_bfloat16:
                    raise CheckpointError(f"{path}: array {name!r} is of type {array.dtype}, not numbers")
                if sys.byteorder == "little" and array.dtype.byteorder == ">":
                    array = array.astype(array.dtype.newbyteorder("="))
                tensor = torch.from_numpy(np.ascontiguousarray(array.view(np.int16) if is_bfloat16 else array))
                tensors[name] = tensor.view(torch.bfloat16) if is_bfloat16 else tensor
    except CheckpointError:
        raise
    except Exception as error:  # numpy and zipfile raise whatever their parts raise
        raise CheckpointError(f"{path}: not a whole npz file ({_one_line(error)})") from None
    return tensors


def _is_zip(path: Path) -> bool:
    """Whether the file ends like a zip archive; zipfile raises on some damaged files instead of saying no."""
    try:
        return zipfile.is_zipfile(path)
    except Exception:
        return False


def _check_zip(path: Path, *, stored_only: bool) -> None:
    """Refuse an archive that unpacks to far more than itself, or that repeats a name."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except Exception as error:  # a false directory makes zipfile raise whatever its parts raise
        raise CheckpointError(f"{path}: a damaged archive ({_one_line(error)}); fetch it again") from None
    names = [entry.filename for entry in entries]
    if len(set(names)) != len(names):
        raise CheckpointError(f"{path}: the archive holds two entries of one name")
    if stored_only and any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise CheckpointError(f"{path}: the archive is compressed, as torch never writes it")
    if stored_only and any(name.endswith("/constants.pkl") for name in names):
        raise CheckpointError(f"{path}: a TorchScript program, not weights; ask its author for a safetensors file")
    unpacked, size = sum(entry.file_size for entry in entries), path.stat().st_size
    if unpacked > 20 * size + 1_000_000:
        raise CheckpointError(f"{path}: {size:,} bytes would unpack to {unpacked:,}; refused")


def _first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(512)
    except OSError as error:
        raise CheckpointError(f"{path}: {(error.strerror or 'cannot be read').lower()}") from None


def _what_it_is(start: bytes) -> str | None:
    """What kind of file it is, by its first bytes, if it is no checkpoint (a web page, a Git LFS pointer, ...)."""
    text = start.lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<?xml")):
        return "an HTML page, not a checkpoint; the download was answered with a web page"
    if text.startswith(b"version https://git-lfs"):
        return "a Git-LFS pointer, not the file itself; run `git lfs pull`"
    if start.startswith((b"\xff\xd8\xff", b"\x89PNG")):
        return "a picture, not a checkpoint"
    if start.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"7z\xbc\xaf")):
        return "a compressed archive; unpack it first"
    if start.startswith(b"PK"):
        return "a zip archive, which torch (.pt) or NumPy (.npz) may have written, but not a safetensors file"
    if text.startswith((b"{", b"[")):
        return "JSON text, not a checkpoint"
    return None


def _without_repeats(pairs: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
        raise CheckpointError(f"{path}: the header holds a name twice")
    return dict(pairs)


def _check_names(names: Collection[str], path: Path) -> None:
    """Refuse tensor names that would break a message into lines."""
    if len(names) > MAX_TENSORS:
        raise CheckpointError(f"{path}: {len(names):,} tensors are too many for a model")
    for name in names:
        if len(name) > MAX_NAME or not name.isprintable():
            raise CheckpointError(f"{path}: {name[:50]!r} is not the name of a tensor")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _shape(shape: list[int]) -> str:
    return "x".join(map(str, shape[:8]))


def check_finite(tensors: Mapping[str, Tensor], source: str) -> None:
    """Refuse weights that are empty, or hold NaN, infinity or what is infinite in float32, by name."""
    empty = [name for name, tensor in tensors.items() if tensor.numel() == 0]
    if empty:
        raise CheckpointError(f"{source}: tensor {empty[0]!r}{and_more(len(empty), 1)} is empty; refused")
    bad = [name for name, tensor in tensors.items() if tensor.is_floating_point() and not _all_finite(tensor)]
    if bad:
        raise CheckpointError(f"{source}: tensor {bad[0]!r}{and_more(len(bad), 1)} holds NaN or infinity; refused")


def _all_finite(tensor: Tensor) -> bool:
    # A sum is finite only if every term is, and needs no second tensor; finite terms that overflow get a closer look.
    if math.isfinite(tensor.sum(dtype=torch.float32).item()):
        return True
    return bool(torch.isfinite(tensor.float()).all())
