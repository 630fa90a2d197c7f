"""How fast a model runs here, by every engine that is installed, on real photos."""

import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from patchlight.config import PreprocessConfig
from patchlight.deploy.engines import MANIFEST, Format, load_engine
from patchlight.deploy.export import Precision, export
from patchlight.deploy.proof import some_photos
from patchlight.errors import PatchlightError
from patchlight.images.decode import Photo
from patchlight.images.preprocess import Preprocess
from patchlight.reporting import SILENT, Reporter
from patchlight.weights.load import Loaded, load
from patchlight.weights.read import read_json

ROUNDS = 15

FORMS: tuple[tuple[str, Format, Precision], ...] = (
    ("onnxruntime", "onnx", "float32"),
    ("onnxruntime", "onnx", "int8"),
    ("openvino", "openvino", "float32"),
    ("openvino", "openvino", "bfloat16"),
    ("openvino", "openvino", "int8"),
)
"""What is tried, where the engine of this name is installed."""


@dataclass(frozen=True)
class Timing:
    """What one engine takes for one batch."""

    engine: str
    precision: str
    batch: int
    seconds: float | None
    """The median; None where it could not be had."""
    said: str = ""
    """Why not."""


def bench(
    target: Loaded | str | Path,
    photos: Photo | Iterable[Photo] = (),
    *,
    batch: int = 1,
    rounds: int = ROUNDS,
    reporter: Reporter = SILENT,
) -> tuple[float, list[Timing]]:
    """Seconds for the preparation of one photo, and what each engine takes for a batch of them, in turns.

    `target` is a model, which is exported for every engine that is installed, or the folder of an exported one.
    """
    if batch < 1 or rounds < 1:
        raise PatchlightError(f"batch={batch} and rounds={rounds} must be 1 or more")
    chosen = some_photos(photos)
    ready: dict[tuple[str, str], Callable[[Any], Any]] = {}
    failed: list[Timing] = []
    if isinstance(target, str | Path) and (Path(target) / MANIFEST).is_file():
        engine = load_engine(target)
        if engine.takes_photos:
            raise PatchlightError(f"{target}: takes one photo at a time, preparation included; bench one without")
        config = PreprocessConfig.from_dict(read_json(Path(target) / "preprocess.json"))
        size = engine.manifest["size"]
        prepare = Preprocess(config.for_size((size[0], size[1])) if size else config, engine.manifest["channels"])
        ready[str(engine.manifest["format"]), str(engine.manifest["precision"])] = engine
        return _prepare_and_time(prepare, chosen[: max(batch, 8)], batch, rounds, ready, failed)
    loaded = load(target) if isinstance(target, str | Path) else target
    ready["torch", "float32"] = _torch(loaded)
    with tempfile.TemporaryDirectory() as folder:
        for name, to, precision in FORMS:
            if importlib.util.find_spec(name) is None or (
                precision == "int8" and to == "openvino" and importlib.util.find_spec("nncf") is None
            ):
                failed.append(Timing(name, precision, batch, None, "not installed"))
                continue
            reporter.tell(f"exporting for {name} in {precision}")
            try:
                out = Path(folder) / f"{name}-{precision}"
                made = export(loaded, out, to=to, precision=precision, photos=chosen, reporter=SILENT)
            except PatchlightError as error:
                failed.append(Timing(name, precision, batch, None, str(error).partition(": ")[2] or str(error)))
                continue
            ready[name, precision] = load_engine(made.folder)
        return _prepare_and_time(loaded.preprocess, chosen[: max(batch, 8)], batch, rounds, ready, failed)


def _torch(loaded: Loaded) -> Callable[[Any], Any]:
    def run(images: Any) -> Any:
        with torch.inference_mode():
            return loaded.model(torch.from_numpy(images))

    return run


def _prepare_and_time(
    prepare: Preprocess,
    photos: list[Any],
    batch: int,
    rounds: int,
    ready: dict[tuple[str, str], Callable[[Any], Any]],
    failed: list[Timing],
) -> tuple[float, list[Timing]]:
    start = time.perf_counter()
    images = [prepare(photo)[0].numpy() for photo in photos]
    if batch > 1 and len({image.shape for image in images}) > 1:
        raise PatchlightError("these photos become images of several sizes, which make no batch; use batch=1")
    preparing = (time.perf_counter() - start) / len(photos)
    batches = [
        np.stack([images[(first + place) % len(images)] for place in range(batch)]) for first in range(len(images))
    ]
    times: dict[tuple[str, str], list[float]] = {name: [] for name in ready}
    for number in range(rounds + 1):
        for name, run in ready.items():
            start = time.perf_counter()
            run(batches[number % len(batches)])
            if number:  # the first warms up
                times[name].append(time.perf_counter() - start)
    timed = [Timing(*name, batch, statistics.median(each)) for name, each in times.items()]
    return preparing, [*timed, *failed]
