# %% [markdown]
# # 5 Where am I?
#
# *35 minutes.*
#
# Lesson 4 showed that a Transformer sees a bag. Here you tell each patch where it lies. There are four ways: add
# sines and cosines, add a table that is learned, turn queries and keys, or add a number to the scores.
#
# **You will see** a position worked out by hand, maps of which positions a model takes for near, and a table carried
# from 14 x 14 patches to 24 x 24, with the ways in which that goes wrong.

# %%
import check
import torch
import torch.nn.functional as F
from course import show

import patchlight as pl
from patchlight.explain.plot import draw_matrix, draw_position_similarity, new_figure
from patchlight.explain.probes import position_similarity
from patchlight.models.positions import rope_2d

torch.manual_seed(0)

# %% [markdown]
# ## Sines and cosines, by hand
#
# Take a grid of 2 x 2 patches and positions of 8 numbers. The first 4 numbers tell the row, the last 4 the column.
# Each 4 are two sines and two cosines: of the row itself, and of a hundredth of it.

# %%
row, column = 1, 1
speeds = torch.tensor([1.0, 0.01])
by_hand = torch.cat([(row * speeds).sin(), (row * speeds).cos(), (column * speeds).sin(), (column * speeds).cos()])
table = pl.sincos_2d((2, 2), 8)
print(table)
assert tuple(table.shape) == (4, 8)
assert torch.allclose(table[3], by_hand)

# %% [markdown]
# How alike are two positions? Multiply them number by number and add up. A position with itself gives 4.00. One step
# to the side gives 3.54. One step across the corner gives 3.08. Nearer is more alike, and that is all a model needs.
#
# You can see why. Sine times sine plus cosine times cosine is the cosine of the difference. So one step costs 1 -
# cos(1) = 0.46, and the slow pair hardly moves.

# %%
alike = table @ table.T
print(alike)
assert round(alike[0, 0].item(), 2) == 4.00
assert round(alike[0, 1].item(), 2) == round(alike[0, 2].item(), 2) == 3.54
assert round(alike[0, 3].item(), 2) == 3.08
assert round(1 - torch.tensor(1.0).cos().item(), 2) == 0.46

# %%
names = ["top left", "top right", "bottom left", "bottom right"]
figure = new_figure(width=5.2, height=3.6)
show(draw_matrix(alike, figure.add_subplot(), rows=names, columns=names, digits=2), "05_by_hand")

# %% [markdown]
# **Interleaved or not?** Some write sine, cosine, sine, cosine; others all sines and then all cosines. The numbers
# are the same, in another order, so all likenesses are the same. But a checkpoint that was trained with one cannot be
# read with the other: 4 of the 8 numbers would stand in the wrong place.

# %%
interleaved = table[:, [0, 2, 1, 3, 4, 6, 5, 7]]
assert torch.allclose(interleaved @ interleaved.T, alike)
moved = [0, 2, 1, 3, 4, 6, 5, 7]
assert sum(place != index for index, place in enumerate(moved)) == 4

# %% [markdown]
# ## A learned table
#
# A ViT usually does not compute positions, it learns them: a row for each patch, at random at first. Nobody tells it
# what is near. The model in the package learned 16 x 16 rows. Each small picture compares one patch's row with all
# others: bright is alike. The bright spot moves with the patch: the model found out what is near. It learned
# something of its own, too. The patches along the edge are alike all around, and unlike the middle. (To point at one
# after the other, start `patchlight serve` and open [its patches](http://127.0.0.1:8000/#patches).)

# %%
loaded = pl.load("default")
learned = position_similarity(loaded)
assert tuple(learned.shape) == (16, 16, 16, 16)
near, far = (
    torch.stack([learned[r, c, r, c + step] for r in range(16) for c in range(16 - step)]).mean().item()
    for step in (1, 8)
)
print(f"mean cosine one column apart {near:.2f}, eight columns apart {far:.2f}")
assert near > 0.5 > far
assert learned[0, 0, 15, 15] > 0.5 > 0 > learned[0, 0, 8, 8]  # corner and corner, corner and middle
show(draw_position_similarity(learned, most=6), "05_learned")

# %% [markdown]
# ## Turning: RoPE
#
# Instead of adding something to a token, turn its query and its key by an angle that grows with the place. A product
# of two vectors that were turned depends only on the difference of the angles. So the score depends on *how far
# apart* two patches are, and not on where they are. Here a query at place 3 meets a key at place 5, then the same two
# at 10 and 12: the same score, to 1e-5.


# %%
def turned(x, place, speed=0.3):
    angle = torch.tensor(place * speed)
    return torch.stack([x[0] * angle.cos() - x[1] * angle.sin(), x[0] * angle.sin() + x[1] * angle.cos()])


query, key = torch.randn(2), torch.randn(2)
first, second = turned(query, 3) @ turned(key, 5), turned(query, 10) @ turned(key, 12)
print(f"{first:.4f} {second:.4f}")
assert torch.allclose(first, second, atol=1e-5)
assert 5 - 3 == 12 - 10

# %% [markdown]
# On an image half of the numbers turn with the row, and half with the column. For a head of 64 numbers that makes 32
# pairs, 16 of which turn with the row.

# %%
angles = rope_2d((14, 14), 64)
assert tuple(angles.shape) == (196, 32)
assert (angles[1, :16] == 0).all()  # patch 1 lies in row 0
assert (angles[14, 16:] == 0).all()  # patch 14 in column 0

# %% [markdown]
# ## A number for each offset
#
# The last way leaves tokens, queries and keys alone, and adds a number to each score: one for each offset between two
# patches and each head. On a grid of 14 x 14 there are 27 x 27 = 729 offsets, from 13 rows up to 13 rows down.

# %%
model = pl.ViT(pl.variant("Ti/16", position="relative_bias", class_token=False, pooling="mean"))
assert tuple(model.blocks[0].attn.relative_bias.table.shape) == (729, 3)
assert 27 * 27 == 729

# %% [markdown]
# **And none at all?** `position="none"` works too. Lesson 4 shows what that means.
#
# ## To another size
#
# A table has a row for each patch it was trained with: 14 x 14 at 224 pixels. At 384 pixels there are 24 x 24. The
# table is stretched like a picture with many channels. The class token lies nowhere: its row stays as it is. (Sines,
# turns and offsets need no stretching. They can be computed for any grid.)

# %%
old = torch.randn(1 + 14 * 14, 192)  # the class token's row first
picture = old[1:].reshape(14, 14, 192).permute(2, 0, 1)[None]
stretched = F.interpolate(picture, size=(24, 24), mode="bicubic", antialias=True)
by_hand = torch.cat([old[:1], stretched[0].permute(1, 2, 0).reshape(24 * 24, 192)])
ours = pl.resample_positions(old, (14, 14), (24, 24), num_prefix=1)
print(f"by hand and ours differ by {(by_hand - ours).abs().max():.0e}")
assert tuple(ours.shape) == (1 + 576, 192)
assert 384 // 16 == 24
assert 24 * 24 == 576
assert torch.allclose(by_hand, ours, atol=1e-5)

# %% [markdown]
# Four common ways to get it wrong. None of them raises an error. On a random table the first is off by more than a
# tenth of the table's length, the second by less, and the last two by more than the whole of it.
#
# - *align_corners=True*: only the middle stays where it was.
# - *No antialias*: torch then takes another cubic curve. transformers does this on purpose (`how="plain"`), timm does
#   not. Use what the checkpoint was trained with.
# - *Rows and columns swapped*: invisible on random numbers, deadly on a trained table.
# - *Stretched as a line*: 196 rows to 576 as if patches lay in one long row.


# %%
def wrong(**settings):
    return F.interpolate(picture, size=(24, 24), **settings)


attempts = {
    "align_corners": wrong(mode="bicubic", align_corners=True),
    "no antialias": wrong(mode="bicubic"),
    "swapped": stretched.transpose(2, 3),
    "as a line": F.interpolate(picture.flatten(2), size=576, mode="linear").unflatten(2, (24, 24)),
}
right, off = stretched, {}
for name, attempt in attempts.items():
    off[name] = ((attempt - right).norm() / right.norm()).item()
    print(f"{name:14} off by {off[name]:.0%} of the table's length")
assert off["no antialias"] < 0.1 < off["align_corners"] < 1 < off["as a line"] < off["swapped"]
plain = pl.resample_positions(old, (14, 14), (24, 24), "plain", num_prefix=1)
assert torch.allclose(plain[1:].T.reshape(1, 192, 24, 24), attempts["no antialias"], atol=1e-5)

# %% [markdown]
# ## Exercises
#
# **5.1** Write the table of sines and cosines: sines of the row, cosines of the row, sines of the column, cosines of
# the column, a quarter of the width each. The speeds are 10000^(-i / quarter) for i = 0, 1, ...


# %%
def sincos(rows, columns, width): ...


check.sincos(sincos)

# %% [markdown]
# **5.2** Stretch a table of 1 + 14 x 14 rows for a grid of `side` x `side`, antialiased.


# %%
def resize_positions(table, side): ...


check.resize_positions(resize_positions)
