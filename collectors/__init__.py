"""One file a place the truth comes from. A collector is a synchronous read(now) -> points.

Those that read only /proc stand in COLLECTORS, each on a thread of the agent's; those that touch a device, and may
hang with it, in `hardware`, in the reader's process. `steps` stands apart: it is made with the path of its socket.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from diagnosd.collectors.clock import Clock
from diagnosd.collectors.cpu import Cpu
from diagnosd.collectors.disk import Disk
from diagnosd.collectors.diskio import Diskio
from diagnosd.collectors.ethtool import Ethtool
from diagnosd.collectors.infiniband import Infiniband
from diagnosd.collectors.kernellog import KernelLog
from diagnosd.collectors.link import Link
from diagnosd.collectors.lustre import Lustre
from diagnosd.collectors.machine import Machine
from diagnosd.collectors.mem import Mem
from diagnosd.collectors.net import Net
from diagnosd.collectors.nfs import Nfs
from diagnosd.collectors.node import Node
from diagnosd.collectors.nstat import Nstat
from diagnosd.collectors.nvml import Nvml
from diagnosd.collectors.pressure import Pressure
from diagnosd.point import Point


class Collector(Protocol):
    """Reads one place. What it cannot read now it counts in `errors`; what this machine does not have it forgets.

    One that touches a device does so in its reads alone: made, it has opened nothing. It may also have
    - `deadline`: seconds that a read may take, 1.5 where it does not say; the first read may take longer
    - `missing`: after the first read, what is not here and which path was tried, or None
    - `stale`: whether only a fresh process can read on, as after an upgrade of a library that is loaded
    - `close()`: lets go of what it has open; in the agent one more read gives what had come until then
    """

    @property
    def name(self) -> str: ...
    @property
    def every(self) -> int:
        """Seconds between two reads."""

    @property
    def errors(self) -> int: ...
    def read(self, now_ns: int) -> list[Point]: ...


COLLECTORS: tuple[Callable[[Machine], Collector], ...] = (
    Net,
    Nstat,
    Cpu,
    Mem,
    Pressure,
    Diskio,
    Clock,
    Nfs,
    Lustre,
    KernelLog,
)


def hardware(machine: Machine) -> list[Collector]:
    """In the order in which they are read: Node, the last, tells what the others found."""
    nvml = Nvml(machine)
    return [
        nvml,
        Infiniband(machine),
        Link(machine),
        Ethtool(machine),
        Disk(machine),
        Node(machine, nvml=nvml.inventory),
    ]
