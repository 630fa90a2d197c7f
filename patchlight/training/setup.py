"""What a run begins with: the photos, the model and whoever teaches it, made as the settings say or refused.

Everything that is wrong is said here, before the first step.
"""

import os
from collections.abc import Sequence
from functools import partial

from torch import nn

from patchlight.config import SubjectHeat
from patchlight.errors import PatchlightError
from patchlight.families import ModelConfig
from patchlight.models.families import Model
from patchlight.models.families import make_model as fresh_model
from patchlight.models.vit import ViT
from patchlight.remote import is_remote
from patchlight.reporting import SILENT, Reporter
from patchlight.training.config import TrainConfig
from patchlight.training.data import CLASS_WITHOUT_PHOTOS, Dataset, split, subset
from patchlight.training.dino import Dino
from patchlight.training.head_alone import HeadAlone
from patchlight.training.learner import Learner
from patchlight.training.mae import Mae
from patchlight.training.objective import Classification, Teacher
from patchlight.training.scan import scan
from patchlight.training.sources import Photos, has_validation_part, open_dataset, require_photos
from patchlight.training.subject import NO_BOXES, FindSubject, on_canvases
from patchlight.weights.groups import Groups, gaps_of, groups_by_name, read_groups
from patchlight.weights.load import load

HEADS = ("head.", "distill_head.")


def with_own_validation(config: TrainConfig) -> TrainConfig:
    """Photos that lie apart to judge by (val/ beside train/) are the validation set, where no other is named."""
    if config.data.validation is not None or not has_validation_part(config.data.train):
        return config
    return config.changed({"data.validation": config.data.train})


def open_sets(
    config: TrainConfig,
    photos: Photos | None = None,
    validating: Photos | None = None,
    reporter: Reporter = SILENT,
) -> tuple[Dataset, Dataset | None]:
    """The training and the validation photos, those that are given or else those that the config names.

    Those in files are not read yet.
    """
    opened = partial(
        open_dataset,
        labelled=config.labelled,
        label_column=config.data.label_column,
        unnamed=config.subject is not None,  # where a subject is can be learnt without knowing what it is
        workers=config.data.workers,
        reporter=reporter,
    )
    try:
        training = opened(config.data.train if photos is None else photos)
    except PatchlightError as error:
        named = config.data.train
        if photos is not None or is_remote(named) or os.path.exists(os.path.expanduser(named)):
            raise
        raise PatchlightError(f"{error}; set data.train to the photos to learn from") from None
    require_photos(training, config.data.train)
    validation = None
    judged_by = config.data.validation if validating is None else validating
    if judged_by is not None:
        try:
            validation = opened(judged_by, "validation")
        except PatchlightError as error:
            raise PatchlightError(f"{error}{_instead_of_its_part(config)}") from None
    if config.subject is not None:
        for photos, name in ((training, config.data.train), (validation, config.data.validation)):
            if photos is not None and photos.marks is None:
                raise PatchlightError(f"{name}: {NO_BOXES}")
    return training, validation


def _instead_of_its_part(config: TrainConfig) -> str:
    """The remedy where val/ beside train/ is no use."""
    if config.data.validation != config.data.train:
        return ""
    return "; or give the folder of its training part alone, of which some photos are held out then"


def check_photos(
    config: TrainConfig,
    training: Dataset,
    validation: Dataset | None,
    reporter: Reporter = SILENT,
) -> tuple[Dataset, Dataset, list[str]]:
    """The photos to learn from and to judge by, without those that cannot be read, and what the card says of these."""
    found = scan(training, validation, workers=config.data.workers, reporter=reporter, labelled=config.labelled)
    for problem in found.problems:
        reporter.tell(problem)
    if found.fatal:
        raise PatchlightError(f"{config.data.train}: {'; '.join(found.fatal)}{_instead_of_its_part(config)}")
    notes = []
    if found.left_out:
        notes.append(f"photos that cannot be read and were left out: {len(found.left_out):,}")
        reporter.tell(notes[-1])
    if found.in_both:
        notes.append(
            f"validation photos that are also among the training photos, which flatters the results: {found.in_both:,}"
        )
    training = found.clean(training)
    if validation is None:
        # DINO's features are judged by labels or not at all; MAE's drawings can be looked at.
        needless = config.dino is not None and len(training.classes) < 2
        training, validation = split(training, 0.0 if needless else config.data.validation_share)
    else:
        validation = found.clean_validation(validation)
    if config.data.train_share < 1:
        training = subset(training, config.data.train_share)
    if not len(validation) and config.labelled:
        raise PatchlightError(
            f"{config.data.train}: leaves no photos to judge by; add photos (two or more a class), raise "
            "data.validation_share, or name others with data.validation"
        )
    what = "classes" if config.labelled else "folders, by whose names its features are judged"
    classes = f", {len(training.classes)} {what}" if len(training.classes) > 1 else ""
    count = "1 photo" if len(training) == 1 else f"{len(training):,} photos"
    judging = f", {len(validation):,} to judge by" if len(validation) else ""
    reporter.tell(f"{count} to learn from{judging}{classes}")
    if config.subject is not None:
        side, workers = config.subject.canvas, config.data.workers
        training, validation = on_canvases(training, side, workers), on_canvases(validation, side, workers)
    return training, validation, notes


def check_classes(config: TrainConfig, training: Dataset, reporter: Reporter) -> Groups | None:
    """Refuse more or fewer than the model has; their groups, where there are any."""
    classes = training.classes
    if config.labelled and len(classes) != config.model.num_classes:
        lost = [note.line for note in training.notes if note.kind == CLASS_WITHOUT_PHOTOS]
        remedy = f"bring photos back ({lost[0]}), or " if lost else ""
        raise PatchlightError(
            f"{config.data.train}: has {len(classes)} classes, the model {config.model.num_classes}; {remedy}"
            f"set model.num_classes={len(classes)}"
        )
    if config.data.groups is None:
        named = groups_by_name(classes) if config.labelled else None
        if named is not None:
            words = " and ".join(
                [", ".join(named.names[:-1]), named.names[-1]] if len(named.names) > 1 else named.names
            )
            reporter.tell(f"groups by the names of the classes: {words}; data.groups names a table of others")
        return named
    groups = read_groups(config.data.groups, classes)
    for line in gaps_of(config.data.groups, classes):
        reporter.tell(line)
    return groups


def make_model(config: TrainConfig, classes: Sequence[str], reporter: Reporter) -> tuple[Model, SubjectHeat | None]:
    """Fresh, or from a checkpoint with a head for the new classes; only the blocks that are to learn can.

    And how the checkpoint finds subjects, where that stays: the head alone learns, and photos are seen as before.
    """
    subject = None
    if config.start is None:
        vit = fresh_model(config.model)
    else:
        asked = ("num_classes", "head_hidden", "image_size")
        loaded = load(
            config.start,
            **{name: getattr(config.model, name) for name in asked if hasattr(config.model, name)},
        )
        vit = fresh_model(config.model)
        state = loaded.model.state_dict()
        if loaded.labels is not None and loaded.labels != tuple(classes):
            known, wanted = next(pair for pair in zip(loaded.labels, classes, strict=True) if pair[0] != pair[1])
            reporter.tell(
                f"a fresh head in place of its own, for other classes: {wanted!r} where {config.start} has {known!r}"
            )
            state |= {name: value for name, value in vit.state_dict().items() if name.startswith(HEADS)}
        try:
            vit.load_state_dict(state)
        except RuntimeError:
            raise PatchlightError(
                f"{config.start}: is not the model of the settings: {_differences(loaded.config, config.model)}; give "
                "`model` these settings, or use `patchlight finetune`, which does"
            ) from None
        for note in loaded.notes:
            reporter.tell(note)
        if config.trainable_blocks == 0 and loaded.preprocess.config == config.preprocess:
            subject = loaded.subject
        elif loaded.subject is not None and config.subject is None:
            reporter.tell(
                "how the checkpoint finds subjects is not kept, since its blocks learn or it sees photos otherwise; "
                "trainable_blocks=0 with its own preprocessing keeps it"
            )
    if config.trainable_blocks is not None:
        vit.requires_grad_(False)
        learning: list[nn.Module | None] = [vit.head, getattr(vit, "distill_head", None)]
        if config.trainable_blocks:
            learning += [vit.norm, *list(vit.blocks)[-config.trainable_blocks :]]
        for module in learning:
            if module is not None:
                module.requires_grad_(True)
    return vit.train(), subject


def _differences(found: ModelConfig, wanted: ModelConfig) -> str:
    """Settings of a model that are not as wanted, but for those that are not in its weights."""
    theirs = found.to_dict()
    return ", ".join(
        f"{name}={theirs.get(name)} (not {value})"
        for name, value in wanted.to_dict().items()
        if theirs.get(name) != value and name not in ("drop_path", "dropout", "init")
    )


def make_learner(
    vit: Model, config: TrainConfig, training: Dataset, teacher: Teacher | None, subject: SubjectHeat | None
) -> Learner:
    """What is learnt, as the settings say."""
    if isinstance(vit, ViT):
        if config.dino is not None:
            return Dino(vit, config)
        if config.mae is not None:
            return Mae(vit, config)
        if config.subject is not None:
            return FindSubject(vit, config, training)
    kind = HeadAlone if HeadAlone.suits(vit, config, len(training)) else Classification
    return kind(vit, config, teacher, subject)
