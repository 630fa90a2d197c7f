"""Which photos a run was trained on: known again by their content, wherever they lie and whatever they are called.

RUN/trained_on.hashes holds the first 8 bytes of each photo's sha256, sorted: little to keep, and no way back.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from patchlight.training.data import Dataset

FILE = "trained_on.hashes"


def marks_of(photos: Dataset) -> bytes:
    """What FILE holds of these photos."""
    return np.unique(_marks(photos)).tobytes()


def warnings_of(run: Path, photos: Dataset) -> list[str]:
    """A line that says how many of the photos the run in this folder was trained on; none where nothing tells."""
    try:
        content = (run / FILE).read_bytes()
    except OSError:
        return []
    known = np.frombuffer(content[: len(content) // 8 * 8], ">u8")
    seen = int(np.isin(_marks(photos), known).sum())
    line = f"{seen:,} of the {len(photos):,} photos were trained on, so that the result is too good; judge by others"
    return [line] if seen else []


def _marks(photos: Dataset) -> npt.NDArray[np.uint64]:
    heads = (photos.content_hash(index)[:8] for index in range(len(photos)))
    return np.frombuffer(b"".join(heads), ">u8")
