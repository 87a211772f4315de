"""What a report of a fit is made of: the result, the GPU, the two timelines, and how it came about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from memfit.core.devices import GPU, find_gpu
from memfit.core.errors import UsageError
from memfit.core.trace import Trace
from memfit.planning.figures import StepFigures
from memfit.planning.plan import FitResult
from memfit.reports.account import Account
from memfit.reports.series import StepSeries


@dataclass(frozen=True, kw_only=True)
class FitReport:
    """All that the text, the figures and the page of a fit show.

    Attributes:
        result: what planning found.
        gpu: the GPU that it is for; ``None`` where the result names one that this catalogue has not.
        plain_series, planned_series: memory over the last step; ``None`` where no trace was kept.
        allow: the exactness that was allowed.
        command: the command line that makes this report again.
        plan_path: where the plan was saved.
        versions: what ran, ``{"memfit": "0.1.0", "torch": …}``.
    """

    result: FitResult
    gpu: GPU | None = None
    plain_series: StepSeries | None = None
    planned_series: StepSeries | None = None
    allow: str = "exact"
    command: str | None = None
    plan_path: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        result: FitResult,
        *,
        allow: str = "exact",
        command: str | None = None,
        plan_path: str | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> FitReport:
        """The report of a result; reads the traces that the result names, where they are still there."""
        return cls(
            result=result,
            gpu=_known_gpu(result.gpu),
            plain_series=_series(result.plain),
            planned_series=None if result.planned is None else _series(result.planned),
            allow=allow,
            command=command,
            plan_path=plan_path,
            versions=versions or {},
        )

    @property
    def capacity_bytes(self) -> int | None:
        """All of the device's memory, as nvidia-smi shows it."""
        return None if self.gpu is None else self.gpu.nvml_total_bytes

    @property
    def changes_something(self) -> bool:
        """There is a planned step, and it is not the plain one."""
        return self.result.planned is not None and bool(self.result.techniques)

    @property
    def is_refuted(self) -> bool:
        """Real steps showed that the plan does not compute what plain training does."""
        return self.result.verified is not None and self.result.verified.passed is False

    def account(self, figures: StepFigures) -> Account:
        """The account of the plain or the planned step on this GPU."""
        return Account.of(
            figures, context_bytes=self.result.context_bytes, capacity_bytes=self.capacity_bytes
        )


def _known_gpu(name: str) -> GPU | None:
    try:
        return find_gpu(name)
    except UsageError:
        return None


def _series(figures: StepFigures) -> StepSeries | None:
    if figures.trace_path is None or not Path(figures.trace_path).exists():
        return None
    return StepSeries.of(Trace.load(figures.trace_path))
