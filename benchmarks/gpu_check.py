"""Whether training on this machine's GPU learns what it should: eager, compiled, recorded (CUDA graphs), and both.

    python benchmarks/gpu_check.py                       # everything; a table, and exit code 1 where something is off
    python benchmarks/gpu_check.py --learners subject dino --steps 20
    python benchmarks/gpu_check.py --cudnn               # what cuDNN's attention would do to gradients, see below

For every kind of learner that there is (labels, a teacher, DINO, MAE, subjects), the same run is made four times, of
50 steps on made photos. At some steps the gradients that the run moves by are compared, matrix by matrix, with those of
the same weights and photos in float32 with plain attention and no compiler: `gradient` is the largest distance, as a
share of the gradient's length. `loss` is the largest difference from the eager run's losses, in the mean of ten steps.
Then come gradients through `pl.attention` of a compiled model, the tests that need a GPU, and, where there are two
GPUs, two processes beside one.

`kernel` says whether this torch has the fault that `patchlight.models.attention.attend` steers around: gradients of
cuDNN's attention that are right or wrong by what the process did before. --cudnn lets it have its way, to see which
runs it would spoil.

Photos are varied, and the model draws nothing itself (no stochastic depth), so that all four see the same.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import patchlight as pl
from patchlight.config import PreprocessConfig, ViTConfig
from patchlight.images.augment import AugmentConfig
from patchlight.models import attention as attention_module
from patchlight.training import loop, step
from patchlight.training.config import (
    DataConfig,
    DinoConfig,
    DistillConfig,
    MaeConfig,
    OptimConfig,
    SubjectConfig,
    TrainConfig,
)
from patchlight.training.optim import matrices_in

ROOT = Path(__file__).resolve().parents[1]
LEARNERS = ("labels", "teacher", "dino", "mae", "subject")
MODES = {"eager": (False, False), "compiled": (True, False), "recorded": (False, True), "both": (True, True)}
"""Whether blocks are compiled, and whether steps are recorded."""

GRADIENTS_APART = 0.05
"""A matrix's gradient in bfloat16 is 0.005 to 0.02 from the one in float32."""

LOSSES_APART = 0.02
"""Of the mean of ten steps. Rounding alone takes runs 0.005 apart within 50."""

SIDE, CLASSES, PHOTOS = 64, 10, 512


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check that training on this machine's GPU learns what it should.")
    parser.add_argument("--learners", nargs="+", choices=LEARNERS, default=list(LEARNERS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="eager is always among them")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--device", default="cuda", help="cpu checks the check: nothing is recorded there")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--cudnn", action="store_true", help="let attention choose cuDNN's kernel in training, too")
    parser.add_argument("--no-tests", action="store_true", help="leave out the tests that need a GPU")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("no GPU is here; --device cpu checks the check itself\n")
        return 2
    if given.cudnn:
        attention_module._WITH_RIGHT_GRADIENTS[:] = [
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.MATH,
        ]
    machine = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    say(f"{machine}, torch {torch.__version__}, {given.steps} steps of {given.batch_size} photos, {given.precision}")
    bad: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        photos = make_photos(Path(folder) / "photos")
        say(f"{'learner':10} {'run':10} {'gradient':>9} {'loss':>7} {'last loss':>9} {'ms a step':>9}  worst matrix")
        for learner in given.learners:
            bad += check_learner(learner, photos, Path(folder), given)
        if given.device == "cuda" and torch.cuda.device_count() > 1:
            bad += check_two_processes(photos, Path(folder), given)
    bad += check_attention(given.device)
    if given.device == "cuda":
        say(f"kernel: {kernel_fault()}")
        if not given.no_tests:
            bad += run_tests()
    say("all right" if not bad else f"{len(bad)} off: " + "; ".join(bad))
    return 1 if bad else 0


def say(line: str) -> None:
    print(line, flush=True)


def make_photos(folder: Path) -> Path:
    """Bright boxes of ten colours on noise, some with masks, and some noise alone; with a CSV of labels and boxes."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    colours_K3 = draw.integers(0, 256, (CLASSES, 3))
    rows = ["file,label,boxes,mask"]
    for number in range(PHOTOS):
        noise_HWC = draw.integers(0, 120, (SIDE // 4, SIDE // 4, 3))
        photo_HWC = noise_HWC.repeat(4, 0).repeat(4, 1).astype(np.uint8)
        label = number % CLASSES
        (x0, y0), (width, height) = draw.integers(0, SIDE // 2, 2), draw.integers(SIDE // 4, SIDE // 2, 2)
        if number % 8 == 7:
            rows.append(f"{number}.png,class {label},[],")
        else:
            photo_HWC[y0 : y0 + height, x0 : x0 + width] = colours_K3[label]
            mask_HW = np.zeros((SIDE, SIDE), np.uint8)
            mask_HW[y0 : y0 + height, x0 : x0 + width] = 255
            Image.fromarray(mask_HW).save(folder / f"mask{number}.png")
            box = f'"[[{x0}, {y0}, {x0 + width}, {y0 + height}]]"'
            rows.append(
                f"{number}.png,class {label},{box},mask{number}.png"
                if number % 2
                else f"{number}.png,class {label},{box},"
            )
        Image.fromarray(photo_HWC).save(folder / f"{number}.png", compress_level=1)
    table = folder / "photos.csv"
    table.write_text("\n".join(rows) + "\n")
    return table


def config_of(learner: str, photos: Path, given: argparse.Namespace, *, compiled: bool) -> TrainConfig:
    labelled = learner in ("labels", "teacher", "subject")
    model = ViTConfig(
        image_size=SIDE,
        patch_size=8,
        width=192,
        depth=4,
        num_heads=3,
        num_registers=0 if learner == "mae" else 4,
        num_classes=CLASSES if labelled else 0,
        distill_token=learner == "teacher",
        pooling="mean" if learner == "mae" else "cls",
    )
    parts: dict[str, Any] = {
        "teacher": {"distill": DistillConfig(teacher="made")},
        "dino": {"dino": DinoConfig(prototypes=256, head_hidden=256, collapse_checks=10**6)},
        "mae": {"mae": MaeConfig(decoder_width=64, decoder_depth=2, decoder_heads=1)},
        "subject": {"subject": SubjectConfig(canvas=SIDE, paste=0.2)},
    }
    return TrainConfig(
        model=model,
        data=DataConfig(train=str(photos), validation=str(photos), workers=2),
        preprocess=PreprocessConfig(image_size=SIDE, resize="squash", crop_pct=1.0),
        augment=AugmentConfig(flip=True),
        optim=OptimConfig(name="muon", lr=5e-4, muon_lr=0.004, warmup=0.1, clip_grad=None),
        epochs=given.steps * given.batch_size / PHOTOS,
        batch_size=given.batch_size,
        precision=given.precision,
        compile=compiled,
        evaluate_every=1e6,
        checkpoint_every=10**6,
        log_every=1,
        **parts.get(learner, {}),
    )


def made_teacher(device: str) -> Any:
    """A teacher that answers by the mean colour."""
    mix_3K = torch.randn(3, CLASSES, generator=torch.Generator().manual_seed(0)).to(device)
    return lambda images_BCHW: images_BCHW.mean((2, 3)) @ mix_3K * 10


def check_learner(learner: str, photos: Path, folder: Path, given: argparse.Namespace) -> list[str]:
    bad, found = [], {}
    modes = ["eager", *(mode for mode in MODES if mode != "eager" and mode in given.modes)]
    # With cuDNN, what comes first decides: a run as people make it begins compiled.
    for mode in reversed(modes) if given.cudnn else modes:
        compiled, recorded = MODES[mode]
        config = config_of(learner, photos, given, compiled=compiled)
        torch._dynamo.reset()
        out = folder / f"{learner}-{mode}"
        with watched(recorded=recorded, steps=given.steps) as seen:
            began = time.perf_counter()
            teacher = made_teacher if learner == "teacher" else None
            loop.train(config, out, device=given.device, make_teacher=teacher)
            seconds = time.perf_counter() - began
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        found[mode] = np.array([row["loss"] for row in rows if "loss" in row]), seen, seconds
    for mode in modes:
        losses, seen, seconds = found[mode]
        ten = min(10, len(losses))
        mean, eager_mean = (np.convolve(each, np.ones(ten) / ten, "valid") for each in (losses, found["eager"][0]))
        apart = float(np.abs(mean / eager_mean - 1).max())
        # The mean over the steps: what is wrong stays wrong, and rounding (most of it in DINO and MAE) comes and goes.
        means = {name: float(np.mean(far)) for name, far in seen.far.items()}
        worst = max(means, key=lambda name: means[name])
        gradient = means[worst]
        say(
            f"{learner:10} {mode:10} {gradient:9.4f} {apart:7.4f} {losses[-ten:].mean():9.4f} "
            f"{1000 * seconds / given.steps:9.1f}  {worst}"
        )
        if MODES[mode][1] and given.device == "cuda" and not seen.recorded:
            bad.append(f"{learner} {mode}: nothing was recorded")
        if not gradient <= GRADIENTS_APART:
            bad.append(f"{learner} {mode}: the gradient of {worst} by {gradient:.0%}")
        if not apart <= LOSSES_APART:
            bad.append(f"{learner} {mode}: losses by {apart:.1%}")
    return bad


class Seen:
    def __init__(self) -> None:
        self.far: dict[str, list[float]] = {"(none)": [0.0]}
        """How far each matrix is from float32, at each of the steps that were looked at."""
        self.recorded = False


@contextlib.contextmanager
def watched(*, recorded: bool, steps: int) -> Iterator[Seen]:
    """While training runs: compare its gradients at some steps, and record it, or not."""
    seen, looked_at = Seen(), {1, 5, 12}  # later, what is learnt well leaves gradients of hardly more than rounding

    class WatchedStep(step.Step):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.records = self.records and recorded

        def learn(self, inputs: tuple[Tensor, ...], *, last: bool) -> float:
            look = self.steps_taken in looked_at
            buffers = [buffer.clone() for buffer in self.learner.buffers()] if look else []
            loss = super().learn(inputs, last=last)
            seen.recorded |= self.recorded_learn is not None
            if look:
                self.compare(inputs, buffers)
            return loss

        def compare(self, inputs: tuple[Tensor, ...], buffers: list[Tensor]) -> None:
            """With the gradients in float32; everything is put back as it was."""
            kept = [parameter.grad for parameter in self.parameters]
            after = [buffer.clone() for buffer in self.learner.buffers()]
            for buffer, value in zip(self.learner.buffers(), buffers, strict=True):
                buffer.copy_(value)
            for parameter in self.parameters:
                parameter.grad = None
            chosen = list(attention_module._WITH_RIGHT_GRADIENTS)
            attention_module._WITH_RIGHT_GRADIENTS[:] = [SDPBackend.MATH]
            with torch.compiler.set_stance("force_eager"), sdpa_kernel(SDPBackend.MATH):
                self.learner(*inputs).backward()
            attention_module._WITH_RIGHT_GRADIENTS[:] = chosen
            found = {id(parameter): gradient for parameter, gradient in zip(self.parameters, kept, strict=True)}
            for name, parameter in self.learner.named_parameters():
                gradient = found.get(id(parameter))
                if gradient is None or parameter.grad is None or not matrices_in(name, parameter):
                    continue
                for place, far in enumerate(far_apart(gradient, parameter.grad, matrices_in(name, parameter))):
                    part = name if matrices_in(name, parameter) == 1 else f"{name} [{'qkv'[place]}]"
                    seen.far.setdefault(part, []).append(far)
            for parameter, gradient in zip(self.parameters, kept, strict=True):
                parameter.grad = gradient
            for buffer, value in zip(self.learner.buffers(), after, strict=True):
                buffer.copy_(value)

    loop.Step = WatchedStep  # type: ignore[misc]
    try:
        yield seen
    finally:
        loop.Step = step.Step  # type: ignore[misc]


def far_apart(gradient: Tensor, right: Tensor, parts: int) -> list[float]:
    """The distance as a share of the length, for each of the matrices that are joined in one."""
    gradient_prc, right_prc = (each.float().unflatten(0, (parts, -1)) for each in (gradient, right))
    length_p, distance_p = right_prc.norm(dim=(1, 2)), (gradient_prc - right_prc).norm(dim=(1, 2))
    # One that is next to nothing beside its neighbours is rounding, however it was made.
    counts_p = length_p > 1e-3 * length_p.max()
    far_p = torch.where(counts_p, distance_p / length_p.clamp(min=1e-30), 0)
    return far_p.nan_to_num(nan=torch.inf, posinf=torch.inf).tolist()  # type: ignore[no-any-return]


def check_attention(device: str) -> list[str]:
    """Gradients through `pl.attention`, of a model that is compiled, beside the plain one in float32."""
    torch._dynamo.reset()
    bad = []
    torch.manual_seed(0)
    model = pl.ViT(ViTConfig(image_size=SIDE, patch_size=8, width=192, depth=3, num_heads=3)).to(device).train()
    images_BCHW = torch.randn(16, 3, SIDE, SIDE, device=device)
    towards_BP, direction_D = torch.rand(16, 64, device=device), torch.randn(192, device=device)

    def gradients(held: Any, *, low: bool) -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=low):
            maps = pl.attention(held, images_BCHW, layers="all", heads="mean", differentiable=True)
            looked_LBP = maps.weights[:, :, 0, 0, -64:].float()
            loss = (
                F.mse_loss(looked_LBP * 64, towards_BP.expand_as(looked_LBP))
                + (maps.tokens.float() @ direction_D).square().mean()
            )
        loss.backward()
        return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}

    with sdpa_kernel(SDPBackend.MATH):
        right = gradients(model, low=False)
    for name, held in (("eager", model), ("compiled", torch.compile(model))):
        found = gradients(held, low=True)
        far = {
            each: max(far_apart(found[each], right[each], matrices_in(each, right[each])))
            for each in right
            if matrices_in(each, right[each])
        }
        worst = max(far, key=lambda each: far[each])
        say(f"{'attention':10} {name:10} {far[worst]:9.4f} {'':7} {'':9} {'':9}  {worst}")
        if not far[worst] <= GRADIENTS_APART:
            bad.append(f"attention {name}: the gradient of {worst} by {far[worst]:.0%}")
    return bad


def kernel_fault() -> str:
    """Gradients of cuDNN's attention for two that come in alike and lie otherwise in memory, one after the other."""
    torch.manual_seed(0)
    apart = []
    for number, orders in enumerate((("contiguous", "as the output"), ("as the output", "contiguous"))):
        qkv_BN3AE = torch.randn(8, 71 + number, 3, 3, 64, device="cuda", dtype=torch.bfloat16)
        come_BANE = torch.randn(8, 71 + number, 3, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for order in orders:
            q, k, v = (each.transpose(1, 2).detach().requires_grad_() for each in qkv_BN3AE.unbind(2))
            try:
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                    out_BANE = F.scaled_dot_product_attention(q, k, v)
                given = come_BANE.contiguous() if order == "contiguous" else come_BANE
                found = torch.autograd.grad(out_BANE, (q, k, v), given)
            except RuntimeError as error:
                return f"cuDNN's attention does not run here ({str(error).splitlines()[0][:80]})"
            q, k, v = (each.detach().float().requires_grad_() for each in (q, k, v))
            with sdpa_kernel(SDPBackend.MATH):
                right = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v), (q, k, v), come_BANE.float())
            far = max(((a.float() - b).norm() / b.norm()).item() for a, b in zip(found, right, strict=True))
            apart.append((order, far))
    told = ", ".join(f"{order} {far:.3f}" for order, far in apart)
    wrong = any(far > GRADIENTS_APART for _, far in apart)
    return f"cuDNN's gradients {'depend on' if wrong else 'do not depend on'} what came before ({told})"


def check_two_processes(photos: Path, folder: Path, given: argparse.Namespace) -> list[str]:
    """The losses of two GPUs beside those of one."""
    losses = {}
    for count in (1, 2):
        out = folder / f"processes-{count}"
        settings = folder / f"processes-{count}.json"
        settings.write_text(json.dumps(config_of("labels", photos, given, compiled=True).to_dict()))
        script = folder / "train_one.py"
        script.write_text(
            "import json, sys\n"
            "from patchlight.training.config import TrainConfig\n"
            "from patchlight.training.loop import train\n"
            "if __name__ == '__main__':\n"
            "    train(TrainConfig.from_dict(json.load(open(sys.argv[1]))), sys.argv[2])\n"
        )
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        done = subprocess.run([*command, str(script), str(settings), str(out)], cwd=ROOT)
        if done.returncode:
            return [f"{count} processes: failed"]
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        losses[count] = np.array([row["loss"] for row in rows if "loss" in row])
    apart = float(np.abs(losses[2] / losses[1] - 1).max())
    say(f"{'labels':10} {'2 GPUs':10} {'':9} {apart:7.4f} {losses[2][-10:].mean():9.4f}")
    return [] if apart <= LOSSES_APART else [f"two processes: losses by {apart:.1%}"]


def run_tests() -> list[str]:
    """Those that are skipped without a GPU."""
    try:
        import pytest  # noqa: F401
    except ModuleNotFoundError:
        return ["tests: pytest is not installed here"]
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text("utf-8")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *files]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines()
    say(f"tests that need a GPU: {lines[-1] if lines else 'nothing was said'}")
    if done.returncode:
        say("\n".join(lines[-30:]))
    return ["tests"] if done.returncode else []


if __name__ == "__main__":
    sys.exit(main())
