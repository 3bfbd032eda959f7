"""A diagnosis over time: what was judged at one tick becomes an episode that lasts, and is told once.

    suspected --holds--> confirmed --gone--> resolved --back--> confirmed
        |                    |
        +--gone, other--> withdrawn <--other--+

`holds`: it has cost for PERSIST (steps and seconds) and the judgement stood; `gone`: the loss is below 2 % again;
`other`: another cause explains the same loss, lastingly; `back`: the same cause returns within REJOIN seconds, which is
the same episode. A suspicion is not told: what is withdrawn before it was confirmed was never said.

An episode's id is a hash of what it is about and of the step with which it began, so that it is the same after a
restart of the analysis.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from math import isnan
from typing import Any

from diagnosd.analysis.causes import CAUSES
from diagnosd.analysis.classify import Verdict
from diagnosd.analysis.evidence import Evidence
from diagnosd.analysis.figures import seconds
from diagnosd.analysis.summary import rfc3339

TRANSITIONS: dict[str, dict[str, str]] = {
    "suspected": {"holds": "confirmed", "gone": "withdrawn", "other": "withdrawn"},
    "confirmed": {"gone": "resolved", "other": "withdrawn"},
    "resolved": {"back": "confirmed"},
    "withdrawn": {},
    "latent": {"holds": "confirmed", "gone": "withdrawn"},
}

# Four steps tell a slowdown from a hiccup; five seconds hold one or two samples of what is read every 2 to 5 s.
# Both together leave half of the 15 s in which an operator wants to be told.
PERSIST_STEPS, PERSIST_S = 4, 5.0
# What costs too little to be told without a cause gets the same again: on the bed TCP loses 6 % for four seconds when
# all is well, with the losses and the lower rate that belong to it.
SLIGHT_S = 10.0
# `unknown` waits for the slower sensors, which are read every 10 s, and gives a passing disturbance the time to pass.
UNKNOWN_STEPS, UNKNOWN_S = 10, 20.0
# A shift of less than 2.5 times what single steps scatter by when all is well is, on a machine that others use too, the
# weather.
UNKNOWN_SCATTER = 2.5
AGREED = 2  # ticks in a row that must have named the cause
MISSED = 2  # ticks in a row that must not have named it, before a suspicion is dropped
REPLACED = 10  # and before a confirmed cause gives way to another: evidence wavers for a sampling interval or two
SUPERSEDED = 3  # unknown gives way sooner: any cause is better
REJOIN_S = 900.0  # diagnosis.md 2.6: re-opening within 15 min joins the old episode
REPEAT_S = 60.0  # figures alone are told again once a minute
APART = 1.05  # steps that took so many times as long as others are not called the same
BRIEF = 8  # of the slowdowns that were too short for a cause, those that cost most are kept

# By rate of loss, GPU-hours per hour, as in diagnosis.md 2.6: below 1 and mild nobody acts; 64 is as if eight machines
# stood still. There a slowdown of 30 % is high at any size; here it makes a ticket and wakes nobody: of two GPUs it is
# half of one.
INFO_RATE, PAGE_RATE = 1.0, 64.0
MILD = 1.3  # slowdown


@dataclass(frozen=True, slots=True)
class Found:
    """A verdict, when what it is about began (ns), the row that began then, and the framework's number of its step.

    `onset` is None for what was so from the first step that was seen.
    """

    verdict: Verdict
    start: int
    row: int
    onset: int | None


@dataclass(slots=True)
class Episode:
    """Times in ns of event time."""

    origin: str  # past, peers, model, checkpoint, hang: which reference fired
    verdict: Verdict
    attempt: int
    start: int
    row: int  # number of the first cycle, of where it began again if it came back
    onset: int | None = None  # the framework's number of its first step
    state: str = "suspected"
    detected: int | None = None
    end: int | None = None
    id: str = ""
    revision: int = 0
    agreed: int = 1  # ticks in a row
    missed: int = 0
    unseen: int = 0  # looks in a row at which its reference showed nothing of it
    left: int = 0  # ns: the first of them
    lost: float = 0.0  # GPU-seconds
    observed: float = 0.0  # seconds of the affected steps
    expected: float = 0.0  # what they should have taken
    step: float = 0.0  # expected seconds a step
    scatter: float = 0.0  # of single healthy steps, as a share of the step
    mends: float = 0.0  # share of the loss that repairing this alone would undo
    ranks: int = 0
    share: float = 1.0  # of the loss of its cycles, where several causes share it
    waited: float = 0.0  # share of the loss that ranks spent waiting for others, or for bytes
    counted: int = 0  # cycles before this number are in the sums
    told: dict[str, Any] = field(default_factory=dict)
    told_at: int = 0

    @property
    def slowdown(self) -> float:
        return self.observed / self.expected if self.expected > 0 else 1.0

    @property
    def gain(self) -> float:
        """Share of the step that repairing this alone would save.

        Of the same steps as the slowdown: `mends` is of the latest only, and a step of these may take longer than the
        mean, or less.
        """
        return self.mends * max(1 - 1 / max(self.slowdown, 1e-9), 0.0)

    @property
    def is_open(self) -> bool:
        return self.state in ("suspected", "confirmed")

    def pass_to(self, event: str) -> None:
        self.state = TRANSITIONS[self.state][event]


class Episodes:
    """The episodes of one job. Ask `changes` for the documents to tell."""

    def __init__(self, cluster: str, job: str) -> None:
        self.cluster, self.job = cluster, job
        self.all: list[Episode] = []
        self._brief: list[Episode] = []

    def open(self, origin: str) -> list[Episode]:
        return [e for e in self.all if e.is_open and e.origin == origin]

    def observe(self, origin: str, found: list[Found], attempt: int) -> list[Episode]:
        """The judgement of this tick, by one reference; returns the episodes it is about."""
        touched = []
        for one in found:
            episode = self._of(origin, one, attempt)
            if episode is not None:
                touched.append(episode)
        for episode in self.open(origin):
            if episode not in touched:
                self._miss(episode, [one.verdict for one in found])
        return touched

    def look(self, origin: str, found: list[Found], attempt: int, now: int) -> list[Episode]:
        """As `observe`, by a reference that nothing but itself tells that what it showed is over.

        What lies near a threshold is found at one look and not at the next: it ends after REPLACED looks without it. A
        loss that is there and that no cause is named for has not ended.
        """
        touched = self.observe(origin, found, attempt)
        is_lost = any(one.verdict.cause == "unknown" for one in found)
        for episode in self.open(origin):
            if episode in touched or is_lost:
                episode.unseen = 0
            elif episode.state == "confirmed":
                episode.left = episode.left if episode.unseen else now
                episode.unseen += 1
                if episode.unseen >= REPLACED:
                    self.close(episode, episode.left)
        return touched

    def _of(self, origin: str, found: Found, attempt: int) -> Episode | None:
        for episode in self.all:
            if episode.is_open and episode.verdict.cause == found.verdict.cause and episode.attempt == attempt:
                if episode.origin == origin:
                    return _agree(episode, found)
                if origin not in ("past", "hang"):
                    return None  # told already; but what was always so may get worse than it was, or stop all
        if found.verdict.cause == "unknown" and any(e.state == "confirmed" for e in self.open(origin)):
            return None  # evidence that thins out does not undo what was confirmed
        episode = Episode(origin, found.verdict, attempt, found.start, found.row, found.onset)
        self.all.append(episode)
        return episode

    def _miss(self, episode: Episode, verdicts: list[Verdict]) -> None:
        episode.agreed = 0
        episode.missed += 1
        if episode.state == "suspected":
            if episode.missed >= MISSED:
                episode.pass_to("other")
                self.all.remove(episode)
            return
        other = [v for v in verdicts if v.cause != "unknown" and _same_loss(v, episode.verdict)]
        if not other:
            episode.missed = 0
        elif episode.missed >= (SUPERSEDED if episode.verdict.cause == "unknown" else REPLACED):
            episode.pass_to("other")

    def confirm(self, episode: Episode, now: int, steps: int, *, at_once: bool = False) -> None:
        """Tell it, if it has held for long enough and nothing that is told explains the same loss."""
        unknown = episode.verdict.cause == "unknown"
        if episode.state != "suspected" or (episode.agreed < AGREED and not at_once):
            return
        cheap = _is_cheap(episode)
        least_s = SLIGHT_S if cheap else PERSIST_S
        least_steps, least_s = (UNKNOWN_STEPS, UNKNOWN_S) if unknown else (PERSIST_STEPS, least_s)
        lasted = steps >= least_steps and now - episode.start >= least_s * 1e9
        if not (lasted or at_once) or (unknown and cheap) or self._explained(episode):
            return
        former = next((e for e in reversed(self.all) if _joins(e, episode, now)), None)
        if former is not None:
            former.pass_to("back")
            former.end, former.verdict, former.counted = None, episode.verdict, max(former.counted, episode.row)
            former.row, former.unseen, former.left = episode.row, 0, 0
            self.all.remove(episode)
            return
        episode.pass_to("holds")
        episode.detected = now
        episode.id = self._id(episode)

    def _explained(self, episode: Episode) -> bool:
        return any(
            other.state == "confirmed" and other is not episode and _same_loss(other.verdict, episode.verdict)
            for other in self.open(episode.origin)
        )

    def gone(self, origin: str, end: int) -> None:
        """The loss that this reference showed is over."""
        for episode in self.open(origin):
            self.close(episode, end)

    def close(self, episode: Episode, end: int) -> None:
        was_told = episode.state == "confirmed"
        episode.pass_to("gone")
        episode.end = max(end, episode.start)
        if not was_told:
            self.all.remove(episode)
            if _lasted(episode):
                self._brief = sorted([*self._brief, episode], key=lambda e: -e.lost)[:BRIEF]

    def brief(self) -> list[Episode]:
        """Slowdowns that ended, or may have ended with the job, before they had lasted long enough for a verdict.

        As long, and at such a cost, that a cause would have been told if there had been one; and nothing that is told.
        """
        over = [*self._brief, *(e for e in self.all if e.state == "suspected" and _lasted(e))]
        told = [e for e in self.all if e.state in ("confirmed", "resolved", "withdrawn")]
        return [e for e in over if not any(_meet(e, other) for other in told)]

    def latent(self, origin: str, verdict: Verdict, attempt: int) -> None:
        """A finding that costs nothing now: told once, and an alert never."""
        if any(e.verdict.cause == verdict.cause and e.attempt == attempt for e in self.all):
            return
        episode = Episode(origin, verdict, attempt, 0, 0, state="latent")
        episode.id = self._id(episode)
        self.all.append(episode)

    def changes(self, now: int, *, final: bool = False) -> list[dict[str, Any]]:
        """Documents that say something new; figures alone once a minute, and at the end.

        A job of weeks has many episodes that ended long ago: what is told of them stays so.
        """
        documents = []
        for episode in self.all:
            has_ended = not episode.is_open and episode.told.get("state") == episode.state
            if episode.state == "suspected" or has_ended:
                continue
            if episode.state == "withdrawn" and episode.end is None:
                episode.end = now
            document = self.document(episode)
            told = {key: document.get(key) for key in _NEWS}
            figures = document["lost_gpu_seconds"] != episode.told.get("lost_gpu_seconds")
            due = final or now - episode.told_at >= REPEAT_S * 1e9
            if any(told[key] != episode.told.get(key) for key in _NEWS) or (figures and due):
                episode.revision += 1
                episode.told = {**told, "lost_gpu_seconds": document["lost_gpu_seconds"]}
                episode.told_at = now
                documents.append({**document, "revision": episode.revision})
        return documents

    def document(self, episode: Episode) -> dict[str, Any]:
        """telemetry.md 7; keys that do not apply are missing."""
        verdict, costs = episode.verdict, episode.state != "latent"
        document: dict[str, Any] = {
            "type": "diagnosis",
            "id": episode.id,
            "revision": episode.revision,
            "cluster": self.cluster,
            "job": self.job,
            "attempt": episode.attempt,
            "cause": verdict.cause,
            "subtype": verdict.subtype,
            "state": episode.state,
            "severity": severity(episode) if costs else "info",
            "owner": verdict.owner,
            "start": rfc3339(episode.start) if costs else None,
            "detected": rfc3339(episode.detected, up=True) if costs and episode.detected is not None else None,
            "end": rfc3339(episode.end) if costs and episode.end is not None else None,
            "confidence": verdict.confidence,
            "slowdown": round(episode.slowdown, 3) if costs else None,
            "lost_gpu_seconds": round(episode.lost, 1) if costs else 0.0,
            "fix_gain": round(episode.gain, 3) if costs else None,
            "baseline": {"step_s": round(episode.step, 4), "from": reference(episode.origin)} if costs else None,
            "locus": list(verdict.loci),
        }
        document = {key: value for key, value in document.items() if value is not None}
        document["assets"] = [dict(asset) for asset in verdict.assets]
        document["parent"] = None
        document["victims"] = {"ranks": episode.ranks, "jobs": [self.job]}
        document["sources"], document["missing"] = list(verdict.sources), list(verdict.missing)
        document["evidence"] = [_evidence(one, verdict) for one in verdict.evidence]
        document["alternatives"] = [
            {"cause": other.cause, "confidence": other.confidence, "text": other.text} for other in verdict.alternatives
        ]
        return {**document, "next": verdict.next, "text": verdict.text + (_of_which_steps(episode) if costs else "")}

    def _id(self, episode: Episode) -> str:
        """The step's number instead of its time: how clocks are aligned depends a little on when the analysis began."""
        about = (self.cluster, self.job, episode.attempt, episode.verdict.cause, episode.verdict.loci, episode.onset)
        return sha256(repr(about).encode()).hexdigest()[:12]


def outline(episode: Episode) -> dict[str, Any]:
    """Of a slowdown that was too short for a verdict, the keys of one that can be said; no `end` while it goes on."""
    end = {"end": rfc3339(episode.end)} if episode.end is not None else {}
    return {
        "start": rfc3339(episode.start),
        **end,
        "slowdown": round(episode.slowdown, 3),
        "lost_gpu_seconds": round(episode.lost, 1),
        "baseline": {"step_s": round(episode.step, 4), "from": reference(episode.origin)},
        "locus": list(episode.verdict.loci),
        "text": episode.verdict.text,
    }


# What makes a new revision at once.
_NEWS = ("state", "severity", "subtype", "locus", "end")


def _agree(episode: Episode, found: Found) -> Episode:
    episode.agreed += 1
    episode.missed = 0
    if episode.state == "suspected":
        episode.verdict, episode.start = found.verdict, found.start
        episode.row, episode.onset = found.row, found.onset
    elif found.verdict.confidence >= episode.verdict.confidence - 0.05 and _sharpens(found.verdict, episode.verdict):
        episode.verdict = found.verdict
    return episode


def _sharpens(new: Verdict, old: Verdict) -> bool:
    """Whether it says as much of the place, or more, or something else; not less: evidence wavers.

    Without a cause, where most was lost wavers too: then it is another place only where none was known.
    """
    places, known = set(new.loci), set(old.loci)
    other = places.isdisjoint(known) and (new.cause != "unknown" or known == {"job"})
    return places <= known or other


def _is_cheap(episode: Episode) -> bool:
    """Whether it is too little to be told without a cause."""
    return episode.slowdown < 1 + max(CAUSES["unknown"].least, UNKNOWN_SCATTER * episode.scatter)


def _lasted(episode: Episode) -> bool:
    """Whether a slowdown against the job's past has lasted for long enough to be one, and cost something."""
    is_long = episode.counted - episode.row >= PERSIST_STEPS and episode.observed >= PERSIST_S
    return episode.origin == "past" and is_long and not _is_cheap(episode)


def _meet(a: Episode, b: Episode) -> bool:
    return (b.end is None or a.start < b.end) and (a.end is None or b.start < a.end)


def _joins(former: Episode, episode: Episode, now: int) -> bool:
    """Whether a cause that returns is the same episode: soon after, and where a cause is known at a place of both."""
    if former.state != "resolved" or former.end is None or former.attempt != episode.attempt:
        return False
    same = former.origin == episode.origin and former.verdict.cause == episode.verdict.cause
    meet = episode.verdict.cause == "unknown" or not set(former.verdict.loci).isdisjoint(episode.verdict.loci)
    return same and meet and now - former.end <= REJOIN_S * 1e9


def _same_loss(a: Verdict, b: Verdict) -> bool:
    """Whether two verdicts explain the same part of the step; `unknown` is about all of it."""
    return not a.claims or not b.claims or bool(set(a.claims) & set(b.claims))


def reference(origin: str) -> str:
    return origin if origin in ("peers", "model") else "past"


def severity(episode: Episode) -> str:
    """By the rate of loss in GPU-hours per hour; information where nobody would act on it."""
    if episode.verdict.cause == "communication_bound":
        return "info"
    slowdown = max(episode.slowdown, 1.0)
    rate = episode.ranks * (1 - 1 / slowdown)
    if rate >= PAGE_RATE:
        return "page"
    return "info" if rate < INFO_RATE and slowdown < MILD else "ticket"


def _of_which_steps(episode: Episode) -> str:
    """How long the steps took that the evidence is of, where they are not like the rest: a part may exceed the mean.

    Of checkpoints that is said by their own verdict.
    """
    mean, seen = episode.step * episode.slowdown, episode.verdict.step
    longer = any(one.row.unit == "s" and one.reading.observed > mean for one in episode.verdict.evidence)
    alike = mean / APART <= seen <= mean * APART and not longer
    if isnan(seen) or alike or episode.origin == "checkpoint":
        return ""
    return f" The evidence is of steps that took {seconds(seen)}."


def _evidence(one: Evidence, verdict: Verdict) -> dict[str, Any]:
    reading = one.reading
    supports = reading.strength > 0 if verdict.cause == "unknown" else one.weight(verdict.cause) >= 0
    document: dict[str, Any] = {"metric": one.row.metric, "subject": reading.subject}
    if supports and reading.strength < 0 and verdict.cause != "communication_bound":
        document["usual"] = True  # as it was: it supports by what it denies a rival
    figures = {"observed": reading.observed, "expected": reading.expected}
    document |= {name: _rounded(value) for name, value in figures.items() if not isnan(value)}
    return {**document, "unit": one.row.unit, "supports": bool(supports), "text": reading.text}


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
