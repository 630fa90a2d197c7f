"""A small ViT that learns from photos alone, without a label, by drawing what is hidden from it (MAE).

    patchlight train recipes/mae_photos.py --out runs/mae --set data.train=PHOTOS

192 wide, 12 deep, patches of 8 pixels at 128. Three quarters of the 256 patches are hidden; the encoder sees the other
64 alone. What it leaves is features, not classes: judge them with `patchlight evaluate runs/mae LABELLED --knn` (or
--linear, --attentive), or teach it classes with `patchlight finetune LABELLED --model runs/mae --out runs/mine`.
Not yet measured at this size; smaller, on a CPU, see docs/training.md: 60 epochs raised k-NN from 31 % to 43 %.
metrics.jsonl has `explained`: the share of the hidden pixels' variance that the drawing explains, 0 for plain grey.
"""

from patchlight.config import PreprocessConfig, ViTConfig
from patchlight.images.augment import AugmentConfig
from patchlight.training.config import DataConfig, MaeConfig, OptimConfig, TrainConfig


def config() -> TrainConfig:
    return TrainConfig(
        model=ViTConfig(
            image_size=128,
            patch_size=8,
            width=192,
            depth=12,
            num_heads=3,
            mlp="gelu_tanh",
            position="sincos2d",
            # The class token has nothing to learn from but what it passes on; the patches' mean says more.
            pooling="mean",
            num_classes=0,
        ),
        data=DataConfig(train="data/photos", workers=8),
        preprocess=PreprocessConfig(image_size=128),
        augment=AugmentConfig(crop="resized", area=(0.2, 1.0), flip=True),
        optim=OptimConfig(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.05, warmup=0.05),
        mae=MaeConfig(mask_share=0.75, decoder_width=128, decoder_depth=4, decoder_heads=4),
        epochs=400.0,
        batch_size=1024,
        precision="bfloat16",
        compile=True,
        evaluate_every=50.0,
        checkpoint_every=1_000,
    )
