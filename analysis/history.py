"""A job's newest cycles, one row each, and how they compare: takes them from the trace as they are complete."""

from __future__ import annotations

from collections.abc import Callable
from math import nan

import numpy as np
import numpy.typing as npt

from diagnosd.analysis.baseline import CHANNELS
from diagnosd.analysis.decompose import (
    COMPUTE,
    HOST,
    NETWORK,
    OWN,
    PART,
    Cycles,
    Phases,
    align,
    decompose,
    meeting,
)
from diagnosd.analysis.steps import KINDS, Steps

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

KEEP = 1024  # cycles: five windows of the baseline
LOST_S = 10.0  # what a rank has not sent so long after the others will not come: three times the lateness
REALIGN = 50  # cycles between two looks at the clocks: crystals drift apart by a millisecond a minute
ALIGNED_BY = 200  # steps: their median knows the offset to a tenth of what single meetings scatter by
SILENT_S = 30.0  # a rank that has sent no step for so long, while others did, is left out until it does: 30 heartbeats
_MINOR = 0.01  # of a cycle: a checkpoint or an evaluation that takes less does not change what kind of step it is

_CHANNEL_PARTS = {"load": ("data_wait",), "transfer": NETWORK, "compute": COMPUTE, "host": HOST}
_SAVES = [OWN.index("checkpoint"), OWN.index("eval")]


class History:
    """Arrays over the kept cycles; `first` is the number of the oldest, numbers count from the first cycle of all."""

    def __init__(self, ranks: tuple[int, ...], hosts: tuple[str, ...], origin: int) -> None:
        self.ranks, self.hosts, self.origin = ranks, hosts, origin
        self.first = 0
        self.count = 0
        self.newest = 0  # ns: end of the newest step taken
        self.noise = 0.0  # s, that the clocks of hosts differ by from step to step; infinite while they are not aligned
        self._offset: Floats = np.zeros(len(ranks))
        self._aligned = -REALIGN
        size, across = 64, len(ranks)
        self._arrays: dict[str, npt.NDArray[np.generic]] = {
            "end": np.empty(size),
            "duration": np.empty(size),
            "parts": np.empty((size, len(PART))),
            "own": np.empty((size, across, len(OWN))),
            "late": np.empty((size, across)),
            "last": np.empty(size, np.int64),
            "timed": np.empty(size, bool),
            "usable": np.empty(size, bool),
            "work": np.empty(size),
            "queue": np.empty((size, across)),
            "queue_size": np.empty((size, across)),
            "workers": np.empty((size, across)),
            "compute_per_work": np.empty((size, across)),
            "sync_bytes": np.empty(size),
        }

    def get(self, name: str, numbers: Ints) -> npt.NDArray[np.generic]:
        return self._arrays[name][numbers - self.first]

    def floats(self, name: str, numbers: Ints) -> Floats:
        values: Floats = self._arrays[name][numbers - self.first]  # type: ignore[assignment]
        return values

    def numbers(self, since: int = 0, until: int | None = None) -> Ints:
        """Numbers of the kept cycles in this range."""
        return np.arange(max(since, self.first), self.count if until is None else min(until, self.count))

    def start_of(self, number: int) -> float:
        """When a cycle began, in seconds since the origin."""
        one = np.array([number])
        return float(self.floats("end", one)[0] - self.floats("duration", one)[0])

    def take(self, steps: Steps, now: int, each: Callable[[int, Floats, float, bool], None]) -> None:
        """Add the cycles of the steps that came since, and call `each` with number, channels, work, usable."""
        ended = steps.end.max(axis=1)
        fresh = np.flatnonzero(ended > self.newest)
        if not fresh.size:
            return
        complete = _is_settled(steps.end)[fresh] | (ended[fresh] < now - int(LOST_S * 1e9))
        ready = fresh if complete.all() else fresh[: int(complete.argmin())]
        if not ready.size:
            return
        rows = slice(max(int(ready[0]) - 1, 0), int(ready[-1]) + 1)
        self._align(steps)
        cycles = decompose(Phases.of(steps, rows, self.origin), self._offset)
        cycles = _those(cycles, (cycles.row >= ready[0] - rows.start) & (cycles.duration > 0))
        self.newest = int(ended[ready[-1]])
        if len(cycles.row):
            self._append(cycles, steps, rows.start, each)

    def _align(self, steps: Steps) -> None:
        if self.count - self._aligned < REALIGN and self.count > REALIGN:
            return
        self._aligned = self.count
        _, leave = meeting(Phases.of(steps, slice(max(len(steps) - ALIGNED_BY, 0), len(steps)), self.origin))
        self._offset, self.noise = align(leave, self.hosts)

    def _append(
        self, cycles: Cycles, steps: Steps, start: int, each: Callable[[int, Floats, float, bool], None]
    ) -> None:
        rows, count = cycles.row + start, len(cycles.row)
        self._make_room(count)
        place = slice(self.count - self.first, self.count - self.first + count)
        arrays = self._arrays
        for name in ("end", "duration", "parts", "own", "late", "last", "timed"):
            arrays[name][place] = getattr(cycles, name)
        for name in ("queue", "queue_size", "workers"):
            arrays[name][place] = steps.column(name)[rows]
        work = _work(steps, rows)
        whole = work.sum(axis=1)
        compute = cycles.own[..., [OWN.index(name) for name in COMPUTE]].sum(axis=-1)
        mixed = cycles.own[..., OWN.index("mixed")] > 0
        arrays["compute_per_work"][place] = np.where(mixed, nan, compute) / np.where(work > 0, work, nan)
        arrays["work"][place] = whole
        size = steps.column("sync_bytes")[rows]
        arrays["sync_bytes"][place] = np.where(np.isnan(size), 0.0, size).max(axis=1)
        usable = _usable(cycles, steps, rows)
        # Ranks that met by clocks which nobody has compared yet: who was last, and when, is not known.
        usable &= np.isfinite(self.noise) | np.isnan(cycles.late).any(axis=1)
        arrays["usable"][place] = usable
        channels = _channels(cycles)
        for index in range(count):
            self.count += 1
            each(self.count - 1, channels[index], float(whole[index]), bool(usable[index]))

    def _make_room(self, count: int) -> None:
        kept = self.count - self.first
        if kept + count <= len(self._arrays["end"]):
            return
        drop = max(0, kept - KEEP)
        size = max(2 * (kept - drop + count), 64)
        for name, old in self._arrays.items():
            new = np.empty((size, *old.shape[1:]), old.dtype)
            new[: kept - drop] = old[drop:kept]
            self._arrays[name] = new
        self.first += drop


def of_those_heard(steps: Steps) -> Steps:
    """The steps of the ranks that still send some: one whose telemetry died must not blind us to the others."""
    newest = steps.end.max(axis=0)
    heard = np.flatnonzero(newest >= newest.max() - int(SILENT_S * 1e9))
    return steps if len(heard) == len(newest) else steps.of(heard)


def _is_settled(end: Ints) -> Bools:
    """[S] whether each rank has sent the step, or a later one: then it was lost."""
    later = np.maximum.accumulate(end[::-1] > 0, axis=0)[::-1]
    settled: Bools = np.logical_and.reduce(later, axis=1)
    return settled


def _those(cycles: Cycles, keep: Bools) -> Cycles:
    return Cycles(**{name: getattr(cycles, name)[keep] for name in Cycles.__slots__})


def _work(steps: Steps, rows: Ints) -> Floats:
    """[C,R] samples, else tokens, that each rank processed; NaN where it does not say."""
    samples, tokens = steps.column("samples")[rows], steps.column("tokens")[rows]
    work: Floats = np.where(np.isnan(tokens), samples, tokens)
    return work


def _usable(cycles: Cycles, steps: Steps, rows: Ints) -> Bools:
    """Whether a cycle is a plain training step: by its kind, and by what the ranks did in it."""
    kind = steps.kind[rows]
    plain = ((kind == KINDS.index("train")) | (kind < 0)).all(axis=1)
    other = cycles.own[..., _SAVES].sum(axis=-1).max(axis=1)
    usable: Bools = plain & (other <= _MINOR * cycles.duration)
    return usable


def _channels(cycles: Cycles) -> Floats:
    """[C,len(CHANNELS)] seconds."""
    parts = cycles.parts
    channels = np.empty((len(parts), len(CHANNELS)))
    channels[:, 0] = cycles.duration
    for column, name in enumerate(CHANNELS[1:], start=1):
        channels[:, column] = parts[:, [PART[part] for part in _CHANNEL_PARTS[name]]].sum(axis=1)
    return channels
