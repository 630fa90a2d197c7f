"""What `load` makes of every model that timm has and of transformers' vision models: the same, refused, or wrong.

    nice python benchmarks/zoo.py                                # everything
    nice python benchmarks/zoo.py --only 'vit_small*' 'swin_*' --jobs 2 --rows
    nice python benchmarks/zoo.py --origin timm-file --all-blocks

Each architecture is made by the library itself, all its parameters are drawn anew, so that none hides behind a zero or
a one, and it is written down in the ways that models come in:

    timm-folder   config.json and model.safetensors, as timm writes them for the hub
    timm-file     the tensors alone, without a name
    timm-named    the tensors alone, in a file with the architecture's name
    transformers  config.json and model.safetensors, as `save_pretrained` writes them

`equal`: tokens and logits (and of a folder the prepared photo) are those of the library, to 1e-4 of the largest.
`refused`: one line that says why. `unclear`: a refusal that only lists tensors which do not fit, of a family that we
have. `wrong`: anything else, whatever was said in warnings and notes. The exit code is 1 where anything is wrong or
unclear.

To be quick, models of the families that we have get three blocks (or one or two in each stage), in which nothing
changes but their number; --all-blocks leaves them whole. Models of more than 400 million parameters are left out, and
listed. Of all other architectures, which must be refused, the tensors are zeros of the right shapes; one that is not
refused is then compared like the rest.
"""

import argparse
import collections
import fnmatch
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

import patchlight as pl

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import oracles
import transformers_models
from models_at_random import distance, redraw, some_image

TOLERANCE = 1e-4
OTHERS = "others"
"""The family of all that must be refused."""

LARGEST = 400e6

RESULTS = ("equal", "refused", "unclear", "wrong", "left out")


@dataclass(frozen=True)
class Outcome:
    """What became of one model in one form."""

    origin: str
    name: str
    family: str
    result: str
    said: str = ""
    """The refusal, or what differs."""
    difference: float = 0.0
    """The largest, as a share of the largest value."""


@dataclass(frozen=True)
class Library:
    """Where models come from. `try_one` is run in a process of its own for each name."""

    origins: tuple[str, ...]
    names: Callable[[], list[str]]
    try_one: Callable[[str, Sequence[str], "Options"], list[Outcome]]


@dataclass(frozen=True)
class Options:
    all_blocks: bool = False


# What all libraries share


def some_photo() -> Image.Image:
    """Colours that run softly, and stripes."""
    y, x = torch.meshgrid(torch.arange(333.0), torch.arange(500.0), indexing="ij")
    photo = torch.stack([x / 2, y / 2, 128 + 90 * torch.sin(x * y / 997)], -1)
    return Image.fromarray(photo.clamp(0, 255).byte().numpy())


def judge(
    origin: str, name: str, family: str, load: Callable[[], Any], compare: Callable[[Any], dict[str, float]]
) -> Outcome:
    """What comes of one load; `compare` says how far apart things are."""
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        try:
            loaded = load()
        except pl.PatchlightError as error:
            unclear = "does not fit the model" in str(error) and family != OTHERS
            return Outcome(origin, name, family, "unclear" if unclear else "refused", str(error))
        except Exception as error:  # which is nobody's idea of a refusal
            return Outcome(origin, name, family, "wrong", f"raises {type(error).__name__}: {error}")
    try:
        apart = compare(loaded)
    except Exception as error:
        return Outcome(origin, name, family, "wrong", f"loads, and then {type(error).__name__}: {error}")
    what, most = max(apart.items(), key=lambda item: item[1])
    if most <= TOLERANCE:
        return Outcome(origin, name, family, "equal", difference=most)
    return Outcome(origin, name, family, "wrong", f"{what} differ by {most:.2g} of the largest", most)


# timm

TIMM_CLAIMED = {
    "vision_transformer": "ViT",
    "deit": "ViT",
    "vision_transformer_relpos": "ViT, relative positions",
    "beit": "BEiT",
    "eva": "EVA, RoPE, DINOv3",
    "swin_transformer": "Swin",
    "swin_transformer_v2": "Swin V2",
    "convnext": "ConvNeXt",
}
"""Modules of timm with families that we have."""


def timm_names() -> list[str]:
    return list(oracles.timm().list_models())


def timm_family(name: str) -> str:
    oracles.timm()  # so that it can be imported in a process of its own, too
    from timm.models import _registry

    module = _registry._model_entrypoints[name].__module__.rpartition(".")[2]
    if module == "vision_transformer_hybrid":
        return "ViT on a ResNet"
    return TIMM_CLAIMED.get(module, OTHERS)


def timm_made(name: str, arguments: dict[str, Any]) -> nn.Module:
    return oracles.timm().create_model(name, **arguments).eval()


def timm_arguments(name: str, family: str, options: Options) -> dict[str, Any]:
    """Fewer blocks, where that leaves the architecture what it is."""
    if options.all_blocks or family == OTHERS:
        return {}
    with torch.device("meta"):
        whole = timm_made(name, {})
    if family in ("Swin", "Swin V2", "ConvNeXt"):
        depths = [len(stage.blocks) for stage in (whole.layers if hasattr(whole, "layers") else whole.stages)]
        return {"depths": tuple(min(depth, 2) for depth in depths)}
    return {"depth": min(3, len(whole.blocks))}


def try_timm(name: str, origins: Sequence[str], options: Options) -> list[Outcome]:
    family = timm_family(name)
    try:
        arguments = timm_arguments(name, family, options)
        with torch.device("meta"):
            model = timm_made(name, arguments)
    except Exception as error:  # one of timm's own that cannot be made
        return [Outcome(origin, name, family, "left out", f"timm cannot make it: {error}") for origin in origins]
    size = sum(parameter.numel() for parameter in model.parameters())
    if size > LARGEST:
        return [Outcome(origin, name, family, "left out", f"{size / 1e6:.0f} million parameters") for origin in origins]
    if family == OTHERS:
        outcomes = _try_timm_in(name, family, arguments, origins, model, refused_only=True)
        if all(outcome.result == "refused" for outcome in outcomes):
            return outcomes
    model = timm_made(name, arguments)
    redraw(model)
    return _try_timm_in(name, family, arguments, origins, model, refused_only=False)


def _try_timm_in(
    name: str,
    family: str,
    arguments: dict[str, Any],
    origins: Sequence[str],
    model: nn.Module,
    *,
    refused_only: bool,
) -> list[Outcome]:
    from timm.models._hub import save_config_for_hf

    tensors = {key: value.contiguous() for key, value in model.state_dict().items()}
    if refused_only:
        tensors = {key: torch.zeros(value.shape, dtype=torch.float16) for key, value in tensors.items()}
    size = model.pretrained_cfg.get("input_size", (3, 224, 224))
    if hasattr(model, "patch_embed") and getattr(model.patch_embed, "img_size", None):
        size = (size[0], *model.patch_embed.img_size)
    image = some_image(size)
    answers: list[Tensor] = []

    def compare(loaded: Any) -> dict[str, float]:
        with torch.no_grad():
            if not answers:
                answers.extend((model.forward_features(image), model(image)))
            tokens, logits = answers
            seen = image  # timm passes over the pixels that are left where a patch does not divide the image
            if family not in ("Swin", "Swin V2", "ConvNeXt"):
                down, across = loaded.config.patch_size
                seen = image[..., : image.shape[-2] // down * down, : image.shape[-1] // across * across]
            ours = loaded.model.tokens(seen)
            if tokens.ndim == 4:
                tokens = (tokens if tokens.shape[-1] == ours.shape[-1] else tokens.permute(0, 2, 3, 1)).flatten(1, 2)
            return {"tokens": distance(ours, tokens), "logits": distance(loaded.model(seen), logits)}

    def compare_folder(loaded: Any) -> dict[str, float]:
        data = oracles.timm().data
        theirs = data.create_transform(**data.resolve_data_config(pretrained_cfg=model.pretrained_cfg, model=model))
        photo = some_photo()
        return compare(loaded) | {"prepared photos": distance(loaded.preprocess(photo)[0], theirs(photo))}

    with tempfile.TemporaryDirectory(dir=_room()) as place:
        bare, folder = Path(place) / "weights.safetensors", Path(place) / "folder"
        save_file(tensors, bare)
        folder.mkdir()
        os.link(bare, folder / "model.safetensors")
        save_config_for_hf(model, folder / "config.json", model_args=arguments)
        named = Path(place) / f"{name}.safetensors"
        os.link(bare, named)
        ways = {
            "timm-named": (partial(pl.load, named, **arguments), compare),
            "timm-folder": (partial(pl.load, folder), compare_folder),
            "timm-file": (partial(pl.load, bare), compare),
        }
        return [judge(origin, name, family, *ways[origin]) for origin in origins]


# transformers

TRANSFORMERS_TASKS = (
    "IMAGE",
    "IMAGE_CLASSIFICATION",
    "MASKED_IMAGE_MODELING",
    "BACKBONE",
    "SEMANTIC_SEGMENTATION",
    "IMAGE_SEGMENTATION",
    "INSTANCE_SEGMENTATION",
    "UNIVERSAL_SEGMENTATION",
    "OBJECT_DETECTION",
    "ZERO_SHOT_OBJECT_DETECTION",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "DEPTH_ESTIMATION",
    "VIDEO_CLASSIFICATION",
    "KEYPOINT_DETECTION",
    "MASK_GENERATION",
    "IMAGE_TO_IMAGE",
    "IMAGE_MATTING",
)
"""What photos and videos are put to, as transformers' Auto classes call it."""

CLAIMED = {str(made): made for made in transformers_models.CLAIMED}


def transformers_names() -> list[str]:
    """The classes that we claim, some of them in several forms, and every other that takes photos."""
    library = oracles.transformers()
    auto = library.models.auto.modeling_auto
    names = {name for name in dir(library) if name.endswith(("VisionModel", "VisionModelWithProjection", "ImageModel"))}
    for task in TRANSFORMERS_TASKS:
        for classes in getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES").values():
            names |= {classes} if isinstance(classes, str) else set(classes)
    return [*CLAIMED, *sorted(names - {made.name for made in CLAIMED.values()})]


def try_transformers(name: str, origins: Sequence[str], options: Options) -> list[Outcome]:
    """`options` change nothing: the models are tiny, since their configs, other than timm's names, fix no size."""
    library = oracles.transformers()
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    family = CLAIMED[name].config.removesuffix("Config") if name in CLAIMED else OTHERS
    with tempfile.TemporaryDirectory(dir=_room()) as place:
        try:
            model = transformers_models.make(CLAIMED[name]) if name in CLAIMED else _other_of_transformers(name)
            redraw(model)
            model.save_pretrained(place)
        except Exception as error:
            said = f"transformers cannot make it: {type(error).__name__} {error}".splitlines()[0][:120]
            return [Outcome(origin, name, family, "left out", said) for origin in origins]

        def compare(loaded: Any) -> dict[str, float]:
            image = some_image(transformers_models.image_size(model))
            theirs = transformers_models.theirs(model, image)
            ours = transformers_models.ours(model, loaded, image)
            return {what: distance(ours[what], theirs[what]) for what in theirs}

        return [judge(origin, name, family, partial(pl.load, place), compare) for origin in origins]


def _other_of_transformers(name: str) -> nn.Module:
    """With two layers in each part, where that can be."""
    kind = getattr(oracles.transformers(), name)
    try:
        return _made(kind, _with_few_layers(kind.config_class()))
    except Exception:  # where other settings count layers, too
        return _made(kind, kind.config_class())


def _with_few_layers(config: Any) -> Any:
    for part in (config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))):
        for key in ("num_hidden_layers", "encoder_layers", "decoder_layers", "depth"):
            if isinstance(getattr(part, key, None), int):
                setattr(part, key, min(2, getattr(part, key)))
    return config


def _made(kind: Any, config: Any) -> nn.Module:
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f} million parameters")
    return kind(config).eval()


LIBRARIES: dict[str, Library] = {
    "timm": Library(("timm-folder", "timm-file", "timm-named"), timm_names, try_timm),
    "transformers": Library(("transformers",), transformers_names, try_transformers),
}
"""Another library is one more row: what its forms are called, which models it has, and what becomes of one of them."""


# The command


def main(arguments: list[str] | None = None) -> int:
    known = [origin for library in LIBRARIES.values() for origin in library.origins]
    parser = argparse.ArgumentParser(description="Load every model of other libraries and compare.")
    parser.add_argument("--origin", nargs="+", choices=known, default=known)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="names, as in 'vit_small*'")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--all-blocks", action="store_true", help="do not shorten the models")
    parser.add_argument("--rows", action="store_true", help="print a line for each model, not only for the wrong ones")
    parser.add_argument("--json", type=Path, help="write all outcomes here")
    asked = parser.parse_args(arguments)
    outcomes: list[Outcome] = []
    begun = time.monotonic()
    for outcome in run(asked.origin, asked.only, asked.jobs, Options(asked.all_blocks)):
        outcomes.append(outcome)
        if asked.rows or outcome.result in ("wrong", "unclear"):
            print(f"{outcome.result:8} {outcome.origin:12} {outcome.name}  {outcome.said}", flush=True)
    report(outcomes)
    print(f"{len(outcomes)} loads in {time.monotonic() - begun:.0f} s")
    if asked.json:
        asked.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    return int(any(outcome.result in ("wrong", "unclear") for outcome in outcomes))


def run(origins: Sequence[str], patterns: Sequence[str], jobs: int, options: Options) -> Iterator[Outcome]:
    """Every model whose name fits a pattern, in each of these forms."""
    work = []
    for label, library in LIBRARIES.items():
        wanted = [origin for origin in library.origins if origin in origins]
        if wanted:
            names = [name for name in library.names() if any(fnmatch.fnmatch(name, each) for each in patterns)]
            work += [(label, name, wanted, options) for name in names]
    if jobs == 1:
        for each in work:
            yield from _try(*each)
        return
    with ProcessPoolExecutor(
        jobs, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        futures: list[Future[list[Outcome]]] = [pool.submit(_try, *each) for each in work]
        for future in as_completed(futures):
            yield from future.result()


def _try(label: str, name: str, origins: Sequence[str], options: Options) -> list[Outcome]:
    return LIBRARIES[label].try_one(name, origins, options)


def report(outcomes: Sequence[Outcome]) -> None:
    """Why models were refused, and how many of each family are what."""
    reasons: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for outcome in outcomes:
        if outcome.result in ("refused", "unclear", "left out") and outcome.family != OTHERS:
            reason = outcome.said if outcome.result == "left out" else outcome.said.partition(": ")[2]
            reasons[outcome.origin, f"{outcome.result}: {reason}"].append(outcome.name)
    for (origin, reason), names in sorted(reasons.items()):
        print(f"\n{origin}: {reason}\n    {', '.join(names)}")
    counts = collections.Counter((outcome.origin, outcome.family, outcome.result) for outcome in outcomes)
    print(f"\n{'':14}{'':26}" + "".join(f"{result:>10}" for result in RESULTS))
    for origin in dict.fromkeys(outcome.origin for outcome in outcomes):
        for family in dict.fromkeys(outcome.family for outcome in outcomes if outcome.origin == origin):
            row = "".join(f"{counts[origin, family, result]:10}" for result in RESULTS)
            print(f"{origin:14}{family:26}{row}")
        totals = (sum(each.origin == origin and each.result == result for each in outcomes) for result in RESULTS)
        print(f"{origin:14}{'all':26}" + "".join(f"{total:10}" for total in totals))


def _room() -> str | None:
    """Memory rather than a disk, where there is some."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


if __name__ == "__main__":
    sys.exit(main())
