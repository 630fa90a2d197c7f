"""What SIGINT and SIGTERM do in long work."""

import os
import signal
import subprocess
import sys

import pytest

from patchlight.signals import STOPPING, Stopped, asked_to_stop, children_are_deaf


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
def test_a_second_signal_ends_the_process(number: signal.Signals) -> None:
    script = (
        "import signal; from patchlight.signals import asked_to_stop\n"
        "with asked_to_stop():\n"
        f"    signal.raise_signal({int(number)}); print('still here', flush=True)\n"
        f"    signal.raise_signal({int(number)}); print('and here', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-number, "still here\n")


def test_processes_that_are_started_deaf_hear_no_stop() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    script = (
        "import os, signal; [os.kill(os.getpid(), each) for each in (signal.SIGINT, signal.SIGTERM)]; print('whole')"
    )
    with children_are_deaf():
        deaf = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (deaf.returncode, deaf.stdout) == (0, "whole\n")
    hearing = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert hearing.stdout == ""
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_a_stop_that_comes_while_children_are_started_is_heard() -> None:
    with asked_to_stop() as asked:
        with children_are_deaf():
            os.kill(os.getpid(), signal.SIGTERM)
        assert asked.signal == signal.SIGTERM
