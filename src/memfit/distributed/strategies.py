"""Ways to train one model on several GPUs, by the names that `wrap` and ``memfit scale`` take. No torch here.

| name | what each rank holds |
|---|---|
| ``ddp`` | everything whole; gradients are averaged |
| ``zero1`` | as ddp, but of the optimizer's state its part only (`ZeroRedundancyOptimizer`) |
| ``fsdp2`` | its shard of parameters, gradients and state; a block is gathered when it runs |
| ``fsdp2-keep`` | as fsdp2, but a gathered block stays whole until its backward pass |
| ``hsdp`` | sharded within groups of ranks, replicated between them |
| ``tp``, ``tp4`` | its part of each layer's matrices (all ranks, or groups of 4) |
| ``tp4+fsdp2`` | groups of 4 share layers; fsdp2 (or fsdp2-keep) over the groups |
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from memfit.core.errors import UsageError

DataParallel = Literal["ddp", "zero1", "fsdp2", "fsdp2-keep", "hsdp"]
DATA_PARALLEL: tuple[DataParallel, ...] = get_args(DataParallel)
BESIDE_TENSOR_PARALLEL = ("fsdp2", "fsdp2-keep")
SHARDED = ("fsdp2", "fsdp2-keep", "hsdp")
"""Those whose parameters are cut by FSDP2."""

DEFAULT_NAMES = ("ddp", "zero1", "fsdp2", "fsdp2-keep", "hsdp", "tp")
MACHINE = 8
"""GPUs on one machine, which HSDP shards over and beyond which tensor parallel is not proposed."""

_TENSOR = re.compile(r"tp(\d*)(?:\+([a-z0-9-]+))?$")


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How one model is spread over a number of ranks.

    Args:
        ranks: of the whole job.
        data: how those that have different samples share the work; None: all have the same samples.
        tensor: ranks that share each layer; 1: none do.
    """

    ranks: int
    data: DataParallel | None
    tensor: int = 1

    @property
    def name(self) -> str:
        """As `strategy_named` takes it."""
        if self.tensor == 1:
            return self.data or "one GPU"
        return f"tp{self.tensor}" + (f"+{self.data}" if self.data else "")

    @property
    def data_ranks(self) -> int:
        """Into how many parts the batch is cut."""
        return self.ranks // self.tensor

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 cuts the parameters."""
        return self.data in SHARDED

    @property
    def shard_ranks(self) -> int:
        """Of HSDP: ranks in a group that shards; a machine of 8, or half of fewer."""
        return next(
            (n for n in range(min(MACHINE, self.data_ranks // 2), 1, -1) if self.data_ranks % n == 0), 1
        )


def strategy_named(name: str, ranks: int) -> Strategy:
    """The strategy of that name on so many ranks.

    Raises:
        UsageError: an unknown name, or one that cannot be on so many ranks.
    """
    if name in DATA_PARALLEL:
        found = Strategy(ranks=ranks, data=_data(name))
    else:
        match = _TENSOR.match(name)
        if match is None or (match[2] and match[2] not in DATA_PARALLEL):
            raise UsageError(
                f"strategy {name!r} is not known: use {', '.join(DATA_PARALLEL)}, tp, tp2 or tp2+fsdp2"
            )
        if match[2] not in (None, *BESIDE_TENSOR_PARALLEL):
            raise UsageError(
                f"{name}: over groups that share layers only {' or '.join(BESIDE_TENSOR_PARALLEL)} "
                "can be had (PyTorch's DDP takes no layers that are cut)"
            )
        tensor = int(match[1] or ranks)
        if tensor < 1 or ranks % tensor:
            raise UsageError(f"{name}: {ranks} ranks are no multiple of {tensor}")
        rest = _data(match[2] or "fsdp2") if tensor < ranks else None
        found = Strategy(ranks=ranks, data=rest, tensor=tensor)
    if found.data == "hsdp" and found.shard_ranks == 1:
        raise UsageError(
            f"{name} needs at least 4 ranks with different samples, in groups of equal size; "
            f"{ranks} ranks give {found.data_ranks}"
        )
    return found


def _data(name: str) -> DataParallel:
    return next(known for known in DATA_PARALLEL if known == name)


def strategies_for(ranks: int, names: Sequence[str]) -> tuple[Strategy, ...]:
    """What is compared on so many ranks: of one GPU the plain step, of ``tp`` every degree up to a machine's.

    A name that cannot be on so many ranks (hsdp on 2) is left out; an unknown one is refused.
    """
    if ranks == 1:
        for name in names:
            strategy_named(name, 64)  # refuses what is not known
        return (Strategy(ranks=1, data=None),)
    wanted: list[str] = []
    for name in names:
        if name == "tp":
            degrees = [n for n in (2, 4, 8) if ranks % n == 0]
            wanted += [f"tp{n}" for n in degrees]
        else:
            strategy_named(name, 64)
            wanted.append(name)
    found: list[Strategy] = []
    for name in wanted:
        try:
            found.append(strategy_named(name, ranks))
        except UsageError:
            continue
    return tuple(dict.fromkeys(found))
