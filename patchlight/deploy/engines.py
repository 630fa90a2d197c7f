"""Exported models, run by the engine that they were exported for."""

import importlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from patchlight.deploy.graph import Graph
from patchlight.errors import PatchlightError
from patchlight.weights.load import load

Format = Literal["onnx", "openvino", "torch", "safetensors", "triton"]

FILES: dict[Format, str] = {
    "onnx": "model.onnx",
    "openvino": "model.xml",
    "torch": "model.pt2",
    "safetensors": "model.safetensors",
    "triton": "1/model.onnx",
}
MANIFEST = "engine.json"

OPENVINO_HINTS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int8": "f32"}
"""What is computed in; OpenVINO would take bfloat16 by itself where the processor has it."""

_ENTRIES = {"format", "precision", "outputs", "channels", "size", "step", "with_preprocess", "source"}

_Run = Callable[[npt.NDArray[Any]], list[npt.NDArray[Any]]]


class Engine:
    """An exported model: `engine(images)` gives a dictionary of its outputs, as float32 arrays.

    It takes what the model took: prepared images (B, C, H, W) float32, or one photo (H, W, 3) uint8 where it was
    exported with its preparation. Threads may share it.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], run: _Run) -> None:
        self.folder = folder
        self.manifest = manifest
        self._run = run

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(self.manifest["outputs"])

    @property
    def takes_photos(self) -> bool:
        return bool(self.manifest["with_preprocess"])

    def __call__(self, images: Any) -> dict[str, npt.NDArray[np.float32]]:
        wanted = np.uint8 if self.takes_photos else np.float32
        array = np.ascontiguousarray(images)
        self._check(array, wanted)
        return dict(zip(self.outputs, (np.asarray(each, np.float32) for each in self._run(array)), strict=True))

    def _check(self, array: npt.NDArray[Any], wanted: type) -> None:
        if array.dtype != wanted or array.ndim != (3 if self.takes_photos else 4):
            kind = "one photo (H, W, 3) uint8" if self.takes_photos else "images (B, C, H, W) float32"
            raise PatchlightError(f"{self.folder}: takes {kind}, not {tuple(array.shape)} {array.dtype}")
        if self.takes_photos:
            fits = array.shape[2] == 3
        else:
            size, (down, across) = self.manifest["size"], self.manifest["step"]
            fits = array.shape[1] == self.manifest["channels"] and 0 not in array.shape
            if size is None:
                fits = fits and array.shape[2] % down == array.shape[3] % across == 0
                fits = fits and array.shape[2] >= 2 * down and array.shape[3] >= 2 * across
            else:
                fits = fits and list(array.shape[2:]) == size
        if not fits:
            raise PatchlightError(f"{self.folder}: takes {self.takes}, not {tuple(array.shape)}")

    @property
    def takes(self) -> str:
        """What goes in, in words."""
        if self.takes_photos:
            return "one photo (H, W, 3)"
        size, channels, (down, across) = self.manifest["size"], self.manifest["channels"], self.manifest["step"]
        if size is not None:
            return f"images (B, {channels}, {size[0]}, {size[1]})"
        return f"images (B, {channels}, H, W) with H a multiple of {down} and W of {across}, two at least"


def load_engine(folder: str | Path, *, threads: int | None = None) -> Engine:
    """The exported model in a folder, ready to run on the CPU, with so many threads (the engine's usual if None; those
    of torch are `torch.set_num_threads`).

    Of the form "torch" load what you trust alone: a .pt2 may hold pickles, which run code.
    """
    folder = Path(folder)
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        to = manifest["format"]
        path = folder / FILES[to]
        if not set(manifest) >= _ENTRIES:
            raise KeyError
    except (OSError, ValueError, KeyError, TypeError):
        raise PatchlightError(f"{folder}: holds no exported model; make one with `patchlight export`") from None
    if manifest.get("version") != 1:
        raise PatchlightError(f"{folder}: was exported by a later version of Patchlight; export it again")
    if not path.is_file():
        raise PatchlightError(f"{path}: is missing; export the model again")
    run = {"onnx": _onnx, "openvino": _openvino, "torch": _torch, "safetensors": _safetensors, "triton": _onnx}[to]
    if threads is not None and to in ("torch", "safetensors"):
        raise PatchlightError(f"threads={threads}: this model is run by torch; say so to torch.set_num_threads")
    try:
        return Engine(folder, manifest, run(path, manifest, threads))
    except PatchlightError:
        raise
    except Exception as error:  # each engine has errors of its own
        reason = " ".join(str(error).split())[:200]
        raise PatchlightError(f"{path}: cannot be loaded ({reason}); export the model again") from None


def _needed(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise PatchlightError(f"this needs {name}; pip install 'patchlight[{extra}]'") from None


def _onnx(path: Path, manifest: dict[str, Any], threads: int | None) -> _Run:
    onnxruntime = _needed("onnxruntime", "export")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    options.log_severity_level = 3
    # Threads that wait by spinning take the cores from whoever else is on the machine.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda images: list(session.run(None, {"image": images}))


def _openvino(path: Path, manifest: dict[str, Any], threads: int | None) -> _Run:
    openvino = _needed("openvino", "openvino")
    settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": OPENVINO_HINTS[manifest["precision"]]}
    if threads is not None:
        settings["INFERENCE_NUM_THREADS"] = threads
    model = openvino.Core().compile_model(path, "CPU", settings)
    of_thread = threading.local()

    def run(images: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        if not hasattr(of_thread, "request"):
            of_thread.request = model.create_infer_request()  # one request is one thread's at a time
        answer = of_thread.request.infer([images])
        return [np.array(answer[output]) for output in model.outputs]

    return run


def _torch(path: Path, manifest: dict[str, Any], threads: int | None) -> _Run:
    return _by_torch(torch.export.load(path).module())


def _safetensors(path: Path, manifest: dict[str, Any], threads: int | None) -> _Run:
    loaded = load(path.parent, dtype=getattr(torch, manifest["precision"]))
    return _by_torch(Graph(loaded, tuple(manifest["outputs"]), prepare=manifest["with_preprocess"]).eval())


def _by_torch(model: torch.nn.Module) -> _Run:
    def run(images: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        with torch.inference_mode():
            return [each.numpy() for each in model(torch.from_numpy(images.copy()))]

    return run
