"""How busy this machine is, for limits of time on what other processes do; what this one does is judged by its own
processor time."""

import time


def times_slower() -> float:
    """How many times longer than alone a moment of computing takes now; 1 where nothing else runs."""
    begun, computed = time.monotonic(), time.thread_time()
    while time.thread_time() - computed < 0.05:
        pass
    return (time.monotonic() - begun) / 0.05
