"""How long dropped results stay all the same, as a step shows that really drops them.

A result that is dropped goes when nobody holds it any more, and Python holds more than operators read: the
arguments of a module's forward stay until it returns. A captured plain step cannot show that, as autograd
holds what it saves; one that drops everything does.
"""

from __future__ import annotations

from bisect import bisect_right

from memfit.capture.graph import Op, StepGraph


def dropped_lives(plain: StepGraph, dropped: StepGraph) -> dict[int, int]:
    """For storages of the ``plain`` step's forward pass the last operator of it during which they are there
    in ``dropped``, the same step captured with everything dropped.

    Empty where the two do not run the same operators in the forward pass.
    """
    ours, theirs = _forward(plain), _forward(dropped)
    if [op.name for op in ours] != [op.name for op in theirs]:
        return {}
    starts = [op.index for op in theirs]
    ends = [after.index - 1 for after in ours[1:]]
    ends.append(max((op.index for op in plain.ops if op.phase == "forward"), default=-1))
    lives: dict[int, int] = {}
    for our, their in zip(ours, theirs, strict=True):
        for mine, its in zip(_made(plain, our), _made(dropped, their), strict=False):
            died = dropped.storages[its].died
            lives[mine] = ends[bisect_right(starts, died) - 1] if died >= 0 else ends[-1]
    return lives


def _forward(graph: StepGraph) -> list[Op]:
    """The operators of the first forward pass that make or change something."""
    return [op for op in graph.ops if op.phase == "forward" and not op.is_view]


def _made(graph: StepGraph, op: Op) -> list[int]:
    return [s for s in op.outputs if graph.storages[s].born == op.index]
