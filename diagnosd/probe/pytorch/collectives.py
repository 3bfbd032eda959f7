"""The collectives that Python calls: FSDP's, DDP's of its buffers and the script's own. DDP reduces in C++: see ddp.py.

On the host (gloo, MPI) a collective blocks where it is called or where its Work is waited for, and that time is taken
out of whatever phase it falls into. On a device it is only enqueued: its time is the device's to tell.
"""

import functools
import sys
from typing import Any, Dict, NamedTuple, Optional, Tuple

from diagnosd.probe.pytorch import groups, patching
from diagnosd.probe.reporter import Reporter, clock, thread_id
from diagnosd.probe.steps import COMM, Steps, Sync


class Call(NamedTuple):
    """Where a collective's message (what nccl-tests count as its size) and group stand among its arguments."""

    message: Optional[Tuple[int, str]]
    group: int


CALLS = {
    "all_reduce": Call((0, "tensor"), 2),
    "broadcast": Call((0, "tensor"), 2),
    "reduce": Call((0, "tensor"), 3),
    "all_gather": Call((0, "tensor_list"), 2),
    "all_gather_into_tensor": Call((0, "output_tensor"), 2),
    "all_gather_single": Call((0, "output_tensor"), 2),  # so named in 2.13
    "gather": Call((0, "tensor"), 3),
    "scatter": Call((0, "tensor"), 3),
    "reduce_scatter": Call((1, "input_list"), 3),
    "reduce_scatter_tensor": Call((1, "input"), 3),
    "reduce_scatter_single": Call((1, "input"), 3),
    "all_to_all": Call((0, "output_tensor_list"), 2),
    "all_to_all_single": Call((0, "output"), 4),
    "send": Call((0, "tensor"), 2),
    "recv": Call((0, "tensor"), 2),
    "barrier": Call(None, 0),
    "monitored_barrier": Call(None, 0),
}
# What DDP sends its buffers with at the beginning of a forward. It is C++ that waits for what it issued, and stands in
# torch.distributed only.
COALESCED = ("_broadcast_coalesced", Call((1, "tensors"), 0))
ISSUED = 256  # works issued and not yet waited for, of which the sizes are kept; FSDP has a few

Message = Tuple[int, str]  # bytes, group; (0, "") where there is none


def patch(torch: Any, reporter: Reporter) -> None:
    functions: Any = sys.modules["torch.distributed.distributed_c10d"]
    timed = _Collectives(torch, reporter, functions)
    for name, call in CALLS.items():
        if name != "all_reduce" and not hasattr(functions, name):
            continue  # this version has it under its other name
        patching.put(reporter, functions, name, functools.partial(timed.collective, call), torch.distributed)
    name, call = COALESCED
    if hasattr(torch.distributed, name):
        patching.put(reporter, torch.distributed, name, functools.partial(timed.collective, call))
        wrapper = getattr(torch.distributed, name)
        wrapper.__module__, wrapper.__qualname__ = "torch.distributed", name  # pybind's names lead nowhere
    patching.put(reporter, functions.Work, "wait", timed.wait)
    # A compiled DDP module runs its own forward outside of any graph, and Dynamo meets each frame below the wrapper's.
    for below in (_Collectives._timed, _Collectives._keep, _Collectives._message, _Collectives._bytes, groups.name):
        patching.untraced(below)


class _Collectives:
    def __init__(self, torch: Any, reporter: Reporter, functions: Any) -> None:
        self._torch, self._reporter, self._functions = torch, reporter, functions
        self._compiling = patching.is_compiling(torch)
        self._inside = False
        self._issued: Dict[int, Message] = {}
        self._counts: Dict[str, int] = {}

    def collective(self, call: Call, original: Any) -> Any:
        compiling, reporter = self._compiling, self._reporter

        def collective(*args: Any, **kwargs: Any) -> Any:
            # Inside another one (all_gather_object, a send's Work) it is a part of that.
            if compiling() or thread_id() != reporter.thread or self._inside:
                return original(*args, **kwargs)
            began = clock()
            message = self._message(call, args, kwargs)
            if message is None:
                return original(*args, **kwargs)
            return self._timed(message, began, original, args, kwargs)

        return collective

    def wait(self, original: Any) -> Any:
        compiling, reporter = self._compiling, self._reporter

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            if compiling() or thread_id() != reporter.thread or self._inside:
                return original(work, *args, **kwargs)
            message = self._issued.pop(id(work), (0, ""))
            return self._timed(message, clock(), original, (work, *args), kwargs)

        return wait

    def _timed(self, message: Message, began: int, original: Any, args: Any, kwargs: Any) -> Any:
        note, sync = self._reporter.notes.extend, None
        note((Steps.enter, clock() - began, began, (COMM,)))
        self._inside = True
        try:
            result = original(*args, **kwargs)
            if isinstance(result, self._functions.Work):  # only issued: the host blocks in its wait(), if ever
                self._keep(id(result), message)
            elif message[0]:
                sync = Sync(message[0], began, clock(), message[1])
            return result
        finally:
            self._inside = False
            note((Steps.collective_ends, 0, clock(), (sync,)))

    def _keep(self, work: int, message: Message) -> None:
        if len(self._issued) >= ISSUED:
            self._issued.clear()
        self._issued[work] = message

    def _message(self, call: Call, args: Any, kwargs: Any) -> Optional[Message]:
        """None where there is no group to speak in, or where a device speaks."""
        try:
            group = args[call.group] if len(args) > call.group else kwargs.get("group")
            name = groups.name(self._functions, group)
            moved = None
            if call.message is not None:
                at, keyword = call.message
                moved = args[at] if len(args) > at else kwargs.get(keyword)
            bytes_ = self._bytes(moved)
            self._counts[name] = self._counts.get(name, 0) + 1
            self._reporter.collective = (name, self._counts[name])
            return (bytes_, name) if name and bytes_ is not None else None
        except Exception as error:
            self._reporter.fault("collective", error)
            return None

    def _bytes(self, moved: Any) -> Optional[int]:
        """Of a tensor or a list of them; None where they lie on a device, which the host does not wait for."""
        if isinstance(moved, self._torch.Tensor):
            return moved.numel() * moved.element_size() if moved.device.type == "cpu" else None
        if not isinstance(moved, (list, tuple)):
            return 0
        total = 0
        for part in moved:  # a model may have hundreds of buffers: on a device the first says it
            size = self._bytes(part)
            if size is None:
                return None
            total += size
        return total
