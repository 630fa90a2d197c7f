"""A small ConvNet for CIFAR-10: what the ViTs are compared with, and the teacher of recipes/distill_cifar10.py.

    python recipes/small_cnn.py data/cifar10 --device cuda

Nine layers in the manner of ResNet: a stem, three that halve the picture, and after the first and the last of these two
more whose result is added to their input. SGD with momentum, up to its highest rate and back to zero; flips, shifts and
blanked rectangles, drawn as the ViTs draw theirs, so that both can be shown the very same pictures.
"""

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchlight.errors import PatchlightError
from patchlight.images.augment import AugmentConfig, augment, mix
from patchlight.images.draws import Draws, epoch_order
from patchlight.training.data import Dataset
from patchlight.training.sources import open_dataset

EPOCHS, BATCH_SIZE = 20.0, 512
HIGHEST_RATE, WAY_UP = 0.4, 0.2  # for batches of 512; the share of the steps until it is reached
AUGMENT = AugmentConfig(crop="pad", pad=4, erase=0.5)
LABEL_SMOOTHING = 0.1


class SmallCNN(nn.Module):
    """Images (B, 3, H, W) with values from 0 to 1, at least 8 pixels high and wide -> logits_BK."""

    mean_C11: Tensor
    std_C11: Tensor

    def __init__(self, num_classes: int = 10, width: int = 64) -> None:
        super().__init__()
        self.register_buffer("mean_C11", torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1))
        self.register_buffer("std_C11", torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1))
        self.layers = nn.Sequential(
            convolution(3, width),
            convolution(width, 2 * width, halve=True),
            Added(2 * width),
            convolution(2 * width, 4 * width, halve=True),
            convolution(4 * width, 8 * width, halve=True),
            Added(8 * width),
        )
        self.head = nn.Linear(8 * width, num_classes, bias=False)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images_BCHW: Tensor) -> Tensor:
        images_BCHW = (images_BCHW - self.mean_C11) / self.std_C11
        features_BD = self.layers(images_BCHW).amax((2, 3))
        return self.head(features_BD) / 8  # large logits would learn too fast at the rate of the rest


class Added(nn.Module):
    """Two layers whose result is added to their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(convolution(width, width), convolution(width, width))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return x_BCHW + self.layers(x_BCHW)


def convolution(channels: int, width: int, *, halve: bool = False) -> nn.Sequential:
    """3 x 3, then the largest of each 2 x 2 where the picture is to be halved, normalised over the batch."""
    pool = [nn.MaxPool2d(2)] if halve else []
    convolve = nn.Conv2d(channels, width, 3, padding=1, bias=False)
    return nn.Sequential(convolve, *pool, nn.BatchNorm2d(width), nn.ReLU(inplace=True))


def train_cnn(
    training: Dataset,
    validation: Dataset,
    *,
    epochs: float = EPOCHS,
    device: str | None = None,
    seed: int = 0,
    width: int = 64,
    batch_size: int = BATCH_SIZE,
    variations: AugmentConfig = AUGMENT,
) -> tuple[SmallCNN, float]:
    """The trained network, in eval mode on the device, and the share of the validation images that it names rightly.

    Both sets lie in memory, as CIFAR-10 does. The same seed gives the same weights on the same machine.
    """
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    images_NCHW, labels_N = in_memory(training).to(chosen), training.labels_N.to(chosen)
    count, batch_size = len(training), min(batch_size, len(training))
    if count < 2:
        raise PatchlightError(f"{count} photos are too few to train on; give two or more")
    steps = max(1, round(epochs * count / batch_size))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = SmallCNN(len(training.classes), width).to(chosen).train()
    optimizer = torch.optim.SGD(
        model.parameters(), HIGHEST_RATE, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True
    )
    # One epoch after the other, cut into batches of one size.
    orders = [epoch_order(seed, epoch, count) for epoch in range(math.ceil(steps * batch_size / count))]
    stream_S = torch.cat(orders).to(chosen)
    with same_every_time():
        for step in range(steps):
            places_B = torch.arange(step * batch_size, (step + 1) * batch_size, device=chosen)
            samples_B = stream_S[places_B]
            draws = Draws(seed, places_B // count, samples_B)
            images_BCHW = augment(images_NCHW[samples_B], draws, variations)
            images_BCHW, targets_BK = mix(
                images_BCHW, labels_N[samples_B], len(training.classes), draws, variations, LABEL_SMOOTHING
            )
            with in_bfloat16(chosen):
                logits_BK = model(images_BCHW)
            loss = F.cross_entropy(logits_BK.float(), targets_BK)
            optimizer.zero_grad()
            loss.backward()
            for group in optimizer.param_groups:
                group["lr"] = rate(step, steps) * batch_size / BATCH_SIZE
            optimizer.step()
    model.eval()
    return model, accuracy(model, validation)


def rate(step: int, steps: int) -> float:
    """Straight up to the highest, and straight down to zero."""
    done = (step + 0.5) / steps
    return HIGHEST_RATE * min(done / WAY_UP, (1 - done) / (1 - WAY_UP))


@torch.inference_mode()
def accuracy(model: SmallCNN, dataset: Dataset, batch_size: int = 1000) -> float:
    device = model.head.weight.device
    right = 0
    with same_every_time():
        for levels_BCHW, labels_B in zip(
            in_memory(dataset).split(batch_size), dataset.labels_N.split(batch_size), strict=True
        ):
            with in_bfloat16(device):
                logits_BK = model(levels_BCHW.to(device).float() / 255)
            right += int((logits_BK.argmax(1).cpu() == labels_B).sum())
    return right / len(dataset)


def in_memory(dataset: Dataset) -> Tensor:
    """(N, 3, H, W) uint8."""
    if dataset.images_NCHW is None:
        raise PatchlightError("the small ConvNet learns from sets that lie in memory; give it CIFAR-10")
    return dataset.images_NCHW


def in_bfloat16(device: torch.device) -> torch.autocast:
    """Where it is fast: on a GPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


@contextlib.contextmanager
def same_every_time() -> Iterator[None]:
    """cuDNN takes kernels that add in a fixed order."""
    before, torch.backends.cudnn.deterministic = torch.backends.cudnn.deterministic, True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train a small ConvNet on CIFAR-10.")
    parser.add_argument("data", help="the folder with CIFAR-10; recipes/fetch_cifar10.py makes it")
    parser.add_argument("--device", help="cpu, cuda; the GPU where there is one")
    parser.add_argument("--epochs", type=float, default=EPOCHS)
    parser.add_argument("--seeds", type=int, default=1, help="how many runs, each with a seed of its own")
    parser.add_argument("--width", type=int, default=64, help="channels of the first layer")
    given = parser.parse_args(arguments)
    try:
        training, test = open_dataset(given.data), open_dataset(given.data, "test")
        for seed in range(given.seeds):
            began = time.perf_counter()
            _, share = train_cnn(training, test, epochs=given.epochs, device=given.device, seed=seed, width=given.width)
            sys.stdout.write(f"seed {seed}: {share:.2%} in {time.perf_counter() - began:.1f} s\n")
            sys.stdout.flush()
    except PatchlightError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
