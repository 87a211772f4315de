"""Devices and their processes as NVIDIA's driver sees them (NVML); no CUDA context is made.

What the driver does not say is unknown, with its reason. Three cases that other tools show as 0:
unified memory (GB10: memory is "Not Supported"), MIG instances (no utilisation), and processes in a
container, whose numbers are the host's.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from memfit.monitor.samples import DeviceSample, ProcessSample, Sample

_FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""Linux's constant name of the namespace that processes are in outside containers (PROC_PID_INIT_INO)."""


class NvmlSource:
    """Reads every device, MIG instance and process that the driver shows.

    Args:
        library: a module like ``pynvml``; that one where not given.
        pids_are_ours: whether the driver's process numbers mean processes of this machine's view; found out
            where not given (inside a container they do not).
    """

    name = "NVML"

    def __init__(self, library: Any = None, *, pids_are_ours: bool | None = None) -> None:
        self._library = library
        self._pids_are_ours = _in_first_pid_namespace() if pids_are_ours is None else pids_are_ours
        self._started = False
        self._pid_that_started = 0
        self._driver = ""
        self._still: dict[str, tuple[str, str]] = {}

    def read(self, now_seconds: float) -> Sample:
        """Every device and process; a note where there is no driver."""
        reason = self._start()
        if reason:
            return Sample(time_seconds=now_seconds, notes=(reason,))
        devices: list[DeviceSample] = []
        processes: list[ProcessSample] = []
        for index, handle, mig in self._handles():
            device = self._device(index, handle, mig)
            devices.append(device)
            processes += self._processes(handle, device)
        notes = ("the driver shows no device",) if not devices else ()
        return Sample(
            time_seconds=now_seconds, devices=tuple(devices), processes=tuple(processes), notes=notes
        )

    def close(self) -> None:
        """Let go of the driver."""
        if self._started and self._pid_that_started == os.getpid():
            with contextlib.suppress(Exception):
                self._library.nvmlShutdown()
        self._started = False

    def _start(self) -> str:
        """Why the driver cannot be asked, or nothing. A fork starts anew."""
        if self._started and self._pid_that_started == os.getpid():
            return ""
        try:
            if self._library is None:
                import pynvml

                self._library = pynvml
            self._library.nvmlInit()
        except ImportError:
            return "no driver was asked: nvidia-ml-py is not installed (pip install nvidia-ml-py)"
        except Exception as error:  # noqa: BLE001  # pynvml raises classes of its own, made at run time
            return f"no NVIDIA driver here ({_text(error)})"
        self._started, self._pid_that_started = True, os.getpid()
        self._driver = self._ask(self._library.nvmlSystemGetDriverVersion).text
        return ""

    def _handles(self) -> Iterator[tuple[int, Any, str]]:
        """Index, handle and MIG profile of every device; the instances of a GPU follow it."""
        nvml = self._library
        count = self._ask(nvml.nvmlDeviceGetCount).value or 0
        for index in range(count):
            got = self._ask(nvml.nvmlDeviceGetHandleByIndex, index)
            if got.value is None:
                continue
            yield index, got.value, ""
            mode = self._ask(nvml.nvmlDeviceGetMigMode, got.value).value
            if not mode or mode[0] != 1:
                continue
            for place in range(self._ask(nvml.nvmlDeviceGetMaxMigDeviceCount, got.value).value or 0):
                instance = self._ask(nvml.nvmlDeviceGetMigDeviceHandleByIndex, got.value, place).value
                if instance is not None:
                    yield index, instance, self._profile(instance, place)

    def _profile(self, instance: Any, place: int) -> str:
        """``"1g.10gb"`` of a MIG instance's name, with its number, as two may have one profile."""
        name = self._ask(self._library.nvmlDeviceGetName, instance).text
        words = name.split("MIG ", 1)
        return f"{words[1]}#{place}" if len(words) == 2 else f"mig#{place}"

    def _device(self, index: int, handle: Any, mig: str) -> DeviceSample:
        nvml = self._library
        figures: dict[str, Any] = {}
        unknown: dict[str, str] = {}

        def note(name: str, answer: _Answer, scale: float | None = None) -> None:
            if answer.value is None:
                unknown[name] = answer.reason
            else:
                figures[name] = answer.value if scale is None else answer.value * scale

        memory = self._memory(handle)
        for name in ("total_bytes", "used_bytes", "free_bytes", "reserved_bytes"):
            note(name, memory[name])
        busy = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        note("busy_ratio", _Answer(busy.value and busy.value.gpu, busy.reason), 0.01)
        note("temperature_celsius", self._ask(nvml.nvmlDeviceGetTemperature, handle, 0), 1.0)
        note("power_watts", self._ask(nvml.nvmlDeviceGetPowerUsage, handle), 0.001)
        uuid, name = self._names(handle, f"{index}/{mig}")
        return DeviceSample(
            index=index, uuid=uuid, name=name, driver=self._driver, mig=mig, **figures, unknown=unknown
        )

    def _names(self, handle: Any, key: str) -> tuple[str, str]:
        """UUID and model, asked once: they do not change."""
        if key not in self._still:
            uuid = self._ask(self._library.nvmlDeviceGetUUID, handle)
            self._still[key] = uuid.text, self._ask(self._library.nvmlDeviceGetName, handle).text
        return self._still[key]

    def _memory(self, handle: Any) -> dict[str, _Answer]:
        """The second version of the call tells the driver's own share; the first has it in ``used``."""
        nvml = self._library
        version = getattr(nvml, "nvmlMemory_v2", None)
        answer = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle, version) if version else _Answer(None, "")
        whole = answer if answer.value is not None else self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        reason = whole.reason
        if whole.value is None and "support" in reason.lower():
            reason = f"{reason}: with unified memory, look at the host's"
        found = {
            f"{name}_bytes": _Answer(None if whole.value is None else int(getattr(whole.value, name)), reason)
            for name in ("total", "used", "free")
        }
        own = getattr(answer.value, "reserved", None) if answer.value is not None else None
        found["reserved_bytes"] = _Answer(own, reason or "this driver does not tell its own share apart")
        return found

    def _processes(self, handle: Any, device: DeviceSample) -> list[ProcessSample]:
        nvml = self._library
        held: dict[int, Any] = {}
        for ask in (nvml.nvmlDeviceGetGraphicsRunningProcesses, nvml.nvmlDeviceGetComputeRunningProcesses):
            for process in self._ask(ask, handle).value or ():
                held[int(process.pid)] = process.usedGpuMemory
        return [self._process(device.key, pid, used) for pid, used in sorted(held.items())]

    def _process(self, device: str, pid: int, used: int | None) -> ProcessSample:
        unknown = {}
        if used is None:
            unknown["used_bytes"] = "the driver does not tell what single processes use here"
        name = _process_name(pid) if self._pids_are_ours else None
        if name is None:
            unknown["name"] = (
                "no longer there, or another user's"
                if self._pids_are_ours
                else "this is a container, and the driver tells the host's process numbers"
            )
        return ProcessSample(
            device=device, pid=pid, name=name, used_bytes=None if used is None else int(used), unknown=unknown
        )

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> _Answer:
        try:
            return _Answer(call(*arguments), "")
        except Exception as error:  # noqa: BLE001  # pynvml raises classes of its own, made at run time
            return _Answer(None, f"driver: {_text(error)}")


@dataclass(frozen=True)
class _Answer:
    """What the driver said, or why it did not."""

    value: Any
    reason: str

    @property
    def text(self) -> str:
        value = self.value
        return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")


def _text(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _in_first_pid_namespace() -> bool:
    try:
        return os.readlink("/proc/self/ns/pid") == _FIRST_PID_NAMESPACE
    except OSError:
        return True


def _process_name(pid: int) -> str | None:
    import psutil

    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return None
