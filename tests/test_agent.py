"""The node program: what hangs, what fails, what is full, and what is written when it ends."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from shlex import join

import pytest
from bed.machine import open_homes

from diagnosd.agent import DEADLINE_S, TICK_S, Agent, declaration, make
from diagnosd.collectors import COLLECTORS, Collector
from diagnosd.collectors.machine import Machine
from diagnosd.collectors.steps import Steps
from diagnosd.documents import DocumentError
from diagnosd.pace import BUDGET, LONGEST, Batch
from diagnosd.point import Point, Series, encode
from diagnosd.recording import RecordingError, read
from diagnosd.sinks import Recorder, Ring, recording_of

ROOT = Path(__file__).parents[1]
NOW = 1_700_000_000_000_000_000
PATIENCE_S = 10.0


class Odd:
    """A place that is as a test wants it."""

    every = 1
    errors = 0

    def __init__(self, name: str) -> None:
        self.name = name
        self.reads = 0
        self.broken: Exception | None = None
        self.answers = threading.Event()
        self.answers.set()

    def read(self, now_ns: int) -> list[Point]:
        self.reads += 1
        self.answers.wait(PATIENCE_S)
        if self.broken:
            raise self.broken
        return [Point(Series.of("net", host="n01", interface=self.name), {"bytes_sent": self.reads}, now_ns)]


class Kept:
    """A sink that remembers."""

    lost = 0

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.lines = b""
        self.closed = False

    def take(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            self.points += batch.points
            self.lines += batch.lines

    def close(self) -> None:
        self.closed = True


def settle(agent: Agent) -> None:
    for lane in agent._lanes:
        lane.idle(PATIENCE_S)


def ring_points(agent: Agent) -> list[Point]:
    return [point for batch in agent._ring._batches for point in batch.points]


def of(measurement: str, points: Sequence[Point]) -> list[Point]:
    return [each for each in points if each.series.measurement == measurement]


def heartbeat(points: Sequence[Point], collector: str = "agent") -> Point:
    return [each for each in of("diagnosd_agent", points) if each.series.tag("collector") == collector][-1]


def agent_of(*collectors: Collector, sinks: Sequence[Kept] = ()) -> Agent:
    return Agent("n01", collectors, sinks)


def test_every_tick_has_a_heartbeat_with_the_agents_own_cost() -> None:
    agent = agent_of(Odd("eth0"))
    for tick in range(3):
        agent._tick(tick)
    beats = [each for each in of("diagnosd_agent", ring_points(agent)) if each.series.tag("collector") == "agent"]
    assert len(beats) == 3
    assert set(beats[0].fields) == {"up", "seconds", "errors", "dropped", "cpu_seconds", "rss"}
    assert beats[0].fields["cpu_seconds"] == pytest.approx(time.process_time(), abs=60)


def test_a_collector_is_read_as_often_as_it_says() -> None:
    slow, fast = Odd("slow"), Odd("fast")
    slow.every = 10
    agent = agent_of(slow, fast)
    for tick in range(21):
        agent._tick(tick)
        settle(agent)
    assert (slow.reads, fast.reads) == (3, 21)


def test_a_collector_that_hangs_is_left_alone_and_the_others_go_on() -> None:
    hanging, other = Odd("nfs"), Odd("eth0")
    hanging.answers.clear()
    agent = agent_of(hanging, other)
    agent._tick(0)
    agent._lanes[1].idle(PATIENCE_S)
    agent._lanes[0]._asked_at -= DEADLINE_S
    for tick in range(1, 5):
        agent._tick(tick)
        agent._lanes[1].idle(PATIENCE_S)
    hanging.answers.set()
    assert (hanging.reads, other.reads) == (1, 5)
    (event,) = of("diagnosd_event", ring_points(agent))
    assert event.series.tag("kind") == "telemetry_gap"
    assert event.fields["text"] == "nfs has not answered for 2 s and is left alone until it does"


def test_two_collectors_that_hang_at_once_are_two_events() -> None:
    both = [Odd("nfs"), Odd("lustre")]
    agent = agent_of(*both)
    for collector, lane in zip(both, agent._lanes, strict=True):
        collector.answers.clear()
        lane.ask(NOW)
        lane._asked_at -= DEADLINE_S
    agent._tick(1)
    for collector in both:
        collector.answers.set()
    first, second = of("diagnosd_event", ring_points(agent))
    assert first.time != second.time


def test_a_collector_that_answers_again_is_read_again() -> None:
    collector = Odd("nfs")
    collector.answers.clear()
    agent = agent_of(collector)
    agent._tick(0)
    agent._lanes[0]._asked_at -= DEADLINE_S
    agent._tick(1)
    collector.answers.set()
    agent._lanes[0]._idle.wait(PATIENCE_S)
    agent._tick(10)
    settle(agent)
    assert collector.reads == 2
    assert agent._lanes[0].paced.up


def test_what_is_late_or_fails_again_and_again_is_told_once_an_hour(caplog: pytest.LogCaptureFixture) -> None:
    late, failing = Odd("nfs"), Odd("odd")
    agent = agent_of(late, failing)
    for tick in range(0, 8, 2):
        late.answers.clear()
        failing.broken = OSError("Input/output error") if tick % 4 else None
        agent._tick(tick)
        agent._lanes[1].idle(PATIENCE_S)
        agent._lanes[0]._asked_at -= DEADLINE_S
        agent._tick(tick + 1)
        agent._lanes[1].idle(PATIENCE_S)
        late.answers.set()
        agent._lanes[0]._idle.wait(PATIENCE_S)
    assert (late.reads, failing.reads) == (4, 8)
    assert len(of("diagnosd_event", ring_points(agent))) == 1
    assert len(caplog.records) == 2


def test_a_file_that_is_not_as_it_should_be_costs_its_own_collector_this_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    odd, other = Odd("odd"), Odd("eth0")
    odd.broken = IndexError("list index out of range")
    agent = agent_of(odd, other)
    for tick in range(3):
        agent._tick(tick)
        settle(agent)
    agent._tick(10)
    assert heartbeat(ring_points(agent), "odd").fields["up"] == 0
    assert heartbeat(ring_points(agent), "odd").fields["errors"] == 3
    assert heartbeat(ring_points(agent), "eth0").fields["up"] == 1
    assert len(caplog.records) == 1


def test_a_mistake_in_a_collector_costs_its_own_reads_and_it_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    odd = Odd("odd")
    odd.broken = TypeError("unsupported operand")
    agent = agent_of(odd)
    for tick in range(3):
        agent._tick(tick)
        settle(agent)
    odd.broken = None
    agent._tick(3)
    settle(agent)
    assert (odd.reads, agent._lanes[0].paced.errors, agent._lanes[0].paced.up) == (4, 3, True)
    assert len(caplog.records) == 1


class Mixed(Odd):
    """One of whose points cannot be written."""

    def read(self, now_ns: int) -> list[Point]:
        return [*super().read(now_ns), Point(Series.of("mem", host="n01"), {"total": 2**63}, now_ns)]


def test_a_point_that_cannot_be_written_does_not_cost_the_others_of_its_read() -> None:
    agent = agent_of(Mixed("eth0"))
    agent._tick(0)
    settle(agent)
    assert [each.fields for each in of("net", ring_points(agent))] == [{"bytes_sent": 1}]
    assert of("mem", ring_points(agent)) == []
    assert agent._lanes[0].paced.errors == 1


class Dear(Odd):
    """A read costs as much CPU time as a test wants."""

    cost = 0.0

    def read(self, now_ns: int) -> list[Point]:
        until = time.thread_time() + self.cost
        while time.thread_time() < until:
            pass
        return super().read(now_ns)


def test_a_collector_whose_reads_cost_more_than_its_budget_is_read_less_often(caplog: pytest.LogCaptureFixture) -> None:
    dear = Dear("dear")
    agent = agent_of(dear)
    dear.cost = 3.5 * BUDGET * TICK_S
    for tick in range(2):  # one may be an accident
        agent._tick(tick)
        settle(agent)
    assert dear.reads == 2
    agent._tick(2)
    settle(agent)
    agent._tick(3)
    settle(agent)
    agent._tick(4)
    settle(agent)
    assert dear.reads == 3
    assert "dear takes" in caplog.text
    assert len(caplog.records) == 1


def test_no_collector_is_put_off_beyond_what_a_reader_holds_its_state() -> None:
    agent = agent_of(Odd("eth0"))
    agent._lanes[0].paced.apart = 1e4
    assert agent._lanes[0].paced.every == LONGEST


def test_a_full_ring_drops_the_oldest_and_counts() -> None:
    ring = Ring(size=3)
    for number in range(5):
        point = Point(Series.of("mem", host="n01"), {"total": number}, NOW)
        ring.put(Batch([point], encode([point])))
    kept = [point.fields["total"] for batch in ring.take() for point in batch.points]
    assert (kept, ring.dropped) == ([2, 3, 4], 2)


def test_what_the_ring_dropped_is_in_the_heartbeat() -> None:
    agent = agent_of()
    agent._ring.dropped = 7
    agent._tick(0)
    assert heartbeat(ring_points(agent)).fields["dropped"] == 7


def gaps(points: Sequence[Point]) -> list[object]:
    return [each.fields["text"] for each in of("diagnosd_event", points) if each.series.tag("kind") == "telemetry_gap"]


def test_what_the_ring_dropped_is_an_event_and_told_again_only_when_it_grows() -> None:
    agent = agent_of()
    agent._ring.dropped = 7
    for tick in range(21):
        agent._tick(tick)
    assert gaps(ring_points(agent)) == ["7 points were dropped: more came than was taken"]
    agent._ring.dropped = 9
    agent._tick(30)
    assert gaps(ring_points(agent))[1:] == ["9 points were dropped: more came than was taken"]


def test_what_could_not_be_recorded_is_an_event_that_the_other_sinks_see() -> None:
    full, other = Kept(), Kept()
    full.lost = 5
    run_briefly(agent_of(Odd("eth0"), sinks=[full, other]))
    assert gaps(other.points) == ["5 points could not be recorded or analyzed"]
    assert heartbeat(other.points).fields["dropped"] == 5


def run_briefly(agent: Agent) -> None:
    async def brief() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(0.1, stop.set)  # after the first tick
        await asyncio.wait_for(agent.run(stop), PATIENCE_S)

    asyncio.run(brief())


class Broken(Kept):
    """A sink with a mistake in it."""

    def take(self, batches: Sequence[Batch]) -> None:
        super().take(batches)
        raise TypeError("a mistake")


def test_a_sink_that_fails_gets_nothing_more_and_the_others_have_everything(caplog: pytest.LogCaptureFixture) -> None:
    broken, other = Broken(), Kept()
    agent = agent_of(sinks=[broken, other])
    agent._feeder.start()
    for tick in range(0, 30, 10):
        agent._tick(tick)
        waiting = time.monotonic() + PATIENCE_S
        while len(of("diagnosd_agent", other.points)) <= tick // 10:
            assert time.monotonic() < waiting
            time.sleep(0.01)
    agent._finish()
    assert (len(of("diagnosd_agent", broken.points)), len(of("diagnosd_agent", other.points))) == (1, 3)
    assert (broken.closed, other.closed) == (False, True)
    assert agent.lost >= 3
    assert [record.getMessage() for record in caplog.records] == [
        "Broken gets nothing more: TypeError: a mistake",
    ]


def test_everything_accepted_reaches_every_sink_before_the_agent_ends() -> None:
    sinks = [Kept(), Kept()]
    collector = Odd("eth0")
    agent = agent_of(collector, sinks=sinks)
    stop = asyncio.Event()
    stop.set()

    async def brief() -> None:
        await agent.run(stop)

    asyncio.run(brief())
    assert collector.reads == 1  # what it still held
    assert sinks[0].lines == sinks[1].lines == encode(sinks[0].points)
    assert len(of("net", sinks[0].points)) == 1
    assert all(sink.closed for sink in sinks)


class Held(Odd):
    """What it has open is let go of; what came until then is still to be read."""

    reads_when_closed = 0

    def close(self) -> None:
        self.reads_when_closed = self.reads


def test_a_collector_is_closed_before_its_last_read() -> None:
    held = Held("kernellog")
    sink = Kept()
    run_briefly(agent_of(held, sinks=[sink]))
    assert held.reads_when_closed == 1
    assert len(of("net", sink.points)) == held.reads == 2


def test_a_sink_that_hangs_does_not_hold_up_the_end(caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(Kept):
        def take(self, batches: Sequence[Batch]) -> None:
            threading.Event().wait()

    before, after = Kept(), Kept()
    run_briefly(agent_of(Odd("eth0"), sinks=[before, Stuck(), after]))
    assert "a disk or a sink does not answer" in caplog.text
    assert (before.closed, after.closed) == (True, True)
    assert len(of("net", before.points)) == 2  # the last one is of the end
    assert before.lines == after.lines


def test_a_mistake_in_the_agents_own_tick_still_closes_the_sinks() -> None:
    sink = Kept()
    agent = Agent("n\n01", [], [sink])  # a name that line protocol cannot say
    with pytest.raises(ValueError, match="diagnosd_agent"):
        run_briefly(agent)
    assert sink.closed


def test_a_recording_holds_what_was_taken_as_soon_as_it_was_taken(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "n01.lp.zst")
    point = Point(Series.of("mem", host="n01"), {"total": 1}, NOW)
    recorder.take([Batch([point], encode([point]))])
    assert [each for batch in read(tmp_path / "n01.lp.zst") for each in batch] == [point]
    recorder.close()


def test_a_full_disk_is_told_once_and_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(tmp_path / "n01.lp")
    point = Point(Series.of("mem", host="n01"), {"total": 1}, NOW)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # no file may grow beyond it: EFBIG
    try:
        for _ in range(3):
            recorder.take([Batch([point], encode([point]))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    recorder.close()
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "lacks 3 points" in caplog.text


def test_a_recording_that_is_removed_while_it_is_written_is_told_and_what_comes_then_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path / "n01.lp")
    point = Point(Series.of("mem", host="n01"), {"total": 1}, NOW)
    recorder.take([Batch([point], encode([point]))])
    (tmp_path / "n01.lp").unlink()
    for _ in range(2):
        recorder.take([Batch([point], encode([point]))])
    recorder.close()
    assert recorder.lost == 2
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/n01.lp: was removed while it was written; what comes meanwhile is not recorded",
        f"{tmp_path}/n01.lp lacks 2 points that could not be written",
    ]


@pytest.mark.parametrize("name", ['name = "a\\u001b[31m"', 'name = "a\\nb"'])
def test_a_clusters_name_that_cannot_be_recorded_is_refused_at_the_start(tmp_path: Path, name: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(name)
    with pytest.raises(DocumentError, match=r"c\.toml: name: .*cannot say 'a\\"):
        declaration(file)


def test_a_folder_holds_a_file_for_each_host(tmp_path: Path) -> None:
    assert recording_of(f"{tmp_path}", "n01") == tmp_path / "n01.lp.zst"
    assert recording_of(f"{tmp_path}/new/", "n01") == tmp_path / "new/n01.lp.zst"
    assert recording_of(f"{tmp_path}/a.lp", "n01") == tmp_path / "a.lp"


def test_a_recording_that_cannot_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="cannot be written"):
        Recorder(tmp_path / "missing/n01.lp.zst")


def in_a_fresh_interpreter(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout


def test_the_agent_loads_neither_numpy_nor_the_analysis() -> None:
    loaded = in_a_fresh_interpreter("import sys, diagnosd.agent; print(*sys.modules)").split()
    assert "diagnosd.collectors.steps" in loaded
    assert not [name for name in loaded if name == "numpy" or name.startswith("diagnosd.analysis")]


def as_nobody(folder: Path, command: Sequence[str]) -> list[str]:
    """In a mount namespace in which nobody may read Python and the tree, wherever they lie."""
    become = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs", *command]
    script = "\n".join(["set -e", *open_homes(folder / "stage"), f"exec {join(become)}"])
    return ["unshare", "--mount", "sh", "-c", script]


def may_unshare() -> bool:
    return os.geteuid() == 0 and subprocess.run(["unshare", "--mount", "true"], check=False).returncode == 0


@pytest.mark.skipif(not may_unshare(), reason="only root can become nobody, in a mount namespace")
def test_nobody_can_run_the_agent_and_every_collector_answers(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    tmp_path.chmod(0o777)
    record = [sys.executable, "-m", "diagnosd", "record", "--host", "n01", "--socket", f"{tmp_path}/probe.sock"]
    command = as_nobody(tmp_path, [*record, f"{tmp_path}/n01.lp.zst"])
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as agent:
        time.sleep(2.0)
        agent.send_signal(signal.SIGINT)
        assert agent.wait(PATIENCE_S) == 0
        assert agent.stderr
        said = agent.stderr.read().splitlines()
    points = [each for batch in read(tmp_path / "n01.lp.zst") for each in batch]
    assert [line for line in said if "cannot be read" in line or "the process" in line] == []
    assert heartbeat(points).fields["errors"] == 0
    measurements = {each.series.measurement for each in points}
    assert {"net", "nstat", "cpu", "mem", "diagnosd_clock", "diagnosd_node", "diagnosd_agent"} <= measurements
    assert heartbeat(points, "reader").fields["up"] == 1


def test_an_agent_has_every_collector_and_the_probes_socket(tmp_path: Path) -> None:
    agent = make("n01", tmp_path / "probe.sock", [])
    steps = agent._lanes[0].collector
    assert isinstance(steps, Steps)
    steps.close()
    names = [lane.collector.name for lane in agent._lanes]
    assert names == ["steps", *(collector(Machine("n01")).name for collector in COLLECTORS)]
    assert {"net", "nstat", "cpu", "mem", "pressure", "diskio", "clock"} <= set(names)
    agent._feeder.start()
    agent._finish()
