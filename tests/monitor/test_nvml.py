"""The driver's view: what it does not say is unknown with a reason, and never 0."""

from __future__ import annotations

import os

from memfit.monitor.nvml import NvmlSource
from memfit.monitor.samples import Sample
from monitor.fakes import GIB, FakeGpu, FakeNvml


def read(*gpus: FakeGpu, pids_are_ours: bool = True, second_version: bool = True) -> Sample:
    return NvmlSource(FakeNvml(*gpus, second_version=second_version), pids_are_ours=pids_are_ours).read(5.0)


def test_a_device_adds_up() -> None:
    (device,) = read(FakeGpu()).devices
    assert (device.label, device.name, device.driver) == ("gpu0", "NVIDIA H100 80GB HBM3", "580.65")
    assert device.reserved_bytes + device.used_bytes + device.free_bytes == device.total_bytes == 80 * GIB  # type: ignore[operator]
    assert device.busy_ratio == 0.5 and device.temperature_celsius == 41
    assert device.power_watts is None and device.unknown == {"power_watts": "driver: Not Supported"}


def test_an_older_driver_does_not_tell_its_own_share() -> None:
    (device,) = read(FakeGpu(), second_version=False).devices
    assert device.used_bytes == 31 * GIB and device.reserved_bytes is None
    assert "own share" in device.unknown["reserved_bytes"]


def test_unified_memory_is_unknown_with_the_reason() -> None:
    (device,) = read(FakeGpu(name="NVIDIA GB10", memory=False)).devices
    assert (device.total_bytes, device.used_bytes, device.free_bytes) == (None, None, None)
    assert device.unknown["used_bytes"] == "driver: Not Supported: with unified memory, look at the host's"


def test_mig_instances_follow_their_gpu() -> None:
    cut = FakeGpu(
        busy=None,
        instances=[
            FakeGpu(name="NVIDIA H100 MIG 1g.10gb", uuid="MIG-a", used=GIB, busy=None),
            FakeGpu(name="NVIDIA H100 MIG 3g.40gb", uuid="MIG-b", used=2 * GIB, busy=None),
        ],
    )
    whole, first, second = read(cut).devices
    assert [one.label for one in (whole, first, second)] == ["gpu0", "gpu0:1g.10gb#0", "gpu0:3g.40gb#1"]
    assert (first.used_bytes, second.used_bytes, second.key) == (GIB, 2 * GIB, "MIG-b")
    assert first.busy_ratio is None and "Not Supported" in first.unknown["busy_ratio"]


def test_processes_are_named_outside_containers_only() -> None:
    gpu = FakeGpu(processes=[(os.getpid(), 3 * GIB), (7, None)])
    (init, own) = read(gpu).processes
    assert own.pid == os.getpid() and own.name and own.used_bytes == 3 * GIB
    assert init.used_bytes is None and "single processes" in init.unknown["used_bytes"]
    inside = read(gpu, pids_are_ours=False).processes
    assert [one.name for one in inside] == [None, None]
    assert "container" in inside[0].unknown["name"]


def test_no_driver_is_a_note() -> None:
    class NoDriver(FakeNvml):
        def nvmlInit(self) -> None:
            raise RuntimeError("Driver Not Loaded")

    sample = NvmlSource(NoDriver()).read(5.0)
    assert sample.devices == () and sample.notes == ("no NVIDIA driver here (Driver Not Loaded)",)
    assert NvmlSource(FakeNvml()).read(5.0).notes == ("the driver shows no device",)
