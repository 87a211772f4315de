"""The cheapest GPU of the catalogue on which a workload's step fits.

The catalogue has no prices, which change by the week. GPUs are asked in the order of their memory, and of the
same memory in the order of their fp16 FLOP/s: what is rented or bought follows both. What a step needs is
measured once for each architecture (kernels and workspaces differ between them), by the leanest ways of
training; on the first GPU that has room for them the fastest plan is sought in full.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.core.catalogue import CATALOGUE
from memfit.core.devices import GPU
from memfit.core.exactness import Exactness
from memfit.planning.bench import Peaks
from memfit.planning.explore import Progress
from memfit.planning.fit import Verifier, fit_on, no_progress, workload_and_spec
from memfit.planning.oracle import Engine, StepOracle, open_oracle
from memfit.planning.plan import SCHEMA_VERSION, FitResult
from memfit.planning.sizes import lean_ways

if TYPE_CHECKING:
    from memfit.core.workload import Workload

CRITERION = "least memory first; of the same memory, least fp16 FLOP/s first (the catalogue has no prices)"


@dataclass(frozen=True, kw_only=True)
class GPUTried:
    """One GPU that was asked about, in the order of asking."""

    gpu: str
    budget_bytes: int
    least_reserved_bytes: int
    fits: bool


@dataclass(frozen=True, kw_only=True)
class CheapestResult:
    """The answer: ``gpu`` is None where none of the catalogue has room; ``fit`` is the plan on it."""

    gpu: str | None
    fit: FitResult | None
    tried: tuple[GPUTried, ...]
    wall_seconds: float
    criterion: str = CRITERION

    def to_json(self) -> dict[str, Any]:
        """The one JSON object that `memfit fit --gpu any --json` prints."""
        return {
            "schema_version": SCHEMA_VERSION,
            "gpu": self.gpu,
            "criterion": self.criterion,
            "tried": [vars(one) for one in self.tried],
            "fit": None if self.fit is None else self.fit.to_json(),
            "wall_seconds": self.wall_seconds,
        }


def by_price_class(catalogue: Mapping[str, GPU] = CATALOGUE) -> list[GPU]:
    """The GPUs in the order of `CRITERION`."""
    return sorted(
        catalogue.values(),
        key=lambda gpu: (round(gpu.nvml_total_bytes / 2**30), gpu.peak_flops.get("fp16", 0.0), gpu.key),
    )


def cheapest(
    workload: Workload | str,
    *,
    allow: Exactness = "exact",
    verify: bool = True,
    progress: Progress | None = None,
    engine: Engine = "auto",
    traces: str | Path | None = None,
    seed: int = 0,
    catalogue: Mapping[str, GPU] = CATALOGUE,
) -> CheapestResult:
    """The first GPU, by `CRITERION`, on which the training step fits, and the fastest plan on it.

    Arguments and errors are as for `memfit.plan`; each GPU's budget is what it has to give by default.
    """
    started = time.perf_counter()
    tried: list[GPUTried] = []
    result: FitResult | None = None
    show = progress or no_progress
    reference, spec = workload_and_spec(workload)
    with ExitStack() as stack:
        folder = Path(traces or stack.enter_context(tempfile.TemporaryDirectory(prefix="memfit-")))
        needs = _Needs(
            stack=stack, reference=reference, spec=spec, folder=folder, engine=engine, allow=allow, seed=seed
        )
        for gpu in by_price_class(catalogue):
            show("gpus", len(tried), len(catalogue))
            budget, least = gpu.default_budget_bytes, needs.of(gpu)
            if least <= budget:
                verifier = stack.enter_context(Verifier(reference, seed)) if verify else None
                with open_oracle(reference, spec, gpu, folder, engine=engine, seed=seed) as oracle:
                    result = fit_on(
                        oracle, gpu, budget, spec=spec, allow=allow, verifier=verifier, show=show, seed=seed
                    )
            fits = least <= budget and result is not None and result.fits
            tried.append(GPUTried(gpu=gpu.key, budget_bytes=budget, least_reserved_bytes=least, fits=fits))
            if fits:
                break
    found = tried[-1].gpu if tried and tried[-1].fits else None
    return CheapestResult(
        gpu=found, fit=result, tried=tuple(tried), wall_seconds=time.perf_counter() - started
    )


@dataclass(kw_only=True)
class _Needs:
    """What the leanest ways of training reserve, measured once for each architecture."""

    stack: ExitStack
    reference: dict[str, Any]
    spec: str | None
    folder: Path
    engine: Engine
    allow: Exactness
    seed: int
    _known: dict[tuple[int, int], int] = field(default_factory=dict)

    def of(self, gpu: GPU) -> int:
        """Reserved bytes on this GPU's architecture."""
        if gpu.compute_capability not in self._known:
            with open_oracle(
                self.reference, self.spec, gpu, self.folder, engine=self.engine, seed=self.seed
            ) as oracle:
                self._known[gpu.compute_capability] = self._least(oracle)
        return self._known[gpu.compute_capability]

    def _least(self, oracle: StepOracle) -> int:
        oracle.graph(())  # what the plain step raises comes through
        peaks: list[Peaks] = [oracle.evaluate(way) for way in lean_ways(oracle.facts(), self.allow)]
        return min(peak.reserved_bytes for peak in peaks if peak.failure is None)
