from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from models_at_random import POSITIONS, TINY, randomize, tiny_vit
from patchlight.config import ViTConfig
from patchlight.errors import PatchlightError
from patchlight.families import variant
from patchlight.models.pooling import pool
from patchlight.models.stems import patchify
from patchlight.models.vit import ViT

EVERY_CONFIG = [
    *({"position": position} for position in POSITIONS if position != "relative_mlp"),
    {"position": "relative_mlp", "pooling": "mean"},  # it tells the class token, and so its last layer, nothing
    {"position": "rope2d", "rope_coordinates": "centred", "num_registers": 2},
    {"position": "relative_bias", "class_token": False, "pooling": "mean", "final_norm": "pooled"},
    {"mlp": "gelu_tanh", "qk_norm": True, "embed_norm": True},
    {"embed_norm": True, "pooling": "mean", "final_norm": "none"},
    {"mlp": "quick_gelu", "patch_bias": False, "qkv_bias": False},
    {"mlp": "swiglu", "layer_scale": 0.1, "drop_path": 0.2},
    {"num_registers": 3, "prefix_positions": "class", "pooling": "mean"},
    {"num_registers": 3, "prefix_positions": "none", "head_hidden": 16},
    {"distill_token": True, "num_registers": 1},
    {"num_classes": 0, "in_channels": 1},
    {"image_size": (16, 40), "patch_size": (4, 8)},
    {"position": "rope2d", "add_learned_table": True, "rope_grid": (3, 5), "mlp": "swiglu", "inner_norm": "both"},
    {"position": "rope_mixed", "add_learned_table": True, "prefix_positions": "none", "num_registers": 1},
    {"position": "relative_mlp", "class_token": False, "pooling": "mean", "block_norm": "after"},
    {"class_token": False, "pooling": "attention", "inner_norm": "mlp"},
    {"resnet": (), "patch_size": (8, 4), "image_size": (16, 12)},
    {"resnet": (1, 1)},
]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Ti/16", 5_717_416),
        ("S/16", 22_050_664),
        ("B/16", 86_567_656),
        ("B/32", 88_224_232),
        ("L/16", 304_326_632),
        ("H/14", 632_045_800),
        ("g/14", 1_012_611_432),
    ],
)
def test_parameter_counts_are_the_published_ones(name: str, parameters: int) -> None:
    with torch.device("meta"):
        model = ViT(variant(name))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize("changes", EVERY_CONFIG, ids=str)
def test_shapes_of_everything_that_comes_out(changes: dict[str, Any]) -> None:
    model = tiny_vit(**changes)
    config = model.config
    down, across = config.patch_size
    image = torch.randn(2, config.in_channels, 3 * down, 5 * across)
    tokens = config.num_prefix + 15
    assert model(image).shape == (2, config.num_classes or config.width)
    assert model.tokens(image).shape == (2, tokens, config.width)
    assert model.features(image).shape == (2, config.width)
    dense = model.intermediates(image, [0, -1], dense=True)
    assert [picture.shape for picture in dense] == [(2, config.width, 3, 5)] * 2


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_only_positions_tell_the_order_of_the_patches(position: str, pooling: str) -> None:
    model = tiny_vit(position=position, pooling=pooling)
    image = torch.randn(2, 3, 32, 32)
    patches_BPF = patchify(image, (8, 8))[:, torch.randperm(16)]
    shuffled = F.fold(patches_BPF.transpose(1, 2), (32, 32), (8, 8), stride=8)
    same = torch.allclose(model(image), model(shuffled), atol=1e-5)
    assert same == (position == "none")


@pytest.mark.parametrize("changes", EVERY_CONFIG, ids=str)
def test_an_image_does_not_see_its_batch(changes: dict[str, Any]) -> None:
    model = tiny_vit(**changes)
    image = torch.randn(4, model.config.in_channels, *model.config.image_size)
    together = model(image)
    for index in range(4):
        torch.testing.assert_close(model(image[index : index + 1]), together[index : index + 1], atol=1e-5, rtol=1e-5)


@given(
    position=st.sampled_from(POSITIONS),
    pooling=st.sampled_from(["cls", "mean"]),
    coordinates=st.sampled_from(["index", "centred"]),
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=3),
    extra=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    registers=st.integers(0, 2),
)
@settings(max_examples=60)
def test_padding_cannot_be_seen(
    position: str,
    pooling: str,
    coordinates: str,
    sizes: list[tuple[int, int]],
    extra: tuple[int, int],
    registers: int,
) -> None:
    """Images padded to a common size, with anything at all in the padding, equal the same images alone."""
    changes = {"rope_coordinates": coordinates} if position == "rope2d" else {}
    model = tiny_vit(position=position, pooling=pooling, uneven_size="pad", num_registers=registers, **changes)
    height, width = max(h for h, _ in sizes) + extra[0], max(w for _, w in sizes) + extra[1]
    padded = torch.full((len(sizes), 3, height, width), torch.nan)
    alone = []
    for index, (h, w) in enumerate(sizes):
        image = torch.randn(3, h, w)
        padded[index, :, :h, :w] = image
        alone.append(image[None])
    logits_BK, geometry = model(padded, sizes), model.embed(padded, sizes)[1]
    tokens_BND = model.tokens(padded, sizes)
    for index, image in enumerate(alone):
        torch.testing.assert_close(logits_BK[index : index + 1], model(image), atol=1e-5, rtol=1e-4)
        valid_N = slice(None) if geometry.valid_BN is None else geometry.valid_BN[index]
        torch.testing.assert_close(tokens_BND[index, valid_N], model.tokens(image)[0], atol=1e-4, rtol=1e-4)


def test_sizes_that_fill_the_batch_cost_no_mask() -> None:
    _, geometry = tiny_vit().embed(torch.randn(2, 3, 32, 32), sizes=[(32, 32), (32, 32)])
    assert geometry.valid_BN is None


def test_prefix_tokens_stand_in_order_with_their_own_rows() -> None:
    model = tiny_vit(distill_token=True, num_registers=2)
    table, (x_BND, _) = model.positions.table, model.embed(torch.zeros(1, 3, 32, 32))
    tokens = torch.cat([model.class_token, model.distill_token, model.registers])
    torch.testing.assert_close(x_BND[0, :4], tokens + table[:4])
    model = tiny_vit(num_registers=2, prefix_positions="class")
    x_BND, _ = model.embed(torch.zeros(1, 3, 32, 32))
    torch.testing.assert_close(x_BND[0, :1], model.class_token + model.positions.table[:1])
    torch.testing.assert_close(x_BND[0, 1:3], model.registers)


def test_padding_with_infinite_tokens_stays_out_of_the_mean() -> None:
    geometry = tiny_vit().embed(torch.randn(1, 3, 32, 32), sizes=[(8, 16)])[1]
    x_BND = torch.full((1, 17, 4), torch.inf)
    x_BND[:, :3] = 2.0
    assert torch.equal(pool(x_BND, "mean", geometry), torch.full((1, 4), 2.0))


@pytest.mark.parametrize("seen", ["own size", "another size"])
@pytest.mark.parametrize(
    "settings",
    [
        *({"position": position} for position in POSITIONS),
        {"position": "rope2d", "rope_coordinates": "centred"},
        {"pooling": "attention"},
        {"resnet": (1,)},
    ],
    ids=str,
)
def test_exports_with_any_batch_and_size(settings: dict[str, Any], seen: str) -> None:
    """Whatever size it was exported at, its own included, one exported model takes every other."""
    model = tiny_vit(depth=2, **settings).eval()
    own = model.config.image_size
    batch = torch.export.Dim("batch", min=1, max=9)
    rows, columns = (torch.export.Dim(name, min=2, max=9) for name in ("rows", "columns"))
    shapes = {"image_BCHW": {0: batch, 2: 8 * rows, 3: 8 * columns}}
    size = own if seen == "own size" else (40, 48)
    exported = torch.export.export(model, (torch.randn(2, 3, *size),), dynamic_shapes=shapes, strict=False).module()
    for images, height, width in [(1, *own), (3, *own), (3, 24, 56), (2, 40, 40)]:
        image = torch.randn(images, 3, height, width)
        torch.testing.assert_close(exported(image), model(image), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("mlp", "function"), [("gelu", F.gelu), ("gelu_tanh", None), ("quick_gelu", None)])
def test_activations(mlp: str, function: Any) -> None:
    x = torch.linspace(-3, 3, 24).expand(1, 1, -1)
    block = tiny_vit(mlp=mlp).blocks[0].mlp
    cubic = 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (block.up(x) + 0.044715 * block.up(x) ** 3)))
    gates = {"gelu": 0.5 * (1 + torch.erf(block.up(x) / 2**0.5)), "gelu_tanh": cubic}
    gates["quick_gelu"] = torch.sigmoid(1.702 * block.up(x))
    torch.testing.assert_close(block(x), block.down(block.up(x) * gates[mlp]))


def test_gated_mlp_scales_the_second_half_by_the_first() -> None:
    block, x = tiny_vit(mlp="swiglu").blocks[0].mlp, torch.randn(1, 2, 24)
    first, second = block.gate_and_up(x).chunk(2, -1)
    torch.testing.assert_close(block(x), block.down(second * first * torch.sigmoid(first)))


def test_intermediates_come_in_the_order_asked_for_and_end_in_the_tokens() -> None:
    model, image = tiny_vit(num_registers=1), torch.randn(2, 3, 32, 40)
    first, last, again = model.intermediates(image, [0, -1, 2])
    assert torch.equal(last, again)
    assert not torch.allclose(first, last)
    normed, dense = (
        model.intermediates(image, [-1], norm=True)[0],
        model.intermediates(image, [-1], norm=True, dense=True)[0],
    )
    assert torch.equal(normed, model.tokens(image))
    assert torch.equal(dense[:, :, 3, 4], normed[:, -1])
    assert torch.equal(dense[:, :, 0, 1], normed[:, 3])
    assert model.intermediates(image, []) == []
    assert torch.equal(model.intermediates(image, -1)[0], last)


def test_intermediates_stop_after_the_last_block_asked_for() -> None:
    model = tiny_vit()
    model.blocks[1] = torch.nn.Identity()  # would fail if called with a geometry
    assert len(model.intermediates(torch.randn(1, 3, 32, 32), [0])) == 1
    with pytest.raises(PatchlightError, match=r"blocks=\[3\] reaches beyond the model's 3 blocks"):
        model.intermediates(torch.randn(1, 3, 32, 32), [3])


def test_a_head_is_used_with_another_pooling_only_on_purpose() -> None:
    model, image = tiny_vit(), torch.randn(2, 3, 32, 32)
    mean_BD = model.features(image, pooling="mean")
    with pytest.raises(PatchlightError, match="the head was made for pooling='cls'"):
        model.set_pooling("mean")
    assert model.config.pooling == "cls"
    model.set_pooling("mean", head="keep")
    torch.testing.assert_close(model(image), model.head(mean_BD))
    model.set_pooling("cls", head="drop")
    assert model(image).shape == (2, 24)
    assert model.config.num_classes == 0
    model.set_pooling("mean")  # no head, nothing to mix
    torch.testing.assert_close(model(image), mean_BD)
    model = tiny_vit()
    with pytest.raises(PatchlightError, match="same width only"):
        model.set_pooling("cls_mean", head="keep")
    model.set_pooling("cls", head="drop")
    assert model(image).shape == (2, 24)


def test_class_token_pooling_needs_a_class_token() -> None:
    model = tiny_vit(class_token=False, pooling="mean")
    with pytest.raises(PatchlightError, match="this model has none"):
        model.features(torch.randn(1, 3, 32, 32), pooling="cls")
    with pytest.raises(PatchlightError, match="class_token"):
        model.set_pooling("cls", head="keep")
    with pytest.raises(PatchlightError, match="unknown pooling 'max'"):
        model.features(torch.randn(1, 3, 32, 32), pooling="max")


def test_distilled_prediction_is_the_mean_of_both_heads() -> None:
    model, image = tiny_vit(distill_token=True), torch.randn(2, 3, 32, 32)
    logits, distilled = model.both_logits(image)
    assert not torch.allclose(logits, distilled)
    torch.testing.assert_close(model(image), (logits + distilled) / 2)
    with pytest.raises(PatchlightError, match="distill_token=True"):
        tiny_vit().both_logits(image)


def test_original_head_has_one_tanh_layer() -> None:
    model, image = tiny_vit(head_hidden=7), torch.randn(2, 3, 32, 32)
    assert model.head.hidden.out_features == 7
    torch.testing.assert_close(model(image), model.head.out(model.head.hidden(model.features(image)).tanh()))


def test_initial_weights_are_as_documented() -> None:
    model = ViT(variant("Ti/16", depth=2, layer_scale=0.1, num_registers=2, position="learned"))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        elif name.endswith("scale"):
            assert (parameter == 0.1).all(), name
        else:
            assert parameter.abs().max() <= 0.04, name
            assert parameter.std().item() == pytest.approx(0.02 * 0.88, rel=0.2), (
                name
            )  # cutting at 2 deviations takes 12 %
    model.init_weights(zero_head=True)
    assert (model(torch.randn(2, 3, 224, 224)) == 0).all()


def test_stochastic_depth_skips_whole_images_and_keeps_the_expectation() -> None:
    model = tiny_vit(drop_path=0.5, depth=2)
    assert [block.residual1.drop_path for block in model.blocks] == [0.0, 0.5]
    residual = model.blocks[1].residual1.train()
    out = residual(torch.zeros(2000, 2, 3), torch.ones(2000, 2, 3))
    assert set(out.unique().tolist()) == {0.0, 2.0}
    assert (out == out[:, :1, :1]).all()
    assert out.mean() == pytest.approx(1.0, abs=0.1)
    assert (residual.eval()(torch.zeros(9, 2, 3), torch.ones(9, 2, 3)) == 1).all()


@pytest.mark.parametrize("changes", EVERY_CONFIG, ids=str)
def test_every_parameter_learns(changes: dict[str, Any]) -> None:
    model = tiny_vit(**changes | {"drop_path": 0.0}).train()
    model(torch.randn(2, model.config.in_channels, *model.config.image_size)).square().sum().backward()
    assert [
        name for name, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())
    ] == []


def test_checkpointing_changes_memory_and_nothing_else() -> None:
    image = torch.randn(2, 3, 40, 32)
    gradients = []
    kept = []
    for checkpointed in (False, True):
        model = tiny_vit(position="relative_bias").train()
        model.checkpoint_blocks = checkpointed
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t.numel()) or t, lambda t: t):
            loss = model(image).square().sum()
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        kept.append(sum(saved))
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, again)
    assert kept[1] < kept[0] / 2


@pytest.mark.parametrize("changes", EVERY_CONFIG, ids=str)
def test_compiles_whole(changes: dict[str, Any]) -> None:
    """`fullgraph` raises at a graph break; a size the positions were not made for goes through resampling too."""
    model = tiny_vit(**{"depth": 2, **changes})
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    down, across = model.config.patch_size
    for size, learns in ((model.config.image_size, True), ((3 * down, 7 * across), False)):
        image = torch.randn(2, model.config.in_channels, *size)
        with torch.set_grad_enabled(learns):
            torch.testing.assert_close(compiled(image), model(image), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("position", POSITIONS)
def test_compiles_whole_in_training_and_with_padding(position: str) -> None:
    model = tiny_vit(position=position, depth=2, drop_path=0.1).train()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(torch.randn(2, 3, 32, 32)).sum().backward()
    assert model.patch_embed.proj.weight.grad is not None
    model.eval()
    image, sizes = torch.randn(2, 3, 32, 32), [(32, 16), (8, 32)]
    torch.testing.assert_close(compiled(image, sizes), model(image, sizes), atol=1e-5, rtol=1e-5)


def test_compiles_to_machine_code() -> None:
    model, image = tiny_vit(num_registers=1, layer_scale=0.5), torch.randn(2, 3, 32, 32)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, fullgraph=True)(image), model(image), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("position", POSITIONS)
def test_one_compiled_graph_serves_every_size(position: str) -> None:
    model = tiny_vit(position=position, depth=2)
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=count, dynamic=True)
    for size in [(40, 56), (48, 64), (64, 24)]:
        image = torch.randn(2, 3, *size)
        torch.testing.assert_close(compiled(image), model(image), atol=1e-5, rtol=1e-5)
    assert len(graphs) == 1


@pytest.mark.parametrize("changes", EVERY_CONFIG, ids=str)
def test_bfloat16(changes: dict[str, Any]) -> None:
    model = tiny_vit(**changes)
    down, across = model.config.patch_size
    image = torch.randn(2, model.config.in_channels, 3 * down, 5 * across)
    reference = model(image)
    with torch.autocast("cpu", torch.bfloat16):
        similar(model(image).float(), reference)
        # Some devices' autocast norms in float32.
        assert model.embed(image)[0].dtype == torch.bfloat16 or model.config.embed_norm
    half = model.bfloat16()(image)
    assert half.dtype == torch.bfloat16
    similar(half.float(), reference)


def similar(ours: torch.Tensor, reference: torch.Tensor) -> None:
    assert F.cosine_similarity(ours, reference, dim=1).min() > 0.99


def test_config_and_weights_rebuild_the_model() -> None:
    model, image = tiny_vit(num_registers=2, mlp="swiglu"), torch.randn(1, 3, 32, 32)
    again = ViT(ViTConfig.from_json(model.config.to_json())).eval()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(image), model(image))


def test_randomized_models_differ_from_fresh_ones() -> None:
    """The helper that the other tests rest on leaves nothing at its initial value."""
    fresh = ViT(ViTConfig(**TINY, layer_scale=1.0, qk_norm=True))
    before = {name: parameter.clone() for name, parameter in fresh.named_parameters()}
    randomize(fresh)
    assert all(not torch.allclose(before[name], parameter) for name, parameter in fresh.named_parameters())
