"""Gradients in fewer bytes: between the ranks of DistributedDataParallel, and while they are added up.

What a lossy form leaves out is not lost: it is kept on the rank and added to the next gradient (error
feedback; Karimireddy et al. 2019, arXiv:1901.09847), for top-k, PowerSGD (Vogels et al. 2019,
arXiv:1905.13727) and the accumulator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memfit.core.errors import UsageError
from memfit.techniques.codecs import CODECS
from memfit.techniques.compressed_tensor import CompressedTensor, compressed_by

if TYPE_CHECKING:
    from memfit.techniques.compression import MemoryCompression

Method = Literal["fp16", "bf16", "powersgd", "topk"]


@dataclass(kw_only=True)
class GradientHook:
    """What a communication hook did: the state that DistributedDataParallel hands to it.

    Attributes:
        method: see `MemoryCompression.compress_gradients`.
        bytes_before: of the gradients that were to be exchanged.
        bytes_sent: that this rank gave to the collectives; ``None`` where PyTorch does not tell (PowerSGD).
        errors: of each bucket, what top-k has not sent yet.
    """

    method: Method
    share: float = 0.01
    bytes_before: int = 0
    bytes_sent: int | None = 0
    errors: dict[int, Tensor] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """Bytes sent / bytes before; ``None`` when not known."""
        if self.bytes_sent is None or not self.bytes_before:
            return None
        return self.bytes_sent / self.bytes_before

    def count(self, before: Tensor, *sent: Tensor) -> None:
        """Adds up one bucket."""
        self.bytes_before += before.nbytes
        if self.bytes_sent is not None:
            self.bytes_sent += sum(tensor.nbytes for tensor in sent)


def register_hook(model: nn.Module, method: Any, **settings: Any) -> GradientHook:
    """See `MemoryCompression.compress_gradients`."""
    from torch.nn.parallel import DistributedDataParallel

    known = {"powersgd": ("rank", "start_step"), "topk": ("share",)}.get(method, ())
    if method not in get_args(Method):
        raise UsageError(f"gradients: method is one of {', '.join(get_args(Method))}, not {method!r}")
    if unknown := set(settings) - set(known):
        raise UsageError(f"gradients: {method} has no setting {sorted(unknown)[0]!r}")
    if not isinstance(model, DistributedDataParallel):
        raise UsageError(
            f"gradients are compressed on their way between ranks: wrap the {type(model).__name__} in "
            "DistributedDataParallel first"
        )
    share = settings.get("share", 0.01)
    if not isinstance(share, float) or not 0 < share <= 1:
        raise UsageError(f"gradients: share of topk must be above 0 and at most 1.0, not {share!r}")
    hook = GradientHook(method=method, share=share)
    if method == "powersgd":
        _register_powersgd(model, hook, **settings)
    else:
        model.register_comm_hook(hook, _unannotated(_HOOKS[method]))
    return hook


def _register_powersgd(model: Any, hook: GradientHook, rank: int = 2, start_step: int = 10) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

    hook.bytes_sent = None
    state = powersgd.PowerSGDState(
        model.process_group, matrix_approximation_rank=rank, start_powerSGD_iter=max(start_step, 2)
    )

    def run(state: Any, bucket: Any) -> Any:
        hook.count(bucket.buffer())
        return powersgd.powerSGD_hook(state, bucket)

    model.register_comm_hook(state, _unannotated(run))


def _half(hook: GradientHook, bucket: Any) -> Any:
    """float16: the sum of the ranks' shares, each divided first."""
    buffer = bucket.buffer()
    half = buffer.to(torch.float16).div_(dist.get_world_size())
    hook.count(buffer, half)
    future = dist.all_reduce(half, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


def _bfloat16(hook: GradientHook, bucket: Any) -> Any:
    """bfloat16: gathered as bits and added in float32, which also works where bfloat16 cannot be reduced."""
    buffer, ranks = bucket.buffer(), dist.get_world_size()
    bits = buffer.to(torch.bfloat16).view(torch.uint8)  # gloo gathers no 16-bit integers
    gathered = torch.empty(ranks * bits.numel(), dtype=torch.uint8, device=bits.device)
    hook.count(buffer, bits)
    future = _gather(gathered, bits).get_future()

    def mean(_: Any) -> Any:
        values = gathered.view(torch.bfloat16).view(ranks, -1)
        return buffer.copy_(values.to(torch.float32).mean(0))

    return future.then(mean)


def _top_k(hook: GradientHook, bucket: Any) -> Any:
    """The largest values of each rank, with their places; the rest waits for the next step."""
    buffer, ranks = bucket.buffer(), dist.get_world_size()
    waiting = hook.errors.get(bucket.index())
    whole = buffer.clone() if waiting is None or waiting.shape != buffer.shape else buffer + waiting
    count = max(1, int(hook.share * whole.numel()))
    places = whole.abs().topk(count).indices.to(torch.int32)
    values = whole[places]
    hook.errors[bucket.index()] = whole.index_fill_(0, places.long(), 0.0)
    hook.count(buffer, places, values)
    all_places = torch.empty(ranks * count, dtype=places.dtype, device=places.device)
    all_values = torch.empty(ranks * count, dtype=values.dtype, device=values.device)
    first = _gather(all_places, places)
    future = _gather(all_values, values).get_future()

    def mean(_: Any) -> Any:
        first.wait()
        return buffer.zero_().index_add_(0, all_places.long(), all_values / ranks)

    return future.then(mean)


def _unannotated(hook: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """PyTorch compares a hook's annotations with classes of its own; here they are texts."""

    def run(state, bucket):  # type: ignore[no-untyped-def]
        return hook(state, bucket)

    return run


def _gather(out: Tensor, own: Tensor) -> Any:
    """Starts to gather: newer versions of PyTorch have another name for it, and warn of the old one."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(out, own, async_op=True)


_HOOKS: dict[str, Callable[[Any, Any], Any]] = {
    "fp16": _half,
    "bf16": _bfloat16,
    "topk": _top_k,
}


class GradientAccumulator:
    """Adds up gradients of several backward passes in compressed form.

    Between the passes no parameter has a ``.grad``: what is held is the compressed sum, and while one
    parameter's is added to, that one decoded. What a lossy codec rounds off is held in 8 bits beside the sum
    and goes into the next one, so that errors do not add up.

    Examples:
        >>> import memfit, torch
        >>> model = torch.nn.Linear(128, 64)
        >>> sums = memfit.MemoryCompression(compression_algorithm="int8").gradient_accumulator(model)
        >>> for piece in torch.ones(32, 128).chunk(4):
        ...     model(piece).mean().backward()
        ...     sums.add()
        >>> sums.finish()  # the sums are in .grad
        >>> model.weight.grad.shape
        torch.Size([64, 128])
    """

    def __init__(self, compression: MemoryCompression, model: nn.Module) -> None:
        self._compression = compression
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._sums: dict[int, CompressedTensor] = {}
        self._errors: dict[int, CompressedTensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held now: the sums, and what waits to be added to them."""
        return sum(s.nbytes for s in self._sums.values()) + sum(e.nbytes for e in self._errors.values())

    @torch.no_grad()
    def add(self) -> None:
        """Takes each parameter's ``.grad`` into the sums, and frees it."""
        for number, parameter in enumerate(self._parameters):
            if parameter.grad is None:
                continue
            total = self._whole(number, parameter.grad)
            parameter.grad = None
            flat = total.contiguous().view(-1)
            codec, error = self._compression.codec_for(flat, use="data")
            packed = compressed_by(codec, total)
            self._compression.ledger.add(packed.codec, flat.nbytes, packed.nbytes, error)
            self._sums[number] = packed
            if codec is not None and not codec.lossless and packed.codec == codec.name:
                self._errors[number] = compressed_by(CODECS["int8"], flat - packed.flat())

    @torch.no_grad()
    def finish(self) -> None:
        """Puts the sums into ``.grad``, and starts anew."""
        for number, parameter in enumerate(self._parameters):
            if number in self._sums:
                parameter.grad = self._whole(number, None)
        self._sums.clear()
        self._errors.clear()

    def _whole(self, number: int, gradient: Tensor | None) -> Tensor:
        held = self._sums.get(number)
        if held is None:
            assert gradient is not None
            return gradient
        total = held.tensor()
        if number in self._errors:
            total += self._errors[number].tensor().view(total.shape)
        return total if gradient is None else total.add_(gradient)
