"""The replay program: what it prints, what it refuses, and that the same points give the same bytes."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from diagnosd import analyzer
from diagnosd.point import Point, Series, encode
from diagnosd.recording import Writer
from jobs import Fault, job

ROOT = Path(__file__).parents[1]
SECOND = 10**9


def recorded(path: Path, points: Sequence[Point], cluster: str = "east") -> Path:
    with Writer(path, cluster=cluster) as writer:
        for at in range(0, len(points), 500):
            writer.write(encode(points[at : at + 500]))
            writer.flush()
    return path


@pytest.fixture(scope="module")
def starved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A minute of two ranks, the loader of one of them slow from the 25th second on."""
    points, _ = job(None, Fault("loader", 25, 45, rank=1, size=0.15))
    return recorded(tmp_path_factory.mktemp("recording") / "starved.lp.zst", points)


def test_documents_are_one_a_line_every_episode_once_and_then_the_summary(
    starved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert analyzer.replay(starved, "json") == 0
    documents = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [document["type"] for document in documents] == ["diagnosis"] * (len(documents) - 1) + ["summary"]
    ids = [document["id"] for document in documents[:-1]]
    assert len(ids) == len(set(ids))
    found = [d for d in documents[:-1] if d["state"] == "resolved"]
    assert [d["cause"] for d in found] == ["data_starvation"]
    assert found[0]["cluster"] == "east"
    (account,) = documents[-1]["jobs"].values()
    assert sum(account["ledger_ns"].values()) == account["gpu_ns"]


def test_recordings_of_several_clusters_in_one_folder_are_told_apart_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    points, _ = job(None, seconds=10)
    for cluster in ("west", "east"):
        recorded(tmp_path / f"{cluster}.lp", points, cluster)
    assert analyzer.replay(tmp_path) == 0
    assert capsys.readouterr().err.startswith(
        "diagnosd: recordings of several clusters, east (east.lp), west (west.lp): "
    )


def test_text_is_for_people_and_without_colour_where_nobody_can_see_it(
    starved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert analyzer.replay(starved) == 0
    text = capsys.readouterr().out
    assert text.startswith("Data starvation")
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("environment", "colour"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colour_is_for_terminals_of_people_who_did_not_refuse_it(
    environment: dict[str, str], colour: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = Terminal()
    analyzer.conclude([], {"jobs": {"demo": {"steps": 3, "gpu_ns": 5, "ledger_ns": {"init": 5}}}}, "text", stream)
    assert ("\x1b[" in stream.getvalue()) == colour


def test_the_same_recording_gives_the_same_bytes_in_every_process(starved: Path) -> None:
    code = f"import sys; from diagnosd import analyzer; sys.exit(analyzer.replay({str(starved)!r}, 'json'))"
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1


def test_changes_are_said_as_they_come(starved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert analyzer.replay(starved, speed=1000.0) == 0
    told = capsys.readouterr().out
    changes = told[: told.index("\nData starvation")].splitlines()
    said = {line.split()[2]: line[:8] for line in changes}
    assert "10:00:25" < said["confirmed:"] < "10:00:45" < said["resolved:"] < "10:01:00"


def test_of_too_many_findings_those_that_are_over_go_first() -> None:
    findings = analyzer.Findings(keep=10)
    for number in range(100):
        state = "confirmed" if number == 3 else "resolved"
        findings.note([{"id": str(number), "state": state, "cause": "hang", "locus": ["job"]}])
    assert len(findings.documents) <= 10
    assert {"3", "99"} <= {document["id"] for document in findings.documents}
    assert findings.dropped == 100 - len(findings.documents)


def test_points_are_paced_by_their_own_time() -> None:
    series = Series.of("m", host="n1")
    points = [Point(series, {"value": n}, n * SECOND) for n in range(1, 11)]
    now = [100.0]
    arrivals = []

    def sleep(seconds: float) -> None:
        now[0] += seconds

    for part in analyzer.paced([points], 2.0, lambda: now[0], sleep):
        arrivals += [(each.time // SECOND, now[0]) for each in part]
    assert arrivals == [(n, 100.0 + (n - 1) / 2) for n in range(1, 11)]


def test_silence_is_noticed_once_until_something_comes_again() -> None:
    some = [Point(Series.of("m", host="n1"), {"value": 1}, SECOND)]
    now, said = iter([0.0, 1.0, 20.0, 40.0, 60.0, 70.0, 120.0]), []
    batches = [some, [], [], [], some, [], []]
    assert list(analyzer.noticing(batches, lambda: next(now), said.append)) == batches
    assert [line[:31] for line in said] == ["nothing has come for 30 s: do t"] * 2


def written(text: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder / "recording.lp"
        path.write_bytes(text)
        return path

    return write


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: folder / "missing.lp", "missing.lp: no such recording"),
        (lambda folder: folder, "no recording in this folder"),
        (written(b""), "the recording is empty"),
        (
            written(b"Dear diary,\n"),
            "recording.lp is no recording, or is damaged at its beginning: line 1: want field=value",
        ),
        (written(b"# diagnosd-recording 9 {}\nm value=1i 1800000000000000000\n"), "version 9"),
        (written(os.urandom(4096)), "is no recording, or is damaged at its beginning: "),
    ],
    ids=["missing", "folder", "empty", "prose", "version", "noise"],
)
def test_what_is_no_recording_is_refused_with_its_reason(
    make: Callable[[Path], Path], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert analyzer.replay(make(tmp_path)) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("diagnosd: ")
    assert said in told.err
    assert "Traceback" not in told.err


def test_what_was_left_out_is_told_in_one_line(
    starved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torn = tmp_path / "torn.lp.zst"
    torn.write_bytes(starved.read_bytes()[:-100])
    assert analyzer.replay(torn) == 0
    told = capsys.readouterr()
    assert told.out.startswith("Data starvation")
    assert told.err.startswith(f"diagnosd: left out: 1 unfinished end (first: {torn}: ")


def test_a_recording_that_is_removed_while_it_is_followed_gets_its_verdict(starved: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(starved, tmp_path))
    command = [sys.executable, "-m", "diagnosd", "replay", "--follow", str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT) as followed:
        assert followed.stdout
        assert "Data starvation" in followed.stdout.readline()
        path.unlink()
        out, err = followed.communicate(timeout=30)
    assert "\nJob " in out
    assert err == f"diagnosd: left out: 1 file or the rest of one (first: {path}: removed while it was followed)\n"
    assert followed.returncode == 0


def set_back(points: Sequence[Point], at: float, by: float) -> list[Point]:
    """In the order in which they came, by a clock that was set back so many seconds after the first."""
    limit = points[0].time + round(at * SECOND)
    return [p if p.time < limit else p._replace(time=p.time - round(by * SECOND)) for p in points]


def test_a_job_whose_clock_was_set_back_is_not_called_healthy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    points, _ = job(seconds=60.0, ranks_a_host=2, fetch=0.01)
    path = recorded(tmp_path / "back.lp.zst", set_back(points, 30, 600))
    assert analyzer.replay(path, "json") == 0
    (part,) = json.loads(capsys.readouterr().out.splitlines()[-1])["jobs"].values()
    (gap,) = part["gaps"]
    assert part["observed"] == pytest.approx(0.5, abs=0.05)
    assert gap["subject"] == "host:h0"
    assert analyzer.replay(path) == 0
    text = capsys.readouterr().out
    assert text.startswith("Nothing found in what was seen of job train")
    assert " points came when their time had been judged" in " ".join(text.split())


def test_a_bad_line_is_told_with_its_file_and_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points, _ = job(seconds=5.0)
    path = tmp_path / "bad.lp"
    path.write_bytes(b"what is this\n" + encode(points))
    assert analyzer.replay(path) == 0
    assert capsys.readouterr().err.startswith(f"diagnosd: left out: 1 line that does not parse (first: {path}:1: ")


def test_a_wrong_cluster_file_is_told_with_its_key(
    starved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('[fabric]\nrate_gbps = "fast"\n')
    assert analyzer.replay(starved, cluster=file) == 1
    told = capsys.readouterr().err
    assert str(file) in told
    assert "fabric.rate_gbps" in told


def test_the_name_of_a_declared_cluster_wins(starved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('name = "west"\n')
    assert analyzer.replay(starved, "json", cluster=file) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["cluster"] == "west"


@pytest.mark.parametrize(
    ("measurement", "field", "value"),
    [
        ("diagnosd_step", "comm", 1e300),
        ("diagnosd_step", "duration", 1e300),
        ("diagnosd_step", "forward", -1e300),
        ("diagnosd_step", "sync_exit", 2**63 - 1),
        ("pressure", "total", 2**63 - 1),
    ],
)
def test_one_absurd_number_changes_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], measurement: str, field: str, value: float
) -> None:
    points, _ = job(None, Fault("loader", 25, 45, rank=1, size=0.15))
    places = [place for place, each in enumerate(points) if each.series.measurement == measurement]
    assert places
    odd = places[len(places) // 2]
    points[odd] = points[odd]._replace(fields={**points[odd].fields, field: value})
    analyzer.replay(recorded(tmp_path / "a.lp", points), output="json")
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [document["cause"] for document in told if "detected" in document] == ["data_starvation"]
