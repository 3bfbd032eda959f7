"""The telemetry contract as data: one row a field.

What stands here is what crosses a process boundary. A name is a tag or a field of its measurement, never both; a type
never changes. A cadence is how often a field may be expected: `fast` about every second, `slow` about every ten,
`state` at least every minute and on change, `event` when it happens. `slow` and `state` fields may be sent on change
only: their last value holds for `HOLD_SECONDS`, after that it is unknown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

VERSION = 1
HOLD_SECONDS = 90.0  # three missed `state` half-periods; the contract's figure

TYPES = ("i", "f", "s", "b")
KINDS = ("gauge", "counter", "state", "event")
CADENCES = ("fast", "slow", "state", "event")


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    type: str  # i, f, s or b
    unit: str  # of the value as it is sent: "" where it has none
    kind: str  # gauge; counter (cumulative since boot or start, raw); state (holds until changed); event
    cadence: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Measurement:
    name: str
    meaning: str
    tags: tuple[str, ...]  # every point has them
    optional_tags: tuple[str, ...]
    fields: Mapping[str, Field]
    any_field: str | None = None  # the type of every field that is not listed, where names belong to a driver

    def type_of(self, field: str) -> str | None:
        """The type the contract fixes for a field, or None where it fixes none."""
        known = self.fields.get(field)
        return known.type if known else self.any_field

    def kind_of(self, field: str) -> str | None:
        known = self.fields.get(field)
        if known:
            return known.kind
        return "counter" if self.any_field == "i" else None


def _measurement(
    name: str,
    meaning: str,
    tags: str,
    *rows: tuple[str, str, str, str, str, str],
    optional: str = "",
    any_field: str | None = None,
) -> Measurement:
    fields = {row[0]: Field(*row) for row in rows}
    return Measurement(name, meaning, tuple(tags.split()), tuple(optional.split()), MappingProxyType(fields), any_field)


_JOB = (
    _measurement(
        "diagnosd_job",
        "what the job is, in parts that the reader unites",
        "job",
        ("spec", "s", "JSON", "state", "state", "JobSpec, or the part of it that this node knows"),
        ("state", "s", "", "state", "state", "running or ended"),
        ("attempt", "i", "", "state", "state", "incarnation of the job, from 0: restarts and elastic resizes"),
    ),
    _measurement(
        "diagnosd_rank",
        "one rank, told by its own host",
        "job host rank",
        ("attempt", "i", "", "state", "state", "incarnation of the job"),
        ("world", "i", "", "state", "state", "ranks of the job in this attempt"),
        ("local_rank", "i", "", "state", "state", "the rank's number on its host"),
        ("gpu", "s", "", "state", "state", "uuid of its GPU"),
        ("state", "s", "", "state", "state", "running, exited or lost"),
        ("exit_code", "i", "", "state", "state", "of the process, once it has exited"),
        ("container", "b", "", "state", "state", "runs in a container"),
        ("coords", "s", "", "state", "state", "place in the parallel layout: tp=0,dp=1,pp=3"),
        ("loader", "s", "", "state", "state", "what loads data on this rank: torch, dali, api or none"),
        ("versions", "s", "", "state", "state", "of its software: torch=2.13,nccl=2.30.7"),
        ("env", "s", "JSON", "state", "state", "allow-listed NCCL_*, TORCH_* and CUDA_VISIBLE_DEVICES"),
        ("addresses", "s", "", "state", "state", "local addresses of the rank's TCP connections, comma-separated"),
    ),
    _measurement(
        "diagnosd_group",
        "a process group as it was observed",
        "job group",
        ("members", "s", "", "state", "state", "global ranks, as ranges: 0-7,64-71"),
        ("attempt", "i", "", "state", "state", "incarnation of the job"),
        ("backend", "s", "", "state", "state", "nccl, gloo, mpi, ..."),
    ),
    _measurement(
        "diagnosd_step",
        "one step of one rank; `time` is its end",
        "job host rank source",
        ("step", "i", "", "event", "event", "the framework's step number"),
        ("attempt", "i", "", "event", "event", "incarnation of the job"),
        ("duration", "f", "s", "event", "event", "end of the previous step to the end of this one, on the wall"),
        (
            "clock",
            "s",
            "",
            "event",
            "event",
            "host or device: whose clock measured h2d, forward, backward, optimizer, comm",
        ),
        ("data_wait", "f", "s", "event", "event", "blocked on the next batch; absent on a rank that loads nothing"),
        ("h2d", "f", "s", "event", "event", "host-to-device copy that the step waited for"),
        (
            "forward",
            "f",
            "s",
            "event",
            "event",
            "as the framework divides it; with sharded parameters it holds communication",
        ),
        ("backward", "f", "s", "event", "event", "likewise"),
        ("optimizer", "f", "s", "event", "event", "likewise"),
        ("comm", "f", "s", "event", "event", "blocked in collectives outside the above, waiting included"),
        ("checkpoint", "f", "s", "event", "event", "saving inside this step's duration"),
        ("eval", "f", "s", "event", "event", "evaluation inside this step's duration"),
        ("blocked", "f", "s", "event", "event", "the host blocked in a synchronising device call"),
        ("other", "f", "s", "event", "event", "duration minus the phases of the same clock"),
        ("device", "f", "s", "event", "event", "first to last event on the compute stream, waits inside included"),
        (
            "device_gap",
            "f",
            "s",
            "event",
            "event",
            "end of the previous step's last kernel to the start of this step's first",
        ),
        ("compute", "f", "s", "event", "event", "kernel time without communication kernels; absent when only guessed"),
        ("tokens", "i", "", "event", "event", "processed by this rank in this step"),
        ("samples", "i", "", "event", "event", "processed by this rank in this step"),
        ("tokens_sq", "f", "", "event", "event", "sum of squared sequence lengths"),
        ("queue", "i", "", "event", "event", "batches ready in order in the loader's queue when the step asked"),
        ("queue_size", "i", "", "event", "event", "that queue's capacity"),
        ("workers", "i", "", "event", "event", "loader workers"),
        (
            "sync_enter",
            "i",
            "ns",
            "event",
            "event",
            "start of the step's largest blocking collective, on the wall clock",
        ),
        ("sync_exit", "i", "ns", "event", "event", "its end"),
        ("sync_group", "s", "", "event", "event", "its group"),
        ("sync_bytes", "i", "bytes", "event", "event", "what that group reduced in this step"),
        ("kind", "s", "", "event", "event", "train (default), warmup, compile, eval or checkpoint"),
        ("loss", "f", "", "event", "event", "not sent by default"),
    ),
    _measurement(
        "diagnosd_collective",
        "a sampled collective; every member of a group keeps the same seq",
        "job host rank group op",
        ("seq", "i", "", "event", "event", "counts per group, equal on all members"),
        ("step", "i", "", "event", "event", "the step it belongs to"),
        ("bytes", "i", "bytes", "event", "event", "message size as nccl-tests counts it"),
        ("enter", "i", "ns", "event", "event", "start, on the wall clock"),
        ("exit", "i", "ns", "event", "event", "end, on the wall clock"),
        ("duration", "f", "s", "event", "event", "exit minus enter"),
        ("busbw", "f", "bytes/s", "event", "event", "bus bandwidth as nccl-tests counts it"),
        ("ranks", "i", "", "event", "event", "members of the group"),
        ("nodes", "i", "", "event", "event", "hosts of the group"),
        ("peer", "i", "", "event", "event", "the other rank of a send or recv"),
        ("timing", "s", "", "event", "event", "what was timed: device, host or enqueue"),
        ("source", "s", "", "event", "event", "probe, inspector, flight or ras"),
        ("algo", "s", "", "event", "event", "NCCL's algorithm"),
        ("proto", "s", "", "event", "event", "NCCL's protocol"),
    ),
    _measurement(
        "diagnosd_process",
        "a rank's process, also while its main thread hangs",
        "job host rank",
        ("phase", "s", "", "gauge", "fast", "what the rank is in: data_wait, forward, ..., collective"),
        ("phase_seconds", "f", "s", "gauge", "fast", "for how long"),
        ("step", "i", "", "gauge", "fast", "the step it is in"),
        ("group", "s", "", "gauge", "fast", "group of the last collective entered"),
        ("seq", "i", "", "gauge", "fast", "number of the last collective entered"),
        ("stack", "s", "", "event", "event", "innermost frames, once, when a phase lasts beyond max(60 s, 10 steps)"),
        ("cpu_main", "f", "cores", "gauge", "fast", "used by the main thread"),
        ("cpu_workers", "f", "cores", "gauge", "fast", "used by the loader's workers"),
        ("throttled", "f", "0..1", "gauge", "fast", "share of cgroup periods in which it was throttled"),
        ("read_bytes", "i", "bytes", "counter", "fast", "read from storage by the process and its workers"),
        ("write_bytes", "i", "bytes", "counter", "fast", "written to storage"),
        ("rss", "i", "bytes", "gauge", "slow", "resident memory"),
        ("involuntary_switches", "i", "", "counter", "fast", "times it was preempted"),
        ("state", "s", "", "gauge", "fast", "the kernel's letter: R, S, D, ..."),
        ("gc_seconds", "f", "s", "counter", "fast", "spent in Python's garbage collector"),
    ),
    _measurement(
        "diagnosd_socket",
        "a rank's TCP connections to one peer address, or `other`",
        "job host rank peer",
        ("rtt", "f", "s", "gauge", "fast", "smoothed round-trip time"),
        ("cwnd", "i", "segments", "gauge", "fast", "congestion window"),
        ("retransmits", "i", "", "counter", "fast", "segments sent again"),
        ("bytes_sent", "i", "bytes", "counter", "fast", "acknowledged or not"),
        ("bytes_received", "i", "bytes", "counter", "fast", "from the peer"),
        ("segments_sent", "i", "", "counter", "fast", "with data, those sent again among them"),
        ("busy", "f", "s", "counter", "fast", "with bytes under way or waiting to be sent, of each connection"),
        ("receiver_limited", "f", "s", "counter", "fast", "of those, with the peer's receive window closed"),
        ("send_queue", "i", "bytes", "gauge", "fast", "written by the process, not yet acknowledged"),
        ("receive_queue", "i", "bytes", "gauge", "fast", "arrived, not yet read by the process"),
    ),
    _measurement(
        "diagnosd_nccl",
        "facts read from NCCL's log",
        "job host rank",
        ("version", "s", "", "state", "state", "of NCCL"),
        ("transport", "s", "", "state", "state", "channels by transport: NET/IB/GDRDMA:14,P2P/CUMEM:7"),
        ("network", "s", "", "state", "state", "IB, RoCE, Socket or EFA"),
        ("nics", "s", "", "state", "state", "comma-separated"),
        ("gdr", "b", "", "state", "state", "all network channels use GPUDirect RDMA"),
        ("gdr_share", "f", "0..1", "state", "state", "share of network channels that do"),
        ("channels", "i", "", "state", "state", "in the group"),
        ("intra", "s", "", "state", "state", "inside the node: NVLS, P2P or SHM"),
        ("net_plugin", "s", "", "state", "state", "its name"),
        optional="group",
    ),
    _measurement(
        "diagnosd_event",
        "something that happened; subject is a locus",
        "host kind subject",
        ("text", "s", "", "event", "event", "in words"),
        ("code", "i", "", "event", "event", "Xid, exit code, ..."),
        ("value", "f", "", "event", "event", "its size, where it has one"),
        optional="job",
    ),
)

_MACHINES = (
    _measurement(
        "diagnosd_node",
        "what a machine is",
        "host",
        ("inventory", "s", "JSON", "state", "state", "NodeInventory; a key that is unknown on this host is missing"),
    ),
    _measurement(
        "diagnosd_cluster",
        "what its operators declare",
        "cluster",
        ("spec", "s", "JSON", "state", "state", "ClusterSpec: the contents of cluster.toml"),
    ),
)

_GPUS = (
    _measurement(
        "nvidia_smi",
        "a GPU, as Telegraf's nvidia_smi plugin tells it",
        "host index uuid name",
        ("utilization_gpu", "i", "%", "gauge", "fast", "share of time with any kernel running: proves nothing"),
        ("utilization_memory", "i", "%", "gauge", "fast", "share of time the memory was read or written"),
        ("memory_used", "i", "MiB", "gauge", "slow", "framebuffer in use"),
        ("memory_total", "i", "MiB", "gauge", "slow", "framebuffer there is"),
        ("temperature_gpu", "i", "\N{DEGREE SIGN}C", "gauge", "slow", "of the chip"),
        ("temperature_memory", "i", "\N{DEGREE SIGN}C", "gauge", "slow", "of the memory"),
        ("clocks_current_sm", "i", "MHz", "gauge", "fast", "of the SMs"),
        ("clocks_current_memory", "i", "MHz", "gauge", "fast", "of the memory"),
        ("power_draw", "f", "W", "gauge", "fast", "the driver's 1 s average where it has one"),
        ("power_draw_instant", "f", "W", "gauge", "fast", "not averaged; with older GPUs power_draw is this too"),
        ("power_limit", "f", "W", "gauge", "slow", "the one in force"),
        ("pcie_link_gen_current", "i", "", "gauge", "fast", "idle GPUs lower it: judge it only under load"),
        ("pcie_link_width_current", "i", "lanes", "gauge", "fast", "in use"),
        ("clocks_event_reason_sw_power_cap", "i", "0/1", "gauge", "fast", "clocks held by the power limit"),
        ("clocks_event_reason_hw_slowdown", "i", "0/1", "gauge", "fast", "hardware slowdown, thermal or power brake"),
        ("clocks_event_reason_sw_thermal_slowdown", "i", "0/1", "gauge", "fast", "the driver keeps it cool"),
        ("clocks_event_reason_hw_thermal_slowdown", "i", "0/1", "gauge", "fast", "the chip keeps itself cool"),
        ("clocks_event_reason_hw_power_brake_slowdown", "i", "0/1", "gauge", "fast", "the machine's power brake is on"),
        ("clocks_event_reason_gpu_idle", "i", "0/1", "gauge", "fast", "nothing runs"),
        ("clocks_event_reason_applications_clocks_setting", "i", "0/1", "gauge", "fast", "somebody set the clocks"),
        ("ecc_errors_volatile_dram_correctable", "i", "", "counter", "slow", "since the driver was loaded"),
        ("ecc_errors_volatile_dram_uncorrectable", "i", "", "counter", "slow", "since the driver was loaded"),
        ("ecc_errors_volatile_sram_correctable", "i", "", "counter", "slow", "since the driver was loaded"),
        ("ecc_errors_volatile_sram_uncorrectable", "i", "", "counter", "slow", "since the driver was loaded"),
        ("ecc_errors_aggregate_dram_correctable", "i", "", "counter", "slow", "over the GPU's life"),
        ("ecc_errors_aggregate_dram_uncorrectable", "i", "", "counter", "slow", "over the GPU's life"),
        ("ecc_errors_aggregate_sram_correctable", "i", "", "counter", "slow", "over the GPU's life"),
        ("ecc_errors_aggregate_sram_uncorrectable", "i", "", "counter", "slow", "over the GPU's life"),
        ("remapped_rows_correctable", "i", "", "counter", "slow", "memory rows replaced after correctable errors"),
        ("remapped_rows_uncorrectable", "i", "", "counter", "slow", "memory rows replaced after uncorrectable errors"),
        optional="compute_mode pstate arch",
    ),
    _measurement(
        "diagnosd_gpu",
        "what nvidia_smi does not tell of a GPU",
        "host index uuid",
        ("sm_active", "f", "0..1", "gauge", "fast", "share of cycles with a warp resident, over all SMs"),
        ("tensor_active", "f", "0..1", "gauge", "fast", "share of cycles of the tensor pipes"),
        ("dram_active", "f", "0..1", "gauge", "fast", "share of cycles of the memory interface"),
        ("nvlink_tx_bytes", "i", "bytes", "counter", "fast", "over all its NVLinks"),
        ("nvlink_rx_bytes", "i", "bytes", "counter", "fast", "over all its NVLinks"),
        ("pcie_tx_bytes", "i", "bytes", "counter", "fast", "sent to the host and its devices"),
        ("pcie_rx_bytes", "i", "bytes", "counter", "fast", "received from them"),
        ("pcie_replays", "i", "", "counter", "slow", "packets that were sent again on the PCIe link"),
        ("energy", "f", "J", "counter", "fast", "since the driver was loaded"),
        ("throttle_sw_power", "f", "s", "counter", "fast", "held by the power limit"),
        ("throttle_sw_thermal", "f", "s", "counter", "fast", "held by the driver's thermal limit"),
        ("throttle_hw_thermal", "f", "s", "counter", "fast", "held by the chip's thermal limit"),
        ("throttle_power_brake", "f", "s", "counter", "fast", "held by the machine's power brake"),
        ("nvlink_errors", "i", "", "counter", "slow", "over all its NVLinks and kinds of error"),
    ),
    _measurement(
        "diagnosd_nvlink",
        "one NVLink of a GPU",
        "host index uuid link",
        ("state", "i", "0/1", "state", "state", "1 is up"),
        ("speed", "i", "bytes/s", "state", "state", "of the link, while it is up"),
        ("crc_errors", "i", "", "counter", "state", "flits with a bad checksum; NVLink 5: packets with an error"),
        ("replay_errors", "i", "", "counter", "state", "transmissions repeated"),
        ("recovery_errors", "i", "", "counter", "state", "times the link recovered"),
        ("effective_errors", "i", "", "counter", "state", "NVLink 5: errors that were not corrected"),
        ("symbol_errors", "i", "", "counter", "state", "NVLink 5: wrong symbols received"),
    ),
)

_NETWORK = (
    _measurement(
        "infiniband",
        "every file of a port's counters and hw_counters, under its own name",
        "host device port",
        ("port_xmit_data", "i", "4-byte words", "counter", "fast", "bytes with EFA"),
        ("port_rcv_data", "i", "4-byte words", "counter", "fast", "bytes with EFA"),
        ("port_xmit_packets", "i", "", "counter", "fast", "sent by the port"),
        ("port_rcv_packets", "i", "", "counter", "fast", "received by the port"),
        ("port_xmit_wait", "i", "ticks", "counter", "fast", "had something to send and no credits"),
        ("np_cnp_sent", "i", "", "counter", "fast", "congestion notifications sent for marked packets (RoCE)"),
        ("rp_cnp_handled", "i", "", "counter", "fast", "congestion notifications that slowed this sender (RoCE)"),
        ("np_ecn_marked_roce_packets", "i", "", "counter", "fast", "packets that came marked"),
        ("out_of_sequence", "i", "", "counter", "slow", "packets lost or reordered on the way"),
        ("packet_seq_err", "i", "", "counter", "slow", "NAKs for a sequence error"),
        ("local_ack_timeout_err", "i", "", "counter", "slow", "acknowledgements that never came"),
        ("rnr_nak_retry_err", "i", "", "counter", "slow", "the receiver was not ready"),
        ("roce_adp_retrans", "i", "", "counter", "slow", "adaptive retransmissions"),
        ("symbol_error", "i", "", "counter", "slow", "saturates at 16 bits"),
        ("link_error_recovery", "i", "", "counter", "slow", "saturates at 8 bits"),
        ("link_downed", "i", "", "counter", "slow", "saturates at 8 bits"),
        ("port_rcv_errors", "i", "", "counter", "slow", "saturates at 16 bits"),
        ("port_xmit_discards", "i", "", "counter", "slow", "saturates at 16 bits"),
        ("local_link_integrity_errors", "i", "", "counter", "slow", "saturates at 4 bits"),
        ("excessive_buffer_overrun_errors", "i", "", "counter", "slow", "saturates at 4 bits"),
        ("VL15_dropped", "i", "", "counter", "slow", "management packets dropped; saturates at 16 bits"),
        ("lifespan", "i", "ms", "state", "slow", "hw_counters may be so old when they are read"),
        any_field="i",
    ),
    _measurement(
        "diagnosd_link",
        "one port of an RDMA device",
        "host device port",
        ("state", "i", "", "state", "state", "4 is ACTIVE"),
        ("phys_state", "i", "", "state", "state", "5 is LinkUp"),
        ("rate", "i", "bit/s", "state", "state", "only while it is up"),
        ("width", "i", "lanes", "state", "state", "in use"),
        ("mtu", "i", "bytes", "state", "state", "in force"),
        ("carrier_changes", "i", "", "counter", "state", "of its network interface"),
        ("members", "i", "", "state", "state", "of its bond, where its interface is one"),
        ("members_up", "i", "", "state", "state", "members of the bond that carry"),
        any_field="i",
    ),
    _measurement(
        "ethtool",
        "a driver's statistics, allow-listed, under its own names",
        "host interface",
        *(
            (f"{way}_prio{n}_pause", "i", "", "counter", "fast", "pause frames of one priority")
            for way in ("rx", "tx")
            for n in range(8)
        ),
        *(
            (f"{way}_prio{n}_pause_duration", "i", "\N{MICRO SIGN}s", "counter", "fast", "that priority stood still")
            for way in ("rx", "tx")
            for n in range(8)
        ),
        ("rx_global_pause", "i", "", "counter", "fast", "pause frames that stop every priority"),
        ("tx_global_pause", "i", "", "counter", "fast", "pause frames that stop every priority"),
        ("rx_global_pause_duration", "i", "\N{MICRO SIGN}s", "counter", "fast", "this port was stopped"),
        ("tx_global_pause_duration", "i", "\N{MICRO SIGN}s", "counter", "fast", "the other side was stopped"),
        *((f"rx_prio{n}_discards", "i", "", "counter", "slow", "dropped for want of its buffer") for n in range(8)),
        *((f"rx_prio{n}_marked", "i", "", "counter", "slow", "marked (ECN): its buffer is full") for n in range(8)),
        ("rx_discards_phy", "i", "", "counter", "slow", "dropped for want of buffers at the port"),
        ("tx_discards_phy", "i", "", "counter", "slow", "dropped at the port: paused for too long, or link down"),
        ("rx_out_of_buffer", "i", "", "counter", "slow", "dropped for want of receive descriptors"),
        ("rx_pcs_symbol_err_phy", "i", "", "counter", "slow", "symbols the PCS could not correct"),
        ("rx_symbol_err_phy", "i", "", "counter", "slow", "symbols with a physical error"),
        ("rx_corrected_bits_phy", "i", "", "counter", "slow", "bits that FEC corrected"),
        ("rx_crc_errors_phy", "i", "", "counter", "slow", "frames with a bad checksum"),
        ("link_down_events_phy", "i", "", "counter", "slow", "times the link went down"),
        ("tx_pause_storm_warning_events", "i", "", "counter", "slow", "sent pause for long: this host does not drain"),
        ("tx_pause_storm_error_events", "i", "", "counter", "slow", "for so long that pausing was switched off"),
        ("rx_pci_signal_integrity", "i", "", "counter", "slow", "PCIe errors and recoveries, this end"),
        ("tx_pci_signal_integrity", "i", "", "counter", "slow", "PCIe recoveries, other end"),
        ("outbound_pci_stalled_rd", "i", "%", "gauge", "slow", "of a second in which reads of the host stalled"),
        ("outbound_pci_stalled_wr", "i", "%", "gauge", "slow", "of a second in which writes to the host stalled"),
        ("outbound_pci_buffer_overflow", "i", "", "counter", "slow", "dropped: PCIe is slower than what came"),
        ("tx_vport_rdma_unicast_bytes", "i", "bytes", "counter", "slow", "RoCE sent"),
        ("rx_vport_rdma_unicast_bytes", "i", "bytes", "counter", "slow", "RoCE received"),
        ("bw_in_allowance_exceeded", "i", "", "counter", "slow", "shaped: the instance's bandwidth is used up (ENA)"),
        ("bw_out_allowance_exceeded", "i", "", "counter", "slow", "shaped: the instance's bandwidth is used up (ENA)"),
        ("pps_allowance_exceeded", "i", "", "counter", "slow", "shaped: the instance's packets per second (ENA)"),
        ("conntrack_allowance_available", "i", "", "gauge", "slow", "connections left (ENA)"),
        optional="driver namespace",
        any_field="i",
    ),
    _measurement(
        "net",
        "one network interface",
        "host interface",
        ("bytes_sent", "i", "bytes", "counter", "fast", "by the interface"),
        ("bytes_recv", "i", "bytes", "counter", "fast", "by the interface"),
        ("packets_sent", "i", "", "counter", "fast", "by the interface"),
        ("packets_recv", "i", "", "counter", "fast", "by the interface"),
        ("err_in", "i", "", "counter", "fast", "received with an error"),
        ("err_out", "i", "", "counter", "fast", "failed to be sent"),
        ("drop_in", "i", "", "counter", "fast", "received and dropped"),
        ("drop_out", "i", "", "counter", "fast", "dropped before they were sent"),
        ("speed", "i", "Mbit/s", "state", "slow", "as the driver reports it: a veth says 10000 whatever it carries"),
        any_field="i",
    ),
    _measurement(
        "nstat",
        "the kernel's protocol counters; name is snmp or netstat",
        "host name",
        ("TcpRetransSegs", "i", "", "counter", "fast", "name=snmp: segments sent again"),
        ("TcpOutSegs", "i", "", "counter", "fast", "name=snmp: segments sent"),
        any_field="i",
    ),
    _measurement(
        "diagnosd_switch",
        "one port of a switch",
        "switch port",
        ("tx_bytes", "i", "bytes", "counter", "slow", "sent by the port"),
        ("rx_bytes", "i", "bytes", "counter", "slow", "received by the port"),
        ("ecn_marked", "i", "", "counter", "slow", "packets marked"),
        ("discards", "i", "", "counter", "slow", "packets dropped"),
        ("pause_rx", "i", "", "counter", "slow", "pause frames received"),
        ("pause_tx", "i", "", "counter", "slow", "pause frames sent"),
        any_field="i",
    ),
)

_HOSTS = (
    _measurement(
        "diagnosd_clock",
        "how far a host's clock can be trusted",
        "host",
        ("mono", "i", "ns", "gauge", "slow", "CLOCK_MONOTONIC at `time`"),
        ("boot", "s", "", "state", "slow", "boot id"),
        ("esterror", "f", "s", "gauge", "slow", "the kernel's estimate of the error"),
        ("maxerror", "f", "s", "gauge", "slow", "the kernel's bound on the error"),
        ("synced", "b", "", "state", "slow", "the kernel considers itself synchronised"),
        ("frequency", "f", "ppm", "gauge", "slow", "the correction in force"),
        ("source", "s", "", "state", "slow", "ptp, ntp or unknown"),
    ),
    _measurement(
        "cpu",
        "CPU time since the last reading; cpu=cpu-total",
        "host cpu",
        ("usage_user", "f", "%", "gauge", "fast", "in programs"),
        ("usage_system", "f", "%", "gauge", "fast", "in the kernel"),
        ("usage_idle", "f", "%", "gauge", "fast", "nothing to do"),
        ("usage_iowait", "f", "%", "gauge", "fast", "idle with a read or write outstanding"),
        ("usage_steal", "f", "%", "gauge", "fast", "taken by the hypervisor"),
        any_field="f",
    ),
    _measurement(
        "mem",
        "main memory",
        "host",
        ("total", "i", "bytes", "gauge", "slow", "there is"),
        ("available", "i", "bytes", "gauge", "slow", "for new programs, without swapping"),
        ("used", "i", "bytes", "gauge", "slow", "total minus available, or as the kernel counts it"),
        ("cached", "i", "bytes", "gauge", "slow", "page cache"),
    ),
    _measurement(
        "pressure",
        "share of time in which tasks waited for a resource",
        "host resource type",
        ("avg10", "f", "%", "gauge", "fast", "over 10 s"),
        ("avg60", "f", "%", "gauge", "fast", "over 60 s"),
        ("avg300", "f", "%", "gauge", "fast", "over 300 s"),
        ("total", "i", "\N{MICRO SIGN}s", "counter", "fast", "stalled since boot"),
    ),
    _measurement(
        "diskio",
        "one block device",
        "host name",
        ("reads", "i", "", "counter", "fast", "completed"),
        ("writes", "i", "", "counter", "fast", "completed"),
        ("read_bytes", "i", "bytes", "counter", "fast", "read from the device"),
        ("write_bytes", "i", "bytes", "counter", "fast", "written to the device"),
        ("read_time", "i", "ms", "counter", "fast", "summed over requests"),
        ("write_time", "i", "ms", "counter", "fast", "summed over requests"),
        ("io_time", "i", "ms", "counter", "fast", "with at least one request outstanding"),
        ("iops_in_progress", "i", "", "gauge", "fast", "requests outstanding"),
        optional="serial",
    ),
    _measurement(
        "disk",
        "one mounted file system",
        "host path",
        ("total", "i", "bytes", "gauge", "slow", "size"),
        ("free", "i", "bytes", "gauge", "slow", "free for users, as Telegraf has it"),
        ("used", "i", "bytes", "gauge", "slow", "in use"),
        ("used_percent", "f", "%", "gauge", "slow", "of what users may use"),
        optional="device fstype mode label",
    ),
    _measurement(
        "nfsstat",
        "one operation of one NFS mount",
        "host mountpoint operation",
        ("ops", "i", "", "counter", "slow", "completed"),
        ("retrans", "i", "", "counter", "slow", "sent again"),
        ("bytes", "i", "bytes", "counter", "slow", "sent and received"),
        ("rtt", "i", "ms", "counter", "slow", "from request to reply, summed"),
        ("exe", "i", "ms", "counter", "slow", "queueing included, summed"),
        optional="serverexport",
    ),
    _measurement(
        "lustre2",
        "one mounted Lustre file system, as its client counts",
        "host name",
        ("read_bytes", "i", "bytes", "counter", "slow", "read"),
        ("write_bytes", "i", "bytes", "counter", "slow", "written"),
        ("read_calls", "i", "", "counter", "slow", "reads"),
        ("write_calls", "i", "", "counter", "slow", "writes"),
        ("read_usecs", "i", "\N{MICRO SIGN}s", "counter", "slow", "in reads, summed"),
        ("write_usecs", "i", "\N{MICRO SIGN}s", "counter", "slow", "in writes, summed"),
        ("open_usecs", "i", "\N{MICRO SIGN}s", "counter", "slow", "in opens, summed"),
        ("getattr_usecs", "i", "\N{MICRO SIGN}s", "counter", "slow", "in getattr, summed"),
        ("fsync_usecs", "i", "\N{MICRO SIGN}s", "counter", "slow", "in fsync, summed"),
        ("open", "i", "", "counter", "slow", "files opened"),
        ("close", "i", "", "counter", "slow", "files closed"),
        ("getattr", "i", "", "counter", "slow", "attributes asked for"),
        any_field="i",
    ),
    _measurement(
        "diagnosd_agent",
        "the agent's heartbeat, every tick",
        "host collector",
        ("up", "i", "0/1", "gauge", "fast", "the collector could read"),
        ("seconds", "f", "s", "gauge", "fast", "what this tick took"),
        ("errors", "i", "", "counter", "fast", "reads that failed"),
        ("dropped", "i", "", "counter", "fast", "points and messages that were lost"),
        ("cpu_seconds", "f", "s", "counter", "fast", "used by the agent"),
        ("rss", "i", "bytes", "gauge", "fast", "resident memory of the agent"),
    ),
)

_VERDICTS = (
    _measurement(
        "diagnosd_diagnosis",
        "one revision of a verdict",
        "job cause id",
        ("state", "s", "", "event", "event", "suspected, confirmed, resolved, withdrawn or latent"),
        ("severity", "s", "", "event", "event", "info, ticket or page"),
        ("locus", "s", "", "event", "event", "where"),
        ("confidence", "f", "0..1", "event", "event", "that this is the cause"),
        ("slowdown", "f", "", "event", "event", "observed over reference step time"),
        ("lost_gpu_seconds", "f", "s", "event", "event", "what it has cost"),
        ("fix_gain", "f", "0..1", "event", "event", "share of step time that repairing this alone would save"),
        ("document", "s", "JSON", "event", "event", "the whole verdict"),
    ),
    _measurement(
        "diagnosd_ledger",
        "GPU time by class, every 60 s",
        "job class",
        ("ns", "i", "GPU-ns", "counter", "state", "in this class since the job's start"),
    ),
)

SCHEMA: Mapping[str, Measurement] = MappingProxyType(
    {m.name: m for m in (*_JOB, *_MACHINES, *_GPUS, *_NETWORK, *_HOSTS, *_VERDICTS)}
)


class Unit(NamedTuple):
    unit: str  # "" for a count of something else
    bytes: int | None  # in one count, where it counts bytes in any way


# driver, link layer, file of ports/N/counters or hw_counters -> what one count is. The first row that fits holds.
# Every driver that answers the kernel's performance MADs divides octets by 4 as InfiniBand defines them, whatever its
# link layer (mlx5, mlx4, bnxt_re, rxe: `>> 2`, `/ 4`; hfi1 from its flits), and whatever the lanes. What a driver
# counts by itself, in hw_counters, are bytes.
_PORT_UNITS = tuple(
    (re.compile(driver), re.compile(link_layer), re.compile(file), Unit(unit, size))
    for driver, link_layer, file, unit, size in (
        ("efa", ".*", "port_(xmit|rcv)_data(_64)?", "bytes", 1),
        (".*", ".*", "port_(xmit|rcv)_data(_64)?", "4-byte words", 4),
        # A tick is a few clocks of the port: 8 transfers of 8 bytes on recent ConnectX, 32 on older ones, other
        # makers' unknown. So it is compared with itself, and never turned into seconds or bytes.
        (".*", ".*", "port_xmit_wait(_64)?", "ticks", None),
        (".*", ".*", ".*_bytes", "bytes", 1),
        ("irdma|ice|idpf|i40e|i40iw", ".*", "ip[46](In|Out)(Mcast)?Octets", "bytes", 1),
        (".*", ".*", ".*(_packets(_64)?|_pkts|Pkts)", "packets", None),
        (".*", ".*", "lifespan", "ms", None),
    )
)
# Files that hold what a port sent and received, the first pair that it has: most drivers, ConnectX-3 under old
# kernels, EFA and bnxt_re, ionic, irdma and i40iw.
PORT_TRAFFIC = (
    ("port_xmit_data", "port_rcv_data"),
    ("port_xmit_data_64", "port_rcv_data_64"),
    ("tx_bytes", "rx_bytes"),
    ("tx_rdma_ucast_bytes", "rx_rdma_ucast_bytes"),
    ("ip4OutOctets", "ip4InOctets"),
)


@lru_cache(maxsize=4096)
def port_unit(driver: str | None, link_layer: str | None, file: str) -> Unit:
    """What one count of a field of `infiniband` is; driver and link layer as the inventory's `nics` have them."""
    for drivers, layers, files, unit in _PORT_UNITS:
        if drivers.fullmatch(driver or "") and layers.fullmatch(link_layer or "") and files.fullmatch(file):
            return unit
    return Unit("", None)


# What nobody here has yet seen a real device say: taken from NVIDIA's header, what their tools print, and a stand-in of
# their library. A field leaves when a machine with a GPU has been compared with it.
UNVERIFIED: Mapping[str, frozenset[str]] = MappingProxyType({m.name: frozenset(m.fields) for m in _GPUS})


def markdown() -> str:
    """The contract as a table of GitHub's Markdown, one row a field: README carries it."""
    return "\n".join(_rows()) + "\n"


def _rows() -> Iterator[str]:
    yield "| measurement | tags (optional) | field | type | unit | kind | cadence | meaning |"
    yield "|---|---|---|---|---|---|---|---|"
    for m in SCHEMA.values():
        tags = ", ".join((*m.tags, *(f"({tag})" for tag in m.optional_tags)))
        yield f"| **{m.name}** | {tags} | | | | | | {m.meaning} |"
        for name, f in {re.sub(r"prio\d", "prio0..7", f.name): f for f in m.fields.values()}.items():
            mark = " (unverified)" if f.name in UNVERIFIED.get(m.name, ()) else ""
            yield f"| | | {name} | {f.type} | {f.unit} | {f.kind} | {f.cadence} | {f.meaning}{mark} |"
        if m.any_field:
            yield f"| | | ... | {m.any_field} | | | | every other field, under the name its source gives it |"
