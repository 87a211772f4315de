"""`wrap`: a model with a plan for several ranks, each change in the order in which it must come."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import torch
from torch import nn

from memfit.core.errors import UsageError
from memfit.distributed import groups
from memfit.planning.plan import Plan, apply_settings
from memfit.techniques.blocks import find_block_chains

Strategy = Literal["ddp", "fsdp2"]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

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
    (
        "fsdp2",
        "chunked_cross_entropy",
    ): "FSDP2 takes the output layer's weight away before the loss is computed",
    ("fsdp2", "qlora"): "quantized weights cannot be cut by rows",
}


def wrap(
    model: nn.Module,
    *,
    plan: Plan | None = None,
    strategy: Strategy = "ddp",
    optimizer: MakeOptimizer | None = None,
    mesh: Any = None,
    reshard_after_forward: bool = True,
) -> Any:
    """Make a model one of several ranks': the plan's module techniques, then DDP or FSDP2, then the optimizer
    and what the plan does to it.

    FSDP2 shards each repeated block and then the whole, so that one block is gathered at a time. DDP's
    gradients are views of its buckets, which saves a copy of them all.

    Args:
        model: on any device; it is moved to this rank's.
        plan: of `memfit.plan`, or from a file.
        strategy: ``"ddp"`` or ``"fsdp2"``.
        optimizer: makes the optimizer from parameters: ``lambda p: torch.optim.AdamW(p, lr=1e-3)``.
        mesh: of FSDP2: of two named dimensions, replicate along the first, shard along the second (HSDP).
        reshard_after_forward: of FSDP2's blocks: False keeps them whole until the backward pass.

    Returns:
        the wrapped model; with ``optimizer``, the pair of both.

    Raises:
        UsageError: no process group, a technique that does not go with the strategy, or a plan that needs the
            optimizer and is given none.
    """
    if strategy not in get_args(Strategy):
        raise UsageError(f"strategy must be one of {', '.join(get_args(Strategy))}, not {strategy!r}")
    groups.join()
    if not groups.in_group():
        raise UsageError(
            "wrap() is for ranks: run under torchrun or memfit launch, or init_process_group first"
        )
    before, after = _divided(plan, strategy, has_optimizer=optimizer is not None)
    if plan is not None:
        plan._check_blocks(model)
    model.to(groups.own_device())
    apply_settings(before, model)
    wrapped = _ddp(model) if strategy == "ddp" else _fsdp2(model, mesh, reshard_after_forward)
    if optimizer is None:
        return wrapped
    made = optimizer(parameter for parameter in wrapped.parameters() if parameter.requires_grad)
    apply_settings(after, wrapped, made)
    return wrapped, made


def _divided(plan: Plan | None, strategy: str, *, has_optimizer: bool) -> tuple[list[Any], list[Any]]:
    """The plan's techniques that come before wrapping, and after."""
    before: list[Any] = []
    after: list[Any] = []
    for settings in plan.techniques if plan is not None else ():
        name = settings["technique"]
        if (strategy, name) in REFUSED:
            raise UsageError(f"{name} does not go with {strategy}: {REFUSED[strategy, name]}")
        if name in AFTER_WRAPPING and not has_optimizer:
            raise UsageError(
                f"the plan has {name}, which changes the optimizer: wrap(…, optimizer=lambda p: AdamW(p))"
            )
        (after if name in AFTER_WRAPPING else before).append(settings)
    return before, after


def _ddp(model: nn.Module) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    device = groups.own_device()
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)


def _fsdp2(model: nn.Module, mesh: Any, reshard: bool) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    known = mesh or init_device_mesh(groups.own_device().type, (groups.world_size(),))
    for chain in find_block_chains(model):
        for name in chain.names:
            fully_shard(model.get_submodule(name), mesh=known, reshard_after_forward=reshard)
    fully_shard(model, mesh=known)
    return model
