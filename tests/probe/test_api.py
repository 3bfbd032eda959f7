"""The API of a script that names its own steps, without PyTorch."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from observed import SCRIPTS, Agent, Launch

from diagnosd.probe.message import DEFAULT_SOCKET


def pythons() -> list[str]:
    """The one at hand, and 3.8, the oldest that the probe serves, where there is one: the others lie between."""
    found = [
        *map(str, Path("~/.pyenv/versions").expanduser().glob("3.8.*/bin/python")),
        shutil.which("python3.8") or "",
    ]
    return [sys.executable, *itertools.islice(filter(_runs, found), 1)]


def _runs(python: str) -> bool:
    return bool(python) and not subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode


@pytest.fixture(scope="module", params=pythons())
def run(
    request: pytest.FixtureRequest, start_agent: Callable[[], Agent], launch: Launch
) -> tuple[Agent, subprocess.CompletedProcess[str]]:
    agent = start_agent()
    return agent, launch(agent, SCRIPTS / "api.py", 20, 0.005, launcher=[request.param])


def test_the_script_runs_as_without_us(run: tuple[Agent, subprocess.CompletedProcess[str]]) -> None:
    _, done = run
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("trained")


def test_every_step_is_told_by_the_number_that_the_script_gave_it(
    run: tuple[Agent, subprocess.CompletedProcess[str]],
) -> None:
    assert [step["step"] for step in run[0].steps()] == list(range(1000, 1020))


def test_a_step_has_the_phases_that_the_script_named(run: tuple[Agent, subprocess.CompletedProcess[str]]) -> None:
    assert run[0].steps()
    for step in run[0].steps():
        assert step["data_wait"] >= 0.005
        assert step["forward"] >= 0.010
        assert step["comm"] >= 0.005
        told = sum(step[phase] for phase in ("data_wait", "forward", "comm", "other"))
        assert told == pytest.approx(step["duration"], abs=1e-8)
        assert (step["samples"], step["tokens"]) == (8, 100)


def test_the_collective_of_a_step_lies_within_it(run: tuple[Agent, subprocess.CompletedProcess[str]]) -> None:
    assert run[0].steps()
    for message in run[0].points("diagnosd_step"):
        step = message.fields
        began = message.time - float(step["duration"]) * 1e9
        assert began < step["sync_enter"] < step["sync_exit"] < message.time
        assert (step["sync_bytes"], step["sync_group"]) == (4096, "world:0")


def test_the_rank_introduces_itself(run: tuple[Agent, subprocess.CompletedProcess[str]]) -> None:
    hello = run[0].hellos[-1]
    assert (hello.job, hello.rank, hello.world, hello.fields["loader"]) == ("a-job", 0, 1, "api")


def test_how_the_process_fares_is_told(run: tuple[Agent, subprocess.CompletedProcess[str]]) -> None:
    message, *_ = run[0].points("diagnosd_process")
    assert {"rss", "state", "read_bytes", "gc_seconds"} <= set(message.fields)


@pytest.mark.parametrize("way", ["spawn", "fork"])
def test_spawned_and_forked_ranks_tell_all_their_steps_and_their_own_children_none(
    agent: Agent, launch: Launch, way: str
) -> None:
    done = launch(agent, SCRIPTS / "spawned.py", way)
    assert (done.returncode, done.stderr) == (0, "")
    assert agent.hears(lambda agent: len(agent.steps()) == 20)
    assert [step["step"] for step in agent.steps(0)] == list(range(10))
    assert {(hello.rank, hello.world) for hello in agent.hellos} == {(0, 2), (1, 2)}
    assert len(agent.connections) == 2


def test_ranks_of_one_launcher_name_the_same_job_where_nothing_names_it(agent: Agent, launch: Launch) -> None:
    launch(agent, SCRIPTS / "spawned.py", "spawn", DIAGNOSD_JOB="")
    assert len({hello.job for hello in agent.hellos}) == 1


def test_steps_too_short_for_the_probe_switch_it_off_and_it_says_so_once(agent: Agent, launch: Launch) -> None:
    done = launch(agent, SCRIPTS / "api.py", 1000, 0.0)
    assert done.returncode == 0
    assert done.stderr.count("switched itself off") == 1
    assert agent.hears(lambda agent: agent.points("diagnosd_event"))
    (event,) = agent.points("diagnosd_event")
    assert event.tags == {"kind": "telemetry_gap", "subject": "rank:0"}
    assert "probe off" in str(event.fields["text"])


def test_without_an_agent_the_script_runs_as_without_us(launch: Launch, tmp_path: Path) -> None:
    done = launch(None, SCRIPTS / "api.py", 5, 0.001, DIAGNOSD_SOCKET=str(tmp_path / "absent"))
    assert (done.returncode, done.stderr) == (0, "")


def test_switched_off_it_says_nothing(agent: Agent, launch: Launch) -> None:
    done = launch(agent, SCRIPTS / "api.py", 5, 0.001, DIAGNOSD="off")
    assert (done.returncode, done.stderr) == (0, "")
    assert agent.connections == []


def test_a_phase_that_is_none_is_complained_of_and_does_no_harm(launch: Launch, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        'from diagnosd import probe\nfor _ in range(2):\n    with probe.phase("fetch"):\n        print("in")\n'
    )
    done = launch(None, script)
    assert done.stdout == "in\nin\n"
    assert done.stderr.count("'fetch' is no phase") == 1


COUNTED = """
from diagnosd import probe
class Count:
    def __index__(self):
        return 8
class OnDevice(Count):
    class device:
        type = "cuda"
    def __index__(self):
        raise SystemExit("waited for the device")
for step in range(2):
    with probe.step(Count(), samples=Count(), tokens=object()), probe.phase("comm", bytes=OnDevice()):
        probe.samples("three")
        probe.tokens(OnDevice())
        probe.samples(OnDevice())
with probe.step(9, samples=Count()), probe.phase(["comm"]):
    pass
"""


def test_a_count_may_be_of_any_integer_type_and_what_is_none_is_complained_of_once_and_left_out(
    agent: Agent, launch: Launch, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(COUNTED)
    done = launch(agent, tmp_path / "script.py")
    assert done.returncode == 0
    assert sorted(line.split()[1] for line in done.stderr.splitlines()) == ["['comm']", "bytes", "samples", "tokens"]
    assert agent.hears(lambda agent: len(agent.steps()) == 3)
    assert [(step["step"], step.get("samples"), step.get("tokens")) for step in agent.steps()] == [
        (8, 8, None),
        (8, 8, None),
        (9, 8, None),
    ]


def test_the_scripts_own_errors_pass_through(launch: Launch, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        'from diagnosd import probe\nwith probe.step(), probe.phase("forward"):\n    raise KeyError("mine")\n'
    )
    done = launch(None, script)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("KeyError: 'mine'")


def test_two_jobs_of_a_node_share_its_socket(agent: Agent, launch: Launch) -> None:
    for job in ("one", "two"):
        launch(agent, SCRIPTS / "api.py", 2, 0.001, DIAGNOSD_JOB=job)
    assert {hello.job for hello in agent.hellos} == {"one", "two"}


def test_the_agents_usual_socket_is_the_default() -> None:
    assert Path(DEFAULT_SOCKET).is_absolute()
