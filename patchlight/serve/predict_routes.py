"""The API, of predictions in one request: photos in; boxes, classes or features out; by models of every family."""

import asyncio
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request
from starlette.datastructures import UploadFile
from torch import Tensor

from patchlight.classification import likeliest
from patchlight.errors import PatchlightError
from patchlight.geometry import View
from patchlight.images.decode import Alpha, ImageError, decode
from patchlight.localizing.detector import Localization, read
from patchlight.serve import answers
from patchlight.serve.engine import Outputs, Served
from patchlight.serve.photos import plain_name
from patchlight.serve.queues import BusyError
from patchlight.serve.spent import note
from patchlight.serve.state import ServerState, together
from patchlight.weights.load import Loaded

_FORM = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["photo"],
                "properties": {"photo": {"type": "array", "items": {"type": "string", "format": "binary"}}},
            }
        }
    },
}


def add_predict_routes(api: APIRouter, state: ServerState) -> None:
    engine, limits = state.engine, state.limits

    @api.post("/predict", openapi_extra={"requestBody": _FORM})
    async def predict(
        request: Request,
        model: Annotated[str, Query(max_length=200, description="Its number or name")] = "0",
        outputs: Outputs = "boxes",
        subjects: Annotated[int, Query(ge=0, le=100, description="Boxes of a photo at most; 0: all")] = 1,
        top: Annotated[int, Query(ge=1, le=100, description="Classes of a photo")] = 5,
    ) -> answers.Predictions:
        """What a model says of the photos that are the parts `photo` of a form, in their order. Nothing is kept.

        As `pl.localize`, `pl.classify` and `loaded.predict(photos, "features")` say it. A photo that cannot be used
        costs no other its answer: its own has the status `error`.
        """
        served = engine.named(model)
        if outputs == "classes":
            served.loaded.check_names_classes()
        if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
            raise HTTPException(415, "send photos as the parts `photo` of a multipart form")
        async with request.form(max_files=limits.predicted, max_fields=0) as form:
            parts = form.getlist("photo")
            files = [part for part in parts if isinstance(part, UploadFile)]
            if not files:
                raise HTTPException(422, "the form has no file called `photo`")
            contents = [(await part.read(), plain_name(part.filename)) for part in files]

        note(served.name, len(contents))

        async def one(content: bytes, name: str) -> answers.PhotoPrediction:
            try:
                async with state.in_hand():
                    image_CHW, view, alpha = await state.work(prepared, served.loaded, outputs, content, limits.pixels)
                    said = await asyncio.wrap_future(engine.predict(served, outputs, image_CHW, view, subjects))
                if isinstance(said, Localization):
                    said = served.detector().by_alpha(said, alpha)
            except BusyError:
                raise
            except ImageError as error:
                return answers.PhotoPrediction(name=name, status="error", reason=error.reason, detail=error.detail)
            except PatchlightError as error:
                return answers.PhotoPrediction(name=name, status="error", reason="unsupported", detail=str(error))
            height, width = view.source_size
            about: dict[str, Any] = {"name": name, "status": "ok", "width": width, "height": height}
            return answers.PhotoPrediction(**about, **_answer(served, outputs, said, top))

        predictions = await together(one(*each) for each in contents)
        return answers.Predictions(model=served.name, outputs=outputs, predictions=predictions)


def prepared(loaded: Loaded, outputs: Outputs, content: bytes, most_pixels: int) -> tuple[Tensor, View, Alpha | None]:
    """The photo as the model takes it, exactly as the library's own functions prepare it; and its transparency, which
    may say where its subject is."""
    if outputs == "boxes":
        decoded = read(content, loaded.preprocess, max_pixels=most_pixels)
    else:
        decoded = decode(content, max_pixels=most_pixels)
    return *loaded.preprocess(decoded), decoded.alpha


def _answer(served: Served, outputs: Outputs, said: Any, top: int) -> dict[str, Any]:
    if outputs == "features":
        return {"features": said.tolist()}
    if outputs == "classes":
        found = likeliest(served.loaded, said, top)
        each = zip(found.labels, found.names, found.probabilities, strict=True)
        shares = [answers.LabelledShare(label=label, name=name, probability=share) for label, name, share in each]
        named = None if found.named is None else answers.Naming(**asdict(found.named))
        return {"classes": shares, "named": named}
    assert isinstance(said, Localization)
    return {
        "decision": said.decision,
        "confidence": said.confidence,
        "boxes": [
            answers.FoundSubject(box=answers.corners(each.box), score=each.score, confidence=each.confidence)
            for each in said.subjects
        ],
        "named": None if said.named is None else answers.Naming(**asdict(said.named)),
    }
