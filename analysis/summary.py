"""A job's part of the summary document (telemetry.md 7): its steps and its account, and what a reader wants to know
of a job in which nothing was found: how long it was watched, where, by which measurements, and what was not seen.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from diagnosd.analysis.causes import RIVALS
from diagnosd.analysis.evidence import sources

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diagnosd.analysis.ledger import Ledger
    from diagnosd.analysis.order import Missed
    from diagnosd.analysis.steps import Steps
    from diagnosd.analysis.trace import Event, Job, Trace

GAPS = 8  # of which a reader is told
IN_FLIGHT = 2  # steps a rank that may still come of an attempt when the next one has begun: no news
OUTDATED = "steps of an earlier attempt than the job is in: they are not used"
LATE = "points came when their time had been judged: its clock was set back, or the folder shows them late"


def of_job(
    trace: Trace,
    ledger: Ledger,
    name: str,
    judged: tuple[int, float],
    missed: Mapping[str, Missed],
    brief: list[dict[str, Any]],
) -> dict[str, Any]:
    """`step_s` and `step_p95_s` are over the steps kept (the last 2,000), of the rank in the middle.

    `judged`: how many steps were held against the job's own past, and the seconds that they took. `missed`: what came
    of it and was not used, by host. `brief`: slowdowns that were too short for a verdict.
    """
    part: dict[str, Any] = {
        "steps": ledger.steps(name),
        "gpu_ns": ledger.gpu_ns(name),
        "ledger_ns": ledger.classes(name),
    }
    job = trace.jobs.get(name)
    if job is None:  # long over, and forgotten
        return part
    part |= {"attempt": job.attempt, "ranks": len(job.ranks), "world": job.world, "hosts": list(job.hosts)}
    part |= {"start": rfc3339(job.first), "end": rfc3339(job.last)}
    part["judged"], part["judged_s"] = judged[0], round(judged[1], 3)
    part |= {"brief": brief} if brief else {}
    durations = _durations(job.steps())
    if durations.size:
        part["step_s"] = float(np.median(durations))
        part["step_p95_s"] = float(np.percentile(durations, 95))
    possible = [cause.code for cause in RIVALS if cause.can_befall(len(job.hosts), len(job.ranks))]
    part["sources"], part["missing"] = map(list, sources(trace, job, possible))
    part["observed"] = _observed(part, sum(each.step_ns for each in missed.values()))
    part["gaps"] = [*_late(missed), *_gaps(trace, job)][:GAPS]
    return part


def _observed(part: dict[str, Any], missed_ns: int) -> float:
    """Share of the job's GPU time of which its ranks told, those of whom nobody heard included.

    What was told and could not be used is time of the job too, if by a wrong clock.
    """
    told = part["gpu_ns"] - part["ledger_ns"]["unobserved"]
    gpu_ns = max(part["gpu_ns"] * part["world"] / max(part["ranks"], 1), told + missed_ns)
    return round(told / gpu_ns, 4) if gpu_ns else 1.0


def _late(missed: Mapping[str, Missed]) -> list[dict[str, Any]]:
    return [
        {"subject": f"host:{host}", "start": rfc3339(each.since), "text": f"{each.late:,} {LATE}", "count": 1}
        for host, each in sorted(missed.items())
        if each.late and each.step_ns
    ]


def _gaps(trace: Trace, job: Job) -> list[dict[str, Any]]:
    """What telemetry said of its own losses while the job ran: `subject`, `start`, `text`, and how often (`count`).

    What has a value (messages lost, seconds of silence) comes again and again: it is told once for each subject, and
    after what is final.
    """
    found: dict[tuple[bool, str, str], dict[str, Any]] = {}
    for event in trace.events_of("telemetry_gap", "clock"):
        if not _concerns(job, event):
            continue
        text, repeats = event.text or event.kind, event.value is not None
        gap = {"subject": event.subject, "start": rfc3339(event.time), "text": text, "count": 0}
        found.setdefault((repeats, event.subject, "" if repeats else text), gap)["count"] += 1
    told = [found[key] for key in sorted(found, key=lambda key: key[0])]
    for host, (count, first) in sorted(job.outdated.items()):
        if count > IN_FLIGHT * len(job.ranks):
            gap = {"subject": f"host:{host}", "start": rfc3339(first), "text": OUTDATED, "count": count}
            told.insert(0, gap)
    return told


def _concerns(job: Job, event: Event) -> bool:
    """Whether it is of the job, or of a host of the job's while it ran.

    A host that is kept out for its clock may be where its missing ranks run.
    """
    if event.job is not None or event.time > job.last:
        return event.job == job.name
    mine = event.host in job.hosts and event.time >= job.first
    return mine or (event.kind == "clock" and len(job.ranks) < job.world)


def rfc3339(ns: int, *, up: bool = False) -> str:
    """To the millisecond; hosts' clocks agree no better. `up`: the first that is not earlier, else the last before."""
    ns += (-ns) % 10**6 if up else 0
    moment = datetime.fromtimestamp(ns // 10**9, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{ns // 10**6 % 1000:03d}Z"


def _durations(steps: Steps) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """[S] of the rank in the middle, where any rank told it."""
    durations = steps.column("duration")
    return np.nanmedian(durations[~np.isnan(durations).all(axis=1)], axis=1) if durations.size else np.empty(0)
