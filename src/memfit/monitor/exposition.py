"""A status as the text that Prometheus reads, in its classic form or OpenMetrics."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from memfit import __version__
from memfit.core.errors import CannotRunHere
from memfit.monitor.engine import Status
from memfit.monitor.metrics import METRICS, PREFIX, STEP_PEAK_BUCKETS, Metric
from memfit.monitor.quantities import untracked_bytes
from memfit.monitor.samples import AllocatorSample, DeviceSample, Step, device_of

Row = tuple[str, dict[str, str], float | None]
"""Name in `METRICS`, labels, value; None where it is not known, and then no series is written."""


@dataclass
class StepTotals:
    """Steps of one process, added up since the exporter began."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(STEP_PEAK_BUCKETS) + 1))
    peak_sum: float = 0.0
    seconds_count: int = 0
    seconds_sum: float = 0.0

    def add(self, step: Step) -> None:
        """Count one step."""
        if step.peak_bytes is not None:
            place = next(
                (n for n, top in enumerate(STEP_PEAK_BUCKETS) if step.peak_bytes <= top),
                len(STEP_PEAK_BUCKETS),
            )
            self.counts[place] += 1
            self.peak_sum += step.peak_bytes
        if step.seconds is not None:
            self.seconds_count += 1
            self.seconds_sum += step.seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper limit."""
        tops = [*(f"{top:.1f}" for top in STEP_PEAK_BUCKETS), "+Inf"]
        total, found = 0, []
        for top, count in zip(tops, self.counts, strict=True):
            total += count
            found.append((top, float(total)))
        return found


def render(
    status: Status,
    accept: str = "",
    *,
    steps: Mapping[str, StepTotals] | None = None,
    process_labels: bool = False,
    now_seconds: float | None = None,
) -> tuple[bytes, str]:
    """The answer to a scrape, and its content type.

    Args:
        status: what is known.
        accept: the request's header; OpenMetrics where it asks for it.
        steps: per process, what `StepTotals` added up.
        process_labels: whether ranks also have a ``pid`` label; it makes a new series with every restart.
        now_seconds: Unix time.

    Raises:
        CannotRunHere: prometheus-client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import choose_encoder
    except ImportError as error:
        raise CannotRunHere("prometheus-client is not installed: pip install 'memfit[web]'") from error

    class Once:
        """What is collected is this one status."""

        def collect(self) -> Iterable[Any]:
            return families

    families = list(_families(status, steps or {}, process_labels, now_seconds or time.time()))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Once())
    encode, content_type = choose_encoder(accept)
    content: bytes = encode(registry)
    return content, content_type


def _families(
    status: Status, steps: Mapping[str, StepTotals], process_labels: bool, now: float
) -> Iterator[Any]:
    from prometheus_client import core

    kinds = {"gauge": core.GaugeMetricFamily, "counter": core.CounterMetricFamily}
    rows: dict[str, list[Row]] = {}
    for row in _rows(status, process_labels, now):
        if row[2] is not None:
            rows.setdefault(row[0], []).append(row)
    for metric in METRICS.values():
        if metric.kind in ("histogram", "summary"):
            yield from _of_steps(metric, status, steps, process_labels)
        elif metric.kind == "info":
            family = core.InfoMetricFamily(PREFIX + metric.name, metric.help, labels=())
            for _, labels, _ in rows.get(metric.name, ()):
                family.add_metric((), labels)
            yield family
        else:
            names = (*metric.labels, *(("pid",) if process_labels and "rank" in metric.labels else ()))
            family = kinds[metric.kind](PREFIX + metric.name, metric.help, labels=names, unit=metric.unit)
            for _, labels, value in rows.get(metric.name, ()):
                assert value is not None
                family.add_metric([labels[name] for name in names], value)
            yield family


def _of_steps(
    metric: Metric, status: Status, steps: Mapping[str, StepTotals], process_labels: bool
) -> Iterator[Any]:
    from prometheus_client import core

    names = (*metric.labels, *(("pid",) if process_labels else ()))
    kind = core.HistogramMetricFamily if metric.kind == "histogram" else core.SummaryMetricFamily
    family: Any = kind(PREFIX + metric.name, metric.help, labels=names, unit=metric.unit)
    seen = set()
    for one in status.sample.allocators:
        totals = steps.get(one.process_key)
        if totals is None or one.process_key in seen:
            continue
        seen.add(one.process_key)
        values = [_rank_labels(one, process_labels)[name] for name in names]
        if metric.kind == "histogram":
            family.add_metric(values, totals.buckets(), totals.peak_sum)
        else:
            family.add_metric(values, totals.seconds_count, totals.seconds_sum)
    yield family


def _rows(status: Status, process_labels: bool, now: float) -> Iterator[Row]:
    sample = status.sample
    for device in sample.devices:
        yield from _of_device(device, status)
    for one in sample.allocators:
        if one.alive:
            yield from _of_allocator(one, status, _rank_labels(one, process_labels))
    for quantity in status.quantities:
        if quantity.name == "rank_imbalance_ratio":
            yield "rank_imbalance_ratio", {"job": quantity.subject}, quantity.value
    yield from _of_alerts(status)
    yield from _of_host(status)
    yield "exporter_build", {"version": __version__}, 1
    yield "exporter_sample_age_seconds", {}, max(0.0, now - sample.time_seconds)
    yield "exporter_poll_duration_seconds", {}, status.poll_seconds
    yield "exporter_errors", {}, status.errors


def _of_device(device: DeviceSample, status: Status) -> Iterator[Row]:
    labels = {"gpu": str(device.index), "uuid": device.uuid, "mig": device.mig}
    yield "device", {**labels, "name": device.name, "driver": device.driver}, 1
    for name in ("total", "used", "free", "reserved"):
        yield f"device_memory_{name}_bytes", labels, getattr(device, f"{name}_bytes")
    for name in ("busy_ratio", "temperature_celsius", "power_watts"):
        yield f"device_{name}", labels, getattr(device, name)
    yield "untracked_memory_bytes", labels, untracked_bytes(device, status.sample)
    for part in status.accounts.get(device.key, ()):
        yield "account_bytes", {**labels, "part": part.key}, part.held_bytes


def _rank_labels(one: AllocatorSample, process_labels: bool) -> dict[str, str]:
    labels = {"gpu": str(one.index), "uuid": one.uuid, "job": one.job, "rank": str(one.rank)}
    return {**labels, "pid": str(one.pid)} if process_labels else labels


_PLAIN = {
    "allocator_active_bytes": "active_bytes",
    "allocator_reserved_bytes": "reserved_bytes",
    "allocator_requested_bytes": "requested_bytes",
    "allocator_inactive_split_bytes": "inactive_split_bytes",
    "allocator_largest_free_block_bytes": "largest_free_bytes",
    "allocator_fragmentation_ratio": "fragmentation_ratio",
    "allocator_segments": "segments",
    "allocator_live_blocks": "live_blocks",
    "allocator_alloc_retries": "alloc_retries",
    "allocator_ooms": "ooms",
    "allocator_device_allocs": "device_allocs",
    "allocator_device_frees": "device_frees",
    "allocator_allocated_since_start_bytes": "allocated_total_bytes",
    "steps": "steps",
}
"""Metrics that are a figure of an allocator as it is."""


def _of_allocator(one: AllocatorSample, status: Status, labels: dict[str, str]) -> Iterator[Row]:
    for name, figure in _PLAIN.items():
        yield name, labels, getattr(one, figure)
    pools: Mapping[str, int | None] = one.allocated_by_pool or {"all": one.allocated_bytes}
    for pool, held in pools.items():
        yield "allocator_allocated_bytes", {**labels, "pool": pool}, held
    yield "allocator_allocated_peak_bytes", {**labels, "window": "step"}, one.step_peak_bytes
    yield "allocator_allocated_peak_bytes", {**labels, "window": "run"}, one.run_peak_bytes
    for category, held in one.by_category.items():
        yield "category_bytes", {**labels, "category": category}, held
    yield from _of_process(one, status, labels)
    trend = status.trends.get(one.key)
    if trend is not None:
        yield "growth_bytes_per_step", labels, trend.per_step.bytes_per_unit if trend.per_step else None
        seconds = trend.seconds_to_oom
        finite = math.nan if seconds is not None and math.isinf(seconds) else seconds
        yield "predicted_oom_seconds", labels, finite


def _of_process(one: AllocatorSample, status: Status, labels: dict[str, str]) -> Iterator[Row]:
    device = device_of(one, status.sample.devices)
    for process in status.sample.processes:
        if device is not None and process.device == device.key and process.pid == one.pid:
            yield "process_memory_used_bytes", labels, process.used_bytes
            if process.used_bytes is not None and one.reserved_bytes is not None:
                yield "context_memory_bytes", labels, max(0, process.used_bytes - one.reserved_bytes)


def _of_alerts(status: Status) -> Iterator[Row]:
    firing: dict[tuple[str, str], int] = {}
    for alert in status.firing:
        key = alert.rule.name, alert.rule.severity
        firing[key] = firing.get(key, 0) + 1
    for (rule, severity), count in firing.items():
        yield "alerts_firing", {"rule": rule, "severity": severity}, count
    for rule, count in status.fired_count.items():
        yield "alerts", {"rule": rule}, count


def _of_host(status: Status) -> Iterator[Row]:
    host = status.sample.host
    if host is None:
        return
    yield "host_memory_total_bytes", {}, host.total_bytes
    yield "host_memory_available_bytes", {}, host.available_bytes
    yield "host_resident_bytes", {}, host.rss_bytes
    yield "host_pinned_bytes", {}, host.pinned_bytes
    yield "shm_used_bytes", {}, host.shm_used_bytes
    yield "shm_total_bytes", {}, host.shm_total_bytes
