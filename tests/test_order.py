"""Event time: what is released, when, and what is told about hosts that fall out of it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from diagnosd.analysis.order import Order
from diagnosd.point import Point, Series

SECOND = 10**9
START = 1_800_000_000 * SECOND


def at(seconds: float, host: str | None = "n01", value: int = 0, measurement: str = "m") -> Point:
    return Point(Series.of(measurement, host=host), {"value": value}, START + round(seconds * SECOND))


def in_batches(order: Order, points: Sequence[Point], size: int = 7) -> list[Point]:
    released = [p for i in range(0, len(points), size) for p in order.feed(points[i : i + size])]
    return released + order.finish()


def heartbeats(hosts: Iterable[str], seconds: Iterable[float]) -> list[Point]:
    return [at(second, host) for second in seconds for host in hosts]


def kinds(points: Iterable[Point]) -> list[tuple[str | None, str | None, float]]:
    """Kind, host and seconds since START of the events among the points."""
    return [
        (p.series.tag("kind"), p.series.tag("host"), (p.time - START) / SECOND)
        for p in points
        if p.series.measurement == "diagnosd_event"
    ]


def test_a_point_waits_for_the_lateness_and_no_longer() -> None:
    order = Order()
    assert order.feed([at(0)]) == []
    assert order.feed([at(3.0)]) == []
    assert order.feed([at(3.2)]) == [at(0)]


def test_points_come_out_by_time_and_at_one_time_by_series() -> None:
    order = Order()
    points = [at(1, "n02"), at(0, "n02"), at(1, "n01"), at(0, None, measurement="z"), at(0, "n01", measurement="a")]
    order.feed(points)
    assert order.finish() == sorted(points, key=lambda p: (p.time, p.series.key))


def test_with_two_hosts_the_slower_one_holds_the_watermark() -> None:
    order = Order()
    assert order.feed([at(0, "n01"), at(0, "n02"), at(20, "n01")]) == []
    assert order.feed([at(5, "n02")]) == [at(0, "n01"), at(0, "n02")]


def test_one_fast_host_does_not_make_the_others_late() -> None:
    order = Order()
    for second in range(20):
        order.feed([at(second, "n01"), at(second, "n02"), at(second + 40, "fast")])
    order.finish()
    assert order.late == 0


def test_points_without_a_host_do_not_move_the_watermark() -> None:
    order = Order()
    assert order.feed([at(0), at(1000, None)]) == []
    assert order.watermark < START


def test_a_late_point_is_counted_and_changes_nothing_that_was_released() -> None:
    order, calm = Order(), Order()
    points = [at(s) for s in range(10)]
    released = order.feed(points)
    released += order.feed([at(2, value=99), at(10)])
    released += order.finish()
    assert released == in_batches(calm, [*points, at(10)])
    assert order.late == 1


def step(seconds: float, job: str, host: str = "n01", duration: float = 1.0) -> Point:
    series = Series.of("diagnosd_step", job=job, host=host, rank="0", source="probe")
    return Point(series, {"step": round(seconds), "duration": duration}, START + round(seconds * SECOND))


def test_what_a_job_lost_by_a_clock_that_was_set_back_is_known() -> None:
    order = Order()
    for second in range(20):
        order.feed([step(second, "j")])
    for second in range(20):
        order.feed([at(second - 600), step(second - 600, "j"), step(second - 600, "other", duration=1e300)])
    assert order.late == 60
    of_j, of_other = order.missed["j", "n01"], order.missed["other", "n01"]
    assert (of_j.since, of_j.late, of_j.step_ns) == (order.watermark, 20, 20 * SECOND)
    assert (of_other.late, of_other.step_ns) == (20, 0)


def test_what_a_job_lost_on_a_host_that_is_kept_out_is_known() -> None:
    order = Order()
    for second in range(60):
        order.feed([at(second, "n01"), at(second, "n02"), step(second + 7200, "j", "n03")])
    assert order.kept_out == ["n03"]
    assert list(order.missed) == [("j", "n03")]
    assert order.missed["j", "n03"].late == 0
    assert 50 * SECOND < order.missed["j", "n03"].step_ns <= 60 * SECOND


def test_points_of_one_series_and_time_are_united_and_the_later_value_wins() -> None:
    series = Series.of("m", host="n01")
    order = Order()
    order.feed([Point(series, {"a": 1, "b": 1}, START), Point(series, {"b": 2, "c": 2}, START)])
    assert order.finish() == [Point(series, {"a": 1, "b": 2, "c": 2}, START)]


def test_the_watermark_never_runs_back() -> None:
    order, marks = Order(), []
    for second, host in ((0, "n01"), (9, "n01"), (3, "n02"), (10, "n01"), (4, "n02"), (40, "n02"), (41, "n01")):
        order.feed([at(second, host)])
        marks.append(order.watermark)
    assert marks == sorted(marks)


@given(st.randoms(use_true_random=False), st.integers(1, 200))
def test_shuffling_within_the_lateness_and_sending_twice_change_nothing(chance: random.Random, size: int) -> None:
    points = heartbeats(["n01", "n02", "n03"], (s / 4 for s in range(200)))
    points = [p for p in points if p.series.tag("host") != "n03" or not START + SECOND <= p.time < START + 41 * SECOND]
    straight = in_batches(Order(), points)
    delayed = [(p.time + chance.randrange(int(2.9 * SECOND)), n) for n, p in enumerate(points)]
    order = Order()
    shuffled = [p for _, n in sorted(delayed) for p in [points[n]] * chance.choice((1, 1, 2))]
    assert in_batches(order, shuffled, size) == straight
    assert order.late == 0


def test_a_host_that_falls_silent_is_left_behind_and_told_once() -> None:
    order = Order()
    before, after = heartbeats(["n01", "n02"], range(10)), heartbeats(["n01"], range(10, 100))
    released = [p for point in before + after for p in order.feed([point])]
    assert released[-1].time == START + 95 * SECOND
    assert order.behind == ["n02"]
    assert kinds(released) == [("telemetry_gap", "n02", 39.0)]


def test_a_silence_is_told_at_the_same_time_however_the_points_are_fed() -> None:
    points = heartbeats(["n01", "n02"], range(10)) + heartbeats(["n01"], range(10, 60))
    points += heartbeats(["n01", "n02"], range(60, 120))
    outcomes = [kinds(in_batches(Order(), points, size)) for size in (1, 50, 10_000)]
    assert outcomes == [[("telemetry_gap", "n02", 39.0)]] * 3


def test_hosts_that_all_pause_are_no_clock_fault_when_one_returns_first() -> None:
    points = heartbeats(["n01", "n02"], range(10))
    points += [at(500, "n01"), at(500.5, "n01"), *heartbeats(["n02", "n01"], range(501, 600))]
    order = Order()
    released = [p for point in points for p in order.feed([point])] + order.finish()
    assert order.kept_out == []
    assert order.late == order.strays == 0
    assert {kind for kind, _, _ in kinds(released)} == {"telemetry_gap"}


def test_a_host_with_a_wrong_clock_is_kept_out_and_told() -> None:
    order, released = Order(), []
    for second in range(60):
        beats = [at(second, "n01"), at(second, "n02"), at(second + 7200, "n03")]
        released += [p for beat in beats for p in order.feed([beat])]
    released += order.finish()
    assert order.kept_out == ["n03"]
    assert [kind for kind, host, _ in kinds(released) if host == "n03"] == ["clock"]
    assert {p.series.tag("host") for p in released if p.series.measurement == "m"} == {"n01", "n02"}


def test_a_host_whose_clock_was_set_right_is_taken_back() -> None:
    order, released = Order(), []
    for second in range(120):
        wrong = 7200 if second < 60 else 0
        beats = [at(second, "n01"), at(second, "n02"), at(second + wrong, "n03", value=second)]
        released += [p for beat in beats for p in order.feed([beat])]
    values = [p.fields["value"] for p in released if p.series.tag("host") == "n03" and p.series.measurement == "m"]
    assert order.kept_out == []
    assert values == list(range(61, 116))


def test_an_outage_whose_points_come_afterwards_is_no_clock_fault() -> None:
    order = Order()
    released = [p for point in heartbeats(["n01", "n02", "n03"], range(10)) for p in order.feed([point])]
    for second in range(10, 300):
        beats = heartbeats(["n01", "n02"], [second])
        if second >= 200:  # three points a second until it has caught up
            beats += heartbeats(["n03"], range(10 + 3 * (second - 200), 13 + 3 * (second - 200)))
        released += [p for beat in beats for p in order.feed([beat])]
    assert order.kept_out == []
    assert "clock" not in {kind for kind, _, _ in kinds(released)}
    assert order.late > 0


def test_one_broken_timestamp_neither_moves_time_nor_comes_out() -> None:
    order = Order()
    points = [at(0), at(1), at(10**8), *(at(s) for s in range(2, 20))]
    released = in_batches(order, points, 1)
    assert [p.time for p in released] == [START + s * SECOND for s in range(20)]
    assert order.strays == 1


def test_a_pause_of_hours_is_a_pause() -> None:
    points = [at(0), at(1), at(10_000), at(10_001)]
    released = in_batches(Order(), points, 1)
    assert [p for p in released if p.series.measurement == "m"] == points


def test_a_recording_of_jobs_alone_comes_out_at_the_end() -> None:
    order = Order()
    points = [at(s, None) for s in range(100)]
    assert in_batches(order, points) == points
