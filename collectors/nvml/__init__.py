"""The GPUs of this machine, through NVIDIA's management library (NVML): never CUDA, never a setter, nothing for root.

What is asked stands in fields.py. Here is the library's life: it is looked for, started once, let go of when the
driver goes, and tried again now and then; and the GPUs that it shows, which come and go.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from diagnosd.collectors.every import Every
from diagnosd.collectors.kernel import first_line
from diagnosd.collectors.machine import Machine
from diagnosd.collectors.nvml.gpu import Gpu, Identity
from diagnosd.collectors.nvml.sheet import MISMATCH, NOT_LOADED, DownError, LostError, said, unsupported
from diagnosd.collectors.pci import address, as_nvml, driver, nvidia_gpus
from diagnosd.point import Point, point

LIBRARY = "libnvidia-ml.so.1"
TRY_S, LOOK_S = 60, 60
MOST = 256  # GPUs: no machine has more, whatever a driver says

NO_LIBRARY, NO_PERMISSION = 12, 4


class Nvml:
    name = "nvml"
    every = 1

    def __init__(self, machine: Machine) -> None:
        self.errors = 0
        self.missing: str | None = None
        self.stale = False
        self._machine = machine
        self._nvml: ModuleType | None = None  # while the library is started
        self._tick = 0
        self._worked = False
        self._told_mismatch = False
        self._try_due, self._look_due = Every(TRY_S), Every(LOOK_S)
        self._gpus: dict[str, Gpu] = {}  # by uuid
        self._lost: set[str] = set()
        self._before: list[Identity] = []  # GPUs that the driver showed before it went
        self._pci: list[str] = []  # addresses, in sysfs's spelling, of NVIDIA's GPUs on the PCI bus, but excluded ones
        self._shown: set[str] = set()  # of those that NVML has shown
        self._unanswered: set[str] = set()  # and of those that it does not: told
        self._partly = False  # this process may not see every GPU of the machine
        self._software: dict[str, Any] = {}

    def read(self, now_ns: int) -> list[Point]:
        if not self._machine.live:
            return []
        self._tick += 1
        points: list[Point] = []
        try:
            if self._nvml is None:
                if not self._try_due.is_due(now_ns, self._tick):
                    return []
                self._start()
            for gpu in list(self._gpus.values()):
                points += self._read(gpu, now_ns)
            if self._look_due.is_due(now_ns, self._tick):
                points += self._look(now_ns)
        except DownError as down:
            points += self._down(down.code, now_ns)
        return points

    def inventory(self) -> dict[str, Any]:
        """The part of a NodeInventory that NVML knows, as of the last look; nothing is asked here."""
        gpus = sorted(self._gpus.values(), key=lambda gpu: gpu.identity.index)
        fabrics = [gpu.fabric for gpu in gpus if gpu.fabric]
        persistent = [gpu.persistent for gpu in gpus if gpu.persistent is not None]
        software = {**self._software, **({"persistence": all(persistent)} if persistent else {})}
        known = {
            "gpus": [gpu.known for gpu in gpus if gpu.known],
            "fabric": min(fabrics, key=_fitness) if fabrics else None,
            "software": software,
        }
        return {key: value for key, value in known.items() if value} if self._nvml else {}

    def close(self) -> None:
        """Lets go of every device."""
        nvml, self._nvml = self._nvml, None
        if nvml is None:
            return
        gpus, self._gpus = self._gpus, {}
        try:
            for gpu in gpus.values():
                gpu.close()
            nvml.nvmlShutdown()
        except nvml.NVMLError:  # the driver is gone already
            self.errors += 1

    # ---- the library ----

    def _start(self) -> None:
        nvml = importlib.import_module("pynvml")
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise DownError(error.value) from error
        self._nvml = nvml
        self._worked, self._told_mismatch, self.stale, self.missing = True, False, False, None
        self._software = self._versions(nvml)
        self._look_due = Every(LOOK_S)
        self._pci = nvidia_gpus(self._machine)

    def _versions(self, nvml: ModuleType) -> dict[str, Any]:
        versions: dict[str, Any] = {}
        try:
            versions["driver"] = nvml.nvmlSystemGetDriverVersion()
            cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()  # 13010 is 13.1
            versions["cuda"] = f"{cuda // 1000}.{cuda % 1000 // 10}"
        except (nvml.NVMLError, UnicodeDecodeError):
            self.errors += 1
        return versions

    def _down(self, code: int, now_ns: int) -> list[Point]:
        self._before += [gpu.identity for gpu in self._gpus.values()]
        self.close()
        self.missing = self._reason(code)
        self.stale = code == MISMATCH and (self._worked or _replaced())
        if code != MISMATCH or self._told_mismatch:
            return []
        self._told_mismatch = True
        return [self._event("driver", f"host:{self._machine.host}", self.missing, now_ns, code)]

    def _reason(self, code: int) -> str:
        if code == NO_LIBRARY:
            return f"no NVIDIA driver here ({_why_not_loaded()})"
        if code == NOT_LOADED:
            return "the NVIDIA driver is installed and its kernel module is not loaded (no /proc/driver/nvidia)"
        if code == MISMATCH:
            module = first_line(self._machine.sys / "module/nvidia/version") or "another version"
            return f"NVIDIA's kernel module ({module}) and {LIBRARY}{_version()} differ: load the module anew or reboot"
        if code == NO_PERMISSION:
            return "no permission to ask the NVIDIA driver (/dev/nvidiactl)"
        return f"NVIDIA's driver cannot be asked ({LIBRARY}: NVML's error {code})"

    # ---- the GPUs ----

    def _read(self, gpu: Gpu, now_ns: int) -> list[Point]:
        try:
            return gpu.read(now_ns)
        except LostError:
            self._let_go(gpu)
            return self._lose(gpu.identity, now_ns)
        finally:
            self.errors += gpu.unreadable

    def _let_go(self, gpu: Gpu) -> None:
        assert self._nvml
        self._gpus.pop(gpu.identity.uuid, None)
        try:
            gpu.close()
        except self._nvml.NVMLError:
            self.errors += 1

    def _lose(self, gpu: Identity, now_ns: int) -> list[Point]:
        if gpu.uuid in self._lost:
            return []
        self._lost.add(gpu.uuid)
        text = f"GPU {gpu.index} ({gpu.name}, {gpu.pci}) is lost: it no longer answers"
        return [self._event("gpu_lost", f"gpu:{self._machine.host}/{gpu.uuid}", text, now_ns)]

    def _look(self, now_ns: int) -> list[Point]:
        """For GPUs that are new, or back after a reset: one that was lost is back when it gives a value."""
        points = []
        for handle in self._handles():
            gpu = self._unread(handle)
            if gpu is None:
                continue
            told = self._read(gpu, now_ns)
            points += told
            if any(each.series.measurement == "nvidia_smi" for each in told):
                self._gpus[gpu.identity.uuid] = gpu
                self._lost.discard(gpu.identity.uuid)
            else:
                self._let_go(gpu)
        before, self._before = self._before, []
        for identity in before:
            if identity.uuid not in self._gpus:
                points += self._lose(identity, now_ns)
        self.missing = None if self._gpus or self._lost else "the NVIDIA driver shows no GPU"
        return points + self._unanswering(now_ns)

    def _handles(self) -> Iterator[object]:
        """By number; by PCI address where some are to be left alone, so that those are not touched."""
        nvml = self._nvml
        assert nvml
        ways: list[tuple[Any, object]]
        if self._machine.exclude and (self._machine.sys / "bus/pci/devices").is_dir():
            ways = [(nvml.nvmlDeviceGetHandleByPciBusId, as_nvml(pci).encode()) for pci in self._pci]
        else:
            ways = [(nvml.nvmlDeviceGetHandleByIndex, number) for number in range(self._counted(nvml))]
        for get, which in ways:
            handle = self._try(get, which)
            if handle is not None:
                yield handle

    def _counted(self, nvml: ModuleType) -> int:
        return min(self._try(nvml.nvmlDeviceGetCount) or 0, MOST)

    def _try(self, get: Any, *arguments: object) -> Any:
        """What a function of nvidia-ml-py says; None, counted, where it cannot. What it may not see is not ours."""
        assert self._nvml
        try:
            return get(*arguments)
        except self._nvml.NVMLError as error:
            self._partly |= error.value == NO_PERMISSION
            try:
                self.errors += not unsupported(error.value)
            except LostError:
                self.errors += 1
        except UnicodeDecodeError:
            self.errors += 1
        return None

    def _unread(self, handle: object) -> Gpu | None:
        """A GPU, unless it is read already, is to be left alone, or does not say who it is."""
        nvml = self._nvml
        assert nvml
        info = self._try(nvml.nvmlDeviceGetPciInfo, handle)
        pci = None if info is None else said(info.busId)
        uuid = said(self._try(nvml.nvmlDeviceGetUUID, handle) or "")
        if at := address(pci):
            self._shown.add(at)
        if uuid is None or uuid in self._gpus or self._machine.excludes(uuid, pci, at):
            return None
        index = self._try(nvml.nvmlDeviceGetIndex, handle)
        name = said(self._try(nvml.nvmlDeviceGetName, handle) or "")
        identity = Identity(index or 0, uuid, name or "unknown", pci)
        return Gpu(nvml, handle, self._machine.host, identity)

    def _unanswering(self, now_ns: int) -> list[Point]:
        """GPUs that the PCI bus lists and NVML does not: fallen off at boot, perhaps without a word in any log."""
        if self._partly:
            return []
        gone = [pci for pci in self._pci if pci not in self._shown | self._unanswered and self._is_ours(pci)]
        self._unanswered |= set(gone)
        return [self._unshown(pci, now_ns) for pci in gone]

    def _unshown(self, pci: str, now_ns: int) -> Point:
        """Nobody knows its uuid: it goes by the name that the kernel's log has for it, PCI:0000:3b:00."""
        subject = f"gpu:{self._machine.host}/PCI:{pci.rpartition('.')[0]}"
        text = f"the GPU at {pci} is on the PCI bus and the driver does not show it"
        return self._event("gpu_lost", subject, text, now_ns)

    def _is_ours(self, pci: str) -> bool:
        """Not given to a virtual machine, and not another container's: the driver's own list leaves out those."""
        device = self._machine.sys / "bus/pci/devices" / pci
        bound = driver(device)
        if bound is None:
            return device.exists()
        return bound == "nvidia" and (self._machine.proc / "driver/nvidia/gpus" / pci).is_dir()

    def _event(self, kind: str, subject: str, text: str, now_ns: int, code: int | None = None) -> Point:
        tags = {"host": self._machine.host, "kind": kind, "subject": subject}
        return point("diagnosd_event", tags, {"text": text, "code": code}, now_ns)


def _fitness(fabric: dict[str, Any]) -> tuple[bool, bool, bool]:
    """The node's fabric is that of the GPU in which it is worst."""
    return (
        fabric["state"] == "completed",
        fabric.get("status", "success") == "success",
        fabric.get("health", "healthy") == "healthy",
    )


def _why_not_loaded() -> str:
    """The dynamic linker's words: they name the file, also one that is there and empty."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        return str(error)
    return f"{LIBRARY} is there now"


def _version() -> str:
    """Of the library, which says so also when it does not start."""
    version = ctypes.create_string_buffer(80)
    try:
        refused = ctypes.CDLL(LIBRARY).nvmlSystemGetNVMLVersion(version, len(version))
    except (OSError, AttributeError):
        return ""
    return "" if refused else f" ({version.value.decode(errors='replace')})"


def _replaced() -> bool:
    """Whether the library's file that this process has loaded is no longer on disk: a fresh one would load another."""
    try:
        maps = Path("/proc/self/maps").read_text(errors="replace")
    except OSError:
        return False
    return any("libnvidia-ml" in line and line.endswith("(deleted)") for line in maps.splitlines())
