"""memfit's pytest plugin: GPU memory in tests, on a made-up GPU where there is no real one.

    @pytest.mark.limit_gpu_memory("2 GB")
    def test_a_training_step(): ...

    @pytest.mark.no_gpu_leak
    def test_the_cache_is_let_go_of(): ...

    def test_by_hand(gpu_memory): ...

Without a real GPU, such a test runs in a process of its own on a made-up GPU (Linux, a CUDA build of torch):
pytest's own process never sees it. ``--memfit-gpu`` or the ini value ``memfit_gpu`` says which.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from memfit.pytest_plugin.marks import GPU_MARKS, is_gpu_test

DEFAULT_GPU = "a100-80gb"
REAL, SKIP, AUTO = "real", "skip", "auto"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option and the ini value that choose the GPU."""
    text = (
        f"the GPU of tests of GPU memory: a name from `memfit gpus` to make one up, {REAL}, {SKIP}, or "
        f"{AUTO} (the "
        f"real one where there is one, else a made-up {DEFAULT_GPU})"
    )
    group = parser.getgroup("memfit", "GPU memory (memfit)")
    group.addoption("--memfit-gpu", dest="memfit_gpu", metavar="GPU", default=None, help=text)
    parser.addini("memfit_gpu", help=text, default=AUTO)


def pytest_configure(config: pytest.Config) -> None:
    """Make the marks known."""
    for mark in GPU_MARKS.values():
        config.addinivalue_line("markers", mark)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the process that GPU tests are forked from."""
    processes = config.stash.get(_PROCESSES, None)
    if processes is not None:
        processes.close()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip GPU tests where that was asked for."""
    if is_gpu_test(item) and chosen_gpu(item.config) == SKIP:
        pytest.skip("tests of GPU memory are switched off (--memfit-gpu=skip)")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a GPU test on the made-up GPU, in a process of its own."""
    if not is_gpu_test(item) or _is_child(item.config) or chosen_gpu(item.config) in (REAL, SKIP):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _processes(item.config).run(item, chosen_gpu(item.config)):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    item.session._setupstate.teardown_exact(nextitem)  # what earlier tests of this module have set up
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Measure a GPU test where it runs: in the child, or here on the real GPU."""
    measures = is_gpu_test(item) and (_is_child(item.config) or chosen_gpu(item.config) == REAL)
    if not measures:
        yield
        return
    from memfit.dryrun.frames import without_memfit
    from memfit.pytest_plugin.measuring import measured

    try:
        with measured(item):
            yield
    except Exception as error:
        without_memfit(error)  # what watches the operations is not the test's business
        raise


@pytest.fixture
def gpu_memory() -> Any:
    """The GPU's memory: allocated and peak bytes, limits (`memfit.testing.GpuMemory`)."""
    from memfit.testing import GpuMemory

    return GpuMemory()


def chosen_gpu(config: pytest.Config) -> str:
    """The GPU of this session: a name, ``"real"`` or ``"skip"``."""
    chosen = config.getoption("memfit_gpu", None) or str(config.getini("memfit_gpu"))
    if chosen != AUTO:
        return chosen
    return REAL if Path("/proc/driver/nvidia/version").exists() else DEFAULT_GPU


def _is_child(config: pytest.Config) -> bool:
    return bool(config.getoption("memfit_child", False))


_PROCESSES: pytest.StashKey[Any] = pytest.StashKey()


def _processes(config: pytest.Config) -> Any:
    """The processes of this session, started when first needed."""
    from memfit.pytest_plugin.processes import Processes

    if _PROCESSES not in config.stash:
        config.stash[_PROCESSES] = Processes(config)
    return config.stash[_PROCESSES]
