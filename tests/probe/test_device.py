"""Phases by events on a device's stream. The stream is a stand-in: events that know when they were recorded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from diagnosd.probe.pytorch import cuda
from diagnosd.probe.pytorch.cuda import BACKWARD, FORWARD, H2D, Device
from diagnosd.probe.reporter import Reporter, thread_id


class Stream:
    """Whose time goes on by `now`; what was recorded is over once `reached` passes it."""

    def __init__(self) -> None:
        self.now, self.reached = 0.0, float("inf")
        self.cuda = SimpleNamespace(Event=self.event, is_current_stream_capturing=lambda: False)

    def event(self, *, enable_timing: bool) -> SimpleNamespace:
        made = SimpleNamespace(at=0.0)
        made.record = lambda: setattr(made, "at", self.now)
        made.query = lambda: made.at <= self.reached
        made.elapsed_time = lambda later: later.at - made.at
        return made


@pytest.fixture
def stream() -> Stream:
    return Stream()


@pytest.fixture
def device(stream: Stream) -> Device:
    reporter = Reporter({}, lambda _: None)
    reporter.thread = thread_id()
    made = Device(stream, reporter)
    made.kind = "cuda"
    return made


def intervals(device: Device) -> list[tuple[str, float, float]]:
    notes = device._reporter.notes
    marks = [notes[at] for at in range(3, len(notes), 4)]
    return [(phase, begin.at, end.at) for ((phase, begin, end),) in marks]


def copy(device: Device, stream: Stream, seconds: float, *, lands_on_device: bool) -> None:
    def original(tensor: Any) -> Any:
        stream.now += seconds
        return SimpleNamespace(is_cuda=lands_on_device)

    tensor = SimpleNamespace(is_cuda=False, numel=lambda: 1 << 20, element_size=lambda: 4)
    cuda._copy(device._reporter, device, lambda: False, original)(tensor)


def test_a_copy_in_the_middle_of_a_forward_divides_it(device: Device, stream: Stream) -> None:
    device.passes(None, FORWARD)
    stream.now = 3.0
    copy(device, stream, 2.0, lands_on_device=True)
    stream.now = 9.0
    device.passes(FORWARD, BACKWARD)
    assert intervals(device) == [(FORWARD, 0.0, 3.0), (H2D, 3.0, 5.0), (FORWARD, 5.0, 9.0)]


def test_a_copy_that_stays_on_the_host_leaves_the_forward_as_it_is(device: Device, stream: Stream) -> None:
    device.passes(None, FORWARD)
    copy(device, stream, 2.0, lands_on_device=False)
    stream.now = 9.0
    device.passes(FORWARD, BACKWARD)
    assert intervals(device) == [(FORWARD, 0.0, 9.0)]


def test_a_step_is_told_with_device_times_once_every_event_of_it_is_over(device: Device, stream: Stream) -> None:
    device.passes(None, FORWARD)
    stream.now = 4000.0  # ms
    device.passes(FORWARD, BACKWARD)
    told: list[Any] = []
    ((phase, begin, end),) = (device._reporter.notes[3],)[0]
    device._hold(told.append, SimpleNamespace(marks=[(phase, begin, end)]))  # type: ignore[arg-type]
    stream.reached = 1000.0
    device.look()
    waiting = len(device._reporter.points)
    stream.reached = 5000.0
    device.look()
    (tell,) = device._reporter.points
    tell()
    assert (waiting, told) == (0, [{FORWARD: 4.0, "device": 4.0}])
