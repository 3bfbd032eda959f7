"""Field values a second from a recording to its verdict, on one core: `python -m tests.benchmarks.replay`."""

from __future__ import annotations

import io
import platform
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median
from time import process_time

from diagnosd import analyzer, recording
from diagnosd.point import encode

from .mix import mix

ROUNDS = 5
FLUSH = 72  # points: a second of the eight hosts, as the agent flushes


def record(path: Path) -> tuple[int, int]:
    """Lines and field values of the mix, recorded as agents do."""
    points = list(mix())
    with recording.Writer(path, cluster="bench") as writer:
        for at in range(0, len(points), FLUSH):
            writer.write(encode(points[at : at + FLUSH]))
            writer.flush()
    return len(points), sum(len(each.fields) for each in points)


def replay(path: Path) -> str:
    with redirect_stdout(io.StringIO()) as told:
        analyzer.replay(path, "json")
    return told.getvalue()


def machine() -> str:
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    name = models[0].partition(":")[2].strip() if models else platform.machine()
    return f"{name}, Python {platform.python_version()}"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mix.lp.zst"
        lines, values = record(path)
        replay(path)  # the first one loads and compiles
        rates, told = [], set()
        for _ in range(ROUNDS):
            begin = process_time()
            told.add(replay(path))
            rates.append(values / (process_time() - begin) / 1e6)
    print(
        f"replay  {median(rates):5.2f} M field values/s (min {min(rates):.2f}, max {max(rates):.2f} of {ROUNDS})"
        f" from {lines} lines with {values} values; {machine()}"
    )
    if len(told) != 1:
        raise SystemExit("the same recording gave different verdicts")


if __name__ == "__main__":
    main()
