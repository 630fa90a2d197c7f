"""How much data a ViT needs: against a small ConvNet on 5, 10, 25, 50 and 100 % of CIFAR-10.

    python recipes/data_efficiency.py out/data_efficiency --data data/cifar10 --device cuda --jobs 3

Both see the same photos (a smaller share lies inside a larger one), varied in the same way, in as many batches of the
same size: the same number of steps at every share, so that few photos are seen more often and none is undertrained. The
ViT is 192 wide and 6 deep with patches of 4 pixels, and learns with Muon; the ConvNet is that of recipes/small_cnn.py,
and learns with SGD. Neither has seen anything else before.

Every result is kept in results.jsonl as it comes, and a second start measures what is missing; `--table` shows what is
there. Seconds are those of a row while `--jobs` rows shared the device. What one H200 gave is in
recipes/measured/data_efficiency, and told in docs/training.md.
"""

import functools
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring import (
    INK,
    Result,
    Task,
    accuracies_of,
    arguments_parser,
    counting,
    exit_code,
    finish_axis,
    markdown,
    measure_all,
    percent,
    photos,
    precision_for,
    read_results,
    save_picture,
    say,
    seconds_of,
    train_vit,
)
from small_cnn import train_cnn

from patchlight.config import PreprocessConfig, ViTConfig
from patchlight.errors import PatchlightError
from patchlight.images.augment import AugmentConfig
from patchlight.json_config import parse_values
from patchlight.training.config import DataConfig, OptimConfig, TrainConfig
from patchlight.training.data import subset

SHARES = (1.0, 0.5, 0.25, 0.1, 0.05)
MODELS = {"vit": "ViT", "cnn": "small ConvNet"}
STEPS, CNN_WIDTH = 2500, 64


def config(data: str = "data/cifar10", precision: str = "bfloat16") -> TrainConfig:
    """The ViT's run, but for the share and the epochs that follow from it."""
    return TrainConfig(
        model=ViTConfig(
            image_size=32,
            patch_size=4,
            width=192,
            depth=6,
            num_heads=3,
            qk_norm=True,
            position="rope2d",
            class_token=False,
            pooling="mean",
            num_classes=10,
        ),
        data=DataConfig(train=data, validation=data),
        preprocess=PreprocessConfig(
            image_size=32, resize="squash", crop_pct=1.0, mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616)
        ),
        augment=AugmentConfig(crop="pad", pad=4, policy="trivial"),
        optim=OptimConfig(name="muon", lr=2e-3, muon_lr=0.03, weight_decay=0.05, warmup=0.1),
        batch_size=512,
        label_smoothing=0.1,
        checkpoint_every=100_000,
    ).changed({"precision": precision})


def measure(task: Task, *, out: Path, data: str, device: str | None) -> Result:
    """Train one of the models on a share of the photos."""
    model, _, share = task.row.partition("/")
    settings = config(data, precision_for(device)).changed(
        task.budget["changes"] | {"seed": task.seed, "data.train_share": float(share)}
    )
    began = time.perf_counter()
    training = subset(photos(data, "train"), float(share))  # what the training loop takes for itself, too
    epochs = task.budget["steps"] * settings.batch_size / len(training)
    facts = {"model": model, "share": float(share), "photos": len(training), "times_seen": round(epochs, 1)}
    if model == "vit":
        settings = settings.changed({"epochs": epochs, "evaluate_every": epochs})
        _, result = train_vit(settings, out / "runs" / f"{model}-{share}-{task.seed}", device=device)
        return facts | result
    cnn, accuracy = train_cnn(
        training,
        photos(data, "test"),
        epochs=epochs,
        device=device,
        seed=task.seed,
        width=task.budget["cnn_width"],
        batch_size=settings.batch_size,
        variations=settings.augment,
    )
    seconds = round(time.perf_counter() - began, 2)
    parameters = sum(parameter.numel() for parameter in cnn.parameters())
    return facts | {"accuracy": accuracy, "seconds": seconds, "parameters": parameters}


# What is shown


def table(results: Sequence[Result]) -> str:
    """In Markdown, a line a share."""
    rows = []
    for share in sorted({result["share"] for result in results}):
        found = [[each for each in results if (each["share"], each["model"]) == (share, model)] for model in MODELS]
        numbers = [percent(each["accuracy"] for each in of_model) for of_model in found]
        seen = next(each for of_model in found for each in of_model)
        seconds = " + ".join(filter(None, map(seconds_of, found)))
        rows.append((f"{share:.0%}", f"{seen['photos']:,}", f"{seen['times_seen']:g}", *numbers, seconds))
    header = ("share", "photos", "times each is seen", *MODELS.values(), "seconds")
    return accuracies_of(results) + markdown(header, rows)


def results_of(model: str, count: int, results: Sequence[Result]) -> list[Result]:
    return [each for each in results if (each["model"], each["photos"]) == (model, count)]


def draw(results: Sequence[Result]) -> Any:
    """A figure: accuracy against the number of photos, a line a model."""
    from patchlight.explain.plot import new_figure

    figure = new_figure(6.2, 3.8)
    ax = figure.add_subplot()
    means = {
        model: {
            count: statistics.fmean(100 * each["accuracy"] for each in results_of(model, count, results))
            for count in sorted({each["photos"] for each in results if each["model"] == model})
        }
        for model in MODELS
    }
    for model, other, colour, marker in (("cnn", "vit", "#21918c", "s"), ("vit", "cnn", "#440154", "o")):
        counts, course = list(means[model]), list(means[model].values())
        seeds = [[100 * each["accuracy"] for each in results_of(model, count, results)] for count in counts]
        ax.fill_between(counts, list(map(min, seeds)), list(map(max, seeds)), color=colour, alpha=0.15)
        ax.plot(counts, course, color=colour, marker=marker, markersize=5, linewidth=1.6, label=MODELS[model])
        for count, mean in means[model].items():
            upper = mean > means[other].get(count, 0)  # its number above, the lower one's below
            ax.annotate(f"{mean:.1f}", (count, mean), (0, 7 if upper else -14), textcoords="offset points",
                        ha="center", fontsize=8, color=colour)  # fmt: skip
    shares = {each["photos"]: each["share"] for each in results}
    ax.set_xscale("log")
    ax.set_xticks(sorted(shares), [f"{count:,}\n{shares[count]:.0%}" for count in sorted(shares)])
    ax.minorticks_off()
    ax.margins(0.06, 0.16)
    finish_axis(ax, "photos to learn from", "test accuracy, %")
    ax.set_title("CIFAR-10 from nothing, by how much of it there is", fontsize=9.5, color=INK, loc="left")
    ax.legend(frameon=False, fontsize=9, labelcolor=INK, loc="lower right")
    return figure


def main(arguments: list[str] | None = None) -> int:
    parser = arguments_parser("Measure a ViT against a small ConvNet on shares of CIFAR-10.")
    parser.add_argument("--shares", help="such as 0.05,1; all five unless given")
    parser.add_argument("--seeds", type=counting, default=1)
    parser.add_argument("--steps", type=counting, default=STEPS, help="of each run, whatever the share")
    parser.add_argument("--cnn-width", type=counting, default=CNN_WIDTH)
    given = parser.parse_args(arguments)

    def work() -> None:
        if not given.table:
            budget = {"steps": given.steps, "cnn_width": given.cnn_width, "changes": parse_values(given.changes)}
            rows = [f"{model}/{share}" for share in parse_shares(given.shares) for model in MODELS]
            tasks = [Task(row, seed, budget) for seed in range(given.seeds) for row in rows]
            measure_one = functools.partial(measure, out=given.out, data=given.data, device=given.device)
            measure_all(given.out, tasks, measure_one, jobs=given.jobs, tell=say)
        results = read_results(given.out)
        if not results:
            raise PatchlightError(f"{given.out}: holds no results; leave --table out to measure some")
        say(table(results))
        save_picture(given.out / "data_efficiency.png", lambda: draw(results))

    return exit_code(work)


def parse_shares(text: str | None) -> Sequence[float]:
    try:
        shares = SHARES if text is None else [float(share) for share in text.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 < share <= 1 for share in shares):
        raise PatchlightError(f"--shares {text}: should be shares of the photos, from 0 to 1, such as 0.05,0.1,1")
    return shares


if __name__ == "__main__":
    sys.exit(main())
