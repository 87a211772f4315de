"""Rule 32: buffers that grow by concatenation: old and new one are live together, and no hole fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from memfit.analysis.edits import Edit, Window
from memfit.analysis.evidence import Evidence, Need
from memfit.analysis.findings import Advice
from memfit.analysis.rules.base import LEAST_BYTES, Found, Rule
from memfit.core.units import MIB, format_bytes


@dataclass(frozen=True, kw_only=True)
class KvGrowth(Rule):
    """Follows blocks that are replaced by a slightly larger one of the same site.

    Args:
        least_steps: how often a buffer has to grow.
        most_growth: a larger step is another tensor.
        least_block_bytes: of the last of them.
        least_bytes: of all buffers together.
    """

    number: ClassVar[int] = 32
    id: ClassVar[str] = "KV_GROWTH"
    title: ClassVar[str] = "Buffers grow by concatenation, such as a cache of keys and values"
    needs: ClassVar[tuple[Need, ...]] = ("trace",)
    detection: ClassVar[str] = (
        "At one site, least_steps blocks in a row each larger than the one before (by a factor of at most "
        "most_growth), which is freed after the new one is born."
    )
    saving: ClassVar[str] = (
        "reserved − reserved of the same events with each buffer allocated once at its final size, "
        "2·L·n_kv·d_head·B·S bytes per element's size"
    )
    source: ClassVar[str] = "transformers#29010; PyTorch's allocator, replayed"

    least_steps: int = 6
    most_growth: float = 2.0
    least_block_bytes: int = MIB
    least_bytes: int = LEAST_BYTES

    def look(self, case: Evidence) -> Iterator[Found]:
        if case.trace is None or not len(case.trace):
            return
        blocks = case.blocks
        chains = self._chains(case)
        if not chains:
            return
        final = sum(int(blocks.size[chain[-1]]) for chain in chains)
        if final < self.least_bytes:
            return
        windows: dict[int, tuple[Window, ...]] = {}
        copied = 0
        for chain in chains:
            for index in chain[:-1]:
                windows[int(blocks.ids[index])] = ()
                copied += int(blocks.size[index])
            first, last = chain[0], chain[-1]
            window = Window(int(blocks.born[first]), int(blocks.freed[last]), int(blocks.size[last]))
            windows[int(blocks.ids[last])] = (window,)
        where = blocks.site(max(chains, key=lambda chain: int(blocks.size[chain[-1]]))[-1])
        steps = max(len(chain) for chain in chains) - 1
        yield self.found(
            f"{len(chains)} buffers grow step by step to {format_bytes(final)}, by a new one each time.",
            confidence="high",
            evidence=[
                f"up to {steps} times a larger one is allocated while the old one is live",
                f"{format_bytes(copied)} were allocated on the way, in sizes that nothing else can use",
            ],
            size_bytes=final,
            where=where,
            advice=[
                Advice(
                    action="Allocate each buffer once at its final size and write into it (a static cache).",
                    typed='model.generate(..., cache_implementation="static")  # or\n'
                    "cache = torch.empty(B, H, longest, D, device=device); cache[:, :, at:at + n] = new",
                    kind="python",
                    cost="its final size from the start",
                    source=self.source,
                )
            ],
            edit=Edit(windows=windows),
        )

    def _chains(self, case: Evidence) -> list[list[int]]:
        """Rows of blocks, each the heir of the one before."""
        blocks = case.blocks
        by_site: dict[int, list[int]] = {}
        for index in np.flatnonzero(blocks.size >= self.least_block_bytes // 64).tolist():
            by_site.setdefault(int(blocks.site_codes[index]), []).append(index)
        chains = []
        for members in by_site.values():
            if len(members) > self.least_steps:
                chains += self._at_site(case, members)
        return [
            chain
            for chain in chains
            if len(chain) > self.least_steps and blocks.size[chain[-1]] >= self.least_block_bytes
        ]

    def _at_site(self, case: Evidence, members: list[int]) -> list[list[int]]:
        """Each block goes to the chain whose last block is still live, a little smaller, and freed next."""
        blocks = case.blocks
        open_chains: list[list[int]] = []
        done: list[list[int]] = []
        for index in members:
            born, size = int(blocks.born[index]), int(blocks.size[index])
            heir_of = next(
                (
                    chain
                    for chain in open_chains
                    if blocks.size[chain[-1]] < size <= self.most_growth * blocks.size[chain[-1]]
                    and blocks.freed[chain[-1]] > born
                ),
                None,
            )
            if heir_of is not None:
                heir_of.append(index)
            else:
                open_chains.append([index])
            still = [chain for chain in open_chains if blocks.freed[chain[-1]] > born]
            done += [chain for chain in open_chains if blocks.freed[chain[-1]] <= born]
            open_chains = still
        return [*done, *open_chains]
