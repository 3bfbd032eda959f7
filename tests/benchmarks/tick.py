"""What reading a node of 8 GPUs, 18 links each, and 8 HCAs costs: `python -m tests.benchmarks.tick [--day]`, as root.

The real `diagnosd agent`, as nobody, for a minute. The node is a captured /sys, mounted over this machine's own in a
namespace that nobody else sees; C libraries stand in for NVIDIA's and for the NICs' drivers. Then again with devices
that are slow to answer. `--day` reads the same node as often as a day has seconds, and says what that took in memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from pwd import getpwnam
from shlex import join
from typing import NamedTuple

from diagnosd.collectors import hardware
from diagnosd.collectors.machine import Machine
from diagnosd.point import Point
from diagnosd.recording import read

from ..bed.machine import open_homes
from ..hca import hcas
from ..nics import Nics
from ..nvml.machine import Gpus
from .table import row

ROOT = Path(__file__).parents[2]
MINUTE = 60
WARM_UP_S = 15  # the first reads learn what each device has; every slow field has then come once
DAY = 86_400
CLOCK = os.sysconf("SC_CLK_TCK")
SLOW_FILES = Path(__file__).with_name("slow.c")
ETHTOOL_DELAY_US = 5000


def counters() -> str:
    """What `ethtool -S` prints of a ConnectX: what we take, and a hundred rings of what we leave."""
    ports = [
        f"{way}_prio{priority}_{what}"
        for way in ("rx", "tx")
        for priority in range(8)
        for what in ("bytes", "packets", "discards", "pause", "pause_duration", "pause_transition")
    ]
    rest = ["rx_discards_phy", "rx_symbol_err_phy", "rx_out_of_buffer", "outbound_pci_stalled_wr", "rx_global_pause"]
    rings = [f"rx{ring}_{what}" for ring in range(100) for what in ("packets", "bytes", "csum_complete")]
    return "".join(f"{name}: {number}\n" for number, name in enumerate([*ports, *rest, *rings]))


@contextmanager
def node(*, slow: bool = False) -> Iterator[tuple[Path, dict[str, str]]]:
    """The folder of its /sys, and what the environment of who reads it needs."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        for each in ("gpus", "nics"):
            (folder / each).mkdir()
        hcas(folder / "sys", 8)
        gpus = Gpus(folder / "gpus", *["H100"] * 8)
        nics = Nics(folder / "nics")
        for number in range(8):
            nics.answer(f"ib{number}", counters())
        environ = gpus.environment | nics.environment(delay_us=ETHTOOL_DELAY_US if slow else 0)
        del environ["ETHTOOL_LOG"]
        if slow:
            slow_files = folder / "slow.so"
            subprocess.run(
                ["gcc", "-O1", "-Wall", "-shared", "-fPIC", "-o", slow_files, SLOW_FILES, "-ldl"], check=True
            )
            environ["LD_PRELOAD"] += f":{slow_files}"
        yield folder, environ


class Cost(NamedTuple):
    cpu_s: float
    pss: int  # bytes


def cost(pid: int) -> Cost:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    rollup = dict(line.split()[:2] for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return Cost((int(user) + int(system)) / CLOCK, 1024 * int(rollup["Pss:"]))


@contextmanager
def agent(folder: Path, environ: Mapping[str, str]) -> Iterator[tuple[int, int]]:
    """The agent as nobody over that /sys; its pid and its reader's."""
    nobody = getpwnam("nobody")
    out = folder / "out"
    out.mkdir(mode=0o777)
    out.chmod(0o777)
    become = ["setpriv", f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}", "--clear-groups", "--no-new-privs"]
    diagnosd = [sys.executable, "-m", "diagnosd", "agent", "--host", "n01", "--socket", f"{out}/probe.sock"]
    preloaded = ["env", *(f"{name}={value}" for name, value in environ.items())]  # not for unshare and mount
    command = join([*become, *preloaded, *diagnosd, "--record", f"{out}/"])
    mounts = [*open_homes(folder / "stage"), f"mount --bind {folder / 'sys'} /sys"]
    script = "\n".join(["set -e", *mounts, f"exec {command}"])
    process = subprocess.Popen(["unshare", "--mount", "sh", "-c", script], cwd="/", stderr=subprocess.DEVNULL)
    try:
        time.sleep(WARM_UP_S)
        yield process.pid, next(_readers(process.pid))
    finally:
        process.terminate()
        process.wait()


def _readers(pid: int) -> Iterator[int]:
    """Any of its threads may have started it."""
    children = " ".join((task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir())
    return (int(child) for child in children.split() if b"read" in Path(f"/proc/{child}/cmdline").read_bytes())


def watch(*, slow: bool) -> None:
    with node(slow=slow) as (folder, environ):
        with agent(folder, environ) as (ours, readers):
            before = cost(ours), cost(readers)
            time.sleep(MINUTE)
            after = cost(ours), cost(readers)
        points = [point for batch in read(folder / "out") for point in batch]
        recorded = (folder / "out/n01.lp.zst").stat().st_size / (points[-1].time - points[0].time) * 1e9
    used = [now.cpu_s - then.cpu_s for then, now in zip(before, after, strict=True)]
    told = "with 0.3 ms a file and 5 ms an ioctl" if slow else "8 GPUs x 18 links, 8 HCAs"
    row(f"a tick of the reader, {told}", f"{1e3 * used[1] / MINUTE:.2f} ms of CPU")
    row("  of the agent beside it", f"{1e3 * used[0] / MINUTE:.2f} ms of CPU")
    row("  both, of one core", f"{100 * sum(used) / MINUTE:.2f} %")
    row("  both, memory (sum of PSS)", f"{sum(each.pss for each in after) / 2**20:.0f} MiB")
    row("  a second has", values_a_second(points))
    row("  recorded, compressed", f"{recorded * DAY / 1e6:.0f} MB a day")
    row("  latest heartbeat", f"{1e3 * latest(points):.0f} ms")


def values_a_second(points: list[Point]) -> str:
    seconds = len({point.time for point in heartbeats(points)})
    devices = [point for point in points if not point.series.measurement.startswith("diagnosd_agent")]
    values = sum(len(point.fields) for point in devices)
    return f"{len(devices) / seconds:.0f} points with {values / seconds:.0f} field values"


def heartbeats(points: list[Point]) -> list[Point]:
    return [point for point in points if point.series.tag("collector") == "agent"]


def latest(points: list[Point]) -> float:
    """Seconds beyond one between two heartbeats, at the most."""
    return max((later.time - earlier.time) / 1e9 - 1 for earlier, later in pairwise(heartbeats(points)))


def day() -> None:
    """In this process, which is started anew with the libraries in its environment."""
    with node() as (folder, environ):
        command = [sys.executable, "-m", "tests.benchmarks.tick", "ticks", str(folder / "sys")]
        subprocess.run(command, env=os.environ | environ, check=True)


def ticks(sys_root: Path) -> None:
    collectors = hardware(Machine("n01", sys=sys_root))
    memory = []
    for tick in range(DAY):
        for collector in collectors:
            if tick % collector.every == 0:
                collector.read(time.time_ns())
        if tick in (600, DAY - 1):
            memory.append(cost(os.getpid()).pss)
    first, last = (each / 2**20 for each in memory)
    row("a day of ticks, memory (PSS) after ten minutes and in the end", f"{first:.1f} and {last:.1f} MiB")
    row("  a tick of all hardware collectors", f"{1e3 * time.process_time() / DAY:.2f} ms of CPU")


def main() -> None:
    watch(slow=False)
    watch(slow=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["ticks", sys_root]:
            ticks(Path(sys_root))
        case ["--day"]:
            day()
        case _:
            main()
