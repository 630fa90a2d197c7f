"""A folder of photos to a folder of crops: any number of photos, in bounded memory, to be stopped at any moment.

Photos stand in a line, in the order of the inputs. Worker processes read those in front, the model looks at what they
have read, the processes cut the crops, and what is finished leaves the line at its head, into the journal. The line has
a fixed length, so that a folder's size does not matter; and since a row is written after its crops, a process that is
killed has lost what stood in the line, and nothing else.

A row must not depend on the photos beside it. How a product of matrices is summed up depends on the batch, so on a CPU
the model looks at one photo at a time, in a thread for each core, which is no slower there. On a GPU every batch is
filled up to the same size.

Of camera traps (`burst`) a row does depend on the frames beside it, see looks.py. There the photos pass through the
line twice: they are looked at, and then cut, sequence by sequence.
"""

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from shutil import which
from typing import Any, Literal

import torch

from patchlight import __version__
from patchlight.batch.formats import check_format, export, file_of
from patchlight.batch.inputs import Input, Inputs, find_photos, with_places
from patchlight.batch.looks import FrameSequence, LookBook, judged, sequences_of
from patchlight.batch.pool import NoWorkers, Pool, WorkerDied
from patchlight.batch.report import thumbnail_path, write_report
from patchlight.batch.results import TRANSIENT, Journal, ResultFolder, digest, read_json
from patchlight.batch.rows import VERSION, Row, error_row, row_of
from patchlight.batch.work import Failed, Seen, Stamp, Unwritable, cut_photo, read_photo, stamp_of, unwritable
from patchlight.config import JsonConfig, check_types, require
from patchlight.errors import PatchlightError
from patchlight.geometry import Box
from patchlight.images.crop import Cut, parse_aspect
from patchlight.images.decode import ImageError
from patchlight.localizing.find import (
    MOST_TILES,
    Localization,
    calibration_for,
    localize,
    localize_batch,
    look_again,
    read,
)
from patchlight.localizing.heat import resolve_method
from patchlight.signals import Asked, asked_to_stop
from patchlight.weights.load import Loaded, load

_SYNC_SECONDS = 2.0
"""Between two waits for the disk; a loss of power costs the rows since the last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CropSettings(JsonConfig):
    """What the rows and crops depend on, besides the photos and the model."""

    # What to find, see `localize`.
    method: str = "auto"
    subjects: int | None = 1  # at most, the best ones; None for all
    threshold: float | None = None
    min_area: float = 0.0
    second_look: bool = False
    tiles: int | None = None
    burst: bool = False  # camera traps: what is there in every frame of a sequence is no subject

    # What to cut.
    boxes_only: bool = False
    crop_unsure: bool = True  # also where the decision is "unsure"; where it is "none" there is no crop
    margin: float = 0.03
    aspect: str = "free"  # or "1:1", "4:3", ...
    size: int | None = None  # pixels of the longer side, to which larger crops are scaled down
    lossless: bool = False  # cut JPEGs without decoding them, at the borders of their blocks

    def __post_init__(self) -> None:
        check_types(self)
        require(
            self.subjects is None or self.subjects >= 1,
            f"subjects={self.subjects} must be 1 or more, or None for all",
        )
        require(0 <= self.min_area <= 1, f"min_area={self.min_area} is a share of the frame, from 0 to 1")
        require(
            self.tiles is None or 1 <= self.tiles <= MOST_TILES, f"tiles={self.tiles} must be from 1 to {MOST_TILES}"
        )
        require(
            not (self.burst and self.tiles is not None),
            f"burst=True does not go with tiles={self.tiles}, for parts have no background of their own; leave one out",
        )
        require(0 <= self.margin <= 10, f"margin={self.margin} is a share of the box's sides, from 0 to 10")
        require(self.size is None or self.size >= 1, f"size={self.size} is in pixels, 1 or more")
        require(
            not (self.lossless and self.size is not None),
            f"lossless=True does not go with size={self.size}, for scaling makes new pixels; leave one out",
        )
        parse_aspect(self.aspect)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is."""

    done: int
    """Photos with a row, or, at the stage "look", photos that were looked at; those of earlier runs included."""
    total: int
    failed: int
    """Of those that this run has done."""
    rate: float
    """Photos a second, in this run."""
    seconds_left: float | None
    """Of this stage; None before there is a rate."""
    stage: Literal["look", "crop"] = "crop"
    """Camera traps are looked at first; all else is done at once."""


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
    bursts: dict[str, int] | None = None
    """Of camera traps: how many bursts there are, how many of them are `empty`, and how many `empty_frames`."""
    groups: dict[str, int] | None = None
    """How many photos show what, by a model whose classes have groups."""
    seconds: float = 0.0
    rate: float = 0.0
    report: Path | None = None
    exports: tuple[Path, ...] = ()

    @property
    def exit_code(self) -> int:
        return 3 if self.failed else 0


class Stopped(Exception):  # noqa: N818
    """The run was asked to stop, and goes on when it is started again; `.signal` says by what."""

    def __init__(self, folder: Path, done: int, total: int, signal_number: int) -> None:
        super().__init__(f"{folder}: stopped after {done} of {total} photos; run the same command again to go on")
        self.signal = signal_number


def crop_photos(
    paths: Sequence[str | PathLike[str]],
    out: str | PathLike[str],
    settings: CropSettings | None = None,
    *,
    model: str | PathLike[str] | Loaded = "default",
    device: str | None = None,
    workers: int = 2,
    batch_size: int = 32,
    overwrite: bool = False,
    formats: Sequence[str] = (),
    report: bool = True,
    watch: Callable[[Progress], None] = lambda progress: None,
    tell: Callable[[str], None] = lambda line: None,
) -> Summary:
    """Find the subjects of photos (files, folders, patterns) and cut them out, into the folder `out`.

    A call with the same arguments goes on where another was stopped, does what is new or changed, and nothing if that
    is all there. Other settings or another model are refused, unless `overwrite` begins anew. A file that cannot be
    used gets a row that says why. `workers` processes read and cut, 0 for none; `batch_size` is for GPUs. `formats`
    are further files to write, see formats.py. `watch` hears of the progress, `tell` of what deserves a line.
    """
    settings = settings or CropSettings()
    for name, value, least in (("workers", workers, 0), ("batch_size", batch_size, 1)):
        require(value >= least, f"{name}={value} must be {least} or more")
    for each in formats:
        check_format(each)
    folder = ResultFolder(out)
    inputs = find_photos(paths, folder.path)
    with folder.held(), asked_to_stop() as asked, Pool(workers) as pool:
        loaded = model if isinstance(model, Loaded) else load(_source(model), device=device or _best_device())
        for note in loaded.notes:
            tell(f"{loaded.provenance.source}: {note}")
        resolve_method(loaded, settings.method)
        jpegtran = which("jpegtran") if settings.lossless and not settings.boxes_only else None
        if settings.lossless and not settings.boxes_only and jpegtran is None:
            tell("lossless: jpegtran is not installed; JPEGs are encoded anew with their own tables")
        made_with = _made_with(settings, loaded, jpegtran)
        folder.check(made_with, overwrite=overwrite)
        journal = folder.begin(made_with, overwrite=overwrite)
        with contextlib.ExitStack() as stack:
            stack.callback(journal.close)
            kept = {file: entry.place for file, entry in journal.entries.items()}
            photos = with_places(inputs, kept)
            cut = Cut(
                margin=settings.margin,
                aspect=parse_aspect(settings.aspect),
                longest=settings.size,
                jpegtran=jpegtran,
            )
            book = None
            if settings.burst:
                book = LookBook(folder.looks)
                stack.callback(book.close)
            run = _Run(folder, journal, pool, loaded, settings, cut, batch_size, photos, book, watch, tell, report)
            computed = run.work(asked)
            if not computed and (finished := _finished(folder, photos, journal, formats, report=report)) is not None:
                return finished
            return _finish(
                folder, inputs, photos, journal, loaded, made_with, computed, run.seconds, formats, report=report
            )


def _source(model: str | PathLike[str]) -> str | Path:
    return model if isinstance(model, str) else Path(model)


def _best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _made_with(settings: CropSettings, loaded: Loaded, jpegtran: str | None) -> dict[str, Any]:
    """Everything that the rows depend on, besides the photos, by name."""
    return settings.to_dict() | {
        "patchlight": __version__,
        "version": VERSION,
        "lossless_by": None if jpegtran is None else "jpegtran",
        "model": loaded.provenance.sha256,
        "model.settings": loaded.config.to_dict(),
        "model.preprocess": loaded.preprocess.config.to_dict(),
        "model.subject": None if loaded.subject is None else loaded.subject.to_dict(),
        "model.groups": None if loaded.groups is None else loaded.groups.fingerprint(),
    }


def _is_done(photo: Input, journal: Journal, folder: ResultFolder, group: str | None = None) -> bool:
    """Whether there is a row for the photo as it is now, made together with this group of frames."""
    entry = journal.entries.get(photo.file)
    if entry is None or entry.reason in TRANSIENT or photo.trouble is not None or entry.group != group:
        return False
    return entry.stamp == stamp_of(photo.file) and folder.has_crops(entry)


# The line


@dataclass(slots=True, eq=False)
class _Photo:
    """One that stands in the line; exactly one of the futures is set while something is being done about it."""

    number: int
    input: Input
    reading: "Future[Seen | Failed | Unwritable] | None" = None
    seen: Seen | None = None
    looking: "Future[list[Localization | Failed]] | None" = None
    index: int = 0  # among those that are looked at together
    kept: tuple[Seen, Localization] | None = None  # of camera traps, until the whole sequence was looked at
    cutting: "Future[list[str] | Failed | Unwritable] | None" = None
    stamp: Stamp | None = None
    row: Row | None = None
    burst: dict[str, Any] | None = None  # what the row says of it
    group: str | None = None
    done: bool = False

    def fail(self, failed: Failed) -> None:
        self.seen = None
        self.stamp = failed.stamp
        reason = "gone" if failed.reason == "missing" and self.input.found else failed.reason
        self.row = error_row(self.input.path, reason, failed.detail)
        self.done = True


class _Run:
    def __init__(
        self,
        folder: ResultFolder,
        journal: Journal,
        pool: Pool,
        loaded: Loaded,
        settings: CropSettings,
        cut: Cut,
        batch_size: int,
        photos: Sequence[Input],
        book: LookBook | None,
        watch: Callable[[Progress], None],
        tell: Callable[[str], None],
        thumbs: bool,
    ) -> None:
        self.folder, self.journal, self.pool, self.book = folder, journal, pool, book
        self.loaded, self.settings, self.cut, self.photos = loaded, settings, cut, photos
        self.watch, self.tell, self.thumbs = watch, tell, thumbs
        self.device = loaded.model.norm.weight.device
        self.at_once = images_at_once(self.device, batch_size)
        # A CPU's cores take a photo each; a GPU computes while another batch is made ready, or read.
        self.threads = torch.get_num_threads() if self.device.type == "cpu" else 2
        self.longest_line = 2 * pool.workers + 3 * self.at_once * self.threads + 2
        self.line: deque[_Photo] = deque()
        self.stage: Literal["look", "crop"] = "crop"
        self.failures: set[int] = set()
        """Numbers of the photos that could not be looked at."""
        self.written = 0
        """Rows."""
        self.seconds = 0.0

    def work(self, asked: Asked) -> int:
        """Give each photo its row that has none; how many these were."""
        photos = list(enumerate(self.photos))
        if self.book is None:
            todo = [each for each in photos if not _is_done(each[1], self.journal, self.folder)]
            self._pass((self._read(*each) for each in todo), len(todo), "crop", asked)
            return self.written
        # What failed stays so until its file changes, and takes no part in its sequence.
        looked = {number: photo for number, photo in photos if self._has_look(photo)}
        todo = [
            (number, photo)
            for number, photo in photos
            if number not in looked and not _is_done(photo, self.journal, self.folder)
        ]
        self._pass((self._read(*each) for each in todo), len(todo), "look", asked)
        looked |= {number: photo for number, photo in todo if number not in self.failures}
        waiting: list[tuple[FrameSequence, set[int]]] = []
        for sequence in sequences_of(dict(sorted(looked.items())), self.book):
            missing = {
                n for n in sequence.members if not _is_done(looked[n], self.journal, self.folder, sequence.digest)
            }
            if missing:
                waiting.append((sequence, missing))
        self._pass(self._judged(waiting), sum(len(missing) for _, missing in waiting), "crop", asked)
        return self.written

    def _has_look(self, photo: Input) -> bool:
        assert self.book is not None
        entry = self.book.entries.get(photo.file)
        return entry is not None and photo.trouble is None and entry.stamp == stamp_of(photo.file)

    def _pass(self, photos: Iterator[_Photo], count: int, stage: Literal["look", "crop"], asked: Asked) -> None:
        """Take these photos through the line."""
        if not count:
            return
        begun = synced = time.monotonic()
        self.stage = stage
        if self.thumbs:
            try:
                self.folder.thumbs.mkdir(exist_ok=True)
            except OSError as error:
                raise PatchlightError(unwritable(self.folder.thumbs, error).message) from None
        entered = left = failed = 0
        one_thread = partial(torch.set_num_threads, 1) if self.device.type == "cpu" else None
        before = torch.get_num_threads()
        with ThreadPoolExecutor(self.threads, initializer=one_thread) as self.looks:
            try:
                while left < count:
                    if asked.signal:
                        self._sync()
                        done = len(self.photos) - count + left
                        raise Stopped(self.folder.path, done, len(self.photos), asked.signal)
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
                        self.watch(Progress(done, len(self.photos), failed, rate, (count - left) / rate, stage))
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
        entry = self.journal.entries.get(photo.file)
        if entry is not None:
            self.folder.remove_crops(entry.crops)  # they show what the file was
        new = _Photo(number, photo)
        if photo.trouble is not None:
            new.fail(Failed("unreadable", photo.trouble))
        else:
            thumb = thumbnail_path(self.folder.path, number) if self.thumbs else None
            config = self.loaded.preprocess.config
            new.reading = self.pool.submit(read_photo, photo.file, config, thumb, photo.path, self.book is not None)
        return new

    def _judged(self, sequences: Iterable[tuple[FrameSequence, set[int]]]) -> Iterator[_Photo]:
        """The photos of sequences that have no rows yet, one sequence being judged ahead of those in the line."""
        assert self.book is not None
        method = resolve_method(self.loaded, self.settings.method)
        judging: deque[tuple[FrameSequence, set[int], Future[list[tuple[Localization, bool]]]]] = deque()
        for sequence, missing in sequences:
            files = [self.photos[number].file for number in sequence.members]
            future = self.looks.submit(
                judged,
                [self.book.look(file) for file in files],
                [self.book.entries[file].frame.time for file in files],
                self.loaded.model.config,
                method,
                calibration_for(self.loaded, method),
                self.settings.subjects,
                self.settings.threshold,
                self.settings.min_area,
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
            photo.stamp = self.book.entries[photo.input.file].stamp
            photo.burst = asdict(place) | {"background": len(sequence.members), "unchanged": unchanged}
            if self.settings.second_look and found.subjects:
                photo.looking = self.looks.submit(self._looked_again, photo.input.file, found)
            else:
                self._cut(photo, found)
            yield photo

    # On their way

    def _move(self, photo: _Photo) -> bool:
        """Take a photo as far as it goes without waiting; whether that was any further."""
        if photo.reading is not None and photo.reading.done():
            read = _result(photo.reading)
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
            if self.stage == "look":
                assert seen is not None
                photo.kept = seen, found
                photo.done = True
            else:
                self._cut(photo, found)
            return True
        if photo.cutting is not None and photo.cutting.done():
            names = _result(photo.cutting)
            photo.cutting = None
            if isinstance(names, Failed):
                photo.fail(names)
            else:
                assert photo.row is not None
                photo.row["crops"] = [f"crops/{name}" for name in names]
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
        if boxes and (crops := self._crops_of_before(photo)) is not None:
            photo.row["crops"] = crops
        elif boxes:
            assert photo.stamp is not None
            photo.cutting = self.pool.submit(
                cut_photo, photo.input.file, photo.stamp, boxes, self.cut, self.folder.crops, photo.input.place
            )
            return
        photo.done = True

    def _crops_of_before(self, photo: _Photo) -> list[str] | None:
        """The crops that a frame has from a run with others beside it, if they show the same."""
        entry = self.journal.entries.get(photo.input.file)
        if entry is None or photo.row is None or photo.group is None or entry.stamp != photo.stamp:
            return None
        before, now = ([box["xyxy"] for box in row["boxes"]] for row in (self.journal.row(photo.input), photo.row))
        alike = before == now and len(entry.crops) == len(now) and self.folder.has_crops(entry)
        return list(entry.crops) if alike else None

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
            if self.stage == "look":
                self.failures.add(photo.number)
            if (entry := self.journal.entries.get(photo.input.file)) is not None:
                self.folder.remove_crops(set(entry.crops) - set(row["crops"]))
            self.journal.append(photo.input, photo.stamp, row, photo.group)
            self.written += 1
        return gone

    # The model

    def _look(self, *, last: bool) -> None:
        """Hand photos that were read to the model, as many at once as it takes."""
        while ready := [photo for photo in self.line if photo.seen is not None and photo.looking is None]:
            shape = ready[0].seen.level_HWC.shape if ready[0].seen is not None else ()
            batch = [photo for photo in ready if photo.seen is not None and photo.seen.level_HWC.shape == shape]
            batch = batch[: self.at_once]
            more = not last or any(photo.reading is not None for photo in self.line)
            full = len(self.line) >= self.longest_line and not any(photo.reading is not None for photo in self.line)
            if len(batch) < self.at_once and more and not full and len(batch) == len(ready):
                return
            # Of camera traps the second look comes once it is known what moves.
            if self.book is None and (self.settings.second_look or self.settings.tiles is not None):
                future = self.looks.submit(self._looked_closely, [photo.input.file for photo in batch])
            else:
                future = self.looks.submit(self._looked_at, [photo.seen for photo in batch if photo.seen is not None])
            for index, photo in enumerate(batch):
                photo.looking, photo.index = future, index

    def _looked_at(self, photos: Sequence[Seen]) -> list[Localization | Failed]:
        found: list[Localization | Failed] = []
        while len(found) < len(photos):
            at_once = self.at_once
            part = photos[len(found) : len(found) + at_once]
            filled = [*part, *[part[-1]] * (at_once - len(part))]
            try:
                images_BCHW = self.loaded.preprocess.batch([photo.level_HWC for photo in filled], self.device)
                several = localize_batch(
                    self.loaded,
                    images_BCHW,
                    [photo.view for photo in filled],
                    self.settings.method,
                    most=self.settings.subjects,
                    threshold=self.settings.threshold,
                    min_area=self.settings.min_area,
                )
                found += several[: len(part)]
            except PatchlightError as error:  # images of a size that the model does not take
                found += [Failed("unsupported", str(error), photo.stamp) for photo in part]
            except RuntimeError as error:
                self._take_fewer(error, at_once)
        return found

    def _looked_closely(self, files: Sequence[str]) -> list[Localization | Failed]:
        """With a second look or tiles, for which the photo is read once more, here."""

        def look(file: str) -> list[Localization]:
            return localize(
                [file],
                self.loaded,
                self.settings.method,
                subjects=self.settings.subjects or "all",
                threshold=self.settings.threshold,
                min_area=self.settings.min_area,
                second_look=self.settings.second_look,
                tiles=self.settings.tiles,
                batch_size=self.at_once,
            )

        return [found for file in files for found in self._closer(file, look)]

    def _looked_again(self, file: str, first: Localization) -> list[Localization | Failed]:
        """A second look at what is left of a frame's finds."""

        def look(file: str) -> list[Localization]:
            photo = read(file, self.loaded.preprocess, (2, 2))
            return look_again(self.loaded, [photo], [first], self.settings.threshold)

        return self._closer(file, look)

    def _closer(self, file: str, look: Callable[[str], list[Localization]]) -> list[Localization | Failed]:
        """What a closer look at one photo finds; what goes wrong with the photo costs its own row alone."""
        try:
            return [*look(file)]
        except ImageError as error:
            return [Failed(error.reason, error.detail, stamp_of(file))]
        except PatchlightError as error:
            return [Failed("unsupported", str(error), stamp_of(file))]
        except torch.OutOfMemoryError:
            raise _no_room_for_closer_looks(self.loaded) from None

    def _take_fewer(self, error: RuntimeError, at_once: int) -> None:
        """After running out of memory: half as many photos at once, for the rest of the run."""
        text = str(error).lower()
        if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in text and "alloc" not in text:
            raise error
        if at_once == 1:
            raise PatchlightError(
                f"the model has not enough memory for a single photo on {self.device}; use a smaller model, or another "
                "device"
            ) from None
        self.at_once = at_once // 2
        self.tell(f"there is not enough memory for {at_once} photos at once; going on with {self.at_once}")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _no_room_for_closer_looks(loaded: Loaded) -> PatchlightError:
    return PatchlightError(
        f"{loaded.provenance.source}: closer looks do not fit into the device's memory; leave out --second-look and "
        "--tiles, or use --device cpu"
    )


def images_at_once(device: torch.device, batch_size: int) -> int:
    """One on a CPU, see above."""
    return 1 if device.type == "cpu" else batch_size


def _result(future: "Future[Any]") -> Any:
    """What a worker says, where it said anything."""
    try:
        result = future.result()
    except WorkerDied:
        return Failed("crashed", "the process that read it died: it is damaged in an unusual way, or memory was short")
    except NoWorkers:
        raise
    except Exception as error:  # whatever a photo can do, it does it to itself alone
        return Failed("crashed", " ".join(f"{type(error).__name__}: {error}".split())[:200])
    if isinstance(result, Unwritable):
        raise PatchlightError(result.message)
    return result


def _futures(photo: _Photo) -> Iterator["Future[Any]"]:
    for each in (photo.reading, photo.looking, photo.cutting):
        if each is not None:
            yield each


# The end


def _finished(
    folder: ResultFolder, photos: Sequence[Input], journal: Journal, formats: Sequence[str], *, report: bool
) -> Summary | None:
    """The summary of a run that has written everything that is asked for; None if something is to be written."""
    summary = read_json(folder.summary)
    finished = read_json(folder.finished)
    wanted = [folder.results, folder.table] + [folder.path / "report.html"] * report
    if summary is None or finished is None or not set(formats) <= set(summary.get("exports", ())):
        return None
    if not all(path.exists() for path in [*wanted, *(folder.path / file_of(each) for each in formats)]):
        return None
    if finished.get("inputs_sha256") != digest(photos, journal):
        return None
    return Summary(
        folder=folder.path,
        photos=summary["photos"],
        computed=0,
        failed=summary["status"]["error"],
        decisions=summary["decisions"],
        reasons=summary["reasons"],
        crops=summary["crops"],
        bursts=summary.get("bursts"),
        groups=summary.get("groups"),
        report=folder.path / "report.html" if report else None,
        exports=tuple(folder.path / file_of(each) for each in formats),
    )


def _finish(
    folder: ResultFolder,
    inputs: Inputs,
    photos: Sequence[Input],
    journal: Journal,
    loaded: Loaded,
    made_with: dict[str, Any],
    computed: int,
    seconds: float,
    formats: Sequence[str],
    *,
    report: bool,
) -> Summary:
    decisions: Counter[str] = Counter(dict.fromkeys(("subject", "several", "unsure", "none"), 0))
    reasons: Counter[str] = Counter()
    groups: Counter[str] = Counter()
    crops = 0
    bursts: dict[str, bool] = {}  # whether they are empty
    folder.write_rows(lambda: (journal.row(photo) for photo in photos), bursts=made_with["burst"])
    for photo in photos:
        row = journal.row(photo)
        if row["status"] == "ok":
            decisions[row["decision"]] += 1
            groups[row["group"]] += 1
            if row.get("burst"):
                identity = row["burst"]["id"]
                bursts[identity] = bursts.get(identity, True) and row["decision"] == "none"
        else:
            reasons[row["reason"]] += 1
        crops += len(row["crops"])
    # What an earlier call wrote is kept up to date.
    earlier = (read_json(folder.summary) or {}).get("exports", ())
    written = list(dict.fromkeys([*formats, *(each for each in earlier if (folder.path / file_of(each)).exists())]))
    exports = tuple(export(folder.path, each, base=inputs.base, detector=loaded.provenance.source) for each in written)
    page = write_report(folder.path) if report else None
    failed = sum(reasons.values())
    rate = computed / seconds if computed and seconds > 0 else 0.0
    counts = {"count": len(bursts), "empty": sum(bursts.values()), "empty_frames": decisions["none"]}
    values = {
        "version": 1,
        "photos": len(photos),
        "status": {"ok": len(photos) - failed, "error": failed},
        "decisions": dict(decisions),
        "reasons": dict(sorted(reasons.items())),
        "crops": crops,
        **({"bursts": counts} if made_with["burst"] else {}),
        **({} if loaded.groups is None else {"groups": dict(sorted(groups.items()))}),
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
        "inputs_sha256": digest(photos, journal),
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
        decisions=dict(decisions),
        reasons=dict(reasons),
        crops=crops,
        bursts=counts if made_with["burst"] else None,
        groups=None if loaded.groups is None else dict(sorted(groups.items())),
        seconds=seconds,
        rate=rate,
        report=page,
        exports=exports,
    )
