"""Which cause the evidence names, where, and how sure that is; or that it names none, and what to measure next.

Each cause has log-odds: its prior, plus what each group of sensors says for or against it, capped (diagnosis.md 2.4).
A cause is named when its probability passes NAMED, two independent groups or one decisive fact support it, it costs
what it must, and the parts of the step that it can explain are a good share of the loss. Two causes may be named at
once where they explain different parts. What remains is `unknown`, which is a diagnosis too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import exp
from typing import Any

import numpy as np

from diagnosd.analysis.causes import CAUSES, RIVALS, Cause
from diagnosd.analysis.compare import Comparison
from diagnosd.analysis.decompose import NETWORK, PART
from diagnosd.analysis.evidence import DECLARE, Evidence, Row, collect, least_transfer
from diagnosd.analysis.localize import Place, assets, where

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
    if case.cause.from_start not in (None, c.from_start):
        return False
    return c.excess(*case.claims) >= case.cause.least * c.step and c.share(*case.claims) >= EXPLAINS


def _adds(c: Comparison, case: _Case, free: tuple[str, ...]) -> bool:
    """Whether it explains, with parts that no stronger cause claims, enough to be a second one."""
    return len(free) == len(case.cause.claims) and c.share(*free) >= ALSO


# -- words -----------------------------------------------------------------------------------------------------------


def _verdict(c: Comparison, case: _Case, cases: list[_Case], evidence: list[Evidence], missing: list[Row]) -> Verdict:
    cause = case.cause
    place = where(c, cause.code, evidence)
    subtype = _subtype(cause, evidence)
    kind = cause.subtypes.get(subtype) if subtype else None
    told = [one for one in evidence if _speaks(one, cause.code)]
    rivals = tuple(
        Alternative(other.cause.code, round(other.probability, 3), _against(c, other, evidence))
        for other in cases
        if other is not case and other.odds > other.cause.prior
    )[:3]
    return Verdict(
        cause.code,
        subtype,
        round(min(case.probability, SUREST), 3),
        place.loci,
        kind.owner if kind else cause.owner,
        case.claims,
        _shown(told, cause.code, place.loci),
        rivals,
        *_sources(evidence, missing, (cause.code,)),
        _filled(kind.next if kind else cause.next, c, place),
        _text(c, cause, kind.title if kind else None, case.claims, place.link),
        place.columns,
        assets(c, place),
    )


def _unknown(c: Comparison, cases: list[_Case], evidence: list[Evidence], missing: list[Row]) -> Verdict:
    first, second = cases[0], cases[1]
    codes = (first.cause.code, second.cause.code)
    told = [one for one in evidence if one.reading.strength > 0 or _speaks(one, codes[0])]
    return Verdict(
        "unknown",
        None,
        round(1 - min(first.probability, SUREST), 3),
        where(c, codes[0], evidence).loci if c.share(*first.claims) >= EXPLAINS else ("job",),
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
    head = f"{cause.title}{why}{where}; this is {c.share(*claims):.0%} of what a step takes longer."
    return f"{head[0].upper()}{head[1:]}"


def _filled(text: str, c: Comparison, place: Place) -> str:
    """The placeholders of a remedy, from the verdict."""
    loci, columns = place.loci, place.columns
    host = next(
        (locus.split(":")[1].split("/")[0] for locus in loci if locus.startswith(("nic:", "host:"))), "any host"
    )
    nic = next((locus.partition("/")[2] for locus in loci if locus.startswith("nic:")), "its interface")
    rank = f"rank {c.ranks[columns[0]]}" if columns else "any rank"
    data, checkpoint = c.job.spec.data, c.job.spec.checkpoint
    path = (data.path if data else None) or (checkpoint.path if checkpoint else None) or "its files"
    return text.replace("{host}", host).replace("{nic}", nic).replace("{rank}", rank).replace("{path}", path)


# -- a verdict that no rival competes for ----------------------------------------------------------------------------


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
