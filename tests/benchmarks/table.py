"""One table of figures, whichever program measured them: a row is printed as soon as it is known."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

WIDTH = 62


def row(what: str, measured: str) -> None:
    print(f"{what:{WIDTH}}  {measured}", flush=True)


def rate(values_a_second: float) -> str:
    return f"{values_a_second / 1e6:.2f} M field values/s"


def machine() -> str:
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    name = models[0].partition(":")[2].strip() if models else platform.machine()
    try:
        torch = f"torch {version('torch')}"
    except PackageNotFoundError:
        torch = "no torch"
    return f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}, {torch}"
