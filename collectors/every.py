"""When something comes again that comes rarely."""

from __future__ import annotations


class Every:
    """Whether something is due that comes every so many seconds: at once, and the second time `early` seconds sooner.

    So many ticks, of about a second, are as good: half a second sooner is in time, and a clock may be set.
    """

    def __init__(self, seconds: float, early: float = 0.0) -> None:
        self._seconds = seconds
        self._early = early
        self._last: tuple[float, float] | None = None  # seconds, ticks

    def is_due(self, now_ns: int, tick: int) -> bool:
        now = now_ns / 1e9
        if self._last is None:
            self._last = now - self._early, tick - self._early
            return True
        seconds, ticks = now - self._last[0], tick - self._last[1]
        if 0 <= seconds < self._seconds - 0.5 and ticks < self._seconds:
            return False
        self._last = now, tick
        return True
