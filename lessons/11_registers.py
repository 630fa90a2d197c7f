# %% [markdown]
# # 11 Registers
#
# *25 minutes.*
#
# Large ViTs need a place for notes. They have none, so they write over patches that show nothing of interest: a piece
# of sky, a wall. Such a patch's token grows to many times the length of its neighbours'. Attention maps are then full
# of bright spots where nothing is. The cure is simple: give the model a few tokens of its own to write on. They are
# called *registers* (Darcet et al. 2023).
#
# **You will see** that the model in our package has registers and no such spots, what spots look like once they are
# planted in it, and how a register takes them up, with no training.
#
# *Honestly:* spots come with size and long training. The paper finds them in ViT-L and larger, not in small models.
# Ours is far too small to grow any, with registers or without. So this lesson plants them. To see real ones, load
# `pl.load("hf:facebook/dinov2-large")` and run the same cells.

# %%
import copy

import check
import torch
from course import PHOTOS, photo, show

import patchlight as pl
from patchlight.explain.artifacts import artifact_patches
from patchlight.explain.plot import draw_heat, draw_norms, draw_photo, new_figure
from patchlight.explain.probes import attention_shares, token_norms
from patchlight.explain.registers import add_registers, find_register_neurons

loaded = pl.load("default")
images = torch.stack([loaded.preprocess(each)[0] for each in (*PHOTOS, photo("dragonfly"))])

# %% [markdown]
# ## How long are the tokens?
#
# Five photos of 256 patches. After the last block the longest patch is less than twice as long as the middle one.
# None is an *artifact*, which we call a patch more than twice as long as the median, and eight deviations above it.

# %%
prefix = loaded.config.num_prefix
norms = token_norms(loaded, images)
last = norms[-1, :, prefix:]
ratio = (last.amax(1) / last.median(1).values).max().item()
print(f"longest against middle: {ratio:.2f}")
assert tuple(last.shape) == (5, 256)
assert ratio < 2
assert int(artifact_patches(norms, prefix).sum()) == 0

# %% [markdown]
# ## What do its four registers do?
#
# They are long from the second block on: more than twice as long as the patches. And they are read: in the first
# block the class token spends more than a quarter of its attention on them. In the middle of the model it is a few
# per cent.

# %%
assert loaded.config.num_registers == 4
lengths = norms[:, :, 1:prefix].mean((1, 2)) / norms[:, :, prefix:].mean((1, 2))
shares = attention_shares(loaded, images)["registers"]
for block, (length, share) in enumerate(zip(lengths, shares, strict=True)):
    print(f"block {block}: registers {length:.1f} times as long as patches, and get {share:.0%}")
assert lengths[1] > 2
assert shares[0] > 0.25
assert all(share < 0.05 for share in shares[2:])

# %% [markdown]
# ## Plant a spot
#
# Jiang et al. (2025) found who writes the notes: a handful of neurons in the MLPs. We make one of ours shout. Neuron
# 457 of block 5 is silent on nearly all patches. Among our five photos it is loud on one thing, the astronaut's head.
# Its output is made longer, until it drowns out the rest. (Real ones choose dull patches. Ours chose a head before we
# touched it.)

# %%
shouting = copy.deepcopy(loaded.model)
with torch.no_grad():
    column = shouting.blocks[5].mlp.down.weight[:, 457]
    column.mul_(60 / column.norm())
before = token_norms(shouting, images)
spots = artifact_patches(before, prefix)
print(f"{int(spots.sum())} spots on {int(spots.any(1).sum())} of 5 photos")
assert 5 <= spots.sum() <= 40
assert spots.any(1).tolist() == [False, True, False, False, False]  # the astronaut is the second

# %% [markdown]
# ## Find it, and give it a register
#
# `find_register_neurons` looks for the neurons that write most into spots. It finds the one that we planted.
# `add_registers` adds a token, and moves what such neurons write from the patches to it. Nothing is trained. The
# spots are gone.

# %%
assert find_register_neurons(shouting, images, 1) == [(5, 457)]
cured = add_registers(shouting, images, neurons=[(5, 457)])
after = token_norms(cured, images)
left = int(artifact_patches(after, cured.config.num_prefix).sum())
print(f"{left} spots left; {cured.config.num_registers} registers")
assert left == 0
assert cured.config.num_registers == 5

# %%
worst = int(spots.sum(1).argmax())
picture = ((images[worst] - images[worst].min()) / (images[worst].max() - images[worst].min())).permute(1, 2, 0)
figure = new_figure(height=4.4)
axes = figure.subplots(2, 4)
draw_photo(picture, axes[0, 0], title="photo")
axes[1, 0].set_axis_off()
columns = [
    ("as it was", loaded.model, norms),
    ("one neuron shouts", shouting, before),
    ("a register more", cured, after),
]
for place, (name, model, lengths) in enumerate(columns):
    first = model.config.num_prefix
    outliers = artifact_patches(lengths, first)[worst].reshape(16, 16)
    ax = draw_norms(lengths[-1, worst, first:].reshape(16, 16), outliers, axes[0, place + 1], title=name)
    ax.set_aspect("equal")
    heat = pl.attention(model, images[worst][None], heads="mean").heat()[0, 0, 0, 0]
    draw_heat(picture, heat, axes[1, place + 1])
axes[0, 1].set_ylabel("length", fontsize=8)
axes[1, 1].set_ylabel("attention", fontsize=8)
show(figure, "11_spots")

# %% [markdown]
# In the middle column the class token looks past the face: the spots' neighbours have lost what they had to say. On
# the right the map is nearly what it was.
#
# ## Exercises
#
# **11.1** Find outliers yourself. You get the lengths of one photo's patches (P,). Say which are more than twice the
# median *and* more than eight deviations above it. The deviation is 1.4826 times the median distance from the median,
# which a few spots cannot move.


# %%
def spots_among(lengths): ...


check.spots_among(spots_among)

# %% [markdown]
# **11.2** A ViT-L/14 at 224 pixels has a class token, and gets four registers. By how many per cent does the number
# of entries in its attention matrices grow?

# %%
check.price_of_registers(...)
