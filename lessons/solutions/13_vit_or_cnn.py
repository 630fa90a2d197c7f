"""Solutions of lesson 13."""


def field_of(layers, kernel):
    return 1 + layers * (kernel - 1)


price_of_knowing_nothing = (32 * 32 * 64) ** 2 / (3 * 3 * 64 * 64)  # about 116,508
