"""Solutions of lesson 3."""


def parameters(width, depth, patch, side, classes):
    tokens = 1 + (side // patch) ** 2
    embedding = 3 * patch**2 * width + width
    positions_and_class_token = tokens * width + width
    norm = 2 * width
    attention = 4 * (width**2 + width)
    mlp = 2 * 4 * width**2 + 4 * width + width
    head = width * classes + classes
    return embedding + positions_and_class_token + depth * (2 * norm + attention + mlp) + norm + head


where_attention_overtakes = 6 * 768  # 2 N^2 D = 12 N D^2, so N = 6 D = 4608 tokens
