"""Control groups that slow what a rank computes or reads.

In version 1 each resource has a tree of its own; in version 2 one tree has all, or, on a hybrid machine, what is left.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Self

from .fabric import PREFIX, stale

Resource = Literal["cpu", "reads"]
PERIOD_US = 100_000  # the kernel's default period of a CPU quota


class Control(NamedTuple):
    """The tree of control groups that limits a resource, and the file of a group in which the limit stands."""

    tree: Path
    file: str

    def setting(self, value: int | None, disk: str | None) -> str:
        """What the file takes: percent of a core, or bytes/s from a disk; None for no limit."""
        quota = None if value is None else value * PERIOD_US // 100
        return {
            "cpu.cfs_quota_us": f"{-1 if quota is None else quota}",
            "cpu.max": f"{'max' if quota is None else quota} {PERIOD_US}",
            "blkio.throttle.read_bps_device": f"{disk} {value or 0}",
            "io.max": f"{disk} rbps={'max' if value is None else value}",
        }[self.file]


SEPARATE: dict[Resource, Control] = {
    "cpu": Control(Path("/sys/fs/cgroup/cpu"), "cpu.cfs_quota_us"),
    "reads": Control(Path("/sys/fs/cgroup/blkio"), "blkio.throttle.read_bps_device"),
}
UNIFIED: dict[Resource, tuple[str, str]] = {"cpu": ("cpu", "cpu.max"), "reads": ("io", "io.max")}  # controller, file


def control(resource: Resource) -> Control | None:
    """What limits a resource on this machine; None where nothing does."""
    if (SEPARATE[resource].tree / "cgroup.procs").exists():
        return SEPARATE[resource]
    controller, file = UNIFIED[resource]
    for root in unified():
        if controller in (root / "cgroup.controllers").read_text().split():
            (root / "cgroup.subtree_control").write_text(f"+{controller}")
            return Control(root, file)
    return None


def unified() -> list[Path]:
    mounts = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    return [Path(where) for _, where, kind, *_ in mounts if kind == "cgroup2"]


def disk_under(path: Path) -> str | None:
    """MAJOR:MINOR of the disk under a path, which is what the kernel throttles; None where there is none (tmpfs)."""
    device = path.stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    if not block.exists():
        return None
    return ((block.parent if (block / "partition").exists() else block) / "dev").read_text().strip()


def missing(resource: Resource, folder: Path) -> str | None:
    """Why this resource cannot be limited for processes that read from `folder`; None where it can."""
    if control(resource) is None:
        return f"no control groups that limit {'the CPU' if resource == 'cpu' else 'reads'}"
    if resource == "reads" and not disk_under(folder):
        return f"{folder} lies on no disk that could be throttled"
    return None


class Limit:
    """A control group a host, for one resource; `folder` is where the ranks read."""

    def __init__(self, resource: Resource, hosts: Sequence[str], folder: Path) -> None:
        found = control(resource)
        assert found
        self.control, self.disk = found, disk_under(folder)
        self.groups = {host: found.tree / f"{PREFIX}{os.getpid()}-{host}" for host in hosts}

    def __enter__(self) -> Self:
        for group in self.groups.values():
            group.mkdir()
        return self

    def __exit__(self, *exception: object) -> None:
        for group in self.groups.values():
            remove(group)

    def set(self, value: int | None) -> None:
        """From now on percent of a core, or bytes/s from the disk, for each host's processes; None for no limit."""
        for group in self.groups.values():
            (group / self.control.file).write_text(self.control.setting(value, self.disk))


def remove(group: Path) -> None:
    """Remove a control group with the processes in it; they leave it some moments after they are killed."""
    while pids := (group / "cgroup.procs").read_text().split():
        for pid in pids:
            os.kill(int(pid), signal.SIGKILL)
    group.rmdir()


def remove_stale() -> None:
    for tree in (*(each.tree for each in SEPARATE.values()), *unified()):
        for group in tree.glob(f"{PREFIX}*"):
            if stale(group.name):
                remove(group)
