"""Rule 5: blocks are larger than what was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from memfit.allocators.candidates import shell_line
from memfit.analysis.edits import Edit
from memfit.analysis.evidence import Evidence, Need
from memfit.analysis.findings import Advice
from memfit.analysis.rules.allocator_settings import without_key
from memfit.analysis.rules.base import LEAST_BYTES, Found, Rule, Stage, share
from memfit.core.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class RoundingWaste(Rule):
    """Compares allocated with requested bytes.

    Args:
        least_share: of the allocated bytes that were not asked for.
        least_bytes: the same in bytes.
    """

    number: ClassVar[int] = 5
    id: ClassVar[str] = "ROUNDING_WASTE"
    title: ClassVar[str] = "Blocks are larger than what was asked for"
    needs: ClassVar[tuple[Need, ...]] = ("snapshot", "trace", "configuration")
    detection: ClassVar[str] = (
        "(allocated − requested) / allocated above least_share, and at least least_bytes: in the "
        "snapshot, at "
        "the replay's peak, or by a dry run's peaks."
    )
    saving: ClassVar[str] = "Σ (block size − requested size)"
    source: ClassVar[str] = "PyTorch's notes on CUDA: roundup_power2_divisions"
    stage: ClassVar[Stage] = "setting"

    least_share: float = 0.05
    least_bytes: int = LEAST_BYTES

    def look(self, case: Evidence) -> Iterator[Found]:
        requested, allocated, what = self._figures(case)
        waste = allocated - requested
        if waste < self.least_bytes or waste <= self.least_share * allocated:
            return
        rounds = "roundup_power2_divisions" in case.settings
        settings = without_key(case.settings, "roundup_power2_divisions")
        evidence = [
            f"{what}: {format_bytes(allocated)} in blocks for {format_bytes(requested)} asked for, "
            f"{share(waste, allocated)} lost",
            f"settings: {case.settings or 'default'}",
        ]
        action = (
            "Take roundup_power2_divisions out, or give it more divisions."
            if rounds
            else "Ask for fewer, larger tensors: every block is rounded up to 512 bytes, and blocks above "
            "1 MiB keep rests below 1 MiB."
        )
        yield self.found(
            f"{format_bytes(waste)} are rounding: {share(waste, allocated)} of what is allocated.",
            evidence=evidence,
            confidence="high",
            size_bytes=waste,
            advice=[
                Advice(
                    action=action,
                    typed=shell_line(settings or "default") if rounds else None,
                    kind="shell" if rounds else "text",
                    saving_bytes=waste if rounds else None,
                    cost="blocks of changing sizes are used again less often" if rounds else None,
                    source=self.source,
                )
            ],
            edit=Edit(settings=settings) if rounds else None,
        )

    def _figures(self, case: Evidence) -> tuple[int, int, str]:
        """Requested and allocated bytes, and of when."""
        snapshot = case.snapshot
        if snapshot is not None and snapshot.allocated_bytes:
            return snapshot.requested_bytes, snapshot.allocated_bytes, "in the snapshot"
        if case.replay is not None:
            return case.replay.peak_requested_bytes, case.replay.peak_allocated_bytes, "at the peak"
        if case.dry_run is not None:
            return case.dry_run.peak_requested_bytes, case.dry_run.peak_allocated_bytes, "at the peak"
        return 0, 0, ""
