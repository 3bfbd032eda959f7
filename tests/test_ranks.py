"""Whose job it is, which attempt, who has left: on a clock that the test moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosd.collectors.ranks import (
    ENDED_S,
    GAP_S,
    JOBS,
    JOBS_OF_A_USER,
    LOST_S,
    RANKS_OF_A_USER,
    REPEAT_S,
    Rank,
    Ranks,
    RefusedError,
)
from diagnosd.point import Point
from diagnosd.probe.message import Hello, Message

NOW = 1_700_000_000_000_000_000
ALICE, BOB = 1000, 1001


def hello(
    rank: int = 0, *, pid: int = 100, world: int = 2, attempt: int | None = None, job: str = "train", number: int = 0
) -> Hello:
    return Hello(number, job, rank, world, rank, attempt, pid, {"loader": "torch"}, NOW)


def start(ranks: Ranks, said: Hello, *, uid: int = ALICE, now: float = 0.0) -> Rank:
    rank = ranks.hello(said, uid, said.pid, now)
    rank.connections, rank.watched = 1, True
    return rank


def told(ranks: Ranks, now: float, measurement: str) -> list[Point]:
    return [each for each in ranks.points(NOW, now) if each.series.measurement == measurement]


def states(ranks: Ranks, now: float) -> dict[str | None, object]:
    return {each.series.tag("rank"): each.fields["state"] for each in told(ranks, now, "diagnosd_rank")}


def test_a_rank_is_told_at_start_when_it_changes_and_every_minute() -> None:
    ranks = Ranks("n01")
    rank = start(ranks, hello())
    first, second = states(ranks, 0), states(ranks, 1)
    ranks.hello(hello()._replace(fields={"loader": "dali"}), ALICE, 100, 2)
    changed, repeated = told(ranks, 2, "diagnosd_rank"), states(ranks, 2 + REPEAT_S)
    ranks.exited(rank, 70)
    assert (first, second, repeated, states(ranks, 70)) == ({"0": "running"}, {}, {"0": "running"}, {"0": "exited"})
    assert changed[0].fields["loader"] == "dali"


def test_the_job_of_one_user_is_refused_to_another() -> None:
    ranks = Ranks("n01")
    start(ranks, hello())
    with pytest.raises(RefusedError, match="job train belongs to uid 1000, not to uid 1001"):
        start(ranks, hello(1, pid=200), uid=BOB)
    assert set(states(ranks, 0)) == {"0"}


def test_a_process_that_reconnects_is_the_same_rank() -> None:
    ranks = Ranks("n01")
    rank = start(ranks, hello())
    ranks.disconnected(rank, 1)
    assert start(ranks, hello(), now=2) is rank
    assert rank.attempt == 0


def test_a_later_start_of_the_ranks_is_a_new_attempt_for_all_of_them() -> None:
    ranks = Ranks("n01")
    for each in [start(ranks, hello(number, pid=100 + number)) for number in range(3)]:
        ranks.exited(each, 5)
    again = [start(ranks, hello(number, pid=200 + number), now=6) for number in range(3)]
    assert [each.attempt for each in again] == [1, 1, 1]


def test_a_rank_that_starts_anew_while_the_old_one_is_still_dying_is_a_new_attempt() -> None:
    ranks = Ranks("n01")
    old = start(ranks, hello(pid=100))
    new = start(ranks, hello(pid=200), now=3)
    ranks.exited(old, 4)
    assert (old.attempt, new.attempt) == (0, 1)
    assert states(ranks, 4) == {"0": "running"}


def test_the_attempt_that_the_environment_counts_is_taken() -> None:
    ranks = Ranks("n01")
    assert start(ranks, hello(attempt=3)).attempt == 3


@pytest.mark.parametrize("counted", [None, 0])
def test_of_ranks_that_began_before_the_agent_no_attempt_is_told(counted: int | None) -> None:
    """The agent before it may have counted restarts, of which this one knows nothing."""
    ranks = Ranks("n01")
    both = [start(ranks, hello(rank, pid=100 + rank, attempt=counted, number=70)) for rank in (0, 1)]
    first = ranks.points(NOW, 0)
    ranks.exited(both[0], 5)
    again = start(ranks, hello(0, pid=200, attempt=counted), now=6)
    assert [rank.attempt for rank in (*both, again)] == [None] * 3
    assert [each.series.measurement for each in first] == ["diagnosd_rank", "diagnosd_rank", "diagnosd_job"]
    assert not [each for each in first if "attempt" in each.fields]


def test_of_ranks_that_began_before_the_agent_the_attempt_is_what_their_environment_counts() -> None:
    ranks = Ranks("n01")
    assert start(ranks, hello(0, attempt=3, number=70)).attempt == 3
    assert start(ranks, hello(1, pid=101, number=70)).attempt == 3


def test_an_environment_that_counts_from_zero_again_does_not_turn_the_attempt_back() -> None:
    ranks = Ranks("n01")
    ranks.exited(start(ranks, hello(attempt=2)), 1)
    assert start(ranks, hello(attempt=0, pid=200), now=2).attempt == 3


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([None, 0, 1, 5])), max_size=30))
def test_the_attempt_of_a_rank_never_falls(starts: list[tuple[int, int | None]]) -> None:
    ranks = Ranks("n01")
    latest: dict[int, int] = {}
    for pid, (number, attempt) in enumerate(starts, start=1):
        rank = start(ranks, hello(number, pid=pid, world=4, attempt=attempt), now=pid)
        assert rank.attempt is not None
        assert rank.attempt > latest.get(number, -1)
        latest[number] = rank.attempt


def test_a_job_has_ended_a_minute_after_its_last_rank_left() -> None:
    ranks = Ranks("n01")
    both = [start(ranks, hello(number, pid=100 + number)) for number in range(2)]
    running = told(ranks, 0, "diagnosd_job")
    ranks.exited(both[0], 10)
    ranks.exited(both[1], 20)
    before = told(ranks, 20 + ENDED_S - 1, "diagnosd_job")
    ended = told(ranks, 20 + ENDED_S, "diagnosd_job")
    assert running[0].fields == {"state": "running", "attempt": 0}
    assert [each.fields["state"] for each in before] == ["running"]
    assert [each.fields["state"] for each in ended] == ["ended"]
    assert told(ranks, 500, "diagnosd_job") == told(ranks, 500, "diagnosd_rank") == []


def test_a_node_that_has_seen_half_of_a_job_does_not_say_that_it_has_ended() -> None:
    ranks = Ranks("n01")
    rank = start(ranks, hello(world=4))
    ranks.exited(rank, 1)
    ranks.points(NOW, 1)
    assert ranks.points(NOW, 1 + ENDED_S) == []


def test_a_probe_that_stays_away_from_a_living_process_makes_the_rank_lost_and_not_exited() -> None:
    ranks = Ranks("n01")
    rank = start(ranks, hello())
    ranks.points(NOW, 0)
    ranks.disconnected(rank, 1)
    assert states(ranks, 1 + LOST_S - 0.1) == {}
    assert states(ranks, 1 + LOST_S) == {"0": "lost"}
    start(ranks, hello(), now=20)
    assert states(ranks, 20) == {"0": "running"}


def test_the_end_of_the_connection_is_the_exit_of_a_process_that_nobody_can_watch() -> None:
    ranks = Ranks("n01")
    rank = start(ranks, hello())
    rank.watched = False
    ranks.disconnected(rank, 1)
    assert states(ranks, 1) == {"0": "exited"}


def test_lost_messages_are_one_event_and_not_one_each() -> None:
    ranks = Ranks("n01")
    rank = start(ranks, hello())
    events = []
    for number in (0, 3, 9):
        rank.missed(Message(number, "diagnosd_step", {}, {}, NOW))
        events.append([each.fields["value"] for each in told(ranks, 1, "diagnosd_event")])
    later = [each.fields["value"] for each in told(ranks, 1 + GAP_S, "diagnosd_event")]
    assert (events, later) == ([[], [2.0], []], [5.0])


def test_old_jobs_make_room_and_running_ones_do_not() -> None:
    ranks = Ranks("n01")
    for number in range(JOBS):
        start(ranks, hello(job=f"job{number}"), uid=ALICE + number)
    with pytest.raises(RefusedError, match="jobs run on this node already"):
        start(ranks, hello(job="one more"))
    ranks.exited(start(ranks, hello(job="job7", pid=500), uid=ALICE + 7), 1)
    assert start(ranks, hello(job="one more")).attempt == 0


def test_one_user_cannot_take_all_jobs() -> None:
    ranks = Ranks("n01")
    for number in range(JOBS_OF_A_USER):
        start(ranks, hello(job=f"job{number}"))
    with pytest.raises(RefusedError, match="uid 1000 runs 128 jobs"):
        start(ranks, hello(job="one more"))
    assert start(ranks, hello(job="another's"), uid=BOB).attempt == 0


def test_the_ranks_of_one_user_are_bounded_and_those_of_an_ended_job_make_room() -> None:
    ranks = Ranks("n01")
    ended = start(ranks, hello(job="ended"))
    for number in range(RANKS_OF_A_USER - 1):
        start(ranks, hello(number, world=RANKS_OF_A_USER))
    with pytest.raises(RefusedError, match="uid 1000 has 1024 ranks"):
        start(ranks, hello(RANKS_OF_A_USER, world=2 * RANKS_OF_A_USER))
    ranks.exited(ended, 1)
    assert start(ranks, hello(RANKS_OF_A_USER, world=2 * RANKS_OF_A_USER)).attempt == 0
    assert {each.series.tag("job") for each in told(ranks, 2, "diagnosd_rank")} == {"train"}
