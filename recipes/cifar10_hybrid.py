"""CIFAR-10 from scratch with a convolutional tokenizer in place of patches (CCT-7/3x1, Hassani et al. 2021): one
convolution of 3x3 and a max pool make 16x16 tokens of 256 numbers, which know what lies across their edges.

    python recipes/fetch_cifar10.py data/cifar10
    patchlight train recipes/cifar10_hybrid.py --out runs/hybrid

Encoder and tokenizer are the paper's (7 blocks, 256 wide, an MLP of 512; 3.8 million parameters); the loop, Muon,
QK-norm, the mean of the patches and the variations of the photos are those of recipes/cifar10.py. A smaller sequence,
the paper's 3x2, takes a quarter of the tokens, and affords a wider encoder:

    patchlight train recipes/cifar10_hybrid.py --out runs/hybrid-4 --set model.patch_size=4 --set model.width=384 \
        --set model.num_heads=6 --set model.depth=8 --set model.mlp_dim=1536

Published, 300 epochs of AdamW with AutoAugment-like variations: 96.5 % (3x1), 95.0 % (3x2), and 93.6 % for the same
encoder on patches of 4 pixels.
"""

from patchlight.config import PreprocessConfig, ViTConfig
from patchlight.images.augment import AugmentConfig
from patchlight.train.config import DataConfig, OptimConfig, TrainConfig


def config() -> TrainConfig:
    return TrainConfig(
        model=ViTConfig(
            image_size=32,
            stem="convolutions",
            patch_size=2,
            patch_bias=False,
            width=256,
            depth=7,
            num_heads=4,
            mlp_dim=512,
            qk_norm=True,
            class_token=False,
            pooling="mean",
            mlp="gelu_tanh",
            num_classes=10,
        ),
        data=DataConfig(train="data/cifar10", validation="data/cifar10"),
        preprocess=PreprocessConfig(
            image_size=32, resize="squash", crop_pct=1.0, mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616)
        ),
        augment=AugmentConfig(crop="pad", pad=4, policy="trivial", mix=0.5, mixup=0.8, cutmix=1.0),
        optim=OptimConfig(name="muon", lr=2e-3, muon_lr=0.02, weight_decay=0.05, warmup=0.05, clip_grad=None),
        epochs=150.0,
        batch_size=512,
        label_smoothing=0.1,
        ema=0.999,
        precision="bfloat16",
        compile=True,
        evaluate_every=50.0,
        checkpoint_every=5_000,
    )
