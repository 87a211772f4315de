"""CUDA streams: a pool serves one, and waits for the others that its blocks were recorded on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from memfit.core.errors import UsageError
from memfit.pools.holdings import Holding


class PoolStream:
    """The stream that a pool's blocks are used on, in whose order they can be used again at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def check(self) -> None:
        """See that the pool's stream is the current one.

        Raises:
            UsageError: work on another stream could read a block while the pool's stream writes it anew.
        """
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self._stream.device)
        if current != self._stream:
            raise UsageError(
                f"this pool serves {self._stream}, and {current} is current: make a pool inside of"
                " `with torch.cuda.stream(…)` for each stream, or record_stream() a handle of this one"
            )

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Copies of the pool itself run on its stream."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield


class InFlight:
    """Blocks that nobody holds any more, and that work given to other streams may still use."""

    def __init__(self) -> None:
        self._waiting: list[tuple[list[Any], Holding]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, holding: Holding, streams: list[Any]) -> None:
        """Keep a block until all that its streams have been given by now is done."""
        self._waiting.append(([stream.record_event() for stream in streams], holding))

    def take_done(self) -> list[Holding]:
        """Those whose streams have passed."""
        done, waiting = [], []
        for events, holding in self._waiting:
            if all(event.query() for event in events):
                done.append(holding)
            else:
                waiting.append((events, holding))
        self._waiting = waiting
        return done
