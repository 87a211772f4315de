"""The next batches on their way to the device while the device computes on this one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from memfit.core.errors import UsageError
from memfit.techniques.base import whole_number

if TYPE_CHECKING:
    import torch

_LOOK_SECONDS = 0.1
"""How often a thread with a full queue looks whether anybody still wants its batches."""


class InputPrefetch:
    """Wraps a loader: batches come on the device, copied on a stream of their own from pinned memory.

    A thread goes through the loader ahead of its user. On CUDA it pins what is not pinned, and starts the
    copy; the device's computation waits for the copy of its own batch only. On the CPU batches pass through
    as they are. The thread ends with the iteration, also when that is left early or the loader fails.

    Args:
        loader: any iterable of batches: tensors, or dicts, lists, tuples and objects with ``to`` of them.
        device: where batches are wanted; the CPU by default where there is no CUDA.
        depth: how many batches are held ready.

    Raises:
        UsageError: no iterable, no such device, or a depth below 1.

    Examples:
        >>> import torch
        >>> batches = InputPrefetch([torch.ones(2), torch.zeros(2)], "cpu")
        >>> [float(batch.sum()) for batch in batches]
        [2.0, 0.0]
    """

    def __init__(self, loader: Iterable[Any], device: Any = None, *, depth: int = 2) -> None:
        import torch

        if not hasattr(loader, "__iter__"):
            raise UsageError(f"InputPrefetch wraps an iterable of batches, not a {type(loader).__name__}")
        whole_number(depth, key="depth", technique="InputPrefetch")
        default = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            self.device = torch.device(default if device is None else device)
        except (RuntimeError, TypeError) as error:
            raise UsageError(f"InputPrefetch: no device {device!r}; for example 'cuda:0' or 'cpu'") from error
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise UsageError(f"InputPrefetch: device {str(device)!r} is not there; give 'cpu'")
        self.loader, self.depth = loader, depth

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return _batches(self.loader, self.device, self.depth)


class _Failed:
    """What the loader raised."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


_END = object()


def _batches(loader: Iterable[Any], device: torch.device, depth: int) -> Iterator[Any]:
    ready: queue.Queue[Any] = queue.Queue(maxsize=depth)
    stop = threading.Event()
    arguments = (loader, device, ready, stop)
    thread = threading.Thread(target=_fetch, args=arguments, name="memfit-prefetch", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not _END:
            if isinstance(item, _Failed):
                raise item.error
            batch, copied = item
            yield _for_this_stream(batch, copied, device)
            del item, batch
    finally:
        stop.set()
        thread.join()


def _fetch(
    loader: Iterable[Any], device: torch.device, ready: queue.Queue[Any], stop: threading.Event
) -> None:
    """The thread: takes from the loader, starts the copies, waits while the queue is full."""
    try:
        side = _side_stream(device)
        for batch in loader:
            item = (batch, None) if side is None else _on_the_way(batch, device, side)
            if not _put(ready, item, stop):
                return
        _put(ready, _END, stop)
    except BaseException as error:  # whatever it is, the user's thread raises it
        _put(ready, _Failed(error), stop)


def _put(ready: queue.Queue[Any], item: Any, stop: threading.Event) -> bool:
    """Whether somebody still wanted it."""
    while not stop.is_set():
        try:
            ready.put(item, timeout=_LOOK_SECONDS)
            return True
        except queue.Full:
            continue
    return False


def _side_stream(device: torch.device) -> Any:
    import torch

    if device.type != "cuda":
        return None
    torch.cuda.set_device(device)
    return torch.cuda.Stream(device)


def _on_the_way(batch: Any, device: torch.device, side: Any) -> tuple[Any, Any]:
    """The batch as it will be on the device, and the event after which it is."""
    import torch

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.device.type == "cpu" and value.layout == torch.strided and not value.is_pinned():
                value = value.pin_memory()
            return value.to(device, non_blocking=True)
        return value.to(device) if hasattr(value, "to") else value

    with torch.cuda.stream(side):
        moved = torch.utils._pytree.tree_map(move, batch)
    return moved, side.record_event()


def _for_this_stream(batch: Any, copied: Any, device: torch.device) -> Any:
    """Lets the user's stream wait for the copy, and the allocator know who uses the memory."""
    if copied is None:
        return batch
    import torch

    stream = torch.cuda.current_stream(device)
    stream.wait_event(copied)
    for value in torch.utils._pytree.tree_leaves(batch):
        if isinstance(value, torch.Tensor) and value.device.type == "cuda":
            value.record_stream(stream)
    return batch
