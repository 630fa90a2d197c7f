"""Small images that are drawn, to train on without photos: four kinds of shapes, bright on dark, in many colours."""

import torch

KINDS = ("disc", "square", "triangle", "cross")


def draw(count, side=32, seed=0):
    """Images (count, 3, side, side), about zero on average, and which kind each shows (count,)."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(count, *shape, generator=generator)

    kinds = torch.randint(len(KINDS), (count,), generator=generator)
    size = uniform(0.22, 0.34, 1, 1) * side
    centre_y, centre_x = uniform(0.38, 0.62, 1, 1) * side, uniform(0.38, 0.62, 1, 1) * side
    angle = uniform(-0.2, 0.2, 1, 1)
    ys, xs = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    dy, dx = ys - centre_y, xs - centre_x
    y, x = dy * angle.cos() - dx * angle.sin(), dy * angle.sin() + dx * angle.cos()  # turned
    inside = torch.stack(
        [
            y**2 + x**2 < size**2,
            torch.maximum(y.abs(), x.abs()) < 0.85 * size,
            (y > -0.6 * size) & (y < 1.2 * size - 2 * x.abs()),
            (torch.minimum(y.abs(), x.abs()) < 0.3 * size) & (torch.maximum(y.abs(), x.abs()) < size),
        ]
    )[kinds, torch.arange(count)]
    ground, shape = uniform(-1.5, -0.3, 3, 1, 1), uniform(0.3, 1.5, 3, 1, 1)
    images = torch.where(inside[:, None], shape, ground)
    noise = torch.randn(images.shape, generator=generator)
    return images + 0.15 * noise, kinds
