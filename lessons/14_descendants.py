# %% [markdown]
# # 14 Descendants, and production
#
# *45 minutes.*
#
# The ViT of 2020 has many children. Each changes one thing. If you know the parts, a descendant is one sentence. And
# in the end a model has to leave Python.
#
# **You will see** each of them in a few lines, how their costs grow with the image, and a model exported with a proof
# that it gives the same.

# %%
import contextlib
import importlib.util
import tempfile

import check
import torch
from course import PHOTOS, ROOT, SMALL, show

import patchlight as pl
from patchlight.explain.plot import draw_growth, draw_heat, new_figure
from patchlight.explain.probes import patch_similarity
from patchlight.models.video import inflate

torch.manual_seed(0)
images = torch.randn(2, 3, 64, 64)
small = {"image_size": 64, "num_classes": 10}

# %% [markdown]
# ## DeiT: a second class token
#
# It learns from a teacher's answers, while the first learns from labels. Each has a head. The prediction is the mean
# of both.

# %%
deit = pl.ViT(pl.variant("Ti/16", distill_token=True, **small)).eval()
by_labels, by_teacher = deit.both_logits(images)
assert deit.config.num_prefix == 2
assert torch.allclose(deit(images), (by_labels + by_teacher) / 2, atol=1e-6)

# %% [markdown]
# ## Hybrid: convolutions in front
#
# A few small convolutions in place of the patch embedding. Tokens then know what lies across their edge. On CIFAR-10
# this took our recipe from 95.9 to 97.3 % (docs/training.md).

# %%
hybrid = pl.ViT(pl.variant("Ti/16", stem="convolutions", **small)).eval()
record = (ROOT / "docs" / "training.md").read_text()
assert "mean 95.86" in record
assert "97.29 %" in record
assert tuple(hybrid.tokens(images).shape) == (2, 17, 192)  # 4 x 4 patches and the class token

# %% [markdown]
# ## Swin: attention in windows
#
# Each patch attends to its own window of 7 x 7 only; every other block shifts the windows. So four times the pixels
# cost four times as much. For the ViT they cost more: from 448 to 896 pixels S/16 takes 7.0 times as much, Swin-T 4.0
# times.
#
# ## ConvNeXt: no attention at all
#
# The same plan as Swin, with 7 x 7 convolutions where the attention was. It shows how much of a ViT's success is the
# plan, and how much attention. It grows by 4.0, too.

# %%
sides = (224, 448, 672, 896)
names = ("S/16", "S/8", "swin-T", "convnext-T")
growth = {name: {side: pl.costs(pl.variant(name, image_size=side)).macs / 1e9 for side in sides} for name in names}
times = {name: round(cost[896] / cost[448], 1) for name, cost in growth.items()}
print(times)
assert times["S/16"] == 7.0
assert times["swin-T"] == 4.0
assert times["convnext-T"] == 4.0
figure = new_figure(height=3.2)
show(draw_growth(growth, figure.add_subplot()), "14_growth")

# %% [markdown]
# Both have stages. Each halves the grid, so what comes out is a pyramid, as a CNN's is. `intermediates` gives it.

# %%
swin = pl.Swin(pl.SwinConfig(width=24, depths=(2, 2, 2), num_heads=(2, 4, 8), window_size=4, **small)).eval()
pyramid = swin.intermediates(images, swin.config.stage_ends, dense=True)
print([tuple(each.shape) for each in pyramid])
assert [each.shape[-1] for each in pyramid] == [16, 8, 4]
entries = pl.costs(swin.config).attention_entries_by_block
assert entries[0] == 2 * (16 * 16) * 16  # 2 heads, 256 patches, each with the 16 of its window

# %% [markdown]
# ## MAE: learn by drawing what is hidden
#
# Hide three quarters of the patches, encode the rest, and let a small decoder draw what is missing. No labels. It
# works because a ViT takes *any* list of patches: hidden ones are simply not in it. Of 196 patches 49 are encoded.

# %%
hidden = torch.rand(196).argsort() >= 49
assert int(hidden.sum()) == 147 == 196 * 3 // 4
vit = pl.ViT(pl.variant("Ti/16", num_classes=0)).eval()
photo = torch.randn(1, 3, 224, 224)
tokens, _ = vit.embed(photo)
visible = torch.cat([tokens[:, :1], tokens[:, 1:][:, ~hidden]], 1)
assert visible.shape[1] == 1 + 49

# %% [markdown]
# ## DINO: learn by agreeing with yourself
#
# A student sees small pieces of a photo, a teacher sees large ones, and the student has to say what the teacher says.
# The teacher is the student's own running mean. Nobody gives labels. Out of this come class tokens that find objects
# (lesson 10). `recipes/dino_photos.py` and `recipes/mae_photos.py` train both.
#
# ## Dense prediction
#
# Each patch's token says something of its place. Ask which patches are like a chosen one, by cosine: this is the seed
# of segmentation, with no training. Below, the astronaut, asked from the middle of the suit.

# %%
loaded = pl.load("default")
image, _ = loaded.preprocess(PHOTOS[1])
with torch.inference_mode():
    (after,) = loaded.model.intermediates(image[None], -2)
alike = patch_similarity(after, (16, 16), (11, 6))
assert tuple(alike.shape) == (1, 16, 16)
assert abs(alike[0, 11, 6] - 1) < 1e-5
picture = ((image - image.min()) / (image.max() - image.min())).permute(1, 2, 0)
figure = new_figure(width=3.6, height=3.6)
ax = draw_heat(picture, alike[0], figure.add_subplot(), cmap="viridis", label="cosine similarity")
show(ax, "14_similar")

# %% [markdown]
# **DETR-like queries.** A few learned vectors ask all tokens, each for one object. It is the attention of lesson 6
# with queries that belong to no patch. `pooling="attention"` is the smallest form: one query, one answer.

# %%
asks = pl.ViT(pl.variant("Ti/16", pooling="attention", class_token=False, **small)).eval()
row = pl.attention(asks, images, queries="pool").weights
assert tuple(row.shape) == (1, 2, 3, 1, 16)  # one layer, 2 images, 3 heads, one query, 16 patches

# %% [markdown]
# ## Video: tubelets
#
# A clip is cut into boxes of 16 x 16 pixels and 2 frames. The kernel of an image model is stretched over time and
# divided, so that a clip that stands still gives what the image gave. 16 frames of 64 x 64 make 8 x 16 = 128 patches.

# %%
video = inflate(pl.ViT(pl.variant("Ti/16", **small)), num_frames=16, tubelet=2).eval()
clip = torch.randn(1, 16, 3, 64, 64)
print(tuple(video.tokens(clip).shape))
assert video.tokens(clip).shape[1] == 128 + 1
assert 8 * 16 == 128

# %% [markdown]
# ## Production
#
# A model leaves Python as a graph: ONNX for onnxruntime, or OpenVINO, or torch's own. `pl.export` writes it and
# *proves* that it gives the same, on images of several sizes. What is proven is in `proof.json`. (This cell needs the
# extra `export`; without it it says so.)

# %%
if SMALL:
    print("not exported at small size, since the exporter takes its time")
elif all(importlib.util.find_spec(name) for name in ("onnx", "onnxruntime", "onnxscript")):
    tiny = pl.ViT(pl.ViTConfig(width=32, depth=2, num_heads=2, patch_size=16, **small)).eval()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
        pl.save(tiny, f"{folder}/model", labels=[str(number) for number in range(10)])
        pl.export(f"{folder}/model", f"{folder}/shipped")
        engine = pl.load_engine(f"{folder}/shipped")
        answer = torch.from_numpy(engine(images.numpy())["logits"])
    assert torch.allclose(answer, tiny(images), atol=1e-4)
    print("the exported model gives the same")
else:
    print("not exported: pip install -e '.[export]'")

# %% [markdown]
# `patchlight bench default photos/` times every engine on your machine. More: docs/deploy.md.
#
# ## Exercises
#
# **14.1** How many attention entries has one block of Swin with 56 x 56 patches, windows of 7 x 7 and 3 heads?

# %%
check.swin_entries(...)

# %% [markdown]
# **14.2** Choose what MAE encodes. You get patches (P, X), an order (P,) and how many to keep. Give the first so many
# patches in this order, and a bool mask (P,) that is True where a patch is hidden.


# %%
def hide(patches, order, keep): ...


check.hide(hide)
