"""Learning how this job on this cluster differs from the model, from steps of which nothing says that they were ill.

T = c T_computing + t T_tensor + d T_gradients + p T_bubble + T_rest, each factor log-normal about 1 (notes/model.md
5.4). A Kalman filter in the logarithms. From step times alone only computing can be told, so only that is learned;
where the parts were timed, each is. Two residuals stay apart: against the model as shipped, which alone sees a job that
was ill from its first step, and against the calibrated one, which sees what has changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from diagnosd.analysis.model.step import COMPUTING, Step

Floats = npt.NDArray[np.float64]

# Factors, and what is known of each before anything was seen: sigma in ln.
PRIOR: Mapping[str, float] = {"computing": 0.15, "tensor": 0.25, "gradients": 0.50, "bubble": 0.05}
FACTORS = tuple(PRIOR)
STEP_NOISE, PART_NOISE = 0.01, 0.03  # sigma in ln of a median step, of a timed part

# Published points are well tuned, and the worst is 1.28 from the model: beyond 1.3 a job is slow from the start. Below
# 0.75 what was declared cannot be true. Between 0.8 and 1.3 a start may become the baseline, if it is steady.
HIGH, LOW, BASELINE = 1.30, 0.75, (0.80, 1.30)
CHANGED, DEVIATIONS = 1.05, 4.0  # of the calibrated time; or so many robust deviations, whichever is more
STEADY = 0.03  # standard deviation over mean of a baseline's steps
# A part that took longer than its prior allows is ill, however well the step as a whole looks; and what was learned
# from a first baseline follows only slow drift, never a change (notes/model.md 5.4).
PRIOR_DEVIATIONS, DRIFT = 2.0, 0.03

State = Literal["healthy", "changed", "born_sick", "born_sick_and_changed", "not_this_job"]


@dataclass(frozen=True)
class Calibration:
    """`mean` and `covariance` of the logarithms of FACTORS."""

    mean: Floats
    covariance: Floats
    seen: int = 0

    @classmethod
    def fresh(cls) -> Calibration:
        return cls(np.zeros(len(FACTORS)), np.diag(np.square(list(PRIOR.values()))))

    @property
    def factors(self) -> dict[str, float]:
        return dict(zip(FACTORS, np.exp(self.mean).tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class Start:
    """What was seen of a stretch of steps: seconds of a median step, of its parts as far as they were timed."""

    step_s: float
    parts: Mapping[str, float]  # by FACTORS
    variation: float  # standard deviation over mean
    faults: bool = False  # whether any fault counter moved
    steady: bool = True  # whether temperatures have settled


def shares(one: Step) -> dict[str, float]:
    """Seconds of the step by factor, and `rest`, which has none."""
    parts = dict.fromkeys((*FACTORS, "rest"), 0.0)
    for name, value in one.terms.items():
        factor = "computing" if name in COMPUTING else name if name in FACTORS else "rest"
        parts[factor] += float(np.max(value))
    return parts


def calibrated(one: Step, known: Calibration) -> float:
    """Seconds of a step with what was learned."""
    parts = shares(one)
    return parts["rest"] + sum(parts[name] * factor for name, factor in known.factors.items())


def acceptable(one: Step, start: Start) -> bool:
    """Whether these steps may become the baseline: an ill start never does."""
    ratio = start.step_s / float(np.max(one.total))
    calm = not start.faults and start.steady and start.variation < STEADY
    return BASELINE[0] <= ratio <= BASELINE[1] and calm and not _ill(one, start)


def _ill(one: Step, start: Start) -> bool:
    """Whether a part that was timed took longer than a healthy one does, or has no time that can be."""
    expected = shares(one)
    ratios = {name: start.parts[name] / expected[name] for name in FACTORS if name in start.parts and expected[name]}
    most = {name: max(BASELINE[1], float(np.exp(PRIOR_DEVIATIONS * PRIOR[name]))) for name in ratios}
    return not all(0 < ratio <= most[name] for name, ratio in ratios.items())


def learn(one: Step, known: Calibration, start: Start) -> Calibration:
    """With what these steps tell, if they may be learned from; else as it was."""
    drifts = known.seen and abs(np.log(start.step_s / calibrated(one, known))) > DRIFT
    if drifts or not acceptable(one, start):
        return known
    parts = shares(one)
    for name, seconds in start.parts.items():
        if name in FACTORS and parts[name] > 0:
            row = np.array([1.0 if factor == name else 0.0 for factor in FACTORS])
            known = _updated(known, row, float(np.log(seconds / parts[name])) - known.mean @ row, PART_NOISE)
    expected = calibrated(one, known)
    slopes = np.array([parts[name] * factor for name, factor in known.factors.items()]) / expected
    told = [name in start.parts or name == "computing" for name in FACTORS]
    row = np.where(told, slopes, 0.0)
    surprise = float(np.log(start.step_s / expected))
    return replace(_updated(known, row, surprise, STEP_NOISE), seen=known.seen + 1)


def _updated(known: Calibration, row: Floats, surprise: float, noise: float) -> Calibration:
    spread = float(row @ known.covariance @ row) + noise**2
    gain = known.covariance @ row / spread
    kept = np.eye(len(row)) - np.outer(gain, row)
    return replace(known, mean=known.mean + gain * surprise, covariance=kept @ known.covariance)


def residuals(one: Step, known: Calibration, step_s: float) -> tuple[float, float]:
    """Observed over expected: of the model as shipped, and of the calibrated one."""
    return step_s / float(np.max(one.total)), step_s / calibrated(one, known)


def state(absolute: float, relative: float, deviation: float = 0.0) -> State:
    """What the two residuals say. `deviation`: robust standard deviation of the baseline's steps over their median."""
    if absolute < LOW:
        return "not_this_job"
    changed = relative > max(CHANGED, 1 + DEVIATIONS * deviation)
    if absolute > HIGH:
        return "born_sick_and_changed" if changed else "born_sick"
    return "changed" if changed else "healthy"
