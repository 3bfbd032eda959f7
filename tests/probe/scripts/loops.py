"""Training loops of several kinds on one process, each in a fork of its own with its name as DIAGNOSD_JOB."""

import multiprocessing
import os
from collections.abc import Callable

import torch
import torch._dynamo  # an optimizer imports it: once here, not in every fork
from torch import Tensor, nn
from torch.utils.data import DataLoader

STEPS = 6
LOADER = DataLoader(torch.randn(8 * STEPS, 16), batch_size=8)
MODEL = nn.Linear(16, 16)


def loss(batch: Tensor) -> Tensor:
    return MODEL(batch).square().mean()


def plain() -> None:
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.01)
    for batch in LOADER:
        loss(batch).backward()
        optimizer.step()


def accumulating() -> None:
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.01)
    for _ in range(STEPS):
        for batch in LOADER:
            loss(batch).backward()
        optimizer.step()


def gan() -> None:
    optimizers = [torch.optim.Adam(MODEL.parameters(), lr=rate) for rate in (0.01, 0.02)]
    for batch in LOADER:
        for optimizer in optimizers:
            loss(batch).backward()
            optimizer.step()


def lbfgs() -> None:
    optimizer = torch.optim.LBFGS(MODEL.parameters(), max_iter=3)

    def closure(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        found = loss(batch)
        found.backward()
        return found

    for batch in LOADER:
        optimizer.step(lambda batch=batch: closure(batch))


def skipping() -> None:
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu")
    for number, batch in enumerate(LOADER):
        scaler.scale(loss(batch) * (float("inf") if number % 2 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def in_backward() -> None:
    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.01) for parameter in MODEL.parameters()}
    handles = [parameter.register_post_accumulate_grad_hook(update) for parameter in MODEL.parameters()]
    for batch in LOADER:
        loss(batch).backward()
    for handle in handles:
        handle.remove()


def own_optimizer() -> None:
    for batch in LOADER:
        loss(batch).backward()
        with torch.no_grad():
            for parameter in MODEL.parameters():
                parameter.sub_(parameter.grad, alpha=0.01)
                parameter.grad = None


def failing_optimizer() -> None:
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.01)
    for number, batch in enumerate(LOADER):
        loss(batch).backward()
        if number == 2:
            optimizer.param_groups[0]["lr"] = "fast"
            try:
                optimizer.step()
            except (TypeError, RuntimeError):
                optimizer.param_groups[0]["lr"] = 0.01
        optimizer.step()


def inference() -> None:
    with torch.no_grad():
        for batch in LOADER:
            MODEL(batch)


LOOPS: list[Callable[[], None]] = [
    plain,
    accumulating,
    gan,
    lbfgs,
    skipping,
    in_backward,
    own_optimizer,
    failing_optimizer,
    inference,
]

if __name__ == "__main__":
    torch.set_num_threads(1)
    for loop in LOOPS:
        os.environ["DIAGNOSD_JOB"] = loop.__name__
        child = multiprocessing.get_context("fork").Process(target=loop)
        child.start()
        child.join()
        assert not child.exitcode, loop.__name__
