"""The real systemd as PID 1 of namespaces of its own, over an overlay of this machine's root: a node to install on.

Nothing outside sees what happens in it. Of this machine's own units only the journal and the temporary files are
started; its network is a loopback. What it writes lies in memory, and is gone when it ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from shlex import join
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SYSTEMD = Path("/usr/lib/systemd/systemd")
PREFIX = "dgsystemd"
HOST = "n1"
SPACES = ("--mount", "--pid", "--uts", "--ipc", "--net", "--cgroup")
ENVIRON = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "SYSTEMD_COLORS": "0", "SYSTEMD_PAGER": ""}
BOOT_S = 20.0  # it takes 0.4 s on an idle machine


def missing() -> str | None:
    """Why systemd cannot be booted here; None where it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "systemd boots in namespaces of its own only as root on Linux"
    if not SYSTEMD.exists() or not shutil.which("nsenter"):
        return f"{SYSTEMD} or nsenter is not installed here"
    if _unified() is None:
        return "no control groups of version 2 are mounted here"
    tried = subprocess.run(["unshare", *SPACES, "true"], capture_output=True, text=True, check=False)
    return tried.stderr.strip() or None


def _unified() -> Path | None:
    mounts = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    return next((Path(where) for _, where, kind, *_ in mounts if kind == "cgroup2"), None)


class Kernel:
    """Speaks as a node's kernel. Its /dev/kmsg is a pipe of packets: one read is one record, as with its own."""

    def __init__(self, kmsg: Path) -> None:
        self._pipe = os.open(kmsg, os.O_RDWR)  # the journal opens it to write, and waits until somebody may read
        fcntl.fcntl(self._pipe, fcntl.F_SETFL, os.O_DIRECT)
        self._number = 0

    def say(self, text: str, priority: int = 4) -> None:
        """One record, stamped now; waits while the journal is behind. 2 is critical, 3 an error, 4 a warning."""
        now_us = time.monotonic_ns() // 1000
        os.write(self._pipe, f"{priority},{self._number},{now_us},-;{text}\n".encode())
        self._number += 1

    def close(self) -> None:
        os.close(self._pipe)


class Node(NamedTuple):
    pid: int  # of its PID 1, as the machine outside counts
    kernel: Kernel

    @property
    def root(self) -> Path:
        """Its root folder, seen from outside: what is written there is there for the node's processes."""
        return Path(f"/proc/{self.pid}/root")

    def within(self, *command: str) -> list[str]:
        """The command line that runs a command in the node, as root."""
        return ["nsenter", f"--target={self.pid}", *SPACES, "--", *command]

    def run(self, *command: str, patience: float = 20.0) -> str:
        """What a command prints; RuntimeError with what it said where it fails."""
        done = subprocess.run(
            self.within(*command), capture_output=True, text=True, check=False, env=ENVIRON, timeout=patience
        )
        if done.returncode:
            raise RuntimeError(f"{join(command)}: exit code {done.returncode}: {done.stderr.strip()} {done.stdout}")
        return done.stdout


@contextmanager
def booted(folder: Path) -> Iterator[Node]:
    """A node that has just booted; `folder` is its alone. RuntimeError where it does not come up."""
    unified = _unified()
    assert unified
    _remove_stale(unified)
    group = unified / f"{PREFIX}{os.getpid()}-{folder.name}"
    group.mkdir()
    trees = {str(ROOT), str(Path(sys.prefix).resolve()), str(Path(sys.base_prefix).resolve())}
    pivot = ["sh", str(Path(__file__).with_name("pivot.sh")), str(folder), HOST, *sorted(trees)]
    enter = f"echo $$ > {group}/cgroup.procs; exec unshare {join([*SPACES, '--fork', '--kill-child', *pivot])}"
    parent = subprocess.Popen(
        ["setpriv", "--pdeathsig=KILL", "sh", "-ec", enter],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        if parent.stdout.readline() != "ready\n":
            raise RuntimeError((folder / "console").read_text())
        with closing(Kernel(Path(f"/proc/{pid}/root/dev/kmsg"))) as kernel:
            node = Node(pid, kernel)
            _wait(node)
            yield node
    finally:
        parent.kill()  # and with it, by --kill-child, the node's PID 1 and all below it
        parent.communicate()
        _remove(group)


def _wait(node: Node) -> None:
    deadline = time.monotonic() + BOOT_S
    while not (node.root / "run/systemd/private").exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"systemd does not come up in {BOOT_S:.0f} s")
        time.sleep(0.02)
    node.run("systemctl", "is-system-running", "--wait", patience=BOOT_S)


def _remove(group: Path) -> None:
    """The processes leave a group some moments after they are killed."""
    while "populated 1" in (group / "cgroup.events").read_text():
        time.sleep(0.01)
    for below, _, _ in os.walk(group, topdown=False):
        Path(below).rmdir()


def _remove_stale(unified: Path) -> None:
    """What a process that was killed left behind."""
    for group in unified.glob(f"{PREFIX}*"):
        pid, _, _ = group.name.removeprefix(PREFIX).partition("-")
        if not Path(f"/proc/{pid}").exists():
            _remove(group)
