"""The tree of settings: one class a section, one field a key, with its kind, its default and what it does.

A new setting is one field here; reading, messages, ``memfit config --show`` and the documentation follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

from memfit.config.kinds import (
    FLAG,
    FOLDER,
    LOSS_SCALING,
    SIZE,
    TEXT,
    Kind,
    choice,
    share,
    whole,
    whole_or,
)

COMPRESSION_ALGORITHMS = (
    "auto",
    "gzip",
    "zstd",
    "lz4",
    "exponent-split",
    "bf16",
    "fp8",
    "int8",
    "int4",
    "sparse",
)


def setting(default: Any, kind: Kind, does: str) -> Any:
    """A key: its default, what may be written, and what it does in one line."""
    return field(default=default, metadata={"kind": kind, "does": does})


def section(cls: type) -> Any:
    """A key that holds further keys."""
    return field(default_factory=cls)


def _enabled(what: str) -> Any:
    return setting(False, FLAG, f"whether {what}")


@dataclass(frozen=True, kw_only=True)
class GPUMemory:
    """``memory.gpu_memory``: the limit of the process."""

    total_memory: int | None = setting(
        None, SIZE, "the GPU's memory; measured where there is one, if not given"
    )
    available_memory: int | None = setting(
        None, SIZE, "how much of it this process may take; on CUDA a hard limit of PyTorch's allocator"
    )
    allocation_strategy: str = setting(
        "static", choice("static", "dynamic"), "whether the manager adapts its policy to the sizes it sees"
    )


@dataclass(frozen=True, kw_only=True)
class Pool:
    """``memory.memory_pool``: memory taken at once, before it is asked for."""

    enabled: bool = _enabled("the manager takes a pool when it starts")
    pool_size: int = setting(4 * 10**9, SIZE, "what the pool takes at once")
    chunk_size: int = setting(64 * 10**6, SIZE, "the least that it grows by")


@dataclass(frozen=True, kw_only=True)
class Profiling:
    """``memory.memory_profiling``: where memory goes, while training."""

    enabled: bool = _enabled("the script is profiled")
    profiling_frequency: int = setting(100, whole(1), "every how many steps one is noted in detail")
    save_profiles: str | bool = setting(False, FOLDER, "where profiles are written")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """``memory``."""

    gpu_memory: GPUMemory = section(GPUMemory)
    memory_pool: Pool = section(Pool)
    memory_profiling: Profiling = section(Profiling)


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """``optimization.gradient_checkpointing``: the saving is the target, the frequency the start."""

    enabled: bool = _enabled("blocks of the model are recomputed in the backward pass")
    checkpoint_frequency: int | None = setting(None, whole(1), "every how many blocks one is recomputed")
    memory_savings: float | None = setting(
        None,
        share(),
        "the share of the blocks' activations to save: more blocks than the frequency where needed",
    )


@dataclass(frozen=True, kw_only=True)
class MixedPrecision:
    """``optimization.mixed_precision``."""

    enabled: bool = _enabled("the model runs in low precision, with fp32 weights")
    precision: str = setting(
        "auto", choice("fp16", "bf16", "auto"), "auto is bf16 where the device computes in it"
    )
    loss_scaling: str | float | None = setting(None, LOSS_SCALING, "of fp16's losses; bf16 needs none")


@dataclass(frozen=True, kw_only=True)
class Compression:
    """``optimization.memory_compression``: of the activations that are saved for the backward pass."""

    enabled: bool = _enabled("saved activations are compressed")
    compression_ratio: float = setting(
        0.8, share(), "bytes after over bytes before: a target to report against"
    )
    compression_algorithm: str = setting(
        "auto", choice(*COMPRESSION_ALGORITHMS), "the codec; auto measures on samples"
    )


@dataclass(frozen=True, kw_only=True)
class Optimization:
    """``optimization``."""

    gradient_checkpointing: Checkpointing = section(Checkpointing)
    mixed_precision: MixedPrecision = section(MixedPrecision)
    memory_compression: Compression = section(Compression)


@dataclass(frozen=True, kw_only=True)
class Synchronization:
    """``distributed.memory_synchronization``."""

    enabled: bool = _enabled("replicas are compared and brought in step")
    sync_frequency: int = setting(10, whole(1), "every how many steps")
    repair: str | int = setting(
        "majority", whole_or("majority", "raise"), "from whom a rank that differs is repaired"
    )


@dataclass(frozen=True, kw_only=True)
class Balancing:
    """``distributed.load_balancing``."""

    enabled: bool = _enabled("work is dealt to devices by a strategy")
    strategy: str = setting(
        "round_robin", choice("round_robin", "least_loaded", "memory_aware"), "how it is dealt"
    )


@dataclass(frozen=True, kw_only=True)
class Faults:
    """``distributed.fault_tolerance``."""

    enabled: bool = _enabled("checkpoints are written, and found again after a restart")
    checkpoint_frequency: int = setting(100, whole(1), "every how many steps")
    folder: str = setting("checkpoints", TEXT, "where they are written")


@dataclass(frozen=True, kw_only=True)
class Distributed:
    """``distributed``."""

    num_gpus: int = setting(1, whole(1), "over how many ranks memory is spread")
    memory_synchronization: Synchronization = section(Synchronization)
    load_balancing: Balancing = section(Balancing)
    fault_tolerance: Faults = section(Faults)


@dataclass(frozen=True, kw_only=True)
class Planning:
    """``planning``: what ``memfit fit`` is asked where its command line does not say."""

    workload: str | None = setting(None, TEXT, 'what to plan, like "hf:gpt2,batch=8" or "train.py:workload"')
    gpu: str | None = setting(None, TEXT, "the GPU to plan for, a name of `memfit gpus`")
    memory_budget: int | None = setting(None, SIZE, "the most that the step may reserve")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that can be configured."""

    memory: Memory = section(Memory)
    optimization: Optimization = section(Optimization)
    distributed: Distributed = section(Distributed)
    planning: Planning = section(Planning)


def is_section(key: Field[Any]) -> bool:
    """Whether a field of the tree holds further keys."""
    return key.default_factory is not MISSING


def keys_of(cls: type) -> dict[str, Field[Any]]:
    """The keys of a section, by name."""
    return {key.name: key for key in fields(cls)}


def section_class(key: Field[Any]) -> type:
    """The class behind a key that holds further keys."""
    return key.default_factory  # type: ignore[return-value]


def leaves(cls: type = Settings, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Field[Any]]]:
    """Every setting of the tree with its path, in order."""
    for name, key in keys_of(cls).items():
        if is_section(key):
            yield from leaves(section_class(key), (*path, name))
        else:
            yield (*path, name), key


def build(values: dict[tuple[str, ...], Any], cls: type = Settings, path: tuple[str, ...] = ()) -> Any:
    """The tree with ``values`` at their paths and defaults elsewhere."""
    given: dict[str, Any] = {}
    for name, key in keys_of(cls).items():
        here = (*path, name)
        if is_section(key):
            given[name] = build(values, section_class(key), here)
        elif here in values:
            given[name] = values[here]
    return cls(**given)
