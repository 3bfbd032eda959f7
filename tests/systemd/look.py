"""What a process may do here: tries one act after the other, and prints as JSON what stood in the way of each.

Started as a unit of systemd, with other lines each time. An act that was let through, or that only a driver refused
that is not there, has nothing in its way.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import platform
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

CLONE_NEWUSER = 0x10000000
ADDR_NO_RANDOMIZE = 0x0040000
PIDFD_GETFD = 438
SIOCETHTOOL = 0x8946
LIBC = ctypes.CDLL(None, use_errno=True)


def called(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def opened(path: str) -> None:
    try:
        os.close(os.open(path, os.O_RDWR))
    except OSError as error:
        if error.errno != errno.ENXIO:  # it may be opened, but there is no driver
            raise


def written(path: str) -> None:
    Path(path).touch()
    Path(path).unlink()


def own_privileges() -> None:
    """What a program with the setuid bit gives, and a capability that could ever be had."""
    status = dict(line.split(":\t") for line in Path("/proc/self/status").read_text().splitlines())
    assert status["NoNewPrivs"] == "0", "no new privileges"


def own_capabilities() -> None:
    status = dict(line.split(":\t") for line in Path("/proc/self/status").read_text().splitlines())
    assert int(status["CapBnd"], 16), "no capability is in the bounding set"


def writable_groups() -> None:
    assert not os.statvfs("/sys/fs/cgroup").f_flag & os.ST_RDONLY, "mounted read-only"


def sends() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(b"", ("127.0.0.1", 9))


def asks_an_interface() -> None:
    """An ioctl of ethtool, GDRVINFO of the loopback, which has no driver to tell of."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = ctypes.create_string_buffer(struct.pack("I", 3), 196)
        request = struct.pack("16sP", b"lo", ctypes.addressof(answer))
        try:
            fcntl.ioctl(sock, SIOCETHTOOL, request)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise


def setuid_file() -> None:
    path = Path(os.environ["STATE_DIRECTORY"]) / f"setuid-{os.getpid()}"
    path.touch()
    try:
        path.chmod(0o700 | stat.S_ISUID)
    finally:
        path.unlink()


def other_architecture() -> None:
    """Asks for its pid as a program of 32 bits would: mov $20, %eax; int $0x80. The process may be shot for it."""
    if platform.machine() != "x86_64":
        return
    code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")
    pid = os.fork()
    if not pid:
        ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, "shot"


def clock_state() -> None:
    called(LIBC.adjtimex(ctypes.create_string_buffer(208)))


def kernel_log() -> None:
    done = subprocess.run(["journalctl", "-k", "-o", "cat"], capture_output=True, text=True, check=True)
    assert "NVRM: Xid" in done.stdout, done.stderr.strip() or "not in the journal"


def of_other_users() -> None:
    """A process of root: its name, its time, its control group."""
    for name in ("comm", "stat", "cgroup"):
        assert Path("/proc/1", name).read_text()


def other_users() -> None:
    assert Path("/srv/of-daemon").owner() == "daemon", "somebody else's"


def fill_of_disks() -> None:
    for path in ("/", "/tmp", "/dev/shm", "/root", "/home"):
        os.statvfs(path)
    assert Path("/home").stat().st_dev == Path("/").stat().st_dev, "another disk than in the node"


def interfaces() -> None:
    assert "eth0" in [name for _, name in socket.if_nameindex()], "no eth0"


ACTS: dict[str, Callable[[], object]] = {
    "has its privileges": own_privileges,
    "has its capabilities": own_capabilities,
    "writes into /tmp": lambda: written("/tmp/looked"),
    "writes into /dev/shm": lambda: written("/dev/shm/looked"),
    "writes into its state folder": lambda: written(os.environ["STATE_DIRECTORY"] + "/looked"),
    "opens /dev/infiniband/umad0": lambda: opened("/dev/infiniband/umad0"),
    "opens /dev/nvidiactl": lambda: opened("/dev/nvidiactl"),
    "opens /dev/nvidia0": lambda: opened("/dev/nvidia0"),
    "sends": sends,
    "has an address of IPv6": lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).close(),
    "reads the kernel's symbols": lambda: Path("/proc/kallsyms").open().close(),
    "lists the kernel's modules": lambda: list(Path("/usr/lib/modules").iterdir()),
    "opens /dev/kmsg": lambda: os.close(os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)),
    "may write to control groups": writable_groups,
    "makes a namespace": lambda: called(LIBC.unshare(CLONE_NEWUSER)),
    "makes a setuid file": setuid_file,
    "changes its personality": lambda: called(LIBC.personality(ADDR_NO_RANDOMIZE)),
    "calls as another architecture": other_architecture,
    "takes a descriptor of a process": lambda: called(LIBC.syscall(PIDFD_GETFD, os.pidfd_open(os.getpid()), 0, 0)),
    "reads the kernel log": kernel_log,
    "reads the clock's state": clock_state,
    "reads of other users' processes": of_other_users,
    "reads the network's counters": lambda: Path("/proc/net/dev").read_text(),
    "reads an HCA's counters": lambda: Path("/sys/class/infiniband/mlx5_0/ports/1/counters/port_xmit_data").read_text(),
    "knows other users": other_users,
    "asks how full a disk is": fill_of_disks,
    "asks an interface": asks_an_interface,
    "lists interfaces": interfaces,
}


def stood_in_the_way(act: Callable[[], object]) -> str:
    try:
        act()
    except (OSError, AssertionError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    # The namespace last: it is made for good, and who we are in it is another.
    acts = sorted(ACTS, key=lambda name: name == "makes a namespace")
    json.dump({name: stood_in_the_way(ACTS[name]) for name in acts}, sys.stdout)
