"""Where a collector looks. Every root is a parameter, so that a captured tree is a machine."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple


class Machine(NamedTuple):
    host: str
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    dev: Path = Path("/dev")
    run: Path = Path("/run")
    live: bool = True  # this one, now: what is asked of the kernel or a library, and not read from a tree, is its too
    exclude: tuple[str, ...] = ()  # patterns (mlx5_*) of what nobody may open: device, interface, PCI address, uuid

    @classmethod
    def of(cls, host: str, root: Path | None, exclude: Iterable[str]) -> Machine:
        """The one that was captured there, or this one."""
        return captured(host, root, tuple(exclude)) if root else cls(host, exclude=tuple(exclude))

    def excludes(self, *names: str | None) -> bool:
        """Whether a device that goes by these names is to be left alone; asked before anything of it is opened."""
        return any(fnmatchcase(name, pattern) for name in names if name for pattern in self.exclude)


def captured(host: str, root: Path, exclude: tuple[str, ...] = ()) -> Machine:
    """The machine whose trees lie in a folder: its /sys in `sys` or in the folder itself, /proc in `proc`."""
    sys = root / "sys" if (root / "sys").is_dir() else root
    return Machine(host, root / "proc", sys, root / "dev", root / "run", live=False, exclude=exclude)
