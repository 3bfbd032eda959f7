"""Fixtures of the probe's tests: an agent that really listens, scripts that are really run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from observed import PATH, Agent, Launch


@pytest.fixture(scope="module")
def start_agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Agent]]:
    agents: list[Agent] = []

    def start(path: Path | None = None) -> Agent:
        agents.append(Agent(path or tmp_path_factory.mktemp("agent") / "probe.sock"))
        return agents[-1]

    yield start
    for agent in agents:
        agent.die()


@pytest.fixture
def agent(start_agent: Callable[[], Agent]) -> Agent:
    return start_agent()


@pytest.fixture(scope="module")
def launch() -> Launch:
    """Run a script as `diagnosd run` would: the probe's folder on PYTHONPATH, a job's name, the agent's socket."""

    def run(
        agent: Agent | None, *command: object, launcher: Sequence[str] = (sys.executable,), **environ: str
    ) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "PYTHONPATH": str(PATH),
            "DIAGNOSD_JOB": "a-job",
            "OMP_NUM_THREADS": "1",
            **environ,
        }
        if agent is not None:
            environment["DIAGNOSD_SOCKET"] = str(agent.path)
        done = subprocess.run(
            [*launcher, *map(str, command)], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        if agent is not None:
            agent.catches_up()
        print(done.stdout, done.stderr, sep="\n")  # pytest shows it where a test fails
        return done

    return run
