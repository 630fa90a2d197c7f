"""Draw traps.jpg: frames of a video with `patchlight crop --video 1`, plain, and with other values of `--empty-below`.

python docs/pictures/traps.py

The video is made of two photos of demo/: in eight seconds the ibex walks through the empty frame. Needs the extra
`video`.
"""

import json
import tempfile
from pathlib import Path

import av
from PIL import Image, ImageChops, ImageDraw, ImageFilter, ImageFont

import patchlight as pl

HERE = Path(__file__).parent
DEMO = HERE.parents[1] / "demo"
SECONDS, RATE = 8, 4
SIZE = 1200, 800
IBEX = 345, 608, 437, 692
"""Where it stands in the photo, at that size."""
WIDE, HIGH, LABEL = 240, 160, 22
ROWS = {
    "--video 1": pl.CropSettings(video=1),
    "--video 1 --burst": pl.CropSettings(video=1, burst=True),
    "--video 1 --burst --empty-below 0.7": pl.CropSettings(video=1, burst=True, empty_below=0.7),
}
COLOURS = {"subject": "#2a9d3a", "several": "#2a9d3a", "unsure": "#e0a000", "none": "#808080"}


def make_video(path: Path) -> None:
    with Image.open(DEMO / "trap-ibex.jpg") as photo:
        seen = photo.convert("RGB").resize(SIZE)
    animal = seen.crop(IBEX)
    scene = seen.copy()
    scene.paste(seen.crop((IBEX[0] + 110, IBEX[1], IBEX[2] + 110, IBEX[3])), IBEX)  # the meadow beside it
    red, green, _ = animal.split()
    fur = ImageChops.subtract(red, green, scale=1, offset=40).point(lambda level: 255 if level > 40 else 0)
    mask = fur.filter(ImageFilter.MaxFilter(5)).filter(ImageFilter.GaussianBlur(1.5))
    with av.open(path, "w") as container:
        stream = container.add_stream("mpeg4", rate=RATE)
        stream.width, stream.height, stream.bit_rate = *SIZE, 4_000_000
        for number in range(SECONDS * RATE):
            frame = scene.copy()
            left = round(-animal.width + (SIZE[0] + animal.width) * (number - 2 * RATE) / (4 * RATE))
            frame.paste(animal, (left, IBEX[1]), mask)
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())


def main() -> None:
    sheet = Image.new("RGB", (SECONDS * WIDE, len(ROWS) * (HIGH + LABEL)), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(14)
    how = pl.CropRunSettings(workers=0, device="cpu", report=False)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_video(folder / "ibex.mp4")
        for line, (name, settings) in enumerate(ROWS.items()):
            top, out = line * (HIGH + LABEL), folder / str(line)
            pen.text((6, top + 3), name, "black", font)
            pl.crop_photos(folder / "ibex.mp4", out, settings, how, reporter=pl.Reporter())
            rows = map(json.loads, (out / "results.jsonl").read_text().splitlines())
            for column, row in enumerate(rows):
                with Image.open(out / row["path"]) as opened:
                    frame = opened.convert("RGB").resize((WIDE - 4, HIGH - 4))
                sheet.paste(frame, (column * WIDE + 2, top + LABEL))
                colour = COLOURS[row["decision"]]
                scale = frame.width / row["size"][0]
                x0, y0, x1, y1 = (scale * each for each in row["boxes"][0]["xyxy"])
                left, upper = column * WIDE + 2, top + LABEL
                if row["decision"] != "none":
                    pen.rectangle((left + x0, upper + y0, left + x1, upper + y1), outline=colour, width=3)
                said = f"{row['video']['seconds']:.0f} s: {row['decision']} {row['confidence']:.2f}"
                pen.rectangle((left, upper, left + 8 * len(said), upper + 20), fill=colour)
                pen.text((left + 4, upper + 2), said, "white", font)
    sheet.save(HERE / "traps.jpg", quality=75, optimize=True)


if __name__ == "__main__":
    main()
