"""Small graphs and problems made by hand, for the planner's tests."""

from __future__ import annotations

import random

from memfit.capture.graph import Op, StepGraph, Storage
from memfit.planning.problem import BlockClass, Option, Problem


def random_problem(seed: int, *, classes: int = 2, blocks_per_class: int = 3, options: int = 4) -> Problem:
    """Contiguous classes with the plain option, full recomputation and some between; equal working bytes."""
    rng = random.Random(seed)
    made, position, base = [], 0, []
    for number in range(classes):
        plain = rng.randrange(60, 100) * 2**20
        full_seconds = rng.uniform(1, 3)
        between = [
            Option(
                saves=(f"linear:{i}",),
                saved_bytes=rng.randrange(10, 60) * 2**20,
                working_bytes=plain,
                recompute_seconds=rng.uniform(0.1, full_seconds),
            )
            for i in range(options - 2)
        ]
        made.append(
            BlockClass(
                name=f"class {number}",
                positions=tuple(range(position, position + blocks_per_class)),
                options=(
                    Option(saves=None, saved_bytes=plain, working_bytes=plain, recompute_seconds=0.0),
                    Option(
                        saves=(), saved_bytes=8 * 2**20, working_bytes=plain, recompute_seconds=full_seconds
                    ),
                    *between,
                ),
            )
        )
        base += [rng.randrange(20, 90) * 2**20 for _ in range(blocks_per_class)]
        position += blocks_per_class
    return Problem(
        blocks=tuple(f"block {i}" for i in range(position)),
        classes=tuple(made),
        position_bytes=tuple(base),
        forward_end_bytes=rng.randrange(20, 120) * 2**20,
        optimizer_bytes=50 * 2**20,
    )


def random_step(seed: int, *, forward_ops: int = 5) -> StepGraph:
    """A forward chain with skip connections, then its backward: each forward op's inputs are read again."""
    rng = random.Random(seed)
    mib = 2**20
    ops: list[Op] = []
    storages = [Storage(id=0, size_bytes=mib, category="input", born=-1)]
    forward: list[tuple[int, int, tuple[int, ...]]] = []
    for index in range(forward_ops):
        skip = {rng.randrange(0, index + 1)} if index and rng.random() < 0.4 else set()
        inputs = tuple(sorted({index} | skip))
        storages.append(
            Storage(
                id=index + 1,
                size_bytes=rng.randrange(1, 6) * mib,
                category="activation",
                born=index,
                saved=True,
            )
        )
        ops.append(
            Op(
                index=index,
                name="aten.mm.default",
                inputs=inputs,
                outputs=(index + 1,),
                flops=rng.randrange(1, 9),
            )
        )
        forward.append((index, index + 1, inputs))
    gradient = None
    for index, output, inputs in reversed(forward):
        reads = tuple(s for s in (*inputs, output if rng.random() < 0.5 else None) if s is not None)
        made = len(storages)
        storages.append(Storage(id=made, size_bytes=mib, category="gradient", born=len(ops)))
        ops.append(
            Op(
                index=len(ops),
                name="aten.mm_backward.default",
                phase="backward",
                inputs=(*dict.fromkeys(reads), *(() if gradient is None else (gradient,))),
                outputs=(made,),
                flops=2 * ops[index].flops,
            )
        )
        gradient = made
    return StepGraph(ops=tuple(ops), storages=_with_deaths(ops, storages))


def chain_step(length: int) -> StepGraph:
    """A chain of equal operators, each making 1 MiB, and its backward, which reads the input of each."""
    mib = 2**20
    storages = [Storage(id=0, size_bytes=0, category="input", born=-1)]
    ops: list[Op] = []
    for index in range(length):
        storages.append(
            Storage(id=index + 1, size_bytes=mib, category="activation", born=index, saved=index + 1 < length)
        )
        ops.append(Op(index=index, name="aten.mm.default", inputs=(index,), outputs=(index + 1,), flops=1))
    for index in reversed(range(length)):
        made, before = len(storages), len(storages) - 1
        storages.append(Storage(id=made, size_bytes=mib, category="gradient", born=len(ops)))
        ops.append(
            Op(
                index=len(ops),
                name="aten.mm_backward.default",
                phase="backward",
                inputs=(index, before),
                outputs=(made,),
            )
        )
    return StepGraph(ops=tuple(ops), storages=_with_deaths(ops, storages))


def _with_deaths(ops: list[Op], storages: list[Storage]) -> tuple[Storage, ...]:
    """Each storage dies at its last use, but for those that were there before and the last gradient."""
    last = {s: op.index for op in ops for s in (*op.outputs, *op.inputs)}
    keep = storages[-1].id
    return tuple(
        Storage(
            id=s.id,
            size_bytes=s.size_bytes,
            category=s.category,
            born=s.born,
            died=-1 if s.born < 0 or s.id == keep else last[s.id],
            saved=s.saved,
        )
        for s in storages
    )
