"""Words for people: lines on stderr, errors as they want to read them, and what others printed made harmless."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import TracebackType

SHORT = 300  # a message of the NVIDIA driver with what we know of it fits in


def log_calmly(level: int = logging.INFO) -> None:
    """One that cannot be written is no error."""
    logging.raiseExceptions = False
    logging.basicConfig(format="diagnosd: %(message)s", level=level)


def said(error: Exception) -> str:
    """The error as a person wants to read it: on what, and why."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def printable(text: str) -> str:
    """What somebody else wrote, so that it does nothing to a terminal and is one line."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def plain(text: str) -> str:
    """The same, SHORT characters at most."""
    text = printable(text[: SHORT + 1])
    return text if len(text) <= SHORT else text[: SHORT - 3] + "..."


def own_mistake(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    """What nobody foresaw, in a line that says where."""
    if issubclass(kind, KeyboardInterrupt):
        return
    while trace and trace.tb_next:
        trace = trace.tb_next
    where = f" at {Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else ""
    print(f"diagnosd: a mistake of its own, please report it: {kind.__name__}{where}: {error}", file=sys.stderr)
