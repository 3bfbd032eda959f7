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

import os
import sys
from types import TracebackType
from typing import Any, Optional, Type

from diagnosd.probe.reporter import Reporter, clock, thread_id
from diagnosd.probe.steps import COMM, DATA_WAIT, NAMES, Steps, Sync

__all__ = ["live", "phase", "samples", "step", "tokens"]

_PHASES = {name: number for number, name in enumerate(NAMES) if name != "other"}
_reporter: Optional[Reporter] = None


def live() -> Reporter:
    """The reporter of this process, made when it is first asked for."""
    global _reporter
    if _reporter is None:
        _reporter = Reporter(os.environ)
    return _reporter


def samples(count: int) -> None:
    """Add to the samples that this step processes."""
    _note(Steps.add, clock(), count, 0)


def tokens(count: int) -> None:
    """Add to the tokens that this step processes."""
    _note(Steps.add, clock(), 0, count)


class step:  # noqa: N801 - reads as a statement: with probe.step():
    """One step of training. `number` is the framework's own where it has one; else steps are counted from 0."""

    def __init__(self, number: Optional[int] = None, *, samples: int = 0, tokens: int = 0) -> None:
        self._number, self._samples, self._tokens = number, samples, tokens

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
        self._phase, self._bytes, self._entered = _PHASES.get(name), bytes, 0
        if self._phase is None:
            _complain(name)
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


_complained = False


def _complain(name: str) -> None:
    global _complained
    if not _complained:
        _complained = True
        sys.stderr.write("diagnosd: %r is no phase; there are %s\n" % (name, ", ".join(_PHASES)))
