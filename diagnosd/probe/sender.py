"""Messages to the agent: never blocking, at most 64 kept while nobody reads, and every loss visible in the numbers.

A kernel's queue of a SEQPACKET socket holds some 160 step messages. When 64 more wait here the oldest goes, and the
number it would have had is left out. The agent may come, die and return: a new connection is tried at most once a
second and begins with a hello. A job may close every file that it does not know and open its own under their numbers:
before it is used or closed, the socket's number is seen to stand for the socket still.

Used by the watching thread; by the training thread only at exit, and for the first hello.
"""

import errno
import os
import socket
import threading
import time
from collections import deque
from typing import Callable, Deque, Optional

from diagnosd.probe.message import Hello, encode_hello

KEPT = 64
AT_ONCE = 32  # messages that are sent without waiting for more
RECONNECT_SECONDS = 1.0
_AGAIN = (errno.EAGAIN, errno.ENOBUFS, errno.EINTR)


class Sender:
    """`hello` makes the introduction of a new connection from the number of the message that comes next."""

    def __init__(self, path: str, hello: Callable[[int], Hello]) -> None:
        self.path = path
        self.dropped = 0
        self._hello = hello
        self._number = 0
        self._skipped = 0  # how much of `dropped` has been left out of the numbers
        self._waiting: Deque[Callable[[int], bytes]] = deque()
        self._one_at_a_time = threading.RLock()
        self._socket: Optional[socket.socket] = None
        self._identity: Optional[os.stat_result] = None  # of the file that is our socket
        self._tried = -RECONNECT_SECONDS

    def send(self, message: Callable[[int], bytes]) -> None:
        """Keep a message, which is made from its number when it leaves."""
        with self._one_at_a_time:
            if len(self._waiting) >= KEPT:
                self._waiting.popleft()
                self.dropped += 1
            self._waiting.append(message)
            if len(self._waiting) >= AT_ONCE:
                self.flush()

    def flush(self) -> None:
        """Connect where there is no connection and send what waits, as far as the kernel takes it at once."""
        with self._one_at_a_time:
            if self._socket is not None and not self._is_ours(self._socket):
                self._lose()
            if self._socket is None and time.monotonic() - self._tried >= RECONNECT_SECONDS:
                self._connect()
            while self._socket is not None and self._waiting:
                if not self._transmit(self._socket):
                    break

    def introduce(self) -> None:
        """Say hello again on the standing connection: what it tells has changed."""
        with self._one_at_a_time:
            if self._socket is not None and self._is_ours(self._socket):
                self._say_hello(self._socket)

    def close(self) -> None:
        """For good."""
        self._tried = float("inf")
        self._lose()

    def _lose(self) -> None:
        connection, self._socket = self._socket, None
        if connection is not None:
            if self._is_ours(connection):
                connection.close()
            else:
                connection.detach()

    def _is_ours(self, connection: socket.socket) -> bool:
        try:
            now = os.fstat(connection.fileno())
        except OSError:  # closed, and its number not taken yet
            return False
        return self._identity is not None and os.path.samestat(now, self._identity)

    def _connect(self) -> None:
        self._tried = time.monotonic()
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:  # the job has as many files open as it may
            return
        connection.setblocking(False)
        try:
            connection.connect(self.path)
            self._identity = os.fstat(connection.fileno())
        except OSError:  # nobody listens, or its backlog is full: the next second will do
            connection.close()
            return
        self._say_hello(connection)

    def _say_hello(self, connection: socket.socket) -> None:
        self._skip_dropped()
        try:
            connection.send(self._introduction())
            self._socket = connection
        except OSError:
            connection.close()
            self._socket = None

    def _introduction(self) -> bytes:
        hello = self._hello(self._number)
        try:
            return encode_hello(hello)
        except Exception:  # who it is goes before what it is like: a thousand addresses do not fit
            return encode_hello(hello._replace(fields={}))

    def _transmit(self, connection: socket.socket) -> bool:
        """Whether the oldest message is gone. One that cannot be encoded is a loss like any other."""
        self._skip_dropped()
        try:
            raw = self._waiting[0](self._number)
        except Exception:  # one too long, or with a value that JSON does not know
            self.dropped += 1
            self._skipped += 1
        else:
            try:
                connection.send(raw)
            except OSError as error:
                if error.errno not in _AGAIN:
                    self._lose()
                return False
        self._waiting.popleft()
        self._number += 1
        return True

    def _skip_dropped(self) -> None:
        self._number += self.dropped - self._skipped
        self._skipped = self.dropped
