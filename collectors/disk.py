"""How full the file systems are: statvfs(3) of what is mounted on block devices and of what comes over the network.

A mount whose server is gone answers never: the question blocks, and no signal may end it. So what comes over the
network is asked on a thread of its own, one question at a time; who does not answer costs a thread and is told.
"""

from __future__ import annotations

import errno
import os
import threading
import time

from diagnosd.collectors.kernel import NOT_SUPPORTED, KernelFile
from diagnosd.collectors.machine import Machine
from diagnosd.collectors.mounts import Mount, mounts, once
from diagnosd.point import INT_MAX, Point, Series, point

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
WAITING = 64  # threads that wait for an answer: while so many do, nothing else is asked
PATIENCE_S = 0.2  # for all network file systems together; a server that is well answers within a few milliseconds
SILENT_S = 9.0  # a question older than this was asked at the read before, ten seconds ago


class Question:
    """What a file system was asked, until it answers."""

    def __init__(self, path: str, now_ns: int) -> None:
        self.asked_ns = now_ns
        self.answer: os.statvfs_result | OSError | None = None
        self.took_ns = 0
        self._path = path
        self._began = time.monotonic_ns()
        self.thread = threading.Thread(target=self._ask, name=f"statvfs {path}", daemon=True)
        self.thread.start()

    def _ask(self) -> None:
        answer = _asked(self._path)
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
        self._answered: set[Mount] = set()
        self._refused: set[Mount] = set()
        self._silent: set[Mount] = set()  # did not answer for SILENT_S
        self._questions: dict[Mount, Question] = {}
        self._waiting: list[threading.Thread] = []

    @property
    def errors(self) -> int:
        return self._mountinfo.errors + self._failed

    def read(self, now_ns: int) -> list[Point]:
        """One row a file system; events for those that stopped answering, or answer again."""
        text = self._mountinfo.read() if self._live else None
        if text is None:
            return []
        mounted = mounts(text)
        watched = once(filter(_counts, mounted))
        self._forget(watched)
        # The way to what is mounted inside of a network file system leads through it.
        beyond = tuple(f"{mount.path.rstrip('/')}/" for mount in mounted if _remote(mount))
        at_once: list[Mount] = []
        asked: list[Mount] = []
        for mount in [mount for mount in watched if mount not in self._refused][:MOUNTS]:
            (asked if _remote(mount) or mount.path.startswith(beyond) else at_once).append(mount)
        self._ask(asked, now_ns)
        points = [row for mount in at_once for row in self._told(mount, _asked(mount.path), now_ns)]
        self._wait()
        for mount in asked:
            points += self._collect(mount, now_ns + len(points))
        return points

    def _forget(self, watched: list[Mount]) -> None:
        """What is not mounted any more. A thread that waits for it stays until the kernel lets it go."""
        for each in (self._answered, self._refused, self._silent):
            each.intersection_update(watched)
        self._questions = {mount: asked for mount, asked in self._questions.items() if mount in watched}

    def _ask(self, asked: list[Mount], now_ns: int) -> None:
        for mount in asked:
            if mount not in self._questions and self._may_wait():
                try:
                    question = Question(mount.path, now_ns)
                except RuntimeError:  # no more threads: the unit's TasksMax
                    return
                self._questions[mount] = question
                self._waiting.append(question.thread)

    def _may_wait(self) -> bool:
        if len(self._waiting) >= WAITING:
            self._waiting = [thread for thread in self._waiting if thread.is_alive()]
        return len(self._waiting) < WAITING

    def _wait(self) -> None:
        """Those that hang already are not waited for again."""
        deadline = time.monotonic() + PATIENCE_S
        for mount, question in self._questions.items():
            if mount not in self._silent:
                question.thread.join(max(0.0, deadline - time.monotonic()))

    def _collect(self, mount: Mount, now_ns: int) -> list[Point]:
        question = self._questions.get(mount)
        if question is None or question.answer is None:
            self._failed += 1
            if question is None or mount in self._silent or now_ns - question.asked_ns < SILENT_S * 1e9:
                return []
            self._silent.add(mount)
            return self._event(mount, "has not answered for 10 s", now_ns)
        del self._questions[mount]
        rows = self._told(mount, question.answer, question.asked_ns + question.took_ns)
        if mount not in self._silent:
            return rows
        self._silent.discard(mount)
        return rows + self._event(mount, "answers again", now_ns)

    def _told(self, mount: Mount, answer: os.statvfs_result | OSError, now_ns: int) -> list[Point]:
        """Another user's FUSE mount refuses us for ever; one that has answered before does not answer now."""
        if not isinstance(answer, OSError):
            self._answered.add(mount)
            return self._row(mount, answer, now_ns)
        if answer.errno in NOT_SUPPORTED and mount not in self._answered:
            self._refused.add(mount)
        else:
            self._failed += 1
        return []

    def _row(self, mount: Mount, has: os.statvfs_result, now_ns: int) -> list[Point]:
        """As Telegraf counts: free is what users may take, and the percentage is of what they may have.

        A program behind a FUSE mount may say anything, and a file system that is over its reserve says -1 of 64 bits.
        """
        used, free = (has.f_blocks - has.f_bfree) * has.f_frsize, has.f_bavail * has.f_frsize
        total = has.f_blocks * has.f_frsize
        if total <= 0 or total > INT_MAX or used + free == 0:
            self._refused.add(mount)
            return []
        if not 0 <= used <= total or not 0 <= free <= total:
            self._failed += 1
            return []
        tags = {"path": mount.path, "device": mount.device.removeprefix("/dev/"), "fstype": mount.fstype}
        try:
            series = Series.of("disk", host=self._host, **tags)
        except ValueError:  # line protocol cannot say a path like this one
            self._refused.add(mount)
            return []
        sizes = {"total": total, "free": free, "used": used}
        return [Point(series, {**sizes, "used_percent": 100.0 * used / (used + free)}, now_ns)]

    def _event(self, mount: Mount, what: str, now_ns: int) -> list[Point]:
        if not _remote(mount):  # that it lies beyond one that hangs is told of that one
            return []
        tags = {"host": self._host, "kind": "telemetry_gap", "subject": f"storage:{mount.path}"}
        try:
            return [point("diagnosd_event", tags, {"text": f"{mount.path} ({mount.device}) {what}"}, now_ns)]
        except ValueError:  # line protocol cannot say a path like this one
            return []


def _asked(path: str) -> os.statvfs_result | OSError:
    try:
        return os.statvfs(path)
    except OSError as error:
        return error
    except ValueError as error:  # a zero inside of a path
        return OSError(errno.ENOENT, str(error))


def _remote(mount: Mount) -> bool:
    return mount.fstype in NETWORK or mount.fstype.startswith("fuse.")


def _counts(mount: Mount) -> bool:
    if _remote(mount):
        return mount.fstype not in FUSE_WITHOUT_SIZE
    if mount.device.startswith("/dev/"):
        return mount.fstype not in IMAGES
    return mount.fstype in WITHOUT_DEVICE or (mount.fstype, mount.path) in BY_PATH
