"""What of PyTorch is timed: its loaders, backward and optimizers, DDP, collectives, saves, and copies to a device.

`instrument` runs once, right after the script's own `import torch`. What a script imports later is patched when it
comes. A part of PyTorch that does not have the expected shape switches the probe off, whole: half the phases would be
counted as the other half.
"""

from types import ModuleType
from typing import Callable, Dict

from diagnosd import probe
from diagnosd.probe.pytorch import collectives, compiled, cuda, ddp, facts, loader, saving, training

After = Dict[str, Callable[[ModuleType], None]]


def instrument(torch: ModuleType, after: After) -> None:
    """`after[name]` is called with the module of that name once it has been imported."""
    reporter = probe.live()
    if not reporter.on:
        return
    try:
        device = cuda.patch(torch, reporter)
        loader.patch(torch, reporter, device)
        models = ddp.patch(torch, reporter, device)
        training.patch(torch, reporter, models, device)
        if torch.distributed.is_available():
            collectives.patch(torch, reporter)
        saving.patch(torch, reporter, after)
        facts.watch(torch, reporter)
        compiled.watch(reporter, after)
    except Exception as error:
        reporter.fault("this PyTorch (%s) has an unknown shape" % getattr(torch, "__version__", "?"), error)
