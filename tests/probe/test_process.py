"""What a process reads of itself: cgroups of both versions as captured trees, the rest for real."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import pytest

from diagnosd.probe import process
from diagnosd.probe.process import Collections, Usage, rank_process, stack, throttled_periods


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = {
    "proc/self/cgroup": "0::/kubepods/pod1/container\n",
    "cgroup/kubepods/pod1/container/cpu.stat": "usage_usec 5\nnr_periods 0\nnr_throttled 0\n",
    "cgroup/kubepods/pod1/cpu.stat": "usage_usec 9\nnr_periods 100\nnr_throttled 25\nthrottled_usec 8\n",
    "cgroup/kubepods/cpu.stat": "usage_usec 9\n",
}
V1 = {
    "proc/self/cgroup": "12:memory:/m\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/x\n",
    "cgroup/cpu,cpuacct/docker/abc/cpu.stat": "nr_periods 40\nnr_throttled 30\nthrottled_time 7\n",
}
CONTAINER = {
    "proc/self/cgroup": "4:cpu:/docker/abc\n",  # seen from inside, the root of the mount is the container's own group
    "cgroup/cpu/cpu.stat": "nr_periods 40\nnr_throttled 30\n",
}


@pytest.mark.parametrize(
    ("files", "found"), [(V2, (100, 25)), (V1, (40, 30)), (CONTAINER, (40, 30))], ids=["v2", "v1", "v1 in a container"]
)
def test_the_quota_above_a_process_is_found(tmp_path: Path, files: dict[str, str], found: tuple[int, int]) -> None:
    tree(tmp_path, files)
    assert list(throttled_periods(str(tmp_path / "proc"), str(tmp_path / "cgroup")).values()) == [found]


def test_without_a_quota_nothing_is_said_of_throttling(tmp_path: Path) -> None:
    tree(tmp_path, {"proc/self/cgroup": "0::/\n", "cgroup/cpu.stat": "usage_usec 1\n"})
    assert throttled_periods(str(tmp_path / "proc"), str(tmp_path / "cgroup")) == {}


def test_a_folder_that_cannot_be_read_takes_only_its_own_fields_with_it(tmp_path: Path) -> None:
    fields, _ = rank_process(str(tmp_path), 1, [2], Usage())
    assert fields == {}


def usage(main: float, workers: dict[int, float | None], periods: dict[str, tuple[int, int]], at: float) -> Usage:
    look = Usage()
    look.main, look.workers, look.periods, look.at = main, workers, periods, at
    return look


def test_rates_are_of_the_time_between_two_looks() -> None:
    before = usage(10.0, {7: 1.0, 8: 2.0}, {"/a": (100, 0), "/b": (50, 50)}, at=0.0)
    now = usage(11.0, {7: 2.0, 8: 2.5, 9: 4.0}, {"/a": (120, 15), "/b": (70, 55)}, at=2.0)
    assert now.since(before) == {"cpu_main": 0.5, "cpu_workers": 0.75, "throttled": 0.75}


def test_two_looks_in_quick_succession_make_no_rates() -> None:
    assert usage(11.0, {}, {}, at=0.1).since(usage(10.0, {}, {}, at=0.0)) == {}


def test_of_itself_a_process_tells_memory_state_and_bytes() -> None:
    fields, _ = rank_process("/proc", threading.get_native_id(), [], Usage())
    assert {"rss", "state", "involuntary_switches"} <= set(fields)
    assert fields["state"] == "R"
    assert int(fields["rss"]) > 1_000_000


def test_cpu_of_the_training_thread_is_its_own() -> None:
    def idle() -> float | None:
        return process.cpu_seconds(f"/proc/self/task/{threading.get_native_id()}/stat")

    found: list[float | None] = []
    thread = threading.Thread(target=lambda: found.append(idle()))
    until = time.thread_time() + 0.05
    while time.thread_time() < until:
        pass
    thread.start()
    thread.join()
    assert found == [0.0]
    assert (process.cpu_seconds(f"/proc/self/task/{threading.get_native_id()}/stat") or 0) >= 0.04


def test_the_stack_of_a_thread_begins_at_its_innermost_frame() -> None:
    begun, end = threading.Event(), threading.Event()

    def where_it_hangs() -> None:
        begun.set()
        end.wait()

    thread = threading.Thread(target=where_it_hangs)
    thread.start()
    begun.wait()
    told = stack(thread.ident or 0)
    end.set()
    thread.join()
    assert told.startswith("wait threading.py:")
    assert " < where_it_hangs test_process.py:" in told


def test_a_deep_stack_is_cut_at_its_outer_end() -> None:
    def deeper(depth: int) -> str:
        return deeper(depth - 1) if depth else stack(threading.get_ident())

    told = deeper(300)
    assert len(told) <= process.STACK_BYTES
    assert told.startswith("stack process.py:")


def test_a_collection_of_garbage_is_timed() -> None:
    collections = Collections()
    try:
        gc.collect()
        assert collections.seconds > 0
    finally:
        gc.callbacks.remove(collections._called)
