"""One run of one scenario: machines, agents, a training job, a fault in its middle, and what the script measured."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

from . import fabric, limits, machine
from .fabric import NEIGHBOUR, PREFIX, Fabric
from .limits import Limit
from .scenarios import Scenario, Site, slower

HERE = Path(__file__).parent
FOLDERS = Path("/var/tmp")  # on a disk, where /tmp may be memory

# Seconds before, with and after the fault: 60 steps of history, the time in which it must be told, time to see it gone.
HEALTHY, FAULTY, AFTER = 12.0, 15.0, 10.0

# Four ranks on two cores: half the layers keep a step near 0.3 s, and the history near 40 steps.
LAYERS = {2: 4, 4: 2}

WARM = 5  # steps that are not measured: the first ones build DDP's buckets and fill the loader's queue
START_S = 60.0  # until the first step: importing torch takes seconds where every rank shares two cores
STOP_S = 30.0

FILES, FILE_BYTES = 16, 4 << 20  # what the ranks read past the page cache, a file a batch
STRANGER = "games"  # whose the neighbour's traffic is
PORT = "5301"

STEP_LINE = re.compile(r"step \d+ at ([\d.]+) took ([\d.]+) data ([\d.]+)")


class BedError(RuntimeError):
    """The bed itself did not work, whatever diagnosd would have said."""


class Step(NamedTuple):
    """A step by the script's own clock: its end in s since 1970, its length and its wait for data in s."""

    end: float
    took: float
    data: float


class Row(NamedTuple):
    """What a rank's script measured in one phase of the run: medians and the longest step, s."""

    phase: str
    host: str
    steps: int
    step: float
    longest: float
    data: float


@dataclass
class Run:
    """Times are the driver's own clock, s since 1970: when the fault was applied, when it was gone, the last step."""

    scenario: Scenario
    ranks: int
    onset: float | None = None
    cleared: float | None = None
    ended: float = 0.0
    exit_codes: list[int] = field(default_factory=list)
    live: str = ""  # what the agent that analyzes said while it ran
    rows: list[Row] = field(default_factory=list)
    lost: float | None = None  # s of all ranks together that steps took longer than before the fault

    @property
    def grew(self) -> float | None:
        """By how much of itself a step became longer, by the script's own clock; None where nothing changed midway."""
        before, during = ([row.step for row in self.rows if row.phase == phase] for phase in ("before", "during"))
        return statistics.mean(during) / statistics.mean(before) - 1 if before and during else None

    @property
    def job(self) -> str:
        return f"bed-{self.scenario.name}"


def missing(scenario: Scenario) -> str | None:
    """Why a scenario cannot be run on this machine; None where it can."""
    if os.geteuid():
        return "not root: network namespaces cannot be made"
    for tool in ("ip", "tc", "nft", "nsenter", "unshare", "setpriv"):
        if not shutil.which(tool):
            return f"no {tool} (Debian: apt-get install iproute2 nftables util-linux)"
    if not importlib.util.find_spec("torch"):
        return "no torch in this Python"
    if scenario.limit and (reason := limits.missing(scenario.limit[0], FOLDERS)):
        return reason
    try:
        with Fabric(1):
            return None
    except RuntimeError as error:
        return f"no network namespaces: {error}"


def remove_stale() -> None:
    """Remove what drivers left behind that were killed."""
    fabric.remove_stale()
    limits.remove_stale()
    for path in FOLDERS.glob(f"{PREFIX}*"):
        if fabric.stale(path.name):
            shutil.rmtree(path)


def stop_on_terminate() -> None:
    """Let SIGTERM unwind as Ctrl-C does, so that nothing is left behind."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))


@contextmanager
def folder(*, keep: bool) -> Iterator[Path]:
    """A folder that every account may enter; each of its parts belongs to who writes there."""
    path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=FOLDERS))
    path.chmod(0o755)
    owners = {"record": machine.AGENT, "sockets": machine.AGENT, "out": machine.TRAINER}
    for name in ("record", "sockets", "out", "control", "data", "logs"):
        (path / name).mkdir(mode=0o755)
        shutil.chown(path / name, owners.get(name, "root"))
    try:
        yield path
    finally:
        if keep:
            path = path.rename(path.with_name(f"diagnosd-{path.name}"))
            print(f"kept in {path}", file=sys.stderr)
        else:
            shutil.rmtree(path)


def steps(log: Path) -> list[Step]:
    found = STEP_LINE.findall(log.read_text(errors="replace")) if log.exists() else []
    return [Step(*map(float, numbers)) for numbers in found]


def wait_for(
    condition: Callable[[], bool], seconds: float, what: str, alive: Sequence[subprocess.Popen[bytes]]
) -> None:
    """BedError where the condition does not come true in time, or a process ends that should be running."""
    until = time.monotonic() + seconds
    while not condition():
        if ended := [process.returncode for process in alive if process.poll() is not None]:
            raise BedError(f"while waiting for {what} a process ended with {ended}")
        if time.monotonic() > until:
            raise BedError(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.02)


class Bed:
    """The machines of one run and the processes on them. Leaving undoes everything, the last thing first."""

    def __init__(self, scenario: Scenario, ranks: int, size: float | None, path: Path) -> None:
        self.scenario, self.path = scenario, path
        rates = (fabric.LINE_RATE, slower(size)) if scenario.slow_fabric else (fabric.LINE_RATE,)
        self.fabric = Fabric(ranks, rates)
        self.limit = Limit(*scenario.limit, path / "data") if scenario.limit else None
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.agents: list[subprocess.Popen[bytes]] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.fabric)
            if self.limit:
                stack.enter_context(self.limit)
            stack.callback(self._kill)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _kill(self) -> None:
        for process in (*self.ranks, *self.agents):
            process.kill()
            process.wait()

    def log(self, host: str) -> Path:
        return self.path / "logs" / f"rank-{host}"

    def socket(self, host: str) -> Path:
        return self.path / "sockets" / f"{host}.sock"

    def start_agents(self) -> None:
        first = ["--analyze"]
        if self.scenario.declared:
            declared = self.path / "cluster.toml"
            declared.write_text(self.scenario.declared)
            first += ["--cluster", str(declared)]
        for host in self.fabric.hosts:
            command = [sys.executable, "-m", "diagnosd", "agent", "--host", host, "--socket", str(self.socket(host))]
            command += ["--record", f"{self.path / 'record'}/", *(first if host == "n0" else ())]
            log = self.path / "logs" / f"agent-{host}"
            self.agents.append(machine.start(self.fabric.namespace(host), machine.AGENT, command, self.path, log, {}))
        wait_for(lambda: all(self.socket(host).exists() for host in self.fabric.hosts), 15, "the sockets", self.agents)

    def start_ranks(self) -> None:
        if self.scenario.reads:
            for number in range(FILES):
                (self.path / "data" / f"{number:03d}").write_bytes(os.urandom(FILE_BYTES))
            os.sync()
        for rank, host in enumerate(self.fabric.hosts):
            group = self.limit.groups.get(host) if self.limit else None
            where = (self.fabric.namespace(host), machine.TRAINER, self._training())
            self.ranks.append(machine.start(*where, self.path, self.log(host), self._environment(rank, host), group))

    def _training(self) -> list[str]:
        command = [sys.executable, str(HERE / "train.py"), "--layers", str(LAYERS[len(self.fabric.hosts)])]
        command += ["--control", str(self.path / "control"), "--out", str(self.path / "out")]
        return [*command, *(("--data", str(self.path / "data")) if self.scenario.reads else ()), *self.scenario.train]

    def _environment(self, rank: int, host: str) -> dict[str, str]:
        used = 1 if self.scenario.slow_fabric else 0
        env = {
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(len(self.fabric.hosts)),
            "MASTER_ADDR": self.fabric.address("n0", used),
            "MASTER_PORT": "29501",
            "GLOO_SOCKET_IFNAME": f"eth{used}",
            "OMP_NUM_THREADS": "1",  # as torchrun sets it
        }
        if self.agents:
            env["PYTHONPATH"] = str(machine.ROOT / "diagnosd" / "probe" / "path")
            env["DIAGNOSD_SOCKET"] = str(self.socket(host))
            env["DIAGNOSD_JOB"] = f"bed-{self.scenario.name}"
        return env

    @contextmanager
    def traffic(self, target: str) -> Iterator[None]:
        """Four streams of TCP from the neighbour into a host."""
        script = [sys.executable, str(HERE / "neighbour.py")]
        places = ((target, ["sink", PORT]), (NEIGHBOUR, ["send", self.fabric.address(target), PORT, "4"]))
        processes = []
        try:
            for host, words in places:
                where = (self.fabric.namespace(host), STRANGER, [*script, *words])
                processes.append(machine.start(*where, self.path, self.path / "logs" / words[0], {}))
            yield
        finally:
            for process in reversed(processes):
                machine.end(process, patience=1)

    def train(self, seconds: float) -> None:
        """Let the job go on, and notice when it does not."""
        until = time.monotonic() + seconds
        wait_for(lambda: time.monotonic() >= until, seconds + 1, "time to pass", self.ranks)

    def healthy_step(self) -> float:
        return statistics.median(step.took for step in steps(self.log("n0"))[WARM:])


def run(scenario: Scenario, ranks: int, size: float | None, path: Path, *, bare: bool) -> Run:
    done = Run(scenario, ranks)
    with Bed(scenario, ranks, size, path) as bed:
        try:
            if not bare:
                bed.start_agents()
            bed.start_ranks()
            wait_for(lambda: bool(steps(bed.log("n0"))), START_S, "the first step", bed.ranks)
            phases(bed, done, size)
            (path / "control" / "stop").touch()
            done.exit_codes = [process.wait(STOP_S) for process in bed.ranks]
        except (BedError, subprocess.TimeoutExpired) as error:
            raise BedError(f"{error}\n{tails(path / 'logs')}") from None
        for agent in bed.agents:
            machine.end(agent, patience=10)
        if bed.agents:
            done.live = (path / "logs" / "agent-n0").read_text(errors="replace")
    of_hosts = {host: steps(bed.log(host)) for host in bed.fabric.hosts}
    done.ended = max(steps[-1].end for steps in of_hosts.values())
    done.rows = measured(done, of_hosts)
    done.lost = lost(done, of_hosts)
    return done


def phases(bed: Bed, done: Run, size: float | None) -> None:
    if bed.scenario.slow_fabric:
        first = steps(bed.log("n0"))[0]
        done.onset = first.end - first.took
        bed.train(HEALTHY + FAULTY)
    elif bed.scenario.fault is None:
        bed.train(HEALTHY + FAULTY + AFTER)
    else:
        bed.train(HEALTHY)
        site = Site(bed.fabric, bed.path / "control", bed.limit, bed.healthy_step(), bed.traffic)
        done.onset = time.time()
        with bed.scenario.fault(site, size):
            bed.train(FAULTY)
        done.cleared = time.time()
        bed.train(AFTER)


def measured(done: Run, of_hosts: dict[str, list[Step]]) -> list[Row]:
    """Step times by phase, without the first steps and those in which a phase changed."""
    onset, cleared = done.onset or float("inf"), done.cleared or float("inf")
    rows = []
    for phase, begin, end in (("before", 0.0, onset), ("during", onset, cleared), ("after", cleared, float("inf"))):
        for host, of_host in of_hosts.items():
            inside = [step for step in of_host[WARM:] if begin <= step.end - step.took and step.end < end]
            if inside:
                took, data = [step.took for step in inside], [step.data for step in inside]
                medians = statistics.median(took), max(took), statistics.median(data)
                rows.append(Row(phase, host, len(inside), *medians))
    return rows


def lost(done: Run, of_hosts: dict[str, list[Step]]) -> float | None:
    """What the fault cost by the script's own clock; None where there was no fault, or nothing before it."""
    if done.onset is None or done.cleared is None:
        return None
    seconds = 0.0
    for of_host in of_hosts.values():
        before = statistics.median(step.took for step in of_host[WARM:] if step.end < done.onset)
        during = [step.took for step in of_host if done.onset < step.end <= done.cleared + step.took]
        seconds += sum(during) - before * len(during)
    return seconds


def tails(logs: Path) -> str:
    """The last lines that every process of a failed run wrote."""
    last = {log.name: log.read_text(errors="replace").splitlines()[-8:] for log in sorted(logs.iterdir())}
    return "\n".join(f"--- {name}\n" + "\n".join(lines) for name, lines in last.items())
