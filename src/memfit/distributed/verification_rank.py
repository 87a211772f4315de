"""One rank of `memfit.distributed.verify`: steps as a rank, the same in one process, and the comparison.

Child side, on the CPU with gloo; every rank runs the one process's steps for itself, so that each compares
all that it has.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.utils._pytree import tree_map

from memfit.capture.step import TrainingStep, build_step
from memfit.capture.workloads import from_reference
from memfit.core.errors import MemfitError
from memfit.core.workload import Workload
from memfit.distributed import groups
from memfit.distributed.fingerprints import fingerprints
from memfit.distributed.rank_step import quiet, share_of
from memfit.distributed.strategies import Strategy, strategy_named
from memfit.distributed.whole import whole_gradients, whole_parameters
from memfit.distributed.wrapping import wrap_by_settings
from memfit.planning.plan import micro_batch_count, sample_count
from memfit.planning.verify import (
    STEPS,
    Scale,
    largest_error,
    one_thread,
    renamed_blocks,
    scale_down,
    scale_for,
    tolerance_of,
    without_dropout,
)

Seen = dict[str, torch.Tensor]


def verify_rank(
    workload: Mapping[str, Any],
    techniques: Sequence[Mapping[str, Any]],
    strategy: str,
    ranks: int,
    rank: int,
    store: str,
    seed: int,
) -> dict[str, Any]:
    """What this rank found, as JSON; what the workload's own code raises is ``failed`` with its reason."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
    }  # fmt: skip
    quiet()
    meeting = FileStore(store, ranks)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=ranks)
    try:
        found = _compared(from_reference(workload), techniques, strategy_named(strategy, ranks), rank, seed)
        dist.barrier()
        return found
    except MemfitError as error:
        return {"failed": True, "reason": str(error)}
    except Exception as error:  # whatever the user's code raises: nothing is proven
        first = str(error).strip().split("\n")[0]
        return {"failed": True, "reason": f"the step cannot run on ranks: {type(error).__name__}: {first}"}


def _compared(
    workload: Workload, techniques: Sequence[Mapping[str, Any]], strategy: Strategy, rank: int, seed: int
) -> dict[str, Any]:
    with one_thread(), without_dropout():
        scale = scale_for(workload, techniques)

        def build(wanted: Workload) -> TrainingStep:
            step = build_step(
                wanted, device="cpu", size="small" if scale.size == "small" else "full", seed=seed
            )
            scale_down(step, _with_samples(scale, strategy))
            step.batch = _repeated(step.batch, strategy.data_ranks)
            return step

        plain = _steps(build(workload))
        own = _as_rank(build, workload, renamed_blocks(techniques, scale), strategy, rank)
        batch_norm = any("BatchNorm" in type(module).__name__ for module in own.model.modules())
        many = _steps(own)
    keys, missing = sorted(plain.keys() & many.keys()), sorted(plain.keys() ^ many.keys())
    one, kept = {name: plain[name] for name in keys}, {name: many[name] for name in keys}
    tolerance = tolerance_of(workload, one)
    error, moved = (_error(one, kept, kind) for kind in ("gradient", "parameter"))
    prints = groups.exchanged(fingerprints(list(kept.values())).tolist())
    reason = (
        "BatchNorm takes its statistics over a rank's own samples"
        if batch_norm and error > tolerance
        else None
    )
    return {
        "error": float("inf") if missing else error,
        "parameter_error": moved,
        "tolerance": tolerance,
        "bitwise": all(torch.equal(one[name], kept[name]) for name in one),
        "ranks_agree": all(other == prints[0] for other in prints),
        "differences": missing[:8] or _differing(one, kept, tolerance)[:8],
        "steps": STEPS,
        "scale": scale.text,
        "reason": reason,
    }


def _error(one: Seen, many: Seen, kind: str) -> float:
    """The largest relative error among the gradients, or of all parameters together."""
    names = [name for name in one if name.startswith(kind)]
    return largest_error({name: one[name] for name in names}, {name: many[name] for name in names})


def _with_samples(scale: Scale, strategy: Strategy) -> Scale:
    """At least one sample for each rank that has its own."""
    return (
        scale
        if scale.samples is None
        else dataclasses.replace(scale, samples=max(scale.samples, 2 * strategy.data_ranks))
    )


def _repeated(batch: Any, parts: int) -> Any:
    """The batch, over and over until it divides evenly."""
    samples = sample_count(batch)
    wanted = -(-samples // parts) * parts

    def enough(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != samples:
            return leaf
        return torch.cat([leaf] * -(-wanted // samples))[:wanted].clone()

    return batch if wanted == samples else tree_map(enough, batch)


def _as_rank(
    build: Callable[[Workload], TrainingStep],
    workload: Workload,
    techniques: Sequence[Mapping[str, Any]],
    strategy: Strategy,
    rank: int,
) -> TrainingStep:
    """The step with its model wrapped, and this rank's part of the batch.

    Ranks' gradients are averaged evenly, so a loss that is a mean over tokens counts by its rank's tokens.
    """
    whole = build(workload).batch
    weigh = workload.loss_weight
    total = None if weigh is None else float(weigh(whole)) / strategy.data_ranks

    def loss(model: Any, batch: Any) -> Any:
        value = workload.loss(model, batch)
        return value if weigh is None or not total else value * (float(weigh(batch)) / total)

    step = build(dataclasses.replace(workload, loss=loss) if micro_batch_count(techniques) == 1 else workload)
    make = torch.optim.AdamW if workload.optimizer is None else workload.optimizer
    step.batch = share_of(whole, strategy.data_ranks, rank // strategy.tensor)
    step.model, step.optimizer = wrap_by_settings(step.model, techniques, strategy, make)
    step.micro_batches = min(micro_batch_count(techniques), sample_count(step.batch))
    return step


def _steps(step: TrainingStep) -> Seen:
    """Runs the steps: gradients of the first, parameters after the last, whole, by plain names."""
    seen: Seen = {}
    for number in range(STEPS):
        step.forward_backward()
        if number == 0:
            seen |= {f"gradient of {name}": grad for name, grad in whole_gradients(step.model).items()}
        step.optimizer_step()
    after = whole_parameters(step.model)
    return seen | {f"parameter {name} after {STEPS} steps": value for name, value in after.items()}


def _differing(one: Seen, many: Seen, tolerance: float) -> list[str]:
    """Gradients that differ by more than the tolerance, the worst first; none where none does."""
    errors = {}
    for name in one:
        scale = float(one[name].double().square().mean().sqrt()) or 1.0
        errors[name] = float((one[name].double() - many[name].double()).abs().max()) / scale
    return [
        name
        for name in sorted(errors, key=lambda name: -errors[name])
        if errors[name] > 100 * max(tolerance, 1e-12) and name.startswith("gradient")
    ]
