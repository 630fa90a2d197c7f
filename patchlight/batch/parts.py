"""A fixed share of the photos for each of several machines, by a hash of their paths, and what it takes to join them.

Every machine lists all photos and gives each its place, so that the parts fit together without knowing of each other.
"""

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from patchlight.batch.inputs import Input, Inputs, path_below
from patchlight.errors import PatchlightError


@dataclass(frozen=True, slots=True)
class Part:
    """The `number`th of `count`, from 1."""

    number: int
    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count:
            raise PatchlightError(f"part {self} does not exist; write 3/64 for part 3 of 64")

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @classmethod
    def parse(cls, text: str | None) -> "Part | None":
        if text is None:
            return None
        found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
        if found is None:
            raise PatchlightError(f"part {text!r} is not valid; write 3/64 for part 3 of 64")
        return cls(int(found[1]), int(found[2]))

    def holds(self, path: str) -> bool:
        """Whether a photo is in it, by its path below the folder that all inputs share."""
        digest = hashlib.blake2b(os.fsencode(path), digest_size=8).digest()
        return int.from_bytes(digest, "big") % self.count == self.number - 1


def take_part(
    inputs: Inputs, given: str | None, *, folders_whole: bool = False
) -> tuple[Inputs, dict[str, Any] | None]:
    """The photos of a part, and what its folder is to note of them (None where all photos are meant).
    A part of few photos may hold none.

    With `folders_whole` a folder's photos are all in one part: frames of one camera are judged together.
    """
    part = Part.parse(given)
    if part is None:
        return inputs, None
    below = (path_below(photo.file, inputs.base) for photo in inputs.photos)
    numbers = [n for n, path in enumerate(below) if part.holds(os.path.dirname(path) if folders_whole else path)]
    note = {"part": part.number, "of": part.count, "photos": len(inputs.photos), "numbers": numbers}
    note |= {"base": inputs.base, "skipped": inputs.skipped, "named": list(inputs.named)}
    note |= {"files": [[photo.path, photo.file] for photo in map(inputs.photos.__getitem__, numbers)]}
    return replace(inputs, photos=tuple(inputs.photos[number] for number in numbers)), note


def joined(parts: Sequence[tuple[str, dict[str, Any]]]) -> tuple[Inputs, list[int]]:
    """All photos of parts, in the order in which one run would have taken them, and which of the parts each is in;
    `parts` are their names, for messages, and their notes."""
    first_name, first = parts[0]
    for name, note in parts[1:]:
        for key, what in (("of", "parts"), ("photos", "photos"), ("base", "folder of all photos")):
            if note[key] != first[key]:
                raise PatchlightError(
                    f"{name}: is not of the same whole as {first_name} ({what}: {note[key]}, not {first[key]}); join "
                    "parts of one command"
                )
    numbers = [note["part"] for _, note in parts]
    twice = sorted({number for number in numbers if numbers.count(number) > 1})
    if twice:
        raise PatchlightError(f"part {twice[0]}/{first['of']} was named twice; name each part once")
    order: dict[int, tuple[int, list[str]]] = {}
    for index, (_, note) in enumerate(parts):
        order |= {number: (index, named) for number, named in zip(note["numbers"], note["files"], strict=True)}
    if missing := first["photos"] - len(order):
        absent = sorted(set(range(1, first["of"] + 1)) - set(numbers))
        which = ", ".join(f"{number}/{first['of']}" for number in absent[:5])
        raise PatchlightError(
            f"{missing:,} of {first['photos']:,} photos are in parts that were not named ({which}); name them, too"
        )
    each = [order[number] for number in sorted(order)]
    photos = tuple(Input(path, file) for _, (path, file) in each)
    return Inputs(photos, first["base"], first["skipped"], tuple(first["named"])), [index for index, _ in each]
