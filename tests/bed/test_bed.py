"""Real training with real faults: the heart causes, a straggler and two healthy ones. `make bed` runs all."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .machine import ROOT

CANNOT_RUN = 3


@pytest.mark.bed
@pytest.mark.parametrize(
    "scenario",
    ["throttled_port", "loader_slow", "wrong_interface", "cpu_quota", "healthy_checkpoint", "healthy_batch_change"],
)
def test_what_was_done_is_told_in_time_and_nothing_else(scenario: str) -> None:
    command = [sys.executable, "-m", "tests.bed", scenario]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == CANNOT_RUN:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
