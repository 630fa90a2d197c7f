"""A run on the machines of a Ray cluster, as a pipeline of Ray Data.

The machine that was asked lists the photos, divides those that have no rows into blocks, and hands these to three pools
of actors: what reads them, what looks at them, and what cuts the crops and leaves the part of the block, see blocks.py.
Ray Data holds each pool back by the memory that its blocks take. Whatever part is ready goes into the journal here;
then the run goes on as if this machine had done it all.
"""

import contextlib
import copy
import functools
import importlib
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from patchlight.batch.blocks import SIGN, Block, Cuts, Deaths, Hand, HandedOn, Place, Reads, Said, block
from patchlight.batch.finder import Finder
from patchlight.batch.inputs import Input, Inputs
from patchlight.batch.pipeline import CropPipeline, CropRun, _Photo, stopped
from patchlight.batch.pool import NoWorkers
from patchlight.batch.readers import TableReader
from patchlight.batch.results import Journal, ResultFolder
from patchlight.batch.settings import CropRunSettings, CropSettings
from patchlight.batch.table_run import TablePipeline, row_and_array
from patchlight.batch.work import Failed, Seen, crashed
from patchlight.deploy.engines import Engine, load_engine
from patchlight.errors import PatchlightError
from patchlight.files import Unwritable, writing
from patchlight.images.containers import is_elsewhere
from patchlight.images.crop import Cut
from patchlight.localizing.detector import Detector
from patchlight.reporting import SILENT, Progress, Reporter
from patchlight.signals import STOPPING, Stopped, StopRequest
from patchlight.weights.load import Loaded

MOST_PHOTOS = 10_000
"""With a report: a page of more is nothing to look at."""

_PHOTOS, _BYTES = 64, 16 * 2**20
"""Of a block at most; the bytes are those of its images."""

_PER_CPU = 4
"""Blocks, at least, so that none waits long for the last."""

_CPUS = 0.25
"""That an actor asks for: there is one that looks for each CPU, and for every two of them one that reads and one that
cuts, in processes of their own. That is half of the CPUs all together, so that there is room for the actors of a
machine that dies."""

_IN_VAIN = 3
"""How often blocks are handed out of which none comes back."""

_SECONDS_TO_ANSWER = 5.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """One that this process is connected to."""

    ray: ModuleType
    name: str
    cpus: int
    gpus: int
    device: str
    """What looks at photos: "cuda" or "cpu"."""

    def writes(self, how: CropRunSettings, photos: int, reporter: Reporter) -> CropRunSettings:
        """What a run writes here: a table of the rows, and no page of too many photos."""
        if how.report and photos > MOST_PHOTOS:
            reporter.tell(f"no report, which is for up to {MOST_PHOTOS:,} photos; results.parquet has all of them")
            how = replace(how, report=False)
        return replace(how, formats=tuple(dict.fromkeys([*how.formats, "parquet"])))

    def work(self, pipeline: CropPipeline, photos: Sequence[Input]) -> int:
        """Have these photos looked at; how many rows came of it."""
        run, total = pipeline.run, len(pipeline.run.inputs.photos)
        place = _made_ready(pipeline, photos)
        blocks = self._blocks(pipeline, photos)
        job = self.ray.put(Job.of(pipeline, self.device))
        rows, in_vain = 0, 0
        first: tuple[float, int] | None = None  # from when on it is told how fast it goes: until then actors start
        run.reporter.progress(Progress(what=f"starting on {self.name}"))
        while blocks:
            before = len(blocks)
            dataset = self._dataset(list(blocks.values()), pipeline, place, job)
            try:
                with contextlib.closing(_parts(dataset)) as parts:
                    while True:
                        with run.asked.at_once("stopped"):
                            if (part := next(parts, None)) is None:
                                break
                        rows += run.folder.take_part(place.parts / part, run.journal)
                        del blocks[part]
                        now, done = time.monotonic(), total - len(photos) + rows
                        if first is None:
                            first = now, rows
                            run.reporter.progress(Progress(what="photo", done=done, total=total, how=f"on {self.name}"))
                            continue
                        rate = (rows - first[1]) / max(now - first[0], 1e-9)
                        run.say("photo", done, total, f"{rate:.1f} photos/s on {self.name}", (total - done) / rate)
            except Stopped as stop:
                done = total - len(photos) + rows + run.folder.take_parts(run.journal)
                raise stopped(run.folder.path, f"after {done} of {total} photos", stop.signal) from None
            except self.ray.exceptions.RayError as error:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]  # before it, a traceback
                run.reporter.tell(f"{self.name}: {len(blocks):,} blocks are left ({reason}); continuing with them")
            in_vain = in_vain + 1 if len(blocks) == before else 0
            if in_vain == _IN_VAIN:
                raise PatchlightError(
                    f"{self.name}: {len(blocks):,} blocks were lost {in_vain} times; see to the cluster, and run the "
                    "same command again to continue"
                )
        shutil.rmtree(place.parts, ignore_errors=True)
        return rows

    def _blocks(self, pipeline: CropPipeline, photos: Sequence[Input]) -> dict[str, Block]:
        """By the names of their parts, which no other run has given."""
        height, width = pipeline.finder.detector.loaded.preprocess.config.image_size
        most = min(_PHOTOS, _BYTES // (3 * height * width), len(photos) // (_PER_CPU * self.cpus))
        count, token, said = max(1, most), secrets.token_hex(4), pipeline.run.overrides
        blocks = {}
        for number, start in enumerate(range(0, len(photos), count)):
            name = f"{number:07}-{token}.parquet"
            blocks[name] = block(name, [(photo, said.get(photo.file)) for photo in photos[start : start + count]])
        return blocks

    def _dataset(self, blocks: list[Block], pipeline: CropPipeline, place: Place, job: Any) -> Any:
        """The parts of blocks, as they are finished."""
        data = importlib.import_module("ray.data")
        data.DataContext.get_current().enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)
        on_gpu, some, workers = self.device == "cuda", (self.cpus + 1) // 2, max(1, pipeline.run.how.workers)
        thumbs = pipeline.folder.thumbs.absolute() if pipeline.thumbs else None
        config = pipeline.finder.detector.loaded.preprocess.config
        fetch = functools.partial(self.ray.get, job)
        stages: tuple[tuple[Any, int, tuple[Any, ...], dict[str, Any]], ...] = (
            (Reads, some, (place, workers, config, thumbs, pipeline.whole), {}),
            (Looks, self.gpus if on_gpu else self.cpus, (place, fetch), {"num_gpus": 1} if on_gpu else {}),
            (Cuts, some, (place, workers), {}),
        )
        dataset = data.from_items(blocks, override_num_blocks=len(blocks))  # a row each, so that none is divided
        for stage, count, given, more in stages:
            dataset = dataset.map(
                stage,
                fn_constructor_args=given,
                compute=data.ActorPoolStrategy(size=min(count, len(blocks)), max_tasks_in_flight_per_actor=2),
                num_cpus=_CPUS,
                **more,
            )
        return dataset


def _parts(dataset: Any) -> Generator[str]:
    try:
        for row in dataset.iter_rows():
            if row["error"]:
                raise PatchlightError(row["error"])
            yield row["part"]
    finally:  # else its thread goes on, and connects anew once we are disconnected
        if (executor := getattr(dataset, "_current_executor", None)) is not None:
            executor.shutdown(force=True)


def _made_ready(pipeline: CropPipeline, photos: Sequence[Input]) -> Place:
    """What the machines are to find in the folder of the run."""
    folder, base = pipeline.folder, pipeline.run.inputs.base
    parts = folder.parts.absolute()
    with writing(parts):
        parts.mkdir(exist_ok=True)
        (parts / SIGN).touch()
    if pipeline.thumbs:
        with writing(folder.thumbs):
            folder.thumbs.mkdir(exist_ok=True)
    on_disk = os.path.isdir(base) and not any(is_elsewhere(photo.file) for photo in photos)
    return Place(parts, base if on_disk else None)


# The connection


@contextlib.contextmanager
def connected(how: CropRunSettings) -> Iterator[Cluster]:
    """The cluster that a run is to be on. One that was connected to before stays so."""
    assert how.on is not None
    if how.device not in (None, "cpu", "cuda"):
        raise PatchlightError(f"device={how.device!r} does not go with on={how.on!r}, which chooses GPUs; give cuda")
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.data")
    except ModuleNotFoundError as error:
        raise PatchlightError(
            f"on={how.on!r} needs {error.name}, which is missing; pip install 'patchlight[ray]'"
        ) from None
    begun_here = not ray.is_initialized()
    if begun_here:
        _connect(ray, how.on)
    try:
        resources = ray.cluster_resources()
        cpus, gpus = max(1, int(resources.get("CPU", 1))), int(resources.get("GPU", 0))
        if how.device == "cuda" and not gpus:
            raise PatchlightError("device='cuda' is on no machine of the cluster; use cpu, or leave it out")
        yield Cluster(ray, how.on, cpus, gpus, how.device or ("cuda" if gpus else "cpu"))
    finally:
        if begun_here:
            ray.shutdown()


def _connect(ray: ModuleType, on: str) -> None:
    address = on.partition(":")[2] or None
    if address not in (None, "auto"):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), _SECONDS_TO_ANSWER).close()
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise PatchlightError(
                f"on={on!r} does not answer ({reason}); give the address that `ray start --head` printed"
            ) from None
    # Its machines say nothing to strangers, and this one says what there is to say.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    handlers = {number: signal.getsignal(number) for number in STOPPING}
    try:
        with _stderr_closed():  # on which it says that it will say nothing
            ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
        # What the machines say all the same, of tasks that they try again, would be in what this command prints.
        ray._private.worker._worker_logs_enabled = False
    except Exception as error:  # of many kinds
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise PatchlightError(
            f"on={on!r} cannot be connected to ({reason}); start the command on a machine of a running cluster"
        ) from None
    finally:
        with contextlib.suppress(ValueError):  # where this is not the main thread, which alone hears signals
            for number, handler in handlers.items():
                signal.signal(number, handler)  # Ray would end the process where we save first


@contextlib.contextmanager
def _stderr_closed() -> Iterator[None]:
    before, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nothing)


# What the actors do that look


@dataclass(frozen=True, slots=True)
class Job:
    """All that looking takes."""

    loaded: Loaded
    """Without its engine, which cannot travel; its"""
    engine: dict[str, bytes] | None
    """files can."""
    reader: type[TableReader] | None
    """Of tables; and its"""
    reading: Any
    """settings."""
    settings: CropSettings
    how: CropRunSettings
    cut: Cut
    out: Path
    device: str

    @classmethod
    def of(cls, pipeline: CropPipeline, device: str) -> "Job":
        run, finder = pipeline.run, pipeline.finder
        loaded, files = run.detector.loaded, None
        if isinstance(loaded.engine, Engine):
            folder = loaded.engine.folder
            files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        elif loaded.device.type != "cpu":
            loaded = replace(loaded, model=copy.deepcopy(loaded.model).cpu())
        return cls(
            replace(loaded, engine=None),
            files,
            type(finder) if isinstance(finder, TableReader) else None,
            getattr(finder, "settings", None),
            run.settings,
            replace(run.how, report=False, on=None),
            pipeline.cut,
            run.folder.path.absolute(),
            device,
        )

    def finder(self) -> Finder:
        loaded = self.loaded
        if self.engine is not None:
            folder = Path(tempfile.mkdtemp(prefix="patchlight-"))
            for name, content in self.engine.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)
            loaded = replace(loaded, engine=load_engine(folder))
        elif self.device != "cpu":
            loaded = loaded.to(self.device)
        if self.reader is not None:
            return self.reader(loaded, self.reading, self.how.batch_size, SILENT)  # type: ignore[call-arg, arg-type]
        detector = Detector.of(loaded, self.settings.method, self.settings.detector_options)
        return Finder(detector, self.how.batch_size, SILENT)


class _Kept(CropPipeline):
    """The photos of a block: of each all is kept that would be written."""

    def __init__(self, run: CropRun, finder: Finder, cut: Cut, handed: HandedOn) -> None:
        CropPipeline.__init__(self, run, finder, cut, None)
        self.handed, self.said = handed, list[Said]()

    def _write(self, photo: _Photo) -> None:
        assert photo.row is not None
        crop = self.handed.crops.get(photo.input.file)
        self.said.append(Said(photo.input, photo.stamp, photo.row, None, photo.found, photo.mark, photo.encoded, crop))

    def _sync(self) -> None:
        """There is nothing to wait for."""


class _KeptOfTable(_Kept, TablePipeline):
    def _is_done(self, photo: Input, group: str | None = None) -> bool:
        return False

    def _write(self, photo: _Photo) -> None:
        self.said.append(Said(photo.input, photo.stamp, *row_and_array(photo)))


class _NotTogether(Exception):  # noqa: N818
    """What happened to photos that were looked at together."""


class Looks(Hand):
    """The model, and what it finds in the photos of blocks."""

    def __init__(self, place: Place, fetch: Callable[[], Job]) -> None:
        super().__init__(place)
        self.fetch = fetch

    def begin(self) -> None:
        torch.set_num_threads(1)
        self.job = self.fetch()
        self.finder = self.job.finder()
        self.journal = Journal(Path(os.devnull))

    def work(self, part: str, photos: Any) -> Sequence[Any]:
        """Inputs, what is said of them instead, and what was read of them; then what is said of each."""
        numbered, deaths = list(enumerate(photos)), Deaths(self.place.parts, part)
        said: list[Said] | None = None
        if not deaths.before:
            with contextlib.suppress(_NotTogether):
                said = self._look(numbered)
        if said is None:
            said = []
            for number, each in numbered:
                if number in deaths.guilty:
                    each = _failed(each, "the processes that looked at it died: memory was short, or the model crashed")
                deaths.note(number)
                try:
                    said += self._look([(number, each)])
                except _NotTogether as error:
                    said += self._look([(number, _failed(each, str(error)))])
        deaths.forget()
        return said

    def _look(self, photos: Sequence[tuple[int, Any]]) -> list[Said]:
        job, handed = self.job, HandedOn()
        handed.seen = {photo.file: seen for _, (photo, _, seen) in photos}
        overrides = {photo.file: said for _, (photo, said, _) in photos if said is not None}
        inputs = Inputs(tuple(photo for _, (photo, _, _) in photos), "")
        folder, detector = ResultFolder(job.out), self.finder.detector
        run = CropRun(
            *(folder, self.journal, inputs, job.settings, job.how, detector, handed, StopRequest(), SILENT, overrides)
        )
        pipeline = (_Kept if job.reader is None else _KeptOfTable)(run, self.finder, job.cut, handed)
        try:
            pipeline.work()
        except (NoWorkers, Unwritable):
            raise
        except Exception as error:  # whatever it is, it is said in rows
            raise _NotTogether(str(error) if isinstance(error, PatchlightError) else crashed(error)) from None
        return pipeline.said


def _failed(photo: tuple[Input, Any, Any], why: str) -> tuple[Input, Any, Any]:
    given, said, seen = photo
    return given, said, Failed("crashed", why, seen.stamp if isinstance(seen, Seen | Failed) else None)
