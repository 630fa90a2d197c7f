"""What every lesson uses: the photos that come with the project, and a place for the pictures."""

import os
from pathlib import Path

from patchlight.explain.plot import to_png

ROOT = Path(__file__).resolve().parents[1]
OUT = Path(os.environ.get("PATCHLIGHT_LESSONS_OUT", ROOT / "out" / "lessons"))
SMALL = "PATCHLIGHT_LESSONS_SMALL" in os.environ
"""Whether to take fewer photos and steps, as the tests do. What a lesson asserts holds for both."""
SHOWN = []
"""The pictures that were shown, newest last; the pages are made from it."""

PHOTOS = tuple(str(ROOT / "demo" / name) for name in ("chelsea.png", "astronaut.png", "coffee.png", "rocket.jpg"))
"""A cat, an astronaut, a cup of coffee, a rocket."""


def photo(name):
    """The path of one of the photos in demo/, such as photo("chelsea")."""
    return next(str(path) for path in sorted((ROOT / "demo").iterdir()) if path.stem == name)


def show(figure, name):
    """Write a matplotlib figure (or the figure of an axis) to out/lessons/NAME.png, and show it in a notebook."""
    data = to_png(figure)
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"{name}.png"
    path.write_bytes(data)
    SHOWN.append(path)
    print(f"picture: {name}.png")
    try:
        from IPython import get_ipython
        from IPython.display import Image, display
    except ImportError:
        return
    if get_ipython() is not None:
        display(Image(data))
