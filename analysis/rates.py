"""Counters to rates: what a counter grew by between two samples, where that can be known.

It cannot where the counter went back (the driver was reloaded, the counter cleared, or it wrapped, which 64 bits do
about never), or where nothing came for longer than a value holds. Such intervals are left out, never filled in: what is
not known is not zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diagnosd.schema import HOLD_SECONDS

Floats = npt.NDArray[np.float64]

COVERED = 0.5  # a mean over a window needs half of the window


@dataclass(frozen=True, slots=True)
class Increments:
    """What a counter grew by in each known interval, in order of time; seconds since the trace's origin."""

    start: Floats
    end: Floats
    amount: Floats

    @property
    def rate(self) -> Floats:
        """Per second, over each interval."""
        return self.amount / (self.end - self.start)

    def total(self, since: float, until: float) -> float:
        """The growth in a window; an interval that reaches over its edge counts by the part inside."""
        return float(np.sum(self.amount * self._inside(since, until)))

    def whole(self, since: float, until: float) -> float:
        """The growth over the intervals that lie wholly in a window; NaN where none does."""
        inside = (self.start >= since) & (self.end <= until)
        return float(np.sum(self.amount[inside])) if inside.any() else float("nan")

    def mean(self, since: float, until: float) -> float:
        """Mean rate in a window, over the part that is known; NaN where that is less than half of it."""
        known = float(np.sum((self.end - self.start) * self._inside(since, until)))
        return self.total(since, until) / known if known > 0 and known >= COVERED * (until - since) else float("nan")

    def _inside(self, since: float, until: float) -> Floats:
        """Which part of each interval lies in the window, 0 to 1."""
        overlap = np.minimum(self.end, until) - np.maximum(self.start, since)
        parts: Floats = np.clip(overlap, 0, None) / (self.end - self.start)
        return parts


def increments(times: Floats, values: npt.NDArray[np.int64] | Floats) -> Increments:
    """Growth of a cumulative counter between its samples; times in s and rising, values as the device counted them."""
    seconds, grown = np.diff(times), np.diff(values).astype(np.float64)
    known = (seconds > 0) & (seconds <= HOLD_SECONDS) & (values[:-1] >= 0) & (values[1:] >= 0) & (grown >= 0)
    return Increments(times[:-1][known], times[1:][known], grown[known])
