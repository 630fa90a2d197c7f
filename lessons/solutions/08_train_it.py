"""Solutions of lesson 8."""

import math


def learning_rate(step, steps, warmup, peak):
    if step < warmup:
        return peak * step / warmup
    return peak * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2


def cross_entropy(scores, classes):
    shares = scores.softmax(1)
    return -shares[range(len(classes)), classes].log().mean()
