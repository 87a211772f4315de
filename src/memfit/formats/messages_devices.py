"""GPUs and processes as the tools that list them show them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Process(NamedTuple):
    """A process that holds memory of a device; None where the text does not say."""

    pid: int | None
    used_bytes: int | None
    name: str = ""
    gpu: str = ""


@dataclass(frozen=True, kw_only=True)
class Slice:
    """One MIG device: the part of a GPU that a job can be given."""

    index: str
    gpu_instance: str
    compute_instance: str
    total_bytes: int | None
    used_bytes: int | None
    free_bytes: int | None
    name: str = ""

    @property
    def label(self) -> str:
        """ "MIG device 0 (GI 10, CI 0)"."""
        instances = f" (GI {self.gpu_instance}, CI {self.compute_instance})" if self.gpu_instance else ""
        return f"MIG device {self.index}{instances}"


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU as nvidia-smi shows it.

    Attributes:
        index: as the text numbers it; empty where it does not.
        name: the product.
        total_bytes, used_bytes, free_bytes: None where unknown.
        unknown: what is unknown, with the tool's reason.
        mig: whether it is partitioned; None where the text does not say.
        slices: its parts, where they are listed.
        temperature_celsius, utilization_percent: None where unknown.
        mode: such as "E. Process" (only one process may use it).
    """

    index: str = ""
    name: str = ""
    uuid: str = ""
    total_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)
    mig: bool | None = None
    slices: tuple[Slice, ...] = ()
    temperature_celsius: int | None = None
    utilization_percent: int | None = None
    driver: str = ""
    mode: str = ""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """All that one output says."""

    devices: tuple[Device, ...] = ()
    processes: tuple[Process, ...] = ()
