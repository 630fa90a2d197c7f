"""What SIGINT and SIGTERM do in long work."""

import os
import signal
import subprocess
import sys

import pytest

from patchlight.signals import STOPPING, Stopped, asked_to_stop, block_signals_in_children, held_back

CLOCK = """
import signal
from patchlight import signals

class clock:  # of its own, so that nothing hangs on how busy the machine is
    now = 0.0
    def wait():
        clock.now += signals.SAME_ONCE_MORE + 0.1
    def monotonic():
        return clock.now

signals.time = clock
"""


@pytest.mark.parametrize("number", STOPPING)
def test_a_stop_waits_but_where_it_need_not(number: signal.Signals) -> None:
    before, heard = [signal.getsignal(each) for each in STOPPING], []
    with asked_to_stop(lambda: heard.append("waits")) as asked:
        with asked.at_once("not asked"):
            pass
        signal.raise_signal(number)
        assert asked.signal == number
        assert heard == ["waits"]
        with pytest.raises(Stopped, match="at last") as caught, asked.at_once("at last"):
            pytest.fail("it was asked to stop")
        assert caught.value.signal == number
    assert [signal.getsignal(each) for each in STOPPING] == before


def test_a_stop_at_once_cuts_the_work_and_says_no_more() -> None:
    heard: list[str] = []
    with asked_to_stop(lambda: heard.append("waits")) as asked:
        with pytest.raises(Stopped, match="cut"), asked.at_once("cut"):
            signal.raise_signal(signal.SIGINT)
        assert asked.signal == signal.SIGINT
    assert heard == []


@pytest.mark.parametrize("number", STOPPING)
def test_a_second_signal_ends_the_process_unless_it_is_the_first_once_more(number: signal.Signals) -> None:
    script = (
        "from patchlight.signals import asked_to_stop\n"
        "with asked_to_stop():\n"
        f"    signal.raise_signal({int(number)}); print('waits', flush=True)\n"
        f"    signal.raise_signal({int(number)}); print('passed on by torchrun', flush=True)\n"
        "    clock.wait()\n"
        f"    signal.raise_signal({int(number)}); print('and here', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", CLOCK + script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-number, "waits\npassed on by torchrun\n")


def test_nobody_who_listens_is_no_reason_to_fail() -> None:
    """As where Ctrl-C has stopped `tee`, too."""

    def heard() -> None:
        raise BrokenPipeError

    with asked_to_stop(heard) as asked:
        signal.raise_signal(signal.SIGINT)
        assert asked.signal == signal.SIGINT


def test_a_stop_is_no_error_of_what_it_comes_out_of() -> None:
    def work() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except Exception as error:
            raise ValueError("a broken photo") from error

    with asked_to_stop() as asked, pytest.raises(Stopped), asked.at_once("stopped"):
        work()


def test_what_is_held_back_is_heard_afterwards() -> None:
    done = []

    def work() -> None:
        with held_back():
            signal.raise_signal(signal.SIGINT)
            done.append("all of it")
        done.append("and more")

    with asked_to_stop() as asked, pytest.raises(Stopped), asked.at_once("stopped"):
        work()
    assert done == ["all of it"]


def test_a_second_signal_ends_what_is_held_back() -> None:
    script = (
        "from patchlight.signals import asked_to_stop, held_back\n"
        "with asked_to_stop(), held_back():\n"
        "    signal.raise_signal(signal.SIGINT); signal.raise_signal(signal.SIGINT)\n"
        "    clock.wait(); print('still here', flush=True)\n"
        "    signal.raise_signal(signal.SIGINT); print('and here', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", CLOCK + script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "still here\n")


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, "Stopped")])
def test_a_signal_raises_once(number: signal.Signals, raised: str) -> None:
    script = (
        "from patchlight.signals import Stopped, interrupt_once\n"
        f"interrupt_once(); number = {int(number)}\n"
        "try:\n    signal.raise_signal(number); print('not raised')\n"
        f"except {raised}:\n    signal.raise_signal(number); print('cleaned up', flush=True)\n"
        "clock.wait(); signal.raise_signal(number); print('not ended')\n"
    )
    done = subprocess.run([sys.executable, "-c", CLOCK + script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-number, "cleaned up\n", "")


def test_processes_that_are_started_deaf_hear_no_stop() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    script = (
        "import os, signal; [os.kill(os.getpid(), each) for each in (signal.SIGINT, signal.SIGTERM)]; print('whole')"
    )
    with block_signals_in_children():
        deaf = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (deaf.returncode, deaf.stdout) == (0, "whole\n")
    hearing = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert hearing.stdout == ""
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_a_stop_that_comes_while_children_are_started_is_heard() -> None:
    with asked_to_stop() as asked:
        with block_signals_in_children():
            os.kill(os.getpid(), signal.SIGTERM)
        assert asked.signal == signal.SIGTERM
