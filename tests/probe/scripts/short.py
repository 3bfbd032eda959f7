"""Two ranks of DDP over gloo in steps of some 25 ms, each with a small collective of the script's own."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, SECONDS = 170, 0.025

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for number in range(STEPS):
    loss = model(torch.randn(8, 64)).square().mean()
    time.sleep(SECONDS)
    loss.backward()
    told = torch.full((1,), number, dtype=torch.int64)
    dist.all_reduce(told)
    if number == 50:  # a forward in which DDP counts an iteration that is no step
        model.eval()
        model(torch.randn(8, 64))
        model.train()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
dist.destroy_process_group()
