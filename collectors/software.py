"""What a node runs that decides how its GPUs and NICs talk: kernel, drivers, and whether a NIC reaches GPU memory."""

from __future__ import annotations

import re
from typing import Any

from diagnosd.collectors.kernel import first_line, text_of
from diagnosd.collectors.machine import Machine

# One of these lets an HCA's driver ask the GPU's for its memory; the second is Mellanox's, before CUDA 11.4.
_PEERMEM = ("nvidia_peermem", "nv_peer_mem")
# Linux 5.12 brought RDMA over dma-buf. Of the vendors' older kernels some have it: there it is unknown.
_DMABUF_SINCE = (5, 12)

_NVRM = re.compile(r"NVRM version: (?P<kind>.*?) +(?P<version>[0-9]+\.[0-9.]*[0-9])\b")
# Mellanox's own, 5.8-1.1.2 or 24.10-1.1.4. The kernel's own driver was 5.0-0 for a while and has none now.
_OFED = re.compile(r"[0-9]+\.[0-9]+-[0-9]+(\.[0-9]+)+")
_KERNEL = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})")


def software(machine: Machine) -> dict[str, Any]:
    """A Software of the contract, as far as the kernel tells it; None is unknown."""
    kernel = first_line(machine.proc / "sys/kernel/osrelease")
    driver = _NVRM.search(text_of(machine.proc / "driver/nvidia/version"))
    ofed = first_line(machine.sys / "module/mlx5_core/version") or ""
    version = driver["version"] if driver else first_line(machine.sys / "module/nvidia/version")
    return {
        "kernel": kernel,
        "driver": version,
        "ofed": ofed if _OFED.fullmatch(ofed) else None,
        "peermem": _peermem(machine) if version else None,
        "dmabuf": _dmabuf("Open Kernel Module" in driver["kind"], kernel or "") if driver else None,
    }


def _peermem(machine: Machine) -> bool | None:
    """Whether the module is loaded that gives HCAs the GPUs' memory; asked where there is a driver of GPUs."""
    modules = machine.sys / "module"
    return any((modules / name).is_dir() for name in _PEERMEM) if modules.is_dir() else None


def _dmabuf(open_driver: bool, kernel: str) -> bool | None:
    """Likewise without that module: of NVIDIA's drivers the open one alone exports its memory as a dma-buf."""
    version = _KERNEL.match(kernel)
    if not open_driver:
        return False
    new_enough = version is not None and (int(version[1]), int(version[2])) >= _DMABUF_SINCE
    return True if new_enough else None
