"""Processes that do the same, in a process that has others, too."""

import subprocess
import sys

import pytest

if sys.platform != "linux":
    pytest.skip("--workers needs Linux", allow_module_level=True)

SCRIPT = """
import ctypes, os, signal, subprocess, sys, time
from patchlight.serve.processes import run_workers

assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER: orphans come here, as to process 1

def ends_soon(seconds):
    "A process of nobody's, as a shell's background job is when the shell has ended."
    subprocess.run(["sh", "-c", f"sleep {seconds} &"], check=True)

def work(worker):
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    worker.begin(lambda: stopped.append(1))
    worker.is_ready()
    if worker.number == 0:
        time.sleep(1)  # orphans have ended
        os._exit(3)
    while not stopped:
        time.sleep(0.01)
    time.sleep(0.5)  # another orphan ends while the first process waits for this one
    os._exit(0)

def died(number):
    print("died", number, flush=True)
    ends_soon(0.2)
    os.kill(os.getpid(), signal.SIGTERM)

for _ in range(3):
    ends_soon(0.3)
run_workers(2, work, died)
print("ended", flush=True)
"""


def test_the_ends_of_foreign_children_change_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "died 0\nended\n"), done.stderr
