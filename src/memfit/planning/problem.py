"""The nouns of the choice: what each block of a model may keep, and how much memory is left at each point of
the step.

Positions are blocks in forward order. The backward pass meets them last to first; when it reaches position
``i``, what blocks ``0 … i-1`` keep is still there, and block ``i`` holds everything that it needs. So memory
is checked at every position, at the end of the forward pass (where all that is kept is there), and in the
optimizer step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Option:
    """What a block keeps for its backward pass, and what making the rest again costs.

    ``saves`` is None for the plain block; else the operators whose results it keeps beside its inputs (empty:
    none, the block is run again as a whole). ``saved_bytes`` are held from the block's forward to its
    backward, ``working_bytes`` is what the block holds while its backward runs, ``recompute_seconds`` and
    ``recompute_flops`` are spent on running parts again.
    """

    saves: tuple[str, ...] | None
    saved_bytes: int
    working_bytes: int
    recompute_seconds: float
    recompute_flops: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Whether the block runs unchanged."""
        return self.saves is None


@dataclass(frozen=True, kw_only=True)
class BlockClass:
    """Blocks that cost the same, in forward order (``positions``), and their options."""

    name: str
    positions: tuple[int, ...]
    options: tuple[Option, ...]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Choose one option per block so that memory holds at every point and the least time is spent again.

    ``position_bytes[i]`` is what else is there, at its worst, while the backward of block ``i`` runs:
    everything but what blocks keep or work with. ``forward_end_bytes`` is the same for the turn from forward
    to backward (the loss), and ``optimizer_bytes`` the whole of the optimizer step, which no option changes.
    """

    blocks: tuple[str, ...]
    classes: tuple[BlockClass, ...]
    position_bytes: tuple[int, ...]
    forward_end_bytes: int
    optimizer_bytes: int = 0

    def option_table(self) -> tuple[tuple[Option, ...], ...]:
        """The options of each position, in forward order."""
        table: list[tuple[Option, ...]] = [()] * len(self.blocks)
        for block_class in self.classes:
            for position in block_class.positions:
                table[position] = block_class.options
        return tuple(table)

    def peak_bytes(self, choice: Sequence[int]) -> int:
        """Predicted peak of the step when position ``i`` takes option number ``choice[i]``."""
        table = self.option_table()
        kept = 0
        worst = self.optimizer_bytes
        for position, number in enumerate(choice):
            option = table[position][number]
            worst = max(worst, self.position_bytes[position] + kept + option.working_bytes)
            kept += option.saved_bytes
        return max(worst, self.forward_end_bytes + kept)

    def recompute_seconds(self, choice: Sequence[int]) -> float:
        """Seconds that ``choice`` spends on running parts again."""
        table = self.option_table()
        return sum(table[position][number].recompute_seconds for position, number in enumerate(choice))


def pareto_options(options: Sequence[Option], *, limit: int = 14) -> tuple[Option, ...]:
    """The options that no other beats in both kept bytes and time, at most ``limit``, fewest kept bytes
    first.

    Options are thinned by dropping, again and again, the one whose absence loses least: the one nearest to
    the straight line between its neighbours. The two ends always stay.
    """
    front: list[Option] = []
    for option in sorted(options, key=lambda o: (o.recompute_seconds, o.saved_bytes, o.saves or ())):
        if not front or option.saved_bytes < front[-1].saved_bytes:
            front.append(option)
    front.reverse()
    while len(front) > max(limit, 2):
        losses = [_loss_without(front, index) for index in range(1, len(front) - 1)]
        del front[1 + losses.index(min(losses))]
    return tuple(front)


def _loss_without(front: Sequence[Option], index: int) -> float:
    """How far option ``index`` lies under the line between its neighbours, in parts of the whole front's
    spans."""
    before, here, after = front[index - 1], front[index], front[index + 1]
    width = after.saved_bytes - before.saved_bytes
    height = before.recompute_seconds - after.recompute_seconds
    on_line = before.recompute_seconds - height * (here.saved_bytes - before.saved_bytes) / width
    return max(on_line - here.recompute_seconds, 0.0) * width
