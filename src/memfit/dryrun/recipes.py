"""How a tensor of the host would be computed: the operations that were put off, and carrying them out.

A recipe is a row of steps on one storage. It is a value: what it was copied from may change afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from memfit.dryrun.mersenne import skip

_DRAWN_BELOW = 5_000_000  # numbers; jumping over more is quicker than drawing them

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Which elements of a storage a tensor has."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        return cls(
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            strides=tuple(tensor.stride()),
            offset=int(tensor.storage_offset()),
        )

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor on another storage."""
        return torch.empty(0, dtype=self.dtype, device="cpu").set_(
            storage, self.offset, self.shape, self.strides
        )


@dataclass(frozen=True)
class Draw:
    """Where the generator stood: ``offset`` numbers after ``state``."""

    state: bytes
    offset: int

    def generator(self) -> torch.Generator:
        generator = torch.Generator()
        generator.set_state(advanced(self.state, self.offset))
        return generator


@dataclass(frozen=True)
class Copied:
    """Another storage as it was: its recipe and size, and which of its elements are copied."""

    recipe: Recipe
    size_bytes: int
    geometry: Geometry


@dataclass(frozen=True)
class Step:
    """One operation in place: ``func(target, *rest, **named)``."""

    func: Any
    target: Geometry
    rest: tuple[Any, ...] = ()
    named: tuple[tuple[str, Any], ...] = ()
    draw: Draw | None = None
    source: Copied | torch.Tensor | None = None

    def run(self, storage: torch.UntypedStorage) -> None:
        """Carry it out on ``storage``."""
        target = self.target.on(storage)
        named = dict(self.named)
        if self.draw is not None:
            named["generator"] = self.draw.generator()
        if isinstance(self.source, Copied):
            other = torch.UntypedStorage(self.source.size_bytes)
            carry_out(self.source.recipe, other)
            target.copy_(self.source.geometry.on(other))
        elif self.source is not None:
            target.copy_(self.source)
        else:
            self.func(target, *self.rest, **named)


Recipe = tuple[Step, ...]


def carry_out(recipe: Recipe, storage: torch.UntypedStorage) -> None:
    """Compute what ``storage`` should hold."""
    with torch.no_grad():
        for step in recipe:
            step.run(storage)


def advanced(state: bytes, count: int) -> torch.Tensor:
    """The state of a CPU generator ``count`` numbers later, for `torch.Generator.set_state`."""
    if count < _DRAWN_BELOW:
        generator = torch.Generator()
        generator.set_state(_as_tensor(state))
        torch.empty(count, dtype=torch.int32, device="cpu").random_(generator=generator)
        return generator.get_state()
    return _as_tensor(skip(state, count))


def _as_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
