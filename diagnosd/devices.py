"""The agent's side of `diagnosd read`: one child reads the devices, and is left alone when one of them does not answer.

What waits for a device cannot be freed, and a process that is killed while it asks a GPU has frozen it. So a child past
its deadline is asked for nothing more, told to end (SIGTERM), and killed only after a minute or when we end; another
one reads on without what hung. All of it is done by one thread, which itself waits for no child.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from diagnosd.child import Child, Patience
from diagnosd.pace import SELF_EVERY, Batch, gap
from diagnosd.point import encode, point
from diagnosd.wording import plain

log = logging.getLogger("diagnosd.devices")

SLICE_S = 0.25  # of waiting: a pause of our own (a stopped process, a sleeping machine) counts as two at most
GATHER_S = 0.02  # what a round of reads prints within some milliseconds is taken at once
ABANDONED = 2  # at once: more processes that hang would only hold more of the device
MOST_BYTES = 4 << 20  # of a child in a tick: what floods us waits in its pipe
END_S = 1.25  # for what it still has to say, and as long for its end: within the agent's five seconds
LINES, LINES_PER_S = 10, 3600.0  # of the children's stderr in our log
BY_SOMEBODY = ("SIGKILL", "SIGTERM", "exited with 0")  # ends that say nothing about the device that was read
OFTEN = 3  # times in the same read, they do: a library has called exit(), or takes more memory than there is


class Off(NamedTuple):
    """A collector that hung, or took its process with it."""

    until: float  # monotonic
    wait: float
    times: int


class Devices:
    """One child that reads, and those that were left alone. The points of all go to `put`."""

    def __init__(
        self,
        host: str,
        argv: Sequence[str],
        environ: dict[str, str],
        put: Callable[[Batch], None],
        patience: Patience | None = None,
    ) -> None:
        self._host = host
        self._argv = argv
        self._environ = environ
        self._put = put
        self._patience = patience or Patience()
        self._child: Child | None = None
        self._without: list[str] = []  # of the child that reads
        self._abandoned: list[tuple[Child, float]] = []  # and when each is killed, monotonic
        self._off: dict[str, Off] = {}
        self._start_at = 0.0  # monotonic
        self._again = self._patience.again
        self._deaths: Counter[str] = Counter()  # by their kind
        self._told: set[str] = set()  # what is told once
        self._told_at = 0  # ns: the last event's time
        self._taken = self._heard = 0  # bytes of a child's stdout and stderr, in this tick
        self._lines = LINES  # of a child's stderr that may still be logged
        self._lines_at = time.monotonic()
        self._last_line = ""
        self._news = "", ""  # the kind of the last death, and its text
        self._leaving = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._work, name="devices", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """The child is asked once more; it and those that were left alone end. `join` waits for that."""
        self._leaving = True
        os.eventfd_write(self._wake, 1)

    def join(self, patience: float) -> None:
        self._thread.join(max(0.0, patience))

    def _work(self) -> None:
        began, tick, every = time.monotonic(), 0, self._patience.tick
        try:
            while not self._leaving:
                now = time.monotonic()
                if now >= began + tick * every:
                    self._tick(tick, now)
                    tick = max(tick + 1, int((now - began) / every) + 1)
                self._listen(began + tick * every - time.monotonic())
            self._last_words()
        finally:
            self._kill_all()

    def _tick(self, number: int, now: float) -> None:
        self._bury(now)
        self._taken = self._heard = 0
        child = self._child
        if child is None:
            if now >= self._start_at:
                self._start(self._left_off(now))
        elif not child.asked:
            if self._comes_back(now):
                left_off = self._left_off(now)
                self._leave_alone(child)  # it ends by itself
                self._start(left_off)
            else:
                child.ask()
        if number % SELF_EVERY == 0:
            self._tell_what_is_off()

    def _left_off(self, now: float) -> list[str]:
        return [name for name, off in self._off.items() if now < off.until or self._crowded()]

    def _start(self, without: list[str]) -> None:
        self._without, self._last_line = without, ""
        if self._news[0]:
            self._tell_once(*self._news)
        options = [argument for name in without for argument in ("--without", name)]
        try:
            self._child = Child([*self._argv, *options], self._environ)
        except OSError as error:
            self._died(f"could not be started: {error.strerror}", 0.0, "")
        else:
            self._child.ask()

    def _crowded(self) -> bool:
        return len(self._abandoned) >= ABANDONED

    def _comes_back(self, now: float) -> bool:
        """Whether something that is left off is to be tried again."""
        due = [name for name in self._without if now >= self._off[name].until]
        if due and self._crowded():
            name = " and ".join(due)
            self._tell_once(f"off {name}", f"{name} stays off: {ABANDONED} processes that asked have not ended yet")
            return False
        return bool(due)

    def _listen(self, patience: float) -> None:
        """To the child, for so many seconds at most."""
        child = self._child
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        full = self._taken >= MOST_BYTES
        waits = child is not None and child.waits and not full
        if child:
            for file in child.open:
                if (self._taken if file is child.stdout else self._heard) < MOST_BYTES:
                    poll.register(file, select.POLLIN)
        before = time.monotonic()
        ready = {fd for fd, _ in poll.poll(1e3 * max(0.0, min(patience, SLICE_S) if waits else patience))}
        if child is None:
            return
        if child.stdout.fileno() in ready:
            time.sleep(GATHER_S)
            self._take(child)
        elif waits:
            child.waited += min(time.monotonic() - before, 2 * SLICE_S)
        if child.stderr.fileno() in ready:
            self._log(child.complaints())
        if child.ended:
            self._reap(child)
        elif child.overdue(self._patience):
            self._hang(child)

    def _take(self, child: Child) -> None:
        batch = child.take()
        self._taken += len(batch.lines)
        if batch.points:
            self._put(batch)
        for missing in child.missing:
            if missing not in self._told:
                self._told.add(missing)
                log.info(missing)
        child.missing.clear()
        if child.bad:
            self._tell_once("bad", "the process that reads the devices printed what is no point")

    def _hang(self, child: Child) -> None:
        name = child.reads or "the process that reads the devices"
        said = f"{name} has not answered for {child.limit(self._patience):.3g} s"
        if self._crowded():
            self._tell_once("off", f"{said}, nor have {ABANDONED} before it: no device is read until one ends")
            child.waited = 0.0
            return
        self._leave_alone(child)
        child.terminate()
        if child.reads:
            wait = self._put_off(child.reads)
            self._tell(f"{said} and is left alone; the other devices are read on, and it again in {wait:g} s")
        else:
            self._wait_longer(0.0)
            self._tell_once("silent", f"{said} and is left alone; another one is started")

    def _leave_alone(self, child: Child) -> None:
        self._child = None
        child.leave()
        self._abandoned.append((child, time.monotonic() + self._patience.kill))

    def _put_off(self, name: str) -> float:
        """Seconds until it is tried again."""
        now, before = time.monotonic(), self._off.get(name)
        first = before is None or now > before.until + self._patience.back_longest
        wait = self._patience.back if first or not before else min(2 * before.wait, self._patience.back_longest)
        self._off[name] = Off(now + wait, wait, before.times + 1 if before else 1)
        return wait

    def _reap(self, child: Child) -> None:
        """Its stdout has ended, and so has it, or soon."""
        status = child.status(SLICE_S)
        self._log(child.complaints())
        self._leave_alone(child)
        if status:
            self._abandoned.pop()
        else:
            child.terminate()
        self._died(status or "closed its stdout", time.monotonic() - child.born, child.reads)

    def _died(self, status: str, lived: float, reading: str) -> None:
        """Told when the next one starts, and once of each kind: where all of us are told to end it is no news.

        Of one that somebody killed, what it read is not to blame, unless that happens OFTEN.
        """
        self._wait_longer(lived)
        kind = status + (f" while it read {reading}" if reading else "")
        self._deaths[kind] += 1
        if reading and (self._deaths[kind] >= OFTEN or not status.endswith(BY_SOMEBODY)):
            self._put_off(reading)
        last = f" ({self._last_line})" if self._last_line else ""
        self._news = kind, f"the process that reads the devices {kind}{last}: it is started again"

    def _wait_longer(self, lived: float) -> None:
        """Until the next one is started."""
        if lived > self._patience.again_longest:
            self._again = self._patience.again
        self._start_at = time.monotonic() + self._again
        self._again = min(2 * self._again, self._patience.again_longest)

    def _tell_what_is_off(self) -> None:
        now_ns = time.time_ns()
        off = {name: self._off[name].times for name in self._without}
        if self._child is None:
            off["reader"] = self._deaths.total()
        points = [
            point("diagnosd_agent", {"host": self._host, "collector": name}, {"up": 0, "errors": times}, now_ns)
            for name, times in off.items()
        ]
        if points:
            self._put(Batch(points, encode(points)))

    def _tell_once(self, of: str, text: str) -> None:
        if of not in self._told:
            self._told.add(of)
            self._tell(text)

    def _tell(self, text: str) -> None:
        log.warning(text)
        self._told_at = max(time.time_ns(), self._told_at + 1)  # two events at one time would be one
        points = [gap(self._host, text, self._told_at)]
        self._put(Batch(points, encode(points)))

    def _log(self, said: bytes) -> None:
        """The first lines of an hour; the rest is not worth a disk."""
        now = time.monotonic()
        self._heard += len(said)
        if now > self._lines_at + LINES_PER_S:
            self._lines, self._lines_at = LINES, now
        lines = said.splitlines()
        for raw in lines if self._lines >= 0 else lines[-1:]:
            line = self._last_line = plain(raw.decode("utf-8", "replace"))
            self._lines -= 1
            if self._lines >= 0:
                log.warning("devices: %s", line.removeprefix("diagnosd: "))
            elif self._lines == -1:
                log.warning("devices: more lines came, they are left out for an hour")

    def _bury(self, now: float) -> None:
        alive = []
        for child, kill_at in self._abandoned:
            if child.status():
                continue
            if now >= kill_at:
                child.kill()
            alive.append((child, kill_at))
        if len(alive) < len(self._abandoned):
            self._told = {each for each in self._told if not each.startswith("off")}
        self._abandoned = alive

    def _last_words(self) -> None:
        child, until = self._child, time.monotonic() + END_S
        if child is None:
            return
        if not child.asked:
            child.ask()
        os.eventfd_read(self._wake)
        while self._child is child and child.waits and time.monotonic() < until:
            self._listen(until - time.monotonic())
        if self._child is child and not child.waits:
            child.leave()
            child.status(END_S)

    def _kill_all(self) -> None:
        everyone = [child for child, _ in self._abandoned] + ([self._child] if self._child else [])
        for child in everyone:
            if not child.status():
                child.leave()
                child.kill()
        for child in everyone:
            child.status(SLICE_S / len(everyone))
