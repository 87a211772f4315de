"""What a guard does on several ranks: all know of each other's shortage before anybody updates weights.

Ranks meet twice in a step: before gradients are averaged, and after the weights were updated. A rank that ran
out of memory comes to the meeting that is next for the others, which then leave their step as well, and all
go down the ladder together. This is right only where nothing else of the step waits for other ranks, so the
guard averages the gradients itself (DistributedDataParallel does it in the backward pass, and would wait).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from memfit.core.errors import ToolFailure, UsageError

FINE, SHORT, BROKEN = range(3)
"""How a rank comes to a meeting; the worst of all counts."""


class AnotherRankShort(RuntimeError):
    """Another rank ran out of memory: the step is left, and run again by all."""


class AnotherRankFailed(ToolFailure):
    """Another rank's step failed otherwise: this one ends as well, for nobody will meet it."""


class GuardedRanks:
    """The ranks of the default process group, as a guard sees them.

    Args:
        model: whose gradients are averaged; the same on all ranks, and wrapped by nothing.

    Raises:
        UsageError: a model whose own collectives would be left waiting.
    """

    def __init__(self, model: nn.Module) -> None:
        _refuse_other_collectives(model)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        device = self._parameters[0].device if dist.get_backend() == "nccl" else torch.device("cpu")
        # Made now: when memory is short there may be none for them.
        self._state = torch.zeros(1, dtype=torch.int32, device=device)
        self._has_gradient = torch.zeros(len(self._parameters), dtype=torch.int32, device=device)
        self._averaged = False

    def begin(self) -> None:
        """A new try of the step."""
        self._averaged = False

    def synchronize(self) -> None:
        """The gradients become the mean over ranks; to be called when the whole batch's are there.

        Raises:
            AnotherRankShort: another rank ran out of memory before it came here.
        """
        self._meet(FINE)
        self._averaged = True
        with torch.no_grad():
            self._has_gradient.copy_(torch.tensor([p.grad is not None for p in self._parameters]))
            dist.all_reduce(self._has_gradient, dist.ReduceOp.MAX)
            for parameter, used in zip(self._parameters, self._has_gradient.tolist(), strict=True):
                if used:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()

    def finish(self) -> None:
        """The step is done here; raises AnotherRankShort where another rank ran out in its update."""
        if not self._averaged:
            raise UsageError(
                "guard: on several ranks the step must call synchronize() between its backward passes and "
                "the optimizer's step; memfit.training_step makes such a step"
            )
        self._meet(FINE)

    def tell(self, state: int) -> None:
        """This rank left its step: ``SHORT`` of memory, or ``BROKEN`` by another error."""
        self._worst(state)

    def hopeless(self, here: bool) -> bool:
        """Whether any rank cannot run the step again."""
        return self._worst(int(here)) > 0

    def _meet(self, state: int) -> None:
        worst = self._worst(state)
        if worst == SHORT:
            raise AnotherRankShort("another rank ran out of memory")
        if worst == BROKEN:
            raise AnotherRankFailed("guard: the step failed on another rank; its error is told there")

    def _worst(self, state: int) -> int:
        self._state.fill_(state)
        dist.all_reduce(self._state, dist.ReduceOp.MAX)
        return int(self._state.item())


def ranks_of(model: nn.Module, takes_synchronize: bool) -> GuardedRanks | None:
    """The ranks to agree with; None where there is one process.

    Raises:
        UsageError: several ranks, and a step or a model with which they cannot agree.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    if not takes_synchronize:
        raise UsageError(
            "guard: with several ranks, one that runs a step again would leave the others waiting: make the "
            "step with memfit.training_step, or give yours a parameter synchronize, to be called before the "
            "optimizer"
        )
    return GuardedRanks(model)


def _refuse_other_collectives(model: nn.Module) -> None:
    refused = ("DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel", "SyncBatchNorm")
    for name, module in model.named_modules():
        kind = next((base.__name__ for base in type(module).__mro__ if base.__name__ in refused), None)
        if kind is not None:
            raise UsageError(
                f"guard: {name or 'the model'} is a {kind}, which would wait for a rank that has left its "
                "step; give the model itself: on several ranks the guard averages its gradients"
            )
    if any(_is_sharded(parameter) for parameter in model.parameters()):
        raise UsageError("guard: the model is cut over ranks, which wait for each other within a step")


def _is_sharded(parameter: Any) -> bool:
    return hasattr(parameter, "device_mesh")
