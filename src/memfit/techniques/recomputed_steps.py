"""What a step needs when chosen storages are dropped and computed again: a captured step, played anew.

No torch here: planning asks this thousands of times. The rules are those of
`memfit.techniques.rematerialization`: a dropped storage goes after its last use in the forward pass, is
computed again just before the backward operator that first reads it, from what is held, each operator once,
and stays as long as in the plain step. What is computed on the way and is asked for later stays as well; the
rest goes at once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from memfit.capture.graph import Op, StepGraph
from memfit.techniques.operation_names import OperationNames, enclosing_block

_MAKES_MEMORY = ("empty", "new_empty", "zeros", "new_zeros", "ones", "new_ones", "full", "new_full")


@dataclass(frozen=True)
class Played:
    """A step with storages dropped: its peak, where it is, and the operators that ran again, in their
    order."""

    peak_bytes: int
    peak_index: int
    run_again: tuple[int, ...]
    live_bytes: npt.NDArray[np.int64]


class RecomputedStep:
    """A plain step whose blocks may drop what they save.

    Args:
        graph: the step, without recomputation, one batch in one piece.
        blocks: names of the blocks, ``""`` for the model outside of them.
        lives: for storages the last forward operator during which they are there though they are dropped,
            where that is known (see `memfit.techniques.dropped_lives`): Python may hold what no operator
            reads any more. The last that touches them otherwise.
    """

    def __init__(
        self, graph: StepGraph, blocks: Sequence[str], lives: Mapping[int, int] | None = None
    ) -> None:
        self.graph = graph
        self.blocks = tuple(blocks)
        self._lives = dict(lives or {})
        self._number = {name: n for n, name in enumerate(self.blocks)}
        self.forward = tuple(op for op in graph.ops if op.phase == "forward" and not op.is_view)
        self.block_of: dict[int, str | None] = {}
        self.name_of: dict[int, str] = {}
        names, outside = OperationNames(), set(graph.meta.get("outside_of_modules", ()))
        for op in self.forward:
            if op.index in outside:  # nothing that a technique on the model can reach
                self.block_of[op.index], self.name_of[op.index] = None, ""
                continue
            block = enclosing_block(op.module, self._number)
            self.block_of[op.index] = block
            self.name_of[op.index] = names.next(block or "", _base(op))

    @cached_property
    def writers(self) -> dict[int, tuple[int, ...]]:
        """For each storage of the forward pass the operators that fill it: its maker first."""
        found: dict[int, list[int]] = defaultdict(list)
        for op in self.forward:
            made = [s for s in op.outputs if self.graph.storages[s].born == op.index]
            for storage in dict.fromkeys((*made, *op.mutates)):
                found[storage].append(op.index)
        return {storage: tuple(ops) for storage, ops in found.items()}

    @cached_property
    def recomputable(self) -> frozenset[int]:
        """Storages that can be made again: every writer is an operator that may run again, in a named
        block."""
        return frozenset(
            storage
            for storage, ops in self.writers.items()
            if self.graph.storages[storage].born == ops[0] and all(map(self._may_run_again, ops))
        )

    def _may_run_again(self, index: int) -> bool:
        op = self.graph.ops[index]
        if self.block_of[index] is None or not op.name.startswith("aten.") or len(op.mutates) > 1:
            return False
        if op.mutates and any(self.graph.storages[s].born == index for s in op.outputs):
            return "batch_norm" in op.name
        return bool(op.inputs) and not _base(op).startswith(_MAKES_MEMORY)

    @cached_property
    def readers(self) -> dict[int, tuple[int, ...]]:
        """For each storage of the forward pass the backward operators that read it, views included."""
        found: dict[int, list[int]] = defaultdict(list)
        for op in self.graph.ops:
            if op.phase == "backward":
                for storage in op.inputs:
                    if storage in self.writers:
                        found[storage].append(op.index)
        return {storage: tuple(ops) for storage, ops in found.items()}

    @cached_property
    def candidates(self) -> tuple[int, ...]:
        """What may be dropped: saved, recomputable, and read by a backward operator."""
        storages = self.graph.storages
        return tuple(
            s
            for s in sorted(self.recomputable)
            if storages[s].saved and s in self.readers and storages[s].size_bytes
        )

    @cached_property
    def extras(self) -> tuple[int, ...]:
        """What the plain step does not save and blocks may keep all the same, for others to be made from:
        products, what several operators read, and what is kept with what is saved."""
        storages = self.graph.storages
        makers = {self.writers[s][0] for s in self.candidates}
        return tuple(
            s
            for s in sorted(self.recomputable)
            if not storages[s].saved
            and storages[s].size_bytes
            and (
                len(self.consumers[s]) > 1
                or self.graph.ops[self.writers[s][0]].flops
                or self.writers[s][0] in makers
            )
        )

    @cached_property
    def _until(self) -> dict[int, int]:
        """For each forward operator the last operator of the step that can need what it makes."""
        until: dict[int, int] = {}
        for op in reversed(self.forward):
            last = -1
            for storage in op.outputs:
                if self.graph.storages[storage].saved:
                    last = max(last, self.storage_dies(storage))
                else:
                    last = max([last, *(until.get(reader, -1) for reader in self.consumers[storage])])
            until[op.index] = last
        return until

    def needed_until(self, storage: int, kept: Collection[int] = ()) -> int:
        """The last operator for which an unsaved storage stays when it is kept; -1 where all that is made
        from it is kept, so that nobody needs it."""
        return max(
            (self._until[op] for op in self.consumers[storage] if self.maker(op) not in kept), default=-1
        )

    def maker(self, op: int) -> int:
        """The operator whose being kept decides about what ``op`` writes: itself, or the maker of what it
        changes in place."""
        changed = [s for s in self.graph.ops[op].mutates if s in self.recomputable]
        return self.writers[changed[0]][0] if changed else op

    def storage_dies(self, storage: int) -> int:
        """The last operator of the plain step during which a storage is there."""
        died = self.graph.storages[storage].died
        return died if died >= 0 else len(self.graph.ops) - 1

    @cached_property
    def consumers(self) -> dict[int, tuple[int, ...]]:
        """For each storage the forward operators that make others from it, and may run again."""
        found: dict[int, list[int]] = {storage: [] for storage in self.writers}
        for op in self.forward:
            makes = any(s in self.recomputable for s in op.outputs)
            for storage in op.inputs if makes else ():
                if storage in found and storage not in op.mutates:
                    found[storage].append(op.index)
        return {storage: tuple(ops) for storage, ops in found.items()}

    @cached_property
    def there_until(self) -> dict[int, int]:
        """The last forward operator during which each storage is there though it is dropped."""
        last: dict[int, int] = {}
        for op in self.graph.ops:
            if op.phase == "forward":
                for storage in (*op.inputs, *op.outputs):
                    last[storage] = op.index
        return {storage: max(at, self._lives.get(storage, at)) for storage, at in last.items()}

    @cached_property
    def needs(self) -> dict[int, tuple[int, ...]]:
        """For each forward operator the recomputable storages that it reads."""
        return {op.index: tuple(s for s in op.inputs if s in self.recomputable) for op in self.forward}

    def keeps(self, kept: Collection[int]) -> dict[str, tuple[str, ...]]:
        """The settings of the technique that keep what these operators make: names by block."""
        names: dict[str, list[str]] = {name: [] for name in self.blocks}
        for op in sorted(kept):
            block = self.block_of[op]
            if block is not None:
                names[block].append(self.name_of[op])
        return {name: tuple(them) for name, them in names.items()}

    def kept_by(self, keeps: Mapping[str, Collection[str]]) -> frozenset[int]:
        """The operators whose results blocks keep that have these settings: the inverse of `keeps`."""
        return frozenset(op.index for op in self.forward if self._is_kept(op.index, keeps))

    def _is_kept(self, op: int, keeps: Mapping[str, Collection[str]]) -> bool:
        block, name = self.block_of[op], self.name_of[op]
        if block is None or block not in keeps:
            return True
        return name in keeps[block] or name.partition(":")[0] in keeps[block]

    def play(self, kept: Collection[int]) -> Played:
        """The step when blocks keep what these operators make, and nothing else that can be made again."""
        return _Playing(self, frozenset(kept)).run()


class _Playing:
    """One play: memory as it comes and goes."""

    def __init__(self, step: RecomputedStep, kept: frozenset[int]) -> None:
        self.step = step
        self.kept = kept
        self.dropped = [s for s in step.candidates if kept.isdisjoint(step.writers[s])]
        self.absent = set(self.dropped)
        self.storages = step.graph.storages
        self.change = np.zeros(len(step.graph.ops) + 1, np.int64)
        self.spikes: dict[int, int] = {}
        self.run_again: list[int] = []

    def run(self) -> Played:
        graph, step = self.step.graph, self.step
        for storage in self.dropped:
            self.change[min(step.there_until[storage] + 1, len(graph.ops))] -= self.storages[
                storage
            ].size_bytes
        for storage in step.recomputable:
            if not self.storages[storage].saved and step.writers[storage][0] in self.kept:
                gone, until = step.storage_dies(storage), step.needed_until(storage, self.kept)
                if until > gone:
                    self.change[gone + 1] += self.storages[storage].size_bytes
                    self.change[until + 1] -= self.storages[storage].size_bytes
        asked = sorted((step.readers[storage][0], storage) for storage in self.dropped)
        for at, storage in asked:
            if storage in self.absent:
                self._compute(storage, at)
        live = graph.live_bytes + np.cumsum(self.change)[: len(graph.ops)]
        for at, extra in self.spikes.items():
            own = graph.ops[at].temporary_bytes + sum(
                self.storages[s].size_bytes for s in graph.ops[at].outputs if self.storages[s].born == at
            )
            live[at] = max(int(live[at]), int(live[at]) - own + extra)
        peak = int(live.argmax())
        return Played(int(live[peak]), peak, tuple(self.run_again), live)

    def _compute(self, wanted: int, at: int) -> None:
        """Runs what ``wanted`` is made of just before operator ``at``."""
        calls, uses = self._missing(wanted)
        there: dict[int, int] = {}
        stays, running, most = 0, 0, 0
        for call in calls:
            op = self.step.graph.ops[call]
            self.run_again.append(call)
            for storage in op.outputs:
                if self.storages[storage].born != call:
                    continue
                size = self.storages[storage].size_bytes
                if storage in self.absent:
                    self.absent.discard(storage)
                    stays += size
                elif uses[storage]:
                    there[storage] = size
                    running += size
            most = max(most, running + stays + op.temporary_bytes)
            for storage in self.step.needs[call]:
                if storage in uses:
                    uses[storage] -= 1
                    if not uses[storage]:
                        running -= there.pop(storage, 0)
        self.change[at] += stays
        self.spikes[at] = max(self.spikes.get(at, 0), most - stays)

    def _missing(self, wanted: int) -> tuple[list[int], Counter[int]]:
        """The operators to run, and how often each storage is read by them that is not held."""
        step = self.step
        calls: set[int] = set()
        waiting = list(step.writers[wanted])
        while waiting:
            call = waiting.pop()
            if call in calls:
                continue
            calls.add(call)
            for storage in step.needs[call]:
                if self._is_missing(storage):
                    waiting += [w for w in step.writers[storage] if w < call]
        uses = Counter(s for call in calls for s in step.needs[call] if self._is_missing(s))
        return sorted(calls), uses

    def _is_missing(self, storage: int) -> bool:
        """Whether nobody holds it: dropped and not computed yet, or gone in the plain step as well."""
        if self.storages[storage].saved:
            return storage in self.absent
        return self.kept.isdisjoint(self.step.writers[storage])


def _base(op: Op) -> str:
    """An operator's name without namespace and overload."""
    parts = op.name.split(".")
    return parts[1] if len(parts) > 1 else op.name
