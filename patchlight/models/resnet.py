"""A small ResNet to stand in front of a ViT (the hybrids of Dosovitskiy et al. 2020): pixels to a smaller picture.

Convolutions have standardised weights and no bias, norms are over groups of channels, so that no image depends on its
batch. Borders are padded as TensorFlow does: what an even side needs beyond a symmetric border goes right and below.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS = (256, 512, 1024, 2048)


class StandardConv(nn.Conv2d):
    """A convolution whose kernels have mean zero and deviation one; stride 2 halves a side, which is even."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride=stride, bias=False)
        self.border = max(0, kernel - stride)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        weight = self.weight.float()
        variance, mean = torch.var_mean(weight, (1, 2, 3), keepdim=True, correction=0)
        weight = ((weight - mean) * (variance + 1e-8).rsqrt()).to(x_BCHW.dtype)
        before, after = self.border // 2, self.border - self.border // 2
        return F.conv2d(F.pad(x_BCHW, (before, after, before, after)), weight, stride=self.stride)


class Bottleneck(nn.Module):
    """Three convolutions around a shortcut: narrow, look around, widen."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        inside = outputs // 4
        self.conv1, self.norm1 = StandardConv(inputs, inside, 1), nn.GroupNorm(32, inside)
        self.conv2, self.norm2 = StandardConv(inside, inside, 3, stride), nn.GroupNorm(32, inside)
        self.conv3, self.norm3 = StandardConv(inside, outputs, 1), nn.GroupNorm(32, outputs)
        changes = inputs != outputs or stride != 1
        self.shortcut_conv = StandardConv(inputs, outputs, 1, stride) if changes else None
        self.shortcut_norm = nn.GroupNorm(32, outputs) if changes else None

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BCHW = self.norm1(self.conv1(x_BCHW)).relu()
        y_BCHW = self.norm2(self.conv2(y_BCHW)).relu()
        y_BCHW = self.norm3(self.conv3(y_BCHW))
        if self.shortcut_conv is not None and self.shortcut_norm is not None:
            x_BCHW = self.shortcut_norm(self.shortcut_conv(x_BCHW))
        return (x_BCHW + y_BCHW).relu()


class ResNet(nn.Module):
    """image_BCHW -> picture (B, channels, H / stride, W / stride); `stride` has to divide the image."""

    def __init__(self, in_channels: int, depths: tuple[int, ...]) -> None:
        super().__init__()
        self.conv, self.norm = StandardConv(in_channels, 64, 7, 2), nn.GroupNorm(32, 64)
        self.channels, self.stride = 64, 4
        self.stages = nn.ModuleList()
        for index, depth in enumerate(depths):
            blocks: list[nn.Module] = []
            for place in range(depth):
                blocks.append(Bottleneck(self.channels, CHANNELS[index], 2 if index and not place else 1))
                self.channels = CHANNELS[index]
            self.stages.append(nn.Sequential(*blocks))
            self.stride *= 2 if index else 1

    def forward(self, image_BCHW: Tensor) -> Tensor:
        x_BCHW = self.norm(self.conv(image_BCHW)).relu()
        x_BCHW = F.max_pool2d(F.pad(x_BCHW, (0, 1, 0, 1)), 3, stride=2)  # zeros lose against what relu leaves
        for stage in self.stages:
            x_BCHW = stage(x_BCHW)
        return x_BCHW
