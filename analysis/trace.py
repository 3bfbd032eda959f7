"""What the points say, as aligned arrays over event time: ranks x steps of each job, fields x samples of each device.

    trace = Trace(cluster)
    trace.add(points)                 # in the order (time, series), as Order releases them
    steps = trace.jobs["llama"].steps()
    for series in trace.series_of("net", "n01"):
        t, sent = trace.samples(series, "bytes_sent")

Only what WANTED names is kept of the devices, and of everything only the newest part, so that the trace of a job that
runs for weeks is as large as that of one that ran an hour. A measurement that nobody wants costs one look-up a point.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from diagnosd.analysis.samples import Floats, Ints, Numbers, Samples
from diagnosd.analysis.steps import LONGEST_S, SOURCES, Grid, Steps
from diagnosd.documents import ClusterSpec, JobSpec, NodeInventory, decode_cluster, decode_job, decode_node, unite
from diagnosd.point import Point, Series, Value
from diagnosd.schema import SCHEMA

# measurement -> its fields that evidence uses: what stands here is kept. Evidence that needs more adds it here.
WANTED: Mapping[str, tuple[str, ...]] = {
    "net": ("bytes_sent", "bytes_recv", "err_in", "drop_in", "drop_out"),
    "cpu": ("usage_steal",),
    "pressure": ("total",),
    "diskio": ("reads", "writes", "read_time", "write_time"),
    "diagnosd_process": (
        "phase", "group", "seq", "state", "cpu_main", "cpu_workers", "throttled", "involuntary_switches", "gc_seconds",
    ),
    "diagnosd_socket": (
        "rtt", "cwnd", "retransmits", "bytes_sent", "bytes_received", "send_queue", "receive_queue",
        "segments_sent", "busy", "receiver_limited",
    ),
    "diagnosd_nccl": ("network",),
}  # fmt: skip

EVENTS = 4096  # the newest; a flapping link sends a few hundred an hour
JOBS = 512  # watched at once: twice as many as one node lets in. Many more are no training jobs
ENDED_S = 60  # a job has ended when none of its ranks has run for so long (telemetry.md 2)
FORGET_S = 3600  # what has sent nothing for an hour is forgotten: old jobs, devices that were renamed
RANK_DIGITS = 18  # within 64 bits, by far
SETTLE = 20_000  # points that may wait for their columns: about 10 MB


@dataclass(frozen=True, slots=True)
class Event:
    """A diagnosd_event; `subject` is a locus, `job` and the fields are None where absent."""

    time: int
    host: str
    kind: str
    subject: str
    job: str | None
    text: str | None
    value: float | None


@dataclass(slots=True)
class RankInfo:
    """What is known of a rank in its newest attempt; `last` (ns) of the points that say it ran."""

    rank: int
    host: str
    last: int
    attempt: int = 0
    world: int | None = None
    gpu: str | None = None  # uuid
    state: str = "running"  # running, exited, lost
    loader: str | None = None  # torch, dali, api, none
    versions: dict[str, str] = field(default_factory=dict)
    addresses: tuple[str, ...] = ()  # local addresses of its TCP connections


class Job:
    """One job: its spec, its ranks, and the steps of its newest attempt."""

    def __init__(self, name: str, origin: int) -> None:
        self.name = name
        self.spec = JobSpec()
        self.state: str | None = None  # what diagnosd_job says: running, ended
        self.ranks: dict[int, RankInfo] = {}
        self.first = self.last = 0  # ns, of all points of the job
        self.stepped = 0  # ns, when the newest step ended
        self.longest = 0.0  # s, of the steps of single ranks since somebody set it back
        self.outdated: dict[
            str, tuple[int, int]
        ] = {}  # host -> steps of an earlier attempt than others' (dropped); first
        self._origin = origin
        self._grid = Grid(0, origin)

    @property
    def attempt(self) -> int:
        return self._grid.attempt

    @property
    def world(self) -> int:
        """Ranks of the newest attempt: as they say themselves, else as many as were seen."""
        return max((info.world or 0 for info in self.ranks.values()), default=0) or len(self.ranks)

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(sorted({info.host for info in self.ranks.values()}))

    @property
    def taken(self) -> int:
        """Steps of single ranks that this attempt has sent, those no longer kept included."""
        return self._grid.taken

    def steps(self) -> Steps:
        """The newest attempt's steps (at most 2,000), good until the trace takes more points."""
        return self._grid.steps()

    @property
    def runs(self) -> bool:
        """Whether one of its ranks may."""
        return any(info.state == "running" for info in self.ranks.values())

    def ended(self, now: int) -> bool:
        """Whether it said so, or none of its ranks has run for a minute. A killed job has ended; it does not hang."""
        if self.state == "ended":
            return True
        running = [info.last for info in self.ranks.values() if info.state == "running"]
        gone = [info.last for info in self.ranks.values()]
        return now - max(running or gone or [self.last]) > ENDED_S * 10**9

    def _rise(self, attempt: int) -> None:
        """A new incarnation: ranks, layout and step numbers begin anew."""
        self._grid = Grid(attempt, self._origin)
        self.ranks.clear()
        self.state = None


class Trace:
    """Takes points in the order of event time, keeps what evidence needs. Pure: no clock, no I/O."""

    def __init__(self, cluster: ClusterSpec | None = None, wanted: Mapping[str, tuple[str, ...]] = WANTED) -> None:
        self.cluster = cluster
        self.declared = cluster is not None  # then diagnosd_cluster points do not change it
        self.now = 0  # event time, ns
        self.origin = 0  # time of the first point, ns: the zero of all times in seconds
        self.jobs: dict[str, Job] = {}
        self.events: deque[Event] = deque(maxlen=EVENTS)
        self.seen: dict[str, set[str]] = {}  # measurement -> hosts that ever sent it, wanted or not
        self.unreadable = 0  # documents that did not parse
        self.crowded = 0  # jobs that were forgotten because there were more than JOBS
        self._wanted = wanted
        self._inventories: dict[str, NodeInventory] = {}
        self._series: dict[tuple[str, str], dict[str, Samples]] = {}  # (measurement, host) -> series key -> its samples
        self._routes: dict[str, Callable[[Point], None]] = {}
        self._documents: dict[tuple[str, str], str] = {}  # (measurement, subject) -> the text last parsed
        self._unsettled = 0
        self._swept = 0

    def add(self, points: Iterable[Point]) -> None:
        routes, count, point = self._routes, 0, None
        for point in points:
            route = routes.get(point.series.key)
            if route is None:
                route = self._open(point)
            route(point)
            count += 1
        if point is not None:
            self.now = max(self.now, point.time)
            self._unsettled += count
            self._tidy()

    def samples(self, series: Series, name: str) -> tuple[Floats, Numbers]:
        """Times in seconds since the origin and raw values of one field; integers stay int64, exact."""
        kept = self._series.get((series.measurement, series.tag("host") or ""), {}).get(series.key)
        if kept is None:
            return np.empty(0), np.empty(0)
        times, values = kept.numbers(name)
        return self.seconds(times), values

    def latest(self, host: str, measurement: str, name: str, **tags: str) -> tuple[int, Value] | None:
        """Time (ns) and value of the newest point with this field; strings too, such as a rank's phase."""
        for series in self.series_of(measurement, host, **tags):
            return self._series[measurement, host][series.key].latest(name)
        return None

    def series_of(self, measurement: str, host: str, **tags: str) -> list[Series]:
        """Series of a wanted measurement on a host, in the order of their keys."""
        found = (kept.series for kept in self._series.get((measurement, host), {}).values())
        matching = (s for s in found if all(s.tag(tag) == value for tag, value in tags.items()))
        return sorted(matching, key=lambda series: series.key)

    def inventory(self, host: str) -> NodeInventory | None:
        return self._inventories.get(host)

    def events_of(self, *kinds: str) -> list[Event]:
        """Events of these kinds, oldest first."""
        return [event for event in self.events if event.kind in kinds]

    def seconds(self, times: Ints) -> Floats:
        """Nanoseconds as seconds since the origin."""
        return (times - self.origin) / 1e9

    # -- where points go ---------------------------------------------------------------------------------------------

    def _open(self, point: Point) -> Callable[[Point], None]:
        """The first point of a series decides where its points go."""
        series = point.series
        self.origin = self.origin or point.time
        self.seen.setdefault(series.measurement, set()).add(series.tag("host") or "")
        route = self._routes[series.key] = self._route(series)
        return route

    def _route(self, series: Series) -> Callable[[Point], None]:
        name = series.measurement
        if name == "diagnosd_step":
            return self._step_route(series)
        if name in ("diagnosd_process", "diagnosd_rank"):
            return self._rank_route(series)
        route = {
            "diagnosd_job": self._on_job,
            "diagnosd_node": self._on_node,
            "diagnosd_cluster": self._on_cluster,
            "diagnosd_event": self._on_event,
        }.get(name)
        return route or (self._keep(series).append if name in self._wanted else _ignore)

    def _keep(self, series: Series) -> Samples:
        """The samples of a series: those that are there, where it was only its route that was forgotten."""
        group = self._series.setdefault((series.measurement, series.tag("host") or ""), {})
        if series.key in group:
            return group[series.key]
        schema = SCHEMA.get(series.measurement)
        wanted = self._wanted.get(series.measurement, ())
        kinds = {name: (schema.type_of(name) if schema else None) or "f" for name in wanted}
        kept = group[series.key] = Samples(series, kinds)
        return kept

    def _job(self, name: str, time: int, *, runs: bool = True) -> Job:
        job = self.jobs.get(name)
        if job is None:
            if len(self.jobs) >= JOBS:
                self._make_room()
            job = self.jobs[name] = Job(name, self.origin)
            job.first = job.last = time
        job.last = time if runs else job.last
        return job

    def _rank(self, job: Job, rank: int, host: str, point: Point, began: int = 0) -> RankInfo | None:
        """The rank as of its newest attempt, None for one of an attempt that is over. `began`: since when, ns."""
        attempt = point.fields.get("attempt")
        if isinstance(attempt, int) and attempt != job.attempt:
            if attempt < job.attempt and not _is_second_run(job, point, began):
                return None
            job._rise(attempt)  # noqa: SLF001  # a job and its trace are one
        info = job.ranks.get(rank)
        if info is None or info.host != host:
            info = job.ranks[rank] = RankInfo(rank, host, last=point.time)
        info.attempt = job.attempt
        return info

    def _step_route(self, series: Series) -> Callable[[Point], None]:
        who, source = _who(series), series.tag("source")
        if who is None:
            return _ignore
        name, host, rank = who
        quality = SOURCES.index(source) if source in SOURCES else 0

        def take(point: Point) -> None:
            fields = point.fields
            number, duration = fields.get("step"), fields.get("duration")
            seconds = duration if isinstance(duration, float) and 0 <= duration <= LONGEST_S else 0.0
            job = self._job(name, point.time)
            info = job.ranks.get(rank)
            if info is None or fields.get("attempt") != info.attempt or info.host != host:
                info = self._rank(job, rank, host, point, point.time - int(seconds * 1e9))
            if info is None:
                count, first = job.outdated.get(host, (0, point.time))
                job.outdated[host] = count + 1, first
            elif isinstance(number, int):
                info.last = job.stepped = point.time
                job.longest = max(job.longest, seconds)
                job._grid.add(rank, host, quality, number, point)  # noqa: SLF001

        return take

    def _rank_route(self, series: Series) -> Callable[[Point], None]:
        who = _who(series)
        if who is None:
            return _ignore
        name, host, rank = who
        append = self._keep(series).append if series.measurement == "diagnosd_process" else None

        def take(point: Point) -> None:
            # That a rank is gone is told again and again, long after it has run for the last time.
            runs = append is not None or point.fields.get("state", "running") == "running"
            info = self._rank(self._job(name, point.time, runs=runs), rank, host, point)
            if info is not None and (runs or (info.state == "running" and point.fields.get("state") == "exited")):
                info.last = point.time
            if append is not None:
                append(point)
            elif info is not None:
                _describe(info, point.fields)

        return take

    def _on_job(self, point: Point) -> None:
        name, fields = point.series.tag("job"), point.fields
        if name is None:
            return
        job, attempt, state = self._job(name, point.time), fields.get("attempt"), fields.get("state")
        if isinstance(attempt, int) and attempt > job.attempt:
            job._rise(attempt)  # noqa: SLF001
        if isinstance(state, str) and not (isinstance(attempt, int) and attempt < job.attempt):
            job.state = state
        spec = self._document(point, "spec", name, decode_job)
        if spec is not None:
            job.spec = unite([(0, job.spec), (1, spec)])  # points come in the order of time
            self._ranks_of_spec(job, point.time)

    def _ranks_of_spec(self, job: Job, time: int) -> None:
        """Recordings without diagnosd_rank name their ranks in the job's document."""
        for entry in job.spec.ranks or ():
            if entry.host is not None:
                info = job.ranks.setdefault(entry.rank, RankInfo(entry.rank, entry.host, time, job.attempt))
                info.gpu = info.gpu or entry.gpu

    def _on_node(self, point: Point) -> None:
        host = point.series.tag("host")
        inventory = self._document(point, "inventory", host or "", decode_node)
        if host is not None and inventory is not None:
            self._inventories[host] = inventory

    def _on_cluster(self, point: Point) -> None:
        spec = None if self.declared else self._document(point, "spec", "", decode_cluster)
        if spec is not None:
            self.cluster = spec

    def _on_event(self, point: Point) -> None:
        tag, fields = point.series.tag, point.fields
        text, value = fields.get("text"), fields.get("value")
        self.events.append(
            Event(
                time=point.time,
                host=tag("host") or "",
                kind=tag("kind") or "",
                subject=tag("subject") or "",
                job=tag("job"),
                text=text if isinstance(text, str) else None,
                value=float(value) if isinstance(value, (int, float)) else None,
            )
        )

    def _document(self, point: Point, name: str, subject: str, decode: Callable[[bytes], Any]) -> Any:
        """The parsed JSON field, None where it is absent, says nothing new, or does not parse."""
        text, key = point.fields.get(name), (point.series.measurement, subject)
        if not isinstance(text, str) or self._documents.get(key) == text:
            return None
        self._documents[key] = text
        try:
            return decode(text.encode())
        except ValueError:
            self.unreadable += 1
            return None

    # -- staying small -----------------------------------------------------------------------------------------------

    def _all_samples(self) -> Iterator[Samples]:
        for group in self._series.values():
            yield from group.values()

    def _tidy(self) -> None:
        if self._unsettled > SETTLE:
            self._unsettled = 0
            for kept in self._all_samples():
                kept.settle()
            for job in self.jobs.values():
                job._grid.settle()  # noqa: SLF001
        if self.now - self._swept > FORGET_S * 10**9:
            self._swept = self.now
            self._forget(self.now - FORGET_S * 10**9)

    def _forget(self, before: int) -> None:
        """Drop jobs and series that have been silent since `before`, ns; one that speaks again begins anew."""
        self._drop({name for name, job in self.jobs.items() if job.last < before}, before)

    def _make_room(self) -> None:
        """Drop half of the jobs, for all series are gone through: first those that have exited, by their age."""
        by_age = sorted(self.jobs.values(), key=lambda job: (job.runs, job.last))
        names = {job.name for job in by_age[: JOBS // 2]}
        self.crowded += len(names)
        self._drop(names, 0)

    def _drop(self, jobs: set[str], before: int) -> None:
        """Forget these jobs with their series, and what has been silent since `before`, ns."""
        for name in jobs:
            del self.jobs[name]
            self._documents.pop(("diagnosd_job", name), None)
        for group in self._series.values():
            for key in [key for key, kept in group.items() if kept.last < before or kept.series.tag("job") in jobs]:
                del group[key]
        self._series = {key: group for key, group in self._series.items() if group}
        self._routes.clear()
        for kept in self._all_samples():
            if kept.series.measurement != "diagnosd_process":
                self._routes[kept.series.key] = kept.append


def _ignore(point: Point) -> None:
    """Nobody wants this measurement."""


def _who(series: Series) -> tuple[str, str, int] | None:
    """Job, host and rank."""
    job, host, rank = series.tag("job"), series.tag("host"), series.tag("rank") or ""
    return (job, host, int(rank)) if job and host and rank.isdecimal() and len(rank) <= RANK_DIGITS else None


def _is_second_run(job: Job, point: Point, began: int) -> bool:
    """Whether somebody runs a job again of which all ranks had exited: then attempts are counted from 0 again."""
    runs = point.series.measurement != "diagnosd_rank" or point.fields.get("state") == "running"
    left = [info.state == "exited" and info.last < (began or point.time) for info in job.ranks.values()]
    return runs and bool(left) and all(left)


def _describe(info: RankInfo, fields: Mapping[str, Value]) -> None:
    for name in ("world", "gpu", "state", "loader"):
        if name in fields:
            setattr(info, name, fields[name])
    versions = fields.get("versions")
    if isinstance(versions, str):
        info.versions = dict(_pairs(versions))
    addresses = fields.get("addresses")
    if isinstance(addresses, str):
        info.addresses = tuple(addresses.split(","))


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    """`torch=2.13,nccl=2.30.7` as pairs."""
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if equals:
            yield key, value
