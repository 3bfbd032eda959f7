"""Where points go: a ring between those who read and the sinks, and the thread that gives to the sinks."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from diagnosd import __version__
from diagnosd.pace import Batch
from diagnosd.recording import RecordingError, Writer, not_made
from diagnosd.wording import said

log = logging.getLogger("diagnosd.sinks")

STOP_S = 5.0  # from SIGTERM to the last byte (design.md 10)
GATHER_S = 0.1  # a tick's reads end within some milliseconds of each other: one write for all of them
RING = 200_000  # points, about 100 MB: some minutes of a busy node, for a disk that hesitates


class Sink(Protocol):
    """Fed from a thread of its own; may block. `lost` counts the points that it was given and could not keep."""

    @property
    def lost(self) -> int: ...
    def take(self, batches: Sequence[Batch]) -> None: ...
    def close(self) -> None: ...


class Ring:
    """What waits for the sinks. When it is full the oldest goes, counted."""

    def __init__(self, size: int = RING) -> None:
        self.dropped = 0
        self._size = size
        self._held = 0
        self._batches: deque[Batch] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, batch: Batch) -> None:
        with self._changed:
            self._batches.append(batch)
            self._held += len(batch.points)
            while self._held > self._size:
                lost = len(self._batches.popleft().points)
                self._held -= lost
                self.dropped += lost
            self._changed.notify()

    def take(self) -> list[Batch]:
        """All that is there; waits for something. Nothing once it is closed and empty."""
        with self._changed:
            while not self._batches and not self._closed:
                self._changed.wait()
            if not self._closed:
                self._changed.wait_for(lambda: self._closed, GATHER_S)
            taken = list(self._batches)
            self._batches.clear()
            self._held = 0
            return taken

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()


def recording_of(name: str, host: str) -> Path:
    """The file for this host: the name itself, or HOST.lp.zst in it where it is a folder or ends in a slash.

    The folder is made where it alone is missing. RecordingError where it cannot be.
    """
    path = Path(name)
    if not path.is_dir() and not name.endswith("/"):
        return path
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise RecordingError(f"{name}: cannot be made: {not_made(path, error)}") from error
    return path / f"{host}.lp.zst"


class Recorder:
    """A recording as a sink: whole ticks, flushed as they come."""

    def __init__(self, path: Path, **header: str) -> None:
        """RecordingError where it cannot be written. One that is there already is continued."""
        self._path = path
        self._writer = Writer(path, by=f"diagnosd {__version__}", **header)
        self.lost = 0

    def take(self, batches: Sequence[Batch]) -> None:
        try:
            self._writer.write(b"".join(batch.lines for batch in batches))
            self._writer.flush()
        except RecordingError as error:
            if not self.lost:
                log.warning("%s; what comes meanwhile is not recorded", error)
            self.lost += _count(batches)

    def close(self) -> None:
        with suppress(RecordingError):  # what take() gave it is flushed already
            self._writer.close()
        if self.lost:
            log.warning("%s lacks %d points that could not be written", self._path, self.lost)


class Feeder:
    """The thread that gives to the sinks what is in the ring. A sink that fails gets nothing more; the others go on."""

    def __init__(self, ring: Ring, sinks: Sequence[Sink]) -> None:
        self._ring = ring
        self._all = sinks
        self._sinks = list(sinks)  # those that are given something
        self._failed = 0
        self._undelivered = 0
        self._lock = threading.Lock()  # of the four below; never held while a sink is asked
        self._hand: list[Batch] = []  # what is being given
        self._waiting: list[Sink] = []  # for that
        self._busy: Sink | None = None  # with that
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._feed, name="sinks", daemon=True)
        self._thread.start()

    def start(self) -> None:
        self._begun.set()

    @property
    def lost(self) -> int:
        """Points that a sink was given, or should have been, and does not have."""
        return self._undelivered + sum(sink.lost for sink in self._all)

    def finish(self, deadline: float) -> bool:
        """Whether every sink has everything and is closed by then (monotonic); the ring is closed.

        One that does not answer is left to the thread: the others get the rest in its stead, a little earlier.
        """
        self._thread.join(max(0.0, deadline - STOP_S / 4 - time.monotonic()))
        if self._thread.is_alive():
            others = threading.Thread(target=self._finish_others, name="other sinks", daemon=True)
            others.start()
            others.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _finish_others(self) -> None:
        with self._lock:
            hand, waiting, self._waiting = self._hand, self._waiting, []
            others = [sink for sink in self._sinks if sink is not self._busy]
            self._sinks = [sink for sink in self._sinks if sink is self._busy]
            rest = self._ring.take()
        for batch in rest:
            self._ring.put(batch)
        for sink in others:
            self._ask(sink, sink.take, [*(hand if sink in waiting else ()), *rest])
            self._ask(sink, sink.close)

    def _feed(self) -> None:
        self._begun.wait()
        while batches := self._ring.take():
            self._undelivered += _count(batches) * self._failed
            self._give(batches)
        for sink in [*self._sinks]:
            self._ask(sink, sink.close)

    def _give(self, batches: list[Batch]) -> None:
        self._hand, self._waiting = batches, [*self._sinks]
        while True:
            with self._lock:
                if not self._waiting:
                    return
                self._busy = self._waiting.pop(0)
            self._ask(self._busy, self._busy.take, batches)

    def _ask(self, sink: Sink, call: Callable[..., None], *batches: list[Batch]) -> None:
        try:
            call(*batches)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one sink, the others have their points
            if sink in self._sinks:
                self._sinks.remove(sink)
            self._failed += 1
            self._undelivered += sum(map(_count, batches))
            log.warning("%s gets nothing more: %s: %s", type(sink).__name__, type(error).__name__, said(error))


def _count(batches: Iterable[Batch]) -> int:
    return sum(len(batch.points) for batch in batches)
