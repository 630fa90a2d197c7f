"""`python -m patchlight`, and the command `patchlight`."""

import signal


def main() -> None:
    """Run the command line. Before it listens for Ctrl-C, and once it is done, that ends the process without a word:
    Python's own way is a traceback from whatever is imported or cleared away just then."""
    _end_on_ctrl_c()
    from patchlight.cli import main as command_line

    try:
        command_line()
    finally:
        _end_on_ctrl_c()


def _end_on_ctrl_c() -> None:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in the background of a script
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
