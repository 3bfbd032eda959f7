"""Bytes, packets, errors and drops of each network interface in our network namespace: /proc/net/dev."""

from __future__ import annotations

import re
from collections.abc import Iterator

from diagnosd.collectors.kernel import KernelFile, RollCall, counter, is_counter
from diagnosd.collectors.machine import Machine
from diagnosd.point import Point, Series, point

# column of /proc/net/dev -> Telegraf's name
COLUMNS = (
    (0, "bytes_recv"),
    (1, "packets_recv"),
    (2, "err_in"),
    (3, "drop_in"),
    (8, "bytes_sent"),
    (9, "packets_sent"),
    (10, "err_out"),
    (11, "drop_out"),
)
# Ends of containers, hundreds on some nodes, and the bridges that join them: what leaves the host passes a port and is
# counted there. Docker names a bridge by 12 hexadecimal digits; br0 or br-ex may be what holds the host's address.
INSIDE = re.compile(r"lo|(veth|cali|lxc|cni|flannel|docker|virbr).*|br-[0-9a-f]{12}")


def watched(interface: str) -> bool:
    return INSIDE.fullmatch(interface) is None


class Net:
    name = "net"
    every = 1

    def __init__(self, machine: Machine) -> None:
        self._host = machine.host
        self._excludes = machine.excludes
        self._dev = KernelFile(machine.proc / "net/dev")
        self._roll = RollCall()

    @property
    def errors(self) -> int:
        return self._dev.errors

    def read(self, now_ns: int) -> list[Point]:
        text = self._dev.read()
        if text is None:
            return []
        points = dict(self._points(text, now_ns))
        return [*points.values(), *(self._gone(interface, now_ns) for interface in self._roll.gone(points))]

    def _points(self, text: str, now_ns: int) -> Iterator[tuple[str, Point]]:
        """A name may be anything but blanks, slashes and colons: one that cannot be a tag is left out, by itself."""
        for line in text.split("\n")[2:]:
            interface, _, counts = line.rpartition(":")
            interface, columns = interface.strip(" "), counts.split()
            if not watched(interface) or self._excludes(interface):
                continue
            if len(columns) <= COLUMNS[-1][0] or not all(map(is_counter, columns)):
                continue
            try:
                series = Series.of("net", host=self._host, interface=interface)
            except ValueError:
                continue
            yield interface, Point(series, {name: counter(columns[column]) for column, name in COLUMNS}, now_ns)

    def _gone(self, interface: str, now_ns: int) -> Point:
        tags = {"host": self._host, "kind": "link_down", "subject": f"nic:{self._host}/{interface}"}
        return point("diagnosd_event", tags, {"text": f"{interface} is gone"}, now_ns)
