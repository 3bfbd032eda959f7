"""A command under observation, and an agent that analyzes what it collects: where agent and analysis meet.

The analysis has a thread of its own, never the loop's. It is given exactly the points that are recorded, so that a
replay of the recording gives the same verdict.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import math
import os
import queue
import re
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from diagnosd import agent
from diagnosd.agent import PROBE, Agent, declaration
from diagnosd.analysis import Analysis, report
from diagnosd.analyzer import UNNAMED, Findings, OutputError, conclude, leave_the_row, writing
from diagnosd.command import COULD_NOT_START, Command, StartError, check, take_signals
from diagnosd.liveline import LiveLine, possible
from diagnosd.pace import Batch
from diagnosd.point import Point
from diagnosd.probe.identity import is_off, job_name
from diagnosd.recording import RecordingError, read
from diagnosd.sinks import STOP_S, Recorder, Sink, recording_of
from diagnosd.wording import log_calmly, said

log = logging.getLogger("diagnosd.run")

Document = Mapping[str, Any]

GRACE_S = 2.0  # the hosts of a folder end at about the same time, and flush every second
LOOK_S = 0.05  # between two looks whether somebody has had enough
FOLDER, SOCKET = "diagnosd-run-", "probe.sock"  # what it makes in /tmp
# A job's name that no person gave it: HOST-BOOT-PID of `job_name`, and the uid of a Kubernetes Job
MADE = re.compile(r".*-([0-9a-f]{8}|noboot)-[0-9]+|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
FINDINGS = 4096  # of which the documents are kept to be told at the end: about 40 MB
WAITING = 64  # batches: when the analysis falls behind, the agent's ring takes the rest, and counts what it must drop


class Verdicts:
    """The analysis on a thread of its own, as a sink of the agent, and what it has said so far.

    With a `folder` it follows what every host records there, our own points included; the recorder must come first.
    """

    def __init__(self, cluster: str, folder: Path | None, tell: Callable[[Verdicts], object]) -> None:
        self.findings = Findings(FINDINGS)
        self.news: list[Document] = []  # what the last points changed
        self.measurements: set[str] = set()
        self.summary: Document = {}
        self.failure = ""  # why there is no verdict
        self.lost = 0  # nothing: what it does not take is kept from the recording too
        self.analysis = Analysis(cluster)
        self.folder = folder
        self._tell = tell
        self._batches: queue.Queue[list[Point] | None] = queue.Queue(WAITING)
        self._closed_at = math.inf
        self._went_on_at = 0.0
        self._thread = threading.Thread(target=self._work, name="analysis", daemon=True)
        self._thread.start()

    def take(self, batches: Sequence[Batch]) -> None:
        if self.folder is None:
            self._put([each for batch in batches for each in batch.points])

    def close(self) -> None:
        self._closed_at = time.monotonic()
        self._put(None)

    def join(self, enough: threading.Event) -> None:
        """Until it has come to its end, somebody has had enough, or it has not gone on for STOP_S.

        Why there is no verdict then is its `failure`; it says nothing more.
        """
        since = time.monotonic()
        while self._thread.is_alive() and not self.failure:
            self._thread.join(LOOK_S)
            if enough.is_set():
                self.failure = "the verdict was not waited for"
            elif time.monotonic() - max(since, self._went_on_at) > STOP_S:
                self.failure = f"the analysis has not gone on for {STOP_S:.0f} s"
        if self.failure:
            self._tell = _tell_nothing

    def conclude(self, output: str, stream: TextIO) -> None:
        """The words and documents that `diagnosd replay` has for the same points."""
        conclude(self.findings.documents, self.summary, output, stream)
        dropped, crowded = self.findings.dropped, self.analysis.trace.crowded
        if dropped:
            _say(f"{dropped:,} earlier findings, told when they were found, are not told again")
        if crowded:
            _say(f"{crowded:,} jobs were more than can be watched at once")

    def _put(self, points: list[Point] | None) -> None:
        """Waits while the analysis is behind; an analysis that has stopped holds up nobody."""
        while self._thread.is_alive():
            with suppress(queue.Full):
                self._batches.put(points, timeout=1.0)
                return

    def _points(self) -> Iterator[list[Point]]:
        if self.folder is None:
            yield from iter(self._batches.get, None)
            return
        told = 0
        reading = read(self.folder, follow=True, stop=lambda: time.monotonic() > self._closed_at + GRACE_S)
        for points in chain(reading, ([],)):  # what ended the reading is known only behind its last points
            yield points
            for reason in reading.unread[told:]:
                log.warning("%s; the verdict covers what was read", reason)
                told += 1

    def _work(self) -> None:
        try:
            self._analyze()
        except Exception as error:  # noqa: BLE001 - it costs the verdict, not the command and its recording
            self.failure = f"the analysis failed: {type(error).__name__}: {error}"
            log.warning("%s; nothing more is analyzed", self.failure)

    def _analyze(self) -> None:
        try:
            for points in self._points():
                self.measurements.update(each.series.measurement for each in points)
                self._say(self.analysis.feed(points))
                self._went_on_at = time.monotonic()
        except RecordingError as error:
            log.warning("%s; the verdict covers what was read", error)
        self._say(self.analysis.finish())
        self.summary = self.analysis.summary()

    def _say(self, documents: Sequence[Document]) -> None:
        self.news = self.findings.note(documents)
        self._tell(self)


@dataclass(frozen=True, slots=True)
class Options:
    """What `run` and `agent` share."""

    host: str
    record: str = ""  # a file, or a folder with one file a host; "" for none
    cluster: Path | None = None  # cluster.toml
    exclude: Sequence[str] = ()  # patterns of devices that are left alone


def _embedded(socket: Path, options: Options, tell: Callable[[Verdicts], object]) -> tuple[Agent, Verdicts]:
    """An agent and an analysis in one process. OSError or ValueError says what could not be had."""
    cluster, declared = declaration(options.cluster)
    sinks: list[Sink] = []
    folder = None
    if options.record:
        file = recording_of(options.record, options.host)
        folder = file.parent if file != Path(options.record) else None
        sinks.append(Recorder(file, cluster=cluster))
    verdicts = Verdicts(cluster or UNNAMED, folder, tell)
    return agent.make(options.host, socket, [*sinks, verdicts], declared, options.exclude), verdicts


def run(argv: list[str], environ: Mapping[str, str], options: Options, job: str, output: str) -> int:
    """The command's exit code, or what the shells say where it could not be started."""
    log_calmly(logging.WARNING)
    with ExitStack() as stack, ExitStack() as watching:
        try:
            check(argv)
            signals = take_signals()
            socket, tell = stack.enter_context(_own_socket()), stack.enter_context(_told_live())
            watched, verdicts = _embedded(socket, options, tell)
            if verdicts.folder and _is_of_this_host(job, environ):
                _say(f"only this host calls the job {job}: where several nodes record, name it with --job NAME")
            watching.enter_context(_watching(watched))
            command = Command(argv, _environment(environ, socket, options.host, job), signals)
        except StartError as error:
            return _not_started(str(error), error.code)
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: there can be no more threads
            return _not_started(f"{argv[0]} was not started: {said(error)}", COULD_NOT_START)
        command.wait()
        watching.close()
        verdicts.join(command.enough)
    with _at_our_cost("the verdict"):
        unjudged = verdicts.failure and f"diagnosd: {_unjudged(watched, verdicts, options)}"
        silent = _silence(verdicts, f"{argv[0]} {command.status}", environ)
        _tell_all(verdicts, unjudged or (silent and _wrapped(f"diagnosd: {silent}")), command, output)
    return command.code


def _is_of_this_host(job: str, environ: Mapping[str, str]) -> bool:
    """Whether nothing in the environment names the job: then it has another name on each host."""
    return job == job_name({"DIAGNOSD_HOST": environ.get("DIAGNOSD_HOST", "")}, os.getpid())


@contextmanager
def _at_our_cost(part: str) -> Iterator[None]:
    """Around what follows the start of the command: its code is to be told, whatever fails of ours."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - a mistake of ours, and no reason to take the command's code
        log.warning("%s failed: %s: %s", part, type(error).__name__, error)


def _tell_all(verdicts: Verdicts, unjudged: str, command: Command, output: str) -> None:
    with _if_possible(sys.stdout):
        if output == "json" and not verdicts.failure:
            verdicts.conclude("json", sys.stdout)
    with _if_possible(sys.stderr):
        if command.interrupted:
            leave_the_row(sys.stderr)
        if unjudged:
            print(unjudged, file=sys.stderr)
        elif output == "text":
            verdicts.conclude("text", sys.stderr)


def _unjudged(watched: Agent, verdicts: Verdicts, options: Options) -> str:
    """Why there is no verdict, and how to have one all the same."""
    if not options.record:
        return verdicts.failure
    held = "what was recorded can be replayed" if watched.lost else "the recording is whole, replay it"
    return f"{verdicts.failure}; {held}: diagnosd replay {options.record}"


def _say(text: str) -> None:
    with _if_possible(sys.stderr):
        print(f"diagnosd: {text}", file=sys.stderr)


def _not_started(reason: str, code: int) -> int:
    _say(reason)
    return code


@contextmanager
def _watching(watched: Agent) -> Iterator[None]:
    """The agent, on a thread of its own: ours is the command's, which is waited for whatever becomes of the agent."""
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    def observe() -> None:
        with _at_our_cost("the observation"):
            loop.run_until_complete(watched.run(stop))

    thread = threading.Thread(target=observe, name="agent", daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def watch(socket: Path, options: Options) -> int:
    """An agent that analyzes what it collects, until it is told to stop: its exit code.

    OSError or ValueError says what it could not have.
    """
    log_calmly()
    agent.hold_signals()
    watched, verdicts = _embedded(socket, options, _tell_changes)
    log.info("watching %s; %s", options.host, agent.invitation(socket))
    asyncio.run(agent.until_told(watched))
    verdicts.join(threading.Event())
    if verdicts.failure:
        _say(_unjudged(watched, verdicts, options))
        return 1
    with _if_possible(sys.stdout):
        leave_the_row(sys.stdout)
        verdicts.conclude("text", sys.stdout)
    return 0


@contextmanager
def _if_possible(stream: TextIO) -> Iterator[None]:
    """What cannot be written is said on stderr, if that can be; a reader that has gone away is no error."""
    try:
        with writing(stream):
            yield
    except OutputError as error:
        if not error.unread:
            log.warning("%s", error)


def _environment(environ: Mapping[str, str], socket: Path, host: str, job: str) -> dict[str, str]:
    """What the command finds: our job, socket and host, and the probe before whatever the user has on PYTHONPATH."""
    path = os.pathsep.join(part for part in (str(PROBE), environ.get("PYTHONPATH", "")) if part)
    names = {"DIAGNOSD_JOB": job, "DIAGNOSD_HOST": host, "DIAGNOSD_SOCKET": str(socket), "PYTHONPATH": path}
    return {**environ, **names}


@contextmanager
def _own_socket() -> Iterator[Path]:
    """In a folder that ranks of any user can enter; below /tmp, for a socket's path must be short."""
    _remove_left_behind()
    folder, lock = _own_folder()
    try:
        folder.chmod(0o755)
        yield folder / SOCKET
    finally:
        with suppress(OSError):
            _remove(folder, lock)
        os.close(lock)


def _own_folder() -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=FOLDER, dir="/tmp"))
        with suppress(FileNotFoundError, BlockingIOError):  # another run took it for left behind, before it was locked
            return folder, _lock(folder, ours=True)


def _lock(folder: Path, *, ours: bool = False) -> int:
    """A descriptor of the folder, locked as long as this process lives. OSError where another's is, or it has gone.

    Where files cannot be locked, nothing that was left behind can be told from what is in use: only what we made goes.
    """
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _claim(lock, ours)
        if not os.path.samestat(os.fstat(lock), folder.lstat()):
            raise FileNotFoundError(folder)
    except OSError:
        os.close(lock)
        raise
    return lock


def _claim(lock: int, ours: bool) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if not ours or error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise


def _remove_left_behind() -> None:
    """What our user's runs left that were killed: nobody has locked it any more."""
    for folder in Path("/tmp").glob(f"{FOLDER}*"):  # noqa: S108 - only what is ours, and no link, is touched
        with suppress(OSError):  # it is in use, or a link, or holds something else
            lock = _lock(folder)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    _remove(folder, lock)
            finally:
                os.close(lock)


def _remove(folder: Path, lock: int) -> None:
    with suppress(FileNotFoundError):
        os.unlink(SOCKET, dir_fd=lock)
    folder.rmdir()


@contextmanager
def _told_live() -> Iterator[Callable[[Verdicts], object]]:
    """A live line where there is a terminal for it, else a line for each change."""
    if not possible(sys.stderr.fileno()):
        yield _tell_changes
        return
    line = LiveLine(sys.stderr.fileno())
    try:
        yield lambda verdicts: line.show(_live(verdicts, line.columns))
    finally:
        line.close()


def _live(verdicts: Verdicts, columns: int) -> str:
    """A single job's name is left out where nobody gave it: what is found must fit in."""
    of_job: dict[str, list[Document]] = {}
    for document in verdicts.findings.documents:
        of_job.setdefault(document["job"], []).append(document)
    statuses = verdicts.analysis.status()
    room = columns - len("diagnosd: ")
    jobs = [
        report.live("" if len(statuses) == 1 and MADE.fullmatch(name) else name, status, of_job.get(name, []), room)
        for name, status in statuses.items()
    ]
    return report.clip("diagnosd: " + ("  |  ".join(jobs) or "waiting for the first steps"), columns)


def _tell_changes(verdicts: Verdicts) -> None:
    with _if_possible(sys.stderr):
        for document in verdicts.news:
            print(f"diagnosd: {document['state']}: {report.sentence(document)}", file=sys.stderr, flush=True)


def _tell_nothing(_: Verdicts) -> None:
    """The analysis may still go on when we are about to leave."""


def _silence(verdicts: Verdicts, end: str, environ: Mapping[str, str]) -> str:
    """Why there is nothing to judge, and what to do; "" where there is."""
    if "diagnosd_step" in verdicts.measurements:
        return ""
    said = "no rank reported a step: "
    if "diagnosd_rank" in verdicts.measurements:
        gaps = [gap["text"] for job in verdicts.summary.get("jobs", {}).values() for gap in job.get("gaps", ())]
        return said + (f"{end}; {gaps[0]}" if gaps else f"{end} before the first one was over.")
    if is_off(environ):
        return f"{said}DIAGNOSD={environ['DIAGNOSD']} is set, which switches the probe off."
    well = end.endswith(" exited with 0")
    failed = "" if well else ", until then" if " was ended by " in end else " (its own output says why), until then"
    return (
        f"{said}{end}{', and' if well else failed} nothing in it trained with PyTorch where the probe could see it"
        " (python -I and -E, sudo and containers drop PYTHONPATH). Any other loop can name its steps itself,"
        " `with step():` from diagnosd.probe, see README."
    )


def _wrapped(text: str) -> str:
    """For the terminal on stderr, or a page; a path stays whole."""
    columns = os.get_terminal_size(sys.stderr.fileno()).columns if sys.stderr.isatty() else 0  # some do not know theirs
    return textwrap.fill(text, columns or report.WIDTH, break_long_words=False, break_on_hyphens=False)
