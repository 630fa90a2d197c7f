"""Photos on their way from file to row, in bounded memory, to be stopped at any moment.

Photos stand in a line, in the order of the inputs. Worker processes read those in front, the model looks at what they
have read, the processes cut the crops, and what is finished leaves the line at its head, into the journal. The line has
a fixed length, so that a folder's size does not matter; and since a row is written after its crops, a process that is
killed has lost what stood in the line, and nothing else.

Of camera traps a row depends on the frames beside it, see sequences.py. There the photos pass through the line twice:
they are looked at, and then cut, sequence by sequence.
"""

import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from patchlight.batch.finder import Finder
from patchlight.batch.inputs import Input, Inputs
from patchlight.batch.overrides import CORRECTED, IMPORTED, Override
from patchlight.batch.pool import Pool
from patchlight.batch.report import thumbnail_name
from patchlight.batch.results import TRANSIENT, Entry, Journal, ResultFolder
from patchlight.batch.rows import Row, error_row, heat_of, row_of
from patchlight.batch.sequences import FrameSequence, FrameStore, Scene, judged, sequences_of
from patchlight.batch.settings import CropRunSettings, CropSettings
from patchlight.batch.video import of_video
from patchlight.batch.work import Crops, Failed, Seen, Stamp, cut_photo, is_unchanged, read_photo, readers, result_of
from patchlight.files import writing
from patchlight.geometry import Box
from patchlight.images.crop import Cut
from patchlight.localizing.detector import Detector, Localization
from patchlight.reporting import Progress, Reporter
from patchlight.signals import Stopped, StopRequest
from patchlight.weights.groups import UNKNOWN

_SYNC_SECONDS = 2.0
"""Between two waits for the disk; a loss of power costs the rows since the last."""

_PROGRESS_SECONDS = 0.5
"""Between two words about steps that may be as short as a row; a stage that takes less goes without saying."""

Stage = Literal["frame", "looking at photo", "photo", "cutting photo", "row", "picture"]
"""What progress is told of. Camera traps are looked at first; all else is done at once, but for what is cut anew by a
correction, or by a scale that all crops have. Then the results are written row by row, and pictures drawn."""

_NOT_YET = "not yet"
"""What the crops of a photo rest on that waits for the scale which all have."""

Step = TypeVar("Step")


def stopped(folder: Path, when: str, signal_number: int) -> Stopped:
    return Stopped(f"{folder}: stopped {when}; run the same command again to continue", signal_number)


@dataclass(frozen=True, eq=False)
class CropRun:
    """What the parts of a run share."""

    folder: ResultFolder
    journal: Journal
    inputs: Inputs
    """Its photos have their places."""
    settings: CropSettings
    how: CropRunSettings
    detector: Detector
    pool: Pool
    asked: StopRequest
    reporter: Reporter
    overrides: Mapping[str, Override] = field(default_factory=dict)
    """What is said of photos, by their absolute paths, instead of what the model finds."""

    def each(self, steps: Iterable[Step], count: int, stage: Stage) -> Iterator[Step]:
        """The same steps of what is done once the photos have their rows, so many: it stops between any two, and says
        how far it is."""
        begun = said = time.monotonic()
        for done, step in enumerate(steps):
            if self.asked.signal:
                raise stopped(self.folder.path, "while the results were written", self.asked.signal)
            now = time.monotonic()
            if now - said >= _PROGRESS_SECONDS and done:
                said, rate = now, done / (now - begun)
                self.say(stage, done, count, f"{rate:,.0f}/s", (count - done) / rate)
            yield step

    def say(self, stage: Stage, done: int, total: int, how: str, seconds_left: float) -> None:
        self.reporter.progress(Progress(what=stage, done=done, total=total, how=how, seconds_left=seconds_left))


@dataclass(slots=True, eq=False)
class _Photo:
    """One that stands in the line; exactly one of the futures is set while something is being done about it."""

    number: int
    input: Input
    reading: "Future[Seen | Failed] | None" = None
    seen: Seen | None = None
    looking: "Future[list[Any | Failed]] | None" = None  # localizations, but of tables
    index: int = 0  # among those that are looked at together
    kept: tuple[Seen, Localization] | None = None  # of camera traps, until the whole sequence was looked at
    cutting: "Future[Crops | Failed] | None" = None
    stamp: Stamp | None = None
    row: Row | None = None
    found: Row | None = None  # by the model, where it is another
    mark: str | None = None  # what the crops rest on, see Entry.cut
    encoded: int = 0  # of its crops, where they should not have been
    burst: dict[str, Any] | None = None  # what the row says of it
    group: str | None = None
    done: bool = False

    def fail(self, failed: Failed) -> None:
        self.seen = self.burst = self.found = self.mark = None
        self.stamp = failed.stamp
        reason = "gone" if failed.reason == "missing" and self.input.found else failed.reason
        self.row = error_row(self.input.path, reason, failed.detail)
        self.done = True


class CropPipeline:
    """The photos of a run, those that stand in line, and what becomes of them."""

    whole = False
    """Whether photos are decoded whole, and not just as large as the model needs them."""

    def __init__(self, run: CropRun, finder: Finder, cut: Cut, book: FrameStore | None) -> None:
        self.run, self.finder, self.cut, self.book = run, finder, cut, book
        self.folder, self.journal, self.pool = run.folder, run.journal, run.pool
        self.settings, self.photos, self.thumbs = run.settings, run.inputs.photos, run.how.report and run.how.thumbs
        if book is not None:
            # The frames of a camera have no transparent background, and all of them are judged by their heat.
            finder.detector = replace(finder.detector, uses_alpha=False)
        self.longest_line = 2 * self.pool.workers + 3 * finder.at_once * finder.threads + 2
        self.line: deque[_Photo] = deque()
        self.stage: Stage = "photo"
        self.failures: set[int] = set()
        """Numbers of the photos that could not be looked at."""
        self.written = 0
        """Rows."""
        self.seconds = 0.0

    def work(self, elsewhere: Callable[[Sequence[Input]], int] | None = None) -> int:
        """Give each photo its row that has none; how many these were. `elsewhere` has it done by others, see on_ray.py,
        and says how many it has given."""
        photos = list(enumerate(self.photos))
        if self.book is None:
            todo = [each for each in photos if not self._is_done(each[1])]
            if elsewhere is None:
                self._pass((self._read(*each) for each in todo), len(todo), "photo")
            elif todo:
                begun = time.monotonic()
                self.written += elsewhere([photo for _, photo in todo])
                self.seconds += time.monotonic() - begun
            self._cut_again()
            return self.written
        # What failed stays so until its file changes, and takes no part in its sequence.
        looked = {number: photo for number, photo in photos if self._has_look(photo)}
        todo = [(number, photo) for number, photo in photos if number not in looked and not self._is_done(photo)]
        self._pass((self._read(*each) for each in todo), len(todo), "looking at photo")
        looked |= {number: photo for number, photo in todo if number not in self.failures}
        waiting: list[tuple[FrameSequence, set[int]]] = []
        for sequence in sequences_of(dict(sorted(looked.items())), self.book):
            missing = {n for n in sequence.members if not self._is_done(looked[n], sequence.digest)}
            if missing:
                waiting.append((sequence, missing))
        self._pass(self._judged(waiting), sum(len(missing) for _, missing in waiting), "photo")
        self._cut_again()
        return self.written

    def _cut_again(self) -> None:
        """Give photos the crops that their rows ask for by now: after a correction, or at a scale that all have."""
        same = self.settings.scale == "same" and not self.settings.boxes_only
        entries = self.journal.entries
        found = [
            (number, photo)
            for number, photo in enumerate(self.photos)
            if (entry := entries.get(photo.file)) is not None and entry.reason is None and photo.trouble is None
        ]
        if same:
            self.cut = replace(self.cut, scale=self._common_scale([photo for _, photo in found]))
        todo = [
            (number, photo)
            for number, photo in found
            if same or self.run.overrides.get(photo.file) is not None or entries[photo.file].cut is not None
        ]
        todo = [(number, photo) for number, photo in todo if entries[photo.file].cut != self._said(photo)[1]]
        self._pass((self._to_cut(*each) for each in todo), len(todo), "cutting photo")

    def _common_scale(self, photos: Sequence[Input]) -> float:
        """At which the largest subject with its margin fills an exact size; what is smaller appears smaller."""
        alone = replace(self.cut, fill=True, scale=None)
        scales = []
        assert alone.exact is not None
        for photo in photos:
            row, _ = self._said(photo)
            for box in self._boxes_to_cut(row):
                left, _, right, _ = alone.region(box, (row["size"][1], row["size"][0]))
                scales.append(alone.exact[0] / (right - left))
        scale = min(scales, default=1.0)
        return float(f"{scale if self.settings.fill else min(scale, 1.0):.6g}")

    def _said(self, photo: Input) -> tuple[Row, str | None]:
        """The row of a photo without its crops, and what these will rest on."""
        row, override = self.journal.found(photo), self.run.overrides.get(photo.file)
        if override is not None:
            row = override.applied(row)
        return row, self._mark(row, override)

    def _mark(self, row: Row, override: Override | None) -> str | None:
        marks = [] if override is None else [override.mark]
        if self.settings.scale == "same" and self._boxes_to_cut(row):
            marks.append(_NOT_YET if self.cut.scale is None else f"scale {self.cut.scale}")
        return ", ".join(marks) or None

    def _to_cut(self, number: int, photo: Input) -> _Photo:
        entry = self.journal.entries[photo.file]
        waiting = _Photo(number, photo, stamp=entry.stamp, group=entry.group)
        row = self.journal.found(photo)
        waiting.burst = row.get("burst")
        self._cut_row(waiting, row)
        return waiting

    def _is_done(self, photo: Input, group: str | None = None) -> bool:
        """Whether there is a row for the photo as it is now, made together with this group of frames."""
        entry = self.journal.entries.get(photo.file)
        if entry is None or entry.reason in TRANSIENT or photo.trouble is not None or entry.group != group:
            return False
        if entry.reason == "unsupported" and entry.readers != readers():
            return False  # what reads it may be there by now
        return is_unchanged(photo, entry.stamp) and self.folder.has_crops(entry)

    def _has_look(self, photo: Input) -> bool:
        assert self.book is not None
        entry = self.book.entries.get(photo.file)
        return entry is not None and photo.trouble is None and is_unchanged(photo, entry.stamp)

    def _pass(self, photos: Iterator[_Photo], count: int, stage: Stage) -> None:
        """Take these photos through the line."""
        if not count:
            return
        if stage != "cutting photo":
            self.finder.get_ready()
        begun = synced = time.monotonic()
        self.stage = stage
        if self.thumbs:
            with writing(self.folder.thumbs):
                self.folder.thumbs.mkdir(exist_ok=True)
        entered = left = failed = 0
        one_thread = partial(torch.set_num_threads, 1) if self.finder.device.type == "cpu" else None
        before = torch.get_num_threads()
        with ThreadPoolExecutor(self.finder.threads, initializer=one_thread) as self.looks:
            try:
                while left < count:
                    if signal_number := self.run.asked.signal:
                        self._sync()
                        done = len(self.photos) - count + left
                        raise stopped(self.folder.path, f"after {done} of {len(self.photos)} photos", signal_number)
                    while entered < count and len(self.line) < self.longest_line:
                        self.line.append(next(photos))
                        entered += 1
                    moved = [self._move(photo) for photo in self.line if not photo.done]
                    self._look(last=entered == count)
                    new = self._leave()
                    left += len(new)
                    failed += sum(photo.row is not None and photo.row["status"] == "error" for photo in new)
                    if new:
                        rate = left / max(time.monotonic() - begun, 1e-9)
                        done = len(self.photos) - count + left
                        how = f"{rate:.1f} photos/s" + (f", {failed:,} failed" if failed else "")
                        self.run.say(stage, done, len(self.photos), how, (count - left) / rate)
                    if time.monotonic() - synced > _SYNC_SECONDS:
                        self._sync()
                        synced = time.monotonic()
                    if not new and not any(moved):
                        busy = [each for photo in self.line for each in _futures(photo)]
                        wait(busy, timeout=0.2, return_when=FIRST_COMPLETED)
            except BaseException:
                self.looks.shutdown(wait=True, cancel_futures=True)
                raise
            finally:
                torch.set_num_threads(before)
                self.seconds += time.monotonic() - begun
        self._sync()

    def _sync(self) -> None:
        if self.book is not None:
            self.book.sync()  # before the rows that rest on them
        self.journal.sync()

    # Photos enter the line

    def _read(self, number: int, photo: Input) -> _Photo:
        new = _Photo(number, photo)
        if photo.trouble is not None:
            new.fail(Failed("unreadable", photo.trouble))
        else:
            thumb = self.folder.thumbs / thumbnail_name(photo.place) if self.thumbs else None
            config = self.finder.detector.loaded.preprocess.config
            new.reading = self.pool.submit(read_photo, photo.file, config, thumb, self.book is not None, self.whole)
        return new

    def _judged(self, sequences: Iterable[tuple[FrameSequence, set[int]]]) -> Iterator[_Photo]:
        """The photos of sequences that have no rows yet, one sequence being judged ahead of those in the line."""
        assert self.book is not None
        judging: deque[tuple[FrameSequence, set[int], Future[list[tuple[Localization, Scene]]]]] = deque()
        for sequence, missing in sequences:
            files = [self.photos[number].file for number in sequence.members]
            future = self.looks.submit(
                judged,
                [self.book.look(file, self.finder.detector) for file in files],
                sequence.places,
                [self.book.entries[file].frame.time for file in files],
                self.finder.detector,
            )
            judging.append((sequence, missing, future))
            if len(judging) == 2:
                yield from self._with_finds(*judging.popleft())
        while judging:
            yield from self._with_finds(*judging.popleft())

    def _with_finds(
        self, sequence: FrameSequence, missing: set[int], judging: "Future[list[tuple[Localization, Scene]]]"
    ) -> Iterator[_Photo]:
        assert self.book is not None
        finds = zip(sequence.members, sequence.places, judging.result(), strict=True)
        for number, place, (found, scene) in sorted(finds, key=lambda each: each[0]):
            if number not in missing:
                continue
            photo = _Photo(number, self.photos[number], group=sequence.digest)
            entry = self.book.entries[photo.input.file]
            photo.stamp = entry.stamp
            photo.burst = asdict(place) | asdict(scene)
            if self.settings.second_look and found.subjects:
                photo.looking = self.looks.submit(self.finder.look_again_at, photo.input.file, found)
            else:
                self._cut(photo, found)
            yield photo

    # On their way

    def _move(self, photo: _Photo) -> bool:
        """Take a photo as far as it goes without waiting; whether that was any further."""
        if photo.reading is not None and photo.reading.done():
            read = result_of(photo.reading)
            photo.reading = None
            if isinstance(read, Failed):
                photo.fail(read)
            else:
                photo.seen, photo.stamp = read, read.stamp
            return True
        if photo.looking is not None and photo.looking.done():
            found, seen = photo.looking.result()[photo.index], photo.seen
            photo.looking = photo.seen = None
            if isinstance(found, Failed):
                photo.fail(found)
                return True
            if self.stage == "looking at photo":
                assert seen is not None
                photo.kept = seen, found
                photo.done = True
            else:
                self._cut(photo, found)
            return True
        if photo.cutting is not None and photo.cutting.done():
            cut = result_of(photo.cutting)
            photo.cutting = None
            if isinstance(cut, Failed):
                photo.fail(cut)
            else:
                assert photo.row is not None
                photo.row["crops"] = [f"crops/{name}" for name in cut.names]
                places = self._places_to_cut(photo.row)
                photo.row["cuts"] = [{"box": place} | each for place, each in zip(places, cut.cuts, strict=True)]
                photo.encoded = cut.encoded if self.settings.lossless else 0
                photo.done = True
            return True
        return False

    def _cut(self, photo: _Photo, found: Localization) -> None:
        """Write what was found into the row, and have the crops made that it asks for."""
        self._cut_row(photo, row_of(photo.input.path, found))

    def _cut_row(self, photo: _Photo, row: Row) -> None:
        override = self.run.overrides.get(photo.input.file)
        photo.row = row
        if override is not None:
            photo.found, photo.row = row, override.applied(row)
        photo.mark = self._mark(photo.row, override)
        boxes = self._boxes_to_cut(photo.row)
        if photo.mark is not None and photo.mark.endswith(_NOT_YET):
            boxes = []
        if boxes and (entry := self._with_crops_of_before(photo)) is not None:
            before = self.journal.row(photo.input)
            photo.row |= {"crops": before["crops"], "cuts": before["cuts"]}
            photo.encoded = entry.encoded
        elif boxes:
            assert photo.stamp is not None
            photo.cutting = self.pool.submit(
                cut_photo,
                photo.input.file,
                photo.stamp,
                boxes,
                replace(self.cut, keywords=keywords_of(photo.row)) if self.settings.keywords else self.cut,
                self.folder.crops,
                os.path.join(sorted_into(photo.row, self.settings.sort), photo.input.place),
                numbered=self.settings.subjects != 1,
                heat=heat_of(photo.row) if self.cut.cutout else None,
            )
            return
        photo.done = True

    def _boxes_to_cut(self, row: Row) -> list[Box]:
        return [Box(*row["boxes"][place]["xyxy"]) for place in self._places_to_cut(row)]

    def _places_to_cut(self, row: Row) -> list[int]:
        """Which of a row's boxes get crops."""
        wanted = ("subject", "several", "unsure") if self.settings.crop_unsure else ("subject", "several")
        if self.settings.boxes_only or row["decision"] not in wanted:
            return []
        boxes = row["boxes"]
        places = list(range(len(boxes)))
        if not self.run.detector.is_calibrated or row["method"] in (CORRECTED, IMPORTED):
            return places
        # Of the boxes beside the first those that count as subjects; a model has many more that are unlikely.
        further = sorted(places[1:], key=lambda place: -boxes[place]["confidence"])[: row["subjects"] - 1]
        return places[:1] + sorted(further)

    def _with_crops_of_before(self, photo: _Photo) -> Entry | None:
        """What the journal holds of a frame from a run with others beside it, if its crops show the same."""
        entry = self.journal.entries.get(photo.input.file)
        if entry is None or photo.row is None or photo.group is None or entry.stamp != photo.stamp:
            return None
        named = self.settings.sort is not None or self.settings.keywords
        if entry.cut != photo.mark or self.cut.cutout or named:
            return None
        before, now = ([box["xyxy"] for box in row["boxes"]] for row in (self.journal.row(photo.input), photo.row))
        alike = (
            before == now and len(entry.crops) == len(self._boxes_to_cut(photo.row)) and self.folder.has_crops(entry)
        )
        return entry if alike else None

    def _leave(self) -> list[_Photo]:
        """Photos leave the line at its head alone, so that what is written has the order in which they entered."""
        gone = []
        while self.line and self.line[0].done:
            photo = self.line.popleft()
            gone.append(photo)
            if photo.kept is not None:
                assert self.book is not None
                self.book.append(photo.input, *photo.kept)
                continue
            self._write(photo)
            self.written += 1
        return gone

    def _write(self, photo: _Photo) -> None:
        """The row of a photo that leaves the line."""
        assert photo.row is not None
        row, found = photo.row, photo.found
        if self.book is not None:
            row |= {"burst": photo.burst}
            found = None if found is None else found | {"burst": photo.burst}  # for when it is no longer corrected
        if self.settings.video is not None:
            row |= {"video": of_video(photo.input.file, self.folder.frames)}
        if self.stage == "looking at photo":
            self.failures.add(photo.number)
        self.folder.note_row(
            self.journal,
            photo.input,
            photo.stamp,
            row,
            group=photo.group,
            encoded=photo.encoded,
            found=found,
            cut=photo.mark,
        )

    # The model

    def _look(self, *, last: bool) -> None:
        """Hand photos that were read to the model, as many at once as it takes."""
        while ready := [photo for photo in self.line if photo.seen is not None and photo.looking is None]:
            shape = ready[0].seen.level_HWC.shape if ready[0].seen is not None else ()
            batch = [photo for photo in ready if photo.seen is not None and photo.seen.level_HWC.shape == shape]
            batch = batch[: self.finder.at_once]
            more = not last or any(photo.reading is not None for photo in self.line)
            full = len(self.line) >= self.longest_line and not any(photo.reading is not None for photo in self.line)
            if len(batch) < self.finder.at_once and more and not full and len(batch) == len(ready):
                return
            # Of camera traps the second look comes once it is known what moves.
            if self.settings.tiles is not None or (self.book is None and self.settings.second_look):
                files = [photo.input.file for photo in batch]
                future = self.looks.submit(self.finder.look_closely, files, first_only=self.book is not None)
            else:
                future = self.looks.submit(
                    self.finder.look_at, [photo.seen for photo in batch if photo.seen is not None]
                )
            for index, photo in enumerate(batch):
                photo.looking, photo.index = future, index


def sorted_into(row: Row, by: str | None) -> str:
    """The folder that what is shown of a photo goes into."""
    if by is None:
        return ""
    name = row[by] or ("unknown" if by == "group" else "unnamed")
    name = re.sub(r'[\x00-\x1f\x7f/\\:*?"<>|\ud800-\udfff]', "_", name).strip(" .")
    return name.encode()[:100].decode(errors="ignore") or "_"


def keywords_of(row: Row) -> tuple[str, ...]:
    """What photo libraries are told that a photo shows."""
    names = (row["group"] if row["group"] != UNKNOWN else None, row["label"])
    return tuple(dict.fromkeys(name for name in names if name is not None))


def _futures(photo: _Photo) -> Iterator["Future[Any]"]:
    for each in (photo.reading, photo.looking, photo.cutting):
        if each is not None:
            yield each
