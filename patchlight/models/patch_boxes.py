"""Where the object that a patch belongs to ends: a small layer on each patch, beside what the class token says.

A heat map says which patches show a subject. Two animals side by side are one warm region of it, and one animal behind
a trunk is two; asked where their own object ends, the patches of each animal agree, and those of two do not.

Shapes: B batch, P patches, h w patch grid, D width.
"""

import torch
from torch import Tensor, nn

from patchlight.config import Size, ViTConfig

FAR = 0.25
"""How far off an edge is said to be by fresh weights, in shares of the image's side."""


class PatchBoxes(nn.Module):
    """patches_BPD, as the last block takes them in -> for each the box of its object, and how good that box is."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width, config.norm_eps)
        self.hidden = nn.Linear(config.width, config.width)
        self.activation = nn.GELU()
        self.out = nn.Linear(config.width, 5)

    def forward(self, patches_BPD: Tensor, grid: Size) -> tuple[Tensor, Tensor]:
        """boxes_Bhw4, x0 y0 x1 y1 in shares of the image's sides, and trust_Bhw, the logit of the overlap with the
        true box (intersection over union) that is expected of each. Both float32."""
        said_Bhw5 = self.out(self.activation(self.hidden(self.norm(patches_BPD)))).float().unflatten(1, grid)
        middle_hw2 = middles(grid, said_Bhw5.device)
        # A subject that covers a part of its patch may end before the middle, but not before the patch does.
        half_2 = middle_hw2[0, 0]
        before_Bhw2, after_Bhw2 = (FAR * said_Bhw5[..., :4].clamp(-6.0, 1.5).exp()).chunk(2, 3)
        boxes_Bhw4 = torch.cat((middle_hw2 + half_2 - before_Bhw2, middle_hw2 - half_2 + after_Bhw2), 3)
        return boxes_Bhw4, said_Bhw5[..., 4]


def middles(grid: Size, device: torch.device) -> Tensor:
    """x and y of the middle of each patch, in shares of the image's sides: (h, w, 2)."""
    h, w = grid
    y_hw, x_hw = torch.meshgrid(
        (torch.arange(h, device=device) + 0.5) / h, (torch.arange(w, device=device) + 0.5) / w, indexing="ij"
    )
    return torch.stack((x_hw, y_hw), 2)
