"""Solutions of lesson 14."""

import torch

swin_entries = 3 * 64 * 49 * 49  # 8 x 8 windows of 49 patches, 3 heads


def hide(patches, order, keep):
    mask = torch.ones(len(patches), dtype=torch.bool)
    mask[order[:keep]] = False
    return patches[order[:keep]], mask
