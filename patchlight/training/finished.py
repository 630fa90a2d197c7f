"""What a finished run leaves: a model that `patchlight.load` takes, its card and its curves."""

from pathlib import Path

from patchlight.errors import PatchlightError
from patchlight.explain import plot
from patchlight.files import replacing
from patchlight.models.families import Model
from patchlight.reporting import SILENT, Reporter
from patchlight.training.card import training_card
from patchlight.training.charts import draw_curves
from patchlight.training.data import Dataset
from patchlight.training.learner import Learner, Result
from patchlight.training.run_folder import RunFolder
from patchlight.weights.find import ASSETS
from patchlight.weights.groups import Groups, gaps_of
from patchlight.weights.load import load
from patchlight.weights.read import check_finite
from patchlight.weights.save import save


def save_finished(
    folder: RunFolder,
    learner: Learner,
    model: Model,
    training: Dataset,
    result: Result,
    seconds: float,
    hardware: str,
    notes: list[str],
    groups: Groups | None = None,
) -> None:
    config = learner.config
    labels = training.classes if config.labelled else None
    extras = learner.saved_with()
    try:
        save(model, folder.path, preprocess=config.preprocess, labels=labels, groups=groups, overwrite=True, **extras)
    except PatchlightError as error:
        raise PatchlightError(f"{error}; free some space and resume: no training is lost") from None
    rows = folder.rows()
    at_the_end = {name: value for row in rows for name, value in row.items() if name in ("explained", "feature_rank")}
    summary = at_the_end | result.summary() | {"photos": len(training), "validation_photos": result.photos}
    card = training_card(config, training.classes, summary, seconds, hardware, notes)
    folder.replace("README.md", card.encode())
    try:
        curves = plot.to_png(draw_curves(rows)[0])
    except PatchlightError:
        return  # no matplotlib: the numbers are in metrics.jsonl
    folder.replace("curves.png", curves)


def install_default(
    run: str | Path,
    assets: Path = ASSETS,
    groups: str | Path | None = None,
    reporter: Reporter = SILENT,
) -> Path:
    """Make a run's model the one that `patchlight.load("default")` gives: in half precision, with the run's card.

    `groups` is a table as `read_groups` takes it, in place of the run's own; `reporter` hears what of it does not
    fit, and what the model cannot do yet.
    """
    folder = RunFolder(run)
    loaded = load(folder.path)
    loaded.model.half()
    check_finite(dict(loaded.model.state_dict()), f"{run} in half precision")
    if groups is not None and loaded.labels is None:
        raise PatchlightError(f"{run}: names no classes, so that {groups} has nothing to group; leave it out")
    target = save(loaded, assets / "default", groups=groups, overwrite=True)
    for line in [] if groups is None else gaps_of(groups, loaded.labels or ()):
        reporter.tell(line)
    if loaded.subject is None:
        reporter.tell("it was not trained to find subjects: `crop` uses tokencut, which is seldom sure")
    else:
        reporter.tell("its confidence is not calibrated yet: python benchmarks/subjects.py default --calibrate --write")
    if loaded.labels is None:
        reporter.tell("it names no classes: `classify` needs another model")
    card = folder.path / "README.md"
    if card.is_file():
        with replacing(target / "README.md") as temporary:
            temporary.write_bytes(card.read_bytes())
    return target
