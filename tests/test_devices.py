"""Children that are not as they should be: what the agent, and `diagnosd inventory`, make of what they print."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from diagnosd.child import Patience
from diagnosd.devices import OFTEN, Devices
from diagnosd.pace import Batch

ROOT = Path(__file__).parents[1]
PATIENCE_S = 10.0
BRIEF = Patience(tick=0.05, most=0.3, answer=0.3, kill=0.3, back=60.0, again=0.05, again_longest=0.2)


class Told:
    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def texts(self) -> list[str]:
        points = [each for batch in list(self.batches) for each in batch.points]
        return [str(each.fields["text"]) for each in points if each.series.measurement == "diagnosd_event"]


@contextmanager
def reading(program: str, patience: Patience = BRIEF) -> Iterator[tuple[Devices, Told]]:
    """The agent's side of a child that is this program."""
    told = Told()
    devices = Devices("n01", [sys.executable, "-c", program], dict(os.environ), told.batches.append, patience)
    try:
        yield devices, told
    finally:
        devices.leave()
        devices.join(5.0)


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_a_child_complained_of_is_told_in_short_and_does_nothing_to_a_terminal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    program = "import os; os.write(2, b'\\x1b[2J' + b'x' * 1_000_000 + b'\\n'); os._exit(3)"
    with caplog.at_level(logging.INFO), reading(program) as (_, told):
        until(told.texts)
    assert r"devices: \x1b[2Jxxx" in caplog.messages[0]
    assert "exited with 3 (xxx" in told.texts()[0]
    assert all(len(each) < 500 for each in [*told.texts(), *caplog.messages])


def test_the_last_words_of_a_child_are_told_though_its_lines_were_too_many_for_the_log() -> None:
    program = "import os; os.write(2, b'no fan on this GPU\\n' * 20 + b'last words\\n'); os._exit(3)"
    with reading(program) as (_, told):
        until(told.texts)
    assert "exited with 3 (last words)" in told.texts()[0]


def test_a_child_that_floods_its_stderr_costs_little(caplog: pytest.LogCaptureFixture) -> None:
    program = "import os\nos.write(1, b'# begin nvml 60000\\n')\nwhile 1: os.write(2, b'no fan on this GPU\\n' * 3000)"
    with reading(program, BRIEF._replace(tick=1.0, most=60.0)):
        until(lambda: caplog.messages)
        before = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - before < 0.4
    assert sum("no fan" in each for each in caplog.messages) == 10


@pytest.mark.parametrize("milliseconds", ["9" * 5000, "٣", "-1", "nan", ""])
def test_an_announcement_that_is_none_is_passed_over(milliseconds: str) -> None:
    program = f"import os, time; os.write(1, '# begin a {milliseconds}\\n'.encode()); time.sleep(100)"
    with reading(program) as (_, told):
        until(told.texts)
    assert told.texts()[0].startswith("the process that reads the devices has not answered")


def test_a_child_that_never_says_a_word_is_told_once(tmp_path: Path) -> None:
    program = f"open({str(tmp_path / 'begun')!r}, 'a').write('.'); import time; time.sleep(100)"
    with reading(program) as (_, told):
        until(lambda: (tmp_path / "begun").exists() and len((tmp_path / "begun").read_text()) > 3)
    assert [each for each in told.texts() if "another one is started" in each] == told.texts()[:1]


def test_a_library_that_ends_its_process_each_time_is_left_off(tmp_path: Path) -> None:
    program = f"""
import os, sys, time
if "nvml" in sys.argv:
    open({str(tmp_path / "without")!r}, "a").write("x")
    time.sleep(100)
open({str(tmp_path / "begun")!r}, "a").write("x")
os.write(1, b"# begin nvml 1500\\n")
os._exit(0)
"""
    with reading(program):
        until((tmp_path / "without").exists)
    assert (tmp_path / "begun").read_text() == OFTEN * "x"


LOUD = """
#include <stdio.h>
int nvmlInitWithFlags(unsigned flags) {
    for (int line = 0; line < 20000; line++) fprintf(stderr, "%d of many lines\\n", line);
    return 999;
}
"""


def test_the_inventory_comes_though_a_library_prints_more_than_a_pipe_holds(tmp_path: Path) -> None:
    (tmp_path / "loud.c").write_text(LOUD)
    built = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", built, tmp_path / "loud.c"], check=True)
    began = time.monotonic()
    told = subprocess.run(
        [sys.executable, "-m", "diagnosd", "inventory", "--socket", str(tmp_path / "probe.sock")],
        env=os.environ | {"LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert "NVML's error 999" in told.stdout
    assert time.monotonic() - began < PATIENCE_S


@pytest.mark.parametrize("how", [("read", "--once"), ("read",)])
def test_a_full_disk_behind_stdout_is_told_as_what_it_is(tmp_path: Path, how: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "diagnosd", *how, "--sys-root", str(tmp_path)]
    with Path("/dev/full").open("wb") as full:
        told = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    assert told.returncode == 1
    assert told.stderr.splitlines()[-1] == "diagnosd: stdout: No space left on device"
