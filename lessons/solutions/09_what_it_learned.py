"""Solutions of lesson 9."""

import torch


def roll_out(attentions):
    through = torch.eye(len(attentions[0]))
    for attention in attentions:
        through = (attention + torch.eye(len(attention))) / 2 @ through
    return through


score_of_a_useless_map = 0
