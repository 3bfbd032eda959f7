"""What NIC drivers count: asked through the real ioctl of a stand-in for the drivers, and of this machine's kernel."""

from __future__ import annotations

import errno
import os
import re
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosd.collectors.ethtool import COUNTERS, SLOW_S, Ethtool, choose
from diagnosd.collectors.machine import Machine, captured
from diagnosd.schema import SCHEMA
from nics import GDRVINFO, GSSET_INFO, GSTATS, GSTRINGS, Nics, Reader

NOW = 1_700_000_000_000_000_000
CORPUS = Path(__file__).parents[2] / "shared/corpora/sysfs"
MLX5 = """\
rx_packets: 845320277
rx_prio3_pause: 7
rx_prio3_pause_duration: 1200
tx_prio3_pause: 2
rx_out_of_buffer: 11
rx3_cache_full: 9
outbound_pci_stalled_wr: 40
"""
FAST = {"rx_prio3_pause": 7, "rx_prio3_pause_duration": 1200, "tx_prio3_pause": 2}
SLOW = {"rx_out_of_buffer": 11, "outbound_pci_stalled_wr": 40}

# Names that real drivers have (their sources, and both files of the corpus): taken every second, every ten, or not.
NAMES = {
    "rx_prio0_pause tx_prio7_pause rx_prio3_pause_duration rx_global_pause tx_global_pause_duration": "fast",  # mlx5
    "rx_pause_ctrl_phy rx_pause rx_pause_prio_3 tx_pause_duration_prio_7": "fast",  # mlx5, mlx4
    "rx_pause_frames tx_pfc_frames rx_pfc_ena_frames_pri3 pfc_pri3_rx_duration_us": "fast",  # bnxt_en
    "frames_rx_pause frames_tx_pripause rx_pripause_3_1us_count rx_pause_1us_count": "fast",  # ionic
    "link_xoff_rx.nic rx_priority_3_xoff.nic port.link_xon_tx port.tx_priority_0_xon": "fast",  # ice, i40e
    "rx_flow_control_xoff rx_pb_3_pxoff mac_rx_pfc_pri3_pkt_num mac_tx_mac_pause_num": "fast",  # ixgbe, hns3
    "rx_prio3_pause_transition tx_pause_storm_warning_events rx_prio3_discards rx_prio4_marked": "slow",  # mlx5
    "rx_prio0_buf_discard rx_prio3_cong_discard rx_ecn_mark dev_out_of_buffer": "slow",  # mlx5
    "rx_discards_phy tx_discards_phy rx_symbol_err_phy rx_corrected_bits_phy rx_err_lane_3_phy": "slow",  # mlx5
    "rx_pci_signal_integrity outbound_pci_buffer_overflow outbound_pci_stalled_rd_events": "slow",  # mlx5
    "rx_vport_rdma_unicast_bytes link_down_events_phy module_high_temp": "slow",  # mlx5
    "pfc_pri0_tx_transitions continuous_roce_pause_events rx_discard_packets_cos3": "slow",  # bnxt_en
    "rx_pcs_symbol_err rx_fec_uncorrectable_blocks rx_total_ring_discards": "slow",  # bnxt_en
    "hw_rx_dropped frames_rx_bad_fcs port.rx_crc_errors rx_dropped.nic": "slow",  # ionic, i40e, ice
    "rx_pause_transition_prio_3 port.rx_priority_3_xon_2_xoff port.tx_dropped_link_down": "slow",  # mlx4, i40e
    "rx_buff_alloc_err tx_queue_dropped tx_timeout rx_stat_discard rx_total_oom_discards": "slow",  # mlx5, bnxt_en
    "frames_rx_dropped hc_rx_discards_no_wqe wd_expired": "slow",  # ionic, mana, ena
    "bw_in_allowance_exceeded linklocal_allowance_exceeded conntrack_allowance_available": "slow",  # ena
    "admin_q_pause queue_0_tx_queue_stop io_suspend tx0_dropped rx_prio0_bytes": "",  # no pause, no discard of a port
    "rx_prio8_pause rx_prio3_pauses xrx_prio3_pause rx12_buff_alloc_err rx_eee_lpi_duration": "",
}


@pytest.fixture
def nics(tmp_path: Path) -> Nics:
    return Nics(tmp_path)


def strings(*names: str | bytes) -> list[bytes]:
    return [(name if isinstance(name, bytes) else name.encode()).ljust(32, b"\0") for name in names]


@pytest.mark.parametrize(("name", "cadence"), [(name, NAMES[row]) for row in NAMES for name in row.split()])
def test_a_name_is_taken_at_its_cadence(name: str, cadence: str) -> None:  # A52
    assert choose(strings(name), ["fast"]).names == ((name,) if cadence == "fast" else ())
    assert choose(strings(name), ["slow"]).names == ((name,) if cadence == "slow" else ())


def test_no_pattern_of_the_list_is_idle() -> None:
    names = " ".join(NAMES).split()
    assert [row for row, _ in COUNTERS if not any(re.fullmatch(row, name) for name in names)] == []


def test_only_the_chosen_are_unpacked_wherever_they_stand_in_the_table() -> None:
    chosen = choose(strings("a", "rx_prio3_pause", "b", "c", "tx_prio3_pause", "rx_prio3_pause"), ["fast"])
    assert dict(zip(chosen.names, chosen.unpack(struct.pack("=6Q", 0, 7, 0, 0, 2, 9), 0), strict=True)) == {
        "rx_prio3_pause": 7,
        "tx_prio3_pause": 2,
    }


@given(st.lists(st.binary(max_size=32).map(lambda name: name.ljust(32, b"\0")), max_size=40))
def test_no_name_of_a_driver_breaks_the_choice(names: list[bytes]) -> None:
    chosen = choose(names, ["fast", "slow"])
    assert len(chosen.unpack(bytes(8 * len(names)), 0)) == len(chosen.names)


def test_a_name_with_a_blank_behind_it_and_one_of_all_32_bytes_are_read() -> None:
    names = strings("tx_pause_storm_warning_events ", b"x" * 32, b"\xff\xfe rx_pause")
    assert choose(names, ["slow"]).names == ("tx_pause_storm_warning_events",)


def test_fast_counters_come_with_every_read_and_slow_ones_with_the_first_and_each_tenth(nics: Nics) -> None:
    nics.add("eth0", MLX5)
    with Reader(nics) as reader:
        reads = [reader.read(NOW + tick).fields("eth0") for tick in range(1 + 2 * SLOW_S)]
    assert reads[0] == FAST | SLOW
    assert sum(read == FAST | SLOW for read in reads[1:]) == 2
    assert sum(read == FAST for read in reads[1:]) == 2 * SLOW_S - 2


def test_a_collector_that_may_read_once_in_ten_seconds_reads_all_each_time(nics: Nics) -> None:
    nics.add("eth0", MLX5)
    with Reader(nics) as reader:
        assert [reader.read(NOW + read * 10**10).fields("eth0") for read in range(3)] == [FAST | SLOW] * 3


def test_points_carry_interface_driver_and_the_time_given(nics: Nics) -> None:
    nics.add("eth0", MLX5)
    with Reader(nics) as reader:
        (point,) = reader.read(NOW).points
    assert dict(point.series.tags) == {"host": "n01", "interface": "eth0", "driver": "mlx5_core"}
    assert (point.series.measurement, point.time) == ("ethtool", NOW)


def test_the_slow_turns_of_interfaces_are_spread_over_the_ticks(nics: Nics) -> None:
    for number in range(8):
        nics.add(f"eth{number}", MLX5, pci=f"0000:{number:02x}:00.0")
    with Reader(nics) as reader:
        reader.read(NOW)
        turns = [
            sum("rx_out_of_buffer" in point.fields for point in reader.read(NOW + tick).points)
            for tick in range(1, 1 + SLOW_S)
        ]
    assert sorted(turns) == [0, 0, *[1] * 8]


def test_names_are_asked_for_once_and_a_nic_without_fast_counters_only_in_its_turn(nics: Nics) -> None:
    nics.add("eth0", MLX5)
    nics.add("ens5", "rx_dropped: 3\nbw_in_allowance_exceeded: 4\n", driver="ena")
    with Reader(nics) as reader:
        for tick in range(21):
            reader.read(NOW + tick)
    asked = Counter(nics.asked())
    assert asked["eth0", GSTRINGS] == asked["ens5", GSTRINGS] == asked["eth0", GDRVINFO] == 1
    assert (asked["eth0", GSTATS], asked["ens5", GSTATS]) == (21, 3)


@pytest.mark.parametrize("strict", [False, True], ids=["before Linux 6.19", "since"])
def test_a_driver_that_counts_something_else_than_it_did_is_asked_for_its_names_again(
    nics: Nics, *, strict: bool
) -> None:
    nics.add("eth0", MLX5, strict=strict)
    with Reader(nics) as reader:
        reader.read(NOW)
        queues = "".join(f"rx{queue}_packets: 5\n" for queue in range(4000))
        nics.add("eth0", queues + MLX5.replace(": 7\n", ": 8\n"), strict=strict)
        changed, after = reader.read(NOW + 1), reader.read(NOW + 2)
    assert changed.points == []
    assert after.fields("eth0") == FAST | SLOW | {"rx_prio3_pause": 8}
    assert after.errors == 0


def test_interfaces_that_come_go_and_are_renamed_are_followed(nics: Nics) -> None:
    nics.add("eth0", MLX5)
    with Reader(nics) as reader:
        assert reader.read(NOW).interfaces() == {"eth0"}
        nics.remove("eth0")
        nics.add("ib0", MLX5)
        assert reader.read(NOW + 1).points == []
        later = [reader.read(NOW + tick) for tick in range(2, 12)]
    assert later[-1].interfaces() == {"ib0"}
    assert later[-1].errors == 0


def test_another_device_under_the_same_name_is_asked_anew(nics: Nics) -> None:
    nics.add("eth0", MLX5)
    with Reader(nics) as reader:
        reader.read(NOW)
        nics.add("eth0", MLX5.replace("rx_prio3_pause:", "rx_prio4_pause:"), pci="0000:2a:00.0")
        later = [reader.read(NOW + tick) for tick in range(1, 12)]
    assert "rx_prio4_pause" in later[-1].fields("eth0")


def test_two_ports_of_one_function_are_two_and_a_bond_is_its_members(nics: Nics) -> None:  # A63, A54
    nics.add("eth0", MLX5, driver="mlx4_core")
    nics.add("eth1", MLX5.replace(": 7\n", ": 8\n"), driver="mlx4_core")
    nics.interface("bond0")
    with Reader(nics) as reader:
        read = reader.read(NOW)
    assert read.interfaces() == {"eth0", "eth1"}
    assert (read.fields("eth0")["rx_prio3_pause"], read.fields("eth1")["rx_prio3_pause"]) == (7, 8)


def test_what_has_no_device_or_joins_containers_is_never_asked(nics: Nics) -> None:
    nics.add("eth0", MLX5)
    nics.add("veth12", MLX5)
    for virtual in ("bond0", "br-ex", "vlan7", "lo"):
        nics.interface(virtual)
    nics.add("eth7", MLX5)  # stands for a virtual function in the switch of its NIC
    (nics.sys / "class/net/eth7/phys_port_name").write_text("pf0vf3\n")
    with Reader(nics) as reader:
        reader.read(NOW)
    assert {name for name, _ in nics.asked()} == {"eth0"}


@pytest.mark.parametrize("excluded", ["eth1", "eth[1-9]", "0000:2a:*", "mlx5_1"])
def test_what_is_excluded_by_interface_address_or_rdma_device_is_neither_asked_nor_opened(
    nics: Nics, excluded: str
) -> None:  # A46
    nics.add("eth0", MLX5, pci="0000:19:00.0", rdma="mlx5_0")
    nics.add("eth1", MLX5, pci="0000:2a:00.0", rdma="mlx5_1")
    with Reader(nics, excluded) as reader:
        reads = [reader.read(NOW + tick) for tick in range(12)]
    assert all(read.interfaces() == {"eth0"} for read in reads)
    assert {name for name, _ in nics.asked()} == {"eth0"}
    looks = [path for path in reads[-1].opened if not path.endswith("phys_port_name")]
    assert set(looks) == {"/class/net", "/class/infiniband"}
    assert set(reads[-1].opened) - set(looks) == {"/class/net/eth0/phys_port_name"}


def test_a_driver_without_statistics_is_asked_once_and_is_no_error(nics: Nics) -> None:  # A45
    nics.add("eth0", "", driver="virtio_net")
    nics.add("eth1", MLX5, errno=errno.EOPNOTSUPP)
    nics.add("eth2", "rx_bytes: 5\n")
    nics.add("eth3", MLX5)
    with Reader(nics) as reader:
        for tick in range(12):
            read = reader.read(NOW + tick)
    assert (read.interfaces(), read.errors) == ({"eth3"}, 0)
    asked = Counter(nics.asked())
    assert asked["eth0", GSSET_INFO] == asked["eth1", GSSET_INFO] == asked["eth2", GSSET_INFO] == 1


def test_a_nic_that_fails_takes_no_other_with_it_and_after_five_times_is_left_in_peace(nics: Nics) -> None:  # A46
    nics.add("eth0", MLX5, errno=errno.EIO)
    nics.add("eth1", MLX5)
    with Reader(nics) as reader:
        reads = [reader.read(NOW + tick) for tick in range(30)]
    assert all(read.interfaces() == {"eth1"} for read in reads)
    assert [read.errors for read in reads[:7]] == [1, 2, 3, 4, 5, 5, 5]
    assert Counter(nics.asked())["eth0", GSSET_INFO] == 5


@pytest.mark.parametrize("code", [errno.EBUSY, errno.EOPNOTSUPP])
def test_a_nic_that_answers_again_is_read_on(nics: Nics, code: int) -> None:
    """What has answered once is not taken for unsupported."""
    nics.add("eth0", MLX5)
    with Reader(nics) as reader:
        reader.read(NOW)
        nics.add("eth0", MLX5, errno=code)
        busy = reader.read(NOW + 1)
        nics.add("eth0", MLX5)
        again = reader.read(NOW + 2)
    assert (busy.points, busy.errors, again.errors) == ([], 1, 1)
    assert again.fields("eth0")["rx_prio3_pause"] == 7


def test_a_nic_of_another_network_namespace_is_not_there_and_is_no_error(nics: Nics) -> None:
    nics.add("eth0", MLX5)
    nics.add("eth1", MLX5)
    (nics.environment()["ETHTOOL_DIR"] / Path("eth1")).unlink()  # /sys shows it, the ioctl says ENODEV
    with Reader(nics) as reader:
        reads = [reader.read(NOW + tick) for tick in range(12)]
    assert (reads[-1].interfaces(), reads[-1].errors) == ({"eth0"}, 0)


def test_counters_beyond_63_bits_are_sent_modulo_2_to_the_63(nics: Nics) -> None:
    nics.add("eth0", f"rx_prio3_pause: {2**64 - 1}\ntx_prio3_pause: {2**63 + 5}\n")
    with Reader(nics) as reader:
        assert reader.read(NOW).fields("eth0") == {"rx_prio3_pause": 2**63 - 1, "tx_prio3_pause": 5}


def test_odd_names_of_interfaces_and_devices_and_a_driver_that_says_no_name_are_survived(nics: Nics) -> None:  # A53
    nics.add("mlx5_bond_1", MLX5)
    nics.add("ibp142s0", MLX5, driver=" ")
    nics.add("odd\\", MLX5)
    nics.add("h\udcffgh", MLX5)
    with Reader(nics) as reader:
        reads = [reader.read(NOW + tick) for tick in range(3)]
    assert all(read.interfaces() == {"mlx5_bond_1", "ibp142s0"} for read in reads)


def test_what_is_counted_by_the_hundred_is_bounded(nics: Nics) -> None:  # A109
    for number in range(100):
        nics.add(f"eth{number}", MLX5, pci=f"0000:{number:02x}:00.0")
    with Reader(nics) as reader:
        assert len(reader.read(NOW).interfaces()) == 64


def test_requests_of_5_ms_leave_most_of_a_second_with_eight_nics(nics: Nics) -> None:
    for number in range(8):
        nics.add(f"eth{number}", MLX5, pci=f"0000:{number:02x}:00.0")
    with Reader(nics, delay_us=5000) as reader:
        reader.read(NOW)
        began = time.monotonic()
        reader.read(NOW + 1)
    assert 0.04 <= time.monotonic() - began < 0.5  # eight requests, and one of them slow


@pytest.mark.parametrize(
    ("corpus", "stated"),
    [
        (
            "ethq-mlx5_core.txt",  # a ConnectX-4 Lx: a firmware that counts no priorities' pause
            {
                **dict.fromkeys(("rx_pause_ctrl_phy", "tx_pause_ctrl_phy", "rx_global_pause", "tx_global_pause"), 0),
                **dict.fromkeys(("rx_global_pause_duration", "tx_global_pause_duration"), 0),
                "rx_global_pause_transition": 0,
                **dict.fromkeys(("rx_discards_phy", "tx_discards_phy", "rx_out_of_buffer", "tx_queue_dropped"), 0),
                **dict.fromkeys(("rx_buffer_passed_thres_phy", "rx_buff_alloc_err", "rx_wqe_err"), 0),
                **dict.fromkeys(("rx_vport_rdma_unicast_packets", "rx_vport_rdma_unicast_bytes"), 0),
                **dict.fromkeys(("tx_vport_rdma_unicast_packets", "tx_vport_rdma_unicast_bytes"), 0),
                **dict.fromkeys(("rx_pcs_symbol_err_phy", "rx_symbol_err_phy", "rx_crc_errors_phy"), 0),
                **dict.fromkeys(("rx_corrected_bits_phy", "link_down_events_phy"), 0),
                **dict.fromkeys(("module_unplug", "module_bus_stuck", "module_high_temp", "module_bad_shorted"), 0),
                "rx_pci_signal_integrity": 0,
                "tx_pci_signal_integrity": 34,
                **dict.fromkeys(("outbound_pci_stalled_rd", "outbound_pci_stalled_wr"), 0),
                **dict.fromkeys(("outbound_pci_stalled_rd_events", "outbound_pci_stalled_wr_events"), 0),
            },
        ),
        # An older driver of AWS: no allowances yet. Its admin_q_pause is a queue that waits, not a pause frame.
        ("ethq-ena.txt", {"tx_timeout": 0, "wd_expired": 0}),
    ],
)
def test_of_real_output_exactly_these_values_are_taken(nics: Nics, corpus: str, stated: dict[str, int]) -> None:
    if not (CORPUS / corpus).exists():
        pytest.skip(f"no ../shared/corpora/sysfs/{corpus}")
    nics.add("eth0", (CORPUS / corpus).read_text())
    with Reader(nics) as reader:
        assert reader.read(NOW).fields("eth0") == stated


def test_every_counter_of_the_contract_is_one_that_is_taken() -> None:
    taken = choose(strings(*SCHEMA["ethtool"].fields), ["fast", "slow"]).names
    fast = choose(strings(*SCHEMA["ethtool"].fields), ["fast"]).names
    assert set(taken) == set(SCHEMA["ethtool"].fields)
    assert set(fast) == {field.name for field in SCHEMA["ethtool"].fields.values() if field.cadence == "fast"}


# A pair of virtual interfaces in a network namespace of its own: each knows the other's number.
VETH = """\
import struct, subprocess, sys
from pathlib import Path
from diagnosd.collectors.ethtool import Ethtool, Selection
from diagnosd.collectors.machine import Machine
subprocess.run("ip link add one type veth peer name two", shell=True, check=True)
device = Path(sys.argv[1]) / "class/net/one/device"
device.parent.mkdir(parents=True)
device.symlink_to("../../../0000:19:00.0")
ethtool = Ethtool(Machine("n01", sys=Path(sys.argv[1])))
assert ethtool.read(1) == []
(nic,) = ethtool._nics.values()
names = [name.strip(bytes(1)).decode() for name in ethtool._strings(nic)]
nic.count = len(names)
print(nic.series.tag("driver"), ethtool.errors, nic.supported, ethtool.missing is None)
print(ethtool._fields(nic, Selection.of({"peer_ifindex": names.index("peer_ifindex")}))["peer_ifindex"])
nic.count -= 1  # outdated
print(ethtool._fields(nic, Selection.of({"peer_ifindex": 0})), nic.count)
print(Path("/proc/net/dev_snmp6/two").read_text().split()[1])
"""


def test_the_kernel_answers_the_requests_as_the_stand_in_does(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root may make interfaces")
    command = ["unshare", "--net", sys.executable, "-c", VETH, str(tmp_path)]
    driver, peer, outdated, two = subprocess.run(
        command, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert driver == "veth 0 False False"  # it counts nothing that is wanted
    assert peer == two
    assert outdated == "{} 0"


def test_the_kernel_of_this_machine_is_asked_and_refuses_nothing() -> None:
    """Whatever NICs there are here: at worst their drivers count nothing that is wanted."""
    ethtool = Ethtool(Machine("n01"))
    for tick in range(3):
        for point in ethtool.read(NOW + tick):
            assert point.series.tag("driver")
    assert ethtool.errors == 0
    ethtool.close()


def test_a_captured_machine_has_no_driver_to_ask(tmp_path: Path) -> None:
    nics = Nics(tmp_path)
    nics.add("lo", MLX5)
    assert Ethtool(captured("n01", tmp_path)).read(NOW) == []  # lo would answer
