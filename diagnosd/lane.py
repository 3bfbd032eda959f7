"""A collector that reads only /proc, on a thread of its own: one that hangs holds up nobody."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from diagnosd.collectors import Collector
from diagnosd.pace import Batch, Paced

log = logging.getLogger("diagnosd.lane")


class Lane:
    def __init__(self, collector: Collector, put: Callable[[Batch], None]) -> None:
        self.paced = Paced(collector)
        self.due = 0  # the tick of its next read
        self.abandoned = False
        self._asked_at = 0.0  # monotonic
        self._idle = threading.Event()
        self._idle.set()
        self._ending = False
        self._put = put
        self._requests: SimpleQueue[int] = SimpleQueue()
        threading.Thread(target=self._serve, name=collector.name, daemon=True).start()

    @property
    def collector(self) -> Collector:
        return self.paced.collector

    def waited(self) -> float:
        """Seconds since the read that is under way was asked for; 0 while none is."""
        return 0.0 if self._idle.is_set() else time.monotonic() - self._asked_at

    def idle(self, patience: float) -> bool:
        """Whether its read ends within so many seconds, if one is under way; at once where it is abandoned."""
        return self._idle.wait(0.0 if self.abandoned else max(0.0, patience))

    def ask(self, now_ns: int) -> None:
        self._asked_at = time.monotonic()
        self._idle.clear()
        self._requests.put(now_ns)

    def end(self, now_ns: int) -> None:
        """Has it let go of what it has open, and asks for what it still holds."""
        self._ending = True
        self.ask(now_ns)

    def _serve(self) -> None:
        self._read()
        if self.paced.missing:
            log.info(self.paced.missing)
        while True:
            self._read()

    def _read(self) -> None:
        now_ns = self._requests.get()
        if self._ending:
            self.paced.close()
        batch = self.paced.read(now_ns)
        if batch.points:
            self._put(batch)
        self._idle.set()
