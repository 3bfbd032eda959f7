"""All figures as one table, each measured in a process of its own: `python -m tests.benchmarks`.

The exit code is 1 where one of them could not be measured, and says which.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

from .table import machine

NAMES = ("start", "codec", "replay", "counterfactuals", "kernellog", "tick", "probe")
LACKS = {
    "probe": None if importlib.util.find_spec("torch") else "there is no torch",
    "tick": "it mounts a /sys of its own, as root" if os.geteuid() else None,
}


def main() -> int:
    print(f"{machine()}\n", flush=True)
    failed = []
    for name in NAMES:
        if lacks := LACKS.get(name):
            print(f"{name}: not measured, {lacks}", flush=True)
        elif subprocess.run([sys.executable, "-m", f"tests.benchmarks.{name}"], check=False).returncode:
            failed.append(name)
    if failed:
        print(f"not measured: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
