"""An architecture that the package does not have: one record, and its models are made, counted, loaded and saved."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import patchlight as pl
from models_at_random import randomize
from patchlight.config import ArchitectureConfig, Size
from patchlight.costing import costs
from patchlight.families import CONFIGS, config_from_json
from patchlight.json_config import check_types, form_sizes
from patchlight.models.families import MODELS, make_model
from patchlight.models.fresh import init_weights
from patchlight.weights.convert import Origin
from patchlight.weights.families import FAMILIES, family_of, register
from patchlight.weights.family import Family, Shapes


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyConfig(ArchitectureConfig):
    """Patches, each through a few matrices alone."""

    architecture = "toy"
    title = "Toy"
    made_for_its_size = False

    image_size: Size = (32, 32)
    patch_size: Size = (8, 8)
    in_channels: int = 3
    width: int = 12
    depth: int = 2
    drop_path: float = 0.0
    num_classes: int = 3

    def __post_init__(self) -> None:
        form_sizes(self, "image_size", "patch_size")
        check_types(self)

    def grid_for(self, image_size: Size) -> Size:
        return image_size[0] // self.patch_size[0], image_size[1] // self.patch_size[1]

    @property
    def token_width(self) -> int:
        return self.width

    @property
    def encoder_in_words(self) -> str:
        return f"{self.depth} matrices of {self.width}"


class Toy(nn.Module):
    """image_BCHW -> logits_BK."""

    preprocess = None

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.config = config
        self.stem = nn.Conv2d(config.in_channels, config.width, config.patch_size, stride=config.patch_size)
        self.blocks = nn.ModuleList(nn.Linear(config.width, config.width) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.num_classes) if config.num_classes else None
        init_weights(self)

    def tokens(self, image_BCHW: Tensor) -> Tensor:
        x_BND = self.stem(image_BCHW).flatten(2).mT
        for block in self.blocks:
            x_BND = x_BND + block(x_BND).relu()
        return self.norm(x_BND)

    def features(self, image_BCHW: Tensor) -> Tensor:
        return self.tokens(image_BCHW).mean(1)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        features_BD = self.features(image_BCHW)
        return features_BD if self.head is None else self.head(features_BD)

    def attention_entries(self) -> tuple[int, ...]:
        return ()


def from_shapes(shapes: Shapes) -> dict[str, object]:
    width, channels, down, across = shapes.of("stem.weight", 4)
    return {
        "width": width,
        "in_channels": channels,
        "patch_size": (down, across),
        "depth": sum(key.startswith("blocks.") and key.endswith(".weight") for key in shapes),
        "num_classes": shapes.of("head.weight", 2)[0] if "head.weight" in shapes else 0,
    }


TOYS = Origin(
    name="the toy shop",
    marks=("conv.weight", "rungs.0.weight"),
    names=(("conv.", "stem."), ("rungs.{}.", "blocks.{}."), ("ln.", "norm."), ("fc.", "head.")),
    left_out=((r"^sticker$", "its sticker"),),
)
OURS = Origin(
    name="patchlight",
    marks=("stem.weight", "blocks.0.weight"),
    names=tuple((part, part) for part in ("stem.", "blocks.", "norm.", "head.")),
)


@pytest.fixture
def toy() -> Iterator[Toy]:
    before = [(each, dict(each)) for each in (FAMILIES, CONFIGS, MODELS)]
    register(
        Family(
            config=ToyConfig,
            model=Toy,
            origins=(TOYS, OURS),
            from_shapes=from_shapes,
            fixed_by_tensors=frozenset({"width", "depth", "patch_size", "in_channels"}),
        )
    )
    model = make_model(ToyConfig(depth=3)).eval()
    assert isinstance(model, Toy)
    randomize(model)
    yield model
    for each, entries in before:
        each.clear()
        each.update(entries)  # type: ignore[arg-type]


def in_their_names(model: Toy) -> dict[str, Tensor]:
    renamed = {"stem": "conv", "blocks": "rungs", "norm": "ln", "head": "fc"}
    theirs = {key.partition("."): value for key, value in model.state_dict().items()}
    return {renamed[first] + dot + rest: value for (first, dot, rest), value in theirs.items()}


def test_it_loads_in_another_naming_and_comes_back_as_it_was_saved(toy: Toy, tmp_path: Path) -> None:
    image_BCHW = torch.randn(2, 3, 32, 48)
    save_file(in_their_names(toy) | {"sticker": torch.zeros(1)}, tmp_path / "toy.safetensors")
    loaded = pl.load(tmp_path / "toy.safetensors")
    assert loaded.config == toy.config
    assert loaded.provenance.origin == "the toy shop"
    assert "left out its sticker (sticker)" in loaded.notes
    with torch.inference_mode():
        assert torch.equal(loaded.model(image_BCHW), toy(image_BCHW))
    folder = pl.save(loaded, tmp_path / "saved", labels=["car", "doll", "kite"])
    assert "# A Toy" in (folder / "README.md").read_text()
    again = pl.load(folder, image_size=64)
    assert (again.labels, again.config.image_size) == (("car", "doll", "kite"), (64, 64))
    with torch.inference_mode():
        assert torch.equal(again.model(image_BCHW), toy(image_BCHW))


def test_it_is_counted_and_its_config_goes_to_json(toy: Toy) -> None:
    counted = costs(toy.config)  # type: ignore[arg-type]
    assert (counted.tokens, counted.attention_entries) == (16, 0)
    assert counted.macs == 16 * (3 * 8 * 8 * 12 + 3 * 12 * 12) + 12 * 3
    assert counted.parameters == sum(value.numel() for value in toy.parameters())
    assert config_from_json(toy.config.to_json()) == toy.config
    assert family_of(toy.config).name == "Toy"


def test_its_subjects_are_found(toy: Toy, tmp_path: Path) -> None:
    folder = pl.save(toy, tmp_path / "toy")
    (tmp_path / "empty.png").write_bytes(png())
    assert pl.localize(tmp_path / "empty.png", folder).decision in ("subject", "several", "unsure", "none")


def test_what_it_cannot_do_is_refused_by_name(toy: Toy, tmp_path: Path) -> None:
    with pytest.raises(pl.PatchlightError, match=r"layout='timm'.* has no Toy; use layout='patchlight'"):
        pl.save(toy, tmp_path / "x", layout="timm")
    with pytest.raises(pl.PatchlightError, match=r"layout='transformers'.* has no Toy; use layout='patchlight'"):
        pl.save(toy, tmp_path / "x", layout="transformers")
    folder = pl.save(toy, tmp_path / "toy")
    with pytest.raises(pl.PatchlightError, match=r"patch_size=\(4, 4\): only a ViT's patches can be resized"):
        pl.load(folder, patch_size=(4, 4))
    settings = json.loads((folder / "config.json").read_text())
    settings["patchlight"]["model"]["width"] = 24
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(pl.PatchlightError, match=r"config.json says width=24, but its tensors have 12"):
        pl.load(folder)


def test_without_it_its_checkpoints_are_unknown(tmp_path: Path) -> None:
    save_file(in_their_names(Toy(ToyConfig())), tmp_path / "toy.safetensors")
    with pytest.raises(pl.PatchlightError, match="no ViT, Swin or ConvNeXt that we know is in it"):
        pl.load(tmp_path / "toy.safetensors")


def png() -> bytes:
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.effect_noise((64, 48), 60).convert("RGB").save(file, "PNG")
    return file.getvalue()
