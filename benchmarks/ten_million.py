"""What many photos of 12 megapixels cost, on paper: hours of a machine, bytes moved, and when one machine is too few.

    python benchmarks/ten_million.py                       # 10 million photos, the table of docs/scale.md
    python benchmarks/ten_million.py --photos 300000 --cores 64
    python benchmarks/ten_million.py --machine-hour 0.70 --requests 0.40 --gigabyte 0.02   # dollars, at your prices

Nothing runs here: the rates were measured, each on the machine that is named with it, and are multiplied. A rate that
was measured on two cores is taken for sixteen as if cores did not slow each other down; what was measured with sixteen
at work (reading: 77 ms of a core and not 55) stands beside it, so that there are two ends of a range. RATES says on
which figure of which page each rests, and tests/unit/test_ten_million.py looks for it there.
"""

import argparse
from dataclasses import dataclass


@dataclass(frozen=True)
class Rate:
    value: float
    page: str
    words: str
    """As the page has them."""


RATES = {
    # Milliseconds of a core for a photo.
    "read": Rate(55, "docs/crop.md", "reading 55"),  # two cores, photos of 12 to 24 megapixels
    "read, 16 at once": Rate(77, "docs/crop.md", "77 ms of a core for each photo"),  # the H200's host
    "look": Rate(30.7, "docs/deploy.md", "`crop` without engines | 30.7"),  # the default model, an EPYC of two cores
    "look, bfloat16": Rate(14.3, "docs/deploy.md", "OpenVINO, bfloat16 | 14.3"),
    "least crop": Rate(110, "docs/crop.md", "a crop of a third of the photo\n110 to 270"),
    "largest crop": Rate(270, "docs/crop.md", "a crop of a third of the photo\n110 to 270"),
    # Photos a second, of the whole runner: S/16, boxes, one H200 and 16 cores.
    "H200": Rate(177, "docs/crop.md", "| S/16 | 207 | 3,505 | 177 |"),
    "H200's model": Rate(3505, "docs/crop.md", "| S/16 | 207 | 3,505 | 177 |"),
    # Megabytes of a photo, and kilobytes of the program's memory for each.
    "photo": Rate(2.8, "docs/crop.md", "12 megapixels (2.8 MB each)"),
    "memory": Rate(1.5, "docs/crop.md", "1.5 KB a photo"),
}

NVJPEG = 980
"""12-megapixel photos a second, decoded on one H200 by nvJPEG and nothing else; no runner of ours uses it."""


@dataclass(frozen=True)
class Row:
    """A kind of machine; photos a second from the slower to the faster end."""

    machine: str
    limit: str
    slow: float
    fast: float
    fetched: int
    """How often a photo is fetched."""


def rows(cores: int) -> list[Row]:
    ms = {name: rate.value for name, rate in RATES.items()}
    slow, fast = ms["read, 16 at once"], ms["read"]

    def photos(*each: float) -> float:
        return cores * 1000 / sum(each)

    look, fewer_bits = ms["look"], ms["look, bfloat16"]
    crops = ms["largest crop"], ms["least crop"]
    return [
        Row(f"{cores} cores, boxes", "reading", photos(slow, look), photos(fast, look), 1),
        Row(f"{cores} cores, boxes, bfloat16", "reading", photos(slow, fewer_bits), photos(fast, fewer_bits), 1),
        Row(
            f"{cores} cores, full-size crops",
            "cutting",
            *(photos(r, look, c) for r, c in zip((slow, fast), crops, strict=True)),
            2,
        ),
        Row("16 cores and an H200, boxes", "reading", ms["H200"], ms["H200"], 1),
        Row("the same, were nvJPEG to read", "nvJPEG", NVJPEG, min(NVJPEG, ms["H200's model"]), 1),
    ]


def hours(photos: int, rate: float) -> float:
    return photos / rate / 3600


def terabytes(photos: int, row: Row) -> float:
    return photos * row.fetched * RATES["photo"].value / 1e6


def gigabits(row: Row, rate: float) -> float:
    """A second, that have to come from the bucket."""
    return rate * row.fetched * RATES["photo"].value * 8 / 1000


def dollars(photos: int, row: Row, rate: float, machine_hour: float, requests: float, gigabyte: float) -> float:
    """Two requests for each time that a photo is fetched: its state, and the photo."""
    reading = photos * row.fetched * (2 * requests / 1e6 + RATES["photo"].value / 1000 * gigabyte)
    return hours(photos, rate) * machine_hour + reading


def span(one: float, other: float, digits: int = 0) -> str:
    low, high = (f"{value:,.{digits}f}" for value in sorted((one, other)))
    return low if low == high else f"{low} to {high}"


def table(photos: int, cores: int, prices: tuple[float, float, float] | None = None) -> list[str]:
    """In the form of the docs."""
    heads = ["machine", "the limit", "photos/s", "hours", "TB fetched", "Gbit/s", "photos in 12 hours"]
    if prices is not None:
        heads.append("dollars")
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in rows(cores):
        ends = row.slow, row.fast
        cells = [row.machine, row.limit, span(*ends), span(*(hours(photos, rate) for rate in ends), digits=1)]
        cells += [f"{terabytes(photos, row):,.0f}", span(*(gigabits(row, rate) for rate in ends), digits=1)]
        cells.append(span(*(rate * 12 * 3600 / 1e6 for rate in ends), digits=1) + " million")
        if prices is not None:
            cells.append(span(*(dollars(photos, row, rate, *prices) for rate in ends)))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=int, default=10_000_000)
    parser.add_argument("--cores", type=int, default=16)
    parser.add_argument("--machine-hour", type=float, help="what an hour of the machine costs")
    parser.add_argument("--requests", type=float, default=0.0, help="what a million requests to the bucket cost")
    parser.add_argument("--gigabyte", type=float, default=0.0, help="what a gigabyte out of the bucket costs")
    given = parser.parse_args()
    prices = None if given.machine_hour is None else (given.machine_hour, given.requests, given.gigabyte)
    print("\n".join(table(given.photos, given.cores, prices)))
    print(
        f"\nmemory of the program that lists them: {given.photos * RATES['memory'].value / 1e6:,.0f} GB on one machine"
    )


if __name__ == "__main__":
    main()
