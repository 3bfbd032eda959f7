"""What the ranks of this node tell: the receiving end of the probe's socket.

Anybody on the node may connect, and nobody is believed. The kernel says who speaks (SO_PEERCRED) and when the process
is gone (a pidfd); `host`, `job`, `rank` and `attempt` are set here; a message is as long as the format allows, names
only what the contract knows, and comes no faster than RATE. What does not fit is dropped and counted, and never raises.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import selectors
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from diagnosd.collectors.ranks import Rank, Ranks, RefusedError
from diagnosd.documents import decode_job
from diagnosd.point import Point, Series, Value
from diagnosd.probe.message import DEFAULT_SOCKET, LIMIT, MEASUREMENTS, Hello, Message, parse
from diagnosd.recording import not_made
from diagnosd.schema import SCHEMA

log = logging.getLogger("diagnosd.steps")

# Messages per second of one user, over all connections, and as many at once after a pause: what eight ranks with steps
# of 1 ms make, the shortest that anybody trains, and a quarter more. What comes faster waits in the kernel's queue,
# where the sender sees it; at about 30 us a message a flooding user costs 30 % of a core.
RATE = 10_000.0
# Bytes per second of one user's new text, and as many at once after a pause. Numbers are as many as the contract has
# fields, and names repeat, so that RATE bounds both; text that never repeats does not compress, and would fill a disk.
# A rank sends some once (a spec, a stack of 2 KiB when it hangs), and 256 may do so together. What is over is dropped.
TEXT, TEXT_AT_ONCE = 16 * 1024, 1024 * 1024
NAME = 64  # characters: what is longer is no name that repeats, but text
# Messages of one connection before the next has its turn: more than the kernel queues, and 10 ms of work at most.
TURN = 300
COMPLAIN_S = 3600.0  # between two lines in the log about one user's messages: who sends nonsense sends more of it
# The kernel queues about 160 messages of 600 bytes a connection: at 1,000 steps a second it is full after 160 ms.
# Looking 50 times a second leaves it mostly empty, and costs nothing while nobody speaks: the wait is for the socket.
PAUSE_S = 0.02
CONNECTIONS, CONNECTIONS_OF_A_USER = 400, 256  # below the usual 1,024 files, with a pidfd each; one user leaves room
USERS = 1024  # of whom something is remembered; more than may be connected
RANKS_OF_A_PROCESS = 64  # one, or some in turn where a process (a notebook) trains again and again
SERIES = 1024  # of one connection: a rank talks to a few peers and groups, and tags must stay bounded
HELD = 200_000  # points that wait for the next read: a user at RATE for 20 s
PAST_S, FUTURE_S = 3600.0, 1.0  # a probe on this machine reads the clock that we read, and keeps few messages
SOCKET_PATH = 107  # sun_path of <sys/un.h>, less its closing zero
KINDS = frozenset(  # telemetry.md 4
    {
        *("xid", "sxid", "gpu_lost", "link_down", "link_up", "aer", "oom", "nccl_warn", "nccl_timeout", "driver"),
        *("clock", "thermal", "checkpoint_begin", "checkpoint_end", "eval_begin", "eval_end", "job_start", "job_end"),
        *("restart", "config_change", "telemetry_gap"),
    }
)
CLOSED: dict[str, dict[str, frozenset[str]]] = {  # tags and fields of which the contract lists the values
    "diagnosd_step": {"source": frozenset({"probe", "log", "inferred"})},
    "diagnosd_collective": {
        "op": frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "recv"}),
        "source": frozenset({"probe", "inspector", "flight", "ras"}),
    },
    "diagnosd_event": {"kind": KINDS},
}
_TYPES: dict[str, dict[str, type]] = {
    measurement: {field.name: {"i": int, "f": float, "s": str, "b": bool}[field.type] for field in fields.values()}
    for measurement, fields in ((name, SCHEMA[name].fields) for name in (*MEASUREMENTS, "diagnosd_rank"))
}
_CREDENTIALS = struct.Struct("3i")


def fitting(measurement: str, fields: dict[str, Value]) -> dict[str, Value]:
    """The fields that the contract knows, with its types; the rest is left out."""
    types, closed = _TYPES[measurement], CLOSED.get(measurement, {})
    kept: dict[str, Value] = {}
    for name, value in fields.items():
        want, have = types.get(name), type(value)
        if have is str and name in closed and value not in closed[name]:
            continue
        if have is want:
            kept[name] = value
        elif want is float and have is int:
            kept[name] = float(value)
    return kept


@dataclass(slots=True, eq=False)
class User:
    """What one user may send, over all connections."""

    filled: float  # monotonic
    allowance: float = RATE
    text: float = TEXT_AT_ONCE
    complained: float = -math.inf

    def may_speak(self, now: float) -> bool:
        self.allowance = min(RATE, self.allowance + (now - self.filled) * RATE)
        self.text = min(TEXT_AT_ONCE, self.text + (now - self.filled) * TEXT)
        self.filled = now
        if self.allowance < 1.0:
            return False
        self.allowance -= 1.0
        return True

    def may_write(self, text: int) -> bool:
        if self.text < text:
            return False
        self.text -= text
        return True


@dataclass(slots=True, eq=False)
class Peer:
    """One connection, and what the kernel says of the process behind it."""

    sock: socket.socket
    pid: int
    uid: int
    user: User
    rank: Rank | None = None
    series: set[Series] = field(default_factory=set)
    names: set[str] = field(default_factory=set)  # values of its fields; forgotten when there are more than SERIES

    def may_say(self, point: Point) -> bool:
        """Whether its user may write what of the point it has not said before."""
        new = [value for value in point.fields.values() if type(value) is str and value not in self.names]
        head = "" if point.series in self.series else point.series.key
        if not self.user.may_write(len("".join((head, *new)).encode())):
            return False
        if new and len(self.names) > SERIES:
            self.names.clear()
        self.names.update(value for value in new if len(value) <= NAME)
        return True


@dataclass(slots=True, eq=False)
class Process:
    """A process that is a rank, and the pidfd that tells of its end."""

    pidfd: int
    uid: int
    ranks: dict[tuple[str, int], Rank] = field(default_factory=dict)  # by job and number


class Steps:
    """Drained by its own thread; `read` takes what has come, and never waits for a sender."""

    name = "steps"
    every = 1

    def __init__(self, host: str, path: Path) -> None:
        self.errors = 0  # messages that are none
        self.dropped = 0  # lost on the way, another user's, too many
        self.path = path
        self._host = host
        self._ranks = Ranks(host)
        self._peers: set[Peer] = set()
        self._users: dict[int, User] = {}
        self._processes: dict[int, Process] = {}  # by pid
        self._points: list[Point] = []
        self._mistaken = False
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._listener = _listen(path)
        self._identity = _identity(path)
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._watch(self._woken.fileno(), lambda: None)
        self._watch(self._listener.fileno(), self._accept)
        self._thread = threading.Thread(target=self._drain, name="steps", daemon=True)
        self._thread.start()

    def read(self, now_ns: int) -> list[Point]:
        """OSError where nobody listens any more."""
        with self._lock:
            if not (self._points or self._thread.is_alive() or self._closing.is_set()):
                raise OSError("the thread that listens to the ranks has ended")
            told = self._ranks.points(now_ns, time.monotonic())
            points, self._points = self._points, []
            return points + told

    def close(self) -> None:
        """No more connections and messages; what has come may still be read."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake.send(b".")
        self._thread.join()
        self._wake.close()
        self._woken.close()
        if _identity(self.path) == self._identity:
            self.path.unlink(missing_ok=True)

    def _watch(self, fd: int, react: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, react)

    def _drain(self) -> None:
        try:
            while not self._closing.is_set():
                self._react(None)
                self._closing.wait(PAUSE_S)
            self._react(0)  # who has left in the meantime
        finally:
            self._leave()

    def _react(self, patience: float | None) -> None:
        ready = self._selector.select(patience)
        with self._lock:
            for key, _ in ready:
                if self._selector.get_map().get(key.fd) is key:  # an earlier one may have closed it
                    self._attend(key.data)

    def _attend(self, react: Callable[[], None]) -> None:
        try:
            react()
        except Exception as error:  # noqa: BLE001 - a mistake that one sender meets must not make us deaf to the others
            self.errors += 1
            if not self._mistaken:
                self._mistaken = True
                log.warning("a mistake of its own, please report it: %s: %s", type(error).__name__, error)

    def _leave(self) -> None:
        with self._lock:
            for peer in list(self._peers):
                self._receive(peer, int(RATE))
                peer.sock.close()
        for process in self._processes.values():
            os.close(process.pidfd)
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # out of files: those that wait are accepted when others have left
                return
            sock.setblocking(False)
            pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
            of_user = sum(peer.uid == uid for peer in self._peers)
            if len(self._peers) >= CONNECTIONS or of_user >= CONNECTIONS_OF_A_USER:
                self.dropped += 1
                sock.close()
                continue
            peer = Peer(sock, pid, uid, self._user(uid))
            self._peers.add(peer)
            self._watch(sock.fileno(), lambda peer=peer: self._receive(peer))  # type: ignore[misc]

    def _user(self, uid: int) -> User:
        if uid not in self._users and len(self._users) >= USERS:
            self._users = {peer.uid: peer.user for peer in self._peers}
        return self._users.setdefault(uid, User(time.monotonic()))

    def _receive(self, peer: Peer, turn: int = TURN) -> None:
        """What has come on one connection, as far as the turn and the user's rate allow."""
        for _ in range(turn):
            if not peer.user.may_speak(now := time.monotonic()):
                return
            try:
                raw = peer.sock.recv(LIMIT + 1)
            except BlockingIOError:
                return
            except OSError:
                raw = b""
            if not raw:
                self._hang_up(peer, now)
                return
            self._take(peer, raw, now)

    def _hang_up(self, peer: Peer, now: float) -> None:
        self._selector.unregister(peer.sock)
        peer.sock.close()
        self._peers.discard(peer)
        if peer.rank:
            self._ranks.disconnected(peer.rank, now)

    def _take(self, peer: Peer, raw: bytes, now: float) -> None:
        try:
            packet = parse(raw)
            if isinstance(packet, Hello):
                self._introduce(peer, packet, now)
            if peer.rank is None:
                raise RefusedError("it has not said which rank it is")
            self.dropped += peer.rank.missed(packet)
            if isinstance(packet, Message):
                self._say(peer, peer.rank, packet)
        except RefusedError as refusal:
            self.dropped += 1
            self._complain(peer, str(refusal), now)
        except ValueError as error:
            self.errors += 1
            self._complain(peer, str(error), now)

    @staticmethod
    def _complain(peer: Peer, reason: str, now: float) -> None:
        if now - peer.user.complained >= COMPLAIN_S:
            peer.user.complained = now
            log.warning("a message of pid %d, uid %d was refused: %s", peer.pid, peer.uid, reason)

    def _introduce(self, peer: Peer, hello: Hello, now: float) -> None:
        if peer.rank and (peer.rank.job, peer.rank.number) != (hello.job, hello.rank):
            raise RefusedError(f"{peer.rank} cannot become rank {hello.rank} of {hello.job}")
        process = self._processes.get(peer.pid)
        if process and len(process.ranks) >= RANKS_OF_A_PROCESS and (hello.job, hello.rank) not in process.ranks:
            raise RefusedError(f"it has been {RANKS_OF_A_PROCESS} other ranks already")
        Series.of("diagnosd_rank", job=hello.job)  # ValueError where line protocol cannot say the name
        fields = fitting("diagnosd_rank", hello.fields)
        self.errors += len(hello.fields) - len(fields)
        for name in ("state", "attempt"):  # what a rank is, is seen from outside
            fields.pop(name, None)
        fields = self._paid(peer, fields)
        rank = self._ranks.hello(hello._replace(fields=fields), peer.uid, peer.pid, now)
        if rank is not peer.rank:
            if peer.rank:
                self._ranks.disconnected(peer.rank, now)
            peer.rank = rank
            rank.connections += 1
            if process := process or self._watched(peer):
                process.ranks[rank.job, rank.number] = rank
                rank.watched = True

    def _paid(self, peer: Peer, fields: dict[str, Value]) -> dict[str, Value]:
        """What a rank says of itself; where its user has written too much text, what was known of it stays."""
        known = peer.rank.fields if peer.rank else {}
        new = {name: value for name, value in fields.items() if type(value) is str and value != known.get(name)}
        if peer.user.may_write(len("".join(map(str, new.values())).encode())):
            return fields
        self.dropped += 1
        old = {name: known[name] for name in new if name in known}
        return {**{name: value for name, value in fields.items() if name not in new}, **old}

    def _watched(self, peer: Peer) -> Process | None:
        """A pidfd tells at once when the process is gone, also while its forked workers hold the connection open.

        None where the end of the connection must do: the process is of a pid namespace that is not ours (0), gone
        already, or one of too many; or the kernel is older than 5.3.
        """
        of_user = sum(process.uid == peer.uid for process in self._processes.values())
        if not peer.pid or of_user >= CONNECTIONS_OF_A_USER or len(self._processes) >= CONNECTIONS:
            return None
        try:
            pidfd = os.pidfd_open(peer.pid)
        except OSError:
            return None
        process = self._processes[peer.pid] = Process(pidfd, peer.uid)
        self._watch(pidfd, lambda: self._process_gone(peer.pid))
        return process

    def _process_gone(self, pid: int) -> None:
        process = self._processes.pop(pid)
        self._selector.unregister(process.pidfd)
        os.close(process.pidfd)
        for peer in [peer for peer in self._peers if peer.pid == pid]:
            self._receive(peer, int(RATE))  # its last words
            if peer in self._peers:
                self._hang_up(peer, time.monotonic())
        for rank in process.ranks.values():
            self._ranks.exited(rank, time.monotonic())

    def _say(self, peer: Peer, rank: Rank, message: Message) -> None:
        """The point that a rank tells. One odd field never removes the others."""
        made = self._point(rank, message)
        if not peer.may_say(made):
            raise RefusedError(f"its user sends more than {TEXT} bytes of text a second")
        if made.series not in peer.series:
            if len(peer.series) >= SERIES:
                raise RefusedError(f"{rank} has sent more than {SERIES} series")
            peer.series.add(made.series)
        if len(self._points) >= HELD:
            raise RefusedError(f"{HELD} points wait to be read")
        self._points.append(made)

    def _point(self, rank: Rank, message: Message) -> Point:
        known = SCHEMA[message.measurement]
        fields = fitting(message.measurement, message.fields)
        self.errors += len(message.fields) - len(fields)
        fields.pop("attempt", None)
        if not fields:
            raise ValueError(f"{message.measurement} has none of these fields: {', '.join(message.fields)}"[:200])
        self._plausible(message)
        if "attempt" in known.fields and rank.attempt is not None:
            fields["attempt"] = rank.attempt
        return Point(self._series(rank, message), fields, message.time)

    def _series(self, rank: Rank, message: Message) -> Series:
        known = SCHEMA[message.measurement]
        may = (*known.tags, *known.optional_tags)
        if unknown := message.tags.keys() - set(may):
            raise ValueError(f"{message.measurement} has no tag {min(unknown)}")
        identity = {"job": rank.job, "host": self._host, "rank": str(rank.number)}
        tags = message.tags | {tag: identity[tag] for tag in may if tag in identity}
        if missing := set(known.tags) - tags.keys():
            raise ValueError(f"{message.measurement} lacks its tag {min(missing)}")
        return Series.of(message.measurement, **tags)

    @staticmethod
    def _plausible(message: Message) -> None:
        ahead = (message.time - time.time_ns()) / 1e9
        if not -PAST_S <= ahead <= FUTURE_S:
            raise ValueError(f"its time is {ahead:.1f} s from now")
        for tag, allowed in CLOSED.get(message.measurement, {}).items():
            if tag in message.tags and message.tags[tag] not in allowed:
                raise ValueError(f"{message.measurement} has no {tag} {message.tags[tag]!r:.40}")
        if message.measurement == "diagnosd_job":
            if set(message.fields) != {"spec"}:
                raise ValueError("a rank says of its job only the spec")
            decode_job(str(message.fields["spec"]))


def _listen(path: Path) -> socket.socket:
    """OSError says what stands in the way."""
    if len(os.fsencode(path)) > SOCKET_PATH:
        raise OSError(f"{os.fspath(path)[:SOCKET_PATH]}...: a socket's path has at most {SOCKET_PATH} bytes")
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        if os.fspath(path) == DEFAULT_SOCKET:  # our own place; any other folder is its owner's to make
            _make_folder(path.parent)
        listener.bind(os.fspath(path))
        path.chmod(0o666)  # the ranks are other users' processes
        listener.listen(128)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise OSError(f"{path}: {not_made(path, error)}; name another path with --socket") from error
    return listener


def _make_folder(folder: Path) -> None:
    """Where there is none, one that ranks of any user can enter, whatever our umask."""
    if not folder.is_dir():
        folder.mkdir()
        folder.chmod(0o755)


def _remove_stale(path: Path) -> None:
    """What an agent that was killed left behind."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(f"{path} is there and is no socket; name another path with --socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as knock:
        knock.setblocking(False)
        if knock.connect_ex(os.fspath(path)) != errno.ECONNREFUSED:
            raise OSError(f"another program listens on {path}; name another path with --socket")
    path.unlink()


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
