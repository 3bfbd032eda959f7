"""A machine with GPUs for tests: NVIDIA's management library as the stand-in of nvml.c, and the answers it gives.

    gpus = Gpus(folder, "H100", "H100", "T4")
    gpus["0.nvmlDeviceGetUtilizationRates"] = "97,40"      # what a call answers from now on
    gpus["2.*"] = "error 15"                               # GPU 2 is lost; `hang` instead: its calls do not return
    subprocess.run([...], env=os.environ | gpus.environment)

nvml.c says what may stand there. A process that asks it finds it through LD_LIBRARY_PATH; this one can `load()` it.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterable, Mapping
from importlib.metadata import distribution
from pathlib import Path

SOURCE = Path(__file__).with_name("nvml.c")
LIBRARY = "libnvidia-ml.so.1"
ALL_LINKS = 0xFFFFFFFF

HOPPER_LINK = {164: "26562", 165: "1", 163: "0", 161: "0", 162: "0"}  # field -> answer
BLACKWELL_LINK = {164: "53125", 165: "1", 208: "0", 215: "0", 219: "0", 221: "0"}

# What tells the generations apart. `sm` and `memory` are MHz, `limit` W, `memory_mib` MiB, `gpm` a GPU that has it.
KINDS: Mapping[str, Mapping[str, object]] = {
    "H100": {"name": "NVIDIA H100 80GB HBM3", "sm": 1980, "memory": 2619, "limit": 700, "memory_mib": 81559,
             "gen": 5, "links": 18, "link": HOPPER_LINK, "gpm": True, "average": True},
    "A100": {"name": "NVIDIA A100-SXM4-80GB", "sm": 1410, "memory": 1593, "limit": 400, "memory_mib": 81920,
             "gen": 4, "links": 12, "link": {**HOPPER_LINK, 164: "25781"}, "gpm": False, "average": False},
    "B200": {"name": "NVIDIA B200", "sm": 1965, "memory": 3996, "limit": 1000, "memory_mib": 183359,
             "gen": 6, "links": 18, "link": BLACKWELL_LINK, "gpm": True, "average": True},
    "T4": {"name": "Tesla T4", "sm": 1590, "memory": 5000, "limit": 70, "memory_mib": 15109,
           "gen": 3, "links": 0, "link": {}, "gpm": False, "average": False},
    # Memory is the processor's: no framebuffer, no memory clock, no limit, PCIe only in name.
    "GB10": {"name": "NVIDIA GB10", "sm": 2418, "memory": None, "limit": None, "memory_mib": None,
             "gen": 1, "links": 0, "link": {}, "gpm": False, "average": True},
}  # fmt: skip


def library(folder: Path, without: Iterable[str] = ()) -> Path:
    """Builds the stand-in into a folder. `without` names functions that it does not have, as an old driver's."""
    (header,) = (file for file in distribution("nvidia-nvml-dev").files or () if file.name == "nvml.h")
    built = folder / LIBRARY
    script = folder / "symbols"
    script.write_text("{ global: *; local: " + " ".join(f"{name};" for name in without) + " };\n")
    command = ["gcc", "-O2", "-Wall", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}"]
    hidden = [f"-Wl,--version-script={script}"] if without else []
    include = Path(str(header.locate())).parent
    subprocess.run([*command, *hidden, f"-I{include}", "-o", str(built), str(SOURCE)], check=True)
    return built


def uuid(index: int) -> str:
    return f"GPU-{index:08x}-1111-2222-3333-444444444444"


def address(index: int) -> str:
    """As NVML spells it."""
    return f"00000000:{0x18 + 8 * index:02X}:00.0"


def gpu(index: int, kind: str) -> dict[str, str]:
    """The answers of a GPU of this kind that trains: busy, cool, and all its links up."""
    made = KINDS[kind]
    calls = {
        "nvmlDeviceGetUUID": uuid(index),
        "nvmlDeviceGetName": made["name"],
        "nvmlDeviceGetPciInfo_v3": address(index),
        "nvmlDeviceGetSerial": f"165{index:010d}",
        "nvmlDeviceGetVbiosVersion": "96.00.A5.00.01",
        "nvmlDeviceGetUtilizationRates": "97,40",
        "nvmlDeviceGetClockInfo.1": made["sm"],
        "nvmlDeviceGetClockInfo.2": made["memory"],
        "nvmlDeviceGetCurrentClocksEventReasons": 0x4,
        "nvmlDeviceGetCurrPcieLinkGeneration": made["gen"],
        "nvmlDeviceGetMaxPcieLinkGeneration": made["gen"],
        "nvmlDeviceGetCurrPcieLinkWidth": 16,
        "nvmlDeviceGetMaxPcieLinkWidth": 16,
        "nvmlDeviceGetTemperatureV.0": 59,
        "nvmlDeviceGetPersistenceMode": 1,
        "nvmlDeviceGetMigMode": "0,0",
        "nvmlGpmQueryDeviceSupport": int(bool(made["gpm"])),
        **{f"nvmlDeviceGetMemoryErrorCounter.{kind}": 0 for kind in ("0.0.2", "1.0.2", "0.0.7", "1.0.7")},
        **{f"nvmlDeviceGetMemoryErrorCounter.{kind}": 0 for kind in ("0.1.2", "1.1.2", "0.1.7", "1.1.7")},
        **{f"gpm.{metric}": share for metric, share in ((2, 87.5), (5, 61.25), (10, 40.0)) if made["gpm"]},
        **{f"field.{field}.0": answer for field, answer in _fields(made).items()},
        **_memory(made["memory_mib"]),
        **_links(int(str(made["links"])), made["link"]),
    }
    return {f"{index}.{call}": str(answer) for call, answer in calls.items() if answer is not None}


def _fields(made: Mapping[str, object]) -> dict[int, object]:
    limit = made["limit"] and f"uint {made['limit']}000"
    return {
        82: made["memory"] and "uint 55",  # memory temperature
        83: "5000000000 + 600000/s",  # energy, mJ
        74: "7000000000", 269: "0", 270: "0", 271: "0",  # throttled, ns
        94: "uint 9",  # PCIe replays
        142: "0", 143: "0",  # remapped rows
        185: "uint 629450" if made["average"] else None,
        186: "uint 588390",
        189: limit, 190: limit,
        197: "uint 4000000000", 198: "uint 3000000000",  # PCIe bytes, 32 bits
    }  # fmt: skip


def _memory(mib: object) -> dict[str, object]:
    if not mib:
        return {}
    total, reserved, used = int(str(mib)) << 20, 479 << 20, 19818 << 20
    used = min(used, total // 2)
    return {
        "nvmlDeviceGetMemoryInfo_v2": f"{total},{reserved},{total - reserved - used},{used}",
        "nvmlDeviceGetMemoryInfo": f"{total},{total - reserved - used},{reserved + used}",
    }


def _links(count: int, answers: object) -> dict[str, object]:
    """All of them lead to switches."""
    assert isinstance(answers, dict)
    said: dict[str, object] = {"field.91.0": f"uint {count}"}
    if count:
        said |= {f"field.138.{ALL_LINKS}": "1000000 + 50000000/s", f"field.139.{ALL_LINKS}": "2000000 + 60000000/s"}
    for link in range(count):
        said |= {f"field.{field}.{link}": answer for field, answer in answers.items()}
        said |= {f"nvmlDeviceGetNvLinkRemoteDeviceType.{link}": 2}
    return said


class Gpus:
    """The GPUs of a machine, and a folder with the library that shows them and the file of its answers."""

    def __init__(self, folder: Path, *kinds: str, built: Path | None = None) -> None:
        """`built` is a library that was made before: making one takes a second."""
        self.folder = folder
        self.library = built or library(folder)
        self.trace = folder / "trace"
        self.state = folder / "state"
        self.answers = {
            "nvmlSystemGetDriverVersion": "590.48.01",
            "nvmlSystemGetNVMLVersion": "13.590.48.01",
            "nvmlSystemGetCudaDriverVersion_v2": "13010",
            "nvmlDeviceGetCount_v2": str(len(kinds)),
        }
        for index, kind in enumerate(kinds):
            self.answers |= gpu(index, kind)
        self.write()

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_LIBRARY_PATH": str(self.library.parent), "NVML_STATE": str(self.state)}

    def load(self) -> None:
        """Into this process, before anything asks for it by name: the dynamic linker then gives this one."""
        ctypes.CDLL(str(self.library))

    def __setitem__(self, call: str, answer: object) -> None:
        self.answers[call] = str(answer)
        self.write()

    def __delitem__(self, call: str) -> None:
        del self.answers[call]
        self.write()

    def write(self) -> None:
        fresh = self.folder / "state.new"
        fresh.write_text("".join(f"{call} = {answer}\n" for call, answer in self.answers.items()))
        fresh.replace(self.state)
