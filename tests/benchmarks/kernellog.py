"""What a flooded kernel log costs, at 1 million lines a minute: `python -m tests.benchmarks.kernellog`.

The lines come as from the kernel, a read a record, or as journalctl prints them; the collector reads them as it does
on a node. journalctl itself, where it is the source, is another process and takes 2 us a line more.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from diagnosd.collectors.kernellog import KernelLog
from diagnosd.collectors.machine import Machine

from . import table

SECONDS = 12
RATE = 1_000_000 / 60  # lines a second
TURN_S = 0.005  # the writer's
MIX = (  # of a node whose fabric fails: every tenth line tells something, the rest is what floods it
    *("Mooncake: rdma_write failed on qp {n} status=12 vendor_err=129 remote=10.1.{b}.7 len=65536",) * 5,
    "IPv6: ADDRCONF(NETDEV_CHANGE): cali{n:x}: link becomes ready",
    "[UFW BLOCK] IN=eth0 OUT= MAC=aa:bb:cc SRC=10.0.{b}.1 DST=10.0.0.2 LEN=60 TTL=64 ID={n} PROTO=TCP SPT=9 DPT=22",
    'audit: type=1400 audit(1700000000.{n}:9): apparmor="DENIED" operation="open" profile="x" name="/proc/{n}/mem"',
    "NVRM:     -{b}    103  GSP_RM_ALLOC          0x0000000000002080 0x0000000000000004 0x00062ed1a6b51c6f    699us",
    "mlx5_core 0000:4b:00.{c}: mlx5_cmd_out_err:838:(pid {n}): ACCESS_REG(0x805) op_mod(0x1) failed, status bad",
)


def lines(first: int, count: int) -> list[str]:
    return [MIX[n % len(MIX)].format(n=n, b=n % 256, c=n // 10 % 8) for n in range(first, first + count)]


def write(into: int, how: str) -> None:
    """At RATE, for SECONDS: what the collector is behind with holds it up, as no kernel would be."""
    began, written = time.monotonic(), 0
    while (passed := time.monotonic() - began) < SECONDS:
        count = int(passed * RATE) - written
        if how == "kmsg":
            since_start = time.monotonic_ns() // 1000
            for number, line in enumerate(lines(written, count), written):
                os.write(into, f"4,{number},{since_start},-;{line}\n".encode())
        else:
            head = f"{time.time():.6f} kernel: "
            os.write(into, "".join(f"{head}{line}\n" for line in lines(written, count)).encode())
        written += count
        time.sleep(TURN_S)
    print(written, file=sys.stderr, flush=True)


def resident() -> float:
    """MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def measure(what: str, log: KernelLog, writer: subprocess.Popen[str]) -> None:
    events, sizes, before = 0, [], time.process_time()
    while writer.poll() is None:
        time.sleep(1)
        events += len(log.read(time.time_ns()))
        sizes.append(resident())
    cost = time.process_time() - before
    log.close()
    assert writer.stderr
    count = int(writer.stderr.read())
    share = cost / count * RATE
    grown = sizes[-1] - sizes[len(sizes) // 4]
    figures = f"{cost / count * 1e6:.1f} us a line, {share:.1%} of a core at 1 M lines/min"
    table.row(what, f"{figures}; {events} events, {sizes[-1]:.0f} MB, {grown:+.1f} MB")


def hcas(sys: Path) -> Path:
    for number in range(8):
        function = sys / f"bus/pci/devices/0000:4b:00.{number}"
        (function / f"infiniband/mlx5_{number}/ports/1").mkdir(parents=True)
        (function / f"net/ib{number}").mkdir(parents=True)
    return sys


def of_kmsg(folder: Path) -> None:
    kmsg = folder / "kmsg"
    os.mkfifo(kmsg)
    into = os.open(kmsg, os.O_RDWR)
    fcntl.fcntl(into, fcntl.F_SETFL, os.O_DIRECT)  # one write is one read
    fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, 1 << 20)
    with closing(KernelLog(Machine("n01", proc=folder, sys=hcas(folder), dev=folder, live=False))) as log:
        measure(f"kernel log, /dev/kmsg, {RATE:,.0f} lines/s", log, writer("kmsg", into))
    os.close(into)


def of_journal(folder: Path) -> None:
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    into = os.open(pipe, os.O_RDWR)
    stand_in = folder / "journalctl"
    stand_in.write_text(f"#!/bin/sh\nexec cat {pipe}\n")
    stand_in.chmod(0o755)
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    (folder / "system.journal").touch()
    nowhere = folder / "nowhere"
    with closing(KernelLog(Machine("n01", proc=nowhere, sys=hcas(folder), dev=nowhere), journal=folder)) as log:
        measure(f"kernel log, journal, {RATE:,.0f} lines/s", log, writer("journal", into))
    os.close(into)


def writer(how: str, into: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.benchmarks.kernellog", how, str(into)]
    return subprocess.Popen(command, pass_fds=(into,), stderr=subprocess.PIPE, text=True)


def main() -> None:
    for each in (of_kmsg, of_journal):
        with tempfile.TemporaryDirectory() as folder:
            each(Path(folder))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        write(int(sys.argv[2]), sys.argv[1])
    else:
        main()
