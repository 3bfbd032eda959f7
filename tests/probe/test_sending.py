"""The way to the agent: it may be late, die and come back. Nobody waits for it, and what is lost shows."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from observed import Agent, no_more_files

from diagnosd.probe import sender
from diagnosd.probe.message import Hello, Message, Sequence, encode, parse


def hello(number: int) -> Hello:
    return Hello(number, "a-job", 0, 1, None, None, os.getpid(), {}, 5)


@pytest.fixture
def speaker(tmp_path: Path) -> Iterator[sender.Sender]:
    with contextlib.closing(sender.Sender(str(tmp_path / "probe.sock"), hello)) as speaker:
        yield speaker


def send(to: sender.Sender, *steps: int) -> None:
    for step in steps:
        to.send(lambda number, step=step: encode(number, "diagnosd_step", {"step": step}, 5))


def reconnect(to: sender.Sender) -> None:
    """As if a second had passed since the last attempt."""
    to._tried -= sender.RECONNECT_SECONDS
    to.flush()


def told(packets: list[Hello | Message]) -> list[object]:
    return ["hello" if isinstance(packet, Hello) else packet.fields["step"] for packet in packets]


def test_what_was_said_before_the_agent_came_is_told_after_the_hello(
    start_agent: Callable[..., Agent], speaker: sender.Sender, tmp_path: Path
) -> None:
    send(speaker, 1, 2)
    speaker.flush()
    agent = start_agent(tmp_path / "probe.sock")
    reconnect(speaker)
    assert agent.hears(lambda agent: told(agent.packets) == ["hello", 1, 2])


def test_a_new_agent_gets_a_hello_and_no_message_twice(
    start_agent: Callable[..., Agent], speaker: sender.Sender, tmp_path: Path
) -> None:
    first = start_agent(tmp_path / "probe.sock")
    send(speaker, 1)
    speaker.flush()
    assert first.hears(lambda agent: told(agent.packets) == ["hello", 1])
    first.die()
    send(speaker, 2)
    speaker.flush()
    send(speaker, 3)
    second = start_agent(tmp_path / "probe.sock")
    reconnect(speaker)
    assert second.hears(lambda agent: told(agent.packets) == ["hello", 2, 3])


def test_a_job_that_closes_our_socket_and_opens_its_own_under_the_number_keeps_it_and_gets_nothing_of_ours(
    start_agent: Callable[..., Agent], speaker: sender.Sender, tmp_path: Path
) -> None:
    agent = start_agent(tmp_path / "probe.sock")
    send(speaker, 1)
    speaker.flush()
    assert speaker._socket is not None
    ours = speaker._socket.fileno()
    theirs, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, other:
        os.dup2(theirs.fileno(), ours)
        send(speaker, 2)
        speaker.introduce()
        speaker.flush()
        reconnect(speaker)
        assert agent.hears(lambda agent: told(agent.packets) == ["hello", 1, "hello", 2])
        assert os.path.samestat(os.fstat(ours), os.fstat(theirs.fileno()))
        os.close(ours)
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.recv(65536)


def test_of_what_nobody_reads_the_newest_64_are_kept_and_the_rest_is_missing_from_the_numbers(
    start_agent: Callable[..., Agent], speaker: sender.Sender, tmp_path: Path
) -> None:
    send(speaker, *range(100))
    agent = start_agent(tmp_path / "probe.sock")
    reconnect(speaker)
    assert agent.hears(lambda agent: told(agent.packets) == ["hello", *range(36, 100)])
    sequence = Sequence()
    sequence.expected = 0
    assert sum(sequence.lost(packet) for packet in agent.packets) == speaker.dropped == 36


def test_a_full_queue_of_the_kernel_never_blocks_and_loses_only_what_does_not_fit(
    speaker: sender.Sender, tmp_path: Path
) -> None:
    """An agent that accepts and does not read; it then reads everything."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "probe.sock"))
        listener.listen()
        speaker.flush()
        connection, _ = listener.accept()
        send(speaker, *range(1000))
        packets: list[Hello | Message] = []
        with connection:
            connection.setblocking(False)
            while len(packets) < 1001 - speaker.dropped:
                packets.append(parse(connection.recv(65536)))
                speaker.flush()
    assert speaker.dropped > 0
    assert told(packets)[-sender.KEPT :] == list(range(1000 - sender.KEPT, 1000))
    sequence = Sequence()
    assert sum(sequence.lost(packet) for packet in packets) == speaker.dropped


def test_a_message_that_cannot_be_written_is_a_loss_and_no_more(
    start_agent: Callable[..., Agent], speaker: sender.Sender, tmp_path: Path
) -> None:
    agent = start_agent(tmp_path / "probe.sock")
    send(speaker, 1)
    speaker.send(lambda number: encode(number, "diagnosd_step", {"duration": float("nan")}, 5))
    send(speaker, 2)
    speaker.flush()
    assert agent.hears(lambda agent: told(agent.packets) == ["hello", 1, 2])
    assert [packet.number for packet in agent.packets] == [0, 0, 2]


@pytest.mark.parametrize("value", [object(), {1}, "long" * 4000])
def test_a_message_with_a_value_that_json_does_not_know_or_too_long_is_a_loss_and_no_more(
    start_agent: Callable[..., Agent], speaker: sender.Sender, tmp_path: Path, value: Any
) -> None:
    agent = start_agent(tmp_path / "probe.sock")
    speaker.send(lambda number: encode(number, "diagnosd_step", {"step": value}, 5))
    send(speaker, 2)
    speaker.flush()
    assert agent.hears(lambda agent: told(agent.packets) == ["hello", 2])
    assert [packet.number for packet in agent.packets] == [0, 1]


def test_a_rank_with_more_addresses_than_a_hello_holds_introduces_itself_without_them(
    start_agent: Callable[..., Agent], tmp_path: Path
) -> None:
    agent = start_agent(tmp_path / "probe.sock")
    crowded = {"addresses": ",".join(f"10.0.{i // 256}.{i % 256}" for i in range(2000))}
    with contextlib.closing(sender.Sender(str(agent.path), lambda n: hello(n)._replace(fields=crowded))) as speaker:
        send(speaker, 1)
        speaker.flush()
        assert agent.hears(lambda agent: told(agent.packets) == ["hello", 1])


def test_where_no_file_can_be_opened_any_more_the_sender_waits(
    start_agent: Callable[..., Agent], speaker: sender.Sender, tmp_path: Path
) -> None:
    agent = start_agent(tmp_path / "probe.sock")
    send(speaker, 1)
    with no_more_files():
        speaker.flush()
    reconnect(speaker)
    assert agent.hears(lambda agent: told(agent.packets) == ["hello", 1])


@pytest.mark.parametrize("path", ["absent/probe.sock", "file"])
def test_where_no_agent_can_be_nothing_is_raised(speaker: sender.Sender, tmp_path: Path, path: str) -> None:
    (tmp_path / "file").touch()
    speaker.path = str(tmp_path / path)
    send(speaker, 1)
    speaker.flush()
    speaker.introduce()
