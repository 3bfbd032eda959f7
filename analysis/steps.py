"""The steps of one attempt of a job as aligned arrays: a row a step, a column a rank.

Ranks send their steps one by one and not at the same time; some join late, some lose a step, some send one twice. The
grid brings the same step of all ranks into one row, by its number. Where a number goes back although the attempt did
not rise (a framework that counts anew each epoch), a new lap begins, and the rows go on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from diagnosd.point import Point, Value

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[np.int8]
Cells = tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]  # row and column of each arrival

KEEP_STEPS = 2000  # ten times the 200 steps that a job is compared with
CELLS = 1 << 20  # of one column: 8 MiB. Above 524 ranks fewer steps are kept, never less than LEAST_STEPS
LEAST_STEPS = 400
FIRST_ROWS = 64
LAP = 1 << 40  # a step's key is lap * LAP + number

KINDS = ("train", "warmup", "compile", "eval", "checkpoint")
CLOCKS = ("host", "device")
SOURCES = ("inferred", "log", "probe")  # the better one last: a rank's steps come from the best source it has

# The numbers of diagnosd_step that are kept, in SI units; sync_enter and sync_exit as seconds since the origin.
COLUMNS = (
    "duration", "data_wait", "h2d", "forward", "backward", "optimizer", "comm", "checkpoint", "eval", "blocked",
    "other", "device", "device_gap", "compute", "tokens", "samples", "tokens_sq", "queue", "queue_size", "workers",
    "sync_bytes",
)  # fmt: skip
INSTANTS = ("sync_enter", "sync_exit")


@dataclass(frozen=True, slots=True)
class Steps:
    """A view of the steps so far, oldest first; S steps, R ranks. It is good until the trace takes more points.

    `kind` and `clock` are codes into KINDS and CLOCKS, `sync_group` into `groups`; -1 where absent.
    """

    attempt: int
    number: Ints  # [S] the framework's step number; falls only where a new lap begins
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    end: Ints  # [S,R] ns; 0 where a rank has not sent this step
    kind: Codes  # [S,R]
    clock: Codes  # [S,R]
    sync_group: Codes  # [S,R]
    groups: tuple[str, ...]
    _columns: dict[str, Floats]

    def __len__(self) -> int:
        return len(self.number)

    def has(self, name: str) -> bool:
        """Whether any rank ever sent this field."""
        return name in self._columns

    def column(self, name: str) -> Floats:
        """[S,R] in SI units, NaN where absent; sync_enter and sync_exit in seconds since the trace's origin."""
        values = self._columns.get(name)
        return np.full(self.end.shape, np.nan) if values is None else values

    @property
    def sync_enter(self) -> Floats:
        return self.column("sync_enter")

    @property
    def sync_exit(self) -> Floats:
        return self.column("sync_exit")

    @property
    def seen(self) -> npt.NDArray[np.bool_]:
        """[S] whether every rank has sent this step."""
        return np.asarray((self.end > 0).all(axis=1))


class _Arrival(NamedTuple):
    key: int
    rank: int
    host: str
    point: Point


class Grid:
    """Collects the diagnosd_step points of one attempt; `origin` (ns) is the zero of sync_enter and sync_exit."""

    def __init__(self, attempt: int, origin: int) -> None:
        self.attempt = attempt
        self.duplicates = 0
        self.wrong = 0  # fields that were no numbers: dropped
        self._origin = origin
        self._keys: Ints = np.empty(FIRST_ROWS, np.int64)
        self._low = self._high = 0
        self._ranks: Ints = np.empty(0, np.int64)
        self._hosts: dict[int, str] = {}
        self._arrays: dict[str, npt.NDArray[np.generic]] = {"end": np.zeros((FIRST_ROWS, 0), np.int64)}
        self._groups: list[str] = []
        self._newest: dict[int, int] = {}  # rank -> key of its newest step
        self._source: dict[int, int] = {}
        self._pending: list[_Arrival] = []

    @property
    def keep(self) -> int:
        return max(LEAST_STEPS, min(KEEP_STEPS, CELLS // max(1, len(self._ranks))))

    def add(self, rank: int, host: str, source: str, number: int, point: Point) -> None:
        quality = SOURCES.index(source) if source in SOURCES else 0
        if quality < self._source.get(rank, 0) or not 0 <= number < LAP:
            return
        self._source[rank] = quality
        newest = self._newest.get(rank)
        if newest is None:
            key = max(self._newest.values(), default=0) // LAP * LAP + number
        else:
            key = newest // LAP * LAP + number
            if key < newest:
                key += LAP
            self.duplicates += key == newest
        self._newest[rank] = key
        self._pending.append(_Arrival(key, rank, host, point))

    def steps(self) -> Steps:
        self.settle()
        rows = slice(self._low, self._high)
        shape = (self._high - self._low, len(self._ranks))
        arrays = {name: array[rows] for name, array in self._arrays.items()}
        codes = {name: arrays.pop(name, np.full(shape, -1, np.int8)) for name in ("kind", "clock", "sync_group")}
        end = arrays.pop("end")
        ranks = tuple(self._ranks.tolist())
        hosts = tuple(self._hosts[rank] for rank in ranks)
        number = self._keys[rows] % LAP
        return Steps(self.attempt, number, ranks, hosts, end, groups=tuple(self._groups), _columns=arrays, **codes)  # type: ignore[arg-type]

    def settle(self) -> None:
        """Bring what arrived into the rows."""
        if not self._pending:
            return
        arrivals, self._pending = self._pending, []
        self._hosts.update((a.rank, a.host) for a in arrivals)
        self._make_room(arrivals)
        oldest = self._keys[self._low]
        arrivals = [a for a in arrivals if a.key >= oldest]
        rows = self._low + np.searchsorted(self._keys[self._low : self._high], [a.key for a in arrivals])
        cells = (rows, np.searchsorted(self._ranks, [a.rank for a in arrivals]))
        self._arrays["end"][cells] = [a.point.time for a in arrivals]
        self._fill(cells, [a.point.fields for a in arrivals])

    def _make_room(self, arrivals: list[_Arrival]) -> None:
        ranks = np.union1d(self._ranks, np.fromiter({a.rank for a in arrivals}, np.int64))
        known = self._keys[self._low : self._high]
        fresh = np.setdiff1d(np.fromiter({a.key for a in arrivals}, np.int64), known)
        in_order = not known.size or not fresh.size or fresh[0] > known[-1]
        if len(ranks) > len(self._ranks) or not in_order or self._high + fresh.size > len(self._keys):
            self._rebuild(np.union1d(known, fresh), ranks)
        else:
            self._keys[self._high : self._high + fresh.size] = fresh
            self._high += fresh.size
        self._low = max(self._low, self._high - self.keep)

    def _rebuild(self, keys: Ints, ranks: Ints) -> None:
        """Lay the grid out anew for these rows and columns; what stood there keeps its place by key and rank."""
        old_keys, old_arrays, old_rows = self._keys[self._low : self._high], self._arrays, slice(self._low, self._high)
        columns = np.searchsorted(ranks, self._ranks)
        self._ranks = ranks
        keys = keys[-self.keep :]
        stay = old_keys >= keys[0]
        rows = np.searchsorted(keys, old_keys[stay])
        size = max(FIRST_ROWS, min(2 * self.keep, 2 * len(keys)))
        self._keys = np.empty(size, np.int64)
        self._keys[: len(keys)] = keys
        self._low, self._high = 0, len(keys)
        self._arrays = {name: _blank(name, size, len(ranks)) for name in old_arrays}
        for name, array in old_arrays.items():
            self._arrays[name][np.ix_(rows, columns)] = array[old_rows][stay]

    def _fill(self, cells: Cells, fields: list[dict[str, Value]]) -> None:
        for name in COLUMNS:
            self._put(name, cells, [f.get(name) for f in fields])
        for name in INSTANTS:
            self._put(name, cells, [self._since_origin(f.get(name)) for f in fields])
        for name, words in (("kind", KINDS), ("clock", CLOCKS)):
            self._put(name, cells, [_code(f.get(name), words) for f in fields])
        self._put("sync_group", cells, [self._group(f.get("sync_group")) for f in fields])

    def _put(self, name: str, cells: Cells, values: list[Value | None]) -> None:
        if values.count(None) == len(values):
            return
        array = self._arrays.get(name)
        if array is None:
            array = self._arrays[name] = _blank(name, len(self._keys), len(self._ranks))
        if name in _CODED:
            values = [-1 if value is None else value for value in values]
        try:
            array[cells] = np.array(values, array.dtype)
        except (TypeError, ValueError, OverflowError):
            array[cells] = list(self._numbers_only(values))

    def _numbers_only(self, values: Iterable[Value | None]) -> Iterable[float]:
        for value in values:
            usable = isinstance(value, (int, float))
            self.wrong += value is not None and not usable
            yield float(value) if usable and value is not None else np.nan

    def _since_origin(self, instant: Value | None) -> Value | None:
        return (instant - self._origin) / 1e9 if isinstance(instant, int) else None

    def _group(self, name: Value | None) -> Value | None:
        """Its code; a job has few groups, the 127th and later share the last code."""
        if not isinstance(name, str):
            return None
        if name not in self._groups and len(self._groups) < np.iinfo(np.int8).max:
            self._groups.append(name)
        return self._groups.index(name) if name in self._groups else len(self._groups) - 1


_CODED = ("kind", "clock", "sync_group")


def _blank(name: str, rows: int, ranks: int) -> npt.NDArray[np.generic]:
    if name == "end":
        return np.zeros((rows, ranks), np.int64)
    if name in _CODED:
        return np.full((rows, ranks), -1, np.int8)
    return np.full((rows, ranks), np.nan)


def _code(word: Value | None, words: tuple[str, ...]) -> Value | None:
    return words.index(word) if isinstance(word, str) and word in words else None
