"""Every variation against a plain reference (Pillow, numpy), alone and in batches."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from patchlight.errors import PatchlightError
from patchlight.images.augment import POLICY_OPS, AugmentConfig, augment, mix, random_part
from patchlight.images.draws import Draws

STILL = {"flip": False}


class Fixed(Draws):
    """Draws that are what the test says, by name, the same for every sample; the others are one half."""

    def __init__(self, count: int, **values: float) -> None:
        super().__init__(0, torch.zeros(count, dtype=torch.long), torch.arange(count))
        self.values = {name.replace("_", " "): value for name, value in values.items()}

    def uniform(self, name: str, low: float = 0.0, high: float = 1.0) -> Tensor:
        return torch.full(self.state_B.shape, low + (high - low) * self.values.get(name, 0.5))

    def uniforms(self, name: str, count: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return self.uniform(name, low, high)[:, None].expand(-1, count)


def draws(count: int, seed: int = 0, epoch: int = 0) -> Draws:
    return Draws(seed, torch.full((count,), epoch), torch.arange(count))


def photos(height: int = 37, width: int = 41) -> list[Image.Image]:
    """Noise, a smooth photo, one of few dull levels, one of a single colour, one of two, and a dark one."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (height, width, 3))
    smooth = Image.fromarray(rng.integers(0, 256, (5, 4, 3), dtype=np.uint8)).resize((width, height), Image.BICUBIC)
    dull = 100 + noise // 8
    flat = np.broadcast_to([200, 30, 90], noise.shape)
    two = np.where(noise[..., :1] < 50, [255, 0, 128], [0, 3, 129])
    arrays = [noise, np.asarray(smooth), dull, flat, two, noise**2 // 1000]
    return [Image.fromarray(array.astype(np.uint8)) for array in arrays]


def as_batch(images: list[Image.Image]) -> Tensor:
    return torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images])


def as_levels(image_CHW: Tensor) -> np.ndarray[Any, Any]:
    return (image_CHW * 255).permute(1, 2, 0).numpy()


def moved(image_HWC: np.ndarray[Any, Any], source: Any) -> np.ndarray[Any, Any]:
    """The image whose pixel (x, y), counted from the centre, is the photo's at `source(x, y)`: bilinear, mirrored."""
    (height, width), margin = image_HWC.shape[:2], 60
    mirrored = np.pad(image_HWC.astype(float), ((margin, margin), (margin, margin), (0, 0)), "symmetric")
    middle_x, middle_y = (width - 1) / 2, (height - 1) / 2
    result = np.empty(image_HWC.shape)
    for row in range(height):
        for column in range(width):
            x, y = source(column - middle_x, row - middle_y)
            left, top = math.floor(x + middle_x), math.floor(y + middle_y)
            right_share, lower_share = x + middle_x - left, y + middle_y - top
            four = mirrored[top + margin : top + margin + 2, left + margin : left + margin + 2]
            two = four[:, 0] * (1 - right_share) + four[:, 1] * right_share
            result[row, column] = two[0] * (1 - lower_share) + two[1] * lower_share
    return result


def policy_op(op: str, strength: float, sign: int, kind: str = "randaugment") -> tuple[AugmentConfig, Fixed]:
    """Settings and draws that apply one op of the policy, at a strength from 0 to 10."""
    choice, coin = (POLICY_OPS.index(op) + 0.5) / len(POLICY_OPS), 0.25 if sign > 0 else 0.75
    if kind == "trivial":
        values = {"policy_op": choice, "policy_sign": coin, "policy_strength": strength / 10}
        return AugmentConfig(policy="trivial", **STILL), Fixed(6, **values)
    config = AugmentConfig(policy="randaugment", policy_ops=1, policy_strength=strength, **STILL)
    return config, Fixed(6, policy_0_op=choice, policy_0_sign=coin)


# Colours


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("strength", [1.0, 5.0, 10.0])
@pytest.mark.parametrize(
    ("op", "enhance"),
    [
        ("brightness", ImageEnhance.Brightness),
        ("saturation", ImageEnhance.Color),
        ("contrast", ImageEnhance.Contrast),
        ("sharpness", ImageEnhance.Sharpness),
    ],
)
def test_enhancements_are_pillows(op: str, enhance: Any, strength: float, sign: int) -> None:
    images = photos()
    for kind, reach in (("randaugment", 0.9), ("trivial", 0.99)):
        config, fixed = policy_op(op, strength, sign, kind)
        result_BCHW = augment(as_batch(images), fixed, config)
        for image, result_CHW in zip(images, result_BCHW, strict=True):
            expected = np.asarray(enhance(image).enhance(1 + sign * reach * strength / 10))
            assert np.abs(as_levels(result_CHW) - expected).max() <= 2


@pytest.mark.parametrize("size", [(37, 41), (9, 8), (1, 1)])
@pytest.mark.parametrize("strength", [0.0, 1.0, 3.0, 7.5, 9.0, 10.0])
@pytest.mark.parametrize("op", ["identity", "posterize", "solarize", "autocontrast", "equalize"])
def test_changes_of_levels_are_pillows(op: str, strength: float, size: tuple[int, int]) -> None:
    images = photos(*size)
    for kind, bits in (("randaugment", 4), ("trivial", 6)):
        config, fixed = policy_op(op, strength, 1, kind)
        result_BCHW = augment(as_batch(images), fixed, config)
        references = {
            "identity": lambda image: image,
            "posterize": lambda image, bits=bits: ImageOps.posterize(image, 8 - round(bits * strength / 10)),
            "solarize": lambda image: ImageOps.solarize(image, round(256 * (1 - strength / 10), 3)),
            "autocontrast": ImageOps.autocontrast,
            "equalize": ImageOps.equalize,
        }
        for image, result_CHW in zip(images, result_BCHW, strict=True):
            expected = np.asarray(references[op](image)).astype(float)
            # Pillow cuts 36.99999 to 36 where it stretches the contrast in floating point.
            tolerance = 1.001 if op == "autocontrast" else 1e-3
            assert np.abs(as_levels(result_CHW) - expected).max() <= tolerance


def test_changes_come_one_after_another() -> None:
    images = photos()
    ops = {f"policy_{i}_op": (POLICY_OPS.index(op) + 0.5) / 14 for i, op in enumerate(("solarize", "posterize"))}
    config = AugmentConfig(policy="randaugment", policy_ops=2, policy_strength=5, **STILL)
    result_BCHW = augment(as_batch(images), Fixed(6, **ops), config)
    for image, result_CHW in zip(images, result_BCHW, strict=True):
        expected = np.asarray(ImageOps.posterize(ImageOps.solarize(image, 128), 6))
        assert np.abs(as_levels(result_CHW) - expected).max() < 1e-3


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation", "all"])
@pytest.mark.parametrize("draw", [0.0, 0.2, 0.9])
def test_colour_is_pillows(name: str, draw: float) -> None:
    names = ("brightness", "contrast", "saturation")
    chosen = names if name == "all" else (name,)
    images = photos()
    fixed = Fixed(6, **dict.fromkeys(chosen, draw))
    result_BCHW = augment(as_batch(images), fixed, AugmentConfig(colour=0.6, **STILL))
    enhancers = dict(zip(names, (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color), strict=True))
    for image, result_CHW in zip(images, result_BCHW, strict=True):
        for each in chosen:
            image = enhancers[each](image).enhance(0.4 + 1.2 * draw)
        # Pillow cuts off the fraction of a level at each of the steps, and the next ones enlarge it.
        assert np.abs(as_levels(result_CHW) - np.asarray(image)).max() <= (5 if name == "all" else 2)


# Geometry


@pytest.mark.parametrize("pad", [0, 2, 11])
def test_flip_and_shift_are_exact_windows_of_the_mirrored_photo(pad: int) -> None:
    """Also where the pad is larger than the photo: each result is one of the possible windows, to the bit."""
    height, width, count = 5, 6, 600
    image_HWC = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    around = np.pad(image_HWC, ((pad, pad), (pad, pad), (0, 0)), "symmetric")
    seen = {}
    for down in range(2 * pad + 1):
        for right in range(2 * pad + 1):
            window = around[down : down + height, right : right + width]
            seen[window.tobytes()] = seen[window[:, ::-1].tobytes()] = 0
    batch_BCHW = torch.from_numpy(image_HWC).permute(2, 0, 1).expand(count, 3, height, width)
    result_BCHW = augment(batch_BCHW, draws(count), AugmentConfig(crop="pad", pad=pad))
    assert result_BCHW.dtype == torch.float32
    for result_CHW in result_BCHW:
        levels = as_levels(result_CHW).round().astype(np.uint8)
        assert torch.equal(torch.from_numpy(levels).permute(2, 0, 1) / 255, result_CHW)
        seen[levels.tobytes()] += 1  # a KeyError where it is no window
    if pad < 5:  # chi squared, four standard deviations
        expected, freedom = count / len(seen), len(seen) - 1
        assert sum((times - expected) ** 2 / expected for times in seen.values()) < freedom + 4 * (2 * freedom) ** 0.5


def test_flip_alone_is_exact_and_half_of_the_time() -> None:
    batch_BCHW = as_batch([photos()[0]] * 400)
    result_BCHW = augment(batch_BCHW, draws(400), AugmentConfig())
    same_B = (result_BCHW == batch_BCHW / 255).flatten(1).all(1)
    flipped_B = (result_BCHW == batch_BCHW.flip(3) / 255).flatten(1).all(1)
    assert (same_B ^ flipped_B).all()
    assert 150 < flipped_B.sum() < 250


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("kind", "strength", "shift", "shear", "degrees"),
    [("randaugment", 6.0, 0.27, 0.18, 18.0), ("trivial", 5.0, None, 0.495, 67.5)],
)
@pytest.mark.parametrize("op", ["translate_x", "translate_y", "shear_x", "shear_y", "rotate"])
def test_policies_move_pixels(
    op: str, kind: str, strength: float, shift: float | None, shear: float, degrees: float, sign: int
) -> None:
    images = photos(13, 18)
    config, fixed = policy_op(op, strength, sign, kind)
    right, down = (16.0, 16.0) if shift is None else (shift * 18, shift * 13)
    sin, cos = math.sin(sign * math.radians(degrees)), math.cos(math.radians(degrees))
    source = {
        "translate_x": lambda x, y: (x + sign * right, y),
        "translate_y": lambda x, y: (x, y + sign * down),
        "shear_x": lambda x, y: (x + sign * shear * y, y),
        "shear_y": lambda x, y: (x, y + sign * shear * x),
        "rotate": lambda x, y: (cos * x + sin * y, cos * y - sin * x),
    }[op]
    result_BCHW = augment(as_batch(images), fixed, config)
    for image, result_CHW in zip(images, result_BCHW, strict=True):
        # A policy ends on whole levels.
        assert np.abs(as_levels(result_CHW) - moved(np.asarray(image), source)).max() <= 0.51


def test_rotation_by_a_right_angle_is_exact() -> None:
    image_HWC = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    for sign, turns in ((1, 3), (-1, 1)):
        config, fixed = policy_op("rotate", 10 * 90 / 135, sign, "trivial")
        result_BCHW = augment(as_batch([Image.fromarray(image_HWC)] * 6), fixed, config)
        assert np.abs(as_levels(result_BCHW[0]) - np.rot90(image_HWC, turns)).max() < 1e-3


def test_movements_are_composed_in_order_and_interpolated_once() -> None:
    """Window, flip, turn, shear: the result's pixels are looked up in the photo itself."""
    image = photos(13, 18)[0]
    config = AugmentConfig(crop="pad", pad=4, policy="randaugment", policy_ops=2, policy_strength=10)
    ops = {"policy_0_op": POLICY_OPS.index("rotate"), "policy_1_op": POLICY_OPS.index("shear_y")}
    values = {name: (place + 0.5) / 14 for name, place in ops.items()}
    values |= {"flip": 0.1, "shift_x": 0.99, "shift_y": 0.3, "policy_0_sign": 0.1, "policy_1_sign": 0.9}
    sin, cos = math.sin(math.radians(30)), math.cos(math.radians(30))

    def source(x: float, y: float) -> tuple[float, float]:
        y = y - 0.3 * x
        x, y = cos * x + sin * y, cos * y - sin * x
        return -x + 4, y - 2

    result_BCHW = augment(as_batch([image]), Fixed(1, **values), config)
    assert np.abs(as_levels(result_BCHW[0]) - moved(np.asarray(image), source)).max() <= 0.51


@pytest.mark.parametrize("flip", [0.1, 0.9])
def test_resized_crop_is_what_pillow_cuts(flip: float) -> None:
    images = photos(24, 31)
    config = AugmentConfig(crop="resized", area=(0.1, 0.9))
    fixed = Fixed(6, part_area=0.4, part_aspect=0.8, part_x=0.35, part_y=1.0, flip=flip)
    box_B4 = random_part(fixed, (24, 31), config)
    result_BCHW = augment(as_batch(images), fixed, config)
    for image, box_4, result_CHW in zip(images, box_B4, result_BCHW, strict=True):
        for channel in range(3):
            levels = Image.fromarray(np.asarray(image)[..., channel].astype(np.float32))
            expected = np.asarray(levels.resize((31, 24), Image.Resampling.BILINEAR, box=tuple(box_4.tolist())))
            expected = expected[:, ::-1] if flip < 0.5 else expected
            assert np.abs(as_levels(result_CHW)[..., channel] - expected).max() < 1e-2


def test_what_was_cropped_before_is_not_cropped_again() -> None:
    batch_BCHW = as_batch(photos())
    for crop in ("resized", "pad"):
        config = AugmentConfig(crop=crop)
        plain_BCHW = augment(batch_BCHW, draws(6), AugmentConfig())
        assert torch.equal(augment(batch_BCHW, draws(6), config, cropped=True), plain_BCHW)
        assert not torch.equal(augment(batch_BCHW, draws(6), config), plain_BCHW)


# Parts


@pytest.mark.parametrize("size", [(100, 100), (400, 250), (30, 90)])
def test_parts_are_those_of_the_usual_trials(size: tuple[int, int]) -> None:
    height, width = size
    config = AugmentConfig(crop="resized", area=(0.2, 1.0), aspect=(0.75, 1.3333))
    box_B4 = random_part(draws(20_000), size, config)
    assert box_B4.shape == (20_000, 4)
    x0, y0, x1, y1 = box_B4.double().unbind(1)
    assert (x0 >= 0).all() and (y0 >= 0).all() and (x1 <= width).all() and (y1 <= height).all()  # noqa: PT018
    areas, aspects = (x1 - x0) * (y1 - y0) / (height * width), (x1 - x0) / (y1 - y0)
    assert 0.75 - 1e-4 < aspects.min() < aspects.max() < 1.3333 + 1e-4
    assert areas.max() <= 1
    free = (x1 - x0 < 0.9 * width) & (y1 - y0 < 0.9 * height)  # where the place is not forced
    assert (x0 / (width - (x1 - x0)))[free].mean().item() == pytest.approx(0.5, abs=0.02)
    assert (y0 / (height - (y1 - y0)))[free].mean().item() == pytest.approx(0.5, abs=0.02)

    rng = np.random.default_rng(1)
    expected = []
    for _ in range(5000):
        for _ in range(10):
            area, aspect = rng.uniform(0.2, 1), math.exp(rng.uniform(math.log(0.75), math.log(1.3333)))
            if area * height * width * aspect <= width**2 and area * height * width / aspect <= height**2:
                expected.append((area, aspect))
                break
        else:
            shape = (min(width, height * 1.3333), min(height, width / 0.75))
            expected.append((shape[0] * shape[1] / (height * width), shape[0] / shape[1]))
    assert areas.mean().item() == pytest.approx(np.mean(expected, 0)[0], abs=0.015)
    assert aspects.mean().item() == pytest.approx(np.mean(expected, 0)[1], abs=0.015)
    assert areas.std().item() == pytest.approx(np.std(expected, 0)[0], abs=0.015)


def test_parts_of_photos_that_none_fits_lie_about_the_centre() -> None:
    config = AugmentConfig(crop="resized", area=(0.9, 1.0), aspect=(0.5, 2.0))
    assert random_part(draws(2), (10, 100), config).tolist() == [[40, 0, 60, 10]] * 2
    assert random_part(draws(2), (100, 10), config).tolist() == [[0, 40, 10, 60]] * 2


def test_pillow_takes_every_part() -> None:
    config = AugmentConfig(crop="resized", area=(0.5, 1.0))
    image = Image.new("RGB", (333, 331))
    last = [Fixed(1, part_area=share / 100, part_x=1 - 2**-24, part_y=1 - 2**-24) for share in range(100)]
    for box_4 in torch.cat([random_part(numbers, (331, 333), config) for numbers in (draws(300), *last)]):
        assert image.resize((8, 8), box=tuple(box_4.tolist())).size == (8, 8)


# Erasing


def test_erasing_blanks_a_rectangle_with_the_mean_colour() -> None:
    count, height, width = 400, 40, 50
    batch_BCHW = torch.rand((count, 3, height, width), generator=torch.Generator().manual_seed(0))
    result_BCHW = augment(batch_BCHW, draws(count), AugmentConfig(erase=0.6, **STILL))
    changed_BHW = (result_BCHW != batch_BCHW).any(1).numpy()
    shares, aspects, centres = [], [], []
    for image_CHW, result_CHW, changed_HW in zip(batch_BCHW, result_BCHW, changed_BHW, strict=True):
        if not changed_HW.any():
            continue
        rows, columns = np.flatnonzero(changed_HW.any(1)), np.flatnonzero(changed_HW.any(0))
        assert changed_HW.sum() == (np.ptp(rows) + 1) * (np.ptp(columns) + 1), "not a whole rectangle"
        mean_C = image_CHW.double().mean((1, 2)).float()
        assert (result_CHW[:, changed_HW] - mean_C[:, None]).abs().max() < 1e-6
        shares.append(changed_HW.mean())
        aspects.append(len(columns) / len(rows))
        centres.append((rows.mean() / (height - 1), columns.mean() / (width - 1)))
    assert len(shares) / count == pytest.approx(0.6, abs=0.08)
    assert 0.017 < min(shares) < 0.04
    assert 0.30 < max(shares) < 0.34
    assert np.mean(shares) == pytest.approx(0.175, abs=0.02)
    assert 0.25 < min(aspects) < 0.45
    assert 2.4 < max(aspects) < 3.8
    assert np.mean(centres, 0) == pytest.approx([0.5, 0.5], abs=0.04)


# The whole


CONFIGS = {
    "plain": AugmentConfig(crop="pad"),
    "levels": AugmentConfig(erase=0.5, **STILL),
    "resized": AugmentConfig(crop="resized", colour=0.4, erase=0.3),
    "randaugment": AugmentConfig(crop="pad", policy="randaugment", erase=0.2),
    "trivial": AugmentConfig(crop="resized", policy="trivial", colour=0.2),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_photo_is_varied_alike_in_any_batch(name: str) -> None:
    config = CONFIGS[name]
    samples_B = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    epochs_B = samples_B % 3
    batch_BCHW = torch.randint(0, 256, (40, 3, 17, 21), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    together_BCHW = augment(batch_BCHW, Draws(7, epochs_B, samples_B), config)
    tolerance = 0 if name == "plain" else 1e-6
    for part in (slice(3, 4), slice(10, 25), slice(0, 40, 7)):
        alone_BCHW = augment(batch_BCHW[part], Draws(7, epochs_B[part], samples_B[part]), config)
        assert (alone_BCHW - together_BCHW[part]).abs().max() <= tolerance
    assert together_BCHW.dtype == torch.float32
    assert together_BCHW.shape == batch_BCHW.shape
    assert together_BCHW.min() >= 0
    assert together_BCHW.max() <= 1
    again_BCHW = augment(batch_BCHW, Draws(7, epochs_B + 1, samples_B), config)
    assert not torch.equal(again_BCHW, together_BCHW)


@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_and_floats_are_varied_alike_and_left_as_they_were(name: str) -> None:
    batch_BCHW = as_batch(photos())
    floats_BCHW = batch_BCHW / 255
    from_bytes_BCHW = augment(batch_BCHW, draws(6), CONFIGS[name])
    assert torch.equal(augment(floats_BCHW, draws(6), CONFIGS[name]), from_bytes_BCHW)
    assert torch.equal(batch_BCHW, as_batch(photos()))
    assert torch.equal(floats_BCHW, batch_BCHW / 255)


def test_nothing_asked_for_changes_nothing() -> None:
    batch_BCHW = as_batch(photos())
    assert torch.equal(augment(batch_BCHW, draws(6), AugmentConfig(**STILL)), batch_BCHW / 255)


class OnDevice(TorchDispatchMode):
    """Refuses every operation on a tensor that lies on the CPU."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        assert all(tensor.device.type == "meta" for tensor in tensors), function
        return result


@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_goes_between_host_and_device(name: str) -> None:
    """Tensors without values: what waits for a value, has a shape that depends on one, or copies one over, fails."""
    places_B = torch.arange(6, device="meta")
    images_BCHW = torch.empty((6, 3, 16, 16), dtype=torch.uint8, device="meta")
    config = AugmentConfig(mix=0.5, mixup=0.8, cutmix=1.0)
    with OnDevice():
        valueless = Draws(0, places_B, places_B, places_B)
        varied_BCHW = augment(images_BCHW, valueless, CONFIGS[name])
        mixed_BCHW, targets_BK = mix(varied_BCHW, places_B, 10, valueless, config, 0.1)
    assert mixed_BCHW.shape == (6, 3, 16, 16)
    assert targets_BK.shape == (6, 10)


@pytest.mark.parametrize(
    "images", [torch.zeros(3, 8, 8), torch.zeros(2, 1, 8, 8), torch.zeros((2, 3, 8, 8), dtype=torch.int64)]
)
def test_what_is_no_batch_of_photos_is_refused(images: Tensor) -> None:
    with pytest.raises(PatchlightError, match=r"augment takes photos \(B, 3, H, W\).*convert them"):
        augment(images, draws(len(images)), AugmentConfig())


def test_settings_go_through_json() -> None:
    for config in CONFIGS.values():
        assert AugmentConfig.from_json(config.to_json()) == config


# Mixing


def pairs(count: int, size: int = 24) -> tuple[Tensor, Tensor]:
    """Photos that are all 0 (even places) and all 1, so that a mixed one's pixels are the second's share."""
    images_BCHW = (torch.arange(count) % 2).float()[:, None, None, None].expand(count, 3, size, size).contiguous()
    return images_BCHW, torch.arange(count) % 2


@pytest.mark.parametrize(
    "settings", [{"mixup": 0.8}, {"mixup": 0.2}, {"cutmix": 1.0}, {"cutmix": 0.5}, {"mixup": 1.0, "cutmix": 1.0}]
)
def test_targets_are_the_shares_of_the_pixels(settings: dict[str, float]) -> None:
    images_BCHW, labels_B = pairs(800)
    mixed_BCHW, targets_BK = mix(images_BCHW, labels_B, 2, draws(800), AugmentConfig(mix=0.7, **settings))
    assert targets_BK.sum(1) == pytest.approx(1, abs=1e-6)
    assert (mixed_BCHW.mean((1, 2, 3)) - targets_BK[:, 1]).abs().max() < 1e-6
    # The first gives as much as it gets, at the same places.
    assert (mixed_BCHW[::2] + mixed_BCHW[1::2] - 1).abs().max() < 1e-6

    changed_B = (mixed_BCHW[::2] != images_BCHW[::2]).flatten(1).any(1)
    assert changed_B.float().mean().item() == pytest.approx(0.7, abs=0.1)
    cut_B = ((mixed_BCHW[::2] == 0) | (mixed_BCHW[::2] == 1)).flatten(1).all(1) & changed_B
    blended_B = changed_B & ~cut_B
    expected_cut = {("mixup",): 0, ("cutmix",): 1, ("mixup", "cutmix"): 0.5}[tuple(settings)]
    assert cut_B.sum().item() / changed_B.sum().item() == pytest.approx(expected_cut, abs=0.1)
    for image_HW in mixed_BCHW[::2, 0][cut_B]:
        rows, columns = image_HW.any(1).nonzero(), image_HW.any(0).nonzero()
        height, width = (places.max() - places.min() + 1 for places in (rows, columns))
        assert image_HW.sum() == height * width, "not a whole rectangle"
    for image_CHW in mixed_BCHW[::2][blended_B]:
        assert image_CHW.min() == image_CHW.max()


def test_mixing_takes_pixels_from_the_same_place_of_the_neighbour() -> None:
    images_BCHW = torch.rand((60, 3, 9, 11), generator=torch.Generator().manual_seed(0))
    labels_B = torch.arange(60)
    mixed_BCHW, targets_BK = mix(images_BCHW, labels_B, 60, draws(60), AugmentConfig(mix=1.0, cutmix=1.0, mixup=1.0))
    kinds = set()
    for place in range(60):
        own_CHW, other_CHW, mixed_CHW = images_BCHW[place], images_BCHW[place ^ 1], mixed_BCHW[place]
        share = targets_BK[place, place ^ 1].item()
        assert targets_BK[place, place].item() == pytest.approx(1 - share, abs=1e-6)
        taken_HW = (mixed_CHW == other_CHW).all(0)
        if torch.where(taken_HW, other_CHW, own_CHW).equal(mixed_CHW):
            kinds.add("cut")
            assert taken_HW.float().mean().item() == pytest.approx(share, abs=1e-6)
        else:
            kinds.add("blended")
            assert (own_CHW * (1 - share) + other_CHW * share - mixed_CHW).abs().max() < 1e-6
    assert kinds == {"cut", "blended"}


@pytest.mark.parametrize("alpha", [0.2, 0.5, 0.8, 1.0, 2.0, 3.0, 30.0])
def test_shares_are_beta_distributed(alpha: float) -> None:
    count = 20_000
    images_BCHW, labels_B = pairs(count, size=1)
    _, targets_BK = mix(images_BCHW, labels_B, 2, draws(count), AugmentConfig(mix=1.0, mixup=alpha))
    shares = targets_BK[::2, 1].numpy()
    expected = np.random.default_rng(0).beta(alpha, alpha, 400_000)
    for threshold in (0.001, 0.01, *np.linspace(0.05, 0.95, 19), 0.99, 0.999):
        # Four standard deviations of a share of 10,000, at most.
        assert (shares <= threshold).mean() == pytest.approx((expected <= threshold).mean(), abs=0.02)
    assert shares.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.05)


@pytest.mark.parametrize(
    ("alpha", "cdf"),
    [
        (0.5, lambda x: 2 / math.pi * np.arcsin(np.sqrt(x))),
        (1.0, lambda x: x),
        (2.0, lambda x: 3 * x**2 - 2 * x**3),
        (3.0, lambda x: 10 * x**3 - 15 * x**4 + 6 * x**5),
    ],
)
def test_shares_are_the_quantiles_to_a_thousandth(alpha: float, cdf: Any) -> None:
    images_BCHW, labels_B = pairs(2, size=1)
    x = np.linspace(0, 1, 1_000_001)
    for uniform in (0.0, 1e-5, 0.0004, 0.01, 0.3, 0.5, 0.77, 0.999, 1 - 2**-24):
        fixed = Fixed(2, mix=0.0, mix_share=uniform)
        _, targets_BK = mix(images_BCHW, labels_B, 2, fixed, AugmentConfig(mix=1.0, mixup=alpha))
        assert targets_BK[0, 1].item() == pytest.approx(np.interp(uniform, cdf(x), x), abs=1e-3)


def test_the_first_of_a_pair_draws_for_both() -> None:
    images_BCHW, labels_B = pairs(2)
    config = AugmentConfig(mix=1.0, mixup=1.0, cutmix=1.0)

    def mixed(first: int, second: int) -> Tensor:
        samples_B = torch.tensor([first, second])
        return mix(images_BCHW, labels_B, 2, Draws(0, torch.zeros(2).long(), samples_B), config)[0]

    assert torch.equal(mixed(1, 2), mixed(1, 3))
    assert not torch.equal(mixed(1, 2), mixed(2, 1))


def test_pairs_are_mixed_alike_in_any_batch_and_the_odd_one_is_left() -> None:
    images_BCHW = torch.rand((9, 3, 8, 8), generator=torch.Generator().manual_seed(0))
    labels_B, samples_B = torch.arange(9) % 4, torch.arange(100, 109)
    config = AugmentConfig(mix=1.0, mixup=0.8, cutmix=1.0)
    parts = [slice(None), slice(4, 6), slice(2, 8)]
    whole_BCHW, whole_BK = mix(images_BCHW, labels_B, 4, Draws(0, samples_B * 0, samples_B), config, 0.1)
    for part in parts:
        numbers = Draws(0, samples_B[part] * 0, samples_B[part])
        part_BCHW, part_BK = mix(images_BCHW[part], labels_B[part], 4, numbers, config, 0.1)
        assert torch.equal(part_BCHW, whole_BCHW[part])
        assert torch.equal(part_BK, whole_BK[part])
    assert torch.equal(whole_BCHW[8], images_BCHW[8])
    assert whole_BK[8].tolist() == pytest.approx([0.925, 0.025, 0.025, 0.025])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_targets_give_the_loss_of_smoothed_labels(smoothing: float) -> None:
    images_BCHW, labels_B = torch.rand(10, 3, 4, 4), torch.arange(10) % 7
    same_BCHW, targets_BK = mix(images_BCHW, labels_B, 7, draws(10), AugmentConfig(), smoothing)
    assert torch.equal(same_BCHW, images_BCHW)
    logits_BK = torch.randn((10, 7), generator=torch.Generator().manual_seed(0))
    expected = F.cross_entropy(logits_BK, labels_B, label_smoothing=smoothing)
    assert F.cross_entropy(logits_BK, targets_BK).item() == pytest.approx(expected.item(), abs=1e-6)
