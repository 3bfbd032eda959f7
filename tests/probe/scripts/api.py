"""A loop of the standard library that names its steps and phases. Also run by Python 3.8."""

import sys
import time

from diagnosd import probe

steps, seconds = int(sys.argv[1]), float(sys.argv[2])
for number in range(steps):
    with probe.step(number + 1000, samples=8):
        with probe.phase("data_wait"):
            time.sleep(seconds)
        with probe.phase("forward"):
            time.sleep(2 * seconds)
        with probe.phase("comm", bytes=4096):
            time.sleep(seconds)
        probe.tokens(100)
print("trained", sys.version_info[:2], sorted(name for name in sys.modules if name == "torch"))
