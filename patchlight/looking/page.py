"""The page of `patchlight look`: its words, its HTML, which needs nothing beside itself, and the folder it lies in."""

import base64
import contextlib
import html
import io
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from string import Template

from PIL import Image

from patchlight.errors import PatchlightError

TEXTS = {
    "patches": (
        "The photo, cut into patches",
        "{grid} patches (down x across), each {pixels} pixels of the model's image; every patch becomes one "
        "token.{unseen} The frame is around {patch}, of which more below.",
    ),
    "heads": (
        "The heads of the last block",
        'How {reader} shares its attention out over the patches, head by head, all on one scale, where "even" is '
        "what each token would get if all got the same. The number is the head's objectness: how much of its attention "
        "lies in one connected region, less the area which that takes; 0 is spread evenly, near 1 is one small spot. "
        "High means compact, not correct.",
    ),
    "layers": (
        "From block to block",
        "The same attention of {reader}, mean over heads, in the order of the blocks (counted from 0), all on one "
        "scale. In later blocks a patch's token has already taken in much from other patches, so a bright spot need "
        "not be about the pixels under it.",
    ),
    "rollout": (
        "Attention rollout",
        "Attention followed back through all blocks, as if each passed on half of what it gets unchanged: how much of "
        "each patch may have reached the answer. It is the same whatever the class, so it does not say what spoke for "
        "one.",
    ),
    "attribution": (
        "What spoke for the likeliest class",
        "Attention weighted by its gradient for the model's first answer, {answer}: bright patches raised it. What "
        "spoke against it is not shown, and a wrong answer has a map that looks as good.",
    ),
    "patch-attention": (
        "Where one patch attends",
        "Where {patch} (framed) took its values from in the last block, mean over heads. Where is not what: it does "
        "not say which values it took.",
    ),
    "patch-similarity": (
        "Which patches are alike to the model",
        "How similar the last block's features of each patch are to those of {patch} (framed); 1 is the same "
        "direction. Parts of one thing often light up together, but features also hold place and surroundings.",
    ),
    "attention-distance": (
        "How far the heads look",
        "Each dot is a head: the mean distance, in pixels of the model's image, from a patch to what it attends to. "
        "Low dots look nearby, as a convolution does, those near the dashed line all over the image. Compare models at "
        "the same image size only.",
    ),
    "position-similarity": (
        "What the model knows about places",
        "Each small picture stands for one patch of a grid of {positions} and shows {likeness} of its position and all "
        "others. A spot that moves along with the patch means that near can be told from far. The photo plays no part "
        "in it.",
    ),
    "token-norms": (
        "How long the tokens are",
        "The norm of each patch's token after the last block. {outliers} Patches far longer than the rest are "
        "artifacts: the model stores something there, and attention to them is not about what they show.",
    ),
    "attention-shares": (
        "Which kind of token gets the attention",
        "How {reader} shares its attention out over the kinds of tokens, block by block, mean over heads. The maps "
        "above show the part of the patches; where that is small, their bright spots weigh little.",
    ),
}
"""Of each picture the title, and in plain words what it shows, how to read it, and what not to conclude."""


SIGNATURE = '<meta name="generator" content="patchlight look">'
"""By which a page of ours is known, before it is replaced."""

PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
$signature
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$photo - patchlight look</title>
<style>
:root { color-scheme: light dark; --ink: #222; --soft: #5f6368; --ground: #fafafa; --card: #fff; --line: #e2e2e2; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --soft: #a2a6ab; --ground: #16181b; --card: #202327; --line: #34383d; }
  .picture { filter: brightness(.88); }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1rem 4rem; max-width: 54rem; background: var(--ground); color: var(--ink);
  font: 1rem/1.55 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 1rem; }
h2 { font-size: 1.1rem; margin: 0 0 .3rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 0 0 1.2rem; font-size: .93rem; }
dt, figcaption, .notes { color: var(--soft); }
dd { margin: 0; white-space: pre-line; }
.hint { margin: 0 0 1.2rem; padding: .6rem .9rem; border-left: 4px solid #b5367a; background: var(--card); }
.notes { font-size: .93rem; }
figure { margin: 1.2rem 0; padding: 1rem; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.picture { overflow-x: auto; margin-top: .8rem; background: #fff; border-radius: 4px; }
img { display: block; margin: 0 auto; max-width: 100%; height: auto; }
@media (max-width: 40rem) { figure { padding: .8rem; } figure:not(#patches) img { max-width: none; width: 34rem; } }
</style>
</head>
<body>
<h1>$photo</h1>
<dl>
$facts</dl>
<p class="hint"><strong>Attention is a hint and not an explanation.</strong> It says where a block took its values
from, not why the model answered as it did.</p>
<div class="notes">
$notes</div>
$figures</body>
</html>
""")


@dataclass(frozen=True)
class Picture:
    """One figure of the page."""

    name: str
    title: str
    caption: str
    png: bytes


@dataclass(frozen=True)
class Look:
    """The pictures in the order of the page, and what stands above them."""

    photo: str
    facts: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    pictures: tuple[Picture, ...]
    page: Path | None = None
    """Where the page was written."""

    def html(self) -> str:
        """The page, whole: the pictures are inside it, and nothing is loaded from anywhere."""
        return PAGE.substitute(
            signature=SIGNATURE,
            photo=_printed(self.photo),
            facts="".join(f"<dt>{_printed(name)}</dt><dd>{_printed(value)}</dd>\n" for name, value in self.facts),
            notes="".join(f"<p>{_printed(note)}</p>\n" for note in self.notes),
            figures="".join(map(_figure, self.pictures)),
        )

    def files(self) -> dict[str, bytes]:
        """The pictures and, last, the page, by the names of their files."""
        pictures = {f"{picture.name}.png": picture.png for picture in self.pictures}
        return pictures | {"index.html": self.html().encode()}


def _figure(picture: Picture) -> str:
    image = Image.open(io.BytesIO(picture.png))
    file = io.BytesIO()
    image.convert("RGB").save(file, "JPEG", quality=90, subsampling=0)
    # A chart is smaller as PNG, a photo several times smaller as JPEG.
    kind, content = min(("jpeg", file.getvalue()), ("png", picture.png), key=lambda form: len(form[1]))
    width, height = (side * 2 // 3 for side in image.size)  # 800 pixels at most, and sharp on a dense screen
    return (
        f'<figure id="{picture.name}">\n<h2>{_printed(picture.title)}</h2>\n'
        f"<figcaption>{_printed(picture.caption)}</figcaption>\n"
        f'<div class="picture"><img alt="{_printed(picture.title)}" width="{width}" height="{height}" '
        f'src="data:image/{kind};base64,{base64.b64encode(content).decode()}"></div>\n</figure>\n'
    )


def _printed(text: str) -> str:
    """Text as it is read, whatever is in it: tags, quotes, the bytes of a file name that is not UTF-8."""
    return html.escape(text.encode(errors="replace").decode())


def check_folder(folder: Path) -> None:
    """Refuse a folder in which somebody else's files would be overwritten."""
    with _naming(folder):
        if not folder.exists():
            return
        if not folder.is_dir():
            raise PatchlightError(f"{folder}: is a file; name a folder for the page and its pictures")
        page = folder / "index.html"
        if page.is_file() and SIGNATURE.encode() in page.read_bytes()[:1000]:
            return
        for name in _own_names():
            if (folder / name).exists():
                raise PatchlightError(f"{folder}: holds {name}, which is not from a look; name another folder")


def write(look: Look, folder: Path) -> None:
    """The page and its pictures into a folder, each whole or not at all; other files in it are left alone."""
    files = look.files()
    check_folder(folder)
    with _naming(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        there = folder.is_dir()
        with tempfile.TemporaryDirectory(prefix=".look-", dir=folder if there else folder.parent) as temporary:
            staged = Path(temporary) / "look"
            staged.mkdir()
            for name, content in files.items():
                (staged / name).write_bytes(content)
            if not there:
                staged.rename(folder)
                return
            for name in files:
                (staged / name).replace(folder / name)
            for name in _own_names() - files.keys():  # of an earlier look, by another model
                (folder / name).unlink(missing_ok=True)


def _own_names() -> set[str]:
    return {f"{name}.png" for name in TEXTS} | {"index.html"}


@contextlib.contextmanager
def _naming(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PatchlightError(f"{folder}: cannot be written ({error.strerror or error})") from None
