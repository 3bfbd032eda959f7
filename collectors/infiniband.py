"""The counters of each RDMA port, under the names of their files: /sys/class/infiniband/DEVICE/ports/N.

What one count is in belongs to driver and file: `schema.unit_of`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from diagnosd.collectors.every import Every
from diagnosd.collectors.kernel import names
from diagnosd.collectors.machine import Machine
from diagnosd.collectors.rdma import ATTEMPTS, REST_S, Attribute, Tally, devices
from diagnosd.point import Point, Series, Value, point

SLOW_S = 10
LOOK_S = 10  # seconds between two looks for devices that came or went
# Files that are read every second, whatever the vendor calls them: bytes, packets, waiting, congestion notifications.
# mlx5, mlx4, hfi1 (counters); efa, bnxt_re (tx_bytes); ionic (tx_rdma_ucast_bytes); irdma, i40iw (ip4OutOctets).
_DATA = re.compile(
    r"port_(xmit|rcv)_(data|packets)(_64)?|[tr]x_(bytes|pkts)|[tr]x_rdma_ucast_(bytes|pkts)|ip[46](In|Out)Octets"
)
# These say how often a sender was held up. Many drivers and firmwares have the file and never count.
_CONGESTION = re.compile(r"port_xmit_wait(_64)?|cc_.*|.*(cnp|ecn).*", re.IGNORECASE)
# The kernel's cache is older than `lifespan` when it is asked a little later: jiffies of 4 ms, and a tick's jitter.
_MARGIN_MS = 20


class _Counter:
    """One file and the field it becomes."""

    __slots__ = ("attribute", "counts", "name", "zero_ns")

    def __init__(self, name: str, attribute: Attribute) -> None:
        self.name = name
        self.attribute = attribute
        self.counts = _CONGESTION.fullmatch(name) is None  # it has been seen to, or need not be
        self.zero_ns: int | None = None  # when it was 0 the last time


class _Folder:
    """A folder of counters: what is read when, and what its driver allows."""

    def __init__(self, folder: str, tally: Tally) -> None:
        files = [name for name in names(folder) if _sayable(name)]
        self.fast = [_counter(folder, name, tally, kept=True) for name in files if _is_fast(name)]
        self.slow = [_counter(folder, name, tally, kept=False) for name in files if not _is_fast(name)]
        self.zeros: list[tuple[int, str]] = []  # of counters that have just begun to count: when they were 0
        self._tally = tally
        self._lifespan_ns = 0
        self._read_ns: int | None = None
        self._owed = False  # slow ones, that were due when the driver had nothing new
        self._worked = False
        self._rounds = self._rest = 0

    def read(self, now_ns: int, *, slow: bool) -> dict[str, Value]:
        """What there is of the fast counters, and of the slow ones where they are due."""
        self._owed |= slow
        if self._rest:
            self._rest -= 1
            return {}
        if self._read_ns is not None and 0 <= now_ns - self._read_ns < self._lifespan_ns:
            return {}
        self._read_ns = now_ns
        counters = self.fast + self.slow if self._owed else self.fast
        fields = self._fields(counters, now_ns)
        lifespan = fields.get("lifespan")
        if isinstance(lifespan, int):
            self._lifespan_ns = (lifespan + _MARGIN_MS) * 1_000_000 if lifespan else 0
        return fields

    def _fields(self, counters: list[_Counter], now_ns: int) -> dict[str, Value]:
        fields: dict[str, Value] = {}
        errors, answered = self._tally.errors, False
        for counter in sorted(counters, key=_failures) if self._rounds else counters:
            value = counter.attribute.number()
            answered |= value is not None
            if value is None:
                if not answered and self._tally.errors - errors == ATTEMPTS:
                    self._give_up()
                    return fields
            elif counter.counts:
                fields[counter.name] = value
            elif value:
                counter.counts = True
                fields[counter.name] = value
                if counter.zero_ns is not None:
                    self.zeros.append((counter.zero_ns, counter.name))
            else:
                counter.zero_ns = now_ns
        self._owed = False
        if answered:
            self._rounds, self._worked = 0, True
        return fields

    def _give_up(self) -> None:
        """A driver that refuses all says so in the kernel's log each time: three files are asked, then three others."""
        self._rounds += 1
        if self._rounds >= ATTEMPTS:
            self._rest = min(2 ** (self._rounds - ATTEMPTS), REST_S) if self._worked else REST_S

    def close(self) -> None:
        for counter in self.fast:
            counter.attribute.close()


def _counter(folder: str, name: str, tally: Tally, *, kept: bool) -> _Counter:
    return _Counter(name, Attribute(f"{folder}/{name}", tally, kept=kept, period=1 if kept else SLOW_S))


def _failures(counter: _Counter) -> int:
    return counter.attribute.failures


def _is_fast(name: str) -> bool:
    return bool(_DATA.fullmatch(name) or _CONGESTION.fullmatch(name))


def _sayable(name: str) -> bool:
    """hfi1 has names with a comma, irdma some with a space; line protocol can say both, but no control character."""
    try:
        point("infiniband", {"host": "-", "device": "-", "port": "1"}, {name: 0}, 0)
    except ValueError:
        return False
    return name not in ("host", "device", "port")


class _Port:
    def __init__(self, series: Series, folders: list[str], tally: Tally, early: int) -> None:
        self.series = series
        self.folders = [_Folder(folder, tally) for folder in folders]
        self._slow_due = Every(SLOW_S, early)

    def read(self, now_ns: int, tick: int) -> Iterator[Point]:
        slow = self._slow_due.is_due(now_ns, tick)
        fields: dict[str, Value] = {}
        for folder in self.folders:
            fields = {**folder.read(now_ns, slow=slow), **fields}  # the port's own before its device's
            for zero_ns, name in folder.zeros:
                yield Point(self.series, {name: 0}, zero_ns)
            folder.zeros.clear()
        if fields:
            yield Point(self.series, fields, now_ns)

    def close(self) -> None:
        for folder in self.folders:
            folder.close()


class Infiniband:
    """Fast counters every second through descriptors that stay open, the others every ten, each port at its own tick.

    A congestion counter is told from its first value above 0 on, together with the 0 before it: until then nobody
    knows whether it counts at all. Every other counter is told raw, a saturated one too.
    """

    name = "infiniband"
    every = 1

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._tally = Tally()
        self._ports: dict[tuple[str, int], _Port] = {}
        self._tick = 0
        self._look_due = Every(LOOK_S)

    @property
    def errors(self) -> int:
        return self._tally.errors

    def read(self, now_ns: int) -> list[Point]:
        self._tick += 1
        if self._look_due.is_due(now_ns, self._tick) or self._tally.gone:
            try:
                self._look()
            except OSError:  # no descriptor left, or the like: nobody knows who is there
                self._tally.errors += 1
        return [each for port in self._ports.values() for each in port.read(now_ns, self._tick)]

    def close(self) -> None:
        for port in self._ports.values():
            port.close()
        self._ports.clear()

    def _look(self) -> None:
        """Takes up the ports that have come and forgets those that went: `Link` tells of them."""
        there = {}
        for device in devices(self._machine):
            for number in device.ports:
                folder = f"{device.folder}/ports/{number}"
                first = [f"{device.folder}/hw_counters"] if number == device.ports[0] else []
                there[device.name, number] = [
                    f"{folder}/counters",
                    f"{folder}/counters_ext",
                    f"{folder}/hw_counters",
                    *first,
                ]
        self._tally.gone = False
        for key in self._ports.keys() - there.keys():
            self._ports.pop(key).close()
        for key, folders in there.items():
            if key not in self._ports:
                self._ports[key] = self._port(*key, folders)

    def _port(self, device: str, number: int, folders: list[str]) -> _Port:
        series = Series.of("infiniband", host=self._machine.host, device=device, port=str(number))
        return _Port(series, folders, self._tally, early=len(self._ports) % SLOW_S)
