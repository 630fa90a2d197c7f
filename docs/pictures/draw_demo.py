"""Draw docs/pictures/demo.jpg: the demo photos, each with the heat and the box that the default model finds.

python docs/pictures/draw_demo.py
"""

import json
import tempfile
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, ImageOps

import patchlight as pl

ROOT = Path(__file__).parents[2]
ACROSS, TILE, LINE = 5, (300, 225), 26


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        how = pl.CropRunSettings(overlay=True, report=False)
        pl.crop_photos(ROOT / "demo", folder, pl.CropSettings(boxes_only=True), how)
        rows = [json.loads(line) for line in (Path(folder) / "results.jsonl").read_text().splitlines()]
        overlays = [Image.open(path).copy() for path in sorted((Path(folder) / "overlays").rglob("*.jpg"))]
    down = -(-len(rows) // ACROSS)
    sheet = Image.new("RGB", (ACROSS * TILE[0], down * (TILE[1] + LINE)), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(15)
    for index, (row, overlay) in enumerate(zip(rows, overlays, strict=True)):
        left, top = index % ACROSS * TILE[0], index // ACROSS * (TILE[1] + LINE)
        sheet.paste(ImageOps.pad(overlay, TILE, color="white"), (left, top))
        group = "" if row["group"] in (None, "unknown") else f", {row['group']}"
        name = f"{Path(row['path']).stem}: {row['decision']}{group}"
        draw.text((left + TILE[0] / 2, top + TILE[1] + 3), name, fill="black", font=font, anchor="ma")
    sheet.save(ROOT / "docs" / "pictures" / "demo.jpg", quality=85)


if __name__ == "__main__":
    main()
