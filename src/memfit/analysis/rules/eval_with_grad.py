"""Rule 12: evaluation keeps activations as if a backward pass were to follow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from memfit.analysis.blocks import Mask
from memfit.analysis.edits import Edit, Window
from memfit.analysis.evidence import Evidence, Need
from memfit.analysis.findings import Advice
from memfit.analysis.growth import OWNED
from memfit.analysis.layers import layer_of
from memfit.analysis.rules.base import LEAST_BYTES, Found, Rule, share, site_lines
from memfit.core.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class EvalWithGrad(Rule):
    """Looks for forward passes without a backward pass in which outputs of many layers are live at once.

    Args:
        least_layers: that have to be live together; without gradients two or three are.
        least_bytes: what they hold.
    """

    number: ClassVar[int] = 12
    id: ClassVar[str] = "EVAL_WITH_GRAD"
    title: ClassVar[str] = "Evaluation keeps activations as if a backward pass were to follow"
    needs: ClassVar[tuple[Need, ...]] = ("trace",)
    detection: ClassVar[str] = (
        "In forward passes that no backward pass follows, outputs of at least least_layers layers (or "
        "modules) are live at once, with least_bytes or more."
    )
    saving: ClassVar[str] = "peak of the evaluation − (weights + largest pair of activations)"
    source: ClassVar[str] = "pytorch#4932, #958; torch.inference_mode"

    least_layers: int = 4
    least_bytes: int = LEAST_BYTES

    def look(self, case: Evidence) -> Iterator[Found]:
        mask = forward_only(case) & ~case.blocks.has("module", ("",))
        if not mask.any():
            return
        blocks = case.blocks
        peak_event, size = _highest(case, mask)
        live = np.flatnonzero(mask & blocks.live_after(peak_event))
        layers = {layer_of(blocks.text("module", index)) for index in live.tolist()}
        if len(layers) < self.least_layers or size < self.least_bytes:
            return
        largest_pair = int(np.sort(blocks.size[live])[-2:].sum())
        yield self.found(
            f"Forward passes without a backward pass keep {format_bytes(size)}: gradients are on in "
            "evaluation.",
            confidence="medium",
            evidence=[
                f"{len(live)} blocks of {len(layers)} layers are live at once, and freed without a backward "
                "pass",
                f"without gradients about {format_bytes(largest_pair)} would be live "
                f"({share(largest_pair, size)})",
                *site_lines(blocks.largest_sites(mask & blocks.live_after(peak_event), 3)),
            ],
            size_bytes=size - largest_pair,
            where=blocks.site(int(live[np.argmax(blocks.size[live])])),
            advice=[
                Advice(
                    action="Evaluate without gradients.",
                    typed="+    with torch.inference_mode():\n         evaluate(model, batches)",
                    kind="diff",
                    saving_bytes=size - largest_pair,
                    cost="none; it is faster",
                    risks="Tensors made in inference mode cannot be used in training: torch.no_grad() "
                    "allows it.",
                    source=self.source,
                )
            ],
            edit=_without_gradients(case, mask),
        )


def forward_only(case: Evidence) -> Mask:
    """Blocks born in a forward pass and gone before any backward pass that follows begins."""
    blocks = case.blocks
    starts = np.array([start for phase, start, _ in case.phase_runs if phase == "backward"], dtype=np.int64)
    starts = np.append(starts, len(blocks.trace) + 1)
    following = starts[np.searchsorted(starts, blocks.born)]
    forward = blocks.has("phase", ("forward",)) & ~blocks.has("category", OWNED)
    mask: Mask = forward & (blocks.freed < following)
    return mask


def _highest(case: Evidence, mask: Mask) -> tuple[int, int]:
    """The event at which the masked blocks hold most, and how much."""
    blocks = case.blocks
    change = np.zeros(len(blocks.trace) + 1, dtype=np.int64)
    np.add.at(change, blocks.born[mask], blocks.size[mask])
    np.add.at(change, blocks.freed[mask], -blocks.size[mask])
    live = np.cumsum(change)
    event = int(np.argmax(live))
    return event, int(live[event])


def _without_gradients(case: Evidence, mask: Mask) -> Edit:
    """Each block freed when the second after it is born."""
    blocks = case.blocks
    order = np.flatnonzero(mask).tolist()
    windows = {}
    for place, index in enumerate(order):
        freed = int(blocks.freed[index])
        until = int(blocks.born[order[place + 2]]) if place + 2 < len(order) else freed
        born = int(blocks.born[index])
        windows[int(blocks.ids[index])] = (Window(born, min(freed, until), int(blocks.size[index])),)
    return Edit(windows=windows)
