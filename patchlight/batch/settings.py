"""What a run was asked for, and how it goes about it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

from patchlight.batch.formats import check_format
from patchlight.batch.parts import Part
from patchlight.errors import PatchlightError
from patchlight.images.crop import Cut, parse_aspect
from patchlight.images.decode import MAX_PIXELS
from patchlight.images.pad import check_pad, parse_colour
from patchlight.json_config import JsonConfig, check_types, require
from patchlight.localizing.detector import MOST_TILES, DetectorOptions

ENGINES = ("auto", "none", "bfloat16")
"""An exported model is given in the model's place."""


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
    engine: str = "auto"  # what computes the model: "none" is torch, see `deploy.chosen`
    burst: bool = False  # camera traps: what is there at other times, too, is no subject, and what moved may be one
    video: float | None = None  # frames a second of videos, which are left out otherwise
    empty_below: float | None = None  # a photo whose best box has less confidence is `none`; None: as calibrated

    # What to cut.
    boxes_only: bool = False
    crop_unsure: bool = True  # also where the decision is "unsure"; where it is "none" there is no crop
    margin: float = 0.03
    aspect: str = "free"  # or "1:1", "4:3", ...
    size: int | str | None = None  # pixels of the longer side at most; or "800x600", which every crop then has exactly
    pad: str | None = None  # what stands where the photo ends: "blur", "edge", or a colour; keeps the whole margin
    fill: bool = False  # enlarge subjects that are small, to fill an exact size
    scale: Literal["each", "same"] = "each"  # "same": one for all crops of the folder, by its largest subject
    cutout: bool = False  # make transparent what is not the subject
    background: str | None = None  # or give it this colour
    sort: Literal["decision", "group", "label"] | None = None  # a folder for each; of boxes alone, with links
    keywords: bool = False  # write group and label into the crops, as XMP and IPTC
    boxes: str | None = None  # MegaDetector's JSON, whose boxes are taken instead of the model's
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
            self.video is None or 0 < self.video <= 100,
            f"video={self.video} is frames a second; give a number above 0, 100 at most",
        )
        require(
            self.empty_below is None or 0 <= self.empty_below <= 1,
            f"empty_below={self.empty_below} is a confidence; give a number from 0 to 1",
        )
        exact = isinstance(self.size, str)
        if isinstance(self.size, int):
            require(self.size >= 1, f"size={self.size} is in pixels, 1 or more")
        if self.pad is not None:
            check_pad(self.pad)
        if self.background is not None:
            parse_colour(self.background, "background")
        for name, value, needed in (("fill", self.fill, exact), ("scale", self.scale == "same", exact)):
            said = "fill=True" if name == "fill" else "scale='same'"
            require(not value or needed, f"{said} needs an exact size, such as 800x600")
        require(
            self.exact_size is None or self.aspect == "free",
            f"aspect={self.aspect!r} does not go with size={self.size!r}, which has its own; leave one out",
        )
        require(
            not (self.burst and self.scale == "same"),
            "burst=True does not go with scale='same': frames are judged by sequences; leave one out",
        )
        require(
            not (self.burst and self.boxes is not None),
            f"burst=True does not go with boxes={self.boxes!r}, which are not judged anew; leave one out",
        )
        masks = "cutout=True" if self.cutout else f"background={self.background!r}"
        for said, given in (("pad=" + repr(self.pad), self.pad), (masks, self.cutout or self.background)):
            require(
                not (self.lossless and given),
                f"lossless=True does not go with {said}, for that makes new pixels; leave one out",
            )
        require(
            not (self.lossless and self.size is not None),
            f"lossless=True does not go with size={self.size!r}, for scaling makes new pixels; leave one out",
        )
        require(self.engine in ENGINES, f"engine={self.engine!r} is not known; it is one of {', '.join(ENGINES)}")
        parse_aspect(self.aspect)

    @classmethod
    def of_run(cls, made_with: Mapping[str, Any]) -> Self:
        """What a run was asked for, from its run.json, which names the engine that it took in place of the setting."""
        return cls.from_dict({each.name: made_with[each.name] for each in fields(cls) if each.name != "engine"})

    @property
    def exact_size(self) -> tuple[int, int] | None:
        """(width, height)."""
        return parse_exact_size(self.size) if isinstance(self.size, str) else None

    def cut(self, jpegtran: str | None = None) -> Cut:
        """How crops are cut, but for a scale that all have."""
        return Cut(
            margin=self.margin,
            aspect=parse_aspect(self.aspect),
            longest=self.size if isinstance(self.size, int) else None,
            exact=self.exact_size,
            fill=self.fill,
            pad=self.pad,
            jpegtran=jpegtran,
            cutout=self.cutout or self.background is not None,
            background=self.background,
        )

    @property
    def detector_options(self) -> DetectorOptions:
        return DetectorOptions(
            subjects=self.subjects,
            threshold=self.threshold,
            min_area=self.min_area,
            second_look=self.second_look,
            tiles=self.tiles,
            empty_below=self.empty_below,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CropRunSettings:
    """How a run does it, and what it writes besides rows and crops, which do not depend on any of this."""

    device: str | None = None  # "cpu", "cuda", "cuda:1"; None for the GPU where there is one
    workers: int = 2  # processes that read and cut; 0 for none
    batch_size: int = 32  # photos that a GPU looks at together
    overwrite: bool = False  # begin anew in a folder with other settings
    formats: Sequence[str] = ()  # further files: json, csv, parquet, megadetector, coco
    report: bool = True  # report.html and its thumbnails
    thumbs: bool = True  # the thumbnails of the report
    part: str | None = None  # "3/64": the third of 64 fixed shares of the photos, for a machine each; see `merge`
    on: str | None = None  # "ray" or "ray:HOST:PORT": the machines of a Ray cluster do it, see on_ray.py
    prune: bool = False  # remove the crops of photos that are gone
    overlay: bool = False  # pictures with heat and boxes over each photo

    def __post_init__(self) -> None:
        for name, least in (("workers", 0), ("batch_size", 1)):
            value = getattr(self, name)
            require(type(value) is int and value >= least, f"{name}={value} must be {least} or more")
        Part.parse(self.part)
        if self.on is not None:
            require(
                re.fullmatch(r"ray(:auto|:[^:/]+:[0-9]+)?", self.on) is not None,
                f"on={self.on!r} is not known; it is ray, or ray:HOST:PORT with the address of a cluster",
            )
            require(
                self.part is None, f"part={self.part!r} does not go with on={self.on!r}, which shares out by itself"
            )
        require(not isinstance(self.formats, str), f"formats={self.formats!r} is one word; give a list of them")
        for each in self.formats:
            check_format(each)


def parse_exact_size(text: str) -> tuple[int, int]:
    """ "WxH" -> (width, height)."""
    found = re.fullmatch(r"([1-9]\d{0,4})[xX]([1-9]\d{0,4})", text, re.ASCII)
    if found and int(found[1]) * int(found[2]) > MAX_PIXELS:
        raise PatchlightError(f"size={text!r} is more than {MAX_PIXELS // 10**6} megapixels; give a smaller one")
    if not found:
        raise PatchlightError(
            f"size={text!r} is not known; it is the longer side in pixels, or width and height such as '800x600'"
        )
    return int(found[1]), int(found[2])
