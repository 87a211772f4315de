"""`memfit.configure`: one line in a training script that applies a folder of settings to it."""

from __future__ import annotations

import atexit
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memfit.config import Configuration, load_configuration
from memfit.configuring.effects import MODEL_EFFECTS, PROCESS_EFFECTS
from memfit.manager import GPUMemoryManager

if TYPE_CHECKING:
    from memfit.distributed import DistributedMemory, FaultTolerance, LoadBalancing, MemorySynchronization
    from memfit.profiling.profiler import MemoryProfiler
    from memfit.techniques import MemoryCompression, MixedPrecisionTraining


class Configured:
    """What a configuration made of a process and of its model.

    Iterating gives the model and the optimizer, so ``model, optimizer = memfit.configure(…)`` works as well.

    Attributes:
        configuration: the settings, each with where it came from.
        model: as given, with the techniques applied; None where none was given.
        optimizer: the same.
        profiler: running, where profiling is enabled.
        mixed_precision: for ``autocast()`` and ``scale_loss(loss)``, where enabled.
        compression: reports its ratio, where enabled.
        synchronization: compares replicas after every so many steps, where enabled.
        balancing: deals work to devices, where enabled.
        fault_tolerance: writes checkpoints, where enabled; its ``step`` is the one at which training goes on.
        hooks: of the optimizer, which count its steps.
        done: one line for each thing that was done, with the settings that asked for it.
    """

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration
        self.model: Any = None
        self.optimizer: Any = None
        self.profiler: MemoryProfiler | None = None
        self.mixed_precision: MixedPrecisionTraining | None = None
        self.compression: MemoryCompression | None = None
        self.synchronization: MemorySynchronization | None = None
        self.balancing: LoadBalancing | None = None
        self.fault_tolerance: FaultTolerance | None = None
        self.hooks: list[Any] = []
        self.done: list[str] = []
        self._manager: GPUMemoryManager | None = None
        self._memory: DistributedMemory | None = None

    @property
    def manager(self) -> GPUMemoryManager:
        """The manager of this process's memory, within the configured limit; made when first asked for."""
        if self._manager is None:
            memory = self.configuration.settings.memory
            pool = memory.memory_pool
            self._manager = GPUMemoryManager(
                total_memory=memory.gpu_memory.total_memory,
                available_memory=memory.gpu_memory.available_memory,
                allocation_strategy=memory.gpu_memory.allocation_strategy,  # type: ignore[arg-type]
                pool_size=pool.pool_size if pool.enabled else None,
                chunk_size=pool.chunk_size if pool.enabled else None,
            )
        return self._manager

    @property
    def memory(self) -> DistributedMemory:
        """Memory over ``distributed.num_gpus`` ranks, each within the configured limit; made when first asked
        for."""
        from memfit.distributed import DistributedMemory

        if self._memory is None:
            settings = self.configuration.settings
            self._memory = DistributedMemory(
                settings.distributed.num_gpus, limit=settings.memory.gpu_memory.available_memory
            )
        return self._memory

    def start(self) -> None:
        """Put into effect what concerns the process: limits, the pool, profiling."""
        for effect in PROCESS_EFFECTS:
            self.done += effect(self)
        atexit.register(self.close)

    def apply(self, model: Any, optimizer: Any = None) -> None:
        """Put into effect what concerns a model and its optimizer."""
        self.model, self.optimizer = model, optimizer
        for effect in MODEL_EFFECTS:
            self.done += effect(self)

    def close(self) -> None:
        """End profiling (the profile is saved, if asked for) and checkpoints, and give memory back."""
        atexit.unregister(self.close)
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        if self.fault_tolerance is not None:
            self.fault_tolerance.close()
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        if self.profiler is not None and self.profiler.is_profiling:
            self.profiler.stop_profiling()
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.optimizer))

    def __str__(self) -> str:
        return "\n".join(self.done) or "nothing is enabled"


def configure(
    model: Any = None,
    optimizer: Any = None,
    *places: str | os.PathLike[str],
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Configured:
    """Apply configuration files to this process, and to a model and its optimizer in place.

    Args:
        model: to apply the ``optimization`` section to; None for the process alone.
        optimizer: of that model, or None.
        places: YAML files, or folders of them (``"configs/"``).
        flags: settings that win over the files, like ``"memory.gpu_memory.available_memory=6GB"``.
        environment: variables like ``MEMFIT_MEMORY__GPU_MEMORY__AVAILABLE_MEMORY``; None: the process's.

    Returns:
        what was made; ``print`` shows what was done. Doubtful settings are Python warnings.

    Raises:
        InputError: mistakes in the files, each with file, line, key, value and what is valid.
        UsageError: a setting that does not fit this model.

    Examples:
        >>> import torch, memfit
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> precision = "optimization.mixed_precision"
        >>> flags = [f"{precision}.enabled=true", f"{precision}.precision=bf16"]
        >>> configured = memfit.configure(model, optimizer, flags=flags)
        >>> configured.model is model
        True
        >>> print(configured)
        mixed precision: bf16 (optimization.mixed_precision)
    """
    configuration = load_configuration(*places, environment=environment, flags=flags)
    for doubt in configuration.warnings:
        warnings.warn(doubt, stacklevel=2)
    configured = Configured(configuration)
    configured.start()
    if model is not None:
        configured.apply(model, optimizer)
    return configured
