"""Solutions of lesson 12."""

padded_patches = 17 * 33  # 132 / 8 is 16.5 and 260 / 8 is 32.5, both rounded up


def undo_one(images, mean, std):
    return images * std[:, None, None] + mean[:, None, None]
