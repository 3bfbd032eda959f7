"""A model on a CUDA device: phases by events on its stream, because the host only enqueues them.

Not run on hardware: it was written on a machine without a GPU.

Events are recorded where the host passes from one phase to the next, never while a graph is captured, and only the
training thread asks, at the end of a later step, whether they are over. A step waits for its own at most HELD steps or
HELD_SECONDS; then it is told without device times. Between the last event of a step and the first of the next the
device had nothing of the job to do on that stream: `device_gap`.
"""

import functools
import time
from collections import deque
from typing import Any, Callable, Deque, Dict, List, NamedTuple, Optional, Tuple

from diagnosd.probe.pytorch import patching
from diagnosd.probe.reporter import Deliverable, Reporter, clock
from diagnosd.probe.steps import BLOCKED

HELD = 4
HELD_SECONDS = 2.0
LEAST_COPY = 65536  # bytes: at 5 GB/s, a poor PCIe link, that is 13 us, and two events cost as much
FORWARD, BACKWARD, OPTIMIZER, H2D = "forward", "backward", "optimizer", "h2d"

Interval = Tuple[str, Any, Any]  # phase, event at its begin, event at its end


class _Held(NamedTuple):
    """A step that is over for the host. `before` is the last event of the step before it."""

    deliverable: Deliverable
    since: float
    before: Any
    intervals: List[Interval]


class Device:
    """Does nothing until a backward begins at a tensor on a device; the host's clock serves until then."""

    def __init__(self, torch: Any, reporter: Reporter) -> None:
        self.active = False
        self._torch, self._reporter = torch, reporter
        self._held: Deque[_Held] = deque()
        self._open: Optional[Tuple[str, Any]] = None
        self._intervals: List[Interval] = []
        self._last: Any = None  # event

    def seen(self, tensors: Any) -> None:
        """What a backward begins at."""
        tensor = tensors[0] if isinstance(tensors, (list, tuple)) and tensors else tensors
        kind = tensor.device.type if isinstance(tensor, self._torch.Tensor) else "cpu"
        if kind == "cpu" or self._reporter.device:
            return
        self._reporter.device = kind
        if kind == "cuda":
            self.active = True
            self._reporter.deliver, self._reporter.overdue = self._hold, self._give_up_waiting

    def passes(self, ended: Optional[str], begun: Optional[str]) -> None:
        """The host has enqueued all of one phase and begins another."""
        if not self.active or self._torch.cuda.is_current_stream_capturing():
            self._open = None
            return
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        if self._open is not None and self._open[0] == ended:
            self._intervals.append((ended, self._open[1], event))
        self._open = (begun, event) if begun is not None else None

    def copied(self, began: Any) -> None:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        self._intervals.append((H2D, began, event))

    def _hold(self, deliverable: Deliverable) -> None:
        """By the training thread, at the end of a step."""
        intervals, self._intervals = self._intervals, []
        self._held.append(_Held(deliverable, time.monotonic(), self._last, intervals))
        if intervals:
            self._last = intervals[-1][2]
        while self._held:
            oldest = self._held[0]
            over = not oldest.intervals or oldest.intervals[-1][2].query()
            if not over and len(self._held) <= HELD:
                break
            self._deliver(_times(oldest) if over else {})

    def _give_up_waiting(self) -> None:
        """By the watching thread: the host hangs, or the job has ended."""
        while self._held and time.monotonic() - self._held[0].since > HELD_SECONDS:
            self._deliver({})

    def _deliver(self, times: Dict[str, float]) -> None:
        try:
            held = self._held.popleft()
        except IndexError:  # the other thread was faster
            return
        self._reporter.sender.send(functools.partial(held.deliverable, times))


def _times(held: _Held) -> Dict[str, float]:
    """Seconds, by the device's clock."""
    times: Dict[str, float] = {}
    for phase, begin, end in held.intervals:
        times[phase] = times.get(phase, 0.0) + begin.elapsed_time(end) * 1e-3
    if held.intervals:
        first, last = held.intervals[0][1], held.intervals[-1][2]
        times["device"] = first.elapsed_time(last) * 1e-3
        if held.before is not None:
            times["device_gap"] = max(0.0, held.before.elapsed_time(first) * 1e-3)
    return times


def patch(torch: Any, reporter: Reporter) -> Device:
    device = Device(torch, reporter)
    if torch.version.cuda is not None or getattr(torch.version, "hip", None) is not None:
        patch_copies(torch, reporter, device)
        patching.put(reporter, torch.cuda, "synchronize", functools.partial(_synchronize, reporter))
    return device


def patch_copies(torch: Any, reporter: Reporter, device: Device) -> None:
    """Copies from pageable memory: the host waits for them. Those that need not wait say non_blocking."""
    compiling = patching.is_compiling(torch)
    for name in ("to", "cuda"):
        patching.put(reporter, torch.Tensor, name, functools.partial(_copy, torch, reporter, device, compiling))


def _copy(torch: Any, reporter: Reporter, device: Device, compiling: Callable[[], bool], original: Any) -> Any:
    def copy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if compiling() or not device.active or tensor.is_cuda or kwargs.get("non_blocking") or not reporter.accounts():
            return original(tensor, *args, **kwargs)
        if tensor.numel() * tensor.element_size() < LEAST_COPY or torch.cuda.is_current_stream_capturing():
            return original(tensor, *args, **kwargs)
        began = torch.cuda.Event(enable_timing=True)
        began.record()
        result = original(tensor, *args, **kwargs)
        if result.is_cuda:
            device.copied(began)
        return result

    return copy


def _synchronize(reporter: Reporter, original: Any) -> Any:
    def synchronize(*args: Any, **kwargs: Any) -> Any:
        if not reporter.accounts():
            return original(*args, **kwargs)
        reporter.steps.enter(BLOCKED, clock())
        try:
            return original(*args, **kwargs)
        finally:
            if reporter.on:
                reporter.steps.leave(clock())

    return synchronize
