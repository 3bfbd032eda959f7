"""DistributedDataParallel: forward by its wrapper, and by its own logger what of a backward was communication.

The logger's figures are of the last iteration for which it was asked to take stock, which DDP does at the next forward.
It is asked right after the backward instead, so that the figures are the step's own and nothing has to be held back;
DDP asking again changes none of them. Its times are of the wall clock: `backward_compute_time_end` is when the last
gradient was ready, all buckets were issued and the host began to block; `backward_comm_time_end` when the last bucket
had come back.

On a CUDA device the logger reads device events and waits for them, and would stop the host from running ahead: there
its rate is left as it is.
"""

import functools
import sys
import time
import weakref
from collections import deque
from typing import Any, Deque, Dict, Optional, Tuple

from diagnosd.probe.pytorch import groups, patching
from diagnosd.probe.pytorch.cuda import FORWARD, Device
from diagnosd.probe.reporter import Reporter, clock, thread_id
from diagnosd.probe.steps import Steps, Sync

# Taking stock and reading it takes 60 to 100 us between two steps whose arithmetic has emptied the caches. So that it
# takes less than 0.2 % of the time, it is done for two iterations in a row of every so many, which all ranks count
# alike: from the end of one reduction to that of the next is what can be taken apart.
PERIODS = ((50_000_000, 1), (5_000_000, 20), (0, 200))  # a step of at least ns, iterations
PYTORCHS_RATE = 100
PENDING = 16  # modules, one for each forward since the last backward; some never have one


class _Model:
    """One DDP module, its iterations counted as its reducer does.

    PyTorch takes stock of every iteration whose number its rate divides: the number of the next one that is to be read
    is a rate that spares all before it.
    """

    def __init__(self, module: Any, group: str) -> None:
        self.module = weakref.ref(module)
        self.iteration = 0
        self.next = 0 if module.device_type == "cpu" else sys.maxsize  # iteration to be read
        self._read = (0, 0)  # iteration that was, and when
        self._group = group
        self._hook: Optional[_Hook] = None

    def leave(self) -> None:
        module = self.module()
        if module is not None and module.device_type == "cpu":
            module._set_ddp_runtime_logging_sample_rate(PYTORCHS_RATE)

    def reduction(self, module: Any, step_ns: int) -> Optional[Sync]:
        """How the gradients of the latest iteration were reduced, None where it was not timed."""
        if self._hook is not None:
            moved, issued, reduced = self._hook.take()
            return self._sync(moved, issued, reduced) if moved else None
        module._set_ddp_runtime_logging_sample_rate(1)  # whatever its number is: a forward may have escaped our count
        module.logger.set_runtime_stats_and_log()
        figures = module.logger._get_ddp_logging_data().ints_map
        self.iteration = figures["iteration"]
        self.next = following(self.iteration, step_ns or self._an_iteration())
        module._set_ddp_runtime_logging_sample_rate(self.next)
        if "backward_compute_time_end" not in figures:
            self._hook = _Hook.of(module)
            return None
        computed, reduced = figures["backward_compute_time_end"], figures["backward_comm_time_end"]
        return self._sync(figures["total_parameter_size_bytes"], computed, reduced)

    def _an_iteration(self) -> int:
        """What one took since the last that was read, in ns, while nobody knows what is usual; 0 where none was."""
        (iteration, then), self._read = self._read, (self.iteration, clock())
        return (self._read[1] - then) // max(1, self.iteration - iteration) if then else 0

    def _sync(self, moved: int, computed: int, reduced: int) -> Sync:
        """From times of the wall clock."""
        offset = time.time_ns() - clock()
        return Sync(moved, computed - offset, reduced - offset, self._group)


def following(iteration: int, step_ns: int) -> int:
    """The next iteration to be read after this one; where it is not known yet what a step takes, the very next."""
    period = next(period for least, period in PERIODS if step_ns >= least) if step_ns else 1
    number = iteration + 1
    return number if number % period < 2 else number + -number % period


class _Hook:
    """For a PyTorch whose logger has no start and end of communication: the buckets timed by a communication hook."""

    def __init__(self) -> None:
        self._issued = self._reduced = self._bytes = 0

    @classmethod
    def of(cls, module: Any) -> "Optional[_Hook]":
        """None where the script has a hook of its own: a module takes only one."""
        if "comm_hook" in module.logger._get_ddp_logging_data().strs_map:
            return None
        hook = cls()
        plain = lambda group, bucket: hook.average(group, bucket)  # noqa: E731, PLW0108 - DDP refuses our annotations
        module.register_comm_hook(module.process_group, plain)
        return hook

    def average(self, group: Any, bucket: Any) -> Any:
        """What DDP does without a hook: the mean over the group."""
        gradients = bucket.buffer().div_(group.size())
        self._issued = time.time_ns()
        self._bytes += gradients.numel() * gradients.element_size()
        return group.allreduce([gradients]).get_future().then(self._done)

    def _done(self, future: Any) -> Any:
        self._reduced = time.time_ns()
        return future.value()[0]

    def take(self) -> Tuple[int, int, int]:
        """Bytes, and wall clock in ns when the last bucket was issued and the last was back."""
        moved, self._bytes = self._bytes, 0
        return moved, self._issued, max(self._issued, self._reduced)


class Models:
    """The DDP modules whose forward ran since the last backward."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._functions = sys.modules.get("torch.distributed.distributed_c10d")
        self._known: Dict[int, _Model] = {}
        # Weak: the last forward of a run has no backward, and the model is the script's to free.
        self.pending: Deque["weakref.ref[Any]"] = deque(maxlen=PENDING)
        reporter.at_off.append(self._leave)

    def _leave(self) -> None:
        self.pending.clear()
        for model in list(self._known.values()):
            model.leave()

    def communication(self, began: int) -> Tuple[Optional[Sync], bool]:
        """The reduction that the backward since `began` ended with, and whether it was timed, if there was one."""
        largest: Optional[Sync] = None
        timed = True
        try:
            while self.pending:
                module = self.pending.popleft()()
                if module is None:
                    continue
                model = self._known.get(id(module))
                if model is None or model.module() is not module:
                    model = self._known[id(module)] = self._meet(module)
                model.iteration += 1
                sync = model.reduction(module, self._reporter.step_ns) if model.iteration >= model.next else None
                if sync is None or sync.enter < began:
                    timed = False
                elif largest is None or sync.bytes > largest.bytes:
                    largest = sync
        except Exception as error:
            self._reporter.fault("DDP's runtime logging", error)
        return largest if timed else None, timed

    def _meet(self, module: Any) -> _Model:
        self._known = {key: model for key, model in self._known.items() if model.module() is not None}
        return _Model(module, groups.name(self._functions, module.process_group))


def patch(torch: Any, reporter: Reporter, device: Device) -> Models:
    models = Models(reporter)
    if torch.distributed.is_available():
        module: Any = sys.modules["torch.nn.parallel.distributed"]
        make = functools.partial(_forward, torch, reporter, models, device)
        if not hasattr(module.DistributedDataParallel, "_set_ddp_runtime_logging_sample_rate"):
            raise AttributeError("DDP has no runtime logging")
        patching.put(reporter, module.DistributedDataParallel, "forward", make)
    return models


def _forward(torch: Any, reporter: Reporter, models: Models, device: Device, original: Any) -> Any:
    note, reduced = reporter.notes.extend, models.pending.append
    compiling, differentiates = patching.is_compiling(torch), torch.is_grad_enabled

    def forward(module: Any, *inputs: Any, **kwargs: Any) -> Any:
        if compiling() or thread_id() != reporter.thread or not module.training or not differentiates():
            return original(module, *inputs, **kwargs)
        note((Steps.forward_begins, 0, clock(), ()))
        if device.active:
            device.passes(None, FORWARD)
        if module.require_backward_grad_sync:  # not under no_sync()
            reduced(weakref.ref(module))
        try:
            return original(module, *inputs, **kwargs)
        finally:
            note((Steps.forward_ends, 0, clock(), ()))

    return forward
