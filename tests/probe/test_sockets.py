"""The process's own TCP connections, on real ones."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path

from observed import no_more_files

from diagnosd.probe.sockets import NAMED_PEERS, Peers


@contextmanager
def connections(*addresses: str, family: int = socket.AF_INET) -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """A connection to a listener at each address, from the same address."""
    with ExitStack() as stack:
        pairs = []
        for address in addresses:
            listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listener.bind((address, 0))
            listener.listen()
            client = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            client.bind((address, 0))
            client.connect(listener.getsockname())
            pairs.append((client, stack.enter_context(listener.accept()[0])))
        yield pairs


def test_bytes_and_queues_of_a_connection_are_told_under_the_peers_address() -> None:
    with connections("127.0.0.7") as [(client, server)]:
        client.sendall(b"x" * 100_000)
        server.recv(40_000, socket.MSG_WAITALL)
        (fields,) = (fields for peer, fields in Peers().read().items() if peer == "127.0.0.7")
    assert fields["bytes_sent"] == fields["bytes_received"] == 100_000  # both ends are ours
    assert fields["receive_queue"] + fields["send_queue"] == 60_000
    assert fields["retransmits"] == 0
    assert fields["cwnd"] > 0
    assert 0 < fields["rtt"] < 10


def test_time_with_bytes_under_way_is_told_and_how_much_of_it_the_receiver_did_not_read() -> None:
    peers = Peers()
    with connections("127.0.0.7") as [(client, server)]:
        client.setblocking(False)
        sent = fill(client)
        time.sleep(0.3)  # the kernel counts by its own clock
        stuck = peers.read()["127.0.0.7"]
        drain(server, sent)
        told = peers.read()["127.0.0.7"]
    assert told["busy"] >= told["receiver_limited"] > 0.25
    assert stuck["busy"] > 0.25
    assert told["segments_sent"] > 0


def test_the_local_addresses_are_known() -> None:
    peers = Peers()
    with connections("127.0.0.7"):
        peers.read()
    assert "127.0.0.7" in peers.addresses


def test_counters_do_not_fall_when_a_connection_is_closed() -> None:
    peers = Peers()
    with connections("127.0.0.8") as [(client, server)]:
        client.sendall(b"x" * 1000)
        server.recv(1000, socket.MSG_WAITALL)
        assert peers.read()["127.0.0.8"]["bytes_sent"] == 1000
    with connections("127.0.0.8") as [(client, server)]:
        client.sendall(b"x" * 500)
        server.recv(500, socket.MSG_WAITALL)
        assert peers.read()["127.0.0.8"]["bytes_sent"] == 1500


def test_counters_do_not_fall_when_a_connection_is_made_anew_between_the_same_ends() -> None:
    peers, sent = Peers(), []
    with socket.create_server(("127.0.0.8", 0)) as listener:
        port = 0
        for _ in range(2):
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # leaves nothing behind
                client.bind(("127.0.0.9", port))
                port = client.getsockname()[1]
                client.connect(listener.getsockname())
                with listener.accept()[0] as server:
                    client.sendall(b"x" * (1000 - 500 * len(sent)))
                    server.recv(1000 - 500 * len(sent), socket.MSG_WAITALL)
                    sent.append(peers.read()["127.0.0.8"]["bytes_sent"])
    assert sent == [1000, 1500]


def test_a_look_at_which_no_file_can_be_opened_takes_no_connection_for_closed() -> None:
    peers = Peers()
    with connections("127.0.0.8") as [(client, server)]:
        client.sendall(b"x" * 1000)
        server.recv(1000, socket.MSG_WAITALL)
        peers.read()
        with no_more_files():
            assert peers.read() == {}
        assert peers.read()["127.0.0.8"]["bytes_sent"] == 1000


def test_beyond_four_peers_the_rest_is_summed_as_other() -> None:
    addresses = [f"127.0.1.{i}" for i in range(1, NAMED_PEERS + 4)]
    with connections(*addresses) as pairs:
        for client, server in pairs:
            client.sendall(b"x" * 1000)
            server.recv(1000, socket.MSG_WAITALL)
        told = Peers().read()
    assert len(told) == NAMED_PEERS + 1
    assert sum(fields["bytes_sent"] for fields in told.values()) >= 1000 * len(addresses)
    assert {"rtt", "cwnd"}.isdisjoint(told["other"])


def test_each_byte_is_told_once_by_name_or_in_the_rest_whoever_is_named() -> None:
    peers, told, sent = Peers(), {}, []
    with connections(*(f"127.0.1.{i}" for i in range(1, NAMED_PEERS + 4))) as pairs:
        for client, server in pairs[::-1] + pairs + pairs[::2]:  # each in turn has the longest queue
            client.setblocking(False)
            sent.append(fill(client))
            told.update(peers.read())
            drain(server, sent[-1])
        before = sum(fields["bytes_received"] for fields in told.values())
        assert 0 < before <= sum(sent)
        told.update(peers.read())
    assert sum(fields["bytes_received"] for fields in told.values()) == sum(sent)


def test_no_counter_falls_whoever_is_named() -> None:
    peers, told = Peers(), [{}]
    with connections(*(f"127.0.1.{i}" for i in range(1, NAMED_PEERS + 4))) as pairs:
        for client, server in pairs[::-1] + pairs:
            client.setblocking(False)
            expected = fill(client)
            told.append({**told[-1], **peers.read()})
            drain(server, expected)
    for then, now in pairwise(told):
        for peer, fields in then.items():
            assert all(now[peer][name] >= fields[name] for name in ("bytes_sent", "busy", "segments_sent"))


def fill(client: socket.socket) -> int:
    sent = 0
    with suppress(BlockingIOError):
        while True:
            sent += client.send(b"x" * 65536)
    return sent


def drain(server: socket.socket, expected: int) -> None:
    while expected:
        expected -= len(server.recv(1 << 20))


def test_the_peer_with_the_longest_send_queue_is_told_by_name() -> None:
    addresses = [f"127.0.1.{i}" for i in range(1, NAMED_PEERS + 4)]
    with connections(*addresses) as pairs:
        full, _ = pairs[-1]
        full.setblocking(False)
        fill(full)
        assert addresses[-1] in Peers().read()


def test_an_ipv4_peer_of_an_ipv6_socket_is_told_by_its_ipv4_address() -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True))
        client = stack.enter_context(socket.create_connection(("127.0.0.1", listener.getsockname()[1])))
        stack.enter_context(listener.accept()[0])
        told = Peers().read()
        assert client.getpeername()[0] == "127.0.0.1"
    assert "127.0.0.1" in told
    assert not any("ffff" in peer for peer in told)


def test_looking_opens_no_descriptor_that_a_fork_would_keep() -> None:
    with connections("127.0.0.7"):
        peers = Peers()
        before = sorted(Path("/proc/self/fd").iterdir())
        peers.read()
        assert sorted(Path("/proc/self/fd").iterdir()) == before
