"""Counters to rates: every amount is one that can be known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from diagnosd.analysis import rates

GIGABIT = 125e6  # bytes a second


def counted(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, np.int64)


def seconds(count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.arange(count, dtype=np.float64)


def test_a_steady_counter_has_a_steady_rate() -> None:
    grown = rates.increments(seconds(4), counted(0, 100, 200, 300))
    assert grown.rate.tolist() == [100, 100, 100]


def test_a_reset_leaves_its_interval_out() -> None:
    grown = rates.increments(seconds(4), counted(1000, 1100, 50, 150), limit=GIGABIT)
    assert grown.start.tolist() == [0, 2]
    assert grown.amount.tolist() == [100, 100]


@pytest.mark.parametrize(("bits", "top"), [(32, 2**32), (64, 2**63)])
def test_a_wrap_at_the_width_is_counted_through(bits: int, top: int) -> None:
    grown = rates.increments(seconds(2), counted(top - 100, 400), bits=bits, limit=GIGABIT)
    assert grown.amount.tolist() == [500]


def test_a_wrap_faster_than_the_line_is_a_reset() -> None:
    grown = rates.increments(seconds(2), counted(2**32 - 10**9, 400), bits=32, limit=GIGABIT)
    assert grown.amount.size == 0


def test_without_a_known_line_rate_a_counter_that_went_back_was_reset() -> None:
    assert rates.increments(seconds(2), counted(2**32 - 100, 400), bits=32).amount.size == 0


def test_a_counter_above_32_bits_does_not_wrap_at_32_bits() -> None:
    assert rates.increments(seconds(2), counted(2**32 + 5, 4), bits=32, limit=1e12).amount.size == 0


def test_a_saturated_counter_says_nothing() -> None:
    grown = rates.increments(seconds(4), counted(65530, 65535, 65535, 65535), bits=16, saturates=True)
    assert grown.amount.size == 0


def test_a_gap_longer_than_a_value_holds_is_unknown() -> None:
    grown = rates.increments(np.array([0.0, 1.0, 100.0, 101.0]), counted(0, 10, 1000, 1010))
    assert grown.amount.tolist() == [10, 10]
    assert math.isnan(grown.mean(5, 95))


def test_a_fall_of_a_float_counter_is_a_reset() -> None:
    assert rates.increments(seconds(3), np.array([5.0, 1.0, 2.5]), limit=1e9).amount.tolist() == [1.5]


def test_a_mean_needs_half_of_its_window() -> None:
    grown = rates.increments(seconds(11), np.arange(0, 110, 10, dtype=np.int64))
    assert grown.mean(2, 8) == pytest.approx(10)
    assert grown.mean(5, 14) == pytest.approx(10)
    assert math.isnan(grown.mean(5, 30))


def test_a_value_holds_for_90_seconds_and_no_longer() -> None:
    times, values = np.array([10.0]), counted(4)
    assert rates.value_at(times, values, 100.0) == 4
    assert math.isnan(rates.value_at(times, values, 100.1))
    assert math.isnan(rates.value_at(times, values, 9.9))


@given(
    st.sampled_from([16, 32, 64]),
    st.integers(0, 2**63 - 1),
    st.lists(st.tuples(st.integers(0, 10**9), st.integers(1, 20)), min_size=1, max_size=50),
)
def test_wraps_lose_nothing(bits: int, first: int, growth: list[tuple[int, int]]) -> None:
    """What went through the line comes out of the counter, wherever it wraps, while polls are faster than wraps."""
    top = 1 << min(bits, 63)
    assume(max(amount for amount, _ in growth) < top / 2.5)
    limit = max(amount / wait for amount, wait in growth)
    assume(all(limit * wait * rates.POSSIBLE < top for _, wait in growth))
    times = np.cumsum([0.0, *(wait for _, wait in growth)])
    values = [(first + sum(amount for amount, _ in growth[:n])) % top for n in range(len(growth) + 1)]
    grown = rates.increments(times, np.array(values, np.int64), bits=bits, limit=limit)
    assert grown.amount.tolist() == [amount for amount, _ in growth]


@given(
    st.lists(st.integers(-5, 2**63 - 1), max_size=40),
    st.sampled_from([8, 16, 32, 64]),
    st.none() | st.floats(1, 1e12),
    st.booleans(),
)
def test_no_counter_ever_gives_a_negative_or_impossible_rate(
    values: list[int], bits: int, limit: float | None, saturates: bool
) -> None:
    grown = rates.increments(
        seconds(len(values)), np.array(values, np.int64), bits=bits, limit=limit, saturates=saturates
    )
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
