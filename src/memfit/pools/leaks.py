"""Tensors that are kept alive by mistake, by a traceback, a closure or a cycle: who holds how much."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from memfit.core.units import format_bytes
from memfit.pools.reaching import is_tensor, parts_of, tensors_in, variables_of
from memfit.pools.sites import Site

Keeper = Literal["traceback", "closure", "cycle"]
"""How a tensor is kept: by the frames of an exception that somebody still has, by a variable that a function
has taken with it, or by objects that hold each other."""


@dataclass(frozen=True, kw_only=True)
class KeptTensor:
    """A tensor that something holds, perhaps for longer than its user thinks.

    Attributes:
        keeper: by what; see `Keeper`.
        holder: the exception, function or object that holds it, by type and name.
        variable: the way from there to the tensor (``"batch['input']"``).
        site: the line of the frame, or where the function is written; None for a cycle.
        shape, dtype, device: of the tensor.
        size_bytes: of its storage.
        storage: address of the storage's first byte: two finds with one storage keep the same memory.
    """

    keeper: Keeper
    holder: str
    variable: str
    site: Site | None
    shape: tuple[int, ...]
    dtype: str
    device: str
    size_bytes: int
    storage: int

    def __str__(self) -> str:
        where = f" at {self.site}" if self.site else ""
        what = f"{self.dtype}{list(self.shape)} on {self.device}"
        size = format_bytes(self.size_bytes)
        return f"{size} ({what}) by {self.keeper}: {self.variable} of {self.holder}{where}"


@dataclass(frozen=True, kw_only=True)
class Collection:
    """What `collect` found and freed.

    Attributes:
        kept: tensors that tracebacks and closures hold still, largest first.
        freed: tensors that only cycles held; they are gone now.
        collected_objects: objects of all kinds that the garbage collector freed.
    """

    kept: tuple[KeptTensor, ...]
    freed: tuple[KeptTensor, ...]
    collected_objects: int

    @property
    def kept_bytes(self) -> int:
        """Bytes of the kept tensors, each storage once."""
        return _storage_bytes(self.kept)

    @property
    def freed_bytes(self) -> int:
        """Bytes of the tensors that cycles held, each storage once. Not all need be free: what else views
        a storage keeps it."""
        return _storage_bytes(self.freed)

    def __str__(self) -> str:
        head = (
            f"{self.collected_objects} objects collected, {format_bytes(self.freed_bytes)} in tensors of"
            f" cycles; {format_bytes(self.kept_bytes)} kept by tracebacks and closures"
        )
        lines = (*(f"  kept   {kept}" for kept in self.kept), *(f"  freed  {freed}" for freed in self.freed))
        return "\n".join([head, *lines])


def collect(*, least_bytes: int = 0) -> Collection:
    """Have Python's garbage collector free cycles, and find tensors that are kept by mistake.

    An exception that is being handled, that somebody has stored, or that the interactive prompt remembers
    (``sys.last_traceback``) holds its frames, and these hold their variables. A function holds the variables
    of the function that it was written in. Both are found and named; letting go of them is up to the caller
    (``traceback.clear_frames``, ``del``). No CUDA cache is emptied: see `IdleCacheRelease`.

    Args:
        least_bytes: tensors of smaller storages are not reported.

    Examples:
        >>> def make():
        ...     weights = torch.ones(1000)
        ...     return lambda: weights.sum()
        >>> total = make()
        >>> [kept.variable for kept in collect().kept if "make" in kept.holder]
        ['weights']
    """
    freed, collected = _collect_cycles()
    objects = gc.get_objects()
    kept = [*_of_tracebacks(objects), *_of_closures(objects)]
    objects.clear()
    return Collection(
        kept=_largest_first(kept, least_bytes),
        freed=_largest_first(freed, least_bytes),
        collected_objects=collected,
    )


def _collect_cycles() -> tuple[list[KeptTensor], int]:
    """Free cycles, and say which tensors they held: what cannot be reached is kept for a look, then freed."""
    flags, before = gc.get_debug(), len(gc.garbage)
    gc.set_debug(flags | gc.DEBUG_SAVEALL)
    try:
        gc.collect()
    finally:
        gc.set_debug(flags)
    unreachable = gc.garbage[before:]
    del gc.garbage[before:]
    described = _of_cycles(unreachable)
    count = len(unreachable)
    unreachable.clear()
    gc.collect()
    return described, count


def _of_cycles(unreachable: list[Any]) -> list[KeptTensor]:
    dicts = {id(attributes): owner for owner in unreachable if (attributes := _own_dict(owner)) is not None}
    described: dict[int, KeptTensor] = {}
    for owner in unreachable:
        for name, value in parts_of(owner):
            if is_tensor(value) and id(value) not in described:
                holder = dicts.get(id(owner), owner)
                described[id(value)] = _kept(
                    value, "cycle", _named(holder), name.lstrip("."), _written(holder)
                )
    for found in unreachable:
        if is_tensor(found) and id(found) not in described:
            described[id(found)] = _kept(found, "cycle", "a cycle", "a tensor", None)
    return list(described.values())


def _of_tracebacks(objects: list[Any]) -> Iterator[KeptTensor]:
    running = _running_frames()
    seen: set[tuple[int, int]] = set()
    barren: dict[int, int] = {}
    for holder, trace in _tracebacks(objects):
        while trace is not None:
            frame = trace.tb_frame
            if id(frame) not in running:
                site = Site(frame.f_code.co_filename, trace.tb_lineno, frame.f_code.co_name)
                for name, tensor in _tensors_of(variables_of(frame), barren):
                    if (id(frame), id(tensor)) not in seen:
                        seen.add((id(frame), id(tensor)))
                        yield _kept(tensor, "traceback", holder, name, site)
            trace = trace.tb_next


def _tracebacks(objects: list[Any]) -> Iterator[tuple[str, types.TracebackType | None]]:
    for found in objects:
        if issubclass(type(found), BaseException):
            yield _named(found), found.__traceback__
    last = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    yield f"sys.last_traceback ({_named(last)})", getattr(sys, "last_traceback", None)


def _running_frames() -> set[int]:
    """Ids of the frames on the stack of a thread: their variables are in use. No reference to a frame stays,
    for this one's own would make a cycle."""
    running = set()
    tops = sys._current_frames()
    while tops:
        frame: types.FrameType | None = tops.popitem()[1]
        while frame is not None:
            running.add(id(frame))
            frame = frame.f_back
    return running


def _of_closures(objects: list[Any]) -> Iterator[KeptTensor]:
    barren: dict[int, int] = {}
    for function in objects:
        if type(function) is not types.FunctionType or not function.__closure__:
            continue
        code = function.__code__
        site = Site(code.co_filename, code.co_firstlineno, code.co_name)
        for name, tensor in _tensors_of(_closed_over(function), barren):
            yield _kept(tensor, "closure", f"function {function.__qualname__}", name, site)


def _closed_over(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def _tensors_of(
    variables: Iterable[tuple[str, Any]], barren: dict[int, int]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in variables:
        for path, tensor in tensors_in(value, barren):
            yield name + path, tensor


def _kept(tensor: torch.Tensor, keeper: Keeper, holder: str, variable: str, site: Site | None) -> KeptTensor:
    size_bytes, address = _storage_of(tensor)
    return KeptTensor(
        keeper=keeper,
        holder=holder,
        variable=variable,
        site=site,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=str(tensor.device),
        size_bytes=size_bytes,
        storage=address,
    )


def _storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Bytes and address of what holds a tensor's elements; sparse and wrapped tensors have no one storage."""
    try:
        storage = tensor.untyped_storage()
        return storage.nbytes(), storage.data_ptr()
    except (RuntimeError, NotImplementedError):
        return tensor.numel() * tensor.element_size(), id(tensor)


def _named(thing: Any) -> str:
    if isinstance(thing, BaseException):
        return f"{type(thing).__name__}({str(thing)[:60]!r})"
    if isinstance(thing, types.FunctionType):
        return f"function {thing.__qualname__}"
    return f"{type(thing).__module__}.{type(thing).__qualname__}".removeprefix("builtins.")


def _own_dict(thing: Any) -> Any:
    if issubclass(type(thing), type | types.ModuleType | types.FunctionType):
        return None
    try:
        return object.__getattribute__(thing, "__dict__")
    except (AttributeError, TypeError):
        return None


def _written(thing: Any) -> Site | None:
    """Where the class of an object is written, as far as its methods tell."""
    kind = type(thing)
    for method in vars(kind).values():
        code = getattr(method, "__code__", None)
        if code is not None:
            return Site(code.co_filename, code.co_firstlineno, kind.__qualname__)
    return None


def _largest_first(found: Iterable[KeptTensor], least_bytes: int) -> tuple[KeptTensor, ...]:
    large = (kept for kept in found if kept.size_bytes >= least_bytes)
    return tuple(sorted(large, key=lambda kept: -kept.size_bytes))


def _storage_bytes(found: Iterable[KeptTensor]) -> int:
    return sum({(kept.storage, kept.size_bytes): kept.size_bytes for kept in found}.values())
