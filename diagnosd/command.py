"""Somebody's command: started with our own stdin, stdout and stderr, told of our signals, waited for.

It stays in our process group, so that the terminal's Ctrl-C, Ctrl-Z and hang-up reach it as they would without us. What
the terminal sends is therefore not passed on, else the command would see it twice; what a program sends to us is.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Mapping, Sequence

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
NO_SUCH_COMMAND, NOT_EXECUTABLE, COULD_NOT_START = 127, 126, 125  # as env(1), nohup(1) and the shells have them
# A signal that comes so soon after its end belongs to that end: nobody has seen it and asked for more in less.
REACTION_S = 0.2
_BY_PROGRAM = 0  # si_code: above it (SI_KERNEL) the terminal's driver sent it, to the whole group


class StartError(Exception):
    """The command was not started: why, and the exit code that says so."""

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.code = code


def check(argv: Sequence[str]) -> None:
    """StartError where there is no such command, before anything is made for it."""
    name = argv[0]
    if not name:
        raise StartError("the name of the command is empty", NO_SUCH_COMMAND)
    if "/" in name and os.path.isdir(name):  # noqa: PTH112 - a name of the shell, not a path of ours
        raise StartError(f"{name} is a folder, not a command", NOT_EXECUTABLE)
    if shutil.which(name) is None:
        there = "/" in name and os.path.exists(name)  # noqa: PTH110
        reason = f"{name} is not executable" if there else f"{name}: no such command"
        raise StartError(reason, NOT_EXECUTABLE if there else NO_SUCH_COMMAND)


def take_signals() -> frozenset[signal.Signals]:
    """Blocks the signals that are passed on; to be called before any thread is made.

    What was ignored when we were started (nohup) stays ignored, by us and by the command.
    """
    taken = frozenset(number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, taken)
    return taken


class Command:
    def __init__(self, argv: list[str], environ: Mapping[str, str], signals: frozenset[signal.Signals]) -> None:
        """Starts it, with all there is to watch it by. StartError or RuntimeError where the kernel refuses."""
        self.code = COULD_NOT_START  # once it has ended: its own, or 128 + the number of the signal that ended it
        self.status = ""  # "exited with 3", "was ended by SIGKILL"
        self.enough = threading.Event()  # it has ended, and somebody does not want to wait for the verdict
        self.interrupted = False  # from the terminal, which then shows ^C and leaves the cursor behind it
        self._known = threading.Lock()  # held while its pid is sure to be its own
        self._ended_at = 0.0  # monotonic; infinite while it runs
        restored = [signal.SIGPIPE, signal.SIGXFSZ]  # Python ignores them
        with self._known:
            threading.Thread(target=self._pass_on, args=(signals,), name="signals", daemon=True).start()
            try:
                self.pid = os.posix_spawnp(argv[0], argv, environ, setsigmask=[], setsigdef=restored)
            except OSError as error:
                raise _refused(argv[0], error) from error
            self._ended_at = math.inf

    def wait(self) -> None:
        """Until it has ended; `code` and `status` are known then. For one thread, once."""
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._known:
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self.code = code if code >= 0 else 128 - code
            self.status = f"exited with {code}" if code >= 0 else f"was ended by {signal_name(-code)}"
            self._ended_at = time.monotonic()

    def _pass_on(self, signals: frozenset[signal.Signals]) -> None:
        """Once it is over a signal ends the wait for the verdict, and one more ends us where even that takes long."""
        while not self.enough.is_set():
            received = signal.sigwaitinfo(signals)
            self.interrupted |= received.si_code > _BY_PROGRAM and received.si_signo in (signal.SIGINT, signal.SIGQUIT)
            with self._known:
                if time.monotonic() > self._ended_at + REACTION_S:
                    self.enough.set()
                elif math.isinf(self._ended_at) and received.si_code <= _BY_PROGRAM and received.si_pid != self.pid:
                    os.kill(self.pid, received.si_signo)
        signal.sigwaitinfo(signals)
        os._exit(self.code)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _refused(name: str, error: OSError) -> StartError:
    if error.errno == errno.ENOENT:
        return StartError(f"{name}: no such command, or the interpreter in its first line is missing", NO_SUCH_COMMAND)
    if error.errno in (errno.EACCES, errno.ENOEXEC):
        return StartError(f"{name}: cannot be executed: {error.strerror}", NOT_EXECUTABLE)
    return StartError(f"{name}: cannot be started: {error.strerror}", COULD_NOT_START)
