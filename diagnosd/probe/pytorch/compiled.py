"""torch.compile: the wrappers are hidden from it when it is loaded, and a step in which it compiled is known."""

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
            module.on_compile_end(compiled)
        except Exception as error:
            reporter.fault("this torch.compile has an unknown shape", error)

    def compiled(*_: Any) -> None:
        if thread_id() == reporter.thread:
            reporter.notes.extend((Steps.compiled, 0, clock(), ()))

    after["torch._dynamo.eval_frame"] = frames
    after["torch._dynamo.callback"] = callbacks
