"""Lines of kernel logs in, events out: each form a row; the kernel's own log, a real journal, and floods."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosd.collectors.kernellog import KernelLog
from diagnosd.collectors.kernellog.folding import FAULTS, LIMIT, QUIET_S, REPEAT_S, Fault, Folding
from diagnosd.collectors.kernellog.lines import Recogniser, Told, candidates
from diagnosd.collectors.kernellog.places import Places
from diagnosd.collectors.kernellog.sources import BACK_S, REST, Journal, Kmsg, Line
from diagnosd.collectors.machine import Machine
from diagnosd.point import Point, encode
from diagnosd.wording import SHORT
from diagnosd.xid import PARTS, SEVERITIES, XIDS, severity
from systemd.boot import booted, missing

ROOT = Path(__file__).parents[1]
CORPORA = ROOT.parent / "shared/corpora/kernel_logs"
SECOND = 1_000_000_000
NOW = 1_700_000_000 * SECOND
UUID = "GPU-509665ad-b600-ac93-3616-d754b23d636d"

GONE = "NVRM: Xid (PCI:0000:9b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
GONE_IN_WORDS = "NVRM: GPU 0000:9b:00.0: GPU has fallen off the bus."
GONE_AT_PROBE = """\
NVRM: The NVIDIA GPU 0000:b3:00.0
NVRM: (PCI ID: 10de:26b5) installed in this system has
NVRM: fallen off the bus and is not responding to commands."""

# A line, and (kind, subject, code) of what it tells of a node that has the GPU 9b:00 with a known uuid, mlx5_0 with
# the interface ib0 at 4b:00.0, and mounts of two file servers. None: nothing.
GPU, NIC, HOST = f"gpu:n01/{UUID}", "nic:n01/mlx5_0/1", "host:n01"
LINES: dict[str, tuple[str, str, int | None] | None] = {
    "NVRM: Xid (PCI:0000:9b:00): 119, pid=2024380, name=nvidia-smi, Timeout after 6s of waiting": ("xid", GPU, 119),
    "NVRM: Xid (0000:9b:00): 14, Channel 00000001": ("xid", GPU, 14),
    "NVRM: Xid (PCI:0000:9b:00): 48, pid='<unknown>', name=<unknown>, An uncorrectable": ("xid", GPU, 48),
    "NVRM: Xid (PCI:0000:9b:00): 999, pid=1, name=x, never heard of": ("xid", GPU, 999),  # A116
    "NVRM: Xid (PCI:0000:9b:00 GPU-I:05): 94, pid=7194, Contained: CE User Channel": ("xid", GPU, 94),  # A116
    "NVRM: Xid (PCI:0000:9b:00 GPU-I:01 GPU-CI:02): 13, pid=9, name=a, Graphics Exception": ("xid", GPU, 13),
    "NVRM: Xid (PCI:0001:9b:00): 31, pid=9, name=a": ("xid", "gpu:n01/PCI:0001:9b:00", 31),  # A05
    "NVRM: Xid (9b:00): 8, Channel 1": ("xid", GPU, 8),
    "NVRM: Xid error: xyz": None,
    "NVRM: Xid (invalid): some error": None,
    GONE: ("xid", GPU, 79),
    GONE_IN_WORDS: ("gpu_lost", GPU, None),
    "NVRM: The NVIDIA GPU 0000:9b:00.0 installed in this system has fallen off the bus and": ("gpu_lost", GPU, None),
    "NVRM: GPU 9b:00.0: GPU has fallen off the bus.": ("gpu_lost", GPU, None),
    "NVRM: API mismatch: the client 'python' (pid 9)": ("driver", HOST, None),
    "NVRM: GPU 0000:9b:00.0: RmInitAdapter failed! (0x62:0x40:2477)": ("driver", GPU, None),
    "NVRM: RmInitAdapter failed! (0x26:0x38:1155)": ("driver", HOST, None),
    "nvidia: probe of 0000:9b:00.0 failed with error -1": ("driver", GPU, None),
    "nvidia 0000:9b:00.0: probe with driver nvidia failed with error -1": ("driver", GPU, None),
    "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  580.65": ("config_change", HOST, None),
    "NVRM: GPU Board Serial Number: 1650124014249": None,
    "nvidia-peermem nv_get_p2p_free_callback:127 ERROR detected invalid context": ("driver", HOST, None),
    "nvidia_peermem: Unknown symbol ib_register_peer_memory_client (err 0)": ("driver", HOST, None),
    "nvidia_peermem: module uses symbols from proprietary module nvidia, inheriting taint.": None,
    "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 32 egress": ("sxid", HOST, 12028),
    "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Severity 0 Engine instance 61 Sub-engine instance 00": None,
    "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Data {0x00000061, 0x10000030, 0x00000000}": None,
    "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): garbled, Fatal": None,
    "nvidia-nvswitch3: open (major=510)": None,
    "mlx5_core 0000:4b:00.0 ib0: Link down": ("link_down", NIC, None),
    "mlx5_core 0000:4b:00.0 ib0: Link up": ("link_up", NIC, None),
    "bnxt_en 0000:01:00.0 eth0: NIC Link is Down": ("link_down", "nic:n01/eth0", None),
    "bnxt_en 0000:01:00.0 eth0: NIC Link is Up, 100000 Mbps full duplex": ("link_up", "nic:n01/eth0", None),
    "ice 0000:17:00.0 ens1: NIC Link is up 100 Gbps Full Duplex": ("link_up", "nic:n01/ens1", None),
    "e1000e: eth1 NIC Link is Down": ("link_down", "nic:n01/eth1", None),
    "tg3 0000:03:00.0 eno1: Link is down": ("link_down", "nic:n01/eno1", None),
    "mlx4_en: eth2: Link Down": ("link_down", "nic:n01/eth2", None),
    "ib0: link down": ("link_down", NIC, None),
    "veth12ab: link down": None,
    "IPv6: ADDRCONF(NETDEV_CHANGE): eth0: link becomes ready": None,
    "IPv6: ADDRCONF(NETDEV_UP): eth0: link is not ready": None,
    "ata1: SATA link down (SStatus 0 SControl 300)": None,
    "bond0: (slave ens4f0): link status definitely down, disabling slave": ("link_down", "nic:n01/ens4f0", None),  # A54
    "bond0: link status definitely down for interface eth1, disabling it": ("link_down", "nic:n01/eth1", None),
    "bond0: (slave ens4f0): link status definitely up, 100000 Mbps full duplex": ("link_up", "nic:n01/ens4f0", None),
    "bond0: now running without any active interface!": ("link_down", "nic:n01/bond0", None),
    "bond0: (slave ens4f0): link status down for interface, disabling it in 200 ms": None,
    "mlx5_core 0000:4b:00.0: Port module event: module 0, Cable unplugged": ("link_down", NIC, None),
    "mlx5_core 0000:4b:00.0: Port module event: module 0, Cable plugged": None,
    "mlx5_core 0000:4b:00.0: Port module event[error]: module 0, Cable error, Bus stuck": ("driver", NIC, None),
    "mlx5_core 0000:4b:00.0: Port module event[error]: module 0, Cable error, High Temperature": ("thermal", NIC, None),
    "mlx5_core 0000:4b:00.0: temp_warn:195:(pid 0): High temperature on sensors": ("thermal", NIC, None),
    "mlx5_core 0000:4b:00.0: poll_health:739:(pid 0): device's health compromised": ("driver", NIC, None),
    "mlx5_core 0000:4b:00.0: poll_health:726:(pid 0): Fatal error 1 detected": ("driver", NIC, None),
    "mlx5_core 0000:4b:00.0: print_health_info:424:(pid 0): synd 0x1: firmware internal error": ("driver", NIC, None),
    "mlx5_core 0000:4b:00.0: print_health_info:424:(pid 0): synd 0x0: unrecognized error": None,
    "mlx5_core 0000:4b:00.0: mlx5_cmd_out_err:838:(pid 9): ACCESS_REG(0x805) op_mod(0x1) failed, status bad": (
        "driver", NIC, None,
    ),
    "mlx5_core 0000:4b:00.0: firmware version: 28.39.1002": None,
    "mlx5_core 0000:4b:00.0 ib0: TX timeout detected": ("driver", NIC, None),  # A62
    "mlx5_core 0000:4b:00.0 ib0: TX timeout on queue: 3, SQ: 0x8a, CQ: 0x35": ("driver", NIC, None),
    "NETDEV WATCHDOG: ib0 (mlx5_core): transmit queue 5 timed out": ("driver", NIC, None),
    "mlx5_core 0000:4b:00.0 ib0: NETDEV WATCHDOG: CPU: 59: transmit queue 0 timed out 10720 ms": ("driver", NIC, None),
    "nvidia 0000:9b:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)": ("aer", GPU, None),
    "nvidia 0000:9b:00.0: AER: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction": ("aer", GPU, None),
    "mlx5_core 0000:4b:00.0: PCIe Bus Error: severity=Correctable, type=Data Link Layer": ("aer", NIC, None),
    "pcieport 0000:00:1c.0: PCIe Bus Error: severity=Corrected, type=Data Link Layer, id=00e0": ("aer", HOST, None),
    "pcieport 0000:00:1c.0: AER: Corrected error received: 0000:00:1c.0": None,
    "pcieport 0000:00:1c.0:   device [8086:9d13] error status/mask=00000001/00002000": None,
    "nvidia 0000:9b:00.0: aer_status: 0x00000001, aer_mask: 0x00002000": ("aer", GPU, None),
    "pcieport 0000:00:1b.0: DPC: containment event, status:0x1f01 source:0x0000": ("aer", HOST, None),
    "pcieport 0000:00:1b.0: AER: device recovery failed": ("aer", HOST, None),
    "pcieport 0000:17:01.0: pciehp: Slot(3): Link Down": ("aer", HOST, None),
    "Out of memory: Killed process 12 (python3) total-vm:9kB, anon-rss:2097152kB, file-rss:0kB": ("oom", HOST, None),
    "Memory cgroup out of memory: Killed process 12 (pt_data) total-vm:9kB": ("oom", HOST, None),
    "Killed process 12, (python) total-vm:9kB": ("oom", HOST, None),
    "python3 invoked oom-killer: gfp_mask=0xcc0, order=0": None,
    "oom_reaper: reaped process 12 (python3), now anon-rss:0kB": None,
    "CPU17: Package temperature above threshold, cpu clock throttled (total events = 1)": ("thermal", HOST, None),
    "mce: CPU3: Core temperature is above threshold, cpu clock is throttled": ("thermal", HOST, None),
    "CPU17: Package temperature/speed normal": None,
    "thermal thermal_zone0: critical temperature reached (100 C), shutting down": ("thermal", HOST, None),
    "clocksource: timekeeping watchdog on CPU3: Marking clocksource 'tsc' as unstable": ("clock", HOST, None),
    "clocksource: Long readout interval, skipping watchdog check": None,
    "watchdog: BUG: soft lockup - CPU#3 stuck for 23s! [kworker/3:1:99]": ("driver", HOST, None),  # A62
    "INFO: task python:1234 blocked for more than 122 seconds.": ("driver", HOST, None),
    "nvme nvme0: I/O 12 QID 3 timeout, aborting": ("driver", HOST, None),
    "nvme nvme0: I/O tag 12 (100c) opcode 0x2 (I/O Cmd) QID 3 timeout, aborting": ("driver", HOST, None),
    "nvme nvme0: controller is down; will reset: CSTS=0xffffffff": ("driver", HOST, None),
    "nfs: server 10.0.0.5 not responding, still trying": ("driver", "storage:/data", None),
    "nfs: server 10.0.0.6 not responding, still trying": ("driver", HOST, None),
    "nfs: server 10.0.0.5 OK": None,
    "Lustre: lfs-OST0001-osc-ff: Connection to lfs-OST0001 (at 10.0.0.2@o2ib) was lost; in progress operations": (
        "driver", "storage:/lustre", None,
    ),
    "ib0: lost carrier": ("link_down", NIC, None),  # systemd-networkd
    "ib0: Gained carrier": ("link_up", NIC, None),
    "Reloading.": ("config_change", HOST, None),  # A30: systemd
    "Reload requested from client PID 77 ('systemctl')...": ("config_change", HOST, None),
    "Reloading nginx.service - A web server...": None,
    "pt_main_thread[253]: segfault at 7f ip 00007 sp 00007 error 4 in libnccl.so.2[7f+d3]": ("nccl_warn", HOST, None),
    "python[253]: segfault at 7f ip 00007 sp 00007 error 4 in libc.so.6[7f+d3]": None,
}  # fmt: skip

MOUNTINFO = """\
39 1 0:59 / /a\\012b rw - nfs4 10.0.0.5:/other rw
40 1 0:60 / /data rw - nfs4 10.0.0.5:/export rw
41 1 0:61 / /lustre rw - lustre 10.0.0.1@o2ib:/lfs rw
"""


def tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def node(tmp_path: Path) -> Machine:
    """Two GPUs, of which one has not started, and an HCA. No kernel log."""
    pci = tmp_path / "sys/bus/pci/devices/0000:4b:00.0"
    (pci / "infiniband/mlx5_0/ports/1").mkdir(parents=True)
    (pci / "net/ib0").mkdir(parents=True)
    (tmp_path / "sys/class/net/ib0").mkdir(parents=True)
    (tmp_path / "sys/class/net/ib0/device").symlink_to(pci)
    (tmp_path / "dev").mkdir()
    gpus = "proc/driver/nvidia/gpus"
    tree(
        tmp_path,
        {
            f"{gpus}/0000:9b:00.0/information": f"Model: \t\t NVIDIA H100\nGPU UUID: \t {UUID}\nDevice Minor: \t 4\n",
            f"{gpus}/0000:b3:00.0/information": "GPU UUID: \t GPU-????????-????-????-????-????????????\n",
            "proc/self/mountinfo": MOUNTINFO,
        },
    )
    return Machine("n01", tmp_path / "proc", tmp_path / "sys", tmp_path / "dev", live=False)


class Log(NamedTuple):
    """The log of a node without a source: lines are given by hand, with their times in seconds."""

    collector: KernelLog

    def say(self, seconds: float, text: str) -> None:
        when = NOW + round(seconds * SECOND)
        for line in text.split("\n"):
            self.collector._tell(line, when, when)

    def events(self, seconds: float) -> list[tuple[str | None, int | None, float | None]]:
        """Kind, code and value of what is told at this time."""
        return [
            (each.series.tag("kind"), each.fields.get("code"), each.fields.get("value"))
            for each in self.points(seconds)
        ]

    def points(self, seconds: float) -> list[Point]:
        return self.collector.read(NOW + round(seconds * SECOND))


@pytest.fixture
def log(node: Machine) -> Log:
    return Log(KernelLog(node))


@pytest.mark.parametrize(("line", "expected"), LINES.items(), ids=[line[:60] for line in LINES])
def test_a_line_is_told_with_kind_subject_and_code(
    log: Log, line: str, expected: tuple[str, str, int | None] | None
) -> None:
    log.say(0, line)
    told = [(p.series.tag("kind"), p.series.tag("subject"), p.fields.get("code")) for p in log.points(1)]
    assert told == ([expected] if expected else [])


@pytest.mark.parametrize("line", [line for line, told in LINES.items() if told])
def test_a_line_that_is_told_is_found_in_a_chunk_before_it_is_decoded(line: str) -> None:
    chunk = f"6,1,2,-;nothing\n3,2,3,-;{line}\n6,3,4,-;nothing\n".encode()
    assert candidates(chunk) == [f"3,2,3,-;{line}".encode()]


def test_an_event_says_what_a_number_means_and_keeps_the_drivers_words(log: Log) -> None:
    log.say(0, GONE)
    log.say(1, "NVRM: Xid (PCI:0000:9b:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (Reset)")
    log.say(2, "NVRM: Xid (PCI:0000:9b:00): 999, pid=9, name=python, new")
    gone, following, unknown = (str(each.fields["text"]) for each in log.points(2))
    assert gone == "Xid 79 on GPU 0000:9b:00: fallen off the bus (fatal): GPU has fallen off the bus."
    assert "has changed (follow-on): GPU recovery action changed from 0x0" in following
    assert unknown == "Xid 999 on GPU 0000:9b:00: pid=9, name=python, new"


def test_a_gpu_that_fell_off_the_bus_is_told_from_a_message_over_three_lines_without_an_xid(log: Log) -> None:  # A03
    log.say(0, GONE_AT_PROBE)
    (event,) = log.points(1)
    assert (event.series.tag("kind"), event.series.tag("subject")) == ("gpu_lost", "gpu:n01/PCI:0000:b3:00")
    assert event.fields == {"text": "GPU 0000:b3:00: fallen off the bus"}


def test_a_message_that_was_not_finished_gives_no_gpu_to_one_much_later(log: Log) -> None:
    log.say(0, "NVRM: The NVIDIA GPU 0000:b3:00.0\n" + "NVRM: something else\n" * 4 + GONE_AT_PROBE.split("\n")[2])
    (event,) = log.points(1)
    assert event.series.tag("subject") == "host:n01"


@pytest.mark.parametrize("lines", [(GONE, GONE_IN_WORDS), (GONE_IN_WORDS, GONE)], ids=["Xid first", "words first"])
def test_xid_79_and_the_same_in_words_are_one_fault_in_either_order(log: Log, lines: tuple[str, str]) -> None:  # A115
    log.say(0, lines[0])
    log.say(0.1, lines[1])
    assert len(log.events(1)) == 1
    assert [value for _, _, value in log.events(REPEAT_S)] == [1.0]


def test_the_ends_of_200_jobs_are_one_event_and_a_count_and_marked_as_following(log: Log) -> None:  # A113
    for number in range(200):
        log.say(number / 10, f"NVRM: Xid (PCI:0000:9b:00): 45, pid={number}, name=python, Ch 0000000{number % 10}")
    assert log.events(20) == [("xid", 45, None)]
    (rest,) = log.points(REPEAT_S)
    assert rest.fields["value"] == 199.0
    assert str(rest.fields["text"]).startswith("199 times more: Xid 45 on GPU 0000:9b:00: channels were removed")
    assert severity(45, "") == "follow_on"


def test_the_unit_that_an_exception_names_stays_in_the_text(log: Log) -> None:  # A114
    log.say(0, "NVRM: Xid (PCI:0000:9b:00): 13, pid=7, name=python, Graphics SM Warp Exception on (GPC 1, TPC 3, SM 0)")
    (event,) = log.points(1)
    assert "GPC 1, TPC 3" in str(event.fields["text"])
    assert severity(13, "") == severity(31, "") == "application"


def test_of_64_gpus_that_follow_one_the_first_is_told_first(node: Machine) -> None:  # A41
    log = Log(KernelLog(node))
    log.say(0, "NVRM: Xid (PCI:0000:01:00): 136, NVLink: link training failed for links 0x1")
    for number in range(2, 40):
        log.say(number / 1000, f"NVRM: Xid (PCI:0000:{number:02x}:00): 137, NVLink: fault")
    codes = [each.fields["code"] for each in log.points(1)]
    assert codes == [136, *[137] * 38]
    assert (severity(136, ""), severity(137, "")) == ("fatal", "follow_on")


def test_bridges_that_have_no_subject_of_their_own_are_told_apart(log: Log) -> None:
    for number in (1, 2, 1):
        log.say(0, f"pcieport 0000:00:0{number}.0: PCIe Bus Error: severity=Corrected, type=Data Link Layer")
    assert log.events(1) == [("aer", None, None)] * 2


def test_a_flapping_link_is_counted(log: Log) -> None:  # A60
    for number in range(6):
        log.say(number / 10, "ib0: lost carrier")
        log.say(number / 10 + 0.05, "mlx5_core 0000:4b:00.0 ib0: Link up")
    assert log.events(1) == [("link_down", None, None), ("link_up", None, None)]
    assert log.events(REPEAT_S + 1) == [("link_down", None, 5.0), ("link_up", None, 5.0)]


def test_what_goes_on_is_told_every_minute_and_after_a_silence_it_is_new(log: Log) -> None:
    told = []
    for second in range(0, 180, 10):
        log.say(second, "mlx5_core 0000:4b:00.0 ib0: TX timeout detected")
        told += [(second, value) for _, _, value in log.events(second)]
    assert told == [(0, None), (60, 6.0), (120, 6.0)]
    assert log.events(180) == [("driver", None, 5.0)]
    log.say(170 + QUIET_S, "mlx5_core 0000:4b:00.0 ib0: TX timeout detected")
    assert log.events(180 + QUIET_S) == [("driver", None, None)]


def test_the_number_of_lines_is_the_events_and_their_values(log: Log) -> None:
    total = 0.0
    for second in range(600):
        for number in range(second % 4):
            log.say(second + number / 10, f"mlx5_core 0000:4b:00.{second % 2}: mlx5: op_mod(0x1) failed, status bad")
        total += sum(value or 1.0 for _, _, value in log.events(second))
    total += sum(value or 1.0 for _, _, value in log.events(700))
    assert total == sum(second % 4 for second in range(600))


def test_a_killed_process_is_told_once_with_its_cgroup_and_each_process(log: Log) -> None:
    log.say(
        0,
        "python3 invoked oom-killer: gfp_mask=0xcc0, order=0\n"
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=x,mems_allowed=0,oom_memcg=/slurm/job_55,"
        "task_memcg=/slurm/job_55/step_0,task=python3,pid=1234,uid=1000\n"
        "Memory cgroup out of memory: Killed process 1234 (python3) total-vm:99kB, anon-rss:3145728kB, file-rss:0kB\n"
        "oom_reaper: reaped process 1234 (python3), now anon-rss:0kB\n"
        "Out of memory: Killed process 1235 (pt_data_worker) total-vm:9kB",
    )
    assert [each.fields["text"] for each in log.points(1)] == [
        "out of memory in cgroup /slurm/job_55/step_0: killed process 1234 (python3), 3.0 GiB resident",
        "out of memory: killed process 1235 (pt_data_worker)",
    ]


def test_one_kind_in_floods_is_limited_and_counted_and_hides_no_other(log: Log) -> None:  # A116
    for pid in range(LIMIT + 40):
        log.say(0, f"Out of memory: Killed process {pid} (python) total-vm:9kB")
    log.say(1, GONE)
    events = log.events(1)
    assert [kind for kind, _, _ in events] == ["oom"] * LIMIT + ["xid"]
    assert log.events(70) == [("telemetry_gap", None, 40.0)]
    assert log.collector.dropped == 40


def test_faults_without_number_are_remembered_in_bounded_memory() -> None:
    folding = Folding("n01")
    for number in range(3 * FAULTS):
        fault = Fault("oom", "host:n01", "x", None, f"oom {number}")
        folding.add(fault, NOW + number, NOW + number)
    assert len(folding._folds) == FAULTS
    assert len(folding._taken) <= FAULTS


def test_two_events_of_one_subject_at_one_time_stay_two(log: Log) -> None:
    log.say(0, "NVRM: Xid (PCI:0000:9b:00): 48, DBE\nNVRM: Xid (PCI:0000:9b:00): 94, Contained")
    first, second = log.points(1)
    assert (first.fields["code"], second.fields["code"]) == (48, 94)
    assert second.time - first.time == 1


def test_a_clock_that_is_set_back_delays_no_event_for_long(log: Log) -> None:  # A106
    log.say(0, GONE)
    log.say(1, GONE)
    log.points(1)
    log.collector.read(NOW - 3600 * SECOND)
    log.say(-3600, GONE)
    assert [value for _, _, value in log.events(-3500)] == [1.0]


def test_the_text_of_an_event_is_short_and_printable(log: Log) -> None:
    log.say(0, f"NVRM: Xid (PCI:0000:9b:00): 31, pid=1, name=\x1b[31mred\x00, {'x' * 5000}")
    (event,) = log.points(1)
    text = str(event.fields["text"])
    assert len(text) == SHORT
    assert text.isprintable()
    assert "\\x1b[31mred\\x00" in text


def test_a_gpu_is_known_by_the_uuid_that_the_log_itself_gives(log: Log) -> None:
    log.say(0, "NVRM: GPU at PCI:0000:3b:00: GPU-11111111-2222-3333-4444-555555555555")
    log.say(0, "NVRM: Xid (PCI:0000:3b:00): 31, pid=1, name=x")
    (event,) = log.points(1)
    assert event.series.tag("subject") == "gpu:n01/GPU-11111111-2222-3333-4444-555555555555"


def test_a_driver_that_does_not_answer_holds_up_no_event(node: Machine) -> None:
    stuck = node.proc / "driver/nvidia/gpus/0000:9b:00.0/information"
    stuck.unlink()
    os.mkfifo(stuck)  # opening it waits for a writer, as a read waits for the driver's lock
    log = Log(KernelLog(node))
    began = time.monotonic()
    for second in range(5):
        log.say(second, GONE)
    assert time.monotonic() - began < 2
    (event,) = log.points(5)
    assert event.series.tag("subject") == "gpu:n01/PCI:0000:9b:00"
    with stuck.open("w"):  # lets the thread go
        pass


def test_nothing_of_an_excluded_device_is_opened_to_name_it(node: Machine) -> None:  # A46
    os.mkfifo(node.proc / "driver/nvidia/gpus/0000:9b:00.0/x")
    for patterns in (("mlx5_*",), ("0000:4b:00.0",), ("ib0",)):
        places = Places(node._replace(exclude=patterns))
        assert places.of(Told("link_down", "", None, "", netdev="ib0", pci="0000:4b:00.0")) == "nic:n01/ib0"
    places = Places(node._replace(exclude=("0000:9b:00.0",)))
    assert places.of(Told("xid", "", 31, "", gpu="0000:9b:00")) == "gpu:n01/PCI:0000:9b:00"


@pytest.mark.parametrize(
    "line",
    [
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=user.slice,mems_allowed=0,oom_memcg=/user.slice/{}",
        "Memory cgroup stats for /user.slice/user-1000.slice/user@1000.service/{}:",
        "cgroup: fork rejected by pids controller in /user.slice/user-1000.slice/{}",
        "overlayfs: failed to resolve '/home/{}': -2",
        'overlayfs: unrecognized mount option "{}" or missing value',
    ],
)
@pytest.mark.parametrize("words", [GONE, GONE_IN_WORDS, "mlx5_core 0000:4b:00.0 ib0: Link down", "ib0: Lost carrier"])
def test_words_that_a_user_can_have_the_kernel_write_tell_nothing(line: str, words: str) -> None:
    """A cgroup's name, or an option of a mount in a namespace of one's own."""
    assert Recogniser().told(line.format(f"a {words}")) is None


def test_the_victim_of_a_cgroup_is_told_with_it() -> None:
    lines = Recogniser()
    lines.told("oom-kill:constraint=CONSTRAINT_MEMCG,oom_memcg=/job,task_memcg=/job/7,task=python,pid=12,uid=0")
    told = lines.told("Memory cgroup out of memory: Killed process 12 (python) total-vm:9kB, anon-rss:1048576kB")
    assert told
    assert told.text == "out of memory in cgroup /job/7: killed process 12 (python), 1.0 GiB resident"


PLACE = """
import sys
from pathlib import Path
from diagnosd.collectors.kernellog.lines import Told
from diagnosd.collectors.kernellog.places import Places
from diagnosd.collectors.machine import Machine
places = Places(Machine("n01", sys=Path(sys.argv[1]), exclude=("mlx5_0",)))
lists = ("open", "os.listdir", "os.scandir")
sys.addaudithook(lambda event, args: print(args[0], file=sys.stderr) if event in lists else None)
print(places.of(Told("link_down", "", None, "", netdev="ib0", pci="0000:4b:00.0")))
"""


def test_an_excluded_rdma_device_is_not_listed_to_name_its_port(node: Machine) -> None:  # A46
    ran = subprocess.run([sys.executable, "-c", PLACE, node.sys], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ran.stdout == "nic:n01/ib0\n"
    assert "4b:00.0/infiniband" in ran.stderr
    assert "mlx5_0" not in ran.stderr


def test_every_xid_of_the_table_has_a_meaning_a_severity_and_a_part() -> None:
    assert {row.severity for row in XIDS.values()} == set(SEVERITIES)
    assert {row.part for row in XIDS.values()} == set(PARTS)
    assert all(row.code == code and row.meaning and "  " not in row.meaning for code, row in XIDS.items())
    assert severity(999, "") is None


def test_the_messages_of_nvlink_5_say_themselves_whether_they_are_fatal() -> None:
    assert severity(149, "NETIR_LINK_EVT  Fatal   XC0 i0 Link 01") == "fatal"
    assert severity(149, "NETIR_LINK_EVT  Nonfatal XC0 i0 Link 01") == "info"


# Real logs. Each: how its lines begin, how a time is read, and (kind, code) of each line that tells something.
PEERMEM, NETWORKD = ("driver", None), ("link_down", None)
CORPUS: dict[str, tuple[str, list[tuple[str, int | None]]]] = {
    "1dev_6flap_syslog": (r"\w{3} +\d+ [\d:]+ \S+ [\w-]+\[\d+\]: ", [NETWORKD] * 6 + [("link_up", None)] * 6),
    "dmesg-time-format-iso.log": (
        r"\S+ ",
        [PEERMEM] * 10 + [("xid", 48), ("xid", 63)] + [("xid", 94)] * 9 + [PEERMEM] * 20,
    ),
    "dmesg-with-xid-119.log": (r"\[.{24}\] ", [("xid", 119)] * 5),
    "dmesg.decode.iso.log": (r"kern +:\w+ +: \S+ ", [("nccl_warn", None)] * 2),
    "fabricmanager.log": (r"(?:\[.*?\] )*", [("sxid", 12028)]),
    "kmsg.1.log": (r"[^;]*;", []),
}


def corpus(name: str) -> list[str]:
    file = CORPORA / name
    if not file.exists():
        pytest.skip(f"{CORPORA} is not here")
    return file.read_text().splitlines()


@pytest.mark.parametrize("name", CORPUS)
def test_a_real_log_tells_exactly_this(name: str) -> None:
    head, expected = CORPUS[name]
    recogniser = Recogniser()
    told = [recogniser.told(re.sub(f"^{head}", "", line)) for line in corpus(name)]
    assert [(each.kind, each.code) for each in told if each] == expected


def test_a_real_storm_of_one_gpu_is_an_event_and_counts_with_its_uuid(log: Log) -> None:
    began, said = datetime.fromisoformat("2025-02-23T16:24:18+00:00"), dict[int, list[str]]()
    for line in corpus("dmesg-with-xid-119.log"):
        stamp, _, text = line[1:].partition("] ")
        when = datetime.strptime(f"{stamp} +0000", "%a %b %d %H:%M:%S %Y %z") - began
        said.setdefault(int(when.total_seconds()), []).append(text)
    read = []
    for second in range(600):
        log.say(second, "\n".join(said.get(second, [])))
        read += log.points(second)
    assert {(each.series.tag("subject"), each.fields["code"]) for each in read} == {(GPU, 119)}
    assert [each.fields.get("value") for each in read] == [None, 2.0, 1.0, 1.0]
    assert [(each.time - NOW) // SECOND for each in read] == [0, 12, 174, 355]
    assert str(read[0].fields["text"]).startswith("Xid 119 on GPU 0000:9b:00: the GPU's system processor does not")


def test_a_memory_error_and_the_programs_that_it_hit_keep_their_order(log: Log) -> None:
    for line in corpus("dmesg-time-format-iso.log"):
        stamp, _, text = line.partition(" ")
        seconds = (datetime.fromisoformat(stamp.replace(",", ".")).timestamp()) - 1731672000
        log.say(seconds, text)
    codes = [(kind, code) for kind, code, value in log.events(200) if value is None]
    assert codes == [PEERMEM, ("xid", 48), ("xid", 63), ("xid", 94), PEERMEM]


class Pipe:
    """Stands in for /dev/kmsg: a pipe of packets, one read one record, whose writer we are."""

    def __init__(self, dev: Path) -> None:
        os.mkfifo(dev / "kmsg")
        self.pipe = os.open(dev / "kmsg", os.O_RDWR)
        fcntl.fcntl(self.pipe, fcntl.F_SETFL, os.O_DIRECT)
        self.number = 0

    def say(self, text: str, ago: float = 0.0) -> None:
        since_start = time.monotonic_ns() // 1000 - round(ago * 1e6)
        os.write(
            self.pipe, f"3,{self.number},{since_start},-;{text}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:9b:00.0\n".encode()
        )
        self.number += 1

    def close(self) -> None:
        os.close(self.pipe)


def eventually(ready: Callable[[], list[Point]], count: int = 1, patience: float = 5.0) -> list[Point]:
    points: list[Point] = []
    deadline = time.monotonic() + patience
    while len(points) < count and time.monotonic() < deadline:
        points += ready()
        time.sleep(0.01)
    return points


@contextmanager
def followed(machine: Machine, journal: Path | None = None) -> Iterator[KernelLog]:
    with closing(KernelLog(machine, journal)) as log:
        yield log


def test_a_record_is_told_at_the_time_when_it_was_written(node: Machine) -> None:
    with closing(Pipe(node.dev)) as kernel, followed(node) as log:
        kernel.say(GONE)
        before = time.time_ns()
        (event,) = eventually(lambda: log.read(time.time_ns()))
        assert log.missing is None
        assert abs(event.time - before) < SECOND
        assert event.series.tag("subject") == GPU
        assert (log.errors, log.dropped) == (0, 0)


def test_a_message_of_several_lines_in_one_record_is_taken_apart(node: Machine) -> None:
    with closing(Pipe(node.dev)) as kernel, followed(node) as log:
        kernel.say(GONE_AT_PROBE.replace("\n", "\\x0a"))
        (event,) = eventually(lambda: log.read(time.time_ns()))
        assert event.series.tag("subject") == "gpu:n01/PCI:0000:b3:00"


def test_what_was_said_while_nobody_listened_is_told_and_history_is_not(node: Machine) -> None:  # A59, A50
    with closing(Pipe(node.dev)) as kernel:
        kernel.say("NVRM: Xid (PCI:0000:9b:00): 31, pid=1, name=old", ago=BACK_S + 1)
        kernel.say("NVRM: Xid (PCI:0000:9b:00): 13, pid=1, name=new", ago=BACK_S / 2)
        with followed(node) as log:
            (event,) = eventually(lambda: log.read(time.time_ns()))
            assert event.fields["code"] == 13
            assert time.time_ns() - event.time == pytest.approx(BACK_S / 2 * SECOND, abs=5 * SECOND)
            assert log.read(time.time_ns()) == []


def test_a_kernels_clock_that_has_drifted_is_corrected_by_a_line_that_was_waited_for(node: Machine) -> None:  # A106
    with closing(Pipe(node.dev)) as kernel, followed(node) as log:
        for ahead in (-100.0, 100.0):
            time.sleep(0.2)  # until it waits
            kernel.say(f"Out of memory: Killed process {kernel.number} (python)", ago=ahead)
            (event,) = eventually(lambda: log.read(time.time_ns()))
            assert abs(time.time_ns() - event.time) < SECOND


def test_a_line_from_the_future_is_told_now(node: Machine) -> None:  # A106
    with closing(Pipe(node.dev)) as kernel:
        kernel.say(GONE, ago=-1e8)
        with followed(node) as log:
            (event,) = eventually(lambda: log.read(time.time_ns()))
            assert event.time <= time.time_ns()


# The kernel answers EPIPE to who was too slow, and nothing else does: here it is the record "EPIPE" that does.
OVERWRITE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <string.h>
#include <unistd.h>
ssize_t read(int fd, void *into, size_t size) {
    ssize_t (*real)(int, void *, size_t) = dlsym(RTLD_NEXT, "read");
    ssize_t got = real(fd, into, size);
    if (got != 5 || memcmp(into, "EPIPE", 5)) return got;
    errno = EPIPE;
    return -1;
}
"""
READ_OVERWRITTEN = """
import sys
from pathlib import Path
from diagnosd.collectors.kernellog.sources import Kmsg
source = Kmsg(Path(sys.argv[1]))
print(len(source.chunk(waited=False).splitlines()) // 3, source.lost)
"""


def test_lines_that_were_overwritten_are_counted(tmp_path: Path) -> None:
    library = tmp_path / "overwrite.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, "-xc", "-"], input=OVERWRITE, text=True, check=True)
    with closing(Pipe(tmp_path)) as kernel:
        for number, ago in ((2, BACK_S + 2), (5, BACK_S + 1), (10, 0), (25, 0), (26, 0), (31, 0)):
            if number not in (2, 26):
                os.write(kernel.pipe, b"EPIPE")
            kernel.number = number
            kernel.say(str(number), ago)
        done = subprocess.run(
            [sys.executable, "-c", READ_OVERWRITTEN, tmp_path / "kmsg"],
            capture_output=True, text=True, check=True, cwd=ROOT, env={"LD_PRELOAD": str(library)},
        )  # fmt: skip
    assert done.stdout == "6 22\n"  # 6 to 9, 11 to 24 and 27 to 30; what lacks before is history


def test_lines_that_were_lost_are_told_at_most_once_a_minute(node: Machine) -> None:
    with closing(Pipe(node.dev)), followed(node) as log:
        told = []
        for second, lost in enumerate(range(0, 900, 10)):
            log._source.lost = lost
            told += [(second, each.fields["value"]) for each in log.read(NOW + second * SECOND)]
    assert told == [(1, 10.0), (61, 600.0)]


def test_without_any_log_one_calm_sentence_says_what_would_help(tmp_path: Path) -> None:
    log = KernelLog(Machine("n01", dev=tmp_path / "dev"), journal=tmp_path)
    refused = f"the kernel log is not read ({tmp_path}/dev/kmsg: No such file or directory"
    assert log.missing == f"{refused}; there is no journal that this user may read: group systemd-journal may)"
    assert log.read(NOW) == []
    assert (log.errors, log.dropped) == (0, 0)
    log.close()
    assert KernelLog(Machine("n01", dev=tmp_path / "dev", live=False)).missing == f"{refused})"


def test_it_ends_within_a_second_and_leaves_nothing_open(node: Machine) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with closing(Pipe(node.dev)) as kernel, followed(node) as log:
        kernel.say(GONE)
        log.close()
        assert not log._thread.is_alive()
        log.close()
        assert [each.fields["code"] for each in log.read(time.time_ns())] == [79]
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_kernels_own_log_is_read() -> None:
    """Nothing that would be an event: other agents on this machine read the same log."""
    file, text = Path("/dev/kmsg"), f"diagnosd's tests: tést \\ {os.getpid()}"
    if not os.access(file, os.W_OK | os.R_OK):
        pytest.skip(f"{file} may not be read and written by this user")
    with closing(Kmsg(file)) as source:
        lines = list[Line]()
        with file.open("wb", buffering=0) as kernel:
            kernel.write(f"<6>{text}\n".encode())
        deadline = time.monotonic() + 5
        while not any(text in line.texts for line in lines) and time.monotonic() < deadline:
            lines = source.lines(source.chunk(waited=False).split(b"\n"))
    (time_ns,) = (line.time for line in lines if text in line.texts)
    assert abs(time.time_ns() - time_ns) < 60 * SECOND  # the kernel's clock drifts
    assert (source.errors, source.lost) == (0, 0)


READ_IN_A_NODE = """
import sys, time
from diagnosd.collectors.kernellog import KernelLog
from diagnosd.collectors.machine import Machine
from diagnosd.point import encode
log = KernelLog(Machine("n1"))
print(log.missing, flush=True)
end = time.monotonic() + 10
while not log.missing and time.monotonic() < end:
    points = log.read(time.time_ns())
    print(encode(points).decode(), end="", flush=True)
    if any("end of test" in str(each.fields["text"]) for each in points):
        break
    time.sleep(0.05)
log.close()
"""


@pytest.mark.skipif(missing() is not None, reason=missing() or "")
def test_a_real_journal_is_read_in_its_group_and_without_it_that_is_said(tmp_path: Path) -> None:
    with booted(tmp_path) as node:
        (node.root / "dev/kmsg").chmod(0o600)
        nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--inh-caps=-all", "--bounding-set=-all")
        python = ("env", f"PYTHONPATH={ROOT}", sys.executable, "-c", READ_IN_A_NODE)
        assert "group systemd-journal may" in node.run(*nobody, "--clear-groups", *python)

        node.kernel.say(GONE_AT_PROBE.replace("\n", "\\x0a"))
        for _ in range(3):
            node.kernel.say("mlx5_core 0000:4b:00.0 ib7: Link down")
        node.run("systemctl", "daemon-reload")
        node.run("systemd-cat", "echo", "NVRM: Xid (PCI:0000:66:00): 31, pid=1, name=forged")
        group = node.run("stat", "--format=%g", "/run/log/journal").strip()
        command = node.within(*nobody, f"--groups={group}", *python)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdout
            assert reader.stdout.readline() == "None\n"
            node.kernel.say("NVRM: Xid (PCI:0000:9b:00): 94, pid=1, name=python, end of test")
            lines = reader.stdout.read().splitlines()
        assert "journalctl" not in node.run("ps", "-eo", "comm")
    events = {(" ".join(line.split(" ")[0].split(",")[2:])) for line in lines}
    assert events == {
        "kind=config_change subject=host:n1",
        "kind=gpu_lost subject=gpu:n1/PCI:0000:b3:00",
        "kind=link_down subject=nic:n1/ib7",
        "kind=xid subject=gpu:n1/PCI:0000:9b:00",
    }


@pytest.fixture
def journalctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script that stands in for journalctl, to be filled; what it was called with lies in `calls`."""
    script = tmp_path / "bin/journalctl"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    return script


def entry(seconds: float, text: str, who: str = "kernel") -> str:
    return f"{seconds:.6f} {who}: {text}\n"


def drained(source: Journal, patience: float = 5.0) -> list[str]:
    deadline, texts = time.monotonic() + patience, list[str]()
    while source.fd is not None and time.monotonic() < deadline:
        texts += [text for line in source.lines(source.chunk(waited=False).splitlines()) for text in line.texts]
        time.sleep(0.01)
    return texts


def test_a_journalctl_that_ends_is_started_again_later_from_where_it_was(tmp_path: Path, journalctl: Path) -> None:
    now = time.time()
    lines = tmp_path / "lines"
    lines.write_text(entry(now, "NVRM: Xid (PCI:0000:9b:00): 31, one") + entry(now + 1, "two", "systemd-networkd[9]"))
    journalctl.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\ncat {lines} && rm {lines}\n')
    with closing(Journal(tmp_path)) as source:
        assert drained(source) == ["NVRM: Xid (PCI:0000:9b:00): 31, one", "two"]
        assert 0 < source.pause() <= 2
        assert source.errors == 1
        source._again = 0.0
        assert drained(source) == []
        assert 1 < source.pause() <= 2  # longer and longer
    first, second = [re.findall(r"--since=@(\S+)", call)[0] for call in (tmp_path / "calls").read_text().splitlines()]
    assert float(first) == pytest.approx(now - BACK_S, abs=5)
    assert float(second) == pytest.approx(now + 1, abs=1e-5)
    assert float(second) > now + 1


def test_a_line_without_end_is_given_up(tmp_path: Path, journalctl: Path) -> None:
    journalctl.write_text(f"#!/bin/sh\nhead -c {20 * REST} /dev/zero\n")
    with closing(Journal(tmp_path)) as source:
        assert drained(source) == []
        assert source._rest == b""


JOURNAL = """
import time
from pathlib import Path
from diagnosd.collectors.kernellog.sources import Journal
journal = Journal(Path("/"))
while not journal.chunk(waited=False):
    time.sleep(0.01)
print("up", flush=True)
time.sleep(60)
"""


def test_journalctl_ends_with_us_however_we_end(tmp_path: Path, journalctl: Path) -> None:
    """The real one ends when its pipe does; here it is shown that the pipe is ours alone."""
    journalctl.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nwhile echo x; do sleep 0.05; done\n")
    with subprocess.Popen([sys.executable, "-c", JOURNAL], stdout=subprocess.PIPE, cwd=ROOT) as us:
        assert us.stdout
        assert us.stdout.readline() == b"up\n"
        child = int((tmp_path / "pid").read_text())
        us.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{child}").exists()


_PIECES = st.sampled_from(
    [*LINES, GONE_AT_PROBE, "6,1,2,-;", "1700000000.123456 kernel: ", "\n", " ", "\\x0a", "\x00", "\ud800"]
)


@given(st.lists(st.one_of(_PIECES, st.text(max_size=40)), max_size=12), st.integers(0, 300))
def test_no_text_is_too_odd_for_the_recogniser(pieces: list[str], cut: int) -> None:
    text = "".join(pieces)
    recogniser = Recogniser()
    for line in [*text.split("\n"), text[cut:]]:
        told = recogniser.told(line)
        if told:
            assert len(told.text) <= SHORT
            assert told.text.isprintable()


@given(
    st.lists(st.one_of(st.binary(max_size=60), _PIECES.map(lambda text: text.encode(errors="replace"))), max_size=12)
)
def test_no_bytes_are_too_odd_for_a_source(pieces: list[bytes]) -> None:
    chunk = b"".join(pieces)
    places = Places(Machine("n01", Path("/nowhere"), Path("/nowhere"), Path("/nowhere"), live=False))
    kmsg, journal = Kmsg.__new__(Kmsg), Journal.__new__(Journal)
    kmsg._drift, kmsg._since, journal._time, journal._since = 0, 0, 0, 0.0
    for source in (kmsg, journal):
        recogniser, folding = Recogniser(), Folding("n01")
        for line in source.lines([*candidates(chunk), *chunk.split(b"\n")]):
            assert line.time <= time.time_ns()
            for told in filter(None, map(recogniser.told, line.texts)):
                folding.add(Fault(told.kind, places.of(told), told.text, told.code, told.fault), line.time, NOW)
        encode(folding.due(NOW))
