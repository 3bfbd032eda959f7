"""What the kernel says of its devices: Xid, links, PCI Express, memory that ran out, heat, as events of the contract.

The log is read by a thread as it grows: the kernel's ring holds a fifth of a second of the worst floods that were seen,
so a look a second would miss most of it. While the kernel is silent the thread sleeps.
"""

from __future__ import annotations

import os
import select
import threading
import time
from pathlib import Path

from diagnosd.collectors.kernellog.folding import Fault, Folding
from diagnosd.collectors.kernellog.lines import Recogniser, candidates
from diagnosd.collectors.kernellog.places import Places
from diagnosd.collectors.kernellog.sources import Source, source_of
from diagnosd.collectors.machine import Machine
from diagnosd.collectors.net import watched
from diagnosd.point import Point

# Between two looks, so that a flood is read in large pieces: 780,000 lines a minute, at 100 bytes, fill the smallest
# ring (256 KiB) in 200 ms. In worse floods the thread rests for as long as it takes to stay below SHARE of a core.
PAUSE_S = 0.05
SHARE = 0.2
CLOSE_S = 1.0
GAP_S = 60  # between two events about lines that were lost


class KernelLog:
    name = "kernellog"
    every = 1

    def __init__(self, machine: Machine, journal: Path | None = None) -> None:
        self._host = machine.host
        self._recogniser = Recogniser()
        self._places = Places(machine)
        self._folding = Folding(machine.host)
        self._lock = threading.Lock()  # of the folding
        self._told_lost, self._gap_at = 0, -GAP_S * 1_000_000_000
        self._failure: Exception | None = None  # what ended the thread
        self._closing = threading.Event()
        self._source, self.missing = source_of(machine.dev, live=machine.live, journal=journal)
        if self._source:
            self._wake, self._waker = os.pipe()
            self._thread = threading.Thread(target=self._follow, args=(self._source,), name="kernel log", daemon=True)
            self._thread.start()

    @property
    def errors(self) -> int:
        return self._source.errors if self._source else 0

    @property
    def dropped(self) -> int:
        """Lines that were overwritten unread, and events beyond the limit."""
        return self._folding.untold + (self._source.lost if self._source else 0)

    def read(self, now_ns: int) -> list[Point]:
        if self._failure:
            raise RuntimeError("the kernel log is no longer read") from self._failure
        with self._lock:
            lost = self._source.lost if self._source else 0
            if lost > self._told_lost and not 0 <= now_ns - self._gap_at < GAP_S * 1_000_000_000:
                text = f"{lost - self._told_lost} lines of the kernel log were overwritten before they could be read"
                self._folding.gap(text, float(lost - self._told_lost), now_ns)
                self._told_lost, self._gap_at = lost, now_ns
            return self._folding.due(now_ns)

    def close(self) -> None:
        """What has come is read; the thread and the child end."""
        if self._source and not self._closing.is_set():
            self._closing.set()
            os.write(self._waker, b".")
            self._thread.join(CLOSE_S)
            if not self._thread.is_alive():
                os.close(self._wake)
                os.close(self._waker)

    def _follow(self, source: Source) -> None:
        try:
            self._places.ask()
            waited = False
            while not self._closing.is_set():
                before = time.thread_time()
                self._take(source, source.chunk(waited))
                self._closing.wait(max(PAUSE_S, (time.thread_time() - before) * (1 / SHARE - 1)))
                waited = self._wait(source)
            self._take(source, source.chunk(waited=False))
        except Exception as error:  # noqa: BLE001 - a mistake of ours: the next read tells it
            self._failure = error
        finally:
            source.close()

    def _wait(self, source: Source) -> bool:
        """Until there is something to read; whether it came while we waited."""
        fd = source.fd
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if fd is None:
            poll.poll(source.pause() * 1000)
            return False
        poll.register(fd, select.POLLIN)
        if poll.poll(0):
            return False
        poll.poll()
        return True

    def _take(self, source: Source, chunk: bytes) -> None:
        lines = source.lines(candidates(chunk))
        now = time.time_ns()
        for time_ns, texts in lines:
            for text in texts:
                self._tell(text, time_ns, now)

    def _tell(self, text: str, time_ns: int, now_ns: int) -> None:
        told = self._recogniser.told(text)
        self._places.learn(self._recogniser.uuids)
        if told is None or (told.netdev and not watched(told.netdev)):
            return
        subject = self._places.of(told)
        apart = f"{told.fault} {told.pci}" if subject.startswith("host:") else told.fault
        fault = Fault(told.kind, subject, told.text, told.code, apart)
        with self._lock:
            self._folding.add(fault, time_ns, now_ns)
