"""A folder of photos to a folder of crops: any number of photos, in bounded memory, to be stopped at any moment."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from os import PathLike
from shutil import which
from typing import Any

import torch

from patchlight import __version__
from patchlight.batch.finder import Finder, give_up
from patchlight.batch.inputs import find_photos, with_places
from patchlight.batch.pipeline import CropPipeline, CropRun
from patchlight.batch.pool import Pool
from patchlight.batch.results import MODEL_SOURCE, ResultFolder
from patchlight.batch.rows import VERSION
from patchlight.batch.sequences import FrameStore
from patchlight.batch.settings import CropRunSettings, CropSettings
from patchlight.batch.summary import CropSummary, earlier_summary, finish
from patchlight.devices import resolve_device
from patchlight.images.crop import Cut, parse_aspect
from patchlight.json_config import require
from patchlight.localizing.detector import Detector
from patchlight.reporting import Reporter, on_terminal
from patchlight.signals import asked_to_stop
from patchlight.weights.load import Loaded, load_or_given


def crop_photos(
    photos: str | PathLike[str] | Sequence[str | PathLike[str]],
    out: str | PathLike[str],
    settings: CropSettings | None = None,
    how: CropRunSettings | None = None,
    *,
    model: str | PathLike[str] | Loaded = "default",
    reporter: Reporter | None = None,
) -> CropSummary:
    """Find the subjects of photos and cut them out, into the folder `out`; what `patchlight crop` does.

    `photos` is a file, a folder, a pattern such as "photos/**/*.jpg", or a list of these; `settings` says what to find
    and to cut, `how` with which device and processes, and what else to write; `model` is what `load` takes, or gave.
    A call with the same arguments goes on where another was stopped, does what is new or changed, and nothing if that
    is all there. A photo that cannot be used gets a row that says why. Raises PatchlightError, before anything is
    written, for what cannot be: a path that is not there, a folder that was begun with other settings (unless
    `overwrite` begins anew), settings that do not go together. `reporter` hears how it goes; without one that shows on
    the terminal, and `Reporter()` is silent.
    """
    with on_terminal() if reporter is None else contextlib.nullcontext(reporter) as heard:
        paths = [photos] if isinstance(photos, str | PathLike) else list(photos)
        wrong = next((path for path in paths if not isinstance(path, str | PathLike)), None)
        require(
            wrong is None, f"photos are paths of files or folders, not {type(wrong).__name__}; `localize` takes images"
        )
        for name, given, kind in (("settings", settings, CropSettings), ("how", how, CropRunSettings)):
            require(
                given is None or isinstance(given, kind), f"{name} is a pl.{kind.__name__}, not {type(given).__name__}"
            )
        return _crop(paths, out, settings or CropSettings(), how or CropRunSettings(), model, heard)


def _crop(
    paths: Sequence[str | PathLike[str]],
    out: str | PathLike[str],
    settings: CropSettings,
    how: CropRunSettings,
    model: str | PathLike[str] | Loaded,
    reporter: Reporter,
) -> CropSummary:
    require(bool(os.fspath(out)), f"out={os.fspath(out)!r} is not a folder; name one (is a shell variable empty?)")
    device = how.device if isinstance(model, Loaded) else resolve_device(how.device)
    folder = ResultFolder(out)
    inputs = find_photos(paths, folder.path, folder.known_files)
    with folder.held(), asked_to_stop() as asked, Pool(how.workers) as pool, contextlib.ExitStack() as stack:
        detector = Detector.of(_loaded(model, device), settings.method, settings.detector_options)
        jpegtran = which("jpegtran") if settings.lossless and not settings.boxes_only else None
        for line in _noteworthy(detector, settings, jpegtran):
            reporter.tell(line)
        made_with = _made_with(settings, detector.loaded, jpegtran)
        folder.check(made_with, overwrite=how.overwrite)
        if how.overwrite and folder.is_begun_anew(made_with):
            reporter.tell(f"{folder.path}: was started over with these settings and interrupted; continuing")
        journal = folder.begin(made_with, overwrite=how.overwrite)
        stack.callback(journal.close)
        folder.note_named(inputs.named)
        kept = {file: entry.place for file, entry in journal.entries.items()}
        inputs = replace(inputs, photos=with_places(inputs, kept))
        book = None
        if settings.burst:
            book = FrameStore(folder.looks)
            stack.callback(book.close)
        run = CropRun(folder, journal, inputs, settings, how, detector, pool, asked, reporter)
        finder = Finder(detector, how.batch_size, reporter)
        cut = Cut(
            margin=settings.margin, aspect=parse_aspect(settings.aspect), longest=settings.size, jpegtran=jpegtran
        )
        pipeline = CropPipeline(run, finder, cut, book)
        computed = pipeline.work()
        if not computed and (earlier := earlier_summary(run)):
            return earlier
        return finish(run, made_with, computed, pipeline.seconds)


def _noteworthy(detector: Detector, settings: CropSettings, jpegtran: str | None) -> Iterator[str]:
    """What deserves a line before the first photo."""
    source = detector.loaded.provenance.source
    for note in detector.loaded.notes:
        yield f"{source}: {note}"
    if not detector.is_calibrated:
        yield (
            f"{source}: its confidence by the method {detector.method!r} is uncalibrated: rank photos by it, and do "
            "not read it as a probability"
        )
    if settings.lossless and not settings.boxes_only and jpegtran is None:
        yield (
            "lossless: jpegtran is not installed (apt install libjpeg-turbo-progs, or brew install jpeg-turbo), so "
            "JPEGs are re-encoded with their own tables"
        )


def _loaded(model: str | PathLike[str] | Loaded, device: torch.device | str | None) -> Loaded:
    try:
        return load_or_given(model, device)
    except RuntimeError as error:
        give_up(torch.device(device or "cpu"), error)


def _made_with(settings: CropSettings, loaded: Loaded, jpegtran: str | None) -> dict[str, Any]:
    """Everything that the rows depend on, besides the photos, by name."""
    return settings.to_dict() | {
        "patchlight": __version__,
        "version": VERSION,
        "lossless_by": None if jpegtran is None else "jpegtran",
        "model": loaded.provenance.sha256,
        MODEL_SOURCE: loaded.provenance.source,
        "model.settings": loaded.config.to_dict(),
        "model.preprocess": loaded.preprocess.config.to_dict(),
        "model.subject": None if loaded.subject is None else loaded.subject.to_dict(),
        "model.groups": None if loaded.naming is None else loaded.naming.fingerprint(),
    }
