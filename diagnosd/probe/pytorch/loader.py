"""torch.utils.data.DataLoader: how long the step waited for a batch, how large it was, and how full the queue was."""

import functools
import itertools
import sys
import weakref
from typing import Any, Dict, Optional, Tuple

from diagnosd.probe.pytorch import patching
from diagnosd.probe.pytorch.cuda import FORWARD, Device
from diagnosd.probe.reporter import Reporter, clock, thread_id
from diagnosd.probe.steps import Queue, Steps

Asked = Optional[Tuple[int, int, bool]]
_INLINE = Queue(None, 0, 0)  # without workers the process that trains loads, and nothing is ready ahead


def patch(torch: Any, reporter: Reporter, device: Device) -> None:
    module: Any = sys.modules["torch.utils.data.dataloader"]
    loaders = _Loaders()
    make = functools.partial(_fetch, torch, reporter, device, loaders.fetching.get)
    patching.put(reporter, module._BaseDataLoaderIter, "__next__", make)
    patching.put(reporter, module.DataLoader, "__iter__", functools.partial(_start, reporter, loaders))


class _Loaders:
    """Loaders by number, the same in every epoch. An id comes again when its object is gone, a number never."""

    def __init__(self) -> None:
        self.fetching: Dict[int, int] = {}  # numbers by the id of an epoch's iterator
        self._numbers: Dict[int, int] = {}  # by the id of the loader
        self._count = itertools.count()

    def starts(self, loader: Any, batches: Any) -> None:
        _keep(self._numbers, loader, next(self._count))
        _keep(self.fetching, batches, self._numbers[id(loader)])


def _keep(table: Dict[int, Any], thing: Any, value: Any) -> None:
    """Under its id, as long as it lives."""
    if id(thing) not in table:
        table[id(thing)] = value
        weakref.finalize(thing, table.pop, id(thing), None).atexit = False


def _fetch(torch: Any, reporter: Reporter, device: Device, number: Any, original: Any) -> Any:
    note, tensor = reporter.notes.extend, torch.Tensor
    begins, ends = Steps.fetch_begins, Steps.fetch_ends  # one look-up less where each is cold

    def __next__(batches: Any) -> Any:  # noqa: N807
        if thread_id() != reporter.thread:
            return original(batches)
        t, asked = clock(), None
        try:
            asked = _ask(batches) if batches._num_workers else None
            note((begins, clock() - t if asked else 0, t, (number(id(batches), id(batches)),)))
        except Exception as error:
            reporter.fault("a loader of unknown shape", error)
            return original(batches)
        try:
            batch = original(batches)
        except BaseException:
            note((Steps.leave, 0, clock(), ()))
            raise
        t = clock()
        try:
            found: Tuple[Any, ...] = size(batch, tensor)
            if asked:
                found += (_queue(batches, asked),)
            elif not batches._num_workers:
                found += (_INLINE,)
            if device.active:
                device.passes(None, FORWARD)
            note((ends, clock() - t, t, found))
        except Exception as error:
            reporter.fault("a batch of unknown shape", error)
        return batch

    return __next__


def _start(reporter: Reporter, loaders: _Loaders, original: Any) -> Any:
    """Workers are started here: seconds, at each epoch, where they do not persist."""
    note = reporter.notes.extend

    def __iter__(loader: Any) -> Any:  # noqa: N807
        if thread_id() != reporter.thread:
            return original(loader)
        reporter.loader = "torch"
        note((Steps.loading_begins, 0, clock(), ()))
        try:
            batches = original(loader)
        finally:
            note((Steps.leave, 0, clock(), ()))
        try:
            loaders.starts(loader, batches)
            workers = tuple(worker.pid for worker in getattr(batches, "_workers", ()))
            _keep(reporter.workers, batches, workers)  # they end with it; later their pids may be a stranger's
        except Exception as error:
            reporter.fault("a loader's iterator of unknown shape", error)
        return batches

    return __iter__


def _ask(batches: Any) -> Asked:
    """Batches in the workers' queue, batches taken from it out of order, whether the next one is among the latter."""
    try:
        queued = batches._worker_result_queue.qsize()
        if batches._data_queue is not batches._worker_result_queue:  # a thread pins what the workers made
            queued += batches._data_queue.qsize()
    except NotImplementedError:  # macOS cannot tell the length of a queue
        return None
    held = batches._task_info
    return queued, sum(len(task) == 2 for task in held.values()), len(held.get(batches._rcvd_idx, ())) == 2


def _queue(batches: Any, asked: Tuple[int, int, bool]) -> Queue:
    """What was ready when the step asked, by what the fetch had to take from the queue until it found its batch.

    What is still in the queue is taken to be in order.
    """
    queued, held_before, was_held = asked
    held = batches._task_info
    taken = 0 if was_held else sum(len(task) == 2 for task in held.values()) - held_before + 1
    ready = 0
    if taken <= queued:
        ready = 1 + queued - taken
        following = batches._rcvd_idx
        while len(held.get(following, ())) == 2:
            following, ready = following + 1, ready + 1
    capacity = batches._prefetch_factor * batches._num_workers
    return Queue(min(ready, capacity), capacity, batches._num_workers)


def size(batch: Any, tensor: type, depth: int = 3) -> Tuple[int, int]:
    """Samples (the leading dimension of the first tensor) and tokens (of `input_ids`, padding included) of a batch."""
    if isinstance(batch, tensor):
        shape = batch.shape  # type: ignore[attr-defined]
        return (int(shape[0]), 0) if shape else (0, 0)
    if isinstance(batch, (list, tuple)):
        parts: Any = batch
    elif depth and hasattr(batch, "keys") and hasattr(batch, "values"):
        ids = batch["input_ids"] if "input_ids" in batch.keys() else None  # noqa: SIM118 - BatchEncoding
        if isinstance(ids, tensor) and len(ids.shape) == 2:  # type: ignore[attr-defined]
            return int(ids.shape[0]), int(ids.shape[0] * ids.shape[1])  # type: ignore[attr-defined]
        parts = batch.values()
    else:
        return 0, 0
    if depth:
        for part in parts:
            found = size(part, tensor, depth - 1)
            if found[0]:
                return found
    return 0, 0
