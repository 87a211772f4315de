"""What a lever is beside recomputation: settings of a technique, how exact they leave a step, and what they
are expected to hold and cost, from the captured step alone.

Expectations only say which levers are worth a run. What a lever really holds is measured with the technique
applied; what its copies to the host and its steps there take stays a prediction, as no such thing runs here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from memfit.capture.graph import StepGraph, Storage
from memfit.core.devices import GPU
from memfit.core.exactness import Exactness
from memfit.planning.figures import Settings

Axis = Literal["state", "gradients", "precision", "activations", "parameters"]
"""What of a step a lever changes; two of one axis do not go together."""

LINK_SHARE = 0.8
"""Of the host link's nominal rate that copies of pinned memory reach (25 of 31.5 GB/s on PCIe 4.0)."""
OVERLAP_SHARE = 0.8
"""Of the time of the operators beside which copies may run."""
COPY_BANDWIDTH_SHARE = 0.8
"""Of the device's memory bandwidth that a kernel which only moves bytes reaches."""
HOST_BYTES_PER_SECOND = 20e9
"""What an operator of PyTorch moves in host memory; two channels of DDR4-3200 have 51 GB/s at most."""
HOST_STEP_BYTES = 80
"""Bytes that Adam's step on the host reads and writes for each fp32 parameter, operator by operator."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a lever is expected to change of a step's time, and the host memory that it needs.

    Attributes:
        device_seconds: by how much the operators on the device take longer (negative: less).
        host_seconds: of what the operators' own times do not show: copies that nothing hides, and steps on
            the host.
        host_bytes: pinned and other memory of the host.
    """

    device_seconds: float = 0.0
    host_seconds: float = 0.0
    host_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class LeverKind:
    """One lever.

    Attributes:
        name: as plans are called by it.
        axis: see `Axis`.
        exactness: what the technique states for a model on a GPU.
        settings: of the technique.
        storages: those of the step under the lever. The step's ``meta`` has the names of its ``blocks`` and
            into how many ``micro_batches`` it is cut.
        cost: from the step, the seconds of its operators, and the GPU.
        apart: names of levers that it does not go with.
        whole_batch: whether it needs the batch in one piece, and gradients that nothing scales.
    """

    name: str
    axis: Axis
    exactness: Exactness
    settings: Settings
    storages: Callable[[StepGraph], Iterable[Storage]]
    cost: Callable[[StepGraph, Sequence[float], GPU], Cost]
    apart: tuple[str, ...] = ()
    whole_batch: bool = False

    def on(self, graph: StepGraph) -> StepGraph:
        """The step as it is expected to be under the lever."""
        return replace(graph, storages=tuple(self.storages(graph)))


def link_seconds(size_bytes: int, gpu: GPU) -> float:
    """Of a copy from or to pinned host memory."""
    return size_bytes / (gpu.host_link_bytes_per_second * LINK_SHARE)


def copy_seconds(size_bytes: int, gpu: GPU) -> float:
    """What a copy costs the device's own memory, which it reads or writes once beside what it is from."""
    return 2 * size_bytes / (gpu.bandwidth_bytes_per_second * COPY_BANDWIDTH_SHARE)


def exposed(seconds: float, beside: float) -> float:
    """What is left of copies' ``seconds`` when they run beside operators that take ``beside``."""
    return max(seconds - OVERLAP_SHARE * beside, 0.0)


def phase_seconds(graph: StepGraph, seconds: Sequence[float], *phases: str) -> float:
    """Of the operators of these phases."""
    return sum(seconds[op.index] for op in graph.ops if op.phase in phases)


def trained_bytes(graph: StepGraph) -> int:
    """Of the parameters that have a gradient, each storage once."""
    names = {s.name for s in graph.storages if s.category == "gradient"}
    return sum(s.size_bytes for s in graph.storages if s.category == "parameter" and s.name in names)


def state_bytes(graph: StepGraph) -> int:
    """Of the optimizer's state."""
    return sum(s.size_bytes for s in graph.storages if s.category == "optimizer_state")
