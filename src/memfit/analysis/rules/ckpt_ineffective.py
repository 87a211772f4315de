"""Rule 25: checkpointing is on, and saves next to nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from memfit.analysis.evidence import Evidence, Need
from memfit.analysis.findings import Advice
from memfit.analysis.layers import chain_of, layer_of
from memfit.analysis.rules.base import LEAST_BYTES, Found, Rule, share, site_lines
from memfit.analysis.rules.checkpointed import Layers, layers_of
from memfit.core.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class CkptIneffective(Rule):
    """Compares what layers hold at the peak with what checkpointing each of them would leave.

    Args:
        least_excess: activations of the layers at the peak, over what would be left.
        least_bytes: that could be saved.
        least_layers: recomputed activations of so many layers live at once: one region wraps them all.
    """

    number: ClassVar[int] = 25
    id: ClassVar[str] = "CKPT_INEFFECTIVE"
    title: ClassVar[str] = "Checkpointing is on, and saves next to nothing"
    needs: ClassVar[tuple[Need, ...]] = ("trace", "configuration")
    detection: ClassVar[str] = (
        "Recomputation in the trace (or gradient_checkpointing in the configuration), and the layers' "
        "activations at the peak are least_excess times what checkpointing each layer would leave: kept by a "
        "cache (use_cache), or one region wraps least_layers layers or more. Or the configuration asks for "
        "both."
    )
    saving: ClassVar[str] = "A now − A by ACT_DOMINANT's formula"
    source: ClassVar[str] = "transformers, use_cache with gradient checkpointing; torch.utils.checkpoint"

    least_excess: float = 1.5
    least_bytes: int = LEAST_BYTES
    least_layers: int = 3

    def look(self, case: Evidence) -> Iterator[Found]:
        job = case.configuration
        recomputes = any(phase == "recompute" for phase, _, _ in case.phase_runs)
        layers = None
        if case.trace is not None and (recomputes or job.gradient_checkpointing):
            layers = self._holding(case)
        if layers is not None:
            yield self._finding(case, layers)
        elif job.gradient_checkpointing and job.use_cache:
            yield self.found(
                "Gradient checkpointing and use_cache are both on: the cache keeps keys and values of "
                "all layers.",
                confidence="medium",
                evidence=["gradient_checkpointing: true", "use_cache: true"],
                advice=[self._no_cache(None)],
            )

    def _holding(self, case: Evidence) -> Layers | None:
        """The layers, where they hold far more than checkpointing would leave."""
        layers = layers_of(case, least_layers=self.least_layers)
        if layers is None:
            return None
        held, largest = sum(layers.at_peak.values()), max(layers.at_peak.values())
        left = self._outputs(case, layers) + largest
        return layers if held - left >= self.least_bytes and held >= self.least_excess * left else None

    def _outputs(self, case: Evidence, layers: Layers) -> int:
        """One output for each layer: as large as the last block that a layer saves."""
        blocks = case.blocks
        last: dict[str, int] = {}
        for index in np.flatnonzero(layers.mask & case.live_at_peak).tolist():
            last[layer_of(blocks.text("module", index))] = int(blocks.size[index])
        return sum(last.values())

    def _finding(self, case: Evidence, layers: Layers) -> Found:
        blocks = case.blocks
        held = sum(layers.at_peak.values())
        saving = max(held - self._outputs(case, layers) - max(layers.at_peak.values()), 0)
        mask = layers.mask & case.live_at_peak
        recomputed = mask & blocks.has("phase", ("recompute",))
        coarse = int(blocks.size[recomputed].sum()) > held // 2
        names = {layer_of(blocks.text("module", i)) for i in np.flatnonzero(recomputed).tolist()}
        why = (
            f"recomputed activations of {len(names)} layers are live at once: one region wraps them all"
            if coarse
            else "what the forward pass saved in the layers is still there: something keeps it (a cache of "
            "keys and values, stored outputs)"
        )
        coarse_advice = Advice(
            action="Wrap each layer, not the whole model.",
            typed="for layer in model.layers:\n    x = checkpoint(layer, x, use_reentrant=False)",
            kind="python",
            saving_bytes=saving,
            cost="none beyond the recomputation that is paid already",
            source=self.source,
        )
        example = blocks.text("module", int(np.flatnonzero(mask)[0]))
        return self.found(
            f"Checkpointing is on, but {len(layers.at_peak)} layers hold {format_bytes(held)} at the peak.",
            confidence="high",
            evidence=[
                why,
                f"{share(held, case.peak_bytes)} of the peak, in the chain {chain_of(example)}*",
                *site_lines(blocks.largest_sites(mask, 3)),
            ],
            size_bytes=saving,
            where=blocks.largest_sites(mask, 1)[0][0],
            advice=[coarse_advice if coarse else self._no_cache(saving)],
            edit=layers.edit if layers.edit.windows else None,
        )

    def _no_cache(self, saving: int | None) -> Advice:
        return Advice(
            action="Switch the cache of keys and values off in training, and return nothing from a "
            "checkpointed layer that stays.",
            typed="model.config.use_cache = False",
            kind="python",
            saving_bytes=saving,
            cost="none in training",
            source=self.source,
        )
