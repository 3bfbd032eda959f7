"""What NVML is asked for, as tables: a row a question, with our names and the ways to ask it, the best first.

Numbers of fields, sensors and counters are those of NVIDIA's nvml.h, its binary interface: they do not change. Which of
them a driver and a GPU have is found out by asking; nothing here depends on a generation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from diagnosd.schema import SCHEMA

Answer = int | float | str

SMI = frozenset(SCHEMA["nvidia_smi"].fields)
"""The names that go into `nvidia_smi`; the others go into `diagnosd_gpu`."""

ALL_LINKS = 0xFFFFFFFF  # as a scope: summed by the driver over all NVLinks
MAX_LINKS = 72  # of any GPU that nvml.h has numbers for
MEMORY_V2 = 0x02000028  # nvmlMemory_v2: size and version of the struct
KIB, MEGA = 1024, 1_000_000
MILLI, NANO = 1_000, 1_000_000_000  # how many are one of the unit


class Value(NamedTuple):
    """An element of nvmlDeviceGetFieldValues."""

    field: int
    scope: int = 0
    times: int = 1  # what one count is in our unit,
    per: int = 1  # or how many of them are one of ours
    each_link: bool = False  # asked of every NVLink, and summed


class Call(NamedTuple):
    """A function of nvidia-ml-py, by name: it need not have it. `take` makes our values of what it returns."""

    function: str
    arguments: tuple[int, ...] = ()
    take: Callable[[Any], tuple[Answer, ...]] = lambda answer: (answer,)


Way = Value | Call


class Question(NamedTuple):
    names: tuple[str, ...]  # of the values of the answer
    ways: tuple[Way, ...]
    mig: bool = True  # whether it means anything of a GPU that is cut into MIG slices


# ---- every second ----

# Bits of nvmlDeviceGetCurrentClocksEventReasons. 0x10 is sync boost, 0x100 a display's clocks; what a later driver adds
# is no reason that anybody here knows.
REASONS = (
    (0x01, "clocks_event_reason_gpu_idle"),
    (0x02, "clocks_event_reason_applications_clocks_setting"),
    (0x04, "clocks_event_reason_sw_power_cap"),
    (0x08, "clocks_event_reason_hw_slowdown"),
    (0x20, "clocks_event_reason_sw_thermal_slowdown"),
    (0x40, "clocks_event_reason_hw_thermal_slowdown"),
    (0x80, "clocks_event_reason_hw_power_brake_slowdown"),
)


def _reasons(mask: int) -> tuple[int, ...]:
    """All bits set is how NVML says that it does not know: impossible values then."""
    return tuple(-1 if mask >> 63 else int(mask & bit != 0) for bit, _ in REASONS)


def _watts(milliwatts: int) -> tuple[float]:
    return (milliwatts / MILLI,)


FAST = (
    Question(
        ("utilization_gpu", "utilization_memory"),
        (Call("nvmlDeviceGetUtilizationRates", (), lambda rates: (rates.gpu, rates.memory)),),
        mig=False,
    ),
    Question(("clocks_current_sm",), (Call("nvmlDeviceGetClockInfo", (1,)),)),
    Question(("clocks_current_memory",), (Call("nvmlDeviceGetClockInfo", (2,)),)),
    Question(
        tuple(name for _, name in REASONS),
        (
            Call("nvmlDeviceGetCurrentClocksEventReasons", (), _reasons),
            Call("nvmlDeviceGetCurrentClocksThrottleReasons", (), _reasons),  # drivers before 535
        ),
    ),
    Question(("pcie_link_gen_current",), (Call("nvmlDeviceGetCurrPcieLinkGeneration"),)),
    Question(("pcie_link_width_current",), (Call("nvmlDeviceGetCurrPcieLinkWidth"),)),
    # 185 is the mean of a second, which GA100 and what is older do not have.
    Question(
        ("power_draw",), (Value(185, per=MILLI), Value(186, per=MILLI), Call("nvmlDeviceGetPowerUsage", (), _watts))
    ),
    Question(("power_draw_instant",), (Value(186, per=MILLI),)),
    Question(("energy",), (Value(83, per=MILLI),)),
    Question(("throttle_sw_power",), (Value(74, per=NANO),)),
    Question(("throttle_sw_thermal",), (Value(269, per=NANO),)),
    Question(("throttle_hw_thermal",), (Value(270, per=NANO),)),
    Question(("throttle_power_brake",), (Value(271, per=NANO),)),
    # Payload in KiB; where neither the sum nor the links have it, the bytes of NVLink 5.
    Question(
        ("nvlink_tx_bytes",),
        (Value(138, ALL_LINKS, KIB), Value(138, times=KIB, each_link=True), Value(202, each_link=True)),
    ),
    Question(
        ("nvlink_rx_bytes",),
        (Value(139, ALL_LINKS, KIB), Value(139, times=KIB, each_link=True), Value(204, each_link=True)),
    ),
    Question(("pcie_tx_bytes",), (Value(197),)),
    Question(("pcie_rx_bytes",), (Value(198),)),
)

# nvml.h: "Value can be wrapped", and programs that read them take 32 bits. Generation 5 with 16 lanes moves 4 GiB in
# 70 ms: at one read a second such a counter says nothing. One that has shown more than 32 bits has at least 40, if the
# hardware counts in whole bytes, and 2^40 bytes take 17 s: the reader of the trace sees every wrap of it.
WRAPPING = ("pcie_tx_bytes", "pcie_rx_bytes")
WIDE = 2**32

# metric of GPM, in percent -> our name
ACTIVITY = ((2, "sm_active"), (5, "tensor_active"), (10, "dram_active"))

# ---- every ten seconds ----


def _mib(total: int, used: int) -> tuple[int, int]:
    """As nvidia-smi rounds. More in use than there is: the driver did not know."""
    return (-1 if used > total else used + 2**19 >> 20, total + 2**19 >> 20)


# part of our name -> enumeration of nvml.h
_SINCE = (("volatile", 0), ("aggregate", 1))
_WHERE = (("dram", 2), ("sram", 7))
_KINDS = (("correctable", 0), ("uncorrectable", 1))

SLOW = (
    Question(
        ("memory_used", "memory_total"),
        (
            Call("nvmlDeviceGetMemoryInfo", (MEMORY_V2,), lambda memory: _mib(memory.total, memory.used)),
            Call(
                "nvmlDeviceGetMemoryInfo", (), lambda memory: _mib(memory.total, memory.used)
            ),  # with the reserved part
        ),
    ),
    Question(("temperature_gpu",), (Call("nvmlDeviceGetTemperatureV", (0,)), Call("nvmlDeviceGetTemperature", (0,)))),
    Question(("temperature_memory",), (Value(82),)),
    Question(("power_limit",), (Value(190, per=MILLI), Call("nvmlDeviceGetEnforcedPowerLimit", (), _watts))),
    *(
        Question(
            (f"ecc_errors_{since}_{where}_{kind}",),
            (Call("nvmlDeviceGetMemoryErrorCounter", (kind_number, since_number, where_number)),),
        )
        for since, since_number in _SINCE
        for where, where_number in _WHERE
        for kind, kind_number in _KINDS
    ),
    Question(("remapped_rows_correctable",), (Value(142),)),
    Question(("remapped_rows_uncorrectable",), (Value(143),)),
    Question(("pcie_replays",), (Value(94), Call("nvmlDeviceGetPcieReplayCounter"))),
)

# NVML_NVLINK_STATE_*: inactive, active, asleep to save power (a transfer wakes it), active without traffic
LINK_UP: Mapping[Answer | None, int] = {0: 0, 1: 1, 2: 1, 3: 0}
LINK_ERRORS = ("crc_errors", "replay_errors", "recovery_errors")  # what nvlink_errors sums


def of_link(link: int) -> tuple[Question, ...]:
    """NVLink 5 (Blackwell) counts no CRC errors and no replays: packets with errors are the nearest to the former."""
    speed = 84 + link if link < 6 else 126 + link  # drivers that have no 164 have these, up to link 11
    return (
        Question(("state",), (Value(165, link), Call("nvmlDeviceGetNvLinkState", (link,)))),
        Question(("speed",), (Value(164, link, MEGA), *([Value(speed, times=MEGA)] if link < 12 else []))),
        Question(("crc_errors",), (Value(163, link), _errors(link, 2), Value(208, link))),
        Question(("replay_errors",), (Value(161, link), _errors(link, 0))),
        Question(("recovery_errors",), (Value(162, link), _errors(link, 1), Value(215, link))),
        Question(("effective_errors",), (Value(219, link),)),
        Question(("symbol_errors",), (Value(221, link),)),
    )


def _errors(link: int, kind: int) -> Call:
    return Call("nvmlDeviceGetNvLinkErrorCounter", (link, kind))


# ---- every minute: what the GPU is, in the words of the inventory ----

FACTS = (
    Question(("mig",), (Call("nvmlDeviceGetMigMode", (), lambda modes: (modes[0],)),)),
    Question(("links",), (Value(91),)),
    Question(("pcie_gen_max",), (Call("nvmlDeviceGetMaxPcieLinkGeneration"),)),
    Question(("pcie_width_max",), (Call("nvmlDeviceGetMaxPcieLinkWidth"),)),
    Question(("power_limit_w",), (Value(190, per=MILLI), Call("nvmlDeviceGetEnforcedPowerLimit", (), _watts))),
    Question(
        ("power_limit_default_w",),
        (Value(189, per=MILLI), Call("nvmlDeviceGetPowerManagementDefaultLimit", (), _watts)),
    ),
    Question(("serial",), (Call("nvmlDeviceGetSerial"),)),
    Question(("vbios",), (Call("nvmlDeviceGetVbiosVersion"),)),
    Question(("persistence",), (Call("nvmlDeviceGetPersistenceMode"),)),
)

REMOTE_SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH


def remote_of(link: int) -> tuple[Question, ...]:
    return (
        Question(("type",), (Call("nvmlDeviceGetNvLinkRemoteDeviceType", (link,)),)),
        Question(("pci",), (Call("nvmlDeviceGetNvLinkRemotePciInfo", (link,), lambda pci: (pci.busId,)),)),
    )


# ---- what is possible ----


class Limit(NamedTuple):
    fit: Callable[[Any], int | float]
    least: float
    most: float


def _whole(number: float) -> int:
    return int(number) % 2**63


_PERCENT = Limit(_whole, 0, 100)
_FLAG = Limit(_whole, 0, 1)
_COUNT = Limit(_whole, 0, 2**63 - 1)
_BYTES = Limit(_whole, 0, 2**63 * KIB)
_SECONDS = Limit(float, 0, 1e10)
_MHZ = Limit(_whole, 1, 100_000)
_WATTS = Limit(float, 1e-3, 1e5)
_CELSIUS = Limit(_whole, 1, 150)  # an unread sensor says 0 or -1
_SHARE = Limit(float, 0, 1)

# Outside of these lies what drivers say instead of "I do not know": -1, 2^63, 0 W, 1.4e16 %.
LIMITS: Mapping[str, Limit] = {
    "utilization_gpu": _PERCENT,
    "utilization_memory": _PERCENT,
    "clocks_current_sm": _MHZ,
    "clocks_current_memory": _MHZ,
    **{name: _FLAG for _, name in REASONS},
    "pcie_link_gen_current": Limit(_whole, 1, 10),
    "pcie_link_width_current": Limit(_whole, 1, 32),
    "power_draw": _WATTS,
    "power_draw_instant": _WATTS,
    "power_limit": _WATTS,
    "memory_used": Limit(_whole, 0, 2**30),
    "memory_total": Limit(_whole, 1, 2**30),
    "temperature_gpu": _CELSIUS,
    "temperature_memory": _CELSIUS,
    **{name: _COUNT for question in SLOW for name in question.names if name.startswith("ecc_errors")},
    "remapped_rows_correctable": Limit(_whole, 0, 2**31 - 1),
    "remapped_rows_uncorrectable": Limit(_whole, 0, 2**31 - 1),
    "energy": Limit(float, 0, 1e13),
    "throttle_sw_power": _SECONDS,
    "throttle_sw_thermal": _SECONDS,
    "throttle_hw_thermal": _SECONDS,
    "throttle_power_brake": _SECONDS,
    "nvlink_tx_bytes": _BYTES,
    "nvlink_rx_bytes": _BYTES,
    "pcie_tx_bytes": _BYTES,
    "pcie_rx_bytes": _BYTES,
    "pcie_replays": Limit(_whole, 0, 2**32 - 2),
    **{name: _SHARE for _, name in ACTIVITY},
    # of a link
    "state": Limit(_whole, 0, 3),
    "speed": Limit(_whole, 0, 1e13),
    "crc_errors": _COUNT,
    "replay_errors": _COUNT,
    "recovery_errors": _COUNT,
    "effective_errors": _COUNT,
    "symbol_errors": _COUNT,
    # of the inventory
    "mig": _FLAG,
    "persistence": _FLAG,
    "links": Limit(_whole, 0, MAX_LINKS),
    "pcie_gen_max": Limit(_whole, 1, 10),
    "pcie_width_max": Limit(_whole, 1, 32),
    "power_limit_w": _WATTS,
    "power_limit_default_w": _WATTS,
    "type": Limit(_whole, 0, 255),
}
