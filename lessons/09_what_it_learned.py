# %% [markdown]
# # 9 What it learned
#
# *30 minutes.*
#
# A trained ViT can be asked questions. How far does each head look? What reaches the answer? And can you trust the
# map that you get? The last question is the one that is often left out.
#
# **You will see** how far heads look in each block, beside the line of a head that looks everywhere alike; three maps
# of one photo; and a test of which of them the answer hangs on.

# %%
import check
import torch
from course import PHOTOS, SMALL, show

import patchlight as pl
from patchlight.explain.faithfulness import faithfulness, random_baseline
from patchlight.explain.plot import draw_attention_distance, draw_maps
from patchlight.explain.probes import attention_distance
from patchlight.explain.rollout import attribution, rollout

torch.manual_seed(0)
loaded = pl.load("default")
images = torch.stack([loaded.preprocess(each)[0] for each in PHOTOS])

# %% [markdown]
# ## How far does a head look?
#
# For each head, take the distance in pixels from a patch to what it attends to, weighted by how much. A head that
# looks everywhere alike has 66.6 pixels here: the mean distance between any two patches of this image of 128 pixels.

# %%
places = torch.stack(torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij"), -1).reshape(-1, 2) * 8.0
even = torch.cdist(places, places).mean().item()
print(f"even attention: {even:.1f} pixels")
assert round(even, 1) == 66.6

distance = attention_distance(loaded, images)
means = distance.mean(1)
print([round(each) for each in means.tolist()])
show(draw_attention_distance(distance, even=even), "09_distance")

# %% [markdown]
# The ViT paper's well-known picture shows heads that look near in the first blocks, and ever farther later on. **This
# model shows something else.** Its first block looks far: 59 pixels in the mean. Then it draws in, to 41 pixels in
# block 3. Then it looks farther again, to 61 in the last block. Single heads are near all the same: the nearest looks
# 21 pixels far.
#
# Why? We do not know, and the picture alone cannot tell. The paper's models were larger and saw hundreds of millions
# of photos. Ours is small, has registers, and was taught with boxes what its last block should look at. Do not take
# one model's picture for a law.

# %%
assert round(means[0].item()) == 59
assert int(means.argmin()) == 3
assert round(means[3].item()) == 41
assert round(means[-1].item()) == 61
assert 20 < distance.min() < 22

# %% [markdown]
# ## Three maps
#
# - *Attention* of the class token in the last block: where that one layer took its values from.
# - *Rollout*: attention through all blocks, multiplied, with half of each token passed on as it is.
# - *Attribution*: the same, but weighted by how much each piece of attention moves the score of the class.

# %%
one = images[:1]
said = loaded.model(one).softmax(1)[0].argmax().item()
maps = {
    "attention": pl.attention(loaded, one, heads="mean").heat()[0, :, 0, 0],
    "rollout": rollout(loaded, one),
    "attribution": attribution(loaded, one),
}
picture = ((one[0] - one[0].min()) / (one[0].max() - one[0].min())).permute(1, 2, 0)
heats = torch.cat([heat / heat.sum() for heat in maps.values()])
axes = draw_maps(picture, heats, list(maps), label="share of the map", percent=True, even=1 / 256)
show(axes[0], "09_maps")
print(f"{loaded.labels[said]}; the largest share of rollout {heats[1].max():.1%}, of attention {heats[0].max():.1%}")
assert heats[1].max() < 0.01 < 0.05 < heats[0].max()
assert loaded.labels[said] == "catdog/cat"

# %% [markdown]
# They do not agree. Rollout is nearly even: no patch has more than 1 % of it. Attention puts more than 5 % on a
# single patch, at the eye. So which one says why the model answered "cat"?
#
# ## Put them to the test
#
# A map claims: these patches matter. So take them away, the most important first, and watch the answer. It should
# fall at once. Then start from a blurred photo and put them back in the same order. It should come at once. The
# *score* is the area under the second curve minus the area under the first. A map of noise shows what chance gives.

# %%
steps = 6 if SMALL else 12
scores = {name: faithfulness(loaded, one, heat, steps=steps).score.item() for name, heat in maps.items()}
noise = random_baseline(loaded, one, maps=2 if SMALL else 6, steps=steps)
for name, score in scores.items():
    print(f"{name:12} {score:+.2f}")
print(f"{'noise':12} {noise.mean():+.2f}, from {noise.min():+.2f} to {noise.max():+.2f}")
assert scores["attribution"] > noise.max()

# %% [markdown]
# Read this with care. It is one photo and one model. A good score says: the answer hangs on these patches, for this
# baseline. It does not say: this is the reason. Attention is a hint, and no explanation.
#
# `python benchmarks/explain.py default` does this on many photos, with margins.
#
# ## Exercises
#
# **9.1** Write rollout: attentions is a list of matrices (N, N), one a block, the first block first. Each is averaged
# with the identity, and they are multiplied so that row 0 says what reaches the class token in the end.


# %%
def roll_out(attentions): ...


check.roll_out(roll_out)

# %% [markdown]
# **9.2** Insertion and deletion may give the very same curve. What is the score of such a map?

# %%
check.score_of_a_useless_map(...)
