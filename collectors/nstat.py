"""TCP's own account of this network namespace: /proc/net/snmp and /proc/net/netstat."""

from __future__ import annotations

from diagnosd.collectors.kernel import KernelFile, counter, is_counter
from diagnosd.collectors.machine import Machine
from diagnosd.point import Point, point

# file -> the counters that say something about a slow network or a slow receiver, under Telegraf's names
COUNTERS: dict[str, frozenset[str]] = {
    "snmp": frozenset({"TcpInSegs", "TcpOutSegs", "TcpRetransSegs", "TcpInErrs"}),
    "netstat": frozenset(
        {
            "TcpExtTCPLostRetransmit",  # a retransmission was lost too: loss, not reordering
            "TcpExtTCPTimeouts",
            "TcpExtTCPFastRetrans",
            "TcpExtTCPSlowStartRetrans",
            "TcpExtTCPSpuriousRTOs",  # it was not lost, only late: queueing
            "TcpExtTCPDeliveredCE",  # delivered, and marked by a switch that runs full (ECN)
            "TcpExtTCPToZeroWindowAdv",  # the receiver does not read: it is the slow one, not the wire
            "TcpExtTCPBacklogDrop",
            "TcpExtTCPRcvQDrop",
            "TcpExtPruneCalled",
            "TcpExtListenDrops",
        }
    ),
}


class Nstat:
    name = "nstat"
    every = 1

    def __init__(self, machine: Machine) -> None:
        self._host = machine.host
        self._files = {name: KernelFile(machine.proc / "net" / name) for name in COUNTERS}

    @property
    def errors(self) -> int:
        return sum(file.errors for file in self._files.values())

    def read(self, now_ns: int) -> list[Point]:
        points = []
        for name, file in self._files.items():
            text = file.read()
            fields = {} if text is None else self._fields(text, COUNTERS[name])
            if fields:
                points.append(point("nstat", {"host": self._host, "name": name}, fields, now_ns))
        return points

    @staticmethod
    def _fields(text: str, wanted: frozenset[str]) -> dict[str, int]:
        """Lines come in pairs: `Tcp: Name Name ...` and `Tcp: 1 2 ...`."""
        fields = {}
        lines = text.splitlines()
        for names, values in zip(lines[::2], lines[1::2], strict=False):
            protocol, _, rest = names.partition(": ")
            counts = values.removeprefix(f"{protocol}: ").split()
            for name, count in zip(rest.split(), counts, strict=False):
                if protocol + name in wanted and is_counter(count):
                    fields[protocol + name] = counter(count)
        return fields
