"""One collector, read again and again: what its reads give and cost, how often they may come, and what fails."""

from __future__ import annotations

import logging
import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from diagnosd.collectors import Collector
from diagnosd.point import Point, encode, point

log = logging.getLogger("diagnosd.pace")

# What one collector may take of one core: with all of them it stays below a tenth of one, on nodes that have some
# hundred. A read of /proc takes under 1 ms; one that takes 50 comes every 5 s. At the longest every minute: a reader
# holds a state for 90 s (telemetry.md 1).
BUDGET, LONGEST = 0.01, 60
SELF_EVERY = 10  # seconds between two points about each collector
AGAIN_S = 3600.0  # between two times that the same is told of one collector: what comes and goes is not worth a disk


class Batch(NamedTuple):
    """Points of one read, encoded once."""

    points: list[Point]
    lines: bytes


class Paced:
    """`duty` is the share of the time in which a read may be under way: a device that is asked answers nobody else.

    Without one only the processor's time counts.
    """

    def __init__(self, collector: Collector, duty: float = math.inf) -> None:
        self.collector = collector
        self.name = collector.name
        self.seconds = 0.0  # of its last read
        self.apart = 0.0  # seconds between two reads that keep BUDGET and duty
        self.up = True
        self._duty = duty
        self._failures = 0
        self._last_apart = 0.0
        self._told: dict[str, float] = {}  # when, monotonic

    @property
    def every(self) -> int:
        """Seconds between two reads: what the collector says, or more where its reads cost more than they may."""
        return max(self.collector.every, min(math.ceil(self.apart), LONGEST) if self.apart > 1 else 0)

    @property
    def errors(self) -> int:
        return self._failures + self.collector.errors

    def is_news(self, what: str) -> bool:
        """Whether this was not told in the last AGAIN_S; it counts as told then."""
        now = time.monotonic()
        if now - self._told.get(what, -math.inf) < AGAIN_S:
            return False
        self._told[what] = now
        return True

    @property
    def missing(self) -> str | None:
        """After the first read: what is not here, and which path was tried."""
        return getattr(self.collector, "missing", None)

    def close(self) -> None:
        """Has it let go of what it has open."""
        with suppress(Exception):  # it is the kernel's in a moment
            getattr(self.collector, "close", lambda: None)()

    def read(self, now_ns: int) -> Batch:
        """What can be said of it now; of a read that fails nothing, counted."""
        try:
            points = self._timed(now_ns)
        except Exception as error:  # noqa: BLE001 - a file that is not as it should be, or a mistake of ours
            self._failed(error)
            return Batch([], b"")
        try:
            batch = Batch(points, encode(points))
        except ValueError as error:
            self._failed(error)
            return _sayable(points)
        self.up = True
        return batch

    def heartbeat(self, host: str, now_ns: int) -> Point:
        fields = {"up": int(self.up), "seconds": self.seconds, "errors": self.errors}
        return point("diagnosd_agent", {"host": host, "collector": self.name}, fields, now_ns)

    def _timed(self, now_ns: int) -> list[Point]:
        began, before = time.perf_counter(), time.thread_time()
        try:
            return self.collector.read(now_ns)
        finally:
            self.seconds = time.perf_counter() - began
            self._pay(time.thread_time() - before)

    def _pay(self, cpu: float) -> None:
        """The dearer of the last two reads is forgiven: one may be an accident."""
        before = self.every
        apart = max(cpu / BUDGET, self.seconds / self._duty)
        self.apart, self._last_apart = min(apart, self._last_apart), apart
        if self.every > before == self.collector.every and self.is_news("dear"):
            text = "%s takes %.0f ms a read, %.0f of them of a processor: it is read less often, now every %d s"
            log.warning(text, self.name, self.seconds * 1e3, cpu * 1e3, self.every)

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        if self.up and self.is_news("fails"):
            log.warning("%s cannot be read now: %s: %s", self.name, type(error).__name__, error)
        self.up = False


def _sayable(points: list[Point]) -> Batch:
    """Those that can be written: one that cannot does not cost the others."""
    kept, lines = [], []
    for each in points:
        with suppress(ValueError):
            lines.append(encode([each]))
            kept.append(each)
    return Batch(kept, b"".join(lines))


def gap(host: str, text: str, now_ns: int, value: float | None = None) -> Point:
    """The event of what is not known of a host; `value` counts what was lost."""
    tags = {"host": host, "kind": "telemetry_gap", "subject": f"host:{host}"}
    return point("diagnosd_event", tags, {"text": text, "value": value}, now_ns)


def resident_bytes() -> int | None:
    """Of this process."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None
