"""A small ViT from photos alone, without labels: DINO with two large and six small views a photo.

    patchlight train recipes/dino_photos.py --set data.train=PHOTOS --out runs/dino

PHOTOS is a folder of photos or of tar shards. Where they have labels (a folder a class), they are not learnt from: the
features are judged by them, by the nearest neighbours. A run that learns nothing stops and says what to change. A set
of few photos, or a short run, wants fewer prototypes and a lower momentum:

    --set dino.prototypes=1024 --set dino.momentum=0.97

384 wide, 12 deep, patches of 8 pixels of 128, four registers; Muon for the matrices. Not yet measured at this size. On
a CPU, made smaller (one core, one seed, 8,522 photos of Imagenette at 64 pixels; docs/training.md has the settings), 14
epochs raised the k-NN accuracy on 947 held-out photos from 31 % to 46 %.
"""

from patchlight.config import PreprocessConfig, ViTConfig
from patchlight.training.config import DataConfig, DinoConfig, OptimConfig, TrainConfig


def config() -> TrainConfig:
    return TrainConfig(
        model=ViTConfig(
            image_size=128,
            patch_size=8,
            width=384,
            depth=12,
            num_heads=6,
            num_registers=4,
            drop_path=0.1,
            num_classes=0,
        ),
        data=DataConfig(train="data/photos", validation_share=0.05, workers=8),
        preprocess=PreprocessConfig(image_size=128),
        dino=DinoConfig(prototypes=2048, head_hidden=1024),
        optim=OptimConfig(name="muon", lr=2e-3, muon_lr=0.02, weight_decay=0.05, warmup=0.1, final_lr=0.01),
        epochs=100.0,
        batch_size=256,
        precision="bfloat16",
        compile=True,
        evaluate_every=10.0,
        checkpoint_every=1_000,
    )
