"""The TCP connections of this process, as the kernel sees them: what no other user may ask.

Each descriptor is asked by getsockopt(TCP_INFO) on its number; one that is no TCP connection refuses. No descriptor is
copied, which a fork at the wrong moment would keep open in a loader worker. libc is called without giving up the GIL:
each call takes about 1 us, where getting the GIL back from a busy training thread takes up to 5 ms.

Layout of struct tcp_info: include/uapi/linux/tcp.h. Fields were only ever added at its end; `bytes_sent` came with
Linux 4.19, and where the kernel's answer is shorter the bytes that were acknowledged stand in for it, and what else was
added by then is not told.
"""

import ctypes
import itertools
import os
import socket
import struct
from typing import Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

NAMED_PEERS = 4
_MOST = 1024  # descriptors asked in one look
_TCP_INFO = 11
_SIOCOUTQ, _SIOCINQ = 0x5411, 0x541B
_ESTABLISHED = 1
_COUNTERS = ("bytes_sent", "bytes_received", "retransmits", "segments_sent", "busy", "receiver_limited")

Fields = Dict[str, "int | float"]
Counters = Tuple["int | float", ...]  # in the order of _COUNTERS, as many as the kernel tells


class Connection(NamedTuple):
    """One TCP connection. `rtt` in s, `cwnd` in segments, queues in bytes."""

    ends: bytes  # both addresses with their ports, which name it
    local: str
    peer: str
    rtt: float
    cwnd: int
    counters: Counters
    send_queue: int
    receive_queue: int


class Peers:
    """Connections of the same peer address as one, with counters that never fall when a connection is closed."""

    def __init__(self) -> None:
        self.addresses: Set[str] = set()  # local ends
        self._libc = ctypes.PyDLL(None)
        self._known: Dict[bytes, Connection] = {}  # by their ends
        self._closed: Dict[str, Counters] = {}  # of closed connections, by peer
        self._before: Dict[str, Counters] = {}  # at the last look, by peer
        self._others: Counters = ()  # what was counted by peers in the looks in which they were not named
        self._as_other: Dict[str, Counters] = {}  # how much of it by each: it is not told again under its name

    def read(self) -> Dict[str, Fields]:
        """Fields of `diagnosd_socket` for each of the peers with the longest send queue or rtt, and of the rest."""
        try:
            now = {connection.ends: connection for connection in self._connections()}
        except OSError:  # no file may be opened, so the folder of them cannot be read: they are there all the same
            return {}
        for ends, gone in self._known.items():
            if ends not in now or now[ends].counters[0] < gone.counters[0]:  # closed, or made anew with the same ends
                self._closed[gone.peer] = _added(self._closed.get(gone.peer, ()), gone.counters)
        moved = {ends: _moved(self._known.get(ends), connection) for ends, connection in now.items()}
        self._known = now
        self.addresses.update(connection.local for connection in now.values())
        peers: Dict[str, List[Connection]] = {}
        for connection in sorted(now.values(), key=lambda c: moved[c.ends], reverse=True):
            peers.setdefault(connection.peer, []).append(connection)
        return self._told(peers)

    def _told(self, peers: Dict[str, List[Connection]]) -> Dict[str, Fields]:
        fields = {peer: self._fields(peer, connections) for peer, connections in peers.items()}
        named = sorted(fields, key=lambda peer: (fields[peer]["send_queue"], fields[peer]["rtt"]), reverse=True)
        slowest = sorted(fields, key=lambda peer: fields[peer]["rtt"], reverse=True)
        turns = [peer for pair in zip(named, slowest) for peer in pair]  # noqa: B905 - Python 3.8 knows no strict
        chosen = list(dict.fromkeys(turns))
        told = {peer: self._named(peer, fields[peer]) for peer in chosen[:NAMED_PEERS]}
        rest = {peer: fields[peer] for peer in chosen[NAMED_PEERS:]}
        if rest:
            told["other"] = self._other(rest)
        self._before.update((peer, _told_counters(each)) for peer, each in fields.items())
        return told

    def _named(self, peer: str, fields: Fields) -> Fields:
        counters = _less(_told_counters(fields), self._as_other.get(peer, ()))
        return {**fields, **dict(zip(_COUNTERS, counters))}  # noqa: B905 - Python 3.8 knows no strict

    def _other(self, rest: Dict[str, Fields]) -> Fields:
        """The sum of what each has grown by since the last look: peers come into the rest and leave it again."""
        for peer, each in rest.items():
            grown = _less(_told_counters(each), self._before.get(peer, ()))
            self._others = _added(self._others, grown)
            self._as_other[peer] = _added(self._as_other.get(peer, ()), grown)
        other: Fields = dict(zip(_COUNTERS, self._others))  # noqa: B905 - Python 3.8 knows no strict
        other.update((key, sum(each[key] for each in rest.values())) for key in ("send_queue", "receive_queue"))
        return other

    def _fields(self, peer: str, connections: List[Connection]) -> Fields:
        """Path and window of the connection that moved most since the last look, sums of all."""
        busiest = connections[0]
        counters = self._closed.get(peer, ())
        for connection in connections:
            counters = _added(counters, connection.counters)
        fields: Fields = {
            "rtt": round(busiest.rtt, 6),
            "cwnd": busiest.cwnd,
            "send_queue": sum(connection.send_queue for connection in connections),
            "receive_queue": sum(connection.receive_queue for connection in connections),
        }
        fields.update(zip(_COUNTERS, counters))  # noqa: B905 - Python 3.8 knows no strict
        return fields

    def _connections(self) -> Iterator[Connection]:
        for name in os.listdir("/proc/self/fd")[:_MOST]:
            connection = self._ask(int(name))
            if connection is not None:
                yield connection

    def _ask(self, fd: int) -> Optional[Connection]:
        info = self._call("getsockopt", 256, fd, socket.IPPROTO_TCP, _TCP_INFO)
        if info is None or len(info) < 136 or info[0] != _ESTABLISHED:
            return None
        ends = [self._call(name, 128, fd) or b"" for name in ("getsockname", "getpeername")]
        local, peer = (_address(end) for end in ends)
        if not local or not peer:
            return None
        rtt_us, cwnd = (struct.unpack_from("=I", info, at)[0] for at in (68, 80))
        queues = (self._queued(fd, _SIOCOUTQ), self._queued(fd, _SIOCINQ))
        return Connection(b"".join(ends), local, peer, rtt_us * 1e-6, cwnd, _counters(info), *queues)

    def _call(self, name: str, size: int, *arguments: int) -> Optional[bytes]:
        """What libc's `name` writes into a buffer of `size` bytes, None where it refuses."""
        buffer, length = ctypes.create_string_buffer(size), ctypes.c_uint32(size)
        if getattr(self._libc, name)(*arguments, buffer, ctypes.byref(length)):
            return None
        return buffer.raw[: min(size, length.value)]

    def _queued(self, fd: int, request: int) -> int:
        found = ctypes.c_int(0)
        self._libc.ioctl(fd, ctypes.c_ulong(request), ctypes.byref(found))
        return found.value


def _address(raw: bytes) -> str:
    """The address of a struct sockaddr without its port, "" where it is none of IP."""
    if len(raw) < 8:
        return ""
    family = struct.unpack_from("=H", raw)[0]
    if family == socket.AF_INET:
        return socket.inet_ntop(family, raw[4:8])
    if family != socket.AF_INET6 or len(raw) < 24:
        return ""
    if raw[8:20] == b"\0" * 10 + b"\xff\xff":  # an IPv4 peer of a socket that listens to both
        return socket.inet_ntop(socket.AF_INET, raw[20:24])
    return socket.inet_ntop(family, raw[8:24])


def _counters(info: bytes) -> Counters:
    """Of the path: what was sent and how often again, and the s in which bytes were under way or waiting to be.

    In some of those the receiver's window was closed: it did not read.
    """
    retransmits = struct.unpack_from("=I", info, 100)[0]
    acknowledged, received = struct.unpack_from("=QQ", info, 120)
    if len(info) < 208:
        return acknowledged, received, retransmits
    segments = struct.unpack_from("=I", info, 156)[0]  # with data, those sent again among them
    busy_us, receiver_us = struct.unpack_from("=QQ", info, 168)
    sent = struct.unpack_from("=Q", info, 200)[0]
    return sent, received, retransmits, segments, round(busy_us * 1e-6, 6), round(receiver_us * 1e-6, 6)


def _told_counters(fields: Fields) -> Counters:
    return tuple(fields[key] for key in _COUNTERS if key in fields)


def _added(a: Counters, b: Counters) -> Counters:
    return tuple(x + y for x, y in itertools.zip_longest(a, b, fillvalue=0))


def _less(a: Counters, b: Counters) -> Counters:
    return tuple(round(x - y, 6) for x, y in itertools.zip_longest(a, b, fillvalue=0))  # s are told to the us


def _moved(before: Optional[Connection], now: Connection) -> int:
    then = sum(before.counters[:2]) if before else 0
    return max(0, int(sum(now.counters[:2]) - then))
