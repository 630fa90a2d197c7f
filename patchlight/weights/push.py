"""A model to the Hugging Face hub."""

import tempfile
from pathlib import Path
from typing import Literal

from patchlight.weights.hub import upload
from patchlight.weights.load import Loaded, load
from patchlight.weights.save import save

BESIDE = ("README.md", "curves.png")
"""What a finished run's folder says of its model, in place of the plain card that `save` writes."""


def push(
    model: str | Path | Loaded,
    name: str,
    *,
    layout: Literal["patchlight", "timm", "transformers"] = "patchlight",
    private: bool = False,
) -> str:
    """Upload a model (a run's folder, or whatever `load` takes or gave) to NAME, as OWNER/NAME; its address."""
    loaded = model if isinstance(model, Loaded) else load(model)
    with tempfile.TemporaryDirectory() as temporary:
        folder = save(loaded, temporary, layout=layout)
        for each in BESIDE:
            if not isinstance(model, Loaded) and (Path(model) / each).is_file():
                (folder / each).write_bytes((Path(model) / each).read_bytes())
        return upload(folder, name, private=private)
