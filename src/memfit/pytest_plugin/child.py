"""One test on the made-up GPU, in a fork of a process that has torch loaded and has not touched CUDA."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from memfit.pytest_plugin.measuring import MEASURE, TestAccount


def run(
    *,
    nodeid: str,
    folder: str,
    rootdir: str,
    path: Sequence[str],
    options: Mapping[str, Any],
    device: Mapping[str, Any],
) -> dict[str, Any]:
    """Run one test and give its reports.

    Args:
        nodeid: of the test, from ``rootdir``.
        folder: where pytest was started.
        rootdir: the session's.
        path: ``sys.path`` of the session.
        options: its options, changed for a session of one test.
        device: key and sizes of the GPU.

    Returns:
        ``reports`` as pytest serialises them, and ``errors``: what went wrong outside of the test.
    """
    from memfit.dryrun import substitutes
    from memfit.dryrun.probe import Probe

    os.chdir(folder)
    sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
    probe = Probe(steps=None, end=lambda: None)
    substitutes.install(probe.note_missing)
    probe.start()
    config = pytest.Config.fromdictargs(dict(options), [os.path.join(rootdir, nodeid)])
    config.stash[MEASURE] = lambda: _account(probe, device)
    reports = _Reports(config)
    config.pluginmanager.register(reports, "memfit-reports")
    config.hook.pytest_cmdline_main(config=config)
    return {"reports": reports.tests, "errors": reports.errors}


class _Reports:
    """A plugin that keeps what pytest reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.tests: list[dict[str, Any]] = []
        self.errors: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A phase of the test."""
        hook = self._config.hook.pytest_report_to_serializable
        self.tests.append(hook(config=self._config, report=report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that could not be read."""
        if report.failed:
            self.errors.append(report.longreprtext)

    def pytest_internalerror(self, excrepr: Any) -> None:
        """pytest's own failure."""
        self.errors.append(str(excrepr))


def _account(probe: Any, device: Mapping[str, Any]) -> TestAccount:
    """What the whole process has needed so far, with what the test's fixtures hold."""
    from memfit.dryrun.measured import measure_devices

    fullest = measure_devices(probe, device, {"gpu": device["key"]})[0]
    account = fullest.account
    return TestAccount(
        gpu=f"the made-up {device['key']}",
        peaks={
            "requested": account.peak_requested_bytes,
            "allocated": account.peak_allocated_bytes,
            "reserved": account.peak_reserved_bytes,
            "device": account.device_total_bytes,
        },
        by_category=account.peak_by_category,
        trace=fullest.history.trace,
        context_bytes=account.context_bytes,
    )
