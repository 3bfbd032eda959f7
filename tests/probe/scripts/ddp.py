"""Two ranks of DDP over gloo; some steps are marked by something slow. Says at its end what was in which step."""

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

SLOW_BACKWARD, SAVED_AFTER, EVALUATED_AFTER, REDUCED_IN, SLOW_LOAD = 12, 4, 7, 15, 19
STEPS, ACCUMULATED = 20, 3
SECONDS = 0.3
PACE = 0.055  # of a forward: every reduction of steps from 50 ms on is timed


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, value: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds  # type: ignore[attr-defined]
        return value.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)  # type: ignore[attr-defined]
        return gradient, None


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, batches: int) -> None:
        self.rows = torch.randn(16 * batches, 128)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        if index == 16 * SLOW_LOAD:  # the first row of a batch that both ranks' samplers would reach at the same step
            time.sleep(SECONDS)
        return self.rows[index]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(128, 128) for _ in range(4))))
    optimizer = torch.optim.AdamW(model.parameters())
    rows, validation = Rows(STEPS), Rows(3)
    batches = DataLoader(rows, batch_size=8, sampler=DistributedSampler(rows, shuffle=False), num_workers=1)

    def learn(batch: Tensor, seconds: float = 0.0) -> None:
        time.sleep(PACE)
        SlowBackward.apply(model(batch), seconds).square().mean().backward()

    for number, batch in enumerate(batches):
        learn(batch, SECONDS if rank == 1 and number == SLOW_BACKWARD else 0.0)
        if number == REDUCED_IN:
            told = torch.zeros(100_000)
            dist.all_reduce(told)
            time.sleep(SECONDS if rank == 1 else 0.0)
            dist.all_reduce(told, async_op=True).wait()
        optimizer.step()
        optimizer.zero_grad()
        if number == SAVED_AFTER and rank == 0:
            torch.save({"model": model.state_dict(), "slow": SlowToSave()}, "/dev/null")
        if number == EVALUATED_AFTER:
            model.eval()
            with torch.no_grad():
                for held_out in DataLoader(validation, batch_size=16):
                    model.module(held_out)
                    time.sleep(SECONDS / 3)
            model.train()
    for number in range(ACCUMULATED):
        with model.no_sync():
            for _ in range(3):
                learn(rows.rows[:8], SECONDS / 3 if rank == 1 and number == 1 else 0.0)
        learn(rows.rows[:8])
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


class SlowToSave:
    def __reduce__(self) -> tuple[type, tuple[()]]:
        time.sleep(SECONDS)
        return SlowToSave, ()


if __name__ == "__main__":
    main()
