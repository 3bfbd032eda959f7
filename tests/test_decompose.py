"""Where a step's time went."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnosd.analysis.decompose import OWN, PART, Cycles, Floats, Phases, align, decompose

OPTIMIZER, CHECKPOINT = OWN.index("optimizer"), OWN.index("checkpoint")


def meeting(work: Floats, transfer: Floats, after: Floats, offsets: Floats | None = None) -> Phases:
    """Ranks that work (s) [S,R], meet in a collective that takes `transfer` [S], and optimize for `after` [S,R]."""
    steps, ranks = work.shape
    offsets = np.zeros(ranks) if offsets is None else offsets
    enter, leave, end = (np.zeros((steps, ranks)) for _ in range(3))
    start, free = np.zeros((steps, ranks)), np.zeros(ranks)
    for step in range(steps):
        start[step], enter[step] = free, free + work[step]
        leave[step] = enter[step].max() + transfer[step]
        end[step] = free = leave[step] + after[step]
    own = np.full((steps, ranks, len(OWN)), np.nan)
    own[..., OWN.index("forward")], own[..., OPTIMIZER] = work, after
    return Phases(end + offsets, end - start, enter + offsets, leave + offsets, leave - enter, own)


def even(steps: int, ranks: int, seconds: float) -> Floats:
    return np.full((steps, ranks), seconds)


def sums_exactly(cycles: Cycles) -> bool:
    return bool(np.allclose(cycles.parts.sum(axis=1), cycles.duration, rtol=0, atol=1e-9))


SECONDS = st.floats(0, 5)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(2, 8), st.data())
def test_the_parts_sum_to_the_duration_whatever_the_ranks_report(ranks: int, steps: int, data: st.DataObject) -> None:
    def drawn(*shape: int) -> Floats:
        count = int(np.prod(shape))
        return np.array(data.draw(st.lists(SECONDS, min_size=count, max_size=count))).reshape(shape)

    phases = meeting(drawn(steps, ranks), drawn(steps), drawn(steps, ranks))
    reported = drawn(steps, ranks, len(OWN))  # has nothing to do with what happened
    missing = np.array(data.draw(st.lists(st.booleans(), min_size=steps, max_size=steps)))
    enter = np.where(missing[:, None], np.nan, phases.enter)
    cycles = decompose(Phases(phases.end, phases.duration, enter, phases.exit, phases.comm, reported), np.zeros(ranks))
    assert sums_exactly(cycles)
    assert (cycles.own >= -1e-9).all()
    assert (cycles.parts[:, PART["transfer"]] >= 0).all()


def test_waiting_for_the_last_is_not_transferring() -> None:
    work = even(6, 4, 0.1)
    work[:, 2] = 0.4
    cycles = decompose(meeting(work, np.full(6, 0.05), even(6, 4, 0.01)), np.zeros(4))
    assert (cycles.last == 2).all()
    assert cycles.parts[:, PART["transfer"]] == pytest.approx(0.05)
    assert cycles.parts[:, PART["forward"]] == pytest.approx(0.4)
    assert cycles.late[:, 0] == pytest.approx(0)
    assert cycles.late[:, 2] == pytest.approx(0.3)


def test_what_follows_the_collective_belongs_to_the_next_cycle() -> None:
    phases = meeting(even(5, 2, 0.1), np.full(5, 0.05), even(5, 2, 0.01))
    slow = meeting(
        even(5, 2, 0.1), np.full(5, 0.05), np.array([[0.01, 0.01]] * 2 + [[2.01, 0.01]] + [[0.01, 0.01]] * 2)
    )
    own = phases.own.copy()
    own[2, 0, CHECKPOINT] = 2.0
    cycles = decompose(Phases(slow.end, slow.duration, slow.enter, slow.exit, slow.comm, own), np.zeros(2))
    assert cycles.parts[:, PART["checkpoint"]].tolist() == pytest.approx([0, 0, 2.0, 0])
    assert cycles.last[2] == 0
    assert cycles.duration.tolist() == pytest.approx([0.16, 0.16, 2.16, 0.16])


def test_clocks_apart_by_half_a_second_are_aligned_by_the_ends_of_the_collectives() -> None:
    rng = np.random.default_rng(4)
    work = 0.1 + 0.01 * rng.random((60, 4))
    work[:, 1] += 0.05
    offsets = np.array([0.5, 0.5, -0.4, -0.4])
    phases = meeting(work, np.full(60, 0.03), even(60, 4, 0.01), offsets)
    offset, noise = align(phases.exit, ("a", "a", "b", "b"))
    assert offset - offset[0] == pytest.approx(offsets - offsets[0], abs=1e-3)
    assert noise < 1e-3
    cycles = decompose(phases, offset)
    assert (cycles.last == 1).all()
    assert cycles.parts[:, PART["transfer"]] == pytest.approx(0.03, abs=1e-3)


def test_clocks_that_met_too_seldom_are_not_called_aligned() -> None:
    leave = np.cumsum(np.full((4, 2), 0.2), axis=0) + np.array([0.3, -0.3])
    assert align(leave, ("a", "b"))[1] == np.inf
    assert align(leave, ("a", "a"))[1] == 0.0


def test_an_offset_below_its_noise_is_not_taken_off() -> None:
    rng = np.random.default_rng(5)
    leave = np.cumsum(np.full(20, 0.2))[:, None] + rng.normal(0, 0.02, (20, 2)) + np.array([0.001, -0.001])
    assert align(leave, ("a", "b"))[0].tolist() == [0.0, 0.0]


def test_without_timed_collectives_the_least_blocked_rank_is_the_last() -> None:
    work = even(5, 3, 0.1)
    work[:, 1] = 0.3
    phases = meeting(work, np.full(5, 0.05), even(5, 3, 0.01))
    blind = np.full_like(phases.enter, np.nan)
    cycles = decompose(Phases(phases.end, phases.duration, blind, blind, phases.comm, phases.own), np.zeros(3))
    assert not cycles.timed.any()
    assert (cycles.last == 1).all()
    assert cycles.parts[:, PART["transfer"]] == pytest.approx(0.05)


def test_of_ranks_that_meet_nobody_knows_when_only_what_hides_no_waiting_is_told() -> None:
    phases = meeting(even(5, 3, 0.1), np.full(5, 0.05), even(5, 3, 0.01))
    own, blind = phases.own.copy(), np.full_like(phases.enter, np.nan)
    own[..., OWN.index("data_wait")] = [0.0, 0.08, 0.02]
    own[..., OWN.index("blocked")] = 0.15
    cycles = decompose(Phases(phases.end, phases.duration, blind, blind, blind, own), np.zeros(3))
    assert (cycles.last == -1).all()
    assert cycles.parts[:, PART["data_wait"]] == pytest.approx(0.08)
    assert cycles.parts[:, PART["mixed"]] == pytest.approx(0.08)
    assert sums_exactly(cycles)


def test_a_rank_alone_keeps_its_own_phases_and_its_communication_in_one_piece() -> None:
    own = np.full((3, 1, len(OWN)), np.nan)
    own[..., OWN.index("forward")] = 0.1
    end = np.array([[1.0], [2.0], [3.0]])
    blind = np.full((3, 1), np.nan)
    cycles = decompose(Phases(end, np.full((3, 1), 0.5), blind, blind, blind, own), np.zeros(1))
    assert len(cycles.row) == 3
    assert cycles.parts[:, PART["forward"]] == pytest.approx(0.1)
    assert cycles.parts[:, PART["other"]] == pytest.approx(0.4)


def test_a_step_that_a_rank_lost_costs_two_cycles_and_no_more() -> None:
    phases = meeting(even(8, 2, 0.1), np.full(8, 0.05), even(8, 2, 0.01))
    for array in (phases.end, phases.enter, phases.exit, phases.duration):
        array[4, 1] = np.nan
    cycles = decompose(phases, np.zeros(2))
    assert 4 not in cycles.row
    assert cycles.duration[cycles.row != 5] == pytest.approx(0.16)
    assert sums_exactly(cycles)


def test_where_only_some_collectives_are_timed_no_step_is_missing_and_two_in_a_row_give_a_cycle() -> None:
    phases = meeting(even(12, 2, 0.1), np.full(12, 0.05), even(12, 2, 0.01))
    timed = np.isin(np.arange(12), [0, 1, 6, 7])[:, None]
    enter, leave, comm = (np.where(timed, each, np.nan) for each in (phases.enter, phases.exit, phases.comm))
    cycles = decompose(Phases(phases.end, phases.duration, enter, leave, comm, phases.own), np.zeros(2))
    assert cycles.row.tolist() == list(range(1, 12))
    assert cycles.row[cycles.timed].tolist() == [1, 7]
    assert cycles.parts[cycles.timed, PART["transfer"]] == pytest.approx(0.05)
    assert cycles.parts[~cycles.timed, PART["mixed"]] == pytest.approx(0.16)
    assert cycles.duration == pytest.approx(0.16)
