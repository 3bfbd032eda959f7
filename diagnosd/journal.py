"""Lines on stderr, for whoever watches or keeps the journal."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import TracebackType


def log_calmly(level: int = logging.INFO) -> None:
    """One that cannot be written is no error."""
    logging.raiseExceptions = False
    logging.basicConfig(format="diagnosd: %(message)s", level=level)


def said(error: Exception) -> str:
    """The error as a person wants to read it: on what, and why."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def plain(text: str, most: int = 300) -> str:
    """What somebody else printed, as one short line that does nothing to a terminal."""
    shown = "".join(character if character.isprintable() else "?" for character in text[: most + 1])
    return shown if len(shown) <= most else f"{shown[:most]}..."


def own_mistake(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    """What nobody foresaw, in a line that says where."""
    if issubclass(kind, KeyboardInterrupt):
        return
    while trace and trace.tb_next:
        trace = trace.tb_next
    where = f" at {Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else ""
    print(f"diagnosd: a mistake of its own, please report it: {kind.__name__}{where}: {error}", file=sys.stderr)
