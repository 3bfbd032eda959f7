"""What a training process loads, and the API for loops that diagnosd does not see into.

    from diagnosd import probe

    for batch in batches:
        with probe.step(samples=len(batch)):
            with probe.phase("forward"):
                ...

A step lasts from the end of the previous one, so what happens between two `with` blocks belongs to the later one. The
phases are data_wait, h2d, forward, backward, optimizer, comm, checkpoint, eval and blocked; a phase inside another
takes its time out of it. Nothing here blocks or raises, with or without an agent, and DIAGNOSD=off makes it do nothing.

Standard library only, Python 3.8 and later.
"""

import operator
import os
import threading
from types import TracebackType
from typing import Any, Optional, Set, Type

from diagnosd.probe.reporter import Reporter, clock, say, thread_id
from diagnosd.probe.steps import COMM, DATA_WAIT, NAMES, Steps, Sync

__all__ = ["live", "phase", "samples", "step", "tokens"]

_PHASES = {name: number for number, name in enumerate(NAMES) if name != "other"}
_MOST = 2**53  # a count that any reader of JSON takes exactly
_reporter: Optional[Reporter] = None


def live() -> Reporter:
    """The reporter of this process, made when it is first asked for."""
    global _reporter
    if _reporter is None:
        _reporter = Reporter(os.environ, _look_on)
    return _reporter


def _look_on(reporter: Reporter) -> None:
    from diagnosd.probe.watch import Watch  # and with it ctypes: not in each process that only imports torch

    watch = Watch(reporter, main=threading.get_native_id())
    watch.start()
    reporter.at_exit.append(watch.end)


def samples(count: int) -> None:
    """Add to the samples that this step processes."""
    _note(Steps.add, clock(), _count("samples", count), 0)


def tokens(count: int) -> None:
    """Add to the tokens that this step processes."""
    _note(Steps.add, clock(), 0, _count("tokens", count))


class step:  # noqa: N801 - reads as a statement: with probe.step():
    """One step of training. `number` is the framework's own where it has one; else steps are counted from 0."""

    def __init__(self, number: Optional[int] = None, *, samples: int = 0, tokens: int = 0) -> None:
        self._number = None if number is None else _count("number", number, None)
        self._samples, self._tokens = _count("samples", samples), _count("tokens", tokens)

    def __enter__(self) -> None:
        own = live()
        try:
            if own.trains():
                _note(Steps.step_begins, clock(), self._number)
        except Exception as error:
            own.fault("probe.step", error)

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        t = clock()
        _note(Steps.add, t, self._samples, self._tokens)
        _note(Steps.step_ends, t)


class phase:  # noqa: N801
    """A phase of the step. `bytes` is what a collective moves: the largest of a step is compared between ranks."""

    def __init__(self, name: str, *, bytes: int = 0) -> None:  # noqa: A002
        self._phase = _PHASES.get(name) if isinstance(name, str) else None
        self._bytes, self._entered = _count("bytes", bytes) or 0, 0
        if self._phase is None:
            _complain("phase", "%.60r is no phase; there are %s" % (name, ", ".join(_PHASES)))
        elif self._phase == DATA_WAIT:
            live().loader = "api"

    def __enter__(self) -> None:
        if self._phase is not None:
            self._entered = clock()
            _note(Steps.enter, self._entered, self._phase)

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        t = clock()
        if self._phase == COMM:
            _note(Steps.collective_ends, t, Sync(self._bytes, self._entered, t, "world:0"))
        elif self._phase is not None:
            _note(Steps.leave, t)


def _note(method: Any, t: int, *arguments: Any) -> None:
    own = live()
    if own.thread == thread_id():
        own.notes.extend((method, 0, t, arguments))


def _count(name: str, value: Any, otherwise: Optional[int] = 0) -> Any:
    """A plain integer, of numpy too; `otherwise` for what is none, or is on a device: to ask would be to wait."""
    if type(value) is int and 0 <= value < _MOST:
        return value
    try:
        if getattr(value, "device", "cpu") in ("cpu", None) or value.device.type == "cpu":
            count = int(operator.index(value))
            if 0 <= count < _MOST:
                return count
    except Exception:
        pass
    _complain(name, "%s is a %s; an integer from 0 is wanted, on the host" % (name, type(value).__name__))
    return otherwise


_complained: Set[str] = set()


def _complain(name: str, text: str) -> None:
    if name not in _complained:
        _complained.add(name)
        say(text)
