"""The API, of models: which there are, how they see positions, and what they cost."""

import asyncio
import dataclasses
import math
from typing import Annotated

from fastapi import APIRouter, Query, Response

from patchlight import __version__
from patchlight.explain.probes import position_similarity
from patchlight.serve import answers
from patchlight.serve.engine import Served
from patchlight.serve.state import ServerState


def add_model_routes(api: APIRouter, state: ServerState) -> None:
    engine, limits = state.engine, state.limits

    @api.get("/models")
    async def models() -> answers.Models:
        """The ViTs that are served; empty until they are loaded. Models of other families are for /predict."""
        served = [each for each in engine.models if each.is_shown] if engine.ready else []
        return answers.Models(ready=engine.ready, models=[_info(each) for each in served], version=__version__)

    @api.get("/models/{model}/positions", response_class=Response, responses=answers.BINARY)
    async def positions(model: int) -> Response:
        """How alike the model takes two positions to be: `similarity` (h, w, h, w) float32."""
        served = engine.model(model)
        similarity_hwhw = await state.work(position_similarity, served.vit)
        return answers.tensor_file({"similarity": similarity_hwhw.float().cpu().contiguous()})

    @api.get("/costs")
    async def costs(
        model: answers.Number = 0,
        patch_size: Annotated[int, Query(ge=4, le=64)] = 16,
        image_size: Annotated[int, Query(ge=32, le=limits.image_size, description="Of a side, in pixels")] = 224,
        timed: bool = False,
    ) -> answers.CostsAnswer:
        """What a model of this kind costs with other patches or images."""
        served = engine.model(model)
        side = patch_size * max(1, round(image_size / patch_size))
        config = dataclasses.replace(served.config, patch_size=(patch_size,) * 2, image_size=(side, side))
        counted = await asyncio.wrap_future(engine.costs(config))
        latency = await state.latency(served, config, counted.macs) if timed else None
        values = counted.to_dict() | {"image_size": side, "patch_size": patch_size, "latency_ms": latency}
        return answers.CostsAnswer(**values | {"grid": list(counted.grid)})


def _info(served: Served) -> answers.ModelInfo:
    loaded, config = served.loaded, served.config
    image_size = loaded.preprocess.config.image_size
    grid = config.grid_for(image_size)
    return answers.ModelInfo(
        number=served.number,
        name=served.name,
        origin=loaded.provenance.origin,
        parameters=sum(parameter.numel() for parameter in loaded.model.parameters()),
        image_size=list(image_size),
        patch_size=list(config.patch_size),
        grid=list(grid),
        tokens=config.num_prefix + math.prod(grid),
        depth=config.depth,
        heads=config.num_heads,
        class_token=config.class_token,
        distill_token=config.distill_token,
        registers=config.num_registers,
        positions=config.position,
        classes=config.num_classes if served.names_classes else 0,
        method=served.detector().method,
        taught=loaded.subject is not None,
        latency_ms=round(served.latency_ms, 2),
        device=str(loaded.model.norm.weight.device),
    )
