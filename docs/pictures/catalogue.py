"""Draw catalogue.jpg: the demo photos as `patchlight crop` cuts them with each option for a catalogue.

python docs/pictures/catalogue.py
"""

import tempfile
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

import patchlight as pl

HERE = Path(__file__).parent
DEMO = HERE.parents[1] / "demo"
SIDE, HIGH = 180, 140
LABEL = 24
OPTIONS = {
    "--aspect 1:1": pl.CropSettings(aspect="1:1"),
    "--size 360x270 --pad white": pl.CropSettings(size="360x270", pad="white"),
    "... --fill --margin 20%": pl.CropSettings(size="360x270", pad="white", fill=True, margin=0.2),
    "... --pad edge": pl.CropSettings(size="360x270", pad="edge", fill=True, margin=0.2),
    "... --scale same": pl.CropSettings(size="360x270", pad="#e8e8e8", scale="same"),
    "--cutout": pl.CropSettings(size="360x270", fill=True, cutout=True, margin=0.1),
    "--background white": pl.CropSettings(size="360x270", fill=True, background="white", margin=0.1),
}


def main() -> None:
    photos = sorted([*DEMO.glob("*.png"), *DEMO.glob("*.jpg")])
    sheet = Image.new("RGB", (len(photos) * SIDE, len(OPTIONS) * (HIGH + LABEL)), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(14)
    model = pl.load("default")
    how = pl.CropRunSettings(workers=0, device="cpu", report=False)
    for line, (name, settings) in enumerate(OPTIONS.items()):
        top = line * (HIGH + LABEL)
        pen.text((6, top + 4), name, "black", font)
        with tempfile.TemporaryDirectory() as out:
            pl.crop_photos(photos, out, settings, how, model=model, reporter=pl.Reporter())
            for column, photo in enumerate(photos):
                (crop,) = Path(out, "crops").glob(f"{photo.stem}.*")
                with Image.open(crop) as opened:
                    cut = opened.convert("RGBA")
                cut.thumbnail((SIDE - 8, HIGH - 6))
                place = column * SIDE + (SIDE - cut.width) // 2, top + LABEL + (HIGH - cut.height) // 2
                # Squares behind what is transparent, as picture editors show it.
                squares = Image.new("RGB", cut.size, "#d8d8d8")
                for y in range(0, cut.height, 8):
                    for x in range(8 * (y // 8 % 2), cut.width, 16):
                        squares.paste("white", (x, y, x + 8, y + 8))
                squares.paste(cut, mask=cut.getchannel("A"))
                sheet.paste(squares, place)
                ends = (place[0] - 1, place[1] - 1, place[0] + cut.width, place[1] + cut.height)
                pen.rectangle(ends, outline="#c0c0c0")
    sheet.save(HERE / "catalogue.jpg", quality=72, optimize=True)


if __name__ == "__main__":
    main()
