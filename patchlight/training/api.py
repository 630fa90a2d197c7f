"""Training from Python, which is what the commands `train` and `finetune` do, too."""

import contextlib
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from patchlight.errors import PatchlightError
from patchlight.remote import is_remote
from patchlight.reporting import SILENT, Reporter, on_terminal
from patchlight.training import loop
from patchlight.training.config import TrainConfig
from patchlight.training.data import CLASS_WITHOUT_PHOTOS, Dataset
from patchlight.training.finetune import choose_recipe, in_words, resumed_recipe
from patchlight.training.objective import Teacher
from patchlight.training.own_dataset import name_of
from patchlight.training.processes import rank_and_world
from patchlight.training.recipe import read_recipe, recipe_config, recipe_teacher
from patchlight.training.run_folder import RunFolder
from patchlight.training.sources import Photos, open_dataset, require_photos
from patchlight.weights.load import Loaded, load


@dataclass(frozen=True)
class Trained:
    """A finished run."""

    folder: Path
    """The run's folder, for `patchlight.load`."""
    config: TrainConfig
    """The settings that the run used, with all choices and changes applied."""
    photos: int
    """Number of photos in the final evaluation."""
    accuracy: float | None
    """Of its answers; of a run without labels that of its features' nearest neighbours, and None without classes."""
    measures: Mapping[str, Any]
    """All figures of the final evaluation, by name, as on the card."""

    @functools.cached_property
    def loaded(self) -> Loaded:
        """The model, as `patchlight.load` gives it."""
        return load(self.folder)

    def course(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl: {"step": 50, "epoch": 1.5, "loss": 0.7, ...}."""
        return RunFolder(self.folder).rows()


def train(
    recipe: str | os.PathLike[str] | TrainConfig,
    out: str | os.PathLike[str],
    *,
    photos: Photos | None = None,
    validation: Photos | None = None,
    settings: Mapping[str, Any] | None = None,
    resume: bool = False,
    device: str | None = None,
    teacher: Teacher | None = None,
    reporter: Reporter | None = None,
) -> Trained:
    """Train as a recipe says into the folder `out`; stopped anywhere, `resume=True` goes on exactly.

    `recipe` is a `TrainConfig`, a Python file with config() -> TrainConfig, or the name of one that `patchlight
    recipes` lists. `photos` and `validation` stand in for those that it names: paths, or any Dataset (PyTorch's,
    torchvision's, one's own) whose items are pairs of a photo and its label. `settings` changes others of its
    settings, {"optim.lr": 1e-3}. `teacher` is for distillation. `reporter` hears how it goes; without one that shows
    on the terminal, and `Reporter()` is silent.
    """
    changes = dict(settings or {})
    for name, given in (("data.train", photos), ("data.validation", validation)):
        if given is not None:
            changes[name] = name_of(given)
    make_teacher = None
    if isinstance(recipe, TrainConfig):
        config = recipe.changed(changes)
    elif isinstance(recipe, str | os.PathLike):
        module = read_recipe(recipe)
        config = recipe_config(module, changes)
        if hasattr(module, "teacher") and teacher is None and not changes.keys() & {"distill", "distill.teacher"}:
            if config.distill is None:
                raise PatchlightError(f"{recipe}: has a teacher, but its config has no `distill`")
            make_teacher = partial(recipe_teacher, module, out, config)
    else:
        raise PatchlightError(
            f"recipe={recipe!r:.60} is not a recipe; give a TrainConfig, a Python file with config(), or one's name"
        )
    run = partial(loop.train, photos=photos, validation=validation, teacher=teacher, make_teacher=make_teacher)
    return _run(run, config, out, resume, device, reporter)


def finetune(
    photos: Photos,
    out: str | os.PathLike[str],
    *,
    model: str | os.PathLike[str] = "default",
    validation: Photos | None = None,
    settings: Mapping[str, Any] | None = None,
    resume: bool = False,
    device: str | None = None,
    reporter: Reporter | None = None,
) -> Trained:
    """Teach a checkpoint the classes of your own photos; how much of it learns is chosen by how many there are.

    `model` is what `patchlight.load` takes by name; the rest is as in `train`.
    """
    changes, start = dict(settings or {}), os.fspath(model)
    with _heard(reporter) as heard:
        workers = changes.get("data.workers", 2)
        column = changes.get("data.label_column")
        training = open_dataset(
            photos,
            label_column=column if isinstance(column, str) else None,
            workers=workers if isinstance(workers, int) else 2,
            reporter=heard,
        )
        name, judged_by = name_of(photos), None if validation is None else name_of(validation)
        _require_classes(training, name)
        folder = RunFolder(out)
        if resume and folder.settings.exists():
            config = resumed_recipe(folder.config(), start, name, validation=judged_by, changes=changes)
        else:
            config = choose_recipe(load(start), name, training, validation=judged_by, changes=changes)
        heard.tell(in_words(config, training))
    # What took long to open need not be opened again.
    own = None if isinstance(photos, str | os.PathLike) and not is_remote(name) else training
    return _run(partial(loop.train, photos=own, validation=validation), config, out, resume, device, reporter)


def _require_classes(training: Dataset, name: str) -> None:
    require_photos(training, name)
    if len(training.classes) == 1:
        lost = next((f" ({note.line})" for note in training.notes if note.kind == CLASS_WITHOUT_PHOTOS), "")
        raise PatchlightError(
            f"{name}: all photos are of one class, {training.classes[0]!r}{lost}; add photos of another class"
        )


def _run(
    run: Callable[..., Any],
    config: TrainConfig,
    out: str | os.PathLike[str],
    resume: bool,
    device: str | None,
    reporter: Reporter | None,
) -> Trained:
    with _heard(reporter) as heard:
        if resume and not Path(out).exists():
            heard.tell(f"{os.fspath(out)}: there is no run to resume; starting one")
        result = run(config, out, resume=resume, device=device, reporter=heard)
    return Trained(Path(out), config, result.photos, result.accuracy, result.summary())


def _heard(reporter: Reporter | None) -> contextlib.AbstractContextManager[Reporter]:
    """The reporter in the first process, a silent one in all others."""
    if rank_and_world()[0]:
        return contextlib.nullcontext(SILENT)
    return on_terminal() if reporter is None else contextlib.nullcontext(reporter)
