"""The schedules that people use by name, as candidates: a plan is never worse than the best of those that
fit.

A schedule says for each block what it keeps (None: the block runs plain). A lever changes something else than
the blocks: the loss, the optimizer's implementation, the number of micro-batches. Every schedule is tried
under every lever that the allowed exactness admits.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memfit.core.exactness import Exactness, allowed, weakest
from memfit.planning.figures import Settings
from memfit.planning.options import BlockWork

Saves = tuple[str, ...] | None


@dataclass(frozen=True, kw_only=True)
class Rematerialized:
    """A schedule operator by operator: for each block, and for the model outside of them (``""``), which
    results are kept."""

    keeps: tuple[tuple[str, tuple[str, ...]], ...]


Schedule = Sequence[Saves] | Rematerialized
"""What each block keeps, or what is kept of each operator."""
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
LOSS_CHUNKS = 8


@dataclass(frozen=True, kw_only=True)
class Lever:
    """Everything of a plan but the blocks: settings of the other techniques, and how exact they leave the
    step.

    ``host_seconds`` is what the operators' own times do not show (copies over the host link that nothing
    hides, steps on the host), predicted; ``host_bytes`` is the host memory that it is expected to need.
    """

    name: str
    settings: tuple[Settings, ...] = ()
    exactness: Exactness = "exact"
    micro_batches: int = 1
    host_seconds: float = 0.0
    host_bytes: int = 0

    @property
    def is_none(self) -> bool:
        """Whether it changes nothing."""
        return not self.settings

    @property
    def step_settings(self) -> tuple[Settings, ...]:
        """The settings that change what the step computes or allocates; the allocator's own do not."""
        return tuple(s for s in self.settings if s["technique"] != "allocator_settings")


NO_LEVER = Lever(name="")


def save_sets(work: BlockWork) -> dict[str, tuple[str, ...]]:
    """The known ways to keep parts of a block, by name, as the operators that are kept in this block."""
    linears = [op for op in work.heavy if op.name.startswith("linear:")]
    attention = [op for op in work.heavy if op.name.startswith("attention:")]
    convolutions = [op for op in work.heavy if op.name.startswith("convolution:")]
    randoms = [op for op in work.heavy if op.name.startswith("random:")]
    wanted = {
        "full": [],
        "save matmuls and attention": [*linears, *attention],
        "save matmuls": linears,
        "torchtitan": [*linears[::2], *attention],
        "save matmuls, attention and random": [*linears, *attention, *randoms],
        "save convolutions": convolutions,
    }
    sets: dict[str, tuple[str, ...]] = {}
    for name, ops in wanted.items():
        saves = tuple(op.name for op in sorted(ops, key=lambda op: op.index))
        if saves not in sets.values():
            sets[name] = saves
    return sets


def named_schedules(works: Sequence[BlockWork]) -> dict[str, tuple[Saves, ...]]:
    """Every named schedule for a row of blocks, given in forward order with their work."""
    count = len(works)
    full: tuple[str, ...] = ()
    schedules: dict[str, tuple[Saves, ...]] = {"none": (None,) * count}
    schedules["full"] = (full,) * count
    for every in dict.fromkeys((2, 3, 4, round(count**0.5))):
        if 1 < every <= count:
            schedules[f"every {_ordinal(every)} block"] = tuple(
                full if i % every == 0 else None for i in range(count)
            )
    if count > 1:
        schedules["first half"] = tuple(full if i < count // 2 else None for i in range(count))
        schedules["all but the last block"] = tuple(full if i < count - 1 else None for i in range(count))
    per_block = [save_sets(work) for work in works]
    for name in dict.fromkeys(itertools.chain.from_iterable(per_block)):
        if name != "full":
            schedules[name] = tuple(sets.get(name, full) for sets in per_block)
    return _distinct(schedules)


def _ordinal(number: int) -> str:
    return {2: "2nd", 3: "3rd"}.get(number, f"{number}th")


def _distinct(schedules: Mapping[str, tuple[Saves, ...]]) -> dict[str, tuple[Saves, ...]]:
    seen: dict[tuple[Saves, ...], str] = {}
    for name, saves in schedules.items():
        seen.setdefault(saves, name)
    return {name: saves for saves, name in seen.items()}


def levers(
    allow: Exactness,
    *,
    samples: int,
    chunked_loss: Exactness | None,
    micro_batching: Exactness | None,
    implementations: Mapping[str, Exactness],
    expandable_segments: Exactness | None = None,
) -> tuple[Lever, ...]:
    """The combinations of levers within ``allow``: fewest micro-batches first, the one that changes nothing
    before all.

    An optimizer implementation that is offered is leaner and faster than the workload's own, so it goes with
    all others.

    Args:
        samples: in the batch; no more micro-batches than that.
        chunked_loss: how exact chunking the loss is on this model; None where it cannot be done.
        micro_batching: the same for micro-batching (batch norm sees smaller batches: approximate).
        implementations: of the optimizer, beside the workload's own, and how exact each is.
        expandable_segments: the same for the allocator's setting; None where it cannot be had.
    """
    losses = [NO_LEVER]
    if chunked_loss is not None:
        setting = {"technique": "chunked_cross_entropy", "chunks": LOSS_CHUNKS}
        losses.append(Lever(name="chunked loss", settings=(setting,), exactness=chunked_loss))
    optimizers = [
        Lever(
            name=f"{name} optimizer",
            settings=({"technique": "optimizer_implementation", "implementation": name},),
            exactness=grade,
        )
        for name, grade in implementations.items()
        if allowed(grade, allow)
    ] or [NO_LEVER]
    batches = [NO_LEVER]
    if micro_batching is not None:
        batches += [
            Lever(
                name=f"{count} micro-batches",
                settings=({"technique": "micro_batching", "micro_batches": count},),
                exactness=micro_batching,
                micro_batches=count,
            )
            for count in MICRO_BATCHES
            if 1 < count <= samples
        ]
    allocators = [NO_LEVER]
    if expandable_segments is not None:
        setting = {"technique": "allocator_settings", "expandable_segments": True}
        allocators.append(
            Lever(name="expandable segments", settings=(setting,), exactness=expandable_segments)
        )
    combined = map(together, itertools.product(batches, losses, optimizers, allocators))
    admitted = [lever for lever in combined if allowed(lever.exactness, allow) and not lever.is_none]
    return (NO_LEVER, *sorted(admitted, key=lambda lever: (lever.micro_batches, len(lever.settings))))


def together(parts: Sequence[Lever]) -> Lever:
    """Several levers as one."""
    return Lever(
        name=", ".join(part.name for part in parts if part.name),
        settings=tuple(setting for part in parts for setting in part.settings),
        exactness=weakest([part.exactness for part in parts]),
        micro_batches=max(part.micro_batches for part in parts),
        host_seconds=sum(part.host_seconds for part in parts),
        host_bytes=sum(part.host_bytes for part in parts),
    )


def checkpointing(blocks: Sequence[str], saves: Schedule) -> tuple[Settings, ...]:
    """The settings of the technique for a schedule; empty when every block runs plain."""
    if isinstance(saves, Rematerialized):
        keeps = {name: list(kept) for name, kept in saves.keeps}
        return ({"technique": "rematerialization", "blocks": keeps},)
    chosen = {name: list(kept) for name, kept in zip(blocks, saves, strict=True) if kept is not None}
    return ({"technique": "gradient_checkpointing", "blocks": chosen},) if chosen else ()
