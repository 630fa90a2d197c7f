"""`python -m patchlight`, and the command `patchlight`."""

import signal


def main() -> None:
    """Run the command line. Before it listens for Ctrl-C, and once it is done, that ends the process without a word:
    Python's own way is a traceback from whatever is imported or cleared away just then."""
    _end_at_once()
    from patchlight.cli import main as command_line

    try:
        command_line()
    finally:
        _end_at_once()


def _end_at_once() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as Ctrl-C in the background of a script
            signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    main()
