"""A model in a file that other engines run, with what else they need to know and the proof that it is the same."""

import contextlib
import copy
import dataclasses
import functools
import importlib
import json
import logging
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.nn.attention import SDPBackend, sdpa_kernel

from patchlight import __version__
from patchlight.config import Size
from patchlight.deploy.engines import FILES, MANIFEST, OPENVINO_HINTS, Format, load_engine
from patchlight.deploy.graph import MEANINGS, Graph, Output, check_outputs
from patchlight.deploy.proof import Proof, part_of, preparation_at, prove, some_photos
from patchlight.errors import PatchlightError
from patchlight.images.decode import Photo, decode
from patchlight.localizing.boxes import AGREE, HOTTEST_SHARE, OF_THE_HOTTEST, VOTES_FROM
from patchlight.remote import on_disk
from patchlight.reporting import Reporter, on_terminal
from patchlight.weights.load import Loaded, load
from patchlight.weights.save import own_part, save

Precision = Literal["float32", "float16", "bfloat16", "int8"]

LARGEST_BATCH = 4096
LARGEST_SIDE = 16_384

CALIBRATION_PHOTOS = 128
"""At most so many photos tell an int8 model the ranges of its numbers."""

FEWEST_INPUTS = 64
"""Where there are fewer photos, parts of them are taken, too."""


@dataclass(frozen=True)
class Exported:
    """What `export` wrote."""

    folder: Path
    proof: Proof


def export(
    model: Loaded | str | Path,
    out: str | Path,
    *,
    to: Format = "onnx",
    precision: Precision = "float32",
    size: int | Size | None = None,
    outputs: Sequence[str] = (),
    with_preprocess: bool = False,
    photos: Photo | Iterable[Photo] = (),
    overwrite: bool = False,
    reporter: Reporter | None = None,
) -> Exported:
    """Write `model` to the folder `out` for another engine, and prove on this machine that it gives the same.

    `to`: "onnx" (onnxruntime), "openvino", "torch" (`torch.export.load`), "safetensors" (`pl.load`) or "triton" (a
    model repository of NVIDIA's server with the ONNX model). The batch is open; height and width are open,
    too, unless `size` fixes them (a Swin's always are). `outputs` of logits, features, dense, attention and subject;
    the first alone if left out. With `with_preprocess` the model takes one photo, HWC uint8 of any size. int8 learns
    its ranges from `photos` (paths, images or arrays), or from the few inside the package.

    The folder has the model, preprocess.json, labels.json, README.md with the lines that run it, and proof.json. Where
    the proof fails, nothing is written, and that is an error. `reporter` hears how it goes; without one that shows on
    the terminal.
    """
    with on_terminal() if reporter is None else contextlib.nullcontext(reporter) as heard:
        chosen = some_photos(photos)
        loaded = load(model) if isinstance(model, str | Path) else model
        if not isinstance(loaded, Loaded):
            raise PatchlightError(f"model is a name, a path, or what load gave, not {type(model).__name__}")
        loaded.check_has_weights("export")
        _check(loaded, to, precision, with_preprocess)
        names = check_outputs(loaded, tuple(outputs))
        fixed = _fixed_size(loaded, size, to, with_preprocess)
        folder = on_disk(out)
        _check_folder(folder, overwrite)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        except OSError as error:
            raise PatchlightError(f"{folder}: cannot be written ({error.strerror})") from None
        try:
            heard.tell(f"exporting for {to} in {precision}")
            # A model of its own, which may change its precision on the way.
            graph = Graph(
                dataclasses.replace(loaded, model=copy.deepcopy(loaded.model)), names, prepare=with_preprocess
            )
            graph.eval()
            try:
                _write_model(graph, loaded, made, to, precision, fixed, chosen)
            except (PatchlightError, OSError):
                raise
            except Exception as error:  # whatever the exporters raise
                reason = " ".join(str(error).split())[:300]
                raise PatchlightError(f"{loaded.provenance.source}: cannot be exported for {to} ({reason})") from error
            manifest = _manifest(loaded, to, precision, names, fixed, with_preprocess)
            _write_json(made / MANIFEST, manifest)
            _write_json(made / "preprocess.json", loaded.preprocess.config.to_dict())
            if loaded.labels is not None:
                _write_json(made / "labels.json", list(loaded.labels))
            if to != "safetensors":  # which has a card of its own
                (made / "README.md").write_text(_readme(manifest, loaded), "utf-8")
            if to == "triton":
                (made / "config.pbtxt").write_text(_triton_config(folder.name, graph, manifest), "utf-8")
            heard.tell("comparing it with the model")
            threads = None if to in ("torch", "safetensors") else torch.get_num_threads()  # as many as torch has
            proof = prove(load_engine(made, threads=threads), graph, loaded, chosen)
            _write_json(made / "proof.json", proof.to_dict())
            if not proof.holds:
                raise PatchlightError(f"{folder}: not written, for its proof fails: {proof.failure}")
            made.chmod(0o755)
            _put(made, folder)
        except OSError as error:
            raise PatchlightError(f"{folder}: cannot be written ({error.strerror or error})") from None
        finally:
            shutil.rmtree(made, ignore_errors=True)
        return Exported(folder, proof)


def _check_folder(folder: Path, overwrite: bool) -> None:
    """Refuse to write where anything else than an exported model is."""
    if not folder.exists() and not folder.is_symlink():
        return
    if folder.is_symlink() or not folder.is_dir():
        raise PatchlightError(f"{folder}: is a {'link' if folder.is_symlink() else 'file'}; name a folder")
    if not any(folder.iterdir()):
        if folder.resolve() == Path.cwd():
            raise PatchlightError(f"{folder}: is the folder that you are in; name one below it")
        return
    if not (folder / MANIFEST).is_file():
        raise PatchlightError(f"{folder}: holds something else than an exported model; name another folder")
    if not overwrite:
        raise PatchlightError(f"{folder}: is there already; name another folder, or use overwrite=True")
    if folder.resolve() == Path.cwd():
        raise PatchlightError(f"{folder}: is the folder that you are in; leave it first")


def _put(made: Path, folder: Path) -> None:
    """The new folder in the place of the old one, which goes once the new one is there."""
    if not folder.exists():
        made.replace(folder)
        return
    old = made.with_name(f"{made.name}.old")
    folder.replace(old)
    try:
        made.replace(folder)
    except OSError:
        old.replace(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _check(loaded: Loaded, to: str, precision: str, with_preprocess: bool) -> None:
    if to not in get_args(Format):
        raise PatchlightError(f"to={to!r} is not known; it is one of {', '.join(get_args(Format))}")
    if precision not in get_args(Precision):
        raise PatchlightError(f"precision={precision!r} is not known; it is one of {', '.join(get_args(Precision))}")
    if to in ("onnx", "triton") and precision == "bfloat16":
        raise PatchlightError(
            "onnxruntime does not compute bfloat16 on CPUs; use to='openvino', or precision='float16'"
        )
    if to in ("torch", "safetensors") and precision == "int8":
        raise PatchlightError("int8 is for onnx, openvino and triton, whose tools it takes; use one of them")
    if to == "safetensors" and with_preprocess:
        raise PatchlightError(
            "to='safetensors' is for pl.load, which prepares photos itself; leave with_preprocess out"
        )
    if with_preprocess:
        loaded.preprocess.check_channels()
    if next(loaded.model.parameters()).dtype != torch.float32 or next(loaded.model.parameters()).is_cuda:
        raise PatchlightError("export takes a float32 model on the CPU; load it as that, and say precision=")
    needed = ["onnx", "onnxscript"] if to in ("onnx", "openvino", "triton") else []
    needed += {"onnx": ["onnxruntime"], "triton": ["onnxruntime"], "openvino": ["openvino"]}.get(to, [])
    needed += ["nncf"] if to == "openvino" and precision == "int8" else []
    for name in needed:
        try:
            importlib.import_module(name)
        except ImportError:
            extra = "export,openvino" if to == "openvino" else "export"
            raise PatchlightError(f"export to {to} needs {name}; pip install 'patchlight[{extra}]'") from None


def _fixed_size(loaded: Loaded, size: int | Size | None, to: str, with_preprocess: bool) -> Size | None:
    """The height and width that are built in, or None where they are open."""
    config = loaded.config
    own = loaded.preprocess.config.image_size
    if size is None:
        return own if with_preprocess or not config.exports_any_size else None
    pair = (size, size) if isinstance(size, int) else size
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(type(side) is int and side > 0 for side in pair):
        raise PatchlightError(f"size={size!r} should be a whole number above 0, or two of them (height, width)")
    wanted = (pair[0], pair[1])
    if to == "safetensors":
        raise PatchlightError(f"to='safetensors' keeps the model's size; load the model with image_size={wanted}")
    if with_preprocess and wanted != own:
        raise PatchlightError(f"photos are prepared at {own[0]}x{own[1]}; load the model with image_size={wanted}")
    config.grid_for(wanted)  # says so, where the model cannot take it
    return wanted


def _write_model(
    graph: Graph,
    loaded: Loaded,
    folder: Path,
    to: Format,
    precision: Precision,
    fixed: Size | None,
    photos: Sequence[Photo],
) -> None:
    if to == "safetensors":
        with _reduced(graph, precision):
            save(dataclasses.replace(loaded, model=graph.model), folder, overwrite=True)
        return
    example, shapes = _example(graph, loaded, fixed)
    path = folder / FILES[to]
    path.parent.mkdir(exist_ok=True)
    if to == "torch":
        with _reduced(graph, precision), _quiet():
            program = torch.export.export(graph, (example,), dynamic_shapes=shapes, strict=False)
            torch.export.save(program, path)
        return
    onnx_path = folder / FILES["onnx"] if to == "openvino" else path
    half = to != "openvino" and precision == "float16"
    # The plain attention, whose layouts are the same whoever takes it apart.
    with _quiet(), sdpa_kernel(SDPBackend.MATH), _reduced(graph, "float16" if half else "float32"):
        program = torch.export.export(graph, (example,), dynamic_shapes=shapes, strict=False)
        _save_onnx(program, graph, onnx_path)
    if to != "openvino" and precision != "int8":
        return
    from patchlight.deploy.precision import as_openvino, quantize_onnx

    calibration = functools.partial(_calibration, graph, loaded, fixed, photos)
    with _quiet():
        if to != "openvino":
            quantize_onnx(onnx_path, calibration)
            return
        as_openvino(precision, onnx_path, path, calibration)
    for each in folder.glob(f"{FILES['onnx']}*"):
        each.unlink()


def _example(graph: Graph, loaded: Loaded, fixed: Size | None) -> tuple[Tensor, dict[str, Any]]:
    """Something to trace the graph with, and which of its sides are open."""
    if graph.prepare is not None:
        photo_HWC = torch.randint(0, 256, (301, 402, 3), dtype=torch.uint8)
        sides = {0: Dim("height", min=2, max=1 << 16), 1: Dim("width", min=2, max=1 << 16)}
        return photo_HWC, {"image": sides}
    batch = Dim("batch", min=1, max=LARGEST_BATCH)
    channels, (down, across) = loaded.config.in_channels, loaded.config.size_step
    if fixed is not None:
        return torch.randn(2, channels, *fixed), {"image": {0: batch}}
    rows, columns = (Dim(name, min=2, max=LARGEST_SIDE // step) for name, step in (("h", down), ("w", across)))
    open_sides = {0: batch, 2: down * rows, 3: across * columns}
    return torch.randn(2, channels, 3 * down, 4 * across), {"image": open_sides}


def _save_onnx(program: ExportedProgram, graph: Graph, path: Path) -> None:
    written = torch.onnx.export(
        program, dynamo=True, verbose=False, input_names=["image"], output_names=list(graph.outputs)
    )
    assert written is not None
    written.save(path)


@contextlib.contextmanager
def _reduced(graph: Graph, precision: Precision) -> Iterator[None]:
    """The graph's model in another precision, and back."""
    state = {name: value.clone() for name, value in graph.model.state_dict().items()}
    try:
        graph.model.to(getattr(torch, precision))
        yield
    finally:
        graph.model.float()
        graph.model.load_state_dict(state)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' own warnings, which speak of their insides."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        level = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(level)


def _calibration(graph: Graph, loaded: Loaded, fixed: Size | None, photos: Sequence[Photo]) -> Iterator[Any]:
    """Inputs of the graph, made of photos, that tell the ranges of its numbers."""
    prepare = preparation_at(fixed, loaded)
    draw = np.random.default_rng(1)
    for number in range(max(FEWEST_INPUTS, min(len(photos), CALIBRATION_PHOTOS))):
        photo = photos[number % len(photos)]
        if number >= len(photos):  # of few photos parts, too
            photo = part_of(decode(photo).image, draw)
        yield np.asarray(decode(photo).image) if graph.prepare is not None else prepare(photo)[0][None].numpy()


def _manifest(
    loaded: Loaded,
    to: Format,
    precision: Precision,
    outputs: tuple[Output, ...],
    fixed: Size | None,
    with_preprocess: bool,
) -> dict[str, Any]:
    """All that an engine has to know to run the model."""
    return {
        "version": 1,
        "patchlight": __version__,
        "source": loaded.provenance.source,
        "model": {
            "patchlight": own_part(
                loaded.config,
                loaded.preprocess.config,
                loaded.labels,
                loaded.groups,
                loaded.subject,
                loaded.provenance.licence,
            ),
            "origin": loaded.provenance.origin,
            "sha256": loaded.provenance.sha256,
        },
        "format": to,
        "precision": precision,
        "outputs": list(outputs),
        "channels": loaded.config.in_channels,
        "size": None if fixed is None else list(fixed),
        "step": list(loaded.config.size_step),
        "with_preprocess": with_preprocess,
    }


def _triton_config(name: str, graph: Graph, manifest: dict[str, Any]) -> str:
    """What NVIDIA's server has to know: what goes in and comes out, and that it may put requests together."""
    size = manifest["size"] or [-1, -1]
    if graph.prepare is not None:
        batching, dims, kind = "max_batch_size: 0\n", "-1, -1, 3", "TYPE_UINT8"
    else:
        batching = "max_batch_size: 64\ndynamic_batching { max_queue_delay_microseconds: 2000 }\n"
        dims, kind = f"{manifest['channels']}, {size[0]}, {size[1]}", "TYPE_FP32"
    prefix = "1, " if graph.prepare is not None else ""
    axes = {"logits": "-1", "features": "-1", "dense": "-1, -1, -1", "attention": "-1, -1, -1", "subject": "-1, -1"}
    axes["boxes"] = "-1, -1, 5"
    outputs = ",\n".join(
        f'  {{ name: "{each}" data_type: TYPE_FP32 dims: [ {prefix}{axes[each]} ] }}' for each in graph.outputs
    )
    return (
        f'name: "{name}"\nbackend: "onnxruntime"\n{batching}'
        f'input [\n  {{ name: "image" data_type: {kind} dims: [ {dims} ] }}\n]\n'
        f"output [\n{outputs}\n]\n"
    )


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


_BOX_LINES = f"""The subject's box is the one that most patches vote for:

```python
given = dict(zip({{outputs}}, found))
heat, said = given["subject"][0].ravel(), given["boxes"][0].reshape(-1, 5)
boxes, fit = said[:, :4], said[:, 4]
warm = {OF_THE_HOTTEST} * np.sort(heat)[-max(1, round({HOTTEST_SHARE} * heat.size)) :].mean()
votes = heat * fit * (heat >= max({VOTES_FROM} * warm, 1e-6))
sides = np.minimum(boxes[:, None, 2:], boxes[:, 2:]) - np.maximum(boxes[:, None, :2], boxes[:, :2])
shared, area = sides.clip(0).prod(-1), (boxes[:, 2:] - boxes[:, :2]).clip(0).prod(-1)
agree = shared / np.maximum(area[:, None] + area - shared, 1e-9) >= {AGREE}
own = agree[np.argmax(agree @ votes)] * votes
print(own @ boxes / own.sum())  # left, top, right and bottom, in shares of the image's sides
```

How far to trust it, and whether there are several subjects, `patchlight` says (`pl.localize` takes this folder, too).

"""
"""By the numbers of `boxes.agreed_regions`."""


def _readme(manifest: dict[str, Any], loaded: Loaded) -> str:
    """What the folder holds, and the lines that run it without Patchlight."""
    down, across = manifest["step"]
    size = manifest["size"]
    if manifest["with_preprocess"]:
        takes = "one photo of any size, HWC uint8, red, green and blue"
        example = 'image = np.asarray(ImageOps.exif_transpose(Image.open("photo.jpg")).convert("RGB"))'
    else:
        example_size = size or list(loaded.preprocess.config.image_size)
        sides = f"{size[0]} x {size[1]}" if size else f"sides that are multiples of {down} and {across}, two at least"
        takes = (
            f"images (batch, {manifest['channels']}, height, width) float32, prepared as preprocess.json says; {sides}"
        )
        example = f"image = np.zeros((1, {manifest['channels']}, {example_size[0]}, {example_size[1]}), np.float32)"
    gives = "\n".join(f"- `{name}` {MEANINGS[name]}" for name in manifest["outputs"])
    imports = "import numpy as np\n" + ("from PIL import Image, ImageOps\n" if manifest["with_preprocess"] else "")
    run = {
        "onnx": (
            "import onnxruntime\n\n{example}\n"
            'session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])\n'
            'found = session.run(None, {{"image": image}})\n'
        ),
        "openvino": (
            "import openvino\n\n{example}\n"
            'model = openvino.Core().compile_model("model.xml", "CPU"{hint})\n'
            "answer = model([image])\n"
            "found = [answer[output] for output in model.outputs]\n"
        ),
        "torch": (
            "import torch\n\n{example}\n"
            'model = torch.export.load("model.pt2").module()\n'
            "found = [output.detach().numpy() for output in model(torch.from_numpy(image.copy()))]\n"
        ),
    }["onnx" if manifest["format"] == "triton" else manifest["format"]]
    run = run.replace("model.onnx", FILES["triton"]) if manifest["format"] == "triton" else run
    hint = f', {{"INFERENCE_PRECISION_HINT": "{OPENVINO_HINTS[manifest["precision"]]}"}}'
    lines = run.format(example=example, hint=hint)
    box = _BOX_LINES.format(outputs=manifest["outputs"]) if "boxes" in manifest["outputs"] else ""
    return (
        f"# {loaded.provenance.source}, exported for {manifest['format']} in {manifest['precision']}\n\n"
        f"It takes {takes}. It gives, as float32:\n\n{gives}\n\n"
        f"```python\n{imports}{lines}"
        f"print({{name: each.shape for name, each in zip({manifest['outputs']}, found)}})\n```\n\n{box}"
        "proof.json says how nearly it gives what the model gives. labels.json, where it is there, names the classes.\n"
    )
