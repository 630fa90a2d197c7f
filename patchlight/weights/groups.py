"""What classes have in common: animals, vehicles, things; and what to call a photo by as much as is certain of it.

A model's classes may belong to groups, written as paths: "animal", or finer "animal/bird". The first part is the group
that photos are sorted by. A class whose group is not known, or that is mixed, is of the group "unknown".
"""

import csv
import functools
import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchlight.errors import PatchlightError, and_more
from patchlight.files import open_table

UNKNOWN = "unknown"

EMPTY = "empty"
"""The group of classes that show nothing: a photo of it is `none`."""

MOVING = ("animal", "person", "vehicle")
"""Groups of what comes and goes."""

SURE = 0.5
"""The least share of the probability that a group or a name is said with, where nothing was measured: no two can have
more."""


@dataclass(frozen=True, slots=True)
class Named:
    """The group and name that a model gives a photo."""

    group: str | None
    """Of the classes that have enough of the probability together, see `Groups`; "unknown" where no group has, None
    where the model has none."""
    group_confidence: float | None
    """Summed probability of the group's classes; None if the group is unknown."""
    label: str | None
    """The finest name with enough of the probability: a class in words, or a part of the group, "bird"."""
    label_confidence: float | None

    def words(self) -> list[str]:
        """As text: "animal 97.1%, bird 95.0%;"."""
        group = self.group or UNKNOWN
        if self.group_confidence is not None:
            group += f" {self.group_confidence:.1%}"
        return [f"{group};"] if self.label is None else [f"{group},", f"{self.label} {self.label_confidence:.1%};"]

    def to_dict(self) -> dict[str, Any]:
        return {
            "group": self.group,
            "group_confidence": _rounded(self.group_confidence),
            "label": self.label,
            "label_confidence": _rounded(self.label_confidence),
        }


@dataclass(frozen=True)
class Groups:
    """The group of each class of a model."""

    labels: tuple[str, ...]
    paths: tuple[str, ...]
    """One a label, such as "animal/bird"; "unknown" where it is not known. Where all are, photos have labels alone."""
    group_from: float = SURE
    """The least probability that a group is said with; measured ones are right 9 times of 10 from there on."""
    label_from: float = SURE
    """The least probability at which a name (a part of the group, or a class) is given."""

    def __post_init__(self) -> None:
        if not SURE <= self.group_from <= self.label_from <= 1:  # else a name could be said without its group
            raise PatchlightError(
                f"group_from={self.group_from} and label_from={self.label_from} must be probabilities from {SURE} to "
                "1, the first not the larger"
            )
        if len(self.paths) != len(self.labels):
            raise PatchlightError(f"{len(self.paths)} groups were given for {len(self.labels)} classes")
        for path in self.paths:
            _check_path(path)

    @functools.cached_property
    def words(self) -> tuple[str, ...]:
        """The labels in readable form, see `in_words`; unchanged if there are no groups."""
        return in_words(self.labels, self.paths) if self.nodes else self.labels

    @functools.cached_property
    def nodes(self) -> tuple[str, ...]:
        """Every group and every part of one, as paths, a group before its parts."""
        parts = [path.split("/") for path in self.paths if path != UNKNOWN]
        return tuple(sorted({"/".join(each[:depth]) for each in parts for depth in range(1, len(each) + 1)}))

    @property
    def names(self) -> tuple[str, ...]:
        """The groups that photos are sorted by, "unknown" left out."""
        return tuple(node for node in self.nodes if "/" not in node)

    @functools.cached_property
    def _member_KG(self) -> Tensor:
        """1 where class k belongs to node g, else 0."""
        rows = [[path == node or path.startswith(f"{node}/") for node in self.nodes] for path in self.paths]
        return torch.tensor(rows, dtype=torch.float32).reshape(len(self.paths), len(self.nodes))

    def fingerprint(self) -> str:
        """Differs for other labels or groups."""
        parts = [self.labels, self.paths, *([self.group_from, self.label_from] if self.is_measured else [])]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    @property
    def is_measured(self) -> bool:
        return (self.group_from, self.label_from) != (SURE, SURE)

    @property
    def said_from(self) -> dict[str, float]:
        """The two thresholds, as written to config.json."""
        return {"group": self.group_from, "label": self.label_from}

    def sums(self, logits_BK: Tensor) -> Tensor:
        """The summed probability of each node: sums_BG, float32, on the logits' device."""
        return self._sums(logits_BK.float().softmax(1))

    def _sums(self, shares_BK: Tensor) -> Tensor:
        return shares_BK @ self._member_KG.to(shares_BK.device)

    def named(self, logits_BK: Tensor) -> list[Named]:
        """The group and name of each photo, from its logits."""
        shares_BK = logits_BK.float().softmax(1)
        sums_BG = self._sums(shares_BK)
        best_B, index_B = shares_BK.max(1)
        return [
            self._named(dict(zip(self.nodes, sums, strict=True)), best, self.words[index])
            for sums, best, index in zip(sums_BG.tolist(), best_B.tolist(), index_B.tolist(), strict=True)
        ]

    def _named(self, sums: dict[str, float], best: float, words: str) -> Named:
        # A part has no more than its group, so that what is sure is one path; sorted, it ends with the finest.
        top = next((node for node in self.names if sums[node] >= self.group_from), None)
        sure = [node for node in self.nodes if sums[node] >= self.label_from]
        fine = [node for node in sure if top is not None and node.startswith(f"{top}/")]
        name, confidence = (fine[-1].rpartition("/")[2], sums[fine[-1]]) if fine else (None, None)
        if best >= self.label_from:
            name, confidence = words, best
        if name == top:  # the class of all that is a person, say, and no finer than the group
            name, confidence = None, None
        return Named(
            group=top or (UNKNOWN if self.nodes else None),
            group_confidence=None if top is None else min(1.0, sums[top]),
            label=name,
            label_confidence=confidence,
        )


def in_words(labels: Sequence[str], groups: Sequence[str]) -> tuple[str, ...]:
    """Labels such as "bird/199.Winter_Wren", of a data set and its class, as people say them: "Winter Wren (bird)".

    In brackets is the finest part of the class's group ("animal/bird"), where the name does not have it. Other labels
    stay as they are, and so do those that two classes would share the words of.
    """
    words = [_in_words(label, group) for label, group in zip(labels, groups, strict=True)]
    count = Counter(words)
    return tuple(each if count[each] == 1 else label for each, label in zip(words, labels, strict=True))


def _in_words(label: str, group: str) -> str:
    data_set, slash, own = label.partition("/")
    if not slash or "/" in own or not re.fullmatch(r"[a-z][\w-]+", data_set):  # "20 km/h" is no class of a set "20 km"
        return label
    name = re.sub(r"^\d+\.(?=[^\W\d_])", "", own).replace("_", " ").strip()
    if not re.search(r"[^\W\d_]", name) or name.lower() == "other":  # says nothing without its set
        name = f"{data_set} {name}".replace("_", " ").strip()
    part = group.rpartition("/")[2] if "/" in group else ""
    return name if part.lower() in name.lower() else f"{name} ({part})"


def read_groups(path: str | Path, labels: Sequence[str]) -> Groups:
    """The groups of these labels by a CSV with the columns label and group.

    A label may have the signs `*` and `?` (`bird/*`); a row with the very label counts, else the first that fits. A
    label that no row fits is of the group "unknown".
    """
    rows = _read_table(Path(path))
    exact = dict(reversed(rows))
    paths = []
    for label in labels:
        fitting = (group for pattern, group in rows if _fits(label, pattern))
        paths.append(exact[label] if label in exact else next(fitting, UNKNOWN))
    if all(group == UNKNOWN for group in paths):
        raise PatchlightError(f"{path}: no row fits any of the {len(labels)} classes, such as {labels[0]!r:.80}")
    return Groups(tuple(labels), tuple(paths))


def groups_by_name(labels: Sequence[str]) -> Groups | None:
    """The groups of classes that are called like one: person, vehicle, animal, empty.

    Beside `empty`, classes that are called otherwise are of the group "unknown"; without it there are none then.
    """
    own = [label.strip().lower() for label in labels]
    paths = tuple(name if name in (*MOVING, EMPTY) else UNKNOWN for name in own)
    if (UNKNOWN in paths and EMPTY not in paths) or len(set(own)) < len(own):
        return None
    return Groups(tuple(labels), paths)


def gaps_of(path: str | Path, labels: Sequence[str]) -> list[str]:
    """A line for each row without labels and each label without a row, most of which are typing mistakes."""
    patterns = [pattern for pattern, _ in _read_table(Path(path))]
    without = [label for label in labels if not any(_fits(label, each) for each in patterns)]
    idle = [each for each in patterns if not any(_fits(label, each) for label in labels)]
    lines = []
    if without:
        lines.append(f"{path}: no row fits {_few(without)} of the {len(labels):,} classes, so they are {UNKNOWN}")
    if idle:
        lines.append(f"{path}: no class is called {_few(idle)}, so these rows do nothing")
    return lines


def _few(names: Sequence[str]) -> str:
    return ", ".join(f"{name!r:.80}" for name in names[:3]) + and_more(len(names), 3)


def _read_table(path: Path) -> list[tuple[str, str]]:
    _, reader = open_table(path)
    try:
        lines = [[cell.strip() for cell in row] for row in reader if any(row)]
    except csv.Error as error:
        raise PatchlightError(f"{path}: is not CSV ({error})") from None
    header = [name.lower() for name in lines[0]] if lines else []
    if "label" not in header or "group" not in header:
        raise PatchlightError(f"{path}: its first line must name the columns label,group")
    rows = []
    for row in lines[1:]:
        cells = dict(zip(header, row, strict=False))
        try:
            _check_path(cells.get("group", ""))
        except PatchlightError as error:
            raise PatchlightError(f"{path}: the row of {cells.get('label', '')!r:.80} {error}") from None
        rows.append((cells.get("label", ""), cells["group"]))
    return rows


def _fits(label: str, pattern: str) -> bool:
    """Whether the label is the pattern, where `*` is any signs and `?` any one; brackets are nothing special."""
    signs = {"*": ".*", "?": "."}
    return re.fullmatch("".join(signs.get(sign) or re.escape(sign) for sign in pattern), label, re.DOTALL) is not None


def _check_path(path: Any) -> None:
    parts = path.split("/") if isinstance(path, str) else []
    unknown = [part for part in parts if part.lower() == UNKNOWN]
    if not parts or not all(part.strip() == part and part for part in parts) or (unknown and path != UNKNOWN):
        raise PatchlightError(f"has the group {path!r:.80}; write a name, such as animal, animal/bird, or unknown")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
