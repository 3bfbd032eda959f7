"""Lines on stderr, for whoever watches or keeps the journal."""

from __future__ import annotations

import logging


def log_calmly(level: int = logging.INFO) -> None:
    """One that cannot be written is no error."""
    logging.raiseExceptions = False
    logging.basicConfig(format="diagnosd: %(message)s", level=level)


def said(error: Exception) -> str:
    """The error as a person wants to read it: on what, and why."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)
