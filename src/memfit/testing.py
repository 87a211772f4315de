"""Helpers for tests of GPU memory: a figure at a time, limits, and leaks. They need CUDA, real or made up.

In a test that pytest runs with memfit's plugin (a mark, or the fixture ``gpu_memory``), there is a GPU on
every machine.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from memfit.analysis.growth import slope_of
from memfit.core.errors import CannotRunHere, UsageError
from memfit.core.units import format_bytes, parse_bytes

MOST_EVENTS = 200_000
MOST_SITES = 5


class GpuMemoryExceeded(AssertionError):
    """A piece of a test needs more memory than it may."""


class GpuLeak(AssertionError):
    """Memory is kept that should have gone."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """Memory that one line holds."""

    where: str
    size_bytes: int
    count: int

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.size_bytes)} in {self.count} block{'s' * (self.count > 1)} at {self.where}"
        )


class GpuMemory:
    """The current GPU's memory, as PyTorch counts it; what the fixture ``gpu_memory`` gives.

    Examples:
        >>> def test_my_step(gpu_memory):
        ...     with gpu_memory.limit("2 GB"):
        ...         step()
        ...     assert gpu_memory.allocated_bytes == 0
    """

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the blocks in use."""
        return int(_cuda().memory_allocated())

    @property
    def peak_allocated_bytes(self) -> int:
        """Their highest since the test began, or since `reset_peak`."""
        return int(_cuda().max_memory_allocated())

    @property
    def peak_reserved_bytes(self) -> int:
        """The most that PyTorch had taken from the device."""
        return int(_cuda().max_memory_reserved())

    def reset_peak(self) -> None:
        """Begin the peaks anew."""
        _cuda().reset_peak_memory_stats()

    @contextmanager
    def limit(self, size: str | int) -> Iterator[None]:
        """What runs inside may add so much to what is allocated.

        Raises:
            GpuMemoryExceeded: it added more.
        """
        most = parse_bytes(size, what="the limit")
        before = self.allocated_bytes
        self.reset_peak()
        yield
        added = self.peak_allocated_bytes - before
        if added > most:
            over = format_bytes(added - most)
            raise GpuMemoryExceeded(
                f"{format_bytes(added)} more at the peak, {over} over the limit of {format_bytes(most)}"
            )


def assert_no_leak(
    fn: Callable[[], Any], *, steps: int = 8, warm_up: int = 2, tolerance: str | int = 0
) -> None:
    """Call ``fn`` again and again, and see to it that no memory piles up on the GPU.

    Args:
        fn: one step; what it returns is let go of.
        steps: how often it is called after the warm-up.
        warm_up: calls before, in which optimizer states and workspaces appear.
        tolerance: by how much the allocated bytes may grow in all.

    Raises:
        GpuLeak: they grow; with the lines that hold what is left.
        CannotRunHere: there is no GPU, real or made up.
        UsageError: fewer than 2 steps.
    """
    if steps < 2:
        raise UsageError(f"assert_no_leak(steps={steps}): 2 or more are needed to see growth")
    cuda, most = _cuda(), parse_bytes(tolerance, what="tolerance")
    with _history(cuda):
        for _ in range(warm_up):
            fn()
        gc.collect()
        before, allocated = _held(cuda), [int(cuda.memory_allocated())]
        for _ in range(steps):
            fn()
            allocated.append(int(cuda.memory_allocated()))
        grown = allocated[-1] - allocated[0]
        slope = slope_of(allocated[1:]).per_step
        if grown <= most or slope <= 0:
            return
        gc.collect()
        left = int(cuda.memory_allocated()) - allocated[0]
        sites = sites_left(before, _held(cuda))
    raise GpuLeak("\n".join(_told(grown, left, steps, slope, sites, most)))


def _told(grown: int, left: int, steps: int, slope: float, sites: Sequence[Site], most: int) -> list[str]:
    lines = [f"{format_bytes(grown)} more after {steps} steps, {format_bytes(slope)} a step"]
    if left <= most:
        lines.append(
            "only reference cycles hold it: Python's garbage collector freed it (memfit.collect names them)"
        )
    return [*lines, *(f"  kept: {site}" for site in sites[:MOST_SITES])]


def sites_left(before: dict[int, tuple[int, str]], after: dict[int, tuple[int, str]]) -> list[Site]:
    """What is held now and was not before, by line, the most bytes first.

    Args:
        before: of each block's address its bytes and its line.
        after: the same, later.
    """
    sums: dict[str, list[int]] = {}
    for address, (size, where) in after.items():
        if before.get(address) != (size, where):
            entry = sums.setdefault(where or "an unknown line", [0, 0])
            entry[0] += size
            entry[1] += 1
    sites = [Site(where=where, size_bytes=size, count=count) for where, (size, count) in sums.items()]
    return sorted(sites, key=lambda site: (-site.size_bytes, site.where))


def held_blocks() -> dict[int, tuple[int, str]]:
    """Of each block in use now: its address, its bytes, and the line that asked for it, where known."""
    return _held(_cuda())


def _held(cuda: Any) -> dict[int, tuple[int, str]]:
    from memfit.core.errors import InputError
    from memfit.formats.snapshots import from_value

    try:
        end = from_value(cuda.memory._snapshot(), name="this process", size_bytes=1 << 40).end
    except InputError:  # nothing is allocated yet
        return {}
    blocks = end.blocks() if end is not None else ()
    return {block.address: (block.requested_bytes, block.where) for block in blocks if block.active}


@contextmanager
def _history(cuda: Any) -> Iterator[None]:
    """Have PyTorch note the lines of allocations, unless somebody does already."""
    import torch

    running = bool(getattr(torch._C, "_cuda_isHistoryEnabled")())  # noqa: B009
    if not running:
        cuda.memory._record_memory_history("all", "alloc", "python", MOST_EVENTS)
    try:
        yield
    finally:
        if not running:
            cuda.memory._record_memory_history(None)


def _cuda() -> Any:
    """``torch.cuda``, ready to be asked."""
    import torch

    if not torch.cuda.is_available():
        raise CannotRunHere(
            "there is no GPU here, and none was made up: mark the test with @pytest.mark.no_gpu_leak or "
            "@pytest.mark.limit_gpu_memory(...), or take the fixture gpu_memory (memfit's pytest plugin)"
        )
    torch.cuda.init()
    return sys.modules["torch.cuda"]
