import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from models_at_random import tiny_vit
from patchlight.errors import PatchlightError
from patchlight.models import positions
from patchlight.models.positions import cos_and_sin, relative_index, rope_2d, rotate, sincos_2d
from patchlight.models.resampling import resample, resample_positions
from patchlight.models.token_geometry import grid_coordinates

GRIDS = st.tuples(st.integers(1, 7), st.integers(1, 7))


def test_sincos_worked_example() -> None:
    """Width 8 on a 2x2 grid: 4 on the diagonal, 2 + cos 1 + cos 0.01 one step away, twice the latter diagonally."""
    table_PD = sincos_2d((2, 2), 8)
    expected = [[4.0, 3.54, 3.54, 3.08], [3.54, 4.0, 3.08, 3.54], [3.54, 3.08, 4.0, 3.54], [3.08, 3.54, 3.54, 4.0]]
    torch.testing.assert_close(table_PD @ table_PD.T, torch.tensor(expected), atol=0.005, rtol=0)


def test_sincos_rows_share_the_first_half_and_columns_the_second() -> None:
    table_hwD = sincos_2d((3, 4), 16).unflatten(0, (3, 4))
    assert (table_hwD[:, :1, :8] == table_hwD[:, :, :8]).all()
    assert (table_hwD[:1, :, 8:] == table_hwD[:, :, 8:]).all()
    assert len(table_hwD.flatten(0, 1).unique(dim=0)) == 12


@given(grid=GRIDS, coordinates=st.sampled_from(["index", "centred"]))
def test_rope_turns_without_stretching_and_knows_only_offsets(grid: tuple[int, int], coordinates: str) -> None:
    angles = rope_2d(grid, 8, coordinates=coordinates)
    q, k = torch.randn(2, 8)
    cos, sin = cos_and_sin(angles)[None, None].chunk(2, -1)
    turned_q, turned_k = (rotate(x.expand(1, 1, len(angles), -1), (cos, sin))[0, 0] for x in (q, k))
    torch.testing.assert_close(turned_q.norm(dim=1), q.norm().expand(len(angles)))
    scores_PP = turned_q @ turned_k.T
    rows_P, columns_P = grid_coordinates(grid)
    by_offset: dict[tuple[int, int], float] = {}
    for i in range(len(angles)):
        for j in range(len(angles)):
            offset = (int(rows_P[i] - rows_P[j]), int(columns_P[i] - columns_P[j]))
            assert by_offset.setdefault(offset, float(scores_PP[i, j])) == pytest.approx(
                float(scores_PP[i, j]), abs=1e-4
            )


def test_centred_rope_spans_the_same_angles_at_any_size() -> None:
    edge = rope_2d((1, 1000), 8, coordinates="centred")[[0, -1]]
    torch.testing.assert_close(edge[0, 2], torch.tensor(-2 * torch.pi), atol=0.01, rtol=0)
    torch.testing.assert_close(edge[1, 2], torch.tensor(2 * torch.pi), atol=0.01, rtol=0)


@given(grid=GRIDS, num_prefix=st.integers(0, 3))
def test_relative_index_depends_on_the_offset_alone(grid: tuple[int, int], num_prefix: int) -> None:
    index_NN = relative_index(grid, num_prefix)
    offsets = (2 * grid[0] - 1) * (2 * grid[1] - 1)
    assert index_NN[num_prefix:, num_prefix:].unique().tolist() == list(range(offsets))
    rows_P, columns_P = grid_coordinates(grid)
    for i, j in [(0, -1), (-1, 0), (0, 0)]:
        down, across = int(rows_P[i] - rows_P[j]) + grid[0] - 1, int(columns_P[i] - columns_P[j]) + grid[1] - 1
        assert index_NN[num_prefix:, num_prefix:][i, j] == down * (2 * grid[1] - 1) + across
    if num_prefix:
        assert (index_NN[:num_prefix, num_prefix:] == offsets).all()
        assert (index_NN[num_prefix:, :num_prefix] == offsets + 1).all()
        assert (index_NN[:num_prefix, :num_prefix] == offsets + 2).all()


@given(old=GRIDS, new=st.tuples(st.integers(1, 15), st.integers(1, 15)), width=st.integers(1, 5))
def test_resampling_is_antialiased_bicubic(old: tuple[int, int], new: tuple[int, int], width: int) -> None:
    table_PD = torch.randn(old[0] * old[1], width)
    resampled = resample(table_PD, old, new)
    # Two copies of the table side by side keep torch off the single columns that it resizes wrongly.
    picture = table_PD.T.reshape(1, width, *old)
    down_only = F.interpolate(picture.repeat(1, 1, 1, 2), size=(new[0], 2 * old[1]), mode="bicubic", antialias=True)
    across = down_only[..., : old[1]].transpose(2, 3).repeat(1, 1, 1, 2)
    across = F.interpolate(across, size=(new[1], 2 * new[0]), mode="bicubic", antialias=True)[..., : new[0]]
    torch.testing.assert_close(resampled, across.transpose(2, 3)[0].flatten(1).T, atol=1e-5, rtol=1e-5)


def test_resampling_is_one_call_of_torch_where_torch_is_right() -> None:
    table_PD = torch.randn(196, 8)
    for new in [(16, 16), (7, 9), (37, 37), (14, 28)]:
        picture = table_PD.T.reshape(1, 8, 14, 14).double()
        expected = F.interpolate(picture, size=new, mode="bicubic", antialias=True)[0].flatten(1).T
        torch.testing.assert_close(resample(table_PD, (14, 14), new), expected.float(), atol=1e-6, rtol=1e-6)


@given(old=GRIDS, new=st.tuples(st.integers(1, 15), st.integers(1, 15)))
def test_plain_resampling_is_the_one_without_antialiasing(old: tuple[int, int], new: tuple[int, int]) -> None:
    table_PD = torch.randn(old[0] * old[1], 3)
    expected = F.interpolate(table_PD.T.reshape(1, 3, *old), size=new, mode="bicubic", align_corners=False)
    torch.testing.assert_close(resample(table_PD, old, new, "plain"), expected[0].flatten(1).T, atol=1e-5, rtol=1e-5)


def test_resampling_leaves_a_fitting_table_alone_and_keeps_the_type() -> None:
    table_PD = torch.randn(30, 4)
    assert resample(table_PD, (5, 6), (5, 6)) is table_PD
    assert resample(table_PD.bfloat16(), (5, 6), (3, 9)).dtype == torch.bfloat16
    assert resample(torch.ones(30, 4), (5, 6), (4, 7)) == pytest.approx(torch.ones(28, 4))


def test_a_grid_of_as_many_patches_but_another_shape_is_resampled() -> None:
    table_PD = torch.randn(16, 4)
    assert not torch.allclose(resample(table_PD, (8, 2), (4, 4)), table_PD)
    model = tiny_vit(image_size=(64, 16))
    x_BND, _ = model.embed(torch.zeros(1, 3, 32, 32))
    rows = resample(model.positions.table[1:], (8, 2), (4, 4))
    torch.testing.assert_close(x_BND[0, 1:], rows + model.patch_embed.proj.bias)


def test_prefix_rows_are_not_resampled() -> None:
    model = tiny_vit(num_registers=2)
    native, _ = model.embed(torch.zeros(1, 3, 32, 32))
    other, _ = model.embed(torch.zeros(1, 3, 16, 56))
    assert torch.equal(native[:, :3], other[:, :3])


@pytest.mark.parametrize("position", ["learned", "relative_bias"])
def test_resampled_table_is_computed_once(position: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(positions, "resample", lambda *args: calls.append(1) or resample(*args))
    model = tiny_vit(position=position)
    tables = 1 if position == "learned" else model.config.depth
    image = torch.randn(1, 3, 40, 24)
    with torch.no_grad():
        first = model(image)
        assert len(calls) == tables
        assert torch.equal(model(image), first)
        assert len(calls) == tables
        model(torch.randn(1, 3, 24, 40))
        assert len(calls) == 2 * tables
        model(image)
        assert len(calls) == 2 * tables


@pytest.mark.parametrize("position", ["learned", "relative_bias"])
@pytest.mark.parametrize("change", ["step", "load", "assign", "data", "dtype"])
def test_remembered_table_follows_the_weights(position: str, change: str) -> None:
    model, image = tiny_vit(position=position), torch.randn(1, 3, 40, 24)
    model.requires_grad_(False)
    before = model(image)
    name = "positions.table" if position == "learned" else "blocks.0.attn.relative_bias.table"
    table = model.get_parameter(name)
    if change == "step":
        table.requires_grad_(True)
        optimizer = torch.optim.AdamW([table], lr=1.0)
        model(image).sum().backward()
        optimizer.step()
        table.requires_grad_(False)
    elif change == "load":
        model.load_state_dict(model.state_dict() | {name: table + torch.randn(table.shape)})
    elif change == "assign":
        model.load_state_dict(model.state_dict() | {name: table + torch.randn(table.shape)}, assign=True)
    elif change == "data":
        table.data = table + torch.randn(table.shape)
    else:
        model.double()
        torch.testing.assert_close(model(image.double()), before.double(), atol=1e-5, rtol=0)
        return
    after = model(image)
    assert not torch.allclose(after, before)
    fresh = tiny_vit(position=position)
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(after, fresh(image))


@pytest.mark.parametrize("position", ["learned", "relative_bias"])
def test_remembered_table_follows_a_fused_optimizer(position: str) -> None:
    """Fused optimizers change weights without raising their version: train at one size, look at another."""
    model, image = tiny_vit(position=position), torch.randn(1, 3, 40, 24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        with torch.no_grad():
            model.eval()(image)
        model.train()(torch.randn(1, 3, 32, 32)).sum().backward()
        with torch.no_grad():
            model(image)
        optimizer.step()
        fresh = tiny_vit(position=position)
        fresh.load_state_dict(model.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(image), fresh(image))


@torch.no_grad()
def test_remembered_table_is_not_another_tensors() -> None:
    model, image = tiny_vit(), torch.randn(1, 3, 40, 24)
    for seed in range(20):  # freed tables leave their address to the next
        table = torch.randn(17, 24, generator=torch.Generator().manual_seed(seed))
        swapped = torch.func.functional_call(model, {"positions.table": table}, (image,))
        fresh = tiny_vit()
        fresh.positions.table.copy_(table)
        torch.testing.assert_close(swapped, fresh(image))


@torch.no_grad()
def test_autocast_does_not_coarsen_what_is_remembered() -> None:
    model, image = tiny_vit(), torch.randn(1, 3, 40, 24)
    with torch.autocast("cpu", torch.bfloat16):
        model(image)
    assert torch.equal(model(image), tiny_vit()(image))


@torch.no_grad()
def test_threads_may_share_a_model() -> None:
    model = tiny_vit()
    images = [torch.randn(1, 3, 8, 8 * width) for width in range(1, 25)]
    expected = [tiny_vit()(image) for image in images]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for ours, alone in zip(pool.map(torch.no_grad()(model), images), expected, strict=True):
                torch.testing.assert_close(ours, alone)


def test_copies_and_saved_models_remember_nothing(tmp_path: Path) -> None:
    model, image = tiny_vit(), torch.randn(1, 3, 40, 24)
    with torch.no_grad():
        expected = model(image)
        assert len(model.positions.memory._kept) == 1
        torch.save(model, tmp_path / "model.pt")
        for again in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
            assert len(again.positions.memory._kept) == 0
            assert torch.equal(again(image), expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_torch_func_transforms_pass_by_the_memory() -> None:
    model, image = tiny_vit(), torch.randn(1, 3, 40, 24)
    tables = torch.randn(3, 17, 24)
    run = lambda table: torch.func.functional_call(model, {"positions.table": table}, (image,))  # noqa: E731
    with torch.no_grad():
        together = torch.vmap(run)(tables)
        for index in range(3):
            torch.testing.assert_close(together[index], run(tables[index]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("position", ["learned", "sincos2d", "rope2d", "relative_bias"])
def test_training_after_inference_at_the_same_size(position: str) -> None:
    """What inference mode remembers must not meet autograd later."""
    model, image = tiny_vit(position=position), torch.randn(2, 3, 40, 24)
    with torch.inference_mode():
        expected = model(image)
    if model.positions is not None:
        model.positions.requires_grad_(False)
    output = model(image)
    output.sum().backward()
    torch.testing.assert_close(output, expected.clone())
    assert model.patch_embed.proj.weight.grad is not None


def test_gradients_flow_into_a_resampled_table() -> None:
    for position, name in [("learned", "positions.table"), ("relative_bias", "blocks.0.attn.relative_bias.table")]:
        model = tiny_vit(position=position)
        for _ in range(2):  # the second backward fails if the first one's graph was remembered
            model(torch.randn(1, 3, 40, 24)).sum().backward()
        assert model.get_parameter(name).grad.abs().sum() > 0


def test_resampling_has_exact_gradients() -> None:
    table = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda rows: resample(rows, (2, 3), (3, 5)), table)


def test_rope_base_sets_the_slowest_turn() -> None:
    assert rope_2d((1, 2), 8, base=100.0)[1, 3] == pytest.approx(0.1)
    assert rope_2d((1, 2), 8, base=10_000.0)[1, 3] == pytest.approx(0.01)
    image = torch.randn(1, 3, 32, 32)
    assert not torch.allclose(tiny_vit(position="rope2d")(image), tiny_vit(position="rope2d", rope_base=5.0)(image))


def test_memory_keeps_what_was_used_last() -> None:
    model = tiny_vit()
    with torch.no_grad():
        for width in range(8, 8 * 17, 8):
            model(torch.randn(1, 3, 8, width))
            model(torch.randn(1, 3, 8, 8))
        model(torch.randn(1, 3, 8, 8 * 17))
    assert (1, 1) in [key[0] for key in model.positions.memory._kept]
    assert (1, 2) not in [key[0] for key in model.positions.memory._kept]


def test_memory_is_bounded() -> None:
    model = tiny_vit()
    with torch.no_grad():
        for width in range(8, 8 * 40, 8):
            model(torch.randn(1, 3, 8, width))
    assert len(model.positions.memory._kept) <= 16


@pytest.mark.parametrize(("how", "mode"), [("antialiased", "bicubic"), ("plain", "bicubic"), ("linear", "bilinear")])
def test_a_table_is_resampled_as_torch_does_and_prefix_rows_stay(how: str, mode: str) -> None:
    table = torch.randn(1 + 14 * 14, 6)
    resampled = resample_positions(table, (14, 14), (24, 10), how, num_prefix=1)
    picture = table[1:].T.reshape(1, 6, 14, 14)
    expected = F.interpolate(picture, (24, 10), mode=mode, antialias=how == "antialiased").flatten(2)[0].T
    assert torch.equal(resampled[:1], table[:1])
    torch.testing.assert_close(resampled[1:], expected, atol=1e-5, rtol=1e-5)


def test_a_table_that_does_not_fit_its_grid_is_refused() -> None:
    with pytest.raises(PatchlightError, match=r"\(17, 6\) does not fit a grid of 4x4 with num_prefix=0, which has 16"):
        resample_positions(torch.randn(17, 6), (4, 4), (8, 8))
    with pytest.raises(PatchlightError, match="how='cubic' is not known"):
        resample_positions(torch.randn(16, 6), (4, 4), (8, 8), "cubic")
