"""torch.utils.data.DataLoader: how long the step waited for a batch, how large it was, and how full the queue was."""

import functools
import sys
from typing import Any, Optional, Tuple

from diagnosd.probe.pytorch import patching
from diagnosd.probe.pytorch.cuda import FORWARD, Device
from diagnosd.probe.reporter import Reporter, clock
from diagnosd.probe.steps import Queue


def patch(torch: Any, reporter: Reporter, device: Device) -> None:
    module: Any = sys.modules["torch.utils.data.dataloader"]
    patching.put(reporter, module._BaseDataLoaderIter, "__next__", functools.partial(_fetch, torch, reporter, device))
    patching.put(reporter, module.DataLoader, "__iter__", functools.partial(_begin, reporter))


def _fetch(torch: Any, reporter: Reporter, device: Device, original: Any) -> Any:
    tensor = torch.Tensor

    def __next__(batches: Any) -> Any:  # noqa: N807
        if not reporter.accounts() or torch.utils.data.get_worker_info() is not None:
            return original(batches)
        asked = _asks(reporter, batches)
        try:
            batch = original(batches)
        except BaseException:
            _got(reporter, batches, (0, 0), None)
            raise
        _got(reporter, batches, size(batch, tensor), asked)
        device.passes(None, FORWARD)
        return batch

    return __next__


def _begin(reporter: Reporter, original: Any) -> Any:
    """Workers are started here: seconds, at each epoch, where they do not persist."""

    def __iter__(loader: Any) -> Any:  # noqa: N807
        if not reporter.accounts():
            return original(loader)
        reporter.steps.loading_begins(clock())
        try:
            return original(loader)
        finally:
            if reporter.on:
                reporter.steps.leave(clock())

    return __iter__


def _asks(reporter: Reporter, batches: Any) -> Optional[Tuple[int, int, bool]]:
    t = clock()
    try:
        loader = id(batches._index_sampler)  # one a loader, for all its epochs
        reporter.steps.fetch_begins(t, loader)
        if reporter.loader != "torch":
            reporter.loader = "torch"
        asked = None
        if batches._num_workers:
            reporter.workers[loader] = tuple(worker.pid for worker in batches._workers)
            asked = _waiting(batches)
        reporter.cost += clock() - t
        return asked
    except Exception as error:
        reporter.fault("fetch", error)
        return None


def _got(reporter: Reporter, batches: Any, count: Tuple[int, int], asked: Optional[Tuple[int, int, bool]]) -> None:
    if not reporter.on:
        return
    t = clock()
    try:
        reporter.steps.fetch_ends(t, count[0], count[1], _queue(batches, asked) if asked else None)
        reporter.cost += clock() - t
    except Exception as error:
        reporter.fault("fetch", error)


def _waiting(batches: Any) -> Tuple[int, int, bool]:
    """Batches in the workers' queue, batches taken from it out of order, whether the next one is among the latter."""
    queued = batches._worker_result_queue.qsize()  # macOS cannot say: NotImplementedError
    if batches._data_queue is not batches._worker_result_queue:  # a thread pins what the workers made
        queued += batches._data_queue.qsize()
    held = batches._task_info
    return queued, sum(len(task) == 2 for task in held.values()), len(held.get(batches._rcvd_idx, ())) == 2


def _queue(batches: Any, asked: Tuple[int, int, bool]) -> Queue:
    """What was ready when the step asked, told apart by what the fetch had to take from the queue to find its batch.

    Batches still in the queue are taken to be in order.
    """
    queued, held_before, was_held = asked
    held = batches._task_info
    taken = 0 if was_held else sum(len(task) == 2 for task in held.values()) - held_before + 1
    ready = 0
    if taken <= queued:
        ready = 1 + queued - taken
        while len(held.get(batches._rcvd_idx + ready - 1 - (queued - taken), ())) == 2:
            ready += 1
    capacity = batches._prefetch_factor * batches._num_workers
    return Queue(min(ready, capacity), capacity, batches._num_workers)


def size(batch: Any, tensor: type, depth: int = 3) -> Tuple[int, int]:
    """Samples (the leading dimension of the first tensor) and tokens (of `input_ids`, padding included) of a batch."""
    if isinstance(batch, tensor):
        shape = batch.shape  # type: ignore[attr-defined]
        return (int(shape[0]), 0) if shape else (0, 0)
    if not depth:
        return 0, 0
    if hasattr(batch, "keys"):
        ids = batch["input_ids"] if "input_ids" in batch.keys() else None  # noqa: SIM118 - BatchEncoding
        if isinstance(ids, tensor) and len(ids.shape) == 2:  # type: ignore[attr-defined]
            return int(ids.shape[0]), int(ids.shape[0] * ids.shape[1])  # type: ignore[attr-defined]
        parts = batch.values()
    elif isinstance(batch, (list, tuple)):
        parts = batch
    else:
        return 0, 0
    sizes = (size(part, tensor, depth - 1) for part in parts)
    return next((found for found in sizes if found[0]), (0, 0))
