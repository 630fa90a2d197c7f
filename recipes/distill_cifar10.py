"""A ViT on CIFAR-10 that also learns from a ConvNet (DeiT, arXiv:2012.12877): what a teacher adds.

    patchlight train recipes/distill_cifar10.py --out runs/distilled

trains the ConvNet of recipes/small_cnn.py first, keeps it beside the run (runs/distilled.teacher.safetensors; --resume
takes it from there), and then a ViT with a class token, which learns the labels, and a distillation token, which learns
what the teacher answers to the very same varied images. The prediction is the mean of the two.

    python recipes/distill_cifar10.py out/distill --data data/cifar10 --device cuda

trains the teacher, the ViT with it, and the same ViT for as many steps from the labels alone, and prints the table.
One H200 (torch 2.11), one seed:

| model | test accuracy |
|---|---|
| ConvNet, the teacher | 93.75 % |
| ViT with the teacher | 93.18 % |
| ViT without | 90.77 % |
"""

import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from measuring import (
    Result,
    Task,
    accuracies_of,
    arguments_parser,
    counting,
    exit_code,
    markdown,
    measure_all,
    percent,
    photos,
    precision_for,
    read_results,
    say,
    seconds_of,
    train_vit,
)
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from small_cnn import SmallCNN, in_bfloat16, same_every_time, train_cnn
from torch import Tensor

from patchlight.config import PreprocessConfig, ViTConfig
from patchlight.errors import PatchlightError
from patchlight.files import replacing
from patchlight.images.augment import AugmentConfig
from patchlight.json_config import parse_values
from patchlight.training.config import DataConfig, OptimConfig, TrainConfig

DATA = "data/cifar10"
TEACHER_EPOCHS, TEACHER_WIDTH = 20.0, 64


def config() -> TrainConfig:
    return without().changed({"distill": {"teacher": "recipes/small_cnn.py", "kind": "hard", "share": 0.5}})


def without() -> TrainConfig:
    """The same model, two tokens and two heads, which both learn the labels."""
    return TrainConfig(
        model=ViTConfig(
            image_size=32,
            patch_size=4,
            width=192,
            depth=6,
            num_heads=3,
            qk_norm=True,
            position="rope2d",
            class_token=True,
            distill_token=True,
            num_classes=10,
        ),
        data=DataConfig(train=DATA, validation=DATA),
        preprocess=PreprocessConfig(
            image_size=32, resize="squash", crop_pct=1.0, mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616)
        ),
        augment=AugmentConfig(crop="pad", pad=4, policy="trivial"),
        optim=OptimConfig(name="muon", lr=2e-3, muon_lr=0.03, weight_decay=0.05, warmup=0.05),
        epochs=45.0,
        batch_size=512,
        label_smoothing=0.1,
        precision="bfloat16",
        evaluate_every=15.0,
        checkpoint_every=5_000,
    )


def teacher(
    out: str | Path,
    device: str | None = None,
    settings: TrainConfig | None = None,
    *,
    epochs: float = TEACHER_EPOCHS,
    width: int = TEACHER_WIDTH,
) -> Callable[[Tensor], Tensor]:
    """The ConvNet as it teaches: images (B, 3, H, W) with values from 0 to 1 -> logits_BK.

    It is trained once, on the photos of the settings, and kept beside the run's folder `out`.
    """
    file, data = teacher_file(out), (settings or without()).data.train
    if not file.exists():
        began = time.perf_counter()
        trained, accuracy = train_cnn(
            photos(data, "train"), photos(data, "test"), epochs=epochs, device=device, width=width
        )
        facts = {"epochs": epochs, "width": width, "accuracy": accuracy, "seconds": time.perf_counter() - began}
        weights = {name: tensor.cpu().contiguous() for name, tensor in trained.state_dict().items()}
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as temporary:
            save_file(weights, temporary, {"teacher": json.dumps(facts)})
    facts, weights = read_teacher(file)
    if (facts["epochs"], facts["width"]) != (epochs, width):
        raise PatchlightError(
            f"{file}: was trained for {facts['epochs']:g} epochs, {facts['width']} wide, not {epochs:g} and {width}; "
            "delete it, or name another folder"
        )
    model = SmallCNN(len(weights["head.weight"]), width)
    model.load_state_dict(weights)
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = model.to(chosen).eval().requires_grad_(False)

    def teach(images_BCHW: Tensor) -> Tensor:
        with same_every_time(), in_bfloat16(chosen):
            return model(images_BCHW)

    return teach


def teacher_file(out: str | Path) -> Path:
    """Beside the folder, which has to be empty when a run begins."""
    folder = Path(out).absolute()
    return folder.with_name(f"{folder.name}.teacher.safetensors")


def read_teacher(file: Path) -> tuple[Result, dict[str, Tensor]]:
    """What is known of the teacher, and its weights."""
    try:
        with safe_open(file, "pt") as content:
            facts = json.loads((content.metadata() or {})["teacher"])
        return facts, load_file(file)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise PatchlightError(f"{file}: is no teacher of this recipe ({error}); delete it to train another") from None


# With and without


def measure(
    task: Task, *, out: Path, data: str, device: str | None, teacher_epochs: float, teacher_width: int
) -> Result:
    """The ViT, with the teacher or without it."""
    changes = {"data.train": data, "data.validation": data, "precision": precision_for(device), "seed": task.seed}
    settings = (config() if task.row == "with" else without()).changed(changes | task.budget["changes"])
    settings = settings.changed({"evaluate_every": settings.epochs})
    known = None
    if task.row == "with":
        known = teacher(out / "with", device, settings, epochs=teacher_epochs, width=teacher_width)
    _, result = train_vit(settings, out / "runs" / f"{task.row}-{task.seed}", device=device, teacher=known)
    return result


def table(results: Sequence[Result], taught_by: Result) -> str:
    """In Markdown: the teacher, and the ViT with and without it."""
    rows = [("ConvNet, the teacher", percent([taught_by["accuracy"]]), f"{taught_by['seconds']:.0f}")]
    for row, name in (("with", "ViT with the teacher"), ("without", "ViT without")):
        found = [result for result in results if result["row"] == row]
        if found:
            rows.append((name, percent(each["accuracy"] for each in found), seconds_of(found)))
    return accuracies_of(results) + markdown(("model", "accuracy", "seconds"), rows)


def main(arguments: list[str] | None = None) -> int:
    parser = arguments_parser("Measure what a ConvNet as a teacher adds to a ViT on CIFAR-10.")
    parser.add_argument("--seeds", type=counting, default=1, help="of the ViTs; they have one teacher")
    parser.add_argument("--teacher-epochs", type=float, default=TEACHER_EPOCHS)
    parser.add_argument("--teacher-width", type=counting, default=TEACHER_WIDTH)
    given = parser.parse_args(arguments)

    def work() -> None:
        if not given.table:
            shape = {"teacher_epochs": given.teacher_epochs, "teacher_width": given.teacher_width}
            settings = without().changed({"data.train": given.data})
            teacher(out=given.out / "with", device=given.device, settings=settings,
                    epochs=given.teacher_epochs, width=given.teacher_width)  # fmt: skip
            budget = {**shape, "changes": parse_values(given.changes)}
            tasks = [Task(row, seed, budget) for seed in range(given.seeds) for row in ("with", "without")]
            measure_one = functools.partial(measure, out=given.out, data=given.data, device=given.device, **shape)
            measure_all(given.out, tasks, measure_one, jobs=given.jobs, tell=say)
        results = read_results(given.out)
        if not results:
            raise PatchlightError(f"{given.out}: holds no results; leave --table out to measure some")
        say(table(results, read_teacher(teacher_file(given.out / "with"))[0]))

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(main())
