"""What speaks for and against each cause: one row of ROWS a kind of evidence.

A row measures something in a Comparison and says how strongly it deviates: strength = (x - threshold) / width, clipped
to -3..3. Above the threshold it supports the causes with a positive weight and speaks against those with a negative
one; below it the other way round, unless the row is one-sided: a sign that need not be there proves nothing by its
absence. Where nothing was measured a row yields nothing, which is not the same as a reading of zero.

A reading has a number where one is compared; a fact (so since the first step, asleep in the kernel) has none. Its text
is true on either side of the threshold: the same words tell why a cause was named and why its rival was not.

Rows belong to groups of sensors that do not depend on each other; a group's sum is capped, so that five counters of one
interface cannot outvote everything else (diagnosis.md 2.4). Weights are set by hand: 1 is a sign that decides together
with one independent sign, 0.5 a sign that many causes show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import isnan, log, nan

import numpy as np

from diagnosd.analysis import bounds
from diagnosd.analysis.compare import Comparison, Link
from diagnosd.analysis.decompose import COMPUTE, HOST, NETWORK, PART
from diagnosd.analysis.figures import digits, percent, scaled, seconds
from diagnosd.analysis.rates import increments
from diagnosd.analysis.trace import Job, Trace
from diagnosd.point import Series

MATTERS = 0.5  # the weight from which on a row is what a cause leads one to expect
MSS = 1448  # bytes in a full TCP segment on Ethernet with timestamps
WIRE_OVER_PAYLOAD = 1.10  # bytes on an interface for one of payload: headers 4.6 %, acknowledgements up to 4.6 %


@dataclass(frozen=True, slots=True)
class Reading:
    """One measurement: of what, how much, how much was expected, and how far beyond its threshold it lies (-3..3)."""

    subject: str  # a locus
    observed: float  # NaN for a fact without a number
    expected: float  # NaN where there is no expectation
    strength: float
    text: str
    decisive: bool = False  # a fact that needs no second group
    receiver: str | None = None  # host at the other end, of a connection
    subtype: str | None = None  # that this reading points to


@dataclass(frozen=True)
class Row:
    metric: str
    group: str
    unit: str
    measure: Callable[[Comparison], Iterator[Reading]]
    weights: Mapping[str, float]
    needs: str  # the measurement that must be there: what is missing where the row yields nothing
    one_sided: bool = False

    @property
    def advice(self) -> str:
        """How to get what it needs."""
        return ADVICE[self.needs]


@dataclass(frozen=True, slots=True)
class Evidence:
    row: Row = field(repr=False)
    reading: Reading

    def weight(self, cause: str) -> float:
        """What it adds to the log-odds of a cause, before its group is capped."""
        strength = self.reading.strength
        return self.row.weights.get(cause, 0.0) * (max(strength, 0.0) if self.row.one_sided else strength)


def collect(c: Comparison) -> tuple[list[Evidence], list[Row]]:
    """All readings, the strongest of each row first, and the rows that yielded none for want of a measurement.

    Where that came, a row without a reading has nothing to read here (no quota is set): to measure it again is no use.
    """
    found, missing = [], []
    for row in ROWS:
        readings = sorted(row.measure(c), key=lambda r: (-r.strength, r.subject))
        found += [Evidence(row, reading) for reading in readings]
        if not readings and can_be_had(row.needs, c.job) and not is_seen(row.needs, c.trace, c.job):
            missing.append(row)
    return found, missing


def sources(trace: Trace, job: Job, causes: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Measurements that evidence rests on and that came from the job's hosts; those that these causes lack."""
    causes = tuple(causes)
    wanted = {row.needs for row in ROWS if any(row.weights.get(cause, 0) >= MATTERS for cause in causes)}
    seen = {row.needs for row in ROWS if is_seen(row.needs, trace, job)}
    return tuple(sorted(seen)), tuple(sorted(name for name in wanted - seen if can_be_had(name, job)))


def is_seen(measurement: str, trace: Trace, job: Job) -> bool:
    """Whether it came from any host of the job; what the operators declare holds for all of them."""
    if measurement == CLUSTER:
        return trace.cluster is not None
    return not trace.seen.get(measurement, set()).isdisjoint(job.hosts)


def can_be_had(measurement: str, job: Job) -> bool:
    """Whether anybody could send it: where no rank has NCCL, nobody can read its log."""
    return measurement != "diagnosd_nccl" or any(info.gpu or "nccl" in info.versions for info in job.ranks.values())


def strength(x: float, threshold: float, width: float) -> float:
    return float(np.clip((x - threshold) / width, -3.0, 3.0))


def _ratio(now: float, before: float) -> float:
    return log(max(now, 1e-12) / max(before, 1e-12))


def _known(*values: float) -> bool:
    return not any(isnan(value) for value in values)


def _rise(c: Comparison, now: float, before: float) -> float:
    """By how much more than before; without a past, than on a healthy machine, where it is none. NaN: unknown."""
    return now - (before if c.before else 0.0)


# -- timing: the ranks' own clocks -----------------------------------------------------------------------------------


def _grew(c: Comparison, what: str, parts: tuple[str, ...]) -> Iterator[Reading]:
    """How much of the loss these parts along the last to arrive explain.

    Threshold 0.3: what explains less than a third of a loss is not its cause. Width 0.1.
    """
    if c.lost <= 0:
        return
    share = c.share(*parts)
    now, before = c.excess(*parts) + _expected(c, parts), _expected(c, parts)
    text = f"{what} takes {percent(round(share, 2))} of the loss"
    yield Reading("job", now, before, strength(share, 0.3, 0.1), text)


def _expected(c: Comparison, parts: tuple[str, ...]) -> float:
    return float(sum(c.expected[PART[name]] for name in parts))


def transfer(c: Comparison) -> Iterator[Reading]:
    """Only where it is apart from waiting: timed, or the least any rank was blocked."""
    if len(c.ranks) > 1 and not c.mixed:
        yield from _grew(c, "transfer, after the last had arrived,", NETWORK)


def data_wait(c: Comparison) -> Iterator[Reading]:
    """The step blocked on its next batch. It is what starvation is, so it is decisive where it is most of the loss."""
    if not c.loads.any():
        return
    for reading in _grew(c, "waiting for the next batch", ("data_wait",)):
        grown = c.excess("data_wait") > 2 * max(_expected(c, ("data_wait",)), 0.005 * c.step)
        yield replace(reading, decisive=bool(c.share("data_wait") >= 0.6 and grown))


def compute_of_one(c: Comparison) -> Iterator[Reading]:
    """A rank's compute for the same work grew, the others' less than a third as much, and they wait for it."""
    grown = np.array([_for_the_same_work(c, column) for column in range(len(c.ranks))])
    if len(grown) < 2 or c.lost <= 0 or not c.apart:
        return
    slow = int(grown.argmax())
    others = float(np.median(np.delete(grown, slow)))
    now, before = c.own(slow, *COMPUTE)
    before *= _more_work(c, slow)
    alone = grown[slow] > 0 and others < grown[slow] / 3
    how = strength(min(c.share(*COMPUTE), float(grown[slow]) / c.lost), 0.3, 0.1) if alone else -3.0
    text = f"computes {now / max(before, 1e-9):.1f} times as long, and is last in {percent(c.last[slow])} of the steps"
    if how <= 0 and now <= 1.1 * before:
        text = "no rank computes longer"
    elif not alone:
        text = "no rank alone computes longer"
    decisive = how >= 3 and c.last[slow] >= 0.8 and now > 1.15 * before
    yield Reading(f"rank:{c.ranks[slow]}", now, before, how, text, decisive=bool(decisive))


def _for_the_same_work(c: Comparison, column: int) -> float:
    """Seconds a step that a rank computes longer than before, without what more samples or tokens take."""
    now, before = c.own(column, *COMPUTE)
    return now - before * _more_work(c, column)


def _more_work(c: Comparison, column: int) -> float:
    """Times as much work, 1 where nobody counts. With less to do, what a step takes anyway remains: no less than 1."""
    times = c.work_grew(column)
    return max(times, 1.0) if _known(times) else 1.0


def work_of_one(c: Comparison) -> Iterator[Reading]:
    """The rank that all wait for has more samples or tokens than before, the others have not.

    A tenth more than the others: as in compute_of_all. Decisive where it computes no longer than for so much work.
    """
    times = np.array([c.work_grew(column) for column in range(len(c.ranks))])
    if len(times) < 2 or np.isnan(times).any() or c.lost <= 0 or not c.apart:
        return
    assert c.work_observed is not None
    assert c.work_expected is not None
    most = int(times.argmax())
    now, before = float(c.work_observed[most]), float(c.work_expected[most])
    others = max(float(np.median(np.delete(times, most))), 1.0)
    takes = c.own(most, *COMPUTE)[1] * (times[most] - 1) / c.lost  # of the loss, and as in _grew
    how = min(strength(times[most] / others, 1.1, 0.1), strength(takes, 0.3, 0.1))
    text = f"has {times[most]:.1f} times as many samples or tokens as before"
    if times[most] <= 1.1 * others:
        text = "as far as its batches tell, no rank has more samples or tokens than the others"
    yield Reading(f"rank:{c.ranks[most]}", now, before, how, text, decisive=bool(how > 0 and takes >= 0.6))


def compute_of_the_last(c: Comparison) -> Iterator[Reading]:
    """How much of the loss computing takes on the rank that all wait for, for whatever reason."""
    if len(c.ranks) > 1 and c.apart and _known(*(c.work_grew(column) for column in range(len(c.ranks)))):
        yield from _grew(c, "computing, on the rank that all wait for,", COMPUTE)


def compute_of_all(c: Comparison) -> Iterator[Reading]:
    """Every rank's own work grew: no rank is the straggler; a machine that they share, or the program, is.

    A tenth: on public traces the same work scatters by 2 to 3 % (diagnosis.md 1.2), and the mean of many less.
    """
    each = [c.own(column, *COMPUTE) for column in range(len(c.ranks))]
    if c.lost <= 0 or any(before <= 0 for _, before in each):
        return
    now, before = min(each, key=lambda pair: pair[0] / pair[1])
    grown = sum(now > 1.1 * before for now, before in each)
    text = f"every rank computes {now / before:.1f} times as long"
    if grown < len(each):
        text = "not every rank computes longer" if grown else "no rank computes longer"
    yield Reading("job", now, before, strength(now / before, 1.1, 0.1), text)


def checkpoint(c: Comparison) -> Iterator[Reading]:
    """Saving took longer than it did; what follows it at once, such as a flush to disk, counts as saving.

    So does the time of those who wait for the rank that saves, in no phase, as at a barrier: the last to leave that may
    be any of them, and need not save itself.
    """
    now, before = np.array([c.own(column, "checkpoint") for column in range(len(c.ranks))]).T
    if before.max() > 0:
        for reading in _grew(c, "saving", ("checkpoint", "other")):
            decisive = (now - before).max() > 0 and c.share("checkpoint", "other") >= 0.6
            yield replace(reading, decisive=bool(decisive))
    elif now.max() == 0:
        yield Reading("job", nan, nan, -3.0, "nothing was saved in these steps")


def host_gap(c: Comparison) -> Iterator[Reading]:
    """Time in no phase of training: launching, collecting garbage, not being scheduled.

    Where a third of a healthy step lies in no phase, phases are missing, and the rest is not the host's.
    """
    if c.expected[PART["other"]] < c.step / 3 and not c.mixed:
        for reading in _grew(c, "time outside of every phase", HOST):
            one = len(c.suspects) == 1 < len(c.ranks)
            yield replace(reading, subject=f"rank:{c.ranks[c.suspects[0]]}" if one else "job")


def from_the_start(c: Comparison) -> Iterator[Reading]:
    """A misconfiguration is there from the first step; congestion begins. It rules out, and supports nothing."""
    text = "it was so from the first step" if c.from_start else "it was not so at first"
    yield Reading("job", nan, nan, 3.0 if c.from_start else -3.0, text)


# -- socket: the kernel's view of each connection --------------------------------------------------------------------


def _of_links(
    c: Comparison, name: str, sign: int, threshold: float, width: float, what: str, subtype: str
) -> Iterator[Reading]:
    for link in c.links:
        now, before = c.gauge(link.series, name)
        if _known(now, before) and before > 0:
            how = strength(sign * _ratio(now, before), threshold, width)
            text = f"{what} {now / before:.1f} times that before, on {link.name}"
            yield Reading(f"host:{link.sender}", now, before, how, text, receiver=link.receiver, subtype=subtype)


def rtt(c: Comparison) -> Iterator[Reading]:
    """A queue on the way. Threshold 1.5: on the bed rtt varies by a third when nothing is wrong and rises 5-fold.

    Width 0.15: half of that third, so that twice as long is two widths beyond.
    """
    yield from _of_links(c, "rtt", 1, log(1.5), 0.15, "round-trip time", "bandwidth")


def send_queue(c: Comparison) -> Iterator[Reading]:
    """The path takes the bytes more slowly than the rank hands them over; or the receiver does not read them."""
    yield from _of_links(c, "send_queue", 1, log(1.6), 0.3, "send queue", "bandwidth")


def window(c: Comparison) -> Iterator[Reading]:
    """TCP halves its window at each loss: far fewer segments in flight is a path that loses."""
    yield from _of_links(c, "cwnd", -1, log(1.6), 0.3, "congestion window", "packet_loss")


def sending_rate(c: Comparison) -> Iterator[Reading]:
    """Bytes for each second in which a connection had bytes under way while the receiver's window was open.

    The kernel's own clock of the path: a rank that comes late to the collective, or does not read, leaves it as it was.
    A twentieth less, width 0.03: on the bed it scatters by 2 % from one look to the next, and three are the fewest.
    """
    for link in c.links:
        now, before = (sends_at(c, link, which) for which in (0, 1))
        if _known(now, before) and before > 0:
            text = f"while it sends, {percent(now / before)} as fast as before, on {link.name}"
            how = strength(-_ratio(now, before), log(1.05), 0.03)
            receiver = link.receiver
            yield Reading(f"host:{link.sender}", now, before, how, text, receiver=receiver, subtype="bandwidth")


def sends_at(c: Comparison, link: Link, which: int = 0) -> float:
    """Bytes a second while a link sends, now (0) or before (1); NaN where unknown."""
    sent = (link.bytes_now, link.bytes_before)[which]
    busy, waiting = (c.rate(link.series, name)[which] for name in ("busy", "receiver_limited"))
    return _while_sending(sent, busy, waiting)


def sends_since(c: Comparison, link: Link) -> float:
    """As `sends_at`, from the looks that lie wholly in the slowdown: one that began before it shows both."""
    names = ("bytes_sent", "busy", "receiver_limited")
    sent, busy, waiting = (increments(*c.trace.samples(link.series, name)).whole(*c.during) for name in names)
    return _while_sending(sent, busy, waiting)


def _while_sending(sent: float, busy: float, waiting: float) -> float:
    return sent / (busy - waiting) if _known(sent, busy, waiting) and busy > waiting else nan


def retransmits(c: Comparison) -> Iterator[Reading]:
    """Share of segments sent twice. Relative, because bbr loses 1.5 to 3.5 % when all is well and cubic 0.2 %.

    Twice as many, and 3 in 1000 more, which is what costs cubic a tenth of its rate at a millisecond. Where the kernel
    does not count segments, the share is of full ones on Ethernet, and 6 times as large with packets of 9000.
    """
    for link in c.links:
        now, before = (_resent(c, link, which) for which in (0, 1))
        if not _known(now, before):
            continue
        how = min(strength(_ratio(now + 1e-4, before + 1e-4), log(2), 0.25), strength(now - before, 0.003, 0.001))
        text = f"{percent(now)} of the segments sent twice, {percent(before)} before, on {link.name}"
        yield Reading(f"host:{link.sender}", now, before, how, text, receiver=link.receiver, subtype="packet_loss")


def _resent(c: Comparison, link: Link, which: int) -> float:
    again, counted = (c.rate(link.series, name)[which] for name in ("retransmits", "segments_sent"))
    sent = counted if _known(counted) else (link.bytes_now, link.bytes_before)[which] / MSS
    return again / sent if _known(sent, again) and sent > 0 else nan


def quiet_connections(c: Comparison) -> Iterator[Reading]:
    """No sign of trouble on any connection. Then the network is an unlikely culprit."""
    signs = [r.strength for row in (rtt, window, retransmits, sending_rate) for r in row(c)]
    if len(signs) >= 3:
        worst = max(signs)
        yield Reading(
            "job",
            nan,
            nan,
            strength(-worst, -0.5, 0.5),
            "no connection shows a longer or slower path, a loss or a smaller window",
        )


def receive_queue(c: Comparison) -> Iterator[Reading]:
    """Bytes that arrived and that the rank does not read: it is the rank that is slow, not the network.

    Threshold: twice as many and 64 KiB more, a socket's usual first buffer.
    """
    for column in range(len(c.ranks)):
        series = [s for s in c.of_rank("diagnosd_socket", column) if s.tag("peer") != "other"]
        both = [c.gauge(s, "receive_queue") for s in series]
        now, before = (float(np.nansum([pair[i] for pair in both])) for i in (0, 1))
        if any(_known(*pair) for pair in both):
            how = min(strength(_ratio(now + 1, before + 1), log(2), 0.3), strength(now - before, 65536, 32768))
            text = f"{scaled(now, 'B')} arrived and lie unread, {scaled(before, 'B')} before"
            yield Reading(f"rank:{c.ranks[column]}", now, before, how, text)


# -- nic: the interfaces' counters -----------------------------------------------------------------------------------


def carried(c: Comparison, host: str, name: str) -> tuple[float, float]:
    """Bytes a second of the job's own, now and before, that a host sent (`bytes_sent`) or received; NaN: unknown."""
    total, seen = np.zeros(2), False
    for _, series in c.series("diagnosd_socket", (host,), job=c.job.name):
        if c.stays_inside(host, series):
            continue
        rates = c.rate(series, name)
        total += np.nan_to_num(rates)
        seen |= _known(rates[0])
    return (float(total[0]), float(total[1])) if seen else (nan, nan)


def interfaces(c: Comparison, host: str) -> list[Series]:
    """The host's network interfaces, each byte in one of them: those that hold an address, as the inventory tells.

    Members of a bond and ports of a bridge hold none, and what they carry is counted there again. So is what a VLAN
    carries on the interface that it is named after. Where no address is told, all but loopback.
    """
    inventory = c.trace.inventory(host)
    holding = {nic.netdev for nic in (inventory.nics if inventory else None) or () if nic.addresses}
    counted = {name for name in holding if name and ("." not in name or name.partition(".")[0] not in holding)}
    named = [(series.tag("interface") or "lo", series) for _, series in c.series("net", (host,))]
    return [series for name, series in named if (name in counted if counted else name != "lo")]


def carriers(c: Comparison, host: str) -> list[Series]:
    """The interfaces that carry the job's collectives: what the others do is none of its business.

    A tenth of what the host must send and receive for them: with a rail for each of 8 GPUs it is an eighth. Where their
    size is unknown, of what the job's connections carry.
    """
    which = 1 if c.before else 0  # while it is slow, somebody else's bytes may be many times its own
    need = c.collective_rate(which)
    if not _known(need):
        need = carried(c, host, "bytes_sent")[which]

    def both_ways(series: Series) -> float:
        known = [
            rate for rate in (c.rate(series, name)[which] for name in ("bytes_sent", "bytes_recv")) if _known(rate)
        ]
        return min(known, default=0.0)

    return [series for series in interfaces(c, host) if _known(need) and both_ways(series) >= max(0.1 * need, 1.0)]


def _shows_the_collectives(c: Comparison, own: tuple[float, float]) -> bool:
    """Whether the job's connections are those of its collectives: half of their bytes. RDMA's are no sockets."""
    which = 1 if c.before else 0
    need = c.collective_rate(which)
    return _known(own[0], own[which]) and (not _known(need) or own[which] >= 0.5 * need)


def foreign_bytes(c: Comparison) -> Iterator[Reading]:
    """Bytes on the collectives' interfaces that are not in the ranks' connections: somebody else uses the link.

    A third of the traffic, three times what it was: backups and monitoring stay far below on a training network, and
    what loader workers read, or the kernel's NFS for them, was there before.
    """
    for host in c.all_hosts:
        for name, own_name, way in (("bytes_recv", "bytes_received", "into"), ("bytes_sent", "bytes_sent", "out of")):
            own_now, own_before = carried(c, host, own_name)
            rates = [c.rate(series, name) for series in carriers(c, host)]
            total_now, total_before = (float(np.nansum([rate[i] for rate in rates])) for i in (0, 1))
            if not _shows_the_collectives(c, (own_now, own_before)) or total_now <= 0:
                continue
            now = max(total_now - WIRE_OVER_PAYLOAD * own_now, 0.0)
            before = max(total_before - WIRE_OVER_PAYLOAD * np.nan_to_num(own_before), 0.0) if c.before else 0.0
            how = min(strength(now / total_now, 0.33, 0.1), strength(now, 3 * before, 0.3 * before + 1e6))
            own = f"beside its own {scaled(own_now, 'B/s')}"
            text = f"{scaled(now, 'B/s')} {way} the host are not in the connections of its ranks, {own}"
            yield Reading(f"host:{host}", now, before, how, text, receiver=host, subtype="neighbour_traffic")


def bytes_a_step(c: Comparison) -> Iterator[Reading]:
    """More or fewer bytes a step: the program changed, by more than 15 %. As many as ever is so in any healthy job."""
    sent = [c.rate(series, "bytes_sent") for host in c.all_hosts for series in carriers(c, host)]
    now, before = (float(np.nansum([rate[i] for rate in sent])) for i in (0, 1))
    if len(c.all_hosts) < 2 or now <= 0 or before <= 0:
        return
    per_now, per_before = now * c.step * c.slowdown, before * c.step
    how = min(strength(abs(_ratio(per_now, per_before)), 0.15, 0.05), 2.0)
    text = "as much is sent in a step as before"
    if how > 0:
        text = f"{per_now / per_before:.1f} times as much is sent in a step as before"
    yield Reading("job", per_now, per_before, how, text)


def drops(c: Comparison) -> Iterator[Reading]:
    """Packets that an interface had to drop: more than one a second is no accident."""
    for host in c.all_hosts:
        for series in carriers(c, host):
            both = [np.add(c.rate(series, name), 0) for name in ("drop_in", "drop_out", "err_in")]
            now, before = (float(np.nansum([pair[i] for pair in both])) for i in (0, 1))
            if any(_known(pair[0]) for pair in both):
                how = strength(now - 3 * before, 1.0, 1.0)
                text = f"{now:.0f} packets a second dropped at {series.tag('interface')}"
                yield Reading(f"nic:{host}/{series.tag('interface')}", now, before, how, text, receiver=host)


# -- host: who got the processors ------------------------------------------------------------------------------------


def throttled(c: Comparison) -> Iterator[Reading]:
    """In this share of its periods a CPU quota held the rank back: 5 % (diagnosis.md 3); decisive from 30 %."""
    for column in c.suspects:
        for series in c.of_rank("diagnosd_process", column):
            now, before = c.gauge(series, "throttled")
            if not _known(before) and _known(c.gauge(series, "cpu_main")[1]):
                before = 0.0  # looked at, and there was no quota
            rise = _rise(c, now, before)
            if _known(rise):
                text = f"its CPU quota was used up in {percent(now)} of the periods"
                decisive = rise > 0.3 and len(c.suspects) < len(c.ranks)
                how = strength(rise, 0.05, 0.08)
                rank = f"rank:{c.ranks[column]}"
                yield Reading(rank, now, before, how, text, decisive=bool(decisive), subtype="cpu_quota")


WHOLE = 1.5  # of a second, in one second: what polls that come late can make of it; more is a broken counter


def _stalled(c: Comparison, series: Series) -> tuple[float, float]:
    """Share of the time, now and before. The counter is of µs: a second of it a second is all there can be."""
    now, before = (rate / 1e6 for rate in c.rate(series, "total"))
    return (now if now <= WHOLE else nan), (before if before <= WHOLE else nan)


def _pressure(c: Comparison, resource: str, what: str) -> Iterator[Reading]:
    for host, series in c.series("pressure", c.suspect_hosts, resource=resource, type="some"):
        now, before = _stalled(c, series)
        rise = _rise(c, now, before)
        if _known(rise):
            text = f"tasks waited for {what} {percent(now)} of the time"
            yield Reading(f"host:{host}", now, before, strength(rise, 0.2, 0.1), text)


def cpu_pressure(c: Comparison) -> Iterator[Reading]:
    """PSI: some task wanted a processor and had none. 20 % more than before (diagnosis.md 3)."""
    yield from _pressure(c, "cpu", "a processor")


def short_of_cpu(c: Comparison) -> Iterator[Reading]:
    """Tasks wait for a processor half of the time, before or not: then TCP, which needs one too, is slow by itself."""
    for host, series in c.series("pressure", c.all_hosts, resource="cpu", type="some"):
        now, _ = _stalled(c, series)
        if _known(now):
            text = f"tasks waited for a processor {percent(now)} of the time"
            yield Reading(f"host:{host}", now, nan, strength(now, 0.5, 0.1), text)


def steal(c: Comparison) -> Iterator[Reading]:
    """The hypervisor gave the processors to somebody else: 2 % (diagnosis.md 3)."""
    for host, series in c.series("cpu", c.suspect_hosts, cpu="cpu-total"):
        now, before = (value / 100 for value in c.gauge(series, "usage_steal"))
        rise = _rise(c, now, before)
        if _known(rise):
            text = f"{percent(now)} of the processors stolen"
            yield Reading(f"host:{host}", now, before, strength(rise, 0.02, 0.02), text)


def preempted(c: Comparison) -> Iterator[Reading]:
    """Involuntary switches of the rank: five times its own (diagnosis.md 3), and more than 20 a second."""
    for column in c.suspects:
        for series in c.of_rank("diagnosd_process", column):
            now, before = c.rate(series, "involuntary_switches")
            if _known(now, before):
                how = min(strength(_ratio(now + 1, before + 1), log(5), 0.4), strength(now, 20, 10))
                yield Reading(
                    f"rank:{c.ranks[column]}",
                    now,
                    before,
                    how,
                    f"preempted {now:.0f} times a second, {before:.0f} before",
                )


def garbage(c: Comparison) -> Iterator[Reading]:
    """Python's collector stopped the rank for as long as the steps lost: half of the loss."""
    for column in c.suspects:
        for series in c.of_rank("diagnosd_process", column):
            now, before = c.rate(series, "gc_seconds")
            rise = _rise(c, now, before)
            if _known(rise) and c.lost > 0:
                share = rise * c.step * c.slowdown / c.lost
                text = f"{percent(now)} of the time in Python's garbage collector"
                rank, how = f"rank:{c.ranks[column]}", strength(share, 0.5, 0.15)
                yield Reading(rank, now, before, how, text, subtype="garbage_collection")


# -- storage ---------------------------------------------------------------------------------------------------------


def io_pressure(c: Comparison) -> Iterator[Reading]:
    """PSI: some task waited for storage, 20 % of the time more than before (diagnosis.md 3)."""
    for reading in _pressure(c, "io", "storage"):
        yield replace(reading, subtype="slow_storage")


def disk_wait(c: Comparison) -> Iterator[Reading]:
    """Milliseconds a request took: five times its own (diagnosis.md 3), and more than a healthy SSD's, 5 ms."""
    for host, series in c.series("diskio", c.suspect_hosts):
        now, before = _await(c, series, 0), _await(c, series, 1)
        if _known(now):
            how = (
                strength(now, 20, 10)
                if not _known(before)
                else min(strength(_ratio(now, before), log(5), 0.4), strength(now, 5, 3))
            )
            text = f"a request to {series.tag('name')} takes {now:.0f} ms"
            yield Reading(f"host:{host}", now, before, how, text, subtype="slow_storage")


def _await(c: Comparison, series: Series, which: int) -> float:
    names = ("reads", "writes", "read_time", "write_time")
    reads, writes, reading, writing = (np.nan_to_num(c.rate(series, name)[which]) for name in names)
    done = float(reads + writes)
    return float(reading + writing) / done if done >= 0.2 else nan  # less than one in 5 s says nothing


def uninterruptible(c: Comparison) -> Iterator[Reading]:
    """The rank sleeps in state D: in the kernel, on storage."""
    for column in c.suspects:
        tags = {"job": c.job.name, "rank": str(c.ranks[column])}
        latest = c.trace.latest(c.hosts[column], "diagnosd_process", "state", **tags)
        if latest and latest[0] >= c.during[0] * 1e9 + c.trace.origin:
            asleep = latest[1] == "D"
            text = f"state {latest[1]}" + (": waits for storage in the kernel" if asleep else "")
            how = 2.0 if asleep else -1.0
            yield Reading(f"rank:{c.ranks[column]}", nan, nan, how, text, subtype="slow_storage")


# -- loader ----------------------------------------------------------------------------------------------------------


# What a loader without workers is worth as a sign: it is certain that nothing was ready, but a host that keeps the rank
# from running keeps it from loading too.
INLINE = 2.0


def queue_empty(c: Comparison) -> Iterator[Reading]:
    """The prefetch queue was empty when the step asked: in half of the steps, the loader sets the pace.

    Without workers there is no queue: the main process loads each batch while the step waits for it.
    """
    for column in c.suspects:
        rank, empty = f"rank:{c.ranks[column]}", float(c.empty[column])
        if c.loads[column] and c.workers[column] == 0:
            yield Reading(rank, nan, nan, INLINE, "its main process loads (num_workers=0): no batch is ready ahead")
        elif c.loads[column] and not isnan(empty):
            yield Reading(rank, empty, 0.0, strength(empty, 0.5, 0.15), f"empty in {percent(empty)} of the steps")


def loader_busy(c: Comparison) -> Iterator[Reading]:
    """Those who load compute all the time: they cannot go faster. 85 %, as they also hand over what they made."""
    for column in c.suspects:
        for series in c.of_rank("diagnosd_process", column):
            busy, text = _loading(c, column, series)
            if _known(busy) and c.loads[column]:
                how = strength(busy, 0.85, 0.05)
                yield Reading(f"rank:{c.ranks[column]}", busy, nan, how, text, subtype="loader_cpu")


def _loading(c: Comparison, column: int, series: Series) -> tuple[float, str]:
    """Share of a processor that each loader uses, NaN where unknown, and words for it.

    A main process that loads also trains: what it computes beyond a step of before is the loading.
    """
    workers = float(c.workers[column])
    if workers > 0:
        used, _ = c.gauge(series, "cpu_workers")
        return used / workers, f"its {workers:.0f} loader workers use {used:.1f} processors"
    now, before = c.gauge(series, "cpu_main") if workers == 0 else (nan, nan)
    waited, when = c.excess("data_wait"), ""
    if _known(now, before) and waited > 0:
        now, when = float(np.clip((now * c.slowdown - before) * c.step / waited, 0, 1)), " in which it loads"
    return now, f"its main process computes {percent(now)} of the time{when}" if _known(now) else ""


# -- inventory: what was declared, and what is ------------------------------------------------------------------------


def wrong_interface(c: Comparison) -> Iterator[Reading]:
    """The job's bytes take an interface that is not of the declared fabric, while the fabric's carries none.

    A hundredth: address resolution and routing protocols stay below it.
    """
    fabric = c.trace.cluster.fabric if c.trace.cluster else None
    if fabric is None or not fabric.interfaces:
        return
    for host in c.all_hosts:
        declared = _sent(c, [s for _, s in c.series("net", (host,)) if s.tag("interface") in fabric.interfaces])
        outside = {name: rate for name, rate in _sent(c, interfaces(c, host)).items() if name not in declared}
        used = max(outside, key=lambda name: outside[name], default="")
        if not used or not declared or not _is_the_jobs(c, host, outside[used]):
            continue
        inside = sum(declared.values())
        share = inside / max(inside + outside[used], 1e-9)
        wrong = share < 0.01
        names = ", ".join(sorted(declared))
        sends = f"{scaled(outside[used], 'B/s')} over {used}, {scaled(inside, 'B/s')} over the fabric's {names}"
        text = f"{host} sends {sends}"
        nic, how = f"nic:{host}/{used}", 3.0 if wrong else -3.0
        yield Reading(nic, outside[used], inside, how, text, decisive=wrong, subtype="wrong_interface")


def _sent(c: Comparison, among: list[Series]) -> dict[str, float]:
    """Bytes a second by the name of the interface."""
    return {series.tag("interface") or "": float(np.nan_to_num(c.rate(series, "bytes_sent")[0])) for series in among}


def _is_the_jobs(c: Comparison, host: str, rate: float) -> bool:
    """Whether an interface's bytes are mostly this job's: as its sockets say, else as many as its collectives need."""
    own, _ = carried(c, host, "bytes_sent")
    if isnan(own):
        hosts = len(c.all_hosts)
        seconds = c.step * c.slowdown
        own = 2 * (hosts - 1) / hosts * c.sync_bytes / max(seconds, 1e-9) if _known(c.sync_bytes) else nan
    return _known(own) and own > 0 and 0.5 <= rate / own <= 2


def low_rate(c: Comparison) -> Iterator[Reading]:
    """A port of the fabric came up slower than declared. A tenth less is a lane or a speed, not rounding."""
    fabric = c.trace.cluster.fabric if c.trace.cluster else None
    if fabric is None or not fabric.rate_gbps:
        return
    for host in c.all_hosts:
        inventory = c.trace.inventory(host)
        for nic in (inventory.nics if inventory else None) or ():
            ours = nic.netdev in fabric.interfaces or nic.role == "compute"
            if ours and nic.rate_gbps and nic.netns is None:
                low = nic.rate_gbps < 0.9 * fabric.rate_gbps
                name = f"{nic.device}/{nic.port}" if nic.device else nic.netdev
                text = f"{name} runs at {nic.rate_gbps:g} Gbit/s, declared are {fabric.rate_gbps:g}"
                locus, how = f"nic:{host}/{name}", 3.0 if low else -1.0
                yield Reading(locus, nic.rate_gbps, fabric.rate_gbps, how, text, decisive=low, subtype="link_rate_low")


def socket_fallback(c: Comparison) -> Iterator[Reading]:
    """NCCL says that it uses TCP sockets on a machine whose declared fabric is RDMA."""
    fabric = c.trace.cluster.fabric if c.trace.cluster else None
    rdma = fabric is not None and fabric.kind in ("infiniband", "roce", "efa")
    for column in range(len(c.ranks)):
        tags = {"job": c.job.name, "rank": str(c.ranks[column])}
        latest = c.trace.latest(c.hosts[column], "diagnosd_nccl", "network", **tags)
        if latest and (rdma or _has_rdma(c, c.hosts[column])):
            fell = latest[1] == "Socket"
            text = f"NCCL communicates over {latest[1]}"
            host, how = f"host:{c.hosts[column]}", 3.0 if fell else -3.0
            yield Reading(host, nan, nan, how, text, decisive=fell, subtype="socket_fallback")


def _has_rdma(c: Comparison, host: str) -> bool:
    inventory = c.trace.inventory(host)
    return any(nic.device and nic.state == "ACTIVE" for nic in (inventory.nics if inventory else None) or ())


def against_bound(c: Comparison) -> Iterator[Reading]:
    """How many times as long as the declared fabric needs the transfer takes. Twice (bounds.HEALTHY)."""
    least = least_transfer(c)
    if least is None:
        return
    now = float(c.observed[PART["transfer"]])
    text = (
        f"the declared fabric would need {seconds(least)} a step, the transfer takes {_times(now / least)} times that"
    )
    yield Reading("job", now, least, strength(now / least, bounds.HEALTHY, 0.4), text)


def _times(factor: float) -> str:
    return digits(float(f"{factor:.2g}"))


def is_beyond_bound(c: Comparison, times: float = bounds.HEALTHY) -> bool:
    """Whether the transfer takes longer than on any healthy fabric of the declared rate."""
    least = least_transfer(c)
    return least is not None and float(c.observed[PART["transfer"]]) > times * least


def least_transfer(c: Comparison) -> float | None:
    """Seconds that the declared fabric needs for the step's collective; None where it or the size is unknown."""
    rate = bounds.line_rate(c.trace.cluster, min(map(c.hosts.count, c.all_hosts)))
    if rate is None or not _known(c.sync_bytes) or len(c.all_hosts) < 2:
        return None
    return bounds.all_reduce(c.sync_bytes, len(c.all_hosts), rate)


NETWORK_CAUSE, TOPOLOGY, STARVATION = "network_congestion", "topology_misconfiguration", "data_starvation"
STRAGGLER, CHECKPOINT, HOST_STALL = "straggler", "checkpoint_stall", "host_stall"
IMBALANCE = "workload_imbalance"

_AGENT = "Run `diagnosd agent` on every host of the job."
DECLARE = "Declare the fabric in a cluster.toml ([fabric] kind, rate_gbps, interface) and pass it with --cluster."

ADVICE = {
    "diagnosd_step": "Start the job with `diagnosd run`, so that the probe times its phases and collectives.",
    "diagnosd_socket": "Start the job with `diagnosd run`, so that the probe looks at its ranks' connections.",
    "diagnosd_process": "Start the job with `diagnosd run`, where there is a /proc: the probe looks at its processes.",
    "diagnosd_nccl": "Set NCCL_DEBUG=INFO, so that NCCL tells its transport.",
    "diagnosd_cluster": DECLARE,
    **dict.fromkeys(("net", "pressure", "cpu", "diskio"), _AGENT),
}
STEP, SOCKET, PROCESS, CLUSTER = "diagnosd_step", "diagnosd_socket", "diagnosd_process", "diagnosd_cluster"

ROWS = (
    Row("transfer", "timing", "s", transfer,
        {NETWORK_CAUSE: 1, TOPOLOGY: 1, STARVATION: -0.6, STRAGGLER: -0.4, HOST_STALL: -0.6}, STEP),
    Row("data wait", "timing", "s", data_wait,
        {STARVATION: 1, NETWORK_CAUSE: -0.5, TOPOLOGY: -0.5, STRAGGLER: -0.5, HOST_STALL: -0.5}, STEP),
    Row("compute of one rank", "timing", "s", compute_of_one,
        {STRAGGLER: 1, HOST_STALL: -0.3, NETWORK_CAUSE: -0.3}, STEP),
    Row("compute of every rank", "timing", "s", compute_of_all,
        {HOST_STALL: 0.8, STRAGGLER: -1}, STEP, True),
    Row("compute of the last rank", "timing", "s", compute_of_the_last, {IMBALANCE: 1}, STEP),
    Row("work of one rank", "work", "a step", work_of_one, {IMBALANCE: 1}, STEP),
    Row("checkpoint", "timing", "s", checkpoint,
        {CHECKPOINT: 1.3, NETWORK_CAUSE: -0.3, STARVATION: -0.3}, STEP, True),
    Row("host gap", "timing", "s", host_gap, {HOST_STALL: 1, NETWORK_CAUSE: -0.3}, STEP, True),
    Row("from the first step", "timing", "", from_the_start, {NETWORK_CAUSE: -1}, STEP, True),
    Row("round-trip time", "socket", "s", rtt, {NETWORK_CAUSE: 0.8}, SOCKET, True),
    Row("sending rate", "socket", "bytes/s", sending_rate, {NETWORK_CAUSE: 0.8}, SOCKET, True),
    Row("send queue", "socket", "bytes", send_queue, {NETWORK_CAUSE: 0.5}, SOCKET, True),
    Row("congestion window", "socket", "segments", window,
        {NETWORK_CAUSE: 0.6}, SOCKET, True),
    Row("retransmits", "socket", "share", retransmits, {NETWORK_CAUSE: 0.9}, SOCKET, True),
    Row("quiet connections", "socket", "", quiet_connections, {NETWORK_CAUSE: -0.5}, SOCKET, True),
    Row("receive queue", "socket", "bytes", receive_queue,
        {STRAGGLER: 0.6, HOST_STALL: 0.2, NETWORK_CAUSE: -0.6}, SOCKET, True),
    Row("others' bytes", "nic", "bytes/s", foreign_bytes, {NETWORK_CAUSE: 1.2, TOPOLOGY: -0.3}, "net", True),
    Row("bytes a step", "nic", "bytes", bytes_a_step, {NETWORK_CAUSE: -0.5, TOPOLOGY: -0.2}, "net", True),
    Row("dropped packets", "nic", "1/s", drops, {NETWORK_CAUSE: 0.3}, "net", True),
    Row("CPU quota", "host", "share", throttled,
        {STRAGGLER: 1.2, HOST_STALL: 0.5, NETWORK_CAUSE: -1}, PROCESS, True),
    Row("CPU pressure", "host", "share", cpu_pressure,
        {HOST_STALL: 1, STRAGGLER: 0.4, NETWORK_CAUSE: -0.5}, "pressure", True),
    Row("short of CPU", "host", "share", short_of_cpu,
        {NETWORK_CAUSE: -0.7, TOPOLOGY: -0.5}, "pressure", True),
    Row("stolen CPU", "host", "share", steal,
        {HOST_STALL: 0.6, STRAGGLER: 0.3, NETWORK_CAUSE: -0.2}, "cpu", True),
    Row("preemptions", "host", "1/s", preempted, {HOST_STALL: 0.4, STRAGGLER: 0.4}, PROCESS, True),
    Row("garbage collection", "host", "share", garbage, {HOST_STALL: 1, STRAGGLER: -0.5}, PROCESS, True),
    Row("storage pressure", "storage", "share", io_pressure,
        {STARVATION: 0.6, CHECKPOINT: 0.6, HOST_STALL: 0.1}, "pressure", True),
    Row("disk wait", "storage", "ms", disk_wait, {STARVATION: 0.5, CHECKPOINT: 0.5}, "diskio", True),
    Row("sleep in the kernel", "storage", "", uninterruptible,
        {STARVATION: 0.5, CHECKPOINT: 0.5}, PROCESS, True),
    Row("prefetch queue empty", "loader", "share", queue_empty, {STARVATION: 1}, STEP),
    Row("loader CPU", "loader", "share", loader_busy, {STARVATION: 0.7}, PROCESS, True),
    Row("interface", "inventory", "bytes/s", wrong_interface,
        {TOPOLOGY: 1, NETWORK_CAUSE: -0.5}, CLUSTER, True),
    Row("port rate", "inventory", "Gbit/s", low_rate, {TOPOLOGY: 1, NETWORK_CAUSE: -0.5}, CLUSTER, True),
    Row("NCCL network", "inventory", "", socket_fallback, {TOPOLOGY: 1, NETWORK_CAUSE: -0.5}, "diagnosd_nccl", True),
    Row("declared fabric", "timing", "s", against_bound, {TOPOLOGY: 1, "communication_bound": -1}, CLUSTER),
)  # fmt: skip
