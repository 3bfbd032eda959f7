"""The node program: each collector is read on a thread of its own, and what comes goes through one ring to the sinks.

The loop keeps time. What may hang (a device, a disk, a sink) is touched by other threads only, and so cannot stop the
heartbeat. A collector that does not answer is left alone until it does, and a sink that fails gets nothing more; the
others go on.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from diagnosd import __version__, documents
from diagnosd.collectors import COLLECTORS, Collector
from diagnosd.collectors.machine import Machine
from diagnosd.collectors.steps import Steps
from diagnosd.documents import ClusterSpec, DocumentError, cluster_from_toml
from diagnosd.point import Point, Series, encode, point
from diagnosd.recording import RecordingError, Writer, not_made

log = logging.getLogger("diagnosd.agent")

PROBE = Path(__file__).parent / "probe/path"  # the one folder that goes on a job's PYTHONPATH

TICK_S = 1.0
# A point that comes later than the analysis's lateness of 3 s is not counted; a read of /proc takes under 1 ms.
DEADLINE_S = 2.0
STOP_S = 5.0  # from SIGTERM to the last byte (design.md 10)
GATHER_S = 0.1  # a tick's reads end within some milliseconds of each other: one write for all of them
RING = 200_000  # points, about 100 MB: some minutes of a busy node, for a disk that hesitates
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SELF_EVERY = 10  # ticks between two points about each collector, and two events that tell of one kind of loss
# What one collector may take of one core: with all of them it stays below a tenth of one, on nodes that have some
# hundred. A read of /proc takes under 1 ms; one that takes 50 comes every 5 s. At the longest every minute: a reader
# holds a state for 90 s (telemetry.md 1).
BUDGET, LONGEST = 0.01, 60


class Batch(NamedTuple):
    """Points of one read, encoded once."""

    points: list[Point]
    lines: bytes


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


class Lane:
    """One collector on a thread of its own, so that one that hangs holds up nobody."""

    def __init__(self, collector: Collector, put: Callable[[Batch], None]) -> None:
        self.collector = collector
        self.due = 0  # the tick of its next read
        self.seconds = 0.0  # of its last read
        self.cost = 0.0  # CPU seconds: the lesser of its last two reads', for one dear read is an accident
        self.up = True
        self.abandoned = False
        self._failures = 0
        self._last_cost = 0.0
        self._asked_at = 0.0  # monotonic
        self._idle = threading.Event()
        self._idle.set()
        self._put = put
        self._requests: SimpleQueue[int] = SimpleQueue()
        threading.Thread(target=self._serve, name=collector.name, daemon=True).start()

    @property
    def every(self) -> int:
        """Ticks between two reads: what the collector says, or more where its reads cost more than BUDGET."""
        return max(self.collector.every, min(math.ceil(self.cost / (BUDGET * TICK_S)), LONGEST))

    @property
    def errors(self) -> int:
        return self._failures + self.collector.errors

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

    def _serve(self) -> None:
        while True:
            now_ns = self._requests.get()
            began = time.perf_counter()
            try:
                self._read(now_ns)
            except Exception as error:  # noqa: BLE001 - a file that is not as it should be, or a mistake of ours
                self._failed(error)
            self.seconds = time.perf_counter() - began
            self._idle.set()

    def _read(self, now_ns: int) -> None:
        before = time.thread_time()
        points = self.collector.read(now_ns)
        self._pay(time.thread_time() - before)
        try:
            batch = Batch(points, encode(points))
            self.up = True
        except ValueError as error:
            self._failed(error)
            batch = _sayable(points)
        if batch.points:
            self._put(batch)

    def _pay(self, cost: float) -> None:
        before = self.every
        self.cost, self._last_cost = min(cost, self._last_cost), cost
        if self.every > before == self.collector.every:
            text = "%s takes %.0f ms a read, more than %.0f %% of a core: it is read less often, now every %d s"
            log.warning(text, self.collector.name, cost * 1e3, BUDGET * 100, self.every)

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        if self.up:
            log.warning("%s cannot be read now: %s: %s", self.collector.name, type(error).__name__, error)
        self.up = False


def _sayable(points: list[Point]) -> Batch:
    """Those that can be written: one that cannot does not cost the others."""
    kept, lines = [], []
    for each in points:
        with suppress(ValueError):
            lines.append(encode([each]))
            kept.append(each)
    return Batch(kept, b"".join(lines))


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


class Agent:
    """`collectors` and `sinks` are made by the caller; `run` ends when `stop` is set and everything is written.

    Every thread is made here: `run` does not fail for want of one.
    """

    def __init__(self, host: str, collectors: Iterable[Collector], sinks: Sequence[Sink]) -> None:
        self._host = host
        self._ring = Ring()
        self._lanes = [Lane(collector, self._ring.put) for collector in collectors]
        self._feeder = Feeder(self._ring, sinks)
        self._told = [0, 0]  # of what was lost, in the last event

    @property
    def lost(self) -> int:
        """Points that came and are not where they should be."""
        return self._ring.dropped + self._feeder.lost

    async def run(self, stop: asyncio.Event) -> None:
        self._feeder.start()
        try:
            await self._keep_time(stop)
        finally:
            self._finish()

    async def _keep_time(self, stop: asyncio.Event) -> None:
        began, tick = time.monotonic(), 0
        while not stop.is_set():
            self._tick(tick)
            # After a pause (a stopped process, a sleeping machine) ticks are left out, not made up for.
            tick = max(tick + 1, int((time.monotonic() - began) / TICK_S) + 1)
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), began + tick * TICK_S - time.monotonic())

    def _tick(self, tick: int) -> None:
        now_ns = time.time_ns()
        points = self._heartbeat(now_ns, each=tick % SELF_EVERY == 0)
        for number, lane in enumerate(self._lanes):
            if not lane.idle(0.0):
                points += self._patience(lane, now_ns + number)  # events of one kind and subject: 1 ns apart
            elif tick >= lane.due:
                lane.due = tick + lane.every
                lane.abandoned = False
                lane.ask(now_ns)
        if tick % SELF_EVERY == 0:
            points += self._losses(now_ns + len(self._lanes))
        self._ring.put(Batch(points, encode(points)))

    def _patience(self, lane: Lane, now_ns: int) -> list[Point]:
        """One event when a read is past its deadline. The thread cannot be freed: nothing more is asked of it."""
        if lane.abandoned or lane.waited() < DEADLINE_S:
            return []
        lane.abandoned, lane.up = True, False
        text = f"{lane.collector.name} has not answered for {DEADLINE_S:.0f} s and is left alone until it does"
        log.warning(text)
        return [self._gap(text, None, now_ns)]

    def _losses(self, now_ns: int) -> list[Point]:
        """An event for each kind of loss that has grown.

        It tells of all since the start: while a disk is full, the earlier ones are lost themselves.
        """
        lost = [self._ring.dropped, self._feeder.lost]
        texts = "points were dropped: more came than was taken", "points could not be recorded or analyzed"
        events = [
            self._gap(f"{now} {text}", float(now), now_ns + number)
            for number, (now, before, text) in enumerate(zip(lost, self._told, texts, strict=True))
            if now > before
        ]
        self._told = lost
        return events

    def _gap(self, text: str, value: float | None, now_ns: int) -> Point:
        tags = {"host": self._host, "kind": "telemetry_gap", "subject": f"host:{self._host}"}
        return point("diagnosd_event", tags, {"text": text, "value": value}, now_ns)

    def _heartbeat(self, now_ns: int, *, each: bool) -> list[Point]:
        collectors = [lane.collector for lane in self._lanes]
        fields = {
            "up": 1,
            "seconds": sum(lane.seconds for lane in self._lanes),
            "errors": sum(lane.errors for lane in self._lanes),
            "dropped": self.lost + sum(getattr(collector, "dropped", 0) for collector in collectors),
            "cpu_seconds": time.process_time(),
            "rss": _resident_bytes(),
        }
        points = [point("diagnosd_agent", {"host": self._host, "collector": "agent"}, fields, now_ns)]
        if each:
            points += [self._of_lane(lane, now_ns) for lane in self._lanes]
        return points

    def _of_lane(self, lane: Lane, now_ns: int) -> Point:
        fields = {"up": int(lane.up), "seconds": lane.seconds, "errors": lane.errors}
        return point("diagnosd_agent", {"host": self._host, "collector": lane.collector.name}, fields, now_ns)

    def _finish(self) -> None:
        """What the collectors still hold is read, and everything accepted is written, within STOP_S."""
        deadline = time.monotonic() + STOP_S
        for lane in self._lanes:
            if isinstance(lane.collector, Steps):
                lane.collector.close()
            if lane.idle(deadline - STOP_S * 3 / 4 - time.monotonic()):
                lane.ask(time.time_ns())
        for lane in self._lanes:
            lane.idle(deadline - STOP_S / 2 - time.monotonic())
        if losses := self._losses(time.time_ns()):
            self._ring.put(Batch(losses, encode(losses)))
        self._ring.close()
        if not self._feeder.finish(deadline):
            log.warning("not everything was written within %.0f s: a disk or a sink does not answer", STOP_S)


class Declared:
    """What the operators declare, told like any other state, so that a recording replays without the file."""

    name = "cluster"
    every = 60
    errors = 0

    def __init__(self, cluster: str, spec: ClusterSpec) -> None:
        self._cluster = cluster
        self._spec = documents.encode(spec).decode()

    def read(self, now_ns: int) -> list[Point]:
        return [point("diagnosd_cluster", {"cluster": self._cluster}, {"spec": self._spec}, now_ns)]


def declaration(file: Path | None) -> tuple[str, list[Declared]]:
    """The cluster's name ("" without a cluster.toml, the file's where it gives none) and what is declared there.

    OSError or DocumentError says what is wrong with the file.
    """
    if file is None:
        return "", []
    spec = cluster_from_toml(file.read_bytes(), str(file))
    name = spec.name or file.stem
    try:
        Series.of("diagnosd_cluster", cluster=name)
    except ValueError as error:
        raise DocumentError(f"{file}: name: {error}") from error
    return name, [Declared(name, spec)]


def _resident_bytes() -> int | None:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def make(host: str, socket: Path, sinks: Sequence[Sink], more: Iterable[Collector] = ()) -> Agent:
    """An agent with every collector of this machine. OSError where the socket cannot be had."""
    machine = Machine(host)
    return Agent(host, [Steps(host, socket), *(collector(machine) for collector in COLLECTORS), *more], sinks)


def log_calmly() -> None:
    """Lines on stderr for whoever watches or keeps the journal; one that cannot be written is no error."""
    logging.raiseExceptions = False
    logging.basicConfig(format="diagnosd: %(message)s", level=logging.INFO)


def collect(socket: Path, host: str, record: str, cluster: Path | None) -> None:
    """Record until told to stop. OSError or RecordingError where the socket or the recording cannot be had."""
    log_calmly()
    hold_signals()
    name, declared = declaration(cluster)
    file = recording_of(record, host)
    watched = make(host, socket, [Recorder(file, cluster=name)], declared)
    log.info("recording %s into %s; %s", host, file, invitation(socket))
    asyncio.run(until_told(watched))


def invitation(socket: Path) -> str:
    """How a job becomes known to this agent."""
    return f"it sees jobs that have DIAGNOSD_SOCKET={socket.absolute()} and PYTHONPATH={PROBE} in their environment"


def said(error: Exception) -> str:
    """The error as a person wants to read it: on what, and why."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def hold_signals() -> None:
    """From here on a signal to stop waits until `until_told` takes it: ranks may have found the socket by then."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)


async def until_told(agent: Agent) -> None:
    """Runs until one of STOPPING comes."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in STOPPING:
        loop.add_signal_handler(number, stop.set)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    await agent.run(stop)
