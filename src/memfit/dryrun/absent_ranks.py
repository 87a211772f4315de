"""torch.distributed for a rank whose companions do not exist.

PyTorch's own ProcessGroupNCCL runs over the made-up NCCL, so communicators, streams, buffers and the order of
things are the real ones. What would wait for other processes is answered here: the store through which they
meet, gloo (PyTorch's own fake group takes its place), and collectives of Python objects, which give this
rank's own objects. What tensors hold after a collective is `collective_values`' to say.
"""

from __future__ import annotations

import functools
import os
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memfit.dryrun import pipeline_stages
from memfit.dryrun.accounts import GroupShape
from memfit.dryrun.mail import Mailbox
from memfit.dryrun.native_writers import after_import
from memfit.dryrun.world import WORLD_VARIABLE

NoteMissing = Callable[[str], None]

RECEIVED = (
    "objects that other ranks would have sent (broadcast, scatter or receive of Python objects): this rank's "
    "own stand in their place"
)
_MOST_SECONDS = 180.0  # to wait for a message: as long as another rank may take to start and get there
_UNIQUE_ID = b"\1" * 128  # what NCCL's first rank puts into the store


class _Mine(threading.local):
    """The object that this rank gave to the collective that is running."""

    objects: tuple[Any, ...] = ()


_mine = _Mine()
_groups: dict[str, tuple[str, tuple[int, ...]]] = {}  # by PyTorch's name: what it is called, its ranks


def are_absent() -> bool:
    """Whether this process is one rank of a job whose others are not there."""
    return os.environ.get(WORLD_VARIABLE) == "1"


def install(note: NoteMissing) -> None:
    """Answer for the absent ranks, now or when torch.distributed is imported."""
    register_optimizer_step_pre_hook(_Watchdog().before_step)
    after_import(
        {
            "torch.distributed.distributed_c10d": functools.partial(_collectives, note),
            "torch.distributed.rendezvous": _stores,
            "torch.distributed.pipelining.stage": pipeline_stages.install,
        }
    )


class _Watchdog:
    """Gives the thread that lets go of finished collectives' tensors the time that a step on a GPU would.

    ProcessGroupNCCL looks for them every 100 ms. Steps here take less, and whether a buffer of the set-up was
    still there at the peak would be chance.
    """

    INTERVAL_SECONDS = 0.1
    MOST_STEPS = 10  # then nothing of the set-up is left

    def __init__(self) -> None:
        self._steps = 0

    def before_step(self, *_: Any) -> None:
        module = _loaded()
        if self._steps < self.MOST_STEPS and module is not None and module.is_initialized():
            self._steps += 1
            time.sleep(1.5 * self.INTERVAL_SECONDS)


def group_shapes(sending: frozenset[str]) -> tuple[GroupShape, ...]:
    """The process groups that this rank was in, largest first; ``sending``: names of those with messages."""
    _remember_groups(_loaded())
    shapes: dict[tuple[int, ...], GroupShape] = {}
    for group_name, (name, ranks) in _groups.items():
        known = shapes.get(ranks)
        sends = group_name in sending or (known is not None and known.sends)
        shapes[ranks] = GroupShape(name=name or (known.name if known else ""), ranks=ranks, sends=sends)
    return tuple(sorted(shapes.values(), key=lambda shape: (-len(shape.ranks), shape.ranks)))


def _remember_groups(module: Any) -> None:
    """Note the groups that there are, before they are destroyed."""
    if module is None or not module.is_initialized():
        return
    for group, members in module._world.pg_group_ranks.items():
        if isinstance(group, int):  # PyTorch's mark for groups that this rank is not in
            continue
        name = str(getattr(group, "group_desc", "")).removeprefix("mesh_")
        ranks = tuple(sorted(members, key=members.__getitem__))
        _groups[group.group_name] = ("" if name == "undefined" else name, ranks)


def _remembering(module: Any) -> Callable[..., Any]:
    original = module.destroy_process_group

    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        _remember_groups(module)
        return original(*args, **kwargs)

    return destroy_process_group


def _loaded() -> Any:
    import sys

    return sys.modules.get("torch.distributed.distributed_c10d")


def _stores(module: Any) -> None:
    store = _absent_store()
    for name in ("TCPStore", "FileStore"):
        _replace(module, name, store)


@functools.cache
def _absent_store() -> Any:
    """A store, called as `torch.distributed.TCPStore` and `FileStore` are, in which everybody has been."""
    from torch._C._distributed_c10d import Store

    class AbsentStore(Store):
        alive: list[Any] = []  # C++ holds only its own half of such an object

        def __init__(self, host: Any = None, port: Any = None, *_: Any, **__: Any) -> None:
            super().__init__()
            self._values: dict[str, bytes] = {}
            self._others = int(os.environ["WORLD_SIZE"]) - 1
            self.host, self.port = host, port
            self.alive.append(self)

        def set(self, key: str, value: Any) -> None:
            self._values[key] = value if isinstance(value, bytes) else str(value).encode()

        def get(self, key: str) -> bytes:
            return self._values.get(key, _UNIQUE_ID)

        def add(self, key: str, amount: int) -> int:
            count = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(count).encode()
            return count + (self._others if count else 0)

        def append(self, key: str, value: Any) -> None:
            more = value if isinstance(value, bytes) else str(value).encode()
            self._values[key] = self._values.get(key, b"") + more

        def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
            self.set(key, desired)
            return self._values[key]

        def check(self, keys: list[str]) -> bool:
            return all(key in self._values for key in keys)

        def wait(self, *_: Any) -> None: ...

        def delete_key(self, key: str) -> bool:
            return self._values.pop(key, None) is not None

        def num_keys(self) -> int:
            return len(self._values)

        def set_timeout(self, timeout: Any) -> None: ...

        def multi_get(self, keys: list[str]) -> list[bytes]:
            return [self.get(key) for key in keys]

        def multi_set(self, keys: list[str], values: list[Any]) -> None:
            for key, value in zip(keys, values, strict=True):
                self.set(key, value)

        def has_extended_api(self) -> bool:
            return True

    return AbsentStore


def _collectives(note: NoteMissing, module: Any) -> None:
    _stores(module)
    _replace(module, "ProcessGroupGloo", _gloo(module))
    _replace(module, "monitored_barrier", lambda *args, **kwargs: None)
    _replace(module, "_tensor_to_object", _object_of(module._tensor_to_object))
    for name in ("all_gather_object", "gather_object"):
        position = 1 if name == "all_gather_object" else 0
        _replace(module, name, _with_mine(getattr(module, name), position))
    _replace(module, "broadcast_object_list", _broadcast(note, module))
    _replace(module, "scatter_object_list", _scatter(note, module))
    _replace(module, "send_object_list", _send(module))
    _replace(module, "recv_object_list", _receive(note, module))
    _replace(module, "destroy_process_group", _remembering(module))
    _replace(module, "all_reduce", _on_the_host(module, module.all_reduce))


def _replace(module: Any, name: str, new: Any) -> None:
    """Under its module's name and under torch.distributed's."""
    original = getattr(module, name, None)
    if original is None:
        return
    if callable(new) and not isinstance(new, type):
        new = functools.wraps(original)(new)
    for place in (module, getattr(torch, "distributed", None)):
        if place is not None and getattr(place, name, None) is original:
            setattr(place, name, new)


def _gloo(module: Any) -> Any:
    """PyTorch's group that does nothing, in place of gloo's; its values on the host are real copies."""
    from torch._C._distributed_c10d import FakeProcessGroup

    group: Any = FakeProcessGroup
    # PyTorch 2.11 looks at what it got, and numbers its collectives.
    group._set_sequence_number_for_group = lambda self: None

    class Kind(type):
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, FakeProcessGroup)

    class AbsentGloo(metaclass=Kind):
        def __new__(cls, _store: Any, rank: int, size: int, *_: Any, **__: Any) -> Any:
            return group._create_internal(rank, size, group.Options())

    return AbsentGloo


def _with_mine(original: Callable[..., Any], position: int) -> Callable[..., Any]:
    """A collective of objects: what comes back from anybody is what this rank gave."""

    def collective(*args: Any, **kwargs: Any) -> Any:
        mine = args[position] if len(args) > position else kwargs.get("obj")
        before, _mine.objects = _mine.objects, (mine,)
        try:
            return original(*args, **kwargs)
        finally:
            _mine.objects = before

    return collective


def _object_of(original: Callable[..., Any]) -> Callable[..., Any]:
    def tensor_to_object(*args: Any, **kwargs: Any) -> Any:
        if not _mine.objects:
            return original(*args, **kwargs)
        return pickle.loads(pickle.dumps(_mine.objects[0]))  # a copy, as every receiver has one

    return tensor_to_object


def _broadcast(note: NoteMissing, module: Any) -> Callable[..., Any]:
    original = module.broadcast_object_list

    def broadcast_object_list(
        object_list: Any,
        src: Any = None,
        group: Any = None,
        device: Any = None,
        group_src: Any = None,
        **rest: Any,
    ) -> Any:
        if module._rank_not_in_group(group):
            return original(object_list, src, group, device, group_src, **rest)
        me = module.get_rank(group)
        root = group_src if group_src is not None else module.get_group_rank(_group(module, group), src or 0)
        if root != me:
            note(RECEIVED)
        return original(object_list, None, group, device, me, **rest)

    return broadcast_object_list


def _scatter(note: NoteMissing, module: Any) -> Callable[..., Any]:
    def scatter_object_list(
        output_list: Any, input_list: Any = None, src: Any = None, group: Any = None, *_: Any, **__: Any
    ) -> None:
        if module._rank_not_in_group(group):
            return
        if input_list:
            output_list[0] = input_list[module.get_rank(group)]
        else:
            note(RECEIVED)

    return scatter_object_list


@functools.cache
def mailbox() -> Mailbox | None:
    """This rank's messages, where ranks are run side by side."""
    return Mailbox.of_this_process()


def global_rank(group: Any, rank: int) -> int:
    """The rank in the whole job of a group's member."""
    members = _loaded()._world.pg_group_ranks.get(group) or {}
    return next((whole for whole, inside in members.items() if inside == rank), rank)


def _peer(module: Any, group: Any, rank: Any, group_rank: Any) -> int:
    return int(rank) if group_rank is None else global_rank(_group(module, group), group_rank)


def _send(module: Any) -> Callable[..., Any]:
    original = module.send_object_list

    def send_object_list(
        objects: Any, dst: Any = None, group: Any = None, *args: Any, group_dst: Any = None, **kwargs: Any
    ) -> Any:
        box = mailbox()
        if box is not None:
            box.post("objects", _peer(module, group, dst, group_dst), pickle.dumps(list(objects)))
        return original(objects, dst, group, *args, group_dst=group_dst, **kwargs)

    return send_object_list


def _receive(note: NoteMissing, module: Any) -> Callable[..., Any]:
    def recv_object_list(
        objects: Any, src: Any = None, group: Any = None, *_: Any, group_src: Any = None, **__: Any
    ) -> int:
        sender = _peer(module, group, src or 0, group_src)
        box = mailbox()
        content = None if box is None else box.take("objects", sender, seconds=_MOST_SECONDS)
        if content is None:
            note(RECEIVED)
            return sender
        device = module._get_object_coll_device(_group(module, group))
        torch.empty(len(objects), dtype=torch.long, device=device)  # PyTorch receives sizes, then contents
        torch.empty(len(content), dtype=torch.uint8, device=device)
        objects[:] = pickle.loads(content)  # written by a rank of this very run
        return sender

    return recv_object_list


def _group(module: Any, group: Any) -> Any:
    return module._get_default_group() if group is None else group


def _on_the_host(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """A sum over ranks that all have this rank's numbers, where the fake group would leave one rank's."""

    total = module.ReduceOp.SUM

    def all_reduce(tensor: Any, op: Any = total, group: Any = None, async_op: bool = False) -> Any:
        work = original(tensor, op, group, async_op)
        if _is_on_host(tensor) and op == total and not module._rank_not_in_group(group):
            with torch.no_grad():
                tensor.mul_(1 if tensor.dtype is torch.bool else module.get_world_size(group))
        return work

    return all_reduce


def _is_on_host(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu"
