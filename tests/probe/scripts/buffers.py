"""Two ranks of DDP over gloo whose model has buffers, which DDP broadcasts at each forward. In two steps one is late.

Then a model with more bytes of buffers than of gradients.
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, LATE = 12, {6: 1, 9: 0}  # step, rank
SECONDS = 0.3
PACE = 0.055  # of a step: every reduction of steps from 50 ms on is timed
MORE = 3


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    few = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    many = nn.Sequential(nn.Linear(64, 64))
    many.register_buffer("mask", torch.zeros(100_000, dtype=torch.uint8))
    replicas = [DistributedDataParallel(model) for model in (few, many)]  # now, for it broadcasts all that a model has
    for replica, steps in zip(replicas, (STEPS, MORE), strict=True):
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.01)
        for number in range(steps):
            time.sleep(SECONDS if steps == STEPS and LATE.get(number) == rank else PACE)
            replica(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
