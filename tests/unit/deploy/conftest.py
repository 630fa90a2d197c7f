"""One trace of each graph for all tests: the same graph exports to the same file, and torch takes seconds for it."""

import functools
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from patchlight.deploy import export as exporting
from patchlight.deploy.graph import Graph


@pytest.fixture(autouse=True, scope="session")
def _traced_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    trace, save, write = torch.export.export, torch.export.save, exporting._save_onnx
    made: dict[str, Path] = {}

    def when_needed(graph: Any, example: Any, **settings: Any) -> Any:
        later = functools.partial(trace, graph, example, **settings)
        return later if isinstance(graph, Graph) else later()

    def save_program(program: Any, path: Any) -> None:
        save(program() if isinstance(program, functools.partial) else program, path)

    def write_onnx(program: Any, graph: Graph, path: Path) -> None:
        """Known by all that it depends on: model, outputs, and what it is traced with."""
        (example,), loaded = program.args[1], graph.loaded
        of_model = (loaded.config, loaded.preprocess.config, loaded.subject, loaded.groups)
        how = (graph.outputs, graph.prepare, graph.training, example.shape, example.dtype, program.keywords)
        weights = [(name, str(each.dtype), each.numpy().tobytes()) for name, each in graph.model.state_dict().items()]
        key = hashlib.sha256(repr((of_model, how, weights)).encode()).hexdigest()
        if key not in made:
            write(program(), graph, path)
            assert not list(path.parent.glob(f"{path.name}?*")), "its weights lie beside it"
            made[key] = Path(shutil.copy(path, tmp_path_factory.mktemp("onnx") / "model.onnx"))
        shutil.copy(made[key], path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.export, "export", when_needed)
        patch.setattr(torch.export, "save", save_program)
        patch.setattr(exporting, "_save_onnx", write_onnx)
        yield
