"""The analysis program: a source of points, the analysis, and what it found as text or documents.

Whatever the source, the same points give the same bytes. A replay prints every episode once, when it ends, and then
the summary; with a `speed`, or while it follows a recording that grows, it says changes as they come.
"""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import sys
import time
from contextlib import contextmanager, nullcontext, suppress
from threading import Event
from typing import TYPE_CHECKING, Any, TextIO

from diagnosd.analysis import Analysis, report
from diagnosd.documents import ClusterSpec, cluster_from_toml
from diagnosd.recording import Reading, read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from diagnosd.point import Point

    Document = Mapping[str, Any]

SECOND = 10**9
# Points by the ten thousand are alive at a time, and none in a cycle: at its usual 700 the collector would look at all
# of them again and again.
GC_AFTER = 50_000
UNNAMED = "default"  # the cluster's name where neither the recording nor the cluster.toml has one
SILENT_S = 30.0  # as long as a host may be silent before it is left behind
BAR_AFTER_S = 1.0  # work that takes longer shows its progress

_SGR = {"title": "1", "good": "1;32", "for": "32", "against": "33", "label": "2", "quiet": "2"}


class Findings:
    """What an analysis has said so far: the latest revision of each episode, in the order in which they were found.

    Of more than `keep` the older half goes, first what is over; `dropped` counts them.
    """

    def __init__(self, keep: float = math.inf) -> None:
        self.dropped = 0
        self._keep = keep
        self._latest: dict[str, Document] = {}

    @property
    def documents(self) -> list[Document]:
        return list(self._latest.values())

    def note(self, documents: Iterable[Document]) -> list[Document]:
        """Those that are news. Figures alone are told again once a minute: that is none."""
        news = []
        for document in documents:
            before = self._latest.get(document["id"], {})
            if any(before.get(key) != document.get(key) for key in ("state", "cause", "locus")):
                news.append(document)
            self._latest[document["id"]] = document
        if len(self._latest) > self._keep:
            self._make_room()
        return news

    def _make_room(self) -> None:
        by_age = sorted(self._latest, key=lambda each: self._latest[each]["state"] == "confirmed")
        for each in by_age[: len(by_age) // 2]:
            del self._latest[each]
            self.dropped += 1


def replay(
    path: str | Path,
    output: str = "text",
    speed: float | None = None,
    cluster: Path | None = None,
    follow: bool = False,
) -> int:
    """The exit code: 0 also when something was found, 1 when the recording or the cluster.toml cannot be used."""
    gc.set_threshold(GC_AFTER)
    try:
        declared = None if cluster is None else cluster_from_toml(cluster.read_bytes(), str(cluster))
        with _until_interrupted(follow or speed is not None) as stop:
            return _replay(path, output, speed, declared, follow, stop)
    except OutputError as error:
        if error.unread:  # `diagnosd replay ... | head`
            return 0
        _say(str(error))
    except OSError as error:
        _say(f"{error.filename or path}: {error.strerror}")
    except ValueError as error:
        _say(str(error))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 1


def _replay(
    path: str | Path, output: str, speed: float | None, declared: ClusterSpec | None, follow: bool, stop: Event
) -> int:
    findings = Findings()
    with read(path, follow=follow, stop=stop.is_set, wait=lambda: stop.wait(0.2)) as reading:
        name = (declared.name if declared else None) or reading.header.cluster or UNNAMED
        analysis = Analysis(name, declared)
        live = output == "text" and (follow or speed is not None)
        batches: Iterable[list[Point]] = noticing(reading, time.monotonic, _say)
        if speed is not None:
            batches = paced(batches, speed, time.monotonic, stop.wait)
        with nullcontext() if live else progress(reading, sys.stderr):
            for points in batches:
                news = findings.note(analysis.feed(points))
                if live:
                    with writing(sys.stdout):
                        tell_changes(news, analysis.trace.now, sys.stdout)
                if stop.is_set() and not follow:
                    break
        findings.note(analysis.finish())
        summary = analysis.summary()
        with writing(sys.stdout):
            if stop.is_set():
                leave_the_row(sys.stdout)
            conclude(findings.documents, summary, output, sys.stdout)
        for told in filter(None, (_left_out(reading, analysis), _taken_for_one(reading.clusters))):
            _say(told)
    return 0


class OutputError(Exception):
    """What was to be said could not be written."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"the output cannot be written: {error.strerror}")
        self.unread = isinstance(error, BrokenPipeError)  # only its reader has gone away


@contextmanager
def writing(stream: TextIO) -> Iterator[None]:
    """OutputError where the stream cannot be written. What it still holds, and what else is written, goes nowhere."""
    try:
        yield
        stream.flush()
    except OSError as error:
        with open(os.devnull, "w") as nowhere:  # noqa: PTH123 - a device
            os.dup2(nowhere.fileno(), stream.fileno())
        raise OutputError(error) from error


def conclude(documents: Sequence[Document], summary: Document, output: str, stream: TextIO) -> None:
    """Everything that was found, as text for people or one JSON document a line."""
    if output == "json":
        stream.writelines(json.dumps(document) + "\n" for document in (*documents, summary))
    else:
        show(report.whole(documents, summary), stream)
    stream.flush()


def leave_the_row(stream: TextIO) -> None:
    """The row in which a terminal has echoed ^C is no place for a title."""
    if stream.isatty():
        stream.write("\n")


def tell_changes(news: Iterable[Document], now: int, stream: TextIO) -> None:
    """One line for each, with the event time at which it was reached."""
    for document in news:
        moment = time.strftime("%H:%M:%S", time.gmtime(now // SECOND))
        stream.write(f"{moment} UTC  {document.get('state')}: {report.sentence(document)}\n")
    stream.flush()


def show(lines: Iterable[report.Line], stream: TextIO) -> None:
    """The lines, with colour where the stream is a terminal and nobody asked for none (no-color.org)."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        stream.write(report.plain(lines))
        return
    stream.writelines("".join(_coloured(span) for span in line) + "\n" for line in lines)


def _coloured(span: report.Span) -> str:
    sgr = _SGR.get(span.role)
    return f"\x1b[{sgr}m{span.text}\x1b[0m" if sgr else span.text


def noticing(
    batches: Iterable[list[Point]], clock: Callable[[], float], say: Callable[[str], object]
) -> Iterator[list[Point]]:
    """The batches, and a word when nothing has come for a while: event time stands still then, and the analysis too."""
    last, said = clock(), False
    for points in batches:
        if points:
            last, said = clock(), False
        elif not said and clock() - last > SILENT_S:
            say(f"nothing has come for {SILENT_S:.0f} s: do the agents still run, and can they write the recording?")
            said = True
        yield points


def paced(
    batches: Iterable[Sequence[Point]],
    speed: float,
    clock: Callable[[], float],
    sleep: Callable[[float], object],
) -> Iterator[list[Point]]:
    """The points no earlier than they came, `speed` times as fast.

    In parts of a tenth of a second on this clock, or of a second of event time where that is shorter.
    """
    begin, first, last = clock(), 0, 0
    step = round(min(0.1 * speed, 1.0) * SECOND)
    part: list[Point] = []
    for batch in batches:
        for point in batch:
            first, last = first or point.time, last or point.time
            if point.time > last + step:
                yield part
                part, last = [], point.time
                sleep(max(0.0, begin + (last - first) / SECOND / speed - clock()))
            part.append(point)
    yield part


@contextmanager
def progress(reading: Reading, stream: TextIO) -> Iterator[None]:
    """A bar on a terminal, once the work has lasted a second, fed by a look at how far the reading is."""
    if not stream.isatty():
        yield
        return
    from threading import Thread  # noqa: PLC0415  # rich costs 50 ms to load, and only a long replay shows a bar

    done = Event()
    thread = Thread(target=_draw, args=(reading, stream, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _draw(reading: Reading, stream: TextIO, done: Event) -> None:
    if done.wait(BAR_AFTER_S):
        return
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import Progress  # noqa: PLC0415

    with Progress(console=Console(file=stream), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("replay", total=reading.size)
        while not done.wait(0.1):
            bar.update(task, completed=reading.position, refresh=True)


@contextmanager
def _until_interrupted(gently: bool) -> Iterator[Event]:
    """With `gently`, Ctrl-C sets the event: what was read so far gets its verdict. Else it interrupts."""
    stop = Event()
    if not gently:
        yield stop
        return
    before = signal.signal(signal.SIGINT, lambda *_: stop.set())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def _left_out(reading: Reading, analysis: Analysis) -> str:
    """What was not used of the recording, in one line; nothing where all of it was."""
    faults, order, trace = reading.faults, analysis.order, analysis.trace
    counts = (
        (faults.bad, "line that does not parse", "lines that do not parse"),
        (faults.mistyped, "field of another type than the contract's", "fields of other types than the contract's"),
        (faults.torn, "unfinished end", "unfinished ends"),
        (faults.lost, "corrupt frame", "corrupt frames"),
        (faults.unread, "file or the rest of one", "files or the rest of them"),
        (order.late, "point that came too late", "points that came too late"),
        (order.strays, "point of a wrong clock", "points of a wrong clock"),
        (trace.unreadable, "unreadable document", "unreadable documents"),
        (trace.crowded, "job of more than can be watched at once", "jobs of more than can be watched at once"),
    )
    parts = [f"{count:,} {one if count == 1 else many}" for count, one, many in counts if count]
    if not parts:
        return ""
    first = f" (first: {faults.first})" if faults.first else ""
    return f"left out: {', '.join(parts)}{first}"


def _taken_for_one(clusters: Mapping[str, Path]) -> str:
    """A warning where a folder holds several clusters: points name their job and host, and no cluster."""
    if len(clusters) < 2:
        return ""
    named = ", ".join(f"{name} ({path.name})" for name, path in sorted(clusters.items()))
    return (
        f"recordings of several clusters, {named}: jobs and hosts of one name are taken for one; replay each by itself"
    )


def _say(text: str) -> None:
    with suppress(OutputError), writing(sys.stderr):
        sys.stderr.write(f"diagnosd: {report.clean(text)}\n")
