"""A driver of our own making, and samples for tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from memfit.monitor.samples import AllocatorSample, DeviceSample, Sample

GIB = 1 << 30


class NotSupported(Exception):
    """As ``pynvml.NVMLError_NotSupported`` says it."""

    def __str__(self) -> str:
        return "Not Supported"


@dataclass
class FakeGpu:
    """One device of `FakeNvml`."""

    name: str = "NVIDIA H100 80GB HBM3"
    uuid: str = "GPU-1"
    reserved: int = 1 * GIB
    used: int = 30 * GIB
    free: int = 49 * GIB
    memory: bool = True
    busy: int | None = 50
    processes: list[tuple[int, int | None]] = field(default_factory=list)
    instances: list[FakeGpu] = field(default_factory=list)


class FakeNvml:
    """The functions of ``pynvml`` that are used, over made-up devices."""

    nvmlMemory_v2 = 2

    def __init__(self, *gpus: FakeGpu, second_version: bool = True) -> None:
        self.gpus = gpus
        self.second_version = second_version

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self.gpus[index]

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:
        return [int(bool(gpu.instances))] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: FakeGpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, place: int) -> FakeGpu:
        return gpu.instances[place]

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:
        return gpu.name

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu, version: int | None = None) -> Any:
        if not gpu.memory or (version and not self.second_version):
            raise NotSupported
        total = gpu.reserved + gpu.used + gpu.free
        if version:
            return SimpleNamespace(total=total, reserved=gpu.reserved, used=gpu.used, free=gpu.free)
        return SimpleNamespace(total=total, used=gpu.reserved + gpu.used, free=gpu.free)

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> Any:
        if gpu.busy is None:
            raise NotSupported
        return SimpleNamespace(gpu=gpu.busy)

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, sensor: int) -> int:
        return 41

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> int:
        raise NotSupported

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in gpu.processes]

    def nvmlDeviceGetGraphicsRunningProcesses(self, gpu: FakeGpu) -> list[Any]:
        return []


class FakeSource:
    """Gives prepared samples, one a reading; the last one again and again."""

    name = "fake"

    def __init__(self, *samples: Sample) -> None:
        self.samples = list(samples)

    def read(self, now_seconds: float) -> Sample:
        return self.samples.pop(0) if len(self.samples) > 1 else self.samples[0]

    def close(self) -> None: ...


def a_rank(rank: int = 0, **figures: Any) -> AllocatorSample:
    """A rank of a job of two on a GPU of its own; 10 of 16 GiB reserved are tensors."""
    usual: dict[str, Any] = {
        "requested_bytes": 10 * GIB - 1000,
        "allocated_bytes": 10 * GIB,
        "active_bytes": 11 * GIB,
        "reserved_bytes": 16 * GIB,
        "inactive_split_bytes": 2 * GIB,
        "allocated_by_pool": {"small": 1 * GIB, "large": 9 * GIB},
        "allocated_peak_bytes": 12 * GIB,
        "run_peak_bytes": 13 * GIB,
        "alloc_retries": 0,
        "ooms": 0,
        "steps": 7,
        "free_cached_bytes": 4 * GIB,
        "largest_free_bytes": 1 * GIB,
        "job": "train",
        "rank": rank,
        "local_rank": rank,
        "world_size": 2,
        "pid": 100 + rank,
        "host": "node",
        "index": rank,
        "uuid": f"GPU-{rank}",
    }
    return AllocatorSample(**{**usual, **figures})


def a_gpu(index: int = 0, **figures: Any) -> DeviceSample:
    """A GPU of 80 GiB: 1 for the driver, 30 used, 49 free."""
    usual: dict[str, Any] = {
        "total_bytes": 80 * GIB,
        "used_bytes": 30 * GIB,
        "free_bytes": 49 * GIB,
        "reserved_bytes": 1 * GIB,
        "busy_ratio": 0.5,
    }
    return DeviceSample(
        index=index, uuid=f"GPU-{index}", name="NVIDIA H100", driver="580.65", **{**usual, **figures}
    )
