"""One rank of a workload that is spread by a strategy: built, run, measured. Child side of ``memfit scale``.

Runs in a fork of a worker on the made-up GPU, where the other ranks are absent (see
`memfit.dryrun.absent_ranks`), by the same `wrap` that real ranks call.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from memfit.capture.cost_mode import CostMode
from memfit.capture.measure import measure_step, out_of_memory_as_value
from memfit.capture.step import TrainingStep, build_batch
from memfit.capture.true_values import on_made_up_gpu, true_values
from memfit.capture.workloads import from_reference
from memfit.core.devices import GPU
from memfit.core.errors import UsageError
from memfit.core.workload import Workload
from memfit.distributed.strategies import Strategy, strategy_named
from memfit.distributed.wrapping import wrap_by_settings
from memfit.dryrun import absent_ranks
from memfit.dryrun.devices import traffic
from memfit.dryrun.interception import current_handler, intercepting
from memfit.dryrun.world import World
from memfit.planning.plan import micro_batch_count, sample_count

STEPS = 3
_COLLECTIVES = ("c10d", "_c10d_functional")

Traffic = dict[str, tuple[int, int, int]]


def measure_rank(
    workload: Mapping[str, Any],
    *,
    target: Mapping[str, Any],
    strategy: str,
    ranks: int,
    rank: int,
    techniques: Sequence[Mapping[str, Any]] = (),
    whole_batch: bool = True,
    seed: int = 0,
) -> dict[str, Any]:
    """Three steps of a rank, on the made-up GPU that this process is on.

    Args:
        workload: a reference of `memfit.capture.workloads.workload_reference`.
        target: the GPU that is asked about, as JSON (this process may be on a roomier one).
        strategy: by name; of one rank: any.
        ranks: in the job.
        rank: which one to run.
        techniques: of a plan, as settings.
        whole_batch: the workload's batch is that of all ranks; else every rank has as much.

    Returns:
        JSON: the keys of `memfit.capture.measure.measure_step`, ``name``, ``samples``,
        ``device_total_bytes``, ``libraries_bytes``, ``collectives`` of one step (by kind: calls, own bytes,
        sent bytes), and ``heaviest_rank``, whose optimizer state is the largest. Out of memory is the value
        ``oom``.
    """
    device = GPU(**{**target, "compute_capability": tuple(target["compute_capability"])})
    notes: list[str] = []
    _become(rank, ranks, notes)
    spread = strategy_named(strategy, ranks) if ranks > 1 else Strategy(ranks=1, data=None)
    with true_values():
        with out_of_memory_as_value(phase="init") as caught:
            step = build_rank_step(
                from_reference(workload), spread, rank, techniques, whole_batch=whole_batch, seed=seed
            )
        if caught:
            return {"oom": caught[0], "notes": notes}
        gc.collect()
        torch.cuda.empty_cache()
        counter = _Counter(step, device)
        with intercepting(counter):
            result = measure_step(step, gpu=device, steps=STEPS, costs=False)
        if result["oom"] is None:
            result |= counter.figures()
    return result | {
        "name": step.workload.name,
        "samples": sample_count(step.batch),
        "heaviest_rank": _heaviest_rank(step.optimizer),
        "notes": list(dict.fromkeys(notes)),
        **_account(device, int(result["peak_reserved_bytes"])),
    }


def build_rank_step(
    workload: Workload,
    strategy: Strategy,
    rank: int,
    techniques: Sequence[Mapping[str, Any]],
    *,
    whole_batch: bool,
    seed: int = 0,
) -> TrainingStep:
    """Model and optimizer as `wrap` makes them, with this rank's part of the batch; in its group."""
    device = torch.device("cuda", torch.cuda.current_device())
    whole = strategy.tensor == 1 and not strategy.is_sharded
    model = _model(workload, device, seed, on_meta=not whole)
    batch = build_batch(workload, device=device, seed=seed)
    if whole_batch:
        batch = share_of(batch, strategy.data_ranks, rank // strategy.tensor)
    make = torch.optim.AdamW if workload.optimizer is None else workload.optimizer
    wrapped, optimizer = wrap_by_settings(model.train(), techniques, strategy, make)
    torch.manual_seed(seed + 2)
    return TrainingStep(
        workload=workload,
        device=device,
        model=wrapped,
        optimizer=optimizer,
        batch=batch,
        micro_batches=micro_batch_count(techniques),
        scaler=torch.amp.GradScaler(device.type) if workload.precision == "fp16-autocast" else None,
    )


def share_of(batch: Any, parts: int, number: int) -> Any:
    """One of so many parts of a batch along dimension 0, the first ones the larger where it does not divide.

    Raises:
        UsageError: fewer samples than parts.
    """
    samples = sample_count(batch)
    if samples < parts:
        raise UsageError(f"{samples} samples cannot be divided among {parts} ranks")

    def own(leaf: Any) -> Any:
        cut = isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == samples
        return leaf.tensor_split(parts)[number].clone() if cut else leaf

    return batch if parts == 1 else tree_map(own, batch)


def quiet() -> None:
    """Without FSDP2's word to authors of models whose outputs are views (no model here writes into them), and
    DTensor's on how it gathers whole tensors, which is for the comparison."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def _become(rank: int, ranks: int, notes: list[str]) -> None:
    """This process is a rank from now on; nothing of CUDA may have been used yet."""
    torch.set_num_threads(1)
    quiet()
    if ranks == 1:
        return
    world = World.of(ranks)
    os.environ.update(world.environment(rank))
    os.environ["MEMFIT_GPU_COUNT"] = str(world.per_node)
    absent_ranks.install(notes.append)
    torch.cuda.set_device(rank % world.per_node)
    dist.init_process_group("nccl", rank=rank, world_size=ranks)


def _model(workload: Workload, device: torch.device, seed: int, *, on_meta: bool) -> nn.Module:
    """The workload's model on the device; with ``on_meta`` only its buffers, if it can be built so."""
    if on_meta:
        with contextlib.suppress(NotImplementedError, RuntimeError), device, _parameters_on_meta():
            torch.manual_seed(seed)
            return _checked(workload.model())
    with device:
        torch.manual_seed(seed)
        return _checked(workload.model()).to(device)


def _checked(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise UsageError(f"model() must return a torch.nn.Module, not {type(model).__name__}")
    return model


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Inside, what a module registers as a parameter moves to ``meta``: a large model takes no memory."""
    register = nn.Module.register_parameter

    def registered(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(self, name, parameter)
        own = self._parameters.get(name)
        if own is not None and not own.is_meta:
            moved = nn.Parameter(own.detach().to("meta"), requires_grad=own.requires_grad)
            moved.__dict__.update(own.__dict__)
            self._parameters[name] = moved

    nn.Module.register_parameter = registered  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class _Counter:
    """Counts the last step while it is measured: FLOPs, seconds by the roofline, what goes to collectives.

    Operators are seen below tensor subclasses, so a shard counts as what it is.
    """

    def __init__(self, step: TrainingStep, gpu: GPU) -> None:
        self._step, self._costs, self._told = step, CostMode(gpu), current_handler()
        self._before: Traffic = {}

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        last = self._step.steps_done == STEPS - 1
        if last and not self._before:
            self._before = traffic()
        out = func(*args, **kwargs) if self._told is None else self._told(func, args, kwargs)
        if last and func.namespace not in _COLLECTIVES:
            self._costs.count(func, args, kwargs, out)
        return out

    def figures(self) -> dict[str, Any]:
        """JSON, after the last step."""
        gave = {
            kind: [now - was for now, was in zip(numbers, self._before[kind], strict=True)]
            for kind, numbers in traffic().items()
        }
        return {
            "flops": self._costs.flops,
            "compute_seconds": self._costs.seconds,
            "collectives": {kind: numbers for kind, numbers in gave.items() if numbers[0]},
        }


def _account(gpu: GPU, reserved_bytes: int) -> dict[str, int]:
    """What the device holds at the peak: the context, what NCCL and others took, and PyTorch's segments."""
    free, total = torch.cuda.mem_get_info()
    beside = total - free - torch.cuda.memory_reserved()
    assert on_made_up_gpu()
    return {
        "device_total_bytes": beside + reserved_bytes,
        "libraries_bytes": beside - gpu.context_bytes,
    }


def _heaviest_rank(optimizer: Any) -> int | None:
    """Of ZeRO's optimizer: the rank with the most parameters' state; None: all have alike."""
    parts = getattr(optimizer, "_partition_parameters", None)
    if parts is None:
        return None
    sizes = [sum(p.numel() for group in groups for p in group["params"]) for groups in parts()]
    return max(range(len(sizes)), key=sizes.__getitem__)
