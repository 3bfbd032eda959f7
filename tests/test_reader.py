"""The devices' reader: what it prints, and what the agent does when one of them, or all of it, does not answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pytest

from diagnosd import child
from diagnosd.child import Patience
from diagnosd.devices import MOST_BYTES, Devices
from diagnosd.pace import Batch, Paced
from diagnosd.point import Point, decode
from diagnosd.reader import DUTY, Reader
from hca import hcas
from nvml.machine import Gpus

ROOT = Path(__file__).parents[1]
DIAGNOSD = [sys.executable, "-m", "diagnosd"]
PATIENCE_S = 10.0
BRIEF = Patience(tick=0.05, most=0.3, kill=30.0, back=0.2, back_longest=60.0, again=0.05, again_longest=0.2)

# Two devices, a and b. What a read of each does stands in a file of its name.
ODD = """
import ctypes, os, signal, sys, time
from pathlib import Path
from diagnosd.point import point
from diagnosd.reader import serve

folder = Path(sys.argv[1])

class Odd:
    every, errors = 0, 0

    def __init__(self, name):
        self.name = name

    def read(self, now_ns):
        sent = 1
        exec((folder / self.name).read_text())
        return [point("net", {"host": "n01", "interface": self.name}, {"bytes_sent": sent}, now_ns)]

    def close(self):
        (folder / f"closed {self.name}").touch()

def devices():
    (folder / "pids").open("a").write(f"{os.getpid()}\\n")
    without = [name for word, name in zip(sys.argv, sys.argv[1:]) if word == "--without"]
    return [Odd(name) for name in ("a", "b") if name not in without]

serve("n01", devices, on_request=True, yielding=[folder / "yield"])
"""
HANGS = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"  # what a device holds, no signal ends


class Node:
    """Odd devices, what came of them, and the processes that read them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.points: list[Point] = []
        self.bytes = 0
        (folder / "odd.py").write_text(ODD)
        self.does(a="pass", b="pass")

    def does(self, **what: str) -> None:
        for name, text in what.items():
            (self.folder / f"{name}.new").write_text(text)
            (self.folder / f"{name}.new").replace(self.folder / name)

    @property
    def argv(self) -> list[str]:
        return [sys.executable, str(self.folder / "odd.py"), str(self.folder)]

    def put(self, batch: Batch) -> None:
        self.points += batch.points
        self.bytes += len(batch.lines)

    def sent(self, name: str) -> int:
        return sum(each.series.tag("interface") == name for each in self.points)

    def events(self) -> list[str]:
        found = [each for each in self.points if each.series.measurement == "diagnosd_event"]
        assert {each.series.tag("kind") for each in found} <= {"telemetry_gap"}
        return [str(each.fields["text"]) for each in found]

    def pids(self) -> list[int]:
        """Of every process that has read, in the order of their start."""
        file = self.folder / "pids"
        return [int(line) for line in file.read_text().splitlines()] if file.exists() else []

    def alive(self) -> list[int]:
        return [pid for pid in dict.fromkeys(self.pids()) if lives(pid)]


def lives(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    return False


def until(true: Callable[[], object], patience: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    for pid in node.alive():
        os.kill(pid, signal.SIGKILL)


class Agents(Devices):
    """As the agent has it, with the agent's end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
        self.join(PATIENCE_S)
        assert not self._thread.is_alive()


def reading(node: Node, patience: Patience = BRIEF) -> Agents:
    return Agents("n01", node.argv, child.environment(node.folder / "probe.sock"), node.put, patience)


def asked(argv: Sequence[str | Path], rounds: int = 1, **more: Any) -> list[str]:
    """What a child prints for so many requests."""
    environ = {**child.environment(Path("/nowhere/probe.sock")), **more.pop("env", {})}
    with subprocess.Popen(
        [*map(str, argv)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ, **more
    ) as process:
        assert process.stdin
        assert process.stdout
        lines = []
        for _ in range(rounds):
            process.stdin.write("\n")
            process.stdin.flush()
            for line in process.stdout:
                lines.append(line.rstrip("\n"))
                if line == "# done\n":
                    break
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0
    return lines


def test_each_read_is_announced_with_what_it_may_take_and_the_end_of_a_round_is_said(node: Node) -> None:
    node.does(a="self.deadline = 0.25")
    lines = [line for line in asked(node.argv, rounds=2) if not line.startswith(("net", "diagnosd_agent"))]
    first = ["# begin a 20000", "# end a", "# begin b 20000", "# end b", "# done"]
    assert lines == [*first, "# begin a 250", "# end a", "# begin b 1500", "# end b", "# done"]


def test_what_a_library_prints_on_stdout_is_not_among_the_points(node: Node, tmp_path: Path) -> None:
    (tmp_path / "chatty.c").write_text(
        '#include <stdio.h>\n__attribute__((constructor)) static void hello(void) { puts("hello"); fflush(stdout); }\n'
    )
    library = tmp_path / "chatty.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "chatty.c"], check=True)
    node.does(a=f"ctypes.CDLL({str(library)!r}); ctypes.CDLL(None).puts(b'buffered'); print('too'); os.write(1, b'x')")
    for line in asked(node.argv):
        assert line.startswith("# ") or decode(line)


def test_one_device_that_cannot_be_read_costs_the_others_nothing_and_is_counted() -> None:  # A02
    class Broken(Plain):
        def read(self, now_ns: int) -> list[Point]:
            raise OSError(5, "Input/output error")

    said: list[bytes] = []
    reader = Reader("n01", lambda: [Broken("a"), Plain("b")], said.append)
    reader.round()
    reader._self_due = 0.0
    reader.round()
    lines = [decode(line) for line in b"".join(said).splitlines() if not line.startswith(b"#")]
    assert [each.series.tag("interface") for each in lines if each.series.measurement == "net"] == ["b", "b"]
    beats = {each.series.tag("collector"): each.fields for each in lines if each.series.measurement != "net"}
    assert (beats["a"]["up"], beats["a"]["errors"], beats["b"]["up"], beats["b"]["errors"]) == (0, 1, 1, 0)
    assert set(beats["reader"]) == {"up", "cpu_seconds", "rss"}


class Plain:
    every, errors = 0, 0

    def __init__(self, name: str) -> None:
        self.name = name
        self.takes = 0.0

    def read(self, now_ns: int) -> list[Point]:
        time.sleep(self.takes)
        return [decode(f"net,host=n01,interface={self.name} bytes_sent=1i {now_ns}")]


@pytest.mark.parametrize(("takes", "apart"), [(0.004, 0), (0.1, 2), (0.2, 4)])
def test_a_device_is_busy_with_us_for_a_twentieth_of_the_time_at_most(takes: float, apart: int) -> None:  # A29
    slow = Plain("nvml")
    slow.takes = takes
    reads = Paced(slow, DUTY)
    for _ in range(2):
        reads.read(time.time_ns())
    assert apart <= reads.every <= apart + 1
    assert takes / max(reads.every, 1) <= DUTY


def test_a_reader_whose_stdout_is_closed_ends_quietly(node: Node) -> None:
    process = subprocess.Popen(
        node.argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=child.environment(ROOT)
    )
    assert process.stdout
    process.stdout.close()
    process.stdout = None
    assert process.communicate(b"\n\n\n", PATIENCE_S) == (None, b"")
    assert process.returncode == 0


def test_a_reader_that_is_told_twice_to_end_waits_for_nothing(node: Node) -> None:
    """Nor for the interpreter's end, which this thread holds up."""
    stuck = "threading.Thread(target=time.sleep, args=(1000,)).start()"
    closing = "self.close = lambda: ((folder / 'closing').touch(), time.sleep(1000))"
    node.does(a=f"import threading; {stuck}; {closing}")
    process = subprocess.Popen(node.argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=child.environment(ROOT))
    assert process.stdin
    assert process.stdout
    with process.stdin, process.stdout:
        process.stdin.write(b"\n")
        process.stdin.flush()
        until(lambda: b"done" in process.stdout.readline())
        process.send_signal(signal.SIGINT)
        until((node.folder / "closing").exists)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == -signal.SIGINT


def test_a_reader_that_nobody_can_ask_ends_quietly(node: Node) -> None:
    argv = ["sh", "-c", 'exec "$0" "$@" <&-', *node.argv]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env=child.environment(ROOT))
    assert (done.stdout, done.stderr) == ("", "")


def test_it_reads_by_itself_every_second_until_it_is_told_to_end(tmp_path: Path) -> None:
    with subprocess.Popen([*DIAGNOSD, "read", "--sys-root", tmp_path], stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout
        done = 0
        while done < 2:
            done += process.stdout.readline() == b"# done\n"
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


def test_once_says_what_this_node_says_and_calmly_what_is_not_there() -> None:
    done = subprocess.run(
        [*DIAGNOSD, "read", "--once", "--host", "n01"], check=True, capture_output=True, text=True, cwd=ROOT
    )
    found = measurements(done.stdout)
    assert {"cpu", "mem", "net", "nstat", "diagnosd_clock", "diagnosd_node"} <= found
    assert all(line.startswith("diagnosd: ") for line in done.stderr.splitlines())


def test_once_of_a_captured_tree_says_nothing_of_this_machine(tmp_path: Path) -> None:
    hcas(tmp_path / "sys", 2)
    command = [*DIAGNOSD, "read", "--once", "--host", "n01", "--sys-root", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    found = measurements(done.stdout)
    assert "diagnosd_node" in found
    assert not found & {"cpu", "mem", "nvidia_smi", "diagnosd_clock"}


AUDITED = """
import sys
opened = []
sys.addaudithook(lambda event, args: opened.append(args[0]) if event in ("open", "os.listdir", "os.scandir") else None)
from pathlib import Path
from diagnosd.collectors import hardware
from diagnosd.collectors.machine import captured
for _ in range(2):
    for collector in hardware(captured("n01", Path(sys.argv[1]), ("mlx5_1", "ib1", "0000:11:00.0"))):
        collector.read(1_796_000_000_000_000_000)
print(*[path for path in opened if isinstance(path, str | Path)], sep="\\n")
print(*sys.modules, sep="\\n")
"""


def test_nothing_of_an_excluded_device_is_opened_nor_of_dev_infiniband_and_no_analysis_is_loaded(  # A110
    tmp_path: Path,
) -> None:
    root = hcas(tmp_path / "sys", 2)
    found = subprocess.run(
        [sys.executable, "-c", AUDITED, tmp_path], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.splitlines()
    assert any("mlx5_0" in line for line in found if line.startswith(str(root)))
    assert not [line for line in found if "/dev/infiniband" in line or "mlx5_1/" in line or "/ib1/" in line]
    assert "diagnosd.collectors" in found
    assert not [line for line in found if line.startswith(("numpy", "diagnosd.analysis"))]


def test_a_device_that_hangs_is_left_alone_and_the_others_are_read_on(node: Node) -> None:  # A28, A107
    node.does(a=HANGS)
    with reading(node):
        until(lambda: node.sent("b") >= 3)
        assert node.sent("a") == 0
        (event,) = node.events()
        assert event == (
            "a has not answered for 0.3 s and is left alone; the other devices are read on, and it again in 0.2 s"
        )


def test_a_device_that_answers_again_is_read_again(node: Node) -> None:
    node.does(a=HANGS)
    with reading(node):
        until(lambda: node.sent("b") >= 1)
        node.does(a="pass")
        until(lambda: node.sent("a") >= 1)
        assert len(node.events()) == 1


def test_what_hangs_again_is_put_off_for_longer_and_with_two_such_processes_it_stays_off(node: Node) -> None:
    node.does(a=HANGS)
    with reading(node):
        until(lambda: len(node.events()) == 3)
        before = node.sent("b")
        until(lambda: node.sent("b") > before + 5)
        hung, again, off = node.events()
        assert ("again in 0.2 s" in hung, "again in 0.4 s" in again) == (True, True)
        assert off == "a stays off: 2 processes that asked have not ended yet"
        assert len(node.alive()) == 3
        os.kill(node.pids()[0], signal.SIGKILL)  # as when the device answers at last
        until(lambda: len(node.events()) == 4)
    assert node.alive() == []


def test_with_two_processes_that_hang_a_third_is_waited_for(node: Node) -> None:
    node.does(a=HANGS, b="pass")
    with reading(node):
        until(lambda: len(node.events()) == 3)
        node.does(b="time.sleep(1.0)")
        until(lambda: len(node.events()) == 4)
        assert node.events()[3] == (
            "b has not answered for 0.3 s, nor have 2 before it: no device is read until one ends"
        )
        node.does(b="pass")
        before = node.sent("b")
        until(lambda: node.sent("b") > before + 3)
        assert len(node.alive()) == 3


def test_a_child_that_was_killed_is_replaced_and_each_kind_of_death_is_told_once(node: Node) -> None:
    with reading(node):
        for deaths in range(1, 4):
            until(lambda deaths=deaths: len(node.pids()) == deaths)  # type: ignore[misc]
            os.kill(node.pids()[-1], signal.SIGKILL)
        until(lambda: len(node.pids()) == 4)
        (event,) = {text.partition(" while")[0].partition(":")[0] for text in node.events()}
        assert event == "the process that reads the devices was ended by SIGKILL"


def test_a_device_whose_library_ends_the_process_is_put_off_and_the_others_are_read_on(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.does(a="print('assertion failed: x', file=sys.stderr, flush=True); os.abort()")
    with reading(node, BRIEF._replace(back=60.0)):
        until(lambda: node.sent("b") >= 3)
    (event,) = node.events()
    died, _, then = event.partition(" (assertion failed: x): ")
    assert died == "the process that reads the devices was ended by SIGABRT while it read a"
    assert then == "it is started again"
    assert "devices: assertion failed: x" in caplog.messages


def test_what_is_not_there_is_said_once_with_the_path_also_when_the_child_is_replaced(  # A108
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    node.does(a="self.missing = 'no driver here (/dev/nvidiactl: Permission denied)'")
    with reading(node):
        until(lambda: node.sent("b"))
        os.kill(node.pids()[0], signal.SIGKILL)
        until(lambda: len(node.pids()) == 2)
        before = node.sent("b")
        until(lambda: node.sent("b") > before)
    assert caplog.messages.count("no driver here (/dev/nvidiactl: Permission denied)") == 1


def test_a_flood_on_stderr_is_cut_short_in_the_log(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.does(a="print('oops\\n' * 1000, file=sys.stderr)")
    with reading(node):
        until(lambda: node.sent("b") >= 3)
    assert caplog.messages.count("devices: oops") == 10


def test_a_flood_of_points_waits_in_its_pipe_and_is_no_hang(node: Node) -> None:
    node.does(a="line = b'net,host=n01 err_in=1i 1796000000000000000\\n' * 20000\nwhile True: os.write(3, line)")
    slow = BRIEF._replace(tick=0.5, most=0.4)
    with reading(node, slow):
        until(lambda: node.bytes)
        time.sleep(0.7)
        assert node.bytes <= 4 * MOST_BYTES
        assert node.events() == []


STOPPED = """
import sys, time
from pathlib import Path
from diagnosd import child
from diagnosd.devices import Devices
patience = child.Patience(tick=0.05, most=0.3)
def put(batch):
    sys.stdout.write(batch.lines.decode()); sys.stdout.flush()
Devices("n01", sys.argv[1:], child.environment(Path("/nowhere/probe.sock")), put, patience)
time.sleep(1000)
"""


def test_while_the_agent_is_stopped_no_time_is_counted(node: Node) -> None:
    node.does(a="time.sleep(0.15)")
    with subprocess.Popen([sys.executable, "-c", STOPPED, *node.argv], stdout=subprocess.PIPE, cwd=ROOT) as agent:
        until(node.pids)
        for number in range(3):
            time.sleep(0.1 + 0.05 * number)
            agent.send_signal(signal.SIGSTOP)
            time.sleep(0.4)
            agent.send_signal(signal.SIGCONT)
        time.sleep(0.2)
        agent.terminate()
        assert agent.stdout
        said = agent.stdout.read().decode()
    assert "interface=b" in said
    assert "telemetry_gap" not in said
    assert len(set(node.pids())) == 1


def test_no_process_is_left_when_the_agent_is_killed_while_a_device_hangs(node: Node) -> None:
    node.does(a="time.sleep(1000)")
    command = [sys.executable, "-c", STOPPED.replace("most=0.3", "most=60"), *node.argv]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT) as agent:
        until(node.pids)
        agent.kill()
    until(lambda: not node.alive())


def test_the_end_waits_for_nobody_who_hangs(node: Node) -> None:
    node.does(a=HANGS)
    with reading(node, BRIEF._replace(most=60.0)):
        until(node.pids)
        time.sleep(0.1)
        began = time.monotonic()
    assert time.monotonic() - began < 4.0
    assert node.alive() == []


def test_a_child_that_is_told_to_end_together_with_the_agent_is_no_news(node: Node) -> None:
    with reading(node, BRIEF._replace(again=60.0)):
        until(lambda: node.sent("b"))
        os.kill(node.pids()[0], signal.SIGTERM)
        until(lambda: not node.alive())
    assert node.events() == []


def test_what_the_devices_say_at_the_end_is_told_and_each_lets_go(node: Node) -> None:
    with reading(node, BRIEF._replace(tick=60.0)):
        until(lambda: node.sent("b") == 1)
    assert (node.sent("a"), node.sent("b")) == (2, 2)
    assert (node.folder / "closed a").exists()
    assert node.events() == []


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(each) for each in (task / "children").read_text().split()]
    return found


def test_an_agent_whose_gpu_hangs_goes_on_with_everything_else_and_ends_in_time(tmp_path: Path) -> None:  # A28
    gpus = Gpus(tmp_path, "H100", "H100")
    file = tmp_path / "n01.lp"
    command = [*DIAGNOSD, "record", "--host", "n01", "--socket", tmp_path / "probe.sock", file]
    environ = {**os.environ, **gpus.environment}
    with subprocess.Popen(command, env=environ, cwd=ROOT, stderr=subprocess.PIPE, text=True) as agent:
        until(lambda: file.exists() and "nvidia_smi" in file.read_text())
        gpus["0.*"] = "hang"
        until(lambda: "telemetry_gap" in file.read_text())
        hung = len(file.read_text())
        until(lambda: {"diagnosd_node", "disk"} <= measurements(file.read_text()[hung:]))
        readers = children(agent.pid)
        agent.terminate()
        _, said = agent.communicate(timeout=5.0)
    assert "nvml has not answered for " in said
    assert len(readers) == 2
    assert not any(map(lives, readers))
    assert not {"nvidia_smi", "diagnosd_gpu"} & measurements(file.read_text()[hung:])


def measurements(lines: str) -> set[str]:
    return {line.partition(",")[0] for line in lines.splitlines()}


def test_yield_lets_go_of_nvidias_library_too(tmp_path: Path) -> None:
    gpus = Gpus(tmp_path, "H100")
    node = Node(tmp_path)
    environ = {**child.environment(tmp_path / "probe.sock"), **gpus.environment}
    with Agents("n01", child.command("n01"), environ, node.put, BRIEF._replace(most=60.0)) as agents:
        until(lambda: any(each.series.measurement == "nvidia_smi" for each in node.points))
        assert agents._child
        maps = Path(f"/proc/{agents._child._process.pid}/maps")
        assert "libnvidia-ml" in maps.read_text()
        (tmp_path / "yield").write_text("")
        until(node.events)
        assert "libnvidia-ml" not in maps.read_text()


def test_a_file_of_the_kernel_that_never_answers_costs_its_collector_only(tmp_path: Path) -> None:
    """A FIFO in a captured tree: to open it waits for ever."""
    root = hcas(tmp_path / "sys", 1)
    (device,) = root.glob("class/net/*/device")
    (device / "current_link_speed").unlink()
    os.mkfifo(device / "current_link_speed")
    node = Node(tmp_path)
    argv = [*child.command("n01"), "--sys-root", str(tmp_path)]
    with Agents("n01", argv, child.environment(tmp_path / "probe.sock"), node.put, BRIEF._replace(most=0.5)):
        until(node.events)
        until(lambda: any(each.series.tag("collector") == "node" for each in node.points))
    assert node.events()[0].startswith("node has not answered")


def test_yield_lets_go_of_every_device_until_the_time_is_over(node: Node) -> None:
    (node.folder / "held").write_text("")
    node.does(a="self.held = open(folder / 'held')")
    with reading(node):
        until(lambda: node.sent("b") >= 2)
        (pid,) = node.pids()
        held = str(node.folder / "held")
        assert held in files_of(pid)
        (node.folder / "yield").write_text(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 60)))
        until(node.events)
        assert held not in files_of(pid)
        before = node.sent("b")
        time.sleep(0.3)
        assert node.sent("b") == before
        (event,) = node.events()
        assert event.startswith("devices are left alone until ")
        (node.folder / "yield").unlink()
        until(lambda: node.sent("b") > before)
        assert node.pids() == [pid, pid]
        assert (node.folder / "closed a").exists()


def files_of(pid: int) -> list[str]:
    found = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found.append(str(each.readlink()))
    return found


def test_a_library_that_is_stale_is_left_behind_after_a_minute_and_later_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # A27
    class Stale(Plain):
        stale = True

    reader = Reader("n01", lambda: [Stale("nvml")], lambda _: None)
    assert reader.round()
    reader._renew_due -= 60.0
    assert not reader.round()
    assert reader.renewals() == 1
    monkeypatch.setenv("DIAGNOSD_RENEWED", "3")
    later = Reader("n01", lambda: [Stale("nvml")], lambda _: None)
    later._renew_due -= 479.0
    assert later.round()


def test_a_library_that_ends_the_process_costs_one_round_its_own_devices_and_its_last_words_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = '__attribute__((constructor)) static void end(void) { fputs("assertion failed: x\\n", stderr); abort(); }'
    source = f"#include <stdio.h>\n#include <stdlib.h>\n{text}\n"
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, "-xc", "-"], input=source, text=True, check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    points, words = child.once("n01", [], tmp_path / "probe.sock", PATIENCE_S)
    assert any(each.series.measurement == "diagnosd_node" for each in points)
    assert words[-2:] == ["assertion failed: x", "nvml did not answer"]


def test_one_round_of_the_devices_is_had_in_time(tmp_path: Path) -> None:
    points, missing = child.once("n01", ["mlx5_*"], tmp_path / "probe.sock", PATIENCE_S)
    assert any(each.series.measurement == "diagnosd_node" for each in points)
    assert all(isinstance(each, str) for each in missing)
