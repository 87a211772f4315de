"""memfit: know, plan and prove the GPU memory of a PyTorch job before a GPU is rented.

Everything that users type imports from here, and nothing is loaded before it is used: ``import memfit``
imports neither torch nor any part of memfit.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memfit.allocators import BaseAllocator
    from memfit.allocators.lab import Replay, replay
    from memfit.analysis.bottleneck import BottleneckDetector
    from memfit.analysis.diagnosis import Diagnosis, diagnose
    from memfit.analysis.difference import Difference, compare
    from memfit.analysis.explanations import Explanation, explain
    from memfit.analysis.ladder import ladder
    from memfit.analysis.ladder_values import Ladder
    from memfit.analysis.memory import MemoryAnalyzer
    from memfit.analysis.performance import PerformanceAnalyzer
    from memfit.analysis.recommend import OptimizationRecommender
    from memfit.capture import capture_step
    from memfit.capture.graph import StepGraph
    from memfit.config import Configuration, load_configuration
    from memfit.configuring import Configured, configure
    from memfit.core.devices import GPU, find_gpu
    from memfit.core.errors import (
        CannotRunHere,
        InputError,
        MemfitError,
        ToolFailure,
        UsageError,
        WorkloadFailed,
    )
    from memfit.core.recording import Recording
    from memfit.core.timeline import Timeline
    from memfit.core.trace import Trace, TraceBuilder
    from memfit.core.units import format_bytes, parse_bytes
    from memfit.core.workload import Workload
    from memfit.distributed import (
        DistributedMemory,
        FaultTolerance,
        LoadBalancing,
        MemorySynchronization,
    )
    from memfit.distributed.scaling import scale
    from memfit.dryrun import DryRunResult, dry_run
    from memfit.formats import read_trace
    from memfit.manager import GPUMemoryManager
    from memfit.monitor import AlertRule, Watcher, watch
    from memfit.notebook import load_ipython_extension
    from memfit.planning import FitResult, Plan, plan
    from memfit.pools import DynamicAllocation, IdleCacheRelease, MemoryAllocator, MemoryPool, collect
    from memfit.profiling.profiler import MemoryProfiler
    from memfit.techniques import (
        ActivationOffload,
        AllocatorSettings,
        AttentionBackend,
        ChannelsLast,
        ChunkedCrossEntropy,
        CompiledPartition,
        GradientCheckpointing,
        LoRA,
        LowMemoryOptimizer,
        MemoryCompression,
        MicroBatching,
        MixedPrecisionTraining,
        OffloadedOptimizerState,
        OptimizerImplementation,
        OptimizerInBackward,
        ParameterOffload,
        PartialQuantization,
        Pruning,
        QLoRA,
        VocabularyPadding,
        undo,
    )
    from memfit.techniques.adaptive import guard, training_step
    from memfit.techniques.batch_size import find_batch_size
    from memfit.techniques.compile_warmup import warm_up
    from memfit.techniques.prefetch import InputPrefetch
    from memfit.techniques.pruning_sparse import to_sparse
    from memfit.techniques.pruning_structured import prune_structured
    from memfit.techniques.shared_tensors import SharedTensors
    from memfit.techniques.tuning import tune
    from memfit.techniques.tuning_result import TuningResult

__version__ = "0.1.0"

__all__ = [
    "GPU",
    "ActivationOffload",
    "AlertRule",
    "AllocatorSettings",
    "AttentionBackend",
    "BaseAllocator",
    "BottleneckDetector",
    "CannotRunHere",
    "ChannelsLast",
    "CompiledPartition",
    "ChunkedCrossEntropy",
    "Configuration",
    "Configured",
    "Diagnosis",
    "Difference",
    "DistributedMemory",
    "DryRunResult",
    "DynamicAllocation",
    "Explanation",
    "FaultTolerance",
    "FitResult",
    "GPUMemoryManager",
    "GradientCheckpointing",
    "IdleCacheRelease",
    "InputError",
    "InputPrefetch",
    "Ladder",
    "LoRA",
    "LoadBalancing",
    "LowMemoryOptimizer",
    "MemfitError",
    "MemoryAllocator",
    "MemoryAnalyzer",
    "MemoryCompression",
    "MemoryPool",
    "MemoryProfiler",
    "MemorySynchronization",
    "MicroBatching",
    "MixedPrecisionTraining",
    "OffloadedOptimizerState",
    "OptimizationRecommender",
    "OptimizerImplementation",
    "OptimizerInBackward",
    "ParameterOffload",
    "PartialQuantization",
    "PerformanceAnalyzer",
    "Plan",
    "Pruning",
    "QLoRA",
    "Recording",
    "Replay",
    "SharedTensors",
    "StepGraph",
    "Timeline",
    "ToolFailure",
    "Trace",
    "TraceBuilder",
    "TuningResult",
    "UsageError",
    "VocabularyPadding",
    "Watcher",
    "Workload",
    "WorkloadFailed",
    "capture_step",
    "collect",
    "compare",
    "configure",
    "diagnose",
    "dry_run",
    "explain",
    "find_batch_size",
    "find_gpu",
    "format_bytes",
    "guard",
    "ladder",
    "load_configuration",
    "load_ipython_extension",
    "parse_bytes",
    "plan",
    "prune_structured",
    "read_trace",
    "replay",
    "scale",
    "to_sparse",
    "training_step",
    "tune",
    "undo",
    "warm_up",
    "watch",
]

_HOME = {
    "memfit.allocators": ("BaseAllocator",),
    "memfit.allocators.lab": ("Replay", "replay"),
    "memfit.analysis.diagnosis": ("Diagnosis", "diagnose"),
    "memfit.analysis.difference": ("Difference", "compare"),
    "memfit.analysis.bottleneck": ("BottleneckDetector",),
    "memfit.analysis.explanations": ("Explanation", "explain"),
    "memfit.analysis.ladder": ("ladder",),
    "memfit.analysis.ladder_values": ("Ladder",),
    "memfit.analysis.memory": ("MemoryAnalyzer",),
    "memfit.analysis.performance": ("PerformanceAnalyzer",),
    "memfit.analysis.recommend": ("OptimizationRecommender",),
    "memfit.capture": ("capture_step",),
    "memfit.capture.graph": ("StepGraph",),
    "memfit.config": ("Configuration", "load_configuration"),
    "memfit.configuring": ("Configured", "configure"),
    "memfit.core.devices": ("GPU", "find_gpu"),
    "memfit.core.errors": (
        "CannotRunHere",
        "InputError",
        "MemfitError",
        "ToolFailure",
        "UsageError",
        "WorkloadFailed",
    ),
    "memfit.core.recording": ("Recording",),
    "memfit.core.timeline": ("Timeline",),
    "memfit.core.trace": ("Trace", "TraceBuilder"),
    "memfit.core.units": ("format_bytes", "parse_bytes"),
    "memfit.core.workload": ("Workload",),
    "memfit.distributed": (
        "DistributedMemory",
        "FaultTolerance",
        "LoadBalancing",
        "MemorySynchronization",
    ),
    "memfit.distributed.scaling": ("scale",),
    "memfit.dryrun": ("DryRunResult", "dry_run"),
    "memfit.formats": ("read_trace",),
    "memfit.manager": ("GPUMemoryManager",),
    "memfit.monitor": ("AlertRule", "Watcher", "watch"),
    "memfit.notebook": ("load_ipython_extension",),
    "memfit.planning": ("FitResult", "Plan", "plan"),
    "memfit.pools": ("DynamicAllocation", "IdleCacheRelease", "MemoryAllocator", "MemoryPool", "collect"),
    "memfit.profiling.profiler": ("MemoryProfiler",),
    "memfit.techniques": (
        "ActivationOffload",
        "AllocatorSettings",
        "AttentionBackend",
        "ChannelsLast",
        "CompiledPartition",
        "ChunkedCrossEntropy",
        "GradientCheckpointing",
        "LoRA",
        "LowMemoryOptimizer",
        "MemoryCompression",
        "MicroBatching",
        "MixedPrecisionTraining",
        "OffloadedOptimizerState",
        "OptimizerImplementation",
        "OptimizerInBackward",
        "ParameterOffload",
        "PartialQuantization",
        "Pruning",
        "QLoRA",
        "VocabularyPadding",
        "undo",
    ),
    "memfit.techniques.adaptive": ("guard", "training_step"),
    "memfit.techniques.batch_size": ("find_batch_size",),
    "memfit.techniques.compile_warmup": ("warm_up",),
    "memfit.techniques.pruning_sparse": ("to_sparse",),
    "memfit.techniques.pruning_structured": ("prune_structured",),
    "memfit.techniques.prefetch": ("InputPrefetch",),
    "memfit.techniques.shared_tensors": ("SharedTensors",),
    "memfit.techniques.tuning": ("tune",),
    "memfit.techniques.tuning_result": ("TuningResult",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'memfit' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__"})
