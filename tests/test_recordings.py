"""recordings/ is the specification of the classifier: every folder is replayed and held against its expected.toml.

To add a case, add a folder: recording.lp.zst, expected.toml (telemetry.md 6) and a README.md that tells the story.
"""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from diagnosd import analyzer, recording
from diagnosd.analysis import Analysis
from diagnosd.point import Point, encode
from jobs import Fault, job

ROOT = Path(__file__).parents[1]
CONTRACT = ROOT.parent / "shared/checks/contract.py"
CASES = sorted(folder for folder in (ROOT / "recordings").iterdir() if folder.is_dir())

# What `start`, `end` and the telling may be late by: whoever is told within a quarter of a minute still sees it happen.
NEAR_S = 15.0
COST = 2.0  # a factor on lost GPU-seconds: the reference is the job's own noisy past
LARGEST = 400 * 1024  # bytes of a folder
LATENESS = 2.9  # s, within the 3 s that the analysis waits

Document = Mapping[str, Any]


def told(batches: Iterable[Sequence[Point]]) -> str:
    """What a replay of these points prints, documents and text."""
    analysis, findings, stream = Analysis("case"), analyzer.Findings(), io.StringIO()
    for points in batches:
        findings.note(analysis.feed(points))
    findings.note(analysis.finish())
    assert analysis.order.late == 0
    for output in ("json", "text"):
        analyzer.conclude(findings.documents, analysis.summary(), output, stream)
    return stream.getvalue()


def verdicts(text: str) -> list[Document]:
    documents = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [d for d in documents if d["type"] == "diagnosis"]


def complaints(found: Sequence[Document], expected: Sequence[Document]) -> list[str]:
    """What a replay said that is not so, and did not say that is."""
    reported = [d for d in found if d["state"] in ("confirmed", "resolved") and d["cause"] != "communication_bound"]
    said = []
    for episode in expected:
        candidates = [d for d in reported if (d["job"], d["cause"]) == (episode["job"], episode["cause"])]
        problems = [(list(_differences(d, episode)), d) for d in candidates]
        best, document = min(problems, key=lambda p: len(p[0]), default=(["was not found"], None))
        said += [f"{episode['cause']} of {episode['job']}: {problem}" for problem in best]
        reported = [d for d in reported if d is not document]
    return said + [
        f"unexpected: {d['cause']} of {d['job']} at {', '.join(d['locus'])}, {d.get('text')}" for d in reported
    ]


def _differences(document: Document, episode: Document) -> Iterator[str]:
    if "subtype" in episode and document.get("subtype") != episode["subtype"]:
        yield f"subtype is {document.get('subtype')}, expected {episode['subtype']}"
    if "locus" in episode and not set(document["locus"]) & set(episode["locus"]):
        yield f"locus is {', '.join(document['locus'])}, expected any of {', '.join(episode['locus'])}"
    for key in ("start", "end"):
        if key in episode:
            if key not in document:
                yield f"{key} is missing, expected {episode[key]}"
            elif abs((datetime.fromisoformat(document[key]) - episode[key]).total_seconds()) > NEAR_S:
                yield f"{key} is {document[key]}, expected {episode[key]}"
    if "start" in episode:
        late = (datetime.fromisoformat(document["detected"]) - episode["start"]).total_seconds()
        if late > NEAR_S:
            yield f"was told {late:.0f} s after the onset, expected within {NEAR_S:.0f} s"
    lost, cost = document["lost_gpu_seconds"], episode.get("lost_gpu_seconds")
    if cost is not None and not cost / COST <= lost <= cost * COST:
        yield f"lost_gpu_seconds is {lost:.1f}, expected {cost:.1f}"


def expectation(folder: Path) -> list[Document]:
    table = tomllib.loads((folder / "expected.toml").read_text())
    episodes: list[Document] = table.get("episode", [])
    return episodes


def points_of(folder: Path) -> list[Point]:
    return sorted((p for batch in recording.read(folder) for p in batch), key=lambda p: p.time)


def shuffled(points: Sequence[Point], seed: int) -> list[list[Point]]:
    """Late within the lateness, some twice, in batches of odd sizes."""
    chance = random.Random(seed)
    twice = [p for p in points for _ in range(chance.choice((1, 1, 1, 2)))]
    arrivals = [(p.time + chance.uniform(0, LATENESS) * 1e9, n) for n, p in enumerate(twice)]
    order = [twice[n] for _, n in sorted(arrivals)]
    return [order[at : at + 997] for at in range(0, len(order), 997)]


@pytest.mark.parametrize("folder", CASES, ids=lambda folder: folder.name)
def test_a_recording_gives_the_verdict_that_is_expected_of_it(folder: Path) -> None:
    assert complaints(verdicts(told(recording.read(folder))), expectation(folder)) == []


@pytest.mark.parametrize("folder", CASES, ids=lambda folder: folder.name)
def test_points_that_come_late_or_twice_change_no_byte_of_a_verdict(folder: Path) -> None:
    points = points_of(folder)
    assert told(shuffled(points, 1)) == told([points])


@pytest.mark.parametrize("folder", CASES, ids=lambda folder: folder.name)
def test_a_recording_is_small_tells_its_story_and_keeps_the_contract(folder: Path) -> None:
    assert (folder / "README.md").is_file()
    assert sum(file.stat().st_size for file in folder.glob("*.lp*")) <= LARGEST
    if CONTRACT.exists():
        check = subprocess.run([sys.executable, CONTRACT, folder], capture_output=True, text=True, check=False)
        assert check.returncode == 0, check.stdout


# -- the runner itself -------------------------------------------------------------------------------------------------


def case(folder: Path, *faults: Fault, expected: str = "") -> Path:
    points, _ = job(None, *faults)
    with recording.Writer(folder / "recording.lp.zst") as writer:
        writer.write(encode(points))
    (folder / "expected.toml").write_text(expected)
    return folder


STARVED = """
[[episode]]
job = "train"
cause = "data_starvation"
start = 2026-11-30T10:00:25Z
end = 2026-11-30T10:00:45Z
locus = ["rank:1"]
"""


def judged(folder: Path) -> list[str]:
    return complaints(verdicts(told(recording.read(folder))), expectation(folder))


def test_the_runner_passes_a_case_that_is_as_expected(tmp_path: Path) -> None:
    folder = case(tmp_path, Fault("loader", 25, 45, rank=1, size=0.15), expected=STARVED)
    assert judged(folder) == []
    points = points_of(folder)
    assert told(shuffled(points, 2)) == told([points])


def test_the_runner_names_what_is_not_as_expected(tmp_path: Path) -> None:
    wrong = STARVED.replace("10:00:25", "10:02:25").replace("rank:1", "rank:0")
    said = judged(case(tmp_path, Fault("loader", 25, 45, rank=1, size=0.15), expected=wrong))
    assert len(said) == 2
    assert "locus is rank:1" in said[0]
    assert "start is 2026-11-30T10:00:2" in said[1]


def test_the_runner_names_what_was_missed_and_what_nobody_expected(tmp_path: Path) -> None:
    other = STARVED.replace("data_starvation", "hang")
    said = judged(case(tmp_path, Fault("loader", 25, 45, rank=1, size=0.15), expected=other))
    assert said[0] == "hang of train: was not found"
    assert said[1].startswith("unexpected: data_starvation of train at rank:1")


def test_the_runner_wants_silence_about_a_healthy_job(tmp_path: Path) -> None:
    assert judged(case(tmp_path)) == []
