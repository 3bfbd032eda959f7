"""Where a cause sits: the rank, the host, the interface or the link, or the set of those that cannot be told apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isnan, log
from typing import Any

import numpy as np

from diagnosd.analysis.compare import Comparison
from diagnosd.analysis.decompose import COMPUTE, HOST
from diagnosd.analysis.evidence import Evidence, carriers, sends_since

# A link whose signs reach this share of the worst one's shows the same trouble.
ALIKE = 0.7
# And of two directions between the same hosts the one that sends so much faster is not it. Where only one is slow, the
# other's acknowledgements wait in its queue, but they leave it before the last bytes do. On the bed, at 630 Mbit/s of
# 1000, that is 8 %, and one direction's own scatter below 1 %.
FASTER = 1.04


Way = tuple[str, str]  # sender, receiver


@dataclass(frozen=True, slots=True)
class Place:
    """Loci, narrowest first; the columns of the ranks it is about, none for all; and the link: sender, receiver."""

    loci: tuple[str, ...]
    columns: tuple[int, ...] = ()
    way: Way | None = None

    @property
    def link(self) -> str | None:
        """Words for the link."""
        return f"on the way {self.way[0]} -> {self.way[1]}" if self.way else None


def where(c: Comparison, cause: str, evidence: list[Evidence]) -> Place:
    if cause == "network_congestion":
        return slow_link(c, evidence)
    if cause == "topology_misconfiguration":
        loci = {one.reading.subject for one in evidence if one.reading.decisive and one.row.group == "inventory"}
        return Place(tuple(sorted(loci)) or ("job",))
    if cause == "data_starvation":
        return starved_ranks(c)
    of_one = cause in ("straggler", "workload_imbalance")
    parts = COMPUTE if of_one else ("checkpoint",) if cause == "checkpoint_stall" else (*COMPUTE, *HOST)
    return slow_ranks(c, parts, 1.0 if of_one else 0.5)


def slow_ranks(c: Comparison, parts: tuple[str, ...], least: float) -> Place:
    """The ranks whose own work grew at least that much of what the worst one's did."""
    grown = np.array([np.subtract(*c.own(column, *parts)) for column in range(len(c.ranks))])
    return _ranks(c, tuple(np.flatnonzero(grown >= least * max(grown.max(), 1e-9)).tolist()))


def starved_ranks(c: Comparison) -> Place:
    """The ranks that wait for batches, and those whose queue never fills.

    Who is furthest behind hides that the others are slow too: while they wait for it in the collective, their loaders
    catch up. But a loader that is fast enough fills its queue, and rests.
    """
    grown = np.array([np.subtract(*c.own(column, "data_wait")) for column in range(len(c.ranks))])
    slow = (grown >= 0.1 * max(grown.max(), 1e-9)) | (c.loads & (c.full < 0.5))
    return _ranks(c, tuple(np.flatnonzero(slow).tolist()))


def _ranks(c: Comparison, columns: tuple[int, ...]) -> Place:
    """All ranks are the whole job, and all of a host the host."""
    if len(columns) == len(c.ranks) > 1:
        return Place(("job",))
    hosts = sorted({c.hosts[column] for column in columns})
    ranks = [f"rank:{c.ranks[column]}" for column in columns]
    if len(hosts) == 1 and len(columns) > 1 and len(columns) == c.hosts.count(hosts[0]):
        return Place((f"host:{hosts[0]}", *ranks), columns)
    return Place((*ranks, *(f"host:{host}" for host in hosts)), columns)


def slow_link(c: Comparison, evidence: list[Evidence]) -> Place:
    """The link that shows it: its receiver is named, as the port towards it is where bytes queue and are dropped.

    A full queue at the port of one host delays the bytes that come to it and the acknowledgements of those that it
    sends: then two links of a ring show a long way, and the host that both touch is the one. Where they touch the same
    two hosts, it is the direction that sends more slowly, or either.
    """
    scores = _scores(evidence)
    best = max(scores.values(), default=0.0)
    if best <= 0:
        busy = sorted(host for host, how in _foreign(evidence).items() if how > 0)
        return Place(_ports(c, busy)) if busy else Place(("job",))
    worst = sorted((way for way in scores if scores[way] >= ALIKE * best), key=lambda way: (-scores[way], way))
    common = set.intersection(*({*way} for way in worst))
    if len(common) == 1:
        into = [way for way in worst if way[1] in common]
        return Place(_ports(c, sorted(common)), (), (into or worst)[0])
    if len(common) == 2:
        worst = _slower(c, worst)
    if len(worst) == 1:
        return Place(_ports(c, [worst[0][1]]), (), worst[0])
    return Place(_ports(c, list(dict.fromkeys(receiver for _, receiver in worst))))


def _slower(c: Comparison, ways: list[Way]) -> list[Way]:
    """Those that send no faster than the slowest of them; all, where the kernel does not tell."""
    rates = {(link.sender, link.receiver): sends_since(c, link) for link in c.links}
    least = min(rates[way] for way in ways)
    return ways if isnan(least) else [way for way in ways if not rates[way] > FASTER * least]


# A send queue that was empty before grows without bound as a ratio: it tells no link from another.
_SIGNS = {"round-trip time": 0.8, "sending rate": 0.8, "congestion window": 0.6, "retransmits": 0.9}


def _scores(evidence: list[Evidence]) -> dict[Way, float]:
    """How far each link's signs lie from what they were, weighed as in the evidence; others' bytes weigh on theirs."""
    scores: dict[Way, float] = {}
    for one in evidence:
        if one.row.metric in _SIGNS and one.reading.receiver:
            way = (one.reading.subject.removeprefix("host:"), one.reading.receiver)
            beyond = one.reading.strength > 0  # below its threshold a sign is noise, which tells no link from another
            scores[way] = scores.get(way, 0.0) + beyond * _SIGNS[one.row.metric] * _deviation(one)
    foreign = _foreign(evidence)
    return {way: score + 3 * foreign.get(way[1], 0.0) for way, score in scores.items()}


def _foreign(evidence: Iterable[Evidence]) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in evidence:
        if one.row.metric == "others' bytes" and one.reading.receiver:
            found[one.reading.receiver] = max(found.get(one.reading.receiver, 0.0), one.reading.strength)
    return found


def _deviation(one: Evidence) -> float:
    """Widths beyond expected, without the clip: of two links beyond every threshold, the further one is it.

    None of the segments may have been sent twice before; a round-trip time, window or rate of 0 is no measurement.
    """
    now, before = one.reading.observed, one.reading.expected
    if isnan(now) or isnan(before) or now <= 0 or (before <= 0 and one.row.unit != "share"):
        return 0.0
    sign = -1 if one.row.metric in ("congestion window", "sending rate") else 1
    return max(0.0, sign * log((now + 1e-4) / (before + 1e-4)) / 0.3)


def _ports(c: Comparison, hosts: list[str]) -> tuple[str, ...]:
    """Narrowest first: the interface that carries most of the collectives' bytes, then the host that holds it."""
    loci = []
    for host in hosts:
        rates = {s.tag("interface") or "": float(np.nan_to_num(c.rate(s, "bytes_recv")[0])) for s in carriers(c, host)}
        busiest = max(rates, key=lambda name: (rates[name], name), default=None)
        loci += [f"nic:{host}/{busiest}"] if busiest else []
    return (*loci, *(f"host:{host}" for host in hosts))


def assets(c: Comparison, place: Place) -> tuple[Mapping[str, Any], ...]:
    """The named interfaces and GPUs, with what a ticket asks for, as far as the inventory knows it."""
    found: list[Mapping[str, Any]] = []
    for locus in place.loci:
        if locus.startswith("nic:"):
            host, _, name = locus.removeprefix("nic:").partition("/")
            found.append(_nic(c, host, name))
    for column in place.columns:
        info = c.job.ranks.get(c.ranks[column])
        if info and info.gpu:
            found.append({"host": info.host, "gpu": info.gpu})
    return tuple(found)


def _nic(c: Comparison, host: str, name: str) -> Mapping[str, Any]:
    inventory = c.trace.inventory(host)
    for nic in (inventory.nics if inventory else None) or ():
        if name in (nic.netdev, f"{nic.device}/{nic.port}"):
            peer = nic.peer
            known = {
                "host": host,
                "nic": nic.device or nic.netdev,
                "port": nic.port,
                "port_guid": nic.port_guid,
                "pci": nic.pci,
                "peer_switch": peer.switch if peer else None,
                "peer_port": peer.port if peer else None,
            }
            return {key: value for key, value in known.items() if value is not None}
    return {"host": host, "nic": name}
