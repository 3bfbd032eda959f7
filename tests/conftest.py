"""What cannot be had on a machine is skipped with its reason; with DIAGNOSD_TEST_ALL=1 a skip is a failure."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

NO_SKIPS = os.environ.get("DIAGNOSD_TEST_ALL") == "1"


def _forbid(report: pytest.TestReport | pytest.CollectReport) -> None:
    if NO_SKIPS and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped although DIAGNOSD_TEST_ALL=1: {report.longrepr}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _forbid(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _forbid(report)
    return report
