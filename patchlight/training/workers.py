"""Processes that read photos."""

import multiprocessing
import os
import pickle
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import DataLoader

from patchlight.errors import PatchlightError
from patchlight.signals import held_back, main_hidden, worker_context

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_workers(
    task: Callable[[Item], Result], items: Iterable[Item], workers: int, *, pin: bool = False
) -> Iterator[Result]:
    """task(item) of each item, in order, computed in this many processes; 0 computes here.

    A task that cannot be sent to them is done here, too. A `PatchlightError` of it arrives as it is. The processes live
    until the iterator ends or is dropped, and survive Ctrl-C, so that the training process can finish what it is at.
    `pin` puts tensors where a GPU fetches them fast.
    """
    if workers == 0 or not can_be_sent(task):
        yield from map(task, items)
        return
    context = worker_context("patchlight.training.data")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")  # more workers than cores
        loader: DataLoader[Any] = DataLoader(
            _Task(task),  # type: ignore[arg-type]
            batch_size=None,
            sampler=items,
            num_workers=workers,
            multiprocessing_context=context,
            worker_init_fn=_start_worker,
            generator=torch.Generator(),  # or it would draw from the one that dropout uses
            pin_memory=pin,
        )
        try:
            with held_back(), main_hidden():  # processes that are left while they start say so at length
                results = iter(loader)
        except (EOFError, ConnectionError) as error:
            raise PatchlightError(
                f"processes that read photos could not be started ({error!r}); use 0 workers"
            ) from None
    try:
        for result in results:
            if isinstance(result, _Failure):
                raise PatchlightError(result.message)
            yield result
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker (pid"):
            raise
        raise PatchlightError(
            f"a process that reads photos has died ({str(error).splitlines()[0]}); memory may be short: use fewer "
            "workers, 0 for none, or give a container more shared memory"
        ) from None
    finally:
        del results  # which ends the processes, also while a traceback holds on to this frame


def can_be_sent(task: Any) -> bool:
    """Whether a process that knows nothing of the running program can take it over."""
    try:
        with main_hidden():
            pickle.Pickler(_Nowhere(), protocol=pickle.HIGHEST_PROTOCOL).dump(task)
    except Exception:  # whatever an object of somebody else's raises
        return False
    return True


class _Nowhere:
    """A file for what only has to be written."""

    def write(self, content: Any) -> int:
        return memoryview(content).nbytes


class _Failure(NamedTuple):
    message: str


class _Task:
    """A function in the form of a map-style dataset, where the "index" is the argument."""

    def __init__(self, task: Callable[[Any], Any]) -> None:
        self.task = task

    def __getitem__(self, item: Any) -> Any:
        try:
            return self.task(item)
        except PatchlightError as error:
            return _Failure(str(error))  # raised here it would come back with a traceback in its text


def _start_worker(worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal
    if hasattr(signal, "sigwaitinfo"):  # macOS has none
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_when_parent_says, daemon=True).start()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the forkserver ignores it
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_when_parent_says() -> None:
    """SIGTERM from the training process ends a worker; from anybody else it is meant for the training process."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
        pass
    os._exit(1)


def _end_with_parent() -> None:
    """torch's own watch looks at the process that forked this one, which is not the one that uses it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
