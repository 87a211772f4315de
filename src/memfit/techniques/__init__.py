"""Changes to how a training step runs: one file each, all of one form.

A technique is its settings; ``apply`` changes the model in place and ``undo`` takes the last change back.
``TECHNIQUES`` is the table of them all; ``technique_from_settings`` reads their JSON form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit.core.errors import UsageError
from memfit.techniques.allocator_settings import AllocatorSettings
from memfit.techniques.attention_backend import AttentionBackend
from memfit.techniques.base import Technique, applied_techniques, undo, undo_all
from memfit.techniques.channels_last import ChannelsLast
from memfit.techniques.chunked_cross_entropy import ChunkedCrossEntropy
from memfit.techniques.compiled_partition import CompiledPartition
from memfit.techniques.compression import MemoryCompression
from memfit.techniques.gradient_checkpointing import GradientCheckpointing
from memfit.techniques.lora import LoRA, QLoRA
from memfit.techniques.low_memory_optimizers import LowMemoryOptimizer
from memfit.techniques.micro_batching import MicroBatching, micro_batches_of
from memfit.techniques.mixed_precision import MixedPrecisionTraining, mixed_precision_of
from memfit.techniques.offload import ActivationOffload
from memfit.techniques.offload_parameters import ParameterOffload
from memfit.techniques.offloaded_optimizer_state import OffloadedOptimizerState
from memfit.techniques.optimizer_implementation import OptimizerImplementation
from memfit.techniques.optimizer_in_backward import OptimizerInBackward
from memfit.techniques.partial_quantization import PartialQuantization
from memfit.techniques.pruning import Pruning
from memfit.techniques.rematerialization import Rematerialization
from memfit.techniques.saving import Saving
from memfit.techniques.vocabulary_padding import VocabularyPadding

TECHNIQUES: Mapping[str, type[Technique]] = {
    technique.name: technique
    for technique in (
        GradientCheckpointing,
        Rematerialization,
        ChunkedCrossEntropy,
        MicroBatching,
        OptimizerImplementation,
        MixedPrecisionTraining,
        LowMemoryOptimizer,
        OptimizerInBackward,
        OffloadedOptimizerState,
        LoRA,
        QLoRA,
        MemoryCompression,
        ActivationOffload,
        ParameterOffload,
        AllocatorSettings,
        AttentionBackend,
        ChannelsLast,
        VocabularyPadding,
        Pruning,
        PartialQuantization,
        CompiledPartition,
    )
}

__all__ = [
    "TECHNIQUES",
    "ActivationOffload",
    "AllocatorSettings",
    "AttentionBackend",
    "ChannelsLast",
    "ChunkedCrossEntropy",
    "CompiledPartition",
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
    "Rematerialization",
    "Saving",
    "Technique",
    "VocabularyPadding",
    "applied_techniques",
    "micro_batches_of",
    "mixed_precision_of",
    "technique_from_settings",
    "undo",
    "undo_all",
]


def technique_from_settings(settings: Mapping[str, Any]) -> Technique:
    """The technique of a JSON object like ``{"technique": "micro_batching", "micro_batches": 4}``.

    Raises:
        UsageError: no such technique, an unknown key, or a value that the technique refuses.
    """
    name = settings.get("technique") if isinstance(settings, Mapping) else None
    if name not in TECHNIQUES:
        raise UsageError(f"no technique is called {name!r}; there are {', '.join(TECHNIQUES)}")
    return TECHNIQUES[str(name)].from_settings(settings)
