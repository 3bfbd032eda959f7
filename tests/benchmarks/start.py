"""How long somebody waits for `diagnosd --help`: `python -m tests.benchmarks.start`."""

from __future__ import annotations

import subprocess
import sys
from statistics import median
from time import perf_counter

from .table import row

TIMES = 20


def main() -> None:
    seconds = []
    for _ in range(TIMES):
        begin = perf_counter()
        subprocess.run([sys.executable, "-m", "diagnosd", "--help"], stdout=subprocess.DEVNULL, check=True)
        seconds.append(perf_counter() - begin)
    row(f"`diagnosd --help`, median of {TIMES}", f"{1e3 * median(seconds):.0f} ms (max {1e3 * max(seconds):.0f})")


if __name__ == "__main__":
    main()
