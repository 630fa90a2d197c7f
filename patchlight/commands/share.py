"""What becomes of a model: `install-default`, `push-to-hub`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from patchlight.reporting import Reporter


def install_default(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    groups: Annotated[Path | None, typer.Option(help="A CSV (label,group), in place of the run's data.groups.")] = None,
) -> None:
    """Make a run's model the one inside the package, which every command uses where none is named."""
    from patchlight.training.finished import install_default

    reporter = Reporter(tell=lambda line: typer.echo(f"patchlight: {line}", err=True))
    folder = install_default(run, groups=groups, reporter=reporter)
    typer.echo(folder)


def push_to_hub(
    model: Annotated[str, typer.Argument(help="What `inspect` takes; such as the folder of a finished run.")],
    name: Annotated[str, typer.Argument(help="OWNER/NAME on the Hugging Face hub; created if it does not exist.")],
    layout: Annotated[
        Literal["patchlight", "timm", "transformers"], typer.Option(help="The other library that can load it, too.")
    ] = "patchlight",
    private: Annotated[bool, typer.Option("--private", help="Visible only to you and your team.")] = False,
) -> None:
    """Upload a model to the Hugging Face hub, with its preprocessing, labels and card."""
    from patchlight.weights.save import push

    typer.echo(push(model, name, layout=layout, private=private))
