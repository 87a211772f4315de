"""Plans on models that techniques are known to break: what training leaves is that of the plain steps.

The kinds are from public reports: tied weights, statistics of batch norm, dropout, frozen weights with
adapters and blocks that take None and numbers, sparse gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from memfit.core.exactness import Exactness
from memfit.core.workload import Workload
from memfit.planning.figures import Settings
from memfit.planning.lever_table import LEVER_KINDS
from memfit.planning.plan import apply_settings
from memfit.planning.verify import compare
from memfit.techniques import technique_from_settings, undo_all

WIDTH, TOKENS = 64, 70


class Block(nn.Module):
    """Takes None and a number, has dropout or batch norm, and adapters on a frozen weight where asked."""

    def __init__(self, *, adapters: bool, dropout: float, batch_norm: bool) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(not adapters)
        self.norm: nn.Module = nn.BatchNorm1d(WIDTH) if batch_norm else nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Parameter(torch.randn(2, WIDTH) * 0.1) if adapters else None
        self.up = nn.Parameter(torch.randn(WIDTH, 2) * 0.1) if adapters else None

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
        y = self.base(self.norm(x.flatten(0, 1)).view_as(x))
        if self.down is not None and self.up is not None:
            y = y + scale * (x @ self.down.T @ self.up.T)
        return x + self.dropout(torch.tanh(y if mask is None else y * mask))


class Odd(nn.Module):
    def __init__(
        self, *, tied: bool = False, sparse: bool = False, frozen: bool = False, **block: Any
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH, sparse=sparse).requires_grad_(not frozen)
        settings = {"adapters": False, "dropout": 0.0, "batch_norm": False, **block}
        self.blocks = nn.ModuleList(Block(**settings) for _ in range(3))
        self.head = nn.Linear(WIDTH, 50, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, None, 0.5)
        logits: torch.Tensor = self.head(x)
        return logits


MODELS: Mapping[str, Callable[[], Odd]] = {
    "tied": lambda: Odd(tied=True),
    "batch norm": lambda: Odd(batch_norm=True),
    "dropout": lambda: Odd(dropout=0.3),
    "adapters": lambda: Odd(adapters=True, frozen=True),
    "sparse": lambda: Odd(sparse=True),
}
OFFLOADED: Settings = {"technique": "activation_offload", "blocks": ["blocks.0", "blocks.1"]}
LATE: Settings = {"technique": "gradient_checkpointing", "blocks": {"blocks.2": []}}
ALL: Settings = {"technique": "gradient_checkpointing", "blocks": {f"blocks.{n}": [] for n in range(3)}}
DROPPED: Settings = {"technique": "rematerialization", "blocks": {f"blocks.{n}": [] for n in range(3)}}
EARLY: Settings = {"technique": "optimizer_in_backward"}
ON_HOST: Settings = {"technique": "offloaded_optimizer_state"}
PLANS: Mapping[str, tuple[Sequence[Settings], Exactness]] = {
    "offloaded, rest recomputed": ([LATE, OFFLOADED], "exact"),
    "recomputed from offloaded inputs": ([ALL, OFFLOADED], "exact"),
    "dropped, stepped in backward": ([DROPPED, EARLY], "reordered"),
    "recomputed, states on the host": ([ALL, ON_HOST], "reordered"),
    "parameters on the host": ([{"technique": "parameter_offload"}, LATE], "reordered"),
}


def workload(kind: str) -> Workload:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1) if kind == "sparse" else torch.optim.AdamW(parameters)

    return Workload(
        name=kind,
        model=MODELS[kind],
        batch=lambda: torch.randint(0, 50, (2, TOKENS)),
        loss=lambda model, ids: functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()),
        optimizer=optimizer,
    )


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", MODELS)
def test_three_steps_are_bitwise_those_of_the_plain_model(kind: str, plan: str) -> None:
    techniques, exactness = PLANS[plan]
    verified = compare(workload(kind), techniques, exactness)
    assert verified.bitwise, (verified.differences, verified.max_relative_error)


@pytest.mark.parametrize("plan", PLANS)
def test_tied_weights_stay_one_while_a_plan_is_applied_and_after(plan: str) -> None:
    model = Odd(tied=True)
    optimizer = torch.optim.AdamW(model.parameters())
    techniques = [{**s, "to": "disk"} if s["technique"] == "parameter_offload" else s for s in PLANS[plan][0]]
    apply_settings(techniques, model, optimizer)
    assert model.head.weight is model.embedding.weight
    undo_all(model)
    assert model.head.weight is model.embedding.weight


def test_weights_in_bf16_keep_small_updates() -> None:
    """No lever rounds an update away that fp32 weights would have taken."""
    low = [kind for kind in LEVER_KINDS if kind.settings.get("weights") == "bf16"]
    assert low
    assert all(getattr(technique_from_settings(kind.settings), "rounding", "") != "nearest" for kind in low)
