# %% [markdown]
# # 10 A free crop
#
# *60 minutes. A project.*
#
# The class token has to say what is in a photo. To do so, it looks where the thing is. So the row of its attention is
# a map of the subject, and nobody drew it. In this lesson you turn that row into a crop, in about 40 lines. Then you
# compare with the product that this repository is.
#
# **You will see** the map, the box, and the crop for four photos, and what is missing in your 40 lines.
#
# *Be honest about "free".* DINO showed that a model which never saw a box does this. The small model in our package
# was *taught* with boxes where to look, so that it does it well. To try a model that never was:
# `pl.load("dino-vits16")`, which is fetched from the network.

# %%
import check
import torch.nn.functional as F
from course import PHOTOS, show
from PIL import Image

import patchlight as pl
from patchlight.explain.plot import draw_heat, draw_photo, new_figure
from patchlight.explain.probes import largest_region

loaded = pl.load("default")

# %% [markdown]
# ## The row
#
# Ask for the class token's attention in the last block. Its four heads are averaged. What comes back has one number
# for each of 16 x 16 patches. (A ViT-S/16 at 224 pixels would have 14 x 14.)


# %%
def class_token_map(photo):
    """How much of the class token's attention went to each patch: (h, w)."""
    image, _ = loaded.preprocess(photo)
    return pl.attention(loaded, image[None], layers=-1, queries="cls", heads="mean").heat()[0, 0, 0, 0]


heat = class_token_map(PHOTOS[0])
print(heat.shape)
assert tuple(heat.shape) == (16, 16)
assert loaded.config.num_heads == 4

# %% [markdown]
# ## From patches to pixels
#
# A map of 16 x 16 is coarse. Stretch it to the photo's size, with soft edges: bilinear. The model saw the photo
# squeezed to a square; the map is stretched back by the same.


# %%
def stretched(heat, width, height):
    return F.interpolate(heat[None, None], (height, width), mode="bilinear")[0, 0]


# %% [markdown]
# ## From a map to a mask
#
# Which pixels belong to the subject? Keep the strongest patches, as few as hold a given share of the attention. We
# keep those that hold 90 %. Then keep the largest connected region, so that a spark in a corner does not stretch the
# box.


# %%
def mask_of(heat, share=0.9):
    strongest = heat.flatten().sort(descending=True).values
    count = int((strongest.cumsum(0) < share * heat.sum()).sum())
    return largest_region(heat >= strongest[count])


mask = mask_of(heat)
print(f"{int(mask.sum())} of 256 patches")
assert 0 < mask.sum() < 256

# %% [markdown]
# ## From a mask to a box
#
# The first and last row, the first and last column. Boxes are (x0, y0, x1, y1), and x1 and y1 lie just beyond the
# last pixel.


# %%
def box_of(mask):
    rows, columns = mask.any(1).nonzero().flatten(), mask.any(0).nonzero().flatten()
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def crop_box(photo):
    heat = class_token_map(photo)
    width, height = pl.decode(photo).image.size
    on_photo = stretched(heat, width, height)
    soft = on_photo >= heat[mask_of(heat)].min()
    inside = F.interpolate(mask_of(heat)[None, None].float(), (height, width))[0, 0] > 0
    return box_of(soft & inside)


# %% [markdown]
# ## Beside the product
#
# `pl.localize` starts from the same attention. How far do both agree? The usual measure is *intersection over union*
# (IoU): the area that both boxes cover, divided by the area that either covers. 1 is the same box, 0 is none in
# common.


# %%
def iou(a, b):
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    both = max(0, width) * max(0, height)
    area = [(x1 - x0) * (y1 - y0) for x0, y0, x1, y1 in (a, b)]
    return both / (sum(area) - both)


def outlined(ax, box, colour):
    x0, y0, x1, y1 = box
    ax.plot([x0, x1, x1, x0, x0], [y0, y0, y1, y1, y0], color=colour, linewidth=2)


found = pl.localize(list(PHOTOS))
figure = new_figure(height=4.2)
agreement = []
for place, (photo, theirs) in enumerate(zip(PHOTOS, found, strict=True)):
    image = pl.decode(photo).image
    ours = crop_box(photo)
    their_box = theirs.subjects[0].box.to_ints()
    agreement.append(iou(ours, their_box))
    upper, lower = figure.add_subplot(2, 4, place + 1), figure.add_subplot(2, 4, place + 5)
    draw_heat(image, stretched(class_token_map(photo), *image.size), upper)
    outlined(upper, ours, "orange")
    outlined(upper, their_box, "white")
    upper.set_title(f"IoU {agreement[-1]:.2f}, {theirs.decision}", fontsize=8)
    draw_photo(image.crop(ours), lower)
show(figure, "10_crops")
print([round(each, 2) for each in agreement])
assert all(each > 0.7 for each in agreement[:3])
assert agreement[3] < 0.2
assert found[3].decision == "unsure"

# %% [markdown]
# Orange is yours, white is the product's. Below is your crop. On the cat, the astronaut and the cup both agree well:
# more than 0.7. On the rocket they do not: less than 0.2. There the map is faint and spread over the ground, and your
# 40 lines take all of it. The product finds the rocket, and says `unsure`.
#
# What the product adds:
#
# - It says when it does *not* know. Your 40 lines crop a photo of fog with the same confidence.
# - It places edges *between* patches, and asks the patches where their object ends. Yours can only cut where the map
#   fades.
# - It finds several subjects, small ones by a second look, and how sure it is, fitted on photos with known boxes.
# - It cuts from the full-size original, upright, with its metadata, and survives being interrupted among 10,000
#   photos.
#
# Try it on a folder of yours: `patchlight crop photos/ --out cropped`.
#
# A photo with nothing in it shows the first point. It is grey everywhere. Yours gives a box. The product says "none".

# %%
grey = Image.new("RGB", (320, 240), "grey")
image, _ = loaded.preprocess(grey)
heat = pl.attention(loaded, image[None], heads="mean").heat()[0, 0, 0, 0]
print(f"yours: {int(mask_of(heat).sum())} patches; the product: {pl.localize(grey).decision}")
assert mask_of(heat).any()
assert pl.localize(grey).decision == "none"

# %% [markdown]
# ## Exercises
#
# **10.1** Write the IoU of two boxes (x0, y0, x1, y1) yourself. Boxes that do not meet have 0.


# %%
def overlap(a, b): ...


check.overlap(overlap)

# %% [markdown]
# **10.2** From a bool mask (H, W) to the box around it, (x0, y0, x1, y1), in which x1 and y1 lie just beyond.


# %%
def mask_to_box(mask): ...


check.mask_to_box(mask_to_box)
