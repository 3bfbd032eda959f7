"""A command under observation, and an agent that analyzes what it collects: where agent and analysis meet.

The analysis has a thread of its own, never the loop's. It is given exactly the points that are recorded, so that a
replay of the recording gives the same verdict.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import queue
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from diagnosd import agent
from diagnosd.agent import PROBE, Agent, Batch, Recorder, Sink, declaration, recording_of
from diagnosd.analysis import Analysis, report
from diagnosd.analyzer import UNNAMED, Findings, conclude, leave_the_row
from diagnosd.command import COULD_NOT_START, Command, StartError, check, take_signals
from diagnosd.liveline import LiveLine, possible
from diagnosd.point import Point
from diagnosd.recording import RecordingError, read

log = logging.getLogger("diagnosd.run")

Document = Mapping[str, Any]

GRACE_S = 2.0  # the hosts of a folder end at about the same time, and flush every second
WAITING = 64  # batches: when the analysis falls behind, the agent's ring takes the rest, and counts what it must drop


class Verdicts:
    """The analysis on a thread of its own, as a sink of the agent, and what it has said so far.

    With a `folder` it follows what every host records there, our own points included; the recorder must come first.
    """

    def __init__(self, cluster: str, folder: Path | None, tell: Callable[[Verdicts], object]) -> None:
        self.findings = Findings()
        self.news: list[Document] = []  # what the last points changed
        self.measurements: set[str] = set()
        self.summary: Document = {}
        self.analysis = Analysis(cluster)
        self._folder = folder
        self._tell = tell
        self._batches: queue.Queue[list[Point] | None] = queue.Queue(WAITING)
        self._closed_at = math.inf
        self._thread = threading.Thread(target=self._work, name="analysis", daemon=True)
        self._thread.start()

    def take(self, batches: Sequence[Batch]) -> None:
        if self._folder is None:
            self._put([each for batch in batches for each in batch.points])

    def close(self) -> None:
        self._closed_at = time.monotonic()
        self._put(None)

    def join(self) -> None:
        self._thread.join()

    def conclude(self, output: str, stream: TextIO) -> None:
        """The words and documents that `diagnosd replay` has for the same points."""
        conclude(self.findings.documents, self.summary, output, stream)

    def _put(self, points: list[Point] | None) -> None:
        """Waits while the analysis is behind; an analysis that has stopped holds up nobody."""
        while self._thread.is_alive():
            with suppress(queue.Full):
                self._batches.put(points, timeout=1.0)
                return

    def _points(self) -> Iterator[list[Point]]:
        if self._folder is None:
            return iter(self._batches.get, None)
        return iter(read(self._folder, follow=True, stop=lambda: time.monotonic() > self._closed_at + GRACE_S))

    def _work(self) -> None:
        try:
            for points in self._points():
                self.measurements.update(each.series.measurement for each in points)
                self._say(self.analysis.feed(points))
        except RecordingError as error:
            log.warning("%s; the verdict covers what was read before", error)
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
    return agent.make(options.host, socket, [*sinks, verdicts], declared), verdicts


def run(argv: list[str], environ: Mapping[str, str], options: Options, job: str, output: str) -> int:
    """The command's exit code, or what the shells say where it could not be started."""
    agent.log_calmly()
    with ExitStack() as stack:
        try:
            check(argv)
            signals = take_signals()
            socket, tell = stack.enter_context(_own_socket()), stack.enter_context(_told_live())
            watched, verdicts = _embedded(socket, options, tell)
            command = Command(argv, _environment(environ, socket, options.host, job), signals)
        except StartError as error:
            return _not_started(str(error), error.code)
        except (OSError, ValueError) as error:
            return _not_started(f"{argv[0]} was not started: {agent.said(error)}", COULD_NOT_START)
        asyncio.run(_observe(watched, command))
        verdicts.join()
    silence = _silence(verdicts, f"{argv[0]} {command.status}", environ)
    with _read_by_somebody(sys.stderr):
        if command.interrupted:
            leave_the_row(sys.stderr)
        if silence:
            print(f"diagnosd: no rank reported a step: {silence}", file=sys.stderr)
        elif output == "text":
            verdicts.conclude("text", sys.stderr)
    with _read_by_somebody(sys.stdout):
        if output == "json":
            verdicts.conclude("json", sys.stdout)
    return command.code


def _not_started(reason: str, code: int) -> int:
    print(f"diagnosd: {reason}", file=sys.stderr)
    return code


async def _observe(watched: Agent, command: Command) -> None:
    """The agent ends when the command has."""
    stop = asyncio.Event()
    watching = asyncio.create_task(watched.run(stop))
    await asyncio.to_thread(command.wait)
    stop.set()
    await watching


def watch(socket: Path, options: Options) -> None:
    """An agent that analyzes what it collects, until it is told to stop. OSError or ValueError where it cannot."""
    agent.log_calmly()
    agent.hold_signals()
    watched, verdicts = _embedded(socket, options, _tell_changes)
    log.info("watching %s; %s", options.host, agent.invitation(socket))
    asyncio.run(agent.until_told(watched))
    verdicts.join()
    with _read_by_somebody(sys.stdout):
        leave_the_row(sys.stdout)
        verdicts.conclude("text", sys.stdout)


@contextmanager
def _read_by_somebody(stream: TextIO) -> Iterator[None]:
    """A reader that has gone away is no error: what would still be written goes nowhere."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _environment(environ: Mapping[str, str], socket: Path, host: str, job: str) -> dict[str, str]:
    """What the command finds: our job, socket and host, and the probe before whatever the user has on PYTHONPATH."""
    path = os.pathsep.join(part for part in (str(PROBE), environ.get("PYTHONPATH", "")) if part)
    names = {"DIAGNOSD_JOB": job, "DIAGNOSD_HOST": host, "DIAGNOSD_SOCKET": str(socket), "PYTHONPATH": path}
    return {**environ, **names}


@contextmanager
def _own_socket() -> Iterator[Path]:
    """In a folder that ranks of any user can enter; below /tmp, for a socket's path must be short."""
    folder = Path(tempfile.mkdtemp(prefix="diagnosd-", dir="/tmp"))
    try:
        folder.chmod(0o755)
        yield folder / "probe.sock"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _told_live() -> Iterator[Callable[[Verdicts], object]]:
    """A live line where there is a terminal for it, else a line for each change."""
    if not possible(sys.stderr.fileno()):
        yield _tell_changes
        return
    line = LiveLine(sys.stderr.fileno())
    try:
        yield lambda verdicts: line.show(_live(verdicts))
    finally:
        line.close()


def _live(verdicts: Verdicts) -> str:
    documents = verdicts.findings.documents
    jobs = [report.live(name, status, documents) for name, status in verdicts.analysis.status().items()]
    return "diagnosd: " + ("  |  ".join(jobs) or "no rank has reported yet")


def _tell_changes(verdicts: Verdicts) -> None:
    with _read_by_somebody(sys.stderr):
        for document in verdicts.news:
            print(f"diagnosd: {document['state']}: {report.sentence(document)}", file=sys.stderr, flush=True)


def _silence(verdicts: Verdicts, end: str, environ: Mapping[str, str]) -> str:
    """Why there is nothing to judge, and what to do; "" where there is."""
    if "diagnosd_step" in verdicts.measurements:
        return ""
    if "diagnosd_rank" in verdicts.measurements:
        gaps = [gap["text"] for job in verdicts.summary.get("jobs", {}).values() for gap in job.get("gaps", ())]
        return f"{end}; {gaps[0]}" if gaps else f"{end} before the first one was over."
    if environ.get("DIAGNOSD", "").lower() in ("off", "0", "no", "false"):
        return f"DIAGNOSD={environ['DIAGNOSD']} is set, which switches the probe off."
    return (
        f"{end}, and nothing in it trained with PyTorch where the probe could see it (python -I and -E, sudo and"
        " containers drop PYTHONPATH). Any other loop can call `with probe.step():`, see README."
    )
