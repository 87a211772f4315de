"""Rule 16: the optimizer's state is a large part of the peak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from memfit.analysis.evidence import Evidence, Need
from memfit.analysis.findings import Advice
from memfit.analysis.rules.base import LEAST_BYTES, Found, Rule, Stage, share
from memfit.analysis.rules.optimizer_states import eight_bit_edit
from memfit.core.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class OptimStateHeavy(Rule):
    """Looks at the share of optimizer state at the peak.

    Args:
        least_share: of the peak.
        least_bytes: less is not reported.
    """

    number: ClassVar[int] = 16
    id: ClassVar[str] = "OPTIM_STATE_HEAVY"
    title: ClassVar[str] = "The optimizer's state is a large part of the peak"
    needs: ClassVar[tuple[Need, ...]] = ("trace", "configuration")
    detection: ClassVar[str] = "Optimizer state above least_share of the live bytes at the peak."
    saving: ClassVar[str] = (
        "8-bit: Σ over state tensors of at least 4096 elements of elements × (4 − 1.015) B; ZeRO-1 over N "
        "ranks: state × (1 − 1/N)"
    )
    source: ClassVar[str] = "Dettmers 2022 (8-bit optimizers); Rajbhandari 2020 (ZeRO); bitsandbytes docs"
    stage: ClassVar[Stage] = "trade"

    least_share: float = 0.25
    least_bytes: int = LEAST_BYTES

    def look(self, case: Evidence) -> Iterator[Found]:
        states, peak = int(case.by_category.get("optimizer_state", 0)), case.peak_bytes
        if states < self.least_bytes or states <= self.least_share * peak:
            return
        if case.configuration.asks_for_eight_bit:
            return
        saving, edit = eight_bit_edit(case)
        advice = [
            Advice(
                action="Keep the states in 8 bits.",
                typed="import bitsandbytes as bnb\noptimizer = bnb.optim.AdamW8bit(model.parameters(), "
                "lr=lr)",
                kind="python",
                saving_bytes=saving,
                cost="none to a few percent of step()",
                risks="Updates are approximate; embeddings may need 32 bits "
                "(GlobalOptimManager.register_module_override).",
                source=self.source,
            )
        ]
        ranks = case.configuration.world_size or 1
        if ranks > 1:
            advice.append(
                Advice(
                    action=f"Shard the states over the {ranks} ranks (ZeRO-1).",
                    typed="optimizer = torch.distributed.optim.ZeroRedundancyOptimizer(\n"
                    "    model.parameters(), optimizer_class=torch.optim.AdamW, lr=lr)",
                    kind="python",
                    saving_bytes=int(states * (1 - 1 / ranks)),
                    cost="one broadcast of the parameters per step",
                    source=self.source,
                )
            )
        advice.append(
            Advice(
                action="Adafactor keeps row and column sums instead of whole moments.",
                typed="optimizer = torch.optim.Adafactor(model.parameters(), lr=lr)",
                kind="python",
                cost="another optimizer: learning rates have to be found again",
            )
        )
        yield self.found(
            f"Optimizer state is {share(states, peak)} of the peak: {format_bytes(states)}.",
            severity="info",
            confidence="high",
            evidence=[
                f"{format_bytes(states)} of {format_bytes(peak)} at the peak",
                f"in 8 bits it would be {format_bytes(states - saving)}",
            ],
            size_bytes=states,
            advice=advice,
            edit=edit,
        )
