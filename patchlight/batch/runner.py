"""A folder of photos to a folder of crops: any number of photos, in bounded memory, to be stopped at any moment."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from shutil import which
from typing import TYPE_CHECKING, Any

import torch

from patchlight import __version__
from patchlight.batch.finder import Finder, give_up
from patchlight.batch.inputs import Inputs, find_photos, with_places
from patchlight.batch.overrides import Override, read_boxes, read_corrections
from patchlight.batch.parts import take_part
from patchlight.batch.pipeline import CropPipeline, CropRun, stopped
from patchlight.batch.pool import Pool
from patchlight.batch.results import MODEL_SOURCE, ResultFolder, read_json
from patchlight.batch.rows import VERSION
from patchlight.batch.sequences import FrameStore
from patchlight.batch.settings import CropRunSettings, CropSettings
from patchlight.batch.summary import CropSummary, earlier_summary, finish
from patchlight.batch.video import SUFFIXES as VIDEO_SUFFIXES
from patchlight.batch.video import pyav, with_frames
from patchlight.deploy.chosen import HALF, MANY, WHOLE, Kind, chosen_engine, kind_named, suits
from patchlight.devices import resolve_device
from patchlight.errors import PatchlightError
from patchlight.files import printable
from patchlight.images.decode import PHOTO_SUFFIXES
from patchlight.json_config import JsonConfig, require
from patchlight.localizing.detector import Detector
from patchlight.remote import as_given, is_remote
from patchlight.reporting import Progress, Reporter, on_terminal
from patchlight.signals import asked_to_stop
from patchlight.weights.load import Loaded, Runs, load_or_given

if TYPE_CHECKING:
    from patchlight.batch.on_ray import Cluster


def crop_photos(
    photos: str | PathLike[str] | Sequence[str | PathLike[str]],
    out: str | PathLike[str],
    settings: CropSettings | None = None,
    how: CropRunSettings | None = None,
    *,
    model: str | PathLike[str] | Loaded | Runs = "default",
    reporter: Reporter | None = None,
) -> CropSummary:
    """Find the subjects of photos and cut them out, into the folder `out`; what `patchlight crop` does.

    `photos` is a file, a folder, a pattern such as "photos/**/*.jpg", or a list of these; `settings` says what to find
    and to cut, `how` with which device and processes, and what else to write; `model` is what `load` takes, or gave, or
    what `load_engine` gave. A call with the same arguments goes on where another was stopped, does what is new or
    changed, and nothing if that is all there. A photo that cannot be used gets a row that says why. Raises
    PatchlightError, before anything is written, for what cannot be: a path that is not there, a folder that was begun
    with other settings (unless `overwrite` begins anew), settings that do not go together. `reporter` hears how it
    goes; without one that shows on the terminal, and `Reporter()` is silent.
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
    model: str | PathLike[str] | Loaded | Runs,
    reporter: Reporter,
) -> CropSummary:
    require(bool(os.fspath(out)), f"out={os.fspath(out)!r} is not a folder; name one (is a shell variable empty?)")
    require(
        how.part is None or settings.video is None,
        f"part={how.part!r} does not go with video={settings.video}; give each machine some of the videos",
    )
    require(
        how.part is None or settings.scale != "same",
        f"part={how.part!r} does not go with scale='same', which is found by looking at all photos; leave one out",
    )
    for said, asked_for in (
        ("burst=True", settings.burst),
        (f"video={settings.video}", settings.video is not None),
        ("scale='same'", settings.scale == "same"),
    ):
        require(
            how.on is None or not asked_for,
            f"{said} does not go with on={how.on!r}, which looks at each photo alone; leave one out",
        )
    if settings.video is not None:
        pyav()  # if it is missing, before anything is written
    device = device_here(how, model)
    folder = ResultFolder(out)
    if any(is_remote(as_given(path)) for path in paths):
        reporter.progress(Progress(what="listing photos"))
    suffixes = PHOTO_SUFFIXES if settings.video is None else PHOTO_SUFFIXES | VIDEO_SUFFIXES
    inputs = find_photos(paths, folder.path, folder.known_files, suffixes)
    overrides = _said_of(inputs, folder, settings)
    with folder.held(), asked_to_stop() as asked, Pool(how.workers) as pool, contextlib.ExitStack() as stack:
        cluster = stack.enter_context(cluster_of(how))
        loaded, kind = loaded_on(model, device), None
        jpegtran = which("jpegtran") if settings.lossless and not settings.boxes_only else None
        if (
            settings.engine != "none"
            and isinstance(model, str | PathLike)
            and (cluster is None or cluster.device == "cpu")
        ):
            kind = _engine_to_take(loaded, settings, folder, len(inputs.photos), anew=how.overwrite)
        if kind is not None:
            made_with = made_with_of(settings, how.part, loaded, jpegtran, kind)
            folder.check(made_with, overwrite=how.overwrite)  # before an export
            loaded, kind = _with_engine(loaded, kind, settings, reporter)
        detector = Detector.of(loaded, settings.method, settings.detector_options)
        for line in _noteworthy(detector, settings, jpegtran):
            reporter.tell(line)
        made_with = made_with_of(settings, how.part, detector.loaded, jpegtran, kind)
        folder.check(made_with, overwrite=how.overwrite)
        if how.overwrite and folder.is_begun_anew(made_with):
            reporter.tell(f"{folder.path}: was started over with these settings and interrupted; continuing")
        journal = folder.begin(made_with, overwrite=how.overwrite)
        stack.callback(journal.close)
        folder.take_parts(journal)
        folder.note_named(inputs.named)
        given = {
            "photos": [os.fspath(path) for path in paths],
            "cwd": os.getcwd(),
            "model": detector.loaded.provenance.source,
            "engine": str(loaded.engine.folder.absolute()) if kind is None and loaded.engine is not None else None,
        }
        if read_json(folder.given) != given:
            folder.write_json(folder.given, given)
        if settings.video is not None:

            def step(video: str, done: int, total: int) -> None:
                if asked.signal:
                    raise stopped(folder.path, f"while frames of {printable(video)} were taken", asked.signal)
                reporter.progress(
                    Progress(what="frame", done=done, total=total, how=printable(os.path.basename(video)))
                )

            frames = with_frames(inputs.photos, inputs.base, folder.frames, settings.video, step)
            inputs = replace(inputs, photos=tuple(frames))
        kept = {file: entry.place for file, entry in journal.entries.items()}
        inputs = replace(inputs, photos=with_places(inputs, kept))
        inputs, part = take_part(inputs, how.part, folders_whole=settings.burst)
        if part is not None:
            folder.write_json(folder.part, part)
        changes = folder.changes(inputs.photos, journal)
        book = None
        if settings.burst:
            book = FrameStore(folder.looks)
            stack.callback(book.close)
        if cluster is not None:
            how = cluster.writes(how, len(inputs.photos), reporter)
        run = CropRun(folder, journal, inputs, settings, how, detector, pool, asked, reporter, overrides)
        finder = Finder(detector, how.batch_size, reporter)
        pipeline = CropPipeline(run, finder, settings.cut(jpegtran), book)
        computed = pipeline.work(None if cluster is None else partial(cluster.work, pipeline))
        gone = folder.note_gone(inputs.photos, journal)
        pruned = folder.prune(journal) if how.prune else 0
        if not computed and not gone and (earlier := earlier_summary(run)):
            return replace(earlier, changes=changes)
        summary = finish(run, made_with, computed, pipeline.seconds)
        return replace(summary, changes=changes, pruned=pruned)


def _engine_to_take(
    loaded: Loaded, settings: CropSettings, folder: ResultFolder, photos: int, *, anew: bool
) -> Kind | None:
    """The engine that a run takes by itself: the one that it was begun with, or what is asked for, see `deploy.chosen`;
    None is torch."""
    begun, before = folder.engine_of_before()
    if settings.engine == "bfloat16":
        require(suits(loaded), "engine='bfloat16' is for ViTs that were taught to find subjects, on the CPU")
        return HALF
    if begun and not anew:
        return kind_named(before)
    if photos < MANY or not suits(loaded) or settings.method not in ("auto", "subject"):
        return None
    return next((kind for kind in WHOLE if kind.missing() is None), None)


def _with_engine(loaded: Loaded, kind: Kind, settings: CropSettings, reporter: Reporter) -> tuple[Loaded, Kind | None]:
    """The model by this engine; by torch, where that cannot be had and a run may begin without."""
    try:
        return replace(loaded, engine=chosen_engine(loaded, kind, reporter)), kind
    except PatchlightError as error:
        if settings.engine != "auto":
            raise PatchlightError(f"engine={settings.engine!r} cannot be had: {error}") from None
        reporter.tell(f"{loaded.provenance.source}: computed by torch, since {kind.name} cannot be had: {error}")
        return loaded, None


def _said_of(inputs: Inputs, folder: ResultFolder, settings: CropSettings) -> dict[str, Override]:
    """What the user says of photos, by their absolute paths; corrections count more than boxes that were imported."""
    imported = {} if settings.boxes is None else read_boxes(settings.boxes, inputs.base, settings.subjects)
    if settings.boxes is not None and not any(photo.file in imported for photo in inputs.photos):
        raise PatchlightError(
            f"{printable(settings.boxes)}: names none of the photos below {printable(inputs.base)}; give the folder "
            "that MegaDetector was run on"
        )
    return imported | read_corrections(folder.path)


def _noteworthy(detector: Detector, settings: CropSettings, jpegtran: str | None) -> Iterator[str]:
    """What deserves a line before the first photo."""
    source = detector.loaded.provenance.source
    for note in detector.loaded.notes:
        yield f"{source}: {note}"
    if detector.loaded.engine is not None:
        yield f"{source}: computed by {detector.loaded.engine.label}"
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


def cluster_of(how: CropRunSettings) -> contextlib.AbstractContextManager["Cluster | None"]:
    """The machines that do the work, where these are others."""
    if how.on is None:
        return contextlib.nullcontext()
    from patchlight.batch.on_ray import connected  # which imports this

    return connected(how)


def device_here(how: CropRunSettings, model: str | PathLike[str] | Loaded | Runs) -> torch.device | str | None:
    """Where the model is loaded here."""
    if how.on is not None:
        return "cpu" if isinstance(model, str | PathLike) else None
    return resolve_device(how.device) if isinstance(model, str | PathLike) else how.device


def loaded_on(model: str | PathLike[str] | Loaded | Runs, device: torch.device | str | None) -> Loaded:
    try:
        return load_or_given(model, device)
    except RuntimeError as error:
        give_up(torch.device(device or "cpu"), error)


def made_with_of(
    settings: JsonConfig, part: str | None, loaded: Loaded, jpegtran: str | None = None, kind: Kind | None = None
) -> dict[str, Any]:
    """Everything that the rows depend on, besides the photos, by name, and which share of the photos they are of."""
    own = None if loaded.engine is None else loaded.engine.fingerprint
    return settings.to_dict() | {
        "part": part,
        "patchlight": __version__,
        "version": VERSION,
        "lossless_by": None if jpegtran is None else "jpegtran",
        "model": loaded.provenance.sha256,
        MODEL_SOURCE: loaded.provenance.source,
        "engine": own if kind is None else kind.name,
        "model.settings": loaded.config.to_dict(),
        "model.preprocess": loaded.preprocess.config.to_dict(),
        "model.subject": None if loaded.subject is None else loaded.subject.to_dict(),
        "model.groups": None if loaded.naming is None else loaded.naming.fingerprint(),
    }
