"""A job's part of the summary document (telemetry.md 7): its steps and its account, and what a reader wants to know
of a job in which nothing was found: how long it was watched, where, and by which measurements.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from diagnosd.analysis.ledger import Ledger
    from diagnosd.analysis.steps import Steps
    from diagnosd.analysis.trace import Trace


def of_job(trace: Trace, ledger: Ledger, name: str) -> dict[str, Any]:
    """`step_s` and `step_p95_s` are over the steps kept (the last 2,000), of the rank in the middle."""
    part: dict[str, Any] = {
        "steps": ledger.steps(name),
        "gpu_ns": ledger.gpu_ns(name),
        "ledger_ns": ledger.classes(name),
    }
    job = trace.jobs.get(name)
    if job is None:  # long over, and forgotten
        return part
    part |= {"attempt": job.attempt, "ranks": len(job.ranks), "hosts": list(job.hosts)}
    part |= {"start": rfc3339(job.first), "end": rfc3339(job.last)}
    durations = _durations(job.steps())
    if durations.size:
        part["step_s"] = float(np.median(durations))
        part["step_p95_s"] = float(np.percentile(durations, 95))
    part["sources"] = sorted(m for m, hosts in trace.seen.items() if not hosts.isdisjoint(job.hosts))
    return part


def rfc3339(ns: int) -> str:
    """To the millisecond; hosts' clocks agree no better."""
    moment = datetime.fromtimestamp(ns // 10**9, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{ns // 10**6 % 1000:03d}Z"


def _durations(steps: Steps) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """[S] of the rank in the middle, where any rank told it."""
    durations = steps.column("duration")
    return np.nanmedian(durations[~np.isnan(durations).all(axis=1)], axis=1) if durations.size else np.empty(0)
