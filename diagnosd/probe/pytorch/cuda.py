"""A model on a CUDA device: phases by events on its stream, because the host only enqueues them.

Not run on hardware: it was written on a machine without a GPU.

Events are recorded where the host passes from one phase to the next, never while a graph is captured, and only the
training thread asks, when an optimizer has been called, whether they are over. A step waits for its own while at most
HELD wait and for HELD_SECONDS; then it is told without device times. Between the last event of a step and the first of
the next the device had nothing of the job to do on that stream: `device_gap`.
"""

import functools
import threading
import time
from collections import deque
from typing import Any, Callable, Deque, Dict, List, NamedTuple, Optional, Tuple

from diagnosd.probe.pytorch import patching
from diagnosd.probe.reporter import Reporter, Told, clock, thread_id
from diagnosd.probe.steps import BLOCKED, Step, Steps

HELD = 4
HELD_SECONDS = 2.0
LEAST_COPY = 65536  # bytes: at 5 GB/s, a poor PCIe link, that is 13 us, and two events cost as much
FORWARD, BACKWARD, OPTIMIZER, H2D = "forward", "backward", "optimizer", "h2d"

Interval = Tuple[str, Any, Any]  # phase, event at its begin, event at its end


class _Held(NamedTuple):
    """A step that is over for the host. `before` is the last event of the step before it."""

    told: Told
    since: float
    before: Any
    intervals: List[Interval]


class Device:
    """Does nothing until a backward begins at a tensor on a device; the host's clock serves until then."""

    def __init__(self, torch: Any, reporter: Reporter) -> None:
        self.kind = ""  # "cpu", "cuda", ... once a backward has been seen
        self.active = True  # until it is known that there is nothing to do
        self._torch, self._reporter = torch, reporter
        self._held: Deque[_Held] = deque()
        self._telling = threading.Lock()  # never waited for: who finds it taken comes again
        self._open: Optional[Tuple[str, Any]] = None
        self._last: Any = None  # event

    def backward_begins(self, tensors: Any) -> None:
        """At these; the first time they tell on what the model runs."""
        if not self.kind:
            self._meet(tensors)
        self.passes(FORWARD, BACKWARD)

    def optimizer_ends(self) -> None:
        self.passes(OPTIMIZER, None)
        self.look()

    def _meet(self, tensors: Any) -> None:
        tensor = tensors[0] if isinstance(tensors, (list, tuple)) and tensors else tensors
        try:
            self.kind = tensor.device.type if isinstance(tensor, self._torch.Tensor) else "cpu"
        except Exception as error:
            self.kind = "cpu"
            self._reporter.fault("a device of unknown shape", error)
        self.active = self.kind == "cuda"
        if self.kind != "cpu":
            self._reporter.device = self.kind
        if self.active:
            self._reporter.tell, self._reporter.overdue = self._hold, self.give_up

    def passes(self, ended: Optional[str], begun: Optional[str]) -> None:
        """The host has enqueued all of one phase and begins another."""
        if self.kind != "cuda":
            return
        event = self.event()
        if event is not None and self._open is not None and self._open[0] == ended:
            self.interval(ended, self._open[1], event)
        self._open = (begun, event) if begun is not None and event is not None else None

    def event(self) -> Any:
        """One that the stream has yet to reach, None where a graph is captured."""
        try:
            if self._torch.cuda.is_current_stream_capturing():
                return None
            event = self._torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        except Exception as error:
            self._reporter.fault("CUDA events", error)
            return None

    def interval(self, phase: str, begin: Any, end: Any) -> None:
        self._reporter.notes.extend((Steps.mark, 0, clock(), ((phase, begin, end),)))

    def copied(self, begin: Any) -> None:
        """The host has waited for a copy to the device since `begin`, an event: it divides a forward that was open."""
        end = self.event()
        if begin is None or end is None:
            return
        if self._open is not None:
            self.interval(self._open[0], self._open[1], begin)
        self.interval(H2D, begin, end)
        self._open = (FORWARD, end)

    def look(self) -> None:
        """By the training thread: the steps that are over on the device too may be told."""
        if not self._telling.acquire(blocking=False):
            return
        try:
            while self._held:
                oldest = self._held[0]
                over = all(end.query() for _, _, end in oldest.intervals)
                if not over and len(self._held) <= HELD:
                    break
                self._reporter.points.append(functools.partial(oldest.told, _times(oldest) if over else {}))
                self._held.popleft()
        except Exception as error:
            self._reporter.fault("CUDA events", error)
        finally:
            self._telling.release()

    def give_up(self) -> None:
        """By the watching thread, or at exit: the steps of a host that hangs are told without device times."""
        if not self._telling.acquire(blocking=False):
            return
        while self._held and not (time.monotonic() - self._held[0].since < HELD_SECONDS and self._reporter.on):
            self._reporter.points.append(functools.partial(self._held.popleft().told, {}))
        self._telling.release()

    def _hold(self, told: Told, step: Step) -> None:
        """By the watching thread, when a step is over for the host."""
        self._held.append(_Held(told, time.monotonic(), self._last, step.marks))
        if step.marks:
            self._last = step.marks[-1][2]


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
        patching.put(reporter, torch.Tensor, name, functools.partial(_copy, reporter, device, compiling))


def _copy(reporter: Reporter, device: Device, compiling: Callable[[], bool], original: Any) -> Any:
    def copy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if compiling() or device.kind != "cuda" or tensor.is_cuda or thread_id() != reporter.thread:
            return original(tensor, *args, **kwargs)
        if kwargs.get("non_blocking") or tensor.numel() * tensor.element_size() < LEAST_COPY:
            return original(tensor, *args, **kwargs)
        begin = device.event()
        result = original(tensor, *args, **kwargs)
        if result.is_cuda:
            device.copied(begin)
        return result

    return copy


def _synchronize(reporter: Reporter, original: Any) -> Any:
    note = reporter.notes.extend

    def synchronize(*args: Any, **kwargs: Any) -> Any:
        if thread_id() != reporter.thread:
            return original(*args, **kwargs)
        note((Steps.enter, 0, clock(), (BLOCKED,)))
        try:
            return original(*args, **kwargs)
        finally:
            note((Steps.leave, 0, clock(), ()))

    return synchronize
