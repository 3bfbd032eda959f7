"""What each NFS mount asked of its server, and how long the answers took: /proc/self/mountstats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from diagnosd.collectors.kernel import KernelFile, is_counter
from diagnosd.collectors.machine import Machine
from diagnosd.collectors.mounts import mounts, unescape
from diagnosd.point import Point, Series

# Of some sixty those that training does: samples and checkpoints are READ, WRITE and COMMIT; millions of small files
# are OPEN, LOOKUP, GETATTR, ACCESS; a folder that is listed is READDIR.
OPERATIONS = frozenset(
    {
        *("READ", "WRITE", "COMMIT", "GETATTR", "SETATTR", "LOOKUP", "ACCESS", "CREATE", "REMOVE", "RENAME"),
        *("READDIR", "READDIRPLUS", "OPEN", "OPEN_NOATTR", "CLOSE", "LOCK", "LAYOUTGET", "FSSTAT", "STATFS"),
    }
)
# Columns of an operation's line: transmissions count requests sent, times are milliseconds. A ninth, errors, came with
# Linux 5.3.
OPS, TRANSMISSIONS, SENT, RECEIVED, RTT, EXE = 0, 1, 3, 4, 6, 7
COLUMNS = 8
MOUNTS = 64  # of one node


class Export(NamedTuple):
    device: str  # server:/export
    path: str
    operations: dict[str, list[int]]


def exports(text: str) -> Iterator[Export]:
    """The NFS mounts of a mountstats file. What does not look like one of its lines is passed over."""
    export = None
    for line in text.split("\n"):
        words = line.split()
        if line.startswith(("device ", "no device ")):
            if export:
                yield export
            export = _export(line.split(" "))
        elif export and words and words[0].endswith(":") and words[0][:-1] in OPERATIONS:
            columns = words[1:]
            if len(columns) >= COLUMNS and all(map(is_counter, columns)):
                export.operations[words[0][:-1]] = [int(column) for column in columns]
    if export:
        yield export


def _export(words: list[str]) -> Export | None:
    """Of `device server:/export mounted on /data with fstype nfs4 statvers=1.1`."""
    if len(words) < 8 or words[2] != "mounted" or words[7] not in ("nfs", "nfs4"):
        return None
    return Export(unescape(words[1]), unescape(words[4]), {})


class Nfs:
    name = "nfsstat"
    every = 10

    def __init__(self, machine: Machine) -> None:
        self._host = machine.host
        self._mountstats = KernelFile(machine.proc / "self/mountstats", long_records=True)
        self._mountinfo = KernelFile(machine.proc / "self/mountinfo", long_records=True)

    @property
    def errors(self) -> int:
        return self._mountstats.errors + self._mountinfo.errors

    def read(self, now_ns: int) -> list[Point]:
        """One point a mount and operation that was ever done."""
        text = self._mountstats.read()
        if text is None or " with fstype nfs" not in text:
            return []
        points = []
        for export in self._once(exports(text))[:MOUNTS]:
            for operation, columns in export.operations.items():
                if columns[OPS]:
                    points += self._point(export, operation, columns, now_ns)
        return points

    def _once(self, found: Iterator[Export]) -> list[Export]:
        """A file system that is mounted at several places counts once, and tells each place the same counters."""
        numbers = {mount.path: mount.number for mount in mounts(self._mountinfo.read() or "")}
        best: dict[str, Export] = {}
        for export in found:
            key = numbers.get(export.path, export.path)
            if key not in best or (len(export.path), export.path) < (len(best[key].path), best[key].path):
                best[key] = export
        return list(best.values())

    def _point(self, export: Export, operation: str, columns: list[int], now_ns: int) -> list[Point]:
        counts = {
            "ops": columns[OPS],
            "bytes": columns[SENT] + columns[RECEIVED],
            "rtt": columns[RTT],
            "exe": columns[EXE],
        }
        if columns[TRANSMISSIONS] >= columns[OPS]:  # a request is sent at least once, where the kernel counts rightly
            counts["retrans"] = columns[TRANSMISSIONS] - columns[OPS]
        tags = {"mountpoint": export.path, "serverexport": export.device, "operation": operation}
        try:
            series = Series.of("nfsstat", host=self._host, **tags)
        except ValueError:  # line protocol cannot say a path like this one
            return []
        return [Point(series, {name: count % 2**63 for name, count in counts.items()}, now_ns)]
