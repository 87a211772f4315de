"""What `memfit.scale` finds: a case for each number of GPUs, strategy and plan, and the answer. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from memfit.core.exactness import Exactness
from memfit.distributed.verification import VerifiedOnRanks
from memfit.planning.figures import StepFigures
from memfit.planning.plan import Plan

SCHEMA_VERSION = 1
Batch = Literal["whole", "each"]
PlanName = Literal["plain", "full", "planned"]

PLAN_TITLES: Mapping[str, str] = {
    "plain": "plain",
    "full": "full checkpointing",
    "planned": "memfit's plan",
}
NO_STEP_SECONDS = (
    "the links between the GPUs are not known, nor how much of the communication hides behind computing; "
    "give their speed (--link-bandwidth 300GB/s) for bounds"
)


@dataclass(frozen=True, kw_only=True)
class ScaleCase:
    """One way to train: so many GPUs, a strategy, a plan; figures of the rank that needs most, in bytes.

    Attributes:
        gpus, strategy, plan: what was run.
        techniques: of the plan, as settings; ``exactness``: how far they move results.
        samples: of this rank.
        rank: that was measured: 0, or one that needs more.
        peak_requested_bytes, peak_allocated_bytes, peak_reserved_bytes: as in a dry run's result.
        libraries_bytes: what NCCL takes beside PyTorch (an estimate, 0.6 GB for each communicator).
        device_total_bytes: context + libraries + reserved: what nvidia-smi would show at the peak.
        limit_bytes: what PyTorch may reserve here.
        fits: within the limit and the GPU.
        tight: fits only as the allocator gives back cached memory when it runs short.
        problem: why it could not be run, or what is wrong with it; None where nothing is.
        flops: of a step of this rank.
        compute_seconds: its operators by the roofline of the GPU; without communication.
        collectives: of one step, by kind: calls, bytes of this rank's own, bytes sent (ring algorithms).
        step_seconds_bounds: computing and communicating one over the other, and one after the other; None
            where the links are not known.
    """

    gpus: int
    strategy: str
    plan: PlanName
    techniques: tuple[Mapping[str, Any], ...] = ()
    exactness: Exactness = "exact"
    samples: int = 0
    rank: int = 0
    peak_requested_bytes: int = 0
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    libraries_bytes: int = 0
    device_total_bytes: int = 0
    limit_bytes: int = 0
    fits: bool = False
    tight: bool = False
    problem: str | None = None
    flops: int = 0
    compute_seconds: float | None = None
    collectives: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    step_seconds_bounds: tuple[float, float] | None = None

    @property
    def sent_bytes(self) -> int:
        """What this rank sends to others in a step."""
        return sum(sent for _, _, sent in self.collectives.values())

    @property
    def title(self) -> str:
        """``"fsdp2 with full checkpointing"``."""
        return self.strategy if self.plan == "plain" else f"{self.strategy} with {PLAN_TITLES[self.plan]}"

    def to_json(self) -> dict[str, Any]:
        """JSON form; bytes are integers, seconds floats."""
        bounds = self.step_seconds_bounds
        return {
            **{name: value for name, value in vars(self).items() if name != "step_seconds_bounds"},
            "techniques": [dict(settings) for settings in self.techniques],
            "collectives": {
                kind: {"calls": calls, "own_bytes": own, "sent_bytes": sent}
                for kind, (calls, own, sent) in self.collectives.items()
            },
            "sent_bytes": self.sent_bytes,
            "step_seconds_bounds": None if bounds is None else list(bounds),
        }


@dataclass(frozen=True, kw_only=True)
class ScaleResult:
    """How a workload trains on several GPUs.

    Attributes:
        workload, workload_spec, gpu: what was asked.
        budget_bytes: what PyTorch may reserve on each GPU, if it was said.
        batch: ``"whole"``: the workload's batch is divided among the GPUs; ``"each"``: each GPU has as much.
        samples: in the workload's batch.
        nvml_total_bytes, context_bytes: of each GPU.
        cases: in the order of GPUs, strategies and plans.
        verified: what real steps on ranks showed of the strategies that were run so.
        notes: what to know of the figures.
        wall_seconds: of everything.
    """

    workload: str
    workload_spec: str | None
    gpu: str
    budget_bytes: int | None
    batch: Batch
    samples: int
    nvml_total_bytes: int
    context_bytes: int
    cases: tuple[ScaleCase, ...]
    verified: tuple[VerifiedOnRanks, ...] = ()
    notes: tuple[str, ...] = ()
    link_bytes_per_second: float | None = None
    wall_seconds: float = 0.0

    @property
    def least_gpus(self) -> int | None:
        """The least number of GPUs on which anything fits; None where nothing does."""
        return min((case.gpus for case in self.cases if case.fits), default=None)

    @property
    def best(self) -> ScaleCase | None:
        """On the least number of GPUs: least to compute, then least to send, then least memory."""
        return best_of(self.cases)

    @property
    def leanest(self) -> ScaleCase | None:
        """The case that needs least memory of all that ran."""
        ran = [case for case in self.cases if case.problem is None]
        return min(ran, key=lambda case: case.device_total_bytes, default=None)

    @property
    def fits(self) -> bool:
        """Whether anything does."""
        return self.best is not None

    @property
    def one_gpu(self) -> PlanName | None:
        """With what one GPU is enough: plain, full checkpointing or memfit's plan; None: it is not."""
        best = self.best
        return best.plan if best is not None and best.gpus == 1 else None

    @property
    def plan(self) -> Plan | None:
        """The plan of the best case, to save and to give to `memfit.distributed.wrap`; None: it has none."""
        best = self.best
        if best is None or not best.techniques:
            return None
        like = (c for c in self.cases if (c.gpus, c.strategy, c.plan) == (best.gpus, best.strategy, "plain"))
        plain = _figures(next(like, best))
        planned = _figures(best)
        more = planned.step_seconds / plain.step_seconds - 1 if plain.step_seconds else 0.0
        return Plan(
            workload=self.workload,
            workload_spec=self.workload_spec,
            gpu=self.gpu,
            budget_bytes=best.limit_bytes,
            techniques=best.techniques,
            exactness=best.exactness,
            plain=plain,
            planned=planned,
            recompute_percent=100.0 * more,
        )

    def to_json(self) -> dict[str, Any]:
        """The one JSON object of ``memfit scale --json``."""
        best = self.best
        link = self.link_bytes_per_second
        return {
            "schema_version": SCHEMA_VERSION,
            "workload": self.workload,
            "workload_spec": self.workload_spec,
            "gpu": self.gpu,
            "budget_bytes": self.budget_bytes,
            "batch": self.batch,
            "samples": self.samples,
            "nvml_total_bytes": self.nvml_total_bytes,
            "context_bytes": self.context_bytes,
            "fits": self.fits,
            "least_gpus": self.least_gpus,
            "one_gpu": self.one_gpu,
            "best": None if best is None else best.to_json(),
            "cases": [case.to_json() for case in self.cases],
            "verified": [one.to_json() for one in self.verified],
            "link_bytes_per_second": link,
            "step_seconds": None,
            "step_seconds_reason": NO_STEP_SECONDS
            if link is None
            else "bounds only: how much of the communication hides behind computing is not known",
            "notes": list(self.notes),
            "wall_seconds": self.wall_seconds,
        }


def best_of(cases: Sequence[ScaleCase]) -> ScaleCase | None:
    """Of the cases that fit on the fewest GPUs: least to compute, then to send, then to hold; or None."""
    return min(
        (case for case in cases if case.fits), key=lambda case: (case.gpus, *_cost(case)), default=None
    )


def _figures(case: ScaleCase) -> StepFigures:
    return StepFigures(
        peak_requested_bytes=case.peak_requested_bytes,
        peak_allocated_bytes=case.peak_allocated_bytes,
        peak_reserved_bytes=case.peak_reserved_bytes,
        step_seconds=case.compute_seconds or 0.0,
        flops=float(case.flops),
    )


def _cost(case: ScaleCase) -> tuple[float, int, int]:
    """Predicted seconds to two digits: what lies closer is no difference."""
    return float(f"{case.compute_seconds or 0.0:.2g}"), case.sent_bytes, case.device_total_bytes
