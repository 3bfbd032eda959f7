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
from typing import Optional, Type

from diagnosd.probe.reporter import Reporter, clock
from diagnosd.probe.steps import COMM, NAMES, Sync

__all__ = ["live", "phase", "samples", "step", "tokens"]

_PHASES = {name: number for number, name in enumerate(NAMES) if name != "other"}
_reporter: Optional[Reporter] = None


def live() -> Reporter:
    """The one of this process, made when it is first asked for."""
    global _reporter
    if _reporter is None:
        _reporter = Reporter(os.environ)
    return _reporter


def samples(count: int) -> None:
    """Add to the samples that this step processes."""
    _add(samples=count)


def tokens(count: int) -> None:
    """Add to the tokens that this step processes."""
    _add(tokens=count)


class step:  # noqa: N801 - reads as a statement: with probe.step():
    """One step of training. `number` is the framework's own where it has one; else steps are counted from 0."""

    def __init__(self, number: Optional[int] = None, *, samples: int = 0, tokens: int = 0) -> None:
        self._number, self._samples, self._tokens = number, samples, tokens

    def __enter__(self) -> None:
        own = live()
        try:
            if own.trains():
                t = clock()
                own.register()
                own.steps.step_begins(t, self._number)
                own.cost += clock() - t
        except Exception as error:
            own.fault("probe.step", error)

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        own = live()
        try:
            if own.trains():
                t = clock()
                _add(self._samples, self._tokens)
                own.steps.step_ends(t)
                own.cost += clock() - t
        except Exception as fault:
            own.fault("probe.step", fault)


class phase:  # noqa: N801
    """A phase of the step. `bytes` is what a collective moves: the largest of a step is compared between ranks."""

    def __init__(self, name: str, *, bytes: int = 0) -> None:  # noqa: A002
        self._phase, self._bytes = _PHASES.get(name), bytes
        self._entered = 0
        if self._phase is None:
            _complain(name)

    def __enter__(self) -> None:
        own = live()
        try:
            if self._phase is not None and own.accounts():
                self._entered = clock()
                if self._phase == _PHASES["data_wait"]:
                    own.loader = "api"
                own.steps.enter(self._phase, self._entered)
                own.cost += clock() - self._entered
        except Exception as error:
            own.fault("probe.phase", error)

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        own = live()
        try:
            if self._entered and own.accounts():
                t = clock()
                own.steps.leave(t)
                if self._phase == COMM:
                    wall = own.wall(t)
                    own.steps.synced(Sync(self._bytes, wall - (t - self._entered), wall, "world:0"))
                own.cost += clock() - t
        except Exception as fault:
            own.fault("probe.phase", fault)


def _add(samples: int = 0, tokens: int = 0) -> None:
    own = live()
    if own.accounts():
        own.steps.add(int(samples), int(tokens))


_complained = False


def _complain(name: str) -> None:
    global _complained
    if not _complained:
        _complained = True
        sys.stderr.write("diagnosd: %r is no phase; there are %s\n" % (name, ", ".join(_PHASES)))
