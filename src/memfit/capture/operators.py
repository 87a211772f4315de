"""What one call of an operator does, read off its schema and operands: FLOPs, bytes, writes, randomness."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from memfit.capture.costs import op_class

aten = torch.ops.aten
Packet = Any
Formula = Callable[..., int]

# PyTorch's registry has no formula for the CPU's attention.
_MISSING_FORMULAS: Mapping[Packet, Formula] = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *rest, **options: sdpa_flop_count(
        q.shape, k.shape, v.shape
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, q, k, v, *rest, **options: (
        sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape)
    ),
}

_MAKES_ONLY = ("empty", "new_empty", "lift_fresh", "_local_scalar_dense", "set_")
_READS_NO_SOURCE = (
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "randint_like",
    "new_zeros",
    "new_ones",
    "new_full",
)
_OVERWRITES = (
    "copy_",
    "zero_",
    "fill_",
    "normal_",
    "uniform_",
    "bernoulli_",
    "random_",
    "_foreach_zero_",
    "_foreach_copy_",
)
# Of the first operand only the rows that the indices name are read.
_READS_ROWS = ("embedding", "index", "index_select", "gather", "nll_loss_forward", "nll_loss2d_forward")


@dataclass(frozen=True)
class OpFacts:
    """What an operator's schema says, the same for every call."""

    name: str
    written: tuple[int | str, ...]  # positions, or names of keyword-only arguments
    drops: int | None  # position of dropout_p
    causal: int | None  # position of is_causal
    seeded: bool
    formula: Formula | None
    own_formula: bool  # takes the arguments alone
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
        own_formula=own is not None,
        makes_only=plain in _MAKES_ONLY or plain.startswith(("empty", "new_empty")),
        reads_no_source=plain in _READS_NO_SOURCE,
        overwrites=plain in _OVERWRITES,
        reads_rows=plain in _READS_ROWS,
    )


class OpCall:
    """One call that has been made: its facts and tensors. Lives no longer than the call's dispatch."""

    __slots__ = ("args", "facts", "kwargs", "operands", "out", "results", "written")

    def __init__(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        self.facts = facts_of(func)
        self.args, self.kwargs, self.out = args, kwargs, out
        self.operands = list(tensors_in((*args, *kwargs.values())))
        self.results = results_of(out)
        self.written = self._written() if self.facts.written else []

    @property
    def is_random(self) -> bool:
        """Whether the call draws from the generator. Attention is tagged so, and draws only with dropout."""
        at = self.facts.drops
        return self.facts.seeded and (at is None or bool(self._argument(at, "dropout_p")))

    @property
    def is_view(self) -> bool:
        """Whether every result is a piece of an operand's memory, and nothing is written."""
        if self.written or not self.results or self.facts.formula is not None:
            return False
        if any(tensor.layout is not torch.strided for tensor in (*self.operands, *self.results)):
            return False
        keys = {tensor.untyped_storage()._cdata for tensor in self.operands}
        return all(tensor.untyped_storage()._cdata in keys for tensor in self.results)

    def work(self) -> OpWork:
        """FLOPs and bytes of the call; a view does none."""
        if self.facts.makes_only or self.is_view:
            return OpWork(0, 1.0, 0, self._dtype())
        flops, share = 0, 1.0
        formula = self.facts.formula
        if formula is not None:
            out = {} if self.facts.own_formula else {"out_val": self.out}
            flops = int(formula(*self.args, **self.kwargs, **out))
            causal = self.facts.causal is not None and self._argument(self.facts.causal, "is_causal")
            share = 0.5 if causal else 1.0
        return OpWork(flops, share, self._bytes_moved(), self._dtype())

    def _written(self) -> list[torch.Tensor]:
        chosen = (self.kwargs.get(at) if isinstance(at, str) else self.args[at] for at in self.facts.written)
        return list(tensors_in(chosen))

    def _bytes_moved(self) -> int:
        """Every operand read once, every result and every operand written in place written once."""
        if self.facts.reads_no_source:
            return sum(map(storage_bytes, self.results))
        written = {id(tensor) for tensor in self.written}
        made = sum(storage_bytes(tensor) for tensor in self.results if id(tensor) not in written)
        if self.facts.reads_rows and self.operands:
            return 2 * made + sum(map(storage_bytes, self.operands[1:]))
        skipped = written if self.facts.overwrites else set[int]()
        read = sum(storage_bytes(tensor) for tensor in self.operands if id(tensor) not in skipped)
        return read + made + sum(map(storage_bytes, self.written))

    def _dtype(self) -> str:
        tensors = [*self.operands, *self.results]
        kinds = (tensor.dtype for tensor in tensors if tensor.is_floating_point())
        dtype = next(kinds, tensors[0].dtype if tensors else torch.float32)
        if dtype is torch.float32 and self.facts.formula is not None and _allows_tf32(self.facts.name):
            return "tf32"
        return str(dtype).removeprefix("torch.")

    def _argument(self, index: int, name: str) -> Any:
        return self.args[index] if index < len(self.args) else self.kwargs.get(name)


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Every tensor in arguments or results: tensors, lists of tensors, and whatever nests them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def results_of(out: Any) -> list[torch.Tensor]:
    """The tensors of an operator's result."""
    return list(tensors_in((out,)))


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


def _allows_tf32(name: str) -> bool:
    """PyTorch's defaults: convolutions may use TF32, matrix products may not."""
    if op_class(name).name == "convolution":
        return bool(torch.backends.cudnn.allow_tf32)
    return op_class(name).name == "gemm" and bool(torch.backends.cuda.matmul.allow_tf32)
