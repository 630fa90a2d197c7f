"""How many empty frames of camera traps can be set aside before an animal is lost.

    python benchmarks/triage.py [MODEL] [--quick] [--cameras 12] [--shared ../shared/data] [--keep FOLDER]

The frames are made here, and each is asked about as a user asks: `patchlight crop --format megadetector`, plain,
with --burst, and with closer looks. Each camera has a held-out empty scene, half of them with a thing that stands there
for good, and takes bursts of three frames, half an hour between two. From burst to burst the light changes, cast
shadows lie elsewhere, and a third of the bursts are by infrared light; from frame to frame what is rough sways in the
wind, shadows drift, the camera shifts by a pixel or two now and then, and the sensor adds noise.

Half of the bursts show nothing. The others show a held-out animal, cut out by its mask and put into the scene before
the scene's light falls on it, 2 to 40 % as wide as the frame; half of them stand still through their burst. Every
fourth camera is busy: three of four bursts show an animal, and one animal stays where it is for four bursts.

Printed is, size by size, the share of frames with an animal that are kept (recall) by the threshold that removes half
of the empty frames: a frame counts with the highest confidence of its detections, and one that is no more than the
threshold is removed. Below stand the same with the two thresholds that the file names itself, and what is decided.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFilter

sys.path.insert(0, str(Path(__file__).parent))  # also where this file is imported by a test

from default_model import SHARED, tell
from subjects import cut_outs_of, enlarged, percent, scenes

import patchlight as pl

Floats = npt.NDArray[np.float32]

# Looked at one by one: of the held-out subjects in one piece, those that a camera trap may see.
# fmt: off
ANIMALS = frozenset((
    19, 22, 38, 60, 61, 130, 182, 299, 310, 325, 329, 345, 430, 434, 519, 536, 569, 576, 602, 604, 680, 727, 729, 745,
    773, 848, 874, 881, 981, 983, 991, 1072, 1119, 1194, 1208, 1209, 1236, 1245, 1254, 1330, 1345, 1358, 1362, 1363,
    1368, 1377, 1466, 1481, 1501, 1521, 1531, 1545, 1593, 1677, 1714, 1744, 1748, 1778, 1796, 1816, 1953, 2217, 2248,
    2274, 2282, 2294, 2302, 2319, 2323, 2424, 2437, 2457, 2517, 2536, 2583, 2584, 2598, 2620, 2640, 2714, 2811, 2814,
    2847, 2854, 2877, 2931, 2964, 2968, 3017, 3148, 3197, 3212, 14566, 14614, 14641, 14837, 14971, 15162,
))
# fmt: on
STUMPS = frozenset((16, 135, 238, 452, 1884, 2220, 2597, 14422))
"""And things that may stand in a scene for good."""

SIZES = (0.02, 0.04, 0.07, 0.12, 0.22, 0.4)
FRAMES = 3
BURSTS = 16
FRAME_SIZES = ((960, 720), (960, 540))
WAYS: dict[str, dict[str, object]] = {
    "plain": {},
    "--burst": {"burst": True},
    "--burst --second-look": {"burst": True, "second_look": True},
    "--burst --tiles 2": {"burst": True, "tiles": 2},
    "--tiles 2": {"tiles": 2},
}


@dataclass(frozen=True)
class Shown:
    """What a frame shows."""

    size: float
    """The animal's width as a share of the frame's; 0 of an empty frame."""
    still: bool
    night: bool


@dataclass(frozen=True)
class Visit:
    """An animal in a burst: as large as the frame wants it, and the left upper corner of each frame's."""

    animal: Image.Image
    mask: Image.Image
    corners: tuple[tuple[int, int], ...]
    shown: Shown


# The frames


def make_frames(folder: Path, shared: Path, cameras: int) -> dict[str, Shown]:
    """Write the frames of all cameras, a folder each; what each file shows. The same on every machine."""
    found = {int(key): cut for key, cut in cut_outs_of(shared / "subjects")}
    animals = [found[key] for key in sorted(ANIMALS & found.keys())]
    stumps = [found[key] for key in sorted(STUMPS & found.keys())]
    backgrounds = [photo for _, photo in scenes(shared / "photos")]
    shown: dict[str, Shown] = {}
    for camera in range(cameras):
        tell(f"camera {camera + 1} of {cameras}")
        rng = np.random.default_rng((22, camera))
        size = FRAME_SIZES[camera % len(FRAME_SIZES)]
        scene = enlarged(backgrounds[camera % len(backgrounds)].convert("RGB"), size, rng)
        if camera % 2:
            stump, mask = stumps[camera // 2 % len(stumps)]
            width = round(rng.uniform(0.08, 0.2) * size[0])
            stump, mask, corner = placed(stump, mask, width, size, rng)
            scene.paste(stump, corner, mask)
        own = folder / f"camera{camera:02}"
        own.mkdir(parents=True)
        for burst, visit in enumerate(visits(animals, camera, size, rng)):
            night = burst % 3 == 2
            start = time.mktime((2024, 5, 14, 6, 0, 0, 0, 0, 0)) + 1800 * burst
            light, shadow = Light.drawn(rng, size, night=night), field(rng, size, size[0] // 6)
            for frame in range(FRAMES):
                image = scene
                if visit is not None:
                    image = scene.copy()
                    image.paste(visit.animal, visit.corners[frame], visit.mask)
                taken = light.of(swayed(np.asarray(image, np.float32), rng), np.roll(shadow, 3 * frame, 1), rng)
                file = own / f"{burst:02}_{frame}.jpg"
                exif = Image.Exif()
                exif.get_ifd(0x8769)[0x9003] = time.strftime("%Y:%m:%d %H:%M:%S", time.localtime(start + 2 * frame))
                Image.fromarray(taken).save(file, quality=85, exif=exif)
                shown[f"{own.name}/{file.name}"] = (
                    Shown(0.0, True, night) if visit is None else Shown(visit.shown.size, visit.shown.still, night)
                )
    tell("")
    return shown


def visits(
    animals: Sequence[tuple[Image.Image, Image.Image]], camera: int, size: tuple[int, int], rng: np.random.Generator
) -> Iterator[Visit | None]:
    """What comes by in each burst of a camera."""
    busy = camera % 4 == 3
    stays: Visit | None = None
    for burst in range(BURSTS):
        if busy and 4 <= burst < 8:
            stays = stays or visit(animals, SIZES[(camera // 4 + 2) % len(SIZES)], size, rng, still=True)
            yield stays
        elif burst % 4 == 3 if busy else burst % 2:
            yield None
        else:
            number = camera * BURSTS // 2 + burst // 2
            yield visit(animals, SIZES[number % len(SIZES)], size, rng, still=number // len(SIZES) % 2 == 0)


def visit(
    animals: Sequence[tuple[Image.Image, Image.Image]],
    share: float,
    size: tuple[int, int],
    rng: np.random.Generator,
    *,
    still: bool,
) -> Visit:
    animal, mask = animals[int(rng.integers(len(animals)))]
    animal, mask, (left, top) = placed(animal, mask, round(share * size[0]), size, rng)
    reach = (
        (0, 0) if still else (int(rng.uniform(0.3, 1.5) * animal.width), int(rng.uniform(-0.1, 0.1) * animal.height))
    )
    most = size[0] - animal.width, size[1] - animal.height
    corners = [
        (
            min(most[0], max(0, left + (frame - 1) * reach[0] + int(rng.integers(-1, 2)))),
            min(most[1], max(0, top + (frame - 1) * reach[1] + int(rng.integers(-1, 2)))),
        )
        for frame in range(FRAMES)
    ]
    return Visit(animal, mask, tuple(corners), Shown(share, still, night=False))


def placed(
    cut: Image.Image, mask: Image.Image, width: int, size: tuple[int, int], rng: np.random.Generator
) -> tuple[Image.Image, Image.Image, tuple[int, int]]:
    """A cut-out of this width, no higher than the frame, with soft edges, and where it stands."""
    height = round(width * cut.height / cut.width)
    if height > 0.9 * size[1]:
        height = round(0.9 * size[1])
        width = round(height * cut.width / cut.height)
    if rng.random() < 0.5:
        cut, mask = (each.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for each in (cut, mask))
    soft = mask.resize((width, height), Image.Resampling.BICUBIC).filter(ImageFilter.GaussianBlur(0.7))
    left = int(rng.integers(0, size[0] - width))
    top = int(rng.integers(min(size[1] // 4, size[1] - height - 1), size[1] - height))
    return cut.resize((width, height), Image.Resampling.BICUBIC), soft, (left, top)


@dataclass(frozen=True)
class Light:
    """The light of a burst, and what its shadows do."""

    gain: float
    gamma: float
    tint: Floats
    dark: float
    """How much light shadows take."""
    night: bool

    @classmethod
    def drawn(cls, rng: np.random.Generator, size: tuple[int, int], *, night: bool) -> "Light":
        tint = rng.uniform(0.94, 1.06, 3).astype(np.float32)
        return cls(rng.uniform(0.65, 1.3), rng.uniform(0.8, 1.25), tint, rng.uniform(0.0, 0.5), night)

    def of(self, image_HWC: Floats, shadow_HW: Floats, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
        height, width, _ = image_HWC.shape
        levels_HWC = (image_HWC / 255).clip(0, 1) ** self.gamma * self.gain
        if self.night:
            # The lamp of the camera: grey, bright in the middle.
            y_H1, x_1W = np.linspace(-1, 1, height)[:, None], np.linspace(-1, 1, width)[None]
            lamp_HW1 = np.exp(-0.9 * (x_1W**2 + y_H1**2)).astype(np.float32)[..., None]
            levels_HWC = levels_HWC.mean(-1, keepdims=True).repeat(3, -1) * lamp_HW1
        else:
            # Edges of shadows are soft, and about half of the ground lies in them.
            levels_HWC *= 1 - self.dark / (1 + np.exp(-6 * shadow_HW))[..., None]
            levels_HWC *= self.tint
        levels_HWC += rng.normal(0, 0.02 if self.night else 0.01, (height, width, 1 if self.night else 3))
        return (255 * levels_HWC).clip(0, 255).astype(np.uint8)


def swayed(image_HWC: Floats, rng: np.random.Generator) -> Floats:
    """The picture with what is rough bent by the wind, up to four pixels, and at times all of it by one or two."""
    height, width, _ = image_HWC.shape
    grey = Image.fromarray(image_HWC.astype(np.uint8)).convert("L")
    rough = np.abs(np.asarray(grey, np.float32) - np.asarray(grey.filter(ImageFilter.GaussianBlur(3)), np.float32))
    coarse = Image.fromarray(rough).resize((width // 16, height // 16), Image.Resampling.BOX)
    rough_HW = (np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)) / 12).clip(0, 1)
    # Wind moves the upper half more than the ground.
    rough_HW = rough_HW * np.linspace(1, 0.4, height, dtype=np.float32)[:, None]
    shift = rng.integers(-2, 3, 2) if rng.random() < 0.1 else (0, 0)
    strength = rng.uniform(0, 2)
    y_HW, x_HW = np.mgrid[:height, :width].astype(np.float32)
    y_HW += shift[0] + strength * rough_HW * field(rng, (width, height), 30)
    x_HW += shift[1] + strength * rough_HW * field(rng, (width, height), 30)
    return sampled(image_HWC, y_HW.clip(0, height - 1.001), x_HW.clip(0, width - 1.001))


def sampled(image_HWC: Floats, y_HW: Floats, x_HW: Floats) -> Floats:
    """The picture at these places, between its pixels."""
    top, left = y_HW.astype(int), x_HW.astype(int)
    down, across = (y_HW - top)[..., None], (x_HW - left)[..., None]
    upper = image_HWC[top, left] * (1 - across) + image_HWC[top, left + 1] * across
    lower = image_HWC[top + 1, left] * (1 - across) + image_HWC[top + 1, left + 1] * across
    mixed: Floats = upper * (1 - down) + lower * down
    return mixed


def field(rng: np.random.Generator, size: tuple[int, int], scale: int) -> Floats:
    """Something smooth, (H, W), with a deviation of about 1, whose hills are about so many pixels wide."""
    width, height = size
    coarse = rng.normal(0, 1, (height // scale + 3, width // scale + 3)).astype(np.float32)
    smooth = np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC))
    return smooth / max(float(smooth.std()), 1e-6)


# What is said of them


@dataclass(frozen=True)
class Answers:
    """Of one way of asking, by file."""

    confidence: dict[str, float]
    """The highest of the frame's detections, as MegaDetector's file has it."""
    decision: dict[str, str]
    thresholds: dict[str, float]
    seconds: float


def ask(frames: Path, out: Path, model: str, settings: dict[str, object]) -> Answers:
    began = time.perf_counter()
    how = pl.CropRunSettings(workers=2, formats=["megadetector"], report=False)
    pl.crop_photos(
        frames,
        out,
        pl.CropSettings(boxes_only=True, **settings),
        how,
        model=model,
        reporter=pl.Reporter(),  # type: ignore[arg-type]
    )
    seconds = time.perf_counter() - began
    written = json.loads((out / "megadetector.json").read_text())
    confidence = {
        image["file"]: max((each["conf"] for each in image["detections"]), default=0.0) for image in written["images"]
    }
    rows = map(json.loads, (out / "results.jsonl").read_text().splitlines())
    decision = {os.path.relpath(row["path"], frames): row["decision"] for row in rows}
    metadata = written["info"]["detector_metadata"]
    thresholds = {name: metadata[f"{name}_detection_threshold"] for name in ("typical", "conservative")}
    return Answers(confidence, decision, thresholds, seconds)


def table(shown: dict[str, Shown], answers: dict[str, Answers]) -> list[str]:
    width = max(14, *(len(way) + 2 for way in answers))
    lines = [f"{'animals kept, %':24}frames" + "".join(f"{way:>{width}}" for way in answers)]
    empty = [file for file, each in shown.items() if not each.size]
    half = {way: float(np.median([own.confidence[file] for file in empty])) for way, own in answers.items()}

    def line(name: str, wanted: Callable[[Shown], bool]) -> None:
        files = [file for file, each in shown.items() if each.size and wanted(each)]
        cells = [percent(own.confidence[file] > half[way] for file in files) for way, own in answers.items()]
        lines.append(f"{name:24}{len(files):6}" + "".join(f"{cell:>{width}}" for cell in cells))

    for size in SIZES:
        line(f"{100 * size:.0f} % of the frame wide", lambda each, size=size: each.size == size)  # type: ignore[misc]
    line("still", lambda each: each.still)
    line("moving", lambda each: not each.still)
    line("by day", lambda each: not each.night)
    line("by night", lambda each: each.night)
    line("all", lambda each: True)
    lines.append(f"{'at the threshold':30}" + "".join(f"{half[way]:>{width}.3f}" for way in answers))
    removed = [percent(own.confidence[file] <= half[way] for file in empty) for way, own in answers.items()]
    lines.append(f"{'empty frames removed':24}{len(empty):6}" + "".join(f"{cell:>{width}}" for cell in removed))
    with_one = [file for file, each in shown.items() if each.size]
    for name in ("typical", "conservative"):
        for what, files in (("kept", with_one), ("empty removed", empty)):
            cells = [
                percent((own.confidence[file] >= own.thresholds[name]) == (files is with_one) for file in files)
                for own in answers.values()
            ]
            lines.append(f"{f'{name}: {what}':24}{len(files):6}" + "".join(f"{cell:>{width}}" for cell in cells))
    for what, files in (("with an animal", with_one), ("empty", empty)):
        cells = [percent(own.decision[file] == "none" for file in files) for own in answers.values()]
        lines.append(f"{f'`none` of those {what}':30}" + "".join(f"{cell:>{width}}" for cell in cells))
    cells = [f"{own.seconds:.0f}" for own in answers.values()]
    return [*lines, f"{'seconds':30}" + "".join(f"{cell:>{width}}" for cell in cells)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="default")
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--cameras", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="four cameras")
    parser.add_argument(
        "--keep", type=Path, help="where frames and results go, to look at; frames there are used again"
    )
    given = parser.parse_args()
    cameras = 4 if given.quick else given.cameras
    folder = given.keep or Path(tempfile.mkdtemp(prefix="triage"))
    try:
        frames, list_of = folder / f"frames-{cameras}", folder / f"frames-{cameras}.json"
        if list_of.exists():
            shown = {file: Shown(**each) for file, each in json.loads(list_of.read_text()).items()}
        else:
            shutil.rmtree(frames, ignore_errors=True)
            shown = make_frames(frames, given.shared, cameras)
            list_of.write_text(json.dumps({file: vars(each) for file, each in shown.items()}))
        answers = {}
        for way, settings in WAYS.items():
            tell(way)
            out = folder / f"out-{len(answers)}"
            shutil.rmtree(out, ignore_errors=True)
            try:
                answers[way] = ask(frames, out, given.model, settings)
            except pl.PatchlightError as error:
                parser.error(str(error))
        tell("")
        print(f"\r{given.model}, {len(shown)} frames of {cameras} cameras")
        print("\n".join(table(shown, answers)))
    finally:
        if given.keep is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
