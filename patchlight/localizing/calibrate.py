"""Fit the confidence of a model's boxes on photos whose boxes are known."""

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
import numpy.typing as npt

from patchlight.config import Calibration
from patchlight.errors import PatchlightError
from patchlight.localizing.decide import NAMES, Measures, confidence_of

PRECISION = 0.9
"""Of the answers "subject", the share whose boxes are to be right."""

DEVIATIONS = 1.64
"""How sure of that precision: the photos of the fit bound it from below with this many standard deviations, so that
other photos keep it as a rule."""

CALLED_EMPTY = 0.01
"""The share of photos with a subject that may be called empty."""

EMPTY_ANSWERED = 0.05
"""The share of photos without a subject that may be answered with one. Most photos of a camera trap are such."""

PULL = 1.0
"""Towards weights of 0, as the inverse variance of measures that are scaled to a deviation of 1."""


def fit(measures: Sequence[Measures], right: Sequence[bool], shows_one: Sequence[bool]) -> Calibration:
    """The calibration for what was measured of each photo's first region.

    `right` says whether its box overlaps the subject's by half or more, and `shows_one` whether the photo has a subject
    at all. Photos without are needed, too: the confidence in what is found there should be low.
    """
    values_NM = np.array([astuple(each) for each in measures], np.float64).reshape(-1, len(NAMES))
    right_N, shows_N = np.asarray(right, bool), np.asarray(shows_one, bool)
    if not len(values_NM) == len(right_N) == len(shows_N):
        raise PatchlightError("give one `right` and one `shows_one` for each of the measures")
    if right_N.all() or not right_N.any():
        raise PatchlightError("a calibration needs photos with right boxes and photos with wrong ones")
    bias, weights_M = logistic(values_NM, right_N)
    numbers: dict[str, Any] = {name: round(float(weight), 3) for name, weight in zip(NAMES, weights_M, strict=True)}
    plain = Calibration(bias=round(bias, 3), **numbers)
    confidence_N = np.array([confidence_of(each, plain) for each in measures])
    sure = least_sure(confidence_N[shows_N], right_N[shows_N])
    if not shows_N.all():
        sure = max(sure, round(float(np.quantile(confidence_N[~shows_N], 1 - EMPTY_ANSWERED)), 3))
    nothing = float(np.quantile(confidence_N[shows_N], CALLED_EMPTY))
    return Calibration(bias=plain.bias, **numbers, sure=sure, nothing=min(round(nothing, 3), sure))


def logistic(
    values_NM: npt.NDArray[np.float64], right_N: npt.NDArray[np.bool_]
) -> tuple[float, npt.NDArray[np.float64]]:
    """The bias and the weights of a logistic model, by Newton's method."""
    mean_M, deviation_M = values_NM.mean(0), np.maximum(values_NM.std(0), 1e-6)
    scaled_NM = np.c_[np.ones(len(values_NM)), (values_NM - mean_M) / deviation_M]
    pull_M = PULL * np.r_[0, np.ones(len(mean_M))]
    weights_M = np.zeros(len(pull_M))
    for _ in range(100):
        likely_N = 1 / (1 + np.exp(-scaled_NM @ weights_M))
        slope_M = scaled_NM.T @ (likely_N - right_N) + pull_M * weights_M
        curve_MM = (scaled_NM * (likely_N * (1 - likely_N))[:, None]).T @ scaled_NM + np.diag(pull_M)
        step_M = np.linalg.solve(curve_MM, slope_M)
        weights_M -= step_M
        if abs(step_M).max() < 1e-9:
            break
    own_M = weights_M[1:] / deviation_M
    return float(weights_M[0] - own_M @ mean_M), own_M


def least_sure(
    confidence_N: npt.NDArray[np.float64],
    right_N: npt.NDArray[np.bool_],
    precision: float = PRECISION,
    deviations: float = DEVIATIONS,
) -> float:
    """The confidence from which on enough boxes are right, with the most photos answered; 1 if it is never reached."""
    order_N = np.argsort(-confidence_N, kind="stable")
    count_N = np.arange(1, len(order_N) + 1)
    share_N = np.cumsum(right_N[order_N]) / count_N
    # Wilson's lower bound, which a few right answers do not reach.
    square = deviations**2
    spread_N = deviations * np.sqrt(share_N * (1 - share_N) / count_N + square / (4 * count_N**2))
    least_N = (share_N + square / (2 * count_N) - spread_N) / (1 + square / count_N)
    enough = np.flatnonzero(least_N >= precision)
    if not len(enough):
        return 1.0
    return float(np.floor(1000 * confidence_N[order_N[enough[-1]]]) / 1000)
