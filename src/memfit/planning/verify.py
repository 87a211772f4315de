"""Runs plain and planned steps on real values and compares all that training leaves: the proof of a plan's
exactness.

Runs in a child process on the CPU, one thread, seeded; never on the made-up GPU, whose values are not real.
Compared are the loss, every gradient and buffer and the random state after the first step, and every
parameter and buffer after three optimizer steps. The workload is scaled down: its own small form where it has
one; else its batch is cut to two samples when the model fits the host's memory; else one block of each kind
that the plan treats differently is kept. Losses in fp16 are scaled, by a power of two that stays.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.utils._pytree import tree_map

from memfit.capture.step import TrainingStep, batch_takes_size, build_step, takes_size
from memfit.capture.workloads import from_reference
from memfit.core.errors import CannotRunHere
from memfit.core.exactness import Exactness
from memfit.core.units import format_bytes
from memfit.core.workload import Workload
from memfit.planning.figures import Settings, Verified
from memfit.planning.loss_scale import SCALES, scaled, steps_in_backward, with_scale
from memfit.planning.plan import apply_settings, micro_batch_count, sample_count
from memfit.techniques.blocks import find_block_chains

STEPS = 3
SAMPLES = 2
ROOM_SHARE = 0.9
"""Of the host's free memory that may be taken."""
OFFLOADS = ("activation_offload", "parameter_offload")
_GRADIENT, _PARAMETER = "gradient of", "parameter"
TOLERANCES: Mapping[str, float] = {"fp32": 1e-4, "low": 5e-2}
"""Largest relative error of a reordered plan: in fp32, and where bf16 or fp16 takes part (8 and 11 bits of
mantissa)."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How the workload is scaled down: what `build_step` is told, how many samples, and which blocks stay."""

    text: str
    size: str = "full"
    samples: int | None = None
    keep: Mapping[str, str] | None = None


def verify(
    workload: Mapping[str, Any], techniques: Sequence[Settings], exactness: Exactness, seed: int = 0
) -> dict[str, Any]:
    """Compares ``STEPS`` plain and planned steps of the workload behind a reference, on the CPU.

    Returns the JSON form of `Verified`. Never raises for what the workload does: a workload that fails on the
    CPU is reported as not verified, with the reason.
    """
    started = time.perf_counter()
    try:
        verified = compare(from_reference(workload), techniques, exactness, seed)
    except CannotRunHere as problem:
        verified = Verified(passed=None, reason=str(problem))
    except Exception as error:  # whatever the user's code raises: the plan stands, unproven
        first = str(error).strip().split("\n")[0]
        verified = Verified(
            passed=None, reason=f"the step cannot run on the CPU: {type(error).__name__}: {first}"
        )
    return dataclasses.replace(verified, wall_seconds=time.perf_counter() - started).to_json()


def compare(
    workload: Workload, techniques: Sequence[Settings], exactness: Exactness, seed: int = 0
) -> Verified:
    """Runs both and compares. Raises what the workload raises."""
    redraws = _redraws(techniques)
    with one_thread(), without_dropout() if redraws else nullcontext():
        scale = scale_for(workload, techniques)
        plain, planned = _run_both(workload, scale, techniques, seed)
    differences = [name for name in (plain | planned) if not _same_bits(plain.get(name), planned.get(name))]
    error = largest_error(plain, planned) if differences else 0.0
    tolerance = 0.0 if exactness == "exact" else tolerance_of(workload, plain)
    passed: bool | None = not differences or (exactness == "reordered" and error <= tolerance)
    reason = None
    if exactness == "approximate" and differences:
        passed, reason = None, f"approximate by choice: results differ by up to {error:.1g} of their size"
    if exactness == "changes training" and differences:
        passed, reason = (
            None,
            "changes training by choice: something else is trained, nothing to compare with",
        )
    return Verified(
        passed=passed,
        bitwise=not differences,
        device="cpu",
        scale=_scale_text(scale, techniques, redraws),
        steps=STEPS,
        max_relative_error=error,
        tolerance=tolerance,
        differences=tuple(differences[:8]),
        reason=reason,
    )


def _scale_text(scale: Scale, techniques: Sequence[Settings], redraws: str) -> str:
    text = f"{scale.text}, dropout off ({redraws} other masks)" if redraws else scale.text
    moved = tuple(on_the_cpu(techniques)) != tuple(techniques)
    return f"{text}, offloaded to a file in place of host memory" if moved else text


def _redraws(techniques: Sequence[Settings]) -> str:
    """What of a plan draws other dropout masks than the plain step, in words; empty where nothing does."""
    if micro_batch_count(techniques) > 1:
        return "micro-batches draw"
    compiled = [s for s in techniques if s["technique"] == "compiled_partition"]
    fused = any(s.get("backend", "inductor") != "aot_eager" for s in compiled)
    return "compiled code draws" if fused else ""


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread: sums over several may come in another order from run to run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _run_both(
    workload: Workload, scale: Scale, techniques: Sequence[Settings], seed: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """All that is compared of plain and planned steps; losses in fp16 have the largest scale that neither
    overflows with."""
    scales = SCALES[-1:] if steps_in_backward(techniques) else SCALES
    for loss_scale in scales:
        plain, plain_overflowed = _run(workload, scale, (), seed, loss_scale)
        planned, planned_overflowed = _run(workload, scale, techniques, seed, loss_scale)
        if not (plain_overflowed or planned_overflowed):
            break
    return plain, planned


def _run(
    workload: Workload, scale: Scale, techniques: Sequence[Settings], seed: int, loss_scale: float
) -> tuple[dict[str, torch.Tensor], bool]:
    """All that is compared, by name, after running the steps with ``techniques`` applied; and whether a
    scaled gradient overflowed."""
    losses: list[torch.Tensor] = []
    weights: list[float] = []

    def recorded(model: Any, batch: Any) -> Any:
        loss = workload.loss(model, batch)
        losses.append(loss.detach().clone())
        weights.append(float((workload.loss_weight or sample_count)(batch)))
        return loss

    step = build_step(
        dataclasses.replace(workload, loss=recorded),
        device="cpu",
        size="small" if scale.size == "small" else "full",
        seed=seed,
    )
    scale_down(step, scale)
    settings = on_the_cpu(with_scale(renamed_blocks(techniques, scale), loss_scale))
    kept = _kept_gradients(step.model) if steps_in_backward(techniques) else None
    apply_settings(settings, step.model, step.optimizer)
    static = scaled(step, techniques, loss_scale)
    step.micro_batches = min(micro_batch_count(techniques), sample_count(step.batch))
    seen: dict[str, torch.Tensor] = {}
    for number in range(STEPS):
        losses.clear()
        weights.clear()
        step.forward_backward()
        unscaled = {} if static is None else static.unscaled_gradients()
        seen[f"loss of step {number + 1}"] = _mean(losses, weights)
        if number == 0:
            gradients = _gradients(step.model) if static is None else unscaled
            gradients = gradients if kept is None else dict(kept)
            seen |= {f"{_GRADIENT} {n}": gradient for n, gradient in gradients.items()}
            seen |= {f"buffer {n}": _copy(b) for n, b in step.model.named_buffers()}
            seen["random state"] = torch.get_rng_state()
        step.optimizer_step()
    seen |= {f"{_PARAMETER} {n} after {STEPS} steps": _copy(p) for n, p in step.model.named_parameters()}
    seen |= {f"buffer {n} after {STEPS} steps": _copy(b) for n, b in step.model.named_buffers()}
    return seen, static is not None and static.overflowed


def _gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: _copy(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def _kept_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Filled in the backward pass with copies of gradients that are gone after it: the hooks are there before
    those of the optimizer that uses them up."""
    kept: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable[[torch.Tensor], None]:
        def copy(parameter: torch.Tensor) -> None:
            if name not in kept and parameter.grad is not None:
                kept[name] = _copy(parameter.grad)

        return copy

    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(keep(name))
    return kept


def on_the_cpu(techniques: Sequence[Settings]) -> tuple[Settings, ...]:
    """The settings for a model on the CPU: what goes to host memory there goes to a file here, so that
    contents leave and come back for real."""
    return tuple(
        {**settings, "to": "disk"}
        if settings["technique"] in OFFLOADS and settings.get("to", "host") == "host"
        else settings
        for settings in techniques
    )


def _mean(losses: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """The whole batch's loss from those of its micro-batches."""
    if len(losses) == 1:
        return losses[0]
    return sum((loss * weight for loss, weight in zip(losses, weights, strict=True)), torch.zeros(())) / sum(
        weights
    )


@contextmanager
def without_dropout() -> Iterator[None]:
    """Dropout as with probability 0, wherever a model calls it through ``torch.nn.functional``."""
    names = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    attention = functional.scaled_dot_product_attention
    saved = {name: getattr(functional, name) for name in names}

    def same(input: Any, *args: Any, **kwargs: Any) -> Any:
        return input

    def without(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, **kwargs: Any
    ) -> Any:
        return attention(query, key, value, attn_mask, 0.0, **kwargs)

    for name in names:
        setattr(functional, name, same)
    functional.scaled_dot_product_attention = without  # type: ignore[assignment]
    try:
        yield
    finally:
        for name, function in saved.items():
            setattr(functional, name, function)
        functional.scaled_dot_product_attention = attention


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return dense.clone()


def _same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Equal bit for bit: a NaN equals the same NaN, and 0.0 differs from -0.0 only in a way nothing sees."""
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or (
        a.is_floating_point() and torch.equal(a.isnan(), b.isnan()) and _equal_numbers(a, b)
    )


def _equal_numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def largest_error(plain: Mapping[str, torch.Tensor], planned: Mapping[str, torch.Tensor]) -> float:
    """The largest relative error among losses, gradients and buffers, and of all parameters together at the
    end.

    Root mean squares are compared. A gradient that is zero but for rounding (a key's bias in attention) is
    measured against a hundredth of what gradients are like on the whole, and parameters only together, as
    Adam turns any such gradient into a step of full length.
    """
    if plain.keys() != planned.keys():
        return float("inf")
    gradients = [name for name in plain if name.startswith(_GRADIENT)]
    parameters = [name for name in plain if name.startswith(_PARAMETER)]
    others = [
        name for name in plain if name not in {*gradients, *parameters} and plain[name].is_floating_point()
    ]
    least = 0.01 * _size([plain[name] for name in gradients])
    errors = [_error([plain[name]], [planned[name]], least) for name in gradients]
    errors += [_error([plain[name]], [planned[name]], 0.0) for name in others]
    errors.append(_error([plain[name] for name in parameters], [planned[name] for name in parameters], 0.0))
    return max(errors)


def _error(exact: Sequence[torch.Tensor], other: Sequence[torch.Tensor], least: float) -> float:
    """The size of the difference in parts of the size of ``exact``, or of ``least`` where that is more."""
    if any(a.shape != b.shape for a, b in zip(exact, other, strict=True)):
        return float("inf")
    difference = _size([a.double() - b.double() for a, b in zip(exact, other, strict=True)])
    scale = max(_size(exact), least)
    return 0.0 if difference == 0.0 else difference / scale if scale > 0 else float("inf")


def _size(tensors: Sequence[torch.Tensor]) -> float:
    """Root mean square over all elements."""
    count = sum(tensor.numel() for tensor in tensors)
    total = sum(float(tensor.double().square().sum()) for tensor in tensors)
    return (total / count) ** 0.5 if count else 0.0


def tolerance_of(workload: Workload, seen: Mapping[str, torch.Tensor]) -> float:
    """The relative error that another order of sums may make, by the precision that is computed in."""
    low = workload.precision != "fp32" or any(
        tensor.dtype in (torch.bfloat16, torch.float16) for tensor in seen.values()
    )
    return TOLERANCES["low" if low else "fp32"]


def scale_for(workload: Workload, techniques: Sequence[Settings]) -> Scale:
    """The largest form of the workload that the host can hold twice.

    Raises CannotRunHere where it cannot even build the model, which is cut only then.
    """
    if takes_size(workload):
        return Scale(text="the workload's small form", size="small")
    small = batch_takes_size(workload)
    batch: dict[str, Any] = {"size": "small"} if small else {"samples": SAMPLES}
    text = "the batch's small form" if small else f"batch cut to {SAMPLES}"
    with torch.device("meta"):
        model = workload.model()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if parameters * 16 < _available_bytes() / 2:
        return Scale(text=f"the whole model, {text}", **batch)
    keep = _one_of_each(model, techniques)
    _check_room(model, parameters, keep)
    kept = ", ".join(keep)
    return Scale(text=f"one block of each kind ({kept}), {text}", keep=keep, **batch)


def _check_room(model: torch.nn.Module, parameters: int, keep: Mapping[str, str]) -> None:
    """Models are built whole, in fp32 as often as not, and trained with the kept blocks only."""
    cut = (model.get_submodule(n) for chain in find_block_chains(model) for n in chain.names if n not in keep)
    left = parameters - sum(p.numel() for block in cut for p in block.parameters())
    needed, free = max(4 * parameters, 16 * left), _available_bytes()
    if needed > ROOM_SHARE * free:
        raise CannotRunHere(
            f"too large for this host: running even one block of each kind takes {format_bytes(needed)}, and "
            f"{format_bytes(free)} is free; let the factories take size='small', and that form is verified"
        )


def _available_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def _one_of_each(model: torch.nn.Module, techniques: Sequence[Settings]) -> dict[str, str]:
    """The first block of each chain for each way in which the plan treats its blocks, and the name it has
    when alone."""
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
    treated: dict[str, Any] = {}
    for settings in techniques:
        blocks = settings.get("blocks") or {}
        for name in blocks:
            saves = blocks[name] if isinstance(blocks, Mapping) else settings["technique"]
            treated[name] = (*treated.get(name, ()), saves)
    return treated


def scale_down(step: TrainingStep, scale: Scale) -> None:
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
                f"its blocks lie in a {type(container).__name__}, which cannot be cut, and the whole model "
                f"needs {format_bytes(16 * sum(p.numel() for p in step.model.parameters()))}: let the "
                "factories take size='small'"
            )
        for number in reversed(range(len(chain.names))):
            if chain.names[number] not in scale.keep:
                del container[int(chain.names[number].rpartition(".")[2])]
    left = set(step.model.parameters())
    for group in step.optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter in left]


def renamed_blocks(techniques: Sequence[Settings], scale: Scale) -> tuple[Settings, ...]:
    """The settings for the model that is left when only some blocks stay."""
    if scale.keep is None:
        return tuple(techniques)
    keep = scale.keep

    def renamed(blocks: Any) -> Any:
        if isinstance(blocks, Mapping):
            return {keep[name]: saves for name, saves in blocks.items() if name in keep}
        return [keep[name] for name in blocks if name in keep]

    return tuple(
        {**settings, "blocks": renamed(settings["blocks"])} if settings.get("blocks") else settings
        for settings in techniques
    )
