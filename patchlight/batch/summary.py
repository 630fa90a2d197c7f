"""What a run came to: the files that are written when all photos have their rows."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patchlight.batch.formats import export, file_of
from patchlight.batch.inputs import Inputs
from patchlight.batch.overlay import remove_overlays
from patchlight.batch.report import write_report
from patchlight.batch.results import Journal, ResultFolder, digest, read_json
from patchlight.batch.rows import Row
from patchlight.weights.load import Loaded


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run came to."""

    folder: Path
    photos: int
    computed: int
    """By this call; the others were there."""
    failed: int
    decisions: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    crops: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    """Files in the folders that are no photos, by their endings, see `Inputs`."""
    crops_of_others: int = 0
    """Crops of earlier runs, still there, whose photos are no longer among the inputs."""
    bursts: dict[str, int] | None = None
    """Of camera traps: how many bursts there are, how many of them are `empty`, how many `empty_frames`, and how many
    frames are `untimed`: neither EXIF nor the name has a time that can be, and the file's own was taken."""
    groups: dict[str, int] | None = None
    """How many photos with a find show what, by a model whose classes have groups."""
    seconds: float = 0.0
    rate: float = 0.0
    report: Path | None = None
    exports: tuple[Path, ...] = ()

    @property
    def exit_code(self) -> int:
        return 3 if self.failed else 0


def earlier_summary(
    folder: ResultFolder, inputs: Inputs, journal: Journal, formats: Sequence[str], *, report: bool
) -> Summary | None:
    """The summary of a run that has written everything that is asked for; None if something is to be written."""
    summary = read_json(folder.summary)
    finished = read_json(folder.finished)
    wanted = [folder.results, folder.table] + [folder.path / "report.html"] * report
    if summary is None or finished is None or not set(formats) <= set(summary.get("exports", ())):
        return None
    if not all(path.exists() for path in [*wanted, *(folder.path / file_of(each) for each in formats)]):
        return None
    if finished.get("inputs_sha256") != digest(inputs.photos, journal):
        return None
    left = {"skipped": inputs.skipped, "crops_of_others": folder.crops_of_others(inputs.photos, journal)}
    if any(summary.get(name) != value for name, value in left.items()):
        return None
    return Summary(
        folder=folder.path,
        photos=summary["photos"],
        computed=0,
        failed=summary["status"]["error"],
        decisions=summary["decisions"],
        reasons=summary["reasons"],
        crops=summary["crops"],
        skipped=summary["skipped"],
        crops_of_others=summary["crops_of_others"],
        bursts=summary.get("bursts"),
        groups=summary.get("groups"),
        report=folder.path / "report.html" if report else None,
        exports=tuple(folder.path / file_of(each) for each in formats),
    )


def finish(
    folder: ResultFolder,
    inputs: Inputs,
    journal: Journal,
    loaded: Loaded,
    made_with: dict[str, Any],
    computed: int,
    seconds: float,
    formats: Sequence[str],
    *,
    report: bool,
) -> Summary:
    photos = inputs.photos
    sha256 = digest(photos, journal)
    if (read_json(folder.finished) or {}).get("inputs_sha256") != sha256:
        remove_overlays(folder.path)  # they go by the number of a row, which from here on may be another photo's
    folder.write_rows(lambda: (journal.row(photo) for photo in photos), bursts=made_with["burst"])
    counts = _counted(journal.row(photo) for photo in photos)
    # What an earlier call wrote is kept up to date.
    earlier = (read_json(folder.summary) or {}).get("exports", ())
    written = list(dict.fromkeys([*formats, *(each for each in earlier if (folder.path / file_of(each)).exists())]))
    exports = tuple(export(folder.path, each, base=inputs.base, detector=loaded.provenance.source) for each in written)
    page = write_report(folder.path) if report else None
    failed = sum(counts.reasons.values())
    crops_of_others = folder.crops_of_others(photos, journal)
    rate = computed / seconds if computed and seconds > 0 else 0.0
    bursts = counts.of_bursts() if made_with["burst"] else None
    groups = None if loaded.groups is None else dict(sorted(counts.groups.items()))
    values = {
        "version": 1,
        "photos": len(photos),
        "status": {"ok": len(photos) - failed, "error": failed},
        "decisions": dict(counts.decisions),
        "reasons": dict(sorted(counts.reasons.items())),
        "crops": counts.crops,
        "crops_of_others": crops_of_others,
        "skipped": inputs.skipped,
        **({} if bursts is None else {"bursts": bursts}),
        **({} if groups is None else {"groups": groups}),
        "settings": {name: value for name, value in made_with.items() if not name.startswith("model")},
        "model": {
            "source": loaded.provenance.source,
            "origin": loaded.provenance.origin,
            "sha256": loaded.provenance.sha256,
            "licence": loaded.provenance.licence,
        },
        "base": inputs.base,
        "exports": written,
    }
    folder.write_json(folder.summary, values)
    # Last: it says that all the others are there. What differs from run to run is here, and nowhere else.
    finished = {
        "inputs_sha256": sha256,
        "computed": computed,
        "seconds": round(seconds, 2),
        "photos_per_second": round(rate, 2),
    }
    folder.write_json(folder.finished, finished)
    return Summary(
        folder=folder.path,
        photos=len(photos),
        computed=computed,
        failed=failed,
        decisions=dict(counts.decisions),
        reasons=dict(counts.reasons),
        crops=counts.crops,
        skipped=inputs.skipped,
        crops_of_others=crops_of_others,
        bursts=bursts,
        groups=groups,
        seconds=seconds,
        rate=rate,
        report=page,
        exports=exports,
    )


@dataclass
class _Counts:
    """What the rows say, counted."""

    decisions: Counter[str]
    reasons: Counter[str]
    groups: Counter[str]
    crops: int = 0
    untimed: int = 0
    """Frames whose time is their file's own."""
    empty: dict[str, bool] = field(default_factory=dict)
    """Whether each burst is."""

    def of_bursts(self) -> dict[str, int]:
        return {
            "count": len(self.empty),
            "empty": sum(self.empty.values()),
            "empty_frames": self.decisions["none"],
            "untimed": self.untimed,
        }


def _counted(rows: Iterable[Row]) -> _Counts:
    counts = _Counts(Counter(dict.fromkeys(("subject", "several", "unsure", "none"), 0)), Counter(), Counter())
    for row in rows:
        counts.crops += len(row["crops"])
        if row["status"] != "ok":
            counts.reasons[row["reason"]] += 1
            continue
        counts.decisions[row["decision"]] += 1
        if row["decision"] != "none":  # of an empty scene nobody wants to know what it resembles
            counts.groups[row["group"]] += 1
        if burst := row.get("burst"):
            counts.untimed += burst["clock"] == "file"
            counts.empty[burst["id"]] = counts.empty.get(burst["id"], True) and row["decision"] == "none"
    return counts
