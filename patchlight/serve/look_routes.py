"""The API, of what a model saw in a photo: attention, features, classes, and what a shuffle changes."""

import asyncio
import math
from typing import Annotated, Any, Literal

import torch.nn.functional as F
from fastapi import APIRouter, Query, Response
from torch import Tensor

from patchlight.classification import likeliest
from patchlight.errors import PatchlightError
from patchlight.explain.attention import resolve_layers, resolve_queries
from patchlight.explain.shuffling import shuffled_order
from patchlight.geometry import Box, View
from patchlight.models.attention import Heads
from patchlight.models.vit import ViT
from patchlight.serve import answers
from patchlight.serve.diced import config_for, resized, tints
from patchlight.serve.engine import Served
from patchlight.serve.state import ServerState, prepare
from patchlight.weights.load import Loaded

_OWN_SIZE = "Of a side, in pixels; without it the model's own"
PatchSize = Annotated[int | None, Query(ge=4, le=64, description=_OWN_SIZE)]
Layer = Annotated[int, Query(ge=-1000, le=1000, description="Of the block, from 0, or from -1 backwards")]


def add_look_routes(api: APIRouter, state: ServerState) -> None:
    engine, limits = state.engine, state.limits

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
        return answers.tensor_file(_heads(seen.layers[block]))

    @api.get("/photos/{photo}/features", response_class=Response, responses=answers.BINARY)
    async def features(photo: answers.PhotoId, model: answers.Number = 0) -> Response:
        """The last block's `patches` (P, D), each of length one, in float32: their products are cosines."""
        _, seen = await state.seen(state.photos.get(photo), model)
        return answers.tensor_file({"patches": F.normalize(seen.tokens_ND[seen.num_prefix :], dim=1)})

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

    async def cut(
        photo: str, number: int, patch_size: int | None, image_size: int | None
    ) -> tuple[Served, ViT, Tensor, View]:
        """The model for patches and images of these sizes, and the photo as it takes it."""
        kept, served = state.photos.get(photo), engine.model(number)
        assert served.vit  # or it is refused
        config = config_for(served.loaded, patch_size, image_size)
        if (patch_size, image_size) == (None, None):
            return served, served.vit, *await state.prepared(kept, served)
        macs = (await asyncio.wrap_future(engine.costs(config))).macs
        if served.latency_ms / 1000 * macs / served.macs > limits.timed_seconds:
            raise PatchlightError(
                f"{math.prod(config.grid):,} patches would take too long here; take larger ones, or a smaller image"
            )
        loaded = await state.work(resized, served.loaded, config)
        assert isinstance(loaded.model, ViT)
        return served, loaded.model, *await state.work(prepare, loaded, kept.content, limits.pixels)

    def frame(vit: ViT, view: View) -> list[float]:
        (h, w), (down, across) = vit.config.grid_for(view.model_size), vit.config.patch_pixels(view.model_size)
        return answers.corners(view.around_source(Box(0, 0, w * across, h * down)))

    @api.get("/photos/{photo}/tokens", response_class=Response, responses=answers.BINARY)
    async def tokens(
        photo: answers.PhotoId,
        model: answers.Number = 0,
        patch_size: PatchSize = None,
        image_size: Annotated[int | None, Query(ge=32, le=limits.image_size, description=_OWN_SIZE)] = None,
        layer: Layer = -1,
        shuffle: Annotated[int | None, Query(ge=0, le=2**31 - 1, description="The seed of another order")] = None,
        positions: bool = True,
        top: Annotated[int, Query(ge=1, le=20)] = 3,
    ) -> Response:
        """What each patch becomes, with patches of any size, in any order, with positions or without: one pass.

        `patches` (P, D) as embedded, `positions` (P, D) where they are added, and `tints` (P, 3), which are colours for
        these; `prefix` (T, D); `q`, `k` and `bias` of a block, as /heads has them; `output` (K): logits, or features of
        a model without classes. Metadata `about`: JSON with grid, region, order and classes. Patches of another size
        are read by a patch projection that was resized (FlexiViT).
        """
        served, vit, image_CHW, view = await cut(photo, model, patch_size, image_size)
        (block,) = resolve_layers(layer, vit.config.depth)
        grid = vit.config.grid_for(view.model_size)
        order_P = None if shuffle is None else shuffled_order(math.prod(grid), shuffle)
        diced = await asyncio.wrap_future(engine.dice(vit, image_CHW, block, order_P, positions=positions))
        tensors = {"patches": diced.patches_PD, "prefix": diced.prefix_TD, "output": diced.output_K}
        if diced.positions_PD is not None:
            tensors["positions"] = diced.positions_PD
            tensors["tints"] = await state.work(tints, diced.positions_PD)
        about = answers.TokensAbout(
            patch_size=list(vit.config.patch_size),
            image_size=list(view.model_size),
            grid=list(grid),
            region=frame(vit, view),
            order=list(range(math.prod(grid))) if order_P is None else order_P.tolist(),
            layer=block,
            classes=_classes(served.loaded, diced.output_K, top) if served.names_classes else [],
        )
        return answers.tensor_file(tensors | _heads(diced.heads), about)

    @api.get("/photos/{photo}/shuffle")
    async def shuffle(
        photo: answers.PhotoId,
        model: answers.Number = 0,
        seed: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
        top: Annotated[int, Query(ge=1, le=20)] = 3,
        patch_size: PatchSize = None,
        image_size: Annotated[int | None, Query(ge=32, le=limits.image_size, description=_OWN_SIZE)] = None,
    ) -> answers.Shuffled:
        """What the model says of the photo with its patches in another order, with and without positions."""
        served, vit, image_CHW, view = await cut(photo, model, patch_size, image_size)
        grid = vit.config.grid_for(view.model_size)
        order_P = shuffled_order(math.prod(grid), seed)
        said_4K = await asyncio.wrap_future(engine.shuffle(vit, image_CHW, order_P))
        lists = [_classes(served.loaded, said_K, top) if served.names_classes else [] for said_K in said_4K]
        return answers.Shuffled(
            seed=seed,
            order=order_P.tolist(),
            grid=list(grid),
            region=frame(vit, view),
            with_positions=lists[0],
            shuffled_with_positions=lists[1],
            without_positions=lists[2],
            shuffled_without_positions=lists[3],
            likeness_with_positions=float(F.cosine_similarity(said_4K[0], said_4K[1], 0)),
            likeness_without_positions=float(F.cosine_similarity(said_4K[2], said_4K[3], 0)),
        )


def _heads(kept: Heads) -> dict[str, Tensor]:
    tensors = {"q": kept.q_BANE[0], "k": kept.k_BANE[0]}
    if kept.mask is not None:
        heads, tokens, _ = tensors["q"].shape
        tensors["bias"] = kept.mask[0].expand(heads, tokens, tokens)
    return tensors


def _query(text: str) -> Any:
    row, comma, column = text.partition(",")
    return (int(row), int(column)) if comma else text


def _classes(loaded: Loaded, logits_K: Tensor, top: int) -> list[answers.LabelledShare]:
    said = likeliest(loaded, logits_K, top)
    each = zip(said.labels, said.names, said.probabilities, strict=True)
    return [answers.LabelledShare(label=label, name=name, probability=share) for label, name, share in each]
