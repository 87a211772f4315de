"""Memory that CUDA's kernels take beside their results: workspaces that stay, buffers that go.

Sizes are those that PyTorch's own CUDA code asks the allocator for, read off its arithmetic and compared
with what a CUDA build asked for on made-up GPUs. cuDNN's workspaces for convolutions are not among them:
only the library knows those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memfit.capture.cuda_recurrent import backward_steps, dropout_state_bytes, forward_steps
from memfit.core.devices import GPU

aten = torch.ops.aten

HOPPER_WORKSPACE_BYTES = 32 << 20
WORKSPACE_BYTES = 8_519_680
"""cuBLAS's workspace for one thread: what PyTorch gives the library before Hopper, and from Hopper on."""

_MATMULS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "addbmm",
    "addmv",
    "mv",
    "dot",
    "vdot",
    "_int_mm",
    "_scaled_mm",
    "addr",
)
_THREADS_PER_SM = {(7, 5): 1024, (8, 0): 2048, (9, 0): 2048, (10, 0): 2048, (10, 3): 2048}
_OTHER_THREADS_PER_SM = 1536
_WARP = 32
_THREADS_PER_BLOCK = 512
_LOCK_BYTES = 16
_SORT_BYTES, _SCAN_BYTES = 71_167, 1_279  # of CUB; they differ a little from size to size
_MANY_ROWS = 256

RESULTS = None
Step = int | None
"""Bytes to take; ``~i`` to give back the ``i``-th that was taken; or `RESULTS`: the results are made now.
What is not given back goes when the operator ends, the last taken first, as C++ destroys its local variables.
"""


class Temporaries:
    """What each operator takes beside its results, on one GPU, in one process."""

    def __init__(self, gpu: GPU) -> None:
        self._gpu = gpu
        self._workspaces: set[bool] = set()  # of the thread that calls backward(), and of autograd's own
        self._convolutions = 0
        self._has_dropout_state = False

    def steps(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Iterator[Step]:
        """What this call takes and gives back, in order, and when it makes its results."""
        packet = func._overloadpacket
        rule = _RULES.get(packet)
        if rule is None:
            yield RESULTS
            return
        if packet not in _RESULTS_WITHIN:
            yield RESULTS
        yield from rule(self._gpu, args, kwargs, out)

    def workspace_bytes(self, func: Any, args: Sequence[Any], out: Any) -> int:
        """What the library keeps from this call on; 0 except for a thread's first matrix product and for the
        first recurrent network with dropout."""
        if func._overloadpacket is aten._cudnn_rnn and not self._has_dropout_state:
            size_bytes = dropout_state_bytes(self._gpu, args)
            self._has_dropout_state = size_bytes > 0
            return size_bytes
        if func._overloadpacket is aten.convolution and _on_meta(out):
            self._convolutions += 1
        in_autograd_thread = torch._C._current_graph_task_id() != -1
        first = func._overloadpacket in _IS_MATMUL and in_autograd_thread not in self._workspaces
        if not first or not _on_meta(out):
            return 0
        self._workspaces.add(in_autograd_thread)
        return HOPPER_WORKSPACE_BYTES if self._gpu.compute_capability[0] >= 9 else WORKSPACE_BYTES

    def notes(self) -> list[str]:
        """What is known to be missing."""
        if not self._convolutions:
            return []
        return ["cuDNN's workspaces of convolutions count as 0 bytes: only cuDNN knows them"]


def device_results(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Sequence[Any]:
    """The results that are on the device, in the order in which the kernel makes them.

    Attention without dropout makes empty seeds first; with dropout, the efficient kernel's are on the host.
    """
    packet = func._overloadpacket
    if packet is aten.native_dropout:
        return (out[1], out[0])
    if packet is aten._scaled_dot_product_cudnn_attention:
        return (out[6], out[7], *out)
    if packet is not aten._scaled_dot_product_efficient_attention:
        return (out,)
    dropout = args[5] if len(args) > 5 else kwargs.get("dropout_p", 0.0)
    return tuple(out[:2]) if dropout else (*out[2:], *out[:2])


def _on_meta(out: Any) -> bool:
    return isinstance(out, torch.Tensor) and out.device.type == "meta"


def _reduction(gpu: GPU, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Iterator[int]:
    """Sums and means over many rows: partial results of blocks that share an output; semaphores."""
    source = args[0]
    dims = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple, int)) else kwargs.get("dim")
    if _on_meta(out) and source.numel():
        yield from reduction_buffers(source, _dims(dims, source.dim()), gpu)


def _dims(dims: Any, count: int) -> tuple[int, ...]:
    chosen = (dims,) if isinstance(dims, int) else tuple(dims or range(count))
    return tuple(dim % count for dim in chosen) if count else ()


@dataclass
class _Split:
    """How the threads of a reduction share outputs and inputs (the names are those of PyTorch's
    ``ReduceConfig``).
    """

    inputs: int
    step_input: int = 1
    step_output: int = 1

    @property
    def values_per_thread(self) -> int:
        return math.ceil(self.inputs / self.step_input)


def reduction_buffers(source: torch.Tensor, dims: Sequence[int], gpu: GPU) -> Iterator[int]:
    """Bytes of the two global buffers of a reduction of ``source`` over ``dims``; nothing where one block
    does an output.

    Follows ``setReduceConfig`` of PyTorch's ``Reduce.cuh``.
    """
    sizes, strides = source.shape, source.stride()
    kept = [dim for dim in range(source.dim()) if dim not in dims and sizes[dim] > 1]
    reduced = [dim for dim in dims if sizes[dim] > 1]
    outputs = math.prod(sizes[dim] for dim in kept)
    inputs = math.prod(sizes[dim] for dim in reduced)
    if inputs <= 1:
        return
    fastest = min(strides[dim] for dim in reduced)
    along_inputs = not kept or fastest < min(strides[dim] for dim in kept)
    width, height = (inputs, outputs) if along_inputs else (outputs, inputs)
    vector = 1
    if along_inputs:
        width //= 4 if fastest == 1 and not kept and width > 128 else 1
    elif min(strides[dim] for dim in kept) == 1:
        vector = next(size for size in (4, 2, 1) if outputs % size == 0)
        width //= vector
    block_width, block_height = _block(width, height, _THREADS_PER_BLOCK // vector)
    blocks, ctas = _ctas(inputs, outputs // vector, block_width, block_height, along_inputs, gpu)
    if ctas > 1:
        element = 8 if source.dtype is torch.float64 or not source.is_floating_point() else 4
        yield element * outputs * ctas * (1 if along_inputs else block_width * vector)
        yield 4 * blocks


def _block(width: int, height: int, most_threads: int) -> tuple[int, int]:
    across, down = (min(_power_below(size), most_threads) for size in (width, height))
    block_width = min(across, _WARP)
    block_height = min(down, most_threads // block_width)
    return min(across, most_threads // block_height), block_height


def _power_below(size: int) -> int:
    return 1 << (max(size, 1).bit_length() - 1)


def _ctas(
    inputs: int, outputs: int, width: int, height: int, along_inputs: bool, gpu: GPU
) -> tuple[int, int]:
    """Blocks in the grid's first dimension, and how many blocks share one output."""
    split = _Split(inputs=inputs)
    if along_inputs:
        split.step_input *= width
    else:
        split.step_output *= width
    across_warps = split.values_per_thread >= min(height * 16, 256)
    if across_warps:
        split.step_input *= height
    else:
        split.step_output *= height
    blocks = math.ceil(outputs / split.step_output)
    threads_per_sm = _THREADS_PER_SM.get(gpu.compute_capability, _OTHER_THREADS_PER_SM)
    target = gpu.sm_count * (threads_per_sm // (width * height))
    if not across_warps or split.values_per_thread < 256 or blocks > target:
        return blocks, 1
    values = split.values_per_thread
    return blocks, max(min(math.ceil(target / blocks), math.ceil(values / 16)), math.ceil(values / 256))


def _convolution_backward(
    gpu: GPU, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> Iterator[int]:
    """The bias's gradient is a sum over everything but the channels."""
    gradient, mask = args[0], args[-1]
    if out[2] is not None and mask[2]:
        yield from reduction_buffers(gradient, [dim for dim in range(gradient.dim()) if dim != 1], gpu)


def _flash_backward(gpu: GPU, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Iterator[int]:
    """The query's gradient in float32 and a sum for each row; for grouped heads, gradients of all heads'
    keys and values.
    """
    query, key = args[1], args[2]
    batch, heads, length, head = query.shape
    rows = -(-length // 128) * 128
    width = -(-head // 32) * 32 if head <= 128 else -(-head // 64) * 64
    yield 4 * batch * heads * rows
    yield 4 * batch * heads * rows * width
    yield from _expanded_heads(query, key)


def _expanded_heads(query: torch.Tensor, key: torch.Tensor) -> Iterator[int]:
    if key.shape[1] != query.shape[1]:
        for _ in ("key", "value"):
            yield query.shape[0] * key.shape[2] * query.shape[1] * key.shape[3] * query.element_size()


def _cudnn_attention_backward(
    gpu: GPU, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> Iterator[int]:
    """One workspace: the query's gradient in float32 and a sum for each row."""
    batch, heads, length, head = args[1].shape
    yield 4 * batch * heads * length * (head + 1)


def _efficient_backward(gpu: GPU, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Iterator[int]:
    """A sum for each row, and for each block of 64 rows the query's gradient in float32 with its lock.

    In float32 the sums are an operator of their own: a product, its sums, and those in another layout.
    """
    query = args[1]
    batch, heads, length, head = query.shape
    sums = 4 * batch * heads * length
    blocks = batch * heads * math.ceil(length / 64)
    workspace = blocks * (4 * 64 * (-(-head // 64) * 64) + _LOCK_BYTES)
    if query.dtype is torch.float32:
        yield from (sums * args[5].shape[-1], sums, sums, ~1, ~0, workspace, ~2)
    else:
        yield from (sums, workspace, ~0)


def _embedding_backward(gpu: GPU, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Iterator[Step]:
    """More than 3,072 indices are sorted, and each run of equal ones is summed in parts of ten rows."""
    gradient, indices, rows = args[0], args[1], args[2]
    count = indices.numel()
    copies = [nbytes for tensor in (gradient, indices) if (nbytes := _copy_bytes(tensor))]
    yield from copies
    if count <= 3072:
        yield RESULTS
        return
    first, each = len(copies), 8 * count
    yield from (each, each, each, _SORT_BYTES, ~(first + 3), ~(first + 2))  # sorted, their places, a range
    yield RESULTS
    runs = min(count, rows)
    parts = count // 10 + runs
    width = 4 * gradient.shape[-1] if rows >= _MANY_ROWS else 8
    yield from (each, 8, each, _SCAN_BYTES, ~(first + 7), ~(first + 6))
    yield from (8 * runs, 8 * runs, _SCAN_BYTES, ~(first + 10), 8, 8 * parts, width * parts)


def _copy_bytes(tensor: torch.Tensor) -> int:
    """What ``contiguous()`` takes."""
    return 0 if tensor.is_contiguous() else tensor.numel() * tensor.element_size()


def _embedding(gpu: GPU, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Iterator[Step]:
    """Indices that are not contiguous are copied."""
    if copy_bytes := _copy_bytes(args[1]):
        yield copy_bytes
    yield RESULTS


def _cumulative_sum(gpu: GPU, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Iterator[int]:
    """The input in the type of the result."""
    if args[0].dtype is not out.dtype:
        yield out.numel() * out.element_size()


Rule = Callable[[GPU, Sequence[Any], Mapping[str, Any], Any], Iterator[Step]]

_IS_MATMUL = frozenset(getattr(aten, name) for name in _MATMULS)
_RULES: Mapping[Any, Rule] = {
    aten.sum: _reduction,
    aten.mean: _reduction,
    aten.convolution_backward: _convolution_backward,
    aten._scaled_dot_product_flash_attention_backward: _flash_backward,
    aten._scaled_dot_product_cudnn_attention_backward: _cudnn_attention_backward,
    aten._scaled_dot_product_efficient_attention_backward: _efficient_backward,
    aten.embedding: _embedding,
    aten.embedding_dense_backward: _embedding_backward,
    aten.cumsum: _cumulative_sum,
    aten._cudnn_rnn: forward_steps,
    aten._cudnn_rnn_backward: backward_steps,
}
"""Buffers by operator; the others were seen to take none, or some kilobytes."""
_RESULTS_WITHIN = frozenset(
    {aten.embedding, aten.embedding_dense_backward, aten._cudnn_rnn, aten._cudnn_rnn_backward}
)
"""Operators whose rule says when the results are made; those of the others are made first."""
