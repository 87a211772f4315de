"""The forward that asks for an attention kernel while it runs; see `memfit.techniques.attention_backend`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from memfit.techniques.replaced_forward import ReplacedForward

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


class AttentionForward(ReplacedForward):
    """Runs a module with one attention kernel allowed before ``math``, or alone."""

    def __init__(
        self,
        module: nn.Module,
        previous: Callable[..., Any] | None = None,
        backend: str = "flash",
        fallback: bool = True,
        pad_heads_to: int | None = None,
    ) -> None:
        super().__init__(module, previous)
        self.backend, self.fallback, self.pad_heads_to = backend, fallback, pad_heads_to

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._module(), self._previous, self.backend, self.fallback, self.pad_heads_to)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        chosen = [_BACKENDS[self.backend], *([SDPBackend.MATH] if self.fallback else [])]
        with sdpa_kernel(chosen), self._padding():
            return self.original()(*args, **kwargs)

    @contextlib.contextmanager
    def _padding(self) -> Iterator[None]:
        if self.pad_heads_to is None:
            yield
            return
        with _PaddedHeads(self.pad_heads_to):
            yield


class _PaddedHeads(TorchFunctionMode):
    """Calls attention with heads of a multiple of ``multiple``."""

    def __init__(self, multiple: int) -> None:
        super().__init__()
        self._multiple = multiple

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        width, out = int(given["query"].shape[-1]), int(given["value"].shape[-1])
        if given.get("scale") is None:
            given["scale"] = width**-0.5
        for name in ("query", "key", "value"):
            given[name] = _padded(given[name], self._multiple)
        result: Tensor = func(**given)
        return result[..., :out]


def _padded(heads: Tensor, multiple: int) -> Tensor:
    missing = -heads.shape[-1] % multiple
    return F.pad(heads, (0, missing)) if missing else heads


def kernels_that_run(model: nn.Module, *args: Any, **kwargs: Any) -> set[str]:
    """Names of the attention operators that a forward of ``model`` runs, without their namespace.

    Examples:
        >>> import torch
        >>> layer = nn.TransformerEncoderLayer(16, 2, batch_first=True)
        >>> kernels_that_run(layer, torch.zeros(1, 3, 16))
        {'_safe_softmax'}
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: set[str] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.name().partition("::")[2].partition(".")[0]
            if "attention" in name or name in ("_softmax", "_safe_softmax"):
                seen.add(name)
            return func(*args, **(kwargs or {}))

    with Watch():
        model(*args, **kwargs)
    return seen
