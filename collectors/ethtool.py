"""What a NIC's driver counts beyond /proc/net/dev: `ethtool -S`, asked of the kernel by ioctl(2), as anybody may.

Where a NIC is paused by the network, or drops what came for want of buffers or of PCIe credits, only its driver knows.
Names belong to the driver; which of them say something stands in COUNTERS. Of a table of thousands of numbers only
those are unpacked.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
import socket
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from diagnosd.collectors.every import Every
from diagnosd.collectors.kernel import NOT_SUPPORTED, first_line
from diagnosd.collectors.machine import Machine
from diagnosd.collectors.net import watched
from diagnosd.collectors.rdma import network_interfaces
from diagnosd.point import INT_MAX, Point, Series

# A pattern of the drivers' names -> cadence. The drivers are named where the name is theirs; the list was made from
# their sources. ENA's admin_q_pause and the like are no pause frames: a pattern says all of a name.
COUNTERS: tuple[tuple[str, str], ...] = (
    # Pause frames, and how long they stopped us (rx) or the other side (tx). Durations are microseconds.
    (r"[rt]x_(prio[0-7]|global)_pause(_duration)?", "fast"),  # mlx5
    (r"[rt]x_pause_ctrl_phy", "fast"),  # mlx5: what is there where the firmware counts no priorities
    (r"[rt]x_pause(_duration)?(_prio_[0-7])?", "fast"),  # mlx4 and others
    (r"[rt]x_(pause|pfc)_frames", "fast"),  # bnxt_en
    (r"[rt]x_pfc_ena_frames_pri[0-7]", "fast"),  # bnxt_en
    (r"pfc_pri[0-7]_[rt]x_duration_us", "fast"),  # bnxt_en
    (r"frames_[rt]x_(pause|pripause)", "fast"),  # ionic
    (r"[rt]x_(pripause_[0-7]|pause)_1us_count", "fast"),  # ionic
    (r"(port\.)?link_xo(n|ff)_[rt]x(\.nic)?", "fast"),  # ice, i40e
    (r"(port\.)?[rt]x_priority_[0-7]_xo(n|ff)(\.nic)?", "fast"),  # ice, i40e
    (r"[rt]x_flow_control_xo(n|ff)", "fast"),  # ixgbe
    (r"[rt]x_pb_[0-7]_pxo(n|ff)", "fast"),  # ixgbe
    (r"mac_[rt]x_(mac_pause_num|pfc_pri[0-7]_(pkt_num|xoff_time))", "fast"),  # hns3
    # Pause without end: somebody does not drain.
    (r"rx_(prio[0-7]|global)_pause_transition", "slow"),  # mlx5
    (r"tx_pause_storm_(warning|error)_events", "slow"),  # mlx5
    (r"[rt]x_pause_transition(_prio_[0-7])?", "slow"),  # mlx4
    (r"pfc_pri[0-7]_[rt]x_transitions", "slow"),  # bnxt_en
    (r"(continuous|resume)_(roce_)?pause_events", "slow"),  # bnxt_en
    (r"(port\.)?rx_priority_[0-7]_xon_2_xoff", "slow"),  # i40e
    # Marked by the network, and dropped for want of buffers: at the port, of a priority, of receive descriptors.
    (r"rx_prio[0-7]_(discards|buf_discard|cong_discard|marked)", "slow"),  # mlx5
    (r"rx_ecn_mark", "slow"),  # mlx5
    (r"[rt]x_discards_phy", "slow"),  # mlx5
    (r"(rx|dev)_out_of_buffer", "slow"),  # mlx5
    (r"rx_(buffer_passed_thres_phy|buff_alloc_err|steer_missed_packets|wqe_err)", "slow"),  # mlx5
    (r"tx_(queue_dropped|cqe_err|timeout)", "slow"),  # mlx5, ena
    (r"[rt]x_vport_rdma_unicast_(packets|bytes)", "slow"),  # mlx5: RoCE, which /proc/net/dev does not see
    (r"rx_discard_packets_cos[0-7]", "slow"),  # bnxt_en
    (r"[rt]x_(total_discard_pkts|total_ring_discards|stat_discard)", "slow"),  # bnxt_en
    (r"rx_(total_(buf_errors|oom_discards|netpoll_discards)|buffer_passed_threshold)", "slow"),  # bnxt_en
    (r"hw_([rt]x_dropped|rx_(over|missed)_errors)", "slow"),  # ionic
    (r"frames_rx_(dropped|bad_all)", "slow"),  # ionic
    (r"hc_rx_discards_no_wqe", "slow"),  # mana
    (r"rx_(dropped|missed_errors|no_buffer_count|no_dma_resources)(\.nic)?", "slow"),  # Intel
    (r"(port\.)?tx_dropped_link_down(\.nic)?", "slow"),  # ice, i40e
    # Shaped by the cloud, because the instance has used up what it pays for.
    (r"(bw_in|bw_out|pps|conntrack|linklocal)_allowance_exceeded", "slow"),  # ena
    (r"conntrack_allowance_available", "slow"),  # ena
    (r"wd_expired", "slow"),  # ena: the device stopped answering and was reset
    # The cable, the optics and the port.
    (r"rx_(pcs_symbol_err|symbol_err|crc_errors|corrected_bits|err_lane_[0-7])_phy", "slow"),  # mlx5
    (r"link_down_events(_phy)?", "slow"),  # mlx5, bnxt_en
    (r"module_(bus_stuck|high_temp|bad_shorted|unplug)", "slow"),  # mlx5
    (r"rx_(pcs_symbol_err|corrected_bits|fec_(corrected|uncorrectable)_blocks|fcs_err_frames)", "slow"),  # bnxt_en
    (r"frames_rx_(bad_fcs|stomped_crc)", "slow"),  # ionic
    (r"(port\.)?(rx_crc_errors|illegal_bytes|mac_(local|remote)_faults)(\.nic)?", "slow"),  # ice, i40e
    # PCIe: errors of the link, and the share of a second in which the NIC could not reach memory (percent).
    (r"[rt]x_pci_signal_integrity", "slow"),  # mlx5
    (r"outbound_pci_(stalled_(rd|wr)(_events)?|buffer_overflow)", "slow"),  # mlx5
)
_WANTED: dict[str, Callable[[str], object]] = {
    cadence: re.compile("|".join(pattern for pattern, of in COUNTERS if of == cadence)).fullmatch
    for cadence in ("fast", "slow")
}

SLOW_S = 10  # between two reads of the slow counters of an interface, and between two looks for interfaces
NICS = 64  # ports of one host; of more (virtual functions by the hundred) the first
# A driver that fails alike again and again is asked rarely: a refused firmware command may write a line to the kernel
# log each time.
FAILURES, REST_TICKS = 5, 600
# Stands for a virtual function in the switch of its NIC; what it counts, the port has counted.
REPRESENTOR = re.compile(r"(c\d+)?pf\d+(vf|sf)\d+")

_SIOCETHTOOL = 0x8946
_GDRVINFO, _GSTRINGS, _GSTATS, _GSSET_INFO = 0x03, 0x1B, 0x1D, 0x37
_SS_STATS = 1
_NAME = 32  # bytes of a driver's name and of a counter's
# struct ethtool_sset_info: command, reserved, mask of the sets, length of the one asked for
_SSET_INFO = struct.Struct("=IIQI")
_STRINGS_HEAD = struct.Struct("=III")  # struct ethtool_gstrings: command, set, count; then the names
_STATS_HEAD = struct.Struct("=II")  # struct ethtool_stats: command, count; then the values
_IFREQ = struct.Struct("=16sQ16x")
# The kernel writes as many values as the driver has at that moment, whatever count it is told; only since 6.19 it
# writes nothing where that count is outdated. So there is room for far more than a driver may have become: memory that
# nobody touches is none. The largest known tables, of mlx5 with 256 queues, have some 25,000.
COUNTS = 65536
_ROOM = 2 * COUNTS * _NAME


class Selection(NamedTuple):
    """Some of a table of counters."""

    names: tuple[str, ...]
    unpack: Callable[[Any, int], tuple[int, ...]]  # their values, of a buffer from where the table begins

    @staticmethod
    def of(positions: dict[str, int]) -> Selection:
        layout, end = "=", 0
        names = sorted(positions, key=lambda name: positions[name])
        for name in names:
            layout += f"{8 * (positions[name] - end)}xQ"
            end = positions[name] + 1
        return Selection(tuple(names), struct.Struct(layout).unpack_from)


def choose(strings: Iterable[bytes], cadences: Iterable[str]) -> Selection:
    """Those of a driver's counters that are wanted. A name that stands there twice is the first."""
    wanted = [_WANTED[cadence] for cadence in cadences]
    positions: dict[str, int] = {}
    for position, string in enumerate(strings):
        # mlx5 once shipped a name with a blank behind it
        name = string.partition(b"\0")[0].decode("ascii", "replace").strip()
        if any(matches(name) for matches in wanted):
            positions.setdefault(name, position)
    return Selection.of(positions)


NONE = Selection.of({})


@dataclass(slots=True, eq=False)
class Nic:
    """An interface with a device behind it, and what its driver was found to count."""

    device: str  # what its `device` link says: another device under the same name is another NIC
    request: bytes  # struct ifreq
    slow_due: Every
    series: Series | None = None
    count: int = 0  # of the driver's counters; 0: nothing learned
    fast: Selection = NONE
    all: Selection = NONE
    told: bool = False
    supported: bool = True
    failures: int = 0  # in a row
    rests_until: int = 0  # tick

    def due(self, now_ns: int, tick: int) -> Selection:
        slow = self.slow_due.is_due(now_ns, tick)
        return self.all if slow or not self.told else self.fast


class Ethtool:
    name = "ethtool"
    every = 1

    def __init__(self, machine: Machine) -> None:
        self.errors = 0
        self._machine = machine
        self._folder = machine.sys / "class/net"
        self._nics: dict[str, Nic] = {}
        self._tick = 0
        self._look_due = Every(SLOW_S)
        self._socket: socket.socket | None = None
        self._room = mmap.mmap(-1, _ROOM, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._room))

    @property
    def missing(self) -> str | None:
        if any(nic.supported for nic in self._nics.values()):
            return None
        return f"no network interface here whose driver counts pauses or drops ({self._folder})"

    def close(self) -> None:
        if self._socket:
            self._socket.close()

    def read(self, now_ns: int) -> list[Point]:
        """The fast counters of every NIC, and the slow ones of those whose turn it is.

        That an interface is gone, `net` says: here it only falls silent.
        """
        if not self._machine.live:
            return []
        self._tick += 1
        if self._look_due.is_due(now_ns, self._tick):
            try:
                self._look()
            except OSError:  # no descriptor left, or the like: nobody knows who is there
                self.errors += 1
        points = []
        for name, nic in list(self._nics.items()):
            if nic.supported and self._tick >= nic.rests_until and (made := self._read(name, nic, now_ns)):
                points.append(made)
        return points

    def _look(self) -> None:
        """Interfaces come, go and are renamed. What is excluded, virtual or inside of containers is never asked."""
        found: dict[str, Nic] = {}
        for name, folder in network_interfaces(self._machine).items():
            device = _link(f"{folder}/device")
            if device is None or not watched(name):
                continue
            nic = self._nics.get(name)
            if nic is None or nic.device != device:
                nic = self._new(name, device, len(found) % SLOW_S)
            found[name] = nic
            if len(found) == NICS:
                break
        self._nics = found

    def _new(self, name: str, device: str, early: int) -> Nic:
        nic = Nic(device, _IFREQ.pack(os.fsencode(name), self._address), Every(SLOW_S, early))
        nic.supported = not REPRESENTOR.fullmatch(first_line(self._folder / name / "phys_port_name") or "")
        return nic

    def _read(self, name: str, nic: Nic, now_ns: int) -> Point | None:
        try:
            if not nic.count:
                self._learn(name, nic)
            selection = nic.due(now_ns, self._tick)
            fields = self._fields(nic, selection) if selection.names else {}
        except OSError as error:
            self._failed(name, nic, error)
            return None
        except ValueError:  # line protocol cannot say a name like this one
            nic.supported = False
            return None
        nic.failures = 0
        if not fields or nic.series is None:
            return None
        nic.told = True
        return Point(nic.series, fields, now_ns)

    def _fields(self, nic: Nic, selection: Selection) -> dict[str, Any]:
        """Nothing where the driver counts something else than it did: it is asked for its names again."""
        _STATS_HEAD.pack_into(self._room, 0, _GSTATS, nic.count)
        self._ask(nic)
        if _STATS_HEAD.unpack_from(self._room)[1] != nic.count:
            nic.count = 0
            return {}
        values = selection.unpack(self._room, _STATS_HEAD.size)
        return dict(zip(selection.names, [value & INT_MAX for value in values], strict=True))

    def _learn(self, name: str, nic: Nic) -> None:
        struct.pack_into("=I", self._room, 0, _GDRVINFO)
        self._ask(nic)
        driver = self._room[4 : 4 + _NAME].partition(b"\0")[0].decode("utf-8", "replace")
        nic.series = Series.of("ethtool", host=self._machine.host, interface=name, driver=driver)
        strings = self._strings(nic)
        nic.count, nic.told = len(strings), False
        nic.fast, nic.all = choose(strings, ("fast",)), choose(strings, ("fast", "slow"))
        nic.supported = bool(nic.all.names)

    def _strings(self, nic: Nic) -> list[bytes]:
        _SSET_INFO.pack_into(self._room, 0, _GSSET_INFO, 0, 1 << _SS_STATS, 0)
        self._ask(nic)
        _, _, mask, count = _SSET_INFO.unpack_from(self._room)
        if not mask or not count:
            raise OSError(errno.EOPNOTSUPP, "no statistics")
        if count > COUNTS:
            raise OSError(errno.EOPNOTSUPP, f"{count} statistics")
        _STRINGS_HEAD.pack_into(self._room, 0, _GSTRINGS, _SS_STATS, count)
        self._ask(nic)
        if _STRINGS_HEAD.unpack_from(self._room)[2] != count:
            raise OSError(errno.EAGAIN, "the number of statistics changes")
        end = _STRINGS_HEAD.size + count * _NAME
        names = self._room[_STRINGS_HEAD.size : end]
        self._room.madvise(mmap.MADV_DONTNEED)
        return [names[at : at + _NAME] for at in range(0, len(names), _NAME)]

    def _ask(self, nic: Nic) -> None:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        fcntl.ioctl(self._socket, _SIOCETHTOOL, nic.request)

    def _failed(self, name: str, nic: Nic, error: OSError) -> None:
        if error.errno in (errno.ENODEV, errno.ENXIO):
            del self._nics[name]
            return
        if not nic.count and error.errno in NOT_SUPPORTED:
            nic.supported = False
            return
        self.errors += 1
        nic.failures += 1
        if nic.failures >= FAILURES:
            nic.rests_until = self._tick + REST_TICKS


def _link(path: str) -> str | None:
    """What a `device` link says, such as ../../../0000:19:00.0; None where nothing is behind."""
    try:
        return os.readlink(path)  # noqa: PTH115
    except OSError:
        return None
