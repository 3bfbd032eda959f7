"""Training loops of several kinds on one process, each in a fork of its own with its name as DIAGNOSD_JOB."""

import multiprocessing
import os
from collections.abc import Callable
from contextlib import suppress

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


class Failing(torch.optim.SGD):
    """As where memory runs out in the third step."""

    calls = 0

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("out of memory")
        super().step(closure)


def failing_optimizer() -> None:
    optimizer = Failing(MODEL.parameters(), lr=0.01)
    for batch in LOADER:
        loss(batch).backward()
        with suppress(RuntimeError):
            optimizer.step()


def failing_without_loader() -> None:
    optimizer = Failing(MODEL.parameters(), lr=0.01)
    for _ in range(STEPS):
        loss(torch.randn(8, 16)).backward()
        with suppress(RuntimeError):
            optimizer.step()


def failing_in_scaler() -> None:
    optimizer, scaler = Failing(MODEL.parameters(), lr=0.01), torch.amp.GradScaler("cpu")
    for _ in range(STEPS):
        scaler.scale(loss(torch.randn(8, 16))).backward()
        with suppress(RuntimeError):
            scaler.step(optimizer)
        scaler.update()


def trying_again() -> None:
    optimizer = Failing(MODEL.parameters(), lr=0.01)
    for batch in LOADER:
        loss(batch).backward()
        try:
            optimizer.step()
        except RuntimeError:
            optimizer.step()


def inheriting() -> None:
    torch.optim.SGD(MODEL.parameters(), lr=0.01)  # PyTorch hooks a class's step when it makes the first of it
    optimizer = Failing(MODEL.parameters(), lr=0.01)
    optimizer.calls = 3
    for batch in LOADER:
        loss(batch).backward()
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
    failing_without_loader,
    failing_in_scaler,
    trying_again,
    inheriting,
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
