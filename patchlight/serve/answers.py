"""What the API answers with: the shapes of its JSON, boxes and heat in them, and files of tensors."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import safetensors.torch
from fastapi import Query, Response
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from patchlight.geometry import Box
from patchlight.serve.engine import Seen

Grid = Annotated[list[int], Field(min_length=2, max_length=2, description="[rows, columns] of patches")]
Corners = Annotated[
    list[float],
    Field(min_length=4, max_length=4, description="[left, top, right, bottom] in pixels of the upright photo"),
]
Number = Annotated[int, Query(ge=0, le=1000, description="Of the model, as /models lists them")]
PhotoId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]

BINARY: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {}}, "description": "A safetensors file"}
}


class Problem(BaseModel):
    reason: str
    message: str


class Error(BaseModel):
    """Every answer that is not a success."""

    error: Problem


class Health(BaseModel):
    status: Literal["ok", "loading", "stopping"]


class ModelInfo(BaseModel):
    number: Annotated[int, Field(description="What `model` is in the other requests")]
    name: str
    origin: str
    parameters: int
    image_size: Annotated[list[int], Field(description="[height, width]")]
    patch_size: Annotated[list[int], Field(description="[height, width]")]
    grid: Grid
    tokens: int
    depth: int
    heads: int
    class_token: bool
    distill_token: bool
    registers: int
    positions: str
    classes: Annotated[int, Field(description="0 where the model names none")]
    method: Annotated[str, Field(description="How it finds subjects where none is asked for")]
    taught: Annotated[bool, Field(description="Whether it was taught where subjects are")]
    latency_ms: Annotated[float, Field(description="One photo, the median of the latest on this machine")]
    device: str


class Models(BaseModel):
    ready: bool
    models: list[ModelInfo]
    version: str


class PhotoInfo(BaseModel):
    id: str
    name: str
    width: int
    height: int
    format: str
    bytes: int


class HeatMap(BaseModel):
    grid: Grid
    region: Annotated[
        list[float],
        Field(description="Where the grid lies on the photo, as corners; outside of it where the photo was padded"),
    ]
    values: Annotated[list[float], Field(description="Row by row")]


class Naming(BaseModel):
    """What a photo shows; group and label are null where the model's classes have no groups, the label also where none
    is sure."""

    group: Annotated[str | None, Field(description="What it shows: animal, thing, ..., or unknown")] = None
    group_confidence: Annotated[float | None, Field(description="The summed probability of its classes")] = None
    label: Annotated[str | None, Field(description="The finest name with at least half of the probability")] = None
    label_confidence: float | None = None


class FoundSubject(BaseModel):
    box: Corners
    score: Annotated[float, Field(description="The mean heat of its patches")]
    confidence: Annotated[float, Field(description="That the box overlaps a subject's by half or more")]


class Found(BaseModel):
    decision: Literal["subject", "several", "unsure", "none"]
    confidence: float
    count: Annotated[int, Field(description="How many subjects there are, though fewer may have been asked for")]
    method: str
    subjects: list[FoundSubject]
    named: Annotated[
        Naming | None, Field(description="What the photo shows; null by a model whose classes have no names")
    ]
    heat: HeatMap
    mask: Annotated[list[int], Field(description="1 where a patch belongs to a subject, row by row")]


class Region(BaseModel):
    region: Annotated[list[int], Field(description="[left, top, right, bottom]: what the crop shows of the photo")]
    width: int
    height: int


class CropOrder(BaseModel):
    """One photo of an archive."""

    model_config = ConfigDict(extra="forbid")

    photo: PhotoId
    box: Corners
    margin: Annotated[float, Field(ge=0, le=2)] = 0.03
    aspect: Annotated[str, Field(max_length=12)] = "free"


class CropOrders(BaseModel):
    model_config = ConfigDict(extra="forbid")

    crops: Annotated[list[CropOrder], Field(min_length=1, max_length=128)]


class AttentionRows(BaseModel):
    layer: int
    queries: Annotated[list[int], Field(description="Tokens, counted from 0, the prefix first")]
    num_prefix: int
    grid: Grid
    region: list[float]
    weights: Annotated[
        list[list[list[float]]],
        Field(description="(head, query, token): each row sums to one; one head where their mean was asked for"),
    ]


class LabelledShare(BaseModel):
    label: str
    name: Annotated[str, Field(description="The label in people's words")]
    probability: float


class Classes(Naming):
    classes: list[LabelledShare]


class PhotoPrediction(BaseModel):
    """Of one photo; what was not asked for is null."""

    name: str
    status: Literal["ok", "error"]
    reason: Annotated[str | None, Field(description="As `pl.decode` says it, of a photo that cannot be used")] = None
    detail: str | None = None
    width: int | None = None
    height: int | None = None
    decision: Literal["subject", "several", "unsure", "none"] | None = None
    confidence: float | None = None
    boxes: list[FoundSubject] | None = None
    named: Naming | None = None
    classes: list[LabelledShare] | None = None
    features: list[float] | None = None


class Predictions(BaseModel):
    model: str
    outputs: Literal["boxes", "classes", "features"]
    predictions: list[PhotoPrediction]


class CostsAnswer(BaseModel):
    patch_size: int
    image_size: Annotated[int, Field(description="What was asked for, brought to the nearest multiple of the patch")]
    grid: Grid
    tokens: int
    parameters: int
    macs: int
    attention_macs: int
    mlp_macs: int
    attention_entries: int
    activation_bytes: int
    latency_ms: Annotated[
        float | None, Field(description="With timed=true: the median, measured; null where it would take too long")
    ]


class TokensAbout(BaseModel):
    """What is said beside the tensors of /tokens."""

    patch_size: Annotated[list[int], Field(description="[height, width]")]
    image_size: Annotated[list[int], Field(description="[height, width], multiples of the patch")]
    grid: Grid
    region: Corners
    order: Annotated[list[int], Field(description="Which patch of the photo lies at each place")]
    layer: int
    classes: list[LabelledShare]


class Shuffled(BaseModel):
    """Classes are empty for a model that names none."""

    seed: int
    order: Annotated[list[int], Field(description="Which patch lies at each place of the shuffled photo")]
    grid: Grid
    region: list[float]
    with_positions: list[LabelledShare]
    shuffled_with_positions: list[LabelledShare]
    without_positions: list[LabelledShare]
    shuffled_without_positions: list[LabelledShare]
    likeness_with_positions: Annotated[
        float, Field(description="The cosine of what the model says of the photo and of the shuffled photo")
    ]
    likeness_without_positions: float


def heat_map(seen: Seen, heat_hw: Tensor) -> HeatMap:
    return HeatMap(grid=list(heat_hw.shape), region=corners(seen.frame), values=heat_hw.flatten().tolist())


def corners(box: Box) -> list[float]:
    return [float(end) for end in (box.left, box.top, box.right, box.bottom)]


def tensor_file(tensors: Mapping[str, Tensor], about: BaseModel | None = None) -> Response:
    """`about` becomes the file's one entry of metadata, as JSON."""
    said = None if about is None else {"about": about.model_dump_json()}
    packed = {name: tensor.contiguous() for name, tensor in tensors.items()}
    return Response(safetensors.torch.save(packed, said), media_type="application/octet-stream")
