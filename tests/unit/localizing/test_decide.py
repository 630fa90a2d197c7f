"""Measures by hand, decisions on maps whose answer is plain, and the fit of the confidence."""

import json
import math
from dataclasses import astuple
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchlight.config import Calibration, SubjectHeat
from patchlight.errors import PatchlightError
from patchlight.localizing.boxes import regions_of
from patchlight.localizing.calibrate import EMPTY_ANSWERED, PRECISION, fit, least_sure, logistic
from patchlight.localizing.decide import GENERIC, NAMES, Measures, confidence_of, decide, measure

# Trusts what is hot, and is sure from a mean heat of 0.6 on.
BY_HEAT = Calibration(bias=-12.0, mean=20.0, others=-8.0, sure=0.5, nothing=0.01)


def spots(*places: tuple[int, int, int, int, float], cold: float = 0.0) -> npt.NDArray[np.float64]:
    """A map of 12 rows and 16 columns, cold but for rectangles (x0, y0, x1, y1, heat)."""
    heat = np.full((12, 16), cold)
    for x0, y0, x1, y1, level in places:
        heat[y0:y1, x0:x1] = level
    return heat


def decided(heat: npt.NDArray[np.float64], most: int | None = 1, **changes: Any) -> tuple[str, float]:
    calibration = Calibration(**BY_HEAT.to_dict() | changes)
    return decide(heat, regions_of(heat, most=most), regions_of(heat, most=None), calibration)


def test_measures_by_hand() -> None:
    heat = spots((2, 0, 6, 3, 0.8), (10, 6, 12, 8, 0.6), cold=0.1)
    first, second = regions_of(heat, most=None)
    total = 12 * 0.8 + 4 * 0.6 + (192 - 16) * 0.1
    found = measure(heat, first, [first, second])
    assert found.mean == pytest.approx(0.8)
    assert found.peak == pytest.approx(0.8)
    assert found.sharpness == pytest.approx(0.7)
    assert found.outside == pytest.approx(17.6 / total)
    assert found.others == pytest.approx(2.4 / 12.0)
    x0, y0, x1, y1 = first.box
    assert found.size == pytest.approx(math.sqrt((x1 - x0) * (y1 - y0) / 192))
    assert found.touching == 0.25  # the upper side alone
    assert measure(heat, first).others == 0
    assert measure(heat, first).outside == pytest.approx(1 - 9.6 / total)


def test_a_region_that_fills_the_frame_has_no_border() -> None:
    heat = np.full((4, 5), 0.7)
    (region,) = regions_of(heat)
    assert astuple(measure(heat, region)) == pytest.approx(
        (0.7, 0.7, 0.0, 0.0, 0.0, measure(heat, region).size, 1.0, 0.0)
    )


@given(st.floats(0.05, 1), st.floats(0, 0.04), st.integers(0, 13), st.integers(0, 9))
def test_measures_stay_between_0_and_1(level: float, cold: float, left: int, top: int) -> None:
    heat = spots((left, top, left + 3, top + 3, level), cold=cold)
    regions = regions_of(heat, most=None)
    for value in astuple(measure(heat, regions[0], regions)):
        assert -1e-9 <= value <= 1 + 1e-9


def test_confidence_is_the_logistic_of_the_sum() -> None:
    measures = Measures(*(0.1 * (index + 1) for index in range(len(NAMES))))
    weights = {name: float(index - 3) for index, name in enumerate(NAMES)}
    score = 0.25 + sum(0.1 * (index + 1) * (index - 3) for index in range(len(NAMES)))
    expected = 1 / (1 + math.exp(-score))
    assert confidence_of(measures, Calibration(bias=0.25, **weights)) == pytest.approx(expected)
    assert confidence_of(measures, Calibration(bias=-1e6)) < 1e-20


def test_the_four_decisions() -> None:
    assert decided(spots()) == ("none", 0.0)
    assert decided(spots((3, 3, 8, 8, 0.2)))[0] == "none"
    assert decided(spots((3, 3, 8, 8, 0.5)))[0] == "unsure"
    assert decided(spots((3, 3, 8, 8, 0.9)))[0] == "subject"
    assert decided(spots((1, 3, 6, 8, 0.9), (10, 3, 14, 8, 0.9)))[0] == "several"


@pytest.mark.parametrize("most", [1, 2, None])
def test_several_are_seen_whatever_was_asked_for(most: int | None) -> None:
    both = spots((1, 3, 6, 8, 0.9), (10, 3, 14, 8, 0.9))
    decision, confidence = decided(both, most)
    assert decision == "several"
    assert confidence == pytest.approx(decided(spots((1, 3, 6, 8, 0.9)))[1])
    # A second region that would not stand alone is no subject, and speaks against the first.
    faint = spots((1, 3, 6, 8, 0.9), (10, 3, 14, 8, 0.58))
    assert decided(faint, most)[0] != "several"
    assert decided(faint, most)[1] < confidence


@pytest.mark.parametrize("most", [1, 2, None])
def test_the_confidence_of_several_is_that_of_the_first_box(most: int | None) -> None:
    # The first has the most heat, and the second is the surer one.
    large, small = (0, 2, 7, 9, 0.7), (11, 4, 14, 7, 0.9)
    both = spots(large, small)
    (first, *_) = regions_of(both, most=most)
    assert first.score == pytest.approx(0.7)
    decision, confidence = decided(both, most)
    assert decision == "several"
    assert confidence == pytest.approx(decided(spots(large))[1])
    assert confidence < decided(spots(small))[1] - 0.1


def test_a_calibration_survives_json_with_its_model() -> None:
    subject = SubjectHeat(scale=0.6, bias=-1.0, calibration=Calibration(bias=-3.0, mean=4.5, sure=0.8, nothing=0.1))
    values = json.loads(subject.to_json())
    assert values["calibration"]["mean"] == 4.5
    assert SubjectHeat.from_json(subject.to_json()) == subject
    assert "calibration" not in SubjectHeat(scale=0.6, bias=-1.0).to_dict()
    assert SubjectHeat.from_dict({"scale": 0.6, "bias": -1.0, "calibration": None}).calibration is None
    assert hash(subject) == hash(SubjectHeat.from_dict(values))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"bias": 0.0, "warmth": 1.0}, "warmth"),
        ({"bias": float("nan")}, "bias"),
        ({"bias": 0.0, "sure": 0.2, "nothing": 0.4}, "nothing=0.4"),
        ({"bias": 0.0, "sure": 1.5}, "sure=1.5"),
    ],
)
def test_a_calibration_checks_itself(values: dict[str, Any], words: str) -> None:
    with pytest.raises(PatchlightError, match=words):
        SubjectHeat.from_dict({"scale": 1.0, "bias": 0.0, "calibration": values})
    with pytest.raises(PatchlightError, match="calibration=3 should be a Calibration or None"):
        SubjectHeat(scale=1.0, bias=0.0, calibration=3)  # type: ignore[arg-type]


def test_every_method_has_a_generic_calibration() -> None:
    assert set(GENERIC) == {"subject", "cls", "rollout", "lost", "tokencut", "features"}


def test_the_fit_is_where_the_likelihood_is_highest() -> None:
    rng = np.random.default_rng(0)
    values = rng.uniform(0, 1, (600, 3))
    right = rng.uniform(size=600) < 1 / (1 + np.exp(-(-3 + values @ [6.0, -2.0, 1.0])))
    bias, weights = logistic(values, right)

    def loss(bias: float, weights: npt.NDArray[np.float64]) -> float:
        score = bias + values @ weights
        likelihood = np.logaddexp(0, np.where(right, -score, score)).sum()
        return float(likelihood + 0.5 * ((weights * values.std(0)) ** 2).sum())

    best = loss(bias, weights)
    for index in range(3):
        for step in (-0.05, 0.05):
            moved = weights.copy()
            moved[index] += step
            assert loss(bias, moved) > best
    assert loss(bias + 0.05, weights) > best
    assert loss(bias - 0.05, weights) > best
    np.testing.assert_allclose(weights, [6.0, -2.0, 1.0], atol=1.2)


def test_sure_keeps_its_promise_on_other_photos() -> None:
    kept = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        confidence = rng.uniform(0, 1, 1400)
        right = rng.uniform(size=1400) < confidence
        sure = least_sure(confidence[:700], right[:700])
        answered = confidence[700:] >= sure
        if not answered.any():
            continue
        kept.append(right[700:][answered].mean() >= PRECISION)
    assert np.mean(kept) >= 0.8


def test_too_few_or_too_wrong_answers_are_never_sure() -> None:
    assert least_sure(np.array([0.9, 0.8]), np.array([True, True])) == 1.0
    assert least_sure(np.linspace(0, 1, 200), np.arange(200) % 2 == 0) == 1.0
    assert least_sure(np.linspace(0, 1, 200), np.ones(200, bool)) == 0.0


def test_fit_tells_hot_regions_from_cold_ones() -> None:
    rng = np.random.default_rng(1)
    measures, right = [], []
    for _ in range(400):
        heat = spots((3, 3, 8, 8, rng.uniform(0.2, 1)), cold=0.05)
        (region,) = regions_of(heat)
        measures.append(measure(heat, region))
        right.append(measures[-1].mean > rng.normal(0.45, 0.1))
    calibration = fit(measures, right, [True] * 400)
    by_heat = sorted(measures, key=lambda each: each.mean)
    hot, cold = confidence_of(by_heat[-1], calibration), confidence_of(by_heat[0], calibration)
    assert hot > 0.95
    assert cold < 0.05
    assert 0 < calibration.nothing <= calibration.sure < 1
    # Photos that show nothing raise what it takes to be sure, until all but a few of them are left unanswered.
    empty = [measure(heat := spots((3, 3, 8, 8, rng.uniform(0.2, 0.9)), cold=0.05), regions_of(heat)[0]) for _ in right]
    strict = fit([*measures, *empty], [*right, *[False] * 400], [True] * 400 + [False] * 400)
    answered = np.mean([confidence_of(each, strict) >= strict.sure for each in empty])
    assert 0 < answered <= EMPTY_ANSWERED + 0.005
    with pytest.raises(PatchlightError, match="right boxes"):
        fit(measures, [True] * 400, [True] * 400)
    with pytest.raises(PatchlightError, match="one `right`"):
        fit(measures, [True, False], [True] * 400)
