"""No step ends, although the ranks run: the one fault that step times cannot show, since there are none."""

from __future__ import annotations

import numpy as np

from diagnosd.analysis.baseline import WINDOW
from diagnosd.analysis.causes import CAUSES
from diagnosd.analysis.classify import Verdict
from diagnosd.analysis.history import History
from diagnosd.analysis.trace import Job, Trace

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


def verdict(trace: Trace, job: Job, still: float, usual: float) -> Verdict | None:
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
    rank = f"rank {suspects[0]}" if suspects else "each rank"
    return Verdict(
        cause.code,
        None,
        0.9 if suspects else 0.7,
        loci,
        cause.owner,
        cause.claims,
        (),
        (),
        ("diagnosd_process", "diagnosd_step") if phases else ("diagnosd_step",),
        () if phases else ("diagnosd_process",),
        cause.next.replace("{host}", host).replace("{rank}", rank),
        f"No step has ended for {still:.0f} s, where one takes {usual:.2f} s; {where}.",
    )
