"""Solutions of lesson 11."""


def spots_among(lengths):
    median = lengths.median()
    deviation = 1.4826 * (lengths - median).abs().median()
    return (lengths > 2 * median) & (lengths > median + 8 * deviation)


price_of_registers = 100 * ((16 * 16 + 5) ** 2 / (16 * 16 + 1) ** 2 - 1)  # 3.1 %
