"""The collector of GPUs, with NVIDIA's own Python binding, on a library that answers what a file says (tests/nvml).

The numbers A01 to A41 are conditions met in the field: GPUs that go, drivers that differ, values that are none.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diagnosd.collectors.machine import Machine
from diagnosd.collectors.nvml import Nvml
from diagnosd.collectors.nvml.fields import ACTIVITY, FAST, LIMITS, SLOW, of_link
from diagnosd.point import Point, encode
from diagnosd.schema import SCHEMA
from nvml.machine import ALL_LINKS, Gpus, address, library, uuid

NOW = 1_700_000_000_000_000_000
SECOND = 10**9
OURS = ("nvidia_smi", "diagnosd_gpu", "diagnosd_nvlink", "diagnosd_event")
CAPTURES = Path(__file__).parents[2] / "shared" / "corpora" / "nvidia_smi"

Fields = Mapping[str, int | float | str | bool]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return library(tmp_path_factory.mktemp("nvml"))


class Node:
    """A machine with GPUs, whose collector is read once a second."""

    def __init__(self, gpus: Gpus, machine: Machine) -> None:
        self.gpus = gpus
        self.nvml = Nvml(machine)
        self.now = NOW

    def read(self) -> list[Point]:
        points = self.nvml.read(self.now)
        self.now += SECOND
        encode(points)  # nothing that the contract does not allow
        return points

    def reads(self, seconds: int) -> list[Point]:
        return [each for _ in range(seconds) for each in self.read()]

    def inventory(self) -> list[dict[str, object]]:
        """Of the GPUs, as of a minute later."""
        self.reads(61)
        gpus: list[dict[str, object]] = self.nvml.inventory()["gpus"]
        return gpus


Make = Callable[..., Node]


@pytest.fixture
def node(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[Node] = []

    def make(*kinds: str, **machine: object) -> Node:
        gpus = Gpus(tmp_path, *kinds, built=built)
        gpus.load()
        for name, value in {**gpus.environment, "NVML_TRACE": str(gpus.trace)}.items():
            monkeypatch.setenv(name, value)
        roots = {"proc": tmp_path / "proc", "sys": tmp_path / "sys"}
        made.append(Node(gpus, Machine("n01", **{**roots, **machine})))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.nvml.close()


def of(points: list[Point], measurement: str, gpu: int = 0) -> Fields:
    """The fields of one GPU, later values winning."""
    found: dict[str, int | float | str | bool] = {}
    for each in points:
        if each.series.measurement == measurement and each.series.tag("uuid") == uuid(gpu):
            found |= each.fields
    return found


def told(points: list[Point], measurement: str = "nvidia_smi") -> list[str | None]:
    return [each.series.tag("uuid") for each in points if each.series.measurement == measurement]


def events(points: list[Point]) -> list[tuple[str | None, str | None]]:
    found = [each.series for each in points if each.series.measurement == "diagnosd_event"]
    return [(series.tag("kind"), series.tag("subject")) for series in found]


def pci_tree(sys: Path, *indexes: int, driver: str | None = "nvidia", domain: str = "0000") -> list[str]:
    """NVIDIA's GPUs on the PCI bus, and a bridge and another maker's card."""
    pcis = [f"{domain}:{address(index).lower().partition(':')[2]}" for index in indexes]
    cards = {**dict.fromkeys(pcis, ("0x10de", "0x030200")), "0000:00:01.0": ("0x10de", "0x060400")}
    for pci, (vendor, kind) in {**cards, "0000:00:02.0": ("0x1002", "0x030000")}.items():
        folder = sys / "bus/pci/devices" / pci
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
        if driver and pci in pcis:
            (sys / "bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
            (folder / "driver").symlink_to(sys / "bus/pci/drivers" / driver)
    return pcis


# ---- values and their units ----


def test_values_have_telegrafs_names_and_the_contracts_units(node: Make) -> None:
    n01 = node("H100")
    first, second = n01.read(), n01.read()
    gpu = of(first + second, "diagnosd_gpu")
    expected = {
        "utilization_gpu": 97, "utilization_memory": 40, "memory_used": 19818, "memory_total": 81559,
        "temperature_gpu": 59, "temperature_memory": 55, "power_draw": 629.45, "power_limit": 700.0,
        "clocks_current_sm": 1980, "clocks_current_memory": 2619,
        "pcie_link_gen_current": 5, "pcie_link_width_current": 16,
    }  # fmt: skip
    assert of(first, "nvidia_smi").items() >= expected.items()
    assert [gpu[name] for name in ("sm_active", "tensor_active", "dram_active")] == [0.875, 0.6125, 0.4]
    assert gpu["throttle_sw_power"] == 7.0  # of 7e9 ns
    assert gpu["energy"] == pytest.approx(5e6, rel=0.01)  # of 5e9 mJ
    assert gpu["nvlink_tx_bytes"] >= 1_000_000 * 1024  # of KiB
    assert of(first, "diagnosd_nvlink")["speed"] == 26_562_000_000


LOAD = {  # as nvidia-smi -q has it -> our field, and what NVML's calls say when that is so
    "Average Power Draw": ("power_draw", "field.185.0", "uint 629450"),
    "Instantaneous Power Draw": ("power_draw_instant", "field.186.0", "uint 588390"),
    "Current Power Limit": ("power_limit", "field.190.0", "uint 700000"),
    "GPU Current Temp": ("temperature_gpu", "nvmlDeviceGetTemperatureV.0", "59"),
    "Memory Current Temp": ("temperature_memory", "field.82.0", "uint 55"),
    "SM": ("clocks_current_sm", "nvmlDeviceGetClockInfo.1", "1980"),
    "Used": ("memory_used", "nvmlDeviceGetMemoryInfo_v2", f"{81559 << 20},{479 << 20},{61262 << 20},{19818 << 20}"),
    "GPU": ("utilization_gpu", "nvmlDeviceGetUtilizationRates", "100,11"),
    "Replays Since Reset": ("pcie_replays", "field.94.0", "uint 9"),
}


@pytest.mark.skipif(not CAPTURES.exists(), reason="no captures of real machines beside this checkout")
def test_an_h100_is_told_as_nvidia_smi_told_it(node: Make) -> None:
    text = (CAPTURES / "linux-x86_64__nvidia-h100-80gb-hbm3__590.48.01.txt").read_text()
    text = text[text.index("# load :: query (-q)") :]
    n01 = node("H100")
    n01.gpus.answers |= {f"0.{call}": answer for _, call, answer in LOAD.values()}
    n01.gpus.write()
    points = n01.read()
    fields = {**of(points, "nvidia_smi"), **of(points, "diagnosd_gpu")}
    for name, (field, _, _) in LOAD.items():
        seen = re.search(rf"^ +{re.escape(name)} +: ([\d.]+)", text, re.MULTILINE)
        assert seen
        assert fields[field] == float(seen[1]), name


def test_average_and_instant_power_have_each_its_name(node: Make) -> None:  # A16
    smi = of(node("H100").read(), "nvidia_smi")
    assert (smi["power_draw"], smi["power_draw_instant"]) == (629.45, 588.39)


def test_a_gpu_without_an_average_says_its_power_as_it_is(node: Make) -> None:
    assert of(node("A100").read(), "nvidia_smi")["power_draw"] == 588.39


def test_an_average_that_cannot_be_read_now_is_not_replaced_by_another_value(node: Make) -> None:
    n01 = node("H100")
    n01.read()
    n01.gpus["0.field.185.0"] = "error 999"
    assert "power_draw" not in of(n01.read(), "nvidia_smi")
    assert n01.nvml.errors == 1


BITS = {  # nvmlClocksEventReason* of nvml.h
    0: "gpu_idle", 1: "applications_clocks_setting", 2: "sw_power_cap", 3: "hw_slowdown",
    5: "sw_thermal_slowdown", 6: "hw_thermal_slowdown", 7: "hw_power_brake_slowdown",
}  # fmt: skip


@pytest.mark.parametrize("bit", range(63))
def test_each_reason_is_its_own_bit_and_an_unknown_one_is_none_of_them(node: Make, bit: int) -> None:  # A19
    n01 = node("T4")
    n01.gpus["0.nvmlDeviceGetCurrentClocksEventReasons"] = 1 << bit
    reasons = {
        name.removeprefix("clocks_event_reason_"): value
        for name, value in of(n01.read(), "nvidia_smi").items()
        if name.startswith("clocks_event_reason_")
    }
    assert reasons == {name: int(BITS.get(bit) == name) for name in BITS.values()}


@pytest.mark.parametrize(
    ("answers", "fields"),
    [
        ({"gpm.2": 0, "gpm.5": 0, "field.185.0": "uint 600000"}, {"sm_active": 0.0, "power_draw": 600.0}),  # A13
        ({"nvmlDeviceGetUtilizationRates": "100,1", "field.185.0": "uint 210000"}, {"power_draw": 210.0}),  # A17
        ({"nvmlDeviceGetCurrentClocksEventReasons": 4}, {"clocks_event_reason_sw_power_cap": 1}),  # A18
        ({"nvmlDeviceGetCurrentClocksEventReasons": 8}, {"clocks_event_reason_hw_slowdown": 1}),  # A20
        ({"nvmlDeviceGetClockInfo.1": 1980, "field.185.0": "uint 150000"}, {"power_draw": 150.0}),  # A21
        ({"nvmlDeviceGetCurrPcieLinkGeneration": 2}, {"pcie_link_gen_current": 2}),  # A24
        ({f"field.138.{ALL_LINKS}": 0}, {"nvlink_tx_bytes": 0}),  # A35
        ({f"field.138.{ALL_LINKS}": 5, f"field.139.{ALL_LINKS}": 0}, {"nvlink_rx_bytes": 0}),  # A36
        ({"nvmlDeviceGetMemoryErrorCounter.1.0.2": 177}, {"ecc_errors_volatile_dram_uncorrectable": 177}),  # A33
    ],
)
def test_what_contradicts_other_values_is_sent_as_it_was_read(
    node: Make, answers: Mapping[str, object], fields: Fields
) -> None:
    """Whether it is true is for the analysis to say, which sees the neighbours and the steps."""
    n01 = node("H100")
    n01.gpus.answers |= {f"0.{call}": str(answer) for call, answer in answers.items()}
    n01.gpus.write()
    points = n01.reads(2)
    assert fields.items() <= {**of(points, "nvidia_smi"), **of(points, "diagnosd_gpu")}.items()


def test_a_counter_that_was_reset_is_sent_as_it_stands(node: Make) -> None:  # A33
    n01, call = node("T4"), "0.nvmlDeviceGetMemoryErrorCounter.1.0.2"
    seen = []
    for count in (177, 0, 3):
        n01.gpus[call] = count
        seen.append(of(n01.reads(10), "nvidia_smi")["ecc_errors_volatile_dram_uncorrectable"])
    assert seen == [177, 0, 3]


IMPOSSIBLE = [  # call, answer, what must not come of it
    ("nvmlDeviceGetUtilizationRates", "101,40", "utilization_gpu"),
    ("nvmlDeviceGetUtilizationRates", "4294967295,40", "utilization_gpu"),
    ("field.185.0", "uint 0", "power_draw"),  # and 100 % busy
    ("field.185.0", "double 1.4e16", "power_draw"),
    ("field.185.0", "double nan", "power_draw"),
    ("nvmlDeviceGetTemperatureV.0", "-1", "temperature_gpu"),
    ("nvmlDeviceGetTemperatureV.0", "0", "temperature_gpu"),
    ("field.82.0", "uint 4294967295", "temperature_memory"),
    ("nvmlDeviceGetClockInfo.1", "0", "clocks_current_sm"),
    ("nvmlDeviceGetCurrentClocksEventReasons", str(2**64 - 1), "clocks_event_reason_sw_power_cap"),
    ("nvmlDeviceGetMemoryInfo_v2", f"0,0,0,{2**64 - 1}", "memory_used"),
    ("nvmlDeviceGetMemoryInfo_v2", "0,0,0,0", "memory_total"),
    ("nvmlDeviceGetMemoryErrorCounter.1.0.2", str(2**63), "ecc_errors_volatile_dram_uncorrectable"),
    ("field.83.0", str(2**63), "energy"),
    ("field.83.0", "sll -1", "energy"),
    (f"field.138.{ALL_LINKS}", str(2**64 - 1), "nvlink_tx_bytes"),
    ("gpm.5", "1.407e16", "tensor_active"),
    ("gpm.5", "nan", "tensor_active"),
    ("field.164.3", "uint 4294967295", "speed"),
]


@pytest.mark.parametrize(("call", "answer", "field"), IMPOSSIBLE)
def test_what_cannot_be_is_absent_and_counted(node: Make, call: str, answer: str, field: str) -> None:  # A12, A25
    n01 = node("H100")
    n01.gpus[f"0.{call}"] = answer
    for link in range(18):
        if field == "speed":
            n01.gpus[f"0.field.164.{link}"] = answer
    points = n01.reads(2)
    assert not [each for each in points if field in each.fields]
    assert n01.nvml.errors
    assert len(told(points)) == 2  # the others of its values are there


# ---- what a GPU does not have ----


@pytest.mark.parametrize("code", [999, 10])
def test_not_supported_is_absent_and_forgotten_and_another_error_is_counted(node: Make, code: int) -> None:  # A07
    n01, call = node("H100"), "0.nvmlDeviceGetUtilizationRates"
    n01.gpus[call] = "error 3"
    assert "utilization_gpu" not in of(n01.read(), "nvidia_smi")
    n01.reads(5)
    assert n01.nvml.errors == 0
    assert n01.gpus.trace.read_text().count(call) == 1  # it is not asked again
    n01.gpus["0.nvmlDeviceGetClockInfo.1"] = f"error {code}"
    assert "clocks_current_sm" not in of(n01.reads(3), "nvidia_smi")
    assert n01.nvml.errors == 3
    n01.gpus["0.nvmlDeviceGetClockInfo.1"] = "1410"
    assert of(n01.read(), "nvidia_smi")["clocks_current_sm"] == 1410


def test_what_has_answered_once_is_not_taken_for_unsupported(node: Make) -> None:
    n01, call = node("H100"), "0.nvmlDeviceGetClockInfo.1"
    n01.read()
    n01.gpus[call] = "error 3"
    n01.reads(4)
    n01.gpus[call] = "1410"
    assert n01.nvml.errors == 4
    assert of(n01.read(), "nvidia_smi")["clocks_current_sm"] == 1410


def test_mig_has_no_utilisation_and_no_activity(node: Make) -> None:  # A10
    n01 = node("H100")
    n01.gpus["0.nvmlDeviceGetMigMode"] = "1,1"
    n01.gpus["0.nvmlDeviceGetUtilizationRates"] = "0,0"
    points = n01.reads(3)
    assert not {"utilization_gpu", "sm_active"} & {name for each in points for name in each.fields}
    assert of(points, "nvidia_smi")["power_draw"] == 629.45
    (gpu,) = n01.inventory()
    assert gpu["mig"] is True
    assert "pcie_busy" not in gpu
    assert n01.nvml.errors == 0


def test_when_mig_is_switched_off_utilisation_comes_back(node: Make) -> None:
    n01 = node("H100")
    n01.gpus["0.nvmlDeviceGetMigMode"] = "1,1"
    n01.reads(2)
    n01.gpus["0.nvmlDeviceGetMigMode"] = "0,0"
    assert "sm_active" in of(n01.reads(62), "diagnosd_gpu")
    assert of(n01.read(), "nvidia_smi")["utilization_gpu"] == 97


def test_each_gpu_has_what_it_has_in_one_machine(node: Make) -> None:  # A11, A34
    n01 = node("H100", "A100", "B200", "T4", "H100")
    n01.gpus["4.nvmlDeviceGetMigMode"] = "1,1"
    points = n01.reads(2)
    assert ["sm_active" in of(points, "diagnosd_gpu", gpu) for gpu in range(5)] == [True, False, True, False, False]
    assert ["nvlink_tx_bytes" in of(points, "diagnosd_gpu", gpu) for gpu in range(5)] == [True, True, True, False, True]
    assert [told(points, "diagnosd_nvlink").count(uuid(gpu)) for gpu in range(5)] == [18, 12, 18, 0, 18]
    assert n01.nvml.errors == 0


def test_unified_memory_has_no_memory_of_its_own(node: Make) -> None:  # A22
    smi = of(node("GB10").read(), "nvidia_smi")
    assert not {"memory_used", "memory_total", "clocks_current_memory", "power_limit"} & set(smi)
    assert smi["utilization_gpu"] == 97


def test_a_field_that_a_driver_does_not_know_costs_no_other(node: Make) -> None:  # A26
    n01 = node("H100")
    for field in (269, 270, 271):
        n01.gpus[f"0.field.{field}.0"] = "error 2"
    gpu = of(n01.read(), "diagnosd_gpu")
    assert "throttle_sw_power" in gpu
    assert "throttle_sw_thermal" not in gpu
    assert n01.nvml.errors == 0


def test_the_inventory_names_what_a_gpu_does_not_have(node: Make) -> None:  # A37
    n01 = node("H100")
    del n01.gpus["0.field.83.0"], n01.gpus["0.nvmlDeviceGetCurrPcieLinkWidth"]
    n01.read()
    (gpu,) = n01.nvml.inventory()["gpus"]
    assert gpu["unsupported"] == ["energy", "pcie_link_width_current"]


@pytest.mark.parametrize("lacking", [[f"field.138.{ALL_LINKS}"], [f"field.138.{ALL_LINKS}", "field.138.0"]])
def test_nvlink_bytes_are_summed_over_the_links_where_the_driver_does_not(node: Make, lacking: list[str]) -> None:
    n01 = node("A100")
    per_link = {f"0.field.138.{link}": "10" for link in range(12)}
    per_link |= {f"0.field.202.{link}": "7" for link in range(12)}
    n01.gpus.answers |= per_link
    for call in lacking:
        n01.gpus.answers.pop(f"0.{call}")
    n01.gpus.write()
    assert of(n01.read(), "diagnosd_gpu")["nvlink_tx_bytes"] == 10 * 1024 * (12 if len(lacking) == 1 else 11)


@pytest.mark.parametrize("answer", [str(2**64 - 1), "error 999"])
def test_a_sum_over_links_of_which_one_says_nonsense_or_nothing_is_absent_and_counted(node: Make, answer: str) -> None:
    """Without it the sum would run back."""
    n01 = node("A100")
    n01.gpus.answers |= {f"0.field.138.{link}": "10" for link in range(12)}
    del n01.gpus[f"0.field.138.{ALL_LINKS}"]
    assert of(n01.read(), "diagnosd_gpu")["nvlink_tx_bytes"] == 12 * 10 * 1024
    n01.gpus["0.field.138.3"] = answer
    assert "nvlink_tx_bytes" not in of(n01.read(), "diagnosd_gpu")
    assert n01.nvml.errors == 1


def test_nvlink_5_has_its_own_counters(node: Make) -> None:
    n01 = node("B200")
    n01.gpus.answers |= {f"0.field.138.{ALL_LINKS}": "error 3", **{f"0.field.202.{n}": "5000" for n in range(18)}}
    n01.gpus["0.field.208.4"] = 6
    n01.gpus["0.field.215.4"] = 2
    points = n01.read()
    assert of(points, "diagnosd_gpu")["nvlink_tx_bytes"] == 90_000
    assert of(points, "diagnosd_gpu")["nvlink_errors"] == 8
    (link,) = (each.fields for each in points if each.series.tag("link") == "4")
    assert (link["crc_errors"], link["recovery_errors"], link["symbol_errors"]) == (6, 2, 0)
    assert "replay_errors" not in link


def test_pcie_bytes_are_sent_only_by_a_counter_that_has_shown_more_than_32_bits(node: Make) -> None:
    """At 64 GB/s a counter of 32 bits wraps fifteen times between two reads."""
    n01 = node("H100")
    assert "pcie_tx_bytes" not in of(n01.reads(3), "diagnosd_gpu")
    n01.gpus["0.field.197.0"] = 2**32 - 1000
    assert "pcie_tx_bytes" not in of(n01.read(), "diagnosd_gpu")
    n01.gpus["0.field.197.0"] = 2**32 + 1000
    assert of(n01.read(), "diagnosd_gpu")["pcie_tx_bytes"] == 2**32 + 1000
    n01.gpus["0.field.197.0"] = 12
    assert of(n01.read(), "diagnosd_gpu")["pcie_tx_bytes"] == 12  # a reset: the reader of the trace sees it


def test_activity_that_a_profiler_takes_away_comes_back(node: Make) -> None:  # A14
    n01 = node("H100")
    n01.reads(2)
    n01.gpus["0.nvmlGpmSampleGet"] = "error 19"
    assert "sm_active" not in of(n01.reads(600), "diagnosd_gpu")
    assert n01.nvml.errors == 600 * 3
    del n01.gpus["0.nvmlGpmSampleGet"]
    assert of(n01.reads(2), "diagnosd_gpu")["sm_active"] == 0.875


def test_a_metric_that_has_answered_once_is_not_taken_for_unsupported(node: Make) -> None:
    n01 = node("H100")
    n01.reads(2)
    n01.gpus["0.gpm.5"] = "error 3"
    assert "tensor_active" not in of(n01.read(), "diagnosd_gpu")
    assert n01.nvml.errors == 1
    n01.gpus["0.gpm.5"] = "61.25"
    assert of(n01.read(), "diagnosd_gpu")["tensor_active"] == 0.6125


def test_activity_is_not_asked_for_sooner_than_the_driver_samples(node: Make) -> None:  # A15
    n01 = node("H100")
    n01.read()
    n01.now -= SECOND - SECOND // 20
    assert "sm_active" not in of(n01.read(), "diagnosd_gpu")
    assert of(n01.read(), "diagnosd_gpu")["sm_active"] == 0.875


# ---- GPUs that go and come ----


@pytest.mark.parametrize("calls", ["3.*", "3.field.*"])
def test_a_lost_gpu_is_one_event_and_the_others_go_on(node: Make, calls: str) -> None:  # A01, A02
    n01 = node(*["H100"] * 8)
    n01.read()
    n01.gpus[calls] = "error 15"
    points = n01.read()
    assert events(points) == [("gpu_lost", f"gpu:n01/{uuid(3)}")]
    assert sorted(told(points), key=str) == [uuid(gpu) for gpu in range(8) if gpu != 3]
    later = n01.reads(130)
    assert events(later) == []
    assert len(told(later)) == 7 * 130


def test_a_gpu_that_answers_again_is_told_again(node: Make) -> None:
    n01 = node("H100", "H100")
    n01.read()
    n01.gpus["0.*"] = "error 15"
    n01.reads(5)
    del n01.gpus["0.*"]
    n01.reads(61)
    assert len(told(n01.read())) == 2
    n01.gpus["0.*"] = "error 15"
    assert len(events(n01.reads(3))) == 1  # lost anew is told anew


def test_several_that_are_lost_at_once_are_an_event_each(node: Make) -> None:  # A41
    n01 = node(*["H100"] * 4)
    n01.read()
    n01.gpus["[12].*"] = "error 15"
    assert events(n01.reads(3)) == [("gpu_lost", f"gpu:n01/{uuid(gpu)}") for gpu in (1, 2)]


@pytest.mark.parametrize("code", [15, 999])
def test_a_gpu_without_a_handle_hides_no_other(node: Make, code: int) -> None:  # A02
    n01 = node(*["H100"] * 4)
    n01.gpus["2.handle"] = f"error {code}"
    assert told(n01.read()) == [uuid(0), uuid(1), uuid(3)]
    assert n01.nvml.errors == 1


def test_a_gpu_that_only_the_pci_bus_shows_is_told_once(node: Make, tmp_path: Path) -> None:  # A03
    pci_tree(tmp_path / "sys", 0, 1, 2)
    pci_tree(tmp_path / "sys", 3, driver=None)  # address 0000:30:00.0
    pci_tree(tmp_path / "sys", 4, driver="vfio-pci")
    assert events(node("H100", "H100", "H100").reads(130)) == [("gpu_lost", "gpu:n01/PCI:0000:30:00")]


def test_in_a_container_that_may_see_some_gpus_the_others_are_not_lost(node: Make, tmp_path: Path) -> None:
    pci_tree(tmp_path / "sys", 0, 1)
    assert events(node("H100").reads(2)) == []
    (tmp_path / "proc/driver/nvidia/gpus/0000:20:00.0").mkdir(parents=True)
    refused = node("H100", "H100")
    refused.gpus["1.handle"] = "error 4"
    assert events(refused.reads(2)) == []


def test_a_gpu_is_its_uuid_whatever_its_number(node: Make) -> None:  # A04
    n01 = node("H100", "T4", "A100")
    n01.gpus["2.nvmlDeviceGetUUID"], n01.gpus["0.nvmlDeviceGetUUID"] = uuid(0), uuid(2)
    first = n01.read()
    n01.gpus["1.*"] = "error 15"
    later = n01.reads(70)
    assert {each.series.tag("name") for each in later if each.series.tag("uuid") == uuid(0)} - {None} == {
        "NVIDIA A100-SXM4-80GB"
    }
    assert {each.series for each in later if each.series.measurement == "nvidia_smi"} < {each.series for each in first}


def test_two_gpus_may_differ_in_their_pci_domain_alone(node: Make) -> None:  # A05
    n01 = node("H100", "H100")
    n01.gpus["0.nvmlDeviceGetPciInfo_v3"], n01.gpus["1.nvmlDeviceGetPciInfo_v3"] = (
        "00000000:B0:00.0",
        "00000001:B0:00.0",
    )
    n01.read()
    assert [gpu["pci"] for gpu in n01.nvml.inventory()["gpus"]] == ["00000000:B0:00.0", "00000001:B0:00.0"]


def test_after_a_reload_other_gpus_are_other_gpus_and_those_that_are_gone_are_told(node: Make) -> None:  # A06
    n01 = node("H100", "H100")
    n01.read()
    n01.gpus["*.nvml*"] = "error 1"
    assert events(n01.read()) == []
    del n01.gpus["*.nvml*"]
    n01.gpus["0.nvmlDeviceGetUUID"] = uuid(7)
    points = n01.reads(62)
    assert events(points) == [("gpu_lost", f"gpu:n01/{uuid(0)}")]
    assert set(told(points)) == {uuid(7), uuid(1)}


# ---- the library and the driver ----


def test_a_driver_that_differs_from_its_library_is_one_event_until_it_does_not(node: Make, tmp_path: Path) -> None:
    n01 = node("H100")  # A27
    (tmp_path / "sys/module/nvidia").mkdir(parents=True)
    (tmp_path / "sys/module/nvidia/version").write_text("580.65.06\n")
    n01.gpus["nvmlInitWithFlags"] = "error 18"
    points = n01.reads(100)
    assert events(points) == [("driver", "host:n01")]
    assert "580.65.06" in str(n01.nvml.missing)
    assert "13.590.48.01" in str(n01.nvml.missing)
    assert not n01.nvml.stale  # a fresh process would load the same library
    assert n01.gpus.trace.read_text().count("nvmlInitWithFlags") == 2  # tried slowly
    del n01.gpus["nvmlInitWithFlags"]
    assert told(n01.reads(61))
    assert n01.nvml.missing is None


def test_a_driver_that_was_replaced_under_the_library_asks_for_a_fresh_process(node: Make) -> None:
    n01 = node("H100")
    n01.read()
    n01.gpus.answers |= {"*.nvml*": "error 18", "nvmlInitWithFlags": "error 18"}
    n01.gpus.write()
    points = n01.reads(100)
    assert n01.nvml.stale
    assert events(points) == [("driver", "host:n01")]


def test_a_driver_that_is_loaded_again_is_read_again(node: Make) -> None:
    n01 = node("H100", "H100")
    n01.reads(70)
    n01.gpus.answers |= {"*.nvml*": "error 9", "nvmlInitWithFlags": "error 9"}
    n01.gpus.write()
    assert told(n01.reads(30)) == []
    assert "not loaded" in str(n01.nvml.missing)
    assert n01.nvml.inventory() == {}
    del n01.gpus["*.nvml*"], n01.gpus["nvmlInitWithFlags"]
    points = n01.reads(61)
    assert set(told(points)) == {uuid(0), uuid(1)}
    assert events(points) == []


CHILD = """
import json, sys
from diagnosd.collectors.machine import Machine
from diagnosd.collectors.nvml import Nvml
from diagnosd.point import encode
nvml = Nvml(Machine("n01"))
for tick in range(2):
    sys.stdout.write(encode(nvml.read(1_700_000_000_000_000_000 + tick * 10**9)).decode())
print("#", json.dumps({"missing": nvml.missing, "stale": nvml.stale, "errors": nvml.errors}))
"""


def child(environment: Mapping[str, str]) -> tuple[str, dict[str, object]]:
    """The lines of two reads in a process of its own, and what the collector says of itself."""
    command = [sys.executable, "-c", CHILD]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    lines, _, end = done.stdout.rpartition("# ")
    return lines, json.loads(end)


def test_an_old_driver_is_asked_by_the_older_names(tmp_path: Path) -> None:  # A08
    newer = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetTemperatureV", "nvmlDeviceGetMemoryInfo_v2")
    gpm = ("nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc")
    gpus = Gpus(tmp_path, "H100", built=library(tmp_path, [*newer, *gpm, "nvmlDeviceGetGpuFabricInfoV"]))
    gpus["0.nvmlDeviceGetCurrentClocksThrottleReasons"] = 0x40
    gpus["0.nvmlDeviceGetTemperature.0"] = 61
    lines, end = child(gpus.environment)
    assert "clocks_event_reason_hw_thermal_slowdown=1i" in lines
    assert "temperature_gpu=61i" in lines
    assert "memory_used=20297i" in lines  # that call counts what is reserved as used
    assert end == {"missing": None, "stale": False, "errors": 0}


def test_a_driver_without_field_values_is_asked_by_single_calls(tmp_path: Path) -> None:
    gpus = Gpus(tmp_path, "H100", built=library(tmp_path, ["nvmlDeviceGetFieldValues"]))
    gpus["0.nvmlDeviceGetPowerUsage"] = 512000
    lines, end = child(gpus.environment)
    assert "power_draw=512.0" in lines
    assert end["errors"] == 0


def test_an_empty_library_is_named(tmp_path: Path) -> None:  # A31
    (tmp_path / "libnvidia-ml.so.1").touch()
    lines, end = child({"LD_LIBRARY_PATH": str(tmp_path)})
    assert lines == ""
    assert f"{tmp_path}/libnvidia-ml.so.1: file too short" in str(end["missing"])


def test_no_driver_is_a_sentence_and_no_error() -> None:
    lines, end = child({})
    if "nvidia_smi" in lines:
        pytest.skip("this machine has a driver")
    assert lines == ""
    assert "libnvidia-ml.so.1" in str(end["missing"])
    assert end["errors"] == 0


def test_a_captured_machine_asks_no_library(node: Make) -> None:
    n01 = node("H100", live=False)
    assert n01.read() == []
    assert not n01.gpus.trace.exists()


def test_the_library_is_started_once_asked_for_values_alone_and_let_go_of(node: Make) -> None:
    n01 = node("H100", "B200")
    n01.reads(130)
    n01.nvml.close()
    asked = [re.sub(r"^\d+\.", "", line) for line in n01.gpus.trace.read_text().splitlines()]
    assert (asked.count("nvmlInitWithFlags"), asked.count("nvmlShutdown")) == (1, 1)
    assert asked.count("nvmlGpmSampleAlloc") == asked.count("nvmlGpmSampleFree") == 4
    functions = {re.split(r"[.]", call)[0] for call in asked if call.startswith("nvml")}
    assert not [function for function in functions if re.search(r"Set|Clear|Reset|Modify|Register", function)]


@pytest.mark.parametrize("pattern", ["0000:20:00.0", "00000000:20:*", "GPU-00000001-*"])
def test_an_excluded_gpu_is_left_alone(node: Make, tmp_path: Path, pattern: str) -> None:
    pci_tree(tmp_path / "sys", 0, 1, 2)
    n01 = node("H100", "H100", "H100", exclude=("mlx5_*", pattern))
    points = n01.reads(70)
    assert {*told(points)} == {uuid(0), uuid(2)}
    assert events(points) == []
    asked = {line for line in n01.gpus.trace.read_text().splitlines() if line.startswith("1.")}
    known = {"1.handle", "1.nvmlDeviceGetUUID", "1.nvmlDeviceGetPciInfo_v3"}
    assert asked <= (known if pattern.startswith("GPU") else set())


def test_where_every_gpu_is_excluded_none_is_touched(node: Make, tmp_path: Path) -> None:
    pci_tree(tmp_path / "sys", 0, 1)
    n01 = node("H100", "H100", exclude=("0000:*",))
    assert n01.reads(3) == []
    assert "handle" not in n01.gpus.trace.read_text()


OPENS = """
import sys
from pathlib import Path
from diagnosd.collectors.machine import Machine
from diagnosd.collectors.nvml import Nvml
nvml = Nvml(Machine("n01", sys=Path(sys.argv[1]), exclude=("mlx5_1", "0000:20:00.0")))
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
assert nvml.read(1_700_000_000_000_000_000)
print(*opened, sep="\\n")
"""


def test_on_the_bus_nothing_is_opened_of_another_driver_s_device_nor_of_an_excluded_gpu(
    built: Path, tmp_path: Path
) -> None:  # A46
    """A NIC is excluded by a name that only its driver knows: so no NIC is opened to see whether it is a GPU."""
    pci_tree(tmp_path / "sys", 0, 1)
    (nic,) = pci_tree(tmp_path / "sys", 2, driver="mlx5_core")
    gpus = Gpus(tmp_path, "H100", "H100", built=built)
    line = [sys.executable, "-c", OPENS, str(tmp_path / "sys")]
    done = subprocess.run(line, env={**os.environ, **gpus.environment}, check=True, capture_output=True, text=True)
    assert "/0000:18:00.0/vendor" in done.stdout
    assert nic not in done.stdout
    assert "0000:20:00.0" not in done.stdout


# ---- links, cadence and inventory ----


def test_a_link_is_told_when_it_changes_and_every_minute(node: Make) -> None:  # A38, A39
    n01 = node("H100")
    assert len(told(n01.read(), "diagnosd_nvlink")) == 18
    n01.gpus["0.field.162.7"] = 3
    changed = [each for each in n01.reads(20) if each.series.measurement == "diagnosd_nvlink"]
    assert [(each.series.tag("link"), each.fields["recovery_errors"]) for each in changed] == [("7", 3)]
    for _ in range(3):
        assert set(told(n01.reads(61), "diagnosd_nvlink")) == {uuid(0)}
        assert len({each.series for each in n01.reads(61) if each.series.measurement == "diagnosd_nvlink"}) == 18


def test_a_link_that_is_down_has_no_speed_and_one_that_is_not_there_is_absent(node: Make) -> None:
    n01 = node("H100")
    n01.gpus["0.field.165.3"], n01.gpus["0.field.165.4"] = 0, 2  # down; asleep to save power
    for link in (16, 17):
        del n01.gpus[f"0.field.165.{link}"]
    links = {
        each.series.tag("link"): each.fields for each in n01.read() if each.series.measurement == "diagnosd_nvlink"
    }
    assert len(links) == 16
    assert (links["3"]["state"], links["4"]["state"]) == (0, 1)
    assert "speed" not in links["3"]
    (gpu,) = n01.nvml.inventory()["gpus"]
    assert (gpu["nvlinks"], gpu["nvlinks_active"], gpu["nvlink_to"]) == (16, 15, {"switch": 15})


def test_the_sum_of_link_errors_does_not_run_back_when_one_link_is_unreadable(node: Make) -> None:
    n01 = node("H100")
    n01.gpus["0.field.163.2"] = 40
    assert of(n01.read(), "diagnosd_gpu")["nvlink_errors"] == 40
    n01.gpus["0.field.163.2"] = "error 999"
    assert "nvlink_errors" not in of(n01.reads(12), "diagnosd_gpu")


def test_a_link_that_is_unreadable_now_is_neither_down_nor_gone_nor_told(node: Make) -> None:
    n01 = node("H100")
    n01.read()
    n01.gpus["0.field.165.6"] = "error 999"
    assert "6" not in {each.series.tag("link") for each in n01.reads(130)}
    (gpu,) = n01.nvml.inventory()["gpus"]
    assert (gpu["nvlinks"], gpu["nvlinks_active"]) == (18, 18)
    assert n01.nvml.errors == 13


def test_a_link_that_comes_up_is_asked_anew(node: Make) -> None:
    n01 = node("H100")
    n01.gpus["0.field.165.5"] = 0
    del n01.gpus["0.field.164.5"]
    n01.read()
    n01.gpus.answers |= {"0.field.165.5": "1", "0.field.164.5": "26562"}
    n01.gpus.write()
    n01.reads(25)
    (gpu,) = n01.inventory()
    assert gpu["nvlinks_active"] == 18
    last = [each for each in n01.reads(61) if each.series.tag("link") == "5"]
    assert last[-1].fields["speed"] == 26_562_000_000


def test_slow_fields_come_every_ten_seconds_and_not_of_all_gpus_at_once(node: Make) -> None:
    n01 = node(*["H100"] * 8)
    n01.reads(20)
    slow = [[each.series.tag("index") for each in n01.read() if "temperature_gpu" in each.fields] for _ in range(40)]
    assert max(map(len, slow)) == 1
    assert [index for each in slow for index in each].count("5") == 4


def test_slow_fields_keep_their_pace_where_reads_come_rarely_and_after_the_clock_was_set_back(node: Make) -> None:
    n01 = node("H100")
    n01.read()
    n01.now += 9 * SECOND
    assert "temperature_gpu" in of(n01.read(), "nvidia_smi")
    n01.now -= 3600 * SECOND
    assert "temperature_gpu" in of(n01.read(), "nvidia_smi")


def test_pcie_of_the_inventory_is_what_a_busy_gpu_reached(node: Make) -> None:  # A23
    n01 = node("H100")
    n01.reads(5)
    n01.gpus["0.nvmlDeviceGetCurrPcieLinkGeneration"] = 2
    n01.gpus["0.nvmlDeviceGetUtilizationRates"] = "0,0"
    (first,) = n01.inventory()
    (idle,) = n01.inventory()
    assert (first["pcie_gen"], first["pcie_busy"]) == (5, True)
    assert (idle["pcie_gen"], idle["pcie_busy"], idle["pcie_gen_max"]) == (2, False, 5)


def test_the_inventory_says_what_the_contract_has_for_a_gpu(node: Make, tmp_path: Path) -> None:
    pci_tree(tmp_path / "sys", 0)
    n01 = node("H100")
    n01.read()
    assert n01.nvml.inventory() == {
        "gpus": [
            {"index": 0, "uuid": uuid(0), "name": "NVIDIA H100 80GB HBM3", "pci": "00000000:18:00.0",
             "nvlinks": 18, "nvlinks_active": 18, "nvlink_gbytes_per_s": 26.562, "nvlink_to": {"switch": 18},
             "pcie_gen": 5, "pcie_gen_max": 5, "pcie_width": 16, "pcie_width_max": 16, "pcie_busy": True,
             "power_limit_w": 700.0, "power_limit_default_w": 700.0, "mig": False,
             "serial": "1650000000000", "vbios": "96.00.A5.00.01"}
        ],
        "software": {"driver": "590.48.01", "cuda": "13.1", "persistence": True},
    }  # fmt: skip


def test_links_to_other_gpus_are_counted_by_their_address(node: Make) -> None:
    n01 = node("A100", "A100")
    for link in range(12):
        n01.gpus.answers[f"0.nvmlDeviceGetNvLinkRemoteDeviceType.{link}"] = "0"
        n01.gpus.answers[f"0.nvmlDeviceGetNvLinkRemotePciInfo_v2.{link}"] = address(1)
    n01.gpus.write()
    n01.read()
    assert n01.nvml.inventory()["gpus"][0]["nvlink_to"] == {address(1): 12}


@pytest.mark.parametrize(
    ("answers", "fabric"),
    [
        ({}, None),  # A40
        ({3: "0,0,0,0,0,"}, None),
        ({3: "3,0,7,0,1,0011223344556677889900aabbccddee"},
         {"state": "completed", "status": "success", "clique": 7, "health": "healthy",
          "cluster_uuid": "00112233-4455-6677-8899-00aabbccddee"}),
        ({3: f"3,0,0,0,0,{'0' * 32}"}, {"state": "completed", "status": "success", "clique": 0}),
        ({3: "2,0,0,0,0,"}, {"state": "in progress", "clique": 0}),
        ({3: "error 25", 2: f"3,0,0,{0b10_10_10_01},0,{'0' * 32}"},
         {"state": "completed", "status": "success", "clique": 0, "health": "degraded bandwidth"}),
    ],
)  # fmt: skip
def test_the_fabric_is_told_where_there_is_one(
    node: Make, answers: Mapping[int, str], fabric: dict[str, object] | None
) -> None:
    n01 = node("H100")
    for version, answer in answers.items():
        n01.gpus[f"0.nvmlDeviceGetGpuFabricInfoV.{version}"] = answer
    n01.read()
    assert n01.nvml.inventory().get("fabric") == fabric
    assert n01.nvml.errors == 0


# ---- the tables, and anything at all ----


def test_the_tables_ask_for_every_field_of_the_contract_in_its_type() -> None:
    asked = {name for question in (*FAST, *SLOW) for name in question.names} | {name for _, name in ACTIVITY}
    links = {name for question in of_link(0) for name in question.names}
    fields = {**SCHEMA["nvidia_smi"].fields, **SCHEMA["diagnosd_gpu"].fields}
    assert asked | {"nvlink_errors"} == set(fields)
    assert links == set(SCHEMA["diagnosd_nvlink"].fields)
    for name, limit in LIMITS.items():
        known = fields.get(name) or SCHEMA["diagnosd_nvlink"].fields.get(name)
        assert known is None or isinstance(limit.fit(1), int) == (known.type == "i"), name


CALLS = [
    "0.*", "*.nvmlDeviceGetUUID", "0.handle", "1.nvmlDeviceGetFieldValues", "nvmlInitWithFlags",
    "nvmlDeviceGetCount_v2",
    "0.nvmlDeviceGetName", "0.nvmlDeviceGetUUID", "0.nvmlDeviceGetPciInfo_v3", "0.nvmlDeviceGetSerial",
    "0.nvmlDeviceGetUtilizationRates", "0.nvmlDeviceGetClockInfo.1", "0.nvmlDeviceGetMemoryInfo_v2",
    "0.nvmlDeviceGetCurrentClocksEventReasons", "0.nvmlDeviceGetTemperatureV.0", "0.nvmlDeviceGetMigMode",
    "0.nvmlGpmQueryDeviceSupport", "0.nvmlGpmSampleGet", "0.gpm.2", "0.gpm.5", "0.field.*", "1.field.*", "0.field.91.0",
    "0.field.83.0", "0.field.185.0", "0.field.197.0", "0.field.164.0", "0.field.165.0", "0.field.163.1",
    f"0.field.138.{ALL_LINKS}", "0.nvmlDeviceGetGpuFabricInfoV.3", "0.nvmlDeviceGetNvLinkRemoteDeviceType.0",
    "0.nvmlDeviceGetNvLinkRemotePciInfo_v2.0", "nvmlSystemGetDriverVersion", "nvmlSystemGetCudaDriverVersion_v2",
]  # fmt: skip
WORDS = st.sampled_from(["", "double ", "uint ", "ulong ", "ull ", "sll ", "sint ", "ushort "])
NUMBERS = st.one_of(
    st.integers(-(2**63), 2**64 - 1).map(str), st.floats().map(str), st.sampled_from(["0", "1", "2", "100,7", "36"])
)
ANSWERS = st.one_of(
    st.tuples(WORDS, NUMBERS).map("".join),
    st.sampled_from([*range(31), 999, 12345]).map("error {}".format),
    st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\n\r\x00"), max_size=40),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    answers=st.lists(st.dictionaries(st.sampled_from(CALLS), ANSWERS, max_size=6), min_size=1, max_size=3),
    link=st.sampled_from(["H100", "B200", "T4"]),
)
def test_whatever_a_driver_answers_no_read_fails_and_only_the_contracts_fields_come(
    node: Make, answers: list[dict[str, str]], link: str
) -> None:
    n01 = node(link, "H100")
    healthy = dict(n01.gpus.answers)
    for odd in answers:
        n01.gpus.answers = {**healthy, **odd}
        n01.gpus.write()
        for _ in range(2):
            n01.now += 7 * SECOND
            for each in n01.read():
                measurement = SCHEMA[each.series.measurement]
                assert each.series.measurement in OURS
                assert set(each.fields) <= set(measurement.fields)
                assert set(measurement.tags) <= dict(each.series.tags).keys()
        json.dumps(n01.nvml.inventory(), allow_nan=False)
    n01.nvml.close()
