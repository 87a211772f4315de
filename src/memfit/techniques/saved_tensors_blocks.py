"""Which blocks a technique on saved tensors works in, and what it is expected to save there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memfit.core.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from memfit.capture.graph import StepGraph, Storage

BYTES_OF = {"float64": 8, "float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2}


def checked_block_names(blocks: Any, *, technique: str) -> tuple[str, ...] | None:
    """The names as a tuple. UsageError for what is not a list of names."""
    if blocks is None:
        return None
    names_given = isinstance(blocks, Sequence) and not isinstance(blocks, str) and len(blocks)
    if not names_given or not all(isinstance(name, str) for name in blocks):
        raise UsageError(f"{technique}: blocks must be a list of module names, not {blocks!r}")
    return tuple(dict.fromkeys(blocks))


def chosen_blocks(model: nn.Module, blocks: Sequence[str] | None) -> list[tuple[str, nn.Module]]:
    """The named modules; by default the repeated blocks of the model, or the whole model when it has none.

    Raises:
        UsageError: a name that the model has not, a TorchScript module, or a container that is never called.
    """
    import torch

    from memfit.techniques.base import bare_model
    from memfit.techniques.blocks import block_names, get_block

    names = block_names(model) or [""] if blocks is None else blocks
    chosen: dict[int, tuple[str, nn.Module]] = {}
    for name in names:
        block = get_block(model, name) if name else bare_model(model)
        if isinstance(block, torch.jit.ScriptModule):
            raise UsageError(f"block {name!r} is a TorchScript module, whose forward cannot be replaced")
        if type(block).forward is torch.nn.Module.forward and "forward" not in vars(block):
            if blocks is None and not name:
                raise UsageError(
                    f"no repeated blocks found in this {type(block).__name__}, which is never called itself: "
                    "name them with blocks=[…]"
                )
            raise UsageError(f"{name!r} is a {type(block).__name__}, which is never called: name its members")
        chosen.setdefault(id(block), (name, block))
    return list(chosen.values())


def kept_otherwise(
    graph: StepGraph, blocks: Sequence[str] | None, least_elements: int, ratio: Callable[[str], float]
) -> Iterator[Storage]:
    """The storages when what ``blocks`` save is kept in ``ratio(dtype)`` of its bytes between the forward
    pass and its first use in the backward pass."""
    readers = _readers(graph)
    for storage in graph.storages:
        op = graph.ops[storage.born] if storage.saved and storage.born >= 0 else None
        if op is None or storage.category != "activation" or not _within(op.module, blocks):
            yield storage
            continue
        if storage.size_bytes < least_elements * BYTES_OF.get(op.dtype, 4):
            yield storage
            continue
        forward, backward = readers.get(storage.id, (storage.born, storage.died))
        kept_bytes = int(storage.size_bytes * ratio(op.dtype))
        last_forward = max(forward, storage.born)
        yield replace(storage, died=last_forward)
        if kept_bytes and backward > last_forward:
            yield replace(storage, size_bytes=kept_bytes, born=last_forward, died=storage.died)
        if backward > last_forward:
            yield replace(storage, born=backward)


def _readers(graph: StepGraph) -> dict[int, tuple[int, int]]:
    """Of each storage that a backward pass reads: its last reader before that, and the first reader in it."""
    found: dict[int, tuple[int, int]] = {}
    for op in graph.ops:
        for storage in op.inputs:
            forward, backward = found.get(storage, (-1, -1))
            if op.phase == "backward":
                found[storage] = (forward, op.index if backward < 0 else backward)
            elif backward < 0:
                found[storage] = (op.index, backward)
    return {storage: pair for storage, pair in found.items() if pair[1] >= 0}


def _within(module: str, blocks: Sequence[str] | None) -> bool:
    if blocks is None:
        return True
    return any(not block or module == block or module.startswith(f"{block}.") for block in blocks)
