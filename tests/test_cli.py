"""The command line: what it loads, what it says, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.main import get_command

from diagnosd.cli import app
from diagnosd.point import Point, Series
from diagnosd.point import encode as encode_points
from diagnosd.probe.message import Hello, encode, encode_hello
from diagnosd.recording import read

ROOT = Path(__file__).parents[1]
DIAGNOSD = [sys.executable, "-m", "diagnosd"]
PROBE = ROOT / "diagnosd/probe/path"
PATIENCE_S = 30.0
VERBS = get_command(app).commands  # type: ignore[attr-defined]


def diagnosd(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [*DIAGNOSD, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S, cwd=cwd)


def points_of(path: Path) -> list[Point]:
    return [each for batch in read(path) for each in batch]


ALL_MODULES = """
import sys
from diagnosd.cli import main
sys.argv[1:] = ["--help"]
try:
    main()
finally:
    print(*sys.modules)
"""


def test_help_loads_nothing_that_is_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", ALL_MODULES], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = set(done.stdout.split())
    assert "typer" in loaded
    assert not loaded & {"numpy", "aiohttp", "influxdb_client", "rich", "asyncio", "zstandard", "msgspec"}


def test_help_names_every_verb() -> None:
    said = diagnosd("--help").stdout
    assert {"run", "replay", "record", "agent", "read", "yield"} <= set(VERBS)
    assert all(re.search(rf"^  {verb} ", said, re.MULTILINE) for verb in VERBS)
    assert "..." not in said.partition("Commands:")[2]


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_has_a_sentence_and_an_example_that_parses(verb: str) -> None:
    said = VERBS[verb].help
    example = re.search(r"^Example: diagnosd (.*)$", said, re.MULTILINE)
    assert said.splitlines()[0].endswith(".")
    assert example
    arguments = example[1].split()[1:]
    assert VERBS[verb].make_context(verb, arguments, resilient_parsing=True)


@pytest.mark.parametrize(("verb", "name"), [(verb, each.name) for verb in VERBS for each in VERBS[verb].params])
def test_every_option_has_a_sentence(verb: str, name: str) -> None:
    (option,) = (each for each in VERBS[verb].params if each.name == name)
    assert (option.help or "").endswith(".")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--no-such-option"],
        ["no-such-verb"],
        ["run"],
        ["run", "--output", "xml", "--", "true"],
        ["run", "--host", "a/b", "--", "true"],
        ["run", "--cluster", "no-such.toml", "--", "true"],
        ["run", "--cluster", "/dev/zero", "--", "true"],
        ["replay"],
        ["replay", "x.lp", "--speed", "0"],
        ["replay", "x.lp", "--speed", "nan"],
        ["replay", "x.lp", "--speed", "fast"],
        ["replay", ""],
        ["record"],
        ["record", ""],
        ["agent"],
        ["agent", "--analyze", "--socket", ""],
        ["agent", "--host", ""],
        ["read", "--once", "--on-request"],
    ],
)
def test_a_usage_error_is_said_and_ends_with_2(arguments: Sequence[str]) -> None:
    done = diagnosd(*arguments)
    assert done.returncode == 2
    assert "Error" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("verb", "usage"), [("run", "[OPTIONS] CMD..."), ("replay", "[OPTIONS] PATH")])
def test_usage_is_written_as_in_manuals(verb: str, usage: str) -> None:
    said = diagnosd(verb, "--help").stdout
    assert said.splitlines()[0] == f"Usage: diagnosd {verb} {usage}"
    assert "list[str]" not in said


def test_the_folder_for_pythonpath_is_told_where_one_looks_for_it() -> None:
    assert diagnosd("--probe-path").stdout == f"{PROBE}\n"
    assert "--probe-path" in diagnosd("agent", "--help").stdout
    assert (PROBE / "sitecustomize.py").is_file()


def test_the_version_is_told() -> None:
    assert re.fullmatch(r"diagnosd \d+\.\d+\.\d+\S*\n", diagnosd("--version").stdout)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["replay", "missing.lp"], "missing.lp: no such recording"),
        (["replay", "loop.lp"], "loop.lp: cannot be read: Too many levels of symbolic links"),
        (["replay", "pipe.lp"], "pipe.lp: neither a file nor a folder"),
        (["replay", "text.lp"], "text.lp is no recording, or is damaged at its beginning: line 1: "),
        (["record", "pipe.lp"], "pipe.lp: exists and is no file: record under another name"),
        (["record", "missing/x.lp"], "missing/x.lp: cannot be written: there is no folder missing"),
        (["record", "missing/new/"], "missing/new/: cannot be made: there is no folder missing"),
        (["record", "text.lp/"], "text.lp/: cannot be made: File exists"),
        (["record", "text.lp"], "record under another name"),
        (["record", "new.lp", "--socket", "text.lp"], "text.lp is there and is no socket"),
        (["agent", "--analyze", "--socket", "text.lp"], "text.lp is there and is no socket"),
        (["record", "new.lp", "--socket", "text.lp/s"], "text.lp/s: there is no folder text.lp; name another path"),
        (["record", "new.lp", "--socket", "/proc/s"], "/proc/s: No such file or directory; name another path with"),
        (["agent", "--analyze", "--socket", "s", "--cluster", "text.lp"], "text.lp: not TOML"),
    ],
)
def test_an_error_says_what_was_tried_and_ends_with_1(tmp_path: Path, arguments: Sequence[str], said: str) -> None:
    (tmp_path / "text.lp").write_text("this is not a recording\n")
    (tmp_path / "loop.lp").symlink_to("loop.lp")
    os.mkfifo(tmp_path / "pipe.lp")
    done = diagnosd(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert said in done.stderr


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*DIAGNOSD, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def tell_steps(path: Path, count: int) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sender:
        sender.connect(str(path))
        sender.send(encode_hello(Hello(0, "t", 0, 1, 0, 0, os.getpid(), {}, time.time_ns())))
        for number in range(count):
            fields = {"step": number, "duration": 0.01}
            sender.send(encode(number, "diagnosd_step", fields, time.time_ns(), {"source": "probe"}))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_everything_that_was_accepted_is_written_when_the_agent_is_told_to_stop(
    tmp_path: Path, number: signal.Signals
) -> None:
    agent = start("agent", "--host", "n01", "--socket", tmp_path / "s", "--record", f"{tmp_path}/new/")
    wait_for(tmp_path / "s")
    tell_steps(tmp_path / "s", 500)
    agent.send_signal(number)
    _, said = agent.communicate(timeout=PATIENCE_S)
    steps = [each for each in points_of(tmp_path / "new/n01.lp.zst") if each.series.measurement == "diagnosd_step"]
    assert (agent.returncode, len(steps)) == (0, 500)
    where = f"diagnosd: recording n01 into {tmp_path}/new/n01.lp.zst; it sees jobs that have "
    assert said.startswith(f"{where}DIAGNOSD_SOCKET={tmp_path}/s and PYTHONPATH={PROBE} in their environment\n")
    assert not (tmp_path / "s").exists()


def test_an_agent_that_was_killed_loses_its_last_second_and_goes_on_in_the_same_file(tmp_path: Path) -> None:
    arguments = ("record", tmp_path / "n01.lp.zst", "--host", "n01", "--socket", tmp_path / "s")
    beats = []
    for _ in range(2):
        agent = start(*arguments)
        wait_for(tmp_path / "s")
        time.sleep(1.5)  # the first flush: a second of real time is what is at stake
        agent.kill()
        agent.communicate()
        points = points_of(tmp_path / "n01.lp.zst")
        beats.append(len([each for each in points if each.series.measurement == "diagnosd_agent"]))
        (tmp_path / "s").unlink()
    assert 0 < beats[0] < beats[1]


def test_what_is_declared_is_in_the_recording_under_the_clusters_name(tmp_path: Path) -> None:
    (tmp_path / "east.toml").write_text("[fabric]\nrate_gbps = 100\n")
    where = ("--host", "n01", "--socket", tmp_path / "s", "--cluster", tmp_path / "east.toml")
    agent = start("record", tmp_path / "n01.lp", *where)
    wait_for(tmp_path / "s")
    agent.terminate()
    agent.communicate(timeout=PATIENCE_S)
    reading = read(tmp_path / "n01.lp")
    points = [each for batch in reading for each in batch]
    declared = next(each for each in points if each.series.measurement == "diagnosd_cluster")
    assert declared.series.tag("cluster") == reading.header.cluster == "east"
    assert declared.fields == {"spec": '{"fabric":{"rate_gbps":100.0}}'}


def test_an_agent_that_analyzes_says_what_it_saw_when_it_ends(tmp_path: Path) -> None:
    agent = start("agent", "--analyze", "--host", "n01", "--socket", tmp_path / "s")
    wait_for(tmp_path / "s")
    tell_steps(tmp_path / "s", 20)
    agent.terminate()
    said, _ = agent.communicate(timeout=PATIENCE_S)
    assert agent.returncode == 0
    assert "Job t: 20 steps" in said


def test_a_reader_that_has_gone_away_is_no_error(tmp_path: Path) -> None:
    agent = start("record", tmp_path / "n01.lp", "--host", "n01", "--socket", tmp_path / "s")
    wait_for(tmp_path / "s")
    tell_steps(tmp_path / "s", 20)
    agent.terminate()
    agent.communicate(timeout=PATIENCE_S)
    reader, writer = os.pipe()
    os.close(reader)
    command = [*DIAGNOSD, "replay", str(tmp_path / "n01.lp"), "--output", "json"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    os.close(writer)
    assert done.stderr == ""


def test_an_output_that_cannot_be_written_is_not_blamed_on_the_recording(tmp_path: Path) -> None:
    point = Point(Series.of("mem", host="n01"), {"total": 1}, 1_700_000_000_000_000_000)
    (tmp_path / "n01.lp").write_bytes(encode_points([point]))
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*DIAGNOSD, "replay", str(tmp_path / "n01.lp")],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False, cwd=ROOT,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (
        1,
        "diagnosd: the output cannot be written: No space left on device\n",
    )


def test_a_name_from_the_environment_is_checked_like_one_that_is_given(tmp_path: Path) -> None:
    env = {**os.environ, "DIAGNOSD_HOST": "a/b"}
    command = [*DIAGNOSD, "record", str(tmp_path / "n01.lp"), "--socket", str(tmp_path / "s")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=env, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert "'a/b' is no host name" in done.stderr


def test_a_name_that_is_far_too_long_is_not_repeated_whole(tmp_path: Path) -> None:
    for arguments in (["--host", "n" * 3000], ["--host", "n01", "--socket", "s" * 3000]):
        said = diagnosd("record", tmp_path / "n01.lp", *arguments).stderr
        assert ("is no host name" in said) or ("at most 107 bytes" in said)
        assert len(said) < 400


def test_a_socket_named_in_the_environment_is_taken_where_none_is_given(tmp_path: Path) -> None:
    env = {**os.environ, "DIAGNOSD_SOCKET": str(tmp_path / "theirs")}
    command = [*DIAGNOSD, "record", str(tmp_path / "n01.lp")]
    agent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env)
    wait_for(tmp_path / "theirs")
    agent.terminate()
    agent.communicate(timeout=PATIENCE_S)
    assert agent.returncode == 0


def test_the_commands_exit_code_stands_when_nobody_reads_the_verdict() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [*DIAGNOSD, "run", "--output", "json", "--", "sh", "-c", "exit 3"]
    done = subprocess.run(command, stdout=writer, stderr=writer, check=False, cwd=ROOT)
    os.close(writer)
    assert done.returncode == 3


def test_a_verb_that_needs_the_analysis_says_how_to_install_it(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('No module named numpy', name='numpy')\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [*DIAGNOSD, "run", "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=env)
    assert (done.returncode, done.stderr) == (
        125,
        "diagnosd: numpy is not installed: pip install 'diagnosd[analysis]'\n",
    )


def test_a_mistake_of_our_own_is_one_line_that_says_where() -> None:
    code = "from diagnosd import cli; cli.app = lambda prog_name: 1 // 0; cli.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1
    assert re.fullmatch(
        r"diagnosd: a mistake of its own, please report it: ZeroDivisionError at \S+:1: .*\n", done.stderr
    )
