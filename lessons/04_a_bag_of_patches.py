# %% [markdown]
# # 4 A bag of patches
#
# *25 minutes.*
#
# A sentence is more than its words. "Dog bites man" is not "man bites dog". A Transformer does not know that by
# itself. To it, the words come in a bag. In this lesson you shuffle an image, and find out who notices.
#
# **You will see** a photo in pieces that a model without positions cannot tell from the whole one, the same pieces
# confuse a model with positions, and a convolutional network that seems not to notice, for a reason that has nothing
# to do with images.

# %%
import check
import torch
from course import PHOTOS, photo, show

import patchlight as pl
from patchlight.explain.plot import draw_patches, new_figure
from patchlight.explain.shuffling import without_positions

torch.manual_seed(0)

# %% [markdown]
# ## Attention sees a bag
#
# Shuffle the tokens that go into attention, and the same tokens come out, shuffled in the same way. Nothing else
# changes. This is called *permutation equivariance*. It holds to 1e-6: only the order of sums differs.

# %%
tokens, order = torch.randn(1, 10, 64), torch.randperm(10)
q, k, v = (torch.nn.Linear(64, 64) for _ in range(3))


def attend(x):
    scores = q(x) @ k(x).mT / 64**0.5
    return scores.softmax(-1) @ v(x)


with torch.no_grad():
    difference = (attend(tokens[:, order]) - attend(tokens)[:, order]).abs().max()
print(f"{difference:.0e}")
assert difference < 1e-6

# %% [markdown]
# The other parts of a block treat each token by itself: the norms, the MLP, the addition. So a whole block is
# equivariant, and so are nine of them.

# %%
loaded = pl.load("default")
blind = without_positions(loaded)  # the same weights, but no patch knows where it lies
assert len(blind.blocks) == 9

# %% [markdown]
# ## A photo in pieces
#
# `pl.shuffle_patches` cuts the cat into its 16 x 16 = 256 patches and lays them out in another order. The model
# without positions gives the same answer to both. Its class token looks into the same bag.

# %%
image, _ = loaded.preprocess(photo("chelsea"))
shuffled = pl.shuffle_patches(image[None], 8, seed=0)
assert 16 * 16 == 256
with torch.inference_mode():
    before, after = blind(image[None]), blind(shuffled)
print(f"largest difference between 627 scores: {(before - after).abs().max():.0e}")
assert before.shape[1] == 627
assert (before - after).abs().max() < 1e-4

# %% [markdown]
# ## Positions break the bag
#
# Now the model as it was trained. Each patch is told where it lies. The whole cat is a cat, with a probability above
# 0.9. Of the cat in pieces it gives less than 0.3 to anything, and its first guess is no cat.

# %%
with torch.inference_mode():
    whole, pieces = (loaded.model(x).softmax(1)[0] for x in (image[None], shuffled))
for name, shares in (("whole", whole), ("in pieces", pieces)):
    print(f"{name}: {loaded.labels[int(shares.argmax())]} {shares.max():.2f}")
assert loaded.labels[int(whole.argmax())] == "catdog/cat"
assert whole.max() > 0.9
assert pieces.max() < 0.3
assert "cat" not in loaded.labels[int(pieces.argmax())]

# %%
colours = (image.permute(1, 2, 0) - image.min()) / (image.max() - image.min())
mixed = (shuffled[0].permute(1, 2, 0) - image.min()) / (image.max() - image.min())
with torch.inference_mode():
    blind_share = blind(image[None]).softmax(1)[0, int(whole.argmax())]
figure = new_figure(height=3.8)
left, right = figure.subplots(1, 2)
draw_patches(colours, (16, 16), left, title=f"cat: {whole.max():.2f} with positions, {blind_share:.2f} without")
cat = int(whole.argmax())
draw_patches(mixed, (16, 16), right, title=f"cat: {pieces[cat]:.2f} with positions, {blind_share:.2f} without")
show(figure, "04_shuffled")

# %% [markdown]
# One thing to be careful about. The model without positions does not know cats: it gives the cat less than 0.1. It
# was trained *with* positions, and nobody asked it to do without. A model that is trained without them from the start
# does far better than chance, since a bag of patches still holds fur and eyes.
#
# **Do it by hand**: start `patchlight serve` and open [the cat, shuffled, without
# positions](http://127.0.0.1:8000/#learn?positions=off&shuffle=1). Put the order back, and then the positions.

# %%
assert blind_share < 0.1

# %% [markdown]
# ## And a convolutional network?
#
# A convolution looks at neighbours. Shuffle them, and it should notice. So we take a ConvNeXt with fresh weights,
# shuffle photos in pieces of 32 pixels (its largest step), and compare the features. It changes by less than 1 in
# 1,000. It seems to see a bag!

# %%
photos = torch.stack([pl.load("default").preprocess(each)[0] for each in PHOTOS])
apart = pl.shuffle_patches(photos, 32, seed=1)
small = {"depths": (2, 2, 2, 2), "widths": (24, 48, 96, 192), "num_classes": 0, "image_size": 128}


def change(model):
    """How far the features move when the photos are shuffled, as a share of how far two photos lie apart."""
    with torch.inference_mode():
        features, moved = model(photos), model(apart)
    return ((moved - features).norm() / (features - features.roll(1, 0)).norm()).item()


torch.manual_seed(0)
fresh = change(pl.ConvNeXt(pl.ConvNeXtConfig(**small)).eval())
print(f"fresh ConvNeXt: {fresh:.0e}")
assert fresh < 0.001

# %% [markdown]
# Do not believe it. A fresh ConvNeXt has *LayerScale*: what each block adds is multiplied by 0.000001. So its blocks
# do next to nothing, and its features are hardly more than the mean of patches that nobody compared. It is not the
# convolution that is blind. It is asleep. Switch LayerScale off, and it notices: the features move more than 1,000
# times as far as before, which is a tenth of the way from one photo to another. (A tenth and no more: nothing has
# been learned yet.)

# %%
torch.manual_seed(0)
awake = change(pl.ConvNeXt(pl.ConvNeXtConfig(**small, layer_scale=None)).eval())
torch.manual_seed(0)
vit = change(pl.ViT(pl.variant("Ti/16", image_size=128, num_classes=0, position="none")).eval())
print(f"without LayerScale: {awake:.2f}, and a fresh ViT without positions: {vit:.0e}")
assert pl.ConvNeXtConfig(**small).layer_scale == 0.000001
assert awake > 1000 * fresh
assert 0.08 < awake < 0.15
assert vit < 0.0001

# %% [markdown]
# What to take from this: measure a *trained* model, or know what is in a fresh one.
#
# ## Exercises
#
# **4.1** Write `pl.shuffle_patches` yourself: the patch that was number `order[i]` comes to place `i`.


# %%
def shuffle(image, side, order): ...


check.shuffle(shuffle)

# %% [markdown]
# **4.2** Write a test for equivariance: shuffle before, shuffle after, and compare. `function` takes and gives tokens
# (B, N, D).


# %%
def is_equivariant(function, tokens, order): ...


check.is_equivariant(is_equivariant)
