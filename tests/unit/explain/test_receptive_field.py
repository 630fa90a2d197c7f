"""What moves one output of a model, by gradients."""

import pytest
import torch

from models_at_random import tiny_vit
from patchlight.errors import PatchlightError
from patchlight.explain.receptive_field import reach, receptive_field
from staged_models import tiny_convnext, tiny_swin


def test_it_agrees_with_what_a_pixel_moves() -> None:
    """The gradient of the summed features, against moving each of a few pixels a little."""
    model = tiny_vit().double()
    image = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    field = receptive_field(model, image, patch=(1, 2))
    assert field.sum().item() == pytest.approx(1)

    def moved(row: int, column: int) -> float:
        total = 0.0
        for colour in range(3):
            ends = []
            for step in (1e-5, -1e-5):
                other = image.clone()
                other[0, colour, row, column] += step
                (features,) = model.intermediates(other, -1, dense=True)
                ends.append(features[0, :, 1, 2].sum().item())
            total += abs(ends[0] - ends[1])
        return total

    near, far = moved(12, 20), moved(31, 0)
    assert (field[12, 20] / field[31, 0]).item() == pytest.approx(near / far, rel=1e-3)


def test_a_convolution_looks_no_further_than_its_kernels() -> None:
    field = receptive_field(tiny_convnext(), torch.randn(2, 3, 96, 96), block=0)  # one kernel of 7 patches of 4 pixels
    rows, columns = (field > 0).any(1).nonzero().flatten(), (field > 0).any(0).nonzero().flatten()
    assert (rows.min().item(), rows.max().item()) == (12 * 4 - 12, 12 * 4 + 15)
    assert (columns.min().item(), columns.max().item()) == (12 * 4 - 12, 12 * 4 + 15)
    assert (receptive_field(tiny_vit(), torch.randn(1, 3, 32, 32), block=0) > 0).all()


def test_windows_bound_what_a_swin_sees() -> None:
    field = receptive_field(tiny_swin(), torch.randn(1, 3, 48, 48), block=0, patch=(0, 0))
    assert (field > 0).sum() == 16 * 16  # a window of four patches of four pixels
    model = tiny_swin().train()
    receptive_field(model, torch.randn(1, 3, 48, 48))
    assert model.training


def test_reach_is_the_share_of_pixels_that_holds_half() -> None:
    field = torch.zeros(10, 10)
    field[0, 0] = 1.0
    assert reach(field) == 0.01
    assert reach(torch.ones(10, 10)) == 0.5
    assert reach(torch.ones(10, 10), 0.9) == 0.9


def test_mistakes() -> None:
    with pytest.raises(PatchlightError, match=r"patch \(4, 0\) lies outside the grid of 4 rows"):
        receptive_field(tiny_vit(), torch.randn(1, 3, 32, 32), patch=(4, 0))
    with pytest.raises(PatchlightError, match="of a ViT, Swin or ConvNeXt, not of a Linear"):
        receptive_field(torch.nn.Linear(2, 2), torch.randn(1, 3, 32, 32))
    with pytest.raises(PatchlightError, match="share=1 must lie"):
        reach(torch.ones(2, 2), 1)
