"""From captured steps to problems: blocks that are alike, their options as measured, memory around them.

Options are measured, not only priced: a step is captured in which each block of a class runs another option,
so one capture prices as many options as the class has blocks, with whatever PyTorch does (early stopping,
what a saved operator really holds) in the figures.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from memfit.capture.graph import StepGraph
from memfit.planning.layout import TURN, Layout
from memfit.planning.options import BlockWork, block_work, enumerate_options
from memfit.planning.problem import BlockClass, Option, Problem
from memfit.planning.schedules import Saves, save_sets

Seconds = Callable[[StepGraph], Sequence[float]]
"""Predicted seconds of each operator of a graph on the GPU planned for."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The blocks of a model in forward order, grouped by likeness, with their work as the plain step shows
    it."""

    layout: Layout
    classes: tuple[tuple[int, ...], ...]
    works: tuple[BlockWork, ...]

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names in forward order."""
        return self.layout.blocks


def row_of_blocks(layout: Layout, seconds: Sequence[float]) -> Row:
    """Groups the blocks of a plain step by the operators that they run."""
    groups: dict[object, list[int]] = defaultdict(list)
    for block in range(len(layout.blocks)):
        groups[layout.signature(block)].append(block)
    works: dict[int, BlockWork] = {}
    for members in groups.values():
        work = block_work(layout, members[-1], seconds)
        works.update(dict.fromkeys(members, work))
    return Row(
        layout=layout,
        classes=tuple(tuple(members) for members in groups.values()),
        works=tuple(works[block] for block in range(len(layout.blocks))),
    )


def wanted_saves(row: Row, *, limit: int) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """For each class the sets to measure: the best by price, and the named ones, which candidates are made
    of."""
    wanted = []
    for members in row.classes:
        work = row.works[members[0]]
        best = [option.saves or () for option in enumerate_options(work, limit=limit)]
        wanted.append(tuple(dict.fromkeys([*save_sets(work).values(), *best])))
    return tuple(wanted)


def mixes(row: Row, wanted: Sequence[Sequence[tuple[str, ...]]]) -> list[tuple[Saves, ...]]:
    """Schedules in which the blocks of a class run different sets, so that a few show every set once."""
    rounds = max(
        (-(-len(sets) // len(members)) for sets, members in zip(wanted, row.classes, strict=True)), default=0
    )
    schedules = []
    for number in range(rounds):
        schedule: list[Saves] = [None] * len(row.blocks)
        for sets, members in zip(wanted, row.classes, strict=True):
            for place, block in enumerate(members):
                schedule[block] = sets[(number * len(members) + place) % len(sets)]
        schedules.append(tuple(schedule))
    return schedules


def measured_options(
    row: Row, captured: Sequence[tuple[tuple[Saves, ...], StepGraph]], seconds: Seconds
) -> tuple[dict[tuple[str, ...], Option], ...]:
    """For each class every set that the captured steps show, with what it keeps, holds and costs there."""
    around = memory_around(row.layout)
    class_of = {block: number for number, members in enumerate(row.classes) for block in members}
    found: list[dict[tuple[str, ...], Option]] = [{} for _ in row.classes]
    for schedule, graph in captured:
        layout = Layout(graph=graph, blocks=row.blocks)
        op_seconds = seconds(graph)
        before = layout.kept_before()
        for block, saves in enumerate(schedule):
            if saves is None or saves in found[class_of[block]]:
                continue
            working = layout.peaks.get(block, 0) - before[block] - around.position_bytes[block]
            found[class_of[block]][saves] = Option(
                saves=saves,
                saved_bytes=layout.kept_bytes[block],
                working_bytes=max(working, 0),
                recompute_seconds=layout.recompute_seconds(block, op_seconds),
                recompute_flops=layout.recompute_flops(block),
            )
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class MemoryAround:
    """What is there beside what blocks keep, at each point: the constants of a `Problem`."""

    position_bytes: tuple[int, ...]
    forward_end_bytes: int
    optimizer_bytes: int


def memory_around(layout: Layout) -> MemoryAround:
    """Reads a step without recomputation: each stretch's peak, less what the blocks keep and hold there."""
    kept, before = layout.kept_bytes, layout.kept_before()
    positions = tuple(
        max(layout.peaks.get(block, 0) - before[block] - kept[block], 0)
        for block in range(len(layout.blocks))
    )
    return MemoryAround(
        position_bytes=positions,
        forward_end_bytes=max(layout.peaks.get(TURN, 0) - sum(kept), 0),
        optimizer_bytes=layout.optimizer_peak_bytes,
    )


def make_problem(row: Row, base: Layout, options: Sequence[dict[tuple[str, ...], Option]]) -> Problem:
    """The problem of one lever: ``base`` is the step captured under it with every block plain.

    Options were measured on the whole batch; with micro-batches a round keeps and holds its share of it.
    """
    around = memory_around(base)
    classes = []
    for number, members in enumerate(row.classes):
        kept = base.kept_bytes[members[-1]]
        plain = Option(saves=None, saved_bytes=kept, working_bytes=kept, recompute_seconds=0.0)
        scaled = tuple(_share(option, base.passes) for option in options[number].values())
        classes.append(BlockClass(name=f"class {number}", positions=members, options=(plain, *scaled)))
    return Problem(
        blocks=row.blocks,
        classes=tuple(classes),
        position_bytes=around.position_bytes,
        forward_end_bytes=around.forward_end_bytes,
        optimizer_bytes=around.optimizer_bytes,
    )


def _share(option: Option, passes: int) -> Option:
    if passes == 1:
        return option
    return replace(
        option, saved_bytes=option.saved_bytes // passes, working_bytes=option.working_bytes // passes
    )


def schedule_of(problem: Problem, choice: Sequence[int]) -> tuple[Saves, ...]:
    """What each block keeps under a choice."""
    table = problem.option_table()
    return tuple(table[position][number].saves for position, number in enumerate(choice))


def choice_of(problem: Problem, schedule: Sequence[Saves]) -> tuple[int, ...] | None:
    """The option numbers of a schedule; None when a block would keep something that was not measured."""
    choice = []
    for saves, options in zip(schedule, problem.option_table(), strict=True):
        number = next((n for n, option in enumerate(options) if option.saves == saves), None)
        if number is None:
            return None
        choice.append(number)
    return tuple(choice)
