"""Rule 20: processes of the job sit on GPUs that are not theirs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from memfit.analysis.evidence import Evidence, GpuProcess, Need
from memfit.analysis.findings import Advice
from memfit.analysis.rules.base import Found, Rule
from memfit.core.units import GIB, format_bytes


@dataclass(frozen=True, kw_only=True)
class StrayContexts(Rule):
    """Looks for processes that take a little of a GPU beside much of another.

    Args:
        most_share: of what the process has on its own GPU.
        most_bytes: a context with its libraries is smaller than this.
    """

    number: ClassVar[int] = 20
    id: ClassVar[str] = "STRAY_CONTEXTS"
    title: ClassVar[str] = "Processes of the job have a CUDA context on GPUs that are not theirs"
    needs: ClassVar[tuple[Need, ...]] = ("processes",)
    detection: ClassVar[str] = (
        "A process is listed on several GPUs, and has at most most_share of its largest part, and at most "
        "most_bytes, on one of them."
    )
    saving: ClassVar[str] = "number of stray processes × context, as measured (0.3 to 0.7 GB typically)"
    source: ClassVar[str] = "pytorch#23138 (725 MB each); pytorch/examples#969; apex#222"

    most_share: float = 0.3
    most_bytes: int = 2 * GIB

    def look(self, case: Evidence) -> Iterator[Found]:
        own = [row for row in case.processes if not case.own_pids or row.pid in case.own_pids]
        by_pid: dict[int, list[GpuProcess]] = {}
        for row in own:
            by_pid.setdefault(row.pid, []).append(row)
        stray: dict[str, list[GpuProcess]] = {}
        for rows in by_pid.values():
            most = max(row.used_bytes for row in rows)
            for row in rows:
                if row.used_bytes <= min(self.most_share * most, self.most_bytes) and len(rows) > 1:
                    stray.setdefault(row.gpu, []).append(row)
        for gpu, rows in sorted(stray.items()):
            total = sum(row.used_bytes for row in rows)
            yield self.found(
                f"{len(rows)} processes have a context on GPU {gpu} that is not theirs: "
                f"{format_bytes(total)}.",
                confidence="high",
                evidence=[
                    f"process {row.pid} ({row.name}): {format_bytes(row.used_bytes)} on GPU {gpu}, "
                    f"{format_bytes(max(r.used_bytes for r in by_pid[row.pid]))} on its own"
                    for row in rows
                ],
                size_bytes=total,
                where=f"GPU {gpu}",
                advice=[
                    Advice(
                        action="Choose the device before the first CUDA call of each rank, and load "
                        "checkpoints to the host.",
                        typed='torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # first\n'
                        'torch.load(path, map_location="cpu")',
                        kind="python",
                        saving_bytes=total,
                        cost="none",
                        source=self.source,
                    )
                ],
            )
