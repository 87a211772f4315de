"""What tensors hold after a collective whose other ranks are absent: all are taken to have what this one has.

Only small tensors whose values are known are followed (see `shadow`): sizes, flags, objects as bytes. The
rest stays unknown, as it was. The operations themselves run as they are, on PyTorch's real process group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from memfit.dryrun import absent_ranks
from memfit.dryrun.devices import last_reduction
from memfit.dryrun.shadow import WHOLE, Special, TrueValues, tensors

Pair = tuple[torch.Tensor, torch.Tensor | None]
"""A tensor that is written, and (on the host) what it then holds; None: not known."""
Rule = Callable[["_Call"], Iterable[Pair]]

_SUM, _PRODUCT, _MOST, _LEAST, _MEAN = range(5)
_BY_NAME = {"sum": _SUM, "product": _PRODUCT, "max": _MOST, "min": _LEAST, "avg": _MEAN}

_LARGEST_MESSAGE = 4096  # numbers
_MOST_SECONDS = 180.0  # to wait for a message: as long as another rank may take to start and get there

sending: set[str] = set()
"""Names of the groups in which this rank sent to, or received from, single members."""


class _Call:
    """One collective: its arguments, its group, and the values that are known."""

    def __init__(self, values: TrueValues, args: tuple[Any, ...], out: Any) -> None:
        self.args, self.out, self._values = args, out, values
        self._group = _group_of(args)

    @property
    def size(self) -> int:
        return 1 if self._group is None else int(self._group.size())

    @property
    def rank(self) -> int:
        return 0 if self._group is None else int(self._group.rank())

    @property
    def group_name(self) -> str:
        return "" if self._group is None else str(self._group.group_name)

    @property
    def peer(self) -> int:
        """The rank in the whole job that a message goes to or comes from."""
        number = next(value for value in self.args if type(value) is int)
        return absent_ranks.global_rank(self._group, number)

    def known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What ``tensor`` holds, on the host."""
        if not tensor.is_cuda:
            return None
        shadow = self._values.shadow(tensor)
        return None if shadow is None else shadow.clone()

    def reduced(self, value: torch.Tensor | None, operation: int) -> torch.Tensor | None:
        """``value`` combined with as many like it as there are ranks."""
        if value is None or operation > _MEAN:
            return None
        if value.dtype is torch.bool or operation in (_MOST, _LEAST, _MEAN):
            return value
        return value * self.size if operation == _SUM else value**self.size


def _group_of(args: tuple[Any, ...]) -> Any:
    """The process group among an operation's arguments: the object itself, or its name as the last text."""
    from torch._C import _distributed_c10d

    c10d: Any = _distributed_c10d
    for value in args:
        if isinstance(value, torch.ScriptObject) and _class_name(value) == "ProcessGroup":
            return c10d.ProcessGroup.unbox(value)
        if isinstance(value, c10d.ProcessGroup):
            return value
    names = [value for value in args if isinstance(value, str)]
    return c10d._resolve_process_group(names[-1]) if names else None


def _class_name(value: Any) -> str:
    return str(value._type().name())


def _operation(call: _Call) -> int:
    named = [_BY_NAME[value] for value in call.args if isinstance(value, str) and value in _BY_NAME]
    return named[0] if named else last_reduction()


def _reduce_in_place(call: _Call) -> Iterable[Pair]:
    for tensor in tensors(call.args[0]):
        yield tensor, call.reduced(call.known(tensor), _operation(call))


def _reduce_new(call: _Call) -> Iterable[Pair]:
    for result, source in zip(tensors(call.out), tensors(call.args[0]), strict=False):
        yield result, call.reduced(call.known(source), _operation(call))


def _repeat(target: torch.Tensor, value: torch.Tensor | None) -> Pair:
    """``target`` is filled with copies of ``value``, one for each rank."""
    if value is None or not value.numel() or target.numel() % value.numel():
        return target, None
    copies = value.flatten().repeat(target.numel() // value.numel())
    return target, copies.reshape(target.shape)


def _gather_in_place(call: _Call) -> Iterable[Pair]:
    """One output (or one list of them) per input; outputs that are lists of tensors have one per rank."""
    outputs, inputs = call.args[0], list(tensors(call.args[1]))
    if isinstance(outputs, torch.Tensor):
        outputs = [outputs]
    for output, source in zip(outputs, inputs, strict=False):
        for target in tensors(output):
            yield _repeat(target, call.known(source))


def _gather_lists(call: _Call) -> Iterable[Pair]:
    """For each rank a list of outputs, one per input."""
    for outputs in call.args[0]:
        for target, source in zip(outputs, tensors(call.args[1]), strict=False):
            yield target, call.known(source)


def _gather_new(call: _Call) -> Iterable[Pair]:
    for target, source in zip(tensors(call.out), tensors(call.args[0]), strict=False):
        yield _repeat(target, call.known(source))


def _part(call: _Call, target: torch.Tensor, value: torch.Tensor | None) -> torch.Tensor | None:
    """This rank's part of a value that has one for each rank."""
    if value is None or value.numel() != target.numel() * call.size:
        return None
    return value.flatten()[call.rank * target.numel() :][: target.numel()].reshape(target.shape)


def _scatter_reduced(call: _Call) -> Iterable[Pair]:
    """Outputs in the first argument, or new ones; inputs are whole, or lists with a tensor per rank."""
    new = isinstance(call.args[1], str)
    outputs = list(tensors(call.out if new else call.args[0]))
    inputs = call.args[0] if new else call.args[1]
    inputs = [inputs] if isinstance(inputs, torch.Tensor) else inputs
    for target, source in zip(outputs, inputs, strict=False):
        if isinstance(source, torch.Tensor):
            part = _part(call, target, call.known(source))
        else:
            part = call.known(source[call.rank])
        yield target, call.reduced(part, _operation(call))


def _scatter(call: _Call) -> Iterable[Pair]:
    if call.args[1]:
        yield call.args[0][0], call.known(call.args[1][0][call.rank])
    else:
        yield call.args[0][0], None


def _exchange_lists(call: _Call) -> Iterable[Pair]:
    mine = call.args[1][call.rank]
    for target in call.args[0]:
        fits = target.shape == mine.shape
        yield target, call.known(mine) if fits else None


def _exchange(call: _Call) -> Iterable[Pair]:
    """Everybody sends this rank what this rank keeps for itself."""
    new = not isinstance(call.args[1], torch.Tensor)
    target, source = (call.out, call.args[0]) if new else call.args[:2]
    value = call.known(source)
    if value is None or value.numel() != target.numel() or value.numel() % call.size:
        yield target, None
        return
    own = value.flatten().chunk(call.size)[call.rank]
    yield _repeat(target, own)


def _keep(_call: _Call) -> Iterable[Pair]:
    """What comes from one rank is what this rank has."""
    return ()


def _send(call: _Call) -> Iterable[Pair]:
    """Small whole numbers go to the receiver, if it runs beside this rank."""
    sending.add(call.group_name)
    box = absent_ranks.mailbox()
    for tensor in tensors(call.args[0]):
        value = call.known(tensor)
        if box is not None and _is_message(tensor):
            content = b"" if value is None else value.contiguous().view(torch.uint8).numpy().tobytes()
            box.post("numbers", call.peer, content)
    return ()


def _receive(call: _Call) -> Iterable[Pair]:
    """Small whole numbers come from their sender, if it can be run; else what this rank has stays."""
    sending.add(call.group_name)
    box = absent_ranks.mailbox()
    for tensor in tensors(call.args[0]):
        if box is not None and _is_message(tensor):
            content = box.take("numbers", call.peer, seconds=_MOST_SECONDS)
            if content:
                value = torch.frombuffer(bytearray(content), dtype=tensor.dtype)
                yield tensor, value.reshape(tensor.shape)


def _is_message(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype in WHOLE and tensor.numel() <= _LARGEST_MESSAGE


_RULES: Mapping[str, Rule] = {
    "allreduce_": _reduce_in_place,
    "allreduce_coalesced_": _reduce_in_place,
    "reduce_": _reduce_in_place,
    "broadcast_": _keep,
    "barrier": _keep,
    "allgather_": _gather_in_place,
    "_allgather_base_": _gather_in_place,
    "allgather_into_tensor_coalesced_": _gather_in_place,
    "allgather_coalesced_": _gather_lists,
    "gather_": _gather_in_place,
    "gather_into_tensor_": _gather_in_place,
    "reduce_scatter_": _scatter_reduced,
    "_reduce_scatter_base_": _scatter_reduced,
    "reduce_scatter_tensor_coalesced_": _scatter_reduced,
    "scatter_": _scatter,
    "alltoall_": _exchange_lists,
    "alltoall_base_": _exchange,
    "send": _send,
    "recv_": _receive,
    "recv_any_source_": _keep,
}
_FUNCTIONAL_RULES: Mapping[str, Rule] = {
    "all_reduce": _reduce_new,
    "all_reduce_": _reduce_in_place,
    "all_reduce_coalesced": _reduce_new,
    "all_reduce_coalesced_": _reduce_in_place,
    "all_gather_into_tensor": _gather_new,
    "all_gather_into_tensor_out": _gather_new,
    "all_gather_into_tensor_coalesced": _gather_new,
    "reduce_scatter_tensor": _scatter_reduced,
    "reduce_scatter_tensor_out": _scatter_reduced,
    "reduce_scatter_tensor_coalesced": _scatter_reduced,
    "all_to_all_single": _exchange,
    "broadcast": _gather_new,
    "broadcast_": _keep,
    "isend": _send,
    "irecv": _receive,
}


def _special(rule: Rule) -> Special:
    def run(values: TrueValues, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        for target, value in list(rule(_Call(values, args, out))):
            if not target.is_cuda:
                continue
            if value is not None and values.keeps(target):
                values.learn(target, value, values.origins(args))
            else:
                values.forget(target)
        return out

    return run


def collectives() -> dict[Any, Special]:
    """The operations of this file; none in a build of PyTorch without torch.distributed."""
    if not torch.distributed.is_available():
        return {}
    return {
        getattr(library, name).default: _special(rule)
        for library, rules in ((torch.ops.c10d, _RULES), (torch.ops._c10d_functional, _FUNCTIONAL_RULES))
        for name, rule in rules.items()
        if hasattr(library, name)
    }
