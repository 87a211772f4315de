"""Moves contents between a device and host memory while the device goes on computing.

On CUDA a copy to the host runs on a stream of its own as soon as its tensor is computed; the tensor's memory
is given up when the copy is done. In the backward pass contents come back on a third stream, a few storages
ahead of their use, in the reverse order of the forward pass. Only a copy and what it copies wait for each
other.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from memfit.techniques.codecs.base import raw_bytes
from memfit.techniques.offload_places import PinnedPool

if TYPE_CHECKING:
    from memfit.techniques.saved_tensors import Kept, Place

IN_FLIGHT_BYTES = 256 << 20
"""Of tensors that are being copied to the host: beyond it, the computation waits for the oldest copy."""


class Order:
    """Contents in the order in which the forward pass gave them: backward passes go through it in reverse."""

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead
        self._next = 0
        self._members: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def add(self, member: Any) -> int:
        """Its number."""
        self._members[self._next] = member
        self._next += 1
        return self._next - 1

    def before(self, number: int) -> list[Any]:
        """Those that the backward pass will ask for next."""
        found = (self._members.get(number - back) for back in range(1, self.ahead + 1))
        return [member for member in found if member is not None]


class ToHost:
    """A keeper that copies from CUDA to pinned host memory; what is in host memory already stays there."""

    device_type: ClassVar[str] = "cuda"

    def __init__(self, min_elements: int, ahead: int) -> None:
        self.min_elements = min_elements
        self.order = Order(ahead)
        self.pool = PinnedPool(pinned=torch.cuda.is_available())
        self._streams: dict[torch.device, tuple[Any, Any]] = {}
        self._leaving: deque[tuple[Any, Tensor]] = deque()

    def __reduce__(self) -> tuple[type[ToHost], tuple[int, int]]:
        return ToHost, (self.min_elements, self.order.ahead)

    def streams(self, device: torch.device) -> tuple[Any, Any]:
        """Of one device: that of copies to the host, and that of copies back."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return self._streams[device]

    def keep(self, flat: Tensor, place: Place) -> Kept | None:
        """Starts the copy; ``None`` for a tensor of the host."""
        if flat.device.type == "meta":
            return Nothing(flat)
        return OnHost(self, flat) if flat.device.type == self.device_type else None

    def send(self, flat: Tensor) -> tuple[Tensor, Any]:
        """Starts a copy to pinned memory: the piece, and the event after which it is there."""
        piece, free = self.pool.take(flat.nbytes)
        out, _ = self.streams(flat.device)
        compute = torch.cuda.current_stream(flat.device)
        out.wait_event(compute.record_event())
        if free is not None:
            out.wait_event(free)
        with torch.cuda.stream(out):
            piece.copy_(raw_bytes(flat), non_blocking=True)
        done = out.record_event()
        self._leaving.append((done, flat))
        self.let_go(compute)
        return piece, done

    def let_go(self, compute: Any, limit_bytes: int = IN_FLIGHT_BYTES) -> None:
        """Gives up the tensors whose copies are done; above the limit, the device waits for the oldest."""
        while self._leaving and self._leaving[0][0].query():
            self._leaving.popleft()
        while sum(tensor.nbytes for _, tensor in self._leaving) > limit_bytes:
            done, _ = self._leaving.popleft()
            compute.wait_event(done)


class OnHost:
    """Contents in pinned memory, or on their way there or back."""

    def __init__(self, keeper: ToHost, flat: Tensor) -> None:
        self.back: tuple[Tensor, Callable[[], Any]] | None = None
        self.like = (flat.numel(), flat.dtype, flat.device)
        self._keeper = keeper
        self.piece, self.done = keeper.send(flat)
        self._used = False
        self._last_read: Any = self.done
        self._number = keeper.order.add(self)

    def flat(self) -> Tensor:
        compute = torch.cuda.current_stream(self.like[2])
        self._keeper.let_go(compute, limit_bytes=0)
        self.fetch()
        for member in self._keeper.order.before(self._number):
            member.ahead()
        assert self.back is not None
        (tensor, ready), self.back = self.back, None
        self._used = True
        compute.wait_event(ready())
        return tensor

    def ahead(self) -> None:
        """Starts the copy back, unless it was made: storages are not used in quite the reverse order."""
        if not self._used:
            self.fetch()

    def fetch(self) -> None:
        """Starts the copy back, unless it is under way."""
        if self.back is not None:
            return
        numel, dtype, device = self.like
        compute, (_, back) = torch.cuda.current_stream(device), self._keeper.streams(device)
        tensor = torch.empty(numel, dtype=dtype, device=device)
        back.wait_event(compute.record_event())  # what had this memory before is done with it by then
        back.wait_event(self.done)
        with torch.cuda.stream(back):
            raw_bytes(tensor).copy_(self.piece, non_blocking=True)
        ready = self._last_read = back.record_event()
        self.back = tensor, lambda: ready

    def give_back(self) -> None:
        """The piece can be used again, once the last copy has read it."""
        self._keeper.pool.give_back(self.piece, self._last_read)

    def __del__(self) -> None:
        if self.back is not None:  # fetched, and never asked for
            torch.cuda.current_stream(self.like[2]).wait_event(self.back[1]())
        self.give_back()


class Nothing:
    """Of a meta tensor: no contents, but as many bytes again when asked."""

    def __init__(self, flat: Tensor) -> None:
        self._like = (flat.numel(), flat.dtype)

    def flat(self) -> Tensor:
        numel, dtype = self._like
        return torch.empty(numel, dtype=dtype, device="meta")
