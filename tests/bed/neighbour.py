"""Somebody else's traffic: `sink PORT` takes what comes, `send ADDRESS PORT STREAMS` sends as fast as TCP lets it.

Neither touches a byte (sendfile from a file of zeros, and MSG_TRUNC, by which the kernel drops what arrived), so that
they take the link and leave the CPU.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
import time

BLOCK = 1 << 20


def drain(connection: socket.socket) -> None:
    unused = bytearray(BLOCK)
    while connection.recv_into(unused, BLOCK, socket.MSG_TRUNC):
        pass


def sink(port: int) -> None:
    with socket.create_server(("0.0.0.0", port)) as server:
        while True:
            threading.Thread(target=drain, args=(server.accept()[0],), daemon=True).start()


def send(address: str, port: int) -> None:
    with tempfile.TemporaryFile() as zeros, connect(address, port) as connection:
        zeros.truncate(BLOCK)
        while True:
            os.sendfile(connection.fileno(), zeros.fileno(), 0, BLOCK)


def connect(address: str, port: int) -> socket.socket:
    for _ in range(100):
        try:
            return socket.create_connection((address, port))
        except ConnectionRefusedError:
            time.sleep(0.02)
    raise SystemExit(f"nobody listens on {address}:{port}")


def main(role: str, *rest: str) -> None:
    if role == "sink":
        sink(int(rest[0]))
    address, port, streams = rest
    for _ in range(int(streams)):
        threading.Thread(target=send, args=(address, int(port))).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
