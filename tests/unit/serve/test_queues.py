"""Bounded queues, batches of what waits, and neighbours that do no harm."""

import asyncio
import threading
from collections.abc import Hashable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from patchlight.serve.limits import Limits
from patchlight.serve.queues import Batches, BusyError, Workers
from patchlight.serve.state import ServerState, together
from served import serving  # noqa: F401  (skips where the extra is missing)


class Gate:
    """Lets a test hold the model's thread."""

    def __init__(self) -> None:
        self.open, self.entered = threading.Event(), threading.Event()
        self.ran: list[tuple[Hashable, list[Any]]] = []

    def __call__(self, key: Hashable, items: Sequence[Any]) -> list[Any]:
        self.ran.append((key, list(items)))
        self.entered.set()
        self.open.wait(10)
        if "bad" in items:
            raise ValueError("bad")
        return [f"{key}:{item}" for item in items]


def test_what_waits_goes_together_by_key_and_in_order() -> None:
    gate, sizes = Gate(), list[int]()
    batches = Batches(gate, most=3, limit=100, told=lambda key, count, seconds: sizes.append(count))
    first = batches.submit("a", 0)
    gate.entered.wait(10)
    rest = [batches.submit(key, i) for i, key in enumerate("abaaaab", 1)]
    gate.open.set()
    assert first.result(10) == "a:0"
    assert [future.result(10) for future in rest] == [f"{key}:{i}" for i, key in enumerate("abaaaab", 1)]
    batches.close()
    assert gate.ran == [("a", [0]), ("a", [1, 3, 4]), ("b", [2, 7]), ("a", [5, 6])]
    assert sizes == [1, 3, 2, 2]


def test_one_bad_item_costs_no_other_its_result() -> None:
    gate = Gate()
    batches = Batches(gate, most=8, limit=100)
    first = batches.submit("a", 0)
    gate.entered.wait(10)
    futures = [batches.submit("a", item) for item in (1, "bad", 3)]
    gate.open.set()
    assert first.result(10) == "a:0"
    assert futures[0].result(10) == "a:1"
    with pytest.raises(ValueError, match="bad"):
        futures[1].result(10)
    assert futures[2].result(10) == "a:3"
    batches.close()


def test_the_queue_is_bounded_and_a_closed_one_finishes_what_waits() -> None:
    gate = Gate()
    batches = Batches(gate, most=8, limit=2)
    first = batches.submit("a", 0)
    gate.entered.wait(10)
    waiting = [batches.submit("a", item) for item in (1, 2)]
    with pytest.raises(BusyError) as busy:
        batches.submit("a", 3)
    assert busy.value.retry_after >= 1
    waiting[0].cancel()
    gate.open.set()
    batches.close()
    assert first.result(0) == "a:0"
    assert waiting[1].result(0) == "a:2"
    assert gate.ran[1:] == [("a", [2])]
    with pytest.raises(BusyError, match="shutting down"):
        batches.submit("a", 4)


def test_threads_are_bounded_too() -> None:
    workers, gate = Workers(1, limit=2), threading.Event()
    futures = [workers.submit(gate.wait, 10), workers.submit(lambda: 7)]
    with pytest.raises(BusyError):
        workers.submit(lambda: 8)
    gate.set()
    assert futures[1].result(10) == 7
    assert workers.submit(lambda: 9).result(10) == 9
    workers.close()
    with pytest.raises(BusyError):
        workers.submit(lambda: 10)


def test_photos_of_predictions_take_turns_as_they_came() -> None:
    batches = Batches(lambda key, items: items, most=8, limit=3)
    engine: Any = SimpleNamespace(limits=Limits(queue=3), device="cpu", batches=batches)
    order: list[int | str] = []

    async def photo(state: ServerState, number: int) -> int:
        try:
            async with state.in_hand():
                order.append(number)
                await asyncio.sleep(0.01)
                if number == 1:
                    raise ValueError("bad")
        except BusyError:
            order.append(f"no {number}")
            raise
        return number

    async def main() -> None:
        state = ServerState(engine, 1)
        first = asyncio.create_task(together(photo(state, number) for number in (0,)))
        await asyncio.sleep(0)
        second = asyncio.create_task(together(photo(state, number) for number in (2, 3)))
        third = asyncio.create_task(together(photo(state, number) for number in (4, 5, 6)))
        with pytest.raises(BusyError, match="3 photos wait"):
            await third
        await asyncio.sleep(0)
        last = asyncio.create_task(photo(state, 7))  # there is room again: 4 does not wait any longer
        assert (await first, await second, await last, state.waiting) == ([0], [2, 3], 7, 0)
        with pytest.raises(ValueError, match="bad"):
            await photo(state, 1)
        assert await photo(state, 8) == 8  # one that fails gives its turn back, too
        state.workers.close()

    asyncio.run(main())
    assert order == [0, "no 5", "no 6", 2, 3, 7, 1, 8]
    batches.close()
