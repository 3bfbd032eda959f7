"""One slowdown of a job against its own past: since when, against what, and whether it is over."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diagnosd.analysis.baseline import CHANNEL, ENTER, LEAVE, LOOK_BACK, Baseline, Floats, Ints, Reference, onset_of

CALM = 5  # cycles in a row without loss, and their seconds, that end a slowdown
CALM_S = 2.0
# A slowdown that nobody was told of in ten minutes and 200 cycles is how the job runs now, and the past to come.
ACCEPT_S, ACCEPT_CYCLES = 600.0, 200

# The channel in which a cause shows when it begins and ends.
SHOWS = {"data_starvation": "load", "network_congestion": "transfer", "straggler": "compute"}


@dataclass(frozen=True, slots=True)
class Slowdown:
    """`onset` is its first cycle; `reference` is what its cycles are held against."""

    onset: int
    size: float  # median excess when it was noticed, as a share of the step
    reference: Reference

    def excess(self, baseline: Baseline, numbers: Ints) -> Floats:
        """[N,C] of the step."""
        return self.reference.excess(baseline.rows(numbers), baseline.work(numbers))

    def onset_of(self, cause: str, baseline: Baseline, since: int) -> int:
        """The cycle with which the channel that a cause explains began to grow."""
        numbers = baseline.usable(max(since, self.onset - LOOK_BACK))
        return int(numbers[onset_of(self.excess(baseline, numbers)[:, _channel(cause)])])

    def ended(self, cause: str, baseline: Baseline) -> int | None:
        """The last cycle that a cause made longer, once the newest are as they were; None while it goes on."""
        numbers = baseline.usable(self.onset)
        channel = _channel(cause)
        scale = float(self.reference.scale[channel]) / max(self.reference.step, 1e-9)
        index = last_sick(self.excess(baseline, numbers)[:, channel], baseline.seconds(numbers), scale, self.size)
        return None if index is None else int(numbers[index]) if index >= 0 else self.onset


def _channel(cause: str) -> int:
    return CHANNEL[SHOWS.get(cause, "total")]


def last_sick(excess: Floats, seconds: Floats, scale: float, size: float) -> int | None:
    """Index of the last row [N] of a slowdown that is over, -1 where no row was sick; None while it is not over.

    It is over when the median of the newest rows lost less than 2 % of the step, or than a fifth of what the slowdown
    cost; or than 2 % and the noise of so many rows, if that is clearly less than the slowdown.
    """
    calm = max(CALM, int(np.searchsorted(np.cumsum(seconds[::-1]), CALM_S)) + 1)
    if len(excess) <= calm:
        return None
    height = max(float(np.median(excess[:-calm])), size)
    level, noise = float(np.median(excess[-calm:])), 1.2533 * scale / np.sqrt(calm)
    if level > max(LEAVE, 0.2 * height, min(LEAVE + noise, 0.4 * height)):
        return None
    usual = max(height, ENTER)
    sick = np.flatnonzero(excess[: len(excess) - calm + 1] > 0.5 * usual)
    return int(sick[-1]) + _goes_on(excess[sick[-1] + 1 :] / usual) if sick.size else -1


def _goes_on(excess: Floats) -> int:
    """How many rows more were sick: half of the newest may be, and their median is calm (largest prefix sum)."""
    score = np.clip(excess, -1, 2) - 0.5
    return int(np.cumsum([0.0, *score]).argmax())
