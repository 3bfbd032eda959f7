"""Control groups that slow what a rank computes or reads (version 1, where each resource has a tree of its own)."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from .fabric import PREFIX, stale

Resource = Literal["cpu", "reads"]
TREES: dict[Resource, Path] = {"cpu": Path("/sys/fs/cgroup/cpu"), "reads": Path("/sys/fs/cgroup/blkio")}
PERIOD_US = 100_000  # the kernel's default period of a CPU quota


def disk_under(path: Path) -> str | None:
    """MAJOR:MINOR of the disk under a path, which is what the kernel throttles; None where there is none (tmpfs)."""
    device = path.stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    if not block.exists():
        return None
    return ((block.parent if (block / "partition").exists() else block) / "dev").read_text().strip()


def missing(resource: Resource, folder: Path) -> str | None:
    """Why this resource cannot be limited for processes that read from `folder`; None where it can."""
    if not (TREES[resource] / "cgroup.procs").exists():
        return f"{TREES[resource]} is not there (control groups of version 1)"
    if resource == "reads" and not disk_under(folder):
        return f"{folder} lies on no disk that could be throttled"
    return None


class Limit:
    """A control group a host, for one resource; `folder` is where the ranks read."""

    def __init__(self, resource: Resource, hosts: Sequence[str], folder: Path) -> None:
        self.resource, self.disk = resource, disk_under(folder)
        self.groups = {host: TREES[resource] / f"{PREFIX}{os.getpid()}-{host}" for host in hosts}

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
            if self.resource == "cpu":
                (group / "cpu.cfs_quota_us").write_text(str(-1 if value is None else value * PERIOD_US // 100))
            else:
                (group / "blkio.throttle.read_bps_device").write_text(f"{self.disk} {value or 0}")


def remove(group: Path) -> None:
    """Remove a control group with the processes in it; they leave it some moments after they are killed."""
    while pids := (group / "cgroup.procs").read_text().split():
        for pid in pids:
            os.kill(int(pid), signal.SIGKILL)
    group.rmdir()


def remove_stale() -> None:
    for tree in TREES.values():
        for group in tree.glob(f"{PREFIX}*"):
            if stale(group.name):
                remove(group)
