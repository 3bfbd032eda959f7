"""What the numbers in the NVIDIA driver's Xid messages mean.

The facts are those of NVIDIA's "Analyzing Xid Errors with the Xid Catalog", in our words
(https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, as of October 2025). Numbers that it calls unused
are left out; one that is not here means nothing to us, and is kept as it came. `severity` follows the action that the
catalog asks for first:

    fatal        the GPU works again after a reset, or a restart of the machine, only
    application  a process on the GPU has failed, the GPU goes on. 13 and 31 are the program's fault when they come
                 once, and the hardware's when the same unit tells them in different jobs
    follow_on    comes after another message, of this GPU or of one that it is connected with: never alone a fault
    info         nothing has failed yet
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SEVERITIES = ("fatal", "application", "follow_on", "info")
PARTS = ("bus", "engine", "firmware", "memory", "nvlink", "power", "program")


class Xid(NamedTuple):
    code: int
    meaning: str
    severity: str  # one of SEVERITIES
    part: str  # one of PARTS: what of the GPU, or what runs on it, it is about


def _engines(part: str, codes: Iterable[int]) -> Iterable[Xid]:
    return (Xid(code, f"{part} failed in a program's work", "application", "engine") for code in codes)


_ROWS = (
    Xid(8, "a channel stopped processing", "application", "engine"),
    Xid(11, "the program's command stream is invalid", "application", "program"),
    Xid(13, "a kernel ran into an exception", "application", "program"),
    Xid(25, "the program's command stream is illegal", "application", "program"),
    Xid(31, "a kernel touched memory that is not mapped", "application", "program"),
    Xid(32, "the program's command stream arrived corrupted", "application", "program"),
    Xid(37, "the context-switch firmware refused a request of the driver", "info", "firmware"),
    Xid(38, "the context-switch firmware ran into its watchdog", "info", "firmware"),
    *_engines("a copy engine", (39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136))),
    Xid(43, "a program's channel was stopped after its own fault", "application", "program"),
    Xid(44, "the compute engine faulted while it switched contexts", "info", "engine"),
    Xid(45, "channels were removed after an earlier error, or as their process ended", "follow_on", "program"),
    Xid(46, "the GPU stopped processing", "fatal", "engine"),
    Xid(48, "memory error that could not be corrected", "fatal", "memory"),
    Xid(54, "auxiliary power is not connected", "fatal", "power"),
    *_engines("a video engine", (60, 68, 82, 83, 84, 86, 88, 89, *range(96, 106), 139, 142)),
    Xid(61, "the power management controller stopped at a breakpoint", "fatal", "firmware"),
    Xid(62, "the power management controller halted", "fatal", "firmware"),
    Xid(63, "a memory row will be remapped at the next reset", "info", "memory"),
    Xid(64, "a memory row could not be marked for remapping", "fatal", "memory"),
    Xid(66, "the driver accessed a register it may not", "info", "firmware"),
    Xid(67, "the driver broke a rule of the context-switch firmware", "info", "firmware"),
    Xid(69, "a kernel used the compute engine wrongly", "application", "program"),
    Xid(74, "an NVLink failed", "fatal", "nvlink"),
    Xid(78, "a virtual GPU could not start", "info", "firmware"),
    Xid(79, "fallen off the bus", "fatal", "bus"),
    Xid(80, "data arrived at the GPU corrupted", "application", "bus"),
    Xid(92, "many corrected memory errors", "info", "memory"),
    Xid(93, "the board's information memory is worn", "info", "firmware"),
    Xid(94, "memory error, contained in the programs that used it", "application", "memory"),
    Xid(95, "memory error that was not contained", "fatal", "memory"),
    Xid(106, "test message", "info", "firmware"),
    Xid(107, "test message", "info", "firmware"),
    Xid(108, "an address was not translated at the other end of an NVLink", "follow_on", "nvlink"),
    Xid(109, "a context switch did not end in time", "fatal", "engine"),
    Xid(110, "security fault", "fatal", "engine"),
    Xid(119, "the GPU's system processor does not answer", "fatal", "firmware"),
    Xid(120, "the GPU's system processor reports an error", "fatal", "firmware"),
    Xid(121, "errors between the processor's chip and the GPU's", "info", "bus"),
    Xid(136, "an NVLink could not be trained", "fatal", "nvlink"),
    Xid(137, "an access was refused at the other end of an NVLink", "follow_on", "nvlink"),
    Xid(140, "memory error that was not recovered", "fatal", "memory"),
    Xid(141, "error in CUDA's fast path", "info", "program"),
    Xid(143, "the GPU could not be initialised", "fatal", "firmware"),
    # 144 to 150 say in their text whether they are fatal: see `severity`
    *(Xid(code, f"NVLink error ({unit})", "info", "nvlink") for code, unit in ((144, "SAW"), (145, "RLW"))),
    *(Xid(code, f"NVLink error ({unit})", "info", "nvlink") for code, unit in ((146, "TLW"), (147, "TREX"))),
    *(Xid(code, f"NVLink error ({unit})", "info", "nvlink") for code, unit in ((148, "NVLPW"), (149, "NETIR"))),
    Xid(150, "NVLink error (MSE)", "info", "nvlink"),
    Xid(151, "the keys of a confidential GPU could not be changed", "fatal", "firmware"),
    Xid(152, "a deep-learning accelerator touched memory that is not mapped", "info", "engine"),
    Xid(153, "a deep-learning accelerator did not answer in time", "info", "engine"),
    Xid(154, "what the driver asks for to recover the GPU has changed", "follow_on", "firmware"),
    Xid(155, "NVLink error told by software", "fatal", "nvlink"),
    Xid(156, "a part of the GPU is retired at the next reset", "fatal", "memory"),
    Xid(157, "a part of the GPU could not be retired", "info", "memory"),
    Xid(158, "the GPU did not answer in time", "fatal", "bus"),
    Xid(159, "error on the coherent bus to the processor", "info", "bus"),
    Xid(160, "a memory channel is retired", "info", "memory"),
    Xid(161, "a memory channel could not be retired", "info", "memory"),
    Xid(162, "power smoothing is on again", "info", "power"),
    Xid(163, "power smoothing is off", "info", "power"),
    Xid(164, "power smoothing nears the end of its life", "info", "power"),
    Xid(165, "power smoothing has reached the end of its life", "info", "power"),
    Xid(166, "traffic on an NVLink before it was encrypted", "info", "nvlink"),
    Xid(167, "PCI Express did not answer in time", "fatal", "bus"),
    Xid(168, "the GPU has less memory than it should", "info", "memory"),
    Xid(169, "the security controller halted", "fatal", "firmware"),
    Xid(170, "an NVLink error in confidential mode", "info", "nvlink"),
    Xid(171, "details of a memory error (Xid 48): DRAM", "follow_on", "memory"),
    Xid(172, "details of a memory error (Xid 48): SRAM", "follow_on", "memory"),
)
XIDS: Mapping[int, Xid] = MappingProxyType({row.code: row for row in _ROWS})

NVLINK5 = range(144, 151)


def severity(code: int, text: str) -> str | None:
    """One of SEVERITIES, None for a number that is not known. The messages of NVLink 5 carry it in their text."""
    if code in NVLINK5:
        return "fatal" if " Fatal " in text else "info"
    known = XIDS.get(code)
    return known.severity if known else None
