"""The engines that `crop` takes by itself, where they are installed and their proof holds on this machine.

"auto" takes OpenVINO or onnxruntime in float32: the same numbers as torch's to six digits, so that a photo has one
answer whoever asks. "bfloat16", which has to be asked for, takes OpenVINO with half the bits: twice as fast again, with
boxes and confidences that differ a little. An export and its proof take some seconds, so they are kept in a folder of
the user's cache, by everything that they depend on.
"""

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from patchlight import __version__
from patchlight.deploy.engines import MANIFEST, Engine, Format, load_engine, openvino_core
from patchlight.errors import PatchlightError
from patchlight.files import replacing
from patchlight.json_config import parse_json
from patchlight.localizing.heat import HeatPass
from patchlight.models.prepack import prepack_linears
from patchlight.models.vit import ViT
from patchlight.reporting import SILENT, Reporter
from patchlight.weights.load import Loaded

if TYPE_CHECKING:
    from patchlight.deploy.export import Precision
    from patchlight.deploy.proof import Proof

MANY = 1000
"""Photos of a run, from which on "auto" is worth an export. Fewer are left to torch, whether the export is there
already or not, so that a run's rows do not depend on the runs before."""

LEAST_COSINE, LEAST_OVERLAP, SAME_DECISION = 0.999, 0.98, 0.97
"""What the proof of fewer bits has to show: of the heat, of the boxes, and of the decisions. One of the 38 in a proof
may differ; `benchmarks/engines.py --photos` counts them on hundreds of photos."""

ROUNDS = 9
"""How often each is timed, in turns; the least counts."""


@dataclass(frozen=True)
class Kind:
    """An engine that can be chosen."""

    name: str
    """For people, and what rows are said to be made with: the weights are known beside it."""
    to: Format
    precision: "Precision"
    needs: tuple[str, ...]
    extra: str

    def missing(self) -> str | None:
        """What it needs and this machine has not, in words."""
        absent = next((each for each in self.needs if importlib.util.find_spec(each) is None), None)
        if absent is not None:
            return f"{absent} is not installed; pip install 'patchlight[{self.extra}]'"
        if self.precision == "bfloat16" and "BF16" not in openvino_core().get_property(
            "CPU", "OPTIMIZATION_CAPABILITIES"
        ):
            return "this processor does not compute bfloat16"
        return None


EXPORTERS = ("onnx", "onnxscript")
WHOLE = (
    Kind("openvino in float32, automatic", "openvino", "float32", ("openvino", *EXPORTERS), "openvino"),
    Kind("onnxruntime in float32, automatic", "onnx", "float32", ("onnxruntime", *EXPORTERS), "export"),
)
"""In the order in which they are preferred."""
HALF = Kind("openvino in bfloat16, automatic", "openvino", "bfloat16", ("openvino", *EXPORTERS), "openvino")


def kind_named(name: object) -> Kind | None:
    return next((kind for kind in (*WHOLE, HALF) if kind.name == name), None)


def suits(loaded: Loaded) -> bool:
    """Whether a model is one that they are made for: a ViT on the CPU that was taught to find subjects."""
    return isinstance(loaded.model, ViT) and loaded.subject is not None and loaded.device.type == "cpu"


def cache_folder() -> Path:
    """PATCHLIGHT_CACHE, or patchlight in the user's cache."""
    if given := os.environ.get("PATCHLIGHT_CACHE"):
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "patchlight"


def chosen_engine(loaded: Loaded, kind: Kind, reporter: Reporter = SILENT) -> Engine:
    """The model by that engine, exported if it was not before; raises PatchlightError that says why not."""
    if (reason := kind.missing()) is not None:
        raise PatchlightError(reason)
    folder = cache_folder() / "engines" / _key(loaded, kind)
    refused = folder.with_name(f"{folder.name}.json")
    if (reason := _refused(refused)) is not None:
        raise PatchlightError(reason)
    if not (folder / MANIFEST).is_file():
        reporter.tell(f"{loaded.provenance.source}: exporting it to {kind.to} in {kind.precision}, once, into {folder}")
        _make(loaded, kind, folder, refused)
    return load_engine(folder)


def _refused(path: Path) -> str | None:
    """Why its proof did not hold, if it was tried before."""
    try:
        return str(parse_json(path.read_bytes())["refused"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _make(loaded: Loaded, kind: Kind, folder: Path, refused: Path) -> None:
    from patchlight.deploy.export import export  # which takes its time

    outputs = ["subject", "logits"] if loaded.config.num_classes else ["subject"]
    unproven = folder.with_name(f"{folder.name}.{os.getpid()}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a thread for each photo is what `crop` has, and what is to be compared
    try:
        made = export(
            loaded, unproven, to=kind.to, precision=kind.precision, outputs=outputs, overwrite=True, reporter=SILENT
        )
        reason = _not_good_enough(made.proof) or _not_faster(loaded, load_engine(unproven, threads=1))
    except PatchlightError as error:
        _, failed, reason = str(error).rpartition("its proof fails: ")
        if not failed:  # but, say, a full disk
            raise
    finally:
        torch.set_num_threads(threads)
    if reason is None:
        with contextlib.suppress(OSError):  # another process was sooner
            unproven.replace(folder)
    else:
        with contextlib.suppress(OSError), replacing(refused) as temporary:
            temporary.write_text(json.dumps({"refused": reason}), "utf-8")
    shutil.rmtree(unproven, ignore_errors=True)
    if reason is not None:
        raise PatchlightError(reason)


def _not_good_enough(proof: "Proof") -> str | None:
    """What does not hold here, in words; the proof of float32 has limits that are narrower by themselves."""
    cosine = proof.outputs["subject"].cosine
    if cosine < LEAST_COSINE:
        return f"its heat has a cosine of {cosine:.5f}, less than {LEAST_COSINE}"
    if proof.same_box is None or proof.same_box < LEAST_OVERLAP:
        return f"its boxes overlap by {proof.same_box or 0:.3f}, less than {LEAST_OVERLAP}"
    if proof.same_decision is None or proof.same_decision < SAME_DECISION:
        return f"{proof.same_decision or 0:.1%} of its decisions are the same, less than {SAME_DECISION:.0%}"
    return None


def _not_faster(loaded: Loaded, engine: Engine) -> str | None:
    """Than torch as `crop` runs it, for one image in one thread."""
    height, width = loaded.preprocess.config.image_size
    image_BCHW = torch.zeros(1, loaded.config.in_channels, height, width)
    packed = dataclasses.replace(loaded, model=prepack_linears(loaded.model))
    took: dict[str, list[float]] = {"engine": [], "torch": []}
    for _ in range(ROUNDS):
        for name, each in (("engine", engine.loaded), ("torch", packed)):
            begun = time.perf_counter()
            HeatPass(each, image_BCHW, ["subject"])
            took[name].append(time.perf_counter() - begun)
    return None if min(took["engine"]) < min(took["torch"]) else "it is no faster than torch here"


def _key(loaded: Loaded, kind: Kind) -> str:
    """Of everything that the exported model and its proof depend on."""
    parts: dict[str, Any] = {
        "kind": kind.name,
        "weights": loaded.provenance.sha256,
        "config": loaded.config.to_dict(),
        "preprocess": loaded.preprocess.config.to_dict(),
        "subject": None if loaded.subject is None else loaded.subject.to_dict(),
        "groups": None if loaded.groups is None else loaded.groups.fingerprint(),
        "patchlight": __version__,
        "processor": _processor(),
    }
    for name in ("torch", *kind.needs):
        with contextlib.suppress(PackageNotFoundError):
            parts[name] = version(name)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def _processor() -> str:
    """Its name, which the proof's times and the numbers of fewer bits hang on."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith("model name"):
                return line
    return f"{platform.machine()} {platform.processor()}"
