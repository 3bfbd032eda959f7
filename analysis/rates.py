"""Counters to rates: what a counter grew by between two samples, where that can be known.

It cannot where the counter went back and no wrap explains it (the driver was reloaded, the counter cleared), where it
stands at its largest value and saturates there, or where nothing came for longer than a value holds. Such intervals are
left out, never filled in: what is not known is not zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diagnosd.schema import HOLD_SECONDS

Floats = npt.NDArray[np.float64]

POSSIBLE = 1.2  # times the line rate: two polls a second apart may be 20 % off in time (notes: counter hygiene)
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

    def mean(self, since: float, until: float) -> float:
        """Mean rate in a window, over the part that is known; NaN where that is less than half of it."""
        known = float(np.sum((self.end - self.start) * self._inside(since, until)))
        return self.total(since, until) / known if known > 0 and known >= COVERED * (until - since) else float("nan")

    def _inside(self, since: float, until: float) -> Floats:
        """Which part of each interval lies in the window, 0 to 1."""
        overlap = np.minimum(self.end, until) - np.maximum(self.start, since)
        parts: Floats = np.clip(overlap, 0, None) / (self.end - self.start)
        return parts


def increments(
    times: Floats,
    values: npt.NDArray[np.int64] | Floats,
    *,
    bits: int = 64,
    limit: float | None = None,
    saturates: bool = False,
) -> Increments:
    """Growth of a cumulative counter between its samples; times in s and rising, values as the device counted them.

    `limit` is the largest possible rate in counts a second (the line rate): a counter that went back has wrapped at its
    width only if it then grew no faster; without a limit it was reset. Unsigned 64-bit counters are sent modulo 2^63
    and wrap there. `saturates`: it stops at its largest value, as InfiniBand's error counters do.
    """
    seconds, grown = np.diff(times), np.diff(values).astype(np.float64)
    known = (seconds > 0) & (seconds <= HOLD_SECONDS) & (values[:-1] >= 0) & (values[1:] >= 0)
    if limit is not None and values.dtype == np.int64:
        wrapped = _wrapped(values.astype(np.int64, copy=False), min(bits, 63))
        grown = np.where((grown < 0) & (wrapped <= POSSIBLE * limit * seconds), wrapped, grown)
    known &= grown >= 0
    if saturates:
        known &= values[1:] < (1 << min(bits, 63)) - 1
    return Increments(times[:-1][known], times[1:][known], grown[known])


def _wrapped(values: npt.NDArray[np.int64], bits: int) -> Floats:
    """The growth between samples of a counter that begins again at 2^bits; infinite where it was above that already."""
    grown = np.diff(values) & ((1 << bits) - 1)
    return np.where(values[:-1] >> bits == 0, grown.astype(np.float64), np.inf)


def value_at(times: Floats, values: npt.NDArray[np.generic], at: float, hold: float = HOLD_SECONDS) -> float:
    """The value of a gauge or state at a time: the newest that is not older than `hold`, else NaN."""
    index = int(np.searchsorted(times, at, side="right")) - 1
    return float(values[index]) if index >= 0 and at - times[index] <= hold else float("nan")
