"""`attention` against attention written out: every weight of every layer, and that they are what the model used."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models_at_random import POSITIONS, tiny_vit
from patchlight.errors import PatchlightError
from patchlight.explain import attention as module
from patchlight.explain.attention import attention, heat_on_photo
from patchlight.explain.class_rows import class_rows, fits
from patchlight.geometry import View
from patchlight.models.attention import Heads
from patchlight.models.positions import rope_2d
from patchlight.models.vit import ViT


def eager(model: ViT, image: Tensor, sizes: Any = None) -> tuple[Tensor, Tensor]:
    """Each layer's softmax matrix (L, B, A, N, N) and the last tokens, with nothing fused and everything float64."""
    config, matrices = model.config, []
    x, geometry = model.embed(image, sizes)
    bias = [block.attn.mask(geometry, torch.float32) for block in model.blocks]
    x, model = x.double(), tiny_double(model)
    for block, mask in zip(model.blocks, bias, strict=True):
        qkv = block.attn.qkv(block.norm1(x))
        q, k, v = (
            part.reshape(*part.shape[:2], config.num_heads, config.head_width).permute(0, 2, 1, 3)
            for part in qkv.split(config.width, 2)
        )
        q, k = block.attn.q_norm(q), block.attn.k_norm(k)
        if config.is_rotary:
            places = own_grids(geometry, image)
            q, k = (
                torch.stack([turn(block, config, x, one) for x, one in zip(part, places, strict=True)])
                for part in (q, k)
            )
        scores = torch.einsum("baqe,bake->baqk", q, k) / config.head_width**0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
        matrix = scores.exp() / scores.exp().sum(-1, keepdim=True)
        matrices.append(matrix)
        heads = torch.einsum("baqk,bake->bqae", matrix, v).flatten(2)
        x = block.residual1(x, block.attn.out(heads))
        x = block.residual2(x, block.mlp(block.norm2(x)))
    return torch.stack(matrices), model.norm(x) if config.final_norm == "tokens" else x


def tiny_double(model: ViT) -> ViT:
    copy = ViT(model.config).eval()
    copy.load_state_dict(model.state_dict())
    return copy.double()


def own_grids(geometry: Any, image: Tensor) -> list[Any]:
    grids = list(geometry.grids) * (len(image) if len(geometry.grids) == 1 else 1)
    return [(grid, geometry.grid, geometry.num_prefix) for grid in grids]


def turn(block: Any, config: Any, x_ANE: Tensor, where: Any) -> Tensor:
    """RoPE as a product of complex numbers, patch by patch of one image's own grid."""
    grid, (_, columns), num_prefix = where
    if config.position == "rope2d":
        angles = rope_2d(grid, config.head_width, config.rope_base, config.rope_coordinates).double()
    turned = x_ANE.clone()
    for row in range(grid[0]):
        for column in range(grid[1]):
            token = num_prefix + row * columns + column
            pairs = torch.complex(*x_ANE[:, token].chunk(2, -1))
            if config.position == "rope2d":
                angle = angles[row * grid[1] + column]
            else:
                angle = row * block.attn.rope.frequencies[0] + column * block.attn.rope.frequencies[1]
            pairs = pairs * torch.exp(1j * angle)
            turned[:, token] = torch.cat([pairs.real, pairs.imag], -1)
    return turned


@st.composite
def models(draw: st.DrawFn) -> ViT:
    position = draw(st.sampled_from(POSITIONS))
    class_token = draw(st.booleans())
    changes: dict[str, Any] = {
        "position": position,
        "class_token": class_token,
        "distill_token": class_token and draw(st.booleans()),
        "num_registers": draw(st.integers(0, 2)),
        "pooling": "cls" if class_token else "mean",
        "qk_norm": draw(st.booleans()),
        "layer_scale": draw(st.sampled_from([None, 0.5])),
        "mlp": draw(st.sampled_from(["gelu", "swiglu"])),
        "image_size": (8 * draw(st.integers(1, 4)), 8 * draw(st.integers(1, 4))),
    }
    if position == "rope2d":
        changes["rope_coordinates"] = draw(st.sampled_from(["index", "centred"]))
    return tiny_vit(**changes)


@given(
    model=models(),
    grid=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    smaller=st.none() | st.tuples(st.integers(1, 5), st.integers(1, 5)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
@torch.no_grad()
def test_weights_are_the_softmax_that_the_model_used(model: ViT, grid: Any, smaller: Any, seed: int) -> None:
    image = torch.randn(2, 3, 8 * grid[0], 8 * grid[1], generator=torch.Generator().manual_seed(seed))
    sizes = None
    if smaller is not None:
        sizes = [(8 * grid[0], 8 * grid[1]), (8 * min(smaller[0], grid[0]), 8 * min(smaller[1], grid[1]))]
    expected, tokens = eager(model, image, sizes)
    maps = attention(model, image, "all", "all", sizes=sizes)
    valid_BN = model.embed(image, sizes)[1].valid_BN
    valid_BN = torch.ones(tokens.shape[:2], dtype=torch.bool) if valid_BN is None else valid_BN
    rows, expected_rows = (weights.permute(1, 3, 0, 2, 4)[valid_BN] for weights in (maps.weights, expected.float()))
    torch.testing.assert_close(rows, expected_rows, atol=1e-5, rtol=0)
    torch.testing.assert_close(maps.tokens[valid_BN], tokens.float()[valid_BN], atol=1e-4, rtol=1e-4)
    assert torch.equal(maps.tokens, model.tokens(image, sizes))
    assert maps.grid == grid
    assert maps.num_prefix == model.config.num_prefix


@torch.no_grad()
def test_rows_times_values_are_what_the_fused_kernel_gave() -> None:
    for position in POSITIONS:
        model, image = tiny_vit(position=position, num_registers=1), torch.randn(2, 3, 24, 40)
        outputs: list[Tensor] = []
        model.encode(image, visit=lambda index, heads, x, outputs=outputs: outputs.append(heads.out_BANE))
        maps = attention(model, image, "all", "all", values=True)
        assert maps.values is not None
        torch.testing.assert_close(maps.weights @ maps.values, torch.stack(outputs), atol=1e-5, rtol=1e-5)


def test_the_test_above_would_see_a_forgotten_scale() -> None:
    model, image = tiny_vit(), torch.randn(1, 3, 32, 32)
    (heads,) = heads_of(model, image)[:1]
    wrong = Heads(heads.q_BANE * 1.1, *heads[1:])
    assert not torch.allclose(wrong.rows() @ heads.v_BANE, heads.out_BANE, atol=1e-3)


def heads_of(model: ViT, image: Tensor) -> list[Heads]:
    seen: list[Heads] = []
    with torch.no_grad():
        model.encode(image, visit=lambda index, heads, x: seen.append(heads))
    return seen


def test_which_queries() -> None:
    model, image = tiny_vit(distill_token=True, num_registers=2), torch.randn(2, 3, 24, 40)
    every = attention(model, image, queries="all").weights
    for queries, tokens in {
        "cls": [0],
        "distill": [1],
        "registers": [2, 3],
        5: [5],
        -1: [18],
        (1, 2): [4 + 7],
    }.items():
        maps = attention(model, image, queries=queries)  # type: ignore[arg-type]
        assert maps.queries == tuple(tokens)
        torch.testing.assert_close(maps.weights, every[:, :, :, tokens])
    maps = attention(model, image, queries=[(0, 0), (2, 4), (0, 1)])
    assert maps.queries == (4, 18, 5)
    torch.testing.assert_close(maps.weights, every[:, :, :, [4, 18, 5]])
    assert attention(model, image, queries=[0, 3]).queries == (0, 3)


def test_which_layers_and_heads() -> None:
    model, image = tiny_vit(), torch.randn(2, 3, 32, 32)
    every = attention(model, image, layers="all").weights
    assert every.shape == (3, 2, 2, 1, 17)
    torch.testing.assert_close(every.sum(-1), torch.ones(3, 2, 2, 1))
    maps = attention(model, image, layers=[-1, 0, 2])
    assert maps.layers == (2, 0, 2)
    assert torch.equal(maps.weights, every[[2, 0, 2]])
    mean = attention(model, image, layers="all", heads="mean").weights
    torch.testing.assert_close(mean, every.mean(2, keepdim=True))


def test_heat_lies_where_the_patches_lie() -> None:
    model, image = tiny_vit(num_registers=2), torch.randn(2, 3, 24, 40)
    maps = attention(model, image, layers="all")
    assert maps.heat().shape == (3, 2, 2, 1, 3, 5)
    assert maps.heat()[1, 0, 1, 0, 2, 3] == maps.weights[1, 0, 1, 0, 3 + 2 * 5 + 3]


def test_artifacts_are_taken_out_of_the_heat_and_left_in_the_weights() -> None:
    model, image = tiny_vit(), torch.randn(2, 3, 32, 32)
    image[0, :, 8:16, 16:24] = 400.0  # the patch embedding is linear: this token's norm towers over the others
    image[0, :, 8:16, 16:24] *= torch.randn(3, 8, 8)
    plain, cleaned = attention(model, image), attention(model, image, suppress_artifacts=True)
    assert plain.artifacts is None
    assert cleaned.artifacts is not None
    assert cleaned.artifacts.nonzero().tolist() == [[0, 1, 2]]
    assert torch.equal(cleaned.weights, plain.weights)
    assert torch.equal(cleaned.heat()[:, 1], plain.heat()[:, 1])
    around = plain.heat()[0, 0, :, 0, 0:3, 1:4].flatten(1)[:, [0, 1, 2, 3, 5, 6, 7, 8]]
    expected = around.sort(1).values[:, 3:5]
    inside = cleaned.heat()[0, 0, :, 0, 1, 2]
    assert ((inside >= expected[:, 0] - 1e-7) & (inside <= expected[:, 1] + 1e-7)).all()


def test_artifacts_beside_padding_take_after_the_image_alone() -> None:
    model, image, sizes = tiny_vit(), torch.randn(2, 3, 32, 32), [(32, 32), (16, 24)]
    image[1, :, 8:16, 16:24] = 400.0 * torch.randn(3, 8, 8)
    together = attention(model, image, sizes=sizes, suppress_artifacts=True)
    alone = attention(model, image[1:, :, :16, :24], suppress_artifacts=True)
    assert alone.artifacts is not None
    assert alone.artifacts[0, 1, 2]
    torch.testing.assert_close(together.heat()[:, 1:, ..., :2, :3], alone.heat(), atol=1e-6, rtol=1e-4)


def test_padding_gets_no_attention() -> None:
    for position in ("learned", "relative_bias"):
        image, sizes = torch.randn(2, 3, 32, 32), [(32, 32), (8, 24)]
        maps = attention(tiny_vit(position=position), image, "all", "all", sizes=sizes)
        torch.testing.assert_close(maps.weights.sum(-1), torch.ones(maps.weights.shape[:-1]))
        heat = maps.heat()[:, 1]
        assert (heat[..., 1:, :] == 0).all()
        assert (heat[..., 3:] == 0).all()
        assert (heat[..., 0, :3] > 0).all()


def test_gradients_flow_only_when_asked_for() -> None:
    model, image = tiny_vit(), torch.randn(1, 3, 32, 32)
    assert not attention(model, image).weights.requires_grad
    maps = attention(model, image, differentiable=True)
    maps.weights[..., 3].sum().backward()
    gradient = model.blocks[0].mlp.up.weight.grad
    assert gradient is not None
    assert gradient.abs().sum() > 0


# Dynamo of torch 2.11 asks an activation for its gradient, and warns itself.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("position", "how"), [("learned", "whole"), ("relative_bias", "by blocks"), ("rope_mixed", "attention too")]
)
def test_gradients_of_a_compiled_model_are_those_of_the_plain_one(position: str, how: str) -> None:
    """Through rows, values and tokens at once: what is looked at leaves the graph beside what the blocks answer."""
    torch.compiler.reset()
    depth = 2 if how == "whole" else 3  # that one becomes machine code, which takes several seconds for each block
    model = tiny_vit(position=position, depth=depth, qk_norm=True, num_registers=1)
    image = torch.randn(2, 3, 24, 40)

    def gradients(looked_at: Any, look: Any) -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        maps = look(looked_at, image, [0, -1], "all", values=True, differentiable=True)
        loss = maps.weights[..., 3].square().sum() + maps.values.square().mean() + maps.tokens[:, 0].sum()
        loss.backward()
        return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}

    expected = gradients(model, attention)
    look = torch.compile(attention, backend="aot_eager") if how == "attention too" else attention
    if how == "by blocks":
        for block in model.blocks:
            block.compile(dynamic=False, backend="aot_eager")
    found = gradients(torch.compile(model) if how == "whole" else model, look)
    assert found.keys() == expected.keys()
    assert f"blocks.{depth - 1}.attn.qkv.weight" in found
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-3, msg=name)


@pytest.mark.parametrize("position", POSITIONS)
def test_compiled_as_one_graph(position: str) -> None:
    torch.compiler.reset()
    model, image = tiny_vit(position=position, depth=2, num_registers=1), torch.randn(2, 3, 24, 40)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for queries in ("cls", "all", [0, 5]):
        expected = attention(model, image, "all", queries).weights  # type: ignore[arg-type]
        torch.testing.assert_close(compiled(model, image, "all", queries).weights, expected, atol=1e-5, rtol=1e-4)


def test_a_compiled_model_is_looked_into_compiled() -> None:
    torch.compiler.reset()
    model, image = tiny_vit(position="rope2d", depth=2), torch.randn(2, 3, 24, 40)
    expected = attention(model, image, "all").weights
    torch.testing.assert_close(attention(torch.compile(model), image, "all").weights, expected, atol=1e-5, rtol=1e-4)
    model.compile()
    torch.testing.assert_close(attention(model, image, "all").weights, expected, atol=1e-5, rtol=1e-4)


def test_a_compiled_model_takes_other_layers_and_patches_without_a_new_program(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    programs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        programs.append(graph)
        return graph.forward

    monkeypatch.setattr(module, "_compiled_look", lambda: torch.compile(module._look, backend=count))
    model, image = tiny_vit(), torch.randn(2, 3, 32, 32)
    every = attention(model, image, "all", "all").weights
    held = torch.compile(model)
    for layers in (0, 1, -1, [0, 2]):
        expected = every[[layers] if isinstance(layers, int) else layers][:, :, :, :1]
        torch.testing.assert_close(attention(held, image, layers).weights, expected)
    before = len(programs)
    assert before > 0, "the compiled program is the one that runs"
    for row in range(4):
        for column in range(3):
            weights = attention(held, image, queries=(row, column)).weights
            torch.testing.assert_close(weights, every[-1:, :, :, [1 + 4 * row + column]])
    assert len(programs) == before + 1


def test_weights_stay_float32_and_exact_in_bfloat16() -> None:
    model = tiny_vit(num_registers=1)
    image = torch.randn(2, 3, 24, 40)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        mixed = attention(model, image, "all")
    maps = attention(model.bfloat16(), image, "all", values=True)
    for weights in (mixed.weights, maps.weights):
        assert weights.dtype == torch.float32
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    outputs = [heads.out_BANE[:, :, :1].float() for heads in heads_of(model, image)]
    assert maps.values is not None
    torch.testing.assert_close(maps.weights @ maps.values.float(), torch.stack(outputs), atol=0.02, rtol=0.02)


def test_large_images_make_no_square_matrix() -> None:
    model, image = tiny_vit(depth=1, position="none"), torch.randn(1, 3, 1024, 1024)
    with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
        attention(model, image)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert largest < 16_385**2 * 4 / 50


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": 3}, "3 blocks"),
        ({"layers": "last"}, "layers='last'"),
        ({"layers": []}, "layers=\\[\\]"),
        ({"layers": None}, "layers=None"),
        ({"layers": 1.5}, "layers=1.5"),
        ({"queries": "class"}, "'cls', 'distill', 'registers', 'all'"),
        ({"queries": "registers"}, "no registers"),
        ({"queries": 17}, "17 tokens"),
        ({"queries": (4, 0)}, "grid of 4 rows and 4 columns"),
        ({"queries": 1.5}, "queries=1.5"),
        ({"heads": 2}, "'all' or 'mean'"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PatchlightError, match=message):
        attention(tiny_vit(), torch.randn(1, 3, 32, 32), **settings)


def test_what_is_not_a_model_or_an_image_is_refused() -> None:
    with pytest.raises(PatchlightError, match="read from a ViT"):
        attention(torch.nn.Linear(1, 1), torch.randn(1, 3, 32, 32))
    with pytest.raises(PatchlightError, match="image\\[None\\]"):
        attention(tiny_vit(), torch.randn(3, 32, 32))
    with pytest.raises(PatchlightError, match="takes a tensor"):
        attention(tiny_vit(), "photo.jpg")  # type: ignore[arg-type]
    with pytest.raises(PatchlightError, match="no class token"):
        attention(tiny_vit(class_token=False, pooling="mean"), torch.randn(1, 3, 32, 32))


def test_heat_on_the_photo_lies_between_the_patch_centres_and_only_where_the_model_saw() -> None:
    heat = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    whole = View(source_size=(40, 40), model_size=(40, 40))
    spread = heat_on_photo(heat, whole, (20.0, 20.0))
    expected = F.interpolate(heat[None, None], size=(40, 40), mode="bilinear", align_corners=False)[0, 0]
    torch.testing.assert_close(spread, expected)
    # A photo of 60 x 100 pixels, halved and cropped about its centre to 20 x 40.
    view = View(source_size=(60, 100), model_size=(20, 40), scale=(0.5, 0.5), offset=(-5.0, -5.0))
    spread = heat_on_photo(heat, view, (10.0, 20.0))
    seen = spread.isfinite()
    assert spread.shape == (60, 100)
    assert seen[10:50, 10:90].all()
    assert int(seen.sum()) == 40 * 80
    assert spread[20, 30] == pytest.approx(0.0, abs=0.1)
    smaller = heat_on_photo(heat.numpy(), view, (10.0, 20.0), (30, 50))
    assert smaller.shape == (30, 50)
    means = spread.reshape(30, 2, 50, 2).mean((1, 3))
    torch.testing.assert_close(smaller[5:25, 5:45], means[5:25, 5:45], atol=0.02, rtol=0)
    with pytest.raises(PatchlightError, match="heat of 5 x 5 patches does not fit this view, which has 2 x 2"):
        heat_on_photo(torch.rand(5, 5), view, (10.0, 20.0))
    with pytest.raises(PatchlightError, match="pass their heat"):
        heat_on_photo(attention(tiny_vit(), torch.randn(1, 3, 32, 32)), view, (10.0, 20.0))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("changes", [{}, {"position": "rope2d"}, {"qk_norm": True, "num_registers": 3}])
def test_the_kernel_gives_the_rows(dtype: torch.dtype, changes: dict[str, Any]) -> None:
    model = tiny_vit(**changes).to("cuda", dtype)
    layers = heads_of(model, torch.randn(3, 3, 224, 304, device="cuda", dtype=dtype))
    assert fits(layers[0], slice(0, 1))
    for query in (0, 5):
        expected = torch.stack([heads.rows([query]) for heads in layers])
        torch.testing.assert_close(class_rows(layers, query), expected, atol=1e-6, rtol=1e-5)
