"""One line that is rewritten in place at the foot of a terminal, while somebody else's output scrolls above it.

The last row is taken out of the scrolling region (DECSTBM), as apt does for its progress bar: whatever the command
prints, it never meets the line, nor the line it.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress

_SAVE, _RESTORE, _ERASE, _UP = "\x1b7", "\x1b8", "\x1b[K", "\x1b[A"
FEW_ROWS = 4  # with fewer there is no room for both


def possible(fd: int) -> bool:
    """Whether a line can be kept there: a terminal that understands cursor movements, with room."""
    if not os.isatty(fd) or os.environ.get("TERM", "dumb") == "dumb":
        return False
    return os.get_terminal_size(fd).lines >= FEW_ROWS


class LiveLine:
    """Written by a thread of its own: a terminal that was stopped (Ctrl-S) must not stop who has something to show."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.columns = os.get_terminal_size(fd).columns - 1  # that a text may have; as of the last one
        self._rows = 0
        self._newest = ""
        self._closed = False
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="live line", daemon=True)
        self._thread.start()

    def show(self, text: str) -> None:
        """`text` has no control characters. Only the newest is shown, and nothing once it is closed."""
        self._newest = text
        self._changed.set()

    def close(self) -> None:
        """The whole terminal scrolls again, and the line is gone."""
        self._closed = True
        self._changed.set()
        self._thread.join()
        with suppress(OSError):
            if self._rows:
                self._write(f"{_SAVE}\x1b[r\x1b[{self._rows};1H{_ERASE}{_RESTORE}")

    def _follow(self) -> None:
        while self._changed.wait() and not self._closed:
            self._changed.clear()
            with suppress(OSError):  # the terminal is gone
                self._draw(self._newest)

    def _draw(self, text: str) -> None:
        size = os.get_terminal_size(self._fd)
        self.columns = size.columns - 1
        if size.lines < FEW_ROWS:
            return
        if size.lines != self._rows:
            self._make_room(size.lines)
        self._write(f"{_SAVE}\x1b[{self._rows};1H{_ERASE}{text[: self.columns]}{_RESTORE}")

    def _make_room(self, rows: int) -> None:
        """A newline first: the cursor may stand in the last row. Setting the region would move it to the top."""
        self._rows = rows
        self._write(f"\n{_SAVE}\x1b[1;{rows - 1}r{_RESTORE}{_UP}")

    def _write(self, text: str) -> None:
        """At once, so that nothing of the command's comes in between."""
        os.write(self._fd, text.encode())
