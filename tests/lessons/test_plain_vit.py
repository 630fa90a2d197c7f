"""The ViT of the lessons computes what the library's computes."""

import ast
from pathlib import Path

import pytest
import torch

import patchlight as pl
from patchlight.models import vit as library

LESSONS = Path(__file__).parents[2] / "lessons"


@pytest.mark.parametrize(("name", "sizes"), [("B/16", (768, 12, 12)), ("Ti/16", (192, 12, 3))])
def test_the_plain_vit_equals_the_library(name: str, sizes: tuple[int, int, int], monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(LESSONS))
    from plain_vit import PlainViT
    from weights import copy_weights

    vit = pl.ViT(pl.variant(name)).eval()
    with torch.no_grad():
        for parameter in vit.parameters():  # norms and biases too, which start at one and zero
            parameter.add_(torch.randn_like(parameter) * 0.02)
    plain = copy_weights(vit, PlainViT(224, 16, *sizes)).eval()
    assert sum(p.numel() for p in plain.parameters()) == sum(p.numel() for p in vit.parameters())
    image = torch.randn(2, 3, 224, 224)
    with torch.inference_mode():
        expected = vit(image)
        torch.testing.assert_close(plain(image), expected, rtol=1e-4, atol=1e-5)
        plain.E_pos[:, 1:] = plain.E_pos[:, 1:].flip(1)  # and would notice it if one part were another
        assert not torch.allclose(plain(image), expected, rtol=1e-4, atol=1e-5)


def test_it_is_short_and_vit_py_points_to_it() -> None:
    lines = (LESSONS / "plain_vit.py").read_text().splitlines()
    code = [line for line in lines if line.strip() and not line.strip().startswith(("#", '"""'))]
    assert len(code) <= 65
    assert "lessons/plain_vit.py" in (ast.get_docstring(ast.parse(Path(library.__file__).read_text())) or "")
