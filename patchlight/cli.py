"""The command line: one subcommand, one function call. torch is imported by the commands that need it alone."""

import contextlib
import io
import re
import signal
import sys
import warnings
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from patchlight import __version__
from patchlight.commands.crop import crop
from patchlight.commands.deploy import bench, export
from patchlight.commands.embed import dedupe, embed, merge, similar
from patchlight.commands.evaluate import evaluate
from patchlight.commands.models import costs, inspect, models
from patchlight.commands.photos import classify, look, review, serve
from patchlight.commands.recipes import recipes
from patchlight.commands.share import install_default, push_to_hub
from patchlight.commands.train import finetune, train
from patchlight.errors import PatchlightError, PatchlightWarning
from patchlight.signals import Stopped, interrupt_once


class _Plain:
    """Flags take no value, so that help names none for them."""

    def get_params(self, context: Any) -> list[Any]:
        params: list[Any] = super().get_params(context)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class _Command(_Plain, TyperCommand):
    pass


class _Commands(_Plain, TyperGroup):
    pass


app = typer.Typer(cls=_Commands, add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.callback(invoke_without_command=True)
def patchlight(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Vision Transformers: short enough to read, exact enough to trust."""
    if version:
        typer.echo(f"patchlight {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


# In the order of the help.
for command in (
    costs,
    inspect,
    models,
    classify,
    crop,
    embed,
    similar,
    dedupe,
    merge,
    review,
    serve,
    look,
    recipes,
    train,
    finetune,
    evaluate,
    export,
    bench,
    install_default,
    push_to_hub,
):
    app.command(cls=_Command)(command)


def in_options(message: str, command: str) -> str:
    """A message that names arguments as Python has them, for whoever called this command.

    What is an option of the command is written as one: overwrite=True becomes --overwrite, like='x' --like x, and
    `tiles` --tiles; everything else stays as it is.
    """
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    params = commands[command].params if command in commands else []
    options = {param.name: param.opts[0] for param in params if param.param_type_name == "option"}

    def spelled(found: re.Match[str]) -> str:
        option, value = options.get(found["name"] or found["given"]), found["value"]
        if option is None:
            return found[0]
        return option if value in (None, "True") else f"{option} {value.strip(chr(39))}"

    return _ARGUMENT.sub(spelled, message)


_ARGUMENT = re.compile(r"`(?P<name>[a-z_]+)`|(?<![\w.])(?P<given>[a-z_]+)=(?P<value>True|'[^'\s]+'|[A-Z]+\b)")


def _in_our_words(message: str) -> str:
    """What is wrong with a value, where Python's or pydantic's own words came through typer."""
    for theirs, ours in _THEIR_WORDS.items():
        message = re.sub(theirs, ours, message)
    return message


_THEIR_WORDS = {
    r"(?:Value error, )?could not convert string to float: ('.*')": r"\1 is not a number",
    r"(?:Value error, )?invalid literal for int\(\) with base 10: ('.*')": r"\1 is not a whole number",
    r"Value error, ": "",
    r"Input should be a valid integer.*": "it is not a whole number",
    r"Input should be a valid number.*": "it is not a number",
    r"Input should be less than or equal to (\S+)": r"give \1 at most",
    r"Input should be greater than or equal to (\S+)": r"give \1 or more",
}


def _command_given() -> str:
    return sys.argv[1] if len(sys.argv) > 1 else ""


@contextlib.contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    with warnings.catch_warnings():
        in_pythons_form = warnings.showwarning

        def show(message: Any, category: Any, *where: Any, **more: Any) -> None:
            if issubclass(category, PatchlightWarning):
                said = in_options(" ".join(str(message).split()), _command_given())
                typer.echo(f"patchlight: warning: {said}", err=True)
            else:
                in_pythons_form(message, category, *where, **more)

        warnings.showwarning = show
        warnings.simplefilter("always", PatchlightWarning)
        yield


def main() -> None:
    """Run the command line; a user's mistake is one line on standard error and exit code 2, a stop 130 or 143.

    A warning of ours is one line, too.
    """
    exit_code = 2
    interrupt_once()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # as on standard error: a class may have any name
    try:
        with _warnings_in_a_line():
            sys.exit(app(prog_name="patchlight", standalone_mode=False))
    except PatchlightError as error:
        message = in_options(str(error), _command_given())
    except Stopped as stopped:
        if not str(stopped):
            sys.exit(128 + stopped.signal)
        message, exit_code = in_options(str(stopped), _command_given()), 128 + stopped.signal
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        # typer's usage errors, wherever its versions keep their class, know their own one-line message.
        if not hasattr(error, "format_message"):
            raise
        command = getattr(getattr(error, "ctx", None), "command_path", "patchlight")
        message = f"{_in_our_words(error.format_message()).rstrip('.?')}. Try '{command} --help'."
    with contextlib.suppress(BrokenPipeError):  # whoever read it was stopped, too
        typer.echo(f"patchlight: {' '.join(message.split())}", err=True)
    sys.exit(exit_code)
