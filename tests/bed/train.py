"""An ordinary training script: DDP over gloo, a DataLoader with a worker, SGD, checkpoints, evaluation.

It knows nothing of diagnosd. What makes it fit for the bed is `--control`, a folder: files that appear there make its
storage slow (`load_seconds`, `load_seconds.RANK`: the least time a batch takes to load; `save_seconds`: what the first
write of a checkpoint waits), change its batch size (`batch`), or end it (`stop`). Who runs it says when.
"""

from __future__ import annotations

import argparse
import gc
import io
import itertools
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# Four layers have 16.8 MB of gradients: 150 ms of a link of 1 Gbit/s, so that the fabric is what a step waits for.
WIDTH = 1024
BUCKET_MB = 4
AGREE_EVERY = 5  # steps between two looks at whether to stop


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network with DDP.")
    parser.add_argument("--control", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="folder of files, one read for each batch past the page cache")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--checkpoint-every", type=int, default=0)
    parser.add_argument("--eval-every", type=int, default=0)
    parser.add_argument("--gc-every", type=int, default=0)
    return parser.parse_args()


def number(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (FileNotFoundError, ValueError):  # absent, or caught between its creation and its content
        return None


class Samples(Dataset[Tensor]):
    """Random rows. The time a batch takes is that of its file, or what the control folder asks for."""

    def __init__(self, control: Path, data: Path | None, rank: int) -> None:
        self.rows = torch.randn(1024, WIDTH)
        self.files = sorted(data.iterdir()) if data else []
        self.delays = (control / "load_seconds", control / f"load_seconds.{rank}")

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        started = time.monotonic()
        if self.files:
            read_direct(self.files[indices[0] // len(indices) % len(self.files)])
        for path in self.delays:
            if (seconds := number(path)) is not None:
                time.sleep(max(0.0, started + seconds - time.monotonic()))
        return [self.rows[i % len(self.rows)] for i in indices]


def read_direct(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        buffer = mmap.mmap(-1, 1 << 20)
        while os.readv(file, [buffer]):
            pass
    finally:
        os.close(file)


class Batches(Sampler[list[int]]):
    """Runs of indices without end, as long as the control folder's batch size says."""

    def __init__(self, size: int, control: Path) -> None:
        self.size, self.control = size, control

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        while True:
            size = int(number(self.control / "batch") or self.size)
            yield list(range(start, start + size))
            start += size


class Store(io.FileIO):
    """A file on storage that may be slow."""

    wait: float | None = None

    def write(self, block: ReadableBuffer) -> int:
        if self.wait:
            time.sleep(self.wait)
            self.wait = None
        return super().write(block)


def save(model: nn.Module, path: Path, control: Path) -> None:
    with Store(path, "wb") as file:
        file.wait = number(control / "save_seconds")
        torch.save(model.state_dict(), file)
        os.fsync(file.fileno())


def evaluate(model: DistributedDataParallel, validation: DataLoader[Tensor]) -> float:
    """Mean loss over the validation set, each rank on its own."""
    model.eval()
    with torch.no_grad():
        losses = [float((model.module(batch) ** 2).mean()) for batch in validation]
    model.train()
    return sum(losses) / len(losses)


def stop_agreed(loss: Tensor, control: Path) -> bool:
    """The mean loss of all ranks, and whether any was told to stop: all of them leave after the same step."""
    told = torch.tensor([float(loss), float((control / "stop").exists())])
    dist.all_reduce(told)
    return bool(told[1] > 0)


def train(args: argparse.Namespace) -> None:
    rank = dist.get_rank()
    layers = [layer for _ in range(args.layers) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=BUCKET_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    samples = Samples(args.control, args.data, rank)
    loader = DataLoader(samples, batch_sampler=Batches(args.batch, args.control), num_workers=args.workers)
    validation: DataLoader[Tensor] = DataLoader(list(samples.rows), batch_size=128)  # type: ignore[arg-type]
    batches = iter(loader)
    for step in itertools.count():
        began = time.monotonic()
        batch = next(batches)
        fetched = time.monotonic()
        loss = (model(batch) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if args.checkpoint_every and step % args.checkpoint_every == 0 and rank == 0:
            save(model, args.out / "checkpoint.pt", args.control)
        if args.eval_every and (step + 1) % args.eval_every == 0:
            evaluate(model, validation)
        if args.gc_every and (step + 7 * rank) % args.gc_every == 0:
            gc.collect()
        leave = step % AGREE_EVERY == 0 and stop_agreed(loss.detach(), args.control)
        ended = time.monotonic()
        took, data = ended - began, fetched - began
        print(f"step {step} at {time.time():.3f} took {took:.4f} data {data:.4f} loss {float(loss):.4f}", flush=True)
        if leave:
            break
    dist.barrier()  # without it one run in eight of gloo ends in SIGABRT when the group is taken down


def main() -> None:
    args = arguments()
    dist.init_process_group("gloo")
    train(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
