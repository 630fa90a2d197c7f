# %% [markdown]
# # 3 What patches cost
#
# *20 minutes.*
#
# Smaller patches show more. What do they cost? Three answers are in use: "16 times", "4 times", and "4.45 times". All
# three are right. They count different things.
#
# **You will see** how tokens, weights, multiplications and time grow as patches shrink.

# %%
import check
from course import show

import patchlight as pl
from patchlight.costing import measure_latency
from patchlight.explain.plot import draw_growth, new_figure

# %% [markdown]
# ## Tokens
#
# An image of 224 x 224 in patches of 32, 16 and 8 pixels has 7 x 7, 14 x 14 and 28 x 28 patches. The class token is
# one more: 50, 197 and 785 tokens. Half the side makes four times the patches.

# %%
counted = {patch: pl.costs(pl.variant(f"B/{patch}")) for patch in (32, 16, 8)}
for patch, cost in counted.items():
    print(f"B/{patch:<3} {cost.tokens:4} tokens {cost.parameters / 1e6:6.1f} M weights {cost.macs / 1e9:6.1f} GMACs")
assert [cost.tokens for cost in counted.values()] == [50, 197, 785]
assert [cost.grid for cost in counted.values()] == [(7, 7), (14, 14), (28, 28)]
assert 785 - 1 == 4 * (197 - 1)

# %% [markdown]
# ## Weights
#
# They hardly change. All three models have 87 or 88 million. The blocks do not know how many tokens there are. Only
# two parts depend on the patch: the embedding, whose matrix grows with the patch, and the table of positions, which
# has a row for each token. B/16 has 86.6 million.

# %%
assert [round(cost.parameters / 1e6) for cost in counted.values()] == [88, 87, 87]
assert round(counted[16].parameters / 1e6, 1) == 86.6

# %% [markdown]
# ## "16 times": the matrix of attention
#
# Every token looks at every token. That makes a matrix of N x N numbers: 197 x 197 = 38,809 for patches of 16, and
# 785 x 785 = 616,225 for patches of 8. The second is 15.9 times the first. (16 times, but for the class token.) There
# is one such matrix for each head of each block: 12 x 12 = 144 of them.

# %%
assert 197**2 == 38_809
assert 785**2 == 616_225
assert round(785**2 / 197**2, 1) == 15.9
assert counted[16].attention_entries == 144 * 38_809
assert counted[16].attention_entries_by_block == (12 * 38_809,) * 12

# %% [markdown]
# ## "4 times": all the rest
#
# Everything else treats tokens one by one: the matrices for queries, keys and values, and the MLP. Four times the
# tokens cost four times as much. The MLP's part grows 3.98 times (785 / 197).

# %%
assert round(counted[8].mlp_macs / counted[16].mlp_macs, 2) == round(785 / 197, 2) == 3.98

# %% [markdown]
# ## "4.45 times": both together
#
# In all, B/16 takes 17.6 billion multiply-adds (GMACs) for an image, and B/8 takes 78.1: 4.45 times. That is near 4
# and far from 16. So the famous square is a small part at this size. How small? The scores (q times k) and the
# weighted values are two products of N x N x D in each block.

# %%
scores_and_values = 12 * 2 * 197**2 * 768
print(f"scores and values of B/16: {scores_and_values / 1e9:.2f} of {counted[16].macs / 1e9:.1f} GMACs")
assert round(counted[16].macs / 1e9, 1) == 17.6
assert round(counted[8].macs / 1e9, 1) == 78.1
assert round(counted[8].macs / counted[16].macs, 2) == 4.45

# %% [markdown]
# They are 0.7 of the 17.6 GMACs, which is 4 %. What is often called "the cost of attention" is more than that, since
# it includes the four matrices around it: 6.3 GMACs in all.

# %%
assert round(scores_and_values / 1e9, 1) == 0.7
assert round(100 * scores_and_values / counted[16].macs) == 4
assert round(counted[16].attention_macs / 1e9, 1) == 6.3

# %% [markdown]
# ## When the square wins
#
# Give a model larger images, and the square takes over. In the picture, a grey line grows like the number of pixels.
# The curves leave it the sooner, the smaller the patches are. From 224 to 896 pixels a side there are 16 times the
# pixels; B/32 costs 18 times as much, B/8 51 times.

# %%
sides = (224, 320, 448, 640, 896)
growth = {
    f"B/{patch}": {side: pl.costs(pl.variant(f"B/{patch}", image_size=side)).macs / 1e9 for side in sides}
    for patch in (32, 16, 8)
}
times = {name: costs[896] / costs[224] for name, costs in growth.items()}
print({name: round(value, 1) for name, value in times.items()})
assert (896 / 224) ** 2 == 16
assert round(times["B/32"]) == 18
assert round(times["B/8"]) == 51
figure = new_figure(height=3.4)
show(draw_growth(growth, figure.add_subplot()), "03_growth")

# %% [markdown]
# ## Time
#
# Multiplications are not seconds. A small product keeps a processor less busy than a large one, and memory has a say.
# So measure. This takes a tiny ViT, so that you need not wait. The figures are those of your machine at this moment.

# %%
for patch in (32, 16, 8):
    config = pl.variant(f"Ti/{patch}")
    taken = measure_latency(config, seconds=0.3)
    print(f"Ti/{patch:<3} {taken.median_ms:6.1f} ms, {pl.costs(config).macs / 1e9:5.2f} GMACs")

# %% [markdown]
# Beside it, the memory: the matrices of attention need not be stored at all. Lesson 6 shows how they are avoided.
#
# On the command line: `patchlight costs B/16 B/8 B/32 --time`. With a slider, on a photo: start `patchlight serve` and
# open [its patches](http://127.0.0.1:8000/#patches?size=16&image=224).
#
# ## Exercises
#
# **3.1** Count the weights of a plain ViT by hand, from its width, depth, patch, image side and number of classes.
# Each block has two LayerNorms, the matrices and biases of attention (queries, keys, values, output), and an MLP that
# is four times as wide inside. There is one more LayerNorm before the head.


# %%
def parameters(width, depth, patch, side, classes): ...


check.parameters(parameters)

# %% [markdown]
# **3.2** A block's matrices cost 12 D^2 for each token (four D x D in attention, eight in the MLP). Scores and values
# cost 2 N^2 D. At a width of 768, from how many tokens on is the second more than the first?

# %%
check.where_attention_overtakes(...)
