"""The architectures that can be loaded and saved. CONTRIBUTING.md says how to add one."""

from collections.abc import Iterator
from typing import Any

from patchlight.families import CONFIGS
from patchlight.models.families import MODELS
from patchlight.weights import convnext, swin, vit
from patchlight.weights.convert import Origin
from patchlight.weights.family import Family
from patchlight.weights.transformers_configs import ModelType

# A ViT's marks are the fewest, so that others are looked for first.
FAMILIES: dict[str, Family] = {family.architecture: family for family in (convnext.FAMILY, swin.FAMILY, vit.FAMILY)}


def register(family: Family) -> None:
    """Add an architecture, whose models can then be made, counted, loaded and saved like all others."""
    others = dict(FAMILIES)
    FAMILIES.clear()
    FAMILIES.update({family.architecture: family} | others)
    CONFIGS[family.architecture] = family.config
    MODELS[family.config] = family.model


def family_of(config: Any) -> Family:
    """The family of a config, whose architecture has to be known."""
    return FAMILIES[config.architecture]


def all_origins() -> Iterator[tuple[Family, Origin]]:
    """All namings that checkpoints come in, in the order in which they are looked for."""
    return ((family, origin) for family in FAMILIES.values() for origin in family.origins)


def all_model_types() -> dict[str, ModelType]:
    """transformers' model types of all families."""
    return {name: kind for family in FAMILIES.values() for name, kind in family.model_types.items()}


def names_of_families(word: str) -> str:
    """ "ViT, Swin and ConvNeXt", or with another word."""
    *names, last = (family.name for family in reversed(FAMILIES.values()))
    return f"{', '.join(names)} {word} {last}"
