"""Captured /proc and /sys trees in, points out: values, units, and every way in which a value can be missing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from diagnosd.collectors import COLLECTORS
from diagnosd.collectors.clock import Clock
from diagnosd.collectors.cpu import Cpu
from diagnosd.collectors.diskio import Diskio
from diagnosd.collectors.kernel import KernelFile
from diagnosd.collectors.machine import Machine
from diagnosd.collectors.mem import Mem
from diagnosd.collectors.net import Net
from diagnosd.collectors.nstat import Nstat
from diagnosd.collectors.pressure import Pressure
from diagnosd.point import Point, decode, encode
from diagnosd.schema import SCHEMA

NOW = 1_700_000_000_000_000_000
PERIODS = {"fast": 1, "slow": 10, "state": 10, "event": 1}  # state: looked at so often, told when it has changed

NET_DEV = """\
Inter-|   Receive                                                |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo: 900 9 0 0 0 0 0 0 900 9 0 0 0 0 0 0
  eth0: 100 2 3 4 0 0 0 0 500 6 7 8 0 0 0 0
 ib0.1:1844674407370955161 12 0 0 0 0 0 0 18446744073709551615 16 0 0 0 0 0 0
vethab1: 5 5 0 0 0 0 0 0 5 5 0 0 0 0 0 0
"""
STAT = """\
cpu  {user} 10 200 700 40 0 5 5 {guest} 0
cpu0 1 2 3 4 5 6 7 8 9 0
"""
DISKSTATS = """\
   7       0 loop0 1 0 1 0 0 0 0 0 0 0 0
   1       0 ram0 1 0 1 0 0 0 0 0 0 0 0
 259       0 nvme0n1 40447 10127 3768834 18529 5009 43966 3138648 9751 2 5284 28489 3476 47 158520 196 362 11
 259       1 nvme0n1p1 40000 10127 3768834 18529 5009 43966 3138648 9751 2 5284 28489
"""


def tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def by_tag(points: list[Point], tag: str) -> dict[str, Mapping[str, object]]:
    return {str(each.series.tag(tag)): each.fields for each in points}


def test_net_has_telegrafs_names_in_the_kernels_columns(tmp_path: Path) -> None:
    points = by_tag(Net(Machine("n01", tree(tmp_path, {"net/dev": NET_DEV}))).read(NOW), "interface")
    assert points["eth0"] == {
        "bytes_recv": 100, "packets_recv": 2, "err_in": 3, "drop_in": 4,
        "bytes_sent": 500, "packets_sent": 6, "err_out": 7, "drop_out": 8,
    }  # fmt: skip


def test_net_leaves_out_the_loopback_and_what_joins_containers(tmp_path: Path) -> None:
    inside = ("docker0", "br-0123456789ab", "virbr0", "cni0", "flannel.1")
    more = "".join(f"{name}: 5 5 0 0 0 0 0 0 5 5 0 0 0 0 0 0\n" for name in (*inside, "br-ex", "lom0"))
    points = Net(Machine("n01", tree(tmp_path, {"net/dev": NET_DEV + more}))).read(NOW)
    assert set(by_tag(points, "interface")) == {"eth0", "ib0.1", "br-ex", "lom0"}


def test_net_leaves_out_what_is_excluded(tmp_path: Path) -> None:
    points = Net(Machine("n01", tree(tmp_path, {"net/dev": NET_DEV}), exclude=("eth*",))).read(NOW)
    assert set(by_tag(points, "interface")) == {"ib0.1"}


def test_an_interface_that_cannot_be_said_or_counted_costs_itself_alone(tmp_path: Path) -> None:
    """The kernel allows everything in a name but blanks, slashes and colons."""
    counts = " 5 5 0 0 0 0 0 0 5 5 0 0 0 0 0 0\n"
    odd = (
        f"   a\\:{counts}  \x01b:{counts}    c:\n  d: -1{counts}  e: 0x1f{counts}  f: {2**70}{counts}  g\x1ch:{counts}"
    )
    points = Net(Machine("n01", tree(tmp_path, {"net/dev": f"{NET_DEV}{odd} i,=😀:{counts}eth0\x85:{counts}"}))).read(
        NOW
    )
    assert set(by_tag(points, "interface")) == {"eth0", "ib0.1", "i,=😀", "eth0\x85"}
    assert by_tag(points, "interface")["eth0"]["bytes_recv"] == 100
    encode(points)


def test_a_disk_whose_line_is_cut_or_below_zero_costs_itself_alone(tmp_path: Path) -> None:
    odd = "8 0 sda 1 2\n8 16 sdb 1 0 1 1 1 0 1 1 -1 1 1\n\n8\n"
    points = Diskio(Machine("n01", tree(tmp_path, {"diskstats": odd + DISKSTATS}), tmp_path / "sys")).read(NOW)
    assert set(by_tag(points, "name")) == {"nvme0n1", "nvme0n1p1"}


def test_what_is_no_counter_of_tcp_is_absent(tmp_path: Path) -> None:
    files = {
        "net/snmp": "Tcp: RetransSegs OutSegs InSegs InErrs\nTcp: -5 1000 0x1f\n",
        "net/netstat": "TcpExt: TCPTimeouts\nIpExt: 9\n",
    }
    points = by_tag(Nstat(Machine("n01", tree(tmp_path, files))).read(NOW), "name")
    assert points == {"snmp": {"TcpOutSegs": 1000}}


def test_a_counter_beyond_63_bits_is_sent_modulo_2_to_the_63(tmp_path: Path) -> None:
    points = by_tag(Net(Machine("n01", tree(tmp_path, {"net/dev": NET_DEV}))).read(NOW), "interface")
    assert points["ib0.1"]["bytes_sent"] == 2**63 - 1
    assert points["ib0.1"]["bytes_recv"] == 1844674407370955161


def test_an_interface_that_is_gone_is_one_event_and_no_zero(tmp_path: Path) -> None:
    net = Net(Machine("n01", tree(tmp_path, {"net/dev": NET_DEV})))
    net.read(NOW)
    tree(tmp_path, {"net/dev": NET_DEV.replace("  eth0:", "  lo:")})
    (ib0, event), (later,) = net.read(NOW + 1), net.read(NOW + 2)
    assert ib0.series.tag("interface") == later.series.tag("interface") == "ib0.1"
    assert (event.series.tag("kind"), event.series.tag("subject")) == ("link_down", "nic:n01/eth0")


def test_nstat_takes_each_value_by_its_own_name(tmp_path: Path) -> None:
    files = {
        "net/snmp": "Ip: Forwarding DefaultTTL\nIp: 1 64\nTcp: MaxConn RetransSegs OutSegs\nTcp: -1 5 1000\n",
        "net/netstat": "TcpExt: SyncookiesSent TCPTimeouts\nTcpExt: 3 7\nIpExt: InCEPkts\nIpExt: 9\n",
    }
    points = by_tag(Nstat(Machine("n01", tree(tmp_path, files))).read(NOW), "name")
    assert points == {"snmp": {"TcpRetransSegs": 5, "TcpOutSegs": 1000}, "netstat": {"TcpExtTCPTimeouts": 7}}


def test_cpu_says_nothing_at_the_first_read_and_percentages_of_the_difference_then(tmp_path: Path) -> None:
    cpu = Cpu(Machine("n01", tree(tmp_path, {"stat": STAT.format(user=100, guest=0)})))
    first = cpu.read(NOW)
    tree(tmp_path, {"stat": "cpu  160 10 220 710 50 0 5 5 0 0\n"})
    (second,) = cpu.read(NOW + 1)
    assert first == []
    assert second.fields == {
        "usage_user": 60.0, "usage_system": 20.0, "usage_idle": 10.0, "usage_iowait": 10.0, "usage_steal": 0.0,
    }  # fmt: skip


def test_cpu_counts_guests_once(tmp_path: Path) -> None:
    cpu = Cpu(Machine("n01", tree(tmp_path, {"stat": STAT.format(user=100, guest=0)})))
    cpu.read(NOW)
    tree(tmp_path, {"stat": "cpu  150 10 200 750 40 0 5 5 50 0\n"})
    (second,) = cpu.read(NOW + 1)
    assert second.fields["usage_user"] == 0.0
    assert second.fields["usage_idle"] == 100.0


def test_a_share_of_cpu_time_that_ran_back_is_left_out(tmp_path: Path) -> None:
    cpu = Cpu(Machine("n01", tree(tmp_path, {"stat": STAT.format(user=100, guest=0)})))
    cpu.read(NOW)
    tree(tmp_path, {"stat": "cpu  200 10 200 700 39 0 5 5 0 0\n"})
    (second,) = cpu.read(NOW + 1)
    assert "usage_iowait" not in second.fields
    assert second.fields["usage_user"] == pytest.approx(100 * 100 / 99)


def test_memory_is_in_bytes_and_cached_holds_the_slabs_that_can_be_given_back(tmp_path: Path) -> None:
    meminfo = "MemTotal: 1000 kB\nMemAvailable: 600 kB\nCached: 300 kB\nSReclaimable: 50 kB\nHugePages_Total: 0\n"
    (found,) = Mem(Machine("n01", tree(tmp_path, {"meminfo": meminfo}))).read(NOW)
    assert found.fields == {"total": 1024000, "available": 614400, "cached": 358400, "used": 409600}


def test_pressure_leaves_out_what_the_kernel_only_prints_as_zero(tmp_path: Path) -> None:
    line = "some avg10=1.50 avg60=0.25 avg300=0.00 total=77\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
    points = Pressure(Machine("n01", tree(tmp_path, {"pressure/cpu": line, "pressure/io": line}))).read(NOW)
    told = {(each.series.tag("resource"), each.series.tag("type")) for each in points}
    assert told == {("cpu", "some"), ("io", "some"), ("io", "full")}
    assert points[0].fields == {"avg10": 1.5, "avg60": 0.25, "avg300": 0.0, "total": 77}


def test_diskio_counts_whole_disks_in_bytes_and_milliseconds(tmp_path: Path) -> None:
    proc = tree(tmp_path / "proc", {"diskstats": DISKSTATS})
    sys = tree(tmp_path / "sys", {"block/nvme0n1/size": "1", "block/loop0/size": "1"})
    (disk,) = Diskio(Machine("n01", proc, sys)).read(NOW)
    assert disk.series.tag("name") == "nvme0n1"
    assert disk.fields == {
        "reads": 40447, "read_bytes": 3768834 * 512, "read_time": 18529, "writes": 5009,
        "write_bytes": 3138648 * 512, "write_time": 9751, "iops_in_progress": 2, "io_time": 5284,
    }  # fmt: skip


def test_a_disk_that_is_gone_is_one_event(tmp_path: Path) -> None:
    disks = Diskio(Machine("n01", tree(tmp_path, {"diskstats": DISKSTATS}), tmp_path))
    disks.read(NOW)
    tree(tmp_path, {"diskstats": "\n".join(DISKSTATS.splitlines()[:3])})
    events = [each for each in disks.read(NOW + 1) if each.series.measurement == "diagnosd_event"]
    assert [each.fields["text"] for each in events] == ["the disk nvme0n1p1 is gone"]


def test_disks_that_are_gone_at_once_are_an_event_each(tmp_path: Path) -> None:
    disks = Diskio(Machine("n01", tree(tmp_path, {"diskstats": DISKSTATS}), tmp_path))
    disks.read(NOW)
    tree(tmp_path, {"diskstats": ""})
    events = disks.read(NOW + 10)
    assert [each.time for each in events] == [NOW + 10, NOW + 11]


def test_the_clock_pairs_wall_and_monotonic_time_of_one_moment() -> None:
    (found,) = Clock(Machine("n01")).read(NOW)
    mono, wall = found.fields["mono"], found.time
    assert isinstance(mono, int)
    assert abs((time.time_ns() - wall) - (time.monotonic_ns() - mono)) < 50_000_000


@pytest.mark.parametrize(
    ("left", "source"),
    [("phc2sys.412", "ptp"), ("chrony/chronyd.pid", "ntp"), ("systemd/timesync/synchronized", "ntp"), ("x", "unknown")],
)
def test_who_keeps_the_clock_is_seen_in_run(tmp_path: Path, left: str, source: str) -> None:
    (found,) = Clock(Machine("n01", run=tree(tmp_path, {left: ""}))).read(NOW)
    assert found.fields["source"] == source


@pytest.mark.parametrize("make", COLLECTORS, ids=lambda make: make.name)
def test_a_machine_that_has_nothing_of_it_is_no_error_and_no_zero(make: type[Net], tmp_path: Path) -> None:
    collector = make(Machine("n01", tmp_path, tmp_path, tmp_path))
    collector.read(NOW)
    assert {each.series.measurement for each in collector.read(NOW)} <= {"diagnosd_clock"}
    assert collector.errors == 0


def test_what_is_not_supported_is_remembered_and_never_opened_again(tmp_path: Path) -> None:
    file = KernelFile(tmp_path / "pressure")
    file.read()
    (tmp_path / "pressure").write_text("some")
    assert file.read() is None
    assert file.errors == 0


def test_what_is_unreadable_now_is_counted_and_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "dev"
    path.write_text("1")
    file = KernelFile(path)
    file.read()
    path.unlink()
    missing = file.read()
    path.write_text("2")
    assert (missing, file.errors, file.read()) == (None, 1, "2")


def test_a_file_is_read_again_through_the_descriptor_that_stays_open(tmp_path: Path) -> None:
    (tmp_path / "rate").write_text("100\n")
    file = KernelFile(tmp_path / "rate")
    file.read()
    (tmp_path / "rate").rename(tmp_path / "elsewhere")
    assert file.read() == "100\n"


def test_a_file_longer_than_a_page_is_read_whole_each_time(tmp_path: Path) -> None:
    (tmp_path / "long").write_text("x" * 10_000)
    file = KernelFile(tmp_path / "long")
    for _ in range(2):
        assert file.read() == "x" * 10_000


def test_a_file_that_was_replaced_is_opened_again_and_one_that_is_gone_says_so(tmp_path: Path) -> None:
    (tmp_path / "rate").write_text("100\n")
    file = KernelFile(tmp_path / "rate")
    assert file.raw() == b"100\n"
    (tmp_path / "new").write_text("200\n")
    (tmp_path / "new").replace(tmp_path / "rate")
    assert (file.raw(), file.gone) == (b"200\n", False)
    (tmp_path / "rate").unlink()
    assert (file.raw(), file.gone, file.errors) == (None, True, 1)


@pytest.mark.parametrize("make", COLLECTORS, ids=lambda make: make.name)
def test_a_collector_reads_this_machine_and_keeps_the_contract(make: type[Net]) -> None:
    collector = make(Machine("n01"))
    collector.read(time.time_ns())
    for line in encode(collector.read(time.time_ns())).splitlines():
        found = decode(line)
        known = SCHEMA[found.series.measurement]
        assert all(name in known.fields or known.any_field for name in found.fields)


@pytest.mark.parametrize("make", COLLECTORS, ids=lambda make: make.name)
def test_a_collector_is_read_as_often_as_the_contract_says(make: type[Net]) -> None:
    measurement = {"clock": "diagnosd_clock", "kernellog": "diagnosd_event"}.get(make.name, make.name)
    cadences = {field.cadence for field in SCHEMA[measurement].fields.values() if field.name != "speed"}
    assert make.every == min(PERIODS[cadence] for cadence in cadences)
