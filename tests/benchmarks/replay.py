"""Field values a second from a recording to its verdict, on one core: `python -m tests.benchmarks.replay`."""

from __future__ import annotations

import io
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median
from time import process_time

from diagnosd import analyzer, recording
from diagnosd.point import encode

from . import table
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


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mix.lp.zst"
        lines, values = record(path)
        replay(path)  # the first one loads and compiles
        rates, told = [], set()
        for _ in range(ROUNDS):
            begin = process_time()
            told.add(replay(path))
            rates.append(values / (process_time() - begin))
    spread = f"(min {min(rates) / 1e6:.2f}, max {max(rates) / 1e6:.2f} of {ROUNDS})"
    table.row(f"replay to verdict, {lines:,} lines", f"{table.rate(median(rates))} {spread}")
    if len(told) != 1:
        raise SystemExit("the same recording gave different verdicts")


if __name__ == "__main__":
    main()
