"""A stand-in for the agent, which really listens, and where the scripts are that run under the probe."""

from __future__ import annotations

import contextlib
import resource
import selectors
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from diagnosd.probe.message import Hello, Message, parse

PATH = Path(__file__).parents[2] / "diagnosd/probe/path"
SCRIPTS = Path(__file__).parent / "scripts"


@contextlib.contextmanager
def no_more_files() -> Iterator[None]:
    """As if this process had as many files open as it may: the kernel refuses the next with EMFILE."""
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)


Launch = Callable[..., "subprocess.CompletedProcess[str]"]


class Agent:
    """Keeps all it is sent, by connection, and dies when told."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.connections: list[list[Hello | Message]] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._wake, self._waker = socket.socketpair()
        self._open = self._rounds = 0
        self._thread = threading.Thread(target=self._receive)
        self._thread.start()

    def _receive(self) -> None:
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
            for each in (self._listener, self._wake):
                selector.register(stack.enter_context(each), selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(0.02):
                    if key.fileobj is self._wake:
                        return
                    if key.fileobj is self._listener:
                        connection = stack.enter_context(self._listener.accept()[0])
                        self.connections.append([])
                        self._open += 1
                        selector.register(connection, selectors.EVENT_READ, self.connections[-1])
                    elif raw := key.fileobj.recv(65536):  # type: ignore[union-attr]
                        key.data.append(parse(raw))
                    else:
                        selector.unregister(key.fileobj)
                        self._open -= 1
                self._rounds += 1

    def die(self) -> None:
        """And take the socket's name away, as an agent's unit does."""
        if self._thread.is_alive():
            self._waker.send(b"x")
            self._thread.join()
            self._waker.close()
            self.path.unlink()

    def catches_up(self) -> None:
        """All that those sent who have ended is there; who goes on is not waited for."""
        begun = self._rounds
        self.hears(lambda _: self._rounds > begun + 1 and not self._open, 2.0)

    def hears(self, expected: Callable[[Agent], object], seconds: float = 20.0) -> bool:
        """Whether it comes to that; the limit is for a probe that says nothing."""
        give_up = time.monotonic() + seconds
        while not expected(self) and time.monotonic() < give_up:
            time.sleep(0.01)
        return bool(expected(self))

    @property
    def packets(self) -> list[Hello | Message]:
        return [packet for connection in self.connections for packet in connection]

    @property
    def hellos(self) -> list[Hello]:
        return [packet for packet in self.packets if isinstance(packet, Hello)]

    def points(self, measurement: str, rank: int | None = None) -> list[Message]:
        """Of one rank, or of all, in the order in which they were sent."""
        return [
            packet
            for connection in self.connections
            for packet in connection
            if isinstance(packet, Message) and packet.measurement == measurement and rank in (None, _rank(connection))
        ]

    def steps(self, rank: int | None = None) -> list[dict[str, Any]]:
        return [message.fields for message in self.points("diagnosd_step", rank)]


def _rank(connection: list[Hello | Message]) -> int:
    assert isinstance(connection[0], Hello), "a connection begins with a hello"
    return connection[0].rank
