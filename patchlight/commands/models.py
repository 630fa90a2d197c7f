"""Models: what they cost, what a checkpoint is, which there are."""

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchlight.commands.options import AsJson, Like, Settings, Weights, parse_settings, parse_size
from patchlight.commands.tables import print_rows
from patchlight.errors import PatchlightError
from patchlight.families import ModelConfig, config_from_dict, config_from_json, variant
from patchlight.reporting import Progress, on_terminal

if TYPE_CHECKING:
    from patchlight.costing import Costs, Latency


def costs(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL", help="B/16, swin-T, convnext-T, ..., or config files (.json).")
    ],
    image_size: Annotated[str | None, typer.Option(help="Pixels: 224, or 224x336 (height x width).")] = None,
    settings: Settings = None,
    timed: Annotated[bool, typer.Option("--time", help="Measure the latency too.")] = False,
    batch: Annotated[int, typer.Option(min=1, help="With --time: images in a forward pass.")] = 1,
    device: Annotated[str, typer.Option(help="With --time: cpu, cuda, cuda:1, mps.")] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Tokens, parameters, multiply-adds and memory of models, side by side; no weights are needed."""
    changes = parse_settings(settings or [])
    if image_size is not None:
        changes["image_size"] = parse_size(image_size)
    configs = [_read_config(model, changes) for model in models]

    from patchlight.costing import costs as count_costs
    from patchlight.costing import measure_latency

    counted, latencies = [], []
    with on_terminal() as reporter:
        for model, config in zip(models, configs, strict=True):
            reporter.progress(Progress(what=f"counting {model}"))
            counted.append(count_costs(config))
            if timed:
                reporter.progress(Progress(what=f"timing {model}"))
            latencies.append(measure_latency(config, batch=batch, device=device) if timed else None)
    if as_json:
        typer.echo(json.dumps([_costs_row(*row) for row in zip(models, counted, latencies, strict=True)], indent=2))
    else:
        _print_costs(models, counted, latencies)


def _read_config(model: str, changes: dict[str, Any]) -> ModelConfig:
    if not model.endswith(".json"):
        return variant(model, **changes)
    try:
        text = Path(model).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise PatchlightError(f"{model}: cannot be read ({reason})") from None
    try:
        return config_from_dict(config_from_json(text).to_dict() | changes)
    except PatchlightError as error:
        raise PatchlightError(f"{model}: {error}") from None


def _costs_row(model: str, counted: "Costs", latency: "Latency | None") -> dict[str, Any]:
    row = {"model": model} | counted.to_dict()
    return row if latency is None else row | {"latency": latency.to_dict()}


def _print_costs(models: list[str], counted: "list[Costs]", latencies: "list[Latency | None]") -> None:
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
    rows = [
        (
            model,
            f"{cost.image_size[0]}x{cost.image_size[1]}",
            f"{cost.tokens:,}",
            f"{cost.parameters / 1e6:,.1f}",
            f"{cost.macs / 1e9:,.2f}",
            f"{cost.attention_macs / cost.macs:.0%}",
            f"{cost.mlp_macs / cost.macs:.0%}",
            f"{cost.attention_entries / 1e6:,.1f}",
            f"{cost.activation_bytes / 2**20:,.0f}",
            *(() if latency is None else (_short(latency.median_ms), _short(latency.images_per_second))),
        )
        for model, cost, latency in zip(models, counted, latencies, strict=True)
    ]
    print_rows(rows, ["model", *headings], justify="right")
    typer.echo(textwrap.fill(caption, 80))


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2g}"


def inspect(
    source: Annotated[str, typer.Argument(help="A file, a folder, a catalogue name, or hf:owner/name.")],
    settings: Settings = None,
    weights: Weights = None,
    like: Like = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None,
    as_json: AsJson = False,
) -> None:
    """What a checkpoint is: its settings and where each was read, its preprocessing, what was left out."""
    changes = parse_settings(settings or [])

    from patchlight.weights.load import load

    loaded = load(source, revision=revision, weights=weights, like=like, **changes)
    parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
    facts = {
        "source": source,
        "origin": loaded.provenance.origin,
        "licence": loaded.provenance.licence,
        "sha256": loaded.provenance.sha256,
        "parameters": parameters,
        "labels": None if loaded.labels is None else len(loaded.labels),
        "groups": None if loaded.groups is None else ", ".join(loaded.groups.nodes),
    }
    config, preprocess = loaded.config.to_dict(), loaded.preprocess.config.to_dict()
    if as_json:
        notes = list(loaded.notes)
        values = {"config": config, "why": dict(loaded.why), "preprocess": preprocess, "notes": notes}
        typer.echo(json.dumps(facts | values, indent=2))
        return
    print_rows([(name, _plain(value)) for name, value in facts.items() if value is not None])
    rows = [(name, _plain(value), loaded.why.get(name, "default")) for name, value in config.items()]
    print_rows([row for row in rows if row[0] != "architecture"], ["setting", "value", "from"])
    print_rows([(name, _plain(value)) for name, value in preprocess.items()], ["preprocessing", ""])
    for note in loaded.notes:
        typer.echo(f"note: {note}")


def _plain(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, list) and len(value) == 2 else str(value)


def models(
    words: Annotated[list[str] | None, typer.Argument(metavar="FILTER", help="Words that a row must contain.")] = None,
    as_json: AsJson = False,
) -> None:
    """The checkpoints that can be loaded by name."""
    from patchlight.weights.catalog import ENTRIES

    default = ("default", "inside the package: what every command takes where none is named", "see its card")
    rows = [default, *((entry.name, entry.about, entry.licence) for entry in ENTRIES)]
    rows = [row for row in rows if all(word.lower() in " ".join(row).lower() for word in words or [])]
    if not rows:
        raise PatchlightError(f"no checkpoint matches {' '.join(words or [])!r}; `patchlight models` lists them all")
    if as_json:
        entries = {entry.name: entry.to_dict() for entry in ENTRIES}
        found = [entries.get(name, {"name": name, "about": about, "licence": terms}) for name, about, terms in rows]
        typer.echo(json.dumps(found, indent=2))
    else:
        print_rows(rows, ["name", "what", "licence"])
