"""Main memory: /proc/meminfo."""

from __future__ import annotations

from diagnosd.collectors.kernel import KernelFile
from diagnosd.collectors.machine import Machine
from diagnosd.point import Point, point


class Mem:
    name = "mem"
    every = 10

    def __init__(self, machine: Machine) -> None:
        self._host = machine.host
        self._meminfo = KernelFile(machine.proc / "meminfo")

    @property
    def errors(self) -> int:
        return self._meminfo.errors

    def read(self, now_ns: int) -> list[Point]:
        text = self._meminfo.read()
        fields = {} if text is None else self._fields(text)
        return [point("mem", {"host": self._host}, fields, now_ns)] if fields else []

    @staticmethod
    def _fields(text: str) -> dict[str, int]:
        """Bytes. As Telegraf has them: used is what is not available, cached holds the slabs that can be given back."""
        kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in text.splitlines())}
        fields = {"total": kib.get("MemTotal"), "available": kib.get("MemAvailable"), "cached": kib.get("Cached")}
        if "Cached" in kib and "SReclaimable" in kib:
            fields["cached"] = kib["Cached"] + kib["SReclaimable"]
        if "MemTotal" in kib and "MemAvailable" in kib:
            fields["used"] = kib["MemTotal"] - kib["MemAvailable"]
        return {name: 1024 * value for name, value in fields.items() if value is not None}
