"""Reads, writes and the time they took, of each whole disk: /proc/diskstats."""

from __future__ import annotations

from diagnosd.collectors.kernel import KernelFile, RollCall, counter, is_counter
from diagnosd.collectors.machine import Machine
from diagnosd.point import Point, point

SECTOR = 512  # bytes, in this file, whatever the disk's own sectors are
# column of /proc/diskstats -> (Telegraf's name, what one count is in its unit); times are milliseconds
COLUMNS = (
    (3, "reads", 1),
    (5, "read_bytes", SECTOR),
    (6, "read_time", 1),
    (7, "writes", 1),
    (9, "write_bytes", SECTOR),
    (10, "write_time", 1),
    (11, "iops_in_progress", 1),
    (12, "io_time", 1),
)
NO_DISKS = ("loop", "ram", "zram")


def _counts(columns: list[str]) -> bool:
    return all(is_counter(columns[column]) for column, _, _ in COLUMNS)


class Diskio:
    name = "diskio"
    every = 1

    def __init__(self, machine: Machine) -> None:
        self._host = machine.host
        self._diskstats = KernelFile(machine.proc / "diskstats")
        self._block = machine.sys / "block"
        self._roll = RollCall()

    @property
    def errors(self) -> int:
        return self._diskstats.errors

    def read(self, now_ns: int) -> list[Point]:
        text = self._diskstats.read()
        if text is None:
            return []
        whole = self._whole_disks()
        lines = [line.split() for line in text.splitlines()]
        disks = {columns[2]: columns for columns in lines if len(columns) > COLUMNS[-1][0]}
        disks = {name: columns for name, columns in disks.items() if self._watched(name, whole) and _counts(columns)}
        points = [
            point("diskio", {"host": self._host, "name": name}, self._fields(columns), now_ns)
            for name, columns in disks.items()
        ]
        return points + [self._gone(name, now_ns + number) for number, name in enumerate(self._roll.gone(disks))]

    def _whole_disks(self) -> frozenset[str]:
        """Partitions have no folder of their own in /sys/block; their bytes are counted for the disk already."""
        try:
            return frozenset(entry.name for entry in self._block.iterdir())
        except OSError:
            return frozenset()

    @staticmethod
    def _watched(name: str, whole: frozenset[str]) -> bool:
        return not name.startswith(NO_DISKS) and (not whole or name.replace("/", "!") in whole)

    @staticmethod
    def _fields(columns: list[str]) -> dict[str, int]:
        return {name: counter(columns[column]) * scale % 2**63 for column, name, scale in COLUMNS}

    def _gone(self, name: str, now_ns: int) -> Point:
        """Of several at once, each at a nanosecond of its own: they have the same tags."""
        tags = {"host": self._host, "kind": "config_change", "subject": f"host:{self._host}"}
        return point("diagnosd_event", tags, {"text": f"the disk {name} is gone"}, now_ns)
