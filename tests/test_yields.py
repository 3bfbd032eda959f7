"""The file that says until when devices are left alone: what it may say, who may write it, and the verb that does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diagnosd import yields

ROOT = Path(__file__).parents[1]
NOW = 1_796_000_000.0


def diagnosd_yield(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "diagnosd", "yield", "--socket", str(folder / "probe.sock"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.parametrize(
    ("said", "age", "left"),
    [
        ("2026-11-30T00:00:00Z", 10.0, 0.0),  # it is over
        ("2026-11-30T01:10:00+00:00", 10.0, 600.0),
        ("2026-11-30T01:10:00", 10.0, 600.0),
        ("2036-01-01T00:00:00Z", 10.0, yields.LONGEST_S - 10.0),
        ("9999-12-31T23:59:59Z", 2 * yields.LONGEST_S, 0.0),
        ("", 10.0, yields.UNSAID_S - 10.0),
        ("soon", 10.0, yields.UNSAID_S - 10.0),
        ("\xff\x00", yields.UNSAID_S, 0.0),
        ("2026-11-30T01:10:00Z", -2 * yields.LONGEST_S, 0.0),  # written in the far future: no time at all
    ],
)
def test_what_a_yield_file_says_is_bounded(tmp_path: Path, said: str, age: float, left: float) -> None:
    file = tmp_path / "yield"
    file.write_text(said, "latin-1")
    os.utime(file, (NOW - age, NOW - age))
    found = yields.until([file, tmp_path / "none"], NOW)
    assert found == (pytest.approx(NOW + left) if left else 0.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_yield_file_of_another_user_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "yield").write_text("")
    os.chown(tmp_path / "yield", 65534, 65534)
    assert yields.until([tmp_path / "yield"], time.time()) == 0.0


def test_yield_says_what_it_did_and_takes_it_back(tmp_path: Path) -> None:
    begun = diagnosd_yield(tmp_path, "--for", "10m")
    assert yields.until([tmp_path / "yield"], time.time()) == pytest.approx(time.time() + 600, abs=10)
    assert "left alone until" in begun.stdout
    assert f"no agent is there now ({tmp_path}/probe.sock)" in begun.stdout
    assert "read again" in diagnosd_yield(tmp_path, "--end").stdout
    assert not (tmp_path / "yield").exists()
    assert diagnosd_yield(tmp_path, "--for", "25h").returncode == 2
    nowhere = diagnosd_yield(tmp_path / "none")
    assert nowhere.returncode == 1
    assert (
        f"no agent has its socket in {tmp_path}/none; where it is elsewhere, --socket PATH names it" in nowhere.stderr
    )


def test_what_is_read_once_meanwhile_says_what_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "yield").write_text("")
    command = [sys.executable, "-m", "diagnosd", "read", "--once", "--socket", str(tmp_path / "probe.sock")]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stderr
    assert "GPUs, RDMA ports, NICs' drivers, disks and the inventory are left alone until " in said


@pytest.mark.parametrize("to", ["/proc/uptime", "/proc", "there"])
def test_a_yield_file_that_is_a_link_is_nothing(tmp_path: Path, to: str) -> None:
    """In /tmp anybody may make one, and what it leads to is root's, and always new."""
    (tmp_path / "there").write_text("")
    (tmp_path / "yield").symlink_to(to)
    assert yields.until([tmp_path / "yield"], time.time()) == 0.0


def test_a_yield_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "yield").mkdir()
    told = diagnosd_yield(tmp_path)
    assert f"{tmp_path}/yield cannot be written: Is a directory" in told.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["yield"]
