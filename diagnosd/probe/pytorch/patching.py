"""Putting a timed function in the place of one of PyTorch's, so that torch.compile does not see the difference.

Where Dynamo inlines the wrapper into a graph, `is_dynamo_compiling()` is true and the wrapper is the original.
Where it meets the wrapper as a frame of its own, it is told to leave that frame alone and go on with the frames below.
So graphs and breaks are those of a process without the probe.
"""

import functools
import sys
from types import CodeType
from typing import Any, Callable, List

from diagnosd.probe.reporter import Reporter

_codes: List[CodeType] = []


def put(reporter: Reporter, owner: Any, name: str, make: Callable[[Any], Any], *copies: Any) -> None:
    """Replace `owner.name` by what `make` makes of it, until the probe is off. AttributeError where there is none.

    `copies` are modules that took the name from the owner: they get the same object, so that it is one function by
    whatever name and can be pickled.
    """
    original = getattr(owner, name)
    if not callable(original):
        raise TypeError("%s is not callable" % name)
    wrapper = functools.wraps(original)(make(original))
    untraced(wrapper)
    for place in (owner, *(copy for copy in copies if getattr(copy, name, None) is original)):
        setattr(place, name, wrapper)
        reporter.at_off.append(functools.partial(_put_back, place, name, wrapper, original))


def _put_back(owner: Any, name: str, wrapper: Any, original: Any) -> None:
    if getattr(owner, name) is wrapper:
        setattr(owner, name, original)


def untraced(function: Any) -> None:
    """Dynamo does not compile this function's own frame."""
    _codes.append(function.__code__)
    if "torch._dynamo.eval_frame" in sys.modules:
        leave_alone(sys.modules["torch._dynamo.eval_frame"])


def leave_alone(eval_frame: Any) -> None:
    """Tell Dynamo, once it is there, of all functions so far."""
    while _codes:
        eval_frame.skip_code(_codes.pop())


def is_compiling(torch: Any) -> Callable[[], bool]:
    """A function that Dynamo replaces by True; elsewhere it is False, and as cheap as PyTorch has one."""
    compiler = getattr(torch, "compiler", None)
    for name in ("is_dynamo_compiling", "is_compiling"):
        if hasattr(compiler, name):
            return getattr(compiler, name)  # type: ignore[no-any-return]
    return bool  # before 2.1 nothing inlines a wrapper of ours
