"""A folder of photos to a folder of crops: any number of photos, in bounded memory, to be stopped at any moment."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from shutil import which
from typing import Any

import torch

from patchlight import __version__
from patchlight.batch.finder import Finder
from patchlight.batch.formats import check_format
from patchlight.batch.inputs import find_photos, with_places
from patchlight.batch.line import PhotoLine, Progress
from patchlight.batch.looks import LookBook
from patchlight.batch.pool import Pool
from patchlight.batch.results import ResultFolder
from patchlight.batch.rows import VERSION
from patchlight.batch.settings import CropSettings
from patchlight.batch.summary import Summary, earlier_summary, finish
from patchlight.config import require
from patchlight.images.crop import Cut, parse_aspect
from patchlight.localizing.heat import resolve_method
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
    inputs = find_photos(paths, folder.path, folder.known_files)
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
            finder = Finder(loaded, settings, batch_size, tell)
            line = PhotoLine(folder, journal, pool, finder, settings, cut, photos, book, watch, report)
            computed = line.work(asked)
            inputs = replace(inputs, photos=photos)
            if not computed and (earlier := earlier_summary(folder, inputs, journal, formats, report=report)):
                return earlier
            return finish(folder, inputs, journal, loaded, made_with, computed, line.seconds, formats, report=report)


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
