"""Does the probe make a job slower? `python -m tests.benchmarks.probe_aa [PAIRS]`, 20 pairs of runs, some 6 minutes.

Each pair runs the same training script once under the probe and once without, in an order that is drawn, and compares
their median steps. Told is the mean of the differences with its 95 % interval (Student's t), in percent of a step: what
the probe costs, or, where the interval is wider than that, how much this machine's own noise hides.
"""

from __future__ import annotations

import math
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median, stdev
from typing import TYPE_CHECKING

from .table import row

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PAIRS = 20
STEPS, WARM_UP, BATCH = 100, 20, 400  # 50 ms a step on the machine that README names
# The 97.5th percentile of Student's t by degrees of freedom, 1 to 30; beyond them it is nearly the normal's 1.96.
T975 = (
    *(12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13),
    *(2.12, 2.11, 2.10, 2.09, 2.09, 2.08, 2.07, 2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05, 2.04),
)


def train() -> None:
    """The script: DDP in a world of one. Prints its median step in ns."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        model = DistributedDataParallel(nn.Sequential(*(nn.Linear(512, 512) for _ in range(6))))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        durations, before = [], time.perf_counter_ns()
        for batch in DataLoader(torch.randn(BATCH * STEPS, 512), batch_size=BATCH):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            now = time.perf_counter_ns()
            durations.append(now - before)
            before = now
        dist.destroy_process_group()
    print(median(durations[WARM_UP:]))


def receive(listener: socket.socket) -> None:
    """In the agent's place: reads whatever any rank says."""
    while True:
        connection, _ = listener.accept()
        with connection:
            while connection.recv(8192):
                pass


@contextmanager
def agent() -> Iterator[str]:
    """The path at which one listens."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{folder}/probe.sock")
        listener.listen()
        process = get_context("fork").Process(target=receive, args=(listener,), daemon=True)
        process.start()
        yield f"{folder}/probe.sock"
        process.terminate()
        process.join()


def run(path: str, *, probed: bool) -> float:
    """The median step of one run, in s."""
    environ = {**os.environ, "DIAGNOSD_SOCKET": path, "DIAGNOSD_JOB": "a-job" if probed else ""}
    environ["PYTHONPATH"] = os.pathsep.join([*([str(ROOT / "diagnosd/probe/path")] if probed else []), str(ROOT)])
    command = [sys.executable, "-m", "tests.benchmarks.probe_aa", "train"]
    return float(subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout) * 1e-9


def main(pairs: int) -> None:
    order = random.Random(0)
    without, differences = [], []
    with agent() as path:
        for _ in range(pairs):
            found = {probed: run(path, probed=probed) for probed in order.sample([False, True], 2)}
            without.append(found[False])
            differences.append(100 * (found[True] / found[False] - 1))
    half = T975[min(pairs - 1, len(T975)) - 1] * stdev(differences) / math.sqrt(pairs)
    row(f"a step, {pairs} runs without the probe", f"{1e3 * median(without):.2f} ms")
    row("  with the probe, mean of the pairs' differences", f"{mean(differences):+.2f} % (95 %: +-{half:.2f} %)")


if __name__ == "__main__":
    if sys.argv[1:] == ["train"]:
        train()
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else PAIRS)
