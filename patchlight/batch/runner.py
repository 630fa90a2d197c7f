"""A folder of photos to a folder of crops: any number of photos, in bounded memory, to be stopped at any moment."""

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from shutil import which
from typing import Any

import torch

from patchlight import __version__
from patchlight.batch.finder import Finder, first_line, give_up
from patchlight.batch.formats import check_format
from patchlight.batch.inputs import find_photos, with_places
from patchlight.batch.pipeline import CropPipeline, Progress, Steps
from patchlight.batch.pool import Pool
from patchlight.batch.results import MODEL_SOURCE, ResultFolder
from patchlight.batch.rows import VERSION
from patchlight.batch.sequences import FrameStore
from patchlight.batch.settings import CropSettings
from patchlight.batch.summary import Summary, Wanted, earlier_summary, finish
from patchlight.errors import PatchlightError
from patchlight.images.crop import Cut, parse_aspect
from patchlight.json_config import require
from patchlight.localizing.detector import Detector
from patchlight.signals import asked_to_stop
from patchlight.weights.load import Loaded, load


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
    overlay: bool = False,
    watch: Callable[[Progress], None] = lambda progress: None,
    tell: Callable[[str], None] = lambda line: None,
) -> Summary:
    """Find the subjects of photos (files, folders, patterns) and cut them out, into the folder `out`.

    A call with the same arguments goes on where another was stopped, does what is new or changed, and nothing if that
    is all there. Other settings or another model are refused, unless `overwrite` begins anew (and goes on with that
    where it was stopped). A file that cannot be used gets a row that says why. `workers` processes read and cut, 0 for
    none; `batch_size` is for GPUs. `formats` are further files to write, see formats.py; `overlay` asks for pictures of
    what was found, see overlay.py. `watch` hears of the progress, `tell` of what deserves a line.
    """
    settings = settings or CropSettings()
    for name, value, least in (("workers", workers, 0), ("batch_size", batch_size, 1)):
        require(value >= least, f"{name}={value} must be {least} or more")
    for each in formats:
        check_format(each)
    require(bool(os.fspath(out)), f"out={os.fspath(out)!r} is not a folder; name one (is a shell variable empty?)")
    device = _checked_device(device)
    folder = ResultFolder(out)
    inputs = find_photos(paths, folder.path, folder.known_files)
    with folder.held(), asked_to_stop() as asked, Pool(workers) as pool:
        loaded = model if isinstance(model, Loaded) else _loaded(model, torch.device(device))
        for note in loaded.notes:
            tell(f"{loaded.provenance.source}: {note}")
        detector = Detector.of(loaded, settings.method, settings.detector_options)
        if not detector.is_calibrated:
            tell(
                f"{loaded.provenance.source}: its confidence by the method {detector.method!r} is uncalibrated: rank "
                "photos by it, and do not read it as a probability"
            )
        jpegtran = which("jpegtran") if settings.lossless and not settings.boxes_only else None
        if settings.lossless and not settings.boxes_only and jpegtran is None:
            tell(
                "lossless: jpegtran is not installed (apt install libjpeg-turbo-progs, or brew install jpeg-turbo), so "
                "JPEGs are re-encoded with their own tables"
            )
        made_with = _made_with(settings, loaded, jpegtran)
        folder.check(made_with, overwrite=overwrite)
        if overwrite and folder.is_begun_anew(made_with):
            tell(f"{folder.path}: was started over with these settings and interrupted; continuing")
        journal = folder.begin(made_with, overwrite=overwrite)
        with contextlib.ExitStack() as stack:
            stack.callback(journal.close)
            folder.note_named(inputs.named)
            steps = Steps(folder.path, asked, watch)
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
                book = FrameStore(folder.looks)
                stack.callback(book.close)
            finder = Finder(detector, batch_size, tell)
            line = CropPipeline(folder, journal, pool, finder, settings, cut, photos, book, watch, report)
            computed = line.work(asked)
            inputs = replace(inputs, photos=photos)
            wanted = Wanted(tuple(formats), report, overlay)
            if not computed and (earlier := earlier_summary(folder, inputs, journal, wanted)):
                return earlier
            return finish(folder, inputs, journal, detector, made_with, wanted, computed, line.seconds, pool, steps)


def _loaded(model: str | PathLike[str], device: torch.device) -> Loaded:
    try:
        return load(model if isinstance(model, str) else Path(model), device=device)
    except RuntimeError as error:
        give_up(device, error)


def _checked_device(device: str | None) -> str:
    """The one that is named, else the GPU where there is one; refused where nothing can be computed."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=device).item()
    except Exception as error:  # each backend has its own way to say that it is not there
        raise PatchlightError(
            f"device={device!r} does not compute here ({first_line(error)}); use cpu, or leave it out"
        ) from None
    return device


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
