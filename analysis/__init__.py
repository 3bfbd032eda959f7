"""Points in, diagnoses out. Pure: arrays and event time, no clock, no I/O, no randomness.

analysis = Analysis("east", cluster)
for points in source:
    for document in analysis.feed(points): ...     # new revisions of diagnoses, telemetry.md 7
analysis.finish(); analysis.summary()
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

from diagnosd.analysis import summary
from diagnosd.analysis.baseline import ENTER
from diagnosd.analysis.episodes import outline
from diagnosd.analysis.ledger import Ledger
from diagnosd.analysis.order import Order
from diagnosd.analysis.trace import Job, Trace
from diagnosd.analysis.watch import EARLY, Watch
from diagnosd.documents import ClusterSpec
from diagnosd.point import Point

SECOND = 10**9

# The fastest rule wants 4 slow steps out of 5: until something is suspected, a look at fewer changes little. Where
# steps are long, 3 s are what a look may cost of the 15 s within which a fault must be told.
LOOK_STEPS = 4
LOOK_S = 3
CALM_S = 10  # while no step takes longer than a slowdown must make it, there is no hurry


class Analysis:
    """Judges at whole seconds of event time, so that how the points were batched changes nothing."""

    def __init__(self, cluster_name: str, cluster: ClusterSpec | None = None) -> None:
        self.cluster_name = cluster_name
        self.order = Order()
        self.trace = Trace(cluster)
        self.ledger = Ledger()
        self.watches: dict[str, Watch] = {}
        self._due = 0  # ns: the next whole second
        self._looked: dict[str, tuple[int, int]] = {}  # job -> when, and the steps that had been taken by then

    def feed(self, points: Iterable[Point]) -> list[dict[str, Any]]:
        """New revisions of diagnosis documents, in the order in which they were reached."""
        return self._go_on(self.order.feed(points))

    def finish(self) -> list[dict[str, Any]]:
        """The last words, after the last point."""
        documents = self._go_on(self.order.finish())
        for job in [*self.trace.jobs.values()]:
            documents += self._watch(job).tick(self.trace.now)
        for name in sorted(self.watches):
            documents += self.watches[name].finish(self.trace.now)
        return documents

    def summary(self) -> dict[str, Any]:
        for name, watch in self.watches.items():
            self.ledger.claim(name, watch.claims())
        jobs = {job: self._of_job(job) for job in self.ledger.jobs}
        earlier = {"earlier": self.ledger.earlier} if self.ledger.earlier else {}
        return {"type": "summary", "jobs": jobs, **earlier}

    def _of_job(self, name: str) -> dict[str, Any]:
        watch = self.watches.get(name)
        judged = (watch.judged, watch.judged_s) if watch else (0, 0.0)
        missed = {host: each for (job, host), each in self.order.missed.items() if job == name}
        brief = [outline(each) for each in watch.episodes.brief()] if watch else []
        return summary.of_job(self.trace, self.ledger, name, judged, missed, brief)

    def status(self) -> dict[str, dict[str, Any]]:
        """Of each job, for a live line: `steps`, `step_s` as usual, `now_s`, and `still_s` since the last one."""
        return {name: watch.status() for name, watch in sorted(self.watches.items())}

    def _go_on(self, points: list[Point]) -> list[dict[str, Any]]:
        documents: list[dict[str, Any]] = []
        times, done = [point.time for point in points], 0
        while done < len(points):
            if not self._due or times[done] >= self._due:
                documents += self._tick()
                self._due = times[done] // SECOND * SECOND + SECOND
            until = bisect_right(times, self._due - 1, done)
            part = points[done:until]
            self.ledger.add(part)
            self.trace.add(part)
            done = until
        return documents

    def _tick(self) -> list[dict[str, Any]]:
        documents: list[dict[str, Any]] = []
        for name, job in [*self.trace.jobs.items()]:
            if self._is_due(job):
                documents += self._watch(job).tick(self.trace.now)
                self._looked[name], job.longest = (self.trace.now, job.taken), 0.0
        for name in self.watches.keys() - self.trace.jobs.keys():
            self._forget(name)
        return documents

    def _forget(self, name: str) -> None:
        """The trace has forgotten this job: what was found has cost what it has."""
        self.ledger.claim(name, self.watches.pop(name).claims())
        self.ledger.settle(name)
        self._looked.pop(name, None)

    def _is_due(self, job: Job) -> bool:
        watch = self._watch(job)
        if watch.suspects:
            return True
        looked, taken = self._looked.get(job.name, (0, 0))
        new, since = abs(job.taken - taken), self.trace.now - looked  # a new attempt counts anew
        if new and self._is_calm(job, watch):
            return since >= CALM_S * SECOND
        return since >= LOOK_S * SECOND or new >= LOOK_STEPS * max(1, len(job.ranks))

    def _is_calm(self, job: Job, watch: Watch) -> bool:
        """Whether all steps since the last look are as usual, and what was so from the start has long been judged."""
        usual = watch.baseline.reference()
        return usual is not None and watch.baseline.count > EARLY and job.longest < (1 + ENTER) * usual.step

    def _watch(self, job: Job) -> Watch:
        watch = self.watches.get(job.name)
        if watch is not None and watch.job is not job:
            self._forget(job.name)
            watch = None
        if watch is None:
            watch = self.watches[job.name] = Watch(self.cluster_name, self.trace, job)
        return watch
