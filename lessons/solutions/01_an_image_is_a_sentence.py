"""Solutions of lesson 1."""


def patchify(image, side):
    height, width, colours = image.shape
    cut = image.reshape(height // side, side, width // side, side, colours)
    return cut.transpose(0, 2, 1, 3, 4).reshape(-1, side * side * colours)


def unpatchify(patches, height, width, side):
    cut = patches.reshape(height // side, width // side, side, side, -1)
    return cut.transpose(0, 2, 1, 3, 4).reshape(height, width, -1)


words_in_a_photo = (384 // 16) * (512 // 16)  # 24 down, 32 across: 768
