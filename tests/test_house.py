"""The tree, the wheel and the names."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `git archive` of what is committed, unpacked."""
    folder = tmp_path_factory.mktemp("tree")
    try:
        archive = subprocess.run(["git", "-C", ROOT, "archive", "HEAD"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no git history to make an archive from: {error}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="tar")
    return folder


def test_the_wheel_holds_every_file_of_the_packages_and_no_other(tree: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, tree]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    written = {
        str(path.relative_to(tree))
        for folder in (tree / "diagnosd", tree / "diagnosd/collectors", tree / "diagnosd/analysis")
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert shipped == written


def test_the_bare_names_of_the_two_folders_are_not_importable_outside_the_tree() -> None:
    for name in ("collectors", "analysis"):
        run = subprocess.run(
            [sys.executable, "-I", "-c", f"import {name}"], capture_output=True, text=True, check=False
        )
        assert "ModuleNotFoundError" in run.stderr
