"""What a verdict says it costs, held against itself: its figures are of the same steps, or it says of which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from diagnosd import recording
from diagnosd.analysis import Analysis
from diagnosd.point import Point
from jobs import T0, Fault, Layout, by_time, job

RECORDINGS = sorted((Path(__file__).parents[1] / "recordings").glob("*/expected.toml"))
HEAVY: dict[str, Any] = {"forward": 0.042, "backward": 0.07}  # a step that waits for its processor, not for the wire

Document = Mapping[str, Any]


def revisions(batches: Iterable[Sequence[Point]]) -> list[Document]:
    analysis = Analysis("lab")
    told = [document for points in batches for document in analysis.feed(points)]
    return [document for document in [*told, *analysis.finish()] if document["state"] != "latent"]


def odd(document: Document) -> list[str]:
    """Figures of one verdict that cannot both be so. Its last digits are rounded."""
    slowdown, gain = document["slowdown"], document["fix_gain"]
    step = document["baseline"]["step_s"] * slowdown
    said = [f"saves {gain} of {slowdown} x"] if gain > 1 - 1 / slowdown + 0.001 else []
    if "The evidence is of steps that took" in document["text"] or "A step with a checkpoint takes" in document["text"]:
        return said
    parts = [one for one in document["evidence"] if one["unit"] == "s" and one.get("observed", 0) > step * 1.002]
    return said + [f"{one['metric']} takes {one['observed']} s of {step:.4f} s" for one in parts]


@pytest.mark.parametrize("case", RECORDINGS, ids=lambda path: path.parent.name)
def test_what_is_told_of_a_recording_fits_together(case: Path) -> None:
    assert [odd(document) for document in revisions(recording.read(case.parent)) if odd(document)] == []


SLOW = {
    "short": (Fault("slow_rank", 20, 28, 1, 2.5),),
    "less after a while": (Fault("slow_rank", 20, 28, 1, 3.0), Fault("slow_rank", 28, 50, 1, 1.5)),
    "more after a while": (Fault("slow_rank", 20, 30, 1, 1.4), Fault("slow_rank", 30, 50, 1, 3.0)),
    "twice": (Fault("slow_rank", 20, 30, 1, 1.5), Fault("slow_rank", 40, 48, 1, 3.0)),
}


@pytest.mark.parametrize("name", SLOW)
def test_what_is_told_of_a_slow_rank_fits_together(name: str) -> None:
    told = revisions(by_time(job(Layout(seconds=60), *SLOW[name], seed=3, **HEAVY)[0], 1.0))
    assert told
    assert [odd(document) for document in told if odd(document)] == []


@pytest.mark.parametrize("changes", [HEAVY, {"forward": 0.01, "backward": 0.02, "size": 1e6}], ids=["long", "short"])
def test_the_steps_that_show_that_a_slowdown_is_over_are_not_of_it(changes: dict[str, Any]) -> None:
    for seed in range(3):
        points, (truth,) = job(Layout(seconds=40), Fault("slow_rank", 20, 28, 1, 2.5), seed=seed, **changes)
        confirmed, resolved = revisions(by_time(points, 1.0))
        assert (confirmed["state"], resolved["state"]) == ("confirmed", "resolved")
        assert resolved["slowdown"] == pytest.approx(confirmed["slowdown"], rel=0.03)
        assert resolved["lost_gpu_seconds"] == pytest.approx(truth.extra, rel=0.05)
        ended = datetime.fromisoformat(resolved["end"]).timestamp() - T0 / 1e9
        assert ended == pytest.approx(truth.end, abs=0.5)


def test_evidence_of_other_steps_than_the_figures_says_of_which() -> None:
    points, _ = job(Layout(seconds=60), *SLOW["twice"], seed=3, **HEAVY)
    before, *_, last = (document["text"] for document in revisions(by_time(points, 1.0)))
    assert "The evidence is of" not in before
    assert last.endswith("The evidence is of steps that took 502 ms.")
