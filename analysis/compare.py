"""A slow stretch of a job beside what it is held against: what evidence is computed from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import nan

import numpy as np
import numpy.typing as npt

from diagnosd.analysis.bounds import all_reduced
from diagnosd.analysis.decompose import COMPUTE, OWN, PART, untimed
from diagnosd.analysis.history import History, Ints, for_ranks
from diagnosd.analysis.rates import increments
from diagnosd.analysis.samples import Numbers
from diagnosd.analysis.trace import Job, Trace
from diagnosd.point import Series
from diagnosd.schema import HOLD_SECONDS

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Window = tuple[float, float]  # seconds since the trace's origin

LEAST_TIMED = 5  # cycles, that say where a step's time goes: two of them that were disturbed are outvoted
RECENT = 60  # cycles of a long slowdown that evidence is computed from
PAST_S = 60.0  # counters before the onset: enough for a dozen samples at 5 s, near enough to be the same conditions
SETTLE_S = 0.5  # smoothed values (rtt) take a few round trips to follow

TALKS = 0.05  # a connection that carries less than this of the busiest one's bytes is control traffic

# Who was last in this share of the cycles may be what the others wait for; by chance one of n ranks is in 1/n of them.
OFTEN_LAST = 0.3


Means = dict[tuple[str, str], float]  # series key and field -> mean in a window


@dataclass(frozen=True, slots=True)
class Past:
    """What healthy cycles took, and when. A slowdown may last for longer than they and the samples of then are kept.

    `parts` [len(PARTS)] and `own` [R,len(OWN)] in mean seconds a cycle, `work` [R] as in Comparison. `read` are the
    means of counters in the window, as far as they were asked for.
    """

    rows: Ints  # numbers of the cycles
    ranks: tuple[int, ...]
    parts: Floats
    own: Floats
    work: Floats | None
    window: Window
    read: Means = field(default_factory=dict, repr=False)

    def of(self, ranks: tuple[int, ...]) -> tuple[Floats, Floats | None]:
        """`own` and `work` of these ranks; of one that came later nobody knows what it did, as in History."""
        if ranks == self.ranks:
            return self.own, self.work
        places = [self.ranks.index(rank) if rank in self.ranks else None for rank in ranks]
        work = for_ranks(self.work[None], places, nan)[0] if self.work is not None else np.full(len(ranks), nan)
        return for_ranks(self.own[None], places, 0.0)[0], None if np.isnan(work).any() else work


@dataclass(frozen=True, slots=True)
class Link:
    """A connection from host to host, None where nobody knows whose address it is; bytes a second, NaN: unknown."""

    sender: str
    receiver: str | None
    series: Series
    bytes_now: float
    bytes_before: float

    @property
    def name(self) -> str:
        return f"{self.sender} -> {self.receiver or self.series.tag('peer')}"

    @property
    def carries(self) -> float:
        """Bytes a second before, or now where there is no before."""
        known = [rate for rate in (self.bytes_before, self.bytes_now) if rate > 0]
        return known[0] if known else 0.0


@dataclass(frozen=True)
class Comparison:
    """`expected`, `observed`: mean seconds a cycle [len(PARTS)] along the last to arrive; the `own` ones of each rank.

    `against` is past, peers or model: where the expectation comes from. The windows are those of the counters; `before`
    is None where there is no healthy past.
    """

    trace: Trace
    job: Job
    against: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]  # of the ranks
    before: Window | None
    during: Window
    expected: Floats
    observed: Floats
    own_expected: Floats  # [R,len(OWN)]
    own_observed: Floats  # [R,len(OWN)]
    last: Floats  # [R] share of the cycles in which each was the last to arrive
    apart: bool  # whether by more than the clocks' noise, so that it means something
    timed: bool  # whether the collectives themselves were timed, by clocks that are aligned
    loads: Bools  # [R] which ranks load data
    empty: Floats  # [R] share of the steps that found the prefetch queue empty; NaN where unknown
    full: Floats  # [R] share of those that found it full
    workers: Floats  # [R] loader workers; NaN where unknown
    sync_bytes: float  # median size of the collective; NaN where unknown
    from_start: bool
    mixed: bool = False  # whether part of the step may be computing, waiting for others or transferring: nobody can say
    work_expected: Floats | None = None  # [R] samples or tokens a cycle, as far as they were computed; None: unknown
    work_observed: Floats | None = None
    read_before: Means = field(default_factory=dict, repr=False)  # of the past, Past.read
    _rates: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict, repr=False)
    _gauges: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict, repr=False)

    @property
    def step(self) -> float:
        """Expected seconds a step."""
        return float(self.expected.sum())

    @property
    def slowdown(self) -> float:
        return float(self.observed.sum()) / max(self.step, 1e-9)

    @property
    def lost(self) -> float:
        """Seconds a step more than expected."""
        return float(self.observed.sum() - self.expected.sum())

    def excess(self, *parts: str) -> float:
        """Seconds a step that these parts grew by."""
        columns = [PART[name] for name in parts]
        return float((self.observed - self.expected)[columns].sum())

    def share(self, *parts: str) -> float:
        """How much of the loss these parts explain, 0 to 1."""
        grown = max(float(np.maximum(self.observed - self.expected, 0).sum()), self.lost, 1e-9)
        return float(np.clip(self.excess(*parts) / grown, 0, 1))

    def own(self, column: int, *parts: str) -> tuple[float, float]:
        """Seconds a step that a rank itself spent in these parts: observed, expected."""
        columns = [OWN.index(name) for name in parts]
        return float(self.own_observed[column, columns].sum()), float(self.own_expected[column, columns].sum())

    def work_grew(self, column: int) -> float:
        """How many times as much work a rank does as before; NaN where nobody counts, or there is no before."""
        if self.against != "past" or self.work_expected is None or self.work_observed is None:
            return nan
        return float(self.work_observed[column] / self.work_expected[column])

    @cached_property
    def suspects(self) -> tuple[int, ...]:
        """Columns of the ranks that the others wait for; all where their work is not what grew, or nobody can say."""
        everybody = tuple(range(len(self.ranks)))
        if not self.apart or self.share(*OWN) < OFTEN_LAST:
            return everybody
        return tuple(column for column in everybody if self.last[column] >= OFTEN_LAST) or everybody

    @property
    def suspect_hosts(self) -> tuple[str, ...]:
        return tuple(sorted({self.hosts[column] for column in self.suspects}))

    @property
    def all_hosts(self) -> tuple[str, ...]:
        return tuple(sorted(set(self.hosts)))

    # -- what the counters say in the two windows --------------------------------------------------------------------

    def rate(self, series: Series, name: str) -> tuple[float, float]:
        """Mean growth per second of a counter during and before; NaN where unknown."""
        key = (series.key, name)
        if key not in self._rates:
            grown = increments(*self.trace.samples(series, name))
            self._rates[key] = grown.mean(*self.during), self._was(key, grown.mean)
        return self._rates[key]

    def gauge(self, series: Series, name: str) -> tuple[float, float]:
        """Mean of a gauge's samples during and before; NaN where there was none."""
        key = (series.key, name)
        if key not in self._gauges:
            times, values = self.trace.samples(series, name)

            def mean(since: float, until: float) -> float:
                return _mean(times, values, (since, until))

            self._gauges[key] = mean(*self.during), self._was(key, mean)
        return self._gauges[key]

    def _was(self, key: tuple[str, str], mean: Callable[[float, float], float]) -> float:
        """The mean before; once no sample of then can come any more it is read for the last time."""
        if self.before is None:
            return nan
        if key in self.read_before:
            return self.read_before[key]
        value = mean(*self.before)
        if self.trace.now > self.trace.origin + (self.before[1] + HOLD_SECONDS) * 1e9:
            self.read_before[key] = value
        return value

    @cached_property
    def links(self) -> list[Link]:
        """The connections between hosts that carry the job's bytes."""
        found = []
        for host, series in self.series("diagnosd_socket", self.all_hosts, job=self.job.name):
            peer = series.tag("peer") or ""
            receiver = self.addresses.get(peer) or self._the_other(host)
            if peer != "other" and not self.stays_inside(host, series):
                found.append(Link(host, receiver, series, *self.rate(series, "bytes_sent")))
        busiest = max((link.carries for link in found), default=0.0)
        return [link for link in found if busiest > 0 and link.carries >= TALKS * busiest]

    def stays_inside(self, host: str, connection: Series) -> bool:
        """Whether both ends are on this host: by loopback, or by an address of its own. No interface sees its bytes."""
        peer = connection.tag("peer") or ""
        return peer in ("127.0.0.1", "::1") or self.addresses.get(peer) == host

    def collective_rate(self, which: int) -> float:
        """Bytes a second that a host must send for the step's collective, now (0) or before (1); NaN where unknown."""
        hosts, took = len(self.all_hosts), self.step * (1.0 if which else self.slowdown)
        return all_reduced(self.sync_bytes, hosts) / took if took > 0 else nan

    @cached_property
    def addresses(self) -> dict[str, str]:
        """Address to host, as the machines' inventories and the ranks told them."""
        found = {address: info.host for info in self.job.ranks.values() for address in info.addresses}
        for host in self.all_hosts:
            inventory = self.trace.inventory(host)
            for nic in (inventory.nics if inventory else None) or ():
                found.update(dict.fromkeys(nic.addresses or (), host))
        return found

    def _the_other(self, host: str) -> str | None:
        rest = set(self.all_hosts) - {host}
        return rest.pop() if len(rest) == 1 else None

    def series(self, measurement: str, hosts: tuple[str, ...], **tags: str) -> Iterator[tuple[str, Series]]:
        for host in hosts:
            for series in self.trace.series_of(measurement, host, **tags):
                yield host, series

    def of_rank(self, measurement: str, column: int) -> list[Series]:
        tags = {"job": self.job.name, "rank": str(self.ranks[column])}
        return self.trace.series_of(measurement, self.hosts[column], **tags)


def _mean(times: Floats, values: Numbers, window: Window) -> float:
    first, last = np.searchsorted(times, window)
    return float(values[first:last].mean()) if last > first else nan


def past(history: History, healthy: Ints, onset: int) -> Past:
    """Of these rows, and of the counters until the onset."""
    until = history.start_of(onset)
    window = max(history.start_of(int(healthy[0])), until - PAST_S), until
    telling = telling_of(history, healthy)
    usual = _typical(history.floats("parts", telling), history.floats("own", telling))
    return Past(healthy, history.ranks, *usual, work_of(history, telling), window)


def telling_of(history: History, numbers: Ints) -> Ints:
    """Of these cycles those that say where their time went: where the collectives of only some were timed, these."""
    timed = numbers[history.get("timed", numbers).astype(bool)]
    return timed if len(timed) >= LEAST_TIMED else numbers


def together(pasts: Sequence[Past], until: float) -> Past:
    """Of all of these, and of the counters until then (s)."""
    ranks = pasts[-1].ranks
    own, works = zip(*(each.of(ranks) for each in pasts), strict=True)
    known = [work for work in works if work is not None]
    return Past(
        np.concatenate([each.rows for each in pasts]),
        ranks,
        *_typical(np.array([each.parts for each in pasts]), np.array(own)),
        np.median(known, axis=0) if len(known) == len(pasts) else None,
        (max(pasts[0].window[0], until - PAST_S), until),
    )


def compare(
    trace: Trace, job: Job, history: History, against: str, before: Past | None, numbers: Ints
) -> Comparison | None:
    """These kept cycles beside the past; without one, what was observed is expected, until a bound changes it.

    None where there are no cycles.
    """
    recent = numbers[-RECENT:]
    if not len(recent):
        return None
    telling = telling_of(history, recent)
    observed, own = history.floats("parts", telling).mean(axis=0), history.floats("own", telling).mean(axis=0)
    usual, (own_usual, work) = before.parts if before else observed, before.of(history.ranks) if before else (own, None)
    mixed = bool(max(observed[PART["mixed"]], usual[PART["mixed"]]) > 0)
    if mixed:  # on one side maybe not: a step that became longer is timed each time
        (observed, own), (usual, own_usual) = untimed(observed, own), untimed(usual, own_usual)
    start = history.start_of(int(recent[0])) + SETTLE_S
    last, queue = history.get("last", telling), history.floats("queue", recent)
    return Comparison(
        trace=trace,
        job=job,
        against=against,
        ranks=history.ranks,
        hosts=history.hosts,
        before=before.window if before else None,
        during=(start, max((trace.now - trace.origin) / 1e9, start + 1.0)),
        expected=usual,
        observed=observed,
        own_expected=own_usual,
        own_observed=own,
        last=np.array([float((last == column).mean()) for column in range(len(history.ranks))]),
        apart=_are_apart(history.floats("late", telling), history.noise),
        timed=bool(history.get("timed", telling).all()) and bool(np.isfinite(history.noise)),
        mixed=mixed,
        loads=_loads(job, history.ranks, own),
        empty=_share(queue <= 0, queue),
        full=_share(queue >= history.floats("queue_size", recent), queue),
        workers=history.floats("workers", recent)[-1],
        sync_bytes=float(np.median(history.floats("sync_bytes", telling))) or nan,
        from_start=against == "model",
        work_expected=work,
        work_observed=work_of(history, telling),
        read_before=before.read if before else {},
    )


def _typical(parts: Floats, own: Floats) -> tuple[Floats, Floats]:
    """Mean parts and own work of healthy cycles, without the tenth that took longest: pauses are not the usual."""
    duration = parts.sum(axis=1)
    kept = duration <= (np.quantile(duration, 0.9) if len(parts) >= 10 else np.inf)
    return parts[kept].mean(axis=0), own[kept].mean(axis=0)


def work_of(history: History, numbers: Ints) -> Floats | None:
    """[R] samples or tokens a cycle, as computing over computing for one; None where a rank does not count them."""
    per_work = history.floats("compute_per_work", numbers)
    if np.isnan(per_work).any() or (per_work <= 0).any():
        return None
    compute = history.floats("own", numbers)[..., [OWN.index(name) for name in COMPUTE]].sum(axis=-1)
    work: Floats = np.median(compute / per_work, axis=0)
    return work if (work > 0).all() else None


def _are_apart(late: Floats, noise: float) -> bool:
    """Whether the last to arrive was last by more than the clocks' noise."""
    if late.shape[1] < 2 or np.isnan(late).any():
        return False
    lead = np.diff(np.sort(late, axis=1)[:, -2:], axis=1)
    return float(np.median(lead)) > noise


def _loads(job: Job, ranks: tuple[int, ...], own: Floats) -> Bools:
    """Which ranks load data: they say so, or they wait for it."""
    waits = own[:, OWN.index("data_wait")] > 0
    told = [job.ranks[rank].loader if rank in job.ranks else None for rank in ranks]
    return np.array([loader != "none" and bool(wait) for loader, wait in zip(told, waits, strict=True)])


def _share(those: Bools, values: Floats) -> Floats:
    """[R] share of the cycles in which it is so, of those with a value; NaN where there is none."""
    known = ~np.isnan(values)
    count = known.sum(axis=0)
    return np.where(count > 0, (those & known).sum(axis=0) / np.maximum(count, 1), nan)
