"""Which cause the evidence names, where, and how sure that is; or that it names none, and what to measure next.

Each cause has log-odds: its prior, plus what each group of sensors says for or against it, capped (diagnosis.md 2.4).
A cause is named when its probability passes NAMED, two independent groups or one decisive fact support it, it costs
what it must, and the parts of the step that it can explain are a good share of the loss. Two causes may be named at
once where they explain different parts. What remains is `unknown`, which is a diagnosis too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import exp, isnan, log
from typing import Any

import numpy as np

from diagnosd.analysis.causes import CAUSES, RIVALS, Cause
from diagnosd.analysis.compare import COMPUTE, HOST, NETWORK, Comparison
from diagnosd.analysis.decompose import PART
from diagnosd.analysis.evidence import DECLARE, Evidence, Row, collect, interfaces, least_transfer
from diagnosd.analysis.trace import Job, Trace

NAMED = 0.6  # diagnosis.md 2.4: to start with
CAP = 4.0  # what one group may add to the log-odds, of 2 to 3.5 that priors ask for
SUPPORTS = 0.8  # what a group must add to count as one of two
EXPLAINS = 0.3  # share of the loss; with less, something else is the cause
ALSO = 0.25  # share of the loss from which on a second cause is named beside the first
SUREST = 0.98  # nothing here was fitted on enough episodes to say more


@dataclass(frozen=True, slots=True)
class Alternative:
    cause: str
    confidence: float
    text: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong, and where; `claims` are the parts of the step that it explains."""

    cause: str
    subtype: str | None
    confidence: float
    loci: tuple[str, ...]
    owner: str
    claims: tuple[str, ...]
    evidence: tuple[Evidence, ...]
    alternatives: tuple[Alternative, ...]
    sources: tuple[str, ...]
    missing: tuple[str, ...]
    next: str
    text: str
    columns: tuple[int, ...] = ()  # of the ranks it is about; none where it is about all
    assets: tuple[Mapping[str, Any], ...] = ()  # hardware as a ticket needs it


@dataclass(frozen=True, slots=True)
class _Case:
    """One cause against the evidence."""

    cause: Cause
    groups: dict[str, float]
    decisive: bool
    claims: tuple[str, ...]

    @property
    def odds(self) -> float:
        return self.cause.prior + sum(self.groups.values())

    @property
    def probability(self) -> float:
        return 1 / (1 + exp(-self.odds))

    @property
    def is_supported(self) -> bool:
        return self.decisive or sum(weight >= SUPPORTS for weight in self.groups.values()) >= 2


def classify(c: Comparison) -> list[Verdict]:
    """The named causes, the one that explains most first; one `unknown` where none is."""
    evidence, missing = collect(c)
    cases = sorted((_case(cause, evidence) for cause in RIVALS), key=lambda case: (-case.odds, case.cause.code))
    named: list[_Case] = []
    for case in cases:
        free = tuple(part for part in case.claims if not any(part in other.claims for other in named))
        if _stands(c, case) and (not named or _adds(c, case, free)):
            named.append(case)
    if not named:
        return [_unknown(c, cases, evidence, missing)]
    named.sort(key=lambda case: -c.share(*case.claims))
    return [_verdict(c, case, cases, evidence, missing) for case in named]


def _case(cause: Cause, evidence: Iterable[Evidence]) -> _Case:
    """A row with several readings counts once, by its strongest."""
    groups: dict[str, float] = {}
    counted: set[str] = set()
    decisive = False
    for one in evidence:
        if one.row.metric in counted:
            continue
        counted.add(one.row.metric)
        weight = one.weight(cause.code)
        groups[one.row.group] = groups.get(one.row.group, 0.0) + weight
        decisive |= one.reading.decisive and weight > 0
    capped = {group: float(np.clip(weight, -CAP, CAP)) for group, weight in groups.items()}
    # A rank that has no processor cannot move its bytes either: then the transfer is its doing too.
    starved = cause.code in ("straggler", "host_stall") and capped.get("host", 0.0) >= SUPPORTS
    return _Case(cause, capped, decisive, (*cause.claims, *NETWORK) if starved else cause.claims)


def _stands(c: Comparison, case: _Case) -> bool:
    """Whether the cause may be named: probable, supported, physically possible, and worth it."""
    if case.probability < NAMED or not case.is_supported:
        return False
    if case.cause.network and len(c.all_hosts) < 2:
        return False
    if case.cause.code == "topology_misconfiguration" and not c.from_start:
        return False
    return c.excess(*case.claims) >= case.cause.least * c.step and c.share(*case.claims) >= EXPLAINS


def _adds(c: Comparison, case: _Case, free: tuple[str, ...]) -> bool:
    """Whether it explains, with parts that no stronger cause claims, enough to be a second one."""
    return len(free) == len(case.cause.claims) and c.share(*free) >= ALSO


# -- words and places ------------------------------------------------------------------------------------------------


def _verdict(c: Comparison, case: _Case, cases: list[_Case], evidence: list[Evidence], missing: list[Row]) -> Verdict:
    cause = case.cause
    loci, columns, link = _where(c, cause.code, evidence)
    subtype = _subtype(cause, evidence)
    kind = cause.subtypes.get(subtype) if subtype else None
    told = [one for one in evidence if _speaks(one, cause.code)]
    rivals = tuple(
        Alternative(other.cause.code, round(other.probability, 3), _against(c, other, evidence))
        for other in cases
        if other is not case
    )[:3]
    return Verdict(
        cause.code,
        subtype,
        round(min(case.probability, SUREST), 3),
        loci,
        kind.owner if kind else cause.owner,
        case.claims,
        _shown(told, cause.code, loci),
        rivals,
        *_sources(evidence, missing, (cause.code,)),
        _filled(kind.next if kind else cause.next, c, loci, columns),
        _text(c, cause, kind.title if kind else None, case.claims, link),
        columns,
        assets(c, loci, columns),
    )


def _unknown(c: Comparison, cases: list[_Case], evidence: list[Evidence], missing: list[Row]) -> Verdict:
    first, second = cases[0], cases[1]
    codes = (first.cause.code, second.cause.code)
    told = [one for one in evidence if one.reading.strength > 0 or _speaks(one, codes[0])]
    return Verdict(
        "unknown",
        None,
        round(1 - min(first.probability, SUREST), 3),
        _where(c, codes[0], evidence)[0] if c.share(*first.claims) >= EXPLAINS else ("job",),
        "job",
        (),
        _shown(told, codes[0], ("job",)),
        tuple(Alternative(x.cause.code, round(x.probability, 3), _against(c, x, evidence)) for x in cases[:3]),
        *_sources(evidence, missing, codes),
        next_measurement(first.cause, second.cause, missing),
        f"A step takes {c.slowdown:.2f} times as long. Nearest come {first.cause.title}, and {second.cause.title}; "
        "neither has two independent signs.",
    )


def next_measurement(first: Cause, second: Cause, missing: list[Row]) -> str:
    """What is not measured and separates two causes best: the row whose weights for them differ most."""
    apart = {row.metric: abs(row.weights.get(first.code, 0) - row.weights.get(second.code, 0)) for row in missing}
    if not apart or max(apart.values()) == 0:
        return f"To tell {first.title} from {second.title}: {first.next}"
    row = max(missing, key=lambda row: (apart[row.metric], row.metric))
    return f"To tell {first.title} from {second.title}, {row.metric} is not measured. {row.advice}"


def _speaks(one: Evidence, cause: str) -> bool:
    """Whether a reader should see it: a deviation that supports the cause, or whatever speaks against it."""
    weight = one.weight(cause)
    return weight <= -0.3 or (weight >= 0.3 and one.reading.strength > 0)


def _shown(told: list[Evidence], cause: str, loci: tuple[str, ...]) -> tuple[Evidence, ...]:
    """One of each row, of the place that is named where there is one; what weighs most first, eight at most."""
    hosts = {locus.split(":")[-1].split("/")[0] for locus in loci}

    def rank(one: Evidence) -> tuple[bool, float]:
        named = one.reading.subject in loci or one.reading.receiver in hosts
        return not named, -one.reading.strength

    best: dict[str, Evidence] = {}
    for one in sorted(told, key=rank):
        best.setdefault(one.row.metric, one)
    return tuple(sorted(best.values(), key=lambda one: -abs(one.weight(cause)))[:8])


def _subtype(cause: Cause, evidence: list[Evidence]) -> str | None:
    """What the strongest readings that support this cause point to."""
    points: dict[str, float] = {}
    for one in evidence:
        subtype, weight = one.reading.subtype, one.weight(cause.code)
        if subtype is not None and subtype in cause.subtypes and weight > 0:
            points[subtype] = max(points.get(subtype, 0.0), 3.0 if one.reading.decisive else weight)
    if cause.code == "network_congestion" and "neighbour_traffic" in points:
        return "neighbour_traffic"  # its losses and queues follow from it
    if points:
        return max(points, key=lambda name: (points[name], name))
    return "loader_slow" if cause.code == "data_starvation" and _was_asked(evidence) else None


def _was_asked(evidence: list[Evidence]) -> bool:
    """Whether processor and storage were both looked at, so that it can be said that it is neither."""
    return {"storage"} <= {one.row.group for one in evidence}


def _against(c: Comparison, case: _Case, evidence: list[Evidence]) -> str:
    """Why a cause lost: the strongest reading against it, or that nothing supports it."""
    worst = min(evidence, key=lambda one: one.weight(case.cause.code), default=None)
    if worst is not None and worst.weight(case.cause.code) < -0.3:
        return worst.reading.text
    if c.share(*case.claims) < EXPLAINS:
        return f"explains {c.share(*case.claims):.0%} of the loss"
    supporting = sorted(group for group, weight in case.groups.items() if weight >= SUPPORTS)
    return f"only {supporting[0]} supports it" if supporting else "nothing measured supports it"


def _sources(
    evidence: list[Evidence], missing: list[Row], causes: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    seen = {one.row.needs for one in evidence}
    absent = {row.needs for row in missing if any(row.weights.get(cause) for cause in causes)} - seen - {"nccl"}
    return tuple(sorted(seen)), tuple(sorted(absent))


def _text(c: Comparison, cause: Cause, subtype: str | None, claims: tuple[str, ...], link: str | None) -> str:
    where = f", {link}" if link else ""
    why = f": {subtype}" if subtype else ""
    before, now = c.step, c.step * c.slowdown
    head = f"{cause.title}{why}{where}."
    tail = f"A step takes {now:.3f} s instead of {before:.3f} s; {c.share(*claims):.0%} of the difference is this."
    return f"{head[0].upper()}{head[1:]} {tail}"


def _filled(text: str, c: Comparison, loci: tuple[str, ...], columns: tuple[int, ...]) -> str:
    """The placeholders of a remedy, from the verdict."""
    host = next(
        (locus.split(":")[1].split("/")[0] for locus in loci if locus.startswith(("nic:", "host:"))), "each host"
    )
    nic = next((locus.partition("/")[2] for locus in loci if locus.startswith("nic:")), "its interface")
    rank = str(c.ranks[columns[0]]) if columns else "each"
    data, checkpoint = c.job.spec.data, c.job.spec.checkpoint
    path = (data.path if data else None) or (checkpoint.path if checkpoint else None) or "its files"
    return text.replace("{host}", host).replace("{nic}", nic).replace("{rank}", rank).replace("{path}", path)


# -- localising ------------------------------------------------------------------------------------------------------

Where = tuple[tuple[str, ...], tuple[int, ...], str | None]  # loci, columns, link


def _where(c: Comparison, cause: str, evidence: list[Evidence]) -> Where:
    if cause == "network_congestion":
        return _slow_link(c, evidence)
    if cause == "topology_misconfiguration":
        loci = [one.reading.subject for one in evidence if one.reading.decisive and one.row.group == "inventory"]
        return tuple(sorted(loci)) or ("job",), (), None
    if cause == "data_starvation":
        # A tenth: who is behind hides that the others are slow too, because while they wait for it their queues fill.
        return (*_slow_ranks(c, ("data_wait",), 0.1), None)
    parts = {"straggler": COMPUTE, "checkpoint_stall": ("checkpoint",)}.get(cause, (*COMPUTE, *HOST))
    return (*_slow_ranks(c, parts, 1.0 if cause == "straggler" else 0.5), None)


def _slow_ranks(c: Comparison, parts: tuple[str, ...], least: float) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The ranks whose own work grew at least that much of what the worst one's did; all of them are the whole job."""
    grown = np.array([np.subtract(*c.own(column, *parts)) for column in range(len(c.ranks))])
    columns = tuple(np.flatnonzero(grown >= least * max(grown.max(), 1e-9)).tolist())
    if len(columns) == len(c.ranks) > 1:
        return ("job",), ()
    hosts = sorted({c.hosts[column] for column in columns})
    ranks = [f"rank:{c.ranks[column]}" for column in columns]
    if len(hosts) == 1 and len(columns) > 1 and len(columns) == c.hosts.count(hosts[0]):
        return (f"host:{hosts[0]}", *ranks), columns
    return (*ranks, *(f"host:{host}" for host in hosts)), columns


def _slow_link(c: Comparison, evidence: list[Evidence]) -> Where:
    """The link that shows it: its receiver is named, as the port towards it is where bytes queue and are dropped.

    A ring's link is the only one out of its sender and into its receiver, so that the two cannot be told apart by the
    connections; others' bytes tell. Where two links show it alike, the set of their receivers is named.
    """
    scores: dict[tuple[str, str], float] = {}
    for one in evidence:
        reading = one.reading
        if one.row.metric in _LINK_SIGNS and reading.receiver:
            way = (reading.subject.removeprefix("host:"), reading.receiver)
            scores[way] = scores.get(way, 0.0) + _LINK_SIGNS[one.row.metric] * _deviation(one)
    foreign: dict[str, float] = {}
    for one in evidence:
        if one.row.metric == "others' bytes" and one.reading.receiver:
            foreign[one.reading.receiver] = max(foreign.get(one.reading.receiver, 0.0), one.reading.strength)
    for sender, receiver in scores:
        scores[sender, receiver] += 3 * max(foreign.get(receiver, 0.0), 0.0)
    if not scores or max(scores.values()) <= 0:
        busy = [host for host, how in foreign.items() if how > 0]
        return (_places(c, busy), (), None) if busy else (("job",), (), None)
    best = max(scores.values())
    worst = sorted((way for way in scores if scores[way] >= 0.7 * best), key=lambda way: (-scores[way], way))
    receivers = list(dict.fromkeys(receiver for _, receiver in worst))
    if len(receivers) > 1 and len({sender for sender, _ in worst}) == 1:
        return _places(c, [worst[0][0]]), (), f"out of {worst[0][0]}"
    link = f"on the way {worst[0][0]} -> {worst[0][1]}" if len(worst) == 1 else None
    return _places(c, receivers), (), link


_LINK_SIGNS = {"round-trip time": 0.8, "send queue": 0.5, "congestion window": 0.6, "retransmits": 0.9}


def _deviation(one: Evidence) -> float:
    """Widths beyond expected, without the clip: of two links beyond every threshold, the further one is it."""
    now, before = one.reading.observed, one.reading.expected
    if isnan(now) or isnan(before) or now <= 0 or before <= 0:
        return 0.0
    sign = -1 if one.row.metric == "congestion window" else 1
    return max(0.0, sign * log((now + 1e-4) / (before + 1e-4)) / 0.3)


def _places(c: Comparison, hosts: list[str]) -> tuple[str, ...]:
    """Narrowest first: the interface that carries most of a host's bytes, then the host that holds it."""
    loci = []
    for host in hosts:
        rates = {
            s.tag("interface") or "": float(np.nan_to_num(c.rate(s, "bytes_recv")[0])) for s in interfaces(c, host)
        }
        busiest = max(rates, key=lambda name: (rates[name], name), default=None)
        loci += [f"nic:{host}/{busiest}"] if busiest else []
    return (*loci, *(f"host:{host}" for host in hosts))


def assets(c: Comparison, loci: tuple[str, ...], columns: tuple[int, ...]) -> tuple[Mapping[str, Any], ...]:
    """The named interfaces and GPUs, with what a ticket asks for, as far as the inventory knows it."""
    found: list[Mapping[str, Any]] = []
    for locus in loci:
        if locus.startswith("nic:"):
            host, _, name = locus.removeprefix("nic:").partition("/")
            found.append(_nic(c, host, name))
    for column in columns:
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


# -- verdicts that no rival competes for -----------------------------------------------------------------------------


def by_design(c: Comparison) -> Verdict | None:
    """Communication takes much of each step, and nothing says that it should take less: information.

    A fifth of the step (diagnosis.md 2.4); only where transferring was told from waiting.
    """
    cause, step = CAUSES["communication_bound"], float(c.observed.sum())
    transfer = float(c.observed[PART["transfer"]])
    if len(c.all_hosts) < 2 or not c.timed or transfer < cause.least * step:
        return None
    evidence, missing = collect(c)
    least = least_transfer(c)
    text = (
        f"{transfer:.3f} s of each step of {step:.3f} s go into transfer, {transfer / step:.0%}, with all ranks there."
    )
    if least is None:
        advice = f"Whether that is what the fabric needs is not known. {DECLARE}"
    else:
        advice = f"The declared fabric needs {least:.3f} s: send less, or overlap it with the backward pass."
    told = tuple(one for one in evidence if one.row.metric == "declared fabric")
    alternative = Alternative("topology_misconfiguration", 0.5, "no fabric is declared to hold it against")
    return Verdict(
        cause.code,
        None,
        0.5 if least is None else 0.8,
        ("job",),
        cause.owner,
        (),
        told,
        (alternative,) if least is None else (),
        *_sources(evidence, missing, ("topology_misconfiguration",)),
        advice,
        text,
    )


def hanging(trace: Trace, job: Job, still: float, usual: float) -> Verdict | None:
    """No rank ends a step although they run: whoever is not in a collective is whom the others wait for.

    None while a rank saves, evaluates or compiles, which have limits of their own.
    """
    phases = {}
    for info in job.ranks.values():
        latest = trace.latest(info.host, "diagnosd_process", "phase", job=job.name, rank=str(info.rank))
        if latest:
            phases[info.rank] = str(latest[1])
    if set(phases.values()) & {"checkpoint", "eval", "compile"}:
        return None
    # A backward pass waits too: DDP's collectives run inside of it.
    behind = sorted(rank for rank, phase in phases.items() if phase not in ("collective", "comm", "backward"))
    suspects = behind if 0 < len(behind) < len(job.ranks) else []
    loci = tuple(f"rank:{rank}" for rank in suspects) or ("job",)
    cause = CAUSES["hang"]
    where = ", ".join(f"rank {rank} is in {phases[rank]}" for rank in suspects[:4]) or "all ranks are alike"
    host = job.ranks[suspects[0]].host if suspects else "each host"
    rank = str(suspects[0]) if suspects else "each rank"
    return Verdict(
        cause.code,
        None,
        0.9 if suspects else 0.7,
        loci,
        cause.owner,
        cause.claims,
        (),
        (),
        ("probe",),
        () if phases else ("process",),
        cause.next.replace("{host}", host).replace("{rank}", rank),
        f"No step has ended for {still:.0f} s, where one takes {usual:.2f} s; {where}.",
    )
