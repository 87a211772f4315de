"""Recurrent networks as cuDNN runs them: one operator with a buffer for the backward pass, on meta tensors.

What PyTorch allocates around the call follows ``aten/src/ATen/native/cudnn/RNN.cpp``. The sizes of cuDNN's
own two buffers are not published: they are the rule that the made-up GPU has too (`dryrun/native/rnn.c`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memfit.core.devices import GPU

aten = torch.ops.aten

_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
_GATES = (1, 1, 4, 3)
_DROPOUT_BYTES_PER_SM = 1 << 16
APPROXIMATE = "packed sequences in recurrent networks run cell by cell here, and in one cuDNN kernel on a GPU"
"""What is not modelled."""


def recurrent(
    name: str, original: Callable[..., Any], approximate: Callable[[str], None]
) -> Callable[..., Any]:
    """``torch._VF.lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu`` for meta tensors, by cuDNN's operator."""
    mode = _MODES[name]

    def run(*args: Any, **kwargs: Any) -> Any:
        source = args[0]
        packed = kwargs or not isinstance(args[3], bool)  # which has its weights there
        if packed or source.device.type != "meta" or not torch.backends.cudnn.enabled:
            approximate(APPROXIMATE)
            return original(*args, **kwargs)
        source, state, weights, has_biases, layers, dropout, train, bidirectional, batch_first = args
        hx, cx = state if mode == _MODES["lstm"] else (state, None)
        projected = hx.shape[-1] if cx is not None and hx.shape[-1] != cx.shape[-1] else 0
        hidden = hx.shape[-1] if cx is None else cx.shape[-1]
        out, hy, cy, *_ = aten._cudnn_rnn(
            source,
            weights,
            4 if has_biases else 2,
            None,
            hx,
            cx,
            mode,
            hidden,
            projected,
            layers,
            batch_first,
            dropout,
            train,
            bidirectional,
            [],
            None,
        )
        return (out, hy) if cx is None else (out, hy, cy)

    return run


def buffers(args: Sequence[Any]) -> tuple[int, int]:
    """Bytes of cuDNN's workspace and of its reserve, for the arguments from ``mode`` on and the input."""
    source, mode, hidden, projected, layers, bidirectional = args
    directions = 2 if bidirectional else 1
    tokens, element = source.shape[0] * source.shape[1], source.element_size()
    gates = _GATES[mode]
    kept = tokens * hidden * layers * directions * (gates + 1)
    between = tokens * (projected or hidden) * directions * (layers - 1)
    return tokens * hidden * directions * gates * element, (kept + between) * element


def forward(
    source: Tensor,
    weight: Sequence[Tensor],
    weight_stride0: int,
    weight_buf: Tensor | None,
    hx: Tensor,
    cx: Tensor | None,
    mode: int,
    hidden_size: int,
    proj_size: int,
    num_layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: Sequence[int],
    dropout_state: Tensor | None,
) -> tuple[Tensor, ...]:
    """``aten._cudnn_rnn`` for meta tensors."""
    steps_first = source.transpose(0, 1) if batch_first else source
    width = (proj_size or hidden_size) * (2 if bidirectional else 1)
    out = source.new_empty((*steps_first.shape[:2], width))
    _, reserve = buffers((source, mode, hidden_size, proj_size, num_layers, bidirectional))
    return (
        out.transpose(0, 1) if batch_first else out,
        torch.empty_like(hx),
        source.new_empty(0) if cx is None else torch.empty_like(cx),
        source.new_empty(reserve if train else 0, dtype=torch.uint8),
        source.new_empty(0),
    )


def backward(
    source: Tensor,
    weight: Sequence[Tensor],
    weight_stride0: int,
    weight_buf: Tensor,
    hx: Tensor,
    cx: Any,
    *rest: Any,
) -> tuple[Any, ...]:
    """``aten._cudnn_rnn_backward`` for meta tensors: the weights' gradients are parts of one buffer."""
    batch_first = rest[8]
    shape = source.transpose(0, 1).shape if batch_first else source.shape
    gradient = source.new_empty(shape)
    flat = source.new_empty(sum(one.numel() for one in weight))
    parts = flat.split([one.numel() for one in weight])
    return (
        gradient.transpose(0, 1) if batch_first else gradient,
        torch.empty_like(hx),
        source.new_empty(0) if cx is None else torch.empty_like(cx),
        [part.view_as(one) for part, one in zip(parts, weight, strict=True)],
    )


def _size(tensor: Any) -> int:
    return tensor.numel() * tensor.element_size() if isinstance(tensor, Tensor) else 0


def forward_steps(gpu: GPU, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Iterator[int | None]:
    """Beside the results: the input with its steps first, and cuDNN's workspace (before the reserve)."""
    source, mode, hidden, projected, layers, batch_first, bidirectional = (
        args[i] for i in (0, 6, 7, 8, 9, 10, 13)
    )
    copies = _copies((source,), batch_first)
    held = [_size(one) for one in out[:3]]  # where the first results will be
    workspace, _ = buffers((source, mode, hidden, projected, layers, bidirectional))
    yield from (*copies, *held, workspace)
    yield from (~(len(copies) + number) for number in reversed(range(3)))
    yield None


def backward_steps(
    gpu: GPU, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> Iterator[int | None]:
    """Zeros for gradients of states that nothing used; then inputs, their gradients and a workspace for the
    gradients of the data, and, when those are gone, an input and a workspace for those of the weights."""
    source, hx, cx, grad_output, grad_hy, grad_cy = (args[i] for i in (0, 4, 5, 7, 8, 9))
    workspace, _ = buffers((source, *(args[i] for i in (10, 11, 12, 13, 17))))
    zeros = [
        _size(state) for given, state in ((grad_hy, hx), (grad_cy, cx)) if given is None and state is not None
    ]
    copies = _copies((source, grad_output), args[14])
    held = [_size(one) for one in out[:3]]  # where the gradients of the data will be
    before, after = len(zeros), len(zeros) + len(copies)
    yield from (*zeros, *copies, *held, workspace)
    yield ~(after + 3)
    yield from (~(before + number) for number in reversed(range(len(copies))))
    yield from copies[:1]
    yield from (~(after + number) for number in reversed(range(3)))
    yield None
    yield workspace


def _copies(sources: Sequence[Tensor | None], batch_first: bool) -> list[int]:
    """Bytes of the tensors that are copied so that their steps come first."""
    found = [one for one in sources if one is not None]
    return [_size(one) for one in found if not (one.transpose(0, 1) if batch_first else one).is_contiguous()]


def dropout_state_bytes(gpu: GPU, args: Sequence[Any]) -> int:
    """What cuDNN keeps for random numbers once a network with dropout has been trained."""
    dropout, train = args[11:13]
    return gpu.sm_count * _DROPOUT_BYTES_PER_SM if dropout and train else 0
