"""Checks of the exercises: each says that your answer is right, or what is off.

    check.patchify(yours)

prints one line and gives True or False. Solutions are in lessons/solutions/; look there last.
"""

import functools
import inspect
import math

import numpy as np
import torch
import torch.nn.functional as F

import patchlight as pl


class Off(Exception):  # noqa: N818, read as in "raise Off(what)"
    """What is off in an answer."""


CHECKS = {}
"""Every check by its name."""


def exercise(check):
    """A check that raises Off becomes one that prints its verdict."""

    @functools.wraps(check)
    def verdict(yours):
        try:
            check(yours)
        except Off as off:
            print(f"not yet: {check.__name__}: {off}")
            return False
        print(f"right: {check.__name__}")
        return True

    CHECKS[check.__name__] = verdict
    return verdict


def _ask(yours, *arguments):
    """What your function gives."""
    if not callable(yours):
        raise Off(f"give the function itself, not {yours!r:.40}")
    if len(inspect.signature(yours).parameters) != len(arguments):
        raise Off(f"it should take {len(arguments)} arguments")
    try:
        answer = yours(*[each.clone() if isinstance(each, torch.Tensor) else each for each in arguments])
    except Exception as error:
        raise Off(f"it stopped with {type(error).__name__}: {error!s:.150}") from None
    if answer is None or answer is Ellipsis:
        raise Off("there is nothing yet: it returned nothing")
    return answer


def _same(answer, expected, hints=(), tolerance=1e-5):
    """Both are the same numbers in the same shape. `hints` are (known wrong answer, what went wrong in it)."""
    try:
        mine, right = torch.as_tensor(np.asarray(answer)), torch.as_tensor(np.asarray(expected))
    except (TypeError, ValueError, RuntimeError):
        raise Off(f"an array or a tensor is wanted, not {type(answer).__name__}") from None
    mine, right = mine.double(), right.double()
    for wrong, why in hints:
        wrong = torch.as_tensor(np.asarray(wrong)).double()
        if mine.shape == wrong.shape and torch.allclose(mine, wrong, atol=tolerance, rtol=tolerance):
            raise Off(why)
    if mine.shape != right.shape:
        raise Off(f"its shape is {tuple(mine.shape)}; it should be {tuple(right.shape)}")
    if not torch.allclose(mine, right, atol=tolerance, rtol=tolerance):
        place = tuple(torch.unravel_index((mine - right).abs().argmax(), mine.shape))
        at = ", ".join(str(int(each)) for each in place)
        raise Off(f"the shape is right; at [{at}] it has {mine[place]:.4g} where {right[place]:.4g} should be")


def _number(answer, expected, hints=(), tolerance=1e-3):
    """A number you worked out. `hints` are (known wrong answer, what went wrong in it)."""
    if answer is None or answer is Ellipsis:
        raise Off("there is nothing yet: write your number in place of ...")
    if not isinstance(answer, int | float):
        raise Off(f"a number is wanted, not {answer!r:.40}")
    for wrong, why in hints:
        if math.isclose(answer, wrong, rel_tol=tolerance):
            raise Off(why)
    if not math.isclose(answer, expected, rel_tol=tolerance):
        raise Off(f"{answer:,} is too {'small' if answer < expected else 'large'}")


def _drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# 1 An image is a sentence


@exercise
def patchify(yours):
    """(image_HWC as NumPy array, side) -> patches (P, side * side * C), row by row."""
    image = np.arange(6 * 4 * 3).reshape(6, 4, 3)
    right = image.reshape(3, 2, 2, 2, 3).transpose(0, 2, 1, 3, 4).reshape(6, -1)
    columns_first = image.reshape(3, 2, 2, 2, 3).transpose(2, 0, 1, 3, 4).reshape(6, -1)
    hints = [
        (image.reshape(6, -1), "these are strips of rows, not squares; the two middle axes have to change places"),
        (columns_first, "the patches go down the columns; text is read row by row"),
    ]
    _same(_ask(yours, image, 2), right, hints)


@exercise
def unpatchify(yours):
    """(patches (P, side * side * C), height, width, side) -> image_HWC: the way back."""
    image = np.arange(6 * 4 * 3).reshape(6, 4, 3)
    patches = image.reshape(3, 2, 2, 2, 3).transpose(0, 2, 1, 3, 4).reshape(6, -1)
    hints = [(patches.reshape(6, 4, 3), "the numbers have the right shape but the wrong order: undo the transpose")]
    _same(_ask(yours, patches, 6, 4, 2), image, hints)


@exercise
def words_in_a_photo(yours):
    """How many patches of 16 x 16 pixels a photo of 384 x 512 pixels has."""
    _number(yours, (384 // 16) * (512 // 16), [(384 * 512 / 16, "a patch is 16 pixels wide AND 16 pixels high")])


# 2 A convolution in disguise


@exercise
def patch_embed(yours):
    """(image_BCHW, weight_DCHW, bias_D) -> tokens_BPD, without a convolution."""
    image, weight, bias = _drawn(2, 3, 8, 12), _drawn(5, 3, 4, 4, seed=1), _drawn(5, seed=2)
    right = F.conv2d(image, weight, bias, stride=4).flatten(2).transpose(1, 2)
    hints = [
        (F.conv2d(image, weight, stride=4).flatten(2).transpose(1, 2), "the bias is missing"),
        (right.transpose(1, 2), "tokens come before their numbers: swap the last two axes"),
        (
            F.conv2d(image, weight.transpose(2, 3), bias, stride=4).flatten(2).transpose(1, 2),
            "each patch's rows and columns are swapped",
        ),
    ]
    _same(_ask(yours, image, weight, bias), right, hints, 1e-4)


@exercise
def kernel_from_matrix(yours):
    """(matrix (side * side * C, D) for patches with colours last, side) -> weight_DCHW for a convolution."""
    weight = _drawn(5, 3, 4, 4)
    matrix = weight.permute(2, 3, 1, 0).reshape(-1, 5)
    hints = [
        (matrix.T.reshape(5, 3, 4, 4), "the numbers of a patch lie as rows, columns, colours: split them so first")
    ]
    _same(_ask(yours, matrix, 4), weight, hints)


# 3 What patches cost


@exercise
def parameters(yours):
    """(width, depth, patch, side, classes) -> how many weights a plain ViT has."""
    for name in ("Ti/16", "B/32"):
        config = pl.variant(name)
        answer = _ask(yours, config.width, config.depth, config.patch_size[0], config.image_size[0], config.num_classes)
        right, width, depth = pl.costs(config).parameters, config.width, config.depth
        hints = [
            (
                right - depth * 9 * width - 2 * width - config.num_classes,
                "the matrices are there; the biases are missing",
            ),
            (right - (depth * 4 + 2) * width, "each LayerNorm has a scale and a shift"),
            (right - 2 * width * depth, "there are two LayerNorms in each block"),
            (right - width, "the class token is a weight too, and has a row of the positions"),
        ]
        _number(answer, right, hints, tolerance=1e-9)


@exercise
def where_attention_overtakes(yours):
    """From how many tokens on scores and values cost more than all matrices of the blocks, at a width of 768."""
    _number(
        yours,
        6 * 768,
        [
            (3 * 768, "scores are one product and values another: two N x N products of width D"),
            (768, "each token also passes through matrices: four of D x D in attention, eight in the MLP"),
        ],
    )


# 4 A bag of patches


@exercise
def shuffle(yours):
    """(image_BCHW, side, order_P) -> the images with patch order_P[i] at place i."""
    image, order = _drawn(1, 3, 8, 12), torch.tensor([5, 3, 0, 1, 2, 4])
    right = pl.shuffle_patches(image, 4, order)
    hints = [
        (pl.shuffle_patches(image, 4, order.argsort()), "this is the way back: patch i went to place order[i]"),
        (image, "nothing has moved"),
    ]
    _same(_ask(yours, image, 4, order), right, hints)


@exercise
def is_equivariant(yours):
    """(function of tokens_BND, tokens_BND, order_N) -> True where shuffling before or after makes no difference."""
    tokens, order = _drawn(1, 6, 4), torch.tensor([5, 3, 0, 1, 2, 4])
    for function, right, what in (
        (lambda x: x.softmax(2), True, "a softmax over each token's own numbers"),
        (lambda x: x - x.mean(1, keepdim=True), True, "taking off the mean of all tokens"),
        (lambda x: x + torch.arange(6.0)[:, None], False, "adding each place's number"),
        (lambda x: x.cumsum(1), False, "a running sum"),
    ):
        if bool(_ask(yours, function, tokens, order)) is not right:
            raise Off(f"it is wrong about {what}, which {'is' if right else 'is not'} equivariant")


# 5 Where am I?


@exercise
def sincos(yours):
    """(rows, columns, width) -> the table of sines and cosines (rows * columns, width), as `pl.sincos_2d` makes it."""
    right = pl.sincos_2d((3, 4), 8)
    quarter = right.chunk(4, 1)
    hints = [
        (torch.cat([quarter[2], quarter[3], quarter[0], quarter[1]], 1), "the row comes first, then the column"),
        (torch.cat([quarter[1], quarter[0], quarter[3], quarter[2]], 1), "sines come before cosines"),
    ]
    _same(_ask(yours, 3, 4, 8), right, hints)


@exercise
def resize_positions(yours):
    """(table (1 + 14 * 14, D) with the class token's row first, new side) -> table (1 + new * new, D)."""
    table = _drawn(197, 6)
    right = pl.resample_positions(table, (14, 14), (20, 20), num_prefix=1)
    picture = table[1:].T.reshape(1, 6, 14, 14)
    plain = F.interpolate(picture, (20, 20), mode="bicubic").flatten(2)[0].T
    corners = F.interpolate(picture, (20, 20), mode="bicubic", align_corners=True).flatten(2)[0].T
    turned = F.interpolate(picture.mT, (20, 20), mode="bicubic", antialias=True).flatten(2)[0].T
    hints = [
        (torch.cat([table[:1], plain]), "without antialias=True torch takes another cubic curve (transformers' way)"),
        (torch.cat([table[:1], corners]), "align_corners=True moves all patches but those in the middle"),
        (torch.cat([table[:1], turned]), "rows and columns have changed places"),
        (right[1:], "the class token's row is missing: it lies nowhere, and stays as it is"),
    ]
    _same(_ask(yours, table, 20), right, hints, 1e-4)


# 6 Attention by hand


@exercise
def attention(yours):
    """(q, k, v), each (N, E) -> what each token takes with it, (N, E)."""
    q, k, v = (_drawn(5, 8, seed=seed) for seed in range(3))
    scores = q @ k.T
    hints = [
        (scores.softmax(1) @ v, "the scores were not divided by the square root of E"),
        ((scores / 8).softmax(1) @ v, "divide by the square root of E, not by E"),
        ((scores / 8**0.5).softmax(0) @ v, "the softmax goes over the keys: every row sums to one, not every column"),
        ((scores / 8**0.5) @ v, "the softmax is missing"),
        ((scores / 8**0.5).softmax(1), "these are the weights; the values still have to be averaged with them"),
    ]
    _same(_ask(yours, q, k, v), (scores / 8**0.5).softmax(1) @ v, hints)


@exercise
def split_heads(yours):
    """(x (N, D), heads) -> (heads, N, D / heads)."""
    x = _drawn(5, 12)
    hints = [
        (x.reshape(3, 5, 4), "the shape is right, but a head got the numbers of different tokens: split D, then swap"),
        (x.reshape(5, 4, 3).permute(2, 0, 1), "a head has neighbouring numbers: the heads' axis comes before theirs"),
    ]
    _same(_ask(yours, x, 3), x.reshape(5, 3, 4).transpose(0, 1), hints)


# 7 ViT in 60 lines


@exercise
def block(yours):
    """(z, attention, mlp, norm1, norm2) -> the tokens after one block."""
    z = _drawn(1, 5, 4)
    parts = [lambda x: x.flip(1) * 2, lambda x: x**2, lambda x: x - 1, lambda x: x / 2]
    attend, mlp, norm1, norm2 = parts
    middle = attend(norm1(z)) + z
    after = norm1(z + attend(z))
    hints = [
        (norm2(after + mlp(after)), "this norms after adding, as the first Transformer did; a ViT norms before"),
        (mlp(norm2(attend(norm1(z)))), "what a branch finds is added to the tokens; here it takes their place"),
        (mlp(norm2(middle)) + z, "the second branch adds to what the first has left, not to what came in"),
        (mlp(norm2(z)) + attend(norm1(z)) + z, "the MLP reads what attention has left; here both read the same"),
    ]
    _same(_ask(yours, z, *parts), mlp(norm2(middle)) + middle, hints)


@exercise
def with_class_token(yours):
    """(patches_BPD, class token (D,), positions (1 + P, D)) -> the tokens that enter the first block."""
    patches, token, positions = _drawn(2, 4, 3), _drawn(3, seed=1), _drawn(5, 3, seed=2)
    row = token.expand(2, 1, 3)
    hints = [
        (torch.cat([patches, row], 1) + positions, "the class token comes first"),
        (torch.cat([row, patches + positions[1:]], 1), "the class token has a row of the positions, too"),
        (torch.cat([row, patches], 1), "the positions are missing"),
    ]
    _same(_ask(yours, patches, token, positions), torch.cat([row, patches], 1) + positions, hints)


# 10 A free crop


@exercise
def overlap(yours):
    """(box, box), each (x0, y0, x1, y1) -> intersection over union."""
    cases = [((0, 0, 2, 2), (0, 0, 2, 2), 1.0), ((0, 0, 4, 4), (2, 2, 6, 6), 4 / 28), ((0, 0, 2, 2), (5, 5, 6, 6), 0.0)]
    for a, b, right in cases:
        width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
        both, areas = width * height, (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1])
        hints = []
        if right == 0:
            hints.append((both / (areas - both), "boxes apart have a negative width AND height, whose product is not"))
        elif right < 1:
            hints.append((both / areas, "what both cover was counted twice in the union"))
            hints.append((both, "that is the intersection; divide it by the union"))
        _number(_ask(yours, a, b), right, hints)


@exercise
def mask_to_box(yours):
    """(mask (H, W)) -> (x0, y0, x1, y1) around it."""
    mask = torch.zeros(6, 9, dtype=torch.bool)
    mask[1:4, 2:8] = True
    hints = [
        ((2, 1, 7, 3), "x1 and y1 lie just beyond the last pixel: add one"),
        ((1, 2, 4, 8), "x counts columns and y counts rows; here they have changed places"),
    ]
    _same(_ask(yours, mask), (2, 1, 8, 4), hints)


# 12 Four pitfalls


@exercise
def padded_patches(yours):
    """How many patches of 8 x 8 pixels cover 132 x 260."""
    hints = [(16 * 32, "these are the patches that fit; the edge is not seen"), (132 * 260 / 64, "patches are whole")]
    _number(yours, 17 * 33, hints)


@exercise
def undo_one(yours):
    """(images normalised twice, mean (3,), std (3,)) -> images normalised once."""
    once = _drawn(2, 3, 4, 4)
    mean, std = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.25, 0.5])
    m, s = mean[:, None, None], std[:, None, None]
    twice = (once - m) / s
    hints = [
        ((twice - m) / s, "now it is normalised three times; go back instead"),
        ((twice + m) * s, "undo in the other order: first times the deviation, then plus the mean"),
        ((twice * s + m) * s + m, "this undoes both; one should stay"),
    ]
    _same(_ask(yours, twice, mean, std), once, hints)


# 9 What it learned


@exercise
def roll_out(yours):
    """(list of attention matrices (N, N), the first block first) -> what reaches each token, (N, N)."""
    attentions = [_drawn(4, 4, seed=seed).softmax(1) for seed in range(3)]
    eye = torch.eye(4)
    half = [(each + eye) / 2 for each in attentions]
    hints = [
        (
            attentions[2] @ attentions[1] @ attentions[0],
            "each block also passes its input on: average with the identity",
        ),
        (half[0] @ half[1] @ half[2], "the last block's matrix comes first: it asks the one before it"),
        (
            (attentions[2] + eye) @ (attentions[1] + eye) @ (attentions[0] + eye),
            "average with the identity",
        ),
    ]
    _same(_ask(yours, attentions), half[2] @ half[1] @ half[0], hints)


@exercise
def score_of_a_useless_map(yours):
    """The insertion area minus the deletion area where both curves are the same."""
    if yours is not None and yours is not Ellipsis and yours == 0:
        return
    _number(yours, 0, [(1, "the score is a difference of two areas, and these are equal")])


# 11 Registers


@exercise
def spots_among(yours):
    """(lengths of the patches (P,)) -> which are spots, a bool (P,)."""
    lengths = torch.tensor([10.0, 11, 9, 10, 12, 8, 10, 60, 24, 10])
    near = torch.tensor([10.0, 10.1, 9.9, 10, 10, 10, 10.1, 15, 9.9, 10])  # 15 is far out, and no twice the median
    wide = torch.tensor([10.0, 4, 16, 7, 13, 22, 5, 15, 8, 12])  # 22 is twice the median, and not far out
    for case, right in ((lengths, [7, 8]), (near, []), (wide, [])):
        wanted = torch.zeros(len(case), dtype=torch.bool)
        wanted[right] = True
        by_mean = case > case.mean() + 2 * case.std()
        hints = [(by_mean, "mean and deviation are carried away by the spots themselves: use medians")]
        _same(_ask(yours, case), wanted, hints if not torch.equal(by_mean, wanted) else ())


@exercise
def price_of_registers(yours):
    """By how many per cent 4 registers make the attention matrices of L/14 at 224 pixels larger."""
    hints = [
        (100 * 4 / 257, "that is how many more tokens there are; the matrix has as many rows as columns"),
        ((261 / 257) ** 2, "in per cent, please: how much MORE"),
        (0.0314, "in per cent, please"),
    ]
    _number(yours, 100 * (261**2 / 257**2 - 1), hints, tolerance=0.02)


# 8 Train it


@exercise
def learning_rate(yours):
    """(step, steps, warmup, peak) -> the learning rate at this step."""
    for step, right in ((0, 0.0), (5, 0.5), (10, 1.0), (60, 0.5), (35, 0.853553), (110, 0.0)):
        answer = _ask(yours, step, 110, 10, 1.0)
        if not isinstance(answer, int | float):
            raise Off(f"a number is wanted, not {answer!r:.40}")
        if not math.isclose(answer, right, abs_tol=1e-4):
            half = "warm-up" if step < 10 else "fall"
            raise Off(f"in the {half}: at step {step} of 110 it is {answer:.3g} and should be {right:.3g}")


@exercise
def cross_entropy(yours):
    """(scores (B, K), classes (B,)) -> the mean cross-entropy."""
    scores, classes = _drawn(4, 3), torch.tensor([0, 2, 1, 1])
    right = F.cross_entropy(scores, classes)
    picked = scores.softmax(1)[range(4), classes]
    hints = [
        (right * 4, "this is the sum over the batch; the mean is wanted"),
        (-right, "the sign: a logarithm of a share is negative, the loss is positive"),
        (-scores[range(4), classes].mean(), "scores become shares by a softmax first"),
        (1 - picked.mean(), "it is the logarithm of the share that is taken"),
    ]
    _same(_ask(yours, scores, classes), right, hints)


# 13 ViT or CNN?


@exercise
def field_of(yours):
    """(layers, kernel) -> pixels to a side that one output sees."""
    for layers, kernel in ((1, 3), (5, 3), (2, 7)):
        hints = [(layers * kernel, "the kernels overlap: each layer adds kernel - 1 to what was seen before")]
        _number(_ask(yours, layers, kernel), 1 + layers * (kernel - 1), hints if layers > 1 else ())


@exercise
def price_of_knowing_nothing(yours):
    """Weights of a full matrix divided by those of a convolution of 3 x 3, 64 channels, 32 x 32 pixels."""
    full, kernel = (32 * 32 * 64) ** 2, 9 * 64 * 64
    _number(
        yours,
        full / kernel,
        [
            (kernel / full, "the other way round: the matrix has more"),
            (32 * 32 * 64 / kernel, "a matrix has a weight for each input AND each output"),
            (full / 9, "the convolution has weights from each of 64 channels to each of 64"),
        ],
    )


# 14 Descendants


@exercise
def swin_entries(yours):
    """Attention entries of one block: 56 x 56 patches, windows of 7 x 7, 3 heads."""
    hints = [
        (3 * 3136**2, "that is a ViT's: each patch with each; in Swin only with those of its window"),
        (64 * 49**2, "of one head; there are three"),
        (3 * 49**2, "of one window; count the windows"),
    ]
    _number(yours, 3 * 64 * 49**2, hints)


@exercise
def hide(yours):
    """(patches (P, X), order (P,), keep) -> (the patches to encode, mask (P,) that is True where hidden)."""
    patches, order = _drawn(6, 2), torch.tensor([4, 0, 5, 2, 1, 3])
    answer = _ask(yours, patches, order, 2)
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise Off("two things are wanted: the patches to encode, and the mask")
    _same(answer[0], patches[[4, 0]], [(patches[:2], "take them in the given order")])
    wanted = torch.tensor([False, True, True, True, False, True])
    _same(answer[1], wanted, [(~wanted, "the mask is True where a patch is HIDDEN")])
