"""All figures as one table, each measured in a process of its own: `python -m tests.benchmarks`.

The exit code is 1 where one of them could not be measured, and says which.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys

from .table import machine

NAMES = ("start", "codec", "replay", "probe")
NEEDS = {"probe": "torch"}


def main() -> int:
    print(f"{machine()}\n", flush=True)
    failed = []
    for name in NAMES:
        if name in NEEDS and not importlib.util.find_spec(NEEDS[name]):
            print(f"{name}: not measured, there is no {NEEDS[name]}", flush=True)
        elif subprocess.run([sys.executable, "-m", f"tests.benchmarks.{name}"], check=False).returncode:
            failed.append(name)
    if failed:
        print(f"not measured: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
