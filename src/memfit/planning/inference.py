"""Does generation fit: weights, prefill, and the growth of the KV cache, for each kind of cache; and the
largest batch or the longest context that does.

Each figure is the reserved peak of a real decoding loop, run token by token by the engine. For the largest
batch or context the same loop is run with few new tokens while sizes are doubled and bisected, and in full at
the size found.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from memfit.core.devices import GPU, find_gpu
from memfit.core.errors import UsageError, WorkloadFailed
from memfit.planning.explore import Progress
from memfit.planning.fit import checked_budget, no_progress, reachable, workload_and_spec
from memfit.planning.oracle import Engine, open_oracle
from memfit.planning.plan import SCHEMA_VERSION

if TYPE_CHECKING:
    from memfit.core.workload import Workload

Cache = Literal["dynamic", "static", "int8", "int4"]
CACHE_NAMES: tuple[Cache, ...] = ("dynamic", "static", "int8", "int4")
FEW_TOKENS = 4
"""New tokens of the runs that only look for a size; the prompt is longer by the rest."""
MOST_BATCH, MOST_CONTEXT, CONTEXT_GRAIN = 1 << 16, 1 << 22, 64


@dataclass(frozen=True, kw_only=True)
class GenerationFigures:
    """What one generation needs, in bytes; ``failure`` says why it could not be run.

    Attributes:
        cache: the kind of KV cache.
        batch, prompt, new_tokens: its shape.
        cache_bytes_after_prefill, cache_bytes: what the cache holds then, and at the end.
        prefill_reserved_bytes: peak up to the first new token.
        requested_bytes, allocated_bytes, reserved_bytes: peaks of the whole.
        fits: within the budget.
    """

    cache: str
    batch: int
    prompt: int
    new_tokens: int
    cache_bytes_after_prefill: int = 0
    cache_bytes: int = 0
    prefill_reserved_bytes: int = 0
    requested_bytes: int = 0
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    fits: bool = False
    failure: str | None = None

    @property
    def bytes_per_token(self) -> float:
        """By how much the cache grows with each new token of the whole batch."""
        grown = self.cache_bytes - self.cache_bytes_after_prefill
        return grown / max(self.new_tokens - 1, 1)


@dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """What a model needs to generate: a row per kind of cache, and the largest sizes where they were asked
    for (None: not even the smallest fits)."""

    workload: str
    workload_spec: str | None
    gpu: str
    engine: str
    torch: str | None
    budget_bytes: int
    weight_bytes: int
    positions: int | None
    sliding_window: int | None
    rows: tuple[GenerationFigures, ...]
    maximize: str | None
    largest: tuple[GenerationFigures, ...]
    wall_seconds: float

    @property
    def fits(self) -> bool:
        """Whether generation as given fits with some cache; with ``maximize``, whether some size does."""
        return any(row.fits for row in (self.largest if self.maximize else self.rows))

    def to_json(self) -> dict[str, Any]:
        """The one JSON object that `memfit fit --inference --json` prints."""
        return {
            "schema_version": SCHEMA_VERSION,
            **{
                k: v for k, v in vars(self).items() if k not in ("rows", "largest")
            },  # every field but the tables
            "fits": self.fits,
            "caches": [{**vars(row), "bytes_per_token": row.bytes_per_token} for row in self.rows],
            "largest": [vars(row) for row in self.largest],
        }


def generation(
    workload: Workload | str,
    *,
    gpu: GPU | str,
    budget: int | str | None = None,
    new_tokens: int = 128,
    maximize: str | None = None,
    engine: Engine = "auto",
    progress: Progress | None = None,
    seed: int = 0,
) -> GenerationResult:
    """Runs generation with each kind of cache and measures it.

    Args:
        workload: ``hf:NAME,batch=1,seq=1024,dtype=bf16``; ``seq`` is the prompt's length. Or any workload
            whose model is a causal language model of transformers and whose batch has ``input_ids``.
        gpu, budget: as for `memfit.plan`.
        new_tokens: how many tokens are generated.
        maximize: ``"batch"`` or ``"seq"``: the largest that fits, for each cache; a longer context means a
            longer prompt.
        engine, progress, seed: as for `memfit.plan`.

    Raises:
        UsageError: the model cannot generate; and as `memfit.plan`.
    """
    started = time.perf_counter()
    if new_tokens < 1:
        raise UsageError(f"new_tokens={new_tokens}: generate 1 token or more")
    device = find_gpu(gpu) if isinstance(gpu, str) else gpu
    budget_bytes = checked_budget(budget, device)
    reference, spec = workload_and_spec(workload)
    with (
        tempfile.TemporaryDirectory(prefix="memfit-") as folder,
        open_oracle(reference, spec, device, Path(folder), engine=engine, seed=seed) as oracle,
        oracle.open("memfit.planning.evaluate_generation:GenerationSession") as session,
    ):
        facts = session.call("facts")
        tries = _Tries(
            call=session.call,
            budget_bytes=reachable(budget_bytes, device),
            positions=facts["positions"],
            new_tokens=new_tokens,
            show=progress or no_progress,
        )
        rows = tuple(tries.run(cache, facts["batch"], facts["prompt"]) for cache in CACHE_NAMES)
        if all(row.failure for row in rows):
            raise WorkloadFailed(f"{facts['name']} cannot generate: {rows[0].failure}")
        largest: tuple[GenerationFigures, ...] = ()
        if maximize is not None:
            largest = tuple(tries.largest(row, maximize) for row in rows if row.failure is None)
        return GenerationResult(
            workload=facts["name"],
            workload_spec=spec,
            gpu=device.key,
            engine=oracle.engine,
            torch=facts["torch"],
            budget_bytes=budget_bytes,
            weight_bytes=facts["weight_bytes"],
            positions=facts["positions"],
            sliding_window=facts["sliding_window"],
            rows=rows,
            maximize=maximize,
            largest=largest,
            wall_seconds=time.perf_counter() - started,
        )


@dataclass(kw_only=True)
class _Tries:
    """Generations run on the session."""

    call: Callable[..., Any]
    budget_bytes: int
    positions: int | None
    new_tokens: int
    show: Progress

    def run(self, cache: str, batch: int, prompt: int, new_tokens: int | None = None) -> GenerationFigures:
        """One generation, measured."""
        count = self.new_tokens if new_tokens is None else new_tokens
        shape: dict[str, Any] = {"cache": cache, "batch": batch, "prompt": prompt, "new_tokens": count}
        if self.positions is not None and prompt + count > self.positions:
            reason = f"{prompt} + {count} tokens are more than the model's {self.positions} positions"
            return GenerationFigures(**shape, failure=reason)
        self.show(f"generating with the {cache} cache, batch {batch}, prompt {prompt}", 0, 0)
        seen = self.call("measure", **shape)
        if seen.get("failure"):
            return GenerationFigures(**shape, failure=seen["failure"])
        peak = seen["peak"]
        return GenerationFigures(
            **shape,
            cache_bytes_after_prefill=seen["cache_bytes_after_prefill"],
            cache_bytes=seen["cache_bytes"],
            prefill_reserved_bytes=seen["prefill"]["reserved_bytes"],
            requested_bytes=peak["requested_bytes"],
            allocated_bytes=peak["allocated_bytes"],
            reserved_bytes=peak["reserved_bytes"],
            fits=peak["reserved_bytes"] <= self.budget_bytes,
        )

    def largest(self, row: GenerationFigures, what: str) -> GenerationFigures:
        """The largest batch or longest context with the row's cache; the smallest one's figures where none
        fits."""
        grain, most = (1, MOST_BATCH) if what == "batch" else (CONTEXT_GRAIN, MOST_CONTEXT)
        start = row.batch if what == "batch" else max(row.prompt // grain * grain, grain)
        low, high = _bisected(lambda size: self._quick(row, what, size), start, grain, most)
        for size in range(low, max(low - 3 * grain, 0), -grain):
            found = self._at(row, what, size)
            if found.fits:
                return found
        return self._at(row, what, low or min(grain, high))

    def _at(self, row: GenerationFigures, what: str, size: int) -> GenerationFigures:
        if what == "batch":
            return self.run(row.cache, size, row.prompt)
        return self.run(row.cache, row.batch, size)

    def _quick(self, row: GenerationFigures, what: str, size: int) -> bool:
        """Whether a size is likely to fit: all but the last few tokens are taken as part of the prompt."""
        few = min(FEW_TOKENS, self.new_tokens)
        batch, prompt = (size, row.prompt) if what == "batch" else (row.batch, size)
        return self.run(row.cache, batch, prompt + self.new_tokens - few, few).fits


def _bisected(fits: Callable[[int], bool], start: int, grain: int, most: int) -> tuple[int, int]:
    """The largest multiple of ``grain`` that fits (0: none), and the least seen that does not."""
    if fits(start):
        low, high = start, 2 * start
        while high <= most and fits(high):
            low, high = high, 2 * high
    else:
        low, high = 0, start
    while high - low > grain:
        middle = (low + high) // (2 * grain) * grain
        if middle <= low:
            break
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, high
