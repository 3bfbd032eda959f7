"""The account: every GPU-nanosecond in exactly one class."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosd.analysis.ledger import ACCOUNTS, CAUSES, CLASSES, Claim, Ledger
from diagnosd.point import Point, Series, Value

SECOND = 10**9
START = 1_800_000_000 * SECOND


def ns(seconds: float) -> int:
    return START + round(seconds * SECOND)


def step(end: float, duration: float, rank: int = 0, source: str = "probe", **fields: Value) -> Point:
    series = Series.of("diagnosd_step", job="j", host="n01", rank=str(rank), source=source)
    return Point(series, {"step": round(end), "duration": duration, **fields}, ns(end))


def seen(time: float, rank: int = 0, **fields: Value) -> Point:
    return Point(Series.of("diagnosd_rank", job="j", host="n01", rank=str(rank)), fields or {"world": 2}, ns(time))


def alive(time: float, rank: int = 0) -> Point:
    return Point(Series.of("diagnosd_process", job="j", host="n01", rank=str(rank)), {"phase": "forward"}, ns(time))


def booked(*points: Point, **claims: tuple[int, ...]) -> dict[str, float]:
    """The classes that are not 0, in seconds; claims in seconds of the ranks' own time, of waiting, and of no step."""
    ledger = Ledger()
    ledger.add(points)
    ledger.claim("j", {cause: Claim(*(part * SECOND for part in parts)) for cause, parts in claims.items()})
    assert sum(ledger.classes("j").values()) == ledger.gpu_ns("j")
    return {name: amount / SECOND for name, amount in ledger.classes("j").items() if amount}


def test_a_step_divides_into_what_it_says() -> None:
    account = booked(step(10, 10.0, comm=2.0, checkpoint=3.0, eval=1.0))
    assert account == {"communication_by_design": 2, "checkpoint": 3, "eval": 1, "other_by_design": 4}


def test_until_the_first_step_it_is_init() -> None:
    assert booked(seen(0), step(30, 1.0)) == {"init": 29, "other_by_design": 1}


def test_a_job_without_any_step_is_all_init() -> None:
    assert booked(seen(0), alive(20)) == {"init": 20}


def test_what_nobody_saw_is_unobserved() -> None:
    assert booked(step(1, 1.0), step(11, 1.0), alive(14)) == {"other_by_design": 2, "unobserved": 12}


def test_an_exited_rank_holds_no_gpu() -> None:
    assert booked(step(1, 1.0), seen(2, state="exited"), seen(62, state="exited")) == {
        "other_by_design": 1,
        "unobserved": 1,
    }


def test_a_restart_is_from_the_end_of_one_attempt_to_the_first_sign_of_the_next() -> None:
    account = booked(
        seen(0, attempt=0),
        step(10, 10.0, attempt=0),
        seen(12, attempt=0, state="exited"),
        seen(20, attempt=1),
        step(25, 1.0, attempt=1),
    )
    assert account == {"other_by_design": 11, "unobserved": 2, "restart": 8, "init": 4}


@pytest.mark.parametrize("first", [0, 1])
def test_a_second_run_of_the_job_counts_and_the_time_between_the_two_is_restart(first: int) -> None:
    """It counts its attempts from 0 again."""
    account = booked(
        seen(0, attempt=first, state="running"),
        step(10, 10.0, attempt=first),
        seen(12, attempt=first, state="exited"),
        seen(72, attempt=first, state="exited"),
        seen(100, attempt=0, state="running"),
        step(103, 1.0, attempt=0),
        seen(104, attempt=0, state="exited"),
    )
    assert account == {"other_by_design": 11, "unobserved": 3, "restart": 88, "init": 2}


def test_steps_that_tell_no_attempt_are_of_the_one_that_the_rank_is_in() -> None:
    points = [seen(0, attempt=1), step(10, 10.0, attempt=1), seen(11), step(20, 10.0)]
    assert booked(*points) == {"other_by_design": 20}


def test_claims_come_out_of_where_the_time_was_booked() -> None:
    steps = [step(10, 10.0, comm=4.0), step(20, 10.0, comm=4.0)]
    assert booked(*steps, network_congestion=(0, 5), data_starvation=(1, 0)) == {
        "network_congestion": 5,
        "data_starvation": 1,
        "communication_by_design": 3,
        "other_by_design": 11,
    }


def test_what_a_checkpoint_cost_comes_out_of_saving_and_of_the_waiting_of_the_others() -> None:
    steps = [step(10, 10.0, checkpoint=6.0), step(10, 10.0, rank=1, comm=7.0)]
    assert booked(*steps, checkpoint_stall=(5, 5)) == {
        "checkpoint_stall": 10,
        "checkpoint": 1,
        "communication_by_design": 2,
        "other_by_design": 7,
    }


@pytest.mark.parametrize("cause", ["hang", "data_starvation"])
def test_a_standstill_is_claimed_from_the_silence(cause: str) -> None:
    assert booked(step(1, 1.0), alive(61), **{cause: (0, 0, 60)}) == {"other_by_design": 1, cause: 60}


def test_claims_beyond_what_was_there_show_as_negative_unexplained() -> None:
    assert booked(step(10, 10.0), straggler=(12, 0)) == {"straggler": 12, "unexplained": -2}


def test_an_unknown_cause_claims_unexplained_time_and_design_claims_nothing() -> None:
    account = booked(step(10, 10.0, comm=4.0), unknown=(3, 0), communication_bound=(4, 0))
    assert account == {"unexplained": 3, "communication_by_design": 4, "other_by_design": 3}


def test_steps_told_by_log_and_probe_are_counted_once() -> None:
    ledger = Ledger()
    for end in range(1, 11):
        ledger.add([step(end, 1.0), step(end + 0.01, 1.0, source="log", comm=0.5)])
    assert ledger.steps("j") == 10
    assert ledger.classes("j")["communication_by_design"] == 0


def test_of_too_many_jobs_those_that_are_over_the_longest_become_one_sum_and_nothing_is_lost() -> None:
    ledger = Ledger()
    long = step(0, 1.0)
    ledger.add([long])
    for number in range(3 * ACCOUNTS):
        tags = {"job": f"short{number}", "host": "n01", "rank": "0"}
        states = (Point(Series.of("diagnosd_rank", **tags), {"state": state}, 0) for state in ("running", "exited"))
        ledger.add([each._replace(time=ns(number + n)) for n, each in enumerate(states, start=1)])
    ledger.add([step(3 * ACCOUNTS, 1.0)])
    assert len(ledger.jobs) <= ACCOUNTS
    assert ledger.steps("j") == 2
    assert ledger.earlier["jobs"] + len(ledger.jobs) == 3 * ACCOUNTS + 1
    assert sum(ledger.earlier["ledger_ns"].values()) == ledger.earlier["gpu_ns"] == ledger.earlier["jobs"] * SECOND


moments = st.integers(0, 1000)
durations = st.floats(0, 100) | st.floats(-1, 1e12)
fields = st.fixed_dictionaries(
    {"duration": durations},
    optional={
        **dict.fromkeys(("comm", "checkpoint", "eval"), durations),
        "attempt": st.integers(0, 3),
        "kind": st.sampled_from(["train", "eval", "checkpoint", "compile", "odd"]),
    },
)
happenings = st.lists(
    st.tuples(moments, st.integers(0, 3), st.sampled_from(["step", "seen", "alive", "running", "exited"]), fields),
    max_size=40,
)


@given(
    happenings,
    st.dictionaries(
        st.sampled_from([*CAUSES, "unknown", "communication_bound"]),
        st.builds(Claim, st.integers(0, 10**13), st.integers(0, 10**13)),
    ),
)
def test_the_classes_of_any_trace_sum_to_its_gpu_time_exactly(
    happened: list[tuple[int, int, str, dict[str, Value]]], claims: dict[str, Claim]
) -> None:
    ledger = Ledger()
    for time, rank, what, told in sorted(happened, key=lambda h: h[0]):
        attempt = {"attempt": told["attempt"]} if "attempt" in told else {"world": 4}
        duration = told.pop("duration")
        assert isinstance(duration, float)
        point = {
            "step": step(time, duration, rank, **told),
            "seen": seen(time, rank, **attempt),
            "alive": alive(time, rank),
            "running": seen(time, rank, state="running", **attempt),
            "exited": seen(time, rank, state="exited", **attempt),
        }[what]
        ledger.add([point])
    ledger.claim("j", claims)
    for job in ledger.jobs:
        classes = ledger.classes(job)
        assert tuple(classes) == CLASSES
        assert sum(classes.values()) == ledger.gpu_ns(job)
        assert all(amount >= 0 for name, amount in classes.items() if name != "unexplained")
