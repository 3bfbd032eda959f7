"""What the kernel shows: a file's text, the ways in which it can be missing kept apart, and names that come and go."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterable
from pathlib import Path

# At the first look these say that this machine has no such file for us, not that something is wrong now: no such file,
# another user's, or built in and switched off (reading /proc/pressure/* under psi=0 gives EOPNOTSUPP).
NOT_SUPPORTED = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EOPNOTSUPP})
# What a descriptor says when the device behind its file has gone, and the path when the file has.
GONE = frozenset({errno.ENODEV, errno.ENXIO, errno.ENOENT, errno.ENOTDIR})

PAGE = 4096
# A read of /proc gives as many whole records as fit into a page. None of a file that we read is longer than 3 KiB, or
# it is the only one and comes whole: a shorter read than this is the end of the file, and spares the one that says so.
SURELY_ALL = 1024


class KernelFile:
    """One file of /proc or /sys that is read again and again, through a descriptor that stays open.

    Not supported is remembered, and the file never opened again; unreadable now is counted in `errors`.
    `long_records`: one record may be longer than a page, and what comes before it in a read of its own, however short.
    """

    def __init__(self, path: Path, *, long_records: bool = False) -> None:
        self.path = path
        self.errors = 0
        self.gone = False  # it was there, and the last read found it gone
        self._supported: bool | None = None
        self._fd = -1
        self._surely_all = 0 if long_records else SURELY_ALL
        self._may_be_replaced = not str(path).startswith(("/proc/", "/sys/"))  # a file of a captured tree

    def read(self) -> str | None:
        """The text; None where it is not supported or unreadable now."""
        raw = self.raw()
        return None if raw is None else raw.decode("utf-8", "replace")

    def raw(self) -> bytes | None:
        """Likewise, as it comes: a number need not be decoded."""
        if self._supported is False:
            return None
        try:
            raw = self._read()
        except OSError as error:
            if self._supported is None and error.errno in NOT_SUPPORTED:
                self._supported = False
            else:
                self.errors += 1
                self.gone = error.errno in GONE
            return None
        self._supported = True
        self.gone = False
        return raw

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()

    def _read(self) -> bytes:
        if self._fd >= 0 and not (self._may_be_replaced and os.fstat(self._fd).st_nlink == 0):
            try:
                return _whole(self._fd, self._surely_all)
            except OSError as error:
                if error.errno not in GONE:
                    raise
        self.close()  # a device that was replaced has a new file at the same path
        return self._opened()

    def _opened(self) -> bytes:
        fd = os.open(self.path, os.O_RDONLY)
        try:
            raw = _whole(fd, self._surely_all)
        except OSError:
            os.close(fd)
            raise
        if fd < _kept_below():
            self._fd = fd
        else:
            os.close(fd)
        return raw


def _whole(fd: int, surely_all: int) -> bytes:
    raw = os.pread(fd, PAGE, 0)
    if len(raw) < surely_all:
        return raw
    chunks = [raw]
    read = len(raw)
    while chunk := os.pread(fd, PAGE, read):
        chunks.append(chunk)
        read += len(chunk)
    return b"".join(chunks)


def _kept_below() -> int:
    """A new descriptor is the lowest that is free: below this number half of what we may have is not used up."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


class RollCall:
    """Which devices answered the last time."""

    def __init__(self) -> None:
        self._present: frozenset[str] = frozenset()

    def gone(self, present: Iterable[str]) -> list[str]:
        """Those that answered the last time and do not now, each told once."""
        before, self._present = self._present, frozenset(present)
        return sorted(before - self._present)


def names(folder: str | Path) -> list[str]:
    """What a folder holds, sorted; nothing where it is absent, refused or a link to itself.

    OSError where it cannot be read now.
    """
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - names, without a Path object each
    except OSError as error:
        if error.errno in GONE or error.errno in NOT_SUPPORTED or error.errno == errno.ELOOP:
            return []
        raise


def text_of(path: Path) -> str:
    """A file that is read once in a while; "" where it is absent or refused, as `speed` of a port that is down."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def line_of(path: str | Path) -> str:
    """The first line of a small file, likewise: a third of what a Path costs, for trees of hundreds of them."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return ""
    try:
        return os.read(descriptor, PAGE).decode("utf-8", "replace").partition("\n")[0].strip()
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def first_line(path: Path) -> str | None:
    return line_of(path) or None


def counter(text: str) -> int:
    """A cumulative counter as the contract sends it: unsigned 64-bit modulo 2^63."""
    return int(text) % 2**63


def is_counter(text: str) -> bool:
    """Whether it is one: decimal digits, no more than 64 bits need."""
    return text.isascii() and text.isdecimal() and len(text) <= 20
