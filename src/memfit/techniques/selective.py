"""Saves the outputs of chosen operations of a checkpointed block, so that the recompute does not run them
again.

Which operations: ``saved_operations``. A pair of dispatch modes does it: one keeps outputs in the forward,
the other hands them out in the recompute. Two things that PyTorch's own selective checkpointing leaves to
the user are done here:

* A saved random operation draws nothing in the recompute, so all later draws of the block would differ. The
  generator's state after each saved random operation is noted, and set when the operation is skipped.
* An output that is changed in place later in the block is copied first, so the recompute gets what the
  operation gave.

The modes cost one dictionary look-up for an operation of no interest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from memfit.core.errors import UsageError
from memfit.techniques.operation_kinds import HEAVY
from memfit.techniques.saved_operations import KINDS, SavedOperations

aten = torch.ops.aten

_OPERATIONS: Mapping[str, tuple[str, ...]] = {
    **HEAVY,
    "normalization": (
        "native_layer_norm",
        "native_group_norm",
        "native_batch_norm",
        "cudnn_batch_norm",
        "miopen_batch_norm",
        "_batch_norm_with_update",
        "_fused_rms_norm",
    ),
}
_PRODUCTS = (aten.bmm.default, aten.baddbmm.default)
_SOFTMAXES = (aten._softmax.default, aten._safe_softmax.default)


def selective_modes(saved: SavedOperations, *, block: str) -> tuple[Keep, Replay]:
    """The modes for one call of a block: the first goes around its forward, the second around each
    recompute."""
    ledger = _Ledger(block=block)
    table = _TABLES.setdefault(frozenset(saved.wanted), {})
    return Keep(saved, table, ledger), Replay(table, ledger)


@dataclass(frozen=True)
class _Role:
    """What the modes have to know about an operation that they cannot simply pass on."""

    kinds: tuple[str, ...]
    draws: bool
    dropout_at: int | None
    written: tuple[int, ...]
    written_names: tuple[str, ...]


_Table = dict[Any, _Role | None]
_TABLES: dict[frozenset[str], _Table] = {}
"""Per set of wanted kinds: operation → its role, ``None`` for one that is passed on."""


@dataclass(slots=True)
class _Kept:
    """One saved output: detached, with versions to notice changes, and the random state after the
    operation."""

    output: Any
    versions: tuple[int, ...]
    random_after: tuple[torch.device, Any] | None


@dataclass(slots=True)
class _Ledger:
    """What one call of a block saved: by position among the operations of the wanted kinds."""

    block: str
    operations: list[Any] = field(default_factory=list)
    kept: dict[int, _Kept] = field(default_factory=dict)
    by_storage: dict[int, list[int]] = field(default_factory=dict)


class LightMode(TorchDispatchMode):
    """A mode whose dispatch is a plain function: the wrapper that keeps the compiler out costs 10 µs an
    operation."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Keep(LightMode):
    """Runs every operation and keeps the outputs of the chosen ones."""

    def __init__(self, saved: SavedOperations, table: _Table, ledger: _Ledger) -> None:
        super().__init__()
        self._saved = saved
        self._table = table
        self._ledger = ledger
        self._counts = dict.fromkeys(KINDS, 0)
        self._after_softmax = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        table = self._table
        role = table[func] if func in table else _learn(table, self._saved, func)
        if role is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if role.written or role.written_names:
            self._copy_before_change(role, args, kwargs)
        output = func(*args, **kwargs)
        if role.kinds:
            self._note(role, func, args, kwargs, output)
        return output

    def _note(self, role: _Role, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        ledger = self._ledger
        position = len(ledger.operations)
        ledger.operations.append(func)
        if not self._is_wanted(role, func, args, kwargs):
            return
        # An in-place operation's version is raised only after it, and its target often changes again: keep a
        # copy.
        tensors = list(_tensors(output))
        tensors = [tensor.clone() for tensor in tensors] if role.written else _sharing_versions(tensors)
        ledger.kept[position] = _Kept(
            output=_rebuild(output, iter(tensors)),
            versions=tuple(tensor._version for tensor in tensors),
            random_after=_random_state(output) if _draws(role, args, kwargs) else None,
        )
        for tensor in tensors:
            if (key := _storage_key(tensor)) is not None:
                ledger.by_storage.setdefault(key, []).append(position)

    def _is_wanted(self, role: _Role, func: Any, args: Any, kwargs: Any) -> bool:
        wanted = False
        for kind in self._kinds_now(role, func, args, kwargs):
            wanted |= self._saved.has(kind, self._counts[kind])
            self._counts[kind] += 1
        return wanted

    def _kinds_now(self, role: _Role, func: Any, args: Any, kwargs: Any) -> tuple[str, ...]:
        if func in _SOFTMAXES:
            self._after_softmax = True
            return ()
        if func in _PRODUCTS:
            kind = self._kind_of_product(args)
            return (kind,) if kind in role.kinds else ()
        if "random" in role.kinds and not _draws(role, args, kwargs):
            return tuple(kind for kind in role.kinds if kind != "random")
        return role.kinds

    def _kind_of_product(self, args: Any) -> str:
        """A batched product is a linear layer where its matrix is one weight, repeated; attention after a
        softmax."""
        if args[-1].stride(0) == 0:
            return "linear"
        attention, self._after_softmax = self._after_softmax, False
        return "attention" if attention else ""

    def _copy_before_change(self, role: _Role, args: Any, kwargs: Any) -> None:
        ledger = self._ledger
        if not ledger.by_storage:
            return
        values = [args[at] for at in role.written if at < len(args)]
        values += [kwargs[name] for name in role.written_names if name in kwargs]
        for tensor in _tensors(values):
            key = _storage_key(tensor)
            for position in ledger.by_storage.pop(key, ()) if key is not None else ():
                kept = ledger.kept[position]
                copies = [
                    saved.clone() if _storage_key(saved) == key else saved for saved in _tensors(kept.output)
                ]
                kept.output = _rebuild(kept.output, iter(copies))
                kept.versions = tuple(copy._version for copy in copies)


class Replay(LightMode):
    """Hands out the kept outputs, each once; what was not kept (or was used before, by an earlier backward)
    runs."""

    def __init__(self, table: _Table, ledger: _Ledger) -> None:
        super().__init__()
        self._table = table
        self._ledger = ledger
        self._position = 0

    def __enter__(self) -> Any:
        self._position = 0
        return super().__enter__()

    def __exit__(self, *exc: object) -> None:
        # A recompute stops once it has everything: what is still here would only wait for the graph to die.
        self._ledger.kept.clear()
        self._ledger.by_storage.clear()
        super().__exit__(*exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        role = self._table.get(func)
        if role is None or not role.kinds:
            return func(*args, **kwargs) if kwargs else func(*args)
        kept = self._next(func)
        if kept is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        self._check_unchanged(kept, func)
        if kept.random_after is not None:
            _set_random_state(*kept.random_after)
        if role.written:
            return args[0].copy_(kept.output)
        return kept.output

    def _next(self, func: Any) -> _Kept | None:
        ledger, position = self._ledger, self._position
        self._position += 1
        expected = ledger.operations[position] if position < len(ledger.operations) else None
        if expected is not func:
            raise UsageError(
                f"block {ledger.block!r} did not run the same operations again: operation {position} of the "
                f"kinds that it saves was {expected or 'none'} in the forward and {func} in the recompute. "
                "Its forward depends on something that changed in between; leave this block out, or "
                "checkpoint it without saved operations"
            )
        return ledger.kept.pop(position, None)

    def _check_unchanged(self, kept: _Kept, func: Any) -> None:
        if tuple(tensor._version for tensor in _tensors(kept.output)) != kept.versions:
            raise UsageError(
                f"the saved output of {func} in block {self._ledger.block!r} was changed in place after the "
                "block had returned it, so the recompute cannot use it; leave this operation out of what the "
                "block saves"
            )


def _learn(table: _Table, saved: SavedOperations, func: Any) -> _Role | None:
    table[func] = role = _role(func, saved.wanted)
    return role


def _role(func: Any, wanted: Mapping[str, Any]) -> _Role | None:
    """The role of an operation; ``None`` where the modes need do nothing: it is not of a wanted kind and
    writes nothing."""
    schema = getattr(func, "_schema", None)
    if schema is None or func is aten.detach.default:
        return None
    at = [(index, argument) for index, argument in enumerate(schema.arguments)]
    written = [(i, a) for i, a in at if a.alias_info is not None and a.alias_info.is_write]
    kinds = tuple(kind for kind in _kinds(func, writes=bool(written)) if kind in wanted or kind == "softmax")
    if not kinds and not written:
        return None
    if kinds == ("softmax",) and "attention" not in wanted:
        return None
    return _Role(
        kinds=kinds,
        draws=torch.Tag.nondeterministic_seeded in func.tags,
        dropout_at=next((index for index, argument in at if argument.name == "dropout_p"), None),
        written=tuple(index for index, argument in written if not argument.kwarg_only),
        written_names=tuple(argument.name for _, argument in written),
    )


def _kinds(func: Any, *, writes: bool) -> tuple[str, ...]:
    """All kinds that an operation can be of; which of them a call is depends on its arguments for some."""
    if func in _SOFTMAXES:
        return ("softmax",)
    if func in _PRODUCTS:
        return ("linear", "attention")
    random = ("random",) if torch.Tag.nondeterministic_seeded in func.tags else ()
    in_place = writes and func._schema.arguments[0].alias_info is not None
    if func.is_view or (writes and not (random and in_place)):
        return ()
    name = func._schema.name.partition("::")[2]
    named = tuple(kind for kind, names in _OPERATIONS.items() if name in names)
    pointwise = ("pointwise",) if torch.Tag.pointwise in func.tags and not random else ()
    return named + pointwise + random


def _draws(role: _Role, args: Any, kwargs: Any) -> bool:
    """Whether this call draws from the default generator: attention does only with a dropout above zero."""
    if not role.draws or kwargs.get("generator") is not None:
        return False
    if role.dropout_at is None:
        return True
    dropout = args[role.dropout_at] if role.dropout_at < len(args) else kwargs.get("dropout_p", 0.0)
    return bool(dropout > 0)


def _random_state(output: Any) -> tuple[torch.device, Any] | None:
    """The default generator of the output's device, as it is now. CUDA: its Philox offset, read without a
    sync."""
    device = next((tensor.device for tensor in _tensors(output)), torch.device("cpu"))
    if device.type == "cuda":
        generators = torch.cuda.default_generators  # none for tensors that only say they are on a GPU
        known = device.index is not None and device.index < len(generators)
        return (device, generators[device.index].get_offset()) if known else None
    if device.type == "cpu":
        return device, torch.get_rng_state()
    return None


def _set_random_state(device: torch.device, state: Any) -> None:
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].set_offset(state)
    else:
        torch.set_rng_state(state)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from _tensors(inner)


def _rebuild(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, (tuple, list)):
        return type(value)(_rebuild(inner, tensors) for inner in value)
    return value


def _sharing_versions(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Other tensors on the same storages, with the same version counters: they hold no graph, but notice
    changes."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return [tensor.detach() for tensor in tensors]


def _storage_key(tensor: torch.Tensor) -> int | None:
    if is_traceable_wrapper_subclass(tensor):
        return None
    key: int = tensor.untyped_storage()._cdata
    return key
