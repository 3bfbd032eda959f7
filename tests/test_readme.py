"""README tells the truth: what is generated in it is current, and what it says to type works."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import readme
from typer.main import get_command

from diagnosd.cli import app
from diagnosd.documents import cluster_from_toml
from diagnosd.recording import read

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PATIENCE_S = 120.0

VERBS = get_command(app).commands  # type: ignore[attr-defined]


def fenced(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


# Whole test suites, and what asks the network.
ELSEWHERE = re.compile(r"^(make|pip|apt-get) ")
CONSOLE = [block for block in fenced("console") if not all(map(ELSEWHERE.match, block.splitlines()))]
(API,) = fenced("python")
(TRAIN,) = fenced("py")  # two ranks, whose batches come slowly from the middle on
CLUSTER_TOML, JOB_TOML = fenced("toml")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where README's reader stands: the tree, and a training script."""
    for name in ("recordings", "diagnosd"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def environment() -> dict[str, str]:
    """With the commands of this Python's environment; nothing of ours is set."""
    names = {key: value for key, value in os.environ.items() if not key.startswith("DIAGNOSD")}
    names.pop("PYTHONPATH", None)
    return {**names, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@pytest.mark.parametrize("block", readme.blocks(README), ids=lambda block: block.name)
def test_what_is_generated_in_readme_is_current(block: readme.Block) -> None:
    assert block.text == readme.made(block), f"README.md is not current: {readme.REWRITE}"


@pytest.mark.parametrize("block", CONSOLE, ids=lambda block: block.splitlines()[-1].split(" #")[0])
def test_what_readme_says_to_type_works(block: str, folder: Path) -> None:
    if "torchrun" in block and not importlib.util.find_spec("torch"):
        pytest.skip("no torch in this Python")
    command = ["bash", "-eo", "pipefail", "-c", block]
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    if "train.py" in block:
        assert "Data starvation" in done.stdout


def test_readme_names_every_verb_and_every_option() -> None:
    for verb, command in VERBS.items():
        assert f"**`diagnosd {verb}" in README
        for option in command.params:
            assert option.param_type_name == "argument" or option.opts[0] in README


def test_the_exit_codes_that_readme_gives_are_those_of_the_program() -> None:
    def code(*arguments: str) -> int:
        command = [sys.executable, "-m", "diagnosd", *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, check=False).returncode

    assert code("run", "--", "sh", "-c", "kill -9 $$") == 128 + 9
    assert code("replay", "recordings") == code("replay", "no-such.lp") == 1
    assert code("replay") == 2
    assert code("run", "--record", "/no/such/x.lp", "--", "true") == 125
    assert code("run", "--", "README.md") == code("run", "--", "no-such-command") == 127
    assert code("run", "--", "./README.md") == 126


API_NEEDS = """
STEPS = 40
def load():
    while True:
        yield [0.0] * 32
def learn(batch):
    return bytes(1000)
def all_reduce(gradients):
    pass
"""


def test_the_loop_in_readme_tells_its_steps_and_phases(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(API_NEEDS + API)
    command = [sys.executable, "-m", "diagnosd", "run", "--record", str(tmp_path / "x.lp"), "--"]
    done = subprocess.run(
        [*command, sys.executable, str(tmp_path / "loop.py")],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    points = [point for batch in read(tmp_path / "x.lp") for point in batch]
    steps = [point.fields for point in points if point.series.measurement == "diagnosd_step"]
    assert [step["step"] for step in steps] == list(range(40))
    assert all({"data_wait", "forward", "comm"} <= step.keys() and step["samples"] == 32 for step in steps)


def test_the_loop_in_readme_runs_where_there_is_no_diagnosd(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(f"{API_NEEDS}{API}\nimport sys; assert 'diagnosd' not in sys.modules\n")
    command = [sys.executable, "-I", "-S", str(tmp_path / "loop.py")]  # without site-packages
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_cluster_toml_in_readme_is_understood_and_has_every_key() -> None:
    spec = cluster_from_toml(CLUSTER_TOML.encode(), "README.md")
    for document in (spec, spec.fabric, spec.node):
        assert document
        assert None not in msgspec.structs.astuple(document)


def test_the_job_in_readme_is_the_one_that_is_told() -> None:
    assert (ROOT / "tests/plan/llama-70b.toml").read_text() == JOB_TOML


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)]+)\)", README))
def test_a_link_in_readme_leads_somewhere(target: str) -> None:
    if target.startswith("#"):
        heads = re.findall(r"^#+ (.+)$", README, re.MULTILINE)
        assert target[1:] in {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
    else:
        assert (ROOT / target).exists()


def test_the_figures_of_the_bed_come_from_the_log_of_a_soak() -> None:
    runs = [("throttled_port-2", True, 4.0), ("throttled_port-2", True, 6.0), ("throttled_port-2", False, None)]
    log = [json.dumps({"scenario": name, "passed": passed, "delay_s": delay}) for name, passed, delay in runs]
    text = readme.bed("", log)
    assert re.search(r"^\| `throttled_port-2` \| .* \| 3 \| 2 \| 5.0 s \|$", text, re.MULTILINE)
    assert readme.UNMEASURED in text
    assert readme.bed(text, []) == text


def test_readme_is_short_enough_to_be_read() -> None:
    assert README.count("\n") - sum(block.text.count("\n") for block in readme.blocks(README)) <= 540
