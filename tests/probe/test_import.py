"""How the probe comes into a process: a folder on PYTHONPATH, and `import torch`. A made-up torch serves: nothing of
PyTorch's is used before it is imported.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from observed import PATH, Launch

from diagnosd.probe.identity import OFF, is_off

SEES = "import sys; print(sorted(name for name in sys.modules if name.partition('.')[0] == 'diagnosd'))"


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A folder with a package of the name torch, of unknown shape, and a sitecustomize of the user's."""
    folder = tmp_path / "library"
    (folder / "torch").mkdir(parents=True)
    (folder / "torch/__init__.py").write_text("import sys\n__version__ = '0.1'\n")
    (folder / "sitecustomize.py").write_text("import os\nos.environ['MINE'] = 'ran'\n")
    return folder


def on_path(*folders: Path) -> str:
    return ":".join(map(str, folders))


def test_without_torch_nothing_of_ours_is_loaded(launch: Launch) -> None:
    assert launch(None, "-c", SEES).stdout == "[]\n"


def test_nothing_but_the_standard_library_is_loaded_with_it(launch: Launch) -> None:
    done = launch(
        None,
        "-c",
        "import sys; before = set(sys.modules); from diagnosd import probe; probe.live().register()\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before} - {'diagnosd'}\n"
        "print(sorted(new - sys.stdlib_module_names))",
    )
    assert done.stdout == "[]\n"


def test_a_process_that_is_no_rank_is_left_alone(launch: Launch, library: Path) -> None:
    done = launch(None, "-c", "import torch; " + SEES, PYTHONPATH=on_path(PATH, library), DIAGNOSD_JOB="")
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize("variable", ["RANK", "SLURM_PROCID", "DIAGNOSD_JOB"])
def test_a_rank_is_one_by_any_of_three_variables(launch: Launch, library: Path, variable: str) -> None:
    environ = {"DIAGNOSD_JOB": "", variable: "0", "PYTHONPATH": on_path(PATH, library)}
    assert "diagnosd.probe.pytorch" in launch(None, "-c", "import torch; " + SEES, **environ).stdout


def test_a_torch_of_unknown_shape_switches_the_probe_off_and_the_script_goes_on(launch: Launch, library: Path) -> None:
    done = launch(None, "-c", "import torch; print(torch.__version__)", PYTHONPATH=on_path(PATH, library))
    assert (done.returncode, done.stdout) == (0, "0.1\n")
    assert done.stderr.count("switched itself off") == 1
    assert "unknown shape" in done.stderr


def test_switched_off_it_is_not_loaded(launch: Launch, library: Path) -> None:
    environ = {"DIAGNOSD": "off", "PYTHONPATH": on_path(PATH, library)}
    assert launch(None, "-c", "import torch; " + SEES, **environ).stdout == "[]\n"


def test_what_switches_it_off_before_it_is_loaded_is_what_switches_it_off_afterwards() -> None:
    tree = ast.parse((PATH / "sitecustomize.py").read_text())
    (values,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_OFF"
    )
    assert values == OFF
    assert all(is_off({"DIAGNOSD": value.upper()}) for value in values)
    assert not is_off({})


def test_an_isolated_python_is_not_observed_and_not_disturbed(launch: Launch) -> None:
    done = launch(None, "-I", "-c", "import sys; print('diagnosd.probe' in sys.modules)")
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_a_sitecustomize_that_ours_hides_is_run(launch: Launch, library: Path) -> None:
    script = "import os, sitecustomize; print(os.environ.get('MINE'), sitecustomize.__file__)"
    done = launch(None, "-c", script, PYTHONPATH=on_path(PATH, library))
    assert done.stdout == f"ran {library / 'sitecustomize.py'}\n"


def test_there_is_one_probe_whoever_imports_it(launch: Launch, library: Path) -> None:
    """Also where the training environment has another diagnosd installed."""
    (library / "diagnosd").mkdir()
    (library / "diagnosd/__init__.py").write_text("raise RuntimeError('an older one')\n")
    script = (
        "import sys, torch; from diagnosd import probe; print(probe is sys.modules['diagnosd.probe'], probe.__file__)"
    )
    done = launch(None, "-c", script, PYTHONPATH=on_path(PATH, library))
    assert done.stdout == f"True {PATH.parent / '__init__.py'}\n"


def test_of_the_import_hook_nothing_is_left_on_the_module(launch: Launch, library: Path) -> None:
    script = "import torch; print(type(torch.__loader__).__name__, torch.__loader__ is torch.__spec__.loader)"
    done = launch(None, "-c", script, PYTHONPATH=on_path(PATH, library))
    assert done.stdout == "SourceFileLoader True\n"
