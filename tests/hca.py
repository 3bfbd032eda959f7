"""A small captured /sys of a node with HCAs: what a collector meets there, and nothing else.

Shapes and names are those of Linux's own sysfs (drivers/infiniband/core/sysfs.c, net/core/net-sysfs.c): one folder a
PCI function, with `infiniband/DEVICE` and `net/NETDEV` inside of it, and links to these from class/infiniband and
class/net. Values are invented.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

COUNTERS: Mapping[str, int] = {
    "port_xmit_data": 250_000_000, "port_rcv_data": 500_000_000,  # 1 and 2 GB
    "port_xmit_packets": 1_000_000, "port_rcv_packets": 2_000_000, "port_xmit_wait": 3599,
    "unicast_xmit_packets": 1_000_000, "unicast_rcv_packets": 2_000_000,
    "multicast_xmit_packets": 0, "multicast_rcv_packets": 0,
    "symbol_error": 0, "link_error_recovery": 0, "link_downed": 1, "port_rcv_errors": 0,
    "port_rcv_remote_physical_errors": 0, "port_rcv_switch_relay_errors": 0, "port_xmit_discards": 0,
    "port_xmit_constraint_errors": 0, "port_rcv_constraint_errors": 0, "local_link_integrity_errors": 0,
    "excessive_buffer_overrun_errors": 0, "VL15_dropped": 0,
}  # fmt: skip
HW_COUNTERS: Mapping[str, int] = {
    "lifespan": 12,  # ms
    "rx_write_requests": 3_809_045, "rx_read_requests": 9187, "rx_atomic_requests": 0, "rx_dct_connect": 0,
    "out_of_buffer": 0, "out_of_sequence": 0, "duplicate_request": 0, "rnr_nak_retry_err": 0, "packet_seq_err": 0,
    "implied_nak_seq_err": 0, "local_ack_timeout_err": 0, "resp_local_length_error": 0, "resp_cqe_error": 0,
    "req_cqe_error": 0, "req_remote_invalid_request": 0, "req_remote_access_errors": 0,
    "resp_remote_access_errors": 0, "resp_cqe_flush_error": 0, "req_cqe_flush_error": 0,
    "req_transport_retries_exceeded": 0, "req_rnr_retries_exceeded": 0, "roce_adp_retrans": 3,
    "roce_adp_retrans_to": 0, "roce_slow_restart": 0, "roce_slow_restart_cnps": 0, "roce_slow_restart_trans": 0,
    "rp_cnp_ignored": 0, "rp_cnp_handled": 17, "np_ecn_marked_roce_packets": 40, "np_cnp_sent": 38,
    "rx_icrc_encapsulated": 0,
}  # fmt: skip


def write(root: Path, files: Mapping[str, str | int]) -> Path:
    """The files under a folder, each with the newline that the kernel ends it with."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n" if text != "" else "")
    return root


def link(at: Path, to: Path) -> None:
    """A relative symlink, as sysfs has them: the tree can be moved, and mounted elsewhere."""
    at.parent.mkdir(parents=True, exist_ok=True)
    at.unlink(missing_ok=True)
    at.symlink_to(os.path.relpath(to.parent.resolve() / to.name, at.parent.resolve()))


def hcas(root: Path, count: int = 8, *, link_layer: str = "InfiniBand") -> Path:
    """A /sys with `count` mlx5 devices of one active 400 Gbit/s port each, mlx5_0 at 0000:10:00.0 and so on."""
    for number in range(count):
        hca(root, number, link_layer=link_layer)
    return root


def hca(
    root: Path,
    number: int = 0,
    *,
    device: str = "",
    netdev: str = "",
    link_layer: str = "InfiniBand",
    driver: str = "mlx5_core",
    above: str = "",
) -> Path:
    """One device with one port; returns the port's folder. `above` as in `pci`."""
    device = device or f"mlx5_{number}"
    netdev = netdev or (f"ib{number}" if link_layer == "InfiniBand" else f"eth{number}")
    function = pci(root, number, driver, above)
    guid = f"946d:ae03:00cd:{number:04x}"
    files: dict[str, str | int] = {
        "node_type": "1: CA", "fw_ver": "28.39.1002", "hw_rev": "0", "hca_type": "MT4129", "board_id": "MT_0000000838",
        "node_guid": guid, "sys_image_guid": guid, "node_desc": f"n01 HCA-{number + 1}",
    }  # fmt: skip
    write(function / "infiniband" / device, files)
    ib = link_layer == "InfiniBand"
    port = write(
        function / "infiniband" / device / "ports/1",
        {
            "state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)", "link_layer": link_layer,
            "lid": f"0x{75 + number:x}" if ib else "0x0", "lid_mask_count": 0, "sm_lid": "0x14e" if ib else "0x0",
            "sm_sl": 0, "cap_mask": "0xa751e848" if ib else "0x00010000", "pkeys/0": "0xffff",
            "gids/0": f"fe80:0000:0000:0000:{guid}", "gid_attrs/ndevs/0": netdev,
            "gid_attrs/types/0": "IB/RoCE v1", **({} if ib else {"gid_attrs/types/1": "RoCE v2"}),
            **{f"counters/{name}": value for name, value in COUNTERS.items()},
            **{f"hw_counters/{name}": value for name, value in HW_COUNTERS.items()},
        },
    )  # fmt: skip
    link(function / "infiniband" / device / "device", function)
    link(root / "class/infiniband" / device, function / "infiniband" / device)
    interface(root, netdev, function, kind=32 if ib else 1)
    return port


def pci(root: Path, number: int, driver: str = "mlx5_core", above: str = "") -> Path:
    """A PCI function with the link figures of generation 5 x16; returns its folder.

    It stands behind a root port of its own, or in the folder `above`, whose files are the caller's.
    """
    address, bridge = f"0000:{16 + number:02x}:00.0", f"0000:00:{1 + number:02x}.0"
    speed: dict[str, str | int] = {
        "current_link_speed": "32.0 GT/s PCIe", "current_link_width": 16,
        "max_link_speed": "32.0 GT/s PCIe", "max_link_width": 16, "numa_node": number // 4,
    }  # fmt: skip
    function = root / (above or f"devices/pci0000:00/{bridge}") / address
    if not above:
        write(function.parent, {"class": "0x060400", "vendor": "0x15b3", "device": "0x1979", **speed})
        link(root / "bus/pci/devices" / bridge, function.parent)
    write(function, {"class": "0x020700", "vendor": "0x15b3", "device": "0x1021", **speed})
    (root / "bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
    link(function / "driver", root / "bus/pci/drivers" / driver)
    link(root / "bus/pci/devices" / address, function)
    return function


def interface(root: Path, netdev: str, function: Path, *, kind: int = 1, speed: int = 400_000) -> Path:
    """A network interface of a PCI function that is up; returns its folder."""
    folder = write(
        function / "net" / netdev,
        {
            "type": kind, "operstate": "up", "carrier": 1, "carrier_changes": 2, "carrier_up_count": 1,
            "carrier_down_count": 1, "speed": speed, "duplex": "full", "mtu": 4092 if kind == 32 else 4200,
            "dev_port": 0, "dev_id": "0x0", "ifindex": 2,
        },
    )  # fmt: skip
    link(folder / "device", function)
    link(root / "class/net" / netdev, folder)
    return folder
