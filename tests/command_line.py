"""`patchlight ...` as a user types it, run in this process, which saves two seconds of imports each time.

What is about the process itself (signals, kills, terminals, imports) is tested with real processes in tests/e2e.
"""

import contextlib
import io
import signal
import sys
from pathlib import Path
from subprocess import CompletedProcess
from unittest import mock

from patchlight.cli import main
from patchlight.signals import STOPPING


def patchlight(*arguments: str, cwd: Path) -> CompletedProcess[str]:
    """What the command prints, and its exit code."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    code: object = 0
    before = {number: signal.getsignal(number) for number in STOPPING}  # the command has its own way to hear them
    with (
        contextlib.chdir(cwd),
        mock.patch.object(sys, "argv", ["patchlight", *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    assert isinstance(code, int), code
    printed, complained = (stream.buffer.getvalue().decode() for stream in (out, err))
    return CompletedProcess(["patchlight", *arguments], code, printed, complained)
