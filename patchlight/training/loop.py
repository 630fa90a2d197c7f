"""The training loop, top to bottom: read, vary, learn, evaluate, save; and go on exactly where it was stopped.

Nothing random is left to chance: the order of the photos and how each is varied derive from (seed, epoch, sample), what
the model draws itself (stochastic depth) from (seed, step, process), so that with `drop_path` above 0 the losses of two
processes are not those of one. The position of a run is its step.
"""

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from patchlight.errors import PatchlightError
from patchlight.models.families import Model
from patchlight.models.families import make_model as fresh_model
from patchlight.reporting import SILENT, Progress, Reporter
from patchlight.signals import Stopped, StopRequest, asked_to_stop, block_signals_in_children
from patchlight.training import trained_on
from patchlight.training.checkpoint import newest_step, read_newest, write_checkpoint
from patchlight.training.config import TrainConfig
from patchlight.training.data import Batch, Dataset
from patchlight.training.evaluate import NoNumbersError
from patchlight.training.features import FeatureEvaluation, judge_features
from patchlight.training.finished import save_finished
from patchlight.training.learner import Learner, Result
from patchlight.training.objective import Teacher, check_teacher, loaded_teacher
from patchlight.training.optim import WeightAverage, learning_rate, make_optimizer
from patchlight.training.processes import FailedElsewhereError, Processes, find_processes
from patchlight.training.run_folder import RunFolder
from patchlight.training.setup import (
    check_classes,
    check_photos,
    make_learner,
    make_model,
    open_sets,
    with_own_validation,
)
from patchlight.training.sources import Photos
from patchlight.training.step import Step
from patchlight.weights.groups import Groups
from patchlight.weights.load import load


@dataclass(frozen=True, kw_only=True)
class StepProgress(Progress):
    """How far a run is; `done` are its steps."""

    epoch: float
    loss: float
    lr: float
    images_per_second: float
    """Since the last time, evaluations left out."""
    accuracy: float | None
    """Of the last evaluation."""


def train(
    config: TrainConfig,
    out: str | os.PathLike[str],
    *,
    resume: bool = False,
    device: str | None = None,
    photos: Photos | None = None,
    validation: Photos | None = None,
    teacher: Teacher | None = None,
    make_teacher: Callable[[str], Teacher] | None = None,
    reporter: Reporter = SILENT,
) -> Result:
    """Train as the config says into the folder `out`, which `patchlight.load` takes afterwards.

    With `resume` an interrupted run goes on to the very weights that it would have reached; one that is finished is
    evaluated again. `photos` and `validation` are taken in place of those that the config names, see `open_dataset`.
    `teacher` is for distillation, where the config names none that `load` knows; `make_teacher` gives
    one for a device, and is called once it is known that the run can begin, by the first process before the others.
    `Stopped` is raised once a stop that SIGINT or SIGTERM asked for has come about, at the end of a step.
    """
    folder = RunFolder(out)
    with find_processes(device) as processes, contextlib.ExitStack() as stack:
        reporter = reporter if processes.is_first else SILENT
        asked = stack.enter_context(asked_to_stop(reporter.stopping))
        with processes.together():
            config = with_own_validation(config)
            if processes.is_first:
                stack.enter_context(folder.held())
                folder.check(config, resume=resume)
            processes.check_batch(config)
            newest = read_newest(folder.checkpoints) if processes.is_first else None
            named = newest_step(folder.checkpoints) if processes.is_first else -1
        named, newest = processes.from_first([named, newest])
        with processes.together():
            _check_same_folder(folder, named)
        begun = newest is not None
        sets = partial(open_sets, config, photos, validation, reporter)
        run = _set_up(config, folder, processes, asked, sets, teacher, make_teacher, reporter, begun=begun)
        state = _begin_or_go_on(run, newest)
        del newest  # it is as large as the weights and their moments
        _learn(run, state)
        return _finish(run, state)


def _check_same_folder(folder: RunFolder, step: int) -> None:
    """After a machine was lost, another one may be the first, with a disk of its own: nothing may begin anew there.
    `step` is of the newest checkpoint, damaged or not, that the first process sees."""
    seen = newest_step(folder.checkpoints)
    if seen > step:
        first = "no checkpoint" if step < 0 else f"step {step} as the newest"
        raise PatchlightError(
            f"{folder.path}: step {seen} was saved, but the first process finds {first}; name a folder with --out that "
            "lies on a disk that all machines share"
        )


@dataclass(frozen=True)
class _Run:
    """Everything that stays the same from a run's first step to its last."""

    config: TrainConfig
    folder: RunFolder
    processes: Processes
    asked: StopRequest
    training: Dataset
    validation: Dataset
    notes: Sequence[str]
    """Notes on the photos for users of the model."""
    groups: Groups | None
    learner: Learner
    update: Step
    steps: int
    steps_an_epoch: float
    reporter: Reporter


@dataclass
class _LoopState:
    """State of a run besides its weights, kept in checkpoints."""

    start: int
    """Steps that were done before this process began."""
    seconds: float
    """Seconds that these steps took."""
    accuracy: float | None
    """Of the last evaluation."""
    losses: list[float]
    """Since the last line of metrics."""
    bad_losses: int
    """Bad losses in a row."""
    left_out: int
    """Steps that were skipped for a bad loss, in the whole run."""
    began: float = field(default_factory=time.perf_counter)
    last_line: tuple[int, float] = (0, 0.0)
    """The step of the last line of metrics, and when it was written; evaluations since then are added."""

    def __post_init__(self) -> None:
        self.last_line = self.start, self.began

    def elapsed(self) -> float:
        """Seconds of the whole run."""
        return self.seconds + time.perf_counter() - self.began


def _set_up(
    config: TrainConfig,
    folder: RunFolder,
    processes: Processes,
    asked: StopRequest,
    sets: Callable[[], tuple[Dataset, Dataset | None]],
    teacher: Teacher | None,
    make_teacher: Callable[[str], Teacher] | None,
    reporter: Reporter,
    *,
    begun: bool,
) -> _Run:
    when = (
        "before it continued; run the same command again"
        if begun
        else "before its first step; run the same command again"
    )
    stoppable = partial(_stoppable, processes, asked, f"{folder.path}: stopped {when}")
    with stoppable():
        # What can be known before every photo is read: the classes, the model, and who teaches it.
        training, validation = sets()
        groups = check_classes(config, training, reporter)
        if config.distill is not None and teacher is None and make_teacher is None:
            named = load(config.distill.teacher, device=str(processes.device))
            teacher = loaded_teacher(named, training.classes)
        torch.manual_seed(config.seed)
        vit, subject = make_model(config, training.classes, reporter)

        # The photos. Everything that is wrong with them is said before the first step.
        training, validation, notes = check_photos(config, training, validation, reporter)
    for mine in (processes.is_first, not processes.is_first):  # the first may train it, for the others to find
        with stoppable():
            if mine and make_teacher is not None:
                teacher = make_teacher(str(processes.device))
    with stoppable():
        if config.distill is not None and teacher is not None:
            check_teacher(teacher, config, processes.device)
        learner = make_learner(vit.to(processes.device), config, training, teacher, subject).to(processes.device)

    # How it moves.
    model = processes.spread(learner, config)  # before the optimizer, since sharding replaces the weights
    optimizer = make_optimizer(learner, config.optim, capturable=processes.device.type == "cuda")
    average = None if config.ema is None else WeightAverage(vit, config.ema)
    cropped = learner.cropped(training)
    return _Run(
        config=config,
        folder=folder,
        processes=processes,
        asked=asked,
        training=training,
        validation=validation,
        notes=notes,
        groups=groups,
        learner=learner,
        update=Step(learner, model, optimizer, average, config, processes, cropped=cropped),
        steps=max(1, round(config.epochs * len(training) * config.augment.repeats / config.batch_size)),
        steps_an_epoch=len(training) * config.augment.repeats / config.batch_size,
        reporter=reporter,
    )


def _begin_or_go_on(run: _Run, newest: tuple[int, Any, list[str]] | None) -> _LoopState:
    """From the newest checkpoint, where there is one; the weights and their moments are put in place."""
    start = 0
    told: dict[str, Any] = {"seconds": 0.0, "accuracy": None, "losses": [], "bad_losses": 0, "left_out": 0}
    if newest is not None:
        start, saved, notes = newest
        for note in notes:
            run.reporter.tell(note)
        with run.processes.together():
            _check_same_data(saved["data"], run)
        run.processes.load_state(run.learner, run.update.optimizer, saved)
        if run.update.average is not None:
            run.update.average.load_state_dict(saved["average"])
        told = {name: saved[name] for name in told}
        run.reporter.tell(f"continuing after step {start} of {run.steps}")
    elif run.folder.settings.exists():
        run.reporter.tell(f"{run.folder.path}: had no checkpoint yet; starting from step 0")
    with run.processes.together():
        if run.processes.is_first:
            run.folder.begin(run.config)
            run.folder.replace(trained_on.FILE, trained_on.marks_of(run.training))
            run.folder.forget_after(start)
    return _LoopState(start, **told)


def _check_same_data(fingerprint: str, run: _Run) -> None:
    if fingerprint != run.training.fingerprint():
        raise PatchlightError(
            f"{run.config.data.train}: the training photos have changed since {run.folder.path} was started; "
            "restore them, or start a new run in another folder"
        )


def _learn(run: _Run, state: _LoopState) -> None:
    """Step by step to the last one, or until somebody asks for a stop."""
    config, processes, learner, update, steps = run.config, run.processes, run.learner, run.update, run.steps
    evaluate_every = run.steps_an_epoch * config.evaluate_every
    next_evaluation = _next_multiple(state.start, evaluate_every)
    if state.start == steps:
        return
    compiling = "; the first compiles the model, which takes a while" if config.compile else ""
    run.reporter.tell(
        f"{steps - state.start:,} steps of {config.batch_size} photos on {processes.hardware()}{compiling}"
    )
    _look_ahead(run, state)
    stream = learner.stream(run.training, processes, start=state.start, steps=steps - state.start)
    with contextlib.closing(stream):
        parts = update.prepared(_micro_batches(stream, config.accumulate))
        for step in range(state.start, steps):
            update.optimizer.set_lr(learning_rate(step, steps, config.optim))
            learner.set_progress(step / steps)
            torch.manual_seed(_step_seed(config.seed, step, processes.rank))
            inputs, loss = _next_inputs(run, state, parts, step), 0.0
            # Compilers that Ctrl-C stops, too, leave half a program in torch's cache.
            with block_signals_in_children() if config.compile else contextlib.nullcontext():
                for part in range(config.accumulate):
                    loss += update.learn(next(parts) if part else inputs, last=part == config.accumulate - 1)
            loss = processes.mean(loss)
            if math.isfinite(loss):
                update.move(step)
                state.bad_losses = 0
            else:
                update.forget()
                _count_bad_loss(run, state, step)
            state.losses.append(loss)
            done = step + 1
            if done % config.log_every == 0 or done == steps:
                with processes.together():
                    if processes.is_first:
                        run.reporter.progress(_log_losses(run, state, done))
                        learner.check()
            if done % config.log_every == 0:
                state.losses.clear()
            if done >= next_evaluation and done < steps:
                next_evaluation = _next_multiple(done, evaluate_every)
                _evaluate(run, state, done)
            if done % config.checkpoint_every == 0 or done == steps:
                _save(run, state, done)
    if asked := processes.agree(run.asked.signal):  # in the last step, or while it was saved
        raise _stopped_after(run, steps, asked)


def _look_ahead(run: _Run, state: _LoopState) -> None:
    """What the learner does before its first step; the time of it is not that of steps."""
    with run.processes.together():
        try:
            run.learner.look_ahead(run.training, run.processes, run.asked, run.reporter, steps=run.steps)
        except PatchlightError:
            if not run.asked.signal:  # else whoever reads the photos was told to stop, too
                raise
    if run.update.average is not None and not state.start:
        run.update.average.load_state_dict(run.learner.vit.state_dict())  # which may have been made ready to learn
    state.last_line = state.start, time.perf_counter()


def _micro_batches(stream: Iterator[Batch], parts: int) -> Iterator[Batch]:
    for batch in stream:
        yield from (Batch(*part) for part in zip(*(tensor.chunk(parts) for tensor in batch), strict=True))


def _next_inputs(run: _Run, state: _LoopState, parts: Iterator[tuple[Tensor, ...]], step: int) -> tuple[Tensor, ...]:
    """The first part of what a step learns from, whose other parts are of the same photos.

    All processes have theirs, or all end here, with what was learnt saved: none may begin a step that another does not
    take part in.
    """
    inputs, failure = None, None
    try:
        inputs = next(parts)
    except PatchlightError as error:
        failure = error
    worst = run.processes.agree(run.asked.signal or (_FAILED if failure else 0))
    if worst:
        _save(run, state, step)
    if worst > _FAILED:
        raise _stopped_after(run, step, worst)
    if worst:
        with run.processes.together():
            if failure is not None:
                raise failure
    assert inputs is not None
    return inputs


_FAILED = 1
"""Less than the signals that ask for a stop: of one, whoever reads the photos may have been told, too."""


def _count_bad_loss(run: _Run, state: _LoopState, step: int) -> None:
    """Count losses that are not finite; too many in a row raise."""
    state.bad_losses, state.left_out = state.bad_losses + 1, state.left_out + 1
    run.reporter.tell(
        f"step {step + 1}: the loss or its gradient is NaN or infinite; step skipped ({state.bad_losses} in a row)"
    )
    with run.processes.together():
        if state.bad_losses >= run.config.bad_losses:
            raise PatchlightError(
                f"{run.folder.path}: {state.bad_losses} losses in a row were NaN or infinite, the last at "
                f"step {step + 1}; {_LEARN_MORE_SLOWLY}"
            )


_LEARN_MORE_SLOWLY = "lower optim.lr, or lengthen optim.warmup, in a new folder"


def _log_losses(run: _Run, state: _LoopState, done: int) -> StepProgress:
    """Write a line of metrics."""
    finite = [each for each in state.losses if math.isfinite(each)]
    mean_loss = sum(finite) / len(finite) if finite else math.nan
    step, since = state.last_line
    state.last_line = done, time.perf_counter()
    rate = (done - step) * run.config.batch_size / (state.last_line[1] - since)
    lr = run.config.optim.lr * run.update.optimizer.share
    epoch = done / run.steps_an_epoch
    run.folder.log(
        step=done,
        epoch=round(epoch, 4),
        loss=mean_loss,
        lr=lr,
        left_out=state.left_out,
        images_per_second=rate,
        seconds=state.elapsed(),
        **run.learner.measures(),
    )
    accuracy = "" if state.accuracy is None else f"  accuracy {state.accuracy:.2%}"
    return StepProgress(
        what=f"epoch {epoch:.1f}, step",
        done=done,
        total=run.steps,
        how=f"loss {mean_loss:.3f}  lr {lr:.2g}  {rate:,.0f} images/s{accuracy}",
        seconds_left=(run.steps - done) * run.config.batch_size / rate,
        epoch=epoch,
        loss=mean_loss,
        lr=lr,
        images_per_second=rate,
        accuracy=state.accuracy,
    )


def _evaluate(run: _Run, state: _LoopState, done: int) -> None:
    began = time.perf_counter()
    shown = _shown(run)  # by all processes together, where each holds a part
    with run.processes.together():
        if run.processes.is_first:
            result = _judge(run, shown, done)
            state.accuracy = result.accuracy
            epoch = round(done / run.steps_an_epoch, 4)
            run.folder.log(step=done, epoch=epoch, seconds=state.elapsed(), **result.course())
            if isinstance(result, FeatureEvaluation) and result.accuracy <= result.details["commonest"]:
                run.reporter.tell(
                    f"epoch {epoch:g}: the nearest neighbours name {result.accuracy:.1%} right, no more than one gets "
                    f"who names the commonest class alone ({result.details['commonest']:.1%})"
                )
    step, since = state.last_line
    state.last_line = step, since + time.perf_counter() - began


def _shown(run: _Run) -> Model:
    """The model as it is to be judged and saved: the average, where there is one."""
    average = run.update.average
    shown = fresh_model(run.config.model).to(run.processes.device).eval()
    shown.load_state_dict(
        run.processes.gather_state(run.learner.shown(), None)[0] if average is None else average.state_dict()
    )
    run.learner.finish(shown)
    return shown


def _judge(run: _Run, shown: Model, done: int) -> Result:
    try:
        with torch.inference_mode(), run.processes.autocast(run.config):
            if not run.config.labelled:
                return judge_features(shown, run.training, run.validation, run.config, run.processes.device)
            return run.learner.judge(shown, run.training, run.validation, run.processes.device)
    except NoNumbersError:
        raise PatchlightError(
            f"{run.folder.path}: the model's output after step {done} is NaN or infinite; {_LEARN_MORE_SLOWLY}"
        ) from None


def _save(run: _Run, state: _LoopState, step: int) -> None:
    """Everything that is needed to go on exactly."""
    weights, moments = run.processes.gather_state(run.learner, run.update.optimizer)
    average = run.update.average
    with run.processes.together():
        if run.processes.is_first:
            saved = {
                "model": weights,
                "optimizer": moments,
                "average": None if average is None else average.state_dict(),
                "data": run.training.fingerprint(),
                "config": run.config.to_dict(),
                "seconds": state.elapsed(),
                "accuracy": state.accuracy,
                "losses": state.losses,
                "bad_losses": state.bad_losses,
                "left_out": state.left_out,
            }
            write_checkpoint(run.folder.checkpoints, step, saved)


def _finish(run: _Run, state: _LoopState) -> Result:
    """Evaluate the model and save it."""
    folder, steps = run.folder, run.steps
    shown = _shown(run)  # by all processes together, where each holds a part
    with _stoppable(run.processes, run.asked, _AFTER_THE_LAST.format(folder.path)):
        result = _judge(run, shown, steps)
        seconds, course = state.elapsed(), result.course()
        if run.processes.is_first:
            judged = any("accuracy" in row and row["step"] == steps for row in folder.rows())
            if course and (state.start < steps or not judged):
                folder.log(step=steps, epoch=round(steps / run.steps_an_epoch, 4), seconds=seconds, **course)
            left_out = state.left_out
            notes = [f"{left_out} steps were skipped, whose loss or gradient was NaN or infinite"] if left_out else []
            shown_photos = run.validation if len(run.validation) else run.training
            for name, content in run.learner.pictures(shown_photos, run.processes.device).items():
                folder.replace(name, content)
            notes = [*run.notes, *notes]
            hardware = run.processes.hardware()
            save_finished(folder, run.learner, shown.cpu(), run.training, result, seconds, hardware, notes, run.groups)
    return result


@contextlib.contextmanager
def _stoppable(processes: Processes, asked: StopRequest, line: str) -> Iterator[None]:
    """What the processes do together, and where a stop need not wait, since there is nothing to save."""
    try:
        with processes.together(), asked.at_once(line):
            yield
    except FailedElsewhereError as elsewhere:
        if elsewhere.signal:
            raise Stopped(line, elsewhere.signal) from None
        raise


def _stopped_after(run: _Run, step: int, signal_number: int) -> Stopped:
    if step == run.steps:
        return Stopped(_AFTER_THE_LAST.format(run.folder.path), signal_number)
    line = f"{run.folder.path}: stopped after step {step}; run it again with resume=True to continue"
    return Stopped(line, signal_number)


_AFTER_THE_LAST = "{}: stopped after the last step; run it again with resume=True to evaluate and save the model"


def _step_seed(seed: int, step: int, rank: int) -> int:
    return (seed * 1_000_003 + step) * 1_009 + rank


def _next_multiple(step: int, interval: float) -> int:
    """The first step after `step` that completes a multiple of the interval."""
    return math.ceil((math.floor(step / interval + 1e-9) + 1) * interval - 1e-9)
