"""Counters of RDMA ports: trees of sysfs in, points out, on a clock that the test moves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnosd.collectors.infiniband import LOOK_S, SLOW_S, Infiniband
from diagnosd.collectors.machine import Machine
from diagnosd.point import Point, Value, decode, encode
from diagnosd.schema import PORT_TRAFFIC, port_unit
from hca import COUNTERS, HW_COUNTERS, hca, hcas, write

NOW = 1_700_000_000_000_000_000
SECOND = 1_000_000_000
GIB = 2**30
CORPORA = Path(__file__).parents[2] / "shared/corpora/sysfs"
corpus = pytest.mark.skipif(not CORPORA.is_dir(), reason=f"no real inputs at {CORPORA}")

# In place of a counter: what gives EINVAL on each read as a driver does, EISDIR, and nothing at all.
EINVAL = Path("/sys/class/net/lo/speed")


def machine(sys: Path, *exclude: str) -> Machine:
    return Machine("n01", sys=sys, live=False, exclude=exclude)


def port(sys: Path, device: str = "mlx5_0", number: int = 1) -> Path:
    return sys / "class/infiniband" / device / "ports" / str(number)


def fields(points: list[Point], device: str = "mlx5_0", number: str = "1") -> dict[str, Value]:
    """All that was told of a port, the later value of each field."""
    told: dict[str, Value] = {}
    for each in points:
        if (each.series.tag("device"), each.series.tag("port")) == (device, number):
            told |= each.fields
    return told


def over(collector: Infiniband, seconds: int, start: int = 0) -> list[Point]:
    return [each for second in range(start, start + seconds) for each in collector.read(NOW + second * SECOND)]


def descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def refuse(path: Path) -> None:
    path.unlink()
    path.symlink_to(EINVAL)


def test_every_file_becomes_a_field_under_its_own_name(tmp_path: Path) -> None:
    (told,) = Infiniband(machine(hcas(tmp_path, 1))).read(NOW)
    assert told.series.key == "infiniband,device=mlx5_0,host=n01,port=1"
    counted = {name for name, value in {**COUNTERS, **HW_COUNTERS}.items() if value or "cnp" not in name}
    assert set(told.fields) == counted
    assert {name: told.fields[name] for name in ("port_rcv_data", "lifespan", "np_cnp_sent", "link_downed")} == {
        "port_rcv_data": 500_000_000, "lifespan": 12, "np_cnp_sent": 38, "link_downed": 1,
    }  # fmt: skip
    assert decode(encode([told]).decode().strip()) == told


def test_data_and_congestion_are_read_every_second_the_rest_every_ten_each_port_at_its_own(tmp_path: Path) -> None:
    collector = Infiniband(machine(hcas(tmp_path, 8)))
    collector.read(NOW)
    ticks = [collector.read(NOW + second * SECOND) for second in range(1, 21)]
    assert {len(points) for points in ticks} == {8}
    assert all("port_xmit_data" in each.fields and "np_cnp_sent" in each.fields for points in ticks for each in points)
    slow = [[each.series.tag("device") for each in points if "symbol_error" in each.fields] for points in ticks]
    assert max(map(len, slow)) == 1
    assert slow[:SLOW_S] == slow[SLOW_S:]
    assert {device for devices in slow for device in devices} == {f"mlx5_{number}" for number in range(8)}


def test_a_collector_that_may_read_once_in_ten_seconds_reads_all_each_time(tmp_path: Path) -> None:
    collector = Infiniband(machine(hcas(tmp_path, 2)))
    points = [each for read in range(3) for each in collector.read(NOW + read * 10 * SECOND)]
    assert ["symbol_error" in each.fields for each in points] == [True] * 6


def test_counters_ext_of_old_kernels_are_read_too(tmp_path: Path) -> None:
    write(port(hcas(tmp_path, 1)) / "counters_ext", {"port_xmit_data_64": 2**40})
    assert fields(Infiniband(machine(tmp_path)).read(NOW))["port_xmit_data_64"] == 2**40


def test_a_machine_without_rdma_is_no_error_and_is_looked_at_again_later(tmp_path: Path) -> None:  # A42
    collector = Infiniband(machine(tmp_path))
    assert over(collector, 2 * LOOK_S) == []
    assert collector.errors == 0
    hcas(tmp_path, 1)
    assert fields(over(collector, LOOK_S + 1, 2 * LOOK_S))["port_rcv_data"] == 500_000_000


@pytest.mark.parametrize("text", ["N/A (no PMA)", "", "-1", "0x1f", "1_000", "7 8", "1e3", "9" * 40, "\u0663"])
def test_what_is_no_count_is_absent_for_that_file_alone(text: str, tmp_path: Path) -> None:  # A43
    write(port(hcas(tmp_path, 1)) / "counters", dict.fromkeys(COUNTERS, text))
    collector = Infiniband(machine(tmp_path))
    told = fields(over(collector, 25))
    assert not set(told) & set(COUNTERS)
    assert set(told) == {name for name, value in HW_COUNTERS.items() if value or "cnp" not in name}
    assert collector.errors == 0


def test_a_file_that_is_refused_is_skipped_remembered_and_tried_again_rarely(tmp_path: Path) -> None:  # A44
    with pytest.raises(OSError, match="Invalid argument"):
        EINVAL.read_text()
    bad = port(hcas(tmp_path, 1)) / "counters/VL15_dropped"
    refuse(bad)
    collector = Infiniband(machine(tmp_path))
    told = fields(over(collector, 100))
    assert "VL15_dropped" not in told
    assert set(COUNTERS) - set(told) == {"VL15_dropped"}
    assert collector.errors == 3
    over(collector, 3500, 100)
    assert collector.errors == 3
    bad.unlink()
    write(bad.parent, {"VL15_dropped": 4})
    assert fields(over(collector, 100, 3600))["VL15_dropped"] == 4


def test_a_counter_that_worked_is_back_soon_after_an_outage(tmp_path: Path) -> None:
    data = port(hcas(tmp_path, 1)) / "counters/port_xmit_data"
    collector = Infiniband(machine(tmp_path))
    over(collector, 3)
    data.write_text("N/A (no PMA)\n")
    assert "port_xmit_data" not in fields(over(collector, 6, 3))
    data.write_text("8\n")
    assert fields(over(collector, 4, 9))["port_xmit_data"] == 8


def test_a_device_without_counters_takes_nothing_from_the_others(tmp_path: Path) -> None:  # A45
    hcas(tmp_path, 1)
    base = hca(tmp_path, 1, device="irdma0", link_layer="Ethernet", driver="ice")
    for name in ("counters", "hw_counters"):
        shutil.rmtree(base / name)
    for name in ("hca_type", "board_id"):
        (tmp_path / "class/infiniband/irdma0" / name).unlink()
    write(tmp_path / "class/infiniband", {"abi_version": 1, "i40iw0/node_type": "4: RNIC"})
    collector = Infiniband(machine(tmp_path))
    assert {each.series.tag("device") for each in over(collector, 12)} == {"mlx5_0"}
    assert collector.errors == 0


def test_a_driver_that_refuses_everything_is_left_alone_after_nine_reads(tmp_path: Path) -> None:  # A46
    hcas(tmp_path, 2)
    for name in COUNTERS:
        refuse(port(tmp_path) / "counters" / name)
    collector = Infiniband(machine(tmp_path))
    points = over(collector, 3600)
    assert collector.errors == 9
    assert fields(points)["np_cnp_sent"] == 38
    assert fields(points, "mlx5_1")["port_xmit_data"] == 250_000_000


def test_three_bad_files_at_the_front_do_not_hide_the_good_ones(tmp_path: Path) -> None:
    hcas(tmp_path, 1)
    for name in ("port_rcv_data", "port_rcv_packets", "port_xmit_data", "port_xmit_packets", "VL15_dropped"):
        refuse(port(tmp_path) / "counters" / name)
    told = fields(over(Infiniband(machine(tmp_path)), 3))
    assert told["link_downed"] == 1
    assert told["port_xmit_wait"] == 3599


def test_a_folder_that_was_read_before_is_read_again_soon_after_an_outage(tmp_path: Path) -> None:
    """A firmware that is reset refuses everything for some seconds."""
    folder = port(hcas(tmp_path, 1)) / "counters"
    for name in folder.iterdir():
        if name.name.startswith("port_"):  # the others are opened anew each time, so that a folder can stand for EISDIR
            name.unlink()
    collector = Infiniband(machine(tmp_path))
    assert fields(over(collector, 12))["link_downed"] == 1
    shutil.move(folder, tmp_path / "aside")
    for name in (tmp_path / "aside").iterdir():
        (folder / name.name).mkdir(parents=True)
    assert "link_downed" not in fields(over(collector, 20, 12))
    assert 0 < collector.errors < 40
    shutil.rmtree(folder)
    shutil.move(tmp_path / "aside", folder)
    assert fields(over(collector, 40, 32))["link_downed"] == 1


OPENS = """
import sys
from pathlib import Path
opened = []
opens = ("open", "os.listdir", "os.scandir")
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event in opens else None)
from diagnosd.collectors.infiniband import Infiniband
from diagnosd.collectors.link import Link
from diagnosd.collectors.machine import Machine
from diagnosd.collectors.nics import Nics
root, *exclude = sys.argv[1:]
machine = Machine("n01", sys=Path(root), exclude=tuple(exclude))
collectors, nics = (Infiniband(machine), Link(machine)), Nics(machine)
opened.clear()
for second in range(25):
    for collector in collectors:
        collector.read(1_700_000_000_000_000_000 + second * 1_000_000_000)
nics.read()
print("\\n".join(opened))
"""


def opened(sys_root: Path, *exclude: str) -> list[str]:
    argv = [sys.executable, "-Ic", OPENS, str(sys_root), *exclude]
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=30).stdout.splitlines()


@pytest.mark.parametrize("pattern", ["mlx5_1", "mlx5_[1-9]", "0000:11:00.0", "ib1"])
def test_of_an_excluded_device_nothing_is_opened_nor_listed(pattern: str, tmp_path: Path) -> None:  # A46
    paths = opened(hcas(tmp_path, 2), pattern)
    assert any("/mlx5_0/" in path for path in paths)
    assert [path for path in paths if "mlx5_1" in path or "0000:11:00.0" in path or path.endswith("ib1")] == []


def test_nothing_under_dev_is_opened(tmp_path: Path) -> None:  # A110
    assert [path for path in opened(hcas(tmp_path, 2)) if path.startswith("/dev")] == []


@pytest.mark.parametrize("width", ["1X", "2X", "4X", "12X"])
def test_a_gibibyte_is_2_to_the_28_words_whatever_the_lanes(width: str, tmp_path: Path) -> None:  # A47
    base = port(hcas(tmp_path, 1))
    write(base, {"rate": f"100 Gb/sec ({width} HDR)", "counters/port_rcv_data": 0})
    collector = Infiniband(machine(tmp_path))
    before = fields(collector.read(NOW))["port_rcv_data"]
    write(base, {"counters/port_rcv_data": GIB // 4})
    after = fields(collector.read(NOW + SECOND))["port_rcv_data"]
    unit = port_unit("mlx5_core", "InfiniBand", "port_rcv_data")
    assert isinstance(before, int)
    assert isinstance(after, int)
    assert (unit.unit, unit.bytes) == ("4-byte words", 4)
    assert after - before == 2**28
    assert (after - before) * (unit.bytes or 0) == GIB


@pytest.mark.parametrize(
    ("driver", "link_layer", "file", "size"),
    [
        ("mlx5_core", "Ethernet", "port_xmit_data", 4),
        ("mlx4_core", "InfiniBand", "port_xmit_data_64", 4),
        ("hfi1", "InfiniBand", "port_rcv_data", 4),
        ("bnxt_en", "Ethernet", "port_rcv_data", 4),
        (None, None, "port_rcv_data", 4),
        ("efa", "Unknown", "port_rcv_data", 1),
        ("efa", "Unknown", "rdma_read_resp_bytes", 1),
        ("bnxt_en", "Ethernet", "rx_roce_only_bytes", 1),
        ("ionic", "Ethernet", "tx_rdma_ucast_bytes", 1),
        ("ice", "Ethernet", "ip4OutOctets", 1),
        ("mlx5_core", "InfiniBand", "port_xmit_packets", None),
        ("mlx5_core", "InfiniBand", "out_of_sequence", None),
    ],
)
def test_a_counter_s_unit_belongs_to_driver_link_layer_and_file(
    driver: str | None, link_layer: str | None, file: str, size: int | None
) -> None:  # A47, A52
    assert port_unit(driver, link_layer, file).bytes == size


def test_saturated_counters_are_told_raw(tmp_path: Path) -> None:  # A48
    stuck = {
        "port_xmit_wait": 4294967295, "link_downed": 255, "port_xmit_discards": 65535,
        "excessive_buffer_overrun_errors": 15,
    }  # fmt: skip
    write(port(hcas(tmp_path, 1)) / "counters", stuck)
    told = fields(over(Infiniband(machine(tmp_path)), 2))
    assert {name: told[name] for name in stuck} == stuck


def test_a_64_bit_counter_is_sent_modulo_2_to_the_63(tmp_path: Path) -> None:  # A48
    write(port(hcas(tmp_path, 1)) / "counters", {"port_xmit_data": 2**64 - 1, "port_rcv_data": 2**63 + 5})
    (told,) = Infiniband(machine(tmp_path)).read(NOW)
    assert (told.fields["port_xmit_data"], told.fields["port_rcv_data"]) == (2**63 - 1, 5)
    assert encode([told])


def test_waiting_is_told_in_ticks_that_are_neither_seconds_nor_bytes(tmp_path: Path) -> None:  # A49
    write(port(hcas(tmp_path, 1)) / "counters", {"port_xmit_wait": 14681376621})
    points = over(Infiniband(machine(tmp_path)), 2)
    assert fields(points)["port_xmit_wait"] == 14681376621
    assert port_unit("mlx5_core", "InfiniBand", "port_xmit_wait") == ("ticks", None)
    assert {each.series.measurement for each in points} == {"infiniband"}


def test_what_a_port_has_lived_through_is_no_event(tmp_path: Path) -> None:  # A50
    write(port(hcas(tmp_path, 1)) / "counters", {"link_downed": 25, "port_rcv_errors": 26})
    points = over(Infiniband(machine(tmp_path)), 20)
    assert fields(points)["link_downed"] == 25
    assert {each.series.measurement for each in points} == {"infiniband"}


def test_hw_counters_are_never_read_faster_than_their_lifespan(tmp_path: Path) -> None:  # A51
    write(port(hcas(tmp_path, 1)) / "hw_counters", {"lifespan": 1000})
    collector = Infiniband(machine(tmp_path))
    step = SECOND // 10
    points = [each for number in range(600) for each in collector.read(NOW + number * step)]
    cached = [each.time for each in points if "np_cnp_sent" in each.fields]
    assert min(later - earlier for earlier, later in pairwise(cached)) > SECOND
    assert max(later - earlier for earlier, later in pairwise(cached)) < 2 * SECOND
    assert len([each for each in points if "port_xmit_data" in each.fields]) == 600
    assert len([each for each in points if "out_of_sequence" in each.fields]) > 10, "slow ones wait, and are not lost"


def test_a_clock_that_steps_back_does_not_stop_hw_counters(tmp_path: Path) -> None:
    write(port(hcas(tmp_path, 1)) / "hw_counters", {"lifespan": 10000})
    collector = Infiniband(machine(tmp_path))
    collector.read(NOW)
    assert "np_cnp_sent" in fields(collector.read(NOW - 3600 * SECOND))


def test_hw_counters_may_lie_under_the_device(tmp_path: Path) -> None:  # A51
    base = port(hcas(tmp_path, 1))
    shutil.move(base / "hw_counters", base.parents[1] / "hw_counters")
    assert fields(Infiniband(machine(tmp_path)).read(NOW))["np_cnp_sent"] == 38


def test_what_a_port_counts_itself_goes_before_what_its_device_counts(tmp_path: Path) -> None:
    base = port(hcas(tmp_path, 1))
    write(base.parents[1] / "hw_counters", {"np_cnp_sent": 9, "of_the_device": 7})
    told = fields(Infiniband(machine(tmp_path)).read(NOW))
    assert (told["np_cnp_sent"], told["of_the_device"]) == (38, 7)


# What other drivers show: PCI driver, link layer, files of counters and of hw_counters, the pair of the traffic.
VENDORS: Mapping[str, tuple[str, str, dict[str, str | int], dict[str, str | int], tuple[str, str]]] = {
    "bnxt_re0": ("bnxt_en", "Ethernet", {}, {
        "tx_bytes": 4000, "rx_bytes": 5000, "tx_pkts": 4, "rx_pkts": 5, "tx_cnp_pkts": 1, "rx_cnp_pkts": 2,
        "rx_ecn_marked_pkts": 3, "seq_err_naks_rcvd": 6, "oos_drop_count": 7, "active_qps": 8,
    }, ("tx_bytes", "rx_bytes")),
    "ionic_0": ("ionic", "Ethernet", {}, {
        "tx_rdma_ucast_bytes": 4000, "rx_rdma_ucast_bytes": 5000, "rx_rdma_cnp_pkts": 2, "rx_rdma_ecn_pkts": 3,
        "req_rx_pkt_seq_err": 6,
    }, ("tx_rdma_ucast_bytes", "rx_rdma_ucast_bytes")),
    "rocep23s0f0": ("ice", "Ethernet", {"port_xmit_data": "N/A (no PMA)"}, {
        "ip4OutOctets": 4000, "ip4InOctets": 5000, "cnpHandled": 1, "RxECNMrkd": 2, "RNR sent": 3,
    }, ("ip4OutOctets", "ip4InOctets")),
    "rdmap16s0": ("efa", "Unknown", {}, {
        "tx_bytes": 4000, "rx_bytes": 5000, "rdma_read_bytes": 6, "retrans_pkts": 7, "lifespan": 10,
    }, ("tx_bytes", "rx_bytes")),
    "hfi1_0": ("hfi1", "InfiniBand", {"port_xmit_data": 1000, "port_rcv_data": 1250, "VL15_dropped": "N/A (no PMA)"}, {
        "DmaWait": 50646, "RcSeqNak": 0, "Rcv,Hdr": 4, "RcvFECN": 9,
    }, ("port_xmit_data", "port_rcv_data")),
    "mlx4_0": ("mlx4_core", "InfiniBand", {"port_xmit_data": 1000, "port_rcv_data": 1250, "port_xmit_wait": 3599}, {
        "sq_num_to": 1, "rq_num_oos": 2,
    }, ("port_xmit_data", "port_rcv_data")),
}  # fmt: skip


@pytest.mark.parametrize("device", VENDORS)
def test_each_vendor_s_counters_keep_their_names_and_have_their_unit(device: str, tmp_path: Path) -> None:  # A52
    driver, link_layer, counters, own, traffic = VENDORS[device]
    base = hca(tmp_path, device=device, driver=driver, link_layer=link_layer)
    for name in ("counters", "hw_counters"):
        shutil.rmtree(base / name)
    write(base / "counters", counters)
    write(base / "hw_counters", own)
    points = over(Infiniband(machine(tmp_path)), 2)
    told = fields(points, device)
    assert told == {name: value for name, value in {**counters, **own}.items() if isinstance(value, int)}
    assert next(pair for pair in PORT_TRAFFIC if set(pair) <= set(told)) == traffic
    sent, received = (told[file] for file in traffic)
    size = port_unit(driver, link_layer, traffic[0]).bytes
    assert (sent, received) == (4000 // (size or 0), 5000 // (size or 0))
    assert set(traffic) <= set(points[-1].fields), "read every second"
    assert [decode(line) for line in encode(points).decode().splitlines()] == points


@pytest.mark.parametrize("device", ["ibp142s0", "rocep1s0f0", "mlx5_bond_1", "roce 0", "mlx5_ib,0", "qedr0"])
def test_a_device_may_be_called_anything(device: str, tmp_path: Path) -> None:  # A53
    hca(tmp_path, device=device)
    points = Infiniband(machine(tmp_path)).read(NOW)
    assert fields(points, device)["port_xmit_data"] == 250_000_000
    assert decode(encode(points).decode().strip()) == points[0]


def test_each_port_of_a_device_is_a_series_of_its_own(tmp_path: Path) -> None:  # A63
    base = port(hcas(tmp_path, 1))
    shutil.copytree(base, base.with_name("2"))
    write(port(tmp_path, number=2) / "counters", {"port_xmit_data": 7})
    points = Infiniband(machine(tmp_path)).read(NOW)
    assert fields(points)["port_xmit_data"] == 250_000_000
    assert fields(points, number="2")["port_xmit_data"] == 7


@pytest.mark.parametrize("file", ["counters/port_xmit_wait", "hw_counters/np_cnp_sent", "hw_counters/rp_cnp_handled"])
def test_a_congestion_counter_at_0_since_boot_is_not_supported_and_not_0(file: str, tmp_path: Path) -> None:
    write(port(hcas(tmp_path, 1)), {file: 0})
    told = fields(over(Infiniband(machine(tmp_path)), 30))
    assert Path(file).name not in told
    assert told["port_xmit_data"] == 250_000_000


def test_a_congestion_counter_s_first_count_comes_with_the_0_before_it(tmp_path: Path) -> None:
    base = write(port(hcas(tmp_path, 1)), {"hw_counters/np_cnp_sent": 0})
    collector = Infiniband(machine(tmp_path))
    over(collector, 5)
    write(base, {"hw_counters/np_cnp_sent": 12})
    points = collector.read(NOW + 5 * SECOND)
    assert [(each.time - NOW, each.fields["np_cnp_sent"]) for each in points] == [(4 * SECOND, 0), (5 * SECOND, 12)]
    write(base, {"hw_counters/np_cnp_sent": 0})
    assert fields(collector.read(NOW + 6 * SECOND))["np_cnp_sent"] == 0, "reset: it is known to count"


def test_an_error_counter_at_0_is_0(tmp_path: Path) -> None:
    told = fields(Infiniband(machine(hcas(tmp_path, 1))).read(NOW))
    assert (told["symbol_error"], told["out_of_sequence"]) == (0, 0)


def test_counters_that_stand_still_are_told_all_the_same(tmp_path: Path) -> None:  # A62
    """A wedged driver's port is ACTIVE and counts no more: that is to be seen, so the last values are no gap."""
    points = over(Infiniband(machine(hcas(tmp_path, 1))), 10)
    assert [each.fields["port_xmit_data"] for each in points] == [250_000_000] * 10


def test_what_a_port_sends_and_what_it_receives_are_two_fields(tmp_path: Path) -> None:  # A67
    base = port(hcas(tmp_path, 1))
    collector = Infiniband(machine(tmp_path))
    collector.read(NOW)
    write(base / "counters", {"port_rcv_data": 500_000_900})
    told = fields(collector.read(NOW + SECOND))
    assert (told["port_rcv_data"], told["port_xmit_data"]) == (500_000_900, 250_000_000)


def test_a_device_that_goes_is_forgotten_with_its_descriptors_and_read_when_it_is_back(tmp_path: Path) -> None:
    before = descriptors()
    collector = Infiniband(machine(hcas(tmp_path, 2)))
    over(collector, 2)
    shutil.rmtree(tmp_path / "class/infiniband/mlx5_1/ports")
    over(collector, LOOK_S, LOOK_S)
    assert fields(over(collector, LOOK_S, 2 * LOOK_S), "mlx5_1") == {}
    hca(tmp_path, 1)
    write(port(tmp_path, "mlx5_1") / "counters", {"port_xmit_data": 3})
    assert fields(over(collector, LOOK_S, 3 * LOOK_S), "mlx5_1")["port_xmit_data"] == 3
    assert descriptors() <= before + 2 * 12
    collector.close()
    assert descriptors() == before


def test_a_file_that_goes_away_makes_it_look_for_the_devices_at_once(tmp_path: Path) -> None:
    collector = Infiniband(machine(hcas(tmp_path, 2)))
    over(collector, 1 + SLOW_S)
    shutil.rmtree(tmp_path / "class/infiniband/mlx5_1/ports")
    over(collector, SLOW_S, 1 + SLOW_S)
    errors = collector.errors
    over(collector, 60, 1 + 2 * SLOW_S)
    assert collector.errors == errors


TEXTS = st.one_of(
    st.binary(max_size=200),
    st.integers(-(2**70), 2**70).map(lambda number: f"{number}\n".encode()),
    st.sampled_from([b"N/A (no PMA)\n", b"", b"\n", b"0x1f\n", b"4: ACTIVE\n", b"\xd9\xa3\n"]),
)


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(TEXTS, min_size=8, max_size=8))
def test_whatever_stands_in_the_files_only_ints_come_out(
    texts: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = tmp_path_factory.mktemp("sys")
    at = base / "class/infiniband/x0/ports/1"
    files = ["counters/port_xmit_data", "counters/port_xmit_wait", "counters/a", "hw_counters/lifespan",
             "hw_counters/np_cnp_sent", "hw_counters/b", "counters_ext/c", "counters/d"]  # fmt: skip
    for name, text in zip(files, texts, strict=True):
        (at / name).parent.mkdir(parents=True, exist_ok=True)
        (at / name).write_bytes(text)
    points = over(Infiniband(machine(base)), 12)
    assert {type(value) for each in points for value in each.fields.values()} <= {int}
    assert all(0 <= value < 2**63 for each in points for value in each.fields.values() if isinstance(value, int))
    assert encode(points) is not None


@pytest.mark.parametrize("odd", ["folder", "fifo", "loop", "secret"])
def test_an_odd_file_neither_raises_nor_blocks(odd: str, tmp_path: Path) -> None:
    bad = port(hcas(tmp_path, 1)) / "counters/symbol_error"
    bad.unlink()
    if odd == "folder":
        bad.mkdir()
    elif odd == "fifo":
        os.mkfifo(bad)
    elif odd == "loop":
        bad.symlink_to(bad)
    else:
        bad.symlink_to("/proc/self/mem")  # EIO
    collector = Infiniband(machine(tmp_path))
    told = fields(over(collector, 12))
    assert "symbol_error" not in told
    assert told["link_downed"] == 1
    assert collector.errors > 0


def test_a_name_that_line_protocol_cannot_say_is_left_out(tmp_path: Path) -> None:
    write(port(hcas(tmp_path, 1)) / "counters", {"bad\nname": 1, "device": 2, "back\\": 3})
    told = fields(Infiniband(machine(tmp_path)).read(NOW))
    assert not {"bad\nname", "device", "back\\"} & set(told)
    assert told["link_downed"] == 1


# -- real trees ------------------------------------------------------------------------------------------------------


def unpacked(name: str, at: Path) -> Path:
    with tarfile.open(CORPORA / f"{name}.tar.gz") as archive:
        archive.extractall(at, filter="data")
    return at


@corpus
def test_the_h100_node_of_gpud(tmp_path: Path) -> None:
    """Eight ConnectX-7 and a bond; their author copied the counters from device to device."""
    unpacked("gpud-sys-class-infiniband-h100", tmp_path / "class/infiniband")
    points = Infiniband(machine(tmp_path)).read(NOW)
    assert [each.series.tag("device") for each in points] == [
        "mlx5_0", "mlx5_1", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_7", "mlx5_8", "mlx5_9", "mlx5_bond_0",
    ]  # fmt: skip
    told = fields(points)
    assert told["port_rcv_data"] == 230539874932483
    assert told["port_xmit_data"] == 230442669431839
    assert told["port_xmit_packets"] == 315487941081
    assert told["port_xmit_wait"] == 2489603687
    assert (told["excessive_buffer_overrun_errors"], told["port_rcv_errors"], told["link_downed"]) == (15, 14, 0)
    assert (told["lifespan"], told["rx_dct_connect"], told["rx_write_requests"]) == (12, 422237, 3809045607)
    assert "roce_slow_restart_cnps" not in told, "0 since boot, and 230 TB have gone through"
    assert fields(points, "mlx5_1")["link_downed"] == 255
    assert fields(points, "mlx5_1")["port_rcv_data"] == 205128687774249
    assert fields(points, "mlx5_bond_0")["port_rcv_switch_relay_errors"] == 1
    # 21 counters and 26 hw_counters, lifespan among them; without the congestion counter at 0
    assert {len(each.fields) for each in points} == {46}


@corpus
def test_the_devices_of_procfs(tmp_path: Path) -> None:
    root = unpacked("procfs-infiniband", tmp_path) / "fixtures/sys"
    points = Infiniband(machine(root)).read(NOW)
    hfi1, mlx5 = fields(points, "hfi1_0"), fields(points)
    assert (hfi1["port_rcv_data"], hfi1["port_xmit_data"]) == (345091702026, 273558326543)
    assert (hfi1["port_rcv_packets"], hfi1["port_xmit_packets"]) == (638036947, 568318856)
    assert "port_xmit_wait" not in hfi1
    assert "port_xmit_wait" not in mlx5
    assert fields(points, "mlx4_0", "1")["port_rcv_data"] == 2221223609
    assert fields(points, "mlx4_0", "1")["port_xmit_wait"] == 3599
    assert fields(points, "mlx4_0", "2")["port_xmit_data"] == 26540356890
    assert fields(points, "mlx4_0", "2")["port_xmit_wait"] == 3846
    assert (mlx5["port_rcv_data"], mlx5["port_xmit_data"]) == (18126345378, 2880761508848)
    assert (mlx5["local_ack_timeout_err"], mlx5["roce_slow_restart_cnps"], mlx5["out_of_sequence"]) == (131, 131, 1)
    assert (mlx5["roce_adp_retrans"], mlx5["resp_cqe_error"], mlx5["rx_read_requests"]) == (99, 8109, 175528982)
    assert len(points) == 4


@corpus
@pytest.mark.parametrize("name", ["learn_good.json", "learn_ib_intf_operstate_down.json"])
def test_a_captured_node_without_counters_says_nothing(name: str, tmp_path: Path) -> None:
    files = json.loads((CORPORA / name).read_text())
    write(tmp_path, {path.lstrip("/"): text.rstrip("\n") for path, text in files.items()})
    collector = Infiniband(machine(tmp_path / "sys"))
    assert over(collector, 12) == []
    assert collector.errors == 0
