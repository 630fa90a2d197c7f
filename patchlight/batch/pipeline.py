"""Photos on their way from file to row, in bounded memory, to be stopped at any moment.

Photos stand in a line, in the order of the inputs. Worker processes read those in front, the model looks at what they
have read, the processes cut the crops, and what is finished leaves the line at its head, into the journal. The line has
a fixed length, so that a folder's size does not matter; and since a row is written after its crops, a process that is
killed has lost what stood in the line, and nothing else.

Of camera traps a row depends on the frames beside it, see sequences.py. There the photos pass through the line twice:
they are looked at, and then cut, sequence by sequence.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from patchlight.batch.finder import Finder
from patchlight.batch.inputs import Input, Inputs
from patchlight.batch.pool import NoWorkers, Pool, WorkerDied
from patchlight.batch.report import thumbnail_name
from patchlight.batch.results import TRANSIENT, UNREACHABLE, Entry, Journal, ResultFolder
from patchlight.batch.rows import Row, error_row, row_of
from patchlight.batch.sequences import FrameSequence, FrameStore, judged, sequences_of
from patchlight.batch.settings import CropRunSettings, CropSettings
from patchlight.batch.work import Crops, Failed, Seen, Stamp, cut_photo, read_photo, stamp_of
from patchlight.files import Unwritable, writing
from patchlight.geometry import Box
from patchlight.images.crop import Cut
from patchlight.localizing.detector import Detector, Localization
from patchlight.reporting import Progress, Reporter
from patchlight.signals import Stopped, StopRequest

_SYNC_SECONDS = 2.0
"""Between two waits for the disk; a loss of power costs the rows since the last."""

_PROGRESS_SECONDS = 0.5
"""Between two words about steps that may be as short as a row; a stage that takes less goes without saying."""

Stage = Literal["looking at photo", "photo", "row", "picture"]
"""What progress is told of. Camera traps are looked at first; all else is done at once. Then the results are written
row by row, and pictures drawn."""

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
    looking: "Future[list[Localization | Failed]] | None" = None
    index: int = 0  # among those that are looked at together
    kept: tuple[Seen, Localization] | None = None  # of camera traps, until the whole sequence was looked at
    cutting: "Future[Crops | Failed] | None" = None
    stamp: Stamp | None = None
    row: Row | None = None
    encoded: int = 0  # of its crops, where they should not have been
    burst: dict[str, Any] | None = None  # what the row says of it
    group: str | None = None
    done: bool = False

    def fail(self, failed: Failed) -> None:
        self.seen = self.burst = None
        self.stamp = failed.stamp
        reason = "gone" if failed.reason == "missing" and self.input.found else failed.reason
        self.row = error_row(self.input.path, reason, failed.detail)
        self.done = True


class CropPipeline:
    """The photos of a run, those that stand in line, and what becomes of them."""

    def __init__(self, run: CropRun, finder: Finder, cut: Cut, book: FrameStore | None) -> None:
        self.run, self.finder, self.cut, self.book = run, finder, cut, book
        self.folder, self.journal, self.pool = run.folder, run.journal, run.pool
        self.settings, self.photos, self.thumbs = run.settings, run.inputs.photos, run.how.report
        self.longest_line = 2 * self.pool.workers + 3 * finder.at_once * finder.threads + 2
        self.line: deque[_Photo] = deque()
        self.stage: Stage = "photo"
        self.failures: set[int] = set()
        """Numbers of the photos that could not be looked at."""
        self.written = 0
        """Rows."""
        self.seconds = 0.0

    def work(self) -> int:
        """Give each photo its row that has none; how many these were."""
        photos = list(enumerate(self.photos))
        if self.book is None:
            todo = [each for each in photos if not self._is_done(each[1])]
            self._pass((self._read(*each) for each in todo), len(todo), "photo")
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
        return self.written

    def _is_done(self, photo: Input, group: str | None = None) -> bool:
        """Whether there is a row for the photo as it is now, made together with this group of frames."""
        entry = self.journal.entries.get(photo.file)
        if entry is None or entry.reason in TRANSIENT or photo.trouble is not None or entry.group != group:
            return False
        return entry.stamp == stamp_of(photo.file) and self.folder.has_crops(entry)

    def _has_look(self, photo: Input) -> bool:
        assert self.book is not None
        entry = self.book.entries.get(photo.file)
        return entry is not None and photo.trouble is None and entry.stamp == stamp_of(photo.file)

    def _pass(self, photos: Iterator[_Photo], count: int, stage: Stage) -> None:
        """Take these photos through the line."""
        if not count:
            return
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
            new.reading = self.pool.submit(read_photo, photo.file, config, thumb, self.book is not None)
        return new

    def _judged(self, sequences: Iterable[tuple[FrameSequence, set[int]]]) -> Iterator[_Photo]:
        """The photos of sequences that have no rows yet, one sequence being judged ahead of those in the line."""
        assert self.book is not None
        judging: deque[tuple[FrameSequence, set[int], Future[list[tuple[Localization, bool]]]]] = deque()
        for sequence, missing in sequences:
            files = [self.photos[number].file for number in sequence.members]
            future = self.looks.submit(
                judged,
                [self.book.look(file) for file in files],
                [self.book.entries[file].frame.time for file in files],
                self.finder.detector,
            )
            judging.append((sequence, missing, future))
            if len(judging) == 2:
                yield from self._with_finds(*judging.popleft())
        while judging:
            yield from self._with_finds(*judging.popleft())

    def _with_finds(
        self, sequence: FrameSequence, missing: set[int], judging: "Future[list[tuple[Localization, bool]]]"
    ) -> Iterator[_Photo]:
        assert self.book is not None
        finds = zip(sequence.members, sequence.places, judging.result(), strict=True)
        for number, place, (found, unchanged) in sorted(finds, key=lambda each: each[0]):
            if number not in missing:
                continue
            photo = _Photo(number, self.photos[number], group=sequence.digest)
            entry = self.book.entries[photo.input.file]
            photo.stamp = entry.stamp
            photo.burst = asdict(place) | {"background": len(sequence.members), "unchanged": unchanged}
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
                photo.encoded = cut.encoded if self.settings.lossless else 0
                photo.done = True
            return True
        return False

    def _cut(self, photo: _Photo, found: Localization) -> None:
        """Write what was found into the row, and have the crops made that it asks for."""
        photo.row = row_of(photo.input.path, found)
        boxes = [Box(*box["xyxy"]) for box in photo.row["boxes"]]
        wanted = ("subject", "several", "unsure") if self.settings.crop_unsure else ("subject", "several")
        if self.settings.boxes_only or found.decision not in wanted:
            boxes = []
        if boxes and (entry := self._with_crops_of_before(photo)) is not None:
            photo.row["crops"], photo.encoded = list(entry.crops), entry.encoded
        elif boxes:
            assert photo.stamp is not None
            photo.cutting = self.pool.submit(
                cut_photo, photo.input.file, photo.stamp, boxes, self.cut, self.folder.crops, photo.input.place
            )
            return
        photo.done = True

    def _with_crops_of_before(self, photo: _Photo) -> Entry | None:
        """What the journal holds of a frame from a run with others beside it, if its crops show the same."""
        entry = self.journal.entries.get(photo.input.file)
        if entry is None or photo.row is None or photo.group is None or entry.stamp != photo.stamp:
            return None
        before, now = ([box["xyxy"] for box in row["boxes"]] for row in (self.journal.row(photo.input), photo.row))
        alike = before == now and len(entry.crops) == len(now) and self.folder.has_crops(entry)
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
            assert photo.row is not None
            row = photo.row if self.book is None else photo.row | {"burst": photo.burst}
            if self.stage == "looking at photo":
                self.failures.add(photo.number)
            entry = self.journal.entries.get(photo.input.file)
            if entry is not None and row["reason"] not in UNREACHABLE:  # else they may be all that is left of it
                self.folder.remove_crops(set(entry.crops) - set(row["crops"]))
            self.journal.append(
                photo.input,
                photo.stamp,
                row,
                group=photo.group,
                encoded=photo.encoded,
                sizes=self.folder.sizes(row["crops"]),
            )
            self.written += 1
        return gone

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
            if self.book is None and (self.settings.second_look or self.settings.tiles is not None):
                future = self.looks.submit(self.finder.look_closely, [photo.input.file for photo in batch])
            else:
                future = self.looks.submit(
                    self.finder.look_at, [photo.seen for photo in batch if photo.seen is not None]
                )
            for index, photo in enumerate(batch):
                photo.looking, photo.index = future, index


def result_of(future: "Future[Any]") -> Any:
    """What a worker says, where it said anything."""
    try:
        return future.result()
    except WorkerDied:
        return Failed("crashed", "the process that read it died: it is damaged in an unusual way, or memory was short")
    except (NoWorkers, Unwritable):
        raise
    except Exception as error:  # whatever a photo can do, it does it to itself alone
        return Failed("crashed", " ".join(f"{type(error).__name__}: {error}".split())[:200])


def _futures(photo: _Photo) -> Iterator["Future[Any]"]:
    for each in (photo.reading, photo.looking, photo.cutting):
        if each is not None:
            yield each
