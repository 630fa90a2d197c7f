"""Options that several commands have, and how their values are read."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from patchlight.errors import PatchlightError
from patchlight.families import check_names_of_any
from patchlight.json_config import parse_values

Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change a setting of the model; repeatable.")
]
Weights = Annotated[
    Literal["model", "ema"] | None,
    typer.Option(help="Which of a checkpoint that has both: as trained, or averaged (as if left out)."),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; by default a GPU if there is one.")]
Like = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="What a checkpoint is that does not say it: a name of timm's, or on the hub."),
]
Part = Annotated[
    str | None, typer.Option(metavar="3/64", help="A fixed share of the photos, the third of 64; see merge.")
]
On = Annotated[
    str | None,
    typer.Option(
        metavar="ray[:HOST:PORT]", help="Run on the machines of a Ray cluster; all must see photos and --out."
    ),
]
Workers = Annotated[int, typer.Option(parser=int, help="Processes that read photos.")]
Batch = Annotated[int, typer.Option(parser=int, help="Photos in one batch on a GPU.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Start over where a run has other settings.")]
Fast = Annotated[
    bool, typer.Option("--fast-decode", help="Decode large JPEGs at a reduced size: faster, not quite the same.")
]
EngineFolder = Annotated[
    Path | None, typer.Option("--engine", metavar="DIR", help="What `export` wrote, to run in the model's stead.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def check_engine_alone(others: dict[str, object]) -> None:
    """Refuse what says which model, or changes it, beside --engine."""
    for flag, given in others.items():
        if given:
            raise PatchlightError(f"--engine says which model, as it was exported; leave {flag} out")


def parse_size(text: str) -> tuple[int, int]:
    size = re.fullmatch(r"([0-9]+)(?:[xX]([0-9]+))?", text)
    if size is None:
        raise PatchlightError(f"image size {text!r} is not a size; write 224, or 224x336 (height x width)")
    return int(size[1]), int(size[2] or size[1])


def parse_share(given: str | float) -> float:
    """0.1, or 10%; typer gives the default, too."""
    text = str(given)
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a share; write 0.1, or 10%") from None


def parse_numbers(option: str, text: str, remedy: str, count: int | None = None) -> list[int]:
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or count not in (None, len(numbers)):
        raise PatchlightError(f"{option} {text}: write {remedy}")
    return numbers


def parse_settings(settings: list[str]) -> dict[str, Any]:
    """NAME=VALUE pairs of settings that a model has."""
    changes = parse_values(settings)
    check_names_of_any(changes)
    return changes
