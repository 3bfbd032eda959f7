"""Counters to rates: every amount is one that can be known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosd.analysis import rates


def counted(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, np.int64)


def seconds(count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.arange(count, dtype=np.float64)


def test_a_steady_counter_has_a_steady_rate() -> None:
    grown = rates.increments(seconds(4), counted(0, 100, 200, 300))
    assert grown.rate.tolist() == [100, 100, 100]


def test_a_reset_leaves_its_interval_out() -> None:
    grown = rates.increments(seconds(4), counted(1000, 1100, 50, 150))
    assert grown.start.tolist() == [0, 2]
    assert grown.amount.tolist() == [100, 100]


def test_a_gap_longer_than_a_value_holds_is_unknown() -> None:
    grown = rates.increments(np.array([0.0, 1.0, 100.0, 101.0]), counted(0, 10, 1000, 1010))
    assert grown.amount.tolist() == [10, 10]
    assert math.isnan(grown.mean(5, 95))


def test_a_fall_of_a_float_counter_is_a_reset() -> None:
    assert rates.increments(seconds(3), np.array([5.0, 1.0, 2.5])).amount.tolist() == [1.5]


def test_a_mean_needs_half_of_its_window() -> None:
    grown = rates.increments(seconds(11), np.arange(0, 110, 10, dtype=np.int64))
    assert grown.mean(2, 8) == pytest.approx(10)
    assert grown.mean(5, 14) == pytest.approx(10)
    assert math.isnan(grown.mean(5, 30))


def test_whole_intervals_alone_tell_of_a_window_whose_edges_lie_within_others() -> None:
    grown = rates.increments(seconds(5), counted(0, 10, 20, 120, 220))
    assert grown.whole(1.5, 4) == 200
    assert math.isnan(grown.whole(1.5, 2.5))


@given(st.lists(st.integers(-5, 2**63 - 1), max_size=40))
def test_no_counter_ever_gives_a_negative_or_impossible_rate(values: list[int]) -> None:
    grown = rates.increments(seconds(len(values)), np.array(values, np.int64))
    assert (grown.amount >= 0).all()
    assert (grown.end > grown.start).all()
    assert (grown.end <= grown.start + 1).all()


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=40), st.floats(0, 40), st.floats(0, 40))
def test_two_windows_side_by_side_hold_what_one_over_both_holds(amounts: list[int], a: float, b: float) -> None:
    since, until = sorted((a, b))
    middle = (since + until) / 2
    grown = rates.increments(seconds(len(amounts)), np.cumsum(amounts))
    parts = grown.total(since, middle) + grown.total(middle, until)
    assert parts == pytest.approx(grown.total(since, until), abs=1e-6)
