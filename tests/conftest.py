"""Marks that need something of the machine are skipped with the reason where it is missing."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sys
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest

from memfit.core.errors import CannotRunHere

# Two test processes share two cores; with two threads each, every small operator waits for a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What was measured on the GPU of whoever runs the tests changes no prediction in them.
os.environ["MEMFIT_CALIBRATION"] = os.devnull

# The same examples in every run, so that a red run can be repeated, and no example is judged by the clock.
# HYPOTHESIS_PROFILE=search looks at others.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.register_profile("search", deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

EXTRAS = {"models": "transformers", "vision": "torchvision"}
"""The optional parts that tests may miss, and a module of each."""


@functools.cache
def _no_dry_run() -> str | None:
    """Why the made-up GPU cannot be had here, or None. Builds it, which is kept for all later runs."""
    if not sys.platform.startswith("linux"):
        return "the dry run needs Linux"
    from memfit.dryrun.build import build_stub

    try:
        build_stub()
    except CannotRunHere as reason:
        return str(reason)
    return None


def _no_gpu() -> str | None:
    found = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi")
    return None if found else "no NVIDIA GPU here"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what cannot run here."""
    for mark, reason_of in (("dryrun", _no_dry_run), ("gpu", _no_gpu)):
        reason = reason_of() if item.get_closest_marker(mark) else None
        if reason:
            pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """A test that needs an extra which is not installed here is skipped, with what a user would be told."""
    try:
        yield
    except CannotRunHere as reason:
        missing = [extra for extra, module in EXTRAS.items() if importlib.util.find_spec(module) is None]
        if any(f"memfit[{extra}]" in str(reason) for extra in missing):
            pytest.skip(str(reason))
        raise


@pytest.fixture(scope="session")
def shared_folder() -> Path:
    """The folder with recordings too large for the repository: MEMFIT_SHARED, or ../shared."""
    folder = Path(os.environ.get("MEMFIT_SHARED") or Path(__file__).parents[2] / "shared")
    if not folder.is_dir():
        pytest.skip(f"no shared recordings here ({folder}); MEMFIT_SHARED names their folder")
    return folder
