"""The recipes that come with Patchlight."""

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from patchlight.commands.tables import print_rows
from patchlight.errors import PatchlightError
from patchlight.remote import on_disk


def recipes(
    copy: Annotated[Path | None, typer.Option(metavar="DIR", help="Copy them all into this new folder.")] = None,
) -> None:
    """List the recipes for `patchlight train NAME` and the scripts beside them, or copy them to read and change."""
    from patchlight.training.recipe import bundled_recipes, recipes_folder

    if copy is None:
        rows = [
            (f"patchlight train {each.path.stem}" if each.is_recipe else f"python {each.path.name}", each.summary)
            for each in bundled_recipes()
        ]
        print_rows(rows, ("command", "what it does"))
        typer.echo("The scripts need a copy: patchlight recipes --copy recipes")
        return
    if on_disk(copy).exists():
        raise PatchlightError(f"--copy {copy}: is there already; name a new folder")
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{copy.name}.", dir=copy.parent) as temporary:  # all of them, or none
            ignored = shutil.ignore_patterns("__pycache__", "measured")
            shutil.copytree(recipes_folder(), Path(temporary) / "recipes", ignore=ignored)
            (Path(temporary) / "recipes").rename(copy)
    except OSError as error:
        raise PatchlightError(f"--copy {copy}: cannot be written ({error.strerror})") from None
    typer.echo(f"copied to {copy}")
