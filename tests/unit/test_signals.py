"""What SIGINT and SIGTERM do in long work."""

import signal

import pytest

from patchlight.signals import asked_to_stop, held_back


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_is_held_back_is_heard_afterwards(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with asked_to_stop() as asked:
        with held_back():
            signal.raise_signal(number)
            assert asked.signal == 0
        assert asked.signal == number
    assert signal.getsignal(number) is before


def test_a_signal_that_raises_does_so_after_what_it_was_held_back_for() -> None:
    done = []

    def work() -> None:
        with held_back():
            signal.raise_signal(signal.SIGINT)
            done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["all of it"]
