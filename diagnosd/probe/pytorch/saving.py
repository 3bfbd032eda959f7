"""Checkpoints: torch.save, torch.distributed.checkpoint and safetensors, as far as the training thread waits."""

import functools
import sys
from types import ModuleType
from typing import Any, Callable, Dict

from diagnosd.probe.pytorch import patching
from diagnosd.probe.reporter import Reporter, clock, thread_id
from diagnosd.probe.steps import Steps

# Imported when a script needs them: the module in which each function is made, before others take its name from there.
LATER = {
    "torch.distributed.checkpoint.state_dict_saver": ("save", "async_save"),
    "safetensors.torch": ("save_file",),
}


def patch(torch: Any, reporter: Reporter, after: Dict[str, Callable[[ModuleType], None]]) -> None:
    make = functools.partial(_save, reporter)
    patching.put(reporter, sys.modules["torch.serialization"], "save", make, torch)
    for module in LATER:
        after[module] = functools.partial(_patch_later, reporter, make)


def _patch_later(reporter: Reporter, make: Callable[[Any], Any], module: ModuleType) -> None:
    try:
        for name in LATER[module.__name__]:
            patching.put(reporter, module, name, make)
    except Exception as error:
        reporter.fault(module.__name__, error)


def _save(reporter: Reporter, original: Any) -> Any:
    note = reporter.notes.extend

    def save(*args: Any, **kwargs: Any) -> Any:
        if thread_id() != reporter.thread:
            return original(*args, **kwargs)
        note((Steps.checkpoint_begins, 0, clock(), ()))
        try:
            return original(*args, **kwargs)
        finally:
            note((Steps.leave, 0, clock(), ()))

    return save
