"""The model inside the package: a small ViT that finds the subject of a photo, and knows animals and things.

    python recipes/gather_default_photos.py data/default --shared ../shared/data
    patchlight train recipes/default.py --out runs/default
    patchlight publish runs/default --as default

192 wide, 12 deep, patches of 8 pixels at 128 x 128, a class token and 4 registers: 5.5 million weights. Its class token
is taught to name the subject and, in the last block, to look at it: photos with boxes or masks say where that is, and
random parts of the photos put it anywhere.
"""

from patchlight.config import PreprocessConfig, ViTConfig
from patchlight.train.config import DataConfig, OptimConfig, TrainConfig
from patchlight.train.subject import SubjectConfig


def config() -> TrainConfig:
    return TrainConfig(
        model=ViTConfig(
            image_size=128,
            patch_size=8,
            width=192,
            depth=12,
            num_heads=3,
            num_registers=4,
            mlp="gelu_tanh",
            num_classes=560,
        ),
        data=DataConfig(train="data/default/photos.csv", validation="data/default/held_out.csv", workers=16),
        preprocess=PreprocessConfig(image_size=128, resize="squash", crop_pct=1.0),
        subject=SubjectConfig(),
        optim=OptimConfig(name="muon", lr=2e-3, muon_lr=0.02, weight_decay=0.05, warmup=0.03, clip_grad=None),
        epochs=75.0,
        batch_size=512,
        label_smoothing=0.1,
        ema=0.9995,
        precision="bfloat16",
        compile=True,
        evaluate_every=15.0,
        checkpoint_every=5_000,
        log_every=50,
    )
