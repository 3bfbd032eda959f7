"""What the probe costs a step: `python -m tests.benchmarks.probe`.

One process trains a small DDP model (gloo, a world of one) in steps of about 1 ms, in blocks of 500: without the probe,
with nothing but DDP's runtime logging read at every step, with the probe, and with a probe whose training thread sends
for itself. The blocks of a round follow one another, so that a slow minute of the machine meets all four. A second loop
takes 50 ms a step and shows what the probe counts as its own time.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer
from torch.utils.data import DataLoader

from diagnosd import probe
from diagnosd.probe import pytorch
from diagnosd.probe.reporter import OWN_SHARE

from .table import row

BLOCK = 500
BATCH = 96  # 1 ms on the machine that README names
ROUNDS = 15
LONG_STEPS = 90  # fewer than the 100 after which the probe judges and forgets


def receive(listener: socket.socket) -> None:
    """Another process, as the agent is one."""
    connection, _ = listener.accept()
    while connection.recv(8192):
        pass


class Job:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(nn.Sequential(*(nn.Linear(128, 128) for _ in range(4))))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        rows = torch.randn(BATCH * BLOCK, 128)
        self.loader = DataLoader([rows[i : i + BATCH] for i in range(0, len(rows), BATCH)], batch_size=None)  # type: ignore[arg-type]
        self.pause = 0.0

    def steps(self, after_backward: Callable[[], object] = bool, after_step: Callable[[], object] = bool) -> list[int]:
        """Durations in ns of a block of steps, each from the end of the one before."""
        durations, before = [], time.perf_counter_ns()
        for batch in self.loader:
            self.step(batch, after_backward)
            after_step()
            now = time.perf_counter_ns()
            durations.append(now - before)
            before = now
        return durations

    def step(self, batch: Tensor, after_backward: Callable[[], object]) -> None:
        if self.pause:
            time.sleep(self.pause)
        loss = self.model(batch).square().mean()
        loss.backward()
        after_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def read_log(self) -> None:
        self.model.logger.set_runtime_stats_and_log()  # type: ignore[union-attr]
        _ = self.model.logger._get_ddp_logging_data().ints_map  # type: ignore[union-attr]


@contextmanager
def probing() -> Iterator[None]:
    reporter = probe.live()
    reporter.own_share = None  # 1 ms is shorter than the probe accepts outside a benchmark
    pytorch.instrument(torch, {})
    try:
        yield
    finally:
        while reporter.at_off:
            reporter.at_off.pop()()
        for hooks in (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks):
            hooks.clear()  # what stays for good in a job whose probe is off


def send() -> None:
    probe.live().play()
    probe.live().sender.flush()


def blocks(job: Job) -> Iterator[tuple[str, list[int]]]:
    yield "without", job.steps()
    job.model._set_ddp_runtime_logging_sample_rate(1)
    yield "nothing but DDP's own logging", job.steps(job.read_log)
    job.model._set_ddp_runtime_logging_sample_rate(100)
    with probing():
        yield "the probe", job.steps()
    with probing():
        yield "the probe, whose training thread sends", job.steps(after_step=send)


def short_steps(job: Job) -> None:
    list(blocks(job))
    found: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name, durations in blocks(job):
            found.setdefault(name, []).append(median(durations) / 1e3)
    plain = found.pop("without")
    row(f"a step of a small DDP model, {ROUNDS} blocks of {BLOCK}", f"{median(plain):.0f} us")
    for name, medians in found.items():
        difference = sorted(one - other for one, other in zip(medians, plain, strict=True))
        low, high = difference[len(difference) // 4], difference[-len(difference) // 4]
        row(f"  with {name}", f"{median(difference):+.1f} us (middle half {low:+.1f} to {high:+.1f})")


def long_steps(job: Job) -> None:
    job.pause = 0.05  # from 50 ms on DDP takes stock of every step
    reporter = probe.live()
    for remembered in (reporter.costs, reporter._durations, reporter._timed):
        remembered.clear()
    reporter.step_ns = 0  # the short steps are forgotten: DDP's logging is read at every step again
    with probing():
        for batch in list(job.loader)[:LONG_STEPS]:
            job.step(batch, bool)
        reporter.play()
    costs = reporter.costs[5:]
    share = f"{median(costs) / 50e4:.3f} % (limit {100 * OWN_SHARE:.1f} %)"
    row("the training thread's own time in a step of 50 ms", f"{median(costs) / 1e3:.1f} us, {share}")


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "probe.sock")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(path)
        listener.listen()
        receiver = get_context("fork").Process(target=receive, args=(listener,), daemon=True)
        receiver.start()
        listener.close()
        os.environ.update(DIAGNOSD_SOCKET=path, DIAGNOSD_JOB="benchmark")
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        job = Job()
        short_steps(job)
        long_steps(job)
        row("messages of the probe dropped meanwhile", str(probe.live().sender.dropped))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
