"""What a job's own past says of its steps: rows are (total, load, transfer, compute, host) in seconds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from diagnosd.analysis.baseline import CHANNEL, Alarm, Baseline, Floats

HEALTHY = np.array([0.0, 0.002, 0.15, 0.025, 0.003])
STEP = float(HEALTHY.sum())
LOAD, TRANSFER, COMPUTE = CHANNEL["load"], CHANNEL["transfer"], CHANNEL["compute"]

Change = Callable[[int, Floats], None]


def noise(count: int, scatter: float, seed: int, memory: float = 0.2) -> Floats:
    """Relative, with heavy tails (Student's t with 4 degrees of freedom) and a memory from row to row."""
    rng = np.random.default_rng(seed)
    found, last = np.empty(count), 0.0
    for row in range(count):
        last = memory * last + np.sqrt(1 - memory**2) * float(rng.standard_t(4)) / np.sqrt(2)
        found[row] = scatter * last
    return found


def watch(rows: int, scatter: float, seed: int, change: Change | None = None) -> tuple[Alarm | None, int, Baseline]:
    """The first alarm in so many rows, the row after which it was raised, and the baseline."""
    baseline = Baseline()
    noises = noise(rows, scatter, seed)
    for number in range(rows):
        row = HEALTHY.copy()
        row[TRANSFER] *= 1 + noises[number]
        if change is not None:
            change(number, row)
        row[0] = row[1:].sum()
        baseline.add(row, 64.0, usable=True)
        reference = baseline.reference()
        alarm = baseline.alarm(reference, 0) if reference else None
        if alarm is not None:
            return alarm, number, baseline
    return None, rows, baseline


def grown(channel: int, share: float, since: int) -> Change:
    def change(number: int, row: Floats) -> None:
        row[channel] += share * STEP * (number >= since)

    return change


@pytest.mark.parametrize("run", [1, 2, 4, 8, 12, 30])
def test_batches_of_one_size_in_runs_are_judged(run: int) -> None:
    baseline, rng, known, alarms = Baseline(), np.random.default_rng(run), 0, []
    for number in range(600):
        work = (64.0, 32.0, 16.0)[number // run % 3]
        slower = 1.5 if number >= 400 else 1.0
        compute = 0.002 * work * (1 + 0.02 * rng.standard_normal())
        parts = slower * np.array([0.002, 0.05, compute, 0.003])
        baseline.add(np.array([parts.sum(), *parts]), work, usable=True)
        reference = baseline.reference()
        known += reference is not None
        alarms += [number] if reference and baseline.alarm(reference, 0) else []
    assert known >= 600 - 6 * run - 20
    assert 400 <= alarms[0] <= 420


@pytest.mark.parametrize("scatter", [0.005, 0.02, 0.07, 0.2])
def test_healthy_rows_of_any_scatter_raise_no_alarm(scatter: float) -> None:
    assert [seed for seed in range(12) if watch(400, scatter, seed)[0] is not None] == []


@pytest.mark.parametrize(
    ("share", "scatter", "within"), [(0.05, 0.005, 8), (0.1, 0.02, 8), (0.3, 0.07, 12), (1, 0.2, 8)]
)
def test_a_change_is_noticed_soon_with_its_channel_and_its_onset(share: float, scatter: float, within: int) -> None:
    for seed in range(8):
        alarm, number, _ = watch(160, scatter, seed, grown(TRANSFER, share, 80))
        assert alarm is not None
        assert 80 <= number < 80 + within
        assert abs(alarm.onset - 80) <= 3
        assert alarm.channel == "transfer"


def test_a_small_change_is_noticed_in_a_quiet_channel_of_a_noisy_step() -> None:
    alarm, number, _ = watch(160, 0.07, 1, grown(LOAD, 0.06, 80))
    assert alarm is not None
    assert alarm.channel == "load"
    assert number < 90


def test_a_channel_that_grows_while_the_step_does_not_raises_no_alarm() -> None:
    def hidden(number: int, row: Floats) -> None:
        if number >= 80:
            row[LOAD] += 0.05
            row[TRANSFER] -= 0.05

    assert watch(200, 0.01, 2, hidden)[0] is None


def test_every_eighth_batch_late_is_noticed_although_the_median_is_as_ever() -> None:
    def late(number: int, row: Floats) -> None:
        row[LOAD] += 3 * STEP * (number >= 80 and number % 8 == 0)

    alarm, number, _ = watch(200, 0.01, 3, late)
    assert alarm is not None
    assert (alarm.rule, alarm.channel) == ("D4", "load")
    assert number <= 80 + 40


def test_single_slow_rows_are_pauses_and_raise_no_alarm() -> None:
    def pause(number: int, row: Floats) -> None:
        row[COMPUTE] += 2 * STEP * (number % 20 == 19)

    assert watch(400, 0.01, 4, pause)[0] is None


def test_a_slowdown_in_the_making_teaches_the_reference_nothing() -> None:
    _, number, baseline = watch(160, 0.01, 5, grown(TRANSFER, 0.3, 80))
    reference = baseline.reference()
    assert number < 90
    assert reference is not None
    assert reference.step == pytest.approx(STEP, rel=0.02)


def test_slow_first_rows_are_warm_up() -> None:
    def cold(number: int, row: Floats) -> None:
        row[COMPUTE] += 10 * STEP / (number + 1) ** 2

    alarm, _, baseline = watch(60, 0.01, 6, cold)
    reference = baseline.reference()
    assert alarm is None
    assert reference is not None
    assert reference.step == pytest.approx(STEP, rel=0.1)


def by_work(works: Floats, seconds: Callable[[float], float]) -> tuple[list[Alarm], Baseline]:
    baseline, alarms = Baseline(), []
    noises = noise(len(works), 0.01, 7)
    for work, wobble in zip(works, noises, strict=True):
        row = HEALTHY * (1 + wobble)
        row[COMPUTE] = seconds(float(work)) * (1 + wobble)
        row[0] = row[1:].sum()
        baseline.add(row, float(work), usable=True)
        reference = baseline.reference()
        alarm = baseline.alarm(reference, 0) if reference else None
        alarms += [alarm] if alarm else []
    return alarms, baseline


@pytest.mark.parametrize("to", [512.0, 16.0])
def test_another_batch_size_begins_a_regime_of_its_own(to: float) -> None:
    works = np.concatenate([np.full(60, 64.0), np.full(60, to)])
    alarms, baseline = by_work(works, lambda work: 0.0005 * work)
    reference = baseline.reference()
    assert alarms == []
    assert reference is not None
    assert reference.work == to


def test_steps_of_varying_length_are_held_against_what_their_length_explains() -> None:
    works = 1000 * (1 + 0.3 * np.random.default_rng(8).random(300))
    alarms, baseline = by_work(works, lambda work: 0.0003 * work)
    reference = baseline.reference()
    assert alarms == []
    assert reference is not None
    assert reference.slope[COMPUTE] == pytest.approx(0.0003, rel=0.1)
    assert reference.scale[0] < 0.05 * reference.step


def test_the_last_smaller_batch_of_an_epoch_is_not_judged() -> None:
    works = np.full(200, 64.0)
    works[19::20] = 30.0
    alarms, baseline = by_work(works, lambda work: 0.0005 * work)
    assert alarms == []
    assert 39 not in baseline.usable(0)


def test_a_job_that_became_lastingly_faster_is_held_against_its_new_pace() -> None:
    baseline = Baseline()
    for number in range(140):
        row = HEALTHY * (1.5 if number < 60 else 1.0)
        row[0] = row[1:].sum()
        baseline.add(row, 64.0, usable=True)
        reference = baseline.reference()
        if reference is not None:
            baseline.notice_faster(reference)
    reference = baseline.reference()
    assert reference is not None
    assert reference.step == pytest.approx(STEP)


def test_memory_stays_bounded_and_the_numbers_of_rows_go_on() -> None:
    baseline = Baseline()
    for _ in range(9000):
        baseline.add(HEALTHY, 64.0, usable=True)
    assert baseline.count == 9000
    assert baseline.usable(8990).tolist() == list(range(8990, 9000))
    assert len(baseline.usable(0)) <= 4096
