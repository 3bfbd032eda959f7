"""What this process may read of itself under /proc and of its cgroup: numbers for `diagnosd_process`.

Each file is its own source: one that cannot be read takes only its own fields with it.
"""

import gc
import os
import sys
import time
from typing import Dict, Iterable, List, Optional, Tuple

Fields = Dict[str, "int | float | str"]

TICKS = os.sysconf("SC_CLK_TCK")
STACK_BYTES = 2048
SHORTEST_RATE = 0.5  # s: the kernel counts CPU time in ticks of 10 ms


def rank_process(proc: str, main: int, workers: Iterable[int], before: "Usage") -> Tuple[Fields, "Usage"]:
    """The fields, and what the next call needs to make rates of. `main` is the native id of the training thread."""
    usage = Usage(proc, main, workers)
    fields: Fields = {}
    status = _table(proc + "/self/task/%d/status" % main)
    if "VmRSS" in status:
        fields["rss"] = int(status["VmRSS"].split()[0]) * 1024
    if "nonvoluntary_ctxt_switches" in status:
        fields["involuntary_switches"] = int(status["nonvoluntary_ctxt_switches"])
    if "State" in status:
        fields["state"] = status["State"][:1]
    for name, value in _table(proc + "/self/io").items():
        if name in ("read_bytes", "write_bytes"):
            fields[name] = int(value)
    fields.update(usage.since(before))
    return fields, usage


class Usage:
    """CPU seconds and throttled periods, to be compared with an earlier look."""

    def __init__(self, proc: str = "/proc", main: int = 0, workers: Iterable[int] = ()) -> None:
        self.at = time.monotonic()
        self.main = cpu_seconds(proc + "/self/task/%d/stat" % main) if main else None
        self.workers = {pid: cpu_seconds(proc + "/%d/stat" % pid) for pid in workers}
        self.periods = throttled_periods(proc) if main else {}

    def since(self, before: "Usage") -> Fields:
        elapsed = self.at - before.at
        if elapsed < SHORTEST_RATE or before.main is None:
            return {}
        fields: Fields = {}
        if self.main is not None:
            fields["cpu_main"] = (self.main - before.main) / elapsed
        spent = [_difference(self.workers[pid], before.workers.get(pid)) for pid in self.workers]
        if any(seconds is not None for seconds in spent):
            fields["cpu_workers"] = sum(seconds or 0.0 for seconds in spent) / elapsed
        shares = [_share(now, before.periods[group]) for group, now in self.periods.items() if group in before.periods]
        if shares:
            fields["throttled"] = max(shares)  # whichever of the nested quotas bites most
        return fields


def _difference(now: Optional[float], then: Optional[float]) -> Optional[float]:
    return None if now is None or then is None else now - then


def _share(now: Tuple[int, int], then: Tuple[int, int]) -> float:
    """Of the periods that passed, those in which the quota ran out; 0 while no period passed: nothing ran."""
    return max(0, now[1] - then[1]) / max(1, now[0] - then[0])


def cpu_seconds(path: str) -> Optional[float]:
    """User and system time of a thread or process, children excluded."""
    after_name = _text(path).rpartition(")")[2].split()
    if len(after_name) < 13:
        return None
    return (int(after_name[11]) + int(after_name[12])) / TICKS


def throttled_periods(proc: str = "/proc", mounts: str = "/sys/fs/cgroup") -> Dict[str, Tuple[int, int]]:
    """(periods, throttled periods) of every CPU quota on the way up from this process's group, by folder."""
    found = {}
    for folder in _cpu_groups(proc, mounts):
        stat = _table(folder + "/cpu.stat", " ")
        if int(stat.get("nr_periods", "0")):
            found[folder] = (int(stat["nr_periods"]), int(stat.get("nr_throttled", "0")))
    return found


def _cpu_groups(proc: str, mounts: str) -> Iterable[str]:
    """Folders of the cpu controller, in version 2 (`0::/path`) and in version 1 (`4:cpu,cpuacct:/path`)."""
    for controllers, path in _cgroups(proc):
        if controllers and "cpu" not in controllers.split(","):
            continue
        names = (controllers, "cpu") if controllers else ("", "unified")
        root = next((root for root in (mounts + "/" + name for name in names) if os.path.isdir(root)), "")
        parts = [part for part in path.split("/") if part] if root else []
        for depth in range(len(parts), -1, -1):  # inside a container the upper folders may be missing, or be the root
            yield "/".join([root.rstrip("/"), *parts[:depth]])


def _cgroups(proc: str) -> List[Tuple[str, str]]:
    try:
        with open(proc + "/self/cgroup") as file:
            return [
                (controllers, path)
                for _, controllers, path in (line.split(":", 2) for line in file.read().splitlines())
            ]
    except OSError:
        return []


def _table(path: str, separator: str = ":") -> Dict[str, str]:
    """A file of `key: value` lines; empty where it cannot be read."""
    pairs = (line.partition(separator) for line in _text(path).splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs if value}


def _text(path: str) -> str:
    """A small file of the kernel's, "" where it cannot be read.

    By three calls: each gives up the GIL, and getting it back from a busy training thread takes up to 5 ms.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(file, 65536).decode(errors="replace")
        finally:
            os.close(file)
    except OSError:
        return ""


def stack(thread: int) -> str:
    """The innermost frames of a thread, innermost first, `function file:line`, at most STACK_BYTES."""
    frame = sys._current_frames().get(thread)
    told: List[str] = []
    while frame is not None:
        code = frame.f_code
        told.append("%s %s:%d" % (code.co_name, os.path.basename(code.co_filename), frame.f_lineno))
        frame = frame.f_back
    text = ""
    for line in told:
        if len(text) + len(line) + 3 > STACK_BYTES:
            break
        text += " < " + line if text else line
    return text


class Collections:
    """Seconds that garbage collection has taken, the youngest generation left out: it is too short to be timed."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0
        gc.callbacks.append(self._called)

    def _called(self, moment: str, facts: Dict[str, int]) -> None:
        if facts["generation"] == 0:
            return
        if moment == "start":
            self._began = time.perf_counter()
        elif self._began:
            self.seconds += time.perf_counter() - self._began
            self._began = 0.0
