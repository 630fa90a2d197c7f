"""Nearest neighbours of 100,000 vectors by hnswlib, faiss, usearch and an exact search: recall and time, in one table.

    python benchmarks/neighbours.py [--features TABLE] [--vectors 100000] [--rounds 3]
    python benchmarks/neighbours.py --photos FOLDER

Vectors are drawn around 2,000 centres, with variances that fall as those of a model's features do; with --features
their mean and covariance are those of a table that `patchlight embed` wrote. All libraries get the same graph (16 links
a vector, 128 candidates while building, cosine) and one thread. Queries are 1,000 further vectors; recall is the share
of the true ten nearest that are found. Time is the process's own CPU time, the least of some rounds in which the
libraries take turns, so that a busy machine says the same.

With --photos: how alike copies of a folder's photos are to their originals by `patchlight dedupe` (every seventh photo;
in turns half as large, cut by 7 %, a quarter brighter, mirrored), and how many pairs of different photos are as alike.
"""

import argparse
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageEnhance

LINKS, BUILD = 16, 128
WIDTHS = (64, 128)
"""Candidates while searching."""

Array = npt.NDArray[Any]


def drawn(count: int, dimensions: int, table: str | None) -> Array:
    random = np.random.default_rng(0)
    scale_D = 1 / np.sqrt(1 + np.arange(dimensions))
    mean_D, basis_DD = np.zeros(dimensions), np.eye(dimensions)
    if table is not None:
        from patchlight.batch.tables import read_features

        own_ND = read_features(table).features_ND.astype(np.float64)
        mean_D, centred_ND = own_ND.mean(0), own_ND - own_ND.mean(0)
        _, values, basis_DD = np.linalg.svd(centred_ND, full_matrices=True)
        scale_D = np.full(basis_DD.shape[0], values.min())
        scale_D[: len(values)] = values
        scale_D /= np.sqrt(len(own_ND))
    centres = random.standard_normal((2000, len(scale_D))) * scale_D
    own = (
        centres[random.integers(0, len(centres), count)] + 0.6 * random.standard_normal((count, len(scale_D))) * scale_D
    )
    vectors = (own @ basis_DD + mean_D).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


class Exact:
    def __init__(self, vectors_ND: Array) -> None:
        self.vectors_ND = vectors_ND

    def search(self, queries_QD: Array, count: int, width: int) -> Array:
        found = []
        for start in range(0, len(queries_QD), 100):
            near = queries_QD[start : start + 100] @ self.vectors_ND.T
            best = np.argpartition(-near, count, axis=1)[:, :count]
            found.append(np.take_along_axis(best, np.take_along_axis(-near, best, 1).argsort(1), 1))
        return np.concatenate(found)

    def save(self, path: Path) -> None:
        np.save(path.with_suffix(".npy"), self.vectors_ND)
        path.with_suffix(".npy").rename(path)


class Hnswlib:
    def __init__(self, vectors_ND: Array) -> None:
        self.index = importlib.import_module("hnswlib").Index("cosine", vectors_ND.shape[1])
        self.index.init_index(len(vectors_ND), ef_construction=BUILD, M=LINKS, random_seed=0)
        self.index.set_num_threads(1)
        self.index.add_items(vectors_ND)

    def search(self, queries_QD: Array, count: int, width: int) -> Array:
        self.index.set_ef(width)
        return self.index.knn_query(queries_QD, count)[0]

    def save(self, path: Path) -> None:
        self.index.save_index(str(path))


class Faiss:
    def __init__(self, vectors_ND: Array) -> None:
        self.faiss = importlib.import_module("faiss")
        self.faiss.omp_set_num_threads(1)
        self.index = self.faiss.IndexHNSWFlat(vectors_ND.shape[1], LINKS, self.faiss.METRIC_INNER_PRODUCT)
        self.index.hnsw.efConstruction = BUILD
        self.index.add(vectors_ND)

    def search(self, queries_QD: Array, count: int, width: int) -> Array:
        self.index.hnsw.efSearch = width
        return self.index.search(queries_QD, count)[1]

    def save(self, path: Path) -> None:
        self.faiss.write_index(self.index, str(path))


class Usearch:
    dtype = "f32"

    def __init__(self, vectors_ND: Array) -> None:
        index = importlib.import_module("usearch.index").Index
        self.index = index(
            ndim=vectors_ND.shape[1], metric="cos", dtype=self.dtype, connectivity=LINKS, expansion_add=BUILD
        )
        self.index.add(np.arange(len(vectors_ND)), vectors_ND, threads=1)

    def search(self, queries_QD: Array, count: int, width: int) -> Array:
        self.index.expansion_search = width
        return self.index.search(queries_QD, count, threads=1).keys

    def save(self, path: Path) -> None:
        self.index.save(str(path))


class UsearchHalf(Usearch):
    dtype = "f16"


COPIES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "half as large, JPEG quality 60": lambda image: image.resize((image.width // 2, image.height // 2)),
    "cut by 7 %": lambda image: image.crop(
        (int(0.04 * image.width), int(0.04 * image.height), int(0.97 * image.width), int(0.97 * image.height))
    ),
    "a quarter brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.25),
    "mirrored": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
}


def duplicates(folder: str) -> None:
    from patchlight.batch.neighbours import Neighbours
    from patchlight.batch.table_run import embed_photos

    with tempfile.TemporaryDirectory() as made:
        copies = Path(made) / "copies"
        copies.mkdir()
        originals = sorted(Path(folder).glob("*.jpg"))
        kinds = list(COPIES)
        for number, path in enumerate(originals[::7]):
            with Image.open(path) as image:
                copy = COPIES[kinds[number % 4]](image.convert("RGB"))
            copy.save(copies / f"{number % 4}-{path.name}", quality=60 if number % 4 == 0 else 85)
        table = Path(made) / "features.npz"
        embed_photos([folder, copies], table)
        known = Neighbours.of(table)
    place = {Path(path).name: row for row, path in enumerate(known.features.paths)}
    near = known.vectors_ND @ known.vectors_ND.T
    own = [row for name, row in place.items() if name[1] != "-"]
    others = np.triu(near[np.ix_(own, own)], 1)
    levels = (0.9, 0.92, 0.94, 0.96)
    print(
        f"{len(own):,} photos, {len(place) - len(own):,} copies\n\n| alike from | "
        + " | ".join(map(str, levels))
        + " |"
    )
    print("|---|" + "---|" * len(levels))
    for number, kind in enumerate(kinds):
        alike = np.array([near[row, place[name[2:]]] for name, row in place.items() if name.startswith(f"{number}-")])
        print(f"| {kind} | " + " | ".join(f"{(alike >= level).mean():.0%}" for level in levels) + " |")
    print("| pairs of different photos | " + " | ".join(str(int((others >= level).sum())) for level in levels) + " |")


LIBRARIES: dict[str, Callable[[Array], Any]] = {
    "exact (numpy)": Exact,
    "hnswlib": Hnswlib,
    "faiss-cpu": Faiss,
    "usearch": Usearch,
    "usearch, float16": UsearchHalf,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--features", metavar="TABLE")
    parser.add_argument("--vectors", type=int, default=100_000)
    parser.add_argument("--dimensions", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3, help="of searching; an index is built once")
    parser.add_argument("--photos", metavar="FOLDER", help="measure near-duplicates instead")
    given = parser.parse_args()
    if given.photos is not None:
        duplicates(given.photos)
        return
    all_of = drawn(given.vectors + 1000, given.dimensions, given.features)
    vectors_ND, queries_QD = all_of[:-1000].copy(), all_of[-1000:].copy()
    truth = Exact(vectors_ND).search(queries_QD, 10, 0)
    made: dict[str, Any] = {}
    built: dict[str, float] = {}
    for name, library in LIBRARIES.items():
        try:
            start = time.process_time()
            made[name] = library(vectors_ND)
            built[name] = time.process_time() - start
        except ImportError as error:
            print(f"{name}: left out, {error}", file=sys.stderr)
    took: dict[tuple[str, int], float] = {}
    recall: dict[tuple[str, int], float] = {}
    for _ in range(given.rounds):
        for name, index in made.items():
            for width in WIDTHS:
                start = time.process_time()
                found = index.search(queries_QD, 10, width)
                seconds = time.process_time() - start
                took[name, width] = min(seconds, took.get((name, width), seconds))
                hits = (np.asarray(found)[:, :, None] == truth[:, None]).any(2)
                recall[name, width] = float(hits.mean())
    print(f"{given.vectors:,} vectors of {vectors_ND.shape[1]} numbers, 1,000 queries, one thread, CPU time\n")
    print("| library | built, s | MB | " + " | ".join(f"recall@10, width {w} | ms a query" for w in WIDTHS) + " |")
    print("|---|---|---|" + "---|---|" * len(WIDTHS))
    with tempfile.TemporaryDirectory() as folder:
        for name, index in made.items():
            path = Path(folder) / "index"
            index.save(path)
            cells = [f"{recall[name, w]:.4f} | {took[name, w]:.3f}" for w in WIDTHS]  # 1,000 queries: s is ms
            print(f"| {name} | {built[name]:.1f} | {path.stat().st_size / 1e6:.0f} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
