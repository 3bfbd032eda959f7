"""Checkpoints against earlier checkpoints: a plain training step says nothing of what saving should take."""

from __future__ import annotations

import numpy as np

from diagnosd.analysis.baseline import WINDOW

SLOW = 1.5  # times the usual checkpoint (diagnosis.md 3)
FELT = 0.25  # of a training step more than usual: a checkpoint that hardly shows is nobody's trouble
FAR = 6.0  # scales from the usual
LEAST = 2  # healthy checkpoints to compare with
# One slow checkpoint may be a hiccup of the storage, unless it cost as much as ten steps, and seconds.
LARGE_STEPS, LARGE_S = 10, 5.0


class Checkpoints:
    """Cycles with a checkpoint and what it cost there (s), in order; judged one after the other."""

    def __init__(self) -> None:
        self.slow: list[int] = []  # cycles
        self._saves: list[tuple[int, float]] = []
        self._judged = -1
        self._last_good = -1

    def add(self, number: int, cost: float) -> None:
        self._saves.append((number, cost))
        del self._saves[:-WINDOW]

    @property
    def run(self) -> list[int]:
        """The slow ones since the last good one."""
        return [number for number in self.slow if number > self._last_good]

    @property
    def usual(self) -> list[int]:
        return [number for number, _ in self._saves if number not in self.slow]

    def judge(self, step: float) -> bool:
        """Judge what is new, beside a usual training step (s); whether there was any."""
        fresh = [(number, cost) for number, cost in self._saves if number > self._judged]
        for number, cost in fresh:
            before = [c for n, c in self._saves if n < number and n not in self.slow]
            if len(before) >= LEAST and _is_slow(cost, np.array(before), step):
                self.slow.append(number)
            else:
                self._last_good = number
            self._judged = number
        return bool(fresh)


def _is_slow(cost: float, before: np.ndarray[tuple[int, ...], np.dtype[np.float64]], step: float) -> bool:
    middle = float(np.median(before))
    spread = 1.4826 * float(np.median(np.abs(before - middle)))
    return cost > max(SLOW * middle, middle + FELT * step, middle + FAR * spread)
