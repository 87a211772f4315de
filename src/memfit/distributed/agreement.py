"""Steps on several ranks against the same steps in one process: are gradients and parameters the same?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memfit.core.errors import UsageError
from memfit.distributed import groups
from memfit.distributed.strategies import strategy_named
from memfit.distributed.whole import whole_gradients, whole_parameters
from memfit.distributed.wrapping import MakeOptimizer, wrap
from memfit.planning.plan import Plan

TOLERANCE = 1e-6
Build = Callable[[], nn.Module]
Loss = Callable[[nn.Module, Any], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How far the ranks' training is from that of one process.

    Attributes:
        strategy: of the ranks.
        ranks: how many.
        steps: that were compared.
        bitwise: whether nothing differed at all.
        gradient_error: the largest difference of a gradient of the first step, absolute.
        parameter_error: the largest difference of a parameter after the last step, absolute.
        ranks_agree: whether all ranks had the same gradients and parameters, bit for bit.
        worst: the tensor that differed most; None where none did.
        tolerance: what either error may be.
    """

    strategy: str
    ranks: int
    steps: int
    bitwise: bool
    gradient_error: float
    parameter_error: float
    ranks_agree: bool
    worst: str | None
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether ranks agree with each other, and with the one process within the tolerance."""
        return self.ranks_agree and max(self.gradient_error, self.parameter_error) <= self.tolerance

    def __str__(self) -> str:
        how = (
            "bit for bit" if self.bitwise else f"within {max(self.gradient_error, self.parameter_error):.1e}"
        )
        verdict = f"equals one process {how}" if self.passed else f"differs from one process ({self.worst})"
        same = "" if self.ranks_agree else "; the ranks differ from each other"
        return f"{self.strategy} on {self.ranks} ranks {verdict} after {self.steps} steps{same}"


def compare_with_one_process(
    build: Build,
    loss: Loss,
    batches: Sequence[torch.Tensor],
    *,
    optimizer: MakeOptimizer,
    strategy: str = "ddp",
    plan: Plan | None = None,
    tolerance: float = TOLERANCE,
    seed: int = 0,
) -> Agreement:
    """Train with ``strategy`` and ``plan`` on all ranks, and plainly in one process, and compare; every rank
    must call this.

    Args:
        build: makes the model; it is called after seeding, so all ranks get the same.
        loss: the mean over the samples of a batch.
        batches: one a step, of all ranks together; dimension 0 is divided among them evenly.
        optimizer: makes the optimizer from parameters.
        strategy: as `wrap` takes it.
        plan: as `wrap` takes it.
        tolerance: absolute, for gradients and parameters. A model with dropout or BatchNorm computes
            something else on a part of a batch, and does not agree.
        seed: of model and steps.

    Raises:
        UsageError: a batch that cannot be divided evenly.
    """
    groups.join()
    chosen = strategy_named(strategy, groups.world_size())
    parts = chosen.data_ranks
    if any(len(batch) % parts for batch in batches):
        raise UsageError(f"each batch must divide evenly over {parts} ranks, not {[len(b) for b in batches]}")
    torch.manual_seed(seed)
    model, made = wrap(build(), plan=plan, strategy=strategy, optimizer=optimizer)
    own = [batch.tensor_split(parts)[groups.rank() // chosen.tensor] for batch in batches]
    many = _trained(model, made, loss, own)
    torch.manual_seed(seed)
    plain = build().to(groups.own_device())
    one = _trained(plain, optimizer(plain.parameters()), loss, batches)
    return _agreement(one, many, strategy, len(batches), tolerance)


def _trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, batches: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Gradients of the first step and parameters after the last, whole, by name."""
    seen: dict[str, torch.Tensor] = {}
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        loss(model, batch.to(groups.own_device())).backward()
        if number == 0:
            seen |= {f"gradient of {name}": grad for name, grad in whole_gradients(model).items()}
        optimizer.step()
    return seen | {f"parameter {name}": value for name, value in whole_parameters(model).items()}


def _agreement(
    one: Mapping[str, torch.Tensor],
    many: Mapping[str, torch.Tensor],
    strategy: str,
    steps: int,
    tolerance: float,
) -> Agreement:
    from memfit.distributed.fingerprints import fingerprints

    names = sorted(one.keys() & many.keys())
    errors = {name: float((one[name].double() - many[name].double()).abs().max()) for name in names}
    errors |= dict.fromkeys(one.keys() ^ many.keys(), float("inf"))  # techniques may add parameters, say LoRA
    prints = groups.exchanged(fingerprints([many[name] for name in names]).tolist())
    worst = max(errors, key=lambda name: errors[name], default=None)
    return Agreement(
        strategy=strategy,
        ranks=groups.world_size(),
        steps=steps,
        bitwise=not any(errors.values()),
        gradient_error=max((e for name, e in errors.items() if name.startswith("gradient")), default=0.0),
        parameter_error=max((e for name, e in errors.items() if name.startswith("parameter")), default=0.0),
        ranks_agree=all(other == prints[0] for other in prints),
        worst=worst if worst is not None and errors[worst] else None,
        tolerance=tolerance,
    )
