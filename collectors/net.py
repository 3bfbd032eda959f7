"""Bytes, packets, errors and drops of each network interface in our network namespace: /proc/net/dev."""

from __future__ import annotations

import re

from diagnosd.collectors.kernel import KernelFile, RollCall, counter
from diagnosd.collectors.machine import Machine
from diagnosd.point import Point, point

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
        self._dev = KernelFile(machine.proc / "net/dev")
        self._roll = RollCall()

    @property
    def errors(self) -> int:
        return self._dev.errors

    def read(self, now_ns: int) -> list[Point]:
        text = self._dev.read()
        if text is None:
            return []
        rows = dict(self._rows(text))
        points = [
            point("net", {"host": self._host, "interface": interface}, fields, now_ns)
            for interface, fields in rows.items()
        ]
        return points + [self._gone(interface, now_ns) for interface in self._roll.gone(rows)]

    @staticmethod
    def _rows(text: str) -> list[tuple[str, dict[str, int]]]:
        rows = []
        for line in text.splitlines()[2:]:
            interface, _, counts = line.rpartition(":")  # an alias is called eth0:1
            columns = counts.split()
            if watched(interface := interface.strip()):
                rows.append((interface, {name: counter(columns[column]) for column, name in COLUMNS}))
        return rows

    def _gone(self, interface: str, now_ns: int) -> Point:
        tags = {"host": self._host, "kind": "link_down", "subject": f"nic:{self._host}/{interface}"}
        return point("diagnosd_event", tags, {"text": f"{interface} is gone"}, now_ns)
