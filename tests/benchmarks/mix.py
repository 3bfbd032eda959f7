"""The mix that the figures are measured on: a quarter of the field values each of `infiniband`, `nvidia_smi`,
`diagnosd_step` and small host points, of 8 hosts over 10 minutes.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from diagnosd.point import Point, Value, point

if TYPE_CHECKING:
    from collections.abc import Iterator

START = 1_792_000_000_000_000_000  # ns: October 2026
SECOND = 1_000_000_000

_INFINIBAND = [
    "VL15_dropped",
    "excessive_buffer_overrun_errors",
    "link_downed",
    "link_error_recovery",
    "local_link_integrity_errors",
    "multicast_rcv_packets",
    "multicast_xmit_packets",
    "port_rcv_constraint_errors",
    "port_rcv_data",
    "port_rcv_errors",
    "port_rcv_packets",
    "port_rcv_remote_physical_errors",
    "port_rcv_switch_relay_errors",
    "port_xmit_constraint_errors",
    "port_xmit_data",
    "port_xmit_discards",
    "port_xmit_packets",
    "port_xmit_wait",
    "symbol_error",
    "unicast_rcv_packets",
    "unicast_xmit_packets",
    "np_cnp_sent",
    "rp_cnp_handled",
    "out_of_sequence",
]
_BUSY = {
    "port_rcv_data",
    "port_xmit_data",
    "port_rcv_packets",
    "port_xmit_packets",
    "unicast_rcv_packets",
    "port_xmit_wait",
}


def mix(hosts: int = 8, seconds: int = 600) -> Iterator[Point]:
    """Points in the order of time; a step takes 0.8 s."""
    rng = random.Random(20261130)
    for tick in range(seconds):
        for number in range(hosts):
            yield from _host(f"n{number + 1:02}", number, tick, rng)


def _host(host: str, number: int, tick: int, rng: random.Random) -> Iterator[Point]:
    now = START + tick * SECOND + number * 1_000_003
    counters: dict[str, Value] = {
        name: (10**12 + tick * 5 * 10**9 + rng.randrange(10**8)) if name in _BUSY else rng.randrange(20)
        for name in _INFINIBAND
    }
    yield point("infiniband", {"host": host, "device": "mlx5_0", "port": "1"}, counters, now)
    yield point(
        "nvidia_smi",
        {"host": host, "index": "0", "uuid": f"GPU-8f1c00{number}", "name": "NVIDIA H100 80GB HBM3"},
        _gpu(rng),
        now,
    )
    yield from _small(host, tick, now, rng)
    for step in range(tick * 5 // 4, (tick + 1) * 5 // 4):
        yield _step(host, number, step, rng)


def _gpu(rng: random.Random) -> dict[str, Value]:
    return {
        "utilization_gpu": rng.randrange(90, 101),
        "utilization_memory": rng.randrange(40, 60),
        "memory_used": 70000 + rng.randrange(999),
        "memory_total": 81559,
        "temperature_gpu": rng.randrange(50, 70),
        "temperature_memory": rng.randrange(60, 80),
        "clocks_current_sm": rng.choice((1755, 1770, 1980)),
        "clocks_current_memory": 2619,
        "power_draw": round(rng.uniform(400, 690), 2),
        "power_limit": 700.0,
        "pcie_link_gen_current": 5,
        "pcie_link_width_current": 16,
        "clocks_event_reason_sw_power_cap": rng.randrange(2),
        "clocks_event_reason_hw_slowdown": 0,
        "clocks_event_reason_sw_thermal_slowdown": 0,
        "clocks_event_reason_hw_thermal_slowdown": 0,
        "clocks_event_reason_hw_power_brake_slowdown": 0,
        "clocks_event_reason_gpu_idle": 0,
        "clocks_event_reason_applications_clocks_setting": 0,
        "ecc_errors_volatile_dram_correctable": 0,
        "ecc_errors_volatile_dram_uncorrectable": 0,
        "ecc_errors_aggregate_dram_uncorrectable": 0,
        "remapped_rows_uncorrectable": 0,
    }


def _step(host: str, rank: int, step: int, rng: random.Random) -> Point:
    end = START + (step + 1) * SECOND * 4 // 5 + rng.randrange(10**6)
    phases = {
        name: rng.gauss(mean, mean / 50) for name, mean in (("data_wait", 0.02), ("forward", 0.2), ("backward", 0.4))
    }
    comm = rng.gauss(0.15, 0.01)
    fields: dict[str, Value] = {
        "step": step,
        "attempt": 0,
        "duration": sum(phases.values()) + comm + 0.03,
        "clock": "host",
        **phases,
        "optimizer": rng.gauss(0.02, 0.001),
        "comm": comm,
        "other": 0.01,
        "samples": 32,
        "queue": rng.randrange(8),
        "queue_size": 8,
        "workers": 4,
        "sync_enter": end - 2 * 10**8,
        "sync_exit": end - 4 * 10**7,
        "sync_group": "world:0",
        "sync_bytes": 102_400_000,
        "kind": "train",
    }
    return point("diagnosd_step", {"job": "llama-70b", "host": host, "rank": str(rank), "source": "probe"}, fields, end)


def _small(host: str, tick: int, now: int, rng: random.Random) -> Iterator[Point]:
    idle = rng.uniform(40, 90)
    cpu: dict[str, Value] = {
        "usage_user": 95 - idle,
        "usage_system": 4.5,
        "usage_idle": idle,
        "usage_iowait": 0.5,
        "usage_steal": 0.0,
    }
    sent = 10**11 + tick * 10**8 + rng.randrange(10**6)
    net: dict[str, Value] = {
        "bytes_sent": sent,
        "bytes_recv": sent + 12345,
        "packets_sent": sent // 1400,
        "packets_recv": sent // 1400,
    }
    tcp: dict[str, Value] = {"TcpRetransSegs": 100 + tick // 7, "TcpOutSegs": sent // 1400}
    io: dict[str, Value] = {
        "avg10": rng.choice((0.0, 0.12, 1.5)),
        "avg60": 0.3,
        "avg300": 0.25,
        "total": 10**9 + tick * 3000,
    }
    agent: dict[str, Value] = {
        "up": 1,
        "seconds": rng.uniform(0.001, 0.004),
        "errors": 0,
        "dropped": 0,
        "cpu_seconds": tick * 0.004,
        "rss": 48_000_000,
    }
    yield point("cpu", {"host": host, "cpu": "cpu-total"}, cpu, now)
    yield point("net", {"host": host, "interface": "ib0"}, net, now)
    yield point("nstat", {"host": host, "name": "snmp"}, tcp, now)
    yield point("pressure", {"host": host, "resource": "io", "type": "some"}, io, now)
    yield point("diagnosd_agent", {"host": host, "collector": "agent"}, agent, now)
