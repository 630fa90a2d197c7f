"""The API, of what a model saw in a photo: attention, features, classes, and what a shuffle changes."""

import asyncio
import math
from typing import Annotated, Any, Literal

import torch.nn.functional as F
from fastapi import APIRouter, Query, Response
from torch import Tensor

from patchlight.classification import likeliest
from patchlight.explain.attention import resolve_layers, resolve_queries
from patchlight.explain.shuffling import shuffled_order
from patchlight.serve import answers
from patchlight.serve.state import ServerState
from patchlight.weights.load import Loaded

Layer = Annotated[int, Query(ge=-1000, le=1000, description="Of the block, from 0, or from -1 backwards")]


def add_look_routes(api: APIRouter, state: ServerState) -> None:
    engine = state.engine

    @api.get("/photos/{photo}/attention")
    async def attention(
        photo: answers.PhotoId,
        model: answers.Number = 0,
        layer: Layer = -1,
        query: Annotated[
            str,
            Query(pattern=r"^(cls|distill|registers|\d{1,4},\d{1,4})$", description="A name, or a patch: row,column"),
        ] = "cls",
        heads: Literal["all", "mean"] = "all",
    ) -> answers.AttentionRows:
        """What tokens attended to, exactly as `patchlight.attention` says."""
        served, seen = await state.seen(state.photos.get(photo), model)
        (block,) = resolve_layers(layer, served.config.depth)
        asked = resolve_queries(_query(query), served.config, seen.grid)
        rows_AQN = seen.layers[block].rows(asked)[0]
        if heads == "mean":
            rows_AQN = rows_AQN.mean(0, keepdim=True)
        return answers.AttentionRows(
            layer=block,
            queries=asked,
            num_prefix=seen.num_prefix,
            grid=list(seen.grid),
            region=answers.corners(seen.frame),
            weights=rows_AQN.tolist(),
        )

    @api.get("/photos/{photo}/heads", response_class=Response, responses=answers.BINARY)
    async def heads(photo: answers.PhotoId, model: answers.Number = 0, layer: Layer = -1) -> Response:
        """What a block's attention is made of, for all tokens at once: `q` and `k` (heads, tokens, E) in float32.

        The row of token i in head a is softmax(q[a, i] . k[a] / sqrt(E)), to which `bias` (heads, tokens, tokens) is
        added before the softmax where the model has one.
        """
        served, seen = await state.seen(state.photos.get(photo), model)
        (block,) = resolve_layers(layer, served.config.depth)
        kept = seen.layers[block]
        tensors = {"q": kept.q_BANE[0], "k": kept.k_BANE[0]}
        if kept.mask is not None:
            heads, tokens, _ = tensors["q"].shape
            tensors["bias"] = kept.mask[0].expand(heads, tokens, tokens).contiguous()
        return answers.tensor_file(tensors)

    @api.get("/photos/{photo}/features", response_class=Response, responses=answers.BINARY)
    async def features(photo: answers.PhotoId, model: answers.Number = 0) -> Response:
        """The last block's `patches` (P, D), each of length one, in float32: their products are cosines."""
        _, seen = await state.seen(state.photos.get(photo), model)
        return answers.tensor_file({"patches": F.normalize(seen.tokens_ND[seen.num_prefix :], dim=1).contiguous()})

    @api.get("/photos/{photo}/rollout")
    async def rollout(photo: answers.PhotoId, model: answers.Number = 0) -> answers.HeatMap:
        """Attention followed through all blocks, exactly as `patchlight.explain.rollout` says."""
        kept = state.photos.get(photo)
        served, seen = await state.seen(kept, model, whole=False)
        image_CHW, _ = await state.prepared(kept, served)
        return answers.heat_map(seen, await asyncio.wrap_future(engine.rollout(served, image_CHW)))

    @api.get("/photos/{photo}/classify")
    async def classify(
        photo: answers.PhotoId, model: answers.Number = 0, top: Annotated[int, Query(ge=1, le=100)] = 5
    ) -> answers.Classes:
        """The likeliest classes, by a model that names them."""
        engine.model(model).loaded.check_names_classes()
        served, seen = await state.seen(state.photos.get(photo), model, whole=False)
        named = likeliest(served.loaded, seen.output_K).named
        about = {} if named is None else named.to_dict()
        return answers.Classes(classes=_classes(served.loaded, seen.output_K, top), **about)

    @api.get("/photos/{photo}/shuffle")
    async def shuffle(
        photo: answers.PhotoId,
        model: answers.Number = 0,
        seed: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
        top: Annotated[int, Query(ge=1, le=20)] = 3,
    ) -> answers.Shuffled:
        """What the model says of the photo with its patches in another order, with and without positions."""
        kept = state.photos.get(photo)
        served, seen = await state.seen(kept, model, whole=False)
        image_CHW, _ = await state.prepared(kept, served)
        order_P = shuffled_order(math.prod(seen.grid), seed)
        said_4K = await asyncio.wrap_future(engine.shuffle(served, image_CHW, order_P))
        lists = [_classes(served.loaded, said_K, top) if served.names_classes else [] for said_K in said_4K]
        return answers.Shuffled(
            seed=seed,
            order=order_P.tolist(),
            grid=list(seen.grid),
            region=answers.corners(seen.frame),
            with_positions=lists[0],
            shuffled_with_positions=lists[1],
            without_positions=lists[2],
            shuffled_without_positions=lists[3],
            likeness_with_positions=float(F.cosine_similarity(said_4K[0], said_4K[1], 0)),
            likeness_without_positions=float(F.cosine_similarity(said_4K[2], said_4K[3], 0)),
        )


def _query(text: str) -> Any:
    row, comma, column = text.partition(",")
    return (int(row), int(column)) if comma else text


def _classes(loaded: Loaded, logits_K: Tensor, top: int) -> list[answers.LabelledShare]:
    said = likeliest(loaded, logits_K, top)
    each = zip(said.labels, said.names, said.probabilities, strict=True)
    return [answers.LabelledShare(label=label, name=name, probability=share) for label, name, share in each]
