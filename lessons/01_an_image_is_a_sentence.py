# %% [markdown]
# # 1 An image is a sentence
#
# *20 minutes. NumPy is all you need.*
#
# A Transformer reads a sentence: a row of words, each word a row of numbers. An image is no sentence. In this lesson
# you make it one. You cut it into squares, lay the squares in a line, and turn each into a few numbers.
#
# **You will see** a toy image of 8 x 8 pixels become 4 words, then a photo of a cat become 196.

# %%
import check
import numpy as np
from course import photo, show
from PIL import Image

from patchlight.explain.plot import draw_matrix, draw_patches, new_figure

# %% [markdown]
# ## A toy image
#
# It is 8 pixels high and 8 wide. It has no colours. The pixels count from 0 at the top left to 63 at the bottom
# right, so that you always know where a number came from.

# %%
toy = np.arange(64).reshape(8, 8)
print(toy)
assert toy.shape == (8, 8)
assert toy[0, 0] == 0
assert toy[7, 7] == 63

# %% [markdown]
# ## Cut it
#
# We want squares of 4 x 4 pixels. Two fit down and two across: 4 patches of 16 numbers each.
#
# `reshape` does the cutting. It splits the 8 rows into 2 groups of 4, and the 8 columns likewise. Now there are four
# axes: which patch down, which row in it, which patch across, which column in it.

# %%
cut = toy.reshape(2, 4, 2, 4)
assert cut[1, 0, 0, 0] == toy[4, 0]  # the second patch down, its first row
assert cut[0, 0, 1, 0] == toy[0, 4]  # the second patch across, its first column

# %% [markdown]
# The two axes that say *which patch* have to stand together, and the two that say *where in it* too. So the two in
# the middle change places. Then each patch is laid out as one row of 16 numbers.

# %%
patches = cut.transpose(0, 2, 1, 3).reshape(4, 16)
print(patches)
assert patches.shape == (4, 16)
assert patches[0].tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27]
assert patches[1, 0] == 4  # the patch to the right comes next, as words do

# %% [markdown]
# Leave the `transpose` out, and you get rows of the right length that are no squares. This is the most common
# mistake, and no error tells you of it.

# %%
wrong = toy.reshape(4, 16)
print(wrong[0])
assert wrong.shape == patches.shape  # the shape says nothing
assert wrong[0].tolist() == list(range(16))  # two whole rows of the image


# %%
def in_a_line(patches):
    """The patches as squares of 4 x 4, with a gap between."""
    line = np.full((4, 19), np.nan)
    for place, patch in enumerate(patches):
        line[:, 5 * place : 5 * place + 4] = patch.reshape(4, 4)
    return line


figure = new_figure(height=3.2)
places = figure.add_gridspec(2, 2, width_ratios=[1, 1.7])
grey = {"digits": 0, "cmap": "gray", "vmin": -20, "vmax": 63}
ax = draw_matrix(toy, figure.add_subplot(places[:, 0]), title="the image", **grey)
ax.axhline(3.5, color="white")
ax.axvline(3.5, color="white")
draw_matrix(in_a_line(patches), figure.add_subplot(places[0, 1]), title="its patches in a line", **grey)
draw_matrix(in_a_line(wrong), figure.add_subplot(places[1, 1]), title="without the transpose: not its squares", **grey)
show(figure, "01_toy")

# %% [markdown]
# ## Make words of them
#
# A word is a vector of fixed length. So each patch is multiplied by one matrix, the same for all. It is called the
# *embedding*, and training finds it. Ours is drawn at random: seed 42, scale 0.3. It makes 8 numbers of 16.

# %%
embedding = np.random.default_rng(42).normal(scale=0.3, size=(16, 8))
tokens = (patches / 63) @ embedding
print(tokens.round(2))
assert tokens.shape == (4, 8)
assert 0.2 < embedding.std() < 0.4

# %%
show(
    draw_matrix(tokens, rows=["patch 0", "patch 1", "patch 2", "patch 3"], digits=1, title="4 words of 8 numbers"),
    "01_tokens",
)

# %% [markdown]
# A matrix product is linear. Two things follow. A black patch becomes a row of zeros. And a patch that is half as
# bright becomes a token half as long.

# %%
assert np.allclose(np.zeros(16) @ embedding, 0)
assert np.allclose((patches[3] / 63 / 2) @ embedding, tokens[3] / 2)

# %% [markdown]
# ## A photo
#
# The cat is squeezed to 224 x 224 pixels. Patches of 16 x 16 make a grid of 14 x 14, which is 196 words. A patch has
# three colours, so it holds 16 * 16 * 3 = 768 numbers. The paper's title counts just this: "An image is worth 16x16
# words".

# %%
cat = np.asarray(Image.open(photo("chelsea")).convert("RGB").resize((224, 224)))
words = cat.reshape(14, 16, 14, 16, 3).transpose(0, 2, 1, 3, 4).reshape(196, 768)
print(words.shape)
assert words.shape == (196, 768)
assert 14 * 14 == 196
assert 16 * 16 * 3 == 768

# %%
figure = new_figure(height=4.2)
left, right = figure.subplots(1, 2)
draw_patches(cat, (14, 14), left, title="14 x 14 patches")
some = words.reshape(14, 14, 16, 16, 3)[5:9, 4:12]  # the eyes
gaps = np.full((4 * 20, 8 * 20, 3), 255, np.uint8)
for row in range(4):
    for column in range(8):
        gaps[row * 20 : row * 20 + 16, column * 20 : column * 20 + 16] = some[row, column]
draw_patches(gaps, (1, 1), right, title="32 of the words, apart")
show(figure, "01_cat")

# %% [markdown]
# Nothing is lost by cutting. The way back is the same steps in the other order.

# %%
back = words.reshape(14, 14, 16, 16, 3).transpose(0, 2, 1, 3, 4).reshape(224, 224, 3)
assert (back == cat).all()

# %% [markdown]
# What *is* lost is where each word stood. A list of 196 rows has an order, but a Transformer does not look at it.
# Lesson 4 shows that, and lesson 5 puts it right.
#
# **Watch it happen**: start `patchlight serve` and open [the cat in 196 patches](http://127.0.0.1:8000/#learn?size=16&image=224).
# The slider there dices it anew.
#
# ## Exercises
#
# Replace each `...`, run the cell, and read what the check says. The solutions are in `lessons/solutions`.
#
# **1.1** Cut any image (height, width, colours) into squares of `side` pixels. The image need not be square.


# %%
def patchify(image, side): ...


check.patchify(patchify)

# %% [markdown]
# **1.2** The way back.


# %%
def unpatchify(patches, height, width, side): ...


check.unpatchify(unpatchify)

# %% [markdown]
# **1.3** How many words of 16 x 16 pixels is a photo of 384 x 512 pixels worth?

# %%
check.words_in_a_photo(...)
