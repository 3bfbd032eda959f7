"""All sets of six repairs of a job of 1,024 ranks: what attribution computes in a tick."""

from __future__ import annotations

import time
from statistics import median

import numpy as np

from diagnosd.analysis.model.counterfactual import Seen, shapley, step_times
from diagnosd.analysis.model.flops import Transformer
from diagnosd.analysis.model.hardware import FABRICS, gpu
from diagnosd.analysis.model.machine import Machine
from diagnosd.analysis.model.workload import Layout, Workload

from .table import row

RANKS, ROUNDS = 1024, 200


def measure() -> float:
    """Seconds of the median round."""
    model = Transformer(80, 8192, 28672, 64, 8, 128_256, 8192, gated=True)
    work = Workload(model, Layout(tp=8, pp=4, dp=32), 1024, 1, sequence_parallel=True, overlap_gradients=True)
    machine = Machine(gpu("H100-SXM"), 8, 8.0, 400e9, FABRICS["infiniband"])
    random = np.random.default_rng(1)
    seen = Seen(
        clock=random.uniform(0.7, 1.0, RANKS),
        load=random.uniform(0.0, 0.1, RANKS),
        rate=random.uniform(0.2, 1.0, RANKS),
        nics=4,
        transport=0.5,
        layout=Layout(tp=4, pp=4, dp=64),
    )
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        shapley(step_times(work, machine, seen))
        times.append(time.perf_counter() - began)
    return median(times)


if __name__ == "__main__":
    row("64 sets of repairs of 1,024 ranks, and their shares", f"{measure() * 1e3:.2f} ms")
