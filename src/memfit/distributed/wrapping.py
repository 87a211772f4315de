"""`wrap`: a model with a plan for several ranks, each change in the order in which it must come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from memfit.core.errors import UsageError
from memfit.distributed import groups
from memfit.distributed.strategies import DATA_PARALLEL, Strategy, strategy_named
from memfit.planning.figures import Settings
from memfit.planning.plan import Plan, apply_settings
from memfit.techniques.blocks import find_block_chains

MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]

AFTER_WRAPPING = (
    "low_memory_optimizer",
    "optimizer_implementation",
    "optimizer_in_backward",
    "offloaded_optimizer_state",
)
"""Techniques that change the optimizer, which exists only when the model is wrapped: it steps on the shards.
All others change modules, and come first: FSDP2 shards what they leave, and DDP counts the parameters that
they leave trainable."""

REFUSED: dict[tuple[str, str], str] = {
    ("ddp", "optimizer_in_backward"): "it steps before the ranks' gradients are added up; use fsdp2",
    ("fsdp2", "qlora"): "quantized weights cannot be cut by rows",
    **{
        (
            "zero1",
            name,
        ): "ZeRO's optimizer is made of the ranks' own parts, which the technique does not reach"
        for name in AFTER_WRAPPING
    },
    **{
        ("tp", name): "it works on layers that are whole"
        for name in (
            "chunked_cross_entropy",
            "qlora",
            "lora",
            "optimizer_in_backward",
            "low_memory_optimizer",
        )
    },
}
"""By what is done to the model (``ddp`` for zero1 as well, ``fsdp2`` for hsdp) and by technique."""


def wrap(
    model: nn.Module,
    *,
    plan: Plan | None = None,
    strategy: str = "ddp",
    optimizer: MakeOptimizer | None = None,
    mesh: Any = None,
    reshard_after_forward: bool | None = None,
) -> Any:
    """Make a model one of several ranks': the plan's module techniques, then the strategy, then the optimizer
    and what the plan does to it.

    FSDP2 shards each repeated block and then the whole, so that one block is gathered at a time. DDP's
    gradients are views of its buckets, which saves a copy of them all.

    Args:
        model: on any device; it is moved to this rank's, under FSDP2 and tensor parallel a block at a time.
            Parameters on ``meta`` become shards with no values: initialise them, or load a checkpoint.
        plan: of `memfit.plan`, or from a file.
        strategy: a name of `memfit.distributed.strategies`: ``"ddp"``, ``"zero1"``, ``"fsdp2"``,
            ``"fsdp2-keep"``, ``"hsdp"``, ``"tp"``, ``"tp2+fsdp2"``.
        optimizer: makes the optimizer from parameters: ``lambda p: torch.optim.AdamW(p, lr=1e-3)``.
        mesh: of FSDP2: of two named dimensions, replicate along the first, shard along the second (HSDP).
        reshard_after_forward: of FSDP2's blocks: False keeps them whole until the backward pass, as
            ``fsdp2-keep`` does.

    Returns:
        the wrapped model; with ``optimizer``, the pair of both.

    Raises:
        UsageError: no process group, a strategy that cannot be, a technique that does not go with it, or a
            plan that needs the optimizer and is given none.
    """
    groups.join()
    if not groups.in_group():
        raise UsageError(
            "wrap() is for ranks: run under torchrun or memfit launch, or init_process_group first"
        )
    chosen = strategy_named(strategy, groups.world_size())
    if plan is not None:
        plan._check_blocks(model)
    wrapped, made = wrap_by_settings(
        model, () if plan is None else plan.techniques, chosen, optimizer, mesh, reshard_after_forward
    )
    return wrapped if optimizer is None else (wrapped, made)


def wrap_by_settings(
    model: nn.Module,
    techniques: Sequence[Settings],
    strategy: Strategy,
    optimizer: MakeOptimizer | None = None,
    mesh: Any = None,
    reshard_after_forward: bool | None = None,
) -> tuple[nn.Module, Any]:
    """`wrap` with a plan's techniques as settings and a strategy as a value: model, and optimizer or None."""
    before, after = _divided(techniques, strategy, has_optimizer=optimizer is not None)
    wrapped = _wrapped(model, before, strategy, mesh, reshard_after_forward)
    if optimizer is None:
        return wrapped, None
    made = _optimizer(wrapped, optimizer, strategy)
    apply_settings(after, wrapped, made)
    return wrapped, made


def refusal(strategy: Strategy, technique: str) -> str | None:
    """Why a technique does not go with a strategy; None where it does."""
    done = [
        *(["fsdp2"] if strategy.is_sharded else [strategy.data or ""]),
        *(["ddp"] if strategy.data == "zero1" else []),
        *(["tp"] if strategy.tensor > 1 else []),
    ]
    return next((REFUSED[kind, technique] for kind in done if (kind, technique) in REFUSED), None)


def _divided(
    techniques: Sequence[Settings], strategy: Strategy, *, has_optimizer: bool
) -> tuple[list[Any], list[Any]]:
    """The techniques that come before wrapping, and after."""
    before: list[Any] = []
    after: list[Any] = []
    for settings in techniques:
        name = settings["technique"]
        why = refusal(strategy, name)
        if why is not None:
            raise UsageError(f"{name} does not go with {strategy.name}: {why}")
        if name in AFTER_WRAPPING and not has_optimizer:
            raise UsageError(
                f"the plan has {name}, which changes the optimizer: wrap(…, optimizer=lambda p: AdamW(p))"
            )
        (after if name in AFTER_WRAPPING else before).append(settings)
    return before, after


def _wrapped(
    model: nn.Module, before: list[Any], strategy: Strategy, mesh: Any, reshard: bool | None
) -> nn.Module:
    device = groups.own_device()
    if not strategy.is_sharded and strategy.tensor == 1:
        model.to(device)
    apply_settings(before, model)
    dp_mesh = mesh if mesh is not None or strategy.tensor == 1 else _cut_layers(model, strategy, device)
    if strategy.is_sharded:
        keep = strategy.data == "fsdp2-keep" if reshard is None else not reshard
        _shard(model, dp_mesh or _data_mesh(strategy, device), keep=keep)
    _move(model, device)
    if strategy.data in ("ddp", "zero1"):
        return _ddp(model, device, dp_mesh)
    return model


def _move(model: nn.Module, device: torch.device) -> None:
    """All tensors to the rank's device; what is on ``meta`` gets memory there. Shared ones stay shared."""
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if not tensor.is_meta:
                    tensor.data = tensor.data.to(device)
                    continue
                if id(tensor) not in made:
                    empty = torch.empty_like(tensor.detach(), device=device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    new = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                    made[id(tensor)] = (tensor, new)
                table[name] = made[id(tensor)][1]  # type: ignore[assignment]


def _cut_layers(model: nn.Module, strategy: Strategy, device: torch.device) -> Any:
    """Tensor parallel over neighbours; the mesh of those that have different samples, if there are."""
    from torch.distributed.device_mesh import init_device_mesh

    from memfit.distributed.tensor_parallel import parallelize

    sizes = (strategy.data_ranks, strategy.tensor)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("data", "tensor"))
    parallelize(model, mesh["tensor"])
    return None if strategy.data is None else mesh["data"]


def _data_mesh(strategy: Strategy, device: torch.device) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    if strategy.data != "hsdp":
        return init_device_mesh(device.type, (strategy.ranks,))
    sizes = (strategy.data_ranks // strategy.shard_ranks, strategy.shard_ranks)
    return init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "shard"))


def _shard(model: nn.Module, mesh: Any, *, keep: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    for chain in find_block_chains(model):
        for name in chain.names:
            fully_shard(model.get_submodule(name), mesh=mesh, reshard_after_forward=not keep)
    fully_shard(model, mesh=mesh)


def _ddp(model: nn.Module, device: torch.device, mesh: Any) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    ids = [device.index] if device.type == "cuda" else None
    group = None if mesh is None else mesh.get_group()
    return DistributedDataParallel(model, device_ids=ids, process_group=group, gradient_as_bucket_view=True)


def _optimizer(model: nn.Module, make: MakeOptimizer, strategy: Strategy) -> torch.optim.Optimizer:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if strategy.data == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        whole: Any = ZeroRedundancyOptimizer  # takes whatever makes an optimizer
        made: torch.optim.Optimizer = whole(trainable, optimizer_class=make)
        return made
    if strategy.tensor == 1:
        return make(trainable)
    # Optimizers work on many parameters at once, which must lie on the same mesh.
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in trainable:
        by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return make([{"params": parameters} for parameters in by_mesh.values()])


__all__ = ["AFTER_WRAPPING", "DATA_PARALLEL", "REFUSED", "MakeOptimizer", "refusal", "wrap"]
