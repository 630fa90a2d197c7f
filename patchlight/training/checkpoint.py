"""Everything a run needs to go on exactly, in one checked file a step; the last two are kept.

A checkpoint is a safetensors file: the tensors of the state, and the rest of it, with the nesting, as JSON in the
file's metadata. `checkpoints.json` beside it names the checkpoints that count, oldest first, with their checksums;
a file that it does not name does not exist. Nothing is pickled, so nothing that is read can run.
"""

import contextlib
import errno
import hashlib
import itertools
import json
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as parse_safetensors
from torch import Tensor

from patchlight.errors import PatchlightError
from patchlight.files import replacing, sync_folder
from patchlight.json_config import parse_json
from patchlight.weights.read import TYPES

State = Any
"""A nest of dicts (with strings or whole numbers as keys), lists and tuples of tensors, numbers, strings, None."""

INDEX = "checkpoints.json"
FORMAT = "patchlight-run-1"
KEPT = 2
TYPE_NAMES = {dtype: name for name, dtype in TYPES.items()}
FILE_NAME = re.compile(r"step-\d{8,}(-\d+)?\.safetensors")
TEMPORARY_NAME = re.compile(r"\.(step-\d{8,}\.safetensors|checkpoints\.json)(\.\d+)?\.tmp")


def write_checkpoint(folder: str | Path, step: int, state: State) -> Path:
    """Write `step-00001234.safetensors` and keep the newest two; whatever goes wrong, the earlier ones stay usable.

    Checkpoints of this step or later ones belong to a future that the run went back on, and are dropped. Only one
    process may write to a folder. A tensor that occurs twice in the state is kept once, and is one tensor again when
    read; tensors come back on the CPU and contiguous.
    """
    folder = Path(folder)
    tree, tensors = flatten(state)
    earlier: list[dict[str, Any]] = []
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True)
            sync_folder(folder.parent)
        earlier = _read_index(folder)
        if not (folder / INDEX).exists():
            _write_index(folder, [])  # before the first file, so that files without an index are known to have lost it
        _sweep(folder, earlier)
        entry = _write_state(folder, step, tree, tensors, earlier)
        index = [*(old for old in earlier if old["step"] < step), entry][-KEPT:]
        _write_index(folder, index)
    except OSError as error:
        with contextlib.suppress(OSError, PatchlightError):  # a new file without its line gives its room back
            _sweep(folder, earlier + _read_index(folder))
        raise _cannot_write(folder, step, error, earlier) from None
    _sweep(folder, index)
    return folder / entry["file"]


def read_newest(folder: str | Path) -> tuple[int, State, list[str]] | None:
    """The newest whole checkpoint: its step, its state, and a line for each damaged one that was passed over.

    None where nothing was ever written; raises where all that was written is damaged.
    """
    folder = Path(folder)
    try:
        index = _read_index(folder)
    except OSError as error:
        raise PatchlightError(f"{folder / INDEX}: cannot be read ({error.strerror}); check the folder") from None
    damages: list[str] = []
    for entry in reversed(index):
        try:
            state = _read_state(folder / entry["file"], entry)
        except _DamageError as reason:
            damages.append(f"{Path(entry['file']).stem} is damaged ({reason})")
            continue
        return entry["step"], state, [f"{damage}; continuing from {Path(entry['file']).stem}" for damage in damages]
    if damages:
        raise PatchlightError(f"{folder}: {', '.join(damages)}; restore the files, or start a new run")
    return None


def newest_step(folder: str | Path) -> int:
    """Of the checkpoints that a folder names; -1 where there is none."""
    return max((entry["step"] for entry in _read_index(Path(folder))), default=-1)


def fingerprint(state: State) -> str:
    """sha256 over names, types, shapes and bytes of a state_dict, or of any state; the order of names is left out."""
    if isinstance(state, Tensor):
        told = [f"{state.dtype} {list(state.shape)} {hashlib.sha256(_bytes_of(state)).hexdigest()}"]
    elif isinstance(state, Mapping):
        told = ["dict", *sorted(f"{key!r}: {fingerprint(value)}" for key, value in state.items())]
    elif isinstance(state, list | tuple):
        told = [type(state).__name__, *map(fingerprint, state)]
    else:
        told = [json.dumps(_encode(state, (), {}, {}))]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


class _DamageError(Exception):
    """Why a checkpoint cannot be used, in a word or two."""


def flatten(state: State) -> tuple[Any, dict[str, Tensor]]:
    """The state as JSON values, in which {"tensor": name} stands for a tensor, and the tensors by name."""
    tensors: dict[str, Tensor] = {}
    return _encode(state, (), tensors, {}), tensors


def _encode(value: Any, path: tuple[str, ...], tensors: dict[str, Tensor], names: dict[tuple[Any, ...], str]) -> Any:
    """One value as JSON. An object {kind: content} is what JSON has no own form for, or bends: dicts among them."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):  # as hexadecimals where long: Python limits how long a decimal number may be
        return int(value) if abs(value) < 2**63 else {"int": hex(value)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": struct.pack("<d", value).hex()}
    if isinstance(value, Tensor):
        return {"tensor": _name_tensor(value, path, tensors, names)}
    if isinstance(value, list | tuple):
        items = [_encode(item, (*path, str(i)), tensors, names) for i, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
        items = [[_encode(k, path, {}, {}), _encode(v, (*path, str(k)), tensors, names)] for k, v in value.items()]
        return {"dict": items}
    kind = f"{type(value).__name__} {value!r:.40}"
    raise PatchlightError(f"a checkpoint cannot hold {kind} at {'/'.join(path) or 'the top'}; make it plain values")


def _name_tensor(
    tensor: Tensor, path: tuple[str, ...], tensors: dict[str, Tensor], names: dict[tuple[Any, ...], str]
) -> str:
    """The name that a tensor is written under: the path to it, or the name that the same memory has already."""
    if tensor.layout != torch.strided or tensor.dtype not in TYPE_NAMES or tensor.is_meta:
        kind = f"a {tensor.dtype} tensor on {tensor.device}" + ("" if tensor.layout == torch.strided else ", not dense")
        raise PatchlightError(f"a checkpoint cannot hold {kind} at {'/'.join(path)}; make it dense and plain")
    memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
    if tensor.numel() and memory in names:
        return names[memory]
    name = "/".join(path).encode("ascii", "backslashreplace").decode() or "state"
    while name in tensors or name == "__metadata__":
        name += "'"
    names[memory], tensors[name] = name, tensor.detach()
    return name


def unflatten(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `flatten`."""
    if isinstance(value, list):
        return [unflatten(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "dict":
        return {unflatten(key, tensors): unflatten(item, tensors) for key, item in content}
    if kind == "tuple":
        return tuple(unflatten(item, tensors) for item in content)
    if kind == "int":
        return int(content, 16)
    if kind == "float":
        return struct.unpack("<d", bytes.fromhex(content))[0]
    assert kind == "tensor"
    return tensors[content]


def _write_state(
    folder: Path, step: int, tree: Any, tensors: Mapping[str, Tensor], earlier: list[dict[str, Any]]
) -> dict[str, Any]:
    """Write the file, whole and durable, under a name that no other content has in the index; its line for there."""
    digest, size = hashlib.sha256(), 0

    def watched() -> Iterator[bytes | memoryview]:
        nonlocal size
        for piece in _safetensors_pieces(tree, tensors):
            digest.update(piece)
            size += len(piece)
            yield piece

    name = f"step-{step:08d}.safetensors"
    temporary = folder / f".{name}.tmp"
    try:
        _write_durably(temporary, watched())
        taken = {old["file"] for old in earlier if old["sha256"] != digest.hexdigest()}
        others = (f"step-{step:08d}-{number}.safetensors" for number in itertools.count(2))
        name = next(free for free in itertools.chain([name], others) if free not in taken)
        temporary.replace(folder / name)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(folder)
    return {"step": step, "file": name, "sha256": digest.hexdigest(), "bytes": size}


def _safetensors_pieces(tree: Any, tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of the file: the header's length, the header, then one tensor after the other.

    Written here and not by a library, so that a tensor at a time leaves the GPU, the checksum is of what was meant and
    not of what the disk gave back, and a full disk is an OSError: torch.save makes a RuntimeError of it that says
    nothing of the disk, and writes the whole storage of a view.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())  # so that each starts aligned
    header: dict[str, Any] = {"__metadata__": {"format": FORMAT, "state": json.dumps(tree)}}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": TYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for _, tensor in ordered:
        yield _bytes_of(tensor)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The numbers of a tensor in reading order, as they lie in memory."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _read_state(path: Path, entry: Mapping[str, Any]) -> State:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise _DamageError("missing") from None
    except OSError as error:
        raise _DamageError(f"cannot be read: {error.strerror}") from None
    if len(content) != entry["bytes"]:
        raise _DamageError(f"{len(content):,} bytes instead of {entry['bytes']:,}")
    if hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise _DamageError("checksum")
    try:
        (length,) = struct.unpack("<Q", content[:8])
        metadata = json.loads(content[8 : 8 + length])["__metadata__"]
        if metadata["format"] != FORMAT:
            raise _DamageError(f"written as {metadata['format']!r:.40}, not as {FORMAT!r}")
        return unflatten(json.loads(metadata["state"]), parse_safetensors(content))
    except _DamageError:
        raise
    except Exception as error:  # the checksum was right: only a file that somebody made can come here
        raise _DamageError(f"contents: {type(error).__name__}") from None


def _read_index(folder: Path) -> list[dict[str, Any]]:
    """The lines of checkpoints.json, oldest first; none where there is no such file."""
    path = folder / INDEX
    try:
        index = parse_json(path.read_bytes())
    except NotADirectoryError:
        return []
    except FileNotFoundError:
        lost = sorted(each.name for each in folder.glob("step-*") if FILE_NAME.fullmatch(each.name))
        if lost:
            raise PatchlightError(
                f"{path}: is missing, without which {lost[-1]} cannot be trusted; restore it, or start a new run "
                "in another folder"
            ) from None
        return []
    except ValueError:
        index = None
    if not isinstance(index, list) or not all(map(_is_line, index)):
        raise PatchlightError(f"{path}: is damaged; restore it, or start a new run in another folder")
    return index


def _write_index(folder: Path, index: list[dict[str, Any]]) -> None:
    with replacing(folder / INDEX) as temporary:
        temporary.write_text(json.dumps(index, indent=2) + "\n")


def _is_line(line: Any) -> bool:
    kinds = {"step": int, "file": str, "sha256": str, "bytes": int}
    return (
        isinstance(line, dict)
        and line.keys() == kinds.keys()
        and all(type(line[name]) is kind for name, kind in kinds.items())
        and FILE_NAME.fullmatch(line["file"]) is not None
    )


def _write_durably(path: Path, pieces: Iterator[bytes | memoryview]) -> None:
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def _sweep(folder: Path, index: list[dict[str, Any]]) -> None:
    """Remove what killed runs left and what is no longer kept: our files that the index does not name."""
    named = {entry["file"] for entry in index}
    with contextlib.suppress(OSError):  # the checkpoints that count are safe; the next write tries again
        for path in folder.iterdir():
            ours = FILE_NAME.fullmatch(path.name) or TEMPORARY_NAME.fullmatch(path.name)
            if ours and path.name not in named:
                path.unlink(missing_ok=True)


def _cannot_write(folder: Path, step: int, error: OSError, earlier: list[dict[str, Any]]) -> PatchlightError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        reason, remedy = "the disk is full", "free some space"
    else:
        reason, remedy = error.strerror or str(error), "make the folder writable"
    intact = f"{Path(earlier[-1]['file']).stem} is intact" if earlier else "from the first step, since none was saved"
    return PatchlightError(f"{folder}: step {step} could not be saved ({reason}); {remedy} and resume ({intact})")
