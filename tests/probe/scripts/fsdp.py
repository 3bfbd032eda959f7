"""Two ranks of a fully sharded model over gloo, with a distributed checkpoint."""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(128, 128)
        self.slow = 0.0
        self.rank = rank

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(self.slow)
        return self.layer(batch).relu()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    model = nn.Sequential(*(Block(dist.get_rank()) for _ in range(3)))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(8):
        model[1].slow = 0.3 if number == 5 and dist.get_rank() == 1 else 0.0
        model(torch.randn(8, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 6:
            checkpoint.save(model.state_dict(), checkpoint_id=sys.argv[1])
    dist.barrier()
    dist.destroy_process_group()


main()
