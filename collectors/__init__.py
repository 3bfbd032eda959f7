"""One file a place the truth comes from. A collector is a synchronous read(now) -> points; each stands in COLLECTORS.

`steps` stands apart: it is made with the path of its socket.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from diagnosd.collectors.clock import Clock
from diagnosd.collectors.cpu import Cpu
from diagnosd.collectors.diskio import Diskio
from diagnosd.collectors.machine import Machine
from diagnosd.collectors.mem import Mem
from diagnosd.collectors.net import Net
from diagnosd.collectors.node import Node
from diagnosd.collectors.nstat import Nstat
from diagnosd.collectors.pressure import Pressure
from diagnosd.point import Point


class Collector(Protocol):
    """Reads one place. What it cannot read now it counts in `errors`; what this machine does not have it forgets."""

    @property
    def name(self) -> str: ...
    @property
    def every(self) -> int:
        """Seconds between two reads."""

    @property
    def errors(self) -> int: ...
    def read(self, now_ns: int) -> list[Point]: ...


COLLECTORS: tuple[Callable[[Machine], Collector], ...] = (Net, Nstat, Cpu, Mem, Pressure, Diskio, Clock, Node)
