"""Python processes as `subprocess` starts them, but with torch and Patchlight imported already.

Those imports take three seconds of a processor. One process of each test session makes them, and does nothing else;
every other is a fork of it, with arguments, folder, environment, pipes, session and end of its own. What is about the
beginning of a process (its imports, Ctrl-C in their midst, variables that Python itself reads) needs `subprocess`.
"""

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed import TCPStore

MODULES = (
    "torch._dynamo",  # optimizers import it
    "torch.distributed",
    "patchlight.cli",
    "patchlight.batch.runner",
    "patchlight.training.loop",
    "patchlight.training.charts",
    "matplotlib.figure",
)
LONGEST = 1 << 17


class WarmPython:
    """What `subprocess.Popen([sys.executable, *arguments])` gives, where both are pipes that give text."""

    def __init__(
        self,
        arguments: Sequence[object],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
    ) -> None:
        request = {
            "arguments": [str(each) for each in arguments],
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "session": start_new_session,
        }
        pipes = [os.pipe() for _ in range(3)]
        try:
            socket.send_fds(_first(), [json.dumps(request).encode() + b"\n"], [write for _, write in pipes])
        finally:
            for _, write in pipes:
                os.close(write)
        self.stdout, self.stderr, self._state = (os.fdopen(read, encoding="utf-8") for read, _ in pipes)
        self.args = request["arguments"]
        self.pid = int(self._state.readline())
        self.returncode: int | None = None
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        with self._state:
            self.returncode = int(self._state.readline())
        self._ended.set()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Both outputs to their ends, and the process to its own."""
        said: dict[IO[str], str] = {}

        def read(pipe: IO[str]) -> None:
            said[pipe] = pipe.read()

        readers = [threading.Thread(target=read, args=[pipe], daemon=True) for pipe in (self.stdout, self.stderr)]
        for reader in readers:
            reader.start()
        begun = time.monotonic()
        for reader in readers:
            reader.join(None if timeout is None else max(0.0, timeout - (time.monotonic() - begun)))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(timeout)
        self._close()
        return said[self.stdout], said[self.stderr]

    def _close(self) -> None:
        self._watcher.join()
        self.stdout.close()
        self.stderr.close()

    def __enter__(self) -> "WarmPython":
        return self

    def __exit__(self, kind: object, *raised: object) -> None:
        if kind is not None:  # as of a time limit
            self.kill()
        self.wait()
        self._close()


def run_warm(
    arguments: Sequence[object],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` of a Python."""
    with WarmPython(arguments, cwd=cwd, env=env) as process:
        said, complained = process.communicate(timeout)
    return subprocess.CompletedProcess(process.args, process.wait(), said, complained)


def run_two(arguments: Sequence[object], *, cwd: Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Two processes of one run, as torchrun starts them; its own way is taken in tests/e2e/test_train.py.

    They meet at a store that outlives both, since it is in this process.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        **os.environ,
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    with contextlib.ExitStack() as ending:
        both = [
            ending.enter_context(WarmPython(arguments, cwd=cwd, env=shared | {"RANK": rank, "LOCAL_RANK": rank}))
            for rank in "01"
        ]
        said = [process.communicate(timeout) for process in both]
    code = next((process.wait() for process in both if process.wait()), 0)
    return subprocess.CompletedProcess(both[0].args, code, *map("".join, zip(*said, strict=True)))


@functools.cache
def _first() -> socket.socket:
    """The way to the process that all others are forks of; it ends with this one."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    atexit.register(process.wait)
    atexit.register(ours.close)  # at which it ends
    return ours


def _serve(requests: socket.socket) -> list[str]:
    """Forks for every request. Comes back in the new processes alone, with what they are to run."""
    while True:
        message, pipes, _, _ = socket.recv_fds(requests, LONGEST, 3)
        if not message:
            os._exit(0)
        while not message.endswith(b"\n"):
            message += requests.recv(LONGEST)
        if not os.fork():  # which waits for the new process, and tells of its end
            requests.close()
            pid = os.fork()
            if not pid:
                return _become(json.loads(message), pipes)
            out, err, state = pipes
            os.close(out)
            os.close(err)
            os.write(state, f"{pid}\n".encode())
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(BrokenPipeError):
                os.write(state, f"{code}\n".encode())
            os._exit(0)
        for pipe in pipes:
            os.close(pipe)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _become(request: dict[str, Any], pipes: list[int]) -> list[str]:
    if request["session"]:
        os.setsid()
    out, err, state = pipes
    os.dup2(out, 1)
    os.dup2(err, 2)
    for pipe in (out, err, state):
        os.close(pipe)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    return list(request["arguments"])


def _run(arguments: list[str]) -> None:
    """As Python does with its own arguments: -m module, -c code, or a file."""
    kind, *rest = arguments
    if kind == "-m":
        sys.path[0], sys.argv = os.getcwd(), rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.path[0], sys.argv = "", ["-c", *rest[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(rest[0], vars(main))
    else:
        sys.path[0], sys.argv = str(Path(kind).parent.absolute()), arguments
        runpy.run_path(kind, run_name="__main__")


def _end(raised: BaseException | None) -> None:
    """As Python ends, but for freeing what it has: that would copy all the memory that the fork shares."""
    code = 0
    if isinstance(raised, SystemExit):
        code = raised.code if isinstance(raised.code, int) else int(raised.code is not None)
        if code and not isinstance(raised.code, int):
            sys.stderr.write(f"{raised.code}\n")
    elif raised is not None:
        traceback.print_exception(raised)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if isinstance(raised, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for module in MODULES:
        __import__(module)
    gc.freeze()  # or the next collection would touch all of it, and so copy it
    asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    try:
        _run(asked)
    except BaseException as error:
        _end(error)
    _end(None)
