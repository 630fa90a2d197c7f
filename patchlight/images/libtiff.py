"""What libtiff says of a broken file: heard by whoever decodes it, where libtiff would print up to a line a row."""

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from typing import Any

from PIL import _imaging

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)
"""Its module, a format as of printf, and a va_list, which every ABI that Python has hands on as one address."""

_NAME_BY_PILLOW = "tempfile.tif:"
"""Of whatever it reads."""

_thread = threading.local()


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """The first line that it says in this thread inside the block, if any; nothing of it is printed."""
    _listen()
    before, _thread.lines = getattr(_thread, "lines", None), []
    try:
        yield _thread.lines
    finally:
        _thread.lines = before


@functools.cache
def _listen() -> Any:
    """Take the place of the one handler that libtiff has in a process; outside of `heard` the former one is called."""
    try:
        libtiff = ctypes.CDLL(_imaging.__file__)  # of the libraries that Pillow's own module is linked to
        vsnprintf, set_handler = ctypes.CDLL(None).vsnprintf, libtiff.TIFFSetErrorHandler
    except (AttributeError, OSError):  # a Pillow without libtiff, or with one that cannot be seen
        return None
    vsnprintf.argtypes = (ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_void_p)
    set_handler.restype, set_handler.argtypes = ctypes.c_void_p, (_Handler,)
    former: Any = None

    def hear(module: bytes | None, form: bytes, values: int) -> None:
        lines = getattr(_thread, "lines", None)
        if lines is None:
            if former:
                former(module, form, values)
        elif not lines:
            text = ctypes.create_string_buffer(200)
            vsnprintf(text, len(text), form, values)
            words = [] if module is None else [f"{module.decode('utf-8', 'replace')}:"]
            words += text.value.decode("utf-8", "replace").split()
            lines.append(" ".join(word for word in words if word != _NAME_BY_PILLOW).rstrip("."))

    handler = _Handler(hear)
    if address := set_handler(handler):
        former = _Handler(address)
    return handler  # for as long as the process lives
