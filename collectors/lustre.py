"""What this node asked of its Lustre file systems: the client's `llite` statistics."""

from __future__ import annotations

from collections.abc import Iterable

from diagnosd.collectors.kernel import KernelFile, counter, is_counter, names
from diagnosd.collectors.machine import Machine
from diagnosd.point import Point, Series, Value

# Where the folder of each mount lies: since Lustre 2.12 in debugfs, which only root may enter unless it was opened.
FOLDERS = ("proc/fs/lustre/llite", "sys/fs/lustre/llite", "sys/kernel/debug/lustre/llite")
# A line of `stats`: `read_bytes 4 samples [bytes] MIN MAX SUM [SQUARES]`, `open 7 samples [reqs]`,
# `open 7 samples [usecs] MIN MAX SUM SQUARES` since 2.13. Columns of what follows the name:
SAMPLES, UNIT, SUM = 0, 2, 5
# name and unit there, column, our name: Telegraf's (inputs.lustre2) where it has one
COUNTERS: tuple[tuple[str, str | None, int, str], ...] = (
    ("read_bytes", "[bytes]", SUM, "read_bytes"),
    ("read_bytes", None, SAMPLES, "read_calls"),
    ("write_bytes", "[bytes]", SUM, "write_bytes"),
    ("write_bytes", None, SAMPLES, "write_calls"),
    ("read", "[usecs]", SUM, "read_usecs"),
    ("write", "[usecs]", SUM, "write_usecs"),
    ("fsync", "[usecs]", SUM, "fsync_usecs"),
    ("open", "[usecs]", SUM, "open_usecs"),
    ("getattr", "[usecs]", SUM, "getattr_usecs"),
    *((name, None, SAMPLES, name) for name in ("open", "close", "getattr", "setattr", "statfs", "fsync", "seek")),
    *((name, None, SAMPLES, name) for name in ("mknod", "unlink", "mkdir", "rmdir", "rename", "readdir", "getxattr")),
    *((name, None, SAMPLES, name) for name in ("create", "lookup", "inode_permission", "mmap")),
)
SYSTEMS = 16  # mounted on one node


def fields_of(text: str) -> dict[str, Value]:
    """The counters of a `stats` file that are wanted; an odd line is passed over."""
    rows = {words[0]: words[1:] for words in map(str.split, text.splitlines()) if len(words) > 1 + UNIT}
    fields: dict[str, Value] = {}
    for name, unit, column, ours in COUNTERS:
        columns = rows.get(name, ())
        if len(columns) > column and unit in (None, columns[UNIT]) and is_counter(columns[column]):
            fields[ours] = counter(columns[column])
    return fields


class Lustre:
    name = "lustre2"
    every = 10

    def __init__(self, machine: Machine) -> None:
        self._host = machine.host
        roots = {"proc": machine.proc, "sys": machine.sys}
        self._folders = [roots[top] / rest for top, _, rest in (folder.partition("/") for folder in FOLDERS)]
        self._files: dict[str, KernelFile] = {}
        self._gone_errors = 0

    @property
    def errors(self) -> int:
        return self._gone_errors + sum(file.errors for file in self._files.values())

    def read(self, now_ns: int) -> list[Point]:
        """One point a mounted file system that has done something."""
        self._look()
        points = []
        for name, file in zip(_short(self._files), self._files.values(), strict=True):
            text = file.read()
            fields = fields_of(text) if text else {}
            if fields:
                points.append(Point(Series.of("lustre2", host=self._host, name=name), fields, now_ns))
        return points

    def _look(self) -> None:
        """The first of the folders that has any: nothing, where no Lustre is."""
        for folder in self._folders:
            found = [name for name in names(folder) if _sayable(name)]
            if found:
                break
        gone = [name for name in self._files if name not in found]
        self._gone_errors += sum(self._files.pop(name).errors for name in gone)
        for name in found[:SYSTEMS]:
            if name not in self._files:
                self._files[name] = KernelFile(folder / name / "stats")


def _sayable(name: str) -> bool:
    return name.isascii() and name.isprintable() and not name.endswith("\\")


def _short(folders: Iterable[str]) -> list[str]:
    """A folder is called NAME-INSTANCE, an address that is another after each mount: it is told only to tell two."""
    whole = list(folders)
    short = [name.rpartition("-")[0] or name for name in whole]
    return [each if short.count(each) == 1 else name for each, name in zip(short, whole, strict=True)]
