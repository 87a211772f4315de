"""An optimizer's state in memory-mapped files: the optimizer writes to it as to any tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from memfit.techniques.offload_files import MappedFiles

AT_ONCE_BYTES = 256 << 20
"""New state is mapped together, up to this: each mapping costs an open file."""


class StateOnDisk:
    """Where the state's tensors are.

    Args:
        files: to put them into.
        names: of the parameters, by id.
    """

    def __init__(self, files: MappedFiles, names: Mapping[int, str]) -> None:
        self.files, self._names = files, names
        self._mapped: dict[tuple[int, str], Tensor] = {}
        self._fresh: list[tuple[Tensor, dict[str, Any], str]] = []

    def take(self, parameter: Tensor, state: dict[str, Any]) -> None:
        """Puts what is no counter into the file; new tensors with the next `flush`, if there are few."""
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                continue
            mapped = self._mapped.get((id(parameter), key))
            if mapped is None or (mapped.shape, mapped.dtype) != (value.shape, value.dtype):
                self._fresh.append((parameter, state, key))
            elif mapped is not value:
                state[key] = mapped.copy_(value)
        if sum(state[key].nbytes for _, state, key in self._fresh) >= AT_ONCE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Puts what is new into the file."""
        fresh, self._fresh = self._fresh, []
        mapped = self.files.add(
            [
                (f"{self._names.get(id(parameter), 'parameter')}.{key}", state[key])
                for parameter, state, key in fresh
            ]
        )
        for (parameter, state, key), tensor in zip(fresh, mapped, strict=True):
            state[key] = self._mapped[id(parameter), key] = tensor

    def give_back(self, parameter: Tensor, state: dict[str, Any]) -> None:
        """Puts the state into memory of its own."""
        for key, value in state.items():
            mapped = self._mapped.get((id(parameter), key))
            if mapped is not None and mapped is value:
                state[key] = mapped.clone()
