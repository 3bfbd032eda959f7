"""Checkpoints against earlier checkpoints: a plain training step says nothing of what saving should take."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from diagnosd.analysis.baseline import WINDOW
from diagnosd.analysis.compare import Past, together

SLOW = 1.5  # times the usual checkpoint (diagnosis.md 3)
FELT = 0.25  # of a training step more than usual: a checkpoint that hardly shows is nobody's trouble
FAR = 6.0  # scales from the usual
LEAST = 2  # healthy checkpoints to compare with
# One slow checkpoint may be a hiccup of the storage, unless it cost as much as ten steps, and seconds.
LARGE_STEPS, LARGE_S = 10, 5.0


@dataclass(frozen=True, slots=True)
class Save:
    """A cycle with a checkpoint. Jobs save every few thousand steps: until the next one its row is no longer kept."""

    number: int
    step: int  # the framework's number of its first step
    start: int  # ns
    end: int
    cost: float  # s that saving took
    took: Past  # the cycle itself
    since: int = 0  # ns: of a slow one, the end of the slow one before, else its own start

    @property
    def seconds(self) -> float:
        return float(self.took.parts.sum())


class Checkpoints:
    """The cycles with a checkpoint, judged one after the other."""

    def __init__(self) -> None:
        self.run: list[Save] = []  # the newest slow ones since the last good one
        self.first: Save | None = None  # of them
        self.slow: Save | None = None  # the newest slow one of all
        self.past: Past | None = None  # what they are held against: the usual ones until the first of them
        self._usual: list[Save] = []
        self._fresh: list[Save] = []

    def add(self, save: Save) -> None:
        self._fresh.append(save)
        del self._fresh[:-WINDOW]

    def judge(self, step: float) -> bool:
        """Judge what is new, beside a usual training step (s); whether there was any."""
        fresh, self._fresh = self._fresh, []
        for save in fresh:
            costs = np.array([usual.cost for usual in self._usual])
            if len(costs) >= LEAST and _is_slow(save.cost, costs, step):
                self._go_on(save)
            else:
                self.run, self._usual = [], [*self._usual, save][-WINDOW:]
        return bool(fresh)

    def _go_on(self, save: Save) -> None:
        if not self.run:
            self.first = save
            self.past = together([usual.took for usual in self._usual], save.took.window[1])
        self.slow = replace(save, since=self.run[-1].end if self.run else save.start)
        self.run = [*self.run, self.slow][-WINDOW:]


def _is_slow(cost: float, before: np.ndarray[tuple[int, ...], np.dtype[np.float64]], step: float) -> bool:
    middle = float(np.median(before))
    spread = 1.4826 * float(np.median(np.abs(before - middle)))
    return cost > max(SLOW * middle, middle + FELT * step, middle + FAR * spread)
