"""`make demo` shows what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PATIENCE_S = 60.0  # make demo is over within two minutes, a fresh .venv included


def commands() -> list[str]:
    """What `make demo` runs of our own, once its .venv is there."""
    told = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [line for line in told.splitlines() if line.startswith(".venv/bin/diagnosd ")]


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The live part, as make runs it, by this Python; and a recording of it."""
    (command,) = (line for line in commands() if " run " in line)
    recording = tmp_path_factory.mktemp("demo") / "demo.lp.zst"
    here = command.replace(".venv/bin/", f"{Path(sys.executable).parent}/").replace(
        " run ", f" run --record {recording} "
    )
    done = subprocess.run(here.split(), capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    return done, recording


def diagnoses(recording: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "diagnosd", "replay", str(recording), "--output", "json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [document for document in map(json.loads, done.stdout.splitlines()) if document["type"] == "diagnosis"]


def test_the_demo_replays_a_recording_that_is_shipped_and_then_watches_a_live_job() -> None:
    replay, run = commands()
    assert (ROOT / replay.split()[-1]).is_dir()
    assert run.endswith("-m diagnosd.demo")


def test_the_live_job_ends_well_and_its_verdict_is_starvation_of_the_whole_job(
    lived: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, recording = lived
    assert done.returncode == 0, done.stderr
    told = [document for document in diagnoses(recording) if "detected" in document]
    assert [(document["cause"], document["locus"]) for document in told] == [("data_starvation", ["job"])]


def test_the_verdict_is_told_while_the_job_runs_and_when_it_ends(
    lived: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    changes, _, verdict = lived[0].stderr.partition("\nData starvation")
    assert changes.startswith("diagnosd: confirmed: Data starvation")
    assert verdict
