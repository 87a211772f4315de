"""`MemorySynchronization`: what ranks must have alike is alike, every N steps; who differed, and repair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from memfit.core.errors import ToolFailure, UsageError
from memfit.distributed import groups
from memfit.distributed.fingerprints import fingerprints

Parameters = Literal["check", "average"]
Buffers = Literal["check", "average"]
Repair = Literal["majority", "raise"] | int


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """A tensor that ranks have not alike.

    Attributes:
        name: of the tensor, as the model names it; optimizer state is ``optimizer.NAME.KEY``.
        ranks: that differ from the source.
        source: the rank that the others were repaired from; None where nothing was repaired.
        hashes: what each rank has, by rank.
    """

    name: str
    ranks: tuple[int, ...]
    source: int | None
    hashes: Mapping[int, int]

    def __str__(self) -> str:
        repaired = "" if self.source is None else f", repaired from rank {self.source}"
        return f"{self.name}: rank {', '.join(map(str, self.ranks))} differed{repaired}"


@dataclass(frozen=True, kw_only=True)
class Synchronized:
    """What one synchronization found and did.

    Attributes:
        step: after which it was.
        checked: tensors that were compared; ``unchecked`` have no copy on another rank.
        averaged: tensors that were averaged over ranks.
        divergences: tensors that differed.
        statistics: of each number given to ``step``, the mean, least and greatest over ranks.
    """

    step: int
    checked: int
    unchecked: int
    averaged: int
    divergences: tuple[Divergence, ...]
    statistics: Mapping[str, tuple[float, float, float]]

    @property
    def ranks_that_differed(self) -> tuple[int, ...]:
        """All of them, over all tensors."""
        return tuple(sorted({number for one in self.divergences for number in one.ranks}))


@dataclass(frozen=True, kw_only=True)
class _Shared:
    """A tensor that the ranks of a group have alike."""

    name: str
    tensor: torch.Tensor
    ranks: tuple[int, ...]
    group: groups.Group


@dataclass
class MemorySynchronization:
    """Keeps ranks in step: every ``sync_frequency`` calls of `step` it compares and repairs.

    Parameters (and optimizer state, where given) are compared by 64-bit hashes that are made on the device:
    one small all-gather tells who differs. Data-parallel ranks should never differ; a flipped bit, a rank
    that missed an update, or an operation that is not deterministic shows here.

    Args:
        sync_frequency: steps between synchronizations.
        parameters: ``"check"``: they must be alike; ``"average"``: they are averaged (local SGD).
        buffers: ``"average"``: floating-point buffers (BatchNorm's statistics) are averaged, others compared;
            ``"check"``: all are compared.
        repair: ``"majority"``: ranks take the tensor that most have; a rank's number: they take that rank's;
            ``"raise"``: nothing is changed.

    Raises:
        UsageError: a value that cannot be meant.

    Examples:
        >>> sync = MemorySynchronization(sync_frequency=10)
        >>> model = torch.nn.Linear(2, 2)
        >>> [sync.step(model) is None for _ in range(10)].count(False)
        1
    """

    sync_frequency: int = 10
    parameters: Parameters = field(default="check", kw_only=True)
    buffers: Buffers = field(default="average", kw_only=True)
    repair: Repair = field(default="majority", kw_only=True)
    history: list[Synchronized] = field(default_factory=list, init=False)
    steps: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if (
            isinstance(self.sync_frequency, bool)
            or not isinstance(self.sync_frequency, int)
            or self.sync_frequency < 1
        ):
            raise UsageError(f"sync_frequency must be a number of 1 or more, not {self.sync_frequency!r}")
        for name, known in (("parameters", Parameters), ("buffers", Buffers)):
            if getattr(self, name) not in get_args(known):
                raise UsageError(
                    f"{name} must be one of {', '.join(get_args(known))}, not {getattr(self, name)!r}"
                )
        number = isinstance(self.repair, int) and not isinstance(self.repair, bool) and self.repair >= 0
        if self.repair not in ("majority", "raise") and not number:
            raise UsageError(
                f"repair must be 'majority', 'raise' or the number of a rank, not {self.repair!r}"
            )

    def step(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        statistics: Mapping[str, float] | None = None,
    ) -> Synchronized | None:
        """Count a step; after every ``sync_frequency`` of them, synchronize. Every rank must call this.

        Returns:
            what was found and done; None in the steps between.

        Raises:
            ToolFailure: ranks differ and cannot be repaired: ``repair="raise"``, or no majority.
        """
        self.steps += 1
        if self.steps % self.sync_frequency:
            return None
        return self.synchronize(model, optimizer, statistics=statistics)

    def synchronize(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        statistics: Mapping[str, float] | None = None,
    ) -> Synchronized:
        """Synchronize now, as `step` does when it is due."""
        groups.join()
        averaged: list[_Shared] = []
        compared: list[_Shared] = []
        for shared, mean in self._tensors(model, optimizer):
            (averaged if mean else compared).append(shared)
        for shared in averaged:
            _average(shared)
        alike = [shared for shared in compared if len(shared.ranks) > 1]
        found = self._compare(alike)
        result = Synchronized(
            step=self.steps,
            checked=len(alike),
            unchecked=len(compared) - len(alike),
            averaged=len(averaged),
            divergences=tuple(found),
            statistics=_merged(statistics or {}),
        )
        self.history.append(result)
        lost = [one for one in found if one.source is None]
        if lost:
            raise ToolFailure(self._cannot_repair(lost))
        return result

    def _tensors(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> Iterator[tuple[_Shared, bool]]:
        """Every tensor that ranks share, and whether it is averaged."""
        names: dict[torch.Tensor, str] = {}
        for name, parameter in model.named_parameters():
            names[parameter] = name
            yield _shared(name, parameter), self.parameters == "average"
        for name, buffer in model.named_buffers():
            yield _shared(name, buffer), self.buffers == "average" and buffer.is_floating_point()
        states = {} if optimizer is None else optimizer.state
        for key_parameter, state in states.items():
            for key in sorted(key for key, value in state.items() if isinstance(value, torch.Tensor)):
                name = f"optimizer.{names.get(key_parameter, 'unknown')}.{key}"
                yield _shared(name, state[key]), False

    def _compare(self, alike: Sequence[_Shared]) -> list[Divergence]:
        own = fingerprints([shared.tensor for shared in alike])
        everyone = groups.exchanged(own.tolist())
        found = []
        for index, shared in enumerate(alike):
            hashes = {number: everyone[number][index] for number in shared.ranks}
            if len(set(hashes.values())) > 1:
                found.append(self._repaired(shared, hashes))
        return found

    def _repaired(self, shared: _Shared, hashes: Mapping[int, int]) -> Divergence:
        source = self._source(hashes)
        right = hashes[min(hashes) if source is None else source]
        wrong = tuple(number for number, value in hashes.items() if value != right)
        if source is not None:
            _broadcast(shared, source)
        return Divergence(name=shared.name, ranks=wrong, source=source, hashes=hashes)

    def _source(self, hashes: Mapping[int, int]) -> int | None:
        if self.repair == "raise":
            return None
        if self.repair != "majority":
            return self.repair if self.repair in hashes else None
        (most, count), *others = Counter(hashes.values()).most_common()
        if others and others[0][1] == count:
            return None
        return next(number for number, value in hashes.items() if value == most)

    def _cannot_repair(self, lost: Sequence[Divergence]) -> str:
        shown = "; ".join(f"{one.name} (ranks {', '.join(map(str, one.hashes))})" for one in lost[:3])
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        why = {"raise": "repair='raise'", "majority": "no majority of ranks has the same"}
        reason = why.get(str(self.repair), f"rank {self.repair} has no copy")
        return (
            f"after step {self.steps} ranks differ in {shown}{more}, and {reason}: name a rank to repair "
            "from (MemorySynchronization(repair=0)), or go back to a checkpoint"
        )


def _shared(name: str, tensor: torch.Tensor) -> _Shared:
    """Who has the same as this rank of a tensor: all ranks; of a DTensor, those along a replicated dimension
    of its mesh."""
    from torch.distributed.tensor import DTensor

    name = name.removeprefix("module.")
    if not isinstance(tensor, DTensor):
        return _Shared(name=name, tensor=tensor.detach(), ranks=tuple(range(groups.world_size())), group=None)
    mesh = tensor.device_mesh
    copies = [dim for dim, placement in enumerate(tensor.placements) if placement.is_replicate()]
    local = tensor.to_local().detach()
    if len(copies) != 1 or mesh.size(copies[0]) == 1:
        return _Shared(name=name, tensor=local, ranks=(groups.rank(),), group=None)
    group = mesh.get_group(copies[0])
    return _Shared(name=name, tensor=local, ranks=tuple(dist.get_process_group_ranks(group)), group=group)


def _average(shared: _Shared) -> None:
    if len(shared.ranks) == 1:
        return
    with torch.no_grad():
        total = _sendable(shared.tensor)
        dist.all_reduce(total, group=shared.group)
        shared.tensor.copy_(total.div_(len(shared.ranks)))


def _broadcast(shared: _Shared, source: int) -> None:
    """Gives all ranks of the group the source's tensor."""
    with torch.no_grad():
        tensor = _sendable(shared.tensor)
        dist.broadcast(tensor, src=source, group=shared.group)
        shared.tensor.copy_(tensor)


def _sendable(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the rank's own device, which every backend takes: nccl knows no tensors of the host."""
    return tensor.to(groups.own_device(), copy=True, memory_format=torch.contiguous_format)


def _merged(statistics: Mapping[str, float]) -> dict[str, tuple[float, float, float]]:
    told: list[Any] = groups.exchanged({name: float(value) for name, value in statistics.items()})
    names = dict.fromkeys(name for one in told for name in one)
    merged = {}
    for name in names:
        values = [one[name] for one in told if name in one]
        merged[name] = (sum(values) / len(values), min(values), max(values))
    return merged
