"""Training scripts that know nothing of the probe, on real PyTorch: torchrun, gloo, a loader's workers."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from observed import SCRIPTS, Agent, Launch

if importlib.util.find_spec("torch") is None:
    pytest.skip("PyTorch is not installed", allow_module_level=True)

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SECONDS, PACE = 0.3, 0.055
STEPS, ACCUMULATED = 20, 3

Run = tuple[Agent, "subprocess.CompletedProcess[str]"]


def of_two_ranks(agent: Agent, launch: Launch, script: str, *arguments: object) -> Agent:
    """The agent, once it has heard a script that ends well and whose user hears nothing of us."""
    done = launch(agent, SCRIPTS / script, *arguments, launcher=TORCHRUN)
    assert done.returncode == 0, done.stderr
    assert "diagnosd" not in done.stderr
    return agent


@pytest.fixture(scope="module")
def ddp(start_agent: Callable[[], Agent], launch: Launch) -> Agent:
    return of_two_ranks(start_agent(), launch, "ddp.py")


def longest(steps: list[dict[str, Any]], phase: str) -> int:
    return int(max(steps, key=lambda step: step.get(phase, 0.0))["step"])


def test_only_the_two_ranks_speak(ddp: Agent) -> None:
    """Not torchrun, not the workers of the loaders."""
    assert sorted((hello.rank, hello.local_rank) for hello, *_ in ddp.connections) == [(0, 0), (1, 1)]


def test_every_step_of_every_rank_is_told_once_the_last_too(ddp: Agent) -> None:
    for rank in range(2):
        assert [step["step"] for step in ddp.steps(rank)] == list(range(STEPS + ACCUMULATED))


def test_the_phases_add_up_to_the_step(ddp: Agent) -> None:
    phases = ("data_wait", "forward", "backward", "optimizer", "comm", "checkpoint", "eval", "other")
    for step in ddp.steps():
        assert sum(step.get(phase, 0.0) for phase in phases) == pytest.approx(step["duration"], abs=1e-7)
        assert step["clock"] == "host"


def test_a_slow_backward_is_in_its_own_step_and_the_other_rank_waits_in_it(ddp: Agent) -> None:
    guilty, victim = ddp.steps(1), ddp.steps(0)
    assert longest(guilty[:STEPS], "backward") == 12
    assert guilty[12]["backward"] >= SECONDS > guilty[12]["comm"]
    assert victim[12]["comm"] >= SECONDS * 0.9 > victim[12]["backward"]


def test_the_rank_that_is_waited_for_enters_the_reduction_last(ddp: Agent) -> None:
    guilty, victim = ddp.steps(1)[12], ddp.steps(0)[12]
    assert guilty["sync_enter"] - victim["sync_enter"] > SECONDS * 0.9e9
    assert abs(guilty["sync_exit"] - victim["sync_exit"]) < SECONDS * 0.5e9


def test_the_gradients_bytes_and_group_are_told(ddp: Agent) -> None:
    for step in ddp.steps():
        if step["step"] != 15:
            assert (step["sync_bytes"], step["sync_group"]) == (4 * (128 * 128 + 128) * 4, "world:0")


def test_a_checkpoint_is_in_the_step_after_the_update_that_it_follows(ddp: Agent) -> None:
    saved = [step for step in ddp.steps(0) if "checkpoint" in step]
    assert [step["step"] for step in saved] == [5]
    assert saved[0]["checkpoint"] >= SECONDS


def test_an_evaluation_is_in_the_step_after_the_update_that_it_follows(ddp: Agent) -> None:
    for rank in range(2):
        evaluated = [step for step in ddp.steps(rank) if "eval" in step]
        assert [step["step"] for step in evaluated] == [8]
        assert evaluated[0]["eval"] >= SECONDS
        assert evaluated[0]["samples"] == 8


def test_a_slow_batch_is_waited_for_on_the_rank_that_loads_it(ddp: Agent) -> None:
    assert longest(ddp.steps(0)[1:STEPS], "data_wait") == 19


def test_an_empty_queue_is_told_as_empty_and_a_full_one_as_full(ddp: Agent) -> None:
    steps = ddp.steps(0)
    assert steps[19]["queue"] == 0
    assert steps[12]["queue"] == 2  # one worker, two batches prefetched, and the victim's step is long
    assert (steps[12]["queue_size"], steps[12]["workers"]) == (2, 1)


def test_samples_are_the_rows_of_the_batch(ddp: Agent) -> None:
    assert [step["samples"] for step in ddp.steps(0)[:STEPS]] == [8] * STEPS


def test_a_collective_of_the_script_is_communication_whether_called_or_waited_for(ddp: Agent) -> None:
    waited = ddp.steps(0)[15]
    assert waited["comm"] >= SECONDS * 0.9
    assert waited["sync_bytes"] == 400_000
    assert waited["sync_exit"] - waited["sync_enter"] >= SECONDS * 0.9e9


def test_accumulated_backwards_are_one_step_and_their_compute_is_no_communication(ddp: Agent) -> None:
    guilty, victim = ddp.steps(1)[STEPS + 1], ddp.steps(0)[STEPS + 1]
    assert guilty["backward"] >= SECONDS
    assert victim["comm"] >= SECONDS * 0.8
    assert victim["backward"] < SECONDS


def test_the_group_is_described_by_each_rank(ddp: Agent) -> None:
    for rank in range(2):
        groups = ddp.points("diagnosd_group", rank)
        assert groups
        for group in groups:
            assert (group.tags, group.fields) == ({"group": "world:0"}, {"members": "0-1", "backend": "gloo"})


def test_the_ranks_tell_what_they_are(ddp: Agent) -> None:
    for connection in ddp.connections:
        hello = connection[0]
        assert (hello.world, hello.attempt) == (2, 0)  # type: ignore[union-attr]
        assert hello.fields["loader"] == "torch"
        assert "torch=" in str(hello.fields["versions"])
    assert any("addresses" in hello.fields for hello in ddp.hellos)


def test_the_ranks_connections_are_told(ddp: Agent) -> None:
    assert ddp.points("diagnosd_socket")


@pytest.fixture(scope="module")
def buffers(start_agent: Callable[[], Agent], launch: Launch) -> Agent:
    return of_two_ranks(start_agent(), launch, "buffers.py")


@pytest.mark.parametrize(("step", "late"), [(6, 1), (9, 0)])
def test_who_waits_for_a_late_rank_where_buffers_are_broadcast_does_not_seem_to_compute(
    buffers: Agent, step: int, late: int
) -> None:
    guilty, victim = buffers.steps(late)[step], buffers.steps(1 - late)[step]
    assert victim["comm"] >= (SECONDS - PACE) * 0.9
    assert max(victim["forward"], guilty["forward"], guilty["comm"]) < victim["comm"] * 0.5
    assert guilty["other"] >= SECONDS


def test_the_gradients_are_told_as_the_largest_collective_unless_the_buffers_are_larger(buffers: Agent) -> None:
    for rank in range(2):
        told = [step["sync_bytes"] for step in buffers.steps(rank)]
        assert told == [4 * (64 * 64 + 64 + 2 * 64)] * 12 + [100_000] * 3


@pytest.fixture(scope="module")
def short(start_agent: Callable[[], Agent], launch: Launch) -> Agent:
    return of_two_ranks(start_agent(), launch, "short.py")


def test_a_small_collective_is_not_told_as_the_largest_where_the_reduction_was_not_timed(short: Agent) -> None:
    assert {step.get("sync_bytes") for step in short.steps()} == {None, 4 * (64 * 64 + 64)}


def test_of_short_steps_two_in_a_row_are_timed_of_every_twenty_and_the_same_on_all_ranks(short: Agent) -> None:
    first, second = ([step["step"] for step in short.steps(rank) if "sync_enter" in step] for rank in range(2))
    assert first == second
    later = [number for number in first if number >= 110]  # the probe knows what a step takes
    assert [b - a for a, b in pairwise(later)] == [1, 19, 1, 19, 1]


def test_where_ddp_logs_no_times_a_hook_takes_them_and_changes_no_gradient(launch: Launch, tmp_path: Path) -> None:
    with ThreadPoolExecutor() as ranks:
        done = list(ranks.map(lambda rank: launch(None, SCRIPTS / "hooked.py", tmp_path, rank), range(2)))
    assert [each.stdout for each in done] == ["same\n"] * 2


@pytest.fixture(scope="module")
def fsdp(start_agent: Callable[[], Agent], launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Agent:
    return of_two_ranks(start_agent(), launch, "fsdp.py", tmp_path_factory.mktemp("checkpoint"))


def test_a_sharded_model_waits_in_its_collectives_for_a_slow_rank(fsdp: Agent) -> None:
    guilty, victim = fsdp.steps(1)[5], fsdp.steps(0)[5]
    assert victim["comm"] >= SECONDS * 0.9
    assert guilty["comm"] < victim["comm"] * 0.5


def test_the_largest_collective_of_a_sharded_model_is_told(fsdp: Agent) -> None:
    largest = 4 * (128 * 128 + 128)  # one block's parameters, gathered
    for step in fsdp.steps():
        assert step["sync_bytes"] == largest
        assert step["sync_enter"] < step["sync_exit"]


def test_a_distributed_checkpoint_is_in_the_step_after_the_update_that_it_follows(fsdp: Agent) -> None:
    for rank in range(2):
        assert [step["step"] for step in fsdp.steps(rank) if "checkpoint" in step] == [7]


def test_graphs_and_trained_parameters_are_the_same_with_and_without_the_probe(agent: Agent, launch: Launch) -> None:
    """And there are no more breaks between the graphs."""
    outputs = [
        launch(agent, SCRIPTS / "compiled.py", "copies", DIAGNOSD_JOB=job).stdout.splitlines() for job in ("", "a-job")
    ]
    breaks = [[int(line.split()[-2]) for line in output if line.endswith("breaks")] for output in outputs]
    graphs = [[line for line in output if not line.endswith("breaks")] for output in outputs]
    assert len(breaks[0]) == 7
    assert all(with_ <= without for without, with_ in zip(*breaks, strict=True))
    assert graphs[0] == graphs[1]
    assert len(agent.connections) == 1


def test_while_a_graph_is_made_it_is_known_and_a_step_in_which_one_was_says_so(
    agent: Agent, launch: Launch, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from diagnosd import probe\n"
        "def compiles():\n"
        "    probe.live().play()\n"
        "    return probe.live().steps.compiling\n"
        "def backend(graph, inputs):\n"
        "    assert compiles()\n"
        "    return graph.forward\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "compiled = torch.compile(model, backend=backend)\n"
        "for step in range(6):\n"
        "    used = compiled if step > 2 else model\n"
        "    used(torch.randn(2, 4)).sum().backward()\n"
        "    optimizer.step()\n"
        "    assert not compiles()\n"
    )
    assert launch(agent, script).returncode == 0
    assert [step["kind"] for step in agent.steps()] == ["warmup", "train", "train", "compile", "train", "train"]


@pytest.fixture(scope="module")
def loops(start_agent: Callable[[], Agent], launch: Launch) -> dict[str, list[dict[str, Any]]]:
    """Steps by the name of the loop."""
    agent = start_agent()
    done = launch(agent, SCRIPTS / "loops.py", DIAGNOSD_JOB="launcher")
    assert done.returncode == 0, done.stderr
    assert "diagnosd" not in done.stderr
    return {
        connection[0].job: [p.fields for p in connection if getattr(p, "measurement", "") == "diagnosd_step"]  # type: ignore[union-attr]
        for connection in agent.connections
    }


@pytest.mark.parametrize("loop", ["plain", "gan", "lbfgs", "skipping", "in_backward"])
def test_a_step_a_fetch(loops: dict[str, list[dict[str, Any]]], loop: str) -> None:
    assert [step["samples"] for step in loops[loop]] == [8] * 6


def test_a_process_that_loads_for_itself_tells_that_it_has_no_workers(loops: dict[str, list[dict[str, Any]]]) -> None:
    for step in loops["plain"]:
        assert (step["workers"], step["queue_size"]) == (0, 0)
        assert "queue" not in step


def test_a_step_an_update_of_accumulated_gradients(loops: dict[str, list[dict[str, Any]]]) -> None:
    assert [step.get("samples") for step in loops["accumulating"]][-5:] == [48] * 5


def test_an_optimizer_that_raises_costs_one_step_its_end(loops: dict[str, list[dict[str, Any]]]) -> None:
    assert [step["samples"] for step in loops["failing_optimizer"]] == [8, 8, 16, 8, 8]
    assert len(loops["failing_without_loader"]) == 5


def test_an_optimizer_that_raises_inside_a_scaler_ends_its_step(loops: dict[str, list[dict[str, Any]]]) -> None:
    assert len(loops["failing_in_scaler"]) == 6


def test_an_optimizer_that_raises_and_is_called_again_ends_its_step(loops: dict[str, list[dict[str, Any]]]) -> None:
    assert [step["samples"] for step in loops["trying_again"]] == [8] * 6


def test_an_optimizer_that_calls_its_parents_step_makes_one_step(loops: dict[str, list[dict[str, Any]]]) -> None:
    assert [step["samples"] for step in loops["inheriting"]] == [8] * 6


def test_a_step_a_fetch_where_no_optimizer_is_known(loops: dict[str, list[dict[str, Any]]]) -> None:
    assert [step["samples"] for step in loops["own_optimizer"]] == [24, 8, 8, 8]


def test_who_does_not_train_does_not_register(loops: dict[str, list[dict[str, Any]]]) -> None:
    assert "inference" not in loops
    assert "launcher" not in loops
