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
    if isinstance(reference, Reference):
        episode.step, episode.scatter = reference.step, float(reference.scale[0]) / reference.step
    else:
        episode.step, episode.scatter = reference, 0.0
    _add(episode, *_took(baseline, numbers[numbers >= episode.counted], reference))
    episode.counted = int(numbers[-1]) + 1 if len(numbers) else episode.counted


def price_until(episode: Episode, baseline: Baseline, last: int, reference: Reference) -> None:
    """Take out what came after its last cycle: that it was over showed only when some were as they used to be."""
    numbers = baseline.usable(max(last + 1, episode.row))
    _add(episode, *(-seconds for seconds in _took(baseline, numbers[numbers < episode.counted], reference)))
    episode.counted = min(episode.counted, last + 1)


def _took(baseline: Baseline, numbers: Ints, reference: Reference | float) -> tuple[float, float]:
    """Seconds that these cycles took together, and that they should have taken."""
    steps = baseline.steps(numbers)
    each = reference.expect(baseline.work(numbers))[:, 0] if isinstance(reference, Reference) else reference
    return float(baseline.seconds(numbers).sum()), float((each * steps).sum())


def _add(episode: Episode, observed: float, expected: float) -> None:
    episode.lost += episode.share * (observed - expected) * episode.ranks
    episode.observed += observed
    episode.expected += expected


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
    episode.mends = 1.0


def _begin(episode: Episode) -> None:
    """A suspicion may still change its onset, so it is priced anew each time."""
    if episode.state == "suspected":
        episode.lost = episode.observed = episode.expected = 0.0
        episode.counted = episode.row


def mends(verdict: Verdict, c: Comparison, history: History, numbers: Ints) -> float:
    """Share of the loss that repairing this alone would undo: the next to arrive sets the pace then.

    No more than all of it, though what this cause made longer may be more, where something else became shorter.
    """
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
    return float(np.clip(saved / max(c.lost, 1e-9), 0.0, 1.0))


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
