"""``torch.autocast("cuda")`` for meta tensors: the same operators cast, with the cache of weights.

PyTorch's autocast acts on tensors whose device is CUDA, and has no form for meta tensors. Here kernels of
our own sit at an autocast key that no device of this process uses, above autograd, where PyTorch's sit;
which operators have one is read from PyTorch's dispatcher, what each does is written down here.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memfit.core.errors import WorkloadFailed

KEY = "AutocastPrivateUse1"
_DISPATCH_KEY = getattr(torch._C.DispatchKey, KEY)
_KEY_SET = torch._C.DispatchKeySet(_DISPATCH_KEY)
DEVICE_TYPES = ("cuda", "meta")
"""Devices for which a user's ``autocast`` means this one."""

LOWER_PRECISION = frozenset(
    """
    _convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr
    matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
    _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_flash_attention scaled_dot_product_attention
    """.split()
)
PROMOTED = frozenset(
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add".split()
)
DTYPE_GIVEN = frozenset(
    """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
    """.split()
)
"""Operators with a ``dtype`` argument: it is set to float32 unless the caller has set it."""
DTYPE_APPENDED = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
HALF = frozenset({"_cudnn_rnn"})
"""Operators that run in float16 whatever autocast's own dtype is."""
REFUSED = frozenset({"binary_cross_entropy"})
"""Every other operator that PyTorch has an autocast kernel for runs in float32."""


@functools.cache
def autocast_operators() -> tuple[str, ...]:
    """Operators (with overload) for which PyTorch has a CUDA autocast kernel: those of this build, and
    those that only builds for CUDA have."""
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    found = (name for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA"))
    return tuple(sorted({name.removeprefix("aten::") for name in found} | HALF))


class AutocastState:
    """What autocast is set to, and the weights that it has cast since its outermost context was entered."""

    def __init__(self) -> None:
        self.enabled = False
        self.dtype = torch.float16
        self.cache_enabled = True
        self.depth = 0
        self._cache: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """``value`` with its floating-point tensors in ``dtype``; a cast parameter is kept."""
        if isinstance(value, (list, tuple)):
            return [self.cast(part, dtype) for part in value]
        if not _eligible(value) or value.dtype is dtype:
            return value
        if not self._keeps(value, dtype):
            return value.to(dtype)
        known = self._cache.get(id(value))
        if known is not None and known[0]() is value:
            return known[1]
        cast = value.to(dtype)
        self._cache[id(value)] = (weakref.ref(value), cast)
        return cast

    def _keeps(self, value: torch.Tensor, dtype: torch.dtype) -> bool:
        kept = dtype is self.dtype and value.dtype is torch.float32 and self.cache_enabled
        kept = kept and not torch.is_inference_mode_enabled()
        return kept and value.requires_grad and value.is_leaf and not value._is_view()

    def set(self, *, enabled: bool, dtype: torch.dtype, cache_enabled: bool) -> None:
        """Switch autocast for this thread."""
        self.enabled, self.dtype, self.cache_enabled = enabled, dtype, cache_enabled
        # PyTorch excludes every autocast key by default, and exclusion wins over inclusion.
        torch._C._dispatch_tls_set_dispatch_key_excluded(_DISPATCH_KEY, not enabled)
        torch._C._dispatch_tls_set_dispatch_key_included(_DISPATCH_KEY, enabled)

    def leave(self) -> None:
        """One context less; the outermost one drops the cast weights."""
        self.depth -= 1
        if self.depth == 0:
            self._cache.clear()


def _eligible(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "meta"
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )


@contextlib.contextmanager
def cuda_autocast() -> Iterator[AutocastState]:
    """While entered, ``torch.autocast`` for ``"cuda"`` or ``"meta"`` acts on meta tensors as CUDA's does on
    CUDA tensors.
    """
    state = AutocastState()
    with contextlib.ExitStack() as stack:
        fallthrough = torch.library.Library("_", "IMPL")
        stack.callback(fallthrough._destroy)
        fallthrough.fallback(torch.library.fallthrough_kernel, KEY)
        library = torch.library.Library("aten", "IMPL")
        stack.callback(library._destroy)
        for name in autocast_operators():
            library.impl(name, _kernel(name, state), KEY)
        for holder, attribute, replacement in _replacements(state):
            stack.callback(setattr, holder, attribute, getattr(holder, attribute))
            setattr(holder, attribute, replacement)
        yield state


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _kernel(name: str, state: AutocastState) -> Callable[..., Any]:
    op = _overload(name)
    if name in REFUSED:
        return _refuse
    if name in LOWER_PRECISION | HALF:
        return _casting(op, state, lambda arguments: torch.float16 if name in HALF else state.dtype)
    if name in PROMOTED:
        return _casting(op, state, functools.partial(_widest, state))
    if name in DTYPE_GIVEN:
        return _giving_dtype(op)
    if name in DTYPE_APPENDED:
        return _appending_dtype(op, _overload(DTYPE_APPENDED[name]))
    return _casting(op, state, lambda arguments: torch.float32)


def _casting(op: Any, state: AutocastState, dtype_of: Callable[[Any], torch.dtype]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEY_SET):
            dtype = dtype_of((*args, *kwargs.values()))
            # Last argument first: so do the compilers of PyTorch's wheels, and it shows in the backward pass.
            named = {name: state.cast(value, dtype) for name, value in reversed(kwargs.items())}
            cast = [state.cast(value, dtype) for value in reversed(args)]
            return op(*reversed(cast), **named)

    return kernel


def _widest(state: AutocastState, arguments: Any) -> torch.dtype:
    for value in arguments:
        values = value if isinstance(value, (list, tuple)) else (value,)
        if any(_eligible(part) and part.dtype is torch.float32 for part in values):
            return torch.float32
    return state.dtype


def _giving_dtype(op: Any) -> Callable[..., Any]:
    position = [argument.name for argument in op._schema.arguments].index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEY_SET):
            given = args[position] if len(args) > position else kwargs.get("dtype")
            if given is None and _eligible(args[0]):
                if len(args) > position:
                    args = (*args[:position], torch.float32, *args[position + 1 :])
                else:
                    kwargs = {**kwargs, "dtype": torch.float32}
            return op(*args, **kwargs)

    return kernel


def _appending_dtype(op: Any, op_with_dtype: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEY_SET):
            if not _eligible(args[0]):
                return op(*args, **kwargs)
            filled = list(args)
            for argument in op._schema.arguments[len(args) :]:
                filled.append(kwargs.get(argument.name, argument.default_value))
            return op_with_dtype(*filled, dtype=torch.float32)

    return kernel


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise WorkloadFailed(
        "binary_cross_entropy is unsafe under autocast (PyTorch refuses it on a GPU): use "
        "binary_cross_entropy_with_logits, which takes the logits"
    )


def _replacements(state: AutocastState) -> Iterator[tuple[Any, str, Any]]:
    """What of PyTorch's face must know of this autocast: the context itself, and the questions that
    libraries ask.
    """
    context: Any = torch.amp.autocast_mode.autocast
    init, enter, leave = context.__init__, context.__enter__, context.__exit__

    def new_init(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
    ) -> None:
        if device_type not in DEVICE_TYPES:
            init(self, device_type, dtype, enabled, cache_enabled)
            return
        self.device, self._enabled = device_type, enabled
        self.fast_dtype = state.dtype if dtype is None else dtype
        self._cache_enabled = torch.is_autocast_cache_enabled() if cache_enabled is None else cache_enabled

    def new_enter(self: Any) -> Any:
        if self.device not in DEVICE_TYPES:
            return enter(self)
        self._before = (state.enabled, state.dtype, state.cache_enabled)
        state.depth += 1
        state.set(enabled=self._enabled, dtype=self.fast_dtype, cache_enabled=self._cache_enabled)
        return self

    def new_exit(self: Any, *exception: Any) -> Any:
        if self.device not in DEVICE_TYPES:
            return leave(self, *exception)
        enabled, dtype, cache_enabled = self._before
        state.set(enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)
        state.leave()
        return False

    yield context, "__init__", new_init
    yield context, "__enter__", new_enter
    yield context, "__exit__", new_exit
    yield from _questions(state)


def _questions(state: AutocastState) -> Iterator[tuple[Any, str, Any]]:
    is_enabled, get_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    is_available = torch.amp.is_autocast_available

    def is_autocast_enabled(device_type: str = "cuda") -> bool:
        return state.enabled if device_type in DEVICE_TYPES else is_enabled(device_type)

    def get_autocast_dtype(device_type: str) -> torch.dtype:
        return state.dtype if device_type in DEVICE_TYPES else get_dtype(device_type)

    def is_autocast_available(device_type: str) -> bool:
        return device_type in DEVICE_TYPES or is_available(device_type)

    for holder in (torch.amp, torch.amp.autocast_mode):
        yield holder, "is_autocast_available", is_autocast_available
    yield torch, "is_autocast_enabled", is_autocast_enabled
    yield torch, "get_autocast_dtype", get_autocast_dtype
    yield torch, "get_autocast_gpu_dtype", lambda: state.dtype
