"""Backward, optimizers, the gradient scaler and model.eval(): what any training loop of PyTorch calls."""

import functools
import sys
from typing import Any

from diagnosd.probe.pytorch import patching
from diagnosd.probe.pytorch.compiled import Graphs
from diagnosd.probe.pytorch.cuda import BACKWARD, FORWARD, OPTIMIZER, Device
from diagnosd.probe.pytorch.ddp import Models
from diagnosd.probe.reporter import Reporter, clock, thread_id
from diagnosd.probe.steps import Steps


def patch(torch: Any, reporter: Reporter, models: Models, device: Device) -> None:
    compiling = patching.is_compiling(torch)
    make = functools.partial(_backward, reporter, models, device, compiling)
    patching.put(reporter, torch.autograd, "backward", make)
    scaler: Any = sys.modules.get("torch.amp.grad_scaler") or sys.modules["torch.cuda.amp.grad_scaler"]
    patching.put(reporter, scaler.GradScaler, "step", functools.partial(_scaled, reporter))
    patching.put(reporter, torch.nn.Module, "eval", functools.partial(_evaluation, reporter, compiling))
    _hook_optimizers(reporter, device, compiling)


def _backward(reporter: Reporter, models: Models, device: Device, compiling: Any, original: Any) -> Any:
    note, inside, graphs = reporter.notes.append, [False], Graphs()

    def backward(*args: Any, **kwargs: Any) -> Any:
        # One inside another is checkpointing that computes a forward again: a part of the outer.
        if compiling() or not reporter.trains() or inside[0]:
            return original(*args, **kwargs)
        began = clock()
        if device.kind is None:
            device.seen(args[0] if args else kwargs.get("tensors"))
        device.passes(FORWARD, BACKWARD)
        note((Steps.backward_begins, 0, began))
        inside[0] = True
        try:
            return original(*args, **kwargs)
        finally:
            inside[0] = False
            t = clock()
            device.passes(BACKWARD, None)
            sync, split = models.communication(began)
            if graphs.grown():
                note((Steps.compiled, 0, t))
            note((Steps.backward_ends, clock() - t, t, sync, split))

    return backward


def _hook_optimizers(reporter: Reporter, device: Device, compiling: Any) -> None:
    """By PyTorch's own global hooks, which every optimizer's step calls."""
    note = reporter.notes.append

    def begins(*_: Any) -> None:
        if not compiling() and reporter.trains():
            note((Steps.optimizer_begins, 0, clock()))
            device.passes(None, OPTIMIZER)

    def ends(optimizer: Any, *_: Any) -> None:
        if not compiling() and thread_id() == reporter.thread:
            t = clock()
            device.passes(OPTIMIZER, None)
            device.look()
            note((Steps.optimizer_ends, clock() - t, t, id(optimizer)))

    module: Any = sys.modules["torch.optim.optimizer"]
    for hook, register in (
        (begins, module.register_optimizer_step_pre_hook),
        (ends, module.register_optimizer_step_post_hook),
    ):
        reporter.at_off.append(register(hook).remove)
        patching.untraced(hook)


def _scaled(reporter: Reporter, original: Any) -> Any:
    """The scaler skips the optimizer where a gradient is not finite; the step ends all the same."""
    note = reporter.notes.append

    def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not reporter.trains():
            return original(scaler, optimizer, *args, **kwargs)
        note((Steps.optimizer_begins, 0, clock()))
        try:
            return original(scaler, optimizer, *args, **kwargs)
        finally:
            note((Steps.optimizer_ends, 0, clock(), id(optimizer)))

    return step


def _evaluation(reporter: Reporter, compiling: Any, original: Any) -> Any:
    note = reporter.notes.append

    def evaluate(module: Any) -> Any:
        if not compiling() and thread_id() == reporter.thread:
            note((Steps.evaluation_begins, 0, clock()))
        return original(module)

    return evaluate
