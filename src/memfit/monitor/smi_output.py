"""What nvidia-smi printed somewhere, as a source: to see a machine that only its output came from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from memfit.formats.messages_devices import Device, Process, Reading, Slice
from memfit.formats.messages_nvidia_smi import read_output
from memfit.monitor.samples import DeviceSample, ProcessSample, Sample

MOST_BYTES = 8 << 20


class SmiOutput:
    """The devices and processes of one output (its table, CSV or XML).

    Args:
        reading: what the output says.
    """

    name = "nvidia-smi's output"

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def read(self, now_seconds: float) -> Sample:
        """The same at every reading. A partitioned GPU is its slices: its own figures are not theirs."""
        devices: list[DeviceSample] = []
        for place, device in enumerate(self._reading.devices):
            index = int(device.index) if device.index.isdigit() else place
            devices += [_slice(index, device, part) for part in device.slices] or [_device(index, device)]
        processes = [
            _process(one, devices) for one in self._reading.processes if one.pid is not None and devices
        ]
        notes = () if devices else ("the output has no device",)
        return Sample(
            time_seconds=now_seconds,
            devices=tuple(devices),
            processes=tuple(processes),
            notes=notes,
            ended=True,
        )

    def close(self) -> None:
        """Holds nothing open."""


def read_smi_output(path: Path) -> SmiOutput | None:
    """What is in a file; None where it is no output of nvidia-smi.

    Raises:
        InputError: it is its XML, and broken.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            return None
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    reading = read_output(text)
    return None if reading is None else SmiOutput(reading)


def _device(index: int, device: Device) -> DeviceSample:
    figures = {"total": device.total_bytes, "used": device.used_bytes, "free": device.free_bytes}
    return DeviceSample(
        index=index,
        uuid=device.uuid,
        name=device.name,
        driver=device.driver,
        total_bytes=device.total_bytes,
        used_bytes=device.used_bytes,
        free_bytes=device.free_bytes,
        busy_ratio=None if device.utilization_percent is None else device.utilization_percent / 100,
        temperature_celsius=device.temperature_celsius,
        unknown=_unknown(figures, device.unknown),
    )


def _slice(index: int, device: Device, part: Slice) -> DeviceSample:
    figures = {"total": part.total_bytes, "used": part.used_bytes, "free": part.free_bytes}
    return DeviceSample(
        index=index,
        name=device.name,
        driver=device.driver,
        mig=part.name or part.label,
        total_bytes=part.total_bytes,
        used_bytes=part.used_bytes,
        free_bytes=part.free_bytes,
        temperature_celsius=device.temperature_celsius,
        unknown={
            **_unknown(figures, {}),
            "busy_ratio": "a slice of a partitioned GPU (MIG) has no utilisation",
        },
    )


def _unknown(figures: Mapping[str, int | None], reasons: Mapping[str, str]) -> dict[str, str]:
    """Why figures are missing; one that the output simply lacks beside others needs no word."""
    said = next((reasons[name] for name in (*figures, "memory") if name in reasons), "")
    none = all(value is None for value in figures.values())
    general = said or ("not in the output" if none else "")
    missing = {name: reasons.get(name, general) for name, value in figures.items() if value is None}
    unknown = {f"{name}_bytes": reason for name, reason in missing.items() if reason}
    if "utilization" in reasons:
        unknown["busy_ratio"] = reasons["utilization"]
    return unknown


def _process(process: Process, devices: list[DeviceSample]) -> ProcessSample:
    """Of the device that it names by number or UUID; of the first where it names none."""
    own = [one for one in devices if process.gpu and process.gpu in (str(one.index), one.uuid)]
    known = process.name if process.name and not process.name.startswith("[") else None
    unknown = {} if process.used_bytes is not None else {"used_bytes": "not in the output"}
    if known is None:
        unknown["name"] = "nvidia-smi does not tell it here"
    return ProcessSample(
        device=(own or devices)[0].key,
        pid=process.pid or 0,
        name=known,
        used_bytes=process.used_bytes,
        unknown=unknown,
    )
