"""What a machine is: PCI trees, network interfaces, what NVML told; the document of them, and the table for people."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from diagnosd import inventory as program
from diagnosd.cli import app
from diagnosd.collectors.machine import Machine, captured
from diagnosd.collectors.node import Node
from diagnosd.collectors.pci import Function, address, affinity, generation, width
from diagnosd.collectors.software import software
from diagnosd.documents import decode_node
from hca import hca, interface, link, write
from nvml.machine import Gpus

NOW = 1_700_000_000_000_000_000
ROOT = Path(__file__).parents[1]
CORPORA = ROOT.parent / "shared/corpora"
GOLDEN = Path(__file__).with_name("inventory") / "hgx.txt"
GEN5 = "32.0 GT/s PCIe"

needs_corpora = pytest.mark.skipif(not CORPORA.is_dir(), reason=f"{CORPORA} is not there")


def node(root: Path, told: Mapping[str, Any] | None = None, **machine: Any) -> Node:
    return Node(captured("n01", root)._replace(**machine), lambda: told or {}, dict)


def inventory(root: Path, told: Mapping[str, Any] | None = None, **machine: Any) -> dict[str, Any]:
    return node(root, told, **machine).inventory()


def bridge(root: Path, path: str, *, gen: str = GEN5, lanes: int = 16, **files: str | int) -> Path:
    """A port of the root or of a switch; returns its folder."""
    speeds = {
        f"{when}_link_{what}": value
        for when in ("current", "max")
        for what, value in (("speed", gen), ("width", lanes))
    }
    folder = write(root / "devices" / path, {"class": "0x060400", "vendor": "0x1000", **speeds, **files})
    link(root / "bus/pci/devices" / folder.name, folder)
    return folder


def gpu(root: Path, path: str, *, numa: int = 0, driver: str = "nvidia", **files: str | int) -> Path:
    speeds = {
        f"{when}_link_{what}": value for when in ("current", "max") for what, value in (("speed", GEN5), ("width", 16))
    }
    facts = {"class": "0x030200", "vendor": "0x10de", "device": "0x2330", "numa_node": numa, **speeds, **files}
    folder = write(root / "devices" / path, facts)
    link(root / "bus/pci/devices" / folder.name, folder)
    if driver:
        link(folder / "driver", write(root / "bus/pci/drivers" / driver, {"bind": ""}))
    return folder


def hgx(root: Path) -> dict[str, Any]:
    """Eight GPUs, two and two NICs behind each of four switches, two of these on each socket. Returns what NVML told.

    GPU 3 lacks an NVLink, GPU 5 idles, GPU 6 has a lowered limit; mlx5_1 is not cabled, mlx5_7 has old firmware; the
    last switch came up with half its lanes; eno1 is the board's own.
    """
    for switch in range(4):
        up = f"pci0000:{switch:x}0/0000:{switch:x}0:01.0"
        bridge(root, up, lanes=8 if switch == 3 else 16, max_link_width=16)
        up += f"/0000:{switch:x}1:00.0"
        bridge(root, up, lanes=8 if switch == 3 else 16, max_link_width=16)
        for half in range(2):
            index = 2 * switch + half
            above = f"{up}/0000:{switch:x}2:{half:02x}.0"
            bridge(root, above)
            gpu(root, f"{above}/0000:{0x18 + 8 * index:02x}:00.0", numa=switch // 2)
            above = f"{up}/0000:{switch:x}2:{half + 2:02x}.0"
            bridge(root, above)
            port = hca(root, index, above=f"devices/{above}")
            write(port.parents[3], {"numa_node": switch // 2})
            if index == 1:
                write(port, {"state": "1: DOWN", "phys_state": "2: Polling", "rate": "10 Gb/sec (4X SDR)"})
            if index == 7:
                write(port.parents[1], {"fw_ver": "28.36.1010"})
    eno1 = write(root / "devices/pci0000:00/0000:00:1f.0", {"class": "0x020000", "vendor": "0x8086", "numa_node": 0})
    link(root / "bus/pci/devices/0000:00:1f.0", eno1)
    interface(root, "eno1", eno1, speed=1000)
    write(
        root / "module", {"nvidia_peermem/refcnt": 0, "nvidia/version": "580.65.06", "mlx5_core/version": "24.10-1.1.4"}
    )
    write(root / "kernel/iommu_groups/1", {"type": "identity"})
    for folder in root.glob("bus/pci/devices/*"):
        link(folder.resolve() / "iommu_group", root / "kernel/iommu_groups/1")
    (root / "devices/system/node/node0").mkdir(parents=True)
    (root / "devices/system/node/node1").mkdir()
    threads = [(thread, thread // 112, thread % 112 // 2) for thread in range(224)]
    cpuinfo = "\n".join(f"processor\t: {t}\nphysical id\t: {s}\ncore id\t\t: {c}\n" for t, s, c in threads)
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build"
    write(
        root / "proc",
        {
            "cpuinfo": cpuinfo, "meminfo": "MemTotal:       2113413356 kB", "sys/kernel/osrelease": "6.8.0-48-generic",
            "sys/kernel/random/boot_id": "1f0c9d8e-0000-4000-8000-000000000001", "driver/nvidia/version": version,
        },
    )  # fmt: skip
    gpus = [
        {
            "index": index, "uuid": f"GPU-{index:08x}-1111-2222-3333-444444444444", "name": "NVIDIA H100 80GB HBM3",
            "pci": f"00000000:{0x18 + 8 * index:02X}:00.0", "nvlinks": 18, "nvlinks_active": 18,
            "nvlink_to": {"switch": 18}, "pcie_gen": 5, "pcie_gen_max": 5, "pcie_width": 16, "pcie_width_max": 16,
            "pcie_busy": True, "power_limit_w": 700.0, "power_limit_default_w": 700.0, "mig": False,
        }
        for index in range(8)
    ]  # fmt: skip
    gpus[3] |= {"nvlinks_active": 17, "nvlink_to": {"switch": 17}}
    gpus[5] |= {"pcie_gen": 1, "pcie_busy": False}
    gpus[6] |= {"power_limit_w": 500.0}
    return {
        "gpus": gpus,
        "fabric": {"state": "completed", "status": "success"},
        "software": {"driver": "580.65.06", "cuda": "13.0", "persistence": True},
    }


class Hgx(NamedTuple):
    root: Path
    told: dict[str, Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Hgx:
    root = tmp_path_factory.mktemp("hgx")
    return Hgx(root, hgx(root))


@pytest.fixture
def whole(made: Hgx) -> Hgx:
    """The tree is everybody's, what NVML told is one's own."""
    return made._replace(told=deepcopy(made.told))


# -- PCI --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "gen"),
    [
        ("2.5 GT/s PCIe", 1), ("5.0 GT/s PCIe", 2), ("8.0 GT/s PCIe", 3), ("8 GT/s", 3), ("16 GT/s", 4),
        ("16.0 GT/s PCIe", 4), ("32.0 GT/s PCIe", 5), ("64.0 GT/s PCIe", 6), ("5 GT/s", 2),
        ("Unknown speed", None), ("Unknown", None), ("", None), (None, None), ("56 GT/s", None), ("GT/s", None),
    ],
)  # fmt: skip
def test_every_spelling_of_a_link_speed_is_its_generation_and_nonsense_is_none(
    text: str, gen: int | None
) -> None:  # A64
    assert generation(text) == gen


@pytest.mark.parametrize(
    ("text", "lanes"), [("16", 16), ("1", 1), ("0", None), ("255", None), ("", None), ("x8", None)]
)
def test_a_link_of_no_width_has_none(text: str, lanes: int | None) -> None:  # A64
    assert width(text) == lanes


def test_an_address_keeps_its_domain_however_it_is_spelt() -> None:  # A05
    assert address("00000000:18:00.0") == address("0000:18:00.0") == address("18:00.0") == "0000:18:00.0"
    assert address("0001:B0:00.0") != address("0000:B0:00.0")
    assert address("10000:e1:00.0") == "10000:e1:00.0"
    assert [address(text) for text in ("", None, "0000:18:00", "n01", "0000:18:00.8")] == [None] * 5


def test_gpus_that_differ_by_their_domain_alone_are_two(tmp_path: Path) -> None:  # A05
    gpu(tmp_path, "pci0000:b0/0000:b0:00.0")
    gpu(tmp_path, "pci0001:b0/0001:b0:00.0")
    assert [each["pci"] for each in inventory(tmp_path)["gpus"]] == ["00000000:B0:00.0", "00000001:B0:00.0"]


RP, UP = "0000:15:01.0", "0000:16:00.0"  # a port of the root; a switch's port up


@pytest.mark.parametrize(
    ("one", "other", "numas", "word"),
    [
        # two ports down of one switch; a switch of its own each below one; each on its own port of the root
        (f"{RP} {UP} 0000:17:00.0 0000:18:00.0", f"{RP} {UP} 0000:17:01.0 0000:19:00.0", (0, 0), "PIX"),
        (f"{RP} {UP} 0000:17:00.0 0000:18:00.0", f"{RP} {UP} 0000:17:00.0 0000:18:00.1", (0, 0), "PIX"),
        (
            f"{RP} {UP} 0000:17:00.0 0000:1a:00.0 0000:1b:00.0 0000:1c:00.0",
            f"{RP} {UP} 0000:17:01.0 0000:19:00.0",
            (0, 0),
            "PXB",
        ),
        (f"{RP} 0000:18:00.0", "0000:15:02.0 0000:19:00.0", (0, 0), "PHB"),
        ("0000:15:03.0", "0000:15:04.0", (0, 0), "PHB"),
    ],
)
def test_what_shares_a_host_bridge_is_as_near_as_the_switches_between(
    one: str, other: str, numas: tuple[int, int], word: str
) -> None:
    assert affinity(function(one, numas[0]), function(other, numas[1])) == word
    assert affinity(function(other, numas[1]), function(one, numas[0])) == word


def function(path: str, numa: int | None, host_bridge: str = "pci0000:15") -> Function:
    names = path.split()
    return Function(names[-1], (host_bridge, *names), numa)


@pytest.mark.parametrize(
    ("numas", "word"), [((0, 0), "NODE"), ((0, 1), "SYS"), ((0, None), None), ((None, None), None)]
)
def test_behind_different_host_bridges_the_numa_nodes_decide(
    numas: tuple[int | None, int | None], word: str | None
) -> None:
    here = function("0000:15:01.0 0000:18:00.0", numas[0])
    assert affinity(here, function("0000:35:01.0 0000:38:00.0", numas[1], "pci0000:35")) == word


def test_what_has_no_place_in_the_tree_is_far_where_its_numa_node_is_another_and_else_unknown() -> None:
    def alone(at: str, numa: int) -> Function:
        return Function(at, (at,), numa)

    assert affinity(alone("0000:18:00.0", 0), alone("0000:98:00.0", 1)) == "SYS"
    assert affinity(alone("0000:18:00.0", 0), alone("0000:19:00.0", 0)) is None


# -- published topologies: each <pci> that holds others is a switch, and a <cpu> stands for its host bridge


def topology(name: str) -> dict[str, Function]:
    """Functions that hold nothing, by their address."""
    found: dict[str, Function] = {}

    def descend(element: ET.Element, path: tuple[str, ...], numa: int) -> None:
        inner = element.findall("pci")
        for at, child in enumerate(inner):
            port = (
                (f"{path[-1]}/{at}",) if element.tag == "pci" else ()
            )  # the switch's port down, which NCCL leaves out
            here = (*path, *port, child.attrib["busid"])
            if child.findall("pci"):
                descend(child, here, numa)
            else:
                found[here[-1]] = Function(here[-1], here, numa)

    for cpu in ET.parse(CORPORA / "nccl" / name).getroot():
        numa = int(cpu.attrib["numaid"])
        descend(cpu, (f"pci{numa:04x}:00",), numa)
    return found


@needs_corpora
@pytest.mark.parametrize(
    ("name", "one", "other", "word"),
    [
        ("nccl-topo-8x3090-pcie-1nic.xml", "0000:9b:00.0", "0000:9a:00.0", "PIX"),
        ("nccl-topo-8x3090-pcie-1nic.xml", "0000:0f:00.0", "0000:12:00.0", "PIX"),
        ("nccl-topo-8x3090-pcie-1nic.xml", "0000:0f:00.0", "0000:9a:00.0", "SYS"),
        ("ndv4-topo.xml", "0003:00:00.0", "0103:00:00.0", "PIX"),
        ("ndv4-topo.xml", "0003:00:00.0", "0101:00:00.0", "SYS"),
        ("ndv5-topo.xml", "0001:00:00.0", "0101:00:00.0", "PIX"),
        ("ndv5-topo.xml", "0001:00:00.0", "0102:00:00.0", "PHB"),
        ("ndv5-topo.xml", "0001:00:00.0", "0105:00:00.0", "SYS"),
    ],
)
def test_published_topologies_are_as_near_as_they_are(name: str, one: str, other: str, word: str) -> None:
    functions = topology(name)
    assert affinity(functions[one], functions[other]) == word


def test_a_gpu_behind_a_slot_of_an_older_generation_is_not_degraded(tmp_path: Path) -> None:  # A24
    bridge(tmp_path, "pci0000:00/0000:00:01.0", gen="16.0 GT/s PCIe")
    gpu(tmp_path, "pci0000:00/0000:00:01.0/0000:18:00.0", current_link_speed="16.0 GT/s PCIe")
    (found,) = inventory(tmp_path)["gpus"]
    assert (found["pcie_gen"], found["pcie_gen_max"], found["pcie_gen_slot"]) == (4, 5, 4)
    assert (found["pcie_width"], found["pcie_width_slot"]) == (16, 16)
    assert "pcie_gen_path" not in found


def test_a_switch_that_came_up_with_half_its_lanes_is_seen_on_the_devices_behind_it(whole: Hgx) -> None:  # A24
    gpus = inventory(*whole)["gpus"]
    assert [(gpu["pcie_gen_path"], gpu["pcie_width_path"]) for gpu in gpus[4:]] == [(5, 16)] * 2 + [(5, 8)] * 2
    assert {(gpu["pcie_gen_slot"], gpu["pcie_width_slot"]) for gpu in gpus} == {(5, 16)}


@pytest.mark.parametrize(("speed", "lanes"), [("", ""), ("Unknown speed", "0"), ("Unknown", "255"), (None, None)])
def test_a_link_that_does_not_tell_is_left_out(tmp_path: Path, speed: str | None, lanes: str | None) -> None:  # A64
    where = gpu(tmp_path, "pci0000:00/0000:18:00.0")
    for file, text in (("current_link_speed", speed), ("current_link_width", lanes)):
        (where / file).unlink()
        if text is not None:
            write(where, {file: text})
    (found,) = inventory(tmp_path)["gpus"]
    assert not {"pcie_gen", "pcie_width"} & found.keys()
    assert found["pcie_gen_max"] == 5


def test_a_virtual_function_has_the_link_of_the_physical_one(tmp_path: Path) -> None:  # A64
    physical = hca(tmp_path, 0).parents[3]
    virtual = hca(tmp_path, 1).parents[3]
    write(virtual, {"current_link_speed": "Unknown", "current_link_width": 0, "max_link_speed": "Unknown"})
    link(virtual / "physfn", physical)
    _, second = inventory(tmp_path)["nics"]
    assert (second["pcie_gen"], second["pcie_width"], second["physfn"]) == (5, 16, "0000:10:00.0")


def test_the_only_numa_node_is_that_of_devices_that_do_not_know_theirs(tmp_path: Path) -> None:
    gpu(tmp_path, "pci0000:00/0000:18:00.0", numa=-1)
    assert "numa" not in inventory(tmp_path)["gpus"][0]
    (tmp_path / "devices/system/node/node0").mkdir(parents=True)
    assert inventory(tmp_path)["gpus"][0]["numa"] == 0


def acs(tmp_path: Path, config: bytes) -> str | None:
    """Of a switch whose port has this configuration space."""
    for path in ("0000:00:01.0", "0000:00:01.0/0000:01:00.0", "0000:00:01.0/0000:01:00.0/0000:02:00.0"):
        (bridge(tmp_path, f"pci0000:00/{path}") / "config").write_bytes(config)
    gpu(tmp_path, "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:18:00.0")
    found = inventory(tmp_path).get("software", {}).get("acs")
    assert found is None or isinstance(found, str)
    return found


def space(control: int) -> bytes:
    """A configuration space with AER at 0x100 and ACS at 0x148."""
    aer = (0x148 << 20 | 0x1 << 16 | 0x0001).to_bytes(4, "little")
    services = (0x1 << 16 | 0x000D).to_bytes(4, "little") + bytes(2) + control.to_bytes(2, "little")
    return (bytes(0x100) + aer + bytes(0x44) + services).ljust(4096, b"\0")


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (space(0b0001_1101), "on"),  # SrcValid+ ReqRedir+ CmpltRedir+ UpstreamFwd+, as firmware and IOMMU set it
        (space(0), "off"),
        (space(0b1), "off"),  # SrcValid alone sends nothing another way
        (bytes(64), None),  # what others than root may read
        (bytes(4096), "off"),  # a port without the capability
        ((0x100 << 20 | 0x0001).to_bytes(4, "little") * 1024, "off"),  # a list of capabilities in a circle
    ],
)
def test_acs_is_what_the_switches_say_and_unknown_where_they_may_not_be_asked(
    tmp_path: Path, config: bytes, word: str | None
) -> None:
    assert acs(tmp_path, config) == word


@pytest.mark.parametrize(
    ("groups", "cmdline", "word"),
    [
        ({}, "", None),
        ({"0": "identity"}, "", "pt"),
        ({"0": "DMA"}, "", "translated"),
        ({"0": "DMA-FQ"}, "iommu=pt", "translated"),
        ({"0": ""}, "quiet iommu=pt", "pt"),  # before Linux 5.11 a group did not tell its type
        ({"0": ""}, "quiet", None),
    ],
)
def test_the_iommu_is_off_passed_through_or_translates(
    tmp_path: Path, groups: dict[str, str], cmdline: str, word: str | None
) -> None:
    where = gpu(tmp_path, "pci0000:00/0000:18:00.0")
    for name, kind in groups.items():
        write(tmp_path / "kernel/iommu_groups" / name, {"type": kind})
        link(where / "iommu_group", tmp_path / "kernel/iommu_groups" / name)
    write(tmp_path / "proc", {"cmdline": cmdline})
    assert inventory(tmp_path).get("software", {}).get("iommu") == word


def test_without_groups_the_iommu_is_off(tmp_path: Path) -> None:
    (tmp_path / "kernel/iommu_groups").mkdir(parents=True)
    assert inventory(tmp_path)["software"] == {"iommu": "off"}


# -- GPUs -------------------------------------------------------------------------------------------------------------


def four(root: Path, **last: Any) -> dict[str, Any]:
    """Four GPUs on the bus; NVML knows the first three."""
    for index in range(4):
        gpu(root, f"pci0000:00/0000:{0x18 + index:02x}:00.0", **(last if index == 3 else {}))
    known = [{"index": i, "uuid": f"GPU-{i}", "pci": f"00000000:{0x18 + i:02X}:00.0"} for i in range(3)]
    return {"gpus": known}


def test_a_gpu_on_the_bus_that_nvml_does_not_know_stays_in_the_inventory(tmp_path: Path) -> None:  # A03
    gpus = inventory(tmp_path, four(tmp_path, driver=""))["gpus"]
    assert [each.get("uuid") for each in gpus] == ["GPU-0", "GPU-1", "GPU-2", None]
    assert gpus[3]["pci"] == "00000000:1B:00.0"


def test_a_gpu_whose_driver_has_it_and_nvml_does_not_is_lost_where_its_device_node_is_ours(
    tmp_path: Path,
) -> None:  # A03
    told = four(tmp_path)
    write(tmp_path / "proc/driver/nvidia/gpus/0000:1b:00.0", {"information": "Model: \t H100\nDevice Minor: \t 3"})
    write(tmp_path / "dev", {"nvidia3": ""})
    assert len(inventory(tmp_path, told)["gpus"]) == 4


@pytest.mark.parametrize("driver", ["vfio-pci", "nvidia"])
def test_gpus_of_virtual_machines_and_of_other_containers_are_not_lost(tmp_path: Path, driver: str) -> None:
    reads = node(tmp_path, four(tmp_path, driver=driver))
    (told,) = reads.read(NOW)
    assert len(json.loads(str(told.fields["inventory"]))["gpus"]) == 3


def test_without_nvml_the_gpus_that_pci_lists_are_there_by_their_address(tmp_path: Path) -> None:
    four(tmp_path)
    (told,) = node(tmp_path).read(NOW)
    gpus = json.loads(str(told.fields["inventory"]))["gpus"]
    assert [each["pci"][9:11] for each in gpus] == ["18", "19", "1A", "1B"]
    assert not any("uuid" in each or "index" in each for each in gpus)


@pytest.mark.parametrize("pattern", ["mlx5_*", "ib0", "0000:10:*"])
def test_nothing_of_an_excluded_device_is_opened_by_whichever_name(tmp_path: Path, pattern: str) -> None:
    where = gpu(tmp_path, "pci0000:00/0000:18:00.0")
    hca(tmp_path, 0)
    for folder in (where, tmp_path / "class/net/ib0", (tmp_path / "bus/pci/devices/0000:10:00.0").resolve()):
        for file in [each for each in folder.rglob("*") if each.is_file()]:
            file.unlink()
            os.mkfifo(file)  # an open of it would never return
    assert inventory(tmp_path, exclude=("00000000:18:00.0", pattern)) == {}


def test_a_gpu_that_is_excluded_by_its_uuid_is_not_missed(tmp_path: Path) -> None:
    told = four(tmp_path)
    write(tmp_path / "proc/driver/nvidia/gpus/0000:1b:00.0", {"information": "GPU UUID: \t GPU-3\nDevice Minor: \t 3"})
    write(tmp_path / "dev", {"nvidia3": ""})
    assert len(inventory(tmp_path, told, exclude=("GPU-3",))["gpus"]) == 3


def test_a_link_that_an_idle_gpu_lowers_is_no_change_of_the_machine(whole: Hgx) -> None:  # A23
    reads = node(*whole)
    reads.read(NOW)
    said = []
    for gen in (2, 1, 5):
        whole.told["gpus"][5]["pcie_gen"] = gen
        said += reads.read(NOW + 10)
    assert said == []


def test_the_word_for_two_gpus_is_their_nvlinks(whole: Hgx) -> None:
    near = inventory(*whole)["affinity"]
    assert near["GPU0"]["GPU1"] == near["GPU0"]["GPU7"] == "NV18"
    assert near["GPU3"]["GPU0"] == near["GPU0"]["GPU3"] == "NV17"


def test_nvlinks_from_gpu_to_gpu_count_those_between_the_two(tmp_path: Path) -> None:
    told = four(tmp_path, driver="")
    told["gpus"][0]["nvlink_to"] = {"00000000:19:00.0": 4}
    told["gpus"][1]["nvlink_to"] = {"00000000:18:00.0": 4}
    near = inventory(tmp_path, told)["affinity"]
    assert (near["GPU0"]["GPU1"], near["GPU0"]["GPU2"], near["GPU1"]["GPU0"]) == ("NV4", "PHB", "NV4")


def test_no_nvlink_leads_to_what_has_no_place_on_the_bus(tmp_path: Path) -> None:
    told = four(write(tmp_path, {"class/net/ifb0/mtu": 1500}), driver="")
    told["gpus"][0]["nvlink_to"] = {"switch": 18}
    assert "ifb0" not in inventory(tmp_path, told)["affinity"]["GPU0"]


def test_each_gpu_is_near_the_nics_of_its_switch_and_far_from_those_of_the_other_socket(whole: Hgx) -> None:
    near = inventory(*whole)["affinity"]
    words = [near["GPU2"][f"mlx5_{number}"] for number in range(8)]
    assert words == ["NODE", "NODE", "PIX", "PIX", "SYS", "SYS", "SYS", "SYS"]
    assert near["GPU2"]["eno1"] == "NODE"


# -- NICs -------------------------------------------------------------------------------------------------------------


def test_a_port_and_its_network_interface_are_one_nic(tmp_path: Path) -> None:
    hca(tmp_path, 0)
    (found,) = Node(captured("n01", tmp_path)._replace(live=True), dict, lambda: {"ib0": ["10.1.0.1"]}).inventory()[
        "nics"
    ]
    assert (found["device"], found["port"], found["netdev"], found["addresses"]) == ("mlx5_0", 1, "ib0", ["10.1.0.1"])
    assert (found["rate_gbps"], found["pcie_gen"], found["pci"], found["numa"]) == (400.0, 5, "0000:10:00.0", 0)
    assert found["firmware"] == "28.39.1002"


def test_a_real_port_has_a_rate_and_a_virtual_one_that_invents_it_has_none(tmp_path: Path) -> None:
    port = {"speed": "100000", "mtu": "9000", "type": "1", "operstate": "up"}
    write(tmp_path, {f"class/net/{name}/{file}": text for name in ("eth0", "br0") for file, text in port.items()})
    (tmp_path / "class/net/eth0/device").mkdir()
    link(tmp_path / "class/net/eth0/device/driver", write(tmp_path / "bus/drivers/mlx5_core", {"bind": ""}))
    br0, eth0 = Node(Machine("n01", tmp_path, tmp_path), dict, lambda: {"eth0": ["10.0.0.1"]}).inventory()["nics"]
    assert eth0 == {
        "netdev": "eth0", "link_layer": "Ethernet", "state": "ACTIVE", "rate_gbps": 100.0, "mtu": 9000,
        "driver": "mlx5_core", "addresses": ["10.0.0.1"],
    }  # fmt: skip
    assert br0 == {"netdev": "br0", "link_layer": "Ethernet", "state": "ACTIVE", "mtu": 9000}


@pytest.mark.parametrize("speed", ["-1", "0", "", "unknown", "9" * 5000])
def test_a_port_that_does_not_know_its_speed_reports_none(tmp_path: Path, speed: str) -> None:
    write(tmp_path, {"class/net/eth0/speed": speed, "class/net/eth0/device/vendor": ""})
    assert inventory(tmp_path)["nics"] == [{"netdev": "eth0"}]


def test_ipv6_addresses_of_an_interface_are_known_link_local_ones_left_out(tmp_path: Path) -> None:
    rows = "fd000000000000000000000000000002 02 40 00 80 eth0\nfe800000000000000000000000000001 02 40 20 80 eth0\nx\n"
    write(tmp_path, {"proc/net/if_inet6": rows, "class/net/eth0/mtu": 1500})
    (eth0,) = inventory(tmp_path)["nics"]
    assert eth0["addresses"] == ["fd00::2"]


def test_a_captured_tree_has_no_addresses_of_the_machine_that_reads_it(tmp_path: Path) -> None:
    write(tmp_path, {"class/net/eth0/mtu": 1500})
    (eth0,) = Node(captured("n01", tmp_path), dict, lambda: {"eth0": ["10.0.0.1"]}).inventory()["nics"]
    assert "addresses" not in eth0


@pytest.mark.parametrize("name", ["ibp142s0", "mlx5_bond_8", "rocep1s0f0", "irdma0"])
def test_a_device_is_listed_whatever_its_name(tmp_path: Path, name: str) -> None:  # A53
    hca(tmp_path, 0, device=name)
    assert [each["device"] for each in inventory(tmp_path)["nics"]] == [name]


def test_a_device_without_counters_board_and_type_does_not_remove_the_others(tmp_path: Path) -> None:  # A45
    hca(tmp_path, 0)
    write(tmp_path, {"class/infiniband/irdma0/ports/1/state": "4: ACTIVE"})
    assert [each["device"] for each in inventory(tmp_path)["nics"]] == ["irdma0", "mlx5_0"]


def test_a_bond_that_has_lost_a_member_says_which(tmp_path: Path) -> None:  # A54
    port = hca(tmp_path, 0, device="mlx5_bond_0", netdev="bond0", link_layer="Ethernet")
    write(tmp_path / "class/net/bond0", {"bonding/slaves": "eth0 eth1"})
    for name, state in (("eth0", "up"), ("eth1", "down")):
        write(interface(tmp_path, name, port.parents[3]), {"operstate": state, "bonding_slave/mii_status": state})
    bond = inventory(tmp_path)["nics"][0]
    assert bond["members"] == [{"netdev": "eth0", "state": "ACTIVE"}, {"netdev": "eth1", "state": "DOWN"}]
    assert "bond0 has lost eth1" in table(tmp_path)


def test_a_port_that_is_down_has_no_rate_though_the_kernel_tells_one(whole: Hgx) -> None:  # A55, A56
    nics = inventory(*whole)["nics"]
    assert [nic["device"] for nic in nics if "rate_gbps" not in nic] == ["mlx5_1"]
    assert (nics[1]["state"], nics[1]["phys_state"]) == ("DOWN", "Polling")


# -- software, processors, memory -------------------------------------------------------------------------------------

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024"


@pytest.mark.parametrize(
    ("files", "known"),
    [
        ({"proc/driver/nvidia/version": OPEN, "proc/sys/kernel/osrelease": "6.8.0-48-generic"}, {"dmabuf": True}),
        ({"proc/driver/nvidia/version": OPEN, "proc/sys/kernel/osrelease": "4.18.0-513.el8"}, {"dmabuf": None}),
        ({"proc/driver/nvidia/version": CLOSED, "proc/sys/kernel/osrelease": "6.8.0"}, {"dmabuf": False}),
        ({"proc/driver/nvidia/version": CLOSED}, {"driver": "535.183.01", "peermem": None}),
        ({"module/nvidia/version": "580.65.06"}, {"driver": "580.65.06", "peermem": False}),  # A67
        ({"module/nvidia/version": "470.1", "module/nv_peer_mem/refcnt": "0"}, {"peermem": True}),
        ({"module/mlx5_core/version": "24.10-1.1.4"}, {"ofed": "24.10-1.1.4", "peermem": None}),
        ({"module/mlx5_core/version": "5.0-0"}, {"ofed": None}),  # the kernel's own, Linux 4.17 to 5.9
    ],
)
def test_drivers_and_what_gives_a_nic_the_gpus_memory(tmp_path: Path, files: Any, known: dict[str, Any]) -> None:
    found = software(captured("n01", write(tmp_path, files)))
    assert {key: found[key] for key in known} == known


def test_cores_are_counted_and_not_threads(tmp_path: Path) -> None:
    threads = [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1), (4, 0, 0), (5, 0, 1), (6, 1, 0), (7, 1, 1)]
    cpuinfo = "\n".join(f"processor\t: {p}\nphysical id\t: {s}\ncore id\t\t: {c}\n" for p, s, c in threads)
    write(tmp_path / "proc", {"cpuinfo": cpuinfo, "meminfo": "MemTotal:  2048 kB", "sys/kernel/osrelease": "6.8.0"})
    found = inventory(tmp_path)
    assert found["cpu"] == {"cores": 4, "sockets": 2}
    assert found["memory_bytes"] == 2048 * 1024
    assert found["software"] == {"kernel": "6.8.0"}


# -- the point --------------------------------------------------------------------------------------------------------


def test_the_inventory_is_told_at_first_when_it_changes_and_every_minute(tmp_path: Path) -> None:
    write(tmp_path / "proc", {"sys/kernel/osrelease": "6.8.0"})
    reads = node(tmp_path)
    told = [bool(reads.read(NOW)) for _ in range(8)]
    write(tmp_path / "proc", {"sys/kernel/osrelease": "6.9.0"})
    assert told == [True, False, False, False, False, False, True, False]
    assert reads.read(NOW)


def test_a_collector_that_may_read_once_a_minute_tells_the_inventory_each_time(tmp_path: Path) -> None:
    reads = node(write(tmp_path, {"proc/sys/kernel/osrelease": "6.8.0"}))
    assert [len(reads.read(NOW + minute * 60 * 10**9)) for minute in range(3)] == [1, 1, 1]


def test_a_nic_that_is_plugged_in_is_there_at_the_next_read(tmp_path: Path) -> None:
    hca(tmp_path, 0)
    reads = node(tmp_path)
    reads.read(NOW)
    hca(tmp_path, 1)
    (told,) = reads.read(NOW + 10)
    assert [nic["pci"] for nic in json.loads(str(told.fields["inventory"]))["nics"]] == ["0000:10:00.0", "0000:11:00.0"]


def test_this_machines_inventory_is_a_document_of_the_contract() -> None:
    told = Node(Machine("n01")).read(NOW)
    found = decode_node(str(told[0].fields["inventory"]))
    assert found.boot_id
    assert found.memory_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_every_key_is_one_that_a_reader_of_the_document_knows(whole: Hgx) -> None:
    found = inventory(*whole)
    assert json.loads(program.encode(decode_node(json.dumps(found)))) == found


FILES = (
    "current_link_speed", "current_link_width", "max_link_speed", "max_link_width", "numa_node", "class", "vendor",
    "config", "uevent",
)  # fmt: skip
PROC = (
    "cpuinfo", "meminfo", "net/if_inet6", "cmdline", "driver/nvidia/version", "sys/kernel/osrelease",
    "sys/kernel/random/boot_id",
)  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(
    st.dictionaries(st.sampled_from(FILES), st.binary(max_size=300) | st.sampled_from([b"9" * 5000, b"-1", b"0x10de"]))
)
def test_no_content_of_a_pci_folder_breaks_the_inventory(tmp_path_factory: Any, files: dict[str, bytes]) -> None:
    root = tmp_path_factory.mktemp("pci")
    bridge(root, "pci0000:00/0000:00:01.0")
    where = gpu(root, "pci0000:00/0000:00:01.0/0000:18:00.0")
    hca(root, 0)
    for folder in (where, where.parent, (root / "bus/pci/devices/0000:10:00.0").resolve()):
        for name, text in files.items():
            (folder / name).write_bytes(text)
    found = inventory(root)
    assert [nic["device"] for nic in found["nics"]] == ["mlx5_0"]
    decode_node(json.dumps(found))


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.sampled_from(PROC), st.binary(max_size=200)))
def test_no_content_of_proc_breaks_the_inventory(tmp_path_factory: Any, files: dict[str, bytes]) -> None:
    root = tmp_path_factory.mktemp("proc")
    write(root / "proc", dict.fromkeys(files, 0))
    for name, text in files.items():
        (root / "proc" / name).write_bytes(text)
    node(root).read(NOW)


# -- the program ------------------------------------------------------------------------------------------------------


def table(root: Path, told: Mapping[str, Any] | None = None, **machine: Any) -> str:
    found = decode_node(json.dumps(inventory(root, told, **machine)))
    return program.text("n01", captured("n01", root)._replace(**machine), program.Seen(found))


def golden(whole: Hgx) -> str:
    return table(*whole).replace(str(whole.root), "/tmp/n01")


def test_the_table_of_a_whole_machine_is_the_golden_one(whole: Hgx) -> None:
    assert golden(whole) == GOLDEN.read_text()
    assert max(map(len, golden(whole).splitlines())) <= 80


def ran(*arguments: str | Path) -> str:
    done = CliRunner().invoke(app, ["inventory", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.output


@pytest.fixture
def h100(tmp_path: Path) -> Path:
    with tarfile.open(CORPORA / "sysfs/gpud-sys-class-infiniband-h100.tar.gz") as tar:
        tar.extractall(tmp_path / "class/infiniband", filter="tar")
    return tmp_path


@needs_corpora
def test_the_captured_h100_node_has_its_nine_ports_with_their_rates_and_states(h100: Path) -> None:
    nics = json.loads(ran("--sys-root", h100, "--output", "json"))["nics"]
    told = [(nic["device"], nic["port"], nic["link_layer"], nic["state"], nic["phys_state"]) for nic in nics]
    numbers = (0, 1, 4, 5, 6, 7, 8, 9)
    ib = [(f"mlx5_{number}", 1, "InfiniBand", "ACTIVE", "LinkUp") for number in numbers]
    assert told == [*ib, ("mlx5_bond_0", 1, "Ethernet", "ACTIVE", "LinkUp")]
    assert [(nic["rate_gbps"], nic["width"], nic["speed"]) for nic in nics] == [(400.0, 4, "NDR")] * 8 + [
        (200.0, 2, "NDR")
    ]
    said = ran("--sys-root", h100)
    assert "  mlx5_9/1       IB     ACTIVE  400 4X NDR\n" in said
    assert "  mlx5_bond_0/1  Eth    ACTIVE  200 2X NDR\n" in said
    assert "firmware 28.41.1000 on 8 ports, 32.38.3056 on mlx5_bond_0" in said


def unflattened(name: str, root: Path) -> Path:
    """The tree of a snapshot that is one JSON object from path to content."""
    for path, text in json.loads((CORPORA / "sysfs" / name).read_text()).items():
        write(root, {path.lstrip("/"): text.removesuffix("\n")})
    return root


@needs_corpora
def test_a_tree_without_classes_has_its_ports_links_and_lanes_all_the_same(tmp_path: Path) -> None:
    nics = inventory(unflattened("learn_good.json", tmp_path))["nics"]
    ports = [nic for nic in nics if "device" in nic]
    assert [nic["state"] for nic in ports] == ["ACTIVE"] * 8
    assert {nic["rate_gbps"] for nic in ports} == {200.0}
    assert {(nic["pcie_gen"], nic["pcie_width"]) for nic in ports} == {(4, 16)}
    by_device = {nic["device"]: (nic["pci"], nic.get("netdev")) for nic in ports}
    assert by_device["mlx5_8"] == ("0000:ba:00.0", "ib6")


@needs_corpora
def test_the_topology_of_one_gpu_is_that_of_nvidia_smi(tmp_path: Path) -> None:
    capture = CORPORA / "nvidia_smi/linux-x86_64__nvidia-h100-80gb-hbm3__590.48.01.txt"
    assert "GPU0\t X \t0-19\t0" in capture.read_text()
    gpu(tmp_path, "pci0000:00/0000:18:00.0")
    told = {"gpus": [{"index": 0, "uuid": "GPU-0", "pci": "00000000:18:00.0"}]}
    found = inventory(tmp_path, told)
    assert "affinity" not in found
    assert found["gpus"][0]["numa"] == 0


def test_why_no_gpu_is_known_stands_with_the_gpus_and_other_words_by_themselves(tmp_path: Path) -> None:
    words = ["no NVIDIA driver here (none)", "node did not answer"]
    here = captured("n01", tmp_path)
    said = program.text("n01", here, program.Seen(decode_node("{}"), words)).splitlines()
    at = next(number for number, line in enumerate(said) if line.startswith("  GPUs "))
    assert "no NVIDIA driver here (none)" in [line.strip() for line in said[at : at + 3]]
    assert said[-1].split(maxsplit=1) == ["also", "node did not answer"]


def test_a_folder_that_holds_no_machine_says_where_it_was_looked_for(tmp_path: Path) -> None:  # A42, A66
    done = CliRunner().invoke(app, ["inventory", "--sys-root", str(root := tmp_path)])
    assert done.exit_code == 1
    lines = [line.split() for line in done.output.splitlines()]
    assert ["RDMA", "ports", f"{root}/class/infiniband:", "not", "there"] in lines
    assert [f"{root}/sys/class/infiniband:", "not", "there"] in lines
    assert ["memory", f"{root}/proc/meminfo:", "not", "there"] in lines
    assert ran("--sys-root", root, "--output", "json") == "{}\n"


@pytest.mark.parametrize("verb", ["inventory", "read"])
def test_a_tree_that_is_not_there_is_refused(tmp_path: Path, verb: str) -> None:
    """An empty name, of a variable that is not set, would be the folder that we are in."""
    (tmp_path / "file").touch()
    for name in ("", str(tmp_path / "none"), str(tmp_path / "file")):
        assert CliRunner().invoke(app, [verb, "--sys-root", name]).exit_code == 2


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Gpus:
    return Gpus(tmp_path_factory.mktemp("nvml"), "H100", "H100")


def live(gpus: Gpus, *arguments: str) -> str:
    """On this machine, whose GPUs are a library's."""
    line = [sys.executable, "-m", "diagnosd", "inventory", "--host", "n01", *arguments]
    done = subprocess.run(line, env=os.environ | gpus.environment, capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout


def test_this_machine_is_told_with_what_nvml_knows(gpus: Gpus) -> None:
    said = live(gpus)
    assert said.startswith("n01: 2 x NVIDIA H100 80GB HBM3")
    assert "  1    GPU-00000001  20:00.0  " in said
    assert "GPU1  NV18  X\n" in said
    found = decode_node(live(gpus, "--output", "json"))
    assert [gpu.uuid for gpu in found.gpus or ()] == [f"GPU-0000000{n}-1111-2222-3333-444444444444" for n in (0, 1)]


def test_a_gpu_that_does_not_answer_costs_what_nvml_knows_and_nothing_else(gpus: Gpus, tmp_path: Path) -> None:
    gpus["1.*"] = "hang"
    line = [sys.executable, "-c", LIVE, str(tmp_path / "probe.sock")]
    done = subprocess.run(line, env=os.environ | gpus.environment, capture_output=True, text=True, check=True, cwd=ROOT)
    del gpus["1.*"]
    words, boot, known = json.loads(done.stdout)
    assert (words, known) == (["nvml did not answer"], None)
    assert boot


LIVE = """
import json, sys
from pathlib import Path
from diagnosd.collectors.machine import Machine
from diagnosd.inventory import live
words, found = reversed(live(Machine("n01"), Path(sys.argv[1]), patience=4.0))
print(json.dumps([words, found.boot_id, found.gpus]))
"""


def test_names_that_are_no_text_for_a_terminal_do_not_reach_it(tmp_path: Path) -> None:
    hca(tmp_path, 0, device="mlx5\x1b[31m")
    assert "\x1b" not in table(tmp_path)


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        GOLDEN.write_text(golden(Hgx(Path(folder), hgx(Path(folder)))))
