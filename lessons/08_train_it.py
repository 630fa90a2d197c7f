# %% [markdown]
# # 8 Train it
#
# *30 minutes for CIFAR-10 on a laptop, half a minute for the drawn shapes here.*
#
# So far the weights were given. Here you start from random ones and watch them learn. The loop is ten lines. What
# surrounds it (warm-up, weight decay, varied photos) is what makes it work.
#
# **You will see** a ViT learn to tell four shapes apart, the two curves that you should always draw, and what the
# same takes on real photos.

# %%
import runpy

import check
import torch
import torch.nn.functional as F
from course import ROOT, SMALL, show
from plain_vit import PlainViT
from shapes import KINDS, draw

import patchlight as pl
from patchlight.explain.plot import draw_photo, label_axes, new_figure, panels

torch.manual_seed(0)

# %% [markdown]
# ## Something to learn
#
# No photos are needed. We draw them: a disc, a square, a triangle or a cross, somewhere near the middle, a little
# turned, bright on dark, with noise. 3,000 to train on, and 500 others to test with. Who guesses is right once in
# four.

# %%
images, kinds = draw(3000, seed=1)
test_images, test_kinds = draw(500, seed=2)
print(images.shape, KINDS)
assert tuple(images.shape) == (3000, 3, 32, 32)
assert len(KINDS) == 4
axes = panels(16, 1.0, columns=8)
some = torch.cat([(kinds == kind).nonzero()[:4, 0] for kind in range(4)])
for ax, image, kind in zip(axes, images[some], kinds[some], strict=True):
    draw_photo((image.permute(1, 2, 0) / 4 + 0.5).clamp(0, 1), ax, title=KINDS[kind])
show(axes[0], "08_shapes")

# %% [markdown]
# ## A small model
#
# It is `plain_vit.py` again: patches of 8, so 16 of them and a class token; 64 wide, 3 blocks, 4 heads. It has
# 163,844 weights.

# %%
model = PlainViT(image=32, P=8, D=64, L=3, k=4, classes=4)
assert model.E_pos.shape[1] == 16 + 1
assert sum(weight.numel() for weight in model.parameters()) == 163_844

# %% [markdown]
# ## The loop
#
# Take 64 images. Ask the model. Measure how wrong it is (cross-entropy). Ask each weight which way would have been
# better (`backward`). Take a step that way.
#
# The step's length is not constant. It *warms up* over the first fifth, because fresh gradients point anywhere, and
# then falls to nothing, so that the last steps settle.

# %%
steps = 320 if SMALL else 400
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, weight_decay=0.05)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.003, total_steps=steps, pct_start=0.2)
losses, tested = [], {}
for step in range(steps):
    chosen = torch.randint(len(images), (64,))
    loss = F.cross_entropy(model(images[chosen]), kinds[chosen])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
    if step % 40 == 39:
        with torch.inference_mode():
            tested[step + 1] = (model(test_images).argmax(1) == test_kinds).float().mean().item()
        print(f"step {step + 1:3}: loss {losses[-1]:.2f}, right on new images {tested[step + 1]:.0%}")

# %% [markdown]
# It begins at a loss of about 1.4, which is the logarithm of 4: it guesses. It ends with more than 90 % right on
# images that it never saw.

# %%
guess = torch.tensor(4.0).log().item()
assert round(guess, 1) == 1.4
assert abs(losses[0] - guess) < 0.3
assert tested[steps] > 0.9

figure = new_figure(height=3)
left, right = figure.subplots(1, 2)
left.plot(losses, color="#21918c", linewidth=0.8)
left.axhline(guess, color="#888888", linewidth=0.8, linestyle="--")
label_axes(left, "step", "loss on training images")
right.plot(list(tested), [100 * share for share in tested.values()], marker="o", color="#440154")
right.axhline(25, color="#888888", linewidth=0.8, linestyle="--")
right.set_ylim(0, 100)
label_axes(right, "step", "right on new images (%)")
show(figure, "08_curves")

# %% [markdown]
# Draw both curves, always. A loss that falls while the second curve stands still means that the model learns its
# training images by heart.
#
# ## Real photos
#
# CIFAR-10 has 50,000 photos of 32 x 32 pixels in ten classes. It is not in the package, so this lesson does not train
# on it. The recipe for a laptop is `recipes/cifar10_cpu.py`. Patches of 4 pixels make 64 patches and a class token,
# each 128 wide. So a batch becomes (B, 65, 128).

# %%
recipe = runpy.run_path(str(ROOT / "recipes" / "cifar10_cpu.py"))
config = recipe["config"]()
vit = pl.ViT(config.model)
print(tuple(vit.tokens(torch.randn(2, 3, 32, 32)).shape))
assert tuple(vit.tokens(torch.randn(2, 3, 32, 32)).shape) == (2, 65, 128)

# %% [markdown]
#     python recipes/fetch_cifar10.py data/cifar10
#     patchlight train recipes/cifar10_cpu.py --out runs/cpu
#
# Its record is 75.04 % after 8 epochs, in 26 minutes on two cores. One epoch, which takes about three minutes, gave
# 50 %. The recipe `cifar10` for a GPU reaches 95.9 %. What it has more: a larger model, 130 epochs, and mixed images.

# %%
said = recipe["__doc__"]
print(said)
assert config.epochs == 8
assert "75.04 % test accuracy after 8 epochs (50," in said
assert "26 minutes" in said
assert "190 s an epoch" in said
assert "mean 95.86" in (ROOT / "docs" / "training.md").read_text()

# %% [markdown]
# Here is that record, epoch by epoch. The first epoch brings most of it, and the last ones still bring something:
# eight are not enough.

# %%
accuracies = [50, 54, 61, 65, 69, 72, 74, 75.04]
assert ", ".join(map(str, accuracies[:6])) + " and 74 % after those before" in said
figure = new_figure(height=3)
ax = figure.subplots()
ax.plot(range(1, 9), accuracies, marker="o", color="#440154")
ax.axhline(10, color="#888888", linewidth=0.8, linestyle="--")
ax.set_ylim(0, 100)
label_axes(ax, "epoch of 50,000 photos", "right on the test photos (%)")
show(figure, "08_cifar10")

# %% [markdown]
# ## Exercises
#
# **8.1** Write the learning rate: it climbs in a straight line from 0 to `peak` over the first `warmup` steps, then
# falls as half a cosine wave, to 0 at step `steps`.


# %%
def learning_rate(step, steps, warmup, peak): ...


check.learning_rate(learning_rate)

# %% [markdown]
# **8.2** Cross-entropy by hand: `scores` (B, K) and the right classes (B,), the mean over the batch.


# %%
def cross_entropy(scores, classes): ...


check.cross_entropy(cross_entropy)
