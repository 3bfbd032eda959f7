"""The TCP connections of this process, as the kernel sees them: what no other user may ask.

A connection is found by its descriptor in /proc/self/fd and asked by getsockopt(TCP_INFO) through libc on that number:
no descriptor is copied, which a fork at the wrong moment would keep open in a loader worker. Should another thread
close it meanwhile, the call fails, or speaks of another connection, which harms nobody.

Layout of struct tcp_info: include/uapi/linux/tcp.h. Fields were only ever added at its end; `bytes_sent` came with
Linux 4.19 and is left out where the kernel's answer is shorter.
"""

import ctypes
import fcntl
import os
import socket
import struct
from typing import Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

NAMED_PEERS = 4
_MOST = 1024  # connections looked at in one round: about 10 us each
_TCP_INFO = 11
_SIOCOUTQ, _SIOCINQ = 0x5411, 0x541B
_ESTABLISHED = 1

Fields = Dict[str, "int | float"]


class Connection(NamedTuple):
    """One TCP connection. `rtt` in s, `cwnd` in segments, queues and counters in bytes."""

    inode: str
    local: str
    peer: str
    rtt: float
    cwnd: int
    retransmits: int
    bytes_sent: int
    bytes_received: int
    send_queue: int
    receive_queue: int


class Peers:
    """Connections of the same peer address as one, with counters that never fall when a connection is closed."""

    def __init__(self) -> None:
        self.addresses: Set[str] = set()  # local ends
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._known: Dict[str, Connection] = {}  # by inode
        self._closed: Dict[str, Tuple[int, int, int]] = {}  # counters of closed connections, by peer

    def read(self) -> Dict[str, Fields]:
        """Fields of `diagnosd_socket` for each of the peers with the longest send queue or rtt, and of the rest."""
        try:
            now = {connection.inode: connection for connection in self._connections()}
        except OSError:  # no file may be opened, so the folder of them cannot be read: they are there all the same
            return {}
        for inode, gone in self._known.items():
            if inode not in now:
                before = self._closed.get(gone.peer, (0, 0, 0))
                self._closed[gone.peer] = _added(before, _counters(gone))
        moved = {inode: _moved(self._known.get(inode), connection) for inode, connection in now.items()}
        self._known = now
        self.addresses.update(connection.local for connection in now.values())
        peers: Dict[str, List[Connection]] = {}
        for connection in sorted(now.values(), key=lambda c: moved[c.inode], reverse=True):
            peers.setdefault(connection.peer, []).append(connection)
        return self._told(peers)

    def _told(self, peers: Dict[str, List[Connection]]) -> Dict[str, Fields]:
        fields = {peer: self._fields(peer, connections) for peer, connections in peers.items()}
        named = sorted(fields, key=lambda peer: (fields[peer]["send_queue"], fields[peer]["rtt"]), reverse=True)
        slowest = sorted(fields, key=lambda peer: fields[peer]["rtt"], reverse=True)
        turns = [peer for pair in zip(named, slowest) for peer in pair]  # noqa: B905 - Python 3.8 knows no strict
        chosen = list(dict.fromkeys(turns))
        told = {peer: fields[peer] for peer in chosen[:NAMED_PEERS]}
        rest = [fields[peer] for peer in chosen[NAMED_PEERS:]]
        if rest:
            told["other"] = {key: sum(each[key] for each in rest) for key in rest[0] if key not in ("rtt", "cwnd")}
        return told

    def _fields(self, peer: str, connections: List[Connection]) -> Fields:
        """Path and window of the connection that moved most since the last look, sums of all."""
        busiest = connections[0]
        counters = self._closed.get(peer, (0, 0, 0))
        for connection in connections:
            counters = _added(counters, _counters(connection))
        return {
            "rtt": round(busiest.rtt, 6),
            "cwnd": busiest.cwnd,
            "retransmits": counters[0],
            "bytes_sent": counters[1],
            "bytes_received": counters[2],
            "send_queue": sum(connection.send_queue for connection in connections),
            "receive_queue": sum(connection.receive_queue for connection in connections),
        }

    def _connections(self) -> Iterator[Connection]:
        for fd, inode in _sockets():
            connection = self._ask(fd, inode)
            if connection is not None:
                yield connection

    def _ask(self, fd: int, inode: str) -> Optional[Connection]:
        info = self._call("getsockopt", 256, fd, socket.IPPROTO_TCP, _TCP_INFO)
        if info is None or len(info) < 136 or info[0] != _ESTABLISHED:
            return None
        local, peer = (_address(self._call(name, 128, fd)) for name in ("getsockname", "getpeername"))
        if not local or not peer:
            return None
        rtt_us, cwnd, retransmits = (struct.unpack_from("=I", info, at)[0] for at in (68, 80, 100))
        acknowledged, received = struct.unpack_from("=QQ", info, 120)
        sent = struct.unpack_from("=Q", info, 200)[0] if len(info) >= 208 else acknowledged
        queues = (_queued(fd, _SIOCOUTQ), _queued(fd, _SIOCINQ))
        return Connection(inode, local, peer, rtt_us * 1e-6, cwnd, retransmits, sent, received, *queues)

    def _call(self, name: str, size: int, *arguments: int) -> Optional[bytes]:
        """What libc's `name` writes into a buffer of `size` bytes, None where it refuses."""
        buffer, length = ctypes.create_string_buffer(size), ctypes.c_uint32(size)
        if getattr(self._libc, name)(*arguments, buffer, ctypes.byref(length)):
            return None
        return buffer.raw[: min(size, length.value)]


def _sockets() -> Iterator[Tuple[int, str]]:
    """Descriptor and inode of this process's sockets."""
    for name in os.listdir("/proc/self/fd")[:_MOST]:
        try:
            target = os.readlink("/proc/self/fd/" + name)
        except OSError:  # closed since the folder was listed
            continue
        if target.startswith("socket:["):
            yield int(name), target


def _address(raw: Optional[bytes]) -> str:
    """The address of a struct sockaddr without its port, "" where it is none of IP."""
    if raw is None or len(raw) < 8:
        return ""
    family = struct.unpack_from("=H", raw)[0]
    if family == socket.AF_INET:
        return socket.inet_ntop(family, raw[4:8])
    if family != socket.AF_INET6 or len(raw) < 24:
        return ""
    if raw[8:20] == b"\0" * 10 + b"\xff\xff":  # an IPv4 peer of a socket that listens to both
        return socket.inet_ntop(socket.AF_INET, raw[20:24])
    return socket.inet_ntop(family, raw[8:24])


def _queued(fd: int, request: int) -> int:
    try:
        return int(struct.unpack("=i", fcntl.ioctl(fd, request, b"\0" * 4))[0])
    except OSError:
        return 0


def _counters(connection: Connection) -> Tuple[int, int, int]:
    return connection.retransmits, connection.bytes_sent, connection.bytes_received


def _added(a: Tuple[int, int, int], b: Tuple[int, int, int]) -> Tuple[int, int, int]:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]


def _moved(before: Optional[Connection], now: Connection) -> int:
    then = before.bytes_sent + before.bytes_received if before else 0
    return now.bytes_sent + now.bytes_received - then
