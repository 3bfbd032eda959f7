"""One series over event time: the wanted fields of its last points as columns.

A point costs one list append when it arrives; columns are made when somebody looks, many points at once. Integers stay
exact (int64), so that differences of counters near 2^63 are exact too. Types are as the contract says: whoever made the
points saw to that (diagnosd.point).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from diagnosd.point import Point, Series, Value

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Numbers = Ints | Floats

# At one sample a second this is 17 minutes: the window of 200 steps that a job is compared with, at 5 s a step.
KEEP = 1024
SLACK = KEEP // 4  # rows that come before the kept ones are moved to the front
FIRST = 64
ABSENT = -(2**63)  # no counter sends it: telemetry.md 1 sends unsigned values modulo 2^63


class Samples:
    """The wanted fields of one series; `kinds` maps each field to its type in the contract (i, f, b or s).

    Numbers are kept for the last KEEP points, of strings only the latest value. `append` takes points in order of time.
    """

    __slots__ = (
        "_float_names", "_floats", "_high", "_int_names", "_ints", "_latest", "_low", "_pending", "_strings", "_times",
        "append", "series", "wrong",
    )  # fmt: skip

    def __init__(self, series: Series, kinds: Mapping[str, str]) -> None:
        self.series = series
        self._int_names = [name for name, kind in kinds.items() if kind == "i"]
        self._float_names = [name for name, kind in kinds.items() if kind in "fb"]
        self._strings = [name for name, kind in kinds.items() if kind == "s"]
        self._pending: list[Point] = []
        self.append = self._pending.append
        self._low = self._high = 0
        self._times: Ints = np.empty(0, np.int64)
        self._ints: Ints = np.empty((0, len(self._int_names)), np.int64)
        self._floats: Floats = np.empty((0, len(self._float_names)))
        self._latest: dict[str, tuple[int, Value]] = {}

    @property
    def last(self) -> int:
        """Time of the newest point, ns; 0 before the first."""
        if self._pending:
            return self._pending[-1].time
        return int(self._times[self._high - 1]) if self._high else 0

    def numbers(self, field: str) -> tuple[Ints, Numbers]:
        """Times (ns) and values of the points that have this field; integers as int64, all else as float64."""
        self.settle()
        rows = slice(self._low, self._high)
        values: Numbers
        if field in self._int_names:
            values = self._ints[rows, self._int_names.index(field)]
            present = values != ABSENT
        elif field in self._float_names:
            values = self._floats[rows, self._float_names.index(field)]
            present = ~np.isnan(values)
        else:
            return np.empty(0, np.int64), np.empty(0)
        times = self._times[rows]
        return (times, values) if present.all() else (times[present], values[present])

    def latest(self, field: str) -> tuple[int, Value] | None:
        """Time and value of the newest point that has this field, also of strings."""
        self.settle()
        if field in self._latest:
            return self._latest[field]
        times, values = self.numbers(field)
        return (int(times[-1]), values[-1].item()) if times.size else None

    def settle(self) -> None:
        """Move what arrived into the columns."""
        if not self._pending:
            return
        points = self._pending[-KEEP:]
        self._pending.clear()
        self._make_room(len(points))
        rows = slice(self._high, self._high + len(points))
        self._times[rows] = [point.time for point in points]
        fields = [point.fields for point in points]
        if self._int_names:
            self._ints[rows] = block(fields, self._int_names, np.dtype(np.int64), ABSENT)
        if self._float_names:
            self._floats[rows] = block(fields, self._float_names, np.dtype(np.float64), np.nan)
        for name in self._strings:
            found = next((point for point in reversed(points) if name in point.fields), None)
            if found is not None:
                self._latest[name] = (found.time, found.fields[name])
        self._high = rows.stop
        self._low = max(self._low, self._high - KEEP)

    def _make_room(self, count: int) -> None:
        """Room for `count` more rows: grow, or move the kept rows to the front."""
        if self._high + count <= len(self._times):
            return
        kept = slice(max(self._low, self._high + count - KEEP), self._high)
        length = max(0, kept.stop - kept.start)
        size = max(FIRST, min(KEEP + SLACK, 2 * (length + count)))
        times, ints, floats = self._times[kept], self._ints[kept], self._floats[kept]
        self._times = np.empty(size, np.int64)
        self._ints = np.empty((size, len(self._int_names)), np.int64)
        self._floats = np.empty((size, len(self._float_names)))
        self._times[:length], self._ints[:length], self._floats[:length] = times, ints, floats
        self._low, self._high = 0, length


def block(fields: Sequence[Mapping[str, Value]], names: Sequence[str], dtype: np.dtype[Any], absent: float) -> Any:
    """The named values of each point as a row, `absent` where it lacks one. Points of one series mostly have the same
    fields, and are then read without asking for each value whether it is there.
    """
    present = [name for name in names if name in fields[0]]
    missing = [name for name in names if name not in fields[0]]
    shape = (len(fields), len(names))
    try:
        if not present or not all(each.keys().isdisjoint(missing) for each in fields):
            raise KeyError
        rows = map(itemgetter(*present), fields)
        found = np.fromiter(chain.from_iterable(rows) if len(present) > 1 else rows, dtype, len(fields) * len(present))
    except KeyError:
        every = (each.get(name, absent) for each in fields for name in names)
        return np.fromiter(every, dtype, len(fields) * len(names)).reshape(shape)
    found = found.reshape(len(fields), len(present))
    if not missing:
        return found
    whole = np.full(shape, absent, dtype)
    whole[:, [names.index(name) for name in present]] = found
    return whole
