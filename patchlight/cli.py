"""The command line: one subcommand, one function call. torch is imported by the commands that need it alone."""

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchlight import __version__
from patchlight.config import ViTConfig, variant
from patchlight.errors import PatchlightError

if TYPE_CHECKING:
    from patchlight.costing import Costs, Latency

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.callback(invoke_without_command=True)
def patchlight(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Vision Transformers: short enough to read, exact enough to trust."""
    if version:
        typer.echo(f"patchlight {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def costs(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL", help="Variants such as B/16, or config files (.json).")
    ],
    image_size: Annotated[str | None, typer.Option(help="Pixels: 224, or 224x336 (height x width).")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Change a setting of every model; repeatable."),
    ] = None,
    timed: Annotated[bool, typer.Option("--time", help="Measure the latency too.")] = False,
    batch: Annotated[int, typer.Option(min=1, help="Images in a timed forward pass.")] = 1,
    device: Annotated[str, typer.Option(help="Where to time: cpu, cuda, cuda:1, mps.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Tokens, parameters, multiply-adds and memory of models, side by side; no weights are needed."""
    changes = _parse_settings(settings or [])
    if image_size is not None:
        changes["image_size"] = _parse_size(image_size)
    configs = [_read_config(model, changes) for model in models]

    from rich.console import Console

    from patchlight.costing import costs as count_costs
    from patchlight.costing import measure_latency

    counted, latencies = [], []
    with Console(stderr=True).status("") as status:  # shows on a terminal only
        for model, config in zip(models, configs, strict=True):
            status.update(f"counting {model}")
            counted.append(count_costs(config))
            status.update(f"timing {model}")
            latencies.append(measure_latency(config, batch=batch, device=device) if timed else None)
    if as_json:
        typer.echo(json.dumps([_costs_row(*row) for row in zip(models, counted, latencies, strict=True)], indent=2))
    else:
        _print_costs(models, counted, latencies)


def _costs_row(model: str, counted: "Costs", latency: "Latency | None") -> dict[str, Any]:
    row = {"model": model} | counted.to_dict()
    return row if latency is None else row | {"latency": latency.to_dict()}


def _print_costs(models: list[str], counted: "list[Costs]", latencies: "list[Latency | None]") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    headings = ["image", "tokens", "params\nM", "\nGMACs", "in\nattn", "in\nMLP", "matrix\nM", "kept\nMiB"]
    caption = (
        "GMACs: billions of multiply-adds for one image, and the shares of attention and MLP. matrix: attention "
        "entries over all blocks and heads. kept: what one image leaves in memory for the backward pass, in float32."
    )
    timed = [latency for latency in latencies if latency is not None]
    if timed:
        headings += ["ms", "images\nper s"]
        threads = f" ({timed[0].threads} threads)" if timed[0].device == "cpu" else ""
        caption += f" ms: one forward of {timed[0].batch} in float32 on {timed[0].device}{threads}, median."
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=caption, caption_justify="left")
    table.add_column("model", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for model, cost, latency in zip(models, counted, latencies, strict=True):
        table.add_row(
            model,
            f"{cost.image_size[0]}x{cost.image_size[1]}",
            f"{cost.tokens:,}",
            f"{cost.parameters / 1e6:,.1f}",
            f"{cost.macs / 1e9:,.2f}",
            f"{cost.attention_macs / cost.macs:.0%}",
            f"{cost.mlp_macs / cost.macs:.0%}",
            f"{cost.attention_entries / 1e6:,.1f}",
            f"{cost.activation_bytes / 2**20:,.0f}",
            *([] if latency is None else [f"{latency.median_ms:,.1f}", f"{latency.images_per_second:,.1f}"]),
        )
    Console().print(table)


def _read_config(model: str, changes: dict[str, Any]) -> ViTConfig:
    if not model.endswith(".json"):
        return variant(model, **changes)
    try:
        text = Path(model).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PatchlightError(f"{model}: cannot be read ({error})") from None
    try:
        config = ViTConfig.from_json(text)
        return ViTConfig.from_dict(config.to_dict() | changes)
    except PatchlightError as error:
        raise PatchlightError(f"{model}: {error}") from None


def _parse_size(text: str) -> tuple[int, int]:
    size = re.fullmatch(r"([0-9]+)(?:x([0-9]+))?", text)
    if size is None:
        raise PatchlightError(f"image size {text!r} is not a size; write 224, or 224x336 (height x width)")
    return int(size[1]), int(size[2] or size[1])


def _parse_settings(settings: list[str]) -> dict[str, Any]:
    """NAME=VALUE pairs; a value that is JSON (4, 0.1, true, null, [224, 336]) is read as such, else as a word."""
    changes: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise PatchlightError(f"--set {setting}: write NAME=VALUE, such as num_registers=4")
        try:
            changes[name] = json.loads(value)
        except ValueError:
            changes[name] = value
    return changes


def main() -> None:
    """Run the command line; a user's mistake is one line on standard error and exit code 2."""
    try:
        sys.exit(app(prog_name="patchlight", standalone_mode=False))
    except PatchlightError as error:
        message = str(error)
    except Exception as error:
        # typer's usage errors, wherever its versions keep their class, know their own one-line message.
        if not hasattr(error, "format_message"):
            raise
        message = f"{error.format_message()} Try 'patchlight --help'."
    typer.echo(f"patchlight: {' '.join(message.split())}", err=True)
    sys.exit(2)
