"""What a GPU says of the NVLink fabric that it belongs to: HGX and NVL systems with NVSwitch, from Hopper on."""

from __future__ import annotations

import ctypes
from types import ModuleType
from typing import Any

from diagnosd.collectors.nvml.sheet import unsupported

STATES = {1: "not started", 2: "in progress", 3: "completed"}  # 0: this GPU has no fabric
SUMMARIES = {1: "healthy", 2: "unhealthy", 3: "limited capacity"}
# Drivers that have no summary have the mask: where a word stands in it, how wide, what of it is bad, and the word.
HEALTH = (
    (0, 0x3, (1,), "degraded bandwidth"),
    (2, 0x3, (1,), "route recovery"),
    (4, 0x3, (1,), "route unhealthy"),
    (6, 0x3, (1,), "access timeout recovery"),
    (8, 0xF, (2, 3, 4, 5, 6, 7, 8), "incorrect configuration"),
)


def fabric(nvml: ModuleType, gpu: object) -> dict[str, Any]:
    """In the words of the inventory; empty where the GPU has none. NVMLError where it is unreadable now."""
    told = _ask(nvml, gpu)
    if told is None or told.state not in STATES:
        return {}
    said: dict[str, Any] = {"state": STATES[told.state], "clique": told.cliqueId}
    if said["state"] == "completed":  # before that the status says nothing
        said["status"] = "success" if told.status == 0 else str(nvml.NVMLError(told.status)).lower()
    # All zeros is the fabric of one machine by itself: as a name it would make neighbours of all such machines.
    uuid = bytes(told.clusterUuid).hex()
    if uuid.strip("0"):
        said["cluster_uuid"] = "-".join((uuid[:8], uuid[8:12], uuid[12:16], uuid[16:20], uuid[20:]))
    if health := SUMMARIES.get(getattr(told, "healthSummary", 0)) or _health(told.healthMask):
        said["health"] = health
    return said


def _ask(nvml: ModuleType, gpu: object) -> Any:
    """The third version of the struct has the summary; older drivers know the second only. None: neither."""
    for version in (3, 2):
        made = getattr(nvml, f"c_nvmlGpuFabricInfo_v{version}_t", None)
        if made is None:
            continue
        told = made()
        try:
            nvml.nvmlDeviceGetGpuFabricInfoV(gpu, ctypes.byref(told))
        except nvml.NVMLError as error:
            if not unsupported(error.value):
                raise
        else:
            return told
    return None


def _health(mask: int) -> str | None:
    words = [(mask >> shift & width, bad, word) for shift, width, bad, word in HEALTH]
    if not any(found for found, _, _ in words):
        return None
    return ", ".join(word for found, bad, word in words if found in bad) or "healthy"
