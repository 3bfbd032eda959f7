"""The receiving end of the probe's socket: real sockets, real processes, and whatever else somebody sends."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diagnosd.collectors.steps import (
    CONNECTIONS_OF_A_USER,
    PAUSE_S,
    RANKS_OF_A_PROCESS,
    RATE,
    SERIES,
    TEXT,
    TEXT_AT_ONCE,
    Steps,
)
from diagnosd.point import Point, decode, encode
from diagnosd.probe.message import LIMIT, MEASUREMENTS, Hello, encode_hello
from diagnosd.probe.message import encode as message
from diagnosd.schema import SCHEMA

PATIENCE_S = 10.0  # how long a test waits for another thread or process before it fails


@pytest.fixture
def steps(tmp_path: Path) -> Iterator[Steps]:
    opened = Steps("n01", tmp_path / "probe.sock")
    yield opened
    opened.close()


def connect(steps: Steps) -> socket.socket:
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sender.connect(str(steps.path))
    return sender


def hello(number: int = 0, *, job: str = "train", rank: int = 0, world: int = 1, **fields: Any) -> bytes:
    return encode_hello(Hello(number, job, rank, world, rank, None, os.getpid(), fields, time.time_ns()))


def step(number: int, *, time_ns: int | None = None, source: str = "probe", **fields: Any) -> bytes:
    fields = fields or {"step": number, "duration": 0.05}
    return message(number, "diagnosd_step", fields, time_ns or time.time_ns(), {"source": source})


def until(steps: Steps, enough: Callable[[list[Point]], bool]) -> list[Point]:
    """Reads until what has come is enough."""
    points: list[Point] = []
    deadline = time.monotonic() + PATIENCE_S
    while not enough(points):
        assert time.monotonic() < deadline, f"waited in vain; {steps.errors} errors, {steps.dropped} dropped: {points}"
        time.sleep(0.005)
        points += steps.read(time.time_ns())
    return points


def of(measurement: str, points: list[Point]) -> list[Point]:
    return [each for each in points if each.series.measurement == measurement]


def after(steps: Steps, sender: socket.socket, number: int = 1) -> list[Point]:
    """Everything up to a last good step: what came before it has been judged."""
    sender.send(step(number, step=1_000_000))
    return until(steps, lambda points: any(each.fields.get("step") == 1_000_000 for each in points))


def test_a_rank_that_began_before_the_agent_has_no_attempt_whatever_it_says(steps: Steps) -> None:
    with connect(steps) as sender:
        sender.send(hello(70, attempt=9))
        sender.send(step(70, attempt=9))
        sender.send(step(71, step=7, duration=0.25, attempt=9))
        points = until(steps, lambda points: bool(of("diagnosd_step", points) and of("diagnosd_rank", points)))
    assert [point.fields for point in of("diagnosd_step", points)] == [{"step": 7, "duration": 0.25}]
    assert not [point for point in points if "attempt" in point.fields]


def test_a_step_carries_the_host_the_job_and_the_rank_that_the_agent_knows(steps: Steps) -> None:
    with connect(steps) as sender:
        sender.send(hello(rank=3, world=8))
        sender.send(step(0, step=7, duration=0.25, samples=16))
        (point,) = of("diagnosd_step", until(steps, lambda points: bool(of("diagnosd_step", points))))
    assert dict(point.series.tags) == {"host": "n01", "job": "train", "rank": "3", "source": "probe"}
    assert point.fields == {"step": 7, "duration": 0.25, "samples": 16, "attempt": 0}


def test_anybody_on_the_node_may_connect(steps: Steps) -> None:
    assert stat.S_IMODE(steps.path.stat().st_mode) == 0o666


def test_what_a_killed_agent_left_is_replaced(tmp_path: Path) -> None:
    left = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left.bind(str(tmp_path / "probe.sock"))
    left.close()
    steps = Steps("n01", tmp_path / "probe.sock")
    connect(steps).close()
    steps.close()
    assert not (tmp_path / "probe.sock").exists()


def test_a_socket_on_which_another_agent_listens_is_left_alone(steps: Steps) -> None:
    with pytest.raises(OSError, match=r"another program listens on .*probe\.sock"):
        Steps("n01", steps.path)
    connect(steps).close()


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(OSError, match="is there and is no socket"):
        Steps("n01", tmp_path / "precious")
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_path_too_long_for_a_socket_is_said(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="at most 107 bytes"):
        Steps("n01", tmp_path / ("x" * 110))


def test_the_folder_of_the_usual_socket_is_made_and_anybody_can_enter_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "diagnosd/probe.sock"
    monkeypatch.setattr("diagnosd.collectors.steps.DEFAULT_SOCKET", str(path))
    before = os.umask(0o077)
    try:
        steps = Steps("n01", path)
    finally:
        os.umask(before)
    connect(steps).close()
    steps.close()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o755


def test_any_other_folder_that_is_missing_is_named_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=rf"^{tmp_path}/no/s: there is no folder {tmp_path}/no; name another path"):
        Steps("n01", tmp_path / "no/s")
    assert not (tmp_path / "no").exists()


def test_a_socket_that_somebody_else_put_there_since_is_not_removed(tmp_path: Path) -> None:
    steps = Steps("n01", tmp_path / "probe.sock")
    steps.path.unlink()
    steps.path.write_text("theirs")
    steps.close()
    assert steps.path.read_text() == "theirs"


def test_what_came_before_the_end_may_still_be_read(tmp_path: Path) -> None:
    steps = Steps("n01", tmp_path / "probe.sock")
    with connect(steps) as sender:
        for raw in (hello(), *(step(number) for number in range(50))):
            sender.send(raw)
        steps.close()
    assert len(of("diagnosd_step", steps.read(time.time_ns()))) == 50


def test_messages_before_a_hello_are_dropped(steps: Steps) -> None:
    with connect(steps) as sender:
        sender.send(step(0))
        sender.send(hello())
        points = after(steps, sender)
    assert [each.fields["step"] for each in of("diagnosd_step", points)] == [1_000_000]
    assert steps.dropped >= 1


def test_a_gap_in_the_numbers_is_dropped_and_told(steps: Steps) -> None:
    with connect(steps) as sender:
        for raw in (hello(), step(0), step(5)):
            sender.send(raw)
        (event,) = of("diagnosd_event", until(steps, lambda points: bool(of("diagnosd_event", points))))
    assert steps.dropped == 4
    assert event.fields["value"] == 4.0
    assert dict(event.series.tags) == {"host": "n01", "job": "train", "kind": "telemetry_gap", "subject": "rank:0"}


def test_a_reconnection_without_a_loss_is_no_gap(steps: Steps) -> None:
    with connect(steps) as sender:
        sender.send(hello())
        sender.send(step(0))
        until(steps, lambda points: bool(of("diagnosd_step", points)))
    with connect(steps) as sender:
        sender.send(hello(1))
        sender.send(step(1))
        points = until(steps, lambda points: bool(of("diagnosd_step", points)))
    assert steps.dropped == 0
    assert of("diagnosd_step", points)[0].fields["attempt"] == 0


def test_one_odd_field_never_removes_the_others(steps: Steps) -> None:
    with connect(steps) as sender:
        sender.send(hello())
        sender.send(step(0, step=1, duration="long", samples=True, nonsense=1, forward=2))
        points = of("diagnosd_step", after(steps, sender))
    assert points[0].fields == {"step": 1, "forward": 2.0, "attempt": 0}
    assert steps.errors == 3


@pytest.mark.parametrize(
    ("measurement", "tags", "fields"),
    [
        ("diagnosd_step", {}, {"step": 1}),  # a tag is missing
        ("diagnosd_step", {"source": "probe", "colour": "red"}, {"step": 1}),
        ("diagnosd_step", {"source": "back\\"}, {"step": 1}),  # line protocol cannot say it
        ("diagnosd_step", {"source": "x" * 300}, {"step": 1}),
        ("diagnosd_step", {"source": "anybody"}, {"step": 1}),
        ("diagnosd_collective", {"group": "dp", "op": "all_you_like"}, {"seq": 1}),
        ("diagnosd_collective", {"group": "dp", "op": "all_reduce"}, {"source": "hearsay"}),
        ("diagnosd_step", {"source": "probe"}, {"nothing": 1}),
        ("diagnosd_event", {"kind": "alarm", "subject": "rank:0"}, {"text": "boo"}),
        ("diagnosd_job", {}, {"state": "ended"}),
        ("diagnosd_job", {}, {"spec": "{"}),
        ("diagnosd_job", {}, {"spec": "[" * 4000}),
    ],
)
def test_what_the_contract_does_not_know_is_counted_and_no_point(
    steps: Steps, measurement: str, tags: dict[str, str], fields: dict[str, Any]
) -> None:
    with connect(steps) as sender:
        sender.send(hello())
        sender.send(message(0, measurement, fields, time.time_ns(), tags))
        points = after(steps, sender)
    assert len(of("diagnosd_step", points)) == 1
    assert {each.series.tag("kind") for each in of("diagnosd_event", points)} <= {"telemetry_gap"}
    assert [each.fields for each in of("diagnosd_job", points) if "spec" in each.fields] == []
    assert steps.errors >= 1


@pytest.mark.parametrize("seconds", [-7200.0, 5.0, 1e8])
def test_a_time_that_cannot_be_is_refused(steps: Steps, seconds: float) -> None:
    with connect(steps) as sender:
        sender.send(hello())
        sender.send(step(0, time_ns=time.time_ns() + int(seconds * 1e9)))
        points = after(steps, sender)
    assert (len(of("diagnosd_step", points)), steps.errors) == (1, 1)


def test_a_connection_cannot_become_another_rank(steps: Steps) -> None:
    with connect(steps) as sender:
        sender.send(hello(rank=0, world=2))
        sender.send(hello(rank=1, world=2))
        points = after(steps, sender)
    assert {each.series.tag("rank") for each in of("diagnosd_step", points)} == {"0"}
    assert steps.dropped >= 1


def test_a_rank_cannot_say_that_it_has_exited(steps: Steps) -> None:
    with connect(steps) as sender:
        sender.send(hello(state="exited", loader="torch"))
        (rank,) = of("diagnosd_rank", until(steps, lambda points: bool(of("diagnosd_rank", points))))
    assert (rank.fields["state"], rank.fields["loader"]) == ("running", "torch")


def test_a_message_longer_than_the_format_allows_is_refused_and_the_next_one_read(steps: Steps) -> None:
    with connect(steps) as sender:
        sender.send(hello())
        sender.send(step(0)[:-1] + b" " * LIMIT + b"}")
        points = after(steps, sender)
    assert (len(of("diagnosd_step", points)), steps.errors) == (1, 1)


def test_tags_of_one_connection_are_bounded(steps: Steps) -> None:
    with connect(steps) as sender:
        sender.send(hello())
        for number in range(SERIES + 5):
            sender.send(message(number, "diagnosd_socket", {"rtt": 0.001}, time.time_ns(), {"peer": f"p{number}"}))
        points = until(steps, lambda _: steps.dropped >= 5)
    assert len({each.series for each in of("diagnosd_socket", points)}) <= SERIES


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_process_that_calls_itself_many_ranks_costs_one_pidfd_and_is_stopped(
    steps: Steps, caplog: pytest.LogCaptureFixture
) -> None:
    before = open_files()
    for number in range(RANKS_OF_A_PROCESS + 8):
        with connect(steps) as sender:
            sender.send(hello(job=f"job{number}"))
            sender.send(step(0))
    points = until(
        steps, lambda points: len(of("diagnosd_step", points)) + steps.dropped // 2 >= RANKS_OF_A_PROCESS + 8
    )
    assert len(of("diagnosd_step", points)) == RANKS_OF_A_PROCESS
    assert open_files() <= before + 3
    assert len([each for each in caplog.records if "was refused" in each.message]) == 1  # of a user, not of each


def test_connections_share_the_allowance_of_their_user(steps: Steps) -> None:
    senders = [connect(steps) for _ in range(4)]
    with steps._lock:
        steps._user(os.getuid()).allowance = -RATE  # a second's worth overdrawn
    for rank, sender in enumerate(senders):
        sender.send(hello(rank=rank, world=4))
        sender.send(step(0))
    time.sleep(5 * PAUSE_S)
    assert of("diagnosd_step", steps.read(time.time_ns())) == []
    until(steps, lambda points: len(of("diagnosd_step", points)) == 4)
    for sender in senders:
        sender.close()


def test_a_mistake_that_a_sender_meets_is_counted_and_the_others_are_heard(
    steps: Steps, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = socket.socketpair()

    def mistake() -> None:
        ours.recv(1)
        raise TypeError("a mistake")

    steps._watch(ours.fileno(), mistake)
    theirs.send(b"12")
    with connect(steps) as sender:
        sender.send(hello())
        after(steps, sender, 0)
    until(steps, lambda _: steps.errors == 2)
    assert caplog.text.count("TypeError: a mistake") == 1
    ours.close()
    theirs.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_where_nobody_listens_any_more_a_read_fails(steps: Steps) -> None:
    with connect(steps) as sender:
        sender.send(hello())
        after(steps, sender, 0)
        ours, theirs = socket.socketpair()
        steps._watch(ours.fileno(), sys.exit)
        theirs.send(b".")
        steps._thread.join(PATIENCE_S)
        with pytest.raises(OSError, match="the thread that listens to the ranks has ended"):
            steps.read(time.time_ns())
    ours.close()
    theirs.close()


def test_one_user_cannot_take_all_connections(steps: Steps) -> None:
    opened = [connect(steps) for _ in range(CONNECTIONS_OF_A_USER + 1)]
    assert opened[-1].recv(1) == b""  # closed at once
    for each in opened:
        each.close()


def test_a_flood_waits_in_the_senders_queue(steps: Steps) -> None:
    flood = int(RATE) + 1000
    began = time.monotonic()
    with connect(steps) as sender:
        sender.send(hello())
        for number in range(flood):
            sender.send(step(number))
        until(steps, lambda points: len(of("diagnosd_step", points)) == flood)
    assert time.monotonic() - began >= (flood - RATE) / RATE
    assert steps.dropped == 0


def test_of_a_flood_of_text_what_is_over_is_dropped_and_its_users_steps_are_kept(steps: Steps) -> None:
    flood = TEXT_AT_ONCE // 2000 + 500
    began = time.monotonic()
    with connect(steps) as sender:
        sender.send(hello())
        for number in range(flood):
            text = f"{number:06}" * 333
            sender.send(message(2 * number, "diagnosd_process", {"stack": text}, time.time_ns()))
            sender.send(step(2 * number + 1, step=number, duration=0.1))
        points = until(steps, lambda points: len(of("diagnosd_step", points)) == flood)
    kept = of("diagnosd_process", points)
    assert len(kept) + steps.dropped == flood
    assert 0 < sum(len(str(each.fields["stack"])) for each in kept) <= TEXT_AT_ONCE + TEXT * (time.monotonic() - began)


def test_what_a_rank_says_of_itself_again_and_again_is_text_too(steps: Steps) -> None:
    with connect(steps) as sender:
        for number in range(TEXT_AT_ONCE // 4000 + 100):
            sender.send(hello(env=f"{number:06}" * 666))
        sender.send(step(0))
        points = until(steps, lambda points: bool(of("diagnosd_step", points)))
    assert steps.dropped > 0
    assert len({each.fields["env"] for each in of("diagnosd_rank", points)}) <= TEXT_AT_ONCE // 4000 + 1


def test_names_that_repeat_are_no_text(steps: Steps) -> None:
    """Far more of them than the text of the seconds that they take."""
    with connect(steps) as sender:
        sender.send(hello())
        for number in range(2000):
            sender.send(message(number, "diagnosd_process", {"group": "g" * 64}, time.time_ns()))
            if number == 0:
                until(steps, lambda points: bool(of("diagnosd_process", points)))
                with steps._lock:
                    steps._user(os.getuid()).text = 0.0
        until(steps, lambda points: len(of("diagnosd_process", points)) == 1999)
    assert steps.dropped == 0


def test_steps_of_a_millisecond_of_eight_ranks_lose_nothing(steps: Steps) -> None:
    """The senders do not block: a full queue would show as a lost message."""
    senders = [connect(steps) for _ in range(8)]
    for rank, sender in enumerate(senders):
        sender.send(hello(rank=rank, world=8))
        sender.setblocking(False)
    refused = 0
    for number in range(125):
        for sender in senders:
            try:
                sender.send(step(number))
            except BlockingIOError:
                refused += 1
        time.sleep(0.001)
    until(steps, lambda points: len(of("diagnosd_step", points)) >= 8 * 125 - refused)
    for sender in senders:
        sender.close()
    assert (refused, steps.dropped, steps.errors) == (0, 0, 0)


RANK_PROCESS = """
import os, socket, sys, time
from diagnosd.probe.message import Hello, encode, encode_hello
sender = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sender.connect(sys.argv[1])
sender.send(encode_hello(Hello(0, "train", 0, 1, 0, None, os.getpid(), {}, time.time_ns())))
sender.send(encode(0, "diagnosd_step", {"step": 0}, time.time_ns(), {"source": "probe"}))
if "fork" in sys.argv and os.fork() == 0:
    os.close(1)
    time.sleep(60)
print("ready", flush=True)
sys.stdin.read()
sender.send(encode(1, "diagnosd_step", {"step": 1}, time.time_ns(), {"source": "probe"}))
"""


def rank_process(steps: Steps, *arguments: str, user: int | None = None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", RANK_PROCESS, str(steps.path), *arguments]
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert started.stdout
    assert started.stdout.readline() == b"ready\n"
    return started


def state_of(points: list[Point]) -> list[object]:
    return [each.fields["state"] for each in of("diagnosd_rank", points)]


def test_a_process_that_ends_is_an_exited_rank_after_its_last_words(steps: Steps) -> None:
    with rank_process(steps) as process:
        process.communicate()
        points = until(steps, lambda points: "exited" in state_of(points))
    assert [each.fields["step"] for each in of("diagnosd_step", points)] == [0, 1]


def test_a_killed_process_is_an_exited_rank_also_while_its_workers_hold_the_connection(steps: Steps) -> None:
    with rank_process(steps, "fork") as process:
        process.kill()
        until(steps, lambda points: "exited" in state_of(points))
        os.killpg(process.pid, 9)


def test_a_second_start_of_a_rank_is_a_new_attempt(steps: Steps) -> None:
    attempts = []
    for _ in range(2):
        with rank_process(steps) as process:
            process.communicate()
            points = until(steps, lambda points: "exited" in state_of(points))
            attempts.append({each.fields["attempt"] for each in of("diagnosd_step", points)})
    assert attempts == [{0}, {1}]


def a_rank_elsewhere(steps: Steps, said: dict[str, Any]) -> None:
    """Another process says hello with this, and a step."""
    code = """
import json, socket, sys, time
sender = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sender.connect(sys.argv[1])
for said in json.loads(sys.argv[2]):
    sender.send(json.dumps({"v": 1, "n": 0, "t": time.time_ns(), **said}).encode())
"""
    step = {"m": "diagnosd_step", "tags": {"source": "probe"}, "f": {"step": 0}}
    subprocess.run([sys.executable, "-c", code, steps.path, json.dumps([said, step])], check=True)


@pytest.mark.parametrize("key", ["rank", "world", "attempt", "local_rank", "pid", "n"])
@pytest.mark.parametrize("number", [-1, 0, 2**20, 2**22, 2**31, 2**62, 2**63 - 1, 2**63])
def test_no_number_of_a_hello_costs_the_points_of_others_also_not_with_a_second_process(
    steps: Steps, key: str, number: int
) -> None:
    odd = {"m": "hello", "job": "odd", "rank": 0, "world": 1, "attempt": 0, "local_rank": 0, "pid": 1, "f": {}}
    odd[key] = number
    with connect(steps) as stranger:
        stranger.send(json.dumps({"v": 1, "n": 0, "t": time.time_ns(), **odd}).encode())
        stranger.send(step(0))
    a_rank_elsewhere(steps, odd)
    with connect(steps) as sender:
        sender.send(hello())
        points = after(steps, sender, 0)
    assert encode(points)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
fields = st.dictionaries(
    st.sampled_from(sorted({name for known in MEASUREMENTS for name in SCHEMA[known].fields})) | st.text(max_size=8),
    json_values,
    max_size=6,
)
near_messages = st.fixed_dictionaries(
    {"v": st.just(1), "m": st.sampled_from([*sorted(MEASUREMENTS), "hello"]) | st.text(max_size=9), "f": fields},
    optional={
        "n": st.integers(-1, 2**70),
        "t": st.integers(0, 3).map(lambda _: time.time_ns()) | st.integers(),
        "tags": st.dictionaries(
            st.sampled_from(["source", "peer", "kind", "subject", "group", "op", "job"]), st.text()
        ),
        "job": st.text(max_size=9),
        "rank": st.integers(-1, 9),
        "world": st.integers(-1, 2**65) | st.just(2**20),
        "pid": st.integers(-1, 2**40),
        "attempt": json_values,
        "local_rank": json_values,
    },
)
packets = (
    near_messages.map(lambda made: json.dumps(made).encode())
    | near_messages.map(lambda made: json.dumps(made, ensure_ascii=False).encode(errors="surrogatepass"))
    | json_values.map(lambda made: json.dumps(made).encode())
    | st.binary(min_size=1, max_size=64)
    | st.integers(1, LIMIT - 100).map(lambda depth: b'{"v":1,"m":"hello","f":' + b"[" * depth)
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(packets, max_size=20))
def test_nothing_that_anybody_sends_raises_or_makes_a_point_outside_the_contract(
    steps: Steps, sent: list[bytes]
) -> None:
    with connect(steps) as stranger, connect(steps) as rank:
        rank.send(hello(job="mine"))
        for raw in sent:
            stranger.send(raw)
            rank.send(raw)
        deadline = time.monotonic() + PATIENCE_S
        rank.send(step(2**62, step=2**62))
        points: list[Point] = []
        while not any(each.fields.get("step") == 2**62 for each in points):
            assert time.monotonic() < deadline
            time.sleep(0.002)
            points += steps.read(time.time_ns())
    for line in encode(points).splitlines():
        found = decode(line)
        assert found.series.tag("host") in ("n01", None)
        assert set(found.fields) <= set(SCHEMA[found.series.measurement].fields)
