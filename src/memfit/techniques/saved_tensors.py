"""What autograd saves inside chosen blocks, kept in another form until the backward pass asks for it.

A `Keeper` says in which form (compressed, in host memory, on disk). This file sees to what all of them need:
each storage is kept once, however many tensors share it; views are rebuilt with their strides; parameters,
small tensors and what is no plain tensor are left alone; and a tensor that is left alone may not be changed
in place before the backward pass, as without the technique.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.multiprocessing.reductions import StorageWeakRef

from memfit.techniques.base import Undo
from memfit.techniques.replaced_forward import ReplacedForward, set_forwards

_WIDEST_STORAGE = 16
"""A storage this many times larger than the tensor that is saved of it stays as it is."""
_DEVICES = ("cpu", "cuda", "meta")

Place = tuple[str, int]
"""A block's name and the number of the storage among those that a call of it keeps: the same in each step."""


class Kept(Protocol):
    """The contents of one storage, elsewhere or otherwise."""

    def flat(self) -> Tensor:
        """The contents again, one-dimensional, on the device they came from."""


class Keeper(Protocol):
    """A way of keeping contents."""

    min_elements: int

    def keep(self, flat: Tensor, place: Place) -> Kept | None:
        """Takes over a storage's contents; ``None`` leaves them as they are."""


class AsItIs:
    """A saved tensor that is left alone. PyTorch does not check these for changes: so done here."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, tensor._version

    def tensor(self) -> Tensor:
        """It, unchanged. RuntimeError as PyTorch's where it was changed."""
        if self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: a {self._tensor.dtype} of shape {list(self._tensor.shape)} is at version "
                f"{self._tensor._version}; expected version {self._version} instead"
            )
        return self._tensor


class _Storage:
    """One storage that is kept, and its contents while somebody in the backward pass uses them."""

    def __init__(self, source: StorageWeakRef, kept: Kept) -> None:
        self.source = source
        self._kept = kept
        self._again: weakref.ref[Tensor] | None = None

    def flat(self) -> Tensor:
        again = self._again() if self._again is not None else None
        if again is None:
            with torch.no_grad():
                again = self._kept.flat()
            self._again = weakref.ref(again)
        return again


class _View:
    """A saved tensor: where it lies in its storage."""

    def __init__(self, storage: _Storage, tensor: Tensor) -> None:
        self._storage = storage
        self._geometry = (tensor.size(), tensor.stride(), tensor.storage_offset())

    def tensor(self) -> Tensor:
        flat = self._storage.flat()
        with torch.no_grad():
            view = flat.as_strided(*self._geometry)
        view._memfit_flat = flat  # type: ignore[attr-defined]  # lives as long as its view, for the next one
        return view


class _Part:
    """A saved tensor whose own elements alone were kept: see `_is_untracked_part`."""

    def __init__(self, storage: _Storage, tensor: Tensor) -> None:
        self._storage = storage
        self._size, self._stride = tensor.size(), tensor.stride()

    def tensor(self) -> Tensor:
        flat = self._storage.flat()
        with torch.no_grad():
            part = torch.empty_strided(self._size, self._stride, dtype=flat.dtype, device=flat.device)
            return part.copy_(flat.view(self._size))


class SavedTensors:
    """The hooks of one call of a block."""

    def __init__(self, keeper: Keeper, name: str, own: Iterable[Tensor], known: _Known) -> None:
        self._keeper, self._name, self._known = keeper, name, known
        self._count = 0
        own = list(own)
        self._own = {tensor.untyped_storage()._cdata for tensor in own}
        self._casts = {tuple(t.shape) for t in own} | {tuple(t.shape)[::-1] for t in own if t.dim() == 2}

    def pack(self, tensor: Tensor) -> AsItIs | _View | _Part:
        """What autograd keeps in place of ``tensor``."""
        if not self._can_be_kept(tensor):
            return AsItIs(tensor)
        storage = tensor.untyped_storage()
        alone = _is_untracked_part(tensor)
        part = (tensor.storage_offset(), tensor.size(), tensor.stride()) if alone else None
        key = (storage._cdata, tensor._version, tensor.dtype, part)
        kept = self._known.get(key)
        if kept is None or kept.source.expired():
            place, self._count = (self._name, self._count), self._count + 1
            contents = self._keeper.keep(_elements(tensor) if alone else _whole(tensor), place)
            if contents is None:
                return AsItIs(tensor)
            kept = self._known[key] = _Storage(StorageWeakRef(storage), contents)
        return _Part(kept, tensor) if alone else _View(kept, tensor)

    @staticmethod
    def unpack(saved: AsItIs | _View | _Part) -> Tensor:
        """The tensor again."""
        return saved.tensor()

    def _can_be_kept(self, tensor: Tensor) -> bool:
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
        plain = plain and tensor.device.type in _DEVICES and not tensor.is_quantized
        if not plain or tensor.numel() < self._keeper.min_elements or tensor.is_conj() or tensor.is_neg():
            return False
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return False
        storage = tensor.untyped_storage()
        if storage.nbytes() > _WIDEST_STORAGE * tensor.nbytes or storage.nbytes() % tensor.itemsize:
            return False
        return storage._cdata not in self._own and not self._is_cast_weight(tensor)

    def _is_cast_weight(self, tensor: Tensor) -> bool:
        """Autocast keeps the low-precision copies of weights anyway: known by their shapes and type."""
        kind = tensor.device.type
        if kind == "meta" or not torch.is_autocast_enabled(kind):
            return False
        return tensor.dtype == torch.get_autocast_dtype(kind) and tuple(tensor.shape) in self._casts


_Known = weakref.WeakValueDictionary[tuple[int, int, torch.dtype, Any], _Storage]


def _is_untracked_part(tensor: Tensor) -> bool:
    """A part of a storage with a count of changes of its own, as ``unsafe_chunk`` gives (the gates of GRU and
    LSTM, which are then computed in place one by one): its version says nothing about the other parts."""
    return tensor._base is None and tensor.nbytes < tensor.untyped_storage().nbytes()


def _elements(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.detach().contiguous().view(-1)


def _whole(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    numel = storage.nbytes() // tensor.itemsize
    with torch.no_grad():
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(storage, 0, (numel,), (1,))


class SavingForward(ReplacedForward):
    """The forward of a block whose saved tensors a keeper keeps: set on the instance, as checkpointing's is.

    Args:
        block: the module whose ``forward`` this replaces; held weakly.
        name: of the block.
        keeper: shared by all blocks of a model.
        previous: a ``forward`` that was set on the instance before, if any.
    """

    def __init__(
        self, block: nn.Module, name: str, keeper: Keeper, previous: Callable[..., Any] | None = None
    ) -> None:
        super().__init__(block, previous)
        self.name = name
        self.keeper = keeper
        self._known: _Known = weakref.WeakValueDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        return SavingForward, (self._module(), self.name, self.keeper, self.previous)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        original = self.original()
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return original(*args, **kwargs)
        return self._hooked(original, args, kwargs)

    @_disable_dynamo
    def _hooked(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if is_recomputed():
            return original(*args, **kwargs)
        block = self._module()
        assert block is not None, "a forward outlived its block"
        own = [*block.parameters(), *block.buffers()]
        hooks = SavedTensors(self.keeper, self.name, own, self._known)
        with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
            return original(*args, **kwargs)


def is_recomputed() -> bool:
    """Within a checkpointed region, which saves nothing and recomputes: nothing to keep."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def keep_in_blocks(blocks: Iterable[tuple[str, nn.Module]], keeper: Keeper, technique: str) -> Undo:
    """Lets ``keeper`` keep what ``blocks`` save; gives back what takes that back."""
    return set_forwards(
        ((block, SavingForward(block, name, keeper, vars(block).get("forward"))) for name, block in blocks),
        technique,
    )
