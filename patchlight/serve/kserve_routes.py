"""The KServe v2 protocol (Open Inference Protocol), as KServe, Triton and MLServer speak it: /v2/models/NAME/infer.

A model takes `photo` (BYTES: files of photos, base64 in JSON) or `image` (FP32: B, 3, H, W, prepared as the model takes
it), and gives `logits`, `probabilities` and `features` in FP32, as far as it has them. Tensors of requests may be
binary (the header Inference-Header-Content-Length); those of answers are JSON.
"""

import asyncio
import base64
import binascii
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from fastapi import APIRouter, Request, Response
from torch import Tensor

from patchlight import __version__
from patchlight.errors import PatchlightError
from patchlight.serve.engine import Served
from patchlight.serve.predict_routes import prepared
from patchlight.serve.spent import note
from patchlight.serve.state import ServerState, together
from patchlight.weights.vit.names import PROJECTIONS

JSON_LENGTH = "inference-header-content-length"

Wanted = Literal["logits", "features"]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request, read."""

    id: str | None
    photos: list[bytes]
    images_BCHW: Tensor | None
    outputs: list[str]


def add_kserve_routes(api: APIRouter, state: ServerState) -> None:
    engine, limits = state.engine, state.limits

    @api.get("/v2")
    async def server() -> dict[str, Any]:
        return {"name": "patchlight", "version": __version__, "extensions": ["binary_tensor_data"]}

    @api.get("/v2/health/live")
    async def live() -> dict[str, bool]:
        return {"live": True}

    @api.get("/v2/health/ready")
    async def ready(response: Response) -> dict[str, bool]:
        is_ready = engine.ready and not state.stopping
        response.status_code = 200 if is_ready else 503
        return {"ready": is_ready}

    @api.get("/v2/models/{name:path}/ready")
    async def model_ready(name: str) -> dict[str, Any]:
        return {"name": engine.named(name).name, "ready": True}

    @api.get("/v2/models/{name:path}")
    async def about(name: str) -> dict[str, Any]:
        served = engine.named(name)
        height, width = served.loaded.preprocess.config.image_size
        return {
            "name": served.name,
            "versions": ["1"],
            "platform": "pytorch",
            "inputs": [
                {"name": "photo", "datatype": "BYTES", "shape": [-1]},
                {"name": "image", "datatype": "FP32", "shape": [-1, 3, height, width]},
            ],
            "outputs": [
                {"name": each, "datatype": "FP32", "shape": [-1, _width(served, each)]} for each in _outputs(served)
            ],
        }

    @api.post("/v2/models/{name:path}/infer")
    async def infer(name: str, request: Request) -> dict[str, Any]:
        served = engine.named(name)
        length = request.headers.get(JSON_LENGTH)
        asked = await state.work(_read, await request.body(), length, limits.predicted, limits.image_size)
        offered = _outputs(served)
        outputs = asked.outputs or offered[:1]
        for each in outputs:
            if each not in offered:
                raise PatchlightError(f"{served.name} gives no output {each!r:.60}; it gives {', '.join(offered)}")

        wanted: list[Wanted] = sorted({"features" if each == "features" else "logits" for each in outputs})

        async def one(given: bytes | Tensor) -> list[Tensor]:
            async with state.in_hand():
                if isinstance(given, bytes):
                    given = (await state.work(prepared, served.loaded, "features", given, limits.pixels))[0]
                futures = [asyncio.wrap_future(engine.predict(served, each, given)) for each in wanted]
                return await asyncio.gather(*futures)

        photos = asked.photos if asked.images_BCHW is None else list(asked.images_BCHW)
        note(served.name, len(photos))
        answers = await together(map(one, photos))
        said: dict[str, Tensor] = {}
        for each, tensors in zip(wanted, zip(*answers, strict=True), strict=True):
            said[each] = torch.stack(tensors)
        if "probabilities" in outputs:
            said["probabilities"] = said["logits"].softmax(1)
        answer = {
            "model_name": served.name,
            "model_version": "1",
            "outputs": [
                {
                    "name": each,
                    "datatype": "FP32",
                    "shape": list(said[each].shape),
                    "data": said[each].flatten().tolist(),
                }
                for each in outputs
            ],
        }
        return answer if asked.id is None else answer | {"id": asked.id}


def _outputs(served: Served) -> list[str]:
    config = served.loaded.config
    if not config.num_classes:
        return ["features"]
    named = [] if served.loaded.provenance.origin in PROJECTIONS else ["probabilities"]
    return ["logits", *named, "features"]


def _width(served: Served, output: str) -> int:
    config = served.loaded.config
    return config.feature_width if output == "features" else config.num_classes


def _read(body: bytes, length: str | None, most: int, longest: int) -> _Asked:
    """A request's JSON and what is binary behind it; raises PatchlightError for what is not as the protocol says."""
    head, binary = body, b""
    if length is not None:
        if not (length.isascii() and length.isdecimal() and int(length[:12]) <= len(body)):
            raise PatchlightError(f"{JSON_LENGTH} is not the length of the JSON at the beginning of the body")
        head, binary = body[: int(length)], body[int(length) :]
    try:
        asked = json.loads(head)
        inputs, outputs = asked["inputs"], asked.get("outputs") or []
        names = list(dict.fromkeys(str(each["name"]) for each in outputs))  # or a few bytes ask for gigabytes
        given = {str(each["name"]): each for each in inputs}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise PatchlightError("the body is no request of the KServe v2 protocol: JSON with a list of inputs") from None
    if len(given) != 1 or len(inputs) != 1 or not given.keys() <= {"photo", "image"}:
        raise PatchlightError("give one input: photo (BYTES) or image (FP32)")
    ((name, tensor),) = given.items()
    kind = {"photo": "BYTES", "image": "FP32"}[name]
    if tensor.get("datatype") != kind:
        raise PatchlightError(f"the input {name} is {kind}, not {tensor.get('datatype')!r:.40}")
    shape = tensor.get("shape")
    whole = isinstance(shape, list) and all(type(side) is int and 0 < side <= 2**24 for side in shape)
    if not whole or len(shape) != (1 if name == "photo" else 4):
        raise PatchlightError(f"the input {name} has the shape [B{'' if name == 'photo' else ', 3, H, W'}]")
    if shape[0] > most:
        raise PatchlightError(f"{shape[0]} at once are too many; send up to {most}")
    parameters = tensor.get("parameters")
    size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
    if size is not None:
        if type(size) is not int or size != len(binary):
            raise PatchlightError("binary_data_size is not what follows the JSON")
        data: Any = binary
    else:
        data = tensor.get("data")
    number = asked.get("id")
    identity = str(number)[:200] if isinstance(number, str | int | float) else None
    if name == "photo":
        photos = _strings(data) if size is not None else _base64(data)
        if len(photos) != shape[0]:
            raise PatchlightError(f"the input photo has {len(photos)} elements, and its shape says {shape[0]}")
        return _Asked(identity, photos, None, names)
    if shape[1] != 3 or max(shape[2:]) > longest:
        raise PatchlightError(f"the input image has 3 channels and sides up to {longest}, not {shape[1:]}")
    return _Asked(identity, [], _floats(data, shape), names)


def _floats(data: Any, shape: Sequence[int]) -> Tensor:
    try:
        with np.errstate(over="ignore"):  # what is infinite is refused below
            packed = isinstance(data, bytes)
            numbers = np.frombuffer(data, "<f4") if packed else np.asarray(data, np.float32).reshape(-1)
        image_BCHW = numbers.reshape(shape).astype(np.float32)
    except (ValueError, TypeError, OverflowError):
        raise PatchlightError(f"the input image is not {'x'.join(map(str, shape))} numbers") from None
    if not np.isfinite(image_BCHW).all():
        raise PatchlightError("the input image holds what is no number")
    return torch.from_numpy(image_BCHW)


def _base64(data: Any) -> list[bytes]:
    try:
        return [base64.b64decode(each, validate=True) for each in data]
    except (binascii.Error, ValueError, TypeError):
        raise PatchlightError("the input photo is a list of files in base64") from None


def _strings(data: bytes) -> list[bytes]:
    """As the protocol packs them: each after its length in four bytes."""
    found, place = [], 0
    while place + 4 <= len(data):
        (length,) = struct.unpack_from("<I", data, place)
        found.append(data[place + 4 : place + 4 + length])
        place += 4 + length
    if place != len(data):
        raise PatchlightError("the binary input photo ends in the middle of an element")
    return found
