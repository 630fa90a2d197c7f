"""What the model finds in photos that were read.

A row must not depend on the photos beside it. How a product of matrices is summed up depends on the batch, so on a CPU
the model looks at one photo at a time, in a thread for each core, which is no slower there. On a GPU every batch is
filled up to the same size.
"""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from patchlight.batch.work import Failed, Seen, stamp_of
from patchlight.errors import PatchlightError
from patchlight.images.decode import ImageError
from patchlight.localizing.detector import Detector, Localization
from patchlight.models.prepack import prepack_linears
from patchlight.reporting import Reporter


class Finder:
    """A detector on its device; its methods may be called in `threads` threads at a time."""

    def __init__(self, detector: Detector, batch_size: int, reporter: Reporter) -> None:
        self.detector, self.reporter = detector, reporter
        self.device = detector.device
        self.at_once = images_at_once(self.device, batch_size)
        """Photos; fewer, once memory has run out."""
        # A CPU's cores take a photo each; a GPU computes while another batch is made ready, or read.
        self.threads = torch.get_num_threads() if self.device.type == "cpu" else 2
        self._is_ready = False

    def get_ready(self) -> None:
        """Before the first look, where there is anything to look at."""
        if self._is_ready:
            return
        self._is_ready = True
        loaded = self.detector.loaded
        if loaded.engine is not None:
            ready = replace(loaded, engine=loaded.engine.shared_by(self.threads))
        else:
            ready = replace(loaded, model=prepack_linears(loaded.model))
        self.detector = replace(self.detector, loaded=ready)

    def look_at(self, photos: Sequence[Seen]) -> list[Any | Failed]:
        found: list[Any | Failed] = []
        while len(found) < len(photos):
            at_once = self.at_once
            part = photos[len(found) : len(found) + at_once]
            filled = [*part, *[part[-1]] * (at_once - len(part))]
            try:
                levels = [photo.level_HWC for photo in filled]
                images_BCHW = self.detector.loaded.preprocess.batch(levels, self.device)
                found += self._look(images_BCHW, filled)[: len(part)]
            except PatchlightError as error:  # images of a size that the model does not take
                found += [Failed("unsupported", str(error), photo.stamp) for photo in part]
            except RuntimeError as error:
                self._take_fewer(error, at_once)
        return found

    def _look(self, images_BCHW: Tensor, photos: Sequence[Seen]) -> list[Any]:
        """What the model finds in images of one size; of a table another one says other things, see readers.py."""
        looks = self.detector.look(images_BCHW, [photo.view for photo in photos])
        return [self.detector.by_alpha(found, photo.alpha) for found, photo in zip(looks, photos, strict=True)]

    def look_closely(self, files: Sequence[str], *, first_only: bool = False) -> list[Localization | Failed]:
        """With a second look or tiles, for which the photo is read once more, here; `first_only` leaves the second look
        to `look_again_at`."""
        detector = self.detector
        if first_only:
            detector = replace(detector, options=replace(detector.options, second_look=False))
        return [self._closer(file, lambda file: detector([file])) for file in files]

    def look_again_at(self, file: str, first: Localization) -> list[Localization | Failed]:
        """A second look at what is left of a frame's finds."""
        return [self._closer(file, lambda file: self.detector.look_again([self.detector.read(file)], [first]))]

    def _closer(self, file: str, look: Callable[[str], list[Localization]]) -> Localization | Failed:
        """What a closer look at one photo finds; what goes wrong with the photo costs its own row alone."""
        try:
            return look(file)[0]
        except ImageError as error:
            return Failed(error.reason, error.detail, stamp_of(file))
        except PatchlightError as error:
            return Failed("unsupported", str(error), stamp_of(file))
        except torch.OutOfMemoryError:
            raise PatchlightError(
                f"{self.detector.loaded.provenance.source}: closer looks do not fit into the device's memory; leave "
                "out `second_look` and `tiles`, or use device='cpu'"
            ) from None
        except RuntimeError as error:
            give_up(self.device, error)

    def _take_fewer(self, error: RuntimeError, at_once: int) -> None:
        """After running out of memory: half as many photos at once, for the rest of the run."""
        text = str(error).lower()
        if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in text and "alloc" not in text:
            give_up(self.device, error)
        if at_once == 1:
            raise PatchlightError(
                f"the model has not enough memory for a single photo on {self.device}; use a smaller model, or another "
                "device"
            ) from None
        self.at_once = at_once // 2
        self.reporter.tell(f"there is not enough memory for {at_once} photos at once; continuing with {self.at_once}")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def images_at_once(device: torch.device, batch_size: int) -> int:
    """One on a CPU, see above."""
    return 1 if device.type == "cpu" else batch_size


def give_up(device: torch.device, error: RuntimeError) -> NoReturn:
    """What a GPU does wrong is said in a line; on a CPU it is we who do."""
    if device.type == "cpu":
        raise error
    raise PatchlightError(
        f"{device} failed ({first_line(error)}); run it again to continue, or with device='cpu'"
    ) from None


def first_line(error: Exception) -> str:
    """What matters of the many that torch says."""
    return textwrap.shorten(str(error).partition("\n")[0].rstrip("."), 120, placeholder=" ...")
