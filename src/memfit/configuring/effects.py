"""What each section of a configuration does: one function a section, which says in a line what it did."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from memfit.configuring.rank_effects import balance, protect, synchronize
from memfit.core.units import format_bytes
from memfit.techniques import GradientCheckpointing, MixedPrecisionTraining

if TYPE_CHECKING:
    from memfit.configuring.configured import Configured

Effect = Callable[["Configured"], Iterator[str]]
PROFILES_FOLDER = "memfit-profiles"


def limit_memory(configured: Configured) -> Iterator[str]:
    """``memory.gpu_memory``: on CUDA a limit of PyTorch's allocator; everywhere the manager's."""
    import torch

    memory = configured.configuration.settings.memory.gpu_memory
    limit = min(filter(None, (memory.available_memory, memory.total_memory)), default=None)
    if limit is None:
        return
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
        yield f"PyTorch's CUDA allocator: at most {format_bytes(limit)} (memory.gpu_memory)"
    yield (f"memory manager: {memory.allocation_strategy}, at most {format_bytes(limit)} (memory.gpu_memory)")


def take_pool(configured: Configured) -> Iterator[str]:
    """``memory.memory_pool``: taken now."""
    pool = configured.configuration.settings.memory.memory_pool
    if pool.enabled:
        reserved = configured.manager.statistics().reserved_bytes
        yield (
            f"memory pool: {format_bytes(reserved)} taken, grows by {format_bytes(pool.chunk_size)} or more "
            "(memory.memory_pool)"
        )


def profile(configured: Configured) -> Iterator[str]:
    """``memory.memory_profiling``: from now to the end of the process."""
    from memfit.profiling.profiler import MemoryProfiler

    profiling = configured.configuration.settings.memory.memory_profiling
    if not profiling.enabled:
        return
    folder = PROFILES_FOLDER if profiling.save_profiles is True else profiling.save_profiles or None
    configured.profiler = MemoryProfiler(
        profiling_frequency=profiling.profiling_frequency, save_profiles=folder
    )
    configured.profiler.start_profiling()
    saved = f", saved in {folder}" if folder else ""
    yield (f"memory profiler: every {profiling.profiling_frequency} steps{saved} (memory.memory_profiling)")


def checkpoint(configured: Configured) -> Iterator[str]:
    """``optimization.gradient_checkpointing``: the saving is the target, the frequency the start."""
    wanted = configured.configuration.settings.optimization.gradient_checkpointing
    if not wanted.enabled:
        return
    technique = checkpointing(wanted.checkpoint_frequency, wanted.memory_savings)
    technique.apply(configured.model)
    how = (
        f"{wanted.memory_savings:.0%} of the blocks"
        if technique.memory_savings is not None
        else _every(technique.checkpoint_frequency or 1)
    )
    asked = wanted.checkpoint_frequency
    more = f"; {_every(asked)} would save too little" if asked and how != _every(asked) else ""
    yield f"gradient checkpointing: {how}{more} (optimization.gradient_checkpointing)"


def checkpointing(frequency: int | None, savings: float | None) -> GradientCheckpointing:
    """The technique that starts from a frequency and checkpoints as many more blocks as a saving needs.

    A checkpointed block saves its activations but for its input, so the share of blocks stands for the
    saving.
    """
    if savings is None:
        return GradientCheckpointing(checkpoint_frequency=frequency or 1)
    if frequency is None or 1 / frequency < savings:
        whole = math.floor(1 / savings + 1e-9)
        if math.isclose(1 / whole, savings):
            return GradientCheckpointing(checkpoint_frequency=whole)
        return GradientCheckpointing(memory_savings=savings)
    return GradientCheckpointing(checkpoint_frequency=frequency)


def _every(frequency: int) -> str:
    return {1: "every block", 2: "every 2nd block", 3: "every 3rd block"}.get(
        frequency, f"every {frequency}th block"
    )


def compress(configured: Configured) -> Iterator[str]:
    """``optimization.memory_compression``: of what is saved for the backward pass."""
    wanted = configured.configuration.settings.optimization.memory_compression
    if not wanted.enabled:
        return
    from memfit.techniques import MemoryCompression

    configured.compression = MemoryCompression(
        compression_ratio=wanted.compression_ratio,
        compression_algorithm=wanted.compression_algorithm,
    )
    configured.compression.apply(configured.model)
    yield (
        f"compressed activations: {wanted.compression_algorithm}, to {wanted.compression_ratio:.0%} "
        "(optimization.memory_compression)"
    )


def lower_precision(configured: Configured) -> Iterator[str]:
    """``optimization.mixed_precision``: last, since it wraps the optimizer's step."""
    wanted = configured.configuration.settings.optimization.mixed_precision
    if not wanted.enabled:
        return
    scale: dict[str, Any] = {}
    if isinstance(wanted.loss_scaling, float) and wanted.precision != "bf16":
        scale = {"initial_scale": wanted.loss_scaling}
    technique = MixedPrecisionTraining(precision=wanted.precision, **scale)  # type: ignore[arg-type]
    technique.apply(configured.model, configured.optimizer)
    configured.mixed_precision = technique
    scaled = ", losses scaled" if technique.scales_losses else ""
    yield f"mixed precision: {wanted.precision}{scaled} (optimization.mixed_precision)"


PROCESS_EFFECTS: Sequence[Effect] = (limit_memory, take_pool, profile, balance)
"""What concerns the process, in order."""

MODEL_EFFECTS: Sequence[Effect] = (checkpoint, compress, lower_precision, synchronize, protect)
"""What concerns a model and its optimizer, in order: what is done after a step comes last."""
