"""Which levers of the table are worth a run, on top of the levers that the search tries in any case.

Each set of them that goes together is put on each captured step in thought: what it would hold plain and with
every block recomputed, and the least that it could take. Those that may fit, and that may be faster than the
best plan so far, are run, the ones with the least expected time first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from memfit.capture.graph import StepGraph
from memfit.core.devices import GPU
from memfit.core.exactness import Exactness
from memfit.planning.lever_kinds import LeverKind, phase_seconds
from memfit.planning.lever_table import combinations
from memfit.planning.schedules import Lever, together
from memfit.techniques.saving import recomputed

MOST_RUN = 6
"""Sets of levers that are run for one budget."""
MICRO_BATCH_SHARE = 0.02
"""By how much of a step's time each further micro-batch counts when levers are put in an order."""
REPLACES: Mapping[str, str] = {"low_memory_optimizer": "optimizer_implementation"}
"""Techniques in whose place others are not needed: the optimizer has kernels of its own then."""
_ORDER = ("parameters", "activations", "precision", "gradients", "state")
"""Axes in the order in which levers are put on a step in thought: what is left counts for the next."""


@dataclass(frozen=True, kw_only=True)
class Prospect:
    """A lever with what is expected of it.

    Attributes:
        floor_seconds: with nothing recomputed: no plan under the lever is expected to be faster.
        expected_seconds: with as much recomputed as the budget asks for; infinite where even everything is
            not enough.
        least_bytes: live at once with every block recomputed.
    """

    lever: Lever
    floor_seconds: float
    expected_seconds: float
    least_bytes: int


def prospects(
    steps: Iterable[tuple[Lever, StepGraph, Sequence[float]]],
    *,
    allow: Exactness,
    blocks: Sequence[str],
    gpu: GPU,
    budget_bytes: int,
    best_seconds: float,
) -> list[Prospect]:
    """The sets of levers that may give a plan faster than ``best_seconds``, by expected time.

    Args:
        steps: levers tried before, each with its captured step and the seconds of its operators.
        allow: how far results may move.
        blocks: of the model, which may be recomputed.
        gpu: planned for.
        budget_bytes: for the reserved peak.
        best_seconds: of the best plan so far; infinite when nothing fits.
    """
    found: dict[str, Prospect] = {}
    known: dict[str, Prospect | None] = {}
    for lever, graph, seconds in steps:
        step = _Step(graph, seconds, tuple(blocks), lever.micro_batches, gpu)
        for kinds in combinations(allow):
            if lever.micro_batches > 1 and any(kind.whole_batch for kind in kinds):
                continue
            made = _lever(lever, kinds)
            key = str((made.step_settings, [kind.name for kind in kinds]))
            if key not in known:  # the allocator's settings change nothing in thought
                known[key] = step.prospect(made, kinds, budget_bytes, best_seconds)
            prospect = known[key]
            if prospect is not None:
                same = replace(prospect.lever, name=made.name, settings=made.settings)
                found.setdefault(str(made.settings), replace(prospect, lever=same))
    return sorted(found.values(), key=_by_expectation)


def worth_a_run(found: Sequence[Prospect]) -> list[Prospect]:
    """Those that may fit, more than `MOST_RUN` as some cannot be applied; where none may, the leanest, which
    says what is needed."""
    hopeful = [p for p in found if p.expected_seconds < float("inf")]
    leanest = sorted(found, key=lambda p: (p.least_bytes, p.lever.name))[:1]
    return (hopeful or leanest)[: 2 * MOST_RUN]


def _by_expectation(prospect: Prospect) -> tuple[float, int, str]:
    """Least time first. Predicted times know nothing of small kernels, so micro-batches are taken to cost."""
    lever = prospect.lever
    seconds = prospect.expected_seconds * (1 + MICRO_BATCH_SHARE * (lever.micro_batches - 1))
    return (round(seconds, 9), -len(lever.settings), lever.name)


def _lever(base: Lever, kinds: Sequence[LeverKind]) -> Lever:
    """The levers of the table on top of one that was tried before."""
    replaced = {REPLACES.get(str(kind.settings["technique"])) for kind in kinds}
    kept = tuple(s for s in base.settings if s["technique"] not in replaced)
    names = [part for part in base.name.split(", ") if part and _stays(part, kept, base)]
    rest = replace(base, name=", ".join(names), settings=kept)
    added = [Lever(name=k.name, settings=(k.settings,), exactness=k.exactness) for k in kinds]
    return together([*added, rest])


def _stays(name: str, kept: Sequence[object], base: Lever) -> bool:
    return len(kept) == len(base.settings) or not name.endswith(" optimizer")


class _Step:
    """A captured step on which levers are put in thought."""

    def __init__(
        self,
        graph: StepGraph,
        seconds: Sequence[float],
        blocks: tuple[str, ...],
        micro_batches: int,
        gpu: GPU,
    ) -> None:
        meta = {**graph.meta, "blocks": blocks, "micro_batches": micro_batches}
        self.graph, self.seconds, self.blocks, self.gpu = replace(graph, meta=meta), seconds, blocks, gpu

    @cached_property
    def recomputed(self) -> StepGraph:
        """Every block recomputed."""
        return _recomputed(self.graph, self.blocks)

    def prospect(
        self, lever: Lever, kinds: Sequence[LeverKind], budget_bytes: int, best_seconds: float
    ) -> Prospect | None:
        """What is expected of levers together; None where no plan under them can be faster than the best."""
        ordered = sorted(kinds, key=lambda kind: _ORDER.index(kind.axis))
        graph, floor, host_seconds, host_bytes = self.graph, sum(self.seconds), 0.0, 0
        for kind in ordered:
            cost = kind.cost(graph, self.seconds, self.gpu)
            floor += cost.device_seconds + cost.host_seconds
            host_seconds, host_bytes = host_seconds + cost.host_seconds, host_bytes + cost.host_bytes
            graph = kind.on(graph)
        if floor >= best_seconds:
            return None
        plain, least = graph.peak_bytes, min(graph.peak_bytes, self._least(ordered, graph))
        again = phase_seconds(self.graph, self.seconds, "forward")
        share = 0.0 if plain <= budget_bytes else (plain - budget_bytes) / max(plain - least, 1)
        return Prospect(
            lever=replace(lever, host_seconds=host_seconds, host_bytes=host_bytes),
            floor_seconds=floor,
            expected_seconds=floor + share * again if share <= 1.0 else float("inf"),
            least_bytes=least,
        )

    def _least(self, ordered: Sequence[LeverKind], plain: StepGraph) -> int:
        """The peak with every block recomputed; what levers do to saved results comes before that."""
        if not self.blocks:
            return plain.peak_bytes
        if any(kind.axis == "activations" for kind in ordered):
            return _recomputed(plain, self.blocks).peak_bytes
        graph = self.recomputed
        for kind in ordered:
            graph = kind.on(graph)
        return graph.peak_bytes


def _recomputed(graph: StepGraph, blocks: Sequence[str]) -> StepGraph:
    return replace(graph, storages=tuple(recomputed(graph, blocks)))
