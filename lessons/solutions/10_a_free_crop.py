"""Solutions of lesson 10."""


def overlap(a, b):
    width = max(0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0, min(a[3], b[3]) - max(a[1], b[1]))
    both = width * height
    return both / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both)


def mask_to_box(mask):
    rows, columns = mask.any(1).nonzero().flatten().tolist(), mask.any(0).nonzero().flatten().tolist()
    return columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
