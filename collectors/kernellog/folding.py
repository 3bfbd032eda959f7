"""What came again and again is told once, then counted: events of one fault, bounded in number and in memory.

The first line of a fault is an event at once. What else tells of it is counted, and told after REPEAT_S in one event
with `value`, their number; a fault that was quiet for QUIET_S is a new one. So the number of lines is the number of
events without a value, plus the sum of the values.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from diagnosd.point import Point, Series, Value
from diagnosd.wording import plain

SECOND = 1_000_000_000
REPEAT_S = 60
QUIET_S = 300  # in which an error and its echo come: Xid 79 and the same in words, each process on a GPU that is gone
LIMIT = 60  # events of one kind in LIMIT_S: every GPU of a node with some codes fits in, and no kind hides another
LIMIT_S = 60
HELD = 4096  # events that wait to be read
FAULTS = 4096  # remembered; the one that is longest quiet is forgotten


class Fault(NamedTuple):
    kind: str
    subject: str
    text: str
    code: int | None
    same: str


@dataclass(slots=True)
class _Fold:
    """One fault. Times in ns: `last` of its last line, `told` of when it was last told."""

    fault: Fault
    last: int
    told: int
    more: int = 0


class Folding:
    def __init__(self, host: str) -> None:
        self.untold = 0  # events over the limit, in all
        self._host = host
        self._folds: dict[tuple[str, str], _Fold] = {}
        self._ready: list[Point] = []
        self._times: dict[str, deque[int]] = {}  # of the last events of each kind
        self._taken: dict[Series, int] = {}  # time of the last event of a series: two events at one time are one point
        self._over = 0
        self._over_since = 0

    def add(self, fault: Fault, time_ns: int, now_ns: int) -> None:
        key = (fault.subject, fault.same if fault.same == "gone" else f"{fault.kind} {fault.same}")
        fold = self._folds.pop(key, None)
        if fold is None or time_ns - fold.last >= QUIET_S * SECOND:
            self._flush(fold)
            fold = _Fold(fault, time_ns, now_ns)
            self._tell(fault.kind, fault.subject, fault.text, fault.code, None, time_ns, now_ns)
        else:
            fold.more += 1
            fold.last = max(fold.last, time_ns)
            fold.fault = fault
        self._folds[key] = fold
        if len(self._folds) > FAULTS:
            self._flush(self._folds.pop(next(iter(self._folds))))

    def due(self, now_ns: int) -> list[Point]:
        """The events since the last call, in the order of their times."""
        for key, fold in list(self._folds.items()):
            waited = now_ns - fold.told
            if fold.more and not 0 <= waited < REPEAT_S * SECOND:  # a clock that was set back is no reason to wait
                self._flush(fold, now_ns)
            elif not fold.more and not -QUIET_S * SECOND < now_ns - fold.last < QUIET_S * SECOND:
                del self._folds[key]
        if self._over and not 0 <= now_ns - self._over_since < LIMIT_S * SECOND:
            text = f"more than {LIMIT} faults of one kind in a minute in the kernel log: {self._over} are only counted"
            over, self._over = float(self._over), 0
            self._ready.append(self._point("telemetry_gap", f"host:{self._host}", text, None, over, now_ns))
        ready, self._ready = self._ready, []
        return sorted(ready, key=lambda each: each.time)

    def gap(self, text: str, value: float, now_ns: int) -> None:
        self._tell("telemetry_gap", f"host:{self._host}", text, None, value, now_ns, now_ns)

    def _flush(self, fold: _Fold | None, now_ns: int | None = None) -> None:
        if fold is None or not fold.more:
            return
        now = fold.last if now_ns is None else now_ns
        times, fault = "once more" if fold.more == 1 else f"{fold.more} times more", fold.fault
        text = plain(f"{times}: {fault.text}")
        self._tell(fault.kind, fault.subject, text, fault.code, float(fold.more), fold.last, now)
        fold.more, fold.told = 0, now

    def _tell(
        self, kind: str, subject: str, text: str, code: int | None, value: float | None, time_ns: int, now_ns: int
    ) -> None:
        times = self._times.setdefault(kind, deque(maxlen=LIMIT))
        if (len(times) == LIMIT and 0 <= now_ns - times[0] < LIMIT_S * SECOND) or len(self._ready) >= HELD:
            self.untold += 1
            self._over_since = self._over_since if self._over else now_ns
            self._over += 1
            return
        times.append(now_ns)
        self._ready.append(self._point(kind, subject, text, code, value, time_ns))

    def _point(self, kind: str, subject: str, text: str, code: int | None, value: float | None, time_ns: int) -> Point:
        series = Series.of("diagnosd_event", host=self._host, kind=kind, subject=subject)
        time = max(time_ns, self._taken.pop(series, 0) + 1)
        self._taken[series] = time
        if len(self._taken) > FAULTS:
            del self._taken[next(iter(self._taken))]
        fields: dict[str, Value | None] = {"text": text, "code": code, "value": value}
        return Point(series, {name: each for name, each in fields.items() if each is not None}, time)
