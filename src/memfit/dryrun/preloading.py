"""Imports for the worker process: modules that ask what the GPU is get its answer without starting CUDA.

torchao, which transformers imports where it is installed, chooses kernels by the device's capability as soon
as it is imported. PyTorch starts CUDA to answer that, and what has started CUDA cannot be forked from.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from memfit.core.errors import CannotRunHere, ToolFailure

_COUNTED_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With it `torch.cuda.is_available` asks NVML; the CUDA runtime's answer would forbid forks as well."""
_ASKED = ("current_device", "get_device_capability", "get_device_properties")


@dataclass(frozen=True, kw_only=True)
class DeviceProperties:
    """What `torch.cuda.get_device_properties` tells, as far as it is known before CUDA has started."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    warp_size: int = 32


@dataclass
class Preload:
    """Modules that were imported, and whether what they are now depends on the GPU's capability."""

    asked: list[str] = field(default_factory=list)

    @property
    def bound_to(self) -> str | None:
        """The capability that an import has asked for, as in ``MEMFIT_GPU_CC``; None where none has."""
        return os.environ["MEMFIT_GPU_CC"] if self.asked else None

    def load(self, names: Sequence[str]) -> None:
        """Imports the modules in order; those with ``?`` may be missing.

        Raises:
            CannotRunHere: A module cannot be imported.
            ToolFailure: An import started CUDA all the same.
        """
        for name in names:
            with self._answering(sys.modules.get("torch")), _quiet():
                try:
                    importlib.import_module(name.removeprefix("?"))
                except ImportError as problem:
                    if not name.startswith("?"):
                        raise CannotRunHere(f"{name} cannot be imported: {problem}") from None
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            raise ToolFailure(
                f"importing {', '.join(names)} initialised CUDA, so no dry run can be forked from here"
            )

    @contextlib.contextmanager
    def _answering(self, torch: ModuleType | None) -> Iterator[None]:
        if torch is None or "MEMFIT_GPU_CC" not in os.environ:
            yield
            return
        device = _described()
        answers: dict[str, Any] = {
            "current_device": 0,
            "get_device_capability": (device.major, device.minor),
            "get_device_properties": device,
        }
        before = {name: getattr(torch.cuda, name) for name in _ASKED}
        for name, value in answers.items():
            setattr(torch.cuda, name, self._answer(name, value))
        counted = os.environ.get(_COUNTED_BY_NVML)
        os.environ[_COUNTED_BY_NVML] = "1"
        try:
            yield
        finally:
            del os.environ[_COUNTED_BY_NVML]
            if counted is not None:
                os.environ[_COUNTED_BY_NVML] = counted
            for name, function in before.items():
                setattr(torch.cuda, name, function)

    def _answer(self, name: str, value: Any) -> Any:
        def answer(device: Any = None) -> Any:
            self.asked.append(name)
            return value

        return answer


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch tells the authors of libraries: torchao registers types by a form that is ending."""
    logger = logging.getLogger("torch.utils._pytree")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _described() -> DeviceProperties:
    capability = os.environ["MEMFIT_GPU_CC"]
    return DeviceProperties(
        name=os.environ["MEMFIT_GPU_NAME"],
        major=int(capability[:-1]),
        minor=int(capability[-1]),
        total_memory=int(os.environ["MEMFIT_GPU_TOTAL_BYTES"]),
        multi_processor_count=int(os.environ["MEMFIT_GPU_SM_COUNT"]),
    )
