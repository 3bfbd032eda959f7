"""One `diagnosd read` as a child: what it is asked, what it says, and how long it has been silent."""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple, cast

import diagnosd
from diagnosd.collectors.kernel import is_counter
from diagnosd.command import signal_name
from diagnosd.pace import Batch
from diagnosd.point import Decoder, Point
from diagnosd.wording import plain

PIPE_BYTES = 1 << 20  # a round of 16 GPUs and as many ports is about 100 KB
GRACE_S = 0.5  # for the end of a child that was told to
LINE_BYTES = 4 << 20  # longer than any inventory
COMPLAINTS = 1000  # bytes of what is on stderr that somebody may want to read


class Patience(NamedTuple):
    """Seconds."""

    tick: float = 1.0  # between two rounds
    most: float = 60.0  # for one read, whatever it announced
    answer: float = 30.0  # for the rest of a round; a busy machine starts a Python in a second or two
    kill: float = 60.0  # of one that was left alone
    back: float = 60.0  # until what hung is tried again; doubled each time up to:
    back_longest: float = 3600.0
    again: float = 1.0  # until a child that died is replaced; doubled each time up to:
    again_longest: float = 60.0


def command(host: str, exclude: Iterable[str] = ()) -> list[str]:
    """As `diagnosd read --on-request`, but for typer, whose parts take more memory than all that reads."""
    excluded = [argument for pattern in exclude for argument in ("--exclude", pattern)]
    return [sys.executable, "-P", "-m", "diagnosd.reader", "--host", host, *excluded]


def environment(socket: Path) -> dict[str, str]:
    """Ours, but for PYTHONPATH, where a job's probe may stand: there it finds the diagnosd that we are."""
    here = Path(diagnosd.__file__).parents[1]
    return {**os.environ, "PYTHONPATH": str(here), "DIAGNOSD_SOCKET": str(socket.absolute())}


class Child:
    """A process that reads, and how far it has come. Nothing here blocks but the start."""

    def __init__(self, argv: Sequence[str], environ: dict[str, str]) -> None:
        """OSError where it cannot be started."""
        pipe = subprocess.PIPE
        # In a session of its own: Ctrl-C is for us, who ask it for its last words.
        self._process = subprocess.Popen(  # noqa: S603 - our own program
            argv, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe, env=environ, cwd="/", start_new_session=True
        )
        self._stdin = cast("IO[bytes]", self._process.stdin)
        self.stdout = cast("IO[bytes]", self._process.stdout)
        self.stderr = cast("IO[bytes]", self._process.stderr)
        for file in (self._stdin, self.stdout, self.stderr):
            os.set_blocking(file.fileno(), False)
        with suppress(OSError):  # more than what this user's pipes may hold together
            fcntl.fcntl(self.stdout, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.born = time.monotonic()
        self.asked = False  # for a round that is not done
        self.open: list[IO[bytes]] = [self.stdout, self.stderr]  # that it has not closed
        self.reads = ""  # the collector whose read it announced
        self.may_take = 0.0
        self.waited = 0.0  # seconds for what it was asked or announced, with nothing in the pipe
        self.missing: list[str] = []  # sentences
        self.ended = False  # its stdout
        self._rest = b""
        self._decoder = Decoder()

    @property
    def bad(self) -> int:
        """Lines that were no points."""
        return self._decoder.counts.bad

    def ask(self) -> None:
        self.asked = True
        with suppress(OSError):  # it has died, or has not read the last ones: then this one is not for it
            self._stdin.write(b"\n")

    def take(self) -> Batch:
        """What is in the pipe; its announcements are heeded."""
        self.waited = 0.0
        chunk = self.stdout.read(PIPE_BYTES)
        if not chunk:
            self.ended = self.ended or chunk == b""
            return Batch([], b"")
        whole, newline, rest = (self._rest + chunk).rpartition(b"\n")
        self._rest = rest if len(rest) < LINE_BYTES else b""
        lines = whole.split(b"\n") if newline else []
        said = b"".join(line + b"\n" for line in lines if not line.startswith(b"#"))
        for line in lines:
            if line.startswith(b"#"):
                self._heed(line.decode("utf-8", "replace"))
        return Batch(self._decoder.feed(said), said)

    def _heed(self, comment: str) -> None:
        match comment.split(" ", 3):
            case ["#", "begin", name, milliseconds] if is_counter(milliseconds):
                self.reads, self.may_take = plain(name), int(milliseconds) / 1e3
            case ["#", "end", _]:
                self.reads = ""
            case ["#", "missing", *words]:
                self.missing.append(plain(" ".join(words)))
            case ["#", "done"]:
                self.asked = False

    @property
    def waits(self) -> bool:
        """Whether it owes us an answer."""
        return self.asked or bool(self.reads)

    def limit(self, patience: Patience) -> float:
        return min(self.may_take, patience.most) if self.reads else patience.answer

    def overdue(self, patience: Patience) -> bool:
        return self.waits and self.waited > self.limit(patience)

    def complaints(self) -> bytes:
        """What is on its stderr, and what a library printed on its stdout."""
        said = self.stderr.read(PIPE_BYTES)
        if said == b"" and self.stderr in self.open:
            self.open.remove(self.stderr)
        return said or b""

    def leave(self) -> None:
        """It is asked for nothing more, and ends when it can."""
        for file in (self._stdin, self.stdout, self.stderr):
            file.close()

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def status(self, patience: float = 0.0) -> str:
        """As in "exited with 3", "was ended by SIGSEGV"; "" while it lives."""
        try:
            code = self._process.wait(patience)
        except subprocess.TimeoutExpired:
            return ""
        return f"exited with {code}" if code >= 0 else f"was ended by {signal_name(-code)}"


def once(
    host: str, exclude: Iterable[str], socket: Path, seconds: float, without: Sequence[str] = ()
) -> tuple[list[Point], list[str]]:
    """What the devices say in one round, as far as it comes in time; and sentences about what is not there or wrong.

    What has not answered in half of the time is left out the next time. OSError where no child can be started.
    """
    until = time.monotonic() + seconds
    silent: list[str] = []
    words: list[str] = []
    while True:
        left_off = [word for name in (*without, *silent) for word in ("--without", name)]
        child = Child([*command(host, exclude), *left_off], environment(socket))
        points, complaints = _round(child, (until - time.monotonic()) / 2)
        words += complaints
        if not child.reads or time.monotonic() > until:
            return points, [*child.missing, *dict.fromkeys(words)]
        silent.append(child.reads)
        words.append(f"{child.reads} did not answer")


def _round(child: Child, seconds: float) -> tuple[list[Point], list[str]]:
    """Then it is told to end, and not waited for. A library may print more than a pipe holds: the rest goes."""
    child.ask()
    until = time.monotonic() + seconds
    points: list[Point] = []
    said = b""
    while child.asked and not child.ended and (left := until - time.monotonic()) > 0:
        poll = select.poll()  # select() knows no descriptor beyond 1023
        for file in child.open:
            poll.register(file, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(1e3 * left)}
        if child.stderr.fileno() in ready:
            said = (said + child.complaints())[:COMPLAINTS]
        if child.stdout.fileno() in ready:
            points += child.take().points
    said = (said + child.complaints())[:COMPLAINTS]  # of one that has ended
    child.leave()
    child.terminate()
    child.status(GRACE_S)
    return points, [plain(line).removeprefix("diagnosd: ") for line in said.decode("utf-8", "replace").splitlines()]
