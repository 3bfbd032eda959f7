"""What an episode cost, and what repairing its cause would gain."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from diagnosd.analysis.baseline import Baseline, Floats, Ints, Reference
from diagnosd.analysis.checkpoints import Save
from diagnosd.analysis.classify import Verdict
from diagnosd.analysis.compare import RECENT, Comparison
from diagnosd.analysis.decompose import OWN
from diagnosd.analysis.episodes import Episode
from diagnosd.analysis.history import History


def price(episode: Episode, baseline: Baseline, numbers: Ints, reference: Reference | float) -> None:
    """Add its newest cycles: its share of the excess over the reference (a float: seconds a step)."""
    _begin(episode)
    fresh = numbers[numbers >= episode.counted]
    observed, steps = baseline.seconds(fresh), baseline.steps(fresh)
    if isinstance(reference, Reference):
        expected = reference.expect(baseline.work(fresh))[:, 0] * steps
        episode.step, episode.scatter = reference.step, float(reference.scale[0]) / reference.step
    else:
        expected = reference * steps
        episode.step, episode.scatter = reference, 0.0
    episode.lost += episode.share * float((observed - expected).sum()) * episode.ranks
    episode.observed += float(observed.sum())
    episode.expected += float(expected.sum())
    episode.counted = int(numbers[-1]) + 1 if len(numbers) else episode.counted


def price_saves(episode: Episode, saves: Iterable[Save], usual: float) -> None:
    """Add the slow checkpoints that are not in its sums yet, and the steps between them.

    `usual`: seconds of a cycle with a checkpoint. Repairing it saves what they take longer.
    """
    _begin(episode)
    fresh = [save for save in saves if save.number >= episode.counted]
    observed = sum(save.end - save.since for save in fresh) / 1e9
    lost = sum(save.seconds - usual for save in fresh)
    episode.lost += lost * episode.ranks
    episode.observed += observed
    episode.expected += observed - lost
    episode.counted = fresh[-1].number + 1 if fresh else episode.counted
    episode.gain = max(1 - episode.expected / max(episode.observed, 1e-9), 0.0)


def _begin(episode: Episode) -> None:
    """A suspicion may still change its onset, so it is priced anew each time."""
    if episode.state == "suspected":
        episode.lost = episode.observed = episode.expected = 0.0
        episode.counted = episode.row


def gain(verdict: Verdict, c: Comparison, history: History, numbers: Ints) -> float:
    """Share of the step that repairing this alone would save: the next to arrive sets the pace then."""
    outside = [part for part in verdict.claims if part not in OWN]
    inside = [OWN.index(part) for part in verdict.claims if part in OWN]
    saved = max(c.excess(*outside), 0.0) if outside else 0.0
    if inside:
        recent = numbers[-RECENT:]
        own, late = history.floats("own", recent)[..., inside].sum(axis=-1), history.floats("late", recent)
        grown = _only(np.maximum(own - c.own_expected[:, inside].sum(axis=1), 0), verdict.columns)
        known = not np.isnan(late).any()
        each = late.max(axis=1) - (late - grown).max(axis=1) if known else grown.max(axis=1)
        saved += float(each.mean())
    return float(np.clip(saved / max(c.step * c.slowdown, 1e-9), 0.0, 1.0))


def waited(c: Comparison) -> float:
    """Share of the loss that the ranks spent in communication: what each of them did not spend in work of its own."""
    grown = (c.own_observed - c.own_expected).sum(axis=1)
    return 1.0 - float(np.clip(grown / max(c.lost, 1e-9), 0.0, 1.0).mean())


def _only(grown: Floats, columns: tuple[int, ...]) -> Floats:
    """The growth [C,R] of these columns; of all where none is named."""
    if not columns:
        return grown
    kept = np.zeros_like(grown)
    kept[:, columns] = grown[:, columns]
    return kept
