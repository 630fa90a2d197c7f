"""Training steps beside timm's: images per second, and the ratio, in one run.

    python benchmarks/train_step.py --device cuda                  # S/16 and B/16 at 224 px, bfloat16, batch 256
    python benchmarks/train_step.py Ti/16 --batch 8 --rounds 3     # on a CPU, to see that it works

Ours is `patchlight.training.step.Step`, as `patchlight train` takes it: compiled, autocast, AdamW, CUDA graphs.
The peer is timm's model in the usual loop: torch.compile, autocast, fused AdamW, gradients clipped; with
`--peer-graphs` its step is recorded, too (mode "reduce-overhead"). Both clip gradients and wait for the loss each step,
as a loop that watches for NaN must. Rounds are interleaved; the median round counts.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from patchlight.config import PreprocessConfig
from patchlight.families import variant
from patchlight.models.vit import ViT
from patchlight.training.config import DataConfig, OptimConfig, TrainConfig
from patchlight.training.data import Batch
from patchlight.training.objective import Classification
from patchlight.training.optim import make_optimizer
from patchlight.training.processes import Processes
from patchlight.training.step import Step

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import oracles


class PreparedImages(Classification):
    """The batch's images and targets as they are: the peer is given none to vary, either."""

    def prepare(self, batch: Batch, *, cropped: bool) -> tuple[torch.Tensor, ...]:
        return batch.images_BCHW, batch.labels_B


TakeStep = Callable[[torch.Tensor, torch.Tensor], float]


def our_step(name: str, arguments: argparse.Namespace) -> TakeStep:
    model = variant(name)
    config = TrainConfig(
        model=model,
        data=DataConfig(train="none"),
        preprocess=PreprocessConfig(image_size=model.image_size),
        optim=OptimConfig(),
        batch_size=arguments.batch,
        precision="bfloat16",
        compile=not arguments.eager,
    )
    processes = Processes(0, 1, torch.device(arguments.device))
    vit = ViT(config.model).to(processes.device).train()
    optimizer = make_optimizer(vit, config.optim, capturable=processes.device.type == "cuda")
    learner = PreparedImages(vit, config)
    step = Step(learner, processes.spread(learner, config), optimizer, None, config, processes)
    count, none = [0], torch.zeros(0, device=processes.device)

    def take(images: torch.Tensor, targets: torch.Tensor) -> float:
        loss = step.learn(step.prepare(Batch(images, targets, none, none, none)), last=True)
        step.move(count[0])
        count[0] += 1
        return loss

    return take


def timm_step(name: str, arguments: argparse.Namespace) -> TakeStep:
    size = {"Ti": "tiny", "S": "small", "B": "base", "L": "large"}[name.split("/")[0]]
    model = oracles.timm().create_model(f"vit_{size}_patch{name.split('/')[1]}_224").to(arguments.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, fused=True)
    mode = "reduce-overhead" if arguments.peer_graphs else None
    compiled = model if arguments.eager else torch.compile(model, mode=mode)

    def take(images: torch.Tensor, targets: torch.Tensor) -> float:
        with torch.autocast(arguments.device, torch.bfloat16):
            loss = F.cross_entropy(compiled(images).float(), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return take


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["S/16", "B/16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5, help="steps in a round")
    parser.add_argument("--eager", action="store_true", help="compile neither")
    parser.add_argument("--peer-graphs", action="store_true", help="compile the peer with CUDA graphs")
    arguments = parser.parse_args()
    where = torch.cuda.get_device_name() if arguments.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{where}, torch {torch.__version__}, bfloat16 autocast, batch {arguments.batch}")
    for name in arguments.models:
        takers: dict[str, TakeStep] = {}
        for contestant, make in (("patchlight", our_step), ("timm", timm_step)):
            try:
                takers[contestant] = make(name, arguments)
            except oracles.Absent as absent:
                print(f"  {contestant} left out: {absent}")
        images = torch.randn(arguments.batch, 3, 224, 224, device=arguments.device)
        targets = torch.rand(arguments.batch, 1000, device=arguments.device).softmax(1)
        rates: dict[str, list[float]] = {contestant: [] for contestant in takers}
        for index in range(arguments.rounds + 2):
            for contestant, take in takers.items():
                start = time.perf_counter()
                for _ in range(arguments.steps):
                    take(images, targets)
                if index >= 2:  # the first ones compile and record
                    rates[contestant].append(arguments.steps * arguments.batch / (time.perf_counter() - start))
        for contestant, each in rates.items():
            print(f"  {name:5} {contestant:13} {statistics.median(each):10,.0f} images/s")
        if len(rates) == 2:
            ratio = statistics.median(a / b for a, b in zip(rates["patchlight"], rates["timm"], strict=True))
            print(f"  {name:5} patchlight is {ratio:.2f} times timm")


if __name__ == "__main__":
    main()
