"""Backward, optimizers, the gradient scaler and model.eval(): what any training loop of PyTorch calls."""

import functools
import sys
from typing import Any

from diagnosd.probe.pytorch import patching
from diagnosd.probe.pytorch.cuda import BACKWARD, OPTIMIZER, Device
from diagnosd.probe.pytorch.ddp import Models
from diagnosd.probe.reporter import Reporter, clock, thread_id
from diagnosd.probe.steps import Steps


def patch(torch: Any, reporter: Reporter, models: Models, device: Device) -> None:
    compiling = patching.is_compiling(torch)
    make = functools.partial(_backward, reporter, models, device)
    patching.put(reporter, torch.autograd, "backward", make)
    scaler: Any = sys.modules.get("torch.amp.grad_scaler") or sys.modules["torch.cuda.amp.grad_scaler"]
    patching.put(reporter, scaler.GradScaler, "step", functools.partial(_scaled, reporter))
    patching.put(reporter, torch.nn.Module, "eval", functools.partial(_evaluation, reporter, compiling))
    _hook_optimizers(reporter, device)


def _backward(reporter: Reporter, models: Models, device: Device, original: Any) -> Any:
    note, inside = reporter.notes.extend, [False]

    def backward(*args: Any, **kwargs: Any) -> Any:
        # One inside another is checkpointing that computes a forward again: a part of the outer.
        if (thread_id() != reporter.training and not reporter.trains()) or inside[0]:
            return original(*args, **kwargs)
        began = clock()
        if device.active:
            device.backward_begins(args[0] if args else kwargs.get("tensors"))
        note((Steps.backward_begins, 0, began, ()))
        inside[0] = True
        try:
            return original(*args, **kwargs)
        finally:
            inside[0] = False
            t = clock()
            if device.active:
                device.passes(BACKWARD, None)
            sync, split = models.communication(began) if models.pending else (None, True)
            note((Steps.backward_ends, clock() - t, t, (sync, split)))

    return backward


def _hook_optimizers(reporter: Reporter, device: Device) -> None:
    """By PyTorch's own global hooks, which every optimizer's step calls; no graph of Dynamo's contains them.

    They stay when the probe is off, and do nothing: PyTorch may be walking through its dictionary of hooks.
    """
    note = reporter.notes.extend

    def begins(optimizer: Any, *_: Any) -> None:
        if thread_id() == reporter.training or reporter.trains():
            note((Steps.optimizer_begins, 0, clock(), (id(optimizer),)))
            if device.active:
                device.passes(None, OPTIMIZER)

    def ends(optimizer: Any, *_: Any) -> None:
        if thread_id() == reporter.training:
            t = clock()
            if device.active:
                device.optimizer_ends()
            note((Steps.optimizer_ends, 0, t, (id(optimizer),)))

    module: Any = sys.modules["torch.optim.optimizer"]
    for hook, register in (
        (begins, module.register_optimizer_step_pre_hook),
        (ends, module.register_optimizer_step_post_hook),
    ):
        register(hook)
        patching.untraced(hook)


def _scaled(reporter: Reporter, original: Any) -> Any:
    """The scaler skips the optimizer where a gradient is not finite; the step ends all the same."""
    note = reporter.notes.extend

    def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not reporter.trains():
            return original(scaler, optimizer, *args, **kwargs)
        note((Steps.optimizer_begins, 0, clock(), (id(scaler),)))
        try:
            return original(scaler, optimizer, *args, **kwargs)
        finally:
            note((Steps.optimizer_ends, 0, clock(), (id(optimizer), id(scaler))))

    return step


def _evaluation(reporter: Reporter, compiling: Any, original: Any) -> Any:
    note = reporter.notes.extend

    def evaluate(module: Any) -> Any:
        if not compiling() and thread_id() == reporter.thread:
            note((Steps.evaluation_begins, 0, clock(), ()))
        return original(module)

    return evaluate
