"""Heat maps of what a photo is about, by several methods behind one name, from one forward pass.

    subject   what a model that was taught to find subjects says: the share of each patch that the subject covers
    cls       what the class token attends to in the last block, the mean of its heads
    rollout   attention followed through all blocks (Abnar and Zuidema 2020, arXiv:2005.00928)
    lost      patches that go with the one that is like fewest others (LOST, Simeoni et al. 2021, arXiv:2109.14279)
    tokencut  a normalised cut of the patches into two groups (TokenCut, Wang et al. 2022, arXiv:2202.11539)
    features  the direction in which the last features differ most, with the side chosen by the border
    auto      subject, for a model that was taught it, else tokencut; features for a Swin or a ConvNeXt

For models that were not taught, tokencut is the one to start from. Published, DINO S/16 on VOC07: attention 46 % of
subjects found, LOST 62, TokenCut 69. Measured for this project, a small model trained on labels alone: attention 5 / 21
/ 5 % of pets, birds and deer, tokencut with its side chosen by the border 79 / 41 / 21 %.

A Swin and a ConvNeXt have no class token, and their last grid is coarse: a side of it is 1/32 of the image's. Of them,
lost and tokencut compare the last features, where they compare a ViT's last keys.
"""

import math
from collections.abc import Sequence
from typing import Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from patchlight.config import SubjectHeat
from patchlight.errors import PatchlightError
from patchlight.explain.rollout import rollout
from patchlight.models.attention import Heads, attend
from patchlight.models.stems import check_image
from patchlight.models.token_geometry import TokenGeometry
from patchlight.models.vit import Block, Visit, ViT
from patchlight.weights.load import Loaded

Method = Literal["subject", "cls", "rollout", "lost", "tokencut", "features"]
Side = Literal["border", "seed"]

ALIKE = 0.2
"""TokenCut: the cosine from which on two patches belong together."""

APART = 1e-5
"""TokenCut: the weight between patches that do not, so that the graph stays in one piece."""

MOST_STEPS = 160
"""Of the eigenvector's iteration; it takes 10 to 40 as a rule."""

SETTLED = 1e-4
"""What may be left of W y - lambda y, where all eigenvalues lie between -1 and 1."""

ALL_ALIKE = 1e-4
"""The second eigenvalue, which is 0 if every patch belongs with every other, and near 1 for two groups far apart."""

EXPANDING_SHARE = 1 / 7
"""LOST: of the patches with the lowest degrees. The paper's 100 on photos of VOC, which have about 700 patches."""

BYTES_AT_ONCE = 2**28
"""For the patches' affinities: bounds the memory, changes nothing."""


def resolve_method(loaded: Loaded, method: str) -> Method:
    """The method that is used for this model: "auto" decided, and one that the model cannot do refused."""
    known = ("auto", *get_args(Method))
    if method not in known:
        raise PatchlightError(f"method={method!r} is not known; it is one of {', '.join(known)}")
    model = loaded.model
    if loaded.engine is not None:
        return _method_of_engine(loaded, method)
    if not isinstance(model, ViT):
        if method in ("subject", "cls", "rollout"):
            kind = type(model).__name__
            raise PatchlightError(f"method={method!r} is for a ViT; of a {kind} use 'features', 'lost' or 'tokencut'")
        return "features" if method == "auto" else cast(Method, method)
    if method == "auto":
        return "tokencut" if loaded.subject is None else "subject"
    if method == "subject" and loaded.subject is None:
        raise PatchlightError("method='subject': this model was not taught to find subjects; use method='tokencut'")
    if method == "cls" and not model.config.class_token:
        raise PatchlightError("method='cls': this model has no class token; use method='tokencut'")
    return cast(Method, method)


EXPORTED: dict[str, str] = {"subject": "subject", "cls": "attention", "features": "dense"}
"""Methods that exported models can do, and the output that each is made of."""


def can_do(exported: Loaded, method: Method) -> bool:
    """Whether an exported model gives what the method is made of."""
    return exported.engine is not None and EXPORTED.get(method) in exported.engine.outputs


def _method_of_engine(loaded: Loaded, method: str) -> Method:
    if method == "auto":
        outputs = () if loaded.engine is None else loaded.engine.outputs
        taught = loaded.subject is not None
        method = next((each for each, name in EXPORTED.items() if name in outputs and not taught), "subject")
    if method == "subject" and loaded.subject is None:
        raise PatchlightError(
            "method='subject': this model was not taught to find subjects; export it with --outputs attention or "
            "dense, for the methods 'cls' and 'features'"
        )
    if method not in EXPORTED:
        raise PatchlightError(
            f"method={method!r} reads what no exported model gives; use {', '.join(EXPORTED)}, or the model itself"
        )
    loaded.check_outputs(EXPORTED[method])
    return cast(Method, method)


def heat_maps(loaded: Loaded, images_BCHW: Tensor, method: str = "auto") -> Tensor:
    """Where the subjects of these images are, from 0 to 1: heat_Bhw float32, on the model's device."""
    used = resolve_method(loaded, method)
    return HeatPass(loaded, images_BCHW, [used]).heat(used)


class HeatPass:
    """One forward pass over images that the model takes, from which the maps of several methods are made.

    Of an exported model it is what this gave. Rollout reads every block and makes a pass of its own. Padded images are
    not for this: each has to fill its frame.
    """

    @torch.no_grad()
    def __init__(
        self,
        loaded: Loaded,
        images_BCHW: Tensor,
        methods: Sequence[Method],
        visit: Visit | None = None,
    ) -> None:
        """With `visit`, which is shown each block of a ViT as it is passed, the pass is made whatever the methods."""
        self.loaded = loaded
        model = loaded.model
        check_image(images_BCHW, model.config.in_channels)
        wanted = set(methods)
        self.exported: dict[str, Tensor] | None = None
        """What an exported model gave, by output."""
        if loaded.engine is not None:
            found = loaded.engine(images_BCHW.numpy())
            self.exported = {name: torch.from_numpy(each) for name, each in found.items()}
            return
        weight = model.norm.weight
        self.images_BCHW = images_BCHW.to(weight.device, weight.dtype)
        self.grid = model.config.grid_for((images_BCHW.shape[2], images_BCHW.shape[3]))
        self.last: Heads | None = None
        """A ViT's last block's queries and keys; None where no method that is wanted reads them."""
        self.entered_BND: Tensor | None = None
        """The tokens that enter that block, where it was left out in part, or was seen as every other."""
        self.tokens_BND: Tensor | None = None
        """All of a ViT's tokens that come out, where the last block was passed as a whole."""
        self.features_BPD: Tensor | None = None
        """The patches that come out, in reading order, float32; of a ViT, where they are wanted."""

        def keep(index: int, heads: Heads, x_BND: Tensor) -> None:
            if index == model.config.depth - 1:
                self.last = heads
            if index == model.config.depth - 2:
                self.entered_BND = x_BND
            assert visit is not None
            visit(index, heads, x_BND)

        if isinstance(model, ViT) and visit is not None:
            self.tokens_BND, self.geometry = model.encode(self.images_BCHW, visit=keep)
            self.features_BPD = self.tokens_BND[:, model.config.num_prefix :].float()
        elif isinstance(model, ViT):
            if wanted - {"rollout", "features"}:
                self.last, self.entered_BND, self.geometry = last_heads(model, self.images_BCHW)
            if "features" in wanted:
                self.tokens_BND, self.geometry = model.encode(self.images_BCHW)
                self.features_BPD = self.tokens_BND[:, model.config.num_prefix :].float()
        else:
            self.features_BPD = model.tokens(self.images_BCHW).float()

    @torch.no_grad()
    def heat(self, method: Method) -> Tensor:
        """The map of one method, which has to be among those that the pass was made for: heat_Bhw."""
        if self.exported is not None:
            return _heat_of_output(method, self.exported[EXPORTED[method]])
        if method == "rollout":
            heat_Bhw = rollout(self.loaded.model, self.images_BCHW).float()
            return _divide_by_max(heat_Bhw.flatten(1)).view_as(heat_Bhw)
        assert self.last or self.features_BPD is not None, f"name {method} among the methods, so that the pass is made"
        match method:
            case "subject":
                assert self.loaded.subject is not None
                assert self.last is not None
                heat_BP = subject_heat(self.last, self.geometry, self.loaded.subject)
            case "cls":
                assert self.last is not None
                heat_BP = _divide_by_max(self.last.rows([0])[:, :, 0, self.geometry.num_prefix :].mean(1))
            case "lost":
                heat_BP = lost(self._keys_BPD())
            case "features":
                assert self.features_BPD is not None
                heat_BP = leading_component(self.features_BPD, self.grid)
            case "tokencut":
                heat_BP = tokencut(self._keys_BPD(), self.grid)
        return heat_BP.unflatten(1, self.grid)

    @torch.no_grad()
    def patch_boxes(self, method: Method) -> Tensor | None:
        """What each patch says of its object, beside the map of this method: patches_Bhw5 float32, its box x0 y0 x1 y1
        in shares of the image's sides, and how well that box is expected to fit (intersection over union).

        None where the model has no patch boxes, and for other maps than the one that it was taught with them.
        """
        model = self.loaded.model
        if self.exported is not None:
            return self.exported.get("boxes") if method == "subject" else None
        if method != "subject" or not isinstance(model, ViT) or model.patch_boxes is None:
            return None
        assert self.entered_BND is not None
        boxes_Bhw4, fit_Bhw = model.patch_boxes(self.entered_BND[:, self.geometry.num_prefix :], self.grid)
        return torch.cat((boxes_Bhw4.clamp(0.0, 1.0), fit_Bhw.sigmoid()[..., None]), 3)

    @torch.no_grad()
    def logits(self) -> Tensor:
        """What the model's head says of the images, logits_BK: from the same pass, where it was made."""
        if self.exported is not None:
            return self.exported["logits"]
        model = self.loaded.model
        x_BND = self._tokens_read()
        if not isinstance(model, ViT) or x_BND is None:
            return model(self.images_BCHW)
        return model.read(x_BND, self.geometry)

    @torch.no_grad()
    def features(self) -> Tensor:
        """What the head is given, features_BD, in the same way."""
        model = self.loaded.model
        x_BND = self._tokens_read()
        if not isinstance(model, ViT) or x_BND is None:
            return model.features(self.images_BCHW)
        return model.pooled(x_BND, self.geometry)

    def _tokens_read(self) -> Tensor | None:
        """The last tokens, or those of them that the model's answer is read from; None where there was no such pass."""
        model = self.loaded.model
        if self.tokens_BND is not None or not isinstance(model, ViT) or self.last is None or self.entered_BND is None:
            return self.tokens_BND
        # A class token's answer takes the rest of its own row alone, and that of a distillation token beside it.
        first = 1 + model.config.distill_token if model.config.pooling == "cls" else None
        block, (q_BANE, k_BANE, v_BANE, mask, _) = cast(Block, model.blocks[-1]), self.last
        if mask is not None and mask.shape[2] > 1:
            mask = mask[:, :, :first]
        out_BANE = attend(q_BANE[:, :, :first], k_BANE, v_BANE, mask)
        attended_BND = block.attn.merged(out_BANE)
        attended_BND = block.norm1(attended_BND) if block.norms_after else attended_BND
        x_BND = block.residual1(self.entered_BND[:, :first], attended_BND)
        x_BND = block.residual2(x_BND, block.mlp_branch(x_BND))
        return model.norm(x_BND) if model.config.final_norm == "tokens" else x_BND

    def _keys_BPD(self) -> Tensor:
        """The last block's keys of the patches, all heads together, float32; the features, where there are no keys."""
        if self.last is None:
            assert self.features_BPD is not None
            return self.features_BPD
        k_BAPE = self.last.k_BANE[:, :, self.geometry.num_prefix :]
        return k_BAPE.transpose(1, 2).flatten(2).float()


def _heat_of_output(method: Method, output: Tensor) -> Tensor:
    """heat_Bhw, of what an exported model gave."""
    if method == "cls":
        return _divide_by_max(output.mean(1).flatten(1)).unflatten(1, output.shape[2:])
    if method == "features":
        grid = (output.shape[2], output.shape[3])
        return leading_component(output.flatten(2).mT, grid).unflatten(1, grid)
    return output


def last_heads(vit: ViT, images_BCHW: Tensor) -> tuple[Heads, Tensor, TokenGeometry]:
    """What the heads of the last block work with, the tokens x_BND that enter it, and how they lie. The heads' output
    and the rest of that block are left out, for no map is made of them."""
    x_BND, geometry = vit.embed(images_BCHW)
    *others, last = cast(list[Block], list(vit.blocks))
    for block in others:
        x_BND = block(x_BND, geometry)
    q_BANE, k_BANE, v_BANE = last.attn.project(x_BND if last.norms_after else last.norm1(x_BND), geometry)
    nothing = q_BANE.new_empty(0)
    return Heads(q_BANE, k_BANE, v_BANE, last.attn.mask(geometry, q_BANE.dtype), nothing), x_BND, geometry


def subject_heat(heads: Heads, geometry: TokenGeometry, subject: SubjectHeat) -> Tensor:
    """sigmoid(scale * score + bias), where score is the class token's attention before the softmax: heat_BP."""
    q_BAE, k_BAPE = heads.q_BANE[:, :, 0].float(), heads.k_BANE[:, :, geometry.num_prefix :].float()
    score_BP = torch.einsum("bae,bape->bap", q_BAE, k_BAPE).mean(1) / math.sqrt(q_BAE.shape[-1])
    return torch.sigmoid(subject.scale * score_BP + subject.bias)


def _divide_by_max(heat_BP: Tensor) -> Tensor:
    return heat_BP / heat_BP.amax(1, keepdim=True).clamp(min=torch.finfo(heat_BP.dtype).tiny)


def lost(keys_BPD: Tensor) -> Tensor:
    """The seed is the patch that fewest others go with (a product of keys above 0), and other patches of low degree
    that go with it widen the view of the subject. What goes with them together is above 0.5: heat_BP."""
    return torch.cat([_lost(part_BPD) for part_BPD in keys_BPD.split(_images_at_once(keys_BPD.shape[1]))])


def _lost(keys_BPD: Tensor) -> Tensor:
    likeness_BPP = keys_BPD @ keys_BPD.mT
    degree_BP = (likeness_BPP > 0).sum(2)
    by_degree_BP = degree_BP.argsort(dim=1, stable=True)  # of equal ones the first, whatever the device
    lowest_BS = by_degree_BP[:, : max(1, round(EXPANDING_SHARE * keys_BPD.shape[1]))]
    places_B = torch.arange(len(keys_BPD), device=keys_BPD.device)[:, None]
    seed_BP = likeness_BPP[places_B[:, 0], lowest_BS[:, 0]]
    chosen_BS = seed_BP.gather(1, lowest_BS) > 0
    chosen_BS[:, 0] = True
    together_BP = (likeness_BPP[places_B, lowest_BS] * chosen_BS[..., None]).sum(1)
    return _around_half(together_BP)


def tokencut(keys_BPD: Tensor, grid: tuple[int, int], side: Side = "border") -> Tensor:
    """The patches cut into two groups that are most alike inside and least between; the subject's are above 0.5.

    Which of the two it is: the one that takes less of the frame's border, or with side="seed", as in the paper, the one
    that holds the most decided patch. heat_BP.
    """
    keys_BPD = F.normalize(keys_BPD, dim=2)
    parts = [
        second_eigenvector(torch.where(part_BPD @ part_BPD.mT > ALIKE, 1.0, APART))
        for part_BPD in keys_BPD.split(_images_at_once(keys_BPD.shape[1]))
    ]
    vector_BP = torch.cat(parts)
    mean_B1 = vector_BP.mean(1, keepdim=True)
    above_BP = vector_BP > mean_B1
    flip_B = ~above_BP.gather(1, vector_BP.abs().argmax(1, keepdim=True))[:, 0]
    if side == "border":
        share_B = above_BP[:, _border(grid, keys_BPD.device)].float().mean(1)
        flip_B = torch.where(share_B == 0.5, flip_B, share_B > 0.5)
    sign_B1 = 1 - 2 * flip_B[:, None].float()
    return _around_half(sign_B1 * (vector_BP - mean_B1))


def leading_component(features_BPD: Tensor, grid: tuple[int, int]) -> Tensor:
    """Where the patches lie along the direction in which they differ most, their first principal component; the side
    that takes less of the frame's border is the subject's, and above 0.5: heat_BP."""
    centred_BPD = features_BPD - features_BPD.mean(1, keepdim=True)
    u_BPR, sizes_BR, _ = torch.linalg.svd(centred_BPD, full_matrices=False)
    score_BP = u_BPR[..., 0] * sizes_BR[:, :1]
    # Patches that are all alike differ by rounding alone, which is no direction.
    flat_B1 = sizes_BR[:, :1] <= 1e-5 * torch.linalg.vector_norm(features_BPD, dim=(1, 2))[:, None]
    share_B1 = (score_BP > 0)[:, _border(grid, score_BP.device)].float().mean(1, keepdim=True)
    # A vector's sign is arbitrary; where the border does not decide, the most decided patch does.
    flip_B1 = score_BP.gather(1, score_BP.abs().argmax(1, keepdim=True)) < 0
    flip_B1 = torch.where(share_B1 == 0.5, flip_B1, share_B1 > 0.5)
    return _around_half(torch.where(flip_B1, -score_BP, score_BP).masked_fill(flat_B1, 0))


def second_eigenvector(affinity_BPP: Tensor) -> Tensor:
    """The second smallest eigenvector z of (D - W) z = lambda D z, D the row sums of the affinity W: vector_BP.

    With y = D^1/2 z these are the eigenvectors of D^-1/2 W D^-1/2, the largest eigenvalues first, and the very largest
    is known: y = D^1/2 1. So Lanczos' iteration, kept at right angles to it, finds the next from a few dozen products
    of W and a vector, where a dense solver would take the cube of P. What an image gets does not depend on its batch.
    """
    batch, count, _ = affinity_BPP.shape
    root_BP = affinity_BPP.sum(2).sqrt()
    start_P = torch.randn(count, generator=torch.Generator().manual_seed(0)).to(affinity_BPP)
    steps = min(MOST_STEPS, count - 1)
    if steps < 1:
        return torch.zeros_like(root_BP)
    basis_BSP = affinity_BPP.new_zeros(batch, steps + 2, count)
    basis_BSP[:, 0] = F.normalize(root_BP, dim=1)
    basis_BSP[:, 1] = F.normalize(_at_right_angles(start_P.expand(batch, -1), basis_BSP[:, :1]), dim=1)
    diagonal_BS, beside_BS = torch.zeros(2, batch, steps, dtype=torch.float64)
    found_BP = torch.zeros_like(root_BP)
    settled_B = torch.zeros(batch, dtype=torch.bool)
    for step in range(steps):
        last_BP = basis_BSP[:, step + 1]
        next_BP = torch.bmm(affinity_BPP, (last_BP / root_BP)[..., None])[..., 0] / root_BP
        diagonal_BS[:, step] = (next_BP * last_BP).sum(1).double().cpu()
        next_BP = _at_right_angles(next_BP, basis_BSP[:, : step + 2])
        length_B1 = next_BP.norm(dim=1, keepdim=True)
        # Where nothing is left, the vectors so far span all that the start can lead to.
        length_B1 = length_B1.where(length_B1 > 1e-6, 0)
        basis_BSP[:, step + 2] = next_BP / length_B1.clamp(min=1e-6) * (length_B1 > 0)
        beside_BS[:, step] = length_B1[:, 0].double().cpu()
        if step % 8 != 7 and step + 1 < steps:
            continue
        used = step + 1
        small_BSS = torch.diag_embed(diagonal_BS[:, :used])
        for offset in (-1, 1):
            small_BSS += torch.diag_embed(beside_BS[:, : used - 1], offset)
        values_BS, mixes_BSS = torch.linalg.eigh(small_BSS)
        mix_BS = mixes_BSS[..., -1]
        left_B = beside_BS[:, step] * mix_BS[:, -1].abs()
        now_B = ~settled_B & ((left_B < SETTLED) | (step + 1 == steps))
        # Where all patches are alike there are no two groups, and any vector would do: 0, then.
        mix_BS = mix_BS * (values_BS[:, -1:] > ALL_ALIKE)
        vector_BP = torch.einsum("bs,bsp->bp", mix_BS.to(basis_BSP), basis_BSP[:, 1 : used + 1])
        found_BP = torch.where(now_B.to(found_BP.device)[:, None], vector_BP, found_BP)
        settled_B |= now_B
        if settled_B.all():
            break
    return found_BP / root_BP


def _at_right_angles(vector_BP: Tensor, basis_BSP: Tensor) -> Tensor:
    """The vector without what the basis can make; twice, since once leaves dust that grows from step to step."""
    for _ in range(2):
        vector_BP = vector_BP - torch.bmm(torch.bmm(vector_BP[:, None], basis_BSP.mT), basis_BSP)[:, 0]
    return vector_BP


def _around_half(signed_BP: Tensor) -> Tensor:
    """From 0 to 1, with 0.5 for 0: what lies above and what lies below it, each as a share of its own most.

    0 everywhere for a map in which nothing stands out.
    """
    heat_BP = 0.5 + _divide_by_max(signed_BP.clamp(min=0)) / 2 - _divide_by_max((-signed_BP).clamp(min=0)) / 2
    spread_B1 = signed_BP.amax(1, keepdim=True) - signed_BP.amin(1, keepdim=True)
    return heat_BP.masked_fill(spread_B1 <= 1e-6 * signed_BP.abs().amax(1, keepdim=True), 0)


def _border(grid: tuple[int, int], device: torch.device) -> Tensor:
    """Which patches lie at the edge of the frame: a bool mask (P,)."""
    inside_hw = torch.zeros(grid, dtype=torch.bool, device=device)
    inside_hw[1:-1, 1:-1] = True
    return ~inside_hw.flatten()


def _images_at_once(num_patches: int) -> int:
    return max(1, BYTES_AT_ONCE // (4 * num_patches**2))
