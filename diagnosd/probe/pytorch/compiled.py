"""torch.compile: the wrappers are hidden from it when it is loaded, and a step in which it made a graph is known."""

import sys
from types import ModuleType
from typing import Any, Callable, Dict

from diagnosd.probe.pytorch import patching
from diagnosd.probe.reporter import Reporter


def watch(reporter: Reporter, after: Dict[str, Callable[[ModuleType], None]]) -> None:
    def loaded(eval_frame: Any) -> None:
        try:
            patching.leave_alone(eval_frame)
        except Exception as error:
            reporter.fault("this torch.compile has an unknown shape", error)

    after["torch._dynamo.eval_frame"] = loaded


class Graphs:
    """Dynamo's own count of the graphs that it made."""

    def __init__(self) -> None:
        self._count = 0

    def grown(self) -> bool:
        """Whether there are more than at the last call."""
        dynamo: Any = sys.modules.get("torch._dynamo.utils")
        counters = getattr(dynamo, "counters", None)  # None while Dynamo is being imported
        before, self._count = self._count, counters["stats"].get("unique_graphs", 0) if counters else 0
        return self._count > before
