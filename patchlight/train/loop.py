"""The training loop, top to bottom: read, vary, learn, evaluate, save; and go on exactly where it was stopped.

Nothing random is left to chance: the order of the photos and how each is varied derive from (seed, epoch, sample), what
the model draws itself (stochastic depth) from (seed, step). The position of a run is its step.
"""

import contextlib
import math
import os
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from patchlight.config import SubjectHeat
from patchlight.errors import PatchlightError
from patchlight.models.families import Model
from patchlight.models.families import make_model as fresh_model
from patchlight.models.vit import ViT
from patchlight.signals import asked_to_stop
from patchlight.train import trained_on
from patchlight.train.checkpoint import read_newest, write_checkpoint
from patchlight.train.config import TrainConfig
from patchlight.train.data import Batch, Dataset, batches, split, subset
from patchlight.train.dino import Dino
from patchlight.train.features import judge_features
from patchlight.train.learner import Learner, Result
from patchlight.train.mae import Mae
from patchlight.train.objective import Classification, Teacher, loaded_teacher
from patchlight.train.optim import WeightAverage, learning_rate, make_optimizer
from patchlight.train.processes import Processes, find_processes
from patchlight.train.publish import publish
from patchlight.train.run_folder import RunFolder
from patchlight.train.scan import scan
from patchlight.train.sources import open_dataset
from patchlight.train.step import Step
from patchlight.train.subject import FindSubject, on_canvases
from patchlight.weights.groups import Groups, gaps_of, read_groups
from patchlight.weights.load import load


@dataclass(frozen=True)
class Progress:
    """What the loop tells whoever watches."""

    step: int
    steps: int
    epoch: float
    loss: float
    images_per_second: float
    accuracy: float | None
    """Of the last evaluation."""


class Stopped(Exception):  # noqa: N818
    """The run was asked to stop and can be resumed; `.signal` says by what."""

    def __init__(self, folder: Path, step: int, signal_number: int) -> None:
        super().__init__(f"{folder}: stopped after step {step}; the same command with --resume goes on")
        self.signal = signal_number


def train(
    config: TrainConfig,
    out: str | os.PathLike[str],
    *,
    resume: bool = False,
    device: str | None = None,
    teacher: Teacher | None = None,
    watch: Callable[[Progress], None] = lambda progress: None,
    tell: Callable[[str], None] = lambda line: None,
) -> Result:
    """Train as the config says into the folder `out`, which `patchlight.load` takes afterwards.

    With `resume` an interrupted run goes on to the very weights that it would have reached; one that is finished is
    evaluated again. `teacher` is for distillation, where the config names none that `load` knows. `watch` hears of the
    progress, `tell` of everything that deserves a line.
    """
    folder = RunFolder(out)
    with find_processes(device) as processes, folder.held() if processes.is_first else contextlib.nullcontext():
        if processes.is_first:
            folder.check(config, resume=resume)
        processes.wait()
        return _train(config, folder, processes, teacher, watch, tell if processes.is_first else lambda line: None)


def _train(
    config: TrainConfig,
    folder: RunFolder,
    processes: Processes,
    teacher: Teacher | None,
    watch: Callable[[Progress], None],
    tell: Callable[[str], None],
) -> Result:
    run = _set_up(config, folder, processes, teacher, tell)
    now = _begin_or_go_on(run)
    learner, update, steps = run.learner, run.update, run.steps
    evaluate_every = run.steps_an_epoch * config.evaluate_every
    next_evaluation = _next_multiple(now.start, evaluate_every)
    stream = _open_stream(run, now.start)
    with asked_to_stop() as asked, contextlib.closing(stream):
        parts = update.prepared(_micro_batches(stream, config.accumulate))
        for step in range(now.start, steps):
            update.optimizer.set_lr(learning_rate(step, steps, config.optim))
            learner.set_progress(step / steps)
            torch.manual_seed(_step_seed(config.seed, step, processes.rank))
            loss = 0.0
            try:
                for part in range(config.accumulate):
                    loss += update.learn(next(parts), last=part == config.accumulate - 1)
            except PatchlightError:
                if not asked.signal:
                    raise
                _save(run, now, step)  # whoever reads the photos was told to stop, too
                raise Stopped(folder.path, step, asked.signal) from None
            loss = processes.mean(loss)
            if math.isfinite(loss):
                update.move(step)
                now.bad_losses = 0
            else:
                update.forget()
                _count_bad_loss(run, now, step)
            now.losses.append(loss)
            done = step + 1
            if processes.is_first and (done % config.log_every == 0 or done == steps):
                watch(_log_losses(run, now, done))
            if done % config.log_every == 0:
                now.losses.clear()
            if done >= next_evaluation and done < steps:
                next_evaluation = _next_multiple(done, evaluate_every)
                _evaluate(run, now, done)
            stop = processes.agree(asked.signal)
            if stop or done % config.checkpoint_every == 0:
                _save(run, now, done)
            if stop:
                raise Stopped(folder.path, done, stop)

        if now.start < steps:
            _save(run, now, steps)
    return _finish(run, now)


@dataclass(frozen=True)
class _Run:
    """Who and what takes part in a run, from its first step to its last."""

    config: TrainConfig
    folder: RunFolder
    processes: Processes
    training: Dataset
    validation: Dataset
    groups: Groups | None
    learner: Learner
    update: Step
    steps: int
    steps_an_epoch: float
    tell: Callable[[str], None]


@dataclass
class _Standing:
    """Where a run stands, beside its weights: a checkpoint keeps it."""

    start: int
    """Steps that were done before this process began."""
    seconds: float
    """That they took."""
    accuracy: float | None
    """Of the last evaluation."""
    losses: list[float]
    """Since the last line of metrics."""
    bad_losses: int
    """In a row."""
    left_out: int
    """Steps, altogether."""
    began: float = field(default_factory=time.perf_counter)

    def elapsed(self) -> float:
        """Seconds of the whole run."""
        return self.seconds + time.perf_counter() - self.began


def _set_up(
    config: TrainConfig,
    folder: RunFolder,
    processes: Processes,
    teacher: Teacher | None,
    tell: Callable[[str], None],
) -> _Run:
    # The photos. Everything that is wrong with them is said before the first step.
    training, validation = open_photos(config, tell)
    if config.labelled and len(training.classes) != config.model.num_classes:
        raise PatchlightError(
            f"{config.data.train}: has {len(training.classes)} classes, the model {config.model.num_classes}; "
            f"--set model.num_classes={len(training.classes)}"
        )
    groups = None if config.data.groups is None else read_groups(config.data.groups, training.classes)
    for line in [] if config.data.groups is None else gaps_of(config.data.groups, training.classes):
        tell(line)
    processes.check_batch(config)

    # The model, who teaches it, and how it moves.
    torch.manual_seed(config.seed)
    vit, subject = make_model(config, tell)
    vit = vit.to(processes.device)
    learner = make_learner(vit, config, training, teacher, subject).to(processes.device)
    model = processes.spread(learner, config)  # before the optimizer, since sharding replaces the weights
    optimizer = make_optimizer(learner, config.optim, capturable=processes.device.type == "cuda")
    average = None if config.ema is None else WeightAverage(vit, config.ema)
    # Random parts of photos in files are cut by whoever reads them, from their full size.
    cut_by_reader = training.images_NCHW is None and config.augment.crop == "resized"
    return _Run(
        config=config,
        folder=folder,
        processes=processes,
        training=training,
        validation=validation,
        groups=groups,
        learner=learner,
        update=Step(learner, model, optimizer, average, config, processes, cropped=cut_by_reader, tell=tell),
        steps=max(1, round(config.epochs * len(training) * config.augment.repeats / config.batch_size)),
        steps_an_epoch=len(training) * config.augment.repeats / config.batch_size,
        tell=tell,
    )


def _begin_or_go_on(run: _Run) -> _Standing:
    """From the newest checkpoint, where there is one; the weights and their moments are put in place."""
    start = 0
    told: dict[str, Any] = {"seconds": 0.0, "accuracy": None, "losses": [], "bad_losses": 0, "left_out": 0}
    newest = read_newest(run.folder.checkpoints)
    if newest is not None:
        start, state, notes = newest
        for note in notes:
            run.tell(note)
        _check_same_data(state["data"], run.training)
        run.processes.load_state(run.learner, run.update.optimizer, state)
        if run.update.average is not None:
            run.update.average.load_state_dict(state["average"])
        told = {name: state[name] for name in told}
        run.tell(f"going on after step {start} of {run.steps}")
    if run.processes.is_first:
        run.folder.begin(run.config)
        run.folder.replace(trained_on.FILE, trained_on.marks_of(run.training))
        run.folder.forget_after(start)
    return _Standing(start, **told)


def _open_stream(run: _Run, start: int) -> Generator[Batch, None, None]:
    reading = run.learner.reading()
    return batches(
        run.training,
        seed=run.config.seed,
        batch_size=run.config.batch_size,
        repeats=run.config.augment.repeats,
        start_step=start,
        steps=run.steps - start,
        rank=run.processes.rank,
        world=run.processes.world,
        image_size=reading.image_size,
        augment=run.config.augment,
        preprocess=reading,
        workers=run.config.data.workers,
        device=run.processes.device,
    )


def _count_bad_loss(run: _Run, now: _Standing, step: int) -> None:
    """Raises where there were too many in a row."""
    now.bad_losses, now.left_out = now.bad_losses + 1, now.left_out + 1
    run.tell(f"step {step + 1}: the loss or its gradient is no number; left out ({now.bad_losses} in a row)")
    if now.bad_losses >= run.config.bad_losses:
        raise PatchlightError(
            f"{run.folder.path}: {now.bad_losses} losses in a row were no numbers, the last at step {step + 1}; "
            "lower optim.lr, or lengthen optim.warmup, in a new folder"
        )


def _log_losses(run: _Run, now: _Standing, done: int) -> Progress:
    """A line of metrics."""
    finite = [each for each in now.losses if math.isfinite(each)]
    mean_loss = sum(finite) / len(finite) if finite else math.nan
    rate = (done - now.start) * run.config.batch_size / (time.perf_counter() - now.began)
    epoch = done / run.steps_an_epoch
    run.folder.log(
        step=done,
        epoch=round(epoch, 4),
        loss=mean_loss,
        left_out=now.left_out,
        images_per_second=rate,
        seconds=now.elapsed(),
        **run.learner.measures(),
    )
    return Progress(done, run.steps, epoch, mean_loss, rate, now.accuracy)


def _evaluate(run: _Run, now: _Standing, done: int) -> None:
    shown = _shown(run)  # by all processes together, where each holds a part
    if run.processes.is_first:
        result = _judge(run, shown)
        now.accuracy = result.accuracy
        epoch = round(done / run.steps_an_epoch, 4)
        run.folder.log(step=done, epoch=epoch, seconds=now.elapsed(), **result.course())
    run.processes.wait()


def _shown(run: _Run) -> Model:
    """The model as it is to be judged and published: the average, where there is one."""
    average = run.update.average
    shown = fresh_model(run.config.model).to(run.processes.device).eval()
    shown.load_state_dict(
        run.processes.gather_state(run.learner.shown(), None)[0] if average is None else average.state_dict()
    )
    return shown


def _judge(run: _Run, shown: Model) -> Result:
    with torch.inference_mode(), run.processes.autocast(run.config):
        if not run.config.labelled:
            return judge_features(shown, run.training, run.validation, run.config, run.processes.device)
        return run.learner.judge(shown, run.training, run.validation, run.processes.device)


def _save(run: _Run, now: _Standing, step: int) -> None:
    """Everything that is needed to go on exactly."""
    weights, moments = run.processes.gather_state(run.learner, run.update.optimizer)
    if run.processes.is_first:
        average = run.update.average
        state = {
            "model": weights,
            "optimizer": moments,
            "average": None if average is None else average.state_dict(),
            "data": run.training.fingerprint(),
            "config": run.config.to_dict(),
            "seconds": now.elapsed(),
            "accuracy": now.accuracy,
            "losses": now.losses,
            "bad_losses": now.bad_losses,
            "left_out": now.left_out,
        }
        write_checkpoint(run.folder.checkpoints, step, state)
    run.processes.wait()


def _finish(run: _Run, now: _Standing) -> Result:
    """Judge the model and publish it."""
    folder, steps = run.folder, run.steps
    shown = _shown(run)
    result = _judge(run, shown)
    seconds = now.elapsed()
    if run.processes.is_first:
        if now.start < steps or not any("accuracy" in row and row["step"] == steps for row in folder.rows()):
            folder.log(step=steps, epoch=round(steps / run.steps_an_epoch, 4), seconds=seconds, **result.course())
        left_out = now.left_out
        notes = [f"{left_out} steps were left out, whose loss or gradient was no number"] if left_out else []
        for name, content in run.learner.pictures(run.validation, run.processes.device).items():
            folder.replace(name, content)
        hardware = run.processes.hardware()
        publish(folder, run.learner, shown.cpu(), run.training, result, seconds, hardware, notes, run.groups)
    run.processes.wait()
    return result


def open_photos(config: TrainConfig, tell: Callable[[str], None]) -> tuple[Dataset, Dataset]:
    """The training and the validation photos, without those that cannot be read."""
    training = open_dataset(config.data.train, labelled=config.labelled)
    validation = None
    if config.data.validation is not None:
        validation = open_dataset(config.data.validation, "validation", labelled=config.labelled)
    found = scan(training, validation, workers=config.data.workers, labelled=config.labelled)
    for problem in found.problems:
        tell(problem)
    if found.fatal:
        raise PatchlightError("; ".join(found.fatal))
    training = found.clean(training)
    if validation is None:
        training, validation = split(training, config.data.validation_share)
    else:
        validation = found.clean_validation(validation)
    if config.data.train_share < 1:
        training = subset(training, config.data.train_share)
    if not len(validation):
        raise PatchlightError(
            f"{config.data.train}: leaves no photos to judge by; add photos (two or more a class), raise "
            "data.validation_share, or name others with data.validation"
        )
    classes = f", {len(training.classes)} classes" if len(training.classes) > 1 else ""
    tell(f"{len(training):,} photos to learn from, {len(validation):,} to judge by{classes}")
    if config.subject is not None:
        for photos, name in ((training, config.data.train), (validation, config.data.validation)):
            if photos.boxes_N4 is None:
                raise PatchlightError(f"{name}: has no boxes; give a CSV with the columns file,label,x0,y0,x1,y1")
        side, workers = config.subject.canvas, config.data.workers
        return on_canvases(training, side, workers), on_canvases(validation, side, workers)
    return training, validation


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
    if config.distill is not None and teacher is None:
        device = str(next(vit.parameters()).device)
        teacher = loaded_teacher(load(config.distill.teacher, device=device), training.classes)
    return Classification(vit, config, teacher, subject)


def make_model(config: TrainConfig, tell: Callable[[str], None]) -> tuple[Model, SubjectHeat | None]:
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
        try:
            vit.load_state_dict(loaded.model.state_dict())
        except RuntimeError as error:
            raise PatchlightError(
                f"{config.start}: does not fit the model in the settings ({str(error).splitlines()[-1].strip()})"
            ) from None
        for note in loaded.notes:
            tell(note)
        if config.learning_blocks == 0 and loaded.preprocess.config == config.preprocess:
            subject = loaded.subject
        elif loaded.subject is not None and config.subject is None:
            tell(
                "how the checkpoint finds subjects is not kept, since its blocks learn or it sees photos otherwise; "
                "learning_blocks=0 with its own preprocessing keeps it"
            )
    if config.learning_blocks is not None:
        vit.requires_grad_(False)
        learning: list[nn.Module | None] = [vit.head, getattr(vit, "distill_head", None)]
        if config.learning_blocks:
            learning += [vit.norm, *list(vit.blocks)[-config.learning_blocks :]]
        for module in learning:
            if module is not None:
                module.requires_grad_(True)
    return vit.train(), subject


def _micro_batches(stream: Iterator[Batch], parts: int) -> Iterator[Batch]:
    for batch in stream:
        yield from (Batch(*part) for part in zip(*(tensor.chunk(parts) for tensor in batch), strict=True))


def _step_seed(seed: int, step: int, rank: int) -> int:
    return (seed * 1_000_003 + step) * 1_009 + rank


def _next_multiple(step: int, interval: float) -> int:
    """The first step after `step` that completes a multiple of the interval."""
    return math.ceil((math.floor(step / interval + 1e-9) + 1) * interval - 1e-9)


def _check_same_data(fingerprint: str, training: Dataset) -> None:
    if fingerprint != training.fingerprint():
        raise PatchlightError("the training photos have changed since the run was begun; start a new run")
