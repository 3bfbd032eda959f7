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
from typing import Any, Dict, List, Optional, Tuple

from diagnosd.probe.pytorch import groups, patching
from diagnosd.probe.pytorch.cuda import FORWARD, Device
from diagnosd.probe.reporter import Reporter, clock
from diagnosd.probe.steps import Sync

# Reading the logger takes some 15 us between two steps, and its own stock-taking 6. On steps below 5 ms that is more
# than the probe may take, so only every tenth or hundredth iteration is read; all ranks count them alike.
RATES = ((5_000_000, 1), (500_000, 10), (0, 100))  # step of at least ns, iterations
FIRST_ITERATIONS = 10  # that PyTorch takes stock of at any rate

Communication = Tuple[int, Optional[Sync], bool]  # exposed ns, the reduction, whether the former is known


class _Model:
    """One DDP module, its iterations counted as its reducer does."""

    def __init__(self, module: Any) -> None:
        self.module = weakref.ref(module)
        self.host = module.device_type == "cpu"
        self.iteration = 0
        self._rate = 0
        self._group = groups.name(sys.modules["torch.distributed.distributed_c10d"], module.process_group)
        self._hook: Optional[_Hook] = None

    def reduction(self, step_ns: int) -> Optional[Sync]:
        """How the gradients of the latest iteration were reduced, None where it was not timed."""
        module = self.module()
        if module is None:
            return None
        if self._hook is not None:
            return self._hook.reduction(self._group)
        rate = next(rate for least, rate in RATES if step_ns >= least) if step_ns else 1
        if rate != self._rate:
            self._rate = rate
            module._set_ddp_runtime_logging_sample_rate(rate)
        if self.iteration > FIRST_ITERATIONS and self.iteration % rate:
            return None
        module.logger.set_runtime_stats_and_log()
        figures = module.logger._get_ddp_logging_data().ints_map
        self.iteration = figures["iteration"]
        if "backward_compute_time_end" not in figures:
            self._hook = _Hook.of(module)
            return None
        computed, reduced = figures["backward_compute_time_end"], figures["backward_comm_time_end"]
        return Sync(figures["total_parameter_size_bytes"], computed, reduced, self._group)


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
        module.register_comm_hook(module.process_group, hook.average)
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

    def reduction(self, group: str) -> Optional[Sync]:
        moved, self._bytes = self._bytes, 0
        return Sync(moved, self._issued, max(self._issued, self._reduced), group) if moved else None


class Models:
    """The DDP modules whose forward ran since the last backward."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._known: Dict[int, _Model] = {}
        self._pending: List[_Model] = []

    def forward(self, module: Any) -> None:
        """A forward whose backward will reduce gradients. Those under no_sync() reduce nothing."""
        model = self._known.get(id(module))
        if model is None or model.module() is not module:
            model = self._known[id(module)] = _Model(module)
        model.iteration += 1
        if model not in self._pending:
            self._pending.append(model)

    def communication(self, began: int, ended: int) -> Communication:
        """Of the backward between `began` and `ended`: how long the host waited in it for the others."""
        pending, self._pending = self._pending, []
        exposed, largest = 0, None
        for model in pending:
            sync = model.reduction(self._reporter.step_ns) if model.host else None
            wall = self._reporter.wall(ended)
            if sync is None or sync.enter < wall - (ended - began):
                return 0, None, False
            exposed = max(exposed, wall - sync.enter)
            largest = sync if largest is None or sync.bytes > largest.bytes else largest
        return exposed, largest, True


def patch(torch: Any, reporter: Reporter, device: Device) -> Models:
    models = Models(reporter)
    if torch.distributed.is_available():
        module: Any = sys.modules["torch.nn.parallel.distributed"]
        compiling = patching.is_compiling(torch)
        make = functools.partial(_forward, torch, reporter, models, device, compiling)
        patching.put(reporter, module.DistributedDataParallel, "forward", make)
    return models


def _forward(torch: Any, reporter: Reporter, models: Models, device: Device, compiling: Any, original: Any) -> Any:
    def forward(module: Any, *inputs: Any, **kwargs: Any) -> Any:
        if compiling() or not reporter.accounts() or not module.training or not torch.is_grad_enabled():
            return original(module, *inputs, **kwargs)
        t = clock()
        device.passes(None, FORWARD)
        reporter.steps.rooted = True
        reporter.steps.forward_begins(t)
        reporter.cost += clock() - t
        try:
            return original(module, *inputs, **kwargs)
        finally:
            _forward_ends(reporter, models, module)

    return forward


def _forward_ends(reporter: Reporter, models: Models, module: Any) -> None:
    if not reporter.on:
        return
    t = clock()
    try:
        reporter.steps.forward_ends(t)
        if module.require_backward_grad_sync:
            models.forward(module)
        reporter.cost += clock() - t
    except Exception as error:
        reporter.fault("DDP", error)
