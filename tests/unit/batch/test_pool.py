"""Processes that may die, and what is left of them."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from patchlight.batch.pool import Pool, WorkerDied
from patchlight.images.decode import ImageError


def double(number: int) -> int:
    return 2 * number


def end_oneself(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def fail(name: str) -> None:
    raise ImageError(name, "corrupt", "on purpose")


def give_a_lambda() -> object:
    return lambda: 0


def process_id() -> int:
    return os.getpid()


def sleep(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def is_there(process: int) -> bool:
    return Path(f"/proc/{process}").exists() and " Z " not in Path(f"/proc/{process}/stat").read_text()


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_results_and_errors_come_back(workers: int) -> None:
    with Pool(workers) as pool:
        futures = [pool.submit(double, number) for number in range(20)]
        assert [future.result() for future in futures] == list(range(0, 40, 2))
        with pytest.raises(ImageError) as caught:
            pool.submit(fail, "a.jpg").result()
        assert caught.value.reason == "corrupt"
        assert (pool.submit(process_id).result() == os.getpid()) == (workers == 0)


def test_one_that_dies_takes_nothing_with_it() -> None:
    with Pool(2) as pool:
        futures = [pool.submit(end_oneself, number) for number in range(8)]
        for number, future in enumerate(futures):
            if number == 3:
                with pytest.raises(WorkerDied):
                    future.result()
            else:
                assert future.result() == number


def test_what_cannot_travel_is_an_error_of_its_own() -> None:
    with Pool(1) as pool:
        with pytest.raises(RuntimeError):
            pool.submit(give_a_lambda).result()
        assert pool.submit(double, 4).result() == 8


def test_closing_leaves_no_process_and_waits_for_none() -> None:
    pool = Pool(2)
    processes = {pool.submit(sleep, 0.3).result() for _ in range(2)}
    futures = [pool.submit(sleep, 0.2) for _ in range(50)]
    begun = time.monotonic()
    pool.close()
    assert time.monotonic() - begun < 4
    assert sum(future.cancelled() for future in futures) >= 40
    assert not [each for each in processes if is_there(each)]
    assert not [each for each in threading.enumerate() if each.name.startswith("patchlight-pool")]


def test_signals_for_everybody_are_for_the_main_process() -> None:
    with Pool(1) as pool:
        process = pool.submit(process_id).result()
        os.kill(process, signal.SIGINT)
        os.kill(process, signal.SIGTERM)
        time.sleep(0.1)
        assert pool.submit(process_id).result() == process


def test_workers_do_without_torch() -> None:
    """It would take a run more than a second of a core, and each process memory."""
    program = "import sys, patchlight.batch.work; print({'torch', 'typer', 'rich'} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "set()"


def test_workers_do_not_run_the_program_that_starts_them(tmp_path: Path) -> None:
    """A script that begins to work as soon as it is read would never end."""
    script = tmp_path / "script.py"
    script.write_text(
        "from patchlight.batch.pool import Pool\n"
        "import os, sys\n"
        "print('begun', flush=True)\n"
        "with Pool(2) as pool:\n"
        "    print(pool.submit(os.path.basename, '/a/b').result())\n"
        "print(sys.modules['__main__'].__file__ == sys.argv[0])\n"
    )
    said = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=60).stdout
    assert said.split() == ["begun", "b", "True"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_processes_are_started_is_heard_and_leaves_them_alone(tmp_path: Path, number: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing.forkserver, os, signal, sys\n"
        "from patchlight.batch.pool import Pool\n"
        "from patchlight.signals import asked_to_stop\n"
        "number, start = int(sys.argv[1]), multiprocessing.forkserver.ensure_running\n"
        "def start_and_signal():\n"
        "    os.kill(os.getpid(), number)\n"
        "    start()\n"
        "    os.kill(multiprocessing.forkserver._forkserver._forkserver_pid, number)\n"
        "multiprocessing.forkserver.ensure_running = start_and_signal\n"
        "with asked_to_stop() as asked, Pool(1) as pool:\n"
        "    print(asked.signal, pool.submit(os.path.basename, '/a/b').result())\n"
    )
    said = subprocess.run([sys.executable, script, str(int(number))], capture_output=True, text=True, timeout=60)
    assert (said.stdout.split(), said.stderr) == ([str(int(number)), "b"], "")


def test_processes_have_the_environment_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    with Pool(1) as pool:
        pool.submit(os.getenv, "HOME").result()  # whatever forks processes is there from here on
    monkeypatch.setenv("PATCHLIGHT_KEY", "of now")
    monkeypatch.delenv("HOME", raising=False)
    with Pool(1) as pool:
        assert [pool.submit(os.getenv, name).result() for name in ("PATCHLIGHT_KEY", "HOME")] == ["of now", None]
