"""DDP timed by a communication hook, as where its logger lacks the times: the gradients are those without it."""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from diagnosd.probe.pytorch.ddp import _Hook


def gradients(*, hooked: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)))
    hook = _Hook.of(model) if hooked else None
    for _ in range(3):
        began = time.time_ns()
        model.zero_grad()
        model(torch.full((8, 64), 1.0 + dist.get_rank())).square().mean().backward()
        if hook is not None:
            moved, issued, reduced = hook.take()
            assert moved == sum(parameter.numel() * 4 for parameter in model.parameters())
            assert began < issued < reduced < time.time_ns()
    assert hook is None or _Hook.of(model) is None, "a module takes only one hook"
    return [parameter.grad.clone() for parameter in model.parameters()]


torch.set_num_threads(1)
rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=2)
for with_, without in zip(gradients(hooked=True), gradients(hooked=False), strict=True):
    assert torch.equal(with_, without)
dist.barrier()
dist.destroy_process_group()
print("same")
