"""The node program: what reads /proc has a thread each, what touches a device a process; one ring goes to the sinks.

The loop keeps time. What may hang (a file, a disk, a sink) is touched by other threads only, and so cannot stop the
heartbeat. A collector that does not answer is left alone until it does, and a sink that fails gets nothing more; the
others go on.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from diagnosd import child, documents
from diagnosd.collectors import COLLECTORS, Collector
from diagnosd.collectors.machine import Machine
from diagnosd.collectors.steps import Steps
from diagnosd.devices import Devices
from diagnosd.documents import ClusterSpec, DocumentError, cluster_from_toml
from diagnosd.lane import Lane
from diagnosd.pace import SELF_EVERY, Batch, gap, resident_bytes
from diagnosd.point import Point, Series, encode, point
from diagnosd.sinks import STOP_S, Feeder, Recorder, Ring, Sink, recording_of
from diagnosd.wording import log_calmly

log = logging.getLogger("diagnosd.agent")

PROBE = Path(__file__).parent / "probe/path"  # the one folder that goes on a job's PYTHONPATH

TICK_S = 1.0
# A point that comes later than the analysis's lateness of 3 s is not counted; a read of /proc takes under 1 ms.
DEADLINE_S = 2.0
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Agent:
    """`collectors` and `sinks` are made by the caller; `run` ends when `stop` is set and everything is written.

    Every thread is made here: `run` does not fail for want of one.
    """

    def __init__(
        self,
        host: str,
        collectors: Iterable[Collector],
        sinks: Sequence[Sink],
        devices: Callable[[Callable[[Batch], None]], Devices] | None = None,
    ) -> None:
        self._host = host
        self._ring = Ring()
        self._devices = devices(self._ring.put) if devices else None
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
                lane.due = tick + lane.paced.every
                lane.abandoned = False
                lane.ask(now_ns)
        if tick % SELF_EVERY == 0:
            points += self._losses(now_ns + len(self._lanes))
        self._ring.put(Batch(points, encode(points)))

    def _patience(self, lane: Lane, now_ns: int) -> list[Point]:
        """One event when a read is past its deadline. The thread cannot be freed: nothing more is asked of it."""
        if lane.abandoned or lane.waited() < DEADLINE_S:
            return []
        lane.abandoned, lane.paced.up = True, False
        if not lane.paced.is_news("late"):
            return []
        text = f"{lane.paced.name} has not answered for {DEADLINE_S:.0f} s and is left alone until it does"
        log.warning(text)
        return [gap(self._host, text, now_ns)]

    def _losses(self, now_ns: int) -> list[Point]:
        """An event for each kind of loss that has grown.

        It tells of all since the start: while a disk is full, the earlier ones are lost themselves.
        """
        lost = [self._ring.dropped, self._feeder.lost]
        texts = "points were dropped: more came than was taken", "points could not be recorded or analyzed"
        events = [
            gap(self._host, f"{now} {text}", now_ns + number, float(now))
            for number, (now, before, text) in enumerate(zip(lost, self._told, texts, strict=True))
            if now > before
        ]
        self._told = lost
        return events

    def _heartbeat(self, now_ns: int, *, each: bool) -> list[Point]:
        collectors = [lane.collector for lane in self._lanes]
        fields = {
            "up": 1,
            "seconds": sum(lane.paced.seconds for lane in self._lanes),
            "errors": sum(lane.paced.errors for lane in self._lanes),
            "dropped": self.lost + sum(getattr(collector, "dropped", 0) for collector in collectors),
            "cpu_seconds": time.process_time(),
            "rss": resident_bytes(),
        }
        points = [point("diagnosd_agent", {"host": self._host, "collector": "agent"}, fields, now_ns)]
        if each:
            points += [lane.paced.heartbeat(self._host, now_ns) for lane in self._lanes]
        return points

    def _finish(self) -> None:
        """What the collectors still hold is read, and everything accepted is written, within STOP_S."""
        deadline = time.monotonic() + STOP_S
        if self._devices:
            self._devices.leave()
        for lane in self._lanes:
            if lane.idle(deadline - STOP_S * 3 / 4 - time.monotonic()):
                lane.end(time.time_ns())
        for lane in self._lanes:
            lane.idle(deadline - STOP_S / 2 - time.monotonic())
        if self._devices:
            self._devices.join(deadline - STOP_S / 3 - time.monotonic())
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


def make(
    host: str, socket: Path, sinks: Sequence[Sink], more: Iterable[Collector] = (), exclude: Sequence[str] = ()
) -> Agent:
    """An agent with every collector of this machine. OSError where the socket cannot be had."""
    machine = Machine(host, exclude=tuple(exclude))
    collectors = [Steps(host, socket), *(collector(machine) for collector in COLLECTORS), *more]

    def devices(put: Callable[[Batch], None]) -> Devices:
        return Devices(host, child.command(host, exclude), child.environment(socket), put)

    return Agent(host, collectors, sinks, devices)


def collect(socket: Path, host: str, record: str, cluster: Path | None, exclude: Sequence[str]) -> None:
    """Record until told to stop. OSError or RecordingError where the socket or the recording cannot be had."""
    log_calmly()
    hold_signals()
    name, declared = declaration(cluster)
    file = recording_of(record, host)
    watched = make(host, socket, [Recorder(file, cluster=name)], declared, exclude)
    log.info("recording %s into %s; %s", host, file, invitation(socket))
    asyncio.run(until_told(watched))


def invitation(socket: Path) -> str:
    """How a job becomes known to this agent."""
    return f"it sees jobs that have DIAGNOSD_SOCKET={socket.absolute()} and PYTHONPATH={PROBE} in their environment"


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
