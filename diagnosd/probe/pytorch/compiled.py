"""torch.compile: the wrappers are hidden from it when it is loaded; while it compiles, and in which step, is known.

A recompilation in the middle of training may take minutes, and is no hang.
"""

import functools
from types import ModuleType
from typing import Any, Callable, Dict

from diagnosd.probe.pytorch import patching
from diagnosd.probe.reporter import Reporter, clock, thread_id
from diagnosd.probe.steps import Steps


def watch(reporter: Reporter, after: Dict[str, Callable[[ModuleType], None]]) -> None:
    def frames(eval_frame: Any) -> None:
        try:
            patching.leave_alone(eval_frame)
        except Exception as error:
            reporter.fault("this torch.compile has an unknown shape", error)

    def callbacks(module: Any) -> None:
        if not hasattr(module, "on_compile_end"):  # since 2.2; before it a step that compiles is only a long one
            return
        try:
            module.on_compile_start(functools.partial(note, Steps.compile_begins))
            module.on_compile_end(functools.partial(note, Steps.compile_ends))
        except Exception as error:
            reporter.fault("this torch.compile has an unknown shape", error)

    def note(method: Any, *_: Any) -> None:
        if thread_id() == reporter.thread:
            reporter.notes.extend((method, 0, clock(), ()))

    after["torch._dynamo.eval_frame"] = frames
    after["torch._dynamo.callback"] = callbacks
