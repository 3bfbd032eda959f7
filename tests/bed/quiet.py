"""Whether the machine is quiet enough for step times to mean something."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import NamedTuple

# Two ranks use both cores, and a step waits for the slower: with 15 % of the CPUs in use by others some steps double.
BUSY = 0.15

TRIES = 20  # of a second each: what ran just before may still be ending


class Load(NamedTuple):
    average: float  # processes that could run, over the last minute
    used: float  # share of all CPUs in use, over the last second

    def __str__(self) -> str:
        return f"load {self.average:.2f}, {self.used:.0%} of the CPUs in use"


def load() -> Load:
    busy, total = _jiffies()
    time.sleep(1)
    busy_later, total_later = _jiffies()
    return Load(os.getloadavg()[0], (busy_later - busy) / max(1, total_later - total))


def _jiffies() -> tuple[int, int]:
    user, nice, system, idle, iowait, *interrupts = map(int, Path("/proc/stat").read_text().split()[1:9])
    busy = user + nice + system + sum(interrupts)
    return busy, busy + idle + iowait


class Others:
    """What other programs take of the CPUs from now on: user time, because the kernel's goes to no process of the bed.

    The bed's own is that of this process and of those that it has waited for.
    """

    def __init__(self) -> None:
        self._begin = self._now()

    def share(self) -> float:
        everybody, own, total = (later - first for later, first in zip(self._now(), self._begin, strict=True))
        return max(0.0, everybody - own) / max(1, total)

    def _now(self) -> tuple[float, float, float]:
        user, nice, *rest = map(int, Path("/proc/stat").read_text().split()[1:9])
        spent = [resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return user + nice, sum(spent) * os.sysconf("SC_CLK_TCK"), user + nice + sum(rest)


def settled() -> Load:
    """The load once the machine has come to rest, or what it is when it does not."""
    for _ in range(TRIES - 1):
        if (now := load()).used <= BUSY:
            return now
    return load()
