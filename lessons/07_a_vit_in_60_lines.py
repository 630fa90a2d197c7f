# %% [markdown]
# # 7 A ViT in 60 lines
#
# *45 minutes.*
#
# You have all the parts. In this lesson you put them together. Read `lessons/plain_vit.py` beside it: it is the whole
# model, in the paper's own symbols, and it computes the same as `pl.ViT`.
#
# **You will see** what the class token starts as, what each block adds to the tokens, and what fresh weights do to
# that.

# %%
import inspect

import check
import numpy as np
import plain_vit
import torch
from course import PHOTOS, show
from plain_vit import PlainViT
from weights import copy_weights

import patchlight as pl
from patchlight.explain.plot import label_axes, new_figure

torch.manual_seed(0)

# %% [markdown]
# ## The same as the library's
#
# The file has 67 lines, comments and all. Copy the weights of a ViT of the library into it, and both give the same
# scores, to 1e-4. A test holds this for B/16, too.

# %%
lines = inspect.getsource(plain_vit).splitlines()
print(len(lines), "lines")
assert len(lines) == 67

vit = pl.ViT(pl.variant("Ti/16")).eval()
plain = copy_weights(vit, PlainViT(image=224, P=16, D=192, L=12, k=3)).eval()
images = torch.randn(2, 3, 224, 224)
with torch.inference_mode():
    difference = (vit(images) - plain(images)).abs().max()
print(f"largest difference {difference:.0e}")
assert difference < 1e-4

# %% [markdown]
# ## The class token
#
# The patches say what is in each place. Who says what is in the photo? A token that belongs to no place is put in
# front. It starts at zero, the same for every photo. It has nothing to say, so it can only ask. Block by block it
# collects what the answer needs, and the head reads it alone.

# %%
fresh = PlainViT(image=32, P=8, D=48, L=3, k=3, classes=10)
assert (fresh.x_class == 0).all()
small = torch.randn(2, 3, 32, 32)
with torch.inference_mode():
    z = torch.cat([fresh.x_class.expand(2, -1, -1), torch.zeros(2, 16, 48)], 1) + fresh.E_pos
    assert torch.equal(z[0, 0], z[1, 0])  # before the first block: alike in both photos
    scores = fresh(small)
assert not torch.equal(scores[0], scores[1])  # after the last: not

# %% [markdown]
# ## Norm first, add after
#
# A block is two lines:
#
#     z = MSA(LN1(z)) + z
#     z = MLP(LN2(z)) + z
#
# Both read *normed* tokens and *add* what they found. Nothing is ever overwritten. The tokens themselves run through
# the whole model like a stream, which is why one speaks of the *residual stream*. Set the last matrix of each branch
# to zero, and the blocks do nothing at all: what goes in comes out.

# %%
with torch.no_grad():
    for block in fresh.blocks:
        for last in (block.MSA.U_msa, block.MLP[2]):
            last.weight.zero_()
            last.bias.zero_()
tokens = torch.randn(2, 17, 48)
assert torch.equal(fresh.blocks(tokens), tokens)

# %% [markdown]
# ## What the MLP is for
#
# Attention only *mixes*: each answer is a mean of values, and a mean is between what there was. The MLP makes
# something *new* of each token, by itself, through a bend (GELU). It also holds most of the weights: 8 D^2 in each
# block, against attention's 4 D^2.

# %%
block = PlainViT(image=32, P=8, D=48, L=1, k=3).blocks[0]
sizes = {
    name: sum(p.numel() for n, p in part.named_parameters() if n.endswith("weight"))
    for name, part in (("attention", block.MSA), ("MLP", block.MLP))
}
print(sizes)
assert sizes == {"attention": 4 * 48**2, "MLP": 8 * 48**2}

# %% [markdown]
# ## How it starts
#
# Fresh weights decide how loud each block speaks at first. Three habits are in use, and `init=` chooses: `"vit"` (all
# matrices small, cut off), `"timm"` (nearly the same) and `"jax"` (the paper's own code: larger, by the size of each
# matrix). We measure how long the patches' tokens are after each of 12 blocks. With "vit" they keep their length,
# within a tenth. With "jax" the blocks speak up: the tokens grow to more than twice their length.


# %%
def lengths(model, images):
    """Mean length of the patches' tokens: what goes in, and after each block."""
    seen = []
    with torch.inference_mode():
        x, _ = model.embed(images)
        seen.append(x)
        model.encode(images, visit=lambda block, heads, tokens: seen.append(tokens))
    return np.array([x[:, model.config.num_prefix :].norm(dim=2).mean().item() for x in seen])


grown = {}
for init in ("vit", "timm", "jax"):
    torch.manual_seed(0)
    grown[init] = lengths(pl.ViT(pl.variant("Ti/16", init=init)).eval(), images)
    print(f"{init:5} {grown[init].round(1)}")
assert abs(grown["vit"][-1] / grown["vit"][0] - 1) < 0.1
assert grown["jax"][-1] / grown["jax"][0] > 2

# %% [markdown]
# **And after training?** Here is the model in the package, on four photos. Its tokens go in short, and come out about
# three times as long. Each block is read through a norm, so a block that comes late has to speak louder to be heard.
# That is the price of norming first.

# %%
loaded = pl.load("default")
photos = torch.stack([loaded.preprocess(each)[0] for each in PHOTOS])
grown["trained"] = lengths(loaded.model, photos)
print(grown["trained"].round(1))
assert len(PHOTOS) == 4
assert round(grown["trained"][-1] / grown["trained"][0]) == 3

figure = new_figure(height=3.2)
ax = figure.add_subplot()
for name, values in grown.items():
    ax.plot(
        values / values[0], marker="o", markersize=3, label={"trained": "the trained model"}.get(name, f'init="{name}"')
    )
ax.legend(frameon=False)
ax.set_ylim(0)
label_axes(ax, "after so many blocks", "length of the tokens\n(what goes in = 1)")
show(figure, "07_residual_stream")

# %% [markdown]
# ## LayerScale
#
# Deep ViTs are hard to start, since many loud blocks speak at once. LayerScale multiplies what each branch adds by a
# number for each of its D channels, which is learned and starts small. At 0.00001 a fresh model of 12 blocks passes
# its tokens on: they change by less than one part in 1,000.

# %%
scaled = pl.ViT(pl.variant("Ti/16", layer_scale=0.00001, init="jax")).eval()
with torch.inference_mode():
    x, _ = scaled.embed(images)
    (y,) = scaled.intermediates(images, -1)
moved = ((y - x).norm() / x.norm()).item()
print(f"{moved:.0e}")
assert moved < 0.001

# %% [markdown]
# ## Exercises
#
# **7.1** Write a block. You get the tokens and the four parts as functions.


# %%
def block(z, attention, mlp, norm1, norm2): ...


check.block(block)

# %% [markdown]
# **7.2** Put the class token in front and add the positions: patches (B, P, D), class token (D,), positions (1 + P,
# D).


# %%
def with_class_token(patches, token, positions): ...


check.with_class_token(with_class_token)
