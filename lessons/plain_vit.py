"""The whole Vision Transformer in the paper's own symbols (Dosovitskiy et al. 2020, arXiv:2010.11929).

This is the file to read, to print and to change. `pl.ViT` computes the same on fused kernels, for images of any size
and with every setting of its descendants; a test holds both equal. In the comments N is the number of patches, D the
width, k the number of heads, L the depth.
"""

import math

import torch
from torch import nn


class MSA(nn.Module):
    """Multi-head self-attention: every token asks, every token answers."""

    def __init__(self, D, k):
        super().__init__()
        self.k = k
        self.U_qkv = nn.Linear(D, 3 * D)  # (A.1) queries, keys and values of all heads in one matrix
        self.U_msa = nn.Linear(D, D)  # (A.4) the heads' answers, mixed

    def forward(self, z):
        B, tokens, D = z.shape
        q, k, v = self.U_qkv(z).reshape(B, tokens, 3, self.k, D // self.k).permute(2, 0, 3, 1, 4)
        A = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(D // self.k), dim=-1)  # (A.2) each row sums to one
        return self.U_msa((A @ v).transpose(1, 2).reshape(B, tokens, D))  # (A.3) a weighted mean of the values


class Block(nn.Module):
    """Attention, then an MLP. Each reads the normed tokens and adds what it found to the tokens themselves."""

    def __init__(self, D, k):
        super().__init__()
        self.LN1, self.MSA = nn.LayerNorm(D, eps=1e-6), MSA(D, k)
        self.LN2, self.MLP = (
            nn.LayerNorm(D, eps=1e-6),
            nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D)),
        )

    def forward(self, z):
        z = self.MSA(self.LN1(z)) + z  # (2)
        return self.MLP(self.LN2(z)) + z  # (3)


class PlainViT(nn.Module):
    """Images (B, 3, H, W) of one size to class scores (B, classes)."""

    def __init__(self, image=224, P=16, D=768, L=12, k=12, classes=1000):
        super().__init__()
        N = (image // P) ** 2
        self.P = P
        self.E = nn.Linear(3 * P * P, D)
        self.x_class = nn.Parameter(torch.zeros(1, 1, D))  # starts at zero: the same for every image
        self.E_pos = nn.Parameter(torch.randn(1, N + 1, D) * 0.02)
        self.blocks = nn.Sequential(*[Block(D, k) for _ in range(L)])
        self.LN = nn.LayerNorm(D, eps=1e-6)
        self.head = nn.Linear(D, classes)

    def forward(self, x):
        B, C, H, W = x.shape
        x_p = x.reshape(B, C, H // self.P, self.P, W // self.P, self.P).permute(0, 2, 4, 1, 3, 5)
        x_p = x_p.reshape(B, -1, C * self.P * self.P)  # N patches in reading order, each a line of numbers
        z = torch.cat([self.x_class.expand(B, -1, -1), self.E(x_p)], dim=1) + self.E_pos  # (1)
        z = self.blocks(z)
        y = self.LN(z[:, 0])  # (4) what the class token has become
        return self.head(y)
