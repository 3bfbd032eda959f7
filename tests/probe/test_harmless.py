"""Whatever becomes of the probe, the script that it watches runs on: without a thread, switched off at a bad moment."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from observed import Agent, Launch

from diagnosd.probe.pytorch import facts
from diagnosd.probe.reporter import Reporter

torch_is_here = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")

NO_THREAD = """
import resource, threading
threading.stack_size(2**40)  # more than the address space that is left: the kernel refuses the next thread
resource.setrlimit(resource.RLIMIT_AS, (2**39, 2**39))
"""
TRAIN = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train():
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def script(launch: Launch, tmp_path: Path) -> Callable[..., str]:
    """Runs a script under the probe, which must end well; what it wrote to stderr."""

    def run(*parts: str, agent: Agent | None = None) -> str:
        (tmp_path / "script.py").write_text("".join(parts))
        done = launch(agent, tmp_path / "script.py", DIAGNOSD_SOCKET=str(tmp_path / "absent"))
        assert done.returncode == 0, done.stderr
        return done.stderr

    return run


def test_where_no_thread_can_be_started_the_probe_switches_itself_off_and_the_agent_knows(
    script: Callable[..., str], agent: Agent
) -> None:
    said = script("from diagnosd import probe\n", NO_THREAD, "assert not probe.live().trains()\n", agent=agent)
    assert said.count("\n") == 1
    assert "switched itself off: registering: RuntimeError" in said
    assert agent.hears(lambda agent: agent.points("diagnosd_event"))


def test_no_thread_of_ours_is_left_when_python_ends(script: Callable[..., str], agent: Agent) -> None:
    said = script(
        "import atexit, sys, threading\n"
        "def tell(): print('diagnosd' in [thread.name for thread in threading.enumerate()], file=sys.stderr)\n"
        "atexit.register(tell)\n"  # who is registered first is called last
        "from diagnosd import probe\n"
        "with probe.step(): pass\n"
        "tell()\n",
        agent=agent,
    )
    assert said == "True\nFalse\n"


@torch_is_here
def test_where_no_thread_can_be_started_backward_and_optimizer_run_as_without_us(script: Callable[..., str]) -> None:
    assert "switched itself off" in script(TRAIN, NO_THREAD, "train(); train(); optimizer.step()\n")


@pytest.mark.parametrize("missing", ["nccl", "get_device_properties", "version"])
def test_a_fact_that_a_build_of_pytorch_cannot_tell_takes_no_other_with_it(missing: str) -> None:
    def uuid(_: int) -> SimpleNamespace:
        return SimpleNamespace(uuid="1-2")

    cuda = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "nccl": SimpleNamespace(version=lambda: (2, 20)),
        "get_device_properties": uuid,
    }
    torch = SimpleNamespace(
        __version__="2.9",
        version=None if missing == "version" else SimpleNamespace(cuda="12.4"),
        cuda=SimpleNamespace(**{name: value for name, value in cuda.items() if name != missing}),
        distributed=SimpleNamespace(is_available=lambda: False),
    )
    reporter = Reporter({"DIAGNOSD_JOB": "a-job"}, lambda _: None)
    facts.watch(torch, reporter)
    reporter.identify()
    told = {"version": "cuda=12.4", "nccl": "nccl=2.20", "get_device_properties": "GPU-1-2", "torch": "torch=2.9"}
    said = f"{reporter.facts['versions']},{reporter.facts.get('gpu')}"
    assert [name for name, text in told.items() if text not in said] == [missing]


@torch_is_here
def test_switched_off_while_an_optimizer_walks_through_its_hooks_the_step_goes_on(script: Callable[..., str]) -> None:
    said = script(
        TRAIN,
        "from diagnosd import probe\n"
        "from torch.optim.optimizer import register_optimizer_step_pre_hook\n"
        "train()\n"
        "register_optimizer_step_pre_hook(lambda *_: probe.live().off('a reason'))\n"
        "register_optimizer_step_pre_hook(lambda *_: None)\n"
        "train(); train()\n",
    )
    assert "a reason" in said


@torch_is_here
def test_what_was_patched_is_one_function_by_every_name_and_can_be_pickled(script: Callable[..., str]) -> None:
    script(
        "import pickle, sys, torch, types\n"
        "assert torch.save is torch.serialization.save\n"
        "assert torch.distributed.all_reduce is torch.distributed.distributed_c10d.all_reduce\n"
        "import torch.distributed.checkpoint\n"
        "found = 0\n"
        "for name, module in list(sys.modules.items()):\n"
        "    if name.partition('.')[0] != 'torch':\n"
        "        continue\n"
        "    for function in list(vars(module).values()):\n"
        "        if type(function) is types.FunctionType and 'diagnosd/probe' in function.__code__.co_filename:\n"
        "            assert pickle.loads(pickle.dumps(function)) is function, function\n"
        "            found += 1\n"
        "assert found > 20, found\n"
    )


@torch_is_here
def test_a_model_that_nobody_needs_any_more_is_freed(script: Callable[..., str], tmp_path: Path) -> None:
    said = script(
        "import gc, weakref, torch\n"
        "from diagnosd import probe\n"
        f"torch.distributed.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=0, world_size=1)\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "model(torch.randn(2, 4)).sum().backward()\n"
        "model(torch.randn(2, 4))\n"
        "assert probe.live().on\n"
        "freed = weakref.ref(model)\n"
        "del model\n"
        "gc.collect()\n"
        "assert freed() is None\n"
        "torch.distributed.destroy_process_group()\n"
    )
    assert "diagnosd" not in said


@torch_is_here
def test_of_a_loader_that_is_gone_nothing_is_kept_and_no_other_is_taken_for_it(script: Callable[..., str]) -> None:
    said = script(
        "import torch\n"
        "from diagnosd import probe\n"
        "from torch.utils.data import DataLoader\n"
        "def numbers():\n"
        "    'Of the loaders in the order of their fetches; nobody takes notes of a process that does not train.'\n"
        "    notes = list(probe.live().notes)\n"
        "    probe.live().notes.clear()\n"
        "    kept = [notes[i + 3] for i in range(0, len(notes), 4) if notes[i].__name__ == 'fetch_begins']\n"
        "    return [number for number, in kept]\n"
        "for _ in range(20):\n"
        "    list(DataLoader([1.0]))\n"
        "first = numbers()\n"
        "assert len(first) == 40 and len(set(first)) == 20, first\n"
        "lasting = DataLoader([1.0])\n"
        "list(lasting), list(lasting)\n"
        "assert len(set(numbers())) == 1\n"
        "if __name__ == '__main__':\n"
        "    lasting = DataLoader([1.0], num_workers=1)\n"
        "    for _ in lasting:\n"
        "        assert len([pid for pids in probe.live().workers.values() for pid in pids]) == 1\n"
        "    assert not probe.live().workers\n"
    )
    assert "diagnosd" not in said
