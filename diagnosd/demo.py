"""A job to watch: two ranks of the standard library whose loader falls behind after a third of the time.

    diagnosd run -- python -m diagnosd.demo

Each rank takes batches from a loader thread with a prefetch queue, works on them, and meets the other at a barrier, as
data-parallel training does. The loader first answers faster than a step takes; then its storage answers slowly (a
sleep stands for it), the queue runs empty, and the step waits. Ctrl-C ends it.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from multiprocessing.synchronize import Barrier

from diagnosd import probe

RANKS = 2
STEPS = 150
SLOW_FROM = 80  # enough steps before it that the job has a past to be compared with
COMPUTE_S = 0.08
FETCH_S = 0.04
SLOW_FETCH_S = 0.19
PREFETCH = 2
BATCH, BATCH_BYTES = 16, 1 << 16


def load(batches: queue.Queue[bytes]) -> None:
    """The slow storage serves every rank at the same pace: one that comes late for a batch need not wait as long."""
    for _ in range(SLOW_FROM):
        time.sleep(FETCH_S)
        batches.put(os.urandom(BATCH_BYTES))
    slow_since = time.monotonic()
    for number in range(1, STEPS - SLOW_FROM + 1):
        time.sleep(max(0.0, slow_since + number * SLOW_FETCH_S - time.monotonic()))
        batches.put(os.urandom(BATCH_BYTES))


def compute(batch: bytes, until: float) -> None:
    while time.perf_counter() < until:
        hashlib.sha256(batch).digest()


def train(rank: int, barrier: Barrier) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches every process: one that tidies up is enough
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    batches: queue.Queue[bytes] = queue.Queue(maxsize=PREFETCH)
    threading.Thread(target=load, args=(batches,), daemon=True).start()
    for _ in range(STEPS):
        with probe.step(samples=BATCH):
            with probe.phase("data_wait"):
                batch = batches.get()
            with probe.phase("forward"):
                compute(batch, time.perf_counter() + COMPUTE_S)
            with probe.phase("comm"):
                barrier.wait()


def main() -> int:
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(RANKS)
    ranks = [spawn.Process(target=train, args=(rank, barrier)) for rank in range(RANKS)]
    try:
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return max(abs(rank.exitcode or 0) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
