"""Makes meta tensors run the operators that a CUDA GPU would run.

Most operators are the same on every device. Where PyTorch asks "is this CUDA?" and goes another way, kernels
of our own on the meta device go CUDA's way: attention, dropout, RMS norm, batch norm, autocast, the
optimizers' foreach and fused forms. Values do not exist, so reads of them (``.item()``, ``if mask.all():``)
get a plausible answer, and are noted.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx.experimental._config

from memfit.capture.cuda_attention import attention
from memfit.capture.cuda_autocast import cuda_autocast
from memfit.capture.cuda_recurrent import backward, forward, recurrent

aten = torch.ops.aten

NoteRead = Callable[[str, str], None]
"""``note_read(op, answer)``: a value was read that does not exist, and what was answered."""


@dataclass
class Shim:
    """What the shim is for, and what it met.

    Attributes:
        capability: compute capability of the GPU that is imitated.
        note_read: told of each read of a value.
        met: names of things that were run in another form than CUDA's (see `memfit.capture.portable`).
    """

    capability: tuple[int, int]
    note_read: NoteRead = lambda op, answer: None
    met: dict[str, int] = field(default_factory=dict)

    def approximate(self, what: str) -> None:
        """Note something that is not modelled exactly."""
        self.met[what] = self.met.get(what, 0) + 1


@contextlib.contextmanager
def cuda_operators(capability: tuple[int, int], *, note_read: NoteRead | None = None) -> Iterator[Shim]:
    """While entered, meta tensors are treated as a GPU of this compute capability treats its own."""
    shim = Shim(capability=capability, note_read=note_read or (lambda op, answer: None))
    with contextlib.ExitStack() as stack:
        stack.enter_context(cuda_autocast())
        library = torch.library.Library("aten", "IMPL")
        stack.callback(library._destroy)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            _register(library, shim)
        for holder, name, replacement in _replacements(shim):
            stack.callback(setattr, holder, name, getattr(holder, name))
            setattr(holder, name, replacement)
        yield shim


def _register(library: torch.library.Library, shim: Shim) -> None:
    composites = {
        "scaled_dot_product_attention": _attention_kernel(shim),
        "dropout": _dropout,
        "rms_norm": _rms_norm,
        "batch_norm": _batch_norm,
    }
    registry: Any = library.m
    for name, kernel in composites.items():
        # The Python check against Meta kernels for composite operators protects from just what is meant here.
        for key in ("AutogradMeta", "Meta"):
            registry.impl(name, key, kernel, False)
    reads = {
        "_local_scalar_dense": _read_scalar(shim),
        "equal": _read_equal(shim),
        "is_nonzero": _read_truth(shim),
    }
    kernels = {"_grouped_mm": _grouped_mm, "_cudnn_rnn": forward, "_cudnn_rnn_backward": backward}
    for name, kernel in {**reads, **kernels}.items():
        registry.impl(name, "Meta", kernel, False)


def _attention_kernel(shim: Shim) -> Callable[..., torch.Tensor]:
    def kernel(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        return attention(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            capability=shim.capability,
        )

    return kernel


def _dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """CUDA's has a boolean mask; elsewhere it is a mask of the input's type."""
    if p == 0 or not train or tensor.numel() == 0:
        return tensor
    if p == 1:
        return tensor * torch.zeros((), dtype=tensor.dtype, device=tensor.device)
    dropped: torch.Tensor = torch.native_dropout(tensor, p, train)[0]
    return dropped


def _rms_norm(
    tensor: torch.Tensor,
    normalized_shape: list[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """CUDA has one kernel for it, which keeps its input and a float32 factor for each row."""
    normed: torch.Tensor = _FusedRmsNorm.apply(tensor, len(normalized_shape), weight)
    return normed


class _FusedRmsNorm(torch.autograd.Function):
    """What CUDA's kernel keeps and makes. On meta tensors PyTorch knows the operator by its parts only."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dims: int, weight: torch.Tensor | None) -> torch.Tensor:
        normed = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        rows = (*tensor.shape[: tensor.dim() - dims], *[1] * dims)
        factor = torch.empty(
            rows, dtype=torch.promote_types(tensor.dtype, torch.float32), device=tensor.device
        )
        ctx.save_for_backward(tensor, weight, factor)
        return normed

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor | None]:
        tensor, weight, _ = ctx.saved_tensors
        return torch.empty_like(tensor), None, None if weight is None else torch.empty_like(weight)


def _batch_norm(
    tensor: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> torch.Tensor:
    """cuDNN's where PyTorch would take it, PyTorch's own elsewhere."""
    normed: torch.Tensor
    if _cudnn_can_normalize(tensor, weight, bias, running_mean, running_var, training, eps, cudnn_enabled):
        normed = aten.cudnn_batch_norm(
            tensor, weight, bias, running_mean, running_var, training, momentum, eps
        )[0]
    else:
        normed = aten.native_batch_norm(
            tensor, weight, bias, running_mean, running_var, training, momentum, eps
        )[0]
    return normed


def _cudnn_can_normalize(
    tensor: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    eps: float,
    enabled: bool,
) -> bool:
    if not enabled or weight is None or bias is None or tensor.numel() == 0 or eps < 1e-5:
        return False
    if (
        tensor.dtype is not torch.float16
        and weight.dtype is not tensor.dtype
        and tensor.dtype is not torch.bfloat16
    ):
        return False
    has_statistics = running_mean is not None and running_var is not None
    if not training and not has_statistics:
        return False
    if tensor.dim() == 2:
        return not training and tensor.shape[0] <= 262136 or training and tensor.shape[0] <= 131070
    return tensor.shape[0] <= 880801


def _grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Products of groups, as experts have them; PyTorch's own form for meta tensors refuses float32, which
    CUDA takes. Rows are padded to 16 bytes (``create_grouped_gemm_output_tensor`` in ATen)."""
    dtype = out_dtype or a.dtype
    rows, columns = a.shape[-2], b.shape[-1]
    aligned = 16 // dtype.itemsize
    padded = -(-columns // aligned) * aligned
    if a.dim() != b.dim():
        return torch.empty_strided((rows, columns), (padded, 1), dtype=dtype, device="meta")
    groups = a.shape[0] if a.dim() == 3 or offs is None else offs.shape[0]
    shape, strides = (groups, rows, columns), (rows * padded, padded, 1)
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _read_scalar(shim: Shim) -> Callable[[torch.Tensor], Any]:
    def read(tensor: torch.Tensor) -> Any:
        answer = True if tensor.dtype is torch.bool else 1.0 if tensor.is_floating_point() else 1
        shim.note_read("aten._local_scalar_dense", repr(answer))
        return answer

    return read


def _read_truth(shim: Shim) -> Callable[[torch.Tensor], bool]:
    def read(tensor: torch.Tensor) -> bool:
        shim.note_read("aten.is_nonzero", "True")
        return True

    return read


def _read_equal(shim: Shim) -> Callable[[torch.Tensor, torch.Tensor], bool]:
    def read(tensor: torch.Tensor, other: torch.Tensor) -> bool:
        answer = tensor.shape == other.shape
        shim.note_read("aten.equal", repr(answer))
        return answer

    return read


def _replacements(shim: Shim) -> Iterator[tuple[Any, str, Any]]:
    """Questions of PyTorch's Python code whose answer depends on the device."""
    from torch.optim import adam, adamw, optimizer, sgd

    foreach = optimizer._get_foreach_kernels_supported_devices  # type: ignore[attr-defined]
    fused = optimizer._get_fused_kernels_supported_devices  # type: ignore[attr-defined]
    for module in (optimizer, adam, adamw, sgd):
        if hasattr(module, "_get_foreach_kernels_supported_devices"):
            yield module, "_get_foreach_kernels_supported_devices", lambda: [*foreach(), "meta"]
        if hasattr(module, "_get_fused_kernels_supported_devices"):
            yield module, "_get_fused_kernels_supported_devices", lambda: [*fused(), "meta"]
    yield torch.amp.GradScaler, "_maybe_opt_step", _step_as_if_finite
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        yield torch._VF, name, recurrent(name, getattr(torch._VF, name), shim.approximate)
    yield torch.fx.experimental._config, "meta_nonzero_assume_all_nonzero", True


def _step_as_if_finite(
    scaler: Any, optimizer: torch.optim.Optimizer, state: Any, *args: Any, **kwargs: Any
) -> Any:
    """Gradients without values count as finite: the step is taken."""
    return optimizer.step(*args, **kwargs)
