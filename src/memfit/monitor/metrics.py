"""Every metric that is exported: its name, kind, unit and meaning, in one table.

Names follow https://prometheus.io/docs/practices/naming/: one prefix, base units in the plural, ratios from 0
to 1, ``_total`` on counters, ``_info`` on metadata. Labels have few values: process numbers are only given on
request, and places of programs never.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

PREFIX = "memfit_"
DEVICE = ("gpu", "uuid", "mig")
RANK = ("gpu", "uuid", "job", "rank")

Kind = Literal["gauge", "counter", "info", "histogram", "summary"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One exported metric.

    Args:
        name: without the prefix, and without ``_total`` or ``_info``, which the kind adds.
        kind: of Prometheus's.
        help: one line.
        labels: in order.
        unit: the last word of the name, where it has one.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""

    @property
    def sample_name(self) -> str:
        """The name under which values appear and queries ask; of a histogram, the base of its names."""
        suffix = {"counter": "_total", "info": "_info"}.get(self.kind, "")
        return f"{PREFIX}{self.name}{suffix}"


def _bytes(name: str, text: str, labels: tuple[str, ...]) -> Metric:
    return Metric(name=f"{name}_bytes", kind="gauge", help=text, labels=labels, unit="bytes")


_TABLE = (
    Metric(name="device", kind="info", help="The GPU.", labels=("gpu", "uuid", "mig", "name", "driver")),
    _bytes("device_memory_total", "All memory of the GPU.", DEVICE),
    _bytes("device_memory_used", "Memory of the GPU that processes use.", DEVICE),
    _bytes("device_memory_free", "Memory of the GPU that nobody uses.", DEVICE),
    _bytes("device_memory_reserved", "Memory of the GPU that the driver keeps for itself.", DEVICE),
    Metric(name="device_busy_ratio", kind="gauge", labels=DEVICE, unit="ratio",
           help="Share of the last moment in which a kernel ran, 0 to 1."),
    Metric(name="device_temperature_celsius", kind="gauge", labels=DEVICE, unit="celsius",
           help="Temperature of the chip."),
    Metric(name="device_power_watts", kind="gauge", labels=DEVICE, unit="watts",
           help="Power that the GPU draws."),
    _bytes("untracked_memory", "Used on the GPU, but by no watched PyTorch allocator.", DEVICE),
    _bytes("account", "Parts of the GPU's memory that add up to its total.", (*DEVICE, "part")),
    _bytes("process_memory_used", "Memory of the GPU that a watched process uses, by the driver.", RANK),
    _bytes("context_memory",
           "Of it, what PyTorch's allocator has not reserved: CUDA context and libraries.", RANK),
    _bytes("allocator_allocated", "Blocks that hold tensors.", (*RANK, "pool")),
    _bytes("allocator_active", "Blocks that hold tensors, or wait for another stream.", RANK),
    _bytes("allocator_reserved", "Segments that PyTorch took from the GPU.", RANK),
    _bytes("allocator_requested", "What tensors asked for.", RANK),
    _bytes("allocator_inactive_split", "Free pieces of segments in use, which cannot be given back.", RANK),
    _bytes("allocator_allocated_peak",
           "Highest allocated bytes: of the last step, or of the whole run.",
           (*RANK, "window")),
    _bytes("allocator_largest_free_block", "Largest free piece in PyTorch's cache.", RANK),
    Metric(name="allocator_fragmentation_ratio", kind="gauge", labels=RANK, unit="ratio",
           help="Share of the free cache that is not its largest piece, 0 to 1."),
    Metric(name="allocator_segments", kind="gauge", labels=RANK,
           help="Segments that PyTorch took from the GPU."),
    Metric(name="allocator_live_blocks", kind="gauge", labels=RANK, help="Blocks in use."),
    Metric(name="allocator_alloc_retries", kind="counter", labels=RANK,
           help="Requests for which PyTorch emptied its cache."),
    Metric(name="allocator_ooms", kind="counter", labels=RANK,
           help="Out-of-memory errors, also those that were caught."),
    Metric(name="allocator_device_allocs", kind="counter", labels=RANK,
           help="Segments ever taken from the GPU."),
    Metric(name="allocator_device_frees", kind="counter", labels=RANK,
           help="Segments ever given back to the GPU."),
    Metric(name="allocator_allocated_since_start_bytes", kind="counter", labels=RANK, unit="bytes",
           help="All bytes that were ever allocated."),
    _bytes("category", "Requested bytes by what they are for.", (*RANK, "category")),
    Metric(name="step_peak_bytes", kind="histogram", labels=RANK, unit="bytes",
           help="Highest allocated bytes of each training step since the exporter began."),
    Metric(name="step_duration_seconds", kind="summary", labels=RANK, unit="seconds",
           help="Duration of training steps since the exporter began."),
    Metric(name="steps", kind="counter", labels=RANK, help="Training steps done."),
    Metric(name="growth_bytes_per_step", kind="gauge", labels=RANK,
           help="Growth of what is held at the end of a step; 0 where no trend is certain."),
    Metric(name="predicted_oom_seconds", kind="gauge", labels=RANK, unit="seconds",
           help="Time until memory is full at this growth; NaN where nothing grows."),
    Metric(name="rank_imbalance_ratio", kind="gauge", labels=("job",), unit="ratio",
           help="How far the largest of the ranks' peaks is above their median, as a share of it."),
    Metric(name="alerts_firing", kind="gauge", labels=("rule", "severity"), help="Alerts that are on."),
    Metric(name="alerts", kind="counter", labels=("rule",),
           help="Alerts that began since the exporter began."),
    _bytes("host_memory_total", "Main memory.", ()),
    _bytes("host_memory_available", "Main memory that can be had without swapping.", ()),
    _bytes("host_resident", "Resident memory of the watched processes.", ()),
    _bytes("host_pinned", "Page-locked memory of PyTorch's host allocator.", ()),
    _bytes("shm_used", "Used part of /dev/shm.", ()),
    _bytes("shm_total", "Size of /dev/shm.", ()),
    Metric(name="exporter_build", kind="info", labels=("version",), help="The exporter."),
    Metric(name="exporter_sample_age_seconds", kind="gauge", unit="seconds",
           help="How old the figures of this answer are."),
    Metric(name="exporter_poll_duration_seconds", kind="gauge", unit="seconds",
           help="How long the last reading of all sources took; a scrape takes none."),
    Metric(name="exporter_errors", kind="counter", help="Readings of a source that failed."),
)  # fmt: skip

METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _TABLE}
"""Every metric, by its name without the prefix."""

STEP_PEAK_BUCKETS = tuple(float(1 << power) for power in range(26, 39))
"""64 MiB to 256 GiB."""
