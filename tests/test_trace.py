"""The trace: points as aligned arrays, of bounded size."""

from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosd.analysis import samples, steps
from diagnosd.analysis.trace import JOBS, Trace
from diagnosd.documents import ClusterSpec, Fabric
from diagnosd.point import Point, Series, Value

SECOND = 10**9
START = 1_800_000_000 * SECOND


def ns(seconds: float) -> int:
    return START + round(seconds * SECOND)


def point(measurement: str, time: float, fields: dict[str, Value], **tags: str) -> Point:
    return Point(Series.of(measurement, **tags), fields, ns(time))


def step(number: int, time: float, rank: int = 0, **fields: Value) -> Point:
    tags = {"job": "j", "host": f"n{rank // 2:02}", "rank": str(rank), "source": str(fields.pop("source", "probe"))}
    return point("diagnosd_step", time, {"step": number, **fields}, **tags)


def traced(points: Iterable[Point], **options: ClusterSpec) -> Trace:
    trace = Trace(**options)
    for each in points:
        trace.add([each])
    return trace


def test_the_same_step_of_all_ranks_is_one_row() -> None:
    points = [step(n, n + rank / 10, rank, duration=1.0 + rank) for n in range(5) for rank in (2, 0, 1)]
    seen = traced(points).jobs["j"].steps()
    assert seen.number.tolist() == [0, 1, 2, 3, 4]
    assert seen.ranks == (0, 1, 2)
    assert seen.hosts == ("n00", "n00", "n01")
    assert seen.column("duration").tolist() == [[1.0, 2.0, 3.0]] * 5
    assert seen.end[3].tolist() == [ns(3), ns(3.1), ns(3.2)]
    assert (seen.end > 0).all()


def test_a_rank_that_joins_late_and_a_step_that_was_lost_leave_holes() -> None:
    points = [step(n, n, 1, duration=1.0) for n in range(4) if n != 2] + [step(n, n, 0, duration=2.0) for n in (2, 3)]
    seen = traced(points).jobs["j"].steps()
    assert seen.number.tolist() == [0, 1, 2, 3]
    assert np.isnan(seen.column("duration")).tolist() == [[True, False], [True, False], [False, True], [False, False]]
    assert seen.end[2].tolist() == [ns(2), 0]
    assert (seen.end > 0).all(axis=1).tolist() == [False, False, False, True]


def test_of_a_step_sent_again_the_later_one_wins() -> None:
    job = traced([step(0, 0, duration=1.0), step(0, 0.5, duration=1.5), step(1, 1, duration=1.0)]).jobs["j"]
    assert job.steps().column("duration").tolist() == [[1.5], [1.0]]


def test_numbers_that_go_back_in_one_attempt_go_on_in_a_new_lap() -> None:
    points = [step(n % 3, n, rank, duration=float(n)) for n in range(7) for rank in (0, 1)]
    seen = traced(points).jobs["j"].steps()
    assert seen.number.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert seen.column("duration")[:, 1].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert (seen.end > 0).all()


@pytest.mark.parametrize("first", [0, 1])
def test_a_second_run_of_a_job_that_has_ended_counts(first: int) -> None:
    """It counts its attempts from 0 again."""
    exited = [
        point("diagnosd_rank", 10, {"state": "exited", "attempt": first}, job="j", host="n00", rank=str(rank))
        for rank in (0, 1)
    ]
    points = [step(n, n, rank, attempt=first, duration=1.0) for n in range(5) for rank in (0, 1)]
    points += [*exited, *(step(n, 100 + n, rank, attempt=0, duration=1.0) for n in range(5) for rank in (0, 1))]
    job = traced(points).jobs["j"]
    assert (job.attempt, len(job.steps()), job.outdated) == (0, 5 if first else 10, {})


def test_of_too_many_jobs_those_that_have_exited_are_forgotten_and_counted() -> None:
    points = [step(0, 0, duration=1.0)]
    for number in range(3 * JOBS):
        tags = {"job": f"short{number}", "host": "n00", "rank": "0"}
        points.append(point("diagnosd_process", number / 10, {"phase": "forward"}, **tags))
        points += [point("diagnosd_rank", number / 10, {"state": state}, **tags) for state in ("running", "exited")]
    trace = traced(points)
    assert len(trace.jobs) <= JOBS
    assert len(trace.jobs["j"].steps()) == 1
    assert trace.crowded == 3 * JOBS + 1 - len(trace.jobs)
    assert len(trace.series_of("diagnosd_process", "n00")) == len(trace.jobs) - 1


def test_a_new_attempt_begins_anew_and_the_old_one_is_over() -> None:
    points = [step(n, n, rank, attempt=0, duration=1.0) for n in range(5) for rank in (0, 1)]
    points += [step(2, 10, 0, attempt=1, duration=2.0), step(9, 10.1, 1, attempt=0, duration=9.0)]
    job = traced(points).jobs["j"]
    assert job.attempt == 1
    assert job.steps().number.tolist() == [2]
    assert job.steps().ranks == (0,)


def test_the_probe_is_believed_before_the_log() -> None:
    points = [
        step(0, 0, source="log", duration=1.0),
        step(1, 1, duration=2.0),
        step(7, 1.5, source="log", duration=3.0),
    ]
    assert traced(points).jobs["j"].steps().number.tolist() == [0, 1]


def test_synchronisation_is_in_seconds_since_the_origin() -> None:
    points = [step(0, 0), step(1, 1, sync_enter=ns(0.25), sync_exit=ns(0.75), kind="eval")]
    seen = traced(points).jobs["j"].steps()
    assert seen.sync_enter[1, 0] == pytest.approx(0.25)
    assert seen.sync_exit[1, 0] == pytest.approx(0.75)
    assert seen.kind.tolist() == [[-1], [steps.KINDS.index("eval")]]


def test_only_the_newest_2000_steps_are_kept() -> None:
    seen = traced(step(n, n, duration=float(n)) for n in range(5000)).jobs["j"].steps()
    assert len(seen) == steps.KEEP_STEPS
    assert seen.number[0] == 3000
    assert seen.column("duration")[:, 0].tolist() == list(range(3000, 5000))


@given(st.data())
def test_however_the_points_fall_into_batches_the_arrays_are_the_same(data: st.DataObject) -> None:
    cells = [(n, rank) for n in range(30) for rank in range(3)]
    kept = data.draw(st.lists(st.sampled_from(cells), unique=True))
    times = {cell: cell[0] + data.draw(st.integers(0, 3)) + cell[1] / 10 for cell in kept}
    newest: dict[int, float] = {}
    points = []
    for n, rank in sorted(kept):  # a rank's steps follow each other
        newest[rank] = max(times[n, rank], newest.get(rank, 0) + 0.01)
        points.append(step(n, newest[rank], rank, duration=float(n), samples=rank))
    points.sort(key=lambda p: p.time)
    trace, expected = Trace(), {}
    for each in points:
        trace.add([each])
        expected[each.fields["step"], int(each.series.tag("rank") or 0)] = each.time
        if data.draw(st.booleans()):
            trace.jobs["j"].steps()
    if points:
        seen = trace.jobs["j"].steps()
        found = {(n, r): int(seen.end[i, j]) for i, n in enumerate(seen.number) for j, r in enumerate(seen.ranks)}
        assert {cell: time for cell, time in found.items() if time} == expected
        assert np.array_equal(np.isnan(seen.column("duration")), seen.end == 0)


def counted(trace: Trace, name: str) -> tuple[samples.Floats, samples.Numbers]:
    (series,) = trace.series_of("net", "n1", interface="eth0")
    return trace.samples(series, name)


def test_a_counter_is_exact_up_to_its_last_bit() -> None:
    top = 2**63 - 1
    trace = traced(point("net", n, {"bytes_sent": top - 5 + n}, host="n1", interface="eth0") for n in range(5))
    times, values = counted(trace, "bytes_sent")
    assert times.tolist() == [0, 1, 2, 3, 4]
    assert values.tolist() == [top - 5, top - 4, top - 3, top - 2, top - 1]


def test_a_field_is_told_only_where_it_was_sent() -> None:
    trace = traced(
        point("net", n, {"bytes_sent": n} if n % 2 else {"err_in": 7}, host="n1", interface="eth0") for n in range(6)
    )
    assert counted(trace, "err_in")[0].tolist() == [0, 2, 4]
    assert counted(trace, "bytes_sent")[1].tolist() == [1, 3, 5]
    assert counted(trace, "drop_in")[0].size == 0
    assert trace.series_of("net", "n2") == []


def test_samples_are_kept_for_a_while_and_no_longer() -> None:
    trace = traced(point("net", n, {"bytes_sent": n}, host="n1", interface="eth0") for n in range(3000))
    assert counted(trace, "bytes_sent")[1].tolist() == list(range(3000 - samples.KEEP, 3000))


def test_the_latest_phase_of_a_rank_is_known() -> None:
    tags = {"job": "j", "host": "n1", "rank": "0"}
    trace = traced(point("diagnosd_process", n, {"phase": p}, **tags) for n, p in enumerate(("forward", "collective")))
    assert trace.latest("n1", "diagnosd_process", "phase", rank="0") == (ns(1), "collective")


def test_series_are_told_by_tags_in_the_order_of_their_keys() -> None:
    trace = traced(point("net", 0, {"bytes_sent": 1}, host="n1", interface=name) for name in ("lo", "eth1", "eth0"))
    assert [s.tag("interface") for s in trace.series_of("net", "n1")] == ["eth0", "eth1", "lo"]
    assert [s.tag("interface") for s in trace.series_of("net", "n1", interface="lo")] == ["lo"]


def test_what_nobody_wants_is_seen_and_not_kept() -> None:
    trace = traced([point("weather", 0, {"rain": 1.0}, host="n1")])
    assert trace.seen == {"weather": {"n1"}}
    assert trace.series_of("weather", "n1") == []


def test_parts_of_a_job_are_united() -> None:
    parts = [
        {"name": "a", "ranks": [{"rank": 0, "host": "n1"}]},
        {"dtype": "bf16", "ranks": [{"rank": 1, "host": "n2"}]},
    ]
    trace = traced(point("diagnosd_job", n, {"spec": json.dumps(part)}, job="j") for n, part in enumerate(parts))
    job = trace.jobs["j"]
    assert (job.spec.name, job.spec.dtype) == ("a", "bf16")
    assert {rank: info.host for rank, info in job.ranks.items()} == {0: "n1", 1: "n2"}


def test_what_a_rank_says_of_itself_is_known() -> None:
    said: dict[str, Value] = {"world": 8, "loader": "torch", "versions": "torch=2.13,nccl=2.30.7", "gpu": "G"}
    trace = traced([point("diagnosd_rank", 0, said, job="j", host="n1", rank="3")])
    info = trace.jobs["j"].ranks[3]
    assert (info.world, info.loader, info.gpu) == (8, "torch", "G")
    assert info.versions == {"torch": "2.13", "nccl": "2.30.7"}
    assert trace.jobs["j"].world == 8


def test_a_killed_job_has_ended_and_a_silent_one_has_not_yet() -> None:
    trace = traced([step(n, n, rank, duration=1.0) for n in range(10) for rank in (0, 1)])
    job = trace.jobs["j"]
    assert not job.ended(ns(60))
    assert job.ended(ns(75))
    trace.add([point("diagnosd_job", 12, {"state": "ended"}, job="j")])
    assert job.ended(ns(12))


def test_a_step_of_a_rank_beyond_all_numbers_does_not_count() -> None:
    trace = traced([step(1, 1, duration=1.0), step(1, 1, rank=10**4000, duration=1.0)])
    assert list(trace.jobs["j"].ranks) == [0]


def test_documents_that_do_not_parse_are_counted() -> None:
    trace = traced(
        [point("diagnosd_node", 0, {"inventory": "{"}, host="n1"), point("diagnosd_job", 0, {"spec": "[]"}, job="j")]
    )
    assert trace.unreadable == 2
    assert trace.inventory("n1") is None


def test_a_declared_cluster_is_not_overridden_by_a_recorded_one() -> None:
    recorded = point("diagnosd_cluster", 0, {"spec": '{"fabric": {"rate_gbps": 400}}'}, cluster="east")
    assert (traced([recorded]).cluster or ClusterSpec()).fabric == Fabric(rate_gbps=400)
    declared = ClusterSpec(fabric=Fabric(rate_gbps=100))
    assert traced([recorded], cluster=declared).cluster == declared


def test_a_trace_of_days_is_as_large_as_one_of_an_hour() -> None:
    """A job a day, its devices renamed each time: what has been silent for an hour is gone."""
    trace = Trace()
    for day in range(5):
        for minute in range(0, 120, 10):
            time = day * 86400 + minute * 60
            tags = {"job": f"j{day}", "host": "n1", "rank": "0", "source": "probe"}
            trace.add([point("diagnosd_step", time, {"step": minute, "duration": 1.0}, **tags)])
            trace.add([point("net", time, {"bytes_sent": time}, host="n1", interface=f"veth{day}")])
    assert list(trace.jobs) == ["j4"]
    assert [s.tag("interface") for s in trace.series_of("net", "n1")] == ["veth4"]
    assert len(trace._routes) <= 3


def test_what_speaks_on_keeps_its_past_when_the_silent_ones_are_forgotten() -> None:
    rank = {"job": "j", "host": "n1", "rank": "0"}
    trace = Trace()
    for minute in range(100):
        trace.add([point("diagnosd_process", 60 * minute, {"throttled": 0.4}, **rank)])
    (series,) = trace.series_of("diagnosd_process", "n1")
    assert len(trace.samples(series, "throttled")[0]) == 100
