"""`diagnosd run`: real commands, real signals, real terminals; and the verdict that a replay repeats."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from diagnosd.liveline import LiveLine
from diagnosd.point import Point
from diagnosd.recording import read
from diagnosd.run import _own_folder, _remove, _remove_left_behind

ROOT = Path(__file__).parents[1]
DIAGNOSD = [sys.executable, "-m", "diagnosd"]
PATIENCE_S = 60.0

TRAINING = """
import sys, time
from diagnosd import probe
for number in range(int(sys.argv[1])):
    with probe.step(samples=8):
        with probe.phase("data_wait"):
            time.sleep(0.001 if number < 150 else 0.12)
        with probe.phase("forward"):
            time.sleep(0.03)
"""


def diagnosd(
    *arguments: str | Path, env: dict[str, str] | None = None, **more: Any
) -> subprocess.CompletedProcess[str]:
    options = {"capture_output": True, "text": True, "timeout": PATIENCE_S, "cwd": ROOT, **more}
    return subprocess.run([*DIAGNOSD, *map(str, arguments)], check=False, env={**os.environ, **(env or {})}, **options)


def sh(script: str) -> tuple[str, str, str, str]:
    return ("--", "sh", "-c", script)


def python(script: str, *arguments: str) -> tuple[str, ...]:
    return ("--", sys.executable, "-c", textwrap.dedent(script), *arguments)


def points_of(path: Path) -> list[Point]:
    return [each for batch in read(path) for each in batch]


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -TERM $$", 143), ("exit 255", 255)]
)
def test_the_exit_code_is_the_commands(script: str, code: int) -> None:
    assert diagnosd("run", *sh(script)).returncode == code


def test_no_such_command_is_127_and_says_so() -> None:
    done = diagnosd("run", "--", "no-such-command")
    assert (done.returncode, done.stderr) == (127, "diagnosd: no-such-command: no such command\n")


def test_a_folder_and_an_empty_name_are_said_to_be_no_commands(tmp_path: Path) -> None:
    for name, code, said in (
        (tmp_path, 126, f"{tmp_path} is a folder, not a command"),
        ("", 127, "the name of the command is empty"),
    ):
        done = diagnosd("run", "--", name)
        assert (done.returncode, done.stderr) == (code, f"diagnosd: {said}\n")


@pytest.mark.parametrize("text", ["#!/bin/sh\n", "no first line\n"])
def test_a_command_that_is_not_executable_is_126(tmp_path: Path, text: str) -> None:
    script = tmp_path / "script"
    script.write_text(text)
    script.chmod(0o644 if text.startswith("#!") else 0o755)
    done = diagnosd("run", "--", script)
    assert (done.returncode, done.stderr.count("\n")) == (126, 1)
    assert not text.startswith("#!") or done.stderr == f"diagnosd: {script} is not executable\n"


def test_a_script_whose_interpreter_is_missing_is_127(tmp_path: Path) -> None:
    (tmp_path / "script").write_text("#!/no/such/interpreter\n")
    (tmp_path / "script").chmod(0o755)
    done = diagnosd("run", "--", tmp_path / "script")
    assert done.returncode == 127
    assert "the interpreter in its first line is missing" in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--record", "/no/such/folder/x.lp"], "cannot be written: there is no folder /no/such/folder"),
        (["--record", "no/folder/"], "no/folder/: cannot be made: there is no folder no"),
        (["--record", "x.txt"], r"a recording is named \*.lp"),
        (["--cluster", "bad.toml"], "bad.toml: fabric: found 7; allowed is a table"),
    ],
)
def test_what_cannot_be_observed_is_not_started_and_125(tmp_path: Path, options: list[str], said: str) -> None:
    (tmp_path / "bad.toml").write_text("fabric = 7\n")
    done = diagnosd("run", *options, *sh("touch started"), cwd=tmp_path)
    assert done.returncode == 125
    assert re.search(said, done.stderr)
    assert {path.name for path in tmp_path.iterdir()} == {"bad.toml"}


@pytest.mark.parametrize("limit", ["-n 8", "-n 11", "-n 12", "-n 14"])
def test_where_files_are_too_few_to_observe_it_is_not_started_else_the_code_is_its_own(
    tmp_path: Path, limit: str
) -> None:
    started = tmp_path / "started"
    ours = shlex.join([*DIAGNOSD, "run", *sh(f"touch {started}; exit 5")])
    done = subprocess.run(["sh", "-c", f"ulimit {limit}; {ours}"], check=False, capture_output=True, cwd=ROOT)
    assert done.returncode == (5 if started.exists() else 125)


def test_a_command_is_waited_for_when_its_observation_fails() -> None:
    code = """
from diagnosd import agent, cli
async def fails(self, stop):
    raise KeyError("x")
agent.Agent._keep_time = fails
cli.main()
"""
    command = [sys.executable, "-c", code, "run", *sh("sleep 0.3; echo its end; exit 5")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout) == (5, "its end\n")
    assert done.stderr.startswith("diagnosd: the observation failed: KeyError: 'x'\n")


def test_stdin_stdout_and_stderr_are_the_commands(tmp_path: Path) -> None:
    done = diagnosd("run", *sh("cat; echo problem >&2"), input="through\n")
    assert done.stdout == "through\n"
    assert done.stderr.startswith("problem\n")


def test_options_after_the_command_are_the_commands() -> None:
    assert diagnosd("run", "echo", "--output", "json", "-h").stdout == "--output json -h\n"


def test_the_command_finds_its_job_the_socket_and_the_probe_before_the_users_own_path() -> None:
    script = 'echo "$DIAGNOSD_JOB|$DIAGNOSD_HOST|$PYTHONPATH"; test -S "$DIAGNOSD_SOCKET" && echo socket'
    done = diagnosd("run", "--job", "mine", "--host", "n07", *sh(script), env={"PYTHONPATH": "/users/own"})
    probe = ROOT / "diagnosd/probe/path"
    assert done.stdout.splitlines() == [f"mine|n07|{probe}:/users/own", "socket"]


def test_the_threads_of_our_own_arithmetic_are_not_imposed_on_the_command() -> None:
    names = "OPENBLAS_NUM_THREADS OMP_NUM_THREADS"
    env = {name: value for name, value in os.environ.items() if name not in names.split()}
    done = subprocess.run([*DIAGNOSD, "run", *sh("env")], env=env, capture_output=True, text=True, check=True, cwd=ROOT)
    assert not [line for line in done.stdout.splitlines() if line.split("=")[0] in names.split()]


def test_signals_that_python_ignores_are_the_commands_again() -> None:
    done = diagnosd("run", *sh("grep -E 'SigIgn|SigBlk' /proc/self/status"))
    masks = dict(line.split(":\t") for line in done.stdout.splitlines())
    assert int(masks["SigBlk"], 16) == 0
    assert not int(masks["SigIgn"], 16) & (1 << (signal.SIGPIPE - 1))


def test_what_was_ignored_stays_ignored() -> None:
    done = subprocess.run(
        ["nohup", *DIAGNOSD, "run", *sh("kill -HUP $PPID; kill -HUP $$; echo alive")],
        capture_output=True, text=True, check=False, cwd=ROOT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "alive\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_to_us_reaches_the_command_once(number: signal.Signals) -> None:
    script = """
        import signal, sys, time
        seen = []
        signal.signal(int(sys.argv[1]), lambda *_: seen.append(1))
        print("ready", flush=True)
        while not seen:
            time.sleep(0.01)
        time.sleep(0.2)
        print(len(seen))
        sys.exit(9)
    """
    command = [*DIAGNOSD, "run", *python(script, str(int(number)))]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # noqa: PLW1509 - a shell has some ignored in jobs
    ) as process:  # fmt: skip
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.read() == "1\n"
    assert process.returncode == 9


def test_a_signal_that_ends_the_command_leaves_a_verdict() -> None:
    command = [*DIAGNOSD, "run", *sh("echo ready; exec sleep 60")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.readline()
        process.terminate()
        said = process.stderr.read()
    assert process.returncode == 143
    assert "sh was ended by SIGTERM" in " ".join(said.split())


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("--", "true"), "true exited with 0, and nothing in it trained with PyTorch"),
        (
            ("--", sys.executable, "no_such_script.py"),
            "exited with 2 (its own output says why), until then nothing in it trained",
        ),
        (python("print(1)"), "exited with 0, and nothing in it trained with PyTorch"),
        (
            python("from diagnosd import probe\nprobe.step().__enter__()\nimport time; time.sleep(1)"),
            "no rank reported",
        ),
        (sh("kill -9 $$"), "sh was ended by SIGKILL, until then nothing in it trained with PyTorch"),
    ],
)
def test_a_command_without_a_step_is_said_in_a_sentence(command: tuple[str, ...], said: str) -> None:
    done = diagnosd("run", *command)
    assert said in " ".join(done.stderr.split())
    ours = done.stderr[done.stderr.index("diagnosd: ") :].splitlines()
    assert max(map(len, ours)) <= max(80, len(sys.executable))
    assert "Traceback" not in done.stderr


def test_a_probe_that_is_switched_off_is_named() -> None:
    done = diagnosd("run", "--", "true", env={"DIAGNOSD": "off"})
    said = "diagnosd: no rank reported a step: DIAGNOSD=off is set, which switches the probe off."
    assert done.stderr.split() == said.split()


SWITCHED_OFF = """
import time
from diagnosd import probe
for number in range({steps}):
    with probe.step():
        time.sleep(0.02)
probe.step().__enter__()
probe.live().off("too dear")
time.sleep(1.5)
"""


def test_a_probe_that_switched_itself_off_before_the_first_step_is_the_reason_for_the_silence() -> None:
    done = diagnosd("run", *python(SWITCHED_OFF.format(steps=0)))
    assert "no rank reported a step" in done.stderr
    assert "exited with 0; probe off: too dear" in " ".join(done.stderr.split())


def test_a_job_whose_probe_switched_itself_off_is_not_called_healthy() -> None:
    done = diagnosd("run", *python(SWITCHED_OFF.format(steps=30)))
    assert done.returncode == 0
    assert "Nothing found in job" not in done.stderr
    assert re.search(r"unseen +\d+ % of the job: rank 0 at [0-9:]{8} UTC: probe off: too dear", done.stderr)


@pytest.fixture(scope="module")
def starving(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A job of one rank whose loader falls behind, recorded, with a declared cluster."""
    folder = tmp_path_factory.mktemp("starving")
    (folder / "cluster.toml").write_text('name = "lab"\nprice_per_gpu_hour = 2.5\n')
    options = ["--job", "t", "--host", "n01", "--cluster", f"{folder}/cluster.toml", "--record", f"{folder}/rec.lp.zst"]
    return folder, diagnosd("run", *options, "--output", "json", *python(TRAINING, "210"), timeout=120)


def test_a_job_that_starves_is_told_while_it_runs_and_when_it_ends(
    starving: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    _, done = starving
    documents = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each.get("cause") for each in documents] == ["data_starvation", None]
    assert documents[0]["cluster"] == "lab"
    assert documents[-1]["jobs"]["t"]["steps"] == 210
    assert "diagnosd: confirmed: Data starvation" in done.stderr


def test_a_replay_of_the_recording_gives_the_same_bytes(
    starving: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = starving
    assert diagnosd("replay", folder / "rec.lp.zst", "--output", "json").stdout == done.stdout


def test_the_recording_holds_what_was_declared_and_every_step(
    starving: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, _ = starving
    points = points_of(folder / "rec.lp.zst")
    declared = [each.fields["spec"] for each in points if each.series.measurement == "diagnosd_cluster"]
    steps = [each.fields["step"] for each in points if each.series.measurement == "diagnosd_step"]
    states = [each.fields["state"] for each in points if each.series.measurement == "diagnosd_rank"]
    assert json.loads(str(declared[0]))["price_per_gpu_hour"] == 2.5
    assert sorted(steps) == list(range(210))
    assert (states[0], states[-1]) == ("running", "exited")


def test_a_folder_is_analyzed_whole_whichever_host_wrote(tmp_path: Path) -> None:
    options = ["--job", "t", "--record", f"{tmp_path}/"]
    other = subprocess.Popen(
        [*DIAGNOSD, "run", *options, "--host", "n02", *python(TRAINING, "60")], cwd=ROOT, stderr=subprocess.DEVNULL,
        env={**os.environ, "RANK": "1", "WORLD_SIZE": "2"},
    )  # fmt: skip
    ranked = {"RANK": "0", "WORLD_SIZE": "2"}
    done = diagnosd("run", *options, "--host", "n01", "--output", "json", *python(TRAINING, "60"), env=ranked)
    assert other.wait(PATIENCE_S) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"n01.lp.zst", "n02.lp.zst"}
    assert json.loads(done.stdout.splitlines()[-1])["jobs"]["t"]["hosts"] == ["n01", "n02"]


def test_a_job_that_every_host_would_name_otherwise_is_to_be_named_where_several_record(tmp_path: Path) -> None:
    unnamed = "diagnosd: only this host calls the job "
    assert unnamed in diagnosd("run", "--record", f"{tmp_path}/", "--", "true").stderr
    assert unnamed not in diagnosd("run", "--record", f"{tmp_path}/", "--job", "t", "--", "true").stderr
    slurm = {"SLURM_JOB_ID": "7"}
    assert unnamed not in diagnosd("run", "--record", f"{tmp_path}/", "--", "true", env=slurm).stderr
    assert unnamed not in diagnosd("run", "--record", f"{tmp_path}/a.lp", "--", "true").stderr


def test_a_file_in_the_folder_that_cannot_be_read_is_said_and_the_others_are_judged(tmp_path: Path) -> None:
    (tmp_path / "n02.lp").write_text("# diagnosd-recording 2 {}\n")
    done = diagnosd("run", "--job", "t", "--record", f"{tmp_path}/", *python(TRAINING, "30"))
    (said,) = [line for line in done.stderr.splitlines() if "n02" in line]
    assert said.startswith(f"diagnosd: {tmp_path}/n02.lp:1: a recording of version 2")
    assert said.endswith("; the verdict covers what was read")
    assert "Job t: 30 steps" in done.stderr


SEQUENCE = re.compile(r"\x1b(?:[78]|\[[0-9;]*[A-Za-z])")


class Terminal:
    """What a terminal of 24 rows shows, as far as scrolling regions and cursor movements go."""

    def __init__(self, rows: int) -> None:
        self.rows = [""] * rows
        self.row = self.column = 0
        self.saved = (0, 0)
        self.bottom = rows - 1

    def feed(self, text: str) -> None:
        at = 0
        while at < len(text):
            found = SEQUENCE.match(text, at)
            if found:
                self._obey(found[0])
                at = found.end()
            else:
                self._put(text[at])
                at += 1

    def _put(self, character: str) -> None:
        if character == "\r":
            self.column = 0
        elif character == "\n":
            if self.row == self.bottom:
                self.rows[: self.bottom + 1] = [*self.rows[1 : self.bottom + 1], ""]
            elif self.row < len(self.rows) - 1:
                self.row += 1
        else:
            line = self.rows[self.row].ljust(self.column)
            self.rows[self.row] = line[: self.column] + character + line[self.column + 1 :]
            self.column += 1

    def _obey(self, sequence: str) -> None:
        numbers = [int(part) for part in re.findall(r"\d+", sequence[2:])]
        match sequence[-1]:
            case "7":
                self.saved = (self.row, self.column)
            case "8":
                self.row, self.column = self.saved
            case "r":
                self.bottom = (numbers[1] if numbers else len(self.rows)) - 1
                self.row = self.column = 0
            case "H":
                self.row, self.column = numbers[0] - 1, numbers[1] - 1
            case "A":
                self.row -= 1
            case "K":
                self.rows[self.row] = self.rows[self.row][: self.column]


def on_a_terminal(command: Sequence[str], rows: int = 24) -> Iterator[str]:
    """What appears on a terminal, as it appears."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, 80, 0, 0))
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, start_new_session=True,
        env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    while True:
        try:
            yield os.read(ours, 4096).decode()
        except OSError:  # EIO: nobody has it open any more
            break
    os.close(ours)
    process.wait(PATIENCE_S)


def test_the_live_line_stays_at_the_foot_and_the_commands_output_above_it() -> None:
    script = 'for n in $(seq 40); do echo "line $n"; sleep 0.05; done; sleep 1.2; printf "no newline"; sleep 1.2'
    terminal = Terminal(24)
    screens = []
    for text in on_a_terminal([*DIAGNOSD, "run", *sh(script)]):
        terminal.feed(text)
        screens.append(list(terminal.rows))
    live = [screen for screen in screens if screen[-1].startswith("diagnosd: waiting for the first steps")]
    assert live
    assert live[-1][-3:-1] == ["line 40", "no newline"]
    assert live[-1][-20:-2] == [f"line {number}" for number in range(23, 41)]
    assert terminal.bottom == 23
    assert not [row for row in terminal.rows if row.startswith("diagnosd: waiting for the first steps")]


@pytest.mark.parametrize(("options", "name"), [([], ""), (["--job", "mine"], "mine  ")])
def test_the_live_line_has_a_jobs_name_where_somebody_gave_it_one(options: list[str], name: str) -> None:
    terminal = Terminal(24)
    lines = set()
    for text in on_a_terminal([*DIAGNOSD, "run", *options, *python(TRAINING, "149")]):
        terminal.feed(text)
        lines.add(terminal.rows[-1])
    assert any(re.match(rf"diagnosd: {name}\d+ steps  ", line) for line in lines)


def test_without_a_terminal_no_control_sequence_is_written() -> None:
    done = diagnosd("run", *sh("sleep 1.5"))
    assert "\x1b" not in done.stderr


def interrupted(*command: str) -> bytes:
    """What stands on a terminal on which Ctrl-C was typed when the command had said that it is ready."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *DIAGNOSD, "run", *command],
        stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env={**os.environ, "TERM": "dumb"},
    )  # fmt: skip
    os.close(theirs)
    said = b""
    deadline = time.monotonic() + PATIENCE_S
    typed = False
    while time.monotonic() < deadline:
        try:
            said += os.read(ours, 4096)
        except OSError:
            break
        if b"ready" in said and not typed:
            os.write(ours, b"\x03")
            typed = True
    process.wait(PATIENCE_S)
    os.close(ours)
    return said


def test_ctrl_c_on_the_terminal_reaches_the_command_once_and_the_verdict_is_given() -> None:
    script = """
        import signal, sys, time
        seen = []
        signal.signal(signal.SIGINT, lambda *_: seen.append(1))
        print("ready", flush=True)
        while not seen:
            time.sleep(0.01)
        time.sleep(0.3)
        print("times:", len(seen))
    """
    said = interrupted(*python(script))
    assert b"times: 1" in said
    assert b"exited with 0" in b" ".join(said.split())  # wrapped somewhere
    assert b"Traceback" not in said


def test_a_verdict_does_not_begin_in_the_row_of_the_ctrl_c() -> None:
    said = interrupted(*sh("echo ready; exec sleep 60")).replace(b"\r", b"")
    assert b"^C\ndiagnosd: no rank reported a step: sh was ended by SIGINT" in said


@pytest.mark.parametrize("output", ["text", "json"])
def test_the_exit_code_is_the_commands_also_when_nothing_can_be_written(output: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*DIAGNOSD, "run", "--output", output, *sh("exit 3")],
            stdout=full, stderr=full, check=False, cwd=ROOT, timeout=PATIENCE_S,
        )  # fmt: skip
    assert done.returncode == 3


def test_documents_that_cannot_be_written_are_said_and_the_exit_code_is_the_commands() -> None:
    with Path("/dev/full").open("w") as full:
        done = diagnosd(
            "run", "--output", "json", *sh("exit 3"), capture_output=False, stdout=full, stderr=subprocess.PIPE
        )
    assert done.returncode == 3
    assert "diagnosd: the output cannot be written: No space left on device\n" in done.stderr


def test_the_exit_code_is_the_commands_also_when_the_terminal_has_gone() -> None:
    ours, theirs = pty.openpty()
    command = [*DIAGNOSD, "run", *sh("echo ready >&2; read line; exit 4")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=theirs, cwd=ROOT) as process:
        os.close(theirs)
        while b"ready" not in os.read(ours, 4096):
            pass
        os.close(ours)
        process.communicate(b"\n", timeout=PATIENCE_S)
    assert process.returncode == 4


@pytest.fixture
def others() -> Iterator[tuple[Path, Path]]:
    """A folder and a link that bear such a name and are none of ours."""
    folder = Path(tempfile.mkdtemp(prefix="diagnosd-run-", dir="/tmp"))
    link = folder.with_name(f"{folder.name}-link")
    (folder / "diary").touch()
    link.symlink_to("/tmp")
    yield folder, link
    link.unlink()
    shutil.rmtree(folder)


def test_what_a_killed_run_left_behind_is_removed_by_the_next_one_and_nothing_else(others: tuple[Path, Path]) -> None:
    command = [*DIAGNOSD, "run", *sh("echo $$ $DIAGNOSD_SOCKET; exec sleep 60")]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as killed,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as running,
    ):
        assert killed.stdout
        assert running.stdout
        (orphan, left), (child, used) = killed.stdout.readline().split(), running.stdout.readline().split()
        killed.kill()
        killed.wait(PATIENCE_S)
        os.kill(int(orphan), signal.SIGKILL)
        diagnosd("run", "--", "true")
        assert not Path(left).parent.exists()
        assert Path(used).is_socket()
        assert (others[0] / "diary").exists()
        assert others[1].is_symlink()
        os.kill(int(child), signal.SIGKILL)
    assert not Path(used).parent.exists()


def test_a_run_that_just_starts_is_not_taken_for_one_that_was_killed() -> None:
    done = threading.Event()

    def tidy() -> None:
        while not done.is_set():
            _remove_left_behind()

    others = [threading.Thread(target=tidy) for _ in range(2)]
    for other in others:
        other.start()
    made = [_own_folder() for _ in range(200)]
    done.set()
    for other in others:
        other.join()
    for folder, lock in made:
        _remove(folder, lock)  # it is there
        os.close(lock)


def with_an_analysis(mistake: str, *arguments: str | Path) -> list[str]:
    """`diagnosd` whose analysis has this body for its last words."""
    code = f"""
import sys, time
from diagnosd import cli
with cli._analysis(1):
    from diagnosd.analysis import Analysis
def finish(self):
    {mistake}
Analysis.finish = finish
cli.main()
"""
    return [sys.executable, "-c", code, *map(str, arguments)]


def test_a_mistake_in_the_analysis_is_said_and_gives_no_verdict(tmp_path: Path) -> None:
    record = tmp_path / "rec.lp"
    command = with_an_analysis("raise KeyError('x')", "run", "--record", record, *sh("exit 3"))
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1] == (
        f"diagnosd: the analysis failed: KeyError: 'x'; the recording is whole, replay it: diagnosd replay {record}"
    )
    assert "Traceback" not in done.stderr
    assert "no rank reported" not in done.stderr
    assert points_of(record)


def test_a_mistake_in_the_analysis_without_a_recording_promises_none() -> None:
    command = with_an_analysis("raise KeyError('x')", "run", "--output", "json", *sh("exit 3"))
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.splitlines()[-1] == "diagnosd: the analysis failed: KeyError: 'x'"


def test_an_analysis_that_hangs_is_left_after_a_while() -> None:
    command = with_an_analysis("time.sleep(600)", "run", *sh("exit 3"))
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (3, "diagnosd: the analysis has not gone on for 5 s\n")


def test_a_signal_after_the_commands_end_ends_the_wait_for_the_verdict_and_leaves_nothing_behind() -> None:
    """Half a second behind the end of the command, so that nobody takes the signal for one that ended it."""
    command = with_an_analysis(
        "time.sleep(0.5); print('pending', flush=True); time.sleep(600)",
        "run", *sh("echo socket $DIAGNOSD_SOCKET; exit 3"),
    )  # fmt: skip
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    env = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=env) as process:
        os.close(theirs)
        said = ""
        while "pending" not in said:
            said += os.read(ours, 4096).decode()
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 3
        said += os.read(ours, 4096).decode()
    os.close(ours)
    found = re.search(r"socket (\S+)", said)
    assert found
    assert not Path(found[1]).parent.exists()
    assert "the verdict was not waited for" in said
    terminal = Terminal(24)
    terminal.feed(said)
    assert terminal.bottom == 23


def read_to(end: bytes, terminal: int) -> bytes:
    """All that comes until then; AssertionError where it does not come."""
    said, until = b"", time.monotonic() + PATIENCE_S
    while end not in said:
        ready, _, _ = select.select([terminal], [], [], max(0.0, until - time.monotonic()))
        assert ready, f"{end!r} does not come after {said[-200:]!r}"
        said += os.read(terminal, 4096)
    return said


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    yield ours, theirs
    os.close(theirs)
    os.close(ours)


def test_a_live_line_that_is_closed_stays_closed(terminal: tuple[int, int]) -> None:
    ours, theirs = terminal
    line = LiveLine(theirs)
    line.show("now")
    read_to(b"now", ours)
    line.close()
    line.show("later")
    os.write(theirs, b"end")
    assert b"later" not in read_to(b"end", ours)


def test_a_terminal_that_is_stopped_holds_up_nobody_and_shows_the_newest_when_it_goes_on(
    terminal: tuple[int, int],
) -> None:
    ours, theirs = terminal
    line = LiveLine(theirs)
    line.show("first")
    read_to(b"first", ours)
    termios.tcflow(theirs, termios.TCOOFF)  # as Ctrl-S does
    for number in range(10_000):
        line.show(f"number {number}.")
    termios.tcflow(theirs, termios.TCOON)
    said = read_to(b"number 9999.", ours)
    line.close()
    assert said.count(b"number") < 10
