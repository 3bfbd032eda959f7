"""The words of a verdict. tests/report/NAME.json holds documents and a summary, NAME.txt what a reader must see.

To look at changed wording: `python -m tests.test_report` writes the texts anew; read the diff before committing it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosd.analysis import figures, report

CASES = sorted((Path(__file__).parent / "report").glob("*.json"))


def told(case: Path) -> str:
    asked = json.loads(case.read_text())
    return report.plain(report.whole(asked["documents"], asked["summary"]))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_a_reader_sees(case: Path) -> None:
    assert told(case) == case.with_suffix(".txt").read_text()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 us"), (4.5e-5, "45 us"), (0.1834, "183 ms"), (0.9996, "1 s"), (1.9249, "1.92 s"), (99.94, "99.9 s"),
        (298, "4 min 58 s"),
        (120, "2 min"), (3599.9, "1 h"), (7500, "2 h 5 min"), (90_000, "1 d 1 h"), (-0.02, "-20 ms"),
    ],
)  # fmt: skip
def test_durations_are_humane(value: float, text: str) -> None:
    assert figures.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (24.1e6, "bytes/s", "24.1 MB/s"), (4e11, "bit/s", "400 Gbit/s"), (0.043, "share", "4.3 %"),
        (41234, "1/s", "41,234 1/s"), (0.0123456, "", "0.0123"), (None, "s", ""), ("Socket", "", "Socket"),
        (True, "", "yes"), (float("nan"), "s", "unknown"),
    ],
)  # fmt: skip
def test_figures_carry_their_unit(value: object, unit: str, text: str) -> None:
    assert report.figure(value, unit) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.994, "99 %"),
        (0.0312, "3.1 %"),
        (0.00269, "0.27 %"),
        (0, "0 %"),
        (1, "100 %"),
        (0.099, "9.9 %"),
        (1.4e-9, "0 %"),
    ],
)
def test_shares_are_spelled_one_way(share: float, text: str) -> None:
    assert figures.percent(share) == report.figure(share, "share") == text


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=200),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=30), inner, max_size=4),
    max_leaves=8,
)
KEYS = (
    "job", "attempt", "cause", "subtype", "state", "severity", "owner", "start", "detected", "end", "confidence",
    "slowdown", "lost_gpu_seconds", "fix_gain", "baseline", "locus", "assets", "victims", "sources", "missing",
    "evidence", "alternatives", "next", "text", "id",
)  # fmt: skip
names = st.text(min_size=1, max_size=120)
rows = st.fixed_dictionaries(
    {},
    optional={
        "metric": names, "subject": names, "observed": anything, "expected": anything, "unit": names,
        "supports": st.booleans(), "text": names, "cause": names, "confidence": st.floats(),
    },
)  # fmt: skip
documents = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(KEYS, anything),
        **dict.fromkeys(("evidence", "alternatives"), st.lists(rows, max_size=3) | anything),
        "locus": st.lists(names, max_size=5) | anything,
        "slowdown": st.floats(0, 1e6) | anything,
        "baseline": st.fixed_dictionaries({"step_s": st.floats(0, 1e6), "from": names}) | anything,
    },
)
jobs = st.fixed_dictionaries(
    {},
    optional={
        "steps": st.integers(0, 10**12) | anything,
        "gpu_ns": st.integers(0, 10**20) | anything,
        "ledger_ns": st.dictionaries(names, st.integers(-(10**18), 10**18)) | anything,
        "step_s": st.floats() | anything,
        **dict.fromkeys(("hosts", "sources", "missing"), st.lists(names) | anything),
        **dict.fromkeys(("start", "end", "ranks", "world", "still_s"), anything),
        "observed": st.floats(0, 1) | anything,
        "gaps": st.lists(st.fixed_dictionaries({"subject": names, "text": names}), max_size=3) | anything,
    },
)


@given(st.lists(documents, max_size=3), st.dictionaries(names, jobs, max_size=3), jobs | anything)
def test_no_document_breaks_the_page(found: list[dict[str, object]], seen: dict[str, object], earlier: object) -> None:
    """Whatever is missing, long, or of another type: at most 80 columns, and no control character."""
    text = report.plain(report.whole(found, {"jobs": seen, "earlier": earlier}))
    for line in text.split("\n"):
        assert report.width(line) <= report.WIDTH
        assert line.isprintable() or not any(ord(character) < 32 or ord(character) == 127 for character in line)
    for name, job in seen.items():
        line = report.live(name, job if isinstance(job, dict) else {}, found)
        assert report.width(line) < report.WIDTH
        assert "\n" not in line


@given(st.lists(st.integers(1, 10**15), min_size=1, max_size=12))
def test_the_printed_rows_of_an_account_add_up_to_the_printed_total(parts: list[int]) -> None:
    ledger = {f"class_{n}": ns for n, ns in enumerate(parts)}
    lines = report.plain(report.account("j", {"steps": 1, "gpu_ns": sum(parts), "ledger_ns": ledger})).splitlines()
    figures = [line.split()[:2] for line in lines[2:]]
    amounts = [float(amount.replace(",", "")) for amount, _ in figures]
    shares = [float(share) for _, share in figures]
    assert sum(amounts[:-1]) == pytest.approx(amounts[-1], abs=1e-6)
    assert sum(shares[:-1]) == pytest.approx(100)
    assert shares[-1] == 100


def test_episodes_come_in_the_order_of_their_cost_and_latent_ones_last() -> None:
    text = told(Path(__file__).parent / "report" / "several.json")
    heads = ("Network congestion at", "Data starvation", "Topology misconfiguration", "Nothing found in job quiet")
    places = [text.index(head) for head in heads]
    assert places == sorted(places)


def test_of_jobs_whose_parts_are_no_longer_kept_the_sum_is_told() -> None:
    earlier = {"jobs": 1200, "steps": 9, "gpu_ns": 6 * 10**12, "ledger_ns": {"straggler": 10**12, "init": 5 * 10**12}}
    text = report.plain(report.whole([], {"jobs": {"j": {"steps": 3}}, "earlier": earlier}))
    said = "1,200 jobs before these, of which only the sum is kept: 6,000 GPU-seconds, of which 1,000 GPU-seconds lost"
    assert said in " ".join(text.split())


def test_a_live_line_says_behind_a_long_name_what_it_has_to_say() -> None:
    line = report.live("nightly-" * 30 + "7", {"steps": 5, "step_s": 0.1}, [])
    assert line.endswith("…y-nightly-nightly-7  5 steps  100 ms  nothing found so far")
    assert report.width(line) == report.WIDTH - 1


@pytest.mark.parametrize(
    ("cause", "said"),
    [("data_starvation", "without the wait for data"), ("topology_misconfiguration", "on the declared fabric")],
)
def test_a_reference_that_is_a_bound_says_which(cause: str, said: str) -> None:
    document = {"cause": cause, "slowdown": 2.0, "baseline": {"step_s": 0.1, "from": "model"}}
    assert report.sentence(document).endswith(f"2 x: 200 ms a step instead of 100 ms {said}")


def test_how_sure_is_told_of_a_cause_and_of_nothing_else() -> None:
    rival = {"cause": "host_stall", "confidence": 0.35, "text": "no rank computes longer"}
    named, unknown = (
        report.plain(report.verdict({"cause": cause, "confidence": 0.82, "state": "resolved", "alternatives": [rival]}))
        for cause in ("straggler", "unknown")
    )
    assert "82 %, resolved" in named
    assert "%" not in unknown
    assert "host stall: no rank computes longer" in named


def test_a_live_line_says_what_a_step_takes_now_and_in_the_end_what_was_found() -> None:
    job = {"steps": 300, "step_s": 0.04, "now_s": 0.1}
    found = {"cause": "data_starvation", "state": "confirmed", "locus": ["rank:1"]}
    assert report.live("j", job, [found]) == "j  300 steps  100 ms (2.5 x)  confirmed: Data starvation at rank 1"
    over = [{**found, "state": "resolved"}] * 2
    assert report.live("j", job, over) == "j  300 steps  40 ms  resolved: Data starvation at rank 1, and 1 more"
    assert report.live("j", job, []) == "j  300 steps  40 ms  nothing found so far"


def test_a_live_line_without_a_name_says_state_and_place_within_its_columns() -> None:
    job = {"steps": 113, "step_s": 0.08, "now_s": 0.19}
    found = {"cause": "data_starvation", "state": "confirmed", "locus": ["job"]}
    assert report.live("", job, [found]) == "113 steps  190 ms (2.38 x)  confirmed: Data starvation, job"
    assert report.live("", job, [found], 51) == "113 steps  190 ms (2.38 x)  confirmed: Data starva…"


def test_a_name_cannot_reach_the_terminal_as_a_control_sequence() -> None:
    text = report.plain(report.verdict({"cause": "straggler", "locus": ["host:n1\x1b[2J\r\nroot"], "job": "a\u202eb"}))
    assert not {"\x1b", "\r", "\u202e"} & set(text)
    assert text.splitlines()[0] == "Straggler at host n1 [2J root"


if __name__ == "__main__":
    for each in CASES:
        each.with_suffix(".txt").write_text(told(each))
