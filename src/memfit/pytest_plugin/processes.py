"""The processes in which GPU tests run: one with torch loaded, and a fork of it for each test."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from memfit.core.devices import find_gpu
from memfit.core.errors import MemfitError
from memfit.dryrun.worker import Worker, preload_for

_CHILD = "memfit.pytest_plugin.child:run"
_PLAIN = (str, int, float, bool, type(None))
_NOT_FOR_CHILDREN: Mapping[str, Any] = {
    "numprocesses": None,
    "maxprocesses": None,
    "dist": "no",
    "distload": False,
    "tx": [],
    "looponfail": False,
    "usepdb": False,
    "trace": False,
    "xmlpath": None,
    "report_log": None,
    "collectonly": False,
    "lf": False,
    "failedfirst": False,
    "newfirst": False,
    "stepwise": False,
    "keyword": "",
    "markexpr": "",
    "deselect": [],
    "maxfail": 0,
    "basetemp": None,
    "pyargs": False,
}
"""Options of the whole session that a single test must not repeat."""


class Processes:
    """Runs tests in forks of a process that has torch loaded; starts it with the first test.

    Args:
        config: of the session.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._worker: Worker | None = None

    def run(self, item: pytest.Item, gpu: str) -> list[pytest.TestReport]:
        """The reports of one test: set-up, call, tear-down."""
        try:
            device = find_gpu(gpu)
            if self._worker is None:
                modules = ("torch", "?torch._dynamo", "pytest", *preload_for(f"{item.path}:test")[1:])
                self._worker = Worker(device, preload=modules)
            answer = self._worker.call(
                _CHILD,
                gpu=device,
                nodeid=item.nodeid,
                folder=str(self._config.invocation_params.dir),
                rootdir=str(self._config.rootpath),
                path=[entry for entry in sys.path if entry],
                options=self._options(),
                device={name: getattr(device, name) for name in _FIGURES},
            )
        except MemfitError as error:
            return [_failed(item, str(error))]
        reports = [self._report(data) for data in answer["reports"]]
        if not any(report.when == "teardown" for report in reports):
            text = "\n".join(answer["errors"]) or "the test's process ended before the test did"
            reports.append(_failed(item, text))
        return reports

    def close(self) -> None:
        """End the process."""
        if self._worker is not None:
            self._worker.close()

    def _options(self) -> dict[str, Any]:
        """The session's options, as far as they are plain values, for a session of one test."""
        options = {name: value for name, value in vars(self._config.option).items() if _is_plain(value)}
        plugins = [name for name in options.get("plugins") or [] if name != "no:terminal"]
        ini = self._config.inipath
        return {
            **{name: value for name, value in options.items() if name not in ("file_or_dir", "args_source")},
            **{name: value for name, value in _NOT_FOR_CHILDREN.items() if name in options},
            "inifilename": None if ini is None else str(ini),
            "rootdir": str(self._config.rootpath),
            "plugins": [*plugins, "no:terminal", "no:cacheprovider"],
            "memfit_child": True,
        }

    def _report(self, data: Mapping[str, Any]) -> pytest.TestReport:
        reason = data.get("longrepr")
        plain = {**data, "longrepr": tuple(reason)} if isinstance(reason, list) else data  # of a skip
        report = self._config.hook.pytest_report_from_serializable(config=self._config, data=plain)
        assert isinstance(report, pytest.TestReport)
        return report


_FIGURES = ("key", "context_bytes", "nvml_total_bytes", "runtime_total_bytes")


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(part) for part in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(part) for key, part in value.items())
    return isinstance(value, _PLAIN)


def _failed(item: pytest.Item, text: str) -> pytest.TestReport:
    """A report for a test whose process did not get to its end."""
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={name: 1 for name in item.keywords if isinstance(name, str)},
        outcome="failed",
        longrepr=f"{text}{os.linesep}",
        when="call",
    )
