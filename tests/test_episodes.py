"""A diagnosis over time: when it is told, when it ends, when it gives way."""

from __future__ import annotations

from typing import Any

import pytest

from diagnosd.analysis.causes import CAUSES
from diagnosd.analysis.classify import Verdict
from diagnosd.analysis.episodes import TRANSITIONS, Episode, Episodes, Found, outline

SECOND = 10**9
START = 1_796_032_800 * SECOND


def verdict(cause: str, confidence: float = 0.9, locus: str = "host:n1") -> Verdict:
    known = CAUSES[cause]
    return Verdict(cause, None, confidence, (locus,), known.owner, known.claims, (), (), ("probe",), (), "", "")


class Seen:
    """Episodes that are looked at once a second; a step takes half a second, of which `slowdown` is known."""

    def __init__(self, slowdown: float = 2.0) -> None:
        self.episodes = Episodes("lab", "train")
        self.second = 0
        self.slowdown = slowdown
        self.told: list[tuple[int, str, str]] = []

    @property
    def now(self) -> int:
        return START + self.second * SECOND

    def look(self, *causes: str, since: int = 0, locus: str = "host:n1") -> None:
        self.second += 1
        found = [Found(verdict(cause, locus=locus), START + since * SECOND, 2 * since, 2 * since) for cause in causes]
        for episode in self.episodes.observe("past", found, 0):
            steps = 2 * (self.second - since)
            episode.observed, episode.expected, episode.ranks = steps / 2, steps / 2 / self.slowdown, 8
            episode.counted = episode.row + steps
            self.episodes.confirm(episode, self.now, steps)
        self.publish()

    def gone(self) -> None:
        self.second += 1
        self.episodes.gone("past", self.now)
        self.publish()

    def publish(self) -> None:
        for document in self.episodes.changes(self.now):
            self.told.append((self.second, document["cause"], document["state"]))


def test_every_transition_leads_to_a_state_of_the_contract() -> None:
    states = {"suspected", "confirmed", "resolved", "withdrawn", "latent"}
    assert set(TRANSITIONS) == states
    assert {to for row in TRANSITIONS.values() for to in row.values()} <= states


def test_it_is_told_when_it_has_lasted_and_not_before() -> None:
    seen = Seen()
    for _ in range(10):
        seen.look("network_congestion")
    assert seen.told == [(5, "network_congestion", "confirmed")]


def test_what_costs_little_is_told_when_it_has_lasted_twice_as_long() -> None:
    seen = Seen(slowdown=1.06)
    for _ in range(12):
        seen.look("network_congestion")
    assert seen.told == [(10, "network_congestion", "confirmed")]


def test_what_passes_before_it_was_told_was_never_said() -> None:
    seen = Seen()
    for _ in range(4):
        seen.look("network_congestion")
    seen.gone()
    assert seen.told == []
    assert seen.episodes.all == []


def test_a_suspicion_may_change_its_cause() -> None:
    seen = Seen()
    for _ in range(3):
        seen.look("network_congestion")
    for _ in range(6):
        seen.look("straggler")
    assert {cause for _, cause, _ in seen.told} == {"straggler"}


def test_it_ends_with_the_loss_and_a_return_soon_after_is_the_same_episode() -> None:
    seen = Seen()
    for _ in range(8):
        seen.look("data_starvation")
    seen.gone()
    for _ in range(20):
        seen.look()
    for _ in range(10):
        seen.look("data_starvation", since=30)
    (episode,) = seen.episodes.all
    assert [state for _, _, state in seen.told] == ["confirmed", "resolved", "confirmed"]
    assert episode.start == START
    assert episode.end is None


def test_a_return_at_another_place_is_another_episode() -> None:
    seen = Seen()
    for _ in range(8):
        seen.look("data_starvation", locus="rank:1")
    seen.gone()
    for _ in range(8):
        seen.look("data_starvation", since=10, locus="rank:7")
    assert len({episode.id for episode in seen.episodes.all}) == 2


def test_unknown_waits_and_gives_way_to_a_cause() -> None:
    seen = Seen()
    for _ in range(25):
        seen.look("unknown")
    assert seen.told == [(20, "unknown", "confirmed")]
    for _ in range(8):
        seen.look("straggler")
    assert [(cause, state) for _, cause, state in seen.told[1:]] == [
        ("unknown", "withdrawn"),
        ("straggler", "confirmed"),
    ]


@pytest.mark.parametrize("seconds", [4, 12])
@pytest.mark.parametrize("slowdown", [1.05, 2.0])
def test_what_passes_before_unknown_is_told_is_kept_where_it_lasted_and_cost(seconds: int, slowdown: float) -> None:
    seen = Seen(slowdown)
    for _ in range(seconds):
        seen.look("unknown")
    seen.gone()
    assert seen.told == []
    brief = seen.episodes.brief()
    assert [e.verdict.cause for e in brief] == (["unknown"] if seconds > 5 and slowdown > 1.1 else [])
    assert all(outline(e)["end"] > outline(e)["start"] for e in brief)


def test_what_is_told_is_not_told_as_too_short_beside() -> None:
    seen = Seen()
    for _ in range(12):
        seen.look("unknown")
    assert [e.verdict.cause for e in seen.episodes.brief()] == ["unknown"]
    for _ in range(12):
        seen.look("data_starvation")
    assert [cause for _, cause, _ in seen.told] == ["data_starvation"]
    assert seen.episodes.brief() == []


def test_a_mild_slowdown_without_a_cause_bothers_nobody() -> None:
    seen = Seen(slowdown=1.07)
    for _ in range(60):
        seen.look("unknown")
    assert seen.told == []


def test_a_told_cause_outlasts_evidence_that_thins_out() -> None:
    seen = Seen()
    for _ in range(8):
        seen.look("network_congestion")
    for _ in range(40):
        seen.look("unknown")
    assert [(cause, state) for _, cause, state in seen.told] == [("network_congestion", "confirmed")]


def test_a_told_cause_gives_way_to_another_that_lastingly_explains_the_same_loss() -> None:
    seen = Seen()
    for _ in range(8):
        seen.look("host_stall")
    for _ in range(4):
        seen.look("straggler")
    for _ in range(4):
        seen.look("host_stall")
    assert len(seen.told) == 1
    for _ in range(16):
        seen.look("straggler")
    assert [(cause, state) for _, cause, state in seen.told[1:]] == [
        ("host_stall", "withdrawn"),
        ("straggler", "confirmed"),
    ]


def test_what_is_withdrawn_has_an_end() -> None:
    seen = Seen()
    for _ in range(25):
        seen.look("unknown")
    for _ in range(8):
        seen.look("straggler")
    withdrawn = next(episode for episode in seen.episodes.all if episode.state == "withdrawn")
    assert seen.episodes.document(withdrawn)["end"] == "2026-11-30T10:00:28.000Z"


def test_without_a_cause_the_place_does_not_wander() -> None:
    seen = Seen()
    for second in range(60):
        seen.look("unknown", locus=f"rank:{second // 5 % 2}" if second > 25 else "rank:0")
    assert [state for _, _, state in seen.told] == ["confirmed"]


class Asked(Seen):
    """By a reference that is asked once a second, and that alone shows when it is over."""

    def look(self, *causes: str, since: int = 0, locus: str = "host:n1") -> None:
        self.second += 1
        found = [Found(verdict(cause, locus=locus), START, 0, None) for cause in causes]
        for episode in self.episodes.look("model", found, 0, self.now):
            episode.observed, episode.expected, episode.ranks = 2.0, 1.0, 8
            self.episodes.confirm(episode, self.now, 2 * self.second)
        self.publish()


def test_what_a_bound_does_not_show_for_a_few_looks_goes_on() -> None:
    seen = Asked()
    for turn in range(100):
        seen.look(*([] if turn % 10 in (6, 7, 8, 9) else ["data_starvation"]))
    assert [state for _, _, state in seen.told] == ["confirmed"]


def test_what_a_bound_shows_no_more_has_ended_when_it_was_missed_for_the_first_time() -> None:
    seen = Asked()
    for _ in range(8):
        seen.look("data_starvation")
    for _ in range(12):
        seen.look()
    (episode,) = seen.episodes.all
    assert [state for _, _, state in seen.told] == ["confirmed", "resolved"]
    assert episode.end == START + 9 * SECOND


def test_what_comes_back_against_a_bound_goes_on_through_a_few_looks_too() -> None:
    seen = Asked()
    for shown in [8 * [True], 12 * [False], 8 * [True], 3 * [False], 5 * [True]]:
        for one in shown:
            seen.look(*(["data_starvation"] if one else []))
    assert [state for _, _, state in seen.told] == ["confirmed", "resolved", "confirmed"]


def test_a_loss_against_a_bound_that_no_cause_is_named_for_any_more_has_not_ended() -> None:
    seen = Asked()
    for _ in range(8):
        seen.look("topology_misconfiguration")
    for _ in range(30):
        seen.look("unknown")
    assert [(cause, state) for _, cause, state in seen.told] == [("topology_misconfiguration", "confirmed")]


def test_of_two_causes_against_a_bound_each_ends_by_itself() -> None:
    seen = Asked()
    for _ in range(8):
        seen.look("data_starvation", "topology_misconfiguration")
    for _ in range(12):
        seen.look("topology_misconfiguration")
    assert [(cause, state) for _, cause, state in seen.told[2:]] == [("data_starvation", "resolved")]


def test_two_causes_of_different_parts_are_two_episodes() -> None:
    seen = Seen()
    for _ in range(8):
        seen.look("network_congestion", "data_starvation")
    assert {cause for _, cause, _ in seen.told} == {"network_congestion", "data_starvation"}


def test_the_id_is_that_of_the_step_and_not_of_its_time_by_some_clock() -> None:
    def identity(step: int, start: int) -> str:
        episodes = Episodes("lab", "train")
        for second in range(1, 9):
            (episode,) = episodes.observe("past", [Found(verdict("straggler"), start, 40, step)], 0)
            episode.observed, episode.expected = 2.0, 1.0
            episodes.confirm(episode, START + second * SECOND, 2 * second)
        return episode.id

    assert identity(40, START) == identity(40, START - SECOND // 100)
    assert identity(40, START) != identity(41, START)


def test_revisions_rise_with_what_is_told() -> None:
    seen, revisions = Seen(), []
    for second in range(70):
        seen.look("straggler")
        (episode,) = seen.episodes.all
        episode.lost = float(second)
        revisions += [document["revision"] for document in seen.episodes.changes(seen.now + SECOND, final=second == 69)]
    (episode,) = seen.episodes.all
    assert episode.revision == 3  # confirmed, after a minute, and the last word
    assert revisions[-1] == 3


class Counted(Episodes):
    """Of how many episodes a document was made."""

    made = 0

    def document(self, episode: Episode) -> dict[str, Any]:
        self.made += 1
        return super().document(episode)


def test_what_has_ended_and_is_told_takes_no_work_any_more() -> None:
    seen = Seen()
    seen.episodes = counted = Counted("lab", "train")
    for place in range(20):
        for _ in range(8):
            seen.look("straggler", since=9 * place, locus=f"rank:{place}")
        seen.gone()
    assert [state for _, _, state in seen.told] == ["confirmed", "resolved"] * 20
    counted.made = 0
    assert counted.changes(seen.now + 3600 * SECOND, final=True) == []
    assert counted.made == 0


@pytest.mark.parametrize(
    ("ranks", "slowdown", "severity"), [(2, 1.1, "info"), (2, 2.0, "ticket"), (8, 1.2, "ticket"), (512, 1.3, "page")]
)
def test_severity_follows_the_rate_of_loss(ranks: int, slowdown: float, severity: str) -> None:
    seen = Seen(slowdown)
    for _ in range(8):
        seen.look("network_congestion")
    (episode,) = seen.episodes.all
    episode.ranks = ranks
    assert seen.episodes.document(episode)["severity"] == severity


def test_keys_that_do_not_apply_are_missing() -> None:
    seen = Seen()
    for _ in range(8):
        seen.look("network_congestion")
    (episode,) = seen.episodes.all
    assert "end" not in seen.episodes.document(episode)
    seen.gone()
    assert seen.episodes.document(episode)["end"] == "2026-11-30T10:00:09.000Z"
    seen.episodes.latent("model", verdict("communication_bound"), 0)
    latent = seen.episodes.document(seen.episodes.all[-1])
    assert not {"start", "detected", "end", "slowdown"} & set(latent)


@pytest.mark.parametrize("turns", [2, 4, 7, 25])
def test_no_two_told_episodes_explain_the_same_loss_at_once(turns: int) -> None:
    seen = Seen()
    for turn in range(100):
        seen.look("straggler" if turn // turns % 2 else "host_stall")
        told = [episode for episode in seen.episodes.all if episode.state == "confirmed"]
        assert len(told) <= 1
