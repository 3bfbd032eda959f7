"""The unit that operators install: what systemd says of it, and what it does on a node where systemd is PID 1."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from diagnosd.point import Point
from diagnosd.recording import RecordingError, read
from hca import hcas
from nvml.machine import Gpus

from .boot import HOST, ROOT, Node, booted, missing

UNITS = ROOT / "systemd"
UNIT = UNITS / "diagnosd-agent.service"
AGENT = "diagnosd-agent"
THERE = Path("/etc/systemd/system")
STOP_S = 5.0  # within which the agent ends
QUICK = {"RestartSec": "0.1", "TimeoutStopSec": "4"}  # in these tests, in a drop-in, for less waiting
PATIENCE_S = 15.0
IN_OPEN, INOTIFY_EVENT = 0x20, struct.Struct("iIII")  # inotify(7): watch, mask, cookie, length of the name

CALLS = "SystemCallFilter=@system-service{}\nSystemCallErrorNumber=EPERM"
# Each line that closes something, and what it keeps the unit's user from, which that user could do without it.
CLOSED = {
    "NoNewPrivileges=yes": "has its privileges",
    "CapabilityBoundingSet=": "has its capabilities",
    "ProtectSystem=strict": "writes into /tmp",
    "ReadOnlyPaths=/dev": "writes into /dev/shm",
    "DevicePolicy=closed": "opens /dev/infiniband/umad0",
    "IPAddressDeny=any": "sends",
    "RestrictAddressFamilies=AF_UNIX AF_INET AF_NETLINK": "has an address of IPv6",
    "ProtectKernelTunables=yes": "reads the kernel's symbols",
    "ProtectKernelModules=yes": "lists the kernel's modules",
    "ProtectKernelLogs=yes": "opens /dev/kmsg",
    "ProtectControlGroups=yes": "may write to control groups",
    "RestrictNamespaces=yes": "makes a namespace",
    "RestrictSUIDSGID=yes": "makes a setuid file",
    "LockPersonality=yes": "changes its personality",
    "SystemCallArchitectures=native": "calls as another architecture",
    CALLS.format(" adjtimex clock_adjtime"): "takes a descriptor of a process",
}
OPEN = (
    "writes into its state folder",
    "opens /dev/nvidiactl",
    "opens /dev/nvidia0",
    "reads the kernel log",
    "reads the clock's state",
    "reads of other users' processes",
    "knows other users",
    "reads the network's counters",
    "reads an HCA's counters",
    "asks how full a disk is",
    "asks an interface",
    "lists interfaces",
)
# What would hide a thing that the agent reads, and so is not in the unit.
HIDING = {
    "PrivateDevices=yes": "opens /dev/nvidiactl",  # A108
    "DevicePolicy=closed": "opens /dev/nvidiactl",
    "PrivateNetwork=yes": "lists interfaces",
    "PrivateUsers=yes": "knows other users",
    f"ProtectHome=tmpfs\nBindReadOnlyPaths={sys.base_prefix} {sys.prefix} {ROOT}": "asks how full a disk is",
    "ProcSubset=pid": "reads the network's counters",
    "ProtectProc=invisible": "reads of other users' processes",
    CALLS.format(""): "reads the clock's state",
    "Group=nogroup\nSupplementaryGroups=": "reads the kernel log",
    "RestrictAddressFamilies=AF_UNIX": "asks an interface",
}


def lines(unit: Path) -> list[str]:
    return [line for line in unit.read_text().splitlines() if line and not line.startswith("#")]


def analyzed(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What systemd-analyze says of the unit, on a machine where it is installed where we are."""
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed here")
    here = tmp_path / UNIT.name
    here.write_text(UNIT.read_text().replace("/opt/diagnosd/", f"{sys.prefix}/"))
    return subprocess.run(["systemd-analyze", *arguments, here], capture_output=True, text=True, check=False)


def test_systemd_knows_every_word_of_the_unit(tmp_path: Path) -> None:
    done = analyzed(tmp_path, "verify")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")  # for a key that it does not know it only warns


def test_the_unit_is_exposed_little(tmp_path: Path) -> None:
    done = analyzed(tmp_path, "security", "--offline=true", "--threshold=30")
    assert done.returncode == 0, done.stdout


def waited(seen: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not seen():
        assert time.monotonic() < deadline, f"{what} in {PATIENCE_S:.0f} s"
        time.sleep(0.05)


def with_gpus(node: Node, *kinds: str) -> None:
    """A driver's library where the node's own would be; what it answers stands in a file that the agent is told of."""
    (node.root / "srv/gpus").mkdir()
    gpus = Gpus(node.root / "srv/gpus", *kinds)
    node.run("mv", "/srv/gpus/" + gpus.library.name, "/usr/lib/")
    QUICK["Environment"] = "NVML_STATE=/srv/gpus/state"


def with_hcas(node: Node) -> None:
    """Two HCAs in the node's /sys, beside what is really there."""
    hcas(node.root / "srv/hcas", 2)
    node.run(
        "sh",
        "-ec",
        "mkdir /srv/sys; mount -t overlay overlay -o lowerdir=/srv/hcas:/sys /srv/sys;"
        "mount --rbind /sys/fs/cgroup /srv/sys/fs/cgroup; mount --rbind /srv/sys /sys",
    )


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Installed as the README says; the folder of the virtual environment is a link to ours."""
    if reason := missing():
        pytest.skip(reason)
    with booted(tmp_path_factory.mktemp("node")) as node:
        with_hcas(node)
        with_gpus(node, "H100", "H100")
        (node.root / "opt/diagnosd").symlink_to(sys.prefix)
        (node.root / "usr/lib/modules").mkdir(exist_ok=True)
        node.run("mkdir", "/dev/infiniband")
        for name, major, minor in (("infiniband/umad0", 231, 0), ("nvidiactl", 195, 255), ("nvidia0", 195, 0)):
            node.run("mknod", "-m", "666", f"/dev/{name}", "c", str(major), str(minor))
        node.run("install", "-m", "644", "-o", "daemon", "/dev/null", "/srv/of-daemon")
        node.run("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
        node.kernel.say("NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.", 3)
        node.run("install", "-Dm644", str(UNIT), "-t", str(THERE))
        node.run("install", "-Dm644", str(UNITS / "sysusers.d/diagnosd.conf"), "-t", "/etc/sysusers.d")
        quick = node.root / f"etc/systemd/system/{AGENT}.service.d/quick.conf"
        quick.parent.mkdir()
        quick.write_text("\n".join(["[Service]", *(f"{name}={value}" for name, value in QUICK.items())]))
        node.run("systemd-sysusers")
        node.run("systemctl", "enable", "--no-reload", AGENT)
        yield node


def acts_under(node: Node, variants: dict[str, str]) -> dict[str, dict[str, str]]:
    """What stands in the way of each act in look.py, in units whose [Service] is given; all of them at once."""
    for name, service in variants.items():
        text = f"[Service]\nType=oneshot\n{service}\nStandardOutput=file:/run/{name}.json\n"
        text += f"ExecStart=/opt/diagnosd/bin/python -I {Path(__file__).with_name('look.py')}\n"
        (node.root / f"run/systemd/system/{name}.service").write_text(text)
    try:
        node.run("systemctl", "start", *variants)
    except RuntimeError as error:
        raise RuntimeError(node.run("journalctl", "-n", "60", "-o", "cat")) from error
    return {name: json.loads((node.root / f"run/{name}.json").read_text()) for name in variants}


@pytest.fixture(scope="module")
def acts(node: Node) -> dict[str, dict[str, str]]:
    """What stands in the way of each act: under the whole unit, the account alone, and the account with one line."""
    own = lines(UNIT)
    service = own[own.index("[Service]") + 1 : own.index("[Install]")]
    whole = [line for line in service if not line.startswith(("Type=", "ExecStart=", "Restart"))]
    alone = "User=diagnosd\nSupplementaryGroups=systemd-journal\nStateDirectory=diagnosd"
    named = {line: f"look-{number}" for number, line in enumerate({**CLOSED, **HIDING})}
    made = acts_under(
        node,
        {"look-whole": "\n".join(whole), "look-alone": alone}
        | {name: f"{alone}\n{line}" for line, name in named.items()},
    )
    return {"whole": made["look-whole"], "alone": made["look-alone"]} | {line: made[named[line]] for line in named}


def test_every_line_that_closes_something_is_tried_here() -> None:
    words = (
        r"(Protect|Private|Restrict(?!=|Prevent)|ReadOnly|NoNew|Capab|Lock|SystemCall|DeviceP|IPAddr|Memory(Deny))\w*="
    )
    closing = [line for line in lines(UNIT) if re.match(words, line)]
    assert sorted(closing) == sorted(line for each in CLOSED for line in each.splitlines())


@pytest.mark.parametrize(("line", "act"), CLOSED.items())
def test_a_line_closes_what_was_open(acts: dict[str, dict[str, str]], line: str, act: str) -> None:
    assert acts["alone"][act] == ""
    assert acts[line][act] != ""
    assert acts["whole"][act] != ""


@pytest.mark.parametrize("act", OPEN)
def test_within_the_sandbox_the_agent_may_read_what_it_is_for(acts: dict[str, dict[str, str]], act: str) -> None:
    assert acts["whole"][act] == ""


@pytest.mark.parametrize(("line", "act"), HIDING.items(), ids=[line.partition("\n")[0] for line in HIDING])
def test_what_is_not_in_the_unit_would_hide_something(acts: dict[str, dict[str, str]], line: str, act: str) -> None:
    assert acts[line][act] != ""


class Running:
    """The agent of the node while it runs."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.began_ns = time.time_ns()

    def shown(self, name: str) -> str:
        return self.node.run("systemctl", "show", "--value", "--property", name, AGENT).strip()

    def pids(self) -> dict[int, str]:
        """Its processes, as we count them, and their command lines."""
        group = self.node.root / f"sys/fs/cgroup/system.slice/{AGENT}.service/cgroup.procs"
        pids = map(int, group.read_text().split()) if group.exists() else ()
        return {pid: Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in pids}

    def readers(self) -> set[int]:
        """Of its children, those that read the devices."""
        return {pid for pid, line in self.pids().items() if "diagnosd" in line and "diagnosd agent" not in line}

    def reader(self) -> int:
        waited(lambda: bool(self.readers()), "no reader was started")
        return self.readers().pop()

    def main(self) -> int:
        return next(pid for pid, line in self.pids().items() if "diagnosd agent" in line)

    def answers(self) -> bool:
        """Whether a rank of another user gets through to it."""
        rank = "import socket, sys; socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(sys.argv[1])"
        python = ["/opt/diagnosd/bin/python", "-Ic", rank, "/run/diagnosd/probe.sock"]
        become = ["setpriv", "--reuid=daemon", "--regid=daemon", "--clear-groups"]
        return not subprocess.run(self.node.within(*become, *python), capture_output=True, check=False).returncode

    def recorded(self, measurement: str) -> list[Point]:
        """Waits until there are points of it since we began; all that are there by then."""
        found: list[Point] = []

        def look() -> bool:
            with read(self.node.root / "var/lib/diagnosd") as reading:
                points = [point for batch in reading for point in batch]
            new = [each for each in points if each.series.measurement == measurement and each.time >= self.began_ns]
            found[:] = new
            return bool(new)

        def seen() -> bool:
            try:
                return look()
            except RecordingError:
                return False

        waited(seen, f"no {measurement} was recorded")
        return found


@pytest.fixture
def agent(node: Node) -> Iterator[Running]:
    running = Running(node)
    node.run("systemctl", "start", AGENT)
    waited(running.answers, "the agent does not answer")
    yield running
    node.run("systemctl", "stop", AGENT)


def test_it_runs_as_a_user_of_its_own_that_may_read_the_journal(agent: Running) -> None:
    status = dict(line.split(":\t") for line in Path(f"/proc/{agent.main()}/status").read_text().splitlines())
    user, journal = (int(agent.node.run("id", "-u", "diagnosd")), agent.node.run("getent", "group", "systemd-journal"))
    assert set(status["Uid"].split()) == {str(user)}
    assert journal.split(":")[2] in status["Groups"].split()
    assert Path(f"/proc/{agent.main()}/oom_score_adj").read_text() == "500\n"


def test_it_records_its_node_into_its_state_folder(agent: Running) -> None:
    assert {dict(each.series.tags)["host"] for each in agent.recorded("cpu")} == {HOST}
    assert "synced" in agent.recorded("diagnosd_clock")[0].fields
    assert agent.recorded("diagnosd_node")


def test_it_records_its_gpus(agent: Running) -> None:
    assert len({dict(each.series.tags)["uuid"] for each in agent.recorded("nvidia_smi")}) == 2


def test_it_records_what_the_kernel_says_as_the_journal_has_it(agent: Running) -> None:
    agent.node.kernel.say("NVRM: Xid (PCI:0000:18:00): 79, pid=4711, GPU has fallen off the bus.", 3)
    events = agent.recorded("diagnosd_event")
    assert [each.fields.get("code") for each in events] == [79]


def test_its_reader_reads_the_counters_of_hcas_and_opens_none_of_their_devices(node: Node) -> None:  # A110
    devices = node.root / "dev/infiniband"
    (devices / "uverbs0").touch(0o666)  # no device, so that the unit's rules for devices do not hide that it is opened
    with opened_in(devices) as names:
        node.run("systemctl", "start", AGENT)
        agent = Running(node)
        assert {dict(each.series.tags)["device"] for each in agent.recorded("infiniband")} == {"mlx5_0", "mlx5_1"}
        assert names() == set()
        (devices / "uverbs0").read_bytes()
        assert names() == {"uverbs0"}


@contextmanager
def opened_in(folder: Path) -> Iterator[Callable[[], set[str]]]:
    """The names of what anybody opened in a folder since the last call, by inotify(7)."""
    libc = ctypes.CDLL(None)
    watch = libc.inotify_init1(os.O_NONBLOCK)
    libc.inotify_add_watch(watch, os.fsencode(folder), IN_OPEN)

    def names() -> set[str]:
        try:
            events = os.read(watch, 65536)
        except BlockingIOError:
            return set()
        found, at = set(), 0
        while at < len(events):
            *_, length = INOTIFY_EVENT.unpack_from(events, at)
            found.add(events[at + INOTIFY_EVENT.size :][:length].rstrip(b"\0").decode())
            at += INOTIFY_EVENT.size + length
        return found

    try:
        yield names
    finally:
        os.close(watch)


def test_its_state_folder_is_closed_to_other_users(agent: Running) -> None:
    assert agent.node.run("stat", "-c", "%U %a", "/var/lib/diagnosd") == "diagnosd 750\n"


def test_it_is_installed_and_started_without_a_reload_of_systemd(agent: Running) -> None:  # A30
    def said() -> str:
        return agent.node.run("journalctl", "_PID=1", "-o", "cat")

    before, started, _ = said().partition("Started diagnosd-agent")
    assert started
    assert "Reloading" not in before
    agent.node.run("systemctl", "daemon-reload")
    assert "Reloading" in said()


def test_after_a_crash_it_is_back_and_ranks_find_it_at_the_same_place(agent: Running) -> None:
    folder = (agent.node.root / "run/diagnosd").stat().st_ino
    reader = agent.reader()
    os.kill(agent.main(), signal.SIGKILL)
    waited(lambda: agent.shown("NRestarts") == "1" and agent.answers(), "it is not back")
    assert (agent.node.root / "run/diagnosd").stat().st_ino == folder
    waited(lambda: bool(agent.readers() - {reader}), "no other reader was started")


@contextmanager
def drop_in(node: Node, *service: str) -> Iterator[None]:
    """Lines of an operator's own, while the agent does not run."""
    node.run("systemctl", "stop", AGENT)
    site = node.root / f"etc/systemd/system/{AGENT}.service.d/site.conf"
    site.write_text("\n".join(["[Service]", *service]))
    try:
        node.run("systemctl", "daemon-reload")
        yield
    finally:
        node.run("systemctl", "stop", AGENT)
        site.unlink()
        node.run("systemctl", "daemon-reload")


def test_a_drop_in_says_where_it_is_installed_and_where_it_records(agent: Running) -> None:
    node = agent.node
    node.run("install", "-d", "-o", "diagnosd", "/srv/telemetry")
    command = f"{sys.prefix}/bin/diagnosd agent --record /srv/telemetry/"
    with drop_in(node, "ExecStart=", f"ExecStart={command}", "ReadWritePaths=/srv/telemetry"):
        node.run("systemctl", "start", AGENT)
        waited((node.root / f"srv/telemetry/{HOST}.lp.zst").exists, "nothing was recorded there")


def test_wrong_arguments_are_not_tried_again(agent: Running) -> None:
    with drop_in(agent.node, "ExecStart=", "ExecStart=/opt/diagnosd/bin/diagnosd agent --nonsense"):
        agent.node.run("systemctl", "start", AGENT)
        waited(lambda: agent.shown("ActiveState") == "failed", "it did not fail")
        assert (agent.shown("NRestarts"), agent.shown("ExecMainStatus")) == ("0", "2")


def test_a_stop_takes_no_longer_than_the_agent_needs_though_its_reader_is_stopped(agent: Running) -> None:  # A107
    os.kill(agent.reader(), signal.SIGSTOP)
    began = time.monotonic()
    agent.node.run("systemctl", "stop", AGENT)
    assert time.monotonic() - began < STOP_S + 0.5
    assert (agent.shown("Result"), agent.pids()) == ("success", {})


@pytest.fixture
def frozen() -> Iterator[Callable[[int], None]]:
    """Puts a process into a state in which no signal ends it, as one that waits for a driver has."""
    groups = Path("/sys/fs/cgroup/freezer")
    if not (groups / "cgroup.procs").exists():
        pytest.skip("no freezer of control groups, version 1, in which a process cannot be killed")
    group = groups / f"dgsystemd{os.getpid()}"
    group.mkdir()

    def freeze(pid: int) -> None:
        (group / "cgroup.procs").write_text(str(pid))
        (group / "freezer.state").write_text("FROZEN")

    yield freeze
    (group / "freezer.state").write_text("THAWED")
    waited(lambda: not (group / "cgroup.procs").read_text(), "what was frozen does not end")
    group.rmdir()


def test_a_reader_that_cannot_be_killed_is_left_behind_and_the_agent_starts_again(
    agent: Running, frozen: Callable[[int], None]
) -> None:  # A107
    stuck = agent.reader()
    frozen(stuck)
    began = time.monotonic()
    agent.node.run("systemctl", "stop", AGENT)
    assert time.monotonic() - began < STOP_S + float(QUICK["TimeoutStopSec"]) + 0.5
    assert set(agent.pids()) == {stuck}
    agent.node.run("systemctl", "start", AGENT)
    waited(agent.answers, "the agent does not answer")
    waited(lambda: agent.readers() > {stuck}, "no other reader was started")
