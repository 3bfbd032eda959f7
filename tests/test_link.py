"""Links of RDMA ports: their state and their downs, what the inventory tells of them, and what ibstat says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnosd.collectors.ibstat import DEADLINE_S, Ibstat, Port, parse
from diagnosd.collectors.link import CLOSE_S, REPEAT_S, Link
from diagnosd.collectors.machine import Machine
from diagnosd.collectors.nics import Nics
from diagnosd.collectors.rdma import numbered, rate
from diagnosd.documents import decode_node
from diagnosd.point import Point, Series, Value, encode
from diagnosd.schema import SCHEMA
from hca import hca, hcas, interface, link, pci, write

NOW = 1_700_000_000_000_000_000
SECOND = 1_000_000_000
CORPORA = Path(__file__).parents[2] / "shared/corpora"
corpus = pytest.mark.skipif(not CORPORA.is_dir(), reason=f"no real inputs at {CORPORA}")


def machine(sys: Path, *exclude: str) -> Machine:
    return Machine("n01", sys=sys, live=False, exclude=exclude)


def port(sys: Path, device: str = "mlx5_0", number: int = 1) -> Path:
    return sys / "class/infiniband" / device / "ports" / str(number)


def over(collector: Link, seconds: int, start: int = 0) -> list[Point]:
    return [each for second in range(start, start + seconds) for each in collector.read(NOW + second * SECOND)]


def states(points: list[Point], device: str = "mlx5_0", number: str = "1") -> list[dict[str, Value]]:
    return [
        each.fields
        for each in points
        if (each.series.measurement, each.series.tag("device"), each.series.tag("port"))
        == ("diagnosd_link", device, number)
    ]


def events(points: list[Point]) -> list[tuple[str | None, str | None]]:
    return [(each.series.tag("kind"), each.series.tag("subject")) for each in points if "text" in each.fields]


def texts(points: list[Point]) -> list[Value]:
    return [each.fields["text"] for each in points if "text" in each.fields]


def down(base: Path, state: str = "1: DOWN", phys_state: str = "2: Polling", speed: str = "10 Gb/sec (4X)") -> None:
    write(base, {"state": state, "phys_state": phys_state, "rate": speed})


def up(base: Path, speed: str = "400 Gb/sec (4X NDR)") -> None:
    write(base, {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": speed})


def flap(sys: Path, netdev: str, times: int = 1) -> None:
    """Each down and each up is a change of the carrier."""
    changes = sys / "class/net" / netdev / "carrier_changes"
    changes.write_text(f"{int(changes.read_text()) + 2 * times}\n")


# -- state -----------------------------------------------------------------------------------------------------------


def test_a_port_s_state_in_the_contract_s_units(tmp_path: Path) -> None:
    (told,) = Link(machine(hcas(tmp_path, 1))).read(NOW)
    assert told.series.key == "diagnosd_link,device=mlx5_0,host=n01,port=1"
    assert told.fields == {
        "state": 4, "phys_state": 5, "rate": 400_000_000_000, "width": 4, "mtu": 4092, "carrier_changes": 2,
    }  # fmt: skip
    assert set(told.fields) <= set(SCHEMA["diagnosd_link"].fields)


def test_state_is_told_at_first_every_minute_and_when_it_changes(tmp_path: Path) -> None:
    collector = Link(machine(hcas(tmp_path, 8)))
    assert len(over(collector, REPEAT_S)) == 8
    assert len(over(collector, REPEAT_S, REPEAT_S)) == 8
    over(collector, 5, 2 * REPEAT_S)
    write(port(tmp_path, "mlx5_3"), {"state": "2: INIT"})
    changed, event = collector.read(NOW + (2 * REPEAT_S + 5) * SECOND)
    assert (changed.series.tag("device"), changed.fields["state"]) == ("mlx5_3", 2)
    assert event.fields["text"] == "mlx5_3 port 1 is INIT"


def test_a_collector_that_may_read_once_a_minute_tells_the_state_each_time(tmp_path: Path) -> None:
    """Where a sick device makes reads dear: a reader of the points holds a state for 90 s."""
    collector = Link(machine(hcas(tmp_path, 2)))
    assert [len(collector.read(NOW + minute * 60 * SECOND)) for minute in range(3)] == [2, 2, 2]


@pytest.mark.parametrize(
    ("said", "gbps", "width", "speed"),
    [
        ("400 Gb/sec (4X NDR)", 400.0, 4, "NDR"),
        ("800 Gb/sec (4X XDR)", 800.0, 4, "XDR"),
        ("200 Gb/sec (2X NDR)", 200.0, 2, "NDR"),
        ("25 Gb/sec (1X EDR)", 25.0, 1, "EDR"),
        ("2.5 Gb/sec (1X SDR)", 2.5, 1, "SDR"),
        ("10 Gb/sec (4X)", 10.0, 4, None),
        ("40 Gb/sec (4X FDR10)", 40.0, 4, "FDR10"),
        ("100 Gb/sec", 100.0, None, None),
    ],
)
def test_a_rate_as_the_kernel_writes_it(said: str, gbps: float, width: int | None, speed: str | None) -> None:
    assert rate(said) == (gbps, width, speed)


@pytest.mark.parametrize(
    "said", ["", "0 Gb/sec (4X SDR)", "N/A", "-1 Gb/sec", "Gb/sec (4X NDR)", "1" * 400 + " Gb/sec"]
)
def test_what_is_no_rate_is_none(said: str) -> None:
    assert rate(said) is None


def test_a_port_that_is_down_has_no_rate(tmp_path: Path) -> None:  # A56
    down(port(hcas(tmp_path, 1)))
    (told,) = Link(machine(tmp_path)).read(NOW)
    assert (told.fields["state"], told.fields["phys_state"]) == (1, 2)
    assert not {"rate", "width"} & set(told.fields)
    (nic,) = Nics(machine(tmp_path)).read()
    assert (nic["state"], nic["phys_state"]) == ("DOWN", "Polling")
    assert not {"rate_gbps", "width", "speed"} & set(nic)


# -- events ----------------------------------------------------------------------------------------------------------


def test_a_link_that_goes_and_comes_is_told_once_each(tmp_path: Path) -> None:
    base = port(hcas(tmp_path, 2))
    collector = Link(machine(tmp_path))
    assert events(over(collector, 5)) == []
    down(base)
    assert events(over(collector, 30, 5)) == [("link_down", "nic:n01/mlx5_0/1")]
    write(base, {"state": "2: INIT", "phys_state": "5: LinkUp"})
    assert events(over(collector, 5, 35)) == []
    up(base, "200 Gb/sec (4X HDR)")
    points = over(collector, 30, 40)
    assert events(points) == [("link_up", "nic:n01/mlx5_0/1")]
    assert states(points)[0]["rate"] == 200_000_000_000, "the rate is read again: it may have come back slower"


def test_a_port_that_never_was_up_is_silent(tmp_path: Path) -> None:  # A55
    hcas(tmp_path, 12)
    for number in range(4):
        down(port(tmp_path, f"mlx5_{number}"), phys_state="3: Disabled", speed="40 Gb/sec (4X QDR)")
    collector = Link(machine(tmp_path))
    points = over(collector, 90)
    assert events(points) == []
    assert {each["state"] for each in states(points, "mlx5_2")} == {1}, "its state is told all the same"
    up(port(tmp_path, "mlx5_0"))
    assert events(over(collector, 5, 90)) == []
    down(port(tmp_path, "mlx5_0"))
    assert events(over(collector, 5, 95)) == [("link_down", "nic:n01/mlx5_0/1")]


def test_after_a_restart_a_port_that_is_down_is_told_as_down_at_once(tmp_path: Path) -> None:  # A59
    collector = Link(machine(hcas(tmp_path, 1)))
    over(collector, 3)
    down(port(tmp_path))
    over(collector, 3, 3)
    restarted = Link(machine(tmp_path))
    (told,) = restarted.read(NOW + 6 * SECOND)
    assert told.fields["state"] == 1


@pytest.mark.parametrize("times", [1, 3])
def test_a_flap_between_two_looks_is_told_with_its_count(times: int, tmp_path: Path) -> None:  # A60
    collector = Link(machine(hcas(tmp_path, 2)))
    over(collector, 12)
    flap(tmp_path, "ib0", times)
    points = over(collector, 12, 12)
    assert events(points) == [("link_down", "nic:n01/mlx5_0/1"), ("link_up", "nic:n01/mlx5_0/1")]
    assert [each.fields.get("value") for each in points if "text" in each.fields] == [float(times), None]
    assert "carrier_changes of ib0" in str(texts(points)[0])
    assert states(points)[0]["carrier_changes"] == 2 + 2 * times


def test_a_port_without_an_interface_tells_its_flaps_by_link_downed(tmp_path: Path) -> None:  # A60
    base = port(hcas(tmp_path, 1))
    shutil.rmtree(tmp_path / "class/net")
    (base / "gid_attrs/ndevs/0").unlink()
    collector = Link(machine(tmp_path))
    over(collector, 12)
    write(base / "counters", {"link_downed": 3})
    points = over(collector, 30, 12)
    assert events(points) == [("link_down", "nic:n01/mlx5_0/1"), ("link_up", "nic:n01/mlx5_0/1")]
    assert texts(points)[0] == "mlx5_0 port 1 went down 2 times between two looks, by link_downed"


@pytest.mark.parametrize("late", [0, CLOSE_S], ids=["counted at once", "counted later"])
@pytest.mark.parametrize("second", range(10, 20))
def test_a_down_that_was_seen_is_not_told_again_by_its_count(second: int, late: int, tmp_path: Path) -> None:
    """Whatever the order in which state, carrier and counter are looked at."""
    base = port(hcas(tmp_path, 1))
    collector = Link(machine(tmp_path))
    points = over(collector, second)
    down(base)
    points += over(collector, 1 + late, second)
    write(base / "counters", {"link_downed": 2})
    points += over(collector, 3, second + late + 1)
    up(base)
    flap(tmp_path, "ib0")
    points += over(collector, 40, second + late + 4)
    assert events(points) == [("link_down", "nic:n01/mlx5_0/1"), ("link_up", "nic:n01/mlx5_0/1")]


def test_a_saturated_link_downed_says_nothing(tmp_path: Path) -> None:  # A48
    base = port(hcas(tmp_path, 1))
    write(base / "counters", {"link_downed": 254})
    collector = Link(machine(tmp_path))
    over(collector, 12)
    write(base / "counters", {"link_downed": 255})
    assert events(over(collector, 30, 12)) == []


def test_a_carrier_that_changes_once_is_no_flap(tmp_path: Path) -> None:
    collector = Link(machine(hcas(tmp_path, 1)))
    over(collector, 3)
    write(tmp_path / "class/net/ib0", {"carrier_changes": 3})
    assert events(over(collector, 15, 3)) == []


def test_the_other_port_of_an_adapter_is_healthy(tmp_path: Path) -> None:  # A63
    base = port(hcas(tmp_path, 1))
    shutil.copytree(base, base.with_name("2"))
    interface(tmp_path, "ib1", tmp_path / "bus/pci/devices/0000:10:00.0", kind=32)
    write(base.with_name("2"), {"gid_attrs/ndevs/0": "ib1"})
    collector = Link(machine(tmp_path))
    over(collector, 3)
    down(base)
    points = over(collector, 20, 3)
    assert events(points) == [("link_down", "nic:n01/mlx5_0/1")]
    assert states(points)[0]["state"] == 1
    assert states(points, number="2") == []


def test_a_device_that_goes_is_one_event_and_its_return_another(tmp_path: Path) -> None:
    collector = Link(machine(hcas(tmp_path, 2)))
    over(collector, 3)
    shutil.rmtree(tmp_path / "class/infiniband/mlx5_1/ports")
    points = over(collector, 40, 3)
    assert events(points) == [("link_down", "nic:n01/mlx5_1/1")]
    assert texts(points) == ["mlx5_1 port 1 is gone"]
    assert states(over(collector, 2 * REPEAT_S, 43), "mlx5_1") == []
    hca(tmp_path, 1)
    points = over(collector, 20, 200)
    assert events(points) == [("link_up", "nic:n01/mlx5_1/1")]
    assert states(points, "mlx5_1")[0]["state"] == 4


def test_a_device_that_is_a_link_to_itself_hides_no_other(tmp_path: Path) -> None:
    (hcas(tmp_path, 1) / "class/infiniband/mlx5_1").symlink_to("mlx5_1")
    collector = Link(machine(tmp_path))
    assert states(over(collector, 1))[0]["state"] == 4
    assert collector.errors == 0
    assert [nic["device"] for nic in Nics(machine(tmp_path)).read()] == ["mlx5_0"]


def test_a_device_that_goes_and_never_was_up_is_a_change_and_no_fault(tmp_path: Path) -> None:
    down(port(hcas(tmp_path, 1)))
    collector = Link(machine(tmp_path))
    over(collector, 3)
    shutil.rmtree(tmp_path / "class/infiniband/mlx5_0/ports")
    assert events(over(collector, 40, 3)) == [("config_change", "nic:n01/mlx5_0/1")]


def test_events_of_one_read_have_times_of_their_own(tmp_path: Path) -> None:
    collector = Link(machine(hcas(tmp_path, 8)))
    over(collector, 3)
    for number in range(8):
        down(port(tmp_path, f"mlx5_{number}"))
    told = [each for each in collector.read(NOW + 3 * SECOND) if "text" in each.fields]
    assert len(told) == len({each.time for each in told}) == 8


def test_a_state_that_cannot_be_read_is_unknown_and_no_down(tmp_path: Path) -> None:
    base = port(hcas(tmp_path, 2))
    collector = Link(machine(tmp_path))
    over(collector, 3)
    (base / "state").write_text("")
    points = over(collector, 3, 3)
    assert events(points) == []
    assert "state" not in states(points)[-1]
    up(base)
    assert states(over(collector, 15, 6))[-1]["state"] == 4
    assert len(states(over(collector, 60, 21), "mlx5_1")) == 1


# -- bonds, namespaces, functions -------------------------------------------------------------------------------------


def bonded(sys: Path) -> Path:
    """A BlueField's two ports as one RDMA device over bond0."""
    base = hca(sys, 0, device="mlx5_bond_0", netdev="eth0", link_layer="Ethernet")
    other = pci(sys, 1)
    interface(sys, "eth1", other)
    write(base, {"gid_attrs/ndevs/0": "bond0", "rate": "200 Gb/sec (2X NDR)"})
    write(
        sys / "class/net/bond0", {"bonding/slaves": "eth0 eth1", "operstate": "up", "mtu": 9000, "carrier_changes": 2}
    )
    for name in ("eth0", "eth1"):
        write(sys / "class/net" / name, {"bonding_slave/mii_status": "up"})
        link(sys / "class/net" / name / "master", sys / "class/net/bond0")
    return base


def test_a_bond_that_loses_a_member_stays_up_and_says_so(tmp_path: Path) -> None:  # A54
    bonded(tmp_path)
    collector = Link(machine(tmp_path))
    (before,) = states(over(collector, 12), "mlx5_bond_0")
    assert (before["members"], before["members_up"], before["state"], before["mtu"]) == (2, 2, 4, 9000)
    write(tmp_path / "class/net/eth1", {"bonding_slave/mii_status": "down"})
    points = over(collector, 12, 12)
    assert events(points) == [("link_down", "nic:n01/eth1")]
    assert texts(points) == ["eth1 of bond0 (mlx5_bond_0 port 1) is down: 1 of 2 carry"]
    assert (states(points, "mlx5_bond_0")[0]["members_up"], states(points, "mlx5_bond_0")[0]["state"]) == (1, 4)
    (nic,) = Nics(machine(tmp_path)).read()
    assert nic["netdev"] == "bond0"
    assert nic["members"] == [{"netdev": "eth0", "state": "ACTIVE"}, {"netdev": "eth1", "state": "DOWN"}]


def test_a_bond_is_found_without_a_gid_too(tmp_path: Path) -> None:  # A54
    (bonded(tmp_path) / "gid_attrs/ndevs/0").unlink()
    (nic,) = Nics(machine(tmp_path)).read()
    assert nic["netdev"] == "bond0"


def test_a_nic_in_another_network_namespace_is_known_as_such(tmp_path: Path) -> None:  # A66
    hcas(tmp_path, 3, link_layer="Ethernet")
    for number in (0, 1):
        shutil.rmtree(tmp_path / f"class/net/eth{number}", ignore_errors=True)
        (tmp_path / f"class/net/eth{number}").unlink(missing_ok=True)
    (port(tmp_path, "mlx5_1") / "gid_attrs/ndevs/0").unlink()
    nics = Nics(machine(tmp_path)).read()
    assert [(nic.get("netdev"), nic.get("netns")) for nic in nics] == [
        ("eth0", "other"), (None, "other"), ("eth2", None),
    ]  # fmt: skip
    (told, *_) = Link(machine(tmp_path)).read(NOW)
    assert "carrier_changes" not in told.fields
    assert told.fields["state"] == 4


def test_a_virtual_function_names_its_physical_one(tmp_path: Path) -> None:  # A55
    base = hca(tmp_path, 1, device="mlx5_1")
    down(base)
    link(tmp_path / "bus/pci/devices/0000:11:00.0/physfn", pci(tmp_path, 0))
    (nic,) = Nics(machine(tmp_path)).read()
    assert (nic["pci"], nic["physfn"]) == ("0000:11:00.0", "0000:10:00.0")


def test_the_inventory_of_a_port(tmp_path: Path) -> None:
    nics = Nics(machine(hcas(tmp_path, 5))).read()
    assert nics[4] == {
        "device": "mlx5_4", "port": 1, "netdev": "ib4", "link_layer": "InfiniBand", "state": "ACTIVE",
        "phys_state": "LinkUp", "rate_gbps": 400.0, "width": 4, "speed": "NDR", "mtu": 4092, "pci": "0000:14:00.0",
        "firmware": "28.39.1002", "driver": "mlx5_core", "node_guid": "0x946dae0300cd0004",
        "port_guid": "0x946dae0300cd0004", "lid": 79, "sm_lid": 334,
    }  # fmt: skip
    inventory = decode_node(json.dumps({"nics": nics}))
    assert inventory.nics
    assert inventory.nics[4].rate_gbps == 400.0


@pytest.mark.parametrize(("said", "lid"), [("0x0", None), ("0xffff", None), ("0xbfff", 0xBFFF), ("0xc000", None)])
def test_a_lid_that_no_subnet_manager_has_given_is_none(tmp_path: Path, said: str, lid: int | None) -> None:
    write(port(hcas(tmp_path, 1)), {"lid": said})
    assert Nics(machine(tmp_path)).read()[0].get("lid") == lid


def test_the_gids_of_a_roce_port_are_read_again_each_time(tmp_path: Path) -> None:  # A61
    """NCCL is given the index of one; a flap has moved it from 3 to 5."""
    base = port(hcas(tmp_path, 1, link_layer="Ethernet"))
    nics = Nics(machine(tmp_path))
    (nic,) = nics.read()
    assert nic["gids"] == [{"index": 0, "type": "IB/RoCE v1"}, {"index": 1, "type": "RoCE v2"}]
    assert not {"lid", "sm_lid"} & set(nic)
    (base / "gid_attrs/types/1").unlink()
    write(base, {"gid_attrs/types/5": "RoCE v2"})
    (nic,) = nics.read()
    assert nic["gids"] == [{"index": 0, "type": "IB/RoCE v1"}, {"index": 5, "type": "RoCE v2"}]


def test_a_port_that_is_active_though_its_interface_is_down_is_told_as_both(tmp_path: Path) -> None:  # A61
    hcas(tmp_path, 1)
    write(tmp_path / "class/net/ib0", {"operstate": "down", "carrier": "", "speed": ""})
    (told,) = Link(machine(tmp_path)).read(NOW)
    assert (told.fields["state"], told.fields["carrier_changes"]) == (4, 2)


# -- ibstat ----------------------------------------------------------------------------------------------------------

SICK = "ibpanic: [7] main: stat of IB device 'mlx5_8' failed: No such file or directory"


def ca(device: str, state: str = "Active", phys_state: str = "LinkUp", speed: int = 400) -> str:
    return f"""\
CA '{device}'
	CA type: MT4129
	Number of ports: 1
	Firmware version: 28.39.1002
	Hardware version: 0
	Node GUID: 0x946dae0300cde72c
	System image GUID: 0x946dae0300cde72c
	Port 1:
		State: {state}
		Physical state: {phys_state}
		Rate: {speed}
		Base lid: 75
		LMC: 0
		SM lid: 334
		Capability mask: 0xa751e848
		Port GUID: 0x946dae0300cde72d
		Link layer: InfiniBand
"""


def tool(folder: Path, script: str, name: str = "ibstat") -> str:
    """A program in a folder; returns the PATH that finds it, and the shell."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    return f"{folder}:/bin:/usr/bin"


def hidden(sys: Path, path: str, again_s: float = 0.0) -> tuple[Link, Nics]:
    """A container that sees no /sys/class/infiniband and has the tools."""
    return Link(machine(sys), Ibstat(path, again_s=again_s)), Nics(machine(sys), Ibstat(path, again_s=again_s))


def test_where_sysfs_is_hidden_ibstat_is_the_source(tmp_path: Path) -> None:
    (tmp_path / "said").write_text(ca("mlx5_0") + ca("mlx5_1", "Down", "Polling", 10))
    collector, nics = hidden(tmp_path, tool(tmp_path / "bin", f"cat {tmp_path}/said"))
    points = over(collector, 5)
    assert states(points) == [{"state": 4, "phys_state": 5, "rate": 400_000_000_000}]
    assert states(points, "mlx5_1") == [{"state": 1, "phys_state": 2}]
    assert nics.read()[0] == {
        "device": "mlx5_0", "port": 1, "link_layer": "InfiniBand", "state": "ACTIVE", "phys_state": "LinkUp",
        "rate_gbps": 400.0, "firmware": "28.39.1002", "node_guid": "0x946dae0300cde72c",
        "port_guid": "0x946dae0300cde72d", "lid": 75, "sm_lid": 334,
    }  # fmt: skip
    (tmp_path / "said").write_text(ca("mlx5_0", "Down", "Polling", 10) + ca("mlx5_1", "Down", "Polling", 10))
    assert events(over(collector, CLOSE_S, 5)) == [("link_down", "nic:n01/mlx5_0/1")]
    assert collector.missing is None


def test_what_ibstat_printed_before_it_died_is_used_and_its_last_words_are_kept(tmp_path: Path) -> None:  # A57
    (tmp_path / "said").write_text("".join(ca(f"mlx5_{number}") for number in range(8)) + SICK + "\n")
    collector, nics = hidden(tmp_path, tool(tmp_path / "bin", f"cat {tmp_path}/said >&2; exit 255"))
    assert len(over(collector, 1)) == len(nics.read()) == 8
    assert collector.missing == nics.missing == f"ibstat: exited with 255: {SICK}"


def test_a_port_of_which_the_tool_says_nothing_any_more_is_unknown_and_not_down(tmp_path: Path) -> None:  # A57
    (tmp_path / "said").write_text(ca("mlx5_0") + ca("mlx5_1"))
    collector, _ = hidden(tmp_path, tool(tmp_path / "bin", f"cat {tmp_path}/said"))
    over(collector, 3)
    (tmp_path / "said").write_text(ca("mlx5_0"))
    assert events(over(collector, 30, 3)) == []


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, "neither ibstat nor ibstatus is installed"),
        ("true", "ibstat knows none either"),
        ("echo ibpanic >&2; exit 255", "ibstat: exited with 255: ibpanic"),
        ("echo CA; echo Port; echo State: Active", "ibstat knows none either"),
    ],
)
def test_no_answer_is_unknown_and_said(script: str | None, said: str, tmp_path: Path) -> None:  # A58
    path = tool(tmp_path / "bin", script) if script else str(tmp_path)
    path = path.replace(":/usr/bin", "") if shutil.which("ibstat", path="/bin:/usr/bin") else path
    collector, nics = hidden(tmp_path, path)
    assert over(collector, 2) == []
    assert nics.read() == []
    looked = f"no RDMA device here ({tmp_path}/class/infiniband is not there; {said})"
    assert collector.missing == nics.missing == looked


def test_that_both_tools_know_no_device_is_said_in_few_words(tmp_path: Path) -> None:
    path = tool(tmp_path / "bin", "true")
    tool(tmp_path / "bin", "echo 'Fatal error:  No devices' >&2; exit 255", "ibstatus")
    collector, _ = hidden(tmp_path, path)
    over(collector, 1)
    looked = f"{tmp_path}/class/infiniband is not there; ibstat and ibstatus know none either"
    assert collector.missing == f"no RDMA device here ({looked})"


def test_ibstatus_is_asked_where_ibstat_fails(tmp_path: Path) -> None:  # A57
    path = tool(tmp_path / "bin", "exit 1")
    (tmp_path / "said").write_text("Infiniband device 'mlx5_0' port 1 status:\n\tstate:\t\t 4: ACTIVE\n")
    tool(tmp_path / "bin", f"cat {tmp_path}/said", "ibstatus")
    assert [(each.device, each.state) for each in Ibstat(path).read()] == [("mlx5_0", (4, "ACTIVE"))]


@pytest.mark.parametrize("then", ["sleep 60", "exec sleep 60", "trap '' TERM; sleep 60", "yes"])
def test_a_tool_that_does_not_end_is_ended_and_what_it_printed_is_used(then: str, tmp_path: Path) -> None:  # A65
    (tmp_path / "said").write_text(ca("mlx5_0"))
    ibstat = Ibstat(tool(tmp_path / "bin", f"cat {tmp_path}/said; {then}"))
    before = os.times().elapsed
    (only,) = ibstat.read()
    assert os.times().elapsed - before < 3 * DEADLINE_S
    assert (only.device, only.gbps, ibstat.said) == ("mlx5_0", 400.0, f"ibstat: no end after {DEADLINE_S:g} s")


def test_the_tools_are_asked_once_a_minute_at_most(tmp_path: Path) -> None:
    ibstat = Ibstat(tool(tmp_path / "bin", f"echo x >> {tmp_path}/times"))
    for _ in range(5):
        ibstat.read()
    assert (tmp_path / "times").read_text() == "x\n"


def test_an_excluded_device_is_left_out_of_what_ibstat_tells(tmp_path: Path) -> None:
    (tmp_path / "said").write_text(ca("mlx5_0") + ca("mlx5_1"))
    path = tool(tmp_path / "bin", f"cat {tmp_path}/said")
    here = Machine("n01", sys=tmp_path, live=False, exclude=("mlx5_0",))
    assert [nic["device"] for nic in Nics(here, Ibstat(path)).read()] == ["mlx5_1"]
    assert {each.series.tag("device") for each in over(Link(here, Ibstat(path)), 2)} == {"mlx5_1"}


def test_a_captured_machine_is_not_asked_what_this_one_s_tools_say(tmp_path: Path) -> None:
    nics = Nics(machine(tmp_path))
    assert nics.read() == []
    assert nics.missing == f"no RDMA device here ({tmp_path}/class/infiniband is not there)"


def test_a_machine_without_rdma_says_where_it_was_looked_for_and_is_looked_at_again_later(
    tmp_path: Path,
) -> None:  # A42
    collector = Link(machine(tmp_path))
    assert over(collector, 2 * CLOSE_S) == []
    assert collector.missing == f"no RDMA device here ({tmp_path}/class/infiniband is not there)"
    assert collector.errors == 0
    hcas(tmp_path, 1)
    assert len(states(over(collector, CLOSE_S + 1, 2 * CLOSE_S))) == 1
    assert collector.missing is None


def test_an_interface_that_is_made_anew_counts_its_changes_anew(tmp_path: Path) -> None:
    """A driver that is loaded again: its changes start at 1, and no flap is made of them."""
    collector = Link(machine(hcas(tmp_path, 1)))
    write(tmp_path / "class/net/ib0", {"carrier_changes": 900})
    over(collector, 3)
    changes = (tmp_path / "class/net/ib0").resolve() / "carrier_changes"
    changes.unlink()
    over(collector, 2 * CLOSE_S, 3)
    changes.write_text("1\n")
    points = over(collector, 2 * REPEAT_S, 3 + 2 * CLOSE_S)
    assert events(points) == []


def test_an_empty_mount_is_told_from_a_missing_one(tmp_path: Path) -> None:  # A66
    (tmp_path / "class/infiniband").mkdir(parents=True)
    collector = Link(machine(tmp_path))
    over(collector, 1)
    assert collector.missing == f"no RDMA device here ({tmp_path}/class/infiniband is empty)"


@settings(max_examples=200, deadline=None)
@given(
    st.text(
        alphabet=st.sampled_from(list("CA 'mlx5_0'\n\t\\\x01:PortStae0123456789xABactive()Gb/secXNDR-é")), max_size=300
    )
)
def test_no_output_of_a_tool_raises(said: str) -> None:
    for text in (said, ca("mlx5_0") + said, ca(said), "Infiniband device 'x' port 1 status:\n" + said):
        assert all(Series.of("diagnosd_link", device=each.device) and each.nic() for each in parse(text))


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(
        st.one_of(st.binary(max_size=60), st.sampled_from([b"4: ACTIVE\n", b"5: LinkUp\n"])), min_size=9, max_size=9
    )
)
def test_whatever_stands_in_the_files_a_port_s_state_is_ints(
    texts: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = tmp_path_factory.getbasetemp() / "fuzzed"
    if not base.exists():
        hcas(base, 1)
    files = ["state", "phys_state", "rate", "link_layer", "lid", "gids/0", "gid_attrs/ndevs/0", "counters/link_downed"]
    for name, text in zip(files, texts, strict=False):
        (port(base) / name).write_bytes(text)
    (base / "class/net/ib0/carrier_changes").write_bytes(texts[-1])
    points = over(Link(machine(base)), 12)
    assert all(type(value) is int for fields in states(points) for value in fields.values())
    assert encode(points) is not None
    assert decode_node(json.dumps({"nics": Nics(machine(base)).read()})).nics


def test_a_state_s_number_and_word() -> None:
    assert numbered("4: ACTIVE") == (4, "ACTIVE")
    assert numbered("7: Phy Test") == (7, "Phy Test")
    assert numbered("0: <unknown>") == (0, "<unknown>")
    assert numbered("ACTIVE") is None
    assert numbered("9999: X") is None


# -- real inputs -----------------------------------------------------------------------------------------------------


@corpus
@pytest.mark.parametrize(
    ("file", "ports", "active", "rates", "layers"),
    [
        ("ibstat.47.0.a100.all.active.0", 9, 9, {200.0: 9}, {"Ethernet": 1, "InfiniBand": 8}),
        ("ibstat.47.0.h100.all.active.1", 12, 12, {400.0: 8, 100.0: 4}, {"Ethernet": 12}),
        ("ibstat.47.0.h100.some.down.0", 12, 9, {400.0: 8, 100.0: 1}, {"Ethernet": 4, "InfiniBand": 8}),
        ("ibstatus.39.0.a100.all.active.0", 9, 9, {200.0: 8, 40.0: 1}, {"InfiniBand": 8, "Ethernet": 1}),
    ],
)
def test_what_real_nodes_printed(
    file: str, ports: int, active: int, rates: dict[float, int], layers: dict[str, int]
) -> None:
    told = parse((CORPORA / "ib_tools" / file).read_text())
    assert len(told) == ports
    assert sum(each.state == (4, "ACTIVE") for each in told) == active
    assert {each.gbps: sum(other.gbps == each.gbps for other in told) for each in told if each.gbps} == rates
    assert {each.link_layer: sum(o.link_layer == each.link_layer for o in told) for each in told} == layers


@corpus
def test_a_real_ibstat_field_by_field() -> None:
    told = {each.device: each for each in parse((CORPORA / "ib_tools/ibstat.47.0.h100.some.down.0").read_text())}
    assert told["mlx5_0"] == Port(
        "mlx5_0", 1, (4, "ACTIVE"), (5, "LinkUp"), 400.0, None, None, "InfiniBand", 75, 334, "28.39.1002",
        "0x946dae0300cde72c", "0x946dae0300cde72c",
    )  # fmt: skip
    assert told["mlx5_2"] == Port(
        "mlx5_2", 1, (1, "DOWN"), (3, "Disabled"), None, None, None, "Ethernet", None, None, "22.38.1002",
        "0x946dae0300c2b691", "0x966daefffec2b691",
    )  # fmt: skip


@corpus
def test_a_real_ibstatus_field_by_field() -> None:
    first = parse((CORPORA / "ib_tools/ibstatus.39.0.a100.all.active.0").read_text())[0]
    assert first == Port(
        "mlx5_0", 1, (4, "ACTIVE"), (5, "LinkUp"), 200.0, 4, "HDR", "InfiniBand", 0x33BF, 1, None, None,
        "0x00155dfffd3411eb",
    )  # fmt: skip


@corpus
def test_the_links_of_the_h100_node_of_gpud(tmp_path: Path) -> None:
    with tarfile.open(CORPORA / "sysfs/gpud-sys-class-infiniband-h100.tar.gz") as archive:
        archive.extractall(tmp_path / "class/infiniband", filter="data")
    points = Link(machine(tmp_path)).read(NOW)
    shapes = [tuple(each.fields[name] for name in ("state", "phys_state", "rate", "width")) for each in points]
    assert shapes == [*[(4, 5, 400_000_000_000, 4)] * 8, (4, 5, 200_000_000_000, 2)]
    nics = Nics(machine(tmp_path)).read()
    assert [(nic["device"], nic["link_layer"], nic["speed"], nic["firmware"]) for nic in nics][-2:] == [
        ("mlx5_9", "InfiniBand", "NDR", "28.41.1000"), ("mlx5_bond_0", "Ethernet", "NDR", "32.38.3056"),
    ]  # fmt: skip


@corpus
def test_the_links_of_procfs(tmp_path: Path) -> None:
    with tarfile.open(CORPORA / "sysfs/procfs-infiniband.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    nics = Nics(machine(tmp_path / "fixtures/sys")).read()
    assert [(nic["device"], nic["port"], nic.get("rate_gbps"), nic.get("speed"), nic["firmware"]) for nic in nics] == [
        ("hfi1_0", 1, 100.0, "EDR", "1.27.0"),
        ("mlx4_0", 1, 40.0, "QDR", "2.31.5050"),
        ("mlx4_0", 2, 40.0, "QDR", "2.31.5050"),
        ("mlx5_0", 1, None, None, "14.28.2006"),  # its physical state says 4, which is not LinkUp
    ]


META = ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3", "mlx5_5", "mlx5_6", "mlx5_7", "mlx5_8"]


@corpus
@pytest.mark.parametrize(("name", "downed"), [("learn_good.json", None), ("learn_ib_intf_operstate_down.json", "ib4")])
def test_the_nodes_of_meta(name: str, downed: str | None, tmp_path: Path) -> None:
    """Eight ports ACTIVE at HDR; in one of the two an interface is down all the same, its carrier unreadable."""
    files = json.loads((CORPORA / "sysfs" / name).read_text())
    write(tmp_path, {path.lstrip("/"): text.rstrip("\n") for path, text in files.items()})
    sys = tmp_path / "sys"
    points = Link(machine(sys)).read(NOW)
    assert len(points) == 8
    assert {(each.fields["state"], each.fields["rate"], each.fields["width"]) for each in points} == {
        (4, 200_000_000_000, 4)
    }
    nics = Nics(machine(sys)).read()
    assert {(nic["state"], nic["speed"], nic["mtu"]) for nic in nics} == {("ACTIVE", "HDR", 2044)}
    assert sorted(str(nic["netdev"]) for nic in nics) == [f"ib{number}" for number in range(8)]
    down_now = [
        nic["netdev"]
        for nic in nics
        if (sys / f"bus/pci/devices/{nic['pci']}/net/{nic['netdev']}/operstate").read_text() == "down\n"
    ]
    assert down_now == ([downed] if downed else [])


# Debian's own ibstat over a false /sys, in a mount namespace of its own.
def _oracle() -> str | None:
    if shutil.which("ibstat", path="/usr/sbin:/usr/bin") is None:
        return "no ibstat (apt: infiniband-diags)"
    if os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        return "a mount namespace needs root"
    return None


def _real(tool: str, sys: Path) -> list[Port]:
    argv = ["unshare", "-m", "--propagation", "private", "sh", "-c", f'mount --bind "$0" /sys && exec {tool}', str(sys)]
    path = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    return parse(subprocess.run(argv, check=True, capture_output=True, text=True, env=path, timeout=20).stdout)


@pytest.mark.skipif(_oracle() is not None, reason=str(_oracle()))
@pytest.mark.parametrize("tool", ["ibstat", "ibstatus"])
def test_the_real_tools_read_our_trees_as_we_do(tool: str, tmp_path: Path) -> None:
    hcas(tmp_path, 3)
    hca(tmp_path, 3, link_layer="Ethernet")
    hca(tmp_path, 4, device="ibp142s0")
    down(port(tmp_path, "mlx5_1"), phys_state="3: Disabled", speed="40 Gb/sec (4X QDR)")
    write(port(tmp_path, "mlx5_2"), {"state": "2: INIT", "rate": "100 Gb/sec (2X HDR)", "lid": "0x0"})
    shutil.copytree(port(tmp_path), port(tmp_path, number=2))
    told = {(each.device, each.port): each.nic() for each in _real(tool, tmp_path)}
    ours: dict[tuple[Any, Any], dict[str, Any]] = {
        (nic["device"], nic["port"]): nic for nic in Nics(machine(tmp_path)).read()
    }
    assert set(told) == set(ours)
    assert len(told) == 6
    for key, nic in told.items():
        assert nic == {name: ours[key].get(name) for name in nic}
    assert told["mlx5_0", 1]["rate_gbps"] == 400.0
