"""Where models compute."""

import os
from pathlib import Path

import torch

from patchlight.errors import PatchlightError


def resolve_device(name: str | torch.device | None = None) -> torch.device:
    """The device of this name; None takes a GPU if there is one. A device that cannot compute raises."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros((), device=device).item()  # "meta" makes tensors, too, but they hold nothing
    except Exception as error:  # each backend has its own way to say that it is not there
        shown = name if name is None or isinstance(name, str) else str(name)
        reason = str(error).partition("\n")[0].rstrip(".")[:120]
        raise PatchlightError(f"device={shown!r} does not compute here ({reason}); use cpu, or leave it out") from None
    return device


def cpu_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores that this process may use: those that it is tied to, and no more than its container is given (`quota`)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        given, period = quota.read_text().split()
        return max(1, min(cores, round(int(given) / int(period))))
    except (OSError, ValueError):  # there is no such file but in Linux's containers, and "max" is no number
        return cores
