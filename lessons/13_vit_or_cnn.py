# %% [markdown]
# # 13 ViT or CNN?
#
# *40 minutes.*
#
# A convolution knows two things before it has seen a photo: neighbours belong together, and a thing is the same
# wherever it lies. A ViT knows neither. It has to learn both. Is that good or bad? It depends on how much there is to
# learn from.
#
# **You will see** both learn from few images and from many, how far each looks before and after training, and a rule
# for when to take which.

# %%
import json

import check
import torch
import torch.nn.functional as F
from course import PHOTOS, ROOT, SMALL, show
from plain_vit import PlainViT
from shapes import draw
from torch import nn

import patchlight as pl
from patchlight.explain.plot import draw_matrix, label_axes, new_figure
from patchlight.explain.receptive_field import reach, receptive_field

# %% [markdown]
# ## Few images
#
# The shapes of lesson 8. A ViT of 163,844 weights, and a CNN of 24,068: three convolutions of 3 x 3, each followed by
# pooling. Both learn in the same way from 64 images, and are tested on 500 others.


# %%
def convolutions(inside, outside):
    return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(), nn.MaxPool2d(2))


def small_cnn():
    parts = [convolutions(3, 16), convolutions(16, 32), convolutions(32, 64)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 4))


def small_vit():
    return PlainViT(image=32, P=8, D=64, L=3, k=4, classes=4)


def learn(model, images, kinds, steps=120 if SMALL else 250):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.003, total_steps=steps, pct_start=0.2)
    for _ in range(steps):
        chosen = torch.randint(len(images), (64,))
        loss = F.cross_entropy(model(images[chosen]), kinds[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


test_images, test_kinds = draw(500, seed=2)


def right(model):
    with torch.inference_mode():
        return (model(test_images).argmax(1) == test_kinds).float().mean().item()


few = {}
for name, make in (("ViT", small_vit), ("CNN", small_cnn)):
    torch.manual_seed(0)
    model = learn(make(), *draw(64, seed=1))
    few[name] = right(model)
    print(f"{name}: {sum(each.numel() for each in model.parameters()):,} weights, {few[name]:.0%} right")
assert sum(each.numel() for each in small_vit().parameters()) == 163_844
assert sum(each.numel() for each in small_cnn().parameters()) == 24_068

# %% [markdown]
# From 64 images the CNN gets more than 90 % right. The ViT gets less than 70 %, although it has almost seven times
# the weights. What the CNN knows from the start is worth more than weights.

# %%
assert few["CNN"] > 0.9
assert few["ViT"] < 0.7
assert 6.5 < 163_844 / 24_068 < 7

# %% [markdown]
# ## Many images
#
# The same on real photos, with sizes that no laptop likes: CIFAR-10, a ViT of 2.7 million weights and a ConvNet of
# 6.6, each for 2,500 steps. It was measured once with `recipes/data_efficiency.py`, one seed; here are the figures
# that it wrote. With 2,500 photos the ViT trails by 21 points, with all 50,000 by 5. The lines come together. They do
# not cross at this budget.

# %%
rows = [json.loads(line) for line in (ROOT / "recipes/measured/data_efficiency/results.jsonl").read_text().splitlines()]
measured = {(row["model"], row["photos"]): 100 * row["accuracy"] for row in rows}
numbers = sorted({photos for _, photos in measured})
for photos in numbers:
    print(f"{photos:6,} photos: ViT {measured['vit', photos]:.1f} %, CNN {measured['cnn', photos]:.1f} %")
assert round(measured["cnn", 2500] - measured["vit", 2500]) == 21
assert round(measured["cnn", 50000] - measured["vit", 50000]) == 5

figure = new_figure(height=3)
ax = figure.add_subplot()
for name, label, colour in (("cnn", "CNN", "#21918c"), ("vit", "ViT", "#440154")):
    ax.plot(numbers, [measured[name, photos] for photos in numbers], marker="o", color=colour, label=label)
ax.set_xscale("log")
ax.set_xticks(numbers, [f"{photos:,}" for photos in numbers])
ax.minorticks_off()
ax.legend(frameon=False)
label_axes(ax, "photos of CIFAR-10", "test accuracy (%)")
show(figure, "13_data")

# %% [markdown]
# ## How far do they look?
#
# The *effective receptive field* asks: which pixels move what the model says of the middle patch? It takes the
# gradient, and counts how many pixels hold half of it. We give that in patches, since the last patches of these
# models differ in size: 8 x 8 pixels in the ViTs, 16 x 16 in the Swin, 32 x 32 in the ConvNeXt.

# %%
photos = torch.stack([pl.load("default").preprocess(each)[0] for each in PHOTOS])
torch.manual_seed(0)
shape = {"image_size": 128, "num_classes": 0}
convnext = {"depths": (2, 2, 4, 2), "widths": (24, 48, 96, 192), "layer_scale": None}
models = {
    "fresh ViT": pl.ViT(pl.variant("Ti/8", **shape)),
    "fresh Swin": pl.Swin(pl.SwinConfig(width=48, depths=(2, 2, 2), num_heads=(2, 4, 8), window_size=4, **shape)),
    "fresh ConvNeXt": pl.ConvNeXt(pl.ConvNeXtConfig(**convnext, **shape)),
    "trained ViT": pl.load("default").model,
}
fields = {name: receptive_field(model, photos) for name, model in models.items()}
sides = {"fresh ViT": 8, "fresh Swin": 16, "fresh ConvNeXt": 32, "trained ViT": 8}
shares = {name: reach(field) * 128**2 / sides[name] ** 2 for name, field in fields.items()}
for name, share in shares.items():
    print(f"{name:15} half of what counts lies in the area of {share:.1f} of its patches")

figure = new_figure(height=2.6)
for place, (name, field) in enumerate(fields.items()):
    level = field.clamp(min=field.max() / 1000).log10()
    draw_matrix(level, figure.add_subplot(1, 4, place + 1), cmap="magma", title=f"{name}: {shares[name]:.1f}")
show(figure, "13_fields")

# %% [markdown]
# A fresh ViT *can* look everywhere: in the picture there is some light all over. But half of what counts lies within
# its own patch, since the residual stream passes that on. So it does in a fresh Swin. The fresh ConvNeXt already
# needs more than two of its patches: its kernels of 7 x 7 reach over. After training the ViT is the one that looks
# far. Half of what counts is now spread over more than 30 patches. It *learned* to look. (The pictures are
# logarithmic: from the largest down to a thousandth of it.)

# %%
assert shares["fresh ViT"] < 1
assert shares["fresh Swin"] < 1
assert 2 < shares["fresh ConvNeXt"] < 3
assert shares["trained ViT"] > 30
assert all((fields["fresh ViT"] > 0).flatten().tolist())

# %% [markdown]
# ## When to take which
#
# | you have | take |
# |---|---|
# | few photos, and no checkpoint | a CNN, or a ViT with convolutions in front |
# | few photos, and a good checkpoint | a pretrained ViT, fine-tuned: it has learned already what the CNN knows |
# | very many photos | a ViT: what it was not told it does not have to unlearn |
# | large images | Swin or ConvNeXt, whose cost grows with the pixels (lesson 14) |
# | a need to see where it looks | a ViT: attention is there to be read |
#
# ## Exercises
#
# **13.1** How many pixels to a side does one output see after `layers` convolutions of `kernel` x `kernel`, one after
# the other, with no pooling? Write the function.


# %%
def field_of(layers, kernel): ...


check.field_of(field_of)

# %% [markdown]
# **13.2** A convolution of 3 x 3 from 64 to 64 channels: how many weights (no bias)? And a matrix that maps 32 x 32
# pixels of 64 channels to as many, each output with weights of its own? Give the second divided by the first.

# %%
check.price_of_knowing_nothing(...)
