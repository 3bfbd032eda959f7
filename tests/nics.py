"""NICs whose drivers count what a test says: a C library answers the ioctl, the collector that asks is the real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple, Self

from diagnosd.point import Point, decode

SOURCE = Path(__file__).parent / "ethtool/ethtool.c"
# ethtool's numbers of <linux/ethtool.h>
GDRVINFO, GSTRINGS, GSTATS, GSSET_INFO = 0x03, 0x1B, 0x1D, 0x37

READER = """\
import json, sys, time
from pathlib import Path
from diagnosd.collectors.ethtool import Ethtool
from diagnosd.collectors.machine import Machine
from diagnosd.point import encode
ethtool = Ethtool(Machine("n01", sys=Path(sys.argv[1]), exclude=tuple(sys.argv[2:])))
opened = []
def hook(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith(sys.argv[1]):
        opened.append(str(arguments[0]).removeprefix(sys.argv[1]))
sys.addaudithook(hook)
for line in sys.stdin:
    began = time.process_time()
    said = encode(ethtool.read(int(line))).decode()
    print(f"{said}# {ethtool.errors} {time.process_time() - began} {json.dumps(opened)}", flush=True)
"""


class Nics:
    """A machine with these interfaces. The stand-in reads a file an interface, whose lines `ethtool -S` would print."""

    def __init__(self, folder: Path) -> None:
        self.sys = folder / "sys"
        self._folder = folder
        self._answers = folder / "ethtool"
        self._log = folder / "asked"
        for each in (self._answers, self.sys / "class/net", self.sys / "class/infiniband"):
            each.mkdir(parents=True)
        self._library = folder / "ethtool.so"
        subprocess.run(["gcc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", self._library, SOURCE], check=True)

    def add(
        self,
        name: str,
        counters: str,
        *,
        driver: str = "mlx5_core",
        pci: str = "0000:19:00.0",
        errno: int = 0,
        strict: bool = False,
        rdma: str = "",
    ) -> None:
        """An interface, or what it says from now on."""
        self.answer(name, f"# errno {errno}\n" * bool(errno) + "# strict\n" * strict + counters, driver)
        self.interface(name)
        device = self.sys / "class/net" / name / "device"
        device.unlink(missing_ok=True)
        device.symlink_to(f"../../../{pci}")
        if rdma:
            (self.sys / "class/infiniband" / rdma).mkdir()
            (self.sys / "class/infiniband" / rdma / "device").symlink_to(f"../../../{pci}")

    def answer(self, name: str, counters: str, driver: str = "mlx5_core") -> None:
        """What the driver of an interface says that stands in another tree."""
        fresh = self._answers / ".new"
        fresh.write_bytes(os.fsencode(f"# driver {driver}\n{counters}"))
        fresh.rename(self._answers / name)

    def interface(self, name: str) -> Path:
        """One without a device behind it, as a bridge is."""
        folder = self.sys / "class/net" / name
        folder.mkdir(exist_ok=True)
        return folder

    def remove(self, name: str) -> None:
        (self._answers / name).unlink()
        (self.sys / "class/net" / name / "device").unlink()
        (self.sys / "class/net" / name).rmdir()

    def environment(self, *, delay_us: int = 0) -> dict[str, str]:
        return {
            "LD_PRELOAD": str(self._library),
            "ETHTOOL_DIR": str(self._answers),
            "ETHTOOL_LOG": str(self._log),
            "ETHTOOL_DELAY_US": str(delay_us),
        }

    def asked(self) -> list[tuple[str, int]]:
        """(interface, command) of every request so far."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [(name, int(command)) for name, command in map(str.split, lines)]


class Read(NamedTuple):
    points: list[Point]
    errors: int
    cpu_s: float
    opened: list[str]  # files and folders under /sys, since the start

    def fields(self, interface: str) -> dict[str, object]:
        (point,) = [point for point in self.points if point.series.tag("interface") == interface]
        return dict(point.fields)

    def interfaces(self) -> set[str | None]:
        return {point.series.tag("interface") for point in self.points}


class Reader:
    """The collector, in a process in which the library stands before the kernel."""

    def __init__(self, nics: Nics, *exclude: str, delay_us: int = 0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", READER, nics.sys, *exclude],
            env=os.environ | nics.environment(delay_us=delay_us),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def read(self, now_ns: int) -> Read:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(b"%d\n" % now_ns)
        self._process.stdin.flush()
        points = []
        while not (line := self._process.stdout.readline()).startswith(b"#"):
            assert line, "the reader has died"
            points.append(decode(line))
        _, errors, cpu_s, opened = line.split(maxsplit=3)
        return Read(points, int(errors), float(cpu_s), json.loads(opened))
