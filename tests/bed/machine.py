"""A process on one of the bed's machines, under an account of its own.

Agents run as nobody and ranks as daemon, two unprivileged users that every Linux has, so that an agent reads of a rank
what it may read of anybody's process. Nothing of the driver's environment reaches them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from pwd import getpwnam
from shlex import join, quote

AGENT, TRAINER = "nobody", "daemon"
ROOT = Path(__file__).resolve().parents[2]


def start(
    namespace: str,
    account: str,
    command: Sequence[str],
    home: Path,
    log: Path,
    env: Mapping[str, str],
    group: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Run a command in a network namespace and a control group; it dies with the driver. Its output goes to `log`."""
    who = getpwnam(account)
    become = [
        "setpriv",
        f"--reuid={who.pw_uid}",
        f"--regid={who.pw_gid}",
        "--clear-groups",
        "--no-new-privs",
        "--pdeathsig=KILL",
    ]
    enter = [f"echo $$ > {quote(str(group / 'cgroup.procs'))}"] if group else []
    script = "\n".join(
        ["set -e", *enter, *own_sys(home / "stage"), *open_homes(home / "stage"), f"exec {join([*become, *command])}"]
    )
    plain = {"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": str(home), "TMPDIR": "/tmp", "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as out:
        return subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{namespace}", "unshare", "--mount", "sh", "-c", script],
            env={**plain, **env},
            cwd=home,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )


def own_sys(stage: Path) -> list[str]:
    """Shell commands for a /sys with the namespace's own interfaces; `ip netns exec` loses the control groups there."""
    kept = quote(str(stage / "cgroup"))
    return [
        f"mkdir -p {kept}",
        f"mount --rbind /sys/fs/cgroup {kept}",
        "mount -t sysfs sysfs /sys",
        f"mount --rbind {kept} /sys/fs/cgroup",
    ]


def open_homes(stage: Path) -> list[str]:
    """Shell commands that let anybody read Python and the tree where they lie below a closed folder (/root).

    Every process has a mount namespace of its own: in it an empty open folder is laid over the closed one, with what is
    needed bound back to its place. The machine's own /root is not touched.
    """
    closed: dict[Path, list[Path]] = {}
    for path in sorted({Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), ROOT}):
        shut = [parent for parent in reversed(path.parents) if not parent.stat().st_mode & 0o001]
        if shut:
            closed.setdefault(shut[0], []).append(path)
    commands = []
    for folder, paths in closed.items():
        places = [(quote(str(stage / f"{i}{path.name}")), quote(str(path))) for i, path in enumerate(paths)]
        commands += [f"mkdir -p {kept}; mount --bind {path} {kept}" for kept, path in places]
        commands += [f"mount -t tmpfs -o mode=0755 open {quote(str(folder))}"]
        commands += [f"mkdir -p {path}; mount --bind {kept} {path}" for kept, path in places]
    return commands


def end(process: subprocess.Popen[bytes], patience: float) -> int:
    """Ask a process to end, and after `patience` seconds make it. Returns its exit code."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
