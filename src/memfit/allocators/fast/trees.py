"""Free chunks in order: treaps whose nodes are the rows of the table of chunks.

A tree hangs on the right of its header, a row that is in no region. Nodes are ordered by ``(MAJOR, MINOR)``;
the priorities are random numbers that belong to the rows, so that what is found depends on the keys alone.
"""

from __future__ import annotations

from memfit.allocators.fast.fields import LEFT, MAJOR, MINOR, NONE, PRIORITY, RIGHT, Ints
from memfit.allocators.fast.jit import compiled


@compiled
def insert(chunks: Ints, header: int, node: int, major: int, minor: int) -> None:
    """Put a row that is in no tree into one."""
    chunks[node, MAJOR], chunks[node, MINOR] = major, minor
    priority = chunks[node, PRIORITY]
    parent, side = header, RIGHT
    at = chunks[parent, side]
    while at != NONE and chunks[at, PRIORITY] >= priority:
        parent = at
        side = RIGHT if _below(chunks, at, major, minor) else LEFT
        at = chunks[parent, side]
    chunks[parent, side] = node
    lower, lower_side, upper, upper_side = node, LEFT, node, RIGHT
    while at != NONE:  # what was here goes left or right of the node
        if _below(chunks, at, major, minor):
            chunks[lower, lower_side] = at
            lower, lower_side = at, RIGHT
            at = chunks[at, RIGHT]
        else:
            chunks[upper, upper_side] = at
            upper, upper_side = at, LEFT
            at = chunks[at, LEFT]
    chunks[lower, lower_side] = NONE
    chunks[upper, upper_side] = NONE


@compiled
def remove(chunks: Ints, header: int, node: int) -> None:
    """Take a row out of its tree."""
    major, minor = chunks[node, MAJOR], chunks[node, MINOR]
    parent, side = header, RIGHT
    at = chunks[parent, side]
    while at != node:
        parent = at
        side = RIGHT if _below(chunks, at, major, minor) else LEFT
        at = chunks[parent, side]
    left, right = chunks[node, LEFT], chunks[node, RIGHT]
    while left != NONE and right != NONE:
        if chunks[left, PRIORITY] >= chunks[right, PRIORITY]:
            chunks[parent, side] = left
            parent, side = left, RIGHT
            left = chunks[left, RIGHT]
        else:
            chunks[parent, side] = right
            parent, side = right, LEFT
            right = chunks[right, LEFT]
    chunks[parent, side] = left if left != NONE else right


@compiled
def first_from(chunks: Ints, header: int, major: int) -> int:
    """The first node whose major key is ``major`` or more, or NONE."""
    found, at = NONE, chunks[header, RIGHT]
    while at != NONE:
        if chunks[at, MAJOR] >= major:
            found = at
            at = chunks[at, LEFT]
        else:
            at = chunks[at, RIGHT]
    return found


@compiled
def following(chunks: Ints, header: int, node: int) -> int:
    """The node after another one, or NONE."""
    at = chunks[node, RIGHT]
    if at != NONE:
        while chunks[at, LEFT] != NONE:
            at = chunks[at, LEFT]
        return at
    major, minor = chunks[node, MAJOR], chunks[node, MINOR]
    found, at = NONE, chunks[header, RIGHT]
    while at != node:
        if _below(chunks, at, major, minor):
            at = chunks[at, RIGHT]
        else:
            found = at
            at = chunks[at, LEFT]
    return found


@compiled
def last(chunks: Ints, header: int) -> int:
    """The last node, or NONE."""
    found, at = NONE, chunks[header, RIGHT]
    while at != NONE:
        found = at
        at = chunks[at, RIGHT]
    return found


@compiled
def last_below(chunks: Ints, header: int, node: int) -> int:
    """The node before another one, or NONE."""
    major, minor = chunks[node, MAJOR], chunks[node, MINOR]
    found, at = NONE, chunks[header, RIGHT]
    while at != NONE:
        if _below(chunks, at, major, minor):
            found = at
            at = chunks[at, RIGHT]
        else:
            at = chunks[at, LEFT]
    return found


@compiled
def _below(chunks: Ints, node: int, major: int, minor: int) -> bool:
    own = chunks[node, MAJOR]
    return bool(own < major or (own == major and chunks[node, MINOR] < minor))
