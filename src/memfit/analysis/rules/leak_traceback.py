"""Rule 11: an exception's traceback keeps the tensors of the frames that it went through."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from memfit.analysis.edits import Edit, Window
from memfit.analysis.evidence import Evidence, Need
from memfit.analysis.findings import Advice
from memfit.analysis.growth import OWNED
from memfit.analysis.rules.base import LEAST_BYTES, Found, Rule, site_lines
from memfit.core.trace import Action
from memfit.core.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class LeakTraceback(Rule):
    """Asks this process, or looks for blocks of a failed pass that outlive it.

    Args:
        least_bytes: what has to be kept.
        least_allocations: how many allocations have to follow the out of memory, so that the job went on.
    """

    number: ClassVar[int] = 11
    id: ClassVar[str] = "LEAK_TRACEBACK"
    title: ClassVar[str] = "After a caught error its traceback keeps the tensors of the failed pass"
    needs: ClassVar[tuple[Need, ...]] = ("live", "trace")
    detection: ClassVar[str] = (
        "In a live process: frames of exceptions that are still held, or of sys.last_traceback, own tensors. "
        "In a trace: blocks of the pass that ran out of memory are live still after least_allocations more."
    )
    saving: ClassVar[str] = "bytes reachable from the frames"
    source: ClassVar[str] = "pytorch#27600, #18643 (comments); ipython#11572; PyTorch FAQ"

    least_bytes: int = LEAST_BYTES
    least_allocations: int = 20

    def look(self, case: Evidence) -> Iterator[Found]:
        kept = [item for item in case.kept if item.keeper == "traceback"]
        total = sum(item.size_bytes for item in kept)
        if total >= self.least_bytes:
            yield self.found(
                f"Tracebacks keep {format_bytes(total)} of tensors.",
                confidence="high",
                evidence=[item.text for item in kept[:5]],
                size_bytes=total,
                advice=self._advice(total),
            )
        if case.trace is not None:
            yield from self._in_trace(case)

    def _in_trace(self, case: Evidence) -> Iterator[Found]:
        trace, blocks = case.trace, case.blocks
        assert trace is not None
        shortages = np.flatnonzero(trace.action == Action.OOM)
        passes = blocks.has("phase", ("forward", "backward", "recompute")) & ~blocks.has("category", OWNED)
        starts = np.array([0, *case.step_ends], dtype=np.int64)
        windows: dict[int, tuple[Window, ...]] = {}
        mask = np.zeros(len(blocks), dtype=np.bool_)
        for place, event in enumerate(shortages.tolist()):
            begin = int(starts[starts <= event][-1])
            begin = max(begin, int(shortages[place - 1]) if place else 0)
            following = blocks.born[blocks.born > event]
            if len(following) <= self.least_allocations:
                continue
            later = int(following[self.least_allocations])
            held = passes & (blocks.born > begin) & (blocks.born < event) & (blocks.freed > later)
            mask |= held
            for index in np.flatnonzero(held).tolist():
                window = Window(int(blocks.born[index]), event + 1, int(blocks.size[index]))
                windows[int(blocks.ids[index])] = (window,)
        total = int(blocks.size[mask].sum())
        if total < self.least_bytes:
            return
        sites = blocks.largest_sites(mask, 3)
        yield self.found(
            f"After an out of memory that was caught, {format_bytes(total)} of the failed pass stay live.",
            evidence=[f"kept: {line}" for line in site_lines(sites)],
            size_bytes=total,
            where=sites[0][0],
            advice=self._advice(total),
            edit=Edit(windows=windows),
        )

    def _advice(self, total: int) -> list[Advice]:
        return [
            Advice(
                action="Leave the except block before trying again: while it runs, the exception holds every "
                "frame that it went through, and their variables.",
                typed=(
                    "     try:\n         step(batch)\n     except torch.OutOfMemoryError:\n"
                    "-        step(smaller(batch))\n+        failed = True\n"
                    "+    if failed:\n+        step(smaller(batch))"
                ),
                kind="diff",
                saving_bytes=total,
                cost="none",
                source=self.source,
            ),
            Advice(
                action="In a notebook: clear what IPython remembers of the error.",
                typed="import traceback, sys; traceback.clear_frames(sys.last_traceback)",
                kind="python",
                saving_bytes=total,
            ),
        ]
