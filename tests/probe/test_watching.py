"""What is told of a rank while it does nothing that could be noted: the thread's look, taken by hand."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from observed import Agent, no_more_files

from diagnosd.probe.reporter import Reporter, clock
from diagnosd.probe.sender import RECONNECT_SECONDS
from diagnosd.probe.sockets import Fields, Peers
from diagnosd.probe.steps import BACKWARD, COMM, Steps, Sync
from diagnosd.probe.watch import HANG_SECONDS, HANG_STEPS, Watch


@pytest.fixture
def reporter(agent: Agent) -> Iterator[Reporter]:
    reporter = Reporter({"DIAGNOSD_SOCKET": str(agent.path), "DIAGNOSD_JOB": "a-job"}, lambda _: None)
    reporter.identify()
    with contextlib.closing(reporter.sender):
        yield reporter


def looks(reporter: Reporter, agent: Agent, *, times: int = 1, hang_seconds: float = HANG_SECONDS) -> list[Any]:
    """The fields of that many looks in a row."""
    watch = Watch(reporter, main=threading.get_native_id(), hang_seconds=hang_seconds)
    for _ in range(times):
        reporter.play()
        watch._look()
    return told(reporter, agent, times)


def told(reporter: Reporter, agent: Agent, times: int = 1) -> list[Any]:
    reporter.play()
    reporter.sender.flush()
    assert agent.hears(lambda agent: len(agent.points("diagnosd_process")) == times)
    return [message.fields for message in agent.points("diagnosd_process")]


def test_the_phase_that_lasts_is_told_with_its_step(reporter: Reporter, agent: Agent) -> None:
    reporter.notes.extend((Steps.backward_begins, 0, clock() - 5_000_000_000, ()))
    (fields,) = looks(reporter, agent)
    assert (fields["phase"], fields["step"]) == ("backward", 0)
    assert 5 <= fields["phase_seconds"] < 65
    assert "stack" not in fields


def test_in_a_collective_its_group_and_count_are_told(reporter: Reporter, agent: Agent) -> None:
    reporter.collective = ("tp:4", 17)
    reporter.notes.extend((Steps.enter, 0, clock(), (COMM,)))
    (fields,) = looks(reporter, agent)
    assert (fields["phase"], fields["group"], fields["seq"]) == ("collective", "tp:4", 17)


def test_while_a_graph_is_compiled_the_phase_is_compile_and_then_again_what_needed_it(
    reporter: Reporter, agent: Agent
) -> None:
    now = clock()
    reporter.notes.extend((Steps.backward_begins, 0, now - 9_000_000_000, ()))
    reporter.notes.extend((Steps.compile_begins, 0, now - 5_000_000_000, ()))
    watch = Watch(reporter, main=threading.get_native_id())
    reporter.play()
    watch._look()
    reporter.notes.extend((Steps.compile_ends, 0, clock(), ()))
    reporter.play()
    watch._look()
    compiling, after = told(reporter, agent, times=2)
    assert (compiling["phase"], after["phase"]) == ("compile", "backward")
    assert 5 <= compiling["phase_seconds"] < 65


def test_a_phase_that_lasts_too_long_shows_its_stack_once(reporter: Reporter, agent: Agent) -> None:
    reporter.notes.extend((Steps.enter, 0, clock() - 1_000_000_000, (BACKWARD,)))
    first, second = looks(reporter, agent, times=2, hang_seconds=0.5)
    assert "test_a_phase_that_lasts_too_long_shows_its_stack_once test_watching.py:" in first["stack"]
    assert "stack" not in second


def test_a_look_at_which_no_file_can_be_opened_tells_what_needs_none(reporter: Reporter, agent: Agent) -> None:
    watch = Watch(reporter, main=threading.get_native_id())
    with no_more_files():
        watch._look()
    (fields,) = told(reporter, agent)
    assert set(fields) == {"gc_seconds"}
    assert reporter.on


def test_a_thread_may_have_a_name_that_is_no_text(reporter: Reporter, agent: Agent) -> None:
    name = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
    usual = name.read_bytes()
    name.write_bytes(b"\xff\xfe")
    try:
        (fields,) = looks(reporter, agent)
    finally:
        name.write_bytes(usual)
    assert "rss" in fields


class Odd(Peers):
    """As on a machine that we know nothing of."""

    def read(self) -> dict[str, Fields]:
        raise KeyError("tcp_info")


def test_a_source_that_fails_takes_no_other_with_it_and_is_told_once(reporter: Reporter, agent: Agent) -> None:
    watch = Watch(reporter, main=threading.get_native_id())
    watch._peers = Odd()
    watch._look()
    watch._look()
    assert all("rss" in fields for fields in told(reporter, agent, times=2))
    (event,) = agent.points("diagnosd_event")
    assert "the connections cannot be read: KeyError('tcp_info')" in str(event.fields["text"])
    assert reporter.on


@pytest.mark.parametrize(
    ("phase_seconds", "step_seconds", "expected"),
    [(59, 0.1, False), (61, 0.1, True), (61, 30.0, False), (HANG_STEPS * 30.0 + 1, 30.0, True)],
)
def test_too_long_is_a_minute_and_ten_steps(
    reporter: Reporter, phase_seconds: float, step_seconds: float, expected: bool
) -> None:
    watch = Watch(reporter, main=threading.get_native_id())
    assert watch.hangs(phase_seconds, step_seconds) is expected


def test_before_anything_was_noted_no_phase_is_told(reporter: Reporter, agent: Agent) -> None:
    (fields,) = looks(reporter, agent)
    assert "phase" not in fields


def test_a_probe_that_is_off_still_tells_how_the_process_fares(
    reporter: Reporter, agent: Agent, capsys: pytest.CaptureFixture[str]
) -> None:
    reporter.off("a reason")
    (fields,) = looks(reporter, agent)
    assert "rss" in fields
    assert "phase" not in fields
    assert capsys.readouterr().err.endswith("switched itself off: a reason\n")


def test_of_more_notes_than_are_kept_the_probe_makes_no_steps(
    reporter: Reporter, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(60_000):
        reporter.notes.extend((Steps.leave, 0, 1, ()))
    reporter.play()
    assert not reporter.on
    assert "kept from running" in capsys.readouterr().err


def test_a_note_that_makes_no_sense_switches_the_probe_off(
    reporter: Reporter, capsys: pytest.CaptureFixture[str]
) -> None:
    reporter.notes.extend((Steps.leave, 0, 1, ()))
    reporter.play()
    assert not reporter.on
    assert "accounting" in capsys.readouterr().err


def test_a_new_agent_is_told_the_groups_again(
    reporter: Reporter, agent: Agent, start_agent: Callable[..., Agent]
) -> None:
    reporter.group("tp:4", {"members": "4-7", "backend": "nccl"})
    for _ in range(2):
        reporter.play()
        reporter.sender.flush()
    assert agent.hears(lambda agent: agent.points("diagnosd_group"))
    agent.die()
    reporter.event("telemetry_gap", "finds out that nobody listens")
    reporter.play()
    reporter.sender.flush()
    second = start_agent(agent.path)
    reporter.sender._tried -= RECONNECT_SECONDS
    reporter.sender.flush()
    reporter.play()
    reporter.sender.flush()
    assert second.hears(lambda second: [p.tags for p in second.points("diagnosd_group")] == [{"group": "tp:4"}])


def steps(reporter: Reporter, costs: list[int], timed: Callable[[int], bool] = lambda _: True) -> None:
    """Of 28 ms, with what each costs the training thread."""
    for number, cost in enumerate(costs):
        t = (number + 1) * 28_000_000
        notes = reporter.notes.extend
        notes((Steps.backward_begins, 0, t - 20_000_000, ()))
        notes((Steps.backward_ends, cost, t - 10_000_000, (None, timed(number))))
        notes((Steps.optimizer_begins, 0, t - 5_000_000, ("sgd",)))
        notes((Steps.optimizer_ends, 0, t, ("sgd",)))
    reporter.play()


def test_where_a_device_runs_the_model_no_collective_of_the_host_is_told_as_the_steps_largest(
    reporter: Reporter, agent: Agent
) -> None:
    for kind in ("", "cuda"):
        reporter.device = kind
        t = clock()
        for note in (
            (Steps.backward_begins, 0, t, ()),
            (Steps.enter, 0, t + 1, (COMM,)),
            (Steps.collective_ends, 0, t + 2, (Sync(8, t + 1, t + 2, "world:0"),)),
            (Steps.backward_ends, 0, t + 3, ()),
            (Steps.optimizer_begins, 0, t + 4, ("sgd",)),
            (Steps.optimizer_ends, 0, t + 5, ("sgd",)),
            (Steps.end_of_pending, 0, t + 5, ()),
        ):
            reporter.notes.extend(note)
        reporter.play()
        reporter.sender.flush()
    assert agent.hears(lambda agent: len(agent.steps()) == 2)
    assert [step.get("sync_bytes") for step in agent.steps()] == [8, None]


@pytest.mark.parametrize("path", ["/secret/run", "~/secret/run", "logs/secret/%h", "file:///secret/run"])
def test_of_the_environment_no_path_is_told(path: str) -> None:
    reporter = Reporter({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": path}, lambda _: None)
    reporter.identify()
    assert json.loads(str(reporter.facts["env"])) == {"NCCL_DEBUG": "INFO"}


def test_a_core_that_is_lost_while_the_probe_is_at_work_is_not_the_probes_cost(reporter: Reporter) -> None:
    steps(reporter, [4_000_000 if number % 8 == 0 else 50_000 for number in range(110)])
    assert reporter.on


@pytest.mark.parametrize(
    ("costs", "rate"),
    [([200_000] * 110, 1), ([2_000_000 if number % 10 == 0 else 20_000 for number in range(110)], 10)],
)
def test_what_the_probe_takes_in_every_step_or_in_those_that_ddp_takes_stock_of_switches_it_off(
    reporter: Reporter, capsys: pytest.CaptureFixture[str], costs: list[int], rate: int
) -> None:
    steps(reporter, costs, lambda number: number % rate == 0)
    assert not reporter.on
    assert "of the time, more than 0.4 %" in capsys.readouterr().err
