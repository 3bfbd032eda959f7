"""How long tasks of this machine waited for processors, memory or disks: /proc/pressure (PSI)."""

from __future__ import annotations

from diagnosd.collectors.kernel import KernelFile, counter
from diagnosd.collectors.machine import Machine
from diagnosd.point import Point, point

RESOURCES = ("cpu", "io", "memory")
# For the whole machine "all tasks wait for a processor" is undefined; since Linux 5.13 the kernel prints 0 for it.
UNDEFINED = {("cpu", "full")}


class Pressure:
    name = "pressure"
    every = 1

    def __init__(self, machine: Machine) -> None:
        self._host = machine.host
        self._files = {resource: KernelFile(machine.proc / "pressure" / resource) for resource in RESOURCES}

    @property
    def errors(self) -> int:
        return sum(file.errors for file in self._files.values())

    def read(self, now_ns: int) -> list[Point]:
        points = []
        for resource, file in self._files.items():
            for line in (file.read() or "").splitlines():
                kind, _, pairs = line.partition(" ")
                if (resource, kind) not in UNDEFINED:
                    tags = {"host": self._host, "resource": resource, "type": kind}
                    points.append(point("pressure", tags, self._fields(pairs), now_ns))
        return points

    @staticmethod
    def _fields(pairs: str) -> dict[str, float | int]:
        """`avg10=0.00 avg60=0.00 avg300=0.00 total=0`: percent of the last seconds, and microseconds since boot."""
        values = dict(pair.split("=") for pair in pairs.split())
        return {name: counter(text) if name == "total" else float(text) for name, text in values.items()}
