"""What counts as having been told: the right cause, at the right place, in time, once, and no other."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from .cases import truth
from .judge import judge
from .run import Run
from .scenarios import SCENARIOS

ONSET = 1_796_088_819.4
FAULT = Run(SCENARIOS["throttled_port"], ranks=2, onset=ONSET, cleared=ONSET + 15, ended=ONSET + 25)
HEALTHY = Run(SCENARIOS["healthy_checkpoint"], ranks=2, ended=ONSET)


def diagnosis(**other: Any) -> dict[str, Any]:
    """What should be said of FAULT, but for what is `other`."""
    right = {
        "cause": "network_congestion",
        "subtype": "bandwidth",
        "locus": ["nic:n1/eth0", "host:n1"],
        "state": "resolved",
        "detected": at(6),
        "end": at(16),
        "text": "the path carries less, on the way n2 -> n1",
    }
    return {key: value for key, value in {**right, **other}.items() if value is not None}


def at(seconds: float) -> str:
    return datetime.fromtimestamp(ONSET + seconds, UTC).isoformat()


def test_the_right_diagnosis_passes_with_its_delay() -> None:
    verdict = judge(FAULT, [diagnosis()])
    assert verdict.passed
    assert verdict.delay == pytest.approx(6, abs=0.001)


@pytest.mark.parametrize(
    "wrong",
    [
        {"detected": at(15.1)},
        {"detected": at(-3)},
        {"detected": None, "state": "suspected", "end": None},
        {"state": "confirmed", "end": None},
        {"cause": "straggler"},
        {"subtype": "packet_loss"},
        {"locus": ["nic:n0/eth0", "host:n0"]},
    ],
    ids=["late", "early", "suspected", "open", "cause", "subtype", "place"],
)
def test_any_other_does_not(wrong: dict[str, Any]) -> None:
    assert not judge(FAULT, [diagnosis(**wrong)]).passed


def test_nothing_else_may_be_told_beside_it() -> None:
    other = diagnosis(cause="host_stall", subtype=None, locus=["job"])
    assert not judge(FAULT, [diagnosis(), other]).passed
    assert not judge(FAULT, [diagnosis(), diagnosis()]).passed


def test_what_is_latent_or_withdrawn_before_it_was_told_does_no_harm() -> None:
    latent = diagnosis(cause="topology_misconfiguration", state="latent", detected=None, end=None)
    assert judge(FAULT, [diagnosis(), latent]).passed
    assert judge(HEALTHY, [latent]).passed


def test_a_healthy_run_must_be_left_alone() -> None:
    assert not judge(HEALTHY, [diagnosis()]).passed
    assert judge(HEALTHY, [diagnosis(cause="communication_bound", subtype=None)]).passed


def test_of_four_ranks_the_link_of_the_ring_is_named() -> None:
    four = replace(FAULT, ranks=4)
    assert judge(four, [diagnosis()]).passed
    assert not judge(four, [diagnosis(text="the path carries less, on the way n1 -> n0")]).passed


def test_the_truth_of_a_case_is_the_beds_own() -> None:
    (episode,) = tomllib.loads(truth(FAULT))["episode"]
    assert episode["start"].timestamp() == pytest.approx(ONSET, abs=0.001)
    assert episode["end"].timestamp() == pytest.approx(ONSET + 15, abs=0.001)
    assert (episode["job"], episode["cause"]) == ("bed-throttled_port", "network_congestion")
    assert "episode" not in tomllib.loads(truth(HEALTHY))
