"""Questions that texts on Vision Transformers argue in words, answered by measurement on CIFAR-10.

    python recipes/ablations.py out/ablations --data data/cifar10 --device cuda --seeds 2 --jobs 3

trains one small ViT again and again, with one thing changed and everything else the same: 192 wide, 6 deep, patches of
4 pixels, a class token, a learned table of positions; Muon, flips and shifts, the same few epochs for every row. Asked
are: how positions are told, and what then becomes of images of sizes that were not trained on (resized bicubically,
the positions resampled by the model) and of images whose patches are shuffled; class token or mean; registers; the
size of patches; LayerScale.

Every result is kept in results.jsonl as it comes, and a second start measures what is missing; `--rows` chooses rows,
`--table` shows what is there. Seconds are those of a row while `--jobs` rows shared the device. What one H200 gave is
in recipes/measured/ablations, and told in docs/training.md.
"""

import functools
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import (
    INK,
    PALE,
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
from torch import Tensor

from patchlight.config import PreprocessConfig, ViTConfig
from patchlight.errors import PatchlightError
from patchlight.images.augment import AugmentConfig
from patchlight.json_config import parse_values
from patchlight.models.vit import ViT
from patchlight.training.config import DataConfig, OptimConfig, TrainConfig

EPOCHS = 15.0
SIZES = (24, 40, 48)
"""Pixels of the images that the positions are tested on beside those they were trained on."""

# What each row changes; the longest come first, so that none is left over when the others have finished.
ROWS: dict[str, dict[str, Any]] = {
    "patch=2": {"model.patch_size": 2},
    "position=relative_bias": {"model.position": "relative_bias"},
    "position=rope2d": {"model.position": "rope2d"},
    "baseline": {},
    "position=sincos2d": {"model.position": "sincos2d"},
    "position=none": {"model.position": "none"},
    "pooling=mean": {"model.class_token": False, "model.pooling": "mean"},
    "registers=1": {"model.num_registers": 1},
    "registers=4": {"model.num_registers": 4},
    "layer_scale=1e-4": {"model.layer_scale": 1e-4},
    "layer_scale=0.1": {"model.layer_scale": 0.1},
    "patch=8": {"model.patch_size": 8},
}

POSITIONS = {
    "learned table": "baseline",
    "sine-cosine": "position=sincos2d",
    "RoPE": "position=rope2d",
    "relative bias": "position=relative_bias",
    "none": "position=none",
}
"""The rows that are tested at other sizes, and with their patches shuffled, too."""

# The answers to each question, and the row that gives each.
QUESTIONS: dict[str, dict[str, str]] = {
    "Positions": POSITIONS,
    "Pooling": {"class token": "baseline", "mean of the patches": "pooling=mean"},
    "Registers": {"0": "baseline", "1": "registers=1", "4": "registers=4"},
    "Patch size": {"2 pixels": "patch=2", "4 pixels": "baseline", "8 pixels": "patch=8"},
    "LayerScale": {"none": "baseline", "from 0.0001": "layer_scale=1e-4", "from 0.1": "layer_scale=0.1"},
}


def config(data: str = "data/cifar10", epochs: float = EPOCHS, precision: str = "bfloat16") -> TrainConfig:
    """The baseline."""
    return TrainConfig(
        model=ViTConfig(image_size=32, patch_size=4, width=192, depth=6, num_heads=3, qk_norm=True, num_classes=10),
        data=DataConfig(train=data, validation=data),
        preprocess=PreprocessConfig(
            image_size=32, resize="squash", crop_pct=1.0, mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616)
        ),
        augment=AugmentConfig(crop="pad", pad=4),
        optim=OptimConfig(name="muon", lr=2e-3, muon_lr=0.02, weight_decay=0.05, warmup=0.1),
        epochs=epochs,
        batch_size=512,
        label_smoothing=0.1,
        evaluate_every=epochs,
        checkpoint_every=100_000,
    ).changed({"precision": precision})


def measure(task: Task, *, out: Path, data: str, device: str | None) -> Result:
    """Train a row and test it."""
    settings = config(data, task.budget["epochs"], precision_for(device)).changed(
        task.budget["changes"] | ROWS[task.row] | {"seed": task.seed}
    )
    vit, result = train_vit(settings, out / "runs" / f"{task.row}-{task.seed}", device=device)
    if task.row not in POSITIONS.values():
        return result
    began = time.perf_counter()
    images_NCHW, labels_N = in_memory(data)
    images_NCHW = images_NCHW.to(vit.norm.weight.device)
    trained_at = settings.model.image_size[0]
    sizes = {str(trained_at): result["accuracy"]}
    for size in SIZES:
        sizes[str(size)] = accuracy(vit, settings.preprocess, resized(images_NCHW, size), labels_N)
    shuffled_NCHW = shuffled(images_NCHW, settings.model.patch_size[0], task.seed)
    at_random = accuracy(vit, settings.preprocess, shuffled_NCHW.split(1000), labels_N)
    result["seconds"] = round(result["seconds"] + time.perf_counter() - began, 2)
    return result | {"sizes": dict(sorted(sizes.items())), "shuffled": at_random}


def in_memory(data: str) -> tuple[Tensor, Tensor]:
    test = photos(data, "test")
    if test.images_NCHW is None:
        raise PatchlightError(f"{data}: is not CIFAR-10, which the ablations are made for; recipes/fetch_cifar10.py")
    return test.images_NCHW, test.labels_N


def resized(images_NCHW: Tensor, size: int, batch_size: int = 1000) -> Iterator[Tensor]:
    """uint8 batches, each bicubically made `size` pixels high and wide."""
    for images_BCHW in images_NCHW.split(batch_size):
        levels_BCHW = F.interpolate(images_BCHW.float(), (size, size), mode="bicubic", antialias=True)
        yield levels_BCHW.round().clamp(0, 255).to(torch.uint8)


def shuffled(images_NCHW: Tensor, patch: int, seed: int) -> Tensor:
    """The same patches in another order, a random one for each image."""
    count, channels, height, width = images_NCHW.shape
    grid = height // patch, width // patch
    patches_NChpwp = images_NCHW.view(count, channels, grid[0], patch, grid[1], patch)
    patches_NPCpp = patches_NChpwp.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    generator = torch.Generator().manual_seed(seed)
    order_NP = torch.rand(count, grid[0] * grid[1], generator=generator).argsort(1).to(images_NCHW.device)
    patches_NPCpp = patches_NPCpp[torch.arange(count, device=images_NCHW.device)[:, None], order_NP]
    return patches_NPCpp.unflatten(1, grid).permute(0, 3, 1, 4, 2, 5).reshape(images_NCHW.shape)


@torch.inference_mode()
def accuracy(
    vit: ViT, preprocess: PreprocessConfig, batches: Sequence[Tensor] | Iterator[Tensor], labels_N: Tensor
) -> float:
    """Of batches (B, 3, H, W) uint8 of any size, as they are."""
    device = vit.norm.weight.device
    mean_C11, std_C11 = (
        torch.tensor(colour, device=device).view(3, 1, 1) for colour in (preprocess.mean, preprocess.std)
    )
    predicted = []
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        for levels_BCHW in batches:
            images_BCHW = (levels_BCHW.to(device).float() / 255 - mean_C11) / std_C11
            predicted.append(vit(images_BCHW).argmax(1).cpu())
    return int((torch.cat(predicted) == labels_N).sum()) / len(labels_N)


# What is shown


def table(results: Sequence[Result]) -> str:
    """Two tables in Markdown: every answer, and what becomes of positions at other sizes and in shuffled images."""
    of_row = by_row(results)
    answers = [
        (question, answer, percent(each["accuracy"] for each in of_row[row]), seconds_of(of_row[row]))
        for question, answers in QUESTIONS.items()
        for answer, row in answers.items()
        if row in of_row
    ]
    text = accuracies_of(results) + markdown(("question", "answer", "accuracy", "seconds"), answers)
    positions = {answer: of_row[row] for answer, row in POSITIONS.items() if row in of_row}
    if positions:
        sizes = sizes_of(results)
        rows = [
            (
                answer,
                *(percent(each["sizes"][str(size)] for each in found) for size in sizes),
                percent(each["shuffled"] for each in found),
            )
            for answer, found in positions.items()
        ]
        text += "\n" + markdown(("positions", *(f"{size} px" for size in sizes), "patches shuffled"), rows)
    return text


def by_row(results: Sequence[Result]) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result["row"], []).append(result)
    return found


def sizes_of(results: Sequence[Result]) -> list[int]:
    return sorted({int(size) for result in results for size in result.get("sizes", {})})


def draw(results: Sequence[Result]) -> Any:
    """A figure: every answer as a dot among the dots of its seeds; positions by image size; patches shuffled."""
    from patchlight.explain.plot import new_figure

    figure = new_figure(9.5, 5.6)
    grid = figure.add_gridspec(2, 2, width_ratios=(1.15, 1), height_ratios=(1.35, 1))
    of_row = by_row(results)
    draw_answers(figure.add_subplot(grid[:, 0]), of_row)
    draw_sizes(figure.add_subplot(grid[0, 1]), of_row, sizes_of(results))
    draw_shuffled(figure.add_subplot(grid[1, 1]), of_row)
    return figure


COLOURS = {
    "learned table": "#440154",
    "sine-cosine": "#3b528b",
    "RoPE": "#21918c",
    "relative bias": "#b8860b",
    "none": "#e0245e",
}
MARKERS = {"learned table": "o", "sine-cosine": "s", "RoPE": "^", "relative bias": "D", "none": "v"}


def draw_answers(ax: Any, of_row: dict[str, list[Result]]) -> None:
    """From top to bottom, a block a question; the dotted line is the baseline."""
    height, ticks, labels = 0.0, [], []
    for question, answers in QUESTIONS.items():
        known = {answer: row for answer, row in answers.items() if row in of_row}
        if not known:
            continue
        ax.text(0.0, height, question, transform=ax.get_yaxis_transform(), ha="right", va="center", fontsize=9,
                color=INK, fontweight="bold")  # fmt: skip
        height += 1
        for answer, row in known.items():
            shares = [100 * each["accuracy"] for each in of_row[row]]
            mean = sum(shares) / len(shares)
            colour = PALE if row == "baseline" else "#21918c"
            ax.plot([min(shares), max(shares)], [height, height], color=colour, linewidth=2, alpha=0.5, zorder=2)
            ax.plot(shares, [height] * len(shares), "o", color=colour, markersize=3, alpha=0.5, zorder=3)
            ax.plot([mean], [height], "o", color=colour, markersize=6.5, zorder=4)
            ax.annotate(f"{mean:.1f}", (max(shares), height), (7, 0), textcoords="offset points", va="center",
                        fontsize=8, color=INK)  # fmt: skip
            ticks.append(height)
            labels.append(answer)
            height += 1
        height += 0.5
    if "baseline" in of_row:
        baseline = 100 * sum(each["accuracy"] for each in of_row["baseline"]) / len(of_row["baseline"])
        ax.axvline(baseline, color=PALE, linewidth=1, linestyle=":", zorder=1)
    ax.set_yticks(ticks, labels, fontsize=8.5, color=INK)
    ax.set_ylim(height - 0.3, -0.8)
    low, high = ax.get_xlim()
    ax.set_xlim(low, high + 0.1 * (high - low))  # room for the number on the right
    finish_axis(ax, "test accuracy, %")
    ax.spines["left"].set_visible(False)
    ax.set_title("One change at a time; grey is the baseline", fontsize=9.5, color=INK, loc="left")


def draw_sizes(ax: Any, of_row: dict[str, list[Result]], sizes: list[int]) -> None:
    for answer, row in POSITIONS.items():
        if row not in of_row:
            continue
        found = of_row[row]
        columns = [[100 * each["sizes"][str(size)] for each in found] for size in sizes]
        means = [sum(column) / len(column) for column in columns]
        ax.fill_between(sizes, [min(c) for c in columns], [max(c) for c in columns], color=COLOURS[answer], alpha=0.15)
        ax.plot(sizes, means, color=COLOURS[answer], marker=MARKERS[answer], markersize=4, linewidth=1.4, label=answer)
    ax.set_xticks(sizes)
    finish_axis(ax, "pixels of the test images; 32 were trained on", "test accuracy, %")
    ax.set_title("Positions at other sizes", fontsize=9.5, color=INK, loc="left")
    if ax.lines:
        ax.legend(frameon=False, fontsize=8, labelcolor=INK, loc="center left", bbox_to_anchor=(1.0, 0.5))


def draw_shuffled(ax: Any, of_row: dict[str, list[Result]]) -> None:
    known = [(answer, of_row[row]) for answer, row in POSITIONS.items() if row in of_row]
    for height, (answer, found) in enumerate(known):
        whole, mixed = (100 * sum(each[name] for each in found) / len(found) for name in ("accuracy", "shuffled"))
        ax.plot([mixed, whole], [height, height], color=COLOURS[answer], linewidth=1.5, alpha=0.4)
        ax.plot([whole], [height], "o", color=COLOURS[answer], markersize=6)
        ax.plot([mixed], [height], "o", color="white", markeredgecolor=COLOURS[answer], markersize=6)
        ax.annotate(f"{mixed:.1f}", (mixed, height), (0, 6), textcoords="offset points", ha="center", fontsize=8,
                    color=INK)  # fmt: skip
    ax.set_yticks(range(len(known)), [answer for answer, _ in known], fontsize=8.5, color=INK)
    ax.set_ylim(len(known) - 0.5, -0.8)
    ax.set_xlim(0, 100)
    finish_axis(ax, "test accuracy, %: patches in order (full), shuffled (empty)")
    ax.set_title("Patches shuffled at test time", fontsize=9.5, color=INK, loc="left")


def main(arguments: list[str] | None = None) -> int:
    parser = arguments_parser("Measure what the choices in a ViT are worth on CIFAR-10.")
    parser.add_argument("--rows", help=f"some of {','.join(ROWS)}")
    parser.add_argument("--seeds", type=counting, default=2)
    parser.add_argument("--epochs", type=float, default=EPOCHS)
    given = parser.parse_args(arguments)

    def work() -> None:
        rows = list(ROWS) if given.rows is None else given.rows.split(",")
        unknown = [row for row in rows if row not in ROWS]
        if unknown:
            raise PatchlightError(f"--rows {unknown[0]}: there is no such row; the rows are {', '.join(ROWS)}")
        if not given.table:
            budget = {"epochs": given.epochs, "changes": parse_values(given.changes)}
            tasks = [Task(row, seed, budget) for seed in range(given.seeds) for row in ROWS if row in rows]
            measure_one = functools.partial(measure, out=given.out, data=given.data, device=given.device)
            measure_all(given.out, tasks, measure_one, jobs=given.jobs, tell=say)
        results = read_results(given.out)
        if not results:
            raise PatchlightError(f"{given.out}: holds no results; leave --table out to measure some")
        say(table(results))
        save_picture(given.out / "ablations.png", lambda: draw(results))

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(main())
