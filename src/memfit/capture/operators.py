"""What one call of an operator does, read off its schema and operands: FLOPs, bytes, storages read and written, randomness."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from memfit.capture.attribution import phase_of
from memfit.capture.costs import op_class, roofline_seconds
from memfit.core.devices import GPU

aten = torch.ops.aten
Packet = Any
Formula = Callable[..., int]

# PyTorch's registry has no formula for the CPU's attention.
_MISSING_FORMULAS: Mapping[Packet, Formula] = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *rest, **options: sdpa_flop_count(q.shape, k.shape, v.shape),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, q, k, v, *rest, **options: sdpa_backward_flop_count(
        grad.shape, q.shape, k.shape, v.shape
    ),
}

_MAKES_ONLY = ("empty", "new_empty", "lift_fresh", "_local_scalar_dense", "set_")
_READS_NO_SOURCE = ("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_zeros", "new_ones", "new_full")
_OVERWRITES = ("copy_", "zero_", "fill_", "normal_", "uniform_", "bernoulli_", "random_", "_foreach_zero_", "_foreach_copy_")
# Of the first operand only the rows that the indices name are read.
_READS_ROWS = ("embedding", "index", "index_select", "gather", "nll_loss_forward", "nll_loss2d_forward")


@dataclass(frozen=True)
class OpFacts:
    """What an operator's schema says, the same for every call."""

    name: str
    written: tuple[int | str, ...]
    drops: int | None
    causal: int | None
    seeded: bool
    formula: Formula | None
    raw_formula: bool
    makes_only: bool
    reads_no_source: bool
    overwrites: bool
    reads_rows: bool


class OpWork(NamedTuple):
    """What one call does: FLOPs, the share of them done, bytes moved, the type computed in."""

    flops: int
    work: float
    bytes_moved: int
    dtype: str


@cache
def facts_of(func: Any) -> OpFacts:
    """The facts of one overload."""
    arguments = list(func._schema.arguments)
    names = [argument.name for argument in arguments]
    packet = func._overloadpacket
    plain = func._schema.name.partition("::")[2]
    own = _MISSING_FORMULAS.get(packet)
    return OpFacts(
        name=str(func),
        written=tuple(
            argument.name if argument.kwarg_only else index
            for index, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ),
        drops=names.index("dropout_p") if "dropout_p" in names else None,
        causal=names.index("is_causal") if "is_causal" in names else None,
        seeded=torch.Tag.nondeterministic_seeded in func.tags,
        formula=own or flop_registry.get(packet),
        raw_formula=own is not None,
        makes_only=plain in _MAKES_ONLY or plain.startswith(("empty", "new_empty")),
        reads_no_source=plain in _READS_NO_SOURCE,
        overwrites=plain in _OVERWRITES,
        reads_rows=plain in _READS_ROWS,
    )


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Every tensor in arguments or results: tensors, lists of tensors, and whatever nests them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def results_of(out: Any) -> list[torch.Tensor]:
    """The tensors of an operator's result."""
    return [out] if isinstance(out, torch.Tensor) else list(tensors_in(out)) if isinstance(out, list | tuple) else []


def written_by(facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The operands that the call writes in place."""
    if not facts.written:
        return []
    chosen = (args[at] if isinstance(at, int) and at < len(args) else kwargs.get(at) if isinstance(at, str) else None for at in facts.written)
    return list(tensors_in(chosen))


def is_random(facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the call draws from the generator. Attention is tagged so, and draws only with dropout."""
    if facts.drops is None:
        return facts.seeded
    return facts.seeded and bool(_argument(facts.drops, "dropout_p", args, kwargs))


def work_of(
    facts: OpFacts,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    out: Any,
    operands: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    written: Sequence[torch.Tensor],
    is_view: bool,
) -> OpWork:
    """The work of one call. ``operands``, ``results`` and ``written`` are its tensors; views do none."""
    dtype = _dtype(facts, operands, results)
    if is_view or facts.makes_only:
        return OpWork(0, 1.0, 0, dtype)
    flops, work = 0, 1.0
    if facts.formula is not None:
        flops = int(facts.formula(*args, **kwargs) if facts.raw_formula else facts.formula(*args, **kwargs, out_val=out))
        if facts.causal is not None and _argument(facts.causal, "is_causal", args, kwargs):
            work = 0.5
    return OpWork(flops, work, _bytes_moved(facts, operands, results, written), dtype)


def storage_bytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's elements; repeated elements of an expanded tensor count once."""
    if tensor.layout is not torch.strided:
        return sum(storage_bytes(part) for part in sparse_parts(tensor))
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The strided tensors that hold a sparse one."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return ()


def _bytes_moved(
    facts: OpFacts, operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor], written: Sequence[torch.Tensor]
) -> int:
    """Every operand read once, every result and every operand written in place written once."""
    if facts.reads_no_source:
        return sum(map(storage_bytes, results))
    sources = [tensor for tensor in operands if not any(tensor is other for other in written)] if facts.overwrites else operands
    made = [tensor for tensor in results if not any(tensor is other for other in written)]
    if facts.reads_rows and sources:
        return 2 * sum(map(storage_bytes, made)) + sum(map(storage_bytes, sources[1:]))
    return sum(map(storage_bytes, sources)) + sum(map(storage_bytes, made)) + sum(map(storage_bytes, written))


def _dtype(facts: OpFacts, operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> str:
    tensors = [*operands, *results]
    dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), tensors[0].dtype if tensors else torch.float32)
    if dtype is torch.float32 and facts.formula is not None and _allows_tf32(facts.name):
        return "tf32"
    return str(dtype).removeprefix("torch.")


def _allows_tf32(name: str) -> bool:
    """PyTorch's defaults: convolutions may use TF32, matrix products may not."""
    if op_class(name).name == "convolution":
        return bool(torch.backends.cudnn.allow_tf32)
    return op_class(name).name == "gemm" and bool(torch.backends.cuda.matmul.allow_tf32)


def _argument(index: int, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[index] if index < len(args) else kwargs.get(name)


class CostMode(TorchDispatchMode):
    """Sums FLOPs and predicted seconds of the operators that run under it, by phase.

    Example:
        >>> from memfit.core.devices import find_gpu
        >>> costs = CostMode(find_gpu("a100-80gb"), device="cpu")
        >>> with costs:
        ...     _ = torch.ones(64, 64) @ torch.ones(64, 64)
        >>> costs.flops
        524288
    """

    def __init__(self, gpu: GPU, *, device: str = "cuda") -> None:
        super().__init__()
        self.gpu, self.device_type = gpu, device
        self.phase = "forward"
        self.flops_by_phase: dict[str, int] = {}
        self.seconds_by_phase: dict[str, float] = {}
        self.op_count = 0

    @property
    def flops(self) -> int:
        """Floating-point operations so far, recomputation included."""
        return sum(self.flops_by_phase.values())

    @property
    def seconds(self) -> float:
        """Predicted seconds so far."""
        return sum(self.seconds_by_phase.values())

    def on_phase(self, phase: str) -> None:
        """To be called as the step's phases begin; the backward pass and recomputation are recognised in any case."""
        self.phase = phase

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace == "prim":
            return out
        operands = list(tensors_in((*args, *kwargs.values())))
        results = results_of(out)
        if any(tensor.device.type == self.device_type for tensor in (*operands[:1], *results[:1], *operands, *results)):
            self._add(facts_of(func), args, kwargs, out, operands, results)
        return out

    def _add(self, facts: OpFacts, args: Any, kwargs: Any, out: Any, operands: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        written = written_by(facts, args, kwargs)
        is_view = not written and not facts.formula and _all_alias(operands, results)
        flops, work, moved, dtype = work_of(facts, args, kwargs, out, operands, results, written, is_view)
        phase = phase_of(self.phase)
        self.op_count += 1
        self.flops_by_phase[phase] = self.flops_by_phase.get(phase, 0) + flops
        seconds = roofline_seconds(facts.name, round(flops * work), moved, dtype, self.gpu)
        self.seconds_by_phase[phase] = self.seconds_by_phase.get(phase, 0.0) + seconds


def _all_alias(operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> bool:
    """Whether every result shares its storage with an operand."""
    if not results or any(tensor.layout is not torch.strided for tensor in (*operands, *results)):
        return False
    keys = {tensor.untyped_storage()._cdata for tensor in operands}
    return all(tensor.untyped_storage()._cdata in keys for tensor in results)


