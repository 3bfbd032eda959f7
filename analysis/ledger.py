"""Every GPU-nanosecond of a job in exactly one class (telemetry.md 7), in integers, so that the classes add up exactly.

A rank holds its GPU (or, without one, what counts as one) from the first point that says it exists to the last one.
Until the start of its first step that is `init`; between steps and after the last one nobody saw what it did:
`unobserved`; from the end of one attempt, or run, to the first sign of the next, `restart`. A step divides into what it
says itself: `checkpoint`, `eval`, exposed communication, and the rest.

Diagnoses then claim what they cost out of the classes in which each rank spent it: what makes one rank late is the
waiting of the others, in their communication. What they claim beyond what was there makes `unexplained` negative: it
shows, it is not hidden. What is left of communication and the rest is called `communication_by_design` and
`other_by_design`, because no diagnosis speaks against it. Without a performance model nobody knows which part of it was
model FLOPs at peak: `useful` and `kernel_inefficiency` stay 0 rather than guessed, and so does `rolled_back`, for which
the steps since the last checkpoint would have to be known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from diagnosd.analysis.steps import LONGEST_S, SOURCES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from diagnosd.point import Point, Series, Value

CAUSES = (
    "network_congestion", "data_starvation", "topology_misconfiguration", "link_fault", "straggler", "throttling",
    "workload_imbalance", "checkpoint_stall", "host_stall", "hang",
)  # fmt: skip
CLASSES = (
    "useful", "kernel_inefficiency", "communication_by_design", "bubble", "imbalance_by_design", "other_by_design",
    *CAUSES, "init", "restart", "rolled_back", "checkpoint", "eval", "unexplained", "unobserved",
)  # fmt: skip

_COMM, _OTHER = "communication_by_design", "other_by_design"
# Where a rank's own time that a cause cost was booked before, in this order; that in which it waited for others, or for
# bytes, was communication.
_OWN, _WAITED = (_OTHER, _COMM), (_COMM, _OTHER)
_OF_SAVING = ("checkpoint", *_OWN)
_STILL = ("unobserved", _COMM, _OTHER)  # while no step ends nothing is booked

SERIES = 1 << 17  # whose accounts are remembered; containers come and go, and their names with them
ACCOUNTS = 1024  # jobs; twice those that are watched at once, so that what a diagnosis claims finds its account
_PHASES = (("checkpoint", "checkpoint"), ("eval", "eval"), ("comm", _COMM))
_WHOLE_STEP: Mapping[object, str] = {
    "eval": "eval",
    "checkpoint": "checkpoint",
    "compile": "init",
}  # by the step's kind


class Claim(NamedTuple):
    """What a cause cost, GPU-ns: of the ranks' own time, of communication, in which others waited, and of no step."""

    own: int = 0
    waited: int = 0
    still: int = 0

    def plus(self, more: Claim) -> Claim:
        return Claim(*(mine + other for mine, other in zip(self, more, strict=True)))


NOTHING = Claim()


class _Rank:
    """One rank's account: `since` to `seen` is its time, of which what lies before `until` is booked."""

    __slots__ = ("attempt", "booked", "exited", "seen", "since", "source", "stepped", "steps", "until")

    def __init__(self, time: int, booked: dict[str, int]) -> None:
        self.since = self.until = self.seen = time
        self.booked = booked  # of its job
        self.attempt = 0
        self.source = 0
        self.steps = 0
        self.stepped = False  # in this attempt
        self.exited = False

    def begin(self, attempt: int, time: int, *, runs: bool) -> bool:
        """Whether a point of this attempt, seen at this time, counts. A new one closes the one before.

        A rank that `runs` after it has exited is of a second run of the job, which counts its attempts from 0 again.
        """
        again = runs and self.exited and time > self.seen
        if attempt <= self.attempt and not again:
            return attempt == self.attempt
        first = not self.attempt and not self.stepped and not self.exited
        self.attempt = attempt
        if not first:  # else the rank was seen before its attempt was told
            self._begin_anew(time)
        return True

    def _begin_anew(self, time: int) -> None:
        self.booked["unobserved" if self.stepped else "init"] += self.seen - self.until
        self.booked["restart"] += max(0, time - self.seen)
        self.until = self.seen = max(time, self.seen)
        self.stepped = self.exited = False
        self.source = 0

    def see(self, point: Point) -> None:
        """A point that says that the rank exists, or that it has exited."""
        fields, time = point.fields, point.time
        attempt, state = fields.get("attempt", self.attempt), _state(point)
        if (isinstance(attempt, int) and not self.begin(attempt, time, runs=state == "running")) or self.exited:
            return
        self.seen = max(self.seen, time)
        self.exited = state == "exited"

    def step(self, point: Point, source: int) -> None:
        _, fields, end = point
        start = _start(point)
        attempt = fields.get("attempt", self.attempt)
        other = attempt != self.attempt or self.exited
        if other and isinstance(attempt, int) and not self.begin(attempt, start, runs=True):
            return
        if self.exited or source < self.source or end <= self.until:
            return
        booked = self.booked
        if start > self.until:
            booked["unobserved" if self.stepped else "init"] += start - self.until
            self.until = start
        left = end - self.until
        self.until, self.source, self.stepped = end, source, True
        self.seen = max(self.seen, end)
        self.steps += 1
        kind = fields.get("kind")
        if kind in _WHOLE_STEP:
            booked[_WHOLE_STEP[kind]] += left
            return
        for name, target in _PHASES:
            seconds = fields.get(name)
            if isinstance(seconds, float) and seconds > 0:
                part = min(left, int(min(seconds, LONGEST_S) * 1e9))
                booked[target] += part
                left -= part
        booked[_OTHER] += left


class _Account:
    """One job's account."""

    def __init__(self) -> None:
        self.ranks: dict[str, _Rank] = {}
        self.booked = dict.fromkeys(CLASSES, 0)
        self.claims: Mapping[str, Claim] = {}
        self.settled: dict[str, Claim] = {}

    @property
    def gpu_ns(self) -> int:
        return sum(rank.seen - rank.since for rank in self.ranks.values())

    @property
    def steps(self) -> int:
        """Of the rank that made most."""
        return max((rank.steps for rank in self.ranks.values()), default=0)

    @property
    def age(self) -> tuple[bool, int]:
        """Rises with the likelihood that more comes: whether a rank may still run, and when one was last seen."""
        runs = any(not rank.exited for rank in self.ranks.values())
        return runs, max((rank.seen for rank in self.ranks.values()), default=0)

    def classes(self) -> dict[str, int]:
        classes = dict(self.booked)
        for rank in self.ranks.values():
            classes["unobserved" if rank.stepped else "init"] += rank.seen - rank.until
        for cause in sorted({*self.claims, *self.settled}):
            claim = self.claims.get(cause, NOTHING).plus(self.settled.get(cause, NOTHING))
            name = "unexplained" if cause == "unknown" else cause
            _draw(classes, name, claim.still, _STILL)
            _draw(classes, name, claim.waited, _WAITED)
            _draw(classes, name, claim.own, _OF_SAVING if cause == "checkpoint_stall" else _OWN)
        return classes


class Ledger:
    """Takes points in the order of event time, and what the diagnoses cost; gives each job's sums.

    Where there are too many jobs, those that are over the longest have only a sum of them all, `earlier`: as a part of
    the summary, with how many `jobs` they were; empty where it is none.
    """

    def __init__(self) -> None:
        self.earlier: dict[str, Any] = {}
        self._accounts: dict[str, _Account] = {}
        self._routes: dict[Series, tuple[_Rank, int | None] | None] = {}

    @property
    def jobs(self) -> list[str]:
        return sorted(self._accounts)

    def add(self, points: Iterable[Point]) -> None:
        routes = self._routes
        for point in points:
            try:
                route = routes[point.series]
            except KeyError:
                route = self._open(point)
            if route is not None:
                rank, source = route
                if source is None:
                    rank.see(point)
                else:
                    rank.step(point, source)

    def claim(self, job: str, claims: Mapping[str, Claim]) -> None:
        """What the diagnoses of this job cost so far, by cause; replaces what was claimed before."""
        if job in self._accounts:
            self._accounts[job].claims = {cause: claim for cause, claim in claims.items() if cause in _CLAIMABLE}

    def settle(self, job: str) -> None:
        """Whoever diagnosed this job has forgotten it: what was claimed stands, and later claims come on top."""
        account = self._accounts.get(job)
        if account is not None:
            for cause, claim in account.claims.items():
                account.settled[cause] = account.settled.get(cause, NOTHING).plus(claim)
            account.claims = {}

    def steps(self, job: str) -> int:
        """Steps of the rank that made most."""
        return self._accounts[job].steps

    def gpu_ns(self, job: str) -> int:
        return self._accounts[job].gpu_ns

    def classes(self, job: str) -> dict[str, int]:
        """GPU-ns of each class; they sum to gpu_ns exactly, and only `unexplained` may be negative."""
        return self._accounts[job].classes()

    def _open(self, point: Point) -> tuple[_Rank, int | None] | None:
        """Whose account a series' points go to, and how good a source of steps it is, if it is one at all."""
        series = point.series
        job, name, source = series.tag("job"), series.tag("rank"), series.tag("source")
        route = None
        if series.measurement in ("diagnosd_step", "diagnosd_rank", "diagnosd_process") and job and name:
            account = self._accounts.get(job) or self._begin(job)
            rank = account.ranks.get(name)
            if rank is None:
                rank = account.ranks[name] = _Rank(_start(point), account.booked)
            quality = SOURCES.index(source) if source in SOURCES else 0
            route = (rank, quality if series.measurement == "diagnosd_step" else None)
        if len(self._routes) >= SERIES:
            self._routes.clear()
        self._routes[series] = route
        return route

    def _begin(self, job: str) -> _Account:
        """Makes room by the half, for all routes are looked up anew then."""
        if len(self._accounts) >= ACCOUNTS:
            for name in sorted(self._accounts, key=lambda name: self._accounts[name].age)[: ACCOUNTS // 2]:
                self._sum_up(self._accounts.pop(name))
            self._routes.clear()
        account = self._accounts[job] = _Account()
        return account

    def _sum_up(self, account: _Account) -> None:
        before = self.earlier or {"jobs": 0, "steps": 0, "gpu_ns": 0, "ledger_ns": dict.fromkeys(CLASSES, 0)}
        self.earlier = {
            "jobs": before["jobs"] + 1,
            "steps": before["steps"] + account.steps,
            "gpu_ns": before["gpu_ns"] + account.gpu_ns,
            "ledger_ns": {name: before["ledger_ns"][name] + ns for name, ns in account.classes().items()},
        }


_CLAIMABLE = {*CAUSES, "unknown"}  # communication_bound is by design: it claims nothing


def _draw(classes: dict[str, int], cause: str, claimed: int, sources: tuple[str, ...]) -> None:
    """Move `claimed` ns to the cause from where they were booked."""
    left = max(0, claimed)
    for source in sources:
        part = min(left, classes[source])
        classes[source] -= part
        classes[cause] += part
        left -= part
    classes[cause] += left
    classes["unexplained"] -= left


def _state(point: Point) -> Value | None:
    """Of the rank; what a process says of its own is another."""
    return point.fields.get("state") if point.series.measurement == "diagnosd_rank" else None


def _start(point: Point) -> int:
    """When a step began; a point that does not say has no length."""
    duration = point.fields.get("duration")
    return point.time - int(duration * 1e9) if isinstance(duration, float) and 0 <= duration < 1e9 else point.time
