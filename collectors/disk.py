"""How full the file systems are: statvfs(3) of what is mounted on block devices and of what comes over the network.

A mount whose server is gone answers never: the question blocks, and no signal may end it. So what comes over the
network is asked on a thread of its own, one question at a time; who does not answer costs a thread and is told.
"""

from __future__ import annotations

import os
import threading
import time

from diagnosd.collectors.kernel import NOT_SUPPORTED, KernelFile
from diagnosd.collectors.machine import Machine
from diagnosd.collectors.mounts import Mount, mounts, once
from diagnosd.point import Point, Series, point

NETWORK = frozenset(
    {
        *("nfs", "nfs4", "lustre", "cifs", "smb3", "ceph", "beegfs", "gpfs", "wekafs", "afs", "panfs", "pvfs2"),
        *("9p", "virtiofs", "fuse", "fuseblk"),  # answered by a program, here or in the hypervisor, that may hang too
    }
)
# Windows on other things than files: no size of their own
FUSE_WITHOUT_SIZE = frozenset({"fuse.lxcfs", "fuse.portal", "fuse.gvfsd-fuse", "fuse.snapfuse"})
IMAGES = frozenset({"squashfs", "iso9660", "erofs", "udf"})  # always full
WITHOUT_DEVICE = frozenset({"zfs", "bcachefs"})  # local, though their device is the name of a pool
# The root of a container; others' layers lie on a disk that is counted. And what loader workers pass batches through.
BY_PATH = {("overlay", "/"), ("tmpfs", "/dev/shm")}  # noqa: S108 - looked at, not written to

MOUNTS = 128  # of a node with more (containers' volumes), the first
WAITING = 64  # threads that wait for an answer: who hangs while so many do is not asked
PATIENCE_S = 0.2  # for all network file systems together; a server that is well answers within a few milliseconds
SILENT_S = 9.0  # a question older than this was asked at the read before, ten seconds ago


class Question:
    """What a network file system was asked, until it answers."""

    def __init__(self, path: str, now_ns: int) -> None:
        self.asked_ns = now_ns
        self.answer: os.statvfs_result | OSError | None = None
        self.took_ns = 0
        self._path = path
        self._began = time.monotonic_ns()
        self.thread = threading.Thread(target=self._ask, name=f"statvfs {path}", daemon=True)
        self.thread.start()

    def _ask(self) -> None:
        try:
            answer: os.statvfs_result | OSError = os.statvfs(self._path)
        except OSError as error:
            answer = error
        self.took_ns = time.monotonic_ns() - self._began
        self.answer = answer


class Disk:
    name = "disk"
    every = 10

    def __init__(self, machine: Machine) -> None:
        self._host = machine.host
        self._live = machine.live
        self._mountinfo = KernelFile(machine.proc / "self/mountinfo", long_records=True)
        self._failed = 0
        self._refused: set[Mount] = set()
        self._questions: dict[Mount, Question] = {}
        self._silent: set[Mount] = set()  # of which it was told
        self._waiting: list[threading.Thread] = []

    @property
    def errors(self) -> int:
        return self._mountinfo.errors + self._failed

    def read(self, now_ns: int) -> list[Point]:
        """One row a file system; events for those that stopped answering, or answer again."""
        text = self._mountinfo.read() if self._live else None
        if text is None:
            return []
        watched = [mount for mount in once(filter(_counts, mounts(text))) if mount not in self._refused][:MOUNTS]
        network = [mount for mount in watched if _may_hang(mount)]
        self._forget(network)
        self._ask(network, now_ns)
        points = [made for mount in watched if not _may_hang(mount) and (made := self._local(mount, now_ns))]
        self._wait()
        for mount in network:
            points += self._remote(mount, now_ns + len(points))
        return points

    def _local(self, mount: Mount, now_ns: int) -> Point | None:
        try:
            return self._row(mount, os.statvfs(mount.path), now_ns)
        except OSError as error:
            self._unreadable(mount, error)
            return None

    def _forget(self, network: list[Mount]) -> None:
        """What is not mounted any more: a thread that waits for it stays until the kernel lets it go."""
        self._questions = {mount: asked for mount, asked in self._questions.items() if mount in network}
        self._silent &= set(network)

    def _ask(self, network: list[Mount], now_ns: int) -> None:
        self._waiting = [thread for thread in self._waiting if thread.is_alive()]
        for mount in network:
            if mount not in self._questions and len(self._waiting) < WAITING:
                question = self._questions[mount] = Question(mount.path, now_ns)
                self._waiting.append(question.thread)

    def _wait(self) -> None:
        """Those of which it is known that they hang are not waited for again."""
        deadline = time.monotonic() + PATIENCE_S
        for mount, question in self._questions.items():
            if mount not in self._silent:
                question.thread.join(max(0.0, deadline - time.monotonic()))

    def _remote(self, mount: Mount, now_ns: int) -> list[Point]:
        question = self._questions.get(mount)
        if question is None or question.answer is None:
            self._failed += 1
            if question is None or mount in self._silent or now_ns - question.asked_ns < SILENT_S * 1e9:
                return []
            self._silent.add(mount)
            return self._event(mount, "has not answered for 10 s", now_ns)
        del self._questions[mount]
        events = []
        if mount in self._silent:
            self._silent.discard(mount)
            events = self._event(mount, "answers again", now_ns)
        if isinstance(question.answer, OSError):
            self._unreadable(mount, question.answer)
            return events
        row = self._row(mount, question.answer, question.asked_ns + question.took_ns)
        return [row, *events] if row else events

    def _unreadable(self, mount: Mount, error: OSError) -> None:
        """Another user's FUSE mount stays refused."""
        if error.errno in NOT_SUPPORTED:
            self._refused.add(mount)
        else:
            self._failed += 1

    def _row(self, mount: Mount, has: os.statvfs_result, now_ns: int) -> Point | None:
        """As Telegraf counts: free is what users may take, and the percentage is of what they may have."""
        used, free = (has.f_blocks - has.f_bfree) * has.f_frsize, has.f_bavail * has.f_frsize
        total = has.f_blocks * has.f_frsize
        if total <= 0 or used + free <= 0:
            self._refused.add(mount)
            return None
        tags = {"path": mount.path, "device": mount.device.removeprefix("/dev/"), "fstype": mount.fstype}
        try:
            series = Series.of("disk", host=self._host, **tags)
        except ValueError:  # line protocol cannot say a path like this one
            self._refused.add(mount)
            return None
        sizes = {"total": total % 2**63, "free": free % 2**63, "used": used % 2**63}
        return Point(series, {**sizes, "used_percent": 100.0 * used / (used + free)}, now_ns)

    def _event(self, mount: Mount, what: str, now_ns: int) -> list[Point]:
        tags = {"host": self._host, "kind": "telemetry_gap", "subject": f"storage:{mount.path}"}
        try:
            return [point("diagnosd_event", tags, {"text": f"{mount.path} ({mount.device}) {what}"}, now_ns)]
        except ValueError:
            return []


def _may_hang(mount: Mount) -> bool:
    return mount.fstype in NETWORK or mount.fstype.startswith("fuse.")


def _counts(mount: Mount) -> bool:
    if _may_hang(mount):
        return mount.fstype not in FUSE_WITHOUT_SIZE
    if mount.device.startswith("/dev/"):
        return mount.fstype not in IMAGES
    return mount.fstype in WITHOUT_DEVICE or (mount.fstype, mount.path) in BY_PATH
