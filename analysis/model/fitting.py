"""The constants from published step times: least squares in ln, robust, with what was known before as a prior."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import hypot

import numpy as np
import numpy.typing as npt

from diagnosd.analysis.model.constants import Constants
from diagnosd.analysis.model.published import Case
from diagnosd.analysis.model.step import step, variance

Floats = npt.NDArray[np.float64]

# What was known before any fit, and how well (sigma in ln): products of 0.69 of 0.87 on an A100 and 0.6 of 0.8 on an
# H100; 0.1 to 0.5 for the others and 10 to 200 ms (notes/model.md 2.6 and 2.8).
PRIOR = {
    "products": (0.78, 0.3),
    "tensor_exposed": (0.30, 0.7),
    "interference": (0.20, 0.7),
    "fixed": (0.10, 0.7),
}
TYPICAL = 0.08  # error of a step time beside which a prior's sigma is weighed
ROBUST = 1.5 * TYPICAL  # from here on an error counts linearly, not squared
ROUNDS, ENOUGH, STEP = 12, 1e-3, 1e-3


def fit(cases: Sequence[Case]) -> Constants:
    """The constants that fit these best. A series counts as the root of its length: its runs err alike."""
    weights = _weights(cases)
    measured = np.log([case.seconds for case in cases])
    sigmas = np.array([sigma for _, sigma in PRIOR.values()])

    def residuals(x: Floats) -> Floats:
        errors = predicted(cases, _constants(x)) - measured
        robust = 1 / np.sqrt(np.maximum(1.0, np.abs(errors) / ROBUST))
        return np.concatenate([errors / TYPICAL * weights * robust, x / sigmas])

    x = np.zeros(len(PRIOR))
    for _ in range(ROUNDS):
        now = residuals(x)
        slopes = np.column_stack([(residuals(x + STEP * unit) - now) / STEP for unit in np.eye(len(x))])
        move = np.linalg.solve(slopes.T @ slopes, -slopes.T @ now)
        x = x + np.clip(move, -0.5, 0.5)
        if np.abs(move).max() < ENOUGH:
            break
    found = _constants(x)
    return replace(found, spread=_spread(cases, found))


def predicted(cases: Sequence[Case], constants: Constants) -> Floats:
    """Natural logarithm of the seconds that each should take."""
    return np.log([float(step(case.work, case.machine, constants).total) for case in cases])


def sigma(case: Case, constants: Constants) -> float:
    """Standard deviation of ln(seconds) that an expectation has, with what was not published."""
    parts = {name: float(value) for name, value in step(case.work, case.machine, constants).terms.items()}
    return hypot(variance(parts, constants.spread) ** 0.5, case.doubt)


def _constants(x: Floats) -> Constants:
    found = np.array([start for start, _ in PRIOR.values()]) * np.exp(x)
    return Constants(**dict(zip(PRIOR, found.tolist(), strict=True)))


def _weights(cases: Sequence[Case]) -> Floats:
    lengths = Counter(case.series for case in cases)
    return np.array([lengths[case.series] ** -0.5 for case in cases])


def _spread(cases: Sequence[Case], found: Constants) -> float:
    """So that the errors have the size that is claimed."""
    errors = predicted(cases, found) - np.log([case.seconds for case in cases])
    claimed = np.array([sigma(case, replace(found, spread=1.0)) for case in cases])
    return float(np.sqrt(np.mean((errors / claimed) ** 2)))
