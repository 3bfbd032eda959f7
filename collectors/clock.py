"""How far this machine's wall clock can be trusted: adjtimex(2), read only, and which program keeps it."""

from __future__ import annotations

import ctypes
import time

from diagnosd.collectors.kernel import KernelFile
from diagnosd.collectors.machine import Machine
from diagnosd.point import Point, point

STA_UNSYNC = 0x0040
TIME_ERROR = 5
PPM = 1 << 16  # timex.freq counts 2^-16 ppm
# What a running time keeper leaves in /run, precise ones first: phc2sys disciplines the clock from a PTP port.
KEEPERS = (
    ("phc2sys.*", "ptp"),
    ("chrony", "ntp"),
    ("ntpd.pid", "ntp"),
    ("systemd/timesync/synchronized", "ntp"),
)


class Timex(ctypes.Structure):
    """struct timex of <sys/timex.h>; the names are the kernel's."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),  # microseconds
        ("esterror", ctypes.c_long),  # microseconds
        ("status", ctypes.c_int),
        ("constant", ctypes.c_long),
        ("precision", ctypes.c_long),
        ("tolerance", ctypes.c_long),
        ("time", ctypes.c_long * 2),
        ("tick", ctypes.c_long),
        ("pps", ctypes.c_long * 8),
        ("tai", ctypes.c_int),
        ("reserved", ctypes.c_int * 11),
    )


class Clock:
    name = "clock"
    every = 10

    def __init__(self, machine: Machine) -> None:
        self._host = machine.host
        self._boot = KernelFile(machine.proc / "sys/kernel/random/boot_id")
        self._run = machine.run
        self._adjtimex = getattr(ctypes.CDLL(None, use_errno=True), "adjtimex", None)

    @property
    def errors(self) -> int:
        return self._boot.errors

    def read(self, now_ns: int) -> list[Point]:  # noqa: ARG002 - both clocks are read here, side by side
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        boot = self._boot.read()
        fields: dict[str, int | float | str | bool | None] = {
            "mono": (before + after) // 2,
            "boot": boot.strip() if boot else None,
            "source": self._source(),
            **self._discipline(),
        }
        return [point("diagnosd_clock", {"host": self._host}, fields, wall)]

    def _discipline(self) -> dict[str, int | float | str | bool | None]:
        """Nothing where a seccomp filter refuses the call, as some container runtimes do: that does not change."""
        if self._adjtimex is None:
            return {}
        timex = Timex()
        state = self._adjtimex(ctypes.byref(timex))
        if state < 0:
            self._adjtimex = None
            return {}
        return {
            "esterror": timex.esterror / 1e6,
            "maxerror": timex.maxerror / 1e6,
            "frequency": timex.freq / PPM,
            "synced": state != TIME_ERROR and not timex.status & STA_UNSYNC,
        }

    def _source(self) -> str:
        try:
            return next((source for pattern, source in KEEPERS if any(self._run.glob(pattern))), "unknown")
        except OSError:
            return "unknown"
