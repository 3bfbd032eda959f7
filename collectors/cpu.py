"""How the processors of this machine spent the time since the last look: the first line of /proc/stat."""

from __future__ import annotations

from diagnosd.collectors.kernel import KernelFile
from diagnosd.collectors.machine import Machine
from diagnosd.point import Point, point

# column of the `cpu` line, in ticks of 1/100 s -> Telegraf's name. Columns 8 and 9, guests, are in user and nice too.
COLUMNS = (
    (0, "usage_user"),
    (2, "usage_system"),
    (3, "usage_idle"),
    (4, "usage_iowait"),
    (7, "usage_steal"),
)
GUEST, COUNTED = 8, 8


class Cpu:
    name = "cpu"
    every = 1

    def __init__(self, machine: Machine) -> None:
        self._host = machine.host
        self._stat = KernelFile(machine.proc / "stat")
        self._last: list[int] = []

    @property
    def errors(self) -> int:
        return self._stat.errors

    def read(self, now_ns: int) -> list[Point]:
        """Percentages since the last read: nothing at the first. One that ran back (iowait may) is left out."""
        text = self._stat.read()
        if text is None:
            return []
        ticks = [int(count) for count in text.partition("\n")[0].split()[1:]]
        last, self._last = self._last, self._without_guests(ticks)
        spent = [now - before for now, before in zip(self._last, last, strict=False)]
        total = sum(spent[:COUNTED])
        if total <= 0:
            return []
        shares = {name: 100.0 * spent[column] / total for column, name in COLUMNS if spent[column] >= 0}
        return [point("cpu", {"host": self._host, "cpu": "cpu-total"}, shares, now_ns)]

    @staticmethod
    def _without_guests(ticks: list[int]) -> list[int]:
        return [ticks[0] - ticks[GUEST], *ticks[1:]] if len(ticks) > GUEST else ticks
