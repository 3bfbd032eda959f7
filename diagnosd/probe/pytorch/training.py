"""Backward, optimizers, the gradient scaler and model.eval(): what any training loop of PyTorch calls."""

import functools
import sys
from typing import Any

from diagnosd.probe import steps
from diagnosd.probe.pytorch import patching
from diagnosd.probe.pytorch.cuda import BACKWARD, FORWARD, OPTIMIZER, Device
from diagnosd.probe.pytorch.ddp import Models
from diagnosd.probe.reporter import Reporter, clock


def patch(torch: Any, reporter: Reporter, models: Models, device: Device) -> None:
    compiling = patching.is_compiling(torch)
    patching.put(
        reporter, torch.autograd, "backward", functools.partial(_backward, reporter, models, device, compiling)
    )
    scaler: Any = sys.modules.get("torch.amp.grad_scaler") or sys.modules["torch.cuda.amp.grad_scaler"]
    patching.put(reporter, scaler.GradScaler, "step", functools.partial(_scaled, reporter))
    patching.put(reporter, torch.nn.Module, "eval", functools.partial(_evaluation, reporter, compiling))
    _hook_optimizers(reporter, device, compiling)


def _backward(reporter: Reporter, models: Models, device: Device, compiling: Any, original: Any) -> Any:
    def backward(*args: Any, **kwargs: Any) -> Any:
        # One inside another is checkpointing that computes a forward again: a part of the outer.
        if compiling() or not reporter.trains() or reporter.steps.phase == steps.BACKWARD:
            return original(*args, **kwargs)
        t = clock()
        try:
            device.seen(args[0] if args else kwargs.get("tensors"))
            device.passes(FORWARD, BACKWARD)
            reporter.steps.backward_begins(t)
            reporter.cost += clock() - t
        except Exception as error:
            reporter.fault("backward", error)
            return original(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            _backward_ends(reporter, models, device, t)

    return backward


def _backward_ends(reporter: Reporter, models: Models, device: Device, began: int) -> None:
    if not reporter.on:
        return
    t = clock()
    try:
        device.passes(BACKWARD, None)
        reporter.steps.backward_ends(t, *models.communication(began, t))
        reporter.cost += clock() - t
    except Exception as error:
        reporter.fault("backward", error)


def _hook_optimizers(reporter: Reporter, device: Device, compiling: Any) -> None:
    """By PyTorch's own global hooks, which every optimizer's step calls."""

    def begins(*_: Any) -> None:
        if not compiling() and reporter.trains():
            t = clock()
            try:
                device.passes(None, OPTIMIZER)
                reporter.steps.optimizer_begins(t)
                reporter.cost += clock() - t
            except Exception as error:
                reporter.fault("optimizer", error)

    def ends(optimizer: Any, *_: Any) -> None:
        if not compiling() and reporter.accounts():
            t = clock()
            try:
                device.passes(OPTIMIZER, None)
                reporter.steps.optimizer_ends(t, id(optimizer))
                reporter.cost += clock() - t
            except Exception as error:
                reporter.fault("optimizer", error)

    module: Any = sys.modules["torch.optim.optimizer"]
    for hook, register in (
        (begins, module.register_optimizer_step_pre_hook),
        (ends, module.register_optimizer_step_post_hook),
    ):
        reporter.at_off.append(register(hook).remove)
        patching.untraced(hook)


def _scaled(reporter: Reporter, original: Any) -> Any:
    """The scaler skips the optimizer where a gradient is not finite; the step ends all the same."""

    def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not reporter.trains():
            return original(scaler, optimizer, *args, **kwargs)
        reporter.steps.optimizer_begins(clock())
        try:
            return original(scaler, optimizer, *args, **kwargs)
        finally:
            if reporter.on:
                reporter.steps.optimizer_ends(clock(), id(optimizer))

    return step


def _evaluation(reporter: Reporter, compiling: Any, original: Any) -> Any:
    def evaluate(module: Any) -> Any:
        if not compiling() and reporter.accounts():
            reporter.steps.evaluation_begins(clock())
        return original(module)

    return evaluate
