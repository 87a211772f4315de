"""Copies of the parameters that live at the peak: a checkpoint that stays, an average of the weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from memfit.analysis.blocks import Mask
from memfit.analysis.evidence import Evidence, source_line

LOADS = (
    "torch.load",
    "load_state_dict",
    "load_file",
    "from_pretrained",
    "safetensors",
    "checkpoint",
    "resume",
)
AVERAGES = ("ema", "deepcopy", "averaged", "swa_", "teacher", "target_net", "momentum_encoder")
COPYING_OPS = ("clone", "_foreach_lerp", "lerp")


@dataclass(frozen=True, kw_only=True, eq=False)
class Copy:
    """Blocks of one line that are as large as the parameters, one by one.

    Attributes:
        where: the line.
        code: its source, where it is at hand.
        mask: the blocks.
        size_bytes: of those that match parameters.
        kind: what the line, or else the operation, tells: ``"load"``, ``"average"`` or ``"unknown"``.
    """

    where: str
    code: str
    mask: Mask
    size_bytes: int
    kind: str


def copies_of_parameters(case: Evidence, *, least_share: float, least_match: float) -> list[Copy]:
    """Groups of blocks, by line, that match the parameters' sizes and are live at the peak.

    Args:
        case: with a trace.
        least_share: of the parameters' bytes, what a copy has to have.
        least_match: of a group's bytes, what has to match sizes of parameters.
    """
    blocks = case.blocks
    owned = blocks.has("category", ("gradient", "optimizer_state", "workspace"))
    candidates = case.live_at_peak & ~owned & blocks.has("phase", ("init", "forward", "other"))
    lines = blocks.codes("where")
    parameters = case.category_mask("parameter") & case.live_at_peak
    total = int(blocks.size[parameters].sum())
    groups = {
        int(line): np.flatnonzero(candidates & (lines == line)) for line in np.unique(lines[candidates])
    }
    found = []
    for line, members in groups.items():
        size = int(blocks.size[members].sum())
        others = parameters.copy()
        others[members] = False
        rest = int(blocks.size[others].sum())
        if not rest or size < least_share * min(rest, total) or not blocks.text("where", int(members[0])):
            continue
        matched = _matched(blocks.size[members], blocks.size[others])
        earlier = int(blocks.born[others].min()) < int(blocks.born[members].min())
        if matched >= least_match * size and matched >= least_share * rest and earlier:
            found.append(_copy(case, blocks.trace.strings[line], members, matched))
    return found


def _matched(sizes: np.ndarray, others: np.ndarray) -> int:
    """Bytes of the sizes that both have, each as often as both have it."""
    common = Counter(sizes.tolist()) & Counter(others.tolist())
    return sum(size * count for size, count in common.items())


def _copy(case: Evidence, where: str, members: np.ndarray, matched: int) -> Copy:
    code = source_line(where)
    mask = np.zeros(len(case.blocks), dtype=np.bool_)
    mask[members] = True
    text = f"{code} {where.rpartition(' ')[2]}".lower()
    ops = {case.blocks.text("op", index) for index in members.tolist()}
    kind = "unknown"
    if any(word in text for word in LOADS):
        kind = "load"
    elif any(word in text for word in AVERAGES) or any(name in op for op in ops for name in COPYING_OPS):
        kind = "average"
    return Copy(where=where, code=code, mask=mask, size_bytes=matched, kind=kind)
