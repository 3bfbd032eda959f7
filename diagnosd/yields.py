"""`diagnosd yield`: a file beside the agent's socket that says until when every device is to be left alone.

A GPU that somebody has open cannot be reset, its MIG mode not be changed, its driver not be unloaded.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from diagnosd.probe.message import DEFAULT_SOCKET

FILE = "yield"
LONGEST_S = 24 * 3600.0  # from when the file was written: one that was forgotten does not blind us for ever
UNSAID_S = 900.0  # of a file that does not say until when: somebody made it by hand
SEEN_S = 2.0  # a reader looks every second, and closes what it has open
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def duration(text: str) -> float:
    """Seconds of "90s", "15m" or "2h". ValueError where it is none, or longer than LONGEST_S."""
    found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)([smh])", text)
    seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 0.0 < seconds <= LONGEST_S:
        raise ValueError(f"{text!r:.40} is no time to wait: 90s, 15m or 2h, at most {LONGEST_S / 3600:.0f}h")
    return seconds


def files(socket: Path) -> list[Path]:
    """Where a reader looks: beside its own socket, and beside that of the node's agent."""
    return sorted({socket.absolute().parent / FILE, Path(DEFAULT_SOCKET).parent / FILE})


def begin(socket: Path, seconds: float) -> str:
    """Writes the file, waits until every reader has seen it, and says so. OSError where it cannot be written."""
    until = time.time() + seconds
    file = socket.absolute().parent / FILE
    try:
        _write(file, datetime.fromtimestamp(until, UTC).isoformat(timespec="seconds") + "\n")
    except FileNotFoundError as error:
        told = f"no agent has its socket in {file.parent}; where it is elsewhere, --socket PATH names it"
        raise OSError(told) from error
    except OSError as error:
        raise OSError(f"{file} cannot be written: {error.strerror}; --socket PATH is the agent's") from error
    time.sleep(SEEN_S)
    there = "" if socket.exists() else f"; no agent is there now ({socket}), one that starts will wait"
    return f"every device is left alone until {clock(until)}, or until diagnosd yield --end: {file}{there}"


def _write(file: Path, text: str) -> None:
    """At once: nobody reads half of it."""
    fd, name = tempfile.mkstemp(prefix=f".{FILE}-", dir=file.parent)
    try:
        with os.fdopen(fd, "w") as fresh:
            os.fchmod(fd, 0o644)
            fresh.write(text)
        Path(name).replace(file)
    except OSError:
        Path(name).unlink()
        raise


def end(socket: Path) -> str:
    file = socket.absolute().parent / FILE
    try:
        file.unlink()
    except FileNotFoundError:
        return f"no device was left alone: there is no {file}"
    return f"every device is read again: {file} is removed"


def clock(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%H:%M:%S} UTC"


def until(files: Iterable[Path], now: float) -> float:
    """Until when (Unix time) devices are to be left alone; 0 where nobody, or nobody who may, has said so."""
    return max((_until(file, now) for file in files), default=0.0)


def _until(file: Path, now: float) -> float:
    """In /tmp anybody may write, a link to what others own, too."""
    try:
        about = file.lstat()
    except OSError:
        return 0.0
    written = about.st_mtime
    if not stat.S_ISREG(about.st_mode) or about.st_uid not in (0, os.geteuid()) or written > now + LONGEST_S:
        return 0.0
    said = _said(file)
    ends = min(written + UNSAID_S if said is None else said, written + LONGEST_S)
    return ends if ends > now else 0.0


def _said(file: Path) -> float | None:
    with suppress(OSError, ValueError, OverflowError):
        fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            said = datetime.fromisoformat(os.read(fd, 64).decode().strip())
        finally:
            os.close(fd)
        return said.replace(tzinfo=said.tzinfo or UTC).timestamp()
    return None
