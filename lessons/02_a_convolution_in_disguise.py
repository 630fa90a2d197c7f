# %% [markdown]
# # 2 A convolution in disguise
#
# *25 minutes.*
#
# Lesson 1 cut an image into patches and multiplied each by a matrix. Look into any ViT's code, and you find neither.
# You find `nn.Conv2d`. In this lesson you see why: a convolution whose step is as long as its kernel is wide *is*
# patches times a matrix.
#
# **You will see** three ways that give the same tokens, the kernel of a trained model as pictures, and which way is
# fastest on your machine.

# %%
import time

import check
import torch
import torch.nn.functional as F
from course import photo, show
from torch import nn

import patchlight as pl
from patchlight.explain.plot import draw_photo, panels

torch.manual_seed(0)

# %% [markdown]
# ## Three ways
#
# Two images of 32 x 48 pixels, patches of 8 x 8, tokens of 10 numbers. So there are 4 x 6 = 24 patches in each, of 3
# * 8 * 8 = 192 numbers.

# %%
images = torch.randn(2, 3, 32, 48)
conv = nn.Conv2d(3, 10, kernel_size=8, stride=8)
print(conv.weight.shape)
assert tuple(conv.weight.shape) == (10, 3, 8, 8)
assert 4 * 6 == 24
assert conv.weight[0].numel() == 3 * 8 * 8 == 192

# %% [markdown]
# **First way: cut and multiply.** A patch's numbers are laid out in the order colours, rows, columns. The kernel's
# numbers lie in the same order, so `flatten` makes the matrix.

# %%
cut = images.reshape(2, 3, 4, 8, 6, 8).permute(0, 2, 4, 1, 3, 5)  # image, down, across, colour, row, column
patches = cut.reshape(2, 24, 192)
by_hand = patches @ conv.weight.flatten(1).T + conv.bias
assert tuple(by_hand.shape) == (2, 24, 10)

# %% [markdown]
# **Second way: `unfold`.** torch can cut, too. Its patches come as columns.

# %%
unfolded = F.unfold(images, kernel_size=8, stride=8)
assert tuple(unfolded.shape) == (2, 192, 24)
assert torch.equal(unfolded.transpose(1, 2), patches)
by_unfold = F.linear(unfolded.transpose(1, 2), conv.weight.flatten(1), conv.bias)

# %% [markdown]
# **Third way: convolve.** The kernel jumps from patch to patch. What comes out is a small image of 10 channels, one
# pixel for each patch. Laid out in a line, these are the tokens.

# %%
picture = conv(images)
assert tuple(picture.shape) == (2, 10, 4, 6)
by_convolution = picture.flatten(2).transpose(1, 2)

# %% [markdown]
# All three are equal to 1e-5. They are not equal to the last digit: sums are taken in another order.

# %%
for tokens in (by_hand, by_unfold):
    print(f"largest difference {(tokens - by_convolution).abs().max():.1e}")
    assert torch.allclose(tokens, by_convolution, atol=1e-5)

# %% [markdown]
# ## The kernel of a trained model
#
# The model inside the package has patches of 8 x 8 and tokens of 256 numbers. Its kernel is the matrix of all its
# words. We copy it, and get the very tokens that the model works with.

# %%
loaded = pl.load("default")
kernel, bias = loaded.model.patch_embed.proj.weight.detach(), loaded.model.patch_embed.proj.bias.detach()
print(kernel.shape)
assert tuple(kernel.shape) == (256, 3, 8, 8)

image, _ = loaded.preprocess(photo("chelsea"))
ours = F.linear(F.unfold(image[None], 8, stride=8).transpose(1, 2), kernel.flatten(1), bias)
assert torch.allclose(ours, loaded.model.patch_embed(image[None]), atol=1e-4)

# %% [markdown]
# Each of the 256 numbers in a token asks one question of the patch: how much do you look like me? "Me" is a small
# picture of 8 x 8 pixels. One by one these pictures look like noise. But together they ask for few things. Take the
# directions in which the 256 pictures differ most (their principal components), and what matters shows: stripes that
# stand and stripes that lie, spots, and then colours. Nobody put them there. The first 8 of the 192 directions hold
# more than a quarter of all the kernel's weight.

# %%
_, strengths, directions = torch.linalg.svd(kernel.flatten(1), full_matrices=False)
share = (strengths[:8] ** 2).sum() / (strengths**2).sum()
print(f"the first 8 directions hold {share:.0%}")
assert len(strengths) == 192
assert share > 0.25

axes = panels(24, 1.0, columns=12)
for ax, direction in zip(axes, directions, strict=False):
    small = direction.reshape(3, 8, 8).permute(1, 2, 0)
    draw_photo(0.5 + 0.5 * small / small.abs().max(), ax)
show(axes[0], "02_kernel")

# %% [markdown]
# ## Which is fastest?
#
# Be honest when you time. Let each way run once before, take turns, repeat, and take the middle of the times. Here
# are 32 images of 224 x 224 with patches of 16, into tokens of 192 numbers. The answer differs between machines, so
# this lesson does not say one: read yours.

# %%
batch, stem = torch.randn(32, 3, 224, 224), nn.Conv2d(3, 192, 16, stride=16)
matrix, shift = stem.weight.flatten(1), stem.bias
ways = {
    "cut": lambda: F.linear(
        batch.reshape(32, 3, 14, 16, 14, 16).permute(0, 2, 4, 1, 3, 5).reshape(32, 196, 768), matrix, shift
    ),
    "unfold": lambda: F.linear(F.unfold(batch, 16, stride=16).transpose(1, 2), matrix, shift),
    "convolution": lambda: stem(batch).flatten(2).transpose(1, 2),
}
times = {name: [] for name in ways}
with torch.inference_mode():
    results = [way() for way in ways.values()]
    for _ in range(3):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - start)
for name, taken in times.items():
    print(f"{name:12} {sorted(taken)[1] * 1000:6.0f} ms on {torch.get_num_threads()} threads")
assert all(torch.allclose(results[0], other, atol=1e-4) for other in results)

# %% [markdown]
# `patchlight` takes the convolution on a CPU, and the matrix on a GPU, where a convolution would lay the image out
# anew before and the tokens after.
#
# ## Exercises
#
# **2.1** Write the patch embedding yourself, without a convolution: images (B, C, H, W), a kernel (D, C, side, side)
# and a bias (D) become tokens (B, P, D).


# %%
def patch_embed(image, weight, bias): ...


check.patch_embed(patch_embed)

# %% [markdown]
# **2.2** The original code was written in JAX, where colours come last. Its matrix has a row for each number of a
# patch, in the order rows, columns, colours, and a column for each number of a token. Make a kernel for `nn.Conv2d`
# of it. There are three colours.


# %%
def kernel_from_matrix(matrix, side): ...


check.kernel_from_matrix(kernel_from_matrix)
