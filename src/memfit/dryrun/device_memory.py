"""The device's memory as low, expected and high, by what makes the difference.

What PyTorch's allocator decides is exact in a dry run; what libraries and drivers decide is not
(`memfit.dryrun.libraries`), and neither are values that nobody knows (the result's ``interval``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from memfit.core.devices import GPU, find_gpu
from memfit.core.errors import MemfitError
from memfit.dryrun import libraries
from memfit.dryrun.calibration import Calibration, find_calibration
from memfit.dryrun.result import DryRunResult
from memfit.dryrun.uncertainty import Part, Uncertain

WORKSPACES = "cuDNN workspaces"
"""The part of what convolutions add."""

_OF_NCCL = ("NCCL communicator", "NCCL buffers")
_COUNTED_ELSEWHERE = ("cuDNN workspace", libraries.BESIDE_THE_PEAKS, *_OF_NCCL)


@dataclass(frozen=True)
class _Sources:
    """All that a part is computed from."""

    result: DryRunResult
    calibration: Calibration | None
    environment: Mapping[str, str]


def with_device_memory(
    result: DryRunResult,
    *,
    calibration: Calibration | None = None,
    environment: Mapping[str, str] | None = None,
) -> DryRunResult:
    """``result`` with its ``device_memory``.

    Args:
        calibration: what was measured on such a GPU; None: what `memfit calibrate` remembered, if anything.
        environment: for the variables that decide how kernels are loaded; None: this process's.
    """
    known = find_calibration(result.gpu, result.torch) if calibration is None else calibration
    sources = _Sources(result, known, os.environ if environment is None else environment)
    parts = tuple(part for make in _PARTS if (part := make(sources)) is not None)
    told = "" if known is None else known.summary
    return replace(result, device_memory=Uncertain.of(parts, calibration=told))


def imitated_device_memory(
    gpu: GPU, *, torch: str, allocated_bytes: int, reserved_bytes: int, not_modelled: tuple[str, ...] = ()
) -> Uncertain:
    """The same for peaks of the portable engine, which knows of cuDNN only whether it would be asked.

    Args:
        torch: version of PyTorch.
        allocated_bytes, reserved_bytes: the peaks.
        not_modelled: what the engine says that it leaves out.
    """
    result = DryRunResult(
        engine="portable",
        gpu=gpu.key,
        torch=torch,
        peak_requested_bytes=allocated_bytes,
        peak_allocated_bytes=allocated_bytes,
        peak_reserved_bytes=reserved_bytes,
        context_bytes=gpu.context_bytes,
        device_total_bytes=gpu.context_bytes + reserved_bytes,
        nvml_total_bytes=gpu.nvml_total_bytes,
        runtime_total_bytes=gpu.runtime_total_bytes,
        event_count=0,
        not_modelled=not_modelled,
        wall_seconds=0.0,
    )
    memory = with_device_memory(result).device_memory
    assert memory is not None
    return memory


def _allocator(sources: _Sources) -> Part:
    reserved = sources.result.peak_reserved_bytes
    how = "PyTorch's own" if sources.result.engine == "dryrun" else "imitated"
    return Part("allocator", reserved, reserved, reserved, f"the reserved peak; the allocator is {how}")


def _context(sources: _Sources) -> Part:
    expected, calibration = sources.result.context_bytes, sources.calibration
    if calibration is not None:
        loaded = calibration.loaded_context_bytes
        high = loaded + int(libraries.LOADED_KERNELS.high)
        return Part("context", calibration.bare_context_bytes, loaded, high, "measured on such a GPU")
    spread = libraries.CONTEXTS.get(_capability(sources.result.gpu))
    if spread is None or spread.expected != expected:
        margin = int(libraries.UNKNOWN_CONTEXT_SHARE * expected)
        part = Part("context", expected - margin, expected, expected + margin, "of a GPU nobody measured")
    else:
        part = Part("context", int(spread.low), expected, int(spread.high), spread.source)
    return _eager(part) if sources.environment.get("CUDA_MODULE_LOADING") == "EAGER" else part


def _eager(part: Part) -> Part:
    more = libraries.EAGER_LOADING
    return Part(
        part.name,
        part.low_bytes + int(more.low),
        part.expected_bytes + int(more.expected),
        part.high_bytes + int(more.high),
        f"{part.why}; {more.what}: {more.source}",
    )


def _capability(gpu: str) -> int:
    try:
        major, minor = find_gpu(gpu).compute_capability
    except MemfitError:
        return 0
    return 10 * major + minor


def _libraries(sources: _Sources) -> Part | None:
    """What was charged to the device past the allocator; NCCL's part of it by a rule."""
    result = sources.result
    charged = result.libraries_bytes
    if not charged:
        return None
    by_rule = any(result.estimates.get(name) for name in _OF_NCCL)
    spread = libraries.NCCL_SHARE
    low, high = (int(charged * (1 + share * by_rule)) for share in (spread.low, spread.high))
    why = spread.source if by_rule else "allocated past PyTorch's allocator"
    return Part("NCCL" if by_rule else "other libraries", low, charged, high, why)


def _convolutions(sources: _Sources) -> Part | None:
    """What workspaces of convolutions add, by themselves and by what they leave in the allocator's cache."""
    result, calibration = sources.result, sources.calibration
    rule = result.estimates.get(libraries.BESIDE_THE_PEAKS, 0)
    if not rule:
        return _unsized_convolutions(result)
    usual, most = (1.0, 1.0) if calibration is None else calibration.workspace_shares
    spread, cache = libraries.CONVOLUTIONS, libraries.CACHING_SHARE
    reserved = result.peak_reserved_bytes
    slack = max(0, reserved - result.peak_allocated_bytes)
    low = -min(slack, int(-cache.low * reserved * min(1.0, most)))
    expected = int(spread.expected * usual * rule)
    high = int(most * max(rule, min(spread.high * rule, cache.high * reserved)))
    why = f"the largest workspace by the rule is {rule} bytes" + ("; measured" if calibration else "")
    return Part(WORKSPACES, low, expected, high, why)


def _unsized_convolutions(result: DryRunResult) -> Part | None:
    """The portable engine's: it sees convolutions and knows no workspace of theirs."""
    if result.engine != "portable" or not any("cuDNN" in note for note in result.not_modelled):
        return None
    cache, reserved = libraries.CACHING_SHARE, result.peak_reserved_bytes
    slack = max(0, reserved - result.peak_allocated_bytes)
    low = -min(slack, int(-cache.low * reserved))
    return Part(WORKSPACES, low, 0, int(cache.high * reserved), cache.source)


def _ruled_sizes(sources: _Sources) -> Part | None:
    """Scratch of libraries that the peaks contain by a rule."""
    sizes = [
        size for name, size in sources.result.estimates.items() if name not in _COUNTED_ELSEWHERE and size
    ]
    if not sizes:
        return None
    spread = libraries.RULED_SIZE_SHARE
    return Part(
        "scratch of libraries", int(spread.low * sum(sizes)), 0, int(spread.high * sum(sizes)), spread.source
    )


def _unknown_values(sources: _Sources) -> Part | None:
    """What other answers to reads of unknown values change; the result's interval."""
    interval, reserved = sources.result.interval, sources.result.peak_reserved_bytes
    if interval is None or interval.reserved.low_bytes == interval.reserved.high_bytes:
        return None
    low, high = (
        min(0, interval.reserved.low_bytes - reserved),
        max(0, interval.reserved.high_bytes - reserved),
    )
    return Part("unknown values", low, 0, high, "other answers to what the script read (see interval)")


_PARTS: tuple[Callable[[_Sources], Part | None], ...] = (
    _allocator,
    _context,
    _libraries,
    _convolutions,
    _ruled_sizes,
    _unknown_values,
)
