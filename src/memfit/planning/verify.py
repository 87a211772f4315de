"""Runs plain and planned steps on real values and compares all that training leaves: the proof of a plan's exactness.

Runs in a child process on the CPU, one thread, seeded; never on the made-up GPU, whose values are not real. Compared are
the loss, every gradient and buffer and the random state after the first step, and every parameter and buffer after three
optimizer steps. The workload is scaled down: its own small form where it has one; else its batch is cut to two samples
when the model fits the host's memory; else one block of each kind that the plan treats differently is kept.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from memfit.capture.step import TrainingStep, build_step, takes_size
from memfit.capture.workloads import from_reference
from memfit.core.errors import MemfitError
from memfit.core.units import format_bytes
from memfit.core.workload import Workload
from memfit.planning.figures import Settings, Verified
from memfit.planning.plan import apply_settings, micro_batch_count, sample_count
from memfit.core.exactness import Exactness
from memfit.techniques.blocks import find_block_chains

STEPS = 3
SAMPLES = 2
TOLERANCES: Mapping[str, float] = {"fp32": 1e-4, "low": 5e-2}
"""Largest relative error of a reordered plan: in fp32, and where bf16 or fp16 takes part (8 and 11 bits of mantissa)."""


@dataclass(frozen=True, kw_only=True)
class _Scale:
    """How the workload is scaled down: what `build_step` is told, how many samples, and which blocks stay."""

    text: str
    size: str = "full"
    samples: int | None = None
    keep: Mapping[str, str] | None = None


def verify(
    workload: Mapping[str, Any], techniques: Sequence[Settings], exactness: Exactness, seed: int = 0
) -> dict[str, Any]:
    """Compares ``STEPS`` plain and planned steps of the workload behind a reference, on the CPU.

    Returns the JSON form of `Verified`. Never raises for what the workload does: a workload that fails on the CPU is
    reported as not verified, with the reason.
    """
    started = time.perf_counter()
    try:
        verified = compare(from_reference(workload), techniques, exactness, seed)
    except (
        MemfitError,
        RuntimeError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        IndexError,
        MemoryError,
    ) as error:
        first = str(error).strip().split("\n")[0]
        verified = Verified(
            passed=None, reason=f"the step cannot run on the CPU: {type(error).__name__}: {first}"
        )
    return dataclasses.replace(verified, wall_seconds=time.perf_counter() - started).to_json()


def compare(
    workload: Workload, techniques: Sequence[Settings], exactness: Exactness, seed: int = 0
) -> Verified:
    """Runs both and compares. Raises what the workload raises."""
    with _one_thread():
        scale = _scale_for(workload, techniques)
        plain = _run(workload, scale, (), seed)
        planned = _run(workload, scale, techniques, seed)
    differences = [name for name, value in plain.items() if not _same_bits(value, planned.get(name))]
    differences += [name for name in planned if name not in plain]
    error = max(
        (_relative_error(plain[n], planned[n]) for n in differences if n in plain and n in planned),
        default=0.0,
    )
    tolerance = 0.0 if exactness == "exact" else _tolerance(plain)
    return Verified(
        passed=not differences or (exactness != "exact" and error <= tolerance),
        bitwise=not differences,
        device="cpu",
        scale=scale.text,
        steps=STEPS,
        max_relative_error=error,
        tolerance=tolerance,
        differences=tuple(differences[:8]),
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread: sums over several may come in another order from run to run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _run(
    workload: Workload, scale: _Scale, techniques: Sequence[Settings], seed: int
) -> dict[str, torch.Tensor]:
    """All that is compared, by name, after running the steps with ``techniques`` applied."""
    losses: list[torch.Tensor] = []

    def recorded(model: Any, batch: Any) -> Any:
        loss = workload.loss(model, batch)
        losses.append(loss.detach().clone())
        return loss

    step = build_step(
        dataclasses.replace(workload, loss=recorded),
        device="cpu",
        size="small" if scale.size == "small" else "full",
        seed=seed,
    )
    _scale_down(step, scale)
    apply_settings(_renamed(techniques, scale), step.model, step.optimizer)
    step.micro_batches = min(micro_batch_count(techniques), sample_count(step.batch))
    seen: dict[str, torch.Tensor] = {}
    for number in range(STEPS):
        losses.clear()
        step.forward_backward()
        if number == 0:
            seen["loss"] = torch.stack(losses).mean() if len(losses) > 1 else losses[0]
            seen |= {
                f"gradient of {n}": _copy(p.grad)
                for n, p in step.model.named_parameters()
                if p.grad is not None
            }
            seen |= {f"buffer {n}": _copy(b) for n, b in step.model.named_buffers()}
            seen["random state"] = torch.get_rng_state()
        step.optimizer_step()
    seen |= {f"{n} after {STEPS} steps": _copy(p) for n, p in step.model.named_parameters()}
    seen |= {f"buffer {n} after {STEPS} steps": _copy(b) for n, b in step.model.named_buffers()}
    return seen


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return dense.clone()


def _same_bits(a: torch.Tensor, b: torch.Tensor | None) -> bool:
    """Equal bit for bit: a NaN equals the same NaN, and 0.0 differs from -0.0 only in a way nothing sees."""
    if b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or (
        a.is_floating_point() and torch.equal(a.isnan(), b.isnan()) and _equal_numbers(a, b)
    )


def _equal_numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def _relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """Distance of two tensors in parts of the first one's length; infinite for what cannot be compared."""
    if a.shape != b.shape or not a.is_floating_point():
        return float("inf")
    exact, other = a.double(), b.double()
    length = torch.linalg.vector_norm(exact).item()
    return torch.linalg.vector_norm(exact - other).item() / length if length > 0 else float("inf")


def _tolerance(seen: Mapping[str, torch.Tensor]) -> float:
    low = any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in seen.values())
    return TOLERANCES["low" if low else "fp32"]


def _scale_for(workload: Workload, techniques: Sequence[Settings]) -> _Scale:
    """The largest form of the workload that the host can hold twice."""
    if takes_size(workload):
        return _Scale(text="the workload's small form", size="small")
    with torch.device("meta"):
        model = workload.model()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if parameters * 16 < _available_bytes() / 2:
        return _Scale(text=f"the whole model, batch cut to {SAMPLES}", samples=SAMPLES)
    keep = _one_of_each(model, techniques)
    kept = ", ".join(keep)
    return _Scale(text=f"one block of each kind ({kept}), batch cut to {SAMPLES}", samples=SAMPLES, keep=keep)


def _available_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def _one_of_each(model: torch.nn.Module, techniques: Sequence[Settings]) -> dict[str, str]:
    """The first block of each chain for each way in which the plan treats its blocks, and the name it has when alone."""
    treated = _treatments(techniques)
    keep: dict[str, str] = {}
    for chain in find_block_chains(model):
        ways: set[str] = set()
        for name in chain.names:
            way = repr(treated.get(name))
            if way not in ways:
                keep[name] = f"{name.rpartition('.')[0]}.{len(ways)}"
                ways.add(way)
    return keep


def _treatments(techniques: Sequence[Settings]) -> dict[str, Any]:
    return {name: saves for settings in techniques for name, saves in (settings.get("blocks") or {}).items()}


def _scale_down(step: TrainingStep, scale: _Scale) -> None:
    """Cuts the batch, and all blocks but the kept ones out of their containers."""
    if scale.samples is not None:
        step.batch = tree_map(
            lambda leaf: leaf[: scale.samples] if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf,
            step.batch,
        )
    if scale.keep is None:
        return
    for chain in find_block_chains(step.model):
        container = step.model.get_submodule(chain.names[0].rpartition(".")[0])
        if not isinstance(container, torch.nn.ModuleList | torch.nn.Sequential):
            raise TypeError(
                f"its blocks lie in a {type(container).__name__}, which cannot be cut, and the whole model needs "
                f"{format_bytes(16 * sum(p.numel() for p in step.model.parameters()))}: let the factories take size='small'"
            )
        for number in reversed(range(len(chain.names))):
            if chain.names[number] not in scale.keep:
                del container[int(chain.names[number].rpartition(".")[2])]
    left = set(step.model.parameters())
    for group in step.optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter in left]


def _renamed(techniques: Sequence[Settings], scale: _Scale) -> tuple[Settings, ...]:
    """The settings for the model that is left when only some blocks stay."""
    if scale.keep is None:
        return tuple(techniques)
    keep = scale.keep
    return tuple(
        {**settings, "blocks": {keep[n]: saves for n, saves in settings["blocks"].items() if n in keep}}
        if settings.get("blocks")
        else settings
        for settings in techniques
    )
