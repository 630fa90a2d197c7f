"""Learning without labels (DINO, arXiv:2104.14294): a student answers about small parts of a photo as a teacher does
about large ones. The teacher is the average of the students so far, and the classes are of their own making.

What keeps all photos from getting one answer: the teacher's answers are centred, so that none of the K classes is
preferred, and sharpened, so that they are not all classes at once. With `patch_loss` the student also says what the
teacher sees in patches that are hidden from the student (iBOT, arXiv:2111.07832). `koleo` keeps features apart from
their neighbours (arXiv:2304.07193).

V views, G = 2B photos in two large views, K prototypes, M hidden patches, Z the bottleneck.
"""

import dataclasses
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from patchlight.config import PreprocessConfig, Size, ViTConfig
from patchlight.errors import PatchlightError
from patchlight.images.augment import AugmentConfig, RandomView, normalise, random_view
from patchlight.images.draws import Draws
from patchlight.json_config import require
from patchlight.models.vit import ViT
from patchlight.training.collapse import Signs, diagnose, effective_rank, entropy
from patchlight.training.config import DinoConfig, TrainConfig
from patchlight.training.data import Batch
from patchlight.training.learner import Learner, as_squares


class Dino(Learner):
    """A student ViT, its teacher, and their heads."""

    vit: ViT
    momentum: Tensor
    teacher_temperature: Tensor
    centre_K: Tensor
    patch_centre_K: Tensor
    mean_answer_K: Tensor
    answer_entropy: Tensor
    class_loss: Tensor
    feature_moment_DD: Tensor
    bad_checks: Tensor

    def __init__(self, vit: ViT, config: TrainConfig) -> None:
        super().__init__()
        if config.dino is None:
            raise PatchlightError("DINO needs its settings; give TrainConfig(dino=DinoConfig(...))")
        if vit.head is not None:
            raise PatchlightError(
                f"DINO learns no classes, but model.num_classes={vit.config.num_classes}; set it to 0"
            )
        self.vit, self.config, self.dino = vit, config, config.dino
        self.local_size = self.dino.local_size_for(vit.config)
        self.head = ProjectionHead(vit.config.feature_width, self.dino)
        self.teacher, self.teacher_head = ViT(vit.config), ProjectionHead(vit.config.feature_width, self.dino)
        self.teacher.load_state_dict(vit.state_dict())
        self.teacher_head.load_state_dict(self.head.state_dict())
        self.teacher.requires_grad_(False)
        self.teacher_head.requires_grad_(False)
        self.mask_X: nn.Parameter | None = None
        if self.dino.patch_loss:
            self._check_masking(vit.config)
            # What stands in the place of a hidden patch: pixels that are learnt, where others learn the token that
            # the embedding makes of them. So a ViT need not know of hidden patches.
            self.mask_X = nn.Parameter(torch.zeros(vit.config.in_channels * math.prod(vit.config.patch_size)))

        classes = self.dino.prototypes
        for name in ("momentum", "teacher_temperature"):
            self.register_buffer(name, torch.zeros(()), persistent=False)
        self.register_buffer("centre_K", torch.zeros(classes))
        self.register_buffer("patch_centre_K", torch.zeros(classes))
        # The signs by which `measures` sees a collapse: running means, since a batch may be small.
        self.register_buffer("mean_answer_K", torch.full((classes,), 1 / classes))
        self.register_buffer("answer_entropy", torch.tensor(math.log(classes)))
        self.register_buffer("class_loss", torch.tensor(math.log(classes)))
        self.register_buffer("feature_moment_DD", torch.zeros(2 * [vit.config.feature_width]))
        self.register_buffer("bad_checks", torch.tensor(0))
        self.done = 0.0
        self.set_progress(0.0)
        self.train()

    def _check_masking(self, model: ViTConfig) -> None:
        require(
            model.feature_width == model.width and model.final_norm == "tokens",
            f"dino.patch_loss={self.dino.patch_loss} needs model.pooling='cls' or 'mean' and final_norm='tokens'",
        )
        require(
            all(side % patch == 0 for side, patch in zip(model.image_size, model.patch_size, strict=True)),
            f"dino.patch_loss={self.dino.patch_loss} needs patches that divide image_size={model.image_size}",
        )

    def train(self, mode: bool = True) -> "Dino":
        """Keep the teacher in eval mode, without stochastic depth."""
        super().train(mode)
        self.teacher.eval()
        return self

    def shown(self) -> ViT:
        return self.teacher

    def reading(self) -> PreprocessConfig:
        """Half as large again as the large views, which are cut from it."""
        return as_squares(self.config.preprocess, 3 * max(self.vit.config.image_size) // 2)

    def cutting(self) -> AugmentConfig:
        """Random squares of the photos in files: views of whole ones, squeezed to squares, would show a world that is
        as much too narrow as the photos are wide."""
        augment = self.config.augment
        if augment.crop == "resized":
            return augment
        return dataclasses.replace(augment, crop="resized", area=(0.5, 1.0), aspect=(1.0, 1.0))

    # A step

    def prepare(self, batch: Batch, *, cropped: bool) -> tuple[Tensor, ...]:
        """The large views (2B, C, H, W), first view first, the small ones (V * B, C, h, w), and which patches of the
        second view are hidden: indices (B, M). What is not asked for is empty."""
        draws = Draws(self.config.seed, batch.epochs_B, batch.samples_B, batch.repeats_B)
        large_size, large_area = self.vit.config.image_size, self.dino.global_area
        small_size, small_area = self.local_size, self.dino.local_area
        large = [self._view(batch, draws.part(f"large {v}"), large_size, large_area) for v in range(2)]
        small = [
            self._view(batch, draws.part(f"small {v}"), small_size, small_area) for v in range(self.dino.local_views)
        ]
        hidden_BM = batch.samples_B.new_zeros(len(batch.samples_B), 0)
        if self.mask_X is not None:
            hidden_BM = hidden_patches(draws, self.vit.config.grid, self.dino.mask_share)
        return torch.cat(large), torch.cat(small) if small else large[0][:0], hidden_BM

    def _view(self, batch: Batch, draws: Draws, size: Size, area: tuple[float, float]) -> Tensor:
        dino = self.dino
        view = RandomView(
            size=size,
            area=area,
            colour=dino.colour,
            grey_share=dino.grey,
            blur_share=dino.blur,
            solarize_share=dino.solarize,
        )
        return normalise(random_view(batch.images_BCHW, draws, view), self.config.preprocess)

    def forward(self, *inputs: Tensor) -> Tensor:
        large_GCHW, small_LCHW, hidden_BM = inputs
        with torch.no_grad():
            taught_GND, geometry = self.teacher.encode(large_GCHW)
            taught_GD = self.teacher.read(taught_GND, geometry)
            answers_GK = self._teach(self.teacher_head(taught_GD), self.centre_K)

        seen_GCHW = large_GCHW if self.mask_X is None else self._hide(large_GCHW, hidden_BM)
        seen_GND, geometry = self.vit.encode(seen_GCHW)
        seen_GD = self.vit.read(seen_GND, geometry)
        features = [seen_GD] if self.dino.local_views == 0 else [seen_GD, self.vit(small_LCHW)]
        similar_VBK = self.head(torch.cat(features)).unflatten(0, (-1, len(large_GCHW) // 2))
        loss = class_loss = multi_view_loss(similar_VBK / self.dino.student_temperature, answers_GK)
        self._watch(class_loss, taught_GD, answers_GK)
        if self.mask_X is not None:
            with torch.no_grad():
                taught_BMK = self.teacher_head(self._at(taught_GND, hidden_BM))
                answers_BMK = self._teach(taught_BMK.flatten(0, 1), self.patch_centre_K).view_as(taught_BMK)
            guesses_BMK = self.head(self._at(seen_GND, hidden_BM)) / self.dino.student_temperature
            loss = loss + self.dino.patch_loss * cross_entropy(guesses_BMK, answers_BMK)
        if self.dino.koleo:
            loss = loss + self.dino.koleo * sum(koleo(view_BD) for view_BD in seen_GD.chunk(2)) / 2
        return loss

    def _teach(self, similar_BK: Tensor, centre_K: Tensor) -> Tensor:
        """The teacher's answers, centred and sharpened: probabilities. The centre follows the batch."""
        if self.dino.centring == "sinkhorn":
            return even_answers(similar_BK / self.teacher_temperature)
        if self.dino.centring == "none":
            return (similar_BK / self.teacher_temperature).softmax(1)
        answers_BK = ((similar_BK - centre_K) / self.teacher_temperature).softmax(1)
        _follow(centre_K, _sum_of_all(similar_BK.mean(0)) / _num_processes(), 1 - self.dino.centre_momentum)
        return answers_BK

    def _hide(self, large_GCHW: Tensor, hidden_BM: Tensor) -> Tensor:
        """The second view with its hidden patches replaced."""
        assert self.mask_X is not None
        (rows, columns), (down, across) = self.vit.config.grid, self.vit.config.patch_size
        hidden_BP = torch.zeros(len(hidden_BM), rows * columns, dtype=torch.bool, device=hidden_BM.device)
        hidden_Bhw = hidden_BP.scatter(1, hidden_BM, True).unflatten(1, (rows, columns))
        hidden_BHW = hidden_Bhw.repeat_interleave(down, 1).repeat_interleave(across, 2)
        mask_CHW = self.mask_X.view(-1, down, across).repeat(1, rows, columns)
        first_BCHW, second_BCHW = large_GCHW.chunk(2)
        return torch.cat((first_BCHW, torch.where(hidden_BHW[:, None], mask_CHW, second_BCHW)))

    def _at(self, tokens_GND: Tensor, hidden_BM: Tensor) -> Tensor:
        """The second view's tokens of the hidden patches (B, M, D)."""
        patches_BPD = tokens_GND.chunk(2)[1][:, self.vit.config.num_prefix :]
        return patches_BPD.gather(1, hidden_BM[:, :, None].expand(-1, -1, patches_BPD.shape[2]))

    @torch.no_grad()
    def _watch(self, class_loss: Tensor, taught_GD: Tensor, answers_GK: Tensor) -> None:
        with torch.autocast(taught_GD.device.type, enabled=False):
            directions_GD = F.normalize(taught_GD.float())
            _follow(self.feature_moment_DD, directions_GD.T @ directions_GD / len(directions_GD), 0.1)
        _follow(self.mean_answer_K, answers_GK.mean(0), 0.1)
        _follow(self.answer_entropy, entropy(answers_GK).mean(), 0.1)
        _follow(self.class_loss, class_loss, 0.1)

    # Between steps

    def set_progress(self, done: float) -> None:
        dino, self.done = self.dino, done
        self.momentum.fill_(1 - (1 - dino.momentum) * (1 + math.cos(math.pi * done)) / 2)
        warm = min(1.0, done / dino.teacher_warmup) if dino.teacher_warmup else 1.0
        start, end = dino.teacher_temperature_start, dino.teacher_temperature
        self.teacher_temperature.fill_(start + (end - start) * warm)
        self.head.moving.fill_(float(done >= dino.prototypes_rest))

    @torch.no_grad()
    def after_move(self) -> None:
        """Move the teacher's weights towards the student's."""
        teachers: list[Tensor] = [*self.teacher.parameters(), *self.teacher_head.parameters()]
        students: list[Tensor] = [*self.vit.parameters(), *self.head.parameters()]
        # Not by _foreach_lerp_, whose one weight for all would have to be a number of the host.
        steps = list(torch._foreach_sub(students, teachers))
        torch._foreach_mul_(steps, 1 - self.momentum)
        torch._foreach_add_(teachers, steps)

    def signs(self) -> Signs:
        """What is known of the teacher's answers to the latest photos."""
        most = math.log(self.dino.prototypes)
        return Signs(
            classes=self.dino.prototypes,
            loss=self.class_loss.item(),
            mean_entropy=entropy(self.mean_answer_K).item() / most,
            answer_entropy=self.answer_entropy.item() / most,
            feature_rank=effective_rank(self.feature_moment_DD),
        )

    def measures(self) -> dict[str, float]:
        signs = self.signs()
        return {
            "class_loss": signs.loss,
            "teacher_mean_entropy": signs.mean_entropy,
            "teacher_entropy": signs.answer_entropy,
            "feature_rank": signs.feature_rank,
            "teacher_temperature": self.teacher_temperature.item(),
            "teacher_momentum": self.momentum.item(),
        }

    def check(self) -> None:
        """Raises where a collapse has lasted."""
        dino, wrong = self.dino, None
        if self.done >= dino.collapse_after:
            wrong = diagnose(
                self.signs(),
                centring=dino.centring,
                teacher_temperature=round(self.teacher_temperature.item(), 4),
                student_temperature=dino.student_temperature,
            )
        self.bad_checks.copy_(self.bad_checks + 1 if wrong else torch.zeros_like(self.bad_checks))
        if wrong and self.bad_checks.item() >= dino.collapse_checks:
            raise PatchlightError(f"DINO has collapsed after {self.done:.0%} of the run: {wrong}")


class ProjectionHead(nn.Module):
    """features_BD -> how similar they are to each prototype, from -1 to 1: similar_BK, float32."""

    moving: Tensor
    """1, or 0 while the prototypes rest."""

    def __init__(self, width: int, config: DinoConfig) -> None:
        super().__init__()
        hidden = config.head_hidden
        self.layers = nn.Sequential(
            nn.Linear(width, hidden),
            nn.GELU(),
            nn.Linear(hidden, hidden),
            nn.GELU(),
            nn.Linear(hidden, config.bottleneck),
        )
        self.prototypes = nn.Parameter(torch.empty(config.prototypes, config.bottleneck))
        self.register_buffer("moving", torch.ones(()), persistent=False)
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)
        nn.init.normal_(self.prototypes, std=config.bottleneck**-0.5)

    def forward(self, features_BD: Tensor) -> Tensor:
        z_BZ = self.layers(features_BD)
        with torch.autocast(z_BZ.device.type, enabled=False):
            prototypes_KZ = F.normalize(self.prototypes, dim=1)
            prototypes_KZ = torch.lerp(prototypes_KZ.detach(), prototypes_KZ, self.moving)
            return F.linear(F.normalize(z_BZ.float(), dim=-1), prototypes_KZ)


def multi_view_loss(guesses_VBK: Tensor, answers_GK: Tensor) -> Tensor:
    """The student's answers about each view against the teacher's about each large view but the same: their mean.

    `guesses_VBK` are logits, the two large views first; `answers_GK` the probabilities for those two.
    """
    log_VBK = guesses_VBK.log_softmax(2)
    first_BK, second_BK = answers_GK.chunk(2)
    against_VB = (log_VBK[0] * second_BK).sum(1) + (log_VBK[1] * first_BK).sum(1)
    against_VB = against_VB + (log_VBK[2:] * (first_BK + second_BK)).sum((0, 2))
    return -against_VB.mean() / (2 + 2 * (len(log_VBK) - 2))


def cross_entropy(guesses: Tensor, answers: Tensor) -> Tensor:
    """Of logits against probabilities, along the last dimension, in the mean over the others."""
    return -(guesses.log_softmax(-1) * answers).sum(-1).mean()


def even_answers(logits_BK: Tensor, rounds: int = 3) -> Tensor:
    """Probabilities (B, K) near the logits' that use all K classes alike over the batch (Sinkhorn and Knopp).

    With several processes, over the batches of all.
    """
    # Times any number they give the same answers: so the largest is made 1, and what is too small counts as nothing.
    largest = logits_BK.max()
    if dist.is_initialized():
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    weights_BK = (logits_BK - largest).exp()
    for _ in range(rounds):
        weights_BK = weights_BK / _sum_of_all(weights_BK.sum(0)).clamp_min(1e-30)
        weights_BK = weights_BK / weights_BK.sum(1, keepdim=True).clamp_min(1e-30)
    return weights_BK


def koleo(features_BD: Tensor) -> Tensor:
    """Minus the mean logarithm of the distance to the nearest neighbour, on the unit sphere (Kozachenko-Leonenko)."""
    with torch.autocast(features_BD.device.type, enabled=False):
        directions_BD = F.normalize(features_BD.float())
        with torch.no_grad():
            similar_BB = directions_BD @ directions_BD.T
            nearest_B = similar_BB.fill_diagonal_(-2).argmax(1)
        distance_B = (directions_BD - directions_BD[nearest_B]).square().sum(1)
        return -(distance_B + 1e-8).log().mean() / 2


def hidden_patches(draws: Draws, grid: Size, share: float) -> Tensor:
    """Which patches of each photo to hide: indices (B, M), the same number for all, in blots rather than singly."""
    rows, columns = grid
    count = min(rows * columns - 1, max(1, round(share * rows * columns)))
    coarse = (max(1, rows // 3), max(1, columns // 3))
    blots_B1hw = draws.uniforms("hidden blots", coarse[0] * coarse[1]).unflatten(1, (1, *coarse))
    blots_BP = F.interpolate(blots_B1hw, grid, mode="bilinear").flatten(1)
    noise_BP = draws.uniforms("hidden patches", rows * columns)
    return (blots_BP + 0.3 * noise_BP).topk(count, dim=1).indices


def _follow(average: Tensor, value: Tensor, share: float) -> None:
    """Move a running mean by a share of the way. NaN and infinity are left out: such a step does not count either."""
    value = value.detach().to(average.dtype)
    average.lerp_(torch.where(value.isfinite(), value, average), share)


def _sum_of_all(value: Tensor) -> Tensor:
    """Sum over all processes."""
    if dist.is_initialized():
        value = value.contiguous()
        dist.all_reduce(value)
    return value


def _num_processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
