"""Solutions of lesson 5."""

import torch
import torch.nn.functional as F


def sincos(rows, columns, width):
    quarter = width // 4
    speeds = 10000.0 ** (-torch.arange(quarter) / quarter)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    down, across = row.reshape(-1, 1) * speeds, column.reshape(-1, 1) * speeds
    return torch.cat([down.sin(), down.cos(), across.sin(), across.cos()], 1)


def resize_positions(table, side):
    picture = table[1:].T.reshape(1, -1, 14, 14)
    stretched = F.interpolate(picture, (side, side), mode="bicubic", antialias=True)
    return torch.cat([table[:1], stretched[0].flatten(1).T])
