"""Rule 29: a data-parallel wrapper keeps more than it has to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from memfit.analysis.evidence import Evidence, Need
from memfit.analysis.findings import Advice
from memfit.analysis.rules.base import LEAST_BYTES, Found, Rule
from memfit.analysis.rules.optimizer_states import BYTES_OF_AN_ELEMENT
from memfit.core.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class ShardingWaste(Rule):
    """Looks at how DDP and FSDP are set up.

    Args:
        least_bytes: less is not reported.
        most_units: FSDP with so few units gathers nearly the whole model at once.
        prefetched: units that are gathered ahead.
    """

    number: ClassVar[int] = 29
    id: ClassVar[str] = "SHARDING_WASTE"
    title: ClassVar[str] = "A data-parallel wrapper keeps more than it has to"
    needs: ClassVar[tuple[Need, ...]] = ("configuration",)
    detection: ClassVar[str] = (
        "DDP over several ranks without gradient_as_bucket_view; or FSDP with no wrap policy, or most_units "
        "units at most."
    )
    saving: ClassVar[str] = "DDP: P_t × b_g; FSDP: (unit now − one layer) × b_w × (1 + prefetched)"
    source: ClassVar[str] = "pytorch#41954 (8250 → 7183 MB), #82001; accelerate#3474"

    least_bytes: int = LEAST_BYTES
    most_units: int = 2
    prefetched: int = 1

    def look(self, case: Evidence) -> Iterator[Found]:
        job = case.configuration
        if job.strategy == "ddp" and not job.bucket_view and (job.world_size or 2) > 1:
            yield from self._buckets(case)
        coarse = job.fsdp_wrap == "none" or (job.fsdp_units or self.most_units + 1) <= self.most_units
        if job.strategy == "fsdp" and coarse:
            yield from self._units(case)

    def _buckets(self, case: Evidence) -> Iterator[Found]:
        job = case.configuration
        count = job.trainable_parameters or job.parameters
        size = count * BYTES_OF_AN_ELEMENT if count is not None else case.trainable_bytes
        if 0 < size < self.least_bytes:
            return
        known = f"P_t × b_g = {format_bytes(size)}" if size else "as large as the gradients"
        yield self.found(
            "DDP keeps a second copy of the gradients in its "
            f"buckets{f': {format_bytes(size)}' if size else ''}.",
            severity="warning" if size else "info",
            confidence="high" if job.bucket_view is False else "medium",
            evidence=["gradient_as_bucket_view is not set", known],
            size_bytes=size or None,
            advice=[
                Advice(
                    action="Let the gradients be views of the buckets.",
                    typed="DistributedDataParallel(model, gradient_as_bucket_view=True)",
                    kind="python",
                    saving_bytes=size or None,
                    cost="none; from the second iteration on",
                    risks="Gradients cannot be detached in place, and are views: do not keep them.",
                    source=self.source,
                )
            ],
        )

    def _units(self, case: Evidence) -> Iterator[Found]:
        job = case.configuration
        count = job.parameters
        units, layers = max(job.fsdp_units or 1, 1), job.layers
        size = None
        evidence = [f"FSDP wraps {'the whole model' if units == 1 else f'{units} units'}"]
        if count and layers:
            per_unit, per_layer = count // units, count // layers
            width = 2 if job.precision in ("bf16", "fp16") else BYTES_OF_AN_ELEMENT
            size = max(per_unit - per_layer, 0) * width * (1 + self.prefetched)
            evidence.append(
                f"gathered at once: {format_bytes(per_unit * width)}; with a unit per layer "
                f"{format_bytes(per_layer * width)}"
            )
        yield self.found(
            "FSDP gathers nearly the whole model at once: it is wrapped in too few units.",
            confidence="high" if job.fsdp_wrap == "none" else "medium",
            evidence=evidence,
            size_bytes=size,
            advice=[
                Advice(
                    action="Wrap each layer, then the model.",
                    typed="for layer in model.layers:\n    fully_shard(layer, reshard_after_forward=True)\n"
                    "fully_shard(model)",
                    kind="python",
                    saving_bytes=size,
                    cost="smaller all-gathers, which overlap with computing",
                    source=self.source,
                )
            ],
        )
