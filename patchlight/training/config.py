"""What a training run is: settings that check themselves, nested by what they are about.

`config.changed({"optim.lr": 1e-3})` is what `--set optim.lr=1e-3` does.
"""

import dataclasses
import difflib
import typing
from dataclasses import dataclass
from typing import Any, Literal

from patchlight.config import PreprocessConfig, Size, ViTConfig
from patchlight.errors import PatchlightError
from patchlight.families import ModelConfig, config_from_dict
from patchlight.images.augment import AugmentConfig
from patchlight.json_config import (
    JsonConfig,
    check_names,
    check_types,
    check_whole,
    field_names,
    require,
    require_within,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig(JsonConfig):
    """Which photos, with which labels."""

    # A folder of class folders, a CSV with the columns file and label, tar shards, tables or CIFAR-10: a path or URL.
    train: str
    # The same. None takes the part of the training photos that lies apart (val/ beside train/), or holds one out.
    validation: str | None = None
    # How much is held out where there is no validation set: chosen by content, so that copies stay on one side.
    validation_share: float = 0.1
    # Use a part of the training photos, the same share of every class.
    train_share: float = 1.0
    # A CSV with the columns label and group (animal, animal/bird, thing, ...; `bird/*` is many labels), which the
    # finished model carries, see weights/groups.py.
    groups: str | None = None
    # The column of labels of a CSV or a table; None takes the one that is called so (label, labels, class, ...).
    label_column: str | None = None
    # Processes that read photos; 0 reads in the training process.
    workers: int = 2

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("train", "validation", "groups", "label_column"):  # an empty path would be the working folder
            require(
                getattr(self, name) != "",
                f"data.{name} is empty; give {'a name' if name == 'label_column' else 'a path'}",
            )
        require_within(self, "validation_share", 0, 0.9)
        require_within(self, "train_share", 0, 1)
        require(self.train_share > 0, "train_share must be more than 0")
        require_within(self, "workers", 0, 1024)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig(JsonConfig):
    """How weights move."""

    # "muon" turns the matrices of the blocks by orthogonal steps; everything else takes AdamW's.
    name: Literal["adamw", "muon"] = "adamw"
    lr: float = 1e-3
    muon_lr: float = 0.02
    muon_momentum: float = 0.95
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.999)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    # Shares of the run: for the way up to `lr`, and of `lr` at the end.
    warmup: float = 0.05
    final_lr: float = 0.0
    # Each block learns at this times the rate of the block above it.
    layer_decay: float = 1.0
    clip_grad: float | None = 1.0

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("lr", "muon_lr"):
            require(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be more than 0")
        require(self.weight_decay >= 0, f"weight_decay={self.weight_decay} must be 0 or more")
        require(all(0 <= beta < 1 for beta in (*self.betas, self.muon_momentum)), "betas must be from 0 to under 1")
        for name in ("warmup", "final_lr", "layer_decay"):
            require_within(self, name, 0, 1)
        require(self.layer_decay > 0, "layer_decay must be more than 0")
        require(self.clip_grad is None or self.clip_grad > 0, "clip_grad must be more than 0, or None")


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillConfig(JsonConfig):
    """What a teacher adds (DeiT). The student needs `distill_token=True`."""

    # What `patchlight.load` takes.
    teacher: str
    # "hard": the teacher's answer is the label; "soft": its probabilities at a temperature are.
    kind: Literal["hard", "soft"] = "hard"
    # The teacher's share of the loss.
    share: float = 0.5
    temperature: float = 3.0

    def __post_init__(self) -> None:
        check_types(self)
        require_within(self, "share", 0, 1)
        require(self.temperature > 0, "temperature must be more than 0")


FEWEST_TO_EVEN_OUT = 8
"""Photos in whose answers all classes can be used alike without every answer becoming the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DinoConfig(JsonConfig):
    """How a ViT learns from photos alone.

    The views are made as said here, from a square of the photo; of `augment`, only crop="resized" is used, where the
    parts of files that views are cut from are to be others.
    """

    # The views: two large ones, of the model's image size, and small ones. Areas are shares of the photo.
    local_views: int = 6
    local_size: int | None = None  # pixels a side; None: three eighths of the image's, in whole patches
    global_area: tuple[float, float] = (0.35, 1.0)
    local_area: tuple[float, float] = (0.05, 0.35)
    colour: float = 0.4
    grey: float = 0.2
    blur: float = 0.5
    solarize: float = 0.1

    # The head: three layers, a bottleneck, and the similarities to the prototypes, which are the classes. Small sets
    # need few of them.
    prototypes: int = 2048
    head_hidden: int = 512
    bottleneck: int = 256

    # The answers: similarities divided by a temperature. The teacher's grows over `teacher_warmup` of the run.
    # A low one at first: what a photo's answers have in common grows only where it is more than the ratio of the two
    # temperatures, and in a model that has learned nothing it is little.
    student_temperature: float = 0.1
    teacher_temperature_start: float = 0.02
    teacher_temperature: float = 0.03
    teacher_warmup: float = 0.3
    # How the teacher's answers are kept from preferring a class: their running mean is taken off, or they are made to
    # use all classes alike within the batch.
    centring: Literal["mean", "sinkhorn", "none"] = "sinkhorn"
    centre_momentum: float = 0.9

    # The share of itself that the teacher keeps at each step, at first; it grows to 1 along a cosine. Runs of a few
    # hundred steps need less.
    momentum: float = 0.99
    # The prototypes stay where they are for this share of the run.
    prototypes_rest: float = 0.01

    # Weights of the further losses; 0: left out. `mask_share` of the patches of every second large view are hidden.
    # Without `koleo`, a small model's features, nearly equal at first, may stay so.
    koleo: float = 0.1
    patch_loss: float = 0.0
    mask_share: float = 0.4

    # From this share of the run on, this many bad lines of metrics in a row stop it.
    collapse_after: float = 0.2
    collapse_checks: int = 5

    def __post_init__(self) -> None:
        check_types(self)
        require_within(self, "local_views", 0, 64)
        require(self.local_size is None or self.local_size > 0, f"local_size={self.local_size} must be more than 0")
        for name in ("global_area", "local_area"):
            low, high = getattr(self, name)
            require(0 < low <= high <= 1, f"{name}={(low, high)} must rise, from more than 0 to at most 1")
        for name in ("colour", "grey", "blur", "solarize", "teacher_warmup", "centre_momentum", "momentum"):
            require_within(self, name, 0, 1)
        for name in ("prototypes_rest", "collapse_after"):
            require_within(self, name, 0, 1)
        for name in ("prototypes", "head_hidden", "bottleneck"):
            require(getattr(self, name) >= 2, f"{name}={getattr(self, name)} must be 2 or more")
        for name in ("student_temperature", "teacher_temperature_start", "teacher_temperature"):
            require_within(self, name, 0.01, 10)
        for name in ("patch_loss", "koleo"):
            require(getattr(self, name) >= 0, f"{name}={getattr(self, name)} must be 0 or more")
        require(0 < self.mask_share < 1, f"mask_share={self.mask_share} must lie between 0 and 1")
        require(self.collapse_checks >= 1, f"collapse_checks={self.collapse_checks} must be 1 or more")

    def local_size_for(self, model: ViTConfig) -> Size:
        """The (height, width) of the small views."""
        if self.local_size is not None:
            size = (self.local_size, self.local_size)
            model.grid_for(size)  # which refuses what patches do not divide
            return size
        rows, columns = (
            max(1, round(3 / 8 * side / patch)) * patch
            for side, patch in zip(model.image_size, model.patch_size, strict=True)
        )
        return rows, columns


@dataclass(frozen=True, kw_only=True, slots=True)
class MaeConfig(JsonConfig):
    """How patches are hidden, and who draws them. The paper's decoder is 512 wide, 8 deep, for a large encoder."""

    # The share of the patches that the encoder does not see.
    mask_share: float = 0.75
    decoder_width: int = 256
    decoder_depth: int = 4
    decoder_heads: int = 8
    # Each patch's pixels are brought to mean 0 and deviation 1 before they are compared; or they are taken as they are.
    normalised_pixels: bool = True
    # Steps after which a run stops that still predicts no better than a plain grey would.
    patience: int = 1000

    def __post_init__(self) -> None:
        check_types(self)
        require(0 < self.mask_share < 1, f"mask_share={self.mask_share} must lie between 0 and 1")
        for name in ("decoder_width", "decoder_depth", "decoder_heads", "patience"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be 1 or more")
        require(
            self.decoder_width % self.decoder_heads == 0 and self.decoder_width % 4 == 0,
            f"decoder_width={self.decoder_width} must be divisible by decoder_heads={self.decoder_heads} and by 4 "
            "(sine and cosine of two coordinates)",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SubjectConfig(JsonConfig):
    """How a ViT learns where subjects are. `augment` is not used; the parts are cut as said here."""

    # What the place counts for in the loss, beside the label.
    weight: float = 3.0
    # And what the boxes of a model with patch_boxes count for.
    box_weight: float = 2.0
    # Pixels a side of the canvas that a photo is kept on; larger photos are made smaller.
    canvas: int = 192
    # The share of photos with a box of which a part is cut that holds the whole subject; of the others any part is.
    whole: float = 0.75
    # Of photos with several objects, the share of such parts that hold all; most of the others hold the main one.
    together: float = 0.5
    # What a mask counts for in what is to be found, beside the box around it. By the share of each patch that a mask
    # covers, thin legs and tails are lost again when boxes are read from the patches: read from exact maps of 16 x 16
    # patches, boxes around 300 masks of DUTS and CAMO overlap the true ones by 0.87 in the mean, and 0.74 around 150
    # made ones with thin legs. By the root of that share (see `mixed_coverage`) it is 0.91 and 0.92; with 0.3 of the
    # box it is 0.94 and 0.94, and the map still shows the subject's shape.
    mask_share: float = 0.7
    # Of the sides of such a part, the share that is the photo's own: subjects are mostly small in whole photos.
    to_the_edge: float = 0.5
    # The share of the photo's area that any part has, and its aspect.
    area: tuple[float, float] = (0.2, 1.0)
    aspect: tuple[float, float] = (0.5, 2.0)
    # A subject of which less than this share is in the part is not to be named, nor found unless none of it is there.
    visible: float = 0.35
    # The share of photos in whose place comes one that shows nothing, mostly with a small subject pasted into it.
    paste: float = 0.0
    colour: float = 0.4
    grey: float = 0.1

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("weight", "box_weight"):
            require(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be more than 0")
        require_within(self, "canvas", 16, 4096)
        for name in ("whole", "together", "mask_share", "to_the_edge", "visible", "paste", "colour", "grey"):
            require_within(self, name, 0, 1)
        for name in ("area", "aspect"):
            low, high = getattr(self, name)
            require(0 < low <= high, f"{name}={(low, high)} must rise, from more than 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig(JsonConfig):
    """One training run, whole."""

    model: ModelConfig
    data: DataConfig
    preprocess: PreprocessConfig
    augment: AugmentConfig = dataclasses.field(default_factory=AugmentConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    # What is learnt, where it is not labels alone: from a teacher, without labels (DINO, MAE), or where subjects are.
    distill: DistillConfig | None = None
    dino: DinoConfig | None = None
    mae: MaeConfig | None = None
    subject: SubjectConfig | None = None
    # A checkpoint to start from, as `patchlight.load` takes it; its head is replaced where the classes differ, be it in
    # number, name or order.
    start: str | None = None
    # Which blocks learn, counted from the end: None all and the embedding, 0 the head alone.
    trainable_blocks: int | None = None
    epochs: float = 100.0
    # Over all processes, and how many parts it is taken in to save memory.
    batch_size: int = 512
    accumulate: int = 1
    label_smoothing: float = 0.1
    # Weights averaged over steps with this decay are evaluated and saved, where given.
    ema: float | None = None
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    # Sharded over processes (FSDP2) instead of copied to each (DDP).
    sharded: bool = False
    seed: int = 0
    evaluate_every: float = 1.0
    # Steps between checkpoints, and between lines of metrics (which hold the mean loss since the last).
    checkpoint_every: int = 500
    log_every: int = 20
    # Steps with a loss that is not a number are left out; this many in a row stop the run.
    bad_losses: int = 5

    def __post_init__(self) -> None:
        _check_nested(self)
        for name in ("epochs", "evaluate_every"):
            require(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be more than 0")
        for name in ("batch_size", "accumulate", "checkpoint_every", "log_every", "bad_losses"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be 1 or more")
        require(self.batch_size % self.accumulate == 0, "accumulate must divide batch_size")
        require_within(self, "label_smoothing", 0, 0.99)
        require_within(self, "seed", 0, 2**31)
        require(self.model.in_channels == 3, f"photos have 3 channels, the model takes {self.model.in_channels}")
        require(self.ema is None or 0 < self.ema < 1, "ema must lie between 0 and 1, or be None")
        require(
            self.trainable_blocks is None or 0 <= self.trainable_blocks <= self.model.depth,
            f"trainable_blocks={self.trainable_blocks}: the model has {self.model.depth} blocks; take at most "
            "these, or None, which trains everything before them, too",
        )
        require(self.ema is None or self.dino is None, "dino saves its teacher, an average already; set ema=None")
        ways = [name for name in WAYS if getattr(self, name) is not None]
        require(len(ways) < 2, f"a run learns in one way; drop one of {' and '.join(ways)}")
        require(
            not ways or isinstance(self.model, ViTConfig),
            f"{' and '.join(ways)} teaches a ViT; a {self.model.to_dict()['architecture']} learns from labels",
        )
        if self.labelled:
            require(self.model.num_classes > 0, "model.num_classes must be the number of classes to learn")
        else:
            require(self.model.num_classes == 0, f"{ways[0]} learns without labels; set model.num_classes=0")
            require(self.data.groups is None, f"{ways[0]} learns no classes to group; set data.groups=None")
            mix = self.augment.mix
            require(not mix, f"augment.mix={mix} mixes labels, of which {ways[0]} has none; set augment.mix=0")
        if self.dino is not None and self.dino.centring == "sinkhorn":
            at_once = self.batch_size // self.accumulate
            require(
                at_once >= FEWEST_TO_EVEN_OUT,
                f"dino.centring='sinkhorn' evens answers out within {at_once} photos, which are too few; raise "
                f"batch_size to {FEWEST_TO_EVEN_OUT} or more, or set dino.centring='mean'",
            )
        token = getattr(self.model, "distill_token", False)
        require(self.distill is None or token, "distillation needs model.distill_token=True (DeiT)")
        require(
            tuple(self.preprocess.image_size) == tuple(self.model.image_size),
            f"preprocess.image_size={self.preprocess.image_size} differs from model.image_size="
            f"{self.model.image_size}; set both",
        )
        require(
            not self.augment.mix or self.augment.repeats == 1, "mixing would pair a photo with its own repeat; drop one"
        )
        require(not self.augment.mix or self.batch_size // self.accumulate % 2 == 0, "mixing needs an even batch_size")

    @property
    def labelled(self) -> bool:
        """Whether labels are learnt; self-supervision uses them, where there are any, to judge the features."""
        return self.dino is None and self.mae is None

    def to_dict(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value.to_dict() if isinstance(value, JsonConfig) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> typing.Self:
        check_names(cls, values)
        check_whole(cls, values)
        nested = {name: kind.from_dict for name, kind in _PARTS.items() if isinstance(values.get(name), dict)}
        if "model" in nested:
            nested["model"] = config_from_dict
        if isinstance(values.get("distill"), dict) and "teacher" not in values["distill"]:
            raise PatchlightError("distillation needs distill.teacher: what patchlight.load takes")
        return cls(**values | {name: read(values[name]) for name, read in nested.items()})

    def changed(self, changes: dict[str, Any]) -> typing.Self:
        """With settings replaced by their dotted names: {"optim.lr": 1e-3, "epochs": 20}."""
        values = self.to_dict()
        for name, value in changes.items():
            part, dot, rest = name.partition(".")
            if not dot:
                self._check_name(name)
                values[name] = value
                continue
            if part not in _PARTS:
                raise PatchlightError(f"unknown part {part!r} in {name!r}; the parts are {', '.join(_PARTS)}")
            check_names(type(self.model) if part == "model" else _PARTS[part], {rest: value})
            values[part] = (values[part] or {}) | {rest: value}
        return self.from_dict(values)

    def _check_name(self, name: str) -> None:
        """Refuse what is no setting of the run, though it may be meant for one of its parts."""
        if name in field_names(type(self)):
            return
        known = {each: [each] for each in field_names(type(self))}
        for part, kind in (_PARTS | {"model": type(self.model)}).items():
            for each in field_names(kind):
                known.setdefault(each, []).append(f"{part}.{each}")
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = (
            f"did you mean {' or '.join(known[nearest[0]])}?"
            if nearest
            else f"known: {', '.join(field_names(type(self)))}"
        )
        raise PatchlightError(f"unknown setting {name!r} of a run; {hint}")


_PARTS: dict[str, type[JsonConfig]] = {
    "model": ViTConfig,  # or another architecture's
    "data": DataConfig,
    "preprocess": PreprocessConfig,
    "augment": AugmentConfig,
    "optim": OptimConfig,
    "distill": DistillConfig,
    "dino": DinoConfig,
    "mae": MaeConfig,
    "subject": SubjectConfig,
}
WAYS = ("distill", "dino", "mae", "subject")


def _check_nested(config: TrainConfig) -> None:
    for name, kind in _PARTS.items():
        value = getattr(config, name)
        require(
            isinstance(value, ModelConfig if name == "model" else kind) or (name in WAYS and value is None),
            f"{name}={value!r:.60} is no {kind.__name__}; set its parts, such as {name}.{field_names(kind)[0]}",
        )
    check_types(config, skip=_PARTS)
