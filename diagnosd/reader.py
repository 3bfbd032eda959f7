"""`diagnosd read`: reads what touches a device, in a process of its own, and prints points on stdout.

Around each read stand two comments, `# begin nvml 1500` (with the milliseconds that it may take) and `# end nvml`, and
`# done` ends a round: so that who reads us sees a device that does not answer, and can leave this process alone with
it. What a device's library holds is let go of by becoming a fresh process: a library is never unloaded for sure.
"""

from __future__ import annotations

import argparse
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from diagnosd import yields
from diagnosd.collectors import COLLECTORS, Collector, hardware
from diagnosd.collectors.machine import Machine
from diagnosd.pace import SELF_EVERY, Paced, gap, resident_bytes
from diagnosd.point import Point, Series, encode, point
from diagnosd.wording import log_calmly, own_mistake

TICK_S = 1.0
# The first read may take longer: a driver without persistence mode wakes every GPU up, which takes 1 to 3 s each.
DEADLINE_S, FIRST_DEADLINE_S = 1.5, 20.0
# The share of the time in which a device may be busy with us. Between reads of 50 ms lies a second, and ten between
# those of half a second: GPUs that are asked too often have hung (conditions.md A29).
DUTY = 0.05
RENEW_S, RENEW_LONGEST_S = 60.0, 3600.0  # between two renewals because something was stale: doubled each time
RENEWED = "DIAGNOSD_RENEWED"  # in our own environment: how often that was
FILES = 65536  # that we may open: an HCA's counters are some dozen files a port, and each stays open
# After stdin was closed: for the round that is under way, and then for the call that hangs (a process that is killed
# while it asks a GPU has frozen it).
LEAVE_S, LAST_S = 1.0, 60.0
STDOUT = "stdout"
DEVICES = "GPUs, RDMA ports, NICs' drivers, disks and the inventory"  # what `hardware` reads
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Reader:
    """One process's rounds. `make` is called when a device may be touched for the first time."""

    def __init__(
        self,
        host: str,
        make: Callable[[], Sequence[Collector]],
        write: Callable[[bytes], object],
        yielding: Sequence[Path] = (),
    ) -> None:
        self._host = host
        self._make = make
        self._write = write
        self._yielding = yielding
        self._made = False
        self._collectors: list[Paced] = []
        self._began = time.monotonic()
        self._rounds = 0
        self._due: dict[str, float] = {}  # by `_now`; of those that were read once
        self._self_due = 0.0
        self._told_until = 0.0
        self._renewed = int(os.environ.get(RENEWED, "0"))
        self._renew_due = time.monotonic() + min(RENEW_S * 2**self._renewed, RENEW_LONGEST_S)

    def round(self) -> bool:
        """Reads what is due; False where a fresh process has to go on in our stead."""
        self._rounds += 1
        until = yields.until(self._yielding, time.time())
        if until:
            self._write(self._heartbeats() + self._left_alone(until) + b"# done\n")
            return not self._made
        if not self._made:
            self._made = True
            self._collectors = [Paced(collector, DUTY) for collector in self._make()]
        self._write(self._read_all(self._heartbeats()) + b"# done\n")
        return time.monotonic() < self._renew_due or not any(self._stale())

    def renewals(self) -> int:
        """How often something will have been stale when a fresh process begins."""
        return self._renewed + any(self._stale())

    def close(self) -> None:
        for each in self._collectors:
            each.close()

    def _now(self) -> float:
        """Seconds: a round is one, also where they come faster, and takes its time where they come more slowly."""
        return max(self._rounds * TICK_S, time.monotonic() - self._began)

    def _stale(self) -> Iterator[bool]:
        return (getattr(each.collector, "stale", False) for each in self._collectors)

    def _read_all(self, said: bytes) -> bytes:
        """What one read gave goes out with the announcement of the next; what the last one gave is returned."""
        for each in self._collectors:
            now, first = self._now(), each.name not in self._due
            if now < self._due.get(each.name, now):
                continue
            deadline = FIRST_DEADLINE_S if first else getattr(each.collector, "deadline", DEADLINE_S)
            self._write(said + f"# begin {each.name} {deadline * 1e3:.0f}\n".encode())
            said = each.read(time.time_ns()).lines + f"# end {each.name}\n".encode()
            self._due[each.name] = now + each.every - TICK_S / 2  # rounds come a little early or late
            if first and each.missing:
                said += f"# missing {each.missing}\n".encode()
        return said

    def _heartbeats(self) -> bytes:
        now, now_ns = self._now(), time.time_ns()
        if now < self._self_due:
            return b""
        self._self_due = now + SELF_EVERY - TICK_S / 2
        fields = {"up": 1, "cpu_seconds": time.process_time(), "rss": resident_bytes()}
        ours = point("diagnosd_agent", {"host": self._host, "collector": "reader"}, fields, now_ns)
        known = (each for each in self._collectors if each.name in self._due)
        return encode([ours, *(each.heartbeat(self._host, now_ns) for each in known)])

    def _left_alone(self, until: float) -> bytes:
        """One event; where devices are open the fresh process tells it, which has let go of them."""
        if self._made or until == self._told_until:
            return b""
        self._told_until = until
        text = f"devices are left alone until {yields.clock(until)}: diagnosd yield"
        return encode([gap(self._host, text, time.time_ns())])


def read(
    host: str,
    socket: Path,
    sys_root: Path | None,
    exclude: Iterable[str],
    *,
    on_request: bool,
    without: Iterable[str] = (),
) -> NoReturn:
    """A round every second, or for each newline on stdin until that is closed; `without` collectors of these names."""
    machine = Machine.of(host, sys_root, exclude)
    left_off = frozenset(without)

    def make() -> list[Collector]:
        return [collector for collector in hardware(machine) if collector.name not in left_off]

    serve(host, make, on_request=on_request, yielding=yields.files(socket) if machine.live else ())


def once(host: str, socket: Path, sys_root: Path | None, exclude: Iterable[str]) -> NoReturn:
    """What this node says now, /proc included, and what is not there."""
    log_calmly()
    out = _own_stdout()
    machine = Machine.of(host, sys_root, exclude)
    until = yields.until(yields.files(socket), time.time()) if machine.live else 0.0
    everyone = [make(machine) for make in COLLECTORS if machine.live] + ([] if until else hardware(machine))
    collectors = [Paced(collector) for collector in everyone]
    code = 1
    try:
        said = encode(_united(collectors, reads=2 if machine.live else 1))
        with suppress(BrokenPipeError):
            _write(out, said)
        _tell(
            [*(each.missing for each in collectors), until and f"{DEVICES} are left alone until {yields.clock(until)}"]
        )
        code = 0
    except KeyboardInterrupt:
        code = 130
    except BaseException as error:  # noqa: BLE001 - the interpreter's own end is not waited for
        _complain(error)
    finally:
        os._exit(code)


def _tell(sentences: Iterable[str | float | None]) -> None:
    for each in filter(None, sentences):
        print(f"diagnosd: {each}", file=sys.stderr, flush=True)


def _united(collectors: Sequence[Paced], reads: int) -> list[Point]:
    """The points of so many reads, a second apart: rates need two. The later value of a series wins."""
    united: dict[Series | int, Point] = {}
    for number in range(reads):
        time.sleep(TICK_S if number else 0.0)
        for each in (each for paced in collectors for each in paced.read(time.time_ns()).points):
            key = len(united) if each.series.measurement == "diagnosd_event" else each.series
            before = united.get(key)
            united[key] = each._replace(fields={**before.fields, **each.fields}) if before else each
    return [*united.values()]


def serve(
    host: str, make: Callable[[], Sequence[Collector]], *, on_request: bool, yielding: Sequence[Path] = ()
) -> NoReturn:
    """Ends with stdin or stdout, or when it is told to: never with the interpreter, which a library could hold up."""
    log_calmly()
    out = _own_stdout()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a thread that had them blocked may have started us
    for number in STOPPING:
        signal.signal(number, lambda *_: sys.exit(0))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, FILES), most))
    reader = Reader(host, make, lambda said: _write(out, said), yielding)
    code = 1
    try:
        _rounds(reader, out, on_request=on_request)
        code = 0
    except (SystemExit, BrokenPipeError):
        code = 0
    except BaseException as error:  # noqa: BLE001 - likewise
        _complain(error)
    finally:
        for number in STOPPING:  # told again, it ends at once
            signal.signal(number, signal.SIG_DFL)
        reader.close()
        os._exit(code)


def _complain(error: BaseException) -> None:
    """A disk that is full, behind our stdout, is nobody's mistake."""
    if isinstance(error, OSError) and error.filename == STDOUT:
        _tell([f"{STDOUT}: {error.strerror}"])
    else:
        own_mistake(type(error), error, error.__traceback__)


def _rounds(reader: Reader, out: int, *, on_request: bool) -> None:
    if on_request:
        threading.Thread(target=_leave_with_stdin, name="stdin", daemon=True).start()
    for _ in _requests() if on_request else _seconds():
        if not reader.round():
            reader.close()
            _begin_afresh(out, reader.renewals())


def _requests() -> Iterator[None]:
    with suppress(OSError):  # closed from the start
        while asked := os.read(0, 4096):
            yield from [None] * asked.count(b"\n")


def _seconds() -> Iterator[None]:
    began, tick = time.monotonic(), 0
    while True:
        yield
        tick = max(tick + 1, int((time.monotonic() - began) / TICK_S) + 1)
        time.sleep(max(0.0, began + tick * TICK_S - time.monotonic()))


def _leave_with_stdin() -> None:
    """Though a read hangs: nobody is there any more to end us."""
    closed = select.poll()
    closed.register(0, 0)
    closed.poll()
    time.sleep(LEAVE_S)
    os.kill(os.getpid(), signal.SIGTERM)  # an open() or ioctl() that can be interrupted ends here
    time.sleep(LAST_S)
    os._exit(1)


def _begin_afresh(out: int, renewals: int) -> NoReturn:
    """The same program in the same process: nothing of a library stays mapped, and no file open."""
    os.dup2(out, 1)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers, not paths
        with suppress(OSError):  # that of the listing itself
            os.set_inheritable(int(name), int(name) <= 2)
    os.execve(  # noqa: S606 - ourselves
        sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, RENEWED: str(renewals)}
    )


def _own_stdout() -> int:
    """The real stdout, for us alone: what a library prints there goes to stderr from now on."""
    out = os.dup(1)
    os.dup2(2, 1)
    return out


def _write(fd: int, said: bytes) -> None:
    """OSError names where to."""
    try:
        while said:
            said = said[os.write(fd, said) :]
    except OSError as error:
        raise type(error)(error.errno, error.strerror, STDOUT) from error


def main() -> NoReturn:
    """As the agent starts it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--sys-root", type=Path)
    parser.add_argument("--exclude", action="append", default=[])
    parser.add_argument("--without", action="append", default=[])
    given = parser.parse_args()
    socket = Path(os.environ["DIAGNOSD_SOCKET"])
    read(given.host, socket, given.sys_root, given.exclude, on_request=True, without=given.without)


if __name__ == "__main__":
    main()
