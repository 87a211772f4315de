"""Rule 21: the GPU holds more than PyTorch's reserved memory and its context."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from memfit.analysis.evidence import Evidence, GpuUsage, Need
from memfit.analysis.findings import Advice
from memfit.analysis.rules.base import Found, Rule, Stage, share
from memfit.core.units import MIB, format_bytes


@dataclass(frozen=True, kw_only=True)
class NonTorchMemory(Rule):
    """Subtracts what is known from what the device shows as used.

    Args:
        context_bytes: of a CUDA context with its libraries, where the configuration does not say it.
        least_share: of the device's memory that is unaccounted for.
        least_bytes: the same in bytes.
        communicator_bytes: of an NCCL communicator (measured for groups of two GPUs).
    """

    number: ClassVar[int] = 21
    id: ClassVar[str] = "NON_TORCH_MEMORY"
    title: ClassVar[str] = "The GPU holds more than PyTorch has reserved"
    needs: ClassVar[tuple[Need, ...]] = ("processes",)
    detection: ClassVar[str] = (
        "Used memory of the device − what PyTorch has reserved − the context above least_share of the device "
        "and least_bytes."
    )
    saving: ClassVar[str] = "NCCL: (communicators − needed) × communicator_bytes; another process: its bytes"
    source: ClassVar[str] = "nccl#964 (544 MB per communicator); pytorch#147179"
    stage: ClassVar[Stage] = "setting"

    context_bytes: int = 512 * MIB
    least_share: float = 0.03
    least_bytes: int = 512 * MIB
    communicator_bytes: int = 544 * MIB

    def look(self, case: Evidence) -> Iterator[Found]:
        reserved = self._reserved(case)
        if reserved is None or not case.gpus:
            return
        gpu = max(case.gpus, key=lambda row: row.used_bytes)
        context = case.configuration.context_bytes or self.context_bytes
        rest = gpu.used_bytes - reserved - context
        least = max(self.least_bytes, self.least_share * gpu.total_bytes)
        if rest <= least:
            return
        others = [
            row
            for row in case.processes
            if row.gpu == gpu.gpu and case.own_pids and row.pid not in case.own_pids
        ]
        yield self._finding(case, gpu, reserved, context, rest, sum(row.used_bytes for row in others))

    def _finding(
        self, case: Evidence, gpu: GpuUsage, reserved: int, context: int, rest: int, foreign: int
    ) -> Found:
        groups = case.configuration.process_groups
        evidence = [
            f"GPU {gpu.gpu}: {format_bytes(gpu.used_bytes)} used = {format_bytes(reserved)} reserved by "
            f"PyTorch + {format_bytes(context)} context + {format_bytes(rest)} of others "
            f"({share(rest, gpu.used_bytes)})"
        ]
        advice = []
        if foreign:
            evidence.append(f"other processes take {format_bytes(foreign)} of it")
            advice.append(
                Advice(
                    action="End the other processes, or leave them their part.",
                    typed="nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv",
                    kind="shell",
                    saving_bytes=foreign,
                )
            )
        if groups and groups > 1:
            evidence.append(
                f"{groups} NCCL communicators, about {format_bytes(self.communicator_bytes)} each"
            )
        advice.append(
            Advice(
                action="Make fewer NCCL groups, or give them smaller buffers; they are outside of PyTorch's "
                "allocator.",
                typed="export NCCL_BUFFSIZE=2097152",
                kind="shell",
                saving_bytes=min((groups - 1) * self.communicator_bytes, rest) if groups else None,
                cost="some bandwidth",
                source=self.source,
            )
        )
        return self.found(
            f"{format_bytes(rest)} on GPU {gpu.gpu} are neither PyTorch's nor its context's.",
            severity="warning",
            verdict="other_process" if foreign > rest // 2 else None,
            evidence=evidence,
            size_bytes=rest,
            where=f"GPU {gpu.gpu}",
            advice=advice,
        )

    def _reserved(self, case: Evidence) -> int | None:
        """What PyTorch has reserved now: as its counters say, else as the snapshot does."""
        if case.statistics:
            return int(case.statistics[-1].get("reserved_bytes.all.current", 0))
        return case.snapshot.reserved_bytes if case.snapshot is not None else None
