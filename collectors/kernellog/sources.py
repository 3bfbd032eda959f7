"""Where the kernel log is read: /dev/kmsg or the journal. Each gives chunks of whole lines, and takes a line apart.

/dev/kmsg first, where both may be read: it costs nothing while the kernel is silent, needs no other process, does not
depend on a journal that may be full, slow or absent, and says how much was lost. Who may not read it, as most users
under kernel.dmesg_restrict=1, can read the journal in group systemd-journal.

Both look BACK_S back when they begin. An agent that is started again must not miss what happened meanwhile; what is
older is history: what is still broken then shows in what the other collectors read.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

SECOND = 1_000_000_000
BACK_S = 300
CHUNK = 1 << 18  # bytes in one go; what is more waits in the kernel
RECORD = 16 * 1024  # bytes: a record of /dev/kmsg has 8 KiB at most
REST = 64 * 1024  # bytes of a line that is not complete: what is longer is no line of a kernel

JOURNALS = (Path("/run/log/journal"), Path("/var/log/journal"))
# Of the links of RDMA ports the kernel says nothing, of NVSwitches not everything, and a reload of systemd may take the
# GPUs from containers that run. Nobody else can speak as these: journald sets the field.
MATCHES = (
    *("_TRANSPORT=kernel", "+", "_SYSTEMD_UNIT=systemd-networkd.service"),
    *("+", "_SYSTEMD_UNIT=nvidia-fabricmanager.service", "+", "_SYSTEMD_UNIT=init.scope"),
)
BACKOFF_S = (1.0, 60.0)  # first and longest pause before journalctl is started again


class Line(NamedTuple):
    time: int  # ns UTC
    texts: list[str]  # one message may be several lines


class Source(Protocol):
    """`chunk` never blocks; `fd` is readable when there is something, None while there is nothing to wait for."""

    @property
    def fd(self) -> int | None: ...
    @property
    def errors(self) -> int: ...
    @property
    def lost(self) -> int:
        """Lines that were overwritten before they were read."""

    def pause(self) -> float:
        """Seconds until it is worth to look again, where `fd` is None."""

    def chunk(self, waited: bool) -> bytes: ...
    def lines(self, raw: Iterable[bytes]) -> list[Line]: ...
    def close(self) -> None: ...


class Kmsg:
    r"""A record a read: `6,3964,206764307,-;text\n KEY=value\n...`: priority, number, microseconds, flags.

    The time is that of a clock which starts with the machine, and which nobody corrects: after weeks it is seconds away
    from CLOCK_MONOTONIC. A line that we have waited for was written now, and says how far.
    """

    def __init__(self, path: Path) -> None:
        """OSError where it may not be read."""
        self.errors = 0
        self.lost = 0
        self._fd: int | None = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._first = b""
        try:
            with suppress(BrokenPipeError):  # it was overwritten just now
                self._first = self._read()  # opening it may be allowed where reading is not
        except OSError:
            os.close(self._fd)
            raise
        self._drift = 0  # ns from its clock to CLOCK_MONOTONIC
        self._since = time.monotonic_ns() - BACK_S * SECOND
        self._number = -1  # of the last record

    @property
    def fd(self) -> int | None:
        return self._fd

    def pause(self) -> float:
        return BACKOFF_S[1]

    def _read(self) -> bytes:
        """b"" while there is nothing."""
        assert self._fd is not None
        try:
            return os.read(self._fd, RECORD)
        except BlockingIOError:
            return b""

    def chunk(self, waited: bool) -> bytes:
        records, size, overwritten = [self._first] if self._first else [], len(self._first), False
        self._first = b""
        while size < CHUNK:
            try:
                record = self._read()
            except BrokenPipeError:  # the writer was faster, and overwrote what we had not read
                overwritten = True
                continue
            except OSError:
                self.errors += 1
                break
            if not record:
                break
            if overwritten:
                self._count_lost(records[-1] if records else b"", record)
                overwritten = False
            records.append(record)
            size += len(record)
        if records:
            self._number = _number(records[-1])
            if waited:
                self._drift = time.monotonic_ns() - _head(records[0])[1]
        return b"".join(records)

    def _count_lost(self, before: bytes, after: bytes) -> None:
        """What was overwritten between two records, unless it was history."""
        last = _number(before) if before else self._number
        number, written = _head(after)
        if 0 <= last < number and written + self._drift >= self._since:
            self.lost += number - last - 1

    def lines(self, raw: Iterable[bytes]) -> list[Line]:
        now, boot = time.time_ns(), time.time_ns() - time.monotonic_ns()
        read = []
        for record in raw:
            since_start = _head(record)[1] + self._drift
            if since_start >= self._since and b";" in record:
                text = _ESCAPED.sub(_unescaped, record.partition(b";")[2]).decode(errors="replace")
                read.append(Line(min(boot + since_start, now), text.split("\n")))
        return read

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


_ESCAPED = re.compile(rb"\\x([0-9a-f]{2})")
_HEAD = re.compile(rb"\d+,(\d{1,18}),(\d{1,15}),")


def _unescaped(found: re.Match[bytes]) -> bytes:
    return bytes.fromhex(found[1].decode())


def _head(record: bytes) -> tuple[int, int]:
    """Number and ns since the machine's start; -1 and 0 where there is no head."""
    found = _HEAD.match(record)
    return (int(found[1]), int(found[2]) * 1000) if found else (-1, 0)


def _number(record: bytes) -> int:
    return _head(record)[0]


class Journal:
    """journalctl as a child. It ends when its pipe does, so also when we are killed."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: of journal files that are not this machine's own."""
        self.errors = 0
        self.lost = 0
        self._folder = folder
        self._since = time.time() - BACK_S
        self._rest = b""
        self._time = 0  # ns, of the last line that had one
        self._backoff = BACKOFF_S[0]
        self._again = 0.0  # monotonic
        self._child: subprocess.Popen[bytes] | None = None
        self._start()

    @property
    def fd(self) -> int | None:
        if self._child is None and time.monotonic() >= self._again:
            self._start()
        return self._child.stdout.fileno() if self._child and self._child.stdout else None

    def pause(self) -> float:
        return max(0.0, self._again - time.monotonic())

    def _start(self) -> None:
        where = ["--directory", str(self._folder)] if self._folder else []
        how = ["--quiet", "--follow", "--lines=all", "--output=short-unix", "--no-hostname", "--all"]
        command = ["journalctl", *how, f"--since=@{self._since:.6f}", *where, *MATCHES]
        self._again = time.monotonic() + self._backoff
        try:
            child = subprocess.Popen(  # noqa: S603 - its arguments are ours
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
                process_group=0,  # a Ctrl-C is for us, who end it
            )
        except OSError:
            self._failed()
            return
        assert child.stdout
        os.set_blocking(child.stdout.fileno(), False)
        with suppress(OSError):  # the limit of this user's pipes
            fcntl.fcntl(child.stdout, fcntl.F_SETPIPE_SZ, CHUNK)
        self._child = child

    def _failed(self) -> None:
        self.errors += 1
        self._again = time.monotonic() + self._backoff
        self._backoff = min(2 * self._backoff, BACKOFF_S[1])

    def chunk(self, waited: bool) -> bytes:  # noqa: ARG002 - the journal's times are the wall clock's
        read, size, ended = [self._rest], 0, self._child is None
        while not ended and size < CHUNK:
            assert self._child
            assert self._child.stdout
            try:
                part = os.read(self._child.stdout.fileno(), CHUNK)
            except BlockingIOError:
                break
            ended = not part
            size += len(part)
            read.append(part)
        if ended:
            self._end()
            self._failed()
        elif size:
            self._backoff = BACKOFF_S[0]
        whole, newline, self._rest = b"".join(read).rpartition(b"\n")
        self._rest = b"" if ended or len(self._rest) > REST else self._rest
        return whole + newline

    def lines(self, raw: Iterable[bytes]) -> list[Line]:
        """`1700000000.123456 kernel: text`. A message's further lines are indented, and come without a time."""
        now, read = time.time_ns(), []
        for line in raw:
            found = _STAMPED.match(line)
            if found:
                self._time = int(found[1]) * SECOND + int(found[2]) * 1000
                self._since = max(self._since, (self._time // 1000 + 1) / 1e6)
            text = line[found.end() :] if found else line.strip()
            read.append(Line(min(self._time or now, now), [text.decode(errors="replace")]))
        return read

    def _end(self) -> None:
        child, self._child = self._child, None
        if child and child.stdout:
            child.kill()
            child.stdout.close()
            child.wait()

    def close(self) -> None:
        self._end()
        self._again = float("inf")


_STAMPED = re.compile(rb"(\d{1,10})\.(\d{6}) [^ :]{1,64}: ")


def source_of(dev: Path, *, live: bool, journal: Path | None = None) -> tuple[Source | None, str | None]:
    """What can be read here, or what stands in the way.

    `journal`: a folder of journal files other than this machine's.
    """
    try:
        return Kmsg(dev / "kmsg"), None
    except OSError as error:
        missing = f"the kernel log is not read ({dev / 'kmsg'}: {error.strerror}"
    if not live:
        return None, f"{missing})"
    if not any(_readable(folder) for folder in ((journal,) if journal else JOURNALS)):
        return None, f"{missing}; there is no journal that this user may read: group systemd-journal may)"
    if not shutil.which("journalctl"):
        return None, f"{missing}; there is no journalctl to read the journal with)"
    return Journal(journal), None


def _readable(folder: Path) -> bool:
    """Whether it holds a journal of the system, in it or in a folder for the machine, that we may read."""
    files = (file for pattern in ("system*.journal", "*/system*.journal") for file in folder.glob(pattern))
    try:
        return any(os.access(file, os.R_OK) for file in files)
    except OSError:
        return False
