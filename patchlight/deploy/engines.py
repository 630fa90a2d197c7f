"""Exported models, run by the engine that they were exported for."""

import dataclasses
import functools
import hashlib
import importlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np
import numpy.typing as npt
import torch

from patchlight.config import PreprocessConfig
from patchlight.deploy.graph import Graph, Output, check_outputs
from patchlight.errors import PatchlightError
from patchlight.families import config_from_dict
from patchlight.images.preprocess import Preprocess
from patchlight.json_config import parse_json
from patchlight.models.families import make_model
from patchlight.models.prepack import prepack_linears
from patchlight.remote import on_disk
from patchlight.weights.about import groups_of, labels_of, licence_of, subject_of
from patchlight.weights.find import Found
from patchlight.weights.load import Loaded, Provenance, load

Format = Literal["onnx", "openvino", "torch", "safetensors", "triton"]

FILES: dict[Format, str] = {
    "onnx": "model.onnx",
    "openvino": "model.xml",
    "torch": "model.pt2",
    "safetensors": "model.safetensors",
    "triton": "1/model.onnx",
}
MANIFEST = "engine.json"

RUNTIMES: dict[Format, str] = {
    "onnx": "onnxruntime",
    "openvino": "openvino",
    "torch": "torch",
    "safetensors": "torch",
    "triton": "onnxruntime",
}
"""What runs each form."""

OPENVINO_HINTS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int8": "f32"}
"""What is computed in; OpenVINO would take bfloat16 by itself where the processor has it."""


def _are_sides(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(side) is int and 0 < side < 2**16 for side in value)


_ENTRIES: dict[str, Callable[[Any], Any]] = {
    "format": lambda value: value in FILES,
    "precision": lambda value: value in OPENVINO_HINTS,
    "outputs": lambda value: (
        bool(value) and isinstance(value, list) and all(each in get_args(Output) for each in value)
    ),
    "channels": lambda value: type(value) is int and 0 < value < 2**16,
    "size": lambda value: value is None or _are_sides(value),
    "step": _are_sides,
    "with_preprocess": lambda value: isinstance(value, bool),
    "source": lambda value: isinstance(value, str),
    "model": lambda value: isinstance(value, dict),
}
"""What the manifest of an exported model must have, and whether a value can be that."""

_Run = Callable[[npt.NDArray[Any]], list[npt.NDArray[Any]]]


class Engine:
    """An exported model: `engine(images)` gives a dictionary of its outputs, as float32 arrays.

    It takes what the model took: prepared images (B, C, H, W) float32, or one photo (H, W, 3) uint8 where it was
    exported with its preparation. Threads may share it. `localize`, `classify` and `crop_photos` take it for a model.
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

    @functools.cached_property
    def loaded(self) -> Loaded:
        """The model that was exported, but for its weights: what functions that take a model take this for."""
        if self.takes_photos:
            raise PatchlightError(
                f"{self.folder}: prepares photos itself, which is done here already; export it without its preparation"
            )
        about, size = self.manifest["model"], self.manifest["size"]
        try:
            own = about["patchlight"]
            found = Found(self.manifest["source"], self.folder, {"patchlight": own}, {}, None)
            config, preprocess = config_from_dict(own["model"]), PreprocessConfig.from_dict(own["preprocess"])
            labels = labels_of(found, config)
            with torch.device("meta"):
                model = make_model(config).eval()
            return Loaded(
                model=model,
                config=config,
                preprocess=Preprocess(
                    preprocess.for_size((size[0], size[1])) if size else preprocess, config.in_channels
                ),
                labels=labels,
                subject=subject_of(found),
                provenance=Provenance(
                    self.manifest["source"], about["origin"], self.folder, licence_of(found), about["sha256"]
                ),
                why=dict.fromkeys(own["model"], MANIFEST),
                notes=(),
                groups=groups_of(found, labels),
                engine=self,
            )
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise PatchlightError(f"{self.folder / MANIFEST}: is damaged ({reason}); export the model again") from None

    @property
    def label(self) -> str:
        """For people: "openvino in bfloat16"."""
        return f"{RUNTIMES[self.manifest['format']]} in {self.manifest['precision']}"

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of all that its numbers depend on, besides the weights: what runs it, and the files that are run."""
        digest = hashlib.sha256()
        main = self.folder / FILES[self.manifest["format"]]
        for path in sorted(main.parent.glob(f"{main.stem}.*")):  # weights may lie beside the graph
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return f"{self.label}, {digest.hexdigest()[:16]}"

    def shared_by(self, callers: int) -> Self:
        """The same for so many threads that call it at once, each with a core for itself: their rows do not depend on
        how many there are, and none waits for another that lost its core to some other process."""
        if self.manifest["format"] in ("torch", "safetensors"):
            return self  # whose threads are torch's
        return type(self)(self.folder, self.manifest, _started(self.folder, self.manifest, callers, callers))

    def __call__(self, images: Any) -> dict[str, npt.NDArray[np.float32]]:
        wanted = np.uint8 if self.takes_photos else np.float32
        array = np.ascontiguousarray(images)
        self._check(array, wanted)
        answers = self._run(array)
        if len(answers) != len(self.outputs):
            raise PatchlightError(
                f"{self.folder}: gives {len(answers)} outputs, and {MANIFEST} names {len(self.outputs)}; export the "
                "model again"
            )
        return {name: np.asarray(each, np.float32) for name, each in zip(self.outputs, answers, strict=True)}

    def _check(self, array: npt.NDArray[Any], wanted: type) -> None:
        if array.dtype != wanted or array.ndim != (3 if self.takes_photos else 4):
            kind = "one photo (H, W, 3) uint8" if self.takes_photos else "images (B, C, H, W) float32"
            raise PatchlightError(f"{self.folder}: takes {kind}, not {tuple(array.shape)} {array.dtype}")
        if not self.accepts(array.shape):
            raise PatchlightError(f"{self.folder}: takes {self.takes}, not {tuple(array.shape)}")

    def accepts(self, shape: Sequence[int]) -> bool:
        """Whether it takes images of this shape, (B, C, H, W); or a photo (H, W, 3), where it prepares them."""
        if self.takes_photos:
            return shape[2] == 3
        size, (down, across) = self.manifest["size"], self.manifest["step"]
        if shape[1] != self.manifest["channels"] or 0 in shape:
            return False
        if size is not None:
            return list(shape[2:]) == size
        return shape[2] % down == shape[3] % across == 0 and shape[2] >= 2 * down and shape[3] >= 2 * across

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
    folder = on_disk(folder)
    try:
        manifest = parse_json((folder / MANIFEST).read_text("utf-8"))
        to = manifest["format"]
        path = folder / FILES[to]
    except (OSError, ValueError, LookupError, TypeError):
        raise PatchlightError(f"{folder}: holds no exported model; make one with `patchlight export`") from None
    if manifest.get("version") != 1:
        raise PatchlightError(f"{folder}: was exported by a later version of Patchlight; export it again")
    for name, can_be in _ENTRIES.items():
        try:
            fits = name in manifest and can_be(manifest[name])
        except TypeError:  # a list is no name
            fits = False
        if not fits:
            raise PatchlightError(f"{folder / MANIFEST}: is damaged ({name}); export the model again")
    if not path.is_file():
        raise PatchlightError(f"{path}: is missing; export the model again")
    if threads is not None and to in ("torch", "safetensors"):
        raise PatchlightError(f"threads={threads}: this model is run by torch; say so to torch.set_num_threads")
    return Engine(folder, manifest, _started(folder, manifest, threads, 1))


def _started(folder: Path, manifest: dict[str, Any], threads: int | None, callers: int) -> _Run:
    """The model, ready to be run by so many callers at once, who share the threads."""
    to = manifest["format"]
    path = folder / FILES[to]
    run = {"onnx": _onnx, "openvino": _openvino, "torch": _torch, "safetensors": _safetensors, "triton": _onnx}[to]
    try:
        return run(path, manifest, threads, callers)
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


def _onnx(path: Path, manifest: dict[str, Any], threads: int | None, callers: int) -> _Run:
    onnxruntime = _needed("onnxruntime", "export")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 0 if threads is None else max(1, threads // callers)
    options.log_severity_level = 3
    # Threads that wait by spinning take the cores from whoever else is on the machine.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda images: list(session.run(None, {"image": images}))


@functools.cache
def openvino_core() -> Any:
    """OpenVINO's core, one for the process, which stays until its end.

    A core's CPU plugin gives its thread another stack for signals and, when it goes, gives back the one that it had
    found. Of two cores, the second to go gives back what the first has freed, and the next Ctrl-C is a segmentation
    fault (OpenVINO 2026.4).
    """
    core = _needed("openvino", "openvino").Core()
    core.get_property("CPU", "FULL_DEVICE_NAME")  # loads the plugin, before any that others make and drop
    return core


def _openvino(path: Path, manifest: dict[str, Any], threads: int | None, callers: int) -> _Run:
    settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": OPENVINO_HINTS[manifest["precision"]]}
    if threads is not None:
        settings["INFERENCE_NUM_THREADS"] = threads
        settings["NUM_STREAMS"] = callers
    model = openvino_core().compile_model(path, "CPU", settings)
    of_thread = threading.local()

    def run(images: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        if not hasattr(of_thread, "request"):
            of_thread.request = model.create_infer_request()  # one request is one thread's at a time
        answer = of_thread.request.infer([images])
        return [np.array(answer[output]) for output in model.outputs]

    return run


def _torch(path: Path, manifest: dict[str, Any], threads: int | None, callers: int) -> _Run:
    return _by_torch(torch.export.load(path).module())


def _safetensors(path: Path, manifest: dict[str, Any], threads: int | None, callers: int) -> _Run:
    loaded = load(path.parent, dtype=getattr(torch, manifest["precision"]))
    loaded = dataclasses.replace(loaded, model=prepack_linears(loaded.model))
    outputs = check_outputs(loaded, tuple(manifest["outputs"]))
    return _by_torch(Graph(loaded, outputs, prepare=manifest["with_preprocess"]).eval())


def _by_torch(model: torch.nn.Module) -> _Run:
    def run(images: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        with torch.inference_mode():
            return [each.numpy() for each in model(torch.from_numpy(images.copy()))]

    return run
