"""Which job, attempt and rank an environment tells of."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from diagnosd.probe.identity import Rank, attempt_of, boot_id, job_name, launcher_pid, rank_of

SLURM = {"SLURM_JOB_ID": "17", "SLURM_CLUSTER_NAME": "east"}


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        ({"DIAGNOSD_JOB": "mine", **SLURM, "TORCHELASTIC_RUN_ID": "7f"}, "mine"),
        (SLURM | {"TORCHELASTIC_RUN_ID": "7f"}, "slurm-east-17"),
        (SLURM | {"SLURM_STEP_ID": "2"}, "slurm-east-17.2"),
        (SLURM | {"SLURM_STEP_ID": str(0xFFFFFFFB)}, "slurm-east-17"),  # the batch script is no step
        (SLURM | {"SLURM_ARRAY_JOB_ID": "15", "SLURM_ARRAY_TASK_ID": "3", "SLURM_STEP_ID": "0"}, "slurm-east-15_3.0"),
        ({"TORCHELASTIC_RUN_ID": "7f"}, "7f"),
        ({"TORCHELASTIC_RUN_ID": "none", "DIAGNOSD_HOST": "n01"}, f"n01-{boot_id().replace('-', '')[:8]}-99"),
        ({"DIAGNOSD_JOB": " two\nlines "}, "two?lines"),
        ({"DIAGNOSD_JOB": "x" * 300}, "x" * 256),
    ],
)
def test_the_first_that_is_there_names_the_job(environ: dict[str, str], job: str) -> None:
    assert job_name(environ, launcher=99) == job


def test_in_kubernetes_the_owner_of_the_pod_names_the_job(tmp_path: Path) -> None:
    labels = tmp_path / "labels"
    labels.write_text('app="x"\nbatch.kubernetes.io/controller-uid="6d0c-11"\n')
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "TORCHELASTIC_RUN_ID": "7f"}
    assert job_name(environ, 99, str(labels)) == "6d0c-11"
    assert job_name(environ, 99, str(tmp_path / "absent")) == "7f"


@pytest.mark.parametrize(
    ("environ", "attempt"),
    [
        ({}, None),
        ({"TORCHELASTIC_RESTART_COUNT": "0"}, 0),
        ({"SLURM_RESTART_COUNT": "2", "TORCHELASTIC_RESTART_COUNT": "1"}, 3),
        ({"DIAGNOSD_ATTEMPT": "7", "SLURM_RESTART_COUNT": "2"}, 7),
    ],
)
def test_restarts_add_up_to_the_attempt(environ: dict[str, str], attempt: int | None) -> None:
    assert attempt_of(environ) == attempt


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({}, Rank(0, 1, None, None)),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, Rank(3, 8, 1, None)),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}, Rank(3, 8, 1, None)),
        ({"RANK": "0", "SLURM_PROCID": "5", "WORLD_SIZE": "2"}, Rank(0, 2, None, None)),  # torchrun inside a Slurm step
        ({"RANK": "3"}, Rank(3, 4, None, None)),
        ({"RANK": "three"}, Rank(0, 1, None, None)),
        ({"RANK": "9" * 5000, "WORLD_SIZE": "9" * 19, "LOCAL_RANK": "1" * 18}, Rank(0, 1, int("1" * 18), None)),
    ],
)
def test_the_place_of_a_process_in_its_job(environ: dict[str, str], rank: Rank) -> None:
    assert rank_of(environ) == rank


def test_the_launcher_is_the_parent_where_there_is_one_and_else_the_process_itself() -> None:
    assert launcher_pid({"RANK": "0"}) == os.getppid()
    assert launcher_pid({}) == os.getpid()
    assert launcher_pid({}, child_of=5) == 5
