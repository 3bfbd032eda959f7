"""What the kernel shows: a file's text, the ways in which it can be missing kept apart, and names that come and go."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from pathlib import Path

# At the first look these say that this machine has no such file for us, not that something is wrong now: no such file,
# another user's, or built in and switched off (reading /proc/pressure/* under psi=0 gives EOPNOTSUPP).
NOT_SUPPORTED = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EOPNOTSUPP})


class KernelFile:
    """One file of /proc or /sys that is read again and again.

    Not supported is remembered, and the file never opened again; unreadable now is counted in `errors`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.errors = 0
        self._supported: bool | None = None

    def read(self) -> str | None:
        """The text; None where it is not supported or unreadable now."""
        if self._supported is False:
            return None
        try:
            text = self.path.read_text("utf-8", "replace")
        except OSError as error:
            if self._supported is None and error.errno in NOT_SUPPORTED:
                self._supported = False
            else:
                self.errors += 1
            return None
        self._supported = True
        return text


class RollCall:
    """Which devices answered the last time."""

    def __init__(self) -> None:
        self._present: frozenset[str] = frozenset()

    def gone(self, present: Iterable[str]) -> list[str]:
        """Those that answered the last time and do not now, each told once."""
        before, self._present = self._present, frozenset(present)
        return sorted(before - self._present)


def text_of(path: Path) -> str:
    """A file that is read once in a while; "" where it is absent or refused, as `speed` of a port that is down."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def first_line(path: Path) -> str | None:
    return text_of(path).partition("\n")[0].strip() or None


def counter(text: str) -> int:
    """A cumulative counter as the contract sends it: unsigned 64-bit modulo 2^63."""
    return int(text) % 2**63
