"""Compiles a model, a loss and a training step, and prints what Dynamo made of them. Run with and without the probe."""

import os
import socket
import sys

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

graphs: list[str] = []


def backend(module: torch.fx.GraphModule, _inputs: list[Tensor]) -> object:
    graphs.append(str(module.graph))
    return module.forward


def case(name: str, run: object) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs.clear()
    for _ in range(2):
        run()  # type: ignore[operator]
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    print(f"{name}: {breaks} breaks", *graphs, sep="\n")


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    batch = torch.randn(8, 16)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    wrapped = DistributedDataParallel(nn.Linear(16, 16))
    buffered = DistributedDataParallel(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)))
    optimizer = torch.optim.SGD([*model.parameters(), *wrapped.parameters()], lr=0.1)
    whole = torch.compile(model, backend=backend, fullgraph=True)

    def train(batch: Tensor) -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def reduce(batch: Tensor) -> Tensor:
        dist.all_reduce(batch * 2)
        return batch.to(torch.float64)

    def evaluate(batch: Tensor) -> Tensor:
        model.eval()
        return model(batch)

    compiled_ddp = torch.compile(wrapped, backend=backend)
    compiled_buffers = torch.compile(buffered, backend=backend)
    compiled_step = torch.compile(train, backend=backend)
    compiled_reduce = torch.compile(reduce, backend=backend, fullgraph=True)
    compiled_evaluate = torch.compile(evaluate, backend=backend)
    inner = DistributedDataParallel(torch.compile(nn.Linear(16, 16), backend=backend, fullgraph=True))

    case("a model, fullgraph", lambda: whole(batch).sum().backward())
    case("a DDP module", lambda: compiled_ddp(batch).sum().backward())
    case("a DDP module with buffers", lambda: compiled_buffers(batch).sum().backward())
    case("a module inside DDP", lambda: inner(batch).sum().backward())
    case("a training step", lambda: compiled_step(batch))
    case("a collective, fullgraph", lambda: compiled_reduce(batch))
    case("an evaluation", lambda: compiled_evaluate(batch))
    print("parameters", *(parameter.detach().numpy().tobytes().hex() for parameter in model.parameters()))
    dist.destroy_process_group()


if "copies" in sys.argv and "DIAGNOSD_JOB" in os.environ:
    from diagnosd import probe
    from diagnosd.probe.pytorch import cuda

    # What a PyTorch built for CUDA gets, on one that is not: the wrappers that a compiled model calls most.
    cuda.patch_copies(torch, probe.live(), cuda.Device(torch, probe.live()))
main()
