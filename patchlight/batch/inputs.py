"""Which photos a run is about, in which order, and where the crops of each go.

What is named is taken, whatever it is: it gets a row, if only one that says why not; what is not there is a mistake. In
folders, everything that ends like a photo is taken, nothing that is hidden, and the rest is counted.
"""

import glob
import hashlib
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from patchlight.errors import PatchlightError
from patchlight.files import printable
from patchlight.images.containers import holds_photos, members, place_of
from patchlight.images.crop import SUFFIXES
from patchlight.images.decode import PHOTO_SUFFIXES
from patchlight.remote import as_given, as_path, is_remote, listed, name_in

_MOST_BYTES = 200
"""Of a crop's name, so that a number, a suffix and a temporary name still fit into the 255 that file systems allow."""

_UNNAMED = ".photo"
"""Marks the name of a photo that does not end like one."""

_NUMBERED = re.compile(r"\.crop\d+\.[^.]+\Z", re.ASCII | re.IGNORECASE)


WRITTEN_FOLDERS = ("crops", "sorted", "thumbs", "overlays", "frames", ".run")
CORRECTIONS = "corrections.jsonl"
LABELS = "labels.csv"
"""Lie in the folder of a run, and are the user's own, see overrides.py."""

WRITTEN_FILES = (
    *("results.jsonl", "results.csv", "summary.json", "report.html"),
    *("results.json", "results.parquet", "megadetector.json", "coco.json"),
)
"""All that a run may write into its folder."""


@dataclass(frozen=True, slots=True)
class Input:
    """A file that gets a row."""

    path: str
    """As it was given, or found in what was given; bytes that are not UTF-8 are surrogates, as everywhere in Python."""
    file: str
    """The absolute path."""
    place: str = ""
    """Where its crops go, relative to crops/: the path below the folder that all inputs share."""
    found: bool = True
    """Whether it was there when the run began."""
    trouble: str | None = None
    """Why what is in this folder cannot be listed."""
    stamp: tuple[int, int] | None = None
    """Of a photo that lies elsewhere, or in another file: what it was known by when it was listed."""


@dataclass(frozen=True, slots=True)
class Inputs:
    photos: tuple[Input, ...]
    base: str
    """The absolute path of the folder that all of them are in."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Files in folders that do not end like a photo: how many with which ending, the most frequent first."""
    named: tuple[str, ...] = ()
    """The absolute paths of the files that were given each by its name."""


def find_photos(
    paths: Sequence[str | os.PathLike[str]],
    out: Path | None = None,
    known: Callable[[], Collection[str]] = tuple,
    suffixes: frozenset[str] = PHOTO_SUFFIXES,
) -> Inputs:
    """The files behind files, folders and patterns (`photos/**/*.jpg`), each once, in their order; folders by name.

    What a run has written to `out` is left out, wherever that is. A path that is not there is refused, unless it is
    `known` (by its absolute path) to an earlier run, which this one goes on with: the file has gone since.
    """
    given = [as_given(path) for path in paths]
    if not given:
        raise PatchlightError("no photos were given; name files or folders")
    written = set() if out is None else {os.path.realpath(out / name) for name in WRITTEN_FOLDERS}
    photos: dict[str, Input] = {}
    others: set[str] = set()
    roots: list[str] = []
    files: dict[str, None] = {}
    for path in given:
        if not path or "\0" in path:
            raise PatchlightError(f"{path!r}is not a path; name files or folders")
        if is_remote(path):
            root, found, named_alone = _elsewhere(path, others)
            roots.append(root)
            for each in found:
                photos.setdefault(each.file, each)
                if named_alone:
                    files[each.file] = None
            continue
        for named in _expanded(path):
            absolute = absolute_path(named)
            if _is_below(named, written):
                if named == path:
                    raise PatchlightError(
                        f"{printable(named)}: is in the folder that this run writes its crops to; name another folder "
                        "with --out"
                    )
            elif os.path.isdir(named):
                roots.append(absolute)
                before = set(others)
                inside = list(_in_folder(named, written, others, suffixes))
                for each in inside or _in_shards(others - before, others):
                    photos.setdefault(each.file, each)
            elif holds_photos(named):
                roots.append(os.path.dirname(absolute))
                for each in _members(named, absolute):
                    photos.setdefault(each.file, each)
            else:
                roots.append(os.path.dirname(absolute))
                if named == path:
                    files[absolute] = None
                photos.setdefault(absolute, Input(named, absolute, found=_is_there(named)))
    gone = [photo for photo in photos.values() if not photo.found]
    before = set(known()) if gone else set()
    for photo in gone:
        if photo.file not in before:
            raise PatchlightError(
                f"{printable(photo.path)}: there is no such file or folder; correct the path or leave it out"
            )
    if not photos:
        kinds = ", ".join(sorted(suffixes))
        raise PatchlightError(
            f"{printable(given[0])}: holds no photos (files that end in {kinds}); name another folder"
        )
    endings = Counter(os.path.splitext(file)[1].lower() for file in others - photos.keys())
    skipped = dict(sorted(endings.items(), key=lambda each: (-each[1], each[0])))
    return Inputs(tuple(photos.values()), os.path.commonpath(roots), skipped, tuple(files))


def _elsewhere(url: str, others: set[str]) -> tuple[str, list[Input], bool]:
    """The folder of what a URL stands for, written as a path; the photos; and whether it names one file."""
    found = listed(url)
    photos: list[Input] = []
    shards: set[str] = set()
    for file, stamp in found.files:
        name = name_in(file)
        below = as_path(file)[len(found.root) :]
        if holds_photos(name):
            shards.add(file)
        elif found.by_name or os.path.splitext(name)[1].lower() in PHOTO_SUFFIXES:
            if found.by_name or not re.search(r"/\.", below):  # nothing that is hidden
                photos.append(Input(file, file, stamp=stamp))
        else:
            others.add(file)
    if not photos:
        photos = [each for shard in sorted(shards) for each in _members(shard, shard)]
    else:
        others |= shards
    return found.root, photos, found.by_name


def _in_shards(files: set[str], others: set[str]) -> Iterator[Input]:
    """Of a folder that holds no photos, those in its shards and tables."""
    for file in sorted(filter(holds_photos, files), key=os.fsencode):
        others.discard(file)
        yield from _members(file, file)


def _members(path: str, file: str) -> Iterator[Input]:
    for member, stamp in members(file, path):
        yield Input(f"{path}{member}", f"{file}{member}", stamp=stamp)


def path_below(file: str, base: str) -> str:
    """The path of a photo below a folder, also of one that lies elsewhere."""
    return os.path.relpath(place_of(file), base)


def stands_for_several(path: str) -> bool:
    """Whether it is a folder, a pattern, a file of photos, or lies elsewhere and may be any of these."""
    if is_remote(path) or holds_photos(path):
        return True
    return os.path.isdir(path) or (glob.has_magic(path) and not os.path.lexists(path))


def absolute_path(path: str) -> str:
    """Whole, with `..` as the system takes it: of a link to a folder, the one above where the link leads."""
    return os.path.realpath(path) if os.pardir in path.split(os.sep) else os.path.abspath(path)


def _is_there(path: str) -> bool:
    """Also a link to nothing, and what lies in a folder that may not be entered: its row says what is wrong with it."""
    try:
        os.lstat(path)
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def _is_below(path: str, folders: set[str]) -> bool:
    real = os.path.realpath(path)
    return any(real == folder or real.startswith(os.path.join(folder, "")) for folder in folders)


def _expanded(path: str) -> list[str]:
    """What a pattern stands for, where the shell left it as it is; a file with such a name comes first."""
    if os.path.lexists(path) or not glob.has_magic(path):
        return [path]
    matches = sorted(glob.glob(path, recursive=True), key=os.fsencode)
    if not matches:
        raise PatchlightError(f"{printable(path)}: nothing matches this pattern; check it, or name a folder")
    return matches


def _in_folder(root: str, written: set[str], others: set[str], suffixes: frozenset[str]) -> Iterator[Input]:
    """Photos below a folder, by name, folders among them. A link to a folder is followed if it leads out of the root,
    for what is inside is found anyway; no folder is entered twice. The `others`, absolute paths, are added to."""
    real_root = os.path.join(os.path.realpath(root), "")
    entered: set[tuple[int, int]] = set()
    todo: list[tuple[str, bool]] = [(root, True)]  # with the next one last
    while todo:
        path, is_folder = todo.pop()
        absolute = absolute_path(path)
        if not is_folder:
            yield Input(path, absolute)
            continue
        try:
            status = os.stat(path)
            if (status.st_dev, status.st_ino) in entered or os.path.realpath(path) in written:
                continue
            entered.add((status.st_dev, status.st_ino))
            with os.scandir(path) as entries:
                found = {entry.name for entry in entries}
            # What another run has written is none of one's photos.
            found -= {*WRITTEN_FOLDERS, *WRITTEN_FILES, CORRECTIONS, LABELS} if ".run" in found else set()
            names = sorted((name for name in found if not name.startswith(".")), key=os.fsencode)
        except OSError as error:
            yield Input(path, absolute, trouble=f"this folder cannot be listed ({error.strerror})")
            continue
        for name in reversed(names):
            below = os.path.join(path, name)
            folder = _is_folder(below)
            if folder and os.path.islink(below) and os.path.realpath(below).startswith(real_root):
                continue
            if folder or os.path.splitext(name)[1].lower() in suffixes:
                todo.append((below, folder))
            else:
                others.add(absolute_path(below))


def _is_folder(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except OSError:
        return False  # a link in a circle, or to nothing


# Names of crops


def with_places(inputs: Inputs, kept: Mapping[str, str]) -> tuple[Input, ...]:
    """The photos with the places of their crops, no two alike, not even to a file system that ignores case.

    `kept` are the places that files (by absolute path) have from earlier runs into the same folder.
    """
    taken = {place.casefold() for place in kept.values()}
    placed = []
    for photo in inputs.photos:
        place = kept.get(photo.file)
        if place is None:
            place = photo.place or crop_place(photo.file, inputs.base)
            if place.casefold() in taken:
                place = _marked(place, photo.file)
            taken.add(place.casefold())
        placed.append(replace(photo, place=place))
    return tuple(placed)


def crop_place(file: str, base: str) -> str:
    """Where the crops of a file go, unless another's do: its path below the folder that all inputs share."""
    folder, name = os.path.split(path_below(file, base))
    if len(os.fsencode(name)) > _MOST_BYTES:
        name = _marked(name, file)
    return os.path.join(folder, name)


def _marked(place: str, file: str) -> str:
    """The place with a mark that this file alone has, and with no more bytes than a name may have."""
    folder, name = os.path.split(place)
    root, suffix = os.path.splitext(name)
    if len(os.fsencode(suffix)) > 20:
        root, suffix = name, ""
    mark = "~" + hashlib.blake2b(os.fsencode(file), digest_size=8).hexdigest()
    room = _MOST_BYTES - len(mark) - len(os.fsencode(suffix))
    spelt = os.fsencode(root)
    if len(spelt) > room:  # names mostly differ at their ends
        start, end = spelt[: room * 2 // 3], spelt[len(spelt) - room // 3 :]
        return os.path.join(folder, start.decode(errors="ignore") + mark + end.decode(errors="ignore") + suffix)
    return os.path.join(folder, root + mark + suffix)


def crop_name(place: str, number: int, file_format: str, *, numbered: bool = False) -> str:
    """The name of a photo's crop, counted from 1: a.jpg, a.crop2.jpg; x.bmp.crop1.png where the format is another.

    No two photos and numbers give the same. What stands before ".crop" says which photo it is: if it ends in ".photo",
    the name is what is before that; if it ends like a photo, it is the name; else the name has the suffix that follows.
    `numbered` gives also the first one its number.
    """
    root, suffix = os.path.splitext(place)
    same = suffix.lower() in SUFFIXES[file_format]
    if same and number == 1 and not numbered and not _NUMBERED.search(place):
        return place
    if not same or os.path.splitext(root)[1].lower() in PHOTO_SUFFIXES | {_UNNAMED}:
        root = place if suffix.lower() in PHOTO_SUFFIXES else place + _UNNAMED
    return f"{root}.crop{number}{suffix if same else SUFFIXES[file_format][0]}"
