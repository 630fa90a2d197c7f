# %% [markdown]
# # 6 Attention by hand
#
# *35 minutes.*
#
# Attention is a question and many answers. Each token asks: who has something for me? Each token answers with how
# well it fits, and hands over what it has. In this lesson you compute one such answer by hand, in a model that was
# trained, and find the same numbers that its fast kernel used.
#
# **You will see** why scores are divided by a square root, what four heads look at in one photo, and why the matrix
# of 785 x 785 numbers is never written down.

# %%
import check
import torch
import torch.nn.functional as F
from course import photo, show

import patchlight as pl
from patchlight.explain.attention import heat_on_photo
from patchlight.explain.plot import draw_heads, draw_matrix, new_figure
from patchlight.explain.probes import objectness

torch.manual_seed(0)

# %% [markdown]
# ## Three tokens
#
# Each token has a query q (what it looks for), a key k (what it is found by) and a value v (what it hands over). Here
# are three tokens with two numbers each. The first one asks for what the third one is.

# %%
q = torch.tensor([[4.0, 0.0], [0.0, 0.0], [0.0, 2.0]])
k = torch.tensor([[0.0, 1.0], [0.0, 0.0], [1.0, 0.0]])
v = torch.tensor([[10.0, 0.0], [0.0, 0.0], [0.0, 10.0]])

scores = q @ k.T / 2**0.5  # how well each key fits each query
weights = scores.softmax(dim=1)  # shares: each row sums to one
answers = weights @ v  # a weighted mean of the values
print(weights.numpy().round(2), answers.numpy().round(1), sep="\n")
assert torch.allclose(weights.sum(1), torch.ones(3))

# %% [markdown]
# The first token gets nearly 90 % of its answer from the third. The second asks for nothing in particular, so it gets
# a third from each: attention cannot look away, it always hands out 100 %.

# %%
assert 0.885 < weights[0, 2] < 0.905
assert torch.allclose(weights[1], torch.tensor(1 / 3))
figure = new_figure(width=4.2, height=3.2)
ax = draw_matrix(
    weights,
    figure.add_subplot(),
    rows=["1 asks", "2 asks", "3 asks"],
    columns=["1", "2", "3"],
    digits=2,
    vmin=0,
    vmax=1,
    title="who gets how much from whom",
)
show(ax, "06_three_tokens")

# %% [markdown]
# ## Why the square root?
#
# A score adds up E products. If queries and keys vary by 1, scores vary by the square root of E: by 8 for 64 numbers.
# A softmax of such scores picks one token and ignores the rest, and then nothing can be learned from those. Divided
# by 8, scores vary by 1 again. Here are 1,000 queries and 200 keys: without the division the largest share is 0.76 in
# the mean, with it 0.05.

# %%
queries, keys = torch.randn(1000, 64), torch.randn(200, 64)
raw = queries @ keys.T
print(f"scores vary by {raw.std():.2f}, divided by {(raw / 8).std():.2f}")
assert 7.8 < raw.std() < 8.2
assert 64**0.5 == 8
largest = [scores.softmax(1).amax(1).mean().item() for scores in (raw, raw / 8)]
print(f"largest share {largest[0]:.2f} and {largest[1]:.2f}")
assert round(largest[0], 2) == 0.76
assert round(largest[1], 2) == 0.05

# %% [markdown]
# ## One row of a trained model
#
# The model in the package runs attention on a fused kernel: `F.scaled_dot_product_attention` gives the answers and
# never writes the weights down. So we take queries, keys and values of its last block, and do by hand what the kernel
# did. A photo has 261 tokens there: 1 class token, 4 registers, and 256 patches. Its 256 numbers are split between 4
# heads of 64.

# %%
loaded = pl.load("default")
image, view = loaded.preprocess(photo("astronaut"))
seen = []
with torch.inference_mode():
    loaded.model.encode(image[None], visit=lambda block, heads, tokens: seen.append(heads))
last = seen[-1]
q, k, v = last.q_BANE[0], last.k_BANE[0], last.v_BANE[0]
print(q.shape)
assert tuple(q.shape) == (4, 261, 64)
assert 1 + 4 + 256 == 261
assert 4 * 64 == 256

# %% [markdown]
# The class token is number 0. Its row in head 2: scores with all 261 keys, divided by 8, softmax, mean of the values.
# The kernel's answer is the same to 1e-4, and `pl.attention` gives the same row.

# %%
row = (q[2, 0] @ k[2].T / 8).softmax(0)
answer = row @ v[2]
assert torch.allclose(answer, F.scaled_dot_product_attention(q[None], k[None], v[None])[0, 2, 0], atol=1e-4)
assert torch.allclose(answer, last.out_BANE[0, 2, 0], atol=1e-4)
maps = pl.attention(loaded, image[None], layers=-1, queries="cls")
assert torch.allclose(maps.weights[0, 0, 2, 0], row, atol=1e-5)
assert abs(row.sum().item() - 1) < 1e-5

# %% [markdown]
# ## Heads
#
# Four heads ask four questions at once. Each has its own queries and keys, so each can look elsewhere. Here is where
# the class token looks in the last block. This model was *taught* with boxes to look at the subject there, so do not
# take it for granted: see lesson 9. To ask any token in any block, start `patchlight serve` and open [the same
# photo](http://127.0.0.1:8000/#attention?query=cls&photo=astronaut).

# %%
heat = maps.heat()[0, 0, :, 0]
assert tuple(heat.shape) == (4, 16, 16)
decoded = pl.decode(photo("astronaut"))
on_photo = heat_on_photo(heat, view, maps.patch_size, decoded.image.size[::-1])
show(draw_heads(decoded.image, on_photo, objectness(heat), even=1 / 261)[0], "06_heads")

# %% [markdown]
# ## The matrix that is never written
#
# B/8 has 785 tokens at 224 pixels. Its matrix has 785 x 785 = 616,225 numbers for each head. With 12 heads and 12
# blocks that is 88.7 million numbers for one photo, or 355 MB in float32. A fused kernel works on small tiles of it
# and keeps only the answers. That is why hooks find no weights, and why `pl.attention` computes just the rows that
# you ask for: for the class token one row of 785 in place of 785.

# %%
assert 785 * 785 == 616_225
entries = pl.costs(pl.variant("B/8")).attention_entries
print(f"{entries:,}")
assert entries == 12 * 12 * 616_225
assert round(entries / 1e6, 1) == 88.7
assert round(entries * 4 / 1e6) == 355

# %% [markdown]
# ## Exercises
#
# **6.1** Write attention for one head: q, k and v are (N, E).


# %%
def attention(q, k, v): ...


check.attention(attention)

# %% [markdown]
# **6.2** Split tokens (N, D) between heads: (heads, N, D / heads). The first head gets the first numbers of every
# token.


# %%
def split_heads(x, heads): ...


check.split_heads(split_heads)
