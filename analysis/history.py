"""A job's newest cycles, and how they compare: takes them from the trace as they are complete.

A cycle is a row. Where steps are so short that a hundred rows would be over before anything could be told of them,
some in a row make a row, as their mean: all that is said of rows further on then holds for steps of any length. A
checkpoint or an evaluation is a row of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, nan

import numpy as np
import numpy.typing as npt

from diagnosd.analysis.baseline import CHANNEL, CHANNELS
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
Columns = dict[str, npt.NDArray[np.generic]]
Each = Callable[[int, Floats, float, bool, int], None]  # number, channels, work, whether it may be judged, steps

KEEP = 1024  # rows: five windows of the baseline
# Of a row, at the least: the 100 rows in which an onset is looked for must reach over the 5 s that it must have lasted,
# and the ticks that must have agreed; and 60 rows hold two samples of what is read every two seconds.
ROW_S = 0.1
LOST_S = 10.0  # what a rank has not sent so long after the others will not come: three times the lateness
REALIGN = 50  # cycles between two looks at the clocks: crystals drift apart by a millisecond a minute
ALIGNED_BY = 200  # steps: their median knows the offset to a tenth of what single meetings scatter by
# A rank that sent no step for 30 heartbeats, and none of the last few that others sent, is left out until it does.
SILENT_S, SILENT_STEPS = 30.0, 3
PER_RANK = {"own": 0.0, "late": nan, "queue": nan, "queue_size": nan, "workers": nan, "compute_per_work": nan}
_MINOR = 0.01  # of a cycle: a checkpoint or an evaluation that takes less does not change what kind of step it is

_CHANNEL_PARTS = {"load": ("data_wait",), "transfer": NETWORK, "compute": COMPUTE, "host": HOST}
_SAVES = [OWN.index("checkpoint"), OWN.index("eval")]


class History:
    """Arrays over the kept rows; `first` is the number of the oldest, numbers count from the first row of all."""

    def __init__(self, ranks: tuple[int, ...], hosts: tuple[str, ...], origin: int) -> None:
        self.ranks, self.hosts, self.origin = ranks, hosts, origin
        self.first = 0
        self.count = 0
        self.steps = 0  # cycles taken, several of which may be a row
        self.newest = 0  # ns: end of the newest step taken
        self.number = 0  # and the framework's number of it
        self._complete = 0  # ns: end of the newest step that all ranks had sent
        self.noise = 0.0  # s, that the clocks of hosts differ by from step to step; infinite while they are not aligned
        self._offset: Floats = np.zeros(len(ranks))
        self._aligned = -REALIGN
        self._a_row = 1  # cycles
        self._split: Floats | None = None  # s in the channels but total and load, of the last row that was timed
        self._rest: Columns = {}  # cycles that do not make a row yet
        size, across = 64, len(ranks)
        self._arrays: Columns = {
            "end": np.empty(size),
            "steps": np.empty(size),
            "number": np.empty(size),
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
        """Numbers of the kept rows in this range."""
        return np.arange(max(since, self.first), self.count if until is None else min(until, self.count))

    def start_of(self, number: int) -> float:
        """When a row began, in seconds since the origin."""
        one = np.array([number])
        return float(self.floats("end", one)[0] - self.seconds(one)[0])

    def seconds(self, numbers: Ints) -> Floats:
        """What rows took, all their cycles together."""
        return self.floats("duration", numbers) * self.floats("steps", numbers)

    def take(self, steps: Steps, now: int, each: Each) -> None:
        """Add the cycles of the steps that came since, and call `each` of the new rows."""
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
        self.newest, self.number = int(ended[ready[-1]]), int(steps.number[ready[-1]])
        if len(cycles.row):
            self._complete = int(ended[cycles.row[-1] + rows.start])
            self._append(cycles, steps, rows.start, each)

    def go_on_with(self, ranks: tuple[int, ...], hosts: tuple[str, ...]) -> None:
        """Some ranks fell silent, or came: the job and its rows go on, and so does what was found.

        Of the time before it came a rank is taken to have worked as its peers did. The steps that were not complete
        because of one that fell silent are taken again, without it.
        """
        old = {rank: column for column, rank in enumerate(self.ranks)}
        for columns in (self._arrays, self._rest):
            for name in PER_RANK.keys() & columns.keys():
                columns[name] = for_ranks(
                    columns[name].astype(float), [old.get(rank) for rank in ranks], PER_RANK[name]
                )
            if columns:
                new = {column: ranks.index(rank) for rank, column in old.items() if rank in ranks}
                columns["last"] = np.array([new.get(int(column), -1) for column in columns["last"]], np.int64)
        self.ranks, self.hosts, self.newest = ranks, hosts, self._complete
        self._offset, self._aligned = np.zeros(len(ranks)), self.count - REALIGN

    def _align(self, steps: Steps) -> None:
        if self.count - self._aligned < REALIGN and self.count > REALIGN:
            return
        self._aligned = self.count
        _, leave = meeting(Phases.of(steps, slice(max(len(steps) - ALIGNED_BY, 0), len(steps)), self.origin))
        self._offset, self.noise = align(leave, self.hosts)

    def _append(self, cycles: Cycles, steps: Steps, start: int, each: Each) -> None:
        self.steps += len(cycles.row)
        self._set_row(float(np.median(cycles.duration)))
        columns = self._columns(cycles, steps, cycles.row + start)
        if self._rest:
            columns = {name: np.concatenate([self._rest[name], values]) for name, values in columns.items()}
            self._rest = {}
        if self._a_row > 1:
            columns = self._in_rows(columns)
        count = len(columns["end"])
        self._make_room(count)
        place = slice(self.count - self.first, self.count - self.first + count)
        for name, array in self._arrays.items():
            array[place] = columns[name]
        channels = self._channels(columns)
        for index, (work, usable, size) in enumerate(
            zip(*(columns[n] for n in ("work", "usable", "steps")), strict=True)
        ):
            self.count += 1
            each(self.count - 1, channels[index], float(work), bool(usable), int(size))

    def _channels(self, columns: Columns) -> Floats:
        """[C,len(CHANNELS)] seconds; where no collective of a row was timed, split as in the last that had one."""
        channels, split = _channels(columns["parts"], columns["duration"]), CHANNEL["transfer"]
        for row, timed, usable, mixed in zip(
            channels, *(columns[n] for n in ("timed", "usable", "mixed")), strict=True
        ):
            if timed and usable:
                self._split = row[split:].copy()
            elif mixed and self._split is not None:
                row[split:] = self._split
        return channels

    def _columns(self, cycles: Cycles, steps: Steps, rows: Ints) -> Columns:
        """What is kept of each cycle."""
        columns: Columns = {name: getattr(cycles, name) for name in ("end", "duration", "parts", "own", "late", "last")}
        columns |= {name: steps.column(name)[rows] for name in ("queue", "queue_size", "workers")}
        work = _work(steps, rows)
        mixed = cycles.own[..., OWN.index("mixed")] > 0
        compute = np.where(mixed, nan, cycles.own[..., [OWN.index(name) for name in COMPUTE]].sum(axis=-1))
        size = steps.column("sync_bytes")[rows]
        usable = _usable(cycles, steps, rows)
        # Ranks that met by clocks which nobody has compared yet: who was last, and when, is not known.
        usable &= np.isfinite(self.noise) | np.isnan(cycles.late).any(axis=1)
        return columns | {
            "steps": np.ones(len(rows)),
            "number": steps.number[rows],
            "timed": cycles.timed,
            "mixed": mixed.any(axis=1),
            "usable": usable,
            "work": work.sum(axis=1),
            "compute_per_work": compute / np.where(work > 0, work, nan),
            "sync_bytes": np.where(np.isnan(size), 0.0, size).max(axis=1),
        }

    def _set_row(self, duration: float) -> None:
        """How many cycles of this duration (s) make a row; later only where it is out by more than a factor of two."""
        fits = max(1, ceil(ROW_S / max(duration, 1e-9)))  # times are in ns
        if self.count <= REALIGN or not self._a_row <= 2 * fits <= 4 * self._a_row:
            self._a_row = fits

    def _in_rows(self, columns: Columns) -> Columns:
        """The rows that these cycles make; those that do not make one yet are left for later."""
        alone = ~columns["usable"].astype(bool) | (columns["own"].astype(float)[..., _SAVES] > 0).any(axis=(1, 2))
        starts, is_whole = _groups(alone.tolist(), columns["number"].tolist(), self._a_row)
        if not is_whole:
            self._rest = {name: values[starts[-1] :] for name, values in columns.items()}
            columns = {name: values[: starts[-1]] for name, values in columns.items()}
            starts = starts[:-1]
        return _means(columns, starts) if starts else columns

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
    recent = (steps.end[-SILENT_STEPS:] > 0).any(axis=0)
    heard = np.flatnonzero((newest >= newest.max() - int(SILENT_S * 1e9)) | recent)
    return steps if len(heard) == len(newest) else steps.of(heard)


def _is_settled(end: Ints) -> Bools:
    """[S] whether each rank has sent the step, or a later one: then it was lost."""
    later = np.maximum.accumulate(end[::-1] > 0, axis=0)[::-1]
    settled: Bools = np.logical_and.reduce(later, axis=1)
    return settled


def for_ranks(values: Floats, places: list[int | None], unknown: float) -> Floats:
    """[N,R,...] the columns at these places; where there is none, what is unknown, or the median of those there are."""
    fresh = np.full((len(values), len(places), *values.shape[2:]), unknown)
    for column, place in enumerate(places):
        if place is not None:
            fresh[:, column] = values[:, place]
        elif not np.isnan(unknown):
            fresh[:, column] = np.median(values, axis=1)
    return fresh


def _groups(alone: list[bool], numbers: list[int], size: int) -> tuple[list[int], bool]:
    """Where groups of so many steps begin, those alone apart; and whether the last of them is whole.

    By the steps' own numbers, so that the groups are the same whenever the analysis began.
    """
    starts: list[int] = []
    for place, (apart, number) in enumerate(zip(alone, numbers, strict=True)):
        if not place or apart or alone[place - 1] or number // size != numbers[place - 1] // size:
            starts.append(place)
    return starts, alone[-1] or (numbers[-1] + 1) % size == 0


def _means(columns: Columns, starts: list[int]) -> Columns:
    """A row for each group of cycles that begins at `starts`.

    Where the collectives of only some were timed, those alone say where the time went.
    """
    count = np.diff([*starts, len(columns["end"])])
    timed = columns["timed"].astype(bool)
    tells = timed | ~np.repeat(np.logical_or.reduceat(timed, starts), count)
    means: Columns = {}
    for name, values in columns.items():
        each = count.reshape(-1, *[1] * (values.ndim - 1))
        means[name] = np.add.reduceat(values.astype(float), starts) / each
    for name in ("parts", "own", "late", "compute_per_work"):
        values = columns[name].astype(float)
        of_those = tells.reshape(-1, *[1] * (values.ndim - 1))
        total = np.add.reduceat(np.where(of_those, values, 0.0), starts)
        means[name] = total / np.add.reduceat(of_those.astype(float), starts)
    for name in ("queue", "queue_size", "workers"):
        means[name] = np.round(means[name].astype(float))  # the queue is empty where it mostly was
    means["end"], means["number"] = columns["end"][np.cumsum(count) - 1], columns["number"][starts]
    means["steps"] = count.astype(float)
    means["last"] = _most_often(columns["last"][tells], (np.cumsum(tells) - tells)[starts].tolist())
    means["timed"] = np.logical_or.reduceat(timed, starts)
    means["usable"] = np.logical_and.reduceat(columns["usable"], starts)
    return means | {"sync_bytes": np.maximum.reduceat(columns["sync_bytes"], starts)}


def _most_often(last: npt.NDArray[np.generic], starts: list[int]) -> Ints:
    """Who was last in most cycles of each group; -1 where nobody can say."""
    groups = np.split(last.astype(np.int64), starts[1:])
    return np.array([int(np.bincount(group + 1).argmax()) - 1 for group in groups], np.int64)


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


def _channels(parts: npt.NDArray[np.generic], duration: npt.NDArray[np.generic]) -> Floats:
    """[C,len(CHANNELS)] seconds."""
    channels = np.empty((len(parts), len(CHANNELS)))
    channels[:, 0] = duration
    for column, name in enumerate(CHANNELS[1:], start=1):
        channels[:, column] = parts[:, [PART[part] for part in _CHANNEL_PARTS[name]]].sum(axis=1)
    return channels
