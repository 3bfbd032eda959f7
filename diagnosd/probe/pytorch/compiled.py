"""torch.compile: the wrappers are hidden from it when it is loaded, and a step in which it compiled says so."""

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
    reporter.kind = _Kind()


class _Kind:
    """`compile` for a step in which Dynamo made a graph, by its own count of them."""

    def __init__(self) -> None:
        self._graphs = 0

    def __call__(self) -> str:
        dynamo: Any = sys.modules.get("torch._dynamo.utils")
        if dynamo is None:
            return "train"
        graphs = dynamo.counters["stats"]["unique_graphs"]
        made, self._graphs = graphs != self._graphs, graphs
        return "compile" if made and graphs else "train"
