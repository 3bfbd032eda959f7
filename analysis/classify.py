"""Which cause the evidence names, where, and how sure that is; or that it names none, and what to measure next.

Each cause has log-odds: its prior, plus what each group of sensors says for or against it, capped (diagnosis.md 2.4).
What cannot be, because it would have shown otherwise, costs too little or explains too little of the loss, is as good
as ruled out; what one group alone supports is no more likely than not. A cause is named when its probability, after
that, passes NAMED: two independent groups or one decisive fact support it. Two causes may be named at once where they
explain different parts. What remains is `unknown`, which is a diagnosis too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, nan
from typing import Any

import numpy as np

from diagnosd.analysis.causes import CAUSES, GROWTHS, RIVALS, Cause, Growth
from diagnosd.analysis.compare import Comparison
from diagnosd.analysis.decompose import NETWORK, PART
from diagnosd.analysis.evidence import (
    DECLARE,
    MATTERS,
    Evidence,
    Row,
    collect,
    is_beyond_bound,
    least_transfer,
    sources,
)
from diagnosd.analysis.figures import percent, seconds
from diagnosd.analysis.localize import Place, assets, slow_link, slow_ranks, starved_ranks, where

NAMED = 0.6  # diagnosis.md 2.4: to start with
CAP = 4.0  # what one group may add to the log-odds, of 2 to 3.5 that priors ask for
ELSE = ("others' bytes", "short of CPU")  # rows of what slows a transfer on a fabric that is as declared
SUPPORTS = 0.8  # what a group must add to count as one of two
EXPLAINS = 0.3  # share of the loss; with less, something else is the cause
NEAR = 0.01  # share of the loss: with less, a cause is not even near
ALSO = 0.25  # share of the loss from which on a second cause is named beside the first
SUREST = 0.98  # nothing here was fitted on enough episodes to say more
OF_ANY = "sending rate"  # the row that any congestion moves: its subtype is one only where nothing else points
TOLD = 0.3  # log-odds, below which a reading is not worth a line
SOME = 3  # ranks that are named one by one
TABLE, FOR, AGAINST = 7, 5, 2  # lines of evidence that a reader takes in; what is left of them rules the rivals out


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
    step: float = nan  # seconds that the steps took, in the mean, that the evidence is of


@dataclass(frozen=True, slots=True)
class _Case:
    """One cause against the evidence."""

    cause: Cause
    groups: dict[str, float]
    decisive: bool
    claims: tuple[str, ...]
    veto: str | None  # a fact that speaks of something else
    short: str | None  # what it falls short of

    @property
    def weighed(self) -> float:
        """Log-odds by the evidence, whatever is physically possible."""
        return self.cause.prior + sum(self.groups.values())

    @property
    def odds(self) -> float:
        if self.veto or self.short:
            return min(self.weighed, -CAP)
        return self.weighed if self.is_supported else min(self.weighed, 0.0)

    @property
    def probability(self) -> float:
        return 1 / (1 + exp(-self.odds))

    @property
    def is_supported(self) -> bool:
        return self.decisive or sum(weight >= SUPPORTS for weight in self.groups.values()) >= 2


def classify(c: Comparison) -> list[Verdict]:
    """The named causes, the one that explains most first; one `unknown` where none is."""
    evidence, missing = collect(c)
    possible = [cause for cause in RIVALS if cause.can_befall(len(c.all_hosts), len(c.ranks))]
    cases = [_case(c, cause, evidence) for cause in possible]
    cases.sort(key=lambda case: (-case.odds, -case.weighed, case.cause.code))
    named: list[_Case] = []
    for case in cases:
        free = tuple(part for part in case.claims if not any(part in other.claims for other in named))
        if case.probability >= NAMED and (not named or _adds(c, case, free)):
            named.append(case)
    if not named:
        return [_unknown(c, cases, evidence, missing)]
    named.sort(key=lambda case: -c.share(*case.claims))
    rivals = [case for case in cases if case not in named]
    return [_verdict(c, case, rivals, evidence, missing) for case in named]


def _case(c: Comparison, cause: Cause, evidence: Iterable[Evidence]) -> _Case:
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
    claims = (*cause.claims, *NETWORK) if starved else cause.claims
    veto = None
    if cause.from_start not in (None, c.from_start):
        veto = "it was so from the first step" if c.from_start else "it was not so at first"
    elif cause.code == "topology_misconfiguration" and not decisive:
        veto, decisive = _otherwise(evidence)
    return _Case(cause, capped, decisive, claims, veto, _short(c, cause, claims))


def _otherwise(evidence: Iterable[Evidence]) -> tuple[str | None, bool]:
    """What slows transfers from the first step on, and is no misconfiguration; whether all of that is ruled out, and
    the declared fabric so far beyond (over 3 times) that nothing else is left.
    """
    signs = {name: [one.reading for one in evidence if one.row.metric == name] for name in ELSE}
    found = [reading.text for name in ELSE for reading in signs[name] if reading.strength > 0]
    bound = [one.reading.strength for one in evidence if one.row.metric == "declared fabric"]
    return (found[0] if found else None), all(signs.values()) and max(bound, default=0.0) >= 3 and not found


def _short(c: Comparison, cause: Cause, claims: tuple[str, ...]) -> str | None:
    """Why a cause does not explain the loss, whatever speaks for it (diagnosis.md 2.4, vetoes)."""
    if c.share(*claims) < EXPLAINS:
        share = c.share(*claims)
        return f"it would explain {percent(round(share, 2)) if share >= NEAR else 'less than 1 %'} of the loss"
    if c.excess(*claims) < cause.least * c.step:
        return f"what it would explain is less than {percent(cause.least)} of a step"
    return None


def _adds(c: Comparison, case: _Case, free: tuple[str, ...]) -> bool:
    """Whether it explains, with parts that no stronger cause claims, enough to be a second one."""
    return len(free) == len(case.cause.claims) and c.share(*free) >= ALSO


# -- words -----------------------------------------------------------------------------------------------------------


def _verdict(c: Comparison, case: _Case, rivals: list[_Case], evidence: list[Evidence], missing: list[Row]) -> Verdict:
    cause = case.cause
    place = where(c, cause.code, evidence)
    subtype = _subtype(cause, evidence)
    kind = cause.subtypes.get(subtype) if subtype else None
    near = sorted((r for r in rivals if r.weighed > r.cause.prior), key=lambda r: (-r.odds, -r.weighed))[:3]
    return Verdict(
        cause.code,
        subtype,
        round(min(case.probability, SUREST), 3),
        place.loci,
        kind.owner if kind else cause.owner,
        case.claims,
        _shown(cause.code, place, [one for one in evidence if _is_compared(c, one)], rivals),
        tuple(_alternative(c, rival, evidence, missing, case.probability) for rival in near),
        *sources(c.trace, c.job, (cause.code,)),
        _filled(kind.next if kind else cause.next, c, place, cause.code),
        _text(c, cause, kind.title if kind else None, case.claims, place.link),
        place.columns,
        assets(c, place),
        step=c.step + c.lost,
    )


def _unknown(c: Comparison, cases: list[_Case], evidence: list[Evidence], missing: list[Row]) -> Verdict:
    """What grew, and on which ranks, is known also where the cause is not."""
    cases = sorted(cases, key=lambda case: (bool(case.veto or case.short), -case.weighed, case.cause.code))
    near = [case for case in cases if _is_near(c, case)][:2]
    most, *others = sorted(GROWTHS, key=lambda growth: -c.share(*growth.parts))
    place = _where_it_grew(c, most, evidence)
    told = [one for one in evidence if one.reading.strength > 0 or _speaks(one, cases[0].cause.code)]
    best = sorted(_one_of_each(told, Place(("job",))), key=lambda one: -abs(one.weight(cases[0].cause.code)))
    also = [growth for growth in others if c.share(*growth.parts) >= EXPLAINS]
    grew = " and ".join(_grew(c, growth, _where_it_grew(c, growth, evidence)) for growth in (most, *also))
    return Verdict(
        "unknown",
        None,
        round(min(1 - max(case.probability for case in cases), SUREST), 3),
        place.loci,
        "job",
        (),
        tuple(best[:TABLE]),
        tuple(_alternative(c, case, evidence, missing) for case in cases[:3]),
        *sources(c.trace, c.job, (case.cause.code for case in cases[:2])),
        _filled(_measure(most, [case.cause for case in near], missing), c, place, cases[0].cause.code),
        f"Of what a step takes longer, {grew}. {_nearest(near)}",
        step=c.step + c.lost,
    )


def _is_near(c: Comparison, case: _Case) -> bool:
    """Whether anything speaks for it, and it could be."""
    fits = case.cause.from_start in (None, c.from_start)
    return fits and case.weighed > case.cause.prior and c.share(*case.claims) >= NEAR


def _where_it_grew(c: Comparison, growth: Growth, evidence: list[Evidence]) -> Place:
    """The link that shows it, or the ranks whose own part grew half as much as the worst one's, or more."""
    if growth.parts == NETWORK and len(c.all_hosts) > 1 and not c.from_start:
        return slow_link(c, evidence)
    if growth.parts == NETWORK or "mixed" in growth.parts or c.against != "past":
        return Place(("job",))
    place = starved_ranks(c) if "data_wait" in growth.parts else slow_ranks(c, growth.parts, 0.5)
    return place if place.loci else Place(("job",))


def _grew(c: Comparison, growth: Growth, place: Place) -> str:
    """How much of the loss it is, and on which ranks."""
    text = f"{percent(round(c.share(*growth.parts), 2))} is {growth.title}"
    if growth.parts == NETWORK:
        alone = len(c.all_hosts) == 1 and len(c.ranks) >= c.job.world
        return f"{text}: all ranks are on one host, no network lies between them" if alone else text
    if "mixed" in growth.parts or len(c.ranks) < 2 or c.against != "past":
        return text
    names = [str(c.ranks[column]) for column in place.columns]
    if len(names) > SOME:
        return f"{text}, on {len(names)} of {len(c.ranks)} ranks"
    ranks = f"rank{'s' if names[1:] else ''} {_listed(names)}" if names else "every rank"
    return f"{text}, on {ranks}"


def _nearest(near: Sequence[_Case]) -> str:
    if not near:
        return "No cause that is known here explains it."
    each = "; ".join(f"{case.cause.title} ({_lacks(case)})" for case in near)
    return f"Nearest {'come' if near[1:] else 'comes'}: {each}."


def _lacks(case: _Case) -> str:
    """Why a cause is not named."""
    signs = sum(weight >= SUPPORTS for weight in case.groups.values())
    lonely = "one sign, of two that it needs" if signs else "no sign of it"
    return case.veto or case.short or (lonely if not case.is_supported else "as much speaks against it")


def _measure(growth: Growth, near: Sequence[Cause], missing: list[Row]) -> str:
    """Time in no phase only the stack of the rank explains; of all else, first what is not measured."""
    return growth.next if "other" in growth.parts else next_measurement(near, missing) or growth.next


def next_measurement(near: Sequence[Cause], missing: list[Row]) -> str | None:
    """What is not measured and separates the nearest causes best, or the one from none: its weights differ most."""
    if not near:
        return None

    def apart(row: Row) -> float:
        first, second = ([row.weights.get(cause.code, 0.0) for cause in near] + [0.0])[:2]
        return abs(first - second)

    row = max(missing, key=lambda row: (apart(row), row.metric), default=None)
    if row is None or not apart(row):
        return None
    names = " from ".join(cause.code.replace("_", " ") for cause in near)
    return f"To tell {names if near[1:] else f'whether it is {names}'}: {row.metric} is not measured. {row.advice}"


def _speaks(one: Evidence, cause: str) -> bool:
    """Whether a reader should see it: a deviation that supports the cause, or whatever speaks against it."""
    weight = one.weight(cause)
    return weight <= -TOLD or (weight >= TOLD and one.reading.strength > 0)


def _shown(cause: str, place: Place, evidence: list[Evidence], rivals: list[_Case]) -> tuple[Evidence, ...]:
    """What speaks for a cause, then what its rivals would have raised and is as it was, then what speaks against it.

    That as much is sent as ever excludes a change of the program, which is nobody's fault and no rival.
    """
    each = sorted(_one_of_each(evidence, place), key=lambda one: -abs(one.weight(cause)))
    told = [one for one in each if _speaks(one, cause)]
    against = [one for one in told if one.weight(cause) < 0][:AGAINST]
    support = [one for one in told if one.weight(cause) > 0][: min(FOR, TABLE - len(against))]
    untold = [one for one in each if one not in told]
    same = [one for one in untold if one.row.metric == "bytes a step" and one.row.weights.get(cause, 0) < 0]
    ruled_out = [*same, *_rule_out([rival.cause.code for rival in rivals], untold)]
    return (*support, *ruled_out[: TABLE - len(support) - len(against)], *against)


def _rule_out(rivals: list[str], evidence: list[Evidence]) -> list[Evidence]:
    """Parts of the step that a rival would have made longer and that are as they were, the longest first.

    One row for computing: of one rank or of all is said by either.
    """
    found: dict[str, Evidence] = {}
    usual = [one for one in evidence if one.row.group == "timing" and one.row.unit == "s" and one.reading.strength < 0]
    for one in sorted(usual, key=lambda one: -np.nan_to_num(one.reading.observed)):
        if one.reading.observed > 0 and any(one.row.weights.get(rival, 0) >= MATTERS for rival in rivals):
            found.setdefault(one.row.metric.partition(" of ")[0], one)
    started = [one for one in evidence if one.row.metric == "from the first step" and one.reading.strength > 0]
    return [*(started if "network_congestion" in rivals else []), *found.values()]


def _one_of_each(evidence: list[Evidence], place: Place) -> list[Evidence]:
    """The reading of each row that is of the named place, else the strongest."""
    hosts = {locus.split(":")[-1].split("/")[0] for locus in place.loci}

    def elsewhere(one: Evidence) -> bool:
        reading = one.reading
        if place.way and one.row.group == "socket" and reading.receiver:
            return (reading.subject.removeprefix("host:"), reading.receiver) != place.way
        return reading.subject not in place.loci and reading.receiver not in hosts

    best: dict[str, Evidence] = {}
    for one in sorted(evidence, key=lambda one: (elsewhere(one), -one.reading.strength)):
        best.setdefault(one.row.metric, one)
    return list(best.values())


def _subtype(cause: Cause, evidence: list[Evidence]) -> str | None:
    """What the strongest readings that support this cause point to."""
    points: dict[str, float] = {}
    for one in evidence:
        subtype, weight = one.reading.subtype, one.weight(cause.code)
        if subtype is not None and subtype in cause.subtypes and weight > 0:
            points_to = 3.0 if one.reading.decisive else 0.0 if one.row.metric == OF_ANY else weight
            points[subtype] = max(points.get(subtype, 0.0), points_to)
    if cause.code == "network_congestion" and "neighbour_traffic" in points:
        return "neighbour_traffic"  # its losses and queues follow from it
    if points:
        return max(points, key=lambda name: (points[name], name))
    return "loader_slow" if cause.code == "data_starvation" and _was_asked(evidence) else None


def _was_asked(evidence: list[Evidence]) -> bool:
    """Whether processor and disk were both looked at, so that it can be said that it is neither."""
    read = {one.row.metric for one in evidence}
    return "loader CPU" in read and not read.isdisjoint(("storage pressure", "disk wait"))


def _alternative(
    c: Comparison, case: _Case, evidence: list[Evidence], missing: list[Row], most: float = 1.0
) -> Alternative:
    """`most` is the probability of the named cause: what that explains is no longer the rival's to explain."""
    likely = min(case.probability, most, SUREST)
    return Alternative(case.cause.code, round(likely, 3), _why_not(c, case, evidence, missing))


def _why_not(c: Comparison, case: _Case, evidence: list[Evidence], missing: list[Row]) -> str:
    """What the cause would have shown and did not: the heaviest of its facts, and the counters that stayed as before.

    Where all of it was there, what it falls short of.
    """
    if case.veto:
        return case.veto
    code = case.cause.code
    compared = [one for one in _one_of_each(evidence, Place(())) if _is_compared(c, one)]
    wanted = _wanted(case.cause, compared)
    absent = [one for one in wanted if one.reading.strength <= 0 or one.row.weights.get(code, 0.0) < 0]
    facts = [one.reading.text for one in absent if not _counts(one.row)]
    counters = [one.row.metric for one in absent if _counts(one.row)]
    said = [*facts[:1], *([_are(counters[:3], "as before" if c.before else "low")] if counters else [])]
    if said:
        return "; ".join(said)
    if case.short:
        return case.short
    signs = [one.row.metric for one in wanted if one.reading.strength > 0]
    unmeasured = [row.metric for row in missing if row.weights.get(code, 0) >= MATTERS]
    said = [f"only {_listed(signs[:2])} {'speak' if signs[1:] else 'speaks'} for it"] if signs else []
    said += [_are(unmeasured[:3], "not measured")] if unmeasured else []
    return "; ".join(said) or "nothing that was measured speaks for it"


def _wanted(cause: Cause, evidence: list[Evidence]) -> list[Evidence]:
    """What a cause leads one to expect, the heaviest first."""
    weights = {one.row.metric: one.row.weights.get(cause.code, 0.0) for one in evidence}
    wanted = [one for one in evidence if weights[one.row.metric] >= MATTERS]
    return sorted(wanted, key=lambda one: (-weights[one.row.metric], one.row.metric))


def _is_compared(c: Comparison, one: Evidence) -> bool:
    """Without a past, a part of the step that no bound shortens is expected as it is observed: that says nothing."""
    return c.against == "past" or one.reading.observed != one.reading.expected


def _counts(row: Row) -> bool:
    """Whether it holds a counter against what was counted before, and tells only of more."""
    return row.one_sided and row.group in ("socket", "nic", "host", "storage")


def _are(names: list[str], what: str) -> str:
    return f"{_listed(names)} {'are' if names[1:] or names[0].endswith('s') else 'is'} {what}"


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _text(c: Comparison, cause: Cause, subtype: str | None, claims: tuple[str, ...], link: str | None) -> str:
    where = f", {link}" if link else ""
    why = f": {subtype}" if subtype else ""
    head = f"{cause.title}{why}{where}; this is {percent(c.share(*claims))} of what a step takes longer."
    return f"{head[0].upper()}{head[1:]}"


def _filled(text: str, c: Comparison, place: Place, cause: str) -> str:
    """The placeholders of a remedy, from the verdict."""
    loci, columns = place.loci, place.columns
    only = c.all_hosts[0] if len(c.all_hosts) == 1 else "any host"
    host = next((locus.split(":")[1].split("/")[0] for locus in loci if locus.startswith(("nic:", "host:"))), only)
    nic = next((locus.partition("/")[2] for locus in loci if locus.startswith("nic:")), "its interface")
    rank = f"rank {c.ranks[columns[0]]}" if columns else "any rank"
    data, checkpoint = c.job.spec.data, c.job.spec.checkpoint
    saved = cause == "checkpoint_stall"
    path = (checkpoint.path if checkpoint else None) if saved else (data.path if data else None)
    path = path or ("its checkpoints" if saved else "its files")
    gpu = "; nvidia-smi -q -d CLOCK,PERFORMANCE" if any(info.gpu for info in c.job.ranks.values()) else ""
    for name, value in (
        ("loader", _loader(c, columns)), ("host", host), ("nic", nic), ("rank", rank), ("path", path), ("gpu", gpu)
    ):  # fmt: skip
        text = text.replace(f"{{{name}}}", value)
    return text


def _loader(c: Comparison, columns: tuple[int, ...]) -> str:
    """Which process loads, as far as it is known."""
    workers = c.workers[list(columns)] if columns else c.workers
    if (workers == 0).all():
        return "{rank}, whose main process loads (num_workers=0)"
    return "a loader worker of {rank}" if (workers > 0).all() else "the loader of {rank}"


# -- a verdict that no rival competes for ----------------------------------------------------------------------------


def present(c: Comparison) -> Verdict | None:
    """What the inventory says for certain and no slowdown shows: a fault that is there, and may cost nothing (yet)."""
    cause = CAUSES["topology_misconfiguration"]
    if not cause.can_befall(len(c.all_hosts), len(c.ranks)):
        return None
    evidence, _ = collect(c)
    facts = [one for one in evidence if one.row.group == "inventory" and one.reading.decisive]
    subtype = _subtype(cause, facts)
    if subtype is None:
        return None
    kind, place = cause.subtypes[subtype], where(c, cause.code, facts)
    cost = "What that costs was not measured."
    if c.timed and least_transfer(c) is not None and not is_beyond_bound(c):
        cost = "The transfers take no longer than on the declared fabric."
    first = next(one.reading.text for one in facts if one.reading.subtype == subtype)
    return Verdict(
        cause.code,
        subtype,
        SUREST,
        place.loci,
        kind.owner,
        (),
        tuple(facts[:TABLE]),
        (),
        *sources(c.trace, c.job, (cause.code,)),
        _filled(kind.next, c, place, cause.code),
        f"{kind.title[0].upper()}{kind.title[1:]}: {first}. {cost}",
        place.columns,
        assets(c, place),
    )


def by_design(c: Comparison) -> Verdict | None:
    """Communication takes much of each step, and nothing says that it should take less: information.

    A fifth of the step (diagnosis.md 2.4); only where transferring was told from waiting.
    """
    cause, step = CAUSES["communication_bound"], float(c.observed.sum())
    transfer = float(c.observed[PART["transfer"]])
    if len(c.all_hosts) < 2 or not c.timed or transfer < cause.least * step:
        return None
    evidence, _ = collect(c)
    least = least_transfer(c)
    amount = f"{percent(transfer / step)} of each step, {seconds(transfer)} of {seconds(step)},"
    text = f"{amount} go into moving bytes, with all ranks waiting for them."
    if least is None:
        advice = f"Whether that is what the fabric needs is not known. {DECLARE}"
    else:
        needed = seconds(min(least, transfer))
        advice = f"The declared fabric needs {needed}: send less, or overlap it with the backward pass."
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
        *sources(c.trace, c.job, ("topology_misconfiguration",)),
        advice,
        text,
    )
