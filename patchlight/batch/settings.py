"""What a run was asked for, and how it goes about it."""

from collections.abc import Sequence
from dataclasses import dataclass

from patchlight.batch.formats import check_format
from patchlight.images.crop import parse_aspect
from patchlight.json_config import JsonConfig, check_types, require
from patchlight.localizing.detector import MOST_TILES, DetectorOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class CropSettings(JsonConfig):
    """What to find in photos and what to cut: all that rows and crops depend on, besides the photos and the model."""

    # What to find, see `localize`.
    method: str = "auto"
    subjects: int | None = 1  # at most, the best ones; None for all
    threshold: float | None = None
    min_area: float = 0.0
    second_look: bool = False
    tiles: int | None = None
    burst: bool = False  # camera traps: what is there in every frame of a sequence is no subject

    # What to cut.
    boxes_only: bool = False
    crop_unsure: bool = True  # also where the decision is "unsure"; where it is "none" there is no crop
    margin: float = 0.03
    aspect: str = "free"  # or "1:1", "4:3", ...
    size: int | None = None  # pixels of the longer side, to which larger crops are scaled down
    lossless: bool = False  # cut JPEGs without decoding them, at the borders of their blocks

    def __post_init__(self) -> None:
        for name, most, what in (("margin", 10, "the box's sides"), ("min_area", 1, "the frame")):
            value = getattr(self, name)
            fits = isinstance(value, int | float) and 0 <= value <= most
            require(fits, f"{name}={value} is a share of {what}; give a number from 0 to {most}")
        check_types(self)
        require(
            self.subjects is None or self.subjects >= 1,
            f"subjects={self.subjects} must be 1 or more, or None for all",
        )
        require(
            self.tiles is None or 1 <= self.tiles <= MOST_TILES, f"tiles={self.tiles} must be from 1 to {MOST_TILES}"
        )
        require(
            not (self.burst and self.tiles is not None),
            f"burst=True does not go with tiles={self.tiles}, for parts have no background of their own; leave one out",
        )
        require(self.size is None or self.size >= 1, f"size={self.size} is in pixels, 1 or more")
        require(
            not (self.lossless and self.size is not None),
            f"lossless=True does not go with size={self.size}, for scaling makes new pixels; leave one out",
        )
        parse_aspect(self.aspect)

    @property
    def detector_options(self) -> DetectorOptions:
        return DetectorOptions(
            subjects=self.subjects,
            threshold=self.threshold,
            min_area=self.min_area,
            second_look=self.second_look,
            tiles=None if self.tiles is None else (self.tiles, self.tiles),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CropRunSettings:
    """How a run does it, and what it writes besides rows and crops, which do not depend on any of this."""

    device: str | None = None  # "cpu", "cuda", "cuda:1"; None for the GPU where there is one
    workers: int = 2  # processes that read and cut; 0 for none
    batch_size: int = 32  # photos that a GPU looks at together
    overwrite: bool = False  # begin anew in a folder with other settings
    formats: Sequence[str] = ()  # further files: json, csv, megadetector, coco
    report: bool = True  # report.html and its thumbnails
    overlay: bool = False  # pictures with heat and boxes over each photo

    def __post_init__(self) -> None:
        for name, least in (("workers", 0), ("batch_size", 1)):
            value = getattr(self, name)
            require(type(value) is int and value >= least, f"{name}={value} must be {least} or more")
        require(not isinstance(self.formats, str), f"formats={self.formats!r} is one word; give a list of them")
        for each in self.formats:
            check_format(each)
