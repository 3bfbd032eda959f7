"""What it costs: `python -m tests.benchmarks` for all of it, `python -m tests.benchmarks.NAME` for one."""
