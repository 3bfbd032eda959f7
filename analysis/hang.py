"""No step ends, although the ranks run: the one fault that step times cannot show, since there are none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import nan

import numpy as np

from diagnosd.analysis.baseline import WINDOW
from diagnosd.analysis.causes import CAUSES, Cause
from diagnosd.analysis.classify import Verdict
from diagnosd.analysis.compare import Comparison
from diagnosd.analysis.evidence import Evidence, Reading, Row
from diagnosd.analysis.figures import digits, seconds
from diagnosd.analysis.history import History
from diagnosd.analysis.trace import Job, RankInfo, Trace
from diagnosd.point import Value

# diagnosis.md 2.2, D4: suspected after five of the longest steps, told after ten of the usual and a minute.
LONGEST, SUSPECT_S = 5, 10.0
USUAL, TELL_S = 10, 60.0
ALIVE_S = 15.0  # a rank that hangs is still told of by the probe's thread, every 5 s at least
LEAST = 20  # cycles that must have been seen: before them a job compiles, or loads


def progress(history: History, now: int) -> tuple[float, float, float]:
    """Seconds without the end of a step, and the usual and the long step."""
    durations = history.floats("duration", history.numbers(history.count - WINDOW))
    return (now - history.newest) / 1e9, float(np.median(durations)), float(np.quantile(durations, 0.95))


def is_suspect(history: History, now: int) -> bool:
    if (now - history.newest) / 1e9 < SUSPECT_S or history.count < LEAST:
        return False
    still, _, long = progress(history, now)
    return still >= max(LONGEST * long, SUSPECT_S)


def is_certain(history: History, now: int) -> bool:
    still, usual, _ = progress(history, now)
    return still >= max(USUAL * usual, TELL_S)


def is_alive(job: Job, now: int) -> bool:
    """Ranks that exited do not hang, and ranks of whom nothing is heard may have been killed."""
    running = [info for info in job.ranks.values() if info.state == "running"]
    return len(running) == len(job.ranks) and any(now - info.last <= ALIVE_S * 1e9 for info in running)


# Cores that the main thread of a rank uses: one that waits uses none, one that computes nearly one.
BUSY = 0.5
# Where a rank may wait for another. A backward pass waits too: DDP's collectives run inside of it.
WAITS = ("collective", "comm", "backward")
LIMITED = ("checkpoint", "eval", "compile")  # have limits of their own
# No end of a step for a minute, with ranks alive, is a hang two times out of three: the rest are programs that do
# something else. Each sign of which rank is behind makes it surer; nothing here was fitted.
ALONE, ALIKE, APART, AGREED = 0.6, 0.7, 0.9, 0.95
SHOWN = 2  # ranks of those that are behind


@dataclass(frozen=True, slots=True)
class Doing:
    """What a rank was last heard to do, since the last step ended; None where it was not read."""

    phase: str | None
    state: str | None
    cores: float | None
    group: str | None
    seq: int | None

    @property
    def is_busy_elsewhere(self) -> bool:
        """Whether it computes outside of a step, as after training or between two epochs."""
        return self.phase == "other" and self.cores is not None and self.cores >= BUSY

    def __str__(self) -> str:
        known = [f"in {self.phase}" if self.phase else "", f"state {self.state}" if self.state else ""]
        known += [f"its main thread uses {digits(self.cores)} processors"] if self.cores is not None else []
        return ", ".join(filter(None, known))


def doing(trace: Trace, job: Job, still: float) -> dict[int, Doing]:
    """Of each rank; what was said before the last step ended, or too long ago, is not counted."""
    since = max(trace.now - still * 1e9, trace.now - ALIVE_S * 1e9)

    def read(info: RankInfo, name: str) -> Value | None:
        latest = trace.latest(info.host, "diagnosd_process", name, job=job.name, rank=str(info.rank))
        return latest[1] if latest and latest[0] >= since else None

    found = {}
    for rank, info in sorted(job.ranks.items()):
        phase, state, group = (None if (v := read(info, n)) is None else str(v) for n in ("phase", "state", "group"))
        cores, seq = read(info, "cpu_main"), read(info, "seq")
        found[rank] = Doing(
            phase, state, None if cores is None else float(cores), group, None if seq is None else int(seq)
        )
    return found


def verdict(trace: Trace, job: Job, still: float, usual: float) -> Verdict | None:
    """No rank ends a step although they run: who is not in a collective, or entered fewer, is waited for.

    Who is waited for and waits for its next batch does not hang, but starves. None while a rank saves, evaluates,
    compiles, or computes outside of any step; and while all of them rest in no phase: between two steps, or after the
    last, a program may wait for an upload or for somebody at the keyboard.
    """
    ranks = doing(trace, job, still)
    phases = {rank: each.phase for rank, each in ranks.items() if each.phase}
    everybody, rest = len(phases) == len(ranks), set(phases.values()) == {"other"}
    if (rest and everybody) or any(each.phase in LIMITED or each.is_busy_elsewhere for each in ranks.values()):
        return None
    outside = [] if rest else _some([rank for rank, phase in phases.items() if phase not in WAITS], job)
    starve = bool(outside or everybody) and {phases[rank] for rank in outside or phases} == {"data_wait"}
    fewer = [] if starve else _fewest(ranks)
    suspects = outside or fewer
    cause = CAUSES["data_starvation" if starve else "hang"]
    behind = f"; it is in {phases[suspects[0]]}" if outside else "; it entered the fewest collectives" if fewer else ""
    return Verdict(
        cause.code,
        None,
        APART if starve else _confidence(phases, outside, fewer),
        tuple(f"rank:{rank}" for rank in suspects) or ("job",),
        cause.owner,
        cause.claims,
        tuple(_evidence(ranks, suspects, fewer, still, usual)),
        (),
        ("diagnosd_process", "diagnosd_step") if phases else ("diagnosd_step",),
        () if phases else ("diagnosd_process",),
        _next(cause, job, suspects, behind),
        f"No step has ended for {seconds(still)}, where one takes {seconds(usual)}; "
        f"{_where(ranks, phases, outside, fewer)}.",
    )


def _some(ranks: list[int], job: Job) -> list[int]:
    """These ranks, where they are not all: then nobody is behind."""
    return ranks if len(ranks) < len(job.ranks) else []


def _fewest(ranks: Mapping[int, Doing]) -> list[int]:
    """Ranks that entered fewer of their group's collectives than another of that group."""
    most: dict[str, int] = {}
    for each in ranks.values():
        if each.group is not None and each.seq is not None:
            most[each.group] = max(most.get(each.group, 0), each.seq)
    return [r for r, e in ranks.items() if e.group is not None and e.seq is not None and e.seq < most[e.group]]


def _confidence(phases: Mapping[int, str], outside: list[int], fewer: list[int]) -> float:
    if outside and fewer:
        return AGREED if set(outside) & set(fewer) else ALIKE
    return APART if outside or fewer else ALIKE if phases else ALONE


def _next(cause: Cause, job: Job, suspects: list[int], behind: str) -> str:
    rank, host = (f"rank {suspects[0]}", job.ranks[suspects[0]].host) if suspects else ("each rank", "each host")
    text = cause.next.replace("{host}", host).replace("{loader}", f"the loader of {rank}").replace("{rank}", rank)
    return f"{text}{behind}." if cause.code == "hang" else text


def _where(ranks: Mapping[int, Doing], phases: Mapping[int, str], outside: list[int], fewer: list[int]) -> str:
    if outside:
        return ", ".join(f"rank {rank} is in {phases[rank]}" for rank in outside[:SHOWN])
    if fewer:
        return ", ".join(f"rank {rank} entered the fewest collectives" for rank in fewer[:SHOWN])
    if len(phases) < len(ranks):
        return "what the ranks do was not read" if not phases else "what some ranks do was not read"
    return f"all ranks are in {phases[min(phases)]}" if len(set(phases.values())) == 1 else "every rank waits"


def _evidence(
    ranks: Mapping[int, Doing], suspects: list[int], fewer: list[int], still: float, usual: float
) -> Iterator[Evidence]:
    told = f"no step has ended for {seconds(still)}"
    yield Evidence(STANDSTILL, Reading("job", still, usual, 3.0, told, decisive=True))
    for rank in suspects[:SHOWN]:
        if str(ranks[rank]):
            yield Evidence(RANK, Reading(f"rank:{rank}", nan, nan, 3.0, str(ranks[rank])))
    for rank in fewer[:SHOWN]:
        most = max(e.seq or 0 for e in ranks.values() if e.group == ranks[rank].group)
        text = f"entered {ranks[rank].seq} collectives of {ranks[rank].group}, another rank {most}"
        yield Evidence(ENTERED, Reading(f"rank:{rank}", float(ranks[rank].seq or 0), float(most), 3.0, text))
    alike = Counter(str(each) for rank, each in ranks.items() if rank not in suspects and str(each))
    for text, count in alike.most_common(SHOWN):
        yield Evidence(RANK, Reading("job", nan, nan, 1.0, f"{'1 rank' if count == 1 else f'{count} ranks'}: {text}"))


def _of_no_windows(_: Comparison) -> Iterator[Reading]:
    """Read of ranks that end no step: there are no two windows to compare."""
    return iter(())


SAYS = {"hang": 1.0, "data_starvation": 1.0}
STANDSTILL = Row("standstill", "timing", "s", _of_no_windows, SAYS, "diagnosd_step")
RANK = Row("rank", "process", "", _of_no_windows, SAYS, "diagnosd_process")
ENTERED = Row("collectives entered", "process", "count", _of_no_windows, SAYS, "diagnosd_process")
