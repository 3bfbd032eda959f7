"""Who trains on this node: each job's owner, its ranks, their attempts, and when they left.

Time is an argument everywhere: seconds of a monotonic clock, so that a step of the wall clock ends no job.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from diagnosd.point import Point, Value, point
from diagnosd.probe.message import Hello, Message, Sequence

REPEAT_S = 60.0  # state is told at least so often (telemetry.md 1); a reader holds it for 90 s
ENDED_S = 60.0  # a job none of whose ranks has run for so long has ended (telemetry.md 2)
# A probe that lost its connection comes back with its next message, within a step. One that stays away from a living
# process has switched itself off: what the rank does is unknown from then on.
LOST_S = 5.0
GAP = 100_000  # messages: what a rank can lose between two that arrive; a larger jump is a number made up
GAP_S = 10.0  # between two events that tell of one rank's lost messages
# The largest nodes have some hundred processors and one rank a processor; what is beyond is no training job. One user
# leaves room. Who has left counts until the job is forgotten: the oldest that has ended is, where there is no room.
JOBS, JOBS_OF_A_USER, RANKS_OF_A_USER = 256, 128, 1024


class RefusedError(ValueError):
    """Well said, but not by this sender, or not so often."""


@dataclass(slots=True, eq=False)
class Rank:
    """One process that is, or was, a rank."""

    job: str
    number: int
    pid: int
    attempt: int | None  # None: not known
    fields: Mapping[str, Value]  # of its diagnosd_rank
    connections: int = 0
    watched: bool = False  # somebody will say when the process is gone
    state: str = "running"
    quiet_since: float = math.inf
    told: float = -math.inf
    sequence: Sequence = field(default_factory=Sequence)
    lost: int = 0  # messages, since the last event that told of them
    gap_told: float = -math.inf

    def __str__(self) -> str:
        return f"rank {self.number} of {self.job}"

    def missed(self, packet: Hello | Message) -> int:
        """How many of its messages were lost before this one."""
        lost = min(self.sequence.lost(packet), GAP)
        self.lost += lost
        return lost

    def become(self, state: str, now: float) -> None:
        if state != self.state:
            self.state, self.quiet_since, self.told = state, now, -math.inf


@dataclass(slots=True)
class Job:
    uid: int
    world: int = 0
    ranks: dict[int, Rank] = field(default_factory=dict)
    state: str = ""
    told: float = -math.inf

    @property
    def attempt(self) -> int | None:
        """The newest; None where it is of none of the ranks known."""
        known = [rank.attempt for rank in self.ranks.values() if rank.attempt is not None]
        return max(known, default=None if self.ranks else 0)

    def idle_since(self) -> float:
        """When its last rank left; inf while one may still run."""
        left = (rank.quiet_since if rank.state == "exited" else math.inf for rank in self.ranks.values())
        return max(left, default=-math.inf)


class Ranks:
    def __init__(self, host: str) -> None:
        self._host = host
        self._jobs: dict[str, Job] = {}

    def hello(self, hello: Hello, uid: int, pid: int, now: float) -> Rank:
        """The rank that speaks. RefusedError where the job is another user's, or where there are too many.

        `uid` and `pid` come from the kernel; a pid of 0 is a process of another pid namespace: then its own word holds.
        """
        job = self._owned(hello.job, uid)
        pid = pid or hello.pid
        before = job.ranks.get(hello.rank)
        if before is None:
            self._make_room(job)
        again = before is not None and before.pid == pid and before.state != "exited"
        attempt = before.attempt if before and again else self._attempt(job, before, hello)
        fields = self._fields(hello, attempt)
        if before and again:
            if fields != before.fields:
                before.fields, before.told = fields, -math.inf
            before.become("running", now)
            return before
        job.world = hello.world
        rank = job.ranks[hello.rank] = Rank(hello.job, hello.rank, pid, attempt, fields)
        return rank

    def _make_room(self, job: Job) -> None:
        others = {name: each for name, each in self._jobs.items() if each.uid == job.uid and each is not job}
        if sum(len(each.ranks) for each in (job, *others.values())) >= RANKS_OF_A_USER:
            self._forget_one(others, f"uid {job.uid} has {RANKS_OF_A_USER} ranks on this node already")

    def _owned(self, name: str, uid: int) -> Job:
        job = self._jobs.get(name)
        if job is None:
            of_user = {name: each for name, each in self._jobs.items() if each.uid == uid}
            if len(of_user) >= JOBS_OF_A_USER:
                self._forget_one(of_user, f"uid {uid} runs {JOBS_OF_A_USER} jobs on this node already")
            if len(self._jobs) >= JOBS:
                self._forget_one(self._jobs, f"{JOBS} jobs run on this node already")
            job = self._jobs[name] = Job(uid)
        if job.uid != uid:
            raise RefusedError(f"job {name} belongs to uid {job.uid}, not to uid {uid}")
        return job

    def _forget_one(self, among: Mapping[str, Job], reason: str) -> None:
        """The one that ended first. RefusedError where none has."""
        idle = {name: job.idle_since() for name, job in among.items()}
        oldest = min(idle, key=lambda name: idle[name], default="")
        if idle.get(oldest, math.inf) == math.inf:
            raise RefusedError(reason)
        del self._jobs[oldest]

    @staticmethod
    def _attempt(job: Job, before: Rank | None, hello: Hello) -> int | None:
        """What the environment counts, and beyond that each later start of a rank (telemetry.md 2).

        The ranks of a restarted job come one after the other: the first raises the attempt, the others join it. What
        came before ranks that are met in mid-stream only an agent before us has seen: a number that is lower than its
        own would make all their steps outdated, and without one they belong to whatever attempt the job is in.
        """
        joined = None if hello.number and not job.ranks else job.attempt
        if joined is None:
            return hello.attempt or None
        if before is not None and joined == before.attempt:
            joined += 1
        return max(hello.attempt or 0, joined)

    @staticmethod
    def _fields(hello: Hello, attempt: int | None) -> dict[str, Value]:
        told = {**hello.fields, "world": hello.world}
        if attempt is not None:
            told["attempt"] = attempt
        if hello.local_rank is not None:
            told["local_rank"] = hello.local_rank
        return told

    @staticmethod
    def disconnected(rank: Rank, now: float) -> None:
        rank.connections -= 1
        if rank.connections:
            return
        if rank.watched:
            rank.quiet_since = now
        else:
            rank.become("exited", now)

    @staticmethod
    def exited(rank: Rank, now: float) -> None:
        rank.become("exited", now)

    def points(self, now_ns: int, now: float) -> list[Point]:
        """What has changed, and what must be repeated."""
        return [each for name, job in self._jobs.items() for each in self._of_job(name, job, now_ns, now)]

    def _of_job(self, name: str, job: Job, now_ns: int, now: float) -> Iterator[Point]:
        for rank in job.ranks.values():
            if rank.state == "running" and not rank.connections and now - rank.quiet_since >= LOST_S:
                rank.become("lost", now)
        ended = now - job.idle_since() >= ENDED_S
        for rank in job.ranks.values():
            if now - rank.told >= REPEAT_S and not (ended and rank.state == "exited" and math.isfinite(rank.told)):
                rank.told = now
                tags = {"job": name, "host": self._host, "rank": str(rank.number)}
                yield point("diagnosd_rank", tags, {**rank.fields, "state": rank.state}, now_ns)
            if rank.lost and now - rank.gap_told >= GAP_S:
                yield self._gap(rank, now_ns)
                rank.lost, rank.gap_told = 0, now
        yield from self._state(name, job, ended=ended, now_ns=now_ns, now=now)

    def _gap(self, rank: Rank, now_ns: int) -> Point:
        tags = {"host": self._host, "kind": "telemetry_gap", "subject": f"rank:{rank.number}", "job": rank.job}
        text = f"{rank.lost} messages of {rank} were lost"
        return point("diagnosd_event", tags, {"text": text, "value": float(rank.lost)}, now_ns)

    @staticmethod
    def _state(name: str, job: Job, *, ended: bool, now_ns: int, now: float) -> Iterator[Point]:
        """A node that has not seen all ranks of the job cannot say that it has ended: then it falls silent."""
        if ended and (len(job.ranks) < job.world or job.state == "ended"):
            return
        state = "ended" if ended else "running"
        if state != job.state or now - job.told >= REPEAT_S:
            job.state, job.told = state, now
            yield point("diagnosd_job", {"job": name}, {"state": state, "attempt": job.attempt}, now_ns)
