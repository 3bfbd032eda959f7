"""`diagnosd read`: reads what touches a device, in a process of its own, and prints points on stdout.

Around each read stand two comments, `# begin nvml 1500` (with the milliseconds that it may take) and `# end nvml`, and
`# done` ends a round: so that who reads us sees a device that does not answer, in a process that can be left alone. The
first read may take longer: a driver without persistence mode wakes every GPU up.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from diagnosd.collectors import COLLECTORS, Collector, hardware
from diagnosd.collectors.machine import Machine, captured
from diagnosd.point import Point, Series, encode, point
from diagnosd.reads import Reads, resident_bytes

TICK_S = 1.0
DEADLINE_S, FIRST_DEADLINE_S = 1.5, 20.0
# The share of the time in which a device may be busy with us. Between reads of 50 ms lies a second, and ten for those
# of half a second: GPUs that are asked too often have hung (conditions.md A29).
DUTY = 0.05
SELF_EVERY_S = 10.0


class Reader:
    def __init__(self, host: str, collectors: Iterable[Collector], write: Callable[[bytes], object]) -> None:
        self._host = host
        self._reads = [Reads(collector, DUTY) for collector in collectors]
        self._due = dict.fromkeys(self._reads, 0.0)  # monotonic
        self._begun: set[Reads] = set()
        self._self_due = 0.0
        self._write = write

    def round(self) -> None:
        """Reads what is due. What one read gave goes out with the announcement of the next."""
        now = time.monotonic()
        said = self._heartbeats(now)
        for reads in self._reads:
            if now < self._due[reads]:
                continue
            self._write(said + f"# begin {reads.name} {self._deadline(reads) * 1e3:.0f}\n".encode())
            said = reads.read(time.time_ns()).lines + f"# end {reads.name}\n".encode()
            self._due[reads] = now + reads.every - TICK_S / 2  # rounds come a little early or late
        self._write(said + b"# done\n")

    def _deadline(self, reads: Reads) -> float:
        if reads not in self._begun:
            self._begun.add(reads)
            return FIRST_DEADLINE_S
        return float(getattr(reads.collector, "deadline", DEADLINE_S))

    def _heartbeats(self, now: float) -> bytes:
        if now < self._self_due:
            return b""
        self._self_due = now + SELF_EVERY_S - TICK_S / 2
        now_ns = time.time_ns()
        fields = {"up": 1, "cpu_seconds": time.process_time(), "rss": resident_bytes()}
        ours = point("diagnosd_agent", {"host": self._host, "collector": "reader"}, fields, now_ns)
        return encode([ours, *(reads.heartbeat(self._host, now_ns) for reads in self._reads if reads in self._begun)])

    def close(self) -> None:
        close(reads.collector for reads in self._reads)


def close(collectors: Iterable[Collector]) -> None:
    for collector in collectors:
        with suppress(Exception):  # we are about to leave: it is the kernel's then
            getattr(collector, "close", lambda: None)()


def once(collectors: Sequence[Collector], *, twice: bool) -> list[Point]:
    """What they give at once, or in two reads a second apart: rates need two. The later value of a series wins."""
    every = [Reads(collector) for collector in collectors]
    rounds = [[reads.read(time.time_ns()) for reads in every]]
    if twice:
        time.sleep(TICK_S)
        rounds.append([reads.read(time.time_ns()) for reads in every])
    events: list[Point] = []
    united: dict[Series, Point] = {}
    for each in (each for batches in rounds for batch in batches for each in batch.points):
        if each.series.measurement == "diagnosd_event":
            events.append(each)
        else:
            before = united.get(each.series)
            united[each.series] = each._replace(fields={**before.fields, **each.fields}) if before else each
    return [*united.values(), *events]


def read(host: str, sys_root: Path | None, exclude: tuple[str, ...], without: Sequence[str], mode: str) -> NoReturn:
    """`mode` is "once", "request" (a round for each newline on stdin, until it is closed) or "alone" (every second)."""
    out = _own_stdout()
    machine = captured(host, sys_root, exclude) if sys_root else Machine(host, exclude=exclude)
    collectors = [collector for collector in hardware(machine) if collector.name not in without]
    with suppress(BrokenPipeError, KeyboardInterrupt):
        if mode == "once":
            if machine.live:
                collectors = [*(collector(machine) for collector in COLLECTORS), *collectors]
            points = once(collectors, twice=machine.live)
            _write(out, encode(points))
            for missing in filter(None, (getattr(collector, "missing", None) for collector in collectors)):
                print(f"diagnosd: {missing}", file=sys.stderr)
        else:
            _serve(Reader(host, collectors, lambda said: _write(out, said)), mode)
    close(collectors)
    os._exit(0)


def _serve(reader: Reader, mode: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        if mode == "request" and not os.read(0, 1):
            return
        reader.round()
        if mode == "alone":
            time.sleep(TICK_S)


def _own_stdout() -> int:
    """The real stdout, for us alone: what a library prints there goes to stderr from now on."""
    out = os.dup(1)
    os.dup2(2, 1)
    return out


def _write(fd: int, said: bytes) -> None:
    while said:
        said = said[os.write(fd, said) :]
