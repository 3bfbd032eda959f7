"""One series over event time: the wanted fields of its last points as columns.

A point costs one list append when it arrives; columns are made when somebody looks, many points at once. Integers stay
exact (int64), so that differences of counters near 2^63 are exact too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from diagnosd.point import Point, Series

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Numbers = Ints | Floats

# At one sample a second this is 17 minutes: the window of 200 steps that a job is compared with, at 5 s a step.
KEEP = 1024
FIRST = 64
ABSENT = np.iinfo(np.int64).min  # no counter sends it: telemetry.md 1 sends unsigned values modulo 2^63


class Samples:
    """The wanted fields of one series; `kinds` maps each field to its type in the contract (i, f, b or s).

    Numbers are kept for the last KEEP points, of strings only the latest value. `append` takes points in order of time.
    """

    __slots__ = ("_columns", "_high", "_kinds", "_latest", "_low", "_pending", "_times", "append", "series", "wrong")

    def __init__(self, series: Series, kinds: Mapping[str, str]) -> None:
        self.series = series
        self.wrong = 0  # values whose type was not the contract's: dropped
        self._kinds = kinds
        self._pending: list[Point] = []
        self.append = self._pending.append
        self._times: Ints = np.empty(FIRST, np.int64)
        self._columns: dict[str, Numbers] = {}
        self._latest: dict[str, tuple[int, int | float | str | bool]] = {}
        self._low = self._high = 0

    @property
    def last(self) -> int:
        """Time of the newest point, ns; 0 before the first."""
        if self._pending:
            return self._pending[-1].time
        return int(self._times[self._high - 1]) if self._high else 0

    def numbers(self, field: str) -> tuple[Ints, Numbers]:
        """Times (ns) and values of the points that have this field; integers as int64, all else as float64."""
        self.settle()
        column = self._columns.get(field)
        if column is None:
            return np.empty(0, np.int64), np.empty(0, np.float64)
        times, values = self._times[self._low : self._high], column[self._low : self._high]
        present = values != ABSENT if values.dtype == np.int64 else ~np.isnan(values)
        return (times, values) if present.all() else (times[present], values[present])

    def latest(self, field: str) -> tuple[int, int | float | str | bool] | None:
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
        self._room(len(points))
        rows = slice(self._high, self._high + len(points))
        self._times[rows] = [point.time for point in points]
        for field, kind in self._kinds.items():
            if kind == "s":
                self._keep_latest(field, points)
            else:
                self._fill(field, kind, [point.fields.get(field) for point in points], rows)
        self._high = rows.stop
        self._low = max(self._low, self._high - KEEP)

    def _keep_latest(self, field: str, points: list[Point]) -> None:
        for point in reversed(points):
            if field in point.fields:
                self._latest[field] = (point.time, point.fields[field])
                return

    def _fill(self, field: str, kind: str, values: list[int | float | str | bool | None], rows: slice) -> None:
        column = self._columns.get(field)
        if column is None:
            if values.count(None) == len(values):
                return
            column = self._columns[field] = self._blank(kind)
        try:
            filled: Any = [ABSENT if v is None else v for v in values] if kind == "i" else values
            column[rows] = filled
        except (TypeError, ValueError, OverflowError):
            column[rows] = list(self._numbers_only(values, kind))

    def _numbers_only(self, values: Iterable[object], kind: str) -> Iterable[int | float]:
        for value in values:
            fits = -(2**63) <= value < 2**63 if isinstance(value, int) else kind != "i"
            if isinstance(value, (int, float)) and fits:
                yield value
            else:
                self.wrong += value is not None
                yield ABSENT if kind == "i" else np.nan

    def _blank(self, kind: str) -> Numbers:
        if kind == "i":
            return np.full(len(self._times), ABSENT, np.int64)
        return np.full(len(self._times), np.nan)

    def _room(self, count: int) -> None:
        """Make room for `count` more rows: grow up to twice KEEP, then move the kept rows to the front."""
        if self._high + count <= len(self._times):
            return
        kept = slice(self._low, self._high)
        old, size = self._columns, min(2 * KEEP, 2 * max(len(self._times), count + self._high - self._low))
        times = self._times[kept]
        self._times = np.empty(size, np.int64)
        self._times[: len(times)] = times
        self._columns = {field: self._blank("i" if values.dtype == np.int64 else "f") for field, values in old.items()}
        for field, values in old.items():
            self._columns[field][: len(times)] = values[kept]
        self._low, self._high = 0, len(times)
