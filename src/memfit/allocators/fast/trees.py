"""Free chunks in order: treaps, whose nodes have the numbers of the chunks.

A tree hangs on the right of its header, a node without a chunk. Nodes are ordered by ``(MAJOR, MINOR)``.
Their priorities are hashes of their numbers: the shape of a tree is as good as random, and what is found in
it depends on the keys alone.
"""

from __future__ import annotations

from memfit.allocators.fast.fields import LEFT, MAJOR, MINOR, NONE, RIGHT, Ints
from memfit.allocators.fast.jit import compiled


@compiled
def _priority(node: int) -> int:
    """A 32-bit hash (multiplication by the golden ratio, then its high bits into the low ones)."""
    mixed = (node * 0x9E3779B1) & 0xFFFFFFFF
    return ((mixed ^ (mixed >> 15)) * 0x85EBCA6B) & 0xFFFFFFFF


@compiled
def insert(nodes: Ints, header: int, node: int, major: int, minor: int) -> None:
    """Put a row that is in no tree into one."""
    nodes[node, MAJOR], nodes[node, MINOR] = major, minor
    priority = _priority(node)
    parent, side = header, RIGHT
    at = nodes[parent, side]
    while at != NONE and _priority(at) >= priority:
        parent = at
        side = RIGHT if _below(nodes, at, major, minor) else LEFT
        at = nodes[parent, side]
    nodes[parent, side] = node
    lower, lower_side, upper, upper_side = node, LEFT, node, RIGHT
    while at != NONE:  # what was here goes left or right of the node
        if _below(nodes, at, major, minor):
            nodes[lower, lower_side] = at
            lower, lower_side = at, RIGHT
            at = nodes[at, RIGHT]
        else:
            nodes[upper, upper_side] = at
            upper, upper_side = at, LEFT
            at = nodes[at, LEFT]
    nodes[lower, lower_side] = NONE
    nodes[upper, upper_side] = NONE


@compiled
def remove(nodes: Ints, header: int, node: int) -> None:
    """Take a row out of its tree."""
    major, minor = nodes[node, MAJOR], nodes[node, MINOR]
    parent, side = header, RIGHT
    at = nodes[parent, side]
    while at != node:
        parent = at
        side = RIGHT if _below(nodes, at, major, minor) else LEFT
        at = nodes[parent, side]
    left, right = nodes[node, LEFT], nodes[node, RIGHT]
    while left != NONE and right != NONE:  # noqa: PLR1714
        if _priority(left) >= _priority(right):
            nodes[parent, side] = left
            parent, side = left, RIGHT
            left = nodes[left, RIGHT]
        else:
            nodes[parent, side] = right
            parent, side = right, LEFT
            right = nodes[right, LEFT]
    nodes[parent, side] = left if left != NONE else right


@compiled
def first_from(nodes: Ints, header: int, major: int) -> int:
    """The first node whose major key is ``major`` or more, or NONE."""
    found, at = NONE, nodes[header, RIGHT]
    while at != NONE:
        if nodes[at, MAJOR] >= major:
            found = at
            at = nodes[at, LEFT]
        else:
            at = nodes[at, RIGHT]
    return found


@compiled
def following(nodes: Ints, header: int, node: int) -> int:
    """The node after another one, or NONE."""
    at = nodes[node, RIGHT]
    if at != NONE:
        while nodes[at, LEFT] != NONE:
            at = nodes[at, LEFT]
        return int(at)
    major, minor = nodes[node, MAJOR], nodes[node, MINOR]
    found, at = NONE, nodes[header, RIGHT]
    while at != node:
        if _below(nodes, at, major, minor):
            at = nodes[at, RIGHT]
        else:
            found = at
            at = nodes[at, LEFT]
    return found


@compiled
def last(nodes: Ints, header: int) -> int:
    """The last node, or NONE."""
    found, at = NONE, nodes[header, RIGHT]
    while at != NONE:
        found = at
        at = nodes[at, RIGHT]
    return found


@compiled
def last_below(nodes: Ints, header: int, node: int) -> int:
    """The node before another one, or NONE."""
    major, minor = nodes[node, MAJOR], nodes[node, MINOR]
    found, at = NONE, nodes[header, RIGHT]
    while at != NONE:
        if _below(nodes, at, major, minor):
            found = at
            at = nodes[at, RIGHT]
        else:
            at = nodes[at, LEFT]
    return found


@compiled
def _below(nodes: Ints, node: int, major: int, minor: int) -> bool:
    own = nodes[node, MAJOR]
    return bool(own < major or (own == major and nodes[node, MINOR] < minor))
